"""Settings for fine-tuning that fit the GPUs: the formulas of docs/training.md over the sizes that `qconv plan` has.

Training is data parallel: every GPU holds a replica, or its ZeRO share of one, and its own micro-batch.
"""
from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Collection, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ._command import Parser, warnings_said
from ._folders import write_text
from ._program import StrPath, answer, size
from .errors import CheckError, InputError, UsageError
from .results import Hardware, Json, Plan, TrainingPlan

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import PlanOptions

METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "adam8bit": "8-bit Adam", "sgd": "SGD"}
PRECISIONS = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes
# What may be asked of settings: names, or numbers of a range.
ASKED: Dict[str, Collection[Any]] = {
    "method": METHODS, "optimizer": OPTIMIZERS, "precision": PRECISIONS, "zero": range(4),
    "checkpointing": ("on", "off"), "lora_rank": range(1, 65537), "effective_batch": range(1, 10 ** 9 + 1)}
# Options of `qconv plan` that say what the model becomes and where it is to run: those with a value, and switches.
TAKEN = ("to", "format", "activation-bits", "block-size", "rest", "lora", "keep", "quantize", "recipe", "experts",
         "schemes", "vram", "margin", "context", "cuda-context")
SWITCHES = ("no-double-quant", "split-fused", "requantize", "drop-mtp")
REPEATED = ("lora", "keep", "quantize")

ADAPTER_BYTES = 4            # peft holds adapters in float32
ZERO_BUCKET_ELEMS = 500000000  # the default of DeepSpeed's reduce_bucket_size
BATCH_BYTES = 24             # ids, mask and labels of a token, 8 bytes each
LOSS_BYTES = 12              # a logit: log-softmax, its gradient and the logit's, in float32
LAYER_ADAPTERS = 7           # q, k, v, o, gate, up, down
STATE_BLOCK = 256            # 8-bit states: bytes that share a float32 absmax
CONTEXT_BYTES = 500000000    # the program's --cuda-context, for a GPU that holds nothing
WHOLE = " each; each holds the whole model, or with ZeRO-3 (FSDP's FULL_SHARD) a share of it"
SHORTEST = 128               # tokens; shorter sequences are not proposed


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Model:
    """What the formulas need to know of a model; the lower ones are `model_shape` of `qconv plan --json -v`."""
    parameters: int
    quantized_bytes: int  # all tensors as the plan writes them, which are the base of QLoRA
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    linear_sides: int     # sum of rows + columns over the linear weights: what rank 1 costs
    largest_linear: int   # elements
    largest_layer: int    # parameters


@dataclass(frozen=True)
class Place:
    """The machine, and the tokens of one sequence."""
    gpus: int
    budget: int   # bytes of the smallest GPU that may be used
    context: int  # bytes of the CUDA context
    tokens: int


@dataclass(frozen=True)
class Setting:
    """A way to train. `bytes` are those of each GPU at micro_batch, or at 1 where not even that fits."""
    method: str
    optimizer: str
    precision: str
    zero: int
    checkpointing: bool
    rank: int
    micro_batch: int = 0
    accumulation: int = 0
    bytes: Dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def full(self) -> bool:
        return self.method == "full"

    @property
    def width(self) -> int:
        return PRECISIONS[self.precision]

    def trained(self, m: Model) -> int:
        """Parameters that are trained: all of them, or those of the adapters."""
        return m.parameters if self.full else m.linear_sides * self.rank

    def label(self) -> str:
        return "%s%s, %s, %s%s%s" % (METHODS[self.method], "" if self.full else " r%d" % self.rank, self.precision,
                                     OPTIMIZERS[self.optimizer], ", checkpointing" if self.checkpointing else "",
                                     ", ZeRO-%d" % self.zero if self.zero else "")


# ---- the terms ----


def layer_token_bytes(m: Model, s: Setting) -> int:
    """What one layer keeps of one token for the backward pass. A frozen linear weight keeps nothing; its adapter keeps
    its input in float32, and where that is a conversion, every adapter keeps a copy of its own."""
    w, h, wide, queries, keys = s.width, m.hidden, m.intermediate, m.heads * m.head_dim, m.kv_heads * m.head_dim
    kept = w * (2 * queries + 2 * keys) + 4 * m.heads + 8 * h
    if s.full:
        return kept + 4 * w * (h + wide)
    kept += 3 * w * wide + s.rank * LAYER_ADAPTERS * 4
    if w == ADAPTER_BYTES:  # the attention's output is counted already
        return kept + w * (2 * h + wide)
    return kept + ADAPTER_BYTES * (5 * h + queries + wide)


def activation_bytes(m: Model, s: Setting, tokens: int) -> int:
    """The peak is either at the loss, where the activations of all layers meet the logits, or in the last layer, whose
    gradients take the most in the MLP."""
    w, h, wide, layer = s.width, m.hidden, m.intermediate, layer_token_bytes(m, s)
    kept = m.layers * (h * w if s.checkpointing else layer)
    loss = h * (4 + 2 * w if s.full else 4) + m.vocab * (LOSS_BYTES + w)
    inside = 2 * w * wide + w * h if s.full else (2 * w + ADAPTER_BYTES) * wide + 6 * w * h
    inside += m.vocab * w + (layer if s.checkpointing else 0)
    return tokens * (kept + max(loss, inside))


def workspace_bytes(m: Model, s: Setting, gpus: int) -> int:
    trained = s.trained(m)
    found = 2 * m.largest_linear if s.method == "qlora" else 0
    if gpus > 1 and s.zero == 0:  # buckets of the gradients lie beside them
        found += trained * (s.width if s.full else ADAPTER_BYTES)
    if gpus > 1 and s.zero >= 1:
        found += min(trained, ZERO_BUCKET_ELEMS) * s.width
    if gpus > 1 and s.zero == 3:  # the layer that computes and the one being fetched
        found += 2 * m.largest_layer * s.width
    return found


def estimate(m: Model, s: Setting, place: Place, micro_batch: int) -> Dict[str, int]:
    """The bytes of each GPU, by term, and their total."""
    trained, tokens, gpus = s.trained(m), micro_batch * place.tokens, place.gpus
    base = m.quantized_bytes if s.method == "qlora" else m.parameters * s.width
    trained_width = s.width if s.full else ADAPTER_BYTES
    # When training is in 16 bits, the optimizer keeps a float32 copy to add small steps to.
    master = 4 * trained if trained_width == 2 else 0
    # Adam has two states a parameter, in float32, or in 8 bits with an absmax per block; SGD with momentum has one.
    states = 2 * trained + 8 * (trained // STATE_BLOCK + 1) if s.optimizer == "adam8bit" else \
        (4 if s.optimizer == "sgd" else 8) * trained
    terms = {
        "parameters": (ceil_div(base, gpus) if s.zero == 3 else base) + (0 if s.full else ADAPTER_BYTES * trained),
        "gradients": ceil_div(trained * trained_width, gpus if s.zero >= 2 else 1),
        "optimizer": ceil_div(master + states, gpus if s.zero >= 1 else 1),
        "activations": activation_bytes(m, s, tokens),
        "batch_data": tokens * BATCH_BYTES,
        "workspace": workspace_bytes(m, s, gpus),
        "context": place.context,
    }
    return {**terms, "total": sum(terms.values())}


# ---- the search ----


def bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number that fits, where low does and high does not."""
    while high - low > 1:
        middle = low + (high - low) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(m: Model, s: Setting, place: Place, effective: int) -> int:
    """The largest micro-batch that fits, at most what the effective batch asks for; 0: not even 1 does."""
    def fits(micro: int) -> bool:
        return estimate(m, s, place, micro)["total"] <= place.budget
    high = ceil_div(effective, place.gpus)
    return high if fits(high) else bisect(fits, 0, high)


@dataclass(frozen=True)
class Wish:
    """What was asked for; None: tried."""
    method: Optional[str]
    optimizer: Optional[str]
    precision: str
    zero: Optional[int]
    checkpointing: Optional[bool]
    lora_rank: int
    effective_batch: int

    def tried(self, method: str, gpus: int) -> List[Setting]:
        """Settings of a method, from what costs least time to what costs most: no recomputation first, then the lower
        ZeRO stage, then the exact optimizer. bitsandbytes' 4-bit weights are not divided by ZeRO-3."""
        last = 0 if gpus == 1 else 2 if method == "qlora" else 3
        stages = range(last + 1) if self.zero is None else [self.zero]
        return [Setting(method, optimizer, self.precision, zero, checkpointing, self.lora_rank)
                for checkpointing in ([False, True] if self.checkpointing is None else [self.checkpointing])
                for zero in stages
                for optimizer in ([self.optimizer] if self.optimizer else ["adamw", "adam8bit"])]


def settings(m: Model, wish: Wish, place: Place) -> List[Setting]:
    """For every method: the first setting that fits, then the one with the largest micro-batch if that is another.
    Where nothing fits, the one that is least over."""
    found: List[Setting] = []
    for method in [wish.method] if wish.method else METHODS:
        tried = []
        for s in wish.tried(method, place.gpus):
            micro = largest_batch(m, s, place, wish.effective_batch)
            steps = ceil_div(ceil_div(wish.effective_batch, place.gpus), micro or 1)
            tried.append(dataclasses.replace(s, micro_batch=micro, accumulation=steps,
                                             bytes=estimate(m, s, place, micro or 1)))
        fitting = [s for s in tried if s.micro_batch]
        if not fitting:
            found.append(min(tried, key=lambda s: s.bytes["total"]))
            continue
        found.append(fitting[0])
        widest = max(fitting, key=lambda s: s.micro_batch)
        if widest.micro_batch > fitting[0].micro_batch:
            found.append(widest)
    return found


@dataclass(frozen=True)
class Found:
    place: Place
    settings: List[Setting]
    too_long: int  # tokens with which nothing fits: what was asked for, or the default; 0: something does
    longest: int   # beside too_long: the most tokens with which something fits; 0: none

    @property
    def chosen(self) -> Optional[Setting]:
        return next((s for s in self.settings if s.micro_batch), None)


def find(m: Model, wish: Wish, place: Place, shorten: bool) -> Found:
    """Settings for what was asked for. If nothing fits, the longest sequences with which something does are looked for,
    as memory only grows with them; `shorten` halves the default until something fits."""
    def at(tokens: int) -> Found:
        there = dataclasses.replace(place, tokens=tokens)
        return Found(there, settings(m, wish, there), 0, 0)
    asked = at(place.tokens)
    if asked.chosen:
        return asked
    longest = bisect(lambda tokens: at(tokens).chosen is not None, 0, place.tokens)
    longest = longest if longest >= SHORTEST else 0
    tokens = place.tokens
    while shorten and longest and tokens > longest:
        tokens //= 2
    return dataclasses.replace(at(tokens), too_long=place.tokens, longest=longest)


# ---- what was asked ----


def _wish(**asked: Any) -> Wish:
    """The members of ASKED as they were given. Raises UsageError for other values than those."""
    found: Dict[str, Any] = {}
    for name, allowed in ASKED.items():
        value, option = asked[name], name.replace("_", "-")
        if isinstance(value, bool):
            value = "on" if value else "off"
        if isinstance(allowed, range) and value is not None:
            try:
                number: Optional[int] = int(value)
            except ValueError:
                number = None
            if number not in allowed:
                raise UsageError("--%s: expected a whole number from %d to %d, found '%s'" % (
                    option, allowed.start, allowed.stop - 1, value))
            value = number
        elif value is not None and value not in allowed:
            raise UsageError("--%s: expected %s, found '%s'" % (option, " or ".join(map(str, allowed)), value))
        found[name] = value
    on = found["checkpointing"]
    return Wish(**dict(found, precision=found["precision"] or "", checkpointing=None if on is None else on == "on"))


def _place(plan: Plan, context_given: bool) -> Tuple[Place, List[str]]:
    """The GPUs of a plan, and the names of those of their cards that are known."""
    gpus = [d for d in plan.devices if d.name.startswith("cuda:")]
    if not gpus:
        raise UsageError("a plan for training needs a GPU in --vram, found '%s'" % plan.vram)
    smallest = min(d.total_bytes or 0 for d in gpus)
    context = max(d.context_bytes for d in gpus) or (0 if context_given else CONTEXT_BYTES)
    return (Place(len(gpus), int(smallest * plan.margin), context, plan.context or 8192),
            sorted({d.card for d in gpus if d.card}))


def plan_training(model: StrPath, *, method: Optional[str] = None, optimizer: Optional[str] = None,
                  precision: Optional[str] = None, zero: Union[None, int, str] = None,
                  checkpointing: Union[None, bool, str] = None, lora_rank: Union[int, str] = 16,
                  effective_batch: Union[int, str] = 32, apply: Optional[StrPath] = None,
                  **options: Unpack[PlanOptions]) -> TrainingPlan:
    """Finds settings for fine-tuning that fit the GPUs of `vram`, in bytes per GPU (docs/training.md).

    model            what `plan` takes
    method           "full", "lora" or "qlora": how the model is trained; None: all are tried
    optimizer        "adamw", "adam", "adam8bit" or "sgd": whose states are counted; None: adamw, or adam8bit where it helps
    precision        "bf16", "fp16" or "fp32", of the computation; 16 bits come with float32 master weights; None: bf16, or
                     fp16 on Volta and Turing
    zero             the ZeRO stage over the GPUs, 0 to 3; None: all are tried
    checkpointing    "on": only the inputs of layers are kept, and the rest is computed again, or "off"; None: both are tried
    lora_rank        the rank of the adapters of every linear layer
    effective_batch  how many sequences one optimizer step has over all GPUs, with accumulation
    apply            a folder that gets the first setting that fits as accelerate.json and ds_config.json

    `options` are those of `plan` that say what the model becomes and where it is to run.

    Raises as `plan` does, and CheckError if `apply` wants a setting and none fits."""
    wish = _wish(method=method, optimizer=optimizer, precision=precision, zero=zero, checkpointing=checkpointing,
                 lora_rank=lora_rank, effective_batch=effective_batch)
    return _answer(model, wish, apply, options)


def _answer(model: StrPath, wish: Wish, apply: Optional[StrPath], options: Mapping[str, Any]) -> TrainingPlan:
    refused = [key for key in options if key.rstrip("_").replace("_", "-") not in TAKEN + SWITCHES]
    if refused:
        raise UsageError("%s is no option of a plan for training" % ", ".join(refused))
    if apply is not None and os.path.exists(apply) and not os.path.isdir(apply):
        raise UsageError("--apply %s: expected a folder, found a file" % os.fspath(apply))
    plan = answer(Plan, "plan", [model], options, more=["-v"])
    if plan.to == "keep" and not options.get("to"):
        try:  # the base of QLoRA is NF4 where that can be made, also of a model that has 4 bits already
            plan = answer(Plan, "plan", [model], {**options, "to": "nf4"}, more=["-v"])
        except InputError:
            pass
    place, cards = _place(plan, options.get("cuda_context") is not None)
    if wish.zero and place.gpus == 1:
        raise UsageError("--zero %d divides states over several GPUs, but --vram names one; use --zero 0" % wish.zero)
    if wish.zero == 3 and wish.method == "qlora":
        raise UsageError("--zero 3 does not divide 4-bit weights; expected --zero 0 to 2 with --method qlora")
    if not wish.precision:
        # Cards before Ampere have no bfloat16.
        old = any(answer(Hardware, "hardware", [], {"as_": card}).json["gpus"][0]["sm"] < 80 for card in cards)
        wish = dataclasses.replace(wish, precision="fp16" if old else "bf16")
    m = Model(plan.parameters, plan.weight_bytes, **plan.json["model_shape"])
    if m.layers == 0 or m.parameters == 0:
        raise InputError("%s: a plan for training needs a config.json that gives the model's layers" % plan.model)
    found = find(m, wish, place, options.get("context") is None)
    place, gpus = found.place, found.place.gpus
    result = TrainingPlan.from_json({
        "command": "plan", "mode": "train", "model": plan.model, "parameters": m.parameters, "context": place.tokens,
        "gpus": gpus, "budget_bytes": place.budget, "fits": found.chosen is not None,
        "longest_context": found.longest if found.too_long else None, "settings": [
            {"label": s.label(), "method": s.method, "optimizer": s.optimizer, "precision": s.precision,
             "zero_stage": s.zero, "checkpointing": s.checkpointing, "trained_parameters": s.trained(m),
             "fits": s.micro_batch > 0, "short_by_bytes": 0 if s.micro_batch else s.bytes["total"] - place.budget,
             "micro_batch": s.micro_batch, "accumulation": s.accumulation,
             "effective_batch": s.micro_batch * s.accumulation * gpus, "bytes_per_gpu": s.bytes}
            for s in found.settings], "applied": None if apply is None else os.fspath(apply)})
    result.shown_by(partial(text, result, found, options.get("context") is not None))
    if apply is not None:
        if found.chosen is None:
            raise CheckError("%s: no setting fits %d GPU%s, so there is none to apply; without this option the plan shows "
                             "what is short" % (plan.model, gpus, "" if gpus == 1 else "s"), result)
        os.makedirs(apply, exist_ok=True)
        for name, config in configurations(found.chosen, gpus).items():
            path = os.path.join(apply, name)
            if os.path.lexists(path):
                os.replace(path, path + ".backup")
            write_text(path, json.dumps(config, indent=2) + "\n")
    return result


def text(p: TrainingPlan, found: Found, context_given: bool) -> str:
    rows = [["setting", "weights", "gradients", "optimizer", "activations", "workspace", "total", "batch",
             "accumulated"]]
    for s in p.settings:
        cells = [s["label"], *(size(s["bytes_per_gpu"][term], "B") for term in (
            "parameters", "gradients", "optimizer", "activations", "workspace", "total"))]
        gpus = "" if p.gpus == 1 else "x %d GPUs " % p.gpus
        rows.append([*cells, f"{s['micro_batch']:,}", "x %d %s= %d" % (s["accumulation"], gpus, s["effective_batch"])]
                    if s["fits"] else [*cells, "-", "short by " + size(s["short_by_bytes"], "B")])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [f"{p.model}: {p.parameters:,} parameters, sequences of {p.context:,} tokens",
             f"{p.gpus} GPU{'s' * (p.gpus > 1)} with {size(p.budget_bytes, 'B')} to use{WHOLE * (p.gpus > 1)}", ""]
    for row in rows:
        middle = [cell.rjust(width) for cell, width in zip(row[1:-1], widths[1:-1])]
        lines.append("  " + "  ".join([row[0].ljust(widths[0]), *middle, row[-1]]))
    if found.longest:
        default = "" if context_given else ", the default, so these are shorter"
        lines += ["", f"Nothing fits sequences of {found.too_long:,} tokens{default}; the longest that fit have "
                  f"{found.longest:,} (--context {found.longest})"]
    elif found.too_long:
        lines += ["", "Nothing fits, not even with shorter sequences; larger cards help, or more of them where --zero "
                  "divides what is short"]
    return "\n".join(lines)


# ---- files for accelerate and DeepSpeed ----


def configurations(s: Setting, gpus: int) -> Dict[str, Json]:
    """A setting as accelerate ("The command line", config_args) and DeepSpeed ("Configuration JSON") read it."""
    accelerate: Json = {"compute_environment": "LOCAL_MACHINE", "debug": False,
                        "distributed_type": "DEEPSPEED" if s.zero else "MULTI_GPU" if gpus > 1 else "NO"}
    if s.zero:
        accelerate["deepspeed_config"] = {
            "zero_stage": s.zero, "gradient_accumulation_steps": s.accumulation, "offload_optimizer_device": "none",
            "offload_param_device": "none", "zero3_init_flag": s.zero == 3, "zero3_save_16bit_model": s.zero == 3}
    accelerate.update({"downcast_bf16": "no", "machine_rank": 0, "main_training_function": "main",
                       "mixed_precision": "no" if s.precision == "fp32" else s.precision, "num_machines": 1,
                       "num_processes": gpus, "use_cpu": False})
    deepspeed = {"train_micro_batch_size_per_gpu": s.micro_batch, "gradient_accumulation_steps": s.accumulation,
                 "train_batch_size": s.micro_batch * s.accumulation * gpus, "bf16": {"enabled": s.precision == "bf16"},
                 "fp16": {"enabled": s.precision == "fp16"}, "zero_optimization": {"stage": s.zero}}
    return {"accelerate.json": accelerate, "ds_config.json": deepspeed}


# ---- the command ----


def _parser() -> Parser:
    parser = Parser("plan-training", "Find settings for fine-tuning MODEL that fit the GPUs of --vram: full, LoRA and "
                    "QLoRA. MODEL is what\n'qconv plan' takes, whose help explains --vram and the options of the "
                    "conversion; docs/training.md has the formulas.")
    parser.takes(plan_training)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("-q", "--quiet", action="store_true", help="show errors only")
    plan = parser.add_argument_group("options of 'qconv plan'")
    for name in TAKEN:
        plan.add_argument("--" + name, metavar="...", action="append" if name in REPEATED else "store")
    for name in SWITCHES:
        plan.add_argument("--" + name, action="store_true")
    return parser


def main(argv: Sequence[str]) -> None:
    asked = vars(_parser().parse_args(argv))
    model, as_json, quiet, apply = (asked.pop(name) for name in ("model", "json", "quiet", "apply"))
    wish = _wish(**{name: asked.pop(name) for name in ASKED})
    with warnings_said(quiet):
        found = _answer(model, wish, apply, asked)
    print(json.dumps(found.json, indent=2) if as_json else found)

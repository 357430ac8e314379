"""What calibrating will take, before anything of it runs: operations, time, memory and disk of each part."""
from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import torch

from ._calibrate_moments import BLOCK
from ._program import size
from ._text import Windows
from .errors import RunError

BACKWARD_TOKENS = 32768  # of the text, whose gradients are taken
SLICE_TOKENS = 4096      # that pass through a layer at a time
STATES = 6               # of the whole batch that are held at once
# The passes take so many times as long as products of their operations alone: a layer of 8B's width took 226 processor
# seconds for 1.6e13 operations, by a processor that multiplies 8.8e10 a second.
SLOWER = 1.2
# Products with inputs of their own, where others of their module have as many inputs. A plan goes by such names; which
# weights have one input is seen when a layer is computed.
APART = re.compile(r"\.(o_proj|out_proj|wo|dense|c_proj|o)$")


@dataclass(frozen=True)
class Part:
    operations: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Sizes are bytes. `host` and `cards`, by device, are at most. `devices` take the layers: without the first, which
    the program needs for itself, where the two have no room on one. `read` is what the passes read of the checkpoint,
    as float32. `states`: "memory", "files" or the device that hidden states are on."""
    layers: int
    weights: int
    sets: int
    tokens: int
    windows: int
    context: int
    gradient_tokens: int
    parts: Mapping[str, Part]
    rate: float
    devices: Sequence[str]
    host: int
    cards: Mapping[str, int]
    store: int
    files: int
    read: int
    states: str

    @property
    def operations(self) -> float:
        return sum(p.operations for p in self.parts.values())

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.parts.values())

    def json(self) -> Dict[str, Any]:
        """For a program: the fields, and `parts` by name."""
        return dict(asdict(self), operations=self.operations, seconds=self.seconds)

    def line(self) -> str:
        back = ", {:,} of them backwards".format(self.gradient_tokens) if self.gradient_tokens else ""
        card = "".join(", %s of %s's" % (size(taken), device) for device, taken in self.cards.items())
        return ("calibrating {} weights with {:,} tokens ({} windows of up to {:,}){}: this takes about {} here ({:.2g} "
                "operations), up to {} of memory{}, and {} of disk".format(
                    self.weights, self.tokens, self.windows, self.context, back, duration(self.seconds), self.operations,
                    size(self.host), card, size(self.store + self.files)))

    def table(self) -> List[str]:
        out = ["%d layers, %d weights in %d sets that have one input" % (self.layers, self.weights, self.sets)]
        out += ["%s: %.2g operations, about %s" % (name, part.operations, duration(part.seconds))
                for name, part in self.parts.items()]
        out.append("times are by %.3g operations a second, measured just now with float32 on %s; the solver's by the "
                   "program's own measurement" % (self.rate, self.devices[0]))
        out.append("hidden states are %s; %s of the checkpoint are read" % (
            self.states if self.states in self.cards else "in " + self.states, size(self.read)))
        out.append("disk: %s in OUT for codes and scales until they are written, %s in %s" % (
            size(self.store), size(self.files), tempfile.gettempdir()))
        return out


def duration(seconds: float) -> str:
    if seconds < 60:
        return "%.2g s" % seconds
    whole, unit = (seconds, "min") if seconds < 3600 else (seconds / 60, "h")
    return "%d:%02d %s" % (*divmod(round(whole), 60), unit)


@contextmanager
def fast_products(devices: Sequence[str]) -> Iterator[None]:
    """While it lasts, a GPU multiplies float32 in TF32, which rounds less than the bfloat16 that models run in."""
    before = torch.get_float32_matmul_precision()
    if devices[0] != "cpu":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def rate_of(device: str) -> float:
    """Operations a second of a product of float32 matrices: the best that is seen in about a second, as the first one
    of a size may load a library and other processes may disturb."""
    n, best, began = 512, 0.0, time.monotonic()
    while n < 2048 or time.monotonic() - began < 0.5:
        a, begin = torch.full((n, n), 0.5, device=device), time.monotonic()
        float((a @ a)[0, 0])
        best = max(best, 2.0 * n ** 3 / max(time.monotonic() - begin, 1e-9))
        n = min(2 * n, 8192 if device != "cpu" else 2048)
    return best


# ---- counting ----


def routed_share(config: Any) -> float:
    """The share of a mixture's experts that a token goes to."""
    text = config.get_text_config()

    def first(*names: str) -> Optional[int]:
        return next((v for v in (getattr(text, n, None) for n in names) if isinstance(v, int) and v > 0), None)
    chosen = first("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")
    count = first("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return min(1.0, chosen / count) if chosen and count else 1.0


def is_routed(name: str) -> bool:
    return bool(re.search(r"experts?[._]\d+\.|\[\d+", name))


@dataclass(frozen=True)
class Sizes:
    """Of a model: operations of a token that goes through all layers once, and through the head; and bytes."""
    layers: int
    token: float
    head: float
    layer_bytes: int
    stays_bytes: int
    read_bytes: int
    hidden: int
    vocabulary: int
    share: float


def sizes_of(stream: Any, context: int) -> Sizes:
    meta, model, config = stream.loader.meta, stream.model, stream.model.config
    text, share = config.get_text_config(), routed_share(config)
    layers = {id(meta[n]): (n, meta[n]) for names in stream.names.values() for n in names if n in meta}
    token = sum(2.0 * p.numel() * (share if p.dim() == 3 or is_routed(n) else 1.0)
                for n, p in layers.values() if p.dim() > 1)
    heads = getattr(text, "num_attention_heads", None)
    if isinstance(heads, int) and heads > 0:
        width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
        token += 4.0 * context * width * len(stream.layers)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    ahead = stream.outlook(1, 1)
    return Sizes(len(stream.layers), token, 0.0 if head is None else 2.0 * head.weight.numel(), ahead.layer,
                 ahead.stays, sum(p.numel() * p.element_size() for _, p in layers.values()), text.hidden_size,
                 getattr(text, "vocab_size", 0) if head is not None else 0, share)


def sets_of(weights: Sequence[Mapping[str, Any]]) -> Dict[Any, List[Mapping[str, Any]]]:
    """Weights by what their inputs are taken to be; the second of each key is how many these are."""
    out: Dict[Any, List[Mapping[str, Any]]] = {}
    for w in weights:
        module = w["module"]
        expert = re.match(r"(.*\[\d+)", module)  # of a stack, whose [3, gate] and [3, up] have one input
        folder = expert.group(1) if expert else module if APART.search(module) else module.rpartition(".")[0]
        out.setdefault((folder, w["cols"]), []).append(w)
    return out


def foresee(phase: Mapping[str, Any], stream: Any, windows: Windows, rows: int, gradient_rows: int,
            gradient_tokens: int, devices: Sequence[str], rate: float) -> Plan:
    """The plan of a phase of the program. rows: of the batch of one stream, and of that which goes backwards (0: none);
    gradient_tokens: that count in it."""
    context, weighing = windows.longest, phase["phase"] == "weigh"
    s = sizes_of(stream, context)
    todo = [w for w in phase["weights"] if not w["made"]]
    sets = sets_of(todo)
    tokens = gradient_tokens if weighing else sum(windows.lengths)
    streams = 1 if weighing else 2
    slice_tokens = max(1, SLICE_TOKENS // context) * context
    batch, back = (gradient_rows if weighing else rows) * context, gradient_rows * context

    def share(w: Mapping[str, Any]) -> float:
        return s.share if is_routed(w["module"]) else 1.0
    gradients = (3 * s.token + 2 * s.head) * back + sum(
        2.0 * min(BLOCK, w["rows"]) * w["rows"] * back * share(w) for w in todo) if back else 0.0
    passing = s.token * (streams * batch + min(slice_tokens, batch))
    moments = sum(2.0 * streams * k[1] ** 2 * tokens * share(ws[0]) for k, ws in sets.items())
    counted = {"gradients": gradients, "streams": passing, "moments": moments}
    parts = {n: Part(v, v / rate * SLOWER) for n, v in counted.items() if v}
    parts["solver"] = Part(phase["operations"], phase["seconds"])

    widest = max((k[1] for k in sets), default=0)
    state = 4 * s.hidden * context
    held = state * max((s.layers + STATES) * gradient_rows if back else 0, STATES * streams * (batch // context))
    largest = max((sum(w["rows"] * w["cols"] for w in ws) for ws in sets.values()), default=0)
    # A layer as it was and as it becomes, and slices that wait at the widest input; then sums with a product.
    layer = 2 * s.layer_bytes + 4 * streams * batch * (widest + 2 * s.hidden)
    working = 4 * slice_tokens * (16 * s.hidden + 8 * widest)  # of the slice at hand, with what its gradients need
    passes, logits = layer + 20 * widest ** 2 + working, 24 * slice_tokens * s.vocabulary if back else 0
    handed = 8 * widest ** 2 + 8 * largest + phase["memory"]  # files in memory, and what the program makes of them
    solver = int(phase["device_memory"])
    with open("/proc/self/status") as file:
        resident = re.search(r"VmRSS:\s+(\d+)", file.read())
    host = int(resident.group(1)) << 10 if resident else 0
    cards, used, states = {}, list(devices), "memory"  # type: Dict[str, int], List[str], str
    if devices[0] == "cpu":
        host += s.stays_bytes + max(passes, layer + handed, logits)
    else:
        total = torch.cuda.get_device_properties(devices[0]).total_memory * 9 // 10
        alone = len(devices) > 1 and max(passes, layer + solver) > total
        used = list(devices[1:] if alone else devices)
        card = max(passes, layer if alone else layer + solver, s.stays_bytes + logits)
        host += handed
        if held + s.stays_bytes + card <= total:
            card, states = card + held + s.stays_bytes, used[0]
        else:
            host += s.stays_bytes
        cards = {**({devices[0]: solver} if alone else {}), used[0]: card}
    if states == "memory" and held > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2:
        states = "files"
    host += held if states == "memory" else 0
    files = sum(4 * min(BLOCK, w["rows"]) ** 2 * -(-w["rows"] // BLOCK) for w in todo) if back else 0
    return Plan(s.layers, len(todo), len(sets), tokens, len(windows.lengths), context, gradient_tokens if back else 0,
                parts, rate, used, int(host), cards, phase["disk"], files + (held if states == "files" else 0),
                s.read_bytes * (3 if back else 1), states)


def check_room(plan: Plan) -> None:
    """Raises RunError where the card or the folder for files has no room."""
    for device, taken in plan.cards.items():
        free, _ = torch.cuda.mem_get_info(device)
        if taken > free:
            raise RunError("calibrating takes %s of %s's memory, and %s of it are free: fewer --calibration-tokens "
                           "take less, and --device cpu takes none" % (size(taken), device, size(free)))
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if plan.files > free:
        raise RunError("calibrating takes %s in %s, and %s are free there: TMPDIR names another folder" % (
            size(plan.files), tempfile.gettempdir(), size(free)))

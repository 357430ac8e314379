"""What the functions return: the documented objects of --json as dataclasses.

docs/cli.md and the pages of the commands say what the members mean. Sizes are bytes, times are seconds,
None stands for what is not known. `json` of every result is the whole object as the program printed it,
so members that a newer program adds are there.
"""
from __future__ import annotations

import dataclasses
import html
import re
from dataclasses import dataclass, field
from typing import (Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type, TypeVar, Union, get_args, get_origin,
                    get_type_hints)

R = TypeVar("R", bound="Result")
Json = Dict[str, Any]
ROWS = 20  # of a list that print() shows


def _value(hint: Any, value: Any) -> Any:
    """A value of JSON as its type hint has it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Union:
        return None if value is None else _value(inner[0], value)
    if origin is tuple:
        return tuple(_value(inner[0], v) for v in value)
    if origin is dict:
        return {k: _value(inner[1], v) for k, v in value.items()}
    if isinstance(hint, type) and issubclass(hint, Result):
        return hint.from_json(value)
    return float(value) if hint is float else value


def short(value: Any) -> str:
    """A value in one cell: of lists and objects how many there are."""
    if isinstance(value, (list, dict)) and any(isinstance(v, (list, dict)) for v in (
            value.values() if isinstance(value, dict) else value)):
        return "%d in json" % len(value)
    if isinstance(value, dict):
        return ", ".join("%s %s" % (k, short(v)) for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(short, value))
    return "-" if value is None else "%.5g" % value if isinstance(value, float) else \
        "{:,}".format(value) if type(value) is int else str(value)


def _table(rows: Sequence[Json]) -> List[str]:
    """Objects below each other, without the members that none of them has."""
    cells = [[head, *(short(row.get(head)) for row in rows)] for head in dict.fromkeys(head for row in rows for head in row)]
    columns = []
    for column in cells:
        wide, numbers = max(map(len, column)), all(re.match(r"-$|[-+\d.,e]+$", cell) for cell in column[1:])
        if set(column[1:]) != {"-"}:
            columns.append([cell.rjust(wide) if numbers else cell.ljust(wide) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns)]


def _lines(members: Json) -> List[str]:
    """An object as text: its members, and below them tables of those that are lists or objects of objects."""
    tables, plain, wide = [], [], max(map(len, members), default=0)
    for name, value in members.items():
        named = isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values())
        rows = [{"": k, **v} for k, v in value.items()] if named else value
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            tables += ["", "%s (%d)" % (name, len(rows)), *("  " + line for line in _table(rows[:ROWS]))]
            tables += ["  and %d more in json" % (len(rows) - ROWS)] if len(rows) > ROWS else []
        elif value not in ([], {}):
            plain.append("%-*s  %s" % (wide, name, short(value)))
    return plain + tables


@dataclass(frozen=True)
class Result:
    """An object of --json; `json` is all of it. print() and notebooks show the table that the program prints, or one of
    the members."""
    json: Any = field(repr=False)

    @classmethod
    def from_json(cls: Type[R], value: Mapping[str, Any]) -> R:
        """Makes the result of a parsed object. Members without a field are left in `json`; a member that
        is not there is None where it may be. Raises ProgramError where it may not."""
        from .errors import ProgramError
        members: Json = {}
        for name, hint in get_type_hints(cls).items():
            if name == "json":
                continue
            key = name.rstrip("_")
            if key not in value and get_origin(hint) is not Union:
                raise ProgramError("the program's answer has no '%s'; the package is of another version" % key)
            members[name] = _value(hint, value.get(key))
        return cls(json=value, **members)

    def shown_by(self: R, text: Callable[[], str]) -> R:
        """Has print() and notebooks show that text."""
        object.__setattr__(self, "_text", text)
        return self

    def __str__(self) -> str:
        text: Optional[Callable[[], str]] = self.__dict__.get("_text")
        return text() if text else "\n".join(_lines(self.json))

    def _repr_html_(self) -> str:
        return "<pre>%s</pre>" % html.escape(str(self))


@dataclass(frozen=True)
class Answer(Result):
    """The answer of `call`."""


@dataclass(frozen=True)
class SchemeTotals(Result):
    """The tensors of one scheme. `bytes` (of a plan), `bytes_in` and `bytes_out` have scales included."""
    tensors: int
    weights: int
    bytes: Optional[int]
    bytes_in: Optional[int]
    bytes_out: Optional[int]


@dataclass(frozen=True)
class Loads(Result):
    """Who reads an output, `qconv` being qconv.load. `lacks` says why nothing does, whatever its form. `command` is a
    line for a shell that makes plain files; `python` are lines that load them, `load` the same with qconv.load, and
    `serve` is a line that starts vLLM."""
    form: str
    transformers: Tuple[int, ...]
    diffusers: bool
    with_: Optional[str]
    lacks: Optional[str]
    qconv: bool
    vllm_plugin: bool
    unpack_first: bool
    instead: Optional[str]
    command: Optional[str]
    python: Optional[str]
    load: Optional[str]
    serve: Optional[str]


@dataclass(frozen=True)
class PlanDevice(Result):
    """One device of a plan; `budget_bytes` None: no limit."""
    name: str
    card: Optional[str]
    total_bytes: Optional[int]
    budget_bytes: Optional[int]
    weight_bytes: int
    kv_bytes: Optional[int]
    workspace_bytes: Optional[int]
    context_bytes: int
    free_bytes: Optional[int]
    short_by_bytes: int
    layers: int
    first_layer: Optional[int]


@dataclass(frozen=True)
class Plan(Result):
    """What `plan` found. A plan that does not fit is an answer as well: look at `fits`."""
    model: str
    model_type: Optional[str]
    has_weights: bool
    to: str
    vram: str
    margin: float
    context: Optional[int]
    batch: int
    parameters: int
    weight_bytes: int
    file_bytes: int
    parallel: str
    tensor_parallel: Optional[int]
    vllm: Optional[str]
    vllm_needs_plugin: bool
    mla: Optional[str]
    mla_runtime: Optional[str]
    kv_bytes_per_token: Optional[int]
    kv_bytes: Optional[int]
    devices: Tuple[PlanDevice, ...]
    fits: bool
    short_by_bytes: int
    short_device: Optional[str]
    schemes: Dict[str, SchemeTotals]
    auto: Optional[Json]
    loads: Loads
    max_context: Optional[int]
    prefill_tokens: Optional[int]
    max_context_by_prefill: Json
    max_batch: Optional[int]
    transfer_bytes_per_token: int
    transfer_seconds_per_token: float
    device_map: Optional[Json]
    choices: Tuple[Json, ...]
    budget_notes: Tuple[str, ...]
    suggestions: Tuple[str, ...]
    download: Optional[str]
    convert: Optional[str]


@dataclass(frozen=True)
class TrainingPlan(Result):
    """What `plan_training` found: settings, the first that fits first."""
    mode: str
    model: str
    parameters: int
    context: int
    gpus: int
    budget_bytes: int
    fits: bool
    longest_context: Optional[int]
    settings: Tuple[Json, ...]
    applied: Optional[str]


@dataclass(frozen=True)
class Conversion(Result):
    """What `convert` did. `seconds`, `threads` and `isa` are those of this run."""
    model: str
    out: str
    to: str
    scale: Optional[str]
    complete_before: bool
    bytes_in: int
    bytes_out: int
    bytes_stored: int
    shards: int
    side_files: int
    bits_per_quantized_weight: float
    bits_per_weight: float
    schemes: Dict[str, SchemeTotals]
    calibration: Optional[Json]
    worst: Optional[Json]
    values: Json
    continued: Optional[Json]
    seconds: float
    threads: int
    isa: str
    device: str
    gpu_share: float
    part: Optional[Json]
    auto: Optional[Json]
    loads: Loads


@dataclass(frozen=True)
class TorchFiles(Result):
    """What `from_torch` wrote. `files` have name, tensors and bytes. `shared` are tensors of the same bytes as another
    one: written once more, or left out where config.json ties them. `left_out` are entries that are no tensors."""
    model: str
    out: str
    files: Tuple[Json, ...]
    tensors: int
    bytes: int
    copied: Tuple[str, ...]
    shared: Tuple[Json, ...]
    left_out: Tuple[Json, ...]


@dataclass(frozen=True)
class DryRun(Result):
    """What `dry_run` found that `convert` would write."""
    model_type: Optional[str]
    known_type: bool
    source_bytes: int
    tensor_bytes: int
    file_bytes: int
    weights_quantized: int
    quantized_bytes: int
    shards: Tuple[Json, ...]
    skip_modules: Tuple[str, ...]
    tensors: Tuple[Json, ...]
    auto: Optional[Json]
    loads: Loads


@dataclass(frozen=True)
class Pipeline(Result):
    """What `convert`, `dry_run`, `verify` or `unpack` did with a pipeline of diffusers: `parts` has the answer of each
    part by its name, and `copied` are the other files of the output."""
    path: str
    out: Optional[str]
    copied: Tuple[str, ...]
    parts: Dict[str, Any]


@dataclass(frozen=True)
class TensorInfo(Result):
    """A stored tensor. `scheme` is None for plain numbers; what else a quantized weight has is in `json`."""
    name: str
    dtype: str
    shape: Tuple[int, ...]
    bytes: int
    file: str
    role: str
    scheme: Optional[str]
    state_of: Optional[str]
    logical_shape: Optional[Tuple[int, ...]]
    rel_mse: Optional[float]


@dataclass(frozen=True)
class Inspection(Result):
    """What `inspect` lists. `manifest` is that of an output of qconv, else None."""
    path: str
    is_directory: bool
    model_type: Optional[str]
    known_type: bool
    manifest: Optional[Json]
    files: Tuple[Json, ...]
    side_files: Tuple[Json, ...]
    tensors: Tuple[TensorInfo, ...]
    engines: Optional[Tuple[Json, ...]]
    totals: Json
    warnings: Tuple[str, ...]


@dataclass(frozen=True)
class Verification(Result):
    """What `verify` checked, without MODEL. `content_bytes` are decompressed, `stored_bytes` as on disk."""
    path: str
    ok: bool
    problems: int
    first_problem: Optional[Json]
    tensors: int
    shards: int
    files: int
    content_bytes: int
    stored_bytes: int
    seconds: float


@dataclass(frozen=True)
class Comparison(Result):
    """What `verify` found of an output beside the model it was made from."""
    path: str
    against: str
    ok: bool
    problems: int
    first_problem: Optional[Json]
    manifest: bool
    tensors: int
    equal: int
    cast: int
    quantized: int
    source_digests: int
    output_bytes: int
    model_bytes: int
    missing: Tuple[Json, ...]
    rows: Tuple[Json, ...]
    seconds: float


@dataclass(frozen=True)
class Unpacking(Verification):
    """What `unpack` wrote, and checked on the way."""
    out: str


@dataclass(frozen=True)
class Evaluation(Result):
    """What `eval` measured. KL divergence is in nats; what needs a MODEL is None without one. Of an encoder only the
    distances are numbers, and of other models they are None."""
    path: str
    against: Optional[str]
    text: str
    model_type: Optional[str]
    tokenizer: str
    device: str
    tokens: int
    windows: int
    context: int
    predicted: int
    perplexity: Optional[float]
    perplexity_error: Optional[float]
    base_perplexity: Optional[float]
    base_perplexity_error: Optional[float]
    difference: Optional[float]
    difference_error: Optional[float]
    log_ratio: Optional[float]
    log_ratio_error: Optional[float]
    kl_mean: Optional[float]
    kl_error: Optional[float]
    kl_median: Optional[float]
    kl_99: Optional[float]
    kl_max: Optional[float]
    top1: Optional[float]
    top1_error: Optional[float]
    probability_rms: Optional[float]
    distance_mean: Optional[float]
    distance_99: Optional[float]
    distance_max: Optional[float]
    cosine_mean: Optional[float]
    cosine_99: Optional[float]
    cosine_max: Optional[float]
    seconds: float


@dataclass(frozen=True)
class Validation(Result):
    """What `validate` measured of every quantized layer; errors are relative."""
    path: str
    against: str
    ok: bool
    quantized_layers: int
    measured_layers: int
    sample: Optional[int]
    activations: str
    rows: int
    seed: int
    device: str
    left_out: Optional[str]
    threads: int
    isa: str
    read_bytes_per_second: Optional[float]
    max_error: Optional[float]
    baseline: Optional[str]
    baseline_layers: Optional[int]
    tolerance: Optional[float]
    worst: Optional[Json]
    failed: Tuple[Json, ...]
    not_compared: Tuple[Json, ...]
    layers: Tuple[Json, ...]
    seconds: float


@dataclass(frozen=True)
class Hardware(Result):
    """What `hardware` found here, and what qconv would choose."""
    assumed: bool
    driver: Optional[str]
    gpus: Tuple[Json, ...]
    no_gpu: Optional[str]
    warning: Optional[str]
    cuda_kernels: bool
    cuda_build: Optional[str]
    quantizes_on: Optional[str]
    quantizes_why: Optional[str]
    cpu: Json
    disk_free_bytes: Optional[int]
    strategy: Json


__all__ = sorted(name for name, value in list(globals().items())
                 if dataclasses.is_dataclass(value) and isinstance(value, type))

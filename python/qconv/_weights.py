"""Quantized weights of an output as torch tensors: which tensors of a file belong together, and what they say.

docs/format.md, section 3, has the forms. A weight's tensors stay as the file has them, byte for byte, with one exception:
scales of compressed-tensors in 16 bits become floats, because libqconv multiplies with those.
"""
import json
import math
import re
from dataclasses import dataclass, field, replace
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from . import _library, errors, ops
from ._cut import Cut, cut

TORCH = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
         "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
         "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "I16": torch.int16,
         "U16": getattr(torch, "uint16", None), "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
         "U32": getattr(torch, "uint32", None), "F32": torch.float32, "C64": torch.complex64, "F64": torch.float64,
         "I64": torch.int64, "U64": getattr(torch, "uint64", None)}
ROLES = ("codes", "scales", "code_map", "nested_absmax", "nested_map")


class Stored(NamedTuple):
    """One tensor as a file has it. ending: behind the module's name, like "weight.absmax"; role: one of ROLES, or its
    content where it is none."""
    ending: str
    role: object
    dtype: torch.dtype
    shape: Tuple[int, ...]


@dataclass
class QuantizedWeight:
    """A weight [rows, cols]: see ops.py for what the members mean. Tensors are bytes (uint8), codes int8."""
    form: str
    rows: int
    cols: int
    block: int
    nested_block: int
    offset: float
    dtype: Optional[torch.dtype]  # of the source, where the file says it
    codes: torch.Tensor
    scales: torch.Tensor
    code_map: Optional[torch.Tensor] = None
    nested_absmax: Optional[torch.Tensor] = None
    nested_map: Optional[torch.Tensor] = None
    stored: List[Stored] = field(default_factory=list)
    name: str = ""  # in the file, before it was quantized

    @property
    def numbers(self):
        return self.form, self.rows, self.cols, self.block, self.nested_block, self.offset

    def tensors(self):
        return [getattr(self, role) for role in ROLES]

    def dequantize(self, dtype):
        return ops.dequantize(*self.tensors(), *self.numbers, dtype)


def to_stored(stored: List[Stored], tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """{ending: tensor as in the file}. tensors: those of ROLES."""
    out = {}
    for ending, role, dtype, shape in stored:
        if role not in ROLES:
            out[ending] = torch.frombuffer(bytearray(role), dtype=dtype).view(shape)
        elif role == "scales" and dtype in (torch.float16, torch.bfloat16):
            out[ending] = tensors[role].detach().view(torch.float32).to(dtype).view(shape)
        else:
            out[ending] = tensors[role].detach().view(torch.uint8).view(dtype).view(shape)
    return out


def as_role(role: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a file as the weight holds it."""
    if role == "scales" and tensor.dtype in (torch.float16, torch.bfloat16):
        tensor = tensor.float()
    return tensor.reshape(-1).view(torch.int8 if role == "codes" else torch.uint8)


def dtype_of(tensor: _library.Tensor) -> torch.dtype:
    """The dtype in torch of a tensor that a file lists."""
    if TORCH.get(tensor.dtype) is None:
        raise errors.InputError(f"tensor '{tensor.name}' is {tensor.dtype}, which torch {torch.__version__} does not have")
    return TORCH[tensor.dtype]


# ---- which tensors belong together --------------------------------------------------------------

_STATE = re.compile(r"(.+)\.quant_state\.(bitsandbytes__nf4|bitsandbytes__fp4|qconv__int8)$")
_PACKED = re.compile(r"(.+)\.weight_packed$")
_SCB = re.compile(r"(.+)\.SCB$")
_SCALE = re.compile(r"(.+)\.weight_scale$")
_BESIDE = re.compile(r"\.(?:absmax|quant_map|nested_absmax|nested_quant_map|weight_format|weight_shape)$")


def says_how(ending: str) -> bool:
    """Whether a tensor of a weight says how the others lie, and holds none of its numbers."""
    return ending.endswith(("weight_format", "weight_shape")) or "quant_state." in ending


def groups(dtypes: Dict[str, str]) -> Dict[str, Dict[str, str]]:
    """{name of a weight: {ending: name of its tensor}} of a file's tensors, of which the dtypes are given.

    The name is that of the weight before it was quantized; an ending is what follows the name of its module."""
    found = {}

    def take(weight, names):
        if weight in found:
            _refuse(weight, "has the tensors of two forms")
        module = weight[:-len(".weight")] if weight.endswith(".weight") else weight
        found[weight] = {name[len(module):].lstrip("."): name for name in names}

    for name, dtype in dtypes.items():
        if m := _STATE.match(name):
            weight = m[1]
            take(weight, [n for n in (weight, *(f"{weight}.{part}" for part in (
                "absmax", "quant_map", "nested_absmax", "nested_quant_map"))) if n in dtypes] + [name])
        elif m := _SCB.match(name):
            weight = f"{m[1]}.weight" if f"{m[1]}.weight" in dtypes else m[1]
            take(weight, [n for n in (weight, name, f"{m[1]}.weight_format") if n in dtypes])
        elif m := _PACKED.match(name):
            others = sorted(f"{m[1]}.weight_{part}" for part in ("zero_point", "g_idx")
                            if f"{m[1]}.weight_{part}" in dtypes)
            if others:
                raise errors.InputError(f"'{name}' is of another tool and has '{others[0]}', which qconv.load does "
                                        "not read; `qconv convert --to bf16` turns it back")
            take(f"{m[1]}.weight", [n for n in (name, f"{m[1]}.weight_scale", f"{m[1]}.weight_shape") if n in dtypes])
        elif (m := _SCALE.match(name)) and dtypes.get(f"{m[1]}.weight") == "I8":
            take(f"{m[1]}.weight", [f"{m[1]}.weight", name])
    taken = {name for members in found.values() for name in members.values()}
    for name in dtypes:
        if name not in taken and _BESIDE.search(name):
            raise errors.InputError(f"'{name}' is of a quantized weight, of which other tensors are missing")
    return found


# ---- what they say ------------------------------------------------------------------------------

MOST = (1 << 31) - 1            # rows, columns, experts
MOST_EXPERTS = 1 << 16          # of one stack: each is a few objects
MOST_STATE = 1 << 16            # bytes of a quant_state


def _refuse(weight, why):
    raise errors.InputError(f"the quantized weight '{weight}' {why}")


def _whole(weight, what, value, least=1, most=MOST):
    """A number of a file, which may be anything there."""
    if type(value) is not int or not least <= value <= most:
        _refuse(weight, f"has {what} {value!r:.40}; expected a whole number from {least} to {most}")
    return value


def _member(weight, members, ending, dtypes=(), elements=None):
    """One of a weight's tensors, of one of some dtypes and with so many elements."""
    tensor = members.get(ending)
    if tensor is None:
        _refuse(weight, f"has no {ending or 'codes'}")
    if dtypes and tensor.dtype not in dtypes:
        _refuse(weight, f"has a {ending or 'tensor of codes'} in {tensor.dtype}; expected {' or '.join(map(str, dtypes))}")
    if elements is not None and tensor.numel() != elements:
        _refuse(weight, f"has {tensor.numel()} elements of {ending}; expected {elements}")
    return tensor


def _blockwise(weight, members, state_ending):
    """NF4, FP4 and int8 by blocks: what bitsandbytes calls a quant_state."""
    prefix = "weight." if "weight" in members else ""
    text = _member(weight, members, state_ending, [torch.uint8])
    try:
        state = json.loads(bytes(text.reshape(-1).tolist())) if text.numel() <= MOST_STATE else None
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict) or not isinstance(state.get("shape"), list) or not isinstance(state.get("dtype", ""), str):
        _refuse(weight, "has a quant_state that is no JSON object with its shape")
    form, nested = "int8-block" if state_ending.endswith("qconv__int8") else "nf4", f"{prefix}nested_absmax" in members
    parts = {"codes": (prefix[:-1], [torch.int8, torch.uint8] if form == "int8-block" else (), None),
             "scales": (f"{prefix}absmax", [torch.uint8 if nested else torch.float32], None)}
    if form == "nf4":
        parts["code_map"] = f"{prefix}quant_map", [torch.float32], 16
    if nested:
        parts["nested_absmax"] = f"{prefix}nested_absmax", [torch.float32], None
        parts["nested_map"] = f"{prefix}nested_quant_map", [torch.float32], 256
    offset = state.get("nested_offset", 0.0) if nested else 0.0
    if type(offset) not in (int, float) or not math.isfinite(offset):
        _refuse(weight, f"has the nested_offset {offset!r:.40}; expected a number")
    dtype = getattr(torch, state.get("dtype", ""), None)
    return state["shape"], dict(
        form=form, block=_whole(weight, "the blocksize", state.get("blocksize")), offset=float(offset),
        nested_block=_whole(weight, "the nested_blocksize", state.get("nested_blocksize")) if nested else 0,
        dtype=dtype if isinstance(dtype, torch.dtype) else None), parts, {state_ending: text}


def _by_rows(weight, members):
    codes, scales = _member(weight, members, "weight" if "weight" in members else ""), members["SCB"]
    if codes.ndim < 2 or (codes.ndim == 2 and codes.shape[1] > 1 and codes.shape[0] != scales.numel()):  # [n, 1] is flat
        _refuse(weight, f"has codes {list(codes.shape)} and scales {list(scales.shape)}; expected a scale for each row")
    more = {"weight_format": members["weight_format"]} if "weight_format" in members else {}
    for tensor in more.values():
        if tensor.numel() != 1 or int(tensor):
            _refuse(weight, "is int8 in an order other than rows, which is not read")
    return [*scales.shape, codes.numel() // max(scales.numel(), 1)], dict(
        form="int8", block=0, nested_block=0, offset=0.0, dtype=None), {
        "codes": ("weight" if "weight" in members else "", [torch.int8], None), "scales": ("SCB", [torch.float32], None)}, more


def _integers(weight, members, scheme):
    """compressed-tensors."""
    packed = "weight_packed" in members
    ending = "weight_packed" if packed else "weight"
    codes = _member(weight, members, ending, [torch.int32 if packed else torch.int8])
    scales = _member(weight, members, "weight_scale", [torch.float32, torch.float16, torch.bfloat16])
    more = {"weight_shape": _member(weight, members, "weight_shape", [torch.int64], 2)} if packed else {}
    shape = more["weight_shape"].reshape(-1).tolist() if packed else list(codes.shape)
    if len(shape) != 2:
        _refuse(weight, f"has {len(shape)} dimensions; expected 2")
    rows, cols = (_whole(weight, "the size", n) for n in shape)
    width = codes.shape[-1]  # rows of fewer than 32 columns may have as many words with another number of bits
    forms = [f"w{bits}a16" for bits in range(2, 9) if -(-cols * bits // 32) == width] if packed else ["w8a8"][:width == cols]
    forms = [form for form in forms if scheme.startswith(form)] or forms
    if scales.ndim != 2 or scales.shape[0] != rows or not scales.shape[1] or len(forms) != 1 or codes.shape[0] != rows:
        raise errors.InputError(f"the integers of '{weight}' [{rows}, {cols}] have codes {list(codes.shape)} and scales "
                                f"{list(scales.shape)}, a form that qconv.load does not read")
    return shape, dict(form=forms[0], nested_block=0, offset=0.0, dtype=scales.dtype,
                       block=0 if scales.shape[1] == 1 else cols // scales.shape[1]), {
        "codes": (ending, (), None), "scales": ("weight_scale", (), None)}, more


def weights_of(weight: str, members: Dict[str, torch.Tensor], scheme: str = "") -> List[QuantizedWeight]:
    """The weight that a group of tensors is; or, of a stack [experts, rows, cols], those of its experts. All that it says
    of sizes, blocks and dtypes is held against its tensors, which may be on the device meta but for those that say how.
    scheme: what the manifest says of its codes. InputError names the weight."""
    state = [ending for ending in members if "quant_state." in ending]
    if state:
        shape, numbers, places, content = _blockwise(weight, members, state[0])
    elif "SCB" in members:
        shape, numbers, places, content = _by_rows(weight, members)
    else:
        shape, numbers, places, content = _integers(weight, members, scheme)
    found = {role: _member(weight, members, *place) for role, place in places.items()}
    if len(shape) not in (2, 3):
        _refuse(weight, f"has {len(shape)} dimensions; expected 2 or 3")
    *experts, rows, cols = (_whole(weight, "the size", n) for n in shape)
    count = _whole(weight, "a number of experts", *experts or [1], most=MOST_EXPERTS)
    if numbers["block"] and count > 1 and rows * cols % numbers["block"]:
        _refuse(weight, f"has blocks of {numbers['block']} that belong to two experts of {rows} x {cols}")
    stored = [Stored(ending, role, found[role].dtype, tuple(found[role].shape)) for role, (ending, *_) in places.items()]
    stored += [Stored(ending, t.reshape(-1).view(torch.uint8).numpy().tobytes(), t.dtype, tuple(t.shape))
               for ending, t in content.items()]
    parts = {role: as_role(role, tensor) for role, tensor in found.items()}
    whole = QuantizedWeight(rows=count * rows, cols=cols, name=weight, stored=[] if experts else stored, **numbers, **parts)
    sizes = {role: parts[role].numel() * parts[role].element_size() if role in parts else 0 for role in ROLES}
    at = {role: int(role in parts) for role in ROLES}  # nothing is read there
    try:
        _library.weights(whole.form, whole.rows, cols, whole.block, at["codes"], sizes["codes"], at["scales"],
                         sizes["scales"] // (1 if at["nested_absmax"] else 4), at["code_map"], at["nested_absmax"],
                         sizes["nested_absmax"] // 4, at["nested_map"], whole.nested_block, whole.offset)
    except errors.InputError as e:
        _refuse(weight, f"does not hold together: {e}")
    if not experts:
        return [whole]
    # All experts are in one form: where a group of nested scales spans two, the scales become floats.
    scales = rows * cols // whole.block if whole.block else rows
    if whole.nested_absmax is not None and scales % whole.nested_block:
        whole = floats(whole)
    return [rows_of(whole, i * rows, (i + 1) * rows) for i in range(count)]


# ---- parts of them, and several as one ----------------------------------------------------------


def floats(w: QuantizedWeight) -> QuantizedWeight:
    """The same weight with scales that are not quantized themselves."""
    if w.nested_absmax is None:
        return w
    of_group = w.nested_absmax.view(torch.float32).repeat_interleave(w.nested_block)
    values = w.nested_map.view(torch.float32)[w.scales.int()]
    plain = values * of_group[:values.numel()] + w.offset
    return replace(w, scales=plain.view(torch.uint8), nested_absmax=None, nested_map=None, nested_block=0, offset=0.0)


def part_of(w: QuantizedWeight, c: Cut, codes, scales, whole) -> QuantizedWeight:
    """The part of a weight that a cut says. codes(row_bytes, first_row, rows, first_byte, bytes) and scales(begin, end)
    give what the weight has there, and whole(role) all of a small tensor."""
    begin, end = c.scale(0), c.scale(c.scales - 1) + 1
    found = scales(begin, end)
    if end - begin != c.scales:
        found = found[c.scale(torch.arange(c.scales)) - begin]
    part = replace(w, rows=c.rows, cols=c.cols, block=c.block, stored=[], code_map=whole("code_map"),
                   codes=codes(*c.codes(w.form)).view(torch.int8),
                   scales=as_role("scales", found))
    if w.nested_absmax is None:
        return part
    nested, step = whole("nested_absmax").view(torch.float32), c.group or 1
    of_group = nested[c.scale(torch.arange(0, c.scales, step)) // w.nested_block]
    part = replace(part, nested_block=step, nested_absmax=of_group.view(torch.uint8), nested_map=whole("nested_map"))
    return part if c.group else floats(part)


def rows_of(w: QuantizedWeight, first: int, end: int) -> QuantizedWeight:
    """Rows [first, end) of a weight, of whose tensors they are views where that can be."""
    c = cut(w.name, w.form, (w.rows, w.cols), w.block, w.nested_block, (first, end), (0, w.cols))
    if c.skip:
        _refuse(w.name, f"cannot be divided at row {first}, which begins within a block of {w.block}: convert with --keep for "
                "it")
    scales = w.scales if w.nested_absmax is not None else w.scales.view(torch.float32)
    return part_of(w, c, lambda _, __, ___, at, count: w.codes[at:at + count], lambda a, b: scales[a:b],
                   lambda role: getattr(w, role))


def in_order(w: QuantizedWeight, order: torch.Tensor) -> QuantizedWeight:
    """A weight with its rows in another order."""
    if w.block and w.cols % w.block:
        _refuse(w.name, f"has blocks of {w.block} that span rows, which transformers puts in another order: convert with --keep "
                "for it")
    w = floats(w)
    order = order.to(w.codes.device)
    return replace(w, stored=[], **{role: getattr(w, role).view(w.rows, -1)[order].reshape(-1) for role in ("codes", "scales")})


def joined(parts: List[QuantizedWeight]) -> QuantizedWeight:
    """Weights below each other as one. InputError where they differ in form."""
    first = parts[0]
    if len(parts) == 1:
        return first
    tables = [(w.offset, *(None if t is None else t.cpu().numpy().tobytes() for t in (w.code_map, w.nested_map)))
              for w in parts]
    together = first.block * max(first.nested_block, 1)
    if len(set(tables)) > 1 or any(w.nested_block != first.nested_block or (together and w.rows * w.cols % together)
                                   for w in parts):
        parts = [floats(w) for w in parts]
    for w in parts:
        alike = (w.form, w.cols, w.block) == (first.form, first.cols, first.block) and (
            w.code_map is None or torch.equal(w.code_map, first.code_map))
        if not alike or w.rows * w.cols % (w.block or 1):
            raise errors.InputError(f"transformers joins '{first.name}' and '{w.name}', which are quantized in different forms: "
                                    "convert both alike, or with --keep for them")
    both = {role: torch.cat([getattr(w, role) for w in parts]) for role in ("codes", "scales", "nested_absmax")
            if getattr(parts[0], role) is not None}
    return replace(parts[0], rows=sum(w.rows for w in parts), stored=[], **both)

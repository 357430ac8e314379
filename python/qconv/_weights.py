"""Quantized weights of an output as torch tensors: which tensors of a file belong together, and what they say.

docs/format.md, section 3, has the forms. A weight's tensors stay as the file has them, byte for byte, with one exception:
scales of compressed-tensors in 16 bits become floats, because libqconv multiplies with those.
"""
import json
import re
from dataclasses import dataclass, field, replace
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from . import errors, ops

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


# ---- which tensors belong together --------------------------------------------------------------

_STATE = re.compile(r"(.+)\.quant_state\.(bitsandbytes__nf4|bitsandbytes__fp4|qconv__int8)$")
_PACKED = re.compile(r"(.+)\.weight_packed$")
_SCB = re.compile(r"(.+)\.SCB$")
_SCALE = re.compile(r"(.+)\.weight_scale$")


def groups(dtypes: Dict[str, str]) -> Dict[str, Dict[str, str]]:
    """{name of a weight: {ending: name of its tensor}} of a file's tensors, of which the dtypes are given.

    The name is that of the weight before it was quantized; an ending is what follows the name of its module."""
    found = {}

    def take(weight, names):
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
    return found


# ---- what they say ------------------------------------------------------------------------------


def _missing(weight, what):
    raise errors.InputError(f"the quantized weight '{weight}' has no {what}")


def _state(weight, tensor):
    text = json.loads(bytes(tensor.tolist()))
    if not isinstance(text, dict) or not text.get("shape"):
        raise errors.InputError(f"the quant_state of '{weight}' has no shape")
    return text


def _blockwise(weight, members, state_ending):
    """NF4, FP4 and int8 by blocks: what bitsandbytes calls a quant_state."""
    prefix = "weight." if "weight" in members else ""
    codes = members.get("weight") if prefix else members.get("")
    state = _state(weight, members[state_ending])
    shape, nested = state["shape"], f"{prefix}nested_absmax" in members
    form = "int8-block" if state_ending.endswith("qconv__int8") else "nf4"
    roles = {f"{prefix}absmax": "scales", f"{prefix}quant_map": "code_map", f"{prefix}nested_absmax": "nested_absmax",
             f"{prefix}nested_quant_map": "nested_map"}
    for ending in [f"{prefix}absmax", *([f"{prefix}quant_map"] if form == "nf4" else []),
                   *([f"{prefix}nested_quant_map"] if nested else [])]:
        if ending not in members:
            _missing(weight, ending)
    tensors = {role: members[ending] for ending, role in roles.items() if ending in members}
    stored = [Stored("weight" if prefix else "", "codes", codes.dtype, tuple(codes.shape))]
    stored += [Stored(ending, role, members[ending].dtype, tuple(members[ending].shape))
               for ending, role in roles.items() if ending in members]
    text = members[state_ending]
    stored.append(Stored(state_ending, bytes(text.tolist()), text.dtype, tuple(text.shape)))
    return shape, dict(form=form, block=state["blocksize"], nested_block=state.get("nested_blocksize", 0) if nested else 0,
                       offset=state.get("nested_offset", 0.0) if nested else 0.0,
                       dtype=getattr(torch, state.get("dtype", ""), None), codes=codes, **tensors), stored


def _by_rows(members):
    prefix = "weight" if "weight" in members else ""
    codes, scales = members[prefix], members["SCB"]
    shape = [*scales.shape, codes.numel() // max(scales.numel(), 1)]
    stored = [Stored(prefix, "codes", codes.dtype, tuple(codes.shape)),
              Stored("SCB", "scales", scales.dtype, tuple(scales.shape))]
    if "weight_format" in members:
        if int(members["weight_format"]):
            raise errors.InputError("int8 codes in an order other than rows are not read")
        stored.append(Stored("weight_format", b"\0", torch.uint8, tuple(members["weight_format"].shape)))
    return shape, dict(form="int8", block=0, nested_block=0, offset=0.0, dtype=None, codes=codes,
                       scales=scales), stored


def _integers(weight, members):
    """compressed-tensors."""
    packed = "weight_packed" in members
    codes, scales = members["weight_packed" if packed else "weight"], members.get("weight_scale")
    if scales is None or (packed and "weight_shape" not in members):
        _missing(weight, "weight_scale" if scales is None else "weight_shape")
    shape = members["weight_shape"].tolist() if packed else list(codes.shape)
    bits = codes.numel() * codes.element_size() * 8 // max(shape[0] * shape[1], 1)
    if scales.ndim != 2 or scales.shape[0] != shape[0] or bits not in (4, 8):
        raise errors.InputError(f"the integers of '{weight}' have {bits} bits and scales {list(scales.shape)}, a form "
                                "that qconv.load does not read")
    stored = [Stored("weight_packed" if packed else "weight", "codes", codes.dtype, tuple(codes.shape)),
              Stored("weight_scale", "scales", scales.dtype, tuple(scales.shape))]
    if packed:
        stored.append(Stored("weight_shape", members["weight_shape"].numpy().tobytes(), torch.int64, (2,)))
    return shape, dict(form=f"w{bits}a16" if packed else "w8a8", nested_block=0, offset=0.0, dtype=scales.dtype,
                       block=0 if scales.shape[1] == 1 else shape[1] // scales.shape[1], codes=codes,
                       scales=scales), stored


def weights_of(weight: str, members: Dict[str, torch.Tensor]) -> List[QuantizedWeight]:
    """The weight that a group of tensors is; or, of a stack [experts, rows, cols], those of its experts."""
    state = [ending for ending in members if "quant_state." in ending]
    if state:
        shape, parts, stored = _blockwise(weight, members, state[0])
    elif "SCB" in members:
        shape, parts, stored = _by_rows(members)
    else:
        shape, parts, stored = _integers(weight, members)
    parts = {key: as_role(key, value) if key in ROLES else value for key, value in parts.items()}
    if len(shape) == 2:
        return [QuantizedWeight(rows=shape[0], cols=shape[1], stored=stored, name=weight, **parts)]
    if len(shape) != 3:
        raise errors.InputError(f"the quantized weight '{weight}' has {len(shape)} dimensions; expected 2 or 3")
    return experts_of(QuantizedWeight(rows=shape[0] * shape[1], cols=shape[2], name=weight, **parts), shape[0])


def experts_of(stack: QuantizedWeight, count: int) -> List[QuantizedWeight]:
    """The weights of a stack's experts, as views of its tensors. No block spans two experts. Where a group of nested
    scales does, the scales become floats."""
    elems = stack.rows // count * stack.cols
    scales = elems // stack.block if stack.block else stack.rows // count
    if stack.nested_absmax is not None and scales % stack.nested_block:
        nested = stack.nested_absmax.view(torch.float32).repeat_interleave(stack.nested_block)
        values = stack.nested_map.view(torch.float32)[stack.scales.int()]
        plain = values * nested[:values.numel()] + stack.offset
        stack = replace(stack, scales=plain.view(torch.uint8), nested_absmax=None, nested_map=None, nested_block=0,
                        offset=0.0)
    code_bytes = stack.codes.numel() // count
    scale_bytes = scales * (1 if stack.nested_absmax is not None else 4)
    out = []
    for i in range(count):
        nested = stack.nested_absmax
        if nested is not None:
            step = scales // stack.nested_block * 4
            nested = nested[i * step:(i + 1) * step]
        out.append(replace(stack, rows=stack.rows // count, codes=stack.codes[i * code_bytes:(i + 1) * code_bytes],
                           scales=stack.scales[i * scale_bytes:(i + 1) * scale_bytes], nested_absmax=nested))
    return out

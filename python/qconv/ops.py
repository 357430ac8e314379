"""Operators of torch over weights as qconv stores them: qconv::linear, qconv::dequantize and qconv::experts.

    qconv::linear(x, *weight, bias, *numbers) -> y = x W^T + bias, in x's dtype
    qconv::dequantize(*weight, *numbers, dtype) -> W [rows, cols]
    qconv::experts(x, offsets, x_rows, row_weights, *weight, bias, *numbers) -> y, whose rows offsets[e] .. offsets[e + 1]
        are of expert e

A weight is codes, scales, code_map, nested_absmax and nested_map, the tensors of the file byte for byte (docs/format.md,
section 3): each may also come as a tensor of its bytes (uint8). scales are floats, or codes of 8 bits where there is a
nested_absmax. The numbers are form ("nf4", "int8", "int8-block", "w2a16" to "w8a16", "w8a8"), rows, cols, block (weights
that share a scale; 0: one scale a row), nested_block and offset.

For experts, codes, scales and nested_absmax have a dimension more in front, the maps are those of all experts, and
offset is a list. offsets [experts + 1] and x_rows are int32: row i of y is made of row x_rows[i] of x, or of row i
without them. Rows of y outside of the offsets are zero. bias is [experts, rows] of the weights. Row i of y, bias and
all, is multiplied by row_weights[i], which are float32, before it is rounded; without kernels for it, as on a GPU in
float32, the product is rounded before that, too.

docs/python-load.md says what multiplies on the CPU and on GPUs (_gpu.py), and with which bits. Backward gives the gradients
of x, bias and row_weights. The functions below take the operators' arguments: `rest` is those behind x.
"""
import functools
import os
import threading

import torch

from . import _gpu, _library, errors
from ._library import MatmulIo

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_DTYPES = {dtype: _library.DTYPES.index(name) for dtype, name in _NAMES.items()}
_F32 = torch.float32
INT8_STEP = 0.007874015718698502  # 1/127 rounded to float

_WEIGHT = "Tensor codes, Tensor scales, Tensor? code_map, Tensor? nested_absmax, Tensor? nested_map"
_NUMBERS = "str form, int rows, int cols, int block, int nested_block, float offset"
_library_of_ops = torch.library.Library("qconv", "DEF")
_library_of_ops.define(f"linear(Tensor x, {_WEIGHT}, Tensor? bias, {_NUMBERS}) -> Tensor")
_NUMBERS_OF_EXPERTS = _NUMBERS.replace("float offset", "float[] offset")
_library_of_ops.define(f"experts(Tensor x, Tensor offsets, Tensor? x_rows, Tensor? row_weights, {_WEIGHT}, Tensor? bias, "
                       f"{_NUMBERS_OF_EXPERTS}) -> Tensor")
_library_of_ops.define(f"experts_gradient(Tensor gradient, Tensor offsets, {_WEIGHT}, {_NUMBERS_OF_EXPERTS}) -> Tensor")
_library_of_ops.define(f"dequantize({_WEIGHT}, {_NUMBERS}, ScalarType dtype) -> Tensor")


# ---- the CPU ------------------------------------------------------------------------------------


_handles, _left, _making = {}, [], threading.Lock()


def _matmul():
    """Threads of libqconv, as many as torch has. Products of several threads of Python wait for each other."""
    threads = torch.get_num_threads()
    handle = _handles.get(threads)
    if handle is None:
        with _making:
            handle = _handles.setdefault(threads, _handles.get(threads) or _library.Matmul(threads))
    return handle


def _after_fork():
    """A child has none of its parent's threads, so it neither uses nor ends them."""
    global _handles, _making
    _left.append(_handles)
    _handles, _making = {}, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _address(tensor):
    if tensor is None:
        return 0, 0
    if not tensor.is_contiguous():
        raise errors.UsageError("a weight's tensors must be contiguous")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


# All that the description says is in its key, so it may outlive the tensors.
_described = functools.lru_cache(maxsize=1 << 16)(_library.weights)


def _weights(tensors, numbers):
    (codes, code_bytes), (scales, scale_bytes), (code_map, map_bytes), (nested, nested_bytes), (nested_map, nested_map_bytes) = \
        map(_address, tensors)
    if (code_map and map_bytes != 64) or (nested_map and nested_map_bytes != 1024):
        raise errors.UsageError("a code map has 16 floats and that of nested scales 256")
    *numbers, nested_block, offset = numbers
    return _described(*numbers, codes, code_bytes, scales, scale_bytes // (1 if nested else 4), code_map, nested,
                      nested_bytes // 4, nested_map, nested_block, offset)


def _same_device(x, *tensors):
    for tensor in tensors:
        if tensor is not None and tensor.device != x.device:
            raise errors.UsageError(f"x is on {x.device} and the weight on {tensor.device}")


def _rows_of(x, cols):
    if x.dtype not in _DTYPES:
        raise errors.UsageError(f"x is {x.dtype}; expected float32, float16 or bfloat16")
    if x.shape[-1] != cols:
        raise errors.UsageError(f"x has {x.shape[-1]} columns and the weight {cols}")
    x = x.reshape(-1, cols)
    apart = x.shape[0] <= 1 or x.stride(0) >= cols  # rows of an expanded x are one
    return x if apart and (x.stride(1) == 1 or cols <= 1) else x.contiguous()


def _added(bias, rows, dtype):
    if bias is None:
        return None
    if bias.numel() != rows:
        raise errors.UsageError(f"the bias has {bias.numel()} elements and the weight {rows} rows")
    return bias.to(dtype).contiguous()


def linear_cpu(x, *rest, y_dtype=None):
    tensors, bias, numbers = rest[:5], rest[5], rest[6:]
    _same_device(x, *tensors, bias)
    rows, cols = numbers[1:3]
    flat, w = _rows_of(x, cols), _weights(tensors, numbers)
    m = flat.shape[0]
    y, added = torch.empty((*x.shape[:-1], rows), dtype=y_dtype or x.dtype), _added(bias, rows, _F32)
    if m > RESTORED_ABOVE:
        return _restored(w, flat, bias, y)
    if y.numel():
        _matmul().run(w, MatmulIo(x=flat.data_ptr(), x_dtype=_DTYPES[x.dtype], m=m, ldx=max(flat.stride(0), cols),
                                  y=y.data_ptr(), y_dtype=_DTYPES[y.dtype], ldy=rows,
                                  bias=None if added is None else added.data_ptr()))
    return y


def _restores_to(dtype):
    if dtype not in _NAMES:
        raise errors.UsageError(f"a weight is restored to float32, float16 or bfloat16, not {dtype}")


def dequantize_cpu(*args):
    tensors, numbers, dtype = args[:5], args[5:-1], args[-1]
    _restores_to(dtype)
    w, out = _weights(tensors, numbers), torch.empty(numbers[1:3], dtype=dtype)
    if out.numel():
        _library.dequantize(w, 0, out.shape[0], out.data_ptr(), _NAMES[dtype], torch.get_num_threads())
    return out


# Rows of x above which torch multiplies with the restored weight, and how much of it is restored at a time
# (bench/bench_python_load.py --rows; docs/python-load.md has what it measured).
RESTORED_ABOVE = 160
RESTORED_BYTES = 64 << 20


def _restored(w, x, bias, y):
    """y = x W^T + bias in torch, in bfloat16 where the processor multiplies in it, else in floats."""
    fast = x.dtype == y.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    dtype, rows, cols = x.dtype if fast else _F32, y.shape[-1], x.shape[1]
    step = max(1, RESTORED_BYTES // (cols * dtype.itemsize))
    x, out = x.to(dtype), y.view(-1, rows)
    bias = None if bias is None else bias.to(dtype)
    for first in range(0, rows, step):
        some = torch.empty((min(step, rows - first), cols), dtype=dtype)
        _library.dequantize(w, first, some.shape[0], some.data_ptr(), _NAMES[dtype], torch.get_num_threads())
        part = slice(first, first + some.shape[0])
        out[:, part] = torch.nn.functional.linear(x, some, None if bias is None else bias[part])
    return y


# ---- any device, with torch alone ---------------------------------------------------------------


def _floats(tensor):
    return tensor.view(_F32) if tensor.dtype == torch.uint8 else tensor


def _unpacked(codes, form, rows, cols):
    """[rows, cols]: packed codes, a byte each. Eight of them are `bits` bytes."""
    bits, eights, size = _library.code_bits(form), -(-cols // 8), _library.row_bytes(form, cols)
    codes = torch.nn.functional.pad(codes.view(rows, size), (0, eights * bits - size)).view(rows, eights, bits)
    out = []
    for at in range(0, 8 * bits, bits):
        code = codes[..., at // 8] >> at % 8
        if at % 8 + bits > 8:
            code = code | codes[..., at // 8 + 1] << 8 - at % 8
        out.append(code & (1 << bits) - 1)
    return torch.stack(out, -1).view(rows, 8 * eights)[:, :cols]


def dequantize_torch(codes, scales, code_map, nested_absmax, nested_map, form, rows, cols, block, nested_block, offset,
                     dtype):
    """The same numbers as libqconv's, to the bit, on the device of codes."""
    if nested_absmax is None:
        scales = _floats(scales).view(-1)
    else:
        scales = _floats(nested_map)[scales.view(torch.uint8).view(-1).int()]
        nested = _floats(nested_absmax).repeat_interleave(nested_block)[:scales.numel()]
        scales = scales * nested + offset
    n = rows * cols
    codes = codes.view(torch.uint8).view(-1)
    if form == "nf4":
        codes = torch.stack((codes >> 4, codes & 15), 1).view(-1)[:n]
        values = _floats(code_map)[codes.int()]
    elif _library.is_packed(form):
        values = _unpacked(codes, form, rows, cols).reshape(-1).to(_F32) - 2.0 ** (_library.code_bits(form) - 1)
    else:
        values = codes.view(torch.int8).to(_F32)
    share = block or cols
    if n % share:  # a short last block
        values = torch.nn.functional.pad(values, (0, share - n % share))
    values = values.view(-1, share)
    if form == "int8-block":
        values = values * INT8_STEP * scales[:, None]
    else:
        values = values * scales[:, None]
        if form == "int8":
            values = values * INT8_STEP
    return values.view(-1)[:n].view(rows, cols).to(dtype)


def linear_torch(x, *rest):
    tensors, bias, numbers = rest[:5], rest[5], rest[6:]
    _same_device(x, *tensors, bias)
    return torch.nn.functional.linear(x, dequantize_torch(*tensors, *numbers, x.dtype), None if bias is None else bias.to(x.dtype))


# ---- GPUs ---------------------------------------------------------------------------------------

_INTEGERS = tuple(form for form in _library.FORMS if form.startswith("w"))  # only cuBLAS multiplies them


def linear_cuda(x, *rest):
    tensors, bias, numbers = rest[:5], rest[5], rest[6:]
    gpu = _gpu.of(x.device)
    if gpu is None:
        return linear_torch(x, *rest)
    _same_device(x, *tensors, bias)
    form, rows, cols = numbers[:3]
    flat, added = _rows_of(x, cols), _added(bias, rows, x.dtype)
    if x.dtype == _F32 or (gpu.no_gemm and form in _INTEGERS):
        return torch.nn.functional.linear(x, dequantize_cuda(*tensors, *numbers, x.dtype), added)
    y = x.new_empty((*x.shape[:-1], rows))
    if y.numel():
        gpu.linear(flat, tensors, numbers, _weights, added, y)
    return y


def dequantize_cuda(*args):
    tensors, numbers, dtype = args[:5], args[5:-1], args[-1]
    gpu = _gpu.of(tensors[0].device)
    if gpu is None:
        return dequantize_torch(*args)
    _restores_to(dtype)
    _same_device(*tensors)
    w, out = _weights(tensors, numbers), tensors[0].new_empty(numbers[1:3], dtype=dtype)
    if out.numel():
        gpu.dequantize(w, *out.shape, out)
    return out


# ---- experts ------------------------------------------------------------------------------------


def _expert(e, tensors, numbers):
    """The weight of an expert, as the other operators take it."""
    codes, scales, code_map, nested_absmax, nested_map = tensors
    return (codes[e], scales[e], code_map, None if nested_absmax is None else nested_absmax[e], nested_map), (
        *numbers[:-1], numbers[-1][e])


def _check_experts(x, offsets, x_rows, row_weights, tensors, bias, numbers):
    """x with rows of its own, and y for it, of zeros."""
    _same_device(x, offsets, x_rows, row_weights, *tensors, bias)
    count = tensors[0].shape[0]
    if {offsets.dtype, torch.int32 if x_rows is None else x_rows.dtype} != {torch.int32} or offsets.shape != (count + 1,):
        raise errors.UsageError(f"offsets of {count} experts and x_rows are int32; expected {count + 1} offsets")
    if len(numbers[-1]) != count or tensors[1].shape[0] != count:
        raise errors.UsageError(f"there are codes of {count} experts, scales of {tensors[1].shape[0]} and "
                                f"{len(numbers[-1])} nested offsets")
    if bias is not None and tuple(bias.shape) != (count, numbers[1]):
        raise errors.UsageError(f"the bias is {tuple(bias.shape)}; expected {(count, numbers[1])}, a row for each expert")
    flat = _rows_of(x, numbers[2])
    y = x.new_zeros((flat.shape[0] if x_rows is None else x_rows.numel(), numbers[1]))
    if row_weights is not None and (row_weights.dtype != _F32 or row_weights.shape != y.shape[:1]):
        raise errors.UsageError(f"row_weights are {tuple(row_weights.shape)} in {row_weights.dtype}; expected "
                                f"({y.shape[0]},) in torch.float32, one for each row of y")
    return flat, y


def _each(offsets, y, product):
    """product(rows, e) for each expert that has rows. On GPUs this waits for the offsets."""
    ends = offsets.tolist()
    if ends != sorted(ends) or not 0 <= ends[0] <= ends[-1] <= len(y):
        raise errors.UsageError(f"the offsets of experts decrease, or go beyond the {len(y)} rows")
    for e, (begin, end) in enumerate(zip(ends, ends[1:])):
        if begin < end:
            y[begin:end] = product(slice(begin, end), e)
    return y


def experts_each(linear, **in_float):
    """in_float: what makes linear's y float32, where it can."""
    def experts(x, offsets, x_rows, row_weights, *rest):
        tensors, bias, numbers = rest[:5], rest[5], rest[6:]
        flat, y = _check_experts(x, offsets, x_rows, row_weights, tensors, bias, numbers)
        flat = flat if x_rows is None else flat[x_rows]

        def product(rows, e):
            weight, own = _expert(e, tensors, numbers)
            added = None if bias is None else bias[e]
            if row_weights is None:
                return linear(flat[rows], *weight, added, *own)
            return linear(flat[rows], *weight, added, *own, **in_float).to(_F32) * row_weights[rows, None]
        return _each(offsets, y, product)
    return experts


experts_cpu = experts_each(linear_cpu, y_dtype=_F32)


def launcher(device, dtype, form):
    """The Gpu whose kernels multiply such experts in one launch, or None."""
    gpu = _gpu.of(device)
    return None if gpu is None or dtype == _F32 or form in _INTEGERS else gpu


def experts_cuda(x, offsets, x_rows, row_weights, *rest):
    tensors, bias, numbers = rest[:5], rest[5], rest[6:]
    gpu = launcher(x.device, x.dtype, numbers[0])
    if gpu is None:
        return experts_each(linear_cuda)(x, offsets, x_rows, row_weights, *rest)
    flat, y = _check_experts(x, offsets, x_rows, row_weights, tensors, bias, numbers)
    if y.numel():
        x_rows, row_weights = (None if t is None else t.contiguous() for t in (x_rows, row_weights))
        gpu.experts(flat, offsets.contiguous(), x_rows, row_weights, tensors, (*numbers[:-1], tuple(numbers[-1])),
                    _weights_of_experts, None if bias is None else bias.to(x.dtype).contiguous(), y)
    return y


def _weights_of_experts(tensors, numbers):
    each = [_weights(*_expert(e, tensors, numbers)) for e in range(len(numbers[-1]))]
    return (_library.Weights * len(each))(*each)


def experts_gradient(gradient, offsets, *rest):
    """That of x's rows as y has them."""
    tensors, numbers = rest[:5], rest[5:]

    def product(rows, e):
        weight, own = _expert(e, tensors, numbers)
        return gradient[rows] @ dequantize(*weight, *own, gradient.dtype)
    return _each(offsets, gradient.new_zeros(len(gradient), numbers[2]), product)


# ---- registration -------------------------------------------------------------------------------

for _name, _cpu, _cuda in (("linear", linear_cpu, linear_cuda), ("dequantize", dequantize_cpu, dequantize_cuda),
                           ("experts", experts_cpu, experts_cuda)):
    _library_of_ops.impl(_name, _cpu, "CPU")
    _library_of_ops.impl(_name, _cuda, "CUDA")
_library_of_ops.impl("experts_gradient", experts_gradient, "CompositeExplicitAutograd")


def _fake(name):
    return torch.library.register_fake(f"qconv::{name}", lib=_library_of_ops)


@_fake("linear")
def _(x, *rest):
    return x.new_empty((*x.shape[:-1], rest[7]))


@_fake("dequantize")
def _(codes, *rest):
    return codes.new_empty(rest[5:7], dtype=rest[-1])


@_fake("experts")
def _(x, offsets, x_rows, row_weights, *rest):
    rows, cols = rest[7:9]
    return x.new_empty((x.numel() // cols if x_rows is None else x_rows.numel(), rows))


@_fake("experts_gradient")
def _(gradient, offsets, *rest):
    return gradient.new_empty((gradient.shape[0], rest[7]))


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[1:6])
    ctx.numbers, ctx.bias = inputs[7:], None if inputs[6] is None else inputs[6].dtype


def _backward(ctx, gradient):
    for_x = for_bias = None
    if ctx.needs_input_grad[0]:
        w = torch.ops.qconv.dequantize(*ctx.saved_tensors, *ctx.numbers, gradient.dtype)
        for_x = gradient @ w
    if ctx.bias is not None and ctx.needs_input_grad[6]:
        for_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias)
    return for_x, *[None] * 5, for_bias, *[None] * 6


torch.library.register_autograd("qconv::linear", _backward, setup_context=_setup, lib=_library_of_ops)


def _setup_experts(ctx, inputs, output):
    x, offsets, x_rows, row_weights, *weight = inputs[:9]
    bias, needs_y = inputs[9], ctx.needs_input_grad[3]
    ctx.save_for_backward(x if needs_y else None, offsets, x_rows, row_weights, *weight, bias if needs_y else None)
    ctx.numbers, ctx.shape, ctx.bias = inputs[10:], x.shape, None if bias is None else bias.dtype


def _backward_experts(ctx, gradient):
    x, offsets, x_rows, row_weights, *weight, bias = ctx.saved_tensors
    for_x = for_row_weights = for_bias = None
    if ctx.needs_input_grad[3]:
        y = torch.ops.qconv.experts(x, offsets, x_rows, None, *weight, bias, *ctx.numbers)
        for_row_weights = (gradient.to(_F32) * y.to(_F32)).sum(-1)
    if row_weights is not None:
        gradient = (gradient.to(_F32) * row_weights[:, None]).to(gradient.dtype)
    if ctx.needs_input_grad[0]:
        for_x = torch.ops.qconv.experts_gradient(gradient, offsets, *weight, *ctx.numbers)
        if x_rows is not None:
            for_x = for_x.new_zeros(ctx.shape).view(-1, ctx.shape[-1]).index_add(0, x_rows, for_x)
        for_x = for_x.view(ctx.shape)
    if ctx.bias is not None and ctx.needs_input_grad[9]:  # rows outside of the offsets go to sums that are dropped
        count = len(offsets) - 1
        row = torch.arange(len(gradient), dtype=torch.int32, device=offsets.device)
        of = torch.searchsorted(offsets, row, right=True)
        sums = gradient.new_zeros((count + 2, gradient.shape[1]), dtype=_F32).index_add(0, of, gradient.to(_F32))
        for_bias = sums[1:count + 1].to(ctx.bias)
    return for_x, None, None, for_row_weights, *[None] * 5, for_bias, *[None] * 6


torch.library.register_autograd("qconv::experts", _backward_experts, setup_context=_setup_experts,
                                lib=_library_of_ops)

linear = torch.ops.qconv.linear.default
experts = torch.ops.qconv.experts.default
dequantize = torch.ops.qconv.dequantize.default

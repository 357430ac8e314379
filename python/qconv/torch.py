"""Modules of torch whose weights are qconv's codes."""
from typing import List, Optional

import torch
from torch import nn

from . import errors, ops
from ._weights import ROLES, QuantizedWeight, Stored, as_role, in_order, joined, rows_of, to_stored

_VALUES = {getattr(torch.Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag", "grad")}
_SAME = {torch.Tensor.detach, torch.Tensor.contiguous, torch.Tensor.to, torch.Tensor.requires_grad_, torch.Tensor.cpu,
         torch.Tensor.cuda, torch.Tensor.data.__get__}
_ASKS = {torch.Tensor.is_floating_point, torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel,
         torch.Tensor.is_contiguous, torch.Tensor.get_device, torch.Tensor.is_complex, torch.Tensor.__repr__,
         torch.Tensor.element_size, torch.Tensor.is_shared, torch.Tensor.__hash__}


class QuantizedTensor(torch.Tensor):
    """Stands for a weight that is codes wherever a tensor is asked for: with its shape [rows, cols] or [experts, rows,
    cols], dtype and device, but without numbers of its own. torch.nn.functional.linear multiplies with it. torch.stack
    makes stacks of it, torch.cat joins rows, torch.chunk and split divide them. It is not copied, cast or moved."""

    @staticmethod
    def __new__(cls, experts: List[List[QuantizedWeight]], dtype, stacked=False, transposed=False):
        parts = experts[0]
        rows, cols = sum(w.rows for w in parts), parts[0].cols
        shape = (cols, rows) if transposed else (rows, cols)
        return torch.Tensor._make_wrapper_subclass(cls, (len(experts), *shape) if stacked else shape, dtype=dtype,
                                                   device=parts[0].codes.device)

    def __init__(self, experts, dtype, stacked=False, transposed=False):
        self.experts, self.stacked, self.transposed = experts, stacked, transposed

    @property
    def name(self):
        return self.experts[0][0].name

    def __repr__(self):
        return f"QuantizedTensor({self.name!r}, {tuple(self.shape)}, {self.experts[0][0].form})"

    def dequantize(self, dtype=None):
        """The weight as a tensor of floats."""
        whole = [torch.cat([w.dequantize(dtype or self.dtype) for w in parts]) for parts in self.experts]
        whole = [w.T.contiguous() for w in whole] if self.transposed else whole
        return torch.stack(whole) if self.stacked else whole[0]

    def _like(self, experts, stacked):
        return QuantizedTensor(experts, self.dtype, stacked, self.transposed)

    refused: Optional[errors.Error] = None  # transformers reports only that there was one

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        try:
            return cls._computed(function, args, kwargs or {})
        except errors.Error as e:
            QuantizedTensor.refused = e
            raise

    @classmethod
    def _computed(cls, function, args, kwargs):
        if function in _SAME:
            return args[0]
        if function is torch.Tensor.__getitem__ and args[1] is Ellipsis:
            return args[0]
        if function in (torch.stack, torch.cat):
            return _joined(function, args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0))
        if function in (torch.chunk, torch.split):
            return _divided(function, *args, **kwargs)
        if function is torch.Tensor.view and args[1:] and args[-1] == args[0].shape[-1] and not (
                args[0].stacked or args[0].transposed):
            return _Rows(args[0], torch.arange(args[0].shape[0]).view(args[1:-1]))
        if function is nn.functional.linear:
            return _linear(*args, **kwargs)
        if function in _ASKS or (function.__name__ == "__get__" and function not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        name = next((a.name for a in args if isinstance(a, cls)), "")
        raise errors.UsageError(f"the weight '{name}' is codes, and {getattr(function, '__name__', function)} takes "
                                "numbers: dequantize() makes a tensor of it, and `qconv convert --keep` leaves it in 16 "
                                "bits")

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise errors.UsageError(f"a quantized weight is codes, and {function} takes numbers")


def _joined(function, tensors, dim):
    first = tensors[0]
    if not all(isinstance(t, QuantizedTensor) for t in tensors):
        plain = next(i for i, t in enumerate(tensors) if not isinstance(t, QuantizedTensor))
        name = next(t.name for t in tensors if isinstance(t, QuantizedTensor))
        raise errors.InputError(f"transformers holds '{name}' and tensor {plain} of its stack as one, and only some of "
                                "them are quantized: convert all of them, or none")
    if function is torch.stack and dim == 0 and not any(t.stacked for t in tensors):
        return first._like([t.experts[0] for t in tensors], True)
    if function is torch.cat and dim == (1 if first.stacked else 0) and all(t.stacked == first.stacked for t in tensors):
        return first._like([sum(parts, []) for parts in zip(*(t.experts for t in tensors))], first.stacked)
    raise errors.InputError(f"transformers joins '{first.name}' with others along its columns, which codes cannot be: "
                            "convert with --keep for it")


def _divided(function, tensor, parts, dim=0):
    if tensor.stacked or dim % 2 != int(tensor.transposed):
        raise errors.InputError(f"transformers divides '{tensor.name}' along its columns, which codes cannot be: convert with "
                                "--keep for it")
    whole, begin, out = joined(tensor.experts[0]), 0, []
    for rows in function(torch.empty(whole.rows, device="meta"), parts):
        out.append(tensor._like([[rows_of(whole, begin, begin + len(rows))]], False))
        begin += len(rows)
    return tuple(out)


class _Rows:
    """A weight as [heads, ..., cols], of which transformers puts rows in another order (its PermuteForRope)."""

    def __init__(self, tensor, order):
        self.tensor, self.order, self.shape = tensor, order, (*order.shape, tensor.shape[-1])

    def transpose(self, one, other):
        return _Rows(self.tensor, self.order.transpose(one, other))

    def reshape(self, *shape):
        try:
            if shape != tuple(self.tensor.shape):
                raise errors.InputError(f"transformers gives '{self.tensor.name}' another shape, which codes cannot have: "
                                        "convert with --keep for it")
            return self.tensor._like([[in_order(joined(self.tensor.experts[0]), self.order.reshape(-1))]], False)
        except errors.Error as e:
            QuantizedTensor.refused = e
            raise


def _linear(x, weight, bias=None):
    if not isinstance(weight, QuantizedTensor) or weight.stacked or weight.transposed:
        raise errors.UsageError("a product takes x and a quantized weight [rows, cols]")
    ys = [ops.linear(x, *w.tensors(), None, *w.numbers) for w in weight.experts[0]]
    y = ys[0] if len(ys) == 1 else torch.cat(ys, -1)
    return y if bias is None else y + bias


class Linear(nn.Linear):
    """y = x W^T + bias with W in qconv's codes, multiplied by qconv::linear (ops.py).

    Its parameters are the file's tensors as bytes, which neither .half() nor .to(dtype) changes. `weight` stands for
    the whole: it has the shape, dtype and device of the weight that it was. state_dict() has the file's names, so
    save_pretrained writes what qconv convert --compress none does. Gradients flow to x and bias, not to the codes."""

    def __init__(self, weight: QuantizedWeight, bias: Optional[torch.Tensor] = None, dtype=torch.bfloat16):
        nn.Module.__init__(self)  # nn.Linear's own makes a weight of floats
        self.in_features, self.out_features = weight.cols, weight.rows
        self.numbers, self.compute_dtype, self.name = weight.numbers, dtype, weight.name
        self.divided = not weight.stored  # the file has it within another tensor, or as several
        self.stored = weight.stored or [Stored(role, role, t.dtype, tuple(t.shape))
                                        for role, t in zip(ROLES, weight.tensors()) if t is not None]
        for role in ROLES:
            tensor = getattr(weight, role)
            self.register_parameter(role, None if tensor is None else nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)

    @property
    def form(self):
        return self.numbers[0]

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight with the file's bytes."""
        return QuantizedWeight(*self.numbers, self.compute_dtype, *(getattr(self, role) for role in ROLES),
                               stored=self.stored, name=self.name)

    @property
    def weight(self) -> QuantizedTensor:
        return QuantizedTensor([[self.quantized]], self.compute_dtype)

    def dequantize(self, dtype=None) -> torch.Tensor:
        """W as a tensor of floats."""
        return self.quantized.dequantize(dtype or self.compute_dtype)

    def forward(self, x):
        return ops.linear(x, self.codes, self.scales, self.code_map, self.nested_absmax, self.nested_map, self.bias,
                          *self.numbers)

    def extra_repr(self):
        _, rows, cols, block, *_ = self.numbers
        return (f"{cols}, {rows}, bias={self.bias is not None}, {self.form}" + (f", block={block}" if block else ""))

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        tensors = {role: getattr(self, role) for role in ROLES}
        for ending, tensor in to_stored(self.stored, tensors).items():
            destination[prefix + ending] = tensor
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias if keep_vars else self.bias.detach()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                              error_msgs):
        for ending, role, dtype, shape in self.stored:
            tensor = state_dict.get(prefix + ending)
            if tensor is None:
                missing_keys.append(prefix + ending)
            elif tuple(tensor.shape) != shape or tensor.dtype != dtype:
                error_msgs.append(f"{prefix}{ending} is {tensor.dtype} {list(tensor.shape)}; expected {dtype} "
                                  f"{list(shape)}")
            elif role not in ROLES:
                if tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() != role:
                    error_msgs.append(f"{prefix}{ending} describes another form of the weight than this module has")
            else:
                with torch.no_grad():
                    getattr(self, role).copy_(as_role(role, tensor))
        if self.bias is not None:
            if prefix + "bias" in state_dict:
                with torch.no_grad():
                    self.bias.copy_(state_dict[prefix + "bias"])
            else:
                missing_keys.append(prefix + "bias")
        if strict:
            known = {prefix + s.ending for s in self.stored} | {prefix + "bias"}
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k not in known]


class Stack(nn.Module):
    """The weights of a layer's experts where transformers holds them as one tensor [experts, rows, cols], or
    transposed. stack[i] stands for the matrix of an expert, in products only; products() has those of all.

    Where the experts are alike, their parameters are views of one tensor each, which qconv::experts takes."""

    def __init__(self, tensor: QuantizedTensor):
        super().__init__()
        self.shape, self.dtype, self.transposed, self.name = tensor.shape, tensor.dtype, tensor.transposed, tensor.name
        self.experts = nn.ModuleList(
            nn.ModuleList(Linear(part, None, tensor.dtype) for part in parts) for parts in tensor.experts)
        self._lay_out()

    def _lay_out(self):
        """Makes (tensors, numbers) of each part, for products(); None where the experts are not alike."""
        self.whole = [(part[0].codes, alike(list(part))) for part in zip(*self.experts)]

    def _apply(self, fn, *args, **kwargs):
        super()._apply(fn, *args, **kwargs)
        self._lay_out()
        return self

    def __getstate__(self):
        return {**self.__dict__, "whole": None}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._lay_out()

    def multiplies(self):
        """Whether products() can be called. Hooks of accelerate bring the weights of a layer when it is called."""
        return not any(made is None or first is not part.codes or hasattr(part, "_hf_hook")
                       for part, (first, made) in zip(self.experts[0], self.whole))

    def products(self, x, offsets, x_rows=None, row_weights=None, bias=None):
        """y whose rows offsets[e] .. offsets[e + 1] are (x[x_rows] W_e^T + bias[e]) row_weights (ops.py)."""
        ys, end = [], 0
        for _, (tensors, numbers) in self.whole:
            begin, end = end, end + numbers[1]
            ys.append(ops.experts(x, offsets, x_rows, row_weights, *tensors, None if bias is None else bias[:, begin:end],
                                  *numbers))
        return ys[0] if len(ys) == 1 else torch.cat(ys, -1)

    @property
    def device(self):
        return self.experts[0][0].codes.device

    def __len__(self):
        return len(self.experts)

    def __getitem__(self, expert):
        return _Matrix(self.experts[int(expert)], self.transposed, self.name)


def routed(x, chosen, weights, count, experts):
    """The sum of experts' outputs for each row of x: chosen and weights are [rows of x, experts for each]. Numbers of
    experts below 0, and from count on, add nothing. experts(x, offsets, x_rows, row_weights) computes with rows that are
    sorted by expert, and the sum is in float, in the order of chosen."""
    tokens, each = chosen.shape
    chosen = chosen.reshape(-1).long()
    order = torch.sort(torch.where(chosen < 0, count, chosen), stable=True)
    offsets = torch.searchsorted(order.values, torch.arange(count + 1, device=x.device), out_int32=True)
    y = experts(x, offsets, (order.indices // each).int(), weights.reshape(-1).to(torch.float32)[order.indices])
    back = torch.empty_like(order.indices).scatter_(0, order.indices, torch.arange(len(chosen), device=x.device))
    return y[back].view(tokens, each, -1).sum(1).to(x.dtype)


def alike(layers):
    """(tensors, numbers) of layers as qconv::experts takes them, of whose tensors the layers then are views; None where
    they differ in more than their numbers."""
    first, tensors = layers[0], []
    if any(layer.numbers[:-1] != first.numbers[:-1] for layer in layers):
        return None
    for role in ROLES:
        each = [getattr(layer, role) for layer in layers]
        same = all(t is None or (t.shape == each[0].shape and t.device == each[0].device) for t in each)
        if not same or len({t is None for t in each}) > 1:
            return None
        if each[0] is None or role.endswith("map"):
            if each[0] is not None and not all(torch.equal(t, each[0]) for t in each):
                return None
            tensors.append(None if each[0] is None else each[0].data)
            continue
        tensors.append(torch.stack([t.data for t in each]))
    for role, whole in zip(ROLES, tensors):
        for i, layer in enumerate(layers if whole is not None else ()):
            getattr(layer, role).data = whole if role.endswith("map") else whole[i]
    return tensors, (*first.numbers[:-1], [layer.numbers[-1] for layer in layers])


class _Matrix:
    """One matrix of a stack: x @ m, and linear(x, m)."""

    def __init__(self, parts, transposed, name):
        self.parts, self.transposed, self.name = parts, transposed, name

    @property
    def T(self):
        return _Matrix(self.parts, not self.transposed, self.name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        products = {nn.functional.linear: False, torch.matmul: True, torch.Tensor.matmul: True, torch.mm: True,
                    torch.Tensor.mm: True, torch.Tensor.__matmul__: True}
        if function in products and isinstance(args[1], cls) and not isinstance(args[0], cls):
            x, matrix, *bias = args
            if matrix.transposed == products[function]:
                y = [part(x) for part in matrix.parts]
                y = y[0] if len(y) == 1 else torch.cat(y, -1)
                bias = bias[0] if bias else (kwargs or {}).get("bias")
                return y if bias is None else y + bias
        raise errors.UsageError(f"the experts of '{next(a.name for a in args if isinstance(a, cls))}' are codes, which "
                                f"{getattr(function, '__name__', function)} does not take: load with "
                                "experts_implementation=\"eager\", or convert with --keep for them")

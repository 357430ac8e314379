"""Pieces of layers of vLLM: some outputs of a layer in whatever form the output has them.

Which rows and columns of a weight belong to a layer of this worker is what the layer's own weight loader says.
"""
import weakref
from dataclasses import replace
from typing import List

import torch
from torch.nn import Parameter
from torch.nn.functional import linear
from vllm.model_executor.utils import set_weight_attrs

from .. import errors, ops
from .._weights import ROLES
from .._stored import Part
from ..torch import QuantizedTensor

PLAIN = (torch.bfloat16, torch.float16, torch.float32)
_tables = weakref.WeakValueDictionary()


class Handle(QuantizedTensor):
    """A quantized weight on its way to its layer, of which nothing was read. vLLM makes a list of one of an expert's
    weight, and takes it out again."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.unsqueeze and tuple(args[1:]) == (0,):
            return args[0]
        if function is torch.Tensor.unbind and len(args) == 1:
            return (args[0],)
        return super().__torch_function__(function, types, args, kwargs)


def handle(stored, start):
    """start(f) lets f read beside others, and returns a function that waits for what f returns."""
    weight = Handle([[stored.form]], torch.bfloat16)
    weight.stored, weight.start = stored, start
    return weight


def reading(layer_name, weight, rows, cols, like, or_restored=False):
    """A function that returns rows [rows[0], rows[1]) and columns of a weight on the device of `like`: a Part, or plain
    numbers in its dtype. or_restored: numbers, too, where codes cannot be cut so."""
    if isinstance(weight, QuantizedTensor):
        stored = weight.stored
        try:
            stored.cut(rows, cols)
        except errors.InputError:
            if not or_restored:
                raise
            whole = [(0, n) for n in stored.shape]
            return weight.start(lambda: stored.part(*whole).weight.dequantize(like.dtype)[slice(*rows), slice(*cols)].to(
                like.device, copy=True))

        def placed():
            found, skip = stored.part(rows, cols)
            return Part(replace(found, **{role: None if t is None else t.to(like.device)
                                          for role, t in zip(ROLES, found.tensors())}), skip)
        return weight.start(placed)
    if weight.dtype not in PLAIN:
        raise errors.InputError(f"a weight of '{layer_name}' stays in {weight.dtype}, which the plug-in does not "
                                "multiply; 'qconv --to bf16' restores the model")
    part = weight[slice(*rows), slice(*cols)]
    part = part.to(like.device, like.dtype, copy=part.shape != weight.shape)
    return lambda: part


class Codes(torch.nn.Module):
    """Outputs [first, first + count) of a layer in qconv's form, before which `skip` were not asked for."""

    def __init__(self, first, count, skip, tensors, numbers):
        super().__init__()
        self.first, self.count, self.skip, self.numbers = first, count, skip, numbers
        for role, tensor in zip(ROLES, tensors):
            if tensor is not None:
                tensor = table(tensor) if role.endswith("map") else Parameter(tensor, requires_grad=False)
            self.register_parameter(role, tensor)


class Piece(Codes):
    """Outputs of a layer: a Part, or a plain tensor [count, columns]."""

    def __init__(self, first, count, weight):
        if isinstance(weight, Part):
            super().__init__(first, count, weight.skip, weight.weight.tensors(), weight.weight.numbers)
        else:
            super().__init__(first, count, 0, [weight, *[None] * 4], None)

    def forward(self, x):
        if self.numbers is None:
            return linear(x, self.codes)
        y = ops.linear(x, self.codes, self.scales, self.code_map, self.nested_absmax, self.nested_map, None,
                       *self.numbers)
        return y[..., self.skip:] if self.skip else y

    def join(self, other) -> bool:
        """Takes the next piece into this one, if their codes can simply be laid end to end."""
        if (self.numbers is None) != (other.numbers is None):
            return False
        if self.numbers:
            form, rows, cols, block, nested_block, offset = self.numbers
            if other.numbers != (form, other.numbers[1], cols, block, nested_block, offset) or self.skip or other.skip:
                return False
            if rows * cols % (max(block, 2) * max(nested_block, 1)):
                return False
            if self.code_map is not other.code_map or self.nested_map is not other.nested_map:
                return False
            self.numbers = form, rows + other.numbers[1], cols, block, nested_block, offset
        for role in ("codes", "scales", "nested_absmax"):
            if getattr(self, role) is not None:
                both = torch.cat([getattr(self, role), getattr(other, role)])
                setattr(self, role, Parameter(both, requires_grad=False))
        self.count += other.count
        return True

    def values(self, dtype):
        """The weights of its outputs in numbers."""
        if self.numbers is None:
            return self.codes
        tensors = (getattr(self, role) for role in ROLES)
        return ops.dequantize(*tensors, *self.numbers, dtype)[self.skip:]


def table(tensor):
    """The one parameter for all tables of these numbers on a device: those of all weights are alike."""
    made = Parameter(tensor, requires_grad=False)
    return _tables.setdefault((tensor.device, tensor.cpu().numpy().tobytes()), made)


def joined(pieces) -> list:
    """Fewer pieces, where some lie end to end."""
    found = []
    for piece in pieces:
        if not (found and found[-1].join(piece)):
            found.append(piece)
    return found


def taken(load, axis, held, whole, *shard, **named):
    """Which rows (axis 0) or columns (1) of a weight a layer's weight loader puts where: for each that the layer holds
    its number among `whole`, or -1 where it is another weight's."""
    def shape(n):
        return (n, 1) if axis == 0 else (1, n)

    proxy = Parameter(torch.full(shape(held), -1), requires_grad=False)
    set_weight_attrs(proxy, {"output_dim" if axis == 0 else "input_dim": axis, "ignore_warning": True})
    load(proxy, torch.arange(whole).view(shape(whole)), *shard, **named)
    return proxy.data.flatten()


def runs(taken) -> List[tuple]:
    """(place in the layer, first row of the weight, how many) for each run of rows."""
    places = (taken >= 0).nonzero().flatten()
    if not len(places):
        return []
    rows = taken[places]
    begins = torch.cat([torch.tensor([True]), (places.diff() != 1) | (rows.diff() != 1)]).nonzero().flatten().tolist()
    return [(places[a].item(), rows[a].item(), b - a) for a, b in zip(begins, [*begins[1:], len(places)])]

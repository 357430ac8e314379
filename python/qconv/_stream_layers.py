"""Layers of a model: which modules they are, one call of one, cut into slices of the batch, and its gradients."""
from __future__ import annotations

import copy
import tempfile
from collections.abc import MutableMapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers.cache_utils import Cache

from ._stream_catch import Catch

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
    MARKED: Tuple[type, ...] = (GradientCheckpointingLayer,)
except ImportError:
    MARKED = ()

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
WHOLE = slice(None)
LEAST_IN_FILE = 1 << 20     # bytes: smaller tensors stay in memory


def find_layers(model: nn.Module) -> List[str]:
    """Module paths of the layers, in the order of modules.

    A layer is the outermost member of a list of modules that transformers treats as one: it can compute its
    activations again (GradientCheckpointingLayer), or some module names its class as not to be split. Beside these,
    outermost members of other lists that hold two or more matrices.
    """
    named = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    members = [("%s.%s" % (path, key) if path else key, child) for path, parent in model.named_modules()
               if isinstance(parent, LISTS) for key, child in parent._modules.items()
               if child is not None and next(child.parameters(), None) is not None]
    marked = outermost(members, lambda m: isinstance(m, MARKED) or type(m).__name__ in named)
    plain = outermost(members, lambda m: not isinstance(m, LISTS))
    plain = {path: child for path, child in plain.items()
             if sum(weight.dim() == 2 for weight in child.parameters()) >= 2
             and not any(inside(path, other) or inside(other, path) or child is module
                         for other, module in marked.items())}
    return [path for path, _ in model.named_modules() if path in marked or path in plain]


def inside(path: str, other: str) -> bool:
    """Is a module path another one, or within it?"""
    return (path + ".").startswith(other + ".")


def outermost(members: List[Tuple[str, nn.Module]], is_layer: Callable[[nn.Module], bool]) -> Dict[str, nn.Module]:
    """The members that are layers and lie in no other such, each module once."""
    found: Dict[str, nn.Module] = {}
    for path, child in sorted(members, key=lambda member: member[0].count(".")):
        if is_layer(child) and not any(inside(path, other) or child is module for other, module in found.items()):
            found[path] = child
    return found


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def place(shape: Sequence[int], like: torch.Tensor, folder: Union[None, str, Path]) -> torch.Tensor:
    """Room for hidden states: on the device of `like`, or, if they are large, in a file of `folder` without a name."""
    size = int(torch.Size(shape).numel())
    if folder is None or size * like.element_size() < LEAST_IN_FILE:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device if folder is None else "cpu")
    with tempfile.NamedTemporaryFile(dir=str(folder), prefix="states-") as file:
        return torch.from_file(file.name, shared=True, size=size, dtype=like.dtype).view(tuple(shape))


class Call:
    """One call of a layer: its arguments for the whole batch, and how they are cut.

    Attributes: `stream`; `name`, the layer's module path; `layer`; `tensors`, the tensors among its arguments; `batch`,
    the rows of this call, 0 where it is not cut (packed rows of images) and the one piece is slice(None).
    """

    def __init__(self, stream: Any, name: str, layer: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        self.stream, self.name, self.layer = stream, name, layer
        # Mappings through which layers hand tensors on are inputs and outputs at once.
        self.sides = {key: value for key, value in kwargs.items() if isinstance(value, MutableMapping)}
        leaves, self.tree = tree_flatten((args, {key: dict(value) if key in self.sides else value
                                                 for key, value in kwargs.items()}))
        self.at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.static = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.tensors: List[torch.Tensor] = [leaves[i] for i in self.at]
        self.main = self.streams = 0            # the dimension of the batch in hidden states, and what is before it
        first = next((tensor for tensor in self.tensors if is_float(tensor)), None)
        self.batch = 0
        if first is not None and first.dim() >= 3 and stream.batch:
            if second_is_batch(first, stream.batch) and first.dim() == 4:
                self.main, self.streams, self.batch = 1, first.shape[0], int(stream.batch)
            elif first.shape[0] % stream.batch == 0:
                self.batch = first.shape[0]
        self.dims = [self._dim(tensor) for tensor in self.tensors]

    def _dim(self, tensor: torch.Tensor) -> Optional[int]:
        """The dimension in which an argument is cut."""
        if not self.batch or tensor.dim() == 0:
            return None
        if tensor.shape[0] != self.batch and second_is_batch(tensor, self.batch):
            return 1                            # positions of images: [3, batch, tokens]
        # Rows of the batch, or of batch x heads (ALiBi), or several images a row.
        rows = tensor.shape[0]
        return 0 if rows == self.stream.batch or rows and rows % self.batch == 0 else None

    def pieces(self) -> List[slice]:
        if not self.batch:
            return [WHOLE]
        step = self.stream.rows * max(self.batch // self.stream.batch, 1)
        return [slice(i, min(i + step, self.batch)) for i in range(0, self.batch, step)]

    def part(self, tensor: torch.Tensor, dim: Optional[int], piece: slice) -> torch.Tensor:
        """The view of an argument for the rows of `piece`."""
        if dim is None or piece == WHOLE:
            return tensor
        begin, end = (at * tensor.shape[dim] // self.batch for at in (piece.start, piece.stop))
        return tensor.narrow(dim, begin, end - begin)

    def cut(self, piece: slice, tensors: Optional[Sequence[torch.Tensor]] = None) -> List[torch.Tensor]:
        """Copies of the arguments for the rows of `piece`, on the layer's device; what is not cut is no copy."""
        device = self.stream.device_of[self.name]
        return [tensor.to(device) if part is tensor else part.to(device, copy=True)
                for tensor, dim in zip(self.tensors if tensors is None else tensors, self.dims)
                for part in (self.part(tensor, dim, piece),)]

    def run(self, piece: slice) -> Tuple[List[Any], Any]:
        """Computes the layer for the rows of `piece` and returns (flat outputs, their tree), for Stream to join."""
        return self.compute(self.cut(piece))

    def compute(self, tensors: Sequence[torch.Tensor]) -> Tuple[List[Any], Any]:
        """The layer's own forward on these tensors; its flat outputs and what it put into mappings, and their tree."""
        leaves = [copy.deepcopy(leaf) if isinstance(leaf, Cache) else leaf for leaf in self.static]
        for i, tensor in zip(self.at, tensors):
            leaves[i] = tensor
        args, kwargs = tree_unflatten(leaves, self.tree)
        before = {key: dict(kwargs[key]) for key in self.sides}
        for key, side in self.sides.items():
            if not isinstance(side, dict):
                kwargs[key] = type(side)(kwargs[key])
        out = self.stream.forwards[self.name](*args, **kwargs)
        new = {key: {name: value for name, value in kwargs[key].items() if before[key].get(name) is not value}
               for key in self.sides}
        flat, tree = tree_flatten((out, new))
        return flat, tree


def second_is_batch(tensor: torch.Tensor, batch: int) -> bool:
    """Has it the batch in dimension 1, behind a few of something else?"""
    return tensor.dim() >= 2 and tensor.shape[0] in (2, 3, 4) and tensor.shape[1] == batch != tensor.shape[0]


class Joined:
    """Outputs of a layer, put together as its slices are computed."""

    def __init__(self, call: Call) -> None:
        self.call, self.folder, self.home = call, call.stream.folder, call.stream.home
        self.whole: List[Any] = []
        self.dims: List[Optional[int]] = []
        self.tree: Any = None
        self.done = 0

    def add(self, flat: List[Any], tree: Any, piece: slice) -> None:
        """Takes what `call.run(piece)` made."""
        if piece == WHOLE:
            self.whole, self.tree = [self._kept(value) for value in flat], tree
            return
        rows = piece.stop - piece.start
        if self.tree is None:
            self.tree = tree
            self.dims = [self._dim(value, rows) for value in flat]
            self.whole = []
            for value, dim in zip(flat, self.dims):
                if dim is None:
                    self.whole.append(self._kept(value))
                    continue
                shape = list(value.shape)
                shape[dim] = shape[dim] // rows * self.call.batch
                self.whole.append(place(shape, value.detach().new_empty(0).to(self.home), self.folder))
        for i, value in enumerate(flat):
            dim, whole = self.dims[i], self.whole[i]
            if dim is None:
                if isinstance(value, torch.Tensor) and value.dim() and not (
                        value.shape == whole.shape and torch.equal(value.to(whole.device), whole)):
                    raise RuntimeError("an output of %s has another shape or other values in each slice of the batch, "
                                       "and no dimension of the batch: %s" % (self.call.name, list(value.shape)))
            else:
                each = value.shape[dim] // rows
                whole.narrow(dim, self.done * each, rows * each).copy_(value)
        self.done += rows

    def _dim(self, value: Any, rows: int) -> Optional[int]:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return None
        if self.call.main == 1 and value.dim() == 4 and (value.shape[0], value.shape[1]) == (self.call.streams, rows):
            return 1
        # One row is what all rows share, such as a bias of positions [1, heads, tokens, tokens].
        alone = value.shape[0] == 1 and self.call.batch > 1 and value.dim() > 3
        return None if value.shape[0] % rows or not value.shape[0] or alone else 0

    def _kept(self, value: Any) -> Any:
        return value.to(self.home) if isinstance(value, torch.Tensor) else value


class Layer(torch.autograd.Function):
    """A call of a layer that keeps its inputs only, and computes itself again, a slice at a time, for gradients."""

    @staticmethod
    def forward(ctx: Any, call: Call, made: List[Any], *tensors: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        flat, tree = call.stream.compute(call)
        given = {id(tensor) for tensor in tensors}
        out = [value.clone() if id(value) in given else value for value in flat if isinstance(value, torch.Tensor)]
        ctx.mark_non_differentiable(*[value for value in out if not value.is_floating_point()])
        made[:] = [flat, tree]
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Optional[torch.Tensor]) -> Any:
        return (None, None, *gradients(ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:], grads))


def gradients(call: Call, tensors: Sequence[torch.Tensor], needs: Sequence[bool],
              grads: Sequence[Optional[torch.Tensor]]) -> List[Optional[torch.Tensor]]:
    """Gradients at a layer's inputs from those at its outputs."""
    total: List[Optional[torch.Tensor]] = [None] * len(tensors)
    done = [0] * len(grads)
    with call.stream.loaded(call.name, -1) as params, torch.enable_grad():
        for piece in call.pieces():
            cut = [tensor.detach().requires_grad_(need) for tensor, need in zip(call.cut(piece, tensors), needs)]
            # Edits in place are not of a leaf.
            with nullcontext() if call.stream.gradient is None else Catch(params, after=call.stream.gradient):
                flat, _ = call.compute([tensor.clone() if tensor.requires_grad else tensor for tensor in cut])
            pairs = []
            for i, (out, grad) in enumerate(zip((value for value in flat if isinstance(value, torch.Tensor)), grads)):
                if grad is None or not out.requires_grad:
                    continue
                if grad.shape != out.shape:
                    dim = int(call.main == 1 and out.dim() == 4 and grad.shape[0] == out.shape[0])
                    grad = grad.narrow(dim, done[i], out.shape[dim])
                    done[i] += out.shape[dim]
                pairs.append((out, grad.to(out.device)))
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
            del flat, pairs
            for i, (tensor, dim) in enumerate(zip(cut, call.dims)):
                if tensor.grad is None:
                    continue
                whole = total[i]
                if whole is None:
                    whole = total[i] = place(tensors[i].shape, tensors[i], call.stream.folder).zero_()
                part = call.part(whole, dim, piece)
                part.add_(tensor.grad.to(part.device))
    return total

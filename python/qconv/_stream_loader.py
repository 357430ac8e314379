"""Weights of parts of a model from a checkpoint, through transformers' own conversion."""
from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Protocol, Set, Tuple, Union

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from .errors import InputError, QconvWarning, listed

Device = Union[str, torch.device]
Value = Callable[[str, Optional[torch.dtype]], torch.Tensor]


class Source(Protocol):
    """Tensors of a checkpoint under the names, shapes and types of an unquantized one (_values.Values)."""
    names: List[str]

    def shape(self, name: str) -> Tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str, dtype: Optional[torch.dtype] = None) -> torch.Tensor: ...


def _is_in(name: str, path: str) -> bool:
    """Is a tensor's name that of a member of a list of modules? Either may have a prefix that the other has not."""
    parts = name.split(".")
    before = [".".join(parts[:i]) for i, part in enumerate(parts) if i and part.isdigit()]
    return any(p == path or p.endswith("." + path) or path.endswith("." + p) for p in before)


def judge_keys(model: nn.Module, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Raises InputError for parameters that a checkpoint has no weights for, and for weights of layers that the model does
    not use; what is left over besides, such as a head, is a warning. The model's class says what may be so."""
    def left(names: Iterable[str], attribute: str, also: str = "") -> List[str]:
        patterns = [*(getattr(model, attribute, None) or ()), *([also] if also else ())]
        return [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
    absent = left(missing, "_keys_to_ignore_on_load_missing")
    left_over = left(unexpected, "_keys_to_ignore_on_load_unexpected",
                     r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.masked_bias$|attn(ention)?\.bias$")
    kind, version = type(model).__name__, transformers.__version__
    if absent:
        raise InputError("the checkpoint has no weights for %s, which %s of transformers %s needs"
                         % (listed(absent), kind, version))
    lists = [path for path, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    heads = [name for name in left_over if not any(_is_in(name, path) for path in lists)]
    layers = [name for name in left_over if name not in heads]
    if layers:
        raise InputError("the checkpoint has weights that %s of transformers %s does not use: %s"
                         % (kind, version, listed(layers)))
    if heads:
        warnings.warn("%s of transformers %s does not use the checkpoint's %s" % (kind, version, listed(heads)),
                      QconvWarning, stacklevel=2)


@dataclass(frozen=True)
class Origin:
    """A matrix of a checkpoint that a parameter, or a part of one, is made of.

    tensor, matrix: the checkpoint tensor, and its matrix where it is a stack [matrices, ., .] (else None).
    part: the expert of the parameter that it belongs to; None where the parameter is one matrix.
    rows: which outputs of the product with the parameter (with its `part`) it gives.
    turned: the checkpoint holds it as [inputs, outputs].
    at: which of the matrix's own outputs these are, in the order of `rows`: a slice, or LongTensor where they are
    permuted. Usually all of them: slice(0, outputs).
    """
    tensor: str
    matrix: Optional[int]
    part: Optional[int]
    rows: slice
    turned: bool
    at: Union[slice, torch.Tensor]


@dataclass
class Group:
    """Checkpoint tensors (name, pattern of the converter that it matched) that become parameters together."""
    first: str
    tensors: List[Tuple[str, Optional[str]]]
    converter: Any
    shapes: Dict[str, Tuple[int, ...]]


class Loader:
    """Loads parameters and buffers of a model whose parameters are on meta.

    `reads` counts the bytes of tensors read, in the type they were asked for. `meta` has each parameter by its name.
    `absent` are parameters that transformers itself does not look for in files (sinusoidal positions).

    Raises InputError where the tensors of `source` are not those of the model.
    """

    def __init__(self, model: nn.Module, source: Source) -> None:
        self.model, self.source, self.reads = model, source, 0
        self.meta: Dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
        same: Dict[int, List[str]] = defaultdict(list)
        for name, parameter in self.meta.items():
            same[id(parameter)].append(name)
        self.alias = {name: names for names in same.values() if len(names) > 1 for name in names}
        self.state: Dict[str, torch.Tensor] = model.state_dict()
        self.found: Dict[str, Group] = {}       # by every parameter and buffer that is made of it
        self._numbers: Dict[Any, Any] = {}
        unexpected = []
        groups: Dict[str, Group] = {}
        for name, target, pattern, converter in self._renamed():
            group = groups.setdefault(target, Group(target, [], converter, {}))
            if group.converter is not None or not group.tensors:
                group.tensors.append((name, pattern))
        for group in groups.values():
            if group.first not in self.state:
                unexpected += [name for name, _ in group.tensors]
                continue
            shaped = self._convert(group, lambda name, dtype: torch.empty(source.shape(name), dtype=dtype, device="meta"))
            group.shapes = {name: tuple(value.shape) for name, value in shaped.items()}
            for name in group.shapes:
                self.found[name] = group
        self._check(unexpected)

    # ---- names --------------------------------------------------------------------------------------------------

    def _renamed(self) -> Iterable[Tuple[str, str, Optional[str], Any]]:
        """(checkpoint tensor, first parameter it goes to, pattern, converter) in transformers' order."""
        model, prefix = self.model, self.model.base_model_prefix
        if int(transformers.__version__.split(".")[0]) < 5:
            names, dot = list(self.source.names), prefix + "."
            expects = bool(prefix) and any(name.startswith(dot) for name in self.state)
            inside = bool(prefix) and any(name.startswith(dot) for name in names)
            renamed = model._get_key_renaming_mapping(
                names, getattr(model, "_checkpoint_conversion_mapping", None) or None,
                loading_base_model_from_task_state_dict=inside and not hasattr(model, prefix) and not expects,
                loading_task_model_from_base_state_dict=expects and not inside and hasattr(model, prefix)
                and not any(name in self.state for name in names))
            yield from ((name, target, None, None) for name, target in dict(renamed).items())
            return
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (WeightConverter, WeightRenaming, dot_natural_key,
                                                     rename_source_key)
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        for name in sorted(self.source.names, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self.state)
            if target not in self.state and name in self.state:
                target, pattern = rename_source_key(name, [], [], prefix, self.state)
            yield name, target, pattern, None if pattern is None else by_pattern[pattern]

    def _check(self, unexpected: List[str]) -> None:
        """Raises InputError where weights are missing, left over, or of another shape."""
        self.absent = [name for name in self.meta if self._key(name) is None]
        judge_keys(self.model, self.absent, unexpected)
        kind = type(self.model).__name__
        for group in self.found.values():
            for name, shape in group.shapes.items():
                if name in self.meta and shape != tuple(self.meta[name].shape):
                    raise InputError("the checkpoint's %s makes %s of %s, and %s of transformers %s needs %s"
                                     % (group.tensors[0][0], name, list(shape), kind, transformers.__version__,
                                        list(self.meta[name].shape)))

    def _key(self, name: str) -> Optional[str]:
        """`name`, or the name of the same parameter that the checkpoint has weights for."""
        return next((one for one in (name, *self.alias.get(name, ())) if one in self.found), None)

    # ---- values -------------------------------------------------------------------------------------------------

    def _convert(self, group: Group, value: Value) -> Dict[str, torch.Tensor]:
        """What transformers makes of a group whose tensors value(name, dtype) gives, by state dict name."""
        like = self.state[group.first]
        dtype = like.dtype if like.is_floating_point() else None
        if group.converter is None:
            return {group.first: value(group.tensors[0][0], dtype)}
        converter = copy.deepcopy(group.converter)
        for name, pattern in group.tensors:
            converter.add_tensor(group.first, name, pattern, partial(value, name, dtype))
        try:
            made = converter.convert(group.first, model=self.model, config=self.model.config)
        except Exception as e:
            raise InputError("transformers %s cannot make %s of %s: %s: %s" % (
                transformers.__version__, group.first, listed([name for name, _ in group.tensors]), type(e).__name__,
                e)) from e
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def load(self, names: Iterable[str], replace: Mapping[str, torch.Tensor] = {}, device: Device = "cpu") -> None:
        """Loads these (state dict names). replace: checkpoint tensors by name that are taken instead of the source's,
        in the checkpoint's shape and any floating-point type."""
        def value(name: str, dtype: Optional[torch.dtype]) -> torch.Tensor:
            read = replace.get(name)
            if read is None:
                read = self.source.read(name, dtype)
                self.reads += read.numel() * read.element_size()
            return read.to(device=device, dtype=dtype)

        wanted: Dict[str, List[str]] = defaultdict(list)
        for name in names:
            key = self._key(name)
            if key is not None:
                wanted[key].append(name)
        done: Set[int] = set()
        for key in wanted:
            group = self.found[key]
            if id(group) in done:
                continue
            done.add(id(group))
            for made, tensor in self._convert(group, value).items():
                if made not in wanted:
                    continue
                if made in self.meta:
                    tensor = nn.Parameter(tensor.to(self.meta[made].dtype).contiguous(), requires_grad=False)
                for name in wanted[made]:
                    self.put(name, tensor)

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.meta:
                self.put(name, self.meta[name])

    def get(self, name: str) -> torch.Tensor:
        module, leaf = self.owner(name)
        return getattr(module, leaf)

    def owner(self, name: str) -> Tuple[nn.Module, str]:
        """The module that holds it, and under which name."""
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    def put(self, name: str, value: torch.Tensor) -> None:
        module, leaf = self.owner(name)
        if leaf in module._parameters:
            module._parameters[leaf] = value
        else:
            module._buffers[leaf] = value.to(module._buffers[leaf].dtype)

    # ---- where a parameter comes from ---------------------------------------------------------------------------

    def held_across(self, name: str) -> bool:
        """Whether the parameter holds its matrices [inputs, outputs], as far as its module says."""
        module = self.owner(name)[0]
        return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))

    def origin(self, name: str, across: Optional[bool] = None) -> List[Origin]:
        """The checkpoint matrices that the parameter `name` (2 or 3 dimensions) is made of.

        across: whether the parameter holds its matrices [inputs, outputs] (Catch.across tells); None: what the module
        says of itself. Found by running transformers' conversion on numbers of rows and columns, once for all layers
        alike. Empty where the parameter is no rearrangement of whole rows with all inputs in order: such a weight is
        best left as it is.
        """
        key = self._key(name)
        if key is None or self.meta[name].dim() not in (2, 3):
            return []
        across = self.held_across(name) if across is None else across
        group = self.found[key]
        tensors = [tensor for tensor, _ in group.tensors]
        if group.converter is None:
            *stack, outputs, _ = self._turned(self.meta[name], across).shape
            whole = slice(0, outputs)
            parts = range(*stack) if stack else (None,)
            return [Origin(tensors[0], part, part, whole, across, whole) for part in parts]
        alike = tuple((re.sub(r"\d+", "#", tensor), self.source.shape(tensor)) for tensor in tensors)
        known = self._numbers.setdefault((re.sub(r"\d+", "#", key), alike, across), [])
        if not known:
            known.append(self._found(group, key, across))
        return [Origin(tensors[number], *rest) for number, *rest in known[0]]

    @staticmethod
    def _turned(matrices: torch.Tensor, across: bool) -> torch.Tensor:
        return matrices.transpose(-1, -2) if across else matrices

    def _found(self, group: Group, key: str, across: bool) -> List[Tuple[Any, ...]]:
        """The fields of each Origin, with the number of the tensor in its group."""
        number = {name: i for i, (name, _) in enumerate(group.tensors)}

        def numbered(axis: int, name: str, dtype: Optional[torch.dtype]) -> torch.Tensor:
            shape = self.source.shape(name)
            if axis == 0:
                return torch.full(shape, number[name], dtype=torch.int32)
            if len(shape) < -axis:
                return torch.full(shape, -1, dtype=torch.int32)
            line = torch.arange(shape[axis], dtype=torch.int32)
            return line.view([-1] + [1] * (-axis - 1)).expand(shape)

        # Each is [parts, outputs, inputs] in turn, and only its first row and column are kept.
        tensor, matrix, row, column = (
            Numbers(self._turned(self._convert(group, partial(numbered, axis))[key], across))
            for axis in (0, -3, -2, -1))
        found: List[Tuple[Any, ...]] = []
        stacked = self.meta[key].dim() == 3
        for part in range(tensor.rows.shape[0]):
            if not (tensor.same_in_row[part] and matrix.same_in_row[part]):
                return []
            if row.same_in_row[part] and column.in_order(part):
                turned, at = False, row.rows[part]
            elif column.same_in_row[part] and row.in_order(part):
                turned, at = True, column.rows[part]
            else:
                return []
            which = torch.stack([tensor.rows[part], matrix.rows[part]])
            ends = (which[:, 1:] != which[:, :-1]).any(0).nonzero().flatten().add(1).tolist()
            for begin, end in zip([0, *ends], [*ends, which.shape[1]]):
                source, place = which[:, begin].tolist()
                inputs = self.source.shape(group.tensors[source][0])[-2 if turned else -1]
                if inputs != tensor.inputs:
                    return []
                rows = at[begin:end].long()
                first = int(rows[0])
                plain = torch.equal(rows, torch.arange(first, first + end - begin))
                found.append((source, None if place < 0 else place, part if stacked else None, slice(begin, end),
                              turned, slice(first, first + end - begin) if plain else rows))
        return found


class Numbers:
    """What is kept of numbers [parts, outputs, inputs]: the first column and row, and whether others are like them."""

    def __init__(self, numbers: torch.Tensor) -> None:
        numbers = numbers if numbers.dim() == 3 else numbers[None]
        self.inputs = numbers.shape[-1]
        self.rows, self.columns = numbers[..., 0].clone(), numbers[:, 0].clone()
        self.same_in_row = [bool((one == one[:, :1]).all()) for one in numbers]
        self.same_in_column = [bool((one == one[:1]).all()) for one in numbers]

    def in_order(self, part: int) -> bool:
        """Is every row 0, 1, 2 ...?"""
        line = torch.arange(self.inputs, dtype=self.columns.dtype)
        return self.same_in_column[part] and torch.equal(self.columns[part], line)

"""Weights of parts of a model from a checkpoint, through transformers' own conversion."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, Iterable, List, Optional, Protocol, Sequence, Tuple, Union

import torch


class Source(Protocol):
    """Where tensors of a checkpoint come from, under the names, shapes and types of an unquantized one (_values.Values)."""
    names: List[str]

    def shape(self, name: str) -> Tuple[int, ...]: ...

    def dtype(self, name: str) -> str: ...

    def read(self, name: str, dtype: Optional[torch.dtype] = None) -> torch.Tensor: ...


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


class Loader:
    """Loads parameters and buffers of a model whose parameters are on meta.

    `reads` counts the bytes of tensors read, in the type they were asked for. `meta` has each parameter by its name.
    """
    reads: int

    def load(self, names: Iterable[str], replace: Dict[str, torch.Tensor] = {}, device: str = "cpu") -> None:
        """Loads these (state dict names). replace: checkpoint tensors by name that are taken instead of the source's,
        in the checkpoint's shape and any floating-point type."""
        raise NotImplementedError

    def drop(self, names: Iterable[str]) -> None:
        """Puts the parameters among these back on meta."""
        raise NotImplementedError

    def get(self, name: str) -> torch.Tensor:
        """The parameter or buffer as it is now."""
        raise NotImplementedError

    def origin(self, name: str, across: Optional[bool] = None) -> List[Origin]:
        """The checkpoint matrices that the parameter `name` (2 or 3 dimensions) is made of.

        across: whether the parameter holds its matrices [inputs, outputs] (Catch.across tells); None: what the module
        says of itself. Found by running transformers' conversion on numbers of rows and columns. Empty where the
        parameter is no rearrangement of whole rows with all inputs in order: such a weight is best left as it is.
        """
        raise NotImplementedError

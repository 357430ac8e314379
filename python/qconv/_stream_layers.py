"""Layers of a model: which modules they are, and one call of one, cut into slices of the batch."""
from __future__ import annotations

from typing import Any, List

import torch


class Call:
    """One call of a layer: its arguments for the whole batch, and how they are cut.

    Attributes: `stream`; `name`, the layer's module path; `layer`; `tensors`, the tensors among its arguments; `batch`,
    the rows of this call, 0 where it is not cut (packed rows of images) and the one piece is slice(None).
    """
    batch: int
    name: str

    def pieces(self) -> List[slice]:
        """The slices the call is computed in."""
        raise NotImplementedError

    def run(self, piece: slice) -> Any:
        """Computes the layer for the rows of `piece` and returns (flat outputs, their tree), for Stream to join."""
        raise NotImplementedError

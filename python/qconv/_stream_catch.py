"""Multiplications by weights, seen as torch is asked for them: whatever module or expert asks."""
from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import torch
from torch.overrides import TorchFunctionMode


class Catch(TorchFunctionMode):
    """A context in which the products of tensors with some weights are seen, and may use other weights.

    params: the name of each weight by its id(). A product with a view of one is one with the weight itself.
    before(name, part, x) -> None, or the weight to use instead, in the shape of the whole parameter.
    after(name, part, x, y).
    part is the number of the expert where the weight is a stack [experts, ., .] and one matrix of it is used; None where
    the whole parameter is. x is [..., inputs] and y [..., outputs], however the product is written. `across[name]` tells
    after the first product whether the weight (a matrix of it) is held [inputs, outputs].

    A mode is of one thread; a context within a context sees what is left to it.
    """

    def __init__(self, params: Dict[int, str], before: Optional[Callable[..., Optional[torch.Tensor]]] = None,
                 after: Optional[Callable[..., None]] = None) -> None:
        super().__init__()
        self.params, self.before, self.after = params, before, after
        self.across: Dict[str, bool] = {}

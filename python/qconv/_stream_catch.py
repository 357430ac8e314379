"""Multiplications by weights, seen as torch is asked for them: whatever module or expert asks."""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Mapping, Optional, Tuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

T = torch.Tensor
# Functions that multiply two of their arguments, and the place of the first of these.
PRODUCTS = {functional.linear: 0, torch.addmm: 1, torch.baddbmm: 1, T.addmm: 1, T.baddbmm: 1,
            **{f: 0 for f in (torch.mm, torch.matmul, torch.bmm, T.matmul, T.__matmul__, T.mm, T.bmm)}}


class Catch(TorchFunctionMode):
    """A context in which the products of tensors with some weights are seen, and may use other weights.

    params: the name of each weight by its id(). A product with a view of one is one with the weight itself.
    before(name, part, x) -> None, or the weight to use instead, in the shape of the whole parameter.
    after(name, part, x, y).
    part is the number of the expert where the weight is a stack [experts, ., .] and one matrix of it is used; None
    where the whole parameter is. x is [..., inputs] and y [..., outputs], however the product is written.
    `across[name]` tells after the first product whether the weight (a matrix of it) is held [inputs, outputs].

    A mode is of one thread; a context within a context sees what is left to it.
    """

    def __init__(self, params: Dict[int, str], before: Optional[Callable[..., Optional[T]]] = None,
                 after: Optional[Callable[..., None]] = None) -> None:
        super().__init__()
        self.params, self.before, self.after = params, before, after
        self.across: Dict[str, bool] = {}

    def _find(self, weight: Any) -> Optional[Tuple[str, Optional[int], T]]:
        """(name, part, the whole parameter) where the tensor is a weight, or a view of one."""
        if not isinstance(weight, T):
            return None
        whole = weight if id(weight) in self.params else weight._base
        if whole is None or id(whole) not in self.params:
            return None
        alone = whole.dim() == 3 and weight.dim() == 2
        part = (weight.storage_offset() - whole.storage_offset()) // whole.stride(0) if alone else None
        return self.params[id(whole)], part, whole

    def __torch_function__(self, func: Any, types: Iterable[type], args: Tuple[Any, ...] = (),
                           kwargs: Optional[Mapping[str, Any]] = None) -> Any:
        kwargs = kwargs or {}
        first = PRODUCTS.get(func)
        if first is None:
            return func(*args, **kwargs)
        if func is functional.linear and len(args) < 2:
            args = (*args, *(kwargs[name] for name in ("input", "weight")[len(args):]))
            kwargs = {name: value for name, value in kwargs.items() if name == "bias"}
        if len(args) < first + 2:
            return func(*args, **kwargs)
        found = self._find(args[first + 1])
        left = found is None                    # weight @ x: the rows of x are its columns
        if found is None:
            found = self._find(args[first])
        at = first if left else first + 1
        x = args[first + 1 if left else first]
        if found is None or not isinstance(x, T) or x.dim() < 2:
            return func(*args, **kwargs)
        name, part, whole = found
        weight = args[at]
        turned = weight.dim() >= 2 and whole.dim() >= 2 and weight.stride()[-2:] == whole.stride()[-2:][::-1] \
            and weight.shape[-2:] == whole.shape[-2:][::-1]
        self.across[name] = turned == (func is functional.linear or left)
        if left:
            x = x.transpose(-1, -2)
        if self.before is not None:
            other = self.before(name, part, x)
            if other is not None:
                if weight is not whole:
                    other = other.contiguous().as_strided(weight.shape, weight.stride(),
                                                          weight.storage_offset() - whole.storage_offset())
                args = (*args[:at], other, *args[at + 1:])
        y = func(*args, **kwargs)
        if self.after is not None:
            self.after(name, part, x, y.transpose(-1, -2) if left else y)
        return y

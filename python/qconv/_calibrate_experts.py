"""Experts that each get a part of the tokens: which modules they are, and what z and x send to one.

Routes are x's in both streams. Two forms are known. A module with stacks takes states, the numbers of each token's experts
and their weights; it is called again with the tokens of one expert. Or members of a list take rows that are copies of
states of an `owner`, which may be scaled; z's rows are looked up by the places of x's.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from torch import nn

from ._stream_layers import inside
from .stream import Catch

Given = Tuple[Tuple[Any, ...], Dict[str, Any]]  # arguments of a call
Expert = Tuple[str, Optional[int]]              # a module, and the matrix of its stack
Inputs = Tuple[torch.Tensor, Optional[torch.Tensor], torch.Tensor]  # of an expert in x and in z; which count


class Reached(Exception):
    """A slice is to end here."""


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])


def routes_of(call: Given) -> Any:
    """States [tokens, width], experts' numbers [tokens, chosen] and weights [tokens, ...] of a call; None: others."""
    given = [v for v in (*call[0], *call[1].values()) if isinstance(v, torch.Tensor)]
    if len(given) != 3 or any(v.dim() != 2 or len(v) != len(given[0]) for v in given):
        return None
    whole = [v for v in given if not v.is_floating_point()]
    return (given[0], whole[0], next(v for v in given[1:] if v is not whole[0])) \
        if len(whole) == 1 and whole[0] is not given[0] else None


def states_of(call: Given) -> Optional[torch.Tensor]:
    """The first argument that can be states."""
    return next((v for v in (*call[0], *call[1].values()) if isinstance(v, torch.Tensor) and v.is_floating_point()
                 and v.dim() >= 2), None)


def replaced(call: Given, others: Dict[int, torch.Tensor]) -> Given:
    """The call with other tensors, by id()."""
    return (tuple(others.get(id(v), v) for v in call[0]), {k: others.get(id(v), v) for k, v in call[1].items()})


def hashed(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row, of its bits."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    factors = torch.randint(1 << 62, (rows.shape[1],), generator=torch.Generator().manual_seed(1)).to(rows.device)
    return (rows.contiguous().view(kind).long() * factors).sum(1)


def places(rows: torch.Tensor, states: torch.Tensor) -> Optional[Tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """Which of `states` [tokens, width] each of `rows` [n, width] is a copy of, and the factors [n, 1] that it was scaled
    by, if so. None: they are no such rows. Of equal states the first rows are copies of the first."""
    tokens = len(states)
    if rows.shape[1] != states.shape[1] or rows.dtype != states.dtype or not len(rows):
        return None
    keys, order = hashed(states).sort(stable=True)
    found, back = hashed(rows).sort(stable=True)
    first = torch.searchsorted(keys, found).clamp_(max=tokens - 1)
    later = (first + torch.arange(len(rows), device=rows.device) - torch.searchsorted(found, found)).clamp_(max=tokens - 1)
    at = torch.empty_like(back)
    at[back] = order[torch.where(keys[later] == found, later, first)]
    if torch.equal(states[at], rows):
        return at, None
    if len(rows) != tokens:
        return None
    factors = (rows * states).sum(1, keepdim=True) / states.square().sum(1, keepdim=True).clamp(min=1e-30)
    return (torch.arange(tokens, device=rows.device), factors) if torch.allclose(
        states * factors, rows, rtol=1e-4, atol=1e-5) else None


class Found:
    """Modules of experts within a layer, found by watching a pass. owner_of: of each of them, the module that is called
    with the tokens of all: itself, where it takes routes."""

    def __init__(self, model: nn.Module, layer: str, stacks: Set[str]) -> None:
        self.model, self.stacks = model, stacks
        self.owner: Dict[str, Tuple[str, str]] = {}  # of each member of a list within the layer, and the list
        for path, module in model.get_submodule(layer).named_modules(prefix=layer):
            if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not any(inside(path, m) for m in self.owner):
                called = type(module).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)
                owner = path if called else path.rpartition(".")[0]
                self.owner.update({"%s.%s" % (path, key): (owner, path) for key in module._modules if owner != layer})
        self.states: Dict[str, torch.Tensor] = {}
        self.owner_of: Dict[str, str] = {}

    def watching(self) -> "Intercepted":
        return Intercepted(self.model, {*self.stacks, *self.owner, *(owner for owner, _ in self.owner.values())}, self.enter)

    def enter(self, path: str, own: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        states = states_of((args, kwargs))
        if path in self.stacks and routes_of((args, kwargs)):
            self.owner_of[path] = path
        elif path in self.owner and path not in self.owner_of and states is not None and states.dim() == 2:
            owner, members = self.owner[path]
            whole = self.states.get(owner)
            if whole is not None and not (states.shape == whole.shape and torch.equal(states, whole)) \
                    and places(states, whole):
                self.owner_of.update({m: owner for m, found in self.owner.items() if found[1] == members})
        if states is not None:
            self.states[path] = flat(states)
        return own(*args, **kwargs)

    def member_of(self, name: str) -> Optional[str]:
        """The module of an expert that has this parameter."""
        while name and name not in self.owner_of:
            name = name.rpartition(".")[0]
        return name or None

    def members(self, owner: str) -> List[str]:
        return [m for m, o in self.owner_of.items() if o == owner]


class Intercepted:
    """While it lasts, modules call enter(path, their own forward, args, kwargs)."""

    def __init__(self, model: nn.Module, paths: Iterable[str], enter: Callable[..., Any]) -> None:
        self.modules, self.enter = {path: model.get_submodule(path) for path in paths}, enter

    def __enter__(self) -> None:
        for path, module in self.modules.items():
            own = module.forward

            def forward(*args: Any, path: str = path, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
                return self.enter(path, own, args, kwargs)
            setattr(forward, "own", own)
            module.forward = forward  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        for module in self.modules.values():
            module.__dict__.pop("forward", None)


class Call:
    """A call of a module by rows of its owner's states: their places and factors; None: they are no such rows."""

    def __init__(self, own: Callable[..., Any], given: Given, states: torch.Tensor) -> None:
        self.own, self.given, self.arg = own, given, states_of(given)
        found = places(self.arg, states) if self.arg is not None and self.arg.dim() == 2 else None
        self.at, self.factors = found or (None, None)
        if self.arg is not None and self.at is not None:  # the rows are made again when they are needed
            empty = self.arg.new_empty(0)
            self.given, self.arg = replaced(given, {id(self.arg): empty}), empty

    def with_rows(self, states: torch.Tensor) -> Given:
        if self.at is None:
            return self.given
        rows = states[self.at] if self.factors is None else states[self.at] * self.factors
        return replaced(self.given, {id(self.arg): rows})

    def counts(self, mask: torch.Tensor) -> Optional[torch.Tensor]:
        """Which of its rows count, by mask [tokens]."""
        if self.at is None:
            return None
        return mask[self.at] if self.factors is None else mask[self.at] & (self.factors != 0)[:, 0]


class Sent:
    """What one slice sends to the experts of an owner. calls: those of its members in x; None where the owner `own` takes
    routes. z, x: calls of the owner. mask: bool [tokens], which count; None: all."""

    def __init__(self, own: Callable[..., Any], z: Optional[Given], x: Given, mask: Optional[torch.Tensor],
                 calls: Optional[Dict[str, List[Call]]], ids: Dict[int, str], values: Dict[str, torch.Tensor]) -> None:
        self.own, self.z, self.x, self.mask, self.calls, self.ids, self.values = own, z, x, mask, calls, ids, values

    def inputs(self, expert: Expert, names: List[str], both: bool) -> Iterator[Inputs]:
        """The inputs of an expert's product with one of `names`, if it gets a token. both: z's too."""
        if self.calls is None:
            yield from self.of_routes(expert, names, both)
        for call in (self.calls or {}).get(expert[0], ()):
            yield from self.of_call(call, names, both)

    def of_routes(self, expert: Expert, names: List[str], both: bool) -> Iterator[Inputs]:
        states, numbers, weights = routes_of(self.x)
        hit = numbers == expert[1]
        token = (hit.any(1) if self.mask is None else hit.any(1) & self.mask).nonzero()[:, 0]
        if not len(token):
            return
        alone = weights.shape == numbers.shape
        weight = (weights * hit).sum(1, keepdim=True)[token] if alone else weights[token]
        only = torch.full_like(numbers[token, :1], expert[1]) if alone else numbers[token]

        def narrowed(call: Given) -> Given:
            given = routes_of(call)
            return replaced(call, dict(zip(map(id, given), (given[0][token], only, weight))))
        x = self.product(self.own, narrowed(self.x), names, expert[1], self.values)
        z = self.product(self.own, narrowed(self.z), names, expert[1], {}) if both and self.z else None
        if x is not None:
            yield flat(x), z if z is None else flat(z), torch.ones(len(flat(x)), dtype=torch.bool, device=x.device)

    def of_call(self, call: Call, names: List[str], both: bool) -> Iterator[Inputs]:
        states, theirs = states_of(self.x), states_of(self.z) if self.z else None
        assert states is not None
        x, z = self.product(call.own, call.with_rows(flat(states)), names, None, self.values), None
        if x is None:
            return
        every = torch.ones(len(flat(x)), dtype=torch.bool, device=x.device)
        mask = call.counts(torch.ones_like(flat(states)[:, 0], dtype=torch.bool) if self.mask is None else self.mask)
        if mask is None or mask.shape != every.shape:
            mask = every
        elif both and theirs is not None and theirs.shape == states.shape:
            z = self.product(call.own, call.with_rows(flat(theirs)), names, None, {})
        yield flat(x), None if z is None else flat(z), mask

    def product(self, own: Callable[..., Any], call: Given, names: List[str], part: Optional[int],
                values: Dict[str, torch.Tensor]) -> Optional[torch.Tensor]:
        """The input of the first product with one of `names` (with its matrix `part`), with values in place of weights."""
        seen: List[torch.Tensor] = []

        def before(name: str, at: Optional[int], x: torch.Tensor) -> Optional[torch.Tensor]:
            if name in names and at == part:
                seen.append(x.detach())
                raise Reached
            return values.get(name)
        try:
            with torch.no_grad(), Catch(self.ids, before):
                own(*call[0], **call[1])
        except Reached:
            pass
        return seen[0] if seen else None

"""Two streams through a layer: z through the weights as they are, and x through what they become.

The batch is [z; x]. Products whose weights have one input are a set. Each slice of the batch is a thread that stops
where a set has its input; when all have, the set's moments are summed, the program makes its weights, and x goes on
with those. So one pass through a layer makes all of it.
"""
from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import torch
from transformers.pytorch_utils import Conv1D

from ._calibrate_door import Door, Weight, place_of
from ._calibrate_moments import Gradients, Sum
from .stream import Catch

Values = Dict[str, torch.Tensor]  # of parameters that x has in place of the model's
END = 1 << 30  # the stop behind all others


class Reached(Exception):
    """A slice is to end here."""


@dataclass(frozen=True)
class Target:
    """A weight of the checkpoint, or some of its outputs, and where they lie in the model: `rows` of the outputs of a
    parameter's product, of the expert `part` where it has several. across: the parameter lies [inputs, outputs].
    at: which of the weight's outputs these are."""
    weight: Weight
    parameter: str
    part: Optional[int]
    rows: slice
    across: bool
    at: Union[slice, torch.Tensor]

    def put(self, parameter: torch.Tensor, values: torch.Tensor) -> None:
        """values: [outputs, inputs] of the whole weight."""
        matrix = parameter if self.part is None else parameter[self.part]
        if self.across:
            matrix = matrix.t()
        matrix[self.rows] = values[self.at].to(matrix)


class Targets:
    """The weights of the program's list by the parameters that have them."""

    def __init__(self, loader: Any, door: Door) -> None:
        self.loader, self.door, self.settled = loader, door, set()
        self.places: Dict[Tuple[str, Optional[int]], List[Tuple[Weight, int, int]]] = {}
        for weight, known in door.weights.items():  # a stack's [3, up] lies below [3, gate]
            expert, first = place_of(weight, known)
            self.places.setdefault((weight[0], expert), []).append((weight, first, first + known["rows"]))
        self.by_name = {name: self.found(name) for name in loader.meta}
        self.by_name = {name: found for name, found in self.by_name.items() if found}

    def found(self, name: str, across: Optional[bool] = None) -> List[Target]:
        out = []
        held = default_across(self.loader, name) if across is None else across
        for o in self.loader.origin(name, held):
            for weight, first, end in self.places.get((o.tensor, o.matrix), ()):
                if isinstance(o.at, slice):
                    begin, stop = max(o.at.start, first), min(o.at.stop, end)
                    if begin < stop:
                        rows = slice(o.rows.start + begin - o.at.start, o.rows.start + stop - o.at.start)
                        out.append(Target(weight, name, o.part, rows, held, slice(begin - first, stop - first)))
                elif first == 0 and end >= int(o.at.max()) + 1:
                    out.append(Target(weight, name, o.part, o.rows, held, o.at))
        return out

    def settle(self, across: Dict[str, bool]) -> None:
        """Products have shown how parameters lie."""
        for name, held in across.items():
            if name in self.by_name and name not in self.settled:
                self.settled.add(name)
                self.by_name[name] = self.found(name, held)

    def of(self, names: Iterable[str]) -> List[Target]:
        return [t for n in names for t in self.by_name.get(n, ())]

    def wanted(self, names: Iterable[str]) -> List[Target]:
        """Those that are still to be made."""
        return [t for t in self.of(names) if not self.door.weights[t.weight]["made"] and t.weight not in self.door.left]

    def outputs(self, name: str, part: Optional[int]) -> Dict[Weight, List[Target]]:
        """Of one product: each weight of which it has all outputs, and where they are."""
        found: Dict[Weight, List[Target]] = {}
        for t in self.wanted([name]):
            if t.part == part:
                found.setdefault(t.weight, []).append(t)
        return {w: ts for w, ts in found.items()
                if sum(t.rows.stop - t.rows.start for t in ts) == self.door.weights[w]["rows"]}


def default_across(loader: Any, name: str) -> bool:
    module = loader.owner(name)[0]
    return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))


@dataclass
class Stop:
    """Where slices wait for each other: at the first product of a set, or at a module whose experts are sets."""
    sets: List[List[str]] = field(default_factory=list)  # parameters with one input; several sets only of a module
    module: Optional[str] = None


class Slice:
    """One slice's pass through the layer, on a thread that runs only while `advance` waits for it."""
    running: Dict[int, "Slice"] = {}  # by thread

    def __init__(self, run: Callable[[], Any], ids: Dict[int, str], which: Dict[str, int], values: Values) -> None:
        self.run, self.ids, self.which, self.values = run, ids, which, values
        self.at, self.input, self.result, self.error, self.dead = -1, None, None, None, False  # type: Any
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.thread = threading.Thread(target=self.main, daemon=True)
        self.thread.start()

    def main(self) -> None:
        self.go.acquire()
        Slice.running[threading.get_ident()] = self
        try:
            if not self.dead:
                with torch.no_grad(), Catch(self.ids, self.before):
                    self.result = self.run()
        except Reached:
            pass
        except BaseException as error:  # it is raised again where advance() waits
            self.error = error
        finally:
            del Slice.running[threading.get_ident()]
            self.at = END
            self.stopped.release()

    def before(self, name: str, part: Optional[int], x: torch.Tensor) -> Optional[torch.Tensor]:
        self.stop(self.which.get(name, -1), x)
        return self.values.get(name)

    def stop(self, number: int, given: Any) -> None:
        """Waits there, unless it has been there."""
        if number <= self.at:
            return
        self.at, self.input = number, given
        self.stopped.release()
        self.go.acquire()
        if self.dead:
            raise Reached

    def advance(self, number: int) -> Any:
        """Runs up to that stop, or beyond. Returns what the slice has there, which is None if it does not get there."""
        if self.at < number:
            self.input = None
            self.go.release()
            self.stopped.acquire()
            if self.error:
                raise self.error
        given = self.input if self.at == number else None
        if given is not None:
            self.input = None
        return given

    def end(self) -> None:
        if self.thread.is_alive():
            self.dead = True
            self.go.release()
            self.thread.join()


def flat(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1, x.shape[-1])


class Counted:
    """Which tokens count: padding does not, and neither do rows that fill up the batch. `masks`: bool [rows, tokens],
    for each length that the model's states have."""

    def __init__(self, masks: Sequence[torch.Tensor]) -> None:
        self.masks = masks

    def of(self, x: torch.Tensor, rows: slice) -> Optional[torch.Tensor]:
        """bool [tokens of x]; None: x does not have the tokens of these rows one behind the other."""
        tokens = x.numel() // max(1, x.shape[-1])
        for whole in self.masks:
            mask = whole[rows]
            if mask.numel() == tokens:
                if x.dim() == 3 and x.shape[:2] != mask.shape and x.shape[:2] == mask.t().shape:
                    mask = mask.t()
                return mask.reshape(-1).to(x.device)
        return None


class InputMoments:
    """H and C of a set. There is no C where z and x have the same, or not the inputs of the same tokens."""

    def __init__(self, width: int, apart: bool) -> None:
        self.h, self.c = Sum(width), Sum(width) if apart else None

    def add(self, x: torch.Tensor, z: Optional[torch.Tensor], mask: Optional[torch.Tensor]) -> None:
        x, z = flat(x), None if z is None else flat(z)
        if mask is None or z is None or z.shape != x.shape:
            self.c = None
        if mask is not None and not bool(mask.all()):
            x, z = x[mask], z[mask] if self.c and z is not None else None
        self.h.add(x)
        if self.c:
            self.c.add(x, z)

    def tensors(self, module: str) -> Dict[str, torch.Tensor]:
        """What the program takes. The sums are dropped: it needs the room that they have."""
        out = {module + ".second_moment": self.h.mean()[0], module + ".tokens": torch.tensor([self.h.tokens])}
        self.h.total = None
        if self.c:
            out[module + ".cross_moment"] = self.c.mean()[0]
            self.c.total = None
        return out


def like(name: str) -> str:
    """Names of the same matrix of all experts become one."""
    return re.sub(r"(experts?(?:\.[a-z_]*)?)[._]\d+\.", r"\1.*.", name)


def expert_of(name: str) -> int:
    found = re.search(r"experts?(?:\.[a-z_]*)?[._](\d+)\.", name)
    return int(found.group(1)) if found else -1


def with_all_experts(sets: List[List[str]], names: Iterable[str]) -> List[List[str]]:
    """The traced slice did not reach all experts that are modules: the others are gone through like those it did."""
    own = [s for s in sets if expert_of(s[0]) >= 0]
    if not own:
        return sets
    first = expert_of(own[0][0])
    pattern = [[like(n) for n in s] for s in own if expert_of(s[0]) == first]
    by_key: Dict[Tuple[int, str], str] = {(expert_of(n), like(n)): n for n in names if expert_of(n) >= 0}
    every = [[by_key[e, k] for k in keys if (e, k) in by_key] for e in sorted({e for e, _ in by_key}) for keys in pattern]
    at = sets.index(own[0])
    return [*(s for s in sets[:at]), *(s for s in every if s), *(s for s in sets[at:] if expert_of(s[0]) < 0)]


class Layers:
    """What calibrating does to each layer that the stream visits."""

    def __init__(self, stream: Any, door: Door, targets: Targets, counted: Counted, gradients: Optional[Gradients],
                 streams: int, done: Callable[[str], None]) -> None:
        self.stream, self.door, self.targets, self.counted, self.gradients = stream, door, targets, counted, gradients
        self.streams, self.done = streams, done  # one stream: moments of the model as it is
        self.apart = False                       # something before this is not what it was
        self.ids: Dict[int, str] = {}            # of the layer at hand

    # ---- weights ----

    def any_made(self, names: Iterable[str]) -> bool:
        return self.streams == 2 and any(self.door.weights[t.weight]["made"] for t in self.targets.of(names))

    def put(self, values: Values, targets: Iterable[Target], made: Dict[Weight, torch.Tensor]) -> None:
        for t in targets:
            if t.weight in made:
                if t.parameter not in values:
                    values[t.parameter] = self.stream.loader.get(t.parameter).detach().clone()
                t.put(values[t.parameter], made[t.weight])

    def solve(self, layer: str, sets: Sequence[Tuple[List[Target], InputMoments]], values: Values) -> None:
        """Targets of each pair have these moments. What the program makes of them goes into x's values."""
        tensors: Dict[str, torch.Tensor] = {}
        asked: List[Target] = []
        for targets, moments in sets:
            if moments.h.tokens == 0:
                continue
            modules = [self.door.module(t.weight) for t in targets]
            for module in dict.fromkeys(modules):
                if module == modules[0]:
                    tensors.update(moments.tensors(module))
                elif module + ".second_moment" not in tensors:
                    tensors[module + ".same_as"] = torch.tensor(list(modules[0].encode()), dtype=torch.uint8)
                g = self.gradients and self.gradients.of(layer, module)
                if g:
                    tensors[module + ".output_moment"], tensors[module + ".output_tokens"] = g[0], torch.tensor([g[1]])
            asked += targets
        if tensors:
            torch.cuda.empty_cache()  # the program may use the same card
            self.put(values, asked, self.door.solve(tensors, self.streams == 2))

    # ---- a layer ----

    def __call__(self, call: Any, pieces: List[slice], params: Dict[int, str]) -> List[Any]:
        try:
            return self.visit(call, pieces, params)
        finally:
            self.done(call.name)

    def visit(self, call: Any, pieces: List[slice], params: Dict[int, str]) -> List[Any]:
        if not call.batch:  # not in slices of the batch, such as images: as it is in both streams
            return [call.run(p) for p in pieces]
        half = call.batch // self.streams
        step = pieces[0].stop
        zs = [slice(i, min(i + step, half)) for i in range(0, half, step)]
        xs = [slice(p.start + half, p.stop + half) for p in zs] if self.streams == 2 else []
        pieces[:] = zs + xs
        names = list(params.values())
        values: Values = {}
        made = [t for t in self.targets.of(names) if self.door.weights[t.weight]["made"]
                and not self.door.weights[t.weight].get("searched")]  # with those the first run had gone on as they were
        if made and xs:
            self.put(values, made, self.door.values(list({t.weight: 0 for t in made})))
        stops = self.stops(call, zs[0], params) if self.targets.wanted(names) else []
        runs = self.lockstep(call, zs, xs, params, stops, values)
        self.apart |= self.any_made(names)
        return runs

    def stops(self, call: Any, piece: slice, params: Dict[int, str]) -> List[Stop]:
        """Goes through the layer with one slice and sees which weights have one input, in which order."""
        order: Dict[Any, List[str]] = {}
        inputs: List[torch.Tensor] = []  # are kept, so that no two have one address
        seen, within, routed = set(), {}, set()
        ids = {i: n for i, n in params.items() if n in self.targets.by_name}

        def before(name: str, part: Optional[int], x: torch.Tensor) -> None:
            inputs.append(x)
            if name not in seen:
                seen.add(name)
                order.setdefault((x.data_ptr(), tuple(x.shape), x._version), []).append(name)

        def enter(path: str, own: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            if routes_of(args, kwargs):
                routed.add(path)
            return own(*args, **kwargs)
        with torch.no_grad(), self.intercepted(ids.values(), enter), Catch(ids, before) as seeing:
            call.run(piece)
        self.targets.settle(seeing.across)
        for name in ids.values():
            within[name] = name.rpartition(".")[0] if name.rpartition(".")[0] in routed else None
        out: List[Stop] = []
        for names in with_all_experts(list(order.values()), ids.values()):
            module = within[names[0]]
            if module and out and out[-1].module == module:
                out[-1].sets.append(names)
            else:
                out.append(Stop([names], module))
        return out

    def intercepted(self, names: Iterable[str], enter: Callable[..., Any]) -> "Intercepted":
        """While it lasts, modules with stacks of experts call enter(path, their own forward, args, kwargs)."""
        paths = {n.rpartition(".")[0] for n in names if self.stream.loader.get(n).dim() == 3}
        return Intercepted({p: self.stream.model.get_submodule(p) for p in paths}, enter)

    def lockstep(self, call: Any, zs: List[slice], xs: List[slice], params: Dict[int, str], stops: List[Stop],
                 values: Values) -> List[Any]:
        ids = self.ids = {i: n for i, n in params.items() if n in self.targets.by_name}
        which = {n: i for i, s in enumerate(stops) if not s.module for names in s.sets for n in names}
        at = {s.module: i for i, s in enumerate(stops) if s.module}

        def enter(path: str, own: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            mine = Slice.running.get(threading.get_ident())
            if mine and path in at:
                mine.stop(at[path], (args, kwargs))
            return own(*args, **kwargs)
        runs = [Slice(lambda p=p: call.run(p), ids, which, values if i >= len(zs) else {})
                for i, p in enumerate(zs + xs)]
        rows = self.stream.batch // self.streams
        of_batch = [slice(p.start * rows // max(1, zs[-1].stop), p.stop * rows // max(1, zs[-1].stop)) for p in zs]
        try:
            with self.intercepted(ids.values(), enter):
                for i, stop in enumerate(stops):
                    given = ((z.advance(i), x.advance(i) if xs else None, r)
                             for z, x, r in zip(runs, runs[len(zs):] or runs, of_batch))
                    if stop.module:
                        self.experts(call.name, stop, list(given), values)
                    else:
                        self.take_set(call.name, stop.sets[0], given, values)
                for run in runs:
                    run.advance(END)
            return [run.result for run in runs]
        finally:
            for run in runs:
                run.end()

    def take_set(self, layer: str, names: List[str], given: Iterable[Tuple[Any, Any, slice]], values: Values) -> None:
        """Sums up the moments of one set. Of a product of all experts at once, each expert has its own."""
        moments: Dict[Optional[int], InputMoments] = {}
        wanted = self.targets.wanted(names)
        for z, x, rows in given:
            x = x if self.streams == 2 else z
            if x is None or not wanted:
                continue
            stack = self.stream.loader.get(names[0]).dim() == 3 and x.dim() == 3
            for part in range(len(x)) if stack else [None]:
                own = x if part is None else x[part][(x[part] != 0).any(-1)]
                if part not in moments:
                    moments[part] = InputMoments(own.shape[-1], self.apart and part is None)
                alone = stack or expert_of(names[0]) >= 0  # tokens that z and x need not send to the same expert
                if own.numel():
                    moments[part].add(own, None if alone else z, None if alone else self.counted.of(x, rows))
        self.solve(layer, [([t for t in wanted if t.part == p], m) for p, m in moments.items()
                           if any(t.part == p for t in wanted)], values)
        self.apart |= self.any_made(names)

    # ---- experts ----

    def experts(self, layer: str, stop: Stop, given: List[Tuple[Any, Any, slice]], values: Values) -> None:
        """Makes the weights of a module that is called with states, the numbers of each token's experts and their
        weights. Moments are of the tokens that x sends to an expert, and of z's states of the same tokens."""
        assert stop.module
        module = self.stream.model.get_submodule(stop.module)
        own = module.__dict__["forward"].own
        for names in stop.sets:
            wanted, apart = self.targets.wanted(names), self.apart
            stacked = any(t.weight[1] is not None for t in wanted)
            held: List[Tuple[List[Target], InputMoments]] = []
            for part in sorted({t.part for t in wanted if t.part is not None}):
                moments: Optional[InputMoments] = None
                for z, x, rows in given:
                    got = self.expert_inputs(own, (z, x if self.streams == 2 else z), part, rows, names, values)
                    if got:
                        moments = moments or InputMoments(got[1].shape[-1], apart)
                        moments.add(got[1], got[0], torch.ones(len(got[1]), dtype=torch.bool, device=got[1].device))
                if moments:
                    held.append(([t for t in wanted if t.part == part], moments))
                    if not stacked:
                        self.solve(layer, held, values)
                        held = []
            self.solve(layer, held, values)
            self.apart |= self.any_made(names)

    def expert_inputs(self, own: Callable[..., Any], both: Tuple[Any, Any], part: int, rows: slice, names: List[str],
                      values: Values) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
        """The inputs of a product of one expert, in z and in x."""
        args, kwargs = both[1]
        states, numbers, weights = routes_of(args, kwargs)
        mask = self.counted.of(states, rows)
        hit = numbers == part
        chosen = hit.any(1) if mask is None else hit.any(1) & mask
        token = chosen.nonzero()[:, 0]
        if not len(token):
            return None
        weight = (weights * hit).sum(1, keepdim=True)[token] if weights.shape == numbers.shape else weights[token]
        only = numbers[token] if weights.shape != numbers.shape else torch.full_like(numbers[token, :1], part)
        out = []
        for (a, k), in_place in ((both[0], {}), (both[1], values)):
            seen: List[torch.Tensor] = []

            def before(name: str, at: Optional[int], x: torch.Tensor) -> Optional[torch.Tensor]:
                if name in names and at == part:
                    seen.append(flat(x))
                    raise Reached
                return in_place.get(name)
            try:
                with torch.no_grad(), Catch(self.ids, before):
                    swapped = dict(zip(map(id, routes_of(a, k)), (routes_of(a, k)[0][token], only, weight)))
                    own(*(swapped.get(id(v), v) for v in a), **{n: swapped.get(id(v), v) for n, v in k.items()})
            except Reached:
                pass
            if not seen:
                return None
            out.append(seen[0])
        return out[0], out[1]


def routes_of(args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
    """States [tokens, width], experts' numbers [tokens, chosen] and weights [tokens, ...] of a call; None: others."""
    given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    if len(given) != 3 or any(v.dim() != 2 or len(v) != len(given[0]) for v in given):
        return None
    whole = [v for v in given if not v.is_floating_point()]
    return (given[0], whole[0], next(v for v in given[1:] if v is not whole[0])) \
        if len(whole) == 1 and whole[0] is not given[0] else None


class Intercepted:
    """Modules' forwards are overridden on the instances while it lasts."""

    def __init__(self, modules: Dict[str, torch.nn.Module], enter: Callable[..., Any]) -> None:
        self.modules, self.enter = modules, enter

    def __enter__(self) -> None:
        for path, module in self.modules.items():
            own = module.forward

            def forward(*args: Any, path: str = path, own: Callable[..., Any] = own, **kwargs: Any) -> Any:
                return self.enter(path, own, args, kwargs)
            setattr(forward, "own", own)
            module.forward = forward  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        for module in self.modules.values():
            del module.__dict__["forward"]

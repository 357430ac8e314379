"""Two streams through a layer: z through the weights as they are, and x through what they become.

The batch is [z; x]. Products whose weights have one input are a set. Each slice of the batch is a thread that stops
where a set has its input; when all have, the set's moments are summed, the program makes its weights, and x goes on
with those. So one pass through a layer makes all of it.
"""
from __future__ import annotations

import re
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union

import torch

from ._calibrate_door import Door, Weight, place_of
from ._calibrate_experts import Call, Expert, Found, Given, Intercepted, Reached, Sent, flat, states_of
from ._calibrate_moments import Gradients, Sum
from ._values import Values
from .errors import InputError
from .stream import Catch, Loader

InPlace = Dict[str, torch.Tensor]  # of parameters that x has in place of the model's
END = 1 << 30  # the stop behind all others


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
        self.places = places_of(loader.source, door)
        self.by_name = {name: self.found(name) for name in loader.meta}
        self.by_name = {name: found for name, found in self.by_name.items() if found}

    def found(self, name: str, across: Optional[bool] = None) -> List[Target]:
        out = []
        held = self.loader.held_across(name) if across is None else across
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


Places = Dict[Tuple[str, Optional[int]], List[Tuple[Weight, int, int]]]


def places_of(source: Any, door: Door) -> Places:
    """The program's weights by where they lie in the source: by tensor and, of a stack, the number of the expert, with
    the first of their outputs there and the first behind them."""
    places: Places = {}
    alone = apart_from_stacks(source, door)
    for weight, known in door.weights.items():
        expert, first = place_of(weight, known)
        place, first = ((alone[weight], None), 0) if weight in alone else ((weight[0], expert), first)
        places.setdefault(place, []).append((weight, first, first + known["rows"]))
    return places


def apart_from_stacks(source: Any, door: Door) -> Dict[Weight, str]:
    """Where the model has experts as modules, and so the source, but the program stacks them: the source's names of
    matrices of stacks, found by the values of each first expert."""
    has, out = set(source.names), {}
    if all(weight[0] in has for weight in door.weights):
        return {}
    with Values(source.path, experts="stacked") as stacks:
        for (stack, expert), known in door.weights.items():
            if stack in has or expert is None:
                continue
            number, begin = place_of((stack, expert), known)
            if number:
                continue
            matrix = stacks.read(stack, None, 0, 1)[0]
            matrix = (matrix.t() if known["turned"] else matrix)[begin:begin + known["rows"]]
            layer = re.match(r"\D*\d+\.", stack)
            name = next((n for n in source.names if n.startswith(layer.group() if layer else "") and ".0." in n
                         and source.shape(n) == tuple(matrix.shape) and torch.equal(source.read(n), matrix)), None)
            if name is None:
                continue
            head, _, tail = name.rpartition(".0.")
            for other, its in door.weights.items():
                if other[0] == stack and other[1] is not None:
                    number, first = place_of(other, its)
                    if first == begin:
                        out[other] = "%s.%d.%s" % (head, number, tail)
    return out


def source_of(model: torch.nn.Module, folder: str, experts: Optional[str]) -> Values:
    """The checkpoint in a form that the model can be made of."""
    source = Values(folder, experts=experts)
    if experts == "stacked":
        try:
            Loader(model, source)
        except InputError:
            alone = Values(folder, experts="separate")
            if set(alone.names) == set(source.names):
                raise
            source.close()
            return alone
    return source


@dataclass
class Stop:
    """Where slices wait for each other: at the first product of a set, or at the first call of any of `members`, modules
    of experts, whose sets are gone through one after the other. owner: the module that has the tokens of all members."""
    sets: List[List[str]] = field(default_factory=list)  # parameters with one input; of all members alike
    owner: Optional[str] = None
    members: List[str] = field(default_factory=list)


class Slice:
    """One slice's pass through the layer, on a thread that runs only while `advance` waits for it."""
    running: Dict[int, "Slice"] = {}  # by thread

    def __init__(self, run: Callable[[], Any], ids: Dict[int, str], which: Dict[str, int], values: InPlace) -> None:
        self.run, self.ids, self.which, self.values = run, ids, which, values
        self.at, self.input, self.result, self.error, self.dead = -1, None, None, None, False  # type: Any
        self.entered: Dict[str, Given] = {}  # arguments of owners of experts
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


class Layers:
    """What calibrating does to each layer that the stream visits."""

    def __init__(self, stream: Any, door: Door, targets: Targets, counted: Counted, gradients: Optional[Gradients],
                 streams: int, done: Callable[[str], None]) -> None:
        self.stream, self.door, self.targets, self.counted, self.gradients = stream, door, targets, counted, gradients
        self.streams, self.done = streams, done  # one stream: moments of the model as it is
        self.apart = False                       # something before this is not what it was
        self.ids: Dict[int, str] = {}            # of the layer at hand
        self.called: Optional[Callable[[str, Callable[..., Any], Given], None]] = None  # sees calls of experts

    # ---- weights ----

    def any_made(self, names: Iterable[str]) -> bool:
        return self.streams == 2 and any(self.door.weights[t.weight]["made"] for t in self.targets.of(names))

    def put(self, values: InPlace, targets: Iterable[Target], made: Dict[Weight, torch.Tensor]) -> None:
        for t in targets:
            if t.weight in made:
                if t.parameter not in values:
                    values[t.parameter] = self.stream.loader.get(t.parameter).detach().clone()
                t.put(values[t.parameter], made[t.weight])

    def solve(self, layer: str, sets: Sequence[Tuple[List[Target], InputMoments]], values: InPlace) -> None:
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
        values: InPlace = {}
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
        seen = set()
        ids = {i: n for i, n in params.items() if n in self.targets.by_name}
        stacks = {n.rpartition(".")[0] for n in ids.values() if self.stream.loader.get(n).dim() == 3}
        found = Found(self.stream.model, call.name, stacks)

        def before(name: str, part: Optional[int], x: torch.Tensor) -> None:
            inputs.append(x)
            if name not in seen:
                seen.add(name)
                order.setdefault((x.data_ptr(), tuple(x.shape), x._version), []).append(name)
        with torch.no_grad(), found.watching(), Catch(ids, before) as seeing:
            call.run(piece)
        self.targets.settle(seeing.across)
        # Sets within experts become those of all experts alike, also of those that the traced slice did not reach.
        names, out = set(ids.values()), []  # type: Set[str], List[Stop]
        of_owner: Dict[str, Stop] = {}
        for own in order.values():
            member = found.member_of(own[0])
            if member is None:
                out.append(Stop([own]))
                continue
            owner = found.owner_of[member]
            if owner not in of_owner:
                of_owner[owner] = Stop([], owner, found.members(owner))
                out.append(of_owner[owner])
            stop = of_owner[owner]
            every = [n for m in stop.members for n in (m + one[len(member):] for one in own) if n in names]
            if every and not any(every[0] in other for other in stop.sets):
                stop.sets.append(every)
        return out

    def lockstep(self, call: Any, zs: List[slice], xs: List[slice], params: Dict[int, str], stops: List[Stop],
                 values: InPlace) -> List[Any]:
        ids = self.ids = {i: n for i, n in params.items() if n in self.targets.by_name}
        which = {n: i for i, s in enumerate(stops) if not s.owner for names in s.sets for n in names}
        at = {member: (i, s.owner) for i, s in enumerate(stops) for member in s.members}
        owners = {s.owner for s in stops if s.owner}

        def enter(path: str, own: Callable[..., Any], args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
            mine = Slice.running.get(threading.get_ident())
            if mine and path in owners:
                mine.entered[path] = (args, kwargs)
            if mine and path in at:
                mine.stop(at[path][0], mine.entered.get(at[path][1]))
            elif path in at and self.called:
                self.called(path, own, (args, kwargs))
            return own(*args, **kwargs)
        runs = [Slice(lambda p=p: call.run(p), ids, which, values if i >= len(zs) else {})
                for i, p in enumerate(zs + xs)]
        rows = self.stream.batch // self.streams
        of_batch = [slice(p.start * rows // max(1, zs[-1].stop), p.stop * rows // max(1, zs[-1].stop)) for p in zs]
        try:
            with Intercepted(self.stream.model, {*owners, *at}, enter):
                for i, stop in enumerate(stops):
                    given = ((z.advance(i), x.advance(i) if xs else None, r)
                             for z, x, r in zip(runs, runs[len(zs):] or runs, of_batch))
                    if stop.owner:
                        self.experts(call.name, stop, list(given), values)
                    else:
                        self.take_set(call.name, stop.sets[0], given, values)
                for run in runs:
                    run.advance(END)
            return [run.result for run in runs]
        finally:
            for run in runs:
                run.end()

    def take_set(self, layer: str, names: List[str], given: Iterable[Tuple[Any, Any, slice]], values: InPlace) -> None:
        """Sums up the moments of one set, and makes its weights."""
        moments: Optional[InputMoments] = None
        wanted = [t for t in self.targets.wanted(names) if t.part is None]
        for z, x, rows in given:
            x = x if self.streams == 2 else z
            if x is not None and wanted:
                moments = moments or InputMoments(x.shape[-1], self.apart)
                if x.numel():
                    moments.add(x, z, self.counted.of(x, rows))
        if moments:
            self.solve(layer, [(wanted, moments)], values)
        self.apart |= self.any_made(names)

    # ---- experts ----

    def experts(self, layer: str, stop: Stop, given: List[Tuple[Any, Any, slice]], values: InPlace) -> None:
        """Makes the weights of experts. Moments are of the tokens that x sends to an expert, and of z's states of the
        same tokens."""
        slices = [self.sent(stop, z, x or z, rows, values) for z, x, rows in given if x or self.streams == 1 and z]
        for names in stop.sets:
            wanted, apart = self.targets.wanted(names), self.apart
            targets: Dict[Tuple[str, Optional[int]], List[Target]] = {}
            for t in wanted:
                targets.setdefault((t.parameter, t.part), []).append(t)
            of_expert: Dict[Expert, List[str]] = {}
            for name, part in targets:
                of_expert.setdefault((next(m for m in stop.members if name.startswith(m + ".")), part), []).append(name)
            held: List[Tuple[List[Target], InputMoments]] = []
            for expert, named in of_expert.items():
                moments: Optional[InputMoments] = None
                for sent in slices:
                    for x, z, mask in sent.inputs(expert, names, apart and self.streams == 2):
                        moments = moments or InputMoments(x.shape[-1], apart)
                        moments.add(x, z, mask)
                if moments:
                    held.append(([t for n in named for t in targets[n, expert[1]]], moments))
                if not any(t.weight[1] is not None for t in wanted):  # all matrices of a stack go together
                    self.solve(layer, held, values)
                    held = []
            self.solve(layer, held, values)
            self.apart |= self.any_made(names)

    def sent(self, stop: Stop, z: Optional[Given], x: Given, rows: slice, values: InPlace) -> Sent:
        own = self.stream.model.get_submodule(stop.owner).__dict__["forward"].own
        states = states_of(x)
        mask = None if states is None else self.counted.of(states, rows)
        if stop.owner in stop.members:
            return Sent(own, z, x, mask, None, self.ids, values)
        calls: Dict[str, List[Call]] = {}
        self.called = lambda path, own, given: calls.setdefault(path, []).append(Call(own, given, flat(states)))
        with torch.no_grad(), Catch(self.ids, lambda name, part, given: values.get(name)):
            own(*x[0], **x[1])
        self.called = None
        return Sent(own, z, x, mask, calls, self.ids, values)

"""The passes of qconv.calibrate, and its talk with the program."""
from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import transformers

from . import _text
from ._calibrate_bundled import mixture
from ._calibrate_door import Closed, Door
from ._calibrate_judge import judged
from ._calibrate_layers import Counted, InputMoments, Layers, Reached, Targets, source_of
from ._calibrate_moments import Gradients
from ._calibrate_plan import BACKWARD_TOKENS, SLICE_TOKENS, Plan, check_room, fast_products, foresee, rate_of
from ._program import Progress, ProgressCallback, Run, StrPath, failure, log
from .errors import InputError, QconvWarning
from .evaluate import devices_of
from .results import Conversion, DryRun
from .stream import Catch, Stream, build

SEED = 1000003
ENOUGH_TOKENS = 16384  # more help little (docs/calibration.md, how much text)


class Finished(Exception):
    """All that was to be made is made."""


def draw(logits: torch.Tensor, mask: torch.Tensor, windows: Sequence[int]) -> torch.Tensor:
    """The gradient of the cross entropy with labels that are drawn from the predictions themselves: softmax minus the
    label, and zero where no token counts. logits: [rows, tokens, vocabulary]; mask: bool [rows, tokens]."""
    p = torch.softmax(logits.detach().float(), -1)
    for row, window in enumerate(windows):
        generator = torch.Generator().manual_seed(SEED * (window + 1))
        uniform = torch.rand(p.shape[1], 1, generator=generator, dtype=torch.float64).to(p.device)
        reached = p[row].double().cumsum(-1)
        label = (reached <= uniform * reached[:, -1:]).sum(-1, keepdim=True).clamp_(max=p.shape[-1] - 1)
        p[row].scatter_add_(-1, label, torch.full_like(label, -1, dtype=p.dtype))
    return p * mask[..., None].to(p)


def go_back(output: Any, mask: torch.Tensor, windows: Sequence[int]) -> None:
    """Starts the gradients: of drawn labels; without a head, of the normalized mean of the last states, times a vector
    of normal random numbers for each window."""
    logits, states = output.get("logits"), output.get("last_hidden_state")
    if logits is not None and logits.dim() == 3 and logits.shape[:2] == mask.shape:
        logits.backward(draw(logits, mask, windows).to(logits.dtype))
    elif states is not None and states.dim() == 3 and states.shape[:2] == mask.shape:
        counts = mask[..., None].to(states)
        mean = (states.float() * counts).sum(1) / counts.sum(1).clamp(min=1)
        g = torch.stack([torch.randn(mean.shape[1], generator=torch.Generator().manual_seed(SEED * (w + 1)))
                         for w in windows]).to(mean)
        torch.nn.functional.normalize(mean, dim=-1).backward(g * mask.any(1, keepdim=True).to(mean))
    else:
        raise InputError("the model gives neither logits nor states of every token, so its outputs have no gradients "
                         "(calibrate takes none with --sided one)")


class Text:
    """Windows by their numbers, and the batch of them."""

    def __init__(self, windows: _text.Windows, numbers: Sequence[int], config: Any) -> None:
        self.numbers, self.tokens = list(numbers), sum(windows.lengths[n] for n in numbers)
        self.inputs, self.masks = windows.batch(self.numbers, config, 2)
        self.rows = len(self.masks[0])


class Calibration:
    """All of one run, while the program is there."""

    def __init__(self, door: Door, model: str, own: Mapping[str, Any], options: Mapping[str, str],
                 progress: Optional[ProgressCallback]) -> None:
        self.door, self.folder, self.own, self.progress = door, model, own, progress
        self.devices = devices_of(own["device"])
        self.build = partial(build, model, trust_remote_code=own["trust_remote_code"])
        self.model = self.build()
        self.source = source_of(self.model, model, options.get("experts"))
        self.two = own["sided"] != "one"
        self.steps, self.done = 0, 0
        self.says, self.ahead = False, None  # type: Tuple[bool, Optional[Plan]]
        config = self.model.config
        self.mixed = mixture(own, model, config, partial(
            _text.windows, model=model, tokenizer=own["tokenizer"], inputs=own["inputs"], config=config,
            paragraphs=not (_text.is_causal(config) or own["inputs"] or getattr(config, "is_encoder_decoder", False))),
            self.stream)
        self.windows = self.mixed.windows
        self.stream().close()  # which refuses a checkpoint that is not the model's

    def hello(self) -> Dict[str, Any]:
        w = self.windows
        report = {"text": str(self.own["text"]), "text_digest": w.digest, "tokenizer": w.kind, "tokens": sum(w.lengths),
                  "windows": len(w.lengths), "context": w.longest, "sided": 2 if self.two else 1, "mix": self.mixed.share,
                  "relative_rank": self.mixed.rank or 0}
        identity = dict(report, torch=torch.__version__, transformers=transformers.__version__,
                        device=self.devices[0].partition(":")[0])
        return {"hello": 1, "identity": json.dumps(identity, sort_keys=True), "report": report}

    def step(self, name: str) -> None:
        self.done += 1
        if self.progress:
            self.progress(Progress("calibrating", min(self.done, self.steps), self.steps, "layers"))

    def text(self, most: Optional[int]) -> Text:
        numbers = _text.spread(self.windows.lengths, most) if most else range(len(self.windows.lengths))
        return Text(self.windows, numbers, self.model.config)

    def stream(self, tokens: Optional[int] = None, model: Any = None, source: Any = None) -> Stream:
        """Of windows of so many tokens. States lie where the plan has them."""
        ahead, tokens = self.ahead, tokens or self.windows.longest
        stream = Stream(model or self.model, source or self.source, rows=max(1, SLICE_TOKENS // tokens),
                        devices=ahead.devices if ahead else self.devices)
        if ahead and ahead.states in ("memory", "files"):
            stream.home = torch.device("cpu")
            stream.folder = tempfile.gettempdir() if ahead.states == "files" else None
        return stream

    def plan(self) -> Plan:
        """What the phase that the program has announced will take."""
        stream, back = self.stream(), self.text(BACKWARD_TOKENS)
        plan = foresee(self.door.ahead, stream, self.windows, self.text(None).rows, back.rows if self.two else 0,
                       back.tokens, self.devices, rate_of(self.devices[0]))
        stream.close()
        return plan

    # ---- passes ----

    def take_gradients(self, text: Text, sums: Gradients) -> None:
        """One pass forward and one back."""
        stream = self.stream()
        targets = Targets(stream.loader, self.door)
        layer_of = {n: p for p in stream.layers for n in targets.by_name if n.startswith(p + ".")}

        def visit(call: Any, pieces: List[slice], params: Dict[int, str]) -> Iterator[Any]:
            with Catch(params) as seeing:
                yield call.run(pieces[0])
            targets.settle(seeing.across)
            for piece in pieces[1:]:
                yield call.run(piece)

        def gradient(name: str, part: Optional[int], x: torch.Tensor, y: torch.Tensor) -> None:
            if name in layer_of and y.requires_grad and targets.wanted([name]):
                y.register_hook(lambda g: take(name, part, g))

        def take(name: str, part: Optional[int], g: torch.Tensor) -> None:
            if layer_of[name] != sums.layer:
                self.step(layer_of[name])
            several = part is None and g.dim() == 3 and stream.loader.get(name).dim() == 3  # all experts in one product
            for expert in range(len(g)) if several else [part]:
                own = g[expert] if several else g.reshape(-1, g.shape[-1])
                for weight, found in targets.outputs(name, expert).items():
                    whole = own.new_zeros(len(own), self.door.weights[weight]["rows"])
                    for t in found:
                        whole[:, t.at] = own[:, t.rows]
                    sums.add(layer_of[name], self.door.module(weight), whole)

        def each(piece: slice, output: Any) -> None:
            mask = text.masks[-1][piece]
            numbers = [text.numbers[i] if i < len(text.numbers) else 0 for i in range(text.rows)[piece]]
            go_back(output, mask, numbers)
        stream.visit, stream.gradient = visit, gradient
        stream.backward(text.inputs, each)
        stream.close()
        sums.flush()
        sums.layer = ""

    def take_layers(self, text: Text, streams: int, gradients: Optional[Gradients]) -> None:
        """Both streams pass, and the weights are made on the way; or one passes and weighs."""
        stream = self.stream()
        targets = Targets(stream.loader, self.door)
        counted = Counted(text.masks)

        def done(name: str) -> None:
            self.step(name)
            if not targets.wanted(targets.by_name):
                raise Finished
        layers = Layers(stream, self.door, targets, counted, gradients, streams, done)
        stream.visit = layers
        try:
            body = stream.body({k: torch.cat([v] * streams) for k, v in text.inputs.items()})
            self.take_head(stream, body, layers, text, streams)
        except Finished:
            pass
        finally:
            stream.close()

    def take_head(self, stream: Stream, body: Any, layers: Layers, text: Text, streams: int) -> None:
        """Products behind the layers count all outputs alike."""
        outside = [n for n in layers.targets.by_name if not any(n.startswith(p + ".") for p in stream.layers)]
        ids = {id(stream.loader.get(n)): n for n in outside if layers.targets.wanted([n])}
        if not ids:
            return
        moments: Dict[str, InputMoments] = {}
        step = max(1, SLICE_TOKENS // self.windows.longest)
        for at in range(0, text.rows, step):
            rows = slice(at, min(at + step, text.rows))
            seen = [self.head_inputs(body, slice(rows.start + i * text.rows, rows.stop + i * text.rows), ids)
                    for i in range(streams)]
            for n, x in seen[-1].items():
                one = moments.setdefault(n, InputMoments(x.shape[-1], layers.apart))
                one.add(x, seen[0].get(n), layers.counted.of(x, rows))
        for n, m in moments.items():
            layers.solve("", [([t for t in layers.targets.wanted([n]) if t.part is None], m)], {})

    def head_inputs(self, body: Any, rows: slice, ids: Dict[int, str]) -> Dict[str, torch.Tensor]:
        seen: Dict[str, torch.Tensor] = {}

        def before(name: str, part: Optional[int], x: torch.Tensor) -> None:
            seen.setdefault(name, x.detach())
            if len(seen) == len(ids):
                raise Reached
        try:
            with torch.no_grad(), Catch(ids, before):
                body.head(rows)
        except Reached:
            pass
        return seen

    # ---- the program's phases ----

    def serve(self) -> None:
        """Does what the program asks for until it needs nothing more."""
        while True:
            phase = self.door.phase()
            if not all(w["made"] for w in self.door.weights.values()):
                if self.ahead is None and sum(self.windows.lengths) < min(ENOUGH_TOKENS, self.own["calibration_tokens"]):
                    warnings.warn("%s has {:,} tokens; take {:,} or more (docs/calibration.md, how much text)".format(
                        sum(self.windows.lengths), ENOUGH_TOKENS) % self.own["text"], QconvWarning, stacklevel=2)
                self.ahead = self.plan()
                if self.says:
                    for line in [self.ahead.line(), *(self.ahead.table() if phase == "dry-run" else [])]:
                        print("qconv: " + line, file=sys.stderr, flush=True)
                check_room(self.ahead)
                if phase != "dry-run":
                    self.work(phase)
            found = judged(self.mixed, self.door, self.source, self.build, self.stream,
                           lambda done, layers: self.progress and self.progress(Progress("judging", done, layers, "layers"))
                           ) if phase == "calibrate" else None
            self.door.end({"judged": found} if found else {})
            if phase != "weigh":
                return

    def work(self, phase: str) -> None:
        stream = self.stream()
        self.door.tokens = self.text(BACKWARD_TOKENS).tokens
        self.done, self.steps = 0, len(stream.layers) * (2 if self.two else 1)
        stream.close()
        gradients = Gradients() if self.two else None
        try:
            if gradients:
                self.take_gradients(self.text(BACKWARD_TOKENS), gradients)
            if phase == "weigh":
                self.take_layers(self.text(BACKWARD_TOKENS), 1, gradients)
            else:
                self.take_layers(self.text(None), 2, gradients)
        finally:
            if gradients:
                gradients.close()


def calibrated(typed: Sequence[str], model: StrPath, out: Optional[StrPath], own: Mapping[str, Any],
               progress: Optional[ProgressCallback], shown: bool) -> Union[None, Conversion, DryRun]:
    """The work of qconv.calibrate. shown: the program prints, and None is returned."""
    if not os.path.isdir(model):
        raise InputError("%s: there is no such folder" % os.fspath(model))
    options = {word[2:].partition("=")[0]: word.partition("=")[2] for word in typed}
    door = Door()
    try:
        job = Calibration(door, os.fspath(model), own, options, progress)
        job.says = shown and not {"--quiet", "-q"} & set(typed)
        line = job.mixed.line()
        if line and job.says:
            print("qconv: " + line, file=sys.stderr, flush=True)
        elif line:
            log.info("%s", line)
        argv = ["convert", *typed, "--hessians=fd:%d" % door.theirs.fileno(),
                *(["--device=" + own["device"]] if own["device"] != "auto" else []), *([] if shown else ["--json"]),
                "--", *(os.fspath(p) for p in (model, out) if p is not None)]
        program = Run(argv, [door.theirs.fileno()], shown)
        door.started()
        try:
            door.say(job.hello())
            with fast_products(job.devices):
                job.serve()
        except Closed:
            pass
        except BaseException as error:
            if shown and not isinstance(error, KeyboardInterrupt):
                program.process.kill()  # or it would say that it was interrupted
            program.stop()
            if shown and isinstance(error, KeyboardInterrupt):
                raise SystemExit(130) from None  # the program has said that
            raise
        if shown:
            try:
                code = program.join()
            except KeyboardInterrupt:
                program.stop()
                raise
            if code:
                raise SystemExit(code if code > 0 else 1)
            return None
        program.listen(progress)
        code = program.join()
        kind = DryRun if "--dry-run" in typed else Conversion
        printed = json.loads(program.printed) if program.printed.strip() else None
        if printed and job.ahead:
            printed["calibration_ahead"] = job.ahead.json()
        result = kind.from_json(printed) if printed else None
        if code:
            raise failure(code, program.message, result)
        return result
    finally:
        door.close()

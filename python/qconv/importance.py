"""qconv.importance and `python -m qconv importance`: how much an error in each weight moves a model's answers on a text.

The model passes forwards and back once, one layer in memory (stream.py). A weight gets two numbers: the trace of the
second moment of its inputs, and that of the gradients of its outputs, as `calibrate` has both
(docs/theory/calibration.md). Half their product, times the mean squared error of an element, predicts the divergence in
nats (docs/decisions/0028). `qconv --to auto --importance FILE` chooses by it."""
from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import warnings
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from . import _stream_needs
from ._command import Parser, warnings_said
from ._pipeline import is_pipeline
from ._program import Progress, ProgressCallback, StrPath, listening, size
from .errors import Error, InputError, QconvWarning, RunError, UsageError

if TYPE_CHECKING:
    import torch

    from .stream import Stream

TOKENS = 32768  # of the text; calibrate takes as many backwards
FEW = 16        # tokens: an expert that fewer reach is given what its layer's experts have on average
EXPERT = re.compile(r"(experts?[._])\d+\.")
Place = Tuple[str, Optional[int]]  # a tensor of the checkpoint, and the matrix of a stack


def importance(model: StrPath, out: Optional[StrPath] = None, *, text: StrPath = "default", tokens: int = TOKENS,
               context: Optional[int] = None, tokenizer: Optional[StrPath] = None, inputs: Optional[StrPath] = None,
               device: str = "auto", trust_remote_code: bool = False,
               progress: Union[None, bool, ProgressCallback] = None) -> Dict[str, Any]:
    """Measures how much an error in each weight of the checkpoint `model` matters, for `--to auto --importance FILE`.

    model      a folder with a checkpoint whose type transformers knows
    out        the file that the result is written to as JSON; None: it is only returned
    text       a file in UTF-8; of token ids, one sequence a line, if its name ends in ".ids"; or "default", the bundled text
    tokens     the most tokens of it that are taken, in windows that are spread over it
    context    tokens of a window; None: 2048, or the model's limit
    tokenizer  a tokenizer.json, or a folder that has one; None: the model's own
    inputs     a .safetensors file with further arguments of the model's forward, a row for each sequence
    device     "auto", "cpu", "cuda" or "cuda:0,1": what computes
    trust_remote_code  run the Python code that the model brings with it
    progress   a function that is called with a Progress, or True for a bar

    The result has `weights`: of each tensor of the checkpoint [trace of inputs, trace of gradients]; docs/importance.md
    says more. Raises UsageError (an argument; torch or transformers missing or too old), InputError (a model or text that
    is not read) and RunError (no room on the disk)."""
    for name, given, least in (("tokens", tokens, 1), ("context", context, 2)):
        if given is not None and given < least:
            raise UsageError("--%s is %d; expected at least %d" % (name, given, least))
    if is_pipeline(model):
        raise UsageError("%s is a pipeline of several models: name the folder of one part" % os.fspath(model))
    if not os.path.isdir(model):
        raise InputError("%s: there is no such folder" % os.fspath(model))
    folder = None if out is None else os.path.dirname(os.path.abspath(out))
    if folder is not None and not os.path.isdir(folder):
        raise UsageError("--out %s: there is no folder %s" % (out, folder))
    if out is not None and os.path.lexists(out) and not is_ours(out):
        raise UsageError("--out %s is there and is no importance file; expected another name" % os.fspath(out))
    _stream_needs.check()
    with listening(progress) as listener:
        found = measured(os.fspath(model), str(text), tokens, context, tokenizer, inputs, device, trust_remote_code, listener)
    if out is not None:
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".importance-", delete=False, encoding="utf-8") as file:
            try:
                file.write(as_text(found))
                file.flush()
                os.fchmod(file.fileno(), 0o644)
                os.replace(file.name, out)
            except BaseException:
                os.unlink(file.name)
                raise
    return found


def is_ours(path: StrPath) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and "weights" in said and "format" in said


def as_text(found: Dict[str, Any]) -> str:
    """The object with a line for each weight."""
    head = ",\n".join(" %s: %s" % (json.dumps(k), json.dumps(v)) for k, v in found.items() if k != "weights")
    rows = ",\n".join("  %s: %s" % (json.dumps(n), json.dumps(pair)) for n, pair in found["weights"].items())
    return '{\n%s,\n "weights": {\n%s\n }\n}\n' % (head, rows)


def measured(model: str, text: str, tokens: int, context: Optional[int], tokenizer: Optional[StrPath],
             inputs: Optional[StrPath], device: str, trust: bool, listener: Optional[ProgressCallback]) -> Dict[str, Any]:
    import torch
    import transformers

    from . import _text
    from ._calibrate_plan import SLICE_TOKENS, fast_products
    from ._calibrate_run import Text, go_back
    from ._values import Values
    from .evaluate import devices_of
    from .stream import Stream, build
    devices = devices_of(device)
    made = build(model, trust_remote_code=trust)
    windows = _text.windows(text, model, tokenizer=tokenizer, inputs=inputs, context=context, config=made.config)
    passing = Text(windows, _text.spread(windows.lengths, tokens), made.config)

    def each(piece: slice, output: Any) -> None:
        go_back(output, passing.masks[-1][piece], [passing.numbers[i] if i < len(passing.numbers) else 0
                                                   for i in range(passing.rows)[piece]])
    rows = max(1, SLICE_TOKENS // windows.longest)
    with Values(model, experts="separate") as alone, Values(model) as whole:
        try:  # experts under the names that the program plans them by
            stream = Stream(made, alone, rows=rows, devices=devices)
        except InputError:
            stream = Stream(made, whole, rows=rows, devices=devices)
        try:
            settle_states(stream, passing.rows, windows.longest)
            traces = Traces(stream, listener)
            with fast_products(devices), traces.outside, traces.of_embeddings():
                stream.backward(passing.inputs, each)
            answered = int(passing.masks[-1].sum())
            weights, filled = traces.pairs(answered)
        except Error:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError("%s of transformers %s does not compute %s forwards and back: %s: %s" % (
                type(made).__name__, transformers.__version__, text, type(error).__name__,
                str(error).partition("\n")[0])) from error
        finally:
            stream.close()
    wrong = next((n for n, pair in weights.items() if not all(0 <= v < float("inf") for v in pair)), None)
    if wrong is not None:
        raise InputError("%s: inputs or gradients at %s are not finite" % (model, wrong))
    if filled:
        warnings.warn("%d matrices of experts have the means of their layer's experts, as fewer than %d tokens of %s reach "
                      "them" % (filled, FEW, text), QconvWarning, stacklevel=3)
    return {"format": 1, "model": os.path.basename(os.path.abspath(model)), "model_type": made.config.model_type,
            "text": text if text == _text.DEFAULT else os.path.basename(text), "text_digest": windows.digest,
            "tokens": answered, "windows": len(passing.numbers), "context": windows.longest, "filled": filled,
            "torch": torch.__version__, "transformers": transformers.__version__, "weights": weights}


def settle_states(stream: Stream, rows: int, context: int) -> None:
    """Hidden states, of which backward needs every layer's, go to files where they would take half the memory."""
    import shutil

    import torch

    from ._calibrate_plan import STATES
    held = stream.outlook(rows, context).state * (len(stream.layers) + STATES)
    stream.home = torch.device("cpu")
    if held > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2:
        stream.folder = tempfile.gettempdir()
        free = shutil.disk_usage(stream.folder).free
        if held > free:
            raise RunError("hidden states take %s in %s, and %s are free there: TMPDIR names another folder, and fewer "
                           "--tokens take less" % (size(held), stream.folder, size(free)))


class Sum(List[float]):
    """Over the tokens that reach one product: squares of its inputs, and of gradients of its outputs; and how many."""

    def add(self, other: Sequence[float]) -> None:
        self[:] = [a + b for a, b in zip(self or (0.0, 0.0, 0.0), other)]


class Traces:
    """What one pass forwards and back leaves of every product. A token whose gradients are all zero does not count: it is
    padding, or nothing that comes after depends on it."""

    def __init__(self, stream: Stream, listener: Optional[ProgressCallback]) -> None:
        from .stream import Catch
        self.stream, self.loader, self.listener, self.told = stream, stream.loader, listener, 0
        self.sums: Dict[Place, Dict[str, Sum]] = {}  # by the parameter that has it, a product with which is one use
        self.origins: Dict[Tuple[str, bool], List[Any]] = {}
        self.outside, move = Catch({}, after=self.product), stream.move  # sees products that are in no layer

        def moved(device: torch.device) -> None:
            move(device)
            self.outside.params = {id(self.loader.get(n)): n for n in stream.rest if n in self.loader.meta}
        stream.move, stream.gradient, stream.visit = moved, self.product, self.visit  # type: ignore[method-assign]

    def visit(self, call: Any, pieces: List[slice], params: Dict[int, str]) -> Iterator[Any]:
        self.tell()
        return (call.run(piece) for piece in pieces)

    def tell(self) -> None:
        if self.listener and self.told != self.stream.loads:
            self.told, total = self.stream.loads, 2 * len(self.stream.layers)
            self.listener(Progress("weighing", min(self.told, total), total, "layers"))

    def origin(self, name: str, across: bool) -> List[Any]:
        if (name, across) not in self.origins:
            self.origins[name, across] = self.loader.origin(name, across)
        return self.origins[name, across]

    def product(self, name: str, part: Optional[int], x: torch.Tensor, y: torch.Tensor) -> None:
        if not y.requires_grad:
            return
        self.tell()
        shape, across = tuple(self.loader.meta[name].shape), self.loader.held_across(name)
        if shape[-1] != shape[-2]:
            across = shape[-2:] == (x.shape[-1], y.shape[-1])
        several = part is None and len(shape) == 3 and y.dim() == 3  # all experts in one product
        norms = x.detach().float().square().sum(-1)

        def take(g: torch.Tensor) -> None:
            for expert in range(len(g)) if several else [part]:
                own, n = (g[expert], norms[expert]) if several else (g, norms)
                self.add(name, expert, self.origin(name, across), n.reshape(-1), own.reshape(-1, own.shape[-1]).float())
        y.register_hook(take)

    def add(self, name: str, part: Optional[int], origins: Sequence[Any], norms: torch.Tensor, g: torch.Tensor) -> None:
        """norms: of inputs [tokens]; g: [tokens, outputs]."""
        reached, squares, found = (g != 0).any(1), g.double().square().sum(0), {}  # type: Any, Any, Dict[Place, float]
        for o in origins:
            if o.part == part:
                found[o.tensor, o.matrix] = found.get((o.tensor, o.matrix), 0.0) + float(squares[o.rows].sum())
        for place, trace in found.items():
            self.sum_of(place, name).add((float(norms.double()[reached].sum()), trace, float(reached.sum())))

    def sum_of(self, place: Place, name: str) -> Sum:
        return self.sums.setdefault(place, {}).setdefault(EXPERT.sub(r"\1*.", name), Sum())

    def of_embeddings(self) -> Any:
        """A context in which embeddings of tokens are seen, as products with vectors that have a single 1."""
        from contextlib import ExitStack

        import torch
        hooks = ExitStack()
        try:
            known = getattr(self.stream.model.get_input_embeddings(), "weight", None)
        except NotImplementedError:  # transformers names none
            known = None

        def hook(name: str) -> Any:
            def embedded(module: Any, given: Any, out: Any) -> Any:
                if not torch.is_grad_enabled() or not isinstance(out, torch.Tensor):
                    return out
                rows = torch.nn.functional.embedding(given[0], module.weight).square().sum()
                norms = (out.detach().square().sum() / rows.clamp(min=1e-30)).expand(given[0].numel())  # some are scaled
                out = out.detach().requires_grad_()
                out.register_hook(lambda g: self.add(name, None, self.loader.origin(name, False)[:1], norms,
                                                     g.reshape(-1, g.shape[-1]).float()))
                return out.clone()
            return embedded
        for name, parameter in self.loader.meta.items():
            module = self.loader.owner(name)[0]
            if parameter is known and isinstance(module, torch.nn.Embedding):
                hooks.callback(module.register_forward_hook(hook(name)).remove)
        return hooks

    def pairs(self, tokens: int) -> Tuple[Dict[str, List[float]], int]:
        """[trace of inputs, trace of gradients] by tensor, of so many tokens; and how many experts' are means of others.
        Where a tensor has several uses or matrices, the product of the two is the sum of theirs."""
        def key(tensor: str, name: str) -> Tuple[str, str]:
            return EXPERT.sub(r"\1*.", tensor), EXPERT.sub(r"\1*.", name)
        pools: Dict[Tuple[str, str], Sum] = {}
        for (tensor, _), uses in self.sums.items():
            for name, own in uses.items():
                pools.setdefault(key(tensor, name), Sum()).add(own)
        for name in self.loader.meta:  # also experts that no token reaches
            for o in self.loader.origin(name):
                if key(o.tensor, name) in pools:
                    self.sum_of((o.tensor, o.matrix), name).add((0.0, 0.0, 0.0))
        totals: Dict[str, Tuple[float, float]] = {}
        filled = 0
        for (tensor, _), uses in self.sums.items():
            for name, own in uses.items():
                pool, (h, p) = pools[key(tensor, name)], totals.get(tensor, (0.0, 0.0))
                few = own[2] < min(FEW, pool[2])
                filled += few
                x, g = (value / max(means[2], 1) for means in (pool if few else own,) for value in means[:2])
                share = max(own[2], 1) / tokens
                totals[tensor] = h + share * x, p + share * x * g
        return {name: [float("%.6g" % h), float("%.6g" % (p / h if h else 0.0))]
                for name, (h, p) in sorted(totals.items())}, filled


def main(argv: Sequence[str]) -> None:
    parser = Parser("importance", "Measure with a text how much an error in each weight of MODEL moves its answers, for "
                    "--to auto --importance FILE. The model passes once forwards and back, one layer in memory. Needs torch "
                    "and transformers: pip install 'qconv[models]'. docs/importance.md says what the numbers are.")
    parser.takes(importance, "model", "text", "tokens", "context", "tokenizer", "inputs", "device", "trust_remote_code")
    parser.add_argument("--out", metavar="FILE", help="where the result goes (default: standard output)")
    parser.add_argument("-q", "--quiet", action="store_true", help="show errors only")
    given = vars(parser.parse_args(list(argv)))
    quiet = given.pop("quiet")
    with warnings_said(quiet):
        found = importance(given.pop("model"), progress=not quiet and sys.stderr.isatty(), **given)
    if given["out"] is None:
        print(as_text(found), end="", flush=True)
    elif not quiet:
        print("qconv: %s: %d weights of %s, by %d tokens of %s" % (
            given["out"], len(found["weights"]), found["model"], found["tokens"], found["text"]), file=sys.stderr)

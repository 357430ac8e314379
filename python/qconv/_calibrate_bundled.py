"""The bundled text beside the one that a model is calibrated with: how narrow that is, and which windows go with it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

import torch

from . import _calibration_mix, _text
from ._calibrate_layers import Counted, flat
from ._text import Windows, spread
from .errors import InputError, UsageError
from .stream import Catch, Stream

LEAST = 16  # tokens of a window of the bundled text
HEAD = 256  # tokens of a window that are looked at, or more where there are few windows
WIDE = 1024  # inputs of a layer: where it has more, ranks are of so many tokens, whose products are fewer than the inputs'
LAYERS = 8  # that are looked at: narrow texts are narrow in the first ones, and reading all would take as long as a pass


class Enough(Exception):
    """So many layers are passed."""


@dataclass
class Mixture:
    """windows: those that calibrate, of both texts. unused: those of the bundled text that do not; None: there are none.
    share: the bundled text's of all tokens. rank: the text's relative one; None: nobody looked."""
    windows: Windows
    unused: Optional[Windows]
    share: float = 0.0
    rank: Optional[float] = None

    def line(self) -> Optional[str]:
        """What the user is told."""
        mixed = "%.2f of all tokens are the bundled text's" % self.share if self.share else "nothing is mixed in"
        if self.rank is None:
            return mixed if self.share else None
        return "the text's inputs have %.2f of the bundled text's effective rank, so %s (--mix)" % (self.rank, mixed)


def mixture(own: Mapping[str, Any], model: str, config: Any, read: Callable[..., Windows],
            stream: Callable[[int], Stream]) -> Mixture:
    """Chooses windows by the options. read(text, context): all windows of a text. stream(tokens):
    the model as it is, for windows of that length.

    Raises UsageError where a share is asked for that cannot be had."""
    text, most, share = str(own["text"]), own["calibration_tokens"], own["mix"]
    windows = read(text, context=own["calibration_context"])
    bundled, alone = None, "the text is the bundled one already"
    if own["inputs"] is not None:
        alone = "--inputs has rows for that text only"
    elif text.endswith(".ids") and not _text.is_read(model, own["tokenizer"], config):
        alone = "the model has no tokenizer.json for the bundled text"
    elif text != _text.DEFAULT:
        try:
            bundled = read(_text.DEFAULT, context=max(windows.longest, LEAST))
        except InputError as error:  # of ids, whose tokenizer may be another one
            alone = str(error)
    if share and bundled is None:
        raise UsageError("--mix %g: %s" % (share, alone))
    if bundled is None:
        used = spread(windows.lengths, most)
        return Mixture(windows.of(used), others(windows, used) if text == _text.DEFAULT else None)
    rank = None
    if share is None:
        rank = relative_rank(windows, bundled, config, stream)
        share = round(_calibration_mix.share(rank), 3)
    mine, theirs = _calibration_mix.tokens(sum(windows.lengths), sum(bundled.lengths), most, share)
    chosen, used = windows.of(spread(windows.lengths, mine)), spread(bundled.lengths, theirs) if theirs else []
    return Mixture(chosen.beside(bundled.of(used)) if used else chosen, others(bundled, used), share, rank)


def others(windows: Windows, used: List[int]) -> Optional[Windows]:
    left = sorted(set(range(len(windows.lengths))).difference(used))
    return windows.of(left) if left else None


def relative_rank(text: Windows, bundled: Windows, config: Any, make: Callable[[int], Stream]) -> float:
    """The text's, to three digits, of the inputs of the products of the first layers, in one pass of both."""
    most = _calibration_mix.SAMPLE
    heads = [w.heads(max(HEAD, most // min(len(text.lengths), len(bundled.lengths)))) for w in (text, bundled)]
    heads = [w.of(spread(w.lengths, most)) for w in heads]
    both = heads[0].beside(heads[1])
    inputs, masks = both.batch(range(len(both.lengths)), config)
    rows = len(masks[0])
    is_text = (torch.arange(rows) < len(heads[0].lengths))[:, None]
    counted = [Counted([m & is_text for m in masks]), Counted([m & ~is_text for m in masks])]
    ranks: Tuple[Dict[str, float], Dict[str, float]] = {}, {}
    stream, passed = make(both.longest), []

    def visit(call: Any, pieces: List[slice], params: Dict[int, str]) -> Iterator[Any]:
        found: Dict[str, Tuple[List[torch.Tensor], List[torch.Tensor]]] = {}
        inputs: Dict[Any, torch.Tensor] = {}  # are kept, so that no two have one address

        def before(name: str, part: Optional[int], x: torch.Tensor) -> None:
            key = (x.data_ptr(), tuple(x.shape), x._version)
            if key not in inputs and stream.loader.get(name).dim() == 2:
                for kept, c in zip(found.setdefault(name, ([], [])), counted):
                    mask = c.of(x, piece)
                    kept += [] if mask is None else [flat(x)[mask]]
            inputs[key] = x
        for piece in pieces:
            inputs.clear()
            with Catch(params if call.batch == rows else {}, before):
                yield call.run(piece)
        for name, kept in found.items():
            xs = [torch.cat(one) for one in kept if one]
            least = min(map(len, xs), default=0)
            step = max(1, -(-least // WIDE)) if xs and xs[0].shape[1] > WIDE else 1
            xs = [x[:least:step].float() for x in xs]
            if len(xs) == 2 and all(bool(x.any()) and bool(x.isfinite().all()) for x in xs):
                for rank, x in zip(ranks, xs):
                    rank[name] = _calibration_mix.effective_rank(x.t() @ x if len(x) > x.shape[1] else x @ x.t())
        passed.append(call.name)
        if len(passed) == LAYERS:
            raise Enough
    stream.visit = visit
    try:
        with torch.no_grad():
            stream.body(inputs)
    except Enough:
        pass
    finally:
        stream.close()
    return round(_calibration_mix.relative_rank(*ranks), 3) if ranks[0] else 1.0

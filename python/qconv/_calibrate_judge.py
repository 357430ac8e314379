"""What calibrated weights cost the answers to the bundled text, where it did not calibrate, beside those of --scale search.

Three models answer: the original, and two whose weights the program has made of it. Each is read once, layer by layer."""
from __future__ import annotations

import warnings
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from ._calibrate_bundled import Mixture
from ._calibrate_door import Closed, Door, Weight
from ._calibrate_layers import places_of
from ._text import spread
from ._values import Values
from .errors import QconvWarning
from .evaluate import Answers
from .stream import Stream

TOKENS = 4096  # are answered to
HEAD = 512     # of a window


class Made:
    """A checkpoint with the values that readers of the output get: of calibrated weights, and of searched scales where
    weights are not calibrated or `searched` is set (stream.Source)."""

    def __init__(self, source: Values, door: Door, searched: bool) -> None:
        self.source, self.door, self.searched = source, door, searched
        self.names, self.shape, self.dtype = source.names, source.shape, source.dtype
        self.places: Dict[str, Dict[Weight, Tuple[Optional[int], int]]] = {}
        for (name, expert), found in places_of(source, door).items():
            self.places.setdefault(name, {}).update((weight, (expert, first)) for weight, first, _ in found)

    def read(self, name: str, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        value, places = self.source.read(name, dtype), self.places.get(name)
        if not places:
            return value
        searched = self.searched or not all(self.door.weights[w]["made"] for w in places)
        for weight, made in self.door.values(list(places), searched).items():
            known, (expert, first) = self.door.weights[weight], places[weight]
            matrix = value if expert is None else value[expert]
            matrix = matrix.t() if known["turned"] and weight[0] == name else matrix
            matrix[first:first + known["rows"]] = made.to(matrix)
        return value


def judged(mixed: Mixture, door: Door, source: Values, build: Callable[[], Any], make: Callable[..., Stream],
           step: Callable[[int, int], None]) -> Optional[Dict[str, Any]]:
    """{"tokens", "search", "calibrated"}: the mean KL divergence of the predictions from the original's in nats, or of an
    encoder the distance of hidden states. None where nothing is left to judge with. A warning says where calibrated is
    worse. build(): the model without weights; make(tokens, model, source): its stream; step(layers, of)."""
    if mixed.unused is None or not any(w["made"] for w in door.weights.values()):
        return None
    windows = mixed.unused.heads(HEAD)
    windows = windows.of(spread(windows.lengths, TOKENS))
    passed: List[str] = []
    streams: List[Stream] = []

    def visit(call: Any, pieces: List[slice], params: Dict[int, str]) -> Iterator[Any]:
        yield from map(call.run, pieces)
        passed.append(call.name)
        layers = 3 * len(streams[0].layers)
        step(min(len(passed), layers), layers)
    try:
        models = [build() for _ in range(3)]
        config = models[0].config
        answers = Answers(windows, config, getattr(config.get_text_config(), "vocab_size", None),
                          models[0].get_output_embeddings() is not None)
        bodies = []
        for model, values in zip(models, (source, Made(source, door, True), Made(source, door, False))):
            streams.append(make(windows.longest, model, values))
            streams[-1].visit = visit
            with torch.no_grad():
                bodies.append(streams[-1].body(answers.inputs))
        search, calibrated = (answers.figures([body, bodies[0]])["distance_mean" if answers.encoder else "kl_mean"]
                              for body in bodies[1:])
    except Closed:
        raise
    except Exception as error:  # what is made is worth more than a figure of it
        warnings.warn("what calibrating does to other texts is not known: %s: %s" % (type(error).__name__, error),
                      QconvWarning, stacklevel=2)
        return None
    finally:
        for stream in streams:
            stream.close()
    if calibrated > search:
        warnings.warn("calibrated weights answer to the bundled text %.2f times as far from the original as those of "
                      "--scale search (%d tokens that did not calibrate), so this text is too narrow or too short for the "
                      "model; take %s, other text with it, or --scale search without calibrating" % (
                          calibrated / search, sum(windows.lengths),
                          "--mix above %g" % mixed.share if mixed.share else "--mix auto"), QconvWarning, stacklevel=2)
    return {"tokens": sum(windows.lengths), "search": search, "calibrated": calibrated}

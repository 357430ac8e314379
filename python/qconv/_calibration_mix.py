"""How narrow a calibration text is, by what it makes a model's layers read, and how much of the bundled text goes
with it (docs/calibration.md, bench/calibration_texts.py)."""
from __future__ import annotations

import math
from typing import Any, Mapping, Tuple

WIDE = 0.9   # of the bundled text's effective rank: a text that has so much is not narrow
MOST = 0.75  # of all tokens are the bundled text's beside a text that is nearly one line over and over
SAMPLE = 4096  # tokens of either text are enough for their ranks


def effective_rank(moment: Any) -> float:
    """How many directions the inputs of a layer have: exp of the entropy of the second moment's eigenvalues as shares
    of their sum, from 1 (all on one line) to n (all directions alike).

    moment   a numpy array or torch tensor [n, n], any float dtype: the sum or mean of x x^T over tokens. The products
             of tokens with each other [tokens, tokens] have the same eigenvalues, and are less where tokens are few.

    Raises ValueError for a moment that is zero or not finite."""
    if not 0 < float(moment.trace()) < math.inf:
        raise ValueError("a second moment is zero or not finite")
    if hasattr(moment, "detach"):
        import torch
        values = torch.linalg.eigvalsh(moment.detach().double()).tolist()
    else:
        import numpy
        values = numpy.linalg.eigvalsh(numpy.asarray(moment, numpy.float64)).tolist()
    total = math.fsum(v for v in values if v > 0)  # those below zero are rounding
    return math.exp(-math.fsum(v / total * math.log(v / total) for v in values if v > 0))


def relative_rank(text: Mapping[str, float], bundled: Mapping[str, float]) -> float:
    """The geometric mean, over layers, of the effective ranks of a text's inputs as shares of those of the bundled
    text's. Both mappings have the same names, and ranks of the same number of tokens. Raises ValueError where not."""
    if not text or set(text) != set(bundled):
        raise ValueError("ranks of a text and of the bundled one are of different layers")
    return math.exp(math.fsum(math.log(text[k] / bundled[k]) for k in text) / len(text))


def share(relative: float) -> float:
    """The share of all tokens, 0 to MOST, that the bundled text gets beside a text of this relative rank (from 0)."""
    return MOST * min(1.0, max(0.0, 1 - relative / WIDE))


def tokens(text: int, bundled: int, most: int, mix: float) -> Tuple[int, int]:
    """How many tokens of a text, at least one, and of the bundled text are taken, so that the bundled text has the share
    `mix` of them. It comes in addition while there is room.

    text, bundled   tokens that there are; text has at least 1
    most            of both together, at least 1
    mix             the bundled text's share, from 0 and below 1

    Raises ValueError for other arguments."""
    if not (text >= 1 and bundled >= 0 and most >= 1 and 0 <= mix < 1):
        raise ValueError("no mixture of %d tokens and %d, at most %d, has the share %r" % (text, bundled, most, mix))
    own = max(1, min(text, round(most * (1 - mix))))
    return own, min(bundled, most - own, round(own * mix / (1 - mix)))

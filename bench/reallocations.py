#!/usr/bin/env python3
"""Which prediction puts mixtures of widths in the order of their KL divergence: reallocations of equal bytes.

    reallocations.py OUT.json MODEL:TEXT:JUDGE [...]    needs numpy, torch, transformers and the package in python/

TEXT weighs and JUDGE judges: files as `python -m qconv importance --text` takes them, or `default`. As in
bench/results/reallocations.json, where the first half of heldout.txt is text of kjv-llama's own kind:

    tinystories-656k:tests/accuracy/tinystories_calibration.ids:tests/accuracy/tinystories.ids
    tests/data/kjv-llama/model:FIRST-HALF:SECOND-HALF
    tests/data/kjv-llama/model:default:tests/data/kjv-llama/heldout.txt

Each reallocation leaves all matrices of the layers in int4 but for some that get int6 or int8, so that all have the same
bytes within LEAST of what there is to spend. Which get them goes by random marks of layers, of roles or of matrices. Codes
are made here, in numpy: symmetric, a scale for GROUP columns or what is left of a row, the best of SCALES on a grid.
Traces are those of qconv.importance; whole moments are taken here, of the same windows with the same drawn labels. The
squared gradient is that of a weight, by window and divided by its tokens: the traces' product would be that if what tokens
do were independent.

`chosen` has what each prediction chooses within a number of bits, from int4, int5, int6 and int8 for every matrix.
"""
from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers

from result_page import json_text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
import qconv  # noqa: E402
from qconv import _text  # noqa: E402
from qconv._calibrate_run import Text, draw  # noqa: E402

COUNT = 48
GROUP = 128
SCALES = np.linspace(0.5, 1.02, 53)
WIDTHS = (4, 5, 6, 8)
SPENT = 0.4   # of the way from all int4 to all int8
LEAST = 0.98  # of it that has to be spent
BITS = (4.6, 5.1, 5.6, 6.1, 6.6, 7.1)
TOKENS, CONTEXT, JUDGED = 32768, 256, 24576
IMPORTANCE = {"q_proj": 0.5, "k_proj": 0.5}  # docs/decisions/0006
PREDICTORS = ("importance x relative error", "relative error", "tr(E H E^T)", "tr(G E H E^T)", "tr G tr H MSE", "squared gradient MSE")


def quantized(w: np.ndarray, bits: int) -> np.ndarray:
    """Values in groups along the columns, each with the scale of least squared error."""
    out, top = np.empty_like(w), 2 ** (bits - 1)
    for at in range(0, w.shape[1], GROUP):
        g = w[:, at:at + GROUP]
        peak = g[np.arange(len(g)), np.abs(g).argmax(1)][:, None]
        best, least = None, np.full((len(g), 1), np.inf)
        for share in SCALES:  # the code of the largest weight is -top
            scale = (-peak * np.float32(share / top)).astype(np.float16).astype(np.float32)
            scale = np.where(scale == 0, 1, scale)
            values = np.clip(np.rint(g / scale), -top, top - 1) * scale
            error = np.square(values - g).sum(1, keepdims=True)
            best = values if best is None else np.where(error < least, values, best)
            least = np.minimum(error, least)
        out[:, at:at + GROUP] = best
    return out


def bits_of(shape: tuple, bits: int) -> int:
    return shape[0] * (shape[1] * bits + 16 * -(-shape[1] // GROUP))


class Subject:
    """A model with its moments, and the codes of its matrices in every width."""

    def __init__(self, folder: str, text: str, judge: str) -> None:
        self.folder, self.names = folder, (text, judge)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        self.modules = {n + ".weight": m for n, m in self.model.named_modules()
                        if isinstance(m, torch.nn.Linear) and ".layers." in n}
        self.weights = {n: m.weight.detach().numpy().copy() for n, m in self.modules.items()}
        self.count = sum(w.size for w in self.weights.values())
        self.windows = [_text.windows(t, folder, context=CONTEXT, config=self.model.config) for t in (text, judge)]
        self.h, self.g, self.joint = {}, {}, {}
        self.take_moments()
        self.traces = qconv.importance(folder, text=text, tokens=TOKENS, context=CONTEXT, device="cpu")["weights"]
        self.codes = {(n, b): quantized(w, b) for n, w in self.weights.items() for b in WIDTHS}
        chosen = self.windows[1]
        self.judging = chosen.ids[[n for n in _text.spread(chosen.lengths, JUDGED)
                                   if chosen.lengths[n] == chosen.longest]]
        self.base = self.logs()
        self.costs = {p: {b: {n: self.cost(p, n, b) for n in self.weights} for b in WIDTHS} for p in PREDICTORS}

    def take_moments(self) -> None:
        text = Text(self.windows[0], _text.spread(self.windows[0].lengths, TOKENS), self.model.config)
        numbers = [text.numbers[i] if i < len(text.numbers) else 0 for i in range(text.rows)]
        counts = dict.fromkeys(self.modules, 0)

        def seen(name):
            def hook(module, given, out):
                x = given[0].detach().reshape(-1, given[0].shape[-1])

                def take(g):
                    g = g.reshape(-1, g.shape[-1])
                    reached = (g != 0).any(1)
                    counts[name] += int(reached.sum())
                    whole = torch.einsum("bto,bti->boi", g.view(len(out), -1, g.shape[-1]), x.view(len(out), -1, x.shape[-1]))
                    self.joint[name] = self.joint.get(name, 0) + float(whole.double().square().sum())
                    for to, rows in ((self.h, x[reached]), (self.g, g)):
                        to[name] = to.get(name, 0) + (rows.T @ rows).double()
                out.register_hook(take)
            return hook
        hooks = [m.register_forward_hook(seen(n)) for n, m in self.modules.items()]
        embedded = self.model.get_input_embeddings().register_forward_hook(lambda m, i, o: o.requires_grad_().clone())
        for at in range(0, text.rows, 16):
            rows = slice(at, at + 16)
            with torch.enable_grad():
                out = self.model(text.inputs["input_ids"][rows]).logits
            out.backward(draw(out, text.masks[-1][rows], numbers[rows]))
        for hook in [*hooks, embedded]:
            hook.remove()
        self.joint = {n: v / counts[n] for n, v in self.joint.items()}
        self.h, self.g = ({n: (m / counts[n]).numpy() for n, m in moments.items()} for moments in (self.h, self.g))

    def cost(self, predictor: str, name: str, bits: int) -> float:
        w = self.weights[name].astype(np.float64)
        e = self.codes[name, bits] - w
        relative = np.square(e).sum() / np.square(w).sum()
        if predictor == PREDICTORS[0]:
            return relative * IMPORTANCE.get(name.split(".")[-2], 1)
        if predictor == PREDICTORS[1]:
            return relative
        if predictor == PREDICTORS[2]:
            return np.einsum("ij,jk,ik->", e, self.h[name], e, optimize=True)
        if predictor == PREDICTORS[3]:
            return np.sum((self.g[name] @ e) * (e @ self.h[name])) / 2
        both = self.joint[name] if predictor == PREDICTORS[5] else np.prod(self.traces[name])
        return both * np.square(e).mean() / 2

    def bits(self, widths: dict) -> float:
        return sum(bits_of(self.weights[n].shape, b) for n, b in widths.items()) / self.count

    def logs(self) -> list:
        with torch.no_grad():
            return [self.model(ids).logits[:, :-1].log_softmax(-1) for ids in self.judging.split(32)]

    def divergence(self, widths: dict) -> float:
        for n, b in widths.items():
            self.modules[n].weight.data = torch.from_numpy(self.codes[n, b])
        total = sum(float((p.double().exp() * (p.double() - q.double())).sum()) for p, q in zip(self.base, self.logs()))
        for n, w in self.weights.items():
            self.modules[n].weight.data = torch.from_numpy(w)
        return total / (len(self.judging) * (self.judging.shape[1] - 1))

    # ---- mixtures ----

    def reallocation(self, number: int, generator: np.random.Generator) -> dict:
        low, top = (sum(bits_of(w.shape, b) for w in self.weights.values()) for b in (4, 8))
        kind = ("layer", "role", "matrix")[number % 3]
        budget = SPENT * (top - low)
        while True:
            marks: dict = {}
            parts = {"layer": lambda n: re.search(r"\d+", n).group(), "role": lambda n: n.split(".")[-2],
                     "matrix": lambda n: n}[kind]
            order = {n: (marks.setdefault(parts(n), generator.random()), generator.random()) for n in self.weights}
            widths, left = dict.fromkeys(self.weights, 4), budget
            for n in sorted(order, key=order.get):
                high = int(generator.choice((6, 8)))
                more = bits_of(self.weights[n].shape, high) - bits_of(self.weights[n].shape, 4)
                if more <= left:
                    widths[n], left = high, left - more
            if left <= (1 - LEAST) * budget:
                return {"kind": kind, "widths": widths}

    def chosen(self, predictor: str, most: float) -> dict:
        """From all int4, the step of most gain for its bits, as long as one fits."""
        costs, widths = self.costs[predictor], dict.fromkeys(self.weights, WIDTHS[0])
        while True:
            now, steps = self.bits(widths), []
            for n, b in itertools.product(widths, WIDTHS):
                more = (bits_of(self.weights[n].shape, b) - bits_of(self.weights[n].shape, widths[n])) / self.count
                if b > widths[n] and now + more <= most:
                    steps.append(((costs[widths[n]][n] - costs[b][n]) / more, n, b))
            if not steps or max(steps)[0] <= 0:
                return widths
            _, n, b = max(steps)
            widths[n] = b


def ranks(values: list) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def spearman(a: list, b: list) -> float:
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def measured(folder: str, text: str, judge: str) -> dict:
    s, generator = Subject(folder, text, judge), np.random.default_rng(37)
    rows = []
    for number in range(COUNT):
        one = s.reallocation(number, generator)
        widths = one["widths"]
        rows.append({"kind": one["kind"], "bits": round(s.bits(widths), 4),
                     "kl": s.divergence(widths),
                     "predicted": {p: sum(s.costs[p][b][n] for n, b in widths.items()) for p in PREDICTORS}})
    print(folder, file=sys.stderr)
    return {"model": Path(folder).parent.name if Path(folder).name == "model" else Path(folder).name,
            "text": Path(text).name, "judge": Path(judge).name, "tokens": sum(s.windows[0].lengths[n] for n in _text.spread(
                s.windows[0].lengths, TOKENS)), "judged": int(s.judging.numel()), "context": CONTEXT,
            "spearman": {p: round(spearman([r["predicted"][p] for r in rows], [r["kl"] for r in rows]), 3)
                         for p in PREDICTORS},
            "uniform": {"int%d" % b: s.divergence(dict.fromkeys(s.weights, b)) for b in WIDTHS},
            "chosen": [{"bits": bits, **{p: s.divergence(s.chosen(p, bits)) for p in PREDICTORS}} for bits in BITS],
            "reallocations": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out")
    parser.add_argument("subjects", nargs="+", metavar="MODEL:TEXT:JUDGE")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = {"bench": "reallocations", "commit": commit, "torch": torch.__version__,
             "transformers": transformers.__version__,
             "codes": "simulated in numpy: symmetric, groups of %d, scales in float16 of least squared error" % GROUP,
             "models": [measured(*subject.split(":")) for subject in args.subjects]}
    Path(args.out).write_text(json_text(found) + "\n")


main()

#!/usr/bin/env python3
"""What --to auto would gain by weighing errors with both second moments (docs/decisions/0028).

    bench/bench_auto_moments.py kjv-llama|tinystories-656k MOMENTS [--qconv build/qconv] [--tinystories DIR]

MOMENTS: a folder of qconv.capture(model, text, MOMENTS, context=256, tokens=32768, output_tokens=0).
Needs numpy. Every scheme is made of every weight: with searched scales, calibrated with one side and
with two. A cost chooses for each budget of codes and scales exactly (a dynamic program), and the KL
divergence of that mixture is measured. Writes bench/results/auto_moments.json.
"""
import argparse
import json
import os
import subprocess
import tempfile

import numpy as np

import accuracy_models as am
import llama_numpy as lm

SCHEMES = {"nf4": ["--to", "nf4"], "nf4-32": ["--to", "nf4", "--block-size", "32"], "int8": ["--to", "int8"],
           "16bit": None}
KINDS = {"search": ["--scale", "search"], "one": ["--sided", "one"], "two": ["--sided", "two"]}
BUDGETS = (4.2, 4.35, 4.5, 4.75, 5, 6)
JUDGED = {"search": ("now/search", "trace/search", "diag/search", "two/search", "H/search"),
          "two": ("now/search", "trace/search", "diag/search", "two/search", "H/one", "diagG/one", "two/one",
                  "two/two")}
EVERY = {"kjv-llama": 3, "tinystories-656k": 1}  # windows of the evaluation that are taken
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def costs(name, w, e, h, g):
    """Costs of an error e of the weight w. now: today's; the others as the decision names them."""
    last, per_row = name.split(".")[-2], np.einsum("ij,ij->i", e @ h, e)
    importance = 0.5 if last in ("q_proj", "k_proj") else 1
    return {"now": importance * (e ** 2).sum() / (w ** 2).sum(),
            "trace": 0.5 * np.trace(g) * np.trace(h) * (e ** 2).mean(),
            "diag": 0.5 * np.diag(g) @ e ** 2 @ np.diag(h), "diagG": 0.5 * np.diag(g) @ per_row,
            "two": 0.5 * np.einsum("ij,ij", g @ e, e @ h),
            "H": importance * per_row.sum() / np.einsum("ij,ij", w @ h, w)}


def size(shape, scheme):
    n = shape[0] * shape[1]
    return {"nf4": n / 2 + n / 64 * (1 + 4 / 256), "nf4-32": n / 2 + n / 32 * (1 + 4 / 256),
            "int8": n + 4 * shape[0], "16bit": 2 * n}[scheme]


def solve(items, shapes, cost, room):
    """The choice of least cost: {name: scheme}."""
    front = [(0.0, 0.0, ())]
    for item in items:
        more = sorted((b + sum(size(shapes[n], s) for n in item), c + sum(cost[n, s] for n in item), taken + (s,))
                      for b, c, taken in front for s in SCHEMES)
        front, best = [], float("inf")
        for point in more:
            if point[0] <= room and point[1] < best:
                front.append(point)
                best = point[1]
    return {n: s for item, s in zip(items, front[-1][2]) for n in item}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("moments")
    parser.add_argument("--qconv", default=os.path.join(am.ROOT, "build", "qconv"))
    parser.add_argument("--tinystories")
    args = parser.parse_args()
    model = am.kjv() if args.model == "kjv-llama" else am.tinystories(args.tinystories)
    tokens = model.windows[::EVERY[args.model]]
    moments = lm.read_tensors(args.moments)
    names = [n + ".weight" for n in sorted(k[:-len(".output_moment")] for k in moments if k.endswith(".output_moment"))]
    weights = {n: model.weights[n].astype(np.float64) for n in names}
    shapes = {n: w.shape for n, w in weights.items()}
    values, cost = {}, {}

    def inputs(n):
        same = moments.get(n[:-len(".weight")] + ".same_as")
        return moments[(same.tobytes().decode() if same is not None else n[:-len(".weight")]) + ".second_moment"]

    with tempfile.TemporaryDirectory() as scratch:
        for kind, more in KINDS.items():
            for scheme, to in SCHEMES.items():
                out = os.path.join(scratch, kind + scheme)
                if to:
                    more_moments = [] if kind == "search" else ["--hessians", args.moments]
                    subprocess.run([args.qconv, "-q", *to, *more, *more_moments, model.folder, "--compress", "none",
                                    out], check=True)
                made = lm.read_weights(out) if to else weights
                for n in names:
                    values[kind, n, scheme] = made[n].astype(np.float64)
                    e = values[kind, n, scheme] - weights[n]
                    for c, v in costs(n, weights[n], e, inputs(n), moments[n[:-len("weight")] + "output_moment"]).items():
                        cost.setdefault(c + "/" + kind, {})[n, scheme] = float(v)
    reference, measured = lm.log_probs(model.config, model.weights, tokens), {}

    def kl(kind, choice):
        key = (kind, *(choice[n] for n in names))
        if key not in measured:
            changed = {n: values[kind, n, choice[n]].astype(np.float32) for n in names}
            measured[key] = float(np.mean(lm.kl(model.config, reference, {**model.weights, **changed}, tokens)))
        return measured[key]

    rows = []
    for kind, judged in JUDGED.items():
        for fused in (True, False):
            groups = {}
            for n in names:
                parent, last = n.rsplit(".", 2)[:2]
                groups.setdefault((parent, FUSED.get(last, last) if fused else last), []).append(n)
            for bits in BUDGETS:
                for c in judged:
                    choice = solve(list(groups.values()), shapes, cost[c],
                                   bits * sum(w.size for w in weights.values()) / 8 + 1e-6)
                    taken = 8 * sum(size(shapes[n], s) for n, s in choice.items()) / sum(w.size for w in weights.values())
                    rows.append({"codes": kind, "fused": fused, "budget": bits, "cost": c, "bits": taken,
                                 "predicted": sum(cost[c][i] for i in choice.items()), "kl": kl(kind, choice)})
                    print(rows[-1], flush=True)
    fits = {}
    for kind, judged in JUDGED.items():
        mixtures = [(k[1:], v) for k, v in measured.items() if k[0] == kind]
        for c in judged:
            predicted = [sum(cost[c][i] for i in zip(names, k)) for k, _ in mixtures]
            found = [v for _, v in mixtures]
            fits["%s, %s" % (kind, c)] = {"mixtures": len(mixtures), "correlation": np.corrcoef(predicted, found)[0, 1],
                                          "ratio": float(np.median(np.array(found) / predicted))}
    path = os.path.join(am.ROOT, "bench", "results", "auto_moments.json")
    made = {}
    if os.path.exists(path):
        with open(path) as f:
            made = json.load(f)
    made[args.model] = {"rows": rows, "fits": fits}
    with open(path, "w") as f:
        json.dump(made, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()

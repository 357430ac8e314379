#!/usr/bin/env python3
"""How well --to auto predicts what a choice of schemes does to a model's output.

    bench/bench_auto.py --qconv build/qconv [--model NAME=DIR[,TEXT]] ... [--json bench/results/auto.json]

Needs numpy. Without --model: tests/data/kjv-llama with its held-out text. A model without a text
file (bytes are its tokens) is measured on text that it writes itself, with a fixed seed. Llama
architecture only: the forward pass is llama_numpy.py, in float32.

  1. every weight quantized alone, in every scheme: KL divergence of the outputs from the original's
  2. 40 random mixtures of schemes: KL divergence measured, and as several proxies predict it
  3. --to auto at budgets from the smallest choice to 16 bit, as a dry run says, against every
     uniform scheme that fits there

A proxy is importance(weight) * relative squared error, summed over the weights.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile

import numpy as np

import llama_numpy as lm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KJV = os.path.join(ROOT, "tests", "data", "kjv-llama")
SCHEMES = {"nf4": ["--to", "nf4"], "nf4-32": ["--to", "nf4", "--block-size", "32"],
           "int8": ["--to", "int8"]}
MIXTURES = 40
# So that the budget is that of the weights, as far as it goes.
PLAN = ["--margin", "1", "--cuda-context", "1KB", "--context", "16"]


def ranks(x):
    return np.argsort(np.argsort(x))


def correlation(a, b):
    return {"pearson": float(np.corrcoef(a, b)[0, 1]),
            "spearman": float(np.corrcoef(ranks(a), ranks(b))[0, 1])}


class Subject:
    def __init__(self, qconv, folder, text, scratch):
        self.qconv, self.folder = qconv, folder
        with open(os.path.join(folder, "config.json")) as f:
            self.config = json.load(f)
        self.weights = lm.read_weights(folder)
        self.quantized = {}
        for scheme, options in SCHEMES.items():
            out = os.path.join(scratch, scheme)
            subprocess.run([qconv, "-q", *options, "--compress", "none", folder, out], check=True)
            self.quantized[scheme] = lm.read_weights(out)
        self.names = [n for n, w in self.quantized["nf4"].items()
                      if n in self.weights and not np.array_equal(w, self.weights[n])]
        if text:
            data = np.fromfile(text, np.uint8).astype(np.int64)
            length = 256
            starts = np.linspace(0, len(data) - length, 24).astype(int)
            self.tokens = np.stack([data[s:s + length] for s in starts])
        else:
            self.tokens = lm.own_text(self.config, self.weights, 24, 128, seed=1)
        self.reference = lm.log_probs(self.config, self.weights, self.tokens)

    def kl(self, pick):
        """pick: name -> scheme; others as they are."""
        w = dict(self.weights)
        w.update({n: self.quantized[s][n] for n, s in pick.items() if s != "16bit"})
        return lm.kl(self.config, self.reference, w, self.tokens)

    def rel_mse(self, name, scheme):
        if scheme == "16bit":
            return 0.0
        w = self.weights[name].astype(np.float64)
        return float(((self.quantized[scheme][name] - w) ** 2).sum() / (w ** 2).sum())


def proxies(s):
    def layer(name):
        return int(name.split(".")[2]) + 1

    return {
        "1": lambda n: 1.0,
        "1, queries and keys 1/2": lambda n: 0.5 if "q_proj" in n or "k_proj" in n else 1.0,
        "elements": lambda n: s.weights[n].size,
        "square root of elements": lambda n: s.weights[n].size ** 0.5,
        "sum of squares": lambda n: float((s.weights[n].astype(np.float64) ** 2).sum()),
        "number of the layer": layer,
    }


def measure_alone(s):
    rows = []
    for name in s.names:
        for scheme in SCHEMES:
            rows.append({"weight": name, "scheme": scheme, "elements": int(s.weights[name].size),
                         "rel_mse": s.rel_mse(name, scheme), "kl": s.kl({name: scheme})})
    return rows


def judge(s, alone):
    """Proxies on weights alone and on mixtures; how far single divergences add up."""
    error = {(r["weight"], r["scheme"]): r["rel_mse"] for r in alone}
    error.update({(n, "16bit"): 0.0 for n in s.names})
    single = {(r["weight"], r["scheme"]): r["kl"] for r in alone}
    single.update({(n, "16bit"): 0.0 for n in s.names})
    rng = np.random.default_rng(2)
    kinds = list(SCHEMES) + ["16bit"]
    mixtures = [{n: kinds[rng.integers(4)] for n in s.names} for _ in range(MIXTURES)]
    measured = np.array([s.kl(m) for m in mixtures])
    nf4 = [r for r in alone if r["scheme"] == "nf4"]
    out = {"proxies": []}
    for label, importance in proxies(s).items():
        weight = {n: importance(n) for n in s.names}
        ratio = np.log([r["kl"] / (weight[r["weight"]] * r["rel_mse"]) for r in nf4])
        predicted = [sum(weight[n] * error[n, k] for n, k in m.items()) for m in mixtures]
        out["proxies"].append({"importance": label, "mixtures": correlation(predicted, measured),
                               "scatter_alone": float(np.exp(np.std(ratio)))})
    summed = [sum(single[n, k] for n, k in m.items()) for m in mixtures]
    out["sum_of_single"] = {"mixtures": correlation(summed, measured),
                            "ratio": float(np.mean(measured / np.array(summed)))}
    coefficient = {r["weight"]: r["kl"] / r["rel_mse"] for r in nf4}
    mean = np.mean(list(coefficient.values()))
    out["roles"] = {}
    for role in ("q", "k", "v", "o", "gate", "up", "down"):
        c = [v / mean for n, v in coefficient.items() if role + "_proj" in n]
        out["roles"][role] = {"mean": float(np.mean(c)), "per_layer": [float(x) for x in c]}
    return out


def choose(s, vram):
    """The member "auto" of the dry run; None where nothing fits."""
    r = subprocess.run([s.qconv, "--dry-run", "--json", "--explain", "-q", "--to", "auto", "--vram",
                        "%.3fKB" % (vram / 1000), *PLAN, s.folder],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if r.returncode == 4:
        return None
    r.check_returncode()
    return json.loads(r.stdout)["auto"]


def bytes_of(auto):
    return sum(v["bytes"] for v in auto["chosen"].values())


def smallest_budget(s):
    low, high = 1000, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if choose(s, middle) else (middle, high)
    return high


def budgets(s, uniform):
    """auto against uniform, from where the smallest choice just fits to where all 16 bit does."""
    first = smallest_budget(s)
    sizes, full = bytes_of(choose(s, first)), bytes_of(choose(s, 1 << 32))
    rows = []
    for share in (0, .02, .05, .1, .15, .2, .25, .3, .4, .5, .6, .7, .8, .9, 1):
        vram = first + int((full - sizes) * share)
        auto = choose(s, vram)
        pick = {}
        for g in auto["groups"]:
            layer, path = g["name"].split(" ")[1:3]
            pick["model.layers.%s.%s.weight" % (layer, path)] = g["scheme"]
        assert sorted(pick) == sorted(s.names)
        fitting = {k: uniform[k] for k, v in auto["uniform"].items() if v["fits"]}
        best = min(fitting, key=fitting.get) if fitting else None
        rows.append({"vram": vram, "share": share, "auto_kl": s.kl(pick),
                     "predicted_error": auto["predicted_error"],
                     "lower_bound": auto["lower_bound"],
                     "weights": {k: v["tensors"] for k, v in auto["chosen"].items()},
                     "best_uniform": best, "best_uniform_kl": fitting[best] if best else None})
    return rows


def run(label, folder, text, qconv):
    with tempfile.TemporaryDirectory() as scratch:
        s = Subject(qconv, folder, text, scratch)
        alone = measure_alone(s)
        uniform = {k: s.kl({n: k for n in s.names}) for k in SCHEMES}
        uniform["16bit"] = 0.0
        out = {"model": label, "text": "held out" if text else "written by the model, seed 1",
               "tokens": int(s.tokens.size), "uniform_kl": uniform}
        out.update(judge(s, alone))
        out["budgets"] = budgets(s, uniform)
        out["alone"] = alone
        return out


def show(r):
    print("\n%s: %d tokens, %s" % (r["model"], r["tokens"], r["text"]))
    print("  KL of uniform schemes: " + ", ".join("%s %.3g" % kv for kv in r["uniform_kl"].items()))
    one = r["sum_of_single"]
    print("  mixtures against the sum of single divergences: pearson %.3f, ratio %.3f"
          % (one["mixtures"]["pearson"], one["ratio"]))
    for p in r["proxies"]:
        print("  %-26s mixtures: pearson %.3f, spearman %.3f; alone: within a factor of %.1f"
              % (p["importance"], p["mixtures"]["pearson"], p["mixtures"]["spearman"],
                 p["scatter_alone"]))
    print("  mean KL per error, by role: " + ", ".join(
        "%s %.2f" % (k, v["mean"]) for k, v in r["roles"].items()))
    for b in r["budgets"]:
        print("  %9d bytes: auto %.3e (%s), best uniform %s %s"
              % (b["vram"], b["auto_kl"], " ".join("%s %d" % kv for kv in b["weights"].items()),
                 b["best_uniform"],
                 "" if b["best_uniform_kl"] is None else "%.3e" % b["best_uniform_kl"]))


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--qconv", default=os.path.join(ROOT, "build", "qconv"))
    p.add_argument("--model", action="append", metavar="NAME=DIR[,TEXT]")
    p.add_argument("--json")
    args = p.parse_args()
    models = args.model or ["kjv-llama=%s/model,%s/heldout.txt" % (KJV, KJV)]
    results, shown = [], []
    for spec in models:
        label, rest = spec.split("=", 1)
        folder, _, text = rest.partition(",")
        results.append(run(label, folder, text, args.qconv))
        show(results[-1])
        shown.append("--model %s=DIR%s" % (label, ",TEXT" if text else ""))
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"bench": "auto", "command": "bench/bench_auto.py " + " ".join(shown),
                       "machine": platform.machine(), "numpy": np.__version__,
                       "models": results}, f, indent=1)
            f.write("\n")
    worse = [b for r in results for b in r["budgets"]
             if b["best_uniform_kl"] is not None and b["auto_kl"] > b["best_uniform_kl"] * 1.0001]
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

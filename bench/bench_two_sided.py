#!/usr/bin/env python3
"""What the constants of two-sided calibrating do: each is changed in a copy of the sources, which is
built, and the model is calibrated and judged as in docs/accuracy.md. For decision 0027.

    bench/bench_two_sided.py --model kjv-llama | --model tinystories-656k --tinystories DIR
                             [--only NAME] [--json FILE]

adds what it measured to bench/results/feedback.json. Needs numpy, cmake and ninja; a build and half a
minute for each variant.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import types

import accuracy_calibrated as ac
import accuracy_models as am
import bench_accuracy as ba

SWEEPS = ("quant/error_feedback.h", "QC_FEEDBACK_SWEEPS_TWO_SIDED 16u", "QC_FEEDBACK_SWEEPS_TWO_SIDED %du")
TOKENS = ("convert/calibrate/calibrate_outputs.h", "OUTPUT_TOKENS 32768u", "OUTPUT_TOKENS %du")
BLOCK = ("convert/calibrate/calibrate_outputs.h", "OUTPUT_BLOCK  1024u", "OUTPUT_BLOCK  %du")
DAMPING = ("convert/calibrate/calibrate_outputs.c", ".damping = qc_feedback_outputs_damping(block, o->batch.tokens)",
           ".damping = %g")
LABELS = ("convert/backward/backward.c", "qc_gradient_uniform(e->first + token)",
          "qc_gradient_uniform(e->first + token + %du * UINT64_C(1000000007))")
VARIANTS = [("as it is", SWEEPS, 16, ac.NF4)]
VARIANTS += [("sweeps", SWEEPS, x, ac.NF4) for x in (1, 4, 64, 0, 2, 8, 32)]
VARIANTS += [("labels", LABELS, x, ac.NF4) for x in (1, 2, 3, 4)]
VARIANTS += [("tokens", TOKENS, x, ac.NF4) for x in (8192, 65536, 2048)]
VARIANTS += [("damping", DAMPING, x, ac.NF4) for x in (0.01, 1, 0.1, 0.2)]
VARIANTS += [("int8, block 64", SWEEPS, 16, ac.INT8 + ["--block-size", "64"])]
VARIANTS += [("int8, sweeps", SWEEPS, x, ac.INT8) for x in (1, 64)]
VARIANTS += [("block", BLOCK, x, ac.NF4) for x in (64, 128)]


def built(tree, change, value):
    """The program with a constant changed; the tree is as it was afterwards."""
    path, old, new = os.path.join(tree, change[0]), change[1], change[2] % value
    with open(path) as f:
        text = f.read()
    if text.count(old) != 1:
        raise ba.Failed("%s: expected '%s' once, found it %d times" % (change[0], old, text.count(old)))
    if old != new:
        with open(path, "w") as f:
            f.write(text.replace(old, new))
    ba.run(["ninja", "-C", tree + "/build", "qconv"])
    if old != new:
        with open(path, "w") as f:
            f.write(text)
    return tree + "/build/qconv"


def save(path, base, row):
    """Adds a row to the results, or puts it in the place of what was measured before."""
    with open(path) as f:
        result = json.load(f)
    two = result.setdefault("two_sided", {"plain": {}, "rows": []})
    two["command"] = "bench/bench_two_sided.py --model MODEL --tinystories DIR"
    two["plain"][row["model"]] = {"kl_mean": base["eval"]["kl_mean"], "other_kl": base["second"]["kl_mean"]}
    same = ("model", "what", "value")
    two["rows"] = [r for r in two["rows"] if any(r[k] != row[k] for k in same)] + [row]
    with open(path, "w") as f:
        json.dump(result, f, indent=1)
        f.write("\n")


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", choices=ba.ORDER[:2], required=True)
    p.add_argument("--tinystories")
    p.add_argument("--only", action="append", choices=sorted({v[0] for v in VARIANTS}))
    p.add_argument("--json", default=os.path.join(am.ROOT, "bench", "results", "feedback.json"))
    args = p.parse_args()
    model = am.kjv() if args.model == "kjv-llama" else am.tinystories(args.tinystories)
    with tempfile.TemporaryDirectory() as scratch:
        tree = scratch + "/tree"
        os.mkdir(tree)
        archive = subprocess.run(["git", "-C", am.ROOT, "archive", "HEAD"], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "x", "-C", tree], input=archive.stdout, check=True)
        ba.run(["cmake", "-S", tree, "--preset", "release", "-DQCONV_CUDA=OFF", "-B", tree + "/build"])
        s = ba.Subject(model, types.SimpleNamespace(qconv=built(tree, SWEEPS, 16), scales="absmax",
                                                    evaluator="qconv"), scratch)
        s.two_texts = True
        base = ac.add(s, "absmax", ac.NF4 + ["--scale", "absmax"])
        for name, change, value, form in VARIANTS:
            if args.only and name not in args.only:
                continue
            s.args.qconv = built(tree, change, value)
            row = ac.add(s, "%s %g" % (name, value), form + ac.options(ac.texts(s)[0][1]))
            save(args.json, base, {"model": model.label, "what": name, "value": value,
                                   "commit": ba.of_today(s.args)["commit"],
                                   **{k: row["eval"][k] for k in ("kl_mean", "kl_error")},
                                   "other_kl": row["second"]["kl_mean"],
                                   "other_kl_error": row["second"]["kl_error"]})
    return 0


if __name__ == "__main__":
    sys.exit(main())

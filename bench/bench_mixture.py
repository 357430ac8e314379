#!/usr/bin/env python3
"""How good the weights of a mixture of experts are: the bundled one, in every way of choosing scales.

    bench/bench_mixture.py --qconv build/qconv [--json FILE]

writes bench/results/mixture.json, from which bench/make_accuracy.py makes a part of docs/accuracy.md.
Standard library only; ten minutes. The held-out text of tests/data/kjv-llama is halved: the second half
judges, and the first half calibrates ("own text"), besides the text that qconv brings. Routers stay in
bfloat16, as always.
"""
import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL = os.path.join(ROOT, "tests", "data", "kjv-moe", "model")
TEXT = os.path.join(ROOT, "tests", "data", "kjv-llama", "heldout.txt")
CONTEXT = 256
NF4, NARROW, INT8 = ["--to", "nf4"], ["--to", "nf4", "--block-size", "32"], ["--to", "int8"]
AUTO = (5, 6)
PLAN = ["--margin", "1", "--cuda-context", "1KB", "--context", "16"]
KEYS = ("perplexity", "base_perplexity", "difference", "difference_error", "kl_mean", "kl_error", "kl_99", "top1",
        "predicted")


def run(*command, fine=(0,)):
    r = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if r.returncode not in fine:
        sys.exit("%s: exit %d: %s" % (" ".join(map(str, command)), r.returncode, r.stderr.decode()[-2000:]))
    return r


class Bench:
    def __init__(self, qconv, scratch):
        self.qconv, self.scratch, self.rows = qconv, scratch, []
        with open(TEXT, "rb") as f:
            text = f.read()
        half = text.index(b"\n", len(text) // 2) + 1
        self.own, self.judge = os.path.join(scratch, "own.txt"), os.path.join(scratch, "judge.txt")
        for path, part in ((self.own, text[:half]), (self.judge, text[half:])):
            with open(path, "wb") as f:
                f.write(part)

    def add(self, name, *options):
        out = os.path.join(self.scratch, "out")
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        run(self.qconv, "-q", "--force", "--compress", "none", "--threads", "1", *options, MODEL, out)
        seconds = time.monotonic() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        said = json.loads(run(self.qconv, "eval", "-q", "--json", out, "--against", MODEL, "--text", self.judge,
                              "--context", CONTEXT).stdout)
        self.rows.append({"name": name, "options": [o.replace(self.scratch, "") for o in options],
                          "bits": self.bits(options), "seconds": seconds,
                          "processor_seconds": after.ru_utime - before.ru_utime, **{k: said[k] for k in KEYS}})
        print("%-34s %.3f bits  KL %.5f  %.1f s" % (name, self.rows[-1]["bits"], said["kl_mean"], seconds), flush=True)
        return out

    def bits(self, options):
        """Bits of a quantizable weight, as a plan counts them; None where nothing fits."""
        plan = []
        for option, value in zip(options[::2], options[1::2]):
            plan += [] if option in ("--scale", "--sided", "--calibrate", "--calibration-context") else [option, value]
        plan += [] if "--vram" in plan else ["--vram", "1GB"]
        r = run(self.qconv, "plan", "-q", "--json", *plan, MODEL, fine=(0, 4))
        if r.returncode:
            return None
        size = sum(row["bytes"] for row in json.loads(r.stdout)["schemes"].values())
        return 8 * (size - self.kept) / self.weights

    def budget(self, most):
        """Options for the largest budget whose choice takes no more than so many bits a weight."""
        low, high = 1000, 1 << 26
        while high - low > 64:
            middle = (low + high) // 2
            bits = self.bits(["--to", "auto", "--vram", "%.3fKB" % (middle / 1000), *PLAN])
            low, high = (middle, high) if bits is None or bits <= most else (low, middle)
        return ["--to", "auto", "--vram", "%.3fKB" % (low / 1000), *PLAN]

    def all(self):
        plan = json.loads(run(self.qconv, "plan", "-q", "--json", *NF4, "--vram", "1GB", MODEL).stdout)
        self.kept, self.weights = plan["schemes"]["keep"]["bytes"], plan["schemes"]["nf4"]["weights"]
        own = ["--calibrate", self.own, "--calibration-context", str(CONTEXT)]
        default = ["--calibrate", "default", "--calibration-context", str(CONTEXT)]
        for name, form in (("NF4, double", NF4), ("NF4, double, block 32", NARROW), ("int8 by row", INT8)):
            self.add("%s, absmax" % name, *form, "--scale", "absmax")
            self.add("%s, search" % name, *form, "--scale", "search")
            for text, how in (("default text", default), ("own text", own)):
                self.add("%s, calibrated, one side, %s" % (name, text), *form, *how, "--sided", "one")
                self.add("%s, calibrated, %s" % (name, text), *form, *how)
        for bits in AUTO:
            options = self.budget(bits)
            self.add("auto, %g bits, search" % bits, *options)
            self.add("auto, %g bits, calibrated, own text" % bits, *options, *own)
        return {"parameters": plan["parameters"], "quantized": plan["schemes"]["nf4"]["weights"],
                "tensors": plan["schemes"]["nf4"]["tensors"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--qconv", default=os.path.join(ROOT, "build", "qconv"))
    parser.add_argument("--json", default=os.path.join(ROOT, "bench", "results", "mixture.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="qconv-mixture-") as scratch:
        bench = Bench(args.qconv, scratch)
        model = bench.all()
    commit = run("git", "-C", ROOT, "rev-parse", "--short", "HEAD").stdout.decode().strip()
    with open(args.json, "w") as f:
        json.dump({"command": "bench/bench_mixture.py", "commit": commit, "machine": platform.machine(),
                   "qconv": run(args.qconv, "--version").stdout.decode().splitlines()[0], "model": "kjv-moe", **model,
                   "threads": 1, "context": CONTEXT, "rows": bench.rows}, f, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main()

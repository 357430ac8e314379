"""What `python -m qconv calibrate` gains beside what --calibrate gained in C, on the same text, options and judge.

usage: calibrate_beside_c.py --program QCONV --old QCONV OUT.json [CASE...]

--old is the last program whose C computes models (0.5.0, commit 89258364): it calibrates once more and judges both.
Each case says the KL divergence (of MiniLM: the embeddings' mean cosine distance) of plain NF4 or int4, and its shares
that both calibrations leave. A case that is not named keeps what OUT.json has of it.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np

import accuracy_models as am

ROOT = am.ROOT
DATA = os.path.join(ROOT, "tests", "data")
PYTHON = os.path.join(ROOT, "python")
GATE = 1.03
CONTEXT = ["--calibration-context", "256"]
NF4, INT4 = ["--to", "nf4"], ["--to", "int4", "--block-size", "128"]
KL, DISTANCE = "kl_mean", "distance"


class Bench:
    def __init__(self, args, scratch):
        self.args, self.scratch = args, scratch

    def path(self, name):
        return os.path.join(self.scratch, name)

    def run(self, argv, **more):
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)
        if done.returncode:
            sys.exit("%s: %s" % (" ".join(argv), done.stderr[-2000:]))
        return done.stdout

    def converted(self, name, model, options):
        self.run([self.args.program, "convert", *options, "--quiet", model, self.path(name)])
        return self.path(name)

    def by_c(self, name, model, options):
        self.run([self.args.old, "convert", *options, "--quiet", model, self.path(name)])
        return self.path(name)

    def by_python(self, name, model, options):
        env = {**os.environ, "PYTHONPATH": PYTHON, "QCONV_PROGRAM": self.args.program}
        self.run([sys.executable, "-B", "-m", "qconv", "calibrate", *options, "--device", "cpu", "--quiet", model,
                  self.path(name)], env=env)
        return self.path(name)

    def judged(self, out, model, text, member=KL):
        return json.loads(self.run([self.args.old, "eval", out, "--against", model, "--text", text, "--json"]))[member]

    # ---- texts ----

    def halves(self):
        """The second half of the held-out text, which judges mixtures."""
        with open(os.path.join(am.KJV, "heldout.txt"), "rb") as f:
            data = f.read()
        with open(self.path("second.txt"), "wb") as f:
            f.write(data[len(data) // 2:])
        return self.path("second.txt")

    def stories(self, folder):
        """What tinystories-656k samples, to calibrate and to judge."""
        model = am.Model("tinystories", folder)
        for name, shape, seeds in (("own.ids", (128, 256), (101, 102)), ("judge.ids", am.SAMPLED, am.SEEDS)):
            am.write_ids(self.path(name), np.concatenate([am.sample(model.config, model.weights, *shape, seed)
                                                          for seed in seeds]))
        return self.path("own.ids"), self.path("judge.ids")

    # ---- cases ----

    def language(self, model, text, judge, to, plain):
        old, new = ["--calibrate", text], ["--text", text]
        base = self.judged(self.converted("plain", model, to + plain), model, judge)
        c = self.judged(self.by_c("c", model, to + old + CONTEXT), model, judge)
        python = self.judged(self.by_python("python", model, to + new + CONTEXT), model, judge)
        for name in ("plain", "c", "python"):
            shutil.rmtree(self.path(name))
        return {"plain": base, "c": c, "python": python}

    def kjv(self):
        return self.language(os.path.join(am.KJV, "model"), "default", os.path.join(am.KJV, "heldout.txt"), NF4,
                             ["--scale", "absmax"])

    def kjv_moe(self):
        return self.language(os.path.join(DATA, "kjv-moe", "model"), "default", self.halves(), NF4, ["--scale", "absmax"])

    def tinystories(self):
        own, judge = self.stories(self.args.tinystories)
        return self.language(self.args.tinystories, own, judge, NF4, ["--scale", "absmax"])

    def tinystories_int4(self):
        own, judge = self.stories(self.args.tinystories)
        return self.language(self.args.tinystories, own, judge, INT4, ["--scale", "absmax"])

    def minilm(self):
        """C has no text for an encoder: it took moments of the original's inputs that the package captured, of the same
        16384 tokens, whose figure is in docs/accuracy.md (0.280 of plain NF4's). Python has both streams."""
        model = self.args.minilm
        more = ["--calibration-context", "128", "--calibration-tokens", "16384"]
        plain = self.converted("plain", model, NF4 + ["--scale", "absmax"])
        python = self.by_python("python", model, NF4 + ["--text", "default"] + more)
        files = []
        for out in (plain, python):
            files.append(out + ".npz")
            np.savez(files[-1], **weights_of(out, self.args.program))
        found = json.loads(self.run([sys.executable, "-B", os.path.join(ROOT, "bench", "accuracy_embeddings.py"), model,
                                     os.path.join(ROOT, "bench", "sentences.txt"), *files]).splitlines()[-1])
        return {"plain": found[0][0], "c": 0.280 * found[0][0], "python": found[1][0]}


def weights_of(out, program):
    """The quantized weights of an output, as a loader has them."""
    sys.path.insert(0, PYTHON)
    os.environ.setdefault("QCONV_LIBRARY", os.path.join(os.path.dirname(program), "libqconv.so"))
    from qconv._values import Values
    with Values(out) as values:
        return {n: values.read(n).float().numpy() for n in values.names
                if len(values.shape(n)) == 2 and values.stored_as(n)}


CASES = {"kjv-llama, default text": Bench.kjv, "tinystories-656k, own text": Bench.tinystories,
         "tinystories-656k, own text, int4 group 128": Bench.tinystories_int4, "kjv-moe, default text": Bench.kjv_moe,
         "all-MiniLM-L6-v2, default text": Bench.minilm}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--program", required=True)
    p.add_argument("--old", required=True)
    p.add_argument("--tinystories", metavar="FOLDER")
    p.add_argument("--minilm", metavar="FOLDER")
    p.add_argument("out")
    p.add_argument("cases", nargs="*")
    args = p.parse_args()
    results = {}
    if os.path.exists(args.out):
        with open(args.out) as f:
            results = json.load(f)
    for name in args.cases or list(CASES):
        with tempfile.TemporaryDirectory() as scratch:
            row = CASES[name](Bench(args, scratch))
        row["share_c"], row["share_python"] = row["c"] / row["plain"], row["python"] / row["plain"]
        row["python_over_c"] = row["python"] / row["c"]
        results[name] = row
        print("%-44s C %.4f  Python %.4f  %.3f of C's" % (name, row["share_c"], row["share_python"],
                                                          row["python_over_c"]), flush=True)
        with open(args.out, "w") as f:
            json.dump(results, f, indent=1)
            f.write("\n")
    sys.exit(any(row["python_over_c"] > GATE for row in results.values()))


if __name__ == "__main__":
    main()

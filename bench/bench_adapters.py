#!/usr/bin/env python3
"""What merging adapters costs: a conversion to NF4 with and without `--lora`, in turn.

    bench/bench_adapters.py --qconv build/qconv [--before OTHER_QCONV] [--rounds 5] [--json bench/results/adapters.json]
    bench/bench_adapters.py --page [--check]      writes the table of docs/adapters.md from that file, or checks it

Two weights of 4096 x 14336 in BF16, one thread; processor time in user mode, medians. With --before the same is done with
another qconv, each conversion right after that of the first. Standard library only; it needs 1 GB below --scratch.
"""
import argparse
import datetime
import json
import os
import platform
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
RESULT = os.path.join(HERE, "results", "adapters.json")
PAGE = os.path.join(HERE, "..", "docs", "adapters.md")
ROWS, COLS, NAMES = 4096, 14336, ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
CASES = (("without an adapter", 0, False), ("rank 16", 16, False), ("rank 64", 64, False), ("rank 16, DoRA", 16, True))
MARKS = "<!-- bench/results/adapters.json -->\n", "<!-- end -->\n"


def repeated(encode, count, rng, block=1 << 16):
    part = encode([rng.gauss(0, 0.02) for _ in range(block)])
    return (part * (count // block + 1))[:count * len(part) // block]


def f32(values):
    return struct.pack("<%df" % len(values), *values)


def bf16(values):
    return b"".join(struct.pack("<f", v)[2:] for v in values)


def write(path, tensors):
    """tensors: name -> (dtype, shape, bytes)"""
    head, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            f.write(data)


def make(scratch):
    rng = random.Random(1)
    model = os.path.join(scratch, "model")
    os.makedirs(model)
    write(os.path.join(model, "model.safetensors"),
          {n + ".weight": ("BF16", [ROWS, COLS], repeated(bf16, ROWS * COLS, rng)) for n in NAMES})
    with open(os.path.join(model, "config.json"), "w") as f:
        json.dump({"model_type": "llama"}, f)
    for name, rank, dora in CASES[1:]:
        tensors = {}
        for n in NAMES:
            p = "base_model.model." + n
            tensors[p + ".lora_A.weight"] = ("F32", [rank, COLS], repeated(f32, rank * COLS, rng))
            tensors[p + ".lora_B.weight"] = ("F32", [ROWS, rank], repeated(f32, ROWS * rank, rng))
            if dora:
                tensors[p + ".lora_magnitude_vector"] = ("F32", [ROWS], f32([1.0] * ROWS))
        folder = os.path.join(scratch, name)
        os.makedirs(folder)
        write(os.path.join(folder, "adapter_model.safetensors"), tensors)
        with open(os.path.join(folder, "adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "use_dora": dora}, f)
    return model


def seconds(qconv, scratch, model, case):
    more = ["--lora", os.path.join(scratch, case[0])] if case[1] else []
    out = os.path.join(scratch, "out")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([qconv, "--to", "nf4", "--compress", "none", "--threads", "1", "-q", "--force", *more, model, out],
                   check=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def cpu():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())


def measure(a):
    took = {}
    programs = [("qconv", a.qconv)] + ([("before", a.before)] if a.before else [])
    with tempfile.TemporaryDirectory(dir=a.scratch) as scratch:
        model = make(scratch)
        for _ in range(a.rounds):
            for case in CASES:
                for key, program in programs:
                    took.setdefault((key, case[0]), []).append(seconds(program, scratch, model, case))
    rows = []
    for case in CASES:
        rows.append({"name": case[0], "seconds": took["qconv", case[0]]})
        if a.before:
            rows[-1]["seconds_before"] = took["before", case[0]]
        print(case[0], {k: round(statistics.median(v), 3) for k, v in rows[-1].items() if k != "name"}, flush=True)
    version = subprocess.run([a.qconv, "--version"], stdout=subprocess.PIPE, check=True).stdout.decode().split("\n")[0]
    commit = subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE).stdout
    return {"cpu": cpu(), "version": version, "commit": commit.decode().strip(), "rounds": a.rounds,
            "date": datetime.date.today().isoformat(), "weights": len(NAMES) * ROWS * COLS, "rows": rows}


def page_text(r):
    """The table, and what follows from it."""
    median = {row["name"]: statistics.median(row["seconds"]) for row in r["rows"]}
    base = median[CASES[0][0]]
    each = (median["rank 16"] - base) / r["weights"]
    out = ["| | seconds | share of the conversion that is merging |", "|--|--|--|",
           "| %s | %.2f | |" % (CASES[0][0], base)]
    out += ["| %s | %.2f | %.0f%% |" % (name, median[name], 100 * (1 - base / median[name])) for name, _, _ in CASES[1:]]
    out += ["", "So rank 16 costs %.1f ns a weight and thread: %.0f seconds of one core for the 7.0e9 weights of an 8B model, "
            "and" % (each * 1e9, each * 7e9), "its workers share them. (%s, commit %s, %s.)" % (
                "%d rounds in turn on an %s" % (r["rounds"], r["cpu"]), r["commit"], r["date"])]
    return "\n".join(out) + "\n"


def page(check):
    with open(RESULT) as f:
        table = page_text(json.load(f))
    with open(PAGE) as f:
        text = f.read()
    before, rest = text.split(MARKS[0])
    new = before + MARKS[0] + table + MARKS[1] + rest.split(MARKS[1])[1]
    if check and new != text:
        print("docs/adapters.md: not what bench/results/adapters.json gives; run bench/bench_adapters.py --page")
        return 1
    if not check:
        with open(PAGE, "w") as f:
            f.write(new)
    return 0


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--qconv", default="build/qconv")
    p.add_argument("--before")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--scratch")
    p.add_argument("--json")
    p.add_argument("--page", action="store_true")
    p.add_argument("--check", action="store_true")
    a = p.parse_args()
    if a.page:
        return page(a.check)
    result = measure(a)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Holds one build of qconv against another: the bytes of every output and the text of every answer.

    same_outputs.py record FILE [--qconv PROGRAM]     run the matrix and write down what came out
    same_outputs.py compare FILE [--qconv PROGRAM]    run it again; print what is not the same

A change that moves code about must leave everything here as it was. The matrix has every kind of
model in tests/data, each target, scale, block size, compression and placement, parts and calibrating,
and the texts and JSON of the commands that describe a model or an output. Times, rates and what the
machine is are taken out of the texts. Standard library only; a quarter of a minute on two cores.

Exit codes: 0 the same, 1 not the same, 2 wrong usage."""
import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
import make_checkpoint  # noqa: E402
import moments  # noqa: E402

DATA = os.path.join(HERE, "data")
KJV = os.path.join(DATA, "kjv-llama")
COMMANDS = ("convert", "plan", "inspect", "verify", "unpack", "validate", "hardware")
# What differs from run to run or from machine to machine, and what stands for it.
VARYING = [
    (re.compile(r"(?m)^qconv: \w+ +\d+%.*\n"), ""),  # progress, which a busy machine shows more of
    (re.compile(r"\b\d+(\.\d+)?([eE][-+]?\d+)?(?= ?(s|ms|us|seconds?|minutes?)\b)"), "#"),
    (re.compile(r"\b\d+(\.\d+)? ?[kKMG]?i?B/s"), "# B/s"),
    (re.compile(r'("(?:seconds|started|finished|date|when|host|pid|[a-z_]*_seconds|[a-z_]*per_second)": )'
                r'("[^"]*"|[-+.\deE]+)'), r"\1#"),
    (re.compile(r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?Z?"), "<time>"),
    (re.compile(r"peak memory [\d.]+ ?[kMG]?i?B"), "peak memory #"),
    (re.compile(r"\b\d+ threads?\b"), "# threads"),
]


def without_what_varies(text):
    for pattern, by in VARYING:
        text = pattern.sub(by, text)
    return text


def make_models(folder):
    """Small ones of every family there is a pattern of, and a trained one."""
    names = []
    for seed, name in enumerate(make_checkpoint.model_names()):
        model = make_checkpoint.load_model(name)
        make_checkpoint.write_model(os.path.join(folder, name), model, layers=2, experts=4, scale=32,
                                    seed=seed, shard_bytes=6 << 20)
        names.append(name)
    shutil.copytree(os.path.join(KJV, "model"), os.path.join(folder, "kjv"))
    moments.of_model(os.path.join(KJV, "model"), os.path.join(folder, "moments.safetensors"), two=True)
    return names + ["kjv"]


def matrix(names):
    """(name, arguments) in order; a conversion writes to out-NAME, and later commands read it."""
    for command in COMMANDS:
        yield "help-" + command, [command, "--help"]
    for name in names:
        yield "inspect-" + name, ["inspect", name]
        yield "inspect-json-" + name, ["inspect", "--json", name]
        for vram in ("16GB", "2x40GB", "8GB+6GB+cpu:64GB"):
            for more in ((), ("--json",)):
                yield "-".join(("plan", name, vram) + more), \
                    ["plan", "--to", "nf4", "--vram", vram, *more, name]
        yield "plan-auto-" + name, ["plan", "--to", "auto", "--vram", "2x16GB", "--explain", name]
        for to in ("nf4", "int8", "bf16", "keep"):
            yield from converted("%s-%s" % (name, to), ["--to", to, name])
        yield from converted(name + "-auto", ["--to", "auto", "--schemes", "nf4,nf4-32,int8",
                                              "--vram", "700MB", "--context", "64",
                                              "--cuda-context", "100MB", "--explain", name])
    for name in ("Llama-3.1-8B", "kjv"):
        for scale in ("absmax", "search", "refit"):
            for to in ("nf4", "int8"):
                yield from converted("-".join((name, to, scale)), ["--to", to, "--scale", scale, name])
        for block in ("32", "128", "4096"):
            yield from converted("%s-block-%s" % (name, block), ["--to", "nf4", "--block-size", block, name])
        yield from converted(name + "-int8-block", ["--to", "int8", "--block-size", "64", name])
        yield from converted(name + "-single", ["--to", "nf4", "--no-double-quant", name])
        for compress in ("none", "zstd:9"):
            yield from converted("-".join((name, compress)), ["--to", "nf4", "--compress", compress, name])
        yield from converted(name + "-shards", ["--to", "nf4", "--max-shard-size", "1MB", name])
        yield from converted(name + "-placed", ["--to", "nf4", "--vram", "2x40GB", name])
        for part in ("1/3", "2/3", "3/3"):
            yield "part-%s-%s" % (name, part), ["--to", "nf4", "--part", part, name, "out-%s-parts" % name]
        yield from checked(name + "-parts", name)
    for to in ("nf4", "int8"):
        yield from converted("kjv-calibrated-" + to, ["--to", to, "--hessians", "moments.safetensors", "kjv"])
    yield "validate", ["validate", "--json", "--device", "cpu", "out-kjv-nf4", "--against", "kjv"]


def converted(name, arguments):
    yield "convert-" + name, arguments + ["out-" + name]
    yield from checked(name, arguments[-1])


def checked(name, model):
    out = "out-" + name
    yield "verify-" + name, ["verify", "--against", model, out]
    yield "verify-json-" + name, ["verify", "--json", out]
    yield "inspect-out-" + name, ["inspect", out]
    yield "unpack-" + name, ["unpack", out, "plain-" + name]


def files_of(folder):
    """{path: digest} of a folder; the texts of JSON without what varies."""
    found = {}
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f != ".qconv-partial"]  # its journal has times in it
        for name in sorted(names):
            path = os.path.join(root, name)
            with open(path, "rb") as f:
                data = f.read()
            if name == "qconv.json":
                data = without_what_varies(data.decode()).encode()
            found[os.path.relpath(path, folder)] = hashlib.sha256(data).hexdigest()
    return found


def run(program):
    results = {}
    with tempfile.TemporaryDirectory(prefix="qconv-same-") as scratch:
        for name, arguments in matrix(make_models(scratch)):
            before = set(os.listdir(scratch))
            r = subprocess.run([program, *arguments], cwd=scratch, capture_output=True, text=True,
                               stdin=subprocess.DEVNULL, timeout=600)
            out, err = (without_what_varies(t.replace(program, "qconv")) for t in (r.stdout, r.stderr))
            row = {"rc": r.returncode, "stdout": out, "stderr": err}
            for new in sorted(set(os.listdir(scratch)) - before):
                path = os.path.join(scratch, new)
                if os.path.isdir(path):
                    row["files"] = files_of(path)
                else:
                    with open(path, encoding="utf-8") as f:
                        row["file"] = without_what_varies(f.read())
                if new.startswith("plain-"):
                    shutil.rmtree(path)
            results[name] = row
    return results


def differences(old, new):
    for name in sorted(set(old) | set(new)):
        if name not in old or name not in new:
            yield "%s: only in the %s run" % (name, "new" if name in new else "old")
            continue
        for key in sorted(set(old[name]) | set(new[name])):
            a, b = old[name].get(key), new[name].get(key)
            if a == b:
                continue
            if isinstance(a, dict) and isinstance(b, dict):
                changed = [f for f in sorted(set(a) | set(b)) if a.get(f) != b.get(f)]
                yield "%s: other bytes in %s" % (name, ", ".join(changed))
            elif isinstance(a, str) and isinstance(b, str):
                lines = [(x, y) for x, y in zip(a.split("\n") + [""], b.split("\n") + [""]) if x != y]
                x, y = lines[0] if lines else (a[-80:], b[-80:])
                yield "%s: %s\n    was %s\n    is  %s" % (name, key, x[:160], y[:160])
            else:
                yield "%s: %s was %r, is %r" % (name, key, a, b)


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("what", choices=["record", "compare"])
    p.add_argument("file")
    p.add_argument("--qconv", default=os.path.join(os.path.dirname(HERE), "build", "qconv"))
    a = p.parse_args(argv)
    results = run(os.path.abspath(a.qconv))
    failed = sorted(n for n, r in results.items() if r["rc"] != 0)
    print("%d commands, %d of them with an exit code other than 0" % (len(results), len(failed)))
    if a.what == "record":
        with open(a.file, "w", encoding="utf-8") as f:
            json.dump(results, f, indent=0, sort_keys=True)
        print("\n".join("  %s: %d, %s" % (n, results[n]["rc"], results[n]["stderr"].strip()[:200])
                        for n in failed))
        return 0
    with open(a.file, encoding="utf-8") as f:
        old = json.load(f)
    found = list(differences(old, results))
    print("\n".join(found) if found else "everything is the same")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

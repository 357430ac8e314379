#!/usr/bin/env python3
"""Loading outputs of each kind into memory, beside reading plain files, all in one run.

    bench/bench_load.py --work DIR [--qconv build/qconv] [--bench build] [--layers 3] [--rounds 7]
                        [--threads N] [--json bench/results/load.json]

A synthetic checkpoint of Llama-3.1-8B layers (bench_checkpoint) is converted once for each row. Every
round runs each load once, in an order of its own; medians, but for "a core". Digests are checked, the memory that is
loaded to was touched before. Rates are of decompressed bytes:

    a core   bytes over processor seconds, the system's among them, with one thread; the least of all
             rounds, as other processes can only add to it (through the caches)
    wall     bytes over seconds, with all threads
    cold     the same with the files dropped from the page cache before

`files` reads the files of `nf4 --compress none` with pread and nothing else.

The model of the issue: 8 cores behind a disk of 3 GB/s. Reading a plain file takes content / 3 GB/s.
Loading an output takes the longer of stored / 3 GB/s and content / (8 * rate a core), for what is read ahead
overlaps with the work. Whole models by the bytes of their parts, quantized and 16 bit.
"""
import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys

DISK, CORES = 3e9, 8
ROWS = {
    "nf4": ["--to", "nf4", "--scale", "absmax"],
    "nf4 --compress none": ["--to", "nf4", "--scale", "absmax", "--compress", "none"],
    "int8": ["--to", "int8", "--scale", "absmax"],
    "int8 --block-size 64": ["--to", "int8", "--block-size", "64", "--scale", "absmax"],
    "bf16": ["--to", "bf16"],
}
# Parameters in quantized layers and in 16-bit tensors (embedding, head, norms).
MODELS = {"Llama-3.1-8B": (6_979_321_856, 1_050_939_392),
          "Llama-3.3-70B": (68_451_041_280, 2_102_665_216)}


def cpu_model():
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def load(tool, rounds, arguments):
    """Bytes, stored bytes, and the least of seconds and processor seconds; the first round warms up."""
    r = subprocess.run([tool, "--rounds", str(rounds + 1), *arguments], stdout=subprocess.PIPE)
    if r.returncode != 0:
        sys.exit("failed: " + " ".join([tool, *arguments]))
    got = json.loads(r.stdout)
    return (got["bytes"], got["stored_bytes"], min(r["seconds"] for r in got["rounds"][1:]),
            min(r["cpu"] for r in got["rounds"][1:]))


def modelled(rows, name):
    """Seconds for a whole model: plain files, and outputs in NF4 and int8 with zstd."""
    weights, rest = MODELS[name]
    got = {}
    for kind in ("nf4", "int8"):
        q, b = rows[kind], rows["bf16"]
        plain = weights * {"nf4": 0.516, "int8": 1.0}[kind] + 2 * rest
        parts = [(plain - 2 * rest, q), (2 * rest, b)]
        disk = sum(n * r["stored_bytes"] / r["bytes"] for n, r in parts) / DISK
        work = sum(n / r["core_bytes_per_second"] for n, r in parts)
        got[kind] = {"bytes": plain, "plain_seconds": plain / DISK, "disk_seconds": disk,
                     "work_seconds": work / CORES, "seconds": max(disk, work / CORES),
                     "core_bytes_per_second": plain / work,
                     "of_plain": max(disk, work / CORES) / (plain / DISK)}
    return got


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--qconv", default="build/qconv")
    ap.add_argument("--bench", default="build", help="folder of bench_checkpoint and bench_load")
    ap.add_argument("--work", required=True)
    ap.add_argument("--layers", type=int, default=3)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument("--json")
    args = ap.parse_args()
    tool = os.path.join(args.bench, "bench_load")
    model = os.path.join(args.work, "model")
    if not os.path.exists(os.path.join(model, "config.json")):
        subprocess.check_call([os.path.join(args.bench, "bench_checkpoint"), "--layers",
                               str(args.layers), model])
    places = {}
    for name, options in ROWS.items():
        places[name] = [os.path.join(args.work, name.replace(" ", ""))]
        if not os.path.exists(places[name][0]):
            subprocess.check_call([args.qconv, "-q", *options, model, places[name][0]])
    plain = places["nf4 --compress none"][0]
    places["files"] = ["--files"] + sorted(os.path.join(plain, n) for n in os.listdir(plain)
                                           if n.endswith(".safetensors"))
    ways = {"core": ["--threads", "1"], "wall": ["--threads", str(args.threads)],
            "cold": ["--threads", str(args.threads), "--cold"]}
    samples = {(name, way): [] for name in places for way in ways}
    for r in range(args.rounds):
        order = list(samples)
        random.Random(r).shuffle(order)
        for name, way in order:
            samples[name, way].append(load(tool, 4 if way == "core" else 1,
                                           ways[way] + places[name]))
    rows = {}
    for name in places:
        content, stored = samples[name, "core"][0][:2]
        rows[name] = {"bytes": content, "stored_bytes": stored}
        for way, index in (("core", 3), ("wall", 2), ("cold", 2)):
            seconds = [s[index] for s in samples[name, way]]
            # Others take caches and cycles from processor time, too: the least of it is the program's.
            best = min(seconds) if way == "core" else statistics.median(seconds)
            rows[name][way + "_bytes_per_second"] = content / best
            rows[name][way + "_seconds"] = {"median": statistics.median(seconds),
                                            "min": min(seconds), "max": max(seconds)}
    result = {"command": "bench/bench_load.py --work WORK --layers %d --rounds %d" %
              (args.layers, args.rounds), "cpu": cpu_model(), "threads": args.threads,
              "rows": rows, "disk_bytes_per_second": DISK, "cores": CORES,
              "models": {name: modelled(rows, name) for name in MODELS}}
    for name, row in rows.items():
        print("%-22s %5.2f GB/s a core  %5.2f wall  %5.2f cold" % (name, *(
            row[w + "_bytes_per_second"] / 1e9 for w in ("core", "wall", "cold"))))
    for name, kinds in result["models"].items():
        for kind, m in kinds.items():
            print("%s %s: %.2f GB/s a core; %.1f s of plain %.1f s" %
                  (name, kind, m["core_bytes_per_second"] / 1e9, m["seconds"], m["plain_seconds"]))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""How fast a conversion reads from a cold cache, beside fio on the same file and other ways to read.

  bench_io.py --work DIR [--memory DIR] [--model ID] [--rounds N] [--json FILE]

A checkpoint (bench_model write) of a few GB is put in DIR. A round runs each command once, with
nothing of the checkpoint in the page cache and all written pages on the disk, in an order of its
own, so that other work on the machine falls on all alike; ratios are taken within a round.

  fio         reads sequentially, O_DIRECT, as many jobs as threads: what the disk gives; the best
              of three engines counts
  bench_read  reads the way convert does, or another way, and does nothing else
  qconv       converts, to the same disk, which then has both to do; "OUT in memory" (--memory, a
              tmpfs) leaves it the reading alone; "cached" has the checkpoint in the page cache too:
              what the processors give

of_bound: with OUT in memory, against the slower of the two, fio and the same conversion cached.

Recorded of each: GB/s of the checkpoint, processor seconds a GB, and how much of the checkpoint is
in the page cache afterwards (fincore).
"""
import argparse
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
WAYS = ["plain", "ahead", "stream", "dontcache", "direct"]
CONVERSIONS = {
    "nf4, absmax, no compression": ["--to", "nf4", "--scale", "absmax", "--compress", "none"],
    "nf4": ["--to", "nf4"],
}
TARGET = 0.9


def weights(model):
    return [os.path.join(model, n) for n in sorted(os.listdir(model)) if n.endswith(".safetensors")]


def drop(paths):
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def cached(paths):
    text = subprocess.run(["fincore", "-b", "-n", "-o", "RES", *paths], text=True,
                          stdout=subprocess.PIPE).stdout
    return sum(int(word) for word in text.split()) if text else None


def timed(argv):
    """Wall and processor seconds; what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    p = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    seconds = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if p.returncode != 0:
        sys.exit("%s: exit code %d\n%s" % (" ".join(argv), p.returncode, p.stderr.decode()))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu, p.stdout.decode()


FIO = {"fio libaio 16": ("libaio", 16), "fio io_uring 16": ("io_uring", 16),
       "fio psync": ("psync", 1)}


def fio(paths, threads, engine, depth):
    """Each job reads its share of the largest file."""
    path = max(paths, key=os.path.getsize)
    share = os.path.getsize(path) // threads // (1 << 20) << 20
    seconds, cpu, out = timed(
        ["fio", "--name=read", "--filename=" + path, "--rw=read", "--bs=1M", "--direct=1",
         "--numjobs=%d" % threads, "--size=%d" % share, "--offset_increment=%d" % share,
         "--iodepth=%d" % depth, "--ioengine=" + engine, "--group_reporting",
         "--output-format=json", "--thread"])
    read = json.loads(out[out.index("{"):])["jobs"][0]["read"]  # a note may come first
    # fio spends a second on getting ready: its own clock counts.
    return read["runtime"] / 1000, cpu, read["io_bytes"]


def commands(args, model, paths, size, out, memory):
    threads = args.threads
    found = {name: lambda how=how: fio(paths, threads, *how) for name, how in FIO.items()}

    def read(way):
        seconds, cpu, text = timed([os.path.join(args.bench, "bench_read"), "--threads",
                                    str(threads), "--way", way, *paths])
        return json.loads(text)["seconds"], cpu, size

    def convert(options, to, warm):
        if warm:
            for path in paths:
                with open(path, "rb", buffering=0) as f:
                    while f.read(1 << 24):
                        pass
        seconds, cpu, _ = timed([args.qconv, "-q", "--threads", str(threads), *options, model, to])
        shutil.rmtree(to)
        return seconds, cpu, size

    for way in WAYS:
        found["bench_read " + way] = lambda way=way: read(way)
    for name, options in CONVERSIONS.items():
        found["qconv %s" % name] = lambda o=options: convert(o, out, False)
        name = "qconv %s, OUT in memory" % name
        found[name] = lambda o=options: convert(o, memory, False)
        found[name + ", cached"] = lambda o=options: convert(o, memory, True)
    return found


def cpu_name():
    with open("/proc/cpuinfo") as f:
        return next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")),
                    platform.processor())


def commit():
    return subprocess.run(["git", "-C", HERE, "rev-parse", "--short", "HEAD"], text=True,
                          capture_output=True).stdout.strip()


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--qconv", default=os.path.join(HERE, "..", "build", "qconv"))
    p.add_argument("--bench", default=os.path.join(HERE, "..", "build"))
    p.add_argument("--work", required=True)
    p.add_argument("--memory", default="/dev/shm", help="a folder on a tmpfs")
    p.add_argument("--model", default="meta-llama/Llama-3.2-3B")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    p.add_argument("--json")
    args = p.parse_args()
    model, out = os.path.join(args.work, "model"), os.path.join(args.work, "out")
    if not os.path.exists(os.path.join(model, "config.json")):
        subprocess.run([os.path.join(args.bench, "bench_model"), "write", args.model, model],
                       check=True)
    paths = weights(model)
    size = sum(os.path.getsize(path) for path in paths)
    memory = os.path.join(args.memory, "qconv-bench-io-%d" % os.getpid())
    runs = commands(args, model, paths, size, out, memory)
    rows = {name: [] for name in runs}
    for _ in range(args.rounds):
        order = list(runs)
        random.shuffle(order)
        for name in order:
            for left in (out, memory):
                shutil.rmtree(left, ignore_errors=True)
            os.sync()
            drop(paths)
            load = os.getloadavg()[0]
            seconds, cpu, read = runs[name]()
            rows[name].append({"gb_per_s": read / 1e9 / seconds, "cpu_s_per_gb": cpu * 1e9 / read,
                               "left_in_cache": cached(paths), "load": load})
            print("%-40s %6.2f GB/s  %5.2f CPU s/GB  %6.0f MB left, load %.1f" %
                  (name, rows[name][-1]["gb_per_s"], rows[name][-1]["cpu_s_per_gb"],
                   (rows[name][-1]["left_in_cache"] or 0) / 1e6, load), file=sys.stderr)
    base = [max(row["gb_per_s"] for row in round_) for round_ in zip(*(rows[n] for n in FIO))]
    result = {"command": "bench/bench_io.py --rounds %d --work DIR --model %s" %
                         (args.rounds, args.model),
              "commit": commit(), "cpu": cpu_name(), "threads": args.threads,
              "kernel": platform.release(), "bytes": size, "target": TARGET, "rows": []}
    for name, values in rows.items():
        row = {"name": name}
        for key in ("gb_per_s", "cpu_s_per_gb", "left_in_cache", "load"):
            row[key] = round(statistics.median(v[key] for v in values), 4)
        row["of_fio"] = round(statistics.median(v["gb_per_s"] / b for v, b in zip(values, base)), 3)
        if name + ", cached" in rows:
            row["of_bound"] = round(statistics.median(
                v["gb_per_s"] / min(b, c["gb_per_s"])
                for v, b, c in zip(values, base, rows[name + ", cached"])), 3)
        result["rows"].append(row)
    print(json.dumps(result, indent=1))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()

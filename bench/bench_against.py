#!/usr/bin/env python3
"""Measure `qconv verify OUT --against MODEL` against its floors, in one run.

    bench/bench_against.py --qconv build/qconv --bench build --work DIR [--layers 2] [--rounds 5]
                           [--threads N] [--form "--to nf4 --compress none" ...] [--json FILE]

A synthetic checkpoint of Llama-3.1-8B layers (bench_checkpoint) is converted in each form; all
files stay in the page cache. Bytes counted are those of the weight files of OUT and MODEL together,
once each. The floors go over the same bytes:

    cat   cat OUT/* MODEL/* > /dev/null: reading both, nothing else
    cmp   one part against its copy, both parts as large as half of OUT and MODEL: two files are
          read, as many bytes in all, and compared

Every round runs each command once, in an order of its own; rates are bytes over seconds, fractions
are taken within a round, and the median is reported. cat and cmp have one thread, verify has as
many as there are processors; on a machine that is not idle seconds tell who else is there, so bytes
over seconds of processor time stand beside them.
"""
import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time


def run(argv, shell=False):
    begin = time.monotonic()
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, shell=shell)
    message = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit("failed: %s\n%s" % (argv, message.decode(errors="replace")))
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def weight_files(folder):
    return [os.path.join(folder, n) for n in sorted(os.listdir(folder)) if ".safetensors" in n and
            not n.endswith(".json")]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--qconv", default="build/qconv")
    ap.add_argument("--bench", default="build")
    ap.add_argument("--work", required=True)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--threads", type=int, default=0)
    ap.add_argument("--form", action="append")
    ap.add_argument("--convert", help="program that converts, if another")
    ap.add_argument("--json")
    args = ap.parse_args()
    forms = args.form or ["--to nf4 --compress none", "--to nf4", "--to int8 --compress none",
                          "--to int8 --block-size 64 --compress none", "--to bf16 --compress none"]
    model = os.path.join(args.work, "model")
    subprocess.run([os.path.join(args.bench, "bench_checkpoint"), "--layers", str(args.layers),
                    model],
                   check=True, stdout=subprocess.DEVNULL)
    results = []
    for form in forms:
        out, half = os.path.join(args.work, "out"), os.path.join(args.work, "half")
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run([args.convert or args.qconv, "-q", *form.split(), model, out], check=True)
        files = weight_files(out) + weight_files(model)
        total = sum(os.path.getsize(f) for f in files)
        subprocess.run("cat %s | head -c %d > %s.a; cp %s.a %s.b" %
                       (" ".join(files), total // 2, half, half, half), shell=True, check=True)
        verify = [args.qconv, "-q", "verify", out, "--against", model]
        if args.threads:
            verify += ["--threads", str(args.threads)]
        commands = {"cat": (["cat"] + files), "cmp": ["cmp", half + ".a", half + ".b"],
                    "verify": verify}
        for argv in commands.values():
            run(argv)
        rates = {name: [] for name in commands}
        cpu = {name: [] for name in commands}
        peak = 0
        for _ in range(args.rounds):
            order = list(commands)
            random.shuffle(order)
            for name in order:
                seconds, busy, rss = run(commands[name])
                rates[name].append(total / seconds / 1e9)
                cpu[name].append(total / busy / 1e9)
                if name == "verify":
                    peak = max(peak, rss)
        row = {"form": form, "bytes": total, "peak_mib": round(peak, 1)}
        for name in commands:
            row[name + "_gb_s"] = round(statistics.median(rates[name]), 2)
            row[name + "_gb_cpu_s"] = round(statistics.median(cpu[name]), 2)
        for floor in ("cat", "cmp"):
            row["of_" + floor] = round(statistics.median(
                v / f for v, f in zip(rates["verify"], rates[floor])), 2)
        results.append(row)
        print("%-44s GB/s: cat %5.2f  cmp %5.2f  verify %5.2f, %3.0f%% of cmp, %3.0f%% of cat; "
              "GB per CPU second: cat %5.2f  cmp %5.2f  verify %5.2f; %.0f MiB"
              % (form, row["cat_gb_s"], row["cmp_gb_s"], row["verify_gb_s"], 100 * row["of_cmp"],
                 100 * row["of_cat"], row["cat_gb_cpu_s"], row["cmp_gb_cpu_s"],
                 row["verify_gb_cpu_s"], peak), flush=True)
        for path in (half + ".a", half + ".b"):
            os.remove(path)
    shutil.rmtree(out)
    shutil.rmtree(model)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump({"command": "bench/bench_against.py --layers %d --rounds %d" %
                       (args.layers, args.rounds), "layers": args.layers,
                       "cpus": len(os.sched_getaffinity(0)), "results": results}, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()

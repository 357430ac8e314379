#!/usr/bin/env python3
"""A mounted output read from beginning to end, beside unpack and beside plain files, in one run.

    bench/bench_mount.py --work DIR [--qconv build/qconv] [--bench build] [--model ID] [--rounds 5]
                         [--python PYTHON] [--json bench/results/mount.json]

A made-up checkpoint (bench_model) is converted once for each row, with everything in the page cache. Every
round does each of these once, in an order of its own; medians:

    mount    reads the mounted files for the first time, in requests of 1 MiB: frames are decompressed
    again    reads them once more, from the page cache
    unpack   `qconv unpack` into memory, whose bytes nobody reads
    plain    reads the files that unpack wrote, which are in memory

With --python, which has torch and transformers, from_pretrained of the mount and of the unpacked files,
each in a process of its own; of every page of every parameter a byte is read.
"""
import argparse
import glob
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from bench_load import cpu_model

ROWS = {"nf4": ["--to", "nf4", "--scale", "absmax"], "bf16": ["--to", "bf16"]}
LOAD = """
import sys, time, torch, transformers
from transformers import AutoModelForCausalLM
transformers.utils.logging.disable_progress_bar()
begin = time.monotonic()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
for p in model.parameters():
    p.data.view(torch.uint8).flatten()[::4096].sum()
print(time.monotonic() - begin)
"""


def read(folder):
    """Bytes and seconds."""
    room, total, begin = bytearray(1 << 20), 0, time.monotonic()
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        with open(path, "rb", buffering=0) as f:
            while n := f.readinto(room):
                total += n
    return total, time.monotonic() - begin


class Mount:
    def __init__(self, qconv, out, folder):
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        self.p = subprocess.Popen([qconv, "mount", "-f", out, folder], stdout=subprocess.PIPE)
        self.p.stdout.readline()

    def end(self):
        """Processor seconds and peak bytes of the process that served it."""
        subprocess.run(["fusermount3", "-u", self.folder], check=True)
        used = os.wait4(self.p.pid, 0)[2]
        self.p.returncode = 0
        self.p.stdout.close()
        return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def from_pretrained(python, folder):
    r = subprocess.run([python, "-c", LOAD, folder], stdout=subprocess.PIPE, check=True)
    return float(r.stdout.split()[-1])


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--qconv", default="build/qconv")
    ap.add_argument("--bench", default="build", help="folder of bench_model")
    ap.add_argument("--work", required=True)
    ap.add_argument("--model", default="Qwen/Qwen2.5-0.5B")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--python")
    ap.add_argument("--json")
    args = ap.parse_args()
    model = os.path.join(args.work, "model")
    if not os.path.exists(os.path.join(model, "config.json")):
        subprocess.check_call([os.path.join(args.bench, "bench_model"), "write", "--shard-bytes", "4e8",
                               args.model, model])
    plain = tempfile.mkdtemp(dir="/dev/shm")
    rows = {}
    for name, options in ROWS.items():
        out, folder = os.path.join(args.work, name), os.path.join(args.work, "mount")
        if not os.path.exists(out):
            subprocess.check_call([args.qconv, "-q", *options, model, out])
        samples = {k: [] for k in ("mount", "again", "unpack", "plain", "mounted", "unpacked", "cpu", "peak")}

        def mount():
            m = Mount(args.qconv, out, folder)
            total, seconds = read(folder)
            samples["mount"].append(seconds)
            samples["again"].append(read(folder)[1])
            cpu, peak = m.end()
            samples["cpu"].append(cpu)
            samples["peak"].append(peak)
            return total

        def unpack():
            begin = time.monotonic()
            subprocess.run([args.qconv, "unpack", "-q", "--force", out, plain], check=True)
            samples["unpack"].append(time.monotonic() - begin)
            samples["plain"].append(read(plain)[1])

        def load_mounted():
            m = Mount(args.qconv, out, folder)
            samples["mounted"].append(from_pretrained(args.python, folder))
            m.end()

        def load_unpacked():
            samples["unpacked"].append(from_pretrained(args.python, plain))

        steps = [mount, unpack] + ([load_mounted, load_unpacked] if args.python else [])
        unpack()
        samples = {k: [] for k in samples}
        for r in range(args.rounds):
            random.Random(r).shuffle(steps)
            for step in steps:
                step()
        total, _ = read(plain)
        stored = sum(os.path.getsize(p) for p in glob.glob(os.path.join(out, "*.zst")))
        rows[name] = {"bytes": total, "stored_bytes": stored}
        rows[name] |= {k: {"median": statistics.median(v), "min": min(v), "max": max(v)}
                       for k, v in samples.items() if v}
        print(name, " ".join("%s %.0f MB/s" % (k, total / 1e6 / rows[name][k]["median"])
                             for k in ("mount", "again", "unpack", "plain")),
              *("%s %.2f s" % (k, rows[name][k]["median"]) for k in ("mounted", "unpacked") if samples[k]),
              "cpu %.2f s, peak %.0f MiB" % (rows[name]["cpu"]["median"], rows[name]["peak"]["max"] / 2**20))
    shutil.rmtree(plain)
    result = {"command": "bench/bench_mount.py --work WORK --rounds %d%s" % (
        args.rounds, " --python PYTHON" if args.python else ""), "cpu": cpu_model(),
        "threads": len(os.sched_getaffinity(0)), "model": args.model, "rounds": args.rounds, "rows": rows}
    if args.json:
        with open(args.json, "w", encoding="utf-8") as f:
            json.dump(result, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    sys.exit(main())

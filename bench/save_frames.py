#!/usr/bin/env python3
"""Run bench_frames and save its lines as bench/results/frames.json.

    bench/save_frames.py [--bench build/bench_frames] [--rounds 15] [--json bench/results/frames.json]
"""
import argparse
import json
import re
import subprocess
import sys

LINE = re.compile(r"^(?P<data>.{12}) (?P<coder>.{20}) encode +(?P<encode>[\d.]+) GB/s +"
                  r"decode +(?P<decode>[\d.]+) GB/s +ratio (?P<ratio>[\d.]+)")


def cpu_model():
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "?"


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--bench", default="build/bench_frames")
    ap.add_argument("--rounds", default="15")
    ap.add_argument("--json", default="bench/results/frames.json")
    args = ap.parse_args()
    text = subprocess.check_output([args.bench, args.rounds], text=True)
    sys.stdout.write(text)
    rows = [{"data": m["data"].strip(), "coder": m["coder"].strip(),
             "encode_gbps": float(m["encode"]), "decode_gbps": float(m["decode"]),
             "ratio": float(m["ratio"])} for m in map(LINE.match, text.splitlines()) if m]
    if not rows:
        sys.exit("save_frames: bench_frames printed no results")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True,
                            text=True).stdout.strip()
    with open(args.json, "w") as f:
        json.dump({"bench": "frames", "cpu": cpu_model(), "commit": commit,
                   "command": "bench/save_frames.py --rounds " + args.rounds, "rows": rows}, f,
                  indent=1)
        f.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

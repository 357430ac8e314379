#!/usr/bin/env python3
"""NF4 quantization on one CPU thread: qconv beside bitsandbytes, the same tensor, in turn.

    PYTHON bench/bench_bitsandbytes.py --lib build/libqconv_bench_quant.so [--rows 4096]
           [--cols 14336] [--rounds 7] [--json bench/results/bitsandbytes.json]

PYTHON needs torch and bitsandbytes. qconv's quantizer is called through the small shared library
that the build makes for this purpose. Each round times bitsandbytes' quantize_4bit (with and
without double quantization) and each of qconv's code paths (scale of scales included) once.
"""
import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time


def cpu_model():
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "?"


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--lib", default="build/libqconv_bench_quant.so")
    ap.add_argument("--rows", type=int, default=4096)
    ap.add_argument("--cols", type=int, default=14336)
    ap.add_argument("--rounds", type=int, default=7)
    ap.add_argument("--json")
    args = ap.parse_args()
    import torch
    import bitsandbytes as bnb
    import bitsandbytes.functional as F
    torch.set_num_threads(1)
    lib = ctypes.CDLL(os.path.abspath(args.lib))
    lib.qc_bench_nf4.restype = ctypes.c_double
    lib.qc_bench_nf4.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64]
    torch.manual_seed(0)
    w = (torch.randn(args.rows, args.cols) * 0.02).to(torch.bfloat16)
    data = w.data_ptr()
    n = w.numel()

    def bnb_run(nested):
        begin = time.perf_counter()
        F.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=nested)
        return time.perf_counter() - begin

    runs = {"bitsandbytes": lambda: bnb_run(False),
            "bitsandbytes, double quantization": lambda: bnb_run(True)}
    for isa in ("scalar", "avx2"):
        if lib.qc_bench_nf4(isa.encode(), data, n) > 0:
            runs["qconv %s, double quantization" % isa] = (
                lambda isa=isa: lib.qc_bench_nf4(isa.encode(), data, n))
    seconds = {name: [] for name in runs}
    for r in range(args.rounds + 1):
        for name, run in runs.items():
            s = run()
            if r:
                seconds[name].append(s)
    base = seconds["bitsandbytes, double quantization"]
    rows = [{"name": name, "gbps": 2 * n / statistics.median(s) / 1e9,
             "ratio": statistics.median(b / a for a, b in zip(s, base))}
            for name, s in seconds.items()]
    for row in rows:
        print("%-36s %8.4f GB/s  %7.1fx" % (row["name"], row["gbps"], row["ratio"]))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True,
                            text=True).stdout.strip()
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"bench": "bitsandbytes", "cpu": cpu_model(), "commit": commit,
                       "torch": torch.__version__, "bitsandbytes": bnb.__version__,
                       "tensor": "%d x %d bf16" % (args.rows, args.cols),
                       "command": "bench/bench_bitsandbytes.py --rounds %d" % args.rounds,
                       "rows": rows}, f, indent=1)
            f.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What a tensor costs in memory: peaks with the 29,102 tensors of DeepSeek-V2.5, in small, and with
Llama-3.3-70B's 723, with two threads.

Small weights (every dimension above 64 divided by 64) have the frames and names of large ones, but
not their buffers: the peak is what qconv keeps of tensors. Nothing below this program's own 15 MB is
seen.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
TESTS = os.path.join(HERE, "..", "tests")
MODELS = ["DeepSeek-V2.5", "Llama-3.3-70B-Instruct"]


def peak(*args):
    """Of a child, but for what this process had when it was forked: so this one stays small."""
    p = subprocess.Popen(args, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(p.pid, 0)
    p.returncode = os.waitstatus_to_exitcode(status)
    if p.returncode:
        raise SystemExit("%s: exit code %d" % (" ".join(args), p.returncode))
    return usage.ru_maxrss * 1024


def measure(qconv, name, folder):
    model, out, plain = [os.path.join(folder, x) for x in ("m", "o", "u")]
    for path in (model, out, plain):
        shutil.rmtree(path, ignore_errors=True)
    subprocess.run([sys.executable, "-B", os.path.join(TESTS, "make_checkpoint.py"),
                    os.path.join(TESTS, "data", "models", name + ".json"), model, "--random", "1",
                    "--scale", "64", "--shard-bytes", "5e6"],
                   check=True, stdout=subprocess.DEVNULL)
    base = [qconv, "-q", "--threads", "2"]
    convert = base + ["--to", "nf4", "--max-shard-size", "2MB"]
    r = {"dry_run_bytes": peak(*convert, "--dry-run", model, out),
         "convert_bytes": peak(*convert, model, out),
         "verify_bytes": peak(qconv, "verify", "-q", "--threads", "2", out),
         "unpack_bytes": peak(qconv, "unpack", "-q", "--threads", "2", out, plain)}
    with open(os.path.join(out, "qconv.json")) as f:
        r["tensors_written"] = sum('"scheme": "' in line for line in f)
    return r


def main(argv):
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--qconv", default=os.path.join(HERE, "..", "build", "qconv"))
    p.add_argument("--json", required=True)
    a = p.parse_args(argv)
    result = {"command": "bench/bench_memory.py --json FILE"}
    with tempfile.TemporaryDirectory(prefix="qconv-memory-") as folder:
        for name in MODELS:
            result[name] = measure(os.path.abspath(a.qconv), name, folder)
    # All of a process, its 2 workers and the program included: an upper bound.
    large = result[MODELS[0]]
    for key in ("dry_run", "convert", "verify", "unpack"):
        result[key + "_bytes_per_tensor"] = round(large[key + "_bytes"] / large["tensors_written"])
    with open(a.json, "w") as f:
        json.dump(result, f, indent=2)
        f.write("\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])

#!/usr/bin/env python3
"""Measure qconv's main job against its roofs and peers, all in one run.

    bench/bench_convert.py --qconv build/qconv --bench build --work DIR [--layers 5] [--rounds 5]
                           [--json bench/results/convert.json] [--llama PYTHON] [--only WORD]

A synthetic checkpoint of Llama-3.1-8B layers (bench_checkpoint) is written to DIR and kept in the
page cache. Every round runs each command once, in an order of its own, so that the machine's
noise falls on all alike; ratios are taken within a round and the median of the ratios is reported. Outputs are
removed and the disk is synced between commands, so no command pays for another's writes.

Peak memory is the kernel's figure for the finished process (ru_maxrss).

Searched scales are set against the same conversion with --scale absmax, "x absmax". --only WORD runs
what has the word in its name, and what that is set against.

With --llama PYTHON (an interpreter that has llama-cpp-python, gguf and numpy), an F16 GGUF of the
same weights is quantized to Q4_0 and Q8_0 with as many threads, beside the rest.
"""
import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time

LLAMA = r"""
import ctypes, sys
import llama_cpp
src, dst, kind, threads = sys.argv[1:5]
p = llama_cpp.llama_model_quantize_default_params()
p.nthread = int(threads)
p.ftype = {"q4_0": 2, "q8_0": 7}[kind]
p.pure = True
log = llama_cpp.llama_log_callback(lambda level, text, user: None)
llama_cpp.llama_log_set(log, ctypes.c_void_p(0))
sys.exit(llama_cpp.llama_model_quantize(src.encode(), dst.encode(), ctypes.byref(p)))
"""

GGUF = r"""
import json, struct, sys
import numpy as np, gguf
model, dst, layers = sys.argv[1], sys.argv[2], int(sys.argv[3])
NAMES = {"input_layernorm": "attn_norm", "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "post_attention_layernorm": "ffn_norm",
         "self_attn.k_proj": "attn_k", "self_attn.o_proj": "attn_output",
         "self_attn.q_proj": "attn_q", "self_attn.v_proj": "attn_v"}
w = gguf.GGUFWriter(dst, "llama")
w.add_block_count(layers); w.add_context_length(8192); w.add_embedding_length(4096)
w.add_feed_forward_length(14336); w.add_head_count(32); w.add_head_count_kv(8)
w.add_layer_norm_rms_eps(1e-5); w.add_file_type(1); w.add_vocab_size(32)
w.add_tokenizer_model("llama"); w.add_token_list([b"<unk>", b"<s>", b"</s>"] + [b"t%d" % i for i in range(29)])
w.add_token_scores([0.0] * 32); w.add_token_types([2, 3, 3] + [1] * 29)
index = json.load(open(model + "/model.safetensors.index.json"))["weight_map"]
def load(name):
    path = model + "/" + index[name]
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        h = json.loads(f.read(n))[name]
        f.seek(8 + n + h["data_offsets"][0])
        raw = np.frombuffer(f.read(h["data_offsets"][1] - h["data_offsets"][0]), "<u2")
    return (raw.astype("<u4") << 16).view("<f4").reshape(h["shape"])
w.add_tensor("token_embd.weight", np.zeros((32, 4096), np.float16))
w.add_tensor("output_norm.weight", np.ones(4096, np.float32))
w.add_tensor("output.weight", np.zeros((32, 4096), np.float16))
for i in range(layers):
    for hf, gg in NAMES.items():
        a = load("model.layers.%d.%s.weight" % (i, hf))
        w.add_tensor("blk.%d.%s.weight" % (i, gg), a if a.ndim == 1 else a.astype(np.float16))
w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
"""


BASES = ("cp -r", "cp -r, synced", "zstd -d -T0, cp")


def run(argv):
    """Seconds and peak MiB of one command."""
    os.sync()
    begin = time.monotonic()
    child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    message = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.monotonic() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        sys.exit("failed: %s\n%s" % (" ".join(argv), message.decode(errors="replace")))
    return seconds, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime


def cat(folder):
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as f:
            while f.read(1 << 24):
                pass


def cpu_model():
    with open("/proc/cpuinfo") as f:
        for line in f:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def size_of(folder):
    return sum(os.path.getsize(os.path.join(folder, n)) for n in os.listdir(folder))


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--qconv", default="build/qconv")
    ap.add_argument("--bench", default="build", help="folder of bench_checkpoint")
    ap.add_argument("--work", required=True)
    ap.add_argument("--layers", type=int, default=5)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    ap.add_argument("--json")
    ap.add_argument("--llama")
    ap.add_argument("--only", default="")
    args = ap.parse_args()
    work = args.work
    os.makedirs(work, exist_ok=True)
    model = os.path.join(work, "model")
    if not os.path.exists(os.path.join(model, "config.json")):
        subprocess.check_call([os.path.join(args.bench, "bench_checkpoint"), "--layers",
                               str(args.layers), model])
    cat(model)
    out = {n: os.path.join(work, n) for n in
           ("cp", "none", "zstd", "packed", "int8", "searched", "unpacked", "plain", "q4_0.gguf", "q8_0.gguf")}
    threads = str(args.threads)
    q = [args.qconv, "--threads", threads, "-q"]
    nf4 = ["--to", "nf4", "--scale", "absmax"]
    commands = {
        "cp -r": ["cp", "-r", model, out["cp"]],
        "cp -r, synced": ["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', model, out["cp"]],
        "nf4 --compress none": q + nf4 + ["--compress", "none", model, out["none"]],
        "nf4 (zstd)": q + nf4 + [model, out["zstd"]],
        "int8 --compress none": q + ["--to", "int8", "--scale", "absmax", "--compress", "none",
                                     model, out["int8"]],
        "verify": q[:1] + ["verify", "--threads", threads, "-q", out["packed"]],
        "unpack": q[:1] + ["unpack", "--threads", threads, "-q", out["packed"],
                          out["unpacked"]],
        "zstd -d -T0, cp": ["sh", "-c", 'mkdir "$1" && for f in "$0"/*.zst; do zstd -q -d -T0 "$f" '
                            '-o "$1/$(basename "$f" .zst)" || exit 1; done && '
                            'cp "$0"/*.json "$1"', out["packed"], out["plain"]],
    }
    absmax_of = {}
    for name in ("nf4 --compress none", "nf4 (zstd)", "int8 --compress none"):
        for scale in ("search", "refit"):
            if scale == "refit" and name.startswith("int8"):
                continue  # rows have no scales of scales
            argv = [scale if a == "absmax" else a for a in commands[name]]
            absmax_of[name + ", " + scale] = name
            commands[name + ", " + scale] = argv[:-1] + [out["searched"]]
    gguf = os.path.join(work, "f16.gguf")
    if args.llama:
        if not os.path.exists(gguf):
            subprocess.check_call([args.llama, "-c", GGUF, model, gguf, str(args.layers)])
        with open(gguf, "rb") as f:
            while f.read(1 << 24):
                pass
        for kind in ("q4_0", "q8_0"):
            commands["llama.cpp " + kind] = [args.llama, "-c", LLAMA, gguf, out[kind + ".gguf"],
                                             kind, threads]
    subprocess.check_call(commands["nf4 (zstd)"])
    shutil.rmtree(out["packed"], ignore_errors=True)
    os.rename(out["zstd"], out["packed"])
    wanted = {n for n in commands if args.only in n} | set(BASES)
    wanted |= {absmax_of[n] for n in wanted if n in absmax_of}
    commands = {n: argv for n, argv in commands.items() if n in wanted}
    samples = {name: [] for name in commands}
    for r in range(args.rounds + 1):
        order = list(commands)
        random.Random(r).shuffle(order)  # what ran before decides how warm the free memory is
        for name in order:
            argv = commands[name]
            for key, path in out.items():
                if key != "packed":
                    shutil.rmtree(path, ignore_errors=True)
                    if os.path.isfile(path):
                        os.remove(path)
            sample = run(argv)
            if r > 0:  # the first round warms up
                samples[name].append(sample)
    source = size_of(model)
    rows = []
    for name, got in samples.items():
        seconds = [s for s, _, _ in got]
        row = {"name": name, "command": " ".join(commands[name]).replace(work, "WORK")
               if not name.startswith("llama") else name,
               "seconds": {"median": statistics.median(seconds), "min": min(seconds),
                           "max": max(seconds)},
               "cpu_seconds": statistics.median(c for _, _, c in got),
               "peak_mib": max(m for _, m, _ in got),
               "gb_per_s": source / statistics.median(seconds) / 1e9}
        bases = {base: base for base in BASES}
        if name in absmax_of:
            bases["absmax"] = absmax_of[name]
        for label, base in bases.items():
            row["ratio to " + label] = statistics.median(
                s / b for s, (b, _, _) in zip(seconds, samples[base]))
        rows.append(row)
    result = {"bench": "convert", "cpu": cpu_model(), "threads": args.threads,
              "source_bytes": source, "zstd_bytes": size_of(out["packed"]),
              "layers": args.layers, "rounds": args.rounds,
              "command": "bench/bench_convert.py --layers %d --rounds %d" % (args.layers,
                                                                             args.rounds),
              "rows": rows}
    try:
        result["commit"] = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"],
                                                   text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        result["commit"] = "unknown"
    if args.json:
        with open(args.json, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")
    print("%-28s %8s %8s %8s %9s %9s %9s %10s" % ("", "seconds", "CPU s", "GB/s", "x cp",
                                                  "x synced", "x absmax", "peak MiB"))
    for row in rows:
        print("%-28s %8.2f %8.2f %8.2f %9.2f %9.2f %9s %10.0f" % (
            row["name"], row["seconds"]["median"], row["cpu_seconds"], row["gb_per_s"],
            row["ratio to cp -r"], row["ratio to cp -r, synced"],
            "%.2f" % row["ratio to absmax"] if "ratio to absmax" in row else "",
            row["peak_mib"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

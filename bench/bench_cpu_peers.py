#!/usr/bin/env python3
"""Products with quantized weights on the CPU beside bitsandbytes, llama.cpp and torch, all in one run.

    PYTHONPATH=python PYTHON bench/bench_cpu_peers.py [--library build/libqconv.so] [--llama FOLDER] [--rounds N]
                                                      [--threads N] [--json bench/results/cpu_peers.json]

PYTHON has torch and bitsandbytes; FOLDER has the libggml files of llama-cpp-python (site-packages/llama_cpp/lib). Each
contender multiplies the same x with a chain of as many weights [rows, cols] as take CHAIN bytes in 16 bits, one after
the other, so that codes come from memory as they do when text is generated. In every round all contenders take their
turn, in an order of its own; ratios are taken within a round, and medians are reported. x has 1, 4 and 8 rows
(generation) and 512 (a prompt), in bfloat16, for llama.cpp in float32. The roof is what as many threads read: a sum of
the codes by torch.
"""
import argparse
import ctypes as c
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROWS, COLS, CHAIN = 14336, 4096, 1 << 30
X_ROWS = (1, 4, 8, 512)
SLOW_SECONDS, SLOW_ROUNDS = 2.0, 2  # what takes longer is timed in so many rounds only


class Ggml:
    """A graph of products of ggml, the library of llama.cpp, for each number of rows of x."""
    TYPES = {"q4_0": 2, "q8_0": 8}

    class Params(c.Structure):
        _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]

    def __init__(self, folder, kind, source, count, threads):
        libraries = [c.CDLL(str(Path(folder, f"lib{name}.so")), mode=c.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")]
        for name, result, arguments in (
                ("ggml_init", c.c_void_p, [self.Params]), ("ggml_get_data", c.c_void_p, [c.c_void_p]),
                ("ggml_new_tensor_2d", c.c_void_p, [c.c_void_p, c.c_int, c.c_int64, c.c_int64]),
                ("ggml_mul_mat", c.c_void_p, [c.c_void_p] * 3), ("ggml_new_graph", c.c_void_p, [c.c_void_p]),
                ("ggml_build_forward_expand", None, [c.c_void_p] * 2), ("ggml_nbytes", c.c_size_t, [c.c_void_p]),
                ("ggml_quantize_chunk", c.c_size_t, [c.c_int, c.c_void_p, c.c_void_p] + [c.c_int64] * 3 + [c.c_void_p]),
                ("ggml_graph_compute_with_ctx", c.c_int, [c.c_void_p, c.c_void_p, c.c_int])):
            function = next(getattr(lib, name) for lib in libraries if hasattr(lib, name))
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.kind, self.threads, self.graphs = self.TYPES[kind], threads, {}
        room = count * ROWS * COLS * 9 // 8 + sum(X_ROWS) * (COLS + ROWS * count) * 8 + (1 << 30)
        self.ctx = self.ggml_init(self.Params(room, None, False))
        self.weights = [self.ggml_new_tensor_2d(self.ctx, self.kind, COLS, ROWS) for _ in range(count)]
        first, size = self.ggml_get_data(self.weights[0]), self.ggml_nbytes(self.weights[0])
        self.ggml_quantize_chunk(self.kind, source.data_ptr(), first, 0, ROWS, COLS, None)
        for weight in self.weights[1:]:
            c.memmove(self.ggml_get_data(weight), first, size)
        self.bytes = size * count

    def prepare(self, x):
        rows = self.ggml_new_tensor_2d(self.ctx, 0, COLS, x.shape[0])
        x = x.float().contiguous()
        c.memmove(self.ggml_get_data(rows), x.data_ptr(), x.numel() * 4)
        graph = self.ggml_new_graph(self.ctx)
        for weight in self.weights:
            self.ggml_build_forward_expand(graph, self.ggml_mul_mat(self.ctx, weight, rows))
        self.graphs[x.shape[0]] = graph

    def __call__(self, x):
        if self.ggml_graph_compute_with_ctx(self.ctx, self.graphs[x.shape[0]], self.threads):
            raise RuntimeError("ggml could not compute")


class Chain:
    """Modules that are called one after the other."""

    def __init__(self, modules, size):
        self.modules, self.bytes = modules, size * len(modules)

    def prepare(self, x):
        self(x)

    def __call__(self, x):
        for module in self.modules:
            module(x)


def size_of(module):
    return sum(t.numel() * t.element_size() for t in [*module.parameters(), *module.buffers()])


def ours(form, bnb, count):
    """Linears of qconv with the codes of bitsandbytes' modules."""
    import torch
    from qconv import ops
    weights = []
    for module in bnb.modules:
        if form == "nf4":
            state = module.weight.quant_state
            tensors = (module.weight.data, state.absmax, state.code, state.state2.absmax, state.state2.code)
            numbers = (state.blocksize, state.state2.blocksize, float(state.offset))
        else:
            tensors, numbers = (module.weight.CB, module.weight.SCB, None, None, None), (0, 0, 0.0)
        weights.append(([t if t is None else t.clone() for t in tensors], ("nf4" if form == "nf4" else "int8", ROWS, COLS,
                                                                             *numbers)))
    size = sum(t.numel() * t.element_size() for t in weights[0][0] if t is not None)
    with torch.no_grad():
        return Chain([lambda x, t=t, n=n: ops.linear(x, *t, None, *n) for t, n in weights], size)


def contenders(options, count):
    import bitsandbytes as bnb
    import torch
    torch.manual_seed(1)
    source = torch.randn(ROWS, COLS) * 0.02

    def linear(kind):
        if kind == "nf4":
            made = bnb.nn.Linear4bit(COLS, ROWS, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
        elif kind == "int8":
            made = bnb.nn.Linear8bitLt(COLS, ROWS, bias=False, has_fp16_weights=False, threshold=0.0)
        else:
            made = torch.nn.Linear(COLS, ROWS, bias=False, dtype=torch.bfloat16)
        made.load_state_dict({"weight": source.to(torch.bfloat16)})
        return made.to("cpu").eval()

    found = {}
    for kind in ("nf4", "int8"):
        bnb_chain = Chain([linear(kind) for _ in range(count)], 0)
        found[f"qconv {kind}"] = ours(kind, bnb_chain, count)
        bnb_chain.bytes = found[f"qconv {kind}"].bytes
        found[f"bitsandbytes {kind}"] = bnb_chain
    dense = [linear("bf16") for _ in range(count)]
    found["torch bf16"] = Chain(dense, size_of(dense[0]))
    if options.llama:
        for kind in ("q4_0", "q8_0"):
            found[f"llama.cpp {kind}"] = Ggml(options.llama, kind, source, count, options.threads)
    return found


def llama_version(folder):
    """llama-cpp-python's version, by what pip left beside its folder."""
    found = list(Path(folder).parent.parent.glob("llama_cpp_python-*.dist-info")) if folder else []
    return {"llama-cpp-python": found[0].name.removesuffix(".dist-info").split("-")[1]} if found else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="build/libqconv.so")
    parser.add_argument("--llama")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json")
    options = parser.parse_args()
    os.environ["QCONV_LIBRARY"] = os.path.abspath(options.library)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import bitsandbytes
    import torch
    torch.set_num_threads(options.threads)
    count = max(2, CHAIN // (ROWS * COLS * 2))
    found = contenders(options, count)
    xs = {m: torch.randn(m, COLS).to(torch.bfloat16) for m in X_ROWS}
    codes = torch.zeros(CHAIN // 8, dtype=torch.int64)
    times = {(name, m): [] for name in found for m in X_ROWS}
    reading = []
    with torch.no_grad():
        for chain in found.values():
            for x in xs.values():
                chain.prepare(x[:1] if isinstance(chain, Chain) else x)
        for _ in range(options.rounds):
            start = time.perf_counter()
            codes.sum()
            reading.append(CHAIN / (time.perf_counter() - start) / 1e9)
            for name, m in random.sample(sorted(times), len(times)):
                if len(times[name, m]) >= SLOW_ROUNDS and times[name, m][-1] * count > SLOW_SECONDS:
                    continue
                start = time.perf_counter()
                found[name](xs[m])
                times[name, m].append((time.perf_counter() - start) / count)
    result = {
        "bench": "cpu_peers", "command": f"bench/bench_cpu_peers.py --llama FOLDER --rounds {options.rounds} --threads {options.threads}",
        "machine": {"cpu": next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), ""),
                    "system": platform.platform(), "threads": options.threads},
        "versions": {"torch": torch.__version__, "bitsandbytes": bitsandbytes.__version__, **llama_version(options.llama)},
        "commit": subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "rows": ROWS, "cols": COLS, "weights": count, "rounds": options.rounds, "read_gbps": statistics.median(reading),
        "contenders": {name: {
            "bytes": chain.bytes // count,
            "x_rows": {str(m): {"seconds": statistics.median(times[name, m]),
                                "of_read_rate": statistics.median(chain.bytes / count / t / 1e9 / r
                                                                  for t, r in zip(times[name, m], reading)),
                                **{f"over {other}": statistics.median(a / b for a, b in
                                                                      zip(times[other, m], times[name, m]))
                                   for other in found if other != name}} for m in X_ROWS}}
            for name, chain in found.items()}}
    for name, m in times:
        row = result["contenders"][name]["x_rows"][str(m)]
        print(f"{name:18} {m:4} rows  {row['seconds'] * 1e3:8.2f} ms  {row['of_read_rate']:.2f} of the read rate")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""bitsandbytes' 4-bit matmul on a GPU, on the shapes and by the method of bench_matmul.

    PYTHON bench/bench_kernels_bitsandbytes.py [--shapes LIST] [--m LIST] [--dtype fp16|bf16]
           [--rounds 30] [--seconds 150] [--output bench/results/kernels-bitsandbytes-NAME.json]

PYTHON needs torch with CUDA and bitsandbytes (0.50 or newer: gemm_4bit). Schemes: "bitsandbytes" is
matmul_4bit as its Linear4bit calls it, whatever kernel it takes; "dequantize" is dequantize_4bit and
then a matmul. Both with NF4, blocks of 64, double quantization. The JSON is that of bench_matmul
(docs/bench.md); the program never measures anything in bitsandbytes that would change its choices.

Exit codes: 0 done, 4 a result is wrong, 77 something it needs is not here.
"""
import argparse
import json
import math
import os
import sys
import time

# As convert/device/bench_shapes.c has them: model, layer, n, k, count in a decoder layer.
SHAPES = [("Llama-3.3-70B", "q, o", 8192, 8192, 2), ("Llama-3.3-70B", "k, v", 1024, 8192, 2),
          ("Llama-3.3-70B", "gate, up", 28672, 8192, 2), ("Llama-3.3-70B", "down", 8192, 28672, 1),
          ("Llama-3.1-8B", "q, o", 4096, 4096, 2), ("Llama-3.1-8B", "k, v", 1024, 4096, 2),
          ("Llama-3.1-8B", "gate, up", 14336, 4096, 2), ("Llama-3.1-8B", "down", 4096, 14336, 1)]
M = [2**i for i in range(13)]
SCHEMES = ["bitsandbytes", "dequantize"]
MIN_REPLAY_US = 2000
TRUTH = 61  # rows of x that differ


# ---- method: see convert/validate/timing.c ----

def copies_of(bytes_each, l2, limit):
    return max(1, min(max(2, 4 * l2 // bytes_each + 1), 256, limit // bytes_each))


def launches_of(copies, least, us, min_us):
    want = min(int(min_us / us) + 1, 2048) if us > 0 else 1
    return -(-max(want, least) // copies) * copies


def turn(round_number, step, contenders):
    i = step if step < contenders else 2 * contenders - 1 - step
    return contenders - 1 - i if round_number % 2 else i


def rounds_of(wanted, round_seconds, seconds_left, points):
    share = 2 * seconds_left / points if points and seconds_left > 0 else 0
    if share < round_seconds * wanted:
        return min(wanted, max(2, int(share / round_seconds)))
    return wanted


def spread(samples):
    s = sorted(samples)

    def rank(q):
        at = q * (len(s) - 1)
        i = int(at)
        return s[-1] if i + 1 >= len(s) else s[i] + (at - i) * (s[i + 1] - s[i])
    return {"median": rank(0.5), "p10": rank(0.1), "p90": rank(0.9), "samples": len(s)}


def rate(s, scale):
    return {"median": scale / s["median"], "p10": scale / s["p90"], "p90": scale / s["p10"],
            "samples": s["samples"]}


class Contender:
    """Something to be timed: launch(i) puts launch i of the rotation on the current stream."""

    def __init__(self, gpu, launch, copies=1, least=20, bytes_each=0):
        self.copies, self.bytes = copies, copies * bytes_each
        launch(0)  # libraries load their code on first use, which a capture does not allow
        self.launches = launches_of(copies, least, 0, 0)
        self.replay = gpu.graph(launch, self.launches, copies)
        self.replay()
        self.once = self.replay() / self.launches
        more = launches_of(copies, least, self.once, MIN_REPLAY_US)
        if more != self.launches:
            self.launches = more
            self.replay = gpu.graph(launch, more, copies)
            self.once = self.replay() / more
        self.us = []

    def rotation(self):
        return {"copies": self.copies, "bytes": self.bytes, "launches": self.launches}


def time_all(contenders, rounds):
    for r in range(rounds):
        for step in range(2 * len(contenders)):
            c = contenders[turn(r, step, len(contenders))]
            c.us.append(c.replay() / c.launches)


def alone(gpu, launch, least, args):
    c = Contender(gpu, launch, least=least)
    time_all([c], rounds_of(args.rounds, 2 * c.once * c.launches / 1e6, args.seconds, 100))
    return spread(c.us)


# ---- what is measured ----

def weight_bytes(n, k):
    blocks = -(-n * k // 64)
    return (n * k + 1) // 2 + blocks + 4 * -(-blocks // 256) + 4 * 256


def floor_us(roof, moved, flops):
    return max(moved / roof["copy_gbps"]["median"] / 1e3,
               flops / roof["gemm_tflops"]["median"] / 1e6)


def roofs(gpu, args):
    size, copied, host = gpu.sizes()
    flops = 2.0 * size**3
    return {"copy_bytes": copied,
            "copy_gbps": rate(alone(gpu, gpu.copy(copied), 4, args), 2 * copied / 1e3),
            "gemm_size": size,
            "gemm_tflops": rate(alone(gpu, gpu.product(size), 20, args), flops / 1e6),
            "launch_us": alone(gpu, gpu.nothing(), 200, args),
            "host_bytes": host,
            "to_device_gbps": rate(alone(gpu, gpu.upload(host), 4, args), host / 1e3),
            "to_host_gbps": rate(alone(gpu, gpu.download(host), 4, args), host / 1e3)}


def point(gpu, weights, roof, shape, m, points, args, deadline):
    """Rows of one shape and M; None if a result is wrong."""
    model, layer, n, k, count = shape
    errors = [weights.error(i, m) for i in range(3)]
    limit = 4e-3 if args.dtype == "bf16" else 1e-3
    for name, error in zip(["cuBLAS"] + SCHEMES, errors):
        # bitsandbytes rounds scaled codes and sums once more than qconv does.
        if not error <= (limit if name == "cuBLAS" else 4 * limit):
            print("%s is wrong for %d x %d, M = %d: normwise error %.3g" % (name, n, k, m, error),
                  file=sys.stderr)
            return None
    contenders = [Contender(gpu, weights.launch(i, m), weights.copies[i],
                            bytes_each=weights.bytes_each[i]) for i in range(3)]
    seconds = sum(2 * c.once * c.launches for c in contenders) / 1e6
    rounds = rounds_of(args.rounds, seconds, deadline - time.monotonic(), points)
    time_all(contenders, rounds)
    dense = contenders[0]
    rows = []
    for scheme, c, error in zip(SCHEMES, contenders[1:], errors[1:]):
        pairs = [(dense.us[2 * r] + dense.us[2 * r + 1]) / (c.us[2 * r] + c.us[2 * r + 1])
                 for r in range(rounds)]
        us, ratio = spread(c.us), spread(pairs)
        moved, flops = weight_bytes(n, k) + 2 * m * k + 2 * m * n, 2.0 * m * n * k
        least = floor_us(roof, moved, flops)
        rows.append({"model": model, "layer": layer, "n": n, "k": k, "count": count, "m": m,
                     "scheme": scheme, "path": scheme, "repacked": False, "error": error, "us": us,
                     "dense_us": spread(dense.us), "ratio": ratio, "bytes": moved,
                     "gbps": moved / us["median"] / 1e3, "tflops": flops / us["median"] / 1e6,
                     "floor_us": least, "of_roof": least / us["median"],
                     "rotation": c.rotation(), "dense_rotation": dense.rotation()})
        print("%s %s M=%d %s: %.2f us, %.0f%% of the roof, %.2fx %s"
              % (model, layer, m, scheme, us["median"], 100 * least / us["median"],
                 ratio["median"], args.dtype), file=sys.stderr)
    return rows


def sums(rows, shapes, ms):
    """All weights of a decoder layer, where all were measured."""
    out = []
    for model in dict.fromkeys(s[0] for s in shapes if s[4]):
        names = [s for s in shapes if s[0] == model]
        for scheme in SCHEMES:
            for m in ms:
                mine = [r for r in rows if (r["model"], r["scheme"], r["m"]) == (model, scheme, m)]
                if len(mine) == len(names):
                    out.append({"model": model, "scheme": scheme, "m": m,
                                "us": sum(r["count"] * r["us"]["median"] for r in mine),
                                "dense_us": sum(r["count"] * r["dense_us"]["median"]
                                                for r in mine)})
    return out


def write(path, result):
    """Whenever the program is killed, what was written before is there whole."""
    with open(path + ".part", "w") as f:
        json.dump(result, f, indent=2)
        f.write("\n")
    os.replace(path + ".part", path)


def measure(gpu, args):
    """The whole result, or None if something is wrong. The file of --output is written after each
    point."""
    begun = time.monotonic()
    deadline = begun + args.seconds
    device, program = gpu.facts()
    result = {"command": "bench_kernels_bitsandbytes", "program": program, "dtype": args.dtype,
              "seed": args.seed, "forced_path": None, "device": device,
              "roof": roofs(gpu, args),
              "kernels": [], "rows": [], "layers": [], "left_out": 0, "seconds": 0}
    for i, shape in enumerate(args.shapes):
        weights = gpu.weights(shape[2], shape[3], max(args.m))
        for j, m in enumerate(args.m):
            if weights is None or time.monotonic() > deadline:
                result["left_out"] += len(SCHEMES)
                continue
            points = (len(args.shapes) - i) * len(args.m) - j
            rows = point(gpu, weights, result["roof"], shape, m, points, args, deadline)
            if rows is None:
                return None
            result["rows"] += rows
            result["seconds"] = time.monotonic() - begun
            if args.output:
                write(args.output, dict(result, complete=False))
        del weights
    result["layers"] = sums(result["rows"], args.shapes, args.m)
    result["seconds"] = time.monotonic() - begun
    return result


# ---- torch ----

class TorchGpu:
    def __init__(self, torch, bnb, args):
        self.torch, self.bnb = torch, bnb
        self.dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float16
        torch.manual_seed(args.seed)
        self.properties = torch.cuda.get_device_properties(0)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch.set_grad_enabled(False)

    def facts(self):
        t, p = self.torch, self.properties
        versions = [int(v) for v in (t.version.cuda or "0.0").split(".")[:2]]
        return ({"name": p.name, "pci": "", "sm": 10 * p.major + p.minor,
                 "multiprocessors": p.multi_processor_count, "memory_bytes": p.total_memory,
                 "l2_bytes": p.L2_cache_size, "driver_version": 0,
                 "runtime_version": 1000 * versions[0] + 10 * versions[1],
                 "kernels": "bitsandbytes %s, torch %s" % (self.bnb.__version__, t.__version__),
                 "no_gemm": None}, "bitsandbytes %s" % self.bnb.__version__)

    def graph(self, launch, launches, copies):
        t = self.torch
        t.cuda.synchronize()
        g = t.cuda.CUDAGraph()
        with t.cuda.graph(g, stream=self.stream):
            for i in range(launches):
                launch(i % copies)
        begin, end = t.cuda.Event(enable_timing=True), t.cuda.Event(enable_timing=True)

        def replay():
            begin.record()
            g.replay()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) * 1e3
        return replay

    def random(self, *shape, deviation=1.0):
        return self.torch.randn(*shape, device="cuda", dtype=self.dtype).mul_(deviation)

    def sizes(self):
        free = self.torch.cuda.mem_get_info()[0]
        size, copied = 8192, 1 << 30
        while size > 64 and 6 * size * size > free // 32:
            size //= 2
        while copied > 1 << 20 and copied > free // 8:
            copied //= 2
        return size, copied, copied // 4

    def copy(self, n):
        a = self.random(n // 2)
        b = self.torch.empty_like(a)
        return lambda i: b.copy_(a)

    def product(self, n):
        a, b = self.random(n, n), self.random(n, n)
        out = self.torch.empty_like(a)
        return lambda i: self.torch.mm(a, b.t(), out=out)

    def nothing(self):
        a = self.random(1)
        return lambda i: a.add_(1)

    def upload(self, n):
        host = self.torch.empty(n, dtype=self.torch.uint8).random_().pin_memory()
        device = self.torch.empty(n, dtype=self.torch.uint8, device="cuda")
        return lambda i: device.copy_(host, non_blocking=True)

    def download(self, n):
        host = self.torch.empty(n, dtype=self.torch.uint8).pin_memory()
        device = self.torch.empty(n, dtype=self.torch.uint8, device="cuda").random_()
        return lambda i: host.copy_(device, non_blocking=True)

    def weights(self, n, k, max_m):
        self.torch.cuda.empty_cache()
        try:
            return TorchWeights(self, n, k, max_m)
        except self.torch.cuda.OutOfMemoryError:
            return None


class TorchWeights:
    """Dense and quantized copies of one weight, and x."""

    def __init__(self, gpu, n, k, max_m):
        t = gpu.torch
        self.gpu, self.n, self.k = gpu, n, k
        free, l2 = t.cuda.mem_get_info()[0], gpu.properties.L2_cache_size
        self.bytes_each = [2 * n * k, weight_bytes(n, k), weight_bytes(n, k)]
        share = free // 4
        self.copies = [copies_of(b, l2, share) for b in self.bytes_each]
        self.dense = [gpu.random(n, k, deviation=0.02) for _ in range(self.copies[0])]
        quantize = gpu.bnb.functional.quantize_4bit
        self.packed = [quantize(self.dense[i % len(self.dense)], blocksize=64, quant_type="nf4",
                                compress_statistics=True) for i in range(self.copies[1])]
        x = gpu.random(TRUTH, k)
        self.x = x.repeat(-(-max_m // TRUTH), 1)[:max_m].contiguous()
        exact = gpu.bnb.functional.dequantize_4bit(self.packed[0][0], self.float_state())
        self.truth = [x.double() @ self.dense[0].double().t(), x.double() @ exact.double().t()]

    def float_state(self):
        """The state of the first copy, for dequantizing to float32: exact weights."""
        import copy
        state = copy.copy(self.packed[0][1])
        state.dtype = self.gpu.torch.float32
        return state

    def launch(self, which, m):
        x, f = self.x[:m], self.gpu.torch.nn.functional
        if which == 0:
            return lambda i: f.linear(x, self.dense[i])
        if which == 1:
            multiply = self.gpu.bnb.matmul_4bit
            return lambda i: multiply(x, self.packed[i][0], self.packed[i][1])
        dequantize = self.gpu.bnb.functional.dequantize_4bit
        return lambda i: f.linear(x, dequantize(*self.packed[i]))

    def error(self, which, m):
        y = self.launch(which, m)(0).double()
        rows = self.gpu.torch.arange(m, device="cuda") % TRUTH
        truth = self.truth[min(which, 1)]
        total = sum(float(((y[i:i + 256] - truth[rows[i:i + 256]])**2).sum())
                    for i in range(0, m, 256))
        return math.sqrt(total / m) / math.sqrt(float((truth**2).sum()) / TRUTH)


# ---- the program ----

def parse(argv):
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--shapes", help="NxK,NxK")
    ap.add_argument("--m", help="1,16,256")
    ap.add_argument("--dtype", choices=["fp16", "bf16"], default="fp16")
    ap.add_argument("--rounds", type=int, default=30)
    ap.add_argument("--seconds", type=float, default=150)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--output")
    args = ap.parse_args(argv)
    args.m = sorted(int(m) for m in args.m.split(",")) if args.m else M
    if args.shapes:
        sides = [tuple(int(v) for v in s.split("x")) for s in args.shapes.split(",")]
        args.shapes = [("given", "%dx%d" % s, s[0], s[1], 0) for s in sides]
    else:
        args.shapes = SHAPES
    return args


def needs():
    """torch and bitsandbytes, or a sentence about what is missing."""
    try:
        import torch
    except ImportError:
        return None, None, "torch is not installed"
    if not torch.cuda.is_available():
        return None, None, "torch finds no CUDA GPU"
    try:
        import bitsandbytes
    except ImportError:
        return None, None, "bitsandbytes is not installed"
    if not hasattr(torch.ops.bitsandbytes, "gemm_4bit"):
        return None, None, ("bitsandbytes %s has no gemm_4bit; 0.50 or newer has"
                            % bitsandbytes.__version__)
    return torch, bitsandbytes, None


def main(argv):
    args = parse(argv)
    torch, bitsandbytes, missing = needs()
    if missing:
        print("bench_kernels_bitsandbytes: %s" % missing, file=sys.stderr)
        return 77
    result = measure(TorchGpu(torch, bitsandbytes, args), args)
    if result is None:
        return 4
    if args.output:
        write(args.output, dict(result, complete=True))
    for row in result["layers"]:
        print("%-14s %-13s M=%-5d %9.1f us  %.2fx %s"
              % (row["model"], row["scheme"], row["m"], row["us"],
                 row["dense_us"] / row["us"], args.dtype))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""qconv's operators on a real GPU: numbers, graphs, streams, compiling, gradients, a model, and times.

    PYTHONPATH=python QCONV_LIBRARY=build/libqconv.so QCONV_CUDA_LIBRARY=build/libqconv_cuda.so \\
        QCONV_PROGRAM=build/qconv tests/interop/gpu_operators.py [--only NAME...] OUT.json

It needs torch, and transformers for the check of a model. Each check prints a line and stands by itself; OUT.json has
what each found. Exit code 0, 1 (a check failed) or 77 (no GPU). With --shim the kernels run on the CPU, in
build/shim/libqconv_cuda.so, and what only a GPU can show is left out: a rehearsal.
"""
import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--shim", action="store_true")
parser.add_argument("--only", action="append", default=[])
parser.add_argument("out")
arguments = parser.parse_args()
ROOT = Path(__file__).resolve().parents[2]
if arguments.shim:
    os.environ |= {"QC_SHIM_MEMORY": "any", "QC_SHIM_STREAMS": "lazy"}
    os.environ.setdefault("QCONV_LIBCUBLAS", str(ROOT / "build" / "tests" / "shim" / "libfake_cublas.so"))

import torch  # noqa: E402

import qconv  # noqa: E402
from qconv import _gpu, ops  # noqa: E402
from qconv._library import code_bits, is_packed, row_bytes  # noqa: E402
from qconv._weights import QuantizedWeight  # noqa: E402
from qconv.torch import Linear  # noqa: E402

CODE = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
        0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # of NF4
# Of the sum of magnitudes: a weight is rounded once to 16 bits where the kernels do not take its codes, and y once;
# sums are floats, and sums of thousands of floats on tensor cores are allowed 2^-15 more.
ERROR = {torch.float16: 2 * 2 ** -11 + 2 ** -15, torch.bfloat16: 2 * 2 ** -8 + 2 ** -15, torch.float32: 2 ** -15}
HALVES = torch.float16, torch.bfloat16
SHAPES = ((64, 64), (33, 71), (96, 440)) + (() if arguments.shim else ((256, 1024), (64, 4096), (1024, 4096)))
ROWS = (0, 1, 2, 5, 8, 9, 16, 33, 64, 129, 300) if arguments.shim else (0, 1, 2, 5, 8, 9, 16, 33, 64, 129, 300, 1500)


class Gpu:
    device = torch.device("cuda:0")
    synchronize = staticmethod(torch.cuda.synchronize)

    @staticmethod
    def captured(work):
        """(a function that runs the work again, what it returned)"""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = work()
        return graph.replay, out


class Shim:
    """Kernels and tensors on the CPU: the operators' CPU implementation becomes that for GPUs."""
    device, active = torch.device("cpu"), True

    def __init__(self):
        sys.path.insert(0, str(Path(__file__).parent))
        import shim_runtime
        self.runtime, self.streams = shim_runtime, shim_runtime.start()
        self.library = torch.library.Library("qconv", "IMPL")
        for name in ("linear", "dequantize", "experts"):
            self.library.impl(name, self.chosen(getattr(ops, f"{name}_cuda"), getattr(ops, f"{name}_cpu")), "CPU",
                              allow_override=True)

    def chosen(self, there, here):
        return lambda *a: (there if self.active else here)(*a)

    def synchronize(self):
        self.runtime.call("qc_cuda_stream_synchronize", self.streams.stream(0))

    def captured(self, work):
        with self.runtime.Graph(self.streams) as graph:
            out = work()
        return graph.replay, out


@contextlib.contextmanager
def on_the_cpu():
    """What the CPU's own implementation says."""
    Shim.active = False
    try:
        yield
    finally:
        Shim.active = True


# ---- weights and references ---------------------------------------------------------------------


def weight(form, rows, cols, block=0, nested=False, seed=0):
    """A random one, on the CPU."""
    g = torch.Generator().manual_seed(seed)
    n = rows * cols
    size = rows * row_bytes(form, cols) if is_packed(form) else -(-n * code_bits(form) // 8)
    codes = torch.randint(-127, 128, (size,), generator=g, dtype=torch.int8)
    count = -(-n // block) if block else rows
    scales, more = (torch.rand(count, generator=g) + 0.5) * 0.02, {}
    if form == "nf4":
        more["code_map"] = torch.tensor(CODE)
    if nested:
        scales = torch.randint(0, 256, (count,), generator=g, dtype=torch.uint8)
        more |= {"nested_absmax": torch.rand(-(-count // 256), generator=g), "nested_map": torch.linspace(-1, 1, 256)}
    return QuantizedWeight(form, rows, cols, block, 256 if nested else 0, 0.375 if nested else 0.0, torch.bfloat16,
                           codes, scales.view(torch.uint8), **more)


def there(w):
    """The weight on the device."""
    moved = {role: None if t is None else t.to(gpu.device, copy=True) for role, t in zip(
        ("codes", "scales", "code_map", "nested_absmax", "nested_map"), w.tensors())}
    return QuantizedWeight(*w.numbers, w.dtype, **moved)


def weights():
    """Every form, with whole blocks, odd columns, and wide rows."""
    for i, (rows, cols) in enumerate(SHAPES):
        for nested in (False, True):
            yield weight("nf4", rows, cols, (64, 128, 4096)[i % 3], nested, i)
            yield weight("int8-block", rows, cols, (64, 32)[i % 2], nested, i)
        yield weight("int8", rows, cols, seed=i)
        yield weight("w8a8", rows, cols, seed=i)
    for rows, cols, block in ((64, 64, 32), (9, 256, 128), (128, 1024, 0), (9, 75, 0)):
        for bits in range(2, 9):  # a row of 4 bits begins with a byte
            yield weight(f"w{bits}a16", rows, cols + cols % 2 * (bits == 4), block)


def product(w, x, bias=None):
    return ops.linear(x, *w.tensors(), bias, *w.numbers)


def exact(w):
    """The weight in double, on the device, as the CPU restores it."""
    with on_the_cpu():
        return w.dequantize(torch.float32).to(gpu.device).double()


def apart(y, x, matrix, bias=None):
    """How far y is from the product in double, of the sum of magnitudes."""
    more = 0 if bias is None else bias.double()
    want = x.double() @ matrix.T + more
    size = x.double().abs() @ matrix.abs().T + (0 if bias is None else more.abs())
    assert y.shape == want.shape and y.dtype == x.dtype, (y.shape, y.dtype)
    assert y.isfinite().all()
    return ((y.double() - want).abs() / size.clamp_min(1e-30)).max().item() if y.numel() else 0.0


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(gpu.device)


def paths():
    """Which kernels the plans so far name, and how many plans."""
    found, own = {}, _gpu.of(gpu.device)
    for plans in own.plans.values():
        for _, at, _ in plans.values():
            name = own.library.qc_matmul_path_name(own.library.qc_matmul_planned_path(at, 0)).decode()
            found[name] = found.get(name, 0) + 1
    return found


# ---- checks -------------------------------------------------------------------------------------


def library():
    """libqconv_cuda.so is there and usable, and the first product has nothing to warn of."""
    said = qconv.cuda_library()
    assert said.problem is None, said.problem
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        own = _gpu.of(gpu.device)
    assert own is not None and not warned, [str(w.message) for w in warned]
    name = "the shim" if arguments.shim else torch.cuda.get_device_name()
    return {"build": said.build, "device": name, "torch": torch.__version__, "no cuBLAS": own.no_gemm}


def restored():
    """dequantize on the device gives the bytes of dequantize on the CPU."""
    count = 0
    for w, dtype in itertools.product(weights(), ERROR):
        with on_the_cpu():
            want = w.dequantize(dtype)
        mine = there(w).dequantize(dtype).cpu()
        assert torch.equal(mine.view(torch.uint8), want.view(torch.uint8)), (w.numbers, dtype)
        count += 1
    return {"weights": count}


def products():
    """Products of every form and number of rows against double; the same product twice has the same bits."""
    worst, count = {}, 0
    for i, w in enumerate(weights()):
        matrix, w = exact(w), there(w)
        rows = ROWS if not arguments.shim else ROWS[i % 3::3]
        for dtype, m in itertools.product(ERROR, rows):
            x, bias = randn(m, w.cols, dtype=dtype, seed=m), randn(w.rows, dtype=dtype, seed=9) if m % 2 else None
            y = product(w, x, bias)
            gpu.synchronize()
            error = apart(y, x, matrix, bias)
            assert error < ERROR[dtype], (w.numbers, dtype, m, error)
            assert torch.equal(y, product(w, x, bias)), (w.numbers, dtype, m)
            worst[str(dtype)] = max(worst.get(str(dtype), 0.0), error)
            count += 1
    _gpu._check(_gpu.of(gpu.device).library.qc_matmul_check(_gpu.of(gpu.device).handle, _gpu._call.error_at))
    return {"products": count, "worst": worst, "paths": paths()}


def experts_of(form, count):
    """(weights, what qconv::experts takes from row_weights on: tensors on the device, with a bias)"""
    each = [there(weight(*form, seed=i)) for i in range(count)]
    codes, scales, code_map, nested, nested_map = zip(*(w.tensors() for w in each))
    tensors = (torch.stack(codes), torch.stack(scales), code_map[0], None if nested[0] is None else torch.stack(nested),
               nested_map[0])
    return each, tensors, (*each[0].numbers[:-1], [w.offset for w in each])


def of_experts(each, offsets, x, bias, by):
    """What the rows of y are in double, and the sums of magnitudes."""
    want, size = [], []
    for w, b, begin, end in zip(each, bias.double(), offsets, offsets[1:]):
        weights = by[begin:end, None].double()
        want.append((x[begin:end].double() @ exact(w).T + b) * weights)
        size.append((x[begin:end].double().abs() @ exact(w).abs().T + b.abs()) * weights.abs())
    return torch.cat(want), torch.cat(size).clamp_min(1e-30)


def experts():
    """Rows by number, biases and weights of rows; no rows, few and many; forms without a kernel, too."""
    worst, count = {}, 0
    for form, dtype, rows in itertools.product(EXPERTS, ERROR, ((1, 0, 2, 0), (5, 17, 0, 1), (70, 1, 0, 64))):
        each, tensors, numbers = experts_of(form, len(rows))
        offsets = [sum(rows[:i]) for i in range(len(rows) + 1)]
        x, bias = randn(9, form[2], dtype=dtype), randn(len(rows), form[1], dtype=dtype, seed=1)
        by, chosen = randn(offsets[-1] + 3, seed=2), torch.arange(offsets[-1] + 3, dtype=torch.int32) * 5 % 9
        chosen = chosen.to(gpu.device)
        y = ops.experts(x, torch.tensor(offsets, dtype=torch.int32).to(gpu.device), chosen, by, *tensors, bias, *numbers)
        assert not y[offsets[-1]:].any()
        want, size = of_experts(each, offsets, x[chosen.long()], bias, by)
        apart = ((y[:offsets[-1]].double() - want).abs() / size).max().item()
        assert apart < ERROR[dtype], (form, dtype, rows, apart)
        worst[str(dtype)] = max(worst.get(str(dtype), 0.0), apart)
        count += 1
    return {"products": count, "worst": worst}


def experts_in_graphs():
    """Captured once and run with other offsets, rows and x."""
    for form, dtype in itertools.product(EXPERTS[:4], HALVES):
        each, tensors, numbers = experts_of(form, 4)
        x, bias, by = randn(40, form[2], dtype=dtype), randn(4, form[1], dtype=dtype, seed=1), randn(40, seed=2)
        offsets = torch.tensor([0, 3, 3, 23, 40], dtype=torch.int32).to(gpu.device)
        rows = torch.arange(40, dtype=torch.int32).to(gpu.device)

        def work():
            return ops.experts(x, offsets, rows, by, *tensors, bias, *numbers)
        work()
        replay, y = gpu.captured(work)
        for seed, ends in enumerate(((0, 40, 40, 40, 40), (0, 1, 2, 3, 40), (0, 0, 20, 20, 40))):
            offsets.copy_(torch.tensor(ends))
            rows.copy_(torch.randperm(40, generator=torch.Generator().manual_seed(seed)))
            x.copy_(randn(40, form[2], dtype=dtype, seed=seed))
            replay()
            gpu.synchronize()
            want, size = of_experts(each, ends, x[rows.long()], bias, by)
            assert ((y.double() - want).abs() / size).max().item() < ERROR[dtype], (form, dtype, ends)
    return {}


def shapes():
    """x with gaps, from any address, expanded, of no rows and of one dimension."""
    w = there(weight("nf4", 96, 128, 64, True))
    wide = randn(5, 200, dtype=torch.float16)
    for x in (wide[:, :128], wide[:, 3:131], wide[:, ::2][:, :100].repeat(1, 2)[:, :128], wide[:1, :128].expand(5, 128),
              wide.flatten()[1:641].view(5, 128), wide[:4, :128].view(2, 2, 128), wide[0, :128]):
        assert torch.equal(product(w, x), product(w, x.clone(memory_format=torch.contiguous_format))), x.shape
    assert product(w, wide[:0, :128]).shape == (0, 96)
    return {}


def refusals():
    """Wrong arguments are told in a sentence, and the device works on."""
    w, x = there(weight("nf4", 96, 128, 64)), randn(2, 128, dtype=torch.float16)
    codes, scales, *rest = w.tensors()
    wrong = {"columns": (x[:, :127], codes, scales), "bytes of codes": (x, codes[1:], scales),
             "scales, found": (x, codes, scales[4:])}
    if not arguments.shim:
        wrong["the weight on"] = (x.cpu(), codes, scales)
    for words, (a, b, d) in wrong.items():
        try:
            ops.linear(a, b, d, *rest, None, *w.numbers)
        except (qconv.UsageError, qconv.InputError) as e:
            assert words in str(e), str(e)
        except RuntimeError as e:  # where torch itself sees it
            assert "the weight on" in words, str(e)
        else:
            raise AssertionError(f"not refused: {words}")
    assert product(w, x).isfinite().all()
    return {}


def addresses():
    """Weights that come and go at one address, and one that is written to."""
    x, seen, own = randn(3, 71, dtype=torch.bfloat16), set(), _gpu.of(gpu.device)
    gc.collect()
    count = len(own.weights)
    for seed in range(6):
        host = weight("int8", 37, 71, seed=seed)
        w = there(host)
        seen.add(w.codes.data_ptr())
        assert apart(product(w, x), x, exact(host)) < ERROR[x.dtype]
        other = weight("int8", 37, 71, seed=seed + 100)
        w.codes.copy_(other.codes)
        w.scales.copy_(other.scales)
        assert apart(product(w, x), x, exact(other)) < ERROR[x.dtype]
        del w
    assert len(own.weights) == count, (len(own.weights), count)
    return {"addresses": len(seen)}


def layers(seed=0):
    """Layers one behind the other, so that each product's x is the y of the one before: few and many rows, any path."""
    made = [weight("nf4", 512, 256, 64, True, seed), weight("int8", 256, 512, seed=seed), weight("nf4", 64, 256, 64),
            weight("w4a16", 128, 64, 32), weight("int8-block", 71, 128, 64), weight("nf4", 64, 71, 64)]
    return [there(w) for w in made]


def through(some, x):
    for w in some:
        x = product(w, x) * 0.25
    return x


def graphs():
    """Captured and replayed with other x, with plain products in between; two graphs in turn."""
    some, count = layers(), 0
    for dtype, m in itertools.product(HALVES, (1, 8, 9, 64, 300)):
        x = randn(m, 256, dtype=dtype)
        through(some, x)
        replay, out = gpu.captured(lambda: through(some, x))
        again, second = gpu.captured(lambda: through(some, x))
        for seed in range(3):
            x.copy_(randn(m, 256, dtype=dtype, seed=seed))
            want = through(some, x)
            for run, y in ((replay, out), (again, second)):
                run()
                gpu.synchronize()
                assert torch.equal(y, want), (dtype, m, seed)
            count += 1
    return {"replays": count}


def graphs_that_fork():
    """A capture over two streams that part and meet again, with products in front of, on and behind both ways."""
    first, second, third = (there(weight("nf4", 4096, 4096, 64, True, i)) for i in range(3))
    x, side = randn(1, 4096, dtype=torch.float16), torch.cuda.Stream()

    def work():
        begin, here = product(first, x) * 0.01, torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            one = product(second, begin)
        two = product(third, begin)
        here.wait_stream(side)
        return product(first, (one + two) * 0.01), product(second, one * 0.01), product(third, two * 0.01)

    want = work()
    torch.cuda.synchronize()
    replay, out = gpu.captured(work)
    for _ in range(20):
        for y in out:
            y.zero_()
        replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(out, want))
    return {}


def graphs_at_once():
    """Two graphs that were captured on one stream, replayed on two."""
    streams = [torch.cuda.Stream() for _ in "ab"]
    some = [there(weight("nf4", 4096, 4096, 64, True, i)) for i in range(2)]
    xs = [randn(1, 4096, dtype=torch.float16, seed=i) for i in range(2)]
    want = [product(w, x) for w, x in zip(some, xs)]
    made = [gpu.captured(lambda w=w, x=x: [product(w, x) for _ in range(20)]) for w, x in zip(some, xs)]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (replay, _) in zip(streams, made):
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    assert all(torch.equal(y, want[i]) for i in range(2) for y in made[i][1])
    own = _gpu.of(gpu.device)
    own.library.qc_matmul_check(own.handle, _gpu._call.error_at)
    return {}


def new_in_a_capture():
    """Weights whose first product is captured."""
    some, x = layers(5), randn(2, 256, dtype=torch.float16)
    replay, out = gpu.captured(lambda: through(some, x))
    x.copy_(randn(2, 256, dtype=torch.float16, seed=3))
    replay()
    gpu.synchronize()
    assert torch.equal(out, through(some, x))
    return {}


def two_streams():
    """Products on two streams at once, of weights that one of them made ready."""
    some, streams = layers(), [torch.cuda.Stream() for _ in "ab"]
    xs = [randn(m, 256, dtype=torch.float16, seed=m) for m in (1, 5)]
    want = [through(some, x) for x in xs]
    torch.cuda.synchronize()
    outs = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                outs[i].append(through(some, xs[i]))
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(y, want[i]) for y in outs[i])
    return {}


def nothing_waits():
    """A product returns while the device is still busy with what came before."""
    w, x = there(weight("nf4", 512, 1024, 64, True)), randn(1, 1024, dtype=torch.float16)
    many = randn(600, 1024, dtype=torch.float16)
    product(w, x), product(w, many), ops.dequantize(*w.tensors(), *w.numbers, torch.float16)
    torch.cuda.synchronize()
    event = torch.cuda.Event()
    torch.cuda._sleep(400_000_000)  # cycles, 0.2 s
    event.record()
    began = time.perf_counter()
    product(w, x), product(w, many), ops.dequantize(*w.tensors(), *w.numbers, torch.float16)
    took, busy = time.perf_counter() - began, not event.query()
    torch.cuda.synchronize()
    assert busy, took
    return {"milliseconds of the host": took * 1e3}


def gradients():
    """Of x and bias against double."""
    worst = 0.0
    for host in (weight("nf4", 96, 440, 64, True), weight("int8", 64, 64), weight("w8a16", 9, 256, 128)):
        matrix, w = exact(host), there(host)
        for dtype in HALVES:
            x, bias = randn(5, w.cols, dtype=dtype).requires_grad_(), randn(w.rows, dtype=dtype).requires_grad_()
            y = product(w, x, bias)
            up = randn(*y.shape, dtype=dtype, seed=7)
            y.backward(up)
            want, size = up.double() @ matrix, up.double().abs() @ matrix.abs()
            error = ((x.grad.double() - want).abs() / size).max().item()
            assert error < ERROR[dtype], (w.numbers, dtype, error)
            assert torch.allclose(bias.grad.float(), up.float().sum(0), rtol=0.02, atol=0.05)
            worst = max(worst, error)
    return {"worst": worst}


def compiled(mode):
    """torch.compile(fullgraph=True) of two layers and what is between."""
    first, second = (Linear(there(w), None, torch.float16) for w in (weight("nf4", 512, 256, 64, True),
                                                                     weight("nf4", 256, 512, 64)))

    def forward(x):
        return second(first(x).relu()) + x

    x = randn(4, 256, dtype=torch.float16)
    options = {"backend": "aot_eager"} if arguments.shim else {"mode": mode}
    made = torch.compile(forward, fullgraph=True, **options)
    with torch.no_grad():
        for seed in range(4):
            x = randn(4, 256, dtype=torch.float16, seed=seed)
            y = made(x).clone()
            assert torch.allclose(y, forward(x), rtol=5e-3, atol=5e-3), (y - forward(x)).abs().max().item()
    return {"options": options}


def compiled_default():
    return compiled("default")


def compiled_with_graphs():
    return compiled("reduce-overhead")


# ---- times --------------------------------------------------------------------------------------


def host_time():
    """Microseconds of the host for a call with one row, where the device has little to do."""
    w, x = there(weight("nf4", 256, 256, 64, True)), randn(1, 256, dtype=torch.float16)
    dense = w.dequantize(torch.float16)

    def microseconds(work, runs=20 if arguments.shim else 400):
        found = []
        for _ in range(5):
            gpu.synchronize()
            began = time.perf_counter()
            for _ in range(runs):
                work()
            found.append((time.perf_counter() - began) / runs * 1e6)
        return round(statistics.median(found), 1)

    with torch.no_grad():
        return {"qconv": microseconds(lambda: product(w, x)),
                "qconv, without torch's dispatcher": microseconds(
                    lambda: ops.linear_cuda(x, *w.tensors(), None, *w.numbers)),
                "torch restores": microseconds(lambda: ops.linear_torch(x, *w.tensors(), None, *w.numbers)),
                "dense": microseconds(lambda: torch.nn.functional.linear(x, dense))}


def big(rows, cols):
    """NF4 with double quantized scales, on the device."""
    n = rows * cols
    return QuantizedWeight("nf4", rows, cols, 64, 256, 0.01, torch.float16,
                           torch.randint(-128, 128, (n // 2,), dtype=torch.int8, device=gpu.device),
                           torch.randint(0, 256, (n // 64,), dtype=torch.uint8, device=gpu.device),
                           torch.tensor(CODE, device=gpu.device), torch.rand(n // 64 // 256, device=gpu.device) * 0.01,
                           torch.linspace(-1, 1, 256, device=gpu.device))


def device_time():
    """Microseconds of the device for NF4 28672 x 8192 beside torch's product in float16, in turn: calls between two
    events, and ten of them in a graph."""
    w, found = big(28672, 8192), {}
    dense = w.dequantize(torch.float16)
    for m in (1, 8, 16, 512):
        x = randn(m, 8192, dtype=torch.float16)
        works = {"qconv": lambda: product(w, x), "dense": lambda: torch.nn.functional.linear(x, dense)}
        graphs = {}
        for name, work in works.items():
            work()
            torch.cuda.synchronize()
            graphs[name] = gpu.captured(lambda work=work: [work() for _ in range(10)])[0]
        times = {(name, kind): [] for name in works for kind in ("call", "graph")}
        for _ in range(15):
            for (name, kind), list_ in times.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                begin.record()
                for _ in range(10 if kind == "call" else 1):
                    works[name]() if kind == "call" else graphs[name]()
                end.record()
                end.synchronize()
                list_.append(begin.elapsed_time(end) * 100)  # ten products, in microseconds each
        found[f"m={m}"] = {f"{name}, {kind}": round(statistics.median(v), 1) for (name, kind), v in times.items()}
        del graphs
    return found


# ---- a model ------------------------------------------------------------------------------------


def model():
    """kjv-llama in NF4: logits as on the CPU, generate, three steps of an added low-rank part."""
    try:
        import transformers
    except ImportError as e:
        return {"skipped": str(e)}
    program = os.environ.get("QCONV_PROGRAM", str(ROOT / "build" / "qconv"))
    text, found = "In the beginning God created the heaven and", {"transformers": transformers.__version__}
    with tempfile.TemporaryDirectory() as work:
        out = Path(work, "out")
        subprocess.run([program, "--progress", "never", "-q", "--to", "nf4", str(ROOT / "tests/data/kjv-llama/model"),
                        str(out)], check=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        ids = tokenizer(text, return_tensors="pt").input_ids
        with on_the_cpu(), torch.no_grad():
            host = qconv.load(out, device_map="cpu", dtype=torch.float32)
            want = host(ids).logits.double()
            said = host.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1]:].tolist()
        for dtype, most in ((torch.float16, 5e-3), (torch.bfloat16, 5e-2)):
            there = qconv.load(out, device_map=str(gpu.device), dtype=dtype)
            where = {p.device for p in there.parameters()}
            assert where == {gpu.device}, where
            with torch.no_grad():
                logits = there(ids.to(gpu.device)).logits.double().cpu()
            norm = ((logits - want).norm() / want.norm()).item()
            found[f"{dtype} logits"] = {"largest": (logits - want).abs().max().item(), "of the norm": norm}
            assert norm < most, (dtype, norm)
            if dtype == torch.float16:
                spoken = there.generate(ids.to(gpu.device), max_new_tokens=24, do_sample=False)
                spoken = spoken[0, ids.shape[1]:].tolist()
                found["same tokens"] = next((i for i, (a, b) in enumerate(zip(said, spoken)) if a != b), len(said))
                found["text"] = tokenizer.decode(spoken)
                assert found["same tokens"] >= 4, (tokenizer.decode(said), found["text"])
        found["losses"] = trained(there, ids.to(gpu.device))
    return found


def trained(there, ids):
    """Losses of three steps and after them, of a low-rank part beside each quantized layer."""
    parts = []
    for layer in [m for m in there.modules() if isinstance(m, Linear)]:
        down = torch.nn.Parameter(randn(layer.in_features, 4, seed=len(parts)) * 0.05)
        up = torch.nn.Parameter(torch.zeros(4, layer.out_features, device=gpu.device))
        parts += [down, up]
        layer.register_forward_hook(lambda _, x, y, down=down, up=up: y + (x[0].float() @ down @ up).to(y.dtype))
    optimizer, losses = torch.optim.SGD(parts, lr=0.5), []
    for _ in range(4):
        loss = there(ids, labels=ids).loss
        losses.append(round(loss.item(), 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in parts)
    assert losses[-1] < losses[0], losses
    return losses


def second_device():
    """A device that is not the thread's current one."""
    if torch.cuda.device_count() < 2:
        return {"skipped": "there is one GPU"}
    host = weight("nf4", 96, 440, 64, True)
    tensors = [None if t is None else t.to("cuda:1") for t in host.tensors()]
    x = torch.randn(3, 440, dtype=torch.float16, device="cuda:1")
    y = ops.linear(x, *tensors, None, *host.numbers)
    assert torch.cuda.current_device() == 0
    assert apart(y.to("cuda:0"), x.to("cuda:0"), exact(host)) < ERROR[x.dtype]
    return {}


CHECKS = (library, restored, products, experts, experts_in_graphs, shapes, refusals, addresses, graphs,
          new_in_a_capture, graphs_that_fork, graphs_at_once, two_streams, nothing_waits, gradients, second_device,
          host_time, device_time, model, compiled_default, compiled_with_graphs)
# A graph of the shim has none of torch's work on the CPU; test_interop_gpu_operators.py captures products alone.
ON_A_GPU = (graphs, new_in_a_capture, graphs_that_fork, graphs_at_once, two_streams, nothing_waits,
            second_device, device_time, compiled_with_graphs)


def main():
    results, failed = {}, 0
    for check in CHECKS:
        if (arguments.only and check.__name__ not in arguments.only) or (arguments.shim and check in ON_A_GPU):
            continue
        began = time.perf_counter()
        try:
            found = check()
            gpu.synchronize()
            results[check.__name__] = {"ok": True, **found}
        except Exception as e:
            failed += 1
            where = traceback.extract_tb(e.__traceback__)[-1]
            results[check.__name__] = {"ok": False, "error": f"{type(e).__name__}: {e}"[:2000],
                                       "where": f"{where.filename}:{where.lineno}",
                                       "trace": traceback.format_exc()[-4000:]}
        result = results[check.__name__] | {"seconds": round(time.perf_counter() - began, 2)}
        results[check.__name__] = result
        shown = {k: v for k, v in result.items() if k not in ("ok", "trace")}
        print(f"{'ok    ' if result['ok'] else 'FAILED'} {check.__name__}: {json.dumps(shown)}", flush=True)
        Path(arguments.out).write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    if not arguments.shim and not torch.cuda.is_available():
        print("torch sees no GPU")
        sys.exit(77)
    gpu = Shim() if arguments.shim else Gpu()
    sys.exit(main())

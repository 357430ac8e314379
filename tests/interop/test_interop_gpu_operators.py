"""The operators' way on a GPU, with qconv's kernels and tensors on the CPU (shim_runtime.py).

Products are compared with products in double, restored weights with those of the CPU, bit for bit. Then what is kept
between products: weights that are made ready, plans; and what a captured graph does with them.
"""
import gc
import itertools
import os
import random
import subprocess
import sys
import threading
import unittest
from dataclasses import replace

import interop_support as s
import torch

SHIM = s.BUILD / "shim" / "libqconv_cuda.so"
CUBLAS = s.BUILD / "tests" / "shim" / "libfake_cublas.so"
THERE = SHIM.is_file() and CUBLAS.is_file()
if THERE:
    os.environ |= {"QCONV_CUDA_LIBRARY": str(SHIM), "QCONV_LIBCUBLAS": str(CUBLAS), "QC_SHIM_MEMORY": "any",
                   "QC_SHIM_STREAMS": "lazy"}
import test_interop_operators as operators  # noqa: E402
from test_interop_operators import ops, qconv, weight, weights  # noqa: E402
import shim_runtime  # noqa: E402
from qconv import _gpu  # noqa: E402
from qconv._weights import Stored  # noqa: E402
from qconv.torch import Linear  # noqa: E402
STREAMS = shim_runtime.start() if THERE else None

ROWS = (0, 1, 2, 5, 16, 64, 300)
# A weight is rounded once to 16 bits, where the kernels do not take its codes, and y once; sums are floats.
ERROR = {torch.float16: 2 * 2 ** -11, torch.bfloat16: 2 * 2 ** -8, torch.float32: 1e-6}


def setUpModule():
    if not THERE:
        raise unittest.SkipTest("the build has no shim/libqconv_cuda.so and fake cuBLAS")
    for name in ("linear", "dequantize", "experts"):
        AsForGpus.library.impl(name, AsForGpus.chosen(getattr(ops, f"{name}_cuda"), getattr(ops, f"{name}_cpu")), "CPU",
                               allow_override=True)


class AsForGpus:
    """Mixed into cases for which torch's own way to the operators of the CPU leads to those for GPUs."""
    library, active = torch.library.Library("qconv", "IMPL"), False

    @classmethod
    def setUpClass(cls):
        AsForGpus.active = True
        cls.addClassCleanup(setattr, AsForGpus, "active", False)

    @classmethod
    def chosen(cls, there, here):
        return lambda *a: (there if cls.active else here)(*a)


def product(w, x, bias=None):
    return ops.linear_cuda(x, *w.tensors(), bias, *w.numbers)


def odd(seed, rows=37, cols=71):
    """A weight that is repacked, so that stale memory shows."""
    return weight("int8", rows, cols, seed=seed)


class Case(unittest.TestCase):
    def is_product(self, y, w, x, bias=None):
        exact = w.dequantize(torch.float32).double()
        want = x.double() @ exact.T + (0 if bias is None else bias.double())
        size = x.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
        self.assertEqual((y.dtype, y.shape), (x.dtype, want.shape))
        apart = ((y.double() - want).abs() / size.clamp_min(1e-30)).max().item() if y.numel() else 0.0
        self.assertLess(apart, ERROR[x.dtype], (w.numbers, x.shape))
        return apart

    def same(self, a, b):
        self.assertTrue(torch.equal(a, b))


class Numbers(Case):
    def test_restored_weights(self):
        for w in weights():
            for dtype in ERROR:
                self.same(ops.dequantize_cuda(*w.tensors(), *w.numbers, dtype), w.dequantize(dtype))

    def test_products(self):
        """Every weight with some numbers of rows; some weights with all of them."""
        worst, count = {}, 0
        for i, w in enumerate(weights()):
            some = random.Random(i)
            for dtype, m in itertools.product(ERROR, ROWS) if i % 12 == 0 else [(d, some.choice(ROWS)) for d in ERROR]:
                g = torch.Generator().manual_seed(m)
                x = torch.randn(m, w.cols, generator=g).to(dtype)
                bias = torch.randn(w.rows, generator=g).to(dtype) if m % 2 else None
                apart = self.is_product(product(w, x, bias), w, x, bias)
                worst[dtype] = max(worst.get(dtype, 0), apart)
                count += 1
        s.note(f"{count} products of the kernels for GPUs, of the sums of magnitudes: " +
               ", ".join(f"{str(d)[6:]} {v:.1e}" for d, v in worst.items()))

    def test_wide_weights(self):
        """The kernels that read weights once, with blocks that meet in the workspace."""
        for wide in (("nf4", 64, True), ("nf4", 64, False), ("int8", 0, False), ("int8-block", 64, True)):
            w = weight(wide[0], 64, 4096, *wide[1:])
            for dtype, m in itertools.product((torch.float16, torch.bfloat16), (1, 8, 9)):
                x = torch.randn(m, 4096).to(dtype)
                self.is_product(product(w, x), w, x)
                self.same(product(w, x), product(w, x))

    def test_shapes_of_x(self):
        w = weight("nf4", 96, 128, 64)
        x = torch.randn(2, 3, 256).half()[:, :, ::2]
        self.same(product(w, x), product(w, x.contiguous()))
        rows = torch.randn(5, 200).half()[:, :128]
        self.same(product(w, rows), product(w, rows.contiguous()))
        for shifted in (torch.randn(5 * 128 + 3).half()[3:].view(5, 128), torch.randn(129).half()[1:]):
            self.same(product(w, shifted.clone()), product(w, shifted))  # planned for 16 bytes, then for 2
        one = torch.randn(1, 128).half()
        self.same(product(w, one.expand(5, 128)), product(w, one.expand(5, 128).contiguous()))
        self.assertEqual(product(w, torch.empty(2, 0, 128).half()).shape, (2, 0, 96))
        self.assertEqual(product(w, torch.ones(128).half()).shape, (96,))
        bias = torch.randn(192)[::2]
        self.is_product(product(w, one, bias), w, one, bias.half())

    def test_parts_of_tensors(self):
        """Weights whose tensors begin anywhere, as those of experts do."""
        for w, shift in itertools.product((weight("int8", 9, 70), weight("w8a16", 7, 256, 128)), (0, 1, 2, 8)):
            held = torch.zeros(w.codes.numel() + shift, dtype=w.codes.dtype)
            held[shift:] = w.codes
            moved = replace(w, codes=held[shift:])
            x = torch.randn(3, w.cols).half()
            self.is_product(product(moved, x), w, x)


class Experts(Case):
    def products(self, each, offsets, x, y):
        for w, begin, end in zip(each, offsets.tolist(), offsets.tolist()[1:]):
            self.is_product(y[begin:end], w, x[begin:end])
        self.assertFalse(y[:offsets[0]].any() or y[offsets[-1]:].any())

    def test_products(self):
        """Fewer rows than experts, and more; everything that a GPU has no kernel for is a product each."""
        for form, counts, dtype in itertools.product(operators.Experts.FORMS, ((1, 0, 2), (3, 0, 1, 6), (70, 1, 0)), ERROR):
            each, offsets, weights = operators.experts_of(*form, counts=counts)
            x = torch.randn(4, form[2]).to(dtype)
            rows = torch.randint(0, 4, (sum(counts) + 2,), dtype=torch.int32)
            self.products(each, offsets, x[rows], ops.experts_cuda(x, offsets, rows, *weights))
            x = x[rows]
            self.products(each, offsets + 1, x, ops.experts_cuda(x, offsets + 1, None, *weights))
            wide = torch.randn(len(x), 2 * form[2]).to(dtype)[:, :form[2]]
            self.products(each, offsets, wide, ops.experts_cuda(wide, offsets, None, *weights))

    def test_biases_and_weights_of_rows(self):
        """Of all forms and paths; a product without them is not that of the one before."""
        for form, counts, dtype in itertools.product(operators.Experts.FORMS, ((1, 0, 2, 0), (70, 1, 0, 3)), ERROR):
            each, offsets, weights = operators.experts_of(*form, counts=counts)
            count = sum(counts)
            x, rows = torch.randn(4, form[2]).to(dtype), torch.randint(0, 4, (count + 2,), dtype=torch.int32)
            by, bias = operators.more_of(form, dtype, count + 2)
            y = ops.experts_cuda(x, offsets, rows, *operators.with_more(weights, by, bias))
            self.assertFalse(y[count:].any())
            for e, (w, a, b) in enumerate(zip(each, offsets.tolist(), offsets.tolist()[1:])):
                taken, exact, own = x[rows[a:b]].double(), w.dequantize(torch.float32).double(), bias[e].double()
                want = (taken @ exact.T + own) * by[a:b, None].double()
                size = (taken.abs() @ exact.abs().T + own.abs()) * by[a:b, None].double().abs()
                apart = ((y[a:b].double() - want).abs() / size).max().item() if b > a else 0
                self.assertLess(apart, ERROR[dtype], (form, counts, dtype))
            self.products(each, offsets, x[rows], ops.experts_cuda(x, offsets, rows, *weights))

    def test_graphs(self):
        """Captured once, and run with other offsets, rows and x. The second weight is new in the capture."""
        gpu = _gpu.of(torch.device("cpu"))
        for dtype, known in itertools.product((torch.float16, torch.bfloat16), (True, False)):
            each, offsets, weights = operators.experts_of("nf4", 48, 96, 32, True)
            x, rows = torch.randn(12, 96).to(dtype), torch.arange(12, dtype=torch.int32)
            if known:
                ops.experts_cuda(x, offsets, rows, *weights)
            count, out = len(gpu.weights), []
            with shim_runtime.Graph(STREAMS) as graph:
                out.append(ops.experts_cuda(x, offsets, rows, *weights))
            self.assertEqual(len(gpu.weights), count)
            for ends in ((0, 1, 1, 8, 12), (0, 12, 12, 12, 12), (0, 0, 0, 0, 12)):
                offsets.copy_(torch.tensor(ends))
                rows.copy_(torch.randperm(12))
                x.copy_(torch.randn(12, 96))
                graph.replay()
                self.products(each, offsets, x[rows.long()], out[0])

    def test_kept(self):
        gpu = _gpu.of(torch.device("cpu"))
        _, offsets, weights = operators.experts_of("int8", 8, 64)
        x = torch.randn(10, 64).half()
        y, count = ops.experts_cuda(x, offsets, None, *weights), len(gpu.weights)
        self.same(ops.experts_cuda(x, offsets, None, *weights), y)
        self.assertEqual(len(gpu.weights), count)
        del weights
        gc.collect()
        self.assertEqual(len(gpu.weights), count - 1)

    def test_offsets_that_are_wrong(self):
        _, offsets, weights = operators.experts_of("int8", 8, 64)
        with self.assertRaisesRegex(qconv.UsageError, "offsets that decrease"):
            ops.experts_cuda(torch.randn(10, 64).half(), offsets.flip(0).contiguous(), None, *weights)


class Refusals(operators.Refusals):
    """What the CPU refuses, in the same words."""

    def setUp(self):
        linear, dequantize = ops.linear, ops.dequantize
        ops.linear, ops.dequantize = ops.linear_cuda, ops.dequantize_cuda
        self.addCleanup(setattr, ops, "linear", linear)
        self.addCleanup(setattr, ops, "dequantize", dequantize)


class Torch(AsForGpus, operators.Torch):
    """What torch sees of the operators, with the CPU's implementation replaced by that for GPUs."""
    test_after_fork = None


class Kept(Case):
    def gpu(self):
        return _gpu.of(torch.device("cpu"))

    def test_a_weight_is_made_ready_once(self):
        w, x = odd(1), torch.randn(2, 71).half()
        product(w, x)
        before, plans = dict(self.gpu().weights), {k: len(v) for k, v in self.gpu().plans.items()}
        for _ in range(3):
            product(w, x)
            product(w, x.clone())
            product(replace(w, codes=w.codes.detach()), x)  # another tensor of the same storage
        self.assertEqual(self.gpu().weights, before)
        self.assertEqual({k: len(v) for k, v in self.gpu().plans.items()}, plans)

    def test_a_weight_that_dies_is_forgotten(self):
        gpu, x = self.gpu(), torch.randn(2, 71).half()
        count = len(gpu.weights)
        w = odd(2)
        product(w, x)
        self.assertEqual(len(gpu.weights), count + 1)
        del w
        gc.collect()
        self.assertEqual(len(gpu.weights), count)
        self.assertTrue(gpu.retired)
        w = odd(3)
        product(w, x)  # frees
        self.assertEqual(gpu.retired, [])

    def test_an_address_that_is_used_again(self):
        memory = bytearray(37 * 71)
        base, x, seen, alive = odd(0), torch.randn(2, 71).half(), set(), []
        for seed in range(6):
            memory[:] = odd(seed).codes.numpy().tobytes()
            w = replace(base, codes=torch.frombuffer(memory, dtype=torch.int8))
            seen.add(w.codes.data_ptr())
            self.is_product(product(w, x), w, x)
            alive += [w] if seed >= 3 else []
            del w
        self.assertEqual(len(seen), 1)
        scales = bytearray(4 * 37)
        w = odd(0)
        for scale in (1e-6, 1.0, 1e6):  # the power of two that was found for other scales would be wrong
            scales[:] = (torch.rand(37).add(0.5) * scale).numpy().tobytes()
            part = replace(w, scales=torch.frombuffer(scales, dtype=torch.uint8))
            x = torch.randn(16, 71).bfloat16()
            self.is_product(product(part, x), part, x)
            del part

    def test_a_weight_that_is_written_to(self):
        w, x = odd(4), torch.randn(2, 71).half()
        product(w, x)
        for seed in (5, 6):
            with torch.no_grad():
                w.codes.copy_(odd(seed).codes)
            self.is_product(product(w, x), w, x)
            with torch.no_grad():
                w.scales.copy_(odd(seed + 10).scales)
            self.is_product(product(w, x), w, x)
        other = odd(7)
        w.codes.set_(other.codes.untyped_storage(), 0, other.codes.shape)
        self.is_product(product(w, x), w, x)

    def test_a_layer_that_is_loaded_anew(self):
        layer, other = (Linear(odd(seed), None, torch.float16) for seed in (8, 9))
        x = torch.randn(2, 71).half()
        for module in (layer, other):
            for role in ("codes", "scales"):
                module.stored = [*module.stored, *_stored(role, getattr(module, role))]
        product(layer.quantized, x)
        layer.load_state_dict(other.state_dict())
        self.same(product(layer.quantized, x), product(other.quantized, x))

    def test_tensors_without_a_version(self):
        with torch.inference_mode():
            w, x = odd(10), torch.randn(2, 71).half()
            self.is_product(product(w, x), w, x)

    def test_a_failure_keeps_nothing(self):
        gpu, w = self.gpu(), odd(11)
        count, prepare = len(gpu.weights), gpu.library.qc_matmul_prepare
        gpu.library.qc_matmul_prepare = lambda h, *rest: prepare(None, *rest)
        try:
            with self.assertRaisesRegex(qconv.UsageError, "handle is NULL"):
                product(w, torch.randn(2, 71).half())
        finally:
            gpu.library.qc_matmul_prepare = prepare
        self.assertEqual(len(gpu.weights), count)
        self.is_product(product(w, torch.ones(2, 71).half()), w, torch.ones(2, 71).half())

    def test_many_sizes(self):
        """More shapes of x than plans are kept."""
        most, _gpu.PLANS = _gpu.PLANS, 4
        try:
            w = odd(12)
            for m in (1, 2, 3, 4, 5, 40, 6, 1, 2, 200):
                x = torch.randn(m, 71).half()
                self.is_product(product(w, x), w, x)
            self.assertLessEqual(max(len(p) for key, p in self.gpu().plans.items() if key[1] == 37), 4)
        finally:
            _gpu.PLANS = most

    def test_threads(self):
        """Each with a stream of its own, the weights shared, some of them new to all."""
        some = [weight("nf4", 64, 1024, 64, True, seed=i) for i in range(3)]
        x = torch.randn(4, 1024).half()
        want = [product(w, x) for w in some[:2]]
        want.append(None)
        found, wrong, local = [], [], threading.local()
        kept = STREAMS.stream
        STREAMS.stream = lambda index: local.stream

        def work():
            try:
                local.stream = STREAMS.made()
                for i in range(6):
                    found.append((i % 3, product(some[i % 3], x)))
            except BaseException as e:
                wrong.append(e)

        try:
            threads = [threading.Thread(target=work) for _ in range(4)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        finally:
            STREAMS.stream = kept
        self.assertEqual(wrong, [])
        want[2] = product(some[2], x)
        for i, y in found:
            self.same(y, want[i])


def _stored(role, tensor):
    return [Stored({"codes": "weight", "scales": "SCB"}[role], role, torch.uint8, (tensor.numel(),))]


class Graphs(Case):
    CASES = (("nf4", 64, 4096, 64, 1), ("nf4", 64, 4096, 64, 9), ("int8", 37, 71, 0, 3), ("w4a16", 64, 64, 32, 5))

    def weights(self):
        return [(weight(form, rows, cols, block), m) for form, rows, cols, block, m in self.CASES]

    def captured(self, some, xs, out, stream=None):
        """Products of each weight, one behind the other, as a graph."""
        with shim_runtime.Graph(STREAMS, stream) as graph:
            for (w, _), x, y in zip(some, xs, out):
                y.append(product(w, x))
        return graph

    def check(self, some, graph, xs, out):
        for seed in range(3):
            g = torch.Generator().manual_seed(seed)
            for x in xs:
                x.copy_(torch.randn(x.shape, generator=g))
            graph.replay()
            shim_runtime.call("qc_matmul_check", _gpu._gpus[0].handle)
            for (w, _), x, y in zip(some, xs, out):
                self.same(y[0], product(w, x))  # plain products in between

    def test_replays(self):
        some = self.weights()
        xs, out = [torch.zeros(m, w.cols).half() for w, m in some], [[] for _ in some]
        for (w, _), x in zip(some, xs):
            product(w, x)
        count = len(_gpu._gpus[0].weights)
        graph = self.captured(some, xs, out)
        self.check(some, graph, xs, out)
        self.assertEqual(len(_gpu._gpus[0].weights), count)

    def test_weights_that_are_new_in_a_capture(self):
        product(odd(0), torch.zeros(1, 71).half())  # the device has its handle
        some, gpu = self.weights(), _gpu._gpus[0]
        count = len(gpu.weights)
        xs, out = [torch.zeros(m, w.cols).half() for w, m in some], [[] for _ in some]
        graph = self.captured(some, xs, out)
        self.assertEqual(len(gpu.weights), count)
        self.check(some, graph, xs, out)

    def test_the_first_product_is_not_captured(self):
        made = dict(_gpu._gpus)
        _gpu._gpus.clear()
        try:
            with shim_runtime.Graph(STREAMS), self.assertRaisesRegex(qconv.UsageError, "multiply once before"):
                product(odd(0), torch.zeros(1, 71).half())
        finally:
            _gpu._gpus.update(made)


class Without(unittest.TestCase):
    """What is said and done where there are no kernels, no driver, or no cuBLAS."""

    def says(self, **environment):
        code = f"""
import sys, warnings
sys.path[:0] = {[str(s.ROOT / "python"), str(s.ROOT / "tests" / "interop")]!r}
import torch
import test_interop_operators as t
from qconv import _cuda, _gpu
import qconv
if qconv.cuda_library().problem is None:
    import shim_runtime
    shim_runtime.start()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    for form, block in (("nf4", 64), ("w4a16", 32), ("nf4", 64)):
        w, x = t.weight(form, 64, 64, block), torch.randn(3, 64).bfloat16()
        y = t.ops.linear_cuda(x, *w.tensors(), None, *w.numbers)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, w.dequantize(x.dtype)), rtol=0.02, atol=0.2)
        assert torch.equal(t.ops.dequantize_cuda(*w.tensors(), *w.numbers, x.dtype), w.dequantize(x.dtype))
print(bool(qconv.cuda_library().path), qconv.cuda_library().problem)
print(*[f"{{w.category.__name__}}: {{w.message}}" for w in said], sep="\\n")
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env={**os.environ, "QCONV_BUILD": str(s.BUILD), **environment})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()

    def test_no_driver(self):
        why = "GPUs cannot be used: the NVIDIA driver was not found"
        self.assertEqual(self.says(QC_SHIM_DEVICES="nodriver"), [
            f"True {why}", f"QconvWarning: qconv multiplies with torch on cpu, not with its own kernels: {why}"])

    def test_no_library(self):
        if (s.ROOT / "build" / "libqconv_cuda.so").is_file():
            self.skipTest("the source tree's build has the library")
        first, *said = self.says(QCONV_CUDA_LIBRARY="/nowhere/libqconv_cuda.so")
        self.assertRegex(first, "False libqconv_cuda.so is in none of these places: .*/nowhere/libqconv_cuda.so")
        self.assertEqual(len(said), 1)

    def test_another_library(self):
        first, *said = self.says(QCONV_CUDA_LIBRARY=str(s.BUILD / "libqconv.so"))
        self.assertRegex(first, "True .*libqconv.so cannot be used: .*undefined symbol: qc_cuda_build")
        self.assertEqual(len(said), 1)

    def test_no_cublas(self):
        first, *said = self.says(QCONV_LIBCUBLAS="/nowhere/libcublas.so")
        self.assertEqual((first, len(said)), ("True None", 1))
        self.assertRegex(said[0], "QconvWarning: qconv multiplies integers of compressed-tensors with torch on cpu, "
                                  "and many rows of x without cuBLAS: .*/nowhere/libcublas.so could not be opened")


if __name__ == "__main__":
    s.main()

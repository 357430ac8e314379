"""qconv::linear, qconv::dequantize and qconv::experts as torch sees them, for every form and for shapes that are no whole blocks.

The CPU's numbers are compared with those of torch's own operations over the same codes (the operators' way on a GPU),
bit for bit, and products with products in double. torch.library.opcheck goes over schema, autograd, fake tensors and
tracing.
"""
import copy
import itertools
import multiprocessing
import os
import random
import unittest
from dataclasses import replace

import interop_support as s
import torch

import qconv
from qconv import ops
from qconv._library import is_packed, row_bytes
from qconv._weights import ROLES, QuantizedWeight
from qconv.torch import Linear, QuantizedTensor, Stack, routed

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((64, 64), (7, 192), (33, 70), (5, 2), (96, 440))
# Of x quantized to integers: 2^-15 of the largest |x| of 64 and of the largest value of a code; random signs.
INTEGER = 2e-4
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2 ** -8, torch.float16: 2 ** -11}


def weight(form, rows, cols, block=0, nested=False, seed=0):
    """A random one. Forms of compressed-tensors have whole words and groups in a row."""
    g = torch.Generator().manual_seed(seed)
    n = rows * cols
    codes = torch.randint(-127, 128, ((n + 1) // 2 if form == "nf4" else n,), generator=g, dtype=torch.int8)
    if is_packed(form):
        codes = torch.randint(0, 256, (rows * row_bytes(form, cols),), generator=g, dtype=torch.uint8).view(torch.int8)
    count = -(-n // block) if block else rows
    scales = torch.rand(count, generator=g) + 0.5
    maps = {"code_map": torch.tensor(s.NF4_CODE)} if form == "nf4" else {}
    offset, nested_block = 0.0, 0
    if nested:
        scales = torch.randint(0, 256, (count,), generator=g, dtype=torch.uint8)
        maps["nested_absmax"] = torch.rand(-(-count // 256), generator=g)
        maps["nested_map"] = torch.linspace(-1, 1, 256)
        offset, nested_block = 0.375, 256
    return QuantizedWeight(form, rows, cols, block, nested_block, offset, torch.bfloat16, codes,
                           scales.view(torch.uint8), **maps, name=f"{form}.weight")


def weights():
    for (rows, cols), block in itertools.product(SHAPES, (32, 64, 128, 4096)):
        for nested in (False, True):
            yield weight("nf4", rows, cols, block, nested)
            yield weight("int8-block", rows, cols, block, nested)
    for rows, cols in SHAPES:
        yield weight("int8", rows, cols)
        yield weight("w8a8", rows, cols)
    for rows, cols, block in ((64, 64, 32), (7, 256, 128), (9, 64, 0), (3, 192, 64), (5, 75, 0), (2, 3, 0)):
        for bits in range(2, 9):  # a row of 4 bits begins with a byte
            yield weight(f"w{bits}a16", rows, cols + cols % 2 * (bits == 4), block)


class Numbers(unittest.TestCase):
    def test_restored_weights(self):
        count = 0
        for w in weights():
            for dtype in FLOATS:
                mine = ops.dequantize(*w.tensors(), *w.numbers, dtype)
                other = ops.dequantize_torch(*w.tensors(), *w.numbers, dtype)
                self.assertEqual(mine.shape, (w.rows, w.cols))
                self.assertTrue(torch.equal(mine, other), (w.numbers, dtype))
                count += 1
        s.note(f"{count} restored weights: libqconv's and torch's are equal, bit for bit")

    def test_products(self):
        """Few rows of x take integers, more take floats, many are torch's."""
        worst = {}
        for w in weights():
            exact = w.dequantize(torch.float32).double()
            for dtype, m in zip(FLOATS, random.Random(w.codes.numel()).sample((1, 3, 17, 300), 3)):
                g = torch.Generator().manual_seed(m)
                x = torch.randn(m, w.cols, generator=g).to(dtype)
                bias = torch.randn(w.rows, generator=g).to(dtype) if m % 2 else None
                y = ops.linear(x, *w.tensors(), bias, *w.numbers)
                self.assertEqual((y.dtype, y.shape), (dtype, (m, w.rows)))
                want = x.double() @ exact.T + (0 if bias is None else bias.double())
                size = x.double().abs() @ exact.abs().T + (0 if bias is None else bias.double().abs())
                apart = ((y.double() - want).abs() / size).max().item()
                worst[dtype] = max(worst.get(dtype, 0), apart)
                # Where the processor multiplies in bfloat16, the weight and what is before the bias are rounded, too.
                rounded = 2 if dtype is torch.bfloat16 and m > ops.RESTORED_ABOVE else 1
                self.assertLess(apart, INTEGER + rounded * ROUNDING[dtype], (w.numbers, dtype, m))
        s.note("products against double, of the sums of magnitudes: " +
               ", ".join(f"{str(d)[6:]} {v:.1e}" for d, v in worst.items()))

    def test_shapes_of_x(self):
        w = weight("nf4", 96, 128, 64)
        x = torch.randn(2, 3, 256)[:, :, ::2]  # columns that are not side by side
        y = ops.linear(x, *w.tensors(), None, *w.numbers)
        self.assertTrue(torch.equal(y, ops.linear(x.contiguous(), *w.tensors(), None, *w.numbers)))
        rows = torch.randn(5, 200)[:, :128]  # rows with a gap behind each
        self.assertTrue(torch.equal(ops.linear(rows, *w.tensors(), None, *w.numbers),
                                    ops.linear(rows.contiguous(), *w.tensors(), None, *w.numbers)))
        for one in (torch.randn(1, 128), torch.randn(3, 1, 128)):  # rows that are one in memory
            many = one.expand(*one.shape[:-2], 4, 128)
            self.assertTrue(torch.equal(ops.linear(many, *w.tensors(), None, *w.numbers),
                                        ops.linear(many.contiguous(), *w.tensors(), None, *w.numbers)))
        self.assertEqual(ops.linear(torch.empty(0, 128), *w.tensors(), None, *w.numbers).shape, (0, 96))
        self.assertEqual(ops.linear(torch.ones(128), *w.tensors(), None, *w.numbers).shape, (96,))

    def test_many_rows_in_parts(self):
        """The weight is restored a part at a time."""
        w = weight("int8", 96, 128)
        x, bias = torch.randn(300, 128), torch.randn(96)
        whole = ops.linear(x, *w.tensors(), bias, *w.numbers)
        at_a_time, ops.RESTORED_BYTES = ops.RESTORED_BYTES, 10 * 128 * 4
        try:
            parts = ops.linear(x, *w.tensors(), bias, *w.numbers)
        finally:
            ops.RESTORED_BYTES = at_a_time
        torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-4)


class Torch(unittest.TestCase):
    def test_opcheck(self):
        for w in (weight("nf4", 33, 70, 64, True), weight("int8", 8, 64), weight("w4a16", 64, 64, 32)):
            for dtype, grad in itertools.product(FLOATS, (False, True)):
                x = torch.randn(2, 3, w.cols).to(dtype).requires_grad_(grad)
                bias = torch.randn(w.rows).to(dtype).requires_grad_(grad)
                torch.library.opcheck(ops.linear, (x, *w.tensors(), bias, *w.numbers))
            torch.library.opcheck(ops.dequantize, (*w.tensors(), *w.numbers, torch.bfloat16))

    def test_gradients(self):
        for w in (weight("nf4", 33, 70, 64, True), weight("int8-block", 64, 64, 32), weight("w8a16", 7, 256, 128)):
            x, bias = torch.randn(2, 3, w.cols, requires_grad=True), torch.randn(w.rows, requires_grad=True)
            (ops.linear(x, *w.tensors(), bias, *w.numbers) ** 2).sum().backward()
            mine, x.grad, mine_bias, bias.grad = x.grad, None, bias.grad, None
            (torch.nn.functional.linear(x, w.dequantize(torch.float32), bias) ** 2).sum().backward()
            torch.testing.assert_close(mine, x.grad, rtol=1e-3, atol=1e-2 * x.grad.abs().max().item())
            torch.testing.assert_close(mine_bias, bias.grad, rtol=1e-3, atol=1e-3 * bias.grad.abs().max().item())

    def test_compile(self):
        layer = Linear(weight("nf4", 96, 128, 64, True), torch.nn.Parameter(torch.randn(96)), torch.float32)
        x = torch.randn(4, 128)
        compiled = torch.compile(lambda x: layer(x).relu() + 1, fullgraph=True, backend="aot_eager")
        self.assertTrue(torch.equal(compiled(x), layer(x).relu() + 1))

    def test_after_fork(self):
        """A child has none of its parent's threads; it makes its own."""
        w, x = weight("nf4", 96, 128, 64), torch.randn(1, 128)
        want = ops.linear(x, *w.tensors(), None, *w.numbers)
        pipe, other = multiprocessing.Pipe()
        if (child := os.fork()) == 0:
            other.send(torch.equal(ops.linear(x, *w.tensors(), None, *w.numbers), want))
            os._exit(0)
        self.assertTrue(pipe.poll(30) and pipe.recv())
        os.waitpid(child, 0)


COUNTS = (3, 0, 1, 6)  # rows of experts


def experts_of(form, rows, cols, block=0, nested=False, counts=COUNTS):
    """(weights, offsets, what qconv::experts takes from row_weights on, without these and a bias)"""
    each = [replace(weight(form, rows, cols, block, nested, seed=i), offset=i / 8 if nested else 0.0)
            for i in range(len(counts))]
    tensors = [t if t is None or role.endswith("map") else torch.stack([getattr(w, role) for w in each])
               for role, t in zip(ROLES, each[0].tensors())]
    offsets = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
    return each, offsets, (None, *tensors, None, *each[0].numbers[:-1], [w.offset for w in each])


def with_more(weights, row_weights, bias):
    """What experts_of returned, with these."""
    return row_weights, *weights[1:6], bias, *weights[7:]


def more_of(form, dtype, rows, grad=False):
    """(row_weights, bias) for experts_of(*form), of either sign."""
    return (torch.rand(rows) - 0.25).requires_grad_(grad), torch.randn(len(COUNTS), form[1]).to(dtype).requires_grad_(grad)


class Experts(unittest.TestCase):
    FORMS = (("nf4", 33, 70, 64, True), ("nf4", 8, 64, 32), ("int8", 8, 64), ("int8-block", 7, 192, 64),
             ("w8a16", 7, 256, 128))

    def test_products(self):
        for form, dtype in itertools.product(self.FORMS, FLOATS):
            each, offsets, weights = experts_of(*form)
            x, rows = torch.randn(5, form[2]).to(dtype), torch.randint(0, 5, (12,), dtype=torch.int32)
            y = ops.experts(x, offsets, rows, *weights)
            self.assertEqual((y.shape, y.dtype), ((12, form[1]), dtype))
            for w, begin, end in zip(each, offsets.tolist(), offsets.tolist()[1:]):
                want = ops.linear(x[rows[begin:end]], *w.tensors(), None, *w.numbers)
                self.assertTrue(torch.equal(y[begin:end], want))
            self.assertFalse(y[10:].any())
            self.assertTrue(torch.equal(y, ops.experts(x[rows], offsets, None, *weights)))

    def test_biases_and_weights_of_rows(self):
        """In float, and rounded once; rows outside of the offsets stay zero."""
        for form, dtype in itertools.product(self.FORMS, FLOATS):
            each, offsets, weights = experts_of(*form)
            x, rows = torch.randn(5, form[2]).to(dtype), torch.randint(0, 5, (12,), dtype=torch.int32)
            by, bias = more_of(form, dtype, 12)
            for some_by, some_bias in ((by, bias), (by, None), (None, bias)):
                y = ops.experts(x, offsets, rows, *with_more(weights, some_by, some_bias))
                self.assertEqual((y.shape, y.dtype), ((12, form[1]), dtype))
                self.assertFalse(y[10:].any())
                for e, (w, begin, end) in enumerate(zip(each, offsets.tolist(), offsets.tolist()[1:])):
                    taken, exact = x[rows[begin:end]].double(), w.dequantize(torch.float32).double()
                    want, size = taken @ exact.T, taken.abs() @ exact.abs().T
                    if some_bias is not None:
                        want, size = want + bias[e].double(), size + bias[e].double().abs()
                    if some_by is not None:
                        want, size = want * by[begin:end, None].double(), size * by[begin:end, None].double().abs()
                    apart = ((y[begin:end].double() - want).abs() / size).max().item() if end > begin else 0
                    self.assertLess(apart, INTEGER + ROUNDING[dtype], (form, dtype))

    def test_opcheck(self):
        for form in self.FORMS[:3]:
            _, offsets, weights = experts_of(*form)
            rows = torch.randint(0, 5, (12,), dtype=torch.int32)
            for dtype, grad in itertools.product(FLOATS, (False, True)):
                x = torch.randn(5, form[2]).to(dtype).requires_grad_(grad)
                torch.library.opcheck(ops.experts, (x, offsets, rows, *weights))
                torch.library.opcheck(ops.experts, (x, offsets, rows, *with_more(weights, *more_of(form, dtype, 12, grad))))
            torch.library.opcheck(ops.experts, (torch.randn(12, form[2]), offsets, None, *weights))

    def test_gradients(self):
        """Of all three, of each alone, by number and in order, and with rows that belong to no expert."""
        for form, alone, indexed in itertools.product(self.FORMS, (None, 0, 1, 2), (False, True)):
            each, offsets, weights = experts_of(*form)
            offsets = offsets + 1
            rows = torch.randint(0, 12, (12,), dtype=torch.int32) if indexed else torch.arange(12)
            leaves = [torch.randn(12, form[2]), *more_of(form, torch.float32, 12)]
            for i, leaf in enumerate(leaves):
                leaf.requires_grad_(alone in (None, i))
            x, by, bias = leaves
            (ops.experts(x, offsets, rows if indexed else None, *with_more(weights, by, bias)) ** 2).sum().backward()
            mine = [leaf.grad for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
            (torch.cat([(x[rows[a:b]] @ w.dequantize(torch.float32).T + bias[e]) * by[a:b, None] for e, (w, a, b) in
                        enumerate(zip(each, offsets.tolist(), offsets.tolist()[1:]))]) ** 2).sum().backward()
            for got, leaf in zip(mine, leaves):
                self.assertEqual(got is None, not leaf.requires_grad)
                if got is not None:
                    torch.testing.assert_close(got, leaf.grad, rtol=1e-3, atol=1e-2 * leaf.grad.abs().max().item())

    def test_refusals(self):
        _, offsets, weights = experts_of("nf4", 8, 64, 32)
        x = torch.randn(10, 64)
        for words, wrong in (("offsets of 4 experts", offsets[1:]), ("int32", offsets.long()),
                             ("decrease", offsets.flip(0)), ("beyond the 10 rows", offsets + 1)):
            with self.assertRaisesRegex(qconv.UsageError, words):
                ops.experts(x, wrong, None, *weights)
        with self.assertRaisesRegex(qconv.UsageError, "x has 63 columns"):
            ops.experts(x[:, :63], offsets, None, *weights)
        by, bias = more_of(("nf4", 8), torch.float32, 10)
        for words, *wrong in ((r"the bias is \(3, 8\); expected \(4, 8\)", by, bias[1:]),
                              (r"row_weights are \(9,\) in torch.float32; expected \(10,\)", by[1:], bias),
                              ("row_weights .* in torch.float16", by.half(), bias)):
            with self.assertRaisesRegex(qconv.UsageError, words):
                ops.experts(x, offsets, None, *with_more(weights, *wrong))
        with self.assertRaisesRegex(qconv.UsageError, "3 nested offsets"):
            ops.experts(x, offsets, None, *weights[:-1], weights[-1][:-1])

    def test_stacks(self):
        """The parameters of a stack's experts are views of what the operator takes, and stay so."""
        gate = [weight("nf4", 32, 64, 64, True, seed=i) for i in range(3)]
        gate = [replace(w, **{role: getattr(w, role).view(torch.uint8) for role in ROLES[2:]}) for w in gate]
        up = [weight("int8", 32, 64, seed=i) for i in range(3)]
        joined = torch.cat([torch.stack([QuantizedTensor([[w]], torch.float32) for w in part]) for part in (gate, up)],
                           1)
        offsets, x = torch.tensor([0, 2, 2, 7], dtype=torch.int32), torch.randn(7, 64)
        stack = Stack(joined)

        def right(stack):
            self.assertTrue(stack.multiplies())
            y = stack.products(x, offsets)
            for e, a, b in ((0, 0, 2), (2, 2, 7)):
                self.assertTrue(torch.equal(y[a:b], torch.nn.functional.linear(x[a:b], stack[e])))
            for whole, part in zip(stack.whole, stack.experts[2]):
                self.assertEqual(whole[1][0][0][2].data_ptr(), part.codes.data_ptr())

        right(stack)
        right(stack.to(torch.bfloat16))
        right(copy.deepcopy(stack))
        by, bias = torch.rand(7), torch.randn(3, 64)
        y = stack.products(x, offsets, None, by, bias)
        for e, a, b in ((0, 0, 2), (2, 2, 7)):
            torch.testing.assert_close(y[a:b], (torch.nn.functional.linear(x[a:b], stack[e]) + bias[e]) * by[a:b, None])
        compiled = torch.compile(lambda x: stack.products(x, offsets, None, by, bias) + 1, fullgraph=True,
                                 backend="aot_eager")
        self.assertTrue(torch.equal(compiled(x), y + 1))
        stack.experts[0][1].codes = torch.nn.Parameter(up[0].codes.clone(), requires_grad=False)
        self.assertFalse(stack.multiplies())  # as device_map of transformers does it
        mixed = Stack(torch.stack([QuantizedTensor([[w]], torch.float32) for w in (gate[0], up[0])]))
        self.assertFalse(mixed.multiplies())

    def test_routed(self):
        """Rows of x go to their experts and come back; numbers that are no expert's add nothing."""
        each, _, weights = experts_of("nf4", 32, 32, 32)
        x, by = torch.randn(9, 32), torch.rand(9, 3)
        chosen = torch.stack([torch.randperm(6)[:3] - 1 for _ in range(9)])  # -1 and 4 are others'
        y = routed(x, chosen, by, 4, lambda x, offsets, rows, row_weights: ops.experts(
            x, offsets, rows, *with_more(weights, row_weights, None)))
        want = torch.zeros(9, 32)
        for row, i in itertools.product(range(9), range(3)):
            if 0 <= (e := chosen[row, i].item()) < 4:
                want[row] += by[row, i] * (x[row] @ each[e].dequantize(torch.float32).T)
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-2)


class Refusals(unittest.TestCase):
    def refused(self, words, x, w, bias=None, kind=qconv.UsageError, **changes):
        numbers = list(w.numbers)
        tensors = {role: getattr(w, role) for role in ("codes", "scales", "code_map", "nested_absmax", "nested_map")}
        for key, value in changes.items():
            if key in tensors:
                tensors[key] = value
            else:
                numbers[["form", "rows", "cols", "block", "nested_block", "offset"].index(key)] = value
        with self.assertRaisesRegex(kind, words):
            ops.linear(x, *tensors.values(), bias, *numbers)

    def test_what_does_not_fit(self):
        w, x = weight("nf4", 96, 128, 64, True), torch.randn(2, 128)
        self.refused("x has 127 columns and the weight 128", x[:, :127], w)
        self.refused("x is torch.float64", x.double(), w)
        self.refused("bias has 95 elements and the weight 96 rows", x, w, bias=torch.zeros(95))
        self.refused("bytes of codes, found", x, w, codes=w.codes[1:], kind=qconv.InputError)
        self.refused("expected 192 scales, found 191", x, w, scales=w.scales[1:], kind=qconv.InputError)
        self.refused("a code map has 16 floats", x, w, code_map=torch.zeros(15))
        self.refused("nested scales 256", x, w, nested_map=torch.zeros(255))
        self.refused("must be contiguous", x, w, codes=torch.zeros(2 * w.codes.numel(), dtype=torch.int8)[::2])
        self.refused("power of two from 32 to 4096, found 48", x, w, block=48, kind=qconv.InputError)
        self.refused("form is 'nf5'", x, w, form="nf5")
        with self.assertRaisesRegex(qconv.UsageError, "not torch.float64"):
            ops.dequantize(*w.tensors(), *w.numbers, torch.float64)


class Modules(unittest.TestCase):
    def test_weight_stands_for_a_tensor(self):
        w = weight("nf4", 96, 128, 64, True)
        layer = Linear(w, None, torch.bfloat16)
        self.assertEqual((layer.weight.shape, layer.weight.dtype, layer.weight.device.type),
                         ((96, 128), torch.bfloat16, "cpu"))
        x = torch.randn(3, 128)
        self.assertTrue(torch.equal(torch.nn.functional.linear(x, layer.weight), layer(x)))
        self.assertTrue(torch.equal(layer.weight.dequantize(torch.float32), w.dequantize(torch.float32)))
        for what in (lambda: layer.weight + 1, lambda: x @ layer.weight.T, lambda: layer.weight.data.add_(1),
                     lambda: layer.weight[0], lambda: torch.norm(layer.weight)):
            with self.assertRaisesRegex(qconv.UsageError, "is codes"):
                what()

    def test_dtypes_change_no_codes(self):
        layer = Linear(weight("int8", 8, 64), torch.nn.Parameter(torch.randn(8)), torch.bfloat16)
        before = layer.dequantize(torch.float32)
        for dtype in (torch.float16, torch.float32, torch.bfloat16):
            layer.to(dtype)
            self.assertEqual((layer.weight.dtype, layer.bias.dtype), (dtype, dtype))
            self.assertTrue(torch.equal(layer.dequantize(torch.float32), before))

    def test_stacks(self):
        """Experts held as one tensor [experts, rows, cols], joined of gate and up, or transposed."""
        gate = [weight("nf4", 32, 64, 64, seed=i) for i in range(3)]
        up = [weight("int8", 32, 64, seed=i) for i in range(3)]
        made = torch.cat([torch.stack([QuantizedTensor([[w]], torch.float32) for w in part]) for part in (gate, up)], 1)
        self.assertEqual(tuple(made.shape), (3, 64, 64))
        stack, x = Stack(made), torch.randn(5, 64)
        dense = made.dequantize(torch.float32)
        for i in range(3):
            torch.testing.assert_close(torch.nn.functional.linear(x, stack[torch.tensor(i)]), x @ dense[i].T,
                                       rtol=1e-3, atol=1e-2)
            turned = Stack(QuantizedTensor([[w] for w in gate], torch.float32, True, True))
            torch.testing.assert_close(x @ turned[i], x @ gate[i].dequantize(torch.float32).T, rtol=1e-3, atol=1e-2)
            with self.assertRaisesRegex(qconv.UsageError, "experts"):
                x @ stack[i]
        with self.assertRaisesRegex(qconv.InputError, "only some of them are quantized"):
            torch.stack([QuantizedTensor([[gate[0]]], torch.float32), torch.zeros(32, 64)])
        with self.assertRaisesRegex(qconv.InputError, "along its columns"):
            torch.cat([QuantizedTensor([[w]], torch.float32) for w in gate], 1)


if __name__ == "__main__":
    s.main()

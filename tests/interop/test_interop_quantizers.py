"""qconv's quantizers against bitsandbytes' on the CPU, on raw tensors.

Codes and scales are compared byte for byte. Where bitsandbytes' CPU code differs from its own CUDA
kernels, qconv follows CUDA: every difference is counted, and must be one of a kind stated here.
A step-by-step emulation of the CUDA kernels must agree everywhere.
"""
import unittest
import zlib

import bitsandbytes
import interop_support as s
import numpy as np
import torch
from bitsandbytes import functional as F

OLD = tuple(int(x) for x in bitsandbytes.__version__.split(".")[:2]) < (0, 50)
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TINY = np.float32(1e-38)  # the least absmax bitsandbytes 0.50 divides by on the CPU


def raw(t):
    return t.contiguous().view(torch.uint8).numpy().tobytes()


def normal(*shape, seed, scale=0.02):
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    return torch.randn(*shape, generator=generator) * scale


def float32_neighbours(values, steps=3):
    """Each value and the floats up to `steps` below and above it."""
    values = np.asarray(values, np.float32)
    out = [values]
    down, up = values, values
    for _ in range(steps):
        down = np.nextafter(down, np.float32(-np.inf))
        up = np.nextafter(up, np.float32(np.inf))
        out += [down, up]
    return np.concatenate(out)


class Nf4(unittest.TestCase):
    def ours_and_theirs(self, x, block, dtype):
        ours = s.tensor_tool("nf4", "--block", block, "--dtype", dtype, data=raw(x))
        packed, state = F.quantize_4bit(x, blocksize=block, quant_type="nf4",
                                        compress_statistics=False)
        return ours, packed.numpy().ravel(), state.absmax.numpy()

    def explain(self, x, block, ours, theirs):
        """{kind: count} of the elements whose codes differ."""
        n = x.numel()
        wide = x.float().numpy().ravel()
        a, b = s.unpack_nibbles(ours, n), s.unpack_nibbles(theirs, n)
        kinds = {}
        for i in np.flatnonzero(a != b):
            whole = i // block * block + block <= n
            values = wide[i // block * block : i // block * block + block]
            absmax = np.abs(values).max()
            with np.errstate(all="ignore"):
                y = wide[i] * (s.ONE / absmax)
                quotient = wide[i] / absmax
            between = [t for t in s.NF4_THRESHOLDS if abs(float(t) - float(y)) <= 2.0**-23]
            if absmax == 0 and OLD:
                kind = "block of zeros: 0.49 gives code 0 (-1 times absmax 0), qconv code 7 (0)"
            elif absmax < TINY:
                kind = "absmax below 1e-38: bitsandbytes divides by 1e-38, qconv by absmax"
            elif OLD and x.dtype != torch.float32 and not whole:
                kind = "short last block: 0.49 works in the tensor's own 16-bit type there"
            elif between:
                kind = "within 2^-23 of a threshold: bitsandbytes' CPU takes another float for it"
            elif not whole and quotient != y:
                kind = "short last block: bitsandbytes' CPU divides by absmax"
            else:
                self.fail(f"element {i}: qconv {a[i]}, bitsandbytes {b[i]}, x {wide[i]!r}, "
                          f"absmax {absmax!r}, y {y!r}: no known reason")
            kinds[kind] = kinds.get(kind, 0) + 1
        return kinds

    def compare(self, label, x, block, dtype, allowed=0):
        x = x.to(DTYPES[dtype])
        ours, packed, absmax = self.ours_and_theirs(x, block, dtype)
        wide = x.float().numpy().ravel()
        emulated, emulated_absmax = s.emulate_nf4(wide, block)
        live = np.abs(emulated_absmax) >= TINY
        per_element = np.repeat(live, block)[: wide.size]
        mine, cuda = (s.unpack_nibbles(c, wide.size) for c in (ours["codes"], emulated))
        self.assertEqual(np.count_nonzero((mine != cuda)[per_element]), 0, f"{label}: CUDA's codes")
        self.assertTrue(ours["absmax"].tobytes() == emulated_absmax.tobytes(), f"{label}: absmax")
        stored = np.where((absmax == TINY) & (ours["absmax"] < TINY), ours["absmax"], absmax)
        self.assertTrue(ours["absmax"].tobytes() == stored.tobytes(), f"{label}: absmax")
        kinds = self.explain(x, block, ours["codes"], packed)
        self.assertLessEqual(sum(kinds.values()), allowed, f"{label}: {kinds}")
        if x.numel() % 2 and ours["absmax"][-1] > 0:
            self.assertEqual(ours["codes"][-1] & 15, 7, label)
        return kinds

    def test_normal_weights(self):
        total, kinds = 0, {}
        for dtype in DTYPES:
            for block in (32, 64, 128, 256, 512, 1024, 2048, 4096):
                x = normal(512, 2048, seed=(dtype, block))
                for kind, n in self.compare(f"{dtype} block {block}", x, block, dtype, 2).items():
                    kinds[kind] = kinds.get(kind, 0) + n
                total += x.numel()
        s.note(f"NF4, normal weights: {total} codes, {sum(kinds.values())} differ {kinds or ''}")
        self.assertLessEqual(sum(kinds.values()), total // 10**6)

    def test_other_distributions(self):
        generator = torch.Generator().manual_seed(7)
        uniform = torch.rand(256, 1024, generator=generator) - 0.5
        heavy = normal(256, 1024, seed="t") / (normal(256, 1024, seed="u", scale=1).abs() + 1e-3)
        large = normal(256, 1024, seed="large", scale=1e4)
        small = normal(256, 1024, seed="small", scale=1e-6)
        constant = torch.full((64, 64), 0.25)
        for label, x in [("uniform", uniform), ("heavy", heavy), ("large", large),
                         ("small", small), ("constant", constant), ("negative", -constant)]:
            for dtype in DTYPES:
                if dtype == "f16" and label in ("large", "heavy"):
                    continue  # beyond float16
                self.compare(f"{label} {dtype}", x, 64, dtype, 2)

    def test_short_last_block(self):
        kinds, total = {}, 0
        for n in [1, 2, 3, 31, 63, 65, 127, 129, 1000, 4159, 84481]:
            if OLD and n % 2:
                continue  # 0.49 raises on an odd number of elements
            for dtype in DTYPES:
                x = normal(n, seed=(n, dtype))
                allowed = 64 if OLD and dtype != "f32" else 1
                for kind, count in self.compare(f"{n} {dtype}", x, 64, dtype, allowed).items():
                    kinds[kind] = kinds.get(kind, 0) + count
                total += n
        s.note(f"NF4, lengths not of whole blocks: {total} codes, {sum(kinds.values())} differ "
               f"{kinds or ''}")

    def test_zero_blocks(self):
        x = normal(16, 64, seed="zeros")
        x[3] = 0
        x[9] = -0.0
        kinds = self.compare("zeros", x, 64, "f32", 128 if OLD else 0)
        ours = s.tensor_tool("nf4", data=raw(x))
        for row in (3, 9):
            self.assertEqual(set(ours["codes"][row * 32 : row * 32 + 32]), {0x77})
            self.assertEqual(ours["absmax"][row], 0)
        s.note(f"NF4, blocks of zeros: qconv gives 0x77 and absmax 0; differ: {kinds or 'none'}")
        short = self.compare("short zeros", torch.zeros(70), 64, "f32", 70 if OLD else 0)
        self.assertEqual(bool(short), OLD)

    def test_thresholds(self):
        """Elements at every threshold and near it, in blocks whose absmax is 1."""
        values = float32_neighbours(np.concatenate([s.NF4_THRESHOLDS, s.NF4_CODE[1:15]]))
        midpoints = (s.NF4_CODE[1:] + s.NF4_CODE[:-1]) / np.float32(2)
        values = np.concatenate([values, float32_neighbours(midpoints)])
        rows = -(-values.size // 63)
        x = np.zeros((rows, 64), np.float32)
        x[:, 0] = 1
        for i, v in enumerate(values):
            x[i // 63, 1 + i % 63] = v
        kinds = self.compare("thresholds", torch.from_numpy(x), 64, "f32", 2 * 2 * 15)
        differing = int(np.count_nonzero(s.NF4_THRESHOLDS != midpoints))
        self.assertEqual(differing, 4)
        s.note(f"NF4, at the thresholds: {values.size} codes, {sum(kinds.values())} differ {kinds} "
               f"({differing} of 15 thresholds are not the midpoint)")

    def test_tiny_blocks(self):
        x = torch.cat([normal(64, seed="tiny", scale=k) for k in (1e-36, 1e-38, 1e-40, 1e-44)])
        kinds = self.compare("tiny", x, 64, "f32", 256)
        s.note(f"NF4, absmax near the least normal number: 256 codes, differ {kinds or 'none'}")


class Nested(unittest.TestCase):
    """The second quantization, of absmax."""

    def setUp(self):
        # The map of bitsandbytes itself; 0.49 and before overwrite entry 0 of the shared copy.
        self.map = F.create_dynamic_map().numpy().copy()

    def cases(self):
        yield "normal weights", s.emulate_nf4(normal(2048, 2048, seed="n").numpy().ravel(), 64)[1]
        yield "1320 blocks", s.emulate_nf4(normal(192, 440, seed="k").numpy().ravel(), 64)[1]
        yield "uniform", torch.rand(70000, generator=torch.Generator().manual_seed(3)).numpy()
        heavy = np.abs(np.random.default_rng(5).standard_cauchy(100000)).astype(np.float32)
        yield "heavy tails", heavy
        yield "one block", np.array([0.125], np.float32)

    def test_map(self):
        ours = s.tensor_tool("nested", "--offset", "0", data=self.map.tobytes())
        self.assertEqual(ours["codes"].tobytes(), bytes(range(256)))

    def test_offset_from_theirs(self):
        for label, absmax in self.cases():
            t = torch.from_numpy(absmax)
            offset = t.mean()
            theirs, state = F.quantize_blockwise(t - offset, blocksize=256)
            ours = s.tensor_tool("nested", "--offset", float(offset).hex(), data=absmax.tobytes())
            emulated, nested = s.emulate_nested(absmax, offset.item(), self.map)
            self.assertTrue(ours["absmax"].tobytes() == nested.tobytes(), label)
            self.assertTrue(ours["absmax"].tobytes() == state.absmax.numpy().tobytes(), label)
            live = np.repeat(nested > 0, 256)[: absmax.size]
            off = np.count_nonzero((ours["codes"] != emulated)[live])
            self.assertEqual(off, 0, f"{label}: CUDA's codes")
            self.judge(label, absmax, offset.item(), ours["codes"], theirs.numpy(), live)

    def judge(self, label, absmax, offset, ours, theirs, live):
        """Every code of bitsandbytes' CPU that differs must be no nearer than ours."""
        losses, y = s.nested_losses(absmax, offset, self.map, ours, theirs)
        self.assertTrue(np.all(losses >= -(2.0**-24)), f"{label}: bitsandbytes is nearer: {losses}")
        if OLD:
            kind = "ties, or below -0.986: 0.49 has overwritten entry 0 of its map with -1"
            tie = losses <= 2.0**-24
            self.assertTrue(np.all(tie | (y < (self.map[0] + self.map[1]) / 2)), f"{label}: {y}")
        else:
            kind = "its table has 65536 bins"
            # Half a bin to the middle of the bin, and half a bin back.
            self.assertTrue(np.all(losses <= 2 / 65535 + 2.0**-24), label)
            self.assertLessEqual(losses.size, 0.01 * absmax.size + 2, label)
        s.note(f"nested codes, {label}: {absmax.size}, {losses.size} differ ({kind}), ours at "
               f"least as near in all")
        dead = (ours != theirs) & ~live
        if dead.any():
            s.note(f"nested codes, {label}: {dead.sum()} differ in groups where every absmax is "
                   f"the offset: qconv 127 (0.0), bitsandbytes {set(theirs[dead].tolist())}")

    def test_constant_group(self):
        """absmax all equal: every difference is 0, and so is the scale of the group."""
        absmax = np.full(300, 0.5, np.float32)
        ours = s.tensor_tool("nested", "--offset", "0.5", data=absmax.tobytes())
        self.assertEqual(set(ours["codes"]), {127})
        self.assertEqual(set(ours["absmax"]), {0.0})

    def test_own_offset(self):
        """qconv's offset is the mean rounded to bfloat16, so that loaders cannot round it."""
        for label, absmax in self.cases():
            theirs = torch.from_numpy(absmax).mean().item()
            ours = s.tensor_tool("nested", data=absmax.tobytes())
            offset = ours["offset"][0]
            mean = absmax.astype(np.float64).cumsum()[-1] / absmax.size
            self.assertEqual(offset, s.bfloat16_nearest(mean), label)
            self.assertLessEqual(abs(np.float32(mean) - theirs), 1e-6 * abs(theirs), label)
            # Before that rounding the two offsets are as good as one: section "bound" of docs.
            codes, nested = s.emulate_nested(absmax, theirs, self.map)
            live = np.repeat(nested > 0, 256)[: absmax.size]
            exact = s.tensor_tool("nested", "--offset", float(np.float32(mean)).hex(),
                                  data=absmax.tobytes())
            steps = np.abs(exact["codes"].astype(int) - codes.astype(int)) * live
            self.assertLessEqual(np.count_nonzero(steps), 1e-4 * absmax.size + 1, label)
            self.assertLessEqual(steps.max(), 1, label)
            # After it the codes are those of another offset; the scales they stand for must be as
            # good.
            mine = s.restore_scales(ours["codes"], ours["absmax"], self.map, offset)
            other = s.restore_scales(codes, nested, self.map, theirs)
            errors = [float(np.mean(np.abs(r - absmax)) / np.mean(absmax)) for r in (mine, other)]
            self.assertLessEqual(errors[0], 1.03 * errors[1] + 1e-6, label)
            s.note(f"own offset, {label}: {offset:.7g} for {theirs:.7g}; "
                   f"{np.count_nonzero(steps)} of {absmax.size} codes differ before the rounding "
                   f"to bfloat16; mean error of the scales {errors[0]:.4%}, with their offset {errors[1]:.4%}")


class Int8(unittest.TestCase):
    def compare(self, label, x, dtype):
        x = x.to(DTYPES[dtype])
        ours = s.tensor_tool("int8", "--cols", x.shape[1], "--dtype", dtype, data=raw(x))
        codes, scb, _ = F.int8_vectorwise_quant(x.to(torch.float16))
        differ = np.count_nonzero(ours["codes"] != codes.numpy().view(np.uint8).ravel())
        self.assertEqual(differ, 0, f"{label}: codes")
        self.assertTrue(ours["scb"].tobytes() == scb.float().numpy().tobytes(), f"{label}: SCB")
        return x.numel()

    def test_codes_and_scales(self):
        total = 0
        for dtype in DTYPES:
            for rows, cols in [(512, 512), (1, 1), (7, 63), (192, 440), (3, 4097), (64, 1)]:
                for scale in (0.02, 1e-6, 3.0, 1e3):
                    x = normal(rows, cols, seed=(dtype, rows, cols), scale=scale)
                    total += self.compare(f"{dtype} {rows}x{cols} {scale}", x, dtype)
        s.note(f"int8 rows: {total} codes and their SCB, 0 differ")

    def test_ties(self):
        """Rows whose absmax is 127: every half is a tie."""
        x = torch.arange(-254, 255).repeat(4, 1).float() / 2
        self.compare("ties", x, "f32")
        self.compare("ties", x, "bf16")

    def test_zero_row(self):
        x = normal(8, 64, seed="zero row")
        x[2] = 0
        x[5, :] = 1e-9  # nothing is left of it in float16
        self.compare("zero rows", x, "f32")

    def test_float16_extremes(self):
        x = normal(8, 64, seed="extremes", scale=1)
        x[0, 0], x[1, 1], x[2] = 65504, -65504, 6e-8
        self.compare("extremes", x, "f16")
        self.compare("extremes", x, "f32")


if __name__ == "__main__":
    s.main()

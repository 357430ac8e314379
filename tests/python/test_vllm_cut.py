"""Which codes and scales a worker of vLLM takes of a weight (python/qconv/vllm/cut.py), against plain indexing.

Every element of a weight has a scale. What a cut says of codes and scales must give each element asked for the code and
the scale that it has in the whole weight, whatever the shape, the block and the cut.
"""
import random
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))
from qconv.vllm.cut import SMALLEST, cut  # noqa: E402

SEED = random.SystemRandom().randrange(1 << 32)
BLOCKS = (0, 32, 64, 128, 1024, 4096)


def elements(c, bits):
    """Rows of (index of the code, index of the scale, index of the scale's group) in the whole weight, as one reads
    them from the slice. Codes are counted by their bits: what is read is a list of bits."""
    row_bytes, first_row, rows, first_byte, count = c.codes(bits)
    read = [8 * (row * row_bytes + first_byte) + bit
            for row in range(first_row, first_row + rows) for bit in range(8 * count)]
    codes = [bit // bits for bit in read[::bits]]
    flat = [(codes[i], c.scale(i // c.block if c.block else i // c.cols)) for i in range(c.rows * c.cols)]
    return [flat[row * c.cols:(row + 1) * c.cols] for row in range(c.skip, c.rows)]


def whole(shape, block, rows, cols):
    def of(row, col):
        at = row * shape[1] + col
        return at, at // block if block else row
    return [[of(row, col) for col in range(*cols)] for row in range(*rows)]


class Cuts(unittest.TestCase):
    def setUp(self):
        self.random = random.Random(SEED)

    def span(self, n, unit=1):
        a, b = sorted(self.random.sample(range(n // unit + 1), 2))
        return a * unit, b * unit

    def check(self, shape, block, bits, rows, cols):
        words = f"seed {SEED}: {shape}, block {block}, {bits} bits, rows {rows}, columns {cols}"
        c = cut("w", shape, block, bits, rows, cols)
        self.assertTrue(elements(c, bits) == whole(shape, block, rows, cols), words)
        self.assertLess(c.skip, max(block, 2), words)
        return c

    def test_whole_rows(self):
        for _ in range(60):
            shape = self.random.randint(1, 40), self.random.choice([1, 7, 32, 70, 96, 440])
            self.check(shape, self.random.choice(BLOCKS), self.random.choice([4, 8]), self.span(shape[0]),
                       (0, shape[1]))

    def test_codes_that_share_a_byte_with_another_row(self):
        for rows in ((3, 6), (2, 3), (5, 6)):
            self.check((6, 7), 0, 4, rows, (0, 7))

    def test_rows_that_begin_with_a_block_are_all_that_is_read(self):
        for _ in range(25):
            shape, block = (32, self.random.choice([96, 440, 512])), self.random.choice(BLOCKS[1:])
            step = self.random.choice([r for r in range(33) if r * shape[1] % block == 0])
            c = self.check(shape, block, 4, (step, 32), (0, shape[1])) if step < 32 else None
            self.assertTrue(c is None or c.skip == 0)

    def test_columns(self):
        for _ in range(60):
            shape = self.random.randint(1, 12), SMALLEST * self.random.randint(1, 12)
            block = self.random.choice(BLOCKS)
            cols = self.span(shape[1], self.random.choice([SMALLEST, 64]) if shape[1] > 64 else SMALLEST)
            c = self.check(shape, block, self.random.choice([4, 8]), self.span(shape[0]), cols)
            self.assertTrue(not block or SMALLEST <= c.block <= block)

    def test_a_cut_on_blocks_keeps_the_block(self):
        self.assertEqual(self.check((4, 512), 64, 4, (0, 4), (256, 512)).block, 64)
        self.assertEqual(self.check((4, 192), 64, 4, (0, 4), (96, 192)).block, 32)

    def test_scales_of_a_group_share_theirs(self):
        for _ in range(100):
            nested = self.random.choice([2, 8, 256])
            block = self.random.choice(BLOCKS[1:4])
            shape = self.random.randint(1, 24), SMALLEST * self.random.randint(1, 16)
            cols = (0, shape[1]) if self.random.random() < 0.3 else self.span(shape[1], SMALLEST)
            c = cut("w", shape, block, 4, self.span(shape[0]), cols)
            group = c.group(nested)
            self.assertEqual(group & (group - 1), 0)
            of = [c.scale(i) // nested for i in range(c.scales)]
            for i, found in enumerate(of):
                self.assertEqual(found, of[i - i % group], f"seed {SEED}")

    def test_groups_are_as_large_as_can_be(self):
        self.assertEqual(cut("w", (8, 16384), 64, 4, (4, 8), (0, 16384)).group(256), 256)
        self.assertEqual(cut("w", (8, 14336), 64, 4, (0, 8), (0, 7168)).group(256), 16)
        self.assertEqual(cut("w", (8, 96), 64, 4, (0, 8), (0, 32)).group(256), 1)

    def test_refusals(self):
        with self.assertRaises(ValueError) as e:
            cut("down_proj.weight", (192, 440), 64, 4, (0, 192), (0, 220))
        self.assertEqual(str(e.exception), "'down_proj.weight' [192, 440] would be cut to the columns 0 to 220, and "
                         "blocks of 64 can be cut at multiples of 32 only; its columns allow a tensor parallel size of "
                         "1, so serve it on one card, or convert it with one scale a row (int8)")
        with self.assertRaises(ValueError) as e:
            cut("w", (8, 192), 32, 4, (0, 8), (0, 48))
        self.assertIn("; its columns allow a tensor parallel size of 1, 2, 3, 6", str(e.exception))
        with self.assertRaises(ValueError) as e:
            cut("w", (8, 30), 0, 4, (0, 8), (0, 15))
        self.assertIn("where codes of 4 bits share a byte; its columns allow a tensor parallel size of 1, 3, 5, 15",
                      str(e.exception))


if __name__ == "__main__":
    unittest.main()

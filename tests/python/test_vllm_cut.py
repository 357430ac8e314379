"""Which codes and scales a worker of vLLM takes of a weight (python/qconv/_cut.py and qc_weights_read_of of
libqconv), against plain indexing.

Every element of a weight has a scale. What a cut says of codes and scales must give each element asked for the code and
the scale that it has in the whole weight, whatever the shape, the block and the cut.
"""
import random
import sys
import unittest
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "python"), str(TESTS / "cli")]
from qconv import errors  # noqa: E402
from qconv._cut import cut  # noqa: E402
from qconv._library import code_bits  # noqa: E402
from qconv_case import SANITIZED  # noqa: E402

SMALLEST = 32  # elements of a block
WORDS = tuple(f"w{bits}a16" for bits in range(2, 9))
SEED = random.SystemRandom().randrange(1 << 32)
BLOCKS = (0, 32, 64, 128, 1024, 4096)


def row_bits(form, cols):
    """From the codes of a row to those of the next. They are packed to words, but 4 and 8 bits without a gap."""
    bits = code_bits(form)
    return -(-cols * bits // 32) * 32 if form in WORDS and bits not in (4, 8) else cols * bits


def elements(c, form):
    """Rows of (bit where the code begins, index of the scale) in the whole weight, as one reads them from the slice.
    What is read is a list of bits."""
    bits, apart = code_bits(form), row_bits(form, c.cols)
    row_bytes, first_row, rows, first_byte, count = c.codes(form)
    read = [8 * (row * row_bytes + first_byte) + bit
            for row in range(first_row, first_row + rows) for bit in range(8 * count)]
    return [[(read[row * apart + col * bits], c.scale((row * c.cols + col) // (c.block or c.cols)))
             for col in range(c.cols)] for row in range(c.skip, c.rows)]


def whole(shape, form, block, rows, cols):
    return [[(row * row_bits(form, shape[1]) + col * code_bits(form), (row * shape[1] + col) // (block or shape[1]))
             for col in range(*cols)] for row in range(*rows)]


@unittest.skipIf(SANITIZED, "Python cannot load a library with sanitizers")
class Cuts(unittest.TestCase):
    def setUp(self):
        self.random = random.Random(SEED)

    def span(self, n, unit=1):
        a, b = sorted(self.random.sample(range(n // unit + 1), 2))
        return a * unit, b * unit

    def form(self, shape, block):
        """One that may have this block: those of words have whole groups in a row."""
        if not block:
            return self.random.choice(("int8", *WORDS))
        return self.random.choice(("nf4", "int8-block", *(WORDS if shape[1] % block == 0 else ())))

    def check(self, shape, block, form, rows, cols):
        words = f"seed {SEED}: {shape}, block {block}, {form}, rows {rows}, columns {cols}"
        c = cut("w", form, shape, block, 0, rows, cols)
        self.assertTrue(elements(c, form) == whole(shape, form, block, rows, cols), words)
        self.assertLess(c.skip, max(block, 2), words)
        return c

    def test_whole_rows(self):
        for _ in range(60):
            shape = self.random.randint(1, 40), self.random.choice([1, 7, 32, 70, 96, 440])
            block = self.random.choice(BLOCKS)
            self.check(shape, block, self.form(shape, block), self.span(shape[0]), (0, shape[1]))

    def test_rows_of_words(self):
        for form in WORDS:
            for rows in ((3, 6), (2, 3), (5, 6)):
                self.check((6, 7), 0, form, rows, (0, 7))

    def test_rows_that_begin_with_a_block_are_all_that_is_read(self):
        for _ in range(25):
            shape, block = (32, self.random.choice([96, 440, 512])), self.random.choice(BLOCKS[1:])
            step = self.random.choice([r for r in range(33) if r * shape[1] % block == 0])
            c = self.check(shape, block, "nf4", (step, 32), (0, shape[1])) if step < 32 else None
            self.assertTrue(c is None or c.skip == 0)

    def test_columns(self):
        for _ in range(60):
            shape = self.random.randint(1, 12), SMALLEST * self.random.randint(1, 12)
            block = self.random.choice(BLOCKS)
            cols = self.span(shape[1], self.random.choice([SMALLEST, 64]) if shape[1] > 64 else SMALLEST)
            c = self.check(shape, block, self.form(shape, block), self.span(shape[0]), cols)
            self.assertTrue(not block or SMALLEST <= c.block <= block)

    def test_a_cut_on_blocks_keeps_the_block(self):
        for form in ("nf4", *WORDS):
            self.assertEqual(self.check((4, 512), 64, form, (0, 4), (256, 512)).block, 64)
            self.assertEqual(self.check((4, 192), 64, form, (0, 4), (96, 192)).block, 32)

    def test_scales_of_a_group_share_theirs(self):
        for _ in range(100):
            nested = self.random.choice([2, 8, 256])
            block = self.random.choice(BLOCKS[1:4])
            shape = self.random.randint(1, 24), SMALLEST * self.random.randint(1, 16)
            cols = (0, shape[1]) if self.random.random() < 0.3 else self.span(shape[1], SMALLEST)
            c = cut("w", "nf4", shape, block, nested, self.span(shape[0]), cols)
            group = c.group or 1
            self.assertEqual(group & (group - 1), 0)
            of = [c.scale(i) // nested for i in range(c.scales)]
            for i, found in enumerate(of):
                self.assertEqual(found, of[i - i % group], f"seed {SEED}")

    def test_groups_are_as_large_as_can_be(self):
        for shape, rows, cols, group in (((8, 16384), (4, 8), (0, 16384), 256), ((8, 14336), (0, 8), (0, 7168), 16),
                                         ((8, 96), (0, 8), (0, 32), 0)):
            self.assertEqual(cut("w", "nf4", shape, 64, 256, rows, cols).group, group)

    def test_refusals(self):
        with self.assertRaises(errors.InputError) as e:
            cut("down_proj.weight", "nf4", (192, 440), 64, 256, (0, 192), (0, 220))
        self.assertEqual(str(e.exception), "'down_proj.weight' cannot be cut as asked: columns 0 to 220 of a weight in "
                         "nf4 cut through 32 weights that stay together; it can be cut at multiples of 440 columns, so "
                         "only whole rows can be taken; serve it on fewer cards, or convert it with one scale a row "
                         "(--to int8)")
        with self.assertRaises(errors.InputError) as e:
            cut("w", "nf4", (8, 192), 32, 0, (0, 8), (0, 48))
        self.assertIn("it can be cut at multiples of 32 columns;", str(e.exception))
        with self.assertRaises(errors.InputError) as e:
            cut("w", "w4a16", (8, 30), 0, 0, (0, 8), (0, 15))
        self.assertIn("it can be cut at multiples of 2 columns;", str(e.exception))


if __name__ == "__main__":
    unittest.main()

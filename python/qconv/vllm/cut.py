"""Which codes and scales belong to some rows and columns of a quantized weight. Standard library only.

Blocks run over the flattened weight [rows, cols]. Whole rows can be taken out where a block begins; where none begins
with the first row asked for, the rows before it up to the last one where one does are taken too, and their products are
left out. Columns can be taken out in blocks of a power of two from 32 on which all cuts fall: each scale is repeated
for the smaller blocks that it covers. Likewise groups of double quantized scales become smaller, and where none
is left, scales are floats. qc_weights_slice cuts like this in memory; here it is known what to read before it is read.
"""
import math
from typing import NamedTuple

SMALLEST = 32  # elements of a block


class Cut(NamedTuple):
    """Rows [first, first + rows) and columns [col, col + cols) of a weight with `whole` columns in blocks of `old`
    elements, to be laid out in blocks of `block` (0: one scale a row). The first `skip` rows were not asked for."""
    first: int
    rows: int
    skip: int
    col: int
    cols: int
    whole: int
    old: int
    block: int

    @property
    def scales(self) -> int:
        return self.rows if not self.block else -(-self.rows * self.cols // self.block)

    def scale(self, i):
        """Which scale of the whole weight is scale i of the cut one; i may be an array of integers."""
        if not self.block:
            return self.first + i
        at = i * self.block
        return ((self.first + at // self.cols) * self.whole + self.col + at % self.cols) // self.old

    def group(self, nested_block: int) -> int:
        """How many scales of the cut weight share one of their own, where nested_block of the whole one do."""
        common = (self.first * self.whole + self.col) // self.block
        if self.cols < self.whole:
            common = math.gcd(common, self.whole // self.block, self.cols // self.block)
        return _power_in(common, nested_block)  # 1 where blocks became smaller, for a cut is odd then

    def codes(self, bits: int):
        """Where the codes lie: (bytes of a row, first row, rows, first byte, bytes), as qc_reader_slice has them.
        Without row bytes the bytes are those of the flattened weight."""
        if self.cols == self.whole:
            begin = self.first * self.whole * bits // 8
            return 0, 0, 1, begin, -(-(self.first + self.rows) * self.whole * bits // 8) - begin
        return self.whole * bits // 8, self.first, self.rows, self.col * bits // 8, self.cols * bits // 8


def _power_in(n, most):
    """The largest power of two that divides n, at most `most`, which is one."""
    return min(n & -n, most) if n else most


def cut(name: str, shape, block: int, bits: int, rows, cols) -> Cut:
    """The cut of rows [rows[0], rows[1]) and columns [cols[0], cols[1]). ValueError says which cut falls into a block
    and what would work."""
    (first, end), (col, stop), whole = rows, cols, shape[1]
    if (col, stop) == (0, whole):
        step = block // math.gcd(block, whole) if block else 1 if whole * bits % 8 == 0 else 2
        skip = first % step
        return Cut(first - skip, end - first + skip, skip, 0, whole, whole, block, block)
    common = math.gcd(whole, col, stop)
    if not block:
        if common * bits % 8 == 0:
            return Cut(first, end - first, 0, col, stop - col, whole, 0, 0)
        raise ValueError(f"{_where(name, shape, col, stop)}, where codes of {bits} bits share a byte; "
                         + _advice(whole, 8 // bits))
    new = _power_in(common, block)
    if new < SMALLEST:
        raise ValueError(f"{_where(name, shape, col, stop)}, and blocks of {block} can be cut at multiples of "
                         f"{SMALLEST} only; " + _advice(whole, SMALLEST))
    return Cut(first, end - first, 0, col, stop - col, whole, block, new)


def _where(name, shape, col, stop):
    return f"'{name}' [{shape[0]}, {shape[1]}] would be cut to the columns {col} to {stop}"


def _advice(whole, unit):
    sizes = [str(n) for n in range(2, 17) if whole % (n * unit) == 0]
    return f"its columns allow a tensor parallel size of {', '.join(['1', *sizes])}" + (
        "" if sizes else ", so serve it on one card, or convert it with one scale a row (int8)")

"""Which codes and scales belong to some rows and columns of a quantized weight, before any are read.

libqconv says how a weight is cut (qc_weights_read_of in quant/weight_slice.h), as it does to `qconv plan --tp`: where a
cut falls into a block, blocks become smaller or rows before it are read too; groups of double quantized scales become
smaller likewise, and where none is left, scales are floats. Here is where in the tensors of a file all of it lies.
"""
import ctypes as c
from typing import NamedTuple

from . import _library, errors
from ._library import WeightsPart, WeightsRead


class Cut(NamedTuple):
    """Rows [first, first + rows) and columns [col, col + cols) of a weight with `whole` columns in blocks of `old`
    elements, to be laid out in blocks of `block` (0: one scale a row) with `scales` scales, `group` to a nested one
    (0: they are floats). The first `skip` rows were not asked for."""
    first: int
    rows: int
    skip: int
    col: int
    cols: int
    whole: int
    old: int
    block: int
    scales: int
    group: int

    def scale(self, i):
        """Which scale of the whole weight is scale i of the cut one; i may be an array of integers."""
        if not self.block:
            return self.first + i
        at = i * self.block
        return ((self.first + at // self.cols) * self.whole + self.col + at % self.cols) // self.old

    def codes(self, form: str):
        """Where the codes lie: (bytes of a row, first row, rows, first byte, bytes), as qc_reader_slice has them.
        Without row bytes the bytes are those of the flattened weight."""
        bits, whole = _library.code_bits(form), _library.row_bytes(form, self.whole)
        if self.cols != self.whole:
            return whole, self.first, self.rows, self.col * bits // 8, _library.row_bytes(form, self.cols)
        if whole * 8 > self.whole * bits:  # behind each row is a gap
            return 0, 0, 1, self.first * whole, self.rows * whole
        begin = self.first * self.whole * bits // 8
        return 0, 0, 1, begin, -(-(self.first + self.rows) * self.whole * bits // 8) - begin


def cut(name: str, form: str, shape, block: int, nested_block: int, rows, cols) -> Cut:
    """The cut of rows [rows[0], rows[1]) and columns [cols[0], cols[1]) of a weight of these
    numbers. nested_block 0: its scales are floats. InputError says what cannot be cut, and where it could be."""
    w = _library.weight(form, *shape, block, nested_block, bool(nested_block))
    part = WeightsPart(rows[0], rows[1] - rows[0], cols[0], cols[1] - cols[0])
    r = WeightsRead()
    try:
        _library.call("qc_weights_read_of", c.byref(w), c.byref(part), c.byref(r))
    except errors.InputError as e:
        raise errors.InputError(f"'{name}' cannot be cut as asked: {e}; serve it on fewer cards, or convert it with one "
                                "scale a row (--to int8)") from None
    return Cut(r.read.row, r.read.rows, r.skip, r.read.col, r.read.cols, shape[1], block, r.block_elems, r.scales,
               r.nested_block)

"""An output of qconv of which only what is asked for is read: whole tensors, and parts of quantized weights."""
from dataclasses import replace
from typing import Dict, NamedTuple

import torch

from . import _library, errors
from ._cut import cut
from ._weights import ROLES, TORCH, QuantizedWeight, as_role, dtype_of, groups, part_of, says_how, weights_of


class Output:
    """A finished output: its tensors by name, and the open shards they are read from. Threads may share it."""

    def __init__(self, folder):
        self.reader = _library.Reader(folder)
        self.tensors: Dict[str, tuple] = {}
        self.shards: Dict[int, _library.Shards] = {}
        for device, found in enumerate(self.reader.devices):
            if found.tensors:
                self.shards[device] = self.reader.shards(device)
            self.tensors.update((t.name, (device, t)) for t in found.tensors)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for shards in self.shards.values():
            shards.close()
        self.reader.close()

    def read(self, name) -> torch.Tensor:
        """A whole tensor; its digest is checked."""
        device, t = self.tensors[name]
        out = torch.empty(t.shape, dtype=dtype_of(t))
        self.shards[device].read(t.index, out.data_ptr())
        return out

    def read_bytes(self, name, row_bytes, first_row, rows, first_byte, count) -> torch.Tensor:
        """A part of a tensor as bytes, of rows of row_bytes (0: it is one row). Of a compressed output only the frames
        that hold it are read and checked. Of a plain one the whole is, because its digest is that of the whole."""
        device, t = self.tensors[name]
        row_bytes = row_bytes or t.bytes
        if t.shard.endswith(".zst"):
            out = torch.empty(rows * count, dtype=torch.uint8)
            part = _library.ReaderSlice(row_bytes, first_row, rows, first_byte, count)
            self.shards[device].read(t.index, out.data_ptr(), part)
            return out
        whole = torch.empty(t.bytes, dtype=torch.uint8)
        self.shards[device].read(t.index, whole.data_ptr())
        return whole.view(-1, row_bytes)[first_row:first_row + rows, first_byte:first_byte + count].reshape(-1)

    def weights(self):
        """(name, Stored or None for one that is not quantized), in the order of the model, with the names that a
        checkpoint without quantization has."""
        found = groups({name: t.dtype for name, (_, t) in self.tensors.items()})
        belongs = {tensor: weight for weight, members in found.items() for tensor in members.values()}
        seen = set()
        for name in self.tensors:
            weight = belongs.get(name, name)
            if weight not in seen:
                seen.add(weight)
                yield weight, self._stored(weight, found[weight]) if weight in found else None

    def _stored(self, weight, members):
        def describe(ending, name):
            if says_how(ending):
                return self.read(name)
            t = self.tensors[name][1]
            return torch.empty(t.shape, dtype=dtype_of(t), device="meta")

        form, *more = weights_of(weight, {ending: describe(ending, name) for ending, name in members.items()},
                                 self.tensors[next(iter(members.values()))][1].scheme)
        if more:
            raise errors.InputError(f"'{weight}' is a stack of {len(more) + 1} experts, which the plug-in does not "
                                    "serve; 'qconv --to bf16' restores the model")
        roles = {s.role: members[s.ending] for s in form.stored if s.role in ROLES}
        return Stored(self, form, roles)


class Part(NamedTuple):
    """Rows of a weight; the first `skip` were not asked for."""
    weight: QuantizedWeight
    skip: int


class Stored(NamedTuple):
    """A quantized weight in an output, of which nothing was read. form: with tensors of no data; names: of its tensors
    by their role."""
    output: Output
    form: QuantizedWeight
    names: Dict[str, str]

    @property
    def name(self):
        return self.form.name

    @property
    def shape(self):
        return self.form.rows, self.form.cols

    def read(self, role):
        return as_role(role, self.output.read(self.names[role])) if role in self.names else None

    def cut(self, rows, cols):
        form = self.form
        return cut(self.name, form.form, self.shape, form.block, form.nested_block, rows, cols)

    def part(self, rows, cols) -> Part:
        """Rows [rows[0], rows[1]) and columns [cols[0], cols[1]). InputError where they cannot be cut out."""
        form, c = self.form, self.cut(rows, cols)
        if (c.first, c.rows, c.cols) == (0, *self.shape):
            return Part(replace(form, **{role: self.read(role) for role in ROLES}), c.skip)
        name = self.names["scales"]
        dtype = TORCH[self.output.tensors[name][1].dtype]

        def scales(begin, end):
            size = dtype.itemsize
            return self.output.read_bytes(name, 0, 0, 1, begin * size, (end - begin) * size).view(dtype)
        return Part(part_of(form, c, lambda *at: self.output.read_bytes(self.names["codes"], *at), scales, self.read), c.skip)

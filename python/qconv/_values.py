"""A checkpoint's tensors as they are in an unquantized model, whatever it stores them as (qc_values_* of libqconv).

Any checkpoint that qconv converts is opened, also outputs of qconv. A quantized weight is listed under its own name,
with its real shape and the dtype that it had; its scales and states are not listed. Values are those that
`qconv convert --to bf16` writes, bit for bit. Any number of threads may read from one Values: reading leaves Python.
"""
from __future__ import annotations

import ctypes as c
import os
from contextlib import contextmanager
from typing import Iterable, Iterator

import torch

from . import _library, errors
from ._library import DTYPES
from ._stored import Output
from ._weights import TORCH

EXPERTS = (None, "separate", "stacked")  # values.h, in its order
NAMES = {dtype: name for name, dtype in TORCH.items() if dtype is not None}


class Values(_library._Handle):
    """The checkpoint at `path`: a folder, a .safetensors file or an index. InputError where it is of a form that qconv
    does not read, or damaged; of an output of qconv, whose bytes are known, damage is a CheckError.

    experts: None lists them as the file has them, "separate" each matrix by itself under its released name, "stacked"
    as transformers 5 holds them. adapters: LoRA adapters that are merged into the weights, each a path or
    (path, scale)."""
    closes = "qc_values_close"

    def __init__(self, path, experts: str | None = None, adapters: Iterable = ()):
        if experts not in EXPERTS:
            raise errors.UsageError(f"experts is {experts!r}; expected None, 'separate' or 'stacked'")
        self.path, self.is_output = os.fspath(path), os.path.isfile(os.path.join(path, "qconv.json"))
        given = [a if isinstance(a, tuple) else (a, 1.0) for a in adapters]
        paths = (c.c_char_p * len(given))(*[os.fsencode(a) for a, _ in given])
        scales = (c.c_double * len(given))(*[scale for _, scale in given])
        listed: set[str] = set()
        if self.is_output:
            with self._damage_told(""), _library.Reader(path) as reader:
                listed = {t.shard for device in reader.devices for t in device.tensors}
        for shard in sorted(listed):
            twin = shard.removesuffix(".zst")
            if twin not in listed and os.path.lexists(os.path.join(path, twin)):
                raise errors.InputError(f"{path}: '{twin}' lies beside '{shard}', and qconv.json lists only the latter: "
                                        "delete the one that is not the model")
        options = _library.ValuesOptions(EXPERTS.index(experts), len(given), paths, scales)
        with self._damage_told(""):
            super().__init__("qc_values_open", os.fsencode(path), c.byref(options))
        found = [_library.library().qc_values_at(self._handle, i).contents
                 for i in range(_library.library().qc_values_count(self._handle))]
        self.names: list[str] = [t.name.decode() for t in found]  # in bytewise order
        self._index = {name: i for i, name in enumerate(self.names)}
        self._tensors = [(tuple(t.dims[:t.ndim]), DTYPES[t.dtype], t.stored_as.decode() if t.stored_as else None)
                         for t in found]

    @contextmanager
    def _damage_told(self, module: str) -> Iterator[None]:
        """What cannot be read of an output is looked at once more: whether the bytes of a module's tensors, or of all for
        "", are those that its manifest has."""
        try:
            try:
                yield
            except errors.InputError:
                if self.is_output:
                    with Output(self.path) as output:
                        for name in output.tensors:
                            if name.startswith(module):
                                output.read(name)
                raise
        except errors.CheckError as e:
            raise errors.CheckError(f"{e}; copy or convert {self.path} again") from None

    def _number(self, name: str) -> int:
        if name not in self._index:
            raise errors.InputError(f"{self.path} has no tensor '{name}'")
        return self._index[name]

    def shape(self, name: str) -> tuple:
        return self._tensors[self._number(name)][0]

    def dtype(self, name: str) -> str:
        """As safetensors spells it: "BF16"."""
        return self._tensors[self._number(name)][1]

    def stored_as(self, name: str) -> str | None:
        """"nf4", "fp8", "gptq" and so on; None where the file has the values themselves."""
        return self._tensors[self._number(name)][2]

    def read(self, name: str, dtype: torch.dtype | None = None, first: int = 0,
             count: int | None = None) -> torch.Tensor:
        """The tensor on the CPU, or [first, first + count) of its first dimension. dtype: float32, float16 or bfloat16,
        or None for its own, which is the only one of tensors that hold no floats. CheckError or InputError where a
        value cannot be read or is too large for the dtype."""
        number = self._number(name)
        shape, own, _ = self._tensors[number]
        rows = shape[0] if shape else 1
        count = rows - first if count is None else count
        wanted = TORCH.get(own) if dtype is None else dtype
        if not self._handle:
            raise errors.UsageError(f"{self.path} is closed")
        if wanted not in NAMES:
            raise errors.UsageError(f"'{name}' is {own} and cannot be read as {dtype or own}; expected torch.float32, "
                                    "float16 or bfloat16")
        if not 0 <= first <= first + count <= rows:
            raise errors.UsageError(f"'{name}' has {rows} rows; {count} from {first} on were asked for")
        out = torch.empty((count, *shape[1:]) if shape else (), dtype=wanted)
        if out.numel() > 0:
            with self._damage_told(name.removesuffix(".weight")):
                _library.call("qc_values_read", self._handle, number, first, count, out.data_ptr(),
                              DTYPES.index(NAMES[wanted]))
        return out

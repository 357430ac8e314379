"""Second moments: sums of a b^T over tokens, and those of the gradients of outputs (docs/theory/calibration.md)."""
from __future__ import annotations

import os
import shutil
from typing import Dict, Optional, Tuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ._calibrate_door import scratch_folder

ROWS = 4096   # tokens that are multiplied in float32 before their product is added to a sum in float64
BLOCK = 1024  # outputs whose gradients count together


class Sum:
    """The sum of a b^T over tokens, where b may be a: [blocks, size, size], the blocks on its diagonal."""

    def __init__(self, width: int, size: Optional[int] = None) -> None:
        self.width, self.size = width, min(size or width, width)
        self.total: Optional[torch.Tensor] = None
        self.tokens = 0

    def blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """[tokens, width] -> [blocks, tokens, size], the last block filled up with zeros."""
        rows = torch.nn.functional.pad(rows.float(), (0, -self.width % self.size))
        return rows.reshape(len(rows), -1, self.size).transpose(0, 1)

    def add(self, a: torch.Tensor, b: Optional[torch.Tensor] = None, tokens: Optional[int] = None) -> None:
        """a, b: [tokens, width]. tokens: how many of them count, where the others are zeros."""
        self.tokens += len(a) if tokens is None else tokens
        for at in range(0, len(a), ROWS):
            left = self.blocks(a[at:at + ROWS])
            product = left.transpose(1, 2) @ (left if b is None else self.blocks(b[at:at + ROWS]))
            if self.total is None:
                self.total = torch.zeros(product.shape, dtype=torch.float64, device=product.device)
            self.total += product

    def mean(self) -> torch.Tensor:
        """float32 on the CPU. Of no tokens there is none."""
        assert self.total is not None
        return self.total.float().div_(max(1, self.tokens)).cpu()  # a quotient in double would take twice the room


class Gradients:
    """Sums of g g^T, g being gradients of outputs. Those of one layer are in memory, and the others in files."""

    def __init__(self) -> None:
        self.folder, self.layer = scratch_folder(False), ""
        self.sums: Dict[str, Sum] = {}

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, layer: str) -> str:
        return os.path.join(self.folder, "gradients-%s.safetensors" % layer)

    def turn_to(self, layer: str) -> None:
        """Puts away what there is of another layer, and takes out what there is of this one."""
        if layer == self.layer:
            return
        self.flush()
        self.layer = layer
        if os.path.exists(self.path(layer)):  # a layer that the model goes through more than once
            with safe_open(self.path(layer), "pt") as file:
                for name in file.keys():
                    if name.endswith(" tokens"):
                        continue
                    width, tokens = file.get_tensor(name + " tokens").tolist()
                    total = file.get_tensor(name)
                    self.sums[name] = entry = Sum(width, total.shape[-1])
                    entry.tokens, entry.total = tokens, total.double() * max(1, tokens)

    def flush(self) -> None:
        if self.sums:
            tensors = {}
            for name, entry in self.sums.items():
                tensors[name], tensors[name + " tokens"] = entry.mean(), torch.tensor([entry.width, entry.tokens])
            save_file(tensors, self.path(self.layer))
        self.sums = {}

    def add(self, layer: str, module: str, g: torch.Tensor) -> None:
        """g: [tokens, outputs]. A token whose gradients are all zero is padding, or does not get here."""
        self.turn_to(layer)
        entry = self.sums.setdefault(module, Sum(g.shape[1], BLOCK))
        entry.add(g, tokens=int((g != 0).any(1).sum()))

    def of(self, layer: str, module: str) -> Optional[Tuple[torch.Tensor, int]]:
        """The mean [blocks, size, size], and of how many tokens it is."""
        self.turn_to(layer)
        entry = self.sums.get(module)
        return None if entry is None or entry.tokens == 0 else (entry.mean(), entry.tokens)

"""The program's side of calibrating: `qconv convert --hessians fd:N` plans, solves, stores and writes
(docs/calibration.md has what is said through the socket)."""
from __future__ import annotations

import json
import mmap
import os
import re
import shutil
import socket
import tempfile
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from safetensors.torch import save_file

from .errors import ProgramError

Weight = Tuple[str, Optional[int]]  # a tensor of the checkpoint, and the matrix of a stack


class Closed(Exception):
    """The program has ended: it has said why itself."""


def entry(weight: Weight) -> Dict[str, Any]:
    return {"name": weight[0]} if weight[1] is None else {"name": weight[0], "matrix": weight[1]}


def weight_of(said: Dict[str, Any]) -> Weight:
    return said["name"], said.get("matrix")


def place_of(weight: Weight, known: Dict[str, Any]) -> Tuple[Optional[int], int]:
    """(the expert that it is of a stack, the first of its outputs in that matrix)."""
    inside = re.search(r"\[(\d+)(?:, (gate|up))?\]$", known["module"]) if weight[1] is not None else None
    return (int(inside.group(1)), known["rows"] if inside.group(2) == "up" else 0) if inside else (None, 0)


SHARED = "/dev/shm"
ROOM = 8 << 30  # bytes that have to be free there


def scratch_folder(in_memory: bool) -> str:
    """A folder for files that go to and fro, in memory if that is asked for and has room, else in TMPDIR. Those of
    processes that were killed are removed."""
    roomy = os.path.isdir(SHARED) and os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > ROOM
    place = SHARED if in_memory and roomy else tempfile.gettempdir()
    for name in os.listdir(place):
        found = re.match(r"qconv-calibrating-(\d+)-", name)
        if found and not os.path.exists("/proc/" + found.group(1)):
            shutil.rmtree(os.path.join(place, name), ignore_errors=True)
    return tempfile.mkdtemp(prefix="qconv-calibrating-%d-" % os.getpid(), dir=place)


class Door:
    """One conversation. `theirs` is what the program inherits."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.reader = self.ours.makefile("r", encoding="utf-8")
        self.folder = scratch_folder(True)  # files to and fro
        self.tokens = 0                     # all that pass
        self.weights: Dict[Weight, Dict[str, Any]] = {}
        self.left: Dict[Weight, str] = {}
        self.ahead: Dict[str, Any] = {}     # the phase as the program said it

    def started(self) -> None:
        """The program has its end now."""
        self.theirs.close()

    def say(self, message: Dict[str, Any]) -> None:
        try:
            self.ours.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            raise Closed() from None

    def hear(self) -> Dict[str, Any]:
        try:
            line = self.reader.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            raise Closed()
        heard: Dict[str, Any] = json.loads(line)
        return heard

    def phase(self) -> str:
        """Waits for what is to be done: "weigh", "calibrate" or "dry-run". The weights are in `weights` then."""
        heard = self.ahead = self.hear()
        self.weights, self.left = {weight_of(w): w for w in heard["weights"]}, {}
        return str(heard["phase"])

    def module(self, weight: Weight) -> str:
        """What a file of moments calls it."""
        return str(self.weights[weight]["module"])

    def solve(self, tensors: Dict[str, torch.Tensor], wanted: bool) -> Dict[Weight, torch.Tensor]:
        """Hands over moments. Returns the values of what was made of them, float32 [outputs, inputs], where they are
        wanted. `left` then has the others, and why. `tensors` is empty then: they would take as much memory again."""
        path, values = os.path.join(self.folder, "moments"), os.path.join(self.folder, "values")
        save_file({k: v.contiguous() for k, v in tensors.items()}, path)
        tensors.clear()
        self.say({"solve": path, "values": values if wanted else None, **({} if wanted else {"tokens": self.tokens})})
        heard = self.hear()
        os.remove(path)
        solved = heard["solved"]
        for said in solved:
            self.weights[weight_of(said)]["made"] = True
        self.left.update({weight_of(s): s["why"] for s in heard["left"]})
        return self.read(values, solved) if wanted else {}

    def values(self, weights: Sequence[Weight], searched: bool = False) -> Dict[Weight, torch.Tensor]:
        """Of weights that are made, or what --scale search makes of any."""
        path = os.path.join(self.folder, "values")
        self.say({"values": [entry(w) for w in weights], "to": path, "searched": searched})
        return self.read(path, self.hear()["values"])

    def read(self, path: str, said: List[Dict[str, Any]]) -> Dict[Weight, torch.Tensor]:
        if not said:
            return {}
        with open(path, "rb") as file:
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        os.remove(path)
        out = {}
        for one in said:
            weight = weight_of(one)
            known = self.weights.get(weight)
            if known is None:
                raise ProgramError("the program made '%s', which it had not named" % weight[0])
            rows, cols = known["rows"], known["cols"]
            values = torch.frombuffer(view, dtype=torch.float32, count=rows * cols, offset=one["offset"])
            out[weight] = values.reshape(cols, rows).t() if known["turned"] else values.reshape(rows, cols)
        return out

    def end(self, report: Dict[str, Any]) -> None:
        self.say({"end": report})

    def close(self) -> None:
        self.reader.close()
        self.ours.close()
        shutil.rmtree(self.folder, ignore_errors=True)

#!/usr/bin/env python3
"""KL divergence of --to auto's mixtures between 4 and 8 bits, beside llama.cpp's at as many bits.

    mixtures.py OUT.json [--qconv PROGRAM] [--peers PYTHON] MODEL:TEXT:JUDGE [...]

Models and texts as in reallocations.py. PYTHON: as accuracy_peers.py needs it. Every mixture is made in the form of
compressed-tensors within BITS a weight: with int4 and int8 alone, as before there were other widths; by weights alone; by
`python -m qconv importance` on TEXT; and calibrated on TEXT. Whatever made a model, `qconv.evaluate` judges it on JUDGE.
"""
from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np

import accuracy_models as am
import llama_numpy as lm
from result_page import json_text

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))
BITS = (5.1, 6.1)
PEERS = ("Q5_K_M", "Q6_K")
CONTEXT, TOKENS, JUDGED = 256, 32768, 24576


def stored_bits(folder: Path, names: list[str], weights: dict) -> float:
    """Codes and scales of these weights, by element; what stays as it was counts 16 bits."""
    stored, size = lm.read_tensors(folder), 0
    for name in names:
        for key, t in stored.items():
            if key.startswith(name) and not key.endswith("_shape"):
                size += t.nbytes // (2 if t.dtype == np.float32 else 1)  # which has bfloat16 been read as
    return 8 * size / sum(weights[n].size for n in names)


class Subject:
    def __init__(self, args: argparse.Namespace, subject: str, scratch: Path) -> None:
        folder, self.text, self.judge = subject.split(":")
        self.args, self.scratch, self.source = args, scratch, scratch / "source"
        self.weights = lm.read_weights(folder)
        self.names = [n for n, w in self.weights.items() if w.ndim == 2 and ".layers." in n]
        self.run(args.qconv, "-q", "--to", "bf16", "--rest", "bf16", "--compress", "none", folder, self.source)
        self.rows: list[dict] = []

    def run(self, *command: object) -> None:
        environment = dict(os.environ, QCONV_PROGRAM=os.fspath(self.args.qconv), PYTHONPATH=os.pathsep.join(
            [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]))
        subprocess.run(list(map(str, command)), check=True, env=environment, stdout=subprocess.DEVNULL)

    def add(self, name: str, folder: Path, bits: float, **more: object) -> None:
        import qconv
        found = qconv.evaluate(folder, against=self.source, text=self.judge, context=CONTEXT, max_tokens=JUDGED, device="cpu")
        self.rows.append({"name": name, "bits": round(bits, 4), "kl": found.kl_mean, "kl_error": found.kl_error, **more})
        print(self.rows[-1], file=sys.stderr, flush=True)

    def own(self) -> None:
        importance = self.scratch / "importance.json"
        python = (sys.executable, "-B", "-m", "qconv")
        self.run(*python, "importance", "-q", self.source, "--text", self.text, "--tokens", TOKENS, "--context", CONTEXT,
                 "--out", importance)
        for bits in BITS:
            auto = ("--to", "auto", "--format", "compressed-tensors", "--bits", bits, "--compress", "none", "-q", "--force")
            for name, command in (
                    ("int4 and int8", (self.args.qconv, *auto, "--schemes", "int4,int8,16bit")),
                    ("weights alone", (self.args.qconv, *auto)),
                    ("importance", (self.args.qconv, *auto, "--importance", importance)),
                    ("calibrated", (*python, "calibrate", *auto, "--text", self.text, "--calibration-tokens", TOKENS,
                                    "--calibration-context", CONTEXT, "--mix", 0))):
                out = self.scratch / re.sub(r"\W", "-", "%s %g" % (name, bits))
                self.run(*command, self.source, out)
                self.add("auto, %g bits, %s" % (bits, name), out, stored_bits(out, self.names, self.weights))

    def peers(self) -> dict:
        given, made = self.scratch / "peers-in", self.scratch / "peers-out"
        given.mkdir()
        made.mkdir()
        weights = lm.read_weights(self.source)
        np.savez(given / "weights.npz", **{n: weights[n] for n in self.names})
        (given / "config.json").write_text((self.source / "config.json").read_text())
        self.run(self.args.peers, "-B", ROOT / "bench" / "accuracy_peers.py", given, made, *PEERS)
        for row in json.loads((made / "peers.json").read_text())["rows"]:
            values = dict(np.load(made / row["file"]))
            config = json.loads((self.source / "config.json").read_text())
            folder = Path(am.write_model(self.scratch / row["file"].removesuffix(".npz"), config, {**weights, **values}))
            for file in self.source.glob("tokenizer*"):
                (folder / file.name).write_bytes(file.read_bytes())
            self.add(row["name"], folder, row["bits"], types=row["types"])
        return json.loads((made / "peers.json").read_text())["versions"]


def measured(args: argparse.Namespace, subject: str) -> dict:
    with tempfile.TemporaryDirectory() as scratch:
        s = Subject(args, subject, Path(scratch))
        s.own()
        versions = s.peers() if args.peers else {}
        folder = Path(subject.split(":")[0])
        return {"model": folder.parent.name if folder.name == "model" else folder.name, "text": Path(s.text).name,
                "judge": Path(s.judge).name, "tokens": TOKENS, "context": CONTEXT, "versions": versions, "rows": s.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out")
    parser.add_argument("subjects", nargs="+", metavar="MODEL:TEXT:JUDGE")
    parser.add_argument("--qconv", type=Path, default=ROOT / "build" / "qconv")
    parser.add_argument("--peers", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ.setdefault("QCONV_PROGRAM", str(args.qconv.resolve()))
    os.environ.setdefault("QCONV_LIBRARY", str(args.qconv.resolve().parent / "libqconv.so"))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = {"bench": "mixtures", "commit": commit, "models": [measured(args, subject) for subject in args.subjects]}
    Path(args.out).write_text(json_text(found) + "\n")


main()

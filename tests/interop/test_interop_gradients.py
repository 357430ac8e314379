"""The backward pass of `--calibrate` against PyTorch's: second moments of the gradients of every linear layer's
outputs, for random models of every family that has them. The labels are drawn in the same way from both models."""
import sys
import tempfile
import unittest
from pathlib import Path

import interop_support as s
import numpy as np
import test_interop_experts as experts
from test_interop_llama import ENCODERS, MODELS, SIZES, load, make_model, sequences

sys.path.insert(0, str(s.ROOT / "tests"))
from gradient_moments import moments  # noqa: E402

# A matrix as a whole. A wrong formula is off by 1e-2 and more; float arithmetic in another order by this.
BOUND = 1e-4
LENGTHS = (65, 1, 130)
WITHOUT = ("mllama",)


def ours(folder, ids, block):
    with tempfile.TemporaryDirectory(dir=s.SCRATCH) as work:
        asked, out = Path(work, "ids"), Path(work, "out")
        asked.write_text("".join(" ".join(map(str, row)) + "\n" for row in ids))
        names = s.run(s.BUILD / "logits_tool", "--moments", block, folder, asked, out).decode().split()
        raw, at, made = np.fromfile(out, "<f4"), 0, {}
        for name, rows in zip(names[::2], map(int, names[1::2])):
            each = min(rows, block)
            count = -(-rows // each)
            made[name] = raw[at:at + count * each**2].reshape(count, each, each)
            at += count * each**2
        assert at == len(raw)
    return made


class Gradients(unittest.TestCase):
    def compare(self, name, make=make_model, vocabulary=SIZES["vocab_size"], lengths=LENGTHS):
        folder = make(name)
        ids = sequences(vocabulary, lengths, seed=3)
        made = ours(folder, ids, 4096)
        wanted = {key: g.numpy() for key, g in moments(load(folder), ids).items()}
        self.assertEqual(len(made), len(wanted))
        worst = 0.0
        for (key, got), (_, want) in zip(sorted(made.items()), sorted(wanted.items())):
            error = float(np.linalg.norm(got[0] - want) / np.linalg.norm(want))
            worst = max(worst, error)
            self.assertLess(error, BOUND, key)
        s.note(f"{name}: largest relative error of moments of gradients {worst:.1e}")

    def test_blocks_are_those_of_the_whole(self):
        ids = sequences(SIZES["vocab_size"], LENGTHS, seed=3)
        folder = make_model("qwen3")
        whole, parts = ours(folder, ids, 4096), ours(folder, ids, 24)
        for key, blocks in parts.items():
            n = len(whole[key][0])
            for i, block in enumerate(blocks):
                at, end = i * 24, min(n, i * 24 + 24)
                want = np.zeros_like(block)
                want[:end - at, :end - at] = whole[key][0][at:end, at:end]
                self.assertLess(np.abs(block - want).max(), 1e-5 * np.abs(want).max(), key)

    def test_without(self):
        for name in ("bert", "distilbert"):
            with self.assertRaisesRegex(AssertionError, "it has"):
                ours(make_model(name), [[1, 2, 3]], 64)


for _name in MODELS:
    def _test(self, name=_name):
        self.compare(name)
    if _name not in ENCODERS and not _name.startswith(WITHOUT):
        setattr(Gradients, "test_" + _name.replace("-", "_"), _test)

for _name in experts.MODELS:
    def _test(self, name=_name):
        self.compare(name, experts.make_model, experts.SIZES["vocab_size"], (60, 1, 41, 60))
    setattr(Gradients, "test_experts_" + _name.replace("-", "_"), _test)

if __name__ == "__main__":
    s.main()

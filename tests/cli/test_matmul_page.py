"""The program of docs/matmul.md: it loads a layer that qconv converted and multiplies, on the CPU
shim, and gives what the stored numbers say."""
import math
import os
import subprocess
import unittest

from output_case import PLAIN, OutputCase
from qconv_case import ROOT
from test_scale import read_back
import make_checkpoint as mk

MODEL = os.path.join(ROOT, "tests", "data", "kjv-llama", "model")
ROWS = 4
EXAMPLE = os.environ.get("MATMUL_EXAMPLE")


@unittest.skipUnless(EXAMPLE, "run by ctest")
class MatmulPage(OutputCase):
    def run_example(self, *args):
        return subprocess.run([EXAMPLE, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              timeout=120)

    def test_a_layer_of_every_kind(self):
        forms = [["--to", "nf4"], ["--to", "nf4", "--no-double-quant", "--block-size", "128"],
                 ["--to", "int8"], ["--to", "int8", "--block-size", "64"]]
        shapes = {n.removesuffix(".weight"): t[1] for n, t in mk.read_checkpoint(MODEL).items()}
        for i, form in enumerate(forms):
            out = self.path("out%d" % i)
            how = PLAIN if i % 2 else []
            self.ok("-q", *form, *PLAIN, MODEL, out + ".plain")
            tensors = mk.read_checkpoint(out + ".plain")
            if how != PLAIN:
                self.ok("-q", *form, MODEL, out)
            # Rows of 192 are aligned, rows of 440 are not.
            for layer in ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"]:
                r = self.run_example(out if how != PLAIN else out + ".plain", layer)
                self.assertEqual(r.returncode, 0, r.stderr)
                got = [[float(v) for v in line.split()] for line in r.stdout.decode().splitlines()]
                rows, cols = shapes[layer]
                w, _ = read_back(tensors, layer + ".weight", form[1:], rows * cols, cols)
                self.assertEqual([len(y) for y in got], [rows] * ROWS)
                error = size = 0.0
                for m in range(ROWS):
                    x = [(m * cols + k) % 7 * 0.25 - 0.75 for k in range(cols)]
                    for n in range(rows):
                        want = math.fsum(a * b for a, b in zip(x, w[n * cols:(n + 1) * cols]))
                        error += (got[m][n] - want) ** 2
                        size += want ** 2
                self.assertGreater(size, 0.0)
                self.assertLessEqual(math.sqrt(error / size), 1e-3, (form, layer))

    def test_what_it_cannot_do(self):
        self.ok("-q", "--to", "nf4", MODEL, self.path("out"))
        r = self.run_example(self.path("out"), "model.norm")
        self.assertEqual(r.returncode, 3)
        self.assertIn("model.norm.weight is not quantized", r.stderr.decode())
        r = self.run_example(self.path("out"), "nothing")
        self.assertEqual(r.returncode, 3)
        self.assertIn("there is no nothing.weight", r.stderr.decode())
        r = self.run_example(self.path("none"), "nothing")
        self.assertEqual(r.returncode, 3)
        r = subprocess.run([EXAMPLE, self.path("out"), "nothing"], stderr=subprocess.PIPE,
                           env=dict(os.environ, QC_SHIM_DEVICES="nodriver"), timeout=60)
        self.assertEqual(r.returncode, 5, r.stderr)


if __name__ == "__main__":
    unittest.main()

"""make_checkpoint.py, which the other tests stand on: headers as the reference writer's, values
that come back, and qconv reads what it writes."""
import os
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
import make_checkpoint as mk  # noqa: E402

QCONV = os.environ["QCONV"]


class MakeCheckpoint(unittest.TestCase):
    def setUp(self):
        self.tmp = tempfile.TemporaryDirectory()
        self.dir = self.tmp.name
        self.addCleanup(self.tmp.cleanup)

    def inspect(self, path):
        return subprocess.run([QCONV, "inspect", path], capture_output=True, text=True)

    def test_headers_have_the_released_length(self):
        for name in mk.model_names():
            model = mk.load_model(name)
            size = 8 + len(mk.patterns.header(model)) + mk.patterns.totals(model)["total_bytes"]
            out = os.path.join(self.dir, name)
            mk.write_model(out, model)
            self.assertEqual(os.path.getsize(os.path.join(out, "model.safetensors")), size, name)
            # Only the header takes room on the disk.
            blocks = os.stat(os.path.join(out, "model.safetensors")).st_blocks * 512
            self.assertLess(blocks, 16 << 20)

    def test_every_model_opens(self):
        for name in mk.model_names():
            out = os.path.join(self.dir, name)
            mk.write_model(out, mk.load_model(name), shard_bytes=5 * 10**9)
            run = self.inspect(out)
            self.assertEqual(run.returncode, 0, run.stderr)

    def test_small_models_have_values(self):
        for name in mk.model_names():
            out = os.path.join(self.dir, name)
            mk.write_model(out, mk.load_model(name), layers=2, experts=2, scale=64, seed=3,
                           shard_bytes=10**6)
            tensors = mk.read_checkpoint(out)
            rows = list(mk.model_rows(mk.load_model(name), 2, 2, 64))
            self.assertEqual(len(tensors), len(rows))
            for row_name, dtype, shape, _ in rows:
                self.assertEqual(tensors[row_name][:2], (dtype, shape))
                if dtype in ("BF16", "F32"):
                    start = mk.decode(dtype, tensors[row_name][2][:4096])
                    self.assertTrue(all(abs(v) < 1 for v in start))
            self.assertEqual(self.inspect(out).returncode, 0)

    def test_numbers_survive(self):
        values = [0.0, -0.0, 1.0, -2.5, 0.0078125, 65504.0]
        for dtype in ("F64", "F32", "F16"):
            self.assertEqual(mk.decode(dtype, mk.encode(dtype, values)), values)
        self.assertEqual(mk.encode("BF16", [1.0, -2.0, 1 / 3, float("inf")]),
                         bytes.fromhex("803f00c0ab3e807f"))
        # Halfway between two bfloat16: to even.
        self.assertEqual(mk.encode("BF16", [1 + 2**-8, 1 + 3 * 2**-8]), bytes.fromhex("803f823f"))
        path = os.path.join(self.dir, "x.safetensors")
        mk.write_safetensors(path, {"b": ("U8", [3], b"abc"), "a": ("F32", [], b"\0\0\x80?")})
        self.assertEqual(mk.read_safetensors(path), ({"b": ("U8", [3], b"abc"),
                                                      "a": ("F32", [], b"\0\0\x80?")},
                                                     {"format": "pt"}))


if __name__ == "__main__":
    unittest.main()

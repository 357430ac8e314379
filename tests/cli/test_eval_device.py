#!/usr/bin/env python3
"""`qconv eval --device`: what a GPU's kernels compute is what the CPU computes, but for their rounding
to float16. The GPU is the shim's: $QCONV_SHIM is qconv with its kernels run by the CPU."""
import json
import os
import unittest

from output_case import OutputCase
import qconv_case

SHIM = os.environ.get("QCONV_SHIM", os.path.join(qconv_case.ROOT, "build", "qconv_shim"))
BUNDLED = os.path.join(qconv_case.ROOT, "tests", "data", "kjv-llama")
MODEL = os.path.join(BUNDLED, "model")


class EvalDevice(OutputCase):
    def setUp(self):
        super().setUp()
        with open(os.path.join(BUNDLED, "heldout.txt"), encoding="utf-8") as f:
            self.write("t.txt", f.read()[:70])

    def run_qconv(self, *args, **more):
        saved, qconv_case.QCONV = qconv_case.QCONV, SHIM
        try:
            return super().run_qconv(*args, **more)
        finally:
            qconv_case.QCONV = saved

    def eval(self, *args, **more):
        return json.loads(self.ok("eval", "--json", "-q", "--text", "t.txt", "--context", "48",
                                  *args, **more))

    def test_as_on_the_cpu(self):
        self.ok("-q", "--device", "cpu", "--to", "nf4", MODEL, "out")
        libraries = [os.environ.get("FAKE_CUBLAS", "/nowhere.so"), "/nowhere.so"]
        cpu = self.eval("out", "--against", MODEL, "--device", "cpu")
        self.assertEqual(cpu["device"], "cpu")
        for library in libraries:
            gpu = self.eval("out", "--against", MODEL, "--device", "cuda",
                            env={"QCONV_LIBCUBLAS": library})
            self.assertIn("cuda:0", gpu["device"])
            for name in ("tokens", "windows", "predicted"):
                self.assertEqual(gpu[name], cpu[name])
            for name in ("perplexity", "base_perplexity"):
                self.assertLess(abs(gpu[name] / cpu[name] - 1), 5e-4, name)
            self.assertNotEqual(gpu["perplexity"], cpu["perplexity"])  # it was not the CPU
            self.assertLess(abs(gpu["kl_mean"] / cpu["kl_mean"] - 1), 0.02)

    def test_integers(self):
        """Codes go to the device and are dequantized there. A scale of 0 is refused."""
        self.ok("-q", "--device", "cpu", "--format", "compressed-tensors", "--to", "int4",
                "--block-size", "32", "--compress", "none", MODEL, "out")
        cpu, gpu = (self.eval("out", "--device", d)["perplexity"] for d in ("cpu", "cuda"))
        self.assertLess(abs(gpu / cpu - 1), 5e-4)
        self.assertNotEqual(gpu, cpu)
        path = self.path("out/model.safetensors")
        with open(path, "r+b") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
            name = "model.layers.0.mlp.up_proj.weight_scale"
            f.seek(8 + size + header[name]["data_offsets"][0] + 6)
            f.write(b"\0\0")
        for device in ("cpu", "cuda"):
            self.fails(3, "eval", "out", "--text", "t.txt", "--device", device,
                       has="scale 3 of it is 0")

    def test_no_device(self):
        r = self.run_qconv("eval", MODEL, "--text", "t.txt", "--device", "cuda",
                           env={"QC_SHIM_DEVICES": "none"})
        self.assertEqual(r.returncode, 5)

    def test_too_little_memory(self):
        r = self.run_qconv("eval", MODEL, "--text", "t.txt", "--device", "cuda",
                           env={"QC_SHIM_DEVICES": "sm_90:4:64KiB"})
        self.assertNotEqual(r.returncode, 0)
        self.assertIn("--device cpu goes without it", r.stderr.decode())


if __name__ == "__main__":
    unittest.main()

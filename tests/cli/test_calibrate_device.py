#!/usr/bin/env python3
"""`qconv --hessians --device cuda`: what a GPU makes of second moments is as good as what the CPU makes of them,
the same from run to run, and what it says where it cannot. The GPU is the shim's: $QCONV_SHIM is qconv with its
kernels run by the CPU, cuBLAS and cuSOLVER are the tests' own."""
import hashlib
import json
import os
import re
import struct
import unittest

import qconv_case
from output_case import OutputCase

SHIM = os.environ.get("QCONV_SHIM", os.path.join(qconv_case.ROOT, "build", "qconv_shim"))
MODEL = os.path.join(qconv_case.ROOT, "tests", "data", "kjv-llama", "model")
LIBRARIES = {"QCONV_LIBCUBLAS": os.environ.get("FAKE_CUBLAS", ""),
             "QCONV_LIBCUSOLVER": os.environ.get("FAKE_CUSOLVER", "")}
MOMENTS = ("--hessians", "m.safetensors", "--force", "--split-fused")
ERRORS = r"(\S+)\.weight: relative error of its outputs ([\d.e-]+) rounded, ([\d.e-]+) calibrated"


class CalibrateDevice(OutputCase):
    def run_qconv(self, *args, **more):
        more["env"] = {**LIBRARIES, **more.get("env", {})}
        saved, qconv_case.QCONV = qconv_case.QCONV, SHIM
        try:
            return super().run_qconv(*args, **more)
        finally:
            qconv_case.QCONV = saved

    def convert(self, out, device, *args, **more):
        """Errors of outputs: weight -> (rounded, calibrated); digest of what was written; words."""
        r = self.run_qconv("-vv", "--compress", "none", "--device", device, *args, MODEL, out,
                           timeout=600, **more)
        self.assertEqual(r.returncode, 0, r.stderr.decode())
        said = r.stderr.decode()
        with open(self.path(out, "model.safetensors"), "rb") as f:
            digest = hashlib.sha256(f.read()).hexdigest()
        return {m[0]: (float(m[1]), float(m[2])) for m in re.findall(ERRORS, said)}, digest, said

    def compare(self, gpu, cpu, count, share):
        self.assertEqual(len(gpu), count)
        self.assertEqual(sorted(gpu), sorted(cpu))
        for name, (rounded, calibrated) in gpu.items():
            self.assertLess(abs(rounded / cpu[name][0] - 1), 0.02, name)
            self.assertLess(abs(calibrated / cpu[name][1] - 1), 0.04, name)
            self.assertLess(calibrated, share * rounded, name)

    def moments(self, outputs=(), names="k"):
        """Moments of modules' inputs, and of their outputs in blocks [blocks, b, b]."""
        parts = [("second_moment", "F64", [192, 192], struct.pack(
            "<36864d", *((1.0 + i % 7 if i == j else 0.9 / (1 + abs(i - j)))
                         for i in range(192) for j in range(192)))),
                 ("tokens", "I64", [1], struct.pack("<q", 5000))]
        if outputs:
            blocks, b, _ = outputs
            parts += [("output_moment", "F32", outputs, struct.pack(
                "<%df" % (blocks * b * b), *((1.0 + 9 * (i % 5 == 2)) if i == j else 0.7 * (-1) ** (i + j)
                                             for _ in range(blocks) for i in range(b) for j in range(b)))),
                      ("output_tokens", "I64", [1], struct.pack("<q", 5000))]
        header, data = {}, b""
        for name, dtype, shape, raw in parts:
            for module in names:
                header["model.layers.0.self_attn.%s_proj.%s" % (module, name)] = {
                    "dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
                data += raw
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path("m.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + data)

    def test_moments_of_a_file(self):
        self.moments()
        for form in (("nf4",), ("int8", "--format", "compressed-tensors")):
            args = ("--to", *form, *MOMENTS)
            cpu, _, _ = self.convert("cpu", "cpu", *args)
            gpu, _, said = self.convert("gpu", "cuda", *args)
            self.compare(gpu, cpu, 1, 1.0)
            self.assertRegex(said, r"calibrating on .*, cuBLAS [\d.]+, cuSOLVER [\d.]+")
            self.assertRegex(said, r"up to [\d.]+ KB of memory, [\d.]+ MB of .*'s")

    def test_both_sides_of_a_file(self):
        self.moments(outputs=[2, 32, 32])
        for form in (("nf4",), ("int8",), ("int4", "--block-size", "64")):
            args = ("--to", *form, *MOMENTS)
            cpu, _, _ = self.convert("cpu", "cpu", *args)
            _, one, _ = self.convert("gpu", "cuda", *args, "--sided", "one")
            gpu, two, _ = self.convert("gpu", "cuda", *args)
            self.compare(gpu, cpu, 1, 1.2)  # what is made small is another sum
            self.assertNotEqual(one, two)
            with open(self.path("gpu", "qconv.json")) as f:
                self.assertEqual(json.load(f)["options"]["calibrate"]["sided"], "two")
            self.ok("verify", "gpu", "--against", MODEL, "-q")

    def test_continues_on_the_same_device_only(self):
        """Twice the same bytes, too."""
        self.moments(names="kv")
        args = ("--to", "nf4", *MOMENTS)
        _, whole, _ = self.convert("whole", "cuda", *args)
        self.interrupt_at(b"k_proj.weight: relative error",
                          [SHIM, "-vv", "--compress", "none", "--device", "cuda", *args, MODEL, "out"], LIBRARIES)
        r = self.run_qconv("--compress", "none", "--device", "cpu", *args, MODEL, "out")
        self.assertEqual(r.returncode, 2, r.stderr)
        self.assertRegex(r.stderr.decode(), "calibration.*--restart")
        _, digest, said = self.convert("out", "cuda", *args)
        self.assertRegex(said, r"calibrating \d remaining weights?")
        self.assertEqual(digest, whole)

    def refused(self, code, words, **more):
        self.moments()
        r = self.run_qconv("--to", "nf4", *MOMENTS, "--device", "cuda", MODEL, "out", **more)
        self.assertEqual(r.returncode, code, r.stderr)
        self.assertRegex(r.stderr.decode(), words)
        self.assertFalse(os.path.exists(self.path("out")))

    def test_no_library(self):
        self.refused(5, "calibrating on a GPU: cuSOLVER cannot be loaded: .*--device cpu calibrates",
                     env={"QCONV_LIBCUSOLVER": "/nowhere.so"})
        self.refused(5, "calibrating on a GPU: cuBLAS cannot be loaded: .*--device cpu calibrates",
                     env={"QCONV_LIBCUBLAS": "/nowhere.so"})

    def test_too_little_memory(self):
        self.refused(1, r"on the GPU \(--device cpu calibrates without one\): .* no room for",
                     env={"QC_SHIM_DEVICES": "sm_90:4:1MiB"})

    def test_dry_run(self):
        self.moments()
        r = self.run_qconv("--to", "nf4", "--dry-run", *MOMENTS, "--device", "cuda", MODEL, "out")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertRegex(r.stderr.decode(), r"calibrating 1 weight .* MB of .*'s, .* of disk")


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""`qconv --calibrate --device cuda`: what a GPU makes of a text is as good as what the CPU makes of it,
the same from run to run, and what it says where it cannot. The GPU is the shim's: $QCONV_SHIM is
qconv with its kernels run by the CPU, cuBLAS and cuSOLVER are the tests' own."""
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
# Of the first layer of four: k and down; k and v.
FEW = ("--keep", "*.layers.[123].*", "--split-fused", "--keep", "*.[qvogu]*_proj.*")
LESS = ("--keep", "*.layers.[123].*", "--split-fused", "--keep", "*.[qogud]*_proj.*")
# By itself a GPU counts all outputs alike, and the CPU does not.
TEXT = ("--calibrate", "default", "--calibration-tokens", "64", "--calibration-context", "32", "--sided", "one")
BOTH = (*TEXT[:-1], "two")
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

    def compare(self, gpu, cpu, count, share=0.9):
        self.assertEqual(len(gpu), count)
        self.assertEqual(sorted(gpu), sorted(cpu))
        for name, (rounded, calibrated) in gpu.items():
            # Inputs differ by float16's rounding.
            self.assertLess(abs(rounded / cpu[name][0] - 1), 0.02, name)
            self.assertLess(abs(calibrated / cpu[name][1] - 1), 0.04, name)
            self.assertLess(calibrated, share * rounded, name)

    def test_as_good_as_on_the_cpu(self):
        args = ("--to", "nf4", *FEW, *TEXT)
        cpu, on_cpu, _ = self.convert("cpu", "cpu", *args)
        gpu, on_gpu, said = self.convert("gpu", "cuda", *args)
        self.compare(gpu, cpu, 2)
        self.assertNotEqual(on_gpu, on_cpu)  # it was not the CPU
        self.assertRegex(said, r"calibrating on .*, cuBLAS [\d.]+, cuSOLVER [\d.]+")
        self.assertRegex(said, r"up to [\d.]+ MB of memory, [\d.]+ MB of .*'s")
        self.ok("verify", "gpu", "--against", MODEL, "-q")

    def test_int8(self):
        args = ("--to", "int8", *LESS, *TEXT)
        cpu, _, _ = self.convert("cpu", "cpu", *args)
        gpu, _, _ = self.convert("gpu", "cuda", *args)
        self.compare(gpu, cpu, 2)

    def test_integers(self):
        """Those that the forward pass takes on, and W8A8 with moments of a file below."""
        for form in (("int4", "--block-size", "64"), ("int4", "--block-size", "channel"),
                     ("int8", "--format", "compressed-tensors", "--activation-bits", "16")):
            args = ("--to", *form, *LESS, *TEXT, "--force")
            cpu, on_cpu, _ = self.convert("cpu", "cpu", *args)
            gpu, on_gpu, _ = self.convert("gpu", "cuda", *args)
            self.compare(gpu, cpu, 2)
            self.assertNotEqual(on_gpu, on_cpu)
            self.ok("verify", "gpu", "--against", MODEL, "-q")

    def moments(self, outputs=()):
        """Moments of one module's inputs, and of its outputs in blocks [blocks, b, b]."""
        module = "model.layers.0.self_attn.k_proj"
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
            header["%s.%s" % (module, name)] = {"dtype": dtype, "shape": shape,
                                                "data_offsets": [len(data), len(data) + len(raw)]}
            data += raw
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path("m.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + data)

    def test_moments_of_a_file(self):
        self.moments()
        for form in (("nf4",), ("int8", "--format", "compressed-tensors")):
            args = ("--to", *form, "--hessians", "m.safetensors", "--force", "--split-fused")
            cpu, _, _ = self.convert("cpu", "cpu", *args)
            gpu, _, _ = self.convert("gpu", "cuda", *args)
            self.compare(gpu, cpu, 1, 1.0)

    def test_both_sides_of_a_file(self):
        self.moments(outputs=[2, 32, 32])
        for form in (("nf4",), ("int8",), ("int4", "--block-size", "64")):
            args = ("--to", *form, "--hessians", "m.safetensors", "--force", "--split-fused")
            cpu, _, _ = self.convert("cpu", "cpu", *args)
            _, one, _ = self.convert("gpu", "cuda", *args, "--sided", "one")
            gpu, two, _ = self.convert("gpu", "cuda", *args)
            self.compare(gpu, cpu, 1, 1.2)  # what is made small is another sum
            self.assertNotEqual(one, two)
            with open(self.path("gpu", "qconv.json")) as f:
                self.assertEqual(json.load(f)["options"]["calibrate"]["sided"], "two")
            self.ok("verify", "gpu", "--against", MODEL, "-q")

    def test_both_sides_of_a_text(self):
        """The CPU makes the gradients; without the option there are none."""
        args = ("--to", "nf4", *LESS)
        cpu, _, _ = self.convert("cpu", "cpu", *args, *BOTH)
        gpu, two, said = self.convert("gpu", "cuda", *args, *BOTH)
        self.compare(gpu, cpu, 2, 1.2)  # what is made small is another sum
        self.assertRegex(said, r"gradients on the CPU by OpenBLAS")
        self.assertRegex(said, r"\d+ tokens pass backwards")
        with open(self.path("gpu", "qconv.json")) as f:
            self.assertEqual(json.load(f)["options"]["calibrate"]["sided"], "two")
        _, one, said = self.convert("one", "cuda", *args, *TEXT[:-2])
        self.assertNotEqual(one, two)
        self.assertNotIn("backwards", said)
        with open(self.path("one", "qconv.json")) as f:
            self.assertEqual(json.load(f)["options"]["calibrate"]["sided"], "one")

    def test_continues_on_the_same_device_only(self):
        """Twice the same bytes, too."""
        args = ("--to", "nf4", *LESS, *TEXT)
        _, whole, _ = self.convert("whole", "cuda", *args)
        self.interrupt_at(b"k_proj.weight: relative error",
                          [SHIM, "-vv", "--compress", "none", "--device", "cuda", *args, MODEL, "out"], LIBRARIES)
        r = self.run_qconv("--compress", "none", "--device", "cpu", *args, MODEL, "out")
        self.assertEqual(r.returncode, 2, r.stderr)
        self.assertRegex(r.stderr.decode(), "calibration.*--restart")
        _, digest, said = self.convert("out", "cuda", *args)
        self.assertRegex(said, r"calibrating \d remaining weights?")
        self.assertEqual(digest, whole)

    def refused(self, code, words, *args, **more):
        r = self.run_qconv("--to", "nf4", *TEXT, "--device", "cuda", *args, MODEL, "out", **more)
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
        self.refused(1, r"calibrating takes [\d.]+ MB of GPU memory, but cuda:0 \(.*\) has 2\d\d MB; "
                     "--device cpu calibrates without a GPU", env={"QC_SHIM_DEVICES": "sm_90:4:240MiB"})

    def test_dry_run(self):
        r = self.run_qconv("--to", "nf4", "--dry-run", *TEXT, "--device", "cuda", MODEL, "out")
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertRegex(r.stderr.decode(), r"calibrating 28 weights .* MB of .*'s, .* of disk")


if __name__ == "__main__":
    unittest.main()

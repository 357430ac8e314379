"""--device: GPUs give the bytes of the CPU, and what cannot be done says why.

The GPUs are the shim's: $QCONV_SHIM is qconv with its kernels run by the CPU (tests/shim)."""
import json
import os
import random
import unittest

from output_case import OutputCase
import qconv_case
import make_checkpoint as mk

SHIM = os.environ.get("QCONV_SHIM", os.path.join(qconv_case.ROOT, "build", "qconv_shim"))
LAYER = "model.layers.%d."
STEP = 512 << 10  # bytes of source that error sums are combined in
NEEDED = 6 * STEP  # the least memory of a GPU that a thread's three slots fit
FORMS = [
    ["nf4"],
    ["nf4", "--no-double-quant", "--block-size", "32", "--compress", "none"],
    ["nf4", "--block-size", "4096"],
    ["int8"],
    ["int8", "--block-size", "64"],
    ["int8", "--block-size", "128", "--no-double-quant", "--compress", "none"],
]
ACTIVATIONS_16 = ["int8", "--activation-bits", "16"]
INTEGERS = [["int4", "--block-size", n] for n in ("32", "128", "channel")] + [["int8"], ACTIVATIONS_16] + \
    [ACTIVATIONS_16 + ["--block-size", n] for n in ("32", "64", "128")] + \
    [["int%d" % bits, "--block-size", n] for bits, n in ((2, "64"), (3, "32"), (5, "128"), (6, "64"), (7, "128"))]


def devices(*memory):
    """For the shim: a GPU for each size."""
    return {"QC_SHIM_DEVICES": ",".join("sm_90:4:" + m for m in memory)}


class Device(OutputCase):
    def setUp(self):
        super().setUp()
        self.rng = random.Random(7)

    def run_qconv(self, *args, **more):
        """On the shim, unless plain qconv is asked for."""
        program = more.pop("program", SHIM)
        saved, qconv_case.QCONV = qconv_case.QCONV, program
        try:
            return super().run_qconv(*args, **more)
        finally:
            qconv_case.QCONV = saved

    def random(self, dtype, shape):
        return dtype, shape, mk.random_bytes(dtype, shape, self.rng)

    def gpu(self, out, *args, env=None, **more):
        """Converts m on the GPU; returns what it prints as JSON."""
        return json.loads(self.ok("--json", "--force", *args, self.path("m"), self.path(out),
                                  env=dict(devices("1GiB"), **(env or {})), **more))


class Bytes(Device):
    def weights(self):
        """Of more than a step, odd ends, rows longer and shorter than a run of sums, all dtypes."""
        return {LAYER % 0 + "mlp.up_proj.weight": self.random("BF16", [241, 1303]),
                LAYER % 0 + "mlp.down_proj.weight": self.random("F32", [79, 2100]),
                LAYER % 0 + "self_attn.q_proj.weight": self.random("F16", [33, 129]),
                LAYER % 0 + "self_attn.k_proj.weight": self.random("BF16", [3, 65]),
                LAYER % 0 + "self_attn.o_proj.weight": self.random("F64", [9, 64]),
                "model.norm.weight": self.random("F32", [64])}

    def test_every_form(self):
        self.model(self.weights())
        quantized = mk.numel([241, 1303]) + mk.numel([79, 2100]) + 33 * 129 + 3 * 65
        for i, form in enumerate(FORMS):
            to = ["--to"] + form
            self.ok("-q", "--device", "cpu", *to, self.path("m"), self.path("cpu%d" % i))
            o = self.gpu("gpu%d" % i, "--device", "cuda", "--threads", str(i % 4 + 1), *to,
                         env=dict(devices(*["1GiB"] * (i % 2 + 1)),
                                  QC_SHIM_STREAMS=["lazy", "eager", "shuffle:3"][i % 3]))
            self.assert_same("cpu%d" % i, "gpu%d" % i, form)
            names = ["cuda:%d (CPU shim sm_90)" % d for d in range(i % 2 + 1)]
            self.assertEqual(o["device"], ", ".join(names))
            self.assertAlmostEqual(o["gpu_share"], quantized / (quantized + 9 * 64))

    def test_searched_scales(self):
        """What is sampled for an offset, short groups, rows."""
        self.model({n: w for n, w in self.weights().items() if "up" not in n})
        for i, form in enumerate(FORMS):
            to = ["--scale", ["search", "refit"][i % 2], "--to"] + form
            self.ok("-q", "--device", "cpu", *to, self.path("m"), self.path("cpu%d" % i))
            o = self.gpu("gpu%d" % i, "--device", "cuda", "--threads", str(i % 4 + 1), *to,
                         env={"QC_SHIM_STREAMS": ["lazy", "eager", "shuffle:3"][i % 3]})
            self.assert_same("cpu%d" % i, "gpu%d" % i, form)
            self.assertGreater(o["gpu_share"], 0.99)

    def test_integers(self):
        """compressed-tensors: by groups and rows, absmax and searched, all dtypes. The last weight of the
        four stays on the CPU."""
        self.model({LAYER % 0 + "mlp.up_proj.weight": self.random("BF16", [193, 1408]),
                    LAYER % 0 + "mlp.down_proj.weight": self.random("F32", [21, 2176]),
                    LAYER % 0 + "self_attn.q_proj.weight": self.random("F16", [33, 128]),
                    LAYER % 0 + "self_attn.o_proj.weight": self.random("F64", [9, 128]),
                    "model.norm.weight": self.random("F32", [64])})
        quantized = mk.numel([193, 1408]) + mk.numel([21, 2176]) + 33 * 128
        for i, form in enumerate(INTEGERS):
            for scale in ("absmax", "search"):
                to = ["--format", "compressed-tensors", "--scale", scale, "--to"] + form
                self.ok("-q", "--force", "--device", "cpu", *to, self.path("m"), self.path("cpu"))
                o = self.gpu("gpu", "--device", "cuda", "--threads", str(i % 4 + 1), *to,
                             env={"QC_SHIM_STREAMS": ["lazy", "eager", "shuffle:3"][i % 3]})
                self.assert_same("cpu", "gpu", to)
                self.assertAlmostEqual(o["gpu_share"], quantized / (quantized + 9 * 128))

    def test_rows_that_end_within_a_word(self):
        """By channel, of more columns than a run of sums and of fewer than a word has codes."""
        self.model({LAYER % 0 + "mlp.up_proj.weight": self.random("BF16", [241, 1303]),
                    LAYER % 0 + "mlp.down_proj.weight": self.random("F32", [79, 2101]),
                    LAYER % 0 + "self_attn.q_proj.weight": self.random("F16", [5, 9])})
        for i, bits in enumerate((2, 3, 5, 6, 7)):
            for scale in ("absmax", "search"):
                to = ["--format", "compressed-tensors", "--scale", scale, "--block-size", "channel", "--to", "int%d" % bits]
                self.ok("-q", "--force", "--device", "cpu", *to, self.path("m"), self.path("cpu"))
                o = self.gpu("gpu", "--device", "cuda", "--threads", str(i % 4 + 1), *to)
                self.assert_same("cpu", "gpu", to)
                self.assertEqual(o["gpu_share"], 1.0)

    def test_what_is_decoded_first(self):
        """FP8, and a weight that is stored transposed."""
        codes = bytes(b & 0xBF for b in self.rng.randbytes(130 * 200))
        name = LAYER % 0 + "mlp.up_proj.weight"
        self.model({name: ("F8_E4M3", [130, 200], codes),
                    name + "_scale_inv": ("F32", [2, 2], mk.encode("F32", [1e-4] * 4))},
                   config={"model_type": "deepseek_v3",
                           "quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                                                   "weight_block_size": [128, 128]}})
        self.both()
        self.both("--to", "int8", "--format", "compressed-tensors")
        self.model({"h.0.attn.c_attn.weight": self.random("F16", [65, 259])},
                   config={"model_type": "gpt2"})
        self.both()

    def both(self, *to):
        to = to or ("--to", "nf4")
        self.ok("-q", "--force", "--device", "cpu", *to, self.path("m"), self.path("cpu"))
        o = self.gpu("gpu", "--device", "cuda", *to)
        self.assertEqual(o["gpu_share"], 1)
        self.assert_same("cpu", "gpu", to)

    def test_casts_stay_on_the_cpu(self):
        self.model({LAYER % 0 + "mlp.up_proj.weight": self.random("F32", [64, 64])})
        o = self.gpu("out", "--device", "cuda", "--to", "bf16")
        self.assertEqual(o["gpu_share"], 0)

    def test_summary_and_progress(self):
        self.model({LAYER % 0 + "mlp.up_proj.weight": self.random("BF16", [64, 64])})
        r = self.run_qconv("--progress", "always", "--device", "cuda:0", "--to", "nf4",
                           self.path("m"), self.path("out"))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assertIn(b"\n  device    cuda:0 (CPU shim sm_90)\n", r.stdout)
        self.assertIn(b"converting on cuda:0", r.stderr)


class Room(Device):
    """A tensor larger than the GPU's memory; less and less of that."""

    scale = "absmax"

    def setUp(self):
        super().setUp()
        rows = NEEDED // 2 // 1200 + 5
        self.model({LAYER % 0 + "mlp.up_proj.weight": self.random("BF16", [rows, 1200])})
        self.ok("-q", "--device", "cpu", "--to", "nf4", self.path("m"), self.path("cpu"))

    def convert(self, memory, *args, **env):
        r = self.run_qconv("-v", "--force", "--threads", "1", "--device", "cuda", "--to", "nf4",
                           *args, self.path("m"), self.path("gpu"), env=dict(devices(memory), **env))
        self.assertEqual(r.returncode, 0, r.stderr)
        self.assert_same("cpu", "gpu", memory)
        return r.stdout.decode(), r.stderr.decode()

    def test_slots_shrink(self):
        for memory, slots in [("%dKiB" % (NEEDED >> 10), "524 KB"), ("7MiB", "1.05 MB")]:
            said, noted = self.convert(memory)
            self.assertIn("is short of memory, so its slots have " + slots, noted)
            self.assertIn("  device    cuda:0 (CPU shim sm_90)\n", said)

    def test_no_room(self):
        said, noted = self.convert("%dKiB" % ((NEEDED >> 10) - 4))
        self.assertNotIn("  device  ", said)
        self.assertEqual(noted.count("warning"), 1)
        self.assertRegex(noted, r"qconv: warning: cuda:0 \(CPU shim sm_90\): CUDA: allocating \d+ bytes of "
                                r"device memory failed: .*; the CPU quantizes what does not go there")


class Faults(Device):
    def test_every_allocation(self):
        """Each fails in turn, until there is none left to fail."""
        self.model({LAYER % 0 + "mlp.up_proj.weight": self.random("BF16", [40, 130])})
        self.ok("-q", "--device", "cpu", "--to", "nf4", self.path("m"), self.path("cpu"))

        def convert_failing(threads, n):
            r = self.run_qconv("-v", "--force", "--threads", str(threads), "--device", "cuda",
                               "--to", "nf4", self.path("m"), self.path("gpu"),
                               env=dict(devices("1GiB"), QC_SHIM_FAIL_MALLOC=str(n)))
            self.assertEqual(r.returncode, 0, r.stderr)
            self.assert_same("cpu", "gpu", n)
            return b"short of memory" in r.stderr
        n = 1
        while convert_failing(1, n):
            n += 1
        self.assertGreater(n, 2)  # memory of both kinds
        self.assertLess(n, 99)
        # A second worker may come too late to allocate anything: how many fail is up to the machine.
        for n in range(1, 9):
            convert_failing(2, n)

    def test_a_weight_that_is_not_finite(self):
        packed = ["--format", "compressed-tensors"]
        for dtype, to, bad in [("BF16", ["nf4"], b"\x80\x7f"), ("F16", ["int8"], b"\x01\xfc"),
                               ("F32", ["int8", "--block-size", "64"], b"\0\0\x80\xff"),
                               ("F32", ["int8"], b"\0\0\x90\x47"),  # 73728: no float16
                               ("BF16", ["int4"] + packed, b"\xc0\x7f"),
                               ("F16", ["int8"] + packed, b"\0\x7c")]:
            each = mk.BITS[dtype] // 8
            cols = 384 if "--format" in to else 401
            shape = [700, cols]
            for row, col in [(0, 0), (654, cols - 1), (699, cols - 2)]:
                body = bytearray(mk.random_bytes(dtype, shape, self.rng))
                for at in [row * cols + col, 700 * cols - 1]:  # the first counts
                    body[at * each:(at + 1) * each] = bad
                self.model({LAYER % 0 + "mlp.up_proj.weight": (dtype, shape, bytes(body))})
                lines = [self.fails(3, "-q", "--threads", "1", "--device", device, "--to", *to,
                                    self.path("m"), self.path("out"), env=devices("1GiB"))
                         for device in ["cpu", "cuda"]]
                self.assertIn("row %d, column %d" % (row, col), lines[0])
                self.assertEqual(lines[0], lines[1])
                self.assert_nothing("out")


class Chosen(Device):
    def setUp(self):
        super().setUp()
        self.model({LAYER % 0 + "mlp.up_proj.weight": self.random("BF16", [64, 64])})

    def refused(self, device, has, env=None, **more):
        self.fails(5, "--device", device, "--to", "nf4", self.path("m"), self.path("out"), has=has,
                   env=env, **more)
        self.assert_nothing("out")

    def test_what_is_not_there(self):
        self.refused("cuda:7", "--device cuda:7: there is no cuda:7; there is cuda:0 "
                               "(CPU shim sm_90)")
        self.refused("cuda:0,2", "there is no cuda:2; there are cuda:0 (CPU shim sm_90), cuda:1 "
                                 "(CPU shim sm_90)", env=devices("1GiB", "1GiB"))
        self.refused("cuda", "--device cuda: there is no GPU: the NVIDIA driver shows no GPU",
                     env={"QC_SHIM_DEVICES": "none"})
        self.refused("cuda:0", "--device cuda:0: there is no GPU: the NVIDIA driver was not found",
                     env={"QC_SHIM_DEVICES": "nodriver"})

    def test_the_environment(self):
        self.fails(5, "--to", "nf4", self.path("m"), self.path("out"),
                   has="QCONV_DEVICE=cuda:7: there is no cuda:7", env={"QCONV_DEVICE": "cuda:7"})
        o = self.gpu("out", "--to", "nf4", env={"QCONV_DEVICE": "cuda"})
        self.assertEqual(o["device"], "cuda:0 (CPU shim sm_90)")
        o = self.gpu("out", "--to", "nf4", "--device", "cpu", env={"QCONV_DEVICE": "cuda:7"})
        self.assertEqual(o["device"], "cpu")

    def test_the_cpu_does_not_touch_cuda(self):
        """A description of devices that is not understood ends the process at the first call."""
        odd = {"QC_SHIM_DEVICES": "?"}
        r = self.run_qconv("--device", "cuda", "--to", "nf4", self.path("m"), self.path("x"),
                           env=odd)
        self.assertNotIn(r.returncode, (0, 5))
        for args in [["--device", "cpu"], [], ["--device", "auto"]]:  # too small for auto
            self.ok("-q", "--force", *args, "--to", "nf4", self.path("m"), self.path("out"),
                    env=odd)
        r = self.run_qconv("-v", "--force", "--to", "nf4", self.path("m"), self.path("out"))
        self.assertIn(b"quantizing on cpu: too little to quantize for a GPU", r.stderr)

    def test_plain_qconv(self):
        """The program as built: without kernels, or without a GPU."""
        r = self.run_qconv("--device", "cuda", "--to", "nf4", self.path("m"), self.path("out"),
                           program=qconv_case.QCONV)
        if r.returncode == 0:
            self.skipTest("it has a GPU")
        self.assertEqual(r.returncode, 5)
        self.assertRegex(r.stderr.decode(), r"\Aqconv: --device cuda: (this build of qconv has no "
                                            r"GPU kernels \(docs/building\.md\)|there is no GPU: "
                                            r"\S[^\n]+)\n\Z")

    def test_hardware(self):
        o = json.loads(self.ok("hardware", "--json", env=devices("1GiB", "1GiB")))
        self.assertTrue(o["cuda_kernels"])
        self.assertEqual((o["quantizes_on"], o["quantizes_why"]),
                         ("cuda:0 (CPU shim sm_90), cuda:1 (CPU shim sm_90)", None))
        text = self.ok("hardware", env={"QC_SHIM_DEVICES": "nodriver"})
        self.assertIn("\nquantizes  on cpu: the NVIDIA driver was not found\n", text)
        text = self.ok("hardware", env={"QCONV_DEVICE": "cpu", "QC_SHIM_DEVICES": "?"})
        self.assertIn("\nquantizes  on cpu: QCONV_DEVICE=cpu\n", text)
        o = json.loads(self.ok("hardware", "--as", "A100-40GB", "--json"))
        self.assertEqual((o["quantizes_on"], o["quantizes_why"]), (None, None))


if __name__ == "__main__":
    unittest.main()

#!/usr/bin/env python3
"""`qconv eval` of mixtures of experts: the numbers of transformers (tests/data/tiny-moe), of separate and
of stacked experts, quantized or not, whatever the threads; and what is said where an expert is wrong.
The forward pass itself: tests/unit/llama/unit_experts*.c, and tests/interop against transformers."""
import json
import math
import os
import unittest

from output_case import OutputCase, isa_list
import make_checkpoint as mk
import qconv_case

TINY = os.path.join(qconv_case.ROOT, "tests", "data", "tiny-moe")
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"


class ExpertsCase(OutputCase):
    def setUp(self):
        super().setUp()
        with open(os.path.join(TINY, "expected.json"), encoding="utf-8") as f:
            self.expected = json.load(f)
        self.write("t.ids", "".join(" ".join(map(str, row)) + "\n" for row in self.expected["ids"]))

    def numbers(self, *args, **more):
        r = json.loads(self.ok("eval", "--json", "-q", *args, "--text", "t.ids", **more))
        return {k: v for k, v in r.items() if k not in ("seconds", "path", "against")}

    def copy(self, name, tensors, **config):
        """A model with other tensors: {name: (dtype, shape, bytes)}."""
        with open(os.path.join(TINY, "config.json"), encoding="utf-8") as f:
            mk.write_checkpoint(self.path(name), tensors, config=json.load(f) | config)

    def tensors(self):
        return dict(mk.read_checkpoint(TINY))


class Numbers(ExpertsCase):
    def test_transformers(self):
        got = self.numbers(TINY)
        self.assertEqual((got["model_type"], got["tokens"], got["predicted"]), ("qwen2_moe", 56, 53))
        self.assertAlmostEqual(math.log(got["perplexity"]), self.expected["nll"], 5)

    def test_nothing_depends_on_threads_or_isa_or_batches(self):
        want = self.numbers(TINY, "--threads", "1")
        self.assertEqual(self.numbers(TINY, "--threads", "3"), want)
        for isa in isa_list():
            self.assertEqual(self.numbers(TINY, env={"QCONV_ISA": isa}), want)

    def test_stacked(self):
        """As transformers 5 keeps experts in memory."""
        tensors = self.tensors()
        for layer in (0, 2):
            head = f"model.layers.{layer}.mlp.experts."
            gate_up = down = b""
            for e in range(5):
                for part in ("gate_proj", "up_proj"):
                    gate_up += tensors.pop(f"{head}{e}.{part}.weight")[2]
                down += tensors.pop(f"{head}{e}.down_proj.weight")[2]
            tensors[head + "gate_up_proj"] = ("BF16", [5, 16, 16], gate_up)
            tensors[head + "down_proj"] = ("BF16", [5, 16, 8], down)
        self.copy("stacked", tensors)
        self.assertEqual(self.numbers("stacked"), self.numbers(TINY))

    def test_quantized(self):
        """A model of other experts is another one, and it differs from MODEL as little as its form says."""
        kl = {}
        for to in ("int8", "nf4"):
            self.convert("--to", to, TINY, to)
            for name in ("experts.4.down_proj", "shared_expert.up_proj"):
                self.assertIn(f"model.layers.2.mlp.{name}.weight", self.quantized(to))
            kl[to] = self.numbers(to, "--against", TINY)["kl_mean"]
        self.assertTrue(0 < 10 * kl["int8"] < kl["nf4"] < 1, kl)
        self.assertEqual(self.numbers("nf4", "--threads", "1"), self.numbers("nf4", "--threads", "3"))

    def quantized(self, name):
        return [n for n, t in mk.read_checkpoint(self.path(name)).items() if t[0] in ("U8", "I8")]


class Refused(ExpertsCase):
    def test_missing(self):
        tensors = self.tensors()
        tensors.pop(EXPERT)
        self.copy("m", tensors)
        self.fails(3, "eval", "m", "--text", "t.ids",
                   has=[f"m: tensor '{EXPERT}', which config.json asks for, is not there"])

    def test_another_shape(self):
        tensors = self.tensors()
        tensors[EXPERT] = ("BF16", [8, 15], bytes(240))
        self.copy("m", tensors)
        self.fails(3, "eval", "m", "--text", "t.ids",
                   has=[f"m: tensor '{EXPERT}' is [8, 15], and config.json makes it [8, 16]"])

    def test_not_finite(self):
        tensors = self.tensors()
        tensors[EXPERT] = ("BF16", [8, 16], b"\xc0\x7f" * 128)
        self.copy("m", tensors)
        self.fails(3, "eval", "m", "--text", "t.ids",
                   has=["m: behind layer 2: a hidden state is not finite"])

    def test_config(self):
        self.copy("m", self.tensors(), num_experts_per_tok=6)
        self.fails(3, "eval", "m", "--text", "t.ids",
                   has=["m: config.json: num_experts_per_tok is 6, and there are 5 experts"])


if __name__ == "__main__":
    unittest.main()

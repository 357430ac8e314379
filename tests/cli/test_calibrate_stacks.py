#!/usr/bin/env python3
"""`--calibrate` of experts that are written as stacks: what separate experts get, byte for byte, in stacks
of qwen2_moe (tests/data/tiny-moe); and gpt-oss, whose stacks are quantized anew with --requantize."""
import random
import re
import shutil
import unittest

from output_case import AT_CALL, at_call
import make_checkpoint as mk
import test_mixtures as mixtures
from test_mixtures import TINY

FEW = (r"warning: (\d+) weights? of (\d+) experts? (?:is|are) quantized without calibration, as fewer tokens of "
       r"the text went there than a quarter of the inputs: (.*)")
JOURNAL = "journal-calibrated"


class Stacks(mixtures.Calibrated):
    """Inherits the texts; the tests of separate experts are left out below."""
    test_gain_and_threads = test_too_few_tokens = None

    def made(self, out, *args, **more):
        said = self.calibrate(out, *args, **more)
        return said, {n: t[2] for n, t in self.weights(out).items()}

    def assert_same(self, to, *args, text="long.ids"):
        """Every range of a stack is what a separate expert has."""
        said, stacked = self.made("stacked", *to, *args, "--experts", "stacked", text=text)
        other, separate = self.made("separate", *to, *args, text=text)
        self.assertEqual("" if text == "long.ids" else re.search(FEW, said)[1],
                         "" if text == "long.ids" else re.search(FEW, other)[1])
        beside, tail = (".absmax", ".weight.absmax") if "nf4" in to or "--block-size" in to else (".SCB", ".SCB")
        for layer in (0, 2):
            head = f"model.layers.{layer}.mlp.experts."
            for stack, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                for suffix, own in (("", ".weight"), (beside, tail)):
                    want = b"".join(separate[f"{head}{e}.{p}{own}"] for e in range(5) for p in parts)
                    self.assertEqual(stacked[head + stack + suffix], want, (to, stack, suffix))
        self.ok("verify", "stacked", "--against", TINY, "-q")
        for out in ("stacked", "separate"):
            shutil.rmtree(self.path(out))
        return said

    def test_as_separate(self):
        for to in (["--to", "nf4", "--no-double-quant"], ["--to", "int8"],
                   ["--to", "int8", "--block-size", "64", "--no-double-quant"]):
            self.assertNotIn("without calibration", self.assert_same(to))

    def test_as_separate_with_few_tokens(self):
        said = self.assert_same(["--to", "nf4", "--no-double-quant"], text="short.ids")
        self.assertRegex(said, r"'model\.layers\.\d\.mlp\.experts\.gate_up_proj\[\d, (gate|up)\]' \(\d\)")

    def distance(self, out):
        """Such a stack cannot be taken apart, but what its codes stand for can."""
        self.ok("-q", "--to", "bf16", "--experts", "stacked", "--compress", "none", out, out + "-wide")
        return self.numbers(out + "-wide", "--against", TINY)["kl_mean"]

    def test_groups_of_two_experts(self):
        """Double quantized scales of several experts share a group here, and experts without tokens do, too."""
        self.convert("--to", "nf4", "--scale", "search", "--experts", "stacked", TINY, "search")
        _, one = self.made("one", "--experts", "stacked", "--threads", "1")
        self.assertEqual(self.made("three", "--experts", "stacked", "--threads", "3")[1], one)
        self.ok("verify", "one", "--against", TINY, "-q")
        kl = {out: self.distance(out) for out in ("one", "search")}
        self.assertLess(kl["one"], 0.9 * kl["search"])
        said, few = self.made("few", "--experts", "stacked", text="short.ids")
        self.assertRegex(said, FEW)
        self.assertLess(self.distance("few"), 2 * kl["search"])
        self.assertNotEqual(few["model.layers.0.mlp.experts.down_proj"], one["model.layers.0.mlp.experts.down_proj"])

    def test_int8_with_one_offset(self):
        args = ["--to", "int8", "--block-size", "64", "--experts", "stacked"]
        self.calibrate("out", *args)
        self.convert(*args, "--scale", "search", TINY, "search")
        self.assertLess(self.distance("out"), self.distance("search"))

    @unittest.skipUnless(AT_CALL, "the build has no at_call")
    def test_killed_and_resumed(self):
        for text in ("long.ids", "short.ids"):
            args = ("--experts", "stacked")
            want, whole = self.made("whole", *args, text=text)
            for n in (9, 30) if text == "short.ids" else (20,):
                self.calibrate("out", *args, text=text, code=1,
                               env=at_call(f"sync:{n}", JOURNAL, run="kill -9 $PPID"))
                said, out = self.made("out", *args, text=text)
                self.assertRegex(said, r"calibrating \d+ remaining weights? ")
                self.assertEqual(out, whole)
                if text == "short.ids":
                    self.assertEqual(re.search(FEW, said)[0], re.search(FEW, want)[0])
                shutil.rmtree(self.path("out"))
            shutil.rmtree(self.path("whole"))


class GptOss(mixtures.GptOss):
    test_forms = test_damaged = None

    def setUp(self):
        super().setUp()
        rng = random.Random(4)
        for name in ("long.ids", "t.ids"):  # the router of another expert changes more than int8 does: many tokens
            self.write(name, "".join(" ".join(str(rng.randrange(64)) for _ in range(60)) + "\n" for _ in range(40)))

    def test_kept(self):
        """Experts stay in MXFP4 without --requantize, and attention is calibrated."""
        r = self.run_qconv("--to", "nf4", "--calibrate", "long.ids", "--compress", "none", "oss", "out")
        self.assertIn("calibrating 8 weights", r.stderr.decode())
        out, model = (mk.read_checkpoint(self.path(name)) for name in ("out", "oss"))
        packed = [name for name in model if name.endswith(("_blocks", "_scales"))]
        self.assertEqual([out[name] for name in packed], [model[name] for name in packed])

    def test_few_tokens(self):
        self.write("few.ids", "1 2 3 4 5 6 7\n")
        for args in ([], ["--no-double-quant"]):
            r = self.run_qconv("--to", "nf4", "--requantize", "--calibrate", "few.ids", *args, "oss", "out", "--force")
            self.assertEqual(r.returncode, 0, r.stderr)
            said = r.stderr.decode()
            self.assertRegex(said, "calibrating 24 weights")
            self.assertRegex(said, FEW)
            self.assertRegex(said, r"'model\.layers\.0\.mlp\.experts\.gate_up_proj\[\d\]' \(\d\)")
            self.ok("verify", "out", "--against", "oss", "-q")

    def test_better_than_search(self):
        """With scales of their own, with groups that experts share, and in int8."""
        for i, to in enumerate((["nf4", "--no-double-quant"], ["nf4"], ["int8"])):
            self.ok("-q", "--to", *to, "--requantize", "--scale", "search", "oss", f"search{i}")
            self.ok("-q", "--to", *to, "--requantize", "--calibrate", "long.ids", "--threads", "1", "--compress",
                    "none", "oss", f"out{i}")
            self.ok("-q", "--to", *to, "--requantize", "--calibrate", "long.ids", "--threads", "3", "--compress",
                    "none", "oss", "three")
            self.assertEqual(mk.read_checkpoint(self.path(f"out{i}")), mk.read_checkpoint(self.path("three")))
            shutil.rmtree(self.path("three"))
            self.ok("verify", f"out{i}", "--against", "oss", "-q")
            kl = {out: self.numbers(f"{out}{i}", "--against", "oss")["kl_mean"] for out in ("out", "search")}
            # One token with another expert counts as much as all that int8 changes.
            self.assertLess(kl["out"], (1.5 if to[0] == "int8" else 0.8) * kl["search"], to)


if __name__ == "__main__":
    unittest.main()

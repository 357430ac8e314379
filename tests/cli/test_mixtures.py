#!/usr/bin/env python3
"""`qconv eval` of mixtures of experts: the numbers of transformers (tests/data/tiny-moe), of separate and
of stacked experts, quantized or not, whatever the threads; and what is said where an expert is wrong.
The forward pass itself: tests/unit/forward/unit_experts*.c, and tests/interop against transformers."""
import json
import math
import os
import random
import re
import shutil
import unittest

from output_case import AT_CALL, PLAIN, OutputCase, at_call, isa_list
import make_checkpoint as mk
import qconv_case
from test_forms import fp8

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
        for form in (["int8"], ["nf4", "--no-double-quant"]):
            made = []
            for experts in ("stacked", "separate"):
                self.convert("--to", *form, "--experts", experts, TINY, form[0] + experts)
                made.append(self.numbers(form[0] + experts))
            self.assertEqual(*made)

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

    def test_integers_and_fp8(self):
        self.convert("--to", "int4", "--block-size", "channel", TINY, "int4")
        self.assertTrue(0 < self.numbers("int4", "--against", TINY)["kl_mean"] < 2)
        eight, floats, rng = self.tensors(), self.tensors(), random.Random(8)
        for name, (_, shape, _) in self.tensors().items():
            if ".mlp.experts." in name:
                packed, values = fp8(rng, name, shape, [128, 128])
                eight |= packed
                floats[name] = ("F32", shape, mk.encode("F32", values))
        self.copy("eight", eight, quantization_config={"quant_method": "fp8"})
        self.copy("floats", floats)
        self.assertEqual(self.numbers("eight"), self.numbers("floats"))

    def quantized(self, name):
        return [n for n, t in mk.read_checkpoint(self.path(name)).items() if t[0] in ("U8", "I8")]


class GptOss(ExpertsCase):
    """Experts in stacks: MXFP4 as released, in 16 bits as transformers has them, NF4 and int8 as qconv
    writes them. The values of MXFP4 are exact in 16 bits."""

    def setUp(self):
        super().setUp()
        self.make_model()

    def make_model(self):
        rng = random.Random(6)
        tensors = {}

        def add(name, *shape, scale=0.25, about=0.0):
            values = [about + rng.uniform(-scale, scale) for _ in range(mk.numel(shape))]
            tensors[name] = ("BF16", list(shape), mk.encode("BF16", values))

        def add_packed(name, rows, cols):
            for tail, shape, low, high in (("blocks", [4, rows, cols // 32, 16], 0, 255),
                                           ("scales", [4, rows, cols // 32], 121, 124)):
                data = bytes(rng.randint(low, high) for _ in range(mk.numel(shape)))
                tensors[f"{name}_{tail}"] = ("U8", shape, data)
            add(name + "_bias", 4, rows)

        add("model.embed_tokens.weight", 64, 64, scale=1)
        add("lm_head.weight", 64, 64)
        add("model.norm.weight", 64, about=1)
        for i in range(2):
            at = f"model.layers.{i}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                add(f"{at}{norm}.weight", 64, about=1)
            for part, rows, cols in (("q", 32, 64), ("k", 16, 64), ("v", 16, 64), ("o", 64, 32)):
                add(f"{at}self_attn.{part}_proj.weight", rows, cols)
                add(f"{at}self_attn.{part}_proj.bias", rows)
            add(at + "self_attn.sinks", 2)
            add(at + "mlp.router.weight", 4, 64)
            add(at + "mlp.router.bias", 4)
            add_packed(at + "mlp.experts.gate_up_proj", 64, 64)
            add_packed(at + "mlp.experts.down_proj", 64, 32)
        mk.write_checkpoint(self.path("oss"), tensors, config={
            "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 64,
            "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "num_local_experts": 4,
            "num_experts_per_tok": 2, "sliding_window": 8, "max_position_embeddings": 64,
            "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 2.0,
            "quantization_config": {"quant_method": "mxfp4"}})

    def test_forms(self):
        want = self.numbers("oss", "--threads", "1")
        self.assertEqual(self.numbers("oss", "--threads", "3"), want)
        self.ok("-q", "--to", "bf16", "--compress", "none", "oss", "wide")
        self.assertEqual(mk.read_checkpoint(self.path("wide"))["model.layers.1.mlp.experts.down_proj"][1],
                         [4, 32, 64])
        self.assertEqual(self.numbers("wide"), want)
        for to in (["nf4"], ["nf4", "--no-double-quant"], ["int8"]):
            out = "-".join(to)
            self.convert("--to", *to, "--requantize", "oss", out)
            kl = self.numbers(out, "--against", "oss")["kl_mean"]
            self.assertTrue(0 < kl < (0.2 if to[0] == "nf4" else 2e-3), (to, kl))
            # What the codes stand for, rounded to 16 bits.
            self.ok("-q", "--to", "bf16", "--compress", "none", out, out + "-wide")
            self.assertLess(self.numbers(out + "-wide", "--against", out)["kl_mean"], 1e-4)

    def test_damaged(self):
        tensors = dict(mk.read_checkpoint(self.path("oss")))
        name = "model.layers.0.mlp.experts.down_proj_bias"
        with open(self.path("oss", "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        for change, words in ((None, f"tensor '{name}', which config.json asks for, is not there"),
                              (("BF16", [4, 32], bytes(256)),
                               f"tensor '{name}' is [4, 32], and config.json makes it [4, 64]")):
            tensors.pop(name)
            tensors |= {name: change} if change else {}
            mk.write_checkpoint(self.path("m"), tensors, config=config)
            self.fails(3, "eval", "m", "--text", "t.ids", has=["m: " + words])
            shutil.rmtree(self.path("m"))
            tensors.setdefault(name, None)


class Refused(ExpertsCase):
    def test_each(self):
        for tensor, config, words in (
                (None, {}, f"tensor '{EXPERT}', which config.json asks for, is not there"),
                (("BF16", [8, 15], bytes(240)), {}, f"tensor '{EXPERT}' is [8, 15], and config.json makes it [8, 16]"),
                (("BF16", [8, 16], b"\xc0\x7f" * 128), {}, "behind layer 2: a hidden state is not finite"),
                (self.tensors()[EXPERT], {"num_experts_per_tok": 6},
                 "config.json: num_experts_per_tok is 6, and there are 5 experts")):
            changed = {**self.tensors(), EXPERT: tensor}
            self.copy("m", {n: t for n, t in changed.items() if t}, **config)
            self.fails(3, "eval", "m", "--text", "t.ids", has=["m: " + words])
            shutil.rmtree(self.path("m"))


class Calibrated(ExpertsCase):
    JOURNAL = "journal-calibrated"

    def setUp(self):
        super().setUp()
        rng = random.Random(4)
        self.write("long.ids", "".join(self.line(rng, 60) for _ in range(40)))
        self.write("short.ids", self.line(rng, 12))

    def line(self, rng, n):
        return " ".join(str(rng.randrange(64)) for _ in range(n)) + "\n"

    def calibrate(self, out, *args, text="long.ids", code=0, **more):
        r = self.run_qconv("--to", "nf4", "-v", "--compress", "none", "--calibrate", text, *args, TINY,
                           out, **more)
        self.assertEqual(r.returncode == 0, code == 0, r.stderr)
        return r.stderr.decode()

    def weights(self, out):
        return mk.read_checkpoint(self.path(out))

    def test_gain_and_threads(self):
        said = self.calibrate("one", "--threads", "1")
        self.assertRegex(said, r"calibrating 51 weights with 2,400 tokens \(.*\), 2,400 of them backwards: .*, up to .* of "
                               r"memory")
        self.assertNotIn("without calibration", said)
        self.assertNotIn("count alike", said)
        self.calibrate("three", "--threads", "3", env={"QCONV_STATES_MEMORY": "0"})
        self.assertEqual(self.weights("one"), self.weights("three"))
        self.convert("--to", "nf4", "--scale", "search", TINY, "search")
        kl = {out: self.numbers(out, "--against", TINY)["kl_mean"] for out in ("one", "search")}
        self.assertLess(kl["one"], 0.8 * kl["search"])
        self.ok("verify", "one", "--against", TINY, "-q")
        self.calibrate("sided", "--sided", "one")
        one, sided = self.weights("one"), self.weights("sided")
        for part in ("gate_proj", "up_proj", "down_proj"):  # codes of every kind of expert count both sides
            for expert in ("experts.1", "shared_expert"):
                name = f"model.layers.0.mlp.{expert}.{part}.weight"
                self.assertNotEqual(one[name], sided[name], name)
                self.assertEqual(len(one[name][2]), len(sided[name][2]))

    def test_few_backwards(self):
        """Outputs that fewer tokens passed backwards through than a quarter of them count alike: here no expert has
        more than 16 of them."""
        said = self.calibrate("few", text="short.ids")
        m = re.search(r"warning: the outputs of (\d+) weights? count alike, as fewer tokens passed backwards through "
                      r"(?:them|it) than a quarter of the outputs: '(\S+)'", said)
        self.assertTrue(m, said)
        self.assertIn(".mlp.experts.", m[2])
        with open(self.path("few", "qconv.json"), encoding="utf-8") as f:
            rows = {t["name"]: t.get("calibrated") for t in json.load(f)["tensors"]}
        self.assertTrue(rows[m[2]], m[2])  # It is calibrated nevertheless.

    def test_too_few_tokens(self):
        """Experts with few tokens are left to the search, and one warning names them."""
        said = self.calibrate("few", text="short.ids")
        m = re.search(r"warning: (\d+) weights of (\d+) experts are quantized without calibration, as "
                      r"fewer tokens of the text went there than a quarter of the inputs: "
                      r"'(\S+)' \((\d)\), '(\S+)' \((\d)\), '(\S+)' \((\d)\), \.\.\.", said)
        self.assertTrue(m, said)
        self.assertTrue(3 <= int(m[1]) <= 3 * int(m[2]) <= 30, said)
        self.assertTrue(all(int(m[i]) < 4 for i in (4, 6, 8)), said)
        self.convert("--to", "nf4", "--scale", "search", TINY, "search")
        few, search = self.weights("few"), self.weights("search")
        for name in (m[3], m[5], m[7]):
            self.assertEqual(few[name], search[name])
        self.assertNotEqual(few["model.layers.2.mlp.shared_expert.up_proj.weight"],
                            search["model.layers.2.mlp.shared_expert.up_proj.weight"])

    @unittest.skipUnless(AT_CALL, "the build has no at_call")
    def test_killed_and_resumed(self):
        self.calibrate("whole")
        for n in (7, 10, 25, 49):
            self.calibrate("out", code=1, env=at_call(f"sync:{n}", self.JOURNAL, run="kill -9 $PPID"))
            said = self.calibrate("out")
            self.assertRegex(said, r"calibrating \d+ remaining weights? ")
            self.assertEqual(self.weights("out"), self.weights("whole"))
            shutil.rmtree(self.path("out"))


@unittest.skipIf(qconv_case.SANITIZED, "long, and tiny-moe has the same code")
class Trained(OutputCase):
    """The trained mixture, tests/data/kjv-moe, on its held-out text."""

    def test_calibrated(self):
        data = os.path.join(qconv_case.ROOT, "tests", "data")
        model = os.path.join(data, "kjv-moe", "model")
        with open(os.path.join(data, "kjv-llama", "heldout.txt"), encoding="ascii") as f:
            text = f.read()
        self.write("own.txt", text[:8192])
        self.write("judge.txt", text[100000:106000])
        found = {}
        own = ["--calibrate", "own.txt", "--calibration-context", "256"]
        for name, more in (("search", []), ("calibrated", own), ("one", [*own, "--sided", "one"])):
            self.ok("-q", *PLAIN, "--to", "nf4", *more, model, name)
            found[name] = json.loads(self.ok("eval", "-q", "--json", name, "--against", model, "--text", "judge.txt",
                                             "--context", "256"))
        self.assertLess(found["search"]["base_perplexity"], 3.5)
        self.assertGreater(found["search"]["kl_mean"], 0.001)
        self.assertLess(found["calibrated"]["kl_mean"], 0.5 * found["search"]["kl_mean"])
        self.assertLess(found["calibrated"]["kl_mean"], 0.9 * found["one"]["kl_mean"])
        with open(self.path("calibrated", "qconv.json"), encoding="utf-8") as f:
            self.assertEqual(json.load(f)["options"]["calibrate"]["sided"], "two")
        if AT_CALL:  # The moments of what is left are made anew.
            args = ["-q", *PLAIN, "--to", "nf4", *own, model, "again"]
            killed = self.run_qconv(*args, env=at_call("sync:60", Calibrated.JOURNAL, run="kill -9 $PPID"))
            self.assertNotEqual(killed.returncode, 0)
            self.ok(*args)
            self.assertEqual(*(mk.read_checkpoint(self.path(out)) for out in ("again", "calibrated")))


if __name__ == "__main__":
    unittest.main()

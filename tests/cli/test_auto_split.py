"""--to auto for cards of --tp: what each card holds, and that no scheme for all that fits has less
predicted error."""
import json
import os
import random
import shutil
import tempfile
import unittest

from output_case import PLAIN, OutputCase
import make_checkpoint as mk

DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data")
AUTO = ["--to", "auto", "--format", "compressed-tensors", "--cuda-context", "0", "--context", "8"]
LLAMA70 = "meta-llama/Llama-3.3-70B-Instruct"
# Llama-3.3-70B with a 32nd of its width and a 20th of its layers: 8 queries to a key.
HIDDEN, INNER, LAYERS, HEAD, HEADS, KV_HEADS, VOCABULARY = 256, 1024, 4, 16, 16, 2, 1024
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
          "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
          "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": VOCABULARY,
          "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
          "tie_word_embeddings": False}
FUSED = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]


def shapes(inner=INNER):
    yield "model.embed_tokens.weight", [VOCABULARY, HIDDEN]
    yield "lm_head.weight", [VOCABULARY, HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    for layer in range(LAYERS):
        for name, shape in (("self_attn.q_proj", [HEADS * HEAD, HIDDEN]),
                            ("self_attn.k_proj", [KV_HEADS * HEAD, HIDDEN]),
                            ("self_attn.v_proj", [KV_HEADS * HEAD, HIDDEN]),
                            ("self_attn.o_proj", [HIDDEN, HEADS * HEAD]),
                            ("mlp.gate_proj", [inner, HIDDEN]), ("mlp.up_proj", [inner, HIDDEN]),
                            ("mlp.down_proj", [HIDDEN, inner]), ("input_layernorm", [HIDDEN]),
                            ("post_attention_layernorm", [HIDDEN])):
            yield "model.layers.%d.%s.weight" % (layer, name), shape


class AutoSplit(OutputCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.source = os.path.join(cls.folder.name, "m")
        rng = random.Random(5)
        mk.write_checkpoint(cls.source, {
            name: ("BF16", shape, mk.random_bytes("BF16", shape, rng)) for name, shape in shapes()},
            CONFIG)

    def plan(self, *args, model=None):
        return json.loads(self.ok("plan", "--json", *args, model or self.source))

    def split(self, kilobytes, *more, cards=2):
        return self.plan(*AUTO, "--vram", "%dx%dKB" % (cards, kilobytes), "--tp", str(cards), *more)

    def test_less_error_than_any_scheme_for_all(self):
        before, mixtures = float("inf"), set()
        for kilobytes in range(1600, 4500, 200):
            plan = self.split(kilobytes, "--keep", "lm_head.weight")
            auto, uniform = plan["auto"], plan["auto"]["uniform"]
            with self.subTest(kilobytes):
                self.assertEqual(set(uniform), {"int4", "int5", "int6", "int8", "16bit"})
                self.assertEqual(plan["fits"], uniform["int4"]["fits"])
                if not plan["fits"]:
                    continue
                fits = [u["predicted_error"] for u in uniform.values() if u["fits"]]
                self.assertLess(auto["predicted_error"], min(fits))
                self.assertLess(auto["predicted_error"], before)
                self.assertGreaterEqual(auto["predicted_error"], auto["lower_bound"])
                first, second = [{k: v for k, v in d.items() if k != "name"} for d in plan["devices"]]
                self.assertEqual(first, second)
                before = auto["predicted_error"]
                mixtures.add(tuple(auto["chosen"]))
        self.assertIn(("int4", "int5", "int6", "int8"), mixtures)
        self.assertIn(("int8", "16bit"), mixtures)
        # The smallest card decides.
        for vram in ("2000KB+3MB", "3MB+2000KB"):
            self.assertEqual(self.plan(*AUTO, "--vram", vram, "--tp", "2")["auto"],
                             self.split(2000)["auto"])
        self.assertEqual(self.split(4800)["auto"]["predicted_error"], 0)

    def test_a_scheme_for_all_is_the_plan_of_that_scheme(self):
        for scheme, form in (("int4", ["--to", "int4"]), ("int4-32", ["--to", "int4", "--block-size", "32"]),
                             ("int8", ["--to", "int8", "--format", "compressed-tensors",
                                       "--activation-bits", "16"]), ("16bit", ["--to", "bf16"])):
            with self.subTest(scheme):
                two = ["--vram", "2x100MB", "--tp", "2", "--cuda-context", "0", "--context", "8"]
                auto = self.plan(*AUTO, *two, "--schemes", scheme)
                self.assertEqual(auto["devices"], self.plan(*form, *two)["devices"])

    def test_the_output_has_what_was_planned(self):
        """Mixed, with one scheme for what engines load as one, and each card's bytes as they were
        planned."""
        args = [*AUTO, "--vram", "2x2000KB", "--tp", "2"]
        plan = self.plan(*args)
        said = self.ok(*args, *PLAIN, self.source, self.path("o"))
        self.assertIn("1 w4a16, 3 w8a16-channel, 11 w5a16, 13 w6a16",
                      self.ok(*args, *PLAIN, "--dry-run", self.source))
        self.assertIn("vllm serve %s --tensor-parallel-size 2 --max-model-len 8 " % self.path("o"), said)
        again = self.plan("--vram", "2x2000KB", "--tp", "2", "--cuda-context", "0", "--context", "8",
                          model=self.path("o"))
        self.assertEqual(again["devices"], plan["devices"])
        config = self.quantization("o")
        form = {module: (g["weights"]["num_bits"], g["weights"]["strategy"])
                for g in config["config_groups"].values() for module in g["targets"]}
        self.assertEqual({bits for bits, _ in form.values()}, {4, 5, 6, 8})
        for layer in range(LAYERS):
            for names in FUSED:
                place = "mlp" if "up_proj" in names else "self_attn"
                self.assertEqual(len({form.get("model.layers.%d.%s.%s" % (layer, place, n))
                                      for n in names}), 1, names)
        self.assertTrue(json.loads(self.ok("verify", "--json", self.path("o")))["ok"])
        # The same again is there already; another room or another split is another conversion.
        self.assertIn("already", self.ok(*args, *PLAIN, self.source, self.path("o")))
        for other in (["--vram", "2x3MB", "--tp", "2"], ["--vram", "2x10MB"]):
            self.fails(2, *AUTO, *other, *PLAIN, self.source, self.path("o"))

    def test_candidates_that_do_not_divide(self):
        """Two cards cannot share seven groups of 128 inputs, but 14 of 64."""
        mk.write_checkpoint(self.path("odd"), {
            name: ("BF16", shape, None) for name, shape in shapes(896)}, {**CONFIG, "intermediate_size": 896})
        two = ["--vram", "2x100MB", "--tp", "2"]
        self.assertIn("its number of scales, 7, is not a multiple of 2",
                      self.fails(3, "plan", "--to", "int4", *two, self.path("odd")))
        names = set(self.plan(*AUTO, *two, "--schemes", "int5", model=self.path("odd"))["schemes"])
        self.assertEqual({"w5a16", "w5a16-64", "keep"}, names)
        auto = self.plan(*AUTO, *two, "--schemes", "int4-32,16bit", "--explain", model=self.path("odd"))["auto"]
        self.assertEqual(set(auto["uniform"]), {"int4-32", "16bit"})

    def test_json(self):
        plan = self.plan("--to", "auto", "--format", "compressed-tensors", "--vram", "2x40GB", "--tp",
                         "2", model=LLAMA70)
        uniform = plan["auto"]["uniform"]
        self.assertTrue(plan["fits"] and uniform["int6"]["fits"])
        self.assertFalse(uniform["int8"]["fits"])
        # int4 and int8 alone leave 0.356 in the same room.
        self.assertLess(plan["auto"]["predicted_error"], 0.1)
        self.assertEqual((plan["to"], plan["parallel"], plan["tensor_parallel"]), ("auto", "tensor", 2))
        self.assertIn("--tensor-parallel-size 2", plan["vllm"])
        same = self.plan("--to", "auto", "--format", "compressed-tensors", "--vram", "2x40GB",
                         "--parallel", "tensor", model=LLAMA70)
        self.assertEqual(same["auto"], plan["auto"])

    def test_head(self):
        """An output head stays in 16 bits unless it is asked for or nothing fits otherwise, and has
        6 bits or more unless --schemes says fewer."""
        def head(*args):
            return {t["name"]: t for t in json.loads(self.ok("--dry-run", "--json", *args, self.source))["tensors"]}[
                "lm_head.weight"]["scheme"]
        bits = ["--to", "auto", "--format", "compressed-tensors", "--bits"]
        self.assertEqual(head(*bits, "4.3"), "keep")
        asked = ["--quantize", "lm_head.weight"]
        self.assertEqual(head(*bits, "4.6", *asked), "w6a16")
        self.assertEqual(head(*bits, "4.2", *asked, "--schemes", "int4"), "w4a16")
        tight = ["--to", "auto", "--format", "compressed-tensors", "--vram", "2x24GB", "--tp", "2"]
        r = self.run_qconv("plan", "--json", *tight, LLAMA70)
        plan = json.loads(r.stdout)
        self.assertTrue(plan["fits"])
        self.assertIn(b"nothing fits with lm_head.weight in 16 bits", r.stderr)
        self.assertEqual(plan["schemes"]["keep"]["tensors"], 162)
        self.assertFalse(self.plan(*tight, "--keep", "lm_head.weight", model=LLAMA70)["fits"])

    def test_rows_that_no_group_of_128_divides(self):
        """kjv-llama has rows of 192 and 440: groups of 64 and a scale for each row. Neither vLLM nor
        compressed-tensors takes a short last group. No weight stays in 16 bits for its rows alone."""
        model = os.path.join(DATA, "kjv-llama", "model")
        fits = ["--to", "auto", "--format", "compressed-tensors", "--bits", "5.2"]
        plan = json.loads(self.ok("--dry-run", "--json", *fits, model))
        self.assertEqual({"int4", "int5", "int6", "int8"} & set(plan["auto"]["uniform"]),
                         {"int4", "int5", "int6", "int8"})
        for w in plan["tensors"]:
            if "down_proj" in w["name"]:
                self.assertRegex(w["scheme"], "^w[4-8]a16-channel$")
            elif w["role"] == "linear" and "lm_head" not in w["name"]:
                self.assertRegex(w["scheme"], "^w[4-8]a16(-channel)?$")
        self.ok("-q", *fits, *PLAIN, model, "o")
        self.ok("verify", "-q", "o", "--against", model)
        self.assertEqual(os.path.getsize(self.path("o", "model.safetensors")), plan["file_bytes"])
        # The same from the configuration alone, where no weight is measured.
        os.mkdir(self.path("shapes"))
        shutil.copy(os.path.join(model, "config.json"), self.path("shapes"))
        vram = ["--to", "auto", "--format", "compressed-tensors", "--vram", "24GB", "--bits", "5.2"]
        self.assertEqual(set(self.plan(*vram, model=self.path("shapes"))["auto"]["chosen"]), {"int4", "int5", "int6"})


if __name__ == "__main__":
    unittest.main()

"""--to auto by average bits and by importance, and what a conversion promises of its size."""
import json
import os
import random
import tempfile
import unittest

from output_case import AT_CALL, PLAIN, STAGING, OutputCase, at_call
import make_checkpoint as mk

AUTO = ["--to", "auto", "--format", "compressed-tensors"]
HIDDEN, INNER, LAYERS = 256, 512, 4
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
          "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
          "num_key_value_heads": 2, "vocab_size": 512, "torch_dtype": "bfloat16",
          "tie_word_embeddings": False}
PROJECTIONS = {"self_attn.q_proj": [HIDDEN, HIDDEN], "self_attn.k_proj": [HIDDEN // 2, HIDDEN],
               "self_attn.v_proj": [HIDDEN // 2, HIDDEN], "self_attn.o_proj": [HIDDEN, HIDDEN],
               "mlp.gate_proj": [INNER, HIDDEN], "mlp.up_proj": [INNER, HIDDEN],
               "mlp.down_proj": [HIDDEN, INNER]}


def matrices(layers=LAYERS):
    return {"model.layers.%d.%s.weight" % (n, p): shape
            for n in range(layers) for p, shape in PROJECTIONS.items()}


def traces(of):
    """The text of a file of --importance; of(name) gives the two traces."""
    return {"format": 1, "model": "m", "text": "t", "tokens": 100,
            "weights": {name: of(name) for name in matrices()}}


class Ladder(OutputCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.source = os.path.join(folder.name, "m")
        rng = random.Random(5)
        shapes = {**matrices(), "model.embed_tokens.weight": [512, HIDDEN],
                  "lm_head.weight": [512, HIDDEN], "model.norm.weight": [HIDDEN],
                  **{"model.layers.%d.%s.weight" % (n, norm): [HIDDEN] for n in range(LAYERS)
                     for norm in ("input_layernorm", "post_attention_layernorm")}}
        mk.write_checkpoint(cls.source, {name: ("BF16", shape, mk.random_bytes("BF16", shape, rng))
                                         for name, shape in shapes.items()}, CONFIG)

    def dry_run(self, *args, model=None):
        return json.loads(self.ok("--dry-run", "--json", *args, model or self.source))

    def importance(self, content):
        path = self.path("importance.json")
        with open(path, "w") as f:
            f.write(content if isinstance(content, str) else json.dumps(content))
        return ["--importance", path]

    def bits_of(self, plan):
        """Name of a matrix -> bits of its codes."""
        return {t["name"]: int(t["scheme"][1]) if t["scheme"].startswith("w") else 16
                for t in plan["tensors"] if t["name"] in matrices()}

    def test_bits(self):
        elems = sum(rows * cols for rows, cols in matrices().values())
        before = float("inf")
        for bits in (4.2, 4.8, 5.1, 6.1, 7, 9, 16):
            with self.subTest(bits):
                plan = self.dry_run(*AUTO, "--bits", str(bits))
                taken = sum(t["bytes_after"] for t in plan["tensors"] if t["name"] in matrices())
                self.assertLessEqual(8 * taken / elems, bits)
                # Less is left than one matrix takes for a bit more a weight.
                self.assertGreater(8 * taken / elems, bits - 0.5 if bits < 8 else 8)
                self.assertLess(plan["auto"]["predicted_error"], before)
                before = plan["auto"]["predicted_error"]
        self.assertEqual(set(self.bits_of(self.dry_run(*AUTO, "--bits", "5.3")).values()) - {4, 5, 6, 8}, set())
        named = self.dry_run(*AUTO, "--bits", "3.5", "--schemes", "int2,int3,int4,int7")
        self.assertLess(min(self.bits_of(named).values()), 4)

    def test_bits_out_of_range(self):
        least = self.fails(2, *AUTO, "--bits", "4.1", self.source, self.path("o"))
        self.assertIn("--bits 4.1 is less than this model can have; expected 4.12", least)
        self.assertIn("above 0 and at most 16", self.fails(2, *AUTO, "--bits", "16.1", self.source, self.path("o")))
        self.assertIn("needs --to auto", self.fails(2, "--to", "int4", "--bits", "5", self.source, self.path("o")))
        self.assertIn("--vram or --bits", self.fails(2, *AUTO, self.source, self.path("o")))
        self.assertFalse(os.path.exists(self.path("o")))

    def test_bits_convert(self):
        args = [*AUTO, "--bits", "6", "--schemes", "int4,int8", *PLAIN]
        self.ok("-q", *args, self.source, self.path("o"))
        self.ok("verify", "-q", self.path("o"), "--against", self.source)
        self.assertIn("complete already", self.ok(*args, self.source, self.path("o")))
        self.fails(2, *AUTO, "--bits", "7", "--schemes", "int4,int8", *PLAIN, self.source, self.path("o"))

    def test_importance_decides(self):
        """What counts a hundred times as much gets more bits, and one file serves several budgets."""
        for heavy in ("layers.0.", "layers.3."):
            file = self.importance(traces(lambda name: [100 if heavy in name else 1, 2]))
            for bits in ("4.8", "5.5", "6.5"):
                with self.subTest(heavy=heavy, bits=bits):
                    plan = self.dry_run(*AUTO, "--bits", bits, *file)
                    self.assertEqual(plan["auto"]["weighed_by"], "traces")
                    got = self.bits_of(plan)
                    self.assertGreater(min(b for name, b in got.items() if heavy in name),
                                       max(b for name, b in got.items() if heavy not in name))
        without = self.dry_run(*AUTO, "--bits", "5.5")
        self.assertEqual(without["auto"]["weighed_by"], "importance")
        said = self.ok("--dry-run", *AUTO, "--bits", "5.5", "--explain", self.source)
        self.assertIn("without any data", said)
        self.assertIn("  chosen by the roles of weights alone, without data; see --importance\n", said)
        self.assertIn("  chosen by --importance\n", self.ok("--dry-run", *AUTO, "--bits", "5.5", *file, self.source))

    def test_importance_with_gaps(self):
        """Weights without traces count as is usual for their role, and a note says so."""
        content = traces(lambda name: [1, 1])
        for name in [n for n in content["weights"] if "layers.2." in n]:
            del content["weights"][name]
        r = self.run_qconv("--dry-run", "--json", *AUTO, "--bits", "5.5", *self.importance(content), self.source)
        self.assertEqual(r.returncode, 0)
        self.assertIn(b"lacks 7 weights, which count as much as is usual for their roles", r.stderr)
        got = self.bits_of(json.loads(r.stdout))
        self.assertLess(abs(sum(b for n, b in got.items() if "layers.2." in n) / 7 -
                            sum(b for n, b in got.items() if "layers.1." in n) / 7), 2)

    def test_bad_importance(self):
        good = traces(lambda name: [1, 1])
        other = {**good, "weights": {**good["weights"], "model.layers.9.mlp.up_proj.weight": [1, 1]}}
        name = "model.layers.0.mlp.up_proj.weight"
        for content, has in (
                (other, "it is of another model, as this one has no weight 'model.layers.9.mlp.up_proj.weight'"),
                ({**good, "format": 2}, "its format is 2; expected 1"),
                ({k: v for k, v in good.items() if k != "weights"}, "weights"),
                ({k: v for k, v in good.items() if k != "tokens"}, "tokens"),
                ({**good, "weights": {name: [1]}}, "'%s' has 1 numbers; expected two" % name),
                ({**good, "weights": {name: [1, -1]}}, "'%s' has the trace -1; expected 0 or more" % name),
                ({**good, "weights": {name: [1e300, 1e300]}}, "product is too large"),
                ({**good, "weights": {name: ["a", 1]}}, name),
                ({**good, "weights": {"model.norm.weight": [1, 1]}}, "none of the weights that are to be quantized"),
                ("{", "--importance"), ("[]", "expected an object")):
            with self.subTest(has):
                said = self.fails(3, *AUTO, "--bits", "5", *self.importance(content), self.source, self.path("o"))
                self.assertIn(has, said)
                self.assertFalse(os.path.exists(self.path("o")))
        self.assertIn("are known", self.fails(
            2, "plan", *AUTO, "--vram", "24GB", *self.importance(good), "meta-llama/Llama-3.3-70B-Instruct"))

    @unittest.skipUnless(AT_CALL, "needs the library that runs a command at a call")
    def test_what_was_written_is_not_what_was_planned(self):
        """A header that changes behind the back of the conversion does not become an output."""
        shard = os.path.join(self.path("o"), STAGING, "model.safetensors")
        swap = self.write("swap.py", """
f = open(%r, "r+b")
at = f.read().index(b"layers.0.mlp.up_proj")
f.seek(at)
f.write(b"layers.9.mlp.up_proj")
""" % shard)
        r = self.run_qconv("--to", "nf4", *PLAIN, self.source, self.path("o"),
                       env={**os.environ, **at_call("read:1", STAGING + "/model", "python3 " + swap)})
        self.assertEqual(r.returncode, 4, r.stderr)
        self.assertIn(b"it was to have 'model.layers.0.mlp.up_proj.weight", r.stderr)
        self.assertFalse(os.path.exists(os.path.join(self.path("o"), "qconv.json")))

    def test_more_than_half_stays(self):
        """Rows of 96 are no whole groups of 128. The output is complete, but it is no success."""
        shapes = {"model.layers.0.mlp.up_proj.weight": [256, 96], "model.layers.0.mlp.gate_proj.weight": [256, 96],
                  "model.layers.0.mlp.down_proj.weight": [96, 256]}
        rng = random.Random(3)
        mk.write_checkpoint(self.path("odd"), {name: ("BF16", shape, mk.random_bytes("BF16", shape, rng))
                                               for name, shape in shapes.items()}, CONFIG)
        odd = ["--incomplete", *PLAIN, self.path("odd")]
        said = self.fails(4, "-q", "--to", "int4", *odd, self.path("o"))
        self.assertIn("is complete, but 2 of 3 matrices", said)
        self.assertIn("has rows of no whole groups", said)
        self.ok("verify", "-q", self.path("o"))
        self.fails(4, "-q", "--to", "int4", *odd, self.path("o"))  # it is complete already
        for n, asked in enumerate((["--keep", "*up_proj.weight"], ["--block-size", "32"])):
            self.ok("-q", "--to", "int4", *asked, *odd, self.path("asked%d" % n))
        self.ok("-q", *AUTO, "--vram", "1GB", *odd, self.path("fits"))  # 16 bits, for there is room

    def test_groups_of_experts(self):
        """Experts have groups, also with int8, and a scale for each row only where no group divides their rows."""
        for inner, schemes in ((128, {"w8a16"}), (80, {"w8a16-channel"})):
            name = "model.layers.0.mlp.experts.%d.%s_proj.weight"
            shapes = {name % (e, p): [inner, 128] if p != "down" else [128, inner]
                      for e in range(2) for p in ("gate", "up", "down")}
            mk.write_checkpoint(self.path("e%d" % inner), {n: ("BF16", shape, None) for n, shape in shapes.items()},
                                {**CONFIG, "model_type": "qwen3_moe", "num_experts": 2})
            plan = self.dry_run("--incomplete", *AUTO, "--bits", "8.5", "--schemes", "int8", model=self.path("e%d" % inner))
            self.assertEqual({t["scheme"] for t in plan["tensors"]}, schemes)

    def test_experts_stay(self):
        """A stack whose layout nobody knows stays in 16 bits, and is most of the model."""
        stack = "model.layers.0.mlp.experts.fused_proj"
        shapes = {stack: [4, 128, 128], "model.layers.0.self_attn.q_proj.weight": [128, 128]}
        mk.write_checkpoint(self.path("moe"), {name: ("BF16", shape, None) for name, shape in shapes.items()},
                            {**CONFIG, "model_type": "a_mixture"})
        moe = ["--to", "nf4", "--incomplete", *PLAIN, self.path("moe")]
        r = self.run_qconv(*moe, self.path("o"))
        self.assertEqual(r.returncode, 4)
        self.assertIn(("o is complete, but 1 of 2 matrices, 131 KB of 164 KB, stay as they were though nothing asked "
                       "for it: '%s' (stack of experts, not 2-D)" % stack).encode(), r.stderr)
        self.ok("-q", "--keep", stack, *moe, self.path("asked"))


if __name__ == "__main__":
    unittest.main()

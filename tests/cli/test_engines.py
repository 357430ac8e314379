"""--for: what an engine cannot load is refused before the work, and of a finished output, in one
sentence with what helps; what it can load passes."""
import json
import os
import random
import unittest

from output_case import OutputCase
from test_integers import Weight, awq, ct_config, gptq, int_quantized, pack_quantized
import make_checkpoint as mk

A, M = "model.layers.0.self_attn.", "model.layers.0.mlp."
OTHERS = ("transformers", "vllm")
OURS = ("qconv", "vllm-qconv")
ENGINES = OTHERS + OURS
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 2,
       "num_experts_per_tok": 1, "torch_dtype": "bfloat16"}
PLAIN = ("--compress", "none")


def weights(shapes):
    rng = random.Random(3)
    return {name + ".weight": ("BF16", shape, mk.random_bytes("BF16", shape, rng))
            for name, shape in shapes.items()}


def dense():
    return weights({A + "q_proj": [64, 64], A + "k_proj": [64, 64], A + "v_proj": [64, 64],
                    A + "o_proj": [64, 64], M + "gate_proj": [64, 64], M + "up_proj": [64, 64]})


def experts(rows=64):
    return weights({A + "o_proj": [64, 64],
                    **{M + "experts.%d.%s_proj" % (e, p): [64, rows] if p == "down" else [rows, 64]
                       for e in range(2) for p in ("gate", "up", "down")}})


class Engines(OutputCase):
    replaces = True

    def refusals(self, *args, tensors=None, config=LLAMA):
        """{engine: refusals} that convert gives before the work and inspect gives of what it
        makes; both are asked about every engine by itself and about all of them."""
        self.model(tensors or dense(), config=config)
        self.ok("-q", *args, "m", "o")
        found = {}
        for engine in (*ENGINES, "all"):
            before = self.run_qconv(*args, "--for", engine, "--dry-run", "m")
            after = self.run_qconv("inspect", "--json", "--for", engine, "o")
            answer = {e["name"]: e for e in json.loads(after.stdout)["engines"]}
            self.assertEqual(set(answer), set(ENGINES) if engine == "all" else {engine})
            said = [n for e in answer.values() for n in e["refusals"]]
            # Before the work every sentence is there too, with what helps before the work.
            text = before.stderr.decode()
            for sentence in said:
                self.assertIn(sentence.rsplit(": ", 1)[0], text, (engine, args))
            self.assertEqual((before.returncode, after.returncode), (2, 4) if said else (0, 0),
                             (engine, args, text))
            self.assertEqual([e["loads"] for e in answer.values()],
                             [not e["refusals"] for e in answer.values()])
            for name, e in answer.items():
                self.assertEqual(found.setdefault(name, e["refusals"]), e["refusals"])
            words = self.run_qconv("inspect", "--for", engine, "o")
            self.assertEqual(words.returncode, after.returncode)
            for sentence in said:
                self.assertIn(sentence, words.stdout.decode())
        return {name: said for name, said in found.items() if said}

    def expect(self, engines, word, help_after, *args, **more):
        found = self.refusals(*args, **more)
        self.assertEqual(set(found), set(engines), found)
        for name in engines:
            self.assertEqual(len(found[name]), 1, found)
            self.assertIn(word, found[name][0])
            self.assertTrue(found[name][0].endswith(": " + help_after), found[name][0])

    def test_what_loads_everywhere(self):
        self.assertEqual(self.refusals("--to", "nf4", *PLAIN), {})
        self.assertEqual(self.refusals("--to", "nf4", "--block-size", "128", *PLAIN), {})
        self.assertEqual(self.refusals("--to", "int8", *PLAIN), {})
        self.assertEqual(self.refusals("--to", "bf16", *PLAIN), {})
        # A group that is kept is on the list under the engines' name.
        self.assertEqual(self.refusals("--to", "nf4", "--keep", "*q_proj*", *PLAIN), {})

    def test_compressed(self):
        self.expect(OTHERS, ".zst", "qconv unpack writes plain files", "--to",
                    "nf4")

    def test_tied_under_the_heads_name(self):
        """vLLM leaves a tied head out, and with it the only table that there is."""
        tied = {**LLAMA, "tie_word_embeddings": True}
        head, both = weights({"lm_head": [64, 64]}), weights({"lm_head": [64, 64], "model.embed_tokens": [64, 64]})
        found = self.refusals("--to", "nf4", *PLAIN, tensors={**dense(), **head}, config=tied)
        self.assertEqual(set(found), {"vllm", "vllm-qconv"})
        self.assertIn("passes over 'lm_head.weight'", found["vllm"][0])
        for tensors, config in ((head, LLAMA), (both, tied)):
            self.assertEqual(self.refusals("--to", "nf4", *PLAIN, tensors={**dense(), **tensors}, config=config), {})

    def test_own_forms(self):
        self.expect(OTHERS, "(int8-block)", "turn it back with --to bf16", "--to", "int8",
                    "--block-size", "64", *PLAIN)

    def test_split_groups(self):
        self.expect(("vllm",), "'%sq_proj.weight' is in 16 bits" % A,
                    "convert again without --split-fused", "--to", "nf4", "--split-fused",
                    "--keep", "*q_proj*", *PLAIN)

    def test_a_list_without_the_engines_name(self):
        """As versions before this one wrote it."""
        self.model(dense(), config=LLAMA)
        self.ok("-q", "--to", "nf4", "--keep", "*q_proj*", *PLAIN, "m", "o")
        config = self.json_of("o", "config.json")
        q = config["quantization_config"]
        q["llm_int8_skip_modules"].remove(A + "qkv_proj")
        with open(self.path("o", "config.json"), "w") as f:
            json.dump(config, f)
        r = self.run_qconv("inspect", "--for", "vllm", "o")
        self.assertEqual(r.returncode, 4)
        self.assertIn("'%sqkv_proj'" % A, r.stderr.decode())
        for name in ("model.layers.0", "qkv_proj"):  # a list may name more, or a component
            q["llm_int8_skip_modules"][0] = name
            with open(self.path("o", "config.json"), "w") as f:
                json.dump(config, f)
            self.ok("inspect", "--for", "vllm", "o")
        os.remove(self.path("o", "config.json"))
        r = self.run_qconv("inspect", "--for", "transformers", "o")
        self.assertEqual(r.returncode, 4)
        self.assertIn("loads nothing here, because there is no config.json", r.stderr.decode())

    def test_loaders_of_qconv(self):
        """They load outputs of qconv only, which "all" knows."""
        self.model(dense(), config=LLAMA)
        answer = json.loads(self.ok("inspect", "--json", "--for", "all", "m"))
        self.assertEqual([e["name"] for e in answer["engines"]], list(OTHERS))
        for name in OURS:
            r = self.run_qconv("inspect", "--for", name, "m")
            self.assertEqual(r.returncode, 4)
            self.assertIn(b"needs a qconv.json, which is not there: convert it with qconv", r.stderr)
        head = {**weights({"lm_head": [64, 64], "model.embed_tokens": [64, 64]}), **dense()}
        found = self.refusals("--to", "nf4", "--quantize", "lm_head.weight", *PLAIN, tensors=head,
                              config=dict(LLAMA, tie_word_embeddings=False))
        self.assertIn("the head in 16 bits only, and 'lm_head.weight' is not", found["vllm-qconv"][0])
        found = self.refusals("--to", "nf4", *PLAIN, tensors=weights({"h.0.attn.c_attn": [64, 64]}),
                              config=dict(LLAMA, model_type="gpt2"))
        self.assertEqual(set(found), {"vllm-qconv"})
        self.assertIn("rearranges the weights of model type gpt2", found["vllm-qconv"][0])

    def test_experts(self):
        moe = {"tensors": experts(), "config": MOE}
        found = self.refusals("--to", "nf4", *PLAIN, **moe)
        self.assertEqual(set(found), {"transformers"})
        self.assertIn("transformers 5 loads quantized experts", found["transformers"][0])
        self.assertLessEqual(len(found["transformers"][0].split()), 20)
        found = self.refusals("--to", "int8", *PLAIN, **moe)
        self.assertEqual(set(found), {"transformers", "vllm"})
        self.assertIn("no int8 of bitsandbytes for experts", found["vllm"][0])
        self.expect(("vllm",), "quantizes experts that were kept ('%sexperts.0.down" % M,
                    "convert again without --keep for experts", "--to", "nf4", "--keep",
                    "*.experts.*", *PLAIN, **moe)
        found = self.refusals("--to", "nf4", *PLAIN, "--block-size", "128",
                              tensors=experts(rows=33), config=MOE)
        self.assertIn("not a whole number", found["vllm"][0])

    def test_forms_of_other_tools(self):
        """What the table does not speak of is not judged."""
        tensors = dense()
        w = A + "q_proj.weight"
        tensors[w] = ("F8_E4M3", [64, 64], bytes(64 * 64))
        tensors[w + "_scale_inv"] = ("F32", [1, 1], b"\x00\x00\x80\x3f")
        config = dict(LLAMA, quantization_config={"quant_method": "fp8",
                                                  "weight_block_size": [128, 128]})
        self.model(tensors, config=config)
        for args in (("inspect", "m"), ("--to", "keep", *PLAIN, "--dry-run", "m")):
            r = self.run_qconv(*args, "--for", "vllm")
            self.assertEqual(r.returncode, 3, r.stderr)
            self.assertIn("some weights are fp8", r.stderr.decode())
        self.ok("--to", "bf16", *PLAIN, "--dry-run", "--for", "all", "m")
        self.ok("--to", "nf4", *PLAIN, "--dry-run", "--for", "all", "m")

    def test_compressed_tensors(self):
        """Every engine loads every form that convert makes, and says so of the plan and of the
        output."""
        ct = ("--format", "compressed-tensors", *PLAIN)
        wide = weights({A + "q_proj": [128, 128], A + "k_proj": [64, 128], A + "v_proj": [64, 128],
                        A + "o_proj": [128, 128]})
        for form in (["int4"], ["int4", "--block-size", "32"], ["int8"],
                     ["int8", "--activation-bits", "16"],
                     ["int8", "--activation-bits", "16", "--block-size", "64"]):
            self.assertEqual(self.refusals("--to", *form, *ct, tensors=wide), {})
        summary = self.ok("--to", "int4", "--block-size", "64", *ct, "m", "o")
        self.assertIn("loads in  transformers with compressed-tensors, vLLM, qconv.load", summary)

    def test_compressed_tensors_refused(self):
        ct = ("--to", "int4", "--block-size", "32", "--format", "compressed-tensors", *PLAIN)
        found = self.refusals(*ct, "--split-fused", "--keep", "*q_proj*")
        self.assertEqual(set(found), {"vllm"})
        self.assertIn("'%sq_proj.weight' is in 16 bits" % A, found["vllm"][0])
        found = self.refusals(*ct[:-2])
        self.assertEqual([len(found[e]) for e in OTHERS], [1, 1])
        self.assertIn(".zst", found["vllm"][0])
        found = self.refusals(*ct, "--split-fused", "--keep", "*experts.1.up*", tensors=experts(),
                              config=MOE)
        self.assertIn("one scheme for the experts of a layer, and '%sexperts.1.up_proj.weight'" % M,
                      "".join(found["vllm"]))
        self.assertIn("transformers 5 loads quantized experts", found["transformers"][0])

    def stranger(self, tensors, config):
        """{engine: refusals} of a checkpoint that another tool made, which are those that a plan to
        pass it on has."""
        self.model(tensors, config=dict(LLAMA, quantization_config=config))
        r = self.run_qconv("inspect", "--json", "--for", "all", "m")
        found = {e["name"]: e["refusals"] for e in json.loads(r.stdout)["engines"] if e["refusals"]}
        self.assertEqual(r.returncode, 4 if found else 0, r.stderr)
        before = self.run_qconv("--to", "keep", *PLAIN, "--for", "all", "--dry-run", "m")
        self.assertIn(before.returncode, (2,) if found else (0, 2), before.stderr)  # qconv's own may refuse
        for sentence in (s for said in found.values() for s in said):
            self.assertIn(sentence.rsplit(": ", 1)[0], before.stderr.decode())
        return found

    def test_strangers(self):
        """Files of other tools for compressed-tensors are judged by what they hold."""
        w = Weight(random.Random(5), 128, 256, 4, 2, "BF16", symmetric=True)
        z = Weight(random.Random(5), 128, 256, 4, 2, "BF16")
        token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token",
                 "dynamic": True}

        def config(*args, activations=None, **more):
            c = ct_config(*args, **more)
            c["config_groups"]["group_0"]["input_activations"] = activations
            return c

        group = ("pack-quantized", 4, "group", 128)
        for tensors, c, says in (
                (pack_quantized(w, symmetric=True), config(*group), {}),
                (pack_quantized(z), config(*group, False), {}),
                (pack_quantized(Weight(random.Random(5), 128, 256, 4, 1, "BF16", symmetric=True),
                                symmetric=True), config("pack-quantized", 4, "channel"), {}),
                (pack_quantized(Weight(random.Random(5), 128, 256, 4, 16, "BF16", symmetric=True),
                                symmetric=True), config("pack-quantized", 4, "group", 16),
                 {"vllm": "has groups of 16"}),
                (pack_quantized(Weight(random.Random(5), 128, 256, 4, 1, "BF16", symmetric=True),
                                symmetric=True), config("pack-quantized", 4, "group", 256), {}),
                (pack_quantized(Weight(random.Random(5), 128, 256, 4, 1, "BF16", True, True),
                                single=True, symmetric=True), config("pack-quantized", 4, "tensor"),
                 {"vllm": "has one scale"}),
                (pack_quantized(Weight(random.Random(5), 128, 256, 4, 2, "BF16", symmetric=True,
                                       shuffled=True), symmetric=True, shuffled=True),
                 config(*group, actorder="group"), {"vllm": "no longer loads act-order"}),
                (pack_quantized(w, symmetric=True), config(*group, activations=token),
                 {"vllm": "of another kind"}),
                (pack_quantized(Weight(random.Random(5), 128, 256, 8, 2, "BF16")),
                 config("pack-quantized", 8, "group", 128, False),
                 {"vllm": "on Hopper alone"})):
            with self.subTest(config=c):
                found = self.stranger(tensors, c)
                self.assertEqual(set(found), set(says), found)
                for engine, word in says.items():
                    self.assertEqual(len(found[engine]), 1, found)
                    self.assertIn(word, found[engine][0])
                    self.assertTrue(found[engine][0].endswith(
                        ": decode it with --to bf16, and convert that"), found)
        eight = Weight(random.Random(5), 128, 256, 8, 1, "BF16", symmetric=True)
        codes = int_quantized(eight, symmetric=True)
        self.assertEqual(self.stranger(codes, config("int-quantized", 8, "channel", activations=token)), {})
        found = self.stranger(codes, config("int-quantized", 8, "channel"))
        self.assertEqual(set(found), set(OTHERS))
        self.assertIn("beside activations of 16 only as pack-quantized", found["transformers"][0])

    def test_strangers_modules(self):
        """Fused groups and experts of strangers."""
        def named(names, **more):
            return {n: t for name in names for n, t in pack_quantized(
                Weight(random.Random(5), 128, 256, 4, 2, "BF16", symmetric=True), name + ".",
                symmetric=True).items()}

        qkv = named(A + n for n in ("q_proj", "k_proj", "v_proj"))
        config = ct_config("pack-quantized", 4, "group", 128)
        self.assertEqual(self.stranger(qkv, config), {})
        other = pack_quantized(Weight(random.Random(5), 128, 256, 4, 8, "BF16", symmetric=True),
                               A + "v_proj.", symmetric=True)
        config["config_groups"]["group_1"] = ct_config("pack-quantized", 4, "group", 32)[
            "config_groups"]["group_0"]
        found = self.stranger({**qkv, **other}, config)
        self.assertEqual(set(found), {"vllm"})
        self.assertIn("'%sv_proj.weight' has another than its first member" % A, found["vllm"][0])
        static = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor",
                  "dynamic": False}
        tensors = {}
        for p in ("gate", "up", "down"):
            w = Weight(random.Random(5), 128, 256, 8, 1, "BF16", symmetric=True)
            name = M + "experts.0.%s_proj." % p
            tensors.update(int_quantized(w, name, symmetric=True))
            tensors[name + "input_scale"] = ("F32", [1], mk.encode("F32", [0.01]))
        config = ct_config("int-quantized", 8, "channel")
        config["config_groups"]["group_0"]["input_activations"] = static
        found = self.stranger(tensors, config)
        self.assertIn("'%sexperts.0.down_proj.weight' are static" % M, found["vllm"][0])

    def test_coded_by_other_tools(self):
        """GPTQ is read, and not judged. AWQ's form is vLLM's, and others were not tried with it."""
        w = Weight(random.Random(5), 128, 256, 4, 2)
        for form, method in ((gptq, "gptq"), (awq, "awq")):
            self.model(form(w), config=dict(LLAMA, quantization_config={
                "quant_method": method, "bits": 4, "group_size": 128}))
            if method == "gptq":
                self.fails(3, "inspect", "m", "--for", "vllm", has="some weights are " + method)
        self.ok("inspect", "m", "--for", "vllm")
        for engine in ("transformers", "qconv"):
            r = self.run_qconv("inspect", "m", "--for", engine)
            self.assertEqual(r.returncode, 4, r.stderr)
            self.assertIn(b"was not tried with AWQ's form", r.stdout)

    def test_plan(self):
        """A plan has no compression; the rest is as convert has it."""
        whole = dict(dense(), **weights({M + "down_proj": [64, 64], "model.embed_tokens": [8, 64], "lm_head": [8, 64],
                                         "model.norm": [64], "model.layers.0.input_layernorm": [64],
                                         "model.layers.0.post_attention_layernorm": [64]}))
        self.model(whole, config=dict(LLAMA, hidden_size=64, num_hidden_layers=1, num_attention_heads=2,
                                      num_key_value_heads=2, intermediate_size=64, vocab_size=8))
        self.ok("plan", "--for", "all", "--vram", "1GB", "m")
        self.usage("plan", "--for", "vllm", "--to", "nf4", "--keep", "*q_proj*", "--split-fused", "--vram", "1GB",
                   "m", has="leave out --split-fused", command="plan")
        self.usage("--to", "nf4", "--for", "ollama", "m", "o", has="--for: expected transformers, vllm, ")
        for engine in ("sglang", "unsloth"):
            self.usage("--to", "nf4", "--for", engine, "m", "o", has="vllm, qconv, vllm-qconv or all, got '%s', which "
                       "qconv was never run with; docs/interop.md says " % engine)


if __name__ == "__main__":
    unittest.main()

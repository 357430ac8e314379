"""--for: what an engine cannot load is refused before the work, and of a finished output, in one
sentence with what helps; what it can load passes."""
import json
import os
import random
import unittest

from output_case import OutputCase
import make_checkpoint as mk

A, M = "model.layers.0.self_attn.", "model.layers.0.mlp."
ENGINES = ("transformers", "vllm", "sglang", "unsloth")
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
        self.expect(ENGINES, ".zst", "qconv unpack makes plain files", "--to", "nf4")

    def test_own_forms(self):
        self.expect(ENGINES, "(int8-block)", "turn it back with --to bf16", "--to", "int8",
                    "--block-size", "64", *PLAIN)

    def test_split_groups(self):
        self.expect(("vllm", "sglang"), "'%sq_proj.weight' is in 16 bits" % A,
                    "convert again without --split-fused", "--to", "nf4", "--split-fused",
                    "--keep", "*q_proj*", *PLAIN)

    def test_a_list_without_the_engines_name(self):
        """As versions before this one wrote it."""
        self.model(dense(), config=LLAMA)
        self.ok("-q", "--to", "nf4", "--keep", "*q_proj*", *PLAIN, "m", "o")
        with open(self.path("o", "config.json")) as f:
            config = json.load(f)
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
        self.assertIn("needs a config.json", r.stderr.decode())

    def test_unsloth(self):
        self.expect(("unsloth",), "scales that are quantized too",
                    "convert again without --no-double-quant", "--to", "nf4", "--no-double-quant",
                    *PLAIN)
        self.expect(("unsloth",), "config.json says float32",
                    "convert again with --compute-dtype bfloat16 or float16", "--to", "nf4",
                    "--compute-dtype", "float32", *PLAIN)

    def test_experts(self):
        moe = {"tensors": experts(), "config": MOE}
        found = self.refusals("--to", "nf4", *PLAIN, **moe)
        self.assertEqual(set(found), {"transformers"})
        self.assertIn("transformers 5 holds the experts", found["transformers"][0])
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
        """What a plan of them says; a finished output of them is not judged yet."""
        ct = ("--format", "compressed-tensors", *PLAIN)
        tensors = weights({A + "q_proj": [64, 256], A + "k_proj": [64, 256], A + "v_proj": [64, 256]})
        self.model(tensors, config=LLAMA)
        said = self.run_qconv("--to", "int4", *ct, "--for", "all", "--dry-run", "m")
        self.assertEqual(said.returncode, 2, said.stderr)
        self.assertIn("--for unsloth: Unsloth", said.stderr.decode())
        self.assertEqual(said.stderr.decode().count("--for "), 1)
        for engine in ("transformers", "vllm", "sglang"):
            for more in (["int4"], ["int4", "--block-size", "32"], ["int8"]):
                self.ok("--to", *more, *ct, "--for", engine, "--dry-run", "m")
        self.model(weights({A + "o_proj": [64, 192]}), config=LLAMA)
        r = self.run_qconv("--to", "int4", "--block-size", "64", *ct, "--for", "vllm", "--dry-run",
                           "m")
        self.assertEqual(r.returncode, 2)
        self.assertIn("columns in 128s", r.stderr.decode())
        summary = self.ok("--to", "int4", "--block-size", "64", *ct, "m", "o")
        self.assertIn("loads in  transformers with compressed-tensors, and vLLM", summary)

    def test_plan(self):
        """A plan has no compression; the rest is as convert has it."""
        self.model(dense(), config=dict(LLAMA, hidden_size=64, num_hidden_layers=1,
                                        num_attention_heads=2, num_key_value_heads=2,
                                        intermediate_size=64, vocab_size=8))
        self.ok("plan", "--for", "all", "--vram", "1GB", "m")
        r = self.run_qconv("plan", "--for", "unsloth", "--no-double-quant", "--vram", "1GB", "m")
        self.assertEqual(r.returncode, 2)
        self.assertIn("leave out --no-double-quant", r.stderr.decode())
        self.usage("--to", "nf4", "--for", "ollama", "m", "o", has=["--for", "sglang"])


if __name__ == "__main__":
    unittest.main()

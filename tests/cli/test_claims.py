"""A checkpoint is held against what its config.json asks for, before anything is written."""
import json
import os
import unittest

from qconv_case import QconvCase

import make_checkpoint as mk


class Claims(QconvCase):
    def make(self, change=None, config=None, name="Llama-3.1-8B", shards=None, **more):
        """A small model of the pattern. change(tensors) and config: what is not as it should be."""
        model = mk.load_model(name)
        rows = mk.model_rows(model, 2, 4, 32)
        tensors = {n: (kind, shape, None) for n, kind, shape, _ in rows}
        made = mk.model_config(model, 2, 4, 32)
        made.update(config or {}, **more)
        if change:
            tensors = change(tensors) or tensors
        return mk.write_checkpoint(self.path("m"), tensors, made, shards)

    def refused(self, *has):
        for command in (["plan", "--vram", "1GB", self.path("m")], ["--to", "bf16", self.path("m"), self.path("out")]):
            self.fails(3, *command, has=(*has, "--incomplete converts what is there"))
            self.assertFalse(os.path.exists(self.path("out")))
        self.ok("plan", "--vram", "1GB", "--incomplete", self.path("m"))

    def taken(self):
        return self.warned("plan", "--vram", "1GB", self.path("m"))

    def test_what_is_whole_is_taken(self):
        for name in mk.model_names():
            with self.subTest(name):
                self.make(name=name)
                self.assertNotIn("config.json asks", self.taken())

    def test_missing(self):
        drop = (("layers.1.", 9), ("down_proj", 2), ("norm", 5), ("lm_head", 1))
        for part, count in drop:
            with self.subTest(part):
                self.make(lambda t, part=part: {n: v for n, v in t.items() if part not in n})
                self.refused("%d of 21 tensors that config.json asks for" % count, part)
        self.make(config={"num_hidden_layers": 3})
        self.refused("9 of 30 tensors that config.json asks for are missing", "'model.layers.2.")

    def test_other_sizes(self):
        self.make(config={"intermediate_size": 512})
        self.refused("6 of 21 tensors have another shape than config.json asks for",
                     "mlp.down_proj.weight' is [128, 448] and not [128, 512]")

    def test_the_first_of_two_files(self):
        files = self.make(shards=600000)
        os.remove(self.path("m", "model.safetensors.index.json"))
        for name in files[1:]:
            os.remove(self.path("m", name))
        self.refused("the name of its file says that it is one of %d" % len(files),
                     "download the files that are missing, too")

    def test_what_happened(self):
        self.make(lambda t: {"layers.%d.w" % i: v for i, v in enumerate(t.values())})
        self.refused("21 of 21", "its names are another library's")

        def adapter(tensors):
            out = {n.replace("q_proj.", "q_proj.base_layer."): v for n, v in tensors.items()}
            out["model.layers.0.self_attn.q_proj.lora_A.default.weight"] = ("BF16", [8, 128], None)
            return out
        self.make(adapter)
        self.refused("merge it with peft's merge_and_unload")

    def test_too_many_are_a_note(self):
        self.make(lambda t: t.update({"model.layers.0.mlp.extra.weight": ("BF16", [4, 4], None)}))
        self.assertIn("1 tensor more than config.json asks for: 'model.layers.0.mlp.extra.weight'", self.taken())

    def test_other_spellings(self):
        """Bare models, heads of other classes, quantized weights, norms of old and tied tables."""
        self.make(lambda t: {n[6:]: v for n, v in t.items() if n.startswith("model.")}, architectures=["LlamaModel"])
        self.taken()
        self.make(lambda t: {("score.weight" if n.startswith("lm_head") else n): v for n, v in t.items()},
                  architectures=["LlamaForSequenceClassification"])
        self.assertNotIn("more than", self.taken())
        self.make(lambda t: {n: v for n, v in t.items() if "embed_tokens" not in n}, tie_word_embeddings=True)
        self.assertNotIn("more than", self.taken())
        self.make(lambda t: {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"):
                             v for n, v in t.items()}, name="all-MiniLM-L6-v2")
        self.assertNotIn("more than", self.taken())

    def test_layers_of_a_type_that_is_not_known(self):
        self.make(lambda t: {n: v for n, v in t.items() if "layers.1." not in n}, model_type="unheard")
        self.refused("config.json asks for 2 layers, and 'model.layers.' has 1")
        self.make(model_type="unheard")
        self.taken()
        self.make(model_type="dory", num_hidden_layers=4)  # attentions and MLPs
        self.taken()
        # A decoder beside a model of images has a count of its own, and another list of layers.
        self.make(model_type="unheard", decoder_num_hidden_layers=8)
        self.taken()

    def convert(self, *more):
        """Returns what it says, and the answer of --json."""
        out = self.path("out")
        said = self.run_qconv("--to", "nf4", "--compress", "none", "--force", *more, self.path("m"), out)
        self.assertEqual(said.returncode, 0, said.stderr)
        return said.stdout.decode() + said.stderr.decode(), json.loads(self.ok("--json", "--dry-run", "--to", "nf4", *more,
                                                                               self.path("m")))

    def weights(self):
        with open(self.path("out", "model.safetensors"), "rb") as f:
            return f.read()

    def test_names_of_wrapped_modules(self):
        """The output is that of the model itself."""
        def data(t, rename):
            return {rename(n): (kind, shape, (n.encode() * 99999)[:mk.tensor_bytes(kind, shape)])
                    for n, (kind, shape, _) in t.items()}
        self.make(lambda t: data(t, str))
        self.assertNotIn("wrapped", self.convert()[0])
        plain = self.weights()
        ways = {
            "_orig_mod.": lambda n: "_orig_mod." + n,
            "module.": lambda n: "module." + n,
            "base_model.model.": lambda n: "base_model.model." + n,
            "model.": lambda n: "model." + n,
            "_fsdp_wrapped_module.": lambda n: n.replace("mlp.", "_fsdp_wrapped_module.mlp."),
            "_checkpoint_wrapped_module.', 'module.": lambda n: "module._checkpoint_wrapped_module." + n,
        }
        for taken, rename in ways.items():
            with self.subTest(taken):
                self.make(lambda t, rename=rename: data(t, rename))
                note = "its names are those of wrapped modules; without '%s'" % taken
                self.assertIn(note, self.convert()[0])
                self.assertEqual(self.weights(), plain)
                self.ok("verify", self.path("out"), "--against", self.path("m"))
                self.assertIn(note, self.taken())
                self.assertIn(note, self.warned("inspect", self.path("m")))
        self.make(lambda t: dict(data(t, str), **{"_orig_mod.lm_head.weight": ("BF16", [4, 4], None)}))
        said, _ = self.convert()
        self.assertNotIn("wrapped modules", said)
        self.assertIn("'_orig_mod.lm_head.weight'", said)

    def test_what_is_not_whole_loads_nowhere(self):
        broken = (
            ("9 of 21 tensors that config.json asks for are missing", ["--incomplete"],
             lambda t: {n: v for n, v in t.items() if "layers.1." not in n}, None),
            ("config.json has no model_type", [], None, {"error": "Access to the model is restricted."}),
        )
        for why, options, change, config in broken:
            with self.subTest(why):
                self.make(change)
                if config:
                    mk.write_json(self.path("m", "config.json"), config)
                said, answer = self.convert(*options)
                self.assertIn("  loads in  nothing, because " + why, said)
                self.assertNotIn("from_pretrained", said)
                loads = answer["loads"]
                self.assertTrue(loads["lacks"].startswith(why))
                self.assertEqual((loads["transformers"], loads["qconv"], loads["vllm_plugin"]), ([], False, False))
                for folder in ("m", "out"):
                    r = self.run_qconv("inspect", "--for", "transformers", self.path(folder))
                    self.assertEqual(r.returncode, 4)
                    self.assertIn("loads nothing here, because " + why, r.stderr.decode())
        self.make(model_type="", pretrained_cfg={})  # of timm
        self.assertIn("transformers 4 and 5", self.convert()[0])

    def test_fp8_with_scales_of_other_programs(self):
        """Who loads that is not known."""
        def change(t):
            projections = [n for n in t if "_proj" in n]
            t.update({n: ("F8_E4M3", t[n][1], None) for n in projections})
            t.update({n.replace(".weight", ".scale_weight"): ("F32", [], None) for n in projections})
        self.make(change)
        loads = json.loads(self.ok("--to", "keep", "--dry-run", "--json", self.path("m")))["loads"]
        self.assertEqual((loads["with"], loads["qconv"], loads["vllm_plugin"]), ("what MODEL needs", False, False))
        self.fails(3, "inspect", "--for", "transformers", self.path("m"), has="does not know which engines read that")

    def test_a_head_that_differs_from_what_it_is_tied_to(self):
        text = "'lm_head.weight' is not 'model.embed_tokens.weight', although config.json ties them (%s"
        gemma = {"model_type": "gemma", "tie_word_embeddings": None}
        for said, config in (("tie_word_embeddings is true)", {"tie_word_embeddings": True}),
                             ("tie_word_embeddings is true by default)", gemma),
                             ("text_config.tie_word_embeddings is true)",
                              {"model_type": "unheard", "text_config": {"tie_word_embeddings": True},
                               "tie_word_embeddings": None})):
            self.make(lambda t: dict(t, **{"lm_head.weight": ("BF16", t["model.embed_tokens.weight"][1], b"\1\0" * (
                mk.tensor_bytes(*t["model.embed_tokens.weight"][:2]) // 2))}), config)
            self.assertIn(text % said, self.taken())
            self.assertIn(text % said, self.warned("inspect", "--for", "transformers", self.path("m")))
            self.make(lambda t: {n: (kind, shape, bytes(mk.tensor_bytes(kind, shape)))
                                 for n, (kind, shape, _) in t.items()}, config)
            self.assertNotIn("ties them", self.taken())
        self.make(config={"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}})
        self.assertNotIn("ties them", self.taken())


if __name__ == "__main__":
    unittest.main()

"""A checkpoint is held against what its config.json asks for, before anything is written."""
import os
import unittest

import make_checkpoint as mk
from qconv_case import QconvCase


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
        self.refused("the names of its files say that 1 of %d is here" % len(files),
                     "download the files that are missing, too")

    def test_what_happened(self):
        self.make(lambda t: {"layers.%d.w" % i: v for i, v in enumerate(t.values())})
        self.refused("21 of 21", "its names are another library's")
        self.make(lambda t: {n.replace("mlp.", "_fsdp_wrapped_module.mlp."): v for n, v in t.items()})
        self.refused("those of wrapped modules")

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


if __name__ == "__main__":
    unittest.main()

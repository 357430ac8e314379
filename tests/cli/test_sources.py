#!/usr/bin/env python3
"""What lies beside the weights, and what their values say: copied, left behind, or warned of."""
import json
import os
import struct
import unittest

from qconv_case import QconvCase
import make_checkpoint as mk

LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 17\n"
CONFIG = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64, "tie_word_embeddings": False}


def bf16(count, value=None):
    values = [value if value is not None else ((i * 37) % 101 - 50) / 64 for i in range(count)]
    return struct.pack("<%dH" % count, *(mk.to_bf16_bits(v) for v in values))


def llama(rows=64, change=None):
    """One layer. change: name -> the tensor instead."""
    shapes = {"model.embed_tokens.weight": [64, rows]}
    layer = "model.layers.0."
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        shapes[layer + "self_attn." + name + ".weight"] = [rows, rows]
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        shapes[layer + name + ".weight"] = [2 * rows, rows]
    shapes[layer + "mlp.down_proj.weight"] = [rows, 2 * rows]
    for name in (layer + "input_layernorm", layer + "post_attention_layernorm", "model.norm"):
        shapes[name + ".weight"] = [rows]
    shapes["lm_head.weight"] = [64, rows]
    tensors = {n: ("BF16", s, bf16(mk.numel(s))) for n, s in shapes.items()}
    tensors.update(change or {})
    return tensors


class Sources(QconvCase):
    def make(self, tensors=None, config=None, **more):
        mk.write_checkpoint(self.path("m"), tensors or llama(**more), dict(CONFIG, **(config or {})))
        for name in ("sub", "1_Pooling"):
            os.makedirs(self.path("m", name), exist_ok=True)

    def convert(self, *args):
        """Returns the warnings, and the JSON of the conversion."""
        r = self.run_qconv("--json", "--force", "--compress", "none", *args, "m", "o")
        self.assertEqual(r.returncode, 0, r.stderr)
        return r.stderr.decode(), json.loads(r.stdout)


class Beside(Sources):
    def test_descriptions_of_another_quantization(self):
        """They stay beside weights that stay, and go with weights that go."""
        quantization = {"quantization_config": {"quant_method": "fp8"}, "compression_config": {"format": "x"},
                        "text_config": {"quantization_config": {"quant_method": "fp8"}},
                        "transformers_weights": "model.safetensors"}
        self.make(config=quantization)
        names = ["hf_quant_config.json", "quant_config.json", "quantize_config.json", "quantization_config.json",
                 "quant_model_description.json", "recipe.yaml"]
        for name in names + ["tokenizer.json", "sub/recipe.yaml"]:
            self.write("m/" + name, "{}")
        self.convert("--to", "nf4")
        self.assertEqual([n for n in names if os.path.exists(self.path("o", n))], [])
        self.assertTrue(os.path.exists(self.path("o", "sub", "recipe.yaml")))
        config = self.json_of("o", "config.json")
        self.assertEqual(config["quantization_config"]["quant_method"], "bitsandbytes")
        self.assertEqual([k for k in quantization if k in config], ["quantization_config", "text_config"])
        self.assertEqual(config["text_config"], {})
        self.convert("--to", "keep")
        self.assertEqual([n for n in names if not os.path.exists(self.path("o", n))], [])

    def test_what_is_not_the_file(self):
        self.make()
        odd = {"tokenizer.json": LFS, "chat_template.jinja": "<!DOCTYPE html>", "generation_config.json": "",
               "added_tokens.json": '{"a": 1, "b', "sub/tokenizer.model": LFS}
        fine = {"vocab.json": '{"a": 1}\n', "empty.txt": "", "page.html": "<html>", "__init__.py": "",
                "list.json": " [1]", "tokenizer_config.json": "{}", "README.md": LFS}
        for name, text in fine.items():
            self.write("m/" + name, text)
        self.assertEqual(self.convert("--to", "nf4")[0], "")
        for name, text in odd.items():
            self.write("m/" + name, text)
            self.assertIn("'%s'" % name, self.convert("--to", "nf4")[0])
            self.assertIn("is not what the name says", self.warned("plan", "--vram", "1GB", "m"))
            self.assertRegex(self.ok("plan", "--vram", "1GB", "m"), "loads in .*, each without '%s', which is " % name)
            os.remove(self.path("m", name))

    def test_modules_of_sentence_transformers(self):
        """Their weights are in OUT, whatever becomes of OUT."""
        self.make()
        self.write("m/modules.json", json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]))
        dense = {"linear.weight": ("F32", [2, 2], bytes(16))}
        mk.write_checkpoint(self.path("m", "2_Dense"), dense)
        mk.write_checkpoint(self.path("m", "3_Other"), dense)
        self.write("m/1_Pooling/pytorch_model.bin", "a pickle")
        warnings, _ = self.convert("--to", "nf4")
        self.assertIn("not part of the model: '3_Other/model.safetensors'", warnings)
        self.ok("verify", "o", "--against", "m")
        self.ok("--to", "nf4", "m", "packed")
        self.ok("unpack", "packed", "plain")
        for out in ("o", "packed", "plain"):
            with open(self.path("m/2_Dense/model.safetensors"), "rb") as a, \
                 open(self.path(out, "2_Dense/model.safetensors"), "rb") as b:
                self.assertEqual(a.read(), b.read())
            self.assertTrue(os.path.exists(self.path(out, "1_Pooling", "pytorch_model.bin")))


class Listed(Sources):
    """An index that lists what no file has."""
    def list_more(self, name):
        os.makedirs(self.path("m"), exist_ok=True)
        tensors = llama()
        mk.write_checkpoint(self.path("m"), tensors, CONFIG, 40000)
        index = self.json_of("m", "model.safetensors.index.json")
        index["weight_map"][name] = index["weight_map"]["lm_head.weight"]
        self.write("m/model.safetensors.index.json", json.dumps(index))

    def test_multi_token_prediction(self):
        self.list_more("mtp.fc.weight")
        for more in ([], ["--drop-mtp"]):
            self.assertIn("is in no file: 'mtp.fc.weight'", self.convert("--to", "nf4", *more)[0])

    def test_a_weight(self):
        self.list_more("model.layers.0.extra.weight")
        words = "the index is in no file: 'model.layers.0.extra.weight'"
        for command in (["--to", "nf4", "m", "o"], ["plan", "--vram", "1GB", "m"]):
            r = self.run_qconv(*command)
            self.assertEqual(r.returncode, 3)
            self.assertIn(words, r.stderr.decode())
            self.assertFalse(os.path.exists(self.path("o")))
        self.convert("--to", "nf4", "--incomplete")


class Markers(Sources):
    def fp8(self, scale, *markers):
        tensors = llama()
        for name in list(tensors):
            if "proj" in name:
                stem = name[:-len("weight")]
                shape = tensors[name][1]
                tensors[name] = ("F8_E4M3", shape, bytes(i % 120 for i in range(mk.numel(shape))))
                tensors[stem + scale] = ("F32", [], struct.pack("<f", 0.5))
                for marker in markers:
                    tensors[stem + marker] = ("U8", [2], b"{}")
        return tensors

    def test_comfy(self):
        """ComfyUI's two forms are read as the usual one is, and nothing of them is left."""
        want = None
        for scale, markers in (("weight_scale", []), ("weight_scale", ["comfy_quant"]), ("scale_weight", [])):
            tensors = self.fp8(scale, *markers)
            if scale == "scale_weight":
                tensors["scaled_fp8"] = ("F8_E4M3", [0], b"")
            self.make(tensors)
            self.convert("--to", "bf16")
            got = mk.read_checkpoint(self.path("o"))
            want = want or got
            self.assertEqual(got, want)
        self.assertEqual(set(want), set(llama()))


class Values(Sources):
    def values(self, change, *args):
        self.make(change=change)
        warnings, answer = self.convert(*args)
        return warnings, answer["values"]

    def test_sound_values(self):
        for to in ("nf4", "int8", "fp16", "bf16"):
            self.assertEqual(self.values({}, "--to", to), ("", {"not_finite": 0, "vanished": 0, "half_zero": 0}))
        # Zeros alone are sound, and so are infinities in what is no weight.
        zeros = {"model.norm.weight": ("BF16", [64], bytes(128)), "model.layers.0.mask":
                 ("F32", [2], struct.pack("<2f", 0, -float("inf")))}
        warnings, values = self.values(zeros, "--to", "nf4", "--incomplete")
        self.assertEqual(values, {"not_finite": 0, "vanished": 0, "half_zero": 0})

    def test_not_finite(self):
        for bits, dtype in ((0x7fc0, "BF16"), (0xff80, "BF16"), (0x7c00, "F16")):
            for name in ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"):
                shape = llama()[name][1]
                data = bytearray(mk.numel(shape) * 2)
                struct.pack_into("<H", data, 2, 0x3c00)
                struct.pack_into("<H", data, 40, bits)
                for to in ("nf4", "bf16", "keep"):
                    warnings, values = self.values({name: (dtype, shape, bytes(data))}, "--to", to)
                    self.assertIn("not finite, and keeps them: the first is element 20 of '%s'" % name, warnings)
                    self.assertEqual(values["not_finite"], 1)

    def test_nothing_left(self):
        name = "model.layers.0.mlp.down_proj.weight"
        small = {name: ("BF16", [64, 128], bf16(64 * 128, 1e-30)[:-2] + bf16(1, -1e-30))}
        for to in ("int8", "fp16"):
            warnings, values = self.values(small, "--to", to)
            self.assertIn("nothing is left of 1 weight", warnings)
            self.assertIn("'%s'" % name, warnings)
            self.assertEqual(values["vanished"], 1)
        self.assertEqual(self.values(small, "--to", "bf16")[1]["vanished"], 0)

    def test_end_of_zeros(self):
        """The file ends in zeros from its middle on, or a little later, or in between."""
        for part, count in ((0.55, 1), (0.4, 0), (None, 0)):
            self.make()
            path = self.path("m", "model.safetensors")
            with open(path, "r+b") as f:
                data = f.read()
                head = 8 + struct.unpack("<Q", data[:8])[0]
                size = len(data) - head
                zeros = size * 6 // 10 if part is None else int(size * part)
                f.seek(len(data) - zeros - (size // 5 if part is None else 0))
                f.write(bytes(zeros))
            for to in ("bf16", "nf4", "keep"):
                warnings, answer = self.convert("--to", to)
                self.assertEqual(answer["values"]["half_zero"], count, (part, to))
                self.assertEqual("of 'model.safetensors' are zeros" in warnings, bool(count))


class Groups(Sources):
    def test_rows_of_no_whole_groups(self):
        self.make(rows=96, config={"hidden_size": 96, "intermediate_size": 192, "num_attention_heads": 4})
        for command in (["plan", "--vram", "1GB", "--to", "int4", "m"], ["--to", "int4", "m", "o"]):
            r = self.run_qconv(*command)
            self.assertEqual(r.returncode, 3)
            self.assertIn("no weight to quantize in whole groups", r.stderr.decode())
        self.make(rows=64)
        r = self.run_qconv("--to", "int4", "m", "o")
        warnings = r.stderr.decode()
        self.assertEqual(r.returncode, 4)
        self.assertIn("o is complete, but 6 of 7 matrices", warnings)
        self.assertIn("6 of 7 linear weights stay as they are, because their rows are no whole groups of 128; "
                      "--block-size 64 quantizes 6 of them", warnings)
        self.assertEqual(self.warned("--to", "int4", "--block-size", "64", "m", "o64"), "")


if __name__ == "__main__":
    unittest.main()

"""Forms of weights that people really have, made by torch and transformers from tiny models:
MXFP4 against transformers' own dequantization, and what only qconv reads, which every loader refuses.
"""
import functools
import json
import shutil
import unittest

import interop_support as s
import torch
import transformers
from safetensors.torch import load_file, save_file

s.quiet()

# Rows are whole blocks: bitsandbytes reads others wrongly on a CPU (docs/interop.md).
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=128,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
CONFIGS = {
    "llama": transformers.LlamaConfig(**SMALL),
    # down_proj is square, as gpt-oss-20b's is.
    "gpt_oss": transformers.GptOssConfig(**SMALL | dict(intermediate_size=64), head_dim=16, num_local_experts=4,
                                         num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"]),
}


@functools.lru_cache(maxsize=None)
def model_of(name):
    torch.manual_seed(len(name))
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).eval()
    # Routers that torch.empty made, norms of ones and biases of zeros would hide mistakes.
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.05)
    return model


@functools.lru_cache(maxsize=None)
def saved(name):
    folder = s.SCRATCH / "forms" / name
    model_of(name).save_pretrained(folder)
    return folder


def tensors_of(folder):
    out = {}
    for file in sorted(folder.glob("*.safetensors")):
        out.update(load_file(file))
    return out


def convert(source, name, *arguments):
    out = s.SCRATCH / "forms" / name
    shutil.rmtree(out, ignore_errors=True)
    s.qconv("-q", "--compress", "none", *arguments, source, out)
    return out


def load(folder, **options):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    return model.eval(), info


@torch.no_grad()
def logits(model):
    ids = torch.arange(3, 35).reshape(2, 16)
    return model(input_ids=ids).logits.float()


@functools.lru_cache(maxsize=None)
def mxfp4_source():
    folder = s.SCRATCH / "forms" / "mxfp4"
    shutil.copytree(saved("gpt_oss"), folder)
    tensors = tensors_of(folder)
    generator = torch.Generator().manual_seed(5)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8,
                                                  generator=generator)
        tensors[name + "_scales"] = torch.randint(118, 124, shape, dtype=torch.uint8,
                                                  generator=generator)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
        "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Mxfp4(unittest.TestCase):
    def test_bf16(self):
        """The same parameters, bit for bit, and the same outputs as transformers' own."""
        ours, info = load(convert(mxfp4_source(), "mxfp4-bf16", "--to", "bf16"),
                          dtype=torch.bfloat16)
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
        theirs, _ = load(mxfp4_source(), dtype=torch.bfloat16,
                         quantization_config=transformers.Mxfp4Config(dequantize=True))
        mine, other = ours.state_dict(), theirs.state_dict()
        self.assertEqual(sorted(mine), sorted(other))
        for name in mine:
            self.assertTrue(torch.equal(mine[name].to(torch.bfloat16),
                                        other[name].to(torch.bfloat16)), name)
        self.assertTrue(torch.equal(logits(ours), logits(theirs)))
        s.note(f"MXFP4 to bf16: {sum(p.numel() for p in mine.values())} weights equal to those of "
               "transformers")


class OwnForms(unittest.TestCase):
    """What only qconv reads stops every loader: no codes taken for weights."""

    FORMS = {
        "blocks": ("llama", "--to", "int8", "--block-size", "64"),
        "plain-blocks": ("llama", "--to", "int8", "--block-size", "64", "--no-double-quant"),
        "nf4": ("gpt_oss", "--to", "nf4", "--requantize"),
        "int8": ("gpt_oss", "--to", "int8", "--requantize"),
        "int8-32": ("gpt_oss", "--to", "int8", "--block-size", "32", "--requantize"),
        # For attention only, beside what no bitsandbytes model has.
        "nf4-beside": ("gpt_oss", "--to", "nf4"),
        "int8-beside": ("gpt_oss", "--to", "int8"),
        # Nothing else has a shape that could stop a loader.
        "one-stack": ("gpt_oss", "--to", "int8", "--requantize", "--keep", "*gate_up_proj*", "--keep", "*self_attn*",
                      "--keep", "*layers.1.*"),
    }

    def test_refused(self):
        for name, (model, *arguments) in self.FORMS.items():
            with self.subTest(name):
                folder = convert(saved("llama") if model == "llama" else mxfp4_source(), f"own-{name}", *arguments)
                config = json.loads((folder / "config.json").read_text())["quantization_config"]
                self.assertEqual(config["quant_method"], "qconv")
                self.assertFalse([key for key in config if "load_in" in key or key.startswith("bnb_")])
                with self.assertRaises((ValueError, RuntimeError)) as caught:
                    load(folder)
                s.note(f"{folder.name}: {str(caught.exception).splitlines()[0][:100]}")


def setUpModule():
    s.note(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    s.main()

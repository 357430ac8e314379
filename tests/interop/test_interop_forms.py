"""Forms of weights that people really have, made by torch and transformers from tiny models:
MXFP4 against transformers' own dequantization, FP8 against torch's float8, fused experts against
the released form, re-sharded bitsandbytes, and the families of tests/data/models loaded back.
"""
import functools
import json
import logging
import shutil
import unittest

import bitsandbytes.nn.modules
import interop_support as s
import torch
import transformers
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file

MAJOR = int(transformers.__version__.split(".")[0])
bitsandbytes.nn.modules.has_avx512bf16 = lambda: False  # see test_interop_checkpoints.py
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

# Rows are whole blocks: bitsandbytes reads others wrongly on a CPU (docs/interop.md).
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=128,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
MLA = dict(q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16,
           v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
           n_shared_experts=1, first_k_dense_replace=1, n_group=2, topk_group=1)


def configs():
    t = transformers
    vision = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_global_layers=1,
                  attention_heads=2, image_size=28, patch_size=14, max_num_tiles=2,
                  intermediate_layers_indices=[0, 1], vision_output_dim=96,
                  supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]])
    text = SMALL | dict(num_hidden_layers=3, cross_attention_layers=[1], rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0})
    if MAJOR == 4:
        text["rope_scaling"] = {"rope_type": "default"}
        del text["rope_parameters"]
    return {
        "llama": t.LlamaConfig(**SMALL),
        "qwen2": t.Qwen2Config(**SMALL),
        "qwen3": t.Qwen3Config(**SMALL, head_dim=32),
        "gemma2": t.Gemma2Config(**SMALL, head_dim=32, sliding_window=16),
        "deepseek_v2": t.DeepseekV2Config(**SMALL | dict(num_key_value_heads=4), **MLA,
                                          topk_method="greedy"),
        "deepseek_v3": t.DeepseekV3Config(**SMALL | dict(num_key_value_heads=4), **MLA),
        "mixtral": t.MixtralConfig(**SMALL, num_local_experts=4),
        "qwen3_moe": t.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=4, num_experts_per_tok=2,
                                      moe_intermediate_size=32),
        # down_proj is square, as gpt-oss-20b's is.
        "gpt_oss": t.GptOssConfig(**SMALL | dict(intermediate_size=64), head_dim=16, num_local_experts=4,
                                  num_experts_per_tok=2,
                                  layer_types=["sliding_attention", "full_attention"]),
        "mllama": t.MllamaConfig(text_config=text, vision_config=vision),
    }


STACKED = {"deepseek_v2", "deepseek_v3", "mixtral", "qwen3_moe"}


def auto(name):
    return (transformers.MllamaForConditionalGeneration if name == "mllama"
            else transformers.AutoModelForCausalLM)


@functools.lru_cache(maxsize=None)
def model_of(name):
    torch.manual_seed(len(name))
    config = configs()[name]
    kind = auto(name)
    make = kind._from_config if name == "mllama" else kind.from_config
    model = make(config, dtype=torch.bfloat16).eval()
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


def load(name, folder, **options):
    model, info = auto(name).from_pretrained(folder, output_loading_info=True, **options)
    return model.eval(), info


@torch.no_grad()
def logits(model):
    ids = torch.arange(3, 35).reshape(2, 16)
    return model(input_ids=ids).logits.float()


class Families(unittest.TestCase):
    """transformers takes qconv's output as it is, and quantizes the same modules."""

    def check(self, name, form, kind):
        out = convert(saved(name), f"{name}-{form}", "--to", form)
        model, info = load(name, out, dtype=torch.bfloat16)
        for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            self.assertFalse(info[trouble], (name, form, trouble))
        have = {n for n, m in model.named_modules() if type(m) is kind}
        code = {"nf4": torch.uint8, "int8": torch.int8}[form]
        tail = {"nf4": "weight.quant_state.bitsandbytes__nf4", "int8": "SCB"}[form]
        tensors = tensors_of(out)
        stored = {n[:-len(tail) - 1] for n in tensors if n.endswith(tail)}
        self.assertTrue(all(tensors[n + ".weight"].dtype == code for n in stored))
        self.assertEqual(len(have), len(stored), (name, form))
        self.assertTrue(torch.isfinite(logits(model)).all(), (name, form))
        error = float((logits(model) - logits(model_of(name))).norm() /
                      logits(model_of(name)).norm())
        s.note(f"{name} {form}: {len(stored)} weights, outputs differ by {error:.3f}")
        self.assertLess(error, 0.5 if form == "nf4" else 0.1)


def make_families():
    for name in configs():
        if name == "gpt_oss" or (MAJOR > 4 and name in STACKED):
            continue  # no loader has quantized stacks of experts
        for form, kind in (("nf4", Linear4bit), ("int8", Linear8bitLt)):
            def test(self, name=name, form=form, kind=kind):
                self.check(name, form, kind)
            setattr(Families, f"test_{name}_{form}", test)


make_families()


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
        ours, info = load("gpt_oss", convert(mxfp4_source(), "mxfp4-bf16", "--to", "bf16"),
                          dtype=torch.bfloat16)
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"] or info["mismatched_keys"])
        theirs, _ = load("gpt_oss", mxfp4_source(), dtype=torch.bfloat16,
                         quantization_config=transformers.Mxfp4Config(dequantize=True))
        mine, other = ours.state_dict(), theirs.state_dict()
        self.assertEqual(sorted(mine), sorted(other))
        for name in mine:
            self.assertTrue(torch.equal(mine[name].to(torch.bfloat16),
                                        other[name].to(torch.bfloat16)), name)
        self.assertTrue(torch.equal(logits(ours), logits(theirs)))
        s.note(f"MXFP4 to bf16: {sum(p.numel() for p in mine.values())} weights equal to those of "
               "transformers")

    def test_requantized_is_refused(self):
        """transformers skips a quant_method it does not know, with a warning; but of a layer's two
        stacks at least one has another shape turned, so it stops instead of misreading."""
        for form in ("nf4", "int8"):
            out = convert(mxfp4_source(), f"mxfp4-{form}", "--to", form, "--requantize")
            with self.assertRaisesRegex(Exception, "mismatch"):
                load("gpt_oss", out)


class Fp8(unittest.TestCase):
    def check(self, dtype, tile):
        """Every code of the format, scaled in blocks, through qconv and through torch."""
        source = s.SCRATCH / "forms" / f"fp8-{str(dtype)[6:]}"
        shutil.copytree(saved("llama"), source, dirs_exist_ok=True)
        tensors = tensors_of(source)
        generator = torch.Generator().manual_seed(6)
        codes = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = codes[torch.isfinite(codes.float())].view(torch.uint8)
        want = {}
        for name in [n for n in tensors if "_proj.weight" in n]:
            rows, columns = tensors[name].shape
            index = torch.randint(0, len(finite), (rows, columns), generator=generator)
            index.view(-1)[:len(finite)] = torch.arange(len(finite))
            weight = finite[index].view(dtype)
            scale = torch.rand(-(-rows // tile), -(-columns // tile), generator=generator) * 1e-4
            wide = scale.repeat_interleave(tile, 0)[:rows].repeat_interleave(tile, 1)[:, :columns]
            want[name] = weight.float() * wide
            tensors[name] = weight
            tensors[name + "_scale_inv"] = scale
        (source / "model.safetensors").unlink()
        save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic",
                                         "weight_block_size": [tile, tile]}
        (source / "config.json").write_text(json.dumps(config))
        out = convert(source, source.name + "-bf16", "--to", "bf16")
        have = tensors_of(out)
        for name, values in want.items():
            self.assertTrue(torch.equal(have[name], values.to(torch.bfloat16)), name)
        _, info = load("llama", out)
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"])
        # And 4-bit codes from FP8 are those from the same values in float32.
        plain = s.SCRATCH / "forms" / (source.name + "-f32")
        shutil.copytree(source, plain, dirs_exist_ok=True)
        (plain / "model.safetensors").unlink()
        save_file({n: want.get(n, t) for n, t in tensors.items() if "_scale_inv" not in n},
                  plain / "model.safetensors", metadata={"format": "pt"})
        a = tensors_of(convert(source, source.name + "-nf4", "--to", "nf4"))
        b = tensors_of(convert(plain, source.name + "-f32-nf4", "--to", "nf4"))
        self.assertEqual(sorted(a), sorted(b))
        for name in a:
            if "quant_state" not in name:
                self.assertTrue(torch.equal(a[name], b[name]), name)
        _, info = load("llama", s.SCRATCH / "forms" / (source.name + "-nf4"))
        self.assertFalse(info["missing_keys"] or info["unexpected_keys"])

    def test_e4m3(self):
        self.check(torch.float8_e4m3fn, 48)

    def test_e5m2(self):
        self.check(torch.float8_e5m2, 32)


@unittest.skipIf(MAJOR == 4, "transformers 4 has no fused experts")
class Fused(unittest.TestCase):
    def test_equal_to_the_released_form(self):
        for name in sorted(STACKED):
            fused = s.SCRATCH / "forms" / (name + "-fused")
            model_of(name).save_pretrained(fused, save_original_format=False)
            self.assertTrue([n for n in tensors_of(fused) if n.endswith("experts.gate_up_proj")])
            self.assertFalse([n for n in tensors_of(saved(name))
                              if n.endswith("experts.gate_up_proj")])
            for form in ("nf4", "int8"):
                a = tensors_of(convert(saved(name), f"{name}-{form}-a", "--to", form))
                b = tensors_of(convert(fused, f"{name}-{form}-b", "--to", form))
                self.assertEqual(sorted(a), sorted(b), name)
                self.assertTrue(all(torch.equal(a[n], b[n]) for n in a), (name, form))
            s.note(f"{name}: experts as transformers 5 fuses them give the released form's bytes")


class Partly(unittest.TestCase):
    def test_some_weights_decoded(self):
        """The skip list that grew: those modules are plain, the others quantized."""
        for form, kind in (("nf4", Linear4bit), ("int8", Linear8bitLt)):
            whole = convert(saved("llama"), f"llama-{form}-whole", "--to", form)
            out = convert(whole, f"llama-{form}-partly", "--to", "bf16", "--keep", "*layers.0*")
            model, info = load("llama", out, dtype=torch.bfloat16)
            for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                self.assertFalse(info[trouble], (form, trouble))
            have = {n for n, m in model.named_modules() if type(m) is kind}
            self.assertEqual(len(have), 7)
            self.assertTrue(all(".layers.0." in n for n in have))
            a = logits(model)
            b = logits(load("llama", whole, dtype=torch.bfloat16)[0])
            self.assertLess(float((a - b).norm() / b.norm()), 0.05)


class Gpt2(unittest.TestCase):
    """Conv1D weights: [in, out] in 16 bit, [out, in] in bitsandbytes' modules and files."""

    def test_round_trip(self):
        source = s.SCRATCH / "forms" / "gpt2"
        torch.manual_seed(2)
        config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=128,
                                         n_positions=64)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        model.save_pretrained(source)
        for form, kind in (("nf4", Linear4bit), ("int8", Linear8bitLt)):
            quantized = convert(source, "gpt2-" + form, "--to", form)
            back = convert(quantized, f"gpt2-{form}-back", "--to", "bf16")
            tensors, first = tensors_of(back), tensors_of(source)
            self.assertEqual({n: t.shape for n, t in tensors.items()},
                             {n: t.shape for n, t in first.items()})
            plain, info = load("gpt2", back, dtype=torch.bfloat16)
            for trouble in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                self.assertFalse(info[trouble], (form, trouble))
            error = float((logits(plain) - logits(model)).norm() / logits(model).norm())
            packed, _ = load("gpt2", quantized, dtype=torch.bfloat16)
            self.assertTrue(any(type(m) is kind for m in packed.modules()))
            apart = float((logits(plain) - logits(packed)).norm() / logits(packed).norm())
            s.note(f"gpt2 {form} back in bf16: {error:.3f} from the source, {apart:.3f} from "
                   "the quantized model")
            self.assertLess(error, 0.5 if form == "nf4" else 0.1)
            self.assertLess(apart, 0.05)


class Resharded(unittest.TestCase):
    def test_loads(self):
        for form in ("nf4", "int8"):
            one = convert(saved("llama"), f"llama-{form}-one", "--to", form)
            many = convert(one, f"llama-{form}-many", "--to", "keep", "--max-shard-size", "40KB")
            self.assertGreater(len(list(many.glob("*.safetensors"))), 2)
            a, _ = load("llama", one)
            b, info = load("llama", many)
            self.assertFalse(info["missing_keys"] or info["unexpected_keys"])
            self.assertTrue(torch.equal(logits(a), logits(b)))


class OwnForms(unittest.TestCase):
    """What only qconv reads stops every loader: no codes taken for weights."""

    def refused(self, name, folder, kind="qconv"):
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        self.assertEqual(config["quant_method"], kind)
        self.assertFalse([key for key in config if "load_in" in key or key.startswith("bnb_")])
        with self.assertRaises((ValueError, RuntimeError)) as caught:
            load(name, folder)
        s.note(f"{folder.name}: {str(caught.exception).splitlines()[0][:100]}")

    def test_block_wise_int8(self):
        for more in ((), ("--no-double-quant",)):
            self.refused("llama", convert(saved("llama"), "llama-own" + "".join(more), "--to", "int8",
                                          "--block-size", "64", *more))

    def test_requantized_experts(self):
        for form in (["--to", "nf4"], ["--to", "int8"], ["--to", "int8", "--block-size", "32"]):
            self.refused("gpt_oss", convert(mxfp4_source(), "mxfp4-own-" + "".join(form[1:]), *form,
                                            "--requantize"))

    def test_experts_left_in_mxfp4(self):
        """int8 for attention only, beside what no bitsandbytes model has."""
        for form in ("nf4", "int8"):
            self.refused("gpt_oss", convert(mxfp4_source(), "mxfp4-beside-" + form, "--to", form))

    def test_one_stack_requantized(self):
        """Nothing else has a shape that could stop a loader."""
        self.refused("gpt_oss", convert(mxfp4_source(), "mxfp4-own-one", "--to", "int8",
                                        "--requantize", "--keep", "*gate_up_proj*", "--keep",
                                        "*self_attn*", "--keep", "*layers.1.*"))


def setUpModule():
    s.note(f"transformers {transformers.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    s.main()

"""`--lora` against peft's own merge: the same bits as peft in double precision, rounded once; and as near to peft in
single precision as that is to the truth."""
import json
import shutil
import unittest

import interop_support as s
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

import qconv

transformers.utils.logging.set_verbosity_error()
SOME = ["q_proj", "v_proj", "down_proj"]
KINDS = {
    "lora": dict(r=8, lora_alpha=16, target_modules=SOME),
    "rslora": dict(r=7, lora_alpha=5, use_rslora=True, target_modules="all-linear"),
    "dora": dict(r=4, lora_alpha=9, use_dora=True, target_modules=SOME),
    "patterns": dict(r=4, lora_alpha=9, target_modules=SOME,
                     rank_pattern={r"layers\.\d+\.self_attn\.q_proj": 6, "down_proj": 2, "layers.1.self_attn.v_proj": 3},
                     alpha_pattern={"v_proj": 3, "^model.layers.0.mlp.down_proj": 50}),
    "whole": dict(r=4, lora_alpha=9, target_modules=SOME, modules_to_save=["lm_head", "norm"]),
    "embedding": dict(r=4, lora_alpha=9, target_modules=[*SOME, "embed_tokens"]),
    "dora-embedding": dict(r=4, lora_alpha=9, use_dora=True, target_modules=["embed_tokens", "q_proj"]),
}
# What touches embeddings and head of a model that ties them, and whether peft's merge leaves them tied.
TIED = {
    "tied-save": (False, dict(target_modules=SOME, modules_to_save=["embed_tokens"])),
    "tied-save-head": (False, dict(target_modules=SOME, modules_to_save=["lm_head"])),
    "tied-save-both": (False, dict(target_modules=SOME, modules_to_save=["embed_tokens", "lm_head"])),
    "tied-save-one": (True, dict(target_modules=SOME, modules_to_save=["embed_tokens"], ensure_weight_tying=True)),
    "tied-save-and-add": (False, dict(target_modules=[*SOME, "lm_head"], modules_to_save=["embed_tokens"])),
    "tied-add": (True, dict(target_modules=[*SOME, "embed_tokens"])),
    "tied-add-head": (True, dict(target_modules=[*SOME, "lm_head"])),
    "tied-add-both": (True, dict(target_modules=["embed_tokens", "lm_head"])),
    "tied-add-one": (True, dict(target_modules=["embed_tokens"], ensure_weight_tying=True)),
}
KINDS.update({name: dict(r=4, lora_alpha=9, **given) for name, (_, given) in TIED.items()})


def load(dtype, tied=False):
    if tied:
        torch.manual_seed(4)
        config = transformers.LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=256,
                                          num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config).to(dtype)
    return transformers.AutoModelForCausalLM.from_pretrained(s.model_path("kjv-llama"), dtype=dtype)


def adapter(name):
    """A folder that peft wrote, whose matrices are random instead of trained."""
    path = s.SCRATCH / f"lora-{name}"
    if path.exists():
        return path
    generator = torch.Generator().manual_seed(len(name))
    model = get_peft_model(load(torch.float32, name in TIED), LoraConfig(task_type="CAUSAL_LM", **KINDS[name]))
    for n, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "lora_B" in n or "lora_embedding_A" in n or "modules_to_save" in n:
            p.data.copy_(0.05 * noise)  # in place, because parameters may be tied
        elif "magnitude" in n:
            p.data = p.data * (1 + 0.1 * noise)
    model.save_pretrained(path)
    return path


def peft_merge(paths, dtype, base=None):
    model = PeftModel.from_pretrained(base or load(dtype), paths[0], adapter_name="0", autocast_adapter_dtype=False)
    names = [str(i) for i in range(len(paths))]
    for name, path in zip(names[1:], paths[1:]):
        model.load_adapter(path, name, autocast_adapter_dtype=False)
    if len(paths) > 1:
        model.base_model.set_adapter(names)
    model = model.to(dtype).merge_and_unload(adapter_names=names)
    return model if base else model.state_dict()


class Merge(unittest.TestCase):
    def setUp(self):
        self.plain = s.SCRATCH / "lora-f32"
        if not self.plain.exists():
            load(torch.float32).save_pretrained(self.plain)

    def convert(self, model, paths, *arguments):
        out = s.SCRATCH / "lora-out"
        shutil.rmtree(out, ignore_errors=True)
        s.qconv(*arguments, "--compress", "none", "--progress", "never", *sum((["--lora", p] for p in paths), []),
                model, out)
        return load_file(out / "model.safetensors")

    def check(self, *names):
        paths = [adapter(n) for n in names]
        exact, single = peft_merge(paths, torch.float64), peft_merge(paths, torch.float32)
        ours = self.convert(self.plain, paths, "--to", "keep")
        base, worst = load_file(self.plain / "model.safetensors"), 0.0
        changed = 0
        for name, got in ours.items():
            self.assertTrue(torch.equal(got, exact[name].float()), (names, name))
            changed += not torch.equal(got, base[name])
            # A sum in single precision is off by some units of its largest summand, by how many depends on
            # the processor that torch has.
            unit = 2.0 ** -24 * torch.maximum(base[name].abs().max(), got.abs().max()).double()
            worst = max(worst, ((got.double() - single[name].double()).abs().max() / unit).item())
        self.assertGreater(changed, 4)
        self.assertLess(worst, 8, names)
        s.note(f"{' + '.join(names)}: {changed} tensors changed, all as peft in double precision; from peft in single "
               f"precision by at most {worst:.1f} * 2^-24 of the largest weight")
        # To 16 bit: of the merged weight, not of one that was rounded before.
        for dtype, to in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
            for name, got in self.convert(s.model_path("kjv-llama"), paths, "--to", to).items():
                self.assertTrue(torch.equal(got, exact[name].float().to(dtype)), (names, name, to))

    def test_each_kind(self):
        for name in set(KINDS) - set(TIED):
            with self.subTest(name):
                self.check(name)

    def test_several(self):
        for names in (("lora", "patterns"), ("lora", "dora"), ("dora", "lora"), ("rslora", "lora", "embedding")):
            with self.subTest(names):
                self.check(*names)

    def test_tied(self):
        """Embeddings and head of a model that ties them: as peft's merge has both, and the flag."""
        plain = s.SCRATCH / "lora-tied"
        load(torch.float32, tied=True).save_pretrained(plain)
        for names in [[n] for n in TIED] + [["tied-add-head", "tied-save"]]:
            with self.subTest(names):
                paths = [adapter(n) for n in names]
                merged = peft_merge(paths, torch.float64, load(torch.float64, tied=True))
                want, ours = merged.state_dict(), self.convert(plain, paths, "--to", "keep")
                tied = TIED[names[-1]][0]
                self.assertEqual(merged.config.tie_word_embeddings, tied)
                self.assertEqual(json.loads((s.SCRATCH / "lora-out/config.json").read_text())["tie_word_embeddings"], tied)
                self.assertEqual(set(want) - set(ours), {"lm_head.weight"} if tied else set())
                for name, got in ours.items():
                    self.assertTrue(torch.equal(got, want[name].float()), name)
                given = dict(text=s.ROOT / "CONTRIBUTING.md", context=64, max_tokens=128)
                self.assertEqual(qconv.evaluate(plain, lora=paths, **given).perplexity,
                                 qconv.evaluate(s.SCRATCH / "lora-out", **given).perplexity)
                loaded = transformers.AutoModelForCausalLM.from_pretrained(s.SCRATCH / "lora-out").state_dict()
                self.assertTrue(torch.equal(loaded["lm_head.weight"], want["lm_head.weight"].float()))

    def test_vision_language(self):
        """One model as transformers and peft save it: the names of the two differ by transformers' own renaming."""
        small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
        text = dict(small, num_key_value_heads=2, vocab_size=160, head_dim=8)
        sight = dict(small, image_size=28, patch_size=14)
        for name, model in (
                ("gemma3", lambda: transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(
                    text_config=text, vision_config=sight, mm_tokens_per_image=4))),
                ("qwen2_5_vl", lambda: transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig(
                    **text, vision_config=dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=4,
                                               out_hidden_size=32))))):
            with self.subTest(name):
                torch.manual_seed(5)
                base = model()
                base.save_pretrained(plain := s.SCRATCH / f"lora-{name}")
                trained = get_peft_model(base, LoraConfig(r=4, lora_alpha=9, target_modules=[
                    "q_proj", "down_proj", "qkv", "fc1"], modules_to_save=["lm_head"]))  # which Gemma ties
                for n, p in trained.named_parameters():
                    if "lora_B" in n or "modules_to_save" in n:
                        p.data.copy_(0.05 * torch.randn(p.shape))
                trained.save_pretrained(path := s.SCRATCH / f"lora-of-{name}")
                want = trained.double().merge_and_unload()
                self.convert(plain, [path], "--to", "keep")
                loaded = type(want).from_pretrained(s.SCRATCH / "lora-out", dtype=torch.float32).state_dict()
                for n, value in want.state_dict().items():
                    self.assertTrue(torch.equal(loaded[n], value.float()), n)


if __name__ == "__main__":
    s.main()

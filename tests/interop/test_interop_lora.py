"""`--lora` against peft's own merge: the same bits as peft in double precision, rounded once; and as near to peft in
single precision as that is to the truth."""
import shutil
import unittest

import interop_support as s
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

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


def load(dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(s.model_path("kjv-llama"), dtype=dtype)


def adapter(name):
    """A folder that peft wrote, whose matrices are random instead of trained."""
    path = s.SCRATCH / f"lora-{name}"
    if path.exists():
        return path
    generator = torch.Generator().manual_seed(len(name))
    model = get_peft_model(load(torch.float32), LoraConfig(task_type="CAUSAL_LM", **KINDS[name]))
    for n, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if "lora_B" in n or "lora_embedding_A" in n or "modules_to_save" in n:
            p.data = 0.05 * noise
        elif "magnitude" in n:
            p.data = p.data * (1 + 0.1 * noise)
    model.save_pretrained(path)
    return path


def peft_merge(paths, dtype):
    model = PeftModel.from_pretrained(load(dtype), paths[0], adapter_name="0", autocast_adapter_dtype=False)
    names = [str(i) for i in range(len(paths))]
    for name, path in zip(names[1:], paths[1:]):
        model.load_adapter(path, name, autocast_adapter_dtype=False)
    if len(paths) > 1:
        model.base_model.set_adapter(names)
    return model.to(dtype).merge_and_unload(adapter_names=names).state_dict()


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
        for name in KINDS:
            with self.subTest(name):
                self.check(name)

    def test_several(self):
        for names in (("lora", "patterns"), ("lora", "dora"), ("dora", "lora"), ("rslora", "lora", "embedding")):
            with self.subTest(names):
                self.check(*names)


if __name__ == "__main__":
    s.main()

"""What --to auto makes, in transformers + bitsandbytes: block sizes side by side and weights left in
16 bit load."""
import json
import unittest

import interop_support as s
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import AutoModelForCausalLM

s.quiet()

ROOM = ["--margin", "1", "--cuda-context", "1KB", "--context", "16"]


def auto(schemes, vram):
    out = s.SCRATCH / "auto" / f"{schemes}-{vram}".replace(",", "+")
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        s.qconv("--to", "auto", "--schemes", schemes, "--vram", vram, *ROOM, "-q",
                s.model_path("kjv-llama"), out, "--compress", "none")
    return out


@torch.no_grad()
def log_probs(model):
    ids = torch.arange(2 * 64).reshape(2, 64) % 90 + 32
    return model(input_ids=ids)[0].float().log_softmax(-1)


class Auto(unittest.TestCase):
    def check(self, folder, kind, kept):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            self.assertFalse(info[key], key)
        stored = s.read_folder(folder)
        quantized = {n.removesuffix(".weight") for n, t in stored.items()
                     if n.endswith("_proj.weight") and t[0] in ("U8", "I8")}
        found = {n for n, m in model.named_modules() if type(m) is kind}
        self.assertEqual(found, quantized)
        self.assertTrue(quantized)
        self.assertEqual(len(quantized) < 28, kept)
        # The same weights, turned back by qconv.
        plain = folder.parent / (folder.name + "-back")
        if not plain.exists():
            s.qconv("--to", "bf16", "--compress", "none", "-q", folder, plain)
        back = log_probs(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval())
        got = log_probs(model.eval())
        divergence = float((back.exp() * (back - got)).sum(-1).mean())
        s.note(f"{folder.name}: {len(quantized)} modules quantized, KL from the weights turned back "
               f"{divergence:.1e}")
        self.assertLess(divergence, 5e-3)
        return stored

    def test_blocks_side_by_side(self):
        stored = self.check(auto("nf4,nf4-32", "1226KB"), Linear4bit, False)
        sizes = {json.loads(t[2])["blocksize"] for n, t in stored.items() if "quant_state" in n}
        self.assertEqual(sizes, {32, 64})

    def test_four_bit_and_sixteen(self):
        self.check(auto("nf4,nf4-32,16bit", "2MB"), Linear4bit, True)

    def test_int8_and_sixteen(self):
        self.check(auto("int8,16bit", "2300KB"), Linear8bitLt, True)


if __name__ == "__main__":
    s.main()

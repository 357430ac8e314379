"""Searched scales (--scale search, refit) are nothing to a loader: from_pretrained takes the output as
it is, bitsandbytes restores the values that qconv restores, and their error is the manifest's. Without
its fused kernel for the CPU, as in test_interop_checkpoints.py."""
import json
import logging
import unittest

import interop_support as s
import numpy as np
import torch
import transformers
from bitsandbytes import functional as F
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from test_interop_checkpoints import source_of
from transformers import AutoModel, AutoModelForCausalLM

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

FORMS = {
    "nf4-double": ["--to", "nf4"],
    "nf4-32": ["--to", "nf4", "--block-size", "32"],
    "nf4": ["--to", "nf4", "--no-double-quant"],
    "int8": ["--to", "int8"],
}


def converted(name, form, method, *more):
    out = s.SCRATCH / "scale" / "-".join([name, form, method, *more]).replace("/", "_")
    s.qconv(*FORMS[form], "--scale", method, "--compress", "none", "-q", *more,
            source_of(name), out)
    return out


def restored(module, dtype):
    """The weight of a loaded layer as bitsandbytes restores it."""
    if isinstance(module, Linear8bitLt):
        scb = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        return torch.ops.bitsandbytes.int8_vectorwise_dequant.default(
            module.weight.data, scb).to(dtype)
    state = module.weight.quant_state
    state.dtype = dtype
    return F.dequantize_4bit(module.weight.data, state)


class Scale(unittest.TestCase):
    name = form = None

    def errors(self, folder):
        rows = json.loads((folder / "qconv.json").read_text())["tensors"]
        return {t["name"]: t["rel_mse"] for t in rows if "rel_mse" in t}

    def test_loads_and_restores(self):
        source = s.read_folder(source_of(self.name))
        plain = self.errors(converted(self.name, self.form, "absmax"))
        for method in ("search", "refit"):
            out = converted(self.name, self.form, method)
            mine = {}
            for to in ("bf16", "fp16"):
                back = out.with_name(f"{out.name}-{to}")
                s.qconv("--to", to, "--compress", "none", "-q", out, back)
                mine[to] = s.read_folder(back)
            kind = AutoModel if self.name == "minilm" else AutoModelForCausalLM
            model, info = kind.from_pretrained(out, output_loading_info=True)
            model.eval()
            for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
                self.assertFalse(info[key], key)
            stated, gain = self.errors(out), []
            layers = {n: m for n, m in model.named_modules()
                      if type(m) in (Linear4bit, Linear8bitLt)}
            weights = {next(w for w in stated if w.endswith(n + ".weight")): m
                       for n, m in layers.items()}
            self.assertEqual(set(weights), set(stated))
            for weight, module in weights.items():
                for to, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
                    tensor = restored(module, dtype)
                    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    want = mine[to][weight]
                    self.assertEqual(s.difference((want[0], list(tensor.shape), raw), want), "",
                                     f"{weight} as {to}")
                x = s.as_float32(source[weight][0], source[weight][2]).astype(np.float64)
                y = restored(module, torch.float32).numpy().ravel().astype(np.float64)
                error = float(((x - y) ** 2).sum() / (x**2).sum())
                self.assertLessEqual(abs(error - stated[weight]), 1e-5 * error, weight)
                self.assertLess(error, plain[weight], weight)
                gain.append(error / plain[weight])
            with torch.no_grad():
                ids = torch.arange(3, 51).reshape(2, 24)
                self.assertTrue(torch.isfinite(model(input_ids=ids)[0].float()).all())
            s.note(f"{self.name} {self.form} {method}: {len(weights)} weights restored bit for bit "
                   f"as qconv does, error {np.mean(gain):.4f} of absmax's")


def make_cases():
    for name in s.MODELS:
        for form in FORMS:
            title = f"{name}-{form}".title().replace("-", "")
            globals()[title] = type(title, (Scale,), {"name": name, "form": form,
                                                      "__module__": __name__})


make_cases()
del Scale  # which is no case by itself


if __name__ == "__main__":
    s.main()

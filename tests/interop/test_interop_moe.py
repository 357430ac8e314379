"""Mixtures of experts in NF4 and int8, in transformers 4 and 5.

For tiny random models of many types: from_pretrained takes what qconv wrote, after `import qconv`, without a missing,
unexpected or mismatched key, holds the experts as codes, and gives the outputs of the same model with the weights that
bitsandbytes restores from the same files, in float32. What does not load is refused, with the reason that is listed here.

usage: test_interop_moe.py --all [NAME...]   a line per type, with the distance of its outputs
"""
import functools
import json
import os
import shutil
import sys
import unittest

import interop_support as s
import torch
import transformers
from bitsandbytes.functional import QuantState, dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file, save_file

import test_interop_zoo as zoo

os.environ.setdefault("QCONV_LIBRARY", str(s.BUILD / "libqconv.so"))
sys.path.insert(0, str(s.ROOT / "python"))
import qconv  # noqa: E402
from qconv.torch import Stack  # noqa: E402

TYPES = {name: {} for name in """mixtral qwen2_moe qwen3_moe qwen3_next qwen3_5_moe_text phimoe olmoe flex_olmo
    deepseek_v2 deepseek_v3 glm4_moe jamba ernie4_5_moe minimax lfm2_moe dots1 hunyuan_v1_moe granitemoe
    granitemoeshared granitemoehybrid jetmoe gpt_oss llama4_text longcat_flash nemotron_h dbrx qwen3_vl_moe_text
    glm4_moe_lite exaone_moe minimax_m2 afmoe solar_open cohere2_moe bailing_moe ernie4_5_vl_moe aria_text
    deepseek_v32 glm_moe_dsa glm4v_moe_text mellum nllb-moe switch_transformers doge blt""".split()}


def apart(mine, other):
    return ((mine.double() - other.double()).norm() / other.double().norm()).item()


def restored(out):
    """A copy of a plain output with every weight as bitsandbytes restores it, in float32."""
    folder = out.with_name(out.name + "-restored")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = json.loads((out / "config.json").read_text())
    config.pop("quantization_config", None)
    for part in (config, config.get("text_config", {})):
        part.update({key: "float32" for key in ("dtype", "torch_dtype") if key in part})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for path in out.glob("*.safetensors"):
        tensors |= load_file(path)
    plain = dict(tensors)
    for name in tensors:
        weight, is_4bit, _ = name.partition(".quant_state.")
        if is_4bit:
            beside = {key: tensors[key] for key in tensors if key.startswith(weight + ".")}
            state = QuantState.from_dict(dict(beside), device="cpu")
            state.dtype = torch.float32
            plain[weight] = dequantize_4bit(tensors[weight], state)
            for key in beside:
                del plain[key]
        elif name.endswith(".SCB"):
            stem = name.removesuffix(".SCB")
            weight = stem + ".weight" if stem + ".weight" in tensors else stem
            plain[weight] = tensors[weight].float() * tensors[name][..., None] * (1 / 127)
            del plain[name]
            plain.pop(stem + ".weight_format", None)
    save_file({name: t.float() if t.is_floating_point() else t for name, t in plain.items()},
              folder / "model.safetensors", {"format": "pt"})
    return folder


def codes_in(model):
    """How many expert matrices, or stacks of them, are codes."""
    return sum(isinstance(m, Stack) or ("expert" in name and isinstance(m, (Linear4bit, Linear8bitLt)))
               for name, m in model.named_modules())


def tried(name, form, *arguments):
    """(distance of the outputs, modules of experts that are codes, what from_pretrained reports, what qconv said)"""
    zoo.TYPES.setdefault(name, TYPES[name])
    model = zoo.model_of(name)
    source = zoo.saved(model, name)
    out, said = zoo.converted(source, form, *arguments)
    mine, trouble = zoo.load(type(model), out, dtype=torch.float32)
    if trouble:
        return 9, codes_in(mine), trouble, said
    theirs, trouble = zoo.load(type(model), restored(out), dtype=torch.float32)
    return apart(zoo.outputs(mine, name), zoo.outputs(theirs, name)), codes_in(mine), trouble, said


if __name__ == "__main__":
    if sys.argv[1:2] == ["--all"]:
        for name in sys.argv[2:] or TYPES:
            for form in ("nf4", "int8"):
                try:
                    print(name, form, *tried(name, form), flush=True)
                except Exception as e:
                    print(name, form, type(e).__name__, str(e).splitlines()[:2], flush=True)
        sys.exit()

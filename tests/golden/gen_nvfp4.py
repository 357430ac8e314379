#!/usr/bin/env python3
"""Golden weights in NVFP4, as compressed-tensors 0.20.1 and nvidia-modelopt 0.47.0 write them and turn them back.

    pip install torch safetensors compressed-tensors==0.20.1 nvidia-modelopt==0.47.0
    python gen_nvfp4.py

Writes nvfp4/compressed-tensors.safetensors, nvfp4/modelopt.safetensors and nvfp4/stacks.safetensors (experts in one
tensor, as ModelOpt has Llama 4's), and beside each NAME.values.safetensors with what the library itself makes of its
weights in float32. Some weights are random bytes, so that every code meets every kind of scale.
"""
import pathlib

import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4A16, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from modelopt.torch.export.quant_utils import maybe_transpose_expert_weight_dimensions, to_quantized_weight
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent / "nvfp4"
SCHEME = QuantizationScheme(targets=["Linear"], **NVFP4A16)
ATTENTION = {"q_proj": [32, 64], "k_proj": [16, 64], "v_proj": [16, 64], "o_proj": [64, 32]}


def random_bytes(shape, below=256):
    return torch.randint(0, below, shape, dtype=torch.uint8)


def shapes(experts):
    names = {"model.layers.0.self_attn." + n: s for n, s in ATTENTION.items()}
    for e in range(experts):
        for n, s in (("gate_proj", [32, 64]), ("up_proj", [32, 64]), ("down_proj", [64, 32])):
            names["model.layers.0.mlp.experts.%d.%s" % (e, n)] = s
    return names


def rest():
    return {"model.embed_tokens.weight": torch.randn(8, 64).bfloat16(), "lm_head.weight": torch.randn(8, 64).bfloat16(),
            "model.norm.weight": torch.ones(64).bfloat16()}


def compressed(weight):
    """The tensors of a weight, and its values; random bytes for None."""
    args = SCHEME.weights
    if isinstance(weight, list):
        rows, cols = weight
        made = {"weight_packed": random_bytes([rows, cols // 2]),
                "weight_scale": random_bytes([rows, cols // 16], 0x7f).view(torch.float8_e4m3fn),
                "weight_global_scale": torch.tensor([3217.25])}
    else:
        blocks = weight.float().reshape(weight.shape[0], -1, 16)
        total = generate_gparam(weight.min(), weight.max()).reshape(1)
        scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=total)
        made = NVFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale, "weight_global_scale": total}, SCHEME)
    rows, half = made["weight_packed"].shape
    values = dequantize(unpack_fp4_from_uint8(made["weight_packed"], rows, 2 * half, torch.float32),
                        made["weight_scale"].float(), args=args, global_scale=made["weight_global_scale"],
                        dtype=torch.float32)
    whole = NVFP4PackedCompressor.decompress(dict(made), SCHEME)["weight"]
    assert whole.dtype == torch.bfloat16 and torch.equal(values.bfloat16().view(torch.int16), whole.view(torch.int16))
    return made, values


def modelopt(weight):
    if isinstance(weight, list):
        rows, cols = weight
        codes = random_bytes([rows, cols // 2])
        scale = random_bytes([rows, cols // 16], 0x7f).view(torch.float8_e4m3fn)
        made = {"weight": codes, "weight_scale": scale, "weight_scale_2": torch.tensor(0.00031082)}
    else:
        total = NVFP4QTensor.get_weights_scaling_factor_2(weight)
        scale = NVFP4QTensor.get_weights_scaling_factor(weight, 16, total)[0]
        made = {"weight": to_quantized_weight(weight, scale, "nvfp4", total, 16), "weight_scale": scale,
                "weight_scale_2": total}
    shape = torch.Size([*made["weight"].shape[:-1], 2 * made["weight"].shape[-1]])
    values = NVFP4QTensor(shape, torch.float32, made["weight"]).dequantize(
        torch.float32, scale=made["weight_scale"], double_scale=made["weight_scale_2"].reshape([-1] + [1] * (len(shape) - 1)),
        block_sizes={-1: 16})
    return made, values


def write(name, tensors, values):
    save_file({n: t.contiguous() for n, t in tensors.items()}, HERE / (name + ".safetensors"), metadata={"format": "pt"})
    save_file({n: t.contiguous() for n, t in values.items()}, HERE / (name + ".values.safetensors"))


def separate(name, make, input_scale):
    tensors, values = rest(), {}
    for module, shape in shapes(2).items():
        odd = module.endswith(("o_proj", "1.up_proj"))
        made, value = make(shape if odd else torch.randn(shape).bfloat16() * 0.05)
        tensors.update({module + "." + n: t for n, t in made.items()})
        tensors[module + "." + input_scale] = torch.tensor(0.75)
        values[module + ".weight"] = value
    write(name, tensors, values)


def stacks():
    """ModelOpt's quantizer of the experts of Llama 4 has [experts, in, out], quantizes along `in` and turns it back."""
    tensors, values = rest(), {}
    for n, shape in (("gate_up_proj", [2, 64, 24]), ("down_proj", [2, 48, 16])):
        weight, _ = maybe_transpose_expert_weight_dimensions(torch.randn(shape).bfloat16() * 0.05,
                                                             is_bmm_expert_weight=True)
        weight = weight.contiguous()
        total = weight.abs().amax((1, 2)).float() / (6 * 448) if n == "down_proj" else \
            NVFP4QTensor.get_weights_scaling_factor_2(weight)
        each = total.reshape(-1, 1, 1) if total.ndim else total
        scale = NVFP4QTensor.get_weights_scaling_factor(weight, 16, each)[0]
        codes = to_quantized_weight(weight, scale, "nvfp4", total, 16)
        value = NVFP4QTensor(weight.shape, torch.float32, codes).dequantize(
            torch.float32, scale=scale, double_scale=each, block_sizes={-1: 16})
        codes, scale = maybe_transpose_expert_weight_dimensions(codes, scale, is_bmm_expert_weight=True)
        name = "model.layers.0.feed_forward.experts." + n
        tensors.update({name: codes, name + "_weight_scale": scale, name + "_weight_scale_2": total,
                        name + "_input_scale": torch.tensor(0.5)})
        values[name] = value.transpose(-1, -2)
    made, value = modelopt(torch.randn(2, 8, 48).bfloat16() * 0.05)
    tensors.update({"model.layers.1.moe.gate_proj." + n: t for n, t in made.items()})
    values["model.layers.1.moe.gate_proj.weight"] = value
    write("stacks", tensors, values)


torch.manual_seed(37)
HERE.mkdir(exist_ok=True)
separate("compressed-tensors", compressed, "input_global_scale")
separate("modelopt", modelopt, "input_scale")
stacks()

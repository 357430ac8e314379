#!/usr/bin/env python3
"""Golden weights in integers of 2 to 8 bits, as a version of compressed-tensors packs them and turns them back.

    pip install torch safetensors compressed-tensors==0.20.1    (and once more with 0.17.0)
    python gen_widths.py

Writes widths/VERSION.safetensors, and beside it VERSION.values.safetensors with what the library itself makes of its
weights, in bfloat16, and VERSION.json with their quantization_config. There is each width in groups and by rows, with
zero points and without, in rows that do not fill their words, and with zero points whose columns do not either.
"""
import importlib.metadata
import json
import pathlib

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

HERE = pathlib.Path(__file__).parent / "widths"
VERSION = importlib.metadata.version("compressed-tensors")
CASES = [(bits, strategy, symmetric) for bits in range(2, 9) for strategy in ("group", "channel") for symmetric in (True, False)]


def main():
    torch.manual_seed(0)
    tensors, values, groups = {}, {}, {}
    for n, (bits, strategy, symmetric) in enumerate(CASES):
        module = "model.layers.%d.self_attn.q_proj" % n
        grouped = strategy == "group"
        args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy,
                                group_size=32 if grouped else None)
        scheme = QuantizationScheme(targets=[module], weights=args, format="pack-quantized")
        weight = torch.randn(11, 96 if grouped else 77)
        blocks = weight.reshape(11, -1, 32) if grouped else weight[:, None]
        scale, zero = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        scale = scale.bfloat16().float()
        made = PackedQuantizationCompressor.compress(
            {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}, scheme)
        values[module + ".weight"] = PackedQuantizationCompressor.decompress(dict(made), scheme)["weight"].bfloat16()
        made["weight_scale"] = made["weight_scale"].bfloat16()
        tensors.update({module + "." + name: t.contiguous() for name, t in made.items()})
        groups["group_%d" % n] = {"targets": [module], "format": "pack-quantized", "input_activations": None,
                                  "weights": {k: getattr(args, k) for k in
                                              ("num_bits", "symmetric", "group_size")} | {"type": "int", "strategy": strategy}}
    save_file(tensors, HERE / (VERSION + ".safetensors"))
    save_file(values, HERE / (VERSION + ".values.safetensors"))
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
              "ignore": ["lm_head"], "version": VERSION, "config_groups": groups}
    (HERE / (VERSION + ".json")).write_text(json.dumps(config) + "\n")


if __name__ == "__main__":
    main()

"""Integers with scales: files that compressed-tensors' own compressors make, decoded by qconv and
by compressed-tensors, bit for bit.

Scales are in the dtype of the output, so that both round once: compressed-tensors multiplies in the
dtype of the scales.
"""
import itertools
import json
import shutil
import unittest

import interop_support as s
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

s.quiet()

MODULE = "model.layers.0.mlp.up_proj."
TARGETS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def groups_of(weight, args):
    """[out, groups, columns of a group], as the strategy has it."""
    if args.strategy == "tensor":
        return weight.reshape(1, 1, -1)
    size = args.group_size if args.strategy == "group" else weight.shape[1]
    return weight.unflatten(1, (-1, size))


def compressed(weight, args, fmt, generator):
    """What the compressor stores of a weight, and what it gives back."""
    state = {}
    ordered = weight
    if args.actorder == "group":
        index = torch.arange(weight.shape[1], dtype=torch.int32) // args.group_size
        index = index[torch.randperm(weight.shape[1], generator=generator)]
        state["weight_g_idx"] = index
        ordered = weight[:, torch.argsort(index, stable=True)]
    grouped = groups_of(ordered, args)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state |= {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(fmt)
    stored = compressor.compress(state, scheme)
    return stored, compressor.decompress(stored, scheme)["weight"]


def config_of(args, fmt):
    scheme = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    return {"quant_method": "compressed-tensors", "format": fmt, "ignore": ["lm_head"],
            "quantization_status": "compressed", "config_groups": {"group_0": scheme}}


def decoded(stored, config, dtype):
    """qconv's own decoding of one weight."""
    source, out = s.SCRATCH / "packed", s.SCRATCH / "packed-out"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    save_file({MODULE + n: t.contiguous() for n, t in stored.items()},
              source / "model.safetensors", metadata={"format": "pt"})
    (source / "config.json").write_text(json.dumps(
        {"model_type": "llama", "torch_dtype": str(dtype)[6:], "quantization_config": config}))
    s.qconv("-q", "--compress", "none", "--to", TARGETS[dtype], source, out)
    s.qconv("verify", "-q", out, "--against", source)
    tensors = load_file(out / "model.safetensors")
    assert list(tensors) == [MODULE + "weight"], list(tensors)
    return tensors[MODULE + "weight"]


class Compressors(unittest.TestCase):
    def check(self, fmt, bits):
        generator = torch.Generator().manual_seed(bits)
        forms = [("tensor", None), ("channel", None), ("group", 16), ("group", 48)]
        count = 0
        for (strategy, group), symmetric, shuffled, dtype in itertools.product(
                forms, (True, False), (None, "group"), TARGETS):
            if shuffled and strategy != "group":
                continue
            args = QuantizationArgs(num_bits=bits, strategy=strategy, group_size=group,
                                    symmetric=symmetric, actorder=shuffled)
            weight = torch.randn(75, 144, generator=generator).to(dtype) * 0.02
            stored, want = compressed(weight, args, fmt, generator)
            with self.subTest(strategy=strategy, group=group, symmetric=symmetric,
                              shuffled=shuffled, dtype=dtype):
                have = decoded(stored, config_of(args, fmt), dtype)
                self.assertEqual(want.dtype, dtype)
                self.assertTrue(torch.equal(have, want))
                count += 1
        s.note(f"{fmt}, {bits} bit: {count} forms are equal")

    def test_each(self):
        for fmt, bits in (("int-quantized", 8), ("naive-quantized", 8), ("int-quantized", 4), ("pack-quantized", 4),
                          ("pack-quantized", 8)):
            self.check(fmt, bits)

    def test_columns_that_do_not_fill_their_words(self):
        generator = torch.Generator().manual_seed(3)
        for bits, columns, symmetric in itertools.product((4, 8), (3, 33, 141), (True, False)):
            args = QuantizationArgs(num_bits=bits, strategy="channel", symmetric=symmetric)
            weight = torch.randn(37, columns, generator=generator).to(torch.bfloat16)
            stored, want = compressed(weight, args, "pack-quantized", generator)
            have = decoded(stored, config_of(args, "pack-quantized"), torch.bfloat16)
            self.assertTrue(torch.equal(have, want), (bits, columns, symmetric))


if __name__ == "__main__":
    s.main()

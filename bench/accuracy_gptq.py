"""What GPTQ as llm-compressor has it makes of a Llama's weights. For accuracy_calibrated.py.

    accuracy_gptq.py IN OUT    needs numpy, torch, llmcompressor

IN: a folder with weights.npz (all tensors), config.json and ids.npz (windows of tokens). 4 bits,
symmetric, its default order of columns and damping; inputs behind the layers quantized before, as
its sequential pipeline has them. A group is the largest divisor of the columns that is no larger
than 64 or 128. OUT/squares.npz gets mean squares of every weight's inputs in the original model.
"""
import json
import os
import sys

import llmcompressor
import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

import llama_numpy as lm


def quantize(w, h, group):
    size = next(g for g in range(group, 0, -1) if w.shape[1] % g == 0)
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group",
                            group_size=size, actorder="weight")
    t = torch.from_numpy(w.copy())
    blocks = t.reshape(w.shape[0], -1, size)
    scale, zero = calculate_qparams(blocks.amin(2), blocks.amax(2), args)
    scale = scale.to(torch.bfloat16).float()  # as a checkpoint stores them
    q = quantize_weight(t[None], torch.from_numpy(h)[None].float(), scale[None], zero[None], None,
                        args)[0][0]
    return q.numpy(), w.size * 4 + scale.numel() * 16


def main():
    source, out = sys.argv[1:]
    torch.set_grad_enabled(False)
    with open(os.path.join(source, "config.json")) as f:
        config = json.load(f)
    original = dict(np.load(os.path.join(source, "weights.npz")))
    ids = np.load(os.path.join(source, "ids.npz"))["ids"]
    squares, rows = {}, []

    def measure(names, x):
        for n in names:
            squares[n] = (x.reshape(-1, x.shape[-1]).astype(np.float64) ** 2).mean(0)

    lm.forward(config, original, ids, measure)
    np.savez(os.path.join(out, "squares.npz"), **squares)
    for group in (128, 64):
        w, made, bits = dict(original), {}, [0]

        def replace(names, x):
            x = x.reshape(-1, x.shape[-1])
            h = 2 * sum((p.T @ p).astype(np.float64) for p in np.array_split(x, 1 + len(x) // 256))
            h = h / len(x)
            for n in names:
                w[n], taken = quantize(original[n], h, group)
                made[n] = w[n]
                bits[0] += taken

        lm.forward(config, w, ids, replace)
        file = "gptq-%d.npz" % group
        np.savez(os.path.join(out, file), **made)
        rows.append({"name": "GPTQ, 4 bit, group %d" % group, "program": "llm-compressor",
                     "file": file, "bits": bits[0] / sum(m.size for m in made.values()),
                     "types": None})
    with open(os.path.join(out, "peers.json"), "w") as f:
        json.dump({"versions": {"llm-compressor": llmcompressor.__version__}, "rows": rows}, f)


main()

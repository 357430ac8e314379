#!/usr/bin/env python3
"""The squared error of every width of integers on normally distributed weights, in bench/results/width_errors.json.

    python3 bench/width_errors.py --qconv build/qconv --json bench/results/width_errors.json

It needs numpy. The weights are bfloat16, 1024 rows of 4096; errors are those that the manifest says, bits those of codes
and scales.
"""
import argparse
import json
import os
import shutil
import struct
import subprocess
import tempfile

import numpy as np

NAME, SHAPE = "model.layers.0.self_attn.q_proj.weight", (1024, 4096)


def source(folder):
    x = (np.random.default_rng(7).standard_normal(SHAPE) * 0.02).astype(np.float32).view(np.uint32)
    data = ((x + 0x7fff + (x >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    header = json.dumps({NAME: {"dtype": "BF16", "shape": SHAPE, "data_offsets": [0, len(data)]}}).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(header)) + header + data)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump({"model_type": "llama", "torch_dtype": "bfloat16"}, f)


def measured(qconv, work, form, scale):
    model, out = os.path.join(work, "model"), os.path.join(work, "out")
    shutil.rmtree(out, ignore_errors=True)
    subprocess.run([qconv, *form, "--scale", scale, "-q", model, out], check=True)
    with open(os.path.join(out, "qconv.json"), encoding="utf-8") as f:
        tensors = json.load(f)["tensors"]
    size = sum(t["end"] - t["begin"] for t in tensors if not t["name"].endswith("_shape"))
    return size * 8 / (SHAPE[0] * SHAPE[1]), next(t["rel_mse"] for t in tensors if "rel_mse" in t)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--qconv", default="build/qconv")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    forms = [("nf4", None, ["--to", "nf4"])]
    for bits in range(2, 9):
        for group in ("128", "64", "32", "channel"):
            more = ["--activation-bits", "16"] if bits == 8 else []
            forms.append(("int%d" % bits, group, ["--to", "int%d" % bits, "--format", "compressed-tensors",
                                                  "--block-size", group, *more]))
    rows = []
    with tempfile.TemporaryDirectory() as work:
        os.mkdir(os.path.join(work, "model"))
        source(os.path.join(work, "model"))
        for scheme, group, form in forms:
            for scale in ("search", "absmax"):
                bits, error = measured(args.qconv, work, form, scale)
                rows.append({"scheme": scheme, "group": group, "scale": scale, "bits": round(bits, 3), "rel_mse": error})
    with open(args.json, "w", encoding="utf-8") as f:
        f.write("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


if __name__ == "__main__":
    main()

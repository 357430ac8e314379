"""Perplexity and KL divergence by transformers, for bench_accuracy.py --check.

    accuracy_check.py MODEL FILE.npz    prints one line of JSON

MODEL: the folder with config.json. FILE: windows of tokens, weights a.NAME (the original) and
b.NAME. float32 on the CPU; log probabilities in double.
"""
import json
import os
import sys

import numpy as np
import torch
import transformers


def build(config, stored, prefix):
    model = transformers.LlamaForCausalLM(config).float().eval()
    state = {k[2:]: torch.from_numpy(stored[k]) for k in stored.files if k.startswith(prefix)}
    state.setdefault("model.embed_tokens.weight", state["lm_head.weight"])
    missing, unexpected = model.load_state_dict(state, strict=False)
    left = [k for k in missing if "rotary" not in k]
    if left or unexpected:
        raise SystemExit("accuracy_check: missing %s, unexpected %s" % (left, unexpected))
    return model


def main():
    folder, path = sys.argv[1:]
    stored = np.load(path)
    with open(os.path.join(folder, "config.json")) as f:
        config = transformers.LlamaConfig(**json.load(f))
    config.tie_word_embeddings = False  # both are given
    a, b = build(config, stored, "a."), build(config, stored, "b.")
    right, base, kl, same = [], [], [], []
    for batch in torch.from_numpy(stored["windows"]).split(16):
        with torch.no_grad():
            p, q = (m(batch).logits[:, :-1].double().log_softmax(-1) for m in (a, b))
        index = batch[:, 1:, None]
        right.append(-q.gather(-1, index).flatten())
        base.append(-p.gather(-1, index).flatten())
        kl.append((p.exp() * (p - q)).sum(-1).flatten())
        same.append((p.argmax(-1) == q.argmax(-1)).flatten().double())
    right, base, kl, same = (torch.cat(x) for x in (right, base, kl, same))
    print(json.dumps({"transformers": transformers.__version__,
                      "perplexity": float(right.mean().exp()),
                      "base_perplexity": float(base.mean().exp()), "kl_mean": float(kl.mean()),
                      "kl_99": float(kl.quantile(0.99)), "top1": float(same.mean())}))


main()

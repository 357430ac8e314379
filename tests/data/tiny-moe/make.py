"""Makes the tiny mixture of experts beside this file, and what transformers computes with it.

usage: make.py FOLDER

The model is a random qwen2_moe of three layers, the second of which is dense, with five experts, two
for each token, and a shared expert. expected.json has three sequences of ids and, for the last token
of each, the logits in float32; and the mean negative log-likelihood of all tokens but the first ones.
Made with transformers 5.23 and torch on a CPU.
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2MoeConfig

torch.manual_seed(11)
config = Qwen2MoeConfig(
    vocab_size=64, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=64, num_experts=5, num_experts_per_tok=2,
    moe_intermediate_size=8, shared_expert_intermediate_size=12, norm_topk_prob=True,
    mlp_only_layers=[1], initializer_range=0.4)
model = AutoModelForCausalLM.from_config(config)
with torch.no_grad():
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            p += 0.2 * torch.randn_like(p)
        elif not p.any():
            p += 0.4 * torch.randn_like(p)
for p in model.parameters():
    p.data = p.data.bfloat16()
folder = Path(sys.argv[1])
model.save_pretrained(folder)
(folder / "generation_config.json").unlink(missing_ok=True)

model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
rng = np.random.default_rng(3)
ids = [[int(i) for i in rng.integers(0, 64, n)] for n in (30, 9, 17)]
logits, nll = [], []
with torch.no_grad():
    for row in ids:
        out = model(input_ids=torch.tensor([row])).logits[0]
        logits.append([float(f"{x:.7g}") for x in out[-1]])
        nll += (-out.double().log_softmax(-1)[range(len(row) - 1), row[1:]]).tolist()
rows = ",\n  ".join(json.dumps(r) for r in logits)
(folder / "expected.json").write_text(
    f'{{"ids": {json.dumps(ids)},\n "logits": [\n  {rows}],\n "nll": {np.mean(nll):.9f}}}\n')

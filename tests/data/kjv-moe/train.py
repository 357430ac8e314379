"""Trains the small byte-level mixture of experts beside this file.

usage: train.py kjv.txt FOLDER [--steps N]

The text, its split and the meaning of a token are those of ../kjv-llama (train.py there says how to get
kjv.txt); the held-out text is ../kjv-llama/heldout.txt. The model is a qwen3_moe of four layers with eight
experts, of which a token gets two. AdamW (betas 0.9 and 0.95, weight decay 0.1) on windows of 256 bytes, 16 a
step, float32: learning rate 3e-3 after 50 steps of warmup, then a cosine to zero. The loss has 0.01 of the
router's balance in it. The weights are rounded to bfloat16 at the end. metrics.json has what came out.
"""
import argparse
import hashlib
import json
import math
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

TRAIN_BYTES, CONTEXT, WINDOWS = 3930962, 256, 16
HERE = Path(__file__).resolve().parent


def batch(text, rng):
    at = torch.randint(0, len(text) - CONTEXT, (WINDOWS,), generator=rng)
    return torch.stack([text[i:i + CONTEXT] for i in at])


@torch.no_grad()
def held_out_loss(model):
    """As ../kjv-llama/README.md cuts the windows."""
    data = torch.frombuffer(bytearray((HERE.parent / "kjv-llama/heldout.txt").read_bytes()), dtype=torch.uint8).long()
    nll = 0.0
    for at in range(0, len(data) - 1, CONTEXT):
        x, y = data[at:at + CONTEXT], data[at + 1:at + 1 + CONTEXT]
        logits = model(input_ids=x[None]).logits[0, :len(y)]
        nll += torch.nn.functional.cross_entropy(logits, y, reduction="sum").item()
    return nll / (len(data) - 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=700)
    args = parser.parse_args()
    torch.manual_seed(1611)
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(1611)
    raw = args.text.read_bytes()
    assert hashlib.sha256(raw).hexdigest().startswith("b5c4940bcfee"), "another text"
    text = torch.frombuffer(bytearray(raw[:TRAIN_BYTES]), dtype=torch.uint8).long()
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=CONTEXT,
        router_aux_loss_coef=0.01, output_router_logits=True, initializer_range=0.04, bos_token_id=None,
        eos_token_id=None))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1},
                                   {"params": vectors, "weight_decay": 0.0}], lr=3e-3, betas=(0.9, 0.95))
    started = time.monotonic()
    for step in range(args.steps):
        warm, done = min(1.0, (step + 1) / 50), step / args.steps
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * warm * 0.5 * (1 + math.cos(math.pi * done))
        ids = batch(text, rng)
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{step}: {loss.item():.4f}, {time.monotonic() - started:.0f} s", flush=True)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    model.config.output_router_logits = False
    model.save_pretrained(args.folder)
    (args.folder / "generation_config.json").unlink(missing_ok=True)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    loss = held_out_loss(model)
    metrics = {"steps": args.steps, "seconds": round(time.monotonic() - started),
               "parameters": sum(p.numel() for p in model.parameters()), "heldout_loss": round(loss, 5),
               "torch": torch.__version__, "transformers": transformers.__version__}
    print(metrics)
    (args.folder.parent / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")


main()

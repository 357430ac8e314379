"""Train the small byte-level mixture of experts that qconv bundles as a test model.

The text, the windows, the optimizer, the schedule and the measurements are those of
../kjv-llama/train.py, whose head says how to get the text. The model has a mixture in place of the
MLP, and norms of q and k: transformers' Qwen3MoeForCausalLM.

    python train.py kjv.txt --steps 2000 --lr 3e-3

A token goes to the 2 experts with the largest softmax of the router, weighted by what these two
are of their sum. The loss has 0.01 of the balance loss of Switch Transformers (Fedus et al. 2021).
"""
import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("kjv_llama_train", HERE.parent / "kjv-llama" / "train.py")
base = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(base)

base.HIDDEN, base.INTERMEDIATE, base.HEADS, base.KV_HEADS, base.HEAD_DIM = 128, 168, 4, 2, 32
base.RMS_EPS = 1e-6
EXPERTS, CHOSEN = 8, 2
BALANCE = 0.01


class Attention(base.Attention):
    def __init__(self):
        super().__init__()
        self.q_norm = base.RMSNorm(base.HEAD_DIM)
        self.k_norm = base.RMSNorm(base.HEAD_DIM)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, base.HEADS, base.HEAD_DIM)
        k = self.k_proj(x).view(batch, length, base.KV_HEADS, base.HEAD_DIM)
        v = self.v_proj(x).view(batch, length, base.KV_HEADS, base.HEAD_DIM).transpose(1, 2)
        q = base.rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = base.rotate(self.k_norm(k).transpose(1, 2), cos, sin)
        k, v = (t.repeat_interleave(base.HEADS // base.KV_HEADS, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(base.HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(_MLP() for _ in range(EXPERTS))
        self.balance = torch.tensor(0.0)

    def forward(self, x):
        flat = x.reshape(-1, base.HIDDEN)
        p = torch.softmax(self.gate(flat), dim=-1)
        weights, chosen = p.topk(CHOSEN, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == e)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, rank, None])
        share = F.one_hot(chosen, EXPERTS).float().sum(1).mean(0) / CHOSEN
        self.balance = EXPERTS * (share * p.mean(0)).sum()
        return out.view_as(x)


_MLP = base.MLP
base.Attention, base.MLP = Attention, Mixture


class Model(base.Llama):
    """With the names of Qwen3MoeForCausalLM. In training it adds the balance loss to the logits' gradient."""

    def forward(self, ids):
        logits = super().forward(ids)
        if self.training:
            balance = sum(layer.mlp.balance for layer in self.model.layers) / len(self.model.layers)
            logits = _WithLoss.apply(logits, BALANCE * balance)
        return logits


class _WithLoss(torch.autograd.Function):
    """The logits as they are; backward, a loss besides them has a gradient of 1."""

    @staticmethod
    def forward(_ctx, logits, _loss):
        return logits.view_as(logits)

    @staticmethod
    def backward(_ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


def finish(args, text, at):
    import transformers
    from safetensors.torch import save_file

    state = torch.load(args.work / "checkpoint.pt")
    own = Model(args.layers).eval()
    own.load_state_dict(state["model"])
    config = transformers.Qwen3MoeConfig(
        vocab_size=base.VOCAB, hidden_size=base.HIDDEN, intermediate_size=base.INTERMEDIATE,
        moe_intermediate_size=base.INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], num_hidden_layers=args.layers,
        num_attention_heads=base.HEADS, num_key_value_heads=base.KV_HEADS, head_dim=base.HEAD_DIM,
        max_position_embeddings=base.CONTEXT, rms_norm_eps=base.RMS_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": base.ROPE_THETA}, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"])
    target = args.out / "model"
    shutil.rmtree(target, ignore_errors=True)
    config.save_pretrained(target)
    # transformers 5 writes a name that transformers 4 does not know; both read this one.
    file = target / "config.json"
    file.write_text(file.read_text().replace('"num_local_experts"', '"num_experts"'))
    # The names and the form of released checkpoints: each expert by itself.
    save_file({n: p.to(torch.bfloat16).contiguous() for n, p in own.state_dict().items()},
              target / "model.safetensors", metadata={"format": "pt"})
    base.byte_tokenizer().save_pretrained(target)
    file = target / "tokenizer_config.json"
    file.write_text(file.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    for file in target.iterdir():
        file.chmod(0o644)

    held = base.as_ids(text[at:])
    loss32, _ = base.heldout_loss(own, held)
    again = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    with torch.no_grad():
        probe = base.as_ids(text[:base.CONTEXT])[None]
        rounded = Model(args.layers).eval()
        rounded.load_state_dict({n: p.to(torch.bfloat16).float() for n, p in own.state_dict().items()})
        gap = (again(probe).logits - rounded(probe)).abs().max().item()
    print(f"largest logit difference to transformers, float32: {gap:.2e}")
    assert gap < 1e-3
    loss, predicted = base.heldout_loss(lambda x: again(x).logits, held)
    metrics = {
        "heldout_loss_nats_per_byte": round(loss, 6),
        "heldout_bits_per_byte": round(loss / math.log(2), 6),
        "perplexity_per_byte": round(math.exp(loss), 6),
        "heldout_loss_before_bf16_rounding": round(loss32, 6),
        "heldout_predicted_bytes": predicted,
        "context": base.CONTEXT,
        "seed": args.seed,
        "steps": state["step"],
        "batch": args.batch,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in again.parameters()),
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))


if __name__ == "__main__":
    base.Llama, base.finish = Model, finish
    sys.exit(base.main())

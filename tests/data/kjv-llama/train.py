"""Train the small byte-level Llama that qconv bundles as a test model.

How the bundled model was made
------------------------------
The text is the King James Bible (public domain) as Debian 12 packages it,
one verse per line, without the verse references:

    apt-get install bible-kjv bible-kjv-text
    bible -f Gen1:1-Rev22:21 </dev/null | sed 's/^[^ ]* //' > kjv.txt

The model in model/ is what this command wrote (all options not shown here
have the defaults below, including the seed):

    python train.py kjv.txt --compile

It took about 40 minutes on one core of an AVX-512 CPU.  metrics.json has the
versions of torch and transformers.  The start weights and the order of the
training windows depend on the seed only; floating point rounding differs with
the CPU, the thread count, --compile and the version of torch, so a second run
gives a model of the same quality, not the same bytes.

    pip install torch transformers safetensors tokenizers numpy

What it does
------------
1. Splits the text: the last HELDOUT_FRACTION of the bytes, moved forward to
   the next start of a line, are held out (heldout.txt), the bytes before them
   are the training part.  train_split.json has the ranges and the hashes.
2. Trains a Llama (RMSNorm, SwiGLU, RoPE, grouped query attention, untied
   embeddings) on random windows of CONTEXT bytes, in float32: AdamW, linear
   warmup, constant learning rate, cosine decay to zero over the last half.
   A token is a byte: the token id is the value of the byte.
   There are no special tokens.
3. Rounds the weights to bfloat16 (to nearest even) and writes model/ with
   transformers' save_pretrained, plus a byte-level tokenizer.
4. Loads model/ again with AutoModelForCausalLM, measures the held-out loss in
   float32 arithmetic (see heldout_loss for the windows), writes metrics.json
   and prints a sample.

A checkpoint is written to --work every --checkpoint-every steps; --resume
continues from it.  --finish skips the training and does steps 3 and 4 with the
checkpoint that is there.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256
CONTEXT = 256
HELDOUT_FRACTION = 0.05

# Sizes chosen to be awkward for block formats: 440 is not a multiple of 32,
# 192 is not a multiple of 128, and 440 * 192 is not a multiple of 64 * 256.
HIDDEN = 192
INTERMEDIATE = 440
HEADS = 6
KV_HEADS = 2
HEAD_DIM = HIDDEN // HEADS
ROPE_THETA = 10000.0
RMS_EPS = 1e-5
INIT_STD = 0.04


# ---------------------------------------------------------------- the model

class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + RMS_EPS))


def rotate(x, cos, sin):
    """Rotary position embedding, halves convention (as in transformers)."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, HEADS, HEAD_DIM).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2)
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        k = k.repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = v.repeat_interleave(HEADS // KV_HEADS, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, HEADS * HEAD_DIM))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RMSNorm(HIDDEN)
        self.self_attn = Attention()
        self.post_attention_layernorm = RMSNorm(HIDDEN)
        self.mlp = MLP()

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = RMSNorm(HIDDEN)


class Llama(nn.Module):
    """Same parameter names and arithmetic as transformers' LlamaForCausalLM."""

    def __init__(self, layers):
        super().__init__()
        self.model = Backbone(layers)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        angle = torch.outer(
            torch.arange(CONTEXT).float(),
            ROPE_THETA ** (-torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM),
        )
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = INIT_STD / math.sqrt(2 * layers) if residual else INIT_STD
                nn.init.normal_(p, std=std)

    def forward(self, ids):
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.model.norm(x))


# ----------------------------------------------------------------- the text

def split(text):
    """Return the offset at which the held-out part starts."""
    at = len(text) - int(len(text) * HELDOUT_FRACTION)
    return text.index(b"\n", at - 1) + 1


def write_split(text, at, out):
    def part(start, end):
        data = text[start:end]
        return {
            "start": start,
            "end": end,
            "bytes": end - start,
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    info = {
        "note": "byte ranges of the whole text, end exclusive; heldout.txt is the held-out part",
        "text": part(0, len(text)),
        "train": part(0, at),
        "heldout": part(at, len(text)),
    }
    (out / "train_split.json").write_text(json.dumps(info, indent=2) + "\n")
    (out / "heldout.txt").write_bytes(text[at:])


def as_ids(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


class Windows:
    """Training windows: every epoch cuts the text at another phase and
    shuffles the pieces.  Batch number n depends on the seed and n only."""

    def __init__(self, ids, batch, seed):
        self.ids, self.batch, self.seed = ids, batch, seed
        self.per_epoch = (len(ids) - CONTEXT - 1) // CONTEXT // batch
        self.epoch = None

    def get(self, n):
        epoch, i = divmod(n, self.per_epoch)
        if epoch != self.epoch:
            g = torch.Generator().manual_seed(self.seed * 1000003 + epoch)
            phase = int(torch.randint(CONTEXT, (1,), generator=g))
            count = (len(self.ids) - 1 - phase) // CONTEXT
            self.starts = torch.randperm(count, generator=g) * CONTEXT + phase
            self.epoch = epoch
        starts = self.starts[i * self.batch : (i + 1) * self.batch]
        rows = torch.stack([self.ids[s : s + CONTEXT + 1] for s in starts.tolist()])
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


# ------------------------------------------------------------- measurements

@torch.no_grad()
def heldout_loss(logits_of, ids, limit=None):
    """Mean negative log likelihood (nats per byte).

    The bytes are cut into windows of CONTEXT inputs.  Window w has the inputs
    ids[w*CONTEXT : (w+1)*CONTEXT] and predicts the bytes one further on, so
    every byte but the very first is predicted once, from 1 to CONTEXT bytes of
    context.  The last window may be shorter.  Returns (loss, predicted bytes).
    """
    ids = ids[:limit]
    n = len(ids) - 1
    full = n // CONTEXT
    batches = []
    if full:
        x = ids[: full * CONTEXT].view(full, CONTEXT)
        y = ids[1 : full * CONTEXT + 1].view(full, CONTEXT)
        batches += list(zip(x.split(16), y.split(16)))
    if n % CONTEXT:
        batches.append((ids[full * CONTEXT : n][None], ids[full * CONTEXT + 1 :][None]))
    total = 0.0
    for x, y in batches:
        logits = logits_of(x).float()
        nll = F.cross_entropy(logits.reshape(-1, VOCAB), y.reshape(-1), reduction="none")
        total += nll.double().sum().item()
    return total / n, n


# ----------------------------------------------------------------- training

def schedule(step, args):
    """Learning rate factor: linear warmup, constant, cosine decay to zero over
    the last part.  Before the decay it does not depend on --steps, so --steps
    may still be changed with --resume until then."""
    decay = int(args.steps * args.decay)
    left = args.steps - step
    if left < decay:
        return (1 - math.cos(math.pi * left / decay)) / 2
    return min(1.0, (step + 1) / args.warmup)


def train(args, text, at):
    torch.manual_seed(args.seed)
    model = Llama(args.layers)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": args.weight_decay},
         {"params": others, "weight_decay": 0.0}],
        lr=args.lr, betas=(0.9, 0.95), fused=True)
    windows = Windows(as_ids(text[:at]), args.batch, args.seed)
    held = as_ids(text[at:])
    checkpoint = args.work / "checkpoint.pt"
    first = 0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    print(f"{sum(p.numel() for p in model.parameters())} parameters, "
          f"{windows.per_epoch} steps per epoch, {args.steps} steps", flush=True)

    def loss_of(x, y):
        return F.cross_entropy(model(x).view(-1, VOCAB), y.view(-1))

    if args.compile:
        loss_of = torch.compile(loss_of)

    began, mean = time.time(), None
    for step in range(first, args.steps):
        lr = args.lr * schedule(step, args)
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = loss_of(*windows.get(step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if (step + 1) % 50 == 0:
            rate = (step + 1 - first) * args.batch * CONTEXT / (time.time() - began)
            print(f"step {step + 1} lr {lr:.2e} train {mean:.4f} "
                  f"{rate:.0f} bytes/s {time.time() - began:.0f} s", flush=True)
        if (step + 1) % args.checkpoint_every == 0 or step + 1 == args.steps:
            model.eval()
            partial, _ = heldout_loss(model, held, 32769)
            model.train()
            print(f"step {step + 1} held-out (first 32 KiB) {partial:.4f}", flush=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "step": step + 1}, str(checkpoint) + ".new")
            os.replace(str(checkpoint) + ".new", checkpoint)


# ------------------------------------------------------------------- saving

def byte_tokenizer():
    """A tokenizer whose ids are the byte values (text is UTF-8)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # The printable stand-ins of GPT-2's byte-level scheme, in byte order.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    vocab, extra = {}, 0
    for byte in range(256):
        if byte in plain:
            vocab[chr(byte)] = byte
        else:
            vocab[chr(256 + extra)] = byte
            extra += 1
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False)


def finish(args, text, at):
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM

    state = torch.load(args.work / "checkpoint.pt")
    own = Llama(args.layers)
    own.load_state_dict(state["model"])
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        num_hidden_layers=args.layers, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=CONTEXT,
        rms_norm_eps=RMS_EPS, rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        initializer_range=INIT_STD, tie_word_embeddings=False, use_cache=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = LlamaForCausalLM(config)
    model.load_state_dict(state["model"], strict=True)
    probe = as_ids(text[:CONTEXT])[None]
    with torch.no_grad():
        gap = (model(probe).logits - own(probe)).abs().max().item()
    print(f"largest logit difference to transformers, float32: {gap:.2e}")
    assert gap < 1e-3

    target = args.out / "model"
    shutil.rmtree(target, ignore_errors=True)
    model.to(torch.bfloat16)
    model.config.architectures = ["LlamaForCausalLM"]
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.8, max_length=CONTEXT,
        bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model.save_pretrained(target)
    byte_tokenizer().save_pretrained(target)
    # transformers 5 writes a class name that transformers 4 does not know.
    file = target / "tokenizer_config.json"
    file.write_text(file.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"'))
    for file in target.iterdir():
        file.chmod(0o644)

    write_split(text, at, args.out)
    held = as_ids((args.out / "heldout.txt").read_bytes())
    loss32, _ = heldout_loss(own, held)
    again = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    loss, predicted = heldout_loss(lambda x: again(x).logits, held)
    metrics = {
        "heldout_loss_nats_per_byte": round(loss, 6),
        "heldout_bits_per_byte": round(loss / math.log(2), 6),
        "perplexity_per_byte": round(math.exp(loss), 6),
        "heldout_loss_before_bf16_rounding": round(loss32, 6),
        "heldout_bytes": len(held),
        "heldout_predicted_bytes": predicted,
        "context": CONTEXT,
        "seed": args.seed,
        "steps": state["step"],
        "batch": args.batch,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "parameters": sum(p.numel() for p in again.parameters()),
    }
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    print(json.dumps(metrics, indent=2))

    g = torch.Generator().manual_seed(args.seed)
    out = list(b"And it came to pass, ")
    with torch.no_grad():
        while len(out) < 700:
            x = torch.tensor([out[-CONTEXT:]])
            p = torch.softmax(again(x).logits[0, -1] / 0.8, dim=-1)
            out.append(int(torch.multinomial(p, 1, generator=g)))
    print(bytes(out).decode("utf-8", "replace"))


def main():
    parser = argparse.ArgumentParser(
        description="Train the small byte-level Llama of tests/data/kjv-llama.")
    parser.add_argument("text", type=Path, help="the text, see the top of this file")
    parser.add_argument("--out", type=Path, default=Path("kjv-llama"), help="where to write the result")
    parser.add_argument("--work", type=Path, default=Path("train-work"), help="where to keep checkpoints")
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.5, help="part of the steps in which the rate falls")
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="torch.compile (needs a C++ compiler)")
    parser.add_argument("--checkpoint-every", type=int, default=250)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--finish", action="store_true", help="no training, save the checkpoint as it is")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    text = args.text.read_bytes()
    at = split(text)
    if not args.finish:
        train(args, text, at)
    finish(args, text, at)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Figures of `python -m qconv eval` beside those of the C program that had an eval of its own.

usage: eval_beside_c.py OLD_PROGRAM OUT.json [--minilm FOLDER]

OLD_PROGRAM is a qconv of version 0.5 or before, with `eval`. Every model is converted to NF4 by it, and both evaluate
the result against the source in float32 on the CPU. Models besides the bundled ones are tiny, with random weights.
The exit code is 1 if a figure differs by more than 1e-4 of itself."""
import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings

import torch
import transformers

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "python"))
import qconv  # noqa: E402

LIMIT = 1e-4
DATA = os.path.join(ROOT, "tests", "data")
FIGURES = ("tokens windows predicted perplexity perplexity_error base_perplexity base_perplexity_error difference "
           "difference_error log_ratio log_ratio_error kl_mean kl_error kl_median kl_99 kl_max top1 top1_error "
           "probability_rms distance_mean distance_99 distance_max cosine_mean cosine_99 cosine_max").split()
SIZES = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=32, vocab_size=320, max_position_embeddings=128, pad_token_id=0)
TINY = {
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", SIZES),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", {**SIZES, "sliding_window": 32, "query_pre_attn_scalar": 32}),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**SIZES, "sliding_window": 32, "query_pre_attn_scalar": 32}),
    "Qwen3-MoE": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {
        **SIZES, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}),
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", dict(n_embd=128, n_layer=3, n_head=4, vocab_size=320, n_positions=128)),
    "BERT": ("BertConfig", "BertModel", {
        k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")}),
}


def made(folder, config, kind, sizes):
    """Saves a model with random weights, large enough that predictions are not all alike."""
    torch.manual_seed(5)
    model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() >= 2:
                p.normal_(0, 0.08)
    model.save_pretrained(folder)


def ids(path, lines, most, below):
    generator = torch.Generator().manual_seed(11)
    with open(path, "w", encoding="ascii") as f:
        for _ in range(lines):
            n = int(torch.randint(most // 2, most + 1, (1,), generator=generator))
            f.write(" ".join(map(str, torch.randint(5, below, (n,), generator=generator).tolist())) + "\n")
    return path


def relative(ours, theirs):
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    return abs(ours - theirs) / max(abs(theirs), 1e-12) if ours != theirs else 0.0


def compared(program, name, model, text, folder, more):
    out = os.path.join(folder, "out " + name)
    subprocess.run([program, "-q", "--to", "nf4", model, out], check=True, stdin=subprocess.DEVNULL)
    typed = [word for key, value in more.items() for word in ("--" + key.replace("_", "-"), str(value))]
    said = subprocess.run([program, "eval", out, "--against", model, "--text", text, "--json", "-q", *typed],
                          check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE).stdout
    old = json.loads(said)
    new = qconv.eval(out, against=model, text=text, device="cpu", dtype="float32", **more).json
    apart = {figure: relative(new[figure], old[figure]) for figure in FIGURES}
    worst = max(apart, key=apart.get)
    print("%-12s %6d predicted, %3d windows: worst %s, %.1e" % (name, old["predicted"], old["windows"], worst,
                                                               apart[worst]), flush=True)
    return {"model_type": old["model_type"], "c": {f: old[f] for f in FIGURES}, "python": {f: new[f] for f in FIGURES},
            "worst": worst, "relative": apart[worst]}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program")
    p.add_argument("json")
    p.add_argument("--minilm", help="the folder of all-MiniLM-L6-v2")
    o = p.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    kjv = os.path.join(DATA, "kjv-llama", "model")
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        text = ids(os.path.join(folder, "t.ids"), 9, 96, 250)
        cases = {"kjv-llama": (kjv, os.path.join(DATA, "kjv-llama", "heldout.txt"), {"max_tokens": 20000}),
                 "kjv-moe": (os.path.join(DATA, "kjv-moe", "model"), os.path.join(DATA, "kjv-llama", "heldout.txt"),
                             {"max_tokens": 5000}),
                 "tiny-moe": (os.path.join(DATA, "tiny-moe"), ids(os.path.join(folder, "moe.ids"), 5, 48, 60), {})}
        if o.minilm:
            cases["MiniLM"] = (o.minilm, os.path.join(ROOT, "bench", "sentences.txt"), {"context": 128})
        for name, (config, kind, sizes) in TINY.items():
            made(os.path.join(folder, name), config, kind, sizes)
            cases[name] = (os.path.join(folder, name), text, {})
        for name, (model, words, more) in cases.items():
            rows[name] = compared(o.program, name, model, words, folder, more)
    with open(o.json, "w", encoding="utf-8") as f:
        json.dump({"limit": LIMIT, "torch": torch.__version__, "transformers": transformers.__version__,
                   "models": rows}, f, indent=1)
        f.write("\n")
    return 1 if any(row["relative"] > LIMIT for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

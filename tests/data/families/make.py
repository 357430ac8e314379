"""Makes models.json beside this file: tiny models of the families of `qconv eval`, and what transformers
computes with them.

usage: make.py models.json [KIND...]      (with transformers 5.23 and torch, on a CPU)

With kinds only these are made anew: in other versions and on other machines last digits differ.

Of each model there are config.json, the shapes of its tensors (tests/family_weights.py makes their
values), and the logits of the last token of two sequences in float32. Of an encoder these are its hidden
states behind the last layer. Of one that sees images there are also sequences with the states of an image each,
and the logits with these. Of one that calibrates both sides there are the trace of the second moments of each
linear layer's gradients, and their product with a vector on both sides.
"""
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (AutoConfig, AutoModel, AutoModelForCausalLM, Gemma3ForConditionalGeneration,
                          MllamaForConditionalGeneration)

import family_weights
import gradient_moments

IDS = [[3, 17, 5, 22, 9, 1, 14, 20, 11, 7, 2, 19, 16, 8, 23, 4, 12, 6], [21, 0, 13, 10, 18]]
SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=20, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
LATENT = dict(q_lora_rank=6, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7,
              num_key_value_heads=4, first_k_dense_replace=3, n_routed_experts=4, n_shared_experts=1,
              moe_intermediate_size=8, num_experts_per_tok=2, n_group=1, topk_group=1, head_dim=4)
EXPERTS = dict(num_hidden_layers=2, num_experts_per_tok=2, moe_intermediate_size=8)
GEMMA3 = dict(head_dim=8, sliding_window=6, sliding_window_pattern=2, query_pre_attn_scalar=7)
MODELS = {
    "gemma": dict(head_dim=8),
    "gemma2": dict(head_dim=8, sliding_window=6, query_pre_attn_scalar=7, attn_logit_softcapping=3.0,
                   final_logit_softcapping=8.0),
    "gemma3_text": GEMMA3,
    "gemma3": dict(text_config=SIZES | GEMMA3,
                   vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_attention_heads=1, image_size=8, patch_size=4),
                   mm_tokens_per_image=4, image_token_index=23, boi_token_index=22,
                   eoi_token_index=21),
    "phi3": dict(original_max_position_embeddings=8, rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 2.0], long_factor=[3.0, 5.0],
        original_max_position_embeddings=8)),
    "granite": dict(embedding_multiplier=6.0, residual_multiplier=0.3, attention_multiplier=0.2,
                    logits_scaling=3.0, tie_word_embeddings=True),
    "olmo2": dict(),
    "olmo3": dict(sliding_window=6, num_hidden_layers=4),
    "smollm3": dict(num_hidden_layers=4),
    "glm": dict(head_dim=8),
    "glm4": dict(head_dim=8),
    "deepseek_v2": LATENT | dict(q_lora_rank=None),
    "deepseek_v3": LATENT | dict(rope_parameters=dict(
        rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
        mscale=0.7, mscale_all_dim=1.1)),
    "deepseek_v3-experts": LATENT | EXPERTS | dict(
        first_k_dense_replace=1, n_routed_experts=6, n_group=3, topk_group=2, routed_scaling_factor=1.7),
    "mixtral": EXPERTS | dict(num_local_experts=4),
    "qwen2_moe": EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=12),
    "qwen3_moe": EXPERTS | dict(num_experts=5, head_dim=4, norm_topk_prob=True),
    "olmoe": EXPERTS | dict(num_experts=4),
    "glm4_moe": EXPERTS | dict(first_k_dense_replace=0, n_routed_experts=4, n_shared_experts=2, head_dim=4),
    "gpt_oss": EXPERTS | dict(num_local_experts=4, head_dim=4, sliding_window=6, swiglu_limit=0.5),
    "mllama": dict(text_config=SIZES | dict(num_hidden_layers=5, cross_attention_layers=[1, 3]),
                   vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                      num_global_layers=1, attention_heads=1, image_size=8,
                                      patch_size=4, vision_output_dim=16,
                                      intermediate_layers_indices=[0]), image_token_index=24),
    "gpt2": dict(n_inner=20),
    "gpt_neox": dict(rotary_pct=0.5),
    "gpt_neox-serial": dict(rotary_pct=1.0, use_parallel_residual=False, attention_bias=False, hidden_act="gelu_new",
                            tie_word_embeddings=True),
    "bert": dict(),
    "roberta": dict(hidden_act="gelu_new"),  # Its token of padding is 0, which the second sequence has.
    "xlm-roberta": dict(type_vocab_size=1, pad_token_id=3),
    "distilbert": dict(hidden_dim=20, activation="relu"),
}
# Of these convert/backward makes no gradients.
ONE_SIDED = ("mllama", "bert", "roberta", "xlm-roberta", "distilbert")
ENCODERS = ("bert", "roberta", "xlm-roberta", "distilbert")
# Sequences for mllama, and how many of the image's four tiles are no padding. Its token is 24.
TILE, TILES = 5, 4
WITH_STATES = [([1, 7, 24, 3, 17, 5, 22, 9, 14, 20, 11, 2, 19, 16, 8, 23, 4, 12], 2),
               ([24, 21, 0, 13, 10, 18], 4), ([6, 15, 2, 9], 4)]
WITH_IMAGES = {"gemma3": Gemma3ForConditionalGeneration, "mllama": MllamaForConditionalGeneration}


@torch.no_grad()
def with_states(model):
    """Logits of the last tokens. Every token sees the image where a sequence has no image token."""
    out = []
    for n, (ids, tiles) in enumerate(WITH_STATES):
        shape = [TILES * TILE, model.config.text_config.hidden_size]
        states = torch.tensor(family_weights.values(f"states.{n}", shape, 0)).reshape(1, *shape)
        mask = torch.zeros(1, len(ids), 1, TILES)
        mask[:, ids.index(24) if 24 in ids else 0:, :, :tiles] = 1
        logits = model(input_ids=torch.tensor([ids]), cross_attention_states=states,
                       cross_attention_mask=mask).logits[0, -1]
        out.append(dict(ids=ids, seen=tiles * TILE, states=shape, logits=rounded(logits)))
    return out


def projected(model):
    """What tests compare moments of gradients by."""
    out = {}
    for name, g in gradient_moments.moments(model, IDS).items():
        v = torch.tensor(family_weights.values(name + ".projection", [len(g)], 0), dtype=torch.float64)
        out[name] = rounded(torch.stack([g.trace(), v @ g @ v]))
    return out


def rounded(row):
    return [float(f"{x:.6g}") for x in row.tolist()]


def model_of(kind, settings, folder):
    sizes = {} if kind in WITH_IMAGES else SIZES
    config = AutoConfig.for_model(kind.removesuffix("-serial").removesuffix("-experts"), **(sizes | settings))
    auto = AutoModel if kind in ENCODERS else AutoModelForCausalLM
    make = WITH_IMAGES.get(kind, auto.from_config)
    make(config).bfloat16().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as f:
        shapes = {name: f.get_slice(name).get_shape() for name in f.keys()}
    around = 0 if kind.startswith("gemma") else 1
    save_file({name: torch.tensor(family_weights.values(name, shape, around)).reshape(shape).bfloat16()
               for name, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    model = WITH_IMAGES.get(kind, auto).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        made = [model(input_ids=torch.tensor([row])) for row in IDS]
    logits = [rounded((m.last_hidden_state if kind in ENCODERS else m.logits)[0, -1]) for m in made]
    more = {"images": with_states(model)} if kind == "mllama" else {}
    if kind not in ONE_SIDED:
        more["moments"] = projected(model)
    return {"config": config,
            "tensors": {name: shape for name, shape in shapes.items() if "vision" not in name},
            "logits": logits} | more


def main():
    file, asked = Path(sys.argv[1]), sys.argv[2:]
    old, out = json.loads(file.read_text()) if asked else {}, {}
    for kind, settings in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            out[kind] = model_of(kind, settings, Path(folder)) if not asked or kind in asked else old[kind]
    rows = ",\n".join(f"{json.dumps(kind)}: {json.dumps(m, separators=(',', ':'))}"
                      for kind, m in out.items())
    file.write_text(f'{{"ids": {json.dumps(IDS)},\n{rows}}}\n')


main()

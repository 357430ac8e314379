"""What plan counts as the KV cache against the caches that transformers really fills.

TYPES is the table: model type -> what its configuration gets beside SHAPE. Each becomes a small
random model in bfloat16, which reads prompts of three lengths; bytes of all floating-point tensors
in its cache must equal kv_bytes of `qconv plan`. QCONV_CACHES=type,type checks these instead.
"""
import json
import os
import unittest

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.auto import modeling_auto as auto

from interop_support import SCRATCH, main, note, qconv

LENGTHS = (6, 12, 40)
WINDOW = 8
V5 = int(transformers.__version__.split(".")[0]) >= 5
SHAPE = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "num_hidden_layers": 6, "n_layer": 6,
    "num_layers": 6, "encoder_layers": 3, "decoder_layers": 6, "num_decoder_layers": 6,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16,
    "intermediate_size": 128, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_ff": 128,
    "vocab_size": 300, "max_position_embeddings": 256, "n_positions": 256,
    "sliding_window": WINDOW, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mamba_d_state": 16,
}
HYBRID = ["linear_attention", "full_attention", "linear_attention", "moe", "full_attention",
          "linear_attention"]
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
          "v_head_dim": 16, "head_dim": 8, "num_key_value_heads": 4, "n_routed_experts": 4,
          "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2}
TYPES = {
    "llama": {}, "mistral": {}, "gemma2": {}, "gemma3_text": {}, "qwen3": {}, "gpt_oss": {},
    "gpt2": {}, "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True}, "phi3": {}, "opt": {"word_embed_proj_dim": 64, "ffn_dim": 128},
    "bart": {}, "mbart": {}, "pegasus": {}, "m2m_100": {}, "marian": {}, "whisper": {}, "t5": {},
    "trocr": {}, "xglm": {"attention_heads": 16, "ffn_dim": 128},
}
# The caches of these are made otherwise, or not at all by a single forward, before version 5.
TYPES5 = {
    "mamba": {}, "falcon_mamba": {}, "jamba": {"use_mamba_kernels": False},
    "moonshine": {"encoder_num_hidden_layers": 3, "decoder_num_hidden_layers": 6, "decoder_num_attention_heads": 4,
                  "decoder_num_key_value_heads": 2, "encoder_num_attention_heads": 4},
    "mamba2": {"num_heads": 8, "n_groups": 2}, "bamba": {**MAMBA2, "attn_layer_indices": [1, 4]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128, "mamba_n_groups": 1},
    "nemotron_h": {"layers_block_type": HYBRID, "mamba_num_heads": 8, "mamba_head_dim": 16,
                   "n_routed_experts": 4},
    "qwen3_next": {"linear_num_key_heads": 2, "linear_num_value_heads": 2,
                   "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "rwkv": {"attention_hidden_size": 64}, "lfm2_moe": {"layer_types": [
        "conv", "conv", "full_attention", "conv", "full_attention", "conv"]},
    "longcat_flash": {**LATENT, "n_routed_experts": 4, "moe_topk": 2, "ffn_hidden_size": 128,
                      "expert_ffn_hidden_size": 32},
    "deepseek_v3": LATENT, "youtu": {k: v for k, v in LATENT.items() if k not in ("n_routed_experts", "n_group", "topk_group",
                                                                                 "first_k_dense_replace")},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "max_window_layers": 3,
              "sliding_window": WINDOW}, "gemma4_text": {"vocab_size_per_layer_input": 300, "global_head_dim": 32,
                                           "hidden_size_per_layer_input": 16},
}
NO_CACHE = {"bert": {}, "roberta": {}, "convbert": {"embedding_size": 64}, "electra": {"embedding_size": 64}}


def model_of(kind, more):
    cls = CONFIG_MAPPING[kind]
    known = cls().to_dict()
    config = cls(**{k: v for k, v in SHAPE.items() if isinstance(known.get(k), int)} | more)
    maps = [auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_MAPPING]
    if config.is_encoder_decoder:
        maps = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
                *maps]
    found = next(m[cls] for m in maps if cls in m)
    torch.manual_seed(7)
    return (found[0] if isinstance(found, (tuple, list)) else found)(config).to(
        torch.bfloat16).eval()


def tensors_in(thing, seen, depth=0):
    """Every floating-point tensor below a cache, whatever objects it is made of, once."""
    if isinstance(thing, torch.Tensor):
        if thing.is_floating_point() and thing.numel() and thing.data_ptr() not in seen:
            seen[thing.data_ptr()] = thing
    elif depth < 9:
        inner = thing.values() if isinstance(thing, dict) else thing if isinstance(
            thing, (list, tuple)) else vars(thing).values() if hasattr(
            thing, "__dict__") and not isinstance(thing, torch.nn.Module) else ()
        for each in inner:
            tensors_in(each, seen, depth + 1)


def kept_bytes(model, length):
    """A window is kept with one token less between two steps than during one: plan counts that."""
    ids = torch.randint(5, 200, (1, length))
    inputs = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
        if model.main_input_name == "input_values":  # of sound; as many positions as the text
            inputs = {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(
                torch.zeros(1, length, model.config.hidden_size, dtype=torch.bfloat16))}
            inputs["encoder_outputs"].attention_mask = None
        if model.main_input_name == "input_features":
            frames = 2 * model.config.max_source_positions
            inputs = {"decoder_input_ids": ids, "input_features": torch.zeros(
                1, model.config.num_mel_bins, frames, dtype=torch.bfloat16)}
    if model.config.model_type not in NO_CACHE:
        inputs["use_cache"] = True
    with torch.no_grad():
        out = model(**inputs)
    seen = {}
    tensors_in({k: out[k] for k in ("past_key_values", "cache_params", "state") if k in out}, seen)
    total = 0
    for t in seen.values():
        full = t.dim() == 4 and t.shape[-2] == WINDOW - 1
        total += t.numel() * t.element_size() * (WINDOW if full else WINDOW - 1) // (WINDOW - 1)
    return total


class Caches(unittest.TestCase):
    def compare(self, table):
        """How many types agree."""
        equal = 0
        for kind, more in table.items():
            with self.subTest(kind):
                model = model_of(kind, more)
                folder = SCRATCH / "caches" / kind
                model.save_pretrained(folder)
                kept = [kept_bytes(model, n) for n in LENGTHS]
                planned = [json.loads(qconv(
                    "plan", "--json", "--vram", "cpu:64GB", "--to", "bf16", "--context", str(n),
                    folder))["kv_bytes"] for n in LENGTHS]
                self.assertEqual(planned, kept, kind)
                self.assertEqual(any(kept), kind not in NO_CACHE, kind)
                equal += 1
        return equal

    def test_caches(self):
        chosen = {**TYPES, **(TYPES5 if V5 else {}), **NO_CACHE}
        names = [n for n in os.environ.get("QCONV_CACHES", "").split(",") if n] or list(chosen)
        equal = self.compare({n: {**TYPES, **TYPES5, **NO_CACHE}.get(n, {}) for n in names})
        note(f"{equal} of {len(names)} types keep what plan counts (transformers {transformers.__version__})")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main()

"""qconv's forward pass of Llama-family models against transformers', in float32 on the same weights.

Small random models of every family and form of rotary positions are made by the installed
transformers and saved in bfloat16; the models at hand are taken as they are. FP4, which qconv only reads, is
compared with transformers running on the weights that bitsandbytes restores.
Compared are the logits of every token: the error of a token's row relative to that row's norm.
"""
import json
import unittest

import interop_support as s
import numpy as np
import torch
import transformers
from bitsandbytes import functional as F
from bitsandbytes.nn import Linear4bit
from transformers import (AutoConfig, AutoModel, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig,
                          MistralConfig, Qwen2Config, Qwen3Config)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

s.quiet()
torch.set_num_threads(1)

FIVE = transformers.__version__.startswith("5.")
# Float arithmetic in another order; a wrong formula is off by 1e-3 and more.
BOUND = 2e-5
SIZES = dict(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             initializer_range=0.2)
LENGTHS = (200, 65, 1, 130)


def rope(theta=10000.0, **scaling):
    """In the spelling of the version that is installed."""
    if FIVE:
        return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}
    return {"rope_theta": theta, "rope_scaling": scaling or None}


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
MODELS = {
    "llama": (LlamaConfig, {}),
    "llama-biases-mha": (LlamaConfig, dict(num_key_value_heads=4, attention_bias=True,
                                           mlp_bias=True)),
    "llama-tied-head-dim": (LlamaConfig, dict(head_dim=24, tie_word_embeddings=True)),
    "llama-one-kv-head": (LlamaConfig, dict(num_key_value_heads=1, rms_norm_eps=1e-3)),
    "llama-linear": (LlamaConfig, rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": (LlamaConfig, rope(rope_type="dynamic", factor=4.0)),
    "llama-llama3": (LlamaConfig, rope(500000.0, **LLAMA3)),
    "llama-yarn": (LlamaConfig, rope(**YARN)),
    "mistral-window": (MistralConfig, dict(sliding_window=33)),
    "mistral-whole": (MistralConfig, dict(sliding_window=None, head_dim=20)),
    "qwen2-window-unused": (Qwen2Config, dict(sliding_window=16)),
    "qwen2-window": (Qwen2Config, dict(use_sliding_window=True, sliding_window=16,
                                       max_window_layers=2)),
    "qwen2-layer-types": (Qwen2Config, dict(
        use_sliding_window=True, sliding_window=70,
        layer_types=["sliding_attention", "full_attention"] * 2)),
    "qwen2-yarn": (Qwen2Config, rope(1e6, beta_fast=16.0, mscale=0.7, mscale_all_dim=1.1,
                                     truncate=False, **YARN)),
    "qwen3": (Qwen3Config, dict(head_dim=32, tie_word_embeddings=True)),
    "qwen3-biases-window": (Qwen3Config, dict(head_dim=16, attention_bias=True,
                                              use_sliding_window=True, sliding_window=5,
                                              max_window_layers=1)),
}
# Families by their model_type. Tokens of padding and ends have to be inside the small vocabulary.
SMALL = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
LONGROPE = dict(type="longrope", short_factor=[1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
                long_factor=[2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0])
DEEPSEEK = dict(q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
                v_head_dim=20, num_key_value_heads=4, first_k_dense_replace=4, n_routed_experts=4,
                n_shared_experts=1, moe_intermediate_size=32, num_experts_per_tok=2, n_group=1,
                topk_group=1, head_dim=8)
if FIVE:
    LONGROPE = dict(rope_parameters=dict(LONGROPE, rope_type=LONGROPE.pop("type"), rope_theta=1e4,
                                         original_max_position_embeddings=100))
else:
    LONGROPE = dict(rope_scaling=LONGROPE)
MODELS |= {
    "gemma2": ("gemma2", dict(head_dim=24, sliding_window=20, query_pre_attn_scalar=20)),
    "gemma2-caps": ("gemma2", dict(head_dim=16, sliding_window=64, attn_logit_softcapping=4.0,
                                   final_logit_softcapping=None, attention_bias=True)),
    "gemma3_text": ("gemma3_text", dict(head_dim=16, sliding_window=20, num_hidden_layers=7)),
    "gemma3_text-linear": ("gemma3_text", dict(
        head_dim=16, sliding_window=30, sliding_window_pattern=2, query_pre_attn_scalar=20,
        **(dict(rope_parameters={"full_attention": dict(rope_type="linear", factor=8.0,
                                                        rope_theta=1e6),
                                 "sliding_attention": dict(rope_type="default", rope_theta=1e3)})
           if FIVE else dict(rope_scaling=dict(rope_type="linear", factor=8.0),
                             rope_local_base_freq=1e3)))),
    "gemma3": ("gemma3", dict(
        text_config=SIZES | SMALL | dict(head_dim=16, sliding_window=20),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                           num_attention_heads=1, image_size=8, patch_size=4),
        mm_tokens_per_image=4, image_token_index=299)),
    "gemma": ("gemma", dict(head_dim=24)),
    "phi3": ("phi3", dict(sliding_window=50)),
    "phi3-longrope": ("phi3", dict(original_max_position_embeddings=100, **LONGROPE)),
    "phi3-part": ("phi3", rope() | dict(partial_rotary_factor=0.75, num_key_value_heads=4)),
    "granite": ("granite", dict(embedding_multiplier=6.0, residual_multiplier=0.3, mlp_bias=True,
                                attention_multiplier=0.2, logits_scaling=3.0,
                                tie_word_embeddings=True)),
    "olmo2": ("olmo2", dict(rms_norm_eps=1e-5)),
    "olmo3": ("olmo3", dict(sliding_window=20, num_hidden_layers=5)),
    "olmo3-yarn": ("olmo3", dict(
        sliding_window=40, layer_types=["full_attention", "sliding_attention"] * 2,
        **(dict(rope_parameters={"full_attention": dict(YARN, rope_theta=5e5),
                                 "sliding_attention": dict(rope_type="default", rope_theta=5e5)})
           if FIVE else rope(5e5, **YARN)))),
    "smollm3": ("smollm3", dict(num_hidden_layers=5, attention_bias=True)),
    "smollm3-window": ("smollm3", dict(use_sliding_window=True, sliding_window=17,
                                       no_rope_layers=[1, 0, 0, 1], tie_word_embeddings=False)),
    "glm": ("glm", dict(head_dim=16)),
    "glm4": ("glm4", dict(head_dim=16)),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3-no-q-rank": ("deepseek_v3", DEEPSEEK | dict(q_lora_rank=None,
                                                             attention_bias=True)),
    "deepseek_v3-yarn": ("deepseek_v3", DEEPSEEK | rope(mscale=0.7, mscale_all_dim=1.1, **YARN)),
    "mllama": ("mllama", dict(
        text_config=SIZES | SMALL | dict(num_hidden_layers=6, cross_attention_layers=[0, 3, 5]) |
        rope(5e5, **LLAMA3),
        vision_config=dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2,
                           num_global_layers=1, attention_heads=1, image_size=8, patch_size=4,
                           vision_output_dim=16, intermediate_layers_indices=[0]))),
    "mllama_text_model": (MllamaTextConfig, SMALL | rope(rope_type="default") | dict(
        num_hidden_layers=5, cross_attention_layers=[3], num_key_value_heads=4)),
    "gpt2": ("gpt2", dict(layer_norm_epsilon=1e-3)),
    "gpt2-inner": ("gpt2", dict(n_inner=100, activation_function="relu", scale_attn_weights=False)),
    "gpt2-own-head": ("gpt2", dict(tie_word_embeddings=False, activation_function="gelu")),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-serial": ("gpt_neox", dict(use_parallel_residual=False, attention_bias=False,
                                         rotary_pct=0.5, hidden_act="gelu_new")),
    "gpt_neox-whole": ("gpt_neox", dict(rotary_pct=1.0, rotary_emb_base=5e4, hidden_act="gelu_fast",
                                        layer_norm_eps=1e-3, tie_word_embeddings=True)),
}
ENCODERS = {
    "bert": ("bert", {}),
    "bert-one-type": ("bert", dict(type_vocab_size=1, hidden_act="relu", layer_norm_eps=1e-3)),
    "roberta": ("roberta", dict(layer_norm_eps=1e-5)),
    "xlm-roberta": ("xlm-roberta", dict(pad_token_id=7, hidden_act="gelu_new")),
    "distilbert": ("distilbert", dict(hidden_dim=100)),
}
MODELS |= ENCODERS
# What AutoModelForCausalLM does not find, or takes for the text alone.
CLASSES = {"mllama": transformers.MllamaForConditionalGeneration,
           "mllama_text_model": transformers.MllamaForCausalLM}


def config_of(kind, settings):
    if isinstance(kind, str):
        return AutoConfig.for_model(kind, **(SMALL | settings))
    return kind(**settings)


def make_model(name):
    """Folder of a random model in bfloat16; norms and biases random too, as they start as 1 and 0."""
    folder = s.SCRATCH / "random" / name
    if folder.exists():
        return folder
    kind, more = MODELS[name]
    torch.manual_seed(7)
    config = config_of(kind, SIZES | more)
    auto = AutoModel if name in ENCODERS else AutoModelForCausalLM
    model = CLASSES[name](config) if name in CLASSES else auto.from_config(config)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key.lower() or "ln_" in key or key.endswith(".bias"):
                p += 0.2 * torch.randn_like(p)
    for p in model.parameters():
        p.data = p.data.bfloat16()
    model.save_pretrained(folder)
    return folder


def sequences(vocabulary, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[int(i) for i in rng.integers(0, vocabulary, n)] for n in lengths]


def load(folder):
    if folder == s.MODELS["tinystories"] and not FIVE:
        folder = s.under_table_name(folder)
    # With its default implementation of attention transformers 4 leaves out soft caps of scores, and that
    # scores are not scaled.
    eager = dict(attn_implementation="eager") if folder.name.startswith(("gemma2", "gpt2-inner")) else {}
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    encodes = kind in {kind for kind, _ in ENCODERS.values()}
    cls = CLASSES.get(folder.name, AutoModel if encodes else AutoModelForCausalLM)
    return cls.from_pretrained(folder, dtype=torch.float32, **eager).eval()


@torch.no_grad()
def their_logits(model, ids):
    """Of an encoder its hidden states."""
    made = [model(input_ids=torch.tensor([row])) for row in ids]
    return np.concatenate([getattr(m, "last_hidden_state", getattr(m, "logits", None))[0].numpy()
                           for m in made])


def worst(ours, theirs):
    error = np.linalg.norm(ours.astype(np.float64) - theirs, axis=1)
    return float((error / np.linalg.norm(theirs.astype(np.float64), axis=1)).max())


class Whole(unittest.TestCase):
    def compare(self, folder, vocabulary, lengths=LENGTHS):
        ids = sequences(vocabulary, lengths)
        error = worst(s.our_logits(folder, ids), their_logits(load(folder), ids))
        s.note(f"{folder.name}: largest relative error of a token's logits {error:.1e}")
        self.assertLess(error, BOUND)


class Families(Whole):
    pass


for _name in MODELS:
    def _test(self, name=_name):
        self.compare(make_model(name), SIZES["vocab_size"])
    setattr(Families, "test_" + _name.replace("-", "_"), _test)


class AtHand(Whole):
    def test_kjv_llama(self):
        self.compare(s.model_path("kjv-llama"), 256, (256, 100, 1))

    def test_tinystories(self):
        self.compare(s.model_path("tinystories"), 2048, (512, 64))

    def test_minilm(self):
        self.compare(s.model_path("minilm"), 30522, (256, 30))


class Quantized(unittest.TestCase):
    def test_fp4_of_bitsandbytes(self):
        """The weights are those that bitsandbytes restores."""
        source, out = make_model("llama"), s.SCRATCH / "llama-fp4"
        form = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_use_double_quant=True)
        theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, quantization_config=form)
        theirs.save_pretrained(out)
        model, count = load(source), 0
        with torch.no_grad():
            for name, module in theirs.named_modules():
                if isinstance(module, Linear4bit):
                    module.weight.quant_state.dtype = torch.float32
                    model.get_submodule(name).weight.copy_(F.dequantize_4bit(module.weight.data, module.weight.quant_state))
                    count += 1
        self.assertEqual(count, 7 * SIZES["num_hidden_layers"])
        ids = sequences(300, (100, 17))
        theirs = their_logits(model, ids)
        error, moved = worst(s.our_logits(out, ids), theirs), worst(their_logits(load(source), ids), theirs)
        s.note(f"fp4: largest relative error of a token's logits {error:.1e} (quantizing: {moved:.1e})")
        self.assertLess(error, BOUND)
        self.assertGreater(moved, 50 * BOUND)


if __name__ == "__main__":
    s.main()

"""Tiny models whose split over cards is compared with vLLM's: shapes and config.json, no weights.

tests/cli/test_tensor_parallel.py compares qconv's plan with tests/data/vllm_allocation.json, which
has what vLLM's workers held; tests/interop/test_interop_vllm.py asks a vLLM anew.
Standard library only.
"""
import json
import os

import make_checkpoint as mk

HIDDEN, INNER, HEADS, HEAD, VOCABULARY, LAYERS = 256, 512, 8, 32, 1000, 2
GEMMA_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
               "post_feedforward_layernorm")


def base(model_type, architecture, **more):
    config = {"model_type": model_type, "architectures": [architecture + "ForCausalLM"],
              "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
              "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": HEAD,
              "vocab_size": VOCABULARY, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
              "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu"}
    config.update(more)
    return config


def mlp(prefix, inner, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return {prefix + gate + ".weight": [inner, HIDDEN], prefix + up + ".weight": [inner, HIDDEN],
            prefix + down + ".weight": [HIDDEN, inner]}


def attention(prefix, config, bias=False, head_norms=False):
    q, kv = HEADS * HEAD, config["num_key_value_heads"] * HEAD
    shapes = {prefix + "o_proj.weight": [HIDDEN, q]}
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        shapes[prefix + name + ".weight"] = [rows, HIDDEN]
        if bias:
            shapes[prefix + name + ".bias"] = [rows]
    if head_norms:
        shapes.update({prefix + "q_norm.weight": [HEAD], prefix + "k_norm.weight": [HEAD]})
    return shapes


def frame(config, norms=("input_layernorm", "post_attention_layernorm")):
    """Embeddings, head and norms."""
    shapes = {"model.embed_tokens.weight": [VOCABULARY, HIDDEN], "model.norm.weight": [HIDDEN]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [VOCABULARY, HIDDEN]
    for layer in range(LAYERS):
        for norm in norms:
            shapes["model.layers.%d.%s.weight" % (layer, norm)] = [HIDDEN]
    return shapes


def dense(config, norms=GEMMA_NORMS[:2], **more):
    shapes = frame(config, norms)
    for layer in range(LAYERS):
        prefix = "model.layers.%d." % layer
        shapes.update(attention(prefix + "self_attn.", config, **more))
        shapes.update(mlp(prefix + "mlp.", INNER))
    return shapes


def phi3(config):
    shapes = frame(config)
    kv = config["num_key_value_heads"] * HEAD
    for layer in range(LAYERS):
        prefix = "model.layers.%d." % layer
        shapes[prefix + "self_attn.qkv_proj.weight"] = [HEADS * HEAD + 2 * kv, HIDDEN]
        shapes[prefix + "self_attn.o_proj.weight"] = [HIDDEN, HEADS * HEAD]
        shapes[prefix + "mlp.gate_up_proj.weight"] = [2 * INNER, HIDDEN]
        shapes[prefix + "mlp.down_proj.weight"] = [HIDDEN, INNER]
    return shapes


def mixture(config, place, inner, names=("gate_proj", "up_proj", "down_proj"), **more):
    """Four experts in every layer."""
    shapes = frame(config)
    for layer in range(LAYERS):
        prefix = "model.layers.%d." % layer
        shapes.update(attention(prefix + "self_attn.", config, **more))
        shapes[prefix + place + "gate.weight"] = [4, HIDDEN]
        for expert in range(4):
            shapes.update(mlp("%s%sexperts.%d." % (prefix, place, expert), inner, names))
    return shapes


def shared_mixture(config):
    """Qwen2-MoE has an expert for every token beside the others."""
    shapes = mixture(config, "mlp.", 128, bias=True)
    for layer in range(LAYERS):
        prefix = "model.layers.%d.mlp." % layer
        shapes[prefix + "shared_expert_gate.weight"] = [1, HIDDEN]
        shapes.update(mlp(prefix + "shared_expert.", INNER))
    return shapes


def gpt_oss(config):
    """Experts in one tensor of a layer, in 16 bit."""
    shapes = frame(config)
    head = config["head_dim"]
    q, kv = HEADS * head, config["num_key_value_heads"] * head
    for layer in range(LAYERS):
        prefix = "model.layers.%d." % layer
        for name, out, inner in (("q", q, HIDDEN), ("k", kv, HIDDEN), ("v", kv, HIDDEN),
                                 ("o", HIDDEN, q)):
            shapes["%sself_attn.%s_proj.weight" % (prefix, name)] = [out, inner]
            shapes["%sself_attn.%s_proj.bias" % (prefix, name)] = [out]
        shapes[prefix + "self_attn.sinks"] = [HEADS]
        shapes[prefix + "mlp.router.weight"] = [4, HIDDEN]
        shapes[prefix + "mlp.router.bias"] = [4]
        shapes[prefix + "mlp.experts.gate_up_proj"] = [4, HIDDEN, 2 * INNER]
        shapes[prefix + "mlp.experts.gate_up_proj_bias"] = [4, 2 * INNER]
        shapes[prefix + "mlp.experts.down_proj"] = [4, INNER, HIDDEN]
        shapes[prefix + "mlp.experts.down_proj_bias"] = [4, HIDDEN]
    return shapes


def deepseek_v3(config):
    """As DeepSeek-V2, with a bias for the choice of experts and a layer that plain decoding does not
    use."""
    shapes = deepseek(config)
    shapes["model.layers.2.eh_proj.weight"] = [HIDDEN, 2 * HIDDEN]
    shapes["model.layers.2.enorm.weight"] = [HIDDEN]
    return config, ([(name, "BF16", shape) for name, shape in shapes.items()] +
                    [("model.layers.1.mlp.gate.e_score_correction_bias", "F32", [4])])


def deepseek(config):
    """Latent attention; a dense layer, then one of experts."""
    shapes = frame(config)
    q_rank, kv_rank, rope = 96, 64, 32
    for layer in range(LAYERS):
        prefix = "model.layers.%d." % layer
        for name, shape in (("q_a_proj", [q_rank, HIDDEN]), ("q_a_layernorm", [q_rank]),
                            ("q_b_proj", [HEADS * (HEAD + rope), q_rank]),
                            ("kv_a_proj_with_mqa", [kv_rank + rope, HIDDEN]),
                            ("kv_a_layernorm", [kv_rank]),
                            ("kv_b_proj", [HEADS * 2 * HEAD, kv_rank]),
                            ("o_proj", [HIDDEN, HEADS * HEAD])):
            shapes["%sself_attn.%s.weight" % (prefix, name)] = shape
    shapes.update(mlp("model.layers.0.mlp.", INNER))
    shapes["model.layers.1.mlp.gate.weight"] = [4, HIDDEN]
    shapes.update(mlp("model.layers.1.mlp.shared_experts.", 128))
    for expert in range(4):
        shapes.update(mlp("model.layers.1.mlp.experts.%d." % expert, 64))
    return shapes


def compressed(bits, group, activations=False):
    """A Llama in the format of compressed-tensors. group 0: one scale a row."""
    config = base("llama", "Llama")
    rows = []
    for name, shape in dense(config).items():
        module, (out, inner) = name[:-len(".weight")], (shape + [0])[:2]
        if "_proj" not in name:
            rows.append((name, "BF16", shape))
        elif activations:
            rows += [(name, "I8", shape), (module + ".weight_scale", "F32", [out, 1])]
        else:
            rows += [(module + ".weight_packed", "I32", [out, inner * bits // 32]),
                     (module + ".weight_scale", "BF16", [out, inner // group if group else 1]),
                     (module + ".weight_shape", "I64", [2])]
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False,
               "strategy": "group" if group else "channel"}
    if group:
        weights["group_size"] = group
    token = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "format": "int-quantized" if activations else "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
                                      "input_activations": token if activations else None}}}
    return config, rows


def plain(config, shapes):
    return config, [(name, "BF16", shape) for name, shape in shapes.items()]


def models():
    """name -> (config, [(tensor, dtype, shape)])"""
    llama = base("llama", "Llama")
    one_head = base("llama", "Llama", num_key_value_heads=1)
    qwen2 = base("qwen2", "Qwen2", tie_word_embeddings=True)
    qwen3 = base("qwen3", "Qwen3")
    gemma2 = base("gemma2", "Gemma2", tie_word_embeddings=True, query_pre_attn_scalar=HEAD,
                  hidden_activation="gelu_pytorch_tanh", sliding_window=64,
                  attn_logit_softcapping=None, final_logit_softcapping=None)
    phi = base("phi3", "Phi3", pad_token_id=0, original_max_position_embeddings=128)
    mixtral = base("mixtral", "Mixtral", num_local_experts=4, num_experts_per_tok=2)
    qwen3_moe = base("qwen3_moe", "Qwen3Moe", num_experts=4, num_experts_per_tok=2,
                     moe_intermediate_size=128, decoder_sparse_step=1, norm_topk_prob=True,
                     mlp_only_layers=[])
    latent = base("deepseek_v2", "DeepseekV2", num_key_value_heads=HEADS, kv_lora_rank=64,
                  q_lora_rank=96, qk_rope_head_dim=32, qk_nope_head_dim=HEAD, v_head_dim=HEAD,
                  n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=2,
                  moe_intermediate_size=64, first_k_dense_replace=1, moe_layer_freq=1, n_group=1,
                  topk_group=1, topk_method="greedy", routed_scaling_factor=1.0,
                  norm_topk_prob=False, scoring_func="softmax", aux_loss_alpha=0.0, seq_aux=True)
    mistral = base("mistral", "Mistral", sliding_window=None)
    gemma = base("gemma", "Gemma", tie_word_embeddings=True, hidden_activation="gelu_pytorch_tanh")
    gemma3 = base("gemma3_text", "Gemma3", tie_word_embeddings=True, query_pre_attn_scalar=HEAD,
                  hidden_activation="gelu_pytorch_tanh", sliding_window=64,
                  layer_types=["sliding_attention", "full_attention"], rope_local_base_freq=10000.0)
    qwen2_moe = base("qwen2_moe", "Qwen2Moe", num_experts=4, num_experts_per_tok=2,
                     moe_intermediate_size=128, shared_expert_intermediate_size=INNER,
                     decoder_sparse_step=1, norm_topk_prob=True, mlp_only_layers=[])
    gpt = base("gpt_oss", "GptOss", head_dim=64, num_local_experts=4, num_experts_per_tok=2,
               sliding_window=64, layer_types=["sliding_attention", "full_attention"],
               attention_bias=True, swiglu_limit=7.0,
               rope_scaling={"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "original_max_position_embeddings": 64, "truncate": False})
    deepseek3 = dict(latent, model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"],
                     topk_method="noaux_tc", scoring_func="sigmoid", num_nextn_predict_layers=1)
    return {
        "llama": plain(llama, dense(llama)),
        "mistral": plain(mistral, dense(mistral)),
        "gemma": plain(gemma, dense(gemma)),
        "gemma3_text": plain(gemma3, dense(gemma3, GEMMA_NORMS, head_norms=True)),
        "qwen2_moe": plain(qwen2_moe, shared_mixture(qwen2_moe)),
        "gpt_oss": plain(gpt, gpt_oss(gpt)),
        "deepseek_v3": deepseek_v3(deepseek3),
        "llama-one-kv-head": plain(one_head, dense(one_head)),
        "qwen2": plain(qwen2, dense(qwen2, bias=True)),
        "qwen3": plain(qwen3, dense(qwen3, head_norms=True)),
        "gemma2": plain(gemma2, dense(gemma2, GEMMA_NORMS)),
        "phi3": plain(phi, phi3(phi)),
        "mixtral": plain(mixtral, mixture(mixtral, "block_sparse_moe.", INNER, ("w1", "w3", "w2"))),
        "qwen3_moe": plain(qwen3_moe, mixture(qwen3_moe, "mlp.", 128, head_norms=True)),
        "deepseek_v2": plain(latent, deepseek(latent)),
        "w4a16-group-32": compressed(4, 32),
        "w4a16-group-128": compressed(4, 128),
        "w4a16-channel": compressed(4, 0),
        "w8a8": compressed(8, 0, activations=True),
    }


def write(folder, config, rows):
    """A true header, the shapes of packed weights, and else a hole: vLLM loads zeros."""
    os.makedirs(folder)
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f)
    tensors = {name: (dtype, shape, None) for name, dtype, shape in rows}
    for name, _, (out, words) in [r for r in rows if r[0].endswith(".weight_packed")]:
        module = name[:-len(".weight_packed")]
        bits = config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"]
        tensors[module + ".weight_shape"] = ("I64", [2], mk.encode("I64", [out, words * 32 // bits]))
    mk.write_safetensors(os.path.join(folder, "model.safetensors"), tensors)

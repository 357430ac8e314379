"""Tiny random models of most types of transformers, made from their configuration classes, and inputs for them."""
import functools
import warnings
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAJOR = int(transformers.__version__.split(".")[0])

# Whatever a configuration calls its sizes. Rows are whole blocks of 64 wherever they can be:
# bitsandbytes reads others wrongly on a CPU (docs/interop.md). No size is the vocabulary's.
SIZES = {
    64: """hidden_size d_model n_embd dim embed_dim embedding_size projection_dim proj_dim q_lora_rank
        kv_lora_rank moe_intermediate_size shared_expert_intermediate_size cross_attention_hidden_size
        encoder_hidden_size out_hidden_size vision_output_dim word_embed_proj_dim shared_embed_dim
        attention_hidden_size max_position_embeddings n_positions n_ctx max_source_positions
        max_target_positions max_seq_len seq_length max_2d_position_embeddings""",
    128: """intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim
        ffn_hidden_size d_inner""",
    2: """num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers
        num_decoder_layers num_encoder_layers depth num_experts_per_tok moe_k type_vocab_size
        num_key_value_heads n_head_kv num_kv_heads""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads attention_heads num_experts num_local_experts n_routed_experts
        moe_num_experts""",
    16: """head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim patch_size sliding_window
        attention_window""",
    1: "n_shared_experts moe_num_shared_experts n_group topk_group first_k_dense_replace "
       "num_global_layers",
    32: "image_size",
    160: "vocab_size",
}
SIZES = {name: n for n, names in SIZES.items() for name in names.split()}
TOKENS = {name: i for i, name in enumerate(
    "pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id "
    "boi_token_id eoi_token_id vision_start_token_id vision_end_token_id image_token_id "
    "video_token_id audio_token_id image_token_index audio_token_index".split())}
TOKENS |= {"decoder_start_token_id": 0, "forced_eos_token_id": 2}


def shrunk(config):
    """Arguments that make a configuration of this class tiny."""
    out = {}
    for key, value in config.to_dict().items():
        try:
            part = getattr(config, key, None)
        except Exception:  # a size that varies from layer to layer
            part = None
        if isinstance(part, transformers.PretrainedConfig):
            out[key] = {"model_type": part.model_type, **shrunk(part)}
        elif key in TOKENS:
            out[key] = TOKENS[key]
        elif key in SIZES and isinstance(value, int) and not isinstance(value, bool):
            out[key] = SIZES[key]
        elif key == "moe_intermediate_size":
            out[key] = 64
    return out


def merged(a, b):
    for key, value in b.items():
        a[key] = merged(a[key], value) if isinstance(value, dict) and key in a else value
    return a


CLASSES = ["SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT", "VISION_2_SEQ",
           "MULTIMODAL_LM", "MASKED_LM", "CAUSAL_LM", "CTC", "ZERO_SHOT_OBJECT_DETECTION",
           "OBJECT_DETECTION", "ZERO_SHOT_IMAGE_CLASSIFICATION", "IMAGE_CLASSIFICATION",
           "DEPTH_ESTIMATION", "SEMANTIC_SEGMENTATION"]


def class_of(config):
    names = [f"MODEL_FOR_{n}_MAPPING" for n in CLASSES] + ["MODEL_MAPPING"]
    for mapping in (getattr(modeling_auto, name, {}) for name in names):
        if type(config) in mapping.keys():
            kind = mapping[type(config)]
            return kind[0] if isinstance(kind, tuple) else kind
    raise LookupError("no class")


def made(config, kind, dtype=torch.bfloat16):
    config._attn_implementation = "eager"
    with torch.device("meta"):
        count = sum(p.numel() for p in kind._from_config(config, dtype=dtype).parameters())
    if count > 3e6:
        raise LookupError(f"{count} parameters are too many")
    model = kind._from_config(config, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = name.endswith("weight") and p.ndim == 1 and "norm" in name.lower()
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 + scale)
    return model


MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MROPE = {"rope_parameters" if MAJOR > 4 else "rope_scaling": MROPE | {"type": "mrope"}}
# Types by popularity, and what their configurations need beside sizes.
TYPES = {name: {} for name in """llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gemma3 phi phi3
    gpt2 gpt_neox opt bloom mpt stablelm starcoder2 gpt_bigcode olmo olmo2 granite cohere cohere2
    smollm3 glm glm4 exaone4 seed_oss ernie4_5 gpt_oss granitemoe mamba lfm2 bert roberta
    xlm-roberta distilbert albert electra deberta-v2 modernbert mpnet t5 mt5 bart mbart m2m_100
    marian pegasus whisper clip siglip vit dinov2 blip trocr llava llava_next llava_onevision
    paligemma idefics3 smolvlm internvl mistral3 qwen2_audio mixtral qwen2_moe qwen3_moe
    deepseek_v2 deepseek_v3 olmoe phimoe glm4_moe jamba minimax falcon""".split()}
TYPES |= {
    "gptj": {"rotary_dim": 16}, "codegen": {"rotary_dim": 16}, "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "qwen2_vl": {"text_config": MROPE}, "qwen2_5_vl": {"text_config": MROPE},
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1],
                               "rope_scaling": {"rope_type": "default"}},
               "vision_config": {"image_size": 28, "patch_size": 14, "num_global_layers": 1,
                                 "vision_output_dim": 192, "intermediate_layers_indices": [0, 1],
                                 "attention_heads": 4}},
    "grounding-dino": {"num_queries": 8, "backbone_config": {
        "model_type": "swin", "embed_dim": 64, "depths": [1, 1], "num_heads": [2, 4],
        "window_size": 4, "image_size": 32, "out_features": ["stage1", "stage2"]}},
}
@functools.lru_cache(maxsize=None)
def model_of(name):
    if name.startswith("vit-"):  # the names of both parts
        parts = [CONFIG_MAPPING[n](**shrunk(CONFIG_MAPPING[n]())) for n in name.split("-")]
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(*parts)
        config.pad_token_id, config.decoder_start_token_id = 0, 1
        return made(config, transformers.VisionEncoderDecoderModel)
    kind = CONFIG_MAPPING[name]
    config = kind(**merged(shrunk(kind()), TYPES.get(name, {})))
    return made(config, class_of(config))


# ---- files and inputs ---------------------------------------------------------------------------


class Files:
    """Tensors of a folder as qconv._values.Values gives them, for plain safetensors files."""

    def __init__(self, folder):
        self.at = {}
        for path in sorted(Path(folder).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    part = file.get_slice(name)
                    self.at[name] = (path, tuple(part.get_shape()), part.get_dtype())
        self.names = list(self.at)

    def shape(self, name):
        return self.at[name][1]

    def dtype(self, name):
        return self.at[name][2]

    def read(self, name, dtype=None):
        with safe_open(self.at[name][0], framework="pt") as file:  # opened anew: an open map stays in memory
            tensor = file.get_tensor(name)
        return tensor if dtype is None else tensor.to(dtype)

    def close(self):
        self.at = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# Default sizes would make moments of 8192 x 8192.
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
# transformers' own loops over chunks take [rows, chunks, chunk, chunk, heads, states] of memory.
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
# What the zoo's checks of other formats leave out, and a stream computes too.
STREAMED = TYPES | {name: {} for name in """qwen3_next qwen3_5 qwen3_5_moe qwen3_5_text qwen3_5_moe_text bamba falcon_h1
    falcon_mamba granitemoehybrid recurrent_gemma arcee apertus glm4_moe_lite ernie4_5_moe t5gemma
    switch_transformers longt5 umt5 led helium persimmon xglm biogpt xlnet roformer rembert megatron-bert nystromformer
    ernie splinter blenderbot plbart olmo3 flex_olmo minimax_m2 llama4_text seed_oss""".split()} | {
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "gemma3": {"mm_tokens_per_image": 4},
    "bamba": MAMBA, "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]}, "falcon_h1": MAMBA | {"mamba_d_ssm": 128},
    "jamba": {"use_mamba_kernels": False},
    "gemma3n_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 160,
                     "hidden_size_per_layer_input": 16, "laurel_rank": 16, "activation_sparsity_pattern": [0.0] * 6,
                     "intermediate_size": [128] * 6,
                     "layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma4_text": {"num_hidden_layers": 6, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 160,
                    "hidden_size_per_layer_input": 16, "head_dim": 16, "global_head_dim": 16,
                    "layer_types": ["sliding_attention", "full_attention"] * 3},
    "qwen3_5": {"text_config": LINEAR}, "qwen3_5_moe": {"text_config": LINEAR},
    "qwen3_5_text": LINEAR, "qwen3_5_moe_text": LINEAR,
    "qwen3_next": LINEAR | {"num_experts": 4, "layer_types": ["linear_attention", "full_attention"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 8,
               "mamba_d_state": 16, "chunk_size": 16, "num_key_value_heads": 4, "attention_hidden_size": 128,
               "attention_head_dim": 32},
    "grounding-dino": None,
}
STREAMED = {name: more for name, more in STREAMED.items() if more is not None}


class NotMade(Exception):
    """transformers does not make, save or compute the tiny model of a type."""


def save(name, folder):
    """Saves the tiny model of a type in float32 and returns its class, or raises what making it raised."""
    kind = CONFIG_MAPPING[name]
    config = kind(**merged(shrunk(kind()), STREAMED.get(name, {})))
    model = made(config, class_of(config), torch.float32)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(folder)
    return type(model)


ROWS, LENGTH = 5, 12  # a prime number of rows that no configuration here holds as a size


def inputs(config, rows=ROWS, tokens=LENGTH):
    """Arguments of forward for a tiny model: text, or what its type takes beside it."""
    generator = torch.Generator().manual_seed(7)

    def noise(*shape):
        return torch.randn(rows, *shape, generator=generator)
    ids = torch.randint(20, 150, (rows, tokens), generator=generator)
    name = config.model_type
    if name in ("vit", "dinov2"):
        return {"pixel_values": noise(3, 32, 32)}
    if name in ("clip", "siglip", "blip"):
        return {"input_ids": ids, "pixel_values": noise(3, 32, 32)}
    if name == "whisper":
        return {"input_features": noise(config.num_mel_bins, 128), "decoder_input_ids": ids[:, :7]}
    if name in ("llava", "gemma3", "paligemma"):
        vision = config.vision_config
        count = (vision.image_size // vision.patch_size) ** 2
        if name == "gemma3":
            count = config.mm_tokens_per_image
        ids[:, 1:1 + count] = getattr(config, "image_token_id", None) or config.image_token_index
        out = {"input_ids": ids, "pixel_values": noise(3, vision.image_size, vision.image_size)}
        if name != "llava" and MAJOR > 4:
            out["token_type_ids"] = (ids == ids[0, 1]).long()
        return out
    if name == "mllama":
        vision = config.vision_config
        tiles = vision.max_num_tiles
        return {"input_ids": ids, "pixel_values": noise(1, tiles, 3, vision.image_size, vision.image_size),
                "aspect_ratio_ids": torch.ones(rows, 1, dtype=torch.long),
                "aspect_ratio_mask": torch.tensor([[[1] + [0] * (tiles - 1)]] * rows),
                "cross_attention_mask": torch.ones(rows, tokens, 1, tiles, dtype=torch.long)}
    if config.is_encoder_decoder if hasattr(config, "is_encoder_decoder") else False:
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    return {"input_ids": ids}

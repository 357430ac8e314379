/* Configurations of well-known models: the fields of their released config.json that say what the
 * tensors are and what a token costs. tests/unit/known/unit_known_models.c checks the parameter
 * counts, and docs/models.md says how a model is added. */
#include "convert/known/known_models.h"

#define TEXT(...) #__VA_ARGS__
/* Sizes in this order: hidden, intermediate, layers, heads, KV heads, vocabulary, context. */
/* clang-format off */
#define SIZES(h, i, l, a, kv, v, ctx)                                                              \
    "\"hidden_size\":" TEXT(h) ",\"intermediate_size\":" TEXT(i)                                   \
    ",\"num_hidden_layers\":" TEXT(l) ",\"num_attention_heads\":" TEXT(a)                          \
    ",\"num_key_value_heads\":" TEXT(kv) ",\"vocab_size\":" TEXT(v)                                \
    ",\"max_position_embeddings\":" TEXT(ctx)
#define MODEL(type, arch, ...)                                                                     \
    "{\"architectures\":[\"" arch "\"],\"model_type\":\"" type "\"," __VA_ARGS__ "}"
#define HEAD_DIM(n)  ",\"head_dim\":" TEXT(n)
#define BF16         ",\"torch_dtype\":\"bfloat16\""
#define F16          ",\"torch_dtype\":\"float16\""
#define F32          ",\"torch_dtype\":\"float32\""
#define TIED         ",\"tie_word_embeddings\":true"
#define UNTIED       ",\"tie_word_embeddings\":false"
#define WINDOW(n)    ",\"sliding_window\":" TEXT(n)
#define LLAMA(sizes) MODEL("llama", "LlamaForCausalLM", sizes UNTIED BF16)
#define LLAMA2(sizes) MODEL("llama", "LlamaForCausalLM", sizes UNTIED F16)
#define LLAMA32(sizes, dim)                                                                        \
    MODEL("llama", "LlamaForCausalLM", sizes HEAD_DIM(dim) TIED BF16)
#define LLAMA_TIED(sizes) MODEL("llama", "LlamaForCausalLM", sizes TIED BF16)
#define MISTRAL(sizes, window)                                                                     \
    MODEL("mistral", "MistralForCausalLM", sizes WINDOW(window) UNTIED BF16)
#define MIXTRAL(sizes)                                                                             \
    MODEL("mixtral", "MixtralForCausalLM",                                                         \
          sizes ",\"num_local_experts\":8,\"num_experts_per_tok\":2" WINDOW(null) UNTIED BF16)
#define QWEN2(sizes, tie)                                                                          \
    MODEL("qwen2", "Qwen2ForCausalLM", sizes ",\"use_sliding_window\":false" tie BF16)
#define QWEN3(sizes, tie)                                                                          \
    MODEL("qwen3", "Qwen3ForCausalLM",                                                             \
          sizes HEAD_DIM(128) ",\"attention_bias\":false,\"use_sliding_window\":false" tie BF16)
#define QWEN3_MOE(sizes, moe)                                                                      \
    MODEL("qwen3_moe", "Qwen3MoeForCausalLM",                                                      \
          sizes HEAD_DIM(128) ",\"attention_bias\":false,\"use_sliding_window\":false,"            \
                              "\"num_experts\":128,\"num_experts_per_tok\":8,"                     \
                              "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],"                  \
                              "\"moe_intermediate_size\":" TEXT(moe) UNTIED BF16)
#define GEMMA(sizes)                                                                               \
    MODEL("gemma", "GemmaForCausalLM", sizes HEAD_DIM(256) ",\"attention_bias\":false" BF16)
#define GEMMA2(sizes, dim, dtype)                                                                  \
    MODEL("gemma2", "Gemma2ForCausalLM",                                                           \
          sizes HEAD_DIM(dim) WINDOW(4096) ",\"attention_bias\":false" dtype)
#define SLIDE_FULL(n)  SLIDE_FULL_##n
#define SLIDE_FULL_1   "\"sliding_attention\",\"full_attention\""
#define SLIDE_FULL_6   SLIDE_FULL_1 "," SLIDE_FULL_1 "," SLIDE_FULL_1 "," SLIDE_FULL_1 "," \
                       SLIDE_FULL_1 "," SLIDE_FULL_1
#define SLIDE_FULL_12  SLIDE_FULL_6 "," SLIDE_FULL_6
#define SLIDE_FULL_18  SLIDE_FULL_12 "," SLIDE_FULL_6
#define GPT_OSS(sizes, experts, types)                                                             \
    MODEL("gpt_oss", "GptOssForCausalLM",                                                          \
          sizes HEAD_DIM(64) WINDOW(128) ",\"attention_bias\":true,\"num_local_experts\":" TEXT(   \
              experts) ",\"num_experts_per_tok\":4,\"layer_types\":[" types "]" UNTIED             \
                       ",\"quantization_config\":{\"quant_method\":\"mxfp4\","                     \
                       "\"modules_to_not_convert\":[\"model.layers.*.self_attn\","                 \
                       "\"model.layers.*.mlp.router\",\"model.embed_tokens\",\"lm_head\"]}")
#define FP8                                                                                        \
    ",\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","                              \
    "\"activation_scheme\":\"dynamic\",\"weight_block_size\":[128,128]}"
#define LATENT                                                                                     \
    ",\"kv_lora_rank\":512,\"qk_nope_head_dim\":128,\"qk_rope_head_dim\":64,\"v_head_dim\":128,"   \
    "\"moe_layer_freq\":1,\"attention_bias\":false"
#define MISTRAL128(sizes)                                                                          \
    MODEL("mistral", "MistralForCausalLM", sizes HEAD_DIM(128) WINDOW(null) UNTIED BF16)
#define GEMMA3_TEXT(sizes, window)                                                                 \
    MODEL("gemma3_text", "Gemma3ForCausalLM",                                                      \
          sizes HEAD_DIM(256) WINDOW(window) ",\"sliding_window_pattern\":6" TIED BF16)
#define GEMMA3(sizes, dim)                                                                         \
    MODEL("gemma3", "Gemma3ForConditionalGeneration",                                              \
          "\"text_config\":{\"model_type\":\"gemma3_text\"," sizes HEAD_DIM(dim) WINDOW(1024)        \
          ",\"sliding_window_pattern\":6},\"vision_config\":{"                                      \
          "\"model_type\":\"siglip_vision_model\",\"hidden_size\":1152,"                            \
          "\"intermediate_size\":4304,\"num_hidden_layers\":27,\"num_attention_heads\":16,"         \
          "\"image_size\":896,\"patch_size\":14}" BF16)
#define GRANITE(sizes)                                                                             \
    MODEL("granite", "GraniteForCausalLM",                                                         \
          sizes ",\"attention_bias\":false,\"mlp_bias\":false" TIED BF16)
#define OLMO2(sizes, dtype)                                                                        \
    MODEL("olmo2", "Olmo2ForCausalLM", sizes ",\"attention_bias\":false" UNTIED dtype)
#define OLMO3(sizes)                                                                               \
    MODEL("olmo3", "Olmo3ForCausalLM",                                                             \
          sizes ",\"attention_bias\":false,\"sliding_window\":4096" UNTIED BF16)
#define GLM4(sizes, bias)                                                                          \
    MODEL("glm4", "Glm4ForCausalLM",                                                               \
          sizes HEAD_DIM(128) ",\"attention_bias\":" bias UNTIED BF16)
#define MAMBA4 "\"mamba\",\"mamba\",\"mamba\",\"mamba\""
#define MAMBA5 MAMBA4 ",\"mamba\""
#define SHARED4 "\"full\",\"shared\",\"shared\",\"shared\""
#define SHARED24 SHARED4 "," SHARED4 "," SHARED4 "," SHARED4 "," SHARED4 "," SHARED4
#define SHARED_INDEXERS                                                                            \
    ",\"indexer_types\":[\"full\",\"full\"," SHARED24 "," SHARED24 "," SHARED24 "," SHARED4 "]"
#define GLM5(ctx, more)                                                                            \
    MODEL("glm_moe_dsa", "GlmMoeDsaForCausalLM",                                                   \
          SIZES(6144, 12288, 78, 64, 64, 154880, ctx) ",\"kv_lora_rank\":512,"                     \
          "\"q_lora_rank\":2048,\"qk_nope_head_dim\":192,\"qk_rope_head_dim\":64,"                  \
          "\"v_head_dim\":256,\"index_head_dim\":128,\"index_n_heads\":32,\"index_topk\":2048,"     \
          "\"attention_bias\":false,\"n_routed_experts\":256,\"n_shared_experts\":1,"               \
          "\"num_experts_per_tok\":8,\"moe_intermediate_size\":2048,\"moe_layer_freq\":1,"          \
          "\"first_k_dense_replace\":3,\"num_nextn_predict_layers\":1" more UNTIED BF16)
#define GLM4_MOE(sizes, experts, moe, dense, norm)                                                 \
    MODEL("glm4_moe", "Glm4MoeForCausalLM",                                                        \
          sizes HEAD_DIM(128) ",\"attention_bias\":true,\"n_routed_experts\":" TEXT(experts)       \
          ",\"n_shared_experts\":1,\"num_experts_per_tok\":8,\"moe_intermediate_size\":" TEXT(moe)  \
          ",\"first_k_dense_replace\":" TEXT(dense) ",\"num_nextn_predict_layers\":1,"              \
          "\"use_qk_norm\":" norm UNTIED BF16)
/* Neither Qwen3-Next's nor GLM-4.6's config.json says what a layer for multi-token prediction has.
 * The fields for it below are other models', and their checkpoints have what these fields say. */
#define QWEN3_NEXT(prediction)                                                                     \
    MODEL("qwen3_next", "Qwen3NextForCausalLM",                                                    \
          SIZES(2048, 5120, 48, 16, 2, 151936, 262144) HEAD_DIM(256)                                \
          ",\"attention_bias\":false,\"full_attention_interval\":4,\"linear_conv_kernel_dim\":4,"   \
          "\"linear_key_head_dim\":128,\"linear_value_head_dim\":128,\"linear_num_key_heads\":16,"  \
          "\"linear_num_value_heads\":32,\"num_experts\":512,\"num_experts_per_tok\":10,"           \
          "\"moe_intermediate_size\":512,\"shared_expert_intermediate_size\":512,"                  \
          "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],"                                       \
          "\"mtp_num_hidden_layers\":" TEXT(prediction) UNTIED BF16)
#define QWEN35_MOE(h, l, a, values, experts, active, moe)                                          \
    MODEL("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration",                                     \
          "\"text_config\":{\"model_type\":\"qwen3_5_moe_text\",\"hidden_size\":" TEXT(h)             \
          ",\"num_hidden_layers\":" TEXT(l) ",\"num_attention_heads\":" TEXT(a)                     \
          ",\"num_key_value_heads\":2,\"vocab_size\":248320,\"max_position_embeddings\":262144"      \
          HEAD_DIM(256) ",\"attention_bias\":false,\"full_attention_interval\":4,"                  \
          "\"linear_conv_kernel_dim\":4,\"linear_key_head_dim\":128,\"linear_value_head_dim\":128," \
          "\"linear_num_key_heads\":16,\"linear_num_value_heads\":" TEXT(values)                    \
          ",\"num_experts\":" TEXT(experts) ",\"num_experts_per_tok\":" TEXT(active)                \
          ",\"moe_intermediate_size\":" TEXT(moe) ",\"shared_expert_intermediate_size\":" TEXT(moe) \
          ",\"mlp_only_layers\":[],\"mtp_num_hidden_layers\":1" BF16                                \
          "},\"vision_config\":{\"model_type\":\"qwen3_5_moe\"," VISION35(1152, 4304, 27, h)           \
          ",\"in_channels\":3,\"num_position_embeddings\":2304,\"patch_size\":16,"                  \
          "\"spatial_merge_size\":2,\"temporal_patch_size\":2}" UNTIED)
#define QWEN35(sizes, values, vision, tie)                                                         \
    MODEL("qwen3_5", "Qwen3_5ForConditionalGeneration",                                            \
          "\"text_config\":{\"model_type\":\"qwen3_5_text\"," sizes HEAD_DIM(256)                    \
          ",\"attention_bias\":false,\"full_attention_interval\":4,\"linear_conv_kernel_dim\":4,"   \
          "\"linear_key_head_dim\":128,\"linear_value_head_dim\":128,\"linear_num_key_heads\":16,"  \
          "\"linear_num_value_heads\":" TEXT(values) ",\"mtp_num_hidden_layers\":1" BF16            \
          "},\"vision_config\":{\"model_type\":\"qwen3_5\"," vision                                 \
          ",\"in_channels\":3,\"num_position_embeddings\":2304,\"patch_size\":16,"                  \
          "\"spatial_merge_size\":2,\"temporal_patch_size\":2}" tie)
#define VISION35(h, i, d, out)                                                                     \
    "\"hidden_size\":" TEXT(h) ",\"intermediate_size\":" TEXT(i) ",\"depth\":" TEXT(d)             \
    ",\"num_heads\":16,\"out_hidden_size\":" TEXT(out)
#define NEOX(h, i, l, a, v)                                                                        \
    MODEL("gpt_neox", "GPTNeoXForCausalLM", SIZES(h, i, l, a, a, v, 2048) UNTIED F16)
#define GPT2(l, a, h)                                                                              \
    MODEL("gpt2", "GPT2LMHeadModel",                                                               \
          "\"n_layer\":" TEXT(l) ",\"n_head\":" TEXT(a) ",\"n_embd\":" TEXT(h)                       \
          ",\"n_positions\":1024,\"vocab_size\":50257" F32)
#define LLAMA4(ctx, step, experts)                                                                  \
    MODEL("llama4", "Llama4ForConditionalGeneration",                                              \
          "\"text_config\":{\"model_type\":\"llama4_text\","                                         \
          SIZES(5120, 8192, 48, 40, 8, 202048, ctx) HEAD_DIM(128)                                   \
          ",\"attention_bias\":false,\"attention_chunk_size\":8192,\"intermediate_size_mlp\":16384," \
          "\"interleave_moe_layer_step\":" TEXT(step) ",\"num_local_experts\":" TEXT(experts)       \
          ",\"num_experts_per_tok\":1" BF16                                                          \
          "},\"vision_config\":{\"model_type\":\"llama4_vision_model\",\"hidden_size\":1408,"         \
          "\"image_size\":336,\"intermediate_size\":5632,\"num_attention_heads\":16,"               \
          "\"num_channels\":3,\"num_hidden_layers\":34,\"patch_size\":14,"                          \
          "\"projector_input_dim\":4096,\"projector_output_dim\":4096}" UNTIED BF16)
#define PHI3(ctx, window)                                                                          \
    MODEL("phi3", "Phi3ForCausalLM",                                                               \
          SIZES(3072, 8192, 32, 32, 32, 32064, ctx) WINDOW(window) UNTIED BF16)

static const char llama2_7b[] = LLAMA2(SIZES(4096, 11008, 32, 32, 32, 32000, 4096));
static const char llama2_13b[] = LLAMA2(SIZES(5120, 13824, 40, 40, 40, 32000, 4096));
static const char llama2_70b[] = LLAMA2(SIZES(8192, 28672, 80, 64, 8, 32000, 4096));
static const char llama3_8b[] = LLAMA(SIZES(4096, 14336, 32, 32, 8, 128256, 8192));
static const char llama3_70b[] = LLAMA(SIZES(8192, 28672, 80, 64, 8, 128256, 8192));
static const char llama31_8b[] = LLAMA(SIZES(4096, 14336, 32, 32, 8, 128256, 131072));
static const char llama31_70b[] = LLAMA(SIZES(8192, 28672, 80, 64, 8, 128256, 131072));
static const char llama31_405b[] = LLAMA(SIZES(16384, 53248, 126, 128, 8, 128256, 131072));
static const char llama32_1b[] = LLAMA32(SIZES(2048, 8192, 16, 32, 8, 128256, 131072), 64);
static const char llama32_3b[] = LLAMA32(SIZES(3072, 8192, 28, 24, 8, 128256, 131072), 128);
static const char deepseek_7b[] = LLAMA(SIZES(4096, 11008, 30, 32, 32, 102400, 4096));
static const char llama32_11b_vision[] = "{\"architectures\":[\"MllamaForConditionalGeneration\"],"
    "\"model_type\":\"mllama\",\"torch_dtype\":\"bfloat16\",\"text_config\":"
    "{\"model_type\":\"mllama_text_model\"," SIZES(4096, 14336, 40, 32, 8, 128256, 131072)
    ",\"cross_attention_layers\":[3,8,13,18,23,28,33,38]" UNTIED BF16 "},\"vision_config\":"
    "{\"model_type\":\"mllama_vision_model\",\"hidden_size\":1280,\"intermediate_size\":5120,"
    "\"num_hidden_layers\":32,\"num_global_layers\":8,\"attention_heads\":16,\"image_size\":560,"
    "\"patch_size\":14,\"num_channels\":3,\"max_num_tiles\":4,\"vision_output_dim\":7680,"
    "\"supported_aspect_ratios\":[[1,1],[1,2],[1,3],[1,4],[2,1],[2,2],[3,1],[4,1]]}}";
static const char llama4_scout[] = LLAMA4(10485760, 1, 16);
static const char llama4_maverick[] = LLAMA4(1048576, 2, 128);
static const char mistral_7b_v1[] = MISTRAL(SIZES(4096, 14336, 32, 32, 8, 32000, 32768), 4096);
static const char mistral_7b_v2[] = MISTRAL(SIZES(4096, 14336, 32, 32, 8, 32000, 32768), null);
static const char mistral_7b_v3[] = MISTRAL(SIZES(4096, 14336, 32, 32, 8, 32768, 32768), null);
static const char mixtral_8x7b[] = MIXTRAL(SIZES(4096, 14336, 32, 32, 8, 32000, 32768));
static const char mixtral_8x22b[] = MIXTRAL(SIZES(6144, 16384, 56, 48, 8, 32000, 65536));
static const char mixtral_8x22b_instruct[] = MIXTRAL(SIZES(6144, 16384, 56, 48, 8, 32768, 65536));
static const char qwen25_05b[] = QWEN2(SIZES(896, 4864, 24, 14, 2, 151936, 32768), TIED);
static const char qwen25_15b[] = QWEN2(SIZES(1536, 8960, 28, 12, 2, 151936, 32768), TIED);
static const char qwen25_3b[] = QWEN2(SIZES(2048, 11008, 36, 16, 2, 151936, 32768), TIED);
static const char qwen25_7b[] = QWEN2(SIZES(3584, 18944, 28, 28, 4, 152064, 131072), UNTIED);
static const char qwen25_7b_it[] = QWEN2(SIZES(3584, 18944, 28, 28, 4, 152064, 32768), UNTIED);
static const char qwen25_14b[] = QWEN2(SIZES(5120, 13824, 48, 40, 8, 152064, 131072), UNTIED);
static const char qwen25_14b_it[] = QWEN2(SIZES(5120, 13824, 48, 40, 8, 152064, 32768), UNTIED);
static const char qwen25_32b[] = QWEN2(SIZES(5120, 27648, 64, 40, 8, 152064, 131072), UNTIED);
static const char qwen25_32b_it[] = QWEN2(SIZES(5120, 27648, 64, 40, 8, 152064, 32768), UNTIED);
static const char qwen25_72b[] = QWEN2(SIZES(8192, 29568, 80, 64, 8, 152064, 131072), UNTIED);
static const char qwen25_72b_it[] = QWEN2(SIZES(8192, 29568, 80, 64, 8, 152064, 32768), UNTIED);
static const char qwen3_06b[] = QWEN3(SIZES(1024, 3072, 28, 16, 8, 151936, 40960), TIED);
static const char qwen3_17b[] = QWEN3(SIZES(2048, 6144, 28, 16, 8, 151936, 40960), TIED);
static const char qwen3_4b[] = QWEN3(SIZES(2560, 9728, 36, 32, 8, 151936, 40960), TIED);
static const char qwen3_8b[] = QWEN3(SIZES(4096, 12288, 36, 32, 8, 151936, 40960), UNTIED);
static const char qwen3_14b[] = QWEN3(SIZES(5120, 17408, 40, 40, 8, 151936, 40960), UNTIED);
static const char qwen3_32b[] = QWEN3(SIZES(5120, 25600, 64, 64, 8, 151936, 40960), UNTIED);
static const char qwen3_30b[] = QWEN3_MOE(SIZES(2048, 6144, 48, 32, 4, 151936, 40960), 768);
static const char qwen3_235b[] = QWEN3_MOE(SIZES(4096, 12288, 94, 64, 4, 151936, 40960), 1536);
static const char qwen3_4b_2507[] = QWEN3(SIZES(2560, 9728, 36, 32, 8, 151936, 262144), TIED);
static const char qwen3_30b_2507[] = QWEN3_MOE(SIZES(2048, 6144, 48, 32, 4, 151936, 262144), 768);
static const char qwen3_235b_2507[] =
    QWEN3_MOE(SIZES(4096, 12288, 94, 64, 4, 151936, 262144), 1536);
static const char qwen3_coder_480b[] = MODEL("qwen3_moe", "Qwen3MoeForCausalLM",
    SIZES(6144, 8192, 62, 96, 8, 151936, 262144) HEAD_DIM(128) ",\"attention_bias\":false,"
    "\"use_sliding_window\":false,\"num_experts\":160,\"num_experts_per_tok\":8,"
    "\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"moe_intermediate_size\":2560" UNTIED BF16);
static const char qwen3_next[] = QWEN3_NEXT(1);
static const char qwen3_coder_next[] = QWEN3_NEXT(0);
static const char qwen25_math_15b[] = QWEN2(SIZES(1536, 8960, 28, 12, 2, 151936, 4096), TIED);
static const char qwen25_math_7b[] = QWEN2(SIZES(3584, 18944, 28, 28, 4, 152064, 4096), UNTIED);
static const char qwen25_math_72b[] = QWEN2(SIZES(8192, 29568, 80, 64, 8, 152064, 4096), UNTIED);
static const char qwen25_7b_1m[] = QWEN2(SIZES(3584, 18944, 28, 28, 4, 152064, 1010000), UNTIED);
static const char qwen25_14b_1m[] = QWEN2(SIZES(5120, 13824, 48, 40, 8, 152064, 1010000), UNTIED);
static const char gemma_2b[] = GEMMA(SIZES(2048, 16384, 18, 8, 1, 256000, 8192));
static const char gemma_7b[] = GEMMA(SIZES(3072, 24576, 28, 16, 16, 256000, 8192));
static const char gemma2_2b[] = GEMMA2(SIZES(2304, 9216, 26, 8, 4, 256000, 8192), 256, F32);
static const char gemma2_2b_it[] = GEMMA2(SIZES(2304, 9216, 26, 8, 4, 256000, 8192), 256, BF16);
static const char gemma2_9b[] = GEMMA2(SIZES(3584, 14336, 42, 16, 8, 256000, 8192), 256, F32);
static const char gemma2_9b_it[] = GEMMA2(SIZES(3584, 14336, 42, 16, 8, 256000, 8192), 256, BF16);
static const char gemma2_27b[] = GEMMA2(SIZES(4608, 36864, 46, 32, 16, 256000, 8192), 128, F32);
static const char gemma2_27b_it[] = GEMMA2(SIZES(4608, 36864, 46, 32, 16, 256000, 8192), 128, BF16);
static const char gpt_oss_20b[] =
    GPT_OSS(SIZES(2880, 2880, 24, 64, 8, 201088, 131072), 32, SLIDE_FULL(12));
static const char gpt_oss_120b[] =
    GPT_OSS(SIZES(2880, 2880, 36, 64, 8, 201088, 131072), 128, SLIDE_FULL(18));
static const char deepseek_v2[] = MODEL("deepseek_v2", "DeepseekV2ForCausalLM",
    SIZES(5120, 12288, 60, 128, 128, 102400, 163840) LATENT ",\"q_lora_rank\":1536,"
    "\"n_routed_experts\":160,\"n_shared_experts\":2,\"num_experts_per_tok\":6,"
    "\"moe_intermediate_size\":1536,\"first_k_dense_replace\":1" UNTIED BF16);
static const char deepseek_v2_lite[] = MODEL("deepseek_v2", "DeepseekV2ForCausalLM",
    SIZES(2048, 10944, 27, 16, 16, 102400, 163840) LATENT ",\"q_lora_rank\":null,"
    "\"n_routed_experts\":64,\"n_shared_experts\":2,\"num_experts_per_tok\":6,"
    "\"moe_intermediate_size\":1408,\"first_k_dense_replace\":1" UNTIED BF16);
static const char deepseek_v3[] = MODEL("deepseek_v3", "DeepseekV3ForCausalLM",
    SIZES(7168, 18432, 61, 128, 128, 129280, 163840) LATENT ",\"q_lora_rank\":1536,"
    "\"n_routed_experts\":256,\"n_shared_experts\":1,\"num_experts_per_tok\":8,"
    "\"moe_intermediate_size\":2048,\"first_k_dense_replace\":3,\"num_nextn_predict_layers\":1"
    FP8 UNTIED BF16);
static const char deepseek_v32[] = MODEL("deepseek_v32", "DeepseekV32ForCausalLM",
    SIZES(7168, 18432, 61, 128, 128, 129280, 163840) LATENT ",\"q_lora_rank\":1536,"
    "\"n_routed_experts\":256,\"n_shared_experts\":1,\"num_experts_per_tok\":8,"
    "\"moe_intermediate_size\":2048,\"first_k_dense_replace\":3,\"num_nextn_predict_layers\":1,"
    "\"index_head_dim\":128,\"index_n_heads\":64,\"index_topk\":2048" FP8 UNTIED BF16);
static const char kimi_k2[] = MODEL("kimi_k2", "DeepseekV3ForCausalLM",
    SIZES(7168, 18432, 61, 64, 64, 163840, 131072) LATENT ",\"q_lora_rank\":1536,"
    "\"n_routed_experts\":384,\"n_shared_experts\":1,\"num_experts_per_tok\":8,"
    "\"moe_intermediate_size\":2048,\"first_k_dense_replace\":1" FP8 UNTIED BF16);
static const char phi3_mini_4k[] = PHI3(4096, 2047);
static const char phi3_mini_128k[] = PHI3(131072, 262144);
static const char phi4[] = MODEL("phi3", "Phi3ForCausalLM",
    SIZES(5120, 17920, 40, 40, 10, 100352, 16384) WINDOW(null) UNTIED BF16);
static const char phi4_mini[] = MODEL("phi3", "Phi3ForCausalLM",
    SIZES(3072, 8192, 32, 24, 8, 200064, 131072) WINDOW(262144) TIED BF16);
static const char phi4_reasoning[] = MODEL("phi3", "Phi3ForCausalLM",
    SIZES(5120, 17920, 40, 40, 10, 100352, 32768) WINDOW(null) UNTIED BF16);
static const char smollm2_135m[] = LLAMA_TIED(SIZES(576, 1536, 30, 9, 3, 49152, 8192));
static const char smollm2_360m[] = LLAMA_TIED(SIZES(960, 2560, 32, 15, 5, 49152, 8192));
static const char smollm2_17b[] = LLAMA_TIED(SIZES(2048, 8192, 24, 32, 32, 49152, 8192));
static const char tinyllama[] = LLAMA(SIZES(2048, 5632, 22, 32, 4, 32000, 2048));
static const char ministral_8b[] = MODEL("mistral", "MistralForCausalLM",
    SIZES(4096, 12288, 36, 32, 8, 131072, 32768) HEAD_DIM(128) WINDOW(32768) UNTIED BF16);
static const char mistral_large[] = MISTRAL128(SIZES(12288, 28672, 88, 96, 8, 32768, 32768));
static const char minimax_m2[] = MODEL("minimax_m2", "MiniMaxM2ForCausalLM",
    SIZES(3072, 1536, 62, 48, 8, 200064, 196608) HEAD_DIM(128) ",\"num_local_experts\":256,"
    "\"num_experts_per_tok\":8,\"use_qk_norm\":true" FP8 UNTIED);
static const char olmoe[] = MODEL("olmoe", "OlmoeForCausalLM",
    SIZES(2048, 1024, 16, 16, 16, 50304, 4096) ",\"attention_bias\":false,\"num_experts\":64,"
    "\"num_experts_per_tok\":8" UNTIED BF16);
static const char nemo[] = MISTRAL128(SIZES(5120, 14336, 40, 32, 8, 131072, 131072));
static const char mistral_small[] = MISTRAL128(SIZES(5120, 32768, 40, 32, 8, 131072, 32768));
static const char mistral_small_32[] = MODEL("mistral3", "Mistral3ForConditionalGeneration",
    "\"text_config\":{\"model_type\":\"mistral\"," SIZES(5120, 32768, 40, 32, 8, 131072, 131072)
    HEAD_DIM(128) WINDOW(null) "},\"spatial_merge_size\":2,\"multimodal_projector_bias\":false,"
    "\"vision_config\":{\"model_type\":\"pixtral\",\"hidden_size\":1024,"
    "\"intermediate_size\":4096,\"num_hidden_layers\":24,\"num_attention_heads\":16,"
    "\"head_dim\":64,\"image_size\":1540,\"patch_size\":14,\"num_channels\":3}" BF16);
static const char qwen35_2b[] = QWEN35(SIZES(2048, 6144, 24, 8, 2, 248320, 262144), 16,
    VISION35(1024, 4096, 24, 2048), TIED);
static const char qwen35_4b[] = QWEN35(SIZES(2560, 9216, 32, 16, 4, 248320, 262144), 32,
    VISION35(1024, 4096, 24, 2560), TIED);
static const char qwen35_9b[] = QWEN35(SIZES(4096, 12288, 32, 16, 4, 248320, 262144), 32,
    VISION35(1152, 4304, 27, 4096), UNTIED);
static const char qwen36_27b[] = QWEN35(SIZES(5120, 17408, 64, 24, 4, 248320, 262144), 48,
    VISION35(1152, 4304, 27, 5120), UNTIED);
static const char qwen35_35b[] = QWEN35_MOE(2048, 40, 16, 32, 256, 8, 512);
static const char qwen35_122b[] = QWEN35_MOE(3072, 48, 32, 64, 256, 8, 1024);
static const char qwen35_397b[] = QWEN35_MOE(4096, 60, 32, 64, 512, 10, 1024);
static const char gemma3_270m[] =
    GEMMA3_TEXT(SIZES(640, 2048, 18, 4, 1, 262144, 32768), 512);
static const char gemma3_1b[] = GEMMA3_TEXT(SIZES(1152, 6912, 26, 4, 1, 262144, 32768), 512);
static const char gemma3_4b[] = GEMMA3(SIZES(2560, 10240, 34, 8, 4, 262208, 131072), 256);
static const char gemma3_12b[] = GEMMA3(SIZES(3840, 15360, 48, 16, 8, 262208, 131072), 256);
static const char gemma3_27b[] = GEMMA3(SIZES(5376, 21504, 62, 32, 16, 262208, 131072), 128);
static const char r1_qwen_15b[] = QWEN2(SIZES(1536, 8960, 28, 12, 2, 151936, 131072), UNTIED);
static const char granite_2b[] = GRANITE(SIZES(2048, 8192, 40, 32, 8, 49159, 131072));
static const char granite_8b[] = GRANITE(SIZES(4096, 12800, 40, 32, 8, 49159, 131072));
static const char olmo2_1b[] = OLMO2(SIZES(2048, 8192, 16, 16, 16, 100352, 4096), BF16);
static const char olmo2_7b[] = OLMO2(SIZES(4096, 11008, 32, 32, 32, 100352, 4096), F32);
static const char olmo2_7b_it[] = OLMO2(SIZES(4096, 11008, 32, 32, 32, 100352, 4096), BF16);
static const char olmo2_13b[] = OLMO2(SIZES(5120, 13824, 40, 40, 40, 100352, 4096), F32);
static const char olmo2_32b[] = OLMO2(SIZES(5120, 27648, 64, 40, 8, 100352, 4096), F32);
static const char olmo3_7b[] = OLMO3(SIZES(4096, 11008, 32, 32, 32, 100278, 65536));
static const char olmo3_32b[] = OLMO3(SIZES(5120, 27648, 64, 40, 8, 100278, 65536));
static const char smollm3_3b[] = MODEL("smollm3", "SmolLM3ForCausalLM",
    SIZES(2048, 11008, 36, 16, 4, 128256, 65536) ",\"use_sliding_window\":false" TIED BF16);
static const char glm4_9b[] = GLM4(SIZES(4096, 13696, 40, 32, 2, 151552, 32768), "true");
static const char glm45_air[] =
    GLM4_MOE(SIZES(4096, 10944, 46, 96, 8, 151552, 131072), 128, 1408, 1, "false");
static const char glm45[] =
    GLM4_MOE(SIZES(5120, 12288, 92, 96, 8, 151552, 131072), 160, 1536, 3, "true");
static const char glm47[] =
    GLM4_MOE(SIZES(5120, 12288, 92, 96, 8, 151552, 202752), 160, 1536, 3, "true");
static const char glm46[] =
    GLM4_MOE(SIZES(5120, 12288, 92, 96, 8, 151552, 202752), 160, 1536, 3,
             "true,\"mtp_use_dedicated_embeddings\":false");
static const char glm5[] = GLM5(202752, "");
static const char glm52[] = GLM5(1048576, SHARED_INDEXERS);
static const char glm53[] = GLM5(1048576, SHARED_INDEXERS FP8);
static const char granite4_h_small[] = MODEL("granitemoehybrid", "GraniteMoeHybridForCausalLM",
    SIZES(4096, 768, 40, 32, 8, 100352, 131072) ",\"layer_types\":[" MAMBA5 ",\"attention\","
    MAMBA5 "," MAMBA4 ",\"attention\"," MAMBA5 "," MAMBA4 ",\"attention\"," MAMBA5 "," MAMBA4
    ",\"attention\"," MAMBA4 "],\"attention_bias\":false,\"num_local_experts\":72,"
    "\"num_experts_per_tok\":10,\"shared_intermediate_size\":1536,\"mamba_n_heads\":128,"
    "\"mamba_d_head\":64,\"mamba_d_state\":128,\"mamba_n_groups\":1,\"mamba_d_conv\":4,"
    "\"mamba_expand\":2,\"mamba_conv_bias\":true,\"mamba_proj_bias\":false" TIED BF16);
static const char gpt2[] = GPT2(12, 12, 768);
static const char gpt2_medium[] = GPT2(24, 16, 1024);
static const char gpt2_large[] = GPT2(36, 20, 1280);
static const char gpt2_xl[] = GPT2(48, 25, 1600);
static const char pythia_70m[] = NEOX(512, 2048, 6, 8, 50304);
static const char pythia_160m[] = NEOX(768, 3072, 12, 12, 50304);
static const char pythia_410m[] = NEOX(1024, 4096, 24, 16, 50304);
static const char pythia_1b[] = NEOX(2048, 8192, 16, 8, 50304);
static const char pythia_14b[] = NEOX(2048, 8192, 24, 16, 50304);
static const char pythia_28b[] = NEOX(2560, 10240, 32, 32, 50304);
static const char pythia_69b[] = NEOX(4096, 16384, 32, 32, 50432);
static const char pythia_12b[] = NEOX(5120, 20480, 36, 40, 50688);
static const char bert_base[] = MODEL("bert", "BertForPreTraining",
    SIZES(768, 3072, 12, 12, 12, 30522, 512) ",\"type_vocab_size\":2" F32);
static const char bert_large[] = MODEL("bert", "BertForPreTraining",
    SIZES(1024, 4096, 24, 16, 16, 30522, 512) ",\"type_vocab_size\":2" F32);
static const char minilm_12[] = MODEL("bert", "BertModel",
    SIZES(384, 1536, 12, 12, 12, 30522, 512) ",\"type_vocab_size\":2" F32);
static const char minilm[] = MODEL("bert", "BertModel",
    SIZES(384, 1536, 6, 12, 12, 30522, 512) ",\"type_vocab_size\":2" F32);

/* clang-format on */

const qc_known_model qc_known_models[] = {
    {"meta-llama/Llama-2-7b-hf", llama2_7b},
    {"meta-llama/Llama-2-7b-chat-hf", llama2_7b},
    {"meta-llama/Llama-2-13b-hf", llama2_13b},
    {"meta-llama/Llama-2-13b-chat-hf", llama2_13b},
    {"meta-llama/Llama-2-70b-hf", llama2_70b},
    {"meta-llama/Llama-2-70b-chat-hf", llama2_70b},
    {"meta-llama/Meta-Llama-3-8B", llama3_8b},
    {"meta-llama/Meta-Llama-3-8B-Instruct", llama3_8b},
    {"meta-llama/Meta-Llama-3-70B", llama3_70b},
    {"meta-llama/Meta-Llama-3-70B-Instruct", llama3_70b},
    {"meta-llama/Llama-3.1-8B", llama31_8b},
    {"meta-llama/Llama-3.1-8B-Instruct", llama31_8b},
    {"meta-llama/Llama-3.1-70B", llama31_70b},
    {"meta-llama/Llama-3.1-70B-Instruct", llama31_70b},
    {"meta-llama/Llama-3.1-405B", llama31_405b},
    {"meta-llama/Llama-3.1-405B-Instruct", llama31_405b},
    {"meta-llama/Llama-3.2-1B", llama32_1b},
    {"meta-llama/Llama-3.2-1B-Instruct", llama32_1b},
    {"meta-llama/Llama-3.2-3B", llama32_3b},
    {"meta-llama/Llama-3.2-3B-Instruct", llama32_3b},
    {"meta-llama/Llama-3.2-11B-Vision", llama32_11b_vision},
    {"meta-llama/Llama-3.2-11B-Vision-Instruct", llama32_11b_vision},
    {"meta-llama/Llama-3.3-70B-Instruct", llama31_70b},
    {"meta-llama/Llama-4-Scout-17B-16E-Instruct", llama4_scout},
    {"mistralai/Mistral-7B-v0.1", mistral_7b_v1},
    {"mistralai/Mistral-7B-Instruct-v0.1", mistral_7b_v1},
    {"mistralai/Mistral-7B-Instruct-v0.2", mistral_7b_v2},
    {"mistralai/Mistral-7B-v0.3", mistral_7b_v3},
    {"mistralai/Mistral-7B-Instruct-v0.3", mistral_7b_v3},
    {"mistralai/Mixtral-8x7B-v0.1", mixtral_8x7b},
    {"mistralai/Mixtral-8x7B-Instruct-v0.1", mixtral_8x7b},
    {"mistralai/Mixtral-8x22B-v0.1", mixtral_8x22b},
    {"mistralai/Mixtral-8x22B-Instruct-v0.1", mixtral_8x22b_instruct},
    {"Qwen/Qwen2.5-0.5B", qwen25_05b},
    {"Qwen/Qwen2.5-0.5B-Instruct", qwen25_05b},
    {"Qwen/Qwen2.5-1.5B-Instruct", qwen25_15b},
    {"Qwen/Qwen2.5-3B", qwen25_3b},
    {"Qwen/Qwen2.5-3B-Instruct", qwen25_3b},
    {"Qwen/Qwen2.5-7B", qwen25_7b},
    {"Qwen/Qwen2.5-7B-Instruct", qwen25_7b_it},
    {"Qwen/Qwen2.5-14B", qwen25_14b},
    {"Qwen/Qwen2.5-14B-Instruct", qwen25_14b_it},
    {"Qwen/Qwen2.5-32B", qwen25_32b},
    {"Qwen/Qwen2.5-32B-Instruct", qwen25_32b_it},
    {"Qwen/Qwen2.5-72B", qwen25_72b},
    {"Qwen/Qwen2.5-72B-Instruct", qwen25_72b_it},
    {"Qwen/Qwen3-0.6B", qwen3_06b},
    {"Qwen/Qwen3-1.7B", qwen3_17b},
    {"Qwen/Qwen3-4B", qwen3_4b},
    {"Qwen/Qwen3-8B", qwen3_8b},
    {"Qwen/Qwen3-14B", qwen3_14b},
    {"Qwen/Qwen3-32B", qwen3_32b},
    {"Qwen/Qwen3-30B-A3B", qwen3_30b},
    {"Qwen/Qwen3-235B-A22B", qwen3_235b},
    {"google/gemma-2-2b", gemma2_2b},
    {"google/gemma-2-2b-it", gemma2_2b_it},
    {"google/gemma-2-9b", gemma2_9b},
    {"google/gemma-2-9b-it", gemma2_9b_it},
    {"google/gemma-2-27b", gemma2_27b},
    {"google/gemma-2-27b-it", gemma2_27b_it},
    {"openai/gpt-oss-20b", gpt_oss_20b},
    {"openai/gpt-oss-120b", gpt_oss_120b},
    {"deepseek-ai/deepseek-llm-7b-base", deepseek_7b},
    {"deepseek-ai/deepseek-llm-7b-chat", deepseek_7b},
    {"deepseek-ai/DeepSeek-V2", deepseek_v2},
    {"deepseek-ai/DeepSeek-V2-Chat", deepseek_v2},
    {"deepseek-ai/DeepSeek-V2.5", deepseek_v2},
    {"deepseek-ai/DeepSeek-V2-Lite", deepseek_v2_lite},
    {"deepseek-ai/DeepSeek-V2-Lite-Chat", deepseek_v2_lite},
    {"deepseek-ai/DeepSeek-V3", deepseek_v3},
    {"deepseek-ai/DeepSeek-V3-0324", deepseek_v3},
    {"deepseek-ai/DeepSeek-R1", deepseek_v3},
    {"microsoft/Phi-3-mini-4k-instruct", phi3_mini_4k},
    {"microsoft/Phi-3-mini-128k-instruct", phi3_mini_128k},
    {"mistralai/Mistral-Nemo-Base-2407", nemo},
    {"mistralai/Mistral-Nemo-Instruct-2407", nemo},
    {"mistralai/Mistral-Small-24B-Base-2501", mistral_small},
    {"mistralai/Mistral-Small-24B-Instruct-2501", mistral_small},
    {"mistralai/Mistral-Small-3.2-24B-Instruct-2506", mistral_small_32},
    {"Qwen/Qwen2.5-Coder-0.5B", qwen25_05b},
    {"Qwen/Qwen2.5-Coder-0.5B-Instruct", qwen25_05b},
    {"Qwen/Qwen2.5-Coder-1.5B", qwen25_15b},
    {"Qwen/Qwen2.5-Coder-1.5B-Instruct", qwen25_15b},
    {"Qwen/Qwen2.5-Coder-3B", qwen25_3b},
    {"Qwen/Qwen2.5-Coder-3B-Instruct", qwen25_3b},
    {"Qwen/Qwen2.5-Coder-7B", qwen25_7b_it},
    {"Qwen/Qwen2.5-Coder-7B-Instruct", qwen25_7b_it},
    {"Qwen/Qwen2.5-Coder-14B", qwen25_14b_it},
    {"Qwen/Qwen2.5-Coder-14B-Instruct", qwen25_14b_it},
    {"Qwen/Qwen2.5-Coder-32B", qwen25_32b_it},
    {"Qwen/Qwen2.5-Coder-32B-Instruct", qwen25_32b_it},
    {"Qwen/QwQ-32B-Preview", qwen25_32b_it},
    {"Qwen/QwQ-32B", qwen25_32b},
    {"Qwen/Qwen3.5-2B", qwen35_2b},
    {"Qwen/Qwen3.5-4B", qwen35_4b},
    {"Qwen/Qwen3.5-9B", qwen35_9b},
    {"Qwen/Qwen3.6-27B", qwen36_27b},
    {"Qwen/Qwen3.8-27B", qwen36_27b},
    {"google/gemma-3-270m", gemma3_270m},
    {"google/gemma-3-270m-it", gemma3_270m},
    {"google/gemma-3-1b-pt", gemma3_1b},
    {"google/gemma-3-1b-it", gemma3_1b},
    {"google/gemma-3-4b-pt", gemma3_4b},
    {"google/gemma-3-4b-it", gemma3_4b},
    {"google/gemma-3-12b-pt", gemma3_12b},
    {"google/gemma-3-12b-it", gemma3_12b},
    {"google/gemma-3-27b-pt", gemma3_27b},
    {"google/gemma-3-27b-it", gemma3_27b},
    {"deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", r1_qwen_15b},
    {"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", qwen25_7b},
    {"deepseek-ai/DeepSeek-R1-Distill-Llama-8B", llama31_8b},
    {"deepseek-ai/DeepSeek-R1-Distill-Qwen-14B", qwen25_14b},
    {"deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", qwen25_32b},
    {"deepseek-ai/DeepSeek-R1-Distill-Llama-70B", llama31_70b},
    {"microsoft/phi-4", phi4},
    {"microsoft/Phi-4-mini-instruct", phi4_mini},
    {"ibm-granite/granite-3.3-2b-instruct", granite_2b},
    {"ibm-granite/granite-3.3-8b-instruct", granite_8b},
    {"allenai/OLMo-2-0425-1B-Instruct", olmo2_1b},
    {"allenai/OLMo-2-1124-7B", olmo2_7b},
    {"allenai/OLMo-2-1124-7B-Instruct", olmo2_7b_it},
    {"allenai/OLMo-2-1124-13B", olmo2_13b},
    {"allenai/OLMo-2-0325-32B", olmo2_32b},
    {"allenai/Olmo-3-1025-7B", olmo3_7b},
    {"allenai/Olmo-3-1125-32B", olmo3_32b},
    {"HuggingFaceTB/SmolLM3-3B", smollm3_3b},
    {"HuggingFaceTB/SmolLM3-3B-Base", smollm3_3b},
    {"zai-org/GLM-4-9B-0414", glm4_9b},
    {"zai-org/GLM-4.5-Air", glm45_air},
    {"zai-org/GLM-4.5", glm45},
    {"zai-org/GLM-4.7", glm47},
    {"openai-community/gpt2", gpt2},
    {"google-bert/bert-base-uncased", bert_base},
    {"sentence-transformers/all-MiniLM-L6-v2", minilm},
    {"meta-llama/Llama-4-Maverick-17B-128E-Instruct", llama4_maverick},
    {"nvidia/Llama-3.1-Nemotron-70B-Instruct-HF", llama31_70b},
    {"mistralai/Ministral-8B-Instruct-2410", ministral_8b},
    {"mistralai/Mistral-Large-Instruct-2407", mistral_large},
    {"Qwen/Qwen2.5-Math-1.5B", qwen25_math_15b},
    {"Qwen/Qwen2.5-Math-1.5B-Instruct", qwen25_math_15b},
    {"Qwen/Qwen2.5-Math-7B", qwen25_math_7b},
    {"Qwen/Qwen2.5-Math-7B-Instruct", qwen25_math_7b},
    {"Qwen/Qwen2.5-Math-72B", qwen25_math_72b},
    {"Qwen/Qwen2.5-Math-72B-Instruct", qwen25_math_72b},
    {"Qwen/Qwen2.5-7B-Instruct-1M", qwen25_7b_1m},
    {"Qwen/Qwen2.5-14B-Instruct-1M", qwen25_14b_1m},
    {"Qwen/Qwen3-4B-Instruct-2507", qwen3_4b_2507},
    {"Qwen/Qwen3-4B-Thinking-2507", qwen3_4b_2507},
    {"Qwen/Qwen3-30B-A3B-Instruct-2507", qwen3_30b_2507},
    {"Qwen/Qwen3-30B-A3B-Thinking-2507", qwen3_30b_2507},
    {"Qwen/Qwen3-Coder-30B-A3B-Instruct", qwen3_30b_2507},
    {"Qwen/Qwen3-235B-A22B-Instruct-2507", qwen3_235b_2507},
    {"Qwen/Qwen3-235B-A22B-Thinking-2507", qwen3_235b_2507},
    {"Qwen/Qwen3-Coder-480B-A35B-Instruct", qwen3_coder_480b},
    {"Qwen/Qwen3-Next-80B-A3B-Instruct", qwen3_next},
    {"Qwen/Qwen3-Next-80B-A3B-Thinking", qwen3_next},
    {"Qwen/Qwen3-Coder-Next", qwen3_coder_next},
    {"Qwen/Qwen3.5-27B", qwen36_27b},
    {"Qwen/Qwen3.5-35B-A3B", qwen35_35b},
    {"Qwen/Qwen3.6-35B-A3B", qwen35_35b},
    {"Qwen/Qwen3.5-122B-A10B", qwen35_122b},
    {"Qwen/Qwen3.5-397B-A17B", qwen35_397b},
    {"google/gemma-2b", gemma_2b},
    {"google/gemma-2b-it", gemma_2b},
    {"google/gemma-7b", gemma_7b},
    {"google/gemma-7b-it", gemma_7b},
    {"deepseek-ai/DeepSeek-Coder-V2-Lite-Base", deepseek_v2_lite},
    {"deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct", deepseek_v2_lite},
    {"deepseek-ai/DeepSeek-Coder-V2-Instruct", deepseek_v2},
    {"deepseek-ai/DeepSeek-R1-0528", deepseek_v3},
    {"deepseek-ai/DeepSeek-R1-Zero", deepseek_v3},
    {"deepseek-ai/DeepSeek-V3.1", deepseek_v3},
    {"deepseek-ai/DeepSeek-V3.1-Terminus", deepseek_v3},
    {"deepseek-ai/DeepSeek-V3.2", deepseek_v32},
    {"deepseek-ai/DeepSeek-V3.2-Exp", deepseek_v32},
    {"moonshotai/Kimi-K2-Instruct", kimi_k2},
    {"moonshotai/Kimi-K2-Base", kimi_k2},
    {"microsoft/Phi-3.5-mini-instruct", phi3_mini_128k},
    {"microsoft/Phi-4-reasoning", phi4_reasoning},
    {"microsoft/Phi-4-reasoning-plus", phi4_reasoning},
    {"microsoft/Phi-4-mini-reasoning", phi4_mini},
    {"allenai/OLMoE-1B-7B-0924", olmoe},
    {"HuggingFaceTB/SmolLM2-135M", smollm2_135m},
    {"HuggingFaceTB/SmolLM2-135M-Instruct", smollm2_135m},
    {"HuggingFaceTB/SmolLM2-360M", smollm2_360m},
    {"HuggingFaceTB/SmolLM2-360M-Instruct", smollm2_360m},
    {"HuggingFaceTB/SmolLM2-1.7B", smollm2_17b},
    {"HuggingFaceTB/SmolLM2-1.7B-Instruct", smollm2_17b},
    {"TinyLlama/TinyLlama-1.1B-Chat-v1.0", tinyllama},
    {"MiniMaxAI/MiniMax-M2", minimax_m2},
    {"MiniMaxAI/MiniMax-M2.1", minimax_m2},
    {"MiniMaxAI/MiniMax-M2.5", minimax_m2},
    {"MiniMaxAI/MiniMax-M2.7", minimax_m2},
    {"ibm-granite/granite-4.0-h-small", granite4_h_small},
    {"zai-org/GLM-4.6", glm46},
    {"zai-org/GLM-5", glm5},
    {"zai-org/GLM-5.1", glm5},
    {"zai-org/GLM-5.2", glm52},
    {"zai-org/GLM-5.3", glm53},
    {"openai-community/gpt2-medium", gpt2_medium},
    {"openai-community/gpt2-large", gpt2_large},
    {"openai-community/gpt2-xl", gpt2_xl},
    {"EleutherAI/pythia-70m", pythia_70m},
    {"EleutherAI/pythia-160m", pythia_160m},
    {"EleutherAI/pythia-410m", pythia_410m},
    {"EleutherAI/pythia-1b", pythia_1b},
    {"EleutherAI/pythia-1.4b", pythia_14b},
    {"EleutherAI/pythia-2.8b", pythia_28b},
    {"EleutherAI/pythia-6.9b", pythia_69b},
    {"EleutherAI/pythia-12b", pythia_12b},
    {"google-bert/bert-large-uncased", bert_large},
    {"sentence-transformers/all-MiniLM-L12-v2", minilm_12},
};
const unsigned qc_known_model_count = sizeof qc_known_models / sizeof *qc_known_models;

/* config.json of the families: defaults of each, both spellings of rotary parameters, windows,
 * every refusal; rotary frequencies against closed forms. */
#include "convert/family/family.h"
#include "tests/fixtures/test.h"

#include <math.h>

#define SIZES                                                                                      \
    "\"hidden_size\": 64, \"intermediate_size\": 96, \"num_hidden_layers\": 4, "                   \
    "\"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"vocab_size\": 100, "                \
    "\"max_position_embeddings\": 256"
#define LLAMA "\"model_type\": \"llama\", " SIZES

static qc_arena arena;
static qc_error err;

static qc_status read_config(qc_forward_shape *s, const char *text)
{
    qc_json *doc = NULL;
    assert_int_equal(qc_json_parse(&doc, text, strlen(text), 0, &err), QC_OK);
    qc_status st = qc_forward_shape_read(s, &arena, doc, &err);
    qc_json_destroy(doc);
    return st;
}

/* Borrowed strings must not outlive the document: model_type is a literal. */
static qc_forward_shape good(const char *members)
{
    char text[2048];
    qc_forward_shape s;
    (void)snprintf(text, sizeof text, "{%s}", members);
    if (read_config(&s, text) != QC_OK)
        fail_msg("%s: %s", text, err.msg);
    return s;
}

static void bad(const char *members, qc_status code, const char *word)
{
    char text[2048];
    qc_forward_shape s;
    (void)snprintf(text, sizeof text, "{%s}", members);
    assert_int_equal(read_config(&s, text), code);
    if (!strstr(err.msg, word))
        fail_msg("'%s' is not in: %s", word, err.msg);
}

static int head_norms(const qc_forward_shape *s)
{
    return s->names->vectors[QC_LAYER_Q_NORM] != NULL && s->names->vectors[QC_LAYER_K_NORM] != NULL;
}

TEST(families)
{
    qc_forward_shape s = good(LLAMA);
    assert_string_equal(s.config.model_type, "llama");
    assert_int_equal(s.config.head_dim, 16);
    assert_int_equal(s.config.kv_heads, 2);
    assert_int_equal(s.config.context, 256);
    assert_true(s.config.norm_eps == 1e-6 && s.config.bos == 1 && s.config.eos == 2);
    assert_false(s.qkv_bias || s.out_bias || s.mlp_bias || head_norms(&s) || s.config.tied);
    assert_true(s.rope.kind == QC_ROPE_DEFAULT && s.rope.theta == 10000.0);

    s = good(LLAMA ", \"architectures\": [\"LlamaForCausalLM\"], \"attention_bias\": true, "
                   "\"mlp_bias\": true, \"tie_word_embeddings\": true, \"head_dim\": 24, "
                   "\"bos_token_id\": null, \"eos_token_id\": [7, 8], \"rms_norm_eps\": 1e-5, "
                   "\"sliding_window\": 8, \"layer_types\": [\"sliding_attention\"]");
    assert_true(s.qkv_bias && s.out_bias && s.mlp_bias && s.config.tied);
    assert_true(s.config.head_dim == 24 && s.config.bos == -1 && s.config.eos == 7);
    assert_int_equal(s.windows[0], 0); /* Llama has none, whatever it says */

    /* Heads of keys that are not said: as many as of queries, or the family's own default. */
    s = good("\"model_type\": \"llama\", \"hidden_size\": 64, \"intermediate_size\": 96, "
             "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"vocab_size\": 9");
    assert_int_equal(s.config.kv_heads, 4);
    assert_int_equal(s.config.context, 0);
    s = good("\"model_type\": \"mistral\", \"hidden_size\": 64, \"intermediate_size\": 96, "
             "\"num_hidden_layers\": 1, \"num_attention_heads\": 16, \"vocab_size\": 9");
    assert_int_equal(s.config.kv_heads, 8);
    assert_int_equal(s.windows[0], 4096);

    s = good("\"model_type\": \"qwen2\", \"hidden_size\": 64, \"intermediate_size\": 96, "
             "\"num_hidden_layers\": 1, \"num_attention_heads\": 4, \"vocab_size\": 9, "
             "\"num_key_value_heads\": null");
    assert_int_equal(s.config.kv_heads, 4);

    s = good("\"model_type\": \"qwen2\", " SIZES);
    assert_true(s.qkv_bias && !s.out_bias && !head_norms(&s));
    assert_true(s.config.bos == -1 && s.config.eos == -1);
    s = good("\"model_type\": \"qwen3\", \"attention_bias\": true, \"mlp_bias\": true, " SIZES);
    assert_true(s.qkv_bias && s.out_bias && !s.mlp_bias && head_norms(&s));
    assert_int_equal(s.config.head_dim, 128);
}

#define OF(type) "\"model_type\": \"" type "\", " SIZES

/* What other families take where config.json is silent, and what they read. */
TEST(other_families)
{
    qc_forward_shape s = good(OF("gemma2"));
    assert_true(s.config.head_dim == 256 && s.config.tied && s.score_cap == 50.0);
    assert_true(s.logit_cap == 30.0 && s.score_scale == 1.0 / 16.0 && s.embedding_scale == 8.0);
    assert_true(s.windows[0] == 4096 && s.windows[1] == 0 && s.windows[2] == 4096);
    s = good(OF("gemma2") ", \"attn_logit_softcapping\": null, \"final_logit_softcapping\": 5, "
                          "\"query_pre_attn_scalar\": 4, \"layer_types\": [\"full_attention\", "
                          "\"full_attention\", \"full_attention\", \"sliding_attention\"]");
    assert_true(s.score_cap == 0.0 && s.logit_cap == 5.0 && s.score_scale == 0.5);
    assert_true(s.windows[0] == 0 && s.windows[3] == 4096);

    s = good(OF("gemma3_text") ", \"sliding_window\": 9, \"sliding_window_pattern\": 3");
    assert_true(s.score_cap == 0.0 && s.logit_cap == 0.0 && head_norms(&s));
    assert_true(s.windows[0] == 9 && s.windows[2] == 0 && s.windows[3] == 9);
    assert_true(s.turns[0] == QC_LAYER_TURNED_LOCAL && s.turns[2] == QC_LAYER_TURNED);
    assert_true(s.rope.theta == 1e6 && s.local_rope.theta == 1e4);
    s = good("\"model_type\": \"gemma3\", \"text_config\": {\"hidden_size\": 64, "
             "\"intermediate_size\": 96, \"num_hidden_layers\": 12, \"rope_scaling\": "
             "{\"factor\": 8.0, \"rope_type\": \"linear\"}}, \"eos_token_id\": [1, 106]");
    assert_true(s.config.heads == 8 && s.config.kv_heads == 4 && s.config.vocabulary == 262208);
    assert_true(s.rope.kind == QC_ROPE_LINEAR && s.local_rope.kind == QC_ROPE_DEFAULT);
    assert_true(s.windows[4] == 4096 && s.windows[5] == 0 && s.config.eos == 1);
    s = good(OF("gemma3_text") ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 5e5}, "
                               "\"sliding_attention\": {\"rope_theta\": 7e3}}");
    assert_true(s.rope.theta == 5e5 && s.local_rope.theta == 7e3);

    s = good(OF("phi3") ", \"sliding_window\": 5, \"partial_rotary_factor\": 0.75");
    assert_true(s.turned == 12 && s.windows[3] == 5 && s.config.norm_eps == 1e-5);
    s = good(OF("phi3") ", \"head_dim\": 4, \"original_max_position_embeddings\": 64, "
                        "\"rope_scaling\": {\"type\": \"su\", \"short_factor\": [1, 2], "
                        "\"long_factor\": [3, 4]}");
    assert_true(s.rope.kind == QC_ROPE_LONGROPE && s.rope.original == 64.0);
    assert_true(s.rope.short_factors[1] == 2.0f && s.rope.long_factors[0] == 3.0f);
    assert_true(fabs(s.rope.magnitude - sqrt(1.0 + log(4.0) / log(64.0))) < 1e-12);

    s = good(OF("granite") ", \"embedding_multiplier\": 12, \"residual_multiplier\": 0.2, "
                           "\"attention_multiplier\": 0.1, \"logits_scaling\": 3");
    assert_true(s.embedding_scale == 12.0 && s.residual_scale == 0.2 && s.score_scale == 0.1);
    assert_true(s.logit_divisor == 3.0);
    s = good(OF("olmo2"));
    assert_true(!s.names->vectors[QC_LAYER_INPUT_NORM] && !s.names->vectors[QC_LAYER_POST_NORM]);
    s = good(OF("smollm3"));
    assert_true(s.turns[2] == QC_LAYER_TURNED && s.turns[3] == QC_LAYER_UNTURNED);
    assert_true(s.rope.theta == 2e6 && s.windows[3] == 0);
    s = good(OF("smollm3") ", \"no_rope_layers\": [0, 1, 1, 1], \"use_sliding_window\": true, "
                           "\"sliding_window\": 3");
    assert_true(s.turns[0] == QC_LAYER_UNTURNED && s.windows[0] == 3 && s.windows[1] == 0);
    s = good(OF("gemma") ", \"hidden_act\": \"gelu\"");
    assert_true(s.embedding_scale == 8.0 && s.score_scale == 0.0 && s.config.kv_heads == 2);
    s = good(OF("olmo3") ", \"rope_theta\": 5e5, \"sliding_window\": 7, \"rope_scaling\": "
                         "{\"type\": \"linear\", \"factor\": 2}");
    assert_true(s.windows[2] == 7 && s.windows[3] == 0 && s.local_rope.theta == 5e5);
    assert_true(s.rope.kind == QC_ROPE_LINEAR && s.local_rope.kind == QC_ROPE_DEFAULT);
    s = good(OF("glm4"));
    assert_true(s.config.head_dim == 128 && s.turned == 64 && s.qkv_bias && !s.out_bias);

    s = good(OF("deepseek_v3") ", \"first_k_dense_replace\": 4, \"rope_scaling\": {\"type\": "
                               "\"yarn\", \"factor\": 4, \"mscale\": 1, \"mscale_all_dim\": 1}");
    assert_true(s.q_rank == 1536 && s.kv_rank == 512 && s.value_dim == 128 && s.turned == 64);
    assert_true(s.config.head_dim == 192 && s.config.kv_heads == 4 && s.rope.magnitude == 1.0);
    const double scale = 0.1 * log(4.0) + 1.0;
    assert_true(fabs(s.score_scale - scale * scale / sqrt(192.0)) < 1e-12);
    s = good(OF("deepseek_v2") ", \"first_k_dense_replace\": 4, \"q_lora_rank\": null, "
                               "\"num_experts_per_tok\": 2");
    assert_true(s.q_rank == 0 && strcmp(s.names->matrices[QC_LAYER_Q], "self_attn.q_proj") == 0);
}

#define GPT2                                                                                       \
    "\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 2, \"n_head\": 4, \"n_positions\": 32"

/* What is called otherwise, and what such models do without. */
TEST(with_layer_norms)
{
    qc_forward_shape s = good(GPT2 ", \"num_key_value_heads\": 2, \"head_dim\": 8");
    assert_true(s.config.hidden == 64 && s.config.layers == 2 && s.config.intermediate == 256);
    assert_true(s.config.kv_heads == 4 && s.config.head_dim == 16 && s.config.context == 32);
    assert_true(s.config.vocabulary == 50257 && s.config.tied && s.config.norm_eps == 1e-5);
    assert_true(s.qkv_bias && s.out_bias && s.mlp_bias && s.gate == QC_LAYER_GELU_TANH);
    assert_true(s.turned == 0 && s.turns[1] == QC_LAYER_UNTURNED && s.score_scale == 0.0);
    assert_string_equal(s.outer->positions, "wpe");
    s = good(GPT2 ", \"n_inner\": 96, \"layer_norm_epsilon\": 1e-3, \"activation_function\": "
                  "\"relu\", \"scale_attn_weights\": false, \"reorder_and_upcast_attn\": true");
    assert_true(s.config.intermediate == 96 && s.config.norm_eps == 1e-3);
    assert_true(s.gate == QC_LAYER_RELU && s.score_scale == 1.0);
    bad(GPT2 ", \"activation_function\": \"quick_gelu\"", QC_ERR_UNSUPPORTED,
        "activation_function is 'quick_gelu', and only gelu, gelu_new");
    bad(GPT2 ", \"activation_function\": 3", QC_ERR_UNSUPPORTED, "activation_function");
    bad(GPT2 ", \"scale_attn_by_inverse_layer_idx\": true", QC_ERR_UNSUPPORTED,
        "scale_attn_by_inverse_layer_idx is true, which is not computed");
    bad(GPT2 ", \"add_cross_attention\": true", QC_ERR_UNSUPPORTED, "add_cross_attention");
    bad("\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 2, \"n_head\": 4", QC_ERR_INPUT,
        "n_positions is missing");
    bad("\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_positions\": 9, \"n_head\": 4", QC_ERR_INPUT,
        "n_layer is missing");

    bad("\"model_type\": \"gpt2\", \"n_embd\": 4, \"n_layer\": 1, \"n_positions\": 9, \"n_head\": "
        "8",
        QC_ERR_INPUT, "n_embd 4 is no multiple of n_head 8");

    s = good(OF("gpt_neox")); /* without num_key_value_heads, whatever config.json says */
    assert_true(s.config.kv_heads == 4 && s.turned == 4 && s.rope.theta == 1e4 && s.parallel);
    assert_true(s.qkv_bias && s.out_bias && s.mlp_bias && s.gate == QC_LAYER_GELU);
    assert_true(!s.config.tied && s.config.norm_eps == 1e-5 && s.config.eos == 2);
    s = good(
        OF("gpt_neox") ", \"rotary_pct\": 0.5, \"rotary_emb_base\": 5e5, \"attention_bias\": "
                       "false, \"use_parallel_residual\": false, \"hidden_act\": \"gelu_fast\"");
    assert_true(s.turned == 8 && s.rope.theta == 5e5 && !s.parallel);
    assert_true(!s.qkv_bias && !s.out_bias && s.mlp_bias && s.gate == QC_LAYER_GELU_TANH);
    s = good(OF("gpt_neox") ", \"rope_parameters\": {\"rope_theta\": 7e3, "
                            "\"partial_rotary_factor\": 1.0, \"rope_type\": \"default\"}");
    assert_true(s.turned == 16 && s.rope.theta == 7e3);
    bad(OF("gpt_neox") ", \"hidden_act\": \"silu\"", QC_ERR_UNSUPPORTED, "hidden_act is 'silu'");
    bad(OF("gpt_neox") ", \"rotary_pct\": 0.2", QC_ERR_UNSUPPORTED, "turn 3 of the 16");
}

TEST(encoders)
{
    qc_forward_shape s = good(OF("bert") ", \"architectures\": [\"BertForMaskedLM\"]");
    assert_true(s.config.encoder && s.config.kv_heads == 4 && s.config.context == 256);
    assert_true(s.types == 2 && s.first_position == 0 && s.config.norm_eps == 1e-12);
    assert_true(s.qkv_bias && s.out_bias && s.mlp_bias && s.gate == QC_LAYER_GELU && !s.turned);
    assert_true(!s.outer->head && !s.outer->norm && s.outer->embedded);
    s = good(OF("roberta") ", \"type_vocab_size\": 1, \"layer_norm_eps\": 1e-5");
    assert_true(s.types == 1 && s.first_position == 2 && s.config.context == 254);
    s = good(OF("xlm-roberta") ", \"pad_token_id\": 0");
    assert_true(s.first_position == 1 && s.config.context == 255);
    s = good("\"model_type\": \"distilbert\", \"dim\": 64, \"n_layers\": 2, \"n_heads\": 4, "
             "\"hidden_dim\": 96, \"max_position_embeddings\": 32, \"activation\": \"relu\"");
    assert_true(s.config.hidden == 64 && s.types == 0 && s.gate == QC_LAYER_RELU);
    assert_true(s.config.norm_eps == 1e-12 && s.config.vocabulary == 30522);
    assert_false(good(OF("llama")).config.encoder);

    bad(OF("bert") ", \"architectures\": [\"RobertaModel\"]", QC_ERR_UNSUPPORTED,
        "the architecture of this bert is 'RobertaModel'; expected BertModel");
    bad(OF("bert") ", \"is_decoder\": true", QC_ERR_UNSUPPORTED,
        "is_decoder is true, and a bert is computed as an encoder only");
    bad(OF("roberta") ", \"add_cross_attention\": true", QC_ERR_UNSUPPORTED, "add_cross_attention");
    bad(OF("bert") ", \"position_embedding_type\": \"relative_key\"", QC_ERR_UNSUPPORTED,
        "position_embedding_type is 'relative_key', and only absolute is computed");
    bad(OF("bert") ", \"type_vocab_size\": 0", QC_ERR_INPUT, "type_vocab_size is 0");
    bad(OF("roberta") ", \"pad_token_id\": 255", QC_ERR_INPUT, "the first position is number 256");
}

/* The layers that look at an image are left out. */
TEST(image_layers)
{
    qc_forward_shape s = good(OF("llama"));
    assert_true(!s.numbers && qc_layer_number(&s, 3) == 3 && s.media_rows == 0);
    s = good(OF("mllama_text_model")); /* layer 3, where config.json does not say */
    assert_true(s.config.layers == 3 && qc_layer_number(&s, 2) == 2 && s.media_rows == 8);
    assert_true(s.rope.theta == 5e5 && s.config.norm_eps == 1e-5 && s.config.bos == 128000);
    s = good("\"model_type\": \"mllama\", \"text_config\": {\"hidden_size\": 64, "
             "\"intermediate_size\": 96, \"num_hidden_layers\": 40}");
    assert_true(s.config.layers == 32 && qc_layer_number(&s, 31) == 39);
    assert_true(qc_layer_number(&s, 3) == 4 && qc_layer_number(&s, 7) == 9);
    assert_true(s.config.heads == 32 && s.config.kv_heads == 8 && s.config.vocabulary == 128256);
    s = good(OF("mllama_text_model") ", \"cross_attention_layers\": [2, 0]");
    assert_true(s.config.layers == 2 && qc_layer_number(&s, 0) == 1);
    assert_int_equal(qc_layer_number(&s, 1), 3);
    s = good(OF("mllama_text_model") ", \"cross_attention_layers\": []");
    assert_true(s.config.layers == 4 && qc_layer_number(&s, 3) == 3);

    bad(OF("mllama"), QC_ERR_INPUT, "has no text_config");
    bad(OF("mllama_text_model") ", \"cross_attention_layers\": [4]", QC_ERR_INPUT,
        "cross_attention_layers names layer 4, but there are only 4 layers");
    bad(OF("mllama_text_model") ", \"cross_attention_layers\": [0, 1, 2, 3]", QC_ERR_UNSUPPORTED,
        "names all 4 layers");
    bad(OF("mllama_text_model") ", \"tie_word_embeddings\": true", QC_ERR_UNSUPPORTED,
        "tie_word_embeddings is true");
}

TEST(other_refusals)
{
    bad(OF("gemma2") ", \"hidden_activation\": \"gelu\"", QC_ERR_UNSUPPORTED,
        "hidden_activation is 'gelu', and only gelu_pytorch_tanh is computed");
    bad(OF("gemma3_text") ", \"use_bidirectional_attention\": true", QC_ERR_UNSUPPORTED,
        "use_bidirectional_attention");
    bad(OF("gemma3_text") ", \"rope_parameters\": {\"chunked_attention\": {}}", QC_ERR_UNSUPPORTED,
        "chunked_attention");
    bad(OF("gemma") ", \"hidden_act\": \"silu\"", QC_ERR_UNSUPPORTED, "hidden_act is 'silu'");
    bad(OF("gemma3"), QC_ERR_INPUT, "has no text_config");
    bad(OF("phi3") ", \"partial_rotary_factor\": 1.5", QC_ERR_UNSUPPORTED, "at most 1");
    bad(OF("phi3") ", \"partial_rotary_factor\": 0.2", QC_ERR_UNSUPPORTED, "turn 3 of the 16");
    bad(OF("phi3") ", \"rope_scaling\": {\"type\": \"su\", \"short_factor\": [1, 2], "
                   "\"long_factor\": [3, 4]}",
        QC_ERR_INPUT, "short_factor has 2 entries, and 8 pairs are turned");
    bad(OF("phi3") ", \"head_dim\": 2, \"rope_scaling\": {\"type\": \"longrope\", "
                   "\"short_factor\": [0], \"long_factor\": [3]}",
        QC_ERR_INPUT, "short_factor has 0");
    bad(OF("phi3") ", \"head_dim\": 2, \"original_max_position_embeddings\": 64, "
                   "\"rope_scaling\": {\"type\": \"longrope\", \"short_factor\": [1], "
                   "\"long_factor\": [3], \"factor\": 2}",
        QC_ERR_UNSUPPORTED, "the factor of longrope is 2, and the contexts make it 4");
    bad(OF("granite") ", \"logits_scaling\": 0", QC_ERR_INPUT, "logits_scaling");
    bad(OF("smollm3") ", \"no_rope_layers\": [1]", QC_ERR_INPUT, "1 entries");
    bad(OF("smollm3") ", \"no_rope_layers\": 1", QC_ERR_INPUT, "expected a list");
    bad(OF("deepseek_v3") ", \"first_k_dense_replace\": 4, \"rope_interleave\": false",
        QC_ERR_UNSUPPORTED, "rope_interleave");
}

TEST(windows)
{
    qc_forward_shape s = good("\"model_type\": \"mistral\", \"sliding_window\": 33, " SIZES);
    assert_true(s.windows[0] == 33 && s.windows[3] == 33);
    s = good("\"model_type\": \"mistral\", \"sliding_window\": null, " SIZES);
    assert_int_equal(s.windows[0], 0);
    s = good("\"model_type\": \"qwen2\", \"sliding_window\": 33, " SIZES);
    assert_int_equal(s.windows[3], 0); /* not in use */
    s = good("\"model_type\": \"qwen2\", \"use_sliding_window\": true, \"sliding_window\": 33, "
             "\"max_window_layers\": 3, " SIZES);
    assert_true(s.windows[2] == 0 && s.windows[3] == 33);
    s = good("\"model_type\": \"qwen3\", \"use_sliding_window\": true, \"sliding_window\": 33, "
             "\"layer_types\": [\"sliding_attention\", \"full_attention\", \"full_attention\", "
             "\"sliding_attention\"], " SIZES);
    assert_true(s.windows[0] == 33 && s.windows[1] == 0 && s.windows[3] == 33);

    bad("\"model_type\": \"qwen2\", \"layer_types\": [\"sliding_attention\"], " SIZES, QC_ERR_INPUT,
        "use_sliding_window");
    bad("\"model_type\": \"qwen2\", \"layer_types\": [\"full_attention\"], " SIZES, QC_ERR_INPUT,
        "1 entries");
    bad("\"model_type\": \"qwen2\", \"layer_types\": [\"linear_attention\"], " SIZES,
        QC_ERR_UNSUPPORTED, "linear_attention");
    bad("\"model_type\": \"qwen2\", \"layer_types\": 3, " SIZES, QC_ERR_INPUT, "layer_types");
    bad("\"model_type\": \"mistral\", \"sliding_window\": 0, " SIZES, QC_ERR_INPUT,
        "sliding_window");
}

TEST(refusals)
{
    qc_forward_shape s;
    assert_int_equal(qc_forward_shape_read(&s, &arena, NULL, &err), QC_ERR_UNSUPPORTED);
    bad(SIZES, QC_ERR_UNSUPPORTED, "expected a model_type that is computed (llama, mistral, ");
    static const char *const others[] = {"dbrx", "jamba", "mpt", "bloom", "llama4", "gemma3n"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        char text[512];
        (void)snprintf(text, sizeof text, "\"model_type\": \"%s\", " SIZES, others[i]);
        bad(text, QC_ERR_UNSUPPORTED, others[i]);
        assert_non_null(strstr(err.msg, "llama, mistral, qwen2, qwen3"));
    }
    bad(LLAMA ", \"architectures\": [\"LlamaForSequenceClassification\"]", QC_ERR_UNSUPPORTED,
        "LlamaForSequenceClassification");
    bad(LLAMA ", \"hidden_act\": \"gelu\"", QC_ERR_UNSUPPORTED, "gelu");
    bad(LLAMA ", \"tie_word_embeddings\": \"true\"", QC_ERR_INPUT, "tie_word_embeddings");
    bad(LLAMA ", \"head_dim\": 15", QC_ERR_UNSUPPORTED, "head_dim");
    bad(LLAMA ", \"partial_rotary_factor\": 0.5", QC_ERR_UNSUPPORTED, "partial_rotary_factor");
    bad(LLAMA ", \"rms_norm_eps\": 0", QC_ERR_INPUT, "rms_norm_eps");
    bad(LLAMA ", \"rms_norm_eps\": \"x\"", QC_ERR_INPUT, "rms_norm_eps");
    bad(LLAMA ", \"bos_token_id\": \"x\"", QC_ERR_INPUT, "bos_token_id");
    bad("\"model_type\": \"llama\"", QC_ERR_INPUT, "num_hidden_layers");
    bad("\"model_type\": \"llama\", \"num_hidden_layers\": 1", QC_ERR_INPUT, "hidden_size");
    bad("\"model_type\": \"llama\", \"num_hidden_layers\": 1, \"hidden_size\": 8, "
        "\"intermediate_size\": 8, \"num_attention_heads\": 3, \"num_key_value_heads\": 2, "
        "\"vocab_size\": 8",
        QC_ERR_INPUT, "no multiple");
}

TEST(rope_spellings)
{
    qc_forward_shape s = good(LLAMA ", \"rope_theta\": 5e5, \"rope_scaling\": {\"type\": "
                                    "\"linear\", \"factor\": 4.0}");
    assert_true(s.rope.kind == QC_ROPE_LINEAR && s.rope.theta == 5e5 && s.rope.factor == 4.0);
    s = good(LLAMA ", \"rope_theta\": 5e5, \"rope_scaling\": null, \"rope_parameters\": "
                   "{\"rope_type\": \"dynamic\", \"factor\": 2.0, \"rope_theta\": 7e5}");
    assert_true(s.rope.kind == QC_ROPE_DYNAMIC && s.rope.theta == 7e5);
    s = good(LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, "
                   "\"low_freq_factor\": 1, \"high_freq_factor\": 4, "
                   "\"original_max_position_embeddings\": 64}");
    assert_true(s.rope.kind == QC_ROPE_LLAMA3 && s.rope.original == 64.0 && s.rope.high == 4.0);
    s = good(LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4}");
    assert_true(s.rope.original == 256.0 && s.rope.beta_fast == 32.0 && s.rope.truncate);
    assert_true(fabs(s.rope.magnitude - (0.1 * log(4.0) + 1.0)) < 1e-12);
    s = good(LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, \"mscale\": 0.7, "
                   "\"mscale_all_dim\": 1.1, \"truncate\": false}");
    assert_true(fabs(s.rope.magnitude - (0.07 * log(4.0) + 1.0) / (0.11 * log(4.0) + 1.0)) < 1e-12);
    assert_false(s.rope.truncate);
    s = good(LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4, "
                   "\"attention_factor\": 1.5, \"mscale\": 0.7, \"mscale_all_dim\": 1.1}");
    assert_true(s.rope.magnitude == 1.5);
    s = good(LLAMA ", \"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 0.5}");
    assert_true(s.rope.magnitude == 1.0);

    bad(LLAMA ", \"rope_scaling\": {\"rope_type\": \"longrope\"}", QC_ERR_INPUT, "short_factor");
    bad(LLAMA ", \"rope_scaling\": {\"type\": \"mrope\"}", QC_ERR_UNSUPPORTED, "mrope");
    bad(LLAMA ", \"rope_scaling\": {\"type\": \"linear\"}", QC_ERR_INPUT, "factor is missing");
    bad(LLAMA ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": -1}", QC_ERR_INPUT, "factor");
    bad(LLAMA ", \"rope_parameters\": 3", QC_ERR_INPUT, "rope_parameters");
    bad(LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1}}",
        QC_ERR_UNSUPPORTED, "full_attention");
    bad(LLAMA ", \"rope_parameters\": {\"partial_rotary_factor\": 0.25}", QC_ERR_UNSUPPORTED,
        "partial_rotary_factor");
    bad(LLAMA ", \"rope_theta\": 0", QC_ERR_INPUT, "rope_theta");
    bad(LLAMA ", \"original_max_position_embeddings\": 32, \"rope_scaling\": {\"rope_type\": "
              "\"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 64}",
        QC_ERR_UNSUPPORTED, "original_max_position_embeddings");
    bad(LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8, "
              "\"low_freq_factor\": 4, \"high_freq_factor\": 4}",
        QC_ERR_INPUT, "high_freq_factor");
}

#define DIM 64u

static double plain(double theta, unsigned i)
{
    return pow(theta, -2.0 * i / DIM);
}

static void assert_near(float got, double want)
{
    if (!(fabs((double)got - want) <= 1e-6 * fabs(want)))
        fail_msg("%.9g, expected %.9g", (double)got, want);
}

TEST(frequencies)
{
    float f[DIM / 2];
    const double tau = 8.0 * atan(1.0);
    qc_rope r = {.kind = QC_ROPE_DEFAULT, .theta = 1e4, .factor = 4.0, .magnitude = 1.0};
    qc_rope_frequencies(&r, DIM, 0, f);
    for (unsigned i = 0; i < DIM / 2; i++)
        assert_near(f[i], plain(1e4, i));
    r.kind = QC_ROPE_LINEAR;
    qc_rope_frequencies(&r, DIM, 0, f);
    for (unsigned i = 0; i < DIM / 2; i++)
        assert_near(f[i], plain(1e4, i) / 4.0);

    r = (qc_rope){.kind = QC_ROPE_LLAMA3,
                  .theta = 5e5,
                  .factor = 8.0,
                  .original = 8192.0,
                  .low = 1.0,
                  .high = 4.0,
                  .magnitude = 1.0};
    qc_rope_frequencies(&r, DIM, 0, f);
    unsigned kept = 0, divided = 0, between = 0;
    for (unsigned i = 0; i < DIM / 2; i++) {
        double p = plain(5e5, i), turns = 8192.0 * p / tau;
        if (turns > 4.0) {
            assert_near(f[i], p);
            kept++;
        } else if (turns < 1.0) {
            assert_near(f[i], p / 8.0);
            divided++;
        } else {
            double smooth = (turns - 1.0) / 3.0;
            assert_near(f[i], (1.0 - smooth) * p / 8.0 + smooth * p);
            between++;
        }
    }
    assert_true(kept > 4 && divided > 4 && between > 1);

    /* With 4096 positions, dimensions below 32 * ln(4096 / (32 tau)) / ln 1e4 turn more than 32
     * times and stay, those beyond the same for one turn are divided, a ramp between. */
    r = (qc_rope){.kind = QC_ROPE_YARN,
                  .theta = 1e4,
                  .factor = 16.0,
                  .original = 4096.0,
                  .beta_fast = 32.0,
                  .beta_slow = 1.0,
                  .magnitude = 1.0,
                  .truncate = 1};
    qc_rope_frequencies(&r, DIM, 0, f);
    double low = floor(32.0 * log(4096.0 / (32.0 * tau)) / log(1e4));
    double high = ceil(32.0 * log(4096.0 / tau) / log(1e4));
    assert_true(low == 10.0 && high == 23.0);
    for (unsigned i = 0; i < DIM / 2; i++) {
        double ramp = fmin(fmax((i - low) / (high - low), 0.0), 1.0), p = plain(1e4, i);
        assert_near(f[i], p / 16.0 * ramp + p * (1.0 - ramp));
    }
}

TEST(table)
{
    const float f[2] = {1.0f, 0.25f};
    float c[6], s[6];
    const qc_rope r = {.magnitude = 1.5};
    qc_rope_table(&r, f, 4, 3, c, s);
    assert_true(c[0] == 1.5f && s[0] == 0.0f && c[1] == 1.5f);
    assert_near(c[2], 1.5 * cos(1.0));
    assert_near(s[4], 1.5 * sin(2.0));
    assert_near(s[5], 1.5 * sin(0.5));
}

/* The attention of mixtures: windows and defaults of their own. */
TEST(mixtures)
{
    qc_forward_shape s = good("\"model_type\": \"mixtral\", " SIZES);
    assert_true(s.rope.theta == 1e6 && s.config.norm_eps == 1e-5 && s.windows[0] == 0);
    assert_true(s.experts.names && s.experts.inner == 96);
    s = good("\"model_type\": \"mixtral\", \"sliding_window\": 5, " SIZES);
    assert_true(s.windows[0] == 5 && s.windows[3] == 5);
    s = good("\"model_type\": \"qwen2_moe\", \"sliding_window\": 0, \"layer_types\": "
             "[\"full_attention\", \"full_attention\"], " SIZES);
    assert_true(s.qkv_bias && !s.out_bias && !head_norms(&s) && s.windows[0] == 0);
    s = good("\"model_type\": \"qwen3_moe\", \"sliding_window\": 4, " SIZES);
    assert_true(!s.qkv_bias && head_norms(&s) && s.windows[3] == 0);
    s = good("\"model_type\": \"olmoe\", \"clip_qkv\": null, " SIZES);
    assert_true(head_norms(&s) && s.family->traits & QC_FAMILY_WIDE_NORMS);
    s = good("\"model_type\": \"glm4_moe\", " SIZES);
    assert_true(!head_norms(&s) && s.turned == 8 && !s.qkv_bias);
    s = good("\"model_type\": \"glm4_moe\", \"use_qk_norm\": true, \"attention_bias\": true, "
             "\"partial_rotary_factor\": 0.25, " SIZES);
    assert_true(head_norms(&s) && s.turned == 4 && s.qkv_bias && !s.out_bias);
    s = good("\"model_type\": \"gpt_oss\", " SIZES);
    assert_true(s.config.head_dim == 64 && s.qkv_bias && s.out_bias && s.rope.theta == 150000.0);
    assert_true(s.windows[0] == 128 && s.windows[1] == 0 && s.windows[2] == 128);
    bad("\"model_type\": \"qwen3_moe\", \"use_sliding_window\": true, " SIZES, QC_ERR_UNSUPPORTED,
        "not computed for a qwen3_moe");
    bad("\"model_type\": \"qwen2_moe\", \"layer_types\": [\"sliding_attention\"], " SIZES,
        QC_ERR_UNSUPPORTED, "not computed for a qwen2_moe");
    bad("\"model_type\": \"olmoe\", \"clip_qkv\": 8.0, " SIZES, QC_ERR_UNSUPPORTED, "clip_qkv");
}

int main(void)
{
    qc_arena_init(&arena);
    int failed = test_run_all(NULL);
    qc_arena_deinit(&arena);
    return failed;
}

#include "convert/families/type_table.h"

#include "convert/families/config_fields.h"

#include <string.h>

/* cmake/embed.cmake makes it of convert/families/model_types.txt, which explains it. */
extern const char qc_model_types[];

int qc_type_is(const char *word, const char *type)
{
    const size_t len = strlen(type), word_len = strlen(word);
    for (const char *line = qc_model_types; len > 0 && !strchr(type, ' ') && *line;
         line += *line == '\n') {
        const char *end = line + strcspn(line, "\n");
        const int named = strncmp(line, word, word_len) == 0 && line[word_len] == ' ';
        for (const char *t = line + word_len; named && t < end; t += strcspn(t, " \n")) {
            t++;
            if (strncmp(t, type, len) == 0 && (t[len] == ' ' || t[len] == '\n'))
                return 1;
        }
        line = end;
    }
    return 0;
}

/* ---- caches ---- */

/* Every period-th layer, beginning with `offset`; none where the period is 0. */
#define PERIOD(offset)                                                                             \
    "attn_layer_period?" offset "*(layer%attn_layer_period?" offset                                \
    "=attn_layer_offset?4%attn_layer_period?" offset ")"
#define EVERY(period) period "*!((layer+1)%" period ")" /* the last of each period */

#define WIDE       "mamba_expand?2*hidden"
#define MAMBA1     "(intermediate_size?+!intermediate_size?*expand?2*hidden)"
#define FALCON     "(mamba_d_ssm?+!mamba_d_ssm?*" WIDE ")"
#define NEMOTRON   "(mamba_num_heads?*mamba_head_dim?+!mamba_num_heads?*2*hidden)"
#define XLSTM_KEYS "((hidden/2+63)/64*64/heads)"

/* A gated delta rule: a convolution over queries, keys and values, and a matrix per head. */
#define DELTA_HEADS  "linear_num_value_heads|linear_num_heads?"
#define DELTA_KEY    "linear_key_head_dim|linear_head_dim?128"
#define DELTA_VALUES DELTA_HEADS "*linear_value_head_dim|linear_head_dim?128"

#define KEEPS(names, in_kind, out_kind, when_sum)                                                  \
    .types = names, .in = QC_LAYER_##in_kind, .out = QC_LAYER_##out_kind, .when = when_sum
#define SLIDES(names) KEEPS(names, FULL, SLIDING, "0")

/* In Mamba 2 the B and C of the groups also pass the convolution. xLSTM has a matrix, a normalizer
 * and a maximum per head; its qk_dim_factor and v_dim_factor are fractions, which are not read, and
 * all releases have their defaults, 1/2 and 1. RecurrentGemma's block_types, where they are there,
 * count instead of `when`. reformer and xlnet make keys and values anew from hidden states. */
static const qc_cache_row cache_rows[] = {
    {KEEPS(" mamba falcon_mamba ", STATE, STATE, NULL), .state = MAMBA1 "*conv_kernel?4",
     .f32_state = MAMBA1 "*state_size?16"},
    {KEEPS(" mamba2 ", STATE, STATE, NULL),
     .state = "(expand?2*hidden+2*n_groups?1*state_size?128)*conv_kernel?4",
     .f32_state = "expand?2*hidden*state_size?128"},
    {KEEPS(" rwkv ", STATE, STATE, NULL), .state = "2*hidden",
     .f32_state = "3*(attention_hidden_size?+!attention_hidden_size?*hidden)"},
    {KEEPS(" xlstm ", STATE, STATE, NULL), .f32_state = "0",
     .state = "heads*(" XLSTM_KEYS "*((hidden+63)/64*64/heads)+" XLSTM_KEYS "+1)"},
    {KEEPS(" jamba ", FULL, STATE, PERIOD("8")), .state = WIDE "*mamba_d_conv?4",
     .f32_state = WIDE "*mamba_d_state?16"},
    {KEEPS(" zamba ", BOTH, STATE, PERIOD("6")), .state = WIDE "*mamba_d_conv?4",
     .f32_state = WIDE "*mamba_d_state?16"},
    {KEEPS(" zamba2 ", BOTH, STATE, NULL), .list = "hybrid_layer_ids", .needs_list = 1,
     .state = "(" WIDE "+2*mamba_ngroups?1*mamba_d_state?64)*mamba_d_conv?4",
     .f32_state = WIDE "*mamba_d_state?64"},
    {KEEPS(" bamba granitemoehybrid ", FULL, STATE, NULL), .list = "attn_layer_indices",
     .state = "(" WIDE "+2*mamba_n_groups?1*mamba_d_state?256)*mamba_d_conv?4",
     .f32_state = WIDE "*mamba_d_state?256"},
    {KEEPS(" falcon_h1 ", BOTH, BOTH, NULL), .f32_state = FALCON "*mamba_d_state?256",
     .state = "(" FALCON "+2*mamba_n_groups?1*mamba_d_state?256)*mamba_d_conv?4"},
    {SLIDES(" nemotron_h "), .f32_state = NEMOTRON "*ssm_state_size?128",
     .state = "(" NEMOTRON "+2*n_groups?1*ssm_state_size?128)*conv_kernel?4"},
    {KEEPS(" lfm2 lfm2_moe ", FULL, STATE, NULL), .list = "full_attn_idxs", .needs_list = 1,
     .state = "hidden*conv_L_cache?3", .f32_state = "0"},
    {SLIDES(" lfm3 "), .state = "hidden*conv_L_cache?3", .f32_state = "0"},
    {SLIDES(" minimax "), .state = "heads*head_dim*head_dim", .f32_state = "0"},
    {KEEPS(" recurrent_gemma ", SLIDING, STATE, "!((layer+1)%3)"),
     .f32_state = "lru_width?(hidden)", .state = "lru_width?(hidden)*(conv1d_width?4-1)",
     .window = "attention_window_size", .missing_window = 2048},
    {KEEPS(" qwen3_next qwen3_5_text qwen3_5_moe_text ", FULL, STATE,
           EVERY("full_attention_interval?4"))},
    {KEEPS(" kimi_linear ", STATE, FULL, NULL), .list = "kda_layers", .list_first = 1},
    {KEEPS(" llama4_text ", FULL, CHUNKED, EVERY("4"))},
    {KEEPS(" llama ", FULL, FULL, NULL)},
    {SLIDES(" mistral "), .missing_window = 4096},
    {SLIDES(" gemma "), .head_dim = 256},
    {KEEPS(" gemma2 ", FULL, SLIDING, "layer%2"), .missing_window = 4096, .head_dim = 256},
    {KEEPS(" vaultgemma ", FULL, SLIDING, "layer%2")},
    {KEEPS(" gemma3_text ", FULL, SLIDING,
           EVERY("#sliding_window_pattern|_sliding_window_pattern?6")),
     .missing_window = 4096, .heads = 8, .kv_heads = 4, .head_dim = 256},
    {KEEPS(" cohere2 exaone4 olmo3 ", FULL, SLIDING,
           EVERY("#sliding_window_pattern|_sliding_window_pattern?4"))},
    {KEEPS(" qwen2 qwen3 qwen2_moe ", FULL, SLIDING,
           "!use_sliding_window~+!(layer+1-max_window_layers?)")},
    {KEEPS(" dots1 ", FULL, SLIDING, "!(layer+1-max_window_layers?62)"), .missing_window = 4096},
    {KEEPS(" qwen3_moe ", FULL, SLIDING, "!use_sliding_window~")},
    /* transformers 5.24 repeats the heads of k and v before it caches them. */
    {KEEPS(" falcon RefinedWeb RefinedWebModel ", FULL, FULL, NULL),
     .full = "2*head_dim*(new_decoder_architecture~*heads+!new_decoder_architecture~*kv_heads)"},
    {SLIDES(" gemma4_text gemma4_unified_text "),
     .full = "2*global_head_dim?512*(attention_k_eq_v~*num_global_key_value_heads?(kv_heads)+"
             "!attention_k_eq_v~*kv_heads)"},
    {SLIDES(" mimo_v2_flash "), .full = "kv_heads*(head_dim+v_head_dim?(head_dim))",
     .sliding = "2*kv_heads*(head_dim+v_head_dim?(head_dim))"},
    {SLIDES(" reformer xlnet "), .full = "hidden", .sliding = "hidden"},
    {SLIDES(NULL), .full = "2*kv_heads*head_dim", .sliding = "2*kv_heads*head_dim",
     .window = "sliding_window", .f32_state = DELTA_VALUES "*" DELTA_KEY,
     .state = "!!(" DELTA_HEADS ")*(2*linear_num_key_heads|linear_num_heads?16*" DELTA_KEY
              "+" DELTA_VALUES ")*linear_conv_kernel_dim?4"},
};

const qc_cache_row *qc_cache_row_of(const char *type)
{
    const qc_cache_row *row = cache_rows;
    while (row->types && !qc_config_word_in(type, row->types))
        row++;
    return row;
}

const qc_cache_row *qc_cache_row_usual(void)
{
    return &cache_rows[sizeof cache_rows / sizeof *cache_rows - 1];
}

/* ---- experts ---- */

static const qc_expert_names expert_names[] = {
    {" qwen2_moe qwen3_moe qwen3_next qwen3_5_moe qwen3_5_moe_text deepseek_v2 deepseek_v3 "
     "deepseek_v32 dots1 ernie4_5_moe glm4_moe glm4_moe_lite glm_moe_dsa olmoe flex_olmo "
     "exaone_moe solar_open cohere2_moe mellum hunyuan_v1_moe longcat_flash ",
     "mlp.experts", "gate_proj", "up_proj", "down_proj", NULL, "mlp", 0},
    {" mixtral minimax minimax_m2 ", "block_sparse_moe.experts", "w1", "w3", "w2",
     "block_sparse_moe.gate.weight", "mlp", 0},
    {" qwen3_vl_moe ", "mlp.experts", "gate_proj", "up_proj", "down_proj", NULL, "mlp",
     QC_EXPERTS_TURNED | QC_EXPERTS_BY_SHAPE},
    /* transformers 4.57.6 and 5.24: MODULES_TO_PATCH_FOR_QUANTIZATION (quantizers/base.py). */
    {" llama4 llama4_text ", "feed_forward.experts", "gate_proj", "up_proj", "down_proj", NULL,
     "feed_forward", QC_EXPERTS_TURNED | QC_EXPERTS_MODULES},
    {" gpt_oss ", NULL, NULL, NULL, NULL, NULL, "mlp", QC_EXPERTS_TURNED | QC_EXPERTS_WHOLE},
};

const qc_expert_names *qc_expert_names_of(const char *type)
{
    for (size_t i = 0; i < sizeof expert_names / sizeof *expert_names; i++) {
        if (qc_config_word_in(type, expert_names[i].types))
            return &expert_names[i];
    }
    return NULL;
}

/* ---- fused modules ---- */

/* The first row that has a name counts. Where queries meet keys of another sequence, the queries
 * are on their own (whisper). vLLM serves no model with cross_attn, and its general fusing wants
 * one input for all three. */
static const qc_fused_row fused_rows[] = {
    {{"k_proj", "v_proj"}, "kv_proj", NULL, "encoder_attn"},
    {{NULL}, NULL, NULL, "cross_attn"},
    {{"q_proj", "k_proj", "v_proj"}, "qkv_proj", NULL, NULL},
    {{"gate_proj", "up_proj"}, "gate_up_proj", NULL, NULL},
    {{"query", "key", "value"}, "qkv_proj", NULL, NULL},        /* BERT */
    {{"w1", "w3"}, "gate_up_proj", "w13", NULL},                /* InternLM2, LFM2 */
    {{"c_fc_0", "c_fc_1"}, "gate_up_proj", NULL, NULL},         /* EXAONE */
    {{"in_proj_qkv", "in_proj_z"}, "in_proj_qkvz", NULL, NULL}, /* Qwen3.5 */
    {{"in_proj_b", "in_proj_a"}, "in_proj_ba", NULL, NULL},
    {{"q_a_proj", "kv_a_proj_with_mqa"}, "fused_qkv_a_proj", "fused_qkv_a_proj_with_mqa", NULL},
};

static int is_component(const char *s, size_t len, const char *word)
{
    return word && strlen(word) == len && memcmp(s, word, len) == 0;
}

const qc_fused_row *qc_fused_row_of(const char *module, size_t len, const char *parent,
                                    size_t parent_len)
{
    for (size_t r = 0; r < sizeof fused_rows / sizeof *fused_rows; r++) {
        const qc_fused_row *row = &fused_rows[r];
        if (row->parent && !is_component(parent, parent_len, row->parent))
            continue;
        for (unsigned k = 0; k < QC_FUSED_MEMBERS; k++) {
            if (is_component(module, len, row->members[k]))
                return row;
        }
        if (row->parent)
            return NULL; /* below this parent only its own row counts */
    }
    return NULL;
}

/* ---- heads ---- */

const char *qc_type_hidden_head(const char *type)
{
    static const struct {
        const char *types, *module;
    } heads[] = {
        {" whisper moonshine canary ", "proj_out"},     {" biogpt trocr ", "output_projection"},
        {" gpt_neox gpt_neox_japanese ", "embed_out"},  {" distilbert ", "vocab_projector"},
        {" xlm flaubert ", "pred_layer.proj"},          {" xlnet ", "lm_loss"},
        {" neomme ", "unembedding_projection"},         {" electra convbert ", "generator_lm_head"},
        {" modernbert modernbert-decoder ", "decoder"},
    };
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        if (qc_config_word_in(type, heads[i].types))
            return heads[i].module;
    }
    return "lm_head";
}

const char *qc_type_label_head(const char *type, unsigned n)
{
    static const char *const all[] = {"classifier", "qa_outputs", "score"};
    static const struct {
        const char *types, *modules[2];
    } more[] = {
        {" distilbert ", {"pre_classifier", NULL}},
        {" bart mbart plbart led t5 mt5 umt5 ", {"classification_head", NULL}},
        {" xlnet xlm flaubert ", {"sequence_summary", "logits_proj"}},
        {" bert albert big_bird deberta deberta-v2 ernie layoutlm megatron-bert mobilebert mra "
         "nystromformer roformer squeezebert yoso ",
         {"pooler", "pooler.dense"}},
    };
    if (n < 3)
        return all[n];
    for (size_t i = 0; n < 5 && i < sizeof more / sizeof *more; i++) {
        if (qc_config_word_in(type, more[i].types))
            return more[i].modules[n - 3];
    }
    return NULL;
}

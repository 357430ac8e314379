/* Gemma (Gemma Team 2024): norms that multiply by 1 + weight, embeddings times sqrt(hidden), and
 * GELU with tanh. Gemma 2 (2024) and the language model of Gemma 3 (2025): norms around both parts
 * of a layer, windows in all but each pattern-th layer. Gemma 2 caps scores and logits. Gemma 3 has
 * norms of q and k instead, and rotary parameters of its own where layers slide. */
#include "convert/family/family.h"
#include "convert/family/family_read.h"
#include "convert/model/config_fields.h"

#include <math.h>
#include <string.h>

#define FOUR_NORMS                                                                                 \
    [QC_LAYER_INPUT_NORM] = "input_layernorm",                                                     \
    [QC_LAYER_ATTENDED_NORM] = "post_attention_layernorm",                                         \
    [QC_LAYER_POST_NORM] = "pre_feedforward_layernorm",                                            \
    [QC_LAYER_FFN_NORM] = "post_feedforward_layernorm"

static const qc_layer_names names = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
                                     .vectors = {FOUR_NORMS}};
static const qc_layer_names names3 = {.matrices = {QC_NAMES_QKV, QC_NAMES_GATED},
                                      .vectors = {FOUR_NORMS, QC_NAMES_QK_NORMS}};

/* null is no cap, and a field that is missing the family's own. */
static qc_status read_cap(const qc_family_reader *r, const char *name, double missing, double *out,
                          qc_error *err)
{
    const qc_json_node *n = qc_json_get(r->root, name);
    *out = n ? 0.0 : missing;
    if (!n || qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    return qc_read_positive(r->root, name, missing, out, err);
}

static qc_status check_causal(const qc_family_reader *r, qc_error *err)
{
    int both_ways = 0;
    QC_TRY(qc_read_flag(r->root, "use_bidirectional_attention", 0, &both_ways, err));
    if (both_ways)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: use_bidirectional_attention is true, and only causal attention is "
                "computed");
    return QC_OK;
}

static qc_status read_gemma(qc_family_reader *r, double score_cap, double logit_cap, qc_error *err)
{
    qc_forward_shape *s = r->out;
    double scalar = 0.0;
    QC_TRY(check_causal(r, err));
    QC_TRY(qc_read_positive(r->root, "query_pre_attn_scalar", 256.0, &scalar, err));
    s->score_scale = 1.0 / sqrt(scalar);
    s->embedding_scale = sqrt((double)s->config.hidden);
    QC_TRY(read_cap(r, "attn_logit_softcapping", score_cap, &s->score_cap, err));
    return read_cap(r, "final_logit_softcapping", logit_cap, &s->logit_cap, err);
}

/* The first release says "gelu". It was trained with tanh, which transformers 5 takes. */
static qc_status read_gemma1(qc_family_reader *r, qc_error *err)
{
    const char *act = qc_json_string_or(qc_config_field(r->root, "hidden_act"), "gelu");
    QC_TRY(check_causal(r, err));
    if (strcmp(act, "gelu") != 0 && strcmp(act, "gelu_pytorch_tanh") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: hidden_act is '%.80s', and only gelu_pytorch_tanh is computed", act);
    r->out->embedding_scale = sqrt((double)r->out->config.hidden);
    return QC_OK;
}

static qc_status read_gemma2(qc_family_reader *r, qc_error *err)
{
    return read_gemma(r, 50.0, 30.0, err);
}

static qc_status read_gemma3(qc_family_reader *r, qc_error *err)
{
    return read_gemma(r, 0.0, 0.0, err);
}

#define TRAITS                                                                                     \
    (QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_NORMS_ADD_ONE | QC_FAMILY_TIED)
#define TRAITS3 (TRAITS | QC_FAMILY_LOCAL_ROPE | QC_FAMILY_READS_PATTERN)
#define DEFAULTS                                                                                   \
    .gate = QC_LAYER_GELU_TANH, .slides = QC_SLIDES_PATTERN, .heads = 8, .kv_heads = 4,            \
    .head_dim = 256, .window = 4096, .bos = 2, .eos = 1
#define DEFAULTS3                                                                                  \
    DEFAULTS, .names = &names3, .read = read_gemma3, .pattern = 6, .vocabulary = 262208,           \
              .theta = 1e6, .local_theta = 1e4

const qc_family qc_family_gemma[4] = {
    {.model_type = "gemma",
     .architecture = "GemmaForCausalLM",
     .names = &qc_layer_names_plain,
     .gate = QC_LAYER_GELU_TANH,
     .traits = TRAITS,
     .read = read_gemma1,
     .kv_heads = 16,
     .head_dim = 256,
     .bos = 2,
     .eos = 1},
    {DEFAULTS, .model_type = "gemma2", .architecture = "Gemma2ForCausalLM", .names = &names,
     .traits = TRAITS, .read = read_gemma2, .pattern = 2, .vocabulary = 256000},
    {DEFAULTS3, .model_type = "gemma3_text", .architecture = "Gemma3ForCausalLM",
     .traits = TRAITS3},
    {DEFAULTS3, .model_type = "gemma3", .architecture = "Gemma3ForConditionalGeneration",
     .prefixes = "language_model.model. model.language_model. model.",
     .traits = TRAITS3 | QC_FAMILY_TEXT_CONFIG},
};

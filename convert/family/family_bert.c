/* Encoders: BERT (Devlin et al. 2018), and those that compute as it does: RoBERTa (Liu et al. 2019)
 * and XLM-RoBERTa (Conneau et al. 2019), whose positions begin behind the padding's, and DistilBERT
 * (Sanh et al. 2019), whose tokens have no types. A norm follows each sum. */
#include "convert/family/family.h"
#include "convert/family/family_read.h"
#include "convert/model/config_fields.h"

#include <inttypes.h>
#include <string.h>

#define SHOWN       80
#define MAX_PADDING 1000000u /* no token of padding has a larger number */

const qc_family_fields qc_family_fields_bert = {.layers = "num_hidden_layers",
                                                .hidden = "hidden_size",
                                                .intermediate = "intermediate_size",
                                                .heads = "num_attention_heads",
                                                .context = "max_position_embeddings",
                                                .norm_eps = "layer_norm_eps",
                                                .gate = "hidden_act"};

static const qc_outer_names outer = {.layers = "encoder.layer.",
                                     .embedding = "embeddings.word_embeddings",
                                     .positions = "embeddings.position_embeddings",
                                     .types = "embeddings.token_type_embeddings",
                                     .embedded = "embeddings.LayerNorm"};

static const qc_layer_names names = {
    .matrices = {[QC_LAYER_Q] = "attention.self.query",
                 [QC_LAYER_K] = "attention.self.key",
                 [QC_LAYER_V] = "attention.self.value",
                 [QC_LAYER_O] = "attention.output.dense",
                 [QC_LAYER_GATE] = "intermediate.dense",
                 [QC_LAYER_DOWN] = "output.dense"},
    .vectors = {[QC_LAYER_ATTENDED_NORM] = "attention.output.LayerNorm",
                [QC_LAYER_FFN_NORM] = "output.LayerNorm"}};

static qc_status read_bert(qc_family_reader *r, qc_error *err)
{
    static const char *const refused[] = {"is_decoder", "add_cross_attention"};
    const char *kind =
        qc_json_string_or(qc_config_field(r->root, "position_embedding_type"), "absolute");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        int asked = 0;
        QC_TRY(qc_read_flag(r->root, refused[i], 0, &asked, err));
        if (asked)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "config.json: %s is true, and a %s is computed as an encoder only", refused[i],
                    r->family->model_type);
    }
    if (strcmp(kind, "absolute") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "config.json: position_embedding_type is '%.*s', and only absolute is computed",
                SHOWN, kind);
    return qc_read_count(r->root, "type_vocab_size", 2, &r->out->types, err);
}

static qc_status read_roberta(qc_family_reader *r, qc_error *err)
{
    qc_forward_config *c = &r->out->config;
    uint64_t padding = 0;
    QC_TRY(read_bert(r, err));
    QC_TRY(
        qc_config_count(&padding, qc_config_field(r->root, "pad_token_id"), MAX_PADDING, 1, err));
    r->out->first_position = padding + 1;
    if (c->context <= r->out->first_position)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: max_position_embeddings is %" PRIu64
                ", and the first position is number %" PRIu64 ", behind pad_token_id",
                c->context, r->out->first_position);
    c->context -= r->out->first_position;
    return QC_OK;
}

#define TRAITS                                                                                     \
    (QC_FAMILY_QKV_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_MLP_BIAS | QC_FAMILY_LAYER_NORMS |        \
     QC_FAMILY_NORMS_SUMS | QC_FAMILY_UNGATED | QC_FAMILY_LEARNED_POSITIONS | QC_FAMILY_ENCODER)
#define DEFAULTS                                                                                   \
    .fields = &qc_family_fields_bert, .names = &names, .outer = &outer, .gate = QC_LAYER_GELU,     \
    .traits = TRAITS, .norm_eps = 1e-12

/* ---- DistilBERT ---- */

static const qc_family_fields distilbert_fields = {.layers = "n_layers",
                                                   .hidden = "dim",
                                                   .intermediate = "hidden_dim",
                                                   .heads = "n_heads",
                                                   .context = "max_position_embeddings",
                                                   .gate = "activation"};

static const qc_outer_names distilbert_outer = {.layers = "transformer.layer.",
                                                .embedding = "embeddings.word_embeddings",
                                                .positions = "embeddings.position_embeddings",
                                                .embedded = "embeddings.LayerNorm"};

static const qc_layer_names distilbert_names = {
    .matrices = {[QC_LAYER_Q] = "attention.q_lin",
                 [QC_LAYER_K] = "attention.k_lin",
                 [QC_LAYER_V] = "attention.v_lin",
                 [QC_LAYER_O] = "attention.out_lin",
                 [QC_LAYER_GATE] = "ffn.lin1",
                 [QC_LAYER_DOWN] = "ffn.lin2"},
    .vectors = {
        [QC_LAYER_ATTENDED_NORM] = "sa_layer_norm", [QC_LAYER_FFN_NORM] = "output_layer_norm"}};

/* ---- the types ---- */

const qc_family qc_family_bert[4] = {
    {DEFAULTS, .model_type = "bert", .architecture = "Bert", .prefixes = "bert. ",
     .read = read_bert, .vocabulary = 30522, .bos = -1, .eos = -1},
    {DEFAULTS, .model_type = "roberta", .architecture = "Roberta", .prefixes = "roberta. ",
     .read = read_roberta, .vocabulary = 50265, .bos = 0, .eos = 2},
    {DEFAULTS, .model_type = "xlm-roberta", .architecture = "XLMRoberta", .prefixes = "roberta. ",
     .read = read_roberta, .vocabulary = 250002, .bos = 0, .eos = 2},
    {.model_type = "distilbert",
     .architecture = "DistilBert",
     .prefixes = "distilbert. ",
     .fields = &distilbert_fields,
     .names = &distilbert_names,
     .outer = &distilbert_outer,
     .gate = QC_LAYER_GELU,
     .traits = TRAITS,
     .vocabulary = 30522,
     .norm_eps = 1e-12,
     .bos = -1,
     .eos = -1},
};

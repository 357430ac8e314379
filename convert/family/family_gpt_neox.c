/* GPT-NeoX (Black et al. 2022) and Pythia: layer norms, no gates, attention and the feed-forward
 * part side by side. A part of each head is turned, and q, k and v of a head lie together. */
#include "convert/family/family.h"
#include "convert/family/family_read.h"

static const qc_outer_names outer = {
    .layers = "layers.", .embedding = "embed_in", .norm = "final_layer_norm", .head = "embed_out"};

static const qc_layer_names names = {.matrices = {[QC_LAYER_Q] = "attention.query_key_value",
                                                  [QC_LAYER_O] = "attention.dense",
                                                  [QC_LAYER_GATE] = "mlp.dense_h_to_4h",
                                                  [QC_LAYER_DOWN] = "mlp.dense_4h_to_h"},
                                     .vectors = {QC_NAMES_TWO_NORMS}};

/* transformers 4 has names of its own for what is turned; 5 writes rope_parameters. */
static qc_status read_neox(qc_family_reader *r, qc_error *err)
{
    QC_TRY(qc_read_positive(r->root, "rotary_pct", r->rotary_part, &r->rotary_part, err));
    QC_TRY(qc_read_positive(r->root, "rotary_emb_base", r->theta, &r->theta, err));
    return qc_read_flag(r->root, "use_parallel_residual", 1, &r->out->parallel, err);
}

const qc_family qc_family_gpt_neox[1] = {
    {.model_type = "gpt_neox",
     .architecture = "GPTNeoXForCausalLM",
     .prefixes = "gpt_neox.",
     .fields = &qc_family_fields_bert,
     .names = &names,
     .outer = &outer,
     .gate = QC_LAYER_GELU,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_BIASED |
               QC_FAMILY_MLP_BIAS | QC_FAMILY_READS_PART | QC_FAMILY_LAYER_NORMS |
               QC_FAMILY_UNGATED | QC_FAMILY_BY_HEAD,
     .read = read_neox,
     .vocabulary = 50432,
     .rotary_part = 0.25,
     .norm_eps = 1e-5,
     .bos = 0,
     .eos = 2},
};

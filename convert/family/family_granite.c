/* Granite 3 (Granite Team 2024): Llama with four multipliers. */
#include "convert/family/family.h"
#include "convert/family/family_read.h"

static qc_status read_multipliers(qc_family_reader *r, qc_error *err)
{
    qc_forward_shape *s = r->out;
    QC_TRY(qc_read_positive(r->root, "embedding_multiplier", 1.0, &s->embedding_scale, err));
    QC_TRY(qc_read_positive(r->root, "residual_multiplier", 1.0, &s->residual_scale, err));
    QC_TRY(qc_read_positive(r->root, "attention_multiplier", 1.0, &s->score_scale, err));
    return qc_read_positive(r->root, "logits_scaling", 1.0, &s->logit_divisor, err);
}

const qc_family qc_family_granite[1] = {
    {.model_type = "granite",
     .architecture = "GraniteForCausalLM",
     .names = &qc_layer_names_plain,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_READS_MLP_BIAS,
     .read = read_multipliers,
     .bos = 1,
     .eos = 2},
};

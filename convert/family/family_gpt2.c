/* GPT-2 (Radford et al. 2019): layer norms, learned positions, no gates. Its linear layers are
 * Conv1D modules, whose weights lie transposed in the file unless they are quantized. */
#include "convert/family/family.h"
#include "convert/family/family_read.h"

static const qc_family_fields fields = {.layers = "n_layer",
                                        .hidden = "n_embd",
                                        .intermediate = "n_inner",
                                        .heads = "n_head",
                                        .context = "n_positions",
                                        .norm_eps = "layer_norm_epsilon",
                                        .gate = "activation_function"};

static const qc_outer_names outer = {
    .layers = "h.", .embedding = "wte", .positions = "wpe", .norm = "ln_f", .head = "lm_head"};

static const qc_layer_names names = {
    .matrices = {[QC_LAYER_Q] = "attn.c_attn",
                 [QC_LAYER_O] = "attn.c_proj",
                 [QC_LAYER_GATE] = "mlp.c_fc",
                 [QC_LAYER_DOWN] = "mlp.c_proj"},
    .vectors = {[QC_LAYER_INPUT_NORM] = "ln_1", [QC_LAYER_POST_NORM] = "ln_2"}};

/* reorder_and_upcast_attn only says that scores are computed in float, as all is here. */
static qc_status read_gpt2(qc_family_reader *r, qc_error *err)
{
    static const char *const refused[] = {"scale_attn_by_inverse_layer_idx", "add_cross_attention"};
    int scaled = 1;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        int asked = 0;
        QC_TRY(qc_read_flag(r->root, refused[i], 0, &asked, err));
        if (asked)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "config.json: %s is true, which is not computed",
                    refused[i]);
    }
    QC_TRY(qc_read_flag(r->root, "scale_attn_weights", 1, &scaled, err));
    if (!scaled)
        r->out->score_scale = 1.0;
    return QC_OK;
}

const qc_family qc_family_gpt2[1] = {
    {.model_type = "gpt2",
     .architecture = "GPT2LMHeadModel",
     .prefixes = "transformer. ",
     .fields = &fields,
     .names = &names,
     .outer = &outer,
     .gate = QC_LAYER_GELU_TANH,
     .traits = QC_FAMILY_QKV_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_MLP_BIAS | QC_FAMILY_TIED |
               QC_FAMILY_LAYER_NORMS | QC_FAMILY_UNGATED | QC_FAMILY_LEARNED_POSITIONS |
               QC_FAMILY_CONV1D,
     .read = read_gpt2,
     .vocabulary = 50257,
     .wider = 4,
     .norm_eps = 1e-5,
     .bos = 50256,
     .eos = 50256},
};

/* SmolLM3 (Hugging Face 2025): Llama whose layers are in part without rotary positions, each fourth
 * if config.json does not say which. */
#include "base/alloc.h"
#include "convert/family/family.h"
#include "convert/family/family_read.h"
#include "convert/model/config_fields.h"

#include <inttypes.h>

#define TURNED "config.json: an entry of no_rope_layers"

/* Despite its name, no_rope_layers has a 1 for each layer that is turned. */
static qc_status read_turns(qc_family_reader *r, qc_error *err)
{
    const qc_json_node *list = qc_config_field(r->root, "no_rope_layers");
    uint64_t layers = r->out->config.layers, interval = 0, i = 0;
    QC_TRY(qc_read_count(r->root, "no_rope_layer_interval", 4, &interval, err));
    for (uint64_t l = 0; !list && l < layers; l++)
        r->out->turns[l] = (l + 1) % interval ? QC_LAYER_TURNED : QC_LAYER_UNTURNED;
    if (!list)
        return QC_OK;
    if (qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: no_rope_layers is %s, expected a list",
                qc_json_kind_name(qc_json_kind_of(list)));
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n), i++) {
        uint64_t turned = 0;
        QC_TRY(qc_json_as_u64(n, TURNED, &turned, err));
        if (i < layers)
            r->out->turns[i] = turned ? QC_LAYER_TURNED : QC_LAYER_UNTURNED;
    }
    if (i != layers)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: no_rope_layers has %" PRIu64 " entries, and there are %" PRIu64
                " layers",
                i, layers);
    return QC_OK;
}

const qc_family qc_family_smollm3[1] = {
    {.model_type = "smollm3",
     .architecture = "SmolLM3ForCausalLM",
     .names = &qc_layer_names_plain,
     .slides = QC_SLIDES_UNTURNED,
     .traits = QC_FAMILY_READS_ATTENTION_BIAS | QC_FAMILY_OUT_BIAS | QC_FAMILY_READS_MLP_BIAS |
               QC_FAMILY_TIED,
     .read = read_turns,
     .kv_heads = 4,
     .theta = 2e6,
     .bos = 128000,
     .eos = 128001},
};

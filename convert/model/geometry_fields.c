/* How the readers of a model's geometry look up fields of config.json. */
#include "convert/model/geometry_internal.h"

int qc_geometry_is(const qc_geometry_reader *r, const char *types)
{
    return qc_config_word_in(r->config.text_type, types);
}

qc_status qc_geometry_size(const qc_geometry_reader *r, uint64_t *out, const char *names,
                           uint64_t missing, qc_error *err)
{
    const qc_json_node *n = qc_config_text_field(&r->config, names);
    if (!n || qc_json_kind_of(n) != QC_JSON_ARRAY || !qc_json_first(n))
        return qc_config_count(out, n, QC_CONFIG_MAX_SIZE, missing, err);
    *out = 0;
    for (const qc_json_node *each = qc_json_first(n); each; each = qc_json_next(each)) {
        uint64_t size = 0;
        if (qc_json_kind_of(each) == QC_JSON_ARRAY)
            continue; /* these are stages of a vision tower, which a text does not pass */
        QC_TRY(qc_config_count(&size, each, QC_CONFIG_MAX_SIZE, 0, err));
        *out = size > *out ? size : *out;
    }
    return QC_OK;
}

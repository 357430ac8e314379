#include "convert/family/family_read.h"

#include "convert/model/config_fields.h"

#include <math.h>
#include <stdio.h>

#define NAME_BYTES 112

qc_status qc_read_positive(const qc_json_node *object, const char *name, double missing,
                           double *out, qc_error *err)
{
    const qc_json_node *n = qc_config_field(object, name);
    char what[NAME_BYTES];
    *out = missing;
    if (n) {
        (void)snprintf(what, sizeof what, "config.json: %s", name);
        QC_TRY(qc_json_as_double(n, what, out, err));
    } else if (isnan(missing)) {
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is missing", name);
    }
    if (!(*out > 0.0) || isinf(*out))
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %g, expected a number above 0", name, *out);
    return QC_OK;
}

qc_status qc_read_count(const qc_json_node *object, const char *name, uint64_t missing,
                        uint64_t *out, qc_error *err)
{
    const qc_json_node *n = qc_config_field(object, name);
    QC_TRY(qc_config_count(out, n, QC_CONFIG_MAX_SIZE, missing, err));
    if (*out == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s", name, n ? "0" : "missing");
    return QC_OK;
}

qc_status qc_read_flag(const qc_json_node *object, const char *name, int missing, int *out,
                       qc_error *err)
{
    const qc_json_node *n = qc_config_field(object, name);
    char what[NAME_BYTES];
    *out = missing;
    (void)snprintf(what, sizeof what, "config.json: %s", name);
    return n ? qc_json_as_bool(n, what, out, err) : QC_OK;
}

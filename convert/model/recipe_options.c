#include "convert/model/recipe_options.h"

#include <stddef.h>

int qc_to_quantizes(qc_to to)
{
    return to == QC_TO_NF4 || to == QC_TO_INT8 || to == QC_TO_AUTO;
}

const char *qc_to_name(qc_to to)
{
    static const char *const names[] = {QC_TO_NAMES};
    return names[to];
}

const char *qc_rest_name(qc_rest rest)
{
    static const char *const names[] = {QC_REST_NAMES};
    return names[rest];
}

const char *qc_scale_name(const qc_recipe_options *o)
{
    static const char *const names[] = {QC_SCALE_NAMES};
    return qc_to_quantizes(o->to) ? names[o->scale] : NULL;
}

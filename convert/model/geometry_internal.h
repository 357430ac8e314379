/* What the files geometry*.c share. Nobody else includes this. */
#ifndef QC_CONVERT_GEOMETRY_INTERNAL_H
#define QC_CONVERT_GEOMETRY_INTERNAL_H

#include "convert/families/config_fields.h"
#include "convert/families/type_table.h"
#include "convert/model/geometry.h"

#define QC_GEOMETRY_MAX_CONTEXT (UINT64_C(1) << 40)

typedef struct {
    qc_geometry *out;
    qc_arena *arena;
    qc_config config;
    const qc_cache_row *row; /* the row of the text's model type */
} qc_geometry_reader;

/* Is the model type of the text configuration in the list? */
static inline int qc_geometry_is(const qc_geometry_reader *r, const char *types)
{
    return qc_config_word_in(r->config.text_type, types);
}

/* Fills in out->layers, which is what every layer keeps, from sizes that are read already. */
QC_NODISCARD qc_status qc_geometry_read_layers(qc_geometry_reader *r, qc_error *err);

#endif

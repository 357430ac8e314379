/* What the files geometry*.c share. Nobody else includes this. */
#ifndef QC_CONVERT_GEOMETRY_INTERNAL_H
#define QC_CONVERT_GEOMETRY_INTERNAL_H

#include "convert/families/config_fields.h"
#include "convert/model/geometry.h"

#define QC_GEOMETRY_MAX_CONTEXT (UINT64_C(1) << 40)
/* These types have no attention at all, and so no heads of it. */
#define QC_ATTENTION_FREE " mamba mamba2 falcon_mamba rwkv xlstm "

typedef struct {
    qc_geometry *out;
    qc_arena *arena;
    qc_config config;
} qc_geometry_reader;

/* Is the model type of the text configuration in the list? */
int qc_geometry_is(const qc_geometry_reader *r, const char *types);
/* Reads a size under the first of the names that config.json has. Where a model has one per layer
 * (a list), the largest counts. */
QC_NODISCARD qc_status qc_geometry_size(const qc_geometry_reader *r, uint64_t *out,
                                        const char *names, uint64_t missing, qc_error *err);

/* Is the cache of this type understood? families/cache_types.txt says how, type by type. */
int qc_geometry_type_is_known(const char *type);
/* Does this type keep nothing from one token to the next, whatever its config.json says? */
int qc_geometry_type_has_no_cache(const char *type);
/* Is this an encoder that may be built as a decoder (is_decoder)? */
int qc_geometry_type_is_encoder(const char *type);

/* Fills in out->layers, which is what every layer keeps, from sizes that are read already. */
QC_NODISCARD qc_status qc_geometry_read_layers(qc_geometry_reader *r, qc_error *err);

#endif

/* Calculates the shapes and conditions of convert/families/family_table.c, and the sums of
 * type_table.c, from a configuration.
 *
 *   sum      product, or several with '+' or '-' between them; a difference is at least 0
 *   product  factor, or several with '*', '/' or '%' between them; division by 0 gives 0
 *   factor   a number; (sum); (sum=sum), which is 1 if they are equal, else 0; !factor, which is
 *            1 if that is 0, else 0; WORD, which is 1 if the family has it; a fact of the model
 *            or the layer; or a field of config.json
 *   field    name: it must be there and not be 0; name?7 and name?(sum): that number if it is
 *            missing; name~1: true or false, and true if it is missing; 0 may be left out after '?'
 *            and '~'; one|other: under the first of the names that is there; vision.name: of
 *            vision_config; #name: how long that list is; #name?7: how many letters that has, or
 *            the number that it is */
#ifndef QC_CONVERT_SHAPE_TEXT_H
#define QC_CONVERT_SHAPE_TEXT_H

#include "convert/families/config_fields.h"
#include "convert/families/family.h"

typedef struct {
    const qc_config *config;
    const qc_family *family;
    /* of the model */
    uint64_t hidden, heads, kv_heads, head_dim, q, kv; /* q, kv: heads times head_dim */
    uint64_t layers, experts, vocab, context, inner, media;
    uint64_t tied, mxfp4, bare, masked; /* bare: without a head; masked: BertForMaskedLM */
    /* of the layer */
    uint64_t moe, state, cross, indexed, extra, layer; /* layer: its number */
} qc_shape_facts;

/* Calculates a sum, or all of several with commas between them: *count is how many, at most max.
 * QC_ERR_INPUT for a field that is missing or cannot be, and where a result has more than 64
 * bits. Thread-safe. */
QC_NODISCARD qc_status qc_shape_read(uint64_t *out, unsigned max, unsigned *count, const char *text,
                                     const qc_shape_facts *facts, qc_error *err);
/* Is the condition true? NULL gives `missing`. */
QC_NODISCARD qc_status qc_shape_when(uint64_t *out, const char *text, uint64_t missing,
                                     const qc_shape_facts *facts, qc_error *err);
/* Checks that a field is there and not 0. */
QC_NODISCARD qc_status qc_shape_need(const char *name, const qc_shape_facts *facts, qc_error *err);

#endif

/* How vLLM splits a tensor over cards, by its name. Thread-safe. */
#ifndef QC_CONVERT_SPLIT_NAMES_H
#define QC_CONVERT_SPLIT_NAMES_H

#include "convert/model/geometry.h"

typedef enum {
    QC_SPLIT_UNKNOWN,
    QC_SPLIT_WHOLE,
    QC_SPLIT_COLUMNS,
    QC_SPLIT_KV_HEADS,
    QC_SPLIT_FUSED_QKV, /* q, k and v in one matrix */
    QC_SPLIT_ROWS,
    QC_SPLIT_VOCABULARY,
    QC_SPLIT_SINKS,  /* one number for each head */
    QC_SPLIT_ABSENT, /* vLLM does not load it */
    QC_SPLIT_COUNT
} qc_split;

/* How vLLM splits the tensor of this name in a model of a known type. */
qc_split qc_split_of(const char *name);
/* The last component of a name; and that of a parameter, such as "weight" or "bias", or "" where
 * the tensor is no parameter of a module. */
const char *qc_split_last(const char *name);
const char *qc_split_parameter(const char *name);

/* What is split over how many cards. */
typedef struct {
    const qc_geometry *geometry; /* of the whole model */
    uint32_t ranks;
} qc_tp_split;

#endif

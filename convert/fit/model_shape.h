/* The sums over a model that a plan for training needs beside a plan's sizes. `plan --json -v`
 * prints them as "model_shape", and qconv.plan_training in Python works with them
 * (docs/training.md). */
#ifndef QC_CONVERT_MODEL_SHAPE_H
#define QC_CONVERT_MODEL_SHAPE_H

#include "convert/model/geometry.h"
#include "convert/plan/plan.h"
#include "formats/json_writer.h"

typedef struct qc_model_shape {
    const qc_geometry *geometry; /* the whole model's, also where cards have shares of it */
    uint64_t linear_sides;       /* sum of rows + columns over the linear weights */
    uint64_t largest_linear;     /* elements of the largest linear weight */
    uint64_t largest_layer;      /* parameters of the largest layer */
} qc_model_shape;

/* Sums up a plan after qc_plan_begin. The sums saturate. */
void qc_model_shape_of(qc_model_shape *out, const qc_plan *plan, const qc_geometry *geometry);
/* Writes the member "model_shape". */
void qc_model_shape_json(const qc_model_shape *s, qc_json_writer *w);

#endif

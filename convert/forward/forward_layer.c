#include "convert/forward/forward_layer.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/coded_read.h"
#include "convert/model/recipe_stored.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DECODE_ELEMS ((uint64_t)1 << 20) /* elements of a coded weight that are decoded at a time */

/* ---- reading ---- */

qc_status qc_forward_vector_read(float **out, const qc_forward_source *s, uint32_t tensor,
                                 qc_error *err)
{
    const qc_checkpoint_tensor *t = &s->checkpoint->tensors[tensor];
    uint64_t n = t->dims[0], overflow = 0;
    void *raw = NULL;
    *out = NULL;
    qc_status st = qc_tensor_read(s->checkpoint, t, s->cursor, &raw, err);
    if (st == QC_OK)
        st = qc_malloc(out, (size_t)n * sizeof **out, err);
    if (st == QC_OK)
        s->ops->cast(raw, t->dtype, n, *out, QC_DTYPE_F32, &overflow);
    qc_free(raw);
    return st;
}

qc_status qc_forward_norm_read(float **out, const qc_forward_source *s, uint32_t tensor,
                               uint32_t bias, float add, qc_error *err)
{
    const uint64_t n = s->checkpoint->tensors[tensor].dims[0];
    float *behind = NULL;
    QC_TRY(qc_forward_vector_read(out, s, tensor, err));
    for (uint64_t i = 0; add != 0.0f && i < n; i++)
        (*out)[i] += add;
    if (bias == QC_NO_TENSOR)
        return QC_OK;
    qc_status st = qc_forward_vector_read(&behind, s, bias, err);
    if (st == QC_OK)
        st = qc_realloc_array(out, 2 * n, sizeof **out, err);
    if (st == QC_OK)
        memcpy(*out + n, behind, (size_t)n * sizeof **out);
    qc_free(behind);
    return st;
}

qc_status qc_forward_last_norm_read(float **out, const qc_forward_source *s,
                                    const qc_forward_tensors *t, qc_error *err)
{
    *out = NULL;
    return t->norm == QC_NO_TENSOR
               ? QC_OK
               : qc_forward_norm_read(out, s, t->norm, t->norm_bias, t->layers[0].norms_add, err);
}

/* Reads FP8 and integers as floats. */
static qc_status read_coded(qc_forward_matrix *out, const qc_forward_source *s,
                            const qc_forward_linear *l, qc_error *err)
{
    const qc_checkpoint_tensor *t = &s->checkpoint->tensors[l->tensor];
    qc_coded_scratch scratch = {0};
    uint64_t n = l->rows * l->cols;
    size_t size = 0;
    if (qc_u64_to_size(l->memory_bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", t->name);
    QC_TRY(qc_malloc(&out->owned, size, err));
    qc_status st = QC_OK;
    for (uint64_t at = 0; st == QC_OK && at < n; at += DECODE_ELEMS) {
        uint64_t count = n - at < DECODE_ELEMS ? n - at : DECODE_ELEMS;
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = qc_coded_read(s->checkpoint, s->cursor, s->ops, t, l->coded, &scratch, at, count,
                               (float *)out->owned + at, err);
    }
    qc_coded_scratch_deinit(&scratch);
    out->dtype = QC_DTYPE_F32;
    return st;
}

/* Scales of integers that decoding them to floats refuses as well. */
static qc_status check_scales(const qc_weights *w, const char *name, qc_error *err)
{
    const uint64_t n = w->form.ops->integer ? qc_form_scales(&w->form, w->rows * w->form.cols) : 0;
    for (uint64_t i = 0; i < n; i++)
        if (!isfinite(w->absmax[i]) || w->absmax[i] == 0.0f)
            return qc_error_set(err, isfinite(w->absmax[i]) ? QC_ERR_INPUT : QC_ERR_NONFINITE,
                                __FILE__, __LINE__, "tensor '%s': scale %" PRIu64 " of it is %s",
                                name, i, isfinite(w->absmax[i]) ? "0" : "not finite");
    return QC_OK;
}

#define TURN_ROWS 64u

/* Turns what was read as [cols, rows] into [rows, cols]. */
static qc_status turn(qc_forward_matrix *m, qc_error *err)
{
    const uint64_t rows = m->rows, cols = m->cols, each = qc_dtype_bits(m->dtype) / 8;
    const unsigned char *from = m->owned;
    unsigned char *to = NULL;
    QC_TRY(qc_malloc(&to, (size_t)(rows * cols * each), err));
    for (uint64_t first = 0; first < rows; first += TURN_ROWS) {
        const uint64_t end = qc_min_u64(rows, first + TURN_ROWS);
        for (uint64_t c = 0; c < cols; c++)
            for (uint64_t r = first; r < end; r++)
                memcpy(to + (r * cols + c) * each, from + (c * rows + r) * each, (size_t)each);
    }
    qc_free(m->owned);
    m->owned = to;
    return QC_OK;
}

qc_status qc_forward_matrix_read(qc_forward_matrix *out, const qc_forward_source *s,
                                 const qc_forward_linear *l, qc_error *err)
{
    const qc_checkpoint_tensor *t = &s->checkpoint->tensors[l->tensor];
    memset(out, 0, sizeof *out);
    out->rows = l->rows;
    out->cols = l->cols;
    if (l->stored) {
        QC_TRY(qc_stored_read(&out->arrays, s->checkpoint, l->tensor, l->stored, s->cursor, err));
        QC_TRY(check_scales(&out->arrays.w, t->name, err));
        out->quantized = &out->arrays.w;
    } else if (l->coded) {
        QC_TRY(read_coded(out, s, l, err));
    } else {
        QC_TRY(qc_tensor_read(s->checkpoint, t, s->cursor, &out->owned, err));
        out->dtype = t->dtype;
        if (l->turned)
            QC_TRY(turn(out, err));
    }
    out->dense = out->owned;
    if (l->bias != QC_NO_TENSOR) {
        float *bias = NULL;
        qc_status st = qc_forward_vector_read(&bias, s, l->bias, err);
        out->bias = out->owned_bias = bias;
        QC_TRY(st);
    }
    qc_progress_add(s->progress, l->read_bytes);
    return QC_OK;
}

void qc_forward_matrix_deinit(qc_forward_matrix *m)
{
    qc_stored_deinit(&m->arrays);
    qc_free(m->owned);
    qc_free(m->owned_bias);
    memset(m, 0, sizeof *m);
}

qc_status qc_forward_weights_read(qc_forward_weights *out, const qc_forward_source *s,
                                  const qc_forward_layer *l, qc_error *err)
{
    memset(out, 0, sizeof *out);
    for (int i = 0; i < QC_LAYER_VECTORS; i++)
        if (l->vectors[i] != QC_NO_TENSOR)
            QC_TRY(i < QC_LAYER_NORMS
                       ? qc_forward_norm_read(&out->vectors[i], s, l->vectors[i], l->biases[i],
                                              l->norms_add, err)
                       : qc_forward_vector_read(&out->vectors[i], s, l->vectors[i], err));
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++)
        if (l->linear[i].tensor != QC_NO_TENSOR)
            QC_TRY(qc_forward_matrix_read(&out->matrices[i], s, &l->linear[i], err));
    return QC_OK;
}

void qc_forward_weights_deinit(qc_forward_weights *w)
{
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++)
        qc_forward_matrix_deinit(&w->matrices[i]);
    for (int i = 0; i < QC_LAYER_VECTORS; i++)
        qc_free(w->vectors[i]);
    memset(w, 0, sizeof *w);
}

uint64_t qc_forward_longest(const qc_forward_batch *b)
{
    uint64_t longest = 0;
    for (uint64_t i = 0; i < b->count; i++)
        longest = qc_max_u64(longest, b->lengths[i]);
    return longest;
}

qc_status qc_forward_finite(const float *x, uint64_t n, qc_error *err)
{
    const uint32_t exponent = 0x7f800000u;
    uint32_t bad = 0;
    for (uint64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bad |= (bits & exponent) == exponent;
    }
    if (bad)
        QC_FAIL(err, QC_ERR_NONFINITE, "a hidden state is not finite");
    return QC_OK;
}

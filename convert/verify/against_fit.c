/* Finds whose values a tensor of OUT has, if not those of its source. Its first elements are
 * decoded and compared with as many of every tensor of MODEL that has the same number of
 * elements. */
#include "convert/verify/against_internal.h"

#include "base/alloc.h"
#include "base/workers.h"

#include <math.h>
#include <string.h>

#define SAMPLE_ELEMS    16384u
#define CANDIDATES_MOST 4096u
/* A tensor fits below this distance. Codes of 4 bits leave 0.1, and weights of another tensor
 * 1.4. */
#define FITS_BELOW 0.3

/* Returns |x - y| / |x|; infinite where nothing can be said. */
static double distance(const float *x, const float *y, uint64_t n)
{
    double ee = 0.0, xx = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        double e = (double)x[i] - (double)y[i];
        ee += e * e;
        xx += (double)x[i] * (double)x[i];
    }
    return xx > 0.0 && isfinite(ee) && isfinite(xx) ? sqrt(ee / xx) : (double)INFINITY;
}

static qc_status read_ours(qc_against *a, qc_against_scratch *s, const qc_against_tensor *t,
                           uint64_t n, float *out, qc_error *err)
{
    const qc_checkpoint *c = a->output;
    uint64_t overflow = 0;
    if (t->row.kind == QC_AGAINST_QUANTIZED) {
        const float *values = NULL;
        QC_TRY(qc_against_decode(a, s, c, t->out_tensor, t->stored, 0, n, &values, err));
        memcpy(out, values, (size_t)n * sizeof *out);
        return QC_OK;
    }
    QC_TRY(qc_against_room(&s->raw, &s->raw_room, n * 8, err));
    QC_TRY(qc_checkpoint_read(c, s->output, &c->tensors[t->out_tensor], 0, s->raw,
                              (size_t)(n * (qc_dtype_bits(t->row.dtype) / 8)), err));
    a->options->ops->cast(s->raw, t->row.dtype, n, out, QC_DTYPE_F32, &overflow);
    return QC_OK;
}

/* Returns t as if it were made from tensor i of MODEL; where it cannot be, with no elements. */
static qc_against_tensor candidate(const qc_against *a, const qc_against_tensor *t, uint32_t i,
                                   int transpose)
{
    const qc_ckpt_tensor *from = &a->model->tensors[i];
    qc_against_tensor c = {.out_tensor = t->out_tensor, .model_tensor = i};
    uint64_t elems = 0;
    c.row = t->row;
    c.coded = a->coded.weights[i];
    c.packed = a->in_model.weights[i];
    c.row.source_dtype = from->dtype;
    c.row.transpose = transpose;
    c.row.elems = 0;
    const uint64_t *dims = c.coded ? c.coded->dims : c.packed ? c.packed->dims : from->dims;
    unsigned ndim = c.coded ? c.coded->ndim : c.packed ? c.packed->ndim : from->ndim;
    int readable = c.coded || c.packed || qc_dtype_is_quantizable(from->dtype);
    if (!readable || ndim != t->row.ndim || qc_shape_elems(dims, ndim, &elems, NULL) != QC_OK ||
        elems != t->row.elems || (transpose && ndim != 2))
        return c;
    for (unsigned d = 0; d < ndim; d++) {
        if (dims[transpose ? ndim - 1 - d : d] != t->row.dims[d])
            return c;
    }
    c.row.elems = elems;
    return c;
}

/* Finds the best of all candidates. */
static qc_status search(qc_against *a, qc_against_scratch *s, const qc_against_tensor *t,
                        uint64_t n, const float *ours, float *theirs, const char **out,
                        qc_error *err)
{
    uint32_t tried = 0;
    double best = FITS_BELOW;
    for (uint32_t i = 0; i < (uint32_t)a->model->tensor_count && tried < CANDIDATES_MOST; i++) {
        for (int transpose = 0; transpose < 2; transpose++) {
            const qc_against_tensor c = candidate(a, t, i, transpose);
            const void *source = NULL;
            uint64_t overflow = 0;
            if (c.row.elems == 0 || (i == t->model_tensor && transpose == t->row.transpose) ||
                (transpose && i != t->model_tensor && !t->row.transpose))
                continue;
            if (qc_interrupted())
                QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
            tried++;
            qc_status st = qc_against_read(a, s, &c, 0, n, 0, &source, err);
            if (st == QC_ERR_NONFINITE)
                continue;
            QC_TRY(st);
            a->options->ops->cast(source, qc_against_read_dtype(&c), n, theirs, QC_DTYPE_F32,
                                  &overflow);
            double d = distance(theirs, ours, n);
            if (d >= best)
                continue;
            best = d;
            QC_TRY(qc_arena_printf(a->arena, out, err, "%s%s", a->model->tensors[i].name,
                                   transpose != t->row.transpose ? " transposed" : ""));
        }
    }
    return QC_OK;
}

qc_status qc_against_fits(qc_against *a, const qc_against_tensor *t, const char **out,
                          qc_error *err)
{
    uint64_t n = t->row.elems < SAMPLE_ELEMS ? t->row.elems : SAMPLE_ELEMS;
    qc_against_scratch *s = NULL;
    void *v = NULL;
    *out = NULL;
    int readable = t->row.kind == QC_AGAINST_QUANTIZED || qc_dtype_is_quantizable(t->row.dtype);
    if (n == 0 || !readable ||
        (t->row.kind == QC_AGAINST_QUANTIZED && t->form.cols == 0 && t->form.block_elems == 0))
        return QC_OK;
    QC_TRY(qc_malloc(&v, 2 * SAMPLE_ELEMS * sizeof(float), err));
    float *ours = v, *theirs = ours + SAMPLE_ELEMS;
    qc_status st = qc_against_take(a, &s, err);
    if (st == QC_OK) {
        st = read_ours(a, s, t, n, ours, err);
        if (st == QC_OK)
            st = search(a, s, t, n, ours, theirs, out, err);
        qc_against_give(a, s);
    }
    qc_free(v);
    return st;
}

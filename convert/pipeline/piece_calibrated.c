/* Makes weights of the codes and scales that calibrating left (convert/calibrate/calibrated.h).
 *
 * The source is read all the same: its digest goes to the manifest, a weight that is not finite is
 * refused, and the error is measured of what a reader will make of codes and scales. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/checked.h"

#include <math.h>

#define RUN_ELEMS ((uint64_t)2048) /* decoded at a time; 16 KiB with the source's floats */
#define LANES     8u
#define F16_LIMIT 65520.0f /* it rounds to infinity, as everything above it does */

int qc_job_is_calibrated(const qc_pipeline *p, uint32_t job)
{
    return p->calibrated && qc_calibrated_has(p->calibrated, job);
}

/* Decodes elements [at, at + n) of the step that begins at `first` to floats, as a reader will. */
static void decode(const qc_worker *w, const qc_job *j, const unsigned char *codes,
                   const float *scales, uint64_t first, uint64_t at, uint64_t n, float *out)
{
    const qc_quant_ops *ops = w->p->ops;
    uint64_t overflow = UINT64_MAX;
    if (j->scheme == QC_SCHEME_INT8_ROWS) {
        for (uint64_t done = 0; done < n;) {
            uint64_t col = (first + at + done) % j->cols, left = j->cols - col;
            uint64_t cols = left < n - done ? left : n - done;
            ops->int8_rows_dequantize((const int8_t *)codes + at + done,
                                      scales + (at + done) / j->cols, 1, cols, out + done,
                                      QC_DTYPE_F32, &overflow);
            done += cols;
        }
        return;
    }
    for (uint64_t done = 0; done < n;) { /* blocks may be longer than a run */
        uint64_t inside = (at + done) % j->block_elems, left = j->block_elems - inside;
        uint64_t whole = inside == 0 && n - done >= j->block_elems
                             ? (n - done) / j->block_elems * j->block_elems
                             : left;
        uint64_t count = whole < n - done ? whole : n - done;
        const float *scale = scales + (at + done) / j->block_elems;
        if (j->scheme == QC_SCHEME_NF4)
            ops->nf4_dequantize(codes + (at + done) / 2, scale, qc_nf4_code, count, j->block_elems,
                                out + done, QC_DTYPE_F32, &overflow);
        else
            ops->int8_blocks_dequantize((const int8_t *)codes + at + done, scale, count,
                                        j->block_elems, out + done, QC_DTYPE_F32, &overflow);
        done += count;
    }
}

/* Finds the first of n elements that has no code, which quantizing would refuse. */
static qc_bad_kind find_bad(const qc_job *j, const float *x, uint64_t n, uint64_t overflow,
                            uint64_t *index)
{
    float limit = j->scheme == QC_SCHEME_INT8_ROWS ? F16_LIMIT : INFINITY;
    for (uint64_t i = 0; i < n; i++) {
        if (fabsf(x[i]) < limit)
            continue;
        *index = i;
        return isfinite(x[i]) || i == overflow ? QC_BAD_RANGE : QC_BAD_NONFINITE;
    }
    return QC_BAD_NONE;
}

/* Adds up n elements in LANES sums, which are then added in order, so the result is always the
 * same. */
static void measure(const float *x, const float *y, uint64_t n, uint64_t at, qc_piece_sums *sums)
{
    double xx[LANES] = {0}, ee[LANES] = {0};
    for (uint64_t i = 0; i < n; i++) {
        double v = (double)x[i], e = v - (double)y[i];
        xx[i % LANES] += v * v;
        ee[i % LANES] += e * e;
        if (fabs(e) > sums->max_err) {
            sums->max_err = fabs(e);
            sums->max_index = at + i;
        }
    }
    for (unsigned k = 0; k < LANES; k++) {
        sums->sum_xx += xx[k];
        sums->sum_ee += ee[k];
    }
}

/* Takes codes and scales of the step to their places. *scales are the scales as a reader has
 * them. */
static qc_status take(qc_worker *w, uint32_t job, uint64_t first, uint64_t n, void *codes,
                      const float **scales, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    const qc_job_work *s = w->p->jobs[job].work;
    uint64_t scale = first / (j->scheme == QC_SCHEME_INT8_ROWS ? j->cols : j->block_elems);
    float *absmax = j->nested ? w->scales : s->absmax + scale;
    *scales = absmax;
    return qc_calibrated_read(
        w->p->calibrated, job, first, n, codes, absmax, j->nested ? s->nested_codes + scale : NULL,
        j->nested ? s->nested_absmax + scale / QC_NESTED_BLOCK : NULL, NULL, err);
}

qc_status qc_calibrated_step(qc_worker *w, uint32_t job, const void *source, uint64_t first,
                             uint64_t n, void *codes, qc_piece_sums *sums, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    uint64_t each = qc_dtype_bits(j->dtype) / 8;
    float x[RUN_ELEMS], y[RUN_ELEMS];
    const float *scales = NULL;
    *sums = (qc_piece_sums){0};
    QC_TRY(take(w, job, first, n, codes, &scales, err));
    for (uint64_t at = 0; at < n; at += RUN_ELEMS) {
        uint64_t run = n - at < RUN_ELEMS ? n - at : RUN_ELEMS;
        uint64_t overflow = UINT64_MAX, index = 0;
        w->p->ops->cast((const unsigned char *)source + at * each, j->dtype, run, x, QC_DTYPE_F32,
                        &overflow);
        sums->bad = find_bad(j, x, run, overflow, &index);
        if (sums->bad != QC_BAD_NONE) {
            sums->bad_index = at + index;
            return QC_OK;
        }
        decode(w, j, codes, scales, first, at, run, y);
        measure(x, y, run, at, sums);
    }
    return QC_OK;
}

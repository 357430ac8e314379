/* A weight as a whole: what is asked for, what it takes, and which way it goes. */
#include "base/alloc.h"
#include "base/checked.h"
#include "quant/error_feedback_rows.h"

#include <inttypes.h>
#include <math.h>

typedef qc_feedback_job job;

static qc_status check_finite(const float *w, uint64_t rows, uint64_t n, qc_error *err)
{
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t k = 0; k < n; k++)
            if (!isfinite(w[r * n + k]))
                QC_FAIL(err, QC_ERR_NONFINITE,
                        "the weight in row %" PRIu64 ", column %" PRIu64 " is not finite", r, k);
    return QC_OK;
}

qc_status qc_feedback_weight(const qc_feedback *f, const qc_form *form, const float *w,
                             uint64_t rows, const qc_feedback_outputs *g, qc_feedback_out *out,
                             qc_feedback_result *result, qc_error *err)
{
    const int by_rows = qc_form_by_rows(form);
    const uint64_t n = f->n, chunks = qc_ceil_div_u64(rows, QC_FEEDBACK_ROWS);
    job j = {.f = f, .form = form, .w = w, .rows = rows, .out = out, .g = g};
    void *target = NULL, *scratch = NULL;
    uint64_t elems;
    qc_status st;
    *result = (qc_feedback_result){0};
    if (!out->offset_given)
        out->nested_offset = 0.0f;
    if (rows == 0)
        return QC_OK;
    if (qc_mul_u64(rows, n, &elems) || elems > SIZE_MAX / 8)
        QC_FAIL(err, QC_ERR_SHAPE,
                "a weight of %" PRIu64 " x %" PRIu64 " is too large to be calibrated", rows, n);
    if (!by_rows && !qc_block_size_valid(form->block_elems))
        QC_FAIL(err, QC_ERR_USAGE,
                "block size: expected a power of two from 32 to 4096, found %" PRIu32,
                form->block_elems);
    QC_TRY(check_finite(w, rows, n, err));
    while (!by_rows && (UINT64_C(1) << j.shift) < form->block_elems)
        j.shift++;
    j.aligned = by_rows || n % form->block_elems == 0;
    j.wide = g || !(j.aligned || by_rows) ? QC_TILE_COLS : by_rows ? n : form->block_elems;
    j.scratch_each = qc_feedback_chunk_bytes(n, j.wide, g != NULL);
    if (f->m)
        QC_TRY_GOTO(st, done, qc_malloc_aligned(&target, 64, elems * sizeof(float), err));
    QC_TRY_GOTO(st, done, qc_malloc_aligned(&scratch, 64, f->threads * j.scratch_each, err));
    QC_TRY_GOTO(st, done,
                g ? qc_feedback_open_outputs(&j, err)
                  : qc_calloc((void **)&j.sums, chunks, 3 * sizeof(double), err));
    j.scratch = scratch;
    st = qc_feedback_aim(&j, target, err);
    if (st == QC_OK)
        st = g ? qc_feedback_run_outputs(&j, result, err) : qc_feedback_run_rows(&j, result, err);
done:
    qc_feedback_close_outputs(&j);
    qc_free(j.sums);
    qc_free(scratch);
    qc_free(target);
    return st;
}

uint64_t qc_feedback_weight_bytes(uint64_t rows, uint64_t n, unsigned threads, uint64_t block)
{
    const uint64_t wide = block || n < QC_TILE_COLS ? QC_TILE_COLS : n;
    uint64_t bytes = qc_sat_mul(qc_sat_mul(rows, n), sizeof(float)); /* T */
    bytes = qc_sat_add(bytes, qc_sat_mul(threads, qc_feedback_chunk_bytes(n, wide, block > 0)));
    bytes = qc_sat_add(bytes, qc_feedback_search_bytes(n, threads));
    bytes = qc_sat_add(bytes, qc_feedback_outputs_bytes(rows, n, block));
    return qc_sat_add(bytes, qc_sat_mul(qc_ceil_div_u64(rows, QC_FEEDBACK_ROWS), 24) + 4096);
}

double qc_feedback_weight_flops(uint64_t rows, uint64_t n, int cross,
                                const qc_feedback_options *options, uint64_t block)
{
    /* per weight: 2 n for T, n for feedback, 2 n for a sweep, n for each of three traces */
    const double per_weight = (cross ? 2.0 : 0.0) + 1.0 + 2.0 * options->sweeps + 3.0;
    const double more = qc_feedback_outputs_flops(rows, n, options->sweeps, block);
    return (double)rows * (double)n * ((double)n * per_weight + more);
}

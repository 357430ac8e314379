/* The search over rows of int8, once for all instruction sets. A row is read three times, in runs
 * of QC_ROW_FLUSH columns: largest value, errors of all candidates side by side, codes. */
#include "quant/quant_half.h"
#include "quant/scale_search_internal.h"

#include <math.h>
#include <string.h>

static const float row_steps[QC_SEARCH_CANDIDATES] = QC_SEARCH_ROW_STEPS;

typedef struct {
    _Alignas(64) float x[QC_ROW_FLUSH]; /* widened source */
    _Alignas(64) float h[QC_ROW_FLUSH]; /* after float16 */
    _Alignas(64) uint16_t half[QC_ROW_FLUSH];
    _Alignas(64) int8_t codes[QC_ROW_FLUSH]; /* of a run that is not whole */
} row_run;

typedef struct {
    const qc_search_steps *steps;
    const unsigned char *src;
    qc_dtype dtype;
    uint64_t cols;
    row_run *run;
} row_search;

static uint32_t padded(uint32_t n)
{
    return (n + QC_SEARCH_PAD - 1) / QC_SEARCH_PAD * QC_SEARCH_PAD;
}

/* Reads columns from col on of the row that starts at element `first`; returns how many,
 * unpadded. */
static uint32_t read_run(const row_search *c, uint64_t first, uint64_t col)
{
    const uint64_t left = c->cols - col;
    const uint32_t n = qc_min_u32(left, QC_ROW_FLUSH);
    const qc_quant_ops *ops = c->steps->ops;
    row_run *run = c->run;
    uint64_t overflow;
    ops->cast(c->src + (first + col) * (qc_dtype_bits(c->dtype) / 8), c->dtype, n, run->x,
              QC_DTYPE_F32, &overflow);
    ops->cast(run->x, QC_DTYPE_F32, n, run->half, QC_DTYPE_F16, &overflow);
    ops->cast(run->half, QC_DTYPE_F16, n, run->h, QC_DTYPE_F32, &overflow);
    for (uint32_t i = n; i < padded(n); i++)
        run->x[i] = run->h[i] = 0.0f;
    return n;
}

static float inverse_of(float s)
{
    return (1.0f / s) * 127.0f;
}

/* Finds the largest magnitude after float16; returns 1, or 0 after reporting. */
static int row_absmax(const row_search *c, uint64_t first, float *out, qc_piece_sums *sums)
{
    float largest = 0.0f;
    for (uint64_t col = 0; col < c->cols; col += QC_ROW_FLUSH) {
        const uint32_t n = read_run(c, first, col);
        uint32_t most = 0;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t magnitude = qc_f32_bits(c->run->h[i]) & 0x7fffffffu;
            most = magnitude > most ? magnitude : most;
        }
        if (most >= QC_F32_INF) {
            uint32_t i = 0;
            while (isfinite(c->run->h[i]))
                i++;
            qc_search_report_bad(c->src, c->dtype, first + col + i, sums);
            return 0;
        }
        largest = fmaxf(largest, qc_f32_of_bits(most));
    }
    *out = largest;
    return 1;
}

static float best_scale(const row_search *c, uint64_t first, float absmax)
{
    float inv[QC_SEARCH_CANDIDATES], rr[QC_SEARCH_CANDIDATES];
    double error[QC_SEARCH_CANDIDATES] = {0.0};
    for (unsigned j = 0; j < QC_SEARCH_CANDIDATES; j++)
        inv[j] = inverse_of(absmax * row_steps[j]);
    for (uint64_t col = 0; col < c->cols; col += QC_ROW_FLUSH) {
        const uint32_t n = read_run(c, first, col);
        c->steps->errors(NULL, c->run->h, padded(n), &qc_form_int8_rows, inv, QC_SEARCH_CANDIDATES,
                         rr);
        for (unsigned j = 0; j < QC_SEARCH_CANDIDATES; j++)
            error[j] += (double)rr[j];
    }
    unsigned best = 0;
    double least = INFINITY;
    for (unsigned j = 0; j < QC_SEARCH_CANDIDATES; j++) {
        double w = (double)(absmax * row_steps[j]) / 127.0;
        if (error[j] * (w * w) < least) {
            least = error[j] * (w * w);
            best = j;
        }
    }
    return absmax * row_steps[best];
}

static void note_largest(const row_run *run, uint32_t n, const int8_t *codes, float scb,
                         uint64_t first, qc_piece_sums *sums)
{
    for (uint32_t i = 0; i < n; i++) {
        double error = (double)fabsf(run->x[i] - ((float)codes[i] * scb) * QC_INT8_STEP);
        if (error > sums->max_err) {
            sums->max_err = error;
            sums->max_index = first + i;
        }
    }
}

static void encode_row(const row_search *c, uint64_t first, float scb, int8_t *codes,
                       qc_piece_sums *sums)
{
    const float inv = scb == 0.0f ? 0.0f : inverse_of(scb);
    for (uint64_t col = 0; col < c->cols; col += QC_ROW_FLUSH) {
        const uint32_t n = read_run(c, first, col);
        int8_t *to = n == padded(n) ? codes + first + col : c->run->codes;
        float ee, xx;
        float largest =
            c->steps->encode_row(c->run->x, c->run->h, padded(n), inv, scb, to, &ee, &xx);
        if (to == c->run->codes)
            memcpy(codes + first + col, to, n);
        sums->sum_ee += (double)ee;
        sums->sum_xx += (double)xx;
        if ((double)largest > sums->max_err)
            note_largest(c->run, n, to, scb, first + col, sums);
    }
}

void qc_search_rows_with(const qc_search_steps *steps, const void *src, qc_dtype dtype,
                         uint64_t rows, uint64_t cols, int8_t *codes, float *scb, void *scratch,
                         qc_piece_sums *sums)
{
    const row_search c = {steps, src, dtype, cols, scratch};
    _Static_assert(sizeof(row_run) <= QC_BLOCK_MAX * sizeof(float), "fits scratch");
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t row = 0; row < rows; row++) {
        const uint64_t first = row * cols;
        float absmax;
        if (!row_absmax(&c, first, &absmax, sums))
            return;
        scb[row] = absmax == 0.0f ? 0.0f : best_scale(&c, first, absmax);
        encode_row(&c, first, scb[row], codes, sums);
    }
}

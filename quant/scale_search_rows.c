/* The search over rows, once for all instruction sets. A row is read three times, in runs of
 * QC_ROW_FLUSH columns: largest value, errors of all candidates side by side, codes. */
#include "quant/quant_half.h"
#include "quant/scale_search_internal.h"

#include <math.h>
#include <string.h>

typedef struct {
    _Alignas(64) float x[QC_ROW_FLUSH]; /* widened source */
    _Alignas(64) float h[QC_ROW_FLUSH]; /* after float16 */
    _Alignas(64) uint16_t half[QC_ROW_FLUSH];
    _Alignas(64) uint8_t codes[QC_ROW_FLUSH]; /* codes of a run that is not whole */
} row_run;

typedef struct {
    const qc_search_steps *steps;
    const qc_form *form;
    const unsigned char *src;
    qc_dtype dtype;
    uint64_t cols;
    const qc_search_out *out;
    row_run *run;
    const float *seen; /* the run as the search sees it: h, or x of integers */
} row_search;

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
    if (!c->form->ops->integer) {
        ops->cast(run->x, QC_DTYPE_F32, n, run->half, QC_DTYPE_F16, &overflow);
        ops->cast(run->half, QC_DTYPE_F16, n, run->h, QC_DTYPE_F32, &overflow);
    }
    for (uint32_t i = n; i < qc_search_padded(n); i++)
        run->x[i] = run->h[i] = 0.0f;
    return n;
}

static float best_scale(const row_search *c, uint64_t first, float absmax)
{
    const qc_form_ops *form = c->form->ops;
    float s[QC_SEARCH_CANDIDATES], inv[QC_SEARCH_CANDIDATES], rr[QC_SEARCH_CANDIDATES];
    double error[QC_SEARCH_CANDIDATES] = {0.0};
    const float *steps = qc_search_steps_of[1][form->bits - 2];
    const float reach = form->integer ? qc_form_reach(form) : 1.0f;
    for (unsigned j = 0; j < QC_SEARCH_CANDIDATES; j++)
        s[j] = absmax * fabsf(steps[j]) / reach;
    if (form->integer)
        qc_search_round_scales(c->steps->ops, c->form->scale_dtype, s, QC_SEARCH_CANDIDATES);
    for (unsigned j = 0; j < QC_SEARCH_CANDIDATES; j++) {
        s[j] = copysignf(s[j], steps[j]);
        inv[j] = qc_search_inverse(form, s[j]);
    }
    for (uint64_t col = 0; col < c->cols; col += QC_ROW_FLUSH) {
        const uint32_t n = read_run(c, first, col);
        c->steps->errors(NULL, c->seen, qc_search_padded(n), 1, form, inv, QC_SEARCH_CANDIDATES,
                         rr);
        for (unsigned j = 0; j < QC_SEARCH_CANDIDATES; j++)
            error[j] += (double)rr[j];
    }
    unsigned best = 0;
    double least = INFINITY;
    for (unsigned j = 0; j < QC_SEARCH_CANDIDATES; j++) {
        double w = (double)s[j] / (double)form->span;
        if (error[j] * (w * w) < least) {
            least = error[j] * (w * w);
            best = j;
        }
    }
    return s[best];
}

void qc_search_note_largest(const qc_form_ops *form, const float *x, uint32_t n,
                            const uint8_t *codes, float scale, uint64_t first, qc_piece_sums *sums)
{
    for (uint32_t i = 0; i < n; i++) {
        const float value = qc_form_value(form, qc_form_code_at(form, codes, i), scale);
        const double error = (double)fabsf(x[i] - value);
        if (error > sums->max_err) {
            sums->max_err = error;
            sums->max_index = first + i;
        }
    }
}

/* Takes the first n codes, which end a row, without what was added to them. */
static void take_codes(const qc_form *form, const uint8_t *from, uint32_t n, uint8_t *to)
{
    const uint64_t bytes = qc_code_bytes(form->ops->bits, n);
    memcpy(to, from, (size_t)bytes);
    if (!qc_form_has_gaps(form))
        return;
    const unsigned used = n * form->ops->bits % 8;
    if (used > 0)
        to[bytes - 1] &= (uint8_t)((1u << used) - 1);
    const uint64_t end = qc_form_row_bytes(form), at = qc_code_bytes(form->ops->bits, form->cols);
    memset(to + bytes, 0, (size_t)(end - at));
}

static void encode_row(const row_search *c, uint64_t first, float scale, qc_piece_sums *sums)
{
    const double s2 = c->form->ops->integer ? (double)scale * (double)scale : 1.0;
    for (uint64_t col = 0; col < c->cols; col += QC_ROW_FLUSH) {
        const uint32_t n = read_run(c, first, col);
        uint8_t *codes = (uint8_t *)c->out->codes + qc_form_code_bytes(c->form, first + col);
        uint8_t *to = n == qc_search_padded(n) ? codes : c->run->codes;
        float ee, xx;
        float largest = c->steps->encode_row(c->run->x, c->seen, qc_search_padded(n), c->form->ops,
                                             scale, to, &ee, &xx);
        if (to == c->run->codes)
            take_codes(c->form, to, n, codes);
        sums->sum_ee += (double)ee * s2;
        sums->sum_xx += (double)xx * s2;
        if ((double)largest > sums->max_err)
            qc_search_note_largest(c->form->ops, c->run->x, n, to, scale, first + col, sums);
    }
}

void qc_search_rows_with(const qc_search_steps *steps, const qc_form *form, const void *src,
                         qc_dtype dtype, uint64_t n, const qc_search_out *out, void *scratch,
                         qc_piece_sums *sums)
{
    row_run *run = scratch;
    const row_search c = {steps,      form, src, dtype,
                          form->cols, out,  run, form->ops->integer ? run->x : run->h};
    _Static_assert(sizeof(row_run) <= QC_BLOCK_MAX * sizeof(float), "fits scratch");
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t row = 0; form->cols && row < n / form->cols; row++) {
        const uint64_t first = row * form->cols;
        float absmax = 0.0f, most;
        for (uint64_t col = 0; col < form->cols; col += QC_ROW_FLUSH) {
            const uint32_t seen = read_run(&c, first, col);
            if (!qc_find_absmax(c.seen, seen, src, dtype, first + col, &most, sums))
                return;
            absmax = fmaxf(absmax, most);
        }
        out->absmax[row] =
            absmax == 0.0f ? qc_form_round_scale(form, 0.0f) : best_scale(&c, first, absmax);
        encode_row(&c, first, out->absmax[row], sums);
    }
}

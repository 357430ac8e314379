/* Step 2: scales. For a block (a row of INT8_ROWS), a list of factors of its largest value is
 * tried, for NF4 with both signs, and the one of least weighed error is taken. Then, at most twice,
 * the scale that is best for the codes found replaces it, as long as the error falls. For double
 * quantized scales the group's nested absmax is that of the scales found, and the best of the few
 * nearest ones that the group can hold is taken.
 *
 * Blocks below QC_FEEDBACK_TINY have a scale of their largest value and may lose it. */
#include "quant/error_feedback_factors.h"
#include "quant/error_feedback_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "quant/piecework.h"

#include <math.h>
#include <string.h>

static const float nf4_factors[] = {QC_FEEDBACK_NF4_FACTORS};
static const float nf4_wide_factors[] = {QC_FEEDBACK_NF4_WIDE_FACTORS};
static const float int8_factors[] = {QC_FEEDBACK_INT8_FACTORS};
#define MOST        QC_FEEDBACK_MOST
#define COUNT(list) (sizeof(list) / sizeof *(list))
_Static_assert(COUNT(nf4_factors) <= MOST && COUNT(nf4_wide_factors) <= MOST &&
                   COUNT(int8_factors) <= MOST,
               "fits candidates");

typedef struct {
    const qc_feedback *f;
    const qc_form *form;
    const qc_quant_ops *quant;
    const float *x, *weights;
    uint64_t rows, elems, block, blocks; /* block: elements of one; a row for INT8_ROWS */
    qc_feedback_out *out;
    float *scratch;
    uint64_t scratch_each; /* floats */
} search;

float qc_feedback_inverse(const qc_form_ops *form, float scale)
{
    /* below this the inverse times 127 is infinite */
    if (!(fabsf(scale) >= 0x1p-118f))
        return 0.0f;
    return (1.0f / scale) * form->span;
}

/* Returns the error of a scale by rr, the sum of squares in places among codes. */
static double error_of(const qc_form_ops *form, float scale, float rr)
{
    const double step = (double)scale * (1.0 / (double)form->span);
    return (double)rr * (step * step);
}

/* Returns the scale of n elements, padded with zeros. */
static float block_scale(const search *s, const float *x, const float *d, uint32_t n)
{
    const qc_form_ops *form = s->form->ops;
    const int either_sign = form->signed_scales, wide = s->block >= QC_FEEDBACK_WIDE;
    const int few = form->bits <= 4;
    const float *factors = !few ? int8_factors : wide ? nf4_wide_factors : nf4_factors;
    const unsigned count = (unsigned)(!few   ? COUNT(int8_factors)
                                      : wide ? COUNT(nf4_wide_factors)
                                             : COUNT(nf4_factors));
    const float reach = qc_form_reach(form);
    float largest = 0.0f, scale[2 * MOST], inv[2 * MOST] = {0.0f}, rr[2 * MOST];
    for (uint32_t i = 0; i < n; i++)
        largest = fmaxf(largest, fabsf(x[i]));
    float best = qc_form_round_scale(s->form, largest / reach);
    if (largest < QC_FEEDBACK_TINY)
        return best;
    unsigned tried = 0;
    for (unsigned j = 0; j < count; j++)
        if (isfinite(largest * factors[j])) {
            scale[tried++] = qc_form_round_scale(s->form, largest * factors[j] / reach);
            if (either_sign) {
                scale[tried] = -scale[tried - 1];
                tried++;
            }
        }
    for (unsigned j = 0; j < tried; j++)
        inv[j] = qc_feedback_inverse(form, scale[j]);
    s->f->lanes->errors(x, d, n, form, inv, tried, rr);
    double least = INFINITY;
    for (unsigned j = 0; j < tried; j++) {
        const double e = error_of(form, scale[j], rr[j]);
        if (e < least) {
            least = e;
            best = scale[j];
        }
    }
    for (unsigned i = 0; i < QC_FEEDBACK_REFITS; i++) {
        float ux, uu;
        s->f->lanes->refit(x, d, n, form, qc_feedback_inverse(form, best), &ux, &uu);
        const float fit = ux / uu, better = qc_form_round_scale(s->form, fit);
        if (!isfinite(fit) || better == best ||
            (either_sign ? fabsf(better) : better) < QC_FEEDBACK_TINY)
            break;
        inv[0] = qc_feedback_inverse(form, better);
        s->f->lanes->errors(x, d, n, form, inv, 1, rr);
        const double e = error_of(form, better, rr[0]);
        if (!(e < least))
            break;
        least = e;
        best = better;
    }
    return best;
}

/* Copies the elements of block b and their weights, padded to whole lanes; returns how many. */
static uint32_t gather_block(const search *s, uint64_t b, float *x, float *d)
{
    const uint64_t first = b * s->block, cols = s->f->n;
    const uint32_t n = (uint32_t)qc_min_u64(s->elems - first, s->block);
    const uint32_t padded = (n + QC_LANES - 1) / QC_LANES * QC_LANES;
    memcpy(x, s->x + first, n * sizeof *x);
    for (uint32_t i = 0; i < n;) {
        const uint64_t col = (first + i) % cols, left = cols - col;
        const uint32_t run = left < n - i ? (uint32_t)left : n - i;
        if (s->weights)
            memcpy(d + i, s->weights + col, run * sizeof *d);
        else
            for (uint32_t j = 0; j < run; j++)
                d[i + j] = 1.0f;
        i += run;
    }
    for (uint32_t i = n; i < padded; i++)
        x[i] = d[i] = 0.0f;
    return padded;
}

/* Finds the scales of a group of blocks, before double quantization. */
static qc_status find_group(void *ctx, unsigned thread, uint64_t group, qc_error *err)
{
    const search *s = ctx;
    float *x = s->scratch + thread * s->scratch_each, *d = x + s->scratch_each / 2;
    const uint64_t from = group * QC_NESTED_BLOCK;
    (void)err;
    for (uint64_t b = from; b < from + QC_NESTED_BLOCK && b < s->blocks; b++) {
        const uint32_t padded = gather_block(s, b, x, d);
        s->out->absmax[b] = block_scale(s, x, d, padded);
    }
    return QC_OK;
}

/* The entry of the ascending map that is nearest to x. */
static uint8_t nearest_code(float x)
{
    unsigned best = 0;
    for (unsigned k = 1; k < 256; k++)
        if (fabsf(qc_dynamic_map[k] - x) < fabsf(qc_dynamic_map[best] - x))
            best = k;
    return (uint8_t)best;
}

/* Sets the scales as a reader has them: of the entries around the nearest one, that of least
 * error. */
static qc_status nest_group(void *ctx, unsigned thread, uint64_t group, qc_error *err)
{
    const search *s = ctx;
    const qc_feedback_out *out = s->out;
    float *x = s->scratch + thread * s->scratch_each, *d = x + s->scratch_each / 2;
    const uint64_t from = group ? group * QC_NESTED_BLOCK - out->lead : 0;
    const uint64_t n = qc_min_u64((group + 1) * QC_NESTED_BLOCK - out->lead, s->blocks) - from;
    const int last = from + n == s->blocks;
    const float given = group == 0 && out->ends[0] > 0.0f ? out->ends[0] : last ? out->ends[1] : 0;
    (void)err;
    s->quant->nested_quantize(out->absmax + from, n, out->nested_offset, out->absmax_codes + from,
                              out->nested_absmax + group);
    if (given > 0.0f) {
        out->nested_absmax[group] = given;
        for (uint64_t b = from; b < from + n; b++)
            out->absmax_codes[b] = nearest_code((out->absmax[b] - out->nested_offset) / given);
    }
    for (uint64_t b = from; b < from + n && out->nested_absmax[group] > 0.0f; b++) {
        const uint32_t padded = gather_block(s, b, x, d);
        const float target = fabsf(out->absmax[b]);
        float scales[256], inv[256], rr[256];
        unsigned codes[256], tried = 0;
        double least = INFINITY;
        if (target == 0.0f)
            continue;
        for (unsigned k = 0; k < 256; k++) {
            float scale = qc_dynamic_map[k] * out->nested_absmax[group];
            scale = scale + out->nested_offset;
            const float size = s->form->ops->signed_scales ? fabsf(scale) : scale;
            const int near =
                size >= target * QC_FEEDBACK_NEST_LEAST && size <= target * QC_FEEDBACK_NEST_MOST;
            if (k != out->absmax_codes[b] && !near)
                continue;
            codes[tried] = k;
            scales[tried] = scale;
            inv[tried++] = qc_feedback_inverse(s->form->ops, scale);
        }
        s->f->lanes->errors(x, d, padded, s->form->ops, inv, tried, rr);
        for (unsigned k = 0; k < tried; k++) {
            const double e = error_of(s->form->ops, scales[k], rr[k]);
            if (inv[k] != 0.0f && e < least) {
                least = e;
                out->absmax_codes[b] = (uint8_t)codes[k];
            }
        }
    }
    s->quant->nested_dequantize(out->absmax_codes + from, out->nested_absmax + group,
                                qc_dynamic_map, n, QC_NESTED_BLOCK, out->nested_offset,
                                out->absmax + from);
    return QC_OK;
}

static uint64_t scratch_floats(uint64_t n)
{
    return 2 * (qc_ceil_div_u64(n > QC_BLOCK_MAX ? n : QC_BLOCK_MAX, QC_LANES) * QC_LANES);
}

uint64_t qc_feedback_search_bytes(uint64_t n, unsigned threads)
{
    return qc_sat_mul(scratch_floats(n), threads * sizeof(float));
}

qc_status qc_feedback_scales(const qc_feedback *f, const qc_form *form, const float *x,
                             const float *weights, uint64_t rows, qc_feedback_out *out,
                             qc_error *err)
{
    search s = {.f = f,
                .form = form,
                .quant = qc_quant_ops_for(f->isa),
                .x = x,
                .weights = weights,
                .rows = rows,
                .elems = rows * f->n,
                .out = out,
                .scratch_each = scratch_floats(f->n)};
    s.block = qc_form_by_rows(form) ? f->n : form->block_elems;
    s.blocks = qc_ceil_div_u64(s.elems, s.block);
    const uint64_t groups = qc_ceil_div_u64(s.blocks, QC_NESTED_BLOCK);
    void *scratch = NULL;
    QC_TRY(qc_malloc_aligned(&scratch, 64, qc_feedback_search_bytes(f->n, f->threads), err));
    s.scratch = scratch;
    qc_status st = qc_piecework(f->threads, groups, find_group, &s, err);
    if (st == QC_OK && form->nested) {
        if (!out->offset_given)
            out->nested_offset =
                form->ops->signed_scales ? 0.0f : qc_nested_offset(out->absmax, s.blocks);
        const uint64_t nested = qc_ceil_div_u64(out->lead + s.blocks, QC_NESTED_BLOCK);
        st = qc_piecework(f->threads, nested, nest_group, &s, err);
    }
    qc_free(scratch);
    return st;
}

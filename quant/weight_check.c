#include "quant/weight_check.h"

#include "quant/quant_half.h"
#include "quant/quant_internal.h"
#include "quant/weight_lanes.h"

#include <float.h>
#include <math.h>
#include <string.h>

/* A code at the end stands for everything beyond it; times any scale this stays a number or
 * infinite. */
#define BEYOND 0x1p100f

void qc_check_init(qc_check *f, const qc_form *form)
{
    float own[16];
    const float *map = form->code_map ? form->code_map : own;
    memset(f, 0, sizeof *f);
    f->form = *form;
    f->form.code_map = NULL;
    f->largest = qc_form_reach(form->ops);
    if (form->ops->bits != 4)
        return;
    f->largest = 0.0f;
    for (int c = 0; c < 16; c++)
        own[c] = qc_form_unit(form->ops, c);
    f->mapped = memcmp(map, own, sizeof f->map) != 0;
    memcpy(f->map, map, sizeof f->map);
    for (unsigned c = 0; c < 16; c++) {
        float below = -BEYOND, above = BEYOND;
        for (unsigned k = 0; k < 16; k++) {
            if (map[k] < map[c] && map[k] > below)
                below = map[k];
            if (map[k] > map[c] && map[k] < above)
                above = map[k];
        }
        f->low[c] = below == -BEYOND ? below : (map[c] + below) * 0.5f;
        f->high[c] = above == BEYOND ? above : (map[c] + above) * 0.5f;
        f->largest = fabsf(map[c]) > f->largest ? fabsf(map[c]) : f->largest;
    }
}

void qc_check_sums_init(qc_check_sums *s)
{
    *s = (qc_check_sums){.max_index = UINT64_MAX,
                         .first_misplaced = UINT64_MAX,
                         .first_searched = UINT64_MAX,
                         .bad_source = UINT64_MAX,
                         .bad_value = UINT64_MAX};
}

static void take_first(uint64_t *total, uint64_t piece, uint64_t first)
{
    if (*total == UINT64_MAX && piece != UINT64_MAX)
        *total = first + piece;
}

void qc_check_add(qc_check_sums *total, const qc_check_sums *piece, uint64_t first)
{
    total->sum_xx += piece->sum_xx;
    total->sum_ee += piece->sum_ee;
    total->sum_expected += piece->sum_expected;
    total->clipped += piece->clipped;
    total->misplaced += piece->misplaced;
    total->scales += piece->scales;
    total->searched += piece->searched;
    total->sum_largest += piece->sum_largest;
    if (piece->max_index != UINT64_MAX &&
        (piece->max_err > total->max_err || total->max_index == UINT64_MAX)) {
        total->max_err = piece->max_err;
        total->max_index = first + piece->max_index;
    }
    take_first(&total->first_misplaced, piece->first_misplaced, first);
    take_first(&total->first_searched, piece->first_searched, first);
    take_first(&total->bad_source, piece->bad_source, first);
    take_first(&total->bad_value, piece->bad_value, first);
}

/* ---- elements -------------------------------------------------------------------------------- */

static const qc_lanes *lanes_of(const qc_quant_ops *ops)
{
    return QC_TABLE_FOR(ops->isa, qc_lanes);
}

/* The largest error is rounded when it is found, so elements that rounding may hide are looked at
 * again. */
static void find_largest(const float *x, const float *value, uint32_t n, uint64_t first,
                         qc_check_sums *s)
{
    for (uint32_t i = 0; i < n; i++) {
        double e = fabs((double)x[i] - (double)value[i]);
        if (s->bad_value == UINT64_MAX && !isfinite(value[i]))
            s->bad_value = first + i;
        if (e > s->max_err || s->max_index == UINT64_MAX) {
            s->max_err = e;
            s->max_index = first + i;
        }
    }
}

/* Returns whether sums of squares in float are what they would be in double, except for rounding.
 * Weights may have any size, and squares above 1e19 or below 1e-19 have no place in a float. */
static int floats_hold(const qc_lane_sums *l)
{
    return l->ee < 0x1p100f && l->xx < 0x1p100f && l->xx > 0x1p-80f;
}

static void add_squares(const qc_lane_sums *l, const float *x, const float *value, uint32_t n,
                        qc_check_sums *s)
{
    if (floats_hold(l)) {
        s->sum_ee += (double)l->ee;
        s->sum_xx += (double)l->xx;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        double e = (double)x[i] - (double)value[i];
        s->sum_ee += e * e;
        s->sum_xx += (double)x[i] * (double)x[i];
    }
}

static void add_errors(const qc_quant_ops *ops, const float *x, const float *value, uint32_t n,
                       uint64_t first, qc_check_sums *s)
{
    const qc_lanes *lanes = lanes_of(ops);
    for (uint32_t at = 0; at < n; at += QC_LANES_MOST) {
        uint32_t count = qc_min_u32(n - at, QC_LANES_MOST);
        qc_lane_sums l = lanes->errors(x + at, value + at, count);
        add_squares(&l, x + at, value + at, count, s);
        if (l.peak >= QC_F32_INF || s->max_index == UINT64_MAX ||
            (double)qc_f32_of_bits(l.peak) * (1.0 + 0x1p-22) >= s->max_err)
            find_largest(x + at, value + at, count, first + at, s);
    }
}

/* absmax: the largest magnitude of x. */
static uint64_t count_clipped(const qc_quant_ops *ops, const float *x, uint32_t n, float absmax,
                              float scale, float largest)
{
    double limit = fabs((double)scale) * (double)largest * (1.0 + QC_CHECK_CLIP);
    if ((double)absmax <= limit)
        return 0;
    return lanes_of(ops)->above(x, n, limit > (double)FLT_MAX ? FLT_MAX : (float)limit);
}

/* Returns the slack as a share of the scale. */
static float slack_of(float scale)
{
    return fabsf(scale) * (float)QC_CHECK_SLACK;
}

static uint32_t first_outside(const float *x, const float *low, const float *high, uint32_t n,
                              float scale)
{
    float slack = slack_of(scale);
    uint32_t i = 0;
    while (i < n && x[i] >= low[i] - slack && x[i] <= high[i] + slack)
        i++;
    return i;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

typedef struct {
    const qc_quant_ops *ops;
    const qc_check *f;
    const void *codes;   /* codes of the chunk */
    const float *scales; /* scales of the chunk */
    const float *slack;
    uint32_t n;
    uint64_t first; /* in the piece */
    qc_check_scratch *t;
} chunk;

static const unsigned char *codes_at(const qc_check *f, const void *codes, uint64_t i)
{
    return (const unsigned char *)codes + qc_form_code_bytes(&f->form, i);
}

static int is_codes4(const qc_check *f)
{
    return f->form.ops->bits == 4;
}

/* Decodes elements [at, at + n) of the chunk, from a block's start, with these scales. map: what
 * codes of 4 bits stand for, of whatever form they are; NULL: what the form says. */
static void decode(const chunk *c, const float *map, uint32_t at, uint32_t n, const float *scales,
                   float *out)
{
    const qc_form *form = &c->f->form;
    const unsigned char *codes = codes_at(c->f, c->codes, at);
    uint64_t overflow;
    if (map && is_codes4(c->f))
        c->ops->nf4_dequantize(codes, scales, map, n, form->block_elems, out, QC_DTYPE_F32,
                               &overflow);
    else
        form->ops->dequantize(c->ops, form, codes, scales, n, out, QC_DTYPE_F32, &overflow);
}

/* Returns half a step of int8 and the slack. */
static float reach_of(float scale)
{
    return fabsf(scale) * (0.5f * QC_INT8_STEP) + slack_of(scale);
}

/* Sets the borders of int8's codes: half a step to either side; codes at the ends stand for all
 * beyond. */
static void int8_borders(const int8_t *codes, const float *value, uint32_t n, float scale,
                         float *low, float *high)
{
    float half = fabsf(scale) * (0.5f * QC_INT8_STEP);
    for (uint32_t i = 0; i < n; i++) {
        int end = codes[i] >= 127 || codes[i] <= -127;
        float v = value[i];
        low[i] = end && v < 0.0f ? -FLT_MAX : v - half;
        high[i] = end && v > 0.0f ? FLT_MAX : v + half;
    }
}

/* Decodes the range in which each 4-bit code is good, for elements [at, at + n) and these
 * scales. */
static void decode_borders(const chunk *c, uint32_t at, uint32_t n, const float *scales)
{
    decode(c, c->f->low, at, n, scales, c->t->low + at);
    decode(c, c->f->high, at, n, scales, c->t->high + at);
}

/* Counts the elements of block k that lie outside of what their codes stand for with this scale;
 * *where is the first. Borders of 4-bit codes are decoded; a negative scale has turned the map
 * around. */
static uint64_t misplaced_with(const chunk *c, uint32_t k, float scale, uint32_t *where)
{
    uint32_t b = c->f->form.block_elems, at = k * b;
    uint32_t n = qc_min_u32(c->n - at, b);
    int turned = is_codes4(c->f) && scale < 0.0f;
    const float *low = (turned ? c->t->high : c->t->low) + at;
    const float *high = (turned ? c->t->low : c->t->high) + at;
    if (!is_codes4(c->f)) {
        decode(c, NULL, at, n, &scale, c->t->high + at);
        int8_borders((const int8_t *)codes_at(c->f, c->codes, at), c->t->high + at, n, scale,
                     c->t->low + at, c->t->high + at);
    }
    uint64_t outside = lanes_of(c->ops)->outside(c->t->x + at, low, high, n, slack_of(scale));
    *where = outside ? at + first_outside(c->t->x + at, low, high, n, scale) : 0;
    return outside;
}

static int scale_is_absmax(const chunk *c, uint32_t k)
{
    return fabsf(c->t->absmax[k] - c->scales[k] * c->f->largest) <= c->slack[k];
}

static void add_searched(uint64_t first, uint64_t n, float absmax, qc_check_sums *s)
{
    s->searched++;
    s->sum_largest += (double)n * ((double)absmax * (double)absmax);
    if (s->first_searched == UINT64_MAX)
        s->first_searched = first;
}

static void add_searched_block(const chunk *c, uint32_t k, qc_check_sums *s)
{
    uint32_t b = c->f->form.block_elems, at = k * b;
    add_searched(c->first + at, qc_min_u64(c->n - at, b), c->t->absmax[k], s);
}

static uint64_t clipped_in(const chunk *c, uint32_t k)
{
    const uint32_t b = c->f->form.block_elems, at = k * b;
    return count_clipped(c->ops, c->t->x + at, qc_min_u32(c->n - at, b), c->t->absmax[k],
                         c->scales[k], c->f->largest);
}

/* Judges block k; it needs c->t->x and the borders of 4-bit codes. `same` says that the codes are
 * those of absmax. */
static void judge_block(const chunk *c, uint32_t k, int same, qc_check_sums *s)
{
    int by_absmax = scale_is_absmax(c, k);
    uint32_t where = 0, other = 0;
    s->scales += c->t->absmax[k] > 0.0f;
    if (same && by_absmax)
        return;
    uint64_t outside = misplaced_with(c, k, c->scales[k], &where);
    if (outside == 0 && !by_absmax && c->t->absmax[k] > 0.0f)
        add_searched_block(c, k, s);
    if (outside > 0 && by_absmax) {
        uint32_t at = k * c->f->form.block_elems;
        float scale = c->t->absmax[k] / c->f->largest;
        if (is_codes4(c->f))
            decode_borders(c, at, qc_min_u32(c->n - at, c->f->form.block_elems), &scale);
        uint64_t n = misplaced_with(c, k, scale, &other);
        if (n < outside) {
            outside = n;
            where = other;
        }
    }
    s->misplaced += outside;
    if (outside > 0 && s->first_misplaced == UINT64_MAX)
        s->first_misplaced = c->first + where;
}

/* Returns what the scale that is there adds to the error of block k with the scale of absmax. */
static double moved(const chunk *c, uint32_t k)
{
    return qc_block_error_moved(c->t->absmax[k], c->scales[k], &c->t->errors[k]);
}

/* Returns what a scale that is not the block's largest value is expected to add: if it were that
 * value, its form would have rounded it, by anything up to the slack. */
static double rounded(const chunk *c, uint32_t k)
{
    double slack = (double)c->slack[k];
    return slack * slack / 3.0 * (double)qc_f32_from_bf16(c->t->errors[k].cc);
}

/* For codes that are those of absmax: only blocks that may hold the largest error, or whose scale
 * is another, are decoded. sums: those of quantizing. */
static void add_equal(const chunk *c, const void *src, qc_dtype dtype, const qc_piece_sums *sums,
                      qc_check_sums *s)
{
    uint32_t b = c->f->form.block_elems;
    s->sum_xx += sums->sum_xx;
    s->sum_ee += sums->sum_ee;
    s->sum_expected += sums->sum_ee;
    for (uint32_t k = 0; k * b < c->n; k++) {
        double a = (double)c->t->absmax[k], scale = (double)c->scales[k];
        double bound = qc_block_error_bound(c->t->absmax[k], c->scales[k], &c->t->errors[k]);
        double correction = moved(c, k);
        int good = scale_is_absmax(c, k);
        s->sum_ee += correction;
        s->sum_expected += good ? correction : rounded(c, k);
        int clips = a > fabs(scale) * (double)c->f->largest * (1.0 + QC_CHECK_CLIP);
        if (good && !clips && bound <= s->max_err && s->max_index != UINT64_MAX) {
            s->scales += a > 0.0;
            continue;
        }
        uint32_t at = k * b, n = qc_min_u32(c->n - at, b);
        uint64_t overflow;
        qc_check_sums here;
        qc_check_sums_init(&here);
        c->ops->cast((const unsigned char *)src + (uint64_t)at * (qc_dtype_bits(dtype) / 8), dtype,
                     n, c->t->x + at, QC_DTYPE_F32, &overflow);
        decode(c, c->f->map, at, n, c->scales + k, c->t->value + at);
        add_errors(c->ops, c->t->x + at, c->t->value + at, n, 0, &here);
        here.sum_xx = here.sum_ee = 0.0;
        here.clipped = clipped_in(c, k);
        qc_check_add(s, &here, c->first + at);
        if (is_codes4(c->f) && !good)
            decode_borders(c, at, n, c->scales + k);
        judge_block(c, k, 1, s);
    }
    /* Where the error is next to nothing, rounded corrections may outweigh it. */
    s->sum_ee = s->sum_ee < 0.0 ? 0.0 : s->sum_ee;
    s->sum_expected = s->sum_expected < 0.0 ? 0.0 : s->sum_expected;
}

/* Decodes and compares codes of 4 bits in one go. outside [blocks]: how many elements are outside
 * of their borders with the scales as they are. Returns 0 where the chunk's end does not allow
 * it. */
static int compare_codes4(const chunk *c, uint32_t *outside, qc_check_sums *s)
{
    const qc_lane_tables tables = {c->f->map, c->f->low, c->f->high};
    uint32_t b = c->f->form.block_elems, counts[QC_LANES_MOST / 32];
    if (!is_codes4(c->f) || c->n % 32 != 0)
        return 0;
    for (uint32_t at = 0; at < c->n; at += QC_LANES_MOST) {
        uint32_t n = qc_min_u32(c->n - at, QC_LANES_MOST), k = at / b;
        uint32_t block = qc_min_u32(b, QC_LANES_MOST);
        const float *x = c->t->x + at;
        qc_lane_sums l = lanes_of(c->ops)->codes4(x, codes_at(c->f, c->codes, at), c->scales + k,
                                                  &tables, n, block, (float)QC_CHECK_SLACK, counts);
        int held = floats_hold(&l);
        for (uint32_t i = 0; i * block < n; i++)
            outside[k + i] = counts[i] + (at % b != 0 ? outside[k + i] : 0);
        int largest = l.peak >= QC_F32_INF || s->max_index == UINT64_MAX ||
                      (double)qc_f32_of_bits(l.peak) * (1.0 + 0x1p-22) >= s->max_err;
        if (largest || !held)
            decode(c, c->f->map, at, n, c->scales + k, c->t->value + at);
        add_squares(&l, x, c->t->value + at, n, s);
        if (largest)
            find_largest(x, c->t->value + at, n, c->first + at, s);
    }
    return 1;
}

static void add_unequal(const chunk *c, const void *src, qc_dtype dtype, const qc_piece_sums *sums,
                        qc_check_sums *s)
{
    uint32_t b = c->f->form.block_elems, outside[QC_CHECK_CHUNK / 32];
    uint64_t overflow;
    double expected = sums->sum_ee;
    c->ops->cast(src, dtype, c->n, c->t->x, QC_DTYPE_F32, &overflow);
    int counted = compare_codes4(c, outside, s);
    if (!counted) {
        decode(c, c->f->map, 0, c->n, c->scales, c->t->value);
        add_errors(c->ops, c->t->x, c->t->value, c->n, c->first, s);
    }
    if (!is_codes4(c->f)) {
        counted = 1;
        for (uint32_t k = 0, at = 0; at < c->n; k++, at += b)
            outside[k] = lanes_of(c->ops)->outside8(
                c->t->x + at, c->t->value + at, (const int8_t *)codes_at(c->f, c->codes, at),
                qc_min_u32(c->n - at, b), reach_of(c->scales[k]));
    }
    for (uint32_t k = 0; k * b < c->n; k++) {
        uint32_t at = k * b, n = qc_min_u32(c->n - at, b);
        size_t bytes = (size_t)qc_form_code_bytes(&c->f->form, n);
        s->clipped += clipped_in(c, k);
        expected += scale_is_absmax(c, k) ? moved(c, k) : rounded(c, k);
        if (counted && outside[k] == 0) { /* all are inside with the scale as it is */
            s->scales += c->t->absmax[k] > 0.0f;
            if (c->t->absmax[k] > 0.0f && !scale_is_absmax(c, k))
                add_searched_block(c, k, s);
            continue;
        }
        if (is_codes4(c->f))
            decode_borders(c, at, n, c->scales + k);
        int same =
            memcmp(codes_at(c->f, c->codes, at), codes_at(c->f, c->t->codes, at), bytes) == 0;
        judge_block(c, k, same, s);
    }
    s->sum_expected += expected < 0.0 ? 0.0 : expected;
}

static float nearest(const float *map, float y)
{
    float best = map[0];
    for (unsigned k = 1; k < 16; k++)
        if (fabsf(y - map[k]) < fabsf(y - best))
            best = map[k];
    return best;
}

/* Handles the codes of a map that has no quantizer here, element by element. Returns 1, or 0 for a
 * bad source. */
static int add_mapped(const chunk *c, const void *src, qc_dtype dtype, qc_check_sums *s)
{
    uint32_t b = c->f->form.block_elems;
    uint64_t overflow;
    c->ops->cast(src, dtype, c->n, c->t->x, QC_DTYPE_F32, &overflow);
    for (uint32_t i = 0; i < c->n; i++) {
        if (!isfinite(c->t->x[i])) {
            s->bad_source = c->first + i;
            return 0;
        }
    }
    decode(c, c->f->map, 0, c->n, c->scales, c->t->value);
    if (is_codes4(c->f))
        decode_borders(c, 0, c->n, c->scales);
    add_errors(c->ops, c->t->x, c->t->value, c->n, c->first, s);
    for (uint32_t k = 0; k * b < c->n; k++) {
        uint32_t at = k * b, n = qc_min_u32(c->n - at, b);
        float a = 0.0f;
        double expected = 0.0;
        for (uint32_t i = at; i < at + n; i++)
            a = fabsf(c->t->x[i]) > a ? fabsf(c->t->x[i]) : a;
        c->t->absmax[k] = a;
        float scale = scale_is_absmax(c, k) ? c->scales[k] : a / c->f->largest;
        for (uint32_t i = at; a > 0.0f && i < at + n; i++) {
            double e = (double)c->t->x[i] -
                       (double)scale * (double)nearest(c->f->map, c->t->x[i] / a * c->f->largest);
            expected += e * e;
        }
        s->sum_expected += expected;
        s->clipped += clipped_in(c, k);
        judge_block(c, k, 0, s);
    }
    return 1;
}

/* ---- integers and rows ----------------------------------------------------------------------- */

/* Groups of codes, each with a scale that is never double quantized: so those of absmax are known
 * exactly, and what quantizing leaves is final. */
typedef struct {
    const qc_quant_ops *ops;
    const qc_check *f;
    qc_dtype dtype;
    const unsigned char *src, *codes; /* the piece and its codes */
    const float *scales;
    void *codes_ref; /* the codes that are made of the elements at work */
    qc_check_scratch *t;
    qc_check_sums *sums;
} groups;

static const unsigned char *source_at(const groups *c, uint64_t i)
{
    return c->src + i * (qc_dtype_bits(c->dtype) / 8);
}

/* Returns whether x lies where its code is the nearest one; the outermost codes stand for all
 * beyond. */
static int is_nearest(const qc_form_ops *form, int code, float x, float value, float scale)
{
    const int q = code - form->zero;
    if (fabsf(x - value) <= 0.5f * fabsf(scale) + slack_of(scale))
        return 1;
    return (q == form->lowest || q == form->highest) && (value < 0.0f ? x < value : x > value);
}

/* Judges n elements of a row of int8, whose codes are those of the weight as float16. */
static void judge_row(const groups *c, uint64_t first, uint32_t n, const int8_t *codes, float scale)
{
    qc_check_scratch *t = c->t;
    uint64_t overflow;
    c->ops->cast(t->x, QC_DTYPE_F32, n, t->half, QC_DTYPE_F16, &overflow);
    c->ops->cast(t->half, QC_DTYPE_F16, n, t->x, QC_DTYPE_F32, &overflow);
    uint64_t outside = lanes_of(c->ops)->outside8(t->x, t->value, codes, n, reach_of(scale));
    if (outside > 0 && c->sums->first_misplaced == UINT64_MAX) {
        int8_borders(codes, t->value, n, scale, t->low, t->high);
        uint64_t where = first_outside(t->x, t->low, t->high, n, scale);
        c->sums->first_misplaced = first + (where < n ? where : 0);
    }
    c->sums->misplaced += outside;
}

/* Checks elements [first, first + n) of a group, at most a chunk, one by one. Returns the largest
 * magnitude of integers. */
static float add_elements(const groups *c, uint64_t first, uint32_t n, float scale)
{
    const qc_form_ops *form = c->f->form.ops;
    const unsigned char *codes = codes_at(c->f, c->codes, first);
    uint64_t overflow;
    float largest = 0.0f;
    qc_form part = c->f->form;
    part.block_elems = 0;
    part.cols = n;
    c->ops->cast(source_at(c, first), c->dtype, n, c->t->x, QC_DTYPE_F32, &overflow);
    form->dequantize(c->ops, &part, codes, &scale, n, c->t->value, QC_DTYPE_F32, &overflow);
    add_errors(c->ops, c->t->x, c->t->value, n, first, c->sums);
    c->sums->clipped += count_clipped(c->ops, c->t->x, n, FLT_MAX, scale, c->f->largest);
    for (uint32_t i = 0; form->integer && i < n; i++) {
        largest = fmaxf(largest, fabsf(c->t->x[i]));
        if (is_nearest(form, qc_form_code_at(form, codes, i), c->t->x[i], c->t->value[i], scale))
            continue;
        c->sums->misplaced++;
        if (c->sums->first_misplaced == UINT64_MAX)
            c->sums->first_misplaced = first + i;
    }
    if (!form->integer)
        judge_row(c, first, n, (const int8_t *)codes, scale);
    return largest;
}

/* Quantizes n elements from `first` on, whole groups, and adds their sums if codes and scales are
 * those. Returns 1, or 0 where they are others, or -1 for a bad source. */
static int add_same(const groups *c, uint64_t first, uint64_t n, uint64_t group, float *scales,
                    qc_piece_sums *made)
{
    const qc_form_out out = {.codes = c->codes_ref, .absmax = scales};
    qc_form form = c->f->form;
    form.cols = form.block_elems ? form.cols : group;
    form.ops->quantize(c->ops, &form, source_at(c, first), c->dtype, n, &out, made);
    if (made->bad != QC_BAD_NONE) {
        c->sums->bad_source = first + made->bad_index;
        return -1;
    }
    if (memcmp(scales, c->scales + first / group, (size_t)(n / group) * sizeof *scales) != 0 ||
        memcmp(c->codes_ref, codes_at(c->f, c->codes, first),
               (size_t)qc_form_code_bytes(&form, n)) != 0)
        return 0;
    c->sums->sum_expected += made->sum_ee;
    c->sums->sum_xx += made->sum_xx;
    c->sums->sum_ee += made->sum_ee;
    if (made->max_err > c->sums->max_err || c->sums->max_index == UINT64_MAX) {
        c->sums->max_err = made->max_err;
        c->sums->max_index = first + made->max_index;
    }
    return 1;
}

/* Returns whether a group is not all zero, as far as its scale by absmax tells. */
static int is_there(const groups *c, float absmax_scale)
{
    return absmax_scale != qc_form_round_scale(&c->f->form, 0.0f);
}

/* Returns 1, or 0 for a bad source. */
static int add_group(const groups *c, uint64_t first, uint64_t group)
{
    const float scale = c->scales[first / group];
    const uint64_t before = c->sums->misplaced;
    float absmax_scale, largest = 0.0f;
    qc_piece_sums made;
    const int same = add_same(c, first, group, group, &absmax_scale, &made);
    if (same < 0)
        return 0;
    c->sums->scales += (uint64_t)is_there(c, absmax_scale);
    if (same)
        return 1;
    c->sums->sum_expected += made.sum_ee;
    for (uint64_t at = 0; at < group; at += QC_CHECK_CHUNK) {
        const uint32_t n = qc_min_u32(group - at, QC_CHECK_CHUNK);
        largest = fmaxf(largest, add_elements(c, first + at, n, scale));
    }
    const int other = c->f->form.ops->integer
                          ? scale != absmax_scale
                          : !(fabsf(absmax_scale - scale) <= absmax_scale * 0x1p-20f);
    if (is_there(c, absmax_scale) && c->sums->misplaced == before && other)
        add_searched(first, group, c->f->form.ops->integer ? largest : absmax_scale, c->sums);
    return 1;
}

/* Deals at once with chunks that are the same. */
static void check_groups(const groups *c, uint64_t n, uint64_t group)
{
    const uint64_t step = group < QC_CHECK_CHUNK ? QC_CHECK_CHUNK / group * group : group;
    for (uint64_t first = 0; group > 0 && first < n; first += step) {
        const uint64_t end = qc_min_u64(n, first + step);
        qc_piece_sums made;
        if (qc_form_by_rows(&c->f->form) ||
            add_same(c, first, end - first, group, c->t->absmax, &made) <= 0) {
            /* add_group finds it again, behind what comes before it. */
            c->sums->bad_source = UINT64_MAX;
            for (uint64_t at = first; at < end; at += group)
                if (!add_group(c, at, group))
                    return;
            continue;
        }
        for (uint64_t g = 0; g < (end - first) / group; g++)
            c->sums->scales += (uint64_t)is_there(c, c->t->absmax[g]);
    }
}

void qc_check_codes(const qc_quant_ops *ops, const qc_check *f, const void *src, qc_dtype dtype,
                    uint64_t n, const void *codes, const float *scales, const float *slack,
                    void *row_codes, qc_check_scratch *t, qc_check_sums *sums)
{
    const unsigned char *from = src;
    uint64_t each = qc_dtype_bits(dtype) / 8;
    const qc_form_out out = {t->codes, t->absmax, t->errors};
    qc_check_sums_init(sums);
    if (f->form.ops->integer || qc_form_by_rows(&f->form)) {
        void *made = qc_form_by_rows(&f->form) ? row_codes : t->codes;
        const groups c = {ops, f, dtype, src, codes, scales, made, t, sums};
        check_groups(&c, n, qc_form_scale_elems(&f->form));
        return;
    }
    for (uint64_t first = 0; first < n; first += QC_CHECK_CHUNK) {
        uint64_t block = first / f->form.block_elems;
        chunk c = {ops,
                   f,
                   codes_at(f, codes, first),
                   scales + block,
                   slack + block,
                   qc_min_u32(n - first, QC_CHECK_CHUNK),
                   first,
                   t};
        const void *at = from + first * each;
        qc_piece_sums made;
        if (f->mapped) {
            if (!add_mapped(&c, at, dtype, sums))
                return;
            continue;
        }
        f->form.ops->quantize(ops, &f->form, at, dtype, c.n, &out, &made);
        if (made.bad != QC_BAD_NONE) {
            sums->bad_source = first + made.bad_index;
            return;
        }
        size_t bytes = (size_t)qc_form_code_bytes(&f->form, c.n);
        if (memcmp(t->codes, c.codes, bytes) == 0)
            add_equal(&c, at, dtype, &made, sums);
        else
            add_unequal(&c, at, dtype, &made, sums);
    }
}

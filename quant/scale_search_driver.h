/* The search over blocks, from elements to codes: what is done per block or group. Each instruction
 * set's file includes it after it has defined `steps`, the work per element. So calls of `steps`
 * are direct and may be inlined, and loops over a group are vectors of that width. The method in
 * words is in scale_search_internal.h.
 *
 * A group is walked twice: once for targets and, when these have given the nested absmax, once for
 * codes. The second walk widens the elements again: a group of 16-bit weights in blocks of 64 is 32
 * KiB and still in the cache, while its floats would not be. */
#ifndef QC_QUANT_SCALE_SEARCH_DRIVER_H
#define QC_QUANT_SCALE_SEARCH_DRIVER_H

#include "quant/scale_search_internal.h"

#include <float.h>
#include <math.h>
#include <string.h>

static const float nf4_steps[QC_SEARCH_NF4_LATTICE] = QC_SEARCH_NF4_STEPS;
static const float int4_steps[QC_SEARCH_PAIR] = QC_SEARCH_INT4_STEPS;
static const float refit_shares[QC_SEARCH_REFIT_COUNT] = QC_SEARCH_REFITS;

typedef struct {
    const qc_form *form;
    int table;          /* whether codes are those of a table, with a lattice of its own */
    int refits;         /* always of double quantization */
    unsigned tried;     /* how many scales; with refit around each target */
    const float *steps; /* without double quantization: by what a target or absmax is multiplied */
    const uint16_t (*screen)[2 * QC_SEARCH_FACTORS]; /* NULL if there is none */
    const float *factor;                             /* factors of the screen's candidates */
    float reach;                                     /* qc_form_reach */
    const unsigned char *src;
    qc_dtype dtype;
    uint64_t n;
    const qc_search_out *out;
    qc_piece_sums *sums;
    qc_search_scratch *scratch;
    const qc_search_tables *tables;
    unsigned element_bytes;
} search;

/* A scale that a block may take. */
typedef struct {
    float s;
    double error;  /* sum (x - x')^2 */
    unsigned code; /* code of s where scales are double quantized */
    int usable;
} choice;

/* How scales are represented in a group. */
typedef struct {
    float nested_absmax;
    float lift; /* power of two that scales nested_absmax and differences */
    float inv;
    float offset;
} lattice;

static uint32_t block_count(const search *c, uint64_t block)
{
    uint64_t left = c->n - block * c->form->block_elems;
    return qc_min_u32(left, c->form->block_elems);
}

static uint32_t read_block(const search *c, uint64_t block)
{
    const uint32_t n = block_count(c, block);
    float *x = c->scratch->x;
    steps.widen(c->src + block * c->form->block_elems * c->element_bytes, c->dtype, n, x);
    for (uint32_t i = n; i < qc_search_padded(n); i++)
        x[i] = 0.0f;
    return n;
}

static void scale_up(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        x[i] *= QC_TINY_SCALE;
}

static float lift_of(float magnitude)
{
    return magnitude < QC_TINY_ABSMAX ? QC_TINY_SCALE : 1.0f;
}

/* ---- first walk ------------------------------------------------------------------------------ */

static float target_of(const search *c, uint32_t candidate, float absmax)
{
    const float factor = c->screen ? c->factor[candidate] : QC_SEARCH_INT8_TARGET;
    const float t = factor * absmax;
    return isfinite(t) ? t : copysignf(absmax, factor);
}

/* Returns the candidate of least total, apart from the best one and its neighbours of the same
 * sign. */
static uint32_t second_best(const qc_search_look *look)
{
    uint32_t second = UINT32_MAX;
    for (uint32_t m = 0; m < 2 * QC_SEARCH_FACTORS; m++) {
        const int same_sign = m / QC_SEARCH_FACTORS == look->best / QC_SEARCH_FACTORS;
        if (same_sign && m + 1 >= look->best && m <= look->best + 1)
            continue;
        if (second == UINT32_MAX || look->total[m] < look->total[second])
            second = m;
    }
    return second;
}

/* look is of floats that were scaled if the block is tiny; absmax is the true one. */
static void finish_target(const search *c, const qc_search_look *look, float absmax,
                          qc_search_target *out)
{
    const double q = (double)look->absmax / 127.0;
    *out = (qc_search_target){.absmax = absmax};
    out->xx = (double)look->xx * (q * q) * (absmax < QC_TINY_ABSMAX ? 0x1p-128 : 1.0);
    out->target = target_of(c, look->best, absmax);
    if (c->table && c->refits)
        out->second = target_of(c, second_best(look), absmax);
}

/* Returns 1, or 0 after reporting an element that has no code. */
static int find_target(const search *c, uint64_t block, qc_search_target *out)
{
    const uint32_t n = read_block(c, block);
    float *x = c->scratch->x;
    qc_search_look look;
    steps.look(x, qc_search_padded(n), 1, c->screen, &look);
    *out = (qc_search_target){.absmax = look.absmax};
    if (!isfinite(look.absmax))
        return qc_find_absmax(x, n, c->src, c->dtype, block * c->form->block_elems, &out->absmax,
                              c->sums);
    if (look.absmax == 0.0f)
        return 1;
    if (look.absmax < QC_TINY_ABSMAX) {
        scale_up(x, n);
        steps.look(x, qc_search_padded(n), 1, c->screen, &look);
    }
    finish_target(c, &look, out->absmax, out);
    return 1;
}

/* Returns how many whole blocks from `block` on, of `count`, are worked on side by side; or 0. */
static unsigned run_length(const search *c, uint64_t block, unsigned count)
{
    const uint64_t whole = c->n / c->form->block_elems - block;
    if (c->form->block_elems > QC_BLOCK_MAX / QC_SEARCH_RUN_BLOCKS)
        return 0;
    count = qc_min_u32(count, QC_SEARCH_RUN_BLOCKS);
    return qc_min_u32(whole, count);
}

static void read_run(const search *c, uint64_t block, unsigned blocks)
{
    steps.widen(c->src + block * c->form->block_elems * c->element_bytes, c->dtype,
                blocks * c->form->block_elems, c->scratch->x);
}

/* Finds the targets of a group's blocks; returns 1, or 0 after reporting. */
static int find_targets(const search *c, uint64_t first, unsigned count)
{
    qc_search_target *of = c->scratch->of;
    qc_search_look looks[QC_SEARCH_RUN_BLOCKS];
    for (unsigned i = 0; i < count;) {
        const unsigned run = run_length(c, first + i, count - i);
        if (run > 0) {
            read_run(c, first + i, run);
            steps.look(c->scratch->x, c->form->block_elems, run, c->screen, looks);
        }
        for (unsigned j = 0; j < run; j++)
            if (looks[j].absmax >= QC_TINY_ABSMAX && looks[j].absmax <= FLT_MAX)
                finish_target(c, &looks[j], looks[j].absmax, &of[i + j]);
            else if (!find_target(c, first + i + j, &of[i + j]))
                return 0;
        if (run == 0 && !find_target(c, first + i, &of[i]))
            return 0;
        i += run > 0 ? run : 1;
    }
    for (unsigned i = 0; i < count; i++)
        c->scratch->target[i] = of[i].target;
    return 1;
}

/* ---- scales of a group ----------------------------------------------------------------------- */

static lattice make_lattice(float nested_absmax, float offset)
{
    lattice l = {nested_absmax, lift_of(nested_absmax), 0.0f, offset};
    if (nested_absmax > 0.0f)
        l.inv = 1.0f / (nested_absmax * l.lift);
    return l;
}

static unsigned nearest_code(const lattice *l, float t)
{
    float d = t - l->offset;
    return l->inv == 0.0f ? QC_DYNAMIC_ZERO : qc_dynamic_search((d * l->lift) * l->inv);
}

static float scale_of(const lattice *l, unsigned code)
{
    return qc_dynamic_map[code] * l->nested_absmax + l->offset;
}

/* Returns the first code of the window around t; code `nearest` is the nearest to t. */
static unsigned window_start(const lattice *l, float t, unsigned nearest, unsigned window)
{
    unsigned first = nearest + (t > scale_of(l, nearest));
    first = first > window / 2 ? first - window / 2 : 0;
    return first > 256 - window ? 256 - window : first;
}

static float inverse_of(const search *c, float s)
{
    return (1.0f / s) * c->form->ops->span;
}

/* Finds the inverses of a block's scales, which are 0 for those that are not usable. */
static inline void find_inverses(const search *c, float absmax, const float *s, unsigned count,
                                 float *inv)
{
    const float lift = lift_of(absmax), least = absmax * lift * 0.25f;
    for (unsigned j = 0; j < count; j++) {
        const float lifted = s[j] * lift, magnitude = fabsf(lifted);
        const float by = inverse_of(c, lifted);
        inv[j] = magnitude * c->reach >= least && magnitude <= FLT_MAX ? by : 0.0f;
    }
}

/* Returns the best of a block's candidates; its code is the index in s. The loops have no branches:
 * each is a vector or a move. */
static inline choice best_of(const search *c, const qc_search_target *b, const float *s,
                             const float *inv, const float *rr, unsigned count)
{
    const float lift = lift_of(b->absmax);
    const double unlift = lift != 1.0f ? 0x1p-128 : 1.0, span = (double)c->form->ops->span;
    double error[QC_SEARCH_CANDIDATES];
    for (unsigned j = 0; j < count; j++) {
        double w = (double)(s[j] * lift);
        if (span != 1.0)
            w /= span;
        error[j] = (double)rr[j] * (w * w) * unlift;
        error[j] = inv[j] != 0.0f ? error[j] : (double)INFINITY;
    }
    unsigned best = count;
    double lowest = (double)INFINITY;
    for (unsigned j = 0; j < count; j++) {
        best = error[j] < lowest ? j : best;
        lowest = error[j] < lowest ? error[j] : lowest;
    }
    if (best == count)
        return (choice){.error = b->xx};
    return (choice){s[best], lowest, best, 1};
}

/* Reads the block's elements to scratch, as best_of needs them; returns how many, unpadded. */
static uint32_t read_scaled(const search *c, uint64_t block, const qc_search_target *b)
{
    uint32_t n = read_block(c, block);
    if (b->absmax < QC_TINY_ABSMAX)
        scale_up(c->scratch->x, n);
    return n;
}

/* Adds the codes of the window around t to the candidates, and chooses the best again. */
static void try_window(const search *c, const lattice *l, const qc_search_target *b, uint32_t n,
                       float t, unsigned nearest, choice *best)
{
    const unsigned window = c->tried, first = window_start(l, t, nearest, window);
    for (unsigned done = 0; done < window; done += QC_SEARCH_CANDIDATES) {
        const unsigned count = qc_min_u32(window - done, QC_SEARCH_CANDIDATES);
        float s[QC_SEARCH_CANDIDATES], inv[QC_SEARCH_CANDIDATES], rr[QC_SEARCH_CANDIDATES];
        for (unsigned j = 0; j < count; j++)
            s[j] = scale_of(l, first + done + j);
        find_inverses(c, b->absmax, s, count, inv);
        steps.errors(c->tables, c->scratch->x, qc_search_padded(n), 1, c->form->ops, inv, count,
                     rr);
        choice one = best_of(c, b, s, inv, rr, count);
        one.code += first + done;
        if (one.usable && (!best->usable || one.error < best->error))
            *best = one;
    }
}

/* `nearest` is the code of b's target. */
static choice choose_nested(const search *c, const lattice *l, const qc_search_target *b,
                            unsigned nearest, uint32_t n)
{
    choice best = {scale_of(l, nearest), b->xx, nearest, 0};
    try_window(c, l, b, n, b->target, nearest, &best);
    if (b->second != 0.0f)
        try_window(c, l, b, n, b->second, nearest_code(l, b->second), &best);
    return best;
}

/* ---- codes ----------------------------------------------------------------------------------- */

static uint8_t *codes_of(const search *c, uint64_t block)
{
    return (uint8_t *)c->out->codes + qc_form_code_bytes(c->form, block * c->form->block_elems);
}

/* Makes the codes and sums of a block whose scale is chosen; its elements are in scratch. */
static void encode_block(const search *c, uint64_t block, const qc_search_target *b, uint32_t n,
                         const choice *best)
{
    const float lift = lift_of(b->absmax);
    const size_t bytes = (size_t)qc_form_code_bytes(c->form, n);
    uint8_t *codes = codes_of(c, block);
    const int whole = n == qc_search_padded(n);
    float largest = INFINITY;
    if (best->usable) {
        uint8_t *to = whole ? codes : c->scratch->codes;
        const float inv = inverse_of(c, best->s * lift);
        largest =
            steps.encode(c->scratch->x, qc_search_padded(n), 1, c->form->ops, &inv, &best->s, to);
        if (!whole)
            memcpy(codes, to, bytes);
    } else {
        qc_form_put_zeros(c->form->ops, codes, n);
    }
    c->sums->sum_xx += b->xx;
    c->sums->sum_ee += best->error;
    if (lift != 1.0f) { /* the error is that of the unscaled elements */
        (void)read_block(c, block);
        largest = INFINITY;
    }
    if ((double)largest > c->sums->max_err)
        qc_search_note_largest(c->form->ops, c->scratch->x, n, codes, best->s,
                               block * c->form->block_elems, c->sums);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Writes the codes nearest to the targets of a group to scratch. The vector code of double
 * quantization finds them wherever its nested absmax is the one asked for. */
static void nearest_codes(const search *c, const lattice *l, unsigned count)
{
    float same;
    steps.ops->nested_quantize(c->scratch->target, count, l->offset, c->scratch->nearest, &same);
    if (same == l->nested_absmax)
        return;
    for (unsigned i = 0; i < count; i++)
        c->scratch->nearest[i] = (uint8_t)nearest_code(l, c->scratch->target[i]);
}

/* Returns the nested absmax of least error among some shares of this one. */
static float refit(const search *c, uint64_t first, unsigned count, float nested_absmax)
{
    float best = nested_absmax;
    double least = INFINITY;
    for (unsigned k = 0; k < QC_SEARCH_REFIT_COUNT; k++) {
        const lattice l = make_lattice(nested_absmax * refit_shares[k], c->form->offset);
        double error = 0.0;
        nearest_codes(c, &l, count);
        for (unsigned i = 0; i < count; i++) {
            const qc_search_target *b = &c->scratch->of[i];
            if (b->target == 0.0f)
                continue;
            const uint32_t n = read_scaled(c, first + i, b);
            error += choose_nested(c, &l, b, c->scratch->nearest[i], n).error;
        }
        if (error < least) {
            least = error;
            best = l.nested_absmax;
        }
    }
    return best;
}

/* Makes the candidates of a group's blocks, where scales are codes of double quantization. */
static void nested_scales(const search *c, const lattice *l, unsigned count)
{
    qc_search_scratch *s = c->scratch;
    float *scale = s->scale;
    for (unsigned i = 0; i < count; i++, scale += c->tried) {
        const unsigned first = window_start(l, s->target[i], s->nearest[i], c->tried);
        s->first_code[i] = first;
        for (unsigned j = 0; j < c->tried; j++)
            scale[j] = scale_of(l, first + j);
    }
}

/* Does the same without double quantization. Scales have the sign of the target, or of what it is
 * multiplied by. */
static inline void plain_scales(const search *c, unsigned count, unsigned tried)
{
    const qc_search_scratch *s = c->scratch;
    const float divisor = c->screen ? 1.0f : c->reach;
    float *scale = c->scratch->scale;
    for (unsigned i = 0; i < count; i++) {
        const float size = c->screen ? fabsf(s->target[i]) : s->of[i].absmax;
        for (unsigned j = 0; j < tried; j++)
            scale[i * tried + j] = size * fabsf(c->steps[j]) / divisor;
    }
    if (c->form->ops->integer)
        qc_search_round_scales(steps.ops, c->form->scale_dtype, scale, tried * count);
    for (unsigned i = 0; i < count; i++)
        for (unsigned j = 0; j < tried; j++)
            scale[i * tried + j] =
                copysignf(scale[i * tried + j], c->screen ? s->target[i] : c->steps[j]);
}

static inline void find_scales(const search *c, const lattice *l, unsigned count, unsigned tried)
{
    qc_search_scratch *s = c->scratch;
    if (c->form->nested)
        nested_scales(c, l, count);
    else
        plain_scales(c, count, tried);
    for (unsigned i = 0; i < count; i++)
        find_inverses(c, s->of[i].absmax, s->scale + i * tried, tried, s->inverse + i * tried);
}

/* Returns the best of what is tried of block i of the group, whose errors are rr. */
static choice choose(const search *c, unsigned i, const float *rr)
{
    const qc_search_scratch *s = c->scratch;
    const unsigned tried = c->tried;
    const float *scale = s->scale + i * tried, *inv = s->inverse + i * tried;
    choice best = tried == QC_SEARCH_PAIR ? best_of(c, &s->of[i], scale, inv, rr, QC_SEARCH_PAIR)
                                          : best_of(c, &s->of[i], scale, inv, rr, tried);
    if (c->form->nested) {
        best.code = best.usable ? best.code + s->first_code[i] : s->nearest[i];
        best.s = scale[best.code - s->first_code[i]];
    } else if (!best.usable) {
        best.s = c->form->ops->integer ? scale[0] : 0.0f;
    }
    return best;
}

static void put_choice(const search *c, uint64_t block, const choice *best)
{
    c->out->absmax[block] = best->s;
    if (c->form->nested)
        c->out->absmax_codes[block] = (uint8_t)best->code;
}

/* Settles block i of a group that begins with block `first`. */
static void settle_block(const search *c, const lattice *l, uint64_t first, unsigned i)
{
    qc_search_scratch *s = c->scratch;
    const qc_search_target *b = &s->of[i];
    choice best = {.code = c->form->nested ? s->nearest[i] : 0};
    if (b->target == 0.0f) {
        best.s = c->form->nested ? scale_of(l, best.code) : qc_form_round_scale(c->form, 0.0f);
        qc_form_put_zeros(c->form->ops, codes_of(c, first + i), block_count(c, first + i));
    } else {
        const uint32_t n = read_scaled(c, first + i, b);
        if (c->refits) {
            best = choose_nested(c, l, b, best.code, n);
        } else {
            float rr[QC_SEARCH_CANDIDATES];
            steps.errors(c->tables, s->x, qc_search_padded(n), 1, c->form->ops,
                         s->inverse + i * c->tried, c->tried, rr);
            best = choose(c, i, rr);
        }
        encode_block(c, first + i, b, n, &best);
    }
    put_choice(c, first + i, &best);
}

/* Settles blocks i .. i + run side by side if none is tiny, zero or without a usable scale; else
 * returns 0. */
static int settle_run(const search *c, uint64_t first, unsigned i, unsigned run)
{
    qc_search_scratch *s = c->scratch;
    const uint32_t n = c->form->block_elems;
    const float *inverse = s->inverse + i * c->tried;
    float rr[QC_SEARCH_RUN_BLOCKS * QC_SEARCH_CANDIDATES];
    float inv[QC_SEARCH_RUN_BLOCKS], scale[QC_SEARCH_RUN_BLOCKS];
    choice best[QC_SEARCH_RUN_BLOCKS];
    unsigned regular = 0;
    read_run(c, first + i, run);
    steps.errors(c->tables, s->x, n, run, c->form->ops, inverse, c->tried, rr);
    for (unsigned j = 0; j < run; j++) {
        best[j] = choose(c, i + j, rr + j * c->tried);
        scale[j] = best[j].s;
        inv[j] = inverse_of(c, scale[j]);
        regular += best[j].usable && s->of[i + j].absmax >= QC_TINY_ABSMAX;
    }
    if (regular < run)
        return 0;
    uint8_t *codes = codes_of(c, first + i);
    const float largest = steps.encode(s->x, n, run, c->form->ops, inv, scale, codes);
    for (unsigned j = 0; j < run; j++) {
        c->sums->sum_xx += s->of[i + j].xx;
        c->sums->sum_ee += best[j].error;
        put_choice(c, first + i + j, &best[j]);
        if ((double)largest > c->sums->max_err)
            qc_search_note_largest(c->form->ops, s->x + j * n, n, codes_of(c, first + i + j),
                                   scale[j], (first + i + j) * n, c->sums);
    }
    return 1;
}

/* Finds how the scales of a group are represented, and the codes nearest to its targets. */
static lattice settle_lattice(const search *c, uint64_t first, unsigned count)
{
    float nested_absmax = 0.0f;
    for (unsigned i = 0; i < count; i++) {
        const float t = c->scratch->target[i];
        const float d = t != 0.0f ? fabsf(t - c->form->offset) : 0.0f;
        nested_absmax = d > nested_absmax ? d : nested_absmax;
    }
    nested_absmax = isfinite(nested_absmax) ? nested_absmax : FLT_MAX;
    if (c->refits)
        nested_absmax = refit(c, first, count, nested_absmax);
    const lattice l = make_lattice(nested_absmax, c->form->offset);
    c->out->nested_absmax[first / QC_NESTED_BLOCK] = nested_absmax;
    nearest_codes(c, &l, count);
    return l;
}

/* Works in groups also where they mean nothing, so that blocks are worked on side by side. */
static void search_groups(const search *c, uint64_t blocks)
{
    for (uint64_t first = 0; first < blocks; first += QC_NESTED_BLOCK) {
        const unsigned count = qc_min_u32(blocks - first, QC_NESTED_BLOCK);
        if (!find_targets(c, first, count))
            return;
        lattice l = {0};
        if (c->form->nested)
            l = settle_lattice(c, first, count);
        if (c->tried == QC_SEARCH_PAIR) /* a constant, as in `choose` */
            find_scales(c, &l, count, QC_SEARCH_PAIR);
        else if (!c->refits)
            find_scales(c, &l, count, c->tried);
        for (unsigned i = 0; i < count;) {
            const unsigned run = c->refits ? 0 : run_length(c, first + i, count - i);
            const unsigned done = run > 0 ? run : 1;
            if (run == 0 || !settle_run(c, first, i, run))
                for (unsigned j = 0; j < done; j++)
                    settle_block(c, &l, first, i + j);
            i += done;
        }
    }
}

static unsigned candidate_count(const qc_form *form, int refits)
{
    const int table = qc_form_is_table(form->ops);
    if (refits)
        return table ? QC_SEARCH_NF4_WIDE : QC_SEARCH_INT8_WIDE;
    if (form->nested)
        return table ? QC_SEARCH_NF4_WINDOW : QC_SEARCH_INT8_WINDOW;
    return table                                        ? QC_SEARCH_NF4_LATTICE
           : form->ops->bits == 4                       ? QC_SEARCH_PAIR
           : form->ops->bits > 4 && form->ops->bits < 8 ? QC_SEARCH_SHORT
                                                        : QC_SEARCH_CANDIDATES;
}

static void search_blocks(const qc_form *form, qc_search_effort effort, const void *src,
                          qc_dtype dtype, uint64_t n, const qc_search_out *out, void *scratch,
                          qc_piece_sums *sums)
{
    const qc_search_tables *tables = qc_search_tables_get();
    const int table = qc_form_is_table(form->ops);
    const int refits = form->nested && effort == QC_SEARCH_REFIT;
    const unsigned list = qc_search_list(form->ops, form->block_elems);
    const int screened = list < QC_SEARCH_LISTS;
    const search c = {.form = form,
                      .table = table,
                      .refits = refits,
                      .tried = candidate_count(form, refits),
                      .steps = table      ? nf4_steps
                               : screened ? int4_steps
                                          : qc_search_steps_of[0][form->ops->bits - 2],
                      .screen = screened ? tables->screen[list] : NULL,
                      .factor = screened ? tables->factor[list] : NULL,
                      .reach = qc_form_reach(form->ops),
                      .src = src,
                      .dtype = dtype,
                      .n = n,
                      .out = out,
                      .sums = sums,
                      .scratch = scratch,
                      .tables = tables,
                      .element_bytes = qc_dtype_bits(dtype) / 8};
    if (qc_form_by_rows(form)) {
        qc_search_rows_with(&steps, form, src, dtype, n, out, scratch, sums);
        return;
    }
    const uint64_t blocks = n / form->block_elems + (n % form->block_elems != 0);
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    search_groups(&c, blocks);
}

#endif

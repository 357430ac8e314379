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
static const float int8_steps[QC_SEARCH_CANDIDATES] = QC_SEARCH_INT8_STEPS;
static const float int4_steps[QC_SEARCH_PAIR] = QC_SEARCH_INT4_STEPS;
static const float refits[QC_SEARCH_REFIT_COUNT] = QC_SEARCH_REFITS;

typedef struct {
    const qc_form *form;
    int table; /* whether codes are those of a table, with a lattice of its own */
    int refits;
    int pairs; /* whether two scales beside a screened target are tried, and no others */
    const uint16_t (*screen)[2 * QC_SEARCH_FACTORS]; /* NULL if there is none */
    const float *factor;                             /* of the screen's candidates */
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
    unsigned code; /* of double quantization */
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

static uint32_t padded(uint32_t n)
{
    return (n + QC_SEARCH_PAD - 1) / QC_SEARCH_PAD * QC_SEARCH_PAD;
}

static uint32_t read_block(const search *c, uint64_t block)
{
    const uint32_t n = block_count(c, block);
    float *x = c->scratch->x;
    steps.widen(c->src + block * c->form->block_elems * c->element_bytes, c->dtype, n, x);
    for (uint32_t i = n; i < padded(n); i++)
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
    steps.look(x, padded(n), c->screen, &look);
    *out = (qc_search_target){.absmax = look.absmax};
    if (!isfinite(look.absmax)) {
        uint32_t i = 0;
        while (isfinite(x[i]))
            i++;
        qc_search_report_bad(c->src, c->dtype, block * c->form->block_elems + i, c->sums);
        return 0;
    }
    if (look.absmax == 0.0f)
        return 1;
    if (look.absmax < QC_TINY_ABSMAX) {
        scale_up(x, n);
        steps.look(x, padded(n), c->screen, &look);
    }
    finish_target(c, &look, out->absmax, out);
    return 1;
}

/* How many whole blocks from `block` on, of `count`, are worked on side by side; or 0. */
static unsigned run_length(const search *c, uint64_t block, unsigned count)
{
    const uint64_t whole = c->n / c->form->block_elems - block;
    if (!steps.look_run || c->form->block_elems > QC_BLOCK_MAX / QC_SEARCH_RUN_BLOCKS)
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
            steps.look_run(c->scratch->x, c->form->block_elems, run, c->screen, looks);
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

static unsigned window_of(const search *c)
{
    if (c->refits)
        return c->table ? QC_SEARCH_NF4_WIDE : QC_SEARCH_INT8_WIDE;
    return c->table ? QC_SEARCH_NF4_WINDOW : QC_SEARCH_INT8_WINDOW;
}

/* The first code of the window around t; code `nearest` is the nearest to t. */
static unsigned window_start(const lattice *l, float t, unsigned nearest, unsigned window)
{
    unsigned first = nearest + (t > scale_of(l, nearest));
    first = first > window / 2 ? first - window / 2 : 0;
    return first > 256 - window ? 256 - window : first;
}

static unsigned plain_candidates(const search *c, const qc_search_target *b, float *s)
{
    const unsigned count = c->table ? QC_SEARCH_NF4_LATTICE : QC_SEARCH_CANDIDATES;
    if (c->form->ops->integer) {
        qc_search_integer_scales(steps.ops, c->form, b->absmax, int8_steps, s);
        return count;
    }
    for (unsigned j = 0; j < count; j++)
        s[j] = c->table ? b->target * nf4_steps[j] : b->absmax * int8_steps[j];
    return count;
}

static float inverse_of(const search *c, float s)
{
    return (1.0f / s) * c->form->ops->span;
}

/* The best of up to QC_SEARCH_CANDIDATES for the block in scratch (n padded elements, scaled if
 * tiny); its code is the index in s. The loops have no branches: each is a vector or a move. */
static choice best_of(const search *c, const qc_search_target *b, uint32_t n, const float *s,
                      unsigned count)
{
    const float lift = lift_of(b->absmax);
    const float least = b->absmax * lift * 0.25f;
    const double unlift = lift != 1.0f ? 0x1p-128 : 1.0;
    float inv[QC_SEARCH_CANDIDATES] = {0.0f}, rr[QC_SEARCH_CANDIDATES];
    double error[QC_SEARCH_CANDIDATES];
    for (unsigned j = 0; j < count; j++) {
        float lifted = s[j] * lift, magnitude = fabsf(lifted);
        float by = inverse_of(c, lifted);
        inv[j] = magnitude * c->reach >= least && magnitude <= FLT_MAX ? by : 0.0f;
    }
    steps.errors(c->tables, c->scratch->x, n, c->form->ops, inv, count, rr);
    for (unsigned j = 0; j < count; j++) {
        const double w = (double)(s[j] * lift) / (double)c->form->ops->span;
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
    const unsigned window = window_of(c), first = window_start(l, t, nearest, window);
    for (unsigned done = 0; done < window; done += QC_SEARCH_CANDIDATES) {
        const unsigned count = qc_min_u32(window - done, QC_SEARCH_CANDIDATES);
        float s[QC_SEARCH_CANDIDATES];
        for (unsigned j = 0; j < count; j++)
            s[j] = scale_of(l, first + done + j);
        choice one = best_of(c, b, padded(n), s, count);
        one.code += first + done;
        if (one.usable && (!best->usable || one.error < best->error))
            *best = one;
    }
}

/* nearest is the code of b's target. */
static choice choose_nested(const search *c, const lattice *l, const qc_search_target *b,
                            unsigned nearest, uint32_t n)
{
    choice best = {scale_of(l, nearest), b->xx, nearest, 0};
    try_window(c, l, b, n, b->target, nearest, &best);
    if (b->second != 0.0f)
        try_window(c, l, b, n, b->second, nearest_code(l, b->second), &best);
    return best;
}

static choice choose_plain(const search *c, const qc_search_target *b, uint32_t n)
{
    float s[QC_SEARCH_CANDIDATES];
    const unsigned tried = plain_candidates(c, b, s);
    choice best = best_of(c, b, padded(n), s, tried);
    if (!best.usable && c->form->ops->integer)
        best.s = s[0];
    return best;
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* Notes the largest |x - x'| of the block; x are the n elements as they are in the source. */
static void note_largest(const search *c, const float *x, uint64_t block, uint32_t n, float s,
                         const uint8_t *codes)
{
    const qc_form_ops *form = c->form->ops;
    for (uint32_t i = 0; i < n; i++) {
        const float value = form->unit(qc_form_code_at(form, codes, i));
        const double error = (double)fabsf(x[i] - value * s);
        if (error > c->sums->max_err) {
            c->sums->max_err = error;
            c->sums->max_index = block * c->form->block_elems + i;
        }
    }
}

static uint8_t *codes_of(const search *c, uint64_t block)
{
    return (uint8_t *)c->out->codes + qc_form_code_bytes(c->form, block * c->form->block_elems);
}

/* Codes and sums of a block whose scale is chosen; its elements are in scratch. */
static void encode_block(const search *c, uint64_t block, const qc_search_target *b, uint32_t n,
                         const choice *best)
{
    const float lift = lift_of(b->absmax);
    const size_t bytes = (size_t)qc_form_code_bytes(c->form, n);
    uint8_t *codes = codes_of(c, block);
    const int whole = n == padded(n);
    float largest = INFINITY;
    if (best->usable) {
        uint8_t *to = whole ? codes : c->scratch->codes;
        largest = steps.encode(c->scratch->x, padded(n), c->form->ops,
                               inverse_of(c, best->s * lift), best->s, to);
        if (!whole)
            memcpy(codes, to, bytes);
    } else {
        memset(codes, qc_form_zero_byte(c->form->ops), bytes);
    }
    c->sums->sum_xx += b->xx;
    c->sums->sum_ee += best->error;
    if (lift != 1.0f) { /* the error is that of the unscaled elements */
        (void)read_block(c, block);
        largest = INFINITY;
    }
    if ((double)largest > c->sums->max_err)
        note_largest(c, c->scratch->x, block, n, best->s, codes);
}

static void encode_zeros(const search *c, uint64_t block)
{
    memset(codes_of(c, block), qc_form_zero_byte(c->form->ops),
           (size_t)qc_form_code_bytes(c->form, block_count(c, block)));
}

/* ---- groups ---------------------------------------------------------------------------------- */

static float largest_difference(const search *c, unsigned count)
{
    float largest = 0.0f;
    for (unsigned i = 0; i < count; i++) {
        const float t = c->scratch->target[i];
        const float d = t != 0.0f ? fabsf(t - c->form->offset) : 0.0f;
        largest = d > largest ? d : largest;
    }
    return isfinite(largest) ? largest : FLT_MAX;
}

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

static double group_error(const search *c, uint64_t first, unsigned count, float nested_absmax)
{
    const lattice l = make_lattice(nested_absmax, c->form->offset);
    double sum = 0.0;
    nearest_codes(c, &l, count);
    for (unsigned i = 0; i < count; i++) {
        const qc_search_target *b = &c->scratch->of[i];
        if (b->target != 0.0f) {
            uint32_t n = read_scaled(c, first + i, b);
            sum += choose_nested(c, &l, b, c->scratch->nearest[i], n).error;
        }
    }
    return sum;
}

static float refit(const search *c, uint64_t first, unsigned count, float nested_absmax)
{
    float best = nested_absmax;
    double least = INFINITY;
    for (unsigned k = 0; k < QC_SEARCH_REFIT_COUNT; k++) {
        float candidate = nested_absmax * refits[k];
        double error = group_error(c, first, count, candidate);
        if (error < least) {
            least = error;
            best = candidate;
        }
    }
    return best;
}

/* The pairs of a group's blocks, where scales are codes of double quantization. */
static void nested_pairs(const search *c, const lattice *l, unsigned count)
{
    qc_search_scratch *s = c->scratch;
    for (unsigned i = 0; i < count; i++) {
        const float t = s->target[i];
        s->first_code[i] = window_start(l, t, s->nearest[i], QC_SEARCH_PAIR);
        for (unsigned j = 0; j < QC_SEARCH_PAIR; j++)
            s->scale[i][j] = scale_of(l, s->first_code[i] + j);
    }
}

/* The same for integers of four bits. */
static void integer_pairs(const search *c, unsigned count)
{
    qc_search_scratch *s = c->scratch;
    float *scale = &s->scale[0][0];
    for (unsigned i = 0; i < QC_SEARCH_PAIR * count; i++)
        scale[i] = fabsf(s->target[i / QC_SEARCH_PAIR]) * int4_steps[i % QC_SEARCH_PAIR];
    qc_search_round_scales(steps.ops, c->form->scale_dtype, scale, QC_SEARCH_PAIR * count);
    for (unsigned i = 0; i < QC_SEARCH_PAIR * count; i++)
        scale[i] = copysignf(scale[i], s->target[i / QC_SEARCH_PAIR]);
    memset(s->nearest, 0, sizeof s->nearest);
    memset(s->first_code, 0, sizeof s->first_code);
}

/* The candidates of a whole group, a pair for each block. This does what try_window and best_of do,
 * but saves a third of the time of a group. */
static void find_pairs(const search *c, const lattice *l, unsigned count)
{
    qc_search_scratch *s = c->scratch;
    if (c->form->nested)
        nested_pairs(c, l, count);
    else
        integer_pairs(c, count);
    for (unsigned i = 0; i < count; i++) {
        const float lift = lift_of(s->of[i].absmax), least = s->of[i].absmax * lift * 0.25f;
        for (unsigned j = 0; j < QC_SEARCH_PAIR; j++) {
            const float lifted = s->scale[i][j] * lift, magnitude = fabsf(lifted);
            const float inv = 1.0f / lifted;
            const int usable = magnitude * c->reach >= least && magnitude <= FLT_MAX;
            s->inverse[i][j] = usable ? inv : 0.0f;
        }
    }
}

/* rr is that of the pair of block i of the group. */
static choice choose_of_pair(const search *c, unsigned i, const float *rr)
{
    const qc_search_scratch *s = c->scratch;
    const qc_search_target *b = &s->of[i];
    const float lift = lift_of(b->absmax);
    double error[2];
    for (unsigned j = 0; j < 2; j++) {
        double w = (double)(s->scale[i][j] * lift);
        error[j] = (double)rr[j] * (w * w) * (lift != 1.0f ? 0x1p-128 : 1.0);
        error[j] = s->inverse[i][j] != 0.0f ? error[j] : (double)INFINITY;
    }
    const unsigned better = error[1] < error[0];
    const double least = better ? error[1] : error[0];
    if (least < (double)INFINITY)
        return (choice){s->scale[i][better], least, s->first_code[i] + better, 1};
    return (choice){s->scale[i][s->nearest[i] - s->first_code[i]], b->xx, s->nearest[i], 0};
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
    const qc_search_target *b = &c->scratch->of[i];
    choice best = {.code = c->form->nested ? c->scratch->nearest[i] : 0};
    if (b->target == 0.0f) {
        best.s = c->form->nested ? scale_of(l, best.code) : qc_form_round_scale(c->form, 0.0f);
        encode_zeros(c, first + i);
    } else {
        const uint32_t n = read_scaled(c, first + i, b);
        if (c->pairs) {
            float rr[QC_SEARCH_PAIR];
            steps.errors(c->tables, c->scratch->x, padded(n), c->form->ops, c->scratch->inverse[i],
                         QC_SEARCH_PAIR, rr);
            best = choose_of_pair(c, i, rr);
        } else {
            best = c->form->nested ? choose_nested(c, l, b, best.code, n) : choose_plain(c, b, n);
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
    float rr[QC_SEARCH_RUN_BLOCKS][QC_SEARCH_PAIR], inv[QC_SEARCH_RUN_BLOCKS],
        scale[QC_SEARCH_RUN_BLOCKS];
    choice best[QC_SEARCH_RUN_BLOCKS];
    unsigned regular = 0;
    read_run(c, first + i, run);
    steps.pair_errors(c->tables, s->x, n, run, c->form->ops, &s->inverse[i][0], &rr[0][0]);
    for (unsigned j = 0; j < run; j++) {
        best[j] = choose_of_pair(c, i + j, rr[j]);
        inv[j] = s->inverse[i + j][best[j].code - s->first_code[i + j]];
        scale[j] = best[j].s;
        regular += best[j].usable && s->of[i + j].absmax >= QC_TINY_ABSMAX;
    }
    if (regular < run)
        return 0;
    uint8_t *codes = codes_of(c, first + i);
    const float largest = steps.encode_run(s->x, n, run, c->form->ops, inv, scale, codes);
    for (unsigned j = 0; j < run; j++) {
        c->sums->sum_xx += s->of[i + j].xx;
        c->sums->sum_ee += best[j].error;
        put_choice(c, first + i + j, &best[j]);
        if ((double)largest > c->sums->max_err)
            note_largest(c, s->x + j * n, first + i + j, n, scale[j], codes + j * (n / 2));
    }
    return 1;
}

/* Finds how the scales of a group are represented, and the codes nearest to its targets. */
static lattice settle_lattice(const search *c, uint64_t first, unsigned count)
{
    float nested_absmax = largest_difference(c, count);
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
        if (c->pairs)
            find_pairs(c, &l, count);
        for (unsigned i = 0; i < count;) {
            const unsigned run = c->pairs ? run_length(c, first + i, count - i) : 0;
            const unsigned done = run > 0 ? run : 1;
            if (run == 0 || !settle_run(c, first, i, run))
                for (unsigned j = 0; j < done; j++)
                    settle_block(c, &l, first, i + j);
            i += done;
        }
    }
}

static void search_blocks(const qc_form *form, qc_search_effort effort, const void *src,
                          qc_dtype dtype, uint64_t n, const qc_search_out *out, void *scratch,
                          qc_piece_sums *sums)
{
    const qc_search_tables *tables = qc_search_tables_get();
    const int table = qc_form_is_table(form->ops), again = effort == QC_SEARCH_REFIT;
    const unsigned list = qc_search_list(form->ops, form->block_elems);
    const int screened = list < QC_SEARCH_LISTS;
    const search c = {.form = form,
                      .table = table,
                      .refits = again,
                      .pairs = form->nested ? table && !again : screened && !table,
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

static void search_rows(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols,
                        int8_t *codes, float *scb, void *scratch, qc_piece_sums *sums)
{
    const qc_form form = {.ops = &qc_form_int8_rows, .cols = cols};
    const qc_search_out out = {.codes = codes, .absmax = scb};
    for (uint64_t row = 0; cols == 0 && row < rows; row++)
        scb[row] = 0.0f;
    qc_search_rows_with(&steps, &form, src, dtype, rows * cols, &out, scratch, sums);
}

#endif

/* The search of scales that quant/error_feedback_search.c makes; the contracts are in
 * cuda_feedback_internal.h. The result is equal to the bit: sums are those of 16 lanes and are
 * folded alike, nothing is fused, and what is double there is double here.
 *
 * A team of 16 threads has a block (or a row): thread l takes elements l, l + 16, ..., as lane l
 * does on the CPU. Two teams make a warp and always walk together, because shuffles need the whole
 * warp. So what only one team wants is computed by both and kept by that one. Elements are read
 * again for each candidate, two values each (the element and its weight), from the first-level
 * cache for usual blocks (512 bytes a warp).
 *
 * The work is 54 candidates (forms with signed scales, 64 elements). The operations themselves are
 * some 16 instructions per element and candidate. The loop over elements has 48 (CUDA 13.0, sm_80),
 * of which NF4 goes through 44 and evenly spaced codes through 36; half of them are addresses,
 * loads and branches. So a weight of NF4 takes 74 instructions of a warp. 67 million weights take
 * 5e9, which the H100's 528 schedulers issue in 6 ms at best (calculated, at 1.7 GHz; not timed).
 */
#include "kernels/cuda_feedback_form.cuh"

#include "quant/error_feedback_factors.h"
#include "quant/quant_ops.h"

namespace
{

constexpr unsigned threads_per_block = 256;
constexpr unsigned team = 16;
constexpr unsigned teams_per_block = threads_per_block / team;

struct search {
    qc_cuda_form form;
    int wide;
    double unit;          /* of the square root of an error, at a scale of 1 */
    uint32_t n, block;    /* block: elements of a block, or of a row */
    uint32_t column_step; /* team % n */
    uint64_t elems, blocks;
    const float *x, *weights;
    float *absmax;
    /* for nesting */
    uint8_t *codes;
    const float *nested_absmax, *map;
    float offset;
};

/* The block that a team has. */
struct part {
    const float *x;
    uint32_t count;  /* elements; 0 for a team that has none */
    uint32_t column; /* that of this thread's first element */
    unsigned lane;
    qc_nf4_tables tables;
};

QC_DEVICE part part_of(const search &s, uint64_t b)
{
    const uint64_t first = b * s.block;
    part p = {s.x + first, 0, 0, threadIdx.x % team, qc_nf4_tables_of_lane(threadIdx.x % 32)};
    if (b < s.blocks) {
        p.count = s.elems - first < s.block ? (uint32_t)(s.elems - first) : s.block;
        p.column = (uint32_t)((first + p.lane) % s.n);
    }
    return p;
}

/* Walks this thread's elements and their weights. It gives zeros after the block's end. */
struct walk {
    uint32_t at, column;
};

QC_DEVICE walk begin(const part &p)
{
    return {p.lane, p.column};
}

QC_DEVICE void next(const search &s, const part &p, walk &w, float &x, float &d)
{
    x = d = 0.0f;
    if (w.at < p.count) {
        x = p.x[w.at];
        d = s.weights ? s.weights[w.column] : 1.0f;
    }
    w.at += team;
    w.column += s.column_step;
    if (w.column >= s.n)
        w.column -= s.n;
}

/* Returns the error for a scale. All threads of the team get it. */
QC_DEVICE double error_of(const search &s, const part &p, float scale, float inverse)
{
    float sum = 0.0f;
    walk w = begin(p);
    for (uint32_t i = 0; i < s.block; i += team) {
        float x, d;
        next(s, p, w, x, d);
        float y = __fmul_rn(x, inverse);
        float r = __fadd_rn(y, -qc_form_nearest(s.form.table, s.form, p.tables, y));
        sum = __fadd_rn(sum, __fmul_rn(d, __fmul_rn(r, r)));
    }
    double step = (double)scale * s.unit;
    return (double)qc_fold_team(sum) * (step * step);
}

QC_DEVICE float refit(const search &s, const part &p, float inverse)
{
    float sum_ux = 0.0f, sum_uu = 0.0f;
    walk w = begin(p);
    for (uint32_t i = 0; i < s.block; i += team) {
        float x, d;
        next(s, p, w, x, d);
        float y = __fmul_rn(x, inverse);
        float unit = qc_form_unit(s.form, qc_form_nearest(s.form.table, s.form, p.tables, y));
        float by_d = __fmul_rn(d, unit);
        sum_ux = __fadd_rn(sum_ux, __fmul_rn(by_d, x));
        sum_uu = __fadd_rn(sum_uu, __fmul_rn(by_d, unit));
    }
    sum_ux = qc_fold_team(sum_ux);
    sum_uu = qc_fold_team(sum_uu);
    return __fdiv_rn(sum_ux, sum_uu);
}

QC_DEVICE float largest_of(const part &p)
{
    float largest = 0.0f;
    for (uint32_t i = p.lane; i < p.count; i += team)
        largest = fmaxf(largest, fabsf(p.x[i]));
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(QC_ALL_LANES, largest, mask));
    return largest;
}

QC_DEVICE int is_finite(float v)
{
    return fabsf(v) < __uint_as_float(QC_CUDA_F32_INF);
}

/* Returns the scale at which the outermost code stands for this magnitude. */
QC_DEVICE float scale_of(const search &s, float magnitude)
{
    return qc_form_scale(s.form, __fdiv_rn(magnitude, s.form.reach));
}

__global__ void __launch_bounds__(threads_per_block) find_scales(search s)
{
    static constexpr float nf4[] = {QC_FEEDBACK_NF4_FACTORS};
    static constexpr float nf4_wide[] = {QC_FEEDBACK_NF4_WIDE_FACTORS};
    static constexpr float int8[] = {QC_FEEDBACK_INT8_FACTORS};
    const bool either_sign = s.form.signed_scales;
    const unsigned count = !s.form.few ? sizeof int8 / sizeof *int8
                           : s.wide    ? sizeof nf4_wide / sizeof *nf4_wide
                                       : sizeof nf4 / sizeof *nf4;
    const unsigned tries = either_sign ? 2 * count : count;
    /* Both teams of a warp go round equally often. */
    const uint64_t pairs = (s.blocks + 1) / 2 * 2;
    for (uint64_t b = (uint64_t)blockIdx.x * teams_per_block + threadIdx.x / team; b < pairs;
         b += (uint64_t)gridDim.x * teams_per_block) {
        const part p = part_of(s, b);
        const float largest = largest_of(p);
        const int tiny = largest < QC_FEEDBACK_TINY;
        float best = scale_of(s, largest);
        double least = (double)__uint_as_float(QC_CUDA_F32_INF);
#pragma unroll 1
        for (unsigned j = 0; j < tries; j++) {
            const unsigned k = either_sign ? j / 2 : j;
            const float factor = !s.form.few ? int8[k] : s.wide ? nf4_wide[k] : nf4[k];
            const float reached = __fmul_rn(largest, factor), size = scale_of(s, reached);
            const float scale = either_sign && j % 2 ? -size : size;
            const double e = error_of(s, p, scale, qc_form_inverse(s.form, scale));
            if (is_finite(reached) && !tiny && e < least) {
                least = e;
                best = scale;
            }
        }
        int over = tiny;
#pragma unroll 1
        for (unsigned i = 0; i < QC_FEEDBACK_REFITS; i++) {
            const float fit = refit(s, p, qc_form_inverse(s.form, best));
            const float better = qc_form_scale(s.form, fit);
            over |= !is_finite(fit) || better == best ||
                    (either_sign ? fabsf(better) : better) < QC_FEEDBACK_TINY;
            const float scale = over ? best : better;
            const double e = error_of(s, p, scale, qc_form_inverse(s.form, scale));
            over |= !(e < least);
            if (!over) {
                least = e;
                best = better;
            }
        }
        if (p.lane == 0 && b < s.blocks)
            s.absmax[b] = best;
    }
}

QC_DEVICE float nested_scale(const search &s, unsigned code, float group)
{
    return __fadd_rn(__fmul_rn(s.map[code], group), s.offset);
}

__global__ void __launch_bounds__(threads_per_block) nest_scales(search s)
{
    const uint64_t pairs = (s.blocks + 1) / 2 * 2;
    for (uint64_t b = (uint64_t)blockIdx.x * teams_per_block + threadIdx.x / team; b < pairs;
         b += (uint64_t)gridDim.x * teams_per_block) {
        const part p = part_of(s, b);
        const int there = b < s.blocks;
        const float group = there ? s.nested_absmax[b / QC_NESTED_BLOCK] : 0.0f;
        const float target = there ? fabsf(s.absmax[b]) : 0.0f;
        const unsigned own = there ? s.codes[b] : 0u;
        const int searched = group > 0.0f && target != 0.0f;
        double least = (double)__uint_as_float(QC_CUDA_F32_INF);
        unsigned best = own;
        for (unsigned k = 0; k < 256; k++) {
            const float scale = nested_scale(s, k, group);
            const float size = s.form.signed_scales ? fabsf(scale) : scale;
            const int tried =
                searched && (k == own || (size >= __fmul_rn(target, QC_FEEDBACK_NEST_LEAST) &&
                                          size <= __fmul_rn(target, QC_FEEDBACK_NEST_MOST)));
            if (!__any_sync(QC_ALL_LANES, tried))
                continue;
            const float inverse = qc_form_inverse(s.form, scale);
            const double e = error_of(s, p, scale, inverse);
            if (tried && inverse != 0.0f && e < least) {
                least = e;
                best = k;
            }
        }
        if (p.lane == 0 && there) {
            s.codes[b] = (uint8_t)best;
            s.absmax[b] = nested_scale(s, best, group);
        }
    }
}

search search_of(const qc_cuda_feedback *f, const qc_cuda_feedback_scales *a)
{
    search s = {};
    s.form = qc_cuda_form_of(a->form);
    s.unit = 1.0 / (double)s.form.span;
    s.n = (uint32_t)f->n;
    s.column_step = team % s.n;
    s.elems = a->rows * f->n;
    s.block = s.form.by_rows ? s.n : a->form->block_elems;
    s.blocks = (s.elems + s.block - 1) / s.block;
    s.wide = s.block >= QC_FEEDBACK_WIDE;
    s.x = a->x;
    s.weights = a->weights;
    s.absmax = a->absmax;
    s.codes = a->codes;
    s.nested_absmax = a->nested_absmax;
    s.map = a->map;
    s.offset = a->offset;
    return s;
}

qc_status start(const char *what, void (*kernel)(search), const qc_cuda_feedback *f,
                const qc_cuda_feedback_scales *a, qc_error *err)
{
    const search s = search_of(f, a);
    if (s.blocks == 0)
        return QC_OK;
    return qc_cuda_start(what, kernel, dim3(qc_cuda_grid_x(s.blocks, teams_per_block)),
                         dim3(threads_per_block), 0, f->tools.stream, err, s);
}

} // namespace

qc_status qc_cuda_feedback_find(const qc_cuda_feedback *f, const qc_cuda_feedback_scales *a,
                                qc_error *err)
{
    return start("feedback_find", find_scales, f, a, err);
}

qc_status qc_cuda_feedback_nest(const qc_cuda_feedback *f, const qc_cuda_feedback_scales *a,
                                qc_error *err)
{
    return start("feedback_nest", nest_scales, f, a, err);
}

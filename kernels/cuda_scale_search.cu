/* The scale search over blocks; the one over rows is in cuda_scale_search_rows.cu.
 * quant/scale_search_internal.h describes the method step by step. Every operation and its order
 * are those of the CPU.
 *
 * A thread block has a group (256 blocks), and sixteen threads have a block of the weight, as many
 * as its sums have lanes: lane l has elements l, l + 16, .... It keeps up to 128 of a block's
 * elements (CHUNK a lane) in registers. Larger blocks are read again from L1 or L2, chunk by chunk,
 * each time they are walked.
 *
 *   look     absmax; z by lanes; the screen: lane l adds candidates 2 l and 2 l + 1 of the rows of
 *            all elements, whose levels come by shuffle. Two 16-bit entries in a word are added as
 *            one: at most 4 of them, each below 2^14, so that no carry leaves the lower half
 *   errors   candidate j of up to 16 belongs to lane j: its scale, its inverse, and at the end its
 *            error in double; 2 at a time are summed over the elements
 *   choose   a butterfly over (error, index)
 *
 * With double quantization the group's targets meet in shared memory, and all threads find its
 * nested absmax. With REFIT a few values of it are tried, and one thread each adds their errors in
 * order. The shared memory is 16 KB of screen and 23 KB of the group.
 *
 * The nearest NF4 value: the guess k of qc_nf4_search is right or one too low, so c[k] or c[k + 1]
 * is the nearest of all values, even where a threshold is an ulp off the middle. y is clamped to
 * +-1 first, which changes no code. */
#include "kernels/cuda_quantize.h"

#include "kernels/cuda_internal.h"
#include "kernels/cuda_scale_search_internal.cuh"

#include <float.h>
#include <stddef.h>

namespace
{

constexpr unsigned threads_per_block = 256;
constexpr unsigned teams =
    threads_per_block / 16; /* per thread block; each team has a block at a time */
constexpr unsigned group_blocks = 256;
constexpr unsigned resident = 2; /* thread blocks per multiprocessor */
constexpr unsigned refits_most = QC_CUDA_SEARCH_REFITS;
constexpr unsigned grid_most = 4096;
constexpr int together = 2; /* candidates summed side by side */

/* Holds what is known of a group's blocks after the first walk. */
struct group_shared {
    uint32_t screen[256][16];
    float absmax[group_blocks]; /* of the elements as they are */
    float target[group_blocks]; /* 0 if there is none */
    float second[group_blocks];
    double xx[group_blocks];
    double error[refits_most][group_blocks];
    double error_sum[refits_most];
    float map[256], threshold[256];
    uint32_t largest;
};

struct search_job {
    qc_cuda_quantize_job a;
    uint64_t blocks;
    uint32_t chunks;      /* how many a block has */
    uint32_t window;      /* how many codes of double quantization, or scales, are tried */
    uint32_t refit_count; /* 0 for ONCE */
    bool screened;        /* whether the screen finds targets */
    uint32_t list;        /* of the screen and its factors */
    float span;           /* as in qc_form_ops */
    bool integer, by_absmax;
    qc_integers how; /* of evenly spaced codes */
};

/* The block that a team has. */
struct place {
    uint64_t begin; /* of its elements in src */
    uint32_t n;     /* 0 if there is none */
};

struct choice {
    double error;
    float s;
    uint32_t code;
    bool usable;
};

struct lattice {
    float nested_absmax, lift, inv, offset;
};

/* The CHUNK elements that a lane keeps. */
template <int chunk> struct elements {
    float x[chunk];
};

QC_DEVICE bool is_finite(float x)
{
    return qc_magnitude(x) < QC_CUDA_F32_INF;
}

QC_DEVICE float lift_of(float magnitude)
{
    return magnitude < QC_CUDA_TINY_ABSMAX ? QC_CUDA_TINY_SCALE : 1.0f;
}

/* Element i of the block; it is 0 after the block's end. */
QC_DEVICE float element(const search_job &job, const place &p, uint32_t i)
{
    return i < p.n ? qc_search_element(job.a.src, job.a.dtype, p.begin + i) : 0.0f;
}

template <int chunk>
QC_DEVICE void load(const search_job &job, const place &p, unsigned l, uint32_t at, float lift,
                    elements<chunk> *out)
{
#pragma unroll
    for (int e = 0; e < chunk; e++)
        out->x[e] = __fmul_rn(element(job, p, (at * chunk + (uint32_t)e) * 16 + l), lift);
}

/* ---- look ------------------------------------------------------------------------------------ */

/* Adds the rows of 16 elements, whose levels the team's lanes have. */
QC_DEVICE void add_rows(const group_shared &shared, uint32_t level, unsigned l, uint32_t *low,
                        uint32_t *high)
{
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
        uint32_t sum = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
            sum += shared.screen[__shfl_sync(QC_ALL_LANES, level, first + j, 16)][l];
        *low += sum & 0xffffu;
        *high += sum >> 16;
    }
}

QC_DEVICE uint32_t least_of_team(uint32_t v)
{
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) {
        uint32_t other = __shfl_xor_sync(QC_ALL_LANES, v, mask);
        v = other < v ? other : v;
    }
    return v;
}

QC_DEVICE float target_of(const search_job &job, uint32_t candidate, float absmax)
{
    float t = __fmul_rn(job.a.tables->factor[job.list][candidate % 16], absmax);
    t = is_finite(t) ? t : absmax;
    return candidate >= 16 ? -t : t;
}

QC_DEVICE uint32_t saturated(uint32_t v)
{
    return v < 65535u ? v : 65535u;
}

/* Reports the first of the lane's elements that has no code. Lanes that have one call it. */
QC_DEVICE void report_bad(const search_job &job, const place &p, unsigned l)
{
    for (uint32_t i = l; i < p.n; i += 16)
        if (!is_finite(element(job, p, i))) {
            qc_bad_at(job.a.bad, p.begin + i);
            return;
        }
}

/* Finds the targets of block b of the group. */
template <bool table, int chunk>
QC_DEVICE void find_target(const search_job &job, group_shared &shared, const place &p, unsigned b,
                           unsigned l)
{
    elements<chunk> held;
    uint32_t largest = 0;
    for (uint32_t c = 0; c < job.chunks; c++) {
        load(job, p, l, c, 1.0f, &held);
#pragma unroll
        for (int e = 0; e < chunk; e++) {
            uint32_t magnitude = qc_magnitude(held.x[e]);
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    uint32_t mine = largest;
    largest = qc_largest_of_team(largest);
    if (mine >= QC_CUDA_F32_INF)
        report_bad(job, p, l);
    bool there = largest != 0 && largest < QC_CUDA_F32_INF;
    float absmax = there ? __uint_as_float(largest) : 0.0f, lift = lift_of(absmax);
    float lifted = __fmul_rn(absmax, lift);
    float k = there ? __fmul_rn(__frcp_rn(lifted), 127.0f) : 0.0f;
    float xx = 0.0f;
    uint32_t total[2] = {0, 0};
    for (uint32_t c = 0; c < job.chunks; c++) {
        if (job.chunks > 1 || lift != 1.0f)
            load(job, p, l, c, lift, &held);
        uint32_t low = 0, high = 0;
#pragma unroll
        for (int e = 0; e < chunk; e++) {
            float z = __fmul_rn(there ? held.x[e] : 0.0f, k);
            xx = __fmaf_rn(z, z, xx);
            if (job.screened) {
                uint32_t level = __float_as_uint(__fadd_rn(z, QC_CUDA_ROUND)) -
                                 (__float_as_uint(QC_CUDA_ROUND) - 127u);
                add_rows(shared, level, l, &low, &high);
                if (e % 4 == 3 || e == chunk - 1) { /* a run of 64 elements ends */
                    total[0] += saturated(low);
                    total[1] += saturated(high);
                    low = high = 0;
                }
            }
        }
    }
    xx = qc_fold_team(xx);
    float target = 0.0f, second = 0.0f;
    if (job.screened) {
        uint32_t keys[2] = {total[0] << 5 | 2 * l, total[1] << 5 | (2 * l + 1)};
        uint32_t best = least_of_team(keys[0] < keys[1] ? keys[0] : keys[1]) & 31u;
        target = target_of(job, best, absmax);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint32_t m = keys[i] & 31u;
            if (m / 16 == best / 16 && m + 1 >= best && m <= best + 1)
                keys[i] = UINT32_MAX;
        }
        uint32_t next = least_of_team(keys[0] < keys[1] ? keys[0] : keys[1]) & 31u;
        if (job.refit_count > 0)
            second = target_of(job, next, absmax);
    } else {
        target = __fmul_rn(job.a.tables->int8_target, absmax);
        target = is_finite(target) ? target : absmax;
    }
    if (l == 0) {
        double q = __ddiv_rn((double)lifted, 127.0);
        double sum = __dmul_rn((double)xx, __dmul_rn(q, q));
        shared.xx[b] = !there ? 0.0 : lift != 1.0f ? __dmul_rn(sum, 0x1p-128) : sum;
        shared.absmax[b] = absmax;
        shared.target[b] = there ? target : 0.0f;
        shared.second[b] = there ? second : 0.0f;
    }
}

/* ---- scales ---------------------------------------------------------------------------------- */

QC_DEVICE lattice make_lattice(float nested_absmax, float offset)
{
    lattice g = {nested_absmax, lift_of(nested_absmax), 0.0f, offset};
    if (nested_absmax > 0.0f)
        g.inv = __frcp_rn(__fmul_rn(nested_absmax, g.lift));
    return g;
}

QC_DEVICE uint32_t nearest_code(const group_shared &shared, const lattice &g, float t)
{
    if (g.inv == 0.0f)
        return 127;
    float x = __fmul_rn(__fmul_rn(__fadd_rn(t, -g.offset), g.lift), g.inv);
    uint32_t code = 0;
#pragma unroll
    for (uint32_t step = 128; step > 0; step /= 2)
        code += x > shared.threshold[code + step - 1] ? step : 0;
    return code;
}

QC_DEVICE float scale_of(const group_shared &shared, const lattice &g, uint32_t code)
{
    return __fadd_rn(__fmul_rn(shared.map[code], g.nested_absmax), g.offset);
}

QC_DEVICE uint32_t window_start(const group_shared &shared, const lattice &g, float t,
                                uint32_t window)
{
    uint32_t nearest = nearest_code(shared, g, t);
    uint32_t first = nearest + (t > scale_of(shared, g, nearest) ? 1 : 0);
    first = first > window / 2 ? first - window / 2 : 0;
    return first > 256 - window ? 256 - window : first;
}

QC_DEVICE float inverse_of(const search_job &job, float s)
{
    return __fmul_rn(__frcp_rn(s), job.span);
}

/* Returns candidate j of an integer's scale. */
QC_DEVICE float integer_scale(const search_job &job, float absmax, float target, uint32_t j)
{
    const qc_cuda_search_tables *t = job.a.tables;
    if (!job.screened)
        return qc_integer_scale(job.how, absmax, t->steps[0][job.how.bits - 2][j]);
    float s = __fmul_rn(fabsf(target), t->int4_steps[j]);
    return copysignf(qc_round_scale(job.how.scale_dtype, s), target);
}

/* Sums r^2 for a few candidates. Candidate first + j uses the inverse of lane first + j, and that
 * lane gets its sum. */
template <bool table, int chunk>
QC_DEVICE void add_errors(const search_job &job, const place &p, unsigned l, float lift, float inv,
                          int first, const qc_nf4_values &values, elements<chunk> *held,
                          float *mine)
{
    float of[together], sum[together];
#pragma unroll
    for (int j = 0; j < together; j++) {
        of[j] = __shfl_sync(QC_ALL_LANES, inv, first + j, 16);
        sum[j] = 0.0f;
    }
    for (uint32_t c = 0; c < job.chunks; c++) {
        if (job.chunks > 1)
            load(job, p, l, c, lift, held);
#pragma unroll
        for (int e = 0; e < chunk; e++)
#pragma unroll
            for (int j = 0; j < together; j++) {
                float y = __fmul_rn(held->x[e], of[j]);
                float r = table ? qc_nf4_residue(values, y)
                                : __fadd_rn(y, -qc_nearest_number(job.how, y));
                sum[j] = __fmaf_rn(r, r, sum[j]);
            }
    }
#pragma unroll
    for (int j = 0; j < together; j++) {
        float folded = qc_fold_team(sum[j]);
        *mine = (int)l == first + j ? folded : *mine;
    }
}

/* Tries candidates 0 .. count - 1. Lane j has the j-th one and passes its scale s; `code` is the
 * code of candidate 0. A later candidate wins only with less error. */
template <bool table, int chunk>
QC_DEVICE void try_scales(const search_job &job, const place &p, unsigned l, float absmax, float s,
                          uint32_t count, uint32_t code, const qc_nf4_values &values,
                          elements<chunk> *held, choice *best)
{
    float lift = lift_of(absmax), lifted = __fmul_rn(s, lift), size = fabsf(lifted);
    float least = __fmul_rn(__fmul_rn(absmax, lift), 0.25f);
    bool usable = l < count && p.n > 0 && absmax != 0.0f &&
                  __fmul_rn(size, job.how.reach) >= least && is_finite(size);
    float inv = usable ? inverse_of(job, lifted) : 0.0f, rr = 0.0f;
#pragma unroll 1
    for (int first = 0; first < (int)count; first += together)
        add_errors<table, chunk>(job, p, l, lift, inv, first, values, held, &rr);
    double w = __ddiv_rn((double)lifted, (double)job.span);
    double error = __dmul_rn((double)rr, __dmul_rn(w, w));
    if (lift != 1.0f)
        error = __dmul_rn(error, 0x1p-128);
    usable = usable && inv != 0.0f;
    uint32_t index = usable ? l : 16;
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2) {
        double other = __shfl_xor_sync(QC_ALL_LANES, error, mask);
        uint32_t other_index = __shfl_xor_sync(QC_ALL_LANES, index, mask);
        bool take = other_index < 16 &&
                    (index >= 16 || other < error || (other == error && other_index < index));
        error = take ? other : error;
        index = take ? other_index : index;
    }
    float winner = __shfl_sync(QC_ALL_LANES, s, (int)(index % 16), 16);
    if (index < 16 && (!best->usable || error < best->error)) {
        best->error = error;
        best->s = winner;
        best->code = code + index;
        best->usable = true;
    }
}

/* Chooses for block b of the group. Its elements are in `held` if they fit, scaled if tiny. */
template <bool table, int chunk>
QC_DEVICE choice choose(const search_job &job, const group_shared &shared, const lattice &g,
                        const place &p, unsigned b, unsigned l, const qc_nf4_values &values,
                        elements<chunk> *held)
{
    const float *steps = table ? job.a.tables->nf4_steps : job.a.tables->steps[0][6];
    float absmax = shared.absmax[b], t = shared.target[b];
    choice best = {shared.xx[b], 0.0f, 0, false};
    if (job.by_absmax) {
        best.s = qc_integer_scale_of(job.how, absmax);
        best.usable = true;
        return best;
    }
    if (job.integer)
        best.s = t == 0.0f ? qc_round_scale(job.how.scale_dtype, 0.0f)
                           : integer_scale(job, absmax, t, 0);
    if (job.a.form.nested) {
        best.code = nearest_code(shared, g, t);
        best.s = scale_of(shared, g, best.code);
    }
    place some = p;
#pragma unroll 1
    for (int turn = 0; turn < (table && job.refit_count > 0 ? 2 : 1); turn++) {
        if (turn == 1) {
            t = shared.second[b];
            /* The other team of the warp may have a second target where this one has none. */
            some.n = t != 0.0f ? p.n : 0;
        }
        uint32_t start = job.a.form.nested ? window_start(shared, g, t, job.window) : 0;
#pragma unroll 1
        for (uint32_t done = 0; done < job.window; done += 16) {
            uint32_t left = job.window - done, count = left < 16 ? left : 16;
            uint32_t first = start + done, mine = first + (l < count ? l : 0);
            float s = job.a.form.nested ? scale_of(shared, g, mine)
                      : job.integer     ? integer_scale(job, absmax, t, mine)
                                        : __fmul_rn(table ? t : absmax, steps[mine]);
            try_scales<table, chunk>(job, some, l, absmax, s, count, first, values, held, &best);
        }
    }
    return best;
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* Writes codes, scale and sums of the team's block. */
template <bool table, int chunk>
QC_DEVICE void encode(const search_job &job, const group_shared &shared, const place &p,
                      uint64_t block, unsigned b, unsigned l, const choice &best,
                      const qc_nf4_values &values, elements<chunk> *held)
{
    float absmax = shared.absmax[b], lift = lift_of(absmax);
    bool coded = shared.target[b] != 0.0f && best.usable;
    bool counted = shared.target[b] != 0.0f;
    float inv = coded ? inverse_of(job, __fmul_rn(best.s, lift)) : 0.0f;
    unsigned char *codes = static_cast<unsigned char *>(job.a.codes);
    float largest = 0.0f, unit = job.by_absmax ? __frcp_rn(best.s) : 0.0f, rr = 0.0f, yy = 0.0f;
    uint32_t index = 0;
    for (uint32_t c = 0; c < job.chunks; c++) {
        if (job.chunks > 1)
            load(job, p, l, c, lift, held);
#pragma unroll
        for (int e = 0; e < chunk; e++) {
            uint32_t i = (c * chunk + (uint32_t)e) * 16 + l;
            float x = held->x[e], y = coded ? __fmul_rn(x, inv) : 0.0f, value;
            if (lift != 1.0f)
                x = element(job, p, i);
            if (table) {
                uint32_t code = qc_nf4_code_of(values, y);
                value = __shfl_sync(QC_ALL_LANES, values.tables.code, (int)code);
                uint32_t odd = __shfl_xor_sync(QC_ALL_LANES, code, 1);
                if (l % 2 == 0 && i < p.n)
                    codes[(p.begin + i) / 2] = (unsigned char)(code << 4 | odd);
            } else {
                float q = qc_nearest_number(job.how, y);
                value = __fmul_rn(q, job.how.step);
                qc_put_codes(job.how, codes + p.begin / 8 * job.how.bits, p.n, i - l, l, q);
            }
            float off = __fadd_rn(x, -__fmul_rn(value, best.s)), error = fabsf(off);
            if (job.by_absmax) {
                float r = __fmul_rn(off, unit), z = __fmul_rn(x, unit);
                rr = __fmaf_rn(r, r, rr);
                yy = __fmaf_rn(z, z, yy);
            }
            if (counted && i < p.n && error > largest) {
                largest = error;
                index = i;
            }
        }
    }
    qc_largest_at(&largest, &index);
    rr = qc_fold_team(rr);
    yy = qc_fold_team(yy);
    if (l != 0 || p.n == 0)
        return;
    job.a.absmax[block] = best.s;
    if (job.a.form.nested)
        job.a.absmax_codes[block] = (uint8_t)best.code;
    qc_search_sum sum = {counted ? best.error : 0.0, counted ? shared.xx[b] : 0.0, largest, index};
    if (job.by_absmax) {
        double s2 = __dmul_rn((double)best.s, (double)best.s);
        sum.ee = __dmul_rn((double)rr, s2);
        sum.xx = __dmul_rn((double)yy, s2);
    }
    static_cast<qc_search_sum *>(job.a.sums)[block] = sum;
}

/* ---- a group --------------------------------------------------------------------------------- */

QC_DEVICE place place_of(const search_job &job, uint64_t block)
{
    place p = {0, 0};
    if (block < job.blocks) {
        p.begin = block * job.a.form.block_elems;
        uint64_t left = job.a.n - p.begin;
        p.n = left < job.a.form.block_elems ? (uint32_t)left : job.a.form.block_elems;
    }
    return p;
}

/* Returns the nested absmax of the group's targets. All threads get it. */
QC_DEVICE float group_absmax(const search_job &job, group_shared &shared, unsigned count)
{
    unsigned b = threadIdx.x;
    uint32_t bits = 0;
    if (b < count && shared.target[b] != 0.0f)
        bits = qc_magnitude(__fadd_rn(shared.target[b], -job.a.form.offset));
    atomicMax(&shared.largest, bits);
    __syncthreads();
    float largest = __uint_as_float(shared.largest);
    __syncthreads(); /* the next group begins with 0 */
    return is_finite(largest) ? largest : FLT_MAX;
}

/* Returns the refit that leaves the group the least error. All threads get it. */
QC_DEVICE float best_refit(const search_job &job, group_shared &shared, unsigned count,
                           float nested_absmax)
{
    __syncthreads();
    if (threadIdx.x < job.refit_count) {
        double sum = 0.0;
        for (unsigned b = 0; b < count; b++)
            if (shared.target[b] != 0.0f)
                sum = __dadd_rn(sum, shared.error[threadIdx.x][b]);
        shared.error_sum[threadIdx.x] = sum;
    }
    __syncthreads();
    float best = nested_absmax;
    double least = 0.0;
    bool found = false;
    for (uint32_t k = 0; k < job.refit_count; k++) {
        double error = shared.error_sum[k];
        if (error <= DBL_MAX && (!found || error < least)) {
            found = true;
            least = error;
            best = __fmul_rn(nested_absmax, job.a.tables->refits[k]);
        }
    }
    return best;
}

template <bool table, int chunk>
__global__ void __launch_bounds__(threads_per_block, resident) search_groups(search_job job)
{
    static constexpr float map[256] = {QC_DYNAMIC_MAP_VALUES};
    static constexpr float thresholds[256] = {QC_DYNAMIC_THRESHOLD_VALUES};
    QC_SHARED(group_shared, shared);
    unsigned l = threadIdx.x % 16, team = threadIdx.x / 16;
    qc_nf4_values values = qc_nf4_values_of_lane(threadIdx.x % 32);
    shared.map[threadIdx.x] = map[threadIdx.x];
    shared.threshold[threadIdx.x] = thresholds[threadIdx.x];
    if (job.screened) {
        const uint32_t *from =
            reinterpret_cast<const uint32_t *>(&job.a.tables->screen[job.list][0][0]);
        for (unsigned i = threadIdx.x; i < 256 * 16; i += threads_per_block)
            shared.screen[i / 16][i % 16] = from[i];
    }
    for (uint64_t group = blockIdx.x; group * group_blocks < job.blocks; group += gridDim.x) {
        uint64_t first = group * group_blocks;
        unsigned count =
            job.blocks - first < group_blocks ? (unsigned)(job.blocks - first) : group_blocks;
        if (threadIdx.x == 0)
            shared.largest = 0;
        __syncthreads();                                       /* the last group is done with */
        for (unsigned b = team; b / 2 * 2 < count; b += teams) /* whole warps */
            find_target<table, chunk>(job, shared, place_of(job, first + b), b, l);
        __syncthreads();
        float nested_absmax = job.a.form.nested ? group_absmax(job, shared, count) : 0.0f;
        /* With REFIT there is a round for the error of each; the last round is for codes. */
#pragma unroll 1
        for (uint32_t round = 0; round <= job.refit_count; round++) {
            bool last = round == job.refit_count;
            float scale = nested_absmax;
            if (!last)
                scale = __fmul_rn(nested_absmax, job.a.tables->refits[round]);
            else if (job.refit_count > 0)
                scale = best_refit(job, shared, count, nested_absmax);
            lattice g = make_lattice(scale, job.a.form.offset);
            if (last && job.a.form.nested && threadIdx.x == 0)
                job.a.nested_absmax[group] = scale;
            for (unsigned b = team; b / 2 * 2 < count; b += teams) {
                place p = place_of(job, first + b);
                elements<chunk> held;
                if (job.chunks == 1)
                    load(job, p, l, 0, lift_of(shared.absmax[b]), &held);
                choice best = choose<table, chunk>(job, shared, g, p, b, l, values, &held);
                if (!last) {
                    if (l == 0)
                        shared.error[round][b] = best.error;
                    continue;
                }
                if (job.a.form.nested && shared.target[b] == 0.0f) {
                    best.code = nearest_code(shared, g, 0.0f);
                    best.s = scale_of(shared, g, best.code);
                }
                encode<table, chunk>(job, shared, p, first + b, b, l, best, values, &held);
            }
        }
    }
}

template <bool table, int chunk> qc_status launch(search_job job, qc_cuda_stream s, qc_error *err)
{
    uint64_t groups = (job.blocks + group_blocks - 1) / group_blocks;
    unsigned most = QC_GRID_MOST < grid_most ? QC_GRID_MOST : grid_most;
    job.chunks = job.a.form.block_elems / (16 * chunk);
    QC_TRY(qc_cuda_keep_resident(search_groups<table, chunk>, sizeof(group_shared), resident,
                                 "search_blocks", err));
    return qc_cuda_start("search_blocks", search_groups<table, chunk>,
                         dim3(groups < most ? (unsigned)groups : most), dim3(threads_per_block),
                         sizeof(group_shared), s, err, job);
}

template <bool table>
qc_status launch_by_size(const search_job &job, qc_cuda_stream s, qc_error *err)
{
    if (job.a.form.block_elems == 32)
        return launch<table, 2>(job, s, err);
    if (job.a.form.block_elems == 64)
        return launch<table, 4>(job, s, err);
    return launch<table, 8>(job, s, err);
}

} // namespace

extern "C" qc_status qc_cuda_search_blocks(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                           qc_error *err)
{
    const qc_cuda_search_limits limits = qc_cuda_search_limits_of(a);
    search_job job;
    job.a = *a;
    job.blocks = qc_form_scales(&a->form, a->n);
    job.chunks = 1;
    job.window = limits.tried;
    job.refit_count = limits.refit_count;
    job.list = limits.list;
    job.screened = limits.list < QC_CUDA_SEARCH_LISTS;
    job.span = a->form.ops->span;
    job.integer = a->form.ops->integer;
    job.by_absmax = !a->searched;
    job.how = qc_integers_of(&a->form);
    return qc_form_is_table(a->form.ops) ? launch_by_size<true>(job, s, err)
                                         : launch_by_size<false>(job, s, err);
}

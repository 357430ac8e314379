/* The scale search over rows: LLM.int8, whose rows pass through float16, and integers, which may
 * also take the scales of their largest values. The method and its order are in
 * quant/scale_search_internal.h.
 *
 * A thread block has a row, and sixteen threads have a run of up to 1024 columns (QC_CUDA_ROW_RUN),
 * of which lane l takes l, l + 16, .... There are up to sixteen runs at a time. The row is read
 * three times: for its largest value after float16, for the errors of the 16 candidates (8 side by
 * side), and for codes. The errors' sums over a run meet in shared memory and are added in the
 * order of runs in double. Rounding to float16 is monotone, so the largest value is that of the
 * source, rounded. Where scales are those of the largest values, the second
 * reading is left out. */
#include "kernels/cuda_quantize.h"

#include "kernels/cuda_internal.h"
#include "kernels/cuda_scale_search_internal.cuh"

namespace
{

constexpr uint32_t run_elems = QC_CUDA_ROW_RUN;
constexpr unsigned most_runs = 16;
constexpr unsigned candidates = 16;
constexpr unsigned together = 8; /* candidates summed side by side */

struct row_shared {
    double error[candidates];
    float scale[candidates];
    float folded[most_runs][candidates];
    uint32_t largest;
};

struct row_job {
    qc_cuda_quantize_job a;
    uint64_t rows, cols;
    uint64_t runs;      /* how many a row has */
    uint64_t row_bytes; /* from the codes of a row to those of the next */
    qc_integers how;
};

/* The run that a team has. */
struct row_run {
    uint64_t begin; /* of its elements in src */
    uint64_t run;   /* number in the row */
    uint32_t n;     /* 0 if the team has none */
};

QC_DEVICE row_run run_of(const row_job &job, uint64_t row, uint64_t run)
{
    row_run r = {0, run, 0};
    if (run < job.runs) {
        uint64_t left = job.cols - run * run_elems;
        r.n = left < run_elems ? (uint32_t)left : run_elems;
        r.begin = row * job.cols + run * run_elems;
    }
    return r;
}

QC_DEVICE float through_half(float x)
{
    return qc_float_of_half(qc_half_of_float(x));
}

QC_DEVICE float element(const row_job &job, const row_run &r, uint32_t i)
{
    return i < r.n ? qc_search_element(job.a.src, job.a.dtype, r.begin + i) : 0.0f;
}

/* Returns what the search sees of x. */
template <bool integer> QC_DEVICE float seen(float x)
{
    return integer ? x : through_half(x);
}

template <bool integer> QC_DEVICE bool is_bad(float x)
{
    return integer ? qc_magnitude(x) >= QC_CUDA_F32_INF : qc_is_bad_row(x);
}

/* Returns candidate j. */
template <bool integer> QC_DEVICE float scale_of(const row_job &job, float absmax, unsigned j)
{
    const float factor = job.a.tables->steps[1][job.how.bits - 2][j];
    return integer ? qc_integer_scale(job.how, absmax, factor) : __fmul_rn(absmax, factor);
}

template <bool integer> QC_DEVICE float inverse_of(float s)
{
    return integer ? __frcp_rn(s) : s == 0.0f ? 0.0f : __fmul_rn(__frcp_rn(s), 127.0f);
}

/* Returns the number of the code nearest to y. */
template <bool integer> QC_DEVICE float nearest(const row_job &job, float y)
{
    return integer ? qc_nearest_number(job.how, y) : qc_int8_nearest(y);
}

/* Returns the largest magnitude that this lane has seen in the team's run, as float bits. Reports
 * elements that have no code. */
template <bool integer>
QC_DEVICE uint32_t largest_of_run(const row_job &job, const row_run &r, unsigned l)
{
    uint32_t largest = 0;
    for (uint32_t i = l; i < r.n; i += 16) {
        uint32_t magnitude = qc_magnitude(element(job, r, i));
        largest = magnitude > largest ? magnitude : largest;
    }
    if (is_bad<integer>(__uint_as_float(largest)))
        for (uint32_t i = l; i < r.n; i += 16)
            if (is_bad<integer>(element(job, r, i))) {
                qc_bad_at(job.a.bad, r.begin + i);
                break;
            }
    return largest;
}

/* Puts the sums of r^2 over the run, for all candidates, into the team's line. inv is the inverse
 * of candidate l. */
template <bool integer>
QC_DEVICE void add_errors(const row_job &job, const row_run &r, unsigned l, float inv,
                          float *folded)
{
#pragma unroll
    for (unsigned first = 0; first < candidates; first += together) {
        float of[together], sum[together];
#pragma unroll
        for (unsigned j = 0; j < together; j++) {
            of[j] = __shfl_sync(QC_ALL_LANES, inv, (int)(first + j), 16);
            sum[j] = 0.0f;
        }
#pragma unroll 4
        for (uint32_t i = l; i < r.n; i += 16) {
            float h = seen<integer>(element(job, r, i));
#pragma unroll
            for (unsigned j = 0; j < together; j++) {
                float y = __fmul_rn(h, of[j]), e = __fadd_rn(y, -nearest<integer>(job, y));
                sum[j] = __fmaf_rn(e, e, sum[j]);
            }
        }
#pragma unroll
        for (unsigned j = 0; j < together; j++) {
            float all = qc_fold_team(sum[j]);
            if (l == first + j)
                folded[l] = all;
        }
    }
}

/* Returns the scale of the candidate with the least error. All threads get it. */
QC_DEVICE float best_scale(const row_shared &shared)
{
    unsigned best = 0;
    for (unsigned j = 1; j < candidates; j++)
        best = shared.error[j] < shared.error[best] ? j : best;
    return shared.scale[best];
}

template <bool integer>
QC_DEVICE void encode_run(const row_job &job, const row_run &r, uint64_t row, unsigned l, float scb)
{
    unsigned char *codes = static_cast<unsigned char *>(job.a.codes) + row * job.row_bytes +
                           r.run * (run_elems / 8) * job.how.bits;
    float inv = inverse_of<integer>(scb);
    float ee = 0.0f, xx = 0.0f, most = 0.0f;
    uint32_t column = 0, other_n = __shfl_xor_sync(QC_ALL_LANES, r.n, 16);
    /* Both teams of a warp put their codes together. */
    const uint32_t steps = r.n > other_n ? r.n : other_n;
    for (uint32_t at = 0; at < steps; at += 16) {
        const uint32_t i = at + l;
        float x = element(job, r, i);
        float q = nearest<integer>(job, __fmul_rn(seen<integer>(x), inv));
        float e = __fadd_rn(x, -__fmul_rn(__fmul_rn(q, scb), job.how.step));
        if (integer)
            qc_put_codes(job.how, codes, r.n, at, l, q);
        else if (i < r.n)
            codes[i] = (unsigned char)(int)q;
        column = fabsf(e) > most ? i : column;
        most = fmaxf(most, fabsf(e));
        if (integer) { /* in units of the scale */
            e = __fmul_rn(e, inv);
            x = __fmul_rn(x, inv);
        }
        ee = __fmaf_rn(e, e, ee);
        xx = __fmaf_rn(x, x, xx);
    }
    ee = qc_fold_team(ee);
    xx = qc_fold_team(xx);
    qc_largest_at(&most, &column);
    if (r.n > 0 && l == 0)
        reinterpret_cast<float4 *>(job.a.sums)[row * job.runs + r.run] =
            make_float4(ee, xx, most, __uint_as_float(column));
}

/* Returns the scale of a row, whose errors the thread block adds up for it. All threads get it. */
template <bool integer>
QC_DEVICE float find_scale(const row_job &job, row_shared &shared, uint64_t row, float absmax)
{
    unsigned l = threadIdx.x % 16, team = threadIdx.x / 16, teams = blockDim.x / 16;
    if (integer && (!job.a.searched || absmax == 0.0f))
        return qc_integer_scale_of(job.how, absmax);
    if (threadIdx.x < candidates)
        shared.scale[threadIdx.x] = scale_of<integer>(job, absmax, threadIdx.x);
    __syncthreads();
    float inv = inverse_of<integer>(shared.scale[l]);
    for (uint64_t first = 0; first < job.runs; first += teams) {
        add_errors<integer>(job, run_of(job, row, first + team), l, inv, shared.folded[team]);
        __syncthreads();
        if (threadIdx.x < candidates)
            for (unsigned t = 0; t < teams && first + t < job.runs; t++)
                shared.error[threadIdx.x] =
                    __dadd_rn(shared.error[threadIdx.x], (double)shared.folded[t][threadIdx.x]);
        __syncthreads();
    }
    if (threadIdx.x < candidates) {
        double s = (double)shared.scale[threadIdx.x], w = integer ? s : __ddiv_rn(s, 127.0);
        shared.error[threadIdx.x] = __dmul_rn(shared.error[threadIdx.x], __dmul_rn(w, w));
    }
    __syncthreads();
    return absmax == 0.0f ? 0.0f : best_scale(shared);
}

/* Without the 4, ptxas spills a register on sm_80 to have more thread blocks resident. */
template <bool integer>
__global__ void __launch_bounds__(16 * most_runs, 4) search_rows(row_job job)
{
    QC_SHARED(row_shared, shared);
    unsigned l = threadIdx.x % 16, team = threadIdx.x / 16, teams = blockDim.x / 16;
    for (uint64_t row = blockIdx.x; row < job.rows; row += gridDim.x) {
        if (threadIdx.x == 0)
            shared.largest = 0;
        if (threadIdx.x < candidates)
            shared.error[threadIdx.x] = 0.0;
        __syncthreads();
        uint32_t largest = 0;
        for (uint64_t first = 0; first < job.runs; first += teams) {
            uint32_t bits = largest_of_run<integer>(job, run_of(job, row, first + team), l);
            largest = bits > largest ? bits : largest;
        }
        atomicMax(&shared.largest, largest);
        __syncthreads();
        /* NaN and infinity were reported already, so any result will do. */
        float absmax = seen<integer>(__uint_as_float(shared.largest));
        float scb = find_scale<integer>(job, shared, row, absmax);
        for (uint64_t first = 0; first < job.runs; first += teams)
            encode_run<integer>(job, run_of(job, row, first + team), row, l, scb);
        if (threadIdx.x == 0)
            job.a.absmax[row] = scb;
        __syncthreads(); /* shared is about to be written again */
    }
}

} // namespace

extern "C" qc_status qc_cuda_search_rows(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                         qc_error *err)
{
    const uint64_t cols = a->form.cols, rows = a->n / cols;
    row_job job = {*a,
                   rows,
                   cols,
                   cols / run_elems + (cols % run_elems != 0),
                   qc_form_row_bytes(&a->form),
                   qc_integers_of(&a->form)};
    unsigned teams = job.runs < most_runs ? (unsigned)job.runs + (unsigned)job.runs % 2 : most_runs;
    return qc_cuda_start(
        "search_rows", a->form.ops->integer ? search_rows<true> : search_rows<false>,
        dim3(qc_cuda_grid_x(rows, 1)), dim3(16 * teams), sizeof(row_shared), s, err, job);
}

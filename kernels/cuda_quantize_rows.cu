/* Quantizes to row-wise int8 (LLM.int8).
 *
 * A run is up to QC_CUDA_ROW_RUN columns of one row, and 16 threads (half a warp) own it. They copy
 * it to shared memory with 16-byte loads and note the largest magnitude. Once the row's absmax is
 * known they walk the run in the order of the sums: column i belongs to lane i % 16, so thread l
 * reads columns l, l + 16, ... of the copy:
 *
 *     global -> shared   thread l: 16 bytes at 16 (l + 16 j), j = 0, 1, ...
 *     shared -> codes    thread l: column l + 16 j,           j = 0 .. 63
 *     codes -> global    thread l: 16 bytes at 16 (l + 16 j)
 *
 * Codes overwrite the copy from its beginning: code i lies in the bytes of element i / 2 or i / 4,
 * which was read in an earlier step, or in this one before the __syncwarp. Runs lie 16 elements
 * more than their size apart, so that the two halves of a warp use different banks.
 *
 * A thread block holds as many runs as it has half warps. That is several rows, where rows are
 * short, or one row. A row that is longer than all its runs (32768 columns in 16 bits, 16384 in
 * float) is read again, part by part, for its codes. On sm_75 that is half as many columns, because
 * its 64 KB of shared memory are less than the 65 KB they take. Rounding to float16 is monotone. So
 * the row's absmax over float16 values is the rounded absmax of the source, and a value is too
 * large for float16 exactly when the absmax of some run is.
 *
 * Bytes of global memory per element: source 2 (4) + code 1 + 16 per run. Shared memory per thread
 * block: runs * (1024 + 16) * source size + 128, which is 16 KB to 65 KB. */
#include "kernels/cuda_quantize.h"

#include "kernels/cuda_internal.h"
#include "kernels/cuda_quantize_internal.cuh"

#include <string.h>

namespace
{

constexpr uint32_t run_elems = QC_CUDA_ROW_RUN;
constexpr unsigned most_runs = 32;

struct row_job {
    const void *src;
    uint64_t rows, cols;
    unsigned char *codes;
    float *scb;
    float4 *errors;
    uint64_t *bad;
    uint32_t runs;             /* how many runs the thread block has */
    uint64_t runs_row;         /* how many runs a row has */
    uint32_t rows_together;    /* how many rows the thread block has */
    uint64_t parts;            /* how many parts a row is done in: 1 unless runs < runs_row */
    bool wide_src, wide_codes; /* every run begins and ends at a multiple of 16 bytes */
};

/* Holds what the thread block keeps. The maxima are followed by `runs` runs. */
struct row_shared {
    uint32_t largest[most_runs]; /* each row's largest magnitude, as float bits */
    unsigned char bytes[1];
};

template <qc_dtype dtype> struct run_size {
    static constexpr uint32_t bytes =
        (run_elems + 16) * (uint32_t)sizeof(typename qc_source<dtype>::type);
};

/* Says where the run of a half warp lies. */
struct run_place {
    uint64_t row, begin; /* flat index of its first element */
    uint32_t row_slot, count;
    uint64_t run_in_row;
};

QC_DEVICE run_place place_of(const row_job &job, uint64_t first_row, uint64_t part, unsigned slot)
{
    run_place p;
    p.row_slot = job.parts > 1 ? 0 : slot / (uint32_t)job.runs_row;
    p.run_in_row = part * job.runs + slot - p.row_slot * job.runs_row;
    p.row = first_row + p.row_slot;
    p.begin = p.row * job.cols + p.run_in_row * run_elems;
    p.count = 0;
    if (p.row_slot < job.rows_together && p.row < job.rows && p.run_in_row < job.runs_row) {
        uint64_t left = job.cols - p.run_in_row * run_elems;
        p.count = left < run_elems ? (uint32_t)left : run_elems;
    }
    return p;
}

/* Loads the run into shared memory and returns its largest magnitude over the half warp, as float
 * bits. */
template <qc_dtype dtype>
QC_DEVICE uint32_t load_run(const row_job &job, const run_place &p, unsigned l, unsigned char *to)
{
    typedef qc_source<dtype> source;
    typedef typename source::type type;
    const type *from = static_cast<const type *>(job.src) + p.begin;
    uint32_t bits = 0;
    if (job.wide_src) {
        constexpr int steps = (int)(run_elems * sizeof(type) / 256); /* 8 or 16 */
        uint32_t bytes = p.count * (uint32_t)sizeof(type), largest = 0;
        uint4 v[8];
#pragma unroll
        for (int half = 0; half < steps; half += 8) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint32_t at = 16 * (l + 16 * (uint32_t)(half + j));
                v[j] = make_uint4(0, 0, 0, 0);
                if (at < bytes)
                    v[j] = qc_ld_stream_16(reinterpret_cast<const unsigned char *>(from) + at);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) {
                uint32_t at = 16 * (l + 16 * (uint32_t)(half + j));
                *reinterpret_cast<uint4 *>(to + at) = v[j];
                largest = source::largest(largest, v[j].x);
                largest = source::largest(largest, v[j].y);
                largest = source::largest(largest, v[j].z);
                largest = source::largest(largest, v[j].w);
            }
        }
        bits = source::largest_bits(largest);
    } else {
        for (uint32_t i = l; i < p.count; i += 16) {
            type element = from[i];
            reinterpret_cast<type *>(to)[i] = element;
            uint32_t magnitude = qc_magnitude(source::one(&element, 0));
            bits = magnitude > bits ? magnitude : bits;
        }
    }
    bits = qc_largest_of_team(bits);
    __syncwarp();
    return bits;
}

/* Computes the codes of the run and its error sums. The codes end up at the beginning of `data`. */
template <qc_dtype dtype, bool errors>
QC_DEVICE void code_run(const row_job &job, const run_place &p, unsigned l, float scb,
                        unsigned char *data)
{
    typedef qc_source<dtype> source;
    constexpr uint32_t unroll = 4;
    const typename source::type *x_of = reinterpret_cast<const typename source::type *>(data);
    float scale = scb == 0.0f ? 0.0f : __fmul_rn(__frcp_rn(scb), 127.0f);
    float ee = 0.0f, xx = 0.0f, most = 0.0f;
    uint32_t column = 0;
    for (uint32_t i0 = 0; i0 < run_elems; i0 += 16 * unroll) {
        if (!__any_sync(QC_ALL_LANES, i0 < p.count))
            break;
        float x[unroll];
#pragma unroll
        for (uint32_t u = 0; u < unroll; u++) {
            uint32_t i = i0 + 16 * u + l;
            x[u] = i < p.count ? source::one(x_of, i) : 0.0f;
        }
        __syncwarp();
#pragma unroll
        for (uint32_t u = 0; u < unroll; u++) {
            uint32_t i = i0 + 16 * u + l;
            float h = dtype == QC_DTYPE_F16 ? x[u] : qc_float_of_half(qc_half_of_float(x[u]));
            float rounded = __fadd_rn(__fmul_rn(h, scale), QC_CUDA_ROUND);
            if (i < p.count)
                data[i] = (unsigned char)__float_as_uint(rounded);
            if (errors) {
                float q = __fadd_rn(rounded, -QC_CUDA_ROUND);
                float e = __fadd_rn(x[u], -__fmul_rn(__fmul_rn(q, scb), QC_CUDA_INT8_STEP));
                ee = __fmaf_rn(e, e, ee);
                xx = __fmaf_rn(x[u], x[u], xx);
                column = fabsf(e) > most ? i : column;
                most = fmaxf(most, fabsf(e));
            }
        }
    }
    if (errors) {
        ee = qc_fold_team(ee);
        xx = qc_fold_team(xx);
        qc_largest_at(&most, &column);
        if (p.count > 0 && l == 0)
            job.errors[p.row * job.runs_row + p.run_in_row] =
                make_float4(ee, xx, most, __uint_as_float(column));
    }
}

QC_DEVICE void store_codes(const row_job &job, const run_place &p, unsigned l,
                           const unsigned char *data)
{
    unsigned char *to = job.codes + p.begin;
    if (job.wide_codes) {
        for (uint32_t at = 16 * l; at < p.count; at += 256)
            *reinterpret_cast<uint4 *>(to + at) = *reinterpret_cast<const uint4 *>(data + at);
        return;
    }
    for (uint32_t i = l; i < p.count; i += 16)
        to[i] = data[i];
}

template <qc_dtype dtype, bool errors>
__global__ void __launch_bounds__(16 * most_runs, 2) quantize_rows(row_job job)
{
    typedef qc_source<dtype> source;
    QC_SHARED(row_shared, shared);
    unsigned l = threadIdx.x % 16, slot = threadIdx.x / 16;
    unsigned char *data = shared.bytes + slot * run_size<dtype>::bytes;

    for (uint64_t first_row = (uint64_t)blockIdx.x * job.rows_together; first_row < job.rows;
         first_row += (uint64_t)gridDim.x * job.rows_together) {
        if (threadIdx.x < most_runs)
            shared.largest[threadIdx.x] = 0;
        __syncthreads();
        run_place p = place_of(job, first_row, 0, slot);
        for (uint64_t part = 0; part < job.parts; part++) {
            p = place_of(job, first_row, part, slot);
            uint32_t bits = load_run<dtype>(job, p, l, data);
            if (p.count > 0 && l == 0)
                atomicMax(&shared.largest[p.row_slot], bits);
            if (p.count > 0 && qc_is_bad_row(__uint_as_float(bits))) {
                for (uint32_t i = l; i < p.count; i += 16)
                    if (qc_is_bad_row(source::one(data, i))) {
                        qc_bad_at(job.bad, p.begin + i);
                        break;
                    }
            }
            __syncwarp();
        }
        __syncthreads();
        float largest = p.count > 0 ? __uint_as_float(shared.largest[p.row_slot]) : 0.0f;
        if (job.parts > 1)
            largest = __uint_as_float(shared.largest[0]);
        float scb = qc_float_of_half(qc_half_of_float(largest));
        /* The last part is in shared memory already. */
        for (uint64_t done = 0; done < job.parts; done++) {
            uint64_t part = job.parts - 1 - done;
            if (done > 0) {
                __syncwarp();
                p = place_of(job, first_row, part, slot);
                (void)load_run<dtype>(job, p, l, data);
            }
            code_run<dtype, errors>(job, p, l, scb, data);
            __syncwarp();
            store_codes(job, p, l, data);
            if (p.count > 0 && p.run_in_row == 0 && l == 0)
                job.scb[p.row] = scb;
        }
        __syncthreads(); /* shared.largest is about to be written again */
    }
}

template <qc_dtype dtype> size_t shared_bytes_for(uint32_t runs)
{
    return offsetof(row_shared, bytes) + (size_t)runs * run_size<dtype>::bytes;
}

template <qc_dtype dtype> qc_status launch(row_job job, qc_cuda_stream s, qc_error *err)
{
    constexpr size_t element = sizeof(typename qc_source<dtype>::type);
    const char *what = "int8_rows_quantize";
    uint32_t most = element == 2 ? most_runs : most_runs / 2;
    size_t room = 0;
    job.runs_row = job.cols / run_elems + (job.cols % run_elems != 0);
    job.runs = 8;
    while (job.runs < job.runs_row && job.runs < most)
        job.runs *= 2;
    if (job.runs == most) {
        QC_TRY(qc_cuda_shared_most(&room, what, err));
        if (shared_bytes_for<dtype>(job.runs) > room)
            job.runs /= 2;
    }
    job.rows_together = job.runs_row < job.runs ? job.runs / (uint32_t)job.runs_row : 1;
    job.parts = (job.runs_row + job.runs - 1) / job.runs;
    job.wide_src = qc_is_aligned(job.src, 16) && job.cols * element % 16 == 0;
    job.wide_codes = qc_is_aligned(job.codes, 16) && job.cols % 16 == 0;
    dim3 grid(qc_cuda_grid_x(job.rows, job.rows_together)), block(16 * job.runs);
    size_t shared = shared_bytes_for<dtype>(job.runs);
    /* The registers allow two of the largest blocks, and as many threads in smaller ones. */
    unsigned resident = 2 * most_runs / job.runs;
    auto kernel = job.errors ? quantize_rows<dtype, true> : quantize_rows<dtype, false>;
    QC_TRY(qc_cuda_keep_resident(kernel, shared, resident, what, err));
    return qc_cuda_start("int8_quantize_rows", kernel, grid, block, shared, s, err, job);
}

} // namespace

extern "C" qc_status qc_cuda_absmax_rows(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                         qc_error *err)
{
    row_job job;
    memset(&job, 0, sizeof job);
    job.src = a->src;
    job.rows = a->n / a->form.cols;
    job.cols = a->form.cols;
    job.codes = static_cast<unsigned char *>(a->codes);
    job.scb = a->absmax;
    job.errors = static_cast<float4 *>(a->sums);
    job.bad = a->bad;
    if (a->dtype == QC_DTYPE_F32)
        return launch<QC_DTYPE_F32>(job, s, err);
    if (a->dtype == QC_DTYPE_F16)
        return launch<QC_DTYPE_F16>(job, s, err);
    return launch<QC_DTYPE_BF16>(job, s, err);
}

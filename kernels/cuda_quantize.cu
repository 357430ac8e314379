/* Quantizes to NF4 and to block-wise int8.
 *
 * There are two kernels over one arithmetic (struct coder):
 *
 * quantize_pairs takes whole blocks of 32, 64 or 128, with source and codes 16-byte aligned. Two
 * neighbouring threads own a block. A stripe is 32 elements, of which thread p takes every other 16
 * bytes:
 *
 *     16-bit source, one stripe = 64 bytes     float source, one stripe = 128 bytes
 *       |p=0     |p=1     |p=0     |p=1     |    |p0|p1|p0|p1|p0|p1|p0|p1|
 *     e  0..7     8..15    16..23   24..31         4 elements each
 * lane   0..3     4..7     8..11    12..15         2 lanes each
 *
 * So all elements of a lane of the sums (element i goes to lane (i / 2) % 16) lie in one thread, in
 * order, and the first one or two steps of the fold (l and l + 8, then l + 4) need no shuffle. Each
 * warp-wide load fills whole 32-byte sectors; the pair's loads together fill lines. The block stays
 * in registers between the search for its absmax and the codes, so the source is read once. At the
 * end the pair exchanges codes, so that they leave as 16-byte stores of consecutive threads.
 *
 * quantize_halves takes everything else: blocks from 256 on, a short last block, odd alignment. 16
 * threads own a block, with one lane of the sums each. The block is read twice, the second time
 * from the caches.
 *
 * Bytes of global memory per element with blocks of 64: source 2 (4) + codes 0.5 (NF4) or
 * 1 + absmax 1/16 + error sums 1/4 where wanted. Instructions, registers and what follows:
 * docs/kernels.md.
 *
 * There is no shared memory. The two NF4 tables live in the lanes of the warp (qc_nf4_search). A
 * table of 15 thresholds in shared memory would also need an address per look-up, and a search by
 * selects would cost twice the instructions. */
#include "kernels/cuda_quantize.h"

#include "kernels/cuda_internal.h"
#include "kernels/cuda_quantize_internal.cuh"

#include <string.h>

namespace
{

constexpr unsigned threads_per_block = 128;
constexpr unsigned warps_per_block = threads_per_block / 32;

struct block_job {
    const void *src;
    uint64_t n;
    uint32_t block_elems;
    unsigned char *codes;
    float *absmax;
    float4 *errors;
    uint64_t *bad;
    uint64_t first_block, blocks; /* this launch has blocks [first_block, blocks) */
    bool wide;                    /* halves: elements and codes can be moved two at a time */
};

struct sums {
    float rr, rc, cc;
};

/* The code and the error terms of one element. */
template <bool nf4> struct coder;

template <> struct coder<true> {
    qc_nf4_tables tables;
    float inv;
    __device__ __forceinline__ explicit coder(unsigned lane) : tables(qc_nf4_tables_of_lane(lane))
    {
    }
    __device__ __forceinline__ void set(float inverse)
    {
        inv = inverse;
    }
    /* Returns bits whose low 4 (above them QC_NF4_GUESS_BITS) are the code; y = x / absmax, c its
     * value. */
    template <bool errors> __device__ __forceinline__ uint32_t code(float x, float *y, float *c)
    {
        *y = __fmul_rn(x, inv);
        uint32_t code = qc_nf4_search(tables, *y);
        if (errors)
            *c = __shfl_sync(QC_ALL_LANES, tables.code, (int)code);
        return code;
    }
};

template <> struct coder<false> {
    float inv, scale;
    __device__ __forceinline__ explicit coder(unsigned)
    {
    }
    __device__ __forceinline__ void set(float inverse)
    {
        inv = inverse;
        scale = __fmul_rn(inverse, 127.0f);
    }
    /* Returns bits whose low byte is the code. No clamp is needed:
     * |x * scale| <= 127 * (1 + 2^-21) < 127.5, also where the inverse is subnormal. */
    template <bool errors> __device__ __forceinline__ uint32_t code(float x, float *y, float *c)
    {
        float rounded = __fadd_rn(__fmul_rn(x, scale), QC_CUDA_ROUND);
        if (errors) {
            *y = __fmul_rn(x, inv);
            *c = __fmul_rn(__fadd_rn(rounded, -QC_CUDA_ROUND), QC_CUDA_INT8_STEP);
        }
        return __float_as_uint(rounded);
    }
};

QC_DEVICE void add_error(sums *s, float *peak, float y, float c)
{
    float r = __fadd_rn(y, -c);
    s->rr = __fmaf_rn(r, r, s->rr);
    s->rc = __fmaf_rn(r, c, s->rc);
    s->cc = __fmaf_rn(c, c, s->cc);
    *peak = fmaxf(*peak, fabsf(r));
}

QC_DEVICE sums plus(sums a, sums b)
{
    sums s = {__fadd_rn(a.rr, b.rr), __fadd_rn(a.rc, b.rc), __fadd_rn(a.cc, b.cc)};
    return s;
}

/* Both lanes that differ in `mask` get the same sum, because addition commutes. */
QC_DEVICE sums plus_lane(sums a, int mask)
{
    sums b = {__shfl_xor_sync(QC_ALL_LANES, a.rr, mask), __shfl_xor_sync(QC_ALL_LANES, a.rc, mask),
              __shfl_xor_sync(QC_ALL_LANES, a.cc, mask)};
    return plus(a, b);
}

/* ---- two threads a block --------------------------------------------------------------------- */

/* in[i] is word 2 i + p of the pair's words, where p is the lane's parity. out[i] becomes word
 * p * count + i, so that each thread has a run. */
template <int count>
QC_DEVICE void exchange_words(const uint32_t (&in)[count], uint32_t (&out)[count], bool odd)
{
#pragma unroll
    for (int i = 0; i < count / 2; i++) {
        uint32_t keep = odd ? in[i + count / 2] : in[i];
        uint32_t give = odd ? in[i] : in[i + count / 2];
        uint32_t got = __shfl_xor_sync(QC_ALL_LANES, give, 1);
        out[2 * i] = odd ? got : keep;
        out[2 * i + 1] = odd ? keep : got;
    }
}

/* Folds the 16 lanes of a pair as quant_internal.h says. Each 16 bytes hold `per_chunk` lanes:
 * local lane a is lane (a / per_chunk * 2 + p) * per_chunk + a % per_chunk. */
template <int per_chunk> QC_DEVICE sums fold_pair(const sums (&lane)[8])
{
    sums s[4];
#pragma unroll
    for (int i = 0; i < 4; i++) /* l and l + 8 */
        s[i] = plus(lane[i], lane[i + 4]);
    if (per_chunk == 4) {
#pragma unroll
        for (int i = 0; i < 4; i++) /* l + 4 belongs to the other thread */
            s[i] = plus_lane(s[i], 1);
        return plus(plus(s[0], s[2]), plus(s[1], s[3]));
    }
    sums even = plus_lane(plus(s[0], s[2]), 1); /* l + 4 here, l + 2 there */
    sums odd = plus_lane(plus(s[1], s[3]), 1);
    return plus(even, odd);
}

/* Holds the codes of a chunk of 16 source bytes, with element 0 in the first byte. */
template <bool nf4, qc_dtype dtype> struct chunk_codes {
    static constexpr int elems = 4 * qc_source<dtype>::per_word;
    static constexpr int words = nf4 || elems == 4 ? 1 : 2; /* NF4 of 4 elements is half a word */
    uint32_t word[words];

    __device__ __forceinline__ chunk_codes()
    {
        /* This takes away what the upper bits of the guesses add up to. */
        uint32_t extra = 0;
        for (int i = 0; i < elems; i++)
            extra += QC_NF4_GUESS_BITS << 4 * (i ^ 1);
        word[0] = nf4 ? 0u - extra : 0u;
        if (words == 2)
            word[words - 1] = 0;
    }
    __device__ __forceinline__ void put(int i, uint32_t code)
    {
        if (nf4)
            word[0] += code << 4 * (i ^ 1);
        else
            word[i / 4] |= (code & 0xffu) << 8 * (i % 4);
    }
};

/* Returns how many thread blocks a multiprocessor is to hold. It is a hint for ptxas, which
 * otherwise spills a few registers to reach the next step of occupancy. 1 allows 255 registers a
 * thread, 4 allows 128 and 6 allows 80; 0 leaves the choice to ptxas. CUDA 11.8 has to be told
 * where CUDA 13 has not. */
constexpr int least_resident(qc_dtype dtype, int stripes)
{
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 12
    return stripes == 4 ? 1 : dtype == QC_DTYPE_F32 ? 4 : 6;
#else
    (void)dtype;
    return stripes == 4 ? 1 : 0;
#endif
}

template <bool nf4, qc_dtype dtype, int stripes, bool errors>
__global__ void __launch_bounds__(threads_per_block, least_resident(dtype, stripes))
    quantize_pairs(block_job job)
{
    typedef qc_source<dtype> source;
    typedef chunk_codes<nf4, dtype> codes_type;
    constexpr int chunk_elems = codes_type::elems;
    constexpr int per_stripe = 16 / chunk_elems; /* chunks of a stripe in one thread: 2 or 4 */
    constexpr int chunks = stripes * per_stripe; /* chunks of a block in one thread */
    constexpr int chunk_lanes = chunk_elems / 2; /* 4 or 2 */
    constexpr int halfwords = nf4 && chunk_elems == 4; /* the codes of a chunk are half a word */
    constexpr int out_words = nf4 ? 2 * stripes : 4 * stripes;

    unsigned lane = threadIdx.x % 32;
    bool odd = lane % 2 != 0;
    uint64_t warp = (uint64_t)blockIdx.x * warps_per_block + threadIdx.x / 32;
    uint64_t warp_count = (uint64_t)gridDim.x * warps_per_block;
    coder<nf4> coder(lane);

    for (uint64_t first = warp * 16; first < job.blocks; first += warp_count * 16) {
        uint64_t block = first + lane / 2;
        bool mine = block < job.blocks;
        uint32_t raw[chunks][4];
        {
            uint64_t at = (mine ? block : first) * (uint64_t)(2 * chunks) + (odd ? 1 : 0);
            const unsigned char *from = static_cast<const unsigned char *>(job.src) + at * 16;
#pragma unroll
            for (int i = 0; i < chunks; i++) {
                uint4 v = qc_ld_stream_16(from + 32 * i);
                raw[i][0] = v.x, raw[i][1] = v.y, raw[i][2] = v.z, raw[i][3] = v.w;
            }
        }

        uint32_t largest = 0;
#pragma unroll
        for (int i = 0; i < chunks; i++)
#pragma unroll
            for (int w = 0; w < 4; w++)
                largest = source::largest(largest, raw[i][w]);
        largest = source::largest(largest, __shfl_xor_sync(QC_ALL_LANES, largest, 1));
        uint32_t bits = source::largest_bits(largest);
        if (bits >= QC_CUDA_F32_INF && mine) {
            uint64_t index = UINT64_MAX;
#pragma unroll
            for (int i = chunks - 1; i >= 0; i--)
#pragma unroll
                for (int e = chunk_elems - 1; e >= 0; e--) {
                    float x = source::get(raw[i][e / source::per_word], e % source::per_word);
                    if (qc_magnitude(x) >= QC_CUDA_F32_INF)
                        index =
                            block * (32 * stripes) + (uint64_t)((2 * i + odd) * chunk_elems + e);
                }
            qc_bad_at(job.bad, index);
        }
        float absmax = __uint_as_float(bits);
        bool up;
        coder.set(qc_inverse_absmax(absmax, &up));
        if (source::can_be_tiny && up) {
#pragma unroll
            for (int i = 0; i < chunks; i++)
#pragma unroll
                for (int w = 0; w < 4; w++)
                    raw[i][w] = source::scale_up(raw[i][w]);
        }

        codes_type codes[chunks];
        sums lanes[8];
        float peak = 0.0f;
#pragma unroll
        for (int j = 0; j < per_stripe; j++) {
#pragma unroll
            for (int l = 0; l < chunk_lanes; l++)
                lanes[j * chunk_lanes + l] = {0.0f, 0.0f, 0.0f};
#pragma unroll
            for (int s = 0; s < stripes; s++) {
                int i = s * per_stripe + j;
#pragma unroll
                for (int e = 0; e < chunk_elems; e++) {
                    float x = source::get(raw[i][e / source::per_word], e % source::per_word);
                    float y = 0.0f, c = 0.0f;
                    codes[i].put(e, coder.template code<errors>(x, &y, &c));
                    if (errors)
                        add_error(&lanes[j * chunk_lanes + e / 2], &peak, y, c);
                }
            }
        }

        uint32_t out[out_words];
        if (halfwords) {
            uint32_t in[out_words];
#pragma unroll
            for (int i = 0; i < out_words; i++)
                in[i] = (codes[2 * i].word[0] & 0xffffu) | codes[2 * i + 1].word[0] << 16;
            uint32_t run[out_words];
            exchange_words<out_words>(in, run, odd);
#pragma unroll
            for (int i = 0; i < out_words; i += 2) { /* run[i] holds the even thread's halves */
                out[i] = (run[i] & 0xffffu) | run[i + 1] << 16;
                out[i + 1] = run[i] >> 16 | (run[i + 1] & 0xffff0000u);
            }
        } else {
#pragma unroll
            for (int w = 0; w < codes_type::words; w++) {
                uint32_t in[chunks], run[chunks];
#pragma unroll
                for (int i = 0; i < chunks; i++)
                    in[i] = codes[i].word[w];
                exchange_words<chunks>(in, run, odd);
#pragma unroll
                for (int i = 0; i < chunks; i++)
                    out[i * codes_type::words + w] = run[i];
            }
        }
        sums sum = {0.0f, 0.0f, 0.0f};
        if (errors) {
            sum = fold_pair<chunk_lanes>(lanes);
            peak = fmaxf(peak, __shfl_xor_sync(QC_ALL_LANES, peak, 1));
        }
        if (mine) {
            unsigned char *to = job.codes + (block * 2 + (odd ? 1 : 0)) * (4 * out_words);
            if (out_words == 2) {
                *reinterpret_cast<uint2 *>(to) = make_uint2(out[0], out[1]);
            } else {
#pragma unroll
                for (int i = 0; i + 3 < out_words; i += 4)
                    *reinterpret_cast<uint4 *>(to + 4 * i) =
                        make_uint4(out[i], out[i + 1], out[i + 2], out[i + 3]);
            }
            if (!odd)
                job.absmax[block] = absmax;
            if (errors && odd)
                job.errors[block] = make_float4(sum.rr, sum.rc, sum.cc, peak);
        }
    }
}

/* ---- sixteen threads a block ----------------------------------------------------------------- */

/* Loads elements at and at + 1 of the source. What lies at or beyond `end` is 0, which adds
 * nothing. */
template <qc_dtype dtype>
QC_DEVICE void load_pair(const block_job &job, uint64_t at, uint64_t end, float x[2])
{
    typedef qc_source<dtype> source;
    x[0] = 0.0f, x[1] = 0.0f;
    if (job.wide && at + 1 < end) {
        const typename source::type *p = static_cast<const typename source::type *>(job.src) + at;
        if (source::per_word == 2) {
            uint32_t word = *reinterpret_cast<const uint32_t *>(p);
            x[0] = source::get(word, 0);
            x[1] = source::get(word, 1);
        } else {
            float2 v = *reinterpret_cast<const float2 *>(p);
            x[0] = v.x;
            x[1] = v.y;
        }
        return;
    }
    if (at < end)
        x[0] = source::one(job.src, at);
    if (at + 1 < end)
        x[1] = source::one(job.src, at + 1);
}

template <bool nf4, qc_dtype dtype, bool errors>
__global__ void __launch_bounds__(threads_per_block) quantize_halves(block_job job)
{
    unsigned lane = threadIdx.x % 32, l = lane % 16;
    uint64_t warp = (uint64_t)blockIdx.x * warps_per_block + threadIdx.x / 32;
    uint64_t warp_count = (uint64_t)gridDim.x * warps_per_block;
    coder<nf4> coder(lane);

    for (uint64_t first = job.first_block + warp * 2; first < job.blocks; first += warp_count * 2) {
        uint64_t block = first + lane / 16;
        bool mine = block < job.blocks;
        uint64_t begin = block * job.block_elems, end = begin + job.block_elems;
        if (!mine)
            begin = 0, end = 0;
        if (end > job.n)
            end = job.n;

        uint32_t largest = 0;
#pragma unroll 4
        for (uint32_t i = 2 * l; i < job.block_elems; i += 32) {
            float x[2];
            load_pair<dtype>(job, begin + i, end, x);
            uint32_t m0 = qc_magnitude(x[0]), m1 = qc_magnitude(x[1]);
            m0 = m0 > m1 ? m0 : m1;
            largest = largest > m0 ? largest : m0;
        }
        if (largest >= QC_CUDA_F32_INF) {
            uint32_t i = 2 * l;
            float x[2];
            for (;; i += 32) {
                load_pair<dtype>(job, begin + i, end, x);
                if (qc_magnitude(x[0]) >= QC_CUDA_F32_INF || qc_magnitude(x[1]) >= QC_CUDA_F32_INF)
                    break;
            }
            qc_bad_at(job.bad, begin + i + (qc_magnitude(x[0]) >= QC_CUDA_F32_INF ? 0 : 1));
        }
        largest = qc_largest_of_team(largest);
        float absmax = __uint_as_float(largest);
        bool up;
        coder.set(qc_inverse_absmax(absmax, &up));
        float factor = up ? QC_CUDA_TINY_SCALE : 1.0f;

        sums sum = {0.0f, 0.0f, 0.0f};
        float peak = 0.0f;
#pragma unroll 4
        for (uint32_t i = 2 * l; i < job.block_elems; i += 32) {
            uint64_t at = begin + i;
            float x[2], y[2] = {0.0f, 0.0f}, c[2] = {0.0f, 0.0f};
            uint32_t code[2];
            load_pair<dtype>(job, at, end, x);
#pragma unroll
            for (int e = 0; e < 2; e++) {
                code[e] = coder.template code<errors>(__fmul_rn(x[e], factor), &y[e], &c[e]);
                if (errors)
                    add_error(&sum, &peak, y[e], c[e]);
            }
            if (at >= end)
                continue;
            if (nf4) {
                job.codes[at / 2] = (unsigned char)((code[0] & 15u) << 4 | (code[1] & 15u));
            } else if (job.wide && at + 1 < end) {
                *reinterpret_cast<uint16_t *>(job.codes + at) =
                    (uint16_t)((code[0] & 0xffu) | code[1] << 8);
            } else {
                job.codes[at] = (unsigned char)code[0];
                if (at + 1 < end)
                    job.codes[at + 1] = (unsigned char)code[1];
            }
        }
        if (errors) {
#pragma unroll
            for (int mask = 8; mask > 0; mask /= 2) {
                sum = plus_lane(sum, mask);
                peak = fmaxf(peak, __shfl_xor_sync(QC_ALL_LANES, peak, mask));
            }
        }
        if (mine && l == 0) {
            job.absmax[block] = absmax;
            if (errors)
                job.errors[block] = make_float4(sum.rr, sum.rc, sum.cc, peak);
        }
    }
}

/* ---- launches -------------------------------------------------------------------------------- */

template <bool nf4, qc_dtype dtype, int stripes>
qc_status launch_pairs(const block_job &job, const char *what, qc_cuda_stream s, qc_error *err)
{
    return qc_cuda_start(what,
                         job.errors ? quantize_pairs<nf4, dtype, stripes, true>
                                    : quantize_pairs<nf4, dtype, stripes, false>,
                         dim3(qc_cuda_grid_x(job.blocks, 16 * warps_per_block)),
                         dim3(threads_per_block), 0, s, err, job);
}

template <bool nf4, qc_dtype dtype>
qc_status launch(block_job job, const char *what, qc_cuda_stream s, qc_error *err)
{
    uint64_t whole = job.n / job.block_elems;
    if (whole > 0 && job.block_elems <= 128 && qc_is_aligned(job.src, 16) &&
        qc_is_aligned(job.codes, 16)) {
        block_job pairs = job;
        pairs.blocks = whole;
        if (job.block_elems == 32)
            QC_TRY((launch_pairs<nf4, dtype, 1>(pairs, what, s, err)));
        else if (job.block_elems == 64)
            QC_TRY((launch_pairs<nf4, dtype, 2>(pairs, what, s, err)));
        else
            QC_TRY((launch_pairs<nf4, dtype, 4>(pairs, what, s, err)));
        job.first_block = whole;
    }
    if (job.first_block == job.blocks)
        return QC_OK;
    job.wide = qc_is_aligned(job.src, 2 * sizeof(typename qc_source<dtype>::type)) &&
               (nf4 || qc_is_aligned(job.codes, 2));
    return qc_cuda_start(
        what, job.errors ? quantize_halves<nf4, dtype, true> : quantize_halves<nf4, dtype, false>,
        dim3(qc_cuda_grid_x(job.blocks - job.first_block, 2 * warps_per_block)),
        dim3(threads_per_block), 0, s, err, job);
}

template <bool nf4>
qc_status quantize(const block_job &job, qc_dtype dtype, const char *what, qc_cuda_stream s,
                   qc_error *err)
{
    if (dtype == QC_DTYPE_F32)
        return launch<nf4, QC_DTYPE_F32>(job, what, s, err);
    if (dtype == QC_DTYPE_F16)
        return launch<nf4, QC_DTYPE_F16>(job, what, s, err);
    return launch<nf4, QC_DTYPE_BF16>(job, what, s, err);
}

} // namespace

extern "C" qc_status qc_cuda_absmax_blocks(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                           qc_error *err)
{
    block_job job;
    memset(&job, 0, sizeof job);
    job.src = a->src;
    job.n = a->n;
    job.block_elems = a->form.block_elems;
    job.codes = static_cast<unsigned char *>(a->codes);
    job.absmax = a->absmax;
    job.errors = static_cast<float4 *>(a->sums);
    job.bad = a->bad;
    job.blocks = qc_form_scales(&a->form, a->n);
    if (qc_form_is_table(a->form.ops))
        return quantize<true>(job, a->dtype, "nf4_quantize", s, err);
    return quantize<false>(job, a->dtype, "int8_blocks_quantize", s, err);
}

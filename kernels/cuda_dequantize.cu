/* Turns codes of every form into F32, F16 or BF16 in one kernel, and decodes double-quantized
 * scales on the way.
 *
 * A chunk is 8 elements of one row, and so of one block too where the row starts at a multiple of
 * 8. That is one word of 4-bit codes or two of bytes, one scale, and 16 bytes of a 16-bit
 * destination. A thread takes four chunks that lie a thread block apart:
 *
 *     chunk      0 .. 127   128 .. 255   256 .. 383   384 .. 511
 *     thread     0 .. 127     0 .. 127     0 .. 127     0 .. 127
 *
 * So the four loads of codes are on their way together, and every load and store of a warp is
 * contiguous: 128 bytes of codes in, 512 out. (With 16 bytes of codes a thread, each thread would
 * have 64 bytes to store, or a transposition within four threads that costs more than the three
 * loads it saves, since the codes are a fifth of the traffic.)
 *
 * Codes that are packed (2 to 8 bits, from the least significant one on) are `bits` bytes a chunk,
 * which lie in up to three words. Chunks of neighbours share words, which come from L1 then.
 *
 * grid.x covers a row, and grid.y rows. Where rows follow each other without a gap and the scale is
 * not the row's, the whole is taken as one row. The values of NF4 live in the lanes of a warp, and
 * a look-up is a shuffle (as in cuda_quantize_internal.cuh).
 *
 * dequantize_elements does the same element by element. It is for rows that do not start at a
 * multiple of 8 elements (so that a chunk would lie in two blocks) and for destinations that are
 * not 16-byte aligned.
 *
 * Bytes of global memory per element: codes 1/4 to 1, scale 1/64 (double quantized) to 4/64, out 2
 * or 4. There is no shared memory. */
#include "kernels/cuda_quantize.h"

#include "kernels/cuda_internal.h"
#include "kernels/cuda_quantize_internal.cuh"

#include <inttypes.h>
#include <string.h>

namespace
{

constexpr unsigned threads_per_block = 128;
constexpr unsigned chunk_elems = 8;
constexpr unsigned chunks_each = 4;

/* Says what kernels are compiled for: NF4, signed bytes, for which a scale is a block's or a row's,
 * and packed codes. Everything else about a form is in the job. */
enum layout { NIBBLES, BYTES, BYTE_ROWS, PACKED };

struct dequantize_job {
    qc_weights w;
    float step; /* as in qc_form_ops */
    /* of PACKED */
    uint32_t bits, mask;
    float bias;         /* from a code, in the last bits of 2^23, to its number */
    uint64_t row_bytes; /* from the codes of a row to those of the next */
    uint64_t first_col;
    bool by_rows;
    unsigned block_shift, nested_shift;
    uint64_t first;      /* flat index of the first element */
    uint64_t first_row;  /* counted in the weight */
    uint64_t rows, cols; /* of the destination; one row if they have no gaps */
    uint64_t apart;      /* elements of the weight from row to row */
    uint64_t ld;
    void *dst;
    const int *exponent;
    uint64_t *overflow;
};

struct plain {
    static __device__ __forceinline__ float of(float a, float b)
    {
        return __fmul_rn(a, b);
    }
};

/* Multiplies as x86 does, NaNs included: the result is the first operand that is a NaN, made quiet,
 * or else the default NaN, whose sign is set. */
struct product {
    static __device__ __forceinline__ float of(float a, float b)
    {
        float v = __fmul_rn(a, b);
        if (v == v)
            return v;
        if (a != a)
            return __uint_as_float(__float_as_uint(a) | 0x00400000u);
        if (b != b)
            return __uint_as_float(__float_as_uint(b) | 0x00400000u);
        return __uint_as_float(0xffc00000u);
    }
};

/* Returns the value of a number: of a nibble's value in the table, of a signed byte, or of an
 * integer. Integers in bytes have a step of 1, so that by rows the order of factors, which is that
 * of LLM.int8, makes no difference. */
template <layout what, typename Product>
QC_DEVICE float value_of(const dequantize_job &job, float number, float scale)
{
    if (what == NIBBLES || what == PACKED)
        return Product::of(number, scale);
    if (what == BYTE_ROWS)
        return Product::of(Product::of(number, scale), job.step);
    return Product::of(__fmul_rn(number, job.step), scale);
}

/* Holds 2^exponent as two factors. Both are floats and powers of two for every exponent that can
 * matter. */
struct power {
    float a, b;
    bool none;
};

QC_DEVICE float times(float v, power p)
{
    return p.none ? v : product::of(product::of(v, p.a), p.b);
}

QC_DEVICE power power_of(const int *exponent)
{
    int e = exponent ? *exponent : 0;
    e = e < -252 ? -252 : e > 254 ? 254 : e;
    int half = e / 2;
    power p = {__uint_as_float((uint32_t)(half + 127) << 23),
               __uint_as_float((uint32_t)(e - half + 127) << 23), e == 0};
    return p;
}

/* Returns the scale that element f of a row has, by its number. */
template <layout what>
QC_DEVICE uint64_t scale_at(const dequantize_job &job, uint64_t row, uint64_t f)
{
    bool by_rows = what == BYTE_ROWS || (what == PACKED && job.by_rows);
    return by_rows ? job.first_row + row : f >> job.block_shift;
}

/* Returns where the codes of the row's columns from c on lie, for a c that is a multiple of 8. */
QC_DEVICE uint64_t packed_at(const dequantize_job &job, uint64_t row, uint64_t c)
{
    return (job.first_row + row) * job.row_bytes + (job.first_col + c) / 8 * job.bits;
}

/* Returns the number of a code of PACKED, which is the last bits of `bits`. */
QC_DEVICE float number_of(const dequantize_job &job, uint32_t bits)
{
    return __fadd_rn(__uint_as_float((bits & job.mask) | 0x4b000000u), job.bias);
}

QC_DEVICE float block_scale(const dequantize_job &job, uint64_t block)
{
    if (job.w.absmax)
        return __ldg(job.w.absmax + block);
    unsigned code = __ldg(job.w.absmax_codes + block);
    return __fadd_rn(__fmul_rn(__ldg(job.w.nested_map + code),
                               __ldg(job.w.nested_absmax + (block >> job.nested_shift))),
                     job.w.form.offset);
}

/* Rounds as quant_half.h does: NaNs keep their sign and the upper bits of their payload. */
template <qc_dtype dtype> QC_DEVICE uint16_t narrow(float v)
{
    if (dtype == QC_DTYPE_BF16)
        return qc_bf16_of_float(v);
    uint32_t u = __float_as_uint(v);
    if (v != v)
        return (uint16_t)((u >> 16 & 0x8000u) | 0x7e00u | (u >> 13 & 0x03ffu));
    return qc_half_of_float(v);
}

QC_DEVICE void note_overflow(const dequantize_job &job, uint16_t narrowed, uint32_t infinity,
                             float v, uint64_t index)
{
    if (job.overflow && (narrowed & 0x7fffu) == infinity && qc_magnitude(v) < QC_CUDA_F32_INF)
        qc_bad_at(job.overflow, index);
}

template <qc_dtype dtype>
QC_DEVICE void store_element(const dequantize_job &job, uint64_t at, float v, uint64_t index)
{
    if (dtype == QC_DTYPE_F32) {
        static_cast<float *>(job.dst)[at] = v;
    } else {
        uint16_t h = narrow<dtype>(v);
        static_cast<uint16_t *>(job.dst)[at] = h;
        note_overflow(job, h, dtype == QC_DTYPE_F16 ? 0x7c00u : 0x7f80u, v, index);
    }
}

/* Returns the value of nibble `lane` at a scale of 1. */
QC_DEVICE float value_of_lane(const dequantize_job &job, unsigned lane)
{
    float standard = qc_nf4_tables_of_lane(lane).code;
    return job.w.form.code_map ? job.w.form.code_map[lane % 16] : standard;
}

/* ---- 8 elements at a time -------------------------------------------------------------------- */

/* Returns the largest magnitude that is multiplied by a scale. */
template <layout what> QC_DEVICE float largest_number(const dequantize_job &job, float of_lane)
{
    if (what == BYTES)
        return __fmul_rn(128.0f, job.step);
    if (what == BYTE_ROWS || what == PACKED)
        return 128.0f;
    float m = fabsf(of_lane);
#pragma unroll
    for (int mask = 8; mask > 0; mask /= 2)
        m = fmaxf(m, __shfl_xor_sync(QC_ALL_LANES, m, mask));
    return m;
}

template <qc_dtype dtype>
QC_DEVICE void store_chunk(const dequantize_job &job, uint64_t at, const float v[chunk_elems])
{
    constexpr int words = dtype == QC_DTYPE_F32 ? 8 : 4;
    uint32_t out[words];
#pragma unroll
    for (int i = 0; i < words; i++) {
        if (dtype == QC_DTYPE_F32)
            out[i] = __float_as_uint(v[i]);
        else if (dtype == QC_DTYPE_F16)
            out[i] = qc_half2_of_floats(v[2 * i % 8], v[(2 * i + 1) % 8]);
        else
            out[i] = (uint32_t)qc_bf16_of_float(v[2 * i % 8]) |
                     (uint32_t)qc_bf16_of_float(v[(2 * i + 1) % 8]) << 16;
    }
    unsigned char *to = static_cast<unsigned char *>(job.dst) + at * (words / 2);
#pragma unroll
    for (int i = 0; i < words; i += 4)
        *reinterpret_cast<uint4 *>(to + 4 * i) =
            make_uint4(out[i], out[i + 1], out[i + 2], out[i + 3]);
}

template <layout what, qc_dtype dtype, bool nested>
__global__ void __launch_bounds__(threads_per_block) dequantize_chunks(dequantize_job job)
{
    constexpr bool nibbles = what == NIBBLES;
    constexpr unsigned words = nibbles          ? 1
                               : what == PACKED ? 3
                                                : 2; /* that a chunk's codes lie in */
    unsigned lane = threadIdx.x % 32;
    float table = nibbles ? value_of_lane(job, lane) : 0.0f;
    power p = power_of(job.exponent);
    /* As long as the bound is below this, no product overflows or is a NaN, whatever the code is,
     * and the elements of the chunk need not be looked at. */
    float most = largest_number<what>(job, table);
    float safe = dtype == QC_DTYPE_F16 ? 65504.0f : 0x1p127f;
    uint64_t row_chunks = job.cols / chunk_elems, out_chunks = job.ld / chunk_elems;

    for (uint64_t row = blockIdx.y; row < job.rows; row += gridDim.y) {
        uint64_t base = job.first + row * job.apart;
        for (uint64_t c0 = (uint64_t)blockIdx.x * (threads_per_block * chunks_each);
             c0 < out_chunks; c0 += (uint64_t)gridDim.x * (threads_per_block * chunks_each)) {
            uint32_t codes[chunks_each][words];
            unsigned shift[chunks_each]; /* of PACKED: where the first word's bits begin */
            float scale[chunks_each];
            unsigned scale_code[chunks_each];
            float nested_scale[chunks_each];
            /* All loads of one step come before what depends on them. A thread that has no chunk
             * left reads the last one of the row. */
#pragma unroll
            for (unsigned u = 0; u < chunks_each; u++) {
                uint64_t c = c0 + u * threads_per_block + threadIdx.x;
                uint64_t f = base + (c < row_chunks ? c : row_chunks - 1) * chunk_elems;
                if (nibbles) {
                    codes[u][0] = __ldg(static_cast<const uint32_t *>(job.w.codes) + f / 8);
                } else if (what == PACKED) {
                    uint64_t at = packed_at(job, row, f - base);
                    const uint32_t *from = static_cast<const uint32_t *>(job.w.codes) + at / 4;
                    shift[u] = (unsigned)(at % 4 * 8);
                    codes[u][0] = __ldg(from);
                    codes[u][1 % words] = shift[u] + 8 * job.bits > 32 ? __ldg(from + 1) : 0;
                    codes[u][2 % words] = shift[u] + 8 * job.bits > 64 ? __ldg(from + 2) : 0;
                } else {
                    uint2 v = __ldg(static_cast<const uint2 *>(job.w.codes) + f / 8);
                    codes[u][0] = v.x;
                    codes[u][1 % words] = v.y;
                }
                uint64_t block = scale_at<what>(job, row, f);
                if (nested) {
                    scale_code[u] = __ldg(job.w.absmax_codes + block);
                    nested_scale[u] = __ldg(job.w.nested_absmax + (block >> job.nested_shift));
                } else {
                    scale[u] = __ldg(job.w.absmax + block);
                }
            }
            if (nested) {
#pragma unroll
                for (unsigned u = 0; u < chunks_each; u++)
                    scale[u] = __fadd_rn(
                        __fmul_rn(__ldg(job.w.nested_map + scale_code[u]), nested_scale[u]),
                        job.w.form.offset);
            }
#pragma unroll
            for (unsigned u = 0; u < chunks_each; u++) {
                uint64_t c = c0 + u * threads_per_block + threadIdx.x;
                float code[chunk_elems], v[chunk_elems];
                uint64_t bits = 0;
                if (what == PACKED)
                    bits = __funnelshift_r(codes[u][0], codes[u][1 % words], shift[u]) |
                           (uint64_t)__funnelshift_r(codes[u][1 % words], codes[u][2 % words],
                                                     shift[u])
                               << 32;
#pragma unroll
                for (unsigned e = 0; e < chunk_elems; e++) {
                    uint32_t word = codes[u][nibbles ? 0 : e / 4];
                    if (nibbles)
                        code[e] = __shfl_sync(QC_ALL_LANES, table, (int)(word >> 4 * (e ^ 1)), 16);
                    else if (what == PACKED)
                        code[e] = number_of(job, (uint32_t)(bits >> e * job.bits));
                    else
                        code[e] = (float)(int8_t)(word >> 8 * (e % 4));
                    v[e] = value_of<what, plain>(job, code[e], scale[u]);
                }
                if (!p.none) {
#pragma unroll
                    for (unsigned e = 0; e < chunk_elems; e++)
                        v[e] = __fmul_rn(__fmul_rn(v[e], p.a), p.b);
                }
                if (c >= row_chunks) { /* beyond cols there are zeros, whose bound is 0 */
                    scale[u] = 0.0f;
#pragma unroll
                    for (unsigned e = 0; e < chunk_elems; e++)
                        v[e] = 0.0f;
                }
                uint64_t at = row * job.ld + c * chunk_elems;
                float bound = __fmul_rn(__fmul_rn(__fmul_rn(most, fabsf(scale[u])), p.a), p.b);
                if (c < out_chunks && (bound < safe || c >= row_chunks))
                    store_chunk<dtype>(job, at, v);
                if (c < row_chunks && !(bound < safe)) {
#pragma unroll
                    for (unsigned e = 0; e < chunk_elems; e++)
                        store_element<dtype>(
                            job, at + e, times(value_of<what, product>(job, code[e], scale[u]), p),
                            base + c * chunk_elems + e);
                }
            }
        }
    }
}

/* ---- one element at a time ------------------------------------------------------------------- */

template <layout what, qc_dtype dtype>
__global__ void __launch_bounds__(threads_per_block) dequantize_elements(dequantize_job job)
{
    constexpr bool nibbles = what == NIBBLES;
    float table = nibbles ? value_of_lane(job, threadIdx.x % 32) : 0.0f;
    power p = power_of(job.exponent);

    for (uint64_t row = blockIdx.y; row < job.rows; row += gridDim.y)
        for (uint64_t c0 = (uint64_t)blockIdx.x * threads_per_block; c0 < job.ld;
             c0 += (uint64_t)gridDim.x * threads_per_block) {
            uint64_t c = c0 + threadIdx.x;
            uint64_t f = job.first + row * job.apart + c;
            unsigned byte = 0;
            float scale = 0.0f;
            if (c < job.cols) {
                const uint8_t *codes = static_cast<const uint8_t *>(job.w.codes);
                if (what == PACKED) { /* a code lies in one byte or two */
                    uint64_t bit = (job.first_col + c) * job.bits;
                    codes += (job.first_row + row) * job.row_bytes + bit / 8;
                    byte = (codes[0] | codes[(bit % 8 + job.bits - 1) / 8] << 8) >> bit % 8;
                } else {
                    byte = codes[nibbles ? f / 2 : f];
                }
                scale = block_scale(job, scale_at<what>(job, row, f));
            }
            float code =
                nibbles ? __shfl_sync(QC_ALL_LANES, table, (int)(f % 2 != 0 ? byte : byte >> 4), 16)
                : what == PACKED ? number_of(job, byte)
                                 : (float)(int8_t)byte;
            float v = times(value_of<what, product>(job, code, scale), p);
            if (c < job.ld)
                store_element<dtype>(job, row * job.ld + c, c < job.cols ? v : 0.0f, f);
        }
}

/* ---- launches -------------------------------------------------------------------------------- */

dim3 grid_for(const dequantize_job &job, uint64_t each)
{
    return dim3(qc_cuda_grid_x(job.ld, each), qc_cuda_grid_y(job.rows));
}

template <layout what, qc_dtype dtype>
qc_status launch(dequantize_job job, qc_cuda_stream s, qc_error *err)
{
    constexpr size_t element = dtype == QC_DTYPE_F32 ? 4 : 2;
    bool one = job.rows == 1 && job.ld == job.cols; /* its end may be done separately */
    uint64_t begins = what == PACKED ? job.first_col : job.first,
             apart = what == PACKED ? 0 : job.apart;
    if (begins % chunk_elems == 0 && job.cols >= chunk_elems &&
        (one ||
         (job.cols % chunk_elems == 0 && apart % chunk_elems == 0 && job.ld % chunk_elems == 0)) &&
        qc_is_aligned(job.dst, 16) &&
        qc_is_aligned(job.w.codes, what == NIBBLES || what == PACKED ? 4 : 8)) {
        dequantize_job chunks = job;
        if (one)
            chunks.cols = chunks.ld = job.cols - job.cols % chunk_elems;
        QC_TRY(qc_cuda_start("dequantize",
                             job.w.absmax ? dequantize_chunks<what, dtype, false>
                                          : dequantize_chunks < what,
                             dtype, what == NIBBLES || what == BYTES >,
                             grid_for(chunks, threads_per_block * chunks_each * chunk_elems),
                             dim3(threads_per_block), 0, s, err, chunks));
        if (!one || chunks.cols == job.cols)
            return QC_OK;
        job.first += chunks.cols;
        job.first_col += chunks.cols;
        job.dst = static_cast<unsigned char *>(job.dst) + chunks.cols * element;
        job.cols -= chunks.cols;
        job.ld = job.cols;
    }
    return qc_cuda_start("dequantize", dequantize_elements<what, dtype>,
                         grid_for(job, threads_per_block), dim3(threads_per_block), 0, s, err, job);
}

template <layout what>
qc_status launch_dtype(const dequantize_job &job, qc_dtype dtype, qc_cuda_stream s, qc_error *err)
{
    if (dtype == QC_DTYPE_F32)
        return launch<what, QC_DTYPE_F32>(job, s, err);
    if (dtype == QC_DTYPE_F16)
        return launch<what, QC_DTYPE_F16>(job, s, err);
    return launch<what, QC_DTYPE_BF16>(job, s, err);
}

} // namespace

extern "C" qc_status qc_cuda_dequantize(const qc_weights *w, uint64_t first_row, uint64_t rows,
                                        void *dst, qc_dtype dst_dtype, uint64_t ld,
                                        const int *exponent, uint64_t *overflow, qc_cuda_stream s,
                                        qc_error *err)
{
    const qc_weights_part part = {first_row, rows, 0, w ? w->form.cols : 0};
    return qc_cuda_dequantize_part(w, &part, dst, dst_dtype, ld, exponent, overflow, s, err);
}

extern "C" qc_status qc_cuda_dequantize_part(const qc_weights *w, const qc_weights_part *part,
                                             void *dst, qc_dtype dst_dtype, uint64_t ld,
                                             const int *exponent, uint64_t *overflow,
                                             qc_cuda_stream s, qc_error *err)
{
    if (!w || !w->form.ops || !part || (!dst && part->rows && ld))
        QC_FAIL(err, QC_ERR_USAGE, "dequantize: %s is NULL",
                !w             ? "the weight"
                : !w->form.ops ? "the weight's form.ops"
                : !part        ? "the part"
                               : "dst");
    const qc_form_ops *ops = w->form.ops;
    bool of_blocks = !qc_form_by_rows(&w->form);
    if (ops->step_last && of_blocks)
        QC_FAIL(err, QC_ERR_USAGE,
                "dequantize: the weight is %s in blocks of %u; expected scales by rows", ops->name,
                w->form.block_elems);
    if (dst_dtype != QC_DTYPE_F32 && dst_dtype != QC_DTYPE_F16 && dst_dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "dequantize: the result is to be %s; expected F32, F16 or BF16",
                qc_dtype_name(dst_dtype));
    const uint32_t block = of_blocks ? w->form.block_elems : 32;
    if (block < 32 || block > 4096 || (block & (block - 1)) != 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "dequantize: block size: expected a power of two from 32 to 4096, found %u", block);
    if (!w->absmax && (!of_blocks || ops->integer || w->nested_block == 0 ||
                       (w->nested_block & (w->nested_block - 1)) != 0))
        QC_FAIL(err, QC_ERR_USAGE,
                "dequantize: nested block size: expected a power of two, found %u",
                of_blocks ? w->nested_block : 0u);
    const uint64_t rows = part->rows, cols = part->cols;
    if (part->row > w->rows || rows > w->rows - part->row || part->col > w->form.cols ||
        cols > w->form.cols - part->col || ld < cols)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "dequantize: rows %" PRIu64 " to %" PRIu64 " and columns %" PRIu64 " to %" PRIu64
            ", %" PRIu64 " elements apart, were asked for of a weight of %" PRIu64 " x %" PRIu64,
            part->row, part->row + rows, part->col, part->col + cols, ld, w->rows, w->form.cols);
    if (overflow)
        QC_TRY(qc_cuda_fill(overflow, 0xff, sizeof *overflow, s, err));
    if (rows == 0 || ld == 0)
        return QC_OK;
    dequantize_job job;
    memset(&job, 0, sizeof job);
    job.w = *w;
    job.step = ops->step;
    job.bits = ops->bits;
    job.mask = (1u << ops->bits) - 1;
    job.bias = -(float)(8388608 + ops->zero);
    job.row_bytes = qc_form_row_bytes(&w->form);
    job.by_rows = !of_blocks;
    job.block_shift = of_blocks ? qc_log2_of(w->form.block_elems) : 0;
    job.nested_shift = w->absmax ? 0 : qc_log2_of(w->nested_block);
    job.first = part->row * w->form.cols + part->col;
    job.first_row = part->row;
    job.first_col = part->col;
    job.rows = rows;
    job.cols = cols;
    job.apart = w->form.cols;
    job.ld = ld;
    if (of_blocks && ld == w->form.cols && !qc_form_has_gaps(&w->form)) {
        job.rows = 1; /* rows without gaps are one long row */
        job.cols = rows * ld;
        job.ld = job.cols;
        job.first_row = 0;
        job.first_col = job.first;
    }
    job.dst = dst;
    job.exponent = exponent;
    job.overflow = overflow;
    if (ops->low_first)
        return launch_dtype<PACKED>(job, dst_dtype, s, err);
    if (qc_form_is_table(ops))
        return launch_dtype<NIBBLES>(job, dst_dtype, s, err);
    return of_blocks ? launch_dtype<BYTES>(job, dst_dtype, s, err)
                     : launch_dtype<BYTE_ROWS>(job, dst_dtype, s, err);
}

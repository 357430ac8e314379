/* Dense rows of a weight that is repacked or packed, for cuBLAS: what cuda_dequantize.cu makes of
 * the file's layout.
 *
 * Repacked:
 *   grid    x: a block has 128 runs of 32 codes of a row, one a thread; y: rows
 *   bytes   a thread reads 16 (NF4) or 32 (int8) in one or two loads and writes 64; that is 2.5 (3)
 *           bytes per weight, so the kernel is bound by memory
 *
 * Packed (matmul_packed.h):
 *   grid    x: a block of threads has four blocks of 64 columns; y: units of 16 rows, of whose
 *           rows only some may be asked for at both ends
 *   bytes   a thread takes 8 codes of each block of columns: 4 (NF4) or 8 (int8) bytes, which make
 *           16. A load of a warp is 128 or 256 bytes in a row, and a store is 128 bytes of each of
 *           four rows; that is again 2.5 (3) bytes per weight */
#include "kernels/matmul_run.cuh"

#define THREADS 128u
#define BLOCKS  4u /* of 64 columns, whose loads are on their way together */
/* Packed rows take at most this many blocks of threads, about twice what 132 multiprocessors hold.
 * More units are made one after the other, so that fewer blocks fill a table. */
#define GRID_BLOCKS 4096u

namespace
{

template <bool nf4> struct dense_table {
    typedef qc_run_singles type;
};
template <> struct dense_table<false> {
    typedef qc_run_plain type;
};

template <bool bf16> QC_DEVICE uint32_t rounded(qc_run_two v)
{
    return bf16 ? (uint32_t)qc_bf16_of_float(v.even) | (uint32_t)qc_bf16_of_float(v.odd) << 16
                : qc_half2_of_floats(v.even, v.odd);
}

/* ld_units counts units of 16 bytes from row to row. */
template <bool nf4, bool bf16>
__global__ void __launch_bounds__(THREADS)
    matmul_dense_rows(const qc_run_source w, uint64_t first_row, uint64_t rows, uint4 *dst,
                      uint64_t ld_units, const int *exponent)
{
    typedef typename dense_table<nf4>::type table;
    QC_SHARED(table, shared);
    qc_run_fill(shared, w, threadIdx.x, THREADS);
    __syncthreads();
    uint64_t run_index = (uint64_t)blockIdx.x * THREADS + threadIdx.x, k = run_index * QC_RUN_ELEMS;
    if (4 * run_index >= ld_units)
        return;
    unsigned lane = qc_run_lane(shared, threadIdx.x % 32);
    qc_run_power power = qc_run_power_of(exponent ? *exponent : 0);
    for (uint64_t row = blockIdx.y; row < rows; row += gridDim.y) {
        uint64_t n = first_row + row;
        uint32_t words[16];
        if (k < w.cols) {
            qc_run<nf4> run;
            qc_run_load<nf4, false>(run, w, n, w.first + n * w.ld, k);
            qc_run_scales scales = qc_run_scales_of<nf4, false>(run, w, shared.small, power);
#pragma unroll
            for (int j = 0; j < 16; j++) {
                qc_run_two v = qc_run_pair<nf4, false>(run, scales, shared, lane, j);
                words[j] = rounded<bf16>(v) & ((2 * j < run.count ? 0xffffu : 0u) |
                                               (2 * j + 1 < run.count ? 0xffff0000u : 0u));
            }
        } else {
#pragma unroll
            for (int j = 0; j < 16; j++)
                words[j] = 0;
        }
        uint4 *to = dst + row * ld_units + 4 * run_index;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint4 v = {words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]};
            to[j] = v;
        }
    }
}

/* Where a thread's 8 codes lie in a unit of 16 rows and 64 columns. */
struct packed_position {
    uint32_t row, col;
};

template <bool nf4> QC_DEVICE packed_position packed_position_of(uint32_t thread)
{
    const uint32_t lane = nf4 ? thread / 4 : thread / 2 % 32;
    const uint32_t high = nf4 ? thread / 2 % 2 : thread / 64;
    return {lane / 4 + 8 * high, lane % 4 * 16 + thread % 2 * 8};
}

/* Loads the thread's codes of row n in the blocks of 64 columns from `first` on, of which there are
 * `count`, and their scales. packed_scales: the codes of scales are packed. */
template <bool nf4>
QC_DEVICE void load_packed(qc_run<nf4> (&run)[BLOCKS], const qc_run_source &w, bool packed_scales,
                           uint64_t n, uint64_t first, uint64_t count)
{
    constexpr uint32_t block_bytes = QC_PACKED_BLOCK_BYTES(nf4 ? 4u : 8u);
    const uint64_t in_row = w.ld / QC_PACKED_COLS, band = n / QC_PACKED_ROWS;
    const uint32_t row = (uint32_t)(n % QC_PACKED_ROWS);
    const unsigned char *codes = w.codes + (band * in_row + first) * block_bytes +
                                 row / QC_PACKED_UNIT * (block_bytes / 4) +
                                 threadIdx.x * (nf4 ? 4u : 8u);
    uint32_t four = 0; /* codes of scales */
    if (packed_scales)
        four =
            __ldg(reinterpret_cast<const uint32_t *>(w.absmax_codes) +
                  (band * (in_row / QC_PACKED_SCALES) + first / QC_PACKED_SCALES) * QC_PACKED_ROWS +
                  QC_PACKED_ROW(row));
    const float *scales = w.absmax ? w.absmax : w.nested_absmax;
    const uint32_t shift = w.absmax ? 0 : w.nested_shift;
    const uint64_t f = w.first + n * w.ld + first * QC_PACKED_COLS;
#pragma unroll
    for (uint32_t u = 0; u < BLOCKS; u++) {
        if (u >= count)
            break;
        qc_run<nf4> &r = run[u];
        if constexpr (nf4) {
            r.q[0] = __ldg(reinterpret_cast<const uint32_t *>(codes + u * block_bytes));
        } else {
            const uint2 q = __ldg(reinterpret_cast<const uint2 *>(codes + u * block_bytes));
            r.q[0] = q.x;
            r.q[1] = q.y;
        }
        const uint64_t block = !nf4 && w.by_row ? n : (f + u * QC_PACKED_COLS) >> w.block_shift;
        r.scale[0] = __ldg(scales + (block >> shift));
        r.code[0] = four >> 8 * u & 0xffu;
        if (!packed_scales && !w.absmax)
            r.code[0] = __ldg(w.absmax_codes + block);
    }
}

template <bool nf4, bool bf16>
__global__ void __launch_bounds__(THREADS)
    matmul_packed_rows(const qc_run_source w, bool packed_scales, uint64_t first_row, uint64_t rows,
                       uint4 *dst, uint64_t ld_units, const int *exponent)
{
    typedef typename dense_table<nf4>::type table;
    QC_SHARED(table, shared);
    qc_run_fill(shared, w, threadIdx.x, THREADS);
    __syncthreads();
    const packed_position at = packed_position_of<nf4>(threadIdx.x);
    const unsigned lane = qc_run_lane(shared, threadIdx.x % 32);
    const int e = exponent ? *exponent : 0;
    const qc_run_power power = qc_run_power_of(e), none = {1.0f, 1.0f};
    const uint64_t end = first_row + rows, first = (uint64_t)blockIdx.x * BLOCKS;
    const uint64_t count = w.cols / QC_PACKED_COLS - first;
    for (uint64_t unit = first_row / QC_PACKED_UNIT + blockIdx.y; unit * QC_PACKED_UNIT < end;
         unit += gridDim.y) {
        const uint64_t n = unit * QC_PACKED_UNIT + at.row;
        if (n < first_row || n >= end)
            continue;
        qc_run<nf4> run[BLOCKS];
        load_packed<nf4>(run, w, packed_scales, n, first, count);
        uint4 *to = dst + (n - first_row) * ld_units + first * (QC_PACKED_COLS / 8) + at.col / 8;
#pragma unroll
        for (uint32_t u = 0; u < BLOCKS; u++) {
            if (u >= count)
                break;
            const qc_run_scales scales = qc_run_scales_of<nf4, true>(run[u], w, shared.small, none);
            uint32_t words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                qc_run_two v = qc_run_pair<nf4, true>(run[u], scales, shared, lane, j);
                /* The power of two comes last, as in cuda_dequantize.cu: the same bits, even where
                 * a value is subnormal as a float. */
                if (e) {
                    v.even = __fmul_rn(__fmul_rn(v.even, power.a), power.b);
                    v.odd = __fmul_rn(__fmul_rn(v.odd, power.a), power.b);
                }
                words[j] = rounded<bf16>(v);
            }
            to[u * (QC_PACKED_COLS / 8)] = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

template <bool nf4, bool bf16>
qc_status launch(const qc_matmul_weights *w, uint64_t first_row, uint64_t rows, void *dst,
                 uint64_t ld, const int *exponent, qc_cuda_stream s, qc_error *err)
{
    const uint64_t blocks =
        qc_ceil_div_u64(ld, w->packed ? BLOCKS * QC_PACKED_COLS : THREADS * QC_RUN_ELEMS);
    if (blocks > INT32_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "rows of a weight are too long for one launch");
    uint64_t high = rows;
    if (w->packed) { /* all blocks of threads make equally many units, or one less */
        const uint64_t first = first_row / QC_PACKED_UNIT;
        const uint64_t units = (first_row + rows - 1) / QC_PACKED_UNIT - first + 1;
        high = qc_ceil_div_u64(units, qc_ceil_div_u64(units * blocks, GRID_BLOCKS));
    }
    const dim3 grid((unsigned)blocks, qc_cuda_grid_y(high));
    const size_t shared_bytes = sizeof(typename dense_table<nf4>::type);
    uint4 *to = static_cast<uint4 *>(dst);
    if (w->packed)
        QC_LAUNCH((matmul_packed_rows<nf4, bf16>), grid, dim3(THREADS), shared_bytes, s,
                  qc_run_source_there(w), qc_packed_has_scales(&w->w) != 0, first_row, rows, to,
                  ld / 8, exponent);
    else
        QC_LAUNCH((matmul_dense_rows<nf4, bf16>), grid, dim3(THREADS), shared_bytes, s,
                  qc_run_source_of(w), first_row, rows, to, ld / 8, exponent);
    return qc_cuda_launched("matmul_dense_rows", err);
}

} /* namespace */

qc_status qc_matmul_dense_rows_launch(const qc_matmul_weights *w, uint64_t first_row, uint64_t rows,
                                      void *dst, qc_dtype dst_dtype, uint64_t ld,
                                      const int *exponent, qc_cuda_stream s, qc_error *err)
{
    const bool nf4 = w->w.form.ops->kind == QC_FORM_NF4, bf16 = dst_dtype == QC_DTYPE_BF16;
    auto how = nf4    ? bf16 ? launch<true, true> : launch<true, false>
                  : bf16 ? launch<false, true>
                      : launch<false, false>;
    return how(w, first_row, rows, dst, ld, exponent, s, err);
}

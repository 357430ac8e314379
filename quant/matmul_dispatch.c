#include "quant/matmul_parts.h"

#include "base/checked.h"
#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

const qc_matmul_ops *qc_matmul_ops_for(qc_isa isa)
{
#if defined(QC_HAVE_QUANT_AVX512)
    if (isa == QC_ISA_AVX512)
        return &qc_matmul_ops_avx512;
#endif
#if defined(QC_HAVE_QUANT_AVX2)
    if (isa == QC_ISA_AVX512 || isa == QC_ISA_AVX2)
        return &qc_matmul_ops_avx2;
#endif
    (void)isa;
    return &qc_matmul_ops_scalar;
}

/* ---- rows of W as floats -------------------------------------------------------------------- */

#define SCALES_AT_ONCE 64u

/* Scales of blocks [first, first + n), n <= SCALES_AT_ONCE; two roundings where double quantized,
 * as nested_dequantize has them. */
static const float *scales_of(const qc_weights *w, uint64_t first, uint64_t n, float *room)
{
    if (w->absmax)
        return w->absmax + first;
    for (uint64_t i = 0; i < n; i++)
        room[i] = w->nested_map[w->absmax_codes[first + i]] *
                      w->nested_absmax[(first + i) / w->nested_block] +
                  w->nested_offset;
    return room;
}

/* Elements [begin, begin + n) of the flattened W; begin is a multiple of the block. */
static void decode_blocks(const qc_quant_ops *ops, const qc_weights *w, uint64_t begin, uint64_t n,
                          float *out)
{
    const float *map = w->code_map ? w->code_map : qc_nf4_code;
    const uint8_t *codes = w->codes;
    uint64_t step = (uint64_t)SCALES_AT_ONCE * w->block_elems, overflow = 0;
    float room[SCALES_AT_ONCE];
    for (uint64_t at = 0; at < n; at += step) {
        uint64_t count = n - at < step ? n - at : step, first = begin + at;
        const float *scales =
            scales_of(w, first / w->block_elems, qc_ceil_div_u64(count, w->block_elems), room);
        if (w->kind == QC_WEIGHTS_NF4)
            ops->nf4_dequantize(codes + first / 2, scales, map, count, w->block_elems, out + at,
                                QC_DTYPE_F32, &overflow);
        else
            ops->int8_blocks_dequantize((const int8_t *)codes + first, scales, count,
                                        w->block_elems, out + at, QC_DTYPE_F32, &overflow);
    }
}

void qc_weights_row(const qc_quant_ops *ops, const qc_weights *w, uint64_t row, float *out)
{
    uint64_t first = row * w->cols, n = w->cols, overflow = 0;
    float head[QC_BLOCK_MAX];
    if (n == 0)
        return;
    if (w->kind == QC_WEIGHTS_INT8_ROWS) {
        ops->int8_rows_dequantize((const int8_t *)w->codes + first, w->absmax + row, 1, n, out,
                                  QC_DTYPE_F32, &overflow);
        return;
    }
    /* A block that began in an earlier row is decoded from its beginning. */
    uint64_t before = first % w->block_elems;
    if (before > 0) {
        uint64_t part = w->block_elems - before < n ? w->block_elems - before : n;
        decode_blocks(ops, w, first - before, before + part, head);
        memcpy(out, head + before, (size_t)part * sizeof *out);
        out += part;
        first += part;
        n -= part;
    }
    if (n > 0)
        decode_blocks(ops, w, first, n, out);
}

/* ---- float tables --------------------------------------------------------------------------- */

static uint64_t padded(uint64_t k)
{
    return (k + 15) / 16 * 16;
}

uint64_t qc_matmul_cpu_scratch_bytes(uint64_t m, uint64_t k)
{
    (void)m;
    return qc_sat_mul(padded(k), QC_MATMUL_ROWS * sizeof(float));
}

static const unsigned char *element(const void *base, qc_dtype dtype, uint64_t i)
{
    return (const unsigned char *)base + i * (qc_dtype_bits(dtype) / 8);
}

static void store(void *y, qc_dtype dtype, uint64_t i, float sum)
{
    unsigned char *at = (unsigned char *)y + i * (qc_dtype_bits(dtype) / 8);
    uint16_t h = dtype == QC_DTYPE_F16 ? qc_f16_from_f32(sum) : qc_bf16_from_f32(sum);
    if (dtype == QC_DTYPE_F32)
        memcpy(at, &sum, sizeof sum);
    else
        memcpy(at, &h, sizeof h);
}

/* Outputs [first, first + rows), whose weights are in w. */
static void multiply(qc_matmul_tile_fn tile, const float *w, uint64_t stride, uint64_t first,
                     unsigned rows, uint64_t k, const qc_matmul_cpu_io *io)
{
    float sums[QC_MATMUL_ROWS * QC_MATMUL_GROUP];
    for (uint64_t at = 0; at < io->m; at += QC_MATMUL_GROUP) {
        unsigned m = io->m - at < QC_MATMUL_GROUP ? (unsigned)(io->m - at) : QC_MATMUL_GROUP;
        tile(w, stride, rows, element(io->x, io->x_dtype, at * io->ldx), io->x_dtype, io->ldx, m, k,
             sums);
        for (unsigned r = 0; r < rows; r++) {
            for (unsigned i = 0; i < m; i++) {
                float sum = sums[r * QC_MATMUL_GROUP + i];
                if (io->bias)
                    sum += io->bias[first + r];
                if (isnan(sum))
                    sum = qc_f32_of_bits(0x7fc00000u);
                store(io->y, io->y_dtype, (at + i) * io->ldy + first + r, sum);
            }
        }
    }
}

void qc_matmul_quantized(qc_matmul_tile_fn tile, const qc_quant_ops *ops, const qc_weights *w,
                         uint64_t first, uint64_t count, const qc_matmul_cpu_io *io, void *scratch)
{
    float *values = scratch;
    uint64_t stride = padded(w->cols);
    for (uint64_t at = 0; at < count; at += QC_MATMUL_ROWS) {
        unsigned rows = count - at < QC_MATMUL_ROWS ? (unsigned)(count - at) : QC_MATMUL_ROWS;
        for (unsigned r = 0; r < rows; r++)
            qc_weights_row(ops, w, first + at + r, values + r * stride);
        multiply(tile, values, stride, first + at, rows, w->cols, io);
    }
}

void qc_matmul_dense_rows(qc_matmul_tile_fn tile, const qc_quant_ops *ops, const void *w,
                          qc_dtype w_dtype, uint64_t k, uint64_t first, uint64_t count,
                          const qc_matmul_cpu_io *io, void *scratch)
{
    float *values = scratch;
    uint64_t stride = padded(k), overflow = 0;
    for (uint64_t at = 0; at < count; at += QC_MATMUL_ROWS) {
        unsigned rows = count - at < QC_MATMUL_ROWS ? (unsigned)(count - at) : QC_MATMUL_ROWS;
        for (unsigned r = 0; r < rows; r++)
            ops->cast(element(w, w_dtype, (first + at + r) * k), w_dtype, k, values + r * stride,
                      QC_DTYPE_F32, &overflow);
        multiply(tile, values, stride, first + at, rows, k, io);
    }
}

/* ---- in double ------------------------------------------------------------------------------ */

static float widened(const void *base, qc_dtype dtype, uint64_t i)
{
    const unsigned char *at = element(base, dtype, i);
    float f = 0.0f;
    uint16_t h = 0;
    if (dtype == QC_DTYPE_F32) {
        memcpy(&f, at, sizeof f);
        return f;
    }
    memcpy(&h, at, sizeof h);
    return dtype == QC_DTYPE_F16 ? qc_f32_from_f16(h) : qc_f32_from_bf16(h);
}

void qc_matmul_double_pack(const void *x, qc_dtype x_dtype, uint64_t m, uint64_t ldx, uint64_t k,
                           double *packed)
{
    for (uint64_t first = 0; first < m; first += QC_MATMUL_PACK_ROWS)
        for (uint64_t i = 0; i < k; i++)
            for (uint64_t l = 0; l < QC_MATMUL_PACK_ROWS; l++)
                *packed++ =
                    first + l < m ? (double)widened(x, x_dtype, (first + l) * ldx + i) : 0.0;
}

void qc_matmul_double(const qc_weights *w, const void *dense, qc_dtype dense_dtype, uint64_t k,
                      uint64_t first, uint64_t count, const void *x, qc_dtype x_dtype, uint64_t m,
                      uint64_t ldx, double *y, float *scratch)
{
    for (uint64_t n = 0; n < count; n++) {
        if (w)
            qc_weights_row(&qc_quant_ops_scalar, w, first + n, scratch);
        for (uint64_t i = 0; i < m; i++) {
            double sum = 0.0;
            for (uint64_t c = 0; c < k; c++) {
                float value = w ? scratch[c] : widened(dense, dense_dtype, (first + n) * k + c);
                sum += (double)value * (double)widened(x, x_dtype, i * ldx + c);
            }
            y[i * count + n] = sum;
        }
    }
}

/* ---- untrusted descriptors ------------------------------------------------------------------ */

static qc_status check_scales(const qc_weights *w, uint64_t blocks, uint64_t scales,
                              uint64_t nested_scales, qc_error *err)
{
    if (scales != blocks)
        QC_FAIL(err, QC_ERR_SHAPE, "expected %" PRIu64 " scales, found %" PRIu64, blocks, scales);
    if (w->absmax || blocks == 0)
        return QC_OK;
    if (!w->absmax_codes || !w->nested_absmax || !w->nested_map)
        QC_FAIL(err, QC_ERR_SHAPE, "scales are neither plain nor double quantized");
    if (w->nested_block == 0 || (w->nested_block & (w->nested_block - 1)) != 0)
        QC_FAIL(err, QC_ERR_SHAPE, "%u scales share one of their own; expected a power of two",
                w->nested_block);
    uint64_t want = qc_ceil_div_u64(blocks, w->nested_block);
    if (nested_scales != want)
        QC_FAIL(err, QC_ERR_SHAPE, "expected %" PRIu64 " scales of scales, found %" PRIu64, want,
                nested_scales);
    return QC_OK;
}

qc_status qc_weights_check(const qc_weights *w, uint64_t codes_bytes, uint64_t scales,
                           uint64_t nested_scales, qc_error *err)
{
    uint64_t elems = 0, bytes = 0;
    /* Bytes as floats fit as well, so that what is derived from them needs no check. */
    if (qc_mul_u64(w->rows, w->cols, &elems) || qc_mul_u64(elems, sizeof(double), &bytes))
        QC_FAIL(err, QC_ERR_SHAPE, "[%" PRIu64 ", %" PRIu64 "] weights are too many", w->rows,
                w->cols);
    if (w->kind != QC_WEIGHTS_NF4 && w->kind != QC_WEIGHTS_INT8_ROWS &&
        w->kind != QC_WEIGHTS_INT8_BLOCKS)
        QC_FAIL(err, QC_ERR_SHAPE, "weights of an unknown kind");
    uint64_t want = w->kind == QC_WEIGHTS_NF4 ? elems / 2 + elems % 2 : elems;
    if (codes_bytes != want)
        QC_FAIL(err, QC_ERR_SHAPE,
                "[%" PRIu64 ", %" PRIu64 "] weights have %" PRIu64
                " bytes of codes, found %" PRIu64,
                w->rows, w->cols, want, codes_bytes);
    if (elems > 0 && !w->codes)
        QC_FAIL(err, QC_ERR_SHAPE, "weights without codes");
    if (w->kind == QC_WEIGHTS_INT8_ROWS) {
        if (w->rows > 0 && !w->absmax)
            QC_FAIL(err, QC_ERR_SHAPE, "weights in rows without scales");
        return check_scales(w, w->rows, scales, nested_scales, err);
    }
    if (!qc_block_size_valid(w->block_elems))
        QC_FAIL(err, QC_ERR_SHAPE, "blocks of %u weights; expected a power of two from 32 to 4096",
                w->block_elems);
    return check_scales(w, qc_ceil_div_u64(elems, w->block_elems), scales, nested_scales, err);
}

/* The AVX-512 table: quantizers in quant_avx512_blocks.c and quant_avx512_rows.c; here what is
 * bound by memory: dequantization, casts, and double quantization.
 *
 * NF4 to 16-bit types: the 16 possible values of a block are computed and rounded once; 32 weights
 * are then one 16-bit permute of that table. What a product overflows to is looked at in the table
 * too; a block where one of them does is redone by the scalar code, which knows the first index.
 *
 * nested_quantize: one gather from qc_simd_tables.nested per 16 values; see there. About 30 cycles,
 * bound by the gather's 16 loads; two gathers (codes, thresholds) took half as much again.
 */
#include "quant/quant_avx512.h"
#include "quant/quant_avx512_internal.h"
#include "quant/quant_half.h"
#include "quant/quant_simd_tables.h"

#include <string.h>

/* ---- narrowing ------------------------------------------------------------------------------- */

/* Lanes that are finite but become infinite in dtype. */
QC_INLINE __mmask16 overflows(__m512 x, qc_dtype dtype)
{
    if (dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        return 0;
    const uint32_t from = dtype == QC_DTYPE_F16 ? 0x477ff000u : 0x7f7f8000u;
    __m512i above = _mm512_sub_epi32(qc_magnitude_f32(x), _mm512_set1_epi32((int)from));
    return _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32((int)(QC_F32_INF - from)));
}

/* 16 words of F16 or BF16. */
QC_INLINE __m256i to_half(__m512 x, qc_dtype dtype)
{
    if (dtype == QC_DTYPE_F16)
        return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512i u = _mm512_castps_si512(x);
    __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    __m512i rounded = _mm512_srli_epi32(qc_round_bf16(x), 16);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
}

QC_INLINE void store16(__m512 x, void *dst, qc_dtype dtype, uint64_t i)
{
    unsigned char *base = dst;
    if (dtype == QC_DTYPE_F32) {
        _mm512_storeu_ps(base + i * 4, x);
    } else if (dtype == QC_DTYPE_F64) {
        _mm512_storeu_pd(base + i * 8, _mm512_cvtps_pd(_mm512_castps512_ps256(x)));
        _mm512_storeu_pd(base + i * 8 + 64, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)));
    } else {
        _mm256_storeu_si256((__m256i *)(void *)(base + i * 2), to_half(x, dtype));
    }
}

/* Later overflows do not count. */
QC_INLINE void note_overflow(uint64_t *first_overflow, uint64_t index)
{
    if (*first_overflow == UINT64_MAX)
        *first_overflow = index;
}

QC_INLINE void note_lanes(uint64_t *first_overflow, __mmask16 lanes, uint64_t i)
{
    if (__builtin_expect(lanes != 0, 0))
        note_overflow(first_overflow, i + (unsigned)__builtin_ctz(lanes));
}

/* ---- NF4 ------------------------------------------------------------------------------------- */

/* Whole multiples of 32 elements of one block, to F16 or BF16. */
QC_INLINE void nf4_to_half(const uint8_t *codes, uint64_t n, __m256i table, unsigned char *dst)
{
    const __m512i twice = _mm512_broadcast_i64x4(table); /* bit 4 of an index does not matter */
    for (uint64_t i = 0; i < n; i += 32) {
        __m512i bytes =
            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(codes + i / 2)));
        __m512i index = _mm512_or_si512(_mm512_srli_epi32(bytes, 4), _mm512_slli_epi32(bytes, 16));
        _mm512_storeu_si512(dst + i * 2, _mm512_permutexvar_epi16(index, twice));
    }
}

QC_INLINE void nf4_to_f32(const uint8_t *codes, uint64_t n, __m512 table, unsigned char *dst)
{
    for (uint64_t i = 0; i < n; i += 16) {
        __m512i bytes =
            _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(const void *)(codes + i / 2)));
        __m512i index = _mm512_or_si512(_mm512_srli_epi64(bytes, 4), _mm512_slli_epi64(bytes, 32));
        _mm512_storeu_ps(dst + i * 4, _mm512_permutexvar_ps(index, table));
    }
}

QC_INLINE void nf4_dequantize_to(const uint8_t *codes, const float *absmax, const float *code_map,
                                 uint64_t n, uint32_t block_elems, void *dst, qc_dtype dtype,
                                 uint64_t *first_overflow)
{
    const __m512 map = _mm512_loadu_ps(code_map);
    const uint64_t element = dtype == QC_DTYPE_F32 ? 4 : 2;
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        const uint64_t count = n - first < block_elems ? n - first : block_elems;
        unsigned char *out = (unsigned char *)dst + first * element;
        __m512 values = _mm512_mul_ps(map, _mm512_set1_ps(absmax[k]));
        if (count < block_elems || overflows(values, dtype)) {
            uint64_t overflow;
            qc_quant_ops_scalar.nf4_dequantize(codes + first / 2, absmax + k, code_map, count,
                                               block_elems, out, dtype, &overflow);
            if (overflow != UINT64_MAX)
                note_overflow(first_overflow, first + overflow);
        } else if (dtype == QC_DTYPE_F32) {
            nf4_to_f32(codes + first / 2, count, values, out);
        } else {
            nf4_to_half(codes + first / 2, count, to_half(values, dtype), out);
        }
    }
}

static void nf4_dequantize(const uint8_t *codes, const float *absmax, const float *code_map,
                           uint64_t n, uint32_t block_elems, void *dst, qc_dtype dtype,
                           uint64_t *overflow)
{
    if (dtype == QC_DTYPE_F32)
        nf4_dequantize_to(codes, absmax, code_map, n, block_elems, dst, QC_DTYPE_F32, overflow);
    else if (dtype == QC_DTYPE_F16)
        nf4_dequantize_to(codes, absmax, code_map, n, block_elems, dst, QC_DTYPE_F16, overflow);
    else
        nf4_dequantize_to(codes, absmax, code_map, n, block_elems, dst, QC_DTYPE_BF16, overflow);
}

/* ---- int8 ------------------------------------------------------------------------------------ */

/* dst[i] = (code * a) * b from `first` on */
QC_INLINE void int8_dequantize_run(const int8_t *codes, uint64_t first, uint64_t n, float a,
                                   float b, void *dst, qc_dtype dtype, uint64_t *first_overflow)
{
    const __m512 va = _mm512_set1_ps(a), vb = _mm512_set1_ps(b);
    uint64_t i = first;
    const uint64_t end = first + n;
    for (; i < end; i += 16) {
        const unsigned count = end - i < 16 ? (unsigned)(end - i) : 16;
        const __mmask16 here = (__mmask16)(count == 16 ? 0xffffu : (1u << count) - 1);
        __m512 q = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(here, codes + i)));
        __m512 x = _mm512_mul_ps(_mm512_mul_ps(q, va), vb);
        note_lanes(first_overflow, overflows(x, dtype) & here, i);
        if (count == 16) {
            store16(x, dst, dtype, i);
        } else {
            const uint64_t element = dtype == QC_DTYPE_F32 ? 4 : 2;
            unsigned char part[64];
            store16(x, part, dtype, 0);
            memcpy((unsigned char *)dst + i * element, part, count * element);
        }
    }
}

QC_INLINE void int8_dequantize_to(const int8_t *codes, const float *scales, uint64_t n,
                                  uint64_t each, int rows, void *dst, qc_dtype dtype,
                                  uint64_t *first_overflow)
{
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += each, k++) {
        const uint64_t count = n - first < each ? n - first : each;
        if (rows)
            int8_dequantize_run(codes, first, count, scales[k], QC_INT8_STEP, dst, dtype,
                                first_overflow);
        else
            int8_dequantize_run(codes, first, count, QC_INT8_STEP, scales[k], dst, dtype,
                                first_overflow);
    }
}

QC_INLINE void int8_dequantize(const int8_t *codes, const float *scales, uint64_t n, uint64_t each,
                               int rows, void *dst, qc_dtype dtype, uint64_t *overflow)
{
    if (dtype == QC_DTYPE_F32)
        int8_dequantize_to(codes, scales, n, each, rows, dst, QC_DTYPE_F32, overflow);
    else if (dtype == QC_DTYPE_F16)
        int8_dequantize_to(codes, scales, n, each, rows, dst, QC_DTYPE_F16, overflow);
    else
        int8_dequantize_to(codes, scales, n, each, rows, dst, QC_DTYPE_BF16, overflow);
}

static void int8_rows_dequantize(const int8_t *codes, const float *scb, uint64_t rows,
                                 uint64_t cols, void *dst, qc_dtype dtype, uint64_t *overflow)
{
    int8_dequantize(codes, scb, rows * cols, cols, 1, dst, dtype, overflow);
}

static void int8_blocks_dequantize(const int8_t *codes, const float *absmax, uint64_t n,
                                   uint32_t block_elems, void *dst, qc_dtype dtype,
                                   uint64_t *overflow)
{
    int8_dequantize(codes, absmax, n, block_elems, 0, dst, dtype, overflow);
}

/* ---- casts ----------------------------------------------------------------------------------- */

QC_INLINE __m512 widen_quiet(const void *src, qc_dtype dtype, uint64_t i)
{
    __m512 x = qc_load16(src, dtype, i);
    if (dtype != QC_DTYPE_BF16)
        return x;
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_or_epi32(
        _mm512_castps_si512(x), nan, _mm512_castps_si512(x), _mm512_set1_epi32(0x00400000)));
}

/* Lanes of 16 doubles that are finite and too large for a float. */
QC_INLINE __mmask16 doubles_overflow(const void *src, uint64_t i)
{
    const unsigned char *at = (const unsigned char *)src + i * 8;
    const __m512d beyond = _mm512_set1_pd(0x1.ffffffp127),
                  most = _mm512_set1_pd(0x1.fffffffffffffp1023);
    __m512d a = _mm512_abs_pd(_mm512_loadu_pd(at)), b = _mm512_abs_pd(_mm512_loadu_pd(at + 64));
    __mmask8 low =
        _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(a, beyond, _CMP_GE_OQ), a, most, _CMP_LE_OQ);
    __mmask8 high =
        _mm512_mask_cmp_pd_mask(_mm512_cmp_pd_mask(b, beyond, _CMP_GE_OQ), b, most, _CMP_LE_OQ);
    return (__mmask16)(low | (unsigned)high << 8);
}

QC_INLINE void cast_to(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                       uint64_t *first_overflow)
{
    uint64_t i = 0;
    *first_overflow = UINT64_MAX;
    for (; i + 16 <= n; i += 16) {
        __m512 x = widen_quiet(src, from, i);
        store16(x, dst, to, i);
        note_lanes(first_overflow,
                   from == QC_DTYPE_F64 ? doubles_overflow(src, i) : overflows(x, to), i);
    }
    if (i < n) {
        uint64_t overflow;
        qc_quant_ops_scalar.cast((const unsigned char *)src + i * (qc_dtype_bits(from) / 8), from,
                                 n - i, (unsigned char *)dst + i * (qc_dtype_bits(to) / 8), to,
                                 &overflow);
        if (overflow != UINT64_MAX)
            note_overflow(first_overflow, i + overflow);
    }
}

QC_INLINE void cast_from(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                         uint64_t *first_overflow)
{
    if (to == QC_DTYPE_F64)
        cast_to(src, from, n, dst, QC_DTYPE_F64, first_overflow);
    else if (to == QC_DTYPE_F32)
        cast_to(src, from, n, dst, QC_DTYPE_F32, first_overflow);
    else if (to == QC_DTYPE_F16)
        cast_to(src, from, n, dst, QC_DTYPE_F16, first_overflow);
    else
        cast_to(src, from, n, dst, QC_DTYPE_BF16, first_overflow);
}

/* Copies, and F64 to a 16-bit type (one rounding, rare), stay with the scalar code. */
static void cast(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                 uint64_t *first_overflow)
{
    if (from == to || (from == QC_DTYPE_F64 && to != QC_DTYPE_F32))
        qc_quant_ops_scalar.cast(src, from, n, dst, to, first_overflow);
    else if (from == QC_DTYPE_F64)
        cast_to(src, QC_DTYPE_F64, n, dst, QC_DTYPE_F32, first_overflow);
    else if (from == QC_DTYPE_F32)
        cast_from(src, QC_DTYPE_F32, n, dst, to, first_overflow);
    else if (from == QC_DTYPE_F16)
        cast_from(src, QC_DTYPE_F16, n, dst, to, first_overflow);
    else
        cast_from(src, QC_DTYPE_BF16, n, dst, to, first_overflow);
}

/* ---- double quantization --------------------------------------------------------------------- */

QC_INLINE __m128i nested_codes(__m512 x, const qc_simd_tables *tables)
{
    const __m512i first_key = _mm512_set1_epi32(QC_NESTED_FIRST);
    __m512i bits = _mm512_castps_si512(x), magnitude = qc_magnitude_f32(x);
    __m512i key = _mm512_srli_epi32(magnitude, QC_NESTED_SHIFT);
    key = _mm512_sub_epi32(_mm512_max_epu32(key, first_key), first_key);
    __m512i sign = _mm512_srai_epi32(bits, 31);
    key = _mm512_or_si512(key, _mm512_and_si512(sign, _mm512_set1_epi32((int)QC_NESTED_KEYS)));
    __m512i low = _mm512_and_si512(magnitude, _mm512_set1_epi32(QC_NESTED_LOW));
    __m512i field = _mm512_add_epi32(_mm512_i32gather_epi32(key, tables->nested, 4), low);
    field = _mm512_xor_si512(_mm512_srli_epi32(field, QC_NESTED_SHIFT), sign);
    return _mm512_cvtepi32_epi8(field);
}

static void nested_quantize(const float *absmax, uint64_t n, float offset, uint8_t *codes,
                            float *nested_absmax)
{
    const qc_simd_tables *tables = qc_simd_tables_get();
    const __m512 shift = _mm512_set1_ps(offset);
    for (uint64_t first = 0; first < n; first += QC_NESTED_BLOCK) {
        const float *in = absmax + first;
        __m512i most = _mm512_setzero_si512();
        int whole = n - first >= QC_NESTED_BLOCK;
        for (unsigned i = 0; whole && i < QC_NESTED_BLOCK; i += 16) {
            __m512 d = _mm512_sub_ps(_mm512_loadu_ps(in + i), shift);
            most = _mm512_max_epu32(most, qc_magnitude_f32(d));
        }
        float largest = qc_f32_of_bits(_mm512_reduce_max_epu32(most));
        if (!whole || !(largest >= QC_TINY_ABSMAX && largest <= 0x1p125f)) {
            uint64_t count = whole ? QC_NESTED_BLOCK : n - first;
            qc_quant_ops_scalar.nested_quantize(in, count, offset, codes + first,
                                                nested_absmax + first / QC_NESTED_BLOCK);
            continue;
        }
        nested_absmax[first / QC_NESTED_BLOCK] = largest;
        const __m512 inv = _mm512_set1_ps(1.0f / largest);
        for (unsigned i = 0; i < QC_NESTED_BLOCK; i += 16) {
            __m512 d = _mm512_sub_ps(_mm512_loadu_ps(in + i), shift);
            _mm_storeu_si128((__m128i *)(void *)(codes + first + i),
                             nested_codes(_mm512_mul_ps(d, inv), tables));
        }
    }
}

static void nested_dequantize(const uint8_t *codes, const float *nested_absmax, const float *map,
                              uint64_t n, uint32_t nested_block, float offset, float *absmax)
{
    const __m512 shift = _mm512_set1_ps(offset);
    for (uint64_t first = 0, k = 0; first < n; first += nested_block, k++) {
        const uint64_t end = n - first < nested_block ? n : first + nested_block;
        const __m512 scale = _mm512_set1_ps(nested_absmax[k]);
        for (uint64_t i = first; i < end; i += 16) {
            __mmask16 here = (__mmask16)(end - i < 16 ? (1u << (end - i)) - 1 : 0xffffu);
            __m512i index = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(here, codes + i));
            __m512 value = _mm512_mul_ps(_mm512_i32gather_ps(index, map, 4), scale);
            _mm512_mask_storeu_ps(absmax + i, here, _mm512_add_ps(value, shift));
        }
    }
}

const qc_quant_ops qc_quant_ops_avx512 = {
    .isa = QC_ISA_AVX512,
    .nf4_quantize = qc_avx512_nf4_quantize,
    .nf4_dequantize = nf4_dequantize,
    .nested_quantize = nested_quantize,
    .nested_dequantize = nested_dequantize,
    .int8_rows_quantize = qc_avx512_int8_rows_quantize,
    .int8_rows_dequantize = int8_rows_dequantize,
    .int8_blocks_quantize = qc_avx512_int8_blocks_quantize,
    .int8_blocks_dequantize = int8_blocks_dequantize,
    .cast = cast,
};

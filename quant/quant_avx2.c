/* The AVX2 table: quantizers in quant_avx2_blocks.c and quant_avx2_rows.c; here what is bound by
 * memory: dequantization, casts, and double quantization.
 *
 * NF4 to 16-bit types: the 16 possible values of a block are computed and rounded once and cut into
 * their lower and upper bytes; 32 weights are then four vpshufb of 128 bits and four unpacks. To
 * floats: two vpermps and a blend for 8. What a product overflows to is looked at in the table too;
 * a block where one of them does is redone by the scalar code, which knows the first index.
 *
 * nested_quantize: one gather from qc_simd_tables.nested per 8 values; see there.
 *
 * What is left of a run shorter than a vector goes to the scalar code.
 */
#include "quant/quant_avx2.h"
#include "quant/quant_avx2_internal.h"
#include "quant/quant_half.h"
#include "quant/quant_simd_tables.h"

#include <string.h>

/* ---- narrowing ------------------------------------------------------------------------------- */

/* Lanes that are finite but become infinite in dtype, one bit each. */
QC_INLINE unsigned overflows(__m256 x, qc_dtype dtype)
{
    if (dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        return 0;
    const int from = dtype == QC_DTYPE_F16 ? 0x477ff000 : 0x7f7f8000;
    __m256i magnitude = qc_magnitude_f32(x);
    __m256i large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(from - 1));
    __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)QC_F32_INF), magnitude);
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_and_si256(large, finite)));
}

/* 8 words of F16 or BF16. */
QC_INLINE __m128i to_half(__m256 x, qc_dtype dtype)
{
    if (dtype == QC_DTYPE_F16)
        return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i u = _mm256_castps_si256(x);
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return qc_narrow_words(_mm256_blendv_epi8(qc_round_bf16(x), quiet, nan));
}

QC_INLINE void store8(__m256 x, void *dst, qc_dtype dtype, uint64_t i)
{
    unsigned char *base = dst;
    if (dtype == QC_DTYPE_F32) {
        qc_store(base + i * 4, _mm256_castps_si256(x));
    } else if (dtype == QC_DTYPE_F64) {
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(x));
        __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
        qc_store(base + i * 8, _mm256_castpd_si256(low));
        qc_store(base + i * 8 + 32, _mm256_castpd_si256(high));
    } else {
        qc_store_half(base + i * 2, to_half(x, dtype));
    }
}

/* Later overflows do not count. */
QC_INLINE void note_overflow(uint64_t *first_overflow, uint64_t index)
{
    if (*first_overflow == UINT64_MAX)
        *first_overflow = index;
}

QC_INLINE void note_lanes(uint64_t *first_overflow, unsigned lanes, uint64_t i)
{
    if (__builtin_expect(lanes != 0, 0))
        note_overflow(first_overflow, i + (unsigned)__builtin_ctz(lanes));
}

/* What the scalar code says of elements from `first` on. */
QC_INLINE void note_scalar(uint64_t *first_overflow, uint64_t overflow, uint64_t first)
{
    if (overflow != UINT64_MAX)
        note_overflow(first_overflow, first + overflow);
}

/* ---- NF4 ------------------------------------------------------------------------------------- */

/* Whole multiples of 32 elements of one block, to F16 or BF16; words: the 16 values. */
QC_INLINE void nf4_to_half(const uint8_t *codes, uint64_t n, __m128i words0, __m128i words1,
                           unsigned char *dst)
{
    const __m128i low_byte = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(15);
    const __m128i low =
        _mm_packus_epi16(_mm_and_si128(words0, low_byte), _mm_and_si128(words1, low_byte));
    const __m128i high = _mm_packus_epi16(_mm_srli_epi16(words0, 8), _mm_srli_epi16(words1, 8));
    for (uint64_t i = 0; i < n; i += 32) {
        __m128i bytes = qc_load_half(codes + i / 2);
        __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
        __m128i odd = _mm_and_si128(bytes, nibble);
        __m128i a = _mm_unpacklo_epi8(even, odd), b = _mm_unpackhi_epi8(even, odd);
        __m128i a0 = _mm_shuffle_epi8(low, a), a1 = _mm_shuffle_epi8(high, a);
        __m128i b0 = _mm_shuffle_epi8(low, b), b1 = _mm_shuffle_epi8(high, b);
        qc_store_half(dst + i * 2, _mm_unpacklo_epi8(a0, a1));
        qc_store_half(dst + i * 2 + 16, _mm_unpackhi_epi8(a0, a1));
        qc_store_half(dst + i * 2 + 32, _mm_unpacklo_epi8(b0, b1));
        qc_store_half(dst + i * 2 + 48, _mm_unpackhi_epi8(b0, b1));
    }
}

QC_INLINE void nf4_to_f32(const uint8_t *codes, uint64_t n, __m256 values0, __m256 values1,
                          unsigned char *dst)
{
    for (uint64_t i = 0; i < n; i += 8) {
        int four;
        memcpy(&four, codes + i / 2, sizeof four);
        __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
        __m256i index = _mm256_or_si256(_mm256_srli_epi64(bytes, 4), _mm256_slli_epi64(bytes, 32));
        __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); /* 8 or more */
        __m256 x = _mm256_blendv_ps(_mm256_permutevar8x32_ps(values0, index),
                                    _mm256_permutevar8x32_ps(values1, index), upper);
        qc_store(dst + i * 4, _mm256_castps_si256(x));
    }
}

QC_INLINE void nf4_dequantize_to(const uint8_t *codes, const float *absmax, const float *code_map,
                                 uint64_t n, uint32_t block_elems, void *dst, qc_dtype dtype,
                                 uint64_t *first_overflow)
{
    const __m256 map0 = _mm256_loadu_ps(code_map), map1 = _mm256_loadu_ps(code_map + 8);
    const uint64_t element = dtype == QC_DTYPE_F32 ? 4 : 2;
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        const uint64_t count = n - first < block_elems ? n - first : block_elems;
        unsigned char *out = (unsigned char *)dst + first * element;
        const __m256 scale = _mm256_set1_ps(absmax[k]);
        __m256 values0 = _mm256_mul_ps(map0, scale), values1 = _mm256_mul_ps(map1, scale);
        if (count < block_elems || overflows(values0, dtype) || overflows(values1, dtype)) {
            uint64_t overflow;
            qc_quant_ops_scalar.nf4_dequantize(codes + first / 2, absmax + k, code_map, count,
                                               block_elems, out, dtype, &overflow);
            note_scalar(first_overflow, overflow, first);
        } else if (dtype == QC_DTYPE_F32) {
            nf4_to_f32(codes + first / 2, count, values0, values1, out);
        } else {
            nf4_to_half(codes + first / 2, count, to_half(values0, dtype), to_half(values1, dtype),
                        out);
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

/* dst[i] = (code * a) * b for n elements from `first` on, one of a and b being the scale */
QC_INLINE void int8_dequantize_run(const int8_t *codes, uint64_t first, uint64_t n,
                                   const float *scale, int rows, void *dst, qc_dtype dtype,
                                   uint64_t *first_overflow)
{
    const __m256 va = _mm256_set1_ps(rows ? *scale : QC_INT8_STEP);
    const __m256 vb = _mm256_set1_ps(rows ? QC_INT8_STEP : *scale);
    const uint64_t end = first + n;
    uint64_t i = first;
    for (; i + 8 <= end; i += 8) {
        __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(codes + i));
        __m256 q = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
        __m256 x = _mm256_mul_ps(_mm256_mul_ps(q, va), vb);
        store8(x, dst, dtype, i);
        note_lanes(first_overflow, overflows(x, dtype), i);
    }
    if (i == end)
        return;
    uint64_t overflow;
    unsigned char *out = (unsigned char *)dst + i * (dtype == QC_DTYPE_F32 ? 4 : 2);
    if (rows)
        qc_quant_ops_scalar.int8_rows_dequantize(codes + i, scale, 1, end - i, out, dtype,
                                                 &overflow);
    else
        qc_quant_ops_scalar.int8_blocks_dequantize(codes + i, scale, end - i, QC_BLOCK_DEFAULT, out,
                                                   dtype, &overflow);
    note_scalar(first_overflow, overflow, i);
}

QC_INLINE void int8_dequantize_to(const int8_t *codes, const float *scales, uint64_t n,
                                  uint64_t each, int rows, void *dst, qc_dtype dtype,
                                  uint64_t *first_overflow)
{
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += each, k++) {
        const uint64_t count = n - first < each ? n - first : each;
        int8_dequantize_run(codes, first, count, scales + k, rows, dst, dtype, first_overflow);
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

QC_INLINE __m256 widen_quiet(const void *src, qc_dtype dtype, uint64_t i)
{
    __m256 x = qc_load8(src, dtype, i);
    if (dtype != QC_DTYPE_BF16)
        return x;
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x00400000));
    return _mm256_or_ps(x, _mm256_and_ps(nan, quiet));
}

/* Of 4 doubles, those that are finite and too large for a float. */
QC_INLINE unsigned doubles_overflow4(const unsigned char *at)
{
    const __m256d no_sign = _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX));
    __m256d a = _mm256_and_pd(_mm256_castsi256_pd(qc_load(at)), no_sign);
    __m256d large = _mm256_cmp_pd(a, _mm256_set1_pd(0x1.ffffffp127), _CMP_GE_OQ);
    __m256d finite = _mm256_cmp_pd(a, _mm256_set1_pd(0x1.fffffffffffffp1023), _CMP_LE_OQ);
    return (unsigned)_mm256_movemask_pd(_mm256_and_pd(large, finite));
}

QC_INLINE unsigned doubles_overflow(const void *src, uint64_t i)
{
    const unsigned char *at = (const unsigned char *)src + i * 8;
    return doubles_overflow4(at) | doubles_overflow4(at + 32) << 4;
}

QC_INLINE void cast_to(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                       uint64_t *first_overflow)
{
    const uint64_t element = qc_dtype_bits(from) / 8;
    uint64_t i = 0;
    *first_overflow = UINT64_MAX;
    for (; i + 8 <= n; i += 8) {
        __m256 x = widen_quiet(src, from, i);
        store8(x, dst, to, i);
        note_lanes(first_overflow,
                   from == QC_DTYPE_F64 ? doubles_overflow(src, i) : overflows(x, to), i);
    }
    if (i < n) {
        uint64_t overflow;
        qc_quant_ops_scalar.cast((const unsigned char *)src + i * element, from, n - i,
                                 (unsigned char *)dst + i * (qc_dtype_bits(to) / 8), to, &overflow);
        note_scalar(first_overflow, overflow, i);
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

/* The codes in the low bytes of 8 lanes. */
QC_INLINE __m256i nested_codes(__m256 x, const qc_simd_tables *tables)
{
    const __m256i first_key = _mm256_set1_epi32(QC_NESTED_FIRST);
    __m256i bits = _mm256_castps_si256(x), magnitude = qc_magnitude_f32(x);
    __m256i key = _mm256_srli_epi32(magnitude, QC_NESTED_SHIFT);
    key = _mm256_sub_epi32(_mm256_max_epu32(key, first_key), first_key);
    __m256i sign = _mm256_srai_epi32(bits, 31);
    key = _mm256_or_si256(key, _mm256_and_si256(sign, _mm256_set1_epi32((int)QC_NESTED_KEYS)));
    __m256i low = _mm256_and_si256(magnitude, _mm256_set1_epi32(QC_NESTED_LOW));
    __m256i entry = _mm256_i32gather_epi32((const int *)(const void *)tables->nested, key, 4);
    __m256i field = _mm256_srli_epi32(_mm256_add_epi32(entry, low), QC_NESTED_SHIFT);
    return _mm256_and_si256(_mm256_xor_si256(field, sign), _mm256_set1_epi32(0xff));
}

/* One whole group of QC_NESTED_BLOCK values. */
QC_INLINE void nested_group(const float *in, __m256 shift, float largest, uint8_t *codes,
                            const qc_simd_tables *tables)
{
    const __m256 inv = _mm256_set1_ps(1.0f / largest);
    for (unsigned i = 0; i < QC_NESTED_BLOCK; i += 16) {
        __m256 a = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(in + i), shift), inv);
        __m256 b = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(in + i + 8), shift), inv);
        __m256i words = _mm256_packus_epi32(nested_codes(a, tables), nested_codes(b, tables));
        words = _mm256_permute4x64_epi64(words, 0xd8);
        qc_store_half(codes + i, _mm_packus_epi16(_mm256_castsi256_si128(words),
                                                  _mm256_extracti128_si256(words, 1)));
    }
}

static float largest_difference(const float *in, __m256 shift)
{
    __m256i most = _mm256_setzero_si256();
    uint32_t lanes[8], largest = 0;
    for (unsigned i = 0; i < QC_NESTED_BLOCK; i += 8) {
        __m256 d = _mm256_sub_ps(_mm256_loadu_ps(in + i), shift);
        most = _mm256_max_epu32(most, qc_magnitude_f32(d));
    }
    qc_store(lanes, most);
    for (unsigned l = 0; l < 8; l++)
        largest = lanes[l] > largest ? lanes[l] : largest;
    return qc_f32_of_bits(largest);
}

static void nested_quantize(const float *absmax, uint64_t n, float offset, uint8_t *codes,
                            float *nested_absmax)
{
    const qc_simd_tables *tables = qc_simd_tables_get();
    const __m256 shift = _mm256_set1_ps(offset);
    for (uint64_t first = 0, k = 0; first < n; first += QC_NESTED_BLOCK, k++) {
        const float *in = absmax + first;
        const uint64_t count = n - first < QC_NESTED_BLOCK ? n - first : QC_NESTED_BLOCK;
        float largest = count == QC_NESTED_BLOCK ? largest_difference(in, shift) : 0.0f;
        if (largest >= QC_TINY_ABSMAX && largest <= 0x1p125f) {
            nested_absmax[k] = largest;
            nested_group(in, shift, largest, codes + first, tables);
        } else {
            qc_quant_ops_scalar.nested_quantize(in, count, offset, codes + first,
                                                nested_absmax + k);
        }
    }
}

static void nested_dequantize(const uint8_t *codes, const float *nested_absmax, const float *map,
                              uint64_t n, uint32_t nested_block, float offset, float *absmax)
{
    const __m256 shift = _mm256_set1_ps(offset);
    for (uint64_t first = 0, k = 0; first < n; first += nested_block, k++) {
        const uint64_t end = n - first < nested_block ? n : first + nested_block;
        const __m256 scale = _mm256_set1_ps(nested_absmax[k]);
        uint64_t i = first;
        for (; i + 8 <= end; i += 8) {
            __m128i bytes = _mm_loadl_epi64((const __m128i *)(const void *)(codes + i));
            __m256 value = _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(bytes), 4);
            _mm256_storeu_ps(absmax + i, _mm256_add_ps(_mm256_mul_ps(value, scale), shift));
        }
        for (; i < end; i++)
            absmax[i] = map[codes[i]] * nested_absmax[k] + offset;
    }
}

const qc_quant_ops qc_quant_ops_avx2 = {
    .isa = QC_ISA_AVX2,
    .nf4_quantize = qc_avx2_nf4_quantize,
    .nf4_dequantize = nf4_dequantize,
    .nested_quantize = nested_quantize,
    .nested_dequantize = nested_dequantize,
    .int8_rows_quantize = qc_avx2_int8_rows_quantize,
    .int8_rows_dequantize = int8_rows_dequantize,
    .int8_blocks_quantize = qc_avx2_int8_blocks_quantize,
    .int8_blocks_dequantize = int8_blocks_dequantize,
    .cast = cast,
};

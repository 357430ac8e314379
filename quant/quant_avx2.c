/* The AVX2 table. Processors with AVX-512 take it, too: code of their own made no conversion 1.25
 * times as fast (decisions/0031). The quantizers are in quant_avx2_blocks.c and quant_avx2_rows.c;
 * here is the work that is bound by memory: dequantization, casts and double quantization. The
 * scalar code does the rest of a run that is shorter than sixteen elements. NF4 computes the 16
 * possible values of a block once, and overflow is looked for in that table too; a block with one
 * is redone by the scalar code, which knows the first index.
 *
 * NF4 to 16-bit types: the 16 values are cut into their lower and upper bytes; 32 weights are then
 * four vpshufb of 128 bits and four unpacks. To floats: two vpermps and a blend for 8.
 *
 * nested_quantize: one gather from qc_simd_tables.nested per 8 values; see there. */
#include "quant/quant_avx2.h"
#include "quant/quant_avx2_internal.h"
#include "quant/quant_half.h"
#include "quant/quant_simd_tables.h"

#include <string.h>

/* ---- narrowing ------------------------------------------------------------------------------- */

/* Returns all ones in lanes that are finite but become infinite in dtype. A signed comparison
 * replaces an unsigned one of |x| - from, because both sides have their top bit flipped. */
QC_INLINE __m256i overflows8(__m256 x, qc_dtype dtype)
{
    const uint32_t from = dtype == QC_DTYPE_F16 ? 0x477ff000u : 0x7f7f8000u, top = 1u << 31;
    __m256i above = _mm256_add_epi32(qc_magnitude_f32(x), _mm256_set1_epi32((int)(top - from)));
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)(top + QC_F32_INF - from)), above);
}

/* Returns one bit for each such lane; there is hardly ever one. */
QC_INLINE uint16_t overflows(qc_wide x, qc_dtype dtype)
{
    if (dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        return 0;
    __m256i low = overflows8(x.low, dtype), high = overflows8(x.high, dtype);
    __m256i any = _mm256_or_si256(low, high);
    if (__builtin_expect(_mm256_testz_si256(any, any), 1))
        return 0;
    int mask = _mm256_movemask_ps(_mm256_castsi256_ps(low));
    return (uint16_t)(mask | _mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8);
}

/* Returns 8 words of F16 or BF16. */
QC_INLINE __m128i to_half8(__m256 x, qc_dtype dtype)
{
    if (dtype == QC_DTYPE_F16)
        return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i u = _mm256_castps_si256(x);
    __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(0x40));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return qc_narrow_words(_mm256_blendv_epi8(qc_round_bf16(x), quiet, nan));
}

typedef struct {
    __m128i low, high;
} halves;

QC_INLINE halves to_half(qc_wide x, qc_dtype dtype)
{
    return (halves){to_half8(x.low, dtype), to_half8(x.high, dtype)};
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
        qc_store_half(base + i * 2, to_half8(x, dtype));
    }
}

QC_INLINE void store16(qc_wide x, void *dst, qc_dtype dtype, uint64_t i)
{
    store8(x.low, dst, dtype, i);
    store8(x.high, dst, dtype, i + 8);
}

/* ---- vectors of NF4 -------------------------------------------------------------------------- */

/* Turns whole multiples of 32 elements of one block into F16 or BF16. low_first: the first code of
 * a byte is in the low nibble. */
QC_INLINE void nf4_to_half(const uint8_t *codes, uint64_t n, halves values, int low_first,
                           unsigned char *dst)
{
    const __m128i low_byte = _mm_set1_epi16(0xff), nibble = _mm_set1_epi8(15);
    const __m128i low =
        _mm_packus_epi16(_mm_and_si128(values.low, low_byte), _mm_and_si128(values.high, low_byte));
    const __m128i high =
        _mm_packus_epi16(_mm_srli_epi16(values.low, 8), _mm_srli_epi16(values.high, 8));
    for (uint64_t i = 0; i < n; i += 32) {
        __m128i bytes = qc_load_half(codes + i / 2);
        __m128i even = _mm_and_si128(_mm_srli_epi16(bytes, low_first ? 0 : 4), nibble);
        __m128i odd = _mm_and_si128(_mm_srli_epi16(bytes, low_first ? 4 : 0), nibble);
        __m128i a = _mm_unpacklo_epi8(even, odd), b = _mm_unpackhi_epi8(even, odd);
        __m128i a0 = _mm_shuffle_epi8(low, a), a1 = _mm_shuffle_epi8(high, a);
        __m128i b0 = _mm_shuffle_epi8(low, b), b1 = _mm_shuffle_epi8(high, b);
        qc_store_half(dst + i * 2, _mm_unpacklo_epi8(a0, a1));
        qc_store_half(dst + i * 2 + 16, _mm_unpackhi_epi8(a0, a1));
        qc_store_half(dst + i * 2 + 32, _mm_unpacklo_epi8(b0, b1));
        qc_store_half(dst + i * 2 + 48, _mm_unpackhi_epi8(b0, b1));
    }
}

QC_INLINE void nf4_to_f32(const uint8_t *codes, uint64_t n, qc_wide values, int low_first,
                          unsigned char *dst)
{
    for (uint64_t i = 0; i < n; i += 8) {
        int four;
        memcpy(&four, codes + i / 2, sizeof four);
        __m256i bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
        __m256i index = _mm256_or_si256(_mm256_srli_epi64(bytes, low_first ? 0 : 4),
                                        _mm256_slli_epi64(bytes, low_first ? 28 : 32));
        __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)); /* 8 or more */
        __m256 x = _mm256_blendv_ps(_mm256_permutevar8x32_ps(values.low, index),
                                    _mm256_permutevar8x32_ps(values.high, index), upper);
        qc_store(dst + i * 4, _mm256_castps_si256(x));
    }
}

/* ---- casts ----------------------------------------------------------------------------------- */

QC_INLINE __m256 widen_quiet8(const void *src, qc_dtype dtype, uint64_t i)
{
    __m256 x = qc_load8(src, dtype, i);
    if (dtype != QC_DTYPE_BF16)
        return x;
    __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
    __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x00400000));
    return _mm256_or_ps(x, _mm256_and_ps(nan, quiet));
}

QC_INLINE qc_wide widen_quiet(const void *src, qc_dtype dtype, uint64_t i)
{
    return (qc_wide){widen_quiet8(src, dtype, i), widen_quiet8(src, dtype, i + 8)};
}

/* Returns which of 4 doubles are finite and too large for a float. */
QC_INLINE unsigned doubles_overflow4(const unsigned char *at)
{
    const __m256d no_sign = _mm256_castsi256_pd(_mm256_set1_epi64x(INT64_MAX));
    __m256d a = _mm256_and_pd(_mm256_castsi256_pd(qc_load(at)), no_sign);
    __m256d large = _mm256_cmp_pd(a, _mm256_set1_pd(0x1.ffffffp127), _CMP_GE_OQ);
    __m256d finite = _mm256_cmp_pd(a, _mm256_set1_pd(0x1.fffffffffffffp1023), _CMP_LE_OQ);
    return (unsigned)_mm256_movemask_pd(_mm256_and_pd(large, finite));
}

QC_INLINE uint16_t doubles_overflow(const void *src, uint64_t i)
{
    const unsigned char *at = (const unsigned char *)src + i * 8;
    uint32_t lanes = 0;
    for (unsigned part = 0; part < 4; part++)
        lanes |= doubles_overflow4(at + 32 * part) << 4 * part;
    return (uint16_t)lanes;
}

/* ---- double quantization --------------------------------------------------------------------- */

/* Returns the codes in the low bytes of 8 lanes. */
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

QC_INLINE void store_nested_codes(qc_wide x, const qc_simd_tables *tables, uint8_t *codes)
{
    __m256i words = _mm256_packus_epi32(nested_codes(x.low, tables), nested_codes(x.high, tables));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    qc_store_half(
        codes, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

QC_INLINE qc_wide look_up(const float *map, const uint8_t *codes)
{
    const __m128i bytes = qc_load_half(codes);
    return (qc_wide){
        _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(bytes), 4),
        _mm256_i32gather_ps(map, _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)), 4),
    };
}

/* ---- overflow -------------------------------------------------------------------------------- */

/* Notes an overflow; only the first one counts. */
QC_INLINE void note_overflow(uint64_t *first_overflow, uint64_t index)
{
    if (*first_overflow == UINT64_MAX)
        *first_overflow = index;
}

/* lanes has a bit for each of 16. */
QC_INLINE void note_lanes(uint64_t *first_overflow, uint16_t lanes, uint64_t i)
{
    if (__builtin_expect(lanes != 0, 0))
        note_overflow(first_overflow, i + (unsigned)__builtin_ctz(lanes));
}

/* Notes what the scalar code reports for elements from `first` on. */
QC_INLINE void note_scalar(uint64_t *first_overflow, uint64_t overflow, uint64_t first)
{
    if (overflow != UINT64_MAX)
        note_overflow(first_overflow, first + overflow);
}

/* ---- NF4 ------------------------------------------------------------------------------------- */

QC_INLINE void nf4_dequantize_to(const uint8_t *codes, const float *absmax, const float *code_map,
                                 uint64_t n, uint32_t block_elems, void *dst, qc_dtype dtype,
                                 uint64_t *first_overflow)
{
    const qc_wide map = qc_wide_load(code_map);
    const uint64_t element = qc_element_bytes(dtype);
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        const uint64_t count = qc_min_u64(n - first, block_elems);
        unsigned char *out = (unsigned char *)dst + first * element;
        const qc_wide values = qc_wide_mul(map, qc_wide_all(absmax[k]));
        if (count < block_elems || overflows(values, dtype)) {
            uint64_t overflow;
            qc_quant_ops_scalar.nf4_dequantize(codes + first / 2, absmax + k, code_map, count,
                                               block_elems, out, dtype, &overflow);
            note_scalar(first_overflow, overflow, first);
        } else if (dtype == QC_DTYPE_F32) {
            nf4_to_f32(codes + first / 2, count, values, 0, out);
        } else {
            nf4_to_half(codes + first / 2, count, to_half(values, dtype), 0, out);
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

/* ---- int8 and integers ----------------------------------------------------------------------- */

/* Dequantizes a group of 4-bit codes, which starts at element `first`: its 16 values are a table,
 * as those of NF4. */
QC_INLINE void int4_dequantize_group(const qc_int_codes *how, const uint8_t *codes,
                                     const float *scale, uint64_t group, void *dst, qc_dtype dtype,
                                     uint64_t first, uint64_t *first_overflow)
{
    static const float numbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const qc_wide values = qc_wide_mul(qc_wide_load(numbers), qc_wide_all(*scale));
    const uint64_t element = qc_element_bytes(dtype), whole = group / 32 * 32;
    unsigned char *out = (unsigned char *)dst + first * element;
    const uint64_t from = overflows(values, dtype) ? 0 : whole;
    if (from > 0 && dtype == QC_DTYPE_F32)
        nf4_to_f32(codes, whole, values, 1, out);
    else if (from > 0)
        nf4_to_half(codes, whole, to_half(values, dtype), 1, out);
    if (from < group) {
        uint64_t overflow;
        qc_int_dequantize_scalar(how, codes + from / 2, scale, group - from, group - from,
                                 out + from * element, dtype, &overflow);
        note_scalar(first_overflow, overflow, first + from);
    }
}

/* Dequantizes n codes of a byte each, which share a scale; the first one is element `first`. how
 * NULL: int8, by rows or by blocks. */
QC_INLINE void int8_dequantize_run(const qc_int_codes *how, int rows, const void *codes,
                                   const float *scale, uint64_t n, void *dst, qc_dtype dtype,
                                   uint64_t first, uint64_t *first_overflow)
{
    const qc_wide by = qc_wide_all(*scale), step = qc_wide_all(QC_INT8_STEP);
    const float bias = how ? (float)how->bias : 0.0f;
    const int8_t *at = codes;
    unsigned char *out = (unsigned char *)dst + first * qc_element_bytes(dtype);
    uint64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        qc_wide q = how && how->bias ? qc_wide_of_biased((const uint8_t *)at + i, bias)
                                     : qc_wide_of_int8(at + i);
        qc_wide x = how    ? qc_wide_mul(q, by)
                    : rows ? qc_wide_mul(qc_wide_mul(q, by), step)
                           : qc_wide_mul(qc_wide_mul(q, step), by);
        store16(x, out, dtype, i);
        note_lanes(first_overflow, overflows(x, dtype), first + i);
    }
    if (i == n)
        return;
    uint64_t overflow;
    out += i * qc_element_bytes(dtype);
    if (how)
        qc_int_dequantize_scalar(how, at + i, scale, n - i, n - i, out, dtype, &overflow);
    else if (rows)
        qc_quant_ops_scalar.int8_rows_dequantize(at + i, scale, 1, n - i, out, dtype, &overflow);
    else
        qc_quant_ops_scalar.int8_blocks_dequantize(at + i, scale, n - i, QC_BLOCK_DEFAULT, out,
                                                   dtype, &overflow);
    note_scalar(first_overflow, overflow, first + i);
}

/* Dequantizes n codes that are neither 4 bits wide nor 8, of which `each` share a scale: groups
 * that lie without gaps are taken apart together. */
QC_INLINE void packed_dequantize(const qc_int_codes *how, const unsigned char *codes,
                                 const float *scales, uint64_t n, uint64_t each, void *dst,
                                 qc_dtype dtype, uint64_t *first_overflow)
{
    const qc_int_codes bytes = {.bits = 8, .bias = how->bias};
    const uint64_t run = how->stride || each > QC_ROW_FLUSH ? each : QC_ROW_FLUSH / each * each;
    unsigned char parted[QC_ROW_FLUSH];
    for (uint64_t first = 0; first < n; first += run, codes += qc_int_stride(how, run))
        for (uint64_t at = first, end = qc_min_u64(n, first + run), left; at < end; at += left) {
            left = qc_min_u64(end - at, QC_ROW_FLUSH);
            qc_avx2_codes_unpack(how->bits, codes + qc_code_bytes(how->bits, at - first), left,
                                 parted);
            for (uint64_t i = 0, some; i < left; i += some) {
                some = qc_min_u64(each, left - i);
                int8_dequantize_run(&bytes, 0, parted + i, scales + (at + i) / each, some, dst,
                                    dtype, at + i, first_overflow);
            }
        }
}

/* Dequantizes n codes, of which `each` share a scale. */
QC_INLINE void dequantize_to(const qc_int_codes *how, int rows, const unsigned char *codes,
                             const float *scales, uint64_t n, uint64_t each, void *dst,
                             qc_dtype dtype, uint64_t *overflow)
{
    const uint64_t stride = how ? qc_int_stride(how, each) : each;
    *overflow = UINT64_MAX;
    if (how && how->bits != 4 && how->bits != 8) {
        packed_dequantize(how, codes, scales, n, each, dst, dtype, overflow);
        return;
    }
    for (uint64_t first = 0; first < n; first += each, scales++, codes += stride)
        if (how && how->bits == 4)
            int4_dequantize_group(how, codes, scales, each, dst, dtype, first, overflow);
        else
            int8_dequantize_run(how, rows, codes, scales, qc_min_u64(n - first, each), dst, dtype,
                                first, overflow);
}

QC_INLINE void dequantize(const qc_int_codes *how, int rows, const void *codes, const float *scales,
                          uint64_t n, uint64_t each, void *dst, qc_dtype dtype, uint64_t *overflow)
{
    if (dtype == QC_DTYPE_F32)
        dequantize_to(how, rows, codes, scales, n, each, dst, QC_DTYPE_F32, overflow);
    else if (dtype == QC_DTYPE_F16)
        dequantize_to(how, rows, codes, scales, n, each, dst, QC_DTYPE_F16, overflow);
    else
        dequantize_to(how, rows, codes, scales, n, each, dst, QC_DTYPE_BF16, overflow);
}

static void int8_rows_dequantize(const int8_t *codes, const float *scb, uint64_t rows,
                                 uint64_t cols, void *dst, qc_dtype dtype, uint64_t *overflow)
{
    dequantize(NULL, 1, codes, scb, rows * cols, cols, dst, dtype, overflow);
}

static void int8_blocks_dequantize(const int8_t *codes, const float *absmax, uint64_t n,
                                   uint32_t block_elems, void *dst, qc_dtype dtype,
                                   uint64_t *overflow)
{
    dequantize(NULL, 0, codes, absmax, n, block_elems, dst, dtype, overflow);
}

static void int_dequantize(const qc_int_codes *how, const void *codes, const float *scales,
                           uint64_t n, uint64_t group, void *dst, qc_dtype dtype,
                           uint64_t *overflow)
{
    dequantize(how, 0, codes, scales, n, group, dst, dtype, overflow);
}

/* ---- casts ----------------------------------------------------------------------------------- */

QC_INLINE void cast_to(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                       uint64_t *first_overflow)
{
    uint64_t i = 0;
    *first_overflow = UINT64_MAX;
    for (; i + 16 <= n; i += 16) {
        qc_wide x = widen_quiet(src, from, i);
        store16(x, dst, to, i);
        note_lanes(first_overflow,
                   from == QC_DTYPE_F64 ? doubles_overflow(src, i) : overflows(x, to), i);
    }
    if (i < n) {
        uint64_t overflow;
        qc_quant_ops_scalar.cast((const unsigned char *)src + i * qc_element_bytes(from), from,
                                 n - i, (unsigned char *)dst + i * qc_element_bytes(to), to,
                                 &overflow);
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

/* The scalar code does copies, and the rare F64 to a 16-bit type, which is rounded once. */
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

static void nested_quantize(const float *absmax, uint64_t n, float offset, uint8_t *codes,
                            float *nested_absmax)
{
    const qc_simd_tables *tables = qc_simd_tables_get();
    const qc_wide shift = qc_wide_all(offset);
    for (uint64_t first = 0, k = 0; first < n; first += QC_NESTED_BLOCK, k++) {
        const float *in = absmax + first;
        const uint64_t count = qc_min_u64(n - first, QC_NESTED_BLOCK);
        qc_wide_int most = qc_wide_int_all(0);
        for (unsigned i = 0; count == QC_NESTED_BLOCK && i < QC_NESTED_BLOCK; i += 16)
            most = qc_wide_larger_bits(most, qc_wide_sub(qc_wide_load(in + i), shift));
        const float largest = qc_f32_of_bits(qc_wide_largest_bits(most));
        if (!(largest >= QC_TINY_ABSMAX && largest <= 0x1p125f)) { /* a short group has 0 */
            qc_quant_ops_scalar.nested_quantize(in, count, offset, codes + first,
                                                nested_absmax + k);
            continue;
        }
        nested_absmax[k] = largest;
        const qc_wide inv = qc_wide_all(1.0f / largest);
        for (unsigned i = 0; i < QC_NESTED_BLOCK; i += 16) {
            qc_wide d = qc_wide_sub(qc_wide_load(in + i), shift);
            store_nested_codes(qc_wide_mul(d, inv), tables, codes + first + i);
        }
    }
}

static void nested_dequantize(const uint8_t *codes, const float *nested_absmax, const float *map,
                              uint64_t n, uint32_t nested_block, float offset, float *absmax)
{
    const qc_wide shift = qc_wide_all(offset);
    for (uint64_t first = 0, k = 0; first < n; first += nested_block, k++) {
        const uint64_t end = n - first < nested_block ? n : first + nested_block;
        const qc_wide scale = qc_wide_all(nested_absmax[k]);
        uint64_t i = first;
        for (; i + 16 <= end; i += 16)
            qc_wide_store(absmax + i,
                          qc_wide_add(qc_wide_mul(look_up(map, codes + i), scale), shift));
        for (; i < end; i++)
            absmax[i] = map[codes[i]] * nested_absmax[k] + offset;
    }
}

#define TABLE(which)                                                                               \
    {                                                                                              \
        .isa = (which), .nf4_quantize = qc_avx2_nf4_quantize, .nf4_dequantize = nf4_dequantize,    \
        .nested_quantize = nested_quantize, .nested_dequantize = nested_dequantize,                \
        .int8_rows_quantize = qc_avx2_int8_rows_quantize,                                          \
        .int8_rows_dequantize = int8_rows_dequantize,                                              \
        .int8_blocks_quantize = qc_avx2_int8_blocks_quantize,                                      \
        .int8_blocks_dequantize = int8_blocks_dequantize, .int_quantize = qc_avx2_int_quantize,    \
        .int_dequantize = int_dequantize, .cast = cast                                             \
    }

const qc_quant_ops qc_quant_ops_avx2 = TABLE(QC_ISA_AVX2);
const qc_quant_ops qc_quant_ops_avx512 = TABLE(QC_ISA_AVX512);

/* The AVX-512 table. The quantizers are in quant_avx512_blocks.c and quant_rows_body.h, the loops
 * that are bound by memory in quant_table_body.h; their operations on vectors are here.
 *
 * NF4 to 16-bit types: 32 weights are one 16-bit permute of the 16 values.
 *
 * nested_quantize: one gather from qc_simd_tables.nested per 16 values; see there. It takes about
 * 30 cycles, bound by the gather's 16 loads; two gathers (codes, thresholds) took half as much
 * again. */
#include "quant/quant_half.h"
#include "quant/quant_simd.h"
#include "quant/quant_simd_tables.h"
#include "quant/quant_wide.h"

/* ---- narrowing ------------------------------------------------------------------------------- */

/* Returns the lanes that are finite but become infinite in dtype. */
QC_INLINE __mmask16 overflows(__m512 x, qc_dtype dtype)
{
    if (dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        return 0;
    const uint32_t from = dtype == QC_DTYPE_F16 ? 0x477ff000u : 0x7f7f8000u;
    __m512i above = _mm512_sub_epi32(qc_magnitude_f32(x), _mm512_set1_epi32((int)from));
    return _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32((int)(QC_F32_INF - from)));
}

/* Returns 16 words of F16 or BF16. */
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

/* ---- NF4 ------------------------------------------------------------------------------------- */

/* Turns whole multiples of 32 elements of one block into F16 or BF16. low_first: the first code of
 * a byte is in the low nibble. */
QC_INLINE void nf4_to_half(const uint8_t *codes, uint64_t n, __m256i table, int low_first,
                           unsigned char *dst)
{
    const __m512i twice = _mm512_broadcast_i64x4(table); /* bit 4 of an index does not matter */
    for (uint64_t i = 0; i < n; i += 32) {
        __m512i bytes =
            _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(codes + i / 2)));
        __m512i index = _mm512_or_si512(_mm512_srli_epi32(bytes, low_first ? 0 : 4),
                                        _mm512_slli_epi32(bytes, low_first ? 12 : 16));
        _mm512_storeu_si512(dst + i * 2, _mm512_permutexvar_epi16(index, twice));
    }
}

QC_INLINE void nf4_to_f32(const uint8_t *codes, uint64_t n, __m512 table, int low_first,
                          unsigned char *dst)
{
    for (uint64_t i = 0; i < n; i += 16) {
        __m512i bytes =
            _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i *)(const void *)(codes + i / 2)));
        __m512i index = _mm512_or_si512(_mm512_srli_epi64(bytes, low_first ? 0 : 4),
                                        _mm512_slli_epi64(bytes, low_first ? 28 : 32));
        _mm512_storeu_ps(dst + i * 4, _mm512_permutexvar_ps(index, table));
    }
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

/* Returns the lanes of 16 doubles that are finite and too large for a float. */
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

/* ---- double quantization --------------------------------------------------------------------- */

QC_INLINE void store_nested_codes(qc_wide x, const qc_simd_tables *tables, uint8_t *codes)
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
    _mm_storeu_si128((__m128i *)(void *)codes, _mm512_cvtepi32_epi8(field));
}

QC_INLINE qc_wide look_up(const float *map, const uint8_t *codes)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)codes);
    return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), map, 4);
}

#define QC_QUANT_ISA        QC_ISA_AVX512
#define QC_QUANT_TABLE      qc_quant_ops_avx512
#define QC_QUANT_NAME(call) qc_avx512_##call

/* Row-wise int8 with AVX-512. Per vector: widen 2, product, to integer, narrow 2, back 1, two
 * products, e, two fma, range: 12, that is 6 cycles for 32 bytes of bfloat16, besides 1.5 for the
 * first pass. */
#include "quant/quant_rows_body.h"
#include "quant/quant_rows_int_body.h"
#include "quant/quant_table_body.h"

/* AVX-512 without a processor that has it: included before the *_avx512.c files of quant/, which
 * are then compiled for AVX2. Most instructions are SIMDe's; what the version in Debian 12 has not,
 * or has with a wrong number of arguments, is here. */
#ifndef QC_TESTS_EMULATED_AVX512_H
#define QC_TESTS_EMULATED_AVX512_H

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <string.h>

/* The files ask for it where they share code with those for AVX2. */
#define __AVX512F__ 1

#define EMULATED static inline __attribute__((always_inline))

typedef union {
    __m512i i;
    __m512 f;
    __m512d d;
    __m256i half_i[2];
    __m256 half_f[2];
    __m256d half_d[2];
    int32_t i32[16];
    uint32_t u32[16];
    float f32[16];
    double f64[8];
} emulated;

typedef uint8_t emulated_u8x8 __attribute__((vector_size(8)));
typedef uint64_t emulated_u64x8 __attribute__((vector_size(64)));
typedef uint32_t emulated_u32x16 __attribute__((vector_size(64)));
typedef uint16_t emulated_u16x16 __attribute__((vector_size(32)));
typedef uint8_t emulated_u8x16 __attribute__((vector_size(16)));
typedef int8_t emulated_i8x16 __attribute__((vector_size(16)));
typedef int32_t emulated_i32x16 __attribute__((vector_size(64)));

/* ---- Integers of other widths --------------------------------------------------------------- */

#define CONVERTED(result, to, from, a) (result) __builtin_convertvector((from)(a), to)
#undef _mm256_cvtepi16_epi8
#define _mm256_cvtepi16_epi8(a)  CONVERTED(__m128i, emulated_u8x16, emulated_u16x16, a)
#define _mm512_cvtepi32_epi16(a) CONVERTED(__m256i, emulated_u16x16, emulated_u32x16, a)
#define _mm512_cvtepi32_epi8(a)  CONVERTED(__m128i, emulated_u8x16, emulated_u32x16, a)
#define _mm512_cvtepi8_epi32(a)  CONVERTED(__m512i, emulated_i32x16, emulated_i8x16, a)
#define _mm512_cvtepu16_epi32(a) CONVERTED(__m512i, emulated_u32x16, emulated_u16x16, a)
#define _mm512_cvtepu8_epi32(a)  CONVERTED(__m512i, emulated_u32x16, emulated_u8x16, a)
#define _mm512_cvtepu8_epi64(a)                                                                    \
    CONVERTED(__m512i, emulated_u64x8, emulated_u8x8, _mm_cvtsi128_si64(a))

/* ---- Halves by AVX2 -------------------------------------------------------------------------- */

#define IN_HALVES(name, to, from, instruction)                                                     \
    EMULATED emulated emulated_##name(emulated x)                                                  \
    {                                                                                              \
        return (emulated){                                                                         \
            .half_##to = {instruction(x.half_##from[0]), instruction(x.half_##from[1])}};          \
    }
IN_HALVES(cvtepi32_ps, f, i, _mm256_cvtepi32_ps)
IN_HALVES(cvtps_epi32, i, f, _mm256_cvtps_epi32)
#define _mm512_cvtepi32_ps(a) emulated_cvtepi32_ps((emulated){.i = (a)}).f
#define _mm512_cvtps_epi32(a) emulated_cvtps_epi32((emulated){.f = (a)}).i

EMULATED __m512i emulated_srai_epi32(__m512i a, unsigned by)
{
    const emulated x = {.i = a};
    return (emulated){.half_i = {_mm256_srai_epi32(x.half_i[0], (int)by),
                                 _mm256_srai_epi32(x.half_i[1], (int)by)}}
        .i;
}
#define _mm512_srai_epi32 emulated_srai_epi32

EMULATED __m512d emulated_cvtps_pd(__m256 a)
{
    return (emulated){.half_d = {_mm256_cvtps_pd(_mm256_castps256_ps128(a)),
                                 _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1))}}
        .d;
}
#define _mm512_cvtps_pd emulated_cvtps_pd

EMULATED __m256 emulated_cvtpd_ps(__m512d a)
{
    const emulated x = {.d = a};
    return _mm256_set_m128(_mm256_cvtpd_ps(x.half_d[1]), _mm256_cvtpd_ps(x.half_d[0]));
}
#define _mm512_cvtpd_ps emulated_cvtpd_ps

EMULATED __m512 emulated_cvtph_ps(__m256i a)
{
    return (emulated){.half_f = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)),
                                 _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}}
        .f;
}
#define _mm512_cvtph_ps emulated_cvtph_ps

/* Always to the nearest, as the files ask for. */
EMULATED __m256i emulated_cvtps_ph(__m512 a)
{
    const emulated x = {.f = a};
    return _mm256_set_m128i(_mm256_cvtps_ph(x.half_f[1], _MM_FROUND_TO_NEAREST_INT),
                            _mm256_cvtps_ph(x.half_f[0], _MM_FROUND_TO_NEAREST_INT));
}
#define _mm512_cvtps_ph(a, round)       emulated_cvtps_ph(a)
#define _mm512_extractf32x8_ps(a, half) ((emulated){.f = (a)}.half_f[half])

/* ---- Lane by lane ---------------------------------------------------------------------------- */

EMULATED __m512i emulated_i32gather_epi32(__m512i at, const void *from, int size)
{
    emulated x = {.i = at};
    for (int l = 0; l < 16; l++)
        memcpy(&x.i32[l], (const char *)from + (ptrdiff_t)x.i32[l] * size, sizeof x.i32[l]);
    return x.i;
}
#define _mm512_i32gather_epi32 emulated_i32gather_epi32
#define _mm512_i32gather_ps(at, from, size)                                                        \
    ((emulated){.i = emulated_i32gather_epi32(at, from, size)}.f)

EMULATED __m512 emulated_mask3_fmadd_ps(__m512 a, __m512 b, __m512 c, __mmask16 k)
{
    const emulated x = {.f = a}, y = {.f = b};
    emulated z = {.f = c};
    for (int l = 0; l < 16; l++)
        if (k >> l & 1)
            z.f32[l] = __builtin_fmaf(x.f32[l], y.f32[l], z.f32[l]);
    return z.f;
}
#define _mm512_mask3_fmadd_ps emulated_mask3_fmadd_ps

EMULATED void emulated_mask_storeu_epi32(void *to, __mmask16 k, __m512i a)
{
    const emulated x = {.i = a};
    for (int l = 0; l < 16; l++)
        if (k >> l & 1)
            memcpy((char *)to + 4 * l, &x.i32[l], sizeof x.i32[l]);
}
#define _mm512_mask_storeu_epi32 emulated_mask_storeu_epi32

EMULATED __m512 emulated_maskz_loadu_ps(__mmask16 k, const void *from)
{
    emulated x = {.i32 = {0}};
    for (int l = 0; l < 16; l++)
        if (k >> l & 1)
            memcpy(&x.i32[l], (const char *)from + 4 * l, sizeof x.i32[l]);
    return x.f;
}
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps

EMULATED __m512d emulated_shuffle_pd(__m512d a, __m512d b, int which)
{
    const emulated x = {.d = a}, y = {.d = b};
    emulated z;
    for (int l = 0; l < 8; l++)
        z.f64[l] = (l % 2 ? y : x).f64[l / 2 * 2 + (which >> l & 1)];
    return z.d;
}
#define _mm512_shuffle_pd emulated_shuffle_pd

#define REDUCED(name, type, lanes, from, vector, better)                                           \
    EMULATED type emulated_##name(vector a)                                                        \
    {                                                                                              \
        const emulated x = {.from = a};                                                            \
        type best = x.lanes[0];                                                                    \
        for (int l = 1; l < 16; l++)                                                               \
            best = x.lanes[l] better best ? x.lanes[l] : best;                                     \
        return best;                                                                               \
    }
REDUCED(reduce_max_epu32, uint32_t, u32, i, __m512i, >)
REDUCED(reduce_min_epu32, uint32_t, u32, i, __m512i, <)
REDUCED(reduce_max_ps, float, f32, f, __m512, >)
#define _mm512_reduce_max_epu32 emulated_reduce_max_epu32
#define _mm512_reduce_min_epu32 emulated_reduce_min_epu32
#define _mm512_reduce_max_ps    emulated_reduce_max_ps

/* ---- Masks and arguments -------------------------------------------------------------------- */

#define _mm512_cmplt_epu32_mask(a, b)         ((__mmask16)~_mm512_cmpge_epu32_mask(a, b))
#define _mm512_mask_cmp_ps_mask(k, a, b, how) ((__mmask16)((k)&_mm512_cmp_ps_mask(a, b, how)))
#define _mm512_mask_cmp_pd_mask(k, a, b, how) ((__mmask8)((k)&_mm512_cmp_pd_mask(a, b, how)))
#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)
#undef _mm512_mask_cmpge_epu32_mask
#define _mm512_mask_cmpge_epu32_mask(k, a, b) ((__mmask16)((k)&_mm512_cmpge_epu32_mask(a, b)))

#endif

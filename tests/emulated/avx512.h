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

typedef uint32_t emulated_u32x16 __attribute__((vector_size(64)));
typedef uint16_t emulated_u16x16 __attribute__((vector_size(32)));
typedef uint8_t emulated_u8x16 __attribute__((vector_size(16)));

/* ---- Integers of other widths --------------------------------------------------------------- */

#define CONVERTED(result, to, from, a) (result) __builtin_convertvector((from)(a), to)
#undef _mm256_cvtepi16_epi8
#define _mm256_cvtepi16_epi8(a)  CONVERTED(__m128i, emulated_u8x16, emulated_u16x16, a)
#define _mm512_cvtepi32_epi16(a) CONVERTED(__m256i, emulated_u16x16, emulated_u32x16, a)
#define _mm512_cvtepi32_epi8(a)  CONVERTED(__m128i, emulated_u8x16, emulated_u32x16, a)
#define _mm512_cvtepu16_epi32(a) CONVERTED(__m512i, emulated_u32x16, emulated_u16x16, a)

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

#define _mm512_extractf32x8_ps(a, half) ((emulated){.f = (a)}.half_f[half])

/* ---- Lane by lane ---------------------------------------------------------------------------- */

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

#undef _mm512_madd_epi16
#define _mm512_madd_epi16(a, b) simde_mm512_madd_epi16(a, b)

#endif

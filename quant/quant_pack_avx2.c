/* quant_pack.c with vectors: the same steps on 32 codes at a time. */
#include "quant/quant_avx2.h"
#include "quant/quant_pack.h"

#include <immintrin.h>

/* Returns the order in which the low `bits` bytes of both halves of 16 lie one after the other, or
 * with `back` its inverse. Bytes of -1 become 0. */
static inline __m256i order_of(unsigned bits, int back)
{
    const __m128i i = _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m128i gap = _mm_set1_epi8((char)(8 - bits)), last = _mm_set1_epi8((char)(bits - 1));
    __m128i at, none;
    if (back) {
        at = _mm_sub_epi8(i, _mm_and_si128(_mm_cmpgt_epi8(i, _mm_set1_epi8(7)), gap));
        none = _mm_cmpgt_epi8(_mm_and_si128(i, _mm_set1_epi8(7)), last);
    } else {
        at = _mm_add_epi8(i, _mm_and_si128(_mm_cmpgt_epi8(i, last), gap));
        none = _mm_cmpgt_epi8(i, _mm_set1_epi8((char)(2 * bits - 1)));
    }
    return _mm256_broadcastsi128_si256(_mm_or_si128(at, none));
}

/* Vectors write 16 bytes where there are 2 * bits, so the last ones are left to quant_pack.c. */
static int has_room(unsigned bits, uint64_t codes)
{
    return codes >= 32 && codes * bits / 8 >= 2 * bits + 16;
}

void qc_avx2_codes_pack(unsigned bits, const uint8_t *codes, uint64_t n, void *packed)
{
    const __m256i pairs = _mm256_set1_epi16(0x00ff), half = _mm256_set1_epi64x(0xffffffff);
    const __m256i fours = _mm256_set1_epi32(1 << 2 * bits << 16 | 1);
    const __m128i by = _mm_cvtsi32_si128((int)bits), by4 = _mm_cvtsi32_si128((int)(4 * bits));
    const __m256i order = order_of(bits, 0);
    unsigned char *to = packed;
    for (; has_room(bits, n); n -= 32, codes += 32, to += 4 * bits) {
        __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)codes);
        x = _mm256_or_si256(_mm256_and_si256(x, pairs),
                            _mm256_sll_epi16(_mm256_srli_epi16(x, 8), by));
        x = _mm256_madd_epi16(x, fours);
        x = _mm256_or_si256(_mm256_and_si256(x, half),
                            _mm256_sll_epi64(_mm256_srli_epi64(x, 32), by4));
        x = _mm256_shuffle_epi8(x, order);
        _mm_storeu_si128((__m128i *)(void *)to, _mm256_castsi256_si128(x));
        _mm_storeu_si128((__m128i *)(void *)(to + 2 * bits), _mm256_extracti128_si256(x, 1));
    }
    qc_codes_pack(bits, codes, n, to);
}

void qc_avx2_codes_unpack(unsigned bits, const void *packed, uint64_t n, uint8_t *codes)
{
    const long long four = (1ll << 4 * bits) - 1;
    const __m256i fours = _mm256_set1_epi64x(four),
                  ones = _mm256_set1_epi16((short)((1 << bits) - 1));
    const __m256i twos = _mm256_set1_epi32((1 << 2 * bits) - 1);
    const __m128i by = _mm_cvtsi32_si128((int)bits), by2 = _mm_cvtsi32_si128((int)(2 * bits));
    const __m128i by4 = _mm_cvtsi32_si128((int)(4 * bits));
    const __m256i order = order_of(bits, 1);
    const unsigned char *from = packed;
    for (; has_room(bits, n); n -= 32, codes += 32, from += 4 * bits) {
        const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)from);
        const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(from + 2 * bits));
        __m256i x = _mm256_shuffle_epi8(_mm256_set_m128i(high, low), order);
        x = _mm256_or_si256(
            _mm256_and_si256(x, fours),
            _mm256_slli_epi64(_mm256_and_si256(_mm256_srl_epi64(x, by4), fours), 32));
        x = _mm256_or_si256(
            _mm256_and_si256(x, twos),
            _mm256_slli_epi32(_mm256_and_si256(_mm256_srl_epi32(x, by2), twos), 16));
        x = _mm256_or_si256(_mm256_and_si256(x, ones),
                            _mm256_slli_epi16(_mm256_and_si256(_mm256_srl_epi16(x, by), ones), 8));
        _mm256_storeu_si256((__m256i *)(void *)codes, x);
    }
    qc_codes_unpack(bits, from, n, codes);
}

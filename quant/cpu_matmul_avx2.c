/* The integer products (cpu_matmul_internal.h) with AVX2. A group of 64 codes of 4 bits takes 11
 * vector instructions to decode: 3 for both halves of its bytes, 4 lookups, 4 to join the bytes of
 * the values. Each row of x takes 4 products, 3 sums, and 4 to scale: the scale times that of x, a
 * broadcast, a conversion, a fmaf. With 4 such instructions in a cycle the floor is 6 cycles for
 * one row and 25 for eight.
 *
 * Slower on Zen 3, by 2 to 15% with one and two rows: all scales of a tile made beforehand, and
 * those of all rows of x multiplied at once, stored, and broadcast from memory. Scalar work is in
 * the shadow of the vectors here, and a phase of its own is not. */
#include "quant/cpu_matmul_internal.h"

#include <immintrin.h>

#define INLINE  static inline __attribute__((always_inline))
#define AT_ONCE 1u

typedef struct {
    __m256i v[4];
} group;

INLINE group load_4(const unsigned char *codes, __m256i low, __m256i high)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)(const void *)codes);
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
    const __m256i lower = _mm256_and_si256(bytes, nibble);
    const __m256i ul = _mm256_shuffle_epi8(low, upper), uh = _mm256_shuffle_epi8(high, upper);
    const __m256i ll = _mm256_shuffle_epi8(low, lower), lh = _mm256_shuffle_epi8(high, lower);
    return (group){{_mm256_unpacklo_epi8(ul, uh), _mm256_unpackhi_epi8(ul, uh),
                    _mm256_unpacklo_epi8(ll, lh), _mm256_unpackhi_epi8(ll, lh)}};
}

INLINE group load_8(const unsigned char *codes, __m128i zero)
{
    group g;
    for (unsigned v = 0; v < 4; v++)
        g.v[v] = _mm256_cvtepi8_epi16(
            _mm_sub_epi8(_mm_loadu_si128((const __m128i *)(const void *)(codes + 16 * v)), zero));
    return g;
}

INLINE __m256i product(__m256i values, const int16_t *x)
{
    return _mm256_madd_epi16(values, _mm256_load_si256((const __m256i *)(const void *)x));
}

INLINE __m256 add(__m256 to, __m256i sum, __m256 scale)
{
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), scale, to);
}

/* The sums of row `at` to sums[0]. All but g, at and sums are constants. */
INLINE void rows_of(const qc_gemv *g, uint64_t at, float *const sums[2], unsigned rows, int four,
                    int halves, int nested)
{
    const unsigned bytes = QC_GEMV_GROUP / 8 * g->w->form.ops->bits;
    const unsigned char *codes = (const unsigned char *)g->w->codes + at * g->groups * bytes;
    const uint64_t first = qc_gemv_first_block(g, at);
    const __m128i zero = _mm_set1_epi8((char)g->zero);
    unsigned char room[QC_GEMV_GROUP];
    const __m256i low = _mm256_broadcastsi128_si256(
                      _mm_loadu_si128((const __m128i *)(const void *)g->low)),
                  high = _mm256_broadcastsi128_si256(
                      _mm_loadu_si128((const __m128i *)(const void *)g->high));
    __m256 lanes[QC_GEMV_ROWS];
    for (unsigned m = 0; m < rows; m++)
        lanes[m] = _mm256_setzero_ps();
    for (uint64_t i = 0; i < g->groups; i++, codes += bytes) {
        const group v =
            four ? load_4(codes, low, high) : load_8(qc_gemv_codes(g, codes, room), zero);
        const uint64_t block = halves ? first + 2 * i : first + (i >> g->shift);
        const float a = qc_gemv_scale(g, block, nested);
        const float b = halves ? qc_gemv_scale(g, block + 1, nested) : a;
        _mm_prefetch((const char *)codes + 2048, _MM_HINT_T0);
        for (unsigned m = 0; m < rows; m++) {
            const int16_t *x = g->x + (i * rows + m) * QC_GEMV_GROUP;
            const float xs = g->x_scales[i * rows + m];
            const __m256i one = _mm256_add_epi32(product(v.v[0], x), product(v.v[1], x + 16));
            const __m256i two = _mm256_add_epi32(product(v.v[2], x + 32), product(v.v[3], x + 48));
            if (halves && !four) {
                lanes[m] = add(lanes[m], one, _mm256_set1_ps(a * xs));
                lanes[m] = add(lanes[m], two, _mm256_set1_ps(b * xs));
            } else {
                const __m256 scale = halves
                                         ? _mm256_set_m128(_mm_set1_ps(b * xs), _mm_set1_ps(a * xs))
                                         : _mm256_set1_ps(a * xs);
                lanes[m] = add(lanes[m], _mm256_add_epi32(one, two), scale);
            }
        }
    }
    for (unsigned m = 0; m < rows; m++) {
        /* f0 + f4, f1 + f5, f2 + f6, f3 + f7; then 0 + 2 and 1 + 3. */
        const __m128 four_of =
            _mm_add_ps(_mm256_castps256_ps128(lanes[m]), _mm256_extractf128_ps(lanes[m], 1));
        const __m128 two_of = _mm_add_ps(four_of, _mm_movehl_ps(four_of, four_of));
        sums[0][m] = _mm_cvtss_f32(_mm_add_ss(two_of, _mm_movehdup_ps(two_of)));
    }
}

#include "quant/cpu_matmul_cases.h"

const qc_gemv_ops qc_gemv_ops_avx2 = {QC_ISA_AVX2, rows};

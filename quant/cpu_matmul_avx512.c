/* The integer products (cpu_matmul_internal.h) with AVX-512: two rows of W at a time, one in each
 * half of a vector, so that both take the same x.
 *
 * A group of 64 codes of 4 bits is 16 words of four codes, and the table has words too: it holds
 * the 16 values twice, so that vpermw, which looks at 5 bits of a word, needs no mask. Two groups
 * take two loads, a byte shuffle, three shifts and four lookups, and for each row of x four loads
 * of 32 bytes, four products, of which two add as well, one more sum, and three to scale. */
#include "quant/cpu_matmul_internal.h"

#include <immintrin.h>

#define INLINE  static inline __attribute__((always_inline))
#define UPPER   0xff00 /* lanes of the second row */
#define AT_ONCE 2u

typedef struct {
    __m512i v[4];
} group;

typedef struct {
    __m512i order, values;
    __m256i zero;
} tables;

INLINE __m512i both(__m256i low, __m256i high)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

/* Byte p of 16 and byte 8 + p become a word, whose second and fourth codes are then position p of
 * vectors 0 and 1, and its first and third of vectors 2 and 3. */
INLINE tables tables_of(const qc_gemv *g)
{
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)g->low);
    const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)g->high);
    const __m256i values =
        _mm256_set_m128i(_mm_unpackhi_epi8(low, high), _mm_unpacklo_epi8(low, high));
    return (tables){
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)),
        both(values, values), _mm256_set1_epi8((char)g->zero)};
}

INLINE group load_4(const unsigned char *codes, const unsigned char *next, const tables *t)
{
    const __m512i bytes = both(_mm256_loadu_si256((const __m256i *)(const void *)codes),
                               _mm256_loadu_si256((const __m256i *)(const void *)next));
    const __m512i words = _mm512_shuffle_epi8(bytes, t->order);
    return (group){{_mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), t->values),
                    _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), t->values),
                    _mm512_permutexvar_epi16(words, t->values),
                    _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), t->values)}};
}

INLINE group load_8(const unsigned char *codes, const unsigned char *next, const tables *t)
{
    group g;
    for (unsigned v = 0; v < 4; v++) {
        const __m256i bytes =
            _mm256_set_m128i(_mm_loadu_si128((const __m128i *)(const void *)(next + 16 * v)),
                             _mm_loadu_si128((const __m128i *)(const void *)(codes + 16 * v)));
        g.v[v] = _mm512_cvtepi8_epi16(_mm256_sub_epi8(bytes, t->zero));
    }
    return g;
}

/* The products of vectors v and v + 1, added. */
INLINE __m512i products(const group *g, unsigned v, const int16_t *x)
{
    const __m256i *at = (const __m256i *)(const void *)(x + 16 * v);
    const __m512i one = _mm512_broadcast_i64x4(_mm256_load_si256(at));
    const __m512i two = _mm512_broadcast_i64x4(_mm256_load_si256(at + 1));
    return _mm512_dpwssd_epi32(_mm512_madd_epi16(g->v[v], one), g->v[v + 1], two);
}

INLINE __m512 add(__m512 to, __m512i sum, __m512 scale)
{
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, to);
}

INLINE __m512 pair(const float *first, const float *second)
{
    return _mm512_mask_broadcastss_ps(_mm512_set1_ps(*first), UPPER, _mm_load_ss(second));
}

/* As qc_gemv_scale, of a block of each row. */
INLINE __m512 scales_of(const qc_gemv *g, uint64_t block, uint64_t next, int nested)
{
    const qc_weights *w = g->w;
    if (!nested)
        return pair(w->absmax + block, w->absmax + next);
    const __m512 map =
        pair(w->nested_map + w->absmax_codes[block], w->nested_map + w->absmax_codes[next]);
    const __m512 absmax = pair(w->nested_absmax + (block >> g->nested_shift),
                               w->nested_absmax + (next >> g->nested_shift));
    return _mm512_add_ps(_mm512_mul_ps(map, absmax), _mm512_set1_ps(w->form.offset));
}

/* f0 + f4, f1 + f5, f2 + f6, f3 + f7; then 0 + 2 and 1 + 3. */
INLINE float fold(__m256 f)
{
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(f), _mm256_extractf128_ps(f, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* The sums of row `at` and of the next one, which is the same row where sums are. All but g, at
 * and sums are constants. */
INLINE void rows_of(const qc_gemv *g, uint64_t at, float *const sums[2], unsigned rows, int four,
                    int halves, int nested)
{
    const uint64_t bytes = QC_GEMV_GROUP / 8 * g->w->form.ops->bits;
    const uint64_t second = sums[0] == sums[1] ? at : at + 1, row_bytes = g->groups * bytes;
    const unsigned char *codes = (const unsigned char *)g->w->codes + at * row_bytes;
    const unsigned char *next = (const unsigned char *)g->w->codes + second * row_bytes;
    const uint64_t first = qc_gemv_first_block(g, at), after = qc_gemv_first_block(g, second);
    const tables t = tables_of(g);
    const int16_t *x = g->x;
    const float *xs = g->x_scales;
    unsigned char room[2][QC_GEMV_GROUP];
    __m512 lanes[QC_GEMV_ROWS];
    for (unsigned m = 0; m < rows; m++)
        lanes[m] = _mm512_setzero_ps();
    for (uint64_t i = 0; i < g->groups; i++, codes += bytes, next += bytes, xs += rows) {
        const group v =
            four ? load_4(codes, next, &t)
                 : load_8(qc_gemv_codes(g, codes, room[0]), qc_gemv_codes(g, next, room[1]), &t);
        const uint64_t block = halves ? 2 * i : i >> g->shift;
        const __m512 a = scales_of(g, first + block, after + block, nested);
        const __m512 b = halves ? scales_of(g, first + block + 1, after + block + 1, nested) : a;
        const __m512 of_lanes = halves ? _mm512_mask_blend_ps(0xf0f0, a, b) : a;
        _mm_prefetch((const char *)codes + 2 * row_bytes, _MM_HINT_T0);
        _mm_prefetch((const char *)next + 2 * row_bytes, _MM_HINT_T0);
        for (unsigned m = 0; m < rows; m++, x += QC_GEMV_GROUP) {
            const __m512 scale = _mm512_set1_ps(xs[m]);
            const __m512i one = products(&v, 0, x), two = products(&v, 2, x);
            if (halves && !four) {
                lanes[m] = add(lanes[m], one, _mm512_mul_ps(a, scale));
                lanes[m] = add(lanes[m], two, _mm512_mul_ps(b, scale));
            } else {
                lanes[m] =
                    add(lanes[m], _mm512_add_epi32(one, two), _mm512_mul_ps(of_lanes, scale));
            }
        }
    }
    for (unsigned m = 0; m < rows; m++) {
        sums[0][m] = fold(_mm512_castps512_ps256(lanes[m]));
        sums[1][m] = fold(_mm512_extractf32x8_ps(lanes[m], 1));
    }
}

#include "quant/cpu_matmul_cases.h"

const qc_gemv_ops qc_gemv_ops_avx512 = {QC_ISA_AVX512, rows};

/* Block-wise NF4 and int8 with AVX-512.
 *
 * The picture. A vector of 32 bf16 is taken as 16 lanes of 32 bits; the even elements are widened
 * by a shift, the odd ones by clearing the lower half, so that the codes of a pair meet in one lane
 * and lane l holds elements 2l and 2l + 1: the 16 lanes of the error sums. Blocks go in groups of
 * sixteen, so that everything that is one number per block (absmax, division, test for what is not
 * finite, sums, bfloat16 errors) is one vector per group; see quant_avx512_internal.h for the fold.
 *
 *     pass 1   the largest magnitude
 *     pass 2   fields of codes in 16-bit integers, see quant_simd_tables.h
 *     pass 3   pack the codes; y, c, r and the sums
 *
 * For bf16 to NF4 in blocks of 64, the common case, several groups are under way at once
 * (hot_step); otherwise groups go one after another. A group with an absmax that is not finite,
 * subnormal or near the ends of the range goes to the scalar code, block by block; the sums come
 * out the same, because they are added block after block. F16 and F64 are widened to floats in pass
 * 1 and then treated as F32, whose codes are found with a bucket of 1/15 and one exact comparison.
 *
 * Vector operations for 64 bf16 weights. Ports 0 and 5 take one of 512 bits each per cycle; loads
 * and stores go elsewhere, but only one line can be stored per cycle.
 *
 *     pass 1   2 and, max, 2 fold                                              5
 *     pass 2   2 x (max, subs, mulhi, permute, add)                           10
 *     pass 3   blend, byte permute, multiply-add, byte permute                 4
 *     sums     4 x (widen, y, permute, r, 3 fma, range), 7.5 fold, 5 once     44
 *
 * That is 9.5 cycles without sums and 31 with them. Measured from L2 it is 15 and 37 to 40, where
 * reading 128 bytes from DRAM takes 23 (16.7 GB/s at 3 GHz). Without sums DRAM is the bound; with
 * sums ports 0 and 5 are. Leaving out the fold and the adding up of sums saves 7 cycles; pass 2
 * takes 9, pass 1 takes 4, packing takes 3.
 *
 * Reloading at odd addresses replaces shifts: fields lie in the upper byte of each word, so lanes
 * read one byte further have the even field in their lowest bits, three bytes further the odd one.
 *
 * What was tried and was slower, or was found out (cycles per 64 weights, from L2):
 *
 *   - four 32-bit table permutes per 32 weights as in a float search: about 20 operations more
 *   - sign to mask register, then negate: 9.3 cycles for pass 2 instead of 7, as port 0 was full
 *   - the three passes one group after another, sums folded at once: 51; stores of quarters
 *     instead of halves: no better, twice the stores
 *   - sums of a group in one piece between the loops: 46 instead of 39, because its chains of
 *     latency fill the reorder buffer
 *   - no prefetch of the codes' lines for writing: 21 without sums instead of 15; a store that
 *     misses L1 holds up all behind it
 *   - a call in the group loop (qc_dtype_bits): every vector constant is loaded again, a tenth
 *     slower
 *   - prefetch of the source into L1 instead of L2: a tenth slower from DRAM; none: a third
 *   - unrolling by four, other orders of the passes, loading the source once instead of twice in
 *     pass 3, group descriptions recomputed from a counter: nothing or a little worse */
#include "quant/quant_avx512_internal.h"
#include "quant/quant_simd.h"
#include "quant/quant_simd_tables.h"

#include <string.h>

/* Elements of a group: 16 blocks, but no more than the largest block holds. */
#define GROUP_ELEMS 4096u
#define SLOTS       3u /* groups under way */

/* A group of 16 blocks of 64 bf16 writes streams of 2 KiB each, as far apart from the source modulo
 * 4 KiB as can be. A load whose address equals that of an older store in flight modulo 4 KiB waits
 * for it, so every stream runs in step with the source, some way behind it. */
#define STREAM       2048u
#define WORDS_BEHIND 512u /* magnitudes and codes; one per slot */
#define ROWS_BEHIND  768u /* rows: sums A and B, maxima; of even and odd groups */
#define ROWS_AT      (2 * STREAM + STREAM + WORDS_BEHIND - ROWS_BEHIND)
#define STREAMS      (ROWS_AT + 6 * STREAM)

enum { RR = 0, RC = QC_FOLD_SECOND, CC = QC_FOLD_LANES, PEAK = QC_FOLD_LANES + QC_FOLD_SECOND };

typedef struct {
    _Alignas(64) unsigned char room[STREAMS + STREAM];
    unsigned char *streams;                          /* in room */
    _Alignas(64) float widened[2][GROUP_ELEMS + 64]; /* F16, F64: elements; bf16: as in streams */
    _Alignas(64) float inv[SLOTS][QC_GROUP];
    _Alignas(64) uint32_t base[SLOTS][QC_GROUP];     /* bf16: base twice */
    _Alignas(64) uint32_t mantissa[SLOTS][QC_GROUP]; /* bf16: which table */
    _Alignas(64) float folded[3][QC_GROUP];          /* rr, rc, cc of each block */
    _Alignas(64) double pairs[2][2 * QC_GROUP];      /* ee and xx of each block */
} group_scratch;

typedef __m512i group_lanes;
typedef qc_simd_tables search_tables;
#define QC_BLOCKS_TABLES     qc_simd_tables_get
#define QC_BLOCKS_NAME(call) qc_avx512_##call
#include "quant/quant_blocks_body.h"

/* Streams run in step with the source. */
QC_INLINE void open_scratch(group_scratch *s, const void *src)
{
    s->streams = s->room + ((uintptr_t)src - WORDS_BEHIND - (uintptr_t)s->room) % STREAM / 64 * 64;
}

QC_INLINE unsigned slot_of(const group *g)
{
    return g->turn % SLOTS;
}

QC_INLINE unsigned char *hot_words(const group_scratch *s, const group *g)
{
    return s->streams + g->turn % 2 * STREAM;
}

QC_INLINE uint32_t *sum_rows(const group_scratch *s, const group *g)
{
    return (uint32_t *)(void *)(s->streams + ROWS_AT + g->turn % 2 * 2 * STREAM);
}

QC_INLINE uint32_t *max_rows(const group_scratch *s, const group *g)
{
    return (uint32_t *)(void *)(s->streams + ROWS_AT + (4 + g->turn % 2) * STREAM);
}

/* ---- pass 1 ---------------------------------------------------------------------------------- */

QC_INLINE void pass1_bf16(const group *g, group_scratch *s, uint32_t vectors)
{
    const __m512i no_sign = _mm512_set1_epi16(0x7fff);
    const unsigned char *in = g->src;
    for (unsigned b = 0; b < g->count; b++) {
        __m512i most = _mm512_setzero_si512();
        for (uint32_t v = 0; v < vectors; v++, in += 64)
            most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(in), no_sign));
        qc_fold_store(max_rows(s, g), b, most);
    }
}

QC_INLINE void pass1_float(const group *g, group_scratch *s, qc_dtype dtype, uint32_t vectors)
{
    float *out = s->widened[g->turn % 2];
    uint64_t i = 0;
    for (unsigned b = 0; b < g->count; b++) {
        __m512i most = _mm512_setzero_si512();
        for (uint32_t v = 0; v < 2 * vectors; v++, i += 16) {
            __m512 x = qc_load16(g->src, dtype, i);
            qc_prefetch(g->src + i * qc_element_bytes(dtype));
            if (dtype != QC_DTYPE_F32)
                _mm512_store_ps(out + i, x);
            most = _mm512_max_epu32(most, qc_magnitude_f32(x));
        }
        qc_fold_store(max_rows(s, g), b, most);
    }
}

QC_INLINE void pass1(const group *g, group_scratch *s, qc_dtype dtype, uint32_t vectors)
{
    if (dtype == QC_DTYPE_BF16)
        pass1_bf16(g, s, vectors);
    else
        pass1_float(g, s, dtype, vectors);
}

/* Returns the bits of the group's absmax, as floats. */
QC_INLINE __m512i fold_absmax(const uint32_t *rows, qc_dtype dtype)
{
    if (dtype != QC_DTYPE_BF16)
        return qc_fold16x16(QC_FOLD_MAX_U32, rows);
    __m512i words = qc_fold16x16(QC_FOLD_MAX_U16, rows);
    __m512i most = _mm512_max_epu16(words, _mm512_slli_epi32(words, 16));
    return _mm512_and_si512(most, _mm512_set1_epi32(-65536));
}

/* Returns the lanes whose block the vector code must not touch. */
QC_INLINE __mmask16 odd_blocks(__m512i absmax)
{
    const uint32_t lowest = (127u - 100u) << 23, beyond = (127u + 125u) << 23;
    __m512i above = _mm512_sub_epi32(absmax, _mm512_set1_epi32((int)lowest));
    return _mm512_mask_cmpge_epu32_mask(_mm512_test_epi32_mask(absmax, absmax), above,
                                        _mm512_set1_epi32((int)(beyond - lowest)));
}

/* Finds for each block the inverse of absmax (0 for a block of zeros), and for bf16 where to look
 * codes up. */
QC_INLINE void prepare(const group *g, group_scratch *s)
{
    __m512 a = _mm512_castsi512_ps(g->absmax);
    __m512 inv =
        _mm512_maskz_div_ps(_mm512_test_epi32_mask(g->absmax, g->absmax), _mm512_set1_ps(1.0f), a);
    _mm512_store_ps(s->inv[slot_of(g)], inv);
    __m512i pattern = _mm512_srli_epi32(g->absmax, 16);
    __m512i twice = _mm512_or_si512(pattern, g->absmax);
    _mm512_store_si512(s->base[slot_of(g)],
                       _mm512_subs_epu16(twice, _mm512_set1_epi16(QC_NF4_DOWN)));
    _mm512_store_si512(s->mantissa[slot_of(g)], _mm512_and_si512(pattern, _mm512_set1_epi32(127)));
}

/* ---- pass 2: NF4 codes of bf16 --------------------------------------------------------------- */

/* Makes words whose upper bytes are fields, see quant_simd_tables.h. */
QC_INLINE void nf4_fields_of_block(const context *c, const group *g, unsigned b, uint32_t vectors,
                                   unsigned char *words)
{
    const __m512i scale = _mm512_set1_epi16(QC_NF4_SCALE);
    const group_scratch *s = c->scratch;
    const unsigned char *in = g->src + (uint64_t)b * vectors * 64;
    __m512i base = _mm512_set1_epi32((int)s->base[slot_of(g)][b]);
    __m512i table = _mm512_load_si512(c->tables->nf4_bf16[s->mantissa[slot_of(g)][b]]);
    for (uint32_t v = 0; v < vectors; v++, in += 64, words += 64) {
        __m512i place = _mm512_max_epu16(_mm512_loadu_si512(in), base);
        place = _mm512_subs_epi16(place, base);
        __m512i bucket = _mm512_mulhi_epi16(place, scale);
        __m512i entry = _mm512_permutexvar_epi16(bucket, table);
        _mm512_store_si512(words, _mm512_add_epi16(place, entry));
    }
}

typedef struct {
    __m512 low, high; /* value of a field */
    __m512i code;     /* of a field */
} field_tables;

QC_INLINE field_tables load_fields(const qc_simd_tables *t)
{
    return (field_tables){_mm512_load_ps(t->nf4_value), _mm512_load_ps(t->nf4_value + 16),
                          _mm512_load_si512(t->nf4_code)};
}

/* Takes 64 codes from the upper bytes of 64 words: 32 bytes of NF4. */
QC_INLINE __m256i nf4_pack_words(const unsigned char *words, __m512i code_of_field)
{
    const __m512i order =
        _mm512_set_epi8(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                        0, 0, 0, 0, 0, 0, 0, 60, 56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8,
                        4, 0, 61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1);
    /* per lane, from the top: first odd, second odd, first even, second even code, in bytes */
    __m512i bytes =
        _mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0xff00), _mm512_load_si512(words),
                                  _mm512_loadu_si512(words + 65), 0xca);
    bytes = _mm512_permutexvar_epi8(bytes, code_of_field);
    __m512i packed = _mm512_madd_epi16(bytes, _mm512_set1_epi32(1 << 16 | 16));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi8(order, packed));
}

QC_INLINE void store_half(unsigned char *out, __m256i bytes, int whole)
{
    if (whole)
        _mm256_storeu_si256((__m256i *)(void *)out, bytes);
    else
        _mm_storeu_si128((__m128i *)(void *)out, _mm256_castsi256_si128(bytes));
}

/* ---- pass 3: values of codes, errors, and codes of floats ------------------------------------ */

typedef struct {
    __m512 rr, rc, cc, peak;
} block_sums;

QC_INLINE void add_errors(block_sums *t, __m512 y, __m512 c)
{
    __m512 r = _mm512_sub_ps(y, c);
    t->rr = _mm512_fmadd_ps(r, r, t->rr);
    t->rc = _mm512_fmadd_ps(r, c, t->rc);
    t->cc = _mm512_fmadd_ps(c, c, t->cc);
    t->peak = _mm512_range_ps(t->peak, r, 0x0b); /* larger magnitude, sign cleared */
}

QC_INLINE void store_sums(uint32_t *rows, unsigned block, const block_sums *t)
{
    qc_fold_store(rows + RR, block, _mm512_castps_si512(t->rr));
    qc_fold_store(rows + RC, block, _mm512_castps_si512(t->rc));
    qc_fold_store(rows + CC, block, _mm512_castps_si512(t->cc));
    qc_fold_store(rows + PEAK, block, _mm512_castps_si512(t->peak));
}

typedef struct {
    __m512 threshold_low, threshold_high;
    __m512i base_low, base_high;
} nf4_float_tables;

QC_INLINE __m512i nf4_codes_float(__m512 y, const nf4_float_tables *t)
{
    const __m512 magic = _mm512_set1_ps(0x1.8p23f); /* its lowest bits are an integer */
    __m512i bucket = _mm512_castps_si512(_mm512_fmadd_ps(y, _mm512_set1_ps(QC_NF4_BUCKETS), magic));
    __m512 threshold = _mm512_permutex2var_ps(t->threshold_low, bucket, t->threshold_high);
    __m512i base = _mm512_permutex2var_epi32(t->base_low, bucket, t->base_high);
    __mmask16 above = _mm512_cmp_ps_mask(y, threshold, _CMP_GT_OQ);
    return _mm512_mask_add_epi32(base, above, base, _mm512_set1_epi32(1));
}

/* int8: the sum's lowest byte is the code; its value is the sum less the constant. */
QC_INLINE __m512 int8_codes(__m512 x, __m512 scale)
{
    return _mm512_add_ps(_mm512_mul_ps(x, scale), _mm512_set1_ps(0x1.8p23f));
}

QC_INLINE __m512 int8_values(__m512 codes)
{
    return _mm512_mul_ps(_mm512_sub_ps(codes, _mm512_set1_ps(0x1.8p23f)),
                         _mm512_set1_ps(QC_INT8_STEP));
}

QC_INLINE void pass3_block(const context *c, const group *g, unsigned b, scheme to, qc_dtype dtype,
                           uint32_t vectors, int errors)
{
    group_scratch *s = c->scratch;
    const field_tables fields = load_fields(c->tables);
    const nf4_float_tables tables = {
        _mm512_load_ps(c->tables->nf4_threshold),
        _mm512_load_ps(c->tables->nf4_threshold + 16),
        _mm512_load_si512(c->tables->nf4_base),
        _mm512_load_si512(c->tables->nf4_base + 16),
    };
    const unsigned element = dtype == QC_DTYPE_BF16 ? 2 : 4;
    const uint64_t first = (uint64_t)b * vectors * 32;
    const unsigned char *scratch = (const unsigned char *)s->widened[g->turn % 2];
    const unsigned char *words = scratch + first * 2;
    const unsigned char *in = dtype == QC_DTYPE_BF16 || dtype == QC_DTYPE_F32 ? g->src : scratch;
    in += first * element;
    unsigned char *codes = c->codes + (g->block * vectors * 32 + first) / (to == NF4 ? 2 : 1);
    const __m512 inv = _mm512_set1_ps(s->inv[slot_of(g)][b]);
    const __m512 scale = _mm512_mul_ps(inv, _mm512_set1_ps(127.0f));
    const __m512 zero = _mm512_setzero_ps();
    block_sums t = {zero, zero, zero, zero};
    for (uint32_t v = 0; v < vectors; v++, in += 32 * element, words += 64) {
        qc_pair x = dtype == QC_DTYPE_BF16 ? qc_split_bf16(in) : qc_split_f32(in);
        __m512 y_even = _mm512_mul_ps(x.even, inv), y_odd = _mm512_mul_ps(x.odd, inv);
        __m512 c_even, c_odd;
        if (to == INT8) {
            __m512 q_even = int8_codes(x.even, scale), q_odd = int8_codes(x.odd, scale);
            __m512i q =
                _mm512_ternarylogic_epi32(_mm512_set1_epi16(0xff), _mm512_castps_si512(q_even),
                                          _mm512_slli_epi32(_mm512_castps_si512(q_odd), 8), 0xca);
            _mm256_storeu_si256((__m256i *)(void *)codes, _mm512_cvtepi32_epi16(q));
            codes += 32;
            c_even = int8_values(q_even);
            c_odd = int8_values(q_odd);
        } else {
            __m512i q_even, q_odd;
            if (dtype == QC_DTYPE_BF16) {
                q_even = _mm512_loadu_si512(words + 1);
                q_odd = _mm512_loadu_si512(words + 3);
            } else {
                q_even = nf4_codes_float(y_even, &tables);
                q_odd = nf4_codes_float(y_odd, &tables);
                __m512i q = _mm512_or_si512(_mm512_slli_epi32(q_even, 4), q_odd);
                _mm_storeu_si128((__m128i *)(void *)codes, _mm512_cvtepi32_epi8(q));
                codes += 16;
            }
            c_even = _mm512_permutex2var_ps(fields.low, q_even, fields.high);
            c_odd = _mm512_permutex2var_ps(fields.low, q_odd, fields.high);
        }
        if (errors) {
            add_errors(&t, y_even, c_even);
            add_errors(&t, y_odd, c_odd);
        }
    }
    if (errors)
        store_sums(sum_rows(s, g), b, &t);
}

QC_INLINE void pass3(const context *c, const group *g, scheme to, qc_dtype dtype, uint32_t vectors,
                     int errors)
{
    if (to == NF4 && dtype == QC_DTYPE_BF16) {
        const __m512i code_of_field = _mm512_load_si512(c->tables->nf4_code);
        unsigned char *words = (unsigned char *)c->scratch->widened[g->turn % 2];
        unsigned char *codes = c->codes + g->block * vectors * 16;
        uint32_t left = g->count * vectors;
        _mm512_store_si512(words + (uint64_t)left * 64,
                           _mm512_setzero_si512()); /* if left is odd */
        for (; left > 0; left -= left > 1 ? 2 : 1, words += 128, codes += 32)
            store_half(codes, nf4_pack_words(words, code_of_field), left > 1);
        if (!errors)
            return;
    }
    for (unsigned b = 0; b < g->count; b++)
        pass3_block(c, g, b, to, dtype, vectors, errors);
}

/* ---- a group's sums -------------------------------------------------------------------------- */

QC_INLINE __m512d half_to_double(__m512i v, int upper)
{
    __m512 f = _mm512_castsi512_ps(v);
    return _mm512_cvtps_pd(upper ? _mm512_extractf32x8_ps(f, 1) : _mm512_castps512_ps256(f));
}

/* rc and cc are the words of one lane, in the order in which they are stored. */
QC_INLINE void write_block_errors(qc_block_error *out, unsigned count, __m512i rc, __m512i cc,
                                  __m512i peak)
{
    _Static_assert(sizeof(qc_block_error) == 6, "three words");
    const __m512i first =
        _mm512_set_epi16(21, 20, 51, 19, 18, 49, 17, 16, 47, 15, 14, 45, 13, 12, 43, 11, 10, 41, 9,
                         8, 39, 7, 6, 37, 5, 4, 35, 3, 2, 33, 1, 0);
    const __m512i second = _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 63, 31,
                                            30, 61, 29, 28, 59, 27, 26, 57, 25, 24, 55, 23, 22, 53);
    const __m512i upper = _mm512_set1_epi32(-65536);
    __m512i sums = _mm512_ternarylogic_epi32(
        upper, qc_round_bf16(_mm512_castsi512_ps(cc)),
        _mm512_srli_epi32(qc_round_bf16(_mm512_castsi512_ps(rc)), 16), 0xca);
    peak = _mm512_add_epi32(peak, _mm512_set1_epi32(0xffff));
    unsigned char bytes[96];
    unsigned char *at = count == QC_GROUP ? (unsigned char *)out : bytes;
    _mm512_storeu_si512(at, _mm512_permutex2var_epi16(sums, first, peak));
    _mm256_storeu_si256((__m256i *)(void *)(at + 64),
                        _mm512_castsi512_si256(_mm512_permutex2var_epi16(sums, second, peak)));
    if (at == bytes)
        memcpy(out, bytes, count * sizeof *out);
}

/* The sums of a group are made in three steps, because the rows of every quantity are a chain of
 * their own. */
enum { FOLD_FIRST, FOLD_SECOND, MULTIPLY, STEPS };

QC_INLINE void sum_step(const context *c, const group *g, int step)
{
    group_scratch *s = c->scratch;
    const uint32_t *rows = sum_rows(s, g);
    if (step == FOLD_FIRST) {
        _mm512_store_si512(s->folded[0], qc_fold16x16(QC_FOLD_ADD, rows + RR));
        _mm512_store_si512(s->folded[1], qc_fold16x16(QC_FOLD_ADD, rows + RC));
    } else if (step == FOLD_SECOND) {
        __m512i cc = qc_fold16x16(QC_FOLD_ADD, rows + CC);
        _mm512_store_si512(s->folded[2], cc);
        write_block_errors(c->block_errors + g->block, g->count, _mm512_load_si512(s->folded[1]),
                           cc, qc_fold16x16(QC_FOLD_MAX_F32, rows + PEAK));
    } else {
        double *pairs = s->pairs[g->turn % 2];
        for (int upper = 0; upper < 2; upper++) {
            __m512d a = half_to_double(g->absmax, upper);
            __m512d r = half_to_double(_mm512_load_si512(s->folded[0]), upper);
            __m512d rc = half_to_double(_mm512_load_si512(s->folded[1]), upper);
            __m512d cc = half_to_double(_mm512_load_si512(s->folded[2]), upper);
            __m512d a2 = _mm512_mul_pd(a, a), ee = _mm512_mul_pd(r, a2);
            /* 2 * rc is exact, so that fusing it changes nothing */
            __m512d xx = _mm512_fmadd_pd(_mm512_set1_pd(2.0), rc, r);
            xx = _mm512_mul_pd(_mm512_add_pd(xx, cc), a2);
            _mm512_store_pd(pairs + upper * 16, _mm512_unpacklo_pd(ee, xx));
            _mm512_store_pd(pairs + upper * 16 + 8, _mm512_unpackhi_pd(ee, xx));
        }
    }
}

/* (sum_ee, sum_xx) of block b. In memory: 0, 2, 4, 6, then 1, 3, 5, 7, then the upper eight. */
QC_INLINE __m128d block_pair(const group_scratch *s, const group *g, unsigned b)
{
    return _mm_load_pd(s->pairs[g->turn % 2] + (b & 8u) * 2 + (b & 1u) * 8 + (b & 6u));
}

QC_INLINE __m128d sums_load(const context *c)
{
    return _mm_set_pd(c->sums->sum_xx, c->sums->sum_ee);
}

QC_INLINE void sums_store(const context *c, __m128d total)
{
    c->sums->sum_ee = _mm_cvtsd_f64(total);
    c->sums->sum_xx = _mm_cvtsd_f64(_mm_unpackhi_pd(total, total));
}

static void add_pairs(const context *c, const group *g)
{
    __m128d total = sums_load(c);
    for (unsigned b = 0; b < g->count; b++)
        total = _mm_add_pd(total, block_pair(c->scratch, g, b));
    sums_store(c, total);
}

static void add_group(const context *c, const group *g)
{
    for (int step = 0; step < STEPS; step++)
        sum_step(c, g, step);
    add_pairs(c, g);
}

/* ---- bf16 to NF4, blocks of 64: three groups under way --------------------------------------- */

#define HOT_BLOCK 64u
#define HOT_BYTES 128u

/* Pass 3 of block b: pack its codes; its error sums. */
QC_INLINE void hot_pass3(const context *c, const group *g, unsigned b, const field_tables *f,
                         int errors)
{
    group_scratch *s = c->scratch;
    const unsigned char *in = g->src + b * HOT_BYTES;
    const unsigned char *words = hot_words(s, g) + b * HOT_BYTES;
    store_half(c->codes + (g->block + b) * (HOT_BLOCK / 2), nf4_pack_words(words, f->code), 1);
    if (!errors)
        return;
    const __m512 inv = _mm512_set1_ps(s->inv[slot_of(g)][b]), zero = _mm512_setzero_ps();
    block_sums t = {zero, zero, zero, zero};
    for (unsigned v = 0; v < 2; v++, in += 64, words += 64) {
        qc_pair x = qc_split_bf16(in);
        add_errors(&t, _mm512_mul_ps(x.even, inv),
                   _mm512_permutex2var_ps(f->low, _mm512_loadu_si512(words + 1), f->high));
        add_errors(&t, _mm512_mul_ps(x.odd, inv),
                   _mm512_permutex2var_ps(f->low, _mm512_loadu_si512(words + 3), f->high));
    }
    store_sums(sum_rows(s, g), b, &t);
}

QC_INLINE void hot_pass1(const context *c, const group *g, unsigned b)
{
    const __m512i no_sign = _mm512_set1_epi16(0x7fff);
    const unsigned char *in = g->src + b * HOT_BYTES;
    qc_prefetch(in);
    qc_prefetch(in + 64);
    if (b % 2 == 0)
        __builtin_prefetch(c->codes + (g->block + b) * (HOT_BLOCK / 2), 1, 3);
    __m512i first = _mm512_and_si512(_mm512_loadu_si512(in), no_sign);
    __m512i second = _mm512_and_si512(_mm512_loadu_si512(in + 64), no_sign);
    qc_fold_store(max_rows(c->scratch, g), b, _mm512_max_epu16(first, second));
}

/* Finds the absmax of a group after pass 1, and what the other passes need of it; returns 0 for an
 * odd group. */
QC_INLINE int hot_settle(const context *c, group *g, float *absmax)
{
    group_scratch *s = c->scratch;
    g->absmax = fold_absmax(max_rows(s, g), QC_DTYPE_BF16);
    if (odd_blocks(g->absmax))
        return 0;
    _mm512_storeu_si512(absmax + g->block, g->absmax);
    prepare(g, s);
    return 1;
}

/* Neighbouring groups, each a step further than the one after it. A group with count 0 is not
 * there, or not there yet. */
typedef struct {
    group added;  /* its sums are multiplied: add them up */
    group summed; /* after pass 3: fold its sums */
    group before; /* pass 3 */
    group now;    /* pass 2 */
    group next;   /* after pass 1: settle it */
    group after;  /* pass 1 */
} window;

/* Makes one step of all; returns whether `next` is there and not odd. Work for different ports goes
 * side by side, and work that is done once per group is spread over its blocks: in one place, its
 * chains of latency would fill the reorder buffer (12 cycles per block). full: all are there. */
QC_INLINE int hot_step(const context *c, window *w, float *absmax, int errors, int full)
{
    const field_tables f = load_fields(c->tables);
    const int adds = errors && (full || w->added.count > 0);
    const int sums = errors && (full || w->summed.count > 0);
    const int third = full || w->before.count > 0;
    const int second = full || w->now.count > 0;
    const int first = full || w->after.count > 0;
    int usable = 0;
    __m128d total = sums_load(c);
    for (int part = 0; part < 4; part++) {
        if (part == 3 && (full || w->next.count > 0))
            usable = hot_settle(c, &w->next, absmax);
        else if (part < 3 && sums)
            sum_step(c, &w->summed, part);
        for (unsigned b = (unsigned)part * 4; b < (unsigned)part * 4 + 4; b++) {
            if (adds)
                total = _mm_add_pd(total, block_pair(c->scratch, &w->added, b));
            if (third)
                hot_pass3(c, &w->before, b, &f, errors);
            if (second)
                nf4_fields_of_block(c, &w->now, b, HOT_BLOCK / 32,
                                    hot_words(c->scratch, &w->now) + b * HOT_BYTES);
            if (first)
                hot_pass1(c, &w->after, b);
        }
    }
    if (adds)
        sums_store(c, total);
    return usable;
}

/* Takes whole groups from block `first` on, up to one with an odd block; returns where it
 * stopped. */
QC_INLINE uint64_t hot_groups(const context *c, const unsigned char *src, uint64_t first,
                              uint64_t blocks, float *absmax, int errors)
{
    const uint64_t end = first + (blocks - first) / QC_GROUP * QC_GROUP;
    const group none = {.count = 0};
    window w = {none, none, none, none, none, none};
    w.after = make_group(src, QC_DTYPE_BF16, HOT_BLOCK, first, end, 0);
    for (;;) {
        int full = w.added.count > 0 && w.after.count > 0;
        int usable = full ? hot_step(c, &w, absmax, errors, 1) : hot_step(c, &w, absmax, errors, 0);
        int stop = w.next.count > 0 && !usable; /* an odd group */
        w.added = w.summed;
        w.summed = w.before;
        w.before = w.now;
        w.now = w.next;
        w.next = w.after;
        w.after = make_group(src, QC_DTYPE_BF16, HOT_BLOCK, w.next.block + w.next.count, end,
                             w.next.turn + 1);
        if (stop)
            break;
        if (w.next.count == 0 && w.now.count == 0)
            break;
    }
    /* the groups before an odd one, or the last ones */
    const uint64_t reached = w.now.count > 0 ? w.now.block : end;
    w.now = w.next = w.after = none;
    while (w.before.count > 0 || w.summed.count > 0 || w.added.count > 0) {
        (void)hot_step(c, &w, absmax, errors, 0);
        w.added = w.summed;
        w.summed = w.before;
        w.before = none;
    }
    return reached;
}

/* ---- driver ---------------------------------------------------------------------------------- */

/* Works from block `first` on. vectors: how many vectors of 32 elements a block has. */
QC_INLINE void quantize(const context *c, scheme to, const void *src, qc_dtype dtype, uint64_t n,
                        uint32_t vectors, uint64_t first, float *absmax, int errors)
{
    const uint32_t block_elems = vectors * 32;
    const uint64_t blocks = n / block_elems;
    group_scratch *s = c->scratch;
    if (blocks - first < QC_GROUP || block_elems > GROUP_ELEMS / QC_GROUP)
        memset(s->streams + ROWS_AT, 0, 6 * STREAM); /* rows of blocks that a group lacks */
    group now = make_group(src, dtype, block_elems, first, blocks, 0), before = {.count = 0};
    pass1(&now, s, dtype, vectors);
    while (now.count > 0) {
        now.absmax = fold_absmax(max_rows(s, &now), dtype);
        group next =
            make_group(src, dtype, block_elems, now.block + now.count, blocks, now.turn + 1);
        pass1(&next, s, dtype, vectors);
        if (errors && before.count > 0)
            add_group(c, &before);
        __mmask16 present = (__mmask16)((1u << now.count) - 1);
        if (odd_blocks(now.absmax) & present) {
            if (!scalar_blocks(c, to, src, dtype, now.block, (uint64_t)now.count * block_elems,
                               absmax))
                return;
            before.count = 0;
        } else {
            _mm512_mask_storeu_epi32(absmax + now.block, present, now.absmax);
            prepare(&now, s);
            if (to == NF4 && dtype == QC_DTYPE_BF16)
                for (unsigned b = 0; b < now.count; b++)
                    nf4_fields_of_block(c, &now, b, vectors,
                                        (unsigned char *)s->widened[now.turn % 2] +
                                            (uint64_t)b * vectors * 64);
            pass3(c, &now, to, dtype, vectors, errors);
            before = now;
        }
        now = next;
    }
    if (errors && before.count > 0)
        add_group(c, &before);
    (void)scalar_blocks(c, to, src, dtype, blocks, n % block_elems, absmax);
}

QC_INLINE void by_block_size(const context *c, scheme to, const void *src, qc_dtype dtype,
                             uint64_t n, float *absmax, int errors)
{
    const uint64_t blocks = n / c->block_elems;
    uint64_t first = 0;
    if (to == NF4 && dtype == QC_DTYPE_BF16 && c->block_elems == HOT_BLOCK) {
        for (;;) {
            first = hot_groups(c, src, first, blocks, absmax, errors);
            if (blocks - first < QC_GROUP)
                break;
            if (!scalar_blocks(c, to, src, dtype, first, QC_GROUP * HOT_BLOCK, absmax))
                return;
            first += QC_GROUP;
        }
    }
    quantize(c, to, src, dtype, n, c->block_elems / 32, first, absmax, errors);
}

/* Block-wise NF4 and int8 with AVX2.
 *
 * The picture. 32 elements are a unit. Two vectors of 16 bf16 are taken as 8 lanes of 32 bits each;
 * the even elements are widened by a shift, the odd ones by clearing the lower half, so that lane l
 * of the low pair of vectors holds elements 2l and 2l + 1, that of the high pair 16 more: together
 * the 16 lanes of the error sums. Codes are bytes, 32 to a vector, in an order in which a widening
 * by unpacks ends in those four vectors:
 *
 *     bytes of lane 0: e0 e2 e4 e6  e16 e18 e20 e22  o1 o3 o5 o7  o17 o19 o21 o23
 *     bytes of lane 1: the same with 8 more
 *
 * Everything is looked up with vpshufb, 32 weights at a time: see quant_avx2_tables.h. A float
 * comes out of a table of 16 as four bytes, 12 operations for 32 weights; with two vpermps and a
 * blend for every 8 weights 64 of them took 85 cycles instead of 70. Codes by 15 compares of 16-bit
 * distances, even of 16 weights at once, took 118, and 73 instead of 27 without errors.
 *
 * Blocks go in groups of eight, so that everything that is one number per block (absmax, division,
 * test for what is not finite, sums, bfloat16 errors) is one vector per group; see
 * quant_avx2_internal.h for the fold.
 *
 *     group g + 1   pass 1: maximum of the magnitudes
 *     group g - 1   its error sums are folded and added up
 *     group g       pass 2: codes of all blocks; then y, r and the sums; then the codes are packed
 *
 * Pass 1 asks for source 4 KiB ahead (1 to 8 KiB measured alike): 3.8 GB/s of bf16 become 5.1, 6.2
 * become 10 without errors, where a plain read does 14.5.
 *
 * The three steps of pass 2 are loops of their own: done block by block they are a chain of 60
 * cycles for 170 operations, more than the scheduler sees past (80 cycles instead of 71).
 *
 * A group with an absmax that is not finite, subnormal or near the ends of the range goes to the
 * scalar code, block by block; sums come out the same, as they are added block after block.
 *
 * Vector operations for 64 bf16 weights (three ports take one each per cycle, but only two of them
 * multiply, add or compare, and two shuffle; loads and stores are free beside them):
 *     pass 1   4 and, 5 max, 2 fold                                               11
 *     codes    2 x (2 x (and, subs, sign, mullo, shuffle), 11 for the lookup)     42
 *     packing  2 unpacks, shift, or, permute                                       5
 *     errors   8 x (widen, y, 3 lookup, r, 3 fma, and, max), 14 fold, 12 per group 114
 * 58 without errors (20 cycles), 172 with (57 cycles), against 26 cycles in which one core reads
 * 128 bytes from DRAM at 16.5 GB/s and 3.3 GHz. */
#include "quant/quant_avx2.h"
#include "quant/quant_avx2_internal.h"
#include "quant/quant_avx2_tables.h"
#include "quant/quant_simd_tables.h"

#include <string.h>

/* Elements of a group: 8 blocks, but no more than the largest block holds. */
#define GROUP_ELEMS 4096u

enum { MAX, RR, RC, CC, PEAK, ROWS };

typedef struct {
    qc_fold_rows rows[ROWS];
    _Alignas(32) float widened[2][GROUP_ELEMS]; /* F64: elements */
    _Alignas(32) float y[GROUP_ELEMS]; /* NF4 of other types than bf16, in order of units */
    _Alignas(32) unsigned char codes[GROUP_ELEMS + 32]; /* NF4: one byte each, in order of units */
    _Alignas(32) float inv[QC_GROUP];
    _Alignas(32) uint32_t base[QC_GROUP];     /* bf16: base twice */
    _Alignas(32) uint32_t mantissa[QC_GROUP]; /* bf16: which table */
    _Alignas(32) double sums[2 * QC_GROUP];   /* ee and xx of each block */
} group_scratch;

typedef enum { NF4, INT8 } scheme;

typedef struct {
    const unsigned char *src; /* elements of the group */
    uint64_t block;           /* number of its first block */
    unsigned block_count;
    unsigned turn;  /* 0, 1, 2, ...: tells which of the scratch it uses */
    __m256i absmax; /* bits */
} group;

typedef struct {
    const qc_avx2_tables *tables;
    group_scratch *scratch;
    uint32_t block_elems;
    unsigned char *codes;
    qc_block_error *block_errors;
    qc_piece_sums *sums;
} context;

QC_INLINE group make_group(const void *src, qc_dtype dtype, uint32_t block_elems, uint64_t block,
                           uint64_t blocks, unsigned turn)
{
    const unsigned most =
        block_elems <= GROUP_ELEMS / QC_GROUP ? QC_GROUP : GROUP_ELEMS / block_elems;
    return (group){
        .src = (const unsigned char *)src + block * block_elems * qc_element_bytes(dtype),
        .block = block,
        .block_count = qc_min_u32(blocks - block, most),
        .turn = turn,
    };
}

/* Quantizes blocks one by one in scalar code; returns 1, or 0 after an element that has no code. */
static int scalar_blocks(const context *c, scheme to, const void *src, qc_dtype dtype,
                         uint64_t block, uint64_t elems, float *absmax)
{
    const qc_quant_ops *ops = &qc_quant_ops_scalar;
    const uint64_t element = qc_element_bytes(dtype);
    for (uint64_t done = 0; done < elems; done += c->block_elems, block++) {
        uint64_t first = block * c->block_elems;
        uint64_t n = qc_min_u64(elems - done, c->block_elems);
        const unsigned char *at = (const unsigned char *)src + first * element;
        qc_block_error *errors = c->block_errors ? c->block_errors + block : NULL;
        qc_piece_sums one;
        if (to == NF4)
            ops->nf4_quantize(at, dtype, n, c->block_elems, c->codes + first / 2, absmax + block,
                              errors, &one);
        else
            ops->int8_blocks_quantize(at, dtype, n, c->block_elems, (int8_t *)(c->codes + first),
                                      absmax + block, errors, &one);
        if (one.bad != QC_BAD_NONE) {
            c->sums->bad = one.bad;
            c->sums->bad_index = first + one.bad_index;
            return 0;
        }
        c->sums->sum_ee += one.sum_ee;
        c->sums->sum_xx += one.sum_xx;
    }
    return 1;
}

/* 32 elements, split into even and odd: lane l of low holds 2l or 2l + 1, lane l of high 16
 * more. */
typedef struct {
    __m256 even_low, even_high, odd_low, odd_high;
} unit;

QC_INLINE int is_half(qc_dtype dtype)
{
    return dtype == QC_DTYPE_BF16 || dtype == QC_DTYPE_F16;
}

/* ---- pass 1 ---------------------------------------------------------------------------------- */

QC_INLINE void pass1_half(const group *g, group_scratch *s, uint32_t units)
{
    const __m256i no_sign = _mm256_set1_epi16(0x7fff);
    const unsigned char *in = g->src;
    for (unsigned b = 0; b < g->block_count; b++) {
        __m256i most = _mm256_setzero_si256(), other = most;
        for (uint32_t u = 0; u < units; u++, in += 64) {
            qc_prefetch(in);
            most = _mm256_max_epu16(most, _mm256_and_si256(qc_load(in), no_sign));
            other = _mm256_max_epu16(other, _mm256_and_si256(qc_load(in + 32), no_sign));
        }
        qc_fold_store(&s->rows[MAX], b, _mm256_max_epu16(most, other));
    }
}

QC_INLINE void pass1_float(const group *g, group_scratch *s, qc_dtype dtype, uint32_t units)
{
    float *out = s->widened[g->turn % 2];
    uint64_t i = 0;
    for (unsigned b = 0; b < g->block_count; b++) {
        __m256i most = _mm256_setzero_si256();
        for (uint32_t v = 0; v < 4 * units; v++, i += 8) {
            __m256 x = qc_load8(g->src, dtype, i);
            if (dtype == QC_DTYPE_F64 || v % 2 == 0)
                qc_prefetch(g->src + i * qc_element_bytes(dtype));
            if (dtype != QC_DTYPE_F32)
                _mm256_store_ps(out + i, x);
            most = _mm256_max_epu32(most, qc_magnitude_f32(x));
        }
        qc_fold_store(&s->rows[MAX], b, most);
    }
}

QC_INLINE void pass1(const group *g, group_scratch *s, qc_dtype dtype, uint32_t units)
{
    if (is_half(dtype))
        pass1_half(g, s, units);
    else
        pass1_float(g, s, dtype, units);
}

/* Returns the bits of the group's absmax, as floats. */
QC_INLINE __m256i fold_absmax(const group_scratch *s, qc_dtype dtype)
{
    if (!is_half(dtype))
        return qc_fold8x8(QC_FOLD_MAX_U32, &s->rows[MAX]);
    __m256i words = qc_fold8x8(QC_FOLD_MAX_U16, &s->rows[MAX]);
    __m256i most = _mm256_max_epu16(words, _mm256_slli_epi32(words, 16));
    if (dtype == QC_DTYPE_BF16)
        return _mm256_and_si256(most, _mm256_set1_epi32(-65536));
    return _mm256_castps_si256(_mm256_cvtph_ps(qc_narrow_words(_mm256_srli_epi32(most, 16))));
}

/* Returns whether the vector code must not touch one of the first `count` blocks. */
QC_INLINE int any_odd_block(__m256i absmax, unsigned count)
{
    const int lowest = (127 - 100) << 23, beyond = (127 + 125) << 23;
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i zero = _mm256_cmpeq_epi32(absmax, _mm256_setzero_si256());
    __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(lowest), absmax);
    __m256i above = _mm256_cmpgt_epi32(absmax, _mm256_set1_epi32(beyond - 1));
    __m256i odd = _mm256_or_si256(_mm256_andnot_si256(zero, below), above);
    __m256i here = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane);
    return !_mm256_testz_si256(odd, here);
}

/* Finds for each block the inverse of absmax (0 for a block of zeros), and for bf16 where to look
 * codes up. */
QC_INLINE void prepare(const group *g, group_scratch *s)
{
    __m256 a = _mm256_castsi256_ps(g->absmax);
    __m256 some = _mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ);
    _mm256_store_ps(s->inv, _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(1.0f), a)));
    __m256i pattern = _mm256_srli_epi32(g->absmax, 16);
    __m256i twice = _mm256_or_si256(pattern, g->absmax);
    qc_store(s->base, _mm256_subs_epu16(twice, _mm256_set1_epi16(QC_AVX2_DOWN)));
    qc_store(s->mantissa, _mm256_and_si256(pattern, _mm256_set1_epi32(127)));
}

/* ---- codes ----------------------------------------------------------------------------------- */

/* The order of the bytes of a unit within each lane of 16: four of even_low, four of even_high,
 * four of odd_low, four of odd_high. */
QC_INLINE __m256i pack_unit(__m256i even_low, __m256i even_high, __m256i odd_low, __m256i odd_high)
{
    return _mm256_packs_epi16(_mm256_packs_epi32(even_low, even_high),
                              _mm256_packs_epi32(odd_low, odd_high));
}

typedef struct {
    __m256i byte[4];
} float_table;

QC_INLINE float_table load_float_table(const uint8_t bytes[4][32])
{
    return (float_table){
        {qc_load(bytes[0]), qc_load(bytes[1]), qc_load(bytes[2]), qc_load(bytes[3])}};
}

/* Returns the floats whose numbers are the bytes of a unit. */
QC_INLINE unit look_up(const float_table *t, __m256i index)
{
    __m256i b0 = _mm256_shuffle_epi8(t->byte[0], index),
            b1 = _mm256_shuffle_epi8(t->byte[1], index);
    __m256i b2 = _mm256_shuffle_epi8(t->byte[2], index),
            b3 = _mm256_shuffle_epi8(t->byte[3], index);
    __m256i even0 = _mm256_unpacklo_epi8(b0, b1), even1 = _mm256_unpacklo_epi8(b2, b3);
    __m256i odd0 = _mm256_unpackhi_epi8(b0, b1), odd1 = _mm256_unpackhi_epi8(b2, b3);
    return (unit){_mm256_castsi256_ps(_mm256_unpacklo_epi16(even0, even1)),
                  _mm256_castsi256_ps(_mm256_unpackhi_epi16(even0, even1)),
                  _mm256_castsi256_ps(_mm256_unpacklo_epi16(odd0, odd1)),
                  _mm256_castsi256_ps(_mm256_unpackhi_epi16(odd0, odd1))};
}

/* Returns entry k of a table for signed buckets; flipped is k with its top bit flipped. */
QC_INLINE __m256i look_up_signed(__m256i not_negative, __m256i negative, __m256i k, __m256i flipped)
{
    return _mm256_or_si256(_mm256_shuffle_epi8(not_negative, k),
                           _mm256_shuffle_epi8(negative, flipped));
}

typedef struct {
    __m256i base, scale, code_up, code_down, last_up, last_down;
} bf16_tables;

QC_INLINE bf16_tables load_bf16_tables(const qc_avx2_tables *tables, const group_scratch *s,
                                       unsigned block)
{
    const qc_avx2_bf16_tables *t = &tables->bf16[s->mantissa[block]];
    return (bf16_tables){_mm256_set1_epi32((int)s->base[block]),
                         qc_load(tables->scale),
                         qc_load_twice(t->base_code[0]),
                         qc_load_twice(t->base_code[1]),
                         qc_load_twice(t->last[0]),
                         qc_load_twice(t->last[1])};
}

/* Per word: bucket in the high byte, place within it in the low one; then, in each lane, the bytes
 * of the places of even, of odd elements, the buckets of even, of odd ones. */
QC_INLINE __m256i bf16_places(const unsigned char *at, __m256i base, __m256i scale)
{
    const __m256i order = _mm256_setr_epi8(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15, 0,
                                           4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    __m256i x = qc_load(at);
    __m256i above = _mm256_subs_epu16(_mm256_and_si256(x, _mm256_set1_epi16(0x7fff)), base);
    __m256i place = _mm256_sign_epi16(above, x);
    place = _mm256_mullo_epi16(place, scale);
    return _mm256_shuffle_epi8(place, order);
}

QC_INLINE __m256i nf4_codes_bf16(const unsigned char *at, const bf16_tables *t)
{
    const __m256i top = _mm256_set1_epi8(INT8_MIN);
    __m256i low = bf16_places(at, t->base, t->scale),
            high = bf16_places(at + 32, t->base, t->scale);
    __m256i place = _mm256_unpacklo_epi32(low, high), k = _mm256_unpackhi_epi32(low, high);
    __m256i flipped = _mm256_xor_si256(k, top);
    __m256i code = look_up_signed(t->code_up, t->code_down, k, flipped);
    __m256i last = look_up_signed(t->last_up, t->last_down, k, flipped);
    return _mm256_sub_epi8(code, _mm256_cmpgt_epi8(_mm256_xor_si256(place, top), last));
}

QC_INLINE __m256i above_threshold(__m256 y, __m256 threshold)
{
    return _mm256_castps_si256(_mm256_cmp_ps(y, threshold, _CMP_GT_OQ));
}

QC_INLINE __m256i nf4_bucket(__m256 y)
{
    return _mm256_cvtps_epi32(_mm256_mul_ps(y, _mm256_set1_ps(QC_NF4_BUCKETS)));
}

/* Returns the code of y or one less. */
QC_INLINE __m256i nf4_lower_code(const unit *y, const qc_avx2_tables *tables)
{
    __m256i k = pack_unit(nf4_bucket(y->even_low), nf4_bucket(y->even_high), nf4_bucket(y->odd_low),
                          nf4_bucket(y->odd_high));
    return look_up_signed(qc_load(tables->nf4_base[0]), qc_load(tables->nf4_base[1]), k,
                          _mm256_xor_si256(k, _mm256_set1_epi8(INT8_MIN)));
}

QC_INLINE __m256i nf4_exact_code(const unit *y, const float_table *thresholds, __m256i lower)
{
    const unit t = look_up(thresholds, lower);
    return _mm256_sub_epi8(lower, pack_unit(above_threshold(y->even_low, t.even_low),
                                            above_threshold(y->even_high, t.even_high),
                                            above_threshold(y->odd_low, t.odd_low),
                                            above_threshold(y->odd_high, t.odd_high)));
}

/* Packs the codes of two units, in order, as nibbles. */
QC_INLINE __m256i nf4_pack(__m256i a, __m256i b)
{
    __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
    __m256i bytes = _mm256_or_si256(_mm256_slli_epi16(even, 4), odd);
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

QC_INLINE void nf4_pack_group(const context *c, const group *g, uint32_t units)
{
    const unsigned char *in = c->scratch->codes;
    unsigned char *out = c->codes + g->block * units * 16;
    uint32_t left = g->block_count * units;
    for (; left > 1; left -= 2, in += 64, out += 32)
        qc_store(out, nf4_pack(qc_load(in), qc_load(in + 32)));
    if (left > 0)
        qc_store_half(out, _mm256_castsi256_si128(nf4_pack(qc_load(in), qc_load(in))));
}

/* Puts a unit's bytes of int8 in order. */
QC_INLINE __m256i int8_in_order(__m256i bytes)
{
    const __m256i order = _mm256_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15, 0,
                                           8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(bytes, order), 0xd8);
}

QC_INLINE __m256i int8_code(__m256 x, __m256 scale)
{
    return _mm256_cvtps_epi32(_mm256_mul_ps(x, scale));
}

QC_INLINE __m256 int8_value(__m256i code)
{
    return _mm256_mul_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(QC_INT8_STEP));
}

/* ---- errors ---------------------------------------------------------------------------------- */

typedef struct {
    __m256 rr, rc, cc, peak;
} half_sums;

QC_INLINE void add_errors(half_sums *t, __m256 y, __m256 c)
{
    __m256 r = _mm256_sub_ps(y, c);
    t->rr = _mm256_fmadd_ps(r, r, t->rr);
    t->rc = _mm256_fmadd_ps(r, c, t->rc);
    t->cc = _mm256_fmadd_ps(c, c, t->cc);
    t->peak = _mm256_max_ps(t->peak, _mm256_castsi256_ps(qc_magnitude_f32(r)));
}

QC_INLINE void store_sums(group_scratch *s, unsigned block, const half_sums *l, const half_sums *h)
{
    qc_fold_store(&s->rows[RR], block, _mm256_castps_si256(_mm256_add_ps(l->rr, h->rr)));
    qc_fold_store(&s->rows[RC], block, _mm256_castps_si256(_mm256_add_ps(l->rc, h->rc)));
    qc_fold_store(&s->rows[CC], block, _mm256_castps_si256(_mm256_add_ps(l->cc, h->cc)));
    qc_fold_store(&s->rows[PEAK], block, _mm256_castps_si256(_mm256_max_ps(l->peak, h->peak)));
}

/* ---- pass 2 ---------------------------------------------------------------------------------- */

QC_INLINE unit split(const unsigned char *at, qc_dtype dtype)
{
    qc_pair low, high;
    if (dtype == QC_DTYPE_BF16) {
        low = qc_split_bf16(at);
        high = qc_split_bf16(at + 32);
    } else if (dtype == QC_DTYPE_F16) {
        low = qc_split_f16(at);
        high = qc_split_f16(at + 32);
    } else {
        low = qc_split_f32(at);
        high = qc_split_f32(at + 64);
    }
    return (unit){low.even, high.even, low.odd, high.odd};
}

QC_INLINE unit times(const unit *x, __m256 by)
{
    return (unit){_mm256_mul_ps(x->even_low, by), _mm256_mul_ps(x->even_high, by),
                  _mm256_mul_ps(x->odd_low, by), _mm256_mul_ps(x->odd_high, by)};
}

/* Stores a group's units of floats in the order of lanes. */
QC_INLINE void store_unit(float *at, const unit *y)
{
    _mm256_store_ps(at, y->even_low);
    _mm256_store_ps(at + 8, y->even_high);
    _mm256_store_ps(at + 16, y->odd_low);
    _mm256_store_ps(at + 24, y->odd_high);
}

QC_INLINE unit load_unit(const float *at)
{
    return (unit){_mm256_load_ps(at), _mm256_load_ps(at + 8), _mm256_load_ps(at + 16),
                  _mm256_load_ps(at + 24)};
}

QC_INLINE const unsigned char *block_source(const context *c, const group *g, unsigned b,
                                            qc_dtype dtype, uint32_t units)
{
    const unsigned char *in =
        dtype == QC_DTYPE_F64 ? (const unsigned char *)c->scratch->widened[g->turn % 2] : g->src;
    return in + (uint64_t)b * units * 32 * (is_half(dtype) ? 2 : 4);
}

/* NF4: writes the codes of one block to scratch. For other types than bf16 a code may be one less
 * than it should be, and y goes to scratch as well. */
QC_INLINE void nf4_codes(const context *c, const group *g, unsigned b, qc_dtype dtype,
                         uint32_t units)
{
    group_scratch *s = c->scratch;
    const unsigned char *in = block_source(c, g, b, dtype, units);
    unsigned char *codes = s->codes + (uint64_t)b * units * 32;
    float *out = s->y + (uint64_t)b * units * 32;
    if (dtype == QC_DTYPE_BF16) {
        const bf16_tables tables = load_bf16_tables(c->tables, s, b);
        for (uint32_t u = 0; u < units; u++, in += 64, codes += 32)
            qc_store(codes, nf4_codes_bf16(in, &tables));
        return;
    }
    const __m256 inv = _mm256_set1_ps(s->inv[b]);
    const unsigned step = dtype == QC_DTYPE_F16 ? 64 : 128;
    for (uint32_t u = 0; u < units; u++, in += step, codes += 32, out += 32) {
        const unit x = split(in, dtype), y = times(&x, inv);
        store_unit(out, &y);
        qc_store(codes, nf4_lower_code(&y, c->tables));
    }
}

/* NF4 of other types than bf16: makes the codes of a group exact. */
QC_INLINE void nf4_compare(const context *c, uint32_t units)
{
    const float_table thresholds = load_float_table(c->tables->nf4_threshold);
    unsigned char *codes = c->scratch->codes;
    const float *scaled = c->scratch->y;
    for (uint32_t u = 0; u < units; u++, codes += 32, scaled += 32) {
        const unit y = load_unit(scaled);
        qc_store(codes, nf4_exact_code(&y, &thresholds, qc_load(codes)));
    }
}

QC_INLINE void add_unit(half_sums *low, half_sums *high, const unit *y, const unit *value)
{
    add_errors(low, y->even_low, value->even_low);
    add_errors(high, y->even_high, value->even_high);
    add_errors(low, y->odd_low, value->odd_low);
    add_errors(high, y->odd_high, value->odd_high);
}

/* Sums up one block of NF4 from its codes in scratch. */
QC_INLINE void nf4_errors(const context *c, const group *g, unsigned b, qc_dtype dtype,
                          uint32_t units)
{
    group_scratch *s = c->scratch;
    const float_table values = load_float_table(c->tables->nf4_code);
    const unsigned char *in = block_source(c, g, b, dtype, units);
    const unsigned char *codes = s->codes + (uint64_t)b * units * 32;
    const float *scaled = s->y + (uint64_t)b * units * 32;
    const __m256 inv = _mm256_set1_ps(s->inv[b]), zero = _mm256_setzero_ps();
    half_sums low = {zero, zero, zero, zero}, high = low;
    for (uint32_t u = 0; u < units; u++, in += 64, codes += 32, scaled += 32) {
        unit y;
        if (dtype == QC_DTYPE_BF16) {
            const unit x = split(in, dtype);
            y = times(&x, inv);
        } else {
            y = load_unit(scaled);
        }
        const unit value = look_up(&values, qc_load(codes));
        add_unit(&low, &high, &y, &value);
    }
    store_sums(s, b, &low, &high);
}

/* Makes the int8 codes of one block, and its sums where they are wanted. */
QC_INLINE void int8_block(const context *c, const group *g, unsigned b, qc_dtype dtype,
                          uint32_t units, int errors)
{
    group_scratch *s = c->scratch;
    const unsigned char *in = block_source(c, g, b, dtype, units);
    unsigned char *codes = c->codes + (g->block + b) * units * 32;
    const __m256 inv = _mm256_set1_ps(s->inv[b]), zero = _mm256_setzero_ps();
    const __m256 scale = _mm256_mul_ps(inv, _mm256_set1_ps(127.0f));
    half_sums low = {zero, zero, zero, zero}, high = low;
    for (uint32_t u = 0; u < units; u++, in += is_half(dtype) ? 64 : 128, codes += 32) {
        const unit x = split(in, dtype);
        __m256i el = int8_code(x.even_low, scale), eh = int8_code(x.even_high, scale);
        __m256i ol = int8_code(x.odd_low, scale), oh = int8_code(x.odd_high, scale);
        qc_store(codes, int8_in_order(pack_unit(el, eh, ol, oh)));
        if (errors) {
            const unit y = times(&x, inv);
            const unit value = {int8_value(el), int8_value(eh), int8_value(ol), int8_value(oh)};
            add_unit(&low, &high, &y, &value);
        }
    }
    if (errors)
        store_sums(s, b, &low, &high);
}

QC_INLINE void pass2(const context *c, const group *g, scheme to, qc_dtype dtype, uint32_t units,
                     int errors)
{
    for (unsigned b = 0; to == INT8 && b < g->block_count; b++)
        int8_block(c, g, b, dtype, units, errors);
    if (to == INT8)
        return;
    for (unsigned b = 0; b < g->block_count; b++)
        nf4_codes(c, g, b, dtype, units);
    if (dtype != QC_DTYPE_BF16)
        nf4_compare(c, g->block_count * units);
    for (unsigned b = 0; errors && b < g->block_count; b++)
        nf4_errors(c, g, b, dtype, units);
    nf4_pack_group(c, g, units);
}

/* ---- a group's sums -------------------------------------------------------------------------- */

QC_INLINE __m256d half_to_double(__m256i v, int upper)
{
    __m256 f = _mm256_castsi256_ps(v);
    return _mm256_cvtps_pd(upper ? _mm256_extractf128_ps(f, 1) : _mm256_castps256_ps128(f));
}

QC_INLINE void write_block_errors(qc_block_error *out, unsigned count, __m256i rc, __m256i cc,
                                  __m256i peak)
{
    _Static_assert(sizeof(qc_block_error) == 6, "three words");
    const __m256i order = _mm256_setr_epi8(0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, -1, -1, -1, -1,
                                           0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, -1, -1, -1, -1);
    unsigned char bytes[QC_GROUP * 6 + 4];
    rc = qc_round_bf16(_mm256_castsi256_ps(rc));
    cc = _mm256_slli_epi32(qc_round_bf16(_mm256_castsi256_ps(cc)), 16);
    peak = _mm256_srli_epi32(_mm256_add_epi32(peak, _mm256_set1_epi32(0xffff)), 16);
    __m256i sums = _mm256_or_si256(rc, cc);
    __m256i a = _mm256_shuffle_epi8(_mm256_unpacklo_epi32(sums, peak), order); /* 0, 1, 4, 5 */
    __m256i b = _mm256_shuffle_epi8(_mm256_unpackhi_epi32(sums, peak), order); /* 2, 3, 6, 7 */
    qc_store_half(bytes, _mm256_castsi256_si128(a));
    qc_store_half(bytes + 12, _mm256_castsi256_si128(b));
    qc_store_half(bytes + 24, _mm256_extracti128_si256(a, 1));
    qc_store_half(bytes + 36, _mm256_extracti128_si256(b, 1));
    memcpy(out, bytes, count * sizeof *out);
}

QC_INLINE void add_group(const context *c, const group *g)
{
    group_scratch *s = c->scratch;
    __m256i rr = qc_fold8x8(QC_FOLD_ADD, &s->rows[RR]), rc = qc_fold8x8(QC_FOLD_ADD, &s->rows[RC]);
    __m256i cc = qc_fold8x8(QC_FOLD_ADD, &s->rows[CC]);
    write_block_errors(c->block_errors + g->block, g->block_count, rc, cc,
                       qc_fold8x8(QC_FOLD_MAX_F32, &s->rows[PEAK]));
    for (int upper = 0; upper < 2; upper++) {
        __m256d a = half_to_double(g->absmax, upper), r = half_to_double(rr, upper);
        __m256d a2 = _mm256_mul_pd(a, a), ee = _mm256_mul_pd(r, a2);
        __m256d twice = _mm256_mul_pd(_mm256_set1_pd(2.0), half_to_double(rc, upper));
        __m256d xx = _mm256_add_pd(_mm256_add_pd(r, twice), half_to_double(cc, upper));
        xx = _mm256_mul_pd(xx, a2);
        _mm256_store_pd(s->sums + upper * 8, _mm256_unpacklo_pd(ee, xx));
        _mm256_store_pd(s->sums + upper * 8 + 4, _mm256_unpackhi_pd(ee, xx));
    }
    /* pairs (ee, xx); blocks 0, 2, then 1, 3, then the upper four */
    __m128d total = _mm_set_pd(c->sums->sum_xx, c->sums->sum_ee);
    for (unsigned b = 0; b < g->block_count; b++)
        total = _mm_add_pd(total, _mm_load_pd(s->sums + (b & 4u) * 2 + (b & 1u) * 4 + (b & 2u)));
    c->sums->sum_ee = _mm_cvtsd_f64(total);
    c->sums->sum_xx = _mm_cvtsd_f64(_mm_unpackhi_pd(total, total));
}

/* ---- driver ---------------------------------------------------------------------------------- */

QC_INLINE void store_absmax(float *out, const group *g)
{
    if (g->block_count == QC_GROUP) {
        qc_store(out, g->absmax);
        return;
    }
    float lanes[QC_GROUP];
    qc_store(lanes, g->absmax);
    memcpy(out, lanes, g->block_count * sizeof *out);
}

/* units: how many units of 32 elements a block has; a constant where it matters. */
QC_INLINE void quantize(const context *c, scheme to, const void *src, qc_dtype dtype, uint64_t n,
                        uint32_t units, float *absmax, int errors)
{
    const uint32_t block_elems = units * 32;
    const uint64_t blocks = n / block_elems;
    group_scratch *s = c->scratch;
    group now = make_group(src, dtype, block_elems, 0, blocks, 0), before = {.block_count = 0};
    pass1(&now, s, dtype, units);
    while (now.block_count > 0) {
        now.absmax = fold_absmax(s, dtype);
        group next =
            make_group(src, dtype, block_elems, now.block + now.block_count, blocks, now.turn + 1);
        pass1(&next, s, dtype, units);
        if (errors && before.block_count > 0)
            add_group(c, &before);
        if (any_odd_block(now.absmax, now.block_count)) {
            if (!scalar_blocks(c, to, src, dtype, now.block,
                               (uint64_t)now.block_count * block_elems, absmax))
                return;
            before.block_count = 0;
        } else {
            store_absmax(absmax + now.block, &now);
            prepare(&now, s);
            pass2(c, &now, to, dtype, units, errors);
            before = now;
        }
        now = next;
    }
    if (errors && before.block_count > 0)
        add_group(c, &before);
    (void)scalar_blocks(c, to, src, dtype, blocks, n % block_elems, absmax);
}

QC_INLINE void by_block_size(const context *c, scheme to, const void *src, qc_dtype dtype,
                             uint64_t n, float *absmax, int errors)
{
    if (c->block_elems == QC_BLOCK_DEFAULT)
        quantize(c, to, src, dtype, n, QC_BLOCK_DEFAULT / 32, absmax, errors);
    else
        quantize(c, to, src, dtype, n, c->block_elems / 32, absmax, errors);
}

QC_INLINE void by_errors(const context *c, scheme to, const void *src, qc_dtype dtype, uint64_t n,
                         float *absmax)
{
    if (c->block_errors)
        by_block_size(c, to, src, dtype, n, absmax, 1);
    else
        by_block_size(c, to, src, dtype, n, absmax, 0);
}

QC_INLINE void by_dtype(scheme to, const void *src, qc_dtype dtype, uint64_t n,
                        uint32_t block_elems, unsigned char *codes, float *absmax,
                        qc_block_error *block_errors, qc_piece_sums *sums)
{
    group_scratch scratch;
    memset(scratch.rows, 0, sizeof scratch.rows); /* for blocks that a group lacks */
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    const context c = {qc_avx2_tables_get(), &scratch, block_elems, codes, block_errors, sums};
    if (dtype == QC_DTYPE_BF16)
        by_errors(&c, to, src, QC_DTYPE_BF16, n, absmax);
    else if (dtype == QC_DTYPE_F32)
        by_errors(&c, to, src, QC_DTYPE_F32, n, absmax);
    else if (dtype == QC_DTYPE_F16)
        by_errors(&c, to, src, QC_DTYPE_F16, n, absmax);
    else
        by_errors(&c, to, src, QC_DTYPE_F64, n, absmax);
}

void qc_avx2_nf4_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                          uint8_t *codes, float *absmax, qc_block_error *block_errors,
                          qc_piece_sums *sums)
{
    by_dtype(NF4, src, dtype, n, block_elems, codes, absmax, block_errors, sums);
}

void qc_avx2_int8_blocks_quantize(const void *src, qc_dtype dtype, uint64_t n, uint32_t block_elems,
                                  int8_t *codes, float *absmax, qc_block_error *block_errors,
                                  qc_piece_sums *sums)
{
    by_dtype(INT8, src, dtype, n, block_elems, (unsigned char *)codes, absmax, block_errors, sums);
}

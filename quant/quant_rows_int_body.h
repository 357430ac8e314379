/* Integers as compressed-tensors has them: what quant_avx2.c and quant_avx512.c have in common;
 * defines int_quantize. It has no include guard, because each of them includes it once, after
 * quant_rows_body.h.
 *
 * Sixteen groups at a time: their largest magnitudes, their scales side by side, then their codes
 * and sums. The largest error is only kept as a number; its index is looked for when it exceeds all
 * before. */

#define INT_GROUPS 16u

typedef struct {
    const qc_int_codes *how;
    const void *src;
    unsigned char *codes;
    qc_wide lowest, highest;
    qc_piece_sums *sums;
    qc_wide most; /* of the groups at work */
} int_context;

/* Makes the scales of sixteen groups, as qc_int_scale has them. */
QC_INLINE void int_scales(const qc_int_codes *how, const float *absmax, float *scale)
{
    qc_wide s = qc_wide_div(qc_wide_load(absmax), qc_wide_all(how->bits == 4 ? 7.5f : 127.0f));
    if (how->scale_dtype == QC_DTYPE_F16)
        s = qc_wide_through_f16(s);
    if (how->scale_dtype == QC_DTYPE_BF16)
        s = qc_wide_through_bf16(s);
    s = qc_wide_between(s, qc_wide_all(qc_int_scale_least(how->scale_dtype)),
                        qc_wide_all(qc_int_scale_most(how->scale_dtype)));
    qc_wide_store(scale, s);
}

/* Stores up to 32 codes of one group, from element i on. q are integers, rounded. */
QC_INLINE void store_ints(const int_context *c, unsigned bits, uint64_t i, unsigned count,
                          const qc_wide_int *q)
{
    unsigned char part[32];
    const unsigned bytes = bits == 4 ? (count + 1) / 2 : count;
    unsigned char *to = c->codes + (bits == 4 ? i / 2 : i);
    unsigned char *at = count == 32 || (bits == 8 && count == 16) ? to : part;
    if (bits == 4) {
        qc_wide_store_nibbles(at, q[0], q[1], 8, 1);
    } else {
        const int sign = (int8_t)c->how->bias; /* a bias of -128 turns the sign bit over */
        qc_wide_store_int8(at, qc_wide_int_xor(q[0], sign));
        if (count > 16)
            qc_wide_store_int8(at + 16, qc_wide_int_xor(q[1], sign));
    }
    if (at == part)
        memcpy(to, part, bytes);
}

/* What is summed over a run, and the factors of its group. */
typedef struct {
    qc_wide scale, inverse, rr, yy, most;
} int_sums;

/* Returns x less what its code stands for; *q is that code's number. */
QC_INLINE qc_wide int_error(const int_context *c, const int_sums *s, qc_wide x, qc_wide_int *q)
{
    qc_wide y = qc_wide_mul(x, s->inverse);
    *q = qc_wide_round(qc_wide_between(y, c->lowest, c->highest));
    return qc_wide_sub(x, qc_wide_mul(qc_wide_of_int(*q), s->scale));
}

/* Takes up to 32 elements from i on. */
QC_INLINE void int_step(const int_context *c, qc_dtype dtype, unsigned bits, uint64_t i,
                        unsigned count, int_sums *s)
{
    qc_wide_int q[2] = {qc_wide_int_all(0), qc_wide_int_all(0)};
    for (unsigned h = 0; 16 * h < count; h++) {
        const unsigned lanes = count - 16 * h < 16 ? count - 16 * h : 16;
        qc_wide x = load_part(c->src, dtype, i + 16 * h, lanes);
        qc_wide e = int_error(c, s, x, &q[h]);
        qc_wide y = qc_wide_mul(x, s->inverse), r = qc_wide_mul(e, s->inverse);
        s->rr = qc_wide_fma(r, r, s->rr);
        s->yy = qc_wide_fma(y, y, s->yy);
        s->most = qc_wide_larger(s->most, e);
    }
    store_ints(c, bits, i, count, q);
}

/* Makes the codes of elements [first, end) of a group, at most QC_ROW_FLUSH, and their sums. */
QC_INLINE void int_run(int_context *c, qc_dtype dtype, unsigned bits, float scale, uint64_t first,
                       uint64_t end)
{
    const qc_wide zero = qc_wide_all(0.0f);
    const double s2 = (double)scale * (double)scale;
    int_sums s = {qc_wide_all(scale), qc_wide_all(1.0f / scale), zero, zero, c->most};
    uint64_t i = first;
    for (; i + 32 <= end; i += 32)
        int_step(c, dtype, bits, i, 32, &s);
    if (i < end)
        int_step(c, dtype, bits, i, (unsigned)(end - i), &s);
    c->most = s.most;
    c->sums->sum_ee += (double)qc_wide_fold(s.rr) * s2;
    c->sums->sum_xx += (double)qc_wide_fold(s.yy) * s2;
}

/* Returns the lowest element of the groups from `at` on whose error is `most`; there is one. */
static uint64_t find_int_error(const int_context *c, qc_dtype dtype, uint64_t group, uint64_t at,
                               const float *scale, float most)
{
    for (uint64_t g = at;; g++, scale++) {
        const int_sums s = {.scale = qc_wide_all(*scale), .inverse = qc_wide_all(1.0f / *scale)};
        for (uint64_t i = g * group, end = i + group; i < end; i += 16) {
            qc_wide_int q;
            qc_wide x = load_part(c->src, dtype, i, qc_min_u32(end - i, 16));
            qc_wide e = int_error(c, &s, x, &q);
            const uint32_t hit = qc_wide_equal(qc_wide_magnitude(e), qc_wide_all(most));
            if (hit)
                return i + (unsigned)__builtin_ctz(hit);
        }
    }
}

/* Quantizes groups [at, at + count); returns 1, or 0 after an element that has no code. */
QC_INLINE int int_groups(int_context *c, qc_dtype dtype, unsigned bits, uint64_t group, uint64_t at,
                         unsigned count, float *scales)
{
    float absmax[INT_GROUPS] = {0.0f}, scale[INT_GROUPS];
    for (unsigned g = 0; g < count; g++) {
        const uint64_t first = (at + g) * group;
        const uint32_t largest = largest_magnitude(c->src, dtype, first, group);
        if (largest >= QC_F32_INF) {
            qc_piece_sums one;
            const unsigned char *from = (const unsigned char *)c->src;
            qc_int_quantize_scalar(c->how, from + first * qc_element_bytes(dtype), dtype, group,
                                   group, c->codes + first * bits / 8, scale, &one);
            c->sums->bad = one.bad;
            c->sums->bad_index = first + one.bad_index;
            return 0;
        }
        absmax[g] = qc_f32_of_bits(largest);
    }
    int_scales(c->how, absmax, scale);
    memcpy(scales + at, scale, count * sizeof *scale);
    c->most = qc_wide_all(0.0f);
    for (unsigned g = 0; g < count; g++)
        for (uint64_t i = (at + g) * group, end = i + group; i < end; i += QC_ROW_FLUSH)
            int_run(c, dtype, bits, scale[g], i, qc_min_u64(end, i + QC_ROW_FLUSH));
    const float most = qc_wide_largest(c->most);
    if ((double)most > c->sums->max_err) {
        c->sums->max_err = (double)most;
        c->sums->max_index = find_int_error(c, dtype, group, at, scale, most);
    }
    return 1;
}

QC_INLINE void int_quantize_from(const qc_int_codes *how, const void *src, qc_dtype dtype,
                                 uint64_t n, uint64_t group, void *codes, float *scales,
                                 qc_piece_sums *sums)
{
    const uint64_t groups = n / group;
    int_context c = {how,
                     src,
                     codes,
                     qc_wide_all((float)qc_int_lowest(how)),
                     qc_wide_all((float)qc_int_highest(how)),
                     sums,
                     qc_wide_all(0.0f)};
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t at = 0; at < groups; at += INT_GROUPS) {
        const unsigned count = qc_min_u32(groups - at, INT_GROUPS);
        if (how->bits == 4 ? !int_groups(&c, dtype, 4, group, at, count, scales)
                           : !int_groups(&c, dtype, 8, group, at, count, scales))
            return;
    }
}

static void int_quantize(const qc_int_codes *how, const void *src, qc_dtype dtype, uint64_t n,
                         uint64_t group, void *codes, float *scales, qc_piece_sums *sums)
{
    if (dtype == QC_DTYPE_BF16)
        int_quantize_from(how, src, QC_DTYPE_BF16, n, group, codes, scales, sums);
    else if (dtype == QC_DTYPE_F16)
        int_quantize_from(how, src, QC_DTYPE_F16, n, group, codes, scales, sums);
    else if (dtype == QC_DTYPE_F32)
        int_quantize_from(how, src, QC_DTYPE_F32, n, group, codes, scales, sums);
    else
        int_quantize_from(how, src, QC_DTYPE_F64, n, group, codes, scales, sums);
}

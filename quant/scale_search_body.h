/* The steps of the search over elements: what scale_search_avx2.c and scale_search_avx512.c have in
 * common. Before they include this they define the operations on vectors, and after it the table of
 * steps. It has no include guard, because each of them includes it once. */

/* A NaN may keep its payload where a cast makes it quiet, because nobody looks at it. */
static void widen(const void *src, qc_dtype dtype, uint32_t n, float *x)
{
    const uint32_t whole = n / 16 * 16;
    if (dtype == QC_DTYPE_BF16)
        for (uint32_t i = 0; i < whole; i += 16)
            qc_wide_store(x + i, qc_wide_read(src, QC_DTYPE_BF16, i));
    else
        for (uint32_t i = 0; i < whole; i += 16)
            qc_wide_store(x + i, qc_wide_read(src, dtype, i));
    if (n > whole) {
        uint64_t overflow;
        QC_SEARCH_QUANT_OPS.cast((const unsigned char *)src + whole * qc_element_bytes(dtype),
                                 dtype, n - whole, x + whole, QC_DTYPE_F32, &overflow);
    }
}

/* Blocks side by side: absmax, its inverse and the folds are vectors of one lane per block, and no
 * block waits for the latency of another's. Blocks of zeros and of NaN get factors of 0. */
static void look(const float *x, uint32_t n, unsigned blocks, const uint16_t (*screen)[CANDIDATES],
                 qc_search_look *out)
{
    _Alignas(64) int16_t offsets[QC_BLOCK_MAX];
    _Alignas(64) float absmax[QC_SEARCH_RUN_BLOCKS], k[QC_SEARCH_RUN_BLOCKS];
    _Alignas(64) float xx[QC_SEARCH_RUN_BLOCKS];
    qc_wide_rows rows = {0};
    for (unsigned b = 0; b < blocks; b++) {
        qc_wide_int most = qc_wide_int_all(0);
        for (uint32_t i = b * n; i < b * n + n; i += 16)
            most = qc_wide_larger_bits(most, qc_wide_load(x + i));
        qc_wide_fold_store(QC_FOLD_MAX_U32, &rows, b, most);
    }
    qc_wide_store(absmax, qc_wide_of_bits(qc_wide_fold16(QC_FOLD_MAX_U32, &rows)));
    for (unsigned b = 0; b < QC_SEARCH_RUN_BLOCKS; b++) {
        const float by = (1.0f / absmax[b]) * 127.0f;
        k[b] = absmax[b] >= QC_TINY_ABSMAX && absmax[b] <= FLT_MAX ? by : 0.0f;
    }
    for (unsigned b = 0; b < blocks; b++) {
        const qc_wide by = qc_wide_all(k[b]);
        qc_wide sum = qc_wide_all(0.0f);
        for (uint32_t i = b * n; i < b * n + n; i += 16) {
            qc_wide z = qc_wide_mul(qc_wide_load(x + i), by);
            sum = qc_wide_fma(z, z, sum);
            store_offsets(offsets + i, z);
        }
        qc_wide_fold_store(QC_FOLD_ADD, &rows, b, qc_wide_bits(sum));
    }
    qc_wide_store(xx, qc_wide_of_bits(qc_wide_fold16(QC_FOLD_ADD, &rows)));
    for (unsigned b = 0; b < blocks; b++) {
        out[b].absmax = absmax[b];
        out[b].xx = xx[b];
        out[b].best = 0;
        if (screen && k[b] != 0.0f)
            out[b].best = screen_rows(screen, offsets + b * n, n, out[b].total);
    }
}

/* The codes of a form whose values are evenly spaced. */
typedef struct {
    qc_wide lowest, highest;
} numbers;

QC_INLINE numbers load_numbers(const qc_form_ops *form)
{
    return (numbers){qc_wide_all((float)form->lowest), qc_wide_all((float)form->highest)};
}

/* Returns the number of the code nearest to y. */
QC_INLINE qc_wide nearest_number(const numbers *of, qc_wide y)
{
    return qc_wide_between(qc_wide_round_even(y), of->lowest, of->highest);
}

/* Returns y less the value of the code nearest to it. table is qc_form_is_table, a constant at each
 * call. */
QC_INLINE qc_wide residue(const neighbours *near, const numbers *of, int table, qc_wide y)
{
    return table ? nf4_residue(near, y) : qc_wide_sub(y, nearest_number(of, y));
}

/* Sums r^2 for up to QC_SEARCH_TOGETHER candidates of a block, each to a row of its own. */
QC_INLINE void add_errors(const neighbours *near, const numbers *of, int table, const float *x,
                          uint32_t n, const float *inv, unsigned count, qc_wide_rows *rows,
                          unsigned row)
{
    qc_wide sum[QC_SEARCH_TOGETHER];
    for (unsigned j = 0; j < count; j++)
        sum[j] = qc_wide_all(0.0f);
    for (uint32_t i = 0; i < n; i += 16) {
        qc_wide v = qc_wide_load(x + i);
        for (unsigned j = 0; j < count; j++) {
            qc_wide r = residue(near, of, table, qc_wide_mul(v, qc_wide_all(inv[j])));
            sum[j] = qc_wide_fma(r, r, sum[j]);
        }
    }
    for (unsigned j = 0; j < count; j++)
        qc_wide_fold_store(QC_FOLD_ADD, rows, row + j, qc_wide_bits(sum[j]));
}

/* table and count are constants at each call, so that sums stay in registers. */
QC_INLINE void errors_of(const qc_search_tables *t, const float *x, uint32_t n, unsigned blocks,
                         const qc_form_ops *form, int table, const float *inv, unsigned count,
                         float *rr)
{
    const unsigned together = QC_SEARCH_TOGETHER < count ? QC_SEARCH_TOGETHER : count;
    const unsigned whole = count / together * together, most = 16 / count;
    const neighbours near = table ? load_neighbours(t) : (neighbours){0};
    const numbers of = load_numbers(form);
    qc_wide_rows rows = {0};
    for (unsigned first = 0; first < blocks; first += most) {
        const unsigned blocks_now = qc_min_u32(blocks - first, most);
        _Alignas(64) float folded[16];
        for (unsigned b = 0; b < blocks_now; b++, x += n, inv += count) {
            for (unsigned j = 0; j < whole; j += together)
                add_errors(&near, &of, table, x, n, inv + j, together, &rows, b * count + j);
            for (unsigned j = whole; j < count; j++)
                add_errors(&near, &of, table, x, n, inv + j, 1, &rows, b * count + j);
        }
        qc_wide_store(folded, qc_wide_of_bits(qc_wide_fold16(QC_FOLD_ADD, &rows)));
        memcpy(rr + first * count, folded, blocks_now * count * sizeof *rr);
    }
}

static void errors(const qc_search_tables *t, const float *x, uint32_t n, unsigned blocks,
                   const qc_form_ops *form, const float *inv, unsigned count, float *rr)
{
    const int table = qc_form_is_table(form);
    if (table && count == QC_SEARCH_PAIR)
        errors_of(t, x, n, blocks, form, 1, inv, QC_SEARCH_PAIR, rr);
    else if (table && count == QC_SEARCH_NF4_WIDE)
        errors_of(t, x, n, blocks, form, 1, inv, QC_SEARCH_NF4_WIDE, rr);
    else if (table)
        errors_of(t, x, n, blocks, form, 1, inv, QC_SEARCH_NF4_LATTICE, rr);
    else if (count == QC_SEARCH_PAIR)
        errors_of(t, x, n, blocks, form, 0, inv, QC_SEARCH_PAIR, rr);
    else if (count == QC_SEARCH_SHORT)
        errors_of(t, x, n, blocks, form, 0, inv, QC_SEARCH_SHORT, rr);
    else
        errors_of(t, x, n, blocks, form, 0, inv, QC_SEARCH_CANDIDATES, rr);
}

static float encode_table(const float *x, uint32_t n, unsigned blocks, const float *inv,
                          const float *s, uint8_t *codes)
{
    const code_tables t = load_codes(qc_simd_tables_get());
    qc_wide largest = qc_wide_all(0.0f);
    for (unsigned b = 0; b < blocks; b++) {
        const qc_wide by = qc_wide_all(inv[b]), scale = qc_wide_all(s[b]);
        for (uint32_t i = 0; i < n; i += 32, x += 32, codes += 16) {
            qc_wide_int code[2];
            for (unsigned h = 0; h < 2; h++) {
                qc_wide v = qc_wide_load(x + 16 * h);
                code[h] = nf4_code(&t, qc_wide_mul(v, by));
                qc_wide seen = qc_wide_mul(nf4_value(&t, code[h]), scale);
                largest = qc_wide_larger(largest, qc_wide_sub(v, seen));
            }
            qc_wide_store_nibbles(codes, code[0], code[1], 0, 0);
        }
    }
    return qc_wide_largest(largest);
}

/* Stores the codes of the numbers q: 32 of four bits, or 16 in bytes. */
QC_INLINE void store_numbers(const qc_form_ops *form, unsigned bits, uint8_t *codes,
                             const qc_wide_int *q)
{
    if (bits == 4)
        qc_wide_store_nibbles(codes, q[0], q[1], form->zero, form->low_first);
    else
        qc_wide_store_biased(codes, q[0], form->zero);
}

/* Returns the number of the code nearest to y, as an integer and as a float. */
QC_INLINE qc_wide round_number(const numbers *of, qc_wide y, qc_wide_int *q)
{
    *q = qc_wide_round(qc_wide_between(y, of->lowest, of->highest));
    return qc_wide_of_int(*q);
}

/* bits are those of the form, a constant at each call. */
QC_INLINE float encode_numbers(const float *x, uint32_t n, const qc_form_ops *form, unsigned bits,
                               float inv, float s, uint8_t *codes)
{
    const qc_wide by = qc_wide_all(inv), scale = qc_wide_all(s), step = qc_wide_all(form->step);
    const unsigned together = bits == 4 ? 2 : 1;
    const numbers of = load_numbers(form);
    qc_wide largest = qc_wide_all(0.0f);
    for (uint32_t i = 0; i < n; i += 16 * together, codes += 16) {
        qc_wide_int q[2];
        for (unsigned h = 0; h < together; h++) {
            qc_wide v = qc_wide_load(x + i + 16 * h);
            qc_wide unit = round_number(&of, qc_wide_mul(v, by), &q[h]);
            if (bits != 4) /* the step of four bits is 1 */
                unit = qc_wide_mul(unit, step);
            largest = qc_wide_larger(largest, qc_wide_sub(v, qc_wide_mul(unit, scale)));
        }
        store_numbers(form, bits, codes, q);
    }
    return qc_wide_largest(largest);
}

static float encode(const float *x, uint32_t n, unsigned blocks, const qc_form_ops *form,
                    const float *inv, const float *s, uint8_t *codes)
{
    uint8_t bytes[QC_BLOCK_MAX];
    const int whole = form->bits == 4 || form->bits == 8;
    if (qc_form_is_table(form))
        return encode_table(x, n, blocks, inv, s, codes);
    float largest = 0.0f;
    uint8_t *to = whole ? codes : bytes;
    for (unsigned b = 0; b < blocks; b++, x += n, to += form->bits == 4 ? n / 2 : n) {
        const float error = form->bits == 4 ? encode_numbers(x, n, form, 4, inv[b], s[b], to)
                                            : encode_numbers(x, n, form, 8, inv[b], s[b], to);
        largest = error > largest ? error : largest;
    }
    if (!whole)
        qc_avx2_codes_pack(form->bits, bytes, (uint64_t)blocks * n, codes);
    return largest;
}

static float encode_row(const float *x, const float *h, uint32_t n, const qc_form_ops *form,
                        float s, uint8_t *codes, float *ee, float *xx)
{
    const qc_wide by = qc_wide_all(qc_search_inverse(form, s));
    const qc_wide scale = qc_wide_all(s), step = qc_wide_all(form->step);
    const qc_wide unit = qc_wide_all(qc_search_row_unit(form, s));
    const unsigned together = form->bits == 4 ? 2 : 1;
    uint8_t bytes[QC_ROW_FLUSH], *to = form->bits == 4 || form->bits == 8 ? codes : bytes;
    const numbers of = load_numbers(form);
    qc_wide largest = qc_wide_all(0.0f), ee_sum = largest, xx_sum = largest;
    for (uint32_t i = 0; i < n; i += 16 * together, to += 16) {
        qc_wide_int q[2];
        for (unsigned k = 0; k < together; k++) {
            qc_wide v = qc_wide_load(x + i + 16 * k);
            qc_wide number =
                round_number(&of, qc_wide_mul(qc_wide_load(h + i + 16 * k), by), &q[k]);
            qc_wide e = qc_wide_sub(v, qc_wide_mul(qc_wide_mul(number, scale), step));
            qc_wide r = qc_wide_mul(e, unit), y = qc_wide_mul(v, unit);
            ee_sum = qc_wide_fma(r, r, ee_sum);
            xx_sum = qc_wide_fma(y, y, xx_sum);
            largest = qc_wide_larger(largest, e);
        }
        store_numbers(form, form->bits, to, q);
    }
    if (form->bits != 4 && form->bits != 8)
        qc_avx2_codes_pack(form->bits, bytes, n, codes);
    *ee = qc_wide_fold(ee_sum);
    *xx = qc_wide_fold(xx_sum);
    return qc_wide_largest(largest);
}

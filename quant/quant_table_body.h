/* The table QC_QUANT_TABLE: what quant_avx2.c and quant_avx512.c have in common. They define the
 * operations on vectors, and the loops around those are here. It has no include guard, because each
 * of them includes it once.
 *
 * This file has the work that is bound by memory: dequantization, casts and double quantization.
 * The scalar code does the rest of a run that is shorter than sixteen elements. NF4 computes the 16
 * possible values of a block once, and overflow is looked for in that table too; a block with one
 * is redone by the scalar code, which knows the first index. */

/* Notes an overflow; only the first one counts. */
QC_INLINE void note_overflow(uint64_t *first_overflow, uint64_t index)
{
    if (*first_overflow == UINT64_MAX)
        *first_overflow = index;
}

/* lanes has a bit for each of 16. Of a wider type gcc 12 may compare all 32 bits of a place to
 * which it has stored a mask register of 16. */
QC_INLINE void note_lanes(uint64_t *first_overflow, uint16_t lanes, uint64_t i)
{
    if (__builtin_expect(lanes != 0, 0))
        note_overflow(first_overflow, i + (unsigned)__builtin_ctz(lanes));
}

/* Notes what the scalar code reports for elements from `first` on. */
QC_INLINE void note_scalar(uint64_t *first_overflow, uint64_t overflow, uint64_t first)
{
    if (overflow != UINT64_MAX)
        note_overflow(first_overflow, first + overflow);
}

/* ---- NF4 ------------------------------------------------------------------------------------- */

QC_INLINE void nf4_dequantize_to(const uint8_t *codes, const float *absmax, const float *code_map,
                                 uint64_t n, uint32_t block_elems, void *dst, qc_dtype dtype,
                                 uint64_t *first_overflow)
{
    const qc_wide map = qc_wide_load(code_map);
    const uint64_t element = qc_element_bytes(dtype);
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += block_elems, k++) {
        const uint64_t count = qc_min_u64(n - first, block_elems);
        unsigned char *out = (unsigned char *)dst + first * element;
        const qc_wide values = qc_wide_mul(map, qc_wide_all(absmax[k]));
        if (count < block_elems || overflows(values, dtype)) {
            uint64_t overflow;
            qc_quant_ops_scalar.nf4_dequantize(codes + first / 2, absmax + k, code_map, count,
                                               block_elems, out, dtype, &overflow);
            note_scalar(first_overflow, overflow, first);
        } else if (dtype == QC_DTYPE_F32) {
            nf4_to_f32(codes + first / 2, count, values, 0, out);
        } else {
            nf4_to_half(codes + first / 2, count, to_half(values, dtype), 0, out);
        }
    }
}

static void nf4_dequantize(const uint8_t *codes, const float *absmax, const float *code_map,
                           uint64_t n, uint32_t block_elems, void *dst, qc_dtype dtype,
                           uint64_t *overflow)
{
    if (dtype == QC_DTYPE_F32)
        nf4_dequantize_to(codes, absmax, code_map, n, block_elems, dst, QC_DTYPE_F32, overflow);
    else if (dtype == QC_DTYPE_F16)
        nf4_dequantize_to(codes, absmax, code_map, n, block_elems, dst, QC_DTYPE_F16, overflow);
    else
        nf4_dequantize_to(codes, absmax, code_map, n, block_elems, dst, QC_DTYPE_BF16, overflow);
}

/* ---- int8 ------------------------------------------------------------------------------------ */

/* Makes dst[i] = (code * a) * b for n elements from `first` on; one of a and b is the scale. */
QC_INLINE void int8_dequantize_run(const int8_t *codes, uint64_t first, uint64_t n,
                                   const float *scale, int rows, void *dst, qc_dtype dtype,
                                   uint64_t *first_overflow)
{
    const qc_wide a = qc_wide_all(rows ? *scale : QC_INT8_STEP);
    const qc_wide b = qc_wide_all(rows ? QC_INT8_STEP : *scale);
    const uint64_t end = first + n;
    uint64_t i = first;
    for (; i + 16 <= end; i += 16) {
        qc_wide x = qc_wide_mul(qc_wide_mul(qc_wide_of_int8(codes + i), a), b);
        store16(x, dst, dtype, i);
        note_lanes(first_overflow, overflows(x, dtype), i);
    }
    if (i == end)
        return;
    uint64_t overflow;
    unsigned char *out = (unsigned char *)dst + i * qc_element_bytes(dtype);
    if (rows)
        qc_quant_ops_scalar.int8_rows_dequantize(codes + i, scale, 1, end - i, out, dtype,
                                                 &overflow);
    else
        qc_quant_ops_scalar.int8_blocks_dequantize(codes + i, scale, end - i, QC_BLOCK_DEFAULT, out,
                                                   dtype, &overflow);
    note_scalar(first_overflow, overflow, i);
}

QC_INLINE void int8_dequantize_to(const int8_t *codes, const float *scales, uint64_t n,
                                  uint64_t each, int rows, void *dst, qc_dtype dtype,
                                  uint64_t *first_overflow)
{
    *first_overflow = UINT64_MAX;
    for (uint64_t first = 0, k = 0; first < n; first += each, k++) {
        const uint64_t count = qc_min_u64(n - first, each);
        int8_dequantize_run(codes, first, count, scales + k, rows, dst, dtype, first_overflow);
    }
}

QC_INLINE void int8_dequantize(const int8_t *codes, const float *scales, uint64_t n, uint64_t each,
                               int rows, void *dst, qc_dtype dtype, uint64_t *overflow)
{
    if (dtype == QC_DTYPE_F32)
        int8_dequantize_to(codes, scales, n, each, rows, dst, QC_DTYPE_F32, overflow);
    else if (dtype == QC_DTYPE_F16)
        int8_dequantize_to(codes, scales, n, each, rows, dst, QC_DTYPE_F16, overflow);
    else
        int8_dequantize_to(codes, scales, n, each, rows, dst, QC_DTYPE_BF16, overflow);
}

static void int8_rows_dequantize(const int8_t *codes, const float *scb, uint64_t rows,
                                 uint64_t cols, void *dst, qc_dtype dtype, uint64_t *overflow)
{
    int8_dequantize(codes, scb, rows * cols, cols, 1, dst, dtype, overflow);
}

static void int8_blocks_dequantize(const int8_t *codes, const float *absmax, uint64_t n,
                                   uint32_t block_elems, void *dst, qc_dtype dtype,
                                   uint64_t *overflow)
{
    int8_dequantize(codes, absmax, n, block_elems, 0, dst, dtype, overflow);
}

/* ---- integers -------------------------------------------------------------------------------- */

/* Dequantizes the group of 4-bit codes that starts at element `first`: its 16 values are a table,
 * as those of NF4. */
QC_INLINE void int4_dequantize_group(const qc_int_codes *how, const uint8_t *codes,
                                     const float *scale, uint64_t group, void *dst, qc_dtype dtype,
                                     uint64_t first, uint64_t *first_overflow)
{
    static const float numbers[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const qc_wide values = qc_wide_mul(qc_wide_load(numbers), qc_wide_all(*scale));
    const uint64_t element = qc_element_bytes(dtype), whole = group / 32 * 32;
    unsigned char *out = (unsigned char *)dst + first * element;
    const uint64_t from = overflows(values, dtype) ? 0 : whole;
    codes += first / 2;
    if (from > 0 && dtype == QC_DTYPE_F32)
        nf4_to_f32(codes, whole, values, 1, out);
    else if (from > 0)
        nf4_to_half(codes, whole, to_half(values, dtype), 1, out);
    if (from < group) {
        uint64_t overflow;
        qc_int_dequantize_scalar(how, codes + from / 2, scale, group - from, group - from,
                                 out + from * element, dtype, &overflow);
        note_scalar(first_overflow, overflow, first + from);
    }
}

QC_INLINE void int8_dequantize_group(const qc_int_codes *how, const uint8_t *codes,
                                     const float *scale, uint64_t group, void *dst, qc_dtype dtype,
                                     uint64_t first, uint64_t *first_overflow)
{
    const qc_wide by = qc_wide_all(*scale);
    const uint64_t end = first + group;
    uint64_t i = first;
    for (; i + 16 <= end; i += 16) {
        qc_wide q =
            how->bias ? qc_wide_of_biased(codes + i) : qc_wide_of_int8((const int8_t *)codes + i);
        qc_wide x = qc_wide_mul(q, by);
        store16(x, dst, dtype, i);
        note_lanes(first_overflow, overflows(x, dtype), i);
    }
    if (i < end) {
        uint64_t overflow;
        qc_int_dequantize_scalar(how, codes + i, scale, end - i, end - i,
                                 (unsigned char *)dst + i * qc_element_bytes(dtype), dtype,
                                 &overflow);
        note_scalar(first_overflow, overflow, i);
    }
}

QC_INLINE void int_dequantize_to(const qc_int_codes *how, const void *codes, const float *scales,
                                 uint64_t n, uint64_t group, void *dst, qc_dtype dtype,
                                 uint64_t *overflow)
{
    *overflow = UINT64_MAX;
    for (uint64_t first = 0; first < n; first += group, scales++)
        if (how->bits == 4)
            int4_dequantize_group(how, codes, scales, group, dst, dtype, first, overflow);
        else
            int8_dequantize_group(how, codes, scales, group, dst, dtype, first, overflow);
}

static void int_dequantize(const qc_int_codes *how, const void *codes, const float *scales,
                           uint64_t n, uint64_t group, void *dst, qc_dtype dtype,
                           uint64_t *overflow)
{
    if (dtype == QC_DTYPE_F32)
        int_dequantize_to(how, codes, scales, n, group, dst, QC_DTYPE_F32, overflow);
    else if (dtype == QC_DTYPE_F16)
        int_dequantize_to(how, codes, scales, n, group, dst, QC_DTYPE_F16, overflow);
    else
        int_dequantize_to(how, codes, scales, n, group, dst, QC_DTYPE_BF16, overflow);
}

/* ---- casts ----------------------------------------------------------------------------------- */

QC_INLINE void cast_to(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                       uint64_t *first_overflow)
{
    uint64_t i = 0;
    *first_overflow = UINT64_MAX;
    for (; i + 16 <= n; i += 16) {
        qc_wide x = widen_quiet(src, from, i);
        store16(x, dst, to, i);
        note_lanes(first_overflow,
                   from == QC_DTYPE_F64 ? doubles_overflow(src, i) : overflows(x, to), i);
    }
    if (i < n) {
        uint64_t overflow;
        qc_quant_ops_scalar.cast((const unsigned char *)src + i * qc_element_bytes(from), from,
                                 n - i, (unsigned char *)dst + i * qc_element_bytes(to), to,
                                 &overflow);
        note_scalar(first_overflow, overflow, i);
    }
}

QC_INLINE void cast_from(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                         uint64_t *first_overflow)
{
    if (to == QC_DTYPE_F64)
        cast_to(src, from, n, dst, QC_DTYPE_F64, first_overflow);
    else if (to == QC_DTYPE_F32)
        cast_to(src, from, n, dst, QC_DTYPE_F32, first_overflow);
    else if (to == QC_DTYPE_F16)
        cast_to(src, from, n, dst, QC_DTYPE_F16, first_overflow);
    else
        cast_to(src, from, n, dst, QC_DTYPE_BF16, first_overflow);
}

/* The scalar code does copies, and the rare F64 to a 16-bit type, which is rounded once. */
static void cast(const void *src, qc_dtype from, uint64_t n, void *dst, qc_dtype to,
                 uint64_t *first_overflow)
{
    if (from == to || (from == QC_DTYPE_F64 && to != QC_DTYPE_F32))
        qc_quant_ops_scalar.cast(src, from, n, dst, to, first_overflow);
    else if (from == QC_DTYPE_F64)
        cast_to(src, QC_DTYPE_F64, n, dst, QC_DTYPE_F32, first_overflow);
    else if (from == QC_DTYPE_F32)
        cast_from(src, QC_DTYPE_F32, n, dst, to, first_overflow);
    else if (from == QC_DTYPE_F16)
        cast_from(src, QC_DTYPE_F16, n, dst, to, first_overflow);
    else
        cast_from(src, QC_DTYPE_BF16, n, dst, to, first_overflow);
}

/* ---- double quantization --------------------------------------------------------------------- */

static void nested_quantize(const float *absmax, uint64_t n, float offset, uint8_t *codes,
                            float *nested_absmax)
{
    const qc_simd_tables *tables = qc_simd_tables_get();
    const qc_wide shift = qc_wide_all(offset);
    for (uint64_t first = 0, k = 0; first < n; first += QC_NESTED_BLOCK, k++) {
        const float *in = absmax + first;
        const uint64_t count = qc_min_u64(n - first, QC_NESTED_BLOCK);
        qc_wide_int most = qc_wide_int_all(0);
        for (unsigned i = 0; count == QC_NESTED_BLOCK && i < QC_NESTED_BLOCK; i += 16)
            most = qc_wide_larger_bits(most, qc_wide_sub(qc_wide_load(in + i), shift));
        const float largest = qc_f32_of_bits(qc_wide_largest_bits(most));
        if (!(largest >= QC_TINY_ABSMAX && largest <= 0x1p125f)) { /* a short group has 0 */
            qc_quant_ops_scalar.nested_quantize(in, count, offset, codes + first,
                                                nested_absmax + k);
            continue;
        }
        nested_absmax[k] = largest;
        const qc_wide inv = qc_wide_all(1.0f / largest);
        for (unsigned i = 0; i < QC_NESTED_BLOCK; i += 16) {
            qc_wide d = qc_wide_sub(qc_wide_load(in + i), shift);
            store_nested_codes(qc_wide_mul(d, inv), tables, codes + first + i);
        }
    }
}

static void nested_dequantize(const uint8_t *codes, const float *nested_absmax, const float *map,
                              uint64_t n, uint32_t nested_block, float offset, float *absmax)
{
    const qc_wide shift = qc_wide_all(offset);
    for (uint64_t first = 0, k = 0; first < n; first += nested_block, k++) {
        const uint64_t end = n - first < nested_block ? n : first + nested_block;
        const qc_wide scale = qc_wide_all(nested_absmax[k]);
        uint64_t i = first;
        for (; i + 16 <= end; i += 16)
            qc_wide_store(absmax + i,
                          qc_wide_add(qc_wide_mul(look_up(map, codes + i), scale), shift));
        for (; i < end; i++)
            absmax[i] = map[codes[i]] * nested_absmax[k] + offset;
    }
}

const qc_quant_ops QC_QUANT_TABLE = {
    .isa = QC_QUANT_ISA,
    .nf4_quantize = QC_QUANT_NAME(nf4_quantize),
    .nf4_dequantize = nf4_dequantize,
    .nested_quantize = nested_quantize,
    .nested_dequantize = nested_dequantize,
    .int8_rows_quantize = int8_rows_quantize,
    .int8_rows_dequantize = int8_rows_dequantize,
    .int8_blocks_quantize = QC_QUANT_NAME(int8_blocks_quantize),
    .int8_blocks_dequantize = int8_blocks_dequantize,
    .int_quantize = int_quantize,
    .int_dequantize = int_dequantize,
    .cast = cast,
};

#include "quant/quant_form.h"

#include "quant/quant_internal.h"
#include "quant/quant_pack.h"

#include <string.h>

static void quantize_nf4(const qc_quant_ops *quant, const qc_form *form, const void *src,
                         qc_dtype dtype, uint64_t n, const qc_form_out *out, qc_piece_sums *sums)
{
    quant->nf4_quantize(src, dtype, n, form->block_elems, out->codes, out->absmax,
                        out->block_errors, sums);
}

static void dequantize_nf4(const qc_quant_ops *quant, const qc_form *form, const void *codes,
                           const float *scales, uint64_t n, void *dst, qc_dtype dst_dtype,
                           uint64_t *first_overflow)
{
    quant->nf4_dequantize(codes, scales, form->code_map ? form->code_map : qc_nf4_code, n,
                          form->block_elems, dst, dst_dtype, first_overflow);
}

static void quantize_rows(const qc_quant_ops *quant, const qc_form *form, const void *src,
                          qc_dtype dtype, uint64_t n, const qc_form_out *out, qc_piece_sums *sums)
{
    quant->int8_rows_quantize(src, dtype, form->cols ? n / form->cols : 0, form->cols, out->codes,
                              out->absmax, sums);
}

static void dequantize_rows(const qc_quant_ops *quant, const qc_form *form, const void *codes,
                            const float *scales, uint64_t n, void *dst, qc_dtype dst_dtype,
                            uint64_t *first_overflow)
{
    quant->int8_rows_dequantize(codes, scales, form->cols ? n / form->cols : 0, form->cols, dst,
                                dst_dtype, first_overflow);
}

static void quantize_blocks(const qc_quant_ops *quant, const qc_form *form, const void *src,
                            qc_dtype dtype, uint64_t n, const qc_form_out *out, qc_piece_sums *sums)
{
    quant->int8_blocks_quantize(src, dtype, n, form->block_elems, out->codes, out->absmax,
                                out->block_errors, sums);
}

static void dequantize_blocks(const qc_quant_ops *quant, const qc_form *form, const void *codes,
                              const float *scales, uint64_t n, void *dst, qc_dtype dst_dtype,
                              uint64_t *first_overflow)
{
    quant->int8_blocks_dequantize(codes, scales, n, form->block_elems, dst, dst_dtype,
                                  first_overflow);
}

/* W2A16 to W8A16 and W8A8 differ in the width of a code and in how it is stored. */
static qc_int_codes int_codes(const qc_form *form)
{
    return (qc_int_codes){.bits = form->ops->bits,
                          .bias = (unsigned)form->ops->zero,
                          .scale_dtype = form->scale_dtype,
                          .stride = qc_form_has_gaps(form) ? qc_form_row_bytes(form) : 0};
}

static void quantize_int(const qc_quant_ops *quant, const qc_form *form, const void *src,
                         qc_dtype dtype, uint64_t n, const qc_form_out *out, qc_piece_sums *sums)
{
    const qc_int_codes how = int_codes(form);
    quant->int_quantize(&how, src, dtype, n, qc_form_scale_elems(form), out->codes, out->absmax,
                        sums);
}

static void dequantize_int(const qc_quant_ops *quant, const qc_form *form, const void *codes,
                           const float *scales, uint64_t n, void *dst, qc_dtype dst_dtype,
                           uint64_t *first_overflow)
{
    const qc_int_codes how = int_codes(form);
    quant->int_dequantize(&how, codes, scales, n, qc_form_scale_elems(form), dst, dst_dtype,
                          first_overflow);
}

const qc_form_ops qc_form_nf4 = {.kind = QC_FORM_NF4,
                                 .name = "nf4",
                                 .bits = 4,
                                 .signed_scales = 1,
                                 .span = 1.0f,
                                 .step = 1.0f,
                                 .zero = QC_NF4_ZERO,
                                 .quantize = quantize_nf4,
                                 .dequantize = dequantize_nf4};
const qc_form_ops qc_form_int8_rows = {.kind = QC_FORM_INT8_ROWS,
                                       .name = "int8",
                                       .bits = 8,
                                       .lowest = -127,
                                       .highest = 127,
                                       .span = 127.0f,
                                       .step = QC_INT8_STEP,
                                       .step_last = 1,
                                       .quantize = quantize_rows,
                                       .dequantize = dequantize_rows};
const qc_form_ops qc_form_int8_blocks = {.kind = QC_FORM_INT8_BLOCKS,
                                         .name = "int8-blocks",
                                         .bits = 8,
                                         .lowest = -127,
                                         .highest = 127,
                                         .span = 127.0f,
                                         .step = QC_INT8_STEP,
                                         .quantize = quantize_blocks,
                                         .dequantize = dequantize_blocks};

/* Integers of `b` bits from `low` on, packed to words. Their scales have a sign where the lowest
 * number has no mirror. */
#define PACKED_FORM(b, low)                                                                        \
    const qc_form_ops qc_form_w##b##a16 = {.kind = QC_FORM_W##b##A16,                              \
                                           .name = "w" #b "a16",                                   \
                                           .bits = (b),                                            \
                                           .low_first = 1,                                         \
                                           .words = (b) % 4 != 0,                                  \
                                           .integer = 1,                                           \
                                           .signed_scales = (b) < 8,                               \
                                           .lowest = (low),                                        \
                                           .highest = (1 << ((b)-1)) - 1,                          \
                                           .span = 1.0f,                                           \
                                           .step = 1.0f,                                           \
                                           .zero = 1 << ((b)-1),                                   \
                                           .quantize = quantize_int,                               \
                                           .dequantize = dequantize_int}
PACKED_FORM(2, -2);
PACKED_FORM(3, -4);
PACKED_FORM(4, -8);
PACKED_FORM(5, -16);
PACKED_FORM(6, -32);
PACKED_FORM(7, -64);
PACKED_FORM(8, -127);

const qc_form_ops qc_form_w8a8 = {.kind = QC_FORM_W8A8,
                                  .name = "w8a8",
                                  .bits = 8,
                                  .integer = 1,
                                  .lowest = -127,
                                  .highest = 127,
                                  .span = 1.0f,
                                  .step = 1.0f,
                                  .quantize = quantize_int,
                                  .dequantize = dequantize_int};

const qc_form_ops *qc_form_ops_of(qc_form_kind kind)
{
    static const qc_form_ops *const all[] = {
        &qc_form_nf4,   &qc_form_int8_rows, &qc_form_int8_blocks, &qc_form_w2a16,
        &qc_form_w3a16, &qc_form_w4a16,     &qc_form_w5a16,       &qc_form_w6a16,
        &qc_form_w7a16, &qc_form_w8a16,     &qc_form_w8a8};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i]->kind == kind)
            return all[i];
    return NULL;
}

void qc_form_put_row(const qc_form *form, const uint8_t *codes, void *to)
{
    const uint64_t bytes = qc_code_bytes(form->ops->bits, form->cols);
    qc_codes_pack(form->ops->bits, codes, form->cols, to);
    memset((unsigned char *)to + bytes, 0, (size_t)(qc_form_row_bytes(form) - bytes));
}

void qc_form_put_zeros(const qc_form_ops *ops, void *codes, uint64_t n)
{
    const uint64_t bytes = qc_code_bytes(ops->bits, n);
    unsigned char eight[8];
    for (unsigned i = 0; i < 8; i++)
        qc_form_put_code(ops, eight, i, ops->zero);
    for (uint64_t i = 0; i < bytes; i++)
        ((unsigned char *)codes)[i] = eight[i % ops->bits];
}

uint64_t qc_form_scales(const qc_form *form, uint64_t n)
{
    const uint64_t each = qc_form_scale_elems(form);
    return each ? qc_ceil_div_u64(n, each) : 0;
}

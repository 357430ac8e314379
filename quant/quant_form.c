#include "quant/quant_form.h"

#include "quant/quant_internal.h"

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

static float nf4_value(int code, float scale)
{
    return qc_nf4_code[code] * scale;
}

static float nf4_unit(int code)
{
    return qc_nf4_code[code];
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

static float row_value(int code, float scale)
{
    return ((float)code * scale) * QC_INT8_STEP;
}

static float int8_unit(int code)
{
    return (float)code * QC_INT8_STEP;
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

static float block_value(int code, float scale)
{
    return int8_unit(code) * scale;
}

/* W4A16, W8A16 and W8A8 differ in the width of a code and in how it is stored. */
static qc_int_codes int_codes(const qc_form *form)
{
    const unsigned bits = form->ops->bits;
    return (qc_int_codes){.bits = bits,
                          .bias = form->ops->kind == QC_FORM_W8A8 ? 0 : 1u << (bits - 1),
                          .scale_dtype = form->scale_dtype};
}

static uint64_t int_group(const qc_form *form)
{
    return qc_form_by_rows(form) ? form->cols : form->block_elems;
}

static void quantize_int(const qc_quant_ops *quant, const qc_form *form, const void *src,
                         qc_dtype dtype, uint64_t n, const qc_form_out *out, qc_piece_sums *sums)
{
    const qc_int_codes how = int_codes(form);
    quant->int_quantize(&how, src, dtype, n, int_group(form), out->codes, out->absmax, sums);
}

static void dequantize_int(const qc_quant_ops *quant, const qc_form *form, const void *codes,
                           const float *scales, uint64_t n, void *dst, qc_dtype dst_dtype,
                           uint64_t *first_overflow)
{
    const qc_int_codes how = int_codes(form);
    quant->int_dequantize(&how, codes, scales, n, int_group(form), dst, dst_dtype, first_overflow);
}

static float w4_unit(int code)
{
    return (float)(code - 8);
}

static float w4_value(int code, float scale)
{
    return w4_unit(code) * scale;
}

static float w8a16_unit(int code)
{
    return (float)(code - 128);
}

static float w8a16_value(int code, float scale)
{
    return w8a16_unit(code) * scale;
}

static float w8a8_unit(int code)
{
    return (float)code;
}

static float w8a8_value(int code, float scale)
{
    return w8a8_unit(code) * scale;
}

const qc_form_ops qc_form_nf4 = {.kind = QC_FORM_NF4,
                                 .name = "nf4",
                                 .bits = 4,
                                 .searchable = 1,
                                 .signed_scales = 1,
                                 .span = 1.0f,
                                 .step = 1.0f,
                                 .zero = QC_NF4_ZERO,
                                 .quantize = quantize_nf4,
                                 .dequantize = dequantize_nf4,
                                 .value = nf4_value,
                                 .unit = nf4_unit};
const qc_form_ops qc_form_int8_rows = {.kind = QC_FORM_INT8_ROWS,
                                       .name = "int8",
                                       .bits = 8,
                                       .searchable = 1,
                                       .lowest = -127,
                                       .highest = 127,
                                       .span = 127.0f,
                                       .step = QC_INT8_STEP,
                                       .step_last = 1,
                                       .quantize = quantize_rows,
                                       .dequantize = dequantize_rows,
                                       .value = row_value,
                                       .unit = int8_unit};
const qc_form_ops qc_form_int8_blocks = {.kind = QC_FORM_INT8_BLOCKS,
                                         .name = "int8-blocks",
                                         .bits = 8,
                                         .searchable = 1,
                                         .lowest = -127,
                                         .highest = 127,
                                         .span = 127.0f,
                                         .step = QC_INT8_STEP,
                                         .quantize = quantize_blocks,
                                         .dequantize = dequantize_blocks,
                                         .value = block_value,
                                         .unit = int8_unit};

const qc_form_ops qc_form_w4a16 = {.kind = QC_FORM_W4A16,
                                   .name = "w4a16",
                                   .bits = 4,
                                   .low_first = 1,
                                   .integer = 1,
                                   .searchable = 1,
                                   .signed_scales = 1,
                                   .lowest = -8,
                                   .highest = 7,
                                   .span = 1.0f,
                                   .step = 1.0f,
                                   .zero = 8,
                                   .quantize = quantize_int,
                                   .dequantize = dequantize_int,
                                   .value = w4_value,
                                   .unit = w4_unit};
const qc_form_ops qc_form_w8a16 = {.kind = QC_FORM_W8A16,
                                   .name = "w8a16",
                                   .bits = 8,
                                   .integer = 1,
                                   .searchable = 1,
                                   .lowest = -127,
                                   .highest = 127,
                                   .span = 1.0f,
                                   .step = 1.0f,
                                   .zero = 128,
                                   .quantize = quantize_int,
                                   .dequantize = dequantize_int,
                                   .value = w8a16_value,
                                   .unit = w8a16_unit};
const qc_form_ops qc_form_w8a8 = {.kind = QC_FORM_W8A8,
                                  .name = "w8a8",
                                  .bits = 8,
                                  .integer = 1,
                                  .searchable = 1,
                                  .lowest = -127,
                                  .highest = 127,
                                  .span = 1.0f,
                                  .step = 1.0f,
                                  .quantize = quantize_int,
                                  .dequantize = dequantize_int,
                                  .value = w8a8_value,
                                  .unit = w8a8_unit};

const qc_form_ops *qc_form_ops_of(qc_form_kind kind)
{
    switch (kind) {
    case QC_FORM_NF4:
        return &qc_form_nf4;
    case QC_FORM_INT8_ROWS:
        return &qc_form_int8_rows;
    case QC_FORM_INT8_BLOCKS:
        return &qc_form_int8_blocks;
    case QC_FORM_W4A16:
        return &qc_form_w4a16;
    case QC_FORM_W8A16:
        return &qc_form_w8a16;
    case QC_FORM_W8A8:
        return &qc_form_w8a8;
    }
    return NULL;
}

uint64_t qc_form_scales(const qc_form *form, uint64_t n)
{
    const uint64_t each = qc_form_by_rows(form) ? form->cols : form->block_elems;
    return each ? qc_ceil_div_u64(n, each) : 0;
}

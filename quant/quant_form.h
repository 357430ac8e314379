/* The operations on quantized weights, one set for each kind: for all that make, read, search,
 * calibrate and check them. What the values of codes are: quant/quant_weights.h. */
#ifndef QC_QUANT_QUANT_FORM_H
#define QC_QUANT_QUANT_FORM_H

#include "base/checked.h"
#include "quant/quant_ops.h"
#include "quant/quant_weights.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What quantizing elements leaves; the arrays are the caller's. */
typedef struct {
    void *codes;
    float *absmax;                /* scales of blocks or of rows */
    qc_block_error *block_errors; /* error sums of blocks; NULL: none are made */
} qc_form_out;

struct qc_form_ops {
    qc_form_kind kind;
    const char *name;
    unsigned bits; /* bits of a code */
    int low_first; /* a code of 4 bits with an even index is in the low nibble, else the high */
    int words;     /* each row begins with a 32-bit word, whether or not its codes fill words; of 4
                          and 8 bits only rows that do are made (qc_scheme_obstacle) */
    int integer;   /* scales are those of a dtype (qc_int_round_scale), never nested, and the
                          sums that quantize leaves are final */
    int signed_scales; /* searched scales may be negative */

    /* These describe codes of evenly spaced values (0 .. 0 for NF4, whose values are a table): the
     * code of number q, lowest <= q <= highest, is q + zero and stands for (q * step) * scale. The
     * number nearest to x is x * ((1.0f / scale) * span), rounded half to even. */
    int lowest, highest;
    float span, step; /* 1 for NF4 */
    int step_last;    /* a value is (q * scale) * step */
    int zero;         /* the code of 0, of NF4 as well */

    /* Quantizes n elements of src, which are whole rows or begin with a block, by the rules of
     * quant_ops.h. */
    void (*quantize)(const qc_quant_ops *quant, const qc_form *form, const void *src,
                     qc_dtype dtype, uint64_t n, const qc_form_out *out, qc_piece_sums *sums);
    /* dst [n] of dst_dtype; scales as a reader has them. *first_overflow as in quant_ops.h. */
    void (*dequantize)(const qc_quant_ops *quant, const qc_form *form, const void *codes,
                       const float *scales, uint64_t n, void *dst, qc_dtype dst_dtype,
                       uint64_t *first_overflow);
};

extern const qc_form_ops qc_form_nf4, qc_form_int8_rows, qc_form_int8_blocks;
extern const qc_form_ops qc_form_w2a16, qc_form_w3a16, qc_form_w4a16, qc_form_w5a16, qc_form_w6a16;
extern const qc_form_ops qc_form_w7a16, qc_form_w8a16, qc_form_w8a8;

static inline int qc_form_by_rows(const qc_form *form)
{
    return form->block_elems == 0;
}

/* Returns how many elements share a scale. */
static inline uint64_t qc_form_scale_elems(const qc_form *form)
{
    return form->block_elems ? form->block_elems : form->cols;
}

/* Returns how many bytes the codes of a row take. */
static inline uint64_t qc_form_row_bytes(const qc_form *form)
{
    const uint64_t bytes = qc_code_bytes(form->ops->bits, form->cols);
    return form->ops->words ? (bytes + 3) / 4 * 4 : bytes;
}

/* Returns whether rows end with bits that no code uses: their codes do not fill their words. */
static inline int qc_form_has_gaps(const qc_form *form)
{
    return form->ops->words && form->cols % 32 * form->ops->bits % 32 != 0;
}

/* Returns how many bytes the first n codes of a weight take, with the gaps behind its rows. Code n
 * begins with that byte if it begins a row or if n, or with gaps its column, is a multiple of 8. */
static inline uint64_t qc_form_code_bytes(const qc_form *form, uint64_t n)
{
    const unsigned bits = form->ops->bits;
    if (!qc_form_has_gaps(form))
        return qc_code_bytes(bits, n);
    return n / form->cols * qc_form_row_bytes(form) + qc_code_bytes(bits, n % form->cols);
}

/* Undoes qc_form_code_bytes: returns how many codes these bytes hold. */
static inline uint64_t qc_form_code_elems(const qc_form *form, uint64_t bytes)
{
    const unsigned bits = form->ops->bits;
    const uint64_t row = qc_form_has_gaps(form) ? qc_form_row_bytes(form) : UINT64_MAX;
    const uint64_t inside = bytes % row / bits * 8 + bytes % row % bits * 8 / bits;
    return bytes / row * form->cols + qc_min_u64(inside, row < UINT64_MAX ? form->cols : inside);
}

/* Returns whether the values of codes are a table's (that of NF4) and not evenly spaced. */
static inline int qc_form_is_table(const qc_form_ops *ops)
{
    return ops->lowest == ops->highest;
}

/* Returns the value that a code, as it is stored (I8 is signed, all others are not), has with a
 * scale of 1. */
static inline float qc_form_unit(const qc_form_ops *ops, int code)
{
    return qc_form_is_table(ops) ? qc_nf4_code[code] : (float)(code - ops->zero) * ops->step;
}

static inline float qc_form_value(const qc_form_ops *ops, int code, float scale)
{
    if (ops->step_last)
        return ((float)(code - ops->zero) * scale) * ops->step;
    return qc_form_unit(ops, code) * scale;
}

/* Returns a code that has a byte of its own, as qc_form_value takes it. */
static inline int qc_form_code_of_byte(const qc_form_ops *ops, unsigned char byte)
{
    const int most = qc_form_is_table(ops) ? 15 : ops->highest + ops->zero;
    return byte - (byte > most ? 256 : 0);
}

/* Returns code i of an array without gaps, as qc_form_value takes it. */
static inline int qc_form_code_at(const qc_form_ops *ops, const void *codes, uint64_t i)
{
    const unsigned char *from = (const unsigned char *)codes;
    const unsigned bits = ops->bits, at = (unsigned)(i % 8) * bits;
    if (bits == 8)
        return qc_form_code_of_byte(ops, from[i]);
    if (!ops->low_first)
        return from[i / 2] >> (i % 2 ? 0 : 4) & 15;
    from += i / 8 * bits + at / 8;
    const unsigned most = (1u << bits) - 1;
    const unsigned two = from[0] | (at % 8 + bits > 8 ? (unsigned)from[1] << 8 : 0u);
    return (int)(two >> at % 8 & most);
}

/* Writes code i; those that share a byte are written in order, because the first one clears it. */
static inline void qc_form_put_code(const qc_form_ops *ops, void *codes, uint64_t i, int code)
{
    unsigned char *to = (unsigned char *)codes;
    const unsigned bits = ops->bits, at = (unsigned)(i % 8) * bits;
    if (bits == 8) {
        to[i] = (unsigned char)code;
    } else if (!ops->low_first) {
        to[i / 2] = (unsigned char)((i % 2 ? to[i / 2] : 0) | code << (i % 2 ? 0 : 4));
    } else {
        to += i / 8 * bits + at / 8;
        to[0] = (unsigned char)((at % 8 ? to[0] : 0) | code << at % 8);
        if (at % 8 + bits > 8)
            to[1] = (unsigned char)(code >> (8 - at % 8));
    }
}

/* Writes a row of words (`words` of the form) with these codes, each in a byte. */
void qc_form_put_row(const qc_form *form, const uint8_t *codes, void *to);

/* Writes n codes of 0; the last byte of NF4 is full. */
void qc_form_put_zeros(const qc_form_ops *ops, void *codes, uint64_t n);

/* Returns the magnitude that the code furthest from 0 stands for where the scale is 1, but for
 * rounding. */
static inline float qc_form_reach(const qc_form_ops *ops)
{
    const int most = -ops->lowest > ops->highest ? -ops->lowest : ops->highest;
    return qc_form_is_table(ops) ? 1.0f : (float)most / ops->span;
}

/* Returns the scale nearest to s that an integer's dtype holds; s itself for forms that hold
 * any. */
static inline float qc_form_round_scale(const qc_form *form, float s)
{
    return form->ops->integer ? qc_int_round_scale(form->scale_dtype, s) : s;
}

/* Returns how many scales n elements have, before double quantization. */
uint64_t qc_form_scales(const qc_form *form, uint64_t n);

/* The scale of block b of weights in blocks. */
static inline float qc_weights_scale(const qc_weights *w, uint64_t b)
{
    if (w->absmax)
        return w->absmax[b];
    return w->nested_map[w->absmax_codes[b]] * w->nested_absmax[b / w->nested_block] +
           w->form.offset;
}

/* Row `row` of W as floats, exactly as dequantizing to F32 gives them. out: [cols]. */
void qc_weights_row(const qc_quant_ops *ops, const qc_weights *w, uint64_t row, float *out);

/* Gives elements [first, first + n) of a source as floats. */
typedef qc_status (*qc_read_floats_fn)(void *ctx, uint64_t first, uint64_t n, float *out,
                                       qc_error *err);

/* A tensor whose blocks are quantized, with the scales by which it will be read. */
typedef struct {
    const qc_quant_ops *quant;
    qc_form form;
    uint64_t n;
    const float *absmax;       /* scales the codes were made with */
    const float *absmax_final; /* scales a reader will use (the same array when there was no double
                                  quantization) */
    const qc_block_error *errors;
    qc_read_floats_fn read; /* called for the few blocks that can hold the largest error (branch and
                               bound over `peak`), n is at most block_elems */
    void *read_ctx;
} qc_finished_blocks;

/* Finishes the error of a tensor that is quantized by blocks. total: the sums of the whole tensor,
 * made with block errors.
 *
 * x' is the float that dequantizing to F32 gives, x the element as float, and |x - x'| is in
 * double. max_err and max_index are exact (lowest index on ties). rel_mse is sum_ee / sum_xx plus
 * the correction for absmax_final, which uses bfloat16 rc and cc: on weights it is off by less than
 * 1e-4 of rel_mse, and by at most 2^-7 where a few blocks dominate. Because y is a float, the
 * square root of rel_mse is off by up to 2^-22; where x' is subnormal, by its rounding as well.
 * Deterministic. Allocates nothing, needs 80 KiB of stack. Returns QC_OK, or what read returns, or
 * QC_ERR_CHECK when read gives other values than were quantized. */
QC_NODISCARD qc_status qc_block_error_finish(const qc_finished_blocks *b,
                                             const qc_piece_sums *total, qc_tensor_error *out,
                                             qc_error *err);

#ifdef __cplusplus
}
#endif
#endif

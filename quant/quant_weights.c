#include "quant/quant_weights.h"

#include "base/checked.h"
#include "base/workers.h"
#include "quant/piecework.h"
#include "quant/quant_form.h"
#include "quant/quant_internal.h"

#include <inttypes.h>
#include <string.h>

/* ---- values --------------------------------------------------------------------------------- */

#define SCALES_AT_ONCE 64u
#define PIECE_ELEMS    (UINT64_C(64) << 10) /* of a thread; half a second-level cache as floats */

/* The scales of blocks [first, first + n), n <= SCALES_AT_ONCE. Double quantized ones are rounded
 * twice, as in nested_dequantize. */
static const float *scales_of(const qc_weights *w, uint64_t first, uint64_t n, float *room)
{
    if (w->absmax)
        return w->absmax + first;
    for (uint64_t i = 0; i < n; i++)
        room[i] = qc_weights_scale(w, first + i);
    return room;
}

/* What is read, with which table, and to what. */
typedef struct {
    const qc_quant_ops *ops;
    const qc_weights *w;
    qc_dtype dtype;
} reading;

static const void *codes_at(const qc_weights *w, uint64_t i)
{
    return (const uint8_t *)w->codes + qc_form_code_bytes(&w->form, i);
}

/* Decodes elements [begin, begin + n) of the flattened W; begin is a multiple of the block. */
static void decode_blocks(const reading *r, uint64_t begin, uint64_t n, void *out)
{
    const qc_form *f = &r->w->form;
    const uint64_t step = (uint64_t)SCALES_AT_ONCE * f->block_elems;
    uint64_t overflow = 0;
    float room[SCALES_AT_ONCE];
    for (uint64_t at = 0; at < n; at += step) {
        const uint64_t count = qc_min_u64(n - at, step), first = begin + at;
        const float *scales =
            scales_of(r->w, first / f->block_elems, qc_form_scales(f, count), room);
        f->ops->dequantize(r->ops, f, codes_at(r->w, first), scales, count,
                           (unsigned char *)out + at * qc_element_bytes(r->dtype), r->dtype,
                           &overflow);
    }
}

/* Decodes rows [row, row + rows). */
static void decode_rows(const reading *r, uint64_t row, uint64_t rows, void *out)
{
    const qc_form *f = &r->w->form;
    uint64_t first = row * f->cols, n = rows * f->cols, overflow = 0;
    if (n == 0)
        return;
    if (qc_form_by_rows(f)) {
        f->ops->dequantize(r->ops, f, codes_at(r->w, first), r->w->absmax + row, n, out, r->dtype,
                           &overflow);
        return;
    }
    /* A block that began in an earlier row is decoded from its beginning. */
    const uint64_t before = first % f->block_elems, each = qc_element_bytes(r->dtype);
    if (before > 0) {
        unsigned char head[QC_BLOCK_MAX * sizeof(float)];
        const uint64_t part = qc_min_u64(f->block_elems - before, n);
        decode_blocks(r, first - before, before + part, head);
        memcpy(out, head + before * each, (size_t)(part * each));
        out = (unsigned char *)out + part * each;
        first += part;
        n -= part;
    }
    if (n > 0)
        decode_blocks(r, first, n, out);
}

void qc_weights_row(const qc_quant_ops *ops, const qc_weights *w, uint64_t row, float *out)
{
    const reading r = {ops, w, QC_DTYPE_F32};
    decode_rows(&r, row, 1, out);
}

typedef struct {
    reading r;
    uint64_t first, rows, step; /* step: rows of a piece */
    unsigned char *out;
} dequantizing;

static qc_status dequantize_piece(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const dequantizing *d = ctx;
    const uint64_t at = piece * d->step,
                   row_bytes = d->r.w->form.cols * qc_element_bytes(d->r.dtype);
    (void)thread;
    (void)err;
    decode_rows(&d->r, d->first + at, qc_min_u64(d->rows - at, d->step), d->out + at * row_bytes);
    return QC_OK;
}

qc_status qc_weights_dequantize(const qc_weights *w, uint64_t first, uint64_t rows, void *out,
                                qc_dtype dtype, unsigned threads, qc_error *err)
{
    qc_isa isa = QC_ISA_SCALAR;
    if (!w || !w->form.ops)
        QC_FAIL(err, QC_ERR_USAGE, "qc_weights_dequantize: the weight%s is NULL",
                w ? "'s form.ops" : "");
    if (dtype != QC_DTYPE_F32 && dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "values are F32, F16 or BF16, not %s",
                qc_dtype_name(dtype) ? qc_dtype_name(dtype) : "of an unknown dtype");
    if (first > w->rows || rows > w->rows - first)
        QC_FAIL(err, QC_ERR_USAGE,
                "rows %" PRIu64 " to %" PRIu64 " are not in a weight of %" PRIu64 " rows", first,
                qc_sat_add(first, rows), w->rows);
    if (rows == 0 || w->form.cols == 0)
        return QC_OK;
    if (!out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_weights_dequantize: out is NULL");
    QC_TRY(qc_threads_wanted(&threads, err));
    QC_TRY(qc_isa_select(&isa, err));
    dequantizing d = {.r = {qc_quant_ops_for(isa), w, dtype},
                      .first = first,
                      .rows = rows,
                      .step = qc_max_u64(PIECE_ELEMS / w->form.cols, 1),
                      .out = out};
    return qc_piecework(threads, qc_ceil_div_u64(rows, d.step), dequantize_piece, &d, err);
}

/* ---- untrusted descriptors ------------------------------------------------------------------ */

static qc_status check_scales(const qc_weights *w, uint64_t blocks, uint64_t scales,
                              uint64_t nested_scales, qc_error *err)
{
    if (scales != blocks)
        QC_FAIL(err, QC_ERR_SHAPE, "expected %" PRIu64 " scales, found %" PRIu64, blocks, scales);
    if (w->absmax || blocks == 0)
        return QC_OK;
    if (!w->absmax_codes || !w->nested_absmax || !w->nested_map)
        QC_FAIL(err, QC_ERR_SHAPE,
                "the weights have neither plain scales nor all arrays of double-quantized ones");
    uint64_t want = qc_ceil_div_u64(blocks, w->nested_block);
    if (nested_scales != want)
        QC_FAIL(err, QC_ERR_SHAPE, "expected %" PRIu64 " scales of scales, found %" PRIu64, want,
                nested_scales);
    return QC_OK;
}

static qc_status check_whole(const qc_weights *w, uint64_t whole, qc_error *err)
{
    if (w->rows == 0 || w->form.cols % whole == 0)
        return QC_OK;
    QC_FAIL(err, QC_ERR_SHAPE,
            "rows of weights in %s: expected whole groups of %" PRIu64 ", found %" PRIu64
            " columns",
            w->form.ops->name, whole, w->form.cols);
}

qc_status qc_weights_check_sizes(const qc_weights *w, int nested, uint64_t *blocks, qc_error *err)
{
    uint64_t elems = 0, bytes = 0;
    /* The size in bytes as floats must fit too, so that what is derived from it needs no check. */
    if (qc_mul_u64(w->rows, w->form.cols, &elems) || qc_mul_u64(elems, sizeof(double), &bytes))
        QC_FAIL(err, QC_ERR_SHAPE, "a weight of [%" PRIu64 ", %" PRIu64 "] has too many elements",
                w->rows, w->form.cols);
    if (!w->form.ops)
        QC_FAIL(err, QC_ERR_SHAPE, "the form of the weights is not known");
    if (w->form.ops->integer && w->form.block_elems)
        QC_TRY(check_whole(w, w->form.block_elems, err));
    *blocks = w->rows;
    if (w->form.ops == &qc_form_int8_rows || (w->form.ops->integer && !w->form.block_elems))
        return QC_OK;
    if (!qc_block_size_valid(w->form.block_elems))
        QC_FAIL(err, QC_ERR_SHAPE, "block size: expected a power of two from 32 to 4096, found %u",
                w->form.block_elems);
    *blocks = qc_ceil_div_u64(elems, w->form.block_elems);
    if (nested && (w->nested_block == 0 || (w->nested_block & (w->nested_block - 1)) != 0))
        QC_FAIL(err, QC_ERR_SHAPE, "nested block size: expected a power of two, found %u",
                w->nested_block);
    return QC_OK;
}

qc_status qc_weights_check(const qc_weights *w, uint64_t codes_bytes, uint64_t scales,
                           uint64_t nested_scales, qc_error *err)
{
    uint64_t blocks = 0;
    if (!w)
        QC_FAIL(err, QC_ERR_USAGE, "qc_weights_check: the weight is NULL");
    QC_TRY(qc_weights_check_sizes(w, !w->absmax, &blocks, err));
    if (w->form.ops->integer && !w->form.block_elems && !w->form.ops->words)
        QC_TRY(check_whole(w, 8 / w->form.ops->bits, err)); /* a row begins with a byte */
    const uint64_t elems = w->rows * w->form.cols, want = qc_form_code_bytes(&w->form, elems);
    if (codes_bytes != want)
        QC_FAIL(err, QC_ERR_SHAPE,
                "a weight of [%" PRIu64 ", %" PRIu64 "]: expected %" PRIu64
                " bytes of codes, found %" PRIu64,
                w->rows, w->form.cols, want, codes_bytes);
    if (elems > 0 && !w->codes)
        QC_FAIL(err, QC_ERR_SHAPE, "the weights have no codes");
    if (qc_form_by_rows(&w->form) && w->rows > 0 && !w->absmax)
        QC_FAIL(err, QC_ERR_SHAPE, "the weights have no scales for their rows");
    return check_scales(w, blocks, scales, nested_scales, err);
}

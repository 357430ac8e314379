#include "convert/model/coded_read.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/model/recipe_coded.h"
#include "quant/quant_decode.h"

#include <inttypes.h>

void qc_coded_scratch_deinit(qc_coded_scratch *s)
{
    qc_free(s->codes.data);
    qc_free(s->raw.data);
    qc_free(s->scales.data);
    qc_packed_stripe_deinit(&s->stripe);
    *s = (qc_coded_scratch){0};
}

uint64_t qc_coded_bytes(const qc_coded_weight *w, uint64_t n)
{
    return qc_code_bytes(qc_coded_bits(w), n);
}

static uint64_t columns_of(const qc_coded_weight *w)
{
    return w->dims[w->ndim - 1];
}

static qc_status refuse(const qc_checkpoint_tensor *t, const qc_coded_weight *w, uint64_t index,
                        qc_error *err)
{
    uint64_t row = index / columns_of(w), col = index % columns_of(w);
    if (w->ndim == 3)
        QC_FAIL(err, QC_ERR_NONFINITE,
                "tensor '%s': the weight of expert %" PRIu64 " at row %" PRIu64 ", column %" PRIu64
                " is not finite; --keep '%s' leaves the tensor as it is",
                t->name, row / w->dims[1], row % w->dims[1], col, qc_text_word_or(t->name, "NAME"));
    QC_FAIL(err, QC_ERR_NONFINITE,
            "tensor '%s': the weight at row %" PRIu64 ", column %" PRIu64
            " is not finite; --keep '%s' leaves the tensor as it is",
            t->name, row, col, qc_text_word_or(t->name, "NAME"));
}

static qc_status read_codes(const qc_coded_source *src, qc_coded_scratch *s, uint64_t offset,
                            uint64_t bytes, qc_error *err)
{
    QC_TRY(qc_buffer_room(&s->codes, bytes, 1, err));
    s->code_bytes = (size_t)bytes;
    return qc_checkpoint_read(src->model, src->cursor, src->t, offset, s->codes.data, s->code_bytes,
                              err);
}

static qc_status read_raw_scales(const qc_coded_source *src, qc_coded_scratch *s, uint64_t offset,
                                 uint64_t bytes, qc_error *err)
{
    QC_TRY(qc_buffer_room(&s->raw, bytes, 1, err));
    return qc_checkpoint_read(src->model, src->beside, &src->model->tensors[src->w->scales], offset,
                              s->raw.data, (size_t)bytes, err);
}

/* Reads `tile_rows` rows of tiles as floats into s->scales. */
static qc_status read_tile_scales(const qc_coded_source *src, qc_coded_scratch *s,
                                  uint64_t first_tile_row, uint64_t tile_rows, qc_error *err)
{
    const qc_dtype dtype = src->model->tensors[src->w->scales].dtype;
    const uint64_t across = src->w->tiles_across, each = qc_dtype_bits(dtype) / 8;
    const uint64_t n = tile_rows * across;
    uint64_t overflow = 0;
    QC_TRY(read_raw_scales(src, s, first_tile_row * across * each, n * each, err));
    QC_TRY(qc_buffer_room(&s->scales, n, sizeof(float), err));
    float *scales = s->scales.data;
    if (dtype == QC_DTYPE_F8_E8M0) {
        float table[256];
        qc_f8_table(dtype, table);
        for (uint64_t i = 0; i < n; i++)
            scales[i] = table[((const unsigned char *)s->raw.data)[i]];
        return QC_OK;
    }
    src->ops->cast(s->raw.data, dtype, n, scales, QC_DTYPE_F32, &overflow);
    return QC_OK;
}

static qc_status read_fp8(const qc_coded_source *src, qc_coded_scratch *s, uint64_t first,
                          uint64_t n, float *out, uint64_t *bad, qc_error *err)
{
    static const float one = 1.0f;
    const qc_coded_weight *w = src->w;
    uint64_t cols = columns_of(w);
    uint64_t top = first / cols / w->tile_rows, bottom = (first + n - 1) / cols / w->tile_rows;
    qc_tile_scales tiles = {cols, w->tile_rows, w->tile_cols, w->tiles_across, &one};
    if (!s->has_table || s->table_dtype != src->t->dtype)
        qc_f8_table(src->t->dtype, s->table);
    s->has_table = 1;
    s->table_dtype = src->t->dtype;
    QC_TRY(read_codes(src, s, first, n, err));
    if (w->scales != UINT32_MAX) {
        QC_TRY(read_tile_scales(src, s, top, bottom - top + 1, err));
        tiles.scales = s->scales.data;
    }
    /* Rows are counted from the first row of tiles that was read. */
    qc_f8_decode(s->codes.data, s->table, &tiles, first - top * w->tile_rows * cols, n, out, bad);
    return QC_OK;
}

qc_status qc_coded_read(const qc_coded_source *src, qc_coded_scratch *s, uint64_t first, uint64_t n,
                        float *out, qc_error *err)
{
    const qc_checkpoint_tensor *t = src->t;
    uint64_t bad = UINT64_MAX;
    if (n == 0)
        return QC_OK;
    if (src->w->coding == QC_CODING_FP8) {
        QC_TRY(read_fp8(src, s, first, n, out, &bad, err));
    } else if (qc_coding_is_packed(src->w->coding)) {
        QC_TRY(qc_packed_read(src, &s->stripe, first, n, out, &bad, err));
    } else {
        if (first % QC_MXFP4_BLOCK != 0 || n % QC_MXFP4_BLOCK != 0)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s': a part of a block was asked for", t->name);
        uint64_t block = first / QC_MXFP4_BLOCK, blocks = n / QC_MXFP4_BLOCK;
        QC_TRY(read_codes(src, s, first / 2, n / 2, err));
        QC_TRY(read_raw_scales(src, s, block, blocks, err));
        qc_mxfp4_decode(s->codes.data, s->raw.data, blocks, out, &bad);
    }
    if (bad != UINT64_MAX)
        return refuse(t, src->w, first + bad, err);
    return t->change ? t->change->apply(src->model, src->cursor, t, first, n, out, err) : QC_OK;
}

qc_status qc_coded_read_columns(const qc_coded_source *src, qc_coded_scratch *s, uint64_t first_row,
                                uint64_t rows, uint64_t first_col, uint64_t cols, float *out,
                                qc_error *err)
{
    const uint64_t wide = columns_of(src->w), across = wide / QC_MXFP4_BLOCK;
    const uint64_t first = first_row * across, n = rows * across;
    QC_TRY(read_codes(src, s, first * QC_MXFP4_BYTES, n * QC_MXFP4_BYTES, err));
    QC_TRY(read_raw_scales(src, s, first, n, err));
    for (uint64_t r = 0; r < rows; r++) {
        uint64_t block = r * across + first_col / QC_MXFP4_BLOCK, bad = UINT64_MAX;
        qc_mxfp4_decode((const unsigned char *)s->codes.data + block * QC_MXFP4_BYTES,
                        (const unsigned char *)s->raw.data + block, cols / QC_MXFP4_BLOCK,
                        out + r * cols, &bad);
        if (bad != UINT64_MAX)
            return refuse(src->t, src->w, (first_row + r) * wide + first_col + bad, err);
    }
    return QC_OK;
}

#include "convert/model/packed_read.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/model/awq_layout.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_packed.h"
#include "quant/quant_decode.h"
#include "quant/quant_pack.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define STRIPE_ELEMS (UINT64_C(1) << 20)
#define WORD_BYTES   4u
#define AWQ_COLUMNS  64u

void qc_packed_stripe_deinit(qc_packed_stripe *s)
{
    void *const buffers[] = {s->codes.data, s->zeros.data, s->scales.data, s->groups.data,
                             s->raw.data};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        qc_free(buffers[i]);
    *s = (qc_packed_stripe){0};
}

static uint64_t cols_of(const qc_coded_weight *w)
{
    return w->dims[w->ndim - 1];
}

static int is_turned(const qc_coded_weight *w)
{
    return w->coding == QC_CODING_GPTQ || w->coding == QC_CODING_AWQ;
}

static uint64_t per_word(const qc_coded_weight *w)
{
    return 32u / w->bits;
}

/* Reads `bytes` bytes of a tensor to where `at` of the raw bytes is. */
static qc_status read_raw(const qc_coded_source *src, qc_packed_stripe *s, uint32_t tensor,
                          uint64_t offset, uint64_t at, uint64_t bytes, qc_error *err)
{
    const qc_checkpoint_tensor *t = &src->model->tensors[tensor];
    return qc_checkpoint_read(src->model, t == src->t ? src->cursor : src->beside, t, offset,
                              (unsigned char *)s->raw.data + at, (size_t)bytes, err);
}

/* Reads columns [first, first + count) of all `rows` rows of a matrix that is `across` wide, each
 * element of `each` bytes, one row after the other. */
static qc_status read_columns(const qc_coded_source *src, qc_packed_stripe *s, uint32_t tensor,
                              uint64_t rows, uint64_t across, uint64_t first, uint64_t count,
                              uint64_t each, qc_error *err)
{
    QC_TRY(qc_buffer_room(&s->raw, rows, qc_sat_mul(count, each), err));
    for (uint64_t r = 0; r < rows; r++)
        QC_TRY(read_raw(src, s, tensor, (r * across + first) * each, r * count * each, count * each,
                        err));
    return QC_OK;
}

/* ---- codes ---- */

static uint32_t index_of(const qc_coded_source *src)
{
    return (uint32_t)(src->t - src->model->tensors);
}

/* Takes a word apart into `n` codes, or fewer than it holds at the end of a row. */
static void unpack(uint32_t word, unsigned bits, uint64_t n, uint8_t *out)
{
    for (uint64_t i = 0; i < n; i++)
        out[i] = (uint8_t)(word >> i * bits & ((1u << bits) - 1));
}

/* Do the codes of a block of NVFP4 lie one below the other? */
static int is_tall(const qc_coded_weight *w)
{
    return w->coding == QC_CODING_NVFP4 && w->tile_cols == 1;
}

/* A byte has the codes of two rows. */
static qc_status load_tall(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const uint64_t cols = cols_of(src->w), top = s->first_row / 2;
    const uint64_t bytes = (qc_ceil_div_u64(s->first_row + s->rows, 2) - top) * cols;
    QC_TRY(qc_buffer_room(&s->raw, bytes, 1, err));
    QC_TRY(read_raw(src, s, index_of(src), top * cols, 0, bytes, err));
    for (uint64_t r = 0; r < s->rows; r++) {
        const uint64_t row = s->first_row + r;
        const unsigned char *raw = (unsigned char *)s->raw.data + (row / 2 - top) * cols;
        for (uint64_t k = 0; k < cols; k++)
            ((uint8_t *)s->codes.data)[r * cols + k] = raw[k] >> row % 2 * 4 & 15;
    }
    return QC_OK;
}

/* compressed-tensors: bytes, or words along the rows. NVFP4's bytes lie as such words do. */
static qc_status load_rows(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    uint64_t cols = cols_of(w), words = qc_packed_words(w, cols);
    uint64_t row_bytes = w->coding == QC_CODING_INT ? cols : words * WORD_BYTES;
    uint8_t *codes = s->codes.data;
    QC_TRY(qc_buffer_room(&s->raw, s->rows, row_bytes, err));
    QC_TRY(read_raw(src, s, index_of(src), s->first_row * row_bytes, 0, s->rows * row_bytes, err));
    const unsigned char *raw = s->raw.data;
    if (w->coding == QC_CODING_INT) {
        for (uint64_t i = 0; i < s->rows * cols; i++)
            codes[i] = raw[i] ^ 0x80u;
        return QC_OK;
    }
    for (uint64_t r = 0; r < s->rows && !w->padded; r++)
        qc_codes_unpack(w->bits, raw + r * row_bytes, cols, codes + r * cols);
    for (uint64_t r = 0; r < s->rows && w->padded; r++) {
        for (uint64_t i = 0; i < words; i++, raw += WORD_BYTES) {
            uint64_t k = i * per_word(w);
            unpack(qc_load_le32(raw), w->bits, qc_min_u64(per_word(w), cols - k),
                   codes + r * cols + k);
        }
    }
    return QC_OK;
}

static qc_status load_gptq(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    uint64_t cols = w->dims[1], deep = cols / per_word(w);
    QC_TRY(read_columns(src, s, index_of(src), deep, w->dims[0], s->first_row, s->rows, WORD_BYTES,
                        err));
    const unsigned char *raw = s->raw.data;
    for (uint64_t i = 0; i < deep; i++) {
        for (uint64_t r = 0; r < s->rows; r++, raw += WORD_BYTES)
            unpack(qc_load_le32(raw), w->bits, per_word(w),
                   (uint8_t *)s->codes.data + r * cols + i * per_word(w));
    }
    return QC_OK;
}

/* Takes apart word i of columns [first, end): the codes of 8 rows. */
static void unpack_awq(qc_packed_stripe *s, uint64_t cols, uint64_t i, uint64_t first, uint64_t end)
{
    const unsigned char *raw = s->raw.data;
    uint8_t *codes = (uint8_t *)s->codes.data + i * QC_AWQ_ROWS * cols;
    for (uint64_t k = first; k < end; k++) {
        uint32_t word = qc_load_le32(raw + (k * s->rows / QC_AWQ_ROWS + i) * WORD_BYTES);
        for (unsigned n = 0; n < QC_AWQ_ROWS; n++)
            codes[qc_awq_row[n] * cols + k] = word >> 4 * n & 15;
    }
}

static qc_status load_awq(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    uint64_t cols = src->w->dims[1], words = s->rows / QC_AWQ_ROWS;
    QC_TRY(read_columns(src, s, index_of(src), cols, src->w->dims[0] / QC_AWQ_ROWS,
                        s->first_row / QC_AWQ_ROWS, words, WORD_BYTES, err));
    /* A few columns at a time stay in the cache while all their words are taken apart. */
    for (uint64_t k = 0; k < cols; k += AWQ_COLUMNS) {
        for (uint64_t i = 0; i < words; i++)
            unpack_awq(s, cols, i, k, qc_min_u64(k + AWQ_COLUMNS, cols));
    }
    return QC_OK;
}

/* ---- scales and zero points ---- */

/* A single scale for the whole weight is read for each row. */
static int is_single(const qc_coded_weight *w)
{
    return w->tile_rows > 1;
}

/* Makes the scales of NVFP4 from their codes. Several rows may share a row of them. */
static qc_status load_e4m3(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    const qc_checkpoint_tensor *g = &src->model->tensors[w->global];
    const uint64_t across = w->tiles_across, tall = is_tall(w) ? QC_NVFP4_BLOCK : 1;
    const uint64_t top = s->first_row / tall,
                   n = qc_ceil_div_u64(s->first_row + s->rows, tall) - top;
    float table[256], global = 0;
    uint64_t read = UINT64_MAX; /* which of the global scales this is */
    qc_f8_table(QC_DTYPE_F8_E4M3, table);
    QC_TRY(qc_buffer_room(&s->raw, n, across, err));
    QC_TRY(read_raw(src, s, w->scales, top * across, 0, n * across, err));
    for (uint64_t r = 0; r < s->rows; r++) {
        const uint64_t row = s->first_row + r;
        const uint64_t expert = g->bytes > sizeof global ? row / w->dims[w->ndim - 2] : 0;
        const unsigned char *codes = (unsigned char *)s->raw.data + (row / tall - top) * across;
        float *scales = (float *)s->scales.data + r * across;
        if (expert != read)
            QC_TRY(qc_checkpoint_read(src->model, src->beside, g, expert * sizeof global, &global,
                                      sizeof global, err));
        read = expert;
        if (!isfinite(global) || global == 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "tensor '%s': expected a scale other than 0 that is finite, found %g at index "
                    "%" PRIu64 "; --keep '%s' leaves the weight as it is",
                    g->name, (double)global, expert, qc_text_word_or(src->t->name, "NAME"));
        for (uint64_t k = 0; k < across; k++)
            scales[k] = w->divides ? table[codes[k]] / global : table[codes[k]] * global;
    }
    return QC_OK;
}

static qc_status load_scales(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    qc_dtype dtype = src->model->tensors[w->scales].dtype;
    uint64_t across = w->tiles_across, each = qc_dtype_bits(dtype) / 8, n = s->rows * across;
    uint64_t overflow = 0, stored = is_single(w) ? 1 : n;
    float *scales = NULL;
    QC_TRY(qc_buffer_room(&s->scales, n, sizeof(float), err));
    scales = s->scales.data;
    if (w->coding == QC_CODING_NVFP4) {
        stored = n;
        QC_TRY(load_e4m3(src, s, err));
    } else if (is_turned(w)) {
        QC_TRY(
            read_columns(src, s, w->scales, across, w->dims[0], s->first_row, s->rows, each, err));
    } else {
        QC_TRY(qc_buffer_room(&s->raw, stored, each, err));
        QC_TRY(read_raw(src, s, w->scales, is_single(w) ? 0 : s->first_row * across * each, 0,
                        stored * each, err));
        src->ops->cast(s->raw.data, dtype, stored, scales, QC_DTYPE_F32, &overflow);
    }
    for (uint64_t g = 0; is_turned(w) && g < across; g++) {
        for (uint64_t r = 0; r < s->rows; r++)
            src->ops->cast((unsigned char *)s->raw.data + (g * s->rows + r) * each, dtype, 1,
                           scales + r * across + g, QC_DTYPE_F32, &overflow);
    }
    for (uint64_t i = stored; i < n; i++)
        scales[i] = scales[0];
    for (uint64_t i = 0; i < n; i++) {
        const int finite = isfinite(scales[i]) != 0;
        if (!finite || (scales[i] == 0 && w->coding != QC_CODING_NVFP4))
            return QC_ERROR(err, finite ? QC_ERR_INPUT : QC_ERR_NONFINITE,
                            "tensor '%s': the scale of row %" PRIu64 ", group %" PRIu64
                            " is %s; --keep '%s' leaves the weight as it is",
                            src->model->tensors[w->scales].name, s->first_row + i / across,
                            i % across, finite ? "0" : "not finite",
                            qc_text_word_or(src->t->name, "NAME"));
    }
    return QC_OK;
}

/* Zero points in bytes, which are signed. */
static qc_status load_zero_bytes(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    uint64_t n = s->rows * w->tiles_across, stored = is_single(w) ? 1 : n;
    int16_t *zeros = s->zeros.data;
    QC_TRY(qc_buffer_room(&s->raw, stored, 1, err));
    QC_TRY(read_raw(src, s, w->zeros, is_single(w) ? 0 : s->first_row * w->tiles_across, 0, stored,
                    err));
    const unsigned char *raw = s->raw.data;
    for (uint64_t i = 0; i < n; i++) {
        int byte = raw[is_single(w) ? 0 : i];
        zeros[i] = (int16_t)((byte < 128 ? byte : byte - 256) + (1 << (w->bits - 1)));
    }
    return QC_OK;
}

/* Zero points of compressed-tensors in words [words, groups] without gaps between those of
 * different rows. */
static qc_status load_dense_zeros(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    const uint64_t across = w->tiles_across, first = s->first_row * w->bits / 32;
    const uint64_t count = qc_packed_words(w, s->first_row + s->rows) - first;
    int16_t *zeros = s->zeros.data;
    QC_TRY(qc_buffer_room(&s->raw, count * across, WORD_BYTES, err));
    QC_TRY(read_raw(src, s, w->zeros, first * across * WORD_BYTES, 0, count * across * WORD_BYTES,
                    err));
    for (uint64_t i = 0; i < s->rows * across; i++) {
        const uint64_t bit = (s->first_row + i / across) * w->bits - first * 32;
        const unsigned char *at =
            (unsigned char *)s->raw.data + (bit / 32 * across + i % across) * WORD_BYTES;
        uint64_t two = qc_load_le32(at);
        if (bit % 32 + w->bits > 32)
            two |= (uint64_t)qc_load_le32(at + across * WORD_BYTES) << 32;
        zeros[i] = (int16_t)(two >> bit % 32 & ((1u << w->bits) - 1));
    }
    return QC_OK;
}

/* Zero points in words that hold those of several rows: [words, groups] in compressed-tensors,
 * [groups, words] in GPTQ and AWQ. */
static qc_status load_zero_words(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    uint64_t across = w->tiles_across, first = s->first_row / per_word(w);
    uint64_t end = qc_ceil_div_u64(s->first_row + s->rows, per_word(w)), count = end - first;
    uint64_t wide = qc_ceil_div_u64(w->dims[0], per_word(w));
    int16_t *zeros = s->zeros.data;
    if (is_turned(w)) {
        QC_TRY(read_columns(src, s, w->zeros, across, wide, first, count, WORD_BYTES, err));
    } else {
        QC_TRY(qc_buffer_room(&s->raw, count * across, WORD_BYTES, err));
        QC_TRY(read_raw(src, s, w->zeros, first * across * WORD_BYTES, 0,
                        count * across * WORD_BYTES, err));
    }
    const unsigned char *raw = s->raw.data;
    for (uint64_t i = 0; i < count * across; i++) {
        uint64_t g = is_turned(w) ? i / count : i % across;
        uint64_t block = is_turned(w) ? i % count : i / across;
        uint8_t codes[32];
        unpack(qc_load_le32(raw + i * WORD_BYTES), w->bits, per_word(w), codes);
        for (uint64_t n = 0; n < per_word(w); n++) {
            uint64_t within = w->coding == QC_CODING_AWQ ? qc_awq_row[n] : n;
            uint64_t row = (first + block) * per_word(w) + within;
            if (row >= s->first_row && row < s->first_row + s->rows)
                zeros[(row - s->first_row) * across + g] = (int16_t)(codes[n] + w->zero_add);
        }
    }
    return QC_OK;
}

static qc_status load_zeros(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    uint64_t n = s->rows * w->tiles_across;
    QC_TRY(qc_buffer_room(&s->zeros, n, sizeof(int16_t), err));
    if (w->zeros != UINT32_MAX)
        return src->model->tensors[w->zeros].dtype == QC_DTYPE_I8 ? load_zero_bytes(src, s, err)
               : is_turned(w) || w->padded                        ? load_zero_words(src, s, err)
                                                                  : load_dense_zeros(src, s, err);
    for (uint64_t i = 0; i < n; i++)
        ((int16_t *)s->zeros.data)[i] = (int16_t)(1 << (w->bits - 1));
    return QC_OK;
}

/* ---- groups ---- */

/* compressed-tensors sorts the columns by group and cuts them into equal parts, so its groups must
 * all have the same size. */
static qc_status check_sizes(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    const uint32_t *groups = s->groups.data;
    QC_TRY(qc_buffer_room(&s->raw, w->tiles_across, sizeof(uint32_t), err));
    uint32_t *sizes = s->raw.data;
    memset(sizes, 0, (size_t)w->tiles_across * sizeof *sizes);
    for (uint64_t k = 0; k < w->dims[1]; k++)
        sizes[groups[k]]++;
    for (uint64_t g = 0; g < w->tiles_across; g++) {
        if (sizes[g] != w->tile_cols)
            QC_FAIL(err, QC_ERR_INPUT,
                    "tensor '%s': group %" PRIu64 " has %" PRIu32 " columns, expected %" PRIu64,
                    src->model->tensors[w->group_index].name, g, sizes[g], w->tile_cols);
    }
    return QC_OK;
}

/* Finds the group of each column. compressed-tensors writes -1 for columns that are in order. */
static qc_status load_groups(const qc_coded_source *src, qc_packed_stripe *s, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    uint64_t cols = cols_of(w);
    int ordered = w->group_index == UINT32_MAX;
    if (s->grouped == w)
        return QC_OK;
    s->grouped = NULL;
    QC_TRY(qc_buffer_room(&s->groups, cols, sizeof(uint32_t), err));
    uint32_t *groups = s->groups.data;
    if (!ordered) {
        QC_TRY(qc_buffer_room(&s->raw, cols, WORD_BYTES, err));
        QC_TRY(read_raw(src, s, w->group_index, 0, 0, cols * WORD_BYTES, err));
    }
    for (uint64_t k = 0; k < cols && !ordered; k++) {
        groups[k] = qc_load_le32((unsigned char *)s->raw.data + k * WORD_BYTES);
        ordered = groups[k] == UINT32_MAX && !is_turned(w);
        if (!ordered && groups[k] >= w->tiles_across)
            QC_FAIL(err, QC_ERR_INPUT,
                    "tensor '%s': column %" PRIu64 " is in group %" PRId32 ", expected 0 to "
                    "%" PRIu64,
                    src->model->tensors[w->group_index].name, k, (int32_t)groups[k],
                    w->tiles_across - 1);
    }
    for (uint64_t k = 0; k < cols && ordered; k++)
        groups[k] = (uint32_t)(k / w->tile_cols);
    if (!ordered && !is_turned(w))
        QC_TRY(check_sizes(src, s, err));
    s->grouped = w;
    return QC_OK;
}

/* ---- reading ---- */

/* Loads the stripe that `row` lies in. Where the file has the rows one after the other, no more
 * are read than up to last_row. */
static qc_status load(const qc_coded_source *src, qc_packed_stripe *s, uint64_t row,
                      uint64_t last_row, qc_error *err)
{
    const qc_coded_weight *w = src->w;
    const uint64_t cols = cols_of(w);
    const uint64_t elems = is_turned(w) ? 4 * STRIPE_ELEMS : STRIPE_ELEMS;
    uint64_t most = elems / cols / QC_AWQ_ROWS * QC_AWQ_ROWS, end = last_row + 1;
    most = most < QC_AWQ_ROWS ? QC_AWQ_ROWS : most;
    if (s->weight == w && row >= s->first_row && row - s->first_row < s->rows)
        return QC_OK;
    s->weight = NULL;
    s->first_row = row;
    if (is_turned(w)) {
        s->first_row -= row % most;
        end = w->dims[0];
    }
    s->rows = qc_min_u64(most, end - s->first_row);
    QC_TRY(load_groups(src, s, err));
    QC_TRY(load_scales(src, s, err));
    QC_TRY(load_zeros(src, s, err));
    QC_TRY(qc_buffer_room(&s->codes, s->rows, cols, err));
    QC_TRY(w->coding == QC_CODING_GPTQ  ? load_gptq(src, s, err)
           : w->coding == QC_CODING_AWQ ? load_awq(src, s, err)
           : is_tall(w)                 ? load_tall(src, s, err)
                                        : load_rows(src, s, err));
    s->weight = w;
    return QC_OK;
}

qc_status qc_packed_read(const qc_coded_source *src, qc_packed_stripe *s, uint64_t first,
                         uint64_t n, float *out, uint64_t *bad, qc_error *err)
{
    const int nvfp4 = src->w->coding == QC_CODING_NVFP4;
    uint64_t cols = cols_of(src->w), across = src->w->tiles_across, done = 0;
    float values[16];
    memcpy(values, qc_fp4_code, sizeof values);
    if (!src->w->divides) /* ModelOpt's table (0.47, e2m1_values) has no -0 */
        values[8] = 0;
    while (done < n) {
        uint64_t row = (first + done) / cols, begin = (first + done) % cols;
        uint64_t end = qc_min_u64(cols, begin + n - done);
        QC_TRY(load(src, s, row, (first + n - 1) / cols, err));
        uint64_t at = row - s->first_row;
        const uint8_t *codes = (const uint8_t *)s->codes.data + at * cols;
        const int16_t *zeros = (const int16_t *)s->zeros.data + at * across;
        const float *scales = (const float *)s->scales.data + at * across;
        const uint32_t *groups = s->groups.data;
        for (uint64_t k = begin; k < end; k++, done++) {
            out[done] = (nvfp4 ? values[codes[k]] : (float)(codes[k] - zeros[groups[k]])) *
                        scales[groups[k]];
            if (!isfinite(out[done]) && *bad == UINT64_MAX)
                *bad = done;
        }
    }
    return QC_OK;
}

#include "convert/model/weight_read.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/awq_layout.h"
#include "formats/tensor_pieces.h"
#include "quant/quant_decode.h"

#include <inttypes.h>
#include <string.h>

#define STEP_ELEMS ((uint64_t)1 << 18)
/* Of a weight that is turned, so many elements and stored rows at most are read at once. */
#define STRIP_ELEMS ((uint64_t)1 << 17)
#define STRIP_ROWS  256u

/* ---- sources and readers ---- */

qc_status qc_weight_source_of(qc_weight_source *out, const qc_checkpoint *model, uint32_t tensor,
                              const qc_stored_weight *stored, const qc_coded_weight *coded,
                              int turned, qc_error *err)
{
    const qc_checkpoint_tensor *t = &model->tensors[tensor];
    *out = (qc_weight_source){.tensor = tensor, .stored = stored, .coded = coded, .turned = turned};
    out->ndim = stored ? stored->ndim : coded ? coded->ndim : t->ndim;
    memcpy(out->dims, stored ? stored->dims : coded ? coded->dims : t->dims, sizeof out->dims);
    if (!stored && !coded && !qc_dtype_is_quantizable(t->dtype))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "tensor '%s' is %s, which holds no values to read as floats", t->name,
                qc_dtype_name(t->dtype));
    if (turned && out->ndim < 2)
        QC_FAIL(err, QC_ERR_SHAPE, "tensor '%s': expected 2 dimensions or more, found %u", t->name,
                out->ndim);
    if (turned) {
        const uint64_t last = out->dims[out->ndim - 1];
        out->dims[out->ndim - 1] = out->dims[out->ndim - 2];
        out->dims[out->ndim - 2] = last;
    }
    return qc_shape_elems(out->dims, out->ndim, &out->elems, err);
}

qc_status qc_weight_reader_open(qc_weight_reader *out, const qc_checkpoint *model, qc_error *err)
{
    qc_isa isa;
    *out = (qc_weight_reader){.model = model};
    QC_TRY(qc_isa_select(&isa, err));
    out->ops = qc_quant_ops_for(isa);
    qc_status st = qc_st_cursor_create(&out->codes, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&out->scales, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&out->maps, err);
    if (st != QC_OK)
        qc_weight_reader_close(out);
    return st;
}

void qc_weight_reader_close(qc_weight_reader *r)
{
    void *const buffers[] = {r->raw.data, r->nested.data, r->numbers.data, r->made.data};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        qc_free(buffers[i]);
    qc_st_cursor_destroy(r->codes);
    qc_st_cursor_destroy(r->scales);
    qc_st_cursor_destroy(r->maps);
    qc_coded_scratch_deinit(&r->coded);
    *r = (qc_weight_reader){0};
}

/* ---- weights in codes with scales ---- */

/* Decodes scales [first, first + n) that are quantized themselves. *out: the first. */
static qc_status read_nested(qc_weight_reader *r, const qc_stored_weight *w, uint64_t first,
                             uint64_t n, const float **out, qc_error *err)
{
    const qc_checkpoint *m = r->model;
    const uint64_t per = w->nested_block_elems, group = first / per, skip = first % per;
    const uint64_t groups = qc_ceil_div_u64(skip + n, per);
    float map[256];
    QC_TRY(qc_buffer_room(&r->nested, groups, sizeof(float), err));
    QC_TRY(qc_buffer_room(&r->raw, skip + n, 1, err));
    QC_TRY(qc_buffer_room(&r->numbers, skip + n, sizeof(float), err));
    QC_TRY(qc_checkpoint_read(m, r->maps, &m->tensors[w->nested_map], 0, map, sizeof map, err));
    QC_TRY(qc_checkpoint_read(m, r->maps, &m->tensors[w->nested_absmax], group * sizeof(float),
                              r->nested.data, (size_t)groups * sizeof(float), err));
    QC_TRY(qc_checkpoint_read(m, r->scales, &m->tensors[w->absmax], first - skip, r->raw.data,
                              (size_t)(skip + n), err));
    r->ops->nested_dequantize(r->raw.data, r->nested.data, map, skip + n, (uint32_t)per,
                              w->nested_offset, r->numbers.data);
    *out = (const float *)r->numbers.data + skip;
    return QC_OK;
}

qc_status qc_weight_scales(qc_weight_reader *r, const qc_stored_weight *w, uint64_t first,
                           uint64_t n, const float **out, qc_error *err)
{
    const qc_checkpoint_tensor *t = &r->model->tensors[w->absmax];
    const uint64_t each = qc_dtype_bits(t->dtype) / 8;
    uint64_t overflow = 0;
    if (w->nested_absmax != UINT32_MAX)
        return read_nested(r, w, first, n, out, err);
    QC_TRY(qc_buffer_room(&r->raw, n, each, err));
    QC_TRY(qc_buffer_room(&r->numbers, n, sizeof(float), err));
    QC_TRY(qc_checkpoint_read(r->model, r->scales, t, first * each, r->raw.data, (size_t)(n * each),
                              err));
    r->ops->cast(r->raw.data, t->dtype, n, r->numbers.data, QC_DTYPE_F32, &overflow);
    *out = r->numbers.data;
    return QC_OK;
}

void qc_weight_decode(const qc_quant_ops *ops, const qc_form *form, const unsigned char *codes,
                      const float *scales, uint64_t at, uint64_t n, void *out, qc_dtype dtype,
                      uint64_t *overflow)
{
    const uint64_t each = qc_dtype_bits(dtype) / 8, per_scale = qc_form_scale_elems(form);
    qc_form part = *form;
    *overflow = UINT64_MAX;
    for (uint64_t done = 0, run; done < n && *overflow == UINT64_MAX; done += run) {
        const uint64_t inside = (at + done) % per_scale, left = n - done;
        run = left - left % per_scale;
        if (inside > 0 || run == 0)
            run = qc_min_u64(per_scale - inside, left);
        part.cols = qc_min_u64(run, form->cols); /* a row may begin or end outside */
        form->ops->dequantize(
            ops, &part, codes + qc_form_code_bytes(form, at + done) - qc_form_code_bytes(form, at),
            scales + (at + done) / per_scale, run, (unsigned char *)out + done * each, dtype,
            overflow);
        if (*overflow != UINT64_MAX)
            *overflow += done;
    }
}

/* Decodes to dst, if it is not NULL and `first` begins a block or row, else to a buffer. *bad: from
 * first on. */
static qc_status read_stored(qc_weight_reader *r, const qc_weight_source *s, uint64_t first,
                             uint64_t n, void *dst, qc_dtype dtype, const void **out, uint64_t *bad,
                             qc_error *err)
{
    const qc_stored_weight *w = s->stored;
    const uint64_t cols = w->ndim && w->dims[w->ndim - 1] ? w->dims[w->ndim - 1] : 1;
    qc_form form = qc_scheme_form(w->stored_as, cols, w->block_elems, 0);
    const uint64_t per_scale = qc_form_scale_elems(&form);
    const uint64_t skip = first % per_scale, count = skip + n, each = qc_dtype_bits(dtype) / 8;
    const float *scales = NULL;
    float map[16];
    QC_TRY(
        qc_weight_scales(r, w, first / per_scale, qc_ceil_div_u64(count, per_scale), &scales, err));
    if (w->quant_map != UINT32_MAX) {
        QC_TRY(qc_checkpoint_read(r->model, r->maps, &r->model->tensors[w->quant_map], 0, map,
                                  sizeof map, err));
        form.code_map = map;
    }
    const uint64_t bytes = qc_form_code_bytes(&form, count);
    QC_TRY(qc_buffer_room(&r->raw, bytes, 1, err));
    if (!dst || skip > 0) {
        QC_TRY(qc_buffer_room(&r->made, count, each, err));
        dst = r->made.data;
    }
    QC_TRY(qc_checkpoint_read(r->model, r->codes, &r->model->tensors[s->tensor],
                              qc_form_code_bytes(&form, first - skip), r->raw.data, (size_t)bytes,
                              err));
    qc_weight_decode(r->ops, &form, r->raw.data, scales, 0, count, dst, dtype, bad);
    if (*bad != UINT64_MAX)
        *bad = *bad > skip ? *bad - skip : 0;
    *out = (const unsigned char *)dst + skip * each;
    r->code_bytes = (size_t)qc_form_code_bytes(&form, n);
    r->code = (const unsigned char *)r->raw.data + qc_form_code_bytes(&form, skip);
    return QC_OK;
}

/* ---- reading ---- */

static qc_status refuse_range(const qc_weight_reader *r, const qc_weight_source *w, uint64_t index,
                              qc_dtype dtype, qc_error *err)
{
    QC_FAIL(err, QC_ERR_RANGE, "tensor '%s': element %" PRIu64 " is too large for %s",
            r->model->tensors[w->tensor].name, index, qc_dtype_name(dtype));
}

static qc_coded_source coded_source(const qc_weight_reader *r, const qc_weight_source *w)
{
    return (qc_coded_source){.model = r->model,
                             .cursor = r->codes,
                             .beside = r->scales,
                             .ops = r->ops,
                             .t = &r->model->tensors[w->tensor],
                             .w = w->coded};
}

qc_status qc_weight_floats(qc_weight_reader *r, const qc_weight_source *w, uint64_t first,
                           uint64_t n, const float **out, qc_error *err)
{
    const qc_checkpoint_tensor *t = &r->model->tensors[w->tensor];
    const uint64_t each = qc_dtype_bits(t->dtype) / 8;
    uint64_t overflow = UINT64_MAX;
    QC_TRY(qc_check_interrupted(err));
    if (w->stored) {
        const void *values = NULL;
        QC_TRY(read_stored(r, w, first, n, NULL, QC_DTYPE_F32, &values, &overflow, err));
        *out = values; /* no float is too large */
        return QC_OK;
    }
    if (w->coded) {
        const uint64_t block = w->coded->coding == QC_CODING_MXFP4 ? QC_MXFP4_BLOCK : 1;
        const uint64_t skip = first % block, count = qc_ceil_div_u64(skip + n, block) * block;
        QC_TRY(qc_buffer_room(&r->made, count, sizeof(float), err));
        *out = (const float *)r->made.data + skip;
        return qc_weight_elements(r, w, first - skip, count, r->made.data, err);
    }
    QC_TRY(qc_buffer_room(&r->made, n, sizeof(float), err));
    QC_TRY(qc_buffer_room(&r->raw, n, each, err));
    *out = r->made.data;
    QC_TRY(qc_checkpoint_read(r->model, r->codes, t, first * each, r->raw.data, (size_t)(n * each),
                              err));
    r->ops->cast(r->raw.data, t->dtype, n, r->made.data, QC_DTYPE_F32, &overflow);
    return overflow == UINT64_MAX ? QC_OK : refuse_range(r, w, first + overflow, QC_DTYPE_F32, err);
}

qc_status qc_weight_read_turned(const qc_checkpoint *model, qc_st_cursor *cursor,
                                const qc_checkpoint_tensor *t, uint64_t cols, uint64_t first,
                                uint64_t n, unsigned char *dst, qc_error *err)
{
    const uint64_t each = qc_dtype_bits(t->dtype) / 8;
    const uint64_t rows = t->ndim == 3 ? t->dims[2] : t->bytes / each / cols;
    const qc_turned turned = {.rows = rows, .cols = cols, .stride = rows};
    return qc_tensor_read_turned(model, cursor, t, &turned, first * each, dst, (size_t)(n * each),
                                 err);
}

/* Reads elements [first, first + n), which are whole rows of the last dimension, as they lie. */
static qc_status read_straight(qc_weight_reader *r, const qc_weight_source *w, uint64_t first,
                               uint64_t n, unsigned char *out, qc_dtype dtype, qc_error *err)
{
    const uint64_t row = w->ndim ? w->dims[w->ndim - 1] : 1, each = qc_dtype_bits(dtype) / 8;
    const uint64_t step = row < STEP_ELEMS ? STEP_ELEMS - STEP_ELEMS % row : row;
    for (uint64_t at = 0; at < n; at += step) {
        const uint64_t count = qc_min_u64(step, n - at);
        const float *values = NULL;
        uint64_t overflow = UINT64_MAX;
        QC_TRY(qc_weight_floats(r, w, first + at, count, &values, err));
        r->ops->cast(values, QC_DTYPE_F32, count, out + at * each, dtype, &overflow);
        if (overflow != UINT64_MAX)
            return refuse_range(r, w, first + at + overflow, dtype, err);
    }
    return QC_OK;
}

qc_status qc_weight_stored(qc_weight_reader *r, const qc_weight_source *w, uint64_t first,
                           uint64_t n, void *dst, qc_dtype dtype, uint64_t *bad, qc_error *err)
{
    const void *values = NULL;
    QC_TRY(read_stored(r, w, first, n, dst, dtype, &values, bad, err));
    if (values != dst)
        memcpy(dst, values, (size_t)(n * (qc_dtype_bits(dtype) / 8)));
    return QC_OK;
}

/* A row's part of a group lies in one piece. */
static qc_status read_by_groups(qc_weight_reader *r, const qc_weight_source *w, uint64_t first,
                                uint64_t n, void *dst, qc_error *err)
{
    const uint64_t each =
        w->coded ? sizeof(float) : qc_dtype_bits(r->model->tensors[w->tensor].dtype) / 8;
    const uint64_t block = w->by_groups;
    qc_weight_source straight = *w;
    straight.by_groups = 0;
    for (uint64_t at = first, run; at < first + n; at += run) {
        run = qc_min_u64(block - at % block, first + n - at);
        QC_TRY(qc_weight_elements(r, &straight, qc_awq_element(w->dims[0], w->dims[1], block, at),
                                  run, (unsigned char *)dst + (at - first) * each, err));
    }
    return QC_OK;
}

qc_status qc_weight_elements(qc_weight_reader *r, const qc_weight_source *w, uint64_t first,
                             uint64_t n, void *dst, qc_error *err)
{
    const qc_checkpoint_tensor *t = &r->model->tensors[w->tensor];
    const uint64_t each = qc_dtype_bits(t->dtype) / 8;
    if (n == 0)
        return QC_OK;
    if (w->by_groups)
        return read_by_groups(r, w, first, n, dst, err);
    if (w->coded) {
        const qc_coded_source src = coded_source(r, w);
        QC_TRY(qc_coded_read(&src, &r->coded, first, n, dst, err));
        r->code = r->coded.codes.data;
        r->code_bytes = r->coded.code_bytes;
        return QC_OK;
    }
    r->code = dst;
    r->code_bytes = (size_t)(n * each);
    if (w->turned)
        return qc_weight_read_turned(r->model, r->codes, t, w->dims[w->ndim - 1], first, n, dst,
                                     err);
    return qc_checkpoint_read(r->model, r->codes, t, first * each, dst, r->code_bytes, err);
}

qc_status qc_weight_turned(qc_weight_reader *r, const qc_weight_source *w, uint64_t matrix,
                           uint64_t begin, uint64_t end, unsigned char *out, qc_dtype dtype,
                           uint64_t *bad, qc_error *err)
{
    /* It lies as [wide, deep] and is read as [deep, wide]. */
    const uint64_t wide = w->dims[w->ndim - 1], deep = w->dims[w->ndim - 2];
    const uint64_t each = qc_dtype_bits(dtype) / 8, last_col = (end - 1) / wide;
    const int by_columns = w->coded && w->coded->coding == QC_CODING_MXFP4;
    uint64_t first_col = 0, cols = deep;
    if (by_columns) {
        first_col = begin / wide / QC_MXFP4_BLOCK * QC_MXFP4_BLOCK;
        cols = (last_col / QC_MXFP4_BLOCK + 1) * QC_MXFP4_BLOCK - first_col;
    }
    const uint64_t step = qc_max_u64(1, qc_min_u64(STRIP_ELEMS / cols, STRIP_ROWS));
    float strip[STRIP_ROWS];
    for (uint64_t row = 0; row < wide; row += step) {
        const uint64_t rows = qc_min_u64(step, wide - row);
        const float *values = NULL;
        if (by_columns) {
            QC_TRY(qc_check_interrupted(err));
            QC_TRY(qc_buffer_room(&r->made, rows * cols, sizeof(float), err));
            const qc_coded_source src = coded_source(r, w);
            QC_TRY(qc_coded_read_columns(&src, &r->coded, matrix * wide + row, rows, first_col,
                                         cols, r->made.data, err));
            values = r->made.data;
        } else {
            QC_TRY(qc_weight_floats(r, w, (matrix * wide + row) * deep, rows * deep, &values, err));
        }
        for (uint64_t i = begin / wide; i <= last_col; i++) {
            const uint64_t from = i * wide + row;
            const uint64_t a = qc_max_u64(from, begin), b = qc_min_u64(from + rows, end);
            uint64_t overflow = UINT64_MAX;
            for (uint64_t k = a; k < b; k++)
                strip[k - a] = values[(k - from) * cols + i - first_col];
            if (a < b)
                r->ops->cast(strip, QC_DTYPE_F32, b - a, out + (a - begin) * each, dtype,
                             &overflow);
            if (overflow != UINT64_MAX) {
                *bad = a + overflow;
                return QC_OK;
            }
        }
    }
    return QC_OK;
}

qc_status qc_weight_read(qc_weight_reader *r, const qc_weight_source *w, uint64_t first,
                         uint64_t count, void *out, qc_dtype dtype, qc_error *err)
{
    const uint64_t most = w->ndim ? w->dims[0] : 1, each = qc_dtype_bits(dtype) / 8;
    if (dtype != QC_DTYPE_F32 && dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE,
                "tensor '%s' cannot be read in this dtype; expected F32, F16 or BF16",
                r->model->tensors[w->tensor].name);
    if (first > most || count > most - first)
        QC_FAIL(err, QC_ERR_USAGE,
                "tensor '%s': %" PRIu64 " rows from %" PRIu64 " on were asked for, and it has "
                "%" PRIu64,
                r->model->tensors[w->tensor].name, count, first, most);
    if (count == 0 || w->elems == 0)
        return QC_OK;
    const uint64_t inner = w->elems / most;
    if (!w->turned)
        return read_straight(r, w, first * inner, count * inner, out, dtype, err);
    /* Of a stack, whole matrices are read; of a matrix, its rows [first, first + count). */
    const uint64_t matrix = w->dims[w->ndim - 2] * w->dims[w->ndim - 1];
    for (uint64_t at = first * inner, next; at < (first + count) * inner; at = next) {
        uint64_t bad = UINT64_MAX;
        next = qc_min_u64((at / matrix + 1) * matrix, (first + count) * inner);
        QC_TRY(qc_weight_turned(r, w, at / matrix, at % matrix, next - at / matrix * matrix,
                                (unsigned char *)out + (at - first * inner) * each, dtype, &bad,
                                err));
        if (bad != UINT64_MAX)
            return refuse_range(r, w, bad, dtype, err);
    }
    return QC_OK;
}

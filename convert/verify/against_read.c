/* Reads weights of MODEL, whatever they are stored as, in the order in which OUT has them. */
#include "convert/verify/against_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "quant/quant_decode.h"

#include <math.h>
#include <string.h>

/* A step has so many bytes of source, which stay in the L2 cache between reading and comparing. */
#define STEP_BYTES (512u << 10)
/* A step of a weight that lies transposed in MODEL has more, because that makes reads longer. */
#define TURNED_ELEMS ((uint64_t)4 << 20)

qc_status qc_against_take(qc_against *a, qc_against_scratch **out, qc_error *err)
{
    void *v = NULL;
    pthread_mutex_lock(&a->lock);
    *out = a->idle;
    if (a->idle)
        a->idle = a->idle->next;
    pthread_mutex_unlock(&a->lock);
    if (*out)
        return QC_OK;
    QC_TRY(qc_calloc(&v, 1, sizeof **out, err));
    qc_against_scratch *s = v;
    v = NULL;
    qc_status st = qc_malloc_aligned(&v, 64, sizeof *s->check, err);
    s->check = v;
    if (st == QC_OK)
        st = qc_st_cursor_create(&s->source, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&s->scales, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&s->output, err);
    if (st == QC_OK)
        st = qc_digest_create(&s->hash, err);
    if (st != QC_OK) {
        qc_against_scratch_destroy(s);
        return st;
    }
    *out = s;
    return QC_OK;
}

void qc_against_give(qc_against *a, qc_against_scratch *s)
{
    pthread_mutex_lock(&a->lock);
    s->next = a->idle;
    a->idle = s;
    pthread_mutex_unlock(&a->lock);
}

void qc_against_scratch_destroy(qc_against_scratch *s)
{
    while (s) {
        qc_against_scratch *next = s->next;
        qc_st_cursor_destroy(s->source);
        qc_st_cursor_destroy(s->scales);
        qc_st_cursor_destroy(s->output);
        qc_coded_scratch_deinit(&s->coded);
        qc_digest_destroy(s->hash);
        qc_free(s->raw);
        qc_free(s->turned);
        qc_free(s->made);
        qc_free(s->cast);
        qc_free(s->codes);
        qc_free(s->numbers);
        qc_free(s->slack);
        qc_free(s->nested);
        qc_free(s->check);
        qc_free(s);
        s = next;
    }
}

qc_status qc_against_room(void **p, size_t *room, uint64_t bytes, qc_error *err)
{
    size_t want = 0;
    void *v = NULL;
    if (*p && bytes <= *room)
        return QC_OK;
    if (qc_u64_to_size(bytes, &want))
        QC_FAIL(err, QC_ERR_NOMEM, "a row of a tensor is too large");
    qc_free(*p);
    *p = NULL;
    *room = 0;
    QC_TRY(qc_malloc_aligned(&v, 64, want ? want : 1, err));
    *p = v;
    *room = want;
    return QC_OK;
}

qc_dtype qc_against_read_dtype(const qc_against_tensor *t)
{
    return t->coded || t->packed ? QC_DTYPE_F32 : t->row.source_dtype;
}

uint64_t qc_against_step(const qc_against_tensor *t)
{
    if (t->row.transpose)
        return TURNED_ELEMS;
    uint64_t bits = qc_dtype_bits(qc_against_read_dtype(t));
    uint64_t n = STEP_BYTES / (bits >= 8 ? bits / 8 : 1);
    if (t->row.kind == QC_AGAINST_QUANTIZED && t->form.kind == QC_CHECK_INT8_ROWS)
        return n < t->cols ? t->cols : n - n % t->cols;
    return n; /* a multiple of every block size */
}

/* ---- scales ---------------------------------------------------------------------------------- */

qc_status qc_against_scales(const qc_against *a, qc_against_scratch *s, const qc_checkpoint *c,
                            const qc_stored_weight *w, uint64_t first, uint64_t n, qc_error *err)
{
    const qc_ckpt_tensor *t = &c->tensors[w->absmax];
    float map[256];
    QC_TRY(qc_against_room(&s->numbers, &s->numbers_room, qc_sat_mul(n, sizeof(float)), err));
    QC_TRY(qc_against_room(&s->slack, &s->slack_room, qc_sat_mul(n, sizeof(float)), err));
    float *scales = s->numbers, *slack = s->slack;
    if (w->nested_absmax == QC_NO_TENSOR) {
        QC_TRY(qc_checkpoint_read(c, s->scales, t, first * sizeof(float), scales,
                                  (size_t)n * sizeof(float), err));
        for (uint64_t i = 0; i < n; i++)
            slack[i] = fabsf(scales[i]) * 0x1p-20f;
        return QC_OK;
    }
    uint64_t per = w->nested_block_elems, group = first / per;
    uint64_t groups = n ? (first + n - 1) / per - group + 1 : 0;
    QC_TRY(qc_against_room(&s->nested, &s->nested_room, n + groups * sizeof(float), err));
    float *nested = s->nested;
    uint8_t *codes = (uint8_t *)(nested + groups);
    QC_TRY(qc_checkpoint_read(c, s->scales, t, first, codes, (size_t)n, err));
    /* Scales have their own cursor, so the frame of the codes stays decoded for the next piece. */
    QC_TRY(qc_checkpoint_read(c, s->output, &c->tensors[w->nested_absmax], group * sizeof(float),
                              nested, (size_t)groups * sizeof(float), err));
    QC_TRY(qc_checkpoint_read(c, s->output, &c->tensors[w->nested_map], 0, map, sizeof map, err));
    for (uint64_t i = 0; i < n;) {
        uint64_t g = (first + i) / per, left = (g + 1) * per - (first + i);
        uint64_t count = n - i < left ? n - i : left;
        float one = nested[g - group];
        /* This takes one group at a time, but at most as many scales as one call takes for one
         * nested scale. */
        for (uint64_t k = 0; k < count; k += QC_NESTED_BLOCK)
            a->options->ops->nested_dequantize(
                codes + i + k, &one, map, count - k < QC_NESTED_BLOCK ? count - k : QC_NESTED_BLOCK,
                QC_NESTED_BLOCK, w->nested_offset, scales + i + k);
        /* Half of the widest gap of the dynamic map is 0.00703. */
        for (uint64_t k = i; k < i + count; k++)
            slack[k] =
                fabsf(one) * 0.0072f + (fabsf(scales[k]) + fabsf(w->nested_offset)) * 0x1p-20f;
        i += count;
    }
    return QC_OK;
}

/* ---- a weight of a checkpoint that is quantized ---------------------------------------------- */

static uint64_t codes_per_scale(const qc_stored_weight *w)
{
    return w->stored_as != QC_SCHEME_INT8_ROWS ? w->block_elems
           : w->ndim && w->dims[w->ndim - 1]   ? w->dims[w->ndim - 1]
                                               : 1;
}

qc_status qc_against_decode(const qc_against *a, qc_against_scratch *s, const qc_checkpoint *c,
                            uint32_t tensor, const qc_stored_weight *w, uint64_t first, uint64_t n,
                            const float **out, qc_error *err)
{
    const qc_quant_ops *ops = a->options->ops;
    uint64_t per_byte = w->stored_as == QC_SCHEME_NF4 ? 2 : 1, overflow = UINT64_MAX;
    uint64_t per_scale = codes_per_scale(w);
    uint64_t begin = first - first % per_scale, count = first + n - begin;
    uint64_t bytes = qc_ceil_div_u64(count, per_byte);
    if (n == 0) {
        *out = NULL;
        return QC_OK;
    }
    QC_TRY(
        qc_against_scales(a, s, c, w, begin / per_scale, qc_ceil_div_u64(count, per_scale), err));
    QC_TRY(qc_against_room(&s->raw, &s->raw_room, bytes, err));
    QC_TRY(qc_against_room(&s->made, &s->made_room, qc_sat_mul(count, sizeof(float)), err));
    QC_TRY(qc_checkpoint_read(c, s->output, &c->tensors[tensor], begin / per_byte, s->raw,
                              (size_t)bytes, err));
    float *made = s->made;
    const float *scales = s->numbers;
    if (w->stored_as == QC_SCHEME_NF4) {
        float map[16];
        QC_TRY(
            qc_checkpoint_read(c, s->scales, &c->tensors[w->quant_map], 0, map, sizeof map, err));
        ops->nf4_dequantize(s->raw, scales, map, count, (uint32_t)per_scale, made, QC_DTYPE_F32,
                            &overflow);
    } else if (w->stored_as == QC_SCHEME_INT8_BLOCKS) {
        ops->int8_blocks_dequantize(s->raw, scales, count, (uint32_t)per_scale, made, QC_DTYPE_F32,
                                    &overflow);
    } else {
        const int8_t *codes = s->raw;
        for (uint64_t at = 0, row = 0; at < count; at += per_scale, row++) {
            uint64_t cols = count - at < per_scale ? count - at : per_scale;
            ops->int8_rows_dequantize(codes + at, scales + row, 1, cols, made + at, QC_DTYPE_F32,
                                      &overflow);
        }
    }
    *out = made + (first - begin);
    return QC_OK;
}

/* ---- the other way around -------------------------------------------------------------------- */

/* Reads elements [first, first + n) of a matrix that is [rows, cols] in OUT and [cols, rows] in
 * MODEL, with `each` bytes per element. For each stored row, it reads neighbouring elements at once
 * and scatters them. */
static qc_status read_turned(const qc_against *a, qc_against_scratch *s, const qc_against_tensor *t,
                             uint64_t first, uint64_t n, qc_error *err)
{
    const qc_ckpt_tensor *from = &a->model->tensors[t->model_tensor];
    uint64_t each = qc_dtype_bits(from->dtype) / 8;
    uint64_t cols = t->row.dims[t->row.ndim - 1], rows = t->row.dims[t->row.ndim - 2];
    uint64_t top = first / cols, bottom = (first + n - 1) / cols, wide = bottom - top + 1;
    QC_TRY(qc_against_room(&s->turned, &s->turned_room, qc_sat_mul(n, each), err));
    QC_TRY(qc_against_room(&s->raw, &s->raw_room, qc_sat_mul(wide, each), err));
    unsigned char *dst = s->turned;
    for (uint64_t k = 0; k < cols; k++) {
        /* The rows of OUT in which column k belongs to the stretch. */
        uint64_t r0 = top + (top * cols + k < first), r1 = bottom + 1;
        r1 -= bottom * cols + k >= first + n;
        if (r0 >= r1)
            continue;
        QC_TRY(qc_checkpoint_read(a->model, s->source, from, (k * rows + r0) * each, s->raw,
                                  (size_t)((r1 - r0) * each), err));
        const unsigned char *raw = s->raw;
        for (uint64_t r = r0; r < r1; r++)
            memcpy(dst + (r * cols + k - first) * each, raw + (r - r0) * each, (size_t)each);
    }
    return QC_OK;
}

/* Decodes elements [first, first + n) of MODEL's coded or quantized weight to floats, in its own
 * order. */
static qc_status read_decoded(const qc_against *a, qc_against_scratch *s,
                              const qc_against_tensor *t, uint64_t first, uint64_t n,
                              const float **out, qc_error *err)
{
    const qc_ckpt_tensor *from = &a->model->tensors[t->model_tensor];
    if (t->packed)
        return qc_against_decode(a, s, a->model, t->model_tensor, t->packed, first, n, out, err);
    uint64_t begin = first, end = first + n;
    if (t->coded->coding == QC_CODING_MXFP4) {
        begin -= begin % QC_MXFP4_BLOCK;
        end = qc_ceil_div_u64(end, QC_MXFP4_BLOCK) * QC_MXFP4_BLOCK;
    }
    QC_TRY(qc_against_room(&s->made, &s->made_room, qc_sat_mul(end - begin, sizeof(float)), err));
    QC_TRY(qc_coded_read(a->model, s->source, a->options->ops, from, t->coded, &s->coded, begin,
                         end - begin, s->made, err));
    *out = (const float *)s->made + (first - begin);
    return QC_OK;
}

/* Decodes a stack [experts, in, out] whose codes lie as [experts, out, in], or one such matrix. */
static qc_status read_decoded_turned(const qc_against *a, qc_against_scratch *s,
                                     const qc_against_tensor *t, uint64_t first, uint64_t n,
                                     qc_error *err)
{
    uint64_t wide = t->row.dims[t->row.ndim - 1];  /* OUT's columns, which are stored rows */
    uint64_t depth = t->row.dims[t->row.ndim - 2]; /* OUT's rows, which are stored columns */
    uint64_t matrix = wide * depth;
    QC_TRY(qc_against_room(&s->turned, &s->turned_room, qc_sat_mul(n, sizeof(float)), err));
    float *dst = s->turned;
    for (uint64_t at = first; at < first + n;) {
        uint64_t expert = at / matrix, end = (expert + 1) * matrix;
        end = end < first + n ? end : first + n;
        uint64_t top = at % matrix / wide, bottom = (end - 1) % matrix / wide;
        for (uint64_t o = 0; o < wide; o++) {
            const float *values = NULL;
            QC_TRY(read_decoded(a, s, t, expert * matrix + o * depth + top, bottom - top + 1,
                                &values, err));
            for (uint64_t i = top; i <= bottom; i++) {
                uint64_t flat = expert * matrix + i * wide + o;
                if (flat >= at && flat < end)
                    dst[flat - first] = values[i - top];
            }
        }
        at = end;
    }
    return QC_OK;
}

/* ---- reading --------------------------------------------------------------------------------- */

qc_status qc_against_read(const qc_against *a, qc_against_scratch *s, const qc_against_tensor *t,
                          uint64_t first, uint64_t n, int hash, const void **out, qc_error *err)
{
    const qc_ckpt_tensor *from = &a->model->tensors[t->model_tensor];
    uint64_t each = qc_dtype_bits(from->dtype) / 8;
    const float *values = NULL;
    if (n == 0)
        return QC_OK;
    if (t->coded || t->packed) {
        if (t->row.transpose) {
            QC_TRY(read_decoded_turned(a, s, t, first, n, err));
            *out = s->turned;
            return QC_OK;
        }
        QC_TRY(read_decoded(a, s, t, first, n, &values, err));
        *out = values;
        /* The digest is over what was read for these elements, without the scales. */
        if (hash && t->coded) {
            qc_digest_update(s->hash, s->coded.codes, s->coded.code_bytes);
        } else if (hash) {
            uint64_t per_byte = t->packed->stored_as == QC_SCHEME_NF4 ? 2 : 1;
            uint64_t skip = first % codes_per_scale(t->packed) / per_byte;
            qc_digest_update(s->hash, (const unsigned char *)s->raw + skip,
                             (size_t)qc_ceil_div_u64(n, per_byte));
        }
        return QC_OK;
    }
    if (t->row.transpose) {
        QC_TRY(read_turned(a, s, t, first, n, err));
        *out = s->turned;
    } else {
        QC_TRY(qc_against_room(&s->raw, &s->raw_room, qc_sat_mul(n, each), err));
        QC_TRY(qc_checkpoint_read(a->model, s->source, from, first * each, s->raw,
                                  (size_t)(n * each), err));
        *out = s->raw;
    }
    if (hash)
        qc_digest_update(s->hash, *out, (size_t)(n * each));
    return QC_OK;
}

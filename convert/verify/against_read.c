/* Compares pieces of OUT's tensors with what they were made from. A piece is in memory. The weights
 * of MODEL, whatever they are stored as, are read in the order in which OUT has them, in steps that
 * stay in the L2 cache, and hashed and compared there. */
#include "convert/verify/against_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/awq_layout.h"

#include <math.h>
#include <string.h>

/* A step has so many bytes of source, which stay in the L2 cache between reading and comparing. */
#define STEP_BYTES ((uint64_t)512 << 10)
/* A step of a weight that lies transposed in MODEL has more, because that makes reads longer. */
#define TURNED_ELEMS ((uint64_t)4 << 20)

qc_status qc_against_scratch_of(qc_against *a, unsigned thread, qc_against_scratch **out,
                                qc_error *err)
{
    qc_against_scratch *s = *out = &a->scratch[thread];
    if (s->a)
        return QC_OK;
    s->a = a;
    QC_TRY(qc_malloc_aligned(&s->check, 64, sizeof *s->check, err));
    QC_TRY(qc_weight_reader_open(&s->model, a->model, err));
    QC_TRY(qc_weight_reader_open(&s->output, a->output, err));
    return qc_digest_create(&s->hash, err);
}

void qc_against_scratch_free(qc_against_scratch *s)
{
    void *const buffers[] = {s->raw.data,   s->turned.data, s->cast.data, s->made.data,
                             s->codes.data, s->slack.data,  s->check};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        qc_free(buffers[i]);
    qc_weight_reader_close(&s->model);
    qc_weight_reader_close(&s->output);
    qc_digest_destroy(s->hash);
}

static int is_awq(const qc_against_tensor *t)
{
    return t->stored && qc_schemes[t->stored->stored_as].format == QC_FORMAT_AWQ;
}

qc_dtype qc_against_read_dtype(const qc_against_tensor *t)
{
    return t->coded || t->packed ? QC_DTYPE_F32 : t->row.source_dtype;
}

/* Returns the elements of a step. */
static uint64_t step_elems(const qc_against_tensor *t)
{
    if (t->row.transpose)
        return TURNED_ELEMS;
    uint64_t bits = qc_dtype_bits(qc_against_read_dtype(t));
    uint64_t n = STEP_BYTES / (bits >= 8 ? bits / 8 : 1);
    if (t->row.kind == QC_AGAINST_QUANTIZED && qc_form_by_rows(&t->check.form))
        return n < t->cols ? t->cols : n - n % t->cols;
    return n; /* a multiple of every block size */
}

/* ---- scales ---------------------------------------------------------------------------------- */

/* Reads scales [first, first + n) of a quantized weight of OUT, as a loader has them. s->slack gets
 * how far each may be from the largest value of its block. */
static qc_status read_scales(qc_against_scratch *s, const qc_stored_weight *w, uint64_t first,
                             uint64_t n, const float **out, qc_error *err)
{
    QC_TRY(qc_buffer_room(&s->slack, n, sizeof(float), err));
    QC_TRY(qc_weight_scales(&s->output, w, first, n, out, err));
    const float *nested = s->output.nested.data;
    float *slack = s->slack.data;
    const uint64_t per = w->nested_block_elems, offset = per ? first % per : 0;
    for (uint64_t i = 0; i < n; i++) {
        const float scale = fabsf((*out)[i]);
        /* Half of the widest gap of the dynamic map is 0.00703. */
        slack[i] = w->nested_absmax == QC_NO_TENSOR
                       ? scale * 0x1p-20f
                       : fabsf(nested[(offset + i) / per]) * 0.0072f +
                             (scale + fabsf(w->nested_offset)) * 0x1p-20f;
    }
    return QC_OK;
}

/* ---- the other way around -------------------------------------------------------------------- */

/* Decodes elements [first, first + n) of MODEL's coded or quantized weight to floats, in its own
 * order. */
static qc_status read_decoded(qc_against_scratch *s, const qc_against_tensor *t, uint64_t first,
                              uint64_t n, const float **out, qc_error *err)
{
    const qc_weight_source w = {.tensor = t->model_tensor, .stored = t->packed, .coded = t->coded};
    return qc_weight_floats(&s->model, &w, first, n, out, err);
}

/* Decodes a stack [experts, in, out] whose codes lie as [experts, out, in], or one such matrix. */
static qc_status read_decoded_turned(qc_against_scratch *s, const qc_against_tensor *t,
                                     uint64_t first, uint64_t n, qc_error *err)
{
    uint64_t wide = t->row.dims[t->row.ndim - 1];  /* OUT's columns, which are stored rows */
    uint64_t depth = t->row.dims[t->row.ndim - 2]; /* OUT's rows, which are stored columns */
    uint64_t matrix = wide * depth;
    QC_TRY(qc_buffer_room(&s->turned, n, sizeof(float), err));
    float *dst = s->turned.data;
    for (uint64_t at = first; at < first + n;) {
        uint64_t expert = at / matrix, end = (expert + 1) * matrix;
        end = end < first + n ? end : first + n;
        uint64_t top = at % matrix / wide, bottom = (end - 1) % matrix / wide;
        for (uint64_t o = 0; o < wide; o++) {
            const float *values = NULL;
            QC_TRY(read_decoded(s, t, expert * matrix + o * depth + top, bottom - top + 1, &values,
                                err));
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

qc_status qc_against_read(qc_against_scratch *s, const qc_against_tensor *t, uint64_t first,
                          uint64_t n, int hash, const void **out, qc_error *err)
{
    const qc_checkpoint_tensor *from = &s->a->model->tensors[t->model_tensor];
    uint64_t each = qc_dtype_bits(from->dtype) / 8;
    const float *values = NULL;
    if (n == 0)
        return QC_OK;
    if (is_awq(t)) {
        const qc_weight_source w = {.tensor = t->model_tensor,
                                    .coded = t->coded,
                                    .by_groups = t->check.form.block_elems,
                                    .dims = {t->rows, t->cols}};
        QC_TRY(qc_buffer_room(&s->raw, n, qc_dtype_bits(qc_against_read_dtype(t)) / 8, err));
        *out = s->raw.data;
        return qc_weight_elements(&s->model, &w, first, n, s->raw.data, err);
    }
    if (t->coded || t->packed) {
        if (t->row.transpose) {
            QC_TRY(read_decoded_turned(s, t, first, n, err));
            *out = s->turned.data;
            return QC_OK;
        }
        QC_TRY(read_decoded(s, t, first, n, &values, err));
        *out = values;
        /* The digest is over what was read for these elements, without the scales. */
        if (hash)
            qc_digest_update(s->hash, s->model.code, s->model.code_bytes);
        return QC_OK;
    }
    if (t->row.transpose) {
        QC_TRY(qc_buffer_room(&s->turned, n, each, err));
        QC_TRY(qc_weight_read_turned(s->a->model, s->model.codes, from,
                                     t->row.dims[t->row.ndim - 1], first, n, s->turned.data, err));
        *out = s->turned.data;
    } else {
        QC_TRY(qc_buffer_room(&s->raw, n, each, err));
        QC_TRY(qc_checkpoint_read(s->a->model, s->model.codes, from, first * each, s->raw.data,
                                  (size_t)(n * each), err));
        *out = s->raw.data;
    }
    if (hash)
        qc_digest_update(s->hash, *out, (size_t)(n * each));
    return QC_OK;
}

/* ---- comparing a piece ----------------------------------------------------------------------- */

typedef struct {
    qc_against_tensor *t;
    qc_against_scratch *s;
    uint32_t piece;
    uint64_t offset; /* place of the piece in OUT's tensor */
    const unsigned char *bytes;
    size_t len;
    int hash;            /* the digest is over what is read for the comparison */
    const float *scales; /* scales of a quantized piece; the slack of each is in s */
} work;

static void first_difference(const work *w, const unsigned char *want, uint64_t at, uint64_t n)
{
    uint64_t *where = &w->t->differs[w->piece];
    if (*where != UINT64_MAX || memcmp(w->bytes + at, want, (size_t)n) == 0)
        return;
    uint64_t i = 0;
    while (w->bytes[at + i] == want[i])
        i++;
    *where = w->offset + at + i;
}

/* Reads bytes [begin, end) of the source as they lie, and hashes them. With `compare` they are to
 * be those of OUT. */
static qc_status take_bytes(work *w, uint64_t begin, uint64_t end, int compare, qc_error *err)
{
    const qc_checkpoint *model = w->s->a->model;
    const qc_checkpoint_tensor *from = &model->tensors[w->t->model_tensor];
    for (uint64_t at = begin, n = 0; at < end; at += n) {
        n = end - at < STEP_BYTES ? end - at : STEP_BYTES;
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_buffer_room(&w->s->raw, n, 1, err));
        QC_TRY(
            qc_checkpoint_read(model, w->s->model.codes, from, at, w->s->raw.data, (size_t)n, err));
        if (w->t->sources)
            qc_digest_update(w->s->hash, w->s->raw.data, (size_t)n);
        if (compare)
            first_difference(w, w->s->raw.data, at - begin, n);
    }
    return QC_OK;
}

static qc_status compare_cast(work *w, qc_error *err)
{
    const qc_quant_ops *ops = w->s->a->ops;
    uint64_t each = qc_dtype_bits(w->t->row.dtype) / 8;
    uint64_t begin = w->offset / each, end = begin + w->len / each, step = step_elems(w->t);
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step, overflow = 0;
        const void *source = NULL;
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_against_read(w->s, w->t, first, n, w->hash, &source, err));
        QC_TRY(qc_buffer_room(&w->s->cast, n, each, err));
        ops->cast(source, qc_against_read_dtype(w->t), n, w->s->cast.data, w->t->row.dtype,
                  &overflow);
        first_difference(w, w->s->cast.data, (first - begin) * each, n * each);
    }
    return QC_OK;
}

/* Checks n elements at source. skip is how many scales of the piece come before the first of
 * them. */
static qc_status check_step(const work *w, const void *source, uint64_t skip, uint64_t n,
                            const unsigned char *codes, qc_check_sums *sums, qc_error *err)
{
    const qc_against_tensor *t = w->t;
    qc_against_scratch *s = w->s;
    const qc_quant_ops *ops = w->s->a->ops;
    qc_dtype dtype = qc_against_read_dtype(t);
    const float *scales = w->scales + skip, *slack = (const float *)s->slack.data + skip;
    if (!t->coded && t->through != dtype) {
        uint64_t overflow = 0;
        QC_TRY(qc_buffer_room(&s->cast, n, (qc_dtype_bits(t->through) / 8), err));
        ops->cast(source, dtype, n, s->cast.data, t->through, &overflow);
        source = s->cast.data;
        dtype = t->through;
    }
    if (qc_form_by_rows(&t->check.form))
        QC_TRY(qc_buffer_room(&s->codes, t->cols, 1, err));
    qc_check_codes(ops, &t->check, source, dtype, n, codes, scales, slack, s->codes.data, s->check,
                   sums);
    return QC_OK;
}

static qc_status compare_quantized(work *w, qc_error *err)
{
    const qc_against_tensor *t = w->t;
    const qc_form *form = &t->check.form;
    /* The last byte may not be full. */
    const uint64_t begin = qc_form_code_elems(form, w->offset);
    const uint64_t end = qc_min_u64(qc_form_code_elems(form, w->offset + w->len), t->row.elems);
    const uint64_t step = step_elems(t);
    const uint64_t per = qc_form_by_rows(form) ? t->cols : form->block_elems;
    if (is_awq(t)) {
        QC_TRY(qc_buffer_room(&w->s->made, w->len, 1, err));
        qc_awq_unpack(w->bytes, t->rows, per, w->len, w->s->made.data);
        w->bytes = w->s->made.data;
    }
    QC_TRY(read_scales(w->s, t->stored, begin / per, qc_ceil_div_u64(end - begin, per), &w->scales,
                       err));
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step;
        const void *source = NULL;
        qc_check_sums sums;
        QC_TRY(qc_check_interrupted(err));
        qc_status st = qc_against_read(w->s, t, first, n, w->hash, &source, err);
        if (st == QC_ERR_NONFINITE) { /* FP8 or MXFP4 that cannot be read */
            if (t->sums[w->piece].bad_source == UINT64_MAX)
                t->sums[w->piece].bad_source = first - begin;
            if (err)
                memset(err, 0, sizeof *err);
            continue;
        }
        QC_TRY(st);
        QC_TRY(check_step(w, source, (first - begin) / per, n,
                          w->bytes + qc_form_code_bytes(form, first) - w->offset, &sums, err));
        qc_check_add(&t->sums[w->piece], &sums, first - begin);
    }
    return QC_OK;
}

qc_status qc_against_frame(qc_against *a, unsigned thread, uint32_t tensor,
                           const qc_output_frame *frame, const void *content, qc_error *err)
{
    qc_against_tensor *t = &a->tensors[tensor];
    work w = {.t = t, .offset = frame->at, .bytes = content, .len = frame->content_bytes};
    if (t->row.kind == QC_AGAINST_STATE || t->row.fault)
        return QC_OK;
    w.piece = (uint32_t)(w.offset / t->piece_bytes);
    if (w.piece >= t->piece_count)
        QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has a piece too many", t->row.name);
    /* Quantized weights are hashed in the order in which they are written. Stacks, matrices that
     * are turned back and integers are hashed as they lie (docs/format.md, section 4). */
    w.hash = t->sources && !is_awq(t) && !(t->row.transpose && t->row.kind == QC_AGAINST_CAST) &&
             !(t->coded && qc_coding_is_packed(t->coded->coding));
    QC_TRY(qc_against_scratch_of(a, thread, &w.s, err));
    qc_digest_reset(w.s->hash);
    QC_TRY(t->row.kind == QC_AGAINST_EQUAL  ? take_bytes(&w, w.offset, w.offset + w.len, 1, err)
           : t->row.kind == QC_AGAINST_CAST ? compare_cast(&w, err)
                                            : compare_quantized(&w, err));
    if (!t->sources)
        return QC_OK;
    if (!w.hash) { /* the comparison read in another order, so this is the piece's share */
        const uint64_t each = t->listed->source_piece_bytes, at = w.piece * each;
        QC_TRY(take_bytes(&w, at, qc_min_u64(at + each, t->row.source_bytes), 0, err));
    }
    t->sources[w.piece] = qc_digest_finish(w.s->hash);
    return QC_OK;
}

/* Reads rows of the original weight, whatever form it is stored in. Each thread has its own
 * source. */
#include "convert/validate/validate_layer.h"

#include "base/alloc.h"
#include "convert/model/coded_read.h"

#include <string.h>

struct qc_validate_source {
    const qc_validate_tools *tools;
    const qc_validate_pair *pair;
    const unsigned char *whole; /* Conv1D: [cols, rows] as it is stored; else NULL */
    qc_st_cursor *cursor;
    qc_coded_scratch coded;
    void *raw; /* rows as they are stored */
    size_t raw_room;
};

qc_status qc_validate_whole(void **out, const qc_validate_tools *tools,
                            const qc_validate_pair *pair, qc_error *err)
{
    const qc_checkpoint_tensor *t = &tools->model->tensors[pair->model_tensor];
    qc_st_cursor *cursor = NULL;
    qc_status st = qc_st_cursor_create(&cursor, err);
    if (st == QC_OK)
        st = qc_tensor_read(tools->model, t, cursor, out, err);
    qc_st_cursor_destroy(cursor);
    return st;
}

qc_status qc_validate_source_open(qc_validate_source **out, const qc_validate_tools *tools,
                                  const qc_validate_pair *pair, const void *whole, qc_error *err)
{
    QC_TRY(qc_calloc(out, 1, sizeof **out, err));
    **out = (qc_validate_source){.tools = tools, .pair = pair, .whole = whole};
    return qc_st_cursor_create(&(*out)->cursor, err);
}

void qc_validate_source_close(qc_validate_source *s)
{
    if (!s)
        return;
    qc_st_cursor_destroy(s->cursor);
    qc_coded_scratch_deinit(&s->coded);
    qc_free(s->raw);
    qc_free(s);
}

static qc_status room_for(qc_validate_source *s, size_t bytes, qc_error *err)
{
    if (bytes <= s->raw_room)
        return QC_OK;
    qc_free(s->raw);
    s->raw = NULL;
    s->raw_room = 0;
    QC_TRY(qc_malloc(&s->raw, bytes, err));
    s->raw_room = bytes;
    return QC_OK;
}

qc_status qc_validate_source_read(qc_validate_source *s, uint64_t first, uint64_t count, float *out,
                                  qc_error *err)
{
    const qc_validate_pair *p = s->pair;
    const qc_checkpoint *model = s->tools->model;
    const qc_checkpoint_tensor *t = &model->tensors[p->model_tensor];
    uint64_t each = qc_dtype_bits(t->dtype) / 8, overflow = 0;
    uint64_t n = count * p->cols;
    if (p->coded)
        return qc_coded_read(model, s->cursor, s->tools->ops, t, p->coded, &s->coded,
                             first * p->cols, n, out, err);
    QC_TRY(room_for(s, (size_t)(n * each), err));
    if (s->whole) {
        unsigned char *to = s->raw;
        for (uint64_t k = 0; k < p->cols; k++)
            for (uint64_t r = 0; r < count; r++)
                memcpy(to + (r * p->cols + k) * each, s->whole + (k * p->rows + first + r) * each,
                       (size_t)each);
    } else {
        QC_TRY(qc_checkpoint_read(model, s->cursor, t, first * p->cols * each, s->raw,
                                  (size_t)(n * each), err));
    }
    s->tools->ops->cast(s->raw, t->dtype, n, out, QC_DTYPE_F32, &overflow);
    return QC_OK;
}

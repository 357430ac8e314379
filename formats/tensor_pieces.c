#include "formats/tensor_pieces.h"

#include "base/checked.h"

#include <string.h>

typedef struct {
    qc_tensor_change change; /* first */
    const qc_checkpoint_tensor *parts;
    size_t count;
    const char *text;
} pieces;

static const pieces *pieces_of(const qc_checkpoint_tensor *t)
{
    const union {
        const qc_tensor_change *change;
        const pieces *pieces;
    } u = {t->change};
    return u.pieces;
}

static qc_status read_parts(const qc_checkpoint *c, qc_st_cursor *cur,
                            const qc_checkpoint_tensor *t, uint64_t offset, void *dst, size_t len,
                            qc_error *err)
{
    const pieces *p = pieces_of(t);
    unsigned char *to = dst;
    const uint64_t each = p->parts[0].bytes;
    while (len > 0) {
        const uint64_t at = offset % each;
        const size_t n = (size_t)qc_min_u64(each - at, len);
        QC_TRY(qc_checkpoint_read(c, cur, &p->parts[offset / each], at, to, n, err));
        offset += n;
        to += n;
        len -= n;
    }
    return QC_OK;
}

static qc_status read_text(const qc_checkpoint *c, qc_st_cursor *cur, const qc_checkpoint_tensor *t,
                           uint64_t offset, void *dst, size_t len, qc_error *err)
{
    (void)c, (void)cur, (void)err;
    memcpy(dst, pieces_of(t)->text + offset, len);
    return QC_OK;
}

static qc_status change(qc_checkpoint *c, qc_checkpoint_tensor *t, const pieces *like,
                        qc_error *err)
{
    pieces *p = NULL;
    t->change = NULL;
    QC_TRY(qc_arena_array(&c->arena, &p, 1, err));
    *p = *like;
    p->change.stored = *t;
    p->change.scattered = 1;
    t->change = &p->change;
    return QC_OK;
}

qc_status qc_tensor_join(qc_checkpoint *c, qc_checkpoint_tensor *t,
                         const qc_checkpoint_tensor *parts, size_t count, qc_error *err)
{
    QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &t->bytes, err));
    t->begin = parts[0].begin;
    t->file = parts[0].file;
    const pieces p = {.change.read = read_parts, .parts = parts, .count = count};
    return change(c, t, &p, err);
}

qc_status qc_tensor_text(qc_checkpoint *c, qc_checkpoint_tensor *t, const char *bytes, size_t len,
                         qc_error *err)
{
    char *copy = NULL;
    QC_TRY(qc_arena_array(&c->arena, &copy, len, err));
    memcpy(copy, bytes, len);
    t->dtype = QC_DTYPE_U8;
    t->ndim = 1;
    t->dims[0] = t->bytes = len;
    const pieces p = {.change.read = read_text, .text = copy};
    return change(c, t, &p, err);
}

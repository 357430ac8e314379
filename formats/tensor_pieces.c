#include "formats/tensor_pieces.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"

#include <string.h>

#define TILE_BYTES  ((uint64_t)4 << 20)
#define STRIP_BYTES ((uint64_t)1 << 18)
#define STRIP_COLS  64u /* a strip's columns are a line of the cache or two in each row of a tile */
/* Reads of less than this out of every run are no faster than reading the whole runs. */
#define RUN_BYTES 4096u

typedef struct {
    qc_tensor_change change; /* first */
    const qc_checkpoint_tensor *parts;
    size_t count;
    const char *text;
    qc_turned turned;
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

/* ---- matrices that lie turned ---- */

/* What a cursor keeps: rows of a tensor's matrices, which are its bytes from `begin` to `end`, and
 * where the last read ended. */
typedef struct {
    qc_buffer rows, strip;
    uint64_t file, place, first; /* tell the tensor apart */
    const void *change;
    uint64_t begin, end, next;
} tile;

static void release_tile(void *kept)
{
    tile *k = kept;
    qc_free(k->rows.data);
    qc_free(k->strip.data);
}

/* Puts `count` columns of a strip, which lie `pitch` elements apart, side by side in rows of `cols`
 * elements. */
#define SCATTER(type)                                                                              \
    for (uint64_t r = 0; r < rows; r++)                                                            \
        for (uint64_t k = 0; k < count; k++)                                                       \
            ((type *)to)[r * cols + k] = ((const type *)strip)[k * pitch + r];                     \
    break

static void scatter(void *to, uint64_t cols, const void *strip, uint64_t pitch, uint64_t rows,
                    uint64_t count, uint64_t each)
{
    switch (each) {
    case 1:
        SCATTER(uint8_t);
    case 2:
        SCATTER(uint16_t);
    case 4:
        SCATTER(uint32_t);
    default:
        SCATTER(uint64_t);
    }
}

/* Reads `rows` rows of a matrix from row `row` on to the tile. */
static qc_status fill_tile(tile *k, const qc_checkpoint *c, qc_st_cursor *cur,
                           const qc_checkpoint_tensor *t, const qc_turned *l, uint64_t matrix,
                           uint64_t row, uint64_t rows, qc_error *err)
{
    const uint64_t each = qc_dtype_bits(t->dtype) / 8, begin = matrix * l->cols * l->stride;
    const int whole = rows * 2 >= l->stride || l->stride * each <= RUN_BYTES;
    const uint64_t pitch = whole ? l->stride : rows;
    const uint64_t most =
        qc_max_u64(1, qc_min_u64(STRIP_BYTES / (pitch * each), STRIP_COLS)); /* columns */
    QC_TRY(qc_buffer_room(&k->rows, rows * l->cols, each, err));
    QC_TRY(qc_buffer_room(&k->strip, most * pitch, each, err));
    if (row == 0 && rows < l->rows && !t->change && !c->files[t->file].compressed)
        qc_file_hint_read_soon(&c->files[t->file].st.file,
                               c->files[t->file].st.data_offset + t->begin + begin * each,
                               l->cols * l->stride * each);
    for (uint64_t col = 0; col < l->cols; col += most) {
        const uint64_t count = qc_min_u64(most, l->cols - col);
        const uint64_t at = begin + col * l->stride + l->first + row;
        const uint64_t reads = whole ? 1 : count;
        const uint64_t len = whole ? (count - 1) * l->stride + rows : rows;
        unsigned char *strip = k->strip.data;
        QC_TRY(qc_check_interrupted(err));
        for (uint64_t i = 0; i < reads; i++)
            QC_TRY(qc_checkpoint_read(c, cur, t, (at + i * l->stride) * each,
                                      strip + i * pitch * each, (size_t)(len * each), err));
        scatter((unsigned char *)k->rows.data + col * each, l->cols, strip, pitch, rows, count,
                each);
    }
    return QC_OK;
}

/* Whoever reads on where a read ended, or much, gets a whole tile; a sample is no more than asked
 * for. */
qc_status qc_tensor_read_turned(const qc_checkpoint *c, qc_st_cursor *cur,
                                const qc_checkpoint_tensor *t, const qc_turned *l, uint64_t offset,
                                void *dst, size_t len, qc_error *err)
{
    const uint64_t row_bytes = l->cols * (qc_dtype_bits(t->dtype) / 8);
    const uint64_t most = qc_max_u64(1, TILE_BYTES / row_bytes);
    unsigned char *to = dst;
    void *kept = NULL;
    if (c->file_count == 0) /* which is an error */
        return qc_checkpoint_read(c, cur, t, offset, dst, len, err);
    const uint64_t file = c->files[t->file].st.serial;
    QC_TRY(qc_st_cursor_keep(&kept, cur, sizeof(tile), release_tile, err));
    tile *k = kept;
    if (k->file != file || k->place != t->begin || k->first != l->first || k->change != t->change)
        k->begin = k->end = k->next = 0;
    k->file = file;
    k->place = t->begin;
    k->first = l->first;
    k->change = t->change;
    while (len > 0) {
        if (offset < k->begin || offset >= k->end) {
            const uint64_t row = offset / row_bytes % l->rows,
                           matrix = offset / row_bytes / l->rows;
            const uint64_t asked = qc_ceil_div_u64(offset % row_bytes + len, row_bytes);
            const int goes_on = offset == k->next || row == 0 || len >= TILE_BYTES / 4;
            const uint64_t rows =
                qc_min_u64(goes_on ? most : qc_min_u64(most, asked), l->rows - row);
            k->begin = k->end = 0; /* until it is whole */
            QC_TRY(fill_tile(k, c, cur, t, l, matrix, row, rows, err));
            k->begin = offset - offset % row_bytes;
            k->end = k->begin + rows * row_bytes;
        }
        const size_t n = (size_t)qc_min_u64(k->end - offset, len);
        memcpy(to, (const unsigned char *)k->rows.data + (offset - k->begin), n);
        to += n;
        offset += n;
        len -= n;
        k->next = offset;
    }
    return QC_OK;
}

static qc_status read_turned(const qc_checkpoint *c, qc_st_cursor *cur,
                             const qc_checkpoint_tensor *t, uint64_t offset, void *dst, size_t len,
                             qc_error *err)
{
    const pieces *p = pieces_of(t);
    return qc_tensor_read_turned(c, cur, &p->parts[0], &p->turned, offset, dst, len, err);
}

/* ---- making them ---- */

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

qc_status qc_tensor_turn(qc_checkpoint *c, qc_checkpoint_tensor *t,
                         const qc_checkpoint_tensor *from, const qc_turned *turned, uint64_t matrix,
                         qc_error *err)
{
    const uint64_t each = qc_dtype_bits(t->dtype) / 8;
    qc_checkpoint_tensor *part = NULL;
    QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &t->bytes, err));
    QC_TRY(qc_arena_array(&c->arena, &part, 1, err));
    *part = *from;
    part->begin += matrix * turned->cols * turned->stride * each;
    part->bytes = t->bytes / turned->rows * turned->stride;
    t->begin = part->begin;
    t->file = part->file;
    const pieces p = {.change.read = read_turned, .parts = part, .count = 1, .turned = *turned};
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

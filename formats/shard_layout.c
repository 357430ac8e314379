/* Three passes over the tensors:
 *
 *   fill    groups go to the shard being filled while they fit (in the order given) and lie on
 *           its device
 *   sort    each shard as the reference writer does: dtype descending, then name. Sizes of a dtype
 *           are multiples of its alignment, so every tensor lies aligned
 *   header  offsets are running sums; the header's bytes are counted once they are known, its text
 *           is made when it is written: the headers of a large model are tens of megabytes */
#include "formats/shard_layout.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "formats/digest.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_TARGET_BYTES (8u << 20)
#define PIECE_MAX_BYTES    (16u << 20) /* QC_FRAME_MAX_BYTES */
#define FALLBACK_ALIGN     4096u

static const qc_st_meta pt_format = {"format", "pt"};

static uint64_t round_up(uint64_t n, uint64_t align)
{
    return qc_ceil_div_u64(n, align) * align;
}

uint64_t qc_layout_piece_bytes(uint64_t tensor_bytes, uint64_t align_bytes)
{
    if (tensor_bytes == 0)
        return align_bytes; /* no pieces, but nobody divides by zero */
    if (tensor_bytes <= PIECE_TARGET_BYTES)
        return tensor_bytes;
    if (align_bytes > PIECE_MAX_BYTES)
        align_bytes = FALLBACK_ALIGN;
    if (align_bytes > PIECE_TARGET_BYTES)
        return align_bytes;
    uint64_t count = qc_ceil_div_u64(tensor_bytes, PIECE_TARGET_BYTES);
    uint64_t piece = round_up(qc_ceil_div_u64(tensor_bytes, count), align_bytes);
    return piece <= PIECE_TARGET_BYTES ? piece : PIECE_TARGET_BYTES / align_bytes * align_bytes;
}

/* ---- Fill ----------------------------------------------------------------------------------- */

static qc_status tensor_bytes(const qc_out_tensor *t, uint64_t *bytes, qc_error *err)
{
    qc_status st = qc_shape_bytes(t->st.dims, t->st.ndim, t->st.dtype, bytes, err);
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s'", t->st.name);
    return st;
}

/* Put every tensor's size into st.end and its shard's number into shard. */
static qc_status fill(qc_out_tensor *tensors, uint32_t count, uint64_t limit, uint32_t *shards,
                      qc_error *err)
{
    uint64_t used = 0;
    uint32_t shard = 0;
    for (uint32_t i = 0; i < count;) {
        uint64_t group_bytes = 0, with = 0;
        uint32_t end = i;
        for (; end < count && tensors[end].group == tensors[i].group; end++) {
            qc_out_tensor *t = &tensors[end];
            if (t->device != tensors[i].device)
                QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' is parted from its group by device",
                        t->st.name);
            t->st.begin = 0;
            QC_TRY(tensor_bytes(t, &t->st.end, err));
            if (t->align_bytes == 0)
                QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has no alignment", t->st.name);
            if (t->piece_bytes == 0)
                t->piece_bytes = qc_layout_piece_bytes(t->st.end, t->align_bytes);
            if (qc_add_u64(group_bytes, t->st.end, &group_bytes))
                QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': sizes overflow 64 bits", t->st.name);
        }
        if (qc_add_u64(used, group_bytes, &with))
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': sizes overflow 64 bits", tensors[i].st.name);
        if (i > 0 && tensors[i].device < tensors[i - 1].device)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' comes after those of a later device",
                    tensors[i].st.name);
        int other_device = i > 0 && tensors[i].device != tensors[i - 1].device;
        if (other_device || (with > limit && used > 0)) {
            shard++;
            with = group_bytes;
        }
        used = with;
        for (; i < end; i++)
            tensors[i].shard = shard;
    }
    *shards = shard + 1;
    return QC_OK;
}

/* ---- Sort ----------------------------------------------------------------------------------- */

typedef struct {
    const qc_st_tensor *st;
    uint32_t index;
} sort_item;

static int by_file_order(const void *a, const void *b)
{
    return qc_st_tensor_order(((const sort_item *)a)->st, ((const sort_item *)b)->st);
}

/* Names are told apart by their digests: sorting hundreds of thousands of them takes longer than
 * all the rest. */
static qc_status check_names(const qc_out_tensor *tensors, uint32_t count, qc_error *err)
{
    void *v = NULL;
    size_t slots = 16;
    while (slots / 2 < count)
        slots *= 2;
    QC_TRY(qc_calloc(&v, slots, sizeof(uint32_t), err));
    uint32_t *table = v; /* index + 1, or 0 */
    qc_status st = QC_OK;
    for (uint32_t i = 0; st == QC_OK && i < count; i++) {
        const char *name = tensors[i].st.name;
        qc_digest digest = qc_digest_bytes(name, strlen(name));
        size_t at = (size_t)qc_load_le64(digest.b) & (slots - 1);
        for (; st == QC_OK && table[at]; at = (at + 1) & (slots - 1)) {
            if (strcmp(tensors[table[at] - 1].st.name, name) == 0)
                st = qc_error_set(err, QC_ERR_INPUT, __FILE__, __LINE__,
                                  "two output tensors would be called '%s'", name);
        }
        table[at] = i + 1;
    }
    qc_free(table);
    return st;
}

static qc_status place(qc_shard *s, qc_out_tensor *tensors, sort_item *items, uint32_t first,
                       uint32_t end, qc_error *err)
{
    uint64_t offset = 0;
    s->count = end - first;
    for (uint32_t i = first; i < end; i++)
        items[i - first] = (sort_item){&tensors[i].st, i};
    qsort(items, s->count, sizeof *items, by_file_order);
    for (uint32_t i = 0; i < s->count; i++) {
        qc_st_tensor *st = &tensors[items[i].index].st;
        s->order[i] = items[i].index;
        st->begin = offset;
        if (qc_add_u64(offset, st->end, &offset)) /* end holds the size until now */
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': sizes overflow 64 bits", st->name);
        st->end = offset;
    }
    s->data_bytes = offset;
    return QC_OK;
}

/* ---- Header --------------------------------------------------------------------------------- */

static qc_status count_header(qc_shard *s, const qc_out_tensor *tensors, qc_error *err)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < s->count; i++)
        bytes += qc_st_header_entry_bytes(&tensors[s->order[i]].st);
    qc_status st = qc_st_header_bytes(&s->header_bytes, bytes, s->count, &pt_format, 1, err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", s->name);
    return st;
}

qc_status qc_layout_header(qc_strbuf *out, const qc_layout *layout, uint32_t shard,
                           const qc_out_tensor *tensors, qc_error *err)
{
    const qc_shard *s = &layout->shards[shard];
    void *v = NULL;
    QC_TRY(qc_calloc(&v, s->count, sizeof(qc_st_tensor), err));
    qc_st_tensor *ordered = v;
    for (uint32_t i = 0; i < s->count; i++)
        ordered[i] = tensors[s->order[i]].st;
    qc_status st = qc_st_header_build(out, ordered, s->count, &pt_format, 1, err);
    qc_free(ordered);
    return st;
}

static qc_status name_shard(qc_shard *s, qc_arena *arena, uint32_t index, uint32_t count,
                            qc_error *err)
{
    if (count == 1)
        return qc_arena_printf(arena, &s->name, err, "model.safetensors");
    return qc_arena_printf(arena, &s->name, err, "model-%05" PRIu32 "-of-%05" PRIu32 ".safetensors",
                           index + 1, count);
}

qc_status qc_layout_make(qc_layout *out, qc_arena *arena, qc_out_tensor *tensors, uint32_t count,
                         uint64_t max_shard_bytes, qc_error *err)
{
    void *v = NULL;
    uint32_t shards = 0;
    memset(out, 0, sizeof *out);
    QC_TRY(fill(tensors, count, max_shard_bytes, &shards, err));
    QC_TRY(qc_arena_alloc(arena, &v, shards, sizeof *out->shards, err));
    out->shards = v;
    QC_TRY(qc_arena_alloc(arena, &v, count, sizeof(sort_item), err));
    sort_item *items = v;
    QC_TRY(qc_arena_alloc(arena, &v, count, sizeof(uint32_t), err));
    uint32_t *order = v;
    QC_TRY(check_names(tensors, count, err));
    uint32_t first = 0;
    for (uint32_t i = 0; i < shards; i++) {
        qc_shard *s = &out->shards[i];
        uint32_t end = first;
        while (end < count && tensors[end].shard == i)
            end++;
        s->order = order + first;
        s->device = first < end ? tensors[first].device : 0;
        QC_TRY(name_shard(s, arena, i, shards, err));
        QC_TRY(place(s, tensors, items, first, end, err));
        QC_TRY(count_header(s, tensors, err));
        first = end;
    }
    out->count = shards;
    return QC_OK;
}

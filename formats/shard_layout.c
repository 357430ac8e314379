/* Makes three passes over the tensors. Each pass asks for their descriptions again, because keeping
 * them would take ten times the memory of the result.
 *
 *   fill    groups go to the shard being filled while they fit (in the order given) and lie on
 *           its device
 *   sort    each shard as the reference writer does: dtype descending, then name. Sizes of a dtype
 *           are multiples of its alignment, so every tensor lies aligned
 *   header  offsets are running sums; the header's bytes are counted once they are known, its text
 *           is made when it is written: the headers of a large model are tens of megabytes */
#define _GNU_SOURCE /* qsort_r */
#include "formats/shard_layout.h"

#include "base/alloc.h"
#include "base/bytes.h"
#include "base/checked.h"
#include "formats/digest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PIECE_TARGET_BYTES (8u << 20)
#define PIECE_MAX_BYTES    (16u << 20) /* QC_FRAME_MAX_BYTES */
#define FALLBACK_ALIGN     4096u
#define NAME_SHOWN_BYTES   160

static const qc_st_meta pt_format = {"format", "pt"};

uint64_t qc_layout_piece_bytes(uint64_t tensor_bytes, uint64_t align_bytes)
{
    if (tensor_bytes == 0)
        return align_bytes; /* there is nothing to cut, but others divide by this */
    if (tensor_bytes <= PIECE_TARGET_BYTES)
        return tensor_bytes;
    if (align_bytes > PIECE_MAX_BYTES)
        align_bytes = FALLBACK_ALIGN;
    if (align_bytes > PIECE_TARGET_BYTES)
        return align_bytes;
    uint64_t count = qc_ceil_div_u64(tensor_bytes, PIECE_TARGET_BYTES);
    uint64_t piece = qc_align_u64(qc_ceil_div_u64(tensor_bytes, count), align_bytes);
    return piece <= PIECE_TARGET_BYTES ? piece : PIECE_TARGET_BYTES / align_bytes * align_bytes;
}

/* ---- Names ----------------------------------------------------------------------------------- */

/* Returns the length of the first half of a tensor's name where it comes in two. */
static size_t stem_bytes(const qc_out_tensor *t)
{
    return t->suffix ? t->stem_bytes : strlen(t->st.name);
}

static const char *suffix_of(const qc_out_tensor *t)
{
    return t->suffix ? t->suffix : "";
}

qc_status qc_out_tensor_name(qc_strbuf *out, const qc_out_tensor *t, qc_error *err)
{
    out->len = 0;
    QC_TRY(qc_strbuf_add(out, t->st.name, stem_bytes(t), err));
    return qc_strbuf_adds(out, suffix_of(t), err);
}

typedef struct {
    const char *stem, *suffix;
    uint32_t stem_bytes;
    qc_dtype dtype;
    uint32_t index;
} sort_item;

static int compare_items(const sort_item *a, const sort_item *b)
{
    size_t at_a = a->stem_bytes, at_b = b->stem_bytes, at = qc_min_size(at_a, at_b);
    int c = memcmp(a->stem, b->stem, at);
    if (c)
        return c;
    for (;; at++) {
        unsigned char one = (unsigned char)(at < at_a ? a->stem[at] : a->suffix[at - at_a]);
        unsigned char two = (unsigned char)(at < at_b ? b->stem[at] : b->suffix[at - at_b]);
        if (one != two)
            return one < two ? -1 : 1;
        if (!one)
            return 0;
    }
}

static sort_item item_of(const qc_out_tensor *t, uint32_t index)
{
    return (sort_item){t->st.name, suffix_of(t), (uint32_t)stem_bytes(t), t->st.dtype, index};
}

static int compare_names(const qc_out_tensor *a, const qc_out_tensor *b)
{
    const sort_item one = item_of(a, 0), two = item_of(b, 0);
    return compare_items(&one, &two);
}

static qc_out_tensor get(qc_out_tensors tensors, uint32_t i)
{
    qc_out_tensor t;
    memset(&t, 0, sizeof t);
    tensors.get(tensors.ctx, i, &t);
    return t;
}

/* ---- Fill ----------------------------------------------------------------------------------- */

/* Returns the name of a tensor as messages show it. */
static const char *shown(const qc_out_tensor *t, char buf[NAME_SHOWN_BYTES])
{
    (void)snprintf(buf, NAME_SHOWN_BYTES, "%.*s%s", (int)stem_bytes(t), t->st.name, suffix_of(t));
    return buf;
}

static qc_status tensor_bytes(const qc_out_tensor *t, uint64_t *bytes, qc_error *err)
{
    char name[NAME_SHOWN_BYTES];
    qc_status st = qc_shape_bytes(t->st.dims, t->st.ndim, t->st.dtype, bytes, err);
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s'", shown(t, name));
    return st;
}

/* The group that begins with tensor i: its device, size, and where the next one begins. */
typedef struct {
    uint64_t bytes;
    uint32_t device, end;
} span;

static qc_status measure(span *out, qc_out_tensors tensors, uint32_t i, qc_error *err)
{
    char name[NAME_SHOWN_BYTES];
    uint32_t group = 0;
    *out = (span){.end = i};
    for (; out->end < tensors.count; out->end++) {
        const qc_out_tensor t = get(tensors, out->end);
        uint64_t bytes = 0;
        if (out->end == i) {
            group = t.group;
            out->device = t.device;
        }
        if (t.group != group)
            break;
        if (t.device != out->device)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' is not on the device of its group",
                    shown(&t, name));
        if (t.align_bytes == 0)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' has no alignment", shown(&t, name));
        QC_TRY(tensor_bytes(&t, &bytes, err));
        if (qc_add_u64(out->bytes, bytes, &out->bytes))
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': the sizes overflow 64 bits", shown(&t, name));
    }
    return QC_OK;
}

/* Stores the number of each tensor's shard, for now, where its beginning will be. */
static qc_status fill(qc_out_tensors tensors, uint64_t limit, uint64_t *shard_of, uint32_t *shards,
                      qc_error *err)
{
    char name[NAME_SHOWN_BYTES];
    uint64_t used = 0;
    uint32_t shard = 0, device = 0;
    for (uint32_t i = 0; i < tensors.count;) {
        span s;
        uint64_t with = 0;
        QC_TRY(measure(&s, tensors, i, err));
        const qc_out_tensor t = get(tensors, i);
        if (qc_add_u64(used, s.bytes, &with))
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': the sizes overflow 64 bits", shown(&t, name));
        if (i > 0 && s.device < device)
            QC_FAIL(err, QC_ERR_INTERNAL, "tensor '%s' comes after those of a later device",
                    shown(&t, name));
        int other_device = i > 0 && s.device != device;
        if (other_device || (with > limit && used > 0)) {
            shard++;
            with = s.bytes;
        }
        used = with;
        device = s.device;
        for (; i < s.end; i++)
            shard_of[i] = shard;
    }
    *shards = shard + 1;
    return QC_OK;
}

/* ---- Sort ----------------------------------------------------------------------------------- */

/* Compares as qc_st_tensor_order does. */
static int by_file_order(const void *pa, const void *pb)
{
    const sort_item *a = pa, *b = pb;
    if (a->dtype != b->dtype)
        return a->dtype > b->dtype ? -1 : 1;
    return compare_items(a, b);
}

/* Compares digests of the names, because sorting hundreds of thousands of names takes longer than
 * everything else. */
static qc_status check_names(qc_out_tensors tensors, qc_strbuf *name, qc_error *err)
{
    void *v = NULL;
    size_t slots = 16;
    while (slots / 2 < tensors.count)
        slots *= 2;
    QC_TRY(qc_calloc(&v, slots, sizeof(uint32_t), err));
    uint32_t *table = v; /* index + 1, or 0 */
    qc_status st = QC_OK;
    for (uint32_t i = 0; st == QC_OK && i < tensors.count; i++) {
        const qc_out_tensor t = get(tensors, i);
        QC_TRY_GOTO(st, done, qc_out_tensor_name(name, &t, err));
        qc_digest digest = qc_digest_bytes(name->data, name->len);
        size_t at = (size_t)qc_load_le64(digest.b) & (slots - 1);
        for (; table[at]; at = (at + 1) & (slots - 1)) {
            const qc_out_tensor other = get(tensors, table[at] - 1);
            if (compare_names(&other, &t) == 0)
                QC_TRY_GOTO(st, done,
                            QC_ERROR(err, QC_ERR_INPUT, "two output tensors would be called '%s'",
                                     name->data));
        }
        table[at] = i + 1;
    }
done:
    qc_free(table);
    return st;
}

static int by_name(const void *pa, const void *pb, void *tensors)
{
    const qc_out_tensor a = get(*(const qc_out_tensors *)tensors, *(const uint32_t *)pa);
    const qc_out_tensor b = get(*(const qc_out_tensors *)tensors, *(const uint32_t *)pb);
    return compare_names(&a, &b);
}

/* Each comparison asks for the descriptions again: keeping all names would take more memory than
 * everything else that a conversion knows of the tensors. */
void qc_out_tensors_by_name(qc_out_tensors tensors, uint32_t *order)
{
    for (uint32_t i = 0; i < tensors.count; i++)
        order[i] = i;
    qsort_r(order, tensors.count, sizeof *order, by_name, &tensors);
}

static qc_status place(qc_shard *s, qc_out_tensors tensors, sort_item *items, uint64_t *begins,
                       qc_error *err)
{
    char name[NAME_SHOWN_BYTES];
    uint64_t offset = 0;
    for (uint32_t i = 0; i < s->count; i++) {
        const qc_out_tensor t = get(tensors, s->first + i);
        items[i] = item_of(&t, s->first + i);
    }
    qsort(items, s->count, sizeof *items, by_file_order);
    for (uint32_t i = 0; i < s->count; i++) {
        const qc_out_tensor t = get(tensors, items[i].index);
        uint64_t bytes = 0;
        QC_TRY(tensor_bytes(&t, &bytes, err));
        s->order[i] = items[i].index;
        begins[items[i].index] = offset;
        if (qc_add_u64(offset, bytes, &offset))
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': the sizes overflow 64 bits", shown(&t, name));
    }
    s->data_bytes = offset;
    return QC_OK;
}

/* ---- Header --------------------------------------------------------------------------------- */

/* Gives tensor `index`, with its name written to `name`. */
static qc_status named(qc_out_tensor *t, qc_strbuf *name, const qc_layout *l,
                       qc_out_tensors tensors, uint32_t index, qc_error *err)
{
    *t = qc_layout_place(l, tensors, index);
    QC_TRY(qc_out_tensor_name(name, t, err));
    t->st.name = name->data;
    return QC_OK;
}

qc_status qc_layout_header(qc_strbuf *out, const qc_layout *layout, uint32_t shard,
                           qc_out_tensors tensors, qc_error *err)
{
    const qc_shard *s = &layout->shards[shard];
    size_t start = out->len;
    qc_strbuf name;
    qc_out_tensor t;
    qc_strbuf_init(&name, SIZE_MAX / 2);
    qc_status st = qc_st_header_begin(out, &pt_format, 1, err);
    for (uint32_t i = 0; st == QC_OK && i < s->count; i++) {
        st = named(&t, &name, layout, tensors, s->order[i], err);
        if (st == QC_OK)
            st = qc_st_header_add(out, &t.st, err);
    }
    if (st == QC_OK)
        st = qc_st_header_end(out, start, err);
    qc_strbuf_deinit(&name);
    return st;
}

qc_status qc_layout_index_name(const char **out, qc_arena *arena, const char *shard, qc_error *err)
{
    return qc_arena_printf(arena, out, err, "%.*s.safetensors.index.json",
                           (int)strcspn(shard, ".-"), shard);
}

/* Makes the shards with their tensors from the numbers that fill left in `begins`. */
static void cut(qc_layout *l, qc_out_tensors tensors, uint32_t *order)
{
    uint32_t first = 0;
    for (uint32_t i = 0; i < l->count; i++) {
        qc_shard *s = &l->shards[i];
        s->first = first;
        while (first < tensors.count && l->begins[first] == i)
            first++;
        s->count = first - s->first;
        s->order = order + s->first;
        if (s->count > 0)
            s->device = get(tensors, s->first).device;
    }
}

static qc_status lay_out(qc_layout *out, qc_arena *arena, qc_out_tensors tensors, const char *stem,
                         qc_strbuf *name, uint64_t max_shard_bytes, qc_error *err)
{
    void *v = NULL;
    uint32_t most = 0;
    QC_TRY(check_names(tensors, name, err));
    QC_TRY(qc_arena_alloc(arena, &out->begins, tensors.count, sizeof *out->begins, err));
    QC_TRY(fill(tensors, max_shard_bytes, out->begins, &out->count, err));
    QC_TRY(qc_arena_alloc(arena, &out->shards, out->count, sizeof *out->shards, err));
    QC_TRY(qc_arena_alloc(arena, &v, tensors.count, sizeof(uint32_t), err));
    cut(out, tensors, v);
    for (uint32_t i = 0; i < out->count; i++)
        most = out->shards[i].count > most ? out->shards[i].count : most;
    sort_item *items = NULL;
    QC_TRY(qc_malloc(&items, most * sizeof *items, err));
    qc_status st = QC_OK;
    for (uint32_t i = 0; st == QC_OK && i < out->count; i++)
        st = place(&out->shards[i], tensors, items, out->begins, err);
    qc_free(items);
    for (uint32_t i = 0; st == QC_OK && i < out->count; i++) {
        qc_shard *s = &out->shards[i];
        uint64_t bytes = 0;
        qc_out_tensor t;
        if (out->count == 1)
            QC_TRY(qc_arena_printf(arena, &s->name, err, "%s.safetensors", stem));
        else
            QC_TRY(qc_arena_printf(arena, &s->name, err,
                                   "%s-%05" PRIu32 "-of-%05" PRIu32 ".safetensors", stem, i + 1,
                                   out->count));
        for (uint32_t k = 0; k < s->count; k++) {
            QC_TRY(named(&t, name, out, tensors, s->order[k], err));
            QC_TRY(qc_st_check_name(t.st.name, err));
            bytes += qc_st_header_entry_bytes(&t.st);
        }
        st = qc_st_header_bytes(&s->header_bytes, bytes, s->count, &pt_format, 1, err);
        if (st != QC_OK)
            qc_error_prefix(err, "%s", s->name);
    }
    return st;
}

qc_status qc_layout_make(qc_layout *out, qc_arena *arena, qc_out_tensors tensors, const char *stem,
                         uint64_t max_shard_bytes, qc_error *err)
{
    qc_strbuf name;
    qc_strbuf_init(&name, SIZE_MAX / 2);
    memset(out, 0, sizeof *out);
    qc_status st = lay_out(out, arena, tensors, stem, &name, max_shard_bytes, err);
    qc_strbuf_deinit(&name);
    return st;
}

qc_out_tensor qc_layout_place(const qc_layout *layout, qc_out_tensors tensors, uint32_t i)
{
    qc_out_tensor t = get(tensors, i);
    uint32_t low = 0, high = layout->count;
    while (high - low > 1) { /* finds the last shard whose first tensor is not behind i */
        uint32_t mid = low + (high - low) / 2;
        if (layout->shards[mid].first <= i)
            low = mid;
        else
            high = mid;
    }
    uint64_t elems = 1;
    for (unsigned d = 0; d < t.st.ndim; d++)
        elems *= t.st.dims[d]; /* no overflow: checked when it was laid out */
    uint64_t bytes = elems * qc_dtype_bits(t.st.dtype) / 8;
    t.shard = low;
    t.st.begin = layout->begins[i];
    t.st.end = t.st.begin + bytes;
    if (t.piece_bytes == 0)
        t.piece_bytes = qc_layout_piece_bytes(bytes, t.align_bytes);
    return t;
}

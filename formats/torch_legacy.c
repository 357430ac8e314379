/* torch.save's form before 1.6: five pickles one behind the other, then the storages in the order
 * of the list of keys. Nothing says how long the pickles are. So they are run over a window at the
 * start of the file, and the window grows until they end within it. */
#include "base/alloc.h"
#include "base/bytes.h"
#include "formats/torch_file_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define WINDOW_FIRST    (1u << 20)
#define WINDOW_GROWTH   4u
#define STREAM_PROTOCOL 1001u
#define KEY_SHOWN_BYTES 80
#define COUNT_BYTES     8u /* u64 elements before each storage */

/* 0x1950a86a20f9469cfc6c as LONG1 holds it. */
static const unsigned char magic[] = {0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19};

/* One key of the pickle's storages; keys that occur several times stand for one storage. */
typedef struct {
    const char *key;
    size_t bytes;
    size_t storage;
    int placed;
    uint64_t begin;
} named_storage;

typedef struct {
    const unsigned char *text;
    size_t len;
    size_t pos;
    qc_pickle state;
    qc_pickle keys;
} stream;

static qc_status next_pickle(stream *s, qc_pickle *p, const char *what, qc_error *err)
{
    qc_status st = qc_pickle_run(p, s->text + s->pos, s->len - s->pos, err);
    if (st == QC_OK)
        s->pos += p->used_bytes;
    else if (st != QC_ERR_NOMEM)
        qc_error_prefix(err, "%s at byte %zu", what, s->pos);
    return st;
}

static int is_magic(const qc_pickle *p)
{
    return p->root.kind == QC_PICKLE_OPAQUE && p->root.count == sizeof magic &&
           memcmp(p->text + p->root.at, magic, sizeof magic) == 0;
}

static qc_status check_preamble(stream *s, qc_error *err)
{
    qc_pickle p;
    QC_TRY(next_pickle(s, &p, "magic number", err));
    int ok = is_magic(&p);
    qc_pickle_deinit(&p);
    if (!ok)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the file is a pickle, but does not begin with the magic number of torch.save");
    QC_TRY(next_pickle(s, &p, "protocol", err));
    ok = p.root.kind == QC_PICKLE_INT && p.root.at == STREAM_PROTOCOL;
    qc_pickle_deinit(&p);
    if (!ok)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "the protocol of the stream is not %u", STREAM_PROTOCOL);
    QC_TRY(next_pickle(s, &p, "system", err));
    const qc_pickle_value *little = qc_pickle_get(&p, &p.root, "little_endian");
    ok = little && little->kind == QC_PICKLE_BOOL && little->at == 1;
    qc_pickle_deinit(&p);
    if (!ok)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "the tensors are not in little-endian byte order; save them on a little-endian "
                "machine");
    return QC_OK;
}

static qc_status read_pickles(stream *s, qc_error *err)
{
    QC_TRY(check_preamble(s, err));
    QC_TRY(next_pickle(s, &s->state, "state dict", err));
    return next_pickle(s, &s->keys, "keys", err);
}

/* ---- storages ---- */

static int compare_keys(const void *va, const void *vb)
{
    const named_storage *a = va;
    const named_storage *b = vb;
    int order = memcmp(a->key, b->key, a->bytes < b->bytes ? a->bytes : b->bytes);
    return order != 0 ? order : (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static int compare_storages(const void *va, const void *vb)
{
    const named_storage *a = va;
    const named_storage *b = vb;
    int order = compare_keys(va, vb);
    return order != 0 ? order : (a->storage > b->storage) - (a->storage < b->storage);
}

/* Makes the sorted list of keys, each once; *count gets how many there are. */
static qc_status name_storages(named_storage *list, const qc_pickle *p, size_t *count,
                               qc_error *err)
{
    size_t n = 0;
    for (size_t i = 0; i < p->storage_count; i++)
        list[i] = (named_storage){.key = (const char *)p->text + p->storages[i].key,
                                  .bytes = p->storages[i].key_bytes,
                                  .storage = i};
    qsort(list, p->storage_count, sizeof *list, compare_storages);
    for (size_t i = 0; i < p->storage_count; i++) {
        const qc_pickle_storage *s = &p->storages[list[i].storage];
        if (n && compare_keys(&list[n - 1], &list[i]) == 0) {
            const qc_pickle_storage *t = &p->storages[list[n - 1].storage];
            if (s->elems != t->elems || s->dtype != t->dtype)
                QC_FAIL(err, QC_ERR_INPUT, "storage '%.*s' is described in two ways",
                        s->key_bytes < KEY_SHOWN_BYTES ? (int)s->key_bytes : KEY_SHOWN_BYTES,
                        list[i].key);
            continue;
        }
        list[n++] = list[i];
    }
    *count = n;
    return QC_OK;
}

/* Places the storage of one key at *at, and moves *at behind it. */
static qc_status place_one(const qc_torch_file *f, const qc_pickle *p, named_storage *s,
                           uint64_t *at, qc_error *err)
{
    unsigned char count[COUNT_BYTES];
    uint64_t bytes = 0;
    int shown = s->bytes < KEY_SHOWN_BYTES ? (int)s->bytes : KEY_SHOWN_BYTES;
    const qc_pickle_storage *from = &p->storages[s->storage];
    if (s->placed)
        QC_FAIL(err, QC_ERR_INPUT, "storage '%.*s' is in the list of keys twice", shown, s->key);
    QC_TRY(qc_torch_storage_bytes(from, &bytes, err));
    if (f->file_bytes - *at < COUNT_BYTES || f->file_bytes - *at - COUNT_BYTES < bytes)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "storage '%.*s' of %" PRIu64 " bytes at byte %" PRIu64
                " is cut off: the file has %" PRIu64 " bytes",
                shown, s->key, bytes, *at, f->file_bytes);
    QC_TRY(qc_file_pread(&f->file, count, sizeof count, *at, err));
    if (qc_load_le64(count) != from->elems)
        QC_FAIL(err, QC_ERR_INPUT,
                "storage '%.*s' has %" PRIu64 " elements, but the pickle says %" PRIu64, shown,
                s->key, qc_load_le64(count), from->elems);
    s->begin = *at + COUNT_BYTES;
    s->placed = 1;
    *at = s->begin + bytes;
    return QC_OK;
}

static qc_status place_storages(const qc_torch_file *f, const stream *s, named_storage *list,
                                size_t count, qc_error *err)
{
    const qc_pickle *keys = &s->keys;
    uint64_t at = s->pos;
    size_t placed = 0;
    if (keys->root.kind != QC_PICKLE_LIST)
        QC_FAIL(err, QC_ERR_INPUT, "the keys of the storages are not a list");
    for (size_t i = keys->containers[keys->root.at].first; i != SIZE_MAX;
         i = keys->pairs[i].next, placed++) {
        const qc_pickle_value *v = &keys->pairs[i].value;
        named_storage key = {.key = "", .bytes = v->count};
        if (v->kind == QC_PICKLE_STRING)
            key.key = (const char *)keys->text + v->at;
        named_storage *hit = v->kind == QC_PICKLE_STRING && count
                                 ? bsearch(&key, list, count, sizeof *list, compare_keys)
                                 : NULL;
        if (!hit)
            QC_FAIL(err, QC_ERR_INPUT, "a key names no storage of the state dict");
        QC_TRY(place_one(f, &s->state, hit, &at, err));
    }
    if (placed != count)
        QC_FAIL(err, QC_ERR_INPUT, "%zu of the %zu storages are not in the list of keys",
                count - placed, count);
    if (at != f->file_bytes)
        QC_FAIL(err, QC_ERR_INPUT, "%" PRIu64 " bytes are behind the last storage",
                f->file_bytes - at);
    return QC_OK;
}

static qc_status fill(qc_torch_file *f, const stream *s, named_storage *list,
                      qc_torch_place *places, qc_error *err)
{
    const qc_pickle *p = &s->state;
    size_t count = 0;
    QC_TRY(name_storages(list, p, &count, err));
    QC_TRY(place_storages(f, s, list, count, err));
    for (size_t i = 0; i < p->storage_count; i++) {
        named_storage key = {.key = (const char *)p->text + p->storages[i].key,
                             .bytes = p->storages[i].key_bytes};
        named_storage *hit = bsearch(&key, list, count, sizeof *list, compare_keys);
        if (!hit)
            QC_FAIL(err, QC_ERR_INTERNAL, "a storage has no place in the file");
        places[i].begin = hit->begin;
        QC_TRY(qc_torch_storage_bytes(&p->storages[i], &places[i].bytes, err));
    }
    return qc_torch_file_fill(f, p, places, err);
}

/* Reads the pickles within the first len bytes. */
static qc_status read_window(qc_torch_file *f, void *text, size_t len, qc_error *err)
{
    stream s = {.text = text, .len = len};
    void *list = NULL;
    void *places = NULL;
    qc_status st = qc_file_pread(&f->file, text, len, 0, err);
    if (st == QC_OK)
        st = read_pickles(&s, err);
    if (st == QC_OK)
        st = qc_calloc(&list, s.state.storage_count, sizeof(named_storage), err);
    if (st == QC_OK)
        st = qc_calloc(&places, s.state.storage_count, sizeof(qc_torch_place), err);
    if (st == QC_OK) {
        f->head_bytes = s.pos;
        st = fill(f, &s, list, places, err);
    }
    qc_free(list);
    qc_free(places);
    qc_pickle_deinit(&s.state);
    qc_pickle_deinit(&s.keys);
    return st;
}

qc_status qc_torch_legacy_read(qc_torch_file *f, qc_error *err)
{
    uint64_t most = f->file_bytes < QC_PICKLE_MAX_BYTES ? f->file_bytes : QC_PICKLE_MAX_BYTES;
    uint64_t len = most < WINDOW_FIRST ? most : WINDOW_FIRST;
    for (;;) {
        void *text = NULL;
        QC_TRY(qc_malloc(&text, (size_t)len, err));
        qc_status st = read_window(f, text, (size_t)len, err);
        qc_free(text);
        /* head_bytes is set once the pickles have ended. */
        if (st != QC_ERR_TRUNCATED || f->head_bytes != 0)
            return st;
        if (len == most && most < f->file_bytes)
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "the pickles at its start do not end within %u bytes, the most that is read",
                    QC_PICKLE_MAX_BYTES);
        if (len == most)
            return st;
        len = most - len < len * (WINDOW_GROWTH - 1) ? most : len * WINDOW_GROWTH;
    }
}

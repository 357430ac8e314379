/* Byte-pair merges. Of all adjacent pairs, the one with the lowest rank is merged, the leftmost
 * among equals, until no pair is in the table. A heap over a linked list makes this n log n for a
 * text of n characters, which is the whole text if there is no pre-tokenizer. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/tokenizer/tokenizer_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <utf8proc.h>

#define EMPTY UINT64_MAX
/* an entry lies within this many slots; by chance alone it takes fewer than a hundred */
#define REACH 512u
#define SOME  65536u /* characters or merges between two looks at Ctrl-C */

/* ---- tables --------------------------------------------------------------------------------- */

/* FNV-1a, then mixed, because the low bits choose the slot. */
static uint64_t hash_text(const char *text, size_t len)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)text[i]) * 0x100000001b3u;
    return h ^ h >> 32;
}

static uint64_t hash_pair(uint64_t pair)
{
    pair = (pair ^ pair >> 33) * 0xff51afd7ed558ccdu;
    return pair ^ pair >> 33;
}

/* A power of two, so that the table is at most half full. */
static size_t slots_for(size_t count)
{
    size_t slots = 16;
    while (slots / 2 < count)
        slots *= 2;
    return slots;
}

qc_status qc_bpe_vocab_init(qc_bpe *b, qc_arena *arena, size_t count, qc_error *err)
{
    b->vocab_slots = slots_for(count);
    QC_TRY(qc_arena_alloc(arena, &b->vocab, b->vocab_slots, sizeof *b->vocab, err));
    return QC_OK;
}

/* Finds the entry, or the free slot for it, at most `reach` slots behind where it belongs. NULL if
 * there is neither. */
static qc_vocab_entry *vocab_slot(const qc_bpe *b, const char *text, size_t len, size_t reach)
{
    size_t mask = b->vocab_slots - 1, i = (size_t)hash_text(text, len) & mask;
    for (size_t way = 0; way <= reach; way++, i = (i + 1) & mask) {
        qc_vocab_entry *e = &b->vocab[i];
        if (!e->text || (e->len == len && memcmp(e->text, text, len) == 0))
            return e;
    }
    return NULL;
}

qc_status qc_bpe_vocab_add(qc_bpe *b, const char *text, size_t len, uint32_t id, qc_error *err)
{
    qc_vocab_entry *e = vocab_slot(b, text, len, REACH);
    if (!e)
        QC_FAIL(err, QC_ERR_INPUT, "vocab: too many tokens have the hash of '%.80s'", text);
    b->vocab_count += e->text == NULL;
    *e = (qc_vocab_entry){text, (uint32_t)len, id};
    return QC_OK;
}

uint32_t qc_bpe_find(const qc_bpe *b, const char *text, size_t len)
{
    const qc_vocab_entry *e = vocab_slot(b, text, len, REACH);
    return e && e->text ? e->id : QC_NO_TOKEN;
}

qc_status qc_bpe_merges_init(qc_bpe *b, qc_arena *arena, size_t count, qc_error *err)
{
    b->merge_slots = slots_for(count);
    QC_TRY(qc_arena_alloc(arena, &b->merges, b->merge_slots, sizeof *b->merges, err));
    for (size_t i = 0; i < b->merge_slots; i++)
        b->merges[i].pair = EMPTY;
    return QC_OK;
}

/* Does the same for merges. */
static qc_merge_entry *merge_slot(const qc_bpe *b, uint32_t left, uint32_t right)
{
    uint64_t pair = (uint64_t)left << 32 | right;
    size_t mask = b->merge_slots - 1, i = (size_t)hash_pair(pair) & mask;
    for (size_t way = 0; way <= REACH; way++, i = (i + 1) & mask)
        if (b->merges[i].pair == EMPTY || b->merges[i].pair == pair)
            return &b->merges[i];
    return NULL;
}

qc_status qc_bpe_merge_add(qc_bpe *b, uint32_t left, uint32_t right, uint32_t rank, uint32_t id,
                           qc_error *err)
{
    qc_merge_entry *e = merge_slot(b, left, right);
    if (!e)
        QC_FAIL(err, QC_ERR_INPUT,
                "merges: too many pairs have the hash of the tokens %" PRIu32 " and %" PRIu32, left,
                right);
    *e = (qc_merge_entry){(uint64_t)left << 32 | right, rank, id};
    return QC_OK;
}

/* NULL if the pair is not merged. */
static const qc_merge_entry *find_merge(const qc_bpe *b, uint32_t left, uint32_t right)
{
    const qc_merge_entry *e = merge_slot(b, left, right);
    return !e || e->pair == EMPTY ? NULL : e;
}

void qc_bpe_finish(qc_bpe *b)
{
    for (uint32_t c = 0; c < QC_CHAR_IDS; c++) {
        uint8_t text[4];
        size_t len = (size_t)utf8proc_encode_char((utf8proc_int32_t)c, text);
        b->char_ids[c] = qc_bpe_find(b, (const char *)text, len);
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        char name[8];
        (void)snprintf(name, sizeof name, "<0x%02X>", byte);
        b->byte_ids[byte] = qc_bpe_find(b, name, strlen(name));
    }
    b->unk_id = b->unk_token ? qc_bpe_find(b, b->unk_token, strlen(b->unk_token)) : QC_NO_TOKEN;
}

/* ---- one piece ------------------------------------------------------------------------------ */

struct qc_bpe_symbol {
    uint32_t id;
    int gone;             /* it was merged into the one on its left */
    size_t before, after; /* indices in the list; SIZE_MAX: none */
};

struct qc_bpe_candidate {
    uint32_t rank, id;
    size_t place;
};

void qc_bpe_room_deinit(qc_bpe_room *r)
{
    qc_free(r->symbols);
    qc_free(r->heap);
    r->symbols = NULL;
    r->heap = NULL;
    r->symbol_room = r->heap_room = r->heap_count = 0;
}

/* array: the address of a pointer to `room` elements. */
static qc_status grow(void *array, size_t *room, size_t need, size_t bytes_each, qc_error *err)
{
    uint64_t more = qc_max_u64(qc_max_u64(*room + *room / 2, need), 64);
    void *p = NULL;
    if (need <= *room)
        return QC_OK;
    memcpy(&p, array, sizeof p);
    QC_TRY(qc_realloc_array(&p, (size_t)more, bytes_each, err));
    memcpy(array, &p, sizeof p);
    *room = (size_t)more;
    return QC_OK;
}

qc_status qc_bpe_push(qc_bpe_room *r, uint32_t id, qc_error *err)
{
    QC_TRY(grow(&r->ids, &r->room, r->count + 1, sizeof *r->ids, err));
    r->ids[r->count++] = id;
    return QC_OK;
}

static int sooner(const qc_bpe_candidate *a, const qc_bpe_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->place < b->place;
}

static qc_status heap_push(qc_bpe_room *r, qc_bpe_candidate c, qc_error *err)
{
    QC_TRY(grow(&r->heap, &r->heap_room, r->heap_count + 1, sizeof *r->heap, err));
    size_t i = r->heap_count++;
    for (; i > 0 && sooner(&c, &r->heap[(i - 1) / 2]); i = (i - 1) / 2)
        r->heap[i] = r->heap[(i - 1) / 2];
    r->heap[i] = c;
    return QC_OK;
}

/* Call it only when the heap is not empty. */
static qc_bpe_candidate heap_pop(qc_bpe_room *r)
{
    qc_bpe_candidate top = r->heap[0], last = r->heap[--r->heap_count];
    size_t i = 0, n = r->heap_count;
    for (size_t child = 1; child < n; child = 2 * i + 1) {
        if (child + 1 < n && sooner(&r->heap[child + 1], &r->heap[child]))
            child++;
        if (!sooner(&r->heap[child], &last))
            break;
        r->heap[i] = r->heap[child];
        i = child;
    }
    r->heap[i] = last;
    return top;
}

static qc_status offer(const qc_bpe *b, qc_bpe_room *r, size_t place, qc_error *err)
{
    const qc_bpe_symbol *s = &r->symbols[place];
    const qc_merge_entry *m = find_merge(b, s->id, r->symbols[s->after].id);
    return m ? heap_push(r, (qc_bpe_candidate){m->rank, m->id, place}, err) : QC_OK;
}

static qc_status merge_all(const qc_bpe *b, qc_bpe_room *r, size_t count, qc_error *err)
{
    qc_bpe_symbol *s = r->symbols;
    size_t done = 0;
    r->heap_count = 0;
    for (size_t i = 0; i + 1 < count; i++) {
        if (i % SOME == SOME - 1)
            QC_TRY(qc_check_interrupted(err));
        QC_TRY(offer(b, r, i, err));
    }
    while (r->heap_count > 0) {
        qc_bpe_candidate c = heap_pop(r);
        if (++done % SOME == 0)
            QC_TRY(qc_check_interrupted(err));
        size_t right = s[c.place].after;
        if (s[c.place].gone || right == SIZE_MAX)
            continue;
        /* One side may have become another token since. What counts is the merge of the two as they
         * are now. */
        const qc_merge_entry *m = find_merge(b, s[c.place].id, s[right].id);
        if (!m || m->id != c.id)
            continue;
        s[c.place].id = c.id;
        s[c.place].after = s[right].after;
        s[right].gone = 1;
        if (s[right].after != SIZE_MAX)
            s[s[right].after].before = c.place;
        if (s[c.place].before != SIZE_MAX)
            QC_TRY(offer(b, r, s[c.place].before, err));
        if (s[c.place].after != SIZE_MAX)
            QC_TRY(offer(b, r, c.place, err));
    }
    return QC_OK;
}

/* ---- characters to symbols ------------------------------------------------------------------ */

typedef struct {
    const qc_bpe *b;
    qc_bpe_room *r;
    size_t count;
    int pending; /* an unknown token that has not been added yet */
} word;

static qc_status add_symbol(word *w, uint32_t id, qc_error *err)
{
    QC_TRY(grow(&w->r->symbols, &w->r->symbol_room, w->count + 1, sizeof *w->r->symbols, err));
    w->r->symbols[w->count] = (qc_bpe_symbol){id, 0, w->count - 1, w->count + 1};
    w->count++; /* the first one's `before` is SIZE_MAX: 0 - 1 */
    return QC_OK;
}

static int has_bytes(const qc_bpe *b, qc_span c)
{
    for (size_t i = 0; i < c.len; i++)
        if (b->byte_ids[(unsigned char)c.text[i]] == QC_NO_TOKEN)
            return 0;
    return 1;
}

/* Adds a character that is no token. */
static qc_status add_unknown(word *w, qc_span c, qc_error *err)
{
    const qc_bpe *b = w->b;
    if (b->byte_fallback && has_bytes(b, c)) {
        /* A pending unknown token stays pending, as in the package. */
        for (size_t i = 0; i < c.len; i++)
            QC_TRY(add_symbol(w, b->byte_ids[(unsigned char)c.text[i]], err));
        return QC_OK;
    }
    if (!b->unk_token)
        return QC_OK; /* left out, as in the package */
    if (b->unk_id == QC_NO_TOKEN)
        QC_FAIL(err, QC_ERR_INPUT, "the tokenizer's unknown token is not in its vocabulary");
    if (w->pending && !b->fuse_unk)
        QC_TRY(add_symbol(w, b->unk_id, err));
    w->pending = 1;
    return QC_OK;
}

/* The bytes of the UTF-8 character that begins here. The text is known to be UTF-8. */
static size_t char_bytes(unsigned char first)
{
    return first < 0x80 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
}

static uint32_t char_id(const qc_bpe *b, qc_span c)
{
    unsigned char first = (unsigned char)c.text[0];
    if (c.len == 1)
        return b->char_ids[first & 127];
    if (c.len == 2) {
        uint32_t code = (uint32_t)(first & 31) << 6 | ((unsigned char)c.text[1] & 63);
        if (code < QC_CHAR_IDS)
            return b->char_ids[code];
    }
    return qc_bpe_find(b, c.text, c.len);
}

static qc_status add_characters(word *w, qc_span s, qc_error *err)
{
    for (size_t at = 0; at < s.len;) {
        qc_span c = {s.text + at, char_bytes((unsigned char)s.text[at])};
        c.len = c.len > s.len - at ? s.len - at : c.len;
        uint32_t id = char_id(w->b, c);
        at += c.len;
        if (w->count % SOME == SOME - 1)
            QC_TRY(qc_check_interrupted(err));
        if (id == QC_NO_TOKEN) {
            QC_TRY(add_unknown(w, c, err));
            continue;
        }
        if (w->pending)
            QC_TRY(add_symbol(w, w->b->unk_id, err));
        w->pending = 0;
        QC_TRY(add_symbol(w, id, err));
    }
    return w->pending ? add_symbol(w, w->b->unk_id, err) : QC_OK;
}

qc_status qc_bpe_encode(const qc_bpe *b, qc_bpe_room *r, qc_span s, qc_error *err)
{
    word w = {.b = b, .r = r};
    QC_TRY(qc_check_interrupted(err));
    if (b->ignore_merges) {
        uint32_t whole = qc_bpe_find(b, s.text, s.len);
        if (whole != QC_NO_TOKEN)
            return qc_bpe_push(r, whole, err);
    }
    QC_TRY(add_characters(&w, s, err));
    if (w.count == 0)
        return QC_OK;
    r->symbols[w.count - 1].after = SIZE_MAX;
    QC_TRY(merge_all(b, r, w.count, err));
    for (size_t i = 0; i != SIZE_MAX; i = r->symbols[i].after)
        QC_TRY(qc_bpe_push(r, r->symbols[i].id, err));
    return QC_OK;
}

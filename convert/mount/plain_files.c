#include "convert/mount/plain_files.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/cpu.h"
#include "convert/mount/frame_cache.h"
#include "formats/file_stamp.h"
#include "formats/manifest_header.h"

#include <pthread.h>
#include <string.h>

#define PIECE_BYTES (4u << 20) /* of a file that is no shard */
#define NEAR_BYTES  (1u << 20) /* requests of one reader overtake each other by less */
#define WRONG_BYTES "its bytes are not those that were written"
#define NO_RANGE    UINT32_MAX

/* A frame of a shard, or a piece of another file. */
typedef struct {
    uint64_t stored_offset, offset; /* in the two files */
    uint32_t stored_bytes, bytes;
    uint32_t file, range;
    uint32_t next;       /* where the last request ended, in it */
    unsigned char told;  /* of its first failure */
    unsigned char known; /* `digest` is set */
    qc_digest digest;    /* of what is stored */
} frame;

/* The frames of a tensor or of a header. */
typedef struct {
    const char *tensor; /* NULL: the header */
    size_t first, count;
    size_t unread;
    int wrong;
    qc_digest digest; /* over all of them */
} range;

typedef struct {
    qc_plain_file shown;
    qc_file file;   /* that it is made of */
    qc_strbuf text; /* of qconv.json, which has no frames */
    size_t first, count;
} entry;

struct qc_plain_files {
    qc_arena arena;
    qc_plain_fault fault;
    void *fault_ctx;
    entry *files;
    frame *frames;
    range *ranges;
    size_t file_count, file_cap, frame_count, frame_cap, range_count, range_cap;
    size_t frame_bytes, stored_bytes; /* of the largest */
    pthread_mutex_t lock;             /* protects what changes of frames and ranges; a leaf lock */
    qc_frame_cache *cache;
    size_t ahead_frames;
    uint64_t ahead_bytes;
};

/* ---- What there is --------------------------------------------------------------------------- */

static qc_status grow(void *inout, size_t count, size_t *cap, size_t bytes_each, qc_error *err)
{
    if (count < *cap)
        return QC_OK;
    size_t more = *cap ? *cap * 2 : 64;
    QC_TRY((qc_realloc_array)(inout, more, bytes_each, err));
    *cap = more;
    return QC_OK;
}

/* Opens what the file prefix/name is made of. */
static qc_status add_file(entry **out, qc_plain_files *p, const char *dir, const char *prefix,
                          const char *name, const char *ending, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    qc_file_stamp stamp;
    const char *path = NULL;
    QC_TRY(grow(&p->files, p->file_count, &p->file_cap, sizeof *p->files, err));
    entry *e = *out = &p->files[p->file_count];
    *e = (entry){.file = QC_FILE_CLOSED, .first = p->frame_count};
    QC_TRY(qc_arena_printf(&p->arena, &e->shown.path, err, "%s%s", prefix, name));
    QC_TRY(qc_arena_printf(&p->arena, &path, err, "%s/%s%s", dir, name, ending));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        QC_FAIL(err, QC_ERR_CHECK, "%s: the file is missing", path);
    QC_TRY(qc_file_open_read(&e->file, path, err));
    p->file_count++;
    QC_TRY(qc_file_stamp_take(&stamp, &e->file, err));
    e->shown.modified_ns = stamp.modified_ns;
    return QC_OK;
}

/* Adds what follows of the last file. */
static qc_status add_frame(qc_plain_files *p, frame f, qc_error *err)
{
    entry *e = &p->files[p->file_count - 1];
    QC_TRY(grow(&p->frames, p->frame_count, &p->frame_cap, sizeof *p->frames, err));
    f.file = (uint32_t)(p->file_count - 1);
    p->frames[p->frame_count++] = f;
    p->frame_bytes = (size_t)qc_max_u64(p->frame_bytes, f.bytes);
    p->stored_bytes = (size_t)qc_max_u64(p->stored_bytes, f.stored_bytes);
    e->shown.bytes += f.bytes;
    e->count++;
    return QC_OK;
}

/* The frames of a tensor or header are the next `count`. */
static qc_status add_range(qc_plain_files *p, const char *tensor, const qc_frame **next,
                           size_t count, const qc_digest *digest, qc_error *err)
{
    range r = {.first = p->frame_count, .count = count, .unread = count, .digest = *digest};
    QC_TRY(grow(&p->ranges, p->range_count, &p->range_cap, sizeof *p->ranges, err));
    if (tensor)
        QC_TRY(qc_arena_strdup(&p->arena, &r.tensor, tensor, err));
    for (const qc_frame *f = *next; f < *next + count; f++)
        QC_TRY(add_frame(p,
                         (frame){.stored_offset = f->stored_offset,
                                 .offset = f->content_offset,
                                 .stored_bytes = f->stored_bytes,
                                 .bytes = f->content_bytes,
                                 .range = (uint32_t)p->range_count},
                         err));
    *next += count;
    p->ranges[p->range_count++] = r;
    return QC_OK;
}

/* Tensors first <= i < end lie in the shard, whose file is the last one. */
static qc_status add_shard(qc_plain_files *p, const qc_manifest *m, size_t shard, size_t first,
                           size_t end, qc_error *err)
{
    const qc_file *f = &p->files[p->file_count - 1].file;
    qc_shard_frames frames;
    QC_TRY(qc_shard_frames_read(&frames, f, m, shard, first, end, err));
    const qc_frame *next = frames.table.frames;
    qc_status st = qc_shard_header_check(f, m, shard, first, end, &frames, err);
    if (st == QC_OK)
        st = add_range(p, NULL, &next, frames.header_frames, &m->shards[shard].header_stored, err);
    for (size_t i = first; st == QC_OK && i < end; i++)
        st = add_range(p, m->tensors[i].name, &next, qc_shard_pieces(&m->tensors[i]),
                       &m->tensors[i].stored, err);
    qc_shard_frames_deinit(&frames);
    return st;
}

/* Of a file that is no shard, the last one. */
static qc_status add_pieces(qc_plain_files *p, const qc_manifest_file *m, void *piece,
                            qc_digest_state *whole, qc_error *err)
{
    const qc_file *f = &p->files[p->file_count - 1].file;
    for (uint64_t at = 0; at < m->bytes; at += PIECE_BYTES) {
        const uint32_t n = qc_min_u32(m->bytes - at, PIECE_BYTES);
        QC_TRY(qc_file_pread(f, piece, n, at, err));
        qc_digest_update(whole, piece, n);
        QC_TRY(add_frame(p,
                         (frame){.stored_offset = at,
                                 .offset = at,
                                 .bytes = n,
                                 .range = NO_RANGE,
                                 .known = 1,
                                 .digest = qc_digest_bytes(piece, n)},
                         err));
    }
    qc_digest d = qc_digest_finish(whole);
    if (!qc_digest_equal(&d, &m->digest))
        QC_FAIL(err, QC_ERR_CHECK, "%s: " WRONG_BYTES, f->path);
    return QC_OK;
}

static qc_status add_others(qc_plain_files *p, const qc_manifest *m, const char *dir,
                            const char *prefix, qc_error *err)
{
    entry *e = NULL;
    void *piece = NULL;
    qc_digest_state *whole = NULL;
    qc_status st = qc_digest_create(&whole, err);
    if (st == QC_OK)
        st = qc_malloc(&piece, PIECE_BYTES, err);
    for (size_t i = 0; st == QC_OK && i < m->file_count; i++) {
        qc_digest_reset(whole);
        st = add_file(&e, p, dir, prefix, m->files[i].path, "", err);
        if (st == QC_OK)
            st = add_pieces(p, &m->files[i], piece, whole, err);
    }
    qc_free(piece);
    qc_digest_destroy(whole);
    return st;
}

static qc_status add_output(qc_plain_files *p, qc_manifest *m, const char *dir, const char *prefix,
                            qc_error *err)
{
    entry *e = NULL;
    size_t first = 0, end = 0;
    if (m->shard_count > 0 && !m->compressed)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: its shards are plain .safetensors files already, which every program reads "
                "as they are",
                dir);
    qc_file_allow_many(p->file_count + m->shard_count + m->file_count);
    for (size_t i = 0; i < m->shard_count; i++, first = end) {
        while (end < m->tensor_count && m->tensors[end].shard == i)
            end++;
        QC_TRY(add_file(&e, p, dir, prefix, m->shards[i].name, ".zst", err));
        QC_TRY(add_shard(p, m, i, first, end, err));
    }
    QC_TRY(add_others(p, m, dir, prefix, err));
    QC_TRY(add_file(&e, p, dir, prefix, QC_MANIFEST_NAME, "", err));
    qc_manifest_make_plain(m);
    qc_strbuf_init(&e->text, SIZE_MAX / 2);
    QC_TRY(qc_manifest_write(m, &e->text, err));
    e->shown.bytes = e->text.len;
    return QC_OK;
}

qc_status qc_plain_files_add(qc_plain_files *p, const char *dir, const char *prefix, qc_error *err)
{
    qc_arena arena;
    qc_manifest m;
    qc_arena_init(&arena);
    qc_status st = qc_manifest_load(&m, &arena, dir, err);
    if (st == QC_OK)
        st = add_output(p, &m, dir, prefix, err);
    qc_arena_deinit(&arena);
    return st;
}

size_t qc_plain_files_count(const qc_plain_files *p)
{
    return p->file_count;
}

const qc_plain_file *qc_plain_files_at(const qc_plain_files *p, size_t i)
{
    return &p->files[i].shown;
}

/* ---- Frames ---------------------------------------------------------------------------------- */

/* The last frame of a range was read for the first time. */
static qc_status judge(const qc_plain_files *p, range *r, qc_error *err)
{
    qc_digest *all = NULL;
    QC_TRY(qc_calloc(&all, r->count, sizeof *all, err));
    for (size_t i = 0; i < r->count; i++)
        all[i] = p->frames[r->first + i].digest;
    qc_digest whole = qc_digest_root(all, r->count);
    qc_free(all);
    r->wrong = !qc_digest_equal(&whole, &r->digest);
    return QC_OK;
}

/* Is this what was written, as far as that can be told by now? Called with the lock held. */
static qc_status check(const qc_plain_files *p, frame *f, const qc_digest *stored, qc_error *err)
{
    range *r = f->range == NO_RANGE ? NULL : &p->ranges[f->range];
    if (!f->known) {
        f->digest = *stored;
        if (r->unread == 1)
            QC_TRY(judge(p, r, err));
        f->known = 1;
        r->unread--;
    }
    if ((r && r->wrong) || !qc_digest_equal(stored, &f->digest))
        QC_FAIL(err, QC_ERR_CHECK, WRONG_BYTES);
    return QC_OK;
}

static qc_status make_frame(void *ctx, size_t i, const qc_frame_tools *tools, void *dst,
                            qc_error *err)
{
    qc_plain_files *p = ctx;
    frame *f = &p->frames[i];
    const qc_file *file = &p->files[f->file].file;
    qc_digest d;
    if (f->range == NO_RANGE) {
        QC_TRY(qc_file_pread(file, dst, f->bytes, f->stored_offset, err));
        d = qc_digest_bytes(dst, f->bytes);
    } else {
        QC_TRY(qc_file_pread(file, tools->stored, f->stored_bytes, f->stored_offset, err));
        d = qc_digest_bytes(tools->stored, f->stored_bytes);
        qc_status st =
            qc_frame_decode(tools->coder, tools->stored, f->stored_bytes, dst, f->bytes, err);
        if (st == QC_ERR_INPUT)
            st = QC_ERROR(err, QC_ERR_CHECK, "a frame cannot be decompressed");
        QC_TRY(st);
    }
    pthread_mutex_lock(&p->lock);
    qc_status st = check(p, f, &d, err);
    pthread_mutex_unlock(&p->lock);
    return st;
}

/* Tells the first failure of a frame. */
static void tell(qc_plain_files *p, frame *f, qc_error *why)
{
    const range *r = f->range == NO_RANGE ? NULL : &p->ranges[f->range];
    const char *path = p->files[f->file].file.path;
    if (r && r->tensor)
        qc_error_prefix(why, "tensor '%s' in %s", r->tensor, path);
    else
        qc_error_prefix(why, "%s%s", r ? "header of " : "", path);
    pthread_mutex_lock(&p->lock);
    const int told = f->told;
    f->told = 1;
    pthread_mutex_unlock(&p->lock);
    if (!told)
        p->fault(p->fault_ctx, why);
}

/* ---- Reading --------------------------------------------------------------------------------- */

/* The frame of a file that has this byte of it. */
static size_t find_frame(const qc_plain_files *p, const entry *e, uint64_t offset)
{
    size_t low = e->first, high = e->first + e->count;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (p->frames[middle].offset <= offset)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static qc_status read_frame(qc_plain_files *p, size_t i, uint32_t from, void *dst, size_t len,
                            qc_error *err)
{
    frame *f = &p->frames[i];
    const entry *e = &p->files[f->file];
    const unsigned char *bytes = NULL;
    qc_error why = {0};
    qc_status st = qc_frame_cache_pin(p->cache, i, &bytes, &why);
    pthread_mutex_lock(&p->lock);
    const uint32_t before = f->next;
    f->next = from + (uint32_t)len;
    /* It may be in the cache since before its tensor was known to be wrong. */
    const int wrong = f->range != NO_RANGE && p->ranges[f->range].wrong;
    pthread_mutex_unlock(&p->lock);
    if (st == QC_OK && !wrong)
        memcpy(dst, bytes + from, len);
    if (st == QC_OK)
        qc_frame_cache_unpin(p->cache, i);
    if (st == QC_OK && wrong)
        st = QC_ERROR(&why, QC_ERR_CHECK, WRONG_BYTES);
    if (st != QC_OK) {
        tell(p, f, &why);
        if (err)
            *err = why;
        return st;
    }
    /* Whoever reads on where the last request ended will want the next frames, too. */
    uint64_t ahead = 0;
    if (before > 0 && from <= before + NEAR_BYTES && before <= from + NEAR_BYTES)
        for (size_t k = i + 1;
             k < e->first + e->count && k - i <= p->ahead_frames && ahead < p->ahead_bytes;
             ahead += p->frames[k++].bytes)
            qc_frame_cache_want(p->cache, k);
    return QC_OK;
}

qc_status qc_plain_files_read(qc_plain_files *p, size_t index, uint64_t offset, void *dst,
                              size_t len, qc_error *err)
{
    const entry *e = &p->files[index];
    unsigned char *to = dst;
    if (e->count == 0) {
        if (len > 0)
            memcpy(dst, e->text.data + offset, len);
        return QC_OK;
    }
    for (size_t i = find_frame(p, e, offset); len > 0; i++) {
        const frame *f = &p->frames[i];
        const uint32_t from = (uint32_t)(offset - f->offset);
        const size_t n = qc_min_size(len, f->bytes - from);
        QC_TRY(read_frame(p, i, from, to, n, err));
        to += n;
        offset += n;
        len -= n;
    }
    return QC_OK;
}

/* ---- From beginning to end ------------------------------------------------------------------- */

qc_status qc_plain_files_create(qc_plain_files **out, qc_plain_fault fault, void *ctx,
                                qc_error *err)
{
    qc_plain_files *p = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&p, 1, sizeof *p, err));
    if (pthread_mutex_init(&p->lock, NULL) != 0) {
        qc_free(p);
        QC_FAIL(err, QC_ERR_NOMEM, "a mutex could not be made");
    }
    qc_arena_init(&p->arena);
    p->fault = fault;
    p->fault_ctx = ctx;
    *out = p;
    return QC_OK;
}

qc_status qc_plain_files_start(qc_plain_files *p, uint64_t memory_bytes, unsigned threads,
                               qc_error *err)
{
    qc_frame_cache_options o = {.frame_count = p->frame_count,
                                .frame_bytes = p->frame_bytes,
                                .stored_bytes = p->stored_bytes,
                                .threads = threads ? threads : qc_cpu_count(),
                                .make = make_frame,
                                .ctx = p};
    o.slots = (size_t)qc_max_u64(p->frame_bytes ? memory_bytes / p->frame_bytes : 0, 2);
    o.slots = qc_min_size(o.slots, (size_t)qc_max_u64(p->frame_count, 1));
    p->ahead_frames = o.slots / 2;
    p->ahead_bytes = qc_sat_mul(o.threads, p->frame_bytes);
    return qc_frame_cache_create(&p->cache, &o, err);
}

void qc_plain_files_destroy(qc_plain_files *p)
{
    if (!p)
        return;
    qc_frame_cache_destroy(p->cache);
    for (size_t i = 0; i < p->file_count; i++) {
        qc_file_discard(&p->files[i].file);
        qc_strbuf_deinit(&p->files[i].text);
    }
    qc_free(p->files);
    qc_free(p->frames);
    qc_free(p->ranges);
    qc_arena_deinit(&p->arena);
    pthread_mutex_destroy(&p->lock);
    qc_free(p);
}

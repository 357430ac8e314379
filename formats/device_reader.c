/* A load has three steps: it opens the device's shards and finds their frames, then a team reads
 * one frame after the other, and whoever reads a tensor's last frame checks the tensor and hands it
 * on. */
#include "formats/device_reader.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "formats/manifest_header.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ONLY_DEVICE    "all"
#define STORED_SUFFIX  ".zst"
#define FRAME_ALIGN    4096u
#define STEP_BYTES     (512u << 10) /* read at once, then hashed in the L2 cache */
#define RAW_FROM_BYTES (256u << 10) /* smaller frames: one read and a cheap copy */
#define NAMES_IN_ERROR 16u

typedef struct {
    qc_reader_device device; /* what callers see */
    size_t first_tensor, first_shard;
} device_entry;

typedef struct {
    const char *name;
    uint32_t tensor;
} named_tensor;

struct qc_reader {
    qc_arena arena;
    const char *dir;
    qc_manifest m;
    qc_reader_tensor *tensors; /* parallel to the manifest's */
    const char **files;        /* per shard: its name on disk */
    named_tensor *by_name;     /* sorted */
    device_entry *devices;
    size_t device_count;
    qc_reader *self;     /* for open shards, which hold a const one */
    atomic_size_t users; /* open shards, and one until it is closed; the last frees it */
};

/* ---- Opening -------------------------------------------------------------------------------- */

static qc_status list_tensors(qc_reader *r, qc_error *err)
{
    const qc_manifest *m = &r->m;
    QC_TRY(qc_arena_alloc(&r->arena, &r->by_name, m->tensor_count, sizeof *r->by_name, err));
    QC_TRY(qc_arena_alloc(&r->arena, &r->files, m->shard_count, sizeof *r->files, err));
    for (size_t i = 0; i < m->shard_count; i++)
        QC_TRY(qc_arena_printf(&r->arena, &r->files[i], err, "%s%s", m->shards[i].name,
                               m->compressed ? STORED_SUFFIX : ""));
    QC_TRY(qc_arena_alloc(&r->arena, &r->tensors, m->tensor_count, sizeof *r->tensors, err));
    for (size_t i = 0; i < m->tensor_count; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        qc_reader_tensor *out = &r->tensors[i];
        *out = (qc_reader_tensor){.name = t->name,
                                  .scheme = t->scheme,
                                  .dtype = t->dtype,
                                  .ndim = t->ndim,
                                  .bytes = t->end - t->begin,
                                  .shard = r->files[t->shard]};
        memcpy(out->dims, t->dims, sizeof out->dims);
        r->by_name[i] = (named_tensor){t->name, (uint32_t)i};
    }
    if (m->tensor_count > 1)
        qsort(r->by_name, m->tensor_count, sizeof *r->by_name, qc_by_text);
    return QC_OK;
}

static void add_tensor(qc_reader *r, device_entry *e, size_t tensor)
{
    const qc_manifest_tensor *t = &r->m.tensors[tensor];
    uint64_t bytes = t->end - t->begin, piece = qc_min_u64(bytes, t->piece_bytes);
    r->tensors[tensor].index = tensor - e->first_tensor;
    if (piece > e->device.max_piece_bytes)
        e->device.max_piece_bytes = (size_t)piece;
}

/* Shards lie in the order of their devices, and tensors in that of their shards (the manifest was
 * checked). So each device has a run of both. */
static qc_status list_devices(qc_reader *r, qc_error *err)
{
    const qc_manifest *m = &r->m;
    size_t shard = 0, tensor = 0;
    r->device_count = m->placement.device_count > 0 ? m->placement.device_count : 1;
    QC_TRY(qc_arena_alloc(&r->arena, &r->devices, r->device_count, sizeof *r->devices, err));
    for (size_t i = 0; i < r->device_count; i++) {
        device_entry *e = &r->devices[i];
        qc_reader_device *d = &e->device;
        d->name = m->placement.device_count > 0 ? m->placement.devices[i].name : ONLY_DEVICE;
        e->first_shard = shard;
        e->first_tensor = tensor;
        for (; shard < m->shard_count && m->shards[shard].device == i; shard++) {
            const qc_manifest_shard *s = &m->shards[shard];
            d->tensor_bytes += s->content_bytes - s->header_bytes;
            d->stored_bytes += m->compressed ? s->file_bytes : s->content_bytes;
        }
        for (; tensor < m->tensor_count && m->tensors[tensor].shard < shard; tensor++)
            add_tensor(r, e, tensor);
        d->shard_count = shard - e->first_shard;
        d->tensor_count = tensor - e->first_tensor;
        d->tensors = d->tensor_count > 0 ? &r->tensors[e->first_tensor] : NULL;
    }
    return QC_OK;
}

qc_status qc_reader_open(qc_reader **out, const char *dir, qc_error *err)
{
    if (out)
        *out = NULL;
    if (!out || !dir)
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_open: %s is NULL", out ? "dir" : "out");
    qc_reader *r = NULL;
    QC_TRY(qc_calloc(&r, 1, sizeof *r, err));
    qc_arena_init(&r->arena);
    r->self = r;
    atomic_init(&r->users, 1);
    qc_status st = qc_arena_strdup(&r->arena, &r->dir, dir, err);
    if (st == QC_OK)
        st = qc_manifest_load(&r->m, &r->arena, dir, err);
    if (st == QC_OK)
        st = list_tensors(r, err);
    if (st == QC_OK)
        st = list_devices(r, err);
    if (st != QC_OK) {
        qc_reader_close(r);
        return st;
    }
    *out = r;
    return QC_OK;
}

void qc_reader_close(qc_reader *r)
{
    if (!r || atomic_fetch_sub(&r->users, 1) > 1)
        return;
    qc_arena_deinit(&r->arena);
    qc_free(r);
}

size_t qc_reader_device_count(const qc_reader *r)
{
    return r ? r->device_count : 0;
}

const qc_reader_device *qc_reader_device_at(const qc_reader *r, size_t device)
{
    return r && device < r->device_count ? &r->devices[device].device : NULL;
}

qc_status qc_reader_find_device(const qc_reader *r, const char *name, size_t *device, qc_error *err)
{
    if (!r || !name || !device)
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_find_device: %s is NULL",
                !r     ? "the reader"
                : name ? "device"
                       : "name");
    for (size_t i = 0; i < r->device_count; i++) {
        if (strcmp(r->devices[i].device.name, name) == 0) {
            *device = i;
            return QC_OK;
        }
    }
    qc_strbuf names;
    qc_strbuf_init(&names, (size_t)1 << 20);
    for (size_t i = 0; i < r->device_count && i < NAMES_IN_ERROR; i++)
        qc_strbuf_putf(&names, "%s%s", i ? ", " : "", r->devices[i].device.name);
    if (r->device_count > NAMES_IN_ERROR)
        qc_strbuf_putf(&names, " and %zu more", r->device_count - NAMES_IN_ERROR);
    qc_status st = qc_strbuf_status(&names, err);
    if (st == QC_OK)
        st = QC_ERROR(err, QC_ERR_DEVICE, "%s: there is no device '%s' in it; it has %s%s", r->dir,
                      name, names.data,
                      r->m.placement.device_count > 0 ? "" : ", as it was made without --vram");
    qc_strbuf_deinit(&names);
    return st;
}

const qc_reader_tensor *qc_reader_find_tensor(const qc_reader *r, const char *name, size_t *device,
                                              size_t *index)
{
    if (!r || !name || r->m.tensor_count == 0)
        return NULL;
    const named_tensor key = {.name = name};
    const named_tensor *found =
        bsearch(&key, r->by_name, r->m.tensor_count, sizeof key, qc_by_text);
    if (!found)
        return NULL;
    size_t at = 0;
    while (found->tensor >= r->devices[at].first_tensor + r->devices[at].device.tensor_count)
        at++;
    if (device)
        *device = at;
    if (index)
        *index = r->tensors[found->tensor].index;
    return &r->tensors[found->tensor];
}

/* ---- Frames --------------------------------------------------------------------------------- */

/* One frame (compressed) or one piece (plain) of a tensor. */
typedef struct {
    uint64_t stored_offset; /* in the file */
    uint64_t content_at;    /* in its tensor */
    uint32_t stored_bytes, content_bytes;
    qc_digest digest; /* of its stored bytes, once they were read */
} unit;

/* A tensor on its way. */
typedef struct {
    void *dst;
    atomic_int placed; /* dst is set */
    atomic_uint left;  /* units to come */
    size_t first_unit;
    uint32_t unit_count;
} slot;

typedef struct {
    const qc_reader *r;
    const device_entry *e;
    const qc_reader_options *options;
    qc_file *files; /* per shard of the device */
    slot *slots;    /* per tensor of the device */
    unit *units;
    uint32_t *owner; /* per unit: its slot */
    size_t unit_count;
    size_t max_stored;
    unsigned threads;
    atomic_size_t next;
    atomic_int failed;
    pthread_mutex_t lock;  /* protects the next two; a leaf lock */
    pthread_cond_t placed; /* signalled when a place() returned or the load failed */
    int placing;           /* a thread is inside place() */
    int refused;           /* a place() gave no memory, so it is not asked again */
} load;

static const qc_manifest_tensor *manifest_tensor(const load *l, size_t tensor)
{
    return &l->r->m.tensors[l->e->first_tensor + tensor];
}

static const char *file_of(const load *l, size_t tensor)
{
    return l->r->files[manifest_tensor(l, tensor)->shard];
}

static void add_unit(load *l, size_t tensor, uint64_t offset, uint64_t at, uint32_t stored,
                     uint32_t content)
{
    l->owner[l->unit_count] = (uint32_t)tensor;
    l->units[l->unit_count++] = (unit){

        .stored_offset = offset,
        .content_at = at,
        .stored_bytes = stored,
        .content_bytes = content};
    if (stored > l->max_stored)
        l->max_stored = stored;
}

static void add_plain(load *l, size_t tensor, uint64_t header_bytes)
{
    const qc_manifest_tensor *t = manifest_tensor(l, tensor);
    uint64_t bytes = t->end - t->begin;
    for (uint64_t at = 0; at < bytes; at += t->piece_bytes) {
        uint64_t left = bytes - at;
        uint32_t n = (uint32_t)qc_min_u64(left, t->piece_bytes);
        add_unit(l, tensor, header_bytes + t->begin + at, at, n, n);
    }
}

static qc_status add_frames(load *l, size_t shard, size_t first, size_t end, qc_error *err)
{
    const device_entry *e = l->e;
    qc_shard_frames f;
    QC_TRY(qc_shard_frames_read(&f, &l->files[shard], &l->r->m, e->first_shard + shard,
                                e->first_tensor + first, e->first_tensor + end, err));
    qc_status st = qc_shard_header_check(&l->files[shard], &l->r->m, e->first_shard + shard,
                                         e->first_tensor + first, e->first_tensor + end, &f, err);
    if (st != QC_OK) {
        qc_shard_frames_deinit(&f);
        return st;
    }
    const qc_frame *next = f.table.frames + f.header_frames;
    for (size_t i = first; i < end; i++) {
        uint64_t at = 0;
        for (uint32_t k = 0; k < l->slots[i].unit_count; k++, next++) {
            add_unit(l, i, next->stored_offset, at, next->stored_bytes, next->content_bytes);
            at += next->content_bytes;
        }
    }
    qc_shard_frames_deinit(&f);
    return QC_OK;
}

static qc_status open_shard(load *l, size_t shard, qc_error *err)
{
    const qc_reader *r = l->r;
    const qc_manifest_shard *s = &r->m.shards[l->e->first_shard + shard];
    qc_file *file = &l->files[shard];
    qc_strbuf path;
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t bytes = 0, want = r->m.compressed ? s->file_bytes : s->content_bytes;
    qc_strbuf_init(&path, (size_t)1 << 20);
    qc_status st = qc_strbuf_addf(&path, err, "%s/%s", r->dir, r->files[l->e->first_shard + shard]);
    if (st == QC_OK)
        st = qc_path_stat(path.data, &kind, &bytes, err);
    if (st == QC_OK && kind != QC_PATH_FILE)
        st = QC_ERROR(err, QC_ERR_CHECK, "%s: the shard is missing; device '%s' needs it",
                      path.data, l->e->device.name);
    if (st == QC_OK && bytes != want)
        st = QC_ERROR(err, QC_ERR_CHECK, "%s: expected %" PRIu64 " bytes, found %" PRIu64,
                      path.data, want, bytes);
    if (st == QC_OK)
        st = qc_file_open_read(file, path.data, err);
    qc_strbuf_deinit(&path);
    return st;
}

/* Tensors first <= .. < end of the device lie in this shard of the device. */
static qc_status list_units(load *l, size_t shard, size_t first, size_t end, qc_error *err)
{
    const qc_manifest *m = &l->r->m;
    if (m->compressed)
        return add_frames(l, shard, first, end, err);
    const device_entry *e = l->e;
    QC_TRY(qc_shard_header_check(&l->files[shard], m, e->first_shard + shard,
                                 e->first_tensor + first, e->first_tensor + end, NULL, err));
    for (size_t i = first; i < end; i++)
        add_plain(l, i, m->shards[e->first_shard + shard].header_bytes);
    return QC_OK;
}

static qc_status prepare(load *l, qc_error *err)
{
    const qc_reader_device *d = &l->e->device;
    size_t units = 0;
    QC_TRY(qc_calloc(&l->files, d->shard_count, sizeof *l->files, err));
    for (size_t i = 0; i < d->shard_count; i++)
        l->files[i] = QC_FILE_CLOSED;
    /* This comes first, because the number of units follows from sizes that the files may not
     * have. */
    qc_file_allow_many(d->shard_count);
    for (size_t i = 0; i < d->shard_count; i++)
        QC_TRY(open_shard(l, i, err));
    QC_TRY(qc_calloc(&l->slots, d->tensor_count, sizeof *l->slots, err));
    for (size_t i = 0; i < d->tensor_count; i++) {
        slot *s = &l->slots[i];
        s->first_unit = units;
        s->unit_count = qc_shard_pieces(manifest_tensor(l, i));
        atomic_init(&s->placed, 0);
        atomic_init(&s->left, s->unit_count);
        units += s->unit_count;
    }
    QC_TRY(qc_calloc(&l->units, units, sizeof *l->units, err));
    QC_TRY(qc_calloc(&l->owner, units, sizeof *l->owner, err));
    size_t first = 0;
    for (size_t i = 0; i < d->shard_count; i++) {
        size_t end = first;
        while (end < d->tensor_count && manifest_tensor(l, end)->shard == l->e->first_shard + i)
            end++;
        QC_TRY(list_units(l, i, first, end, err));
        first = end;
    }
    return QC_OK;
}

/* ---- Reading -------------------------------------------------------------------------------- */

/* The first thread that fails tells the caller. */
static void fail_load(load *l)
{
    if (atomic_exchange(&l->failed, 1))
        return;
    pthread_mutex_lock(&l->lock);
    pthread_cond_broadcast(&l->placed);
    pthread_mutex_unlock(&l->lock);
    if (l->options->stopped)
        l->options->stopped(l->options->ctx);
}

/* No lock is held inside place(), because it may wait for a tensor whose other frames must go
 * on. */
static qc_status place_tensor(load *l, size_t tensor, qc_error *err)
{
    slot *s = &l->slots[tensor];
    const qc_reader_tensor *t = &l->e->device.tensors[tensor];
    if (atomic_load(&s->placed))
        return QC_OK;
    pthread_mutex_lock(&l->lock);
    while (l->placing && !l->refused && !atomic_load(&s->placed) && !atomic_load(&l->failed))
        pthread_cond_wait(&l->placed, &l->lock);
    int mine = !l->refused && !atomic_load(&s->placed) && !atomic_load(&l->failed);
    if (mine)
        l->placing = 1;
    pthread_mutex_unlock(&l->lock);
    if (mine) {
        s->dst = l->options->place(l->options->ctx, t);
        pthread_mutex_lock(&l->lock);
        l->placing = 0;
        if (s->dst || t->bytes == 0)
            atomic_store(&s->placed, 1);
        else
            l->refused = 1;
        pthread_cond_broadcast(&l->placed);
        pthread_mutex_unlock(&l->lock);
    }
    if (atomic_load(&s->placed))
        return QC_OK;
    if (!mine || atomic_load(&l->failed)) /* perhaps place() was woken by stopped() */
        QC_FAIL(err, QC_ERR_INTERRUPTED, "stopped");
    QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' in %s: no memory was given for its %" PRIu64 " bytes",
            t->name, t->shard, t->bytes);
}

static qc_status check_digest(const load *l, size_t tensor, const qc_digest *pieces, qc_error *err)
{
    const qc_manifest_tensor *m = manifest_tensor(l, tensor);
    qc_digest root = qc_digest_root(pieces, l->slots[tensor].unit_count);
    if (!qc_digest_equal(&root, l->r->m.compressed ? &m->stored : &m->content))
        QC_FAIL(err, QC_ERR_CHECK, "tensor '%s' in %s: its bytes are not those that were written",
                m->name, file_of(l, tensor));
    return QC_OK;
}

static qc_status finish_tensor(load *l, size_t tensor, qc_error *err)
{
    const slot *s = &l->slots[tensor];
    if (!l->options->skip_digests && s->unit_count > 0) {
        qc_digest *pieces = NULL;
        QC_TRY(qc_calloc(&pieces, s->unit_count, sizeof *pieces, err));
        for (uint32_t i = 0; i < s->unit_count; i++)
            pieces[i] = l->units[s->first_unit + i].digest;
        qc_status st = check_digest(l, tensor, pieces, err);
        qc_free(pieces);
        QC_TRY(st);
    }
    return l->options->done
               ? l->options->done(l->options->ctx, &l->e->device.tensors[tensor], s->dst, err)
               : QC_OK;
}

/* What each thread has of its own. */
typedef struct {
    unsigned index;
    qc_frame_coder *coder; /* NULL if the output is not compressed */
    void *stored;          /* one frame */
    qc_digest_state *hash; /* NULL if digests are not wanted */
} reader_worker;

static qc_status read_and_hash(const reader_worker *w, const qc_file *f, void *dst, size_t bytes,
                               uint64_t offset, qc_error *err)
{
    unsigned char *p = dst;
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t n = qc_min_size(bytes - at, STEP_BYTES);
        QC_TRY(qc_file_pread(f, p + at, n, offset + at, err));
        if (w->hash)
            qc_digest_update(w->hash, p + at, n);
    }
    return QC_OK;
}

/* Reads the content of one of the tensor's units to dst, and sets the unit's digest of what is
 * stored. */
static qc_status fetch_unit(const load *l, size_t tensor, const reader_worker *w, unit *u,
                            void *dst, qc_error *err)
{
    const qc_file *f = &l->files[manifest_tensor(l, tensor)->shard - l->e->first_shard];
    int done = 0;
    qc_status st = QC_OK;
    if (w->hash)
        qc_digest_reset(w->hash);
    if (w->coder && u->content_bytes >= RAW_FROM_BYTES &&
        u->stored_bytes == qc_raw_frame_bytes(u->content_bytes)) {
        st = qc_raw_frame_read(&done, f, u->stored_offset, dst, u->content_bytes, w->hash, err);
        if (w->hash && !done)
            qc_digest_reset(w->hash);
    }
    if (st == QC_OK && !done) {
        st =
            read_and_hash(w, f, w->coder ? w->stored : dst, u->stored_bytes, u->stored_offset, err);
        if (st == QC_OK && w->coder)
            st = qc_frame_decode(w->coder, w->stored, u->stored_bytes, dst, u->content_bytes, err);
    }
    if (st == QC_ERR_INPUT)
        st = QC_ERROR(err, QC_ERR_CHECK, "a frame cannot be decompressed");
    if (st == QC_OK && w->hash)
        u->digest = qc_digest_finish(w->hash);
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s' in %s", manifest_tensor(l, tensor)->name,
                        file_of(l, tensor));
    return st;
}

static qc_status read_unit(load *l, size_t index, const reader_worker *w, qc_error *err)
{
    unit *u = &l->units[index];
    size_t tensor = l->owner[index];
    slot *s = &l->slots[tensor];
    const qc_reader_tensor *t = &l->e->device.tensors[tensor];
    const qc_reader_pieces *pieces = l->options->pieces;
    void *dst = NULL;
    if (pieces) {
        QC_TRY(pieces->room(l->options->ctx, w->index, u->content_bytes, &dst, err));
    } else {
        QC_TRY(place_tensor(l, tensor, err));
        dst = (unsigned char *)s->dst + u->content_at;
    }
    QC_TRY(fetch_unit(l, tensor, w, u, dst, err));
    if (pieces)
        QC_TRY(
            pieces->put(l->options->ctx, w->index, t, u->content_at, dst, u->content_bytes, err));
    return atomic_fetch_sub(&s->left, 1) == 1 ? finish_tensor(l, tensor, err) : QC_OK;
}

static qc_status worker_init(reader_worker *w, const load *l, int skip_digests, qc_error *err)
{
    if (!skip_digests)
        QC_TRY(qc_digest_create(&w->hash, err));
    if (!l->r->m.compressed)
        return QC_OK;
    QC_TRY(qc_frame_coder_create(&w->coder, err));
    if (w->hash)
        qc_frame_coder_skip_checksums(w->coder);
    return qc_malloc_aligned(&w->stored, FRAME_ALIGN, l->max_stored, err);
}

static void worker_deinit(reader_worker *w)
{
    qc_free(w->stored);
    qc_frame_coder_destroy(w->coder);
    qc_digest_destroy(w->hash);
}

/* Hints at the units that the team will want next: threads take units in order. */
static void hint_ahead(const load *l, size_t index)
{
    if (index >= l->unit_count)
        return;
    const unit *u = &l->units[index];
    const qc_manifest_tensor *m = manifest_tensor(l, l->owner[index]);
    qc_file_hint_read_soon(&l->files[m->shard - l->e->first_shard], u->stored_offset,
                           u->stored_bytes);
}

static qc_status load_worker(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    load *l = ctx;
    reader_worker w = {.index = index};
    qc_status st = worker_init(&w, l, l->options->skip_digests, err);
    while (st == QC_OK) {
        if (qc_team_stopped(team)) {
            st = QC_ERROR(err, QC_ERR_INTERRUPTED, "interrupted");
            break;
        }
        size_t i = atomic_fetch_add(&l->next, 1);
        if (i >= l->unit_count)
            break;
        hint_ahead(l, i + l->threads);
        st = read_unit(l, i, &w, err);
    }
    if (st != QC_OK)
        fail_load(l);
    worker_deinit(&w);
    return st;
}

static qc_status load_all(load *l, qc_error *err)
{
    QC_TRY(prepare(l, err));
    for (size_t i = 0; i < l->e->device.tensor_count; i++) {
        if (l->slots[i].unit_count > 0)
            continue;
        if (!l->options->pieces)
            QC_TRY(place_tensor(l, i, err));
        QC_TRY(finish_tensor(l, i, err));
    }
    if (l->unit_count == 0)
        return QC_OK;
    l->threads = qc_min_u32(l->unit_count, l->threads);
    for (unsigned i = 0; i < l->threads; i++)
        hint_ahead(l, i);
    return qc_team_run(l->threads, load_worker, l, err);
}

static qc_status check_device(const qc_reader *r, size_t device, qc_error *err)
{
    if (device < r->device_count)
        return QC_OK;
    QC_FAIL(err, QC_ERR_DEVICE, "%s: there is no device number %zu; it has %zu", r->dir, device,
            r->device_count);
}

static void release(load *l)
{
    for (size_t i = 0; l->files && i < l->e->device.shard_count; i++)
        qc_file_discard(&l->files[i]);
    qc_free(l->files);
    qc_free(l->slots);
    qc_free(l->owner);
    qc_free(l->units);
}

qc_status qc_reader_load(const qc_reader *r, size_t device, const qc_reader_options *options,
                         qc_error *err)
{
    if (!r || !options)
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_load: %s NULL",
                r ? "the options are" : "the reader is");
    QC_TRY(check_device(r, device, err));
    if (!options->place == !options->pieces ||
        (options->pieces && (!options->pieces->room || !options->pieces->put)))
        QC_FAIL(err, QC_ERR_USAGE, "%s: the options of a load need either place or pieces", r->dir);
    load l = {.r = r,
              .e = &r->devices[device],
              .options = options,
              .threads = options->threads,
              .max_stored = 1};
    QC_TRY(qc_threads_wanted(&l.threads, err));
    if (pthread_mutex_init(&l.lock, NULL) != 0)
        QC_FAIL(err, QC_ERR_NOMEM, "a mutex could not be made");
    if (pthread_cond_init(&l.placed, NULL) != 0) {
        pthread_mutex_destroy(&l.lock);
        QC_FAIL(err, QC_ERR_NOMEM, "a condition could not be made");
    }
    qc_status st = load_all(&l, err);
    if (st != QC_OK)
        fail_load(&l);
    pthread_cond_destroy(&l.placed);
    pthread_mutex_destroy(&l.lock);
    release(&l);
    return st;
}

/* ---- Single tensors ------------------------------------------------------------------------- */

struct qc_reader_shards {
    load load; /* prepared, and never run */
};

qc_status qc_reader_shards_open(qc_reader_shards **out, const qc_reader *r, size_t device,
                                qc_error *err)
{
    qc_reader_shards *s = NULL;
    if (out)
        *out = NULL;
    if (!out || !r)
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_shards_open: %s is NULL", out ? "the reader" : "out");
    QC_TRY(check_device(r, device, err));
    QC_TRY(qc_calloc(&s, 1, sizeof *s, err));
    atomic_fetch_add(&r->self->users, 1);
    s->load.r = r;
    s->load.e = &r->devices[device];
    s->load.max_stored = 1;
    qc_status st = prepare(&s->load, err);
    if (st == QC_OK)
        *out = s;
    else
        qc_reader_shards_close(s);
    return st;
}

void qc_reader_shards_close(qc_reader_shards *s)
{
    if (!s)
        return;
    release(&s->load);
    qc_reader_close(s->load.r->self);
    qc_free(s);
}

/* Copies what the slice has of a frame's content, which is bytes [at, at + len) of the tensor. */
static void copy_slice(unsigned char *dst, const qc_reader_slice *s, const unsigned char *content,
                       uint64_t at, uint64_t len)
{
    uint64_t row = qc_max_u64(at / s->row_bytes, s->first_row);
    for (; row < s->first_row + s->rows && row * s->row_bytes < at + len; row++) {
        uint64_t begin = row * s->row_bytes + s->first_byte, end = begin + s->bytes;
        uint64_t from = qc_max_u64(begin, at), to = qc_min_u64(end, at + len);
        if (from < to)
            memcpy(dst + (row - s->first_row) * s->bytes + (from - begin), content + (from - at),
                   (size_t)(to - from));
    }
}

/* Does the slice have any byte of [at, at + len)? */
static int touches(const qc_reader_slice *s, uint64_t at, uint64_t len)
{
    uint64_t row = qc_max_u64(at / s->row_bytes, s->first_row);
    uint64_t end = at + len;
    /* The row that `at` lies in may be over, and then the next one counts. */
    if (row * s->row_bytes + s->first_byte + s->bytes <= at)
        row++;
    return row < s->first_row + s->rows && row * s->row_bytes + s->first_byte < end;
}

static qc_status read_slice(const load *l, size_t index, const reader_worker *w,
                            const qc_reader_slice *slice, unsigned char *dst, qc_error *err)
{
    const slot *s = &l->slots[index];
    uint64_t begin = slice->first_row * slice->row_bytes,
             end = begin + slice->rows * slice->row_bytes;
    int whole_rows = slice->bytes == slice->row_bytes;
    void *content = NULL;
    QC_TRY(qc_malloc(&content, l->units[s->first_unit].content_bytes, err));
    qc_status st = QC_OK;
    for (uint32_t i = 0; i < s->unit_count && st == QC_OK; i++) {
        unit u = l->units[s->first_unit + i];
        int direct = whole_rows && u.content_at >= begin && u.content_bytes <= end - u.content_at;
        if (!touches(slice, u.content_at, u.content_bytes))
            continue;
        st = fetch_unit(l, index, w, &u, direct ? dst + (u.content_at - begin) : content, err);
        if (st == QC_OK && !direct)
            copy_slice(dst, slice, content, u.content_at, u.content_bytes);
    }
    qc_free(content);
    return st;
}

static qc_status read_whole(const load *l, size_t index, const reader_worker *w, unsigned char *dst,
                            qc_error *err)
{
    const slot *s = &l->slots[index];
    qc_digest *pieces = NULL;
    QC_TRY(qc_calloc(&pieces, (size_t)s->unit_count + 1, sizeof *pieces, err));
    qc_status st = QC_OK;
    for (uint32_t i = 0; i < s->unit_count && st == QC_OK; i++) {
        unit u = l->units[s->first_unit + i];
        st = fetch_unit(l, index, w, &u, dst + u.content_at, err);
        pieces[i] = u.digest;
    }
    if (st == QC_OK && s->unit_count > 0)
        st = check_digest(l, index, pieces, err);
    qc_free(pieces);
    return st;
}

static qc_status check_slice(const qc_reader *r, const qc_reader_tensor *t,
                             const qc_reader_slice *s, qc_error *err)
{
    uint64_t rows = s->row_bytes > 0 ? t->bytes / s->row_bytes : 0;
    if (s->row_bytes == 0 || rows * s->row_bytes != t->bytes)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: rows of %" PRIu64 " bytes do not divide the %" PRIu64 " bytes of tensor '%s'",
                r->dir, s->row_bytes, t->bytes, t->name);
    if (s->first_row > rows || s->rows > rows - s->first_row || s->first_byte > s->row_bytes ||
        s->bytes > s->row_bytes - s->first_byte)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: bytes %" PRIu64 " to %" PRIu64 " of rows %" PRIu64 " to %" PRIu64
                " are not within the %" PRIu64 " rows of %" PRIu64 " bytes of tensor '%s'",
                r->dir, s->first_byte, qc_sat_add(s->first_byte, s->bytes), s->first_row,
                qc_sat_add(s->first_row, s->rows), rows, s->row_bytes, t->name);
    return QC_OK;
}

qc_status qc_reader_read(const qc_reader_shards *s, size_t index, const qc_reader_slice *slice,
                         void *dst, qc_error *err)
{
    if (!s)
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_read: the shards are NULL");
    const load *l = &s->load;
    const qc_reader_device *d = &l->e->device;
    if (index >= d->tensor_count)
        QC_FAIL(err, QC_ERR_USAGE, "%s: there is no tensor number %zu on device '%s'; it has %zu",
                l->r->dir, index, d->name, d->tensor_count);
    const qc_reader_tensor *t = &d->tensors[index];
    if (slice)
        QC_TRY(check_slice(l->r, t, slice, err));
    uint64_t bytes = slice ? slice->rows * slice->bytes : t->bytes;
    if (!dst && bytes > 0)
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_read: dst is NULL");
    if (slice && bytes == 0)
        return QC_OK;
    reader_worker w = {0};
    /* Frames have no digest of their own, so those of a slice have their checksums looked at. */
    qc_status st = worker_init(&w, l, slice != NULL, err);
    if (st == QC_OK)
        st = slice ? read_slice(l, index, &w, slice, dst, err) : read_whole(l, index, &w, dst, err);
    worker_deinit(&w);
    return st;
}

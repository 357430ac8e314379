/* A load is a run over the frames of a device (formats/output_frames.h): whoever reads a tensor's
 * first frame asks where it goes, and whoever reads its last one checks it and hands it on. */
#include "formats/device_reader.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "base/workers.h"
#include "formats/output_frames.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define ONLY_DEVICE    "all"
#define NAMES_IN_ERROR 16u

typedef struct {
    qc_reader_device device; /* the part that callers see */
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
    const char **files = NULL; /* per shard: its name on disk */
    QC_TRY(qc_arena_alloc(&r->arena, &r->by_name, m->tensor_count, sizeof *r->by_name, err));
    QC_TRY(qc_arena_alloc(&r->arena, &files, m->shard_count, sizeof *files, err));
    for (size_t i = 0; i < m->shard_count; i++)
        QC_TRY(qc_arena_printf(&r->arena, &files[i], err, "%s%s", m->shards[i].name,
                               qc_manifest_ending(m)));
    QC_TRY(qc_arena_alloc(&r->arena, &r->tensors, m->tensor_count, sizeof *r->tensors, err));
    for (size_t i = 0; i < m->tensor_count; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        qc_reader_tensor *out = &r->tensors[i];
        *out = (qc_reader_tensor){.name = t->name,
                                  .scheme = t->scheme,
                                  .dtype = t->dtype,
                                  .ndim = t->ndim,
                                  .bytes = t->end - t->begin,
                                  .shard = files[t->shard]};
        memcpy(out->dims, t->dims, sizeof out->dims);
        r->by_name[i] = (named_tensor){t->name, (uint32_t)i};
    }
    if (m->tensor_count > 1)
        qsort(r->by_name, m->tensor_count, sizeof *r->by_name, qc_by_text);
    return QC_OK;
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
        for (; tensor < m->tensor_count && m->tensors[tensor].shard < shard; tensor++) {
            const qc_manifest_tensor *t = &m->tensors[tensor];
            r->tensors[tensor].index = tensor - e->first_tensor;
            d->max_piece_bytes = (size_t)qc_max_u64(d->max_piece_bytes,
                                                    qc_min_u64(t->end - t->begin, t->piece_bytes));
        }
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

qc_status qc_reader_check_file(const qc_reader *r, const char *path, const void *bytes, size_t len,
                               qc_error *err)
{
    if (!r || !path || (!bytes && len > 0))
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_check_file: an argument is NULL");
    const qc_digest digest = qc_digest_bytes(bytes, len);
    size_t i = 0;
    while (i < r->m.file_count && strcmp(r->m.files[i].path, path) != 0)
        i++;
    if (i == r->m.file_count)
        QC_FAIL(err, QC_ERR_CHECK, "%s/%s: qconv.json does not list this file", r->dir, path);
    const qc_manifest_file *f = &r->m.files[i];
    if (f->bytes != len || !qc_digest_equal(&f->digest, &digest))
        QC_FAIL(err, QC_ERR_CHECK, "%s/%s: its bytes are not those that were written", r->dir,
                path);
    return QC_OK;
}

/* ---- Loading -------------------------------------------------------------------------------- */

/* A tensor on its way. */
typedef struct {
    void *dst;
    atomic_int placed; /* dst is set */
    atomic_uint left;  /* frames to come */
} slot;

typedef struct {
    const device_entry *e;
    const qc_reader_options *options;
    qc_output_frames frames;
    qc_digest *stored; /* per frame; NULL: digests are skipped */
    slot *slots;       /* per tensor of the device */
    atomic_int failed;
    pthread_mutex_t lock;  /* protects the next two; a leaf lock */
    pthread_cond_t placed; /* signalled when a place() returned or the load failed */
    int placing;           /* a thread is inside place() */
    int refused;           /* a place() gave no memory, so it is not asked again */
} load;

/* Opens all shards before it lists their frames, so that a missing one is found first. */
static qc_status find_frames(qc_output_frames *f, const qc_reader *r, const device_entry *e,
                             qc_error *err)
{
    const size_t shards = e->device.shard_count;
    QC_TRY(qc_output_frames_begin(f, r->dir, &r->m, e->first_shard, shards, err));
    f->device = e->device.name;
    for (size_t i = 0; i < shards; i++)
        QC_TRY(qc_output_frames_open(f, i, err));
    for (size_t i = 0; i < shards; i++) {
        QC_TRY(qc_output_frames_list(f, i, err));
        QC_TRY(qc_output_frames_header(f, i, err));
    }
    return QC_OK;
}

/* The first thread that fails tells the caller. */
static void fail_load(void *ctx)
{
    load *l = ctx;
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

static qc_status check_digest(const qc_output_frames *f, size_t tensor, const qc_digest *pieces,
                              qc_error *err)
{
    const qc_manifest_tensor *m = qc_output_row(f, tensor);
    const qc_digest root = qc_digest_root(pieces, f->tensors[tensor].count);
    if (f->tensors[tensor].count == 0 ||
        qc_digest_equal(&root, f->m->compressed ? &m->stored : &m->content))
        return QC_OK;
    qc_status st = QC_ERROR(err, QC_ERR_CHECK, "its bytes are not those that were written");
    qc_output_tell_tensor(f, tensor, err);
    return st;
}

static qc_status finish_tensor(const load *l, size_t tensor, qc_error *err)
{
    const qc_output_frames *f = &l->frames;
    if (l->stored)
        QC_TRY(check_digest(f, tensor, l->stored + f->tensors[tensor].first, err));
    return l->options->done ? l->options->done(l->options->ctx, &l->e->device.tensors[tensor],
                                               l->slots[tensor].dst, err)
                            : QC_OK;
}

static qc_status frame_room(void *ctx, unsigned worker, const qc_output_frame *frame, void **dst,
                            qc_error *err)
{
    load *l = ctx;
    const qc_reader_options *o = l->options;
    if (frame->tensor == QC_HEADER_FRAME) /* it was read and checked already */
        return QC_OK;
    if (o->pieces)
        return o->pieces->room(o->ctx, worker, frame->content_bytes, dst, err);
    QC_TRY(place_tensor(l, frame->tensor, err));
    *dst = (unsigned char *)l->slots[frame->tensor].dst + frame->at;
    return QC_OK;
}

static qc_status frame_put(void *ctx, unsigned worker, const qc_output_frame *frame, void *content,
                           qc_error *err)
{
    load *l = ctx;
    const qc_reader_options *o = l->options;
    if (o->pieces)
        QC_TRY(o->pieces->put(o->ctx, worker, &l->e->device.tensors[frame->tensor], frame->at,
                              content, frame->content_bytes, err));
    return atomic_fetch_sub(&l->slots[frame->tensor].left, 1) == 1
               ? finish_tensor(l, frame->tensor, err)
               : QC_OK;
}

static qc_status load_all(load *l, const qc_reader *r, unsigned threads, qc_error *err)
{
    static const qc_frames_client client = {
        .room = frame_room, .put = frame_put, .failed = fail_load, .ahead = 1};
    const size_t tensors = l->e->device.tensor_count;
    QC_TRY(find_frames(&l->frames, r, l->e, err));
    QC_TRY(qc_calloc(&l->slots, tensors, sizeof *l->slots, err));
    if (!l->options->skip_digests)
        QC_TRY(qc_calloc(&l->stored, l->frames.frame_count, sizeof *l->stored, err));
    for (size_t i = 0; i < tensors; i++) {
        atomic_init(&l->slots[i].placed, 0);
        atomic_init(&l->slots[i].left, l->frames.tensors[i].count);
    }
    for (size_t i = 0; i < tensors; i++) {
        if (l->frames.tensors[i].count > 0)
            continue;
        if (!l->options->pieces)
            QC_TRY(place_tensor(l, i, err));
        QC_TRY(finish_tensor(l, i, err));
    }
    const qc_frames_job job = {{0, (uint32_t)l->frames.frame_count}, threads, l->stored, NULL};
    return qc_output_frames_run(&l->frames, &job, &client, l, err);
}

static qc_status check_device(const qc_reader *r, size_t device, qc_error *err)
{
    if (device < r->device_count)
        return QC_OK;
    QC_FAIL(err, QC_ERR_DEVICE, "%s: there is no device number %zu; it has %zu", r->dir, device,
            r->device_count);
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
    load l = {.e = &r->devices[device], .options = options};
    unsigned threads = options->threads;
    QC_TRY(qc_threads_wanted(&threads, err));
    QC_TRY(qc_lock_init(&l.lock, &l.placed, err));
    qc_status st = load_all(&l, r, threads, err);
    if (st != QC_OK)
        fail_load(&l);
    qc_lock_deinit(&l.lock, &l.placed);
    qc_output_frames_deinit(&l.frames);
    qc_free(l.stored);
    qc_free(l.slots);
    return st;
}

/* ---- Single tensors ------------------------------------------------------------------------- */

struct qc_reader_shards {
    qc_reader *r;
    const device_entry *e;
    qc_output_frames frames;
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
    s->r = r->self;
    s->e = &r->devices[device];
    qc_status st = find_frames(&s->frames, r, s->e, err);
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
    qc_output_frames_deinit(&s->frames);
    qc_reader_close(s->r);
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

/* One slice of one tensor on its way. */
typedef struct {
    const qc_reader_slice *slice;
    unsigned char *dst;
    size_t frame_bytes; /* content of the tensor's first frame, which is its largest */
    void *content;      /* a frame of which only parts are wanted */
} slice_read;

/* A frame of whole rows within the slice goes straight to its place. */
static qc_status slice_room(void *ctx, unsigned worker, const qc_output_frame *x, void **dst,
                            qc_error *err)
{
    slice_read *r = ctx;
    const qc_reader_slice *s = r->slice;
    const uint64_t begin = s->first_row * s->row_bytes, end = begin + s->rows * s->row_bytes;
    (void)worker;
    if (!touches(s, x->at, x->content_bytes))
        return QC_OK;
    if (s->bytes == s->row_bytes && x->at >= begin && x->content_bytes <= end - x->at) {
        *dst = r->dst + (x->at - begin);
        return QC_OK;
    }
    if (!r->content)
        QC_TRY(qc_malloc(&r->content, r->frame_bytes, err));
    *dst = r->content;
    return QC_OK;
}

static qc_status slice_put(void *ctx, unsigned worker, const qc_output_frame *x, void *content,
                           qc_error *err)
{
    slice_read *r = ctx;
    (void)worker, (void)err;
    if (content == r->content)
        copy_slice(r->dst, r->slice, content, x->at, x->content_bytes);
    return QC_OK;
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
    const qc_reader_device *d = &s->e->device;
    if (index >= d->tensor_count)
        QC_FAIL(err, QC_ERR_USAGE, "%s: there is no tensor number %zu on device '%s'; it has %zu",
                s->r->dir, index, d->name, d->tensor_count);
    const qc_reader_tensor *t = &d->tensors[index];
    const qc_reader_slice all = {.row_bytes = t->bytes, .rows = 1, .bytes = t->bytes};
    if (slice)
        QC_TRY(check_slice(s->r, t, slice, err));
    uint64_t bytes = slice ? slice->rows * slice->bytes : t->bytes;
    if (bytes == 0)
        return QC_OK;
    if (!dst)
        QC_FAIL(err, QC_ERR_USAGE, "qc_reader_read: dst is NULL");
    static const qc_frames_client client = {.room = slice_room, .put = slice_put};
    const qc_frame_range range = s->frames.tensors[index];
    slice_read r = {.slice = slice ? slice : &all,
                    .dst = dst,
                    .frame_bytes = s->frames.frames[range.first].content_bytes};
    qc_digest *digests = NULL;
    qc_status st = QC_OK;
    /* Frames have no digest of their own, so those of a slice have their checksums looked at. */
    if (!slice)
        st = qc_calloc(&digests, range.count, sizeof *digests, err);
    if (st == QC_OK)
        st = qc_output_frames_run(&s->frames, &(qc_frames_job){range, 1, digests, NULL}, &client,
                                  &r, err);
    if (st == QC_OK && !slice)
        st = check_digest(&s->frames, index, digests, err);
    qc_free(r.content);
    qc_free(digests);
    return st;
}

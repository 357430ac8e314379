#include "formats/output_frames.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "formats/manifest_header.h"
#include "formats/shard_layout.h"

#include <inttypes.h>
#include <string.h>

#define FRAME_ALIGN    4096u
#define STEP_BYTES     (512u << 10) /* read at once, then hashed in the L2 cache */
#define RAW_FROM_BYTES (256u << 10) /* smaller frames: one read and a cheap copy */

const qc_manifest_tensor *qc_output_row(const qc_output_frames *f, size_t tensor)
{
    return &f->m->tensors[f->first_tensor + tensor];
}

static const qc_manifest_shard *shard_row(const qc_output_frames *f, size_t shard)
{
    return &f->m->shards[f->first_shard + shard];
}

void qc_output_tell_tensor(const qc_output_frames *f, size_t tensor, qc_error *err)
{
    const qc_manifest_tensor *t = qc_output_row(f, tensor);
    qc_error_prefix(err, "tensor '%s' in %s%s", t->name, f->m->shards[t->shard].name,
                    qc_manifest_ending(f->m));
}

/* ---- Finding frames ------------------------------------------------------------------------- */

/* Shards and tensors lie in the order of the manifest, which was checked. */
qc_status qc_output_frames_begin(qc_output_frames *f, const char *dir, const qc_manifest *m,
                                 size_t first_shard, size_t shards, qc_error *err)
{
    *f = (qc_output_frames){.dir = dir,
                            .m = m,
                            .first_shard = first_shard,
                            .shard_count = shards,
                            .max_stored = 1,
                            .max_content = 1};
    size_t end = 0;
    while (end < m->tensor_count && m->tensors[end].shard < first_shard)
        end++;
    f->first_tensor = end;
    QC_TRY(qc_calloc(&f->shards, shards, sizeof *f->shards, err));
    for (size_t i = 0; i < shards; i++) {
        f->shards[i].file = QC_FILE_CLOSED;
        f->shards[i].first = end - f->first_tensor;
        while (end < m->tensor_count && m->tensors[end].shard == first_shard + i)
            end++;
        f->shards[i].end = end - f->first_tensor;
    }
    f->tensor_count = end - f->first_tensor;
    qc_file_allow_many(shards);
    return qc_calloc(&f->tensors, f->tensor_count, sizeof *f->tensors, err);
}

void qc_output_frames_deinit(qc_output_frames *f)
{
    for (size_t i = 0; f->shards && i < f->shard_count; i++) {
        qc_file_discard(&f->shards[i].file);
        qc_free(f->shards[i].path);
    }
    qc_free(f->shards);
    qc_free(f->tensors);
    qc_free(f->frames);
}

qc_status qc_output_frames_open(qc_output_frames *f, size_t shard, qc_error *err)
{
    qc_output_shard *s = &f->shards[shard];
    const qc_manifest_shard *row = shard_row(f, shard);
    qc_strbuf path;
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t want = f->m->compressed ? row->file_bytes : row->content_bytes;
    qc_strbuf_init(&path, (size_t)1 << 20);
    qc_status st =
        qc_strbuf_addf(&path, err, "%s/%s%s", f->dir, row->name, qc_manifest_ending(f->m));
    if (st == QC_OK)
        st = qc_strdup(&s->path, path.data, err);
    qc_strbuf_deinit(&path);
    QC_TRY(st);
    QC_TRY(qc_path_stat(s->path, &kind, &s->file_bytes, err));
    if (kind != QC_PATH_FILE && f->device)
        QC_FAIL(err, QC_ERR_CHECK, "%s: the shard is missing; device '%s' needs it", s->path,
                f->device);
    if (kind != QC_PATH_FILE)
        QC_FAIL(err, QC_ERR_CHECK, "%s: the shard is missing", s->path);
    if (s->file_bytes != want)
        QC_FAIL(err, QC_ERR_CHECK, "%s: expected %" PRIu64 " bytes, found %" PRIu64, s->path, want,
                s->file_bytes);
    return qc_file_open_read(&s->file, s->path, err);
}

/* Consecutive content of a shard, and how it is cut. */
typedef struct {
    uint32_t shard, tensor;
    uint64_t begin;        /* in the content of the shard */
    uint64_t bytes, piece; /* piece 0: frames may have any size */
    uint64_t stored_bytes; /* length of its frames, if they are compressed */
} stretch;

static stretch stretch_of(const qc_output_frames *f, size_t shard, uint32_t tensor)
{
    const qc_manifest_shard *s = shard_row(f, shard);
    stretch x = {.shard = (uint32_t)shard, .tensor = tensor};
    if (tensor == QC_HEADER_FRAME) {
        x.bytes = s->header_bytes;
        x.stored_bytes = s->header_stored_bytes;
        x.piece = f->m->compressed ? 0 : qc_layout_piece_bytes(x.bytes, 8);
        return x;
    }
    const qc_manifest_tensor *t = qc_output_row(f, tensor);
    x.begin = s->header_bytes + t->begin;
    x.bytes = t->end - t->begin;
    x.piece = t->piece_bytes;
    x.stored_bytes = t->stored_bytes;
    return x;
}

/* Appends the frames of a stretch: the next ones of the table, or its pieces where there is no
 * table. Returns 0 where the table has others than the manifest says. */
static int add_frames(qc_output_frames *f, qc_frame_range *range, stretch x,
                      const qc_seek_table *table, size_t *next)
{
    uint64_t stored = 0;
    range->first = (uint32_t)f->frame_count;
    for (uint64_t at = 0; at < x.bytes;) {
        uint64_t left = x.bytes - at, want = qc_min_u64(left, x.piece ? x.piece : left);
        qc_frame found = {.stored_offset = x.begin + at,
                          .stored_bytes = (uint32_t)want,
                          .content_bytes = (uint32_t)want};
        if (table && *next == table->count)
            return 0;
        if (table)
            found = table->frames[(*next)++];
        if (found.content_bytes == 0 || found.content_bytes > left ||
            (x.piece && found.content_bytes != want))
            return 0;
        f->frames[f->frame_count++] = (qc_output_frame){.offset = found.stored_offset,
                                                        .at = at,
                                                        .stored_bytes = found.stored_bytes,
                                                        .content_bytes = found.content_bytes,
                                                        .shard = x.shard,
                                                        .tensor = x.tensor};
        f->max_content =
            found.content_bytes > f->max_content ? found.content_bytes : f->max_content;
        f->max_stored = found.stored_bytes > f->max_stored ? found.stored_bytes : f->max_stored;
        at += found.content_bytes;
        stored += found.stored_bytes;
        range->count++;
    }
    return !table || stored == x.stored_bytes;
}

/* The frames of a table must be, in order and with none left over, those of the header and those of
 * the tensors. They then begin where the manifest says, because it was checked to lay them one
 * after another. */
static int add_shard(qc_output_frames *f, size_t shard, const qc_seek_table *table)
{
    qc_output_shard *s = &f->shards[shard];
    const size_t before = f->frame_count;
    size_t next = 0;
    int right = add_frames(f, &s->header, stretch_of(f, shard, QC_HEADER_FRAME), table, &next);
    for (size_t i = s->first; right && i < s->end; i++)
        right = add_frames(f, &f->tensors[i], stretch_of(f, shard, (uint32_t)i), table, &next);
    s->listed = right && (!table || next == table->count);
    if (s->listed)
        return 1;
    f->frame_count = before;
    s->header = (qc_frame_range){0};
    for (size_t i = s->first; i < s->end; i++)
        f->tensors[i] = (qc_frame_range){0};
    return 0;
}

static qc_status check_table(const qc_seek_table *table, const qc_output_shard *s,
                             const qc_manifest_shard *row, qc_error *err)
{
    void *v = NULL;
    int same = 0;
    if (table->table_bytes == row->table_bytes) {
        QC_TRY(qc_malloc(&v, (size_t)table->table_bytes, err));
        qc_status st =
            qc_file_pread(&s->file, v, (size_t)table->table_bytes, table->table_offset, err);
        if (st == QC_OK) {
            qc_digest d = qc_digest_bytes(v, (size_t)table->table_bytes);
            same = qc_digest_equal(&d, &row->table);
        }
        qc_free(v);
        QC_TRY(st);
    }
    if (!same)
        QC_FAIL(err, QC_ERR_CHECK, "%s: its seek table is not the one that was written", s->path);
    return QC_OK;
}

static qc_status make_room(qc_output_frames *f, size_t more, qc_error *err)
{
    if (f->frame_count + more > UINT32_MAX)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: there are too many frames", f->dir);
    return qc_realloc_array(&f->frames, f->frame_count + more, sizeof *f->frames, err);
}

qc_status qc_output_frames_of_checkpoint(qc_output_frames *f, const qc_checkpoint *c,
                                         const uint64_t *piece_bytes, qc_error *err)
{
    size_t count = 0;
    qc_frame_range range;
    *f = (qc_output_frames){.dir = c->path, .checkpoint = c, .max_content = 1};
    for (size_t i = 0; i < c->tensor_count; i++)
        if (piece_bytes[i])
            count += qc_ceil_div_u64(c->tensors[i].bytes, piece_bytes[i]);
    QC_TRY(make_room(f, count, err));
    for (uint32_t i = 0; i < (uint32_t)c->tensor_count; i++)
        if (piece_bytes[i])
            (void)add_frames(
                f, &range,
                (stretch){.tensor = i, .bytes = c->tensors[i].bytes, .piece = piece_bytes[i]}, NULL,
                NULL);
    return QC_OK;
}

qc_status qc_output_frames_list(qc_output_frames *f, size_t shard, qc_error *err)
{
    const qc_output_shard *s = &f->shards[shard];
    qc_seek_table table = {0};
    if (!f->m->compressed) {
        uint64_t count = 0;
        for (size_t i = s->first; i <= s->end; i++) {
            stretch x = stretch_of(f, shard, i == s->end ? QC_HEADER_FRAME : (uint32_t)i);
            count += x.bytes > 0 ? qc_ceil_div_u64(x.bytes, x.piece) : 0;
        }
        QC_TRY(make_room(f, (size_t)count, err));
        (void)add_shard(f, shard, NULL);
        return QC_OK;
    }
    qc_status st = qc_seek_table_read(&table, &s->file, err);
    if (st == QC_OK)
        st = check_table(&table, s, shard_row(f, shard), err);
    if (st == QC_ERR_INPUT || st == QC_ERR_TRUNCATED)
        st = qc_error_recode(err, QC_ERR_CHECK); /* the table was right once */
    if (st == QC_OK)
        st = make_room(f, table.count, err);
    if (st == QC_OK && !add_shard(f, shard, &table))
        st =
            QC_ERROR(err, QC_ERR_CHECK, "%s: its frames are not those the manifest lists", s->path);
    qc_seek_table_deinit(&table);
    return st;
}

/* ---- Reading one frame ---------------------------------------------------------------------- */

/* A thread's own things. */
typedef struct {
    const qc_output_frames *f;
    const qc_frames_job *job;
    qc_st_cursor *cursor;  /* of a checkpoint, or NULL */
    qc_frame_coder *coder; /* NULL if the output is not compressed */
    void *stored;          /* one frame */
    qc_digest_state *hash; /* NULL if nothing is hashed */
} frame_reader;

static qc_status reader_init(frame_reader *r, const qc_output_frames *f, const qc_frames_job *job,
                             qc_error *err)
{
    *r = (frame_reader){.f = f, .job = job};
    if (f->checkpoint)
        return qc_st_cursor_create(&r->cursor, err);
    if (job->stored)
        QC_TRY(qc_digest_create(&r->hash, err));
    if (!f->m->compressed)
        return QC_OK;
    QC_TRY(qc_frame_coder_create(&r->coder, err));
    if (job->stored && !job->content)
        qc_frame_coder_skip_checksums(r->coder);
    return qc_malloc_aligned(&r->stored, FRAME_ALIGN, f->max_stored, err);
}

static void reader_deinit(frame_reader *r)
{
    qc_free(r->stored);
    qc_st_cursor_destroy(r->cursor);
    qc_frame_coder_destroy(r->coder);
    qc_digest_destroy(r->hash);
}

/* Reads the content of frame `index` to dst, and makes its digests. QC_ERR_CHECK where it cannot be
 * decoded. */
static qc_status read_frame(frame_reader *r, size_t index, void *dst, qc_error *err)
{
    const qc_output_frame *frame = &r->f->frames[index];
    if (r->cursor)
        return qc_checkpoint_read(r->f->checkpoint, r->cursor,
                                  &r->f->checkpoint->tensors[frame->tensor], frame->at, dst,
                                  frame->content_bytes, err);
    const qc_file *file = &r->f->shards[frame->shard].file;
    const size_t at = index - r->job->range.first;
    int done = 0;
    qc_status st = QC_OK;
    if (r->hash)
        qc_digest_reset(r->hash);
    if (r->coder && !r->job->content && frame->content_bytes >= RAW_FROM_BYTES &&
        frame->stored_bytes == qc_raw_frame_bytes(frame->content_bytes)) {
        st = qc_raw_frame_read(&done, file, frame->offset, dst, frame->content_bytes, r->hash, err);
        if (r->hash && !done)
            qc_digest_reset(r->hash);
    }
    unsigned char *p = r->coder ? r->stored : dst;
    for (size_t step = 0; !done && st == QC_OK && step < frame->stored_bytes; step += STEP_BYTES) {
        const size_t n = qc_min_size(frame->stored_bytes - step, STEP_BYTES);
        st = qc_file_pread(file, p + step, n, frame->offset + step, err);
        if (st == QC_OK && r->hash)
            qc_digest_update(r->hash, p + step, n);
    }
    if (st == QC_OK && !done && r->coder)
        st = qc_frame_decode(r->coder, r->stored, frame->stored_bytes, dst, frame->content_bytes,
                             err);
    if (r->hash)
        r->job->stored[at] = qc_digest_finish(r->hash);
    if (st == QC_ERR_INPUT)
        QC_FAIL(err, QC_ERR_CHECK, "a frame cannot be decompressed");
    if (st == QC_ERR_TRUNCATED) /* while it was read, as its size was right */
        return qc_error_recode(err, QC_ERR_CHECK);
    if (st == QC_OK && r->job->content)
        r->job->content[at] =
            r->coder ? qc_digest_bytes(dst, frame->content_bytes) : r->job->stored[at];
    return st;
}

/* ---- A run ---------------------------------------------------------------------------------- */

typedef struct {
    const qc_output_frames *f;
    const qc_frames_job *job;
    const qc_frames_client *client;
    void *ctx;
    unsigned threads;
    atomic_size_t next;
    size_t end;
} frame_run;

static qc_status take_frame(const frame_run *run, frame_reader *r, unsigned worker, size_t index,
                            void *buffer, qc_error *err)
{
    const qc_frames_client *c = run->client;
    const qc_output_frame *frame = &run->f->frames[index];
    void *dst = buffer;
    if (c->room)
        QC_TRY(c->room(run->ctx, worker, frame, &dst, err));
    if (!dst)
        return QC_OK;
    qc_status st = read_frame(r, index, dst, err);
    if (st == QC_OK)
        return c->put ? c->put(run->ctx, worker, frame, dst, err) : QC_OK;
    if (st == QC_ERR_CHECK && c->broken) {
        c->broken(run->ctx, frame);
        return QC_OK;
    }
    if (run->f->m && frame->tensor != QC_HEADER_FRAME && !c->broken)
        qc_output_tell_tensor(run->f, frame->tensor, err);
    return st;
}

/* Hints at the frames that the team will want next: threads take them in order. */
static void hint_ahead(const frame_run *run, size_t index)
{
    if (!run->client->ahead || index >= run->end)
        return;
    const qc_output_frame *frame = &run->f->frames[index];
    qc_file_hint_read_soon(&run->f->shards[frame->shard].file, frame->offset, frame->stored_bytes);
}

static qc_status run_worker(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    frame_run *run = ctx;
    frame_reader r;
    void *buffer = NULL;
    qc_status st = reader_init(&r, run->f, run->job, err);
    if (st == QC_OK && !run->client->room)
        st = qc_malloc_aligned(&buffer, FRAME_ALIGN, run->f->max_content, err);
    while (st == QC_OK) {
        st = qc_check_stopped(team, err);
        if (st != QC_OK)
            break;
        size_t i = atomic_fetch_add(&run->next, 1);
        if (i >= run->end)
            break;
        hint_ahead(run, i + run->threads);
        st = take_frame(run, &r, index, i, buffer, err);
    }
    if (st != QC_OK && run->client->failed)
        run->client->failed(run->ctx);
    qc_free(buffer);
    reader_deinit(&r);
    return st;
}

qc_status qc_output_frames_run(const qc_output_frames *f, const qc_frames_job *job,
                               const qc_frames_client *client, void *ctx, qc_error *err)
{
    const size_t first = job->range.first, count = job->range.count;
    frame_run run = {.f = f, .job = job, .client = client, .ctx = ctx, .end = first + count};
    if (count == 0)
        return QC_OK;
    run.threads = count < job->threads ? (unsigned)count : job->threads;
    atomic_init(&run.next, first);
    for (unsigned i = 0; i < run.threads; i++)
        hint_ahead(&run, first + i);
    return qc_team_run(run.threads, run_worker, &run, err);
}

/* ---- The header of a shard ------------------------------------------------------------------ */

static qc_status header_room(void *ctx, unsigned worker, const qc_output_frame *frame, void **dst,
                             qc_error *err)
{
    (void)worker, (void)err;
    *dst = (char *)ctx + frame->at;
    return QC_OK;
}

qc_status qc_output_frames_header(const qc_output_frames *f, size_t shard, qc_error *err)
{
    static const qc_frames_client client = {.room = header_room};
    const qc_output_shard *s = &f->shards[shard];
    char *header = NULL;
    qc_digest *digests = NULL; /* of contents, then of frames */
    QC_TRY(qc_malloc(&header, (size_t)shard_row(f, shard)->header_bytes, err));
    qc_status st = qc_calloc(&digests, 2 * (size_t)s->header.count, sizeof *digests, err);
    if (st == QC_OK)
        st = qc_output_frames_run(
            f, &(qc_frames_job){s->header, 1, digests + s->header.count, digests}, &client, header,
            err);
    if (st == QC_ERR_CHECK)
        qc_error_prefix(err, "header of %s%s", shard_row(f, shard)->name, qc_manifest_ending(f->m));
    if (st == QC_OK) {
        const qc_digest root = qc_digest_root(digests, s->header.count);
        st = qc_shard_header_check(header, &root, f->m, f->first_shard + shard,
                                   f->first_tensor + s->first, f->first_tensor + s->end, err);
    }
    qc_free(digests);
    qc_free(header);
    /* The header was right when it was written, so it is damaged now. */
    return qc_status_exit_code(st) == 3 ? qc_error_recode(err, QC_ERR_CHECK) : st;
}

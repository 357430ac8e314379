#include "convert/verify/output_scan.h"

#include "base/alloc.h"
#include "base/text.h"
#include "convert/pipeline/pipeline.h"
#include "formats/json_cut.h"
#include "formats/json_strict.h"
#include "formats/shard_layout.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

typedef struct {
    qc_scan_result *result;
    const qc_scan_options *options;
    qc_output_frames frames;
    qc_digest *stored, *content; /* per frame */
    unsigned char *broken;       /* per frame: 1 where it cannot be decoded */
} scan;

static qc_status problem(scan *s, qc_error *err, const char *what, const char *why_fmt, ...)
    QC_PRINTF(4, 5);

static qc_status problem(scan *s, qc_error *err, const char *what, const char *why_fmt, ...)
{
    qc_scan_result *r = s->result;
    if (r->problem_count++ > 0)
        return QC_OK;
    char why[512];
    va_list ap;
    va_start(ap, why_fmt);
    (void)vsnprintf(why, sizeof why, why_fmt, ap);
    va_end(ap);
    QC_TRY(qc_arena_strndup(r->arena, &r->first.what, what, strlen(what), err));
    return qc_arena_strndup(r->arena, &r->first.why, why, strlen(why), err);
}

/* ---- Everything but weights ----------------------------------------------------------------- */

static qc_status take_json(void *cut, const void *bytes, size_t len, qc_error *err)
{
    return qc_json_cut_feed(cut, bytes, len, err);
}

static qc_status check_side_file(scan *s, const qc_manifest_file *f, qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t bytes = 0;
    QC_TRY(qc_path_join(s->result->arena, &path, s->frames.dir, f->path, err));
    QC_TRY(qc_path_stat(path, &kind, &bytes, err));
    if (kind != QC_PATH_FILE)
        return problem(s, err, f->path, "the file is missing");
    if (bytes != f->bytes)
        return problem(s, err, f->path, "expected %" PRIu64 " bytes, found %" PRIu64, f->bytes,
                       bytes);
    qc_digest d;
    QC_TRY(qc_digest_file(&d, path, err));
    if (!qc_digest_equal(&d, &f->digest))
        return problem(s, err, f->path, "its bytes are not those that were written");
    return QC_OK;
}

static qc_status check_json(void *ctx, const char *text, size_t len, qc_error *err)
{
    qc_json *doc = NULL;
    (void)ctx;
    QC_TRY(qc_json_parse(&doc, text, len, 0, err));
    qc_json_destroy(doc);
    return QC_OK;
}

static qc_status count_entry(void *ctx, const char *text, size_t len, qc_error *err)
{
    ++*(size_t *)ctx;
    return check_json(NULL, text, len, err);
}

/* Reads the members of weight_map one by one; a tree of them would take the most memory of all. */
static qc_status count_entries(const char *path, size_t *entries, qc_error *err)
{
    qc_json_cut cut;
    qc_json_cut_init(&cut,
                     &(qc_json_parts){"weight_map", check_json, count_entry, check_json, entries});
    qc_status st = qc_file_read_through(path, take_json, &cut, err);
    if (st == QC_OK)
        st = qc_json_cut_finish(&cut, err);
    qc_json_cut_deinit(&cut);
    return st;
}

/* The index was hashed as a file already; this checks that it says what the manifest says. */
static qc_status check_index(scan *s, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    size_t listed = 0;
    const char *path = NULL, *name = NULL;
    if (m->shard_count == 0)
        return QC_OK;
    QC_TRY(qc_layout_index_name(&name, s->result->arena, m->shards[0].name, err));
    while (listed < m->file_count && strcmp(m->files[listed].path, name) != 0)
        listed++;
    if (listed == m->file_count) {
        if (m->shard_count > 1)
            return problem(s, err, name, "there are several shards, but no index");
        return QC_OK;
    }
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_path_join(s->result->arena, &path, s->frames.dir, name, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        return QC_OK; /* reported already */
    qc_error why = {0};
    size_t entries = 0;
    qc_status st = count_entries(path, &entries, &why);
    if (st == QC_OK && entries != m->tensor_count)
        return problem(s, err, name, "it lists %zu tensor%s, but the manifest has %zu", entries,
                       qc_plural(entries), m->tensor_count);
    if (st != QC_OK && st != QC_ERR_NOMEM && st != QC_ERR_IO)
        return problem(s, err, name, "%s", why.msg);
    return qc_error_pass(err, &why, st);
}

/* ---- Frames --------------------------------------------------------------------------------- */

/* Is it damage that a message about `subject` tells? It is then a problem, which names the subject
 * itself, and no failure. */
static qc_status judged(scan *s, qc_status st, const qc_error *why, const char *what,
                        const char *subject, qc_error *err)
{
    if (st == QC_ERR_CHECK) {
        const size_t len = strlen(subject);
        const int named =
            strncmp(why->msg, subject, len) == 0 && qc_begins_with(why->msg + len, ": ");
        return problem(s, err, what, "%s", why->msg + (named ? len + 2 : 0));
    }
    return qc_error_pass(err, why, st);
}

static qc_status add_shard(scan *s, size_t shard, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    qc_output_frames *f = &s->frames;
    const char *name = NULL, *header = NULL;
    qc_error why = {0};
    QC_TRY(qc_arena_printf(s->result->arena, &name, err, "%s%s", m->shards[shard].name,
                           qc_manifest_ending(m)));
    qc_status st = qc_output_frames_open(f, shard, &why);
    if (s->options->where_there && st == QC_ERR_CHECK) {
        qc_path_kind kind = QC_PATH_MISSING;
        QC_TRY(qc_path_stat(f->shards[shard].path, &kind, NULL, err));
        if (kind == QC_PATH_MISSING)
            return QC_OK;
    }
    s->result->content_bytes += m->shards[shard].content_bytes;
    s->result->stored_bytes += f->shards[shard].file_bytes;
    if (st == QC_OK)
        st = qc_output_frames_list(f, shard, &why);
    if (st != QC_OK)
        return judged(s, st, &why, name, f->shards[shard].path, err);
    st = qc_output_frames_header(f, shard, &why);
    if (st == QC_OK)
        return QC_OK;
    f->shards[shard].header.count = 0; /* its frames are not judged again */
    QC_TRY(qc_arena_printf(s->result->arena, &header, err, "header of %s", name));
    return judged(s, st, &why, header, header, err);
}

static qc_status take_frame(void *ctx, unsigned worker, const qc_output_frame *frame, void *content,
                            qc_error *err)
{
    const scan *s = ctx;
    if (s->options->sink)
        QC_TRY(s->options->sink(s->options->sink_ctx, worker, frame, content, err));
    qc_progress_add(s->options->progress, frame->content_bytes);
    return QC_OK;
}

static void take_broken(void *ctx, const qc_output_frame *frame)
{
    scan *s = ctx;
    s->broken[frame - s->frames.frames] = 1;
}

/* ---- Verdict -------------------------------------------------------------------------------- */

/* Returns what is wrong with a tensor or a header, or NULL. */
static const char *verdict(const scan *s, qc_frame_range r, const qc_digest *content,
                           const qc_digest *stored)
{
    const qc_digest found = qc_digest_root(s->content + r.first, r.count),
                    found_stored = qc_digest_root(s->stored + r.first, r.count);
    for (uint32_t i = 0; i < r.count; i++)
        if (s->broken[r.first + i])
            return "a frame cannot be decompressed";
    if (!qc_digest_equal(&found, content))
        return "its bytes are not those that were written";
    if (s->frames.m->compressed && !qc_digest_equal(&found_stored, stored))
        return "its compressed bytes are not those that were written";
    return NULL;
}

static qc_status judge_shard(scan *s, size_t shard, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    const qc_manifest_shard *row = &m->shards[shard];
    const qc_output_shard *found = &s->frames.shards[shard];
    const char *what = NULL, *why = NULL;
    if (found->header.count > 0)
        why = verdict(s, found->header, &row->header, &row->header_stored);
    if (why) {
        QC_TRY(qc_arena_printf(s->result->arena, &what, err, "header of %s%s", row->name,
                               qc_manifest_ending(m)));
        QC_TRY(problem(s, err, what, "%s", why));
    }
    for (size_t i = found->first; found->listed && i < found->end; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        s->result->tensors_checked++;
        why = verdict(s, s->frames.tensors[i], &t->content, &t->stored);
        if (!why)
            continue;
        QC_TRY(qc_arena_printf(s->result->arena, &what, err, "tensor '%s' in %s%s", t->name,
                               row->name, qc_manifest_ending(m)));
        QC_TRY(problem(s, err, what, "%s", why));
    }
    return QC_OK;
}

static qc_status scan_all(scan *s, qc_error *err)
{
    static const qc_frames_client client = {.put = take_frame, .broken = take_broken};
    const qc_manifest *m = &s->result->manifest;
    for (size_t i = 0; !s->options->shards_only && i < m->file_count; i++)
        QC_TRY(check_side_file(s, &m->files[i], err));
    if (!s->options->shards_only)
        QC_TRY(check_index(s, err));
    for (size_t i = 0; i < m->shard_count; i++)
        QC_TRY(add_shard(s, i, err));
    unsigned threads = s->options->threads ? s->options->threads : qc_pipeline_default_threads(0);
    const size_t count = s->frames.frame_count;
    QC_TRY(qc_calloc(&s->stored, count, sizeof *s->stored, err));
    QC_TRY(qc_calloc(&s->content, count, sizeof *s->content, err));
    QC_TRY(qc_calloc(&s->broken, count, 1, err));
    const qc_frames_job job = {{0, (uint32_t)count}, threads, s->stored, s->content};
    QC_TRY(qc_output_frames_run(&s->frames, &job, &client, s, err));
    for (size_t i = 0; i < m->shard_count; i++)
        QC_TRY(judge_shard(s, i, err));
    return QC_OK;
}

qc_status qc_scan_output(qc_scan_result *result, qc_arena *arena, const char *dir,
                         const qc_manifest *m, const qc_scan_options *options, qc_error *err)
{
    memset(result, 0, sizeof *result);
    result->arena = arena;
    result->manifest = *m;
    scan s = {.result = result, .options = options};
    qc_status st = qc_output_frames_begin(&s.frames, dir, m, 0, m->shard_count, err);
    if (st == QC_OK)
        st = scan_all(&s, err);
    qc_output_frames_deinit(&s.frames);
    qc_free(s.stored);
    qc_free(s.content);
    qc_free(s.broken);
    return st;
}

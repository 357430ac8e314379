#include "convert/verify/output_scan.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/pipeline/pipeline.h"
#include "formats/json_cut.h"
#include "formats/json_strict.h"
#include "formats/manifest_header.h"
#include "formats/shard_layout.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define HEADER_OWNER UINT32_MAX

/* One frame of a compressed shard, or one piece of a plain one. */
typedef struct {
    uint64_t stored_offset, content_offset;
    uint32_t stored_bytes, content_bytes;
    uint32_t shard;
    qc_digest stored, content;
    int undecodable;
} scan_unit;

/* A tensor or the header of a shard, which are consecutive units. */
typedef struct {
    uint32_t tensor; /* HEADER_OWNER for a header */
    uint32_t shard;
    uint32_t first_unit, unit_count;
} scan_range;

typedef struct {
    qc_scan_result *result;
    const qc_scan_options *options;
    const char *dir;
    qc_file *files;     /* per shard; closed where the shard is unusable */
    const char **names; /* per shard: the name of its file */
    scan_unit *units;
    size_t unit_count, unit_cap;
    scan_range *ranges;
    size_t range_count;
    size_t max_stored, max_content;
    atomic_uint_fast64_t next;
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

/* Returns what a message says about the subject, without the subject's name, because the problem
 * names it already. */
static const char *behind(const char *msg, const char *subject)
{
    size_t len = strlen(subject);
    return strncmp(msg, subject, len) == 0 && strncmp(msg + len, ": ", 2) == 0 ? msg + len + 2
                                                                               : msg;
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
    QC_TRY(qc_path_join(s->result->arena, &path, s->dir, f->path, err));
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
    QC_TRY(qc_path_join(s->result->arena, &path, s->dir, name, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        return QC_OK; /* that was reported already */
    qc_error why = {0};
    size_t entries = 0;
    qc_status st = count_entries(path, &entries, &why);
    if (st == QC_OK && entries != m->tensor_count)
        return problem(s, err, name, "it lists %zu tensor%s, but the manifest has %zu", entries,
                       qc_plural(entries), m->tensor_count);
    if (st != QC_OK && st != QC_ERR_NOMEM && st != QC_ERR_IO)
        return problem(s, err, name, "%s", why.msg);
    if (st != QC_OK && err)
        *err = why;
    return st;
}

/* The tensors of a shard lie in the order of the manifest, and shards one after another. Where
 * several tensors begin at one place, all but the last are empty. */
int qc_scan_tensor_at(const qc_manifest *m, uint32_t shard, uint64_t offset, size_t *tensor)
{
    const uint64_t header = m->shards[shard].header_bytes;
    size_t low = 0, high = m->tensor_count;
    if (offset < header)
        return 0;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const qc_manifest_tensor *t = &m->tensors[mid];
        if (t->shard < shard || (t->shard == shard && t->begin <= offset - header))
            low = mid + 1;
        else
            high = mid;
    }
    *tensor = low > 0 ? low - 1 : 0;
    return low > 0 && m->tensors[low - 1].shard == shard &&
           offset - header < m->tensors[low - 1].end;
}

/* ---- Units ---------------------------------------------------------------------------------- */

static qc_status add_unit(scan *s, scan_unit u, qc_error *err)
{
    if (s->unit_count == s->unit_cap) {
        size_t cap = s->unit_cap ? s->unit_cap * 2 : 256;
        QC_TRY(qc_realloc_array(&s->units, cap, sizeof *s->units, err));
        s->unit_cap = cap;
    }
    s->units[s->unit_count++] = u;
    s->max_stored = u.stored_bytes > s->max_stored ? u.stored_bytes : s->max_stored;
    s->max_content = u.content_bytes > s->max_content ? u.content_bytes : s->max_content;
    return QC_OK;
}

/* In plain files the digests are over pieces. */
static qc_status add_plain_range(scan *s, uint32_t shard, uint64_t begin, uint64_t bytes,
                                 uint64_t piece, qc_error *err)
{
    if (piece > QC_FRAME_READ_MAX_BYTES)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: pieces of %" PRIu64 " bytes are too large",
                s->result->manifest.shards[shard].name, piece);
    for (uint64_t at = 0; at < bytes; at += piece) {
        uint64_t n = bytes - at < piece ? bytes - at : piece;
        QC_TRY(add_unit(s,
                        (scan_unit){.stored_offset = begin + at,
                                    .content_offset = begin + at,
                                    .stored_bytes = (uint32_t)n,
                                    .content_bytes = (uint32_t)n,
                                    .shard = shard},
                        err));
    }
    return QC_OK;
}

static void begin_range(scan *s, uint32_t tensor, uint32_t shard)
{
    s->ranges[s->range_count] = (scan_range){tensor, shard, (uint32_t)s->unit_count, 0};
}

static void end_range(scan *s)
{
    scan_range *r = &s->ranges[s->range_count++];
    r->unit_count = (uint32_t)s->unit_count - r->first_unit;
}

/* Does the header say what the manifest says? If not, that is judged here and now: *right is 0, and
 * the bytes of the header make no range. */
static qc_status check_header(scan *s, uint32_t shard, size_t first, size_t end,
                              const qc_shard_frames *frames, int *right, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    const char *what = NULL;
    qc_error why = {0};
    qc_status st = qc_shard_header_check(&s->files[shard], m, shard, first, end, frames, &why);
    *right = st == QC_OK;
    if (st == QC_ERR_CHECK) {
        QC_TRY(qc_arena_printf(s->result->arena, &what, err, "header of %s", s->names[shard]));
        return problem(s, err, what, "%s", behind(why.msg, what));
    }
    if (st != QC_OK && err)
        *err = why;
    return st;
}

static qc_status add_plain_shard(scan *s, uint32_t shard, size_t first, size_t end, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    const qc_manifest_shard *sh = &m->shards[shard];
    int right = 0;
    QC_TRY(check_header(s, shard, first, end, NULL, &right, err));
    if (right) {
        begin_range(s, HEADER_OWNER, shard);
        /* The digest of a header is over the pieces the writer uses for any tensor of that size. */
        QC_TRY(add_plain_range(s, shard, 0, sh->header_bytes,
                               qc_layout_piece_bytes(sh->header_bytes, 8), err));
        end_range(s);
    }
    for (size_t i = first; i < end; i++) {
        const qc_manifest_tensor *t = &m->tensors[i];
        begin_range(s, (uint32_t)i, shard);
        if (t->end > t->begin)
            QC_TRY(add_plain_range(s, shard, sh->header_bytes + t->begin, t->end - t->begin,
                                   t->piece_bytes, err));
        end_range(s);
    }
    return QC_OK;
}

static qc_status add_frames(scan *s, uint32_t tensor, uint32_t shard, const qc_frame **next,
                            size_t count, qc_error *err)
{
    begin_range(s, tensor, shard);
    for (size_t i = 0; i < count; i++) {
        const qc_frame *f = (*next)++;
        QC_TRY(add_unit(s,
                        (scan_unit){.stored_offset = f->stored_offset,
                                    .content_offset = f->content_offset,
                                    .stored_bytes = f->stored_bytes,
                                    .content_bytes = f->content_bytes,
                                    .shard = shard},
                        err));
    }
    end_range(s);
    return QC_OK;
}

static qc_status add_compressed_shard(scan *s, uint32_t shard, size_t first, size_t end,
                                      qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    const qc_file *file = &s->files[shard];
    int right = 0;
    qc_shard_frames f;
    qc_error why = {0};
    qc_status st = qc_shard_frames_read(&f, file, m, shard, first, end, &why);
    if (st == QC_ERR_CHECK)
        return problem(s, err, s->names[shard], "%s", behind(why.msg, file->path));
    if (st != QC_OK) {
        if (err)
            *err = why;
        return st;
    }
    const qc_frame *next = f.table.frames;
    st = check_header(s, shard, first, end, &f, &right, err);
    if (right)
        st = add_frames(s, HEADER_OWNER, shard, &next, f.header_frames, err);
    else
        next += f.header_frames;
    for (size_t i = first; st == QC_OK && i < end; i++)
        st = add_frames(s, (uint32_t)i, shard, &next, qc_shard_pieces(&m->tensors[i]), err);
    qc_shard_frames_deinit(&f);
    return st;
}

static qc_status open_shard(scan *s, uint32_t shard, size_t first, size_t end, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    const qc_manifest_shard *sh = &m->shards[shard];
    const char *path = NULL, *name = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t bytes = 0, want = m->compressed ? sh->file_bytes : sh->content_bytes;
    QC_TRY(qc_arena_printf(s->result->arena, &name, err, "%s%s", sh->name,
                           m->compressed ? ".zst" : ""));
    s->names[shard] = name;
    QC_TRY(qc_path_join(s->result->arena, &path, s->dir, name, err));
    QC_TRY(qc_path_stat(path, &kind, &bytes, err));
    s->result->content_bytes += sh->content_bytes;
    s->result->stored_bytes += bytes;
    if (kind != QC_PATH_FILE)
        return problem(s, err, name, "the shard is missing");
    if (bytes != want)
        return problem(s, err, name, "expected %" PRIu64 " bytes, found %" PRIu64, want, bytes);
    QC_TRY(qc_file_open_read(&s->files[shard], path, err));
    return m->compressed ? add_compressed_shard(s, shard, first, end, err)
                         : add_plain_shard(s, shard, first, end, err);
}

/* ---- Workers -------------------------------------------------------------------------------- */

static qc_status scan_one(const scan *s, scan_unit *u, qc_frame_coder *coder, void *stored,
                          void *content, qc_error *err)
{
    const void *bytes = stored;
    QC_TRY(qc_file_pread(&s->files[u->shard], stored, u->stored_bytes, u->stored_offset, err));
    u->stored = qc_digest_bytes(stored, u->stored_bytes);
    u->content = u->stored;
    if (s->result->manifest.compressed) {
        qc_status st =
            qc_frame_decode(coder, stored, u->stored_bytes, content, u->content_bytes, err);
        if (st == QC_ERR_NOMEM)
            return st;
        u->undecodable = st != QC_OK;
        if (u->undecodable)
            return QC_OK;
        u->content = qc_digest_bytes(content, u->content_bytes);
        bytes = content;
    }
    if (s->options->sink)
        QC_TRY(s->options->sink(s->options->sink_ctx, u->shard, u->content_offset, bytes,
                                u->content_bytes, err));
    qc_progress_add(s->options->progress, u->content_bytes);
    return QC_OK;
}

static qc_status scan_worker(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    (void)index;
    scan *s = ctx;
    qc_frame_coder *coder = NULL;
    void *stored = NULL, *content = NULL;
    qc_status st = qc_frame_coder_create(&coder, err);
    if (st == QC_OK)
        st = qc_malloc_aligned(&stored, 4096, s->max_stored, err);
    if (st == QC_OK)
        st = qc_malloc_aligned(&content, 4096, s->max_content, err);
    while (st == QC_OK) {
        st = qc_check_stopped(team, err);
        if (st != QC_OK)
            break;
        uint64_t i = atomic_fetch_add(&s->next, 1);
        if (i >= s->unit_count)
            break;
        st = scan_one(s, &s->units[i], coder, stored, content, err);
    }
    qc_free(content);
    qc_free(stored);
    qc_frame_coder_destroy(coder);
    return st;
}

/* ---- Verdict -------------------------------------------------------------------------------- */

static qc_status judge_range(scan *s, const scan_range *r, qc_digest *scratch, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    const scan_unit *units = s->units + r->first_unit;
    const qc_manifest_shard *sh = &m->shards[r->shard];
    const char *what = NULL, *name = s->names[r->shard];
    qc_digest want_content = sh->header, want_stored = sh->header_stored;
    if (r->tensor != HEADER_OWNER) {
        want_content = m->tensors[r->tensor].content;
        want_stored = m->tensors[r->tensor].stored;
        s->result->tensors_checked++;
    }
    const char *why = NULL;
    for (uint32_t i = 0; i < r->unit_count; i++) {
        scratch[i] = units[i].stored;
        if (units[i].undecodable)
            why = "a frame cannot be decompressed";
    }
    qc_digest stored = qc_digest_root(scratch, r->unit_count);
    for (uint32_t i = 0; i < r->unit_count; i++)
        scratch[i] = units[i].content;
    qc_digest content = qc_digest_root(scratch, r->unit_count);
    if (!why && !qc_digest_equal(&content, &want_content))
        why = "its bytes are not those that were written";
    else if (!why && m->compressed && !qc_digest_equal(&stored, &want_stored))
        why = "its compressed bytes are not those that were written";
    if (!why)
        return QC_OK;
    if (r->tensor == HEADER_OWNER)
        QC_TRY(qc_arena_printf(s->result->arena, &what, err, "header of %s", name));
    else
        QC_TRY(qc_arena_printf(s->result->arena, &what, err, "tensor '%s' in %s",
                               m->tensors[r->tensor].name, name));
    return problem(s, err, what, "%s", why);
}

static qc_status judge(scan *s, qc_error *err)
{
    uint32_t most = 1;
    for (size_t i = 0; i < s->range_count; i++) {
        if (s->ranges[i].unit_count > most)
            most = s->ranges[i].unit_count;
    }
    void *v = NULL;
    QC_TRY(qc_calloc(&v, most, sizeof(qc_digest), err));
    qc_status st = QC_OK;
    for (size_t i = 0; st == QC_OK && i < s->range_count; i++)
        st = judge_range(s, &s->ranges[i], v, err);
    qc_free(v);
    return st;
}

static qc_status scan_all(scan *s, qc_error *err)
{
    const qc_manifest *m = &s->result->manifest;
    QC_TRY(qc_calloc(&s->files, m->shard_count, sizeof *s->files, err));
    qc_file_allow_many(m->shard_count);
    for (size_t i = 0; i < m->shard_count; i++)
        s->files[i] = QC_FILE_CLOSED;
    QC_TRY(qc_arena_array(s->result->arena, &s->names, m->shard_count, err));
    QC_TRY(qc_calloc(&s->ranges, m->shard_count + m->tensor_count, sizeof *s->ranges, err));
    for (size_t i = 0; !s->options->shards_only && i < m->file_count; i++)
        QC_TRY(check_side_file(s, &m->files[i], err));
    if (!s->options->shards_only)
        QC_TRY(check_index(s, err));
    size_t first = 0;
    for (size_t i = 0; i < m->shard_count; i++) {
        size_t end = first;
        while (end < m->tensor_count && m->tensors[end].shard == i)
            end++;
        QC_TRY(open_shard(s, (uint32_t)i, first, end, err));
        first = end;
    }
    unsigned threads = s->options->threads ? s->options->threads : qc_pipeline_default_threads(0);
    if (s->unit_count > 0)
        QC_TRY(qc_team_run(threads, scan_worker, s, err));
    return judge(s, err);
}

qc_status qc_scan_output(qc_scan_result *result, qc_arena *arena, const char *dir,
                         const qc_manifest *m, const qc_scan_options *options, qc_error *err)
{
    memset(result, 0, sizeof *result);
    result->arena = arena;
    result->manifest = *m;
    scan s = {.result = result, .options = options, .dir = dir, .max_stored = 1, .max_content = 1};
    qc_status st = scan_all(&s, err);
    for (size_t i = 0; s.files && i < result->manifest.shard_count; i++)
        qc_file_discard(&s.files[i]);
    qc_free(s.files);
    qc_free(s.units);
    qc_free(s.ranges);
    return st;
}

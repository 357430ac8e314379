#define _DEFAULT_SOURCE /* realpath, lstat, flock */
#include "convert/run/consume.h"

#include "base/alloc.h"
#include "base/text.h"
#include "convert/run/make_manifest.h"
#include "convert/run/resume.h"
#include "formats/manifest.h"
#include "formats/saved_header.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADERS_NAME "journal-headers" /* a name of the staging folder (output_dir.h) */
#define NAME_SHOWN   160

typedef struct {
    const char *saved, *gone_name; /* paths of its saved header, before and after it is gone */
    int gone;                      /* deleted, by this run or before */
    uint64_t header_at;            /* 0: not deleted by this run */
} source_file;

struct qc_consume {
    qc_pipeline *p;
    qc_checkpoint *model;
    const char *headers; /* folder */
    source_file *files;  /* of the checkpoint */
    uint32_t count;      /* deleted by this run */
    uint64_t bytes;
};

/* ---- what is kept of deleted files ---- */

static qc_status headers_folder(qc_arena *arena, const char **out, const char *staging,
                                qc_error *err)
{
    return qc_path_join(arena, out, staging, HEADERS_NAME, err);
}

qc_status qc_consume_saved(qc_saved_header **out, size_t *count, qc_arena *arena,
                           const char *out_dir, qc_error *err)
{
    const char *staging = NULL, *folder = NULL;
    qc_entry e;
    size_t all = 0, kept = 0;
    *out = NULL;
    *count = 0;
    /* What a link leads to is not qconv's. Opening OUT refuses such a link. */
    QC_TRY(qc_beneath_look_once(out_dir, QC_STAGING_NAME "/" HEADERS_NAME, &e, err));
    if (e.kind != QC_ENTRY_FOLDER)
        return QC_OK;
    QC_TRY(qc_path_join(arena, &staging, out_dir, QC_STAGING_NAME, err));
    QC_TRY(headers_folder(arena, &folder, staging, err));
    QC_TRY(qc_saved_headers_read(out, &all, arena, folder, err));
    for (size_t i = 0; i < all; i++) {
        if ((*out)[i].gone)
            (*out)[kept++] = (*out)[i];
    }
    *count = kept;
    return QC_OK;
}

/* Counts the files that were deleted and are not back, and names the first. */
static qc_status count_lost(size_t *lost, const char **first, qc_arena *arena, const char *out_dir,
                            qc_error *err)
{
    qc_saved_header *saved = NULL;
    size_t count = 0;
    *lost = 0;
    *first = NULL;
    QC_TRY(qc_consume_saved(&saved, &count, arena, out_dir, err));
    for (size_t i = 0; i < count; i++) {
        qc_path_kind kind = QC_PATH_MISSING;
        uint64_t bytes = 0;
        QC_TRY(qc_path_stat(saved[i].origin, &kind, &bytes, err));
        if (kind == QC_PATH_FILE && bytes == saved[i].stamp.bytes)
            continue;
        *first = *first ? *first : saved[i].origin;
        ++*lost;
    }
    return QC_OK;
}

qc_status qc_consume_check_restart(qc_arena *arena, const char *out_dir, qc_error *err)
{
    size_t lost = 0;
    const char *first = NULL;
    QC_TRY(count_lost(&lost, &first, arena, out_dir, err));
    if (lost == 0)
        return QC_OK;
    QC_FAIL(err, QC_ERR_USAGE,
            "%s: the interrupted conversion in it has deleted %zu file%s of its source "
            "(--consume-source), the first of them %.*s, and what it wrote of them is the only "
            "copy; the same command continues it",
            out_dir, lost, qc_plural(lost), NAME_SHOWN, first);
}

void qc_consume_mend_advice(qc_arena *arena, const char *out_dir, qc_error *err)
{
    size_t lost = 0;
    const char *first = NULL;
    char *advice = err && out_dir ? strstr(err->msg, QC_RESTART_ADVICE) : NULL;
    if (!advice || (count_lost(&lost, &first, arena, out_dir, NULL) == QC_OK && lost == 0))
        return;
    (void)snprintf(advice, sizeof err->msg - (size_t)(advice - err->msg),
                   "; keep %.*s/" QC_STAGING_NAME ": files of the source were deleted "
                   "(--consume-source), and what it holds of them is the only copy",
                   NAME_SHOWN, out_dir);
}

/* Does the staging folder hold a conversion that is not yet all in OUT? Once it is, the journal is
 * the first thing to go, but the journal may have come back after a power loss: then the last thing
 * it records is the manifest that OUT has. */
static qc_status is_underway(int *yes, const qc_call *call, qc_error *err)
{
    qc_output_dir d = {.arena = call->arena, .path = call->out};
    const char *name = NULL, *path = NULL;
    qc_entry e;
    qc_resume_found told;
    qc_digest manifest;
    int there = 0;
    QC_TRY(qc_arena_printf(call->arena, &name, err, QC_STAGING_NAME "/" QC_JOURNAL_NAME, 1, 1));
    QC_TRY(qc_path_join(call->arena, &path, call->out, name, err));
    QC_TRY(qc_beneath_look_once(call->out, name, &e, err));
    *yes = e.kind != QC_ENTRY_MISSING;
    if (e.kind != QC_ENTRY_FILE || e.blocked || qc_resume_read_commit(&told, path, NULL) != QC_OK)
        return QC_OK;
    QC_TRY(qc_output_dir_manifest(&d, &there, &manifest, err));
    *yes = !there || !told.committing || !qc_digest_equal(&told.manifest, &manifest);
    return QC_OK;
}

/* Adds up how many of a file and its compressed form are in the folder. */
static qc_status count_there(int *there, const char *folder, const char *name, qc_arena *arena,
                             qc_error *err)
{
    static const char *const suffixes[] = {"", ".zst"};
    for (int i = 0; i < 2; i++) {
        const char *path = NULL;
        qc_path_kind kind = QC_PATH_MISSING;
        QC_TRY(qc_arena_printf(arena, &path, err, "%s/%s%s", folder, name, suffixes[i]));
        QC_TRY(qc_path_stat(path, &kind, NULL, err));
        *there += kind != QC_PATH_MISSING;
    }
    return QC_OK;
}

qc_status qc_consume_is_over(int *yes, const qc_call *call, const qc_convert_options *o,
                             qc_error *err)
{
    qc_manifest m;
    const char *path = NULL;
    qc_path_kind model = QC_PATH_MISSING, kind = QC_PATH_MISSING;
    int underway = 0;
    *yes = 0;
    if (!o->consume_source || !call->out)
        return QC_OK;
    QC_TRY(qc_path_join(call->arena, &path, call->out, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    QC_TRY(qc_path_stat(call->model, &model, NULL, err));
    QC_TRY(is_underway(&underway, call, err));
    if (kind != QC_PATH_FILE || model == QC_PATH_FILE || underway)
        return QC_OK;
    if (qc_manifest_load(&m, call->arena, call->out, NULL) != QC_OK || m.source_count == 0 ||
        strcmp(m.to, qc_to_name(o->plan.recipe.to)) != 0)
        return QC_OK;
    if (model == QC_PATH_MISSING) {
        const char *name = qc_last_name(call->model);
        size_t len = strlen(m.sources->name);
        *yes = m.source_count == 1 && strncmp(name, m.sources->name, len) == 0 &&
               (name[len] == '\0' || strcmp(name + len, ".zst") == 0);
        return QC_OK;
    }
    int there = 0;
    for (size_t i = 0; i < m.source_count; i++)
        QC_TRY(count_there(&there, call->model, m.sources[i].name, call->arena, err));
    if (there > 0)
        return QC_OK;
    /* It may also be another model, whose files have other names. Files of PyTorch lay beside those
     * that are gone, so they do not count. */
    qc_checkpoint *other = NULL;
    *yes = qc_checkpoint_open(&other, call->model, NULL) != QC_OK ||
           (other->file_count > 0 && other->files->kind == QC_CHECKPOINT_TORCH);
    qc_checkpoint_close(other);
    return QC_OK;
}

/* ---- may this source be consumed? ---- */

/* Refuses a file that is a link, and links among the folders between MODEL and the file. */
static qc_status check_no_link(const qc_checkpoint *m, size_t file, struct stat *s, qc_error *err)
{
    const char *path = m->files[file].path;
    const char *name = qc_checkpoint_file_name(m, file);
    size_t end = strlen(path);
    char part[PATH_MAX];
    if (end >= sizeof part)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: the path is too long", path);
    for (size_t i = (size_t)(name - path); i <= end; i++) {
        if (path[i] != '/' && path[i] != '\0')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        if (lstat(part, s) != 0)
            QC_FAIL(err, QC_ERR_IO, "%s cannot be examined: %s", part, strerror(errno));
        if (S_ISLNK(s->st_mode))
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s is a link (as in the Hugging Face cache), and --consume-source deletes "
                    "files only where they are; give the folder that holds them",
                    part);
    }
    return QC_OK;
}

static qc_status check_folder(const char *path, qc_error *err)
{
    char room[PATH_MAX];
    const char *folder = qc_folder_of(room, path);
    if (!folder)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: the path is too long", path);
    if (access(folder, W_OK | X_OK) != 0)
        QC_FAIL(err, errno == EACCES || errno == EROFS ? QC_ERR_USAGE : QC_ERR_IO,
                "--consume-source cannot delete files in %s: %s", folder, strerror(errno));
    return QC_OK;
}

static qc_status check_file(const qc_checkpoint *m, size_t file, qc_error *err)
{
    const qc_checkpoint_file *f = &m->files[file];
    struct stat s;
    if (f->saved)
        return QC_OK; /* it was such a file, and is gone */
    if (f->kind != QC_CHECKPOINT_SAFETENSORS)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s is a PyTorch file, and --consume-source is for safetensors files only; leave "
                "the option out",
                f->path);
    QC_TRY(check_no_link(m, file, &s, err));
    if (s.st_nlink > 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s has %ju names (hard links), so --consume-source would free nothing by deleting "
                "this one; remove the others first",
                f->path, (uintmax_t)s.st_nlink);
    QC_TRY(check_folder(f->path, err));
    /* Two conversions that consume one source would each delete what the other has not read. The
     * lock is released with the file, however the process ends. Where there are no locks (NFS
     * grants none on a file that is open for reading) nobody is refused. */
    if (flock(f->st.file.fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "another conversion reads %s now and will delete it (--consume-source); wait for it",
            f->path);
    return QC_OK;
}

qc_status qc_consume_check(const qc_plan *plan, const qc_convert_options *o, qc_error *err)
{
    if (o->plan.recipe.to == QC_TO_AUTO)
        QC_FAIL(err, QC_ERR_USAGE,
                "--consume-source does not go with --to auto, whose choice depends on weights that "
                "could not be read again; name the scheme");
    int in_tensors = plan->recipe->input_is_quantized;
    for (size_t i = 0; i < plan->model->tensor_count; i++) {
        const qc_coded_weight *w = plan->recipe->entries[i].coded;
        in_tensors |= w && w->shape_is_read;
    }
    if (in_tensors)
        QC_FAIL(err, QC_ERR_USAGE,
                "--consume-source does not go with a model that is quantized already, such as %s: "
                "its shapes are in tensors that could not be read again",
                plan->model->path);
    if (o->part_count > 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "--consume-source does not go with --part: a weight file may be read by several "
                "parts");
    for (size_t i = 0; i < plan->model->file_count; i++)
        QC_TRY(check_file(plan->model, i, err));
    return QC_OK;
}

int qc_consume_any(const qc_checkpoint *model)
{
    for (size_t f = 0; f < model->file_count; f++) {
        if (model->files[f].saved || model->files[f].st.header_only)
            return 1;
    }
    return 0;
}

/* Would deleting file f give the file system of `like` room? */
static int frees_room(const qc_checkpoint_file *f, const struct stat *like)
{
    struct stat s;
    return !f->saved && stat(f->path, &s) == 0 && s.st_dev == like->st_dev;
}

/* Adds up the jobs in order. A file is freed after the last job that reads it. */
qc_status qc_consume_room(const qc_pipeline *p, uint64_t *bytes, qc_error *err)
{
    const qc_plan *plan = p->plan;
    const qc_checkpoint *m = plan->model;
    struct stat out;
    qc_source_files files;
    uint64_t written = plan->content_bytes - plan->tensor_bytes; /* headers */
    uint64_t freed = 0;
    *bytes = written;
    if (stat(p->out->staging, &out) != 0)
        QC_FAIL(err, QC_ERR_IO, "%s cannot be examined: %s", p->out->staging, strerror(errno));
    QC_TRY(qc_source_files_init(&files, plan, err));
    for (uint32_t job = 0; job < plan->job_count; job++) {
        uint32_t list[QC_JOB_TENSORS_MAX];
        for (int part = 0; part < QC_ROLE_TENSOR_COUNT && !p->jobs[job].kept; part++) {
            if (plan->jobs[job].outputs[part] != QC_NO_OUTPUT)
                written += qc_plan_tensor_bytes(plan, plan->jobs[job].outputs[part]);
        }
        if (written > freed && written - freed > *bytes)
            *bytes = written - freed;
        size_t count = qc_job_files(plan, job, list);
        qc_source_files_done(&files, job, 0);
        for (size_t i = 0; i < count; i++) {
            if (qc_source_files_is_done(&files, list[i], 0) && frees_room(&m->files[list[i]], &out))
                freed += m->files[list[i]].file_bytes;
        }
    }
    qc_source_files_deinit(&files);
    return QC_OK;
}

/* ---- deleting ---- */

static qc_status list_files(qc_consume *c, qc_error *err)
{
    const qc_output_dir *d = c->p->out;
    QC_TRY(headers_folder(d->arena, &c->headers, d->staging, err));
    QC_TRY(qc_arena_alloc(d->arena, &c->files, c->model->file_count, sizeof *c->files, err));
    for (size_t f = 0; f < c->model->file_count; f++) {
        source_file *file = &c->files[f];
        QC_TRY(qc_arena_printf(d->arena, &file->saved, err, "%s/%05zu", c->headers, f));
        QC_TRY(qc_arena_printf(d->arena, &file->gone_name, err, "%s" QC_SAVED_GONE, file->saved));
        file->gone = c->model->files[f].saved != NULL;
    }
    return QC_OK;
}

qc_status qc_consume_create(qc_consume **out, qc_pipeline *p, qc_checkpoint *model, qc_error *err)
{
    *out = NULL;
    qc_consume *c = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof **out, err));
    c->p = p;
    c->model = model;
    qc_status st = list_files(c, err);
    if (st != QC_OK) {
        qc_consume_destroy(c);
        return st;
    }
    *out = c;
    return QC_OK;
}

static qc_status put_header(const qc_consume *c, size_t f, qc_error *err)
{
    const qc_st_file *st_file = &c->model->files[f].st;
    char origin[PATH_MAX];
    qc_saved_header s = {.path = c->files[f].saved, .origin = origin};
    qc_st_cursor *cursor = NULL;
    void *bytes = NULL;
    s.name = qc_checkpoint_file_name(c->model, f);
    if (!realpath(c->model->files[f].path, origin))
        QC_FAIL(err, QC_ERR_IO, "%s cannot be examined: %s", c->model->files[f].path,
                strerror(errno));
    qc_st_file_describe(st_file, &s);
    QC_TRY(qc_st_cursor_create(&cursor, err));
    qc_status st = qc_malloc(&bytes, (size_t)s.header_bytes, err);
    if (st == QC_OK)
        st = qc_st_file_read_header(st_file, cursor, bytes, err);
    if (st == QC_OK)
        st = qc_saved_header_put(&s, bytes, err);
    qc_free(bytes);
    qc_st_cursor_destroy(cursor);
    return st;
}

/* Did an earlier run save the header of this very file f? Then that stays as it is. */
static int is_saved(const qc_consume *c, size_t f, const qc_saved_header *saved, size_t count)
{
    const qc_checkpoint_file *file = &c->model->files[f];
    char origin[PATH_MAX];
    for (size_t i = 0; i < count; i++) {
        const char *slash = strrchr(saved[i].path, '/');
        if (!saved[i].gone && slash && strtoull(slash + 1, NULL, 10) == f)
            return saved[i].stamp.bytes == file->stamp.bytes &&
                   saved[i].stamp.modified_ns == file->stamp.modified_ns &&
                   realpath(file->path, origin) && strcmp(origin, saved[i].origin) == 0 &&
                   strcmp(saved[i].name, qc_checkpoint_file_name(c->model, f)) == 0;
    }
    return 0;
}

static qc_status save_headers(qc_consume *c, qc_error *err)
{
    qc_saved_header *saved = NULL;
    size_t count = 0;
    QC_TRY(qc_dir_make(c->headers, err));
    QC_TRY(qc_saved_headers_read(&saved, &count, c->p->out->arena, c->headers, err));
    for (size_t f = 0; f < c->model->file_count; f++) {
        if (!c->files[f].gone && !is_saved(c, f, saved, count))
            QC_TRY(put_header(c, f, err));
    }
    return QC_OK;
}

static qc_status consume_file(qc_consume *c, size_t f, qc_error *err)
{
    const qc_checkpoint_file *file = &c->model->files[f];
    source_file *own = &c->files[f];
    QC_TRY(qc_checkpoint_check_unchanged(c->model, f, err));
    QC_TRY(qc_path_rename(own->saved, own->gone_name, err));
    QC_TRY(qc_dir_sync(c->headers, err));
    QC_TRY(qc_checkpoint_check_unchanged(c->model, f, err));
    /* This reads the saved header, without which nobody could go on. */
    QC_TRY(qc_st_file_let_go(&file->st, own->gone_name, &own->header_at, err));
    QC_TRY(qc_path_remove(file->path, err));
    own->gone = 1;
    c->bytes += file->file_bytes;
    c->count++;
    atomic_fetch_add(&c->p->freed, 1);
    return qc_dir_sync_holder(file->path,
                              err); /* the file must be gone for good before OUT is whole */
}

qc_status qc_consume_durable(void *ctx, uint64_t journal_bytes, qc_error *err)
{
    qc_consume *c = ctx;
    for (size_t f = 0; f < c->model->file_count; f++) {
        if (!c->files[f].gone && qc_source_files_is_done(&c->p->sources, f, journal_bytes))
            QC_TRY(consume_file(c, f, err));
    }
    return QC_OK;
}

/* Syncs the frames that an earlier run wrote, which may be in the page cache only. */
static qc_status sync_kept(const qc_pipeline *p, qc_error *err)
{
    int any = 0;
    for (uint32_t i = 0; i < p->plan->layout.count; i++) {
        const qc_shard_state *s = &p->shards[i];
        int kept = 0;
        for (uint32_t k = 0; k < s->unit_count && !s->foreign && !kept; k++)
            kept = p->units[s->first_unit + k].kept;
        if (!kept)
            continue;
        qc_file f = QC_FILE_CLOSED;
        QC_TRY(qc_file_open_read(&f, s->path, err));
        qc_status st = qc_file_sync(&f, err);
        qc_file_discard(&f);
        QC_TRY(st);
        any = 1;
    }
    return any ? qc_dir_sync(p->out->staging, err) : QC_OK;
}

qc_status qc_consume_begin(qc_consume *c, qc_error *err)
{
    qc_journal *journal = c->p->recorder->journal;
    uint64_t end = qc_journal_bytes(journal);
    QC_TRY(save_headers(c, err));
    QC_TRY(sync_kept(c->p, err));
    QC_TRY(qc_journal_sync(journal, err));
    return qc_consume_durable(c, end, err);
}

static void set_header_only(qc_consume *c)
{
    for (size_t f = 0; c->files && f < c->model->file_count; f++) {
        if (c->files[f].header_at != 0)
            qc_st_file_set_header_only(&c->model->files[f].st, c->files[f].header_at);
    }
}

qc_status qc_consume_finish(qc_consume *c, qc_error *err)
{
    qc_journal *journal = c->p->recorder->journal;
    uint64_t end = qc_journal_bytes(journal);
    QC_TRY(qc_journal_sync(journal, err));
    QC_TRY(qc_consume_durable(c, end, err));
    for (size_t f = 0; f < c->model->file_count; f++) {
        if (!c->files[f].gone)
            QC_FAIL(err, QC_ERR_INTERNAL, "%s was converted, but could not be consumed",
                    c->model->files[f].path);
    }
    set_header_only(c);
    return QC_OK;
}

uint32_t qc_consume_count(const qc_consume *c, uint64_t *bytes)
{
    *bytes = c->bytes;
    return c->count;
}

void qc_consume_destroy(qc_consume *c)
{
    if (!c)
        return;
    set_header_only(c);
    qc_free(c);
}

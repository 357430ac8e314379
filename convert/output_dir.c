#define _DEFAULT_SOURCE /* flock, realpath */
#include "convert/output_dir.h"

#include "base/alloc.h"
#include "base/workers.h"
#include "convert/dir_lock.h"
#include "formats/manifest.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define STAGING_NAME  ".qconv-partial"
#define LOCK_NAME     "lock"
#define SIDE_FILE_MAX 100000u
#define COPY_BYTES    (1u << 20)
#define MANIFEST_MAX  ((size_t)1 << 30)
#define REMOVE_DEPTH  32
#define LOCK_TRIES    100
#define COMMIT_LOOKS  8
/* In the staging folder: files of the output whose names are taken there. No side file comes from a
 * folder whose name begins with a dot. */
#define ASIDE_NAME     ".aside"
#define JOURNAL_PREFIX "journal-"

/* Where a path that may not exist yet will be: its deepest existing folder resolved, the rest as
 * written. */
static qc_status resolve(qc_arena *arena, const char **out, const char *path, qc_error *err)
{
    char real[PATH_MAX];
    if (realpath(path, real))
        return qc_arena_strndup(arena, out, real, strlen(real), err);
    const char *copy = NULL;
    QC_TRY(qc_arena_strndup(arena, &copy, path, strlen(path), err));
    size_t len = strlen(copy);
    while (len > 1 && copy[len - 1] == '/')
        len--;
    size_t slash = len;
    while (slash > 0 && copy[slash - 1] != '/')
        slash--;
    const char *parent = NULL, *name = NULL, *parent_real = NULL;
    QC_TRY(qc_arena_strndup(arena, &name, copy + slash, len - slash, err));
    if (slash == 0)
        parent = ".";
    else
        QC_TRY(qc_arena_strndup(arena, &parent, copy, slash > 1 ? slash - 1 : 1, err));
    if (strcmp(parent, copy) == 0)
        return qc_arena_strndup(arena, out, copy, len, err);
    QC_TRY(resolve(arena, &parent_real, parent, err));
    return qc_path_join(arena, out, parent_real, name, err);
}

/* Is path a file of the folder out_real? By its name or, for a link, by where it leads. */
static qc_status check_source_file(qc_arena *arena, const char *out, const char *out_real,
                                   const char *source, const char *source_real, qc_error *err)
{
    const char *const names[] = {source, source_real};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *slash = strrchr(names[i], '/'), *folder = ".", *real = NULL;
        if (slash)
            QC_TRY(qc_arena_strndup(arena, &folder, names[i],
                                    slash == names[i] ? 1 : (size_t)(slash - names[i]), err));
        QC_TRY(resolve(arena, &real, folder, err));
        if (strcmp(real, out_real) == 0)
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s: the output would overwrite its source %s; choose another OUT", out,
                    source);
    }
    return QC_OK;
}

static int is_same_or_inside(const char *path, const char *folder)
{
    size_t len = strlen(folder);
    if (strncmp(path, folder, len) != 0)
        return 0;
    return path[len] == '\0' || path[len] == '/' || (len > 0 && folder[len - 1] == '/');
}

typedef enum { OUT_FREE, OUT_QCONV, OUT_FOREIGN } out_kind;

static qc_status path_of(qc_arena *arena, const char **path, const char *out, const char *name,
                         qc_error *err)
{
    const char *staging = NULL;
    QC_TRY(qc_path_join(arena, &staging, out, STAGING_NAME, err));
    return qc_path_join(arena, path, staging, name, err);
}

static qc_status is_file(qc_arena *arena, int *yes, const char *folder, const char *name,
                         qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_path_join(arena, &path, folder, name, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    *yes = kind == QC_PATH_FILE;
    return QC_OK;
}

/* A folder without a manifest, but with files: is somebody moving them there now, or did a run die
 * while it did? Its staged manifest was there before anything moved. Or has somebody just finished:
 * a manifest goes from the staging folder to OUT in one step, so it is looked for in that order;
 * more than once, for whoever came next may have taken it away again. */
static qc_status look_at_commit(qc_arena *arena, const char *out, out_kind *kind, qc_error *err)
{
    const char *lock = NULL, *staging = NULL;
    QC_TRY(path_of(arena, &lock, out, LOCK_NAME, err));
    QC_TRY(qc_path_join(arena, &staging, out, STAGING_NAME, err));
    for (int i = 0; i < COMMIT_LOOKS && *kind == OUT_FOREIGN; i++) {
        int fd = open(lock, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
        int busy = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
        if (fd >= 0)
            (void)close(fd);
        if (busy)
            QC_FAIL(err, QC_ERR_USAGE, "%s: another qconv is writing there now", out);
        int yes = 0;
        QC_TRY(is_file(arena, &yes, staging, QC_MANIFEST_NAME, err));
        if (!yes)
            QC_TRY(is_file(arena, &yes, out, QC_MANIFEST_NAME, err));
        if (yes)
            *kind = OUT_QCONV;
    }
    return QC_OK;
}

static qc_status look_at_out(qc_arena *arena, const char *out, out_kind *kind, int *exists,
                             qc_error *err)
{
    qc_path_kind pk = QC_PATH_MISSING;
    *kind = OUT_FREE;
    QC_TRY(qc_path_stat(out, &pk, NULL, err));
    *exists = pk != QC_PATH_MISSING;
    if (pk == QC_PATH_MISSING)
        return QC_OK;
    if (pk != QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_USAGE, "%s: expected a folder to write to, found a file", out);
    const char *manifest = NULL;
    QC_TRY(qc_path_join(arena, &manifest, out, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(manifest, &pk, NULL, err));
    if (pk == QC_PATH_FILE) {
        *kind = OUT_QCONV;
        return QC_OK;
    }
    DIR *dir = opendir(out);
    if (!dir)
        QC_FAIL(err, QC_ERR_IO, "%s: cannot be listed: %s", out, strerror(errno));
    const struct dirent *e;
    while ((e = readdir(dir))) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0 &&
            strcmp(e->d_name, STAGING_NAME) != 0)
            *kind = OUT_FOREIGN;
    }
    closedir(dir);
    return *kind == OUT_FOREIGN ? look_at_commit(arena, out, kind, err) : QC_OK;
}

static qc_status check(qc_arena *arena, const char *out, const char *source, int force,
                       out_kind *kind, int *exists, qc_error *err)
{
    const char *out_real = NULL, *source_real = NULL;
    QC_TRY(resolve(arena, &out_real, out, err));
    QC_TRY(resolve(arena, &source_real, source, err));
    if (strcmp(out_real, source_real) == 0)
        QC_FAIL(err, QC_ERR_USAGE, "%s: the output would overwrite its source; choose another OUT",
                out);
    if (is_same_or_inside(out_real, source_real))
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: the output would lie inside its source %s; choose another "
                "OUT",
                out, source);
    qc_path_kind source_kind = QC_PATH_MISSING;
    QC_TRY(qc_path_stat(source, &source_kind, NULL, err));
    if (source_kind == QC_PATH_FILE)
        QC_TRY(check_source_file(arena, out, out_real, source, source_real, err));
    QC_TRY(look_at_out(arena, out, kind, exists, err));
    if (*kind == OUT_FOREIGN && !force)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: the folder is not empty and no qconv output; choose another OUT or say "
                "--force",
                out);
    return QC_OK;
}

qc_status qc_output_dir_check(qc_arena *arena, const char *out, const char *source, int force,
                              qc_error *err)
{
    out_kind kind;
    int exists;
    return check(arena, out, source, force, &kind, &exists, err);
}

static int begins_with(const char *name, const char *prefix)
{
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

static int is_lock_name(const char *name)
{
    return strcmp(name, LOCK_NAME) == 0 || begins_with(name, LOCK_NAME "-");
}

static int is_own_name(const char *name)
{
    return is_lock_name(name) || begins_with(name, JOURNAL_PREFIX) || begins_with(name, ASIDE_NAME);
}

typedef enum {
    REMOVE_ALL,   /* the folder too */
    KEEP_LOCKS,   /* and the folder */
    KEEP_MANIFEST /* too: it tells of files that have moved */
} remove_kind;

static int stays(const char *name, remove_kind kind)
{
    return (kind != REMOVE_ALL && is_lock_name(name)) ||
           (kind == KEEP_MANIFEST && strcmp(name, QC_MANIFEST_NAME) == 0);
}

/* Best effort; used on a folder this program made. */
static void remove_tree(const char *path, remove_kind kind, int depth)
{
    DIR *dir = opendir(path);
    if (!dir)
        return;
    const struct dirent *e;
    while ((e = readdir(dir))) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 || stays(e->d_name, kind))
            continue;
        char child[PATH_MAX];
        size_t a = strlen(path), b = strlen(e->d_name);
        if (a + b + 2 > sizeof child)
            continue;
        memcpy(child, path, a);
        child[a] = '/';
        memcpy(child + a + 1, e->d_name, b + 1);
        struct stat st;
        if (lstat(child, &st) == 0 && S_ISDIR(st.st_mode)) {
            if (depth < REMOVE_DEPTH)
                remove_tree(child, REMOVE_ALL, depth + 1);
        } else {
            (void)unlink(child);
        }
    }
    closedir(dir);
    if (kind == REMOVE_ALL)
        (void)rmdir(path);
}

/* The staging folder is emptied: it must be a folder of OUT, not a link to somebody else's. */
static qc_status make_staging(const char *staging, qc_error *err)
{
    struct stat st;
    QC_TRY(qc_dir_make(staging, err));
    if (lstat(staging, &st) == 0 && S_ISLNK(st.st_mode))
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: expected a folder of qconv's own, found a link; remove it or choose another "
                "OUT",
                staging);
    return QC_OK;
}

/* Make the staging folder and hold its lock; d->staging tells that both are ours. The lock's file
 * is removed by who holds it alone, as the last thing in the folder; who locked a file that was
 * removed meanwhile, or came between the two, tries again. */
static qc_status lock_staging(qc_output_dir *d, const char *staging, const char *lock,
                              qc_error *err)
{
    qc_status st = QC_OK;
    for (int i = 0; i < LOCK_TRIES; i++) {
        qc_path_kind kind = QC_PATH_DIR;
        st = make_staging(staging, err);
        const char *needed = d->path;
        if (st == QC_OK) {
            needed = staging;
            st = qc_file_open_update(&d->lock, lock, err);
        }
        if (st == QC_ERR_IO && qc_path_stat(needed, &kind, NULL, NULL) == QC_OK &&
            kind == QC_PATH_MISSING)
            continue;
        if (st != QC_OK) {
            (void)rmdir(staging);
            return st;
        }
        int busy = 0;
        st = qc_dir_lock_try(&d->lock, d->parts > 1, &busy, err);
        if (st == QC_OK && busy && d->parts > 1 && qc_interrupted())
            st = qc_error_set(err, QC_ERR_INTERRUPTED, __FILE__, __LINE__, "interrupted");
        if (st != QC_OK || (busy && d->parts == 1))
            break;
        if (busy) {
            /* Perhaps another part holds it alone for a moment, to clear up behind itself. */
            qc_file_discard(&d->lock);
            qc_dir_lock_pause();
            continue;
        }
        if (qc_dir_lock_has_its_name(&d->lock)) {
            d->staging = staging;
            return QC_OK;
        }
        qc_file_discard(&d->lock);
    }
    qc_file_discard(&d->lock);
    d->made_dir = 0;
    if (st != QC_OK)
        return st;
    QC_FAIL(err, QC_ERR_USAGE, "%s: another qconv is writing there now", d->path);
}

/* The lock of one part, beside the shared one. */
static qc_status lock_part(qc_output_dir *d, unsigned part_index, qc_error *err)
{
    const char *name = NULL, *path = NULL;
    int busy = 0;
    if (d->parts == 1)
        return QC_OK;
    QC_TRY(
        qc_arena_printf(d->arena, &name, err, LOCK_NAME "-%05u-of-%05u", part_index + 1, d->parts));
    QC_TRY(qc_path_join(d->arena, &path, d->staging, name, err));
    QC_TRY(qc_file_open_update(&d->part_lock, path, err));
    QC_TRY(qc_dir_lock_try(&d->part_lock, 0, &busy, err));
    if (busy)
        QC_FAIL(err, QC_ERR_USAGE, "%s: another qconv is writing part %u of %u there now", d->path,
                part_index + 1, d->parts);
    return QC_OK;
}

/* A manifest and the digest of its text; nothing where it is missing or damaged. One that cannot be
 * read now is neither: who took it for none would make again what has moved to OUT. */
static qc_status read_manifest(qc_arena *arena, const char *folder, qc_manifest *m,
                               qc_digest *digest, qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_strbuf text;
    qc_error trouble = {0};
    memset(m, 0, sizeof *m);
    QC_TRY(qc_path_join(arena, &path, folder, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        return QC_OK;
    qc_strbuf_init(&text, MANIFEST_MAX);
    qc_status st = qc_file_slurp(path, &text, &trouble);
    if (st == QC_OK)
        st = qc_manifest_parse(m, arena, text.data, text.len, &trouble);
    if (st == QC_OK)
        *digest = qc_digest_bytes(text.data, text.len);
    else
        memset(m, 0, sizeof *m);
    qc_strbuf_deinit(&text);
    if (st == QC_ERR_IO) /* or has another part moved it meanwhile? */
        QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if ((st != QC_ERR_IO && st != QC_ERR_NOMEM) || kind == QC_PATH_MISSING)
        return QC_OK;
    if (err)
        *err = trouble;
    return st;
}

static qc_status look_for_journal(qc_output_dir *d, qc_error *err)
{
    DIR *dir = opendir(d->staging);
    if (!dir)
        QC_FAIL(err, QC_ERR_IO, "%s: cannot be listed: %s", d->staging, strerror(errno));
    const struct dirent *e;
    while ((e = readdir(dir)))
        d->had_journal |= begins_with(e->d_name, JOURNAL_PREFIX);
    closedir(dir);
    return QC_OK;
}

qc_status qc_output_dir_open(qc_output_dir *d, qc_arena *arena, const char *out, const char *source,
                             int force, unsigned part_index, unsigned part_count, qc_error *err)
{
    *d = QC_OUTPUT_DIR_NONE;
    d->arena = arena;
    d->path = out;
    d->parts = part_count;
    out_kind kind;
    int exists = 0;
    const char *staging = NULL, *lock = NULL;
    QC_TRY(check(arena, out, source, force, &kind, &exists, err));
    QC_TRY(qc_path_join(arena, &staging, out, STAGING_NAME, err));
    QC_TRY(qc_path_join(arena, &lock, staging, LOCK_NAME, err));
    d->made_dir = !exists;
    QC_TRY(lock_staging(d, staging, lock, err));
    qc_status st = lock_part(d, part_index, err);
    if (st == QC_OK)
        st = look_for_journal(d, err);
    /* Names of side files that a run moved to OUT, or was about to, when it died: as good as those
     * of an old output's manifest. */
    if (st == QC_OK)
        st = qc_output_dir_look_again(d, err);
    if (st != QC_OK)
        qc_output_dir_leave(d);
    return st;
}

qc_status qc_output_dir_look_again(qc_output_dir *d, qc_error *err)
{
    return read_manifest(d->arena, d->staging, &d->dead, &d->dead_text, err);
}

void qc_output_dir_clear(qc_output_dir *d)
{
    remove_tree(d->staging, KEEP_MANIFEST, 0);
    d->name_count = 0;
    d->had_journal = 0;
}

qc_status qc_output_dir_begin(qc_output_dir *d, qc_arena *arena, const char *out,
                              const char *source, int force, qc_error *err)
{
    QC_TRY(qc_output_dir_open(d, arena, out, source, force, 0, 1, err));
    if (d->had_journal) {
        const char *staging = d->staging;
        qc_output_dir_leave(d);
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: holds an interrupted conversion, which its own command continues; to give it "
                "up, remove %s",
                out, staging);
    }
    qc_output_dir_clear(d);
    return QC_OK;
}

static qc_status add_name(qc_output_dir *d, const char *name, qc_error *err)
{
    if (d->name_count == d->name_cap) {
        size_t cap = d->name_cap ? d->name_cap * 2 : 64;
        void *p = NULL;
        QC_TRY(qc_arena_alloc(d->arena, &p, cap, sizeof *d->names, err));
        if (d->name_count)
            memcpy(p, d->names, d->name_count * sizeof *d->names);
        d->names = p;
        d->name_cap = cap;
    }
    return qc_arena_strndup(d->arena, &d->names[d->name_count++], name, strlen(name), err);
}

/* The folder part of a path, or NULL. */
static qc_status folder_of(qc_arena *arena, const char **out, const char *path, qc_error *err)
{
    const char *slash = strrchr(path, '/');
    *out = NULL;
    return slash ? qc_arena_strndup(arena, out, path, (size_t)(slash - path), err) : QC_OK;
}

/* Where the file `name` waits for the commit. */
static qc_status staged_path(const qc_output_dir *d, const char *name, const char **path,
                             qc_error *err)
{
    const char *folder = d->staging;
    if (is_own_name(name))
        QC_TRY(qc_path_join(d->arena, &folder, folder, ASIDE_NAME, err));
    return qc_path_join(d->arena, path, folder, name, err);
}

qc_status qc_output_dir_stage(qc_output_dir *d, const char *name, const char **path, qc_error *err)
{
    const char *folder = NULL;
    QC_TRY(staged_path(d, name, path, err));
    QC_TRY(folder_of(d->arena, &folder, *path, err));
    QC_TRY(qc_dir_make(folder, err));
    return add_name(d, name, err);
}

qc_status qc_output_dir_put(qc_output_dir *d, const char *name, const void *bytes, size_t len,
                            qc_error *err)
{
    const char *path = NULL;
    QC_TRY(qc_output_dir_stage(d, name, &path, err));
    return qc_file_put(path, bytes, len, err);
}

/* Names in the staging folder itself are durable with the manifest's; those below it are not. */
static qc_status sync_own_folder(const qc_output_dir *d, const char *path, qc_error *err)
{
    const char *folder = NULL;
    QC_TRY(folder_of(d->arena, &folder, path, err));
    return strcmp(folder, d->staging) == 0 ? QC_OK : qc_dir_sync(folder, err);
}

qc_status qc_output_dir_copy(qc_output_dir *d, const char *name, const char *from, uint64_t *bytes,
                             qc_digest *digest, qc_error *err)
{
    const char *path = NULL;
    qc_file in = QC_FILE_CLOSED, out = QC_FILE_CLOSED;
    qc_digest_state *hash = NULL;
    void *buf = NULL;
    QC_TRY(qc_output_dir_stage(d, name, &path, err));
    qc_status st = qc_malloc(&buf, COPY_BYTES, err);
    if (st == QC_OK)
        st = qc_digest_create(&hash, err);
    if (st == QC_OK)
        st = qc_file_open_read(&in, from, err);
    if (st == QC_OK)
        st = qc_file_size(&in, bytes, err);
    if (st == QC_OK)
        st = qc_file_create(&out, path, err);
    for (uint64_t done = 0; st == QC_OK && done < *bytes;) {
        size_t len = *bytes - done < COPY_BYTES ? (size_t)(*bytes - done) : COPY_BYTES;
        st = qc_file_pread(&in, buf, len, done, err);
        if (st == QC_OK)
            st = qc_file_pwrite(&out, buf, len, done, err);
        if (st == QC_OK)
            qc_digest_update(hash, buf, len);
        done += len;
    }
    if (st == QC_OK)
        *digest = qc_digest_finish(hash);
    if (st == QC_OK)
        st = qc_file_sync(&out, err);
    if (st == QC_OK)
        st = qc_file_close(&out, err);
    if (st == QC_OK)
        st = sync_own_folder(d, path, err);
    qc_file_discard(&out);
    qc_file_discard(&in);
    qc_digest_destroy(hash);
    qc_free(buf);
    return st;
}

static int compare_text(const void *pa, const void *pb)
{
    const char *const *a = pa, *const *b = pb;
    return strcmp(*a, *b);
}

/* Is this a file name that a checkpoint reader would take for weights of this output? */
static int is_weight_name(const char *name)
{
    size_t len = strlen(name);
    if (strcmp(name, "model.safetensors.index.json") == 0)
        return 1;
    if (strncmp(name, "model", 5) != 0 || (name[5] != '.' && name[5] != '-'))
        return 0;
    return (len > 12 && strcmp(name + len - 12, ".safetensors") == 0) ||
           (len > 16 && strcmp(name + len - 16, ".safetensors.zst") == 0);
}

/* Remove the files that a manifest lists and the new output does not have, and folders that are
 * empty then. */
static qc_status remove_listed(qc_output_dir *d, const qc_manifest *old, qc_error *err)
{
    const char *path = NULL;
    for (size_t i = 0; i < old->file_count; i++) {
        const char *name = old->files[i].path;
        if (bsearch(&name, d->names, d->name_count, sizeof *d->names, compare_text))
            continue;
        QC_TRY(qc_path_join(d->arena, &path, d->path, name, err));
        QC_TRY(qc_path_remove(path, err));
        while (strchr(name, '/')) {
            QC_TRY(folder_of(d->arena, &name, name, err));
            QC_TRY(qc_path_join(d->arena, &path, d->path, name, err));
            if (rmdir(path) != 0)
                break;
        }
    }
    return QC_OK;
}

/* Remove, from an OUT that is replaced: its manifest, then everything its manifest names or that
 * looks like weights, unless the new output has a file of that name. */
static qc_status remove_old(qc_output_dir *d, qc_error *err)
{
    const char *manifest = NULL, *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_path_join(d->arena, &manifest, d->path, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(manifest, &kind, NULL, err));
    qc_manifest old = {0};
    qc_digest digest;
    if (kind == QC_PATH_FILE) {
        /* Damaged: the names below still go. */
        QC_TRY(read_manifest(d->arena, d->path, &old, &digest, err));
        QC_TRY(qc_path_remove(manifest, err));
        QC_TRY(qc_dir_sync(d->path, err));
    }
    qsort(d->names, d->name_count, sizeof *d->names, compare_text);
    QC_TRY(remove_listed(d, &old, err));
    QC_TRY(remove_listed(d, &d->dead, err));
    DIR *dir = opendir(d->path);
    if (!dir)
        QC_FAIL(err, QC_ERR_IO, "%s: cannot be listed: %s", d->path, strerror(errno));
    const struct dirent *e;
    qc_status st = QC_OK;
    while (st == QC_OK && (e = readdir(dir))) {
        const char *name = e->d_name;
        if (!is_weight_name(name) ||
            bsearch(&name, d->names, d->name_count, sizeof *d->names, compare_text))
            continue;
        st = qc_path_join(d->arena, &path, d->path, name, err);
        if (st == QC_OK)
            st = qc_path_remove(path, err);
    }
    closedir(dir);
    return st;
}

/* Everything but the manifest to its place. going_on: some of it may be there. */
static qc_status move_files(qc_output_dir *d, int going_on, qc_error *err)
{
    const char *from = NULL, *to = NULL, *folder = NULL;
    for (size_t i = 0; i < d->name_count; i++) {
        qc_path_kind staged = QC_PATH_FILE, moved = QC_PATH_MISSING;
        QC_TRY(staged_path(d, d->names[i], &from, err));
        QC_TRY(qc_path_join(d->arena, &to, d->path, d->names[i], err));
        QC_TRY(folder_of(d->arena, &folder, to, err));
        if (going_on) {
            QC_TRY(qc_path_stat(from, &staged, NULL, err));
            QC_TRY(qc_path_stat(to, &moved, NULL, err));
            if (staged == QC_PATH_MISSING && moved == QC_PATH_MISSING)
                QC_FAIL(err, QC_ERR_IO,
                        "%s: is missing, and so is %s, from where it was to be moved; --restart "
                        "begins anew",
                        to, from);
        }
        if (staged != QC_PATH_MISSING) {
            QC_TRY(qc_dir_make(folder, err));
            QC_TRY(qc_path_rename(from, to, err));
        }
        if (strchr(d->names[i], '/'))
            QC_TRY(qc_dir_sync(folder, err));
    }
    return qc_dir_sync(d->path, err);
}

qc_status qc_output_dir_manifest_path(qc_output_dir *d, const char **path, qc_error *err)
{
    return qc_path_join(d->arena, path, d->staging, QC_MANIFEST_NAME, err);
}

qc_status qc_output_dir_put_manifest(qc_output_dir *d, const char *manifest, size_t len,
                                     qc_error *err)
{
    const char *staged = NULL;
    QC_TRY(qc_output_dir_manifest_path(d, &staged, err));
    return qc_file_put(staged, manifest, len, err); /* syncs the folder */
}

static qc_status move_all(qc_output_dir *d, int going_on, qc_error *err)
{
    const char *staged = NULL, *final = NULL;
    qc_file folder = QC_FILE_CLOSED;
    QC_TRY(qc_output_dir_manifest_path(d, &staged, err));
    QC_TRY(qc_path_join(d->arena, &final, d->path, QC_MANIFEST_NAME, err));
    d->moving = 1;
    QC_TRY(remove_old(d, err));
    QC_TRY(move_files(d, going_on, err));
    QC_TRY(qc_strdup(&folder.path, d->path, err));
    folder.fd = open(d->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    qc_status st = QC_OK;
    if (folder.fd < 0)
        st = qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: cannot be opened: %s", d->path,
                          strerror(errno));
    if (st == QC_OK)
        st = qc_path_rename(staged, final, err);
    if (st == QC_OK) {
        st = qc_file_sync(&folder, err);
        /* An output that was called a failure must not look whole; the next run goes on. */
        if (st != QC_OK && rename(final, staged) != 0)
            (void)unlink(final);
    }
    qc_file_discard(&folder);
    if (st == QC_OK)
        d->made_dir = d->moving = 0;
    return st;
}

qc_status qc_output_dir_move(qc_output_dir *d, qc_error *err)
{
    return move_all(d, 0, err);
}

qc_status qc_output_dir_commit(qc_output_dir *d, const char *manifest, size_t len, qc_error *err)
{
    QC_TRY(qc_output_dir_put_manifest(d, manifest, len, err));
    return move_all(d, 0, err);
}

qc_status qc_output_dir_move_on(qc_output_dir *d, qc_error *err)
{
    const qc_manifest *m = &d->dead;
    d->name_count = 0;
    for (size_t i = 0; i < m->shard_count; i++) {
        const char *name = m->shards[i].name;
        if (m->compressed)
            QC_TRY(qc_arena_printf(d->arena, &name, err, "%s.zst", name));
        QC_TRY(add_name(d, name, err));
    }
    for (size_t i = 0; i < m->file_count; i++)
        QC_TRY(add_name(d, m->files[i].path, err));
    return move_all(d, 1, err);
}

qc_status qc_output_dir_manifest(const qc_output_dir *d, int *there, qc_digest *digest,
                                 qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_strbuf text;
    *there = 0;
    QC_TRY(qc_path_join(d->arena, &path, d->path, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        return QC_OK;
    qc_strbuf_init(&text, MANIFEST_MAX);
    qc_status st = qc_file_slurp(path, &text, err);
    if (st == QC_OK) {
        *digest = qc_digest_bytes(text.data, text.len);
        *there = 1;
    }
    qc_strbuf_deinit(&text);
    return st;
}

void qc_output_dir_leave(qc_output_dir *d)
{
    qc_file_discard(&d->part_lock);
    qc_file_discard(&d->lock);
    d->staging = NULL;
    d->made_dir = 0;
}

/* Alone, or the last that is here of several parts. */
static int is_alone(const qc_output_dir *d)
{
    int busy = 0;
    return d->parts == 1 || (qc_dir_lock_try(&d->lock, 0, &busy, NULL) == QC_OK && !busy);
}

static void remove_part_locks(const char *staging)
{
    DIR *dir = opendir(staging);
    const struct dirent *e;
    if (!dir)
        return;
    while ((e = readdir(dir))) {
        if (begins_with(e->d_name, LOCK_NAME "-"))
            (void)unlinkat(dirfd(dir), e->d_name, 0);
    }
    closedir(dir);
}

/* First, so that a process that dies while it removes the rest leaves nothing that looks as if it
 * could be continued. */
static void remove_journals(const char *staging)
{
    DIR *dir = opendir(staging);
    const struct dirent *e;
    while (dir && (e = readdir(dir))) {
        char path[PATH_MAX];
        int n = snprintf(path, sizeof path, "%s/%s", staging, e->d_name);
        if (n > 0 && (size_t)n < sizeof path && begins_with(e->d_name, JOURNAL_PREFIX) &&
            strchr("0123456789", e->d_name[strlen(JOURNAL_PREFIX)]))
            (void)unlink(path);
    }
    if (dir)
        (void)closedir(dir);
}

/* OUT has files of a run that died while it moved them, and no manifest. */
static int is_half_moved(const qc_output_dir *d)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    if (d->dead.shard_count == 0)
        return 0;
    return qc_path_join(d->arena, &path, d->path, QC_MANIFEST_NAME, NULL) != QC_OK ||
           qc_path_stat(path, &kind, NULL, NULL) != QC_OK || kind == QC_PATH_MISSING;
}

void qc_output_dir_abort(qc_output_dir *d)
{
    int made_dir = d->made_dir;
    /* Without its name the lock is that of a folder which others have removed. */
    if (d->staging && !d->moving && is_alone(d) && qc_dir_lock_has_its_name(&d->lock)) {
        remove_journals(d->staging);
        remove_tree(d->staging, is_half_moved(d) ? KEEP_MANIFEST : KEEP_LOCKS, 0);
        if (!is_half_moved(d)) {
            remove_part_locks(d->staging);
            (void)unlink(d->lock.path);
            (void)rmdir(d->staging);
        }
    }
    qc_output_dir_leave(d);
    if (made_dir)
        (void)rmdir(d->path);
}

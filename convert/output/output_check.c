/* May an output be written to OUT? */
#define _DEFAULT_SOURCE /* realpath, flock */
#include "convert/output/output_dir_internal.h"
#include "convert/output/output_replace.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define COMMIT_LOOKS 8

/* Says where a path that may not exist yet will be: with its deepest existing folder resolved, and
 * the rest as written. */
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

/* Refuses a source that is a file in the folder out_real, by its name or, if it is a link, by where
 * it leads. */
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

static qc_status is_file(int *yes, const qc_file *root, const char *name, qc_error *err)
{
    qc_entry e;
    QC_TRY(qc_beneath_look(root, name, &e, err));
    *yes = e.kind == QC_ENTRY_FILE && !e.blocked;
    return QC_OK;
}

/* Looks at a folder without a manifest, but with files. Is somebody moving them there now, or did a
 * run die while it did? Its staged manifest was there before anything moved. Or has somebody just
 * finished? A manifest goes from the staging folder to OUT in one step, so this looks for it in
 * that order, and more than once, because whoever came next may have taken it away again. */
static qc_status look_at_commit(const qc_file *root, out_kind *kind, qc_error *err)
{
    static const char *const manifests[] = {QC_STAGED_MANIFEST, QC_REPLACED_MANIFEST,
                                            QC_MANIFEST_NAME};
    for (int i = 0; i < COMMIT_LOOKS && *kind == OUT_FOREIGN; i++) {
        int fd = qc_beneath_open_fd(root, QC_STAGING_NAME "/" QC_LOCK_NAME), yes = 0;
        int busy = fd >= 0 && flock(fd, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
        if (fd >= 0)
            (void)close(fd);
        if (busy)
            QC_FAIL(err, QC_ERR_USAGE, "%s: another qconv is writing there now", root->path);
        for (size_t m = 0; m < sizeof manifests / sizeof *manifests && !yes; m++)
            QC_TRY(is_file(&yes, root, manifests[m], err));
        if (yes)
            *kind = OUT_QCONV;
    }
    return QC_OK;
}

static qc_status see_foreign(void *ctx, const char *name, qc_error *err)
{
    out_kind *kind = ctx;
    (void)err;
    if (strcmp(name, QC_STAGING_NAME) != 0)
        *kind = OUT_FOREIGN;
    return QC_OK;
}

static qc_status look_at_out(const qc_file *root, out_kind *kind, qc_error *err)
{
    int yes = 0;
    *kind = OUT_FREE;
    QC_TRY(is_file(&yes, root, QC_MANIFEST_NAME, err));
    if (yes) {
        *kind = OUT_QCONV;
        return QC_OK;
    }
    QC_TRY(qc_beneath_list(root, "", see_foreign, kind, err));
    return *kind == OUT_FOREIGN ? look_at_commit(root, kind, err) : QC_OK;
}

/* OUT may hold somebody else's files. Which of them would be in the way is known once the names of
 * the output are; weights are in the way in any case. */
static qc_status check_out(qc_arena *arena, const char *out, int force, int *exists, qc_error *err)
{
    static const qc_owned nothing = {.files = NULL};
    qc_path_kind pk = QC_PATH_MISSING;
    qc_file root = QC_FILE_CLOSED;
    out_kind kind = OUT_FREE;
    QC_TRY(qc_path_stat(out, &pk, NULL, err));
    *exists = pk != QC_PATH_MISSING;
    if (pk == QC_PATH_MISSING)
        return QC_OK;
    if (pk != QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_USAGE, "%s: expected a folder to write to, found a file", out);
    QC_TRY(qc_beneath_open(&root, out, err));
    qc_status st = look_at_out(&root, &kind, err);
    if (st == QC_OK && kind == OUT_FOREIGN)
        st = qc_output_check_weights(arena, &root, &nothing, err);
    qc_file_discard(&root);
    QC_TRY(st);
    if (kind == OUT_FOREIGN && !force)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: the folder is not empty and no qconv output; choose another OUT or say "
                "--force",
                out);
    return QC_OK;
}

qc_status qc_output_check(qc_arena *arena, const char *out, const char *source, int force,
                          int *exists, qc_error *err)
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
    return check_out(arena, out, force, exists, err);
}

qc_status qc_output_dir_check(qc_arena *arena, const char *out, const char *source, int force,
                              qc_error *err)
{
    int exists = 0;
    return qc_output_check(arena, out, source, force, &exists, err);
}

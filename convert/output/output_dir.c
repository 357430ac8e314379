#include "convert/output/output_dir.h"

#include "base/alloc.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/output/dir_lock.h"
#include "formats/text_file.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define COPY_BYTES (1u << 20)
#define LOCK_TRIES 100
/* The folder in the staging folder for files of the output whose names are taken there. No side
 * file comes from a folder whose name begins with a dot. */
#define ASIDE_NAME     ".aside"
#define JOURNAL_PREFIX "journal-"

static int is_lock_name(const char *name)
{
    return strcmp(name, QC_LOCK_NAME) == 0 || qc_begins_with(name, QC_LOCK_NAME "-");
}

/* Manifests tell which files have moved. */
static int is_lock_or_manifest(const char *name)
{
    return is_lock_name(name) || strcmp(name, QC_MANIFEST_NAME) == 0 ||
           strcmp(name, QC_REPLACED_NAME) == 0;
}

/* The staging folder is emptied later, and files in it are written to. So all of it must be qconv's
 * own, and not a link to what belongs to somebody else. */
static qc_status check_staging(const qc_file *root, qc_error *err)
{
    char odd[PATH_MAX];
    qc_entry_kind kind = QC_ENTRY_MISSING;
    QC_TRY(qc_beneath_find_odd(root, QC_STAGING_NAME, odd, &kind, err));
    if (*odd)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s/%s: expected a file or folder of qconv's own, found %s; choose another OUT",
                root->path, odd, qc_entry_text(kind));
    return QC_OK;
}

static qc_status make_staging(const char *out, qc_error *err)
{
    qc_file root = QC_FILE_CLOSED;
    qc_entry e = {.kind = QC_ENTRY_MISSING};
    QC_TRY(qc_dir_make(out, err));
    QC_TRY(qc_beneath_open(&root, out, err));
    qc_status st = qc_beneath_look(&root, QC_STAGING_NAME, &e, err);
    if (st == QC_OK && e.kind != QC_ENTRY_MISSING && e.kind != QC_ENTRY_FOLDER)
        st = QC_ERROR(err, QC_ERR_USAGE,
                      "%s/%s: expected a folder of qconv's own, found %s; choose another OUT", out,
                      QC_STAGING_NAME, qc_entry_text(e.kind));
    if (st == QC_OK)
        st = qc_beneath_make_folder(&root, QC_STAGING_NAME, err);
    qc_file_discard(&root);
    return st;
}

/* Makes the staging folder and holds its lock; d->staging says that both are ours. Whoever holds
 * the lock alone removes its file as the last one in the folder. Whoever locked a file that was
 * removed meanwhile, or came between the folder and the file, tries again. */
static qc_status lock_staging(qc_output_dir *d, const char *staging, const char *lock,
                              qc_error *err)
{
    qc_status st = QC_OK;
    for (int i = 0; i < LOCK_TRIES; i++) {
        qc_path_kind kind = QC_PATH_DIR;
        st = make_staging(d->path, err);
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
        if (st == QC_OK && busy && d->parts > 1)
            st = qc_check_interrupted(err);
        if (st != QC_OK || (busy && d->parts == 1))
            break;
        if (busy) {
            /* Perhaps another part holds it alone for a moment, to clear up behind itself. */
            qc_file_discard(&d->lock);
            qc_dir_lock_pause();
            continue;
        }
        if (qc_dir_lock_has_its_name(&d->lock)) { /* then neither folder goes away any more */
            st = qc_beneath_open(&d->root, d->path, err);
            if (st == QC_OK)
                st = check_staging(&d->root, err);
            if (st == QC_OK)
                d->staging = staging;
            else
                qc_file_discard(&d->lock);
            return st;
        }
        qc_file_discard(&d->lock);
    }
    qc_file_discard(&d->lock);
    d->made_dir = 0;
    if (st != QC_OK)
        return st;
    QC_FAIL(err, QC_ERR_USAGE,
            "another qconv is writing to %s now; wait for it, or choose another OUT", d->path);
}

/* Takes the lock of one part, beside the shared one. */
static qc_status lock_part(qc_output_dir *d, unsigned part_index, qc_error *err)
{
    const char *name = NULL, *path = NULL;
    int busy = 0;
    if (d->parts == 1)
        return QC_OK;
    QC_TRY(qc_arena_printf(d->arena, &name, err, QC_LOCK_NAME "-%05u-of-%05u", part_index + 1,
                           d->parts));
    QC_TRY(qc_path_join(d->arena, &path, d->staging, name, err));
    QC_TRY(qc_file_open_update(&d->part_lock, path, err));
    QC_TRY(qc_dir_lock_try(&d->part_lock, 0, &busy, err));
    if (busy)
        QC_FAIL(
            err, QC_ERR_USAGE,
            "another qconv is writing part %u of %u to %s now; give each process a part of its own",
            part_index + 1, d->parts, d->path);
    return QC_OK;
}

static qc_status see_journal(void *ctx, const char *name, qc_error *err)
{
    qc_output_dir *d = ctx;
    (void)err;
    d->had_journal |= qc_begins_with(name, JOURNAL_PREFIX);
    return QC_OK;
}

qc_status qc_output_dir_open(qc_output_dir *d, qc_arena *arena, const char *out, const char *source,
                             int force, unsigned part_index, unsigned part_count, qc_error *err)
{
    *d = QC_OUTPUT_DIR_NONE;
    d->arena = d->names.arena = arena;
    d->path = out;
    d->parts = part_count;
    int exists = 0;
    const char *staging = NULL, *lock = NULL;
    d->force = force;
    QC_TRY(qc_output_check(arena, out, source, force, &exists, err));
    QC_TRY(qc_path_join(arena, &staging, out, QC_STAGING_NAME, err));
    QC_TRY(qc_path_join(arena, &lock, staging, QC_LOCK_NAME, err));
    d->made_dir = !exists;
    qc_status st = lock_staging(d, staging, lock, err);
    if (st == QC_OK)
        st = lock_part(d, part_index, err);
    if (st == QC_OK)
        st = qc_beneath_list(&d->root, QC_STAGING_NAME, see_journal, d, err);
    /* A run may have died while it moved side files to OUT, or was about to. Its list of their
     * names is as good as the manifest of an old output. */
    if (st == QC_OK)
        st = qc_output_dir_look_again(d, err);
    if (st != QC_OK)
        qc_output_dir_leave(d);
    return st;
}

qc_status qc_output_dir_look_again(qc_output_dir *d, qc_error *err)
{
    QC_TRY(qc_output_read_manifest(d->arena, &d->root, QC_STAGED_MANIFEST, &d->dead,
                                   &d->dead_digest, err));
    return qc_output_owned(&d->owned, d->arena, &d->root, err);
}

/* Moves the manifest of a run that died while its files moved, so that there is room for the next
 * one. */
static void keep_as_replaced(const qc_output_dir *d)
{
    qc_entry e;
    if (qc_beneath_look(&d->root, QC_REPLACED_MANIFEST, &e, NULL) == QC_OK &&
        e.kind == QC_ENTRY_MISSING)
        (void)!qc_beneath_rename(&d->root, QC_STAGED_MANIFEST, QC_REPLACED_MANIFEST, NULL);
}

qc_status qc_output_dir_forget_dead(qc_output_dir *d, qc_error *err)
{
    keep_as_replaced(d);
    return qc_beneath_remove(&d->root, QC_STAGED_MANIFEST, err);
}

void qc_output_dir_clear(qc_output_dir *d)
{
    qc_beneath_clear(&d->root, QC_STAGING_NAME, is_lock_or_manifest);
    keep_as_replaced(d);
    d->names.count = 0;
    d->had_journal = 0;
}

qc_status qc_output_dir_begin(qc_output_dir *d, qc_arena *arena, const char *out,
                              const char *source, int force, qc_error *err)
{
    QC_TRY(qc_output_dir_open(d, arena, out, source, force, 0, 1, err));
    if (d->had_journal) {
        qc_output_dir_leave(d);
        QC_FAIL(err, QC_ERR_USAGE,
                "%s holds an interrupted conversion, which its own command continues; choose "
                "another OUT",
                out);
    }
    qc_output_dir_clear(d);
    return QC_OK;
}

static qc_status staged_name(const qc_output_dir *d, const char *name, const char **staged,
                             qc_error *err)
{
    const int is_taken = is_lock_name(name) || qc_begins_with(name, JOURNAL_PREFIX) ||
                         qc_begins_with(name, ASIDE_NAME) || strcmp(name, QC_REPLACED_NAME) == 0;
    return qc_arena_printf(d->arena, staged, err, QC_STAGING_NAME "/%s%s",
                           is_taken ? ASIDE_NAME "/" : "", name);
}

/* Gives the folder part of a name, or "" where it has none. */
static qc_status folder_of(qc_arena *arena, const char **out, const char *name, qc_error *err)
{
    const char *slash = strrchr(name, '/');
    return qc_arena_strndup(arena, out, name, slash ? (size_t)(slash - name) : 0, err);
}

qc_status qc_output_dir_stage(qc_output_dir *d, const char *name, const char **path, qc_error *err)
{
    const char *staged = NULL, *folder = NULL;
    QC_TRY(staged_name(d, name, &staged, err));
    QC_TRY(folder_of(d->arena, &folder, staged, err));
    QC_TRY(qc_beneath_make_folder(&d->root, folder, err));
    QC_TRY(qc_path_join(d->arena, path, d->path, staged, err));
    return qc_name_list_add(&d->names, name, err);
}

qc_status qc_output_dir_put(qc_output_dir *d, const char *name, const void *bytes, size_t len,
                            qc_error *err)
{
    const char *path = NULL;
    QC_TRY(qc_output_dir_stage(d, name, &path, err));
    return qc_file_put(path, bytes, len, err);
}

qc_status qc_output_dir_copy(qc_output_dir *d, const char *name, const char *from, uint64_t *bytes,
                             qc_digest *digest, qc_error *err)
{
    const char *path = NULL, *staged = NULL, *folder = NULL;
    qc_file in = QC_FILE_CLOSED, out = QC_FILE_CLOSED;
    qc_digest_state *hash = NULL;
    void *buf = NULL;
    QC_TRY(qc_output_dir_stage(d, name, &path, err));
    qc_status st = QC_OK;
    QC_TRY_GOTO(st, done, qc_malloc(&buf, COPY_BYTES, err));
    QC_TRY_GOTO(st, done, qc_digest_create(&hash, err));
    QC_TRY_GOTO(st, done, qc_file_open_read(&in, from, err));
    QC_TRY_GOTO(st, done, qc_file_size(&in, bytes, err));
    QC_TRY_GOTO(st, done, qc_file_create(&out, path, err));
    for (uint64_t at = 0; at < *bytes; at += COPY_BYTES) {
        size_t len = *bytes - at < COPY_BYTES ? (size_t)(*bytes - at) : COPY_BYTES;
        QC_TRY_GOTO(st, done, qc_file_pread(&in, buf, len, at, err));
        QC_TRY_GOTO(st, done, qc_file_pwrite(&out, buf, len, at, err));
        qc_digest_update(hash, buf, len);
    }
    *digest = qc_digest_finish(hash);
    QC_TRY_GOTO(st, done, qc_file_sync(&out, err));
    QC_TRY_GOTO(st, done, qc_file_close(&out, err));
    /* Syncing the manifest makes the names in the staging folder itself durable, but not those in
     * its folders. */
    QC_TRY_GOTO(st, done, staged_name(d, name, &staged, err));
    QC_TRY_GOTO(st, done, folder_of(d->arena, &folder, staged, err));
    if (strcmp(folder, QC_STAGING_NAME) != 0)
        st = qc_beneath_sync(&d->root, folder, err);
done:
    qc_file_discard(&out);
    qc_file_discard(&in);
    qc_digest_destroy(hash);
    qc_free(buf);
    return st;
}

qc_status qc_output_dir_manifest(const qc_output_dir *d, int *there, qc_digest *digest,
                                 qc_error *err)
{
    const char *path = NULL;
    qc_entry e;
    *there = 0;
    QC_TRY(qc_path_join(d->arena, &path, d->path, QC_MANIFEST_NAME, err));
    QC_TRY(qc_beneath_look_once(d->path, QC_MANIFEST_NAME, &e, err));
    if (e.kind != QC_ENTRY_FILE)
        return QC_OK;
    QC_TRY(qc_digest_file(digest, path, err));
    *there = 1;
    return QC_OK;
}

/* ---- files move to OUT, the manifest last ---------------------------------------------------- */

/* Moves the manifest of the old output to the staging folder, where it tells which files of OUT are
 * qconv's, should this process die. Then it removes the files that the manifest lists and the new
 * output does not have, and the folders that are empty after that. */
static qc_status remove_old(qc_output_dir *d, const qc_replace_plan *plan, qc_error *err)
{
    qc_entry e;
    QC_TRY(qc_beneath_look(&d->root, QC_MANIFEST_NAME, &e, err));
    if (e.kind == QC_ENTRY_FILE) {
        QC_TRY(qc_beneath_rename(&d->root, QC_MANIFEST_NAME, QC_REPLACED_MANIFEST, err));
        QC_TRY(qc_beneath_sync(&d->root, QC_STAGING_NAME, err));
        QC_TRY(qc_beneath_sync(&d->root, "", err));
    }
    for (size_t i = 0; i < plan->deleted.count; i++) {
        QC_TRY(qc_beneath_remove(&d->root, plan->deleted.names[i], err));
        qc_beneath_remove_empty(&d->root, plan->deleted.names[i]);
    }
    return QC_OK;
}

/* Moves everything but the manifest to its place. With going_on some of it may be there already. */
static qc_status move_files(qc_output_dir *d, int going_on, qc_error *err)
{
    for (size_t i = 0; i < d->names.count; i++) {
        const char *from = NULL, *to = d->names.names[i], *folder = NULL;
        qc_entry staged = {.kind = QC_ENTRY_FILE}, moved;
        QC_TRY(staged_name(d, to, &from, err));
        QC_TRY(folder_of(d->arena, &folder, to, err));
        if (going_on) {
            QC_TRY(qc_beneath_look(&d->root, from, &staged, err));
            QC_TRY(qc_beneath_look(&d->root, to, &moved, err));
            if (staged.kind == QC_ENTRY_MISSING && moved.kind == QC_ENTRY_MISSING) {
                d->lost = 1;
                QC_FAIL(err, QC_ERR_IO,
                        "%s/%s is missing, and so is %s/%s, from where it was to be moved "
                        "there" QC_RESTART_ADVICE,
                        d->path, to, d->path, from);
            }
        }
        if (staged.kind != QC_ENTRY_MISSING) {
            QC_TRY(qc_beneath_make_folder(&d->root, folder, err));
            QC_TRY(qc_beneath_rename(&d->root, from, to, err));
        }
        if (*folder)
            QC_TRY(qc_beneath_sync(&d->root, folder, err));
    }
    return qc_beneath_sync(&d->root, "", err);
}

static qc_status move_all(qc_output_dir *d, int going_on, qc_error *err)
{
    qc_replace_plan plan;
    qc_output_sort_names(d->names.names, d->names.count);
    qc_status st = qc_output_check_names(&plan, d->arena, &d->root, &d->owned, d->names.names,
                                         d->names.count, d->force, err);
    if (st == QC_OK || going_on) /* some of it is in OUT then */
        d->moving = 1;
    /* Something may be in the way now that was not there when the run began. Whatever it is, what
     * was made stays, and the same command goes on once it is gone. */
    if (st == QC_ERR_USAGE && err)
        err->code = QC_ERR_IO;
    QC_TRY(st == QC_ERR_USAGE ? QC_ERR_IO : st);
    QC_TRY(remove_old(d, &plan, err));
    QC_TRY(move_files(d, going_on, err));
    QC_TRY(qc_beneath_rename(&d->root, QC_STAGED_MANIFEST, QC_MANIFEST_NAME, err));
    st = qc_beneath_sync(&d->root, "", err);
    /* The run reports a failure, so the output must not look whole. The next run goes on. */
    if (st != QC_OK &&
        qc_beneath_rename(&d->root, QC_MANIFEST_NAME, QC_STAGED_MANIFEST, NULL) != QC_OK)
        (void)!qc_beneath_remove(&d->root, QC_MANIFEST_NAME, NULL);
    if (st == QC_OK)
        d->made_dir = d->moving = 0;
    return st;
}

qc_status qc_output_dir_move(qc_output_dir *d, qc_error *err)
{
    return move_all(d, 0, err);
}

qc_status qc_output_dir_move_on(qc_output_dir *d, qc_error *err)
{
    const qc_manifest *m = &d->dead;
    d->names.count = 0;
    for (size_t i = 0; i < m->shard_count; i++) {
        const char *name = NULL;
        QC_TRY(qc_arena_printf(d->arena, &name, err, "%s%s", m->shards[i].name,
                               qc_manifest_ending(m)));
        QC_TRY(qc_name_list_add(&d->names, name, err));
    }
    for (size_t i = 0; i < m->file_count; i++)
        QC_TRY(qc_name_list_add(&d->names, m->files[i].path, err));
    return move_all(d, 1, err);
}

/* ---- the end --------------------------------------------------------------------------------- */

void qc_output_dir_leave(qc_output_dir *d)
{
    qc_file_discard(&d->part_lock);
    qc_file_discard(&d->lock);
    qc_file_discard(&d->root);
    d->staging = NULL;
    d->made_dir = 0;
}

static int is_no_journal(const char *name)
{
    return !qc_begins_with(name, JOURNAL_PREFIX) ||
           !strchr("0123456789", name[strlen(JOURNAL_PREFIX)]);
}

static int is_no_part_lock(const char *name)
{
    return !qc_begins_with(name, QC_LOCK_NAME "-");
}

/* Removes the journals first, so that a process that dies while it removes the rest leaves nothing
 * that looks as if it could be continued. The lock goes last. */
static void remove_staging(qc_output_dir *d)
{
    qc_entry e;
    qc_beneath_clear(&d->root, QC_STAGING_NAME, is_no_journal);
    /* Has OUT files of a run that died while it moved them, and no manifest? */
    if (d->owned.count > 0 && (qc_beneath_look(&d->root, QC_MANIFEST_NAME, &e, NULL) != QC_OK ||
                               e.kind == QC_ENTRY_MISSING)) {
        qc_beneath_clear(&d->root, QC_STAGING_NAME, is_lock_or_manifest);
        return;
    }
    qc_beneath_clear(&d->root, QC_STAGING_NAME, is_lock_name);
    qc_beneath_clear(&d->root, QC_STAGING_NAME, is_no_part_lock);
    (void)!qc_beneath_remove(&d->root, QC_STAGING_NAME "/" QC_LOCK_NAME, NULL);
    qc_beneath_remove_empty(&d->root, QC_STAGING_NAME "/" QC_LOCK_NAME);
}

void qc_output_dir_abort(qc_output_dir *d)
{
    int made_dir = d->made_dir, busy = 0;
    /* The last of several parts is alone, too. Where a lock has lost its name, others have
     * removed its folder. */
    if (d->staging && !d->moving &&
        (d->parts == 1 || (qc_dir_lock_try(&d->lock, 0, &busy, NULL) == QC_OK && !busy)) &&
        qc_dir_lock_has_its_name(&d->lock))
        remove_staging(d);
    qc_output_dir_leave(d);
    if (made_dir)
        (void)rmdir(d->path);
}

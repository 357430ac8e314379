/* Files move from the staging folder to OUT, the manifest last. */
#include "base/alloc.h"
#include "convert/output/output_dir_internal.h"

#include <string.h>

/* Gives the folder part of a name, or "" where it has none. */
static qc_status folder_of(qc_arena *arena, const char **out, const char *name, qc_error *err)
{
    const char *slash = strrchr(name, '/');
    return qc_arena_strndup(arena, out, name, slash ? (size_t)(slash - name) : 0, err);
}

/* Something may be in the way now that was not there when the run began. Whatever it is, what was
 * made stays, and the same command goes on once it is gone. */
static qc_status look_at_names(qc_output_dir *d, qc_replace_plan *plan, qc_error *err)
{
    qc_output_sort_names(d->names, d->name_count);
    qc_status st = qc_output_check_names(plan, d->arena, &d->root, &d->owned, d->names,
                                         d->name_count, d->force, err);
    if (st == QC_ERR_USAGE && err)
        err->code = QC_ERR_IO;
    return st == QC_ERR_USAGE ? QC_ERR_IO : st;
}

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
    for (size_t i = 0; i < plan->deleted_count; i++) {
        QC_TRY(qc_beneath_remove(&d->root, plan->deleted[i], err));
        qc_beneath_remove_empty(&d->root, plan->deleted[i]);
    }
    return QC_OK;
}

/* Moves everything but the manifest to its place. With going_on some of it may be there already. */
static qc_status move_files(qc_output_dir *d, int going_on, qc_error *err)
{
    for (size_t i = 0; i < d->name_count; i++) {
        const char *from = NULL, *to = d->names[i], *folder = NULL;
        qc_entry staged = {.kind = QC_ENTRY_FILE}, moved;
        QC_TRY(qc_output_staged_name(d, to, &from, err));
        QC_TRY(folder_of(d->arena, &folder, to, err));
        if (going_on) {
            QC_TRY(qc_beneath_look(&d->root, from, &staged, err));
            QC_TRY(qc_beneath_look(&d->root, to, &moved, err));
            if (staged.kind == QC_ENTRY_MISSING && moved.kind == QC_ENTRY_MISSING) {
                d->lost = 1;
                QC_FAIL(err, QC_ERR_IO,
                        "%s/%s: is missing, and so is %s/%s, from where it was to be "
                        "moved" QC_RESTART_ADVICE,
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
    qc_status st = look_at_names(d, &plan, err);
    if (st != QC_OK && going_on)
        d->moving = 1; /* some of it is in OUT */
    QC_TRY(st);
    d->moving = 1;
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
        QC_TRY(qc_output_add_name(d, name, err));
    }
    for (size_t i = 0; i < m->file_count; i++)
        QC_TRY(qc_output_add_name(d, m->files[i].path, err));
    return move_all(d, 1, err);
}

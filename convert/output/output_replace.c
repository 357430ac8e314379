#define _DEFAULT_SOURCE /* realpath, flock */
#include "convert/output/output_replace.h"

#include "base/text.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

#define COMMIT_LOOKS 8

/* ---- names ----------------------------------------------------------------------------------- */

void qc_output_sort_names(const char **names, size_t count)
{
    if (count > 0)
        qsort(names, count, sizeof *names, qc_by_text);
}

static int is_weights(const char *name)
{
    static const char *const ends[] = {
        ".safetensors", ".safetensors.zst", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf",
        ".h5",          ".msgpack",         ".onnx"};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (qc_ends_with(name, ends[i]) && strcmp(name, ends[i]) != 0)
            return 1;
    return 0;
}

const char *qc_output_names_text(char *text, const qc_name_list *list)
{
    size_t len = 0, shown = 0;
    text[0] = '\0';
    for (; shown < list->count; shown++) {
        size_t n = strlen(list->names[shown]);
        if (len + n + 40 > QC_NAMES_SHOWN_BYTES && shown > 0)
            break;
        len += (size_t)snprintf(text + len, QC_NAMES_SHOWN_BYTES - len, "%s%.*s",
                                shown == 0                                   ? ""
                                : shown + 1 == list->count && shown + 1 >= 2 ? " and "
                                                                             : ", ",
                                160, list->names[shown]);
    }
    if (shown < list->count)
        (void)snprintf(text + len, QC_NAMES_SHOWN_BYTES - len, " and %zu more",
                       list->count - shown);
    return text;
}

qc_status qc_name_list_add(qc_name_list *l, const char *name, qc_error *err)
{
    if (l->count == l->room) {
        const char **names = NULL;
        l->room = l->room ? l->room * 2 : 16;
        QC_TRY(qc_arena_array(l->arena, &names, l->room, err));
        if (l->count)
            memcpy(names, l->names, l->count * sizeof *names);
        l->names = names;
    }
    return qc_arena_strndup(l->arena, &l->names[l->count++], name, strlen(name), err);
}

/* ---- qconv's own files ----------------------------------------------------------------------- */

static int is_owned(const qc_owned *owned, const char *name, const qc_entry *found)
{
    const qc_owned_file *end = owned->files + owned->count, *f = NULL;
    if (owned->count > 0)
        f = bsearch(&name, owned->files, owned->count, sizeof *owned->files, qc_by_text);
    while (f && f > owned->files && strcmp(f[-1].name, name) == 0)
        f--;
    for (; f && f < end && strcmp(f->name, name) == 0; f++) {
        if (!f->is_shard || (found->kind == QC_ENTRY_FILE && found->bytes == f->bytes))
            return 1;
    }
    return 0;
}

qc_status qc_output_read_manifest(qc_arena *arena, const qc_file *root, const char *name,
                                  qc_manifest *m, qc_digest *digest, qc_error *err)
{
    const char *path = NULL;
    qc_entry e;
    qc_strbuf text;
    qc_error trouble = {0};
    memset(m, 0, sizeof *m);
    QC_TRY(qc_path_join(arena, &path, root->path, name, err));
    QC_TRY(qc_beneath_look(root, name, &e, err));
    if (e.kind != QC_ENTRY_FILE || e.blocked)
        return QC_OK;
    qc_strbuf_init(&text, QC_MANIFEST_MAX);
    qc_status st = qc_file_slurp(path, &text, &trouble);
    if (st == QC_OK)
        st = qc_manifest_parse(m, arena, text.data, text.len, &trouble);
    if (st == QC_OK && digest)
        *digest = qc_digest_bytes(text.data, text.len);
    if (st != QC_OK)
        memset(m, 0, sizeof *m);
    qc_strbuf_deinit(&text);
    if (st == QC_ERR_IO) /* or has another part moved it meanwhile? */
        QC_TRY(qc_beneath_look(root, name, &e, err));
    if ((st != QC_ERR_IO && st != QC_ERR_NOMEM) || e.kind == QC_ENTRY_MISSING)
        return QC_OK;
    return qc_error_pass(err, &trouble, st);
}

static qc_status add_owned(qc_owned *o, qc_arena *arena, const char *name, const char *ending,
                           uint64_t bytes, int is_shard, qc_error *err)
{
    qc_owned_file *f = &o->files[o->count++];
    f->bytes = bytes;
    f->is_shard = is_shard;
    return qc_arena_printf(arena, &f->name, err, "%s%s", name, ending);
}

/* Adds the files that a manifest lists, and for a compressed shard also its plain form, which
 * "zstd -d" leaves beside it. */
static qc_status add_listed(qc_owned *o, qc_arena *arena, const qc_manifest *m, qc_error *err)
{
    for (size_t i = 0; i < m->shard_count; i++) {
        const qc_manifest_shard *s = &m->shards[i];
        QC_TRY(add_owned(o, arena, s->name, "", s->content_bytes, 1, err));
        if (m->compressed)
            QC_TRY(add_owned(o, arena, s->name, ".zst", s->file_bytes, 1, err));
    }
    for (size_t i = 0; i < m->file_count; i++)
        QC_TRY(add_owned(o, arena, m->files[i].path, "", m->files[i].bytes, 0, err));
    return QC_OK;
}

static qc_status read_listed(qc_owned *out, qc_arena *arena, const qc_file *root,
                             const char *const *manifests, size_t count, qc_error *err)
{
    qc_arena scratch; /* a manifest with its tensors is large, and few of its words are needed */
    qc_manifest m[2];
    size_t most = 0;
    qc_status st = QC_OK;
    qc_arena_init(&scratch);
    for (size_t i = 0; st == QC_OK && i < count; i++) {
        st = qc_output_read_manifest(&scratch, root, manifests[i], &m[i], NULL, err);
        most += 2 * m[i].shard_count + m[i].file_count;
    }
    if (st == QC_OK)
        st = qc_arena_array(arena, &out->files, most, err);
    for (size_t i = 0; st == QC_OK && i < count; i++)
        st = add_listed(out, arena, &m[i], err);
    qc_arena_deinit(&scratch);
    if (st == QC_OK && out->count > 0)
        qsort(out->files, out->count, sizeof *out->files, qc_by_text);
    return st;
}

qc_status qc_output_owned(qc_owned *out, qc_arena *arena, const qc_file *root, qc_error *err)
{
    static const char *const in_out[] = {QC_MANIFEST_NAME};
    static const char *const moving[] = {QC_STAGED_MANIFEST, QC_REPLACED_MANIFEST};
    qc_entry e;
    *out = (qc_owned){.files = NULL};
    QC_TRY(qc_beneath_look(root, QC_MANIFEST_NAME, &e, err));
    if (e.kind == QC_ENTRY_FILE)
        return read_listed(out, arena, root, in_out, 1, err);
    return read_listed(out, arena, root, moving, 2, err);
}

/* ---- what is in the way ---------------------------------------------------------------------- */

typedef struct {
    const qc_file *root;
    const qc_owned *owned;
    qc_name_list found;
} weights_search;

static qc_status see_weights(void *ctx, const char *name, qc_error *err)
{
    weights_search *s = ctx;
    qc_entry e;
    if (!is_weights(name))
        return QC_OK;
    QC_TRY(qc_beneath_look(s->root, name, &e, err));
    if (e.kind == QC_ENTRY_FOLDER || e.kind == QC_ENTRY_MISSING || is_owned(s->owned, name, &e))
        return QC_OK;
    return qc_name_list_add(&s->found, name, err);
}

static qc_status check_weights(qc_arena *arena, const qc_file *root, const qc_owned *owned,
                               qc_error *err)
{
    char shown[QC_NAMES_SHOWN_BYTES];
    weights_search s = {root, owned, {.arena = arena}};
    QC_TRY(qc_beneath_list(root, "", see_weights, &s, err));
    if (s.found.count == 0)
        return QC_OK;
    qc_output_sort_names(s.found.names, s.found.count);
    QC_FAIL(err, QC_ERR_USAGE,
            "%s holds weights that no manifest of qconv lists (%s), and qconv neither deletes nor "
            "replaces those, not even with --force; choose another OUT or move them",
            root->path, qc_output_names_text(shown, &s.found));
}

static qc_status check_blocked(const qc_file *root, const char *name, const qc_entry *e,
                               qc_error *err)
{
    if (e->blocked)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s/%.*s is %s where the output has a folder, and nothing is written through it; "
                "move it or choose another OUT",
                root->path, (int)e->blocked, name, qc_entry_text(e->kind));
    if (e->kind == QC_ENTRY_FOLDER || e->kind == QC_ENTRY_OTHER)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s/%s is %s where the output has a file; move it or choose another OUT",
                root->path, name, qc_entry_text(e->kind));
    return QC_OK;
}

static qc_status find_deleted(qc_name_list *deleted, const qc_file *root, const qc_owned *owned,
                              const char *const *names, size_t count, qc_error *err)
{
    const char *last = "";
    for (size_t i = 0; i < owned->count; i++) {
        const char *name = owned->files[i].name;
        qc_entry e;
        if (strcmp(name, last) == 0 ||
            (count > 0 && bsearch(&name, names, count, sizeof *names, qc_by_text)))
            continue;
        last = name;
        QC_TRY(qc_beneath_look(root, name, &e, err));
        if (!e.blocked && (e.kind == QC_ENTRY_FILE || e.kind == QC_ENTRY_LINK) &&
            is_owned(owned, name, &e))
            QC_TRY(qc_name_list_add(deleted, name, err));
    }
    return QC_OK;
}

qc_status qc_output_check_names(qc_replace_plan *plan, qc_arena *arena, const qc_file *root,
                                const qc_owned *owned, const char *const *names, size_t count,
                                int force, qc_error *err)
{
    qc_entry e;
    *plan = (qc_replace_plan){.replaced = {.arena = arena}, .deleted = {.arena = arena}};
    QC_TRY(qc_beneath_look(root, QC_MANIFEST_NAME, &e, err));
    QC_TRY(check_blocked(root, QC_MANIFEST_NAME, &e, err));
    QC_TRY(check_weights(arena, root, owned, err));
    for (size_t i = 0; i < count; i++) {
        QC_TRY(qc_beneath_look(root, names[i], &e, err));
        QC_TRY(check_blocked(root, names[i], &e, err));
        if (e.kind == QC_ENTRY_MISSING || is_owned(owned, names[i], &e))
            continue;
        if (!force)
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s/%s is a file that qconv did not write there, and the output has one of "
                    "that name; --force replaces it",
                    root->path, names[i]);
        QC_TRY(qc_name_list_add(&plan->replaced, names[i], err));
    }
    return find_deleted(&plan->deleted, root, owned, names, count, err);
}

/* ---- may an output be written there? --------------------------------------------------------- */

/* Says where a path that may not exist yet will be: with its deepest existing folder resolved, and
 * the rest as written. */
static qc_status resolve(qc_arena *arena, const char **out, const char *path, qc_error *err)
{
    char room[PATH_MAX];
    const char *copy = NULL, *real = NULL;
    size_t len = strlen(path);
    if (realpath(path, room))
        return qc_arena_strndup(arena, out, room, strlen(room), err);
    while (len > 1 && path[len - 1] == '/')
        len--;
    QC_TRY(qc_arena_strndup(arena, &copy, path, len, err));
    *out = copy;
    const char *folder = qc_folder_of(room, copy);
    if (!folder || strcmp(folder, copy) == 0)
        return QC_OK;
    QC_TRY(resolve(arena, &real, folder, err));
    return qc_path_join(arena, out, real, qc_last_name(copy), err);
}

/* Refuses a source that is a file in the folder out_real, by its name or, if it is a link, by where
 * it leads. */
static qc_status check_source_file(qc_arena *arena, const char *out, const char *out_real,
                                   const char *source, const char *source_real, qc_error *err)
{
    const char *const names[] = {source, source_real};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char room[PATH_MAX];
        const char *folder = qc_folder_of(room, names[i]), *real = "";
        if (folder)
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
            QC_FAIL(err, QC_ERR_USAGE,
                    "another qconv is writing to %s now; wait for it, or choose another OUT",
                    root->path);
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

/* OUT may hold somebody else's files. Which of them would be in the way is known once the names of
 * the output are; weights are in the way in any case. */
static qc_status check_out(qc_arena *arena, const char *out, int force, int *exists, qc_error *err)
{
    static const qc_owned nothing = {.files = NULL};
    qc_path_kind pk = QC_PATH_MISSING;
    qc_file root = QC_FILE_CLOSED;
    out_kind kind = OUT_FREE;
    int yes = 0;
    QC_TRY(qc_path_stat(out, &pk, NULL, err));
    if (exists)
        *exists = pk != QC_PATH_MISSING;
    if (pk == QC_PATH_MISSING)
        return QC_OK;
    if (pk != QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_USAGE, "%s: expected a folder to write to, found a file", out);
    QC_TRY(qc_beneath_open(&root, out, err));
    qc_status st = is_file(&yes, &root, QC_MANIFEST_NAME, err);
    if (st == QC_OK && yes)
        kind = OUT_QCONV;
    else if (st == QC_OK)
        st = qc_beneath_list(&root, "", see_foreign, &kind, err);
    if (st == QC_OK && kind == OUT_FOREIGN)
        st = look_at_commit(&root, &kind, err);
    if (st == QC_OK && kind == OUT_FOREIGN)
        st = check_weights(arena, &root, &nothing, err);
    qc_file_discard(&root);
    QC_TRY(st);
    if (kind == OUT_FOREIGN && !force)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s is not empty, and it is no output of qconv; choose another OUT, or write into "
                "it with --force",
                out);
    return QC_OK;
}

qc_status qc_output_check(qc_arena *arena, const char *out, const char *source, int force,
                          int *exists, qc_error *err)
{
    const char *out_real = NULL, *source_real = NULL;
    if (!source)
        return check_out(arena, out, force, exists, err);
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

#include "convert/output/output_replace.h"

#include "convert/output/output_dir_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- names ---------------------------------------------------------------------------------- */

static int compare_names(const void *pa, const void *pb)
{
    const char *const *a = pa, *const *b = pb;
    return strcmp(*a, *b);
}

void qc_output_sort_names(const char **names, size_t count)
{
    if (count > 0)
        qsort(names, count, sizeof *names, compare_names);
}

static int is_among(const char *name, const char *const *names, size_t count)
{
    return count > 0 && bsearch(&name, names, count, sizeof *names, compare_names) != NULL;
}

int qc_output_is_weights(const char *name)
{
    static const char *const ends[] = {
        ".safetensors", ".safetensors.zst", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf",
        ".h5",          ".msgpack",         ".onnx"};
    size_t len = strlen(name);
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        size_t n = strlen(ends[i]);
        if (len > n && strcmp(name + len - n, ends[i]) == 0)
            return 1;
    }
    return 0;
}

const char *qc_output_names_text(char *text, const char *const *names, size_t count)
{
    size_t len = 0, shown = 0;
    text[0] = '\0';
    for (; shown < count; shown++) {
        size_t n = strlen(names[shown]);
        if (len + n + 40 > QC_NAMES_SHOWN_BYTES && shown > 0)
            break;
        len += (size_t)snprintf(text + len, QC_NAMES_SHOWN_BYTES - len, "%s%.*s",
                                shown == 0                             ? ""
                                : shown + 1 == count && shown + 1 >= 2 ? " and "
                                                                       : ", ",
                                160, names[shown]);
    }
    if (shown < count)
        (void)snprintf(text + len, QC_NAMES_SHOWN_BYTES - len, " and %zu more", count - shown);
    return text;
}

/* A list that grows in an arena. */
typedef struct {
    qc_arena *arena;
    const char **names;
    size_t count, cap;
} name_list;

static qc_status add_name(name_list *l, const char *name, qc_error *err)
{
    if (l->count == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 16;
        void *v = NULL;
        QC_TRY(qc_arena_alloc(l->arena, &v, cap, sizeof *l->names, err));
        if (l->count)
            memcpy(v, l->names, l->count * sizeof *l->names);
        l->names = v;
        l->cap = cap;
    }
    return qc_arena_strndup(l->arena, &l->names[l->count++], name, strlen(name), err);
}

/* ---- qconv's own files ---------------------------------------------------------------------- */

static int compare_owned(const void *pa, const void *pb)
{
    const qc_owned_file *a = pa, *b = pb;
    return strcmp(a->name, b->name);
}

static size_t first_owned(const qc_owned *o, const char *name)
{
    size_t low = 0, high = o->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (strcmp(o->files[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

int qc_output_is_owned(const qc_owned *owned, const char *name, const qc_entry *found)
{
    for (size_t i = first_owned(owned, name); i < owned->count; i++) {
        const qc_owned_file *f = &owned->files[i];
        if (strcmp(f->name, name) != 0)
            return 0;
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
    if (err)
        *err = trouble;
    return st;
}

/* Adds the files that a manifest lists, and for a compressed shard also its plain form, which
 * "zstd -d" leaves beside it. */
static qc_status add_listed(qc_owned *o, qc_arena *arena, const qc_manifest *m, qc_error *err)
{
    for (size_t i = 0; i < m->shard_count; i++) {
        const qc_manifest_shard *s = &m->shards[i];
        qc_owned_file *f = &o->files[o->count++];
        f->is_shard = 1;
        f->bytes = s->content_bytes;
        QC_TRY(qc_arena_strndup(arena, &f->name, s->name, strlen(s->name), err));
        if (!m->compressed)
            continue;
        f = &o->files[o->count++];
        f->is_shard = 1;
        f->bytes = s->file_bytes;
        QC_TRY(qc_arena_printf(arena, &f->name, err, "%s.zst", s->name));
    }
    for (size_t i = 0; i < m->file_count; i++) {
        qc_owned_file *f = &o->files[o->count++];
        f->is_shard = 0;
        f->bytes = m->files[i].bytes;
        QC_TRY(qc_arena_strndup(arena, &f->name, m->files[i].path, strlen(m->files[i].path), err));
    }
    return QC_OK;
}

static qc_status read_listed(qc_owned *out, qc_arena *arena, const qc_file *root,
                             const char *const *manifests, size_t count, qc_error *err)
{
    qc_arena scratch; /* a manifest with its tensors is large, and few of its words are needed */
    qc_manifest m[2];
    size_t most = 0;
    void *v = NULL;
    qc_status st = QC_OK;
    qc_arena_init(&scratch);
    for (size_t i = 0; st == QC_OK && i < count; i++) {
        st = qc_output_read_manifest(&scratch, root, manifests[i], &m[i], NULL, err);
        most += 2 * m[i].shard_count + m[i].file_count;
    }
    if (st == QC_OK)
        st = qc_arena_alloc(arena, &v, most, sizeof *out->files, err);
    out->files = v;
    for (size_t i = 0; st == QC_OK && i < count; i++)
        st = add_listed(out, arena, &m[i], err);
    qc_arena_deinit(&scratch);
    if (st == QC_OK && out->count > 0)
        qsort(out->files, out->count, sizeof *out->files, compare_owned);
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

/* ---- what is in the way --------------------------------------------------------------------- */

typedef struct {
    const qc_file *root;
    const qc_owned *owned;
    name_list found;
} weights_search;

static qc_status see_weights(void *ctx, const char *name, qc_error *err)
{
    weights_search *s = ctx;
    qc_entry e;
    if (!qc_output_is_weights(name))
        return QC_OK;
    QC_TRY(qc_beneath_look(s->root, name, &e, err));
    if (e.kind == QC_ENTRY_FOLDER || e.kind == QC_ENTRY_MISSING ||
        qc_output_is_owned(s->owned, name, &e))
        return QC_OK;
    return add_name(&s->found, name, err);
}

qc_status qc_output_check_weights(qc_arena *arena, const qc_file *root, const qc_owned *owned,
                                  qc_error *err)
{
    char shown[QC_NAMES_SHOWN_BYTES];
    weights_search s = {root, owned, {.arena = arena}};
    QC_TRY(qc_beneath_list(root, "", see_weights, &s, err));
    if (s.found.count == 0)
        return QC_OK;
    qc_output_sort_names(s.found.names, s.found.count);
    QC_FAIL(err, QC_ERR_USAGE,
            "%s: holds weights that no manifest of qconv lists (%s), and qconv neither deletes nor "
            "replaces those, not even with --force; choose another OUT or move them",
            root->path, qc_output_names_text(shown, s.found.names, s.found.count));
}

static qc_status check_blocked(const qc_file *root, const char *name, const qc_entry *e,
                               qc_error *err)
{
    if (e->blocked)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s/%.*s: is %s where the output has a folder, and nothing is written through it; "
                "move it or choose another OUT",
                root->path, (int)e->blocked, name, qc_entry_text(e->kind));
    if (e->kind == QC_ENTRY_FOLDER || e->kind == QC_ENTRY_OTHER)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s/%s: is %s where the output has a file; move it or choose another OUT",
                root->path, name, qc_entry_text(e->kind));
    return QC_OK;
}

static qc_status check_name(name_list *replaced, const qc_file *root, const qc_owned *owned,
                            const char *name, int force, qc_error *err)
{
    qc_entry e;
    QC_TRY(qc_beneath_look(root, name, &e, err));
    QC_TRY(check_blocked(root, name, &e, err));
    if (e.kind == QC_ENTRY_MISSING || qc_output_is_owned(owned, name, &e))
        return QC_OK;
    if (!force)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s/%s: is a file that qconv did not write there, and the output has one of that "
                "name; --force replaces it",
                root->path, name);
    return add_name(replaced, name, err);
}

static qc_status find_deleted(name_list *deleted, const qc_file *root, const qc_owned *owned,
                              const char *const *names, size_t count, qc_error *err)
{
    const char *last = "";
    for (size_t i = 0; i < owned->count; i++) {
        const char *name = owned->files[i].name;
        qc_entry e;
        if (strcmp(name, last) == 0 || is_among(name, names, count))
            continue;
        last = name;
        QC_TRY(qc_beneath_look(root, name, &e, err));
        if (!e.blocked && (e.kind == QC_ENTRY_FILE || e.kind == QC_ENTRY_LINK) &&
            qc_output_is_owned(owned, name, &e))
            QC_TRY(add_name(deleted, name, err));
    }
    return QC_OK;
}

qc_status qc_output_check_names(qc_replace_plan *plan, qc_arena *arena, const qc_file *root,
                                const qc_owned *owned, const char *const *names, size_t count,
                                int force, qc_error *err)
{
    name_list replaced = {.arena = arena}, deleted = {.arena = arena};
    qc_entry e;
    QC_TRY(qc_beneath_look(root, QC_MANIFEST_NAME, &e, err));
    QC_TRY(check_blocked(root, QC_MANIFEST_NAME, &e, err));
    QC_TRY(qc_output_check_weights(arena, root, owned, err));
    for (size_t i = 0; i < count; i++)
        QC_TRY(check_name(&replaced, root, owned, names[i], force, err));
    QC_TRY(find_deleted(&deleted, root, owned, names, count, err));
    *plan = (qc_replace_plan){replaced.names, replaced.count, deleted.names, deleted.count};
    return QC_OK;
}

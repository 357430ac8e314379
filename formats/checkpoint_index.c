/* Which files hold the weights, and what the index says about them: what transformers 5.24 would
 * load (_get_resolved_checkpoint_files and _load_pretrained_model in modeling_utils.py), with a
 * warning where vLLM 0.32 (model_loader/weight_utils.py) takes others. STEM is first "model", as in
 * transformers, then "diffusion_pytorch_model", as in diffusers:
 *
 *   transformers_weights of config.json, a file or an index
 *   else model.safetensors[.zst], unless an index beside it lists that file, too
 *   else STEM.safetensors.index.json   it says which files; shard names are never interpreted
 *   else STEM.safetensors[.zst]
 *   else exactly one *.safetensors[.zst] or STEM.safetensors.index.VARIANT.json in the directory
 *   else an adapter's *.safetensors
 *   else refused, with what was found instead
 *
 * An index names files as they are uncompressed: where "x.safetensors" is missing, the file
 * "x.safetensors.zst" stands for it (qconv's own output). */
#include "formats/checkpoint_internal.h"

#include "base/text.h"
#include "formats/foreign_file.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INDEX_MAX_BYTES  QC_ST_MAX_HEADER_BYTES
#define NAME_SHOWN_BYTES 160
#define ST_SUFFIX        ".safetensors"
#define ST_ZST_SUFFIX    ".safetensors.zst"
#define SINGLE_NAME      "model.safetensors"

/* ---- the index's text ---- */

/* Says what is wrong with a file name of the index; NULL if nothing is. */
static const char *bad_file_name(const char *name)
{
    if (name[0] == '\0')
        return "it is empty";
    if (name[0] == '/')
        return "absolute paths are not accepted";
    if (strchr(name, '\\'))
        return "it contains a backslash";
    if (((name[0] >= 'a' && name[0] <= 'z') || (name[0] >= 'A' && name[0] <= 'Z')) &&
        name[1] == ':')
        return "it begins with a drive letter";
    if (!qc_is_plain_path(name))
        return "it is not a plain path below the directory";
    if (!qc_ends_with(name, ST_SUFFIX))
        return "it does not end in .safetensors";
    return NULL;
}

/* Sets out->files to the distinct values of weight_map. */
static qc_status collect_files(qc_checkpoint_index *out, qc_arena *arena, const qc_json_node *map,
                               qc_error *err)
{
    size_t n = 0;
    const char **values = NULL;
    QC_TRY(qc_arena_alloc(arena, &values, out->entry_count, sizeof *values, err));
    for (const qc_json_node *m = qc_json_first(map); m; m = qc_json_next(m))
        QC_TRY(qc_json_as_string(m, "a file name in weight_map", &values[n++], err));
    qsort(values, n, sizeof *values, qc_by_text);
    out->files = values;
    for (size_t i = 0; i < n; i++) {
        if (out->file_count && strcmp(values[out->file_count - 1], values[i]) == 0)
            continue;
        const char *bad = bad_file_name(values[i]);
        if (bad)
            QC_FAIL(err, QC_ERR_INPUT, "file name " QC_NAME " in weight_map: %s", values[i], bad);
        /* The string still belongs to the JSON document. */
        QC_TRY(qc_arena_strdup(arena, &values[out->file_count++], values[i], err));
    }
    return QC_OK;
}

static qc_status collect_entries(qc_checkpoint_index *out, qc_arena *arena, const qc_json_node *map,
                                 qc_error *err)
{
    size_t n = 0;
    QC_TRY(qc_arena_alloc(arena, &out->entries, out->entry_count, sizeof *out->entries, err));
    for (const qc_json_node *m = qc_json_first(map); m; m = qc_json_next(m)) {
        const char *value = qc_json_string_or(m, "");
        const char *key = qc_json_key(m);
        const char **hit =
            bsearch(&value, out->files, out->file_count, sizeof *out->files, qc_by_text);
        if (!hit)
            QC_FAIL(err, QC_ERR_INTERNAL, "a file of weight_map was lost");
        out->entries[n].file = (uint32_t)(hit - out->files);
        QC_TRY(qc_arena_strdup(arena, &out->entries[n].name, key, err));
        n++;
    }
    qsort(out->entries, n, sizeof *out->entries, qc_by_text);
    return QC_OK;
}

static qc_status read_index(qc_checkpoint_index *out, qc_arena *arena, const qc_json_node *root,
                            qc_error *err)
{
    const qc_json_node *map = qc_json_get(root, "weight_map");
    const qc_json_node *total = qc_json_get(qc_json_get(root, "metadata"), "total_size");
    QC_TRY(qc_json_expect(root, QC_JSON_OBJECT, "text", err));
    QC_TRY(qc_json_expect(map, QC_JSON_OBJECT, "weight_map", err));
    out->entry_count = qc_json_count(map);
    if (out->entry_count == 0)
        QC_FAIL(err, QC_ERR_INPUT, "weight_map is empty");
    if (total && qc_json_kind_of(total) == QC_JSON_NUMBER) {
        QC_TRY(qc_json_as_double(total, "total_size", &out->total_size, err));
        out->has_total_size = 1;
    }
    QC_TRY(collect_files(out, arena, map, err));
    return collect_entries(out, arena, map, err);
}

qc_status qc_checkpoint_index_parse(qc_checkpoint_index *out, qc_arena *arena, const char *text,
                                    size_t len, qc_error *err)
{
    qc_json *doc = NULL;
    memset(out, 0, sizeof *out);
    qc_status st = qc_json_parse(&doc, text, len, 0, err);
    if (st == QC_OK)
        st = read_index(out, arena, qc_json_root(doc), err);
    if (st != QC_OK)
        memset(out, 0, sizeof *out);
    qc_json_destroy(doc);
    return st;
}

/* ---- the directory ---- */

static int in_tree(const qc_tree_file *tree, size_t count, const char *path)
{
    return bsearch(&path, tree, count, sizeof *tree, qc_by_text) != NULL;
}

/* Sets files[i] to name, at "dir/name" or "dir/name.zst"; path is NULL when there is neither. */
static qc_status find_file(qc_checkpoint *c, qc_checkpoint_file *f, const char *name, qc_error *err)
{
    const char *plain = NULL;
    const char *packed = NULL;
    qc_path_kind plain_kind, packed_kind;
    QC_TRY(qc_arena_strdup(&c->arena, &f->name, name, err));
    QC_TRY(qc_path_join(&c->arena, &plain, c->path, name, err));
    QC_TRY(qc_arena_printf(&c->arena, &packed, err, "%s.zst", plain));
    QC_TRY(qc_path_stat(plain, &plain_kind, NULL, err));
    QC_TRY(qc_path_stat(packed, &packed_kind, NULL, err));
    const int has_plain = plain_kind != QC_PATH_MISSING;
    const int has_packed = packed_kind != QC_PATH_MISSING;
    if (has_plain && has_packed && !c->lists_packed)
        QC_TRY(qc_checkpoint_warn(
            c, err, "both " QC_NAME " and its .zst are there; the first is read", name));
    f->path = has_packed && (c->lists_packed || !has_plain) ? packed : has_plain ? plain : NULL;
    return QC_OK;
}

static qc_status alloc_files(qc_checkpoint *c, size_t count, qc_error *err)
{
    QC_TRY(qc_arena_alloc(&c->arena, &c->files, count, sizeof *c->files, err));
    c->file_count = count;
    return QC_OK;
}

/* Reads the index `name`. Sets c->files and `missing`; the path of a missing file is NULL. */
static qc_status read_files(qc_checkpoint *c, qc_arena *index_arena, qc_checkpoint_index *index,
                            const char *name, qc_checkpoint_names *missing, qc_error *err)
{
    qc_strbuf text;
    const char *path = NULL;
    qc_status st = QC_OK;
    qc_strbuf_init(&text, INDEX_MAX_BYTES);
    QC_TRY(qc_path_join(&c->arena, &path, c->path, name, err));
    QC_TRY_GOTO(st, done, qc_file_slurp(path, &text, err));
    st = qc_checkpoint_index_parse(index, index_arena, text.data ? text.data : "", text.len, err);
    index->file_name = name;
    if (st != QC_OK)
        qc_foreign_say(err, "", path, text.data, text.len);
done:
    qc_strbuf_deinit(&text);
    QC_TRY(st);
    QC_TRY(alloc_files(c, index->file_count, err));
    for (size_t i = 0; i < index->file_count; i++) {
        QC_TRY(find_file(c, &c->files[i], index->files[i], err));
        if (!c->files[i].path)
            qc_checkpoint_names_add(missing, index->files[i]);
    }
    return QC_OK;
}

static qc_status locate_by_index(qc_checkpoint *c, qc_arena *index_arena,
                                 qc_checkpoint_index *index, const char *name, qc_error *err)
{
    qc_checkpoint_names missing = {0};
    QC_TRY(read_files(c, index_arena, index, name, &missing, err));
    if (missing.count == 0)
        return QC_OK;
    const qc_checkpoint_entry *lost = NULL; /* the first tensor of a missing file */
    for (size_t i = 0; i < index->entry_count && !lost; i++)
        lost = c->files[index->entries[i].file].path ? NULL : &index->entries[i];
    QC_FAIL(err, QC_ERR_INPUT,
            "%s: %zu of the %zu files that %s names are missing: %s; the first missing tensor "
            "is " QC_NAME "; download them, too",
            c->path, missing.count, index->file_count, name, qc_checkpoint_names_text(&missing),
            lost ? lost->name : "");
}

/* There is no .safetensors file: the message says what is there instead. */
static qc_status fail_without_weights(const qc_checkpoint *c, const qc_tree_file *tree,
                                      size_t count, qc_error *err)
{
    static const char *const foreign[] = {".gguf", ".ggml", ".h5", ".msgpack", ".onnx", ".npz"};
    qc_checkpoint_names found = {0};
    qc_checkpoint_names torch = {0};
    const char *below = NULL, *partial = NULL;
    for (size_t i = 0; i < count; i++) {
        const char *path = tree[i].path;
        if (!below && strchr(path, '/') && *path != '.' &&
            (qc_ends_with(path, ST_SUFFIX) || qc_ends_with(path, ST_ZST_SUFFIX)))
            below = path;
        if (!partial && qc_ends_with(path, ".incomplete"))
            partial = path;
        if (qc_checkpoint_name_is_torch(tree[i].path))
            qc_checkpoint_names_add(&torch, tree[i].path);
        for (size_t k = 0; k < sizeof foreign / sizeof *foreign; k++) {
            if (qc_ends_with(tree[i].path, foreign[k]))
                qc_checkpoint_names_add(&found, tree[i].path);
        }
    }
    if (torch.count)
        return qc_checkpoint_refuse_torch(c->path, qc_checkpoint_names_text(&torch), err);
    if (found.count)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s has no .safetensors file, but only weights in formats that qconv does not "
                "read: %s; take the checkpoint that they were made from",
                c->path, qc_checkpoint_names_text(&found));
    if (partial)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s has no .safetensors file, but %s, which is not whole: download it again",
                c->path, partial);
    QC_FAIL(err, QC_ERR_INPUT,
            "%s has no .safetensors file; give the folder that has the weights%s%s%s%.*s", c->path,
            below ? ", such as " : "", below ? c->path : "", below ? "/" : "",
            below ? (int)(strrchr(below, '/') - below) : 0, below ? below : "");
}

static int is_safetensors(const char *path)
{
    return !strchr(path, '/') && path[0] != '.' &&
           (qc_ends_with(path, ST_SUFFIX) || qc_ends_with(path, ST_ZST_SUFFIX));
}

/* Returns whether the tree has an index of this variant's shards. */
static int has_index_of(const qc_tree_file *tree, size_t count, const qc_checkpoint_name *shard)
{
    qc_checkpoint_name n;
    for (size_t i = 0; i < count; i++) {
        if (qc_checkpoint_name_read(&n, tree[i].path) && n.index &&
            n.variant_len == shard->variant_len && !n.torch &&
            strncmp(n.variant, shard->variant, n.variant_len) == 0)
            return 1;
    }
    return 0;
}

typedef struct {
    const char *name; /* the one that decides, without .zst; NULL: none */
    int is_index;
    qc_checkpoint_names found; /* all that could be the model */
    size_t found_variants;
} candidates;

/* Finds files or indexes that could be the model, where none has the name that says so. */
static qc_status find_candidates(candidates *out, qc_checkpoint *c, const qc_tree_file *tree,
                                 size_t count, qc_error *err)
{
    memset(out, 0, sizeof *out);
    for (size_t i = 0; i < count; i++) {
        const char *path = tree[i].path;
        size_t len = strlen(path) - (qc_ends_with(path, ".zst") ? strlen(".zst") : 0);
        qc_checkpoint_name n;
        int known = qc_checkpoint_name_read(&n, path);
        int variant = known && n.variant && !n.torch;
        if (qc_checkpoint_name_is_adapter(path) || (n.index ? !variant : !is_safetensors(path)))
            continue;
        if (variant && n.shard && has_index_of(tree, count, &n))
            continue;
        /* x.safetensors and x.safetensors.zst are neighbours and one file. */
        if (out->name && strlen(out->name) == len && strncmp(out->name, path, len) == 0)
            continue;
        QC_TRY(qc_arena_strndup(&c->arena, &out->name, path, len, err));
        qc_checkpoint_names_add(&out->found, out->name);
        out->found_variants += variant != 0;
        out->is_index = n.index;
    }
    if (out->found.count > 1 && out->found_variants == out->found.count)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s has %zu variants of the weights, and not the weights themselves: %s; give one "
                "of them as MODEL",
                c->path, out->found.count, qc_checkpoint_names_text(&out->found));
    if (out->found.count > 1)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s has %zu .safetensors files, but no %s that says what belongs together: %s",
                c->path, out->found.count, QC_CHECKPOINT_INDEX_NAME,
                qc_checkpoint_names_text(&out->found));
    return QC_OK;
}

static qc_status use_file(qc_checkpoint *c, const char *name, qc_error *err)
{
    QC_TRY(alloc_files(c, 1, err));
    QC_TRY(find_file(c, c->files, name, err));
    if (!c->files->path)
        QC_FAIL(err, QC_ERR_IO, "%s: " QC_NAME " disappeared while it was opened", c->path, name);
    return QC_OK;
}

/* Returns the first of names that is in the tree (a .safetensors may be .zst there), or NULL. */
static const char *first_of(const char *const *names, size_t n, const qc_tree_file *tree,
                            size_t count)
{
    for (size_t i = 0; i < n; i++) {
        char packed[64];
        (void)snprintf(packed, sizeof packed, "%s.zst", names[i]);
        if (in_tree(tree, count, names[i]) ||
            (qc_ends_with(names[i], ST_SUFFIX) && in_tree(tree, count, packed)))
            return names[i];
    }
    return NULL;
}

/* Refuses a folder of several models, none of which is the whole. */
static qc_status refuse_pipeline(const char *folder, const qc_tree_file *tree, size_t count,
                                 qc_error *err)
{
    qc_checkpoint_names parts = {0};
    char last[NAME_SHOWN_BYTES] = "";
    for (size_t i = 0; i < count; i++) {
        const char *slash = strchr(tree[i].path, '/');
        size_t len = slash ? (size_t)(slash - tree[i].path) : 0;
        qc_checkpoint_name n;
        if (len == 0 || len >= sizeof last || !qc_checkpoint_name_read(&n, slash + 1) ||
            (strlen(last) == len && strncmp(last, tree[i].path, len) == 0))
            continue;
        memcpy(last, tree[i].path, len);
        last[len] = '\0';
        qc_checkpoint_names_add(&parts, last);
    }
    QC_FAIL(err, QC_ERR_INPUT,
            "%s is a diffusers pipeline (%s) and not one model; give the folder of one of its "
            "parts: %s (convert, verify and unpack of the Python package walk them all)",
            folder, QC_CHECKPOINT_PIPELINE_NAME,
            parts.count ? qc_checkpoint_names_text(&parts) : "none");
}

static int is_pipeline(const qc_tree_file *tree, size_t count)
{
    return in_tree(tree, count, QC_CHECKPOINT_PIPELINE_NAME) &&
           !in_tree(tree, count, "config.json");
}

qc_status qc_checkpoint_check_single(const char *path, qc_error *err)
{
    qc_arena arena;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_tree_file *tree = NULL;
    size_t count = 0;
    const char *index = NULL;
    qc_arena_init(&arena);
    qc_status st = qc_path_join(&arena, &index, path, QC_CHECKPOINT_PIPELINE_NAME, err);
    if (st == QC_OK)
        st = qc_path_stat(index, &kind, NULL, err);
    if (st == QC_OK && kind == QC_PATH_FILE)
        st = qc_dir_tree(&arena, path, QC_CHECKPOINT_FILES_MOST, &tree, &count, err);
    if (st == QC_OK && kind == QC_PATH_FILE && is_pipeline(tree, count))
        st = refuse_pipeline(path, tree, count, err);
    qc_arena_deinit(&arena);
    return st;
}

/* Takes `single`, which lies beside the index `name`. An index that lists it as one of its files
 * (with more of them beside it) is read instead, since it holds all that is in the file. */
static qc_status take_single(qc_checkpoint *c, qc_arena *index_arena, qc_checkpoint_index *index,
                             const char *single, const char *name, int *has_index, qc_error *err)
{
    qc_checkpoint_names missing = {0};
    qc_error why = {0};
    const qc_status st = read_files(c, index_arena, index, name, &missing, &why);
    for (size_t i = 0; st == QC_OK && missing.count == 0 && i < index->file_count; i++)
        *has_index |= strcmp(index->files[i], single) == 0;
    if (*has_index)
        return QC_OK;
    if (st != QC_OK && st != QC_ERR_INPUT)
        return qc_error_pass(err, &why, st);
    QC_TRY(use_file(c, single, err));
    if (st != QC_OK)
        return qc_checkpoint_warn(c, err, "'%s' is read, and the index beside it is not: %s",
                                  single, why.msg);
    if (missing.count)
        return qc_checkpoint_warn(
            c, err,
            "'%s' is read, as transformers does, and '%s' is left out: %zu of its files "
            "are missing: %s",
            single, name, missing.count, qc_checkpoint_names_text(&missing));
    return qc_checkpoint_warn(
        c, err,
        "'%s' is read, as transformers does; vLLM reads the files that '%s' names "
        "instead, which may hold another model; to convert those, give the index as MODEL",
        single, name);
}

/* Takes the file or index that config.json names. */
static qc_status take_named(qc_checkpoint *c, const qc_tree_file *tree, size_t count,
                            const char *name, qc_arena *index_arena, qc_checkpoint_index *index,
                            const char *others, int *has_index, qc_error *err)
{
    const char *bad = NULL;
    *has_index = qc_ends_with(name, ".safetensors.index.json");
    if (!*has_index)
        bad = bad_file_name(name);
    else if (!qc_is_plain_path(name))
        bad = "it is not a plain path below the directory";
    if (!bad && !first_of(&name, 1, tree, count))
        bad = "there is no such file; download it, too";
    if (bad)
        QC_FAIL(err, QC_ERR_INPUT, "%s: transformers_weights of config.json is " QC_NAME ": %s",
                c->path, name, bad);
    if (others && strcmp(others, name) != 0)
        QC_TRY(qc_checkpoint_warn(c, err,
                                  QC_NAME
                                  " is read, which config.json has as transformers_weights; "
                                  "vLLM reads '%s' instead",
                                  name, others));
    return *has_index ? locate_by_index(c, index_arena, index, name, err) : use_file(c, name, err);
}

qc_status qc_checkpoint_locate(qc_checkpoint *c, const qc_tree_file *tree, size_t count,
                               const char *chosen, qc_arena *index_arena,
                               qc_checkpoint_index *index, int *has_index, qc_error *err)
{
    static const char *const indexes[] = {QC_CHECKPOINT_INDEX_NAME,
                                          QC_CHECKPOINT_DIFFUSERS_STEM ".safetensors.index.json"};
    static const char *const singles[] = {SINGLE_NAME, QC_CHECKPOINT_DIFFUSERS_STEM ST_SUFFIX};
    candidates found;
    *has_index = 0;
    if (is_pipeline(tree, count))
        return refuse_pipeline(c->path, tree, count, err);
    if (chosen && qc_checkpoint_name_is_torch(chosen))
        return fail_without_weights(c, tree, count, err);
    const char *name = chosen ? chosen : first_of(indexes, 2, tree, count);
    const char *single = first_of(singles, name ? 1 : 2, tree, count);
    const qc_json_node *own =
        c->config && !chosen ? qc_json_get(qc_json_root(c->config), QC_CONFIG_WEIGHTS) : NULL;
    if (own && qc_json_kind_of(own) == QC_JSON_STRING)
        return take_named(c, tree, count, qc_json_string_or(own, ""), index_arena, index,
                          name ? name : single, has_index, err);
    if (single && name == indexes[0])
        return take_single(c, index_arena, index, single, name, has_index, err);
    if (name) {
        *has_index = 1;
        return locate_by_index(c, index_arena, index, name, err);
    }
    if (single)
        return use_file(c, single, err);
    QC_TRY(find_candidates(&found, c, tree, count, err));
    *has_index = found.is_index;
    if (found.name && found.is_index)
        return locate_by_index(c, index_arena, index, found.name, err);
    if (found.name)
        return use_file(c, found.name, err);
    for (size_t i = 0; i < count; i++) { /* refused later, by its name */
        if (!strchr(tree[i].path, '/') && is_safetensors(tree[i].path) &&
            qc_checkpoint_name_is_adapter(tree[i].path))
            return use_file(c, tree[i].path, err);
    }
    return fail_without_weights(c, tree, count, err);
}

/* ---- index against files ---- */

/* transformers and vLLM load what is in the files that an index names, whatever it says of single
 * tensors. So the files are believed here, too, and warnings say what the index has otherwise. */
qc_status qc_checkpoint_check_index(qc_checkpoint *c, const qc_checkpoint_index *index,
                                    qc_error *err)
{
    qc_checkpoint_names lost = {0}, unlisted = {0}, moved = {0};
    const char *elsewhere = NULL;
    size_t i = 0;
    size_t j = 0;
    QC_TRY(qc_arena_alloc(&c->arena, &c->lost, index->entry_count, sizeof *c->lost, err));
    while (i < index->entry_count || j < c->tensor_count) {
        /* One of the two may be behind the last, and is not looked at then. */
        const qc_checkpoint_entry *e = &index->entries[i];
        const qc_checkpoint_tensor *t = &c->tensors[j];
        const int order = i == index->entry_count ? 1
                          : j == c->tensor_count  ? -1
                                                  : strcmp(e->name, t->name);
        if (order < 0) {
            qc_checkpoint_names_add(&lost, e->name);
            QC_TRY(qc_arena_strdup(&c->arena, &c->lost[c->lost_count++], e->name, err));
        } else if (order > 0) {
            qc_checkpoint_names_add(&unlisted, t->name);
        } else if (e->file != t->file) {
            qc_checkpoint_names_add(&moved, t->name);
            elsewhere = elsewhere ? elsewhere : index->files[e->file];
        }
        i += order <= 0;
        j += order >= 0;
    }
    if (lost.count)
        QC_TRY(qc_checkpoint_warn(c, err, "%zu tensor%s of %s %s in no file: %s", lost.count,
                                  qc_plural(lost.count), index->file_name, qc_are(lost.count),
                                  qc_checkpoint_names_text(&lost)));
    if (unlisted.count)
        QC_TRY(qc_checkpoint_warn(c, err,
                                  "%zu tensor%s of the files %s not in %s, and %s read all the "
                                  "same, as transformers and vLLM do: %s",
                                  unlisted.count, qc_plural(unlisted.count), qc_are(unlisted.count),
                                  index->file_name, qc_are(unlisted.count),
                                  qc_checkpoint_names_text(&unlisted)));
    if (moved.count)
        return qc_checkpoint_warn(c, err,
                                  "%s says that %zu tensor%s %s in another file than the one that "
                                  "is read (the first in " QC_NAME "), and is not believed: %s",
                                  index->file_name, moved.count, qc_plural(moved.count),
                                  qc_are(moved.count), elsewhere, qc_checkpoint_names_text(&moved));
    return QC_OK;
}

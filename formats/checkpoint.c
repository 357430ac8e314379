/* Opening takes these steps, and ends at the first one that finds something wrong:
 *
 *   config.json                  (checkpoint_side.c)
 *   locate (checkpoint_index.c)  index or single file -> names, all present
 *   open                         every header, every size
 *   merge                        one sorted array of tensors, no name twice
 *   compare                      warnings where the index has other tensors than the files
 *   side files                   (checkpoint_side.c)
 *   unwrap                       names without what training put around the modules
 *
 * Names of tensors belong to the checkpoint's arena: headers and index are freed once they are
 * merged and compared. */
#include "formats/checkpoint.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "formats/checkpoint_internal.h"
#include "formats/manifest_header.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* ---- the files ---- */

static qc_status open_files(qc_checkpoint *c, qc_error *err)
{
    qc_file_allow_many(c->file_count);
    for (size_t i = 0; i < c->file_count; i++) {
        qc_checkpoint_file *f = &c->files[i];
        QC_TRY(qc_st_file_open(&f->st, f->path, err));
        f->tensor_count = f->st.header.tensor_count;
        f->tensor_bytes = f->st.header.data_bytes;
        f->file_bytes = f->st.file_bytes;
        f->stamp = f->st.stamp;
        f->compressed = f->st.compressed;
    }
    return QC_OK;
}

static qc_status note_unknown_fields(qc_checkpoint *c, qc_error *err)
{
    size_t fields = 0;
    size_t files = 0;
    const char *first = NULL;
    for (size_t i = 0; i < c->file_count; i++) {
        size_t n = c->files[i].st.header.unknown_fields;
        fields += n;
        files += n != 0;
        if (n && !first)
            first = c->files[i].name;
    }
    if (!first)
        return QC_OK;
    return qc_checkpoint_warn(
        c, err,
        "tensor entries have %zu members besides dtype, shape and data_offsets in "
        "%zu files (the first is " QC_NAME "); they are ignored",
        fields, files, first);
}

/* ---- tensors ---- */

static int compare_tensors(const void *va, const void *vb)
{
    const qc_checkpoint_tensor *a = va;
    const qc_checkpoint_tensor *b = vb;
    int order = strcmp(a->name, b->name);
    return order != 0 ? order : (a->file > b->file) - (a->file < b->file);
}

static qc_status add_safetensors(qc_checkpoint *c, uint32_t file, qc_error *err)
{
    const qc_st_header *h = &c->files[file].st.header;
    for (size_t j = 0; j < h->tensor_count; j++) {
        const qc_st_tensor *from = &h->tensors[j];
        qc_checkpoint_tensor *to = &c->tensors[c->tensor_count++];
        QC_TRY(qc_arena_strdup(&c->arena, &to->name, from->name, err));
        to->dtype = from->dtype;
        to->ndim = from->ndim;
        memcpy(to->dims, from->dims, sizeof to->dims);
        to->bytes = from->end - from->begin;
        to->begin = from->begin;
        to->file = file;
    }
    return QC_OK;
}

/* Of tensors with one name, the one in the last file counts: transformers 5.24 and vLLM 0.32 load
 * the files by their sorted names, one over the other. (An overlay has some weights anew.) */
static qc_status drop_twins(qc_checkpoint *c, uint64_t *twin_bytes, qc_error *err)
{
    qc_checkpoint_names twins = {0};
    size_t kept = 0;
    const char *last = NULL;
    for (size_t i = 0; i < c->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &c->tensors[i];
        if (i + 1 == c->tensor_count || strcmp(t->name, t[1].name) != 0) {
            c->tensors[kept++] = *t;
            continue;
        }
        qc_checkpoint_names_add(&twins, t->name);
        last = last ? last : c->files[t[1].file].name;
        *twin_bytes += t->bytes;
    }
    c->tensor_count = kept;
    c->tensor_bytes -= *twin_bytes;
    if (!twins.count)
        return QC_OK;
    return qc_checkpoint_warn(c, err,
                              "%zu tensor%s %s in two files, of which the last by name counts, as "
                              "in transformers and vLLM (the first is read from " QC_NAME "): %s",
                              twins.count, qc_plural(twins.count), qc_are(twins.count), last,
                              qc_checkpoint_names_text(&twins));
}

/* *twin_bytes: of tensors that another file has anew. */
static qc_status merge_tensors(qc_checkpoint *c, uint64_t *twin_bytes, qc_error *err)
{
    *twin_bytes = 0;
    size_t count = 0;
    for (size_t i = 0; i < c->file_count; i++)
        count += c->files[i].tensor_count;
    QC_TRY(qc_arena_alloc(&c->arena, &c->tensors, count, sizeof *c->tensors, err));
    for (size_t i = 0; i < c->file_count; i++) {
        QC_TRY(add_safetensors(c, (uint32_t)i, err));
        if (qc_add_u64(c->tensor_bytes, c->files[i].tensor_bytes, &c->tensor_bytes))
            QC_FAIL(err, QC_ERR_INPUT, "%s: the sizes of all tensors together overflow 64 bits",
                    c->path);
    }
    qsort(c->tensors, c->tensor_count, sizeof *c->tensors, compare_tensors);
    return drop_twins(c, twin_bytes, err);
}

static int compare_meta(const void *va, const void *vb)
{
    const qc_st_meta *a = va;
    const qc_st_meta *b = vb;
    int order = strcmp(a->key, b->key);
    return order != 0 ? order : strcmp(a->value, b->value);
}

static qc_status merge_meta(qc_checkpoint *c, qc_error *err)
{
    size_t count = 0;
    size_t n = 0;
    for (size_t i = 0; i < c->file_count; i++)
        count += c->files[i].st.header.meta_count;
    QC_TRY(qc_arena_alloc(&c->arena, &c->meta, count, sizeof *c->meta, err));
    for (size_t i = 0; i < c->file_count; i++) {
        const qc_st_header *h = &c->files[i].st.header;
        if (h->meta_count)
            memcpy(c->meta + n, h->meta, h->meta_count * sizeof *h->meta);
        n += h->meta_count;
    }
    qsort(c->meta, n, sizeof *c->meta, compare_meta);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || compare_meta(&c->meta[i - 1], &c->meta[i]) != 0)
            c->meta[c->meta_count++] = c->meta[i];
    }
    for (size_t i = 0; i < c->meta_count; i++) {
        qc_st_meta *m = &c->meta[i];
        QC_TRY(qc_arena_strdup(&c->arena, &m->key, m->key, err));
        QC_TRY(qc_arena_strdup(&c->arena, &m->value, m->value, err));
    }
    return QC_OK;
}

/* ---- a folder with a manifest ---- */

static void tensor_at(const void *ctx, size_t i, qc_header_tensor *out)
{
    const qc_checkpoint *c = ctx;
    const qc_checkpoint_tensor *t = &c->tensors[i];
    out->shard = c->files[t->file].name;
    out->tensor = (qc_st_tensor){.name = t->name,
                                 .dtype = t->dtype,
                                 .ndim = t->ndim,
                                 .begin = t->begin,
                                 .end = t->begin + t->bytes};
    memcpy(out->tensor.dims, t->dims, sizeof out->tensor.dims);
}

/* Loads the manifest of a folder, if it has an undamaged one: what that lists is what is read.
 * Judging a damaged one is left to verify. */
static qc_status find_manifest(qc_checkpoint *c, const qc_tree_file *tree, size_t tree_count,
                               qc_arena *arena, qc_manifest *m, int *found, qc_error *err)
{
    qc_error trouble = {0};
    const char *name = QC_MANIFEST_NAME;
    if (!bsearch(&name, tree, tree_count, sizeof *tree, qc_by_text))
        return QC_OK;
    qc_status st = qc_manifest_load(m, arena, c->path, &trouble);
    *found = st == QC_OK;
    c->lists_packed = *found && m->compressed;
    if (st == QC_OK || st == QC_ERR_CHECK || st == QC_ERR_INPUT)
        return QC_OK;
    return qc_error_pass(err, &trouble, st);
}

/* ---- names of wrapped modules ---- */

/* What torch.compile, FSDP and checkpointing of activations put between a module and its name. No
 * module is called so, and torch (clean_tensor_name in fsdp/_common_utils.py of 2.15) takes them
 * out wherever they stand. */
static const char *const wrappers[] = {"_orig_mod.", "_fsdp_wrapped_module.",
                                       "_checkpoint_wrapped_module."};
/* What stands before all names of a model that was saved from within DataParallel, peft or a class
 * of somebody's own. "model." is taken off once where what is behind it begins so, too. */
static const char *const outsides[] = {"module.", "base_model.model.", "model."};

/* Do the names of all tensors begin so? */
static int all_begin(const qc_checkpoint_tensor *tensors, size_t count, const char *text)
{
    const size_t n = strlen(text);
    const int doubled = strcmp(text, "model.") == 0;
    size_t behind = 0;
    for (size_t i = 0; i < count; i++) {
        const char *name = tensors[i].name;
        if (strncmp(name, text, n) != 0)
            return 0;
        if (doubled && strncmp(name + n, text, n) == 0)
            behind++;
        else if (doubled && !qc_begins_with(name + n, "lm_head."))
            return 0;
    }
    return count > 0 && (!doubled || behind > 0);
}

/* Takes a wrapper out of a name; returns whether it was there. */
static int take_out(char *name, const char *wrapper)
{
    const size_t n = strlen(wrapper);
    int found = 0;
    for (char *at = name; (at = strstr(at, wrapper)) != NULL; found = 1)
        memmove(at, at + n, strlen(at + n) + 1);
    return found;
}

/* Gives the tensors the names that loaders look for. Where two would have one name, or one has none
 * left, all keep those that they have. */
static qc_status unwrap(qc_checkpoint *c, qc_error *err)
{
    qc_checkpoint_tensor *t = NULL;
    qc_checkpoint_names taken = {0};
    int wrapped = 0;
    for (size_t k = 0; k < sizeof outsides / sizeof *outsides; k++)
        wrapped |= all_begin(c->tensors, c->tensor_count, outsides[k]);
    for (size_t i = 0; i < c->tensor_count && !wrapped; i++)
        for (size_t k = 0; k < sizeof wrappers / sizeof *wrappers; k++)
            wrapped |= strstr(c->tensors[i].name, wrappers[k]) != NULL;
    if (!wrapped)
        return QC_OK;
    QC_TRY(qc_arena_array(&c->arena, &t, c->tensor_count, err));
    memcpy(t, c->tensors, c->tensor_count * sizeof *t);
    for (size_t k = 0; k < sizeof wrappers / sizeof *wrappers; k++) {
        int found = 0;
        for (size_t i = 0; i < c->tensor_count; i++) {
            char *name = NULL;
            if (!strstr(t[i].name, wrappers[k]))
                continue;
            QC_TRY(qc_arena_array(&c->arena, &name, strlen(t[i].name) + 1, err));
            memcpy(name, t[i].name, strlen(t[i].name) + 1);
            found |= take_out(name, wrappers[k]);
            t[i].name = name;
        }
        if (found)
            qc_checkpoint_names_add(&taken, wrappers[k]);
    }
    for (size_t k = 0; k < sizeof outsides / sizeof *outsides; k++) {
        while (all_begin(t, c->tensor_count, outsides[k])) {
            qc_checkpoint_names_add(&taken, outsides[k]);
            for (size_t i = 0; i < c->tensor_count; i++)
                t[i].name += strlen(outsides[k]);
        }
    }
    qsort(t, c->tensor_count, sizeof *t, qc_by_text);
    if (t->name[0] == '\0' || qc_find_twice(t, c->tensor_count, sizeof *t) > 0)
        return QC_OK;
    c->tensors = t;
    return qc_checkpoint_warn(c, err,
                              "%s: its names are those of wrapped modules; without %s, as loaders "
                              "look for them, the first is " QC_NAME,
                              c->path, qc_checkpoint_names_text(&taken), t->name);
}

/* Checks that the headers have the tensors that a manifest lists. QC_ERR_INPUT names the first that
 * differs. */
static qc_status check_manifest(const qc_checkpoint *c, const qc_manifest *m, qc_error *err)
{
    qc_status st = qc_manifest_hold(m, 0, m->tensor_count, tensor_at, c, c->tensor_count, err);
    if (st != QC_ERR_CHECK)
        return st;
    qc_error_prefix(err, "%s", c->path);
    return qc_error_recode(err, QC_ERR_INPUT);
}

/* ---- opening ---- */

/* arena is for the index and the manifest, which nobody needs after this. chosen: the name of the
 * index, or NULL. */
static qc_status open_dir(qc_checkpoint *c, const char *chosen, qc_arena *arena, qc_error *err)
{
    qc_checkpoint_index index = {0};
    qc_manifest m;
    int has_manifest = 0;
    qc_tree_file *tree = NULL;
    size_t tree_count = 0;
    uint64_t twin_bytes = 0;
    int has_index = 0;
    c->is_dir = 1;
    QC_TRY(qc_dir_tree(&c->arena, c->path, QC_CHECKPOINT_FILES_MOST, &tree, &tree_count, err));
    QC_TRY(find_manifest(c, tree, tree_count, arena, &m, &has_manifest, err));
    QC_TRY(qc_checkpoint_read_config(c, tree, tree_count, err));
    QC_TRY(qc_checkpoint_locate(c, tree, tree_count, chosen, arena, &index, &has_index, err));
    QC_TRY(open_files(c, err));
    QC_TRY(merge_tensors(c, &twin_bytes, err));
    if (has_index)
        QC_TRY(qc_checkpoint_check_index(c, &index, err));
    if (has_manifest)
        QC_TRY(check_manifest(c, &m, err));
    QC_TRY(qc_checkpoint_find_side(c, tree, tree_count, err));
    const char *manifest = QC_MANIFEST_NAME;
    qc_checkpoint_judge_kind(c);
    if (!c->is_adapter && !bsearch(&manifest, tree, tree_count, sizeof *tree, qc_by_text))
        QC_TRY(unwrap(c, err));
    /* A double holds every size below 8 PiB exactly; beyond that only a warning could be wrong. */
    if (!has_index || !index.has_total_size || twin_bytes != 0 ||
        index.total_size == (double)c->tensor_bytes)
        return QC_OK;
    return qc_checkpoint_warn(c, err,
                              "%s says total_size %.0f, the tensors have %" PRIu64
                              " bytes; the files are believed",
                              index.file_name, index.total_size, c->tensor_bytes);
}

static qc_status open_single(qc_checkpoint *c, qc_error *err)
{
    const char *name = qc_last_name(c->path);
    size_t len = strlen(name);
    uint64_t twin_bytes = 0;
    QC_TRY(qc_arena_alloc(&c->arena, &c->files, 1, sizeof *c->files, err));
    c->files->path = c->path;
    if (qc_ends_with(name, ".zst"))
        len -= strlen(".zst");
    QC_TRY(qc_arena_strndup(&c->arena, &c->files->name, name, len, err));
    if (qc_checkpoint_name_is_torch(name))
        return qc_checkpoint_refuse_torch(c->path, NULL, err);
    c->file_count = 1;
    QC_TRY(open_files(c, err));
    QC_TRY(merge_tensors(c, &twin_bytes, err));
    QC_TRY(qc_checkpoint_config_beside(c, err));
    qc_checkpoint_judge_kind(c);
    return c->is_adapter ? QC_OK : unwrap(c, err);
}

qc_status qc_checkpoint_folder_of_index(const char **folder, qc_arena *arena, const char *path,
                                        qc_error *err)
{
    const char *name = qc_last_name(path);
    qc_path_kind kind = QC_PATH_MISSING;
    qc_checkpoint_name n;
    *folder = path;
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE || !qc_checkpoint_name_read(&n, name) || !n.index)
        return QC_OK;
    size_t len = (size_t)(name - path);
    while (len > 1 && path[len - 1] == '/')
        len--;
    return qc_arena_strndup(arena, folder, len ? path : ".", len ? len : 1, err);
}

static qc_status open_any(qc_checkpoint *c, const char *path, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t bytes = 0;
    QC_TRY(qc_path_stat(path, &kind, &bytes, err));
    if (kind == QC_PATH_MISSING)
        QC_FAIL(err, QC_ERR_INPUT, "%s does not exist", path);
    if (kind == QC_PATH_OTHER)
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected a directory or a regular file, found neither",
                path);
    QC_TRY(qc_checkpoint_folder_of_index(&c->path, &c->arena, path, err));
    const char *chosen = NULL;
    if (c->path == path)
        QC_TRY(qc_arena_strdup(&c->arena, &c->path, path, err));
    else
        QC_TRY(qc_arena_strdup(&c->arena, &chosen, qc_last_name(path), err));
    if (kind == QC_PATH_DIR || chosen) {
        qc_arena index_arena;
        qc_arena_init(&index_arena);
        qc_status st = open_dir(c, chosen, &index_arena, err);
        qc_arena_deinit(&index_arena);
        QC_TRY(st);
    } else {
        QC_TRY(open_single(c, err));
    }
    QC_TRY(merge_meta(c, err));
    for (size_t i = 0; i < c->file_count; i++)
        qc_st_header_forget(&c->files[i].st.header);
    return note_unknown_fields(c, err);
}

qc_status qc_checkpoint_open(qc_checkpoint **out, const char *path, qc_error *err)
{
    *out = NULL;
    qc_checkpoint *c = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof *c, err));
    qc_arena_init(&c->arena);
    qc_status st = open_any(c, path, err);
    if (st != QC_OK) {
        qc_checkpoint_close(c);
        return st;
    }
    *out = c;
    return QC_OK;
}

void qc_checkpoint_close(qc_checkpoint *c)
{
    if (!c)
        return;
    for (size_t i = 0; i < c->file_count; i++) {
        if (c->files[i].st.serial != 0) /* 0: never opened, its fd 0 is not ours */
            qc_st_file_close(&c->files[i].st);
    }
    if (c->changes)
        c->changes->close(c->changes);
    qc_json_destroy(c->config);
    qc_free(c->config_text);
    qc_arena_deinit(&c->arena);
    qc_free(c);
}

/* ---- shapes only ---- */

static qc_status take_tensors(qc_checkpoint *c, const qc_checkpoint_tensor *tensors, size_t count,
                              qc_error *err)
{
    QC_TRY(qc_arena_alloc(&c->arena, &c->tensors, count, sizeof *c->tensors, err));
    for (size_t i = 0; i < count; i++) {
        qc_checkpoint_tensor *t = &c->tensors[i];
        *t = tensors[i];
        t->begin = 0;
        t->file = 0;
        QC_TRY(qc_arena_strdup(&c->arena, &t->name, t->name, err));
        QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &t->bytes, err));
        if (qc_add_u64(c->tensor_bytes, t->bytes, &c->tensor_bytes))
            QC_FAIL(err, QC_ERR_INPUT, "sizes of all tensors overflow 64 bits");
    }
    c->tensor_count = count;
    if (count)
        qsort(c->tensors, count, sizeof *c->tensors, qc_by_text);
    size_t twice = qc_find_twice(c->tensors, count, sizeof *c->tensors);
    if (twice)
        QC_FAIL(err, QC_ERR_INPUT, "tensor " QC_NAME " is there twice", c->tensors[twice].name);
    return QC_OK;
}

qc_status qc_checkpoint_create_shapes(qc_checkpoint **out, const char *path,
                                      const char *config_text, size_t config_len,
                                      const qc_checkpoint_tensor *tensors, size_t count,
                                      qc_error *err)
{
    *out = NULL;
    qc_checkpoint *c = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof *c, err));
    qc_arena_init(&c->arena);
    c->is_dir = 1;
    qc_strbuf text;
    qc_strbuf_init(&text, config_len);
    qc_status st = qc_arena_strdup(&c->arena, &c->path, path, err);
    if (st == QC_OK)
        st = qc_strbuf_add(&text, config_text, config_len, err);
    if (st == QC_OK)
        st = qc_checkpoint_take_config(c, &text, err);
    if (st == QC_OK)
        st = take_tensors(c, tensors, count, err);
    qc_strbuf_deinit(&text);
    if (st != QC_OK) {
        qc_error_prefix(err, "%s", path);
        qc_checkpoint_close(c);
        return st;
    }
    qc_checkpoint_judge_kind(c);
    *out = c;
    return QC_OK;
}

/* ---- use ---- */

const qc_checkpoint_tensor *qc_checkpoint_find(const qc_checkpoint *c, const char *name)
{
    return c->tensor_count
               ? bsearch(&name, c->tensors, c->tensor_count, sizeof *c->tensors, qc_by_text)
               : NULL;
}

uint32_t qc_checkpoint_beside(const qc_checkpoint *c, const char *stem, size_t stem_len,
                              const char *tail)
{
    char name[QC_ST_NAME_MOST + 1]; /* a longer one is no tensor's */
    const size_t tail_len = strlen(tail);
    if (stem_len + tail_len >= sizeof name)
        return UINT32_MAX;
    memcpy(name, stem, stem_len);
    memcpy(name + stem_len, tail, tail_len + 1);
    const qc_checkpoint_tensor *t = qc_checkpoint_find(c, name);
    return t ? (uint32_t)(t - c->tensors) : UINT32_MAX;
}

qc_status qc_checkpoint_read(const qc_checkpoint *c, qc_st_cursor *cur,
                             const qc_checkpoint_tensor *t, uint64_t offset, void *dst, size_t len,
                             qc_error *err)
{
    if (c->file_count == 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s has no weights: it was worked out from a configuration", c->path);
    if (offset > t->bytes || len > t->bytes - offset)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor " QC_NAME " has %" PRIu64 " bytes, but %zu at %" PRIu64 " were asked for",
                t->name, t->bytes, len, offset);
    if (t->change && !t->change->decoded)
        return t->change->read(c, cur, t, offset, dst, len, err);
    const qc_checkpoint_file *f = &c->files[t->file];
    return qc_st_file_read(&f->st, cur, t->begin + offset, dst, len, err);
}

qc_status qc_checkpoint_head_digest(const qc_checkpoint *c, size_t file, qc_digest *out,
                                    qc_error *err)
{
    const qc_st_file *f = &c->files[file].st;
    size_t len = (size_t)f->data_offset;
    void *buf = NULL;
    qc_st_cursor *cursor = NULL;
    qc_status st = qc_malloc(&buf, len, err);
    if (st == QC_OK)
        st = qc_st_cursor_create(&cursor, err);
    if (st == QC_OK)
        st = qc_st_file_read_header(f, cursor, buf, err);
    if (st == QC_OK)
        *out = qc_digest_bytes(buf, len);
    qc_st_cursor_destroy(cursor);
    qc_free(buf);
    return st;
}

qc_status qc_checkpoint_check_unchanged(const qc_checkpoint *c, size_t file, qc_error *err)
{
    const qc_checkpoint_file *f = &c->files[file];
    return qc_file_stamp_check(&f->stamp, &f->st.file, err);
}

void qc_checkpoint_stored_range(const qc_checkpoint *c, const qc_checkpoint_tensor *t,
                                uint64_t offset, uint64_t len, const qc_file **file,
                                uint64_t *begin, uint64_t *bytes)
{
    *file = NULL;
    *begin = *bytes = 0;
    if (c->file_count == 0 || len == 0 || offset > t->bytes || len > t->bytes - offset ||
        (t->change && t->change->scattered))
        return;
    if (t->change && !t->change->decoded) { /* F32 of elements that the file has in another dtype */
        const qc_checkpoint_tensor *stored = &t->change->stored;
        uint64_t each = qc_dtype_bits(stored->dtype) / 8, end = (offset + len + 3) / 4;
        offset = offset / 4 * each;
        len = end * each - offset;
        t = stored;
    }
    const qc_checkpoint_file *f = &c->files[t->file];
    *file = &f->st.file;
    *begin = t->begin + offset + f->st.data_offset;
    *bytes = len;
    if (!f->compressed)
        return;
    const qc_seek_table *seek = &f->st.seek;
    const qc_frame *first = &seek->frames[qc_seek_table_find(seek, *begin)];
    const qc_frame *last = &seek->frames[qc_seek_table_find(seek, *begin + len - 1)];
    *begin = first->stored_offset;
    *bytes = last->stored_offset + last->stored_bytes - *begin;
}

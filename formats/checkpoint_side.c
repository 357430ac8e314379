/* What of a checkpoint's directory is not weights: config, tokenizer, code, licence. All of it
 * belongs to a converted model as well, so the rule is what to leave out, not what to take. */
#include "formats/checkpoint_parts.h"
#include "formats/path_link.h"

#include <string.h>

#define CONFIG_NAME      "config.json"
#define CONFIG_MAX_BYTES (64u << 20)
#define NAME_SHOWN_BYTES 160

typedef struct {
    const char *prefix; /* of the file's own name */
    const char *suffix;
} name_pattern;

/* Weights in any format, their indexes, and what is no part of a checkpoint. In any folder. */
static const name_pattern left_out[] = {
    {"", ".safetensors"},
    {"", ".safetensors.zst"},
    {"", ".safetensors.index.json"},
    {"", ".bin.index.json"},
    {"pytorch_model", ".bin"},
    {"consolidated.", ""},
    {"", ".pth"},
    {"", ".pt"},
    {"", ".ckpt"},
    {"", ".gguf"},
    {"", ".h5"},
    {"", ".msgpack"},
    {"", ".onnx"},
    {"", ".tmp"},
    {".", ""},
};

/* What trainers leave beside the weights as pickles: loading one runs whatever it says, so none is
 * handed on. In any folder. */
static const name_pattern pickles[] = {
    {"training_args", ".bin"}, {"optimizer", ".bin"}, {"scheduler", ".bin"}, {"", ".pkl"},
    {"", ".pickle"},
};

/* Written by qconv itself for one output; only at the top. */
static const char *const own_files[] = {"qconv.json", "device_map.json"};
/* The same weights again under other names (Llama 3, gpt-oss). */
static const char *const twin_folders[] = {"original/", "metal/"};

static int has_prefix(const char *name, const char *prefix)
{
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

static int in_twin_folder(const char *path)
{
    for (size_t i = 0; i < sizeof twin_folders / sizeof *twin_folders; i++) {
        if (has_prefix(path, twin_folders[i]))
            return 1;
    }
    return 0;
}

static int matches(const name_pattern *list, size_t count, const char *path)
{
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    for (size_t i = 0; i < count; i++) {
        if (has_prefix(name, list[i].prefix) && qc_ends_with(name, list[i].suffix))
            return 1;
    }
    return 0;
}

static int is_pickle(const char *path)
{
    return matches(pickles, sizeof pickles / sizeof *pickles, path);
}

static int is_side_file(const char *path)
{
    if (in_twin_folder(path))
        return 0;
    for (size_t i = 0; i < sizeof own_files / sizeof *own_files; i++) {
        if (strcmp(path, own_files[i]) == 0)
            return 0;
    }
    return !matches(left_out, sizeof left_out / sizeof *left_out, path) && !is_pickle(path);
}

/* Is this path one of the files opened? */
static int is_read(const qc_checkpoint *c, const char *path)
{
    for (size_t i = 0; i < c->file_count; i++) {
        size_t n = strlen(c->files[i].name);
        if (strncmp(path, c->files[i].name, n) == 0 &&
            (path[n] == '\0' || strcmp(path + n, ".zst") == 0))
            return 1;
    }
    return 0;
}

qc_status qc_ckpt_find_side(qc_checkpoint *c, const qc_tree_file *tree, size_t tree_count,
                            qc_error *err)
{
    void *p = NULL;
    qc_ckpt_names unread = {0};
    qc_ckpt_names left = {0};
    qc_ckpt_names odd = {0};
    QC_TRY(qc_arena_alloc(&c->arena, &p, tree_count, sizeof *c->side, err));
    c->side = p;
    for (size_t i = 0; i < tree_count; i++) {
        const char *path = tree[i].path;
        if (is_side_file(path) && !is_read(c, path) && !qc_text_is_utf8(path))
            qc_ckpt_names_add(&odd, path); /* JSON has no way to name it */
        else if (is_side_file(path) && !is_read(c, path))
            c->side[c->side_count++] = tree[i];
        else if ((qc_ends_with(path, ".safetensors") || qc_ends_with(path, ".safetensors.zst")) &&
                 !in_twin_folder(path) && !is_read(c, path))
            qc_ckpt_names_add(&unread, path);
        else if (is_pickle(path) && !in_twin_folder(path) && !is_read(c, path))
            qc_ckpt_names_add(&left, path);
    }
    for (size_t i = 0; i < c->side_count && !c->side_link; i++) {
        int leaves = 0;
        QC_TRY(qc_path_leaves(c->path, c->side[i].path, &leaves, err));
        if (leaves)
            c->side_link = c->side[i].path;
    }
    if (odd.count)
        QC_TRY(qc_ckpt_warn(c, err, "%zu files are not copied, their names are not UTF-8: %s",
                            odd.count, qc_ckpt_names_text(&odd)));
    if (left.count)
        QC_TRY(qc_ckpt_warn(c, err, "%zu Python pickles are not copied: %s", left.count,
                            qc_ckpt_names_text(&left)));
    if (unread.count)
        return qc_ckpt_warn(c, err, "%zu .safetensors files are not part of the model: %s",
                            unread.count, qc_ckpt_names_text(&unread));
    return QC_OK;
}

qc_status qc_ckpt_read_config(qc_checkpoint *c, qc_error *err)
{
    const char *path = NULL;
    qc_strbuf text;
    qc_status st = QC_OK;
    int found = 0;
    for (size_t i = 0; i < c->side_count && !found; i++)
        found = strcmp(c->side[i].path, CONFIG_NAME) == 0;
    if (!found)
        return QC_OK;
    qc_strbuf_init(&text, CONFIG_MAX_BYTES);
    QC_TRY(qc_path_join(&c->arena, &path, c->path, CONFIG_NAME, err));
    QC_TRY_GOTO(st, fail, qc_file_slurp(path, &text, err));
    st = qc_json_parse(&c->config, text.data ? text.data : "", text.len, QC_JSON_PYTHON, err);
    if (st == QC_OK && qc_json_kind_of(qc_json_root(c->config)) != QC_JSON_OBJECT)
        st = qc_error_set(err, QC_ERR_INPUT, __FILE__, __LINE__,
                          "text is of kind %s, an object was expected",
                          qc_json_kind_name(qc_json_kind_of(qc_json_root(c->config))));
    if (st != QC_OK) {
        qc_error_prefix(err, "%s", path);
        goto fail;
    }
    c->config_text = text.data; /* taken over */
    c->config_len = text.len;
    return QC_OK;
fail:
    qc_strbuf_deinit(&text);
    return st;
}

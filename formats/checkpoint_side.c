/* The files of a checkpoint's directory that are not weights: config, tokenizer, code, licence. A
 * converted model needs all of them, so the rules here say what to leave out, not what to take. */
#include "formats/checkpoint_internal.h"

#include "base/text.h"
#include "formats/foreign_file.h"
#include "formats/path_link.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define CONFIG_NAME      "config.json"
#define CONFIG_MAX_BYTES (64u << 20)

typedef struct {
    const char *prefix; /* the begin of the file's name, without folders */
    const char *suffix; /* the end of it */
} name_pattern;

/* Weights in any format, their indexes, and what does not belong to a checkpoint, in any folder. */
static const name_pattern left_out[] = {
    {"", ".safetensors"},
    {"", ".safetensors.zst"},
    {"", ".safetensors.index.json"},
    {"", ".bin.index.json"},
    {"pytorch_model", ".bin"},
    {QC_CHECKPOINT_DIFFUSERS_STEM, ".bin"},
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

/* Pickles that trainers leave beside the weights, in any folder. Loading one runs whatever it says,
 * so none is handed on. */
static const name_pattern pickles[] = {
    {"training_args", ".bin"}, {"optimizer", ".bin"}, {"scheduler", ".bin"}, {"", ".pkl"},
    {"", ".pickle"},
};

/* Written by qconv itself for one output; only at the top. */
static const char *const own_files[] = {"qconv.json", "device_map.json"};
/* The same weights again under other names (Llama 3, gpt-oss). */
static const char *const twin_folders[] = {"original/", "metal/"};

static int in_twin_folder(const char *path)
{
    for (size_t i = 0; i < sizeof twin_folders / sizeof *twin_folders; i++) {
        if (qc_begins_with(path, twin_folders[i]))
            return 1;
    }
    return 0;
}

static int matches(const name_pattern *list, size_t count, const char *path)
{
    const char *name = qc_last_name(path);
    for (size_t i = 0; i < count; i++) {
        if (qc_begins_with(name, list[i].prefix) && qc_ends_with(name, list[i].suffix))
            return 1;
    }
    return 0;
}

static int is_safetensors(const char *path)
{
    return qc_ends_with(path, ".safetensors") || qc_ends_with(path, ".safetensors.zst");
}

static int is_pickle(const char *path)
{
    return matches(pickles, sizeof pickles / sizeof *pickles, path);
}

static int is_side_file(const char *path)
{
    qc_checkpoint_name n;
    if (in_twin_folder(path))
        return 0;
    if (qc_checkpoint_name_is_adapter(path))
        return 1; /* left out beside a model; alone in the folder it is read */
    if (qc_checkpoint_name_read(&n, qc_last_name(path)) && n.index)
        return 0;
    for (size_t i = 0; i < sizeof own_files / sizeof *own_files; i++) {
        if (strcmp(path, own_files[i]) == 0)
            return 0;
    }
    return !matches(left_out, sizeof left_out / sizeof *left_out, path) && !is_pickle(path);
}

/* Returns whether this path is one of the opened files. */
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

/* Reads the modules.json of sentence-transformers, if there is one. */
static qc_status read_modules(qc_json **out, qc_checkpoint *c, const qc_tree_file *tree,
                              size_t tree_count, qc_error *err)
{
    const char *name = "modules.json", *path = NULL;
    *out = NULL;
    if (!bsearch(&name, tree, tree_count, sizeof *tree, qc_by_text))
        return QC_OK;
    QC_TRY(qc_path_join(&c->arena, &path, c->path, name, err));
    const qc_status st = qc_json_read_file(out, path, "", CONFIG_MAX_BYTES, err);
    return st == QC_ERR_INPUT ? QC_OK : st; /* check_side says what it is */
}

/* Is this the weights of a module that `modules`, the modules.json of sentence-transformers, names?
 * It loads them from model.safetensors or pytorch_model.bin of the module's folder (2_Dense), and
 * without them the embeddings are wrong. They are small, and copied. */
static int is_of_module(const qc_json_node *modules, const char *path)
{
    if (!is_safetensors(path) && !qc_begins_with(qc_last_name(path), "pytorch_model"))
        return 0;
    for (const qc_json_node *m = qc_json_first(modules); m; m = qc_json_next(m)) {
        const char *folder = qc_json_string_or(qc_json_get(m, "path"), "");
        const size_t n = strlen(folder);
        if (n > 0 && strncmp(path, folder, n) == 0 && path[n] == '/')
            return 1;
    }
    return 0;
}

/* ---- side files that are not the file ---- */

/* What loaders read of the side files, by the ends of the names, and whether each of those may be
 * empty. */
static const struct {
    const char *suffix;
    int may_be_empty;
} read_files[] = {{".json", 0}, {".jinja", 0}, {".model", 0}, {".tiktoken", 0},
                  {".txt", 1},  {".py", 1},    {".yaml", 1}};

/* Does a JSON text, of which the first and last bytes are given, end in what closes its
 * beginning? */
static int is_cut_off(const char *head, const char *tail, size_t n)
{
    static const char blanks[] = " \t\r\n";
    size_t skip = 0, end = n;
    while (skip < n && head[skip] && strchr(blanks, head[skip]))
        skip++;
    while (end > 0 && tail[end - 1] && strchr(blanks, tail[end - 1]))
        end--;
    if (skip == n || (head[skip] != '{' && head[skip] != '['))
        return 0;
    return end == 0 || tail[end - 1] != (head[skip] == '{' ? '}' : ']');
}

/* Sets *what to what the side file is instead, or to NULL. A file that cannot be opened is no
 * business of this: copying it says so. */
static qc_status side_trouble(const char **what, const qc_checkpoint *c, const qc_tree_file *side,
                              qc_error *err)
{
    char path[PATH_MAX], head[QC_FOREIGN_HEAD_BYTES], tail[QC_FOREIGN_HEAD_BYTES];
    const size_t kinds = sizeof read_files / sizeof *read_files;
    const size_t n = (size_t)(side->bytes < sizeof head ? side->bytes : sizeof head);
    size_t kind = 0;
    *what = NULL;
    while (kind < kinds && !qc_ends_with(side->path, read_files[kind].suffix))
        kind++;
    if (kind == kinds || (n == 0 && read_files[kind].may_be_empty))
        return QC_OK;
    qc_file f = QC_FILE_CLOSED;
    const int len = snprintf(path, sizeof path, "%s/%s", c->path, side->path);
    if (len < 0 || (size_t)len >= sizeof path)
        return QC_OK;
    qc_status st = qc_file_open_read(&f, path, err);
    if (st != QC_OK)
        return st == QC_ERR_NOMEM ? st : QC_OK;
    st = qc_file_pread(&f, head, n, 0, err);
    if (st == QC_OK)
        st = qc_file_pread(&f, tail, n, side->bytes - n, err);
    qc_file_discard(&f);
    QC_TRY(st);
    *what = qc_foreign_text(head, n);
    if (!*what && kind == 0 && is_cut_off(head, tail, n))
        *what = "cut off";
    return QC_OK;
}

/* Warns of side files that loaders would stumble over. config.json has been read by now. */
static qc_status check_side(qc_checkpoint *c, qc_error *err)
{
    qc_checkpoint_names odd = {0};
    const char *what = NULL;
    for (size_t i = 0; i < c->side_count; i++) {
        const char *found = NULL;
        QC_TRY(side_trouble(&found, c, &c->side[i], err));
        if (!found)
            continue;
        qc_checkpoint_names_add(&odd, c->side[i].path);
        what = what ? what : found;
    }
    if (odd.count == 0)
        return QC_OK;
    QC_TRY(qc_arena_printf(&c->arena, &c->side_odd, err, "%s, %s %s",
                           qc_checkpoint_names_text(&odd),
                           odd.count == 1 ? "which is" : "of which the first is", what));
    return qc_checkpoint_warn(c, err,
                              "%zu file%s beside the weights %s not what the name says, and no "
                              "loader can read %s (the first is %s); download again: %s",
                              odd.count, qc_plural(odd.count), qc_are(odd.count),
                              odd.count == 1 ? "it" : "them", what, qc_checkpoint_names_text(&odd));
}

qc_status qc_checkpoint_find_side(qc_checkpoint *c, const qc_tree_file *tree, size_t tree_count,
                                  qc_error *err)
{
    qc_checkpoint_names unread = {0};
    qc_checkpoint_names variants = {0};
    qc_checkpoint_names adapters = {0};
    qc_checkpoint_names left = {0};
    qc_checkpoint_names odd = {0};
    QC_TRY(qc_arena_alloc(&c->arena, &c->side, tree_count, sizeof *c->side, err));
    qc_json *modules = NULL;
    QC_TRY(read_modules(&modules, c, tree, tree_count, err));
    for (size_t i = 0; i < tree_count; i++) {
        const char *path = tree[i].path;
        qc_checkpoint_name n;
        if (is_read(c, path))
            continue;
        if (modules && is_of_module(qc_json_root(modules), path)) {
            c->side[c->side_count++] = tree[i];
        } else if (is_side_file(path) && !qc_text_is_utf8(path)) {
            qc_checkpoint_names_add(&odd, path); /* JSON cannot express such a name */
        } else if (is_side_file(path)) {
            c->side[c->side_count++] = tree[i];
            if (qc_checkpoint_name_is_adapter(path))
                qc_checkpoint_names_add(&adapters, path);
        } else if (qc_checkpoint_name_read(&n, path) && n.variant && !n.index && !n.torch) {
            qc_checkpoint_names_add(&variants, path); /* of the weights that are read */
        } else if (is_safetensors(path) && !in_twin_folder(path)) {
            qc_checkpoint_names_add(&unread, path);
        } else if (is_pickle(path) && !in_twin_folder(path)) {
            qc_checkpoint_names_add(&left, path);
        }
    }
    qc_json_destroy(modules);
    QC_TRY(check_side(c, err));
    for (size_t i = 0; i < c->side_count && !c->side_link; i++) {
        int leaves = 0;
        QC_TRY(qc_path_leaves(c->path, c->side[i].path, &leaves, err));
        if (leaves)
            c->side_link = c->side[i].path;
    }
    if (odd.count)
        QC_TRY(qc_checkpoint_warn(
            c, err, "%zu file%s %s not copied for a name that is not UTF-8: %s", odd.count,
            qc_plural(odd.count), qc_are(odd.count), qc_checkpoint_names_text(&odd)));
    if (left.count)
        QC_TRY(qc_checkpoint_warn(c, err, "%zu Python pickle%s %s not copied: %s", left.count,
                                  qc_plural(left.count), qc_are(left.count),
                                  qc_checkpoint_names_text(&left)));
    if (variants.count)
        QC_TRY(qc_checkpoint_warn(c, err,
                                  QC_NAME
                                  " is read, and the other variants of the weights are left out: "
                                  "%s; to have one of those, give it or its index as MODEL",
                                  c->files[0].name, qc_checkpoint_names_text(&variants)));
    if (adapters.count && !qc_checkpoint_name_is_adapter(c->files[0].name)) {
        QC_TRY(qc_checkpoint_warn(c, err,
                                  "an adapter lies beside the model, and is copied as it is: %s",
                                  qc_checkpoint_names_text(&adapters)));
        c->adapter_warning = c->warning_count;
    }
    if (unread.count)
        return qc_checkpoint_warn(c, err, "%zu .safetensors files are not part of the model: %s",
                                  unread.count, qc_checkpoint_names_text(&unread));
    return QC_OK;
}

static int is_same_folder(const char *path, size_t len, const struct stat *folder)
{
    char text[PATH_MAX];
    struct stat s;
    int n = snprintf(text, sizeof text, "%.*s", (int)len, path);
    return n > 0 && (size_t)n < sizeof text && stat(text, &s) == 0 && s.st_dev == folder->st_dev &&
           s.st_ino == folder->st_ino;
}

/* Is a side file below `folder`, or one of an adapter in it, if it is the model's own? */
static int is_in_adapter(const qc_checkpoint *c, const char *side, const struct stat *folder)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s/%s", c->path, side);
    if (n < 0 || (size_t)n >= sizeof path)
        return 0;
    const char *rest = path + strlen(c->path) + 1;
    if (is_same_folder(path, strlen(c->path), folder))
        return !strchr(rest, '/') && qc_begins_with(rest, "adapter_");
    for (const char *slash = rest; (slash = strchr(slash, '/')) != NULL; slash++) {
        if (is_same_folder(path, (size_t)(slash - path), folder))
            return 1;
    }
    return 0;
}

void qc_checkpoint_leave_out_adapter(qc_checkpoint *c, const char *folder)
{
    struct stat s;
    size_t kept = 0;
    int others = 0;
    if (stat(folder, &s) != 0 || !S_ISDIR(s.st_mode))
        return;
    for (size_t i = 0; i < c->side_count; i++) {
        if (is_in_adapter(c, c->side[i].path, &s))
            continue;
        others |= qc_checkpoint_name_is_adapter(c->side[i].path);
        c->side[kept++] = c->side[i];
    }
    c->side_count = kept;
    if (others || c->adapter_warning == 0)
        return;
    memmove(&c->warnings[c->adapter_warning - 1], &c->warnings[c->adapter_warning],
            (c->warning_count - c->adapter_warning) * sizeof *c->warnings);
    c->warning_count--;
    c->adapter_warning = 0;
}

qc_status qc_checkpoint_take_config(qc_checkpoint *c, qc_strbuf *text, qc_error *err)
{
    const char *bytes = text->data ? text->data : "";
    QC_TRY(qc_json_parse(&c->config, bytes, text->len, QC_JSON_PYTHON, err));
    QC_TRY(qc_json_expect(qc_json_root(c->config), QC_JSON_OBJECT, "text", err));
    c->config_text = text->data;
    c->config_len = text->len;
    qc_strbuf_init(text, text->max);
    return QC_OK;
}

/* Reads the config.json of `folder`, which is there. */
static qc_status read_config(qc_checkpoint *c, const char *folder, qc_error *err)
{
    const char *path = NULL;
    qc_strbuf text;
    qc_strbuf_init(&text, CONFIG_MAX_BYTES);
    QC_TRY(qc_path_join(&c->arena, &path, folder, CONFIG_NAME, err));
    qc_status st = qc_file_slurp(path, &text, err);
    if (st == QC_OK && (st = qc_checkpoint_take_config(c, &text, err)) != QC_OK)
        qc_foreign_say(err, "", path, text.data, text.len);
    qc_strbuf_deinit(&text);
    return st;
}

qc_status qc_checkpoint_read_config(qc_checkpoint *c, const qc_tree_file *tree, size_t tree_count,
                                    qc_error *err)
{
    const char *name = CONFIG_NAME;
    const int there = bsearch(&name, tree, tree_count, sizeof *tree, qc_by_text) != NULL;
    return there ? read_config(c, c->path, err) : QC_OK;
}

qc_status qc_checkpoint_config_beside(qc_checkpoint *c, qc_error *err)
{
    const char *name = qc_last_name(c->path);
    const char *folder = ".";
    qc_checkpoint_name n;
    int has_config = 0, has_weights = 0,
        has_others = 0; /* what a conversion of the folder copies */
    size_t len = (size_t)(name - c->path);
    if (len)
        QC_TRY(qc_arena_strndup(&c->arena, &folder, c->path, len, err));
    DIR *dir = opendir(folder);
    const struct dirent *e = NULL;
    /* The folder of a file that could be opened may perhaps not be listed. */
    while (dir && (e = readdir(dir))) {
        if (strcmp(e->d_name, CONFIG_NAME) == 0)
            has_config = 1;
        else if (is_safetensors(e->d_name))
            has_weights |=
                strcmp(e->d_name, name) != 0 && !qc_checkpoint_name_is_adapter(e->d_name);
        else
            has_others |= is_side_file(e->d_name);
    }
    if (dir)
        closedir(dir);
    if (!has_config || qc_checkpoint_name_is_adapter(name))
        return QC_OK;
    int known = qc_checkpoint_name_read(&n, name) && !n.shard;
    if (!known && has_weights)
        return qc_checkpoint_warn(c, err,
                                  "'%s' beside " QC_NAME
                                  " is not taken, for the file is one of several there "
                                  "or has a name of its own; to convert the model, give the folder",
                                  CONFIG_NAME, name);
    QC_TRY(read_config(c, folder, err));
    return qc_checkpoint_warn(
        c, err, "'%s' beside " QC_NAME " is taken as its own%s", CONFIG_NAME, name,
        has_others ? ", other files of the folder are not; give the folder to "
                     "have them, too"
                   : "");
}

/* ---- what kind of model ---- */

void qc_checkpoint_judge_kind(qc_checkpoint *c)
{
    static const char diffusers[] = QC_CHECKPOINT_DIFFUSERS_STEM;
    const qc_json_node *root = c->config ? qc_json_root(c->config) : NULL;
    size_t of_adapter = 0;
    int is_diffusers =
        root ? qc_json_get(root, "_class_name") && !qc_json_get(root, "model_type")
             : c->file_count > 0 && qc_begins_with(qc_last_name(c->files[0].name), diffusers);
    c->stem = is_diffusers ? diffusers : QC_CHECKPOINT_STEM;
    for (size_t i = 0; i < c->tensor_count; i++) {
        /* peft and diffusers say "...lora_A.weight", "...lora.up.weight" and "...alpha". */
        const char *name = c->tensors[i].name;
        of_adapter += strstr(name, ".lora") || qc_begins_with(name, "lora") ||
                      strstr(name, ".hada_") || strstr(name, "dora_scale") ||
                      qc_ends_with(name, ".alpha");
    }
    c->is_adapter = c->file_count > 0 && (qc_checkpoint_name_is_adapter(c->files[0].name) ||
                                          (of_adapter > 0 && of_adapter == c->tensor_count));
}

qc_status qc_checkpoint_check_model(const qc_checkpoint *c, qc_error *err)
{
    if (!c->is_adapter)
        return QC_OK;
    QC_FAIL(err, QC_ERR_INPUT,
            "%s is an adapter (LoRA or the like) and not a model; give its base model, and the "
            "adapter's folder with --lora, or convert the base model and load the adapter on the "
            "result",
            c->path);
}

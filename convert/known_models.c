/* MODEL is a path where there is one, else an id. A directory is a configuration alone if it has a
 * config.json and nothing that looks like weights; what does look like weights is opened, so that
 * what is wrong with it is said. */
#include "convert/known_models.h"

#include "base/edit_distance.h"
#include "convert/model_tensors.h"
#include "formats/file_io.h"

#include <ctype.h>
#include <string.h>

#define CONFIG_NAME      "config.json"
#define CONFIG_MAX_BYTES (16u << 20)
#define TREE_MAX_FILES   100000u
#define NAME_SHOWN_BYTES 160
#define NEAR_DIVISOR     3u /* one letter in three may differ */

static int same_letter(char a, char b)
{
    return tolower((unsigned char)a) == tolower((unsigned char)b);
}

static int same_text(const char *a, const char *b)
{
    while (*a && same_letter(*a, *b)) {
        a++;
        b++;
    }
    return *a == '\0' && *b == '\0';
}

static const char *without_org(const char *id)
{
    const char *slash = strchr(id, '/');
    return slash ? slash + 1 : id;
}

const qc_known_model *qc_known_model_find(const char *id)
{
    for (unsigned i = 0; i < qc_known_model_count; i++) {
        const char *known = qc_known_models[i].id;
        if (same_text(id, known) || same_text(id, without_org(known)))
            return &qc_known_models[i];
    }
    return NULL;
}

static int begins_with(const char *text, const char *start)
{
    while (*start && same_letter(*text, *start)) {
        text++;
        start++;
    }
    return *start == '\0';
}

/* "mistral", "Llama-3-8B": the beginning of a name, or of what follows "Meta-". */
static const char *completed(const char *name)
{
    enum { MIN_LETTERS = 3 };
    for (unsigned i = 0; strlen(name) >= MIN_LETTERS && i < qc_known_model_count; i++) {
        const char *known = without_org(qc_known_models[i].id);
        const char *dash = strchr(known, '-');
        if (begins_with(known, name) || (dash && begins_with(dash + 1, name)))
            return qc_known_models[i].id;
    }
    return NULL;
}

const char *qc_known_model_near(const char *id)
{
    const char *name = without_org(id), *best = completed(name);
    if (best)
        return best;
    size_t len = strlen(name), least = len / NEAR_DIVISOR + 1;
    if (len > QC_EDIT_MAX_BYTES)
        return NULL;
    for (unsigned i = 0; i < qc_known_model_count; i++) {
        const char *known = without_org(qc_known_models[i].id);
        size_t d = qc_edit_distance(name, len, known, strlen(known));
        if (d < least) {
            least = d;
            best = qc_known_models[i].id;
        }
    }
    return best;
}

/* ---- opening ---- */

static qc_status open_config(qc_checkpoint **out, const char *path, const char *text, size_t len,
                             qc_error *err)
{
    qc_arena arena;
    qc_model_tensors tensors = {0};
    qc_json *config = NULL;
    qc_arena_init(&arena);
    qc_status st = qc_json_parse(&config, text, len, QC_JSON_PYTHON, err);
    if (st == QC_OK)
        st = qc_model_tensors_make(&tensors, &arena, config, err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", path);
    else
        st = qc_checkpoint_create_shapes(out, path, text, len, tensors.rows, tensors.count, err);
    qc_json_destroy(config);
    qc_arena_deinit(&arena);
    return st;
}

static qc_status open_config_file(qc_checkpoint **out, const char *file, const char *path,
                                  qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, CONFIG_MAX_BYTES);
    qc_status st = qc_file_slurp(file, &text, err);
    if (st == QC_OK)
        st = open_config(out, path, text.data ? text.data : "", text.len, err);
    qc_strbuf_deinit(&text);
    return st;
}

static int looks_like_weights(const char *name)
{
    static const char *const marks[] = {".safetensors", ".bin", ".pt",      ".pth", ".ckpt",
                                        ".gguf",        ".h5",  ".msgpack", ".onnx"};
    for (size_t i = 0; i < sizeof marks / sizeof *marks; i++) {
        const char *at = strstr(name, marks[i]);
        char next = at ? at[strlen(marks[i])] : 'x';
        if (next == '\0' || next == '.')
            return 1;
    }
    return 0;
}

/* *config: the path of the config.json that is all there is, or NULL. */
static qc_status find_lone_config(const char **config, qc_arena *arena, const char *dir,
                                  qc_error *err)
{
    qc_tree_file *tree = NULL;
    size_t count = 0;
    int found = 0;
    *config = NULL;
    QC_TRY(qc_dir_tree(arena, dir, TREE_MAX_FILES, &tree, &count, err));
    for (size_t i = 0; i < count; i++) {
        if (strchr(tree[i].path, '/'))
            continue;
        if (looks_like_weights(tree[i].path))
            return QC_OK;
        found |= strcmp(tree[i].path, CONFIG_NAME) == 0;
    }
    return found ? qc_path_join(arena, config, dir, CONFIG_NAME, err) : QC_OK;
}

static qc_status open_known(qc_checkpoint **out, const char *id, qc_error *err)
{
    const qc_known_model *known = qc_known_model_find(id);
    if (known)
        return open_config(out, known->id, known->config, strlen(known->config), err);
    const char *near = qc_known_model_near(id);
    if (near)
        QC_FAIL(err, QC_ERR_INPUT,
                "'%.*s' does not exist and is not the id of a well-known model; did you mean '%s'? "
                "For any other model, give a folder with its config.json",
                NAME_SHOWN_BYTES, id, near);
    QC_FAIL(err, QC_ERR_INPUT,
            "'%.*s' does not exist and is not the id of a well-known model (docs/models.md lists "
            "them); give a folder with its config.json",
            NAME_SHOWN_BYTES, id);
}

static int is_config_path(const char *path)
{
    static const char index[] = ".index.json"; /* of a checkpoint's shards */
    size_t n = strlen(path), m = strlen(".json"), k = sizeof index - 1;
    return n > m && strcmp(path + n - m, ".json") == 0 &&
           (n < k || strcmp(path + n - k, index) != 0);
}

static qc_status open_path(qc_checkpoint **out, const char *model, int *has_weights,
                           qc_arena *arena, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    uint64_t bytes = 0;
    const char *config = NULL;
    QC_TRY(qc_path_stat(model, &kind, &bytes, err));
    if (kind == QC_PATH_MISSING)
        return open_known(out, model, err);
    if (kind == QC_PATH_FILE && is_config_path(model))
        config = model;
    else if (kind == QC_PATH_DIR)
        QC_TRY(find_lone_config(&config, arena, model, err));
    if (config)
        return open_config_file(out, config, model, err);
    *has_weights = 1;
    return qc_checkpoint_open(out, model, err);
}

qc_status qc_model_open(qc_checkpoint **out, const char *model, int *has_weights, qc_error *err)
{
    qc_arena arena;
    *out = NULL;
    *has_weights = 0;
    qc_arena_init(&arena);
    qc_status st = open_path(out, model, has_weights, &arena, err);
    qc_arena_deinit(&arena);
    return st;
}

/* MODEL is a path if there is one of that name, and otherwise an id. A directory counts as a
 * configuration alone if it has a config.json and nothing that looks like weights. Whatever does
 * look like weights is opened, so that the user learns what is wrong with it. */
#include "convert/known/known_models.h"

#include "base/edit_distance.h"
#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/known/model_tensors.h"
#include "formats/checkpoint_internal.h"
#include "formats/file_io.h"
#include "formats/safetensors_file.h"

#include <ctype.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <zstd.h>

#define CONFIG_NAME      "config.json"
#define CONFIG_MAX_BYTES (16u << 20)
#define TREE_MAX_FILES   100000u
#define NAME_SHOWN_BYTES 160
#define NEAR_DIVISOR     3u /* for an unknown family: one letter in three may differ */

/* ---- the list ---- */

#define TEXT_MAX_BYTES (256u << 10)
#define MAX_MODELS     1024u

/* cmake/embed.cmake makes these of convert/families/known_models.txt, whose lines are an id and
 * the fields of config.json that matter, or '=' and an id above that has the same ones. */
extern const unsigned char qc_known_models_zst[];
extern const size_t qc_known_models_bytes, qc_known_models_zst_bytes;

static char list_text[TEXT_MAX_BYTES];
static qc_known_model models[MAX_MODELS];
static unsigned model_count;
static pthread_once_t read_once = PTHREAD_ONCE_INIT;

static void read_text(void)
{
    size_t got = ZSTD_decompress(list_text, sizeof list_text - 1, qc_known_models_zst,
                                 qc_known_models_zst_bytes);
    if (got != qc_known_models_bytes)
        return;
    list_text[got] = '\0'; /* zstd may leave bytes of its own behind the text */
    for (char *line = list_text, *rest = NULL; *line; line = rest) {
        if (model_count == MAX_MODELS) {
            model_count = 0;
            return;
        }
        char *config = line + strcspn(line, " ");
        rest = line + strcspn(line, "\n");
        *config++ = '\0';
        *rest++ = '\0';
        models[model_count] = (qc_known_model){line, config};
        for (unsigned i = 0; *config == '=' && i < model_count; i++) {
            if (strcmp(models[i].id, config + 1) == 0)
                models[model_count].config = models[i].config;
        }
        model_count++;
    }
}

const qc_known_model *qc_known_models(unsigned *count)
{
    (void)pthread_once(&read_once, read_text);
    *count = model_count;
    return model_count ? models : NULL;
}

static const char *without_org(const char *id)
{
    const char *slash = strchr(id, '/');
    return slash ? slash + 1 : id;
}

const qc_known_model *qc_known_model_find(const char *id)
{
    unsigned count = 0;
    const qc_known_model *all = qc_known_models(&count);
    for (unsigned i = 0; i < count; i++) {
        const char *known = all[i].id;
        if (strcasecmp(id, known) == 0 || strcasecmp(id, without_org(known)) == 0)
            return &all[i];
    }
    return NULL;
}

const char *qc_hub_id_of(const char *text)
{
    static const char *const hosts[] = {"https://huggingface.co/", "http://huggingface.co/",
                                        "huggingface.co/", "hf.co/", "hf://"};
    static const char letters[] =
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++)
        if (strncmp(text, hosts[i], strlen(hosts[i])) == 0)
            text += strlen(hosts[i]);
    size_t org = strspn(text, letters);
    if (org == 0 || text[0] == '.' || text[org] != '/')
        return NULL;
    size_t name = strspn(text + org + 1, letters);
    return name > 0 && text[org + 1] != '.' && text[org + 1 + name] == '\0' ? text : NULL;
}

/* Does the name begin with what was asked, but for separators? A number that goes on is another. */
static int begins_with(const char *known, const char *asked)
{
    static const char separators[] = "-_ ";
    size_t letters = 0;
    char last = '\0';
    for (;; asked++, known++, letters++) {
        asked += strspn(asked, separators);
        if (!*asked)
            break;
        known += strspn(known, separators);
        if (tolower((unsigned char)*asked) != tolower((unsigned char)*known))
            return 0;
        last = *asked;
    }
    return letters >= 3 &&
           !(isdigit((unsigned char)last) && (isdigit((unsigned char)*known) || *known == '.'));
}

const qc_known_model *qc_known_model_meant(const char *text)
{
    const char *id = qc_hub_id_of(text) ? qc_hub_id_of(text) : text;
    const qc_known_model *found = qc_known_model_find(id);
    unsigned count = 0, begin = 0;
    const qc_known_model *all = qc_known_models(&count);
    if (!found && qc_hub_id_of(text))
        found = qc_known_model_find(without_org(id)); /* a mirror */
    for (unsigned i = 0; !found && i < count; i++)
        begin += begins_with(without_org(all[i].id), without_org(id)) != 0;
    for (unsigned i = 0; begin == 1 && !found && i < count; i++)
        if (begins_with(without_org(all[i].id), without_org(id)))
            found = &all[i];
    return found;
}

/* ---- near ids: by family and size first, by letters last ---- */

enum {
    MIN_WORD = 3,        /* letters of a word that tells something */
    MAX_SIZE_RATIO = 4,  /* a second suggestion is no further than this from the size asked for */
    MAX_SIZE_LETTERS = 7 /* "0.5", "8x22", "123.45" */
};

typedef struct {
    int begins;             /* the name begins with what was asked */
    unsigned family, words; /* words in common: names of families, and all words */
    double ratio;           /* ratio of the two sizes, >= 1; 1 if no size was asked for */
    unsigned letters;       /* how many letters have to change */
} likeness;

static size_t word_length(const char *text)
{
    size_t n = 0;
    while (isalpha((unsigned char)text[n]))
        n++;
    return n;
}

/* Is it a word that models of many families have in their names? */
static int is_common_word(const char *word, size_t n)
{
    static const char *const words[] = {
        "instruct", "base",    "chat",  "meta",  "mini", "small", "large", "lite",   "vision",
        "distill",  "preview", "coder", "think", "air",  "all",   "flash", "reason", "medium"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        if (strlen(words[i]) == n && strncasecmp(word, words[i], n) == 0)
            return 1;
    }
    return 0;
}

/* Does a word of name begin with this one? "mistr" is enough for "Mistral". */
static int has_word(const char *name, const char *word, size_t n)
{
    for (size_t k = 0; *name; name += k ? k : 1) {
        k = word_length(name);
        if (k >= n && strncasecmp(name, word, n) == 0)
            return 1;
    }
    return 0;
}

/* The parameters in billions: the first "8B", "0.5B", "270m" or "8x7B" of a name, or 0 if it has
 * none. */
static double size_in(const char *name)
{
    for (const char *s = name; *s; s++) {
        if (!isdigit((unsigned char)*s) || (s > name && isalnum((unsigned char)s[-1])))
            continue;
        char number[MAX_SIZE_LETTERS + 1] = "";
        size_t n = strspn(s, "0123456789.x");
        int unit = tolower((unsigned char)s[n]);
        if (n > MAX_SIZE_LETTERS || (unit != 'b' && unit != 'm') ||
            isalnum((unsigned char)s[n + 1]))
            continue;
        memcpy(number, s, n);
        char *times = strchr(number, 'x');
        double size = strtod(number, NULL) * (times ? strtod(times + 1, NULL) : 1);
        return unit == 'm' ? size / 1000 : size;
    }
    return 0;
}

static likeness compare_names(const char *asked, const char *known)
{
    likeness l = {.ratio = 1, .begins = begins_with(known, asked)};
    for (size_t n = 0; *asked; asked += n ? n : 1) {
        n = word_length(asked);
        if (n < MIN_WORD || !has_word(known, asked, n))
            continue;
        l.words++;
        l.family += !is_common_word(asked, n);
    }
    return l;
}

static int is_nearer(const likeness *a, const likeness *b)
{
    if (a->begins != b->begins)
        return a->begins > b->begins;
    if (a->family != b->family)
        return a->family > b->family;
    if (a->ratio < b->ratio || a->ratio > b->ratio)
        return a->ratio < b->ratio;
    if (a->words != b->words)
        return a->words > b->words;
    return a->letters < b->letters;
}

unsigned qc_known_model_near(const char *id, const char *near[QC_KNOWN_NEAR_MAX])
{
    const char *name = without_org(id);
    size_t len = strlen(name);
    double size = size_in(name);
    likeness found[QC_KNOWN_NEAR_MAX];
    unsigned count = 0, known_count = 0;
    const qc_known_model *all = qc_known_models(&known_count);
    if (len > QC_EDIT_MAX_BYTES)
        return 0;
    for (unsigned i = 0; i < known_count; i++) {
        const char *known = without_org(all[i].id);
        double theirs = size_in(known);
        likeness l = compare_names(name, known);
        l.letters = qc_edit_distance(name, len, known, strlen(known));
        if (size > 0 && theirs > 0)
            l.ratio = size > theirs ? size / theirs : theirs / size;
        else if (size > 0)
            l.ratio = HUGE_VAL;
        if (l.family == 0 && !l.begins &&
            l.letters > len / NEAR_DIVISOR) /* the family's name is misspelt */
            continue;
        unsigned at = count;
        while (at > 0 && is_nearer(&l, &found[at - 1]))
            at--;
        if (at == QC_KNOWN_NEAR_MAX)
            continue;
        count += count < QC_KNOWN_NEAR_MAX;
        for (unsigned k = count - 1; k > at; k--) {
            found[k] = found[k - 1];
            near[k] = near[k - 1];
        }
        found[at] = l;
        near[at] = all[i].id;
    }
    while (count > 1 && (found[count - 1].begins < found[0].begins ||
                         found[count - 1].family < found[0].family ||
                         found[count - 1].ratio > MAX_SIZE_RATIO * found[0].ratio))
        count--;
    return count;
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
    const qc_json_node *root = qc_config_root(config);
    /* A tokenizer.json, for example, is no config.json. */
    if (st == QC_OK && (qc_json_kind_of(root) != QC_JSON_OBJECT ||
                        !(qc_json_get(root, "model_type") || qc_json_get(root, "architectures"))))
        st = QC_ERROR(err, QC_ERR_INPUT,
                      "expected the configuration of a model, with a model_type or architectures, "
                      "found JSON with neither");
    if (st == QC_OK)
        st = qc_model_tensors_make(&tensors, &arena, config, 0, err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", path);
    else
        st = qc_checkpoint_create_shapes(out, path, text, len, tensors.rows, tensors.count, err);
    qc_json_destroy(config);
    qc_arena_deinit(&arena);
    return st;
}

static int looks_like_weights(const char *name)
{
    static const char *const marks[] = {".safetensors", ".bin", ".pt",      ".pth", ".ckpt",
                                        ".gguf",        ".h5",  ".msgpack", ".onnx"};
    for (size_t i = 0; i < sizeof marks / sizeof *marks && !qc_ends_with(name, ".index.json");
         i++) {
        const char *at = strstr(name, marks[i]);
        char next = at ? at[strlen(marks[i])] : 'x';
        if (next == '\0' || next == '.')
            return 1;
    }
    return 0;
}

/* Sets *config to the path of the config.json if that is all there is, or to NULL. */
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

static qc_status open_known(qc_checkpoint **out, const char *text, qc_error *err)
{
    unsigned count = 0;
    const qc_known_model *known = qc_known_model_meant(text);
    const char *hub = qc_hub_id_of(text), *id = hub ? hub : text, *near[QC_KNOWN_NEAR_MAX];
    char get[3 * NAME_SHOWN_BYTES] = "", meant[3 * NAME_SHOWN_BYTES] = "";
    if (!qc_known_models(&count))
        QC_FAIL(err, QC_ERR_INTERNAL, "the list of well-known models in this program is damaged");
    if (known)
        return open_config(out, known->id, known->config, strlen(known->config), err);
    const unsigned n = qc_known_model_near(id, near);
    if (n > 0)
        (void)snprintf(meant, sizeof meant,
                       "; did you mean '%s'%s%s%s%s%s%s? For any other model, give", near[0],
                       n > 2 ? ", '" : "", n > 2 ? near[1] : "", n > 2 ? "'" : "",
                       n > 1 ? " or '" : "", n > 1 ? near[n - 1] : "", n > 1 ? "'" : "");
    if (hub)
        (void)snprintf(get, sizeof get, ": hf download %.*s config.json --local-dir %.*s",
                       NAME_SHOWN_BYTES, hub, NAME_SHOWN_BYTES, without_org(hub));
    QC_FAIL(err, QC_ERR_INPUT,
            QC_NAME " does not exist and is not the id of a well-known model%s a folder with its "
                    "config.json%s",
            id, n > 0 ? meant : " (docs/models.md lists them); give", get);
}

/* Adds the tensors of one file, whatever there is of its data. */
static qc_status add_header(qc_model_tensors *to, qc_arena *arena, const char *path, qc_error *err)
{
    qc_st_file file;
    QC_TRY(qc_st_file_open_cut(&file, path, err));
    qc_status st = QC_OK;
    for (size_t i = 0; i < file.header.tensor_count && st == QC_OK; i++) {
        const qc_st_tensor *from = &file.header.tensors[i];
        st = qc_arena_more(arena, &to->rows, to->count, err);
        if (st != QC_OK)
            break;
        qc_checkpoint_tensor *t = &to->rows[to->count++];
        *t = (qc_checkpoint_tensor){.dtype = from->dtype, .ndim = from->ndim};
        memcpy(t->dims, from->dims, sizeof t->dims);
        st = qc_arena_strndup(arena, &t->name, from->name, strlen(from->name), err);
    }
    qc_st_file_close(&file);
    return st;
}

/* Opens a folder of which every .safetensors file has its header and not all of its data: a plan
 * needs no more, and they are a few megabytes of hundreds of gigabytes. */
static qc_status open_headers(qc_checkpoint **out, qc_arena *arena, const char *dir, qc_error *err)
{
    qc_model_tensors tensors = {0};
    qc_tree_file *tree = NULL;
    size_t count = 0, files = 0;
    unsigned long long wanted = 1;
    const char *path = NULL;
    qc_strbuf text;
    QC_TRY(qc_dir_tree(arena, dir, TREE_MAX_FILES, &tree, &count, err));
    for (size_t i = 0; i < count; i++) {
        qc_checkpoint_name n;
        if (!qc_checkpoint_name_read(&n, tree[i].path) || n.index || n.variant || n.torch)
            continue;
        const char *of = strstr(tree[i].path, "-of-");
        wanted = of ? strtoull(of + strlen("-of-"), NULL, 10) : wanted;
        files++;
        QC_TRY(qc_path_join(arena, &path, dir, tree[i].path, err));
        QC_TRY(add_header(&tensors, arena, path, err));
    }
    if (files != wanted)
        QC_FAIL(err, QC_ERR_TRUNCATED, "%s: expected %llu files, as their names say, found %zu",
                dir, wanted, files);
    QC_TRY(qc_path_join(arena, &path, dir, CONFIG_NAME, err));
    qc_strbuf_init(&text, CONFIG_MAX_BYTES);
    qc_status st = qc_file_slurp(path, &text, err);
    if (st == QC_OK)
        st = qc_checkpoint_create_shapes(out, dir, text.data ? text.data : "", text.len,
                                         tensors.rows, tensors.count, err);
    qc_strbuf_deinit(&text);
    QC_TRY(st);
    st = qc_checkpoint_warn(*out, err,
                            "%s: the weights are cut off, and a plan needs their headers alone; "
                            "download them whole to convert them",
                            dir);
    if (st != QC_OK)
        qc_checkpoint_close(*out);
    return st;
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
    /* The index of a checkpoint's shards is a .json file, too. */
    if (kind == QC_PATH_FILE && qc_ends_with(model, ".json") && strcmp(model, ".json") != 0 &&
        !qc_ends_with(model, ".index.json"))
        config = model;
    else if (kind == QC_PATH_DIR)
        QC_TRY(find_lone_config(&config, arena, model, err));
    if (!config) {
        const qc_status st = qc_checkpoint_open(out, model, err);
        *has_weights = st != QC_ERR_TRUNCATED || kind != QC_PATH_DIR ||
                       open_headers(out, arena, model, NULL) != QC_OK;
        return *has_weights ? st : QC_OK;
    }
    qc_strbuf text;
    qc_strbuf_init(&text, CONFIG_MAX_BYTES);
    qc_status st = qc_file_slurp(config, &text, err);
    if (st == QC_OK)
        st = open_config(out, model, text.data ? text.data : "", text.len, err);
    qc_strbuf_deinit(&text);
    return st;
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

#include "convert/known/model_path.h"

#include "base/text.h"
#include "convert/known/known_models.h"
#include "formats/file_io.h"
#include "formats/manifest.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

#define REF_MAX_BYTES    4096u
#define NAME_SHOWN_BYTES 160

static int is_kind(const char *path, qc_path_kind wanted)
{
    qc_path_kind kind = QC_PATH_MISSING;
    return qc_path_stat(path, &kind, NULL, NULL) == QC_OK && kind == wanted;
}

static qc_status is_kind_in(int *yes, qc_arena *arena, const char *dir, const char *name,
                            qc_path_kind wanted, qc_error *err)
{
    const char *path = NULL;
    QC_TRY(qc_path_join(arena, &path, dir, name, err));
    *yes = is_kind(path, wanted);
    return QC_OK;
}

/* Counts the folders of dir whose names begin with `start`, and sets *first to the first of them by
 * name, or to NULL. A folder that cannot be read counts as empty, because whoever opens it says
 * why. */
static qc_status count_folders(const char **first, size_t *count, qc_arena *arena, const char *dir,
                               const char *start, qc_error *err)
{
    qc_status st = QC_OK;
    *first = NULL;
    *count = 0;
    DIR *d = opendir(dir);
    if (!d)
        return QC_OK;
    for (const struct dirent *e = readdir(d); e && st == QC_OK; e = readdir(d)) {
        int folder = 0;
        if (e->d_name[0] == '.' || !qc_begins_with(e->d_name, start))
            continue;
        st = is_kind_in(&folder, arena, dir, e->d_name, QC_PATH_DIR, err);
        if (st != QC_OK || !folder)
            continue;
        ++*count;
        if (!*first || strcmp(e->d_name, *first) < 0)
            st = qc_arena_strndup(arena, first, e->d_name, strlen(e->d_name), err);
    }
    (void)closedir(d);
    return st;
}

/* Sets *name to the snapshot that `main` refers to, if it is among them. Otherwise *name stays as
 * it is. */
static qc_status follow_main(const char **name, qc_arena *arena, const char *dir,
                             const char *snapshots, qc_error *err)
{
    const char *path = NULL, *found = NULL;
    qc_strbuf text;
    int there = 0;
    QC_TRY(qc_path_join(arena, &path, dir, "refs/main", err));
    qc_strbuf_init(&text, REF_MAX_BYTES);
    qc_status st = QC_OK;
    if (qc_file_slurp(path, &text, NULL) == QC_OK && text.len > 0) {
        size_t len = strcspn(text.data, " \r\n/");
        st = qc_arena_strndup(arena, &found, text.data, len, err);
        if (st == QC_OK && len > 0 && found[0] != '.')
            st = is_kind_in(&there, arena, snapshots, found, QC_PATH_DIR, err);
        if (st == QC_OK && there)
            *name = found;
    }
    qc_strbuf_deinit(&text);
    return st;
}

/* Follows dir into its folder "snapshots", which means that it is a model in the cache. */
static qc_status take_snapshot(const char **path, qc_arena *arena, const char *dir, qc_error *err)
{
    const char *snapshots = NULL, *name = NULL;
    size_t count = 0;
    QC_TRY(qc_path_join(arena, &snapshots, dir, "snapshots", err));
    QC_TRY(count_folders(&name, &count, arena, snapshots, "", err));
    if (count == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s is a model's folder in the cache of the Hugging Face hub, and has no snapshot: "
                "it was not downloaded, or was deleted; download the model again",
                dir);
    if (count > 1)
        QC_TRY(follow_main(&name, arena, dir, snapshots, err));
    const char *chosen = NULL;
    QC_TRY(qc_path_join(arena, &chosen, snapshots, name, err));
    if (count > 1)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s is a model's folder in the cache of the Hugging Face hub, with %zu snapshots; "
                "did you mean %s?",
                dir, count, chosen);
    *path = chosen;
    return QC_OK;
}

/* ---- ids ---- */

/* Finds the hub's cache as the hub's own library does. NULL if no variable says where it is. */
static qc_status find_cache(const char **out, qc_arena *arena, qc_error *err)
{
    static const struct {
        const char *variable, *below;
    } places[] = {{"HF_HUB_CACHE", ""},
                  {"HF_HOME", "/hub"},
                  {"XDG_CACHE_HOME", "/huggingface/hub"},
                  {"HOME", "/.cache/huggingface/hub"}};
    *out = NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        const char *value = getenv(places[i].variable);
        if (value && *value)
            return qc_arena_printf(arena, out, err, "%s%s", value, places[i].below);
    }
    return QC_OK;
}

static qc_status refuse_id(const char *id, qc_arena *arena, qc_error *err)
{
    const char *cache = NULL, *dir = NULL, *path = NULL;
    const char *slash = strchr(id, '/');
    QC_TRY(find_cache(&cache, arena, err));
    if (cache) {
        int cached = 0;
        QC_TRY(qc_arena_printf(arena, &dir, err, "%s/models--%.*s--%s", cache, (int)(slash - id),
                               id, slash + 1));
        QC_TRY(is_kind_in(&cached, arena, dir, "snapshots", QC_PATH_DIR, err));
        if (cached && take_snapshot(&path, arena, dir, NULL) == QC_OK)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%.*s does not exist, but the cache of the Hugging Face hub has a model of "
                    "this id; did you mean %s?",
                    NAME_SHOWN_BYTES, id, path);
    }
    QC_FAIL(err, QC_ERR_INPUT,
            "%.*s does not exist; if it is the id of a model on the Hugging Face hub%s, download "
            "it and give its folder: hf download %.*s --local-dir %.*s",
            NAME_SHOWN_BYTES, id, qc_known_model_meant(id) ? ", as 'qconv plan' takes it" : "",
            NAME_SHOWN_BYTES, id, NAME_SHOWN_BYTES, slash + 1);
}

qc_status qc_model_path_settle(const char **path, qc_arena *arena, qc_error *err)
{
    const char *dir = *path, *first = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    int is_model = 0, is_cached = 0;
    size_t count = 0;
    if (qc_path_stat(dir, &kind, NULL, NULL) != QC_OK || kind == QC_PATH_FILE)
        return QC_OK;
    if (kind == QC_PATH_MISSING)
        return qc_hub_id_of(dir) ? refuse_id(qc_hub_id_of(dir), arena, err) : QC_OK;
    QC_TRY(is_kind_in(&is_model, arena, dir, "config.json", QC_PATH_FILE, err));
    if (is_model)
        return QC_OK;
    QC_TRY(is_kind_in(&is_cached, arena, dir, "snapshots", QC_PATH_DIR, err));
    if (is_cached)
        return take_snapshot(path, arena, dir, err);
    QC_TRY(count_folders(&first, &count, arena, dir, "models--", err));
    if (count > 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s is the cache of the Hugging Face hub, with %zu model%s; give one of them, such "
                "as %s/%s",
                dir, count, qc_plural(count), dir, first);
    return QC_OK;
}

static int holds(const char *dir, const char *name)
{
    qc_arena arena;
    int yes = 0;
    qc_arena_init(&arena);
    qc_status st = is_kind_in(&yes, &arena, dir, name, QC_PATH_FILE, NULL);
    qc_arena_deinit(&arena);
    return st == QC_OK && yes;
}

int qc_model_path_swapped(const char *model, const char *out)
{
    if (!out || !holds(out, "config.json") || holds(out, QC_MANIFEST_NAME))
        return 0;
    DIR *d = opendir(model);
    int empty = 1;
    if (!d)
        return is_kind(model, QC_PATH_MISSING);
    for (const struct dirent *e = readdir(d); e && empty; e = readdir(d))
        empty = strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0;
    (void)closedir(d);
    return empty;
}

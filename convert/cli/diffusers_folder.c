#include "convert/cli/diffusers_folder.h"

#include "base/text.h"
#include "base/workers.h"
#include "convert/model/expert_split.h"
#include "convert/model/recipe.h"
#include "convert/output/output_dir.h"
#include "convert/plan/loaders.h"
#include "convert/run/make_manifest.h"
#include "convert/run/part_rank.h"
#include "convert/term/console.h"
#include "convert/term/glob.h"
#include "formats/checkpoint_internal.h"
#include "formats/path_link.h"

#include <stdlib.h>
#include <string.h>

#define TREE_MAX  100000u
#define INDEX_MAX ((size_t)16 << 20)

typedef struct {
    const char *name;
    int convert; /* else copied with the rest */
    size_t weights;
} part;

typedef struct {
    const qc_options *o;
    qc_arena *arena;
    const char *folder;
    qc_tree_file *tree;
    size_t tree_count;
    qc_strbuf index_text; /* of model_index.json */
    part *parts;          /* in the order of model_index.json */
    size_t part_count;
} pipeline;

int qc_is_diffusers_folder(const qc_options *o, const char *path)
{
    const char *index = NULL, *config = NULL;
    qc_path_kind kind = QC_PATH_MISSING, own = QC_PATH_MISSING;
    if (!path ||
        qc_path_join(o->call.arena, &index, path, QC_CHECKPOINT_PIPELINE_NAME, NULL) != QC_OK ||
        qc_path_join(o->call.arena, &config, path, "config.json", NULL) != QC_OK ||
        qc_path_stat(index, &kind, NULL, NULL) != QC_OK ||
        qc_path_stat(config, &own, NULL, NULL) != QC_OK)
        return 0;
    return kind == QC_PATH_FILE && own == QC_PATH_MISSING;
}

/* ---- the parts ---- */

/* Returns what follows "NAME/" in path, or NULL. */
static const char *below(const char *path, const char *name)
{
    size_t n = strlen(name);
    return strncmp(path, name, n) == 0 && path[n] == '/' ? path + n + 1 : NULL;
}

static int is_weights(const char *file)
{
    qc_checkpoint_name n;
    return !strchr(file, '/') &&
           ((qc_checkpoint_name_read(&n, file) && !n.index) || qc_ends_with(file, ".safetensors") ||
            qc_ends_with(file, ".safetensors.zst"));
}

/* Is this one of the large models of a pipeline? A VAE is small and sensitive, and other parts are
 * small. */
static int is_large(const char *name)
{
    static const char *const begin[] = {"transformer", "unet", "text_encoder", "prior",
                                        "controlnet"};
    for (size_t i = 0; i < sizeof begin / sizeof *begin; i++) {
        if (strncmp(name, begin[i], strlen(begin[i])) == 0)
            return 1;
    }
    return 0;
}

static int is_plain_name(const char *name)
{
    return name[0] != '\0' && name[0] != '.' && !strchr(name, '/') && !strchr(name, '\\');
}

static qc_status read_parts(pipeline *p, qc_error *err)
{
    qc_json *doc = NULL;
    const char *path = NULL;
    void *v = NULL;
    size_t count = 0;
    QC_TRY(qc_path_join(p->arena, &path, p->folder, QC_CHECKPOINT_PIPELINE_NAME, err));
    QC_TRY(qc_file_slurp(path, &p->index_text, err));
    qc_status st = qc_json_parse(&doc, p->index_text.data ? p->index_text.data : "",
                                 p->index_text.len, QC_JSON_PYTHON, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "%s", path);
        return st;
    }
    const qc_json_node *root = qc_json_root(doc);
    for (const qc_json_node *n = qc_json_first(root); n; n = qc_json_next(n))
        count++;
    st = qc_arena_alloc(p->arena, &v, count, sizeof *p->parts, err);
    p->parts = v;
    for (const qc_json_node *n = qc_json_first(root); st == QC_OK && n; n = qc_json_next(n)) {
        const char *name = qc_json_key(n);
        /* ["diffusers", "AutoencoderKL"]; [null, null] is a part that this pipeline does without,
         * and names that begin with "_" are no parts. */
        if (qc_json_kind_of(n) != QC_JSON_ARRAY || !qc_json_string_or(qc_json_first(n), NULL) ||
            !is_plain_name(name) || name[0] == '_')
            continue;
        part *one = &p->parts[p->part_count++];
        *one = (part){0};
        st = qc_arena_strndup(p->arena, &one->name, name, strlen(name), err);
        for (size_t i = 0; i < p->tree_count; i++) {
            const char *file = below(p->tree[i].path, name);
            one->weights += file && is_weights(file);
        }
        one->convert = one->weights > 0 && is_large(name);
    }
    qc_json_destroy(doc);
    return st;
}

static qc_status open_pipeline(pipeline *p, const qc_options *o, const char *folder, qc_error *err)
{
    *p = (pipeline){.o = o, .arena = o->call.arena, .folder = folder};
    qc_strbuf_init(&p->index_text, INDEX_MAX);
    QC_TRY(qc_dir_tree(p->arena, folder, TREE_MAX, &p->tree, &p->tree_count, err));
    return read_parts(p, err);
}

/* --keep PART and --quantize PART choose what is copied and what is converted. */
static qc_status choose_parts(pipeline *p, qc_error *err)
{
    const qc_recipe_options *recipe = &p->o->convert.plan.recipe;
    for (uint32_t r = 0; r < recipe->rule_count; r++) {
        const qc_rule *rule = &recipe->rules[r];
        size_t matches = 0;
        for (size_t i = 0; i < p->part_count; i++) {
            if (p->parts[i].weights == 0 || !qc_glob_match(rule->glob, p->parts[i].name))
                continue;
            p->parts[i].convert = rule->quantize;
            matches++;
        }
        if (matches == 0)
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s '%s' names no part of the pipeline %s; to give rules for tensors, convert "
                    "the folder of one part by itself",
                    rule->quantize ? "--quantize" : "--keep", rule->glob, p->folder);
    }
    for (size_t i = 0; i < p->part_count; i++)
        if (p->parts[i].convert)
            return QC_OK;
    QC_FAIL(
        err, QC_ERR_INPUT,
        "%s: no part of this pipeline is a transformer, UNet or text encoder with weights; name "
        "one with --quantize PART",
        p->folder);
}

static qc_status check_options(const qc_options *o, qc_error *err)
{
    qc_rank rank;
    QC_TRY(qc_rank_choose(&rank, &o->convert, err));
    const struct {
        int given;
        const char *name;
    } of_one_model[] = {
        {o->convert.plan.fit.vram != NULL, "--vram"},
        {o->call.lora_count > 0, "--lora"},
        {o->convert.plan.calibrate.text != NULL, "--calibrate"},
        {o->convert.plan.calibrate.hessians != NULL, "--hessians"},
        {o->convert.part_count > 0 || rank.count > 1, "--part (or a Slurm step of several tasks)"},
        {o->convert.plan.recipe.requantize, "--requantize"},
        {o->convert.plan.recipe.drop_mtp, "--drop-mtp"},
        {o->engines != 0, "--for"},
    };
    for (size_t i = 0; i < sizeof of_one_model / sizeof *of_one_model; i++) {
        if (of_one_model[i].given)
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s is for one model, and %s is a pipeline of several; convert the folder of "
                    "each part by itself",
                    of_one_model[i].name, o->call.model);
    }
    return QC_OK;
}

/* Makes the options of one part. Globs that name parts say nothing about its tensors. */
static qc_status part_options(qc_options *out, const pipeline *p, const char *name, qc_error *err)
{
    *out = *p->o;
    out->convert.of_pipeline = 1;
    out->convert.plan.recipe.rule_count = 0;
    QC_TRY(qc_path_join(p->arena, &out->call.model, p->o->call.model, name, err));
    if (p->o->call.out)
        QC_TRY(qc_path_join(p->arena, &out->call.out, p->o->call.out, name, err));
    if (p->o->call.against)
        QC_TRY(qc_path_join(p->arena, &out->call.against, p->o->call.against, name, err));
    return QC_OK;
}

/* A mistake in the last part is found before the first is converted. */
static qc_status check_part(const qc_options *o, qc_error *err)
{
    qc_checkpoint *model = NULL;
    qc_recipe recipe;
    QC_TRY(qc_checkpoint_open(&model, o->call.model, err));
    qc_status st = qc_checkpoint_check_model(model, err);
    if (st == QC_OK)
        st = qc_experts_arrange(model, &o->convert.plan.recipe, err);
    if (st == QC_OK)
        st = qc_recipe_make(&recipe, o->call.arena, model, &o->convert.plan.recipe, err);
    qc_checkpoint_close(model);
    return st;
}

/* ---- results of several parts ---- */

/* Writes what stands around and between the JSON objects of the parts. */
static qc_status print(const qc_options *o, const char *text, qc_error *err)
{
    qc_strbuf out;
    if (!o->call.json)
        return QC_OK;
    qc_strbuf_init(&out, 64);
    qc_strbuf_puts(&out, text);
    return qc_console_deliver(QC_OK, &out, NULL, err);
}

/* ---- what is copied ---- */

static int is_full(const char *file)
{
    qc_checkpoint_name n;
    return qc_checkpoint_name_read(&n, file) && !n.torch && !n.variant;
}

static int is_safetensors(const char *file)
{
    return !strchr(file, '/') && qc_ends_with(file, ".safetensors");
}

/* Is there such a file in the folder of path, whose own name is `name`? */
static int folder_has(const pipeline *p, const char *path, const char *name,
                      int (*is)(const char *file))
{
    size_t folder = (size_t)(name - path);
    for (size_t i = 0; i < p->tree_count; i++)
        if (strncmp(p->tree[i].path, path, folder) == 0 && is(p->tree[i].path + folder))
            return 1;
    return 0;
}

/* Is this a weight in another format or variant, where the folder has the full weights too? */
static int is_twin(const pipeline *p, const char *path)
{
    static const char *const formats[] = {".bin", ".msgpack", ".onnx", ".onnx_data",      ".ckpt",
                                          ".pt",  ".pth",     ".h5",   ".bin.index.json", ".gguf"};
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    qc_checkpoint_name n;
    if (!slash) /* the whole pipeline in one file, of which no output is made */
        return is_weights(path) || qc_ends_with(path, ".ckpt") || qc_ends_with(path, ".gguf") ||
               qc_ends_with(path, ".bin");
    if (qc_checkpoint_name_read(&n, name) && n.variant && !n.torch)
        return folder_has(p, path, name, is_full);
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        if (qc_ends_with(name, formats[i]) && folder_has(p, path, name, is_safetensors))
            return 1;
    }
    return 0;
}

static int is_copied(const pipeline *p, const char *path)
{
    for (size_t i = 0; i < p->part_count; i++) {
        if (p->parts[i].convert && below(path, p->parts[i].name))
            return 0;
    }
    return strcmp(path, QC_CHECKPOINT_PIPELINE_NAME) != 0 && strcmp(path, QC_MANIFEST_NAME) != 0 &&
           path[0] != '.' && !strstr(path, "/.") && !qc_ends_with(path, ".tmp") &&
           !is_twin(p, path);
}

/* The name that a file is copied to. Where there is only a variant, it gets the name of the full
 * weights, so that all parts of the output load alike:
 * "vae/diffusion_pytorch_model.fp16.safetensors" without ".fp16". Shards keep their names, which
 * only their index needs to know. */
static qc_status copied_name(const pipeline *p, const char **out, const char *path, qc_error *err)
{
    const char *slash = strrchr(path, '/');
    qc_checkpoint_name n;
    *out = path;
    if (!slash || !qc_checkpoint_name_read(&n, slash + 1) || !n.variant || n.shard || n.torch)
        return QC_OK;
    return qc_arena_printf(p->arena, out, err, "%.*s%s", (int)(n.variant - 1 - path), path,
                           n.variant + n.variant_len);
}

typedef struct {
    const char *from; /* relative, in the source */
    qc_manifest_file file;
} copy;

static int compare_copies(const void *pa, const void *pb)
{
    const copy *a = pa, *b = pb;
    return strcmp(a->file.path, b->file.path);
}

static qc_status list_copies(pipeline *p, copy **out, size_t *count, qc_error *err)
{
    *count = 0;
    QC_TRY(qc_arena_alloc(p->arena, out, p->tree_count + 1, sizeof **out, err));
    for (size_t i = 0; i < p->tree_count; i++) {
        int leaves = 0;
        if (!is_copied(p, p->tree[i].path))
            continue;
        QC_TRY(qc_path_leaves(p->folder, p->tree[i].path, &leaves, err));
        if (leaves)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: '%s' is a link that leads out of the folder, so a file from elsewhere "
                    "would be copied; put the file itself there",
                    p->folder, p->tree[i].path);
        copy *c = &(*out)[(*count)++];
        c->from = p->tree[i].path;
        c->file.bytes = p->tree[i].bytes;
        QC_TRY(copied_name(p, &c->file.path, c->from, err));
    }
    qsort(*out, *count, sizeof **out, compare_copies);
    for (size_t i = 1; i < *count; i++) {
        if (strcmp((*out)[i - 1].file.path, (*out)[i].file.path) == 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: '%s' and '%s' are variants of one file, and the file itself is not there; "
                    "keep only the one to be copied",
                    p->folder, (*out)[i - 1].from, (*out)[i].from);
    }
    return QC_OK;
}

/* Makes the manifest of the copied files; model_index.json is one of them. */
static qc_status fill_manifest(qc_manifest *m, const pipeline *p, const copy *copies, size_t count,
                               qc_error *err)
{
    const qc_plan_options *o = &p->o->convert.plan;
    const qc_recipe_options *r = &o->recipe;
    memset(m, 0, sizeof *m);
    m->qconv_version = QCONV_VERSION;
    m->to = qc_to_name(r->to);
    m->rest = qc_rest_name(r->rest);
    m->max_shard_bytes = o->max_shard_bytes;
    QC_TRY(qc_arena_alloc(p->arena, &m->rules, r->rule_count + 1, sizeof *m->rules, err));
    for (uint32_t i = 0; i < r->rule_count; i++)
        QC_TRY(qc_arena_printf(p->arena, &m->rules[m->rule_count++], err, "%s %s",
                               r->rules[i].quantize ? "quantize" : "keep", r->rules[i].glob));
    QC_TRY(qc_arena_alloc(p->arena, &m->files, count + 1, sizeof *m->files, err));
    size_t i = 0;
    while (i < count && strcmp(copies[i].file.path, QC_CHECKPOINT_PIPELINE_NAME) < 0)
        m->files[m->file_count++] = copies[i++].file;
    m->files[m->file_count++] =
        (qc_manifest_file){QC_CHECKPOINT_PIPELINE_NAME, p->index_text.len,
                           qc_digest_bytes(p->index_text.data, p->index_text.len)};
    while (i < count)
        m->files[m->file_count++] = copies[i++].file;
    return QC_OK;
}

static qc_status digest_of(qc_digest *out, const char *path, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, SIZE_MAX / 2);
    qc_status st = qc_file_slurp(path, &text, err);
    if (st == QC_OK)
        *out = qc_digest_bytes(text.data ? text.data : "", text.len);
    qc_strbuf_deinit(&text);
    return st;
}

/* *same says that OUT has these files already, byte for byte, from a conversion to the same
 * scheme. */
static qc_status is_copied_already(int *same, const pipeline *p, const copy *copies, size_t count,
                                   qc_error *err)
{
    qc_manifest want, have;
    const char *path = NULL;
    *same = 0;
    QC_TRY(fill_manifest(&want, p, copies, count, err));
    if (qc_manifest_load(&have, p->arena, p->o->call.out, NULL) != QC_OK || have.shard_count > 0 ||
        have.file_count != want.file_count || strcmp(have.to, want.to) != 0 ||
        strcmp(have.rest, want.rest) != 0)
        return QC_OK;
    for (size_t i = 0; i < want.file_count; i++) {
        const qc_manifest_file *a = &want.files[i], *b = &have.files[i];
        if (strcmp(a->path, b->path) != 0 || a->bytes != b->bytes)
            return QC_OK;
    }
    for (size_t i = 0; i < count; i++) {
        const qc_manifest_file *b = have.files;
        qc_digest source;
        while (strcmp(b->path, copies[i].file.path) != 0)
            b++;
        QC_TRY(qc_path_join(p->arena, &path, p->folder, copies[i].from, err));
        QC_TRY(digest_of(&source, path, err));
        if (!qc_digest_equal(&source, &b->digest))
            return QC_OK;
    }
    *same = 1;
    return QC_OK;
}

static qc_status copy_into(qc_output_dir *d, pipeline *p, copy *copies, size_t count, qc_error *err)
{
    qc_manifest m;
    qc_digest digest;
    for (size_t i = 0; i < count; i++) {
        const char *from = NULL;
        QC_TRY(qc_path_join(p->arena, &from, p->folder, copies[i].from, err));
        QC_TRY(qc_output_dir_copy(d, copies[i].file.path, from, &copies[i].file.bytes,
                                  &copies[i].file.digest, err));
        if (qc_interrupted())
            QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted; the same command continues");
    }
    QC_TRY(fill_manifest(&m, p, copies, count, err));
    QC_TRY(qc_manifest_stage(d, &m, &digest, err));
    return qc_output_dir_move(d, err);
}

static qc_status copy_rest(pipeline *p, copy *copies, size_t count, qc_error *err)
{
    const qc_options *o = p->o;
    qc_output_dir d = QC_OUTPUT_DIR_NONE;
    qc_path_kind kind = QC_PATH_MISSING;
    const char *manifest = NULL;
    int same = 0;
    QC_TRY(is_copied_already(&same, p, copies, count, err));
    if (same)
        return QC_OK;
    QC_TRY(qc_path_join(p->arena, &manifest, o->call.out, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(manifest, &kind, NULL, err));
    if (kind == QC_PATH_FILE && !o->convert.force)
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: it holds the output of another conversion; choose another OUT, or replace "
                "that one with --force",
                o->call.out);
    qc_status st =
        qc_output_dir_begin(&d, p->arena, o->call.out, o->call.model, o->convert.force, err);
    if (st == QC_OK)
        st = copy_into(&d, p, copies, count, err);
    qc_output_dir_abort(&d);
    return st;
}

/* ---- convert ---- */

static qc_status run_parts(const pipeline *p, qc_part_command one, qc_error *err)
{
    int first = 1;
    for (size_t i = 0; i < p->part_count; i++) {
        qc_options own;
        if (!p->parts[i].convert)
            continue;
        QC_TRY(part_options(&own, p, p->parts[i].name, err));
        QC_TRY(print(p->o, first ? "[\n" : ",\n", err));
        first = 0;
        qc_console_detail(&p->o->call, 1, "part '%s' of the pipeline", p->parts[i].name);
        QC_TRY(one(&own, err));
        if (qc_interrupted())
            QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted; the same command continues");
    }
    return print(p->o, "]\n", err);
}

/* Says how to run the whole pipeline. For a form that only qconv reads, the parts have said what to
 * do. */
static qc_status print_steps(const qc_options *o, qc_error *err)
{
    if (o->call.json || o->call.quiet ||
        (o->convert.plan.recipe.to == QC_TO_INT8 && o->convert.plan.recipe.block_elems))
        return QC_OK;
    qc_loaders l = qc_loaders_of_pipeline(&o->convert.plan);
    qc_strbuf text;
    qc_strbuf_init(&text, (size_t)1 << 20);
    return qc_console_deliver(qc_next_steps_text(&l, o->call.program, o->call.out, &text, err),
                              &text, NULL, err);
}

static qc_status convert_parts(pipeline *p, qc_part_command one, qc_error *err)
{
    const qc_options *o = p->o;
    copy *copies = NULL;
    size_t count = 0;
    const char *index = NULL;
    qc_checkpoint_names converted = {0};
    QC_TRY(choose_parts(p, err));
    for (size_t i = 0; i < p->part_count; i++) {
        qc_options own;
        if (!p->parts[i].convert)
            continue;
        qc_checkpoint_names_add(&converted, p->parts[i].name);
        QC_TRY(part_options(&own, p, p->parts[i].name, err));
        QC_TRY(check_part(&own, err));
    }
    QC_TRY(list_copies(p, &copies, &count, err));
    qc_console_detail(&o->call, o->call.quiet ? 9 : 0,
                      "%s is a diffusers pipeline: %s %s converted, everything else (%zu "
                      "files) is copied",
                      o->call.model, qc_checkpoint_names_text(&converted), qc_are(converted.count),
                      count + 1);
    if (o->convert.dry_run)
        return run_parts(p, one, err);
    QC_TRY(copy_rest(p, copies, count, err));
    QC_TRY(run_parts(p, one, err));
    QC_TRY(qc_path_join(p->arena, &index, o->call.out, QC_CHECKPOINT_PIPELINE_NAME, err));
    QC_TRY(qc_file_put(index, p->index_text.data, p->index_text.len, err));
    return print_steps(o, err);
}

qc_status qc_diffusers_convert(const qc_options *o, qc_part_command one, qc_error *err)
{
    pipeline p;
    QC_TRY(check_options(o, err));
    if (o->call.out)
        QC_TRY(qc_output_check(o->call.arena, o->call.out, o->call.model, o->convert.force, NULL,
                               err));
    qc_status st = open_pipeline(&p, o, o->call.model, err);
    if (st == QC_OK)
        st = convert_parts(&p, one, err);
    qc_strbuf_deinit(&p.index_text);
    return st;
}

/* ---- verify and unpack ---- */

/* Finds the parts that OUT holds as outputs of their own, which are those without copied files. */
static qc_status find_outputs(pipeline *p, const qc_manifest *m, qc_error *err)
{
    for (size_t i = 0; i < p->part_count; i++) {
        int copied = 0, output = 0;
        for (size_t k = 0; k < m->file_count && !copied; k++)
            copied = below(m->files[k].path, p->parts[i].name) != NULL;
        for (size_t k = 0; k < p->tree_count && !output; k++) {
            const char *file = below(p->tree[k].path, p->parts[i].name);
            output = file && strcmp(file, QC_MANIFEST_NAME) == 0;
        }
        p->parts[i].convert = !copied;
        if (!copied && !output)
            QC_FAIL(err, QC_ERR_CHECK,
                    "%s: the part '%s' is missing or not finished; the command that made the other "
                    "parts continues with it",
                    p->folder, p->parts[i].name);
    }
    return QC_OK;
}

qc_status qc_diffusers_each(const qc_options *o, qc_part_command one, qc_error *err)
{
    pipeline p;
    qc_manifest m;
    qc_options rest = *o;
    rest.call.against = NULL;
    rest.convert.of_pipeline = 1;
    QC_TRY(qc_manifest_load(&m, o->call.arena, o->call.model, err));
    qc_status st = open_pipeline(&p, o, o->call.model, err);
    if (st == QC_OK)
        st = find_outputs(&p, &m, err);
    if (st == QC_OK)
        st = print(o, "[\n", err);
    if (st == QC_OK)
        st = one(&rest, err);
    for (size_t i = 0; st == QC_OK && i < p.part_count; i++) {
        qc_options own;
        if (!p.parts[i].convert)
            continue;
        st = part_options(&own, &p, p.parts[i].name, err);
        if (st == QC_OK)
            st = print(o, ",\n", err);
        if (st == QC_OK)
            st = one(&own, err);
    }
    if (st == QC_OK)
        st = print(o, "]\n", err);
    qc_strbuf_deinit(&p.index_text);
    return st;
}

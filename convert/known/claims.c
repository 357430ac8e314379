#include "convert/known/claims.h"

#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/families/family.h"
#include "convert/known/model_tensors.h"
#include "convert/model/geometry.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_rules.h"
#include "convert/term/size_text.h"
#include "formats/checkpoint_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A tensor by its place in the model. */
typedef struct {
    const char *prefix, *rest; /* the prefix as a group of the family has it */
    uint64_t number;
    const qc_checkpoint_tensor *tensor;
} place;

typedef struct {
    const qc_checkpoint *model;
    const qc_family *family;
    place *places; /* of the checkpoint's tensors, sorted */
    size_t count;
    uint64_t layers;
    int wants_head;
    qc_checkpoint_names missing, surplus;
    size_t misshapen;
    char shapes[256]; /* of the first tensor that has another shape */
} claims;

static int by_layer_of(const place *a, const place *b)
{
    const int order = strcmp(a->prefix, b->prefix);
    return order ? order : (a->number > b->number) - (a->number < b->number);
}

static int by_place(const void *pa, const void *pb)
{
    const place *a = pa, *b = pb;
    const int order = by_layer_of(a, b);
    return order ? order : strcmp(a->rest, b->rest);
}

static const place *find(const place *places, size_t count, const place *wanted)
{
    return bsearch(wanted, places, count, sizeof *places, by_place);
}

/* Sorts the tensors that have a place, and returns how many they are. */
static size_t places_of(place *out, const qc_family *f, const qc_checkpoint_tensor *tensors,
                        size_t count)
{
    size_t n = 0;
    for (size_t i = 0; i < count; i++) {
        place *p = &out[n];
        p->tensor = &tensors[i];
        p->rest = qc_family_place(f, tensors[i].name, &p->prefix, &p->number);
        n += p->rest != NULL;
    }
    qsort(out, n, sizeof *out, by_place);
    return n;
}

/* Returns the first place of `of`'s layer whose rest has the first n bytes of its rest, or NULL;
 * or, with p, the next one behind that. */
static const place *next_start(const claims *c, const place *of, size_t n, const place *p)
{
    size_t at = p ? (size_t)(p - c->places) + 1 : 0;
    for (size_t high = c->count; !p && at < high;) {
        const size_t middle = at + (high - at) / 2;
        const place *m = &c->places[middle];
        const int order = by_layer_of(m, of);
        if (order < 0 || (order == 0 && strncmp(m->rest, of->rest, n) < 0))
            at = middle + 1;
        else
            high = middle;
    }
    p = &c->places[at];
    return at < c->count && by_layer_of(p, of) == 0 && strncmp(p->rest, of->rest, n) == 0 ? p
                                                                                          : NULL;
}

/* Experts lie one by one or in stacks, as loaders and trainers have it. Does the layer have them in
 * the other way than `rest` says? */
static int has_other_experts(const claims *c, const place *wanted)
{
    const char *at = strstr(wanted->rest, "experts.");
    const size_t n = at ? (size_t)(at - wanted->rest) + strlen("experts.") : 0;
    int other = 0;
    if (!at || (at > wanted->rest && at[-1] != '.'))
        return 0;
    for (const place *p = NULL; !other && (p = next_start(c, wanted, n, p)) != NULL;)
        other = qc_is_digit(p->rest[n]) != qc_is_digit(wanted->rest[n]);
    return other;
}

/* Are there tensors under another name that stand for this one? Norms of old have gamma and beta,
 * a weight that is quantized has codes and scales, and stacks of experts in MXFP4 have blocks. */
static int has_other_form(const claims *c, const place *wanted)
{
    const char *parameter = qc_family_parameter(wanted->rest);
    const int is_weight = strcmp(parameter, "weight") == 0;
    const size_t n = strlen(wanted->rest) - strlen(parameter);
    const char *alone = is_weight ? "gamma" : *parameter ? "beta" : "_blocks";
    for (const place *p = NULL; n > 0 && (p = next_start(c, wanted, n, p)) != NULL;) {
        const char *name = p->rest + n;
        const int is_code = !strchr(name, '.') || qc_begins_with(name, "weight.");
        if (strcmp(name, alone) == 0 ||
            (is_weight && is_code && !qc_config_word_in(name, " bias beta ")))
            return 1;
    }
    return 0;
}

/* Do loaders do without this tensor, or do many checkpoints leave it out rightly? */
static int is_optional(const claims *c, const place *p)
{
    qc_tensor_class class;
    if (qc_begins_with(p->prefix, "mtp.") || qc_ends_with(p->rest, ".weight_scale_inv") ||
        (p->prefix[0] == '%' && qc_ends_with(p->prefix, "#.") && p->number >= c->layers))
        return 1;
    if (qc_begins_with(p->rest, "pooler."))
        return 1;
    /* A table that head and embedding share may stand under the head's name. */
    const place head_of = {p->prefix, "lm_head.", p->number, NULL};
    if (!c->wants_head && strstr(p->rest, "embed_tokens.") &&
        next_start(c, &head_of, strlen(head_of.rest), NULL))
        return 1;
    const int head =
        qc_begins_with(p->rest, "cls.") ||
        (qc_family_classify(c->family, p->tensor->name, &class) && class.role == QC_ROLE_HEAD);
    return head && !c->wants_head;
}

static int have_same_shape(const qc_checkpoint_tensor *a, const qc_checkpoint_tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->dims, b->dims, a->ndim * sizeof *a->dims) == 0;
}

/* Looks for one tensor that config.json asks for. */
static void look_for(claims *c, const place *wanted)
{
    const place *found = find(c->places, c->count, wanted);
    const qc_checkpoint_tensor *w = wanted->tensor, *t = found ? found->tensor : NULL;
    if (!found && !has_other_form(c, wanted) && !is_optional(c, wanted) &&
        !has_other_experts(c, wanted))
        qc_checkpoint_names_add(&c->missing, w->name);
    if (!found || !qc_dtype_is_quantizable(t->dtype) || have_same_shape(t, w) || c->misshapen++ > 0)
        return;
    char has[QC_SHAPE_TEXT_BYTES], wants[QC_SHAPE_TEXT_BYTES];
    (void)snprintf(c->shapes, sizeof c->shapes, "'%.60s' is %.80s and not %.80s", t->name,
                   qc_text_shape(has, t->dims, t->ndim), qc_text_shape(wants, w->dims, w->ndim));
}

/* Counts what nothing asks for. Of towers there are many variants, and buffers, heads, scales of
 * quantized weights and layers that predict further tokens need not be asked for. */
static void look_at_surplus(claims *c, const place *wanted, size_t count)
{
    for (size_t i = 0; i < c->count; i++) {
        char module[256];
        qc_tensor_class class;
        const place *p = &c->places[i];
        if (p->prefix[0] != '%' || find(wanted, count, p) || is_optional(c, p) ||
            strstr(p->rest, "experts."))
            continue;
        if (qc_family_classify(c->family, p->tensor->name, &class) &&
            (class.role == QC_ROLE_HEAD || class.role == QC_ROLE_STATE ||
             class.traits & QC_TRAIT_FIXED))
            continue;
        /* "x.weight.absmax", "x.qweight", "x.weight_scale", "x.gamma" belong to a module x. */
        const char *cut = strstr(p->rest, ".weight");
        cut = cut ? cut : strrchr(p->rest, '.');
        const size_t len = cut ? (size_t)(cut - p->rest) : 0;
        (void)snprintf(module, sizeof module, "%.*s.weight", (int)len, p->rest);
        place of = *p;
        of.rest = module;
        if (len == 0 || qc_ends_with(p->rest, ".bias") || !find(wanted, count, &of))
            qc_checkpoint_names_add(&c->surplus, p->tensor->name);
    }
}

/* ---- what usually happened ---- */

/* Reads "-00001-of-00002." in the name of the file, where there is one and so no index. Returns the
 * number of all, or 1. */
static unsigned long long count_shards(const qc_checkpoint *m)
{
    const char *of = m->file_count == 1 ? strstr(m->files[0].name, "-of-") : NULL;
    char *end = NULL;
    const unsigned long long n = of ? strtoull(of + 4, &end, 10) : 1;
    return of && end > of + 4 && *end == '.' && n > 0 && n <= 1000000 ? n : 1;
}

static int any_name_has(const qc_checkpoint *m, const char *text)
{
    for (size_t i = 0; i < m->tensor_count; i++)
        if (strstr(m->tensors[i].name, text))
            return 1;
    return 0;
}

/* Says what usually happened to a checkpoint that lacks something, and what to do. */
static const char *remedy_for(const qc_checkpoint *m, int lacks_all)
{
    if (count_shards(m) > 1)
        return "download the files that are missing, too";
    if (any_name_has(m, ".base_layer.") && any_name_has(m, ".lora_A"))
        return "an adapter lies in it that is not merged: merge it with peft's merge_and_unload, "
               "or give the base model and --lora";
    if (lacks_all)
        return "its names are another library's: take the checkpoint for transformers";
    return "download the checkpoint again, or correct config.json";
}

/* ---- layers of a type that no family knows ---- */

typedef struct {
    const char *name; /* its first `len` bytes are the list's: "model.layers." */
    size_t len;
    uint64_t number;
} layer;

static int by_layer(const void *pa, const void *pb)
{
    const layer *a = pa, *b = pb;
    const size_t n = a->len < b->len ? a->len : b->len;
    int order = memcmp(a->name, b->name, n);
    if (order == 0)
        order = (a->len > b->len) - (a->len < b->len);
    return order ? order : (a->number > b->number) - (a->number < b->number);
}

static int is_list(const layer *a, const layer *b)
{
    return a->len == b->len && memcmp(a->name, b->name, a->len) == 0;
}

/* Finds the first list of layers in a name. */
static int layer_of(layer *out, const char *name)
{
    static const char *const lists[] = {"layers.", "h.", "blocks.", "block.", "layer."};
    for (const char *at = name; at; at = strchr(at, '.') ? strchr(at, '.') + 1 : NULL) {
        for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
            const size_t n = strlen(lists[i]);
            char *end = NULL;
            if (strncmp(at, lists[i], n) != 0 || at[n] < '0' || at[n] > '9')
                continue;
            *out = (layer){name, (size_t)(at - name) + n, strtoull(at + n, &end, 10)};
            return *end == '.';
        }
    }
    return 0;
}

/* The longest list of layers has as many as config.json says, and numbers have no gaps. Other lists
 * may: of nn.Sequential, the modules without weights are missing. Where two are the longest, both
 * may have a count of their own. */
static qc_status check_layers(qc_checkpoint *m, qc_arena *arena, qc_error *err)
{
    qc_geometry g;
    qc_config config;
    layer *all = NULL;
    size_t n = 0;
    uint64_t layers = 0;
    if (qc_geometry_read(&g, arena, m->config, NULL) != QC_OK || g.layer_count == 0)
        return QC_OK;
    /* The geometry counts the layers with a cache, which a decoder beside a model of images has. */
    qc_config_open(&config, m->config);
    QC_TRY(qc_config_read(&layers, &config, "num_hidden_layers n_layer", QC_CONFIG_MAX_LAYERS,
                          g.layer_count, err));
    layers = layers < g.layer_count ? layers : g.layer_count;
    /* Dory's config.json counts the attention and the MLP of a layer (transformers 5.24). */
    layers /= strcmp(g.model_type, "dory") == 0 ? 2 : 1;
    QC_TRY(qc_arena_array(arena, &all, m->tensor_count, err));
    for (size_t i = 0; i < m->tensor_count; i++)
        n += (size_t)layer_of(&all[n], m->tensors[i].name);
    qsort(all, n, sizeof *all, by_layer);
    const layer *longest = NULL;
    uint64_t most = 0;
    int several = 0;
    for (size_t i = 0, next; i < n; i = next) {
        uint64_t count = 1;
        for (next = i + 1; next < n && is_list(&all[i], &all[next]); next++)
            count += all[next].number != all[next - 1].number;
        const uint64_t last = all[next - 1].number;
        if (last + 1 == layers && count < layers) {
            longest = &all[i];
            most = count;
            several = 0;
            break;
        }
        several = count == most || (several && count < most);
        longest = count > most ? &all[i] : longest;
        most = count > most ? count : most;
    }
    if (!longest || several || most >= layers)
        return QC_OK;
    return qc_arena_printf(&m->arena, &m->lacks, err,
                           "config.json asks for %" PRIu64 " layers, and '%.*s' has %" PRIu64,
                           layers, (int)longest->len, longest->name, most);
}

/* ---- a head that is tied and differs ---- */

/* Compares 64 pieces of 4 KB, so that it takes no time for gigabytes: what was trained apart
 * differs everywhere. */
static qc_status compare(int *differ, const qc_checkpoint *m, const qc_checkpoint_tensor *a,
                         const qc_checkpoint_tensor *b, qc_error *err)
{
    enum { PIECES = 64, PIECE = 4096 };
    unsigned char x[PIECE], y[PIECE];
    qc_st_cursor *cursor = NULL;
    *differ = !have_same_shape(a, b);
    QC_TRY(qc_st_cursor_create(&cursor, err));
    qc_status st = QC_OK;
    for (uint64_t i = 0; i < PIECES && !*differ && st == QC_OK; i++) {
        const size_t n = a->bytes < PIECE ? (size_t)a->bytes : PIECE;
        const uint64_t at = (a->bytes - n) / (PIECES - 1) * i;
        st = qc_checkpoint_read(m, cursor, a, at, x, n, err);
        if (st == QC_OK)
            st = qc_checkpoint_read(m, cursor, b, at, y, n, err);
        *differ = st == QC_OK && memcmp(x, y, n) != 0;
    }
    qc_st_cursor_destroy(cursor);
    return st;
}

/* Warns of a head that is not the embeddings which it is tied to. transformers 5.24 (tie_weights)
 * ties two that are both there only if they are equal; 4.57.6 does as text_config says, which has a
 * default of its class; vLLM 0.32.0 leaves the head out. */
static qc_status check_head(qc_checkpoint *m, const qc_config *c, const qc_family *f, qc_error *err)
{
    static const char flag[] = "tie_word_embeddings";
    const qc_checkpoint_tensor *head = NULL, *table = NULL;
    const qc_json_node *own = qc_config_field(c->root, flag);
    const int is_said = qc_config_text_field(c, flag) != NULL;
    size_t heads = 0, tables = 0;
    int differ = 0;
    if (!qc_config_flag(c, flag, qc_family_is(f, "TIED")) || !qc_json_bool_or(own, 1))
        return QC_OK;
    for (size_t i = 0; i < m->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &m->tensors[i];
        if (qc_ends_with(t->name, "lm_head.weight") && ++heads > 0)
            head = t;
        if (qc_ends_with(t->name, "embed_tokens.weight") && ++tables > 0)
            table = t;
    }
    if (heads != 1 || tables != 1 || head->dtype != table->dtype ||
        !qc_dtype_is_quantizable(head->dtype))
        return QC_OK;
    QC_TRY(compare(&differ, m, head, table, err));
    if (!differ)
        return QC_OK;
    return qc_checkpoint_warn(
        m, err,
        "'%s' is not '%s', although config.json ties them (%s%s): transformers 5 takes the head, "
        "transformers 4 and vLLM take the embeddings for it; set tie_word_embeddings to false%s if "
        "the head is meant, or leave it out of the file",
        head->name, table->name, is_said && !own ? "text_config." : "",
        is_said ? "tie_word_embeddings is true" : "tie_word_embeddings is true by default",
        c->text != c->root ? " in config.json and in its text_config" : " in config.json");
}

/* Reads from config.json whether the class has a head that makes tokens and is not tied. */
static int wants_head(const qc_json_node *root)
{
    const qc_config own = {.root = root, .text = root};
    if (qc_config_flag(&own, "tie_word_embeddings", 0))
        return 0;
    const qc_json_node *list = qc_config_field(root, "architectures");
    const qc_json_node *first =
        list && qc_json_kind_of(list) == QC_JSON_ARRAY ? qc_json_first(list) : NULL;
    const char *kind = first ? qc_json_string_or(first, "") : "";
    return strstr(kind, "ForCausalLM") || strstr(kind, "LMHead") ||
           strstr(kind, "ForConditionalGeneration") || strstr(kind, "ForMaskedLM") ||
           strstr(kind, "ForPreTraining");
}

/* Compares the tensors of a type that is known. */
static qc_status check_tensors(claims *c, qc_checkpoint *model, const qc_model_tensors *tensors,
                               qc_arena *arena, int *lacks_all, qc_error *err)
{
    place *wanted = NULL;
    QC_TRY(qc_arena_array(arena, &wanted, tensors->count, err));
    QC_TRY(qc_arena_array(arena, &c->places, model->tensor_count, err));
    c->count = places_of(c->places, c->family, model->tensors, model->tensor_count);
    const size_t count = places_of(wanted, c->family, tensors->rows, tensors->count);
    for (size_t i = 0; i < count; i++)
        look_for(c, &wanted[i]);
    *lacks_all = c->missing.count == count;
    if (c->missing.count > 0)
        return qc_arena_printf(&model->arena, &model->lacks, err,
                               "%zu of %zu tensors that config.json asks for %s missing: %s",
                               c->missing.count, count, qc_are(c->missing.count),
                               qc_checkpoint_names_text(&c->missing));
    if (c->misshapen > 0)
        return qc_arena_printf(&model->arena, &model->lacks, err,
                               "%zu of %zu tensors %s another shape than config.json asks for: %s",
                               c->misshapen, count, c->misshapen == 1 ? "has" : "have", c->shapes);
    if (!qc_config_quantization(model->config))
        look_at_surplus(c, wanted, count);
    if (c->surplus.count == 0)
        return QC_OK;
    return qc_checkpoint_warn(model, err, "%s: %zu tensor%s more than config.json asks for: %s",
                              model->path, c->surplus.count, qc_plural(c->surplus.count),
                              qc_checkpoint_names_text(&c->surplus));
}

/* Tensors that the index lists are in the files, but for those of multi-token prediction, which
 * transformers does not look for. */
static qc_status check_listed(qc_checkpoint *m, qc_error *err)
{
    qc_checkpoint_names lost = {0};
    uint64_t layers = UINT64_MAX;
    if (qc_json_as_u64(qc_config_get(m, "num_hidden_layers"), "", &layers, NULL) != QC_OK)
        layers = UINT64_MAX;
    for (size_t i = 0; i < m->lost_count; i++)
        if (!qc_rules_predicts_more(m->lost[i], layers))
            qc_checkpoint_names_add(&lost, m->lost[i]);
    if (lost.count == 0)
        return QC_OK;
    return qc_arena_printf(&m->arena, &m->lacks, err, "%zu tensor%s of the index %s in no file: %s",
                           lost.count, qc_plural(lost.count), qc_are(lost.count),
                           qc_checkpoint_names_text(&lost));
}

static qc_status check(qc_checkpoint *model, qc_arena *arena, int *lacks_all, qc_error *err)
{
    qc_model_tensors tensors;
    qc_config config;
    claims c = {.model = model, .family = qc_family_of(model)};
    qc_config_open(&config, model->config);
    c.wants_head = wants_head(config.root);
    if (count_shards(model) > 1)
        return qc_arena_printf(&model->arena, &model->lacks, err,
                               "the name of its file says that it is one of %llu",
                               count_shards(model));
    QC_TRY(check_head(model, &config, c.family, err));
    if (qc_model_tensors_make(&tensors, arena, model->config, 1, NULL) != QC_OK)
        return check_layers(model, arena, err);
    QC_TRY(qc_config_read(&c.layers, &config, "num_hidden_layers n_layer", QC_CONFIG_MAX_LAYERS, 0,
                          err));
    return check_tensors(&c, model, &tensors, arena, lacks_all, err);
}

qc_status qc_claims_check(qc_checkpoint *model, int incomplete, qc_error *err)
{
    qc_arena arena;
    int lacks_all = 0;
    if (!model->config || model->is_adapter)
        return QC_OK;
    qc_arena_init(&arena);
    qc_status st = check(model, &arena, &lacks_all, err);
    if (st == QC_OK && !model->lacks)
        st = check_listed(model, err);
    qc_arena_deinit(&arena);
    QC_TRY(st);
    if (!model->lacks || incomplete)
        return QC_OK;
    QC_FAIL(err, QC_ERR_INPUT, "%s: %s; %s; --incomplete converts what is there", model->path,
            model->lacks, remedy_for(model, lacks_all));
}

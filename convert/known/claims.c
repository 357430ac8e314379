#include "convert/known/claims.h"

#include "base/text.h"
#include "convert/families/config_fields.h"
#include "convert/families/family.h"
#include "convert/known/model_tensors.h"
#include "convert/model/geometry.h"
#include "convert/model/recipe_coded.h"
#include "convert/model/recipe_rules.h"
#include "formats/checkpoint_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A tensor by its place in the model. Prefixes are the texts of the family's groups, so those that
 * are equal have the same address or the same letters. */
typedef struct {
    const char *prefix, *rest;
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

static int by_place(const void *pa, const void *pb)
{
    const place *a = pa, *b = pb;
    int order = strcmp(a->prefix, b->prefix);
    if (order == 0)
        order = (a->number > b->number) - (a->number < b->number);
    return order ? order : strcmp(a->rest, b->rest);
}

/* Is `model` understood, so that every one of its tensors is known? */
static int place_of(place *out, const qc_family *f, const qc_checkpoint_tensor *t)
{
    out->tensor = t;
    out->rest = qc_family_place(f, t->name, &out->prefix, &out->number);
    return out->rest != NULL;
}

static size_t places_of(place *out, const qc_family *f, const qc_checkpoint_tensor *tensors,
                        size_t count)
{
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        n += (size_t)place_of(&out[n], f, &tensors[i]);
    qsort(out, n, sizeof *out, by_place);
    return n;
}

/* Returns the first place of the same layer whose rest begins with `start`, or NULL. */
static const place *find_start(const place *places, size_t count, const place *of,
                               const char *start)
{
    place wanted = *of;
    size_t low = 0, high = count;
    wanted.rest = start;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (by_place(&places[middle], &wanted) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == count || strcmp(places[low].prefix, of->prefix) != 0 ||
        places[low].number != of->number || strncmp(places[low].rest, start, strlen(start)) != 0)
        return NULL;
    return &places[low];
}

/* Puts the name of the tensor's module in `out`, with a dot behind it. */
static void module_of(char out[256], const char *rest)
{
    const size_t tail = strlen(qc_family_parameter(rest));
    (void)snprintf(out, 256, "%.*s", (int)(strlen(rest) - tail), rest);
}

/* Experts lie one by one or in stacks, as loaders and trainers have it. Does the layer have them in
 * the other way than `rest` says? */
static int has_other_experts(const claims *c, const place *p)
{
    char start[256];
    const char *at = strstr(p->rest, "experts.");
    if (!at || (at > p->rest && at[-1] != '.'))
        return 0;
    const int single = at[8] >= '0' && at[8] <= '9';
    (void)snprintf(start, sizeof start, "%.*s", (int)(at + 8 - p->rest), p->rest);
    const place *q = find_start(c->places, c->count, p, start);
    for (; q && q < c->places + c->count && q->number == p->number &&
           strncmp(q->rest, start, strlen(start)) == 0;
         q++) {
        const char first = q->rest[strlen(start)];
        if (single != (first >= '0' && first <= '9'))
            return 1;
    }
    return 0;
}

/* Do loaders do without this tensor, or do many checkpoints leave it out rightly? */
static int is_optional(const claims *c, const place *p)
{
    qc_tensor_class class;
    if (strncmp(p->prefix, "mtp.", 4) == 0 || qc_ends_with(p->rest, ".weight_scale_inv") ||
        (p->prefix[0] == '%' && qc_ends_with(p->prefix, "#.") && p->number >= c->layers))
        return 1;
    if (strncmp(p->rest, "pooler.", 7) == 0)
        return 1;
    /* A table that head and embedding share may stand under the head's name. */
    if (!c->wants_head && strstr(p->rest, "embed_tokens.") &&
        find_start(c->places, c->count, p, "lm_head."))
        return 1;
    const int head =
        strncmp(p->rest, "cls.", 4) == 0 ||
        (qc_family_classify(c->family, p->tensor->name, &class) && class.role == QC_ROLE_HEAD);
    return head && !c->wants_head;
}

static int is_float(qc_dtype d)
{
    return d == QC_DTYPE_F16 || d == QC_DTYPE_BF16 || d == QC_DTYPE_F32 || d == QC_DTYPE_F64;
}

static void shape_text(char *out, size_t room, const qc_checkpoint_tensor *t)
{
    size_t len = (size_t)snprintf(out, room, "[");
    for (unsigned i = 0; i < t->ndim && len < room; i++)
        len += (size_t)snprintf(out + len, room - len, "%s%" PRIu64, i ? ", " : "", t->dims[i]);
    if (len < room)
        (void)snprintf(out + len, room - len, "]");
}

/* Looks for one tensor that config.json asks for. */
static void look_for(claims *c, const place *wanted)
{
    char module[256];
    const place *found = bsearch(wanted, c->places, c->count, sizeof *c->places, by_place);
    const qc_checkpoint_tensor *w = wanted->tensor;
    if (found) {
        const qc_checkpoint_tensor *t = found->tensor;
        if (is_float(t->dtype) &&
            (t->ndim != w->ndim || memcmp(t->dims, w->dims, t->ndim * sizeof *t->dims) != 0)) {
            if (c->misshapen++ == 0) {
                char has[80], wants[80];
                shape_text(has, sizeof has, t);
                shape_text(wants, sizeof wants, w);
                (void)snprintf(c->shapes, sizeof c->shapes, "'%.60s' is %s and not %s", t->name,
                               has, wants);
            }
        }
        return;
    }
    /* Norms of old are called gamma and beta, and a weight that is quantized has other tensors. */
    module_of(module, wanted->rest);
    const char *parameter = qc_family_parameter(wanted->rest);
    place other = *wanted;
    char old[256];
    (void)snprintf(old, sizeof old, "%.240s%s", module,
                   strcmp(parameter, "weight") == 0 ? "gamma" : "beta");
    other.rest = old;
    if (bsearch(&other, c->places, c->count, sizeof *c->places, by_place))
        return;
    if (strcmp(parameter, "weight") == 0 && module[0]) {
        const size_t n = strlen(module);
        const place *q = find_start(c->places, c->count, wanted, module);
        for (; q && q < c->places + c->count && strncmp(q->rest, module, n) == 0; q++)
            if (strcmp(q->rest + n, "bias") != 0 && !strchr(q->rest + n, '.'))
                return;
    }
    if (!is_optional(c, wanted) && !has_other_experts(c, wanted))
        qc_checkpoint_names_add(&c->missing, w->name);
}

/* Counts what nothing asks for beside the tensors of towers, whose variants are many, buffers, scales of weights that are quantized, heads and
 * layers that predict further tokens. */
static void look_at_surplus(claims *c, const place *wanted, size_t count)
{
    for (size_t i = 0; i < c->count; i++) {
        char module[256];
        qc_tensor_class class;
        const place *p = &c->places[i];
        if (p->prefix[0] != '%' || bsearch(p, wanted, count, sizeof *wanted, by_place) ||
            is_optional(c, p) || strstr(p->rest, "experts."))
            continue;
        if (qc_family_classify(c->family, p->tensor->name, &class) &&
            (class.role == QC_ROLE_HEAD || class.role == QC_ROLE_STATE ||
             class.traits & QC_TRAIT_FIXED))
            continue;
        /* "x.weight.absmax", "x.qweight", "x.weight_scale", "x.gamma" belong to a module x. */
        const char *cut = strstr(p->rest, ".weight");
        const size_t len =
            cut ? (size_t)(cut - p->rest)
                : (size_t)(strrchr(p->rest, '.') ? strrchr(p->rest, '.') - p->rest : 0);
        (void)snprintf(module, sizeof module, "%.*s.weight", (int)len, p->rest);
        place of = *p;
        of.rest = module;
        if (len > 0 && !qc_ends_with(p->rest, ".bias") &&
            bsearch(&of, wanted, count, sizeof *wanted, by_place))
            continue;
        qc_checkpoint_names_add(&c->surplus, p->tensor->name);
    }
}

/* ---- what usually happened ---- */

/* Reads "-00001-of-00002." in the names of the files. */
static void count_shards(const qc_checkpoint *m, uint64_t *here, uint64_t *all)
{
    *here = *all = 0;
    for (size_t i = 0; i < m->file_count; i++) {
        const char *of = strstr(m->files[i].name, "-of-");
        char *end = NULL;
        const unsigned long long n = of ? strtoull(of + 4, &end, 10) : 0;
        if (!of || end == of + 4 || *end != '.' || n > 1000000)
            continue;
        *all = n > *all ? n : *all;
        ++*here;
    }
}

static int any_name_has(const qc_checkpoint *m, const char *text)
{
    for (size_t i = 0; i < m->tensor_count; i++)
        if (strstr(m->tensors[i].name, text))
            return 1;
    return 0;
}

/* what: the first half of the sentence. */
static qc_status refuse(const qc_checkpoint *m, const char *what, int none_fits, qc_error *err)
{
    uint64_t here = 0, all = 0;
    char why[160] = "download the checkpoint again, or correct config.json";
    count_shards(m, &here, &all);
    if (here > 0 && here < all)
        (void)snprintf(why, sizeof why, "download the files that are missing, too");
    else if (any_name_has(m, ".base_layer.") && any_name_has(m, ".lora_A"))
        (void)snprintf(why, sizeof why,
                       "an adapter lies in it that is not merged: merge it with peft's "
                       "merge_and_unload, or give the base model and --lora");
    else if (any_name_has(m, "_fsdp_wrapped_module.") || any_name_has(m, "_orig_mod."))
        (void)snprintf(why, sizeof why,
                       "its names are those of wrapped modules: save it with save_pretrained");
    else if (none_fits)
        (void)snprintf(why, sizeof why,
                       "its names are another library's: take the checkpoint for transformers");
    QC_FAIL(err, QC_ERR_INPUT, "%s: %s; %s; --incomplete converts what is there", m->path, what,
            why);
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
static qc_status check_layers(const qc_checkpoint *m, qc_arena *arena, qc_error *err)
{
    qc_geometry g;
    layer *all = NULL;
    size_t n = 0;
    if (qc_geometry_read(&g, arena, m->config, NULL) != QC_OK || g.layer_count == 0)
        return QC_OK;
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
        if (last + 1 == g.layer_count && count < g.layer_count) {
            longest = &all[i];
            most = count;
            several = 0;
            break;
        }
        several = count == most || (several && count < most);
        longest = count > most ? &all[i] : longest;
        most = count > most ? count : most;
    }
    if (!longest || several || most >= g.layer_count)
        return QC_OK;
    char what[256];
    (void)snprintf(what, sizeof what,
                   "config.json asks for %" PRIu32 " layers, and '%.*s' has %" PRIu64,
                   g.layer_count, (int)longest->len, longest->name, most);
    return refuse(m, what, 0, err);
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

static qc_status check(qc_checkpoint *model, qc_arena *arena, qc_error *err)
{
    qc_model_tensors tensors;
    claims c = {.model = model, .family = qc_family_of(model)};
    uint64_t here = 0, all = 0;
    if (!model->config || model->is_adapter)
        return QC_OK;
    count_shards(model, &here, &all);
    if (here > 0 && here < all) {
        char what[96];
        (void)snprintf(what, sizeof what,
                       "the names of its files say that %" PRIu64 " of %" PRIu64 " %s here", here,
                       all, qc_are(here));
        return refuse(model, what, 0, err);
    }
    if (qc_model_tensors_make(&tensors, arena, model->config, NULL) != QC_OK)
        return check_layers(model, arena, err);
    qc_config config;
    qc_config_open(&config, model->config);
    QC_TRY(qc_config_read(&c.layers, &config, "num_hidden_layers n_layer", QC_CONFIG_MAX_LAYERS, 0,
                          err));
    c.wants_head = wants_head(config.root);
    place *wanted = NULL;
    QC_TRY(qc_arena_array(arena, &wanted, tensors.count, err));
    QC_TRY(qc_arena_array(arena, &c.places, model->tensor_count, err));
    c.count = places_of(c.places, c.family, model->tensors, model->tensor_count);
    const size_t count = places_of(wanted, c.family, tensors.rows, tensors.count);
    for (size_t i = 0; i < count; i++)
        look_for(&c, &wanted[i]);
    if (c.missing.count > 0) {
        char what[400];
        (void)snprintf(
            what, sizeof what, "%zu of %zu tensors that config.json asks for %s missing: %s",
            c.missing.count, count, qc_are(c.missing.count), qc_checkpoint_names_text(&c.missing));
        return refuse(model, what, c.missing.count == count, err);
    }
    if (c.misshapen > 0) {
        char what[400];
        (void)snprintf(what, sizeof what,
                       "%zu of %zu tensors %s another shape than config.json asks for: %s",
                       c.misshapen, count, c.misshapen == 1 ? "has" : "have", c.shapes);
        return refuse(model, what, 0, err);
    }
    look_at_surplus(&c, wanted, count);
    if (c.surplus.count > 0)
        QC_TRY(qc_checkpoint_warn(model, err, "%s: %zu tensor%s more than config.json asks for: %s",
                                  model->path, c.surplus.count, qc_plural(c.surplus.count),
                                  qc_checkpoint_names_text(&c.surplus)));
    return QC_OK;
}

/* Tensors that the index lists are in the files, but for those of multi-token prediction, which
 * transformers does not look for. */
static qc_status check_listed(const qc_checkpoint *m, qc_error *err)
{
    qc_checkpoint_names lost = {0};
    char what[320];
    uint64_t layers = UINT64_MAX;
    if (m->lost_count == 0)
        return QC_OK;
    if (qc_json_as_u64(qc_config_get(m, "num_hidden_layers"), "", &layers, NULL) != QC_OK)
        layers = UINT64_MAX;
    for (size_t i = 0; i < m->lost_count; i++)
        if (!qc_rules_predicts_more(m->lost[i], layers))
            qc_checkpoint_names_add(&lost, m->lost[i]);
    if (lost.count == 0)
        return QC_OK;
    (void)snprintf(what, sizeof what, "%zu tensor%s of the index %s in no file: %s", lost.count,
                   qc_plural(lost.count), qc_are(lost.count), qc_checkpoint_names_text(&lost));
    return refuse(m, what, 0, err);
}

qc_status qc_claims_check(qc_checkpoint *model, qc_error *err)
{
    qc_arena arena;
    qc_arena_init(&arena);
    qc_status st = check_listed(model, err);
    if (st == QC_OK)
        st = check(model, &arena, err);
    qc_arena_deinit(&arena);
    return st;
}

/* Gathers facts from three sources, of which only the first must be there: the headers; the recipe
 * (roles, and which tensors are the parts of one quantized weight); and the manifest of a qconv
 * output (errors, origin). It then shows them to the engines of convert/plan/engines.h. */
#include "convert/verify/inspect_facts.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/known/claims.h"
#include "convert/term/glob.h"

#include <stdlib.h>
#include <string.h>

#define MAX_MANIFEST_BYTES (1u << 30)

/* ---- roles and schemes ---- */

/* Asks for the recipe of a cast that keeps everything. It refuses no tensor and names every stored
 * weight. */
static qc_status ask_recipe(qc_facts *f, const qc_recipe_entry **entries, qc_error *err)
{
    qc_recipe_options cast;
    qc_recipe recipe;
    qc_rule keep_all = {0, "*"};
    qc_error trouble = {0};
    memset(&cast, 0, sizeof cast);
    memset(&recipe, 0, sizeof recipe);
    cast.to = QC_TO_BF16;
    cast.double_quant = 1;
    cast.rules = &keep_all;
    cast.rule_count = f->model->tensor_count > 0;
    qc_status st = qc_recipe_make(&recipe, f->arena, f->model, &cast, &trouble);
    *entries = NULL;
    if (st == QC_OK) {
        *entries = recipe.entries;
        f->known_type = recipe.known_type;
        f->model_type = recipe.model_type && *recipe.model_type ? recipe.model_type : NULL;
        return QC_OK;
    }
    if (qc_status_exit_code(st) != 3)
        return qc_error_pass(err, &trouble, st);
    /* The headers can still be shown. */
    return qc_arena_strndup(f->arena, &f->recipe_trouble, trouble.msg, strlen(trouble.msg), err);
}

static qc_status describe(qc_facts *f, uint32_t i, const qc_recipe_entry *e, qc_error *err)
{
    const qc_checkpoint_tensor *t = &f->model->tensors[i];
    qc_tensor_facts *tf = &f->tensors[i];
    tf->owner = e ? e->owner : QC_NO_TENSOR;
    tf->bytes = t->bytes;
    tf->ndim = t->ndim;
    memcpy(tf->dims, t->dims, sizeof tf->dims);
    tf->is_counted = !qc_dtype_is_integer(t->dtype);
    if (e) {
        tf->role = qc_role_name(e->role);
        tf->is_state = e->role == QC_ROLE_STATE || e->scheme == QC_SCHEME_ABSORBED;
        tf->stored = tf->is_state ? NULL : e->stored;
        tf->coded = e->coded;
    }
    if (tf->stored || tf->coded) { /* how it is quantized, and its shape */
        if (tf->coded) {
            QC_TRY(qc_stored_of_integers(&tf->stored, f->arena, f->model, i, tf->coded, err));
            QC_TRY(qc_integers_name(&tf->scheme, f->arena, tf->coded, err));
            tf->is_packed = qc_coding_is_packed(tf->coded->coding);
            if (tf->is_packed && tf->coded->tile_rows == 1)
                tf->block_elems = qc_integers_block(tf->coded);
        } else {
            tf->scheme = tf->stored->name;
        }
        if (tf->stored)
            tf->block_elems = qc_stored_block(tf->stored);
        tf->ndim = tf->coded ? tf->coded->ndim : tf->stored->ndim;
        memcpy(tf->dims, tf->coded ? tf->coded->dims : tf->stored->dims, sizeof tf->dims);
        tf->is_counted = 1;
    }
    if (tf->is_state)
        tf->is_counted = 0;
    return qc_shape_elems(tf->dims, tf->ndim, &tf->elems, err);
}

/* Finds the quantized weight that a state tensor goes with: W.absmax -> W, M.SCB -> M.weight,
 * P_scales -> P_blocks, W_scale_inv and W_scale -> W. */
static qc_status find_owner(qc_facts *f, uint32_t i, qc_error *err)
{
    static const struct {
        const char *tail, *instead;
    } tails[] = {{"_scales", "_blocks"}, {"_scale_inv", ""}, {"_scale", ""}};
    const char *name = f->model->tensors[i].name;
    const char *candidate = NULL;
    for (size_t k = 0; k < sizeof tails / sizeof *tails; k++) {
        if (!qc_ends_with(name, tails[k].tail) || f->tensors[i].owner != QC_NO_TENSOR)
            continue;
        QC_TRY(qc_arena_printf(f->arena, &candidate, err, "%.*s%s",
                               (int)(strlen(name) - strlen(tails[k].tail)), name,
                               tails[k].instead));
        f->tensors[i].owner = qc_checkpoint_find_index(f->model, candidate);
    }
    for (size_t cut = strlen(name); cut > 0 && f->tensors[i].owner == QC_NO_TENSOR; cut--) {
        if (name[cut] != '.')
            continue;
        for (int with_weight = 0; with_weight < 2; with_weight++) {
            QC_TRY(qc_arena_printf(f->arena, &candidate, err, "%.*s%s", (int)cut, name,
                                   with_weight ? ".weight" : ""));
            uint32_t owner = qc_checkpoint_find_index(f->model, candidate);
            if (owner != QC_NO_TENSOR && f->tensors[owner].scheme) {
                f->tensors[i].owner = owner;
                break;
            }
        }
    }
    uint32_t owner = f->tensors[i].owner;
    if (owner != QC_NO_TENSOR && !f->tensors[owner].scheme)
        f->tensors[i].owner = QC_NO_TENSOR;
    else if (owner != QC_NO_TENSOR)
        f->tensors[owner].bytes += f->model->tensors[i].bytes;
    return QC_OK;
}

/* ---- manifest ---- */

static qc_status read_manifest(qc_facts *f, const char *dir, qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    qc_manifest *m = NULL;
    qc_strbuf text;
    QC_TRY(qc_path_join(f->arena, &path, dir, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        return QC_OK;
    QC_TRY(qc_arena_array(f->arena, &m, 1, err));
    qc_strbuf_init(&text, MAX_MANIFEST_BYTES);
    qc_status st = qc_file_slurp(path, &text, err);
    if (st == QC_OK) {
        qc_error trouble = {0};
        st = qc_manifest_parse(m, f->arena, text.data ? text.data : "", text.len, &trouble);
        if (st == QC_OK)
            f->manifest = m;
        else if (qc_status_exit_code(st) == 3 || st == QC_ERR_CHECK)
            /* verify judges a damaged manifest; the tensors can be shown without it. */
            st = qc_arena_printf(f->arena, &f->manifest_trouble, err, "%s: %s", QC_MANIFEST_NAME,
                                 trouble.msg);
        else if (err)
            *err = trouble;
    }
    qc_strbuf_deinit(&text);
    for (size_t i = 0; f->manifest && i < m->tensor_count; i++) {
        uint32_t tensor = qc_checkpoint_find_index(f->model, m->tensors[i].name);
        if (tensor != QC_NO_TENSOR)
            f->tensors[tensor].written = &m->tensors[i];
    }
    return st;
}

/* ---- order and sums ---- */

static qc_facts_sum *scheme_sum(qc_facts *f, const char *name)
{
    for (unsigned i = 0; i < f->scheme_count; i++)
        if (strcmp(f->by_scheme[i].name, name) == 0)
            return &f->by_scheme[i];
    if (f->scheme_count == QC_FACTS_SCHEMES) {
        f->by_scheme[QC_FACTS_SCHEMES - 1].name = "others";
        return &f->by_scheme[QC_FACTS_SCHEMES - 1];
    }
    qc_facts_sum *sum = &f->by_scheme[f->scheme_count++];
    sum->name = name;
    return sum;
}

static void add_up(qc_facts *f)
{
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &f->model->tensors[i];
        const qc_tensor_facts *tf = &f->tensors[i];
        qc_facts_sum *d = &f->by_dtype[t->dtype];
        d->name = qc_dtype_name(t->dtype);
        d->tensors++;
        d->bytes += t->bytes;
        if (tf->is_state) {
            f->state_count++;
            if (tf->owner != QC_NO_TENSOR)
                continue;
        } else if (!tf->is_counted) {
            f->uncounted++;
        } else {
            f->weights += tf->elems;
            d->weights += tf->elems;
        }
        qc_facts_sum *s = scheme_sum(f, tf->scheme ? tf->scheme : "plain");
        s->tensors++;
        s->weights += tf->is_counted ? tf->elems : 0;
        s->bytes += tf->bytes;
    }
    for (size_t i = 0; i < f->model->file_count; i++)
        f->file_bytes += f->model->files[i].file_bytes;
}

double qc_facts_bits(uint64_t bytes, uint64_t weights)
{
    return (double)bytes * 8.0 / (double)weights;
}

qc_status qc_facts_gather(qc_facts *f, qc_arena *arena, const char *path, qc_error *err)
{
    const qc_recipe_entry *entries = NULL;
    memset(f, 0, sizeof *f);
    f->arena = arena;
    qc_status st = QC_OK;
    QC_TRY(qc_checkpoint_open(&f->model, path, err));
    QC_TRY_GOTO(st, failed, ask_recipe(f, &entries, err));
    QC_TRY_GOTO(st, failed, qc_arena_array(f->arena, &f->tensors, f->model->tensor_count, err));
    for (uint32_t i = 0; i < f->model->tensor_count; i++)
        QC_TRY_GOTO(st, failed, describe(f, i, entries ? &entries[i] : NULL, err));
    for (uint32_t i = 0; i < f->model->tensor_count; i++)
        if (f->tensors[i].is_state)
            QC_TRY_GOTO(st, failed, find_owner(f, i, err));
    if (f->model->is_dir)
        QC_TRY_GOTO(st, failed, read_manifest(f, path, err));
    QC_TRY_GOTO(st, failed,
                qc_natural_order(&f->order, f->arena, f->model->tensors,
                                 offsetof(qc_checkpoint_tensor, name), sizeof *f->model->tensors,
                                 f->model->tensor_count, err));
    add_up(f);
    return QC_OK;
failed:
    qc_checkpoint_close(f->model);
    f->model = NULL;
    return st;
}

/* ---- engines ---- */

qc_status qc_facts_ask_engines(qc_facts *f, unsigned engines, qc_error *err)
{
    const qc_json_node *config = f->model->config ? qc_json_root(f->model->config) : NULL;
    const qc_json_node *q = qc_json_get(config, "quantization_config");
    const char *method = qc_json_string_or(qc_json_get(q, "quant_method"), "");
    qc_served_weight *weights = NULL;
    QC_TRY(qc_arena_array(f->arena, &weights, f->model->tensor_count, err));
    QC_TRY(qc_claims_check(f->model, 1, err));
    qc_served s = {.arena = f->arena,
                   .model = f->model,
                   .model_type = f->model_type ? f->model_type : "",
                   .skipped = qc_json_get(q, "llm_int8_skip_modules"),
                   .lacks = qc_loaders_lack(f->model),
                   .no_manifest = !f->manifest,
                   .finished = 1,
                   .weights = weights};
    for (size_t i = 0; i < f->model->file_count; i++)
        s.compressed |= f->model->files[i].compressed;
    if (strcmp(method, "qconv") == 0)
        s.own_form = qc_json_string_or(qc_json_get(q, "quant_type"), "unknown");
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_tensor_facts *tf = &f->tensors[i];
        weights[i] =
            (qc_served_weight){.is_weight = !tf->is_state && tf->is_counted && tf->ndim == 2,
                               .is_stack = tf->scheme && !tf->is_state && tf->ndim == 3,
                               .name = f->model->tensors[i].name,
                               .elems = tf->elems};
        if (!tf->scheme && !tf->is_state && qc_dtype_is_fp8(f->model->tensors[i].dtype))
            s.foreign = "fp8"; /* its scales have names that nobody knows, or are not there */
        if (!tf->scheme || tf->is_state)
            continue;
        if (tf->coded && !qc_served_set_integers(&weights[i], tf->coded))
            s.foreign = tf->scheme;
        if (tf->coded && tf->coded->coding == QC_CODING_AWQ)
            s.awq = weights[i].name;
        if (tf->stored && !tf->coded) {
            weights[i].scheme = tf->stored->stored_as;
            weights[i].block_elems = tf->stored->block_elems;
        }
    }
    /* What only loads outputs of qconv is not one of "all" engines for anything else. */
    f->asked = s.no_manifest && engines == QC_ENGINES_ALL ? engines & ~QC_ENGINES_OURS : engines;
    return qc_engines_check(&f->refused, &s, f->asked, err);
}

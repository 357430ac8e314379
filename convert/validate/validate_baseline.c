/* Decides whether the output is good enough: the errors of an earlier run as a file, and the
 * verdict on this run. */
#include "convert/validate/validate_report.h"

#include "base/text.h"
#include "formats/file_io.h"
#include "formats/json_strict.h"
#include "formats/json_writer.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BASELINE_VERSION 1u
#define BASELINE_MAX     (256u << 20)
#define CAPTURED         "captured"
#define RANDOM           "normal"

/* ---- the file ------------------------------------------------------------------------------- */

qc_status qc_validate_baseline_text(const qc_validate_report *r, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_u64(&w, "qconv_baseline", BASELINE_VERSION);
    qc_json_put_text(&w, "qconv_version", QCONV_VERSION);
    qc_json_put_text(&w, "activations", r->activations ? CAPTURED : RANDOM);
    qc_json_put_u64(&w, "seed", r->seed);
    qc_json_put_u64(&w, "rows", r->rows);
    qc_json_begin_list(&w, "layers");
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (l->why_not)
            continue;
        if (!isfinite(l->weight_error) || !isfinite(l->output_error))
            QC_FAIL(err, QC_ERR_CHECK,
                    "--save-baseline: the errors of '%s' are not finite, so no later run could be "
                    "compared with them",
                    l->pair->name);
        qc_json_begin_row(&w, NULL);
        qc_json_put_text(&w, "name", l->pair->name);
        qc_json_put_double(&w, "weight_error", l->weight_error);
        qc_json_put_double(&w, "output_error", l->output_error);
        qc_json_end(&w);
    }
    qc_json_end(&w);
    return qc_json_end_text(&w);
}

static qc_status read_error(const qc_json_node *n, const char *key, double *out, qc_error *err)
{
    QC_TRY(qc_json_as_double(qc_json_get(n, key), key, out, err));
    if (!(*out >= 0.0))
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected 0 or more", key);
    return QC_OK;
}

static qc_status read_layers(qc_validate_baseline *out, qc_arena *arena, const qc_json_node *list,
                             qc_error *err)
{
    if (!list || qc_json_kind_of(list) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "layers: expected an array");
    QC_TRY(qc_arena_alloc(arena, &out->layers, qc_json_count(list) + 1, sizeof *out->layers, err));
    for (const qc_json_node *n = qc_json_first(list); n; n = qc_json_next(n)) {
        qc_validate_base_layer *l = &out->layers[out->layer_count++];
        const char *name = NULL;
        QC_TRY(qc_json_as_string(qc_json_get(n, "name"), "name", &name, err));
        QC_TRY(qc_arena_strdup(arena, &l->name, name, err));
        QC_TRY(read_error(n, "weight_error", &l->weight_error, err));
        QC_TRY(read_error(n, "output_error", &l->output_error, err));
    }
    qsort(out->layers, out->layer_count, sizeof *out->layers, qc_by_text);
    for (size_t i = 1; i < out->layer_count; i++)
        if (strcmp(out->layers[i - 1].name, out->layers[i].name) == 0)
            QC_FAIL(err, QC_ERR_INPUT, "layers: expected each layer once, found '%s' twice",
                    out->layers[i].name);
    return QC_OK;
}

static qc_status read_document(qc_validate_baseline *out, qc_arena *arena, const qc_json_node *root,
                               qc_error *err)
{
    uint64_t version = 0;
    const char *activations = NULL;
    if (qc_json_as_u64(qc_json_get(root, "qconv_baseline"), "qconv_baseline", &version, NULL) !=
            QC_OK ||
        version != BASELINE_VERSION)
        QC_FAIL(err, QC_ERR_INPUT,
                "expected a baseline of version %u, as --save-baseline writes it",
                BASELINE_VERSION);
    QC_TRY(qc_json_as_string(qc_json_get(root, "activations"), "activations", &activations, err));
    QC_TRY(qc_json_as_u64(qc_json_get(root, "seed"), "seed", &out->seed, err));
    QC_TRY(qc_json_as_u64(qc_json_get(root, "rows"), "rows", &out->rows, err));
    out->captured = strcmp(activations, CAPTURED) == 0;
    if (!out->captured && strcmp(activations, RANDOM) != 0)
        QC_FAIL(err, QC_ERR_INPUT, "activations: expected '" RANDOM "' or '" CAPTURED "'");
    return read_layers(out, arena, qc_json_get(root, "layers"), err);
}

qc_status qc_validate_baseline_read(qc_validate_baseline *out, qc_arena *arena, const char *path,
                                    qc_error *err)
{
    qc_json *doc = NULL;
    memset(out, 0, sizeof *out);
    out->path = path;
    QC_TRY(qc_json_read_file(&doc, path, "--baseline: ", BASELINE_MAX, err));
    qc_status st = read_document(out, arena, qc_json_root(doc), err);
    if (st != QC_OK)
        qc_error_prefix(err, "--baseline: %s", path);
    qc_json_destroy(doc);
    return st;
}

/* ---- the verdict ---------------------------------------------------------------------------- */

typedef struct {
    qc_validate_report *r;
    const qc_validate_baseline *base;
    qc_arena *arena;
} judge;

static qc_status fail_layer(const judge *j, qc_validate_layer *l, const char *name, const char *why,
                            qc_error *err)
{
    qc_validate_report *r = j->r;
    if (l && l->failure) {
        QC_TRY(qc_arena_printf(j->arena, &l->failure, err, "%s; %s", l->failure, why));
        r->failures[r->failure_count - 1].why = l->failure;
        return QC_OK;
    }
    if (l)
        l->failure = why;
    r->failures[r->failure_count++] = (qc_validate_failure){name, why};
    return QC_OK;
}

/* The test is !(x <= limit), so that a NaN fails. */
static qc_status limit(const judge *j, qc_validate_layer *l, const char *what, double x,
                       double most, const char *whose, qc_error *err)
{
    const char *why = NULL;
    if (x <= most)
        return QC_OK;
    if (!isfinite(x))
        QC_TRY(qc_arena_printf(j->arena, &why, err, "its %s error is not finite", what));
    else
        QC_TRY(qc_arena_printf(j->arena, &why, err, "%s error %.4g is above %s %.4g", what, x,
                               whose, most));
    return fail_layer(j, l, l->pair->name, why, err);
}

static const qc_validate_base_layer *find_base(const qc_validate_baseline *b, const char *name)
{
    qc_validate_base_layer key = {.name = name};
    return b->layer_count ? bsearch(&key, b->layers, b->layer_count, sizeof *b->layers, qc_by_text)
                          : NULL;
}

static qc_status judge_layer(const judge *j, qc_validate_layer *l, qc_error *err)
{
    const qc_validate_report *r = j->r;
    const qc_validate_base_layer *old = j->base ? find_base(j->base, l->pair->name) : NULL;
    const char *why = NULL;
    if (l->why_not) {
        if (!old)
            return QC_OK;
        QC_TRY(qc_arena_printf(j->arena, &why, err, "is in the baseline, but %s", l->why_not));
        return fail_layer(j, l, l->pair->name, why, err);
    }
    QC_TRY(limit(j, l, "weight", l->weight_error, DBL_MAX, "", err));
    QC_TRY(limit(j, l, "kernel", l->kernel_error, qc_validate_kernel_limit(l->x_dtype),
                 "what rounding can explain,", err));
    QC_TRY(limit(j, l, "output", l->output_error, r->max_error > 0.0 ? r->max_error : DBL_MAX,
                 "--max-error", err));
    for (unsigned i = 0; i < l->time_count; i++) {
        const qc_validate_time *t = &l->times[i];
        char what[64];
        (void)snprintf(what, sizeof what, "M = %" PRIu64 ": kernel", t->m);
        QC_TRY(limit(j, l, what, t->kernel_error, qc_validate_kernel_limit(l->x_dtype),
                     "what rounding can explain,", err));
    }
    if (!old)
        return QC_OK;
    double more = 1.0 + r->tolerance;
    QC_TRY(limit(j, l, "weight", l->weight_error, old->weight_error * more, "the baseline's", err));
    return limit(j, l, "output", l->output_error, old->output_error * more, "the baseline's", err);
}

qc_status qc_validate_baseline_fits(const qc_validate_baseline *base, const qc_validate_report *r,
                                    qc_error *err)
{
    if (base->captured != (r->activations != NULL) || base->rows != r->rows ||
        (!base->captured && base->seed != r->seed))
        QC_FAIL(err, QC_ERR_INPUT,
                "--baseline: %s was made with other activations (%s, seed %" PRIu64 ", %" PRIu64
                " rows)",
                base->path, base->captured ? CAPTURED : RANDOM, base->seed, base->rows);
    return QC_OK;
}

qc_status qc_validate_baseline_cover(const qc_validate_baseline *base, qc_validate_report *r,
                                     qc_error *err)
{
    r->in_baseline = 0;
    for (size_t i = 0; i < r->layer_count; i++)
        r->in_baseline += !r->layers[i].why_not && find_base(base, r->layers[i].pair->name) != NULL;
    if (r->in_baseline == 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "--baseline: %s has %zu layers, none of them among the %zu that are measured; was "
                "it made of another model, or with another --sample?",
                base->path, base->layer_count, r->measured);
    return QC_OK;
}

qc_status qc_validate_judge(qc_validate_report *r, const qc_validate_pairs *pairs,
                            const qc_validate_baseline *base, qc_arena *arena, qc_error *err)
{
    judge j = {r, base, arena};
    QC_TRY(
        qc_arena_array(arena, &r->failures, r->layer_count + (base ? base->layer_count : 0), err));
    for (size_t i = 0; i < r->layer_count; i++)
        QC_TRY(judge_layer(&j, &r->layers[i], err));
    if (!base)
        return QC_OK;
    /* Layers of the baseline that OUT does not have. */
    const char **names;
    QC_TRY(qc_arena_alloc(arena, &names, pairs->count + 1, sizeof *names, err));
    for (size_t i = 0; i < pairs->count; i++)
        names[i] = pairs->pairs[i].name;
    qsort(names, pairs->count, sizeof *names, qc_by_text);
    for (size_t i = 0; i < base->layer_count; i++) {
        const char *name = base->layers[i].name;
        if (!bsearch(&name, names, pairs->count, sizeof *names, qc_by_text))
            QC_TRY(
                fail_layer(&j, NULL, name, "is in the baseline, but is not quantized here", err));
    }
    return QC_OK;
}

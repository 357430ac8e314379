/* qconv verify OUT: is every byte of the output what was written? With --against: is it MODEL? */
#include "convert/verify/verify_report.h"

#include "base/text.h"
#include "convert/cli/commands.h"
#include "convert/model/recipe_stored.h"
#include "convert/term/console.h"
#include "convert/term/progress.h"
#include "convert/verify/output_scan.h"

#include <stdlib.h>
#include <string.h>

#define TREE_MAX 1000000u /* files below an output */

/* A file that the manifest does not list is no damage, but nobody vouches for it. */
static qc_status warn_of_strangers(const qc_options *o, const qc_manifest *m, qc_error *err)
{
    qc_tree_file *found = NULL;
    size_t count = 0, n = 0, strangers = 0;
    const char *first = NULL;
    const char **known = NULL;
    QC_TRY(qc_arena_alloc(o->call.arena, &known, 2 * m->shard_count + m->file_count + 1,
                          sizeof(char *), err));
    for (size_t i = 0; i < m->shard_count; i++, n++) {
        known[n++] = m->shards[i].name; /* beside the .zst that is listed it was compared, too */
        QC_TRY(qc_arena_printf(o->call.arena, &known[n], err, "%s%s", m->shards[i].name,
                               qc_manifest_ending(m)));
    }
    for (size_t i = 0; i < m->file_count; i++)
        known[n++] = m->files[i].path;
    known[n++] = QC_MANIFEST_NAME;
    qsort(known, n, sizeof *known, qc_by_text);
    QC_TRY(qc_dir_tree(o->call.arena, o->model, TREE_MAX, &found, &count, err));
    for (size_t i = 0; i < count; i++) {
        if (bsearch(&found[i].path, known, n, sizeof *known, qc_by_text))
            continue;
        if (strangers++ == 0)
            first = found[i].path;
    }
    if (strangers > 0)
        qc_console_warn(&o->call, "%s: '%s'%s not in the manifest, so nothing is known of %s",
                        o->model, first, strangers > 1 ? " and others are" : " is",
                        strangers > 1 ? "them" : "it");
    return QC_OK;
}

/* The bytes of OUT that the comparison reads; without a manifest, the bytes of its files. */
static qc_status count_bytes(const qc_options *o, const qc_manifest *m, int found, uint64_t *total,
                             qc_error *err)
{
    qc_tree_file *files = NULL;
    size_t count = 0;
    qc_path_kind kind = QC_PATH_MISSING;
    *total = 0;
    for (size_t i = 0; found && i < m->shard_count; i++)
        *total += m->shards[i].content_bytes;
    if (found)
        return QC_OK;
    QC_TRY(qc_path_stat(o->model, &kind, total, err));
    if (kind != QC_PATH_DIR)
        return QC_OK;
    *total = 0;
    QC_TRY(qc_dir_tree(o->call.arena, o->model, TREE_MAX, &files, &count, err));
    for (size_t i = 0; i < count; i++)
        *total += files[i].bytes;
    return QC_OK;
}

static qc_status verify_against(const qc_options *o, qc_error *err)
{
    qc_manifest m;
    qc_against_result r;
    qc_progress *progress = NULL;
    uint64_t total = 0;
    int found = 0;
    QC_TRY(qc_manifest_find(&m, &found, o->call.arena, o->model, err));
    QC_TRY(count_bytes(o, &m, found, &total, err));
    qc_console_detail(&o->call, 1, "comparing %s with %s, %s", o->model, o->against,
                      found ? "as its manifest says" : "by names, as it has no manifest");
    const qc_against_options how = {
        .out = o->model, .model = o->against, .loras = o->loras, .manifest = found ? &m : NULL};
    QC_TRY(qc_progress_create(&progress, &o->call, "verifying", total, err));
    qc_status st = qc_against_run(&r, &o->call, &how, progress, err);
    double seconds = qc_progress_seconds(progress);
    qc_progress_destroy(progress);
    QC_TRY(st);
    if (found)
        QC_TRY(warn_of_strangers(o, &m, err));
    QC_TRY(qc_against_report(&o->call, &how, &r, seconds, err));
    if (r.faults > 0)
        QC_FAIL(err, QC_ERR_CHECK, "%s: %s: %s%s", o->model, r.first.what, r.first.why,
                r.faults > 1 ? " (and more)" : "");
    return QC_OK;
}

/* Compares plain shards beside the listed .zst, which loaders other than qconv would read. */
static qc_status scan_twins(const qc_options *o, const qc_manifest *m, qc_scan_result *r,
                            qc_error *err)
{
    qc_manifest plain = *m;
    qc_scan_result twins;
    const qc_scan_options so = {.threads = o->call.threads, .shards_only = 1, .where_there = 1};
    if (!m->compressed)
        return QC_OK;
    plain.compressed = 0;
    QC_TRY(qc_scan_output(&twins, o->call.arena, o->model, &plain, &so, err));
    if (r->problem_count == 0)
        r->first = twins.first;
    r->problem_count += twins.problem_count;
    return QC_OK;
}

/* Finds the quantized weights and holds the sizes, shapes and block sizes of each against each
 * other. Those that the manifest lists must be among them, with all of their tensors. */
static qc_status find_weights(const qc_checkpoint *output, qc_arena *arena, const qc_manifest *m,
                              qc_error *err)
{
    qc_stored_set stored;
    qc_coded_set coded;
    QC_TRY(qc_stored_find_codes(&stored, &coded, arena, output, err));
    for (size_t i = 0; i < m->tensor_count; i++) {
        const char *name = m->tensors[i].name, *scheme = m->tensors[i].scheme;
        const uint32_t t = qc_checkpoint_find_index(output, name);
        unsigned s = 0;
        while (s < QC_SCHEME_COUNT && strcmp(qc_schemes[s].name, scheme) != 0)
            s++;
        const int weight = s < QC_SCHEME_COUNT && qc_scheme_is_quantized((qc_scheme)s);
        const uint32_t owner = t != QC_NO_TENSOR && stored.owners[t] == QC_NO_TENSOR
                                   ? coded.owners[t] /* of AWQ's form */
                                   : QC_NO_TENSOR;
        const uint32_t codes = owner == QC_NO_TENSOR ? t : owner;
        const int awq = codes != QC_NO_TENSOR && coded.weights[codes] &&
                        coded.weights[codes]->coding == QC_CODING_AWQ;
        if (t == QC_NO_TENSOR || (weight && !stored.weights[t] && !awq) ||
            (strcmp(scheme, "state") == 0 && stored.owners[t] == QC_NO_TENSOR && !awq))
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s' is no quantized weight with all of its tensors",
                    name);
        if (weight && qc_ends_with(name, "_packed") &&
            qc_checkpoint_beside(output, name, strlen(name) - strlen("packed"), "shape") ==
                QC_NO_TENSOR)
            QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': weight_shape is missing", name);
    }
    return QC_OK;
}

/* A manifest whose digests were made again vouches for bytes only. */
static qc_status check_weights(const qc_options *o, const qc_manifest *m, qc_scan_result *r,
                               qc_error *err)
{
    qc_checkpoint *output = NULL;
    qc_error why = {0};
    if (r->problem_count > 0 || m->tensor_count == 0)
        return QC_OK;
    qc_status st = qc_checkpoint_open(&output, o->model, &why);
    if (st == QC_OK)
        st = find_weights(output, o->call.arena, m, &why);
    qc_checkpoint_close(output);
    if (st != QC_OK && qc_status_exit_code(st) != qc_status_exit_code(QC_ERR_INPUT))
        return qc_error_pass(err, &why, st);
    r->problem_count = st != QC_OK;
    r->first.what = st != QC_OK ? "the quantized weights" : NULL;
    return qc_arena_strdup(o->call.arena, &r->first.why, why.msg, err);
}

qc_status qc_cmd_verify(const qc_options *o, qc_error *err)
{
    QC_TRY(qc_checkpoint_check_single(o->model, err));
    if (o->against)
        return verify_against(o, err);
    qc_manifest m;
    qc_scan_result result;
    qc_progress *progress = NULL;
    uint64_t total = 0;
    QC_TRY(qc_manifest_load(&m, o->call.arena, o->model, err));
    for (size_t i = 0; i < m.shard_count; i++)
        total += m.shards[i].content_bytes;
    qc_console_detail(&o->call, 1,
                      "checking %zu tensor%s in %zu shard%s, made by qconv %s with --to %s",
                      m.tensor_count, qc_plural(m.tensor_count), m.shard_count,
                      qc_plural(m.shard_count), m.qconv_version, m.to);
    QC_TRY(qc_progress_create(&progress, &o->call, "verifying", total, err));
    const qc_scan_options so = {.threads = o->call.threads, .progress = progress};
    qc_status st = qc_scan_output(&result, o->call.arena, o->model, &m, &so, err);
    if (st == QC_OK)
        st = scan_twins(o, &m, &result, err);
    if (st == QC_OK)
        st = check_weights(o, &m, &result, err);
    double seconds = qc_progress_seconds(progress);
    qc_progress_destroy(progress);
    QC_TRY(st);
    QC_TRY(warn_of_strangers(o, &m, err));
    QC_TRY(qc_scan_report(&o->call, &(qc_scan_subject){"verified", o->model, NULL}, &result,
                          seconds, err));
    if (result.problem_count > 0)
        QC_FAIL(err, QC_ERR_CHECK, "%s: %s: %s%s", o->model, result.first.what, result.first.why,
                result.problem_count > 1 ? " (and more)" : "");
    return QC_OK;
}

/* qconv verify OUT: is every byte of the output what was written? */
#include "convert/commands.h"
#include "convert/console.h"
#include "convert/output_scan.h"
#include "convert/pipeline.h"
#include "convert/progress.h"
#include "convert/scan_report.h"

#include <stdlib.h>
#include <string.h>

#define TREE_MAX 1000000u /* files below an output */

static void add_progress(void *progress, uint64_t bytes)
{
    qc_progress_add(progress, bytes);
}

static int compare_paths(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* Files that the manifest knows nothing of are no damage, but nobody vouches for them. */
static qc_status warn_of_strangers(const qc_options *o, const qc_manifest *m, qc_error *err)
{
    void *v = NULL;
    qc_tree_file *found = NULL;
    size_t count = 0, n = 0, strangers = 0;
    const char *first = NULL;
    QC_TRY(qc_arena_alloc(o->arena, &v, m->shard_count + m->file_count + 1, sizeof(char *), err));
    const char **known = v;
    for (size_t i = 0; i < m->shard_count; i++, n++)
        QC_TRY(qc_arena_printf(o->arena, &known[n], err, "%s%s", m->shards[i].name,
                               m->compressed ? ".zst" : ""));
    for (size_t i = 0; i < m->file_count; i++)
        known[n++] = m->files[i].path;
    known[n++] = QC_MANIFEST_NAME;
    qsort(known, n, sizeof *known, compare_paths);
    QC_TRY(qc_dir_tree(o->arena, o->model, TREE_MAX, &found, &count, err));
    for (size_t i = 0; i < count; i++) {
        if (bsearch(&found[i].path, known, n, sizeof *known, compare_paths))
            continue;
        if (strangers++ == 0)
            first = found[i].path;
    }
    if (strangers > 0)
        qc_console_warn(o, "%s: '%s'%s not in the manifest, so nothing is known of %s", o->model,
                        first, strangers > 1 ? " and others are" : " is",
                        strangers > 1 ? "them" : "it");
    return QC_OK;
}

qc_status qc_cmd_verify(const qc_options *o, qc_error *err)
{
    qc_manifest m;
    qc_scan_result result;
    qc_progress *progress = NULL;
    uint64_t total = 0;
    QC_TRY(qc_manifest_load(&m, o->arena, o->model, err));
    for (size_t i = 0; i < m.shard_count; i++)
        total += m.shards[i].content_bytes;
    qc_console_detail(o, 1, "checking %zu tensors in %zu shards, made by qconv %s with --to %s",
                      m.tensor_count, m.shard_count, m.qconv_version, m.to);
    QC_TRY(qc_progress_create(&progress, o, "verifying", total, err));
    qc_scan_options so = {.threads = o->threads ? o->threads : qc_pipeline_default_threads(0),
                          .progress = add_progress,
                          .progress_ctx = progress};
    qc_status st = qc_scan_output(&result, o->arena, o->model, &m, &so, err);
    double seconds = qc_progress_seconds(progress);
    qc_progress_destroy(progress);
    QC_TRY(st);
    QC_TRY(warn_of_strangers(o, &m, err));
    QC_TRY(qc_scan_report(o, &result, "verified", seconds, err));
    if (result.problem_count > 0)
        QC_FAIL(err, QC_ERR_CHECK, "%s: %s: %s%s", o->model, result.first.what, result.first.why,
                result.problem_count > 1 ? " (and more)" : "");
    return QC_OK;
}

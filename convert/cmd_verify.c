/* qconv verify OUT: is every byte of the output what was written? */
#include "convert/commands.h"
#include "convert/console.h"
#include "convert/output_scan.h"
#include "convert/pipeline.h"
#include "convert/progress.h"
#include "convert/scan_report.h"

static void add_progress(void *progress, uint64_t bytes)
{
    qc_progress_add(progress, bytes);
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
    qc_status st = qc_scan_output(&result, o->arena, o->model, &so, err);
    double seconds = qc_progress_seconds(progress);
    qc_progress_destroy(progress);
    QC_TRY(st);
    QC_TRY(qc_scan_report(o, &result, "verified", seconds, err));
    if (result.problem_count > 0)
        QC_FAIL(err, QC_ERR_CHECK, "%s: %s: %s%s", o->model, result.first.what, result.first.why,
                result.problem_count > 1 ? " (and more)" : "");
    return QC_OK;
}

/* Drives the comparison over the frames that a scan of OUT hands on or, without a manifest, over
 * pieces of its tensors. */
#include "convert/adapter/adapters.h"
#include "convert/verify/against_internal.h"

#include "base/text.h"
#include "convert/model/expert_split.h"
#include "convert/pipeline/pipeline.h"

#include <string.h>

#define FUSED_TAIL ".experts.gate_up_proj"

/* ---- reading OUT ---------------------------------------------------------------------------- */

static qc_status take_frame(void *ctx, unsigned worker, const qc_output_frame *frame,
                            const void *content, qc_error *err)
{
    qc_against *a = ctx;
    if (frame->tensor == QC_HEADER_FRAME || a->of_listed[frame->tensor] == QC_NO_TENSOR)
        return QC_OK;
    return qc_against_frame(a, worker, a->of_listed[frame->tensor], frame, content, err);
}

static qc_status take_piece(void *ctx, unsigned worker, const qc_output_frame *frame, void *content,
                            qc_error *err)
{
    qc_against *a = ctx;
    QC_TRY(qc_against_frame(a, worker, frame->tensor, frame, content, err));
    qc_progress_add(a->progress, frame->content_bytes);
    return QC_OK;
}

static qc_status scan_without_manifest(qc_against *a, qc_error *err)
{
    static const qc_frames_client client = {.put = take_piece};
    qc_output_frames frames;
    uint64_t *piece_bytes = NULL;
    QC_TRY(qc_arena_array(a->arena, &piece_bytes, a->output->tensor_count, err));
    for (size_t i = 0; i < a->output->tensor_count; i++)
        piece_bytes[i] = a->tensors[i].piece_bytes;
    qc_status st = qc_output_frames_of_checkpoint(&frames, a->output, piece_bytes, err);
    if (st == QC_OK) {
        const qc_frames_job job = {{0, (uint32_t)frames.frame_count}, a->threads, NULL, NULL};
        st = qc_output_frames_run(&frames, &job, &client, a, err);
    }
    qc_output_frames_deinit(&frames);
    return st;
}

/* ---- all ------------------------------------------------------------------------------------- */

static int has_fused(const qc_checkpoint *c)
{
    for (size_t i = 0; i < c->tensor_count; i++)
        if (qc_ends_with(c->tensors[i].name, FUSED_TAIL))
            return 1;
    return 0;
}

/* Names MODEL's experts as OUT names its own. */
static qc_status arrange_experts(qc_against *a, const char *to, qc_error *err)
{
    const int decodes = strcmp(to, "bf16") == 0 || strcmp(to, "fp16") == 0;
    if (!has_fused(a->output))
        return qc_experts_split(a->model, 0, err);
    if (!has_fused(a->model) && decodes)
        QC_TRY(qc_experts_decode(a->model, strcmp(to, "bf16") == 0 ? QC_DTYPE_BF16 : QC_DTYPE_F16,
                                 err));
    if (!has_fused(a->model))
        return qc_experts_join(a->model, err);
    if (!*to || strcmp(to, "keep") == 0 || qc_experts_are_stacked(a->output) ||
        (decodes && qc_experts_are_stacked(a->model)))
        return QC_OK;
    return qc_experts_split(a->model, decodes, err);
}

/* The manifest tells which weights in AWQ's form were made here, and so have zero points of 8. */
static qc_status find_awq(qc_against *a, qc_error *err)
{
    const qc_manifest *m = a->o->manifest;
    for (size_t k = 0; m && k < m->tensor_count; k++) {
        const uint32_t i = qc_checkpoint_find_index(a->output, m->tensors[k].name);
        if (i == QC_NO_TENSOR || !a->out_coded.weights[i] ||
            strcmp(m->tensors[k].scheme, qc_scheme_name(QC_SCHEME_AWQ)) != 0)
            continue;
        QC_TRY(qc_stored_of_awq(&a->in_output.weights[i], a->arena, a->output,
                                a->out_coded.weights[i], err));
        for (uint32_t t = 0; t < (uint32_t)a->output->tensor_count; t++)
            if (a->out_coded.owners[t] == i)
                a->in_output.owners[t] = i;
    }
    return QC_OK;
}

static qc_status open_output(qc_against *a, qc_error *err)
{
    QC_TRY(qc_checkpoint_open(&a->output, a->o->out, err));
    QC_TRY(qc_stored_find_codes(&a->in_output, &a->out_coded, a->arena, a->output, err));
    return find_awq(a, err);
}

/* Reports an OUT that is not a checkpoint. If it has a manifest, it was one once: then r->scan says
 * what became of it, and the status is QC_OK. */
static qc_status tell_damage(qc_against *a, qc_status st, qc_against_result *r, qc_error *err)
{
    qc_scan_options so = {.threads = a->threads};
    qc_error ignored = {0};
    if (!a->o->manifest || st == QC_ERR_NOMEM || st == QC_ERR_INTERRUPTED ||
        qc_scan_output(&r->scan, a->arena, a->o->out, a->o->manifest, &so, &ignored) != QC_OK ||
        r->scan.problem_count == 0)
        return st;
    r->faults = r->scan.problem_count;
    r->first = r->scan.first;
    if (err)
        memset(err, 0, sizeof *err);
    return QC_OK;
}

static qc_status run(qc_against *a, qc_against_result *r, qc_error *err)
{
    qc_isa isa = QC_ISA_SCALAR;
    QC_TRY(qc_isa_select(&isa, err));
    a->ops = qc_quant_ops_for(isa);
    qc_status st = open_output(a, err);
    if (st != QC_OK)
        return tell_damage(a, st, r, err);
    /* MODEL is opened as `convert` did when it made OUT. Without a manifest it is opened to match
     * how OUT names its experts. */
    const char *to = a->o->manifest ? a->o->manifest->to : NULL;
    QC_TRY(qc_checkpoint_open(&a->model, a->o->model, err));
    QC_TRY(arrange_experts(a, to ? to : "", err));
    QC_TRY(qc_adapters_attach(a->model, a->o->loras, err));
    if (a->o->manifest)
        QC_TRY(qc_adapters_check(a->model, a->o->manifest, a->o->out, err));
    QC_TRY(qc_against_match(a, err));
    const qc_scan_options so = {
        .threads = a->threads, .sink = take_frame, .sink_ctx = a, .progress = a->progress};
    QC_TRY(a->o->manifest ? qc_scan_output(&r->scan, a->arena, a->o->out, a->o->manifest, &so, err)
                          : scan_without_manifest(a, err));
    return qc_against_judge(a, r, err);
}

qc_status qc_against_run(qc_against_result *result, const qc_call *call,
                         const qc_against_options *o, qc_progress *progress, qc_error *err)
{
    qc_arena *arena = call->arena;
    qc_against a = {.arena = arena,
                    .o = o,
                    .progress = progress,
                    .threads = call->threads ? call->threads : qc_pipeline_default_threads(0)};
    memset(result, 0, sizeof *result);
    result->has_manifest = o->manifest != NULL;
    QC_TRY(qc_arena_array(arena, &a.scratch, a.threads, err));
    qc_status st = run(&a, result, err);
    for (unsigned i = 0; i < a.threads; i++)
        qc_against_scratch_free(&a.scratch[i]);
    qc_checkpoint_close(a.output);
    qc_checkpoint_close(a.model);
    return st;
}

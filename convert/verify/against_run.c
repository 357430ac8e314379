/* Drives the comparison over the frames that a scan of OUT hands on or, without a manifest, over
 * pieces of its tensors. */
#include "convert/adapter/adapters.h"
#include "convert/verify/against_internal.h"

#include "base/alloc.h"
#include "base/workers.h"
#include "convert/model/expert_split.h"
#include "convert/pipeline/pipeline.h"

#include <string.h>

#define FUSED_TAIL "mlp.experts.gate_up_proj"

const char *qc_against_kind_name(qc_against_kind k)
{
    static const char *const names[] = {"equal", "cast", "quantized", "state"};
    return names[k];
}

qc_status qc_against_manifest(qc_manifest *out, int *found, qc_arena *arena, const char *output,
                              qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    *found = 0;
    QC_TRY(qc_path_stat(output, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        return QC_OK;
    QC_TRY(qc_path_join(arena, &path, output, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind == QC_PATH_MISSING)
        return QC_OK;
    *found = 1;
    return qc_manifest_load(out, arena, output, err);
}

/* ---- with a manifest ------------------------------------------------------------------------- */

static qc_status take_frame(void *ctx, const qc_output_frame *frame, const void *content,
                            qc_error *err)
{
    qc_against *a = ctx;
    if (frame->tensor == QC_HEADER_FRAME || a->of_listed[frame->tensor] == QC_NO_TENSOR)
        return QC_OK;
    return qc_against_piece(a, &a->tensors[a->of_listed[frame->tensor]], frame->at, content,
                            frame->content_bytes, err);
}

static qc_status scan_with_manifest(qc_against *a, qc_against_result *r, qc_error *err)
{
    qc_scan_options so = {
        .threads = a->threads, .sink = take_frame, .sink_ctx = a, .progress = a->progress};
    return qc_scan_output(&r->scan, a->arena, a->o->out, a->o->manifest, &so, err);
}

/* ---- without --------------------------------------------------------------------------------- */

typedef struct {
    qc_against *a;
    struct {
        uint32_t tensor, piece;
    } * units;
    uint64_t count;
    uint64_t most; /* the most bytes of a unit */
    atomic_uint_fast64_t next;
} piece_list;

static qc_status read_pieces(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    (void)index;
    piece_list *l = ctx;
    qc_against *a = l->a;
    qc_st_cursor *cursor = NULL;
    void *buf = NULL;
    qc_status st = qc_st_cursor_create(&cursor, err);
    if (st == QC_OK)
        st = qc_malloc_aligned(&buf, 4096, (size_t)l->most, err);
    while (st == QC_OK) {
        uint64_t i = atomic_fetch_add(&l->next, 1);
        if (i >= l->count)
            break;
        qc_against_tensor *t = &a->tensors[l->units[i].tensor];
        const qc_checkpoint_tensor *c = &a->output->tensors[t->out_tensor];
        uint64_t at = l->units[i].piece * t->piece_bytes;
        uint64_t n = c->bytes - at < t->piece_bytes ? c->bytes - at : t->piece_bytes;
        st = qc_check_stopped(team, err);
        if (st == QC_OK)
            st = qc_checkpoint_read(a->output, cursor, c, at, buf, (size_t)n, err);
        if (st == QC_OK)
            st = qc_against_piece(a, t, at, buf, (size_t)n, err);
        if (st == QC_OK)
            qc_progress_add(a->progress, n);
    }
    qc_free(buf);
    qc_st_cursor_destroy(cursor);
    return st;
}

static qc_status scan_without_manifest(qc_against *a, qc_error *err)
{
    piece_list l = {.a = a, .most = 1};
    for (size_t i = 0; i < a->output->tensor_count; i++)
        l.count += a->tensors[i].piece_count;
    QC_TRY(qc_arena_array(a->arena, &l.units, l.count + 1, err));
    uint64_t n = 0;
    for (size_t i = 0; i < a->output->tensor_count; i++) {
        const qc_against_tensor *t = &a->tensors[i];
        for (uint32_t k = 0; k < t->piece_count; k++, n++) {
            l.units[n].tensor = (uint32_t)i;
            l.units[n].piece = k;
        }
        if (t->piece_count > 0) {
            uint64_t bytes = t->out_bytes < t->piece_bytes ? t->out_bytes : t->piece_bytes;
            l.most = bytes > l.most ? bytes : l.most;
        }
    }
    atomic_init(&l.next, 0);
    return qc_team_run(a->threads, read_pieces, &l, err);
}

/* ---- all ------------------------------------------------------------------------------------- */

static int has_fused(const qc_checkpoint *c)
{
    for (size_t i = 0; i < c->tensor_count; i++) {
        const char *tail = strstr(c->tensors[i].name, FUSED_TAIL);
        if (tail && strcmp(tail, FUSED_TAIL) == 0)
            return 1;
    }
    return 0;
}

/* Names MODEL's experts as OUT names its own. */
static qc_status arrange_experts(qc_against *a, const char *to, qc_error *err)
{
    const int decodes = strcmp(to, "bf16") == 0 || strcmp(to, "fp16") == 0;
    if (!has_fused(a->output))
        return qc_experts_split(a->model, 0, err);
    if (!has_fused(a->model))
        return qc_experts_join(a->model, err);
    if (!*to || strcmp(to, "keep") == 0 || qc_experts_are_stacked(a->output) ||
        (decodes && qc_experts_are_stacked(a->model)))
        return QC_OK;
    return qc_experts_split(a->model, decodes, err);
}

/* Opens MODEL as `convert` did when it made OUT. Without a manifest it is opened to match how OUT
 * names its experts. */
static qc_status open_model(qc_against *a, qc_error *err)
{
    QC_TRY(qc_checkpoint_open(&a->model, a->o->model, err));
    const char *to = a->o->manifest ? a->o->manifest->to : NULL;
    QC_TRY(arrange_experts(a, to ? to : "", err));
    QC_TRY(qc_adapters_attach(a->model, a->o->loras, err));
    return a->o->manifest ? qc_adapters_check(a->model, a->o->manifest, a->o->out, err) : QC_OK;
}

static qc_status open_output(qc_against *a, qc_error *err)
{
    QC_TRY(qc_checkpoint_open(&a->output, a->o->out, err));
    QC_TRY(qc_stored_find(&a->in_output, a->arena, a->output, err));
    QC_TRY(qc_coded_find(&a->out_coded, a->arena, a->output, err));
    QC_TRY(qc_stored_add_integers(&a->in_output, a->arena, a->output, &a->out_coded, err));
    return a->o->codes ? qc_code_counts_make(a->o->codes, a->arena, a->output, &a->in_output, err)
                       : QC_OK;
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
    r->first_what = r->scan.first.what;
    r->first_why = r->scan.first.why;
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
    QC_TRY(open_model(a, err));
    QC_TRY(qc_against_match(a, err));
    QC_TRY(a->o->manifest ? scan_with_manifest(a, r, err) : scan_without_manifest(a, err));
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
    if (pthread_mutex_init(&a.lock, NULL) != 0)
        QC_FAIL(err, QC_ERR_NOMEM, "no lock could be made");
    qc_status st = run(&a, result, err);
    /* Names live in the checkpoints, and the rows outlive those. */
    for (size_t i = 0; st == QC_OK && i < result->count; i++) {
        qc_against_row *r = &result->rows[i];
        st = qc_arena_strndup(arena, &r->name, r->name, strlen(r->name), err);
        if (st == QC_OK && r->source)
            st = qc_arena_strndup(arena, &r->source, r->source, strlen(r->source), err);
    }
    for (size_t i = 0; st == QC_OK && i < result->missing_count; i++)
        st = qc_arena_strndup(arena, &result->missing[i].name, result->missing[i].name,
                              strlen(result->missing[i].name), err);
    qc_against_scratch_destroy(a.idle);
    pthread_mutex_destroy(&a.lock);
    qc_checkpoint_close(a.output);
    qc_checkpoint_close(a.model);
    return st;
}

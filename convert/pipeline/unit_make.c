/* Makes the content of one unit from the source, step by step.
 *
 * A step is QC_SOURCE_STEP_BYTES of source. It is read into a buffer that stays in the L2 cache,
 * and is hashed and quantized from there. Only the codes travel on to memory. */
#include "base/alloc.h"
#include "base/checked.h"
#include "convert/pipeline/odd_values.h"
#include "convert/pipeline/pipeline_internal.h"

#include <inttypes.h>

qc_status qc_worker_turn_to(qc_worker *w, uint32_t job, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    w->number = job;
    w->job = j;
    w->state = &w->p->jobs[job];
    if (j->scheme == QC_SCHEME_KEEP || j->scheme == QC_SCHEME_ABSORBED) /* read as it is stored */
        return QC_OK;
    QC_TRY(qc_weight_source_of(&w->weight, w->p->plan->model, j->source, j->entry->stored,
                               j->entry->coded, j->entry->transpose, err));
    w->weight.by_groups = j->by_groups ? j->form.block_elems : 0;
    return QC_OK;
}

/* Allocates what a quantized job needs before its first unit. The caller holds finish_lock. */
static qc_status fill_work(qc_worker *w, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = w->job;
    const int searched = j->scale != QC_SCALE_ABSMAX, integer = j->form.ops->integer;
    const int calibrated = p->calibrated && qc_calibrated_has(p->calibrated, w->number);
    QC_TRY(qc_job_need_work(w->state, err));
    qc_job_work *work = w->state->work;
    QC_TRY(qc_calloc(&work->sums, qc_unit_count(p, j->first_output), sizeof *work->sums, err));
    if (!(searched && j->form.nested))
        QC_TRY(qc_realloc_array(&work->absmax, (size_t)j->scales, sizeof *work->absmax, err));
    else
        QC_TRY(qc_search_open(j, !calibrated, work, err));
    if (!qc_form_by_rows(&j->form) && !searched && !integer)
        QC_TRY(qc_realloc_array(&work->block_errors, (size_t)j->scales, sizeof *work->block_errors,
                                err));
    if (!calibrated)
        return QC_OK;
    w->state->outputs = qc_calibrated_result(p->calibrated, w->number);
    work->calibrated = work->offset_ready = 1;
    work->offset = qc_calibrated_offset(p->calibrated, w->number);
    return QC_OK;
}

/* Prepares a quantized job: its buffers, and the offset where it comes from a sample. */
static qc_status open_job(qc_worker *w, qc_error *err)
{
    qc_job_state *s = w->state;
    qc_status st = QC_OK;
    pthread_mutex_lock(&w->p->finish_lock);
    if (!s->opened)
        st = fill_work(w, err);
    s->opened = st == QC_OK;
    int wants_offset = st == QC_OK && w->job->has_sample && !s->work->offset_ready;
    pthread_mutex_unlock(&w->p->finish_lock);
    return wants_offset ? qc_search_offset(w, err) : st;
}

/* --keep leaves a tensor unquantized, but --rest holds for it all the same, so the advice is --rest
 * where the conversion quantizes. */
static qc_status refuse_cast(const qc_worker *w, uint64_t index, qc_error *err)
{
    const char *name = w->p->plan->model->tensors[w->job->source].name;
    const qc_dtype to = w->job->entry->out_dtype;
    if (w->job->scheme == QC_SCHEME_DEQUANT)
        QC_FAIL(err, QC_ERR_RANGE,
                "tensor '%s': element %" PRIu64 " is too large for %s; use --to bf16", name, index,
                qc_dtype_name(to));
    if (qc_to_quantizes(w->p->plan->options->recipe.to))
        QC_FAIL(err, QC_ERR_RANGE, "tensor '%s': element %" PRIu64 " is too large for %s; use %s",
                name, index, qc_dtype_name(to),
                to == QC_DTYPE_F16 ? "--rest bf16 or --rest keep" : "--rest keep");
    QC_FAIL(err, QC_ERR_RANGE,
            "tensor '%s': element %" PRIu64 " is too large for %s; --keep '%s' leaves the tensor "
            "as it is",
            name, index, qc_dtype_name(to), name);
}

/* Makes a frame of a weight in 16 bits or float32, which lies as it is read. */
static qc_status make_cast(qc_worker *w, qc_unit *u, qc_error *err)
{
    const qc_job *j = w->job;
    const qc_dtype to = j->entry->out_dtype;
    const uint64_t each = qc_dtype_bits(to) / 8;
    const uint64_t begin = u->content_offset / each, end = begin + u->content_bytes / each;
    qc_digest_reset(w->hash);
    u->lost = 0;
    for (uint64_t first = begin; first < end; first += j->step_elems) {
        const uint64_t n = qc_min_u64(end - first, j->step_elems);
        uint64_t overflow = UINT64_MAX;
        unsigned char *out = w->content + (first - begin) * each;
        if (j->scheme == QC_SCHEME_DEQUANT) {
            QC_TRY(qc_worker_look_up(w, err));
            QC_TRY(qc_weight_stored(&w->reader, &w->weight, first, n, out, to, &overflow, err));
            qc_digest_update(w->hash, w->reader.code, w->reader.code_bytes);
        } else {
            QC_TRY(qc_job_read_step(w, first, n, w->source, err));
            w->p->ops->cast(w->source, j->dtype, n, out, to, &overflow);
            if (to == QC_DTYPE_F16 && j->dtype != to && qc_odd_values_are_zero(out, n * each, to))
                u->lost |=
                    !qc_odd_values_are_zero(w->source, n * qc_dtype_bits(j->dtype) / 8, j->dtype);
        }
        if (overflow != UINT64_MAX)
            return refuse_cast(w, first + overflow, err);
    }
    u->source = qc_digest_finish(w->hash);
    return QC_OK;
}

/* Hashes the frame's share of the stored bytes (docs/format.md), which may be other bytes than the
 * frame is made of. */
static qc_status hash_share(qc_worker *w, const qc_unit *u, qc_digest *out, qc_error *err)
{
    const qc_checkpoint *m = w->p->plan->model;
    const qc_job *j = w->job;
    uint64_t at = qc_job_source_bytes(j, u->content_offset);
    uint64_t end = qc_job_source_bytes(j, u->content_offset + u->content_bytes);
    if (j->shares_source) {
        const uint64_t piece = qc_ceil_div_u64(j->source_bytes, qc_unit_count(w->p, u->tensor));
        at = (u->index - w->p->first_unit[u->tensor]) * piece;
        end = qc_min_u64(at + piece, j->source_bytes);
    }
    qc_digest_reset(w->hash);
    while (at < end) {
        const size_t n = (size_t)qc_min_u64(end - at, QC_SOURCE_STEP_BYTES);
        QC_TRY(qc_worker_look_up(w, err));
        QC_TRY(
            qc_checkpoint_read(m, w->reader.codes, &m->tensors[j->source], at, w->source, n, err));
        qc_digest_update(w->hash, w->source, n);
        at += n;
    }
    *out = qc_digest_finish(w->hash);
    return QC_OK;
}

/* Makes a frame of a weight in 16 bits that lies the other way than its codes. This may be a stack
 * of experts, which transformers multiplies with as [experts, in, out] and whose codes are
 * [experts, out, in], or a Conv1D weight, [in, out] from [out, in], which is a stack of one.
 *
 * A frame holds some rows of one expert's turned matrix, or parts of two experts. The codes are
 * read once for every frame of an expert (four for gpt-oss-20b). That costs less than decoding out
 * of order, and reads stay contiguous, so compressed sources are fine, too. */
static qc_status make_turned(qc_worker *w, qc_unit *u, qc_error *err)
{
    const qc_weight_source *s = &w->weight;
    const qc_dtype to = w->job->entry->out_dtype;
    const uint64_t wide = s->dims[s->ndim - 1], matrix = s->dims[s->ndim - 2] * wide;
    const uint64_t each = qc_dtype_bits(to) / 8;
    const uint64_t begin = u->content_offset / each, end = begin + u->content_bytes / each;
    QC_TRY(hash_share(w, u, &u->source, err));
    for (uint64_t at = begin, next; at < end; at = next) {
        const uint64_t expert = at / matrix;
        uint64_t bad = UINT64_MAX;
        next = qc_min_u64((expert + 1) * matrix, end);
        QC_TRY(qc_worker_look_up(w, err));
        QC_TRY(qc_weight_turned(&w->reader, s, expert, at - expert * matrix, next - expert * matrix,
                                w->content + (at - begin) * each, to, &bad, err));
        if (bad != UINT64_MAX && s->ndim == 2)
            QC_FAIL(err, QC_ERR_RANGE,
                    "tensor '%s': the weight at row %" PRIu64 ", column %" PRIu64
                    " is too large for %s; use --to bf16",
                    w->job->name, bad / wide, bad % wide, qc_dtype_name(to));
        if (bad != UINT64_MAX)
            QC_FAIL(err, QC_ERR_RANGE,
                    "tensor '%s': the weight of expert %" PRIu64 " at row %" PRIu64
                    ", column %" PRIu64 " is too large for %s; use --to bf16",
                    w->job->name, expert, bad % wide, bad / wide, qc_dtype_name(to));
    }
    return QC_OK;
}

/* Reads the unit as it is stored to w->content, which is also what becomes of it where nothing is
 * computed. */
static qc_status read_plain(qc_worker *w, const qc_unit *u, qc_error *err)
{
    const qc_checkpoint *m = w->p->plan->model;
    return qc_checkpoint_read(m, w->reader.codes, &m->tensors[w->job->source], u->content_offset,
                              w->content, u->content_bytes, err);
}

static int is_plain(const qc_job *j)
{
    return j->scheme == QC_SCHEME_KEEP || j->scheme == QC_SCHEME_ABSORBED;
}

qc_status qc_unit_make(qc_worker *w, qc_unit *u, qc_error *err)
{
    QC_TRY(qc_worker_turn_to(w, w->p->plan->outputs[u->tensor].job, err));
    const qc_job *j = w->job;
    if (is_plain(j)) {
        QC_TRY(read_plain(w, u, err));
        u->content = u->source = qc_odd_values_digest(w, u);
        return QC_OK;
    }
    if (j->form.ops) {
        QC_TRY(open_job(w, err));
        QC_TRY(qc_quantized_make(w, u, err));
        u->content = qc_digest_bytes(w->content, u->content_bytes);
        return j->shares_source ? hash_share(w, u, &u->source, err) : QC_OK;
    }
    if (j->entry->transpose) {
        QC_TRY(make_turned(w, u, err));
    } else {
        QC_TRY(make_cast(w, u, err));
    }
    u->content = qc_odd_values_digest(w, u);
    return j->shares_source ? hash_share(w, u, &u->source, err) : QC_OK;
}

qc_status qc_unit_source(qc_worker *w, const qc_unit *u, qc_digest *out, qc_error *err)
{
    QC_TRY(qc_worker_turn_to(w, w->p->plan->outputs[u->tensor].job, err));
    const qc_job *j = w->job;
    if (is_plain(j)) {
        QC_TRY(read_plain(w, u, err));
        *out = qc_digest_bytes(w->content, u->content_bytes);
        return QC_OK;
    }
    if (j->scheme == QC_SCHEME_DEQUANT || j->shares_source ||
        (j->scheme == QC_SCHEME_CAST && j->entry->transpose))
        return hash_share(w, u, out, err);
    /* Hashes the unit's elements step by step, as quantizing and casting do. */
    const uint64_t begin = qc_job_elems(j, u->content_offset), step = j->step_elems;
    const uint64_t end = qc_job_elems(j, u->content_offset + u->content_bytes);
    qc_digest_reset(w->hash);
    for (uint64_t first = begin; first < end; first += step)
        QC_TRY(qc_job_read_step(w, first, qc_min_u64(end - first, step), w->source, err));
    *out = qc_digest_finish(w->hash);
    return QC_OK;
}

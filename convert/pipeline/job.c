/* A job: reading its source, and what can be made only when all of it was seen: the scale of its
 * scales, its error, its state. The worker that finished the weight's last frame makes the
 * latter. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/model/awq_layout.h"

#include <string.h>

#define RUN_SCALES 1024u

/* ---- its source ---- */

qc_status qc_worker_look_up(const qc_worker *w, qc_error *err)
{
    if (qc_team_stopped(w->team) || atomic_load_explicit(&w->p->halted, memory_order_relaxed))
        QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
    return QC_OK;
}

qc_status qc_worker_wait(const qc_worker *w, const uint8_t *flag, qc_error *err)
{
    qc_pipeline *p = w->p;
    qc_status st = QC_OK;
    pthread_mutex_lock(&p->finish_lock);
    while (!*flag && st == QC_OK) {
        st = qc_check_stopped(w->team, err);
        if (st == QC_OK)
            qc_cond_wait_briefly(&p->finish_cond, &p->finish_lock);
    }
    pthread_mutex_unlock(&p->finish_lock);
    return st;
}

qc_status qc_job_read(qc_worker *w, uint64_t first, uint64_t n, void *dst, qc_error *err)
{
    return qc_weight_elements(&w->reader, &w->weight, first, n, dst, err);
}

qc_status qc_job_read_step(qc_worker *w, uint64_t first, uint64_t n, void *dst, qc_error *err)
{
    QC_TRY(qc_worker_look_up(w, err));
    QC_TRY(qc_job_read(w, first, n, dst, err));
    if (!w->job->shares_source)
        qc_digest_update(w->hash, w->reader.code, w->reader.code_bytes);
    return QC_OK;
}

/* ---- finishing ---- */

static qc_status read_floats(void *ctx, uint64_t first, uint64_t n, float *out, qc_error *err)
{
    qc_worker *w = ctx;
    uint64_t overflow = UINT64_MAX;
    QC_TRY(qc_job_read(w, first, n, w->source, err));
    w->p->ops->cast(w->source, w->job->dtype, n, out, QC_DTYPE_F32, &overflow);
    return QC_OK;
}

static qc_status write_state(const qc_job *j, qc_job_work *s, float offset, qc_error *err)
{
    qc_bnb_state state = qc_job_state_of(j);
    state.nested_offset = (double)offset;
    QC_TRY(qc_malloc(&s->state_json, qc_bnb_state_bytes(&state), err));
    return qc_bnb_state_write(&state, s->state_json, err);
}

static qc_status finish_blocks(qc_worker *w, const qc_piece_sums *total, qc_error *err)
{
    const qc_quant_ops *ops = w->p->ops;
    const qc_job *j = w->job;
    qc_job_work *s = w->state->work;
    const size_t blocks = (size_t)j->scales;
    float offset = 0;
    float *final = s->absmax;
    if (j->form.nested) {
        QC_TRY(qc_malloc(&s->nested_codes, blocks, err));
        QC_TRY(qc_realloc_array(&s->nested_absmax, (size_t)qc_ceil_div_u64(blocks, QC_NESTED_BLOCK),
                                sizeof(float), err));
        final = NULL;
        QC_TRY(qc_realloc_array(&final, blocks, sizeof(float), err));
        offset = qc_nested_offset(s->absmax, blocks);
        ops->nested_quantize(s->absmax, blocks, offset, s->nested_codes, s->nested_absmax);
        ops->nested_dequantize(s->nested_codes, s->nested_absmax, qc_dynamic_map, blocks,
                               QC_NESTED_BLOCK, offset, final);
    }
    const qc_finished_blocks finished = {.quant = ops,
                                         .form = j->form,
                                         .n = j->elems,
                                         .absmax = s->absmax,
                                         .absmax_final = final,
                                         .errors = s->block_errors,
                                         .read = read_floats,
                                         .read_ctx = w};
    qc_status st = qc_block_error_finish(&finished, total, &w->state->error, err);
    if (final != s->absmax)
        qc_free(final);
    if (st != QC_OK)
        return st;
    qc_free(s->block_errors);
    s->block_errors = NULL;
    if (j->form.nested) {
        qc_free(s->absmax);
        s->absmax = NULL;
    }
    return write_state(j, s, offset, err);
}

/* Scales become what is written of them, in their place. They are values of that dtype already, so
 * nothing is rounded. */
static void narrow_scales(const qc_worker *w)
{
    const qc_dtype dtype = w->job->form.scale_dtype;
    float *scales = w->state->work->absmax;
    uint64_t each = qc_dtype_bits(dtype) / 8, overflow = UINT64_MAX;
    float some[RUN_SCALES];
    for (uint64_t at = 0; at < w->job->scales; at += RUN_SCALES) {
        uint64_t run = qc_min_u64(w->job->scales - at, RUN_SCALES);
        memcpy(some, scales + at, (size_t)run * sizeof *some);
        w->p->ops->cast(some, QC_DTYPE_F32, run, (unsigned char *)scales + at * each, dtype,
                        &overflow);
    }
}

qc_status qc_job_finish(qc_worker *w, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = w->job;
    qc_job_state *s = w->state;
    if (!j->form.ops)
        return QC_OK;
    const int by_rows = qc_form_by_rows(&j->form), integer = j->form.ops->integer;
    const uint32_t units = qc_unit_count(p, j->first_output);
    qc_piece_sums total = {0};
    for (uint32_t i = 0; i < units; i++)
        qc_piece_add(&total, &s->work->sums[i],
                     qc_job_elems(j, p->units[p->first_unit[j->first_output] + i].content_offset));
    if (!by_rows && !integer && j->scale == QC_SCALE_ABSMAX)
        return finish_blocks(w, &total, err);
    /* The sums were measured with the scales that a reader will have. */
    s->error.rel_mse = total.sum_xx > 0 ? total.sum_ee / total.sum_xx : 0;
    s->error.max_err = total.max_err;
    s->error.max_index =
        j->by_groups ? qc_awq_element(j->rows, j->form.cols, j->form.block_elems, total.max_index)
                     : total.max_index;
    if (integer)
        narrow_scales(w);
    return by_rows || integer ? QC_OK : write_state(j, s->work, s->work->offset, err);
}

int qc_job_awaits(const qc_pipeline *p, uint32_t job, qc_role_tensor role)
{
    uint32_t t = qc_job_output(&p->plan->jobs[job], role);
    return t != QC_NO_OUTPUT && qc_unit_count(p, t) > 0 &&
           p->units[p->first_unit[t]].kind == QC_UNIT_DERIVED;
}

qc_status qc_job_take_role_tensor(qc_pipeline *p, uint32_t job, qc_role_tensor role,
                                  const void *src, size_t bytes, qc_error *err)
{
    const qc_job *j = &p->plan->jobs[job];
    void *v = NULL;
    if (!qc_role_tensor_is_own(role) || !qc_job_awaits(p, job, role) ||
        qc_plan_tensor_bytes(p->plan, qc_job_output(j, role)) != bytes)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': it has no role tensor %d of %zu bytes to be kept",
                j->name, (int)role, bytes);
    QC_TRY(qc_job_need_work(&p->jobs[job], err));
    qc_job_work *s = p->jobs[job].work;
    QC_TRY(qc_malloc(&v, bytes, err));
    memcpy(v, src, bytes);
    void *old = NULL;
    if (role == QC_ROLE_TENSOR_NESTED_ABSMAX) {
        old = s->nested_absmax;
        s->nested_absmax = v;
    } else if (role == QC_ROLE_TENSOR_STATE) {
        old = s->state_json;
        s->state_json = v;
    } else if (role == QC_ROLE_TENSOR_ABSMAX && j->form.nested) {
        old = s->nested_codes;
        s->nested_codes = v;
    } else {
        old = s->absmax;
        s->absmax = v;
    }
    qc_free(old);
    return QC_OK;
}

void qc_job_trim(const qc_pipeline *p, uint32_t job)
{
    qc_job_work *s = p->jobs[job].work;
    if (!s)
        return;
    int absmax = qc_job_awaits(p, job, QC_ROLE_TENSOR_ABSMAX);
    qc_free(s->sums);
    s->sums = NULL;
    if (!absmax && !qc_job_awaits(p, job, QC_ROLE_TENSOR_SCB) &&
        !qc_job_awaits(p, job, QC_ROLE_TENSOR_SCALE)) {
        qc_free(s->absmax);
        s->absmax = NULL;
    }
    if (!absmax) {
        qc_free(s->nested_codes);
        s->nested_codes = NULL;
    }
    if (!qc_job_awaits(p, job, QC_ROLE_TENSOR_NESTED_ABSMAX)) {
        qc_free(s->nested_absmax);
        s->nested_absmax = NULL;
    }
}

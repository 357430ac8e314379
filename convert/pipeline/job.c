/* A job: reading its source, and what can be made only when all of it was seen: the scale of its
 * scales, its error, its state. The worker that finished the weight's last frame makes the
 * latter. */
#include "convert/model/weight_read.h"
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <string.h>

#define RUN_SCALES 1024u

/* ---- its source ---- */

const qc_checkpoint_tensor *qc_job_source(const qc_pipeline *p, const qc_job *j)
{
    return &p->plan->model->tensors[j->source];
}

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

qc_status qc_job_read(qc_worker *w, uint32_t job, uint64_t first, uint64_t n, void *dst,
                      qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    const qc_checkpoint_tensor *t = qc_job_source(w->p, j);
    if (n == 0)
        return QC_OK;
    if (j->entry->coded)
        return qc_coded_read(w->p->plan->model, w->cursor, w->p->ops, t, j->entry->coded, &w->coded,
                             first, n, dst, err);
    if (j->entry->transpose)
        return qc_weight_read_turned(w->p->plan->model, w->cursor, t, j->cols, first, n, dst, err);
    uint64_t each = qc_dtype_bits(t->dtype) / 8;
    return qc_checkpoint_read(w->p->plan->model, w->cursor, t, first * each, dst,
                              (size_t)(n * each), err);
}

qc_status qc_job_read_step(qc_worker *w, uint32_t job, uint64_t first, uint64_t n, void *dst,
                           qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    QC_TRY(qc_worker_look_up(w, err));
    QC_TRY(qc_job_read(w, job, first, n, dst, err));
    if (qc_job_source_is_shared(j))
        return QC_OK;
    if (j->entry->coded)
        qc_digest_update(w->hash, w->coded.codes.data, w->coded.code_bytes);
    else
        qc_digest_update(w->hash, dst, (size_t)(n * (qc_dtype_bits(j->dtype) / 8)));
    return QC_OK;
}

void qc_decode(const qc_pipeline *p, qc_form form, const unsigned char *codes, const float *scales,
               uint64_t at, uint64_t n, void *dst, qc_dtype to, uint64_t *overflow)
{
    uint64_t each = qc_dtype_bits(to) / 8, row = form.cols;
    uint64_t per_scale = qc_form_by_rows(&form) ? row : form.block_elems;
    *overflow = UINT64_MAX;
    for (uint64_t done = 0; done < n && *overflow == UINT64_MAX;) {
        uint64_t inside = (at + done) % per_scale, left = n - done;
        uint64_t run = left - left % per_scale;
        if (inside > 0 || run == 0)
            run = per_scale - inside < left ? per_scale - inside : left;
        form.cols = run < row ? run : row; /* a row may begin or end outside */
        form.ops->dequantize(p->ops, &form, codes + qc_form_code_bytes(&form, done),
                             scales + (at + done) / per_scale, run,
                             (unsigned char *)dst + done * each, to, overflow);
        if (*overflow != UINT64_MAX)
            *overflow += done;
        done += run;
    }
}

uint64_t qc_job_step_elems(const qc_job *j)
{
    uint64_t n = QC_SOURCE_STEP_BYTES / (qc_dtype_bits(j->dtype) / 8);
    if (qc_schemes[j->scheme].by_rows)
        return n < j->cols ? j->cols : n - n % j->cols;
    uint64_t group = qc_job_group_elems(j);
    return n < group ? group : n; /* all are powers of two */
}

/* ---- finishing ---- */

typedef struct {
    qc_worker *w;
    uint32_t job;
} read_ctx;

static qc_status read_floats(void *vctx, uint64_t first, uint64_t n, float *out, qc_error *err)
{
    read_ctx *ctx = vctx;
    qc_worker *w = ctx->w;
    const qc_job *j = &w->p->plan->jobs[ctx->job];
    uint64_t overflow = UINT64_MAX;
    QC_TRY(qc_job_read(w, ctx->job, first, n, w->source, err));
    w->p->ops->cast(w->source, j->dtype, n, out, QC_DTYPE_F32, &overflow);
    return QC_OK;
}

static qc_status write_state(const qc_job *j, qc_job_work *s, float offset, qc_error *err)
{
    qc_bnb_state state = qc_job_state_of(j);
    state.nested_offset = (double)offset;
    QC_TRY(qc_malloc(&s->state_json, qc_bnb_state_bytes(&state), err));
    return qc_bnb_state_write(&state, s->state_json, err);
}

/* The sums were measured with the scales that a reader will have. */
static void take_error(qc_job_state *s, const qc_piece_sums *total)
{
    s->error.rel_mse = total->sum_xx > 0 ? total->sum_ee / total->sum_xx : 0;
    s->error.max_err = total->max_err;
    s->error.max_index = total->max_index;
}

static qc_status finish_blocks(qc_worker *w, uint32_t job, const qc_piece_sums *total,
                               qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    qc_job_work *s = p->jobs[job].work;
    size_t blocks = (size_t)j->blocks;
    float offset = 0;
    float *final = s->absmax;
    if (j->nested) {
        QC_TRY(qc_malloc(&s->nested_codes, blocks, err));
        QC_TRY(qc_realloc_array(&s->nested_absmax, (size_t)qc_ceil_div_u64(blocks, QC_NESTED_BLOCK),
                                sizeof(float), err));
        final = NULL;
        QC_TRY(qc_realloc_array(&final, blocks, sizeof(float), err));
        offset = qc_nested_offset(s->absmax, blocks);
        p->ops->nested_quantize(s->absmax, blocks, offset, s->nested_codes, s->nested_absmax);
        p->ops->nested_dequantize(s->nested_codes, s->nested_absmax, qc_dynamic_map, blocks,
                                  QC_NESTED_BLOCK, offset, final);
    }
    read_ctx ctx = {w, job};
    const qc_finished_blocks finished = {.quant = p->ops,
                                         .form = qc_job_form(j),
                                         .n = j->elems,
                                         .absmax = s->absmax,
                                         .absmax_final = final,
                                         .errors = s->block_errors,
                                         .read = read_floats,
                                         .read_ctx = &ctx};
    qc_status st = qc_block_error_finish(&finished, total, &p->jobs[job].error, err);
    if (final != s->absmax)
        qc_free(final);
    if (st != QC_OK)
        return st;
    qc_free(s->block_errors);
    s->block_errors = NULL;
    if (j->nested) {
        qc_free(s->absmax);
        s->absmax = NULL;
    }
    return write_state(j, s, offset, err);
}

/* Scales become what is written of them, in their place. They are values of that dtype already, so
 * nothing is rounded. */
static void narrow_scales(const qc_worker *w, const qc_job *j, qc_job_work *s)
{
    const qc_dtype dtype = qc_job_scale_dtype(j);
    uint64_t n =
        qc_form_scales(&(qc_form){.cols = j->cols, .block_elems = j->block_elems}, j->elems);
    uint64_t each = qc_dtype_bits(dtype) / 8, overflow = UINT64_MAX;
    unsigned char *out = (unsigned char *)s->absmax;
    float some[RUN_SCALES];
    for (uint64_t at = 0; at < n; at += RUN_SCALES) {
        uint64_t run = qc_min_u64(n - at, RUN_SCALES);
        memcpy(some, s->absmax + at, (size_t)run * sizeof *some);
        w->p->ops->cast(some, QC_DTYPE_F32, run, out + at * each, dtype, &overflow);
    }
}

qc_status qc_job_finish(qc_worker *w, uint32_t job, qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    qc_job_state *s = &p->jobs[job];
    if (!qc_scheme_is_quantized(j->scheme))
        return QC_OK;
    int by_rows = qc_schemes[j->scheme].by_rows;
    uint32_t main_tensor = j->outputs[QC_ROLE_TENSOR_MAIN];
    uint64_t per_byte = 8 / qc_schemes[j->scheme].bits;
    qc_piece_sums total = {0};
    for (uint32_t i = 0; i < qc_unit_count(p, main_tensor); i++)
        qc_piece_add(&total, &s->work->sums[i],
                     p->units[p->first_unit[main_tensor] + i].content_offset * per_byte);
    int integer = qc_schemes[j->scheme].form->integer;
    if (!by_rows && !integer && j->scale == QC_SCALE_ABSMAX)
        return finish_blocks(w, job, &total, err);
    take_error(s, &total);
    if (integer)
        narrow_scales(w, j, s->work);
    return by_rows || integer ? QC_OK : write_state(j, s->work, s->work->offset, err);
}

int qc_job_awaits(const qc_pipeline *p, uint32_t job, qc_role_tensor role)
{
    uint32_t t = p->plan->jobs[job].outputs[role];
    return t != QC_NO_OUTPUT && qc_unit_count(p, t) > 0 &&
           p->units[p->first_unit[t]].kind == QC_UNIT_DERIVED;
}

qc_status qc_job_take_role_tensor(qc_pipeline *p, uint32_t job, qc_role_tensor role,
                                  const void *src, size_t bytes, qc_error *err)
{
    const qc_job *j = &p->plan->jobs[job];
    void *v = NULL;
    if (!qc_role_tensor_is_own(role) || !qc_job_awaits(p, job, role) ||
        qc_plan_tensor_bytes(p->plan, j->outputs[role]) != bytes)
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
    } else if (role == QC_ROLE_TENSOR_ABSMAX && j->nested) {
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

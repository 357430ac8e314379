/* Makes what can be known of a weight only when all of it was seen: the scale of its scales, its
 * error, its state. The worker that finished the weight's last frame runs this. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <string.h>

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
    void *v = NULL;
    state.nested_offset = (double)offset;
    QC_TRY(qc_malloc(&v, qc_bnb_state_bytes(&state), err));
    s->state_json = v;
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
    void *v = NULL;
    float *final = s->absmax;
    if (j->nested) {
        QC_TRY(qc_malloc(&v, blocks, err));
        s->nested_codes = v;
        v = NULL;
        QC_TRY(qc_realloc_array(&v, (size_t)qc_ceil_div_u64(blocks, QC_NESTED_BLOCK), sizeof(float),
                                err));
        s->nested_absmax = v;
        v = NULL;
        QC_TRY(qc_realloc_array(&v, blocks, sizeof(float), err));
        final = v;
        offset = qc_nested_offset(s->absmax, blocks);
        p->ops->nested_quantize(s->absmax, blocks, offset, s->nested_codes, s->nested_absmax);
        p->ops->nested_dequantize(s->nested_codes, s->nested_absmax, qc_dynamic_map, blocks,
                                  QC_NESTED_BLOCK, offset, final);
    }
    read_ctx ctx = {w, job};
    qc_status st = qc_block_error_finish(p->ops, j->scheme == QC_SCHEME_NF4, j->elems,
                                         j->block_elems, s->absmax, final, s->block_errors, total,
                                         read_floats, &ctx, &p->jobs[job].error, err);
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

qc_status qc_job_finish(qc_worker *w, uint32_t job, qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    qc_job_state *s = &p->jobs[job];
    if (j->scheme != QC_SCHEME_NF4 && j->scheme != QC_SCHEME_INT8_BLOCKS &&
        j->scheme != QC_SCHEME_INT8_ROWS)
        return QC_OK;
    uint32_t main_tensor = j->outputs[QC_PART_MAIN];
    uint64_t per_byte = j->scheme == QC_SCHEME_NF4 ? 2 : 1;
    qc_piece_sums total = {0};
    for (uint32_t i = 0; i < qc_unit_count(p, main_tensor); i++)
        qc_piece_add(&total, &s->work->sums[i],
                     qc_unit_of(p, p->first_unit[main_tensor] + i).content_offset * per_byte);
    if (j->scheme != QC_SCHEME_INT8_ROWS && j->scale == QC_SCALE_ABSMAX)
        return finish_blocks(w, job, &total, err);
    take_error(s, &total);
    return j->scheme == QC_SCHEME_INT8_ROWS ? QC_OK : write_state(j, s->work, s->work->offset, err);
}

int qc_job_awaits(const qc_pipeline *p, uint32_t job, qc_part part)
{
    uint32_t t = p->plan->jobs[job].outputs[part];
    return t != QC_NO_OUTPUT && qc_unit_count(p, t) > 0 &&
           p->units[p->first_unit[t]].kind == QC_UNIT_DERIVED;
}

qc_status qc_job_take_part(qc_pipeline *p, uint32_t job, qc_part part, const void *src,
                           size_t bytes, qc_error *err)
{
    const qc_job *j = &p->plan->jobs[job];
    void *v = NULL;
    if (!qc_job_part_is_own(part) || !qc_job_awaits(p, job, part) ||
        qc_plan_tensor_bytes(p->plan, j->outputs[part]) != bytes)
        QC_FAIL(err, QC_ERR_INPUT, "tensor '%s': part %d of %zu bytes is none of its own", j->name,
                (int)part, bytes);
    QC_TRY(qc_job_need_work(&p->jobs[job], err));
    qc_job_work *s = p->jobs[job].work;
    QC_TRY(qc_malloc(&v, bytes, err));
    memcpy(v, src, bytes);
    void *old = NULL;
    if (part == QC_PART_NESTED_ABSMAX) {
        old = s->nested_absmax;
        s->nested_absmax = v;
    } else if (part == QC_PART_STATE) {
        old = s->state_json;
        s->state_json = v;
    } else if (part == QC_PART_ABSMAX && j->nested) {
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
    int absmax = qc_job_awaits(p, job, QC_PART_ABSMAX);
    qc_free(s->sums);
    s->sums = NULL;
    if (!absmax && !qc_job_awaits(p, job, QC_PART_SCB)) {
        qc_free(s->absmax);
        s->absmax = NULL;
    }
    if (!absmax) {
        qc_free(s->nested_codes);
        s->nested_codes = NULL;
    }
    if (!qc_job_awaits(p, job, QC_PART_NESTED_ABSMAX)) {
        qc_free(s->nested_absmax);
        s->nested_absmax = NULL;
    }
}

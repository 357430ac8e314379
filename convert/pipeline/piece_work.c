/* Makes the content of one unit from the source, step by step.
 *
 * A step is QC_SOURCE_STEP_BYTES of source. It is read into a buffer that stays in the L2 cache,
 * and is hashed and quantized from there. Only the codes travel on to memory. */
#include "convert/pipeline/pipeline_internal.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <string.h>

/* Reads and decodes the scales of a stored weight that is dequantized, once for each job. */
static qc_status load_scales(qc_worker *w, uint32_t job, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_checkpoint *m = p->plan->model;
    qc_job_work *s = w->p->jobs[job].work;
    const qc_stored_weight *sw = p->plan->jobs[job].entry->stored;
    const qc_ckpt_tensor *absmax = &m->tensors[sw->absmax];
    uint64_t count = absmax->bytes / (qc_dtype_bits(absmax->dtype) / 8);
    size_t n = 0;
    void *v = NULL, *codes = NULL, *nested = NULL;
    if (qc_u64_to_size(count, &n))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", absmax->name);
    QC_TRY(qc_realloc_array(&v, n, sizeof(float), err));
    s->absmax = v;
    if (sw->nested_absmax == UINT32_MAX)
        return qc_checkpoint_read(m, w->cursor, absmax, 0, s->absmax, n * sizeof(float), err);
    const qc_ckpt_tensor *na = &m->tensors[sw->nested_absmax];
    float map[256];
    qc_status st = qc_malloc(&codes, n, err);
    if (st == QC_OK)
        st = qc_malloc(&nested, (size_t)na->bytes, err);
    if (st == QC_OK)
        st = qc_checkpoint_read(m, w->cursor, absmax, 0, codes, n, err);
    if (st == QC_OK)
        st = qc_checkpoint_read(m, w->cursor, na, 0, nested, (size_t)na->bytes, err);
    if (st == QC_OK)
        st = qc_checkpoint_read(m, w->cursor, &m->tensors[sw->nested_map], 0, map, sizeof map, err);
    if (st == QC_OK)
        p->ops->nested_dequantize(codes, nested, map, n, (uint32_t)sw->nested_block_elems,
                                  sw->nested_offset, s->absmax);
    qc_free(codes);
    qc_free(nested);
    return st;
}

/* Prepares what a job needs before its first unit: its buffers, the absmax of a weight that is
 * dequantized, and the offset where it comes from a sample. */
static qc_status open_job(qc_worker *w, uint32_t job, qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    qc_job_state *s = &p->jobs[job];
    qc_status st = QC_OK;
    pthread_mutex_lock(&p->finish_lock);
    if (!s->opened)
        st = qc_job_need_work(s, err);
    qc_job_work *work = s->work;
    if (st == QC_OK && !s->opened) {
        void *v = NULL;
        uint32_t main_units = qc_unit_count(p, j->outputs[QC_PART_MAIN]);
        st = qc_calloc(&v, main_units, sizeof *work->sums, err);
        work->sums = v;
        int searched = j->scale != QC_SCALE_ABSMAX;
        uint64_t scales = j->scheme == QC_SCHEME_INT8_ROWS ? j->rows : j->blocks;
        if (st == QC_OK && scales > 0 && !(searched && j->nested)) {
            v = NULL;
            st = qc_realloc_array(&v, (size_t)scales, sizeof *work->absmax, err);
            work->absmax = v;
        }
        if (st == QC_OK && j->blocks > 0 && !searched) {
            v = NULL;
            st = qc_realloc_array(&v, (size_t)j->blocks, sizeof *work->block_errors, err);
            work->block_errors = v;
        }
        if (st == QC_OK && j->scheme == QC_SCHEME_DEQUANT)
            st = load_scales(w, job, err);
        if (st == QC_OK && searched && j->nested)
            st = qc_search_open(j, !qc_job_is_calibrated(p, job), work, err);
        if (st == QC_OK && qc_job_is_calibrated(p, job)) {
            s->outputs = qc_calibrated_result(p->calibrated, job);
            work->offset_ready = 1;
            st = qc_calibrated_read(p->calibrated, job, 0, 0, NULL, NULL, NULL, NULL, &work->offset,
                                    err);
        }
        s->opened = st == QC_OK;
    }
    int wants_offset = st == QC_OK && qc_job_has_sample(j) && !work->offset_ready;
    pthread_mutex_unlock(&p->finish_lock);
    if (st != QC_OK || !wants_offset)
        return st;
    return qc_search_offset(w, job, err);
}

/* --keep leaves a tensor unquantized, but --rest holds for it all the same, so the advice is --rest
 * where the conversion quantizes. */
static qc_status refuse_cast(const qc_pipeline *p, const qc_ckpt_tensor *t, uint64_t index,
                             qc_dtype to, qc_error *err)
{
    qc_to scheme = p->plan->options->recipe.to;
    if (qc_to_quantizes(scheme))
        QC_FAIL(err, QC_ERR_RANGE, "tensor '%s': element %" PRIu64 " is too large for %s; use %s",
                t->name, index, qc_dtype_name(to),
                to == QC_DTYPE_F16 ? "--rest bf16 or --rest keep" : "--rest keep");
    QC_FAIL(err, QC_ERR_RANGE,
            "tensor '%s': element %" PRIu64 " is too large for %s; --keep '%s' leaves the tensor "
            "as it is",
            t->name, index, qc_dtype_name(to), t->name);
}

static qc_status make_cast(qc_worker *w, qc_unit *u, uint32_t job, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    const qc_ckpt_tensor *t = qc_job_source(p, j);
    qc_dtype to = j->entry->out_dtype;
    uint64_t out_each = qc_dtype_bits(to) / 8;
    uint64_t begin = u->content_offset / out_each, end = begin + u->content_bytes / out_each;
    uint64_t step = qc_job_step_elems(j);
    qc_digest_reset(w->hash);
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step;
        uint64_t overflow = UINT64_MAX;
        size_t bytes = 0;
        QC_TRY(qc_worker_look_up(w, err));
        QC_TRY(qc_job_read(w, job, first, n, w->source, err));
        const unsigned char *stored = qc_job_stored(w, job, n, w->source, &bytes);
        qc_digest_update(w->hash, stored, bytes);
        p->ops->cast(w->source, j->dtype, n, w->content + (first - begin) * out_each, to,
                     &overflow);
        if (overflow != UINT64_MAX)
            return refuse_cast(p, t, first + overflow, to, err);
    }
    u->source = qc_digest_finish(w->hash);
    return QC_OK;
}

/* Dequantizes elements [first, first + n) of row-wise int8, which may begin and end inside rows. */
static void dequantize_rows(const qc_worker *w, const qc_job *j, const float *scb, uint64_t first,
                            uint64_t n, unsigned char *dst, uint64_t out_each, uint64_t *overflow)
{
    const int8_t *codes = (const int8_t *)w->source;
    for (uint64_t done = 0; done < n && *overflow == UINT64_MAX;) {
        uint64_t row = (first + done) / j->cols, col = (first + done) % j->cols;
        uint64_t rows = col == 0 && n - done >= j->cols ? (n - done) / j->cols : 1;
        uint64_t cols = j->cols - col < n - done ? j->cols - col : n - done;
        w->p->ops->int8_rows_dequantize(codes + done, scb + row, rows, cols, dst + done * out_each,
                                        j->entry->out_dtype, overflow);
        if (*overflow != UINT64_MAX)
            *overflow += done;
        done += rows * cols;
    }
}

static qc_status make_dequantized(qc_worker *w, qc_unit *u, uint32_t job, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    const qc_ckpt_tensor *t = qc_job_source(p, j);
    const qc_stored_weight *sw = j->entry->stored;
    const float *scales = p->jobs[job].work->absmax;
    qc_dtype to = j->entry->out_dtype;
    uint64_t out_each = qc_dtype_bits(to) / 8;
    uint64_t begin = u->content_offset / out_each, end = begin + u->content_bytes / out_each;
    uint64_t per_byte = sw->stored_as == QC_SCHEME_NF4 ? 2 : 1;
    uint64_t step = QC_SOURCE_STEP_BYTES; /* in elements; a multiple of every block size */
    float map[16];
    if (sw->quant_map != UINT32_MAX)
        QC_TRY(qc_checkpoint_read(p->plan->model, w->cursor,
                                  &p->plan->model->tensors[sw->quant_map], 0, map, sizeof map,
                                  err));
    else
        memcpy(map, qc_nf4_code, sizeof map);
    qc_digest_reset(w->hash);
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step;
        size_t bytes = (size_t)qc_ceil_div_u64(n, per_byte);
        unsigned char *dst = w->content + (first - begin) * out_each;
        uint64_t overflow = UINT64_MAX;
        QC_TRY(qc_worker_look_up(w, err));
        QC_TRY(qc_checkpoint_read(p->plan->model, w->cursor, t, first / per_byte, w->source, bytes,
                                  err));
        qc_digest_update(w->hash, w->source, bytes);
        if (sw->stored_as == QC_SCHEME_NF4)
            p->ops->nf4_dequantize(w->source, scales + first / sw->block_elems, map, n,
                                   (uint32_t)sw->block_elems, dst, to, &overflow);
        else if (sw->stored_as == QC_SCHEME_INT8_BLOCKS)
            p->ops->int8_blocks_dequantize((const int8_t *)w->source,
                                           scales + first / sw->block_elems, n,
                                           (uint32_t)sw->block_elems, dst, to, &overflow);
        else
            dequantize_rows(w, j, scales, first, n, dst, out_each, &overflow);
        if (overflow != UINT64_MAX)
            QC_FAIL(err, QC_ERR_RANGE,
                    "tensor '%s': element %" PRIu64 " is too large for %s; use --to bf16", t->name,
                    first + overflow, qc_dtype_name(to));
    }
    u->source = qc_digest_finish(w->hash);
    return QC_OK;
}

qc_status qc_piece_make(qc_worker *w, qc_unit *u, qc_error *err)
{
    const qc_pipeline *p = w->p;
    uint32_t job = p->plan->outputs[u->tensor].job;
    const qc_job *j = &p->plan->jobs[job];
    switch (j->scheme) {
    case QC_SCHEME_KEEP:
    case QC_SCHEME_ABSORBED:
        QC_TRY(qc_checkpoint_read(p->plan->model, w->cursor, qc_job_source(p, j), u->content_offset,
                                  w->content, u->content_bytes, err));
        u->source = qc_digest_bytes(w->content, u->content_bytes);
        u->content = u->source;
        return QC_OK;
    case QC_SCHEME_CAST:
        QC_TRY(j->entry->transpose ? qc_stack_make(w, u, err) : make_cast(w, u, job, err));
        break;
    case QC_SCHEME_DEQUANT:
        QC_TRY(open_job(w, job, err));
        QC_TRY(j->entry->transpose ? qc_stack_make(w, u, err) : make_dequantized(w, u, job, err));
        break;
    case QC_SCHEME_NF4:
    case QC_SCHEME_INT8_ROWS:
    case QC_SCHEME_INT8_BLOCKS:
        QC_TRY(open_job(w, job, err));
        QC_TRY(qc_quantized_make(w, u, job, err));
        break;
    }
    u->content = qc_digest_bytes(w->content, u->content_bytes);
    return QC_OK;
}

/* Hashes the unit's elements step by step, as quantizing and casting do. */
static qc_status hash_elements(qc_worker *w, const qc_unit *u, uint32_t job, qc_digest *out,
                               qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    uint64_t bits = j->scheme == QC_SCHEME_NF4    ? 4
                    : j->scheme == QC_SCHEME_CAST ? qc_dtype_bits(j->entry->out_dtype)
                                                  : 8;
    uint64_t begin = u->content_offset * 8 / bits;
    uint64_t end = begin + (uint64_t)u->content_bytes * 8 / bits, step = qc_job_step_elems(j);
    end = end < j->elems ? end : j->elems; /* an odd number of nibbles */
    qc_digest_reset(w->hash);
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step;
        size_t bytes = 0;
        QC_TRY(qc_worker_look_up(w, err));
        QC_TRY(qc_job_read(w, job, first, n, w->source, err));
        const unsigned char *stored = qc_job_stored(w, job, n, w->source, &bytes);
        qc_digest_update(w->hash, stored, bytes);
    }
    *out = qc_digest_finish(w->hash);
    return QC_OK;
}

qc_status qc_piece_source(qc_worker *w, const qc_unit *u, qc_digest *out, qc_error *err)
{
    const qc_pipeline *p = w->p;
    uint32_t job = p->plan->outputs[u->tensor].job;
    const qc_job *j = &p->plan->jobs[job];
    if (j->scheme == QC_SCHEME_KEEP || j->scheme == QC_SCHEME_ABSORBED) {
        QC_TRY(qc_checkpoint_read(p->plan->model, w->cursor, qc_job_source(p, j), u->content_offset,
                                  w->content, u->content_bytes, err));
        *out = qc_digest_bytes(w->content, u->content_bytes);
        return QC_OK;
    }
    if (j->scheme == QC_SCHEME_DEQUANT || (j->scheme == QC_SCHEME_CAST && j->entry->transpose))
        return qc_stack_source(w, u, out, err);
    return hash_elements(w, u, job, out, err);
}

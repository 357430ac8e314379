/* Quantizes weights one frame at a time: on the CPU step by step, or through the worker's ring on a
 * GPU.
 *
 * Both give the same bytes because both work in the same steps of QC_SOURCE_STEP_BYTES. A slot of
 * the ring holds several whole steps. The GPU leaves a few floats for each block or run of blocks,
 * and the worker adds them up to the sums of each step, in the order of the CPU.
 *
 * These stay on the CPU: casts and dequantizing (copying would cost more than the work), weights in
 * float64, and rows or groups that are too long for a slot. */
#include "base/checked.h"
#include "base/text.h"
#include "convert/pipeline/pipeline_internal.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "kernels/cuda_quantize.h"
#include "quant/quant_collect.h"

#include <inttypes.h>
#include <string.h>

#define SLOT_BYTES ((size_t)4 << 20)

/* The elements of a unit, and where their error sums go. */
typedef struct {
    uint32_t job;
    uint64_t begin, end;
    uint64_t step;
    qc_piece_sums *total;
} quantized_piece;

/* The message names row and column as the tensor lies in the source. */
static qc_status refuse_element(const qc_pipeline *p, const qc_job *j, uint64_t index,
                                qc_bad_kind bad, qc_error *err)
{
    const qc_ckpt_tensor *t = &p->plan->model->tensors[j->source];
    uint64_t row = index / j->cols, col = index % j->cols;
    if (j->entry->transpose) {
        uint64_t swap = row;
        row = col;
        col = swap;
    }
    if (bad == QC_BAD_NONFINITE)
        QC_FAIL(err, QC_ERR_NONFINITE,
                "tensor '%s': the weight at row %" PRIu64 ", column %" PRIu64
                " is not finite; --keep '%s' leaves the tensor as it is",
                t->name, row, col, qc_text_word_or(t->name, "NAME"));
    QC_FAIL(err, QC_ERR_RANGE,
            "tensor '%s': the weight at row %" PRIu64 ", column %" PRIu64
            " is too large for the %s that %s passes through; --keep '%s' leaves the tensor as it "
            "is",
            t->name, row, col, j->scheme == QC_SCHEME_INT8_ROWS ? "float16" : "float32",
            qc_scheme_name(j->scheme), qc_text_word_or(t->name, "NAME"));
}

/* Quantizes elements [first, first + n), which lie at source, to w->content. */
static void quantize_step(qc_worker *w, uint32_t job, const void *source, uint64_t first,
                          uint64_t n, uint64_t piece_first, qc_piece_sums *sums)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    const qc_job_work *s = p->jobs[job].work;
    qc_dtype dtype = j->dtype;
    uint64_t at = first - piece_first;
    if (j->scale != QC_SCALE_ABSMAX) {
        qc_search_step(w, job, source, first, n,
                       w->content + (j->scheme == QC_SCHEME_NF4 ? at / 2 : at), sums);
        return;
    }
    if (j->scheme == QC_SCHEME_INT8_ROWS) {
        p->ops->int8_rows_quantize(source, dtype, n / j->cols, j->cols, (int8_t *)w->content + at,
                                   s->absmax + first / j->cols, sums);
        return;
    }
    uint64_t block = first / j->block_elems;
    if (j->scheme == QC_SCHEME_NF4)
        p->ops->nf4_quantize(source, dtype, n, j->block_elems, w->content + at / 2,
                             s->absmax + block, s->block_errors + block, sums);
    else
        p->ops->int8_blocks_quantize(source, dtype, n, j->block_elems, (int8_t *)w->content + at,
                                     s->absmax + block, s->block_errors + block, sums);
}

/* Reads elements [first, first + n), a step or less, to dst, and hashes the bytes that they come
 * from. */
static qc_status read_step(qc_worker *w, uint32_t job, uint64_t first, uint64_t n, void *dst,
                           qc_error *err)
{
    size_t bytes = 0;
    QC_TRY(qc_worker_look_up(w, err));
    QC_TRY(qc_job_read(w, job, first, n, dst, err));
    const unsigned char *stored = qc_job_stored(w, job, n, dst, &bytes);
    qc_digest_update(w->hash, stored, bytes);
    return QC_OK;
}

static uint64_t at_most(uint64_t n, uint64_t limit)
{
    return n < limit ? n : limit;
}

/* ---- on the CPU ---- */

static qc_status make_on_cpu(qc_worker *w, const quantized_piece *q, qc_error *err)
{
    uint64_t per_byte = w->p->plan->jobs[q->job].scheme == QC_SCHEME_NF4 ? 2 : 1;
    for (uint64_t first = q->begin; first < q->end; first += q->step) {
        uint64_t n = at_most(q->end - first, q->step);
        qc_piece_sums sums = {0};
        QC_TRY(read_step(w, q->job, first, n, w->source, err));
        if (qc_job_is_calibrated(w->p, q->job))
            QC_TRY(qc_calibrated_step(w, q->job, w->source, first, n,
                                      w->content + (first - q->begin) / per_byte, &sums, err));
        else
            quantize_step(w, q->job, w->source, first, n, q->begin, &sums);
        if (sums.bad != QC_BAD_NONE)
            return refuse_element(w->p, &w->p->plan->jobs[q->job], first + sums.bad_index, sums.bad,
                                  err);
        qc_piece_add(q->total, &sums, first - q->begin);
    }
    return QC_OK;
}

/* ---- on a GPU ---- */

static const qc_gpu_quantizer *quantizer(const qc_worker *w)
{
    return w->p->devices->work->quantizer;
}

/* The GPU found no code for an element. The CPU must refuse it as well, and says why. */
static qc_status refuse_slot(qc_worker *w, const quantized_piece *q, const unsigned char *source,
                             uint64_t first, uint64_t bad, uint64_t slot_elems, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[q->job];
    uint64_t each = qc_dtype_bits(j->dtype) / 8;
    uint64_t skipped = bad - bad % q->step;
    qc_piece_sums sums = {0};
    if (bad < slot_elems)
        quantize_step(w, q->job, source + skipped * each, first + skipped,
                      at_most(slot_elems - skipped, q->step), q->begin, &sums);
    if (sums.bad == QC_BAD_NONE || skipped + sums.bad_index != bad)
        QC_FAIL(err, QC_ERR_INTERNAL,
                "cuda:%d (%s): element %" PRIu64 " of tensor '%s' has no code there and one on the "
                "CPU",
                w->gpu->index, w->gpu->name, first + bad, j->name);
    return refuse_element(w->p, j, first + bad, sums.bad, err);
}

/* Copies the results of elements [first, first + n) to their places. */
static void collect_slot(qc_worker *w, const quantized_piece *q, const qc_gpu_result *r,
                         uint64_t first, uint64_t n)
{
    const qc_job *j = &w->p->plan->jobs[q->job];
    const qc_job_work *s = w->p->jobs[q->job].work;
    int rows = j->scheme == QC_SCHEME_INT8_ROWS;
    uint64_t per_scale = rows ? j->cols : j->block_elems;
    uint64_t per_byte = j->scheme == QC_SCHEME_NF4 ? 2 : 1;
    uint64_t runs = rows ? qc_ceil_div_u64(j->cols, QC_CUDA_ROW_RUN) : 1;
    uint64_t scales = qc_ceil_div_u64(n, per_scale);
    const float *absmax = r->absmax;
    if (r->nested_absmax) {
        uint64_t block = first / per_scale;
        memcpy(s->nested_codes + block, r->absmax_codes, (size_t)scales);
        memcpy(s->nested_absmax + block / QC_NESTED_BLOCK, r->nested_absmax,
               (size_t)qc_ceil_div_u64(scales, QC_NESTED_BLOCK) * sizeof *r->nested_absmax);
    } else {
        memcpy(s->absmax + first / per_scale, absmax, (size_t)scales * sizeof *absmax);
    }
    memcpy(w->content + (first - q->begin) / per_byte, r->codes,
           (size_t)qc_ceil_div_u64(n, per_byte));
    for (uint64_t at = 0; at < n; at += q->step) {
        uint64_t part = at_most(n - at, q->step), scale = at / per_scale;
        qc_piece_sums sums = {0};
        if (rows)
            qc_rows_collect(r->errors + scale * runs * 4, part / j->cols, j->cols, &sums);
        else if (r->found)
            qc_search_collect(r->found + scale, qc_ceil_div_u64(part, per_scale), j->block_elems,
                              &sums);
        else
            qc_blocks_collect(absmax + scale, r->errors + scale * 4,
                              qc_ceil_div_u64(part, per_scale),
                              s->block_errors + first / per_scale + scale, &sums);
        qc_piece_add(q->total, &sums, first + at - q->begin);
    }
}

/* Adds the device's name to an error of CUDA. *no_room: the GPU has no room, but the CPU may
 * have. */
static qc_status gpu_answered(const qc_worker *w, qc_status st, int *no_room, qc_error *err)
{
    *no_room = st == QC_ERR_NOMEM;
    if (st != QC_OK && st != QC_ERR_NOMEM)
        qc_error_prefix(err, "cuda:%d (%s), which --device cpu goes without", w->gpu->index,
                        w->gpu->name);
    return st;
}

/* Makes the unit through the ring: fills slots as long as one is free, and else waits for the
 * oldest. */
static qc_status make_on_gpu(qc_worker *w, const quantized_piece *q, const qc_gpu_form *form,
                             uint64_t per_slot, int *no_room, qc_error *err)
{
    const qc_gpu_quantizer *gpu = quantizer(w);
    uint64_t each = qc_dtype_bits(form->dtype) / 8;
    uint64_t slots = qc_ceil_div_u64(q->end - q->begin, per_slot);
    for (uint64_t begun = 0, done = 0; done < slots;) {
        uint64_t oldest = q->begin + done * per_slot, next = q->begin + begun * per_slot;
        if (begun < slots && begun - done < QC_GPU_SLOTS) {
            unsigned slot = (unsigned)(begun % QC_GPU_SLOTS);
            unsigned char *source = gpu->ring_source(w->ring, slot);
            uint64_t n = at_most(q->end - next, per_slot);
            for (uint64_t at = 0; at < n; at += q->step)
                QC_TRY(read_step(w, q->job, next + at, at_most(n - at, q->step), source + at * each,
                                 err));
            QC_TRY(gpu_answered(w, gpu->ring_start(w->ring, slot, form, n, err), no_room, err));
            begun++;
            continue;
        }
        qc_gpu_result r;
        unsigned slot = (unsigned)(done % QC_GPU_SLOTS);
        uint64_t n = at_most(q->end - oldest, per_slot);
        QC_TRY(gpu_answered(w, gpu->ring_finish(w->ring, slot, &r, err), no_room, err));
        if (r.bad != UINT64_MAX)
            return refuse_slot(w, q, gpu->ring_source(w->ring, slot), oldest, r.bad, n, err);
        collect_slot(w, q, &r, oldest, n);
        done++;
    }
    atomic_fetch_add(&w->p->gpu_elems, q->end - q->begin);
    return QC_OK;
}

/* Warns once for all workers. */
static void tell_no_room(qc_worker *w, const qc_error *why)
{
    if (!atomic_flag_test_and_set(&w->p->gpu_told))
        qc_console_warn(w->p->plan->call,
                        "cuda:%d (%s): %s; what does not go there is quantized on the CPU",
                        w->gpu->index, w->gpu->name, why->msg);
}

qc_status qc_worker_take_gpu(qc_worker *w, unsigned index, qc_error *err)
{
    const qc_devices *d = w->p->devices;
    qc_error why = {0};
    char bytes[QC_SIZE_TEXT_BYTES];
    if (!d || d->gpu_count == 0)
        return QC_OK;
    w->gpu = &d->gpus[index % d->gpu_count];
    qc_status st =
        quantizer(w)->ring_create(&w->ring, w->gpu, SLOT_BYTES, QC_SOURCE_STEP_BYTES, &why);
    if (st == QC_OK) {
        size_t got = quantizer(w)->ring_slot_bytes(w->ring);
        if (got < SLOT_BYTES)
            qc_console_detail(w->p->plan->call, 1, "cuda:%d: short of memory, slots of %s",
                              w->gpu->index, qc_text_bytes(bytes, got));
        return QC_OK;
    }
    if (st == QC_ERR_NOMEM || !d->wished) {
        tell_no_room(w, &why);
        return QC_OK;
    }
    QC_FAIL(err, st, "cuda:%d (%s): %s; --device cpu goes without it", w->gpu->index, w->gpu->name,
            why.msg);
}

void qc_worker_leave_gpu(qc_worker *w)
{
    if (w->ring)
        quantizer(w)->ring_destroy(w->ring);
    w->ring = NULL;
}

static qc_weights_kind kind_of(qc_scheme scheme)
{
    return scheme == QC_SCHEME_NF4         ? QC_WEIGHTS_NF4
           : scheme == QC_SCHEME_INT8_ROWS ? QC_WEIGHTS_INT8_ROWS
                                           : QC_WEIGHTS_INT8_BLOCKS;
}

/* Makes the unit on the GPU. *done stays 0 where the CPU is to make it from its beginning: where
 * the GPU does not take such a weight, or turns out to have no room to run a kernel. Any other
 * failure ends the conversion, because a GPU that fails once has an error in everything after. */
static qc_status try_gpu(qc_worker *w, const quantized_piece *q, int *done, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[q->job];
    qc_gpu_form form = {.kind = kind_of(j->scheme),
                        .dtype = j->dtype,
                        .block_elems = j->block_elems,
                        .cols = j->cols,
                        .searched = j->scale != QC_SCALE_ABSMAX,
                        .nested = j->nested,
                        .refit = j->scale == QC_SCALE_REFIT,
                        .offset = w->p->jobs[q->job].work->offset};
    qc_error why = {0};
    int no_room = 0;
    *done = 0;
    if (!w->ring || !qc_job_suits_gpu(j) || qc_job_is_calibrated(w->p, q->job))
        return QC_OK;
    uint64_t per_slot = quantizer(w)->ring_elems(w->ring, &form, q->step);
    if (per_slot == 0)
        return QC_OK;
    qc_status st = make_on_gpu(w, q, &form, per_slot, &no_room, &why);
    *done = st == QC_OK;
    if (st == QC_OK)
        return QC_OK;
    if (no_room) {
        tell_no_room(w, &why);
        qc_worker_leave_gpu(w);
        memset(q->total, 0, sizeof *q->total);
        return QC_OK;
    }
    if (err)
        *err = why;
    return st;
}

qc_status qc_quantized_make(qc_worker *w, qc_unit *u, uint32_t job, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    uint64_t per_byte = j->scheme == QC_SCHEME_NF4 ? 2 : 1;
    quantized_piece q = {.job = job,
                         .begin = u->content_offset * per_byte,
                         .step = qc_job_step_elems(j),
                         .total = &p->jobs[job].work->sums[u->index - p->first_unit[u->tensor]]};
    int done = 0;
    q.end = at_most(q.begin + u->content_bytes * per_byte, j->elems); /* an odd number of nibbles */
    qc_digest_reset(w->hash);
    QC_TRY(try_gpu(w, &q, &done, err));
    if (!done) {
        qc_digest_reset(w->hash);
        QC_TRY(make_on_cpu(w, &q, err));
    }
    u->source = qc_digest_finish(w->hash);
    return QC_OK;
}

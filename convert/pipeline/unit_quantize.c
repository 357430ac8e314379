/* Quantizes weights one frame at a time: on the CPU step by step, or through the worker's ring on a
 * GPU.
 *
 * Both give the same bytes because both work in the same steps of QC_SOURCE_STEP_BYTES. A slot of
 * the ring holds several whole steps. The GPU leaves a few floats for each block or run of blocks,
 * and the worker adds them up to the sums of each step, in the order of the CPU.
 *
 * These stay on the CPU: casts and dequantizing (copying would cost more than the work), weights in
 * float64, and rows or groups that are too long for a slot. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "convert/model/awq_layout.h"
#include "convert/pipeline/odd_values.h"
#include "convert/pipeline/pipeline_internal.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "kernels/cuda_quantize.h"
#include "quant/quant_collect.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define SLOT_BYTES ((size_t)4 << 20)
#define RUN_ELEMS  ((uint64_t)2048) /* decoded at a time; 16 KiB with the source's floats */
#define LANES      8u
#define F16_LIMIT  65520.0f /* it rounds to infinity, as everything above it does */

/* The elements of a unit, and where their error sums go. */
typedef struct {
    uint64_t begin, end;
    qc_piece_sums *total;
} unit_range;

/* LLM.int8 passes rows through float16 first. */
static int is_llm_int8(const qc_job *j)
{
    return qc_form_by_rows(&j->form) && !j->form.ops->integer;
}

/* The message names row and column as the tensor lies in the source. */
static qc_status refuse_element(const qc_pipeline *p, const qc_job *j, uint64_t index,
                                qc_bad_kind bad, qc_error *err)
{
    const qc_checkpoint_tensor *t = &p->plan->model->tensors[j->source];
    if (j->by_groups)
        index = qc_awq_element(j->rows, j->form.cols, j->form.block_elems, index);
    uint64_t row = index / j->form.cols, col = index % j->form.cols;
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
            t->name, row, col, is_llm_int8(j) ? "float16" : "float32", qc_scheme_name(j->scheme),
            qc_text_word_or(t->name, "NAME"));
}

/* ---- searched scales ----
 *
 * With --scale search or refit the scales are searched.
 *
 * A step is whole groups, and what the search leaves of it is what is written: nothing is done
 * again when the weight is finished. The one thing that a group takes from the rest of its weight
 * is the offset of double quantization, which is 0 in NF4. In block-wise int8 it comes from a
 * sample of groups (quant/scale_search.h), which is read before the first frame. The workers that
 * want it share the sample, a group at a time. A worker that finds no group left to take waits for
 * those who took the last ones, at most as long as one group takes. The offset depends on the
 * sampled values alone, not on who searched them. */

static qc_search_effort effort_of(const qc_job *j)
{
    return j->scale == QC_SCALE_REFIT ? QC_SEARCH_REFIT : QC_SEARCH_ONCE;
}

static uint64_t group_count(const qc_job *j)
{
    return qc_ceil_div_u64(j->elems, j->group_elems);
}

qc_status qc_search_prepare(qc_worker *w, qc_error *err)
{
    uint64_t scales = 0;
    size_t count = 0;
    int searched = 0;
    for (uint32_t i = 0; i < w->p->plan->job_count; i++) {
        const qc_job *j = &w->p->plan->jobs[i];
        searched |= j->scale != QC_SCALE_ABSMAX;
        if (j->scale != QC_SCALE_ABSMAX && j->form.nested)
            scales = qc_max_u64(scales, j->step_elems / j->form.block_elems);
    }
    if (qc_u64_to_size(scales, &count))
        QC_FAIL(err, QC_ERR_NOMEM, "the scratch of a search is too large");
    if (searched)
        QC_TRY(qc_malloc_aligned(&w->search, 64, qc_search_scratch_bytes(), err));
    if (count > 0)
        QC_TRY(qc_realloc_array(&w->scales, count, sizeof *w->scales, err));
    return QC_OK;
}

qc_status qc_search_open(const qc_job *j, int sampled, qc_job_work *s, qc_error *err)
{
    uint64_t groups = group_count(j);
    QC_TRY(qc_malloc(&s->nested_codes, (size_t)j->scales, err));
    QC_TRY(qc_realloc_array(&s->nested_absmax, (size_t)groups, sizeof *s->nested_absmax, err));
    if (!sampled || !j->has_sample)
        return QC_OK;
    s->sample_count = qc_search_sample_count(groups);
    QC_TRY(qc_realloc_array(&s->sample_absmax, (size_t)s->sample_count,
                            QC_NESTED_BLOCK * sizeof(float), err));
    atomic_init(&s->sample_next, 0);
    atomic_init(&s->sample_left, s->sample_count);
    return QC_OK;
}

/* Searches the sampled groups [first, end), which are neighbours in the weight, into sample_absmax.
 * Groups with an element that has no code count as zeros here. The step that such an element
 * belongs to refuses it, so the message always names the same one. */
static qc_status sample_groups(qc_worker *w, uint64_t first, uint64_t end, qc_error *err)
{
    const qc_job *j = w->job;
    qc_job_work *s = w->state->work;
    uint64_t each = j->group_elems;
    uint64_t at = qc_search_sample_group(group_count(j), first) * each;
    uint64_t n = (end - first) * each < j->elems - at ? (end - first) * each : j->elems - at;
    uint64_t blocks = qc_ceil_div_u64(n, j->form.block_elems);
    qc_form form = j->form;
    form.nested = 0;
    /* w->content is free until the unit is made, and it is large enough for the codes of any
     * step. */
    qc_search_out out = {.codes = w->content, .absmax = s->sample_absmax + first * QC_NESTED_BLOCK};
    qc_piece_sums sums = {0};
    qc_error trouble = {0};
    qc_status st = qc_job_read(w, at, n, w->source, &trouble);
    if (st == QC_OK)
        w->p->search->blocks(&form, effort_of(j), w->source, j->dtype, n, &out, w->search, &sums);
    if (st == QC_ERR_NONFINITE || (st == QC_OK && sums.bad != QC_BAD_NONE)) {
        memset(out.absmax, 0, (size_t)blocks * sizeof *out.absmax);
        return QC_OK;
    }
    return qc_error_pass(err, &trouble, st);
}

/* The one worker that completed the sample calls this. */
static void make_offset(const qc_worker *w)
{
    qc_pipeline *p = w->p;
    const qc_job *j = w->job;
    qc_job_work *s = w->state->work;
    uint64_t groups = group_count(j), n = s->sample_count * QC_NESTED_BLOCK;
    if (qc_search_sample_group(groups, s->sample_count - 1) == groups - 1)
        n -= groups * QC_NESTED_BLOCK - j->scales; /* the last group may be short */
    float offset = qc_nested_offset(s->sample_absmax, n);
    qc_free(s->sample_absmax);
    s->sample_absmax = NULL;
    pthread_mutex_lock(&p->finish_lock);
    s->offset = offset;
    s->offset_ready = 1;
    pthread_cond_broadcast(&p->finish_cond);
    pthread_mutex_unlock(&p->finish_lock);
}

qc_status qc_search_offset(qc_worker *w, qc_error *err)
{
    const qc_job *j = w->job;
    qc_job_work *s = w->state->work;
    uint64_t groups = group_count(j);
    /* Reading a weight that is stored transposed takes a read per column, however many rows. */
    uint64_t most = j->entry->transpose ? j->step_elems / j->group_elems : 1;
    for (;;) {
        uint64_t first = atomic_fetch_add(&s->sample_next, most);
        if (first >= s->sample_count)
            break;
        uint64_t end = first + most < s->sample_count ? first + most : s->sample_count;
        for (uint64_t from = first, to; from < end; from = to) {
            for (to = from + 1; to < end; to++)
                if (qc_search_sample_group(groups, to) !=
                    qc_search_sample_group(groups, to - 1) + 1)
                    break;
            QC_TRY(sample_groups(w, from, to, err));
        }
        if (atomic_fetch_sub(&s->sample_left, end - first) == end - first)
            make_offset(w);
    }
    return qc_worker_wait(w, &s->offset_ready, err);
}

static void search_step(qc_worker *w, const void *source, uint64_t first, uint64_t n, void *codes,
                        qc_piece_sums *sums)
{
    const qc_job *j = w->job;
    const qc_job_work *s = w->state->work;
    uint64_t block = first / qc_form_scale_elems(&j->form);
    qc_form form = j->form;
    qc_search_out out = {.codes = codes};
    if (j->form.nested) {
        form.offset = s->offset;
        out.absmax = w->scales;
        out.absmax_codes = s->nested_codes + block;
        out.nested_absmax = s->nested_absmax + block / QC_NESTED_BLOCK;
    } else {
        out.absmax = s->absmax + block;
    }
    w->p->search->blocks(&form, effort_of(j), source, j->dtype, n, &out, w->search, sums);
}

/* Quantizes elements [first, first + n), which lie at source, to codes. */
static void quantize_step(qc_worker *w, const void *source, uint64_t first, uint64_t n,
                          unsigned char *codes, qc_piece_sums *sums)
{
    const qc_job *j = w->job;
    const qc_job_work *s = w->state->work;
    if (j->scale != QC_SCALE_ABSMAX) {
        search_step(w, source, first, n, codes, sums);
        return;
    }
    uint64_t scale = first / qc_form_scale_elems(&j->form);
    const qc_form_out out = {codes, s->absmax + scale,
                             s->block_errors ? s->block_errors + scale : NULL};
    j->form.ops->quantize(w->p->ops, &j->form, source, j->dtype, n, &out, sums);
}

/* ---- calibrated weights ----
 *
 * These are made of the codes and scales that calibrating left (convert/calibrate/calibrated.h).
 *
 * The source is read all the same: its digest goes to the manifest, a weight that is not finite is
 * refused, and the error is measured of what a reader will make of codes and scales. */

/* Finds the first of n elements that has no code, which quantizing would refuse. */
static qc_bad_kind find_bad(const qc_job *j, const float *x, uint64_t n, uint64_t overflow,
                            uint64_t *index)
{
    float limit = is_llm_int8(j) ? F16_LIMIT : INFINITY;
    for (uint64_t i = 0; i < n; i++) {
        if (fabsf(x[i]) < limit)
            continue;
        *index = i;
        return isfinite(x[i]) || i == overflow ? QC_BAD_RANGE : QC_BAD_NONFINITE;
    }
    return QC_BAD_NONE;
}

/* Adds up n elements in LANES sums, which are then added in order, so the result is always the
 * same. */
static void measure(const float *x, const float *y, uint64_t n, uint64_t at, qc_piece_sums *sums)
{
    double xx[LANES] = {0}, ee[LANES] = {0};
    for (uint64_t i = 0; i < n; i++) {
        double v = (double)x[i], e = v - (double)y[i];
        xx[i % LANES] += v * v;
        ee[i % LANES] += e * e;
        if (fabs(e) > sums->max_err) {
            sums->max_err = fabs(e);
            sums->max_index = at + i;
        }
    }
    for (unsigned k = 0; k < LANES; k++) {
        sums->sum_xx += xx[k];
        sums->sum_ee += ee[k];
    }
}

/* Calibrating leaves rows one after the other. */
static qc_status read_calibrated(qc_worker *w, uint64_t first, uint64_t n,
                                 const qc_calibrated_arrays *to, qc_error *err)
{
    const qc_job *j = w->job;
    const uint64_t block = j->by_groups ? j->form.block_elems : n;
    for (uint64_t at = 0; at < n; at += block) {
        qc_calibrated_arrays part = *to;
        uint64_t from = first + at;
        if (j->by_groups) {
            from = qc_awq_element(j->rows, j->form.cols, block, from);
            part.codes = (unsigned char *)to->codes + at / 2;
            part.absmax = to->absmax + at / block;
        }
        QC_TRY(qc_calibrated_read(w->p->calibrated, w->number, from, block, &part, err));
    }
    return QC_OK;
}

/* Takes codes and scales of the step to their places, and measures the error. */
static qc_status calibrated_step(qc_worker *w, const void *source, uint64_t first, uint64_t n,
                                 unsigned char *codes, qc_piece_sums *sums, qc_error *err)
{
    const qc_job *j = w->job;
    const qc_job_work *s = w->state->work;
    const uint64_t each = qc_dtype_bits(j->dtype) / 8;
    const uint64_t scale = first / qc_form_scale_elems(&j->form);
    float x[RUN_ELEMS], y[RUN_ELEMS];
    qc_calibrated_arrays to = {.codes = codes, .absmax = w->scales};
    if (j->form.nested) {
        to.absmax_codes = s->nested_codes + scale;
        to.nested_absmax = s->nested_absmax + scale / QC_NESTED_BLOCK;
    } else {
        to.absmax = s->absmax + scale;
    }
    QC_TRY(read_calibrated(w, first, n, &to, err));
    for (uint64_t at = 0, run; at < n; at += run) {
        /* With gaps a run ends with its row, so that it begins with a byte. */
        const uint64_t left = qc_form_has_gaps(&j->form) ? j->form.cols - at % j->form.cols : n;
        run = qc_min_u64(qc_min_u64(n - at, left), RUN_ELEMS);
        uint64_t overflow = UINT64_MAX, index = 0;
        w->p->ops->cast((const unsigned char *)source + at * each, j->dtype, run, x, QC_DTYPE_F32,
                        &overflow);
        sums->bad = find_bad(j, x, run, overflow, &index);
        if (sums->bad != QC_BAD_NONE) {
            sums->bad_index = at + index;
            return QC_OK;
        }
        qc_weight_decode(w->p->ops, &j->form, codes + qc_form_code_bytes(&j->form, at), to.absmax,
                         at, run, y, QC_DTYPE_F32, &overflow);
        measure(x, y, run, at, sums);
    }
    return QC_OK;
}

/* ---- on the CPU ---- */

static qc_status make_on_cpu(qc_worker *w, const unit_range *q, qc_error *err)
{
    const qc_job *j = w->job;
    for (uint64_t first = q->begin; first < q->end; first += j->step_elems) {
        uint64_t n = qc_min_u64(q->end - first, j->step_elems);
        qc_piece_sums sums = {0};
        QC_TRY(qc_job_read_step(w, first, n, w->source, err));
        unsigned char *codes = w->content + qc_form_code_bytes(&j->form, first - q->begin);
        if (w->state->work->calibrated)
            QC_TRY(calibrated_step(w, w->source, first, n, codes, &sums, err));
        else
            quantize_step(w, w->source, first, n, codes, &sums);
        if (sums.bad != QC_BAD_NONE)
            return refuse_element(w->p, j, first + sums.bad_index, sums.bad, err);
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
static qc_status refuse_slot(qc_worker *w, const unsigned char *source, uint64_t first,
                             uint64_t bad, uint64_t slot_elems, qc_error *err)
{
    const qc_job *j = w->job;
    uint64_t each = qc_dtype_bits(j->dtype) / 8;
    uint64_t skipped = bad - bad % j->step_elems;
    qc_piece_sums sums = {0};
    if (bad < slot_elems)
        quantize_step(w, source + skipped * each, first + skipped,
                      qc_min_u64(slot_elems - skipped, j->step_elems), w->content, &sums);
    if (sums.bad == QC_BAD_NONE || skipped + sums.bad_index != bad)
        QC_FAIL(err, QC_ERR_INTERNAL,
                "cuda:%d (%s): element %" PRIu64 " of tensor '%s' has no code there and one on the "
                "CPU",
                w->gpu->index, w->gpu->name, first + bad, j->name);
    return refuse_element(w->p, j, first + bad, sums.bad, err);
}

/* Copies the results of elements [first, first + n) to their places. */
static void collect_slot(qc_worker *w, const unit_range *q, const qc_gpu_result *r, uint64_t first,
                         uint64_t n)
{
    const qc_job *j = w->job;
    const qc_job_work *s = w->state->work;
    int rows = qc_form_by_rows(&j->form);
    uint64_t each = qc_form_scale_elems(&j->form);
    uint64_t runs = rows ? qc_ceil_div_u64(j->form.cols, QC_CUDA_ROW_RUN) : 1;
    uint64_t scales = qc_ceil_div_u64(n, each);
    const float *absmax = r->absmax;
    if (r->nested_absmax) {
        uint64_t block = first / each;
        memcpy(s->nested_codes + block, r->absmax_codes, (size_t)scales);
        memcpy(s->nested_absmax + block / QC_NESTED_BLOCK, r->nested_absmax,
               (size_t)qc_ceil_div_u64(scales, QC_NESTED_BLOCK) * sizeof *r->nested_absmax);
    } else {
        memcpy(s->absmax + first / each, absmax, (size_t)scales * sizeof *absmax);
    }
    memcpy(w->content + qc_form_code_bytes(&j->form, first - q->begin), r->codes,
           (size_t)qc_form_code_bytes(&j->form, n));
    for (uint64_t at = 0; at < n; at += j->step_elems) {
        uint64_t part = qc_min_u64(n - at, j->step_elems), scale = at / each;
        qc_piece_sums sums = {0};
        if (rows)
            qc_rows_collect(r->errors + scale * runs * 4,
                            j->form.ops->integer ? absmax + scale : NULL, part / j->form.cols,
                            j->form.cols, &sums);
        else if (r->found)
            qc_search_collect(r->found + scale, qc_ceil_div_u64(part, each), j->form.block_elems,
                              &sums);
        else
            qc_blocks_collect(absmax + scale, r->errors + scale * 4, qc_ceil_div_u64(part, each),
                              s->block_errors + first / each + scale, &sums);
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
static qc_status make_on_gpu(qc_worker *w, const unit_range *q, const qc_gpu_form *form,
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
            uint64_t n = qc_min_u64(q->end - next, per_slot);
            for (uint64_t at = 0; at < n; at += w->job->step_elems)
                QC_TRY(qc_job_read_step(w, next + at, qc_min_u64(n - at, w->job->step_elems),
                                        source + at * each, err));
            QC_TRY(gpu_answered(w, gpu->ring_start(w->ring, slot, form, n, err), no_room, err));
            begun++;
            continue;
        }
        qc_gpu_result r;
        unsigned slot = (unsigned)(done % QC_GPU_SLOTS);
        uint64_t n = qc_min_u64(q->end - oldest, per_slot);
        QC_TRY(gpu_answered(w, gpu->ring_finish(w->ring, slot, &r, err), no_room, err));
        if (r.bad != UINT64_MAX)
            return refuse_slot(w, gpu->ring_source(w->ring, slot), oldest, r.bad, n, err);
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
                        "cuda:%d (%s): %s; the CPU quantizes what does not go there", w->gpu->index,
                        w->gpu->name, why->msg);
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
            qc_console_detail(w->p->plan->call, 1,
                              "cuda:%d is short of memory, so its slots have %s", w->gpu->index,
                              qc_text_bytes(bytes, got));
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

/* Makes the unit on the GPU. *done stays 0 where the CPU is to make it from its beginning: where
 * the GPU does not take such a weight, or turns out to have no room to run a kernel. Any other
 * failure ends the conversion, because a GPU that fails once has an error in everything after. */
static qc_status try_gpu(qc_worker *w, const unit_range *q, int *done, qc_error *err)
{
    const qc_job *j = w->job;
    qc_gpu_form form = {.form = j->form,
                        .dtype = j->dtype,
                        .searched = j->scale != QC_SCALE_ABSMAX,
                        .refit = j->scale == QC_SCALE_REFIT};
    form.form.offset = w->state->work->offset;
    qc_error why = {0};
    int no_room = 0;
    *done = 0;
    if (!w->ring || !qc_job_suits_gpu(j) || w->state->work->calibrated)
        return QC_OK;
    uint64_t per_slot = quantizer(w)->ring_elems(w->ring, &form, j->step_elems);
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
    return qc_error_pass(err, &why, st);
}

/* For a unit whose values are all zeros as they were quantized (in LLM.int8, after float16): are
 * they so in the source? */
static qc_status find_lost(qc_worker *w, const unit_range *q, qc_unit *u, qc_error *err)
{
    const qc_job *j = w->job;
    for (uint64_t first = q->begin; first < q->end && !u->lost; first += j->step_elems) {
        const uint64_t n = qc_min_u64(q->end - first, j->step_elems);
        QC_TRY(qc_worker_look_up(w, err));
        QC_TRY(qc_job_read(w, first, n, w->source, err));
        u->lost = !qc_odd_values_are_zero(w->source, n * qc_dtype_bits(j->dtype) / 8, j->dtype);
    }
    u->zeros = !u->lost;
    return QC_OK;
}

qc_status qc_quantized_make(qc_worker *w, qc_unit *u, qc_error *err)
{
    const qc_job *j = w->job;
    unit_range q = {.begin = qc_job_elems(j, u->content_offset),
                    .end = qc_job_elems(j, u->content_offset + u->content_bytes),
                    .total = &w->state->work->sums[u->index - w->p->first_unit[u->tensor]]};
    int done = 0;
    qc_digest_reset(w->hash);
    QC_TRY(try_gpu(w, &q, &done, err));
    if (!done) {
        qc_digest_reset(w->hash);
        QC_TRY(make_on_cpu(w, &q, err));
    }
    if (j->by_groups) {
        QC_TRY(qc_buffer_room(&w->made, u->content_bytes, 1, err));
        memcpy(w->made.data, w->content, u->content_bytes);
        qc_awq_pack(w->made.data, j->rows, j->form.block_elems, u->content_bytes, w->content);
    }
    u->source = qc_digest_finish(w->hash);
    u->zeros = u->lost = 0;
    return q.total->sum_xx == 0 ? find_lost(w, &q, u, err) : QC_OK;
}

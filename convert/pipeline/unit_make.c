/* Makes the content of one unit from the source, step by step.
 *
 * A step is QC_SOURCE_STEP_BYTES of source. It is read into a buffer that stays in the L2 cache,
 * and is hashed and quantized from there. Only the codes travel on to memory. */
#include "base/alloc.h"
#include "base/checked.h"
#include "convert/model/weight_read.h"
#include "convert/pipeline/pipeline_internal.h"
#include "quant/quant_decode.h"

#include <inttypes.h>
#include <string.h>

/* Of a stack, this many rows are turned at a time; each column gives a strip of as many floats. */
#define STRIP_ROWS 256u

/* Reads and decodes the scales of a stored weight that is dequantized, and reads its map, once for
 * each job. */
static qc_status load_scales(qc_worker *w, uint32_t job, qc_error *err)
{
    const qc_checkpoint *m = w->p->plan->model;
    qc_job_work *s = w->p->jobs[job].work;
    const qc_stored_weight *sw = w->p->plan->jobs[job].entry->stored;
    const qc_checkpoint_tensor *absmax = &m->tensors[sw->absmax];
    const uint64_t count = absmax->bytes / (qc_dtype_bits(absmax->dtype) / 8);
    const float *scales = NULL;
    qc_weight_reader r;
    size_t n = 0;
    if (qc_u64_to_size(count, &n))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", absmax->name);
    QC_TRY(qc_realloc_array(&s->absmax, n, sizeof(float), err));
    memcpy(s->map, qc_nf4_code, sizeof s->map);
    if (sw->quant_map != UINT32_MAX)
        QC_TRY(qc_checkpoint_read(m, w->cursor, &m->tensors[sw->quant_map], 0, s->map,
                                  sizeof s->map, err));
    QC_TRY(qc_weight_reader_open(&r, m, err));
    qc_status st = qc_weight_scales(&r, sw, 0, n, &scales, err);
    if (st == QC_OK && n > 0)
        memcpy(s->absmax, scales, n * sizeof(float));
    qc_weight_reader_close(&r);
    return st;
}

/* Allocates and reads what a job needs. The caller holds finish_lock. */
static qc_status fill_work(qc_worker *w, uint32_t job, qc_error *err)
{
    qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    qc_job_state *s = &p->jobs[job];
    QC_TRY(qc_job_need_work(s, err));
    qc_job_work *work = s->work;
    int searched = j->scale != QC_SCALE_ABSMAX, calibrated = qc_job_is_calibrated(p, job);
    uint64_t scales = qc_schemes[j->scheme].by_rows ? j->rows : j->blocks;
    QC_TRY(qc_calloc(&work->sums, qc_unit_count(p, j->outputs[QC_ROLE_TENSOR_MAIN]),
                     sizeof *work->sums, err));
    if (scales > 0 && !(searched && j->nested))
        QC_TRY(qc_realloc_array(&work->absmax, (size_t)scales, sizeof *work->absmax, err));
    if (j->blocks > 0 && !searched && !qc_schemes[j->scheme].form->integer)
        QC_TRY(qc_realloc_array(&work->block_errors, (size_t)j->blocks, sizeof *work->block_errors,
                                err));
    if (j->scheme == QC_SCHEME_DEQUANT)
        QC_TRY(load_scales(w, job, err));
    if (searched && j->nested)
        QC_TRY(qc_search_open(j, !calibrated, work, err));
    if (!calibrated)
        return QC_OK;
    s->outputs = qc_calibrated_result(p->calibrated, job);
    work->offset_ready = 1;
    work->offset = qc_calibrated_offset(p->calibrated, job);
    return QC_OK;
}

/* Prepares what a job needs before its first unit: its buffers, the absmax of a weight that is
 * dequantized, and the offset where it comes from a sample. */
static qc_status open_job(qc_worker *w, uint32_t job, qc_error *err)
{
    qc_pipeline *p = w->p;
    qc_job_state *s = &p->jobs[job];
    qc_status st = QC_OK;
    pthread_mutex_lock(&p->finish_lock);
    if (!s->opened)
        st = fill_work(w, job, err);
    s->opened = st == QC_OK;
    int wants_offset =
        st == QC_OK && qc_job_has_sample(&p->plan->jobs[job]) && !s->work->offset_ready;
    pthread_mutex_unlock(&p->finish_lock);
    return wants_offset ? qc_search_offset(w, job, err) : st;
}

/* --keep leaves a tensor unquantized, but --rest holds for it all the same, so the advice is --rest
 * where the conversion quantizes. */
static qc_status refuse_cast(const qc_pipeline *p, const qc_checkpoint_tensor *t, uint64_t index,
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
    const qc_checkpoint_tensor *t = qc_job_source(p, j);
    qc_dtype to = j->entry->out_dtype;
    uint64_t out_each = qc_dtype_bits(to) / 8;
    uint64_t begin = u->content_offset / out_each, end = begin + u->content_bytes / out_each;
    uint64_t step = qc_job_step_elems(j);
    qc_digest_reset(w->hash);
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step;
        uint64_t overflow = UINT64_MAX;
        QC_TRY(qc_job_read_step(w, job, first, n, w->source, err));
        p->ops->cast(w->source, j->dtype, n, w->content + (first - begin) * out_each, to,
                     &overflow);
        if (overflow != UINT64_MAX)
            return refuse_cast(p, t, first + overflow, to, err);
    }
    u->source = qc_digest_finish(w->hash);
    return QC_OK;
}

/* Reads the codes of elements [first, first + n) of a stored weight to w->source and decodes them.
 * Where there are blocks, `first` begins one. *bytes: of the codes. */
static qc_status decode_stored(qc_worker *w, uint32_t job, uint64_t first, uint64_t n, void *dst,
                               qc_dtype to, size_t *bytes, uint64_t *overflow, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    const qc_job_work *s = p->jobs[job].work;
    const qc_stored_weight *sw = j->entry->stored;
    uint64_t at = qc_scheme_code_bytes(sw->stored_as, first);
    *bytes = (size_t)qc_scheme_code_bytes(sw->stored_as, n);
    QC_TRY(qc_worker_look_up(w, err));
    QC_TRY(qc_checkpoint_read(p->plan->model, w->cursor, qc_job_source(p, j), at, w->source, *bytes,
                              err));
    qc_form form = qc_scheme_form(sw->stored_as, j->cols, (uint32_t)sw->block_elems, 0);
    form.code_map = s->map;
    qc_decode(p, form, w->source, s->absmax, first, n, dst, to, overflow);
    return QC_OK;
}

static qc_status make_dequantized(qc_worker *w, qc_unit *u, uint32_t job, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    qc_dtype to = j->entry->out_dtype;
    uint64_t out_each = qc_dtype_bits(to) / 8;
    uint64_t begin = u->content_offset / out_each, end = begin + u->content_bytes / out_each;
    uint64_t step = QC_SOURCE_STEP_BYTES; /* in elements; a multiple of every block size */
    qc_digest_reset(w->hash);
    for (uint64_t first = begin; first < end; first += step) {
        uint64_t n = end - first < step ? end - first : step, overflow = 0;
        size_t bytes = 0;
        QC_TRY(decode_stored(w, job, first, n, w->content + (first - begin) * out_each, to, &bytes,
                             &overflow, err));
        qc_digest_update(w->hash, w->source, bytes);
        if (overflow != UINT64_MAX)
            QC_FAIL(err, QC_ERR_RANGE,
                    "tensor '%s': element %" PRIu64 " is too large for %s; use --to bf16",
                    qc_job_source(w->p, j)->name, first + overflow, qc_dtype_name(to));
    }
    u->source = qc_digest_finish(w->hash);
    return QC_OK;
}

/* ---- stacks ----
 *
 * This makes one frame of a weight in 16 bit that lies the other way than its codes. This may be a
 * stack of experts, which transformers multiplies with as [experts, in, out] and whose codes are
 * [experts, out, in], or a Conv1D weight, [in, out] from [out, in], which is a stack of one.
 *
 * A frame holds some rows of one expert's transposed matrix, or parts of two experts. For each
 * expert, the stored rows are read in steps, decoded to floats and turned. The codes are read once
 * for every frame of an expert (four for gpt-oss-20b). That costs less than decoding out of order,
 * and reads stay contiguous, so compressed sources are fine, too.
 *
 * The digest of the source is over the frame's share of the stored bytes, as for every other weight
 * (docs/format.md). These are other bytes than the frame is made of. */
static qc_status stack_source(qc_worker *w, const qc_unit *u, qc_digest *out, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[p->plan->outputs[u->tensor].job];
    const qc_checkpoint *m = p->plan->model;
    const qc_checkpoint_tensor *t = &m->tensors[j->source];
    uint64_t at = u->content_offset * j->source_num / j->source_den;
    uint64_t end =
        qc_ceil_div_u64((u->content_offset + u->content_bytes) * j->source_num, j->source_den);
    if (qc_job_source_is_shared(j)) {
        const qc_out_tensor o = qc_plan_tensor(p->plan, u->tensor);
        uint64_t piece = qc_plan_source_piece(p->plan, u->tensor);
        at = u->content_offset / o.piece_bytes * piece;
        end = qc_min_u64(at + piece, t->bytes);
    }
    qc_digest_reset(w->hash);
    while (at < end) {
        size_t n = end - at < QC_SOURCE_STEP_BYTES ? (size_t)(end - at) : QC_SOURCE_STEP_BYTES;
        QC_TRY(qc_worker_look_up(w, err));
        QC_TRY(qc_checkpoint_read(m, w->cursor, t, at, w->source, n, err));
        qc_digest_update(w->hash, w->source, n);
        at += n;
    }
    *out = qc_digest_finish(w->hash);
    return QC_OK;
}

/* Reads elements [first, first + n) of a quantized stack as floats. A block that begins earlier is
 * decoded whole, so *skip elements of out come before the first. */
static qc_status read_stored(qc_worker *w, uint32_t job, uint64_t first, uint64_t n, float *out,
                             uint64_t *skip, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    uint64_t overflow = 0;
    size_t bytes = 0;
    *skip = first % j->entry->stored->block_elems;
    QC_TRY(
        decode_stored(w, job, first - *skip, n + *skip, out, QC_DTYPE_F32, &bytes, &overflow, err));
    if (overflow != UINT64_MAX)
        QC_FAIL(err, QC_ERR_RANGE, "tensor '%s': element %" PRIu64 " is too large for F32", j->name,
                first - *skip + overflow);
    return QC_OK;
}

/* The share of a frame that one expert has: elements [begin, end) of its transposed matrix go to
 * dst. */
typedef struct {
    uint32_t job;
    uint64_t expert, in, out; /* in, out: its dimensions */
    uint64_t begin, end;
    unsigned char *dst;
} expert_share;

static qc_status refuse(const expert_share *x, const qc_job *j, uint64_t row, uint64_t col,
                        qc_error *err)
{
    const char *to = qc_dtype_name(j->entry->out_dtype);
    if (j->entry->stored && j->entry->stored->ndim == 2)
        QC_FAIL(err, QC_ERR_RANGE,
                "tensor '%s': the weight at row %" PRIu64 ", column %" PRIu64
                " is too large for %s; use --to bf16",
                j->name, col, row, to);
    QC_FAIL(err, QC_ERR_RANGE,
            "tensor '%s': the weight of expert %" PRIu64 " at row %" PRIu64 ", column %" PRIu64
            " is too large for %s; use --to bf16",
            j->name, x->expert, row, col, to);
}

static qc_status turn(qc_worker *w, const expert_share *x, const float *values, uint64_t stride,
                      uint64_t first_col, uint64_t first_row, uint64_t rows, qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[x->job];
    qc_dtype to = j->entry->out_dtype;
    uint64_t each = qc_dtype_bits(to) / 8;
    uint64_t last_col = (x->end - 1) / x->out;
    float strip[STRIP_ROWS];
    for (uint64_t i = x->begin / x->out; i <= last_col; i++) {
        uint64_t from = i * x->out + first_row, to_end = from + rows;
        uint64_t a = from < x->begin ? x->begin : from, b = to_end > x->end ? x->end : to_end;
        uint64_t overflow = UINT64_MAX;
        if (a >= b)
            continue;
        for (uint64_t k = a; k < b; k++)
            strip[k - a] = values[(k - from) * stride + i - first_col];
        w->p->ops->cast(strip, QC_DTYPE_F32, b - a, x->dst + (a - x->begin) * each, to, &overflow);
        if (overflow != UINT64_MAX)
            return refuse(x, j, a + overflow - i * x->out, i, err);
    }
    return QC_OK;
}

static qc_status make_share(qc_worker *w, const expert_share *x, float *values, uint64_t room,
                            qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[x->job];
    const qc_checkpoint *m = w->p->plan->model;
    const qc_coded_weight *coded = j->entry->coded;
    uint64_t first_col = 0, cols = x->in;
    if (coded) {
        first_col = x->begin / x->out / QC_MXFP4_BLOCK * QC_MXFP4_BLOCK;
        cols = ((x->end - 1) / x->out / QC_MXFP4_BLOCK + 1) * QC_MXFP4_BLOCK - first_col;
    }
    uint64_t step = room / cols < STRIP_ROWS ? room / cols : STRIP_ROWS;
    for (uint64_t row = 0; row < x->out; row += step) {
        uint64_t rows = x->out - row < step ? x->out - row : step, skip = 0;
        uint64_t flat_row = x->expert * x->out + row;
        QC_TRY(qc_worker_look_up(w, err));
        if (coded)
            QC_TRY(qc_coded_read_columns(m, w->cursor, &m->tensors[j->source], coded, &w->coded,
                                         flat_row, rows, first_col, cols, values, err));
        else
            QC_TRY(read_stored(w, x->job, flat_row * x->in, rows * x->in, values, &skip, err));
        QC_TRY(turn(w, x, values + skip, cols, first_col, row, rows, err));
    }
    return QC_OK;
}

static qc_status make_stack(qc_worker *w, qc_unit *u, qc_error *err)
{
    const qc_pipeline *p = w->p;
    uint32_t job = p->plan->outputs[u->tensor].job;
    const qc_job *j = &p->plan->jobs[job];
    const qc_coded_weight *coded = j->entry->coded;
    unsigned ndim = coded ? coded->ndim : j->entry->stored->ndim;
    const uint64_t *dims = (coded ? coded->dims : j->entry->stored->dims) + ndim - 2;
    uint64_t each = qc_dtype_bits(j->entry->out_dtype) / 8, matrix = dims[0] * dims[1];
    uint64_t begin = u->content_offset / each, end = begin + u->content_bytes / each;
    /* A step has this many floats, and at least one row. The codes of a quantized stack pass
     * through w->source, with a byte or less for each float, and a block may come before them. */
    uint64_t room = QC_SOURCE_STEP_BYTES / sizeof(float), block = 0;
    size_t bytes = 0;
    float *values = NULL;
    if (room < dims[1])
        room = dims[1];
    if (j->entry->stored && !qc_schemes[j->entry->stored->stored_as].by_rows)
        block = j->entry->stored->block_elems;
    if (qc_u64_to_size((room + block) * sizeof(float), &bytes))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j->name);
    QC_TRY(stack_source(w, u, &u->source, err));
    QC_TRY(qc_malloc(&values, bytes, err));
    qc_status st = QC_OK;
    for (uint64_t at = begin; st == QC_OK && at < end;) {
        uint64_t expert = at / matrix, next = (expert + 1) * matrix;
        expert_share x = {.job = job, .expert = expert, .in = dims[1], .out = dims[0]};
        x.begin = at - expert * matrix;
        x.end = (next < end ? next : end) - expert * matrix;
        x.dst = w->content + (at - begin) * each;
        st = make_share(w, &x, values, room, err);
        at = expert * matrix + x.end;
    }
    qc_free(values);
    return st;
}
/* Reads the unit as it is stored to w->content, which is also what becomes of it where nothing is
 * computed. */
static qc_status read_plain(qc_worker *w, const qc_unit *u, const qc_job *j, qc_digest *out,
                            qc_error *err)
{
    QC_TRY(qc_checkpoint_read(w->p->plan->model, w->cursor, qc_job_source(w->p, j),
                              u->content_offset, w->content, u->content_bytes, err));
    *out = qc_digest_bytes(w->content, u->content_bytes);
    return QC_OK;
}

static int is_plain(const qc_job *j)
{
    return j->scheme == QC_SCHEME_KEEP || j->scheme == QC_SCHEME_ABSORBED;
}

qc_status qc_unit_make(qc_worker *w, qc_unit *u, qc_error *err)
{
    const qc_pipeline *p = w->p;
    uint32_t job = p->plan->outputs[u->tensor].job;
    const qc_job *j = &p->plan->jobs[job];
    if (is_plain(j)) {
        QC_TRY(read_plain(w, u, j, &u->source, err));
        u->content = u->source;
        return QC_OK;
    }
    if (j->scheme != QC_SCHEME_CAST)
        QC_TRY(open_job(w, job, err));
    if (qc_scheme_is_quantized(j->scheme))
        QC_TRY(qc_quantized_make(w, u, job, err));
    else if (j->entry->transpose)
        QC_TRY(make_stack(w, u, err));
    else if (j->scheme == QC_SCHEME_CAST)
        QC_TRY(make_cast(w, u, job, err));
    else
        QC_TRY(make_dequantized(w, u, job, err));
    u->content = qc_digest_bytes(w->content, u->content_bytes);
    return qc_job_source_is_shared(j) ? stack_source(w, u, &u->source, err) : QC_OK;
}

/* Hashes the unit's elements step by step, as quantizing and casting do. */
static qc_status hash_elements(qc_worker *w, const qc_unit *u, uint32_t job, qc_digest *out,
                               qc_error *err)
{
    const qc_job *j = &w->p->plan->jobs[job];
    unsigned code_bits = qc_schemes[j->scheme].bits;
    uint64_t bits = code_bits ? code_bits : qc_dtype_bits(j->entry->out_dtype);
    uint64_t begin = u->content_offset * 8 / bits;
    uint64_t end = begin + (uint64_t)u->content_bytes * 8 / bits, step = qc_job_step_elems(j);
    end = end < j->elems ? end : j->elems; /* an odd number of nibbles */
    qc_digest_reset(w->hash);
    for (uint64_t first = begin; first < end; first += step)
        QC_TRY(qc_job_read_step(w, job, first, end - first < step ? end - first : step, w->source,
                                err));
    *out = qc_digest_finish(w->hash);
    return QC_OK;
}

qc_status qc_unit_source(qc_worker *w, const qc_unit *u, qc_digest *out, qc_error *err)
{
    const qc_pipeline *p = w->p;
    uint32_t job = p->plan->outputs[u->tensor].job;
    const qc_job *j = &p->plan->jobs[job];
    if (is_plain(j))
        return read_plain(w, u, j, out, err);
    if (j->scheme == QC_SCHEME_DEQUANT || qc_job_source_is_shared(j) ||
        (j->scheme == QC_SCHEME_CAST && j->entry->transpose))
        return stack_source(w, u, out, err);
    return hash_elements(w, u, job, out, err);
}

/* Makes one frame of a weight in 16 bit that lies the other way than its codes. This may be a stack
 * of experts, which transformers multiplies with as [experts, in, out] and whose codes are
 * [experts, out, in], or a Conv1D weight, [in, out] from [out, in], which is a stack of one.
 *
 * A frame holds some rows of one expert's transposed matrix, or parts of two experts. For each
 * expert, the stored rows are read in steps, decoded to floats and turned. The codes are read once
 * for every frame of an expert (four for gpt-oss-20b). That costs less than decoding out of order,
 * and reads stay contiguous, so compressed sources are fine, too.
 *
 * The digest of the source is over the frame's share of the stored bytes, as for every other weight
 * (docs/format.md). These are other bytes than the frame is made of. */
#include "base/alloc.h"
#include "base/checked.h"
#include "convert/pipeline/pipeline_internal.h"
#include "quant/quant_decode.h"

#include <inttypes.h>
#include <string.h>

/* This many rows are turned at a time; each column gives a strip of as many floats. */
#define STRIP_ROWS 256u

qc_status qc_stack_source(qc_worker *w, const qc_unit *u, qc_digest *out, qc_error *err)
{
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[p->plan->outputs[u->tensor].job];
    const qc_checkpoint *m = p->plan->model;
    const qc_ckpt_tensor *t = &m->tensors[j->source];
    uint64_t at = u->content_offset * j->source_num / j->source_den;
    uint64_t end =
        qc_ceil_div_u64((u->content_offset + u->content_bytes) * j->source_num, j->source_den);
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
    const qc_pipeline *p = w->p;
    const qc_job *j = &p->plan->jobs[job];
    const qc_stored_weight *sw = j->entry->stored;
    const qc_checkpoint *m = p->plan->model;
    const float *scales = p->jobs[job].work->absmax;
    uint64_t block = sw->block_elems, begin = first - first % block, overflow = UINT64_MAX;
    uint64_t count = first + n - begin, per_byte = sw->stored_as == QC_SCHEME_NF4 ? 2 : 1;
    float map[16];
    *skip = first - begin;
    QC_TRY(qc_checkpoint_read(m, w->cursor, &m->tensors[j->source], begin / per_byte, w->source,
                              (size_t)qc_ceil_div_u64(count, per_byte), err));
    if (sw->stored_as == QC_SCHEME_INT8_ROWS) {
        p->ops->int8_rows_dequantize((const int8_t *)w->source, scales + begin / j->cols,
                                     count / j->cols, j->cols, out, QC_DTYPE_F32, &overflow);
    } else if (sw->stored_as == QC_SCHEME_INT8_BLOCKS) {
        p->ops->int8_blocks_dequantize((const int8_t *)w->source, scales + begin / block, count,
                                       (uint32_t)block, out, QC_DTYPE_F32, &overflow);
    } else {
        QC_TRY(
            qc_checkpoint_read(m, w->cursor, &m->tensors[sw->quant_map], 0, map, sizeof map, err));
        p->ops->nf4_dequantize(w->source, scales + begin / block, map, count, (uint32_t)block, out,
                               QC_DTYPE_F32, &overflow);
    }
    if (overflow != UINT64_MAX)
        QC_FAIL(err, QC_ERR_RANGE, "tensor '%s': element %" PRIu64 " is too large for F32", j->name,
                begin + overflow);
    return QC_OK;
}

/* The part of a frame that one expert has: elements [begin, end) of its transposed matrix go to
 * dst. */
typedef struct {
    uint32_t job;
    uint64_t expert, in, out; /* in, out: its dimensions */
    uint64_t begin, end;
    unsigned char *dst;
} expert_part;

static qc_status refuse(const expert_part *x, const qc_job *j, uint64_t row, uint64_t col,
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

static qc_status turn(qc_worker *w, const expert_part *x, const float *values, uint64_t stride,
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

static qc_status make_part(qc_worker *w, const expert_part *x, float *values, uint64_t room,
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

qc_status qc_stack_make(qc_worker *w, qc_unit *u, qc_error *err)
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
    void *v = NULL;
    if (room < dims[1])
        room = dims[1];
    if (j->entry->stored && j->entry->stored->stored_as != QC_SCHEME_INT8_ROWS)
        block = j->entry->stored->block_elems;
    if (qc_u64_to_size((room + block) * sizeof(float), &bytes))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", j->name);
    QC_TRY(qc_stack_source(w, u, &u->source, err));
    QC_TRY(qc_malloc(&v, bytes, err));
    qc_status st = QC_OK;
    for (uint64_t at = begin; st == QC_OK && at < end;) {
        uint64_t expert = at / matrix, next = (expert + 1) * matrix;
        expert_part x = {.job = job, .expert = expert, .in = dims[1], .out = dims[0]};
        x.begin = at - expert * matrix;
        x.end = (next < end ? next : end) - expert * matrix;
        x.dst = w->content + (at - begin) * each;
        st = make_part(w, &x, v, room, err);
        at = expert * matrix + x.end;
    }
    qc_free(v);
    return st;
}

#include "convert/forward/experts_stack.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/coded_read.h"
#include "convert/term/size_text.h"
#include "quant/quant_form.h"

#include <inttypes.h>
#include <string.h>

#define STEP_ELEMS ((uint64_t)1 << 20) /* elements that are read at a time */
#define TILE       32u                 /* rows and columns that are turned together */

/* ---- finding ---- */

static qc_status differs(const qc_forward_finder *f, const char *name, const uint64_t *dims,
                         unsigned ndim, const uint64_t *want, qc_error *err)
{
    char found[QC_SHAPE_TEXT_BYTES], expected[QC_SHAPE_TEXT_BYTES];
    QC_FAIL(err, QC_ERR_SHAPE, "%s: tensor '%s' is %s, and config.json makes it %s", f->c->path,
            name, qc_text_shape(found, dims, ndim), qc_text_shape(expected, want, 3));
}

/* An expert must have whole scales of its own. */
static qc_status check_scales(const qc_forward_finder *f, const qc_expert_stack *t,
                              const char *name, qc_error *err)
{
    uint64_t block = qc_stored_block(t->stored);
    if (block == 0 || (t->rows * t->cols % block == 0 && block % 2 == 0))
        return QC_OK;
    QC_FAIL(err, QC_ERR_UNSUPPORTED,
            "%s: tensor '%s' has scales that two experts share, and such a stack is not computed",
            f->c->path, name);
}

qc_status qc_expert_stack_find(qc_expert_stack *out, const qc_forward_finder *f, const char *name,
                               uint64_t experts, uint64_t rows, uint64_t cols, qc_error *err)
{
    const uint64_t want[3] = {experts, rows, cols}, turned[3] = {experts, cols, rows};
    const uint64_t bias[2] = {experts, rows};
    const char *bias_name = NULL;
    uint32_t index = qc_coded_index(&f->coded, f->c, name);
    if (index == QC_NO_TENSOR)
        return qc_forward_missing(f, name, err);
    *out = (qc_expert_stack){.tensor = index,
                             .stored = f->stored.weights[index],
                             .coded = f->coded.weights[index],
                             .experts = experts,
                             .rows = rows,
                             .cols = cols};
    uint64_t bytes = f->c->tensors[index].bytes;
    if (out->stored) {
        if (out->stored->ndim != 3 || memcmp(out->stored->dims, want, sizeof want) != 0)
            return differs(f, name, out->stored->dims, out->stored->ndim, want, err);
        QC_TRY(check_scales(f, out, name, err));
        bytes = qc_stored_bytes(f->c, index, out->stored);
    } else if (out->coded) {
        if (out->coded->ndim != 3 || memcmp(out->coded->dims, want, sizeof want) != 0)
            return differs(f, name, out->coded->dims, out->coded->ndim, want, err);
    } else {
        QC_TRY(qc_forward_find_plain(f, name, turned, 3, &out->tensor, err));
    }
    out->read_bytes = bytes / experts;
    out->memory_bytes =
        out->coded ? qc_sat_mul(qc_sat_mul(rows, cols), sizeof(float)) : out->read_bytes;
    QC_TRY(qc_arena_printf(f->arena, &bias_name, err, "%s_bias", name));
    return qc_forward_find_plain(f, bias_name, bias, 2, &out->bias, err);
}

/* ---- reading ---- */

/* Reads bytes [first, first + n) of a tensor into *out, which is allocated. */
static qc_status read_range(void *out, const qc_forward_source *s, uint32_t tensor, uint64_t first,
                            uint64_t n, qc_error *err)
{
    const qc_checkpoint_tensor *t = &s->checkpoint->tensors[tensor];
    unsigned char *bytes = NULL;
    size_t size = 0;
    if (qc_u64_to_size(n, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", t->name);
    QC_TRY(qc_malloc(&bytes, size, err));
    qc_status st = QC_OK;
    for (uint64_t at = 0; st == QC_OK && at < n; at += STEP_ELEMS) {
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = qc_checkpoint_read(s->checkpoint, s->cursor, t, first + at, bytes + at,
                                    (size_t)qc_min_u64(n - at, STEP_ELEMS), err);
    }
    memcpy(out, &bytes, sizeof bytes);
    return st;
}

static qc_status read_floats(float **out, const qc_forward_source *s, uint32_t tensor,
                             uint64_t first, uint64_t n, qc_error *err)
{
    const qc_dtype dtype = s->checkpoint->tensors[tensor].dtype;
    uint64_t overflow = 0, bytes = qc_dtype_bits(dtype) / 8;
    void *raw = NULL;
    *out = NULL;
    qc_status st = read_range(&raw, s, tensor, first * bytes, n * bytes, err);
    if (st == QC_OK)
        st = qc_malloc(out, (size_t)n * sizeof **out, err);
    if (st == QC_OK)
        s->ops->cast(raw, dtype, n, *out, QC_DTYPE_F32, &overflow);
    qc_free(raw);
    return st;
}

static qc_status read_coded(qc_forward_matrix *out, const qc_forward_source *s,
                            const qc_expert_stack *t, uint64_t expert, qc_error *err)
{
    const qc_checkpoint_tensor *tensor = &s->checkpoint->tensors[t->tensor];
    qc_coded_scratch scratch = {0};
    uint64_t n = t->rows * t->cols;
    size_t size = 0;
    if (qc_u64_to_size(t->memory_bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", tensor->name);
    QC_TRY(qc_malloc(&out->owned, size, err));
    qc_status st = QC_OK;
    for (uint64_t at = 0; st == QC_OK && at < n; at += STEP_ELEMS) {
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = qc_coded_read(s->checkpoint, s->cursor, s->ops, tensor, t->coded, &scratch,
                               expert * n + at, qc_min_u64(n - at, STEP_ELEMS),
                               (float *)out->owned + at, err);
    }
    qc_coded_scratch_deinit(&scratch);
    out->dtype = QC_DTYPE_F32;
    out->dense = out->owned;
    return st;
}

/* from [cols, rows] -> to [rows, cols], elements of 2 or 4 bytes */
static void turn(const unsigned char *from, unsigned char *to, uint64_t rows, uint64_t cols,
                 unsigned bytes)
{
    for (uint64_t r0 = 0; r0 < rows; r0 += TILE)
        for (uint64_t c0 = 0; c0 < cols; c0 += TILE)
            for (uint64_t r = r0; r < qc_min_u64(r0 + TILE, rows); r++)
                for (uint64_t c = c0; c < qc_min_u64(c0 + TILE, cols); c++)
                    memcpy(to + (r * cols + c) * bytes, from + (c * rows + r) * bytes, bytes);
}

static qc_status read_turned(qc_forward_matrix *out, const qc_forward_source *s,
                             const qc_expert_stack *t, uint64_t expert, qc_error *err)
{
    void *raw = NULL;
    out->dtype = s->checkpoint->tensors[t->tensor].dtype;
    qc_status st = read_range(&raw, s, t->tensor, expert * t->read_bytes, t->read_bytes, err);
    if (st == QC_OK)
        st = qc_malloc(&out->owned, (size_t)t->read_bytes, err);
    if (st == QC_OK)
        turn(raw, out->owned, t->rows, t->cols, qc_dtype_bits(out->dtype) / 8);
    out->dense = out->owned;
    qc_free(raw);
    return st;
}

/* Reads scales [first, first + n) as a reader has them. */
static qc_status read_scales(float **out, const qc_forward_source *s, const qc_stored_weight *w,
                             uint64_t first, uint64_t n, qc_error *err)
{
    if (w->nested_absmax == QC_NO_TENSOR)
        return read_floats(out, s, w->absmax, first, n, err);
    uint8_t *codes = NULL;
    float *groups = NULL, *map = NULL;
    const uint64_t group = w->nested_block_elems;
    const uint64_t from = first / group, to = qc_ceil_div_u64(first + n, group);
    qc_status st = read_range(&codes, s, w->absmax, first, n, err);
    if (st == QC_OK)
        st = read_floats(&groups, s, w->nested_absmax, from, to - from, err);
    if (st == QC_OK)
        st = read_floats(&map, s, w->nested_map, 0, 256, err);
    if (st == QC_OK)
        st = qc_malloc(out, (size_t)n * sizeof **out, err);
    for (uint64_t i = 0; st == QC_OK && i < n; i++) {
        float scale = map[codes[i]] * groups[(first + i) / group - from];
        (*out)[i] = scale + w->nested_offset;
    }
    qc_free(codes);
    qc_free(groups);
    qc_free(map);
    return st;
}

static qc_status read_stored(qc_forward_matrix *out, const qc_forward_source *s,
                             const qc_expert_stack *t, uint64_t expert, qc_error *err)
{
    const qc_stored_weight *w = t->stored;
    qc_stored_arrays *a = &out->arrays;
    const uint64_t n = t->rows * t->cols;
    float *scales = NULL;
    a->w.form = qc_scheme_form(w->stored_as, t->cols, w->block_elems, 0);
    a->w.rows = t->rows;
    const uint64_t count = qc_form_scales(&a->w.form, n);
    a->codes_bytes = qc_form_code_bytes(&a->w.form, n);
    QC_TRY(read_range(&a->codes, s, t->tensor, expert * a->codes_bytes, a->codes_bytes, err));
    qc_status st = read_scales(&scales, s, w, expert * count, count, err);
    a->w.codes = a->codes;
    a->w.absmax = scales;
    a->scales = scales;
    QC_TRY(st);
    if (w->quant_map != QC_NO_TENSOR) {
        QC_TRY(qc_checkpoint_read(s->checkpoint, s->cursor, &s->checkpoint->tensors[w->quant_map],
                                  0, a->maps, 16 * sizeof *a->maps, err));
        a->w.form.code_map = a->maps;
    }
    out->quantized = &a->w;
    return qc_weights_check(&a->w, a->codes_bytes, count, 0, err);
}

qc_status qc_expert_stack_read(qc_forward_matrix *out, const qc_forward_source *s,
                               const qc_expert_stack *stack, uint64_t expert, qc_error *err)
{
    float *bias = NULL;
    memset(out, 0, sizeof *out);
    out->rows = stack->rows;
    out->cols = stack->cols;
    QC_TRY(stack->stored  ? read_stored(out, s, stack, expert, err)
           : stack->coded ? read_coded(out, s, stack, expert, err)
                          : read_turned(out, s, stack, expert, err));
    qc_status st = read_floats(&bias, s, stack->bias, expert * stack->rows, stack->rows, err);
    out->bias = out->owned_bias = bias;
    QC_TRY(st);
    qc_progress_add(s->progress, stack->read_bytes);
    return QC_OK;
}

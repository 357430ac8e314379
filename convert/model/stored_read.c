#include "convert/model/stored_read.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/recipe_stored.h"
#include "quant/matmul_ops.h"
#include "quant/quant_half.h"

#include <string.h>

/* Even a slow disk reads this much within the time in which Ctrl-C has to be answered. */
#define READ_BYTES ((uint64_t)16 << 20)

qc_status qc_tensor_read(const qc_checkpoint *c, const qc_checkpoint_tensor *t,
                         qc_st_cursor *cursor, void **out, qc_error *err)
{
    size_t size = 0;
    if (qc_u64_to_size(t->bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "tensor '%s' is too large", t->name);
    QC_TRY(qc_malloc(out, size, err));
    for (uint64_t at = 0; at < t->bytes; at += READ_BYTES) {
        uint64_t n = t->bytes - at < READ_BYTES ? t->bytes - at : READ_BYTES;
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_checkpoint_read(c, cursor, t, at, (unsigned char *)*out + at, (size_t)n, err));
    }
    return QC_OK;
}

static qc_status read_whole(const qc_checkpoint *c, uint32_t tensor, qc_st_cursor *cursor,
                            void **out, uint64_t *bytes, qc_error *err)
{
    *bytes = c->tensors[tensor].bytes;
    return qc_tensor_read(c, &c->tensors[tensor], cursor, out, err);
}

static uint64_t part_bytes(const qc_checkpoint *c, uint32_t tensor)
{
    return tensor == QC_NO_TENSOR ? 0 : c->tensors[tensor].bytes;
}

uint64_t qc_stored_bytes(const qc_checkpoint *c, uint32_t tensor, const qc_stored_weight *stored)
{
    return c->tensors[tensor].bytes + part_bytes(c, stored->absmax) +
           part_bytes(c, stored->nested_absmax);
}

/* Makes floats of scales that are stored in 16 bits, as those of integers are. */
static qc_status widen_scales(qc_stored_arrays *out, qc_dtype dtype, qc_error *err)
{
    void *floats = NULL;
    uint64_t n = out->scales_bytes / sizeof(uint16_t);
    if (dtype == QC_DTYPE_F32)
        return QC_OK;
    QC_TRY(qc_malloc(&floats, (size_t)n * sizeof(float), err));
    for (uint64_t i = 0; i < n; i++)
        ((float *)floats)[i] = (float)qc_f64_of_half(dtype, ((const uint16_t *)out->scales)[i]);
    qc_free(out->scales);
    out->scales = floats;
    out->scales_bytes = n * sizeof(float);
    return QC_OK;
}

qc_status qc_stored_read(qc_stored_arrays *out, const qc_checkpoint *c, uint32_t tensor,
                         const qc_stored_weight *s, qc_st_cursor *cursor, qc_error *err)
{
    const char *name = c->tensors[tensor].name;
    qc_weights *w = &out->w;
    uint64_t nested = 0, scales = 0;
    memset(out, 0, sizeof *out);
    w->form = qc_scheme_form(s->stored_as, s->ndim ? s->dims[s->ndim - 1] : 1, s->block_elems,
                             s->nested_absmax != QC_NO_TENSOR);
    w->rows = 1;
    for (unsigned d = 0; d + 1 < s->ndim; d++)
        if (qc_mul_u64(w->rows, s->dims[d], &w->rows))
            QC_FAIL(err, QC_ERR_SHAPE, "tensor '%s' is too large", name);
    QC_TRY(read_whole(c, tensor, cursor, &out->codes, &out->codes_bytes, err));
    QC_TRY(read_whole(c, s->absmax, cursor, &out->scales, &out->scales_bytes, err));
    w->codes = out->codes;
    if (s->nested_absmax != QC_NO_TENSOR) {
        QC_TRY(read_whole(c, s->nested_absmax, cursor, &out->nested, &out->nested_bytes, err));
        QC_TRY(qc_checkpoint_read(c, cursor, &c->tensors[s->nested_map], 0, out->maps + 16,
                                  256 * sizeof *out->maps, err));
        w->absmax_codes = out->scales;
        w->nested_absmax = out->nested;
        w->nested_map = out->maps + 16;
        w->form.offset = s->nested_offset;
        w->nested_block =
            s->nested_block_elems > UINT32_MAX ? UINT32_MAX : (uint32_t)s->nested_block_elems;
        scales = out->scales_bytes;
        nested = out->nested_bytes / sizeof(float);
    } else {
        QC_TRY(widen_scales(out, c->tensors[s->absmax].dtype, err));
        w->absmax = out->scales;
        scales = out->scales_bytes / sizeof(float);
    }
    if (s->quant_map != QC_NO_TENSOR) {
        QC_TRY(qc_checkpoint_read(c, cursor, &c->tensors[s->quant_map], 0, out->maps,
                                  16 * sizeof *out->maps, err));
        w->form.code_map = out->maps;
    }
    qc_status st = qc_weights_check(w, out->codes_bytes, scales, nested, err);
    if (st != QC_OK)
        qc_error_prefix(err, "tensor '%s'", name);
    return st;
}

void qc_stored_deinit(qc_stored_arrays *a)
{
    qc_free(a->codes);
    qc_free(a->scales);
    qc_free(a->nested);
    memset(a, 0, sizeof *a);
}

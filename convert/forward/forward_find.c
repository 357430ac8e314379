#include "convert/forward/forward_find.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/family/family.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <string.h>

static int is_float(qc_dtype t)
{
    return t == QC_DTYPE_F32 || t == QC_DTYPE_F16 || t == QC_DTYPE_BF16;
}

qc_status qc_forward_missing(const qc_forward_finder *f, const char *name, qc_error *err)
{
    const qc_json_node *q = qc_json_get(qc_json_root(f->c->config), "quantization_config");
    const char *method = qc_json_string_or(qc_json_get(q, "quant_method"), NULL);
    QC_FAIL(err, method ? QC_ERR_UNSUPPORTED : QC_ERR_INPUT,
            "%s: tensor '%s', which config.json asks for, is not there%s%.60s%s", f->c->path, name,
            method ? " (quantization_config says '" : "", method ? method : "", method ? "')" : "");
}

static qc_status shape_differs(const qc_forward_finder *f, const char *name, const uint64_t *dims,
                               unsigned ndim, const uint64_t *expected, unsigned expected_ndim,
                               qc_error *err)
{
    char found[QC_SHAPE_TEXT_BYTES], want[QC_SHAPE_TEXT_BYTES];
    QC_FAIL(err, QC_ERR_SHAPE, "%s: tensor '%s' is %s, and config.json makes it %s", f->c->path,
            name, qc_text_shape(found, dims, ndim), qc_text_shape(want, expected, expected_ndim));
}

static qc_status type_unsupported(const qc_forward_finder *f, const qc_checkpoint_tensor *t,
                                  qc_error *err)
{
    QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: tensor '%s' is %s; expected F32, F16 or BF16", f->c->path,
            t->name, qc_dtype_name(t->dtype));
}

qc_status qc_forward_find_plain(const qc_forward_finder *f, const char *name, const uint64_t *dims,
                                unsigned ndim, uint32_t *out, qc_error *err)
{
    const qc_checkpoint_tensor *t = qc_checkpoint_find(f->c, name);
    if (!t)
        return qc_forward_missing(f, name, err);
    *out = (uint32_t)(t - f->c->tensors);
    if (f->stored.weights[*out])
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: tensor '%s' is quantized; expected 16 or 32 bits",
                f->c->path, name);
    int same = t->ndim == ndim;
    for (unsigned i = 0; same && i < ndim; i++)
        same = t->dims[i] == dims[i];
    if (!same)
        return shape_differs(f, name, t->dims, t->ndim, dims, ndim, err);
    return is_float(t->dtype) ? QC_OK : type_unsupported(f, t, err);
}

qc_status qc_forward_find_vector(const qc_forward_finder *f, const char *name, uint64_t n,
                                 uint32_t *out, qc_error *err)
{
    return qc_forward_find_plain(f, name, &n, 1, out, err);
}

qc_status qc_forward_find_linear(const qc_forward_finder *f, const char *module, uint64_t rows,
                                 uint64_t cols, int bias, qc_forward_linear *out, qc_error *err)
{
    const char *name = NULL;
    const uint64_t want[2] = {rows, cols};
    QC_TRY(qc_arena_printf(f->arena, &name, err, "%s.weight", module));
    uint32_t index = qc_coded_index(&f->coded, f->c, name);
    if (index == QC_NO_TENSOR)
        return qc_forward_missing(f, name, err);
    const qc_checkpoint_tensor *t = &f->c->tensors[index];
    *out = (qc_forward_linear){.bias = QC_NO_TENSOR, .rows = rows, .cols = cols};
    out->tensor = (uint32_t)(t - f->c->tensors);
    out->stored = f->stored.weights[out->tensor];
    out->coded = f->coded.weights[out->tensor];
    if (!out->stored && out->coded)
        QC_TRY(qc_stored_of_integers(&out->stored, f->arena, f->c, out->tensor, out->coded, err));
    out->read_bytes = out->memory_bytes = t->bytes;
    if (out->stored) {
        if (out->stored->ndim != 2 || out->stored->dims[0] != rows || out->stored->dims[1] != cols)
            return shape_differs(f, name, out->stored->dims, out->stored->ndim, want, 2, err);
        out->read_bytes = out->memory_bytes = qc_stored_bytes(f->c, out->tensor, out->stored);
    } else if (out->coded) {
        if (out->coded->ndim != 2 || out->coded->dims[0] != rows || out->coded->dims[1] != cols)
            return shape_differs(f, name, out->coded->dims, out->coded->ndim, want, 2, err);
        out->memory_bytes = qc_sat_mul(qc_sat_mul(rows, cols), sizeof(float));
    } else {
        const uint64_t turned[2] = {cols, rows};
        out->turned = f->turned;
        QC_TRY(qc_forward_find_plain(f, name, f->turned ? turned : want, 2, &out->tensor, err));
        out->memory_bytes = qc_sat_mul(t->bytes, f->turned ? 2 : 1);
    }
    if (!bias)
        return QC_OK;
    QC_TRY(qc_arena_printf(f->arena, &name, err, "%s.bias", module));
    return qc_forward_find_vector(f, name, rows, &out->bias, err);
}

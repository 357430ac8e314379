#include "convert/known/tensor_maker.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define FIRST_CAPACITY   512u
#define NAME_SHOWN_BYTES 80

void qc_maker_prefix(qc_tensor_maker *m, const char *base, uint64_t number)
{
    if (number == UINT64_MAX)
        (void)snprintf(m->prefix, sizeof m->prefix, "%s", base);
    else
        (void)snprintf(m->prefix, sizeof m->prefix, "%s%" PRIu64 ".", base, number);
}

static qc_status add(qc_tensor_maker *m, const char *module, const char *leaf, qc_dtype dtype,
                     unsigned ndim, const uint64_t *dims, qc_error *err)
{
    qc_model_tensors *o = m->out;
    if (o->count == QC_MODEL_MAX_TENSORS)
        QC_FAIL(err, QC_ERR_INPUT,
                "config.json: expected a model of at most %u tensors, found more: %" PRIu32
                " layers with %" PRIu64 " experts each",
                QC_MODEL_MAX_TENSORS, m->g->layer_count, m->g->experts);
    if (o->count == m->capacity) {
        const qc_checkpoint_tensor *old = o->rows;
        size_t capacity = m->capacity ? 2 * m->capacity : FIRST_CAPACITY;
        QC_TRY(qc_arena_array(m->arena, &o->rows, capacity, err));
        if (o->count)
            memcpy(o->rows, old, o->count * sizeof *o->rows);
        m->capacity = capacity;
    }
    qc_checkpoint_tensor *t = &o->rows[o->count];
    memset(t, 0, sizeof *t);
    QC_TRY(qc_arena_printf(m->arena, &t->name, err, "%s%s%s", m->prefix, module, leaf));
    t->dtype = dtype;
    t->ndim = ndim;
    for (unsigned i = 0; i < ndim; i++) {
        t->dims[i] = dims[i];
        if (dims[i] == 0)
            QC_FAIL(err, QC_ERR_INPUT, "config.json: '%.*s' would have a dimension of 0",
                    NAME_SHOWN_BYTES, t->name);
    }
    o->count++;
    return QC_OK;
}

qc_status qc_maker_add(qc_tensor_maker *m, const char *name, qc_dtype dtype, unsigned ndim,
                       const uint64_t *dims, qc_error *err)
{
    return add(m, name, "", dtype, ndim, dims, err);
}

qc_status qc_maker_vector(qc_tensor_maker *m, const char *name, uint64_t n, qc_error *err)
{
    return add(m, name, "", m->dtype, 1, &n, err);
}

qc_status qc_maker_matrix(qc_tensor_maker *m, const char *name, uint64_t rows, uint64_t cols,
                          qc_error *err)
{
    return add(m, name, "", m->dtype, 2, (uint64_t[]){rows, cols}, err);
}

qc_status qc_maker_linear(qc_tensor_maker *m, const char *module, uint64_t out, uint64_t in,
                          int bias, qc_error *err)
{
    qc_dtype dtype = m->fp8_block ? QC_DTYPE_F8_E4M3 : m->dtype;
    QC_TRY(add(m, module, ".weight", dtype, 2, (uint64_t[]){out, in}, err));
    if (m->fp8_block) {
        uint64_t rows = (out + m->fp8_block - 1) / m->fp8_block;
        uint64_t cols = (in + m->fp8_block - 1) / m->fp8_block;
        QC_TRY(add(m, module, ".weight_scale_inv", QC_DTYPE_F32, 2, (uint64_t[]){rows, cols}, err));
    }
    return bias ? add(m, module, ".bias", m->dtype, 1, &out, err) : QC_OK;
}

qc_status qc_maker_layer_norm(qc_tensor_maker *m, const char *module, uint64_t n, qc_error *err)
{
    QC_TRY(add(m, module, ".weight", m->dtype, 1, &n, err));
    return add(m, module, ".bias", m->dtype, 1, &n, err);
}

qc_status qc_maker_need(const qc_tensor_maker *m, const qc_json_node *object, const char *name,
                        uint64_t max, uint64_t *out, qc_error *err)
{
    (void)m;
    const qc_json_node *n = qc_config_field(object, name);
    QC_TRY(qc_config_count(out, n, max, 0, err));
    if (*out == 0)
        QC_FAIL(err, QC_ERR_INPUT, "config.json: %s is %s, so the tensors cannot be worked out",
                name, n ? "0" : "missing");
    return QC_OK;
}

int qc_maker_is(const qc_tensor_maker *m, const char *types)
{
    return qc_config_word_in(m->config.text_type, types);
}

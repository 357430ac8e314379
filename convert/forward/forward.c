#include "convert/forward/forward.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/family/family.h"
#include "convert/forward/experts.h"
#include "convert/forward/forward_cpu.h"
#include "convert/model/recipe_stored.h"

#include <inttypes.h>
#include <string.h>

struct qc_forward {
    qc_arena arena;
    const qc_checkpoint *checkpoint;
    qc_forward_tools tools;
    qc_forward_tensors tensors;
    qc_forward_source source;
    qc_forward_matrix head; /* read when logits are first asked for */
    int has_head;
};

/* config.json may call a head tied although the file has one that differs from the embedding.
 * Versions of transformers differ in what they do then. */
static qc_status check_tied(const qc_forward *m, const char *dir, qc_error *err)
{
    const qc_checkpoint *c = m->checkpoint;
    const qc_checkpoint_tensor *head =
        m->tensors.own_head == QC_NO_TENSOR ? NULL : &c->tensors[m->tensors.own_head];
    const qc_checkpoint_tensor *embedding = &c->tensors[m->tensors.embedding];
    void *a = NULL, *b = NULL;
    if (!m->tensors.shape.config.tied || !head || head == embedding)
        return QC_OK;
    int same = head->dtype == embedding->dtype && head->bytes == embedding->bytes;
    qc_status st = QC_OK;
    if (same)
        st = qc_tensor_read(c, head, m->source.cursor, &a, err);
    if (same && st == QC_OK)
        st = qc_tensor_read(c, embedding, m->source.cursor, &b, err);
    if (same && st == QC_OK)
        same = memcmp(a, b, (size_t)head->bytes) == 0;
    qc_free(a);
    qc_free(b);
    if (st == QC_OK && !same)
        st = QC_ERROR(
            err, QC_ERR_UNSUPPORTED,
            "%s: config.json has tie_word_embeddings, but %s differs from %s, so it is not "
            "known which of the two is meant",
            dir, head->name, embedding->name);
    return st;
}

/* ---- opening ---- */

qc_status qc_forward_open(qc_forward **out, const char *dir, const qc_checkpoint *c,
                          const qc_forward_tools *tools, qc_error *err)
{
    qc_forward *m = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&m, 1, sizeof *m, err));
    qc_arena_init(&m->arena);
    m->checkpoint = c;
    m->tools = *tools;
    if (m->tools.threads == 0)
        m->tools.threads = 1;
    m->source = (qc_forward_source){
        .checkpoint = c, .ops = qc_quant_ops_for(tools->isa), .progress = tools->progress};
    qc_status st = qc_st_cursor_create(&m->source.cursor, err);
    if (st == QC_OK)
        st = qc_forward_tensors_find(&m->tensors, &m->arena, c, tools->images, err);
    if (st == QC_OK)
        st = check_tied(m, dir, err);
    if (st == QC_OK)
        *out = m;
    else
        qc_forward_close(m);
    return st;
}

void qc_forward_close(qc_forward *m)
{
    if (!m)
        return;
    qc_forward_matrix_deinit(&m->head);
    qc_st_cursor_destroy(m->source.cursor);
    qc_arena_deinit(&m->arena);
    qc_free(m);
}

const qc_forward_config *qc_forward_config_of(const qc_forward *m)
{
    return &m->tensors.shape.config;
}

uint64_t qc_forward_memory(const qc_forward *m, uint64_t tokens, uint64_t longest)
{
    uint64_t layer = 0;
    for (uint64_t i = 0; i < m->tensors.shape.config.layers; i++)
        if (m->tensors.layers[i].memory_bytes > layer)
            layer = m->tensors.layers[i].memory_bytes;
    layer = qc_max_u64(layer, qc_forward_embed_bytes(&m->tensors, longest));
    if (m->tensors.shape.experts.names)
        layer = qc_sat_add(layer, qc_experts_bytes(&m->tensors.shape, m->tools.threads, tokens, 1));
    return qc_sat_add(layer,
                      qc_forward_cpu_bytes(&m->tensors.shape, m->tools.threads, tokens, longest));
}

uint64_t qc_forward_head_memory(const qc_forward *m)
{
    return m->tensors.head.memory_bytes;
}

uint64_t qc_forward_image_memory(const qc_forward *m)
{
    return qc_cross_bytes(&m->tensors.shape, 0);
}

/* ---- hidden states ---- */

qc_status qc_forward_check(const qc_forward *m, const qc_forward_batch *b, qc_error *err)
{
    uint64_t sum = 0, at = 0;
    for (uint64_t w = 0; w < b->count; w++)
        if (qc_add_u64(sum, b->lengths[w], &sum))
            QC_FAIL(err, QC_ERR_INPUT, "the windows have too many tokens");
    if (sum != b->tokens)
        QC_FAIL(err, QC_ERR_INPUT, "the windows have %" PRIu64 " tokens; expected %" PRIu64, sum,
                b->tokens);
    for (uint64_t w = 0; w < b->count; w++)
        for (uint64_t i = 0; i < b->lengths[w]; i++, at++)
            if (b->ids[at] >= m->tensors.shape.config.ids)
                QC_FAIL(err, QC_ERR_INPUT,
                        "token %" PRIu64 " of window %" PRIu64 " is %" PRIu32
                        ", and the model's vocabulary has only ids below %" PRIu64,
                        i, w, b->ids[at], m->tensors.shape.config.ids);
    return m->tensors.shape.cross
               ? qc_cross_tokens(&sum, &m->tensors.shape, m->tools.images, b, err)
               : QC_OK;
}

static void read_soon(const qc_forward *m, uint64_t layer)
{
    const qc_checkpoint *c = m->checkpoint;
    if (layer == m->tensors.shape.config.layers)
        return;
    for (int i = 0; i < QC_LAYER_ALL_MATRICES; i++) {
        const uint32_t tensor = m->tensors.layers[layer].linear[i].tensor;
        if (tensor != QC_NO_TENSOR)
            qc_checkpoint_hint_read_soon(c, &c->tensors[tensor], 0, c->tensors[tensor].bytes);
    }
}

static qc_status run_layer(qc_forward *m, qc_forward_cpu *cpu, qc_experts_cpu *experts, uint64_t i,
                           float *hidden, qc_error *err)
{
    qc_forward_weights w = {0};
    const qc_forward_layer *l = &m->tensors.layers[i];
    qc_status st = qc_forward_weights_read(&w, &m->source, l, err);
    if (st == QC_OK) {
        if (!l->experts)
            read_soon(m, i + 1); /* it is read from the disk while this layer is computed */
        st = qc_forward_cpu_layer(cpu, &w, i, hidden, err);
    }
    if (st == QC_OK && l->experts)
        st = qc_experts_run(experts, &m->source, l->experts, w.vectors[QC_LAYER_POST_NORM], hidden,
                            err);
    if (st == QC_ERR_NONFINITE)
        qc_error_prefix(err, "%s: behind layer %" PRIu64, m->checkpoint->path,
                        qc_layer_number(&m->tensors.shape, i));
    qc_forward_weights_deinit(&w);
    return st;
}

qc_status qc_forward_hidden(qc_forward *m, const qc_forward_batch *batch, float *out, qc_error *err)
{
    qc_forward_cpu cpu = {0};
    qc_experts_cpu experts = {0};
    float *norm = NULL;
    QC_TRY(qc_forward_check(m, batch, err));
    if (batch->tokens == 0)
        return QC_OK;
    qc_status st = qc_forward_cpu_create(&cpu, &m->tensors.shape, &m->tools, batch, err);
    if (st == QC_OK && m->tensors.shape.experts.names)
        st = qc_experts_create(&experts, &m->tensors.shape, &m->tools, batch->tokens, NULL, err);
    if (st == QC_OK)
        st = qc_forward_embed(&m->source, &m->tensors, batch, out, err);
    for (uint64_t i = 0; st == QC_OK && i < m->tensors.shape.config.layers; i++)
        st = run_layer(m, &cpu, &experts, i, out, err);
    if (st == QC_OK)
        st = qc_forward_last_norm_read(&norm, &m->source, &m->tensors, err);
    if (st == QC_OK)
        st = qc_forward_cpu_norm(&cpu, norm, out, err);
    qc_free(norm);
    qc_experts_deinit(&experts);
    qc_forward_cpu_deinit(&cpu);
    return st;
}

/* ---- logits ---- */

qc_status qc_forward_logits(qc_forward *m, const float *hidden, uint64_t n, float *out,
                            qc_error *err)
{
    if (!m->has_head) {
        qc_forward_matrix_deinit(&m->head);
        QC_TRY(qc_forward_matrix_read(&m->head, &m->source, &m->tensors.head, err));
        m->has_head = 1;
    }
    QC_TRY(qc_forward_cpu_matmul(qc_matmul_ops_for(m->tools.isa), m->tools.threads, &m->head,
                                 hidden, n, out, err));
    return qc_forward_cpu_finish_logits(&m->tensors.shape, &m->tools, out, n, err);
}

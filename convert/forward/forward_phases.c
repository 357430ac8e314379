/* The phases of forward_phases.h. */
#include "convert/forward/forward_phases.h"

#include "convert/family/family.h"

#include <string.h>

/* The norm of a whole row of hidden states. */
static void norm_row(const qc_phase_chunk *k, const float *x, const float *weight, float *out)
{
    const qc_forward_shape *s = k->cpu->shape;
    const uint64_t n = s->config.hidden;
    const float eps = (float)s->config.norm_eps;
    if (s->family->traits & QC_FAMILY_LAYER_NORMS)
        k->cpu->decoder->layer_norm(x, weight, weight + n, n, eps, out);
    else
        k->cpu->decoder->norm(x, weight, n, eps, out);
}

qc_status qc_phase_norm(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    uint64_t n = k->cpu->shape->config.hidden;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++)
        norm_row(k, k->hidden + t * n, k->weight, k->normed + t * n);
    return QC_OK;
}

qc_status qc_phase_add(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    const qc_forward_shape *s = k->cpu->shape;
    const int of_sum = (s->family->traits & QC_FAMILY_NORMS_SUMS) != 0;
    uint64_t n = s->config.hidden;
    for (uint64_t t = first; t < first + count; t++) {
        float *h = k->hidden + t * n, *a = k->cpu->a + t * n;
        if (k->added_norm && !of_sum)
            norm_row(k, a, k->added_norm, a);
        for (uint64_t i = 0; i < n; i++)
            h[i] += a[i] * k->added;
        QC_TRY(qc_forward_finite(h, n, err));
        if (k->added_norm && of_sum)
            norm_row(k, h, k->added_norm, h);
    }
    return k->weight ? qc_phase_norm(ctx, thread, first, count, err) : QC_OK;
}

const qc_rope_tables *qc_phase_turns(const qc_phase_chunk *k)
{
    return k->turn == QC_LAYER_UNTURNED       ? NULL
           : k->turn == QC_LAYER_TURNED_LOCAL ? &k->cpu->local_rope
                                              : &k->cpu->rope;
}

/* Turns what of a head is to be turned. */
static void turn_head(const qc_phase_chunk *k, float *x, uint64_t row)
{
    const qc_forward_shape *s = k->cpu->shape;
    const qc_rope_tables *r = qc_phase_turns(k);
    const uint64_t half = s->turned / 2;
    if (!r)
        return;
    const float *cosines = r->cosines + row * half, *sines = r->sines + row * half;
    if (s->family->traits & QC_FAMILY_SIDE_BY_SIDE)
        k->cpu->decoder->rotate_pairs(x, cosines, sines, half);
    else
        k->cpu->decoder->rotate(x, cosines, sines, half);
}

qc_phase_heads qc_phase_heads_of(const qc_phase_chunk *k)
{
    const qc_forward_shape *s = k->cpu->shape;
    const uint64_t dim = s->config.head_dim;
    if (s->family->traits & QC_FAMILY_BY_HEAD)
        return (qc_phase_heads){{0, dim, 2 * dim}, {3 * dim, 3 * dim, 3 * dim}};
    return (qc_phase_heads){{0, k->q, k->q + k->k}, {dim, dim, s->value_dim}};
}

qc_status qc_phase_turn(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    const qc_forward_cpu *cpu = k->cpu;
    const qc_forward_config *c = &cpu->shape->config;
    const float *norms[2] = {k->w->vectors[QC_LAYER_Q_NORM], k->w->vectors[QC_LAYER_K_NORM]};
    const int wide = (cpu->shape->family->traits & QC_FAMILY_WIDE_NORMS) != 0;
    const float eps = (float)c->norm_eps;
    const qc_phase_heads in = qc_phase_heads_of(k);
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++) {
        const uint64_t row = cpu->positions[k->start + t];
        for (int part = 0; part < (k->cross ? 1 : 2); part++) { /* k is not of tokens */
            const uint64_t heads = part ? c->kv_heads : c->heads;
            float *x = cpu->b + t * k->ldb + in.first[part];
            if (norms[part] && wide)
                cpu->decoder->norm(x, norms[part], heads * c->head_dim, eps, x);
            for (uint64_t h = 0; h < heads; h++, x += in.step[part]) {
                if (norms[part] && !wide)
                    cpu->decoder->norm(x, norms[part], c->head_dim, eps, x);
                turn_head(k, x, row);
            }
        }
    }
    return QC_OK;
}

/* ---- multi-head latent attention (DeepSeek-AI 2024) ----
 *
 * A row of d: what Q_B gets | what KV_B gets | the part of a key that is turned, which all heads
 * share | for each head, what of its key is not turned and its value. */

qc_status qc_phase_norm_latents(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                                qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    const qc_forward_shape *s = k->cpu->shape;
    const float *q_norm = k->w->vectors[QC_LAYER_Q_A_NORM];
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++) {
        float *d = k->cpu->d + t * k->ldd;
        if (q_norm)
            k->cpu->decoder->norm(d, q_norm, s->q_rank, QC_PHASE_LATENT_EPS, d);
        k->cpu->decoder->norm(d + s->q_rank, k->w->vectors[QC_LAYER_KV_A_NORM], s->kv_rank,
                              QC_PHASE_LATENT_EPS, d + s->q_rank);
    }
    return QC_OK;
}

qc_status qc_phase_spread_latents(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                                  qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    const qc_forward_shape *s = k->cpu->shape;
    const uint64_t dim = s->config.head_dim, plain = s->turned_from, wide = s->value_dim;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++) {
        const uint64_t row = k->cpu->positions[k->start + t];
        float *q = k->cpu->b + t * k->ldb, *key = q + k->q, *value = key + k->k;
        float *turned = k->cpu->d + t * k->ldd + s->q_rank + s->kv_rank;
        const float *made = turned + s->turned;
        turn_head(k, turned, row);
        for (uint64_t h = 0; h < s->config.heads; h++, made += plain + wide) {
            turn_head(k, q + h * dim + plain, row);
            memcpy(key + h * dim, made, (size_t)plain * sizeof *key);
            memcpy(key + h * dim + plain, turned, (size_t)s->turned * sizeof *key);
            memcpy(value + h * wide, made + plain, (size_t)wide * sizeof *value);
        }
    }
    return QC_OK;
}

/* ---- attention ---- */

/* The window that a task belongs to. */
static uint64_t window_of(const qc_phase_chunk *k, uint64_t task)
{
    const uint64_t *tasks = k->cpu->tasks;
    uint64_t low = k->window, high = k->end;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (tasks[middle] <= task)
            low = middle;
        else
            high = middle;
    }
    return low;
}

qc_attend_io qc_phase_attention(const qc_phase_chunk *k, uint64_t window, const float *b, float *c)
{
    const qc_forward_cpu *cpu = k->cpu;
    const qc_forward_shape *s = cpu->shape;
    const uint64_t at = cpu->starts[window] - k->start, tokens = cpu->batch.lengths[window];
    const qc_phase_heads in = qc_phase_heads_of(k);
    b += at * k->ldb;
    return (qc_attend_io){.q = b + in.first[0],
                          .k = b + in.first[1],
                          .v = b + in.first[2],
                          .out = c + at * k->attended,
                          .q_stride = k->ldb,
                          .kv_stride = k->ldb,
                          .out_stride = k->attended,
                          .q_step = in.step[0],
                          .k_step = in.step[1],
                          .v_step = in.step[2],
                          .tokens = tokens,
                          .group = s->config.heads / s->config.kv_heads,
                          .head_dim = s->config.head_dim,
                          .value_dim = s->value_dim,
                          .span = k->span,
                          .keys = s->config.encoder ? tokens : 0,
                          .scale = k->scale,
                          .cap = (float)s->score_cap,
                          .sinks = k->w->vectors[QC_LAYER_SINKS]};
}

qc_status qc_phase_attend(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    const qc_forward_cpu *cpu = k->cpu;
    const qc_forward_config *c = &cpu->shape->config;
    const uint64_t step = qc_attend_tokens(c->heads / c->kv_heads);
    (void)err;
    for (uint64_t task = first; task < first + count; task++) {
        const uint64_t w = window_of(k, cpu->tasks[k->window] + task);
        const uint64_t inside = cpu->tasks[k->window] + task - cpu->tasks[w];
        const uint64_t token = inside / c->kv_heads * step;
        const qc_attend_io io = qc_phase_attention(k, w, cpu->b, cpu->c);
        cpu->decoder->attend(&io, inside % c->kv_heads, token,
                             io.tokens - token < step ? io.tokens - token : step,
                             cpu->scratch + thread * cpu->scratch_each);
    }
    return QC_OK;
}

/* What gate becomes, with up where the family has it. */
static void through_gate(const qc_decoder_ops *ops, const qc_forward_shape *s, float *gate)
{
    const uint64_t n = s->config.intermediate;
    const int gated = !(s->family->traits & QC_FAMILY_UNGATED);
    switch (s->gate) {
    case QC_LAYER_SILU: /* has a gate always */
        ops->swiglu(gate, gate + n, n);
        return;
    case QC_LAYER_GELU_TANH:
        if (gated)
            ops->geglu(gate, gate + n, n);
        else
            ops->gelu_tanh(gate, n);
        return;
    case QC_LAYER_GELU: /* and these two never */
        ops->gelu(gate, n);
        return;
    case QC_LAYER_RELU:
        ops->relu(gate, n);
    }
}

qc_status qc_phase_gate(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err)
{
    const qc_phase_chunk *k = ctx;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++)
        through_gate(k->cpu->decoder, k->cpu->shape, k->cpu->b + t * k->ldf);
    return QC_OK;
}

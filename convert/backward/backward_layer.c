#include "convert/backward/backward_layer.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/family/family.h"
#include "quant/piecework.h"
#include "quant/quant_decode.h"

#include <string.h>

#define WEIGHT_FLOATS ((uint64_t)1 << 22) /* of a matrix, at a time */

/* ---- buffers ---- */

typedef struct {
    float **at;
    uint64_t floats; /* of a token */
} buffer;

#define BUFFERS 8u

static uint64_t tokens_at_once(uint64_t tokens, uint64_t longest)
{
    return qc_max_u64(longest, qc_min_u64(tokens, QC_FORWARD_TOKENS));
}

static uint64_t gates_of(const qc_forward_shape *s)
{
    return s->config.intermediate * (s->family->traits & QC_FAMILY_UNGATED ? 1 : 2);
}

static uint64_t heads_of(const qc_forward_shape *s)
{
    const qc_forward_config *c = &s->config;
    return (c->heads + c->kv_heads) * c->head_dim + c->kv_heads * s->value_dim;
}

/* What Q, K and V give side by side. */
static uint64_t made_of(const qc_forward_shape *s)
{
    const qc_forward_config *c = &s->config;
    const uint64_t q = s->q_rank ? s->q_rank : c->heads * c->head_dim;
    return s->kv_rank ? q + s->kv_rank + s->turned : heads_of(s);
}

static void list(qc_backward_layer *b, const qc_forward_shape *s, buffer out[BUFFERS])
{
    const qc_forward_config *c = &s->config;
    const uint64_t back = qc_max_u64(c->intermediate, qc_forward_attended(s));
    const uint64_t states = qc_max_u64(c->hidden, qc_max_u64(s->q_rank, s->kv_rank));
    const buffer all[BUFFERS] = {
        {&b->qkv, heads_of(s)},  {&b->raw, made_of(s)},
        {&b->middle, c->hidden}, {&b->gates, qc_max_u64(gates_of(s), heads_of(s))},
        {&b->added, c->hidden},  {&b->states, states},
        {&b->ffn, c->hidden},    {&b->back, back}};
    memcpy(out, all, sizeof all);
}

uint64_t qc_backward_layer_bytes(const qc_forward_shape *s, unsigned threads, uint64_t tokens,
                                 uint64_t longest)
{
    qc_backward_layer b;
    buffer all[BUFFERS];
    uint64_t floats = 0;
    list(&b, s, all);
    for (unsigned i = 0; i < BUFFERS; i++)
        floats = qc_sat_add(floats, all[i].floats);
    const uint64_t rows = qc_max_u64(WEIGHT_FLOATS, qc_max_u64(s->config.hidden, floats));
    floats = qc_sat_add(qc_sat_mul(floats, tokens_at_once(tokens, longest)), rows);
    return qc_sat_add(qc_sat_mul(floats, sizeof(float)),
                      qc_sat_mul(threads, qc_gradient_attend_bytes(longest)));
}

qc_status qc_backward_layer_create(qc_backward_layer *out, const qc_forward_cpu *cpu, qc_error *err)
{
    const qc_forward_shape *s = cpu->shape;
    const uint64_t longest = qc_forward_longest(&cpu->batch);
    const uint64_t tokens = tokens_at_once(cpu->batch.tokens, longest);
    uint64_t widest = s->config.hidden;
    buffer all[BUFFERS];
    list(out, s, all);
    out->made = made_of(s);
    out->wide = gates_of(s);
    for (unsigned i = 0; i < BUFFERS; i++) {
        widest = qc_max_u64(widest, all[i].floats);
        QC_TRY(qc_forward_cpu_allocate(
            all[i].at, qc_sat_mul(all[i].floats, qc_sat_mul(tokens, sizeof(float))), err));
    }
    QC_TRY(qc_forward_cpu_allocate(&out->weights, qc_max_u64(widest, WEIGHT_FLOATS) * sizeof(float),
                                   err));
    out->scratch_each = qc_align_u64(qc_gradient_attend_bytes(longest), 64);
    return qc_forward_cpu_allocate(&out->scratch, qc_sat_mul(out->scratch_each, cpu->threads), err);
}

void qc_backward_layer_deinit(qc_backward_layer *b)
{
    void *const all[] = {b->qkv,    b->raw, b->middle, b->gates,   b->added,
                         b->states, b->ffn, b->back,   b->weights, b->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qc_free(all[i]);
    memset(b, 0, sizeof *b);
}

/* ---- linear layers ---- */

typedef struct {
    const qc_backward_layer *b;
    const qc_forward_matrix *w;
    uint64_t first;
} decoding;

static qc_status decode_row(void *ctx, unsigned thread, uint64_t row, qc_error *err)
{
    const decoding *d = ctx;
    const qc_forward_matrix *w = d->w;
    float *out = d->b->weights + row * w->cols;
    uint64_t overflow = 0;
    (void)thread;
    (void)err;
    if (w->quantized) {
        qc_weights_row(d->b->ops, w->quantized, d->first + row, out);
    } else {
        const uint64_t each = qc_dtype_bits(w->dtype) / 8;
        const unsigned char *from = w->dense;
        d->b->ops->cast(from + (d->first + row) * w->cols * each, w->dtype, w->cols, out,
                        QC_DTYPE_F32, &overflow);
    }
    return QC_OK;
}

qc_status qc_backward_inputs(const qc_backward_layer *b, unsigned threads,
                             const qc_forward_matrix *w, const qc_gradient_product *p,
                             qc_error *err)
{
    const uint64_t most = qc_max_u64(1, WEIGHT_FLOATS / qc_max_u64(w->cols, 1));
    decoding d = {.b = b, .w = w};
    for (; d.first < w->rows; d.first += most) {
        qc_gradient_product rows = *p;
        rows.dy += d.first;
        rows.w = b->weights;
        rows.rows = qc_min_u64(most, w->rows - d.first);
        rows.cols = w->cols;
        QC_TRY(qc_piecework(threads, rows.rows, decode_row, &d, err));
        QC_TRY(qc_gradient_multiply(b->blas, threads, &rows, err));
    }
    return QC_OK;
}

/* The gradients of `count` matrices' outputs, which lie side by side, are taken, and go on to that
 * of their inputs: dx [tokens, cols], which is set. */
static qc_status through(const qc_backward_layer *b, const qc_phase_chunk *k, qc_layer_which first,
                         unsigned count, const float *dy, uint64_t ld, float *dx, qc_error *err)
{
    const uint64_t cols = k->w->matrices[first].cols;
    memset(dx, 0, (size_t)(k->tokens * cols) * sizeof *dx);
    for (unsigned i = 0; i < count; i++) {
        const qc_forward_matrix *w = &k->w->matrices[first + i];
        const qc_gradient_product p = {
            .dy = dy, .dx = dx, .tokens = k->tokens, .dy_stride = ld, .dx_stride = cols};
        if (w->rows > 0)
            QC_TRY(b->take(b->ctx, first + i, dy, ld, k->tokens, err));
        QC_TRY(qc_backward_inputs(b, k->cpu->threads, w, &p, err));
        dy += w->rows;
    }
    return QC_OK;
}

/* ---- phases, whose pieces are tokens ---- */

typedef struct {
    const qc_backward_layer *b;
    const qc_phase_chunk *k;
    const float *d; /* of hidden states */
    float *g;       /* of what is added to them, or of what a norm of them gives */
    const float *x,
        *norm;            /* the norm behind which g is, and its inputs; norm NULL: there is none */
    float scale;          /* of what is added */
    uint64_t first, wide; /* where in raw a latent is, and its floats */
} phase;

static qc_status by_tokens(phase *t, qc_piece_fn fn, qc_error *err)
{
    return qc_piecework(t->k->cpu->threads, t->k->tokens, fn, t, err);
}

static void through_norm(const phase *t, const float *x, const float *weight, float *g)
{
    const qc_forward_shape *s = t->k->cpu->shape;
    const uint64_t n = s->config.hidden;
    const float eps = (float)s->config.norm_eps;
    if (s->family->traits & QC_FAMILY_LAYER_NORMS)
        qc_gradient_layer_norm(x, weight, g, n, eps, g);
    else
        qc_gradient_norm(x, weight, g, n, eps, g);
}

/* The gradient of hidden states -> that of what was added to them. */
static qc_status added_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    const phase *t = ctx;
    const uint64_t n = t->k->cpu->shape->config.hidden;
    float *g = t->g + token * n;
    (void)thread;
    (void)err;
    for (uint64_t i = 0; i < n; i++)
        g[i] = t->d[token * n + i] * t->scale;
    if (t->norm)
        through_norm(t, t->x + token * n, t->norm, g);
    return QC_OK;
}

/* That of what a norm gives -> that of its inputs. */
static qc_status norm_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    const phase *t = ctx;
    const uint64_t n = t->k->cpu->shape->config.hidden;
    (void)thread;
    (void)err;
    if (t->norm)
        through_norm(t, t->x + token * n, t->norm, t->g + token * n);
    return QC_OK;
}

static qc_status gates_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    static const qc_gradient_gate acts[] = {[QC_LAYER_SILU] = QC_GRADIENT_SILU,
                                            [QC_LAYER_GELU_TANH] = QC_GRADIENT_GELU_TANH,
                                            [QC_LAYER_GELU] = QC_GRADIENT_GELU,
                                            [QC_LAYER_RELU] = QC_GRADIENT_RELU};
    const phase *t = ctx;
    const qc_forward_shape *s = t->k->cpu->shape;
    const uint64_t n = s->config.intermediate;
    float *gate = t->b->gates + token * t->b->wide;
    (void)thread;
    (void)err;
    qc_gradient_gates(acts[s->gate], gate, t->b->wide > n ? gate + n : NULL, t->b->back + token * n,
                      n);
    return QC_OK;
}

/* The gradient of what is turned of a head -> that in front of it. */
static void turn_back(const phase *t, float *d, uint64_t token)
{
    const qc_phase_chunk *k = t->k;
    const qc_rope_tables *turns = qc_phase_turns(k);
    const uint64_t half = k->cpu->shape->turned / 2;
    const uint64_t row = k->cpu->positions[k->start + token] * half;
    if (turns)
        qc_gradient_rotate(d, turns->cosines + row, turns->sines + row, half,
                           (k->cpu->shape->family->traits & QC_FAMILY_SIDE_BY_SIDE) != 0);
}

/* The gradient of heads behind norms and positions -> that of heads in front of them. */
static qc_status heads_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    const phase *t = ctx;
    const qc_phase_chunk *k = t->k;
    const qc_forward_shape *s = k->cpu->shape;
    const qc_forward_config *c = &s->config;
    const qc_phase_heads in = qc_phase_heads_of(k);
    const int wide = (s->family->traits & QC_FAMILY_WIDE_NORMS) != 0;
    const float eps = (float)c->norm_eps;
    (void)thread;
    (void)err;
    for (int part = 0; part < 2; part++) {
        const uint64_t heads = part ? c->kv_heads : c->heads, at = token * k->ldb + in.first[part];
        const float *norm = k->w->vectors[part ? QC_LAYER_K_NORM : QC_LAYER_Q_NORM];
        float *d = t->g + at;
        const float *x = t->b->raw + at; /* as wide as t->g: there are no latents */
        for (uint64_t h = 0; h < heads; h++)
            turn_back(t, d + h * in.step[part], token);
        if (norm && wide)
            qc_gradient_norm(x, norm, d, heads * c->head_dim, eps, d);
        for (uint64_t h = 0; norm && !wide && h < heads; h++)
            qc_gradient_norm(x + h * in.step[part], norm, d + h * in.step[part], c->head_dim, eps,
                             d + h * in.step[part]);
    }
    return QC_OK;
}

/* ---- multi-head latent attention ---- */

/* The gradients of all heads, t->g -> those of what KV_B gives, in qkv, and in raw those of the
 * part of keys that all heads share; and those of q where it does not come from a latent. */
static qc_status spread_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    const phase *t = ctx;
    const qc_phase_chunk *k = t->k;
    const qc_forward_shape *s = k->cpu->shape;
    const uint64_t dim = s->config.head_dim, plain = s->turned_from, wide = s->value_dim;
    float *q = t->g + token * k->ldb, *key = q + k->q, *value = key + k->k;
    float *made = t->b->qkv + token * k->w->matrices[QC_LAYER_KV_B].rows;
    float *raw = t->b->raw + token * t->b->made;
    float *turned = raw + k->w->matrices[QC_LAYER_Q].rows + s->kv_rank;
    (void)thread;
    (void)err;
    memset(turned, 0, (size_t)s->turned * sizeof *turned);
    for (uint64_t h = 0; h < s->config.heads; h++, key += dim, value += wide) {
        turn_back(t, q + h * dim + plain, token);
        memcpy(made, key, (size_t)plain * sizeof *made);
        memcpy(made + plain, value, (size_t)wide * sizeof *made);
        made += plain + wide;
        for (uint64_t i = 0; i < s->turned; i++)
            turned[i] += key[plain + i];
    }
    turn_back(t, turned, token);
    if (s->q_rank == 0)
        memcpy(raw, q, (size_t)k->q * sizeof *raw);
    return QC_OK;
}

/* The gradient of a latent behind its norm, t->g [tokens, wide] -> that in front of it, in raw,
 * where the latent was. */
static qc_status latent_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    const phase *t = ctx;
    float *raw = t->b->raw + token * t->b->made + t->first;
    (void)thread;
    (void)err;
    qc_gradient_norm(raw, t->norm, t->g + token * t->wide, t->wide, QC_PHASE_LATENT_EPS, raw);
    return QC_OK;
}

/* Takes the gradients `from` of what a matrix makes of a latent to that of the latent. */
static qc_status back_latent(qc_backward_layer *b, phase *t, qc_layer_which which,
                             qc_layer_vector norm, const float *from, uint64_t ld, uint64_t first,
                             qc_error *err)
{
    t->g = b->states;
    t->norm = t->k->w->vectors[norm];
    t->first = first;
    t->wide = t->k->w->matrices[which].cols;
    QC_TRY(through(b, t->k, which, 1, from, ld, b->states, err));
    return by_tokens(t, latent_piece, err);
}

/* The gradients of all heads, b->gates -> those of what Q and K give, b->raw. */
static qc_status back_latents(qc_backward_layer *b, phase *t, qc_error *err)
{
    const qc_phase_chunk *k = t->k;
    const qc_forward_matrix *w = k->w->matrices;
    QC_TRY(by_tokens(t, spread_piece, err));
    QC_TRY(back_latent(b, t, QC_LAYER_KV_B, QC_LAYER_KV_A_NORM, b->qkv, w[QC_LAYER_KV_B].rows,
                       w[QC_LAYER_Q].rows, err));
    if (k->cpu->shape->q_rank == 0)
        return QC_OK;
    return back_latent(b, t, QC_LAYER_Q_B, QC_LAYER_Q_A_NORM, b->gates, k->ldb, 0, err);
}

/* ---- attention ---- */

/* A piece is a head of keys in a window. */
static qc_status attention_piece(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const phase *t = ctx;
    const qc_phase_chunk *k = t->k;
    const qc_forward_cpu *cpu = k->cpu;
    const uint64_t heads = cpu->shape->config.kv_heads, window = k->window + piece / heads;
    const uint64_t at = cpu->starts[window] - k->start;
    const qc_phase_heads in = qc_phase_heads_of(k);
    const qc_attend_io io = qc_phase_attention(k, window, t->b->qkv, t->b->back);
    float *g = t->g + at * k->ldb;
    const qc_gradient_attention d = {
        .out = io.out, .q = g + in.first[0], .k = g + in.first[1], .v = g + in.first[2]};
    (void)err;
    qc_gradient_attend(t->b->blas, cpu->decoder, &io, &d, piece % heads,
                       t->b->scratch + thread * t->b->scratch_each);
    return QC_OK;
}

/* d += g */
static void add_states(const phase *t, float *d, const float *g)
{
    const uint64_t n = t->k->tokens * t->k->cpu->shape->config.hidden;
    for (uint64_t i = 0; i < n; i++)
        d[i] += g[i];
}

/* ---- a chunk ---- */

/* Takes the chunk through the layer again, and keeps what the way back needs. */
static qc_status forward(qc_backward_layer *b, qc_phase_chunk *k, const qc_forward_pass *p,
                         const qc_forward_chunk *at, qc_error *err)
{
    qc_forward_cpu *cpu = k->cpu;
    const uint64_t hidden = cpu->shape->config.hidden;
    float *const *norms = k->w->vectors;
    qc_forward_inputs in;
    QC_TRY(qc_forward_cpu_at(cpu, p, at, QC_AT_O, &in, err));
    memcpy(b->qkv, cpu->b, (size_t)(k->tokens * k->ldb) * sizeof *b->qkv);
    if (norms[QC_LAYER_Q_NORM] || norms[QC_LAYER_K_NORM] || cpu->shape->kv_rank > 0)
        QC_TRY(qc_phase_multiply(k, QC_LAYER_Q, 3, norms[QC_LAYER_INPUT_NORM] ? cpu->a : k->hidden,
                                 hidden, b->raw, b->made, err));
    if (norms[QC_LAYER_ATTENDED_NORM])
        QC_TRY(qc_phase_multiply(k, QC_LAYER_O, 1, in.x, in.ld, b->added, hidden, err));
    if (k->experts)
        return QC_OK;
    memcpy(b->middle, k->hidden, (size_t)(k->tokens * hidden) * sizeof *b->middle);
    k->hidden = b->middle;
    if (!cpu->shape->parallel)
        QC_TRY(qc_phase_leave_attention(k, in.x, err));
    else if (norms[QC_LAYER_POST_NORM])
        QC_TRY(qc_phase_tokens(k, qc_phase_norm, norms[QC_LAYER_POST_NORM], err));
    QC_TRY(qc_phase_multiply(k, QC_LAYER_GATE, 2, norms[QC_LAYER_POST_NORM] ? cpu->a : b->middle,
                             hidden, b->gates, b->wide, err));
    if (!norms[QC_LAYER_FFN_NORM])
        return QC_OK;
    memcpy(cpu->b, b->gates, (size_t)(k->tokens * b->wide) * sizeof *b->gates);
    QC_TRY(qc_phase_tokens(k, qc_phase_gate, NULL, err));
    return qc_phase_multiply(k, QC_LAYER_DOWN, 1, cpu->b, k->ldf, b->ffn, hidden, err);
}

/* d, the gradient behind the layer -> b->ffn, what the feed-forward part adds to it. */
static qc_status back_ffn(qc_backward_layer *b, phase *t, const float *d, qc_error *err)
{
    const qc_phase_chunk *k = t->k;
    const qc_forward_config *c = &k->cpu->shape->config;
    t->d = d;
    t->g = b->states;
    t->x = b->ffn;
    t->norm = k->w->vectors[QC_LAYER_FFN_NORM];
    QC_TRY(by_tokens(t, added_piece, err));
    QC_TRY(through(b, k, QC_LAYER_DOWN, 1, b->states, c->hidden, b->back, err));
    QC_TRY(by_tokens(t, gates_piece, err));
    QC_TRY(through(b, k, QC_LAYER_GATE, 2, b->gates, b->wide, b->ffn, err));
    t->g = b->ffn;
    t->x = b->middle;
    t->norm = k->w->vectors[QC_LAYER_POST_NORM];
    return by_tokens(t, norm_piece, err);
}

/* d, the gradient behind attention -> b->states, what attention adds to it. */
static qc_status back_attention(qc_backward_layer *b, phase *t, const float *d, const float *hidden,
                                qc_error *err)
{
    const qc_phase_chunk *k = t->k;
    const qc_forward_config *c = &k->cpu->shape->config;
    t->d = d;
    t->g = b->states;
    t->x = b->added;
    t->norm = k->w->vectors[QC_LAYER_ATTENDED_NORM];
    QC_TRY(by_tokens(t, added_piece, err));
    QC_TRY(through(b, k, QC_LAYER_O, 1, b->states, c->hidden, b->back, err));
    t->g = b->gates;
    QC_TRY(
        qc_piecework(k->cpu->threads, (k->end - k->window) * c->kv_heads, attention_piece, t, err));
    const int latent = k->cpu->shape->kv_rank > 0;
    QC_TRY(latent ? back_latents(b, t, err) : by_tokens(t, heads_piece, err));
    QC_TRY(through(b, k, QC_LAYER_Q, 3, latent ? b->raw : b->gates, b->made, b->states, err));
    t->g = b->states;
    t->x = hidden;
    t->norm = k->w->vectors[QC_LAYER_INPUT_NORM];
    return by_tokens(t, norm_piece, err);
}

static qc_status run_chunk(qc_backward_layer *b, qc_phase_chunk *k, const qc_forward_pass *p,
                           const qc_forward_chunk *at, float *d, qc_error *err)
{
    const qc_forward_shape *s = k->cpu->shape;
    const float *hidden = k->hidden;
    phase t = {.b = b, .k = k, .scale = (float)s->residual_scale};
    QC_TRY(forward(b, k, p, at, err));
    if (!k->experts)
        QC_TRY(back_ffn(b, &t, d, err));
    if (!k->experts && !s->parallel)
        add_states(&t, d, b->ffn);
    QC_TRY(back_attention(b, &t, d, hidden, err));
    if (!k->experts && s->parallel)
        add_states(&t, d, b->ffn);
    add_states(&t, d, b->states);
    return qc_forward_finite(d, k->tokens * s->config.hidden, err);
}

qc_status qc_backward_layer_run(qc_backward_layer *b, qc_forward_cpu *cpu, const qc_forward_pass *p,
                                float *d, qc_error *err)
{
    qc_forward_chunk at = {0};
    while (qc_forward_cpu_next(cpu, &at)) {
        qc_phase_chunk k = qc_phase_chunk_of(cpu, p, &at);
        QC_TRY(run_chunk(b, &k, p, &at, d + at.start * cpu->shape->config.hidden, err));
    }
    return QC_OK;
}

#include "convert/forward/experts.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/forward/forward_cpu.h"
#include "quant/piecework.h"

#include <inttypes.h>
#include <string.h>

#define TOKEN_GRAIN 8u /* tokens that a thread takes at a time */
#define ALIGNMENT   64u

/* ---- buffers ---- */

/* Everything is in bytes. */
typedef struct {
    uint64_t sum, chosen, starts, logits, room, x, gate, up, shares;
} sizes;

static uint64_t floats(uint64_t rows, uint64_t width)
{
    return qc_sat_mul(qc_sat_mul(rows, width), sizeof(float));
}

static uint64_t piece_of(uint64_t tokens)
{
    return tokens < QC_FORWARD_TOKENS ? tokens : QC_FORWARD_TOKENS;
}

static sizes sizes_of(const qc_forward_shape *shape, unsigned threads, uint64_t tokens)
{
    const qc_experts_shape *s = &shape->experts;
    uint64_t piece = piece_of(tokens), widest = qc_max_u64(s->inner, s->shared);
    return (sizes){
        .sum = floats(tokens, shape->config.hidden),
        .chosen = floats(tokens, s->routing.chosen),
        .starts = qc_sat_mul(s->routing.experts + 2, sizeof(uint64_t)),
        .logits = floats(piece, s->routing.experts),
        .room = floats(threads, qc_route_room(&s->routing)),
        .x = floats(piece, shape->config.hidden),
        .gate = floats(piece, qc_max_u64(s->clamped ? 2 * s->inner : s->inner, s->shared)),
        .up = floats(piece, widest),
        .shares = floats(piece, 1),
    };
}

uint64_t qc_experts_bytes(const qc_forward_shape *shape, unsigned threads, uint64_t tokens,
                          int own_sum)
{
    const sizes z = sizes_of(shape, threads, tokens);
    uint64_t widest =
        qc_max_u64(qc_max_u64(shape->experts.inner, shape->experts.shared), shape->config.hidden);
    uint64_t bytes = qc_sat_add(own_sum ? z.sum : 0, qc_sat_mul(4, z.chosen));
    bytes = qc_sat_add(bytes, qc_sat_add(z.starts, qc_sat_add(z.logits, z.room)));
    bytes = qc_sat_add(bytes, qc_sat_add(qc_sat_mul(2, z.x), qc_sat_add(z.gate, z.up)));
    bytes = qc_sat_add(bytes, z.shares);
    return qc_sat_add(
        bytes,
        qc_sat_mul(threads,
                   qc_align_u64(qc_matmul_cpu_scratch_bytes(piece_of(tokens), widest), ALIGNMENT)));
}

qc_status qc_experts_create(qc_experts_cpu *out, const qc_forward_shape *shape,
                            const qc_forward_tools *tools, uint64_t tokens, float *sum,
                            qc_error *err)
{
    *out = (qc_experts_cpu){.shape = shape,
                            .decoder = qc_decoder_ops_for(tools->isa),
                            .matmul = qc_matmul_ops_for(tools->isa),
                            .threads = tools->threads ? tools->threads : 1,
                            .tokens = tokens};
    const sizes z = sizes_of(shape, out->threads, tokens);
    if (tokens > UINT32_MAX)
        QC_FAIL(err, QC_ERR_NOMEM, "a batch of %" PRIu64 " tokens is too large", tokens);
    if (!sum)
        QC_TRY(qc_forward_cpu_allocate(&out->own_sum, z.sum, err));
    out->sum = sum ? sum : out->own_sum;
    QC_TRY(qc_forward_cpu_allocate(&out->chosen, z.chosen, err));
    QC_TRY(qc_forward_cpu_allocate(&out->weights, z.chosen, err));
    QC_TRY(qc_forward_cpu_allocate(&out->list, z.chosen, err));
    QC_TRY(qc_forward_cpu_allocate(&out->list_weights, z.chosen, err));
    QC_TRY(qc_forward_cpu_allocate(&out->starts, z.starts, err));
    QC_TRY(qc_forward_cpu_allocate(&out->logits, z.logits, err));
    QC_TRY(qc_forward_cpu_allocate(&out->room, z.room, err));
    QC_TRY(qc_forward_cpu_allocate(&out->x, z.x, err));
    QC_TRY(qc_forward_cpu_allocate(&out->y, z.x, err));
    QC_TRY(qc_forward_cpu_allocate(&out->gate, z.gate, err));
    QC_TRY(qc_forward_cpu_allocate(&out->up, z.up, err));
    return qc_forward_cpu_allocate(&out->shares, z.shares, err);
}

void qc_experts_deinit(qc_experts_cpu *x)
{
    void *const all[] = {x->own_sum, x->chosen, x->weights, x->list, x->list_weights,
                         x->starts,  x->logits, x->room,    x->x,    x->y,
                         x->gate,    x->up,     x->shares};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qc_free(all[i]);
    memset(x, 0, sizeof *x);
}

/* ---- sharing the work by tokens ---- */

/* What all tokens of a piece go through. */
typedef struct {
    qc_experts_cpu *x;
    const qc_experts_states *h;
    const qc_expert_tokens *piece;
    uint64_t first, count;
    const qc_router_weights *router;
    const float *shares;
    float *hidden, *inner;
    uint64_t width;
    qc_status (*token)(const void *work, unsigned thread, uint64_t i, qc_error *err);
} token_work;

static qc_status take(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const token_work *w = ctx;
    uint64_t end = qc_min_u64((piece + 1) * TOKEN_GRAIN, w->count);
    for (uint64_t i = piece * TOKEN_GRAIN; i < end; i++)
        QC_TRY(w->token(w, thread, i, err));
    return QC_OK;
}

static qc_status share(token_work *w, qc_error *err)
{
    return qc_piecework(w->x->threads, qc_ceil_div_u64(w->count, TOKEN_GRAIN), take, w, err);
}

/* The place in the batch of token i of a piece. */
static uint64_t place_of(const token_work *w, uint64_t i)
{
    return w->piece->tokens ? w->piece->tokens[i] : w->first + i;
}

/* ---- routing ---- */

static qc_status norm_token(const void *work, unsigned thread, uint64_t i, qc_error *err)
{
    const token_work *w = work;
    const qc_forward_config *c = &w->x->shape->config;
    (void)thread;
    (void)err;
    w->x->decoder->norm(w->h->hidden + place_of(w, i) * c->hidden, w->h->norm, c->hidden,
                        (float)c->norm_eps, w->x->x + i * c->hidden);
    return QC_OK;
}

static qc_status route_token(const void *work, unsigned thread, uint64_t i, qc_error *err)
{
    const token_work *w = work;
    qc_experts_cpu *x = w->x;
    const qc_routing *r = &x->shape->experts.routing;
    const float *logits = x->logits + i * r->experts;
    if (qc_forward_finite(logits, r->experts, NULL) != QC_OK)
        QC_FAIL(err, QC_ERR_NONFINITE, "what the router gives is not finite");
    qc_route_token(r, x->decoder, logits, w->router->correction,
                   x->room + thread * qc_route_room(r), x->chosen + (w->first + i) * r->chosen,
                   x->weights + (w->first + i) * r->chosen);
    return QC_OK;
}

/* Sorts the tokens by their experts. */
static void list_tokens(qc_experts_cpu *x)
{
    const qc_routing *r = &x->shape->experts.routing;
    uint64_t all = x->tokens * r->chosen, *next = x->starts + 1;
    memset(x->starts, 0, (size_t)(r->experts + 2) * sizeof *x->starts);
    for (uint64_t i = 0; i < all; i++)
        x->starts[x->chosen[i] + 2]++;
    for (uint64_t e = 2; e < r->experts + 2; e++)
        x->starts[e] += x->starts[e - 1];
    /* next[e] goes from the beginning of e's tokens to their end, which is the beginning of the
     * next expert's: starts[e + 1]. */
    for (uint64_t i = 0; i < all; i++) {
        uint64_t at = next[x->chosen[i]]++;
        x->list[at] = (uint32_t)(i / r->chosen);
        x->list_weights[at] = x->weights[i];
    }
}

qc_status qc_experts_route(qc_experts_cpu *x, const qc_router_weights *w,
                           const qc_experts_states *h, qc_error *err)
{
    const qc_expert_tokens all = qc_experts_all(x);
    for (uint64_t first = 0; first < x->tokens; first += QC_FORWARD_TOKENS) {
        const qc_expert_tokens piece = qc_experts_piece(&all, first);
        token_work t = {
            .x = x, .first = first, .count = piece.count, .router = w, .token = route_token};
        QC_TRY(qc_experts_inputs(x, h, &piece, first, err));
        QC_TRY(qc_forward_cpu_matmul(x->matmul, x->threads, &w->router, x->x, piece.count,
                                     x->logits, err));
        QC_TRY(share(&t, err));
    }
    list_tokens(x);
    memset(x->sum, 0, (size_t)(x->tokens * x->shape->config.hidden) * sizeof *x->sum);
    return QC_OK;
}

qc_expert_tokens qc_experts_tokens(const qc_experts_cpu *x, uint64_t expert)
{
    uint64_t from = x->starts[expert];
    return (qc_expert_tokens){x->list + from, x->list_weights + from, x->starts[expert + 1] - from};
}

qc_expert_tokens qc_experts_all(const qc_experts_cpu *x)
{
    return (qc_expert_tokens){NULL, NULL, x->tokens};
}

qc_expert_tokens qc_experts_piece(const qc_expert_tokens *t, uint64_t first)
{
    return (qc_expert_tokens){t->tokens ? t->tokens + first : NULL,
                              t->weights ? t->weights + first : NULL, piece_of(t->count - first)};
}

/* ---- the steps of an expert ---- */

qc_status qc_experts_inputs(qc_experts_cpu *x, const qc_experts_states *h,
                            const qc_expert_tokens *piece, uint64_t first, qc_error *err)
{
    token_work w = {
        .x = x, .h = h, .piece = piece, .first = first, .count = piece->count, .token = norm_token};
    return share(&w, err);
}

static qc_status gate_token(const void *work, unsigned thread, uint64_t i, qc_error *err)
{
    const token_work *w = work;
    (void)thread;
    (void)err;
    w->x->decoder->swiglu(w->x->gate + i * w->width, w->x->up + i * w->width, w->width);
    return QC_OK;
}

/* gate has a gate and an up in turn for each element of up, which gets
 * (clip(u, limit) + 1) * min(g, limit) * sigmoid(alpha * min(g, limit)). */
static qc_status clamp_token(const void *work, unsigned thread, uint64_t i, qc_error *err)
{
    const token_work *w = work;
    const float limit = w->x->shape->experts.limit, alpha = w->x->shape->experts.alpha;
    const float *both = w->x->gate + i * 2 * w->width;
    float *out = w->x->up + i * w->width;
    (void)thread;
    (void)err;
    for (uint64_t k = 0; k < w->width; k++)
        out[k] = -alpha * (both[2 * k] < limit ? both[2 * k] : limit);
    w->x->decoder->exponential(out, w->width, out);
    for (uint64_t k = 0; k < w->width; k++) {
        float g = both[2 * k] < limit ? both[2 * k] : limit, u = both[2 * k + 1];
        u = u > limit ? limit : u < -limit ? -limit : u;
        out[k] = (u + 1.0f) * (g * (1.0f / (1.0f + out[k])));
    }
    return QC_OK;
}

qc_status qc_experts_gate(qc_experts_cpu *x, const qc_expert_weights *w, uint64_t n, float **inner,
                          qc_error *err)
{
    const qc_forward_matrix *gate = &w->matrices[QC_EXPERT_GATE], *up = &w->matrices[QC_EXPERT_UP];
    const int clamped = x->shape->experts.clamped;
    token_work t = {.x = x,
                    .count = n,
                    .width = clamped ? gate->rows / 2 : gate->rows,
                    .token = clamped ? clamp_token : gate_token};
    QC_TRY(qc_forward_cpu_matmul(x->matmul, x->threads, gate, x->x, n, x->gate, err));
    if (clamped) {
        *inner = x->up;
        return share(&t, err);
    }
    QC_TRY(qc_forward_cpu_matmul(x->matmul, x->threads, up, x->x, n, x->up, err));
    *inner = x->gate;
    return share(&t, err);
}

static qc_status add_token(const void *work, unsigned thread, uint64_t i, qc_error *err)
{
    const token_work *w = work;
    uint64_t n = w->x->shape->config.hidden;
    float *sum = w->x->sum + place_of(w, i) * n;
    const float *y = w->x->y + i * n;
    (void)thread;
    (void)err;
    float share = w->piece->weights ? w->piece->weights[i] : w->shares ? w->shares[i] : 1.0f;
    for (uint64_t k = 0; k < n; k++)
        sum[k] += share * y[k];
    return QC_OK;
}

qc_status qc_experts_shares(qc_experts_cpu *x, const qc_forward_matrix *gate, uint64_t n,
                            qc_error *err)
{
    QC_TRY(qc_forward_cpu_matmul(x->matmul, x->threads, gate, x->x, n, x->shares, err));
    for (uint64_t i = 0; i < n; i++)
        x->shares[i] = -x->shares[i];
    x->decoder->exponential(x->shares, n, x->shares);
    for (uint64_t i = 0; i < n; i++)
        x->shares[i] = 1.0f / (1.0f + x->shares[i]);
    return QC_OK;
}

qc_status qc_experts_add(qc_experts_cpu *x, const qc_expert_weights *w, const float *inner,
                         const qc_expert_tokens *piece, uint64_t first,
                         const qc_forward_matrix *shared_gate, qc_error *err)
{
    token_work t = {.x = x,
                    .piece = piece,
                    .first = first,
                    .count = piece->count,
                    .shares = shared_gate ? x->shares : NULL,
                    .token = add_token};
    if (shared_gate)
        QC_TRY(qc_experts_shares(x, shared_gate, piece->count, err));
    QC_TRY(qc_forward_cpu_matmul(x->matmul, x->threads, &w->matrices[QC_EXPERT_DOWN], inner,
                                 piece->count, x->y, err));
    return share(&t, err);
}

static qc_status leave_token(const void *work, unsigned thread, uint64_t i, qc_error *err)
{
    const token_work *w = work;
    uint64_t n = w->x->shape->config.hidden;
    float *h = w->hidden + i * n;
    const float *sum = w->x->sum + i * n;
    (void)thread;
    for (uint64_t k = 0; k < n; k++)
        h[k] += sum[k];
    return qc_forward_finite(h, n, err);
}

qc_status qc_experts_leave(qc_experts_cpu *x, float *hidden, qc_error *err)
{
    token_work w = {.x = x, .hidden = hidden, .count = x->tokens, .token = leave_token};
    return share(&w, err);
}

qc_status qc_experts_pass(qc_experts_cpu *x, const qc_expert_weights *w, const qc_experts_states *h,
                          const qc_expert_tokens *tokens, const qc_forward_matrix *shared_gate,
                          qc_error *err)
{
    for (uint64_t first = 0; first < tokens->count; first += QC_FORWARD_TOKENS) {
        const qc_expert_tokens piece = qc_experts_piece(tokens, first);
        float *inner = NULL;
        QC_TRY(qc_experts_inputs(x, h, &piece, first, err));
        QC_TRY(qc_experts_gate(x, w, piece.count, &inner, err));
        QC_TRY(qc_experts_add(x, w, inner, &piece, first, shared_gate, err));
    }
    return QC_OK;
}

/* ---- a layer ---- */

static void read_soon(const qc_forward_source *s, const qc_expert_linears *l)
{
    const qc_checkpoint *c = s->checkpoint;
    for (int i = 0; i < QC_EXPERT_MATRICES; i++)
        if (l->linear[i].tensor != QC_NO_TENSOR)
            qc_checkpoint_hint_read_soon(c, &c->tensors[l->linear[i].tensor], 0,
                                         c->tensors[l->linear[i].tensor].bytes);
}

/* Reads an expert and takes its tokens through it. */
static qc_status stream(qc_experts_cpu *x, const qc_forward_source *s, const qc_experts_layer *l,
                        uint64_t i, const qc_experts_states *h, const qc_expert_tokens *tokens,
                        const qc_forward_matrix *shared_gate, qc_error *err)
{
    qc_expert_weights w;
    qc_status st = qc_expert_read(&w, s, l, i, err);
    if (st == QC_OK)
        st = qc_experts_pass(x, &w, h, tokens, shared_gate, err);
    qc_expert_deinit(&w);
    return st;
}

static qc_status run_all(qc_experts_cpu *x, const qc_forward_source *s, const qc_experts_layer *l,
                         const qc_experts_states *h, qc_error *err)
{
    for (uint64_t e = 0; e < l->count; e++) {
        const qc_expert_tokens tokens = qc_experts_tokens(x, e);
        if (tokens.count == 0) {
            for (int i = 0; i < QC_EXPERT_MATRICES; i++)
                qc_progress_add(s->progress, l->experts[e].linear[i].read_bytes);
            continue;
        }
        if (e + 1 < l->count && qc_experts_tokens(x, e + 1).count > 0)
            read_soon(s, &l->experts[e + 1]);
        QC_TRY(stream(x, s, l, e, h, &tokens, NULL, err));
    }
    return QC_OK;
}

static qc_status run_shared(qc_experts_cpu *x, const qc_forward_source *s,
                            const qc_experts_layer *l, const qc_experts_states *h, qc_error *err)
{
    const qc_expert_tokens all = qc_experts_all(x);
    qc_forward_matrix gate = {0};
    qc_status st = QC_OK;
    int has_gate = l->shared_gate.tensor != QC_NO_TENSOR;
    if (!qc_expert_of(l, l->count))
        return QC_OK;
    if (has_gate)
        st = qc_forward_matrix_read(&gate, s, &l->shared_gate, err);
    if (st == QC_OK)
        st = stream(x, s, l, l->count, h, &all, has_gate ? &gate : NULL, err);
    qc_forward_matrix_deinit(&gate);
    return st;
}

qc_status qc_experts_run(qc_experts_cpu *x, const qc_forward_source *s, const qc_experts_layer *l,
                         const float *norm, float *hidden, qc_error *err)
{
    const qc_experts_states h = {hidden, norm};
    qc_router_weights router;
    qc_status st = qc_router_read(&router, s, l, err);
    if (st == QC_OK)
        st = qc_experts_route(x, &router, &h, err);
    qc_router_deinit(&router);
    if (st == QC_OK)
        st = run_all(x, s, l, &h, err);
    if (st == QC_OK)
        st = run_shared(x, s, l, &h, err);
    return st == QC_OK ? qc_experts_leave(x, hidden, err) : st;
}

#include "convert/backward/backward_experts.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "quant/piecework.h"

#include <string.h>

/* ---- buffers ---- */

typedef struct {
    uint64_t middle, back, shares; /* bytes */
} sizes;

static sizes sizes_of(const qc_forward_shape *s, uint64_t tokens)
{
    const qc_experts_shape *x = &s->experts;
    const uint64_t piece = qc_min_u64(tokens, QC_FORWARD_TOKENS) * sizeof(float);
    return (sizes){qc_sat_mul(tokens, s->config.hidden * sizeof(float)),
                   qc_sat_mul(piece, qc_max_u64(x->inner, x->shared)),
                   qc_sat_mul(tokens, x->routing.chosen * sizeof(float))};
}

uint64_t qc_backward_experts_bytes(const qc_forward_shape *s, unsigned threads, uint64_t tokens)
{
    const sizes z = sizes_of(s, tokens);
    return qc_sat_add(qc_experts_bytes(s, threads, tokens, 1),
                      qc_sat_add(z.middle, qc_sat_add(z.back, z.shares)));
}

qc_status qc_backward_experts_create(qc_backward_experts *out, const qc_forward_shape *s,
                                     const qc_forward_tools *tools, uint64_t tokens, qc_error *err)
{
    const sizes z = sizes_of(s, tokens);
    QC_TRY(qc_experts_create(&out->x, s, tools, tokens, NULL, err));
    QC_TRY(qc_forward_cpu_allocate(&out->middle, z.middle, err));
    QC_TRY(qc_forward_cpu_allocate(&out->back, z.back, err));
    return qc_forward_cpu_allocate(&out->shares, z.shares, err);
}

static void drop_layer(qc_backward_experts *e)
{
    qc_router_deinit(&e->router);
    qc_forward_matrix_deinit(&e->shared_gate);
    memset(&e->shared_gate, 0, sizeof e->shared_gate);
}

void qc_backward_experts_deinit(qc_backward_experts *e)
{
    drop_layer(e);
    qc_experts_deinit(&e->x);
    qc_free(e->middle);
    qc_free(e->back);
    qc_free(e->shares);
    memset(e, 0, sizeof *e);
}

/* ---- work by tokens ---- */

/* Some tokens of an expert, or of all that the router sees. */
typedef struct {
    qc_backward_experts *e;
    qc_expert_tokens piece;
    uint64_t first, number; /* of the piece's first token; of the expert */
    const qc_forward_matrix *gate, *down;
    const float *d; /* of the states behind the layer */
    float *becomes; /* of those behind attention */
} work;

static uint64_t place_of(const work *w, uint64_t i)
{
    return w->piece.tokens ? w->piece.tokens[i] : w->first + i;
}

static qc_status by_tokens(work *w, qc_piece_fn fn, qc_error *err)
{
    return qc_piecework(w->e->x.threads, w->piece.count, fn, w, err);
}

/* ---- the router ---- */

void qc_backward_route(const qc_routing *r, const float *scores, const uint32_t *chosen,
                       const float *weights, float *d, float *out)
{
    const int of_chosen = r->scores == QC_SCORES_OF_CHOSEN;
    double sum = of_chosen ? 1.0 : 0.0, along = 0.0;
    for (uint64_t i = 0; i < r->chosen; i++) {
        sum += of_chosen ? 0.0 : (double)scores[chosen[i]];
        along += (double)weights[i] * (double)d[i];
    }
    /* weight = scale score / over */
    const double over = r->normalized ? sum + (double)r->guard : 1.0, scale = (double)r->scale;
    for (uint64_t i = 0; i < r->chosen; i++)
        d[i] = (float)((scale * (double)d[i] - (r->normalized ? along : 0.0)) / over);
    along = 0.0;
    for (uint64_t i = 0; i < r->chosen; i++)
        along += (double)d[i] * (double)weights[i] * over / scale;
    for (uint64_t i = 0; i < r->experts; i++)
        out[i] = r->scores == QC_SCORES_SOFTMAX ? (float)(-along * (double)scores[i]) : 0.0f;
    for (uint64_t i = 0; i < r->chosen; i++) {
        const double own = (double)weights[i] * over / scale; /* the score */
        out[chosen[i]] +=
            (float)(own * (r->scores == QC_SCORES_SOFTMAX   ? (double)d[i]
                           : r->scores == QC_SCORES_SIGMOID ? (1.0 - own) * (double)d[i]
                                                            : (double)d[i] - along));
    }
}

static qc_status route_piece(void *ctx, unsigned thread, uint64_t i, qc_error *err)
{
    const work *w = ctx;
    qc_experts_cpu *x = &w->e->x;
    const qc_routing *r = &x->shape->experts.routing;
    const uint64_t at = (w->first + i) * r->chosen;
    float *logits = x->logits + i * r->experts, *scores = x->room + thread * qc_route_room(r);
    (void)err;
    qc_route_token(r, x->decoder, logits, w->e->router.correction, scores, x->chosen + at,
                   x->weights + at);
    qc_backward_route(r, scores, x->chosen + at, x->weights + at, w->e->shares + at, logits);
    return QC_OK;
}

static qc_status norm_piece(void *ctx, unsigned thread, uint64_t i, qc_error *err)
{
    const work *w = ctx;
    const qc_forward_config *c = &w->e->x.shape->config;
    const uint64_t at = (w->first + i) * c->hidden;
    float *g = w->e->x.sum + at, *d = w->becomes + at;
    (void)thread;
    qc_gradient_norm(w->e->middle + at, w->e->norm, g, c->hidden, (float)c->norm_eps, g);
    for (uint64_t k = 0; k < c->hidden; k++)
        d[k] += g[k];
    return qc_forward_finite(d, c->hidden, err);
}

qc_status qc_backward_experts_begin(qc_backward_experts *e, const qc_forward_source *s,
                                    const qc_experts_layer *l, const float *norm, qc_error *err)
{
    const qc_experts_states h = {e->middle, norm};
    e->norm = norm;
    QC_TRY(qc_router_read(&e->router, s, l, err));
    if (l->shared_gate.tensor != QC_NO_TENSOR)
        QC_TRY(qc_forward_matrix_read(&e->shared_gate, s, &l->shared_gate, err));
    return qc_experts_route(&e->x, &e->router, &h, err);
}

qc_status qc_backward_experts_end(qc_backward_experts *e, const qc_backward_layer *b, float *d,
                                  qc_error *err)
{
    qc_experts_cpu *x = &e->x;
    const qc_experts_states h = {e->middle, e->norm};
    const qc_forward_matrix *router = &e->router.router;
    const qc_expert_tokens all = qc_experts_all(x);
    work w = {.e = e, .becomes = d};
    for (; w.first < x->tokens; w.first += QC_FORWARD_TOKENS) {
        w.piece = qc_experts_piece(&all, w.first);
        const qc_gradient_product p = {.dy = x->logits,
                                       .dx = x->sum + w.first * router->cols,
                                       .tokens = w.piece.count,
                                       .dy_stride = router->rows,
                                       .dx_stride = router->cols};
        QC_TRY(qc_experts_inputs(x, &h, &w.piece, w.first, err));
        QC_TRY(qc_forward_cpu_matmul(x->matmul, x->threads, router, x->x, w.piece.count, x->logits,
                                     err));
        QC_TRY(by_tokens(&w, route_piece, err));
        QC_TRY(qc_backward_inputs(b, x->threads, router, &p, err));
        QC_TRY(by_tokens(&w, norm_piece, err));
    }
    drop_layer(e);
    return QC_OK;
}

/* ---- an expert ---- */

qc_expert_tokens qc_backward_expert_tokens(const qc_backward_experts *e, uint64_t i)
{
    return i < e->x.shape->experts.routing.experts ? qc_experts_tokens(&e->x, i)
                                                   : qc_experts_all(&e->x);
}

static qc_status gather_piece(void *ctx, unsigned thread, uint64_t i, qc_error *err)
{
    const work *w = ctx;
    const uint64_t n = w->down->rows;
    (void)thread;
    (void)err;
    memcpy(w->e->x.y + i * n, w->d + place_of(w, i) * n, (size_t)n * sizeof(float));
    return QC_OK;
}

static void scale(float *x, uint64_t n, float by)
{
    for (uint64_t i = 0; i < n; i++)
        x[i] *= by;
}

/* back, the gradients of the inputs of down as if the expert counted 1 -> gate and up, and y, those
 * of all three matrices' outputs as much as it counts; and that of the weight, or of the logit of
 * the shared gate. */
static qc_status gates_piece(void *ctx, unsigned thread, uint64_t i, qc_error *err)
{
    const work *w = ctx;
    qc_experts_cpu *x = &w->e->x;
    const qc_experts_shape *s = &x->shape->experts;
    const uint64_t inner = w->down->cols, n = w->down->rows, rows = w->gate->rows;
    float *gate = x->gate + i * rows, *up = x->up + i * inner, *y = x->y + i * n;
    const float *back = w->e->back + i * inner;
    (void)thread;
    (void)err;
    double along = s->clamped ? qc_gradient_clamped_gates(gate, s->limit, s->alpha, back, inner)
                              : qc_gradient_gates(QC_GRADIENT_SILU, gate, up, back, inner);
    for (uint64_t k = 0; w->down->bias && k < n; k++)
        along += (double)y[k] * (double)w->down->bias[k];
    float share = 1.0f;
    if (w->piece.weights) {
        const uint64_t at = place_of(w, i) * s->routing.chosen;
        uint64_t k = 0;
        while (x->chosen[at + k] != w->number)
            k++;
        w->e->shares[at + k] = (float)along;
        share = w->piece.weights[i];
    } else if (w->e->shared_gate.rows > 0) {
        share = x->shares[i];
        x->shares[i] = (float)(along * (double)share * (1.0 - (double)share));
    }
    scale(gate, rows, share);
    scale(y, n, share);
    if (!s->clamped)
        scale(up, inner, share);
    return QC_OK;
}

static qc_status add_piece(void *ctx, unsigned thread, uint64_t i, qc_error *err)
{
    const work *w = ctx;
    const uint64_t n = w->down->rows;
    float *sum = w->e->x.sum + place_of(w, i) * n;
    const float *x = w->e->x.x + i * n;
    (void)thread;
    (void)err;
    for (uint64_t k = 0; k < n; k++)
        sum[k] += x[k];
    return QC_OK;
}

/* dx += dy W, for the tokens of a piece */
static qc_status inputs(const work *w, const qc_backward_layer *b, const qc_forward_matrix *m,
                        const float *dy, float *dx, qc_error *err)
{
    const qc_gradient_product p = {
        .dy = dy, .dx = dx, .tokens = w->piece.count, .dy_stride = m->rows, .dx_stride = m->cols};
    return qc_backward_inputs(b, w->e->x.threads, m, &p, err);
}

static qc_status back_piece(work *w, const qc_backward_layer *b, const qc_expert_weights *own,
                            qc_error *err)
{
    qc_experts_cpu *x = &w->e->x;
    const qc_experts_states h = {w->e->middle, w->e->norm};
    const uint64_t n = w->piece.count, hidden = w->down->rows, inner = w->down->cols;
    const int shared = w->piece.weights == NULL && w->e->shared_gate.rows > 0;
    float *const outputs[QC_EXPERT_MATRICES] = {x->gate, x->up, x->y};
    QC_TRY(qc_experts_inputs(x, &h, &w->piece, w->first, err));
    for (int i = 0; i < QC_EXPERT_DOWN; i++)
        if (own->matrices[i].rows > 0)
            QC_TRY(qc_forward_cpu_matmul(x->matmul, x->threads, &own->matrices[i], x->x, n,
                                         outputs[i], err));
    if (shared)
        QC_TRY(qc_experts_shares(x, &w->e->shared_gate, n, err));
    QC_TRY(by_tokens(w, gather_piece, err));
    memset(w->e->back, 0, (size_t)(n * inner) * sizeof *w->e->back);
    QC_TRY(inputs(w, b, w->down, x->y, w->e->back, err));
    QC_TRY(by_tokens(w, gates_piece, err));
    memset(x->x, 0, (size_t)(n * hidden) * sizeof *x->x);
    for (int i = 0; i < QC_EXPERT_MATRICES; i++) {
        const qc_forward_matrix *m = &own->matrices[i];
        if (m->rows == 0)
            continue;
        QC_TRY(b->take(b->ctx, qc_expert_number(w->number, i), outputs[i], m->rows, n, err));
        if (i != QC_EXPERT_DOWN)
            QC_TRY(inputs(w, b, m, outputs[i], x->x, err));
    }
    if (shared)
        QC_TRY(inputs(w, b, &w->e->shared_gate, x->shares, x->x, err));
    return by_tokens(w, add_piece, err);
}

qc_status qc_backward_expert(qc_backward_experts *e, const qc_backward_layer *b,
                             const qc_forward_source *s, const qc_experts_layer *l, uint64_t i,
                             const float *d, qc_error *err)
{
    const qc_expert_tokens tokens = qc_backward_expert_tokens(e, i);
    qc_expert_weights own;
    qc_status st = qc_expert_read(&own, s, l, i, err);
    work w = {.e = e,
              .number = i,
              .gate = &own.matrices[QC_EXPERT_GATE],
              .down = &own.matrices[QC_EXPERT_DOWN],
              .d = d};
    for (; st == QC_OK && w.first < tokens.count; w.first += QC_FORWARD_TOKENS) {
        w.piece = qc_experts_piece(&tokens, w.first);
        st = back_piece(&w, b, &own, err);
    }
    qc_expert_deinit(&own);
    return st;
}

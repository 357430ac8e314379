#include "convert/backward/backward.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/backward/backward_experts.h"
#include "convert/family/family.h"
#include "convert/term/scratch_memory.h"
#include "quant/piecework.h"
#include "quant/second_moments.h"

#include <inttypes.h>
#include <string.h>

#define LOGITS_MOST ((uint64_t)1 << 24) /* at a time */
#define HEAD_TOKENS 256u                /* of the same, at most */

struct qc_backward {
    uint64_t layers, block;
    uint64_t *firsts; /* [layers + 1]: where a layer begins in the two lists below */
    uint64_t *places; /* floats from the start; UINT64_MAX: none */
    uint64_t *tokens;
    qc_scratch_memory moments;
};

typedef struct {
    const qc_backward_task *task;
    qc_backward *out;
    uint64_t hidden, tokens;
    uint64_t first; /* the first layer of which something is wanted */
    qc_forward_cpu cpu;
    qc_backward_layer back;
    qc_backward_experts experts; /* of a mixture */
    qc_scratch_memory states;    /* the inputs of layers `first` .. and what the last gives */
    float *d;                    /* [tokens, hidden] */
    /* Of the linear layers at hand, which are numbered from `from` on; NULL: not wanted. */
    double *sums[QC_LAYER_ALL_MATRICES];
    uint64_t layer, from;
} run;

const char *qc_backward_not_made(const qc_forward_shape *s)
{
    return s->config.encoder ? "it has no head that says what it answers"
           : s->cross        ? "its layers look at images"
                             : NULL;
}

/* ---- the linear layers of a layer ---- */

uint64_t qc_backward_count(const qc_forward_tensors *t, uint64_t layer)
{
    const qc_experts_layer *l = t->layers[layer].experts;
    return l ? qc_expert_number(l->count + 1, 0) : QC_LAYER_ALL_MATRICES;
}

const qc_forward_linear *qc_backward_linear(const qc_forward_tensors *t, uint64_t layer,
                                            uint64_t which)
{
    static const qc_expert_linears none;
    if (which < QC_LAYER_ALL_MATRICES)
        return &t->layers[layer].linear[which];
    const uint64_t i = which - QC_LAYER_ALL_MATRICES;
    const qc_expert_linears *x = qc_expert_of(t->layers[layer].experts, i / QC_EXPERT_MATRICES);
    return &(x ? x : &none)->linear[i % QC_EXPERT_MATRICES];
}

/* The tokens that are expected to reach it. */
static double expected(const qc_backward_task *t, uint64_t layer, uint64_t which)
{
    const qc_experts_layer *l = t->tensors->layers[layer].experts;
    const double tokens = (double)t->batch->tokens;
    return which < QC_LAYER_ALL_MATRICES || which >= qc_expert_number(l->count, 0)
               ? tokens
               : tokens * (double)t->tensors->shape.experts.routing.chosen / (double)l->count;
}

/* ---- sizes ---- */

static uint64_t outputs(const qc_backward_task *t, uint64_t layer, uint64_t which)
{
    return qc_backward_linear(t->tensors, layer, which)->rows;
}

static uint64_t floats_of(const qc_backward_task *t, uint64_t layer, uint64_t which)
{
    const uint64_t rows = outputs(t, layer, which);
    const uint64_t block = qc_min_u64(t->block, rows);
    if (rows == 0 || !t->wants(t->ctx, layer, which))
        return 0;
    return qc_sat_mul(qc_ceil_div_u64(rows, block), qc_sat_mul(block, block));
}

static uint64_t first_of(const qc_backward_task *t)
{
    uint64_t first = 0;
    for (; first < t->tensors->shape.config.layers; first++)
        for (uint64_t i = 0; i < qc_backward_count(t->tensors, first); i++)
            if (floats_of(t, first, i) > 0)
                return first;
    return first;
}

/* The states of layers `first` .. and behind the last one. */
static uint64_t states_bytes(const qc_backward_task *t, uint64_t first)
{
    const qc_forward_config *c = &t->tensors->shape.config;
    return qc_sat_mul(qc_sat_mul(t->batch->tokens, c->layers - first + 1),
                      c->hidden * sizeof(float));
}

static uint64_t head_tokens(const qc_forward_shape *s)
{
    return qc_max_u64(1, qc_min_u64(HEAD_TOKENS, LOGITS_MOST / s->config.vocabulary));
}

/* The operations of a layer on the way forward and on the way back, for all tokens. */
typedef struct {
    double forward, back;
} work;

/* On the way back a layer is computed once more; of a mixture attention even twice, and of experts
 * what down gives is not. */
static work layer_ahead(const qc_backward_task *t, uint64_t layer)
{
    const qc_experts_layer *l = t->tensors->layers[layer].experts;
    const double tokens = (double)t->batch->tokens;
    const double attention = 2.0 * tokens * (double)qc_forward_longest(t->batch) *
                             (double)qc_forward_attended(&t->tensors->shape);
    work all = {attention, (l ? 3.0 : 2.0) * attention};
    if (l) {
        const double router = 2.0 * tokens * (double)l->router.rows * (double)l->router.cols;
        all = (work){all.forward + router, all.back + 3.0 * router};
    }
    for (uint64_t i = 0; i < qc_backward_count(t->tensors, layer); i++) {
        const qc_forward_linear *w = qc_backward_linear(t->tensors, layer, i);
        const double own = expected(t, layer, i);
        const double pass = 2.0 * own * (double)w->rows * (double)w->cols;
        const int down = (i - QC_LAYER_ALL_MATRICES) % QC_EXPERT_MATRICES == QC_EXPERT_DOWN;
        const double times = i < QC_LAYER_ALL_MATRICES ? (l ? 3.0 : 2.0) : down ? 1.0 : 2.0;
        all.forward += pass;
        all.back += times * pass;
        if (floats_of(t, layer, i) > 0)
            all.back += own * (double)w->rows * (double)qc_min_u64(t->block, w->rows);
    }
    return all;
}

/* The bytes of the sums that are made at a time, and floats of all moments. */
static uint64_t sums_of(const qc_backward_task *t, uint64_t layer, uint64_t *floats)
{
    uint64_t most = 0, at = 0;
    for (uint64_t i = 0; i < qc_backward_count(t->tensors, layer); i++) {
        const uint64_t own = floats_of(t, layer, i);
        const int first =
            i >= QC_LAYER_ALL_MATRICES && (i - QC_LAYER_ALL_MATRICES) % QC_EXPERT_MATRICES == 0;
        at = qc_sat_add(first ? 0 : at, own);
        most = qc_max_u64(most, at);
        *floats = qc_sat_add(*floats, own);
    }
    return qc_sat_mul(most, sizeof(double));
}

static double head_ahead(const qc_backward_task *t)
{
    const qc_forward_config *c = &t->tensors->shape.config;
    return 4.0 * (double)t->batch->tokens * (double)c->vocabulary * (double)c->hidden;
}

qc_backward_outlook qc_backward_ahead(const qc_backward_task *t)
{
    const qc_forward_shape *s = &t->tensors->shape;
    const uint64_t first = first_of(t), longest = qc_forward_longest(t->batch);
    const uint64_t tokens = t->batch->tokens;
    qc_backward_outlook a = {0};
    uint64_t floats = 0, most = t->tensors->head.memory_bytes;
    if (first == s->config.layers)
        return a;
    a.operations = head_ahead(t);
    for (uint64_t l = 0; l < s->config.layers; l++) {
        const work all = layer_ahead(t, l);
        a.operations += all.forward + (l < first ? 0.0 : all.back);
        most = qc_max_u64(most,
                          qc_sat_add(t->tensors->layers[l].memory_bytes, sums_of(t, l, &floats)));
    }
    const uint64_t files[] = {states_bytes(t, first), qc_sat_mul(floats, sizeof(float))};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        uint64_t *to = files[i] > t->memory ? &a.disk : &a.memory;
        *to = qc_sat_add(*to, files[i]);
    }
    a.kept = files[1] > t->memory ? 0 : files[1];
    a.memory = qc_sat_add(a.memory, most);
    a.memory = qc_sat_add(a.memory, qc_sat_mul(tokens, s->config.hidden * sizeof(float)));
    if (s->experts.names)
        a.memory = qc_sat_add(a.memory, qc_backward_experts_bytes(s, t->tools.threads, tokens));
    a.memory = qc_sat_add(a.memory, qc_forward_cpu_bytes(s, t->tools.threads, tokens, longest));
    a.memory = qc_sat_add(a.memory, qc_backward_layer_bytes(s, t->tools.threads, tokens, longest));
    return a;
}

/* ---- moments ---- */

static qc_status open_moments(run *r, qc_error *err)
{
    const qc_backward_task *t = r->task;
    qc_backward *b = r->out;
    uint64_t at = 0;
    QC_TRY(qc_calloc(&b->firsts, b->layers + 1, sizeof *b->firsts, err));
    for (uint64_t l = 0; l < b->layers; l++)
        b->firsts[l + 1] = b->firsts[l] + qc_backward_count(t->tensors, l);
    QC_TRY(qc_calloc(&b->places, b->firsts[b->layers], sizeof *b->places, err));
    QC_TRY(qc_calloc(&b->tokens, b->firsts[b->layers], sizeof *b->tokens, err));
    for (uint64_t l = 0; l < b->layers; l++)
        for (uint64_t i = 0; i < qc_backward_count(t->tensors, l); i++) {
            const uint64_t floats = floats_of(t, l, i);
            b->places[b->firsts[l] + i] = floats ? at : UINT64_MAX;
            at = qc_sat_add(at, floats);
        }
    return qc_scratch_memory_open(&b->moments, qc_sat_mul(at, sizeof(float)), t->memory, t->folder,
                                  "moments of gradients", QC_BACKWARD_WITHOUT, err);
}

/* Makes room for the sums of `count` linear layers. */
static qc_status open_sums(run *r, uint64_t from, unsigned count, qc_error *err)
{
    r->from = from;
    for (unsigned i = 0; i < count; i++) {
        size_t floats = 0;
        if (qc_u64_to_size(floats_of(r->task, r->layer, from + i), &floats))
            QC_FAIL(err, QC_ERR_NOMEM, "moments of gradients are too large for this machine");
        if (floats > 0)
            QC_TRY(qc_calloc(&r->sums[i], floats, sizeof(double), err));
    }
    return QC_OK;
}

static qc_status take(void *ctx, uint64_t which, const float *g, uint64_t ld, uint64_t tokens,
                      qc_error *err)
{
    run *r = ctx;
    const uint64_t rows = outputs(r->task, r->layer, which);
    const uint64_t block = qc_min_u64(r->task->block, rows);
    double *sums = r->sums[which - r->from];
    for (uint64_t at = 0; sums && at < rows; at += block, sums += block * block)
        QC_TRY(qc_moments_add(r->task->blas, r->cpu.threads, sums, NULL,
                              qc_min_u64(block, rows - at), g + at, ld, NULL, 0, tokens, err));
    return QC_OK;
}

/* sums [n, n], of which the lower triangle counts -> out [block, block]. */
static void write_block(const double *sums, uint64_t n, uint64_t block, uint64_t tokens, float *out)
{
    memset(out, 0, (size_t)(block * block) * sizeof *out);
    for (uint64_t i = 0; i < n; i++)
        for (uint64_t j = 0; j <= i; j++)
            out[i * block + j] = out[j * block + i] = (float)(sums[i * n + j] / (double)tokens);
}

static void write_sums(run *r, unsigned i, uint64_t tokens)
{
    qc_backward *b = r->out;
    const uint64_t slot = b->firsts[r->layer] + r->from + i;
    const uint64_t rows = outputs(r->task, r->layer, r->from + i);
    const uint64_t block = qc_min_u64(r->task->block, rows);
    const double *sums = r->sums[i];
    float *out = (float *)b->moments.base + b->places[slot];
    b->tokens[slot] = tokens;
    for (uint64_t at = 0; at < rows; at += block, sums += block * block, out += block * block)
        write_block(sums, qc_min_u64(block, rows - at), block, tokens, out);
}

/* Writes the moments, which are of so many tokens, and frees the sums. tokens 0: it only frees. */
static void close_sums(run *r, uint64_t tokens)
{
    for (unsigned i = 0; i < QC_LAYER_ALL_MATRICES; i++) {
        if (r->sums[i] && tokens > 0)
            write_sums(r, i, tokens);
        qc_free(r->sums[i]);
        r->sums[i] = NULL;
    }
}

/* ---- the way forward ---- */

static float *states_of(const run *r, uint64_t layer)
{
    return (float *)r->states.base + (layer - r->first) * r->tokens * r->hidden;
}

static qc_status named(const run *r, qc_status st, uint64_t layer, qc_error *err)
{
    if (st == QC_ERR_NONFINITE)
        qc_error_prefix(err, "gradients of layer %" PRIu64,
                        qc_layer_number(&r->task->tensors->shape, layer));
    return st;
}

static qc_status pass_layer(run *r, uint64_t layer, float *hidden, qc_error *err)
{
    const qc_backward_task *t = r->task;
    const qc_experts_layer *experts = t->tensors->layers[layer].experts;
    qc_forward_weights w = {0};
    qc_status st = qc_forward_weights_read(&w, t->source, &t->tensors->layers[layer], err);
    if (st == QC_OK)
        st = qc_forward_cpu_layer(&r->cpu, &w, layer, hidden, err);
    if (st == QC_OK && experts)
        st = qc_experts_run(&r->experts.x, t->source, experts, w.vectors[QC_LAYER_POST_NORM],
                            hidden, err);
    qc_forward_weights_deinit(&w);
    t->did(t->ctx, layer_ahead(t, layer).forward);
    return named(r, st, layer, err);
}

static qc_status go_forward(run *r, qc_error *err)
{
    const qc_backward_task *t = r->task;
    const size_t bytes = (size_t)(r->tokens * r->hidden) * sizeof(float);
    QC_TRY(qc_forward_embed(t->source, t->tensors, t->batch, states_of(r, r->first), err));
    for (uint64_t i = 0; i < r->out->layers; i++) {
        float *hidden = states_of(r, i < r->first ? r->first : i);
        if (i >= r->first) {
            hidden += r->tokens * r->hidden;
            memcpy(hidden, states_of(r, i), bytes);
        }
        QC_TRY(pass_layer(r, i, hidden, err));
    }
    return QC_OK;
}

/* ---- the head ---- */

/* A group of tokens behind the last layer. */
typedef struct {
    run *r;
    const float *norm, *hidden; /* norm: NULL if there is none */
    float *normed, *d;          /* the inputs of the head; gradients of hidden */
    float *logits, *capped;     /* capped: the same again; NULL: they are not capped */
    uint64_t first, count;
} ending;

/* Logits -> their gradient. */
static qc_status sample_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    const ending *e = ctx;
    const qc_forward_shape *s = &e->r->task->tensors->shape;
    const uint64_t n = s->config.vocabulary;
    const float over = 1.0f / (float)s->logit_divisor, cap = (float)s->logit_cap;
    float *x = e->logits + token * n;
    const float *capped = e->capped + (e->capped ? token * n : 0);
    (void)thread;
    const double uniform = qc_gradient_uniform(e->first + token);
    if (qc_gradient_sampled(e->r->cpu.decoder, x, n, uniform) == n)
        QC_FAIL(err, QC_ERR_NONFINITE, "the logits are not finite");
    for (uint64_t i = 0; e->capped && i < n; i++)
        x[i] *= 1.0f - capped[i] / cap * (capped[i] / cap);
    for (uint64_t i = 0; over != 1.0f && i < n; i++)
        x[i] *= over;
    return QC_OK;
}

/* The gradient of the head's inputs -> that of the states behind the last layer. */
static qc_status last_norm_piece(void *ctx, unsigned thread, uint64_t token, qc_error *err)
{
    const ending *e = ctx;
    const qc_forward_shape *s = &e->r->task->tensors->shape;
    const uint64_t n = s->config.hidden;
    const float *x = e->hidden + token * n;
    float *d = e->d + token * n;
    (void)thread;
    (void)err;
    if (e->norm && s->family->traits & QC_FAMILY_LAYER_NORMS)
        qc_gradient_layer_norm(x, e->norm, d, n, (float)s->config.norm_eps, d);
    else if (e->norm)
        qc_gradient_norm(x, e->norm, d, n, (float)s->config.norm_eps, d);
    return QC_OK;
}

static qc_status back_group(ending *e, const qc_forward_matrix *head, qc_error *err)
{
    run *r = e->r;
    const qc_backward_task *t = r->task;
    const unsigned threads = r->cpu.threads;
    const uint64_t n = t->tensors->shape.config.vocabulary;
    const qc_gradient_product p = {
        .dy = e->logits, .dx = e->d, .tokens = e->count, .dy_stride = n, .dx_stride = r->hidden};
    memcpy(e->normed, e->hidden, (size_t)(e->count * r->hidden) * sizeof *e->normed);
    r->cpu.batch.tokens = e->count; /* of which the norm is made */
    qc_status st = qc_forward_cpu_norm(&r->cpu, e->norm, e->normed, err);
    r->cpu.batch.tokens = r->tokens;
    QC_TRY(st);
    QC_TRY(
        qc_forward_cpu_matmul(r->cpu.matmul, threads, head, e->normed, e->count, e->logits, err));
    QC_TRY(qc_forward_cpu_finish_logits(&t->tensors->shape, &t->tools, e->logits, e->count, err));
    if (e->capped)
        memcpy(e->capped, e->logits, (size_t)(e->count * n) * sizeof *e->logits);
    QC_TRY(qc_piecework(threads, e->count, sample_piece, e, err));
    memset(e->d, 0, (size_t)(e->count * r->hidden) * sizeof *e->d);
    QC_TRY(qc_backward_inputs(&r->back, threads, head, &p, err));
    return qc_piecework(threads, e->count, last_norm_piece, e, err);
}

static qc_status back_groups(run *r, ending *e, const qc_forward_matrix *head, qc_error *err)
{
    const qc_backward_task *t = r->task;
    const qc_forward_shape *s = &t->tensors->shape;
    const uint64_t most = head_tokens(s), bytes = most * s->config.vocabulary * sizeof(float);
    QC_TRY(qc_forward_cpu_allocate(&e->logits, bytes, err));
    QC_TRY(qc_forward_cpu_allocate(&e->normed, most * r->hidden * sizeof(float), err));
    if (s->logit_cap > 0.0)
        QC_TRY(qc_forward_cpu_allocate(&e->capped, bytes, err));
    for (; e->first < r->tokens; e->first += e->count) {
        e->count = qc_min_u64(most, r->tokens - e->first);
        e->hidden = states_of(r, r->out->layers) + e->first * r->hidden;
        e->d = r->d + e->first * r->hidden;
        QC_TRY(back_group(e, head, err));
        t->did(t->ctx, head_ahead(t) * (double)e->count / (double)r->tokens);
    }
    return QC_OK;
}

static qc_status back_head(run *r, qc_error *err)
{
    const qc_backward_task *t = r->task;
    ending e = {.r = r};
    qc_forward_matrix head = {0};
    float *norm = NULL;
    qc_status st = qc_forward_last_norm_read(&norm, t->source, t->tensors, err);
    e.norm = norm;
    if (st == QC_OK)
        st = qc_forward_matrix_read(&head, t->source, &t->tensors->head, err);
    if (st == QC_OK)
        st = back_groups(r, &e, &head, err);
    qc_free(norm);
    qc_free(e.logits);
    qc_free(e.normed);
    qc_free(e.capped);
    qc_forward_matrix_deinit(&head);
    return st;
}

/* ---- the way back ---- */

static qc_status back_expert(run *r, const qc_experts_layer *l, uint64_t i, qc_error *err)
{
    const uint64_t tokens = qc_backward_expert_tokens(&r->experts, i).count;
    if (tokens == 0 || !qc_expert_of(l, i))
        return QC_OK;
    qc_status st = open_sums(r, qc_expert_number(i, 0), QC_EXPERT_MATRICES, err);
    if (st == QC_OK)
        st = qc_backward_expert(&r->experts, &r->back, r->task->source, l, i, r->d, err);
    close_sums(r, st == QC_OK ? tokens : 0);
    qc_alloc_trim(); /* else the heap grows with the number of experts */
    return st;
}

/* The gradient behind the layer -> that behind attention. */
static qc_status back_experts(run *r, const qc_forward_weights *w, uint64_t layer, qc_error *err)
{
    qc_backward_experts *e = &r->experts;
    const qc_forward_source *s = r->task->source;
    const qc_experts_layer *l = r->task->tensors->layers[layer].experts;
    memcpy(e->middle, states_of(r, layer), (size_t)(r->tokens * r->hidden) * sizeof *e->middle);
    QC_TRY(qc_forward_cpu_layer(&r->cpu, w, layer, e->middle, err));
    QC_TRY(qc_backward_experts_begin(e, s, l, w->vectors[QC_LAYER_POST_NORM], err));
    for (uint64_t i = 0; i <= l->count; i++)
        QC_TRY(back_expert(r, l, i, err));
    return qc_backward_experts_end(e, &r->back, r->d, err);
}

static qc_status back_layer(run *r, uint64_t layer, qc_error *err)
{
    const qc_backward_task *t = r->task;
    qc_forward_weights w = {0};
    r->layer = layer;
    qc_status st = qc_forward_weights_read(&w, t->source, &t->tensors->layers[layer], err);
    if (st == QC_OK && t->tensors->layers[layer].experts)
        st = back_experts(r, &w, layer, err);
    if (st == QC_OK)
        st = open_sums(r, 0, QC_LAYER_ALL_MATRICES, err);
    if (st == QC_OK) {
        const qc_forward_pass p = {.w = &w, .layer = layer, .hidden = states_of(r, layer)};
        st = qc_backward_layer_run(&r->back, &r->cpu, &p, r->d, err);
    }
    close_sums(r, st == QC_OK ? r->tokens : 0);
    qc_forward_weights_deinit(&w);
    t->did(t->ctx, layer_ahead(t, layer).back);
    return named(r, st, layer, err);
}

static qc_status go_back(run *r, qc_error *err)
{
    QC_TRY(back_head(r, err));
    for (uint64_t i = r->out->layers; i-- > r->first;)
        QC_TRY(back_layer(r, i, err));
    return QC_OK;
}

/* ---- all of it ---- */

static qc_status open_run(run *r, qc_error *err)
{
    const qc_backward_task *t = r->task;
    r->back.blas = t->blas;
    r->back.ops = t->source->ops;
    r->back.take = take;
    r->back.ctx = r;
    QC_TRY(open_moments(r, err));
    QC_TRY(qc_scratch_memory_open(&r->states, states_bytes(t, r->first), t->memory, t->folder,
                                  "hidden states of all layers", QC_BACKWARD_FEWER, err));
    QC_TRY(qc_forward_cpu_allocate(&r->d, qc_sat_mul(r->tokens, r->hidden * sizeof(float)), err));
    QC_TRY(qc_forward_cpu_create(&r->cpu, &t->tensors->shape, &t->tools, t->batch, err));
    if (t->tensors->shape.experts.names)
        QC_TRY(
            qc_backward_experts_create(&r->experts, &t->tensors->shape, &t->tools, r->tokens, err));
    return qc_backward_layer_create(&r->back, &r->cpu, err);
}

qc_status qc_backward_run(qc_backward **out, const qc_backward_task *t, qc_error *err)
{
    run r = {.task = t, .hidden = t->tensors->shape.config.hidden, .tokens = t->batch->tokens};
    *out = NULL;
    QC_TRY(qc_calloc(&r.out, 1, sizeof *r.out, err));
    r.out->layers = t->tensors->shape.config.layers;
    r.first = first_of(t);
    qc_status st = open_run(&r, err);
    if (st == QC_OK)
        st = go_forward(&r, err);
    if (st == QC_OK)
        st = go_back(&r, err);
    qc_backward_experts_deinit(&r.experts);
    qc_backward_layer_deinit(&r.back);
    qc_forward_cpu_deinit(&r.cpu);
    qc_scratch_memory_close(&r.states);
    qc_free(r.d);
    if (st == QC_OK)
        *out = r.out;
    else
        qc_backward_close(r.out);
    return st;
}

void qc_backward_close(qc_backward *b)
{
    if (!b)
        return;
    qc_free(b->firsts);
    qc_free(b->places);
    qc_free(b->tokens);
    qc_scratch_memory_close(&b->moments);
    qc_free(b);
}

const float *qc_backward_moments(const qc_backward *b, uint64_t layer, uint64_t which)
{
    const uint64_t slot = b->firsts[layer] + which;
    return b->tokens[slot] ? (const float *)b->moments.base + b->places[slot] : NULL;
}

uint64_t qc_backward_tokens(const qc_backward *b, uint64_t layer, uint64_t which)
{
    return b->tokens[b->firsts[layer] + which];
}

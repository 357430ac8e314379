#include "convert/forward/forward_cpu.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/family/family.h"
#include "convert/forward/forward_phases.h"
#include "quant/piecework.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define TOKEN_GRAIN 8u   /* tokens that a thread takes at a time */
#define ROW_GRAIN   128u /* rows of weights, at most */
#define ROW_STEP    4u   /* how many rows the matmuls decode together */
#define ALIGNMENT   64u

/* ---- sharing work ---- */

typedef struct {
    qc_phase_fn fn;
    void *ctx;
    uint64_t total, grain;
} phase;

static qc_status take(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const phase *p = ctx;
    uint64_t first = piece * p->grain, left = p->total - first;
    return p->fn(p->ctx, thread, first, left < p->grain ? left : p->grain, err);
}

static qc_status share(unsigned threads, uint64_t total, uint64_t grain, qc_phase_fn fn, void *ctx,
                       qc_error *err)
{
    phase p = {.fn = fn, .ctx = ctx, .total = total, .grain = grain};
    return qc_piecework(threads, qc_ceil_div_u64(total, grain), take, &p, err);
}

/* ---- matmuls ---- */

#define MOST_MATRICES 3u

/* Matrices with the same number of columns that are multiplied with the same x. The work is shared
 * as if their rows were those of one matrix. */
typedef struct {
    const qc_matmul_ops *ops;
    const qc_forward_matrix *w[MOST_MATRICES];
    float *y[MOST_MATRICES];
    unsigned count;
    const float *x;
    uint64_t n, ldx, ldy;
    unsigned char *scratch;
    uint64_t scratch_each;
} product;

static qc_status multiply(void *ctx, unsigned thread, uint64_t first, uint64_t count, qc_error *err)
{
    const product *p = ctx;
    void *scratch = p->scratch + thread * p->scratch_each;
    (void)err;
    for (unsigned i = 0; i < p->count && count > 0; i++) {
        const qc_forward_matrix *w = p->w[i];
        if (first >= w->rows) {
            first -= w->rows;
            continue;
        }
        uint64_t n = w->rows - first < count ? w->rows - first : count;
        const qc_matmul_cpu_io io = {.x = p->x,
                                     .x_dtype = QC_DTYPE_F32,
                                     .m = p->n,
                                     .ldx = p->ldx,
                                     .y = p->y[i],
                                     .y_dtype = QC_DTYPE_F32,
                                     .ldy = p->ldy,
                                     .bias = w->bias};
        if (w->quantized)
            qc_matmul_cpu_quantized(p->ops, w->quantized, first, n, &io, scratch);
        else
            qc_matmul_cpu_dense(p->ops, w->dense, w->dtype, w->cols, first, n, &io, scratch);
        first = 0;
        count -= n;
    }
    return QC_OK;
}

static qc_status run_product(product *p, unsigned threads, qc_error *err)
{
    uint64_t rows = 0;
    for (unsigned i = 0; i < p->count; i++)
        rows += p->w[i]->rows;
    uint64_t grain = rows / (threads * 4u) / ROW_STEP * ROW_STEP;
    grain = grain < ROW_STEP ? ROW_STEP : grain > ROW_GRAIN ? ROW_GRAIN : grain;
    return share(threads, rows, grain, multiply, p, err);
}

qc_status qc_forward_cpu_allocate(void *out, uint64_t bytes, qc_error *err)
{
    size_t size = 0;
    void *v = NULL;
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the batch is too large for memory");
    QC_TRY(qc_malloc_aligned(&v, ALIGNMENT, size, err));
    memcpy(out, &v, sizeof v);
    return QC_OK;
}

qc_status qc_forward_cpu_matmul(const qc_matmul_ops *ops, unsigned threads,
                                const qc_forward_matrix *w, const float *x, uint64_t n, float *y,
                                qc_error *err)
{
    product p = {.ops = ops,
                 .w = {w},
                 .y = {y},
                 .count = 1,
                 .x = x,
                 .n = n,
                 .ldx = w->cols,
                 .ldy = w->rows,
                 .scratch_each = qc_align_u64(qc_matmul_cpu_scratch_bytes(n, w->cols), ALIGNMENT)};
    QC_TRY(qc_forward_cpu_allocate(&p.scratch, qc_sat_mul(p.scratch_each, threads), err));
    qc_status st = run_product(&p, threads, err);
    qc_free(p.scratch);
    return st;
}

/* ---- buffers ---- */

typedef struct {
    uint64_t q, k, v; /* floats of all heads of one token */
    uint64_t qkv;
    uint64_t latents; /* floats of a token in d */
    uint64_t ffn;     /* floats of a token's gate and up */
    uint64_t tokens;  /* in work */
    uint64_t a, b, c, d, table, scratch_each;
} sizes;

static sizes sizes_of(const qc_forward_shape *s, uint64_t tokens, uint64_t longest)
{
    const qc_forward_config *c = &s->config;
    uint64_t group = c->heads / c->kv_heads;
    sizes z = {.q = c->heads * c->head_dim,
               .k = c->kv_heads * c->head_dim,
               .v = c->kv_heads * s->value_dim};
    z.qkv = z.q + z.k + z.v;
    z.ffn = c->intermediate * (s->family->traits & QC_FAMILY_UNGATED ? 1 : 2);
    if (s->kv_rank > 0)
        z.latents = s->q_rank + s->kv_rank + s->turned + c->heads * (s->turned_from + s->value_dim);
    z.tokens = qc_max_u64(longest, tokens < QC_FORWARD_TOKENS ? tokens : QC_FORWARD_TOKENS);
    z.a = qc_sat_mul(z.tokens, c->hidden * sizeof(float));
    z.b = qc_sat_mul(z.tokens, qc_max_u64(z.qkv, z.ffn) * sizeof(float));
    z.c = qc_sat_mul(z.tokens, qc_forward_attended(s) * sizeof(float));
    z.d = qc_sat_mul(z.tokens, z.latents * sizeof(float));
    z.table = qc_rope_tables_bytes(&s->rope, s->turned, longest);
    if (s->family->traits & QC_FAMILY_LOCAL_ROPE)
        z.table = qc_sat_add(z.table, qc_rope_tables_bytes(&s->local_rope, s->turned, longest));
    const uint64_t rows = s->image_tokens < QC_FORWARD_TOKENS ? s->image_tokens : QC_FORWARD_TOKENS;
    uint64_t widest = qc_max_u64(qc_max_u64(c->hidden, c->intermediate), qc_forward_attended(s));
    widest = qc_max_u64(widest, qc_max_u64(s->q_rank, s->kv_rank));
    z.scratch_each =
        qc_align_u64(qc_max_u64(qc_matmul_cpu_scratch_bytes(qc_max_u64(z.tokens, rows), widest),
                                qc_attend_scratch_bytes(group, c->head_dim, s->value_dim)),
                     ALIGNMENT);
    return z;
}

uint64_t qc_forward_cpu_bytes(const qc_forward_shape *shape, unsigned threads, uint64_t tokens,
                              uint64_t longest)
{
    sizes z = sizes_of(shape, tokens, longest);
    uint64_t bytes = qc_sat_add(qc_sat_add(z.a, z.b), qc_sat_add(z.c, qc_sat_add(z.d, z.table)));
    bytes = qc_sat_add(bytes, qc_sat_mul(threads, z.scratch_each));
    bytes = qc_sat_add(bytes, qc_cross_bytes(shape, tokens));
    /* The positions, and at most as many windows as tokens. */
    return qc_sat_add(bytes, qc_sat_mul(tokens, sizeof(uint32_t) + 2 * sizeof(uint64_t)));
}

static qc_status place_windows(qc_forward_cpu *cpu, qc_error *err)
{
    const qc_forward_batch *b = &cpu->batch;
    const qc_forward_config *c = &cpu->shape->config;
    uint64_t step = qc_attend_tokens(c->heads / c->kv_heads), at = 0;
    size_t count = 0, tokens = 0;
    if (qc_u64_to_size(b->count, &count) || qc_u64_to_size(b->tokens, &tokens))
        QC_FAIL(err, QC_ERR_NOMEM, "the batch is too large for memory");
    QC_TRY(qc_calloc(&cpu->starts, count + 1, sizeof *cpu->starts, err));
    QC_TRY(qc_calloc(&cpu->tasks, count + 1, sizeof *cpu->tasks, err));
    QC_TRY(qc_calloc(&cpu->positions, tokens, sizeof *cpu->positions, err));
    for (uint64_t w = 0; w < b->count; w++) {
        uint64_t row = qc_rope_first_row(&cpu->shape->rope, &cpu->rope, b->lengths[w]);
        for (uint64_t p = 0; p < b->lengths[w]; p++)
            cpu->positions[at++] = (uint32_t)(row + p);
        cpu->starts[w + 1] = at;
        cpu->tasks[w + 1] = cpu->tasks[w] + qc_ceil_div_u64(b->lengths[w], step) * c->kv_heads;
    }
    return QC_OK;
}

qc_status qc_forward_cpu_create(qc_forward_cpu *out, const qc_forward_shape *shape,
                                const qc_forward_tools *tools, const qc_forward_batch *batch,
                                qc_error *err)
{
    const qc_forward_config *c = &shape->config;
    uint64_t longest = qc_forward_longest(batch);
    *out = (qc_forward_cpu){.shape = shape,
                            .threads = tools->threads ? tools->threads : 1,
                            .matmul = qc_matmul_ops_for(tools->isa),
                            .decoder = qc_decoder_ops_for(tools->isa),
                            .batch = *batch};
    if (longest > UINT32_MAX / 2)
        QC_FAIL(err, QC_ERR_NOMEM, "a window of %" PRIu64 " tokens is too long", longest);
    if (shape->rope.kind == QC_ROPE_DYNAMIC && longest > c->context)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a window of %" PRIu64 " tokens is longer than the %" PRIu64
                " up to which rotary positions of type dynamic are computed",
                longest, c->context);
    sizes z = sizes_of(shape, batch->tokens, longest);
    out->scratch_each = z.scratch_each;
    if (shape->turned > 0)
        QC_TRY(qc_rope_tables_make(&out->rope, &shape->rope, shape->turned, longest, err));
    if (shape->family->traits & QC_FAMILY_LOCAL_ROPE)
        QC_TRY(
            qc_rope_tables_make(&out->local_rope, &shape->local_rope, shape->turned, longest, err));
    QC_TRY(place_windows(out, err));
    QC_TRY(qc_forward_cpu_allocate(&out->a, z.a, err));
    QC_TRY(qc_forward_cpu_allocate(&out->b, z.b, err));
    QC_TRY(qc_forward_cpu_allocate(&out->c, z.c, err));
    if (z.d > 0)
        QC_TRY(qc_forward_cpu_allocate(&out->d, z.d, err));
    if (shape->cross)
        QC_TRY(qc_cross_create(&out->cross, shape, tools->images, batch, err));
    return qc_forward_cpu_allocate(&out->scratch, qc_sat_mul(z.scratch_each, out->threads), err);
}

void qc_forward_cpu_deinit(qc_forward_cpu *cpu)
{
    void *const all[] = {
        cpu->starts, cpu->tasks, cpu->positions, cpu->rope.cosines, cpu->local_rope.cosines, cpu->a,
        cpu->b,      cpu->c,     cpu->d,         cpu->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qc_free(all[i]);
    qc_cross_destroy(cpu->cross);
    memset(cpu, 0, sizeof *cpu);
}

/* ---- the phases of a chunk ---- */

qc_status qc_phase_tokens(qc_phase_chunk *k, qc_phase_fn fn, const float *weight, qc_error *err)
{
    k->weight = weight;
    return share(k->cpu->threads, k->tokens, TOKEN_GRAIN, fn, k, err);
}

qc_status qc_phase_multiply(const qc_phase_chunk *k, qc_layer_which first, unsigned count,
                            const float *x, uint64_t ldx, float *y, uint64_t ldy, qc_error *err)
{
    product p = {.ops = k->cpu->matmul,
                 .count = count,
                 .x = x,
                 .n = k->tokens,
                 .ldx = ldx,
                 .ldy = ldy,
                 .scratch = k->cpu->scratch,
                 .scratch_each = k->cpu->scratch_each};
    for (unsigned i = 0; i < count; i++) { /* one that is not there has no rows */
        p.w[i] = &k->w->matrices[first + i];
        p.y[i] = y;
        y += p.w[i]->rows;
    }
    return run_product(&p, k->cpu->threads, err);
}

/* ---- the steps of a layer, each from one set of linear layers to the inputs of the next ---- */

/* The inputs of q, k and v. */
static const float *inputs_of(const qc_phase_chunk *k)
{
    return k->w->vectors[QC_LAYER_INPUT_NORM] ? k->cpu->a : k->hidden;
}

/* a, or hidden where there is no norm before attention -> d, the inputs of Q_B and KV_B; and where
 * there is no Q_B, q in b. */
static qc_status take_latents(qc_phase_chunk *k, qc_error *err)
{
    const qc_forward_shape *s = k->cpu->shape;
    const uint64_t hidden = s->config.hidden;
    float *q = s->q_rank > 0 ? k->cpu->d : k->cpu->b, *kv = k->cpu->d + s->q_rank;
    uint64_t ldq = s->q_rank > 0 ? k->ldd : k->ldb;
    QC_TRY(qc_phase_multiply(k, QC_LAYER_Q, 1, inputs_of(k), hidden, q, ldq, err));
    QC_TRY(qc_phase_multiply(k, QC_LAYER_K, 1, inputs_of(k), hidden, kv, k->ldd, err));
    return qc_phase_tokens(k, qc_phase_norm_latents, NULL, err);
}

/* a, or hidden -> b, q and k and v. */
static qc_status take_heads(qc_phase_chunk *k, qc_error *err)
{
    const qc_forward_shape *s = k->cpu->shape;
    float *b = k->cpu->b, *kv = k->cpu->d + s->q_rank;
    if (s->kv_rank == 0) {
        QC_TRY(qc_phase_multiply(k, QC_LAYER_Q, 3, inputs_of(k), s->config.hidden, b, k->ldb, err));
        return qc_phase_tokens(k, qc_phase_turn, NULL, err);
    }
    QC_TRY(take_latents(k, err));
    if (s->q_rank > 0)
        QC_TRY(qc_phase_multiply(k, QC_LAYER_Q_B, 1, k->cpu->d, k->ldd, b, k->ldb, err));
    QC_TRY(qc_phase_multiply(k, QC_LAYER_KV_B, 1, kv, k->ldd, kv + s->kv_rank + s->turned, k->ldd,
                             err));
    return qc_phase_tokens(k, qc_phase_spread_latents, NULL, err);
}

/* The states of an image -> its keys and values. Windows with the same image share them. */
static qc_status take_image(qc_phase_chunk *k, const qc_image *image, qc_error *err)
{
    qc_cross *x = k->cpu->cross;
    const uint64_t hidden = k->cpu->shape->config.hidden;
    qc_phase_chunk rows = *k;
    if (x->held == image)
        return QC_OK;
    x->held = NULL;
    for (uint64_t at = 0; at < image->all; at += rows.tokens) {
        rows.tokens = image->all - at < QC_FORWARD_TOKENS ? image->all - at : QC_FORWARD_TOKENS;
        QC_TRY(qc_image_read(x->states, image, at, rows.tokens, x->block, err));
        QC_TRY(qc_phase_multiply(&rows, QC_LAYER_K, 2, x->block, hidden, x->kv + at * x->wide,
                                 x->wide, err));
    }
    x->held = image;
    return share(k->cpu->threads, image->all, TOKEN_GRAIN, qc_cross_norm_keys, k, err);
}

/* a -> c, what the tokens get of their images. Tokens in front of an image see its padding as well,
 * as transformers has it. */
static qc_status attend_images(qc_phase_chunk *k, qc_error *err)
{
    qc_forward_cpu *cpu = k->cpu;
    qc_cross *x = cpu->cross;
    QC_TRY(qc_phase_multiply(k, QC_LAYER_Q, 1, inputs_of(k), cpu->shape->config.hidden, cpu->b,
                             k->ldb, err));
    QC_TRY(qc_phase_tokens(k, qc_phase_turn, NULL, err));
    if (k->window == 0)
        x->held = NULL; /* of another layer, or of weights that have changed since */
    for (uint64_t w = k->window; w < k->end; w++) {
        const uint64_t at = cpu->starts[w] - k->start, from = x->from[w];
        QC_TRY(take_image(k, x->images[w], err));
        x->now = (qc_cross_rows){at, from, x->images[w]->all};
        QC_TRY(share(cpu->threads, qc_cross_tasks(k), 1, qc_cross_attend, k, err));
        x->now = (qc_cross_rows){at + from, cpu->batch.lengths[w] - from, x->images[w]->seen};
        QC_TRY(share(cpu->threads, qc_cross_tasks(k), 1, qc_cross_attend, k, err));
    }
    return QC_OK;
}

/* hidden -> c, the inputs of o. */
static qc_status attend(qc_phase_chunk *k, qc_error *err)
{
    qc_forward_cpu *cpu = k->cpu;
    if (k->cross)
        return attend_images(k, err);
    QC_TRY(take_heads(k, err));
    return share(cpu->threads, cpu->tasks[k->end] - cpu->tasks[k->window], 1, qc_phase_attend, k,
                 err);
}

static float added_of(const qc_phase_chunk *k, qc_layer_vector gate)
{
    const float *g = k->w->vectors[gate];
    return (float)(k->cpu->shape->residual_scale * (g ? tanh((double)*g) : 1.0));
}

qc_status qc_phase_leave_attention(qc_phase_chunk *k, const float *attended, qc_error *err)
{
    qc_forward_cpu *cpu = k->cpu;
    QC_TRY(qc_phase_multiply(k, QC_LAYER_O, 1, attended, k->attended, cpu->a,
                             cpu->shape->config.hidden, err));
    k->added_norm = k->w->vectors[QC_LAYER_ATTENDED_NORM];
    const float *post = cpu->shape->parallel ? NULL : k->w->vectors[QC_LAYER_POST_NORM];
    k->added = added_of(k, QC_LAYER_ATTENDED_GATE);
    QC_TRY(qc_phase_tokens(k, qc_phase_add, post, err));
    qc_cross_hide(k);
    return QC_OK;
}

/* a, or hidden where there is no norm behind attention -> b, the inputs of down. */
static qc_status gate(qc_phase_chunk *k, qc_error *err)
{
    qc_forward_cpu *cpu = k->cpu;
    const qc_forward_config *c = &cpu->shape->config;
    const float *x = k->w->vectors[QC_LAYER_POST_NORM] ? cpu->a : k->hidden;
    QC_TRY(qc_phase_multiply(k, QC_LAYER_GATE, 2, x, c->hidden, cpu->b, k->ldf, err));
    return qc_phase_tokens(k, qc_phase_gate, NULL, err);
}

/* b -> hidden behind the layer. */
static qc_status leave_layer(qc_phase_chunk *k, qc_error *err)
{
    qc_forward_cpu *cpu = k->cpu;
    const qc_forward_config *c = &cpu->shape->config;
    QC_TRY(qc_phase_multiply(k, QC_LAYER_DOWN, 1, cpu->b, k->ldf, cpu->a, c->hidden, err));
    k->added_norm = k->w->vectors[QC_LAYER_FFN_NORM];
    k->added = added_of(k, QC_LAYER_FFN_GATE);
    return qc_phase_tokens(k, qc_phase_add, NULL, err);
}

/* The norm of the hidden states into a, if the layer has it. */
static qc_status norm_hidden(qc_phase_chunk *k, qc_layer_vector which, qc_error *err)
{
    const float *weight = k->w->vectors[which];
    return weight ? qc_phase_tokens(k, qc_phase_norm, weight, err) : QC_OK;
}

static qc_status run_chunk(qc_phase_chunk *k, qc_error *err)
{
    QC_TRY(norm_hidden(k, QC_LAYER_INPUT_NORM, err));
    QC_TRY(attend(k, err));
    if (k->cpu->shape->parallel)
        QC_TRY(norm_hidden(k, QC_LAYER_POST_NORM, err));
    else
        QC_TRY(qc_phase_leave_attention(k, k->cpu->c, err));
    if (k->experts)
        return QC_OK;
    QC_TRY(gate(k, err));
    QC_TRY(leave_layer(k, err));
    return k->cpu->shape->parallel ? qc_phase_leave_attention(k, k->cpu->c, err) : QC_OK;
}

int qc_forward_cpu_next(const qc_forward_cpu *cpu, qc_forward_chunk *c)
{
    c->window = c->end;
    if (c->window == cpu->batch.count)
        return 0;
    c->start = cpu->starts[c->window];
    do
        c->end++;
    while (c->end < cpu->batch.count &&
           cpu->starts[c->end + 1] - c->start <= (uint64_t)QC_FORWARD_TOKENS);
    c->tokens = cpu->starts[c->end] - c->start;
    return 1;
}

qc_phase_chunk qc_phase_chunk_of(qc_forward_cpu *cpu, const qc_forward_pass *p,
                                 const qc_forward_chunk *at)
{
    const qc_forward_shape *s = cpu->shape;
    const qc_forward_config *c = &s->config;
    const sizes z = sizes_of(s, cpu->batch.tokens, 1);
    const int cross = s->cross && s->cross[p->layer];
    return (qc_phase_chunk){.cpu = cpu,
                            .w = p->w,
                            .window = at->window,
                            .end = at->end,
                            .start = at->start,
                            .tokens = at->tokens,
                            .span = s->windows[p->layer],
                            .experts = qc_experts_in(&s->experts, p->layer),
                            .hidden = p->hidden + at->start * c->hidden,
                            .normed = cpu->a,
                            .turn = cross ? QC_LAYER_UNTURNED : (qc_layer_turn)s->turns[p->layer],
                            .cross = cross,
                            .q = z.q,
                            .k = z.k,
                            .attended = qc_forward_attended(s),
                            .ldb = z.qkv,
                            .ldd = z.latents,
                            .ldf = z.ffn,
                            .scale = s->score_scale > 0.0 ? (float)s->score_scale
                                                          : 1.0f / sqrtf((float)c->head_dim)};
}

qc_status qc_forward_cpu_layer(qc_forward_cpu *cpu, const qc_forward_weights *w, uint64_t layer,
                               float *hidden, qc_error *err)
{
    const qc_forward_pass p = {.w = w, .layer = layer, .hidden = hidden};
    qc_forward_chunk at = {0};
    while (qc_forward_cpu_next(cpu, &at)) {
        qc_phase_chunk k = qc_phase_chunk_of(cpu, &p, &at);
        QC_TRY(run_chunk(&k, err));
    }
    return QC_OK;
}

qc_status qc_forward_cpu_at(qc_forward_cpu *cpu, const qc_forward_pass *p,
                            const qc_forward_chunk *at, qc_forward_point point,
                            qc_forward_inputs *out, qc_error *err)
{
    const qc_forward_config *c = &cpu->shape->config;
    const int before = point <= QC_AT_O, parallel = cpu->shape->parallel;
    qc_phase_chunk k = qc_phase_chunk_of(cpu, p, at);
    const float *attended = p->attended + at->start * k.attended;
    *out = (qc_forward_inputs){p->w->vectors[QC_LAYER_POST_NORM] ? cpu->a : k.hidden, c->hidden};
    if (point == QC_AT_IMAGE) {
        *out = (qc_forward_inputs){0};
        return QC_OK;
    }
    if (point == QC_AT_GATE && !parallel)
        return qc_phase_leave_attention(&k, attended, err);
    QC_TRY(norm_hidden(&k, before ? QC_LAYER_INPUT_NORM : QC_LAYER_POST_NORM, err));
    if (point == QC_AT_GATE)
        return QC_OK;
    if (!before)
        qc_cross_hide(&k);
    if (point == QC_AT_QKV) {
        out->x = inputs_of(&k);
        return QC_OK;
    }
    if (point == QC_AT_Q_B || point == QC_AT_KV_B) {
        *out = (qc_forward_inputs){cpu->d + (point == QC_AT_Q_B ? 0 : cpu->shape->q_rank), k.ldd};
        return take_latents(&k, err);
    }
    if (point == QC_AT_O) {
        *out = (qc_forward_inputs){cpu->c, k.attended};
        return attend(&k, err);
    }
    QC_TRY(gate(&k, err));
    *out = (qc_forward_inputs){cpu->b, k.ldf};
    if (point == QC_AT_DOWN)
        return QC_OK;
    QC_TRY(leave_layer(&k, err));
    return parallel ? qc_phase_leave_attention(&k, attended, err) : QC_OK;
}

qc_status qc_forward_cpu_norm(qc_forward_cpu *cpu, const float *weight, float *hidden,
                              qc_error *err)
{
    qc_phase_chunk k = {
        .cpu = cpu, .hidden = hidden, .normed = hidden, .tokens = cpu->batch.tokens};
    return weight ? qc_phase_tokens(&k, qc_phase_norm, weight, err) : QC_OK;
}

/* ---- logits ---- */

typedef struct {
    const qc_decoder_ops *ops;
    const qc_forward_shape *shape;
    float *logits;
} ending;

static qc_status finish_rows(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                             qc_error *err)
{
    const ending *e = ctx;
    const uint64_t wide = e->shape->config.vocabulary;
    const float divisor = (float)e->shape->logit_divisor, cap = (float)e->shape->logit_cap;
    float *x = e->logits + first * wide;
    (void)thread;
    (void)err;
    for (uint64_t i = 0; divisor != 1.0f && i < count * wide; i++)
        x[i] /= divisor;
    if (cap > 0.0f)
        e->ops->softcap(x, count * wide, cap);
    return QC_OK;
}

qc_status qc_forward_cpu_finish_logits(const qc_forward_shape *shape, const qc_forward_tools *tools,
                                       float *logits, uint64_t n, qc_error *err)
{
    ending e = {qc_decoder_ops_for(tools->isa), shape, logits};
    if (shape->logit_divisor == 1.0 && shape->logit_cap == 0.0)
        return QC_OK;
    return share(tools->threads, n, 1, finish_rows, &e, err);
}

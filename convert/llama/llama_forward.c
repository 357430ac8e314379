#include "convert/llama/llama_forward.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "quant/piecework.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define TOKEN_GRAIN 8u   /* tokens that a thread takes at a time */
#define ROW_GRAIN   128u /* rows of weights, at most */
#define ROW_STEP    4u   /* how many rows the matmuls decode together */
#define ALIGNMENT   64u

/* ---- sharing work ---- */

/* Does elements [first, first + count) of a phase. */
typedef qc_status (*phase_fn)(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                              qc_error *err);

typedef struct {
    phase_fn fn;
    void *ctx;
    uint64_t total, grain;
} phase;

static qc_status take(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const phase *p = ctx;
    uint64_t first = piece * p->grain, left = p->total - first;
    return p->fn(p->ctx, thread, first, left < p->grain ? left : p->grain, err);
}

static qc_status share(unsigned threads, uint64_t total, uint64_t grain, phase_fn fn, void *ctx,
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
    const qc_llama_matrix *w[MOST_MATRICES];
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
        const qc_llama_matrix *w = p->w[i];
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

static qc_status allocate(void *out, uint64_t bytes, qc_error *err)
{
    size_t size = 0;
    void *v = NULL;
    if (bytes == UINT64_MAX || qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the batch is too large for memory");
    QC_TRY(qc_malloc_aligned(&v, ALIGNMENT, size, err));
    memcpy(out, &v, sizeof v);
    return QC_OK;
}

qc_status qc_llama_cpu_matmul(const qc_matmul_ops *ops, unsigned threads, const qc_llama_matrix *w,
                              const float *x, uint64_t n, float *y, qc_error *err)
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
    QC_TRY(allocate(&p.scratch, qc_sat_mul(p.scratch_each, threads), err));
    qc_status st = run_product(&p, threads, err);
    qc_free(p.scratch);
    return st;
}

/* ---- buffers ---- */

typedef struct {
    uint64_t q, kv; /* floats of all heads of one token */
    uint64_t qkv;
    uint64_t tokens; /* in work */
    uint64_t a, b, c, table, scratch_each;
} sizes;

static sizes sizes_of(const qc_llama_shape *s, uint64_t tokens, uint64_t longest)
{
    const qc_llama_config *c = &s->config;
    uint64_t group = c->heads / c->kv_heads;
    sizes z = {.q = c->heads * c->head_dim, .kv = c->kv_heads * c->head_dim};
    z.qkv = z.q + 2 * z.kv;
    z.tokens = qc_max_u64(longest, tokens < QC_LLAMA_TOKENS ? tokens : QC_LLAMA_TOKENS);
    z.a = qc_sat_mul(z.tokens, c->hidden * sizeof(float));
    z.b = qc_sat_mul(z.tokens, qc_max_u64(z.qkv, 2 * c->intermediate) * sizeof(float));
    z.c = qc_sat_mul(z.tokens, z.q * sizeof(float));
    z.table = qc_sat_mul(longest, c->head_dim / 2 * sizeof(float));
    uint64_t widest = qc_max_u64(qc_max_u64(c->hidden, c->intermediate), z.q);
    z.scratch_each = qc_align_u64(qc_max_u64(qc_matmul_cpu_scratch_bytes(z.tokens, widest),
                                             qc_attend_scratch_bytes(group, c->head_dim)),
                                  ALIGNMENT);
    return z;
}

uint64_t qc_llama_cpu_bytes(const qc_llama_shape *shape, unsigned threads, uint64_t tokens,
                            uint64_t longest)
{
    sizes z = sizes_of(shape, tokens, longest);
    uint64_t bytes = qc_sat_add(qc_sat_add(z.a, z.b), qc_sat_add(z.c, qc_sat_mul(2, z.table)));
    bytes = qc_sat_add(bytes, qc_sat_mul(threads, z.scratch_each));
    /* The positions, and at most as many windows as tokens. */
    return qc_sat_add(bytes, qc_sat_mul(tokens, sizeof(uint32_t) + 2 * sizeof(uint64_t)));
}

static qc_status place_windows(qc_llama_cpu *cpu, qc_error *err)
{
    const qc_llama_batch *b = &cpu->batch;
    const qc_llama_config *c = &cpu->shape->config;
    uint64_t step = qc_attend_tokens(c->heads / c->kv_heads), at = 0;
    size_t count = 0, tokens = 0;
    if (qc_u64_to_size(b->count, &count) || qc_u64_to_size(b->tokens, &tokens))
        QC_FAIL(err, QC_ERR_NOMEM, "the batch is too large for memory");
    QC_TRY(qc_calloc(&cpu->starts, count + 1, sizeof *cpu->starts, err));
    QC_TRY(qc_calloc(&cpu->tasks, count + 1, sizeof *cpu->tasks, err));
    QC_TRY(qc_calloc(&cpu->positions, tokens, sizeof *cpu->positions, err));
    for (uint64_t w = 0; w < b->count; w++) {
        for (uint64_t p = 0; p < b->lengths[w]; p++)
            cpu->positions[at++] = (uint32_t)p;
        cpu->starts[w + 1] = at;
        cpu->tasks[w + 1] = cpu->tasks[w] + qc_ceil_div_u64(b->lengths[w], step) * c->kv_heads;
    }
    return QC_OK;
}

qc_status qc_llama_cpu_create(qc_llama_cpu *out, const qc_llama_shape *shape,
                              const qc_llama_tools *tools, const qc_llama_batch *batch,
                              qc_error *err)
{
    const qc_llama_config *c = &shape->config;
    uint64_t longest = qc_llama_longest(batch);
    *out = (qc_llama_cpu){.shape = shape,
                          .threads = tools->threads ? tools->threads : 1,
                          .matmul = qc_matmul_ops_for(tools->isa),
                          .decoder = qc_decoder_ops_for(tools->isa),
                          .batch = *batch};
    if (longest > UINT32_MAX)
        QC_FAIL(err, QC_ERR_NOMEM, "a window of %" PRIu64 " tokens is too long", longest);
    if (shape->rope.kind == QC_ROPE_DYNAMIC && longest > c->context)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a window of %" PRIu64 " tokens is longer than the %" PRIu64
                " up to which rotary positions of type dynamic are computed",
                longest, c->context);
    sizes z = sizes_of(shape, batch->tokens, longest);
    out->scratch_each = z.scratch_each;
    QC_TRY(place_windows(out, err));
    QC_TRY(allocate(&out->a, z.a, err));
    QC_TRY(allocate(&out->b, z.b, err));
    QC_TRY(allocate(&out->c, z.c, err));
    QC_TRY(allocate(&out->scratch, qc_sat_mul(z.scratch_each, out->threads), err));
    return qc_rope_tables(&out->cosines, &out->sines, shape, longest, err);
}

void qc_llama_cpu_deinit(qc_llama_cpu *cpu)
{
    void *const all[] = {cpu->starts, cpu->tasks, cpu->positions, cpu->cosines,
                         cpu->a,      cpu->b,     cpu->c,         cpu->scratch};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        qc_free(all[i]);
    memset(cpu, 0, sizeof *cpu);
}

/* ---- phases ---- */

/* Windows [window, end) of the batch, whose tokens begin at `start`. */
typedef struct {
    qc_llama_cpu *cpu;
    const qc_llama_weights *w;
    uint64_t window, end, start, tokens;
    uint64_t span; /* positions that a token sees, including its own; 0: all */
    float *hidden; /* hidden states, from token `start` on */
    float *normed; /* where their norms go; it may be hidden itself */
    const float *weight;
    uint64_t q, kv, ldb;
    int experts; /* the layer has experts, which are not computed here */
} chunk;

static qc_status norm_tokens(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                             qc_error *err)
{
    const chunk *k = ctx;
    uint64_t n = k->cpu->shape->config.hidden;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++)
        k->cpu->decoder->norm(k->hidden + t * n, k->weight, n,
                              (float)k->cpu->shape->config.norm_eps, k->normed + t * n);
    return QC_OK;
}

/* hidden += a, and if there is a weight, a = norm(hidden). */
static qc_status add_tokens(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                            qc_error *err)
{
    const chunk *k = ctx;
    uint64_t n = k->cpu->shape->config.hidden;
    for (uint64_t t = first; t < first + count; t++) {
        float *h = k->hidden + t * n;
        const float *a = k->cpu->a + t * n;
        for (uint64_t i = 0; i < n; i++)
            h[i] += a[i];
        QC_TRY(qc_llama_finite(h, n, err));
    }
    return k->weight ? norm_tokens(ctx, thread, first, count, err) : QC_OK;
}

static qc_status turn_tokens(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                             qc_error *err)
{
    const chunk *k = ctx;
    const qc_llama_cpu *cpu = k->cpu;
    const qc_llama_config *c = &cpu->shape->config;
    const float *q_norm = k->w->vectors[QC_LLAMA_Q_NORM], *k_norm = k->w->vectors[QC_LLAMA_K_NORM];
    uint64_t dim = c->head_dim, half = dim / 2;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++) {
        uint64_t at = cpu->positions[k->start + t] * half;
        float *x = cpu->b + t * k->ldb;
        for (uint64_t h = 0; h < c->heads + c->kv_heads; h++, x += dim) {
            const float *weight = h < c->heads ? q_norm : k_norm;
            if (weight)
                cpu->decoder->norm(x, weight, dim, (float)c->norm_eps, x);
            cpu->decoder->rotate(x, cpu->cosines + at, cpu->sines + at, half);
        }
    }
    return QC_OK;
}

/* The window that a task belongs to. */
static uint64_t window_of(const chunk *k, uint64_t task)
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

static qc_status attend_tasks(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                              qc_error *err)
{
    const chunk *k = ctx;
    const qc_llama_cpu *cpu = k->cpu;
    const qc_llama_config *c = &cpu->shape->config;
    uint64_t group = c->heads / c->kv_heads, step = qc_attend_tokens(group);
    (void)err;
    for (uint64_t task = first; task < first + count; task++) {
        uint64_t w = window_of(k, cpu->tasks[k->window] + task);
        uint64_t inside = cpu->tasks[k->window] + task - cpu->tasks[w];
        uint64_t at = cpu->starts[w] - k->start, tokens = cpu->batch.lengths[w];
        uint64_t token = inside / c->kv_heads * step;
        const float *base = cpu->b + at * k->ldb;
        const qc_attend_io io = {.q = base,
                                 .k = base + k->q,
                                 .v = base + k->q + k->kv,
                                 .out = cpu->c + at * k->q,
                                 .q_stride = k->ldb,
                                 .kv_stride = k->ldb,
                                 .out_stride = k->q,
                                 .tokens = tokens,
                                 .group = group,
                                 .head_dim = c->head_dim,
                                 .span = k->span};
        cpu->decoder->attend(&io, inside % c->kv_heads, token,
                             tokens - token < step ? tokens - token : step,
                             cpu->scratch + thread * cpu->scratch_each);
    }
    return QC_OK;
}

static qc_status gate_tokens(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                             qc_error *err)
{
    const chunk *k = ctx;
    uint64_t n = k->cpu->shape->config.intermediate;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++)
        k->cpu->decoder->swiglu(k->cpu->b + t * 2 * n, k->cpu->b + t * 2 * n + n, n);
    return QC_OK;
}

static qc_status tokens_phase(chunk *k, phase_fn fn, const float *weight, qc_error *err)
{
    k->weight = weight;
    return share(k->cpu->threads, k->tokens, TOKEN_GRAIN, fn, k, err);
}

static qc_status product_phase(const chunk *k, qc_llama_which first, unsigned count, const float *x,
                               uint64_t ldx, float *y, uint64_t ldy, qc_error *err)
{
    product p = {.ops = k->cpu->matmul,
                 .count = count,
                 .x = x,
                 .n = k->tokens,
                 .ldx = ldx,
                 .ldy = ldy,
                 .scratch = k->cpu->scratch,
                 .scratch_each = k->cpu->scratch_each};
    for (unsigned i = 0; i < count; i++) {
        p.w[i] = &k->w->matrices[first + i];
        p.y[i] = y;
        y += p.w[i]->rows;
    }
    return run_product(&p, k->cpu->threads, err);
}

/* ---- the steps of a layer, each from one set of linear layers to the inputs of the next ---- */

/* hidden -> c, the inputs of o. */
static qc_status attend(chunk *k, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    QC_TRY(product_phase(k, QC_LLAMA_Q, 3, cpu->a, cpu->shape->config.hidden, cpu->b, k->ldb, err));
    QC_TRY(tokens_phase(k, turn_tokens, NULL, err));
    return share(cpu->threads, cpu->tasks[k->end] - cpu->tasks[k->window], 1, attend_tasks, k, err);
}

/* Inputs of o -> hidden behind attention, and a, the inputs of gate and up. */
static qc_status leave_attention(chunk *k, const float *attended, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    QC_TRY(product_phase(k, QC_LLAMA_O, 1, attended, k->q, cpu->a, cpu->shape->config.hidden, err));
    return tokens_phase(k, add_tokens, k->w->vectors[QC_LLAMA_POST_NORM], err);
}

/* a -> b, the inputs of down. */
static qc_status gate(chunk *k, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    const qc_llama_config *c = &cpu->shape->config;
    QC_TRY(product_phase(k, QC_LLAMA_GATE, 2, cpu->a, c->hidden, cpu->b, 2 * c->intermediate, err));
    return tokens_phase(k, gate_tokens, NULL, err);
}

/* b -> hidden behind the layer. */
static qc_status leave_layer(chunk *k, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    const qc_llama_config *c = &cpu->shape->config;
    QC_TRY(product_phase(k, QC_LLAMA_DOWN, 1, cpu->b, 2 * c->intermediate, cpu->a, c->hidden, err));
    return tokens_phase(k, add_tokens, NULL, err);
}

static qc_status run_chunk(chunk *k, qc_error *err)
{
    QC_TRY(tokens_phase(k, norm_tokens, k->w->vectors[QC_LLAMA_INPUT_NORM], err));
    QC_TRY(attend(k, err));
    QC_TRY(leave_attention(k, k->cpu->c, err));
    if (k->experts)
        return QC_OK;
    QC_TRY(gate(k, err));
    return leave_layer(k, err);
}

int qc_llama_cpu_next(const qc_llama_cpu *cpu, qc_llama_chunk *c)
{
    c->window = c->end;
    if (c->window == cpu->batch.count)
        return 0;
    c->start = cpu->starts[c->window];
    do
        c->end++;
    while (c->end < cpu->batch.count &&
           cpu->starts[c->end + 1] - c->start <= (uint64_t)QC_LLAMA_TOKENS);
    c->tokens = cpu->starts[c->end] - c->start;
    return 1;
}

static chunk chunk_of(qc_llama_cpu *cpu, const qc_llama_pass *p, const qc_llama_chunk *at)
{
    const qc_llama_config *c = &cpu->shape->config;
    chunk k = {.cpu = cpu,
               .w = p->w,
               .window = at->window,
               .end = at->end,
               .start = at->start,
               .tokens = at->tokens,
               .span = cpu->shape->windows[p->layer],
               .experts = qc_experts_in(&cpu->shape->experts, p->layer),
               .hidden = p->hidden + at->start * c->hidden,
               .normed = cpu->a,
               .q = c->heads * c->head_dim,
               .kv = c->kv_heads * c->head_dim};
    k.ldb = k.q + 2 * k.kv;
    return k;
}

qc_status qc_llama_cpu_layer(qc_llama_cpu *cpu, const qc_llama_weights *w, uint64_t layer,
                             float *hidden, qc_error *err)
{
    const qc_llama_pass p = {.w = w, .layer = layer, .hidden = hidden};
    qc_llama_chunk at = {0};
    while (qc_llama_cpu_next(cpu, &at)) {
        chunk k = chunk_of(cpu, &p, &at);
        QC_TRY(run_chunk(&k, err));
    }
    return QC_OK;
}

qc_status qc_llama_cpu_at(qc_llama_cpu *cpu, const qc_llama_pass *p, const qc_llama_chunk *at,
                          qc_llama_point point, qc_llama_inputs *out, qc_error *err)
{
    const qc_llama_config *c = &cpu->shape->config;
    const int before = point == QC_LLAMA_AT_QKV || point == QC_LLAMA_AT_O;
    chunk k = chunk_of(cpu, p, at);
    *out = (qc_llama_inputs){cpu->a, c->hidden};
    if (point == QC_LLAMA_AT_GATE)
        return leave_attention(&k, p->attended + at->start * k.q, err);
    QC_TRY(tokens_phase(&k, norm_tokens,
                        p->w->vectors[before ? QC_LLAMA_INPUT_NORM : QC_LLAMA_POST_NORM], err));
    if (point == QC_LLAMA_AT_QKV)
        return QC_OK;
    if (point == QC_LLAMA_AT_O) {
        *out = (qc_llama_inputs){cpu->c, k.q};
        return attend(&k, err);
    }
    QC_TRY(gate(&k, err));
    if (point == QC_LLAMA_AT_END)
        return leave_layer(&k, err);
    *out = (qc_llama_inputs){cpu->b, 2 * c->intermediate};
    return QC_OK;
}

qc_status qc_llama_cpu_norm(qc_llama_cpu *cpu, const float *weight, float *hidden, qc_error *err)
{
    chunk k = {.cpu = cpu, .hidden = hidden, .normed = hidden, .tokens = cpu->batch.tokens};
    return tokens_phase(&k, norm_tokens, weight, err);
}

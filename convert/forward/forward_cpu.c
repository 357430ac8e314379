#include "convert/forward/forward_cpu.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "convert/family/family.h"
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

qc_status qc_llama_cpu_allocate(void *out, uint64_t bytes, qc_error *err)
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
    QC_TRY(qc_llama_cpu_allocate(&p.scratch, qc_sat_mul(p.scratch_each, threads), err));
    qc_status st = run_product(&p, threads, err);
    qc_free(p.scratch);
    return st;
}

/* ---- buffers ---- */

typedef struct {
    uint64_t q, k, v; /* floats of all heads of one token */
    uint64_t qkv;
    uint64_t latents; /* floats of a token in d */
    uint64_t tokens;  /* in work */
    uint64_t a, b, c, d, table, scratch_each;
} sizes;

static sizes sizes_of(const qc_llama_shape *s, uint64_t tokens, uint64_t longest)
{
    const qc_llama_config *c = &s->config;
    uint64_t group = c->heads / c->kv_heads;
    sizes z = {.q = c->heads * c->head_dim,
               .k = c->kv_heads * c->head_dim,
               .v = c->kv_heads * s->value_dim};
    z.qkv = z.q + z.k + z.v;
    if (s->kv_rank > 0)
        z.latents = s->q_rank + s->kv_rank + s->turned + c->heads * (s->turned_from + s->value_dim);
    z.tokens = qc_max_u64(longest, tokens < QC_LLAMA_TOKENS ? tokens : QC_LLAMA_TOKENS);
    z.a = qc_sat_mul(z.tokens, c->hidden * sizeof(float));
    z.b = qc_sat_mul(z.tokens, qc_max_u64(z.qkv, 2 * c->intermediate) * sizeof(float));
    z.c = qc_sat_mul(z.tokens, qc_llama_attended(s) * sizeof(float));
    z.d = qc_sat_mul(z.tokens, z.latents * sizeof(float));
    z.table = qc_rope_tables_bytes(&s->rope, s->turned, longest);
    if (s->family->traits & QC_FAMILY_LOCAL_ROPE)
        z.table = qc_sat_add(z.table, qc_rope_tables_bytes(&s->local_rope, s->turned, longest));
    uint64_t widest = qc_max_u64(qc_max_u64(c->hidden, c->intermediate), qc_llama_attended(s));
    widest = qc_max_u64(widest, qc_max_u64(s->q_rank, s->kv_rank));
    z.scratch_each =
        qc_align_u64(qc_max_u64(qc_matmul_cpu_scratch_bytes(z.tokens, widest),
                                qc_attend_scratch_bytes(group, c->head_dim, s->value_dim)),
                     ALIGNMENT);
    return z;
}

uint64_t qc_llama_cpu_bytes(const qc_llama_shape *shape, unsigned threads, uint64_t tokens,
                            uint64_t longest)
{
    sizes z = sizes_of(shape, tokens, longest);
    uint64_t bytes = qc_sat_add(qc_sat_add(z.a, z.b), qc_sat_add(z.c, qc_sat_add(z.d, z.table)));
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
        uint64_t row = qc_rope_first_row(&cpu->shape->rope, &cpu->rope, b->lengths[w]);
        for (uint64_t p = 0; p < b->lengths[w]; p++)
            cpu->positions[at++] = (uint32_t)(row + p);
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
    if (longest > UINT32_MAX / 2)
        QC_FAIL(err, QC_ERR_NOMEM, "a window of %" PRIu64 " tokens is too long", longest);
    if (shape->rope.kind == QC_ROPE_DYNAMIC && longest > c->context)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a window of %" PRIu64 " tokens is longer than the %" PRIu64
                " up to which rotary positions of type dynamic are computed",
                longest, c->context);
    sizes z = sizes_of(shape, batch->tokens, longest);
    out->scratch_each = z.scratch_each;
    QC_TRY(qc_rope_tables_make(&out->rope, &shape->rope, shape->turned, longest, err));
    if (shape->family->traits & QC_FAMILY_LOCAL_ROPE)
        QC_TRY(
            qc_rope_tables_make(&out->local_rope, &shape->local_rope, shape->turned, longest, err));
    QC_TRY(place_windows(out, err));
    QC_TRY(qc_llama_cpu_allocate(&out->a, z.a, err));
    QC_TRY(qc_llama_cpu_allocate(&out->b, z.b, err));
    QC_TRY(qc_llama_cpu_allocate(&out->c, z.c, err));
    if (z.d > 0)
        QC_TRY(qc_llama_cpu_allocate(&out->d, z.d, err));
    return qc_llama_cpu_allocate(&out->scratch, qc_sat_mul(z.scratch_each, out->threads), err);
}

void qc_llama_cpu_deinit(qc_llama_cpu *cpu)
{
    void *const all[] = {
        cpu->starts, cpu->tasks, cpu->positions, cpu->rope.cosines, cpu->local_rope.cosines, cpu->a,
        cpu->b,      cpu->c,     cpu->d,         cpu->scratch};
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
    const float *added_norm; /* of what is added to them; NULL: it has none */
    qc_llama_turn turn;
    uint64_t q, k, attended, ldb;
    uint64_t ldd;
    float scale; /* of scores */
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

/* hidden += a, behind a norm of its own if there is one; and if there is a weight, then
 * a = norm(hidden). */
static qc_status add_tokens(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                            qc_error *err)
{
    const chunk *k = ctx;
    const qc_llama_shape *s = k->cpu->shape;
    const float scale = (float)s->residual_scale;
    uint64_t n = s->config.hidden;
    for (uint64_t t = first; t < first + count; t++) {
        float *h = k->hidden + t * n, *a = k->cpu->a + t * n;
        if (k->added_norm)
            k->cpu->decoder->norm(a, k->added_norm, n, (float)s->config.norm_eps, a);
        for (uint64_t i = 0; i < n; i++)
            h[i] += a[i] * scale;
        QC_TRY(qc_llama_finite(h, n, err));
    }
    return k->weight ? norm_tokens(ctx, thread, first, count, err) : QC_OK;
}

/* Turns what of a head is to be turned. */
static void turn_head(const chunk *k, float *x, uint64_t row)
{
    const qc_llama_shape *s = k->cpu->shape;
    const int local = k->turn == QC_LLAMA_TURNED_LOCAL;
    const qc_rope_tables *r = local ? &k->cpu->local_rope : &k->cpu->rope;
    const uint64_t half = s->turned / 2;
    const float *cosines = r->cosines + row * half, *sines = r->sines + row * half;
    if (k->turn == QC_LLAMA_UNTURNED)
        return;
    if (s->family->traits & QC_FAMILY_SIDE_BY_SIDE)
        k->cpu->decoder->rotate_pairs(x, cosines, sines, half);
    else
        k->cpu->decoder->rotate(x, cosines, sines, half);
}

static qc_status turn_tokens(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                             qc_error *err)
{
    const chunk *k = ctx;
    const qc_llama_cpu *cpu = k->cpu;
    const qc_llama_config *c = &cpu->shape->config;
    const float *norms[2] = {k->w->vectors[QC_LLAMA_Q_NORM], k->w->vectors[QC_LLAMA_K_NORM]};
    const int wide = (cpu->shape->family->traits & QC_FAMILY_WIDE_NORMS) != 0;
    const float eps = (float)c->norm_eps;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++) {
        const uint64_t row = cpu->positions[k->start + t];
        float *x = cpu->b + t * k->ldb;
        for (int part = 0; part < 2; part++) {
            const uint64_t heads = part ? c->kv_heads : c->heads;
            if (norms[part] && wide)
                cpu->decoder->norm(x, norms[part], heads * c->head_dim, eps, x);
            for (uint64_t h = 0; h < heads; h++, x += c->head_dim) {
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

#define LATENT_EPS 1e-6f /* whatever config.json says */

static qc_status norm_latents(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                              qc_error *err)
{
    const chunk *k = ctx;
    const qc_llama_shape *s = k->cpu->shape;
    const float *q_norm = k->w->vectors[QC_LLAMA_Q_A_NORM];
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++) {
        float *d = k->cpu->d + t * k->ldd;
        if (q_norm)
            k->cpu->decoder->norm(d, q_norm, s->q_rank, LATENT_EPS, d);
        k->cpu->decoder->norm(d + s->q_rank, k->w->vectors[QC_LLAMA_KV_A_NORM], s->kv_rank,
                              LATENT_EPS, d + s->q_rank);
    }
    return QC_OK;
}

/* Turns q, and puts the keys and values of all heads behind it. */
static qc_status spread_latents(void *ctx, unsigned thread, uint64_t first, uint64_t count,
                                qc_error *err)
{
    const chunk *k = ctx;
    const qc_llama_shape *s = k->cpu->shape;
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
                                 .v = base + k->q + k->k,
                                 .out = cpu->c + at * k->attended,
                                 .q_stride = k->ldb,
                                 .kv_stride = k->ldb,
                                 .out_stride = k->attended,
                                 .tokens = tokens,
                                 .group = group,
                                 .head_dim = c->head_dim,
                                 .value_dim = cpu->shape->value_dim,
                                 .span = k->span,
                                 .scale = k->scale,
                                 .cap = (float)cpu->shape->score_cap,
                                 .sinks = k->w->vectors[QC_LLAMA_SINKS]};
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
    const qc_decoder_ops *ops = k->cpu->decoder;
    uint64_t n = k->cpu->shape->config.intermediate;
    (void)thread;
    (void)err;
    for (uint64_t t = first; t < first + count; t++)
        (k->cpu->shape->family->gate == QC_LLAMA_SILU ? ops->swiglu : ops->geglu)(
            k->cpu->b + t * 2 * n, k->cpu->b + t * 2 * n + n, n);
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
    for (unsigned i = 0; i < count; i++) { /* one that is not there has no rows */
        p.w[i] = &k->w->matrices[first + i];
        p.y[i] = y;
        y += p.w[i]->rows;
    }
    return run_product(&p, k->cpu->threads, err);
}

/* ---- the steps of a layer, each from one set of linear layers to the inputs of the next ---- */

/* The inputs of q, k and v. */
static const float *inputs_of(const chunk *k)
{
    return k->w->vectors[QC_LLAMA_INPUT_NORM] ? k->cpu->a : k->hidden;
}

/* a, or hidden where there is no norm before attention -> d, the inputs of Q_B and KV_B; and where
 * there is no Q_B, q in b. */
static qc_status take_latents(chunk *k, qc_error *err)
{
    const qc_llama_shape *s = k->cpu->shape;
    const uint64_t hidden = s->config.hidden;
    float *q = s->q_rank > 0 ? k->cpu->d : k->cpu->b, *kv = k->cpu->d + s->q_rank;
    uint64_t ldq = s->q_rank > 0 ? k->ldd : k->ldb;
    QC_TRY(product_phase(k, QC_LLAMA_Q, 1, inputs_of(k), hidden, q, ldq, err));
    QC_TRY(product_phase(k, QC_LLAMA_K, 1, inputs_of(k), hidden, kv, k->ldd, err));
    return tokens_phase(k, norm_latents, NULL, err);
}

/* a, or hidden -> b, q and k and v. */
static qc_status take_heads(chunk *k, qc_error *err)
{
    const qc_llama_shape *s = k->cpu->shape;
    float *b = k->cpu->b, *kv = k->cpu->d + s->q_rank;
    if (s->kv_rank == 0) {
        QC_TRY(product_phase(k, QC_LLAMA_Q, 3, inputs_of(k), s->config.hidden, b, k->ldb, err));
        return tokens_phase(k, turn_tokens, NULL, err);
    }
    QC_TRY(take_latents(k, err));
    if (s->q_rank > 0)
        QC_TRY(product_phase(k, QC_LLAMA_Q_B, 1, k->cpu->d, k->ldd, b, k->ldb, err));
    QC_TRY(
        product_phase(k, QC_LLAMA_KV_B, 1, kv, k->ldd, kv + s->kv_rank + s->turned, k->ldd, err));
    return tokens_phase(k, spread_latents, NULL, err);
}

/* hidden -> c, the inputs of o. */
static qc_status attend(chunk *k, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    QC_TRY(take_heads(k, err));
    return share(cpu->threads, cpu->tasks[k->end] - cpu->tasks[k->window], 1, attend_tasks, k, err);
}

/* Inputs of o -> hidden behind attention, and a, the inputs of gate and up. */
static qc_status leave_attention(chunk *k, const float *attended, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    QC_TRY(product_phase(k, QC_LLAMA_O, 1, attended, k->attended, cpu->a, cpu->shape->config.hidden,
                         err));
    k->added_norm = k->w->vectors[QC_LLAMA_ATTENDED_NORM];
    return tokens_phase(k, add_tokens, k->w->vectors[QC_LLAMA_POST_NORM], err);
}

/* a, or hidden where there is no norm behind attention -> b, the inputs of down. */
static qc_status gate(chunk *k, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    const qc_llama_config *c = &cpu->shape->config;
    const float *x = k->w->vectors[QC_LLAMA_POST_NORM] ? cpu->a : k->hidden;
    QC_TRY(product_phase(k, QC_LLAMA_GATE, 2, x, c->hidden, cpu->b, 2 * c->intermediate, err));
    return tokens_phase(k, gate_tokens, NULL, err);
}

/* b -> hidden behind the layer. */
static qc_status leave_layer(chunk *k, qc_error *err)
{
    qc_llama_cpu *cpu = k->cpu;
    const qc_llama_config *c = &cpu->shape->config;
    QC_TRY(product_phase(k, QC_LLAMA_DOWN, 1, cpu->b, 2 * c->intermediate, cpu->a, c->hidden, err));
    k->added_norm = k->w->vectors[QC_LLAMA_FFN_NORM];
    return tokens_phase(k, add_tokens, NULL, err);
}

/* The norm of the hidden states into a, if the layer has it. */
static qc_status norm_hidden(chunk *k, qc_llama_vector which, qc_error *err)
{
    const float *weight = k->w->vectors[which];
    return weight ? tokens_phase(k, norm_tokens, weight, err) : QC_OK;
}

static qc_status run_chunk(chunk *k, qc_error *err)
{
    QC_TRY(norm_hidden(k, QC_LLAMA_INPUT_NORM, err));
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
    const qc_llama_shape *s = cpu->shape;
    const qc_llama_config *c = &s->config;
    const sizes z = sizes_of(s, cpu->batch.tokens, 1);
    return (chunk){.cpu = cpu,
                   .w = p->w,
                   .window = at->window,
                   .end = at->end,
                   .start = at->start,
                   .tokens = at->tokens,
                   .span = s->windows[p->layer],
                   .experts = qc_experts_in(&s->experts, p->layer),
                   .hidden = p->hidden + at->start * c->hidden,
                   .normed = cpu->a,
                   .turn = (qc_llama_turn)s->turns[p->layer],
                   .q = z.q,
                   .k = z.k,
                   .attended = qc_llama_attended(s),
                   .ldb = z.qkv,
                   .ldd = z.latents,
                   .scale = s->score_scale > 0.0 ? (float)s->score_scale
                                                 : 1.0f / sqrtf((float)c->head_dim)};
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
    const int before = point <= QC_LLAMA_AT_O;
    chunk k = chunk_of(cpu, p, at);
    *out = (qc_llama_inputs){p->w->vectors[QC_LLAMA_POST_NORM] ? cpu->a : k.hidden, c->hidden};
    if (point == QC_LLAMA_AT_GATE)
        return leave_attention(&k, p->attended + at->start * k.attended, err);
    QC_TRY(norm_hidden(&k, before ? QC_LLAMA_INPUT_NORM : QC_LLAMA_POST_NORM, err));
    if (point == QC_LLAMA_AT_QKV) {
        out->x = inputs_of(&k);
        return QC_OK;
    }
    if (point == QC_LLAMA_AT_Q_B || point == QC_LLAMA_AT_KV_B) {
        *out =
            (qc_llama_inputs){cpu->d + (point == QC_LLAMA_AT_Q_B ? 0 : cpu->shape->q_rank), k.ldd};
        return take_latents(&k, err);
    }
    if (point == QC_LLAMA_AT_O) {
        *out = (qc_llama_inputs){cpu->c, k.attended};
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

/* ---- logits ---- */

typedef struct {
    const qc_decoder_ops *ops;
    const qc_llama_shape *shape;
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

qc_status qc_llama_cpu_finish_logits(const qc_llama_shape *shape, const qc_llama_tools *tools,
                                     float *logits, uint64_t n, qc_error *err)
{
    ending e = {qc_decoder_ops_for(tools->isa), shape, logits};
    if (shape->logit_divisor == 1.0 && shape->logit_cap == 0.0)
        return QC_OK;
    return share(tools->threads, n, 1, finish_rows, &e, err);
}

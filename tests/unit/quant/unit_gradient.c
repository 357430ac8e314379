/* quant/gradient.h against central differences of the same functions in double. */
#include "quant/gradient.h"
#include "tests/fixtures/quant_testing.h"

#include <math.h>

#define N 37

static double random_at(uint64_t *state)
{
    return qc_gradient_uniform((*state)++) * 2.0 - 1.0;
}

static void fill(float *out, unsigned n, uint64_t *state)
{
    for (unsigned i = 0; i < n; i++)
        out[i] = (float)random_at(state);
}

/* A function of x [n] whose gradient is wanted: the product of its outputs and dy. */
typedef double (*function)(const double *x, const void *ctx);

static void check(const float *got, const float *x, unsigned n, function f, const void *ctx)
{
    const double step = 1e-5;
    double at[4 * N * 8];
    for (unsigned i = 0; i < n; i++)
        at[i] = (double)x[i];
    for (unsigned i = 0; i < n; i++) {
        const double was = at[i];
        at[i] = was + step;
        double slope = f(at, ctx);
        at[i] = was - step;
        slope = (slope - f(at, ctx)) / (2.0 * step);
        at[i] = was;
        if (fabs(slope - (double)got[i]) > 2e-5 * (1.0 + fabs(slope)))
            fail_msg("element %u: expected %.9g, found %.9g", i, slope, (double)got[i]);
    }
}

typedef struct {
    float weight[N], dy[N];
    int layer; /* a layer norm */
} normed;

static double norm_of(const double *x, const void *ctx)
{
    const normed *c = ctx;
    double mean = 0.0, squares = 0.0, y = 0.0;
    for (unsigned i = 0; i < N && c->layer; i++)
        mean += x[i] / N;
    for (unsigned i = 0; i < N; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    for (unsigned i = 0; i < N; i++)
        y += (double)c->dy[i] * (double)c->weight[i] * (x[i] - mean) /
             sqrt(squares / N + (double)1e-3f);
    return y;
}

TEST(test_norms)
{
    uint64_t at = 1;
    for (int layer = 0; layer < 2; layer++) {
        normed c = {.layer = layer};
        float x[N], dx[N];
        fill(x, N, &at);
        fill(c.weight, N, &at);
        fill(c.dy, N, &at);
        (layer ? qc_gradient_layer_norm : qc_gradient_norm)(x, c.weight, c.dy, N, 1e-3f, dx);
        check(dx, x, N, norm_of, &c);
        memcpy(dx, c.dy, sizeof dx); /* in place */
        (layer ? qc_gradient_layer_norm : qc_gradient_norm)(x, c.weight, dx, N, 1e-3f, dx);
        check(dx, x, N, norm_of, &c);
    }
}

typedef struct {
    qc_gradient_gate act;
    int gated;
    float dy[N];
} gated;

static double act_of(qc_gradient_gate act, double x)
{
    const double inner = sqrt(2.0 / acos(-1.0)) * (x + 0.044715 * x * x * x);
    return act == QC_GRADIENT_SILU        ? x / (1.0 + exp(-x))
           : act == QC_GRADIENT_GELU_TANH ? 0.5 * x * (1.0 + tanh(inner))
           : act == QC_GRADIENT_GELU      ? 0.5 * x * erfc(-x / sqrt(2.0))
                                          : fmax(x, 0.0);
}

static double gates_of(const double *x, const void *ctx)
{
    const gated *c = ctx;
    double y = 0.0;
    for (unsigned i = 0; i < N; i++)
        y += (double)c->dy[i] * act_of(c->act, x[i]) * (c->gated ? x[N + i] : 1.0);
    return y;
}

/* f is linear in a factor of all outputs. */
static void check_along(double got, const float *x, function f, const void *ctx)
{
    double at[2 * N];
    for (unsigned i = 0; i < 2 * N; i++)
        at[i] = (double)x[i];
    assert_true(fabs(got - f(at, ctx)) < 1e-5 * (1.0 + fabs(got)));
}

TEST(test_gates)
{
    uint64_t at = 1000;
    for (int act = QC_GRADIENT_SILU; act <= QC_GRADIENT_RELU; act++)
        for (int up = 0; up < 2; up++) {
            gated c = {.act = (qc_gradient_gate)act, .gated = up};
            float x[2 * N], d[2 * N];
            fill(x, 2 * N, &at);
            fill(c.dy, N, &at);
            for (unsigned i = 0; i < N; i++)
                x[i] *= 4.0f;
            memcpy(d, x, sizeof d);
            const double along = qc_gradient_gates(c.act, d, up ? d + N : NULL, c.dy, N);
            check_along(along, x, gates_of, &c);
            check(d, x, up ? 2 * N : N, gates_of, &c);
        }
}

typedef struct {
    double limit, alpha;
    float dy[N];
} clamped;

static double clamped_of(const double *x, const void *ctx)
{
    const clamped *c = ctx;
    double y = 0.0;
    for (unsigned i = 0; i < N; i++) {
        const double g = fmin(x[2 * i], c->limit);
        const double u = fmax(-c->limit, fmin(x[2 * i + 1], c->limit));
        y += (double)c->dy[i] * (u + 1.0) * g / (1.0 + exp(-c->alpha * g));
    }
    return y;
}

TEST(test_clamped_gates)
{
    uint64_t at = 1500;
    unsigned beyond = 0;
    clamped c = {.limit = 1.5, .alpha = 1.25};
    float x[2 * N], d[2 * N];
    fill(x, 2 * N, &at);
    fill(c.dy, N, &at);
    for (unsigned i = 0; i < 2 * N; i++) {
        x[i] *= 3.0f;
        beyond += fabsf(x[i]) > 1.5f;
    }
    assert_in_range(beyond, N / 2, 3 * N / 2);
    memcpy(d, x, sizeof d);
    check_along(qc_gradient_clamped_gates(d, 1.5f, 1.25f, c.dy, N), x, clamped_of, &c);
    check(d, x, 2 * N, clamped_of, &c);
}

TEST(test_rotary)
{
    uint64_t at = 2000;
    float x[16], d[16], cosines[8], sines[8];
    for (int pairs = 0; pairs < 2; pairs++) {
        double forward = 0.0, back = 0.0;
        const qc_decoder_ops *ops = qc_decoder_ops_for(QC_ISA_SCALAR);
        float y[16];
        fill(x, 16, &at);
        fill(d, 16, &at);
        fill(cosines, 8, &at);
        fill(sines, 8, &at);
        memcpy(y, x, sizeof y);
        (pairs ? ops->rotate_pairs : ops->rotate)(y, cosines, sines, 8);
        for (unsigned i = 0; i < 16; i++)
            forward += (double)y[i] * (double)d[i];
        qc_gradient_rotate(d, cosines, sines, 8, pairs);
        for (unsigned i = 0; i < 16; i++)
            back += (double)x[i] * (double)d[i];
        assert_true(fabs(forward - back) < 1e-5); /* (A x) d = x (A^T d) */
    }
}

/* ---- attention: 2 key heads, 4 query heads, and a span, a cap and sinks in turn ---- */

enum { TOKENS = 70, DIM = 3, WIDE = 2, HEADS = 4, KV = 2, ROW = HEADS * DIM + KV * (DIM + WIDE) };

typedef struct {
    qc_attend_io io;
    const float *dy;
    unsigned token; /* the others stay as they are */
    const float *x;
} attended;

static double score(const attended *c, const double *rows, unsigned t, unsigned j, unsigned head)
{
    double s = 0.0;
    for (unsigned i = 0; i < DIM; i++)
        s += rows[t * ROW + head * DIM + i] *
             rows[j * ROW + HEADS * DIM + head / (HEADS / KV) * DIM + i];
    s *= (double)c->io.scale;
    return c->io.cap > 0.0f ? (double)c->io.cap * tanh(s / (double)c->io.cap) : s;
}

static double attention_of(const double *x, const void *ctx)
{
    const attended *c = ctx;
    static double rows[TOKENS * ROW];
    double y = 0.0;
    for (unsigned i = 0; i < TOKENS * ROW; i++)
        rows[i] = i / ROW == c->token ? x[i % ROW] : (double)c->x[i];
    for (unsigned head = 0; head < HEADS; head++)
        for (unsigned t = 0; t < TOKENS; t++) {
            const unsigned from =
                c->io.span && t + 1 > c->io.span ? t + 1 - (unsigned)c->io.span : 0;
            double sum = c->io.sinks ? exp((double)c->io.sinks[head]) : 0.0, of[WIDE] = {0.0};
            for (unsigned j = from; j <= t; j++) {
                const double e = exp(score(c, rows, t, j, head));
                sum += e;
                for (unsigned i = 0; i < WIDE; i++)
                    of[i] +=
                        e * rows[j * ROW + (HEADS + KV) * DIM + head / (HEADS / KV) * WIDE + i];
            }
            for (unsigned i = 0; i < WIDE; i++)
                y += of[i] / sum * (double)c->dy[(t * HEADS + head) * WIDE + i];
        }
    return y;
}

TEST(test_attention)
{
    static float x[TOKENS * ROW], d[TOKENS * ROW], dy[TOKENS * HEADS * WIDE];
    static const float sinks[HEADS] = {0.5f, -1.0f, 2.0f, 0.0f};
    static const struct {
        uint64_t span;
        float cap;
        int sinks;
    } kinds[] = {{0, 0.0f, 0}, {5, 0.0f, 0}, {0, 1.5f, 0}, {66, 0.7f, 1}};
    const qc_blas *blas = NULL;
    qc_error err = {0};
    uint64_t at = 3000;
    void *scratch = NULL;
    if (qc_blas_open(&blas, &err) != QC_OK)
        skip();
    scratch = aligned_alloc(64, ((size_t)qc_gradient_attend_bytes(TOKENS) + 63) / 64 * 64);
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        fill(x, TOKENS * ROW, &at);
        fill(dy, TOKENS * HEADS * WIDE, &at);
        attended c = {.io = {.q = x,
                             .k = x + HEADS * DIM,
                             .v = x + (HEADS + KV) * DIM,
                             .q_stride = ROW,
                             .kv_stride = ROW,
                             .out_stride = HEADS * WIDE,
                             .q_step = DIM,
                             .k_step = DIM,
                             .v_step = WIDE,
                             .tokens = TOKENS,
                             .group = HEADS / KV,
                             .head_dim = DIM,
                             .value_dim = WIDE,
                             .span = kinds[k].span,
                             .scale = 1.3f,
                             .cap = kinds[k].cap,
                             .sinks = kinds[k].sinks ? sinks : NULL},
                      .dy = dy,
                      .x = x};
        const qc_gradient_attention g = {dy, d, d + HEADS * DIM, d + (HEADS + KV) * DIM};
        for (uint64_t kv = 0; kv < KV; kv++)
            qc_gradient_attend(blas, qc_decoder_ops_for(QC_ISA_SCALAR), &c.io, &g, kv, scratch);
        for (c.token = 0; c.token < TOKENS; c.token += 23)
            check(d + c.token * ROW, x + c.token * ROW, ROW, attention_of, &c);
    }
    free(scratch);
}

TEST(test_labels)
{
    const qc_decoder_ops *ops = qc_decoder_ops_for(QC_ISA_SCALAR);
    const float logits[4] = {0.0f, -INFINITY, logf(2.0f), 0.0f}; /* 1/4, 0, 1/2, 1/4 */
    unsigned counts[4] = {0};
    for (unsigned i = 0; i < 4000; i++) {
        float x[4];
        memcpy(x, logits, sizeof x);
        const uint64_t label = qc_gradient_sampled(ops, x, 4, qc_gradient_uniform(i));
        assert_true(label < 4);
        counts[label]++;
        for (unsigned j = 0; j < 4; j++)
            assert_true(fabsf(x[j] -
                              (j == 2   ? 0.5f
                               : j == 1 ? 0.0f
                                        : 0.25f) +
                              (j == label ? 1.0f : 0.0f)) < 1e-6f);
    }
    assert_int_equal(counts[1], 0);
    assert_in_range(counts[0], 900, 1100);
    assert_in_range(counts[2], 1850, 2150);
    float bad[2] = {0.0f, NAN};
    assert_int_equal(qc_gradient_sampled(ops, bad, 2, 0.9), 2);
}

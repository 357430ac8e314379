/* Norms, rotary positions, gates, activations, soft caps, attention and e^x against sums in double
 * and closed forms; every table gives the scalar one's bits. */
#include "quant/decoder_ops.h"
#include "tests/fixtures/quant_testing.h"

#include <math.h>

static float *random_floats(qt_rng *rng, size_t n, double scale)
{
    float *v = qt_alloc(n, sizeof *v);
    for (size_t i = 0; i < n; i++)
        v[i] = (float)(scale * (double)qt_randn(rng));
    return v;
}

static void assert_close(const float *got, const double *want, size_t n, double bound)
{
    double ee = 0.0, xx = 0.0;
    for (size_t i = 0; i < n; i++) {
        ee += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        xx += want[i] * want[i];
    }
    if (!(sqrt(ee) <= bound * sqrt(xx)))
        fail_msg("relative error %g, bound %g", sqrt(ee / xx), bound);
}

/* The tables that this machine has; the first is the scalar one. */
static unsigned tables(const qc_decoder_ops **out)
{
    unsigned n = 0;
    for (int isa = 0; isa < QC_ISA_COUNT; isa++)
        if (qc_isa_available((qc_isa)isa))
            out[n++] = qc_decoder_ops_for((qc_isa)isa);
    return n;
}

TEST(exponential)
{
    const qc_decoder_ops *t[QC_ISA_COUNT];
    unsigned count = tables(t);
    enum { N = 1 << 20 };
    float *x = qt_alloc(N, sizeof *x), *y = qt_alloc(N, sizeof *y), *z = qt_alloc(N, sizeof *z);
    for (int i = 0; i < N; i++)
        x[i] = -87.33f + (float)i * (175.3f / (float)N);
    t[0]->exponential(x, N, y);
    for (int i = 0; i < N; i++) {
        double want = exp((double)x[i]), unit = ldexp(1.0, ilogb(want) - 23);
        if (!(fabs((double)y[i] - want) <= 2.0 * unit))
            fail_msg("e^%a is %a, got %a", (double)x[i], want, (double)y[i]);
    }
    for (unsigned i = 1; i < count; i++) {
        t[i]->exponential(x, N - 5, z);
        assert_memory_equal(y, z, (N - 5) * sizeof *y);
    }
    const float special[] = {0.0f, -0.0f, -INFINITY, -1000.0f, INFINITY, 200.0f, NAN, -88.0f};
    for (unsigned i = 0; i < count; i++) {
        t[i]->exponential(special, 8, z);
        assert_true(z[0] == 1.0f && z[1] == 1.0f && z[2] == 0.0f && z[3] == 0.0f);
        assert_true(isinf(z[4]) && isinf(z[5]) && isnan(z[6]) && z[7] == 0.0f);
    }
    free(x);
    free(y);
    free(z);
}

typedef struct {
    const char *name;
    double bound;
    double (*want)(double x, double y);
    void (*run)(const qc_decoder_ops *ops, float *x, const float *y, uint64_t n);
} elementwise;

static double d_swiglu(double x, double y)
{
    return x / (1.0 + exp(-x)) * y;
}

static double d_geglu(double x, double y)
{
    return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x))) * y;
}

static double d_softcap(double x, double y)
{
    (void)y;
    return 2.5 * tanh(x / 2.5);
}

static double d_relu(double x, double y)
{
    (void)y;
    return x > 0.0 ? x : 0.0;
}

static double d_gelu(double x, double y)
{
    (void)y;
    return 0.5 * x * erfc(-x * 0.70710678118654752440);
}

static double d_gelu_tanh(double x, double y)
{
    (void)y;
    return d_geglu(x, 1.0);
}

static void run_relu(const qc_decoder_ops *ops, float *x, const float *y, uint64_t n)
{
    (void)y;
    ops->relu(x, n);
}

static void run_gelu(const qc_decoder_ops *ops, float *x, const float *y, uint64_t n)
{
    (void)y;
    ops->gelu(x, n);
}

static void run_gelu_tanh(const qc_decoder_ops *ops, float *x, const float *y, uint64_t n)
{
    (void)y;
    ops->gelu_tanh(x, n);
}

static void run_swiglu(const qc_decoder_ops *ops, float *x, const float *y, uint64_t n)
{
    ops->swiglu(x, y, n);
}

static void run_geglu(const qc_decoder_ops *ops, float *x, const float *y, uint64_t n)
{
    ops->geglu(x, y, n);
}

static void run_softcap(const qc_decoder_ops *ops, float *x, const float *y, uint64_t n)
{
    (void)y;
    ops->softcap(x, n, 2.5f);
}

TEST(elements)
{
    static const elementwise all[] = {{"swiglu", 4e-7, d_swiglu, run_swiglu},
                                      {"geglu", 4e-7, d_geglu, run_geglu},
                                      {"relu", 1e-300, d_relu, run_relu},
                                      {"gelu", 2e-7, d_gelu, run_gelu},
                                      {"gelu_tanh", 4e-7, d_gelu_tanh, run_gelu_tanh},
                                      {"softcap", 2e-6, d_softcap, run_softcap}};
    const qc_decoder_ops *t[QC_ISA_COUNT];
    unsigned count = tables(t);
    qt_rng rng = {4};
    for (size_t e = 0; e < sizeof all / sizeof *all; e++)
        for (size_t n = 1; n < 140; n += n < 40 ? 1 : 33) {
            float *x = random_floats(&rng, n, 3.0), *y = random_floats(&rng, n, 1.0);
            float *first = qt_alloc(n, sizeof *first), *other = qt_alloc(n, sizeof *other);
            double *want = qt_alloc(n, sizeof *want);
            for (size_t i = 0; i < n; i++)
                want[i] = all[e].want((double)x[i], (double)y[i]);
            memcpy(first, x, n * sizeof *x);
            all[e].run(t[0], first, y, n);
            assert_close(first, want, n, all[e].bound);
            for (unsigned i = 1; i < count; i++) {
                memcpy(other, x, n * sizeof *x);
                all[e].run(t[i], other, y, n);
                assert_memory_equal(first, other, n * sizeof *first);
            }
            free(x);
            free(y);
            free(first);
            free(other);
            free(want);
        }
    for (int gelu = 0; gelu < 2; gelu++) {
        float edge[3] = {-1000.0f, 1000.0f, -0.0f}, up[3] = {2.0f, 2.0f, 2.0f};
        (gelu ? t[0]->geglu : t[0]->swiglu)(edge, up, 3);
        assert_true(edge[0] == 0.0f && edge[1] == 2000.0f && edge[2] == 0.0f);
    }
    float edge[4] = {-1e30f, 1e30f, NAN, 0.0f};
    t[0]->softcap(edge, 4, 30.0f);
    assert_true(edge[0] == -30.0f && edge[1] == 30.0f && isnan(edge[2]) && edge[3] == 0.0f);
}

/* Every float from -14 to 14 in steps, and what is beyond. */
TEST(gelu)
{
    const qc_decoder_ops *ops = qc_decoder_ops_for(QC_ISA_SCALAR);
    enum { N = 1 << 19 };
    float *x = qt_alloc(N, sizeof *x), *y = qt_alloc(N, sizeof *y);
    for (int i = 0; i < N; i++)
        y[i] = x[i] = -14.0f + (float)i * (28.0f / (float)N);
    ops->gelu(y, N);
    for (int i = 0; i < N; i++) {
        const double want = d_gelu((double)x[i], 0.0), error = fabs((double)y[i] - want);
        if (!(error <= (x[i] < -4.0f ? 1e-10 : 6e-7 * fabs(want))))
            fail_msg("gelu(%a) is %a, got %a", (double)x[i], want, (double)y[i]);
    }
    float edge[8] = {-0.0f, 0.0f, -1e30f, 1e30f, NAN, INFINITY, -1e-30f, 1e-30f};
    ops->gelu(edge, 8);
    assert_true(edge[0] == 0.0f && edge[1] == 0.0f && edge[2] == 0.0f && edge[3] == 1e30f);
    assert_true(isnan(edge[4]) && !isfinite(edge[5]));
    assert_true(fabsf(edge[6] + 5e-31f) < 1e-36f && fabsf(edge[7] - 5e-31f) < 1e-36f);
    float other[4] = {NAN, -INFINITY, INFINITY, -0.0f};
    ops->relu(other, 4);
    assert_true(isnan(other[0]) && other[1] == 0.0f && isinf(other[2]) && other[3] == 0.0f);
    free(x);
    free(y);
}

/* The mean is far from 0 in every other row: the variance may not lose its digits. */
TEST(layer_norm)
{
    const qc_decoder_ops *t[QC_ISA_COUNT];
    unsigned count = tables(t);
    qt_rng rng = {6};
    for (size_t n = 1; n < 140; n += n < 40 ? 1 : 33) {
        float *x = random_floats(&rng, n, 3.0), *w = random_floats(&rng, n, 1.0);
        float *b = random_floats(&rng, n, 1.0);
        float *first = qt_alloc(n, sizeof *first), *other = qt_alloc(n, sizeof *other);
        double *want = qt_alloc(n, sizeof *want), mean = 0.0, squares = 0.0;
        for (size_t i = 0; i < n; i++)
            mean += (double)(x[i] += n % 2 ? 40.0f : 0.0f) / (double)n;
        for (size_t i = 0; i < n; i++)
            squares += ((double)x[i] - mean) * ((double)x[i] - mean);
        for (size_t i = 0; i < n; i++)
            want[i] = (double)w[i] * ((double)x[i] - mean) / sqrt(squares / (double)n + 1e-3) +
                      (double)b[i];
        t[0]->layer_norm(x, w, b, n, 1e-3f, first);
        assert_close(first, want, n, n % 2 ? 3e-6 : 4e-7);
        for (unsigned i = 1; i < count; i++) {
            memcpy(other, x, n * sizeof *x);
            t[i]->layer_norm(other, w, b, n, 1e-3f, other); /* in place */
            assert_memory_equal(first, other, n * sizeof *first);
        }
        free(x);
        free(w);
        free(b);
        free(first);
        free(other);
        free(want);
    }
}

TEST(norm)
{
    const qc_decoder_ops *t[QC_ISA_COUNT];
    unsigned count = tables(t);
    qt_rng rng = {3};
    for (size_t n = 1; n < 140; n += n < 40 ? 1 : 33) {
        float *x = random_floats(&rng, n, 3.0), *w = random_floats(&rng, n, 1.0);
        float *first = qt_alloc(n, sizeof *first), *other = qt_alloc(n, sizeof *other);
        double *want = qt_alloc(n, sizeof *want), sum = 0.0;
        for (size_t i = 0; i < n; i++)
            sum += (double)x[i] * (double)x[i];
        for (size_t i = 0; i < n; i++)
            want[i] = (double)w[i] * (double)x[i] / sqrt(sum / (double)n + 1e-3);
        t[0]->norm(x, w, n, 1e-3f, first);
        assert_close(first, want, n, 4e-7);
        for (unsigned i = 1; i < count; i++) {
            memcpy(other, x, n * sizeof *x);
            t[i]->norm(other, w, n, 1e-3f, other); /* in place */
            assert_memory_equal(first, other, n * sizeof *first);
        }
        free(x);
        free(w);
        free(first);
        free(other);
        free(want);
    }
}

TEST(rotation)
{
    const qc_decoder_ops *ops = qc_decoder_ops_for(QC_ISA_SCALAR);
    /* A quarter turn and none. */
    float x[4] = {1.0f, 2.0f, 3.0f, 4.0f};
    const float cosines[2] = {0.0f, 1.0f}, sines[2] = {1.0f, 0.0f};
    ops->rotate(x, cosines, sines, 2);
    assert_true(x[0] == -3.0f && x[1] == 2.0f && x[2] == 1.0f && x[3] == 4.0f);
    float y[4] = {1.0f, 3.0f, 2.0f, 4.0f}; /* the same pairs side by side */
    ops->rotate_pairs(y, cosines, sines, 2);
    assert_true(y[0] == -3.0f && y[1] == 1.0f && y[2] == 2.0f && y[3] == 4.0f);
}

typedef struct {
    uint64_t tokens, kv_heads, group, dim, span;
    uint64_t wide; /* of values; 0: as dim */
    uint64_t keys; /* that every token sees; 0: those up to itself */
    double scale;  /* 0: 1 / sqrt(dim) */
    double cap;
    int sinks;
    int apart; /* the heads of q, k and v do not lie side by side */
    float *q, *k, *v, *sink;
} sample;

static uint64_t wide_of(const sample *s)
{
    return s->wide ? s->wide : s->dim;
}

/* Rows of k and v. */
static uint64_t rows_of(const sample *s)
{
    return s->keys ? s->keys : s->tokens;
}

static void in_double(const sample *s, double *out)
{
    uint64_t heads = s->kv_heads * s->group, wide = wide_of(s);
    double *p = qt_alloc(rows_of(s), sizeof *p);
    for (uint64_t t = 0; t < s->tokens; t++) {
        for (uint64_t h = 0; h < heads; h++) {
            const float *q = s->q + (t * heads + h) * s->dim;
            uint64_t low = s->span && t + 1 > s->span ? t + 1 - s->span : 0;
            const uint64_t end = s->keys ? s->keys : t + 1;
            double most = s->sinks ? (double)s->sink[h] : -(double)INFINITY, total = 0.0,
                   *to = out + (t * heads + h) * wide;
            for (uint64_t j = low; j < end; j++) {
                const float *k = s->k + (j * s->kv_heads + h / s->group) * s->dim;
                p[j] = 0.0;
                for (uint64_t d = 0; d < s->dim; d++)
                    p[j] += (double)q[d] * (double)k[d];
                p[j] *= s->scale > 0.0 ? s->scale : 1.0 / sqrt((double)s->dim);
                if (s->cap > 0.0)
                    p[j] = s->cap * tanh(p[j] / s->cap);
                most = p[j] > most ? p[j] : most;
            }
            total = s->sinks ? exp((double)s->sink[h] - most) : 0.0;
            for (uint64_t j = low; j < end; j++)
                total += p[j] = exp(p[j] - most);
            for (uint64_t d = 0; d < wide; d++) {
                to[d] = 0.0;
                for (uint64_t j = low; j < end; j++)
                    to[d] +=
                        p[j] / total * (double)s->v[(j * s->kv_heads + h / s->group) * wide + d];
            }
        }
    }
    free(p);
}

/* most: tokens per call */
static void run_attend(const qc_decoder_ops *ops, const sample *s, uint64_t most, float *out)
{
    uint64_t heads = s->kv_heads * s->group;
    uint64_t wide = wide_of(s), bytes = qc_attend_scratch_bytes(s->group, s->dim, wide);
    void *scratch = NULL;
    assert_int_equal(posix_memalign(&scratch, 64, bytes), 0);
    memset(scratch, 0xff, bytes); /* NaN where something is read that was not written */
    /* Keys and values have one stride, so they lie side by side: all keys and then all values, or
     * each head's. */
    uint64_t stride = s->kv_heads * (s->dim + wide), step = s->apart ? s->dim + wide : s->dim;
    uint64_t first_value = s->apart ? s->dim : s->kv_heads * s->dim;
    float *kv_rows = qt_alloc(rows_of(s) * stride, sizeof *kv_rows);
    float *q_rows = qt_alloc(s->tokens * heads * step, sizeof *q_rows);
    for (uint64_t i = 0; i < s->tokens * heads; i++)
        memcpy(q_rows + i * step, s->q + i * s->dim, s->dim * sizeof *q_rows);
    for (uint64_t i = 0; i < rows_of(s) * s->kv_heads; i++) {
        float *row = kv_rows + i / s->kv_heads * stride;
        const uint64_t h = i % s->kv_heads;
        memcpy(row + h * step, s->k + i * s->dim, s->dim * sizeof *row);
        memcpy(row + first_value + h * (s->apart ? step : wide), s->v + i * wide,
               wide * sizeof *row);
    }
    const qc_attend_io io = {.q = q_rows,
                             .k = kv_rows,
                             .v = kv_rows + first_value,
                             .out = out,
                             .q_stride = heads * step,
                             .kv_stride = stride,
                             .out_stride = heads * wide,
                             .q_step = step,
                             .k_step = step,
                             .v_step = s->apart ? step : wide,
                             .tokens = s->tokens,
                             .group = s->group,
                             .head_dim = s->dim,
                             .value_dim = wide,
                             .span = s->span,
                             .keys = s->keys,
                             .scale =
                                 s->scale > 0.0 ? (float)s->scale : 1.0f / sqrtf((float)s->dim),
                             .cap = (float)s->cap,
                             .sinks = s->sinks ? s->sink : NULL};
    for (uint64_t kv = 0; kv < s->kv_heads; kv++)
        for (uint64_t t = 0; t < s->tokens; t += most)
            ops->attend(&io, kv, t, s->tokens - t < most ? s->tokens - t : most, scratch);
    free(scratch);
    free(q_rows);
    free(kv_rows);
}

TEST(attention)
{
    static const sample samples[] = {
        {.tokens = 1, .kv_heads = 1, .group = 1, .dim = 2},
        {.tokens = 64, .kv_heads = 2, .group = 1, .dim = 16},
        {.tokens = 65, .kv_heads = 1, .group = 3, .dim = 20},
        {.tokens = 200, .kv_heads = 2, .group = 4, .dim = 8},
        {.tokens = 200, .kv_heads = 1, .group = 2, .dim = 34, .span = 1},
        {.tokens = 200, .kv_heads = 1, .group = 2, .dim = 16, .span = 7},
        {.tokens = 300, .kv_heads = 1, .group = 1, .dim = 16, .span = 130},
        {.tokens = 90, .kv_heads = 1, .group = 140, .dim = 4},
        {.tokens = 150, .kv_heads = 2, .group = 1, .dim = 24, .wide = 16},
        {.tokens = 70, .kv_heads = 1, .group = 2, .dim = 8, .wide = 40, .scale = 0.25},
        {.tokens = 150, .kv_heads = 2, .group = 2, .dim = 16, .scale = 0.5, .cap = 5.0},
        {.tokens = 150, .kv_heads = 2, .group = 3, .dim = 16, .span = 40, .sinks = 1},
        {.tokens = 150, .kv_heads = 2, .group = 1, .dim = 16, .keys = 150},
        {.tokens = 64, .kv_heads = 1, .group = 3, .dim = 8, .keys = 64, .apart = 1},
        {.tokens = 70, .kv_heads = 3, .group = 1, .dim = 20, .apart = 1},
        {.tokens = 1, .kv_heads = 1, .group = 1, .dim = 16, .keys = 1},
        {.tokens = 5, .kv_heads = 2, .group = 3, .dim = 20, .keys = 131},
        {.tokens = 200, .kv_heads = 1, .group = 4, .dim = 8, .wide = 12, .keys = 1},
    };
    const qc_decoder_ops *t[QC_ISA_COUNT];
    unsigned count = tables(t);
    qt_rng rng = {5};
    for (size_t i = 0; i < sizeof samples / sizeof *samples; i++) {
        sample s = samples[i];
        size_t rows = s.tokens * s.kv_heads, n = rows * s.group * wide_of(&s);
        float *first = qt_alloc(n, sizeof *first), *other = qt_alloc(n, sizeof *other);
        double *want = qt_alloc(n, sizeof *want);
        s.q = random_floats(&rng, rows * s.group * s.dim, 3.0);
        s.k = random_floats(&rng, rows_of(&s) * s.kv_heads * s.dim, 3.0);
        s.v = random_floats(&rng, rows_of(&s) * s.kv_heads * wide_of(&s), 1.0);
        s.sink = random_floats(&rng, s.kv_heads * s.group, 8.0);
        in_double(&s, want);
        run_attend(t[0], &s, qc_attend_tokens(s.group), first);
        assert_close(first, want, n, 3e-6);
        for (unsigned j = 0; j < count; j++) {
            memset(other, 0, n * sizeof *other);
            run_attend(t[j], &s, 1, other);
            assert_memory_equal(first, other, n * sizeof *first);
        }
        free(s.q);
        free(s.k);
        free(s.v);
        free(s.sink);
        free(first);
        free(other);
        free(want);
    }
}

/* A value that is not finite may not vanish. */
TEST(not_finite)
{
    qt_rng rng = {9};
    sample s = {.tokens = 70, .kv_heads = 1, .group = 1, .dim = 16};
    float out[70 * 16];
    for (int which = 0; which < 3; which++) {
        s.q = random_floats(&rng, 70 * 16, 1.0);
        s.k = random_floats(&rng, 70 * 16, 1.0);
        s.v = random_floats(&rng, 70 * 16, 1.0);
        float *parts[] = {s.q, s.k, s.v};
        parts[which][69 * 16 + 3] = NAN;
        run_attend(qc_decoder_ops_for(QC_ISA_SCALAR), &s, 8, out);
        assert_true(isnan(out[69 * 16 + 3]));
        assert_true(isfinite(out[68 * 16 + 3]) || which == 2);
        for (int i = 0; i < 64 * 16; i++)
            assert_true(isfinite(out[i]));
        free(s.q);
        free(s.k);
        free(s.v);
    }
}

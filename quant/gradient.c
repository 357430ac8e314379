#include "quant/gradient.h"

#include "base/checked.h"
#include "quant/blas_internal.h"
#include "quant/piecework.h"

#include <inttypes.h>
#include <math.h>

/* ---- products ---- */

#define TILE_TOKENS 256u
#define TILE_COLS   512u

typedef struct {
    const qc_blas *b;
    const qc_gradient_product *p;
    uint64_t across; /* tiles of columns */
} product;

static qc_status one_tile(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const product *t = ctx;
    const qc_gradient_product *p = t->p;
    const uint64_t row = piece / t->across * TILE_TOKENS, col = piece % t->across * TILE_COLS;
    (void)thread;
    (void)err;
    t->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN,
                  (int)qc_min_u64(p->tokens - row, TILE_TOKENS),
                  (int)qc_min_u64(p->cols - col, TILE_COLS), (int)p->rows, 1.0f,
                  p->dy + row * p->dy_stride, (int)p->dy_stride, p->w + col, (int)p->cols, 1.0f,
                  p->dx + row * p->dx_stride + col, (int)p->dx_stride);
    return QC_OK;
}

qc_status qc_gradient_multiply(const qc_blas *b, unsigned threads, const qc_gradient_product *p,
                               qc_error *err)
{
    product t = {b, p, qc_ceil_div_u64(p->cols, TILE_COLS)};
    const uint64_t sizes[] = {p->rows, p->cols, p->dy_stride, p->dx_stride};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (sizes[i] > QC_BLAS_MOST)
            QC_FAIL(err, QC_ERR_SHAPE, "a gradient's matrices have sizes up to %u, found %" PRIu64,
                    QC_BLAS_MOST, sizes[i]);
    if (p->rows == 0 || p->cols == 0)
        return QC_OK;
    return qc_piecework(threads, qc_ceil_div_u64(p->tokens, TILE_TOKENS) * t.across, one_tile, &t,
                        err);
}

/* ---- norms ---- */

void qc_gradient_norm(const float *x, const float *weight, const float *dy, uint64_t n, float eps,
                      float *dx)
{
    double squares = 0.0, along = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        const double v = (double)x[i];
        squares += v * v;
        along += (double)(weight[i] * dy[i]) * v;
    }
    const double scale = 1.0 / sqrt(squares / (double)n + (double)eps);
    const double back = scale * scale * scale * along / (double)n;
    for (uint64_t i = 0; i < n; i++)
        dx[i] = (float)(scale * (double)(weight[i] * dy[i]) - back * (double)x[i]);
}

void qc_gradient_layer_norm(const float *x, const float *weight, const float *dy, uint64_t n,
                            float eps, float *dx)
{
    double mean = 0.0, squares = 0.0, sum = 0.0, along = 0.0;
    for (uint64_t i = 0; i < n; i++)
        mean += (double)x[i];
    mean /= (double)n;
    for (uint64_t i = 0; i < n; i++) {
        const double from = (double)x[i] - mean, g = (double)(weight[i] * dy[i]);
        squares += from * from;
        sum += g;
        along += g * from;
    }
    const double scale = 1.0 / sqrt(squares / (double)n + (double)eps);
    const double back = scale * scale * along / (double)n;
    for (uint64_t i = 0; i < n; i++)
        dx[i] = (float)(scale * ((double)(weight[i] * dy[i]) - sum / (double)n -
                                 back * ((double)x[i] - mean)));
}

/* ---- positions and gates ---- */

void qc_gradient_rotate(float *d, const float *cosines, const float *sines, uint64_t half,
                        int side_by_side)
{
    const uint64_t step = side_by_side ? 2 : 1, other = side_by_side ? 1 : half;
    for (uint64_t i = 0; i < half; i++) {
        float *a = d + i * step, *b = a + other;
        const float x = *a, y = *b;
        *a = x * cosines[i] + y * sines[i];
        *b = y * cosines[i] - x * sines[i];
    }
}

/* Returns the value of an activation, and *slope. */
static float value_of(qc_gradient_gate act, float x, float *slope)
{
    const float inner = 0x1.988454p-1f; /* sqrt(2 / pi) */
    switch (act) {
    case QC_GRADIENT_SILU: {
        const float s = 1.0f / (1.0f + expf(-x));
        *slope = s * (1.0f + x * (1.0f - s));
        return x * s;
    }
    case QC_GRADIENT_GELU_TANH: {
        const float t = tanhf(inner * (x + 0.044715f * x * x * x));
        *slope = 0.5f * (1.0f + t) +
                 0.5f * x * (1.0f - t * t) * inner * (1.0f + 3.0f * 0.044715f * x * x);
        return 0.5f * x * (1.0f + t);
    }
    case QC_GRADIENT_GELU: {
        const float below = 0.5f * erfcf(-x * 0x1.6a09e6p-1f);     /* x / sqrt(2) */
        *slope = below + x * 0x1.988454p-2f * expf(-0.5f * x * x); /* 1 / sqrt(2 pi) */
        return x * below;
    }
    case QC_GRADIENT_RELU:
        break;
    }
    *slope = x > 0.0f ? 1.0f : 0.0f;
    return x > 0.0f ? x : 0.0f;
}

double qc_gradient_gates(qc_gradient_gate act, float *gate, float *up, const float *dy, uint64_t n)
{
    double along = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        float slope = 0.0f;
        const float value = value_of(act, gate[i], &slope), other = up ? up[i] : 1.0f;
        along += (double)(dy[i] * value) * (double)other;
        gate[i] = dy[i] * slope * other;
        if (up)
            up[i] = dy[i] * value;
    }
    return along;
}

double qc_gradient_clamped_gates(float *both, float limit, float alpha, const float *dy, uint64_t n)
{
    double along = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        float *gate = both + 2 * i, *up = gate + 1;
        const float g = *gate < limit ? *gate : limit;
        const float u = *up > limit ? limit : *up < -limit ? -limit : *up;
        const float s = 1.0f / (1.0f + expf(-alpha * g));
        along += (double)(dy[i] * (u + 1.0f)) * (double)(g * s);
        *gate = *gate > limit ? 0.0f : dy[i] * (u + 1.0f) * s * (1.0f + alpha * g * (1.0f - s));
        *up = *up > limit || *up < -limit ? 0.0f : dy[i] * g * s;
    }
    return along;
}

/* ---- the loss ---- */

uint64_t qc_gradient_sampled(const qc_decoder_ops *ops, float *logits, uint64_t n, double uniform)
{
    float most = -INFINITY;
    double sum = 0.0, reached = 0.0;
    uint64_t label = n;
    for (uint64_t i = 0; i < n; i++)
        most = logits[i] > most ? logits[i] : most;
    for (uint64_t i = 0; i < n; i++)
        logits[i] -= most;
    ops->exponential(logits, n, logits);
    for (uint64_t i = 0; i < n; i++)
        sum += (double)logits[i];
    for (uint64_t i = 0; i < n; i++) {
        reached += (double)logits[i];
        if (label == n && logits[i] > 0.0f && reached > uniform * sum)
            label = i;
        logits[i] = (float)((double)logits[i] / sum);
    }
    if (label < n)
        logits[label] -= 1.0f;
    return label;
}

double qc_gradient_uniform(uint64_t number)
{
    uint64_t z = (number + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* Attention backwards, for ROWS query rows of a head at a time:
 *
 *   S = scale Q K^T   P = softmax(S)   dP = dO V^T   dS = P (dP - sum over keys of P dP)
 *   dQ = scale dS K   dK += scale dS^T Q   dV += P^T dO
 *
 * P is computed anew, so no more than two [ROWS, keys] matrices are needed. */
#include "base/checked.h"
#include "quant/blas_internal.h"
#include "quant/gradient.h"

#include <math.h>
#include <string.h>

#define ROWS 64u

uint64_t qc_gradient_attend_bytes(uint64_t tokens)
{
    return qc_sat_mul((2u * ROWS + 1u) * sizeof(float), tokens);
}

/* Keys [begin, end) of rows [first, first + count) of a head: those that any of the rows sees. */
typedef struct {
    const qc_attend_io *io;
    const qc_decoder_ops *ops;
    uint64_t first, count, begin, end;
    float sink;            /* -INFINITY: none */
    float *p, *ds, *slope; /* [ROWS, tokens] and the slopes of a row */
} block;

static uint64_t seen_from(const qc_attend_io *io, uint64_t token)
{
    return io->span && token + 1 > io->span ? token + 1 - io->span : 0;
}

/* Scores -> probabilities, in place; what a row does not see becomes 0. Where scores are capped,
 * *slope has what the cap takes from their gradients. */
static void softmax_row(const block *k, uint64_t row, float *s, float *slope)
{
    const qc_attend_io *io = k->io;
    const uint64_t keys = k->end - k->begin, token = k->first + row;
    const uint64_t from = seen_from(io, token) - k->begin, to = token + 1 - k->begin;
    float most = k->sink;
    double sum = 0.0;
    if (io->cap > 0.0f) {
        k->ops->softcap(s + from, to - from, io->cap);
        for (uint64_t j = from; j < to; j++)
            slope[j] = 1.0f - s[j] / io->cap * (s[j] / io->cap);
    }
    for (uint64_t j = from; j < to; j++)
        most = s[j] > most ? s[j] : most;
    for (uint64_t j = from; j < to; j++)
        s[j] -= most;
    k->ops->exponential(s + from, to - from, s + from);
    for (uint64_t j = from; j < to; j++)
        sum += (double)s[j];
    if (k->sink > -INFINITY)
        sum += exp((double)(k->sink - most));
    memset(s, 0, (size_t)from * sizeof *s);
    memset(s + to, 0, (size_t)(keys - to) * sizeof *s);
    for (uint64_t j = from; j < to; j++)
        s[j] = (float)((double)s[j] / sum);
}

/* dP -> dS, in place. p is [keys]; slope is NULL where scores are not capped. */
static void scores_row(const float *p, const float *slope, float *d, uint64_t keys, float scale)
{
    double sum = 0.0;
    for (uint64_t j = 0; j < keys; j++)
        sum += (double)p[j] * (double)d[j];
    for (uint64_t j = 0; j < keys; j++) {
        const float s = p[j] * (d[j] - (float)sum) * scale;
        d[j] = slope && p[j] > 0.0f ? s * slope[j] : s;
    }
}

static void one_block(const qc_blas *b, block *k, const qc_gradient_attention *d, uint64_t head,
                      uint64_t kv)
{
    const qc_attend_io *io = k->io;
    const int rows = (int)k->count, keys = (int)(k->end - k->begin), dim = (int)io->head_dim,
              wide = (int)io->value_dim, q_stride = (int)io->q_stride,
              kv_stride = (int)io->kv_stride, out_stride = (int)io->out_stride;
    const uint64_t q_at = k->first * io->q_stride + head * io->q_step;
    const uint64_t k_at = k->begin * io->kv_stride + kv * io->k_step;
    const uint64_t v_at = k->begin * io->kv_stride + kv * io->v_step;
    const float *out = d->out + k->first * io->out_stride + head * io->value_dim;
    float *all = k->ds;
    b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, rows, keys, dim, io->scale, io->q + q_at,
               q_stride, io->k + k_at, kv_stride, 0.0f, k->p, keys);
    b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, rows, keys, wide, 1.0f, out, out_stride,
               io->v + v_at, kv_stride, 0.0f, all, keys);
    for (int r = 0; r < rows; r++) {
        float *p = k->p + (size_t)r * (size_t)keys;
        softmax_row(k, (uint64_t)r, p, k->slope);
        scores_row(p, io->cap > 0.0f ? k->slope : NULL, all + (size_t)r * (size_t)keys,
                   (uint64_t)keys, io->scale);
    }
    b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, rows, dim, keys, 1.0f, all, keys,
               io->k + k_at, kv_stride, 0.0f, d->q + q_at, q_stride);
    b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_TRANS, QC_BLAS_PLAIN, keys, dim, rows, 1.0f, all, keys,
               io->q + q_at, q_stride, 1.0f, d->k + k_at, kv_stride);
    b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_TRANS, QC_BLAS_PLAIN, keys, wide, rows, 1.0f, k->p, keys, out,
               out_stride, 1.0f, d->v + v_at, kv_stride);
}

void qc_gradient_attend(const qc_blas *b, const qc_decoder_ops *ops, const qc_attend_io *io,
                        const qc_gradient_attention *d, uint64_t kv, void *scratch)
{
    block k = {.io = io, .ops = ops, .p = scratch};
    k.ds = k.p + (size_t)ROWS * (size_t)io->tokens;
    k.slope = k.ds + (size_t)ROWS * (size_t)io->tokens;
    for (uint64_t t = 0; t < io->tokens; t++) {
        memset(d->k + t * io->kv_stride + kv * io->k_step, 0, io->head_dim * sizeof(float));
        memset(d->v + t * io->kv_stride + kv * io->v_step, 0, io->value_dim * sizeof(float));
    }
    for (uint64_t head = kv * io->group; head < (kv + 1) * io->group; head++) {
        k.sink = io->sinks ? io->sinks[head] : -INFINITY;
        for (k.first = 0; k.first < io->tokens; k.first += ROWS) {
            k.count = qc_min_u64(io->tokens - k.first, ROWS);
            k.begin = seen_from(io, k.first);
            k.end = k.first + k.count;
            one_block(b, &k, d, head, kv);
        }
    }
}

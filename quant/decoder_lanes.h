/* The bodies of qc_decoder_ops, built once per instruction set with vectors of DEC_WIDTH floats;
 * only decoder_*.c include it. All operations are element by element, so the width changes no bit.
 *
 * A call of attend takes ROWS = count * group rows of q against the keys of one head, 64 at a time:
 *
 *   q [ROWS][head_dim] scaled   keys [head_dim][64] turned      values [64][padded]
 *        scores = q keys [ROWS][64] -> e^(score - maximum) -> sums [ROWS][padded] += scores values
 * */
#include "quant/decoder_internal.h"
#include "quant/quant_internal.h"

#include <math.h>
#include <string.h>

#define DEC_INLINE static inline __attribute__((always_inline))
#define PARTS      (QC_LANES / DEC_WIDTH) /* vectors of 16 lanes */

typedef float vec __attribute__((vector_size(DEC_WIDTH * 4)));
typedef int32_t ivec __attribute__((vector_size(DEC_WIDTH * 4)));
typedef uint32_t uvec __attribute__((vector_size(DEC_WIDTH * 4)));

/* Vectors are passed by pointer: their ABI depends on the instruction set. */
DEC_INLINE void load(vec *v, const float *at)
{
    memcpy(v, at, sizeof *v);
}

DEC_INLINE void store(float *at, const vec *v)
{
    memcpy(at, v, sizeof *v);
}

DEC_INLINE void spread(vec *v, float x)
{
    *v = x - (vec){0.0f}; /* not +: -0 stays */
}

/* e^x = 2^n e^r, |r| <= ln 2 / 2, with the series of e^r up to r^7, whose rest is below 2^-27.
 * Adding 1.5 * 2^23 rounds n. ln 2 is split in two parts, the first of 9 bits, so that n times it
 * is exact. */
DEC_INLINE void exponential_of(vec *x)
{
    const float big = 0x1.8p23f, ln2_high = 0x1.62p-1f, ln2_low = 0x1.c85fe0p-10f;
    vec v = *x;
    ivec low = v<-0x1.5d589ep6f, high = v> 88.0f; /* -87.33: the scale stays finite */
    vec shifted = v * 0x1.715476p0f + big;
    vec n = shifted - big;
    vec r = (v - n * ln2_high) - n * ln2_low;
    vec p = r * (1.0f / 5040.0f) + (1.0f / 720.0f);
    p = p * r + (1.0f / 120.0f);
    p = p * r + (1.0f / 24.0f);
    p = p * r + (1.0f / 6.0f);
    p = p * r + 0.5f;
    p = r + p * (r * r);
    uvec bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits << 23) + 0x3f800000;
    vec scale;
    memcpy(&scale, &bits, sizeof scale);
    vec y = scale + p * scale, infinite;
    spread(&infinite, INFINITY);
    ivec out, top;
    memcpy(&out, &y, sizeof out);
    memcpy(&top, &infinite, sizeof top);
    out = (out & ~low & ~high) | (top & high);
    memcpy(x, &out, sizeof *x);
}

static void exponential(const float *x, uint64_t n, float *out)
{
    uint64_t i = 0;
    vec v;
    for (; i + DEC_WIDTH <= n; i += DEC_WIDTH) {
        load(&v, x + i);
        exponential_of(&v);
        store(out + i, &v);
    }
    if (i < n) {
        float room[DEC_WIDTH] = {0.0f};
        memcpy(room, x + i, (size_t)(n - i) * sizeof *x);
        load(&v, room);
        exponential_of(&v);
        store(room, &v);
        memcpy(out + i, room, (size_t)(n - i) * sizeof *x);
    }
}

static void norm(const float *x, const float *weight, uint64_t n, float eps, float *out)
{
    float lanes[QC_LANES] = {0.0f};
    vec acc[PARTS], v;
    uint64_t i = 0;
    memset(acc, 0, sizeof acc);
    for (; i + QC_LANES <= n; i += QC_LANES)
        for (unsigned p = 0; p < PARTS; p++) {
            load(&v, x + i + p * DEC_WIDTH);
            acc[p] += v * v;
        }
    memcpy(lanes, acc, sizeof lanes);
    for (unsigned l = 0; i + l < n; l++)
        lanes[l] += x[i + l] * x[i + l];
    float scale = 1.0f / sqrtf(qc_fold16(lanes) / (float)n + eps);
    for (i = 0; i < n; i++)
        out[i] = weight[i] * (x[i] * scale);
}

/* Sums and squares go to lanes, and are folded, as in norm. */
static void layer_norm(const float *x, const float *weight, const float *bias, uint64_t n,
                       float eps, float *out)
{
    float lanes[2][QC_LANES] = {{0.0f}}, mean = 0.0f;
    for (unsigned pass = 0; pass < 2; pass++) {
        vec acc[PARTS], v, middle;
        uint64_t i = 0;
        memset(acc, 0, sizeof acc);
        spread(&middle, mean);
        for (; i + QC_LANES <= n; i += QC_LANES)
            for (unsigned p = 0; p < PARTS; p++) {
                load(&v, x + i + p * DEC_WIDTH);
                v -= middle;
                acc[p] += pass ? v * v : v;
            }
        memcpy(lanes[pass], acc, sizeof acc);
        for (unsigned l = 0; i + l < n; l++) {
            const float away = x[i + l] - mean;
            lanes[pass][l] += pass ? away * away : away;
        }
        if (pass == 0)
            mean = qc_fold16(lanes[0]) / (float)n;
    }
    const float scale = 1.0f / sqrtf(qc_fold16(lanes[1]) / (float)n + eps);
    for (uint64_t i = 0; i < n; i++)
        out[i] = weight[i] * ((x[i] - mean) * scale) + bias[i];
}

static void rotate_pairs(float *x, const float *cosines, const float *sines, uint64_t half)
{
    for (uint64_t i = 0; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = b * cosines[i] + a * sines[i];
    }
}

static void rotate(float *x, const float *cosines, const float *sines, uint64_t half)
{
    for (uint64_t i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosines[i] - b * sines[i];
        x[i + half] = b * cosines[i] + a * sines[i];
    }
}

/* What a gate's x / (1 + e^-t) takes as t. tanh(t / 2) is 2 / (1 + e^-t) - 1, so that GELU's tanh
 * has the same form as SiLU. */
DEC_INLINE void gate_turn(vec *t, int gelu)
{
    const float inner = 0x1.988454p-1f; /* sqrt(2 / pi) */
    if (gelu) {
        vec x = *t;
        *t = 2.0f * inner * (x + 0.044715f * (x * x * x));
    }
}

DEC_INLINE void gate_at(float *gate, const float *up, int gelu)
{
    vec g, e, u;
    load(&g, gate);
    load(&u, up);
    e = g;
    gate_turn(&e, gelu);
    e = -e;
    exponential_of(&e);
    g = g / (1.0f + e) * u;
    store(gate, &g);
}

DEC_INLINE void gated(float *gate, const float *up, uint64_t n, int gelu)
{
    uint64_t i = 0;
    for (; i + DEC_WIDTH <= n; i += DEC_WIDTH)
        gate_at(gate + i, up + i, gelu);
    if (i < n) {
        float g[DEC_WIDTH] = {0.0f}, u[DEC_WIDTH] = {0.0f};
        size_t bytes = (size_t)(n - i) * sizeof *gate;
        memcpy(g, gate + i, bytes);
        memcpy(u, up + i, bytes);
        gate_at(g, u, gelu);
        memcpy(gate + i, g, bytes);
    }
}

static void swiglu(float *gate, const float *up, uint64_t n)
{
    gated(gate, up, n, 0);
}

static void geglu(float *gate, const float *up, uint64_t n)
{
    gated(gate, up, n, 1);
}

DEC_INLINE void cap_at(float *at, float cap)
{
    vec x, e;
    load(&x, at);
    e = x / cap * -2.0f;
    exponential_of(&e);
    x = (2.0f / (1.0f + e) - 1.0f) * cap;
    store(at, &x);
}

static void softcap(float *x, uint64_t n, float cap)
{
    uint64_t i = 0;
    for (; i + DEC_WIDTH <= n; i += DEC_WIDTH)
        cap_at(x + i, cap);
    if (i < n) {
        float room[DEC_WIDTH] = {0.0f};
        memcpy(room, x + i, (size_t)(n - i) * sizeof *x);
        cap_at(room, cap);
        memcpy(x + i, room, (size_t)(n - i) * sizeof *x);
    }
}

/* ---- activations without a gate ---- */

/* Elements whose mask is 0 become 0; a mask may also keep single bits. */
DEC_INLINE void keep_where(vec *x, const ivec *mask)
{
    ivec bits;
    memcpy(&bits, x, sizeof bits);
    bits &= *mask;
    memcpy(x, &bits, sizeof bits);
}

DEC_INLINE void relu_of(vec *x)
{
    ivec stays = ~(*x < 0.0f); /* NaN stays */
    keep_where(x, &stays);
}

DEC_INLINE void gelu_tanh_of(vec *x)
{
    vec e = *x;
    gate_turn(&e, 1);
    e = -e;
    exponential_of(&e);
    *x = *x / (1.0f + e);
}

/* GELU is max(x, 0) - a Q(a), where a = |x| and Q(a) = (1 - erf(a / sqrt(2))) / 2. Nothing cancels:
 * Q(a) = e^(-a^2 / 2) p(1 / (1 + 0.3125 a)) with a polynomial p of degree 9, which was fitted up to
 * a = 13.3 (beyond, e^(-a^2 / 2) is 0) and is right to 2.4e-8 of itself. */
DEC_INLINE void gelu_of(vec *x)
{
    static const float p[] = {0x1.f8a4dcp-17f, 0x1.fd251cp-4f,  0x1.073b3cp-3f, 0x1.6e2e00p-4f,
                              0x1.65777cp-3f,  -0x1.3b6ce4p-3f, 0x1.621da6p-2f, -0x1.3ce100p-2f,
                              0x1.e1523ep-4f,  -0x1.10cd64p-6f};
    vec a = *x, e, t, sum;
    ivec sign;
    spread(&e, -0.0f);
    memcpy(&sign, &e, sizeof sign);
    sign = ~sign;
    keep_where(&a, &sign);
    e = a * a * -0.5f;
    exponential_of(&e);
    t = 1.0f / (1.0f + 0.3125f * a);
    spread(&sum, p[9]);
    for (int i = 8; i >= 0; i--)
        sum = sum * t + p[i];
    relu_of(x);
    *x -= a * (e * sum);
}

DEC_INLINE void each(float *x, uint64_t n, void (*of)(vec *x))
{
    vec v;
    uint64_t i = 0;
    for (; i + DEC_WIDTH <= n; i += DEC_WIDTH) {
        load(&v, x + i);
        of(&v);
        store(x + i, &v);
    }
    if (i < n) {
        float room[DEC_WIDTH] = {0.0f};
        memcpy(room, x + i, (size_t)(n - i) * sizeof *x);
        load(&v, room);
        of(&v);
        store(room, &v);
        memcpy(x + i, room, (size_t)(n - i) * sizeof *x);
    }
}

static void relu(float *x, uint64_t n)
{
    each(x, n, relu_of);
}

static void gelu(float *x, uint64_t n)
{
    each(x, n, gelu_of);
}

static void gelu_tanh(float *x, uint64_t n)
{
    each(x, n, gelu_tanh_of);
}

/* ---- attention ---- */

/* out [rows][64] = q [rows][dim] keys [dim][64]; rows is the constant 1 or DEC_ROWS. */
DEC_INLINE void score_rows(const float *q, uint64_t dim, const float *keys, unsigned rows,
                           float *out)
{
    for (unsigned at = 0; at < QC_ATTEND_KEYS; at += 2 * DEC_WIDTH) {
        vec acc[DEC_ROWS][2], a, b, x;
        memset(acc, 0, sizeof acc);
        for (uint64_t d = 0; d < dim; d++) {
            load(&a, keys + d * QC_ATTEND_KEYS + at);
            load(&b, keys + d * QC_ATTEND_KEYS + at + DEC_WIDTH);
            for (unsigned r = 0; r < rows; r++) {
                spread(&x, q[r * dim + d]);
                acc[r][0] += x * a;
                acc[r][1] += x * b;
            }
        }
        for (unsigned r = 0; r < rows; r++) {
            store(out + r * QC_ATTEND_KEYS + at, &acc[r][0]);
            store(out + r * QC_ATTEND_KEYS + at + DEC_WIDTH, &acc[r][1]);
        }
    }
}

/* sums [rows][padded] += p [rows][64] values [n][padded] */
DEC_INLINE void add_values(const float *p, const float *values, uint64_t n, uint64_t padded,
                           unsigned rows, float *sums)
{
    for (uint64_t at = 0; at < padded; at += DEC_WIDTH) {
        vec acc[DEC_ROWS], v, x;
        for (unsigned r = 0; r < rows; r++)
            load(&acc[r], sums + r * padded + at);
        for (uint64_t j = 0; j < n; j++) {
            load(&v, values + j * padded + at);
            for (unsigned r = 0; r < rows; r++) {
                spread(&x, p[r * QC_ATTEND_KEYS + j]);
                acc[r] += x * v;
            }
        }
        for (unsigned r = 0; r < rows; r++)
            store(sums + r * padded + at, &acc[r]);
    }
}

DEC_INLINE void take_larger(vec *most, const vec *v)
{
    ivec larger = *v > *most, a, b;
    memcpy(&a, v, sizeof a);
    memcpy(&b, most, sizeof b);
    a = (a & larger) | (b & ~larger);
    memcpy(most, &a, sizeof a);
}

/* For each row: the scores of keys [low, high) of the block become e^(score - maximum), all others
 * 0, and the sums so far are rescaled to the new maximum. */
static void weigh(float *scores, uint64_t low, uint64_t high, uint64_t padded, float *maximum,
                  float *total, float *sums)
{
    float lanes[QC_LANES] = {0.0f};
    vec v, large, acc[PARTS];
    if (low >= high) {
        memset(scores, 0, QC_ATTEND_KEYS * sizeof *scores);
        return;
    }
    for (uint64_t j = 0; j < low; j++)
        scores[j] = -INFINITY;
    for (uint64_t j = high; j < QC_ATTEND_KEYS; j++)
        scores[j] = -INFINITY;
    spread(&large, *maximum);
    for (unsigned j = 0; j < QC_ATTEND_KEYS; j += DEC_WIDTH) {
        load(&v, scores + j);
        take_larger(&large, &v);
    }
    store(lanes, &large);
    float most = lanes[0];
    for (unsigned l = 1; l < DEC_WIDTH; l++)
        most = lanes[l] > most ? lanes[l] : most;
    if (most == -INFINITY) {
        memset(scores, 0, QC_ATTEND_KEYS * sizeof *scores);
        return;
    }
    memset(acc, 0, sizeof acc);
    spread(&large, most);
    for (unsigned j = 0; j < QC_ATTEND_KEYS; j += QC_LANES) {
        for (unsigned p = 0; p < PARTS; p++) {
            load(&v, scores + j + p * DEC_WIDTH);
            v -= large;
            exponential_of(&v);
            store(scores + j + p * DEC_WIDTH, &v);
            acc[p] += v;
        }
    }
    memcpy(lanes, acc, sizeof lanes);
    float shrink = *maximum - most;
    exponential(&shrink, 1, &shrink);
    *total = *total * shrink + qc_fold16(lanes);
    *maximum = most;
    if (shrink != 1.0f)
        for (uint64_t d = 0; d < padded; d++)
            sums[d] *= shrink;
}

/* Copies the keys and values of tokens [at, at + n), the keys turned. */
static void take_keys(const qc_attend_io *io, const qc_attend_room *m, uint64_t kv, uint64_t at,
                      uint64_t n)
{
    const uint64_t dim = io->head_dim, wide = io->value_dim, padded = qc_attend_padded(wide);
    for (uint64_t j = 0; j < n; j++) {
        const float *k = io->k + (at + j) * io->kv_stride + kv * io->k_step;
        for (uint64_t d = 0; d < dim; d++)
            m->keys[d * QC_ATTEND_KEYS + j] = k[d];
        memcpy(m->values + j * padded, io->v + (at + j) * io->kv_stride + kv * io->v_step,
               (size_t)wide * sizeof *m->values);
        memset(m->values + j * padded + wide, 0, (size_t)(padded - wide) * sizeof *m->values);
    }
    for (uint64_t j = n; j < QC_ATTEND_KEYS; j++)
        for (uint64_t d = 0; d < dim; d++)
            m->keys[d * QC_ATTEND_KEYS + j] = 0.0f;
}

/* The rows of q, and what is carried from block to block. A sink is a key without a value that
 * every token sees: it begins the maximum and the total. */
static void begin_rows(const qc_attend_io *io, const qc_attend_room *m, uint64_t kv, uint64_t first,
                       uint64_t rows)
{
    const uint64_t dim = io->head_dim;
    for (uint64_t r = 0; r < rows; r++) {
        const uint64_t head = kv * io->group + r % io->group;
        const float *q = io->q + (first + r / io->group) * io->q_stride + head * io->q_step;
        for (uint64_t d = 0; d < dim; d++)
            m->q[r * dim + d] = q[d] * io->scale;
        m->maximum[r] = io->sinks ? io->sinks[head] : -INFINITY;
        m->total[r] = io->sinks ? 1.0f : 0.0f;
    }
    memset(m->sums, 0, (size_t)(rows * qc_attend_padded(io->value_dim)) * sizeof *m->sums);
}

static void attend(const qc_attend_io *io, uint64_t kv, uint64_t first, uint64_t count,
                   void *scratch)
{
    const uint64_t dim = io->head_dim, wide = io->value_dim, padded = qc_attend_padded(wide);
    const uint64_t rows = count * io->group;
    qc_attend_room m;
    qc_attend_split(&m, io->group, dim, wide, scratch);
    begin_rows(io, &m, kv, first, rows);
    uint64_t begin = io->span && first + 1 > io->span ? first + 1 - io->span : 0;
    const uint64_t end = io->keys ? io->keys : first + count;
    for (uint64_t at = begin / QC_ATTEND_KEYS * QC_ATTEND_KEYS; at < end; at += QC_ATTEND_KEYS) {
        uint64_t n = end - at < QC_ATTEND_KEYS ? end - at : QC_ATTEND_KEYS;
        take_keys(io, &m, kv, at, n);
        uint64_t r = 0;
        for (; r + DEC_ROWS <= rows; r += DEC_ROWS)
            score_rows(m.q + r * dim, dim, m.keys, DEC_ROWS, m.scores + r * QC_ATTEND_KEYS);
        for (; r < rows; r++)
            score_rows(m.q + r * dim, dim, m.keys, 1, m.scores + r * QC_ATTEND_KEYS);
        if (io->cap > 0.0f)
            softcap(m.scores, rows * QC_ATTEND_KEYS, io->cap);
        for (r = 0; r < rows; r++) {
            uint64_t t = io->keys ? io->keys - 1 : first + r / io->group;
            uint64_t low = io->span && t + 1 > io->span + at ? t + 1 - io->span - at : 0;
            uint64_t high = t < at ? 0 : t + 1 - at < QC_ATTEND_KEYS ? t + 1 - at : QC_ATTEND_KEYS;
            weigh(m.scores + r * QC_ATTEND_KEYS, low, high, padded, &m.maximum[r], &m.total[r],
                  m.sums + r * padded);
        }
        for (r = 0; r + DEC_ROWS <= rows; r += DEC_ROWS)
            add_values(m.scores + r * QC_ATTEND_KEYS, m.values, n, padded, DEC_ROWS,
                       m.sums + r * padded);
        for (; r < rows; r++)
            add_values(m.scores + r * QC_ATTEND_KEYS, m.values, n, padded, 1, m.sums + r * padded);
    }
    for (uint64_t r = 0; r < rows; r++) {
        float *out = io->out + (first + r / io->group) * io->out_stride +
                     (kv * io->group + r % io->group) * wide;
        for (uint64_t d = 0; d < wide; d++)
            out[d] = m.sums[r * padded + d] / m.total[r];
    }
}

#define DEC_TABLE(isa)                                                                             \
    {                                                                                              \
        isa, norm, layer_norm, rotate, rotate_pairs, swiglu, geglu, relu, gelu, gelu_tanh,         \
            softcap, attend, exponential                                                           \
    }

/* What a decoder's layer needs beside its products, on the GPU: each kernel against sums in double,
 * over sizes that are no multiple of anything, and twice for the same bits. */
#include "tests/fixtures/quant_device_fixture.h"

#include "kernels/cuda_llama.h"

#include <math.h>

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

static qt_rng rng = {7};

static float random_float(double spread)
{
    return (float)((double)qt_randn(&rng) * spread);
}

static float *random_floats(size_t n, double spread)
{
    float *v = qt_alloc(n, sizeof *v);
    for (size_t i = 0; i < n; i++)
        v[i] = random_float(spread);
    return v;
}

/* |got - want| <= tolerance * scale for all; a NaN is never within. */
static void near(const float *got, const double *want, size_t n, double tolerance, double scale,
                 const char *what)
{
    for (size_t i = 0; i < n; i++)
        QT_CHECK(fabs((double)got[i] - want[i]) <= tolerance * scale,
                 "%s: element %zu of %zu is %.9g, not %.9g", what, i, n, (double)got[i], want[i]);
}

/* Halves and exponents as a kernel left them, as floats; the largest of a row is in [0.5, 1). */
static float *floats_of(const uint16_t *half, const int *exponent, size_t rows, size_t cols,
                        const char *what)
{
    float *out = qt_alloc(rows * cols, sizeof *out);
    for (size_t r = 0; r < rows; r++) {
        float largest = 0.0f;
        for (size_t c = 0; c < cols; c++) {
            float h = qc_f32_from_f16(half[r * cols + c]);
            largest = fabsf(h) > largest ? fabsf(h) : largest;
            out[r * cols + c] = (float)ldexp((double)h, exponent[r]);
        }
        QT_CHECK(largest == 0.0f ? exponent[r] == 0 : largest >= 0.5f && largest <= 1.0f,
                 "%s: row %zu: the largest half is %g", what, r, (double)largest);
    }
    return out;
}

typedef struct {
    qd_buffer half, exponent;
} halves_buffer;

static halves_buffer new_halves(size_t rows, size_t cols, qc_cuda_halves *out)
{
    halves_buffer b = {qd_new(rows * cols * 2, 0), qd_new(rows * 4, 0)};
    *out = (qc_cuda_halves){rows, cols, b.half.p, b.exponent.p};
    return b;
}

static float *take_halves(halves_buffer *b, size_t rows, size_t cols, const char *what)
{
    uint16_t *half = qd_take(&b->half, what);
    int *exponent = qd_take(&b->exponent, what);
    float *v = floats_of(half, exponent, rows, cols, what);
    free(half);
    free(exponent);
    return v;
}

/* ---- rows ---- */

/* Rows of very different sizes; row 1 has an outlier, row 2 is of zeros. */
static float *random_rows(size_t rows, size_t cols)
{
    float *x = qt_alloc(rows * cols, sizeof *x);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++)
            x[r * cols + c] = r == 2 ? 0.0f : random_float(ldexp(1.0, 30 * ((int)(r % 5) - 2)));
    if (rows > 1)
        x[cols + cols / 2] = -3e37f;
    return x;
}

static void check_rows(size_t rows, size_t cols, int with_gain)
{
    char what[80];
    snprintf(what, sizeof what, "halves %zu x %zu gain %d", rows, cols, with_gain);
    const float eps = 1e-5f;
    float *x = random_rows(rows, cols), *gain = random_floats(cols, 1.0);
    if (with_gain && rows > 1)
        x[cols + cols / 2] = 1e15f; /* whose square is a float */
    if (with_gain)
        for (size_t i = 0; i < rows * cols; i++)
            x[i] = fminf(fmaxf(x[i], -1e15f), 1e15f);
    qd_buffer d_x = qd_new_from(x, rows * cols * 4, 4), d_gain = qd_new_from(gain, cols * 4, 4);
    qc_cuda_halves out;
    halves_buffer b = new_halves(rows, cols, &out);
    QD_OK(qc_cuda_llama_halves(d_x.p, with_gain ? d_gain.p : NULL, eps, &out, qd.stream, &qd.err));
    float *got = take_halves(&b, rows, cols, what);
    double *want = qt_alloc(cols, sizeof *want);
    for (size_t r = 0; r < rows; r++) {
        double sum = 0, largest = 0;
        for (size_t c = 0; c < cols; c++)
            sum += (double)x[r * cols + c] * (double)x[r * cols + c];
        double inverse = with_gain ? 1.0 / sqrt(sum / (double)cols + (double)eps) : 1.0;
        for (size_t c = 0; c < cols; c++) {
            want[c] = (double)x[r * cols + c] * inverse * (with_gain ? (double)gain[c] : 1.0);
            largest = fabs(want[c]) > largest ? fabs(want[c]) : largest;
        }
        for (size_t c = 0; c < cols; c++) /* the larger of both roundings, and the norm's */
            near(got + r * cols + c, want + c, 1, 1.0,
                 fabs(want[c]) * 0x1.1p-11 + largest * 0x1p-24, what);
    }
    qd_drop(&d_x);
    qd_drop(&d_gain);
    free(x);
    free(gain);
    free(got);
    free(want);
}

TEST(test_rows_to_halves)
{
    static const size_t cols[] = {1, 2, 31, 257, 1000};
    for (size_t i = 0; i < sizeof cols / sizeof *cols; i++)
        for (int gain = 0; gain < 2; gain++)
            check_rows(i % 2 ? 7 : 1, cols[i], gain);
    check_rows(300, 33, 1); /* more rows than a shuffled grid of the shim has blocks */
}

TEST(test_halves_of_infinity)
{
    float x[2][3] = {{1.0f, INFINITY, -1.0f}, {0.0f, NAN, 2.0f}};
    qd_buffer d_x = qd_new_from(x, sizeof x, 0);
    qc_cuda_halves out;
    halves_buffer b = new_halves(2, 3, &out);
    QD_OK(qc_cuda_llama_halves(d_x.p, NULL, 0.0f, &out, qd.stream, &qd.err));
    uint16_t *half = qd_take(&b.half, "infinity");
    int *exponent = qd_take(&b.exponent, "infinity");
    QT_CHECK(half[1] == 0x7c00 && isnan(qc_f32_from_f16(half[4])), "%04x %04x", half[1], half[4]);
    QT_CHECK(exponent[0] == 0 && exponent[1] == 0, "%d %d", exponent[0], exponent[1]);
    qd_drop(&d_x);
    free(half);
    free(exponent);
}

/* ---- products ---- */

/* A product on the device and its values in double. */
typedef struct {
    qd_buffer half, exponent, weight, bias;
    qc_cuda_product p;
    double *value; /* [rows, cols] */
} product;

static product new_product(size_t rows, size_t cols, int with_weight, int with_bias)
{
    product out = {.value = qt_alloc(rows * cols, sizeof(double))};
    uint16_t *half = qt_alloc(rows * cols, sizeof *half);
    int *exponent = qt_alloc(rows, sizeof *exponent), weight = with_weight ? -3 : 0;
    float *bias = random_floats(cols, 0.3);
    for (size_t r = 0; r < rows; r++) {
        exponent[r] = (int)(r % 7) - 3;
        for (size_t c = 0; c < cols; c++) {
            half[r * cols + c] = qc_f16_from_f32(random_float(1.0));
            out.value[r * cols + c] =
                ldexp((double)qc_f32_from_f16(half[r * cols + c]), exponent[r] + weight) +
                (with_bias ? (double)bias[c] : 0.0);
        }
    }
    out.half = qd_new_from(half, rows * cols * 2, 0);
    out.exponent = qd_new_from(exponent, rows * 4, 0);
    out.weight = qd_new_from(&weight, 4, 0);
    out.bias = qd_new_from(bias, cols * 4, 4);
    out.p = (qc_cuda_product){out.half.p, out.exponent.p, with_weight ? out.weight.p : NULL,
                              with_bias ? out.bias.p : NULL};
    free(half);
    free(exponent);
    free(bias);
    return out;
}

static void drop_product(product *p)
{
    qd_drop(&p->half);
    qd_drop(&p->exponent);
    qd_drop(&p->weight);
    qd_drop(&p->bias);
    free(p->value);
}

TEST(test_products_to_floats)
{
    for (int way = 0; way < 8; way++) {
        size_t rows = 5 + (size_t)way, cols = 300 - 41 * (size_t)way, n = rows * cols;
        int add = way & 1;
        product p = new_product(rows, cols, way & 2, way & 4);
        float *before = random_floats(n, 1.0);
        qd_buffer out = qd_new_from(before, n * 4, 0);
        QD_OK(qc_cuda_llama_floats(&p.p, rows, cols, add, out.p, qd.stream, &qd.err));
        float *got = qd_take(&out, "floats");
        for (size_t i = 0; add && i < n; i++)
            p.value[i] += (double)before[i];
        near(got, p.value, n, 1e-6, 16.0, "floats");
        free(got);
        free(before);
        drop_product(&p);
    }
}

TEST(test_swiglu)
{
    for (int way = 0; way < 4; way++) {
        size_t rows = 6, cols = 190 + 173 * (size_t)way, n = rows * cols;
        product gate = new_product(rows, cols, way & 1, way & 2);
        product up = new_product(rows, cols, way & 2, way & 1);
        qc_cuda_halves out;
        halves_buffer b = new_halves(rows, cols, &out);
        QD_OK(qc_cuda_llama_swiglu(&gate.p, &up.p, &out, qd.stream, &qd.err));
        float *got = take_halves(&b, rows, cols, "swiglu");
        for (size_t r = 0; r < rows; r++) {
            double largest = 0;
            for (size_t i = r * cols; i < (r + 1) * cols; i++) {
                gate.value[i] = gate.value[i] / (1.0 + exp(-gate.value[i])) * up.value[i];
                largest = fmax(largest, fabs(gate.value[i]));
            }
            for (size_t i = r * cols; i < (r + 1) * cols; i++)
                near(got + i, gate.value + i, 1, 1.0,
                     fabs(gate.value[i]) * 0x1.1p-11 + largest * 0x1p-22, "swiglu");
        }
        QT_CHECK(n > 0, "nothing was compared");
        free(got);
        drop_product(&gate);
        drop_product(&up);
    }
}

/* ---- heads ---- */

#define POSITIONS 40u

static void check_heads(uint32_t heads, uint32_t head_dim, int with_norm, int turns)
{
    char what[80];
    snprintf(what, sizeof what, "heads %u x %u norm %d turns %d", heads, head_dim, with_norm,
             turns);
    size_t rows = 9, cols = (size_t)heads * head_dim, half = head_dim / 2;
    const double eps = 1e-6;
    product p = new_product(rows, cols, 0, 1);
    float *norm = random_floats(head_dim, 1.0);
    float *cosine = qt_alloc(POSITIONS * half, 4), *sine = qt_alloc(POSITIONS * half, 4);
    for (size_t i = 0; i < POSITIONS * half; i++) {
        cosine[i] = (float)cos((double)i);
        sine[i] = (float)sin((double)i);
    }
    uint32_t position[9];
    for (size_t r = 0; r < rows; r++)
        position[r] = (uint32_t)(r * 17 % POSITIONS);
    qd_buffer d_norm = qd_new_from(norm, head_dim * 4, 0);
    qd_buffer d_cosine = qd_new_from(cosine, POSITIONS * half * 4, 0);
    qd_buffer d_sine = qd_new_from(sine, POSITIONS * half * 4, 0);
    qd_buffer d_position = qd_new_from(position, sizeof position, 0);
    qd_buffer out = qd_new(rows * cols * 4, 0);
    qc_cuda_heads h = {.rows = rows,
                       .heads = heads,
                       .head_dim = head_dim,
                       .norm = with_norm ? d_norm.p : NULL,
                       .eps = (float)eps,
                       .cosine = turns ? d_cosine.p : NULL,
                       .sine = turns ? d_sine.p : NULL,
                       .position = d_position.p};
    QD_OK(qc_cuda_llama_heads(&p.p, &h, out.p, qd.stream, &qd.err));
    float *got = qd_take(&out, what);
    double *want = qt_alloc(cols * rows, sizeof *want);
    for (size_t at = 0; at < rows * heads; at++) {
        double *v = p.value + at * head_dim, *w = want + at * head_dim, sum = 0;
        for (size_t d = 0; d < head_dim; d++)
            sum += v[d] * v[d];
        for (size_t d = 0; with_norm && d < head_dim; d++)
            v[d] *= (double)norm[d] / sqrt(sum / head_dim + eps);
        const float *c = cosine + position[at / heads] * half;
        const float *s = sine + position[at / heads] * half;
        for (size_t d = 0; d < half; d++) {
            w[d] = turns ? v[d] * (double)c[d] - v[d + half] * (double)s[d] : v[d];
            w[d + half] = turns ? v[d + half] * (double)c[d] + v[d] * (double)s[d] : v[d + half];
        }
    }
    near(got, want, rows * cols, 4e-6, 32.0, what);
    qd_drop(&d_norm);
    qd_drop(&d_cosine);
    qd_drop(&d_sine);
    qd_drop(&d_position);
    free(norm);
    free(cosine);
    free(sine);
    free(got);
    free(want);
    drop_product(&p);
}

TEST(test_heads)
{
    static const uint32_t dims[] = {2, 16, 64, 80, 128, 256};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int way = 0; way < 4; way++)
            check_heads(i % 2 ? 3 : 2, dims[i], way & 1, way & 2);
}

/* ---- attention ---- */

typedef struct {
    const uint32_t *lengths;
    size_t windows;
    uint32_t heads, kv_heads, head_dim, window;
} attention_case;

static float *run_attention(const attention_case *c, const float *q, const float *k, const float *v,
                            size_t rows)
{
    qc_cuda_query_tile tiles[64];
    uint32_t count = 0, first = 0;
    for (size_t i = 0; i < c->windows; i++) {
        for (uint32_t at = 0; at < c->lengths[i]; at += QC_CUDA_QUERY_TILE) {
            uint32_t left = c->lengths[i] - at;
            tiles[count++] = (qc_cuda_query_tile){
                first + at, left < QC_CUDA_QUERY_TILE ? left : QC_CUDA_QUERY_TILE, first};
        }
        first += c->lengths[i];
    }
    size_t q_bytes = rows * c->heads * c->head_dim * 4, kv_bytes = q_bytes / c->heads * c->kv_heads;
    qd_buffer d_q = qd_new_from(q, q_bytes, 0), d_k = qd_new_from(k, kv_bytes, 0);
    qd_buffer d_v = qd_new_from(v, kv_bytes, 0), out = qd_new(q_bytes, 0);
    qd_buffer d_tiles = qd_new_from(tiles, count * sizeof *tiles, 0);
    qc_cuda_attention a = {.q = d_q.p,
                           .k = d_k.p,
                           .v = d_v.p,
                           .out = out.p,
                           .tiles = d_tiles.p,
                           .tile_count = count,
                           .heads = c->heads,
                           .kv_heads = c->kv_heads,
                           .head_dim = c->head_dim,
                           .window = c->window,
                           .scale = 1.0f / sqrtf((float)c->head_dim)};
    QD_OK(qc_cuda_llama_attention(&a, qd.stream, &qd.err));
    float *got = qd_take(&out, "attention");
    qd_drop(&d_q);
    qd_drop(&d_k);
    qd_drop(&d_v);
    qd_drop(&d_tiles);
    return got;
}

static void attention_of_row(const attention_case *c, const float *q, const float *k,
                             const float *v, size_t first, size_t row, uint32_t head, double *out)
{
    uint32_t kv = head / (c->heads / c->kv_heads);
    size_t from = first, d_count = c->head_dim;
    double total = 0, most = -INFINITY, *score = qt_alloc(row + 1, sizeof *score);
    if (c->window != 0 && row - first >= c->window)
        from = row - c->window + 1;
    for (size_t j = from; j <= row; j++) {
        double sum = 0;
        for (size_t d = 0; d < d_count; d++)
            sum += (double)q[(row * c->heads + head) * d_count + d] *
                   (double)k[(j * c->kv_heads + kv) * d_count + d];
        score[j] = sum / sqrt((double)d_count);
        most = fmax(most, score[j]);
    }
    for (size_t d = 0; d < d_count; d++)
        out[d] = 0;
    for (size_t j = from; j <= row; j++) {
        double p = exp(score[j] - most);
        total += p;
        for (size_t d = 0; d < d_count; d++)
            out[d] += p * (double)v[(j * c->kv_heads + kv) * d_count + d];
    }
    for (size_t d = 0; d < d_count; d++)
        out[d] /= total;
    free(score);
}

static void check_attention(const attention_case *c, double spread)
{
    char what[96];
    size_t rows = 0;
    for (size_t i = 0; i < c->windows; i++)
        rows += c->lengths[i];
    float *q = random_floats(rows * c->heads * c->head_dim, spread);
    float *k = random_floats(rows * c->kv_heads * c->head_dim, spread);
    float *v = random_floats(rows * c->kv_heads * c->head_dim, 1.0);
    float *got = run_attention(c, q, k, v, rows);
    double *want = qt_alloc(c->head_dim, sizeof *want);
    size_t first = 0, kv_row = (size_t)c->kv_heads * c->head_dim;
    size_t q_row = (size_t)c->heads * c->head_dim;
    for (size_t i = 0; i < c->windows; first += c->lengths[i++]) {
        for (size_t r = first; r < first + c->lengths[i]; r++)
            for (uint32_t h = 0; h < c->heads; h++) {
                snprintf(what, sizeof what, "attention %u/%u x %u window %u row %zu head %u",
                         c->heads, c->kv_heads, c->head_dim, c->window, r, h);
                attention_of_row(c, q, k, v, first, r, h, want);
                near(got + r * q_row + h * c->head_dim, want, c->head_dim, 1e-5,
                     4.0 * (spread > 1.0 ? spread : 1.0), what);
            }
        /* alone, the same bits */
        attention_case alone = *c;
        alone.lengths = c->lengths + i;
        alone.windows = 1;
        float *again = run_attention(&alone, q + first * q_row, k + first * kv_row,
                                     v + first * kv_row, c->lengths[i]);
        qd_same(again, got + first * q_row, c->lengths[i] * q_row * 4, "a window alone");
        free(again);
    }
    free(q);
    free(k);
    free(v);
    free(got);
    free(want);
}

TEST(test_attention)
{
    static const uint32_t lengths[] = {1, 16, 17, 70, 33};
    static const attention_case cases[] = {
        {lengths, 5, 4, 2, 16, 0},      {lengths, 5, 2, 2, 64, 0},
        {lengths + 2, 3, 3, 1, 80, 0},  {lengths + 1, 2, 2, 1, 128, 0},
        {lengths + 2, 1, 1, 1, 256, 0}, {lengths, 5, 2, 1, 18, 1},
        {lengths, 5, 2, 1, 18, 20},     {lengths + 3, 1, 2, 1, 32, 32},
        {lengths + 3, 2, 1, 1, 8, 33}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        check_attention(&cases[i], i % 2 ? 1.0 : 3.0);
}

/* Scores of hundreds do not overflow, and one key takes all. */
TEST(test_attention_of_large_scores)
{
    static const uint32_t length = 40;
    static const attention_case c = {&length, 1, 1, 1, 32, 0};
    float *q = random_floats(40 * 32, 40.0), *k = random_floats(40 * 32, 40.0);
    float *v = random_floats(40 * 32, 1.0);
    float *got = run_attention(&c, q, k, v, 40);
    for (size_t i = 0; i < 40 * 32; i++)
        QT_CHECK(isfinite(got[i]) && fabsf(got[i]) <= 8.0f, "element %zu is %g", i, (double)got[i]);
    free(q);
    free(k);
    free(v);
    free(got);
}

TEST(test_attention_of_wrong_heads)
{
    qc_cuda_attention a = {.heads = 3, .kv_heads = 2, .head_dim = 8};
    QT_CHECK(qc_cuda_llama_attention(&a, qd.stream, &qd.err) == QC_ERR_USAGE, "3 over 2");
    a = (qc_cuda_attention){.heads = 2, .kv_heads = 1, .head_dim = 257};
    QT_CHECK(qc_cuda_llama_attention(&a, qd.stream, &qd.err) == QC_ERR_USAGE, "257");
    qc_cuda_heads h = {.heads = 2, .head_dim = 7};
    qc_cuda_product p = {0};
    QT_CHECK(qc_cuda_llama_heads(&p, &h, NULL, qd.stream, &qd.err) == QC_ERR_USAGE, "7");
}

/* ---- dense weights ---- */

TEST(test_weights)
{
    static const qc_dtype types[3] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    static const size_t sizes[] = {1, 255, 9001};
    for (size_t t = 0; t < 3; t++)
        for (size_t s = 0; s < 3; s++) {
            size_t n = sizes[s], each = qt_size(types[t]);
            float *w = random_floats(n, s == 1 ? 1e4 : 0.02);
            unsigned char *src = qt_alloc(n, each);
            for (size_t i = 0; i < n; i++) {
                uint16_t h =
                    types[t] == QC_DTYPE_F16 ? qc_f16_from_f32(w[i]) : qc_bf16_from_f32(w[i]);
                if (each == 2) {
                    memcpy(src + 2 * i, &h, 2);
                    w[i] = types[t] == QC_DTYPE_F16 ? qc_f32_from_f16(h) : qc_f32_from_bf16(h);
                } else {
                    memcpy(src + 4 * i, &w[i], 4);
                }
            }
            qd_buffer d_src = qd_new_from(src, n * each, 0), half = qd_new(n * 2, 0);
            qd_buffer exponent = qd_new(4, 0), largest = qd_new(4, 0);
            QD_OK(qc_cuda_llama_weight(d_src.p, types[t], n, half.p, exponent.p, largest.p,
                                       qd.stream, &qd.err));
            uint16_t *got = qd_take(&half, "weight");
            int *e = qd_take(&exponent, "weight");
            float *back = floats_of(got, e, 1, n, "weight"), top = 0.0f;
            for (size_t i = 0; i < n; i++)
                top = fmaxf(top, fabsf(w[i]));
            for (size_t i = 0; i < n; i++)
                QT_CHECK(fabs((double)back[i] - (double)w[i]) <=
                             fabs((double)w[i]) * 0x1p-11 + (double)top * 0x1p-24,
                         "weight %zu is %g, not %g", i, (double)back[i], (double)w[i]);
            qd_drop(&d_src);
            qd_drop(&largest);
            free(w);
            free(src);
            free(got);
            free(e);
            free(back);
        }
    QT_CHECK(qc_cuda_llama_weight(NULL, QC_DTYPE_F64, 0, NULL, NULL, NULL, qd.stream, &qd.err) !=
                 QC_OK,
             "F64 was taken");
}

TEST(test_dense_products)
{
    static const size_t shapes[][3] = {{1, 1, 1}, {3, 70, 33}, {40, 31, 64}, {33, 64, 5}};
    for (size_t s = 0; s < 4; s++) {
        size_t m = shapes[s][0], n = shapes[s][1], k = shapes[s][2];
        uint16_t *x = qt_alloc(m * k, 2), *w = qt_alloc(n * k, 2);
        for (size_t i = 0; i < m * k; i++)
            x[i] = qc_f16_from_f32(random_float(0.5));
        for (size_t i = 0; i < n * k; i++)
            w[i] = qc_f16_from_f32(random_float(0.5));
        qd_buffer d_x = qd_new_from(x, m * k * 2, 0), d_w = qd_new_from(w, n * k * 2, 0);
        qd_buffer y = qd_new(m * n * 2, 0);
        QD_OK(qc_cuda_llama_dense(d_x.p, d_w.p, m, n, k, y.p, qd.stream, &qd.err));
        uint16_t *got = qd_take(&y, "dense");
        for (size_t i = 0; i < m * n; i++) {
            double want = 0, size = 0;
            for (size_t j = 0; j < k; j++) {
                double term = (double)qc_f32_from_f16(x[i / n * k + j]) *
                              (double)qc_f32_from_f16(w[i % n * k + j]);
                want += term;
                size += fabs(term);
            }
            float v = qc_f32_from_f16(got[i]);
            near(&v, &want, 1, 1.0, fabs(want) * 0x1p-11 + size * 1e-6 + 0x1p-25, "dense");
        }
        qd_drop(&d_x);
        qd_drop(&d_w);
        free(x);
        free(w);
        free(got);
    }
}

#ifdef QC_CUDA_SHIM
/* Grids of one block, or three, go round: what a block left in shared memory is written again. */
TEST(test_grid_steps)
{
    for (unsigned grid = 1; grid <= 3; grid += 2) {
        qc_shim_set_grid(grid);
        test_rows_to_halves(state);
        test_products_to_floats(state);
        test_swiglu(state);
        test_heads(state);
        test_attention(state);
        test_weights(state);
        test_dense_products(state);
    }
    qc_shim_set_grid(0);
}
#endif

int main(void)
{
    qd_start();
    int failed = test_run_all(NULL);
    qd_end();
    return failed;
}

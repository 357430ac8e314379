/* The matmuls: for every shape and M, cuBLAS with dense weights and each scheme, turn by turn. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/gpu_bench_work.h"
#include "quant/quant_half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define POOL           ((uint64_t)16777259) /* a prime */
#define MAX_CONTENDERS QC_BENCH_MAX_CONTENDERS

typedef qc_bench_work shape_work;

/* ---- contenders ---- */

static qc_status launch_dense(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const shape_work *w = ctx;
    if (w->shape->part_count)
        return qc_bench_dense_parts(w, w->dense[copy], s, err);
    return qc_matmul_dense(w->b->handle, w->dense[copy], w->shape->n, w->shape->k, &w->io,
                           w->b->gemm_workspace, QC_MATMUL_DENSE_WORKSPACE, s, err);
}

typedef struct {
    const shape_work *w;
    const qc_bench_weights *weights;
} quantized;

static qc_status launch_quantized(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const quantized *q = ctx;
    const shape_work *w = q->w;
    if (w->shape->part_count)
        return qc_bench_run_parts(w, &q->weights->w[copy], s, err);
    return qc_matmul_run(w->b->handle, &q->weights->w[copy], &w->io, w->path, w->workspace,
                         w->workspace_bytes, s, err);
}

/* ---- checks ---- */

/* Row r of x is row r % QC_BENCH_TRUTH, so QC_BENCH_TRUTH rows of truth are enough for any m. */
static qc_status make_truth(shape_work *w, uint32_t contender, const qc_weights *q,
                            const void *dense, qc_error *err)
{
    uint64_t n = w->shape->n, k = w->shape->k, count = QC_BENCH_TRUTH * n;
    void *device = NULL, *host = NULL;
    double sum = 0;
    qc_status st = qc_cuda_malloc(&device, (size_t)(count * sizeof(double)), err);
    if (st == QC_OK)
        st = qc_calloc(&host, (size_t)count, sizeof(double), err);
    if (st == QC_OK)
        st = qc_matmul_reference(w->b->handle, q, dense, w->dtype, n, k, w->x_pool->device,
                                 w->dtype, QC_BENCH_TRUTH, device, w->b->stream, err);
    if (st == QC_OK)
        st = qc_bench_download(w->b, host, device, count * sizeof(double), err);
    qc_cuda_free(device);
    w->truth[contender] = host;
    for (uint64_t i = 0; st == QC_OK && i < count; i++)
        sum += w->truth[contender][i] * w->truth[contender][i];
    w->truth_norm[contender] = sqrt(sum / QC_BENCH_TRUTH);
    return st;
}

/* Distance of one row of y from the truth, squared. */
static double row_distance(const uint16_t *y, const double *truth, uint64_t n, qc_dtype dtype)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        double v = qc_f64_of_half(dtype, y[i]);
        sum += (v - truth[i]) * (v - truth[i]);
    }
    return sum;
}

/* The whole of y. Each row by itself must be right, so that one wrong value in 4096 rows counts;
 * *error is that of all. */
static qc_status check(shape_work *w, uint32_t contender, const char *what, double *error,
                       qc_error *err)
{
    uint64_t n = w->shape->n, rows = QC_BENCH_PINNED / (2 * n);
    double tolerance = qc_bench_tolerance(w->b->q), norm = w->truth_norm[contender], sum = 0,
           worst = 0;
    if (rows == 0)
        QC_FAIL(err, QC_ERR_USAGE, "--shapes: %s has too many outputs to be checked",
                w->shape->layer);
    for (uint64_t first = 0; first < w->io.m; first += rows) {
        uint64_t here = w->io.m - first < rows ? w->io.m - first : rows;
        if (qc_interrupted()) /* 4096 rows of 28672 take the host a good part of a second */
            QC_FAIL(err, QC_ERR_INTERRUPTED, "interrupted");
        QC_TRY(qc_cuda_to_host(w->b->pinned, (const uint16_t *)w->y + first * n,
                               (size_t)(2 * here * n), w->b->stream, err));
        QC_TRY(qc_cuda_stream_synchronize(w->b->stream, err));
        for (uint64_t r = 0; r < here; r++) {
            const double *truth = w->truth[contender] + (first + r) % QC_BENCH_TRUTH * n;
            double d = row_distance((const uint16_t *)w->b->pinned + r * n, truth, n, w->dtype);
            sum += d;
            if (!(d <= worst))
                worst = d;
        }
    }
    *error = norm > 0 ? sqrt(sum / (double)w->io.m) / norm : sqrt(sum);
    if (!(*error <= tolerance) || !(sqrt(worst) <= 2 * tolerance * norm))
        QC_FAIL(err, QC_ERR_CHECK,
                "%s on %s is wrong for %s, %llu x %llu, M = %llu: normwise error %.3g (of a row up "
                "to %.3g), allowed %.3g; it was not timed",
                what, w->b->device.name, w->shape->layer, (unsigned long long)n,
                (unsigned long long)w->shape->k, (unsigned long long)w->io.m, *error,
                sqrt(worst) / norm, tolerance);
    return QC_OK;
}

qc_status qc_bench_run_and_check(qc_bench_work *w, const qc_bench_contender *c, uint32_t contender,
                                 const char *what, double *error, qc_error *err)
{
    uint64_t bytes = 2 * w->io.m * w->shape->n;
    QC_TRY(qc_cuda_fill(w->y, 0xff, (size_t)bytes, w->b->stream, err)); /* NaN */
    QC_TRY(c->launch(c->ctx, 0, w->b->stream, err));
    return check(w, contender, what, error, err);
}

/* ---- one point: a shape and an M ---- */

/* Bytes of a quantized weight that a launch reads, laid out anew or not. */
static uint64_t read_of(const shape_work *w, uint32_t scheme)
{
    return qc_bench_weight_bytes(w->weights[scheme].scheme, w->shape->n, w->shape->k);
}

static qc_bench_rotation rotation_of(const qc_bench_contender *c, uint64_t bytes_each)
{
    return (qc_bench_rotation){c->copies, c->launches, c->copies * bytes_each};
}

static qc_status put_row(shape_work *w, uint32_t scheme, qc_bench_contender *c, uint32_t rounds,
                         qc_bench_row *row, qc_error *err)
{
    const qc_bench_weights *weights = &w->weights[scheme];
    row->shape = w->index;
    row->scheme = weights->scheme;
    row->m = w->io.m;
    row->repacked = weights->repacked;
    row->turn = rotation_of(c, read_of(w, scheme));
    row->us = qc_bench_us_of(c, rounds);
    if (w->shape->part_count)
        return qc_bench_parts_path(w, weights, &row->path, err);
    return qc_bench_path_of(w->b, &weights->w[0], weights->repacked, &w->io, w->path,
                            w->workspace_bytes, &row->path, err);
}

static qc_status time_point(shape_work *w, qc_bench_contender *c, uint32_t first, uint32_t count,
                            const double *errors, uint32_t points, qc_error *err)
{
    qc_bench_result *r = w->b->r;
    qc_bench_spread dense = {0};
    qc_bench_spread ratios[MAX_CONTENDERS] = {{0}};
    for (uint32_t i = first; i < count; i++)
        QC_TRY(qc_bench_ready(w->b, &c[i], err));
    uint32_t rounds =
        qc_bench_rounds(w->b->q->rounds, qc_bench_round_seconds(c + first, count - first),
                        qc_bench_seconds_left(w->b), points);
    QC_TRY(qc_bench_time(w->b, c + first, count - first, rounds, err));
    if (first == 0) {
        for (uint32_t i = 1; i < count; i++)
            QC_TRY(qc_bench_ratio_of(&ratios[i], &c[i], &c[0], rounds, err));
        dense = qc_bench_us_of(&c[0], rounds);
    }
    for (uint32_t i = 1; i < count; i++) {
        qc_bench_row *row = &r->rows[r->row_count];
        *row = (qc_bench_row){.dense = dense, .ratio = ratios[i], .error = errors[i]};
        if (first == 0)
            row->dense_turn = rotation_of(&c[0], 2 * w->shape->n * w->shape->k);
        QC_TRY(put_row(w, i - 1, &c[i], rounds, row, err));
        r->row_count++;
        w->b->sink->row(w->b->sink->ctx, r, row);
    }
    return QC_OK;
}

/* points: that are still to come, this one included. */
static qc_status measure_point(shape_work *w, uint64_t m, uint32_t points, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    uint32_t count = 1 + q->scheme_count, first = w->b->r->device.no_gemm ? 1 : 0;
    qc_bench_contender c[MAX_CONTENDERS] = {{0}};
    quantized ctx[MAX_CONTENDERS] = {{0}};
    double errors[MAX_CONTENDERS] = {0};
    char what[64];
    qc_status st = QC_OK;
    w->io = (qc_matmul_io){.m = m, .x = w->x, .x_dtype = w->dtype, .y = w->y, .y_dtype = w->dtype};
    c[0] = (qc_bench_contender){
        .launch = launch_dense, .ctx = w, .copies = w->dense_copies, .least = 20};
    for (uint32_t i = 1; i < count; i++) {
        ctx[i] = (quantized){w, &w->weights[i - 1]};
        c[i] = (qc_bench_contender){.launch = launch_quantized,
                                    .ctx = &ctx[i],
                                    .copies = w->weights[i - 1].copies,
                                    .least = 20};
    }
    if (first == 0)
        st = qc_bench_run_and_check(w, &c[0], 0, "cuBLAS", &errors[0], err);
    for (uint32_t i = 1; st == QC_OK && i < count; i++) {
        (void)snprintf(what, sizeof what, "the %s matmul", qc_bench_scheme_name(q->schemes[i - 1]));
        st = qc_bench_run_and_check(w, &c[i], i, what, &errors[i], err);
    }
    if (st == QC_OK)
        st = time_point(w, c, first, count, errors, points, err);
    for (uint32_t i = 0; i < count; i++)
        qc_bench_done(&c[i]);
    return st;
}

/* ---- one shape ---- */

static qc_status dense_copies(shape_work *w, uint32_t want, qc_error *err)
{
    uint64_t elems = w->shape->n * w->shape->k;
    void *memory = w->dense;
    QC_TRY(qc_realloc_array(&memory, want, sizeof *w->dense, err));
    w->dense = memory;
    while (w->dense_copies < want) {
        qc_error full = {0};
        void *next;
        if (qc_cuda_malloc(&next, (size_t)(2 * elems), &full) != QC_OK) {
            if (full.code == QC_ERR_NOMEM && w->dense_copies)
                break;
            if (err)
                *err = full;
            return full.code;
        }
        w->dense[w->dense_copies] = next;
        QC_TRY(qc_bench_pool_fill(w->b, w->pool, next, elems, 7919 * w->dense_copies, err));
        w->dense_copies++;
    }
    return QC_OK;
}

/* x, y and workspace for up to w->max_m rows. */
static qc_status activations(shape_work *w, qc_error *err)
{
    uint64_t m = w->max_m, n = w->shape->n, k = w->shape->k, limit = w->b->device.memory_bytes / 8;
    w->workspace_bytes = 0;
    for (uint32_t i = 0; i < w->b->q->scheme_count; i++) {
        const qc_matmul_weights *first = &w->weights[i].w[0];
        qc_error why = {0};
        uint64_t bytes = w->shape->part_count
                             ? qc_bench_parts_workspace(w, first, m, limit, &why)
                             : qc_matmul_workspace_bytes(w->b->handle, first, m, w->path, limit);
        if (why.code) {
            if (err)
                *err = why;
            return why.code;
        }
        if (bytes > w->workspace_bytes)
            w->workspace_bytes = bytes;
        bytes = w->b->q->tune ? qc_bench_tune_workspace(w, i, limit) : 0;
        if (bytes > w->workspace_bytes)
            w->workspace_bytes = bytes;
    }
    qc_status st = qc_cuda_malloc(&w->x, (size_t)(2 * m * k), err);
    if (st == QC_OK)
        st = qc_cuda_malloc(&w->y, (size_t)(2 * m * n), err);
    if (st == QC_OK)
        st = qc_cuda_malloc(&w->workspace, (size_t)w->workspace_bytes, err);
    if (st == QC_OK)
        st = qc_matmul_workspace_init(w->workspace, w->workspace_bytes, w->b->stream, err);
    for (uint64_t row = 0; st == QC_OK && row < m; row += QC_BENCH_TRUTH) {
        uint64_t rows = m - row < QC_BENCH_TRUTH ? m - row : QC_BENCH_TRUTH;
        st = qc_cuda_copy((uint16_t *)w->x + row * k, w->x_pool->device, (size_t)(2 * rows * k),
                          w->b->stream, err);
    }
    return st;
}

static void free_activations(shape_work *w)
{
    qc_cuda_free(w->x);
    qc_cuda_free(w->y);
    qc_cuda_free(w->workspace);
    w->x = w->y = w->workspace = NULL;
}

/* For the largest M that there is memory for; w->max_m is 0 if there is none. */
static qc_status activations_that_fit(shape_work *w, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    for (uint32_t i = q->m_count; i-- > 0;) {
        qc_error full = {0};
        w->max_m = q->m[i];
        qc_status st = activations(w, &full);
        if (st == QC_OK)
            return QC_OK;
        free_activations(w);
        if (st != QC_ERR_NOMEM) {
            if (err)
                *err = full;
            return st;
        }
    }
    w->max_m = 0;
    return QC_OK;
}

static qc_status rotate(shape_work *w, qc_error *err)
{
    uint64_t free_bytes, total, l2 = w->b->device.l2_bytes, each = 2 * w->shape->n * w->shape->k;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    uint64_t share = free_bytes / 10 * 9 / (1 + w->b->q->scheme_count);
    if (!w->b->r->device.no_gemm && !w->b->q->tune)
        QC_TRY(dense_copies(w, qc_bench_copies(each, each, l2, share + each), err));
    for (uint32_t i = 0; i < w->b->q->scheme_count; i++) {
        qc_bench_weights *q = &w->weights[i];
        uint64_t held = q->bytes_each;
        QC_TRY(qc_bench_weights_multiply(
            w->b, q, qc_bench_copies(read_of(w, i), held, l2, share + held), err));
    }
    return QC_OK;
}

static qc_status prepare_shape(shape_work *w, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    QC_TRY(dense_copies(w, 1, err));
    if (!w->b->r->device.no_gemm && !q->tune)
        QC_TRY(make_truth(w, 0, NULL, w->dense[0], err));
    for (uint32_t i = 0; i < q->scheme_count; i++) {
        QC_TRY(qc_bench_weights_make(w->b, &w->weights[i], q->schemes[i], w->dense[0], w->dtype,
                                     w->shape->n, w->shape->k, err));
        QC_TRY(make_truth(w, 1 + i, &w->weights[i].plain, NULL, err));
    }
    QC_TRY(activations_that_fit(w, err));
    return rotate(w, err);
}

static qc_status measure_shape(shape_work *w, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    qc_bench_result *r = w->b->r;
    char text[128];
    (void)snprintf(text, sizeof text, "%s %s, %llu x %llu", w->shape->model, w->shape->layer,
                   (unsigned long long)w->shape->n, (unsigned long long)w->shape->k);
    w->b->sink->say(w->b->sink->ctx, text);
    qc_error full = {0};
    qc_status st = prepare_shape(w, &full);
    if (st == QC_ERR_NOMEM) {
        (void)snprintf(text, sizeof text, "%s %s: no room on this GPU, left out", w->shape->model,
                       w->shape->layer);
        w->b->sink->say(w->b->sink->ctx, text);
        r->left_out += q->m_count * q->scheme_count;
        return QC_OK;
    }
    if (st != QC_OK) {
        if (err)
            *err = full;
        return st;
    }
    for (uint32_t i = 0; i < q->m_count; i++) {
        uint32_t points = (q->shape_count - w->index) * q->m_count - i;
        if (q->m[i] > w->max_m || qc_bench_seconds_left(w->b) <= 0)
            r->left_out += q->scheme_count;
        else
            QC_TRY(q->tune ? qc_bench_tune_point(w, q->m[i], points, err)
                           : measure_point(w, q->m[i], points, err));
    }
    return QC_OK;
}

static void free_shape(shape_work *w)
{
    free_activations(w);
    for (uint32_t i = 0; i < w->dense_copies; i++)
        qc_cuda_free(w->dense[i]);
    qc_free(w->dense);
    for (uint32_t i = 0; i < w->b->q->scheme_count; i++)
        qc_bench_weights_free(&w->weights[i]);
    for (uint32_t i = 0; i < MAX_CONTENDERS; i++)
        qc_free(w->truth[i]);
}

/* ---- all shapes ---- */

static qc_matmul_path path_named(const char *name)
{
    for (unsigned p = 0; name && p < QC_MATMUL_PATH_COUNT; p++)
        if (strcmp(qc_matmul_path_name((qc_matmul_path)p), name) == 0)
            return (qc_matmul_path)p;
    return QC_MATMUL_AUTO;
}

qc_status qc_bench_matmuls(qc_bench_gpu *b, qc_error *err)
{
    const qc_bench_request *q = b->q;
    qc_dtype dtype = q->bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
    uint64_t unique = 0, max_k = 0;
    qc_bench_pool pool = {0}, x_pool = {0};
    uint64_t free_bytes, total;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    for (uint32_t i = 0; i < q->shape_count; i++) {
        uint64_t elems = q->shapes[i].n * q->shapes[i].k;
        unique = elems > unique ? elems : unique;
        max_k = q->shapes[i].k > max_k ? q->shapes[i].k : max_k;
    }
    if (unique > POOL)
        unique = POOL;
    if (unique > free_bytes / 64)
        unique = free_bytes / 64;
    qc_status st = qc_bench_pool_make(b, &pool, unique, 0.02, dtype, err);
    if (st == QC_OK)
        st = qc_bench_pool_make(b, &x_pool, QC_BENCH_TRUTH * max_k, 1, dtype, err);
    for (uint32_t i = 0; st == QC_OK && i < q->shape_count; i++) {
        shape_work w = {.b = b,
                        .index = i,
                        .shape = &q->shapes[i],
                        .dtype = dtype,
                        .path = path_named(q->path),
                        .pool = &pool,
                        .x_pool = &x_pool};
        st = measure_shape(&w, err);
        free_shape(&w);
    }
    qc_bench_pool_free(&pool);
    qc_bench_pool_free(&x_pool);
    return st;
}

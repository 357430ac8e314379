/* The matmuls. For every shape and M, cuBLAS with dense weights and each scheme take turns; with
 * --packed each scheme's packed weights do, too. */
#include "base/alloc.h"
#include "base/clock.h"
#include "convert/gpu/gpu_bench_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define POOL           ((uint64_t)16777259) /* a prime */
#define MAX_CONTENDERS QC_BENCH_MAX_CONTENDERS

typedef qc_bench_work shape_work;

/* The weights of a shape: of each scheme, and perhaps packed ones. */
static uint32_t weights_count(const qc_bench_request *q)
{
    return q->packed ? 2 * q->scheme_count : q->scheme_count;
}

/* ---- contenders ---- */

static qc_status launch_dense(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const shape_work *w = ((const qc_bench_player *)ctx)->w;
    if (w->shape->part_count)
        return qc_bench_dense_parts(w, w->dense[copy], s, err);
    return qc_matmul_dense(w->b->handle, w->dense[copy], w->shape->n, w->shape->k, &w->io,
                           w->b->gemm_workspace, QC_MATMUL_DENSE_WORKSPACE, s, err);
}

static qc_status launch_quantized(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const qc_bench_player *p = ctx;
    const shape_work *w = p->w;
    const qc_matmul_weights *weights = &w->weights[p->contender - 1].w[copy];
    if (w->shape->part_count)
        return qc_bench_run_parts(w, weights, s, err);
    return qc_matmul_run(w->b->handle, weights, &w->io, w->path, w->workspace, w->workspace_bytes,
                         s, err);
}

/* ---- what is right ---- */

/* Row r of x is the same as row r % QC_BENCH_TRUTH, so QC_BENCH_TRUTH rows of truth are enough for
 * any m. */
static qc_status make_truth(shape_work *w, uint32_t contender, const qc_weights *q,
                            const void *dense, qc_error *err)
{
    uint64_t n = w->shape->n, k = w->shape->k, count = QC_BENCH_TRUTH * n;
    void *device = NULL, *host = NULL;
    double sum = 0;
    qc_status st = qc_cuda_malloc(&device, (size_t)(count * sizeof(double)), err);
    if (st == QC_OK)
        st = qc_calloc(&host, (size_t)count, sizeof(double), err);
    const qc_matmul_exact exact = {.w = q,
                                   .dense = dense,
                                   .dense_dtype = w->dtype,
                                   .n = n,
                                   .k = k,
                                   .m = QC_BENCH_TRUTH,
                                   .x = w->x_pool->device,
                                   .x_dtype = w->dtype,
                                   .y = device};
    if (st == QC_OK)
        st = qc_matmul_reference(w->b->handle, &exact, w->b->stream, err);
    if (st == QC_OK)
        st = qc_bench_download(w->b, host, device, count * sizeof(double), err);
    qc_cuda_free(device);
    w->truth[contender] = host;
    for (uint64_t i = 0; st == QC_OK && i < count; i++)
        sum += w->truth[contender][i] * w->truth[contender][i];
    w->truth_norm[contender] = sqrt(sum / QC_BENCH_TRUTH);
    return st;
}

/* ---- one point: a shape and an M ---- */

/* Returns the bytes of a quantized weight that a launch reads. They are the same if it was
 * repacked or packed. */
static uint64_t read_of(const shape_work *w, uint32_t scheme)
{
    return qc_bench_weight_bytes(w->b->q->schemes[scheme % w->b->q->scheme_count], w->shape->n,
                                 w->shape->k);
}

static qc_bench_rotation rotation_of(const qc_bench_contender *c, uint64_t bytes_each)
{
    return (qc_bench_rotation){c->copies, c->launches, c->copies * bytes_each};
}

static qc_status drop(const qc_bench_player *p, const qc_error *why, qc_error *err)
{
    const char *path = NULL;
    shape_work *w = p->w;
    if (w->why[p->contender].code == QC_OK &&
        qc_bench_kernel_name(w, p->contender, &path, NULL) != QC_OK)
        path = NULL;
    return qc_bench_drop(w, p->contender, path, why, err);
}

static qc_status make_row(const qc_bench_player *p, qc_bench_contender *c, uint32_t rounds,
                          qc_bench_row *row, qc_error *err)
{
    shape_work *w = p->w;
    const qc_bench_weights *weights = &w->weights[p->contender - 1];
    row->shape = w->index;
    row->scheme = weights->scheme;
    row->m = w->io.m;
    row->repacked = weights->w[0].row_bytes != 0;
    row->error = p->error;
    row->turn = rotation_of(c, read_of(w, p->contender - 1));
    row->us = qc_bench_us_of(c, rounds);
    return qc_bench_kernel_name(w, p->contender, &row->path, err);
}

static int is_right(const qc_bench_contender *c)
{
    return c->us && c->out.code == QC_OK;
}

/* Sets what the row says of the packed weights. It has its ratio already. */
static qc_status add_packed(const qc_bench_player *p, qc_bench_contender *c, uint32_t rounds,
                            qc_bench_packed *out, qc_error *err)
{
    qc_error why = {0};
    if (qc_bench_kernel_name(p->w, p->contender, &out->path, &why) != QC_OK) {
        *out = (qc_bench_packed){0};
        return drop(p, &why, err);
    }
    out->error = p->error;
    out->turn = rotation_of(c, read_of(p->w, p->contender - 1));
    out->us = qc_bench_us_of(c, rounds);
    return QC_OK;
}

/* Adds the contenders that were right to the end to the result. */
static qc_status put_rows(const qc_bench_player *p, qc_bench_contender *c, uint32_t count,
                          uint32_t rounds, qc_error *err)
{
    qc_bench_gpu *b = p[0].w->b;
    const qc_bench_shape *shape = p[0].w->shape;
    const uint32_t schemes = b->q->scheme_count;
    qc_bench_row common = {0};
    qc_bench_spread ratios[MAX_CONTENDERS] = {{0}};
    /* Ratios come first, because medians put the samples in another order. Those of packed weights
     * are to the file's layout. */
    for (uint32_t i = 1; i < count; i++) {
        const uint32_t of = i > schemes ? i - schemes : 0;
        if (is_right(&c[i]) && is_right(&c[of]))
            QC_TRY(qc_bench_ratio_of(&ratios[i], &c[i], &c[of], rounds, err));
    }
    if (is_right(&c[0])) {
        common.dense = qc_bench_us_of(&c[0], rounds);
        common.dense_turn = rotation_of(&c[0], 2 * shape->n * shape->k);
    }
    for (uint32_t i = 1; i <= schemes; i++) {
        const uint32_t packed = i + schemes;
        qc_error why = {0};
        qc_bench_row *row = &b->r->rows[b->r->row_count];
        if (!is_right(&c[i]))
            continue;
        *row = common;
        row->ratio = ratios[i];
        if (make_row(&p[i], &c[i], rounds, row, &why) != QC_OK) {
            QC_TRY(drop(&p[i], &why, err));
            continue;
        }
        if (packed < count && is_right(&c[packed])) {
            row->packed.ratio = ratios[packed];
            QC_TRY(add_packed(&p[packed], &c[packed], rounds, &row->packed, err));
        }
        b->r->row_count++;
        b->sink->row(b->sink->ctx, b->r, row);
    }
    return QC_OK;
}

static qc_status time_point(const qc_bench_player *p, qc_bench_contender *c, uint32_t count,
                            qc_error *err)
{
    qc_bench_gpu *b = p[0].w->b;
    qc_bench_contender *in[MAX_CONTENDERS];
    uint32_t in_count = 0;
    for (uint32_t i = 0; i < count; i++)
        if (c[i].graph && c[i].out.code == QC_OK)
            in[in_count++] = &c[i];
    if (in_count == 0 || (in_count == 1 && in[0] == &c[0]))
        return QC_OK; /* none of our kernels is left */
    uint32_t rounds = qc_bench_rounds(b->q->rounds, qc_bench_round_seconds(in, in_count),
                                      qc_bench_point_seconds(b, p[0].w->index, p[0].w->m_index));
    QC_TRY(qc_bench_time(b, in, in_count, rounds, err));
    for (uint32_t i = 0; i < in_count; i++)
        if (in[i]->out.code != QC_OK)
            QC_TRY(drop(&p[in[i] - c], &in[i]->out, err));
    QC_TRY(put_rows(p, c, count, rounds, err));
    qc_bench_save(b);
    return QC_OK;
}

static qc_status try_contender(qc_bench_player *p, qc_bench_contender *c, qc_error *err)
{
    if (p->w->why[p->contender].code != QC_OK) {
        *err = p->w->why[p->contender];
        return err->code;
    }
    QC_TRY(qc_bench_run_and_check(p, c, err));
    QC_TRY(qc_bench_check_copies(p, c, err));
    return qc_bench_ready(p->w->b, c, err);
}

static qc_status measure_point(shape_work *w, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    uint32_t count = 1 + weights_count(q);
    qc_bench_contender c[MAX_CONTENDERS] = {{0}};
    qc_bench_player p[MAX_CONTENDERS] = {{0}};
    qc_status st = QC_OK;
    w->io = (qc_matmul_io){
        .m = q->m[w->m_index], .x = w->x, .x_dtype = w->dtype, .y = w->y, .y_dtype = w->dtype};
    for (uint32_t i = 0; i < count; i++) {
        const int packed = i > q->scheme_count;
        p[i] = (qc_bench_player){
            .w = w, .contender = i, .truth = packed ? i - q->scheme_count : i, .what = "cuBLAS"};
        if (i)
            (void)snprintf(p[i].what, sizeof p[i].what, "the %s matmul%s",
                           qc_bench_scheme_name(q->schemes[p[i].truth - 1]),
                           packed ? " with packed weights" : "");
        c[i] = (qc_bench_contender){.launch = i ? launch_quantized : launch_dense,
                                    .ctx = &p[i],
                                    .copies = i ? w->weights[i - 1].copies : w->dense_copies,
                                    .least = 20,
                                    .spoil = qc_bench_spoil_y,
                                    .look = qc_bench_look_at_y};
    }
    for (uint32_t i = w->b->r->device.no_gemm ? 1 : 0; st == QC_OK && i < count; i++)
        if (try_contender(&p[i], &c[i], &c[i].out) != QC_OK)
            st = drop(&p[i], &c[i].out, err);
    if (st == QC_OK)
        st = time_point(p, c, count, err);
    for (uint32_t i = 0; i < count; i++)
        qc_bench_done(&c[i]);
    return st;
}

/* ---- one shape ---- */

static qc_status dense_copies(shape_work *w, uint32_t want, qc_error *err)
{
    uint64_t elems = w->shape->n * w->shape->k;
    QC_TRY(qc_realloc_array(&w->dense, want, sizeof *w->dense, err));
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
        w->dense[w->dense_copies++] = next;
        QC_TRY(w->dense_copies == 1
                   ? qc_bench_pool_fill(w->b, w->pool, next, elems, 0, err)
                   : qc_cuda_copy(next, w->dense[0], (size_t)(2 * elems), w->b->stream, err));
    }
    return QC_OK;
}

/* Returns the workspace of a scheme for up to w->max_m rows. Where so many rows cannot be
 * multiplied, it is the workspace for the largest number that can be; a launch with more rows says
 * why it cannot. */
static uint64_t workspace_of(const shape_work *w, uint32_t scheme, uint64_t limit, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    const qc_matmul_weights *first = &w->weights[scheme].w[0];
    for (uint32_t i = q->m_count; i-- > 0;) {
        if (q->m[i] > w->max_m)
            continue;
        uint64_t bytes =
            w->shape->part_count
                ? qc_bench_parts_workspace(w, first, q->m[i], limit, err)
                : qc_matmul_workspace_bytes(w->b->handle, first, q->m[i], w->path, limit);
        if (bytes != UINT64_MAX || err->code != QC_OK)
            return bytes;
    }
    return 0;
}

/* Makes x, y and the workspace for up to w->max_m rows. */
static qc_status activations(shape_work *w, qc_error *err)
{
    uint64_t m = w->max_m, n = w->shape->n, k = w->shape->k, limit = w->b->device.memory_bytes / 8;
    w->workspace_bytes = 0;
    for (uint32_t i = 0; i < weights_count(w->b->q); i++) {
        qc_error why = {0};
        if (w->why[1 + i].code != QC_OK)
            continue;
        uint64_t bytes = workspace_of(w, i, limit, &why);
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
    w->workspace_bytes = 0;
}

/* Makes x, y and the workspace for the largest M that there is memory for. w->max_m is 0 if there
 * is none. */
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
            return full.code;
        }
    }
    w->max_m = 0;
    return QC_OK;
}

static qc_status rotate(shape_work *w, qc_error *err)
{
    uint64_t free_bytes, total, l2 = w->b->device.l2_bytes, each = 2 * w->shape->n * w->shape->k;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    const uint32_t schemes = w->b->q->scheme_count;
    uint64_t share = free_bytes / 10 * 9 / (1 + weights_count(w->b->q));
    if (!w->b->r->device.no_gemm && !w->b->q->tune)
        QC_TRY(dense_copies(w, qc_bench_copies(each, each, l2, share + each), err));
    for (uint32_t i = 0; i < weights_count(w->b->q); i++) {
        qc_bench_weights *q = &w->weights[i];
        uint64_t held = q->bytes_each;
        if (w->why[1 + i].code != QC_OK)
            continue;
        const uint32_t want = qc_bench_copies(read_of(w, i), held, l2, share + held);
        QC_TRY(i < schemes
                   ? qc_bench_weights_multiply(w->b, q, want, err)
                   : qc_bench_packed_multiply(w->b, q, &w->weights[i - schemes], want, err));
    }
    return QC_OK;
}

/* Makes the weights of a contender and the right result for it. */
static qc_status prepare_contender(shape_work *w, uint32_t contender, qc_error *err)
{
    const uint32_t schemes = w->b->q->scheme_count;
    if (contender == 0)
        return make_truth(w, 0, NULL, w->dense[0], err);
    qc_bench_weights *weights = &w->weights[contender - 1];
    if (contender > schemes) {
        *err = w->why[contender - schemes];
        return err->code ? err->code : qc_bench_packed_make(w->b, weights, weights - schemes, err);
    }
    const qc_bench_dense dense = {w->dense[0], w->dtype, w->shape->n, w->shape->k};
    QC_TRY(qc_bench_weights_make(w->b, weights, w->b->q->schemes[contender - 1], &dense, err));
    return make_truth(w, contender, &weights->plain, NULL, err);
}

/* Adds to the result what packing takes. What could not be timed is named as a failure. */
static qc_status time_packing(shape_work *w, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    qc_bench_result *r = w->b->r;
    for (uint32_t i = 0; i < q->scheme_count; i++) {
        qc_bench_packing *out = &r->packings[r->packing_count];
        qc_error why = {0};
        if (w->why[1 + q->scheme_count + i].code != QC_OK)
            continue;
        qc_status st =
            qc_bench_packed_time(w->b, &w->weights[q->scheme_count + i], &w->weights[i], out, &why);
        out->shape = w->index;
        if (st == QC_OK) {
            r->packing_count++;
            qc_bench_save(w->b);
            continue;
        }
        qc_error_prefix(&why, "packing %s of %s could not be measured", w->shape->layer,
                        qc_bench_scheme_name(q->schemes[i]));
        QC_TRY(qc_bench_failed(
            w->b, (qc_bench_failure){.shape = QC_BENCH_NO_SHAPE, .scheme = QC_BENCH_SCHEME_COUNT},
            &why, err));
    }
    return QC_OK;
}

static qc_status prepare_shape(shape_work *w, qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    QC_TRY(dense_copies(w, 1, err));
    for (uint32_t i = w->b->r->device.no_gemm || q->tune ? 1 : 0; i <= weights_count(q); i++) {
        qc_error *why = &w->why[i];
        qc_status st = prepare_contender(w, i, why);
        if (st == QC_ERR_NOMEM || st == QC_ERR_INTERRUPTED) {
            *err = *why;
            *why = (qc_error){0};
            return st;
        }
    }
    QC_TRY(activations_that_fit(w, err));
    QC_TRY(rotate(w, err));
    return q->packed ? time_packing(w, err) : QC_OK;
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
    qc_status st = qc_bench_seconds_left(w->b) > 0 ? prepare_shape(w, &full) : QC_OK;
    if (st == QC_ERR_NOMEM) {
        (void)snprintf(text, sizeof text, "%s %s is left out, because this GPU has no room for it",
                       w->shape->model, w->shape->layer);
        w->b->sink->say(w->b->sink->ctx, text);
        r->left_out += q->m_count * q->scheme_count;
        return QC_OK;
    }
    if (st == QC_ERR_INTERRUPTED || st == QC_ERR_USAGE) {
        if (err)
            *err = full;
        return full.code;
    }
    if (st != QC_OK) { /* no contender can take part, and each point says so */
        for (uint32_t i = 0; i < MAX_CONTENDERS; i++)
            if (w->why[i].code == QC_OK)
                w->why[i] = full;
        w->max_m = UINT64_MAX;
    }
    for (uint32_t i = 0; i < q->m_count; i++) {
        w->m_index = i;
        if (q->m[i] > w->max_m || qc_bench_seconds_left(w->b) <= 0)
            r->left_out += q->scheme_count;
        else
            QC_TRY(q->tune ? qc_bench_tune_point(w, err) : measure_point(w, err));
    }
    return QC_OK;
}

static void free_shape(shape_work *w)
{
    free_activations(w);
    for (uint32_t i = 0; i < w->dense_copies; i++)
        qc_cuda_free(w->dense[i]);
    qc_free(w->dense);
    for (uint32_t i = 0; i < QC_BENCH_MAX_WEIGHTS; i++)
        qc_bench_weights_free(&w->weights[i]);
    for (uint32_t i = 0; i <= QC_BENCH_SCHEME_COUNT; i++)
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
    b->matmuls_ns = qc_clock_ns();
    b->timed_seconds = 0;
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

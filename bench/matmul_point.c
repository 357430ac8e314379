/* The products of bench_matmul. For every shape and M, cuBLAS with dense weights, each scheme on
 * each path take turns.
 *
 * A contender that gives a wrong y, in a plain launch, with another copy of its weights or as a
 * graph, is dropped and has no times. */
#include "bench/matmul_bench.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "formats/digest.h"
#include "quant/quant_half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define POOL ((uint64_t)16777259) /* a prime */
/* How many rows of x differ: a prime, so that no tile sees a period. Row r of x is the same as row
 * r % TRUTH, so that many rows of truth are enough for any m. */
#define TRUTH      61u
#define CONTENDERS (1u + MB_SCHEMES * QC_MATMUL_PATH_COUNT)

/* One shape on the device with its weights, x, y and the right results. */
typedef struct {
    mb_bench *b;
    const mb_shape *shape;
    qc_gpu_noise *pool, *x_pool;
    void **dense; /* [dense_copies] */
    uint32_t dense_copies;
    mb_weights weights[MB_SCHEMES];
    double *truth[1 + MB_SCHEMES];  /* host, [TRUTH][n], dense first */
    double norm[1 + MB_SCHEMES];    /* of an average row of it */
    int copies_checked[CONTENDERS]; /* the copies were checked at a smaller m */
    void *x, *y, *workspace;
    uint64_t workspace_bytes;
    qc_matmul_io io;
} work;

/* The context of a contender's launch, spoil and look. */
typedef struct {
    work *w;
    uint32_t index;      /* 0: cuBLAS */
    uint32_t scheme;     /* index of the request's */
    mb_weights *weights; /* NULL: cuBLAS */
    qc_matmul_path path;
    const char *name; /* the kernel that runs; NULL: not known */
    double error;     /* normwise, of the plain launch */
    qc_digest bits;   /* of y after the plain launch */
    qc_timed c;
} player;

/* ---- launches ---- */

/* Weights that share x: slices of one weight that was quantized once. Each has some of its rows and
 * writes columns of its own in y. */
typedef struct {
    qc_matmul_weights weights[QC_MATMUL_GROUP_MOST];
    const qc_matmul_weights *pointers[QC_MATMUL_GROUP_MOST];
    qc_matmul_io io[QC_MATMUL_GROUP_MOST];
} parts;

static qc_status cut(parts *out, const work *w, const qc_matmul_weights *of, qc_error *err)
{
    uint64_t first = 0;
    for (uint32_t i = 0; i < w->shape->part_count; i++) {
        const qc_weights_part part = {first, w->shape->parts[i], 0, of->part.cols};
        QC_TRY(qc_matmul_slice(of, &part, &out->weights[i], err));
        out->pointers[i] = &out->weights[i];
        out->io[i] = w->io;
        out->io[i].ldy = w->shape->n;
        out->io[i].y = w->io.y ? (uint16_t *)w->io.y + first : NULL;
        first += w->shape->parts[i];
    }
    return QC_OK;
}

/* cuBLAS multiplies each part by itself. */
static qc_status launch_dense(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const work *w = ((const player *)ctx)->w;
    const mb_shape *shape = w->shape;
    const uint32_t count = shape->part_count ? shape->part_count : 1;
    uint64_t first = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t n = shape->part_count ? shape->parts[i] : shape->n;
        qc_matmul_io io = w->io;
        io.ldy = shape->n;
        io.y = (uint16_t *)w->io.y + first;
        QC_TRY(qc_matmul_dense(w->b->t.handle, (const uint16_t *)w->dense[copy] + first * shape->k,
                               n, shape->k, &io, w->b->t.gemm_workspace, QC_MATMUL_DENSE_WORKSPACE,
                               s, err));
        first += n;
    }
    return QC_OK;
}

static qc_status launch_quantized(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const player *p = ctx;
    const work *w = p->w;
    const qc_matmul_weights *weights = &p->weights->w[copy];
    parts cuts;
    if (!w->shape->part_count)
        return qc_matmul_run(w->b->t.handle, weights, &w->io, p->path, w->workspace,
                             w->workspace_bytes, s, err);
    QC_TRY(cut(&cuts, w, weights, err));
    return qc_matmul_run_group(w->b->t.handle, cuts.pointers, cuts.io, w->shape->part_count,
                               p->path, w->workspace, w->workspace_bytes, s, err);
}

/* ---- is y right? ---- */

static qc_status make_truth(work *w, uint32_t which, const qc_weights *q, qc_error *err)
{
    const uint64_t n = w->shape->n, count = TRUTH * n;
    double sum = 0;
    void *device = NULL;
    qc_status st = qc_cuda_malloc(&device, (size_t)(count * sizeof(double)), err);
    if (st == QC_OK)
        st = qc_calloc(&w->truth[which], (size_t)count, sizeof(double), err);
    const qc_matmul_exact exact = {.w = q,
                                   .dense = q ? NULL : w->dense[0],
                                   .dense_dtype = w->b->dtype,
                                   .n = n,
                                   .k = w->shape->k,
                                   .m = TRUTH,
                                   .x = w->x_pool->device,
                                   .x_dtype = w->b->dtype,
                                   .y = device};
    if (st == QC_OK)
        st = qc_matmul_reference(w->b->t.handle, &exact, w->b->t.stream, err);
    if (st == QC_OK)
        st = mb_download(w->b, w->truth[which], device, count * sizeof(double), err);
    qc_cuda_free(device);
    for (uint64_t i = 0; st == QC_OK && i < count; i++)
        sum += w->truth[which][i] * w->truth[which][i];
    w->norm[which] = sqrt(sum / TRUTH);
    return st;
}

static const double *truth_of(const player *p, double *norm)
{
    const uint32_t which = p->weights ? 1 + p->scheme : 0;
    *norm = p->w->norm[which];
    return p->w->truth[which];
}

/* How far y is from the truth: the squared distance of all rows and of the worst row. */
typedef struct {
    double sum, worst;
} distances;

static void add_row(distances *d, const uint16_t *y, const double *truth, uint64_t n,
                    qc_dtype dtype)
{
    double row = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double v = qc_f64_of_half(dtype, y[i]) - truth[i];
        row += v * v;
    }
    d->sum += row;
    if (!(row <= d->worst))
        d->worst = row;
}

/* Reads the whole of y and finds its bits and, unless d is NULL, its distance from the truth. */
static qc_status read_y(const player *p, distances *d, qc_digest *bits, qc_error *err)
{
    const work *w = p->w;
    const uint64_t n = w->shape->n, rows = MB_PINNED / (2 * n);
    double norm;
    const double *truth = truth_of(p, &norm);
    qc_digest_state *hash;
    qc_status st = QC_OK;
    if (rows == 0)
        QC_FAIL(err, QC_ERR_USAGE, "%s has too many outputs to be checked", w->shape->layer);
    QC_TRY(qc_digest_create(&hash, err));
    for (uint64_t first = 0; st == QC_OK && first < w->io.m; first += rows) {
        const uint16_t *y = w->b->pinned;
        const uint64_t here = w->io.m - first < rows ? w->io.m - first : rows;
        st = qc_cuda_to_host(w->b->pinned, (const uint16_t *)w->y + first * n,
                             (size_t)(2 * here * n), w->b->t.stream, err);
        if (st == QC_OK)
            st = qc_cuda_stream_synchronize(w->b->t.stream, err);
        if (st == QC_OK)
            qc_digest_update(hash, y, (size_t)(2 * here * n));
        for (uint64_t r = 0; st == QC_OK && d && r < here; r++)
            add_row(d, y + r * n, truth + (first + r) % TRUTH * n, n, w->b->dtype);
    }
    *bits = qc_digest_finish(hash);
    qc_digest_destroy(hash);
    /* A kernel that could not do its work says so here, so that the next contender is not
     * blamed. */
    return st == QC_OK ? qc_matmul_check(w->b->t.handle, err) : st;
}

/* The normwise error up to which a result counts as right allows for rounding to the dtype of y,
 * and for the float16 to which the tensor-core kernels round weights. Each row must be right by
 * itself, so that one wrong value in 4096 rows counts. *error is that of all rows. */
static qc_status judge(const player *p, const distances *d, const char *how, double *error,
                       qc_error *err)
{
    const mb_bench *b = p->w->b;
    const double tolerance = b->dtype == QC_DTYPE_BF16 ? 4e-3 : 1e-3;
    double norm, worst = sqrt(d->worst);
    (void)truth_of(p, &norm);
    *error = sqrt(d->sum / (double)p->w->io.m);
    if (norm > 0) {
        *error /= norm;
        worst /= norm;
    }
    if (!(*error <= tolerance) || !(worst <= 2 * tolerance))
        QC_FAIL(err, QC_ERR_CHECK,
                "%s on %s is wrong %s: its normwise error is %.3g (of a row up to %.3g), "
                "expected at most %.3g; so it has no times",
                p->weights ? b->schemes[p->scheme]->name : "cuBLAS", b->t.device.name, how,
                fabs(*error), fabs(worst), tolerance); /* "nan", not "-nan" */
    return QC_OK;
}

static qc_status spoil(void *ctx, qc_error *err)
{
    const work *w = ((const player *)ctx)->w;
    return qc_cuda_fill(w->y, 0xff, (size_t)(2 * w->io.m * w->shape->n), w->b->t.stream, err);
}

/* Expects in y what the plain launch gave. cuBLAS promises the same bits only under conditions of
 * its own, so where it takes part it is enough that y is right. */
static qc_status expect_same(const player *p, const char *how, qc_error *err)
{
    distances d = {0};
    qc_digest bits;
    double error;
    QC_TRY(read_y(p, NULL, &bits, err));
    if (qc_digest_equal(&bits, &p->bits))
        return QC_OK;
    QC_TRY(read_y(p, &d, &bits, err));
    QC_TRY(judge(p, &d, how, &error, err));
    if (!p->weights || !strcmp(p->name, qc_matmul_path_name(QC_MATMUL_DEQUANT_GEMM)))
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK,
            "%s on %s has other bits %s than in a plain launch before: its normwise error is "
            "%.3g instead of %.3g; so it has no times",
            p->w->b->schemes[p->scheme]->name, p->w->b->t.device.name, how, error, p->error);
}

static qc_status look(void *ctx, qc_error *err)
{
    return expect_same(ctx, "when it is replayed as a graph", err);
}

/* Every copy of the weights must give what the first one does. This is looked at once for a shape,
 * at the smallest m, where it costs next to nothing. */
static qc_status check_copies(player *p, qc_error *err)
{
    char how[64];
    if (p->w->copies_checked[p->index])
        return QC_OK;
    for (uint32_t i = 1; i < p->c.copies; i++) {
        (void)snprintf(how, sizeof how, "with copy %u of %u of its weights", i + 1, p->c.copies);
        QC_TRY(spoil(p, err));
        QC_TRY(p->c.launch(p, i, p->w->b->t.stream, err));
        QC_TRY(expect_same(p, how, err));
    }
    p->w->copies_checked[p->index] = 1;
    return QC_OK;
}

/* ---- one point: a shape and an M ---- */

static qc_status drop(const player *p, const qc_error *why, qc_error *err)
{
    const work *w = p->w;
    const mb_failure f = {.shape = w->shape,
                          .scheme = p->weights ? w->b->schemes[p->scheme] : NULL,
                          .m = w->io.m,
                          .path = p->name};
    return mb_failed(w->b, f, why, err);
}

static qc_status name_kernel(player *p, qc_error *err)
{
    const work *w = p->w;
    parts cuts = {.pointers = {&p->weights->w[0]}, .io = {w->io}};
    const uint32_t count = w->shape->part_count;
    qc_matmul_planned plan;
    if (count)
        QC_TRY(cut(&cuts, w, &p->weights->w[0], err));
    QC_TRY(qc_matmul_plan_product(w->b->t.handle, cuts.pointers, cuts.io, count ? count : 1,
                                  p->path, w->workspace_bytes, &plan, err));
    p->name = qc_matmul_path_name(qc_matmul_planned_path(&plan, 0));
    return QC_OK;
}

static qc_status prepare(player *p, qc_error *err)
{
    const work *w = p->w;
    distances d = {0};
    if (p->weights)
        QC_TRY(name_kernel(p, err));
    QC_TRY(spoil(p, err));
    QC_TRY(p->c.launch(p, 0, w->b->t.stream, err));
    QC_TRY(read_y(p, &d, &p->bits, err));
    QC_TRY(judge(p, &d, "in a plain launch", &p->error, err));
    QC_TRY(check_copies(p, err));
    return qc_timed_ready(&p->w->b->t, &p->c, err);
}

static int is_right(const player *p)
{
    return p->c.us && p->c.out.code == QC_OK;
}

static mb_rotation rotation_of(const player *p)
{
    const mb_shape *s = p->w->shape;
    const uint64_t each =
        p->weights ? mb_weight_bytes(p->w->b->schemes[p->scheme], s->n, s->k) : 2 * s->n * s->k;
    return (mb_rotation){p->c.copies, p->c.launches, p->c.copies * each};
}

/* Sets all but the ratio. */
static void put_product(const player *p, uint32_t rounds, mb_product *out)
{
    out->path = p->name;
    out->error = p->error;
    out->us = qc_spread_of(p->c.us, 2 * rounds);
    out->turn = rotation_of(p);
}

/* Adds a contender that was right to the end to the result. */
static void put_row(const player *cublas, const player *ours, uint32_t rounds, mb_row row)
{
    mb_bench *b = ours->w->b;
    if (!is_right(ours))
        return;
    row.shape = ours->w->shape;
    row.scheme = b->schemes[ours->scheme];
    row.m = ours->w->io.m;
    row.repacked = ours->weights->w[0].row_bytes != 0;
    if (is_right(cublas))
        row.dense_turn = rotation_of(cublas);
    put_product(ours, rounds, &row.ours);
    b->rows[b->row_count++] = row;
    (void)fprintf(stderr, "%s M=%llu %s %s: %.1f us", row.shape->layer, (unsigned long long)row.m,
                  row.scheme->name, row.ours.path, row.ours.us.median);
    if (row.ours.ratio.samples)
        (void)fprintf(stderr, ", %.2fx cuBLAS", row.ours.ratio.median);
    (void)fputc('\n', stderr);
}

/* Sets *out to the spread of the ratios of / c, round by round. */
static qc_status ratio_of(qc_spread *out, const qc_timed *c, const qc_timed *of, uint32_t rounds,
                          qc_error *err)
{
    uint32_t count = 0;
    double *ratios = NULL;
    QC_TRY(qc_calloc(&ratios, rounds, sizeof(double), err));
    for (uint32_t r = 0; r < rounds; r++) {
        double mine = c->us[2 * r] + c->us[2 * r + 1];
        if (mine > 0)
            ratios[count++] = (of->us[2 * r] + of->us[2 * r + 1]) / mine;
    }
    *out = qc_spread_of(ratios, count);
    qc_free(ratios);
    return QC_OK;
}

/* Ratios come first, because medians put the samples in another order. */
static qc_status put_rows(player *p, uint32_t count, uint32_t rounds, qc_error *err)
{
    mb_row rows[CONTENDERS] = {{0}};
    for (uint32_t i = 1; i < count; i++)
        if (is_right(&p[i]) && is_right(&p[0]))
            QC_TRY(ratio_of(&rows[i].ours.ratio, &p[i].c, &p[0].c, rounds, err));
    const qc_spread dense = is_right(&p[0]) ? qc_spread_of(p[0].c.us, 2 * rounds) : (qc_spread){0};
    for (uint32_t i = 1; i < count; i++) {
        rows[i].dense = dense;
        put_row(&p[0], &p[i], rounds, rows[i]);
    }
    return mb_save(p->w->b, err);
}

/* The least microseconds of half a round of a point. */
static double round_cost(const mb_bench *b, const mb_shape *s, uint64_t m)
{
    const double flops = qc_product_flops(m, s->n, s->k);
    double all = 0;
    for (uint32_t i = b->no_gemm ? 1 : 0; i <= b->scheme_count; i++) {
        const uint64_t weight =
            i ? mb_weight_bytes(b->schemes[i - 1], s->n, s->k) : 2 * s->n * s->k;
        const double us =
            MB_LEAST * qc_roof_floor_us(&b->roof, qc_product_bytes(weight, m, s->n, s->k), flops);
        all += (us > MB_ROUND_US ? us : MB_ROUND_US) * (i ? b->path_count : 1);
    }
    return all;
}

/* The seconds that the rounds of a point may take. Shares are in proportion to what a round costs,
 * so that every point gets about as many rounds, although a product of 4096 rows takes much longer
 * than one of a single row. The shapes that follow will need time for other things, too. */
static double point_seconds(const mb_bench *b, const mb_shape *shape, uint32_t m)
{
    double mine = round_cost(b, shape, b->m[m]), all = 0, done = 0, ahead = 0;
    for (const mb_shape *s = b->shapes; s < b->shapes + b->shape_count; s++) {
        *(s <= shape ? &done : &ahead) += (double)s->n * (double)s->k;
        for (uint32_t i = s == shape ? m : 0; s >= shape && i < b->m_count; i++)
            all += round_cost(b, s, b->m[i]);
    }
    const double other = (double)(qc_clock_ns() - b->products_ns) / 1e9 - b->timed_seconds;
    const double left = mb_seconds_left(b) - other * ahead / done;
    return left > 0 ? left * mine / all : 0;
}

static qc_status time_point(player *p, uint32_t count, double seconds, qc_error *err)
{
    mb_bench *b = p->w->b;
    qc_timed *in[CONTENDERS];
    uint32_t in_count = 0, ours = 0;
    for (uint32_t i = 0; i < count; i++)
        if (p[i].c.graph && p[i].c.out.code == QC_OK) {
            in[in_count++] = &p[i].c;
            ours += i > 0;
        }
    if (!ours)
        return QC_OK;
    const uint32_t rounds =
        qc_timing_rounds(b->rounds, qc_timed_round_seconds(in, in_count), seconds);
    const uint64_t began = qc_clock_ns();
    QC_TRY(qc_timed_rounds(&b->t, in, in_count, rounds, err));
    b->timed_seconds += (double)(qc_clock_ns() - began) / 1e9;
    for (uint32_t i = 0; i < in_count; i++)
        if (in[i]->out.code != QC_OK)
            QC_TRY(drop(in[i]->ctx, &in[i]->out, err));
    return put_rows(p, count, rounds, err);
}

static player player_of(work *w, uint32_t index)
{
    const mb_bench *b = w->b;
    player p = {.w = w, .index = index, .name = "cublas"};
    p.c = (qc_timed){.launch = launch_dense,
                     .copies = w->dense_copies,
                     .least = MB_LEAST,
                     .spoil = spoil,
                     .look = look};
    if (index == 0)
        return p;
    p.scheme = (index - 1) / b->path_count;
    p.weights = &w->weights[p.scheme];
    p.path = b->paths[(index - 1) % b->path_count];
    p.name = NULL;
    p.c.launch = launch_quantized;
    p.c.copies = p.weights->copies;
    return p;
}

static qc_status measure_point(work *w, uint32_t m, qc_error *err)
{
    const mb_bench *b = w->b;
    const uint32_t count = 1 + b->scheme_count * b->path_count;
    player *p = NULL;
    QC_TRY(qc_calloc(&p, count, sizeof *p, err));
    qc_status st = QC_OK;
    w->io.m = b->m[m];
    for (uint32_t i = 0; i < count; i++) {
        p[i] = player_of(w, i);
        p[i].c.ctx = &p[i];
        if (st == QC_OK && (i || !b->no_gemm) && prepare(&p[i], &p[i].c.out) != QC_OK)
            st = drop(&p[i], &p[i].c.out, err);
    }
    if (st == QC_OK)
        st = time_point(p, count, point_seconds(b, w->shape, m), err);
    for (uint32_t i = 0; i < count; i++)
        qc_timed_done(&p[i].c);
    qc_free(p);
    return st;
}

/* ---- one shape ---- */

static qc_status dense_copies(work *w, uint32_t want, qc_error *err)
{
    const uint64_t elems = w->shape->n * w->shape->k;
    QC_TRY(qc_realloc_array(&w->dense, want, sizeof *w->dense, err));
    while (w->dense_copies < want) {
        qc_error full = {0};
        void *next;
        if (qc_cuda_malloc(&next, (size_t)(2 * elems), &full) != QC_OK) {
            if (full.code == QC_ERR_NOMEM && w->dense_copies)
                break;
            *err = full;
            return full.code;
        }
        w->dense[w->dense_copies++] = next;
        QC_TRY(w->dense_copies == 1
                   ? qc_gpu_noise_fill(w->pool, next, elems, 0, w->b->t.stream, err)
                   : qc_cuda_copy(next, w->dense[0], (size_t)(2 * elems), w->b->t.stream, err));
    }
    return QC_OK;
}

static qc_status make_weights(work *w, qc_error *err)
{
    mb_bench *b = w->b;
    QC_TRY(dense_copies(w, 1, err));
    if (!b->no_gemm)
        QC_TRY(make_truth(w, 0, NULL, err));
    for (uint32_t i = 0; i < b->scheme_count; i++) {
        QC_TRY(mb_weights_make(b, &w->weights[i], b->schemes[i], w->dense[0], w->shape, err));
        QC_TRY(make_truth(w, 1 + i, &w->weights[i].plain, err));
    }
    return QC_OK;
}

/* Returns the workspace of one weight on a path for as many rows of x as can be multiplied; a
 * launch with more says why it cannot. */
static uint64_t workspace_of(const work *w, const mb_weights *weights, qc_matmul_path path)
{
    const mb_bench *b = w->b;
    const uint64_t limit = b->t.device.memory_bytes / 8;
    parts cuts;
    for (uint32_t i = b->m_count; weights->copies && i-- > 0;) {
        uint64_t bytes = UINT64_MAX;
        if (!w->shape->part_count)
            bytes = qc_matmul_workspace_bytes(b->t.handle, &weights->w[0], b->m[i], path, limit);
        else if (cut(&cuts, w, &weights->w[0], NULL) == QC_OK)
            bytes = qc_matmul_group_workspace_bytes(b->t.handle, cuts.pointers,
                                                    w->shape->part_count, b->m[i], path, limit);
        if (bytes != UINT64_MAX)
            return bytes;
    }
    return 0;
}

/* Makes x, y and the workspace for the most rows. */
static qc_status make_activations(work *w, qc_error *err)
{
    const mb_bench *b = w->b;
    const uint64_t m = b->m[b->m_count - 1], n = w->shape->n, k = w->shape->k;
    for (uint32_t i = 0; i < b->scheme_count * b->path_count; i++) {
        const uint64_t bytes =
            workspace_of(w, &w->weights[i / b->path_count], b->paths[i % b->path_count]);
        w->workspace_bytes = bytes > w->workspace_bytes ? bytes : w->workspace_bytes;
    }
    QC_TRY(qc_cuda_malloc(&w->x, (size_t)(2 * m * k), err));
    QC_TRY(qc_cuda_malloc(&w->y, (size_t)(2 * m * n), err));
    QC_TRY(qc_cuda_malloc(&w->workspace, (size_t)w->workspace_bytes, err));
    for (uint64_t row = 0; row < m; row += TRUTH) {
        const uint64_t rows = m - row < TRUTH ? m - row : TRUTH;
        QC_TRY(qc_cuda_copy((uint16_t *)w->x + row * k, w->x_pool->device, (size_t)(2 * rows * k),
                            b->t.stream, err));
    }
    w->io = (qc_matmul_io){.x = w->x, .x_dtype = b->dtype, .y = w->y, .y_dtype = b->dtype};
    return QC_OK;
}

/* Makes the copies that are used in turn. */
static qc_status rotate(work *w, qc_error *err)
{
    mb_bench *b = w->b;
    const uint64_t l2 = b->t.device.l2_bytes, dense = 2 * w->shape->n * w->shape->k;
    uint64_t free_bytes, total;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    const uint64_t share = free_bytes / 10 * 9 / (1 + b->scheme_count);
    if (!b->no_gemm)
        QC_TRY(dense_copies(w, qc_timing_copies(dense, dense, l2, share + dense), err));
    for (uint32_t i = 0; i < b->scheme_count; i++) {
        const uint64_t read = mb_weight_bytes(b->schemes[i], w->shape->n, w->shape->k);
        const uint64_t held = w->weights[i].bytes_each;
        QC_TRY(mb_weights_multiply(b, &w->weights[i],
                                   qc_timing_copies(read, held, l2, share + held), err));
    }
    return QC_OK;
}

static qc_status prepare_shape(work *w, qc_error *err)
{
    QC_TRY(make_weights(w, err));
    QC_TRY(make_activations(w, err));
    return rotate(w, err);
}

static qc_status measure_shape(work *w, qc_error *err)
{
    mb_bench *b = w->b;
    qc_error full = {0};
    const uint32_t each = b->scheme_count * b->path_count;
    qc_status st = mb_seconds_left(b) > 0 ? prepare_shape(w, &full) : QC_ERR_NOMEM;
    if (st == QC_ERR_NOMEM) {
        b->left_out += b->m_count * each;
        (void)fprintf(stderr, "%s is left out, because there is no %s for it\n", w->shape->layer,
                      full.code == QC_OK ? "time" : "room");
        return QC_OK;
    }
    if (st != QC_OK) {
        *err = full;
        return st;
    }
    for (uint32_t i = 0; i < b->m_count; i++)
        if (mb_seconds_left(b) <= 0)
            b->left_out += each;
        else
            QC_TRY(measure_point(w, i, err));
    return QC_OK;
}

static void free_shape(work *w)
{
    qc_cuda_free(w->x);
    qc_cuda_free(w->y);
    qc_cuda_free(w->workspace);
    for (uint32_t i = 0; i < w->dense_copies; i++)
        qc_cuda_free(w->dense[i]);
    qc_free(w->dense);
    for (uint32_t i = 0; i < MB_SCHEMES; i++)
        mb_weights_free(&w->weights[i]);
    for (uint32_t i = 0; i <= MB_SCHEMES; i++)
        qc_free(w->truth[i]);
}

qc_status mb_products_measure(mb_bench *b, qc_error *err)
{
    uint64_t unique = POOL, elems = 0, k = 0, free_bytes, total;
    qc_gpu_noise pool = {0}, x_pool = {0};
    b->products_ns = qc_clock_ns();
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    for (uint32_t i = 0; i < b->shape_count; i++) {
        const mb_shape *s = &b->shapes[i];
        elems = s->n * s->k > elems ? s->n * s->k : elems;
        k = s->k > k ? s->k : k;
    }
    unique = elems < unique ? elems : unique;
    unique = free_bytes / 64 < unique ? free_bytes / 64 : unique;
    qc_status st = qc_gpu_noise_make(&pool, unique, 0.02, b->dtype, 1, b->t.stream, err);
    if (st == QC_OK)
        st = qc_gpu_noise_make(&x_pool, TRUTH * k, 1, b->dtype, 2, b->t.stream, err);
    for (uint32_t i = 0; st == QC_OK && i < b->shape_count; i++) {
        work w = {.b = b, .shape = &b->shapes[i], .pool = &pool, .x_pool = &x_pool};
        st = measure_shape(&w, err);
        free_shape(&w);
    }
    qc_gpu_noise_free(&pool);
    qc_gpu_noise_free(&x_pool);
    return st;
}

/* Checks whether y is right. A contender that gives a wrong y, in a plain launch, with another copy
 * of its weights or as a graph, is dropped and has no times. */
#include "base/workers.h"
#include "convert/gpu/gpu_bench_internal.h"
#include "quant/quant_half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Returns the squared distance of one row of y from the truth. */
static double row_distance(const uint16_t *y, const double *truth, uint64_t n, qc_dtype dtype)
{
    double sum = 0;
    for (uint64_t i = 0; i < n; i++) {
        double v = qc_f64_of_half(dtype, y[i]);
        sum += (v - truth[i]) * (v - truth[i]);
    }
    return sum;
}

/* How far y is from the truth: the squared distance of all rows and of the worst row. */
typedef struct {
    double sum, worst;
} distances;

/* Reads the whole of y and finds its bits and, unless d is NULL, its distance from the truth. */
static qc_status read_y(qc_bench_player *p, distances *d, qc_digest *bits, qc_error *err)
{
    qc_bench_work *w = p->w;
    uint64_t n = w->shape->n, rows = QC_BENCH_PINNED / (2 * n);
    qc_digest_state *hash;
    qc_status st = QC_OK;
    if (rows == 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "--shapes: %s has too many outputs to be checked; give a smaller shape",
                w->shape->layer);
    QC_TRY(qc_digest_create(&hash, err));
    for (uint64_t first = 0; st == QC_OK && first < w->io.m; first += rows) {
        const uint16_t *y = w->b->pinned;
        uint64_t here = w->io.m - first < rows ? w->io.m - first : rows;
        /* The host needs a good part of a second for 4096 x 28672. */
        st = qc_check_interrupted(err);
        if (st == QC_OK)
            st = qc_cuda_to_host(w->b->pinned, (const uint16_t *)w->y + first * n,
                                 (size_t)(2 * here * n), w->b->stream, err);
        if (st == QC_OK)
            st = qc_cuda_stream_synchronize(w->b->stream, err);
        if (st == QC_OK)
            qc_digest_update(hash, y, (size_t)(2 * here * n));
        for (uint64_t r = 0; st == QC_OK && d && r < here; r++) {
            const double *truth = w->truth[p->truth] + (first + r) % QC_BENCH_TRUTH * n;
            double row = row_distance(y + r * n, truth, n, w->dtype);
            d->sum += row;
            if (!(row <= d->worst))
                d->worst = row;
        }
    }
    *bits = qc_digest_finish(hash);
    qc_digest_destroy(hash);
    /* A kernel that could not do its work says so here, so that the next contender is not
     * blamed. */
    return st == QC_OK ? qc_matmul_check(w->b->handle, err) : st;
}

/* Each row must be right by itself, so that one wrong value in 4096 rows counts. *error is that of
 * all rows. how: "in a plain launch". */
static qc_status judge(const qc_bench_player *p, const distances *d, const char *how, double *error,
                       qc_error *err)
{
    const qc_bench_work *w = p->w;
    double tolerance = qc_bench_tolerance(w->b->q), norm = w->truth_norm[p->truth];
    *error = norm > 0 ? sqrt(d->sum / (double)w->io.m) / norm : sqrt(d->sum);
    if (!(*error <= tolerance) || !(sqrt(d->worst) <= 2 * tolerance * norm))
        QC_FAIL(err, QC_ERR_CHECK,
                "%s on %s is wrong %s: its normwise error is %.3g (of a row up to %.3g), expected "
                "at most %.3g; so it has no times",
                p->what, w->b->device.name, how, fabs(*error), /* "nan", not "-nan" */
                fabs(norm > 0 ? sqrt(d->worst) / norm : sqrt(d->worst)), tolerance);
    return QC_OK;
}

qc_status qc_bench_spoil_y(void *ctx, qc_error *err)
{
    const qc_bench_work *w = ((const qc_bench_player *)ctx)->w;
    return qc_cuda_fill(w->y, 0xff, (size_t)(2 * w->io.m * w->shape->n), w->b->stream, err);
}

qc_status qc_bench_run_and_check(qc_bench_player *p, const qc_bench_contender *c, qc_error *err)
{
    distances d = {0};
    QC_TRY(qc_bench_spoil_y(p, err));
    QC_TRY(c->launch(c->ctx, 0, p->w->b->stream, err));
    QC_TRY(read_y(p, &d, &p->bits, err));
    return judge(p, &d, "in a plain launch", &p->error, err);
}

qc_status qc_bench_kernel_name(const qc_bench_work *w, uint32_t contender, const char **name,
                               qc_error *err)
{
    *name = "cublas";
    if (contender == 0)
        return QC_OK;
    const qc_bench_weights *weights = &w->weights[contender - 1];
    *name = NULL;
    if (w->shape->part_count)
        return qc_bench_parts_path(w, weights, name, err);
    return qc_bench_path_of(w->b, &weights->w[0], &w->io, w->path, w->workspace_bytes, name, err);
}

/* Does cuBLAS take part in the product? It promises the same bits only under conditions of its own,
 * so then it is enough that y is right. */
static int through_cublas(const qc_bench_player *p)
{
    const char *name = NULL;
    return qc_bench_kernel_name(p->w, p->contender, &name, NULL) == QC_OK &&
           (p->contender == 0 || !strcmp(name, qc_matmul_path_name(QC_MATMUL_DEQUANT_GEMM)));
}

/* Expects in y what the plain launch gave. */
static qc_status expect_same(qc_bench_player *p, const char *how, qc_error *err)
{
    distances d = {0};
    qc_digest bits;
    double error;
    QC_TRY(read_y(p, NULL, &bits, err));
    if (qc_digest_equal(&bits, &p->bits))
        return QC_OK;
    QC_TRY(read_y(p, &d, &bits, err));
    QC_TRY(judge(p, &d, how, &error, err));
    if (through_cublas(p))
        return QC_OK;
    QC_FAIL(err, QC_ERR_CHECK,
            "%s on %s has other bits %s than in a plain launch before: its normwise error is %.3g "
            "instead of %.3g; so it has no times",
            p->what, p->w->b->device.name, how, error, p->error);
}

qc_status qc_bench_look_at_y(void *ctx, qc_error *err)
{
    return expect_same(ctx, "when it is replayed as a graph", err);
}

qc_status qc_bench_check_copies(qc_bench_player *p, const qc_bench_contender *c, qc_error *err)
{
    char how[64];
    if (p->w->copies_checked[p->contender])
        return QC_OK;
    for (uint32_t i = 1; i < c->copies; i++) {
        (void)snprintf(how, sizeof how, "with copy %u of %u of its weights", i + 1, c->copies);
        QC_TRY(qc_bench_spoil_y(p, err));
        QC_TRY(c->launch(c->ctx, i, p->w->b->stream, err));
        QC_TRY(expect_same(p, how, err));
    }
    p->w->copies_checked[p->contender] = 1;
    return QC_OK;
}

qc_status qc_bench_drop(qc_bench_work *w, uint32_t contender, const char *path, const qc_error *why,
                        qc_error *err)
{
    const qc_bench_request *q = w->b->q;
    const qc_bench_failure f = {.shape = w->index,
                                .scheme = contender ? q->schemes[(contender - 1) % q->scheme_count]
                                                    : QC_BENCH_SCHEME_COUNT,
                                .m = q->m[w->m_index],
                                .path = path};
    QC_TRY(qc_bench_failed(w->b, f, why, err));
    return qc_matmul_workspace_init(w->workspace, w->workspace_bytes, w->b->stream, err);
}

#include "base/alloc.h"
#include "base/clock.h"
#include "quant/blas_internal.h"
#include "quant/piecework.h"

#define TOKENS     256u
#define SIDE       768u
#define TILE       128u
#define MEASURE_NS 100000000u

typedef struct {
    const qc_blas *b;
    float *x;    /* [TOKENS, SIDE] */
    float *made; /* [TILE, TILE] per thread */
} product;

static qc_status one_tile(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const product *p = ctx;
    const float *left = p->x + piece / (SIDE / TILE) * TILE;
    const float *right = p->x + piece % (SIDE / TILE) * TILE;
    (void)err;
    p->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_TRANS, QC_BLAS_PLAIN, TILE, TILE, TOKENS, 1.0f, left, SIDE,
                  right, SIDE, 0.0f, p->made + (uint64_t)thread * TILE * TILE, TILE);
    return QC_OK;
}

/* The first product is not timed: it touches the pages and starts the library. */
static qc_status measure(double *out, product *p, unsigned threads, qc_error *err)
{
    const uint64_t tiles = (uint64_t)(SIDE / TILE) * (SIDE / TILE);
    double flops = 0;
    for (uint64_t i = 0; i < (uint64_t)TOKENS * SIDE; i++)
        p->x[i] = (float)(i % 97) / 97.0f - 0.5f;
    QC_TRY(qc_piecework(threads, tiles, one_tile, p, err));
    uint64_t start = qc_clock_ns();
    do {
        QC_TRY(qc_piecework(threads, tiles, one_tile, p, err));
        flops += 2.0 * TOKENS * SIDE * SIDE;
    } while (qc_clock_ns() - start < MEASURE_NS);
    *out = (double)(qc_clock_ns() - start) * 1e-9 / flops;
    return QC_OK;
}

qc_status qc_blas_speed(double *out, const qc_blas *b, unsigned threads, qc_error *err)
{
    product p = {.b = b};
    qc_status st = qc_malloc_aligned(&p.x, 64, (size_t)TOKENS * SIDE * sizeof(float), err);
    if (st == QC_OK)
        st = qc_malloc_aligned(&p.made, 64, (size_t)threads * TILE * TILE * sizeof(float), err);
    if (st == QC_OK)
        st = measure(out, &p, threads, err);
    qc_free(p.x);
    qc_free(p.made);
    return st;
}

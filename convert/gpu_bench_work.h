/* Inside convert/gpu_bench_matmul.c and gpu_bench_tune.c only: one shape on the device, its
 * weights, x, y and what is right. */
#ifndef QC_CONVERT_GPU_BENCH_WORK_H
#define QC_CONVERT_GPU_BENCH_WORK_H

#include "convert/gpu_bench_parts.h"

#define QC_BENCH_MAX_CONTENDERS (1u + QC_BENCH_SCHEME_COUNT)

typedef struct {
    qc_bench_gpu *b;
    uint32_t index;
    const qc_bench_shape *shape;
    qc_dtype dtype; /* of x, y and dense weights */
    qc_matmul_path path;
    qc_bench_pool *pool, *x_pool;

    void **dense; /* [dense_copies] */
    uint32_t dense_copies;
    qc_bench_weights weights[QC_BENCH_SCHEME_COUNT];
    double *truth[QC_BENCH_MAX_CONTENDERS];     /* [QC_BENCH_TRUTH][n], dense first; host */
    double truth_norm[QC_BENCH_MAX_CONTENDERS]; /* of an average row */
    uint64_t max_m;                             /* that there is memory for */
    void *x, *y, *workspace;
    uint64_t workspace_bytes;
    qc_matmul_io io;
} qc_bench_work;

/* One launch of c, whose y has to be the truth of a contender (0: dense, 1 + scheme's index), else
 * QC_ERR_CHECK. */
QC_NODISCARD qc_status qc_bench_run_and_check(qc_bench_work *w, const qc_bench_contender *c,
                                              uint32_t contender, const char *what, double *error,
                                              qc_error *err);

/* ---- gpu_bench_tune.c ---- */

/* Workspace of the candidates for every m up to w->max_m; each needs at most limit_bytes. */
uint64_t qc_bench_tune_workspace(const qc_bench_work *w, uint32_t scheme, uint64_t limit_bytes);
/* The candidates for all schemes at this m, to the result. points: that are still to come, this one
 * included. */
QC_NODISCARD qc_status qc_bench_tune_point(qc_bench_work *w, uint64_t m, uint32_t points,
                                           qc_error *err);

#endif

/* Inside gpu_bench_matmul.c, _check.c, _group.c and _tune.c only: one shape on the device with its
 * weights, x, y and the right results. */
#ifndef QC_CONVERT_GPU_BENCH_WORK_H
#define QC_CONVERT_GPU_BENCH_WORK_H

#include "convert/gpu/gpu_bench_internal.h"
#include "formats/digest.h"

#define QC_BENCH_MAX_CONTENDERS (1u + QC_BENCH_SCHEME_COUNT)

typedef struct {
    qc_bench_gpu *b;
    uint32_t index, m_index; /* the point: indices of the request's shapes and of its m */
    const qc_bench_shape *shape;
    qc_dtype dtype; /* of x, y and dense weights */
    qc_matmul_path path;
    qc_bench_pool *pool, *x_pool;

    void **dense; /* [dense_copies] */
    uint32_t dense_copies;
    qc_bench_weights weights[QC_BENCH_SCHEME_COUNT];
    double *truth[QC_BENCH_MAX_CONTENDERS];     /* host, [QC_BENCH_TRUTH][n], dense first */
    double truth_norm[QC_BENCH_MAX_CONTENDERS]; /* of an average row */
    /* Why a contender cannot take part at any m of this shape; code QC_OK: it can. */
    qc_error why[QC_BENCH_MAX_CONTENDERS];
    int copies_checked[QC_BENCH_MAX_CONTENDERS]; /* the copies were checked at a smaller m */
    uint64_t max_m;                              /* the largest m that there is memory for */
    void *x, *y, *workspace;
    uint64_t workspace_bytes;
    qc_matmul_io io;
} qc_bench_work;

/* The context of a contender's launch, spoil and look. */
typedef struct {
    qc_bench_work *w;
    uint32_t contender; /* 0: dense; 1 + the scheme's index */
    char what[160];     /* "the nf4 matmul" */
    double error;       /* normwise, of the plain launch */
    qc_digest bits;     /* of y after the plain launch */
} qc_bench_player;

/* ---- gpu_bench_check.c ---- */

/* Makes one plain launch of c and keeps the bits of y. QC_ERR_CHECK if y is not right. */
QC_NODISCARD qc_status qc_bench_run_and_check(qc_bench_player *p, const qc_bench_contender *c,
                                              qc_error *err);
/* Checks that every copy of the weights gives what the first one does. This is done once for a
 * shape, at the smallest m, where it costs next to nothing. */
QC_NODISCARD qc_status qc_bench_check_copies(qc_bench_player *p, const qc_bench_contender *c,
                                             qc_error *err);
/* The functions spoil and look of a contender; ctx is a player. The first fills y with NaN. The
 * second expects the bits of the plain launch in y. cuBLAS does not promise the same bits, so where
 * it takes part it is enough that y is right. */
QC_NODISCARD qc_status qc_bench_spoil_y(void *ctx, qc_error *err);
QC_NODISCARD qc_status qc_bench_look_at_y(void *ctx, qc_error *err);
/* The name of the kernel that runs for a contender: "gemv", "cublas". */
QC_NODISCARD qc_status qc_bench_kernel_name(const qc_bench_work *w, uint32_t contender,
                                            const char **name, qc_error *err);
/* qc_bench_failed for a contender at the point, whose kernel is `path` (NULL: not known). The
 * contenders that follow find the workspace as if this one had not run. */
QC_NODISCARD qc_status qc_bench_drop(qc_bench_work *w, uint32_t contender, const char *path,
                                     const qc_error *why, qc_error *err);

/* ---- gpu_bench_group.c: shapes with parts ---- */

/* The parts of a weight, to be run as a group. The y of part i begins where its columns do. */
typedef struct {
    qc_matmul_weights weights[QC_MATMUL_GROUP_MOST];
    const qc_matmul_weights *pointers[QC_MATMUL_GROUP_MOST];
    qc_matmul_io io[QC_MATMUL_GROUP_MOST];
} qc_bench_parts;
/* QC_ERR_USAGE where a part begins within a block of scales. */
QC_NODISCARD qc_status qc_bench_parts_of(qc_bench_parts *out, const qc_bench_work *w,
                                         const qc_matmul_weights *of, qc_error *err);
QC_NODISCARD qc_status qc_bench_run_parts(const qc_bench_work *w, const qc_matmul_weights *of,
                                          qc_cuda_stream s, qc_error *err);
/* Multiplies each part of a dense weight by itself. */
QC_NODISCARD qc_status qc_bench_dense_parts(const qc_bench_work *w, const void *dense,
                                            qc_cuda_stream s, qc_error *err);
/* The kernel's name, as qc_bench_path_of gives it for one weight. */
QC_NODISCARD qc_status qc_bench_parts_path(const qc_bench_work *w, const qc_bench_weights *weights,
                                           const char **name, qc_error *err);
/* UINT64_MAX: there is none. err says why where the parts are the reason. */
uint64_t qc_bench_parts_workspace(const qc_bench_work *w, const qc_matmul_weights *of, uint64_t m,
                                  uint64_t limit_bytes, qc_error *err);

/* ---- gpu_bench_tune.c ---- */

/* The workspace of the candidates for every m up to w->max_m. Each needs at most limit_bytes. */
uint64_t qc_bench_tune_workspace(const qc_bench_work *w, uint32_t scheme, uint64_t limit_bytes);
/* Measures the candidates of all schemes at the point and adds them to the result. */
QC_NODISCARD qc_status qc_bench_tune_point(qc_bench_work *w, qc_error *err);

#endif

/* Inside convert/gpu_bench*.c and gpu_validate.c only: the state of one run of qconv bench (or of
 * validate's timing) on a GPU. One thread. */
#ifndef QC_CONVERT_GPU_BENCH_INTERNAL_H
#define QC_CONVERT_GPU_BENCH_INTERNAL_H

#include "convert/bench.h"
#include "kernels/matmul_tuning.h"
#include "quant/quant_ops.h"

typedef struct {
    const qc_bench_request *q;
    const qc_bench_sink *sink;
    qc_bench_result *r;
    qc_arena *arena; /* of the result's failures; validate has none */
    qc_cuda_device device;
    qc_matmul *handle;
    const qc_quant_ops *ops; /* the CPU's, to check against */
    qc_cuda_stream stream;
    qc_cuda_event begin, end;
    uint64_t started_ns;
    uint64_t matmuls_ns;  /* when the first shape began */
    double timed_seconds; /* of the rounds since then */
    void *pinned;         /* host, QC_BENCH_PINNED bytes: what is downloaded to be checked */
    float *map;           /* device: the dynamic map */
    uint64_t *bad;
    void *gemm_workspace; /* for qc_matmul_dense; NULL where memory is too short for one */
} qc_bench_gpu;

#define QC_BENCH_PINNED ((size_t)32 << 20)

/* With q, r and started_ns set; close also after a failure. */
QC_NODISCARD qc_status qc_bench_gpu_open(qc_bench_gpu *b, qc_error *err);
void qc_bench_gpu_close(qc_bench_gpu *b);
/* Something could not be measured, `why` says why: f, but for f->what, goes to the result with it,
 * and QC_OK is returned: the run goes on with what is next. It ends, with the error that is
 * returned, where it was interrupted and where the device answers nothing any more: what the kernel
 * left behind is not listed by codes but tried, with a copy to the device and back. */
QC_NODISCARD qc_status qc_bench_failed(qc_bench_gpu *b, qc_bench_failure f, const qc_error *why,
                                       qc_error *err);
/* Tells the sink that something was added to the result. */
void qc_bench_save(qc_bench_gpu *b);

/* The shape of weights w and this io, whose rows of x lie one behind the other, as qc_matmul_run
 * makes it, the handle's table included. (gpu_bench.c) */
qc_matmul_shape qc_bench_shape_of(const qc_bench_gpu *b, const qc_matmul_weights *w, int repacked,
                                  const qc_matmul_io *io);
/* The name of the kernel that qc_matmul_run takes for weights w and this io, whose rows of x lie
 * one behind the other. (gpu_bench.c) */
QC_NODISCARD qc_status qc_bench_path_of(const qc_bench_gpu *b, const qc_matmul_weights *w,
                                        int repacked, const qc_matmul_io *io, qc_matmul_path path,
                                        uint64_t workspace_bytes, const char **name, qc_error *err);

/* ---- timing: gpu_bench_time.c ---- */

/* Put launch number `copy` (of the rotation) on s. */
typedef qc_status (*qc_bench_launch)(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err);

typedef struct {
    qc_bench_launch launch;
    void *ctx;
    uint32_t copies; /* that ctx has */
    uint32_t least;  /* launches in a graph */
    /* Both or none: overwrite the result with what is wrong, and QC_OK if the result that is there
     * now is right. The graph that will be timed is checked so before the first round, and what its
     * replay in the last one left is looked at. */
    qc_status (*spoil)(void *ctx, qc_error *err);
    qc_status (*look)(void *ctx, qc_error *err);

    /* set by qc_bench_ready */
    uint32_t launches;
    qc_cuda_graph graph;
    double once_us; /* first measurement of a launch */

    /* set by qc_bench_time */
    double *us;   /* samples, in pairs: 2 * r and 2 * r + 1 are of round r */
    qc_error out; /* code not QC_OK: it failed or was wrong, the others went on */
} qc_bench_contender;

double qc_bench_seconds_left(const qc_bench_gpu *b);
/* One launch by itself, then a graph that is long enough to time, run once, and checked. */
QC_NODISCARD qc_status qc_bench_ready(qc_bench_gpu *b, qc_bench_contender *c, qc_error *err);
/* Seconds of one round of these. */
double qc_bench_round_seconds(qc_bench_contender *const *c, uint32_t count);
/* Fails only if it was interrupted or there is no memory; what happens to one contender is in its
 * `out`. */
QC_NODISCARD qc_status qc_bench_time(qc_bench_gpu *b, qc_bench_contender *const *c, uint32_t count,
                                     uint32_t rounds, qc_error *err);
/* Median and ends of c's samples (sorts them: ratios first). */
qc_bench_spread qc_bench_us_of(qc_bench_contender *c, uint32_t rounds);
/* of / c, round by round. */
QC_NODISCARD qc_status qc_bench_ratio_of(qc_bench_spread *out, const qc_bench_contender *c,
                                         const qc_bench_contender *of, uint32_t rounds,
                                         qc_error *err);
/* Ready, time, spread, done: for one alone, which needs no copies of anything. */
QC_NODISCARD qc_status qc_bench_alone(qc_bench_gpu *b, qc_bench_contender c, qc_bench_spread *us,
                                      qc_error *err);
void qc_bench_done(qc_bench_contender *c);

/* ---- data: gpu_bench_data.c ---- */

/* Random numbers on the device: `unique` elements in a bell shape around 0 with this standard
 * deviation, over and over until there are n. unique is a prime or all of n, so that rows of
 * weights are not alike. dtype F16 or BF16. host: the unique ones, or NULL; free with qc_free. */
typedef struct {
    uint16_t *host;
    void *device;
    uint64_t unique;
    qc_dtype dtype;
} qc_bench_pool;
QC_NODISCARD qc_status qc_bench_pool_make(qc_bench_gpu *b, qc_bench_pool *p, uint64_t unique,
                                          double deviation, qc_dtype dtype, qc_error *err);
/* n elements to dst (device), starting with element `first` of the pool. */
QC_NODISCARD qc_status qc_bench_pool_fill(qc_bench_gpu *b, const qc_bench_pool *p, void *dst,
                                          uint64_t n, uint64_t first, qc_error *err);
void qc_bench_pool_free(qc_bench_pool *p);
/* Device memory to the host, waited for. */
QC_NODISCARD qc_status qc_bench_download(qc_bench_gpu *b, void *host, const void *device,
                                         uint64_t bytes, qc_error *err);

/* Weights of one scheme: `copies` times the same, at other addresses. */
typedef struct {
    qc_bench_scheme scheme;
    int repacked;
    uint64_t bytes_each; /* device memory of one copy */
    uint32_t copies;
    void **memory; /* [copies] */
    qc_matmul_weights *w;
    qc_weights plain; /* the first, as it was before it was made ready */
} qc_bench_weights;
/* The first copy: dense [n, k] (device, F16 or BF16) quantized by the kernels. */
QC_NODISCARD qc_status qc_bench_weights_make(qc_bench_gpu *b, qc_bench_weights *w,
                                             qc_bench_scheme scheme, const void *dense,
                                             qc_dtype dtype, uint64_t n, uint64_t k, qc_error *err);
/* More of them, up to `want`, or as many as memory has room for; waited for. */
QC_NODISCARD qc_status qc_bench_weights_multiply(qc_bench_gpu *b, qc_bench_weights *w,
                                                 uint32_t want, qc_error *err);
void qc_bench_weights_free(qc_bench_weights *w);

/* ---- parts ---- */

QC_NODISCARD qc_status qc_bench_roofs(qc_bench_gpu *b, qc_error *err);   /* gpu_bench_roof.c */
QC_NODISCARD qc_status qc_bench_kernels(qc_bench_gpu *b, qc_error *err); /* gpu_bench_quant.c */
QC_NODISCARD qc_status qc_bench_matmuls(qc_bench_gpu *b, qc_error *err); /* gpu_bench_matmul.c */

#endif

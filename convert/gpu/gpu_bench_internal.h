/* Inside gpu_bench*.c and gpu_validate.c only: the state of one run of qconv bench (or of
 * validate's timing) on a GPU. For one thread. */
#ifndef QC_CONVERT_GPU_BENCH_INTERNAL_H
#define QC_CONVERT_GPU_BENCH_INTERNAL_H

#include "convert/device/bench.h"
#include "formats/digest.h"
#include "kernels/matmul_tuning.h"
#include "quant/quant_form.h"

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
    void *gemm_workspace; /* for qc_matmul_dense; NULL where there is too little memory for one */
} qc_bench_gpu;

#define QC_BENCH_PINNED ((size_t)32 << 20)

/* ---- the device: gpu_bench_device.c ---- */

/* q, r and started_ns must be set. Close it also after a failure. */
QC_NODISCARD qc_status qc_bench_gpu_open(qc_bench_gpu *b, qc_error *err);
void qc_bench_gpu_close(qc_bench_gpu *b);
/* Reports that something could not be measured, and why. The failure f (all of it but f.what) goes
 * to the result, and QC_OK means that the run goes on with what is next. It returns an error, and
 * the run ends, where the run was interrupted and where the device does not answer any more. Which
 * errors of a kernel leave the device unusable is not listed by codes; instead this tries a copy to
 * the device and back. */
QC_NODISCARD qc_status qc_bench_failed(qc_bench_gpu *b, qc_bench_failure f, const qc_error *why,
                                       qc_error *err);
/* Tells the sink that something was added to the result. */
void qc_bench_save(qc_bench_gpu *b);

/* ---- shapes and paths: gpu_bench_device.c ---- */

/* Returns the shape that qc_matmul_run makes of weights w and this io, with the handle's table. The
 * rows of x lie one behind the other. */
qc_matmul_shape qc_bench_shape_of(const qc_bench_gpu *b, const qc_matmul_weights *w,
                                  const qc_matmul_io *io);
/* The name of the kernel that qc_matmul_run takes for weights w and this io. The rows of x lie one
 * behind the other. */
QC_NODISCARD qc_status qc_bench_path_of(const qc_bench_gpu *b, const qc_matmul_weights *w,
                                        const qc_matmul_io *io, qc_matmul_path path,
                                        uint64_t workspace_bytes, const char **name, qc_error *err);

/* ---- timing: gpu_bench_time.c ---- */

/* Puts launch number `copy` (of the rotation) on s. */
typedef qc_status (*qc_bench_launch)(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err);

typedef struct {
    qc_bench_launch launch;
    void *ctx;
    uint32_t copies; /* copies of the data that ctx has */
    uint32_t least;  /* launches in a graph */
    /* Both or neither. spoil overwrites the result with something wrong; look returns QC_OK if the
     * result that is there now is right. The graph that will be timed is checked in this way before
     * the first round, and its result is looked at once more after the last one. */
    qc_status (*spoil)(void *ctx, qc_error *err);
    qc_status (*look)(void *ctx, qc_error *err);

    /* qc_bench_ready sets these. */
    uint32_t launches;
    qc_cuda_graph graph;
    double once_us; /* first measurement of a launch */

    /* qc_bench_time sets these. */
    double *us;   /* samples, in pairs: 2 * r and 2 * r + 1 are of round r */
    qc_error out; /* code not QC_OK: it failed or was wrong, and the others went on */
} qc_bench_contender;

double qc_bench_seconds_left(const qc_bench_gpu *b);
/* Returns the seconds that the rounds of the point (shape, m) may take; both are indices of the
 * request. */
double qc_bench_point_seconds(const qc_bench_gpu *b, uint32_t shape, uint32_t m);
/* Makes one launch by itself, and then a graph that is long enough to time, which is run once and
 * checked. */
QC_NODISCARD qc_status qc_bench_ready(qc_bench_gpu *b, qc_bench_contender *c, qc_error *err);
/* Returns the seconds that one round of these contenders takes. */
double qc_bench_round_seconds(qc_bench_contender *const *c, uint32_t count);
/* Times the contenders in rounds. It fails only if it was interrupted or there is no memory. What
 * happens to a single contender is in its `out`. */
QC_NODISCARD qc_status qc_bench_time(qc_bench_gpu *b, qc_bench_contender *const *c, uint32_t count,
                                     uint32_t rounds, qc_error *err);
/* Returns median and percentiles of c's samples. It sorts them, so take ratios first. */
qc_bench_spread qc_bench_us_of(qc_bench_contender *c, uint32_t rounds);
/* Sets *out to the spread of the ratios of / c, round by round. */
QC_NODISCARD qc_status qc_bench_ratio_of(qc_bench_spread *out, const qc_bench_contender *c,
                                         const qc_bench_contender *of, uint32_t rounds,
                                         qc_error *err);
/* Does all of it for a contender that is alone: makes it ready, times it, and sets *us. copies: 0
 * where it needs no copies of anything. */
QC_NODISCARD qc_status qc_bench_alone(qc_bench_gpu *b, qc_bench_contender c, qc_bench_spread *us,
                                      qc_error *err);
void qc_bench_done(qc_bench_contender *c);

/* ---- data: gpu_bench_data.c ---- */

/* Random numbers on the device: `unique` elements in a bell shape around 0 with this standard
 * deviation, repeated as often as it takes. unique is a prime or the number of all elements, so
 * that no two rows of weights are alike. dtype is F16 or BF16. host: the unique elements, or NULL;
 * free them with qc_free. */
typedef struct {
    uint16_t *host;
    void *device;
    uint64_t unique;
    qc_dtype dtype;
} qc_bench_pool;
QC_NODISCARD qc_status qc_bench_pool_make(qc_bench_gpu *b, qc_bench_pool *p, uint64_t unique,
                                          double deviation, qc_dtype dtype, qc_error *err);
/* Copies n elements to dst (device), beginning with element `first` of the pool. */
QC_NODISCARD qc_status qc_bench_pool_fill(qc_bench_gpu *b, const qc_bench_pool *p, void *dst,
                                          uint64_t n, uint64_t first, qc_error *err);
void qc_bench_pool_free(qc_bench_pool *p);
/* Copies device memory to the host and waits for it. */
QC_NODISCARD qc_status qc_bench_download(qc_bench_gpu *b, void *host, const void *device,
                                         uint64_t bytes, qc_error *err);

/* A dense weight [n, k] on the device, F16 or BF16. */
typedef struct {
    const void *values;
    qc_dtype dtype;
    uint64_t n, k;
} qc_bench_dense;

/* Weights of one scheme: `copies` times the same, at different addresses. */
typedef struct {
    qc_bench_scheme scheme;
    uint64_t bytes_each; /* device memory of one copy */
    uint32_t copies;
    void **memory; /* [copies] */
    qc_matmul_weights *w;
    qc_weights plain; /* the first, as it was before it was made ready */
} qc_bench_weights;
/* Makes the first copy: the kernels quantize a dense weight. */
QC_NODISCARD qc_status qc_bench_weights_make(qc_bench_gpu *b, qc_bench_weights *w,
                                             qc_bench_scheme scheme, const qc_bench_dense *dense,
                                             qc_error *err);
/* Makes more copies, up to `want` or as many as there is memory for, and waits for them. */
QC_NODISCARD qc_status qc_bench_weights_multiply(qc_bench_gpu *b, qc_bench_weights *w,
                                                 uint32_t want, qc_error *err);
void qc_bench_weights_free(qc_bench_weights *w);

/* ---- packed weights: gpu_bench_packed.c ---- */

/* Makes the first packed copy, of of's first. Scales that are not packed stay in of, which has to
 * outlive it. QC_ERR_UNSUPPORTED where these weights, or on this device, none can be packed. */
QC_NODISCARD qc_status qc_bench_packed_make(qc_bench_gpu *b, qc_bench_weights *packed,
                                            const qc_bench_weights *of, qc_error *err);
/* Packs of's other copies, up to `want` or as many as there is memory for, and waits for them. */
QC_NODISCARD qc_status qc_bench_packed_multiply(qc_bench_gpu *b, qc_bench_weights *packed,
                                                const qc_bench_weights *of, uint32_t want,
                                                qc_error *err);
/* Sets all but the shape of *out. The copies are packed anew while this is timed. */
QC_NODISCARD qc_status qc_bench_packed_time(qc_bench_gpu *b, const qc_bench_weights *packed,
                                            const qc_bench_weights *of, qc_bench_packing *out,
                                            qc_error *err);

/* ---- what is measured ---- */

QC_NODISCARD qc_status qc_bench_roofs(qc_bench_gpu *b, qc_error *err);   /* gpu_bench_roof.c */
QC_NODISCARD qc_status qc_bench_kernels(qc_bench_gpu *b, qc_error *err); /* gpu_bench_quant.c */
QC_NODISCARD qc_status qc_bench_matmuls(qc_bench_gpu *b, qc_error *err); /* gpu_bench_matmul.c */

/* ---- one shape on the device with its weights, x, y and the right results ---- */

#define QC_BENCH_MAX_WEIGHTS    (2u * QC_BENCH_SCHEME_COUNT)
#define QC_BENCH_MAX_CONTENDERS (1u + QC_BENCH_MAX_WEIGHTS)

typedef struct {
    qc_bench_gpu *b;
    uint32_t index, m_index; /* the point: indices of the request's shapes and of its m */
    const qc_bench_shape *shape;
    qc_dtype dtype; /* of x, y and dense weights */
    qc_matmul_path path;
    qc_bench_pool *pool, *x_pool;

    void **dense; /* [dense_copies] */
    uint32_t dense_copies;
    /* Those of the request's schemes; with its `packed` also the packed ones, in the same order. */
    qc_bench_weights weights[QC_BENCH_MAX_WEIGHTS];
    double *truth[1 + QC_BENCH_SCHEME_COUNT];     /* host, [QC_BENCH_TRUTH][n], dense first */
    double truth_norm[1 + QC_BENCH_SCHEME_COUNT]; /* of an average row */
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
    uint32_t contender; /* 0: dense; 1 + the index of its weights */
    uint32_t truth;     /* the index of what is right for it */
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

/* Returns the workspace of the candidates for every m up to w->max_m. Each needs at most
 * limit_bytes. */
uint64_t qc_bench_tune_workspace(const qc_bench_work *w, uint32_t scheme, uint64_t limit_bytes);
/* Measures the candidates of all schemes at the point and adds them to the result. */
QC_NODISCARD qc_status qc_bench_tune_point(qc_bench_work *w, qc_error *err);

#endif

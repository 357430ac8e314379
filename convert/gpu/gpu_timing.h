/* The times of launches on a GPU, and what no kernel on it can beat: for validate and for the
 * programs in bench/. For one thread. The method is in docs/bench.md. */
#ifndef QC_CONVERT_GPU_TIMING_H
#define QC_CONVERT_GPU_TIMING_H

#include "convert/validate/timing.h"
#include "kernels/cuda_device.h"
#include "kernels/matmul_plan.h"

typedef struct {
    qc_cuda_device device;
    qc_matmul *handle;
    qc_cuda_stream stream;
    qc_cuda_event begin, end;
    void *gemm_workspace; /* for qc_matmul_dense; NULL where there is too little memory for one */
} qc_timer;

/* Makes the device current. Close *t, which is all zeros before, also after a failure. */
QC_NODISCARD qc_status qc_timer_open(qc_timer *t, int device, qc_error *err);
void qc_timer_close(qc_timer *t);

/* ---- contenders ---- */

/* Puts launch number `copy` (of the rotation) on s. */
typedef qc_status (*qc_timed_launch)(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err);

typedef struct {
    qc_timed_launch launch;
    void *ctx;
    uint32_t copies; /* copies of the data that ctx has */
    uint32_t least;  /* launches in a graph */
    /* Both or neither. spoil overwrites the result with something wrong; look returns QC_OK if the
     * result that is there now is right. The graph that will be timed is checked in this way before
     * the first round, and its result is looked at once more after the last one. */
    qc_status (*spoil)(void *ctx, qc_error *err);
    qc_status (*look)(void *ctx, qc_error *err);

    /* qc_timed_ready sets these. */
    uint32_t launches;
    qc_cuda_graph graph;
    double once_us; /* first measurement of a launch */

    /* qc_timed_rounds sets these. */
    double *us;   /* samples, in pairs: 2 * r and 2 * r + 1 are of round r */
    qc_error out; /* code not QC_OK: it failed or was wrong, and the others went on */
} qc_timed;

/* Makes one launch by itself, and then a graph that is long enough to time, which is run once and
 * checked. */
QC_NODISCARD qc_status qc_timed_ready(qc_timer *t, qc_timed *c, qc_error *err);
/* Returns the seconds that one round of these contenders takes. */
double qc_timed_round_seconds(qc_timed *const *c, uint32_t count);
/* Times the contenders in rounds. It fails only if it was interrupted or there is no memory. What
 * happens to a single contender is in its `out`. */
QC_NODISCARD qc_status qc_timed_rounds(qc_timer *t, qc_timed *const *c, uint32_t count,
                                       uint32_t rounds, qc_error *err);
/* Does all of it for a contender that is alone: makes it ready, times it in so many rounds and
 * seconds at most, and sets *us. copies: 0 where it needs no copies of anything. */
QC_NODISCARD qc_status qc_timed_alone(qc_timer *t, qc_timed c, uint32_t rounds, double seconds,
                                      qc_spread *us, qc_error *err);
void qc_timed_done(qc_timed *c);

/* ---- random numbers: gpu_noise.c ---- */

/* On the device: `unique` elements in a bell shape around 0 with this standard deviation, repeated
 * as often as it takes. unique is a prime or the number of all elements, so that no two rows of
 * weights are alike. dtype is F16 or BF16. Never zeros, which are faster: they cost less power. */
typedef struct {
    uint16_t *host;
    void *device;
    uint64_t unique;
    qc_dtype dtype;
} qc_gpu_noise;
/* Free *p also after a failure. */
QC_NODISCARD qc_status qc_gpu_noise_make(qc_gpu_noise *p, uint64_t unique, double deviation,
                                         qc_dtype dtype, uint64_t seed, qc_cuda_stream s,
                                         qc_error *err);
/* Copies n elements to dst (device), beginning with element `first`. */
QC_NODISCARD qc_status qc_gpu_noise_fill(const qc_gpu_noise *p, void *dst, uint64_t n,
                                         uint64_t first, qc_cuda_stream s, qc_error *err);
void qc_gpu_noise_free(qc_gpu_noise *p);

/* ---- the roof: gpu_roof.c ---- */

/* Measures *roof, each part of it in so many rounds and seconds at most. dtype: of cuBLAS's
 * product, F16 or BF16. */
QC_NODISCARD qc_status qc_gpu_roof_measure(qc_timer *t, qc_dtype dtype, uint32_t rounds,
                                           double seconds, qc_gpu_roof *roof, qc_error *err);

#endif

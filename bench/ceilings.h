/* Ceilings: kernels that do one thing as fast as a GPU can, so that others have something to be
 * judged by. bench_ceilings.c times them, tests/kernels/kernel_ceilings.c shows that they do what
 * they say, docs/bench.md explains the figures.
 *
 *   ceilings_memory.cu   read and copy with so many bytes under way per multiprocessor
 *   ceilings_rates.cu    one instruction over and over
 *   ceilings_decode.cu   ways from NF4 and int8 codes to float16 pairs, without memory traffic
 *   ceilings_launch.cu   kernels that do nothing
 *
 * Threads: any; kernels run on the current device. Nothing allocates or waits. */
#ifndef QC_BENCH_CEILINGS_H
#define QC_BENCH_CEILINGS_H

#include "kernels/cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* When and where a thread block ran; the clocks are the multiprocessor's own. */
typedef struct {
    uint64_t clock_begin, clock_end;
    uint64_t ns_begin, ns_end;
    uint64_t multiprocessor;
} qc_ceiling_span;

/* ---- memory ---------------------------------------------------------------------------------- */

typedef enum {
    QC_CEILING_COPY,          /* 16 bytes a lane, read and written, 512 in a row per warp */
    QC_CEILING_READ,          /* the same, read only: register look-ahead */
    QC_CEILING_RING,          /* cp.async, 16 bytes a lane, to a ring in shared memory (sm_80) */
    QC_CEILING_FRAGMENT_16,   /* 16 bytes a lane: 8 rows x 64 bytes per warp and load */
    QC_CEILING_FRAGMENT_8,    /* 8 bytes a lane: 8 rows x 32 bytes */
    QC_CEILING_FRAGMENT_8_L2, /* the same, L2 told to fetch 128 bytes (sm_80) */
    QC_CEILING_BULK,          /* cp.async.bulk, 2048 bytes a warp, to a ring (sm_90, CUDA 12) */
    QC_CEILING_ACCESS_COUNT
} qc_ceiling_access;

#define QC_CEILING_MEMORY_THREADS 128u
#define QC_CEILING_ROW_BYTES      4096u /* of a weight's row, for FRAGMENT_*: K = 8192 of NF4 */

const char *qc_ceiling_access_name(qc_ceiling_access a);
/* The least compute capability, times ten; where the build has no such kernel, more than any GPU
 * has. */
unsigned qc_ceiling_access_sm(qc_ceiling_access a);
unsigned qc_ceiling_access_bytes(qc_ceiling_access a); /* of a lane in one load */

typedef struct {
    qc_ceiling_access access;
    unsigned unroll; /* loads under way per thread (BULK: per warp): 1, 2, 4 or 8 */
    unsigned blocks; /* of QC_CEILING_MEMORY_THREADS, on all multiprocessors together */
    const void *in;
    uint64_t bytes; /* of in */
    unsigned passes;
    void *copy;     /* QC_CEILING_COPY: as many bytes */
    uint32_t *sums; /* per thread: exclusive or of the words it read, once per pass */
} qc_ceiling_memory;

/* How many bytes of `in` one pass reads: the most that all threads share evenly. 0: too few. */
uint64_t qc_ceiling_memory_bytes(const qc_ceiling_memory *m);
/* How many thread blocks run at once on a multiprocessor. */
QC_NODISCARD qc_status qc_ceiling_memory_fits(unsigned *blocks, qc_ceiling_access a,
                                              unsigned unroll, qc_error *err);
QC_NODISCARD qc_status qc_ceiling_memory_run(const qc_ceiling_memory *m, qc_cuda_stream s,
                                             qc_error *err);

/* Word i becomes qc_ceiling_hash(i). bytes: a multiple of 4. */
QC_NODISCARD qc_status qc_ceiling_fill(uint32_t *words, uint64_t bytes, qc_cuda_stream s,
                                       qc_error *err);

/* ---- computing ------------------------------------------------------------------------------- */

#define QC_CEILING_THREADS 512u /* of a thread block */
#define QC_CEILING_STEPS   4u   /* steps are done in fours */

typedef struct {
    unsigned blocks, steps; /* steps: a multiple of QC_CEILING_STEPS */
    uint32_t *out;          /* 4 words per thread */
    qc_ceiling_span *spans; /* per thread block */
} qc_ceiling_run;

typedef struct {
    const char *name;
    const char *unit;     /* of work */
    unsigned sm, sm_most; /* least and largest compute capability times ten */
    double work;          /* of a thread in one step */
    unsigned shared_bytes;
    qc_status (*fits)(unsigned *blocks, qc_error *err); /* at once on a multiprocessor; 0: none */
    qc_status (*run)(const qc_ceiling_run *r, qc_cuda_stream s, qc_error *err);
} qc_ceiling_kernel;

/* A step of a rate is 16 instructions in 8 chains; 4 matrix products in 4, or of m8n8k4 2 in 2. */
const qc_ceiling_kernel *qc_ceiling_rates(unsigned *count);

#define QC_CEILING_ANY 999u

/* A step of a scheme is 32 weights: words j of 4 (int8: 8) of thread t (counted over all blocks)
 * begin as qc_ceiling_hash(t * words + j) and become qc_ceiling_next() of themselves after each
 * step. Byte i of a word is a pair: its high nibble the lower half's code, the low nibble the upper
 * one's. Int8: bytes 0 and 1 are a pair, and 2 and 3.
 *
 * Without a matrix product: out = exclusive ors {of all pairs; 0, 0, 0}; "float pairs": {of lower
 * values, of upper ones; 0, 0}.
 * " mma": a word of NF4 (two of int8) is a lane's fragment of A of mma.m16n8k16, pairs in order; B
 * is qc_ceiling_x(lane); out = 4 floats, the sums over steps of scale times the step's product,
 * scale being qc_ceiling_scale(row of the fragment).
 * " mma 884": two pairs are a lane's fragment of B of mma.m8n8k4, A is qc_ceiling_x(lane), the
 * scale that of the column; out[i] = element i of D and element i + 4. */
const qc_ceiling_kernel *qc_ceiling_decodes(unsigned *count);

#ifdef __CUDACC__
#define QC_CEILING_BOTH static __host__ __device__ __forceinline__
#else
#define QC_CEILING_BOTH static inline
#endif

QC_CEILING_BOTH uint32_t qc_ceiling_hash(uint32_t i)
{
    i ^= i >> 16;
    i *= 0x7feb352du;
    i ^= i >> 15;
    i *= 0x846ca68bu;
    return i ^ i >> 16;
}

/* One multiplication and addition, off the pipe that decodes. */
QC_CEILING_BOTH uint32_t qc_ceiling_next(uint32_t w)
{
    return w * 1664525u + 1013904223u;
}

/* Element e of 4 of a lane's fragment of x: a multiple of 1/4 up to 1. */
QC_CEILING_BOTH float qc_ceiling_x(unsigned lane, unsigned e)
{
    return (float)((int)((lane * 5 + e * 3) % 9) - 4) * 0.25f;
}

QC_CEILING_BOTH float qc_ceiling_scale(unsigned row)
{
    return 0.5f + (float)row * 0.0625f;
}

/* ---- launches -------------------------------------------------------------------------------- */

/* A kernel that does nothing, or that writes when it began and ended (first thread) to ns[2].
 * early: with programmatic dependent launch (sm_90): it may begin before the previous one has
 * ended, waits for it, then takes the time. QC_ERR_UNSUPPORTED where the build has none. */
QC_NODISCARD qc_status qc_ceiling_nothing(unsigned blocks, unsigned threads, uint64_t *ns,
                                          int early, qc_cuda_stream s, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif

/* How times of GPU kernels are taken: everything about it that needs no GPU. gpu_timing.h takes
 * them, for validate and for the programs in bench/; docs/bench.md describes the method.
 *
 * Times are in microseconds per launch, and rates are decimal. */
#ifndef QC_CONVERT_TIMING_H
#define QC_CONVERT_TIMING_H

#include "base/status.h"

/* With samples == 0 it was not measured. */
typedef struct {
    double median, p10, p90;
    uint32_t samples;
} qc_spread;

/* The median and the tenth and ninetieth percentiles (linear between ranks). It sorts the
 * samples. */
qc_spread qc_spread_of(double *samples, uint32_t count);
/* Turns each value into scale / value, which swaps the ends. */
qc_spread qc_spread_rate(qc_spread s, double scale);

/* How many copies of a weight there are. What the launches read of them (read_each per copy) is
 * together more than four times the L2 cache. There are at least 2 and at most 256 copies, and no
 * more than fit into limit_bytes at held_each per copy (but never 0). A repacked weight holds its
 * codes twice, and they are read once. */
uint32_t qc_timing_copies(uint64_t read_each, uint64_t held_each, uint64_t l2_bytes,
                          uint64_t limit_bytes);
/* How many launches a graph has: a multiple of copies, at least `least`, and enough to take min_us
 * together at `us` each, but not more than 2048 (rounded up to a whole number of turns). */
uint32_t qc_timing_launches(uint32_t copies, uint32_t least, double us, double min_us);
/* Whose turn it is at a step (0 .. 2 * contenders - 1) of a round. One round is A B C C B A, and
 * the next C B A A B C. */
uint32_t qc_timing_turn(uint32_t round, uint32_t step, uint32_t contenders);
/* How many rounds there are: as many as fit into the time, at most `wanted`, at least 2. */
uint32_t qc_timing_rounds(uint32_t wanted, double round_seconds, double seconds);

/* What no kernel on the device can beat. */
typedef struct {
    uint64_t copy_bytes;                   /* bytes that a copy reads; it writes as many */
    qc_spread copy_gbps;                   /* by CUDA's own copy */
    qc_spread kernel_copy_gbps, read_gbps; /* by kernels of ours */
    uint64_t gemm_size;                    /* M = N = K; 0: not measured */
    qc_spread gemm_tflops;                 /* by cuBLAS */
} qc_gpu_roof;

/* What a product has to move: weights (of so many bytes), and x and y in 16 bits. */
uint64_t qc_product_bytes(uint64_t weight_bytes, uint64_t m, uint64_t n, uint64_t k);
double qc_product_flops(uint64_t m, uint64_t n, uint64_t k);
/* The best that was measured: of the two copies; of these and the read. 0 without any. */
double qc_roof_copy_gbps(const qc_gpu_roof *roof);
double qc_roof_memory_gbps(const qc_gpu_roof *roof);
/* The time that no implementation can beat on this device: the longer of moving `bytes` at the
 * best measured rate of memory and computing `flops` at the measured rate of cuBLAS. */
double qc_roof_floor_us(const qc_gpu_roof *roof, uint64_t bytes, double flops);

#endif

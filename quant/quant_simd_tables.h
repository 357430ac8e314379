/* Search tables of the vector files, computed once per process from qc_nf4_threshold and
 * qc_dynamic_search. Each maps a bucket to the code at its lower end and to the place of the one
 * threshold that it may hold, so that "look up and add" carries into the code exactly where the
 * exact comparison would. If a table cannot be built this way, that is a bug; the tests try every
 * float that can meet a bucket's edge.
 *
 * Float -> NF4: k = y * 15 rounded to an integer, -15 .. 15 modulo 32; code = nf4_base[k] + (y >
 * nf4_threshold[k]).
 *
 * Float -> dynamic map: k = sign | (exponent and 6 mantissa bits of |x|, from 2^-22 on); (nested[k]
 * + lower 17 bits) >> 17 is the code, complemented where x is negative.
 *
 * Thread-safe: yes, built under pthread_once. */
#ifndef QC_QUANT_QUANT_SIMD_TABLES_H
#define QC_QUANT_QUANT_SIMD_TABLES_H

#include <stdint.h>

#define QC_NF4_BUCKETS  15.0f
#define QC_NESTED_SHIFT 17
#define QC_NESTED_FIRST ((127u - 22u) << 6)
#define QC_NESTED_KEYS  2048u
#define QC_NESTED_LOW   0x1ffffu

typedef struct {
    _Alignas(64) float nf4_threshold[32];
    _Alignas(64) int32_t nf4_base[32];
    _Alignas(64) uint32_t nested[2 * QC_NESTED_KEYS];
} qc_simd_tables;

const qc_simd_tables *qc_simd_tables_get(void);

#endif

/* Search tables of the vector files, computed once per process from qc_nf4_threshold and
 * qc_dynamic_search. Each maps a bucket to the code at its lower end and to the place of the one
 * threshold that it may hold, so that "look up and add" carries into the code exactly where the
 * exact comparison would. If a table cannot be built this way, that is a bug; the tests try every
 * float that can meet a bucket's edge.
 *
 * bf16 -> NF4, in 16-bit integers, without a float: let m be the 7 mantissa bits of the block's
 * absmax. If absmax grows by a power of two and x with it, every y = x * (1 / absmax) stays the
 * same as long as nothing is subnormal. Hence the code is a function of the sign, of m and of the
 * distance between the patterns of |x| and absmax. With base = pattern of absmax - QC_NF4_DOWN:
 *
 *     s = saturating signed (max(x, base) - base), the maximum unsigned: what |x| is above base, or
 *         0; and for x < 0, whose patterns are 0x8000 more and saturate there, 0x8000 more
 *     k = high half of the signed product s * QC_NF4_SCALE, modulo 32: bucket of 50 patterns, 0 to
 *         13, and 16 more for x < 0
 *     field = upper byte of s + nf4_bf16[m][k]: code, or 31 - code for x < 0, so that it rises
 *
 * Everything below base (2^-5.1 of absmax) has code 7. All m were tried to find that no bucket
 * holds two thresholds: with this scale a distance from 649 to 664 works; with a shift by 6 instead
 * of the product none does.
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

#define QC_NF4_DOWN     656
#define QC_NF4_SCALE    1312 /* half of it is 16 modulo 32 */
#define QC_NF4_BUCKETS  15.0f
#define QC_NESTED_SHIFT 17
#define QC_NESTED_FIRST ((127u - 22u) << 6)
#define QC_NESTED_KEYS  2048u
#define QC_NESTED_LOW   0x1ffffu

typedef struct {
    _Alignas(64) uint16_t nf4_bf16[128][32];
    _Alignas(64) float nf4_value[32];  /* of a field */
    _Alignas(64) uint8_t nf4_code[64]; /* of a field; twice */
    _Alignas(64) float nf4_threshold[32];
    _Alignas(64) int32_t nf4_base[32];
    _Alignas(64) uint32_t nested[2 * QC_NESTED_KEYS];
} qc_simd_tables;

const qc_simd_tables *qc_simd_tables_get(void);

#endif

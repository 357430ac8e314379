/* Byte tables of the AVX2 files. vpshufb is the only lookup that AVX2 has for 32 indices at once,
 * so a table has at most 16 bytes, and everything is cut to fit:
 *
 * Buckets are signed, -16 .. 15, and two tables serve them: one for k >= 0, whose index has its top
 * bit clear, and one for k < 0, indexed with that bit flipped. vpshufb gives 0 where the top bit is
 * set, so an "or" of both lookups is the entry, which is number k & 15 of its table.
 *
 * bf16 -> NF4 in integers, without a float. If absmax grows by a power of two and x with it, every
 * y = x * (1 / absmax) stays the same as long as nothing is subnormal. So the code is a function of
 * the sign, of m, the mantissa of absmax, and of the distance of bit patterns, with a bucket that
 * fills a byte:
 *
 *     s = +-(max(|x|, base) - base)    base = pattern of absmax - QC_AVX2_DOWN
 *     p = s * 5                        high byte: bucket k, -15 .. 14; low byte: place within it
 *     code = base_code[m][k] + (place > last[m][k]), unsigned
 *
 * A bucket has 51.2 patterns. All m were tried: this width works with a distance from 714 to 728
 * (and around 670 and 770), a width of 64 with none. last is stored with its top bit flipped, for
 * signed compares.
 *
 * Float -> NF4: k = y * QC_NF4_BUCKETS rounded to an integer; a = nf4_base[k] is the code or one
 * less; code = a + (y > threshold[a]), threshold[15] infinite. An edge of a bucket is at least
 * 0.019 buckets away from a threshold, so the rounding of the product does not matter.
 *
 * 16 floats are four tables, one for each byte. All rows of 32 bytes hold 16 bytes twice.
 *
 * Thread-safe: yes, built under pthread_once. */
#ifndef QC_QUANT_QUANT_AVX2_TABLES_H
#define QC_QUANT_QUANT_AVX2_TABLES_H

#include <stdint.h>

#define QC_AVX2_DOWN  720
#define QC_AVX2_SCALE 5

typedef struct {
    uint8_t base_code[2][16]; /* [k < 0] */
    uint8_t last[2][16];
} qc_avx2_bf16_tables;

typedef struct {
    _Alignas(64) qc_avx2_bf16_tables bf16[128];
    _Alignas(32) int16_t scale[16];       /* a variable: compilers turn a constant into a shift
                                             and an addition */
    _Alignas(32) uint8_t nf4_base[2][32]; /* [k < 0] */
    _Alignas(32) uint8_t nf4_threshold[4][32];
    _Alignas(32) uint8_t nf4_code[4][32];
} qc_avx2_tables;

const qc_avx2_tables *qc_avx2_tables_get(void);

#endif

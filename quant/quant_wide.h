/* Sixteen lanes of a vector, in one register of AVX-512 or two of AVX2. Code that uses these
 * functions is written once and gives the same bits on both; a file that includes this header is
 * compiled for one of the two. quant_avx2_internal.h has a few more.
 *
 *   qc_wide_all, qc_wide_int_all      the same number in all lanes
 *   qc_wide_load, qc_wide_store       floats, at any address
 *   qc_wide_read                      elements i .. i + 15 of a source, as floats
 *   qc_wide_add, _sub, _mul, _fma    fma: a * b + c with one rounding
 *   qc_wide_between                   clamped; no lane is NaN
 *   qc_wide_larger, qc_wide_largest   maximum with |x| where no lane is NaN; the largest lane
 *   qc_wide_larger_bits, ..._bits     the same for the bits of |x|, where NaN is the largest
 *   qc_wide_fold                      the sum of the lanes, in the order of qc_fold16
 *   qc_wide_fold_store, _fold16       the same for sixteen rows, or by another qc_fold_op: rows
 *                                     are stored one by one, and lane r is what row r leaves
 *   qc_wide_bits, qc_wide_of_bits     floats as their bits, and back
 *   qc_wide_round_even                to the nearest integer, half to even, as a float
 *   qc_wide_round, qc_wide_of_int     to the nearest integer, half to even; and back
 *   qc_wide_store_words               integers that fit, as 16 bits
 *   qc_wide_store_biased              the same plus a bias, as 8 bits
 *   qc_wide_store_nibbles             32 integers plus bias, 0 .. 15 then, as nibbles in order: the
 *                                     first of a byte is the low or the high one */
#ifndef QC_QUANT_QUANT_WIDE_H
#define QC_QUANT_QUANT_WIDE_H

#if defined(__AVX512F__)
#include "quant/quant_avx512_internal.h"
#else
#include "quant/quant_avx2_internal.h"
#endif

#endif

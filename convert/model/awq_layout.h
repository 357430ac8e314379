/* The order in which AWQ ("gemm") has a weight [out, in] of 4 bits, and that in which it is made.
 *
 *   made      group by group of the inputs, of each group row by row: codes of `block` inputs, two
 *             in a byte, the low half first. Scales in this order are AWQ's [in / block, out].
 *   qweight   input by input, words of 32 bits that hold the codes of 8 rows, in the order
 *             0 2 4 6 1 3 5 7 from the lowest 4 bits on: [in, out / 8]
 *
 * So a group is a range of bytes in both, and a piece of qweight, whole groups, is made of a range
 * of elements. */
#ifndef QC_CONVERT_AWQ_LAYOUT_H
#define QC_CONVERT_AWQ_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

#define QC_AWQ_ROWS 8u /* in one word */
/* The row, of the 8 in a word, whose code lies in each 4 bits, from the lowest on. */
extern const uint8_t qc_awq_row[QC_AWQ_ROWS];
#define QC_AWQ_ZEROS 0x88u /* a byte of zero points of 8, which code 0 of int4 has */

/* Turns `bytes` bytes of codes, whole groups of `rows` rows, from the order in which they are made
 * to qweight's, or back. rows is a multiple of 8, block one of 2. */
void qc_awq_pack(const unsigned char *made, uint64_t rows, uint64_t block, size_t bytes,
                 unsigned char *qweight);
void qc_awq_unpack(const unsigned char *qweight, uint64_t rows, uint64_t block, size_t bytes,
                   unsigned char *made);

/* Returns the element of [rows, cols] that is made as number `made`. */
static inline uint64_t qc_awq_element(uint64_t rows, uint64_t cols, uint64_t block, uint64_t made)
{
    return made / block % rows * cols + made / block / rows * block + made % block;
}

#endif

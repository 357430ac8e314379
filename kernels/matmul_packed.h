/* For kernels/ only: where the codes and scales of a packed weight lie (qc_matmul_pack).
 *
 * A weight is cut into bands of 64 rows, and a band into blocks of 64 columns. The blocks of a
 * band lie in the order of k, 2,048 bytes each of NF4 and 4,096 of int8, and the bands lie behind
 * each other. Rows that the last band lacks are zeros. A block has four units of 16 rows, each as
 * the 32 lanes of a warp load it as the operand A of mma.m16n8k16 and wgmma, 16 bytes a lane
 * (g = lane / 4, t = lane % 4):
 *
 *     NF4   512 bytes     lane: codes 16 t .. 16 t + 15 of row g, then those of row g + 8
 *     int8  512 bytes     lane: codes 16 t .. 16 t + 15 of row g
 *           512 bytes           the same of row g + 8
 *
 * So a load of a warp is 512 bytes in a row, and a tile of 64 rows and any k is one range of
 * memory.
 *
 * The codes of nested scales follow the weight's codes if four blocks of a row can be read at once
 * (qc_packed_has_scales). For each band and each four blocks there are 256 bytes: four for each
 * row, in the order of k, and the rows in the order of a unit's fragments, g and g + 8 side by side
 * (QC_PACKED_ROW). All other scales stay where they are.
 */
#ifndef QC_KERNELS_MATMUL_PACKED_H
#define QC_KERNELS_MATMUL_PACKED_H

#include "kernels/matmul_kernels.h"

QC_C_BEGIN

#define QC_PACKED_ROWS   64u /* of a band */
#define QC_PACKED_COLS   64u /* of a block */
#define QC_PACKED_UNIT   16u /* rows */
#define QC_PACKED_SCALES 4u  /* blocks of a row whose codes of scales lie side by side */

/* Bytes of a block of codes of `bits` each, and of the codes of scales of a band's four blocks. */
#define QC_PACKED_BLOCK_BYTES(bits) (QC_PACKED_ROWS * QC_PACKED_COLS * (bits) / 8u)
#define QC_PACKED_SCALE_BYTES       (QC_PACKED_ROWS * QC_PACKED_SCALES)

/* The place of row `row` of a band among the codes of scales. */
#define QC_PACKED_ROW(row) (((row)&48u) | ((row)&7u) << 1 | ((row) >> 3 & 1u))

/* Returns whether the weight can be packed: columns that 64 divides, a scale per row or blocks of
 * 64 or more, and not of compressed-tensors. */
int qc_packed_takes(const qc_weights *w);

/* Returns whether its codes of scales are packed as well: nested ones in blocks of 64, columns that
 * 256 divides, and four blocks of a row always in one group. */
int qc_packed_has_scales(const qc_weights *w);

/* Bytes of packed codes, which 2,048 divides; the codes of scales follow. UINT64_MAX where it
 * overflows. */
uint64_t qc_packed_code_bytes(const qc_weights *w);
uint64_t qc_packed_scale_bytes(const qc_weights *w);

/* The addresses from which kernels count in a packed weight or a slice of it: of the first block of
 * codes, and of the first codes of scales. The next band is `qc_packed_band` blocks behind. */
static inline const unsigned char *qc_packed_codes(const qc_matmul_weights *m)
{
    const uint64_t blocks = m->w.form.cols / QC_PACKED_COLS;
    return (const unsigned char *)m->w.codes +
           (m->part.row / QC_PACKED_ROWS * blocks + m->part.col / QC_PACKED_COLS) *
               QC_PACKED_BLOCK_BYTES(m->w.form.ops->bits);
}

static inline const uint8_t *qc_packed_scales(const qc_matmul_weights *m)
{
    const uint64_t cols = QC_PACKED_COLS * QC_PACKED_SCALES;
    return m->w.absmax_codes +
           (m->part.row / QC_PACKED_ROWS * (m->w.form.cols / cols) + m->part.col / cols) *
               QC_PACKED_SCALE_BYTES;
}

/* Packs the codes of w, and with scales its codes of scales, or the other way around. `packed` has
 * the bytes that qc_packed_code_bytes and qc_packed_scale_bytes say. */
QC_NODISCARD qc_status qc_matmul_pack_launch(const qc_weights *w, void *packed, qc_cuda_stream s,
                                             qc_error *err);
QC_NODISCARD qc_status qc_matmul_unpack_launch(const qc_weights *w, const void *packed, void *codes,
                                               uint8_t *absmax_codes, qc_cuda_stream s,
                                               qc_error *err);

QC_C_END
#endif

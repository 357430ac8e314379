/* How the tensor-core kernels decode: NF4 codes as pairs of float16 from a table in shared memory,
 * and scales that are applied after the product.
 *
 * A byte of two codes becomes one register of a matrix fragment: table[byte] = (code value of the
 * high nibble, of the low nibble), with the element of even k in the low half. Each lane has a copy
 * of its own, so that the 32 lanes of a load never meet in a bank. That takes one wavefront for 64
 * weights, where one copy for all would take 3.2 (256 entries, 32 random lanes) and 64-bit pairs of
 * floats would take two.
 *
 *   wide    64 KB: rows of 256 bytes, 32 copies and a gap. The byte of codes is byte 1 of the
 *           address and the lane byte 0: one PRMT
 *   narrow  32 KB: rows of 128 bytes. A shift and a LOP3
 *
 * The fragments are code values, not weights. A block's scale is multiplied into the float sum over
 * the block (a product of exact factors, with one rounding in float). So neither a weight nor its
 * scale is ever rounded to float16, and no scale is too large or too small for it. What is rounded
 * is the code value, to the 11 bits of float16. NF4's code values are multiplied by
 * QC_NF4_HALF_SCALE before, and the scale is divided by it. Of all floats in [1, 2) this is the one
 * with which the 16 rounded values are nearest, in least squares. Their errors are then 6.2e-5 of
 * the codes' root mean square, and 2^-11.7 of any value at most; weights rounded to float16 one by
 * one have 2.1e-4 and 2^-11 (tests/unit/quant/unit_code_scale.c). Other maps are taken as they
 * are. */
#ifndef QC_KERNELS_MATMUL_CODES_CUH
#define QC_KERNELS_MATMUL_CODES_CUH

#include "kernels/matmul_run.cuh"

typedef struct alignas(128) {
    uint32_t pair[256][64]; /* [byte of codes][lane], 32 .. 63 unused */
} qc_codes_wide;

typedef struct alignas(128) {
    uint32_t pair[256][32];
} qc_codes_narrow;

/* Returns what the sum over a block is multiplied by besides the block's scale. */
QC_DEVICE float qc_codes_factor(const qc_run_source &s)
{
    return s.code_map ? 1.0f : QC_NF4_HALF_SCALE_INVERSE;
}

/* All threads of the block call this, after `small` was filled (qc_run_fill_small and a barrier).
 * The barrier behind it is left to the caller. */
template <typename Table>
QC_DEVICE void qc_codes_fill(Table &t, const qc_run_small &small, const qc_run_source &s,
                             unsigned thread, unsigned threads)
{
    float by = s.code_map ? 1.0f : QC_NF4_HALF_SCALE;
    for (unsigned i = thread; i < 256 * 8; i += threads) {
        unsigned byte = i / 8;
        uint32_t two = qc_half2_of_floats(__fmul_rn(small.codes[byte >> 4], by),
                                          __fmul_rn(small.codes[byte & 15u], by));
        uint4 four = {two, two, two, two};
        *reinterpret_cast<uint4 *>(&t.pair[byte][i % 8 * 4]) = four;
    }
}

/* Looks up the codes of byte b of q, where b is a constant after unrolling. */
QC_DEVICE uint32_t qc_codes_look(const qc_codes_wide &t, unsigned lane, uint32_t q, int b)
{
    const unsigned char *p = reinterpret_cast<const unsigned char *>(t.pair);
    return *reinterpret_cast<const uint32_t *>(
        p + __byte_perm(q, lane * 4, 0x5504u | (unsigned)b << 4));
}

QC_DEVICE uint32_t qc_codes_look(const qc_codes_narrow &t, unsigned lane, uint32_t q, int b)
{
    const unsigned char *p = reinterpret_cast<const unsigned char *>(t.pair);
    return *reinterpret_cast<const uint32_t *>(p + qc_run_row(q, 8 * b, 0x7f80u, lane * 4));
}

/* The same for a wide table whose address is a multiple of 64 KB; `lane_address` is that plus
 * 4 * lane. The byte of codes and the lane's offset are then the two low bytes of the address
 * itself, and nothing has to be added. Otherwise compilers add the start of shared memory, where
 * that is not 0 (sm_90). */
QC_DEVICE uint32_t qc_codes_look_fixed(uint32_t lane_address, uint32_t q, int b)
{
    return qc_ld_shared_4(__byte_perm(q, lane_address, 0x7604u | (unsigned)b << 4));
}

/* Turns four int8 into two registers of a fragment, exactly: 0x64 above a byte of value u (the code
 * plus 128) is the float16 1024 + u. */
QC_DEVICE void qc_codes_int8(uint32_t out[2], uint32_t q)
{
    q ^= 0x80808080u;
    out[0] = qc_half2_sub(__byte_perm(q, 0x64646464u, 0x4140u), 0x64806480u);
    out[1] = qc_half2_sub(__byte_perm(q, 0x64646464u, 0x4342u), 0x64806480u);
}

#endif

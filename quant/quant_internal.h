/* Shared by the implementations of qc_quant_ops; not for callers.
 *
 * Words on order, beyond those in quant_ops.h, that every table obeys so that sums are equal:
 *
 * Block sums (nf4_quantize, int8_blocks_quantize): 16 float lanes each for rr, rc and cc, zero at
 * the start of a block. Element i of the block goes to lane (i / 2) % 16, in increasing i:
 *     y = x * inv, r = y - c, rr = fmaf(r, r, rr), rc = fmaf(r, c, rc), cc = fmaf(c, c, cc)
 * with inv = 1.0f / absmax and c the NF4 code's value, or (float)code * QC_INT8_STEP. Lanes are
 * folded as qc_fold16 does. Then, block after block, in double, left to right:
 *     a2 = absmax * absmax,  sum_ee += rr * a2,  sum_xx += ((rr + 2 * rc) + cc) * a2
 *
 * Row sums (int8_rows_quantize): e = x - ((float)code * scb) * QC_INT8_STEP in float; lane i % 16
 * of two sets of 16: ee = fmaf(e, e, ee), xx = fmaf(x, x, xx). After every QC_ROW_FLUSH columns
 * and at the end of a row both are folded, added to the double sums and zeroed.
 *
 * Tiny blocks: where absmax < QC_TINY_ABSMAX, the elements and absmax are first multiplied by
 * QC_TINY_SCALE, which is exact; 1.0f / absmax (times 127) is then finite. Where it was finite
 * before, nothing changes, so any threshold between 127 * 2^-128 and 1 gives the same bits. */
#ifndef QC_QUANT_QUANT_INTERNAL_H
#define QC_QUANT_QUANT_INTERNAL_H

#include "base/checked.h"
#include "quant/quant_ops.h"

#define QC_TINY_ABSMAX  0x1p-100f
#define QC_TINY_SCALE   0x1p64f
#define QC_LANES        16u
#define QC_ROW_FLUSH    1024u
#define QC_BLOCK_MAX    4096u
#define QC_INT8_STEP    7.874015718698502e-3f /* 1/127 rounded to float */
#define QC_NF4_ZERO     7u                    /* the code whose value is 0 */
#define QC_DYNAMIC_ZERO 127u                  /* the entry of qc_dynamic_map that is 0 */

/* The search of the dynamic map as one sorted table: code > j exactly when x > threshold[j], so the
 * code is the number of thresholds strictly below x. It equals the pivot search of bitsandbytes'
 * CUDA kernel for every float, ties included. */
extern const float qc_dynamic_threshold[255];

extern const qc_quant_ops qc_quant_ops_scalar;
extern const qc_quant_ops qc_quant_ops_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_quant_ops qc_quant_ops_avx512; /* where QC_HAVE_QUANT_AVX512 */

/* The table `name` for an instruction set. One that was not built falls back to the next lesser
 * one; a table's member `isa` says which it is. */
#if defined(QC_HAVE_QUANT_AVX512)
#define QC_TABLE_FOR(isa, name)                                                                    \
    ((isa) == QC_ISA_AVX512 ? &name##_avx512 : (isa) == QC_ISA_AVX2 ? &name##_avx2 : &name##_scalar)
#elif defined(QC_HAVE_QUANT_AVX2)
#define QC_TABLE_FOR(isa, name)                                                                    \
    ((isa) == QC_ISA_AVX512 || (isa) == QC_ISA_AVX2 ? &name##_avx2 : &name##_scalar)
#else
#define QC_TABLE_FOR(isa, name) ((void)(isa), &name##_scalar)
#endif

/* Return the lowest and the highest code of an integer. */
static inline int qc_int_lowest(const qc_int_codes *how)
{
    return how->bits == 8 ? -127 : -(1 << (how->bits - 1));
}

static inline int qc_int_highest(const qc_int_codes *how)
{
    return (1 << (how->bits - 1)) - 1;
}

/* Returns what absmax is divided by to make a scale: see qc_int_scale. */
static inline float qc_int_divisor(const qc_int_codes *how)
{
    return how->bits == 8 ? 127.0f : (float)(1 << (how->bits - 1)) - 0.5f;
}

/* Returns the bytes from a group's codes to the next group's. */
static inline uint64_t qc_int_stride(const qc_int_codes *how, uint64_t group)
{
    return how->stride ? how->stride : qc_code_bytes(how->bits, group);
}

/* Return the least and the largest magnitude of an integer's scale: see qc_int_round_scale. */
static inline float qc_int_scale_least(qc_dtype scale_dtype)
{
    return scale_dtype == QC_DTYPE_F16 ? 0x1p-24f : 0x1p-126f;
}

static inline float qc_int_scale_most(qc_dtype scale_dtype)
{
    return scale_dtype == QC_DTYPE_F16 ? 65504.0f : 0x1.fep120f;
}

/* These are the scalar functions, for tables that have none of their own. */
void qc_int_quantize_scalar(const qc_int_codes *how, const void *src, qc_dtype dtype, uint64_t n,
                            uint64_t group, void *codes, float *scales, qc_piece_sums *sums);
void qc_int_dequantize_scalar(const qc_int_codes *how, const void *codes, const float *scales,
                              uint64_t n, uint64_t group, void *dst, qc_dtype dst_dtype,
                              uint64_t *first_overflow);

/* Finds the largest magnitude of x, which are n elements of src from `first` on, as floats or as
 * float16. Returns 1, or 0 after reporting the first one that is not finite. */
int qc_find_absmax(const float *x, uint32_t n, const void *src, qc_dtype dtype, uint64_t first,
                   float *absmax, qc_piece_sums *sums);

/* Rounds half to even where |x| < 2^22: the ulp of 1.5 * 2^23 is 1. */
static inline float qc_round_even(float x)
{
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

static inline unsigned qc_nf4_code_of(float y)
{
    unsigned code = 0;
    for (unsigned t = 0; t < 15; t++)
        code += y > qc_nf4_threshold[t];
    return code;
}

/* Returns a bound that no |x - x'| of a block exceeds whose codes were made with absmax and are
 * read with absmax_final. A block of zeros is restored exactly. */
double qc_block_error_bound(float absmax, float absmax_final, const qc_block_error *error);
/* Returns what the other scale adds to the block's sum (x - x')^2. */
double qc_block_error_moved(float absmax, float absmax_final, const qc_block_error *error);

/* Does the pivot search itself, as bitsandbytes' dQuantize<0> does; x must not be NaN. */
uint8_t qc_dynamic_search(float x);

/* Returns the bytes of an element of the four types that the quantizers read. It is inline, so that
 * it folds to a constant. */
static inline uint64_t qc_element_bytes(qc_dtype dtype)
{
    return dtype == QC_DTYPE_F64 ? 8 : dtype == QC_DTYPE_F32 ? 4 : 2;
}

/* Returns the sum of 16 lanes: l and l + 8 are added first, then l + 4, l + 2 and l + 1. */
static inline float qc_fold16(const float *lanes)
{
    float s[8];
    for (unsigned l = 0; l < 8; l++)
        s[l] = lanes[l] + lanes[l + 8];
    for (unsigned l = 0; l < 4; l++)
        s[l] += s[l + 4];
    for (unsigned l = 0; l < 2; l++)
        s[l] += s[l + 2];
    return s[0] + s[1];
}

#endif

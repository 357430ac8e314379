/* Shared by the tables of the integer products of cpu_matmul.h; not for callers.
 *
 * A group of 64 elements is four vectors of 16 positions, which x and codes have in the same order:
 *
 *   codes of 8 bits   position p of vector v is element 16 v + p. Codes of 2, 3, 5, 6 and 7 bits
 *                     are parted to bytes, a group at a time
 *   codes of 4 bits   vectors 0 and 1 are upper halves of bytes, 2 and 3 lower ones; position p is
 *                     that of byte 8 (v % 2) + p % 8 + 16 (p / 8)
 *
 * Position p of each vector is in lane p / 2 of 8, so that of codes of 4 bits lanes 0 to 3 have
 * elements 0 to 31 and lanes 4 to 7 the others.
 *
 * Lanes are sums of integers, so their order does not matter. Then, group after group,
 *
 *   f[l] = fmaf((float)lane[l], scale * x_scale, f[l])
 *
 * Blocks of 32 have two scales in a group. Of 4 bits, lanes 0 to 3 take the first one and 4 to 7
 * the second. Of 8 bits, the lanes of vectors 0 and 1 are added with the first, then those of
 * vectors 2 and 3 with the second. At the end the sum is
 * ((f0 + f4) + (f2 + f6)) + ((f1 + f5) + (f3 + f7)). */
#ifndef QC_QUANT_CPU_MATMUL_INTERNAL_H
#define QC_QUANT_CPU_MATMUL_INTERNAL_H

#include "base/cpu.h"
#include "quant/quant_form.h"
#include "quant/quant_pack.h"

#define QC_GEMV_GROUP  64u
#define QC_GEMV_ROWS   8u    /* of x in one call of a table */
#define QC_GEMV_BATCH  16u   /* of W in one call of a table */
#define QC_GEMV_X_MOST 16383 /* |q|; 8 * 16383 * 16384 < 2^31 */
#define QC_GEMV_T_MOST 16384.0f

/* One weight and some rows of x. x is laid out by cpu_matmul.c. */
typedef struct {
    const qc_weights *w;
    uint64_t groups;       /* groups of 64 in a row */
    const int16_t *x;      /* [groups][m][64] in the order of the kernel */
    const float *x_scales; /* [groups][m]; times the step of the codes' values */
    unsigned m;            /* 1, 2, 4 or 8 */
    unsigned shift;        /* group g of a row has the scale of block first + (g >> shift) */
    int halves;            /* blocks of 32: first + 2 g and 2 g + 1 instead */
    unsigned nested_shift; /* block b has the nested absmax b >> nested_shift */
    unsigned char low[16], high[16]; /* bytes of t, for codes of 4 bits */
    unsigned char zero;              /* the code of 0 in a byte */
} qc_gemv;

typedef struct {
    qc_isa isa;
    /* sums [count][m] of rows of W from first on; count is at most QC_GEMV_BATCH. */
    void (*rows)(const qc_gemv *g, uint64_t first, unsigned count, float *sums);
} qc_gemv_ops;

extern const qc_gemv_ops qc_gemv_ops_scalar;
extern const qc_gemv_ops qc_gemv_ops_avx2;   /* where QC_HAVE_QUANT_AVX2 */
extern const qc_gemv_ops qc_gemv_ops_avx512; /* where QC_HAVE_QUANT_AVX512 */

/* As qc_quant_ops_for. */
const qc_gemv_ops *qc_gemv_ops_for(qc_isa isa);

/* Returns the codes of a group: as they are, or parted to room [QC_GEMV_GROUP]. */
static inline const unsigned char *qc_gemv_codes(const qc_gemv *g, const unsigned char *codes,
                                                 unsigned char *room)
{
    const unsigned bits = g->w->form.ops->bits;
    if (bits % 4 == 0)
        return codes;
    qc_codes_unpack(bits, codes, QC_GEMV_GROUP, room);
    return room;
}

/* The block in which a row begins, or the row itself where rows have scales. */
static inline uint64_t qc_gemv_first_block(const qc_gemv *g, uint64_t row)
{
    const qc_form *f = &g->w->form;
    return f->block_elems == 0 ? row : row * (f->cols / f->block_elems);
}

static inline float qc_gemv_scale(const qc_gemv *g, uint64_t block, int nested)
{
    const qc_weights *w = g->w;
    if (!nested)
        return w->absmax[block];
    return w->nested_map[w->absmax_codes[block]] * w->nested_absmax[block >> g->nested_shift] +
           w->form.offset;
}

#endif

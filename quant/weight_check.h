/* Checks whether codes and scales are what quantizing the given weights produces.
 *
 * A piece of a quantized weight is compared with the weights it was made from, which quant_ops.h
 * quantizes anew (scales by absmax). Where the codes are equal, the error follows from the sums
 * that quantizing leaves, and nothing is decoded. Where they differ, every element is decoded and
 * compared, and its code is good if
 *
 *   by search   x lies where the code is the nearest one for the scale as a reader sees it, or
 *   by absmax   x lies where it is the nearest one for the block's largest value, and the scale is
 *               that value as far as its form can hold it
 *
 * The same one of the two must hold for all elements of a block. Any other code is not a rounding
 * of x: it is misplaced. Borders are half way between neighbouring values, give or take
 * QC_CHECK_SLACK of the scale.
 *
 * Thread-safe: yes, with a scratch per thread. Allocates: no. */
#ifndef QC_QUANT_WEIGHT_CHECK_H
#define QC_QUANT_WEIGHT_CHECK_H

#include "quant/quant_form.h"

#define QC_CHECK_SLACK 0x1p-18
/* An element is clipped if it exceeds the largest value that its scale can express by more than
 * this share; double quantization alone rounds scales by up to a tenth of that. */
#define QC_CHECK_CLIP 0x1p-6
/* How many elements are looked at together; a multiple of every block size. */
#define QC_CHECK_CHUNK 4096u

/* A form and the range in which each of its codes of 4 bits is the nearest one. */
typedef struct {
    qc_form form;  /* code_map is copied to map, and is NULL afterwards */
    float map[16]; /* 4 bits: value of each code */
    int mapped;    /* map is not that of the form, so that nothing here quantizes to it */
    float low[16], high[16];
    float largest; /* magnitude in map; 1 for int8 */
} qc_check;

void qc_check_init(qc_check *c, const qc_form *form);

/* Always written whole; qc_check_add combines pieces. Indices count elements of the piece, and are
 * UINT64_MAX where there is none. */
typedef struct {
    double sum_xx;       /* sum of x^2 */
    double sum_ee;       /* sum of (x - x')^2 */
    double sum_expected; /* the same for the codes of absmax, with the scale that is there where it
                            is the block's largest value as its form holds it, else with that
                            value, rounded by a third of the slack squared */
    double max_err;
    uint64_t max_index;
    uint64_t clipped;
    uint64_t misplaced; /* the smaller count of the two ways, block by block */
    uint64_t first_misplaced;
    uint64_t scales;         /* blocks, or rows, that are not all zero */
    uint64_t searched;       /* how many of them are good by search and not by absmax */
    uint64_t first_searched; /* the first element of the first of those */
    double sum_largest;      /* over the elements of those: the square of the largest of the block
                                (row) */
    uint64_t bad_source;     /* the first x without a code: not finite, or too large */
    uint64_t bad_value;      /* the first x' that is not finite */
} qc_check_sums;

void qc_check_add(qc_check_sums *total, const qc_check_sums *piece, uint64_t first);
/* Makes *s the sums of nothing. */
void qc_check_sums_init(qc_check_sums *s);

typedef struct {
    float x[QC_CHECK_CHUNK], value[QC_CHECK_CHUNK];
    float low[QC_CHECK_CHUNK], high[QC_CHECK_CHUNK];
    unsigned char codes[QC_CHECK_CHUNK];
    uint16_t half[QC_CHECK_CHUNK];
    float absmax[QC_CHECK_CHUNK / 32];
    qc_block_error errors[QC_CHECK_CHUNK / 32];
} qc_check_scratch;

/* Checks n elements from the start of a block at src, or whole rows; codes and scales (as a reader
 * has them) begin there too. slack [blocks]: how far a scale may be from the block's largest value.
 * row_codes: room for the codes of a row; only of forms by rows. */
void qc_check_codes(const qc_quant_ops *ops, const qc_check *f, const void *src, qc_dtype dtype,
                    uint64_t n, const void *codes, const float *scales, const float *slack,
                    void *row_codes, qc_check_scratch *scratch, qc_check_sums *sums);

#endif

/* The scale search of quant/scale_search.h on a GPU, bit for bit: codes, scales, and per block or
 * run what the sums are made of (qc_search_collect, qc_rows_collect).
 *
 * The common rules are those of kernels/cuda_quantize.h: device pointers, dtype F32, F16 or BF16,
 * src and codes of any alignment of their types, 64-bit sizes; nothing is waited for or allocated.
 * *bad is the lowest index that has no code, or UINT64_MAX; if there is one, everything else is
 * unspecified.
 * Errors: QC_ERR_USAGE for an argument, QC_ERR_INTERNAL from CUDA. */
#ifndef QC_KERNELS_CUDA_SCALE_SEARCH_H
#define QC_KERNELS_CUDA_SCALE_SEARCH_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"
#include "quant/quant_form.h"
#include "quant/search_sums.h"

QC_C_BEGIN

#define QC_CUDA_SEARCH_LISTS 4u /* of factors */

/* The constants of the search, which kernels read from device memory, 16-byte aligned. Fill them on
 * the host once and copy them there. */
typedef struct {
    uint16_t screen[QC_CUDA_SEARCH_LISTS][256]
                   [32]; /* as in qc_search_tables: list, level, candidate */
    float factor[QC_CUDA_SEARCH_LISTS][16];
    float nf4_steps[16], int4_steps[16];
    float steps[2][7][16]; /* qc_search_steps_of */
    float refits[16];
    float int8_target;
} qc_cuda_search_tables;
void qc_cuda_search_tables_fill(qc_cuda_search_tables *out);

/* A search over n elements from the start of a group (nested) or of a block. */
typedef struct {
    const void *src; /* [n] */
    qc_dtype dtype;
    uint64_t n;
    const qc_form_ops *form; /* host */
    qc_dtype scale_dtype;    /* of integers */
    int by_absmax;           /* integers in blocks of up to 1024: no search; codes, scales and sums
                                are those of int_quantize */
    uint32_t block_elems;
    int nested, refit;
    float offset;
    const qc_cuda_search_tables *tables; /* device */
    void *codes;                         /* qc_form_code_bytes of n */
    float *absmax;                       /* [blocks] */
    uint8_t *absmax_codes;               /* [blocks], nested only */
    float *nested_absmax;                /* [ceil(blocks / 256)], nested only */
    qc_search_sum *sums;                 /* [blocks], 8-byte aligned */
    uint64_t *bad;
} qc_cuda_search_blocks_job;
QC_NODISCARD qc_status qc_cuda_search_blocks(const qc_cuda_search_blocks_job *a, qc_cuda_stream s,
                                             qc_error *err);

/* A search by rows, for LLM.int8 and integers. */
typedef struct {
    const void *src; /* [rows, cols] */
    qc_dtype dtype;
    uint64_t rows, cols;
    const qc_form_ops *form;             /* host */
    qc_dtype scale_dtype;                /* of integers */
    int by_absmax;                       /* integers: no search; codes, scales and sums are those of
                                int_quantize */
    const qc_cuda_search_tables *tables; /* device */
    void *codes;                         /* [rows, cols]; cols of 4-bit codes is even */
    float *scb;                          /* [rows] the scales; 0 where cols is 0 */
    float *errors; /* as in qc_cuda_rows, of integers in units of the scale and its square (see
                      qc_rows_collect); 16-byte aligned; not NULL unless cols is 0 */
    uint64_t *bad; /* in LLM.int8 a value that is finite, but infinite in float16, counts */
} qc_cuda_search_rows_job;
QC_NODISCARD qc_status qc_cuda_search_rows(const qc_cuda_search_rows_job *a, qc_cuda_stream s,
                                           qc_error *err);

/* For kernels/ only: the numbers of quant/scale_search_internal.h (which is C) that decide what is
 * launched. */
#define QC_CUDA_SEARCH_REFITS 8u /* most */

typedef struct {
    uint32_t nf4_step_count, int4_step_count, refit_count;
    uint32_t nf4_window, int8_window, nf4_wide, int8_wide; /* codes; wide: REFIT */
} qc_cuda_search_limits;

qc_cuda_search_limits qc_cuda_search_limits_get(void);

/* qc_search_list; QC_CUDA_SEARCH_LISTS of a form without a screen */
uint32_t qc_cuda_search_list(const qc_form_ops *form, uint32_t block_elems);

QC_C_END
#endif

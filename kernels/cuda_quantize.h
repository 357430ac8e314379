/* Quantizing on a GPU, with the bytes of quant/quant_ops.h and of quant/scale_search.h.
 *
 * Kernels make codes and scales, bit for bit, and what the sums of errors are made of. The host
 * adds those up (qc_blocks_collect, qc_rows_collect and qc_search_collect of
 * quant/quant_collect.h).
 *
 * All pointers are device memory but for those that say host. src and codes may have any alignment
 * of their type; 16 bytes is faster. Work is put on the stream and not waited for; nothing is
 * allocated. Thread-safe: yes. Errors: QC_ERR_USAGE for an argument (block size, dtype),
 * QC_ERR_INTERNAL from CUDA. */
#ifndef QC_KERNELS_CUDA_QUANTIZE_H
#define QC_KERNELS_CUDA_QUANTIZE_H

#include "kernels/cuda_dequantize.h"
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

/* This many columns of a row lie between two flushes of the sums: QC_ROW_FLUSH of
 * quant_internal.h. */
#define QC_CUDA_ROW_RUN 1024u

/* What leaves the sums of errors in which form. */
typedef enum {
    QC_CUDA_SUMS_ROWS, /* float [rows][ceil(cols / QC_CUDA_ROW_RUN)][4]: sums ee and xx folded over
                            16 lanes, the largest |e|, and the bits (uint32_t) of its column within
                            the run, lowest on ties; of integers in units of the scale and its
                            square. A scale for each row */
    QC_CUDA_SUMS_BLOCKS, /* float [blocks][4]: sums rr, rc, cc folded over 16 lanes, and the largest
                            |r|. NF4 and int8 in blocks, by absmax */
    QC_CUDA_SUMS_FOUND   /* qc_search_sum [blocks]. All others */
} qc_cuda_sums;

/* Some elements of a weight, which begin with a row (scales by rows), a block, or a group of nested
 * scales. */
typedef struct {
    const void *src; /* [n] */
    qc_dtype dtype;  /* F32, F16 or BF16 (only the CPU does F64) */
    uint64_t n;      /* whole rows, with scales by rows; 0: nothing but *bad is written */
    qc_form form;    /* nested counts where scales are searched */
    int searched;    /* 0: scales are those of the largest values. Integers are in blocks of up to
                        1024 then */
    int refit;       /* with nested scales: QC_SEARCH_REFIT */
    const qc_cuda_search_tables *tables; /* for what is searched, and for integers */
    void *codes;                         /* qc_form_code_bytes of n */
    float *absmax;                       /* [scales] */
    uint8_t *absmax_codes;               /* [blocks], nested */
    float *nested_absmax;                /* [ceil(blocks / 256)], nested */
    void *sums;    /* 16-byte aligned; by absmax and not of integers NULL: not wanted */
    uint64_t *bad; /* UINT64_MAX, or the lowest index whose element has no code; everything else is
                      unspecified then. In rows of LLM.int8 a value that is finite, but infinite in
                      float16, counts */
} qc_cuda_quantize_job;

/* form and searched are enough. */
qc_cuda_sums qc_cuda_quantize_sums(const qc_cuda_quantize_job *a);
QC_NODISCARD qc_status qc_cuda_quantize(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                        qc_error *err);

/* ---- for kernels/ only: what qc_cuda_quantize has checked and chooses from ---- */

QC_NODISCARD qc_status qc_cuda_absmax_blocks(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                             qc_error *err);
QC_NODISCARD qc_status qc_cuda_absmax_rows(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                           qc_error *err);
QC_NODISCARD qc_status qc_cuda_search_blocks(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                             qc_error *err);
QC_NODISCARD qc_status qc_cuda_search_rows(const qc_cuda_quantize_job *a, qc_cuda_stream s,
                                           qc_error *err);

/* The numbers of quant/scale_search_internal.h (which is C) that decide what is launched. */
#define QC_CUDA_SEARCH_REFITS 8u /* most */

typedef struct {
    uint32_t refit_count;
    uint32_t tried; /* codes of double quantization, or scales */
    uint32_t list;  /* qc_search_list; QC_CUDA_SEARCH_LISTS of a form without a screen */
} qc_cuda_search_limits;

qc_cuda_search_limits qc_cuda_search_limits_of(const qc_cuda_quantize_job *a);

QC_C_END

#endif

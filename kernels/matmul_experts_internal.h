/* For kernels/ only: what qc_matmul_run_experts passes to the launchers, of which each path has
 * one. Kernels take the call as it is. */
#ifndef QC_KERNELS_MATMUL_EXPERTS_INTERNAL_H
#define QC_KERNELS_MATMUL_EXPERTS_INTERNAL_H

#include "kernels/matmul_experts.h"
#include "kernels/matmul_kernels.h"

QC_C_BEGIN

typedef struct {
    const void *table; /* qc_run_source [count] */
    const uint32_t *offsets, *x_rows;
    const float *row_weights;
    uint32_t count, max_rows, x_count;
    uint32_t m_tile, slots; /* tiles of rows that there may be */
    int nf4, aligned;
    uint64_t n, k, ldx, ldy;
    const uint16_t *x;
    const int *x_exponent; /* as in qc_matmul_call */
    int x_aligned;         /* rows of x are on 16 bytes */
    qc_dtype x_dtype, y_dtype;
    void *y;
    const void *bias;
    uint32_t *fault;
} qc_experts_call;

QC_NODISCARD qc_status qc_gemv_experts_launch(const qc_experts_call *c, qc_cuda_stream s,
                                              qc_error *err);
QC_NODISCARD qc_status qc_mma884_experts_launch(const qc_experts_call *c, qc_cuda_stream s,
                                                qc_error *err);
QC_NODISCARD qc_status qc_mma16816_experts_launch(const qc_experts_call *c, qc_cuda_stream s,
                                                  qc_error *err);

/* The bytes of an expert's entry in the table; behind the entries lies an int for each, its
 * exponent. */
uint64_t qc_experts_entry_bytes(void);
/* Makes the table, without the exponents. row_bytes: 0, or of codes that were repacked and lie from
 * `codes` on, expert after expert. */
QC_NODISCARD qc_status qc_experts_table_launch(const qc_weights *w, uint32_t count, void *table,
                                               int *exponents, const unsigned char *codes,
                                               uint64_t row_bytes, qc_cuda_stream s, qc_error *err);
/* Finds the exponents (qc_matmul_weights) of the table's weights, which are like w. */
QC_NODISCARD qc_status qc_experts_exponent_launch(const void *table, const qc_weights *w,
                                                  uint32_t count, int *exponents, qc_cuda_stream s,
                                                  qc_error *err);

QC_C_END
#endif

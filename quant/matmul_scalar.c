/* The scalar truth of the matmul on the CPU. */
#include "quant/matmul_parts.h"

#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <math.h>
#include <string.h>

static float load(const void *x, qc_dtype dtype, uint64_t i)
{
    const unsigned char *base = x;
    float f = 0.0f;
    uint16_t h = 0;
    if (dtype == QC_DTYPE_F32) {
        memcpy(&f, base + i * sizeof f, sizeof f);
        return f;
    }
    memcpy(&h, base + i * sizeof h, sizeof h);
    return dtype == QC_DTYPE_F16 ? qc_f32_from_f16(h) : qc_f32_from_bf16(h);
}

static void tile(const float *w, uint64_t stride, unsigned rows, const void *x, qc_dtype x_dtype,
                 uint64_t ldx, unsigned m, uint64_t k, float *sums)
{
    for (unsigned r = 0; r < rows; r++) {
        for (unsigned i = 0; i < m; i++) {
            float lanes[QC_LANES] = {0.0f};
            for (uint64_t c = 0; c < k; c++)
                lanes[c % QC_LANES] =
                    fmaf(w[r * stride + c], load(x, x_dtype, i * ldx + c), lanes[c % QC_LANES]);
            sums[r * QC_MATMUL_GROUP + i] = qc_fold16(lanes);
        }
    }
}

static void quantized(const qc_weights *w, uint64_t first, uint64_t count,
                      const qc_matmul_cpu_io *io, void *scratch)
{
    qc_matmul_quantized(tile, &qc_quant_ops_scalar, w, first, count, io, scratch);
}

static void dense(const void *w, qc_dtype w_dtype, uint64_t k, uint64_t first, uint64_t count,
                  const qc_matmul_cpu_io *io, void *scratch)
{
    qc_matmul_dense_rows(tile, &qc_quant_ops_scalar, w, w_dtype, k, first, count, io, scratch);
}

const qc_matmul_ops qc_matmul_ops_scalar = {QC_ISA_SCALAR, quantized, dense,
                                            qc_matmul_double_lanes};

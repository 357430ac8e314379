/* The scalar reference of the matmul on the CPU. */
#include "quant/matmul_internal.h"

#include "quant/quant_internal.h"

#include <math.h>
#include <string.h>

static void tile(const qc_matmul_tile *t)
{
    for (unsigned r = 0; r < t->rows; r++) {
        for (unsigned i = 0; i < t->m; i++) {
            float *lanes = t->lanes + (r * QC_MATMUL_GROUP + i) * QC_LANES;
            if (t->is_first)
                memset(lanes, 0, QC_LANES * sizeof *lanes);
            for (unsigned c = 0; c < t->k; c++)
                lanes[c % QC_LANES] = fmaf(t->w[r * t->stride + c], t->x[i * QC_MATMUL_STEP + c],
                                           lanes[c % QC_LANES]);
            if (t->is_last)
                t->sums[i * QC_MATMUL_PANEL + r] = qc_fold16(lanes);
        }
    }
}

const qc_matmul_ops qc_matmul_ops_scalar = {QC_ISA_SCALAR, tile, QC_MATMUL_GROUP,
                                            &qc_quant_ops_scalar, qc_matmul_double_lanes};

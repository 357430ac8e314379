/* From lane sums to what the functions of quant_ops.h leave; contract in quant_collect.h. The lines
 * are those of block_add_error and run_add_error in quant_scalar.c, after the fold. */
#include "quant/quant_collect.h"

#include "quant/quant_half.h"
#include "quant/quant_internal.h"

void qc_blocks_collect(const float *absmax, const float *errors, uint64_t blocks,
                       qc_block_error *out, qc_piece_sums *sums)
{
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t k = 0; k < blocks; k++) {
        const float *e = errors + 4 * k;
        double a2 = (double)absmax[k] * (double)absmax[k];
        sums->sum_ee += (double)e[0] * a2;
        sums->sum_xx += ((double)e[0] + 2 * (double)e[1] + (double)e[2]) * a2;
        out[k].rc = qc_bf16_from_f32(e[1]);
        out[k].cc = qc_bf16_from_f32(e[2]);
        out[k].peak = qc_bf16_above(e[3]);
    }
}

void qc_rows_collect(const float *errors, const float *scales, uint64_t rows, uint64_t cols,
                     qc_piece_sums *sums)
{
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t col = 0; col < cols; col += QC_ROW_FLUSH, errors += 4) {
            const double s2 = scales ? (double)scales[row] * (double)scales[row] : 1.0;
            sums->sum_ee += (double)errors[0] * s2;
            sums->sum_xx += (double)errors[1] * s2;
            if ((double)errors[2] > sums->max_err) {
                sums->max_err = (double)errors[2];
                sums->max_index = row * cols + col + qc_f32_bits(errors[3]);
            }
        }
}

void qc_search_collect(const qc_search_sum *found, uint64_t blocks, uint32_t block_elems,
                       qc_piece_sums *sums)
{
    *sums = (qc_piece_sums){.bad = QC_BAD_NONE};
    for (uint64_t k = 0; k < blocks; k++) {
        sums->sum_xx += found[k].xx;
        sums->sum_ee += found[k].ee;
        if ((double)found[k].largest > sums->max_err) {
            sums->max_err = (double)found[k].largest;
            sums->max_index = k * block_elems + found[k].index;
        }
    }
}

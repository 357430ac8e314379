/* The error of a block-quantized tensor once its scales are final.
 *
 * With a the absmax the codes were made with and a' the one a reader will use, an element is
 * x = a (c + r) and is read as x' = a' c. So, with delta = a - a',
 *
 *     x - x' = a r + delta c
 *     sum (x - x')^2 = a^2 rr + 2 a delta rc + delta^2 cc
 *
 * a^2 rr is in the piece sums already, in full precision; only the two corrections rest on the
 * rounded rc and cc. The largest error is bounded per block by a * peak + |delta|, since |c| <= 1.
 * The source is read again only for blocks whose bound reaches the best error found so far,
 * beginning with the block of the largest bound; in practice a handful. */
#include "quant/quant_form.h"
#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <math.h>

void qc_piece_add(qc_piece_sums *total, const qc_piece_sums *piece, uint64_t first)
{
    total->sum_xx += piece->sum_xx;
    total->sum_ee += piece->sum_ee;
    if (piece->max_err > total->max_err) {
        total->max_err = piece->max_err;
        total->max_index = first + piece->max_index;
    }
    if (total->bad == QC_BAD_NONE && piece->bad != QC_BAD_NONE) {
        total->bad = piece->bad;
        total->bad_index = first + piece->bad_index;
    }
}

float qc_nested_offset(const float *absmax, uint64_t n)
{
    if (n == 0)
        return 0.0f;
    double sum = 0.0;
    for (uint64_t i = 0; i < n; i++)
        sum += (double)absmax[i];
    uint16_t h = qc_bf16_from_f32((float)(sum / (double)n));
    if (h == QC_BF16_INF) /* this stands for what is within half an ulp of the largest float */
        h = QC_BF16_INF - 1;
    return qc_f32_from_bf16(h);
}

/* The share of 2^-20 covers earlier roundings: of the inverse (2^-22 where it is subnormal), y, r
 * and the product a' c; 2^-149 covers a subnormal x'. */
double qc_block_error_bound(float absmax, float absmax_final, const qc_block_error *error)
{
    double a = (double)absmax, a_final = (double)absmax_final;
    if (absmax == 0.0f)
        return 0.0;
    double peak = (double)qc_f32_from_bf16(error->peak);
    double rounding = (a + fabs(a_final)) * 0x1p-20 + 0x1p-149;
    return a * peak + fabs(a - a_final) + rounding;
}

double qc_block_error_moved(float absmax, float absmax_final, const qc_block_error *error)
{
    double a = (double)absmax, delta = a - (double)absmax_final;
    double rc = (double)qc_f32_from_bf16(error->rc), cc = (double)qc_f32_from_bf16(error->cc);
    return 2.0 * a * delta * rc + delta * delta * cc;
}

/* Reads block k again and lets its errors compete with out->max_err. */
static qc_status visit_block(const qc_finished_blocks *job, uint64_t k, qc_tensor_error *out,
                             qc_error *err)
{
    float x[QC_BLOCK_MAX], restored[QC_BLOCK_MAX], absmax;
    uint8_t codes[QC_BLOCK_MAX];
    const qc_form *form = &job->form;
    const qc_form_out made = {.codes = codes, .absmax = &absmax};
    qc_piece_sums sums;
    uint64_t overflow, first = k * form->block_elems;
    uint64_t n = qc_min_u64(job->n - first, form->block_elems);

    QC_TRY(job->read(job->read_ctx, first, n, x, err));
    form->ops->quantize(job->quant, form, x, QC_DTYPE_F32, n, &made, &sums);
    form->ops->dequantize(job->quant, form, codes, &job->absmax_final[k], n, restored, QC_DTYPE_F32,
                          &overflow);
    if (sums.bad != QC_BAD_NONE || qc_f32_bits(absmax) != qc_f32_bits(job->absmax[k]))
        QC_FAIL(err, QC_ERR_CHECK,
                "the source changed while it was read: block %llu differs between two readings",
                (unsigned long long)k);
    for (uint64_t i = 0; i < n; i++) {
        double e = fabs((double)x[i] - (double)restored[i]);
        if (e > out->max_err || (e == out->max_err && first + i < out->max_index)) {
            out->max_err = e;
            out->max_index = first + i;
        }
    }
    return QC_OK;
}

qc_status qc_block_error_finish(const qc_finished_blocks *job, const qc_piece_sums *total,
                                qc_tensor_error *out, qc_error *err)
{
    const uint64_t blocks = qc_form_scales(&job->form, job->n);
    *out = (qc_tensor_error){0};
    if (job->n == 0)
        return QC_OK;

    double sum_ee = total->sum_ee;
    double best_bound = -1.0;
    uint64_t best_block = 0;
    for (uint64_t k = 0; k < blocks; k++) {
        sum_ee += qc_block_error_moved(job->absmax[k], job->absmax_final[k], &job->errors[k]);
        double bound = qc_block_error_bound(job->absmax[k], job->absmax_final[k], &job->errors[k]);
        if (bound > best_bound) {
            best_bound = bound;
            best_block = k;
        }
    }
    /* Where the error is next to nothing, rounded corrections may outweigh it. */
    out->rel_mse = total->sum_xx > 0.0 && sum_ee > 0.0 ? sum_ee / total->sum_xx : 0.0;

    out->max_index = UINT64_MAX;
    QC_TRY(visit_block(job, best_block, out, err));
    for (uint64_t k = 0; k < blocks; k++) {
        double bound = qc_block_error_bound(job->absmax[k], job->absmax_final[k], &job->errors[k]);
        int earlier = k * job->form.block_elems < out->max_index;
        if (k != best_block && (bound > out->max_err || (earlier && bound == out->max_err)))
            QC_TRY(visit_block(job, k, out, err));
    }
    return QC_OK;
}

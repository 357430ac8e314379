#include "quant/low_rank_internal.h"

#include "base/checked.h"

#include <string.h>

uint64_t qc_low_rank_packed(uint64_t rank, uint64_t cols)
{
    return qc_sat_mul(qc_align_u64(cols, QC_LOW_RANK_PANEL), rank);
}

void qc_low_rank_pack(double *to, const float *from, uint64_t k_step, uint64_t c_step,
                      uint64_t rank, uint64_t cols)
{
    for (uint64_t first = 0; first < cols; first += QC_LOW_RANK_PANEL) {
        for (uint64_t k = 0; k < rank; k++) {
            for (uint64_t c = first; c < first + QC_LOW_RANK_PANEL; c++)
                *to++ = c < cols ? (double)from[k * k_step + c * c_step] : 0.0;
        }
    }
}

static void one_row(double *out, const double *left, const double *right, uint64_t rank,
                    double scale)
{
    double s[QC_LOW_RANK_PANEL] = {0};
    for (uint64_t k = 0; k < rank; k++) {
        for (uint32_t c = 0; c < QC_LOW_RANK_PANEL; c++)
            s[c] += left[k] * right[k * QC_LOW_RANK_PANEL + c];
    }
    for (uint32_t c = 0; c < QC_LOW_RANK_PANEL; c++)
        out[c] += s[c] * scale;
}

static void four_rows(double *out, const double *left, const double *right, uint64_t rank,
                      double scale)
{
    for (uint32_t r = 0; r < QC_LOW_RANK_ROWS; r++)
        one_row(out + r * QC_LOW_RANK_RUN, left + r * rank, right, rank, scale);
}

static void wide_row(double *out, const double *left, const double *right, uint64_t rank,
                     double scale)
{
    for (uint32_t p = 0; p < QC_LOW_RANK_WIDE; p++)
        one_row(out + p * QC_LOW_RANK_PANEL, left, right + p * QC_LOW_RANK_PANEL * rank, rank,
                scale);
}

static const qc_low_rank_ops scalar = {four_rows, one_row, wide_row};

/* Adds columns [inside, inside + n) of a panel to rows that are not all there. */
static void add_part(const qc_low_rank_ops *ops, double *values, const qc_low_rank_tile *t,
                     const double *right, uint32_t inside, uint32_t n)
{
    double part[QC_LOW_RANK_PANEL] = {0};
    for (uint32_t r = 0; r < t->rows; r++) {
        memcpy(part + inside, values + r * QC_LOW_RANK_RUN, n * sizeof *part);
        ops->row(part, t->left + r * t->rank, right, t->rank, t->scale);
        memcpy(values + r * QC_LOW_RANK_RUN, part + inside, n * sizeof *part);
    }
}

void qc_low_rank(qc_isa isa, double *values, const qc_low_rank_tile *t)
{
    const qc_low_rank_ops *ops = &scalar;
    const uint32_t wide = QC_LOW_RANK_WIDE * QC_LOW_RANK_PANEL;
#if defined(QC_HAVE_QUANT_AVX2)
    ops = isa == QC_ISA_SCALAR ? &scalar : &qc_low_rank_ops_avx2;
#else
    (void)isa;
#endif
    for (uint32_t done = 0, now = 0; done < t->n; done += now) {
        uint32_t inside = (uint32_t)((t->col + done) % QC_LOW_RANK_PANEL);
        const double *right = t->right + (t->col + done - inside) * t->rank;
        now = qc_min_u32(t->n - done, QC_LOW_RANK_PANEL - inside);
        if (now == QC_LOW_RANK_PANEL && t->rows == QC_LOW_RANK_ROWS) {
            ops->rows(values + done, t->left, right, t->rank, t->scale);
        } else if (inside == 0 && t->n - done >= wide) {
            now = wide;
            for (uint32_t r = 0; r < t->rows; r++)
                ops->wide(values + r * QC_LOW_RANK_RUN + done, t->left + r * t->rank, right,
                          t->rank, t->scale);
        } else {
            add_part(ops, values + done, t, right, inside, now);
        }
    }
}

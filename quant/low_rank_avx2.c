#include "quant/low_rank_internal.h"

#include <immintrin.h>

/* The products are exact, so fusing them with the sum changes nothing. Those with the scale are
 * not, and are not fused. */

static void add(double *out, __m256d sum, __m256d scale)
{
    _mm256_storeu_pd(out, _mm256_add_pd(_mm256_loadu_pd(out), _mm256_mul_pd(sum, scale)));
}

static void four_rows(double *out, const double *left, const double *right, uint64_t rank,
                      double scale)
{
    __m256d a0 = _mm256_setzero_pd(), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    for (uint64_t k = 0; k < rank; k++, left++, right += QC_LOW_RANK_PANEL) {
        const __m256d a = _mm256_loadu_pd(right), b = _mm256_loadu_pd(right + 4);
        const __m256d l0 = _mm256_broadcast_sd(left), l1 = _mm256_broadcast_sd(left + rank);
        const __m256d l2 = _mm256_broadcast_sd(left + 2 * rank);
        const __m256d l3 = _mm256_broadcast_sd(left + 3 * rank);
        a0 = _mm256_fmadd_pd(l0, a, a0);
        b0 = _mm256_fmadd_pd(l0, b, b0);
        a1 = _mm256_fmadd_pd(l1, a, a1);
        b1 = _mm256_fmadd_pd(l1, b, b1);
        a2 = _mm256_fmadd_pd(l2, a, a2);
        b2 = _mm256_fmadd_pd(l2, b, b2);
        a3 = _mm256_fmadd_pd(l3, a, a3);
        b3 = _mm256_fmadd_pd(l3, b, b3);
    }
    const __m256d all[QC_LOW_RANK_ROWS][2] = {{a0, b0}, {a1, b1}, {a2, b2}, {a3, b3}};
    for (unsigned r = 0; r < QC_LOW_RANK_ROWS; r++) {
        add(out + r * QC_LOW_RANK_RUN, all[r][0], _mm256_set1_pd(scale));
        add(out + r * QC_LOW_RANK_RUN + 4, all[r][1], _mm256_set1_pd(scale));
    }
}

static void one_row(double *out, const double *left, const double *right, uint64_t rank,
                    double scale)
{
    __m256d a = _mm256_setzero_pd(), b = a;
    for (uint64_t k = 0; k < rank; k++, right += QC_LOW_RANK_PANEL) {
        const __m256d l = _mm256_broadcast_sd(left + k);
        a = _mm256_fmadd_pd(l, _mm256_loadu_pd(right), a);
        b = _mm256_fmadd_pd(l, _mm256_loadu_pd(right + 4), b);
    }
    add(out, a, _mm256_set1_pd(scale));
    add(out + 4, b, _mm256_set1_pd(scale));
}

/* Eight sums at a time, because each waits for the one before. */
static void wide_row(double *out, const double *left, const double *right, uint64_t rank,
                     double scale)
{
    const uint64_t panel = QC_LOW_RANK_PANEL * rank;
    __m256d s[2 * QC_LOW_RANK_WIDE];
    for (unsigned i = 0; i < 2 * QC_LOW_RANK_WIDE; i++)
        s[i] = _mm256_setzero_pd();
    for (uint64_t k = 0; k < rank; k++, right += QC_LOW_RANK_PANEL) {
        const __m256d l = _mm256_broadcast_sd(left + k);
        for (unsigned i = 0; i < 2 * QC_LOW_RANK_WIDE; i++)
            s[i] = _mm256_fmadd_pd(l, _mm256_loadu_pd(right + i / 2 * panel + i % 2 * 4), s[i]);
    }
    for (unsigned i = 0; i < 2 * QC_LOW_RANK_WIDE; i++)
        add(out + 4 * i, s[i], _mm256_set1_pd(scale));
}

const qc_low_rank_ops qc_low_rank_ops_avx2 = {four_rows, one_row, wide_row};

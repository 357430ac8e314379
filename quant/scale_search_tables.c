/* What all instruction sets of the search share: factors, the screen computed from them, and work
 * that is done once per call or tensor. */
#include "quant/scale_search_internal.h"

#include <math.h>
#include <pthread.h>

#define SAMPLE_GROUPS 64u

const float qc_search_factor[QC_SEARCH_LISTS][QC_SEARCH_FACTORS] = {QC_SEARCH_FACTOR_VALUES};
const float qc_search_steps_of[2][7][QC_SEARCH_CANDIDATES] = {QC_SEARCH_GROUP_FACTORS,
                                                              QC_SEARCH_ROW_FACTORS};

static qc_search_tables tables;
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

/* Returns the squared distance of u from the nearest value of the form's 16 codes whose scale is
 * f. */
static double squared_distance(const qc_form_ops *form, double u, double f)
{
    double least = INFINITY;
    for (int code = 0; code < 16; code++) {
        double r = u - f * (double)qc_form_unit(form, code);
        least = r * r < least ? r * r : least;
    }
    return least;
}

static void build_screen(void)
{
    for (unsigned list = 0; list < QC_SEARCH_LISTS; list++) {
        for (unsigned m = 0; m < QC_SEARCH_FACTORS; m++) {
            tables.factor[list][m] = qc_search_factor[list][m];
            tables.factor[list][m + QC_SEARCH_FACTORS] = -qc_search_factor[list][m];
        }
        for (unsigned row = 0; row < QC_SEARCH_LEVELS; row++)
            for (unsigned m = 0; m < 2 * QC_SEARCH_FACTORS; m++) {
                const qc_form_ops *form = list < 2 ? &qc_form_nf4 : &qc_form_w4a16;
                double u = ((double)row - 127.0) / 127.0;
                double d = squared_distance(form, u, (double)tables.factor[list][m]);
                tables.screen[list][row][m] = (uint16_t)rint(32768.0 * d);
            }
    }
}

/* Buckets are [k - 1/2, k + 1/2] / 15; none holds two middles between values, none has one at its
 * edge. */
static void build_buckets(void)
{
    for (int k = -16; k < 16; k++) {
        const unsigned entry = (unsigned)k & 31u;
        unsigned low = 0, high = 0;
        for (unsigned t = 0; t < 15; t++) {
            double threshold = (double)qc_nf4_threshold[t];
            low += threshold < (k - 0.5) / 15;
            high += threshold < (k + 0.5) / 15;
        }
        tables.nf4_low[entry] = qc_nf4_code[low];
        tables.nf4_high[entry] = qc_nf4_code[high];
    }
}

static void build(void)
{
    build_screen();
    build_buckets();
}

const qc_search_tables *qc_search_tables_get(void)
{
    (void)pthread_once(&tables_once, build);
    return &tables;
}

void qc_search_round_scales(const qc_quant_ops *ops, qc_dtype dtype, float *s, unsigned n)
{
    const float least = qc_int_scale_least(dtype), most = qc_int_scale_most(dtype);
    uint16_t half[QC_NESTED_BLOCK * QC_SEARCH_CANDIDATES];
    uint64_t overflow;
    if (dtype != QC_DTYPE_F32) {
        ops->cast(s, QC_DTYPE_F32, n, half, dtype, &overflow);
        ops->cast(half, dtype, n, s, QC_DTYPE_F32, &overflow);
    }
    for (unsigned j = 0; j < n; j++) {
        const float above = s[j] < least ? least : s[j];
        s[j] = above > most ? most : above;
    }
}

uint64_t qc_search_sample_count(uint64_t groups)
{
    return groups < SAMPLE_GROUPS ? groups : SAMPLE_GROUPS;
}

uint64_t qc_search_sample_group(uint64_t groups, uint64_t i)
{
    /* i * groups / 64 without overflow */
    uint64_t count = qc_search_sample_count(groups);
    return count < SAMPLE_GROUPS ? i : groups / count * i + groups % count * i / count;
}

uint64_t qc_search_scratch_bytes(void)
{
    return (sizeof(qc_search_scratch) + 63) / 64 * 64;
}

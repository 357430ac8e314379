#include "quant/quant_simd_tables.h"

#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <math.h>
#include <pthread.h>

static qc_simd_tables tables;
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

/* Buckets are [k - 1/2, k + 1/2] / 15; no threshold lies on an edge. */
static void build_nf4_float(void)
{
    for (int k = -16; k < 16; k++) {
        double lower = (k - 0.5) / 15, upper = (k + 0.5) / 15;
        unsigned entry = (unsigned)k & 31u;
        tables.nf4_base[entry] = 0;
        tables.nf4_threshold[entry] = INFINITY;
        for (unsigned t = 0; t < 15; t++) {
            double threshold = (double)qc_nf4_threshold[t];
            if (threshold < lower)
                tables.nf4_base[entry]++;
            else if (threshold < upper)
                tables.nf4_threshold[entry] = qc_nf4_threshold[t];
        }
    }
}

/* Returns a field, whose codes rise by at most one along a bucket of |x|: they ascend for x > 0 and
 * descend for x < 0, where their complements rise. */
static unsigned nested_field(uint32_t magnitude_bits, int negative)
{
    float x = qc_f32_of_bits(magnitude_bits);
    return negative ? 255u - qc_dynamic_search(-x) : qc_dynamic_search(x);
}

static void build_nested(int negative)
{
    uint32_t *entries = tables.nested + (negative ? QC_NESTED_KEYS : 0);
    for (uint32_t key = 0; key < QC_NESTED_KEYS; key++) {
        uint32_t bits = (QC_NESTED_FIRST + key) << QC_NESTED_SHIFT;
        unsigned field = nested_field(bits, negative);
        entries[key] = field << QC_NESTED_SHIFT;
        uint32_t same = 0, other = QC_NESTED_LOW;
        if (nested_field(bits + other, negative) == field)
            continue;
        while (other - same > 1) {
            uint32_t middle = (same + other) / 2;
            if (nested_field(bits + middle, negative) == field)
                same = middle;
            else
                other = middle;
        }
        entries[key] += (1u << QC_NESTED_SHIFT) - other;
    }
}

static void build(void)
{
    build_nf4_float();
    build_nested(0);
    build_nested(1);
}

const qc_simd_tables *qc_simd_tables_get(void)
{
    pthread_once(&tables_once, build);
    return &tables;
}

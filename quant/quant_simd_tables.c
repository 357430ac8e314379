#include "quant/quant_simd_tables.h"

#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <math.h>
#include <pthread.h>

static qc_simd_tables tables;
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static unsigned nf4_code(float y)
{
    unsigned code = 0;
    for (unsigned t = 0; t < 15; t++)
        code += y > qc_nf4_threshold[t];
    return code;
}

/* s + entry has the field of s in its upper byte, for every s of a bucket */
static void build_nf4_bf16(unsigned m, unsigned negative, uint16_t *entries)
{
    const unsigned absmax = (127u << 7) + m;
    const float inv = 1.0f / qc_f32_from_bf16((uint16_t)absmax);
    unsigned bucket = UINT32_MAX, before = 0;
    for (unsigned above = 0; above <= QC_NF4_DOWN; above++) {
        float x = qc_f32_from_bf16((uint16_t)(absmax - QC_NF4_DOWN + above));
        unsigned field = negative ? 31u - nf4_code(-x * inv) : nf4_code(x * inv);
        unsigned k = above * QC_NF4_SCALE / 65536u;
        if (k != bucket || field != before)
            entries[k + 16 * negative] = (uint16_t)((field << 8) - (above | negative << 15));
        bucket = k;
        before = field;
    }
}

static void build_nf4_fields(void)
{
    for (unsigned field = 0; field < 32; field++) {
        unsigned code = field < 16 ? field : 31u - field;
        tables.nf4_value[field] = qc_nf4_code[code];
        tables.nf4_code[field] = tables.nf4_code[field + 32] = (uint8_t)code;
    }
}

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
    for (unsigned m = 0; m < 128; m++) {
        build_nf4_bf16(m, 0, tables.nf4_bf16[m]);
        build_nf4_bf16(m, 1, tables.nf4_bf16[m]);
    }
    build_nf4_fields();
    build_nf4_float();
    build_nested(0);
    build_nested(1);
}

const qc_simd_tables *qc_simd_tables_get(void)
{
    pthread_once(&tables_once, build);
    return &tables;
}

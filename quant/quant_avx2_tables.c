#include "quant/quant_avx2_tables.h"

#include "quant/quant_half.h"
#include "quant/quant_internal.h"
#include "quant/quant_simd_tables.h"

#include <math.h>
#include <pthread.h>

static qc_avx2_tables tables;
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static unsigned nf4_code(float y)
{
    unsigned code = 0;
    for (unsigned t = 0; t < 15; t++)
        code += y > qc_nf4_threshold[t];
    return code;
}

/* The loop goes downwards, so that what is met last is the lower end of a bucket. */
static void build_bf16(unsigned m, qc_avx2_bf16_tables *t)
{
    const int absmax = (127 << 7) + (int)m;
    const float inv = 1.0f / qc_f32_from_bf16((uint16_t)absmax);
    memset(t->last, 0x7f, sizeof t->last);
    for (int s = QC_AVX2_DOWN, before = 15; s >= -QC_AVX2_DOWN; s--) {
        int magnitude = absmax - QC_AVX2_DOWN + (s < 0 ? -s : s);
        float x = qc_f32_from_bf16((uint16_t)magnitude);
        unsigned code = nf4_code((s < 0 ? -x : x) * inv);
        unsigned product = (unsigned)(s * QC_AVX2_SCALE) & 0xffffu;
        unsigned above = (unsigned)((s + 1) * QC_AVX2_SCALE) & 0xffffu;
        unsigned entry = product >> 8 & 15u;
        if (above >> 8 == product >> 8 && (int)code != before)
            t->last[s < 0][entry] = (uint8_t)((product & 0xffu) ^ 0x80u);
        t->base_code[s < 0][entry] = (uint8_t)code;
        before = (int)code;
    }
}

/* Writes each byte of 16 floats to its table, twice. */
static void build_float(const float *values, uint8_t bytes[4][32])
{
    for (unsigned i = 0; i < 16; i++) {
        uint32_t bits = qc_f32_bits(values[i]);
        for (unsigned byte = 0; byte < 4; byte++)
            bytes[byte][i] = bytes[byte][i + 16] = (uint8_t)(bits >> 8 * byte);
    }
}

static void build(void)
{
    const qc_simd_tables *shared = qc_simd_tables_get();
    float threshold[16];
    memcpy(threshold, qc_nf4_threshold, sizeof qc_nf4_threshold);
    threshold[15] = INFINITY;
    for (unsigned m = 0; m < 128; m++)
        build_bf16(m, &tables.bf16[m]);
    for (unsigned i = 0; i < 16; i++)
        tables.scale[i] = QC_AVX2_SCALE;
    for (unsigned i = 0; i < 32; i++) {
        tables.nf4_base[0][i] = (uint8_t)shared->nf4_base[i & 15u];
        tables.nf4_base[1][i] = (uint8_t)shared->nf4_base[16 + (i & 15u)];
    }
    build_float(threshold, tables.nf4_threshold);
    build_float(qc_nf4_code, tables.nf4_code);
}

const qc_avx2_tables *qc_avx2_tables_get(void)
{
    pthread_once(&tables_once, build);
    return &tables;
}

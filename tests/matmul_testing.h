/* Random quantized weights for the tests of the matmul on the CPU. */
#ifndef QC_TESTS_MATMUL_TESTING_H
#define QC_TESTS_MATMUL_TESTING_H

#include "tests/quant_testing.h"

#include "quant/matmul_ops.h"

typedef struct {
    qc_weights w;
    uint8_t *codes, *absmax_codes;
    float *absmax, *nested_absmax, map[256];
    uint64_t codes_bytes, scales, nested_scales;
} mt_weights;

/* Every code is as likely; scales are around 0.05, in nested ones also negative. */
static inline void mt_make(mt_weights *t, qt_rng *rng, qc_weights_kind kind, uint64_t rows,
                           uint64_t cols, uint32_t block, int nested)
{
    uint64_t elems = rows * cols;
    memset(t, 0, sizeof *t);
    t->codes_bytes = kind == QC_WEIGHTS_NF4 ? elems / 2 + elems % 2 : elems;
    t->codes = qt_alloc(t->codes_bytes, 1);
    for (uint64_t i = 0; i < t->codes_bytes; i++)
        t->codes[i] = (uint8_t)qt_next(rng);
    t->scales = kind == QC_WEIGHTS_INT8_ROWS ? rows : (elems + block - 1) / block;
    t->nested_scales = nested ? (t->scales + 255) / 256 : 0;
    t->w = (qc_weights){.kind = kind,
                        .rows = rows,
                        .cols = cols,
                        .block_elems = kind == QC_WEIGHTS_INT8_ROWS ? 0 : block,
                        .codes = t->codes};
    if (nested) {
        t->absmax_codes = qt_alloc(t->scales, 1);
        t->nested_absmax = qt_alloc(t->nested_scales, sizeof(float));
        for (uint64_t i = 0; i < t->scales; i++)
            t->absmax_codes[i] = (uint8_t)qt_next(rng);
        for (uint64_t i = 0; i < t->nested_scales; i++)
            t->nested_absmax[i] = (float)qt_uniform(rng) * 0.05f;
        memcpy(t->map, qc_dynamic_map, sizeof t->map);
        t->w.absmax_codes = t->absmax_codes;
        t->w.nested_absmax = t->nested_absmax;
        t->w.nested_map = t->map;
        t->w.nested_offset = 0.04f;
        t->w.nested_block = 256;
    } else {
        t->absmax = qt_alloc(t->scales, sizeof(float));
        for (uint64_t i = 0; i < t->scales; i++)
            t->absmax[i] = (float)qt_uniform(rng) * 0.1f;
        t->w.absmax = t->absmax;
    }
}

static inline void mt_free(mt_weights *t)
{
    free(t->codes);
    free(t->absmax_codes);
    free(t->absmax);
    free(t->nested_absmax);
}

/* All of W as quantizing's own functions decode it. */
static inline float *mt_values(const mt_weights *t)
{
    const qc_weights *w = &t->w;
    uint64_t n = w->rows * w->cols, overflow = 0;
    float *out = qt_alloc(n, sizeof *out), *scales = qt_alloc(t->scales, sizeof *scales);
    const qc_quant_ops *ops = &qc_quant_ops_scalar;
    if (w->absmax)
        memcpy(scales, w->absmax, t->scales * sizeof *scales);
    else
        ops->nested_dequantize(w->absmax_codes, w->nested_absmax, w->nested_map, t->scales, 256,
                               w->nested_offset, scales);
    if (w->kind == QC_WEIGHTS_NF4)
        ops->nf4_dequantize(w->codes, scales, qc_nf4_code, n, w->block_elems, out, QC_DTYPE_F32,
                            &overflow);
    else if (w->kind == QC_WEIGHTS_INT8_BLOCKS)
        ops->int8_blocks_dequantize(w->codes, scales, n, w->block_elems, out, QC_DTYPE_F32,
                                    &overflow);
    else
        ops->int8_rows_dequantize(w->codes, scales, w->rows, w->cols, out, QC_DTYPE_F32, &overflow);
    free(scales);
    return out;
}

static inline void *mt_scratch(uint64_t m, uint64_t k)
{
    size_t bytes = (size_t)qc_matmul_cpu_scratch_bytes(m, k);
    void *p = aligned_alloc(64, (bytes + 64) / 64 * 64);
    QT_CHECK(p != NULL, "out of memory");
    return p;
}

static inline void mt_random_x(qt_rng *rng, void *x, qc_dtype dtype, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        qt_put(x, dtype, i, (double)qt_randn(rng));
}

/* Forms that differ in how rows begin: W's kind, block, and whether scales are nested. */
static const struct {
    qc_weights_kind kind;
    uint32_t block;
    int nested;
} mt_forms[] = {{QC_WEIGHTS_NF4, 64, 1},         {QC_WEIGHTS_NF4, 32, 0},
                {QC_WEIGHTS_NF4, 4096, 0},       {QC_WEIGHTS_INT8_ROWS, 0, 0},
                {QC_WEIGHTS_INT8_BLOCKS, 64, 0}, {QC_WEIGHTS_INT8_BLOCKS, 256, 1}};
enum { MT_FORMS = sizeof mt_forms / sizeof *mt_forms };

#endif

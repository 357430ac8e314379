/* The search of calibrated scales on a GPU: bit for bit what qc_feedback_scales finds. */
#include "tests/fixtures/feedback_testing.h"
#include "tests/fixtures/quant_device_fixture.h"

#include "base/alloc.h"
#include "kernels/cuda_feedback_internal.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

/* MIRRORED: a row is the one before, negated. HARD + k: kind k of quant_device_fixture.h. */
typedef enum { ANY, TINY, HUGE_ONES, ZEROS, MIRRORED, HARD } values;

typedef struct {
    qc_form form;
    uint64_t rows, n;
    values x;
    int weighed;
} a_case;

static const a_case cases[] = {
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 0}, 9, 192, ANY, 1},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 1}, 9, 192, ANY, 1},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 1}, 70, 250, ANY, 0},
    {{.ops = &qc_form_nf4, .block_elems = 32, .nested = 1}, 5, 101, ANY, 1},
    {{.ops = &qc_form_nf4, .block_elems = 128, .nested = 1}, 1, 7, ANY, 1},
    {{.ops = &qc_form_nf4, .block_elems = 512, .nested = 0}, 3, 300, ANY, 1},
    {{.ops = &qc_form_nf4, .block_elems = 4096, .nested = 1}, 5, 1000, ANY, 1},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 1}, 8, 128, ZEROS, 1},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 0}, 4, 128, TINY, 1},
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 0}, 4, 128, HUGE_ONES, 0},
    /* Blocks of two mirrored rows: but for rounding a scale is as good as its negative, so a sum
     * that is fused or made in another order takes other signs. */
    {{.ops = &qc_form_nf4, .block_elems = 64, .nested = 0}, 80, 32, MIRRORED, 1},
    {{.ops = &qc_form_int8_rows, .block_elems = 0, .nested = 0}, 7, 300, ANY, 1},
    {{.ops = &qc_form_int8_rows, .block_elems = 0, .nested = 0}, 3, 1, ANY, 1},
    {{.ops = &qc_form_int8_rows, .block_elems = 0, .nested = 0}, 5, 65, TINY, 0},
    {{.ops = &qc_form_int8_blocks, .block_elems = 64, .nested = 0}, 6, 100, ANY, 1},
    {{.ops = &qc_form_int8_blocks, .block_elems = 64, .nested = 1}, 9, 128, ANY, 1},
    {{.ops = &qc_form_int8_blocks, .block_elems = 256, .nested = 1}, 6, 512, ZEROS, 1},
    {{.ops = &qc_form_w4a16, .block_elems = 128, .scale_dtype = QC_DTYPE_BF16}, 9, 256, ANY, 1},
    {{.ops = &qc_form_w4a16, .block_elems = 32, .scale_dtype = QC_DTYPE_F16}, 7, 100, ANY, 0},
    {{.ops = &qc_form_w4a16, .block_elems = 0, .scale_dtype = QC_DTYPE_F32}, 5, 600, ANY, 1},
    {{.ops = &qc_form_w4a16, .block_elems = 64, .scale_dtype = QC_DTYPE_F16}, 4, 128, TINY, 1},
    {{.ops = &qc_form_w4a16, .block_elems = 64, .scale_dtype = QC_DTYPE_BF16}, 4, 128, ZEROS, 1},
    {{.ops = &qc_form_w4a16, .block_elems = 64, .scale_dtype = QC_DTYPE_F16}, 4, 128, HUGE_ONES, 0},
    {{.ops = &qc_form_w2a16, .block_elems = 64, .scale_dtype = QC_DTYPE_F16}, 6, 128, ANY, 1},
    {{.ops = &qc_form_w3a16, .block_elems = 128, .scale_dtype = QC_DTYPE_BF16}, 6, 256, ANY, 1},
    {{.ops = &qc_form_w5a16, .block_elems = 128, .scale_dtype = QC_DTYPE_F16}, 6, 256, ANY, 1},
    {{.ops = &qc_form_w6a16, .block_elems = 0, .scale_dtype = QC_DTYPE_BF16}, 7, 300, ANY, 0},
    {{.ops = &qc_form_w7a16, .block_elems = 32, .scale_dtype = QC_DTYPE_F32}, 6, 96, TINY, 1},
    {{.ops = &qc_form_w8a16, .block_elems = 64, .scale_dtype = QC_DTYPE_F16}, 6, 128, ANY, 1},
    {{.ops = &qc_form_w8a16, .block_elems = 0, .scale_dtype = QC_DTYPE_BF16}, 7, 300, ZEROS, 1},
    {{.ops = &qc_form_w8a8, .block_elems = 0, .scale_dtype = QC_DTYPE_BF16}, 5, 65, TINY, 0},
    {{.ops = &qc_form_w8a8, .block_elems = 0, .scale_dtype = QC_DTYPE_F32}, 3, 1, ANY, 1},
};

/* What a weight, or T, can be; a few are zero, of either sign. */
static float value_of_kind(qt_rng *rng, values kind)
{
    const float v = qt_randn(rng) * (qt_below(rng, 60) == 0 ? 6.0f : 1.0f);
    const uint64_t dice = qt_below(rng, 16);
    if (dice == 0)
        return v < 0.0f ? -0.0f : 0.0f;
    if (kind == TINY)
        return v * (dice < 8 ? 0x1p-112f : 0x1p-126f);
    if (kind == HUGE_ONES)
        return v * 0x1p55f;
    return kind == ZEROS && dice < 14 ? 0.0f : v * 0.02f;
}

static void check(qt_rng *rng, const a_case *c, unsigned number)
{
    const uint32_t n = (uint32_t)c->n, elems = (uint32_t)c->rows * n;
    const uint32_t block = c->form.block_elems ? c->form.block_elems : n;
    const uint32_t blocks = (elems + block - 1) / block, groups = blocks / QC_NESTED_BLOCK + 1;
    float *x = qt_alloc(elems, 4), *d = qt_alloc(n, 4);
    float *absmax = qt_alloc(blocks, 4), *nested = qt_alloc(groups, 4);
    uint8_t *codes = qt_alloc(blocks, 1);
    char what[80];
    (void)snprintf(what, sizeof what, "case %u", number);
    for (uint32_t i = 0; i < elems; i++)
        x[i] = c->x >= HARD ? (float)qd_value(rng, (qd_kind)(c->x - HARD), QC_DTYPE_F32, i)
                            : value_of_kind(rng, c->x);
    for (uint32_t i = n; c->x == MIRRORED && i < elems; i++)
        if (i / n % 2 == 1)
            x[i] = -x[i - n];
    if (c->x == ZEROS) /* whole blocks */
        memset(x, 0, (elems < 4 * block ? elems / 2 : 2 * block) * 4);
    for (uint32_t k = 0; k < n; k++)
        d[k] = qt_below(rng, 9) == 0 ? 0.0f : (float)(qt_below(rng, 1000) + 1) / 37.0f;

    /* The truth: scales before double quantization, then after. */
    struct qc_feedback f = {
        .lanes = &qc_feedback_lanes_scalar, .isa = QC_ISA_SCALAR, .threads = 1, .n = n};
    qc_feedback_out out = {.absmax = absmax, .absmax_codes = codes, .nested_absmax = nested};
    qc_form plain = c->form;
    plain.nested = 0;
    QD_OK(qc_feedback_scales(&f, &plain, x, c->weighed ? d : NULL, c->rows, &out, &qd.err));
    qc_cuda_feedback gpu = {.tools = {NULL, NULL, qd.stream}, .n = n};
    qd_buffer dx = qd_new_from(x, (size_t)elems * 4, 0), dd = qd_new_from(d, n * 4, 0);
    qd_buffer da = qd_new((size_t)blocks * 4, 0);
    qc_cuda_feedback_scales scales = {.form = &plain,
                                      .x = dx.p,
                                      .weights = c->weighed ? dd.p : NULL,
                                      .rows = c->rows,
                                      .absmax = da.p};
    QD_OK(qc_cuda_feedback_find(&gpu, &scales, &qd.err));
    float *found = qd_take(&da, what);
    qd_same(found, absmax, (size_t)blocks * 4, what);
    if (c->form.nested) {
        /* As the weight's driver does: the host nests what was found. */
        const qc_quant_ops *ops = qc_quant_ops_for(QC_ISA_SCALAR);
        const float offset = c->form.ops->signed_scales ? 0.0f : qc_nested_offset(found, blocks);
        uint8_t *host_codes = qt_alloc(blocks, 1);
        float *host_nested = qt_alloc(groups, 4);
        for (uint32_t b = 0; b < blocks; b += QC_NESTED_BLOCK)
            ops->nested_quantize(found + b,
                                 blocks - b < QC_NESTED_BLOCK ? blocks - b : QC_NESTED_BLOCK,
                                 offset, host_codes + b, host_nested + b / QC_NESTED_BLOCK);
        qd_buffer ds = qd_new_from(found, (size_t)blocks * 4, 0),
                  dc = qd_new_from(host_codes, blocks, 0);
        qd_buffer dn = qd_new_from(host_nested, groups * 4, 0);
        qd_buffer dm = qd_new_from(qc_dynamic_map, 1024, 0);
        scales.form = &c->form;
        scales.absmax = ds.p;
        scales.codes = dc.p;
        scales.nested_absmax = dn.p;
        scales.map = dm.p;
        scales.offset = offset;
        QD_OK(qc_cuda_feedback_nest(&gpu, &scales, &qd.err));
        QD_OK(qc_feedback_scales(&f, &c->form, x, c->weighed ? d : NULL, c->rows, &out, &qd.err));
        uint8_t *got_codes = qd_take(&dc, what);
        float *got = qd_take(&ds, what);
        QT_CHECK(out.nested_offset == offset, "%s: offset", what);
        qd_same(host_nested, nested, (groups - (blocks % QC_NESTED_BLOCK == 0)) * 4, what);
        qd_same(got_codes, codes, blocks, what);
        qd_same(got, absmax, (size_t)blocks * 4, what);
        qd_drop(&dn);
        qd_drop(&dm);
        free(got);
        free(got_codes);
        free(host_codes);
        free(host_nested);
    }
    free(found);
    qd_drop(&dx);
    qd_drop(&dd);
    free(x);
    free(d);
    free(absmax);
    free(nested);
    free(codes);
}

TEST(scales_are_the_cpus)
{
    qt_rng rng = qt_rng_start("gpu scales");
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        check(&rng, &cases[i], i);
}

/* Thresholds, ties, subnormals, the largest floats, any exponent; shapes by chance. */
TEST(hard_values)
{
    static const struct {
        const qc_form_ops *ops;
        int by_row, nested;
        qc_dtype scale_dtype;
    } kinds[] = {
        {&qc_form_nf4, 0, 1, QC_DTYPE_F32},       {&qc_form_int8_blocks, 0, 1, QC_DTYPE_F32},
        {&qc_form_int8_rows, 1, 0, QC_DTYPE_F32}, {&qc_form_w2a16, 0, 0, QC_DTYPE_F16},
        {&qc_form_w3a16, 1, 0, QC_DTYPE_F32},     {&qc_form_w4a16, 0, 0, QC_DTYPE_F16},
        {&qc_form_w5a16, 0, 0, QC_DTYPE_BF16},    {&qc_form_w6a16, 0, 0, QC_DTYPE_F16},
        {&qc_form_w7a16, 1, 0, QC_DTYPE_F16},     {&qc_form_w8a16, 0, 0, QC_DTYPE_BF16},
        {&qc_form_w8a8, 1, 0, QC_DTYPE_F16}};
    enum { COUNT = sizeof kinds / sizeof *kinds };
    qt_rng rng = qt_rng_start("gpu scales of hard values");
    for (unsigned i = 0; i < COUNT * QD_KINDS; i++) {
        const unsigned f = i % COUNT;
        const a_case c = {{.ops = kinds[f].ops,
                           .block_elems = kinds[f].by_row ? 0 : 32u << qt_below(&rng, 3),
                           .nested = kinds[f].nested,
                           .scale_dtype = kinds[f].scale_dtype},
                          6 + qt_below(&rng, 7),
                          1 + qt_below(&rng, 200),
                          (values)(HARD + i / COUNT),
                          (int)(qt_below(&rng, 4) > 0)};
        check(&rng, &c, 100 + i);
    }
}

TEST(nothing_to_do)
{
    const qc_form form = {.ops = &qc_form_nf4, .block_elems = 64, .nested = 1};
    qc_cuda_feedback gpu = {.tools = {NULL, NULL, qd.stream}, .n = 64};
    const qc_cuda_feedback_scales none = {.form = &form};
    QD_OK(qc_cuda_feedback_find(&gpu, &none, &qd.err));
    QD_OK(qc_cuda_feedback_nest(&gpu, &none, &qd.err));
}

#ifdef QC_CUDA_SHIM
/* A grid of one block or two goes round: what it shares is written again. */
TEST(grids_go_round)
{
    for (unsigned grid = 1; grid < 3; grid++) {
        qc_shim_set_grid(grid);
        scales_are_the_cpus(state);
    }
    qc_shim_set_grid(0);
}
#endif

int main(void)
{
    qd_start();
    const int failed = test_run_all(NULL);
    qd_end();
    return failed != 0;
}

/* Every table of the scale search against the scalar one, bit for bit: codes, scales, sums, what is
 * reported about bad elements, and that nothing is written past the end of an output; and that
 * groups can be searched alone, in any order. Exit code 77 where there is only the scalar table. */
#include "tests/fixtures/table_outputs.h"

#include "quant/scale_search.h"

#define KINDS 9u

typedef struct {
    output codes, absmax, absmax_codes, nested_absmax;
} result;

static const qc_search_ops *tables[QC_ISA_COUNT];
static unsigned table_count;
static const uint32_t block_sizes[8] = {32, 64, 128, 256, 512, 1024, 2048, 4096};

static result result_new(const qc_form *form, uint64_t n)
{
    const uint64_t blocks = qc_form_scales(form, n);
    const uint64_t groups = (blocks + QC_NESTED_BLOCK - 1) / QC_NESTED_BLOCK;
    return (result){output_new(qc_form_code_bytes(form, n)), output_new(blocks * 4),
                    output_new(blocks), output_new(groups * 4)};
}

/* compare 0: only what lies past the ends counts */
static void result_check_and_free(result *r, int compare, const char *where)
{
    output_check(&r->absmax, compare, "absmax", where);
    output_check(&r->codes, compare, "codes", where);
    output_check(&r->absmax_codes, compare, "absmax_codes", where);
    output_check(&r->nested_absmax, compare, "nested_absmax", where);
    output_free(&r->codes);
    output_free(&r->absmax);
    output_free(&r->absmax_codes);
    output_free(&r->nested_absmax);
}

static void *scratch_new(void)
{
    void *p = aligned_alloc(64, qc_search_scratch_bytes());
    QT_CHECK(p != NULL, "out of memory");
    return p;
}

/* n elements that begin at element `first`, with which a group begins. */
static qc_piece_sums search_part(const qc_search_ops *ops, const qc_form *form,
                                 qc_search_effort effort, const void *src, qc_dtype dtype,
                                 uint64_t first, uint64_t n, const result *r, int side)
{
    qc_piece_sums sums;
    uint64_t block = qc_form_scales(form, first);
    qc_search_out out = {(uint8_t *)at(&r->codes, side) + qc_form_code_bytes(form, first),
                         (float *)at(&r->absmax, side) + block,
                         (uint8_t *)at(&r->absmax_codes, side) + block,
                         (float *)at(&r->nested_absmax, side) + block / QC_NESTED_BLOCK};
    void *scratch = scratch_new();
    ops->blocks(form, effort, (const unsigned char *)src + first * qt_size(dtype), dtype, n, &out,
                scratch, &sums);
    free(scratch);
    return sums;
}

/* Elements of one kind; block: where a kind is about blocks. */
static double element(qt_rng *rng, unsigned kind, uint64_t i, uint32_t block, double unit)
{
    const uint64_t b = i / block;
    double x = (double)qt_randn(rng) * unit;
    if (kind == 1) /* blocks of zeros between others, some of one element */
        return b % 3 == 0 ? 0.0 : b % 3 == 1 && i % block ? 0.0 : x;
    if (kind == 2) /* heavy tails: steep exponents */
        return x * exp2((double)(qt_below(rng, 24)) - 12.0);
    if (kind == 3) /* scales over the whole range of float, subnormals too */
        return x / unit * exp2((double)(b * 37 % 270) - 146.0);
    if (kind == 4) /* near the largest */
        return (x > 0 ? 1.0 : -1.0) * (double)FLT_MAX * (i % 7 ? qt_uniform(rng) : 1.0);
    if (kind == 5) /* values of NF4 and the middles between */
        return ((double)qc_nf4_code[qt_below(rng, 16)] + (double)qc_nf4_code[qt_below(rng, 16)]) *
               0.5 * unit;
    if (kind == 6) /* all alike */
        return b % 2 ? unit : -unit;
    if (kind == 7) /* levels of int8 and the middles between */
        return (double)((int)qt_below(rng, 509) - 254) / 254.0 * unit;
    return x;
}

static unsigned char *make_source(qt_rng *rng, unsigned kind, qc_dtype dtype, uint64_t n,
                                  uint32_t block, unsigned shift, unsigned char **whole)
{
    const double most = dtype == QC_DTYPE_F16    ? 65504.0
                        : dtype == QC_DTYPE_BF16 ? 0x1.fep127
                                                 : (double)FLT_MAX;
    const double unit = exp2((double)qt_below(rng, 13) - 8.0);
    *whole = qt_alloc(n * qt_size(dtype) + 8, 1);
    unsigned char *src = *whole + shift;
    for (uint64_t i = 0; i < n; i++) {
        double x = element(rng, kind, i, block, unit);
        x = x > most ? most : x < -most ? -most : x;
        qt_put(src, dtype, i, x);
    }
    if (kind == 8) /* what has no code */
        for (unsigned k = 0; k < 3; k++)
            qt_put(src, dtype, qt_below(rng, n),
                   k == 0   ? (double)NAN
                   : k == 1 ? (double)-INFINITY
                            : 1e300);
    return src;
}

static void compare(const qc_search_ops *ops, const qc_form *form, qc_search_effort effort,
                    const void *src, qc_dtype dtype, uint64_t n, unsigned kind)
{
    char where[160];
    snprintf(where, sizeof where,
             "%s %s block %u nested %d offset %a effort %d dtype %d n %" PRIu64 " kind %u",
             qc_isa_name(ops->isa), form->ops->name, form->block_elems, form->nested,
             (double)form->offset, (int)effort, (int)dtype, n, kind);
    result r = result_new(form, n);
    qc_piece_sums sums[SIDES];
    for (int side = 0; side < SIDES; side++)
        sums[side] = search_part(side ? ops : tables[0], form, effort, src, dtype, 0, n, &r, side);
    result_check_and_free(&r, sums_check(sums, where), where);
}

TEST(blocks_are_equal)
{
    qt_rng rng = qt_rng_start("blocks_are_equal");
    for (unsigned round = 0; round < 330; round++) {
        const unsigned kind = round % KINDS;
        const qc_dtype dtype = qt_float_types[qt_below(&rng, 4)];
        qc_form form = {
            .ops = qt_below(&rng, 2) ? &qc_form_nf4 : &qc_form_int8_blocks,
            .block_elems = block_sizes[qt_below(&rng, round % 8 ? 3 : 8)],
            .nested = qt_below(&rng, 4) > 0,
        };
        const qc_search_effort effort = qt_below(&rng, 6) ? QC_SEARCH_ONCE : QC_SEARCH_REFIT;
        uint64_t n = 1 + qt_below(&rng, form.block_elems * (round % 5 ? 20u : 300u));
        n = n > 40000 ? 40000 : n;
        unsigned char *whole;
        void *src = make_source(&rng, kind, dtype, n, form.block_elems, (unsigned)qt_below(&rng, 3),
                                &whole);
        if (form.nested && qt_below(&rng, 4))
            form.offset = form.ops == &qc_form_nf4 && qt_below(&rng, 4)
                              ? 0.0f
                              : qc_f32_from_bf16(qc_bf16_from_f64(fabs(qt_get(src, dtype, 0))));
        form.offset = isfinite(form.offset) ? form.offset : 1.0f;
        for (unsigned t = 1; t < table_count; t++)
            compare(tables[t], &form, effort, src, dtype, n, kind);
        free(whole);
    }
}

TEST(integers_are_equal)
{
    static const qc_form_ops *const forms[] = {&qc_form_w4a16, &qc_form_w8a16, &qc_form_w8a8,
                                               &qc_form_w2a16, &qc_form_w3a16, &qc_form_w5a16,
                                               &qc_form_w6a16, &qc_form_w7a16};
    enum { FORMS = sizeof forms / sizeof *forms };
    static const qc_dtype scale_types[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    qt_rng rng = qt_rng_start("integers_are_equal");
    for (unsigned round = 0; round < 640; round++) {
        const unsigned kind = round % KINDS;
        const qc_form_ops *ops = forms[qt_below(&rng, FORMS)];
        const uint32_t odd = ops->words ? (uint32_t)qt_below(&rng, 2) : 0;
        const qc_dtype dtype = qt_float_types[qt_below(&rng, 4)];
        const int by_rows = qt_below(&rng, 3) == 0;
        const uint32_t group = by_rows
                                   ? 2 + 2 * (uint32_t)qt_below(&rng, round % 4 ? 99 : 1500) + odd
                                   : block_sizes[qt_below(&rng, round % 8 ? 4 : 8)];
        const qc_form form = {.ops = ops,
                              .block_elems = by_rows ? 0 : group,
                              .cols = group,
                              .scale_dtype = scale_types[qt_below(&rng, 3)]};
        const uint64_t n = group * (1 + qt_below(&rng, round % 5 ? 20u : 40000 / group));
        unsigned char *whole;
        void *src = make_source(&rng, kind, dtype, n, group, (unsigned)qt_below(&rng, 3), &whole);
        for (unsigned t = 1; t < table_count; t++)
            compare(tables[t], &form, QC_SEARCH_ONCE, src, dtype, n, kind);
        free(whole);
    }
}

TEST(groups_stand_alone)
{
    qt_rng rng = qt_rng_start("groups_stand_alone");
    const qc_form form = {.ops = &qc_form_nf4, .block_elems = 32, .nested = 1};
    const uint64_t group = 32 * QC_NESTED_BLOCK, n = 3 * group + 77;
    unsigned char *whole;
    void *src = make_source(&rng, 0, QC_DTYPE_BF16, n, 32, 0, &whole);
    for (unsigned t = 0; t < table_count; t++) {
        result r = result_new(&form, n);
        (void)search_part(tables[t], &form, QC_SEARCH_ONCE, src, QC_DTYPE_BF16, 0, n, &r, 0);
        for (uint64_t g = 4; g-- > 0;)
            (void)search_part(tables[t], &form, QC_SEARCH_ONCE, src, QC_DTYPE_BF16, g * group,
                              g < 3 ? group : n - 3 * group, &r, 1);
        result_check_and_free(&r, 1, "groups alone");
    }
    free(whole);
}

static void compare_rows(const qc_search_ops *ops, const void *src, qc_dtype dtype, uint64_t rows,
                         uint64_t cols, unsigned kind)
{
    char where[96];
    snprintf(where, sizeof where, "%s rows %" PRIu64 " cols %" PRIu64 " dtype %d kind %u",
             qc_isa_name(ops->isa), rows, cols, (int)dtype, kind);
    output codes = output_new(rows * cols), scb = output_new(rows * 4);
    qc_piece_sums sums[SIDES];
    void *scratch = scratch_new();
    const qc_form form = {.ops = &qc_form_int8_rows, .cols = cols};
    for (int side = 0; side < SIDES; side++) {
        const qc_search_out out = {.codes = at(&codes, side), .absmax = at(&scb, side)};
        (side ? ops : tables[0])
            ->blocks(&form, QC_SEARCH_ONCE, src, dtype, rows * cols, &out, scratch, &sums[side]);
    }
    const int good = sums_check(sums, where);
    output_check(&scb, good, "scb", where);
    output_check(&codes, good, "codes", where);
    output_free(&codes);
    output_free(&scb);
    free(scratch);
}

TEST(rows_are_equal)
{
    qt_rng rng = qt_rng_start("rows_are_equal");
    for (unsigned round = 0; round < 120; round++) {
        const unsigned kind = round % KINDS;
        const qc_dtype dtype = qt_float_types[qt_below(&rng, 4)];
        const uint64_t cols = 1 + qt_below(&rng, round % 3 ? 200 : 2500);
        const uint64_t rows = 1 + qt_below(&rng, 6);
        unsigned char *whole;
        void *src = make_source(&rng, kind, dtype, rows * cols, (uint32_t)cols,
                                (unsigned)qt_below(&rng, 3), &whole);
        for (unsigned t = 1; t < table_count; t++)
            compare_rows(tables[t], src, dtype, rows, cols, kind);
        free(whole);
    }
}

int main(void)
{
    for (unsigned isa = 0; isa < QC_ISA_COUNT; isa++)
        if (qc_isa_available((qc_isa)isa) && qc_search_ops_for((qc_isa)isa)->isa == (qc_isa)isa)
            tables[table_count++] = qc_search_ops_for((qc_isa)isa);
    if (table_count < 2) {
        puts("no vector table on this machine");
        return 77;
    }
    return test_run_all(NULL);
}

/* What the vector tables rest on, tried where it could break: every bfloat16 under every mantissa
 * of absmax, the neighbours of every threshold of the dynamic map, and long runs of blocks in which
 * some blocks are not for vectors. */
#include "tests/fixtures/quant_testing.h"

#include "quant/quant_internal.h"

#define GROUP 16u /* twice the blocks that the AVX2 code treats together */

static const qc_quant_ops *tables[QC_ISA_COUNT];
static unsigned table_count;

typedef struct {
    uint8_t *codes;
    float *absmax;
    qc_block_error *errors;
    qc_piece_sums sums;
} result;

static result result_new(uint64_t n)
{
    return (result){qt_alloc(n / 2, 1),
                    qt_alloc(n / 64, sizeof(float)),
                    qt_alloc(n / 64, sizeof(qc_block_error)),
                    {.bad = QC_BAD_NONE}};
}

static void result_free(result *r)
{
    free(r->codes);
    free(r->absmax);
    free(r->errors);
}

static void quantize(const qc_quant_ops *ops, const uint16_t *src, uint64_t n, int errors,
                     result *r)
{
    ops->nf4_quantize(src, QC_DTYPE_BF16, n, 64, r->codes, r->absmax, errors ? r->errors : NULL,
                      &r->sums);
}

static void check_equal(const result *a, const result *b, uint64_t n, int errors, const char *where)
{
    QT_CHECK(a->sums.bad == b->sums.bad && a->sums.bad_index == b->sums.bad_index,
             "%s: bad %d at %" PRIu64 ", expected %d at %" PRIu64, where, (int)b->sums.bad,
             b->sums.bad_index, (int)a->sums.bad, a->sums.bad_index);
    if (a->sums.bad != QC_BAD_NONE)
        return;
    for (uint64_t i = 0; i < n / 2; i++)
        QT_CHECK(a->codes[i] == b->codes[i], "%s: byte %" PRIu64 " is %02x, expected %02x", where,
                 i, b->codes[i], a->codes[i]);
    QT_CHECK(memcmp(a->absmax, b->absmax, n / 64 * sizeof(float)) == 0, "%s: absmax", where);
    if (!errors)
        return;
    QT_CHECK(memcmp(a->errors, b->errors, n / 64 * sizeof(qc_block_error)) == 0, "%s: errors",
             where);
    QT_CHECK(qc_f64_bits(a->sums.sum_ee) == qc_f64_bits(b->sums.sum_ee) &&
                 qc_f64_bits(a->sums.sum_xx) == qc_f64_bits(b->sums.sum_xx),
             "%s: sums %a, %a, expected %a, %a", where, b->sums.sum_ee, b->sums.sum_xx,
             a->sums.sum_ee, a->sums.sum_xx);
}

/* Blocks of absmax and 63 others, so that every bfloat16 up to absmax is in one of them. */
TEST(test_every_bf16)
{
    static const unsigned exponents[] = {0, 1, 20, 26, 27, 28, 127, 251, 252, 253, 254};
    uint16_t *src = qt_alloc(66000 * 64 / 63 + 4096, sizeof *src);
    result a = result_new(70000), b = result_new(70000);
    for (unsigned e = 0; e < sizeof exponents / sizeof *exponents; e++) {
        for (unsigned m = 0; m < 128; m++) {
            const uint16_t absmax = (uint16_t)(exponents[e] << 7 | m);
            /* the distance that matters is 2^-6 of absmax; of the rest a few */
            const unsigned from = absmax > 1200 ? absmax - 1200u : 0;
            uint64_t n = 0;
            for (unsigned x = 0; x <= absmax; x += x < from ? 97 : 1) {
                for (unsigned sign = 0; sign < 2; sign++) {
                    if (n % 64 == (m + n / 64) % 64)
                        src[n++] = (uint16_t)(absmax | (m & 1u) << 15);
                    src[n++] = (uint16_t)(x | sign << 15);
                }
            }
            while (n % 64 != 0)
                src[n++] = absmax;
            quantize(tables[0], src, n, 0, &a);
            for (unsigned t = 1; t < table_count; t++) {
                char where[64];
                snprintf(where, sizeof where, "%s, absmax %04x", qc_isa_name(tables[t]->isa),
                         absmax);
                quantize(tables[t], src, n, 0, &b);
                check_equal(&a, &b, n, 0, where);
            }
        }
    }
    result_free(&a);
    result_free(&b);
    free(src);
}

/* Groups with tiny, huge, all-zero and bad blocks here and there. */
TEST(test_odd_blocks_in_runs)
{
    qt_rng rng = qt_rng_start("odd blocks");
    const uint64_t most = 64 * GROUP * 64;
    uint16_t *src = qt_alloc(most, sizeof *src);
    result a = result_new(most), b = result_new(most);
    for (unsigned round = 0; round < 400; round++) {
        const uint64_t blocks = 1 + qt_below(&rng, round % 2 ? 40 : most / 64);
        const unsigned odds = (unsigned)qt_below(&rng, 5);
        for (uint64_t i = 0; i < blocks * 64; i++)
            src[i] = (uint16_t)(0x3b80u + qt_below(&rng, 0x180) + (qt_next(&rng) & 0x8000u));
        for (unsigned k = 0; k < odds; k++) {
            static const uint16_t values[] = {0, 0x8000, 1, 0x0d80, 0x7e80, 0x7f7f, 0xff7f, 0x0080};
            uint16_t *block = src + qt_below(&rng, blocks) * 64;
            uint16_t value = values[qt_below(&rng, 8)];
            for (unsigned i = 0; i < 64; i++)
                block[i] = i % 3 ? value : 0;
        }
        if (round % 5 == 0)
            src[qt_below(&rng, blocks * 64)] = round % 2 ? 0x7f80 : 0xffc1;
        const int errors = round % 3 != 0;
        quantize(tables[0], src, blocks * 64, errors, &a);
        for (unsigned t = 1; t < table_count; t++) {
            quantize(tables[t], src, blocks * 64, errors, &b);
            check_equal(&a, &b, blocks * 64, errors, qc_isa_name(tables[t]->isa));
        }
    }
    result_free(&a);
    result_free(&b);
    free(src);
}

/* Each group of 256: 1.0, which makes the inverse 1, and floats around a threshold. */
TEST(test_nested_thresholds)
{
    enum { GROUPS = 255 };
    float *d = qt_alloc(GROUPS * QC_NESTED_BLOCK, sizeof *d);
    uint8_t *a = qt_alloc(GROUPS * QC_NESTED_BLOCK, 1), *b = qt_alloc(GROUPS * QC_NESTED_BLOCK, 1);
    float *na = qt_alloc(GROUPS, sizeof *na), *nb = qt_alloc(GROUPS, sizeof *nb);
    for (unsigned t = 0; t < GROUPS; t++) {
        uint32_t bits = qc_f32_bits(qc_dynamic_threshold[t]);
        for (unsigned i = 0; i < QC_NESTED_BLOCK; i++) {
            /* steps of 1, then of a bucket's width */
            uint32_t step = i < 128 ? i - 64 : (i - 192) << 15;
            float x = qc_f32_of_bits(bits + step);
            d[t * QC_NESTED_BLOCK + i] = fabsf(x) <= 1.0f ? x : 0.0f;
        }
        d[t * QC_NESTED_BLOCK + t] = t % 2 ? 1.0f : -1.0f;
    }
    tables[0]->nested_quantize(d, GROUPS * QC_NESTED_BLOCK, 0.0f, a, na);
    for (unsigned t = 1; t < table_count; t++) {
        tables[t]->nested_quantize(d, GROUPS * QC_NESTED_BLOCK, 0.0f, b, nb);
        for (unsigned i = 0; i < GROUPS * QC_NESTED_BLOCK; i++)
            QT_CHECK(a[i] == b[i], "%s: %a has code %u, expected %u", qc_isa_name(tables[t]->isa),
                     (double)d[i], b[i], a[i]);
        assert_memory_equal(na, nb, GROUPS * sizeof *na);
    }
    free(d);
    free(a);
    free(b);
    free(na);
    free(nb);
}

int main(void)
{
    for (int isa = 0; isa < QC_ISA_COUNT; isa++)
        if (qt_has_table((qc_isa)isa))
            tables[table_count++] = qc_quant_ops_for((qc_isa)isa);
    if (table_count < 2)
        return 77;
    return test_run_all(NULL);
}

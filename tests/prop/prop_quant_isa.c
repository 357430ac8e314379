/* Every table of this machine against the scalar one, bit for bit: codes, scales, error sums, what
 * is reported about bad elements, and that nothing is written past the end of an output. And what
 * the vector tables rest on, tried where it could break: every bfloat16 under every mantissa of
 * absmax, the neighbours of every threshold of the dynamic map, and long runs of blocks in which
 * some blocks are not for vectors.
 * Exit code 77 where there is only the scalar table. */
#include "tests/fixtures/table_outputs.h"

#include "quant/quant_internal.h"

static const qc_quant_ops *tables[QC_ISA_COUNT];
static unsigned table_count;
static const qc_quant_ops *ops[SIDES];
static const uint32_t block_sizes[8] = {32, 64, 128, 256, 512, 1024, 2048, 4096};

/* ---- one comparison per function ------------------------------------------------------------- */

static void compare_blocks(int nf4, const void *src, qc_dtype dtype, uint64_t n, uint32_t block,
                           int with_errors)
{
    char where[96];
    size_t blocks = (size_t)(n / block + (n % block != 0));
    output codes = output_new(nf4 ? (n + 1) / 2 : n);
    output absmax = output_new(blocks * sizeof(float));
    output errors = output_new(with_errors ? blocks * sizeof(qc_block_error) : 0);
    qc_piece_sums sums[SIDES];
    snprintf(where, sizeof where, "%s %s n %" PRIu64 " block %u%s", nf4 ? "nf4" : "int8 blocks",
             qc_dtype_name(dtype), n, block, with_errors ? " with errors" : "");
    for (int side = 0; side < SIDES; side++) {
        qc_block_error *e = with_errors ? at(&errors, side) : NULL;
        memset(&sums[side], 0x5a, sizeof sums[side]);
        if (nf4)
            ops[side]->nf4_quantize(src, dtype, n, block, at(&codes, side), at(&absmax, side), e,
                                    &sums[side]);
        else
            ops[side]->int8_blocks_quantize(src, dtype, n, block, at(&codes, side),
                                            at(&absmax, side), e, &sums[side]);
    }
    int good = sums_check(sums, where);
    output_check(&absmax, good, "absmax", where);
    output_check(&codes, good, "codes", where);
    output_check(&errors, good, "block errors", where);
    output_free(&codes);
    output_free(&absmax);
    output_free(&errors);
}

static void compare_rows(const void *src, qc_dtype dtype, uint64_t rows, uint64_t cols)
{
    char where[96];
    output codes = output_new(rows * cols);
    output scb = output_new(rows * sizeof(float));
    qc_piece_sums sums[SIDES];
    snprintf(where, sizeof where, "int8 rows %s %" PRIu64 " x %" PRIu64, qc_dtype_name(dtype), rows,
             cols);
    for (int side = 0; side < SIDES; side++) {
        memset(&sums[side], 0x5a, sizeof sums[side]);
        ops[side]->int8_rows_quantize(src, dtype, rows, cols, at(&codes, side), at(&scb, side),
                                      &sums[side]);
    }
    int good = sums_check(sums, where);
    output_check(&scb, good, "scb", where);
    output_check(&codes, good, "codes", where);
    output_free(&codes);
    output_free(&scb);
}

#define INT_KINDS 24u /* 2 to 8 bits with a bias, 8 without, in scales of each type */

static qc_int_codes int_kind(unsigned k)
{
    static const qc_dtype scales[] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    const unsigned bits = k / 3 < 7 ? 2 + k / 3 : 8;
    return (qc_int_codes){
        .bits = bits, .bias = k / 3 < 7 ? 1u << (bits - 1) : 0, .scale_dtype = scales[k % 3]};
}

/* Words for groups that do not fill them, of the widths that have such rows. */
static uint64_t stride_of(const qc_int_codes *how, uint64_t group)
{
    return how->bits % 4 == 0 ? 0 : (group * how->bits + 31) / 32 * 4;
}

/* Quantizes whole groups as integers of one kind and reads them back. */
static void compare_ints(qc_int_codes given, const void *src, qc_dtype dtype, uint64_t groups,
                         uint64_t group)
{
    static const qc_dtype targets[3] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    char where[128];
    const uint64_t n = groups * group;
    const qc_int_codes *how = &given;
    given.stride = stride_of(how, group);
    output codes = output_new(groups * qc_int_stride(how, group));
    output scales = output_new(groups * sizeof(float));
    qc_piece_sums sums[SIDES];
    snprintf(where, sizeof where, "int%u of %s, scales %s, %" PRIu64 " x %" PRIu64, how->bits,
             qc_dtype_name(dtype), qc_dtype_name(how->scale_dtype), groups, group);
    for (int side = 0; side < SIDES; side++) {
        memset(&sums[side], 0x5a, sizeof sums[side]);
        ops[side]->int_quantize(how, src, dtype, n, group, at(&codes, side), at(&scales, side),
                                &sums[side]);
    }
    int good = sums_check(sums, where);
    output_check(&scales, good, "scales", where);
    output_check(&codes, good, "codes", where);
    for (unsigned t = 0; good && t < 3; t++) {
        output dst = output_new(n * qt_size(targets[t]));
        uint64_t overflow[SIDES] = {1, 2};
        for (int side = 0; side < SIDES; side++)
            ops[side]->int_dequantize(how, at(&codes, side), at(&scales, side), n, group,
                                      at(&dst, side), targets[t], &overflow[side]);
        output_check(&dst, 1, "dst", where);
        QT_CHECK(overflow[0] == overflow[1], "%s: overflow at %" PRIu64 ", scalar %" PRIu64, where,
                 overflow[1], overflow[0]);
        output_free(&dst);
    }
    output_free(&codes);
    output_free(&scales);
}

/* Any codes and scales. */
static void compare_int_dequantize(const qc_int_codes *how, const void *codes, const float *scales,
                                   uint64_t n, uint64_t group, qc_dtype to, unsigned shift)
{
    char where[96];
    output dst = output_new(n * qt_size(to) + shift);
    uint64_t overflow[SIDES] = {1, 2};
    snprintf(where, sizeof where, "int%u to %s n %" PRIu64 " group %" PRIu64, how->bits,
             qc_dtype_name(to), n, group);
    for (int side = 0; side < SIDES; side++)
        ops[side]->int_dequantize(how, codes, scales, n, group, dst.bytes[side] + shift, to,
                                  &overflow[side]);
    output_check(&dst, 1, "dst", where);
    QT_CHECK(overflow[0] == overflow[1], "%s: overflow at %" PRIu64 ", scalar %" PRIu64, where,
             overflow[1], overflow[0]);
    output_free(&dst);
}

static void compare_cast(const void *src, qc_dtype from, uint64_t n, qc_dtype to, unsigned shift)
{
    char where[96];
    output dst = output_new(n * qt_size(to) + shift);
    uint64_t overflow[SIDES] = {1, 2};
    snprintf(where, sizeof where, "cast %s to %s n %" PRIu64, qc_dtype_name(from),
             qc_dtype_name(to), n);
    for (int side = 0; side < SIDES; side++)
        ops[side]->cast(src, from, n, dst.bytes[side] + shift, to, &overflow[side]);
    output_check(&dst, 1, "dst", where);
    QT_CHECK(n == 0 || overflow[0] == overflow[1], "%s: overflow at %" PRIu64 ", scalar %" PRIu64,
             where, overflow[1], overflow[0]);
    output_free(&dst);
}

typedef enum { FROM_NF4, FROM_INT8_BLOCKS, FROM_INT8_ROWS } dequantizer;

/* block: columns for FROM_INT8_ROWS, which then needs n to be a multiple of it */
static void compare_dequantize(dequantizer kind, const void *codes, const float *scales,
                               const float *map, uint64_t n, uint32_t block, qc_dtype to,
                               unsigned shift)
{
    static const char *const names[] = {"nf4", "int8 blocks", "int8 rows"};
    char where[96];
    output dst = output_new(n * qt_size(to) + shift);
    uint64_t overflow[SIDES] = {1, 2};
    snprintf(where, sizeof where, "%s to %s n %" PRIu64 " block %u", names[kind], qc_dtype_name(to),
             n, block);
    for (int side = 0; side < SIDES; side++) {
        unsigned char *out = dst.bytes[side] + shift;
        if (kind == FROM_NF4)
            ops[side]->nf4_dequantize(codes, scales, map, n, block, out, to, &overflow[side]);
        else if (kind == FROM_INT8_BLOCKS)
            ops[side]->int8_blocks_dequantize(codes, scales, n, block, out, to, &overflow[side]);
        else
            ops[side]->int8_rows_dequantize(codes, scales, n / block, block, out, to,
                                            &overflow[side]);
    }
    output_check(&dst, 1, "dst", where);
    QT_CHECK(n == 0 || overflow[0] == overflow[1], "%s: overflow at %" PRIu64 ", scalar %" PRIu64,
             where, overflow[1], overflow[0]);
    output_free(&dst);
}

static void compare_nested(const float *absmax, uint64_t n, float offset)
{
    char where[96];
    size_t groups = (size_t)(n / QC_NESTED_BLOCK + (n % QC_NESTED_BLOCK != 0));
    output codes = output_new(n), nested = output_new(groups * sizeof(float));
    output restored = output_new(n * sizeof(float));
    snprintf(where, sizeof where, "nested n %" PRIu64 " offset %a", n, (double)offset);
    for (int side = 0; side < SIDES; side++) {
        ops[side]->nested_quantize(absmax, n, offset, at(&codes, side), at(&nested, side));
        ops[side]->nested_dequantize(at(&codes, side), at(&nested, side), qc_dynamic_map, n,
                                     QC_NESTED_BLOCK, offset, at(&restored, side));
    }
    output_check(&nested, 1, "nested absmax", where);
    output_check(&codes, 1, "codes", where);
    output_check(&restored, 1, "restored absmax", where);
    output_free(&codes);
    output_free(&nested);
    output_free(&restored);
}

static void compare_quantizers(const void *src, qc_dtype dtype, uint64_t n, uint32_t block)
{
    for (int nf4 = 0; nf4 < 2; nf4++) {
        compare_blocks(nf4, src, dtype, n, block, 1);
        compare_blocks(nf4, src, dtype, n, block, 0);
    }
}

/* ---- sources --------------------------------------------------------------------------------- */

typedef enum {
    WEIGHTS,    /* normal, like a layer */
    ANY_BITS,   /* finite bit patterns, every exponent */
    THRESHOLDS, /* absmax a power of two, elements on and beside the NF4 thresholds */
    HALVES,     /* absmax 127 * 2^k, elements on and beside odd multiples of 2^(k-1) */
    ZEROS,      /* mostly zeros of either sign */
    TINY,       /* around and below the smallest normal number */
    HUGE,       /* near the largest number */
    OUTLIER,    /* one element far above the rest */
    DIRTY,      /* any bits, now and then NaN or infinity */
    KINDS
} kind;

static double any_finite(qt_rng *rng, qc_dtype dtype)
{
    if (dtype == QC_DTYPE_F64) /* mostly with more bits than float has */
        return (double)qt_any_float(rng) * (1.0 + qt_uniform(rng) * 0x1p-20) * 0.5;
    for (;;) {
        uint64_t bits = qt_next(rng);
        double x = qt_get(&bits, dtype, 0);
        if (isfinite(x))
            return x;
    }
}

static double element(qt_rng *rng, kind k, qc_dtype dtype, int exponent, uint64_t i)
{
    double largest = dtype == QC_DTYPE_F16 ? 65504.0 : 0x1.fep127;
    switch (k) {
    case WEIGHTS:
        return (double)qt_randn(rng) * 0.02;
    case THRESHOLDS: {
        float t = qc_nf4_threshold[qt_below(rng, 15)];
        return i % 32 == 7 ? ldexp(1.0, exponent)
                           : ldexp((double)qt_step(t, (int)qt_below(rng, 5) - 2), exponent);
    }
    case HALVES: {
        float half = (float)qt_below(rng, 254) - 126.5f;
        return i % 32 == 7 ? ldexp(127.0, exponent)
                           : ldexp((double)qt_step(half, (int)qt_below(rng, 5) - 2), exponent);
    }
    case ZEROS:
        return qt_below(rng, 100) == 0 ? any_finite(rng, dtype)
                                       : copysign(0.0, (double)qt_randn(rng));
    case TINY:
        return (double)qt_randn(rng) *
               ldexp(dtype == QC_DTYPE_F16 ? 0x1p-18 : 0x1p-135, (int)qt_below(rng, 12));
    case HUGE:
        return largest * (2.0 * qt_uniform(rng) - 1.0);
    case OUTLIER:
        return i % 97 == 50 ? (double)qt_randn(rng) * 1e4 : (double)qt_randn(rng) * 1e-3;
    case DIRTY:
        if (qt_below(rng, 500) == 0)
            return qt_below(rng, 2) ? (double)NAN : -(double)INFINITY;
        return any_finite(rng, dtype);
    case ANY_BITS:
    case KINDS:
        break;
    }
    return any_finite(rng, dtype);
}

/* n elements that begin `shift` bytes into the returned memory */
static unsigned char *make_source(qt_rng *rng, kind k, qc_dtype dtype, uint64_t n, unsigned shift)
{
    unsigned char *memory = qt_alloc(n * qt_size(dtype) + shift, 1);
    int exponent = 0;
    for (uint64_t i = 0; i < n; i++) {
        if (i % 32 == 0)
            exponent = (int)qt_below(rng, 12) - 10;
        qt_put(memory + shift, dtype, i, element(rng, k, dtype, exponent, i));
    }
    return memory;
}

/* ---- tests ----------------------------------------------------------------------------------- */

TEST(test_block_quantizers)
{
    qt_rng rng = qt_rng_start("block quantizers");
    for (unsigned b = 0; b < 8; b++) {
        uint32_t block = block_sizes[b];
        const uint64_t sizes[] = {
            0,         1, 2, 3, 31, 32, 33, block, block - 1, block + 1, block + 2, 3u * block + 17,
            7u * block};
        for (unsigned d = 0; d < 4; d++) {
            for (unsigned k = 0; k < KINDS; k++) {
                for (unsigned s = 0; s < sizeof sizes / sizeof *sizes; s++) {
                    unsigned shift = (unsigned)qt_below(&rng, 8);
                    qc_dtype dtype = qt_float_types[d];
                    unsigned char *m = make_source(&rng, (kind)k, dtype, sizes[s], shift);
                    compare_quantizers(m + shift, dtype, sizes[s], block);
                    free(m);
                }
            }
        }
    }
}

TEST(test_random_lengths)
{
    qt_rng rng = qt_rng_start("random lengths");
    for (unsigned round = 0; round < 3000; round++) {
        uint64_t n = qt_below(&rng, 1500);
        unsigned shift = (unsigned)qt_below(&rng, 16);
        kind k = (kind)qt_below(&rng, KINDS);
        qc_dtype dtype = qt_float_types[qt_below(&rng, 4)];
        unsigned char *m = make_source(&rng, k, dtype, n, shift);
        compare_quantizers(m + shift, dtype, n, block_sizes[qt_below(&rng, 4)]);
        uint64_t cols = 1 + qt_below(&rng, 300);
        compare_rows(m + shift, dtype, n / cols, cols);
        const uint64_t group =
            qt_below(&rng, 2) ? block_sizes[qt_below(&rng, 4)] : 2 + 2 * qt_below(&rng, 150);
        compare_ints(int_kind(round % INT_KINDS), m + shift, dtype, n / group, group);
        free(m);
    }
}

/* Every finite pattern of both 16-bit types, in order and shuffled. */
TEST(test_every_half)
{
    qt_rng rng = qt_rng_start("every half");
    uint16_t *all = qt_alloc(65536, sizeof *all);
    for (unsigned d = 2; d < 4; d++) {
        qc_dtype dtype = qt_float_types[d];
        uint64_t n = 0;
        for (uint32_t u = 0; u < 65536; u++) {
            uint64_t bits = u;
            if (isfinite(qt_get(&bits, dtype, 0)))
                all[n++] = (uint16_t)u;
        }
        for (unsigned order = 0; order < 6; order++) {
            for (uint64_t i = n - 1; order > 0 && i > 0; i--) {
                uint64_t j = qt_below(&rng, i + 1);
                uint16_t swap = all[i];
                all[i] = all[j];
                all[j] = swap;
            }
            compare_quantizers(all, dtype, n, 64);
            compare_quantizers(all, dtype, n, block_sizes[order]);
            compare_rows(all, dtype, n / 100, 100);
            compare_rows(all, dtype, n / 2000, 2000);
        }
    }
    free(all);
}

/* Blocks of absmax and 63 others, so that every bfloat16 up to absmax is in one of them. */
TEST(test_every_bf16)
{
    static const unsigned exponents[] = {0, 1, 20, 26, 27, 28, 127, 251, 252, 253, 254};
    uint16_t *src = qt_alloc(66000 * 64 / 63 + 4096, sizeof *src);
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
            compare_blocks(1, src, QC_DTYPE_BF16, n, 64, 0);
        }
    }
    free(src);
}

/* Groups with tiny, huge, all-zero and bad blocks here and there. */
TEST(test_odd_blocks_in_runs)
{
    qt_rng rng = qt_rng_start("odd blocks");
    const uint64_t most = 16 * 64; /* 64 times twice the blocks that AVX2 treats together */
    uint16_t *src = qt_alloc(most * 64, sizeof *src);
    for (unsigned round = 0; round < 400; round++) {
        const uint64_t blocks = 1 + qt_below(&rng, round % 2 ? 40 : most);
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
        compare_blocks(1, src, QC_DTYPE_BF16, blocks * 64, 64, round % 3 != 0);
    }
    free(src);
}

TEST(test_rows)
{
    static const uint64_t widths[] = {1,  2,  7,   8,   15,   16,   17,   31,   32,
                                      33, 63, 100, 255, 1023, 1024, 1025, 2048, 3079};
    qt_rng rng = qt_rng_start("int8 rows");
    for (unsigned w = 0; w < sizeof widths / sizeof *widths; w++) {
        for (unsigned d = 0; d < 4; d++) {
            for (unsigned k = 0; k < KINDS; k++) {
                uint64_t rows = 1 + qt_below(&rng, 5), n = rows * widths[w];
                unsigned shift = (unsigned)qt_below(&rng, 8);
                qc_dtype dtype = qt_float_types[d];
                unsigned char *m = make_source(&rng, (kind)k, dtype, n, shift);
                compare_rows(m + shift, dtype, rows, widths[w]);
                for (uint64_t i = 0; i < n; i++) { /* once more within the range of float16 */
                    double x = qt_get(m + shift, dtype, i);
                    if (fabs(x) > 60000.0)
                        qt_put(m + shift, dtype, i, fmod(x, 60000.0));
                }
                compare_rows(m + shift, dtype, rows, widths[w]);
                for (unsigned i = 0; i < INT_KINDS; i++)
                    if (widths[w] % 2 == 0 || int_kind(i).bits % 4 != 0)
                        compare_ints(int_kind(i), m + shift, dtype, rows, widths[w]);
                free(m);
            }
        }
    }
    compare_rows("", QC_DTYPE_F32, 0, 5);
    compare_rows("", QC_DTYPE_BF16, 5, 0);
}

/* An offender at every index, alone and with a second one behind it. */
TEST(test_offenders)
{
    static const double offenders[] = {(double)NAN, (double)INFINITY, -(double)INFINITY,
                                       65519.0,     65520.0,          -1e6,
                                       1e300,       0x1.fffffefp127,  0x1.ffffffp127};
    qt_rng rng = qt_rng_start("offenders");
    for (unsigned d = 0; d < 4; d++) {
        qc_dtype dtype = qt_float_types[d];
        for (unsigned o = 0; o < sizeof offenders / sizeof *offenders; o++) {
            uint64_t n = 64 + 64 + 37;
            unsigned char *m = make_source(&rng, WEIGHTS, dtype, n, 3);
            for (uint64_t i = 0; i < n; i++) {
                double kept = qt_get(m + 3, dtype, i), last = qt_get(m + 3, dtype, n - 1);
                qt_put(m + 3, dtype, i, offenders[o]);
                if (i % 2)
                    qt_put(m + 3, dtype, n - 1, (double)NAN);
                compare_quantizers(m + 3, dtype, n, 64);
                compare_rows(m + 3, dtype, 5, n / 5);
                compare_rows(m + 3, dtype, 1, n);
                compare_ints(int_kind((unsigned)i % INT_KINDS), m + 3, dtype, 5, 32);
                qt_put(m + 3, dtype, n - 1, last);
                qt_put(m + 3, dtype, i, kept);
            }
            free(m);
        }
    }
}

TEST(test_dequantizers)
{
    static const qc_dtype targets[3] = {QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};
    qt_rng rng = qt_rng_start("dequantizers");
    float *scales = qt_alloc(20000, sizeof *scales), map[16];
    unsigned char *codes = qt_alloc(20000, 1);
    for (unsigned round = 0; round < 3000; round++) {
        uint32_t block = block_sizes[qt_below(&rng, round % 10 ? 4 : 8)];
        uint32_t cols = 1 + (uint32_t)qt_below(&rng, round % 10 ? 200 : 3000);
        uint64_t n = qt_below(&rng, round % 10 ? 1000 : 10000);
        int mode = (int)qt_below(&rng, 4);
        unsigned shift = (unsigned)qt_below(&rng, 4);
        for (unsigned i = 0; i < 16; i++)
            map[i] = mode == 0 ? (float)(qt_uniform(&rng) * 2 - 1) : qc_nf4_code[i];
        for (unsigned i = 0; i < 20000; i++) {
            codes[i] = (unsigned char)qt_next(&rng);
            scales[i] = mode == 1   ? qt_any_float(&rng)
                        : mode == 2 ? 70000.0f * (float)qt_uniform(&rng)
                                    : qt_randn(&rng);
        }
        for (unsigned t = 0; t < 3; t++) {
            compare_dequantize(FROM_NF4, codes, scales, map, n, block, targets[t], shift);
            compare_dequantize(FROM_INT8_BLOCKS, codes, scales, map, n, block, targets[t], shift);
            compare_dequantize(FROM_INT8_ROWS, codes, scales, map, n / cols * cols, cols,
                               targets[t], shift);
            const uint64_t group = round % 2 ? block : cols + cols % 2;
            qc_int_codes how = int_kind(round % INT_KINDS);
            how.stride = stride_of(&how, group);
            compare_int_dequantize(&how, codes, scales, n / group * group, group, targets[t],
                                   shift);
        }
    }
    free(scales);
    free(codes);
}

TEST(test_nested)
{
    qt_rng rng = qt_rng_start("nested");
    float *a = qt_alloc(4000, sizeof *a);
    /* on and beside every threshold and value: a leading 1 makes the inverse 1 */
    for (unsigned t = 0; t < 511; t++) {
        uint32_t bits = qc_f32_bits(t < 255 ? qc_dynamic_threshold[t] : qc_dynamic_map[t - 255]);
        for (unsigned i = 0; i < QC_NESTED_BLOCK; i++) {
            /* steps of 1, then of a bucket's width */
            float x = qc_f32_of_bits(bits + (i < 128 ? i - 64 : (i - 192) << 15));
            a[i] = fabsf(x) <= 1.0f ? x : 0.0f;
        }
        a[t % QC_NESTED_BLOCK] = t % 2 ? 1.0f : -1.0f;
        compare_nested(a, QC_NESTED_BLOCK, 0.0f);
        for (unsigned i = 0; i < QC_NESTED_BLOCK; i++)
            a[i] *= 0x1p-126f; /* tiny, and rounded there */
        compare_nested(a, QC_NESTED_BLOCK, 0.0f);
    }
    for (unsigned round = 0; round < 3000; round++) {
        uint64_t n = qt_below(&rng, round % 10 ? 600 : 4000);
        int mode = (int)qt_below(&rng, 5);
        for (uint64_t i = 0; i < n; i++)
            a[i] = mode == 0   ? fabsf(qt_randn(&rng)) * 0.02f
                   : mode == 1 ? 0.5f
                   : mode == 2 ? fabsf(qt_any_float(&rng))
                   : mode == 3 ? (float)qt_uniform(&rng) * 0x1p-130f
                               : (i % 50 ? 0.0f : 1.0f);
        compare_nested(a, n, qc_nested_offset(a, n));
        compare_nested(a, n, 0.0f);
        compare_nested(a, n, 0.25f);
    }
    /* nested_dequantize with other block sizes, other maps */
    for (unsigned round = 0; round < 1000; round++) {
        uint64_t n = qt_below(&rng, 3000);
        uint32_t nested_block = 1 + (uint32_t)qt_below(&rng, 600);
        float map[256], offset = qt_randn(&rng);
        output out = output_new(n * sizeof(float));
        uint8_t *codes = qt_alloc(n, 1);
        for (unsigned i = 0; i < 256; i++)
            map[i] = qt_randn(&rng);
        for (uint64_t i = 0; i < n; i++)
            codes[i] = (uint8_t)qt_next(&rng);
        for (uint64_t i = 0; i < n / nested_block + 1; i++)
            a[i] = qt_randn(&rng);
        for (int side = 0; side < SIDES; side++)
            ops[side]->nested_dequantize(codes, a, map, n, nested_block, offset, at(&out, side));
        output_check(&out, 1, "absmax", "nested_dequantize");
        output_free(&out);
        free(codes);
    }
    free(a);
}

TEST(test_casts)
{
    qt_rng rng = qt_rng_start("casts");
    uint16_t *halves = qt_alloc(65536, sizeof *halves);
    for (uint32_t u = 0; u < 65536; u++)
        halves[u] = (uint16_t)u;
    for (unsigned to = 0; to < 4; to++) {
        compare_cast(halves, QC_DTYPE_F16, 65536, qt_float_types[to], 0);
        compare_cast(halves, QC_DTYPE_BF16, 65536, qt_float_types[to], 0);
    }
    for (unsigned round = 0; round < 4000; round++) {
        uint64_t n = qt_below(&rng, 800);
        unsigned shift = (unsigned)qt_below(&rng, 8);
        qc_dtype from = qt_float_types[qt_below(&rng, 4)];
        unsigned char *m = qt_alloc(n * qt_size(from) + shift, 1);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t bits = qt_next(&rng); /* NaN and infinity included */
            if (round % 2)
                memcpy(m + shift + i * qt_size(from), &bits, qt_size(from));
            else /* on and beside what 16 bits hold, and half way */
                qt_put(m + shift, from, i,
                       qt_get(&bits, bits >> 40 & 1 ? QC_DTYPE_F16 : QC_DTYPE_BF16, 0) *
                           (1.0 + ldexp((double)(bits >> 41 & 7) - 3.0, -(int)(bits >> 44 & 31))));
        }
        for (unsigned to = 0; to < 4; to++)
            compare_cast(m + shift, from, n, qt_float_types[to], shift % 4);
        free(m);
    }
    free(halves);
}

int main(void)
{
    int failed = 0;
    for (int isa = QC_ISA_SCALAR + 1; isa < QC_ISA_COUNT; isa++)
        if (qt_has_table((qc_isa)isa))
            tables[table_count++] = qc_quant_ops_for((qc_isa)isa);
    for (unsigned t = 0; t < table_count; t++) {
        fflush(stdout);
        ops[0] = qc_quant_ops_for(QC_ISA_SCALAR);
        ops[1] = tables[t];
        failed += test_run_all(qc_isa_name(tables[t]->isa));
    }
    if (table_count == 0)
        return 77;
    return failed ? 1 : 0;
}

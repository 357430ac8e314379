/* Conversions of float16 and bfloat16, exhaustively over the 16-bit side, and the casts on top.
 * The oracle is arithmetic: neighbouring values, the midpoint between them, and what lies a hair to
 * either side of it. */
#include "tests/fixtures/quant_testing.h"

#define OPS qc_quant_ops_for(QC_ISA_SCALAR)

typedef struct {
    const char *name;
    qc_dtype dtype;
    uint16_t infinity;
    int mantissa_bits;
    int least_exponent; /* subnormals are multiples of 2^this */
    uint16_t (*from_f32)(float);
    uint16_t (*from_f64)(double);
    float (*to_f32)(uint16_t);
} half_type;

static const half_type types[2] = {
    {"float16", QC_DTYPE_F16, QC_F16_INF, 10, -24, qc_f16_from_f32, qc_f16_from_f64,
     qc_f32_from_f16},
    {"bfloat16", QC_DTYPE_BF16, QC_BF16_INF, 7, -133, qc_bf16_from_f32, qc_bf16_from_f64,
     qc_f32_from_bf16},
};

/* The value of a finite pattern from the definition; "infinity" gives the next power of two. */
static double value_of(const half_type *t, uint16_t magnitude)
{
    int exponent = magnitude >> t->mantissa_bits;
    int mantissa = magnitude & ((1 << t->mantissa_bits) - 1);
    if (exponent == 0)
        return ldexp(mantissa, t->least_exponent);
    return ldexp(mantissa + (1 << t->mantissa_bits), t->least_exponent + exponent - 1);
}

static void check(const half_type *t, double x, unsigned want)
{
    for (int sign = 0; sign < 2; sign++) {
        double signed_x = sign ? -x : x;
        unsigned expected = want | (sign ? 0x8000u : 0u);
        unsigned found = t->from_f64(signed_x);
        QT_CHECK(found == expected, "%s of double %a: %04x, expected %04x", t->name, signed_x,
                 found, expected);
        if ((double)(float)signed_x != signed_x)
            continue;
        found = t->from_f32((float)signed_x);
        QT_CHECK(found == expected, "%s of float %a: %04x, expected %04x", t->name, signed_x, found,
                 expected);
    }
}

TEST(test_narrowing)
{
    for (unsigned k = 0; k < 2; k++) {
        const half_type *t = &types[k];
        for (uint16_t h = 0; h < t->infinity; h++) {
            double x = value_of(t, h), above = value_of(t, (uint16_t)(h + 1));
            double middle = x + (above - x) / 2;
            unsigned even = h % 2 ? h + 1u : h;
            QT_CHECK((double)t->to_f32(h) == x, "%s %04x widens to %a", t->name, h,
                     (double)t->to_f32(h));
            QT_CHECK((double)t->to_f32((uint16_t)(h | 0x8000u)) == -x, "%s %04x", t->name, h);
            check(t, x, h);
            check(t, middle, even);
            /* a hair in double: a rounding by way of float would make a tie of it */
            check(t, nextafter(middle, 0.0), h);
            check(t, nextafter(middle, (double)INFINITY), h + 1u);
            if ((double)(float)middle == middle) { /* bfloat16's least lies below float's */
                check(t, (double)nextafterf((float)middle, 0.0f), h);
                check(t, (double)nextafterf((float)middle, INFINITY), h + 1u);
            }
        }
        check(t, 0.0, 0);
        check(t, 0x1p-1074, 0);
        check(t, (double)0x1p-149f, 0);
        check(t, DBL_MAX, t->infinity);
        check(t, (double)INFINITY, t->infinity);
        assert_true(isinf(t->to_f32(t->infinity)) && t->to_f32(t->infinity) > 0.0f);
    }
}

/* NaN: quiet, sign and upper payload kept, both ways. */
TEST(test_nan)
{
    for (unsigned k = 0; k < 2; k++) {
        const half_type *t = &types[k];
        uint32_t quiet = 1u << (t->mantissa_bits - 1);
        for (uint32_t h = t->infinity + 1u; h < 0x8000u; h++) {
            for (uint32_t sign = 0; sign <= 0x8000u; sign += 0x8000u) {
                uint32_t payload = h & ((1u << t->mantissa_bits) - 1);
                uint32_t wide = sign << 16 | QC_F32_INF | payload << (23 - t->mantissa_bits);
                uint32_t u = qc_f32_bits(t->to_f32((uint16_t)(sign | h)));
                QT_CHECK(u == (wide | 0x00400000u), "%s %04x: %08x", t->name, (unsigned)h,
                         (unsigned)u);
                uint64_t wider = (uint64_t)sign << 48 | QC_F64_INF |
                                 (uint64_t)payload << (52 - t->mantissa_bits);
                assert_int_equal(t->from_f32(qc_f32_of_bits(wide)), sign | h | quiet);
                assert_int_equal(t->from_f32(qc_f32_of_bits(wide | 1)), sign | h | quiet);
                assert_int_equal(t->from_f64(qc_f64_of_bits(wider)), sign | h | quiet);
                assert_int_equal(t->from_f64(qc_f64_of_bits(wider | 1)), sign | h | quiet);
            }
        }
        /* a payload too low to be kept still leaves a NaN */
        assert_int_equal(t->from_f32(qc_f32_of_bits(QC_F32_INF + 1)), t->infinity | quiet);
        assert_int_equal(t->from_f64(qc_f64_of_bits(QC_F64_INF + 1)), t->infinity | quiet);
    }
}

TEST(test_bf16_above)
{
    qt_rng rng = qt_rng_start("bf16 above");
    for (uint32_t h = 0; h < QC_BF16_INF; h++) {
        float x = qc_f32_from_bf16((uint16_t)h);
        assert_int_equal(qc_bf16_above(x), h);
        assert_int_equal(qc_bf16_above(qt_step(x, 1)), h + 1);
    }
    for (unsigned i = 0; i < 100000; i++) {
        float x = (float)qt_uniform(&rng);
        assert_true(qc_f32_from_bf16(qc_bf16_above(x)) >= x);
        assert_true(qc_f32_from_bf16((uint16_t)(qc_bf16_above(x) - 1)) < x);
    }
}

/* All 65,536 patterns of a 16-bit type through the table's cast and back. */
TEST(test_cast_every_half)
{
    uint16_t *in = qt_alloc(65536, sizeof *in), *back = qt_alloc(65536, sizeof *back);
    double *wide = qt_alloc(65536, sizeof *wide);
    uint64_t overflow;
    for (uint32_t u = 0; u < 65536; u++)
        in[u] = (uint16_t)u;
    for (unsigned k = 0; k < 2; k++) {
        const half_type *t = &types[k];
        for (unsigned d = 0; d < 2; d++) { /* F64, F32: exact and back again */
            OPS->cast(in, t->dtype, 65536, wide, qt_float_types[d], &overflow);
            assert_true(overflow == UINT64_MAX);
            OPS->cast(wide, qt_float_types[d], 65536, back, t->dtype, &overflow);
            assert_true(overflow == UINT64_MAX);
            for (uint32_t u = 0; u < 65536; u++) {
                uint16_t magnitude = in[u] & 0x7fffu;
                double x = qt_get(wide, qt_float_types[d], u);
                unsigned quiet = magnitude > t->infinity ? 1u << (t->mantissa_bits - 1) : 0u;
                QT_CHECK(back[u] == (in[u] | quiet), "%s %04x comes back as %04x", t->name,
                         (unsigned)u, back[u]);
                if (magnitude < t->infinity)
                    QT_CHECK(x == copysign(value_of(t, magnitude), u >> 15 ? -1.0 : 1.0),
                             "%s %04x is %a", t->name, (unsigned)u, x);
            }
        }
        /* same type: bytes, even of a signalling NaN */
        OPS->cast(in, t->dtype, 65536, back, t->dtype, &overflow);
        assert_memory_equal(in, back, 65536 * sizeof *in);
    }
    /* one 16-bit type to the other */
    OPS->cast(in, QC_DTYPE_F16, 65536, back, QC_DTYPE_BF16, &overflow);
    assert_true(overflow == UINT64_MAX);
    for (uint32_t u = 0; u < QC_F16_INF; u++)
        assert_int_equal(back[u], qc_bf16_from_f64(value_of(&types[0], (uint16_t)u)));
    OPS->cast(in, QC_DTYPE_BF16, 65536, back, QC_DTYPE_F16, &overflow);
    /* 65520 is no bfloat16; 65536 = 0x4780 is the first that does not fit */
    assert_true(overflow == 0x4780);
    for (uint32_t u = 0; u < QC_BF16_INF; u++)
        assert_int_equal(back[u], qc_f16_from_f64(value_of(&types[1], (uint16_t)u)));
    free(in);
    free(back);
    free(wide);
}

static uint64_t first_overflow(const void *src, qc_dtype from, uint64_t n, qc_dtype to)
{
    double dst[8];
    uint64_t overflow;
    OPS->cast(src, from, n, dst, to, &overflow);
    return overflow;
}

TEST(test_cast_overflow)
{
    const float f[4] = {INFINITY, -65519.996f, 65520.0f, -1e30f};
    const float g[3] = {NAN, 0x1.fefffep127f, 0x1.ffp127f};
    const double d[4] = {-(double)INFINITY, 0x1.fffffefffffffp127, 0x1.ffffffp127, 1e308};
    const double e[3] = {65519.999999999993, 65520.0, 0.0};
    assert_true(first_overflow(f, QC_DTYPE_F32, 2, QC_DTYPE_F16) == UINT64_MAX);
    assert_true(first_overflow(f, QC_DTYPE_F32, 4, QC_DTYPE_F16) == 2);
    assert_true(first_overflow(f, QC_DTYPE_F32, 4, QC_DTYPE_BF16) == UINT64_MAX);
    assert_true(first_overflow(g, QC_DTYPE_F32, 3, QC_DTYPE_BF16) == 2);
    assert_true(first_overflow(g, QC_DTYPE_F32, 3, QC_DTYPE_F64) == UINT64_MAX);
    assert_true(first_overflow(d, QC_DTYPE_F64, 2, QC_DTYPE_F32) == UINT64_MAX);
    assert_true(first_overflow(d, QC_DTYPE_F64, 4, QC_DTYPE_F32) == 2);
    assert_true(first_overflow(d, QC_DTYPE_F64, 4, QC_DTYPE_BF16) == 1);
    assert_true(first_overflow(e, QC_DTYPE_F64, 3, QC_DTYPE_F16) == 1);
    uint64_t overflow = 7;
    OPS->cast(NULL, QC_DTYPE_F32, 0, NULL, QC_DTYPE_F32, &overflow);
    assert_true(overflow == UINT64_MAX);
}

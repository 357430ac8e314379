/* The factor with which NF4's code values go to float16 (quant_values.h): it is the best of all
 * floats in [1, 2), its inverse is the nearest float, and the errors are what
 * kernels/matmul_codes.cuh says. */
#include "tests/fixtures/quant_testing.h"

#include "quant/quant_half.h"
#include "quant/quant_values.h"

static const float codes[16] = {QC_NF4_CODE_VALUES};

/* Squared error of the 16 rounded values over that of the values; *most: the largest relative one.
 */
static double error_of(float factor, double *most)
{
    double sum = 0, of = 0;
    *most = 0;
    for (int i = 0; i < 16; i++) {
        double value = (double)factor * (double)codes[i];
        double half = (double)qc_f32_from_f16(qc_f16_from_f32(factor * codes[i]));
        double relative = codes[i] != 0.0f ? fabs(half / value - 1) : 0;
        sum += (half - value) * (half - value);
        of += value * value;
        *most = relative > *most ? relative : *most;
    }
    return sum / of;
}

TEST(test_best)
{
    double most, least = error_of(QC_NF4_HALF_SCALE, &most);
    for (uint32_t bits = 0x3f800000u; bits < 0x40000000u; bits++) {
        float factor;
        double other;
        memcpy(&factor, &bits, sizeof factor);
        if (error_of(factor, &other) < least)
            QT_CHECK(0, "%a has a smaller error than %a", (double)factor,
                     (double)QC_NF4_HALF_SCALE);
    }
}

TEST(test_inverse)
{
    /* No other float takes the factor out again as well. */
    const float inverse = QC_NF4_HALF_SCALE_INVERSE;
    const float beside[] = {nextafterf(inverse, 0.0f), nextafterf(inverse, 2.0f)};
    double error = fabs((double)QC_NF4_HALF_SCALE * (double)inverse - 1.0);
    for (int i = 0; i < 2; i++)
        assert_true(error < fabs((double)QC_NF4_HALF_SCALE * (double)beside[i] - 1.0));
}

/* Beside weights that are rounded to float16 one by one, whatever their scale. */
TEST(test_errors)
{
    double most, rms = sqrt(error_of(QC_NF4_HALF_SCALE, &most)), sum = 0, of = 0;
    for (int i = 0; i < 4096; i++)
        for (int j = 0; j < 16; j++) {
            float weight = codes[j] * (1.0f + (float)i / 4096.0f);
            double half = (double)qc_f32_from_f16(qc_f16_from_f32(weight));
            sum += (half - (double)weight) * (half - (double)weight);
            of += (double)weight * (double)weight;
        }
    assert_true(rms < 6.2e-5 && most < 0x1p-11 * 0.6);
    assert_true(sqrt(sum / of) > 3.3 * rms);
}

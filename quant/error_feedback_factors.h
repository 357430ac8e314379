/* The scales that the search in error_feedback_search.c tries, as factors of a block's largest
 * magnitude; GPUs try the same (kernels/cuda_feedback_search.cu). NF4's are for codes of up to 4
 * bits. Forms with signed scales try both signs. Not for callers. */
#ifndef QC_QUANT_ERROR_FEEDBACK_FACTORS_H
#define QC_QUANT_ERROR_FEEDBACK_FACTORS_H

#define QC_FEEDBACK_NF4_FACTORS                                                                    \
    0.600f, 0.625f, 0.650f, 0.675f, 0.700f, 0.725f, 0.750f, 0.775f, 0.800f, 0.825f, 0.850f,        \
        0.875f, 0.900f, 0.925f, 0.950f, 0.975f, 1.000f, 1.025f, 1.050f, 1.075f, 1.100f, 1.125f,    \
        1.150f, 1.220f, 1.280f, 1.340f, 1.400f
/* These are for blocks of QC_FEEDBACK_WIDE elements and more, where the largest of so many is far
 * out. */
#define QC_FEEDBACK_WIDE 512u
#define QC_FEEDBACK_NF4_WIDE_FACTORS                                                               \
    0.250f, 0.300f, 0.350f, 0.400f, 0.440f, 0.480f, 0.520f, 0.550f, 0.580f, 0.610f, 0.640f,        \
        0.670f, 0.700f, 0.725f, 0.750f, 0.775f, 0.800f, 0.825f, 0.850f, 0.875f, 0.900f, 0.930f,    \
        0.960f, 0.990f, 1.020f, 1.050f, 1.090f, 1.150f, 1.250f, 1.330f
#define QC_FEEDBACK_INT8_FACTORS                                                                   \
    0.700f, 0.750f, 0.800f, 0.840f, 0.870f, 0.900f, 0.920f, 0.935f, 0.950f, 0.960f, 0.970f,        \
        0.978f, 0.985f, 0.990f, 0.994f, 0.997f, 1.000f, 1.004f, 1.008f, 1.012f, 1.018f, 1.024f,    \
        1.030f, 1.038f, 1.046f
#define QC_FEEDBACK_MOST 32u /* of a list */

#define QC_FEEDBACK_TINY   0x1p-110f /* below this, squares and inverses leave float's range */
#define QC_FEEDBACK_REFITS 2u
/* Double quantized scales are tried from least to most times the scale that was found. */
#define QC_FEEDBACK_NEST_LEAST 0.6f
#define QC_FEEDBACK_NEST_MOST  1.5f

/* An output whose own moment is less, of G times its power of two, keeps its codes. */
#define QC_FEEDBACK_LEAST_MOMENT 0x1p-40f

#endif

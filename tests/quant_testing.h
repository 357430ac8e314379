/* Helpers of the quantizer tests: seeded random numbers, float bits, and a check that says more. */
#ifndef QC_TESTS_QUANT_TESTING_H
#define QC_TESTS_QUANT_TESTING_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* QC_TEST_QUICK=1: under compute-sanitizer, where a launch takes a hundred times as long, loops of
 * the kernel tests take only every few of their cases: `step` here, else all. */
static inline unsigned qt_every(unsigned step)
{
    const char *quick = getenv("QC_TEST_QUICK");
    return quick && *quick == '1' ? step : 1;
}

#define QT_CHECK(condition, ...)                                                                   \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fail_msg(__VA_ARGS__);                                                                 \
    } while (0)

typedef struct {
    uint64_t state;
} qt_rng;

/* Seed from QC_SEED, else from the clock; printed so that a failure can be replayed. */
static inline qt_rng qt_rng_start(const char *test)
{
    const char *env = getenv("QC_SEED");
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t seed = (uint64_t)now.tv_nsec ^ (uint64_t)now.tv_sec << 30;
    if (env && *env)
        seed = strtoull(env, NULL, 0);
    print_message("%s: QC_SEED=%" PRIu64 "\n", test, seed);
    return (qt_rng){seed};
}

static inline uint64_t qt_next(qt_rng *rng) /* splitmix64 */
{
    uint64_t z = (rng->state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint64_t qt_below(qt_rng *rng, uint64_t limit)
{
    return qt_next(rng) % limit;
}

static inline double qt_uniform(qt_rng *rng) /* (0, 1) */
{
    return ((double)(qt_next(rng) >> 11) + 0.5) * 0x1p-53;
}

static inline float qt_randn(qt_rng *rng)
{
    double u = qt_uniform(rng), v = qt_uniform(rng);
    return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

/* Any finite float, every exponent as likely. */
static inline float qt_any_float(qt_rng *rng)
{
    for (;;) {
        float f = qc_f32_of_bits((uint32_t)qt_next(rng));
        if (isfinite(f))
            return f;
    }
}

/* f moved by `ulps` steps on the line of floats, -0 and 0 being one. */
static inline float qt_step(float f, int ulps)
{
    for (; ulps > 0; ulps--)
        f = nextafterf(f, INFINITY);
    for (; ulps < 0; ulps++)
        f = nextafterf(f, -INFINITY);
    return f;
}

static inline void *qt_alloc(uint64_t count, size_t bytes_each)
{
    void *p = calloc((size_t)count + 1, bytes_each);
    QT_CHECK(p != NULL, "out of memory");
    return p;
}

static inline size_t qt_size(qc_dtype dtype)
{
    return qc_dtype_bits(dtype) / 8;
}

static const qc_dtype qt_float_types[4] = {QC_DTYPE_F64, QC_DTYPE_F32, QC_DTYPE_F16, QC_DTYPE_BF16};

/* x as element i of an array of type dtype (rounded), and back. */
static inline void qt_put(void *array, qc_dtype dtype, uint64_t i, double x)
{
    unsigned char *at = (unsigned char *)array + i * qt_size(dtype);
    float f = (float)x;
    uint16_t h = dtype == QC_DTYPE_F16 ? qc_f16_from_f64(x) : qc_bf16_from_f64(x);
    if (dtype == QC_DTYPE_F64)
        memcpy(at, &x, sizeof x);
    else if (dtype == QC_DTYPE_F32)
        memcpy(at, &f, sizeof f);
    else
        memcpy(at, &h, sizeof h);
}

static inline double qt_get(const void *array, qc_dtype dtype, uint64_t i)
{
    const unsigned char *at = (const unsigned char *)array + i * qt_size(dtype);
    double x;
    float f;
    uint16_t h;
    if (dtype == QC_DTYPE_F64) {
        memcpy(&x, at, sizeof x);
        return x;
    }
    if (dtype == QC_DTYPE_F32) {
        memcpy(&f, at, sizeof f);
        return (double)f;
    }
    memcpy(&h, at, sizeof h);
    return (double)(dtype == QC_DTYPE_F16 ? qc_f32_from_f16(h) : qc_f32_from_bf16(h));
}

static inline unsigned qt_nibble(const uint8_t *codes, uint64_t i)
{
    return i % 2 ? codes[i / 2] & 15u : codes[i / 2] >> 4;
}

/* The decision tree of bitsandbytes' CUDA kernel, constants as they stand in its source. The `f`
 * matters: by way of double four of them would round to another float. */
static inline unsigned qt_nf4_tree(float x)
{
    if (x > 0.03979014977812767f) {
        if (x > 0.3893125355243683f) {
            if (x > 0.6427869200706482f)
                return x > 0.8614784181118011f ? 15 : 14;
            return x > 0.5016634166240692f ? 13 : 12;
        }
        if (x > 0.2035212516784668f)
            return x > 0.2920137718319893f ? 11 : 10;
        return x > 0.1202552504837513f ? 9 : 8;
    }
    if (x > -0.33967943489551544f) {
        if (x > -0.13791173323988914f)
            return x > -0.045525018125772476f ? 7 : 6;
        return x > -0.23460740596055984f ? 5 : 4;
    }
    if (x > -0.6106329262256622f)
        return x > -0.4599952697753906f ? 3 : 2;
    return x > -0.8480964004993439f ? 1 : 0;
}

#endif

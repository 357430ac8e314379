/* The bits of floats and doubles, and back. */
#ifndef QC_BASE_FLOAT_BITS_H
#define QC_BASE_FLOAT_BITS_H

#include <stdint.h>
#include <string.h>

static inline uint32_t qc_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float qc_f32_of_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint64_t qc_f64_bits(double d)
{
    uint64_t u;
    memcpy(&u, &d, sizeof u);
    return u;
}

static inline double qc_f64_of_bits(uint64_t u)
{
    double d;
    memcpy(&d, &u, sizeof d);
    return d;
}

#endif

/* Arithmetic on sizes that come from files: every sum and product is checked.
 * Functions with an *out return 1 and leave it unspecified on overflow, 0 otherwise. */
#ifndef QC_BASE_CHECKED_H
#define QC_BASE_CHECKED_H

#include <stddef.h>
#include <stdint.h>

static inline int qc_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return __builtin_mul_overflow(a, b, out);
}

static inline int qc_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return __builtin_add_overflow(a, b, out);
}

static inline int qc_mul_size(size_t a, size_t b, size_t *out)
{
    return __builtin_mul_overflow(a, b, out);
}

static inline int qc_add_size(size_t a, size_t b, size_t *out)
{
    return __builtin_add_overflow(a, b, out);
}

static inline int qc_u64_to_size(uint64_t a, size_t *out)
{
    *out = (size_t)a;
    return (uint64_t)*out != a;
}

/* For sizes that are only compared or shown: UINT64_MAX stands for that and all above. */
static inline uint64_t qc_sat_add(uint64_t a, uint64_t b)
{
    uint64_t sum = 0;
    return qc_add_u64(a, b, &sum) ? UINT64_MAX : sum;
}

static inline uint64_t qc_sat_mul(uint64_t a, uint64_t b)
{
    uint64_t product = 0;
    return qc_mul_u64(a, b, &product) ? UINT64_MAX : product;
}

/* ceil(a / b) without overflow; b > 0. */
static inline uint64_t qc_ceil_div_u64(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

#endif

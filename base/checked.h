/* Arithmetic on sizes that come from files: every sum and product is checked.
 * All functions return 1 and leave *out unspecified on overflow, 0 otherwise. */
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

/* ceil(a / b) without overflow; b > 0. */
static inline uint64_t qc_ceil_div_u64(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

#endif

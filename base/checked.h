/* Arithmetic on sizes that come from files: every sum and product is checked. Functions with an
 * *out return 0 on success; on overflow they return 1 and leave *out unspecified. */
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

/* For sizes that are only compared or shown. A result of UINT64_MAX means "this or more". */
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

/* a - b, or 0 where b is larger. */
static inline uint64_t qc_sat_sub(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static inline uint64_t qc_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline uint64_t qc_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline size_t qc_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* Returns `left`, but at most `most`. */
static inline uint32_t qc_min_u32(uint64_t left, uint32_t most)
{
    return left < most ? (uint32_t)left : most;
}

/* ceil(a / b) without overflow; b > 0. */
static inline uint64_t qc_ceil_div_u64(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

/* Returns the smallest multiple of align (> 0) that is not less than n, or UINT64_MAX where none
 * fits. */
static inline uint64_t qc_align_u64(uint64_t n, uint64_t align)
{
    return qc_sat_mul(qc_ceil_div_u64(n, align), align);
}

#endif

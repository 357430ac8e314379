/* Reproducible random numbers: splitmix64. Do not use them for anything secret. */
#ifndef QC_BASE_RANDOM_H
#define QC_BASE_RANDOM_H

#include <stdint.h>

/* Returns the next 64 bits. Any value may be the start of *state. */
static inline uint64_t qc_random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Returns a number above 0 and below 1. */
static inline double qc_random_uniform(uint64_t *state)
{
    return ((double)(qc_random_next(state) >> 11) + 0.5) * 0x1p-53;
}

#endif

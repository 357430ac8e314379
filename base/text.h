/* Small questions about strings. */
#ifndef QC_BASE_TEXT_H
#define QC_BASE_TEXT_H

#include <string.h>

/* Does s end in tail? Every string ends in "". */
static inline int qc_ends_with(const char *s, const char *tail)
{
    size_t n = strlen(s), m = strlen(tail);
    return n >= m && memcmp(s + n - m, tail, m) == 0;
}

#endif

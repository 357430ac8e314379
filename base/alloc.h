/* The one door to the heap, so that tests can fail the N-th allocation.
 *
 * Ownership: what qc_malloc and friends return is freed with qc_free (NULL is fine). Memory from
 * qc_malloc_aligned is freed with qc_free as well.
 * Thread-safe: yes. All return QC_ERR_NOMEM with a message on failure; a size of 0 yields a valid
 * pointer that may be freed.
 */
#ifndef QC_BASE_ALLOC_H
#define QC_BASE_ALLOC_H

#include "base/status.h"

QC_NODISCARD qc_status qc_malloc(void **out, size_t bytes, qc_error *err);
QC_NODISCARD qc_status qc_calloc(void **out, size_t count, size_t bytes_each, qc_error *err);
/* *inout keeps its old block on failure. count * bytes_each is checked for overflow. */
QC_NODISCARD qc_status qc_realloc_array(void **inout, size_t count, size_t bytes_each,
                                        qc_error *err);
/* alignment: a power of two, at least sizeof(void *). Contents are not initialised. */
QC_NODISCARD qc_status qc_malloc_aligned(void **out, size_t alignment, size_t bytes, qc_error *err);
QC_NODISCARD qc_status qc_strdup(char **out, const char *s, qc_error *err);
void qc_free(void *p);
/* What was freed goes back to the system, as far as the C library does that: after a phase that
 * made and freed much, before one that lasts. */
void qc_alloc_trim(void);

/* Plain hooks for libraries that want malloc-like functions (cJSON, zstd): NULL on failure. */
void *qc_hook_malloc(size_t bytes);
void qc_hook_free(void *p);

/* Tests only: the n-th allocation from now (1 = the next) fails; every later one too if
 * persistent. n = 0 switches faults off. Counts over all threads. */
void qc_alloc_fail_at(uint64_t n, int persistent);
/* Number of allocations tried since the last qc_alloc_fail_at. */
uint64_t qc_alloc_count(void);

#endif

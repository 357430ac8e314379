/* The only way to the heap, so that tests can let the N-th allocation fail.
 *
 * Ownership: what qc_malloc and the other functions return is freed with qc_free, which accepts
 * NULL. Memory from qc_malloc_aligned is freed with qc_free as well.
 * Thread-safe: yes. All of them return QC_ERR_NOMEM with a message on failure; a size of 0 yields a
 * valid pointer that may be freed. */
#ifndef QC_BASE_ALLOC_H
#define QC_BASE_ALLOC_H

#include "base/status.h"

/* out is the address of a pointer of any type, as in qc_calloc(&t->rows, n, sizeof *t->rows, err).
 * On failure that pointer becomes NULL. */
QC_NODISCARD qc_status qc_malloc(void *out, size_t bytes, qc_error *err);
QC_NODISCARD qc_status qc_calloc(void *out, size_t count, size_t bytes_each, qc_error *err);
/* The pointer at inout keeps its old block on failure. The product of count and bytes_each is
 * checked for overflow. */
QC_NODISCARD qc_status qc_realloc_array(void *inout, size_t count, size_t bytes_each,
                                        qc_error *err);
/* alignment is a power of two and at least sizeof(void *). The contents are not initialised. */
QC_NODISCARD qc_status qc_malloc_aligned(void *out, size_t alignment, size_t bytes, qc_error *err);
#define qc_malloc(out, bytes, err)       qc_malloc(QC_POINTER_AT(out), bytes, err)
#define qc_calloc(out, count, each, err) qc_calloc(QC_POINTER_AT(out), count, each, err)
#define qc_realloc_array(inout, count, each, err)                                                  \
    qc_realloc_array(QC_POINTER_AT(inout), count, each, err)
#define qc_malloc_aligned(out, alignment, bytes, err)                                              \
    qc_malloc_aligned(QC_POINTER_AT(out), alignment, bytes, err)
QC_NODISCARD qc_status qc_strdup(char **out, const char *s, qc_error *err);
void qc_free(void *p);

/* Memory that grows to what one use of it needs. Zeros are an empty one; free data. */
typedef struct {
    void *data; /* aligned to 64 bytes */
    size_t room;
} qc_buffer;
/* Makes room for this many elements. Where the buffer grows, what it held is lost. */
QC_NODISCARD qc_status qc_buffer_room(qc_buffer *b, uint64_t count, uint64_t bytes_each,
                                      qc_error *err);

/* Gives freed memory back to the system, as far as the C library does that. Call it between a phase
 * that allocated and freed much and one that lasts long. */
void qc_alloc_trim(void);

/* Plain functions for libraries that want hooks like malloc (zstd); they return NULL on
 * failure. */
void *qc_hook_malloc(size_t bytes);
void qc_hook_free(void *p);

/* For tests only. The n-th allocation from now (1 is the next) fails, and every later one too if
 * `persistent` is set. n = 0 switches faults off. Allocations of all threads are counted. */
void qc_alloc_fail_at(uint64_t n, int persistent);
/* The number of allocations that were tried since the last qc_alloc_fail_at. */
uint64_t qc_alloc_count(void);

#endif

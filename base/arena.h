/* Arena for the metadata of one run: names, shapes, plans. Freed as a whole, never piecewise.
 * Not thread-safe: one owner. */
#ifndef QC_BASE_ARENA_H
#define QC_BASE_ARENA_H

#include "base/status.h"

typedef struct qc_arena_block qc_arena_block;

typedef struct {
    qc_arena_block *head; /* blocks in reverse order of allocation */
    size_t used_bytes;    /* in head */
    size_t head_bytes;    /* capacity of head */
} qc_arena;

void qc_arena_init(qc_arena *a);
/* Frees every block; the arena is empty and usable again. NULL is fine. */
void qc_arena_deinit(qc_arena *a);
/* Zeroed memory for count elements, aligned to 16 (texts are not). Lives until qc_arena_deinit. */
QC_NODISCARD qc_status qc_arena_alloc(qc_arena *a, void **out, size_t count, size_t bytes_each,
                                      qc_error *err);
/* Copy of the len bytes at s plus a terminating NUL. */
QC_NODISCARD qc_status qc_arena_strndup(qc_arena *a, const char **out, const char *s, size_t len,
                                        qc_error *err);
/* printf into the arena. */
QC_NODISCARD qc_status qc_arena_printf(qc_arena *a, const char **out, qc_error *err,
                                       const char *fmt, ...) QC_PRINTF(4, 5);

#endif

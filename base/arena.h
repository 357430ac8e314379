/* An arena for the metadata of one run: names, shapes and plans. It is freed as a whole, never in
 * parts. Not thread-safe: it has one owner. */
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
/* Frees every block; the arena is then empty and can be used again. a may be NULL. */
void qc_arena_deinit(qc_arena *a);
/* Allocates zeroed memory for count elements, aligned to 16 bytes. It lives until
 * qc_arena_deinit. out is the address of a pointer of any type, which becomes NULL on failure. */
QC_NODISCARD qc_status qc_arena_alloc(qc_arena *a, void *out, size_t count, size_t bytes_each,
                                      qc_error *err);
#define qc_arena_alloc(a, out, count, each, err)                                                   \
    qc_arena_alloc(a, QC_POINTER_AT(out), count, each, err)
/* Does the same for an array of what the pointer at out points to. */
#define qc_arena_array(a, out, count, err) qc_arena_alloc(a, out, count, sizeof **(out), err)
/* Makes room for one more element in an array of `count` that lives in the arena. The array moves
 * when it has 64 elements, 128 and so on; array is the address of the pointer to it. */
QC_NODISCARD qc_status qc_arena_more(qc_arena *a, void *array, size_t count, size_t bytes_each,
                                     qc_error *err);
#define qc_arena_more(a, array, count, err)                                                        \
    qc_arena_more(a, QC_POINTER_AT(array), count, sizeof **(array), err)
/* Copies the len bytes at s and adds a terminating NUL. The copy is not aligned. */
QC_NODISCARD qc_status qc_arena_strndup(qc_arena *a, const char **out, const char *s, size_t len,
                                        qc_error *err);
/* Copies a text that ends with a NUL. */
QC_NODISCARD qc_status qc_arena_strdup(qc_arena *a, const char **out, const char *s, qc_error *err);
/* Formats as printf does, into the arena. The text is not aligned. */
QC_NODISCARD qc_status qc_arena_printf(qc_arena *a, const char **out, qc_error *err,
                                       const char *fmt, ...) QC_PRINTF(4, 5);

#endif

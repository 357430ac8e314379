/* Tells how alike two names are, for "did you mean" in messages. */
#ifndef QC_BASE_EDIT_DISTANCE_H
#define QC_BASE_EDIT_DISTANCE_H

#include <stddef.h>

#define QC_EDIT_MAX_BYTES 96u       /* longest text that is compared */
#define QC_EDIT_TOO_LONG  (~0u / 2) /* distance where a text is longer */

/* Counts the edits (insert, delete, replace, swap two neighbours once) that turn a into b; the case
 * of ASCII letters does not matter. Returns QC_EDIT_TOO_LONG if either is longer than
 * QC_EDIT_MAX_BYTES.
 * Thread-safe. Source: optimal string alignment (Boytsov 2011, section 2.2). */
unsigned qc_edit_distance(const char *a, size_t a_len, const char *b, size_t b_len);

#endif

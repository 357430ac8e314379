/* Globs over names, and the order of names. The functions are pure and thread-safe. */
#ifndef QC_CONVERT_GLOB_H
#define QC_CONVERT_GLOB_H

#include "base/arena.h"

/* No tensor's name needs a longer glob, and the time to match is in proportion to its length. */
#define QC_GLOB_MAX_BYTES 4096u

/* Matches a glob with a whole name: '*' is any run (dots too), '?' one byte, '[a-z]' a class, '\\x'
 * is x. The time is linear in pattern x name. */
int qc_glob_match(const char *glob, const char *name);
/* Compares names, with runs of digits compared as numbers: layers.2 comes before layers.10. */
int qc_natural_compare(const char *a, const char *b);
/* Compares two names so, or two structs whose first member is a name; for qsort. */
int qc_by_natural(const void *a, const void *b);
/* Makes the indices of `count` structs in natural order of their names. Each struct has
 * `bytes_each` bytes, and the pointer to its name at name_offset. */
QC_NODISCARD qc_status qc_natural_order(uint32_t **order, qc_arena *arena, const void *structs,
                                        size_t name_offset, size_t bytes_each, size_t count,
                                        qc_error *err);

#endif

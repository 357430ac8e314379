/* Globs over names, and the order of names. Pure; thread-safe. */
#ifndef QC_CONVERT_GLOB_H
#define QC_CONVERT_GLOB_H

/* No name of a tensor needs a longer glob, and matching takes time in proportion to it. */
#define QC_GLOB_MAX_BYTES 4096u

/* Glob over a whole name: '*' any run (dots too), '?' one byte, '[a-z]' a class, '\\x' x. Linear
 * time in pattern x name. */
int qc_glob_match(const char *glob, const char *name);
/* Order by names in which digit runs compare as numbers: layers.2 before layers.10. */
int qc_natural_compare(const char *a, const char *b);

#endif

/* Libraries that are opened at run time: the program neither needs them to start nor is linked with
 * them. Thread-safe, apart from the environment. */
#ifndef QC_BASE_OPEN_LIBRARY_H
#define QC_BASE_OPEN_LIBRARY_H

#include "base/status.h"

/* A folder that holds libraries: the value of the variable (NULL: nothing), and a pattern for
 * glob. */
typedef struct {
    const char *variable, *folder;
} qc_library_place;

typedef struct {
    const char *variable;     /* an environment variable that names the one file to open */
    const char *const *files; /* up to NULL: the first that can be opened, without the variable */
    /* NULL, or up to a folder of NULL: where a file is looked for behind the system's own places */
    const qc_library_place *places;
    const char *const *function_names; /* in the order of their pointers in a struct */
    size_t function_count;
    size_t needed_count; /* the first ones; a later one that is missing gives NULL */

    /* Where something is missing: the status, and the words before and behind the names. */
    qc_status missing;
    const char *title;          /* "cuBLAS cannot be loaded" */
    const char *no_file[2];     /* behind the title, around the one file */
    const char *none;           /* behind the title, where the variable is not set */
    const char *no_function[3]; /* around the file and the function */
} qc_library;

/* Fills functions, a struct of function_count pointers to functions. Close *library with
 * qc_library_close; it is NULL after a failure. */
QC_NODISCARD qc_status qc_library_open(void **library, void *functions, const qc_library *l,
                                       qc_error *err);
void qc_library_close(void *library); /* accepts NULL */

#endif

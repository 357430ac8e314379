/* A library of CUDA's (cuBLAS or cuSOLVER), opened at run time. Inside kernels/ only.
 * Thread-safe. */
#ifndef QC_KERNELS_CUDA_LIBRARY_H
#define QC_KERNELS_CUDA_LIBRARY_H

#include "base/status.h"

typedef struct {
    const char *title;    /* "cuBLAS", for messages */
    const char *variable; /* the environment variable that names the file */
    const char *file;     /* "libcublas". Without the variable it is looked for where the loader
                             looks, in a toolkit (CUDA_HOME, CUDA_PATH, /usr/local/cuda) and in
                             wheels (VIRTUAL_ENV, CONDA_PREFIX) */
    const char *none;     /* the message where there is no such file */
    const int *versions;  /* of the file; the first one that is there is taken */
    size_t version_count;
    const char *const *names; /* of functions */
    size_t name_count;
} qc_cuda_library;

/* Fills functions [name_count]. As soon as *library is not NULL, also after a failure, the caller
 * must dlclose it. QC_ERR_DEVICE with one sentence where the library or one of the functions is
 * missing. */
QC_NODISCARD qc_status qc_cuda_library_open(void **library, void **functions,
                                            const qc_cuda_library *l, qc_error *err);

#endif

/* A library of CUDA's, opened at run time: cuBLAS and cuSOLVER. Inside kernels/ only. Thread-safe.
 */
#ifndef QC_KERNELS_CUDA_LIBRARY_H
#define QC_KERNELS_CUDA_LIBRARY_H

#include "base/status.h"

typedef struct {
    const char *title;    /* "cuBLAS", for messages */
    const char *variable; /* of the environment, that names the file */
    const char *file;     /* "libcublas", else: where the loader looks, in a toolkit (CUDA_HOME,
                             CUDA_PATH, /usr/local/cuda), in wheels (VIRTUAL_ENV, CONDA_PREFIX) */
    const char *none;     /* what is said where there is no such file */
    const int *versions;  /* of the file, the first that is there is taken */
    size_t version_count;
    const char *const *names; /* of functions */
    size_t name_count;
} qc_cuda_library;

/* functions [name_count]. *library is the caller's to dlclose as soon as it is not NULL, also after
 * a failure: QC_ERR_DEVICE with one sentence where it, or one of the functions, is not there. */
QC_NODISCARD qc_status qc_cuda_library_open(void **library, void **functions,
                                            const qc_cuda_library *l, qc_error *err);

#endif

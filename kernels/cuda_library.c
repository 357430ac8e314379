#include "kernels/cuda_library.h"

const qc_library_place qc_cuda_places[] = {
    {"CUDA_HOME", "/lib64"},
    {"CUDA_PATH", "/lib64"},
    {NULL, "/usr/local/cuda/lib64"},
    {"VIRTUAL_ENV", "/lib/python3*/site-packages/nvidia/*/lib"},
    {"CONDA_PREFIX", "/lib/python3*/site-packages/nvidia/*/lib"},
    {NULL, NULL},
};

qc_status qc_cuda_library_check(int code, int no_memory, const char *title, const char *what,
                                qc_error *err)
{
    if (code == 0)
        return QC_OK;
    QC_FAIL(err, code == no_memory ? QC_ERR_NOMEM : QC_ERR_INTERNAL, "%s: %s failed with status %d",
            title, what, code);
}

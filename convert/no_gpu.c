/* A build without CUDA kernels. */
#include "convert/gpu_work.h"

const qc_gpu_work *qc_gpu_work_get(void)
{
    return NULL;
}

const char *qc_gpu_build(void)
{
    return "none";
}

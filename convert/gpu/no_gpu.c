/* Stands for gpu_*.c in a build without CUDA kernels. */
#include "convert/gpu/gpu_table.h"

const qc_gpu_work *qc_gpu_table(void)
{
    return NULL;
}

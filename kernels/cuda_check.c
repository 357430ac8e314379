/* CUDA's results as statuses: see cuda_check.h. */
#include "kernels/cuda_check.h"

static qc_status status_of(cudaError_t code)
{
    switch ((int)code) {
    case cudaSuccess:
        return QC_OK;
    case cudaErrorMemoryAllocation:
        return QC_ERR_NOMEM;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorDevicesUnavailable:
    case cudaErrorNoKernelImageForDevice:
        return QC_ERR_DEVICE;
    default:
        return QC_ERR_INTERNAL;
    }
}

qc_status qc_cuda_check(cudaError_t code, const char *what, qc_error *err)
{
    if (code == cudaSuccess)
        return QC_OK;
    (void)cudaGetLastError();
    QC_FAIL(err, status_of(code), "CUDA: %s: %s (%s)", what, cudaGetErrorString(code),
            cudaGetErrorName(code));
}

qc_status qc_cuda_launched(const char *what, qc_error *err)
{
    return qc_cuda_check(cudaGetLastError(), what, err);
}

/* What cuda_runtime.h adds to the API of the runtime: nothing here; the language (vector types,
 * built-in variables, intrinsics) is in shim_launch.h. */
#ifndef QC_SHIM_CUDA_RUNTIME_H
#define QC_SHIM_CUDA_RUNTIME_H
#include <cuda_runtime_api.h>
#endif

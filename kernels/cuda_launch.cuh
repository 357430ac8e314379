/* What every .cu file includes first: the CUDA runtime, launches, shared memory, and the few words
 * that the CPU shim of the tests gives another meaning (QC_CUDA_SHIM; tests/shim).
 *
 * These rules let one source run on both:
 *
 *   - kernels are launched with qc_cuda_start or QC_LAUNCH, never with <<<>>>;
 *   - shared memory is dynamic only: QC_SHARED(type, name) at the top of a kernel gives a reference
 *     to the block's shared memory as one struct; the launch passes sizeof(type);
 *   - PTX only through kernels/ptx.cuh; 16-bit floats travel as uint16_t (or two in a uint32_t) and
 *     are converted and multiplied by the wrappers there, never by cuda_fp16.h;
 *   - arithmetic that must equal the CPU's bit for bit is written with __fmul_rn, __fadd_rn,
 *     __fmaf_rn, __frcp_rn: files are built with -fmad=false as well;
 *   - no __constant__ or __device__ variables: small tables are constexpr arrays in functions with
 *     compile-time indices, or go to shared memory from macros (quant/quant_values.h);
 *   - helpers are QC_DEVICE, kernels static __global__ in an anonymous namespace. */
#ifndef QC_KERNELS_CUDA_LAUNCH_CUH
#define QC_KERNELS_CUDA_LAUNCH_CUH

#include "base/status.h"
#include "kernels/cuda_device.h"
#include "kernels/cuda_internal.h"

#include <cuda_runtime.h>
#include <stdint.h>

#define QC_DEVICE static __device__ __forceinline__

#ifndef QC_CUDA_SHIM

/* The compute capability, times ten, that the code is compiled for; 0 in host passes. */
#ifdef __CUDA_ARCH__
#define QC_ARCH (__CUDA_ARCH__ / 10)
#else
#define QC_ARCH 0
#endif

#define QC_SHARED(type, name)                                                                      \
    extern __shared__ __align__(128) unsigned char qc_shared_bytes_[];                             \
    type &name = *reinterpret_cast<type *>(qc_shared_bytes_)

/* kernel(...) with dim3 grid and block, dynamic shared memory in bytes, on a stream. Errors are
 * fetched by qc_cuda_launched() of cuda_internal.h. */
#define QC_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)                                  \
    kernel<<<(grid), (block), (shared_bytes), (stream)>>>(__VA_ARGS__)

/* The most blocks of a launch in x and in y. Kernels that may have more to do go on in steps of the
 * grid. */
#define QC_GRID_MOST      0x7fffffffu
#define QC_GRID_ROWS_MOST 65535u

#else
/* QC_ARCH (what QC_SHIM_SM says at run time is asked by the host only; device code is compiled as
 * for the newest), QC_SHARED, QC_LAUNCH and QC_GRID_* of the shim. */
#include <shim_launch.h>
#endif

/* Return how many thread blocks a grid has for so many items, of which one block takes `each`, in
 * x; and for rows in y. */
static inline unsigned qc_cuda_grid_x(uint64_t items, uint64_t each)
{
    uint64_t blocks = items / each + (items % each != 0);
    return blocks < QC_GRID_MOST ? (unsigned)blocks : QC_GRID_MOST;
}

static inline unsigned qc_cuda_grid_y(uint64_t rows)
{
    return rows < QC_GRID_ROWS_MOST ? (unsigned)rows : QC_GRID_ROWS_MOST;
}

static inline bool qc_is_aligned(const void *p, uintptr_t to)
{
    return reinterpret_cast<uintptr_t>(p) % to == 0;
}

/* Returns the least power of two that is not below v, by its exponent. */
static inline uint32_t qc_log2_of(uint32_t v)
{
    uint32_t shift = 0;
    while (shift < 31 && (1u << shift) < v)
        shift++;
    return shift;
}

/* Does QC_LAUNCH and returns the error that it gave. */
template <typename... P, typename... A>
static inline qc_status qc_cuda_start(const char *what, void (*kernel)(P...), dim3 grid, dim3 block,
                                      size_t shared_bytes, qc_cuda_stream s, qc_error *err,
                                      A... args)
{
#ifdef QC_CUDA_SHIM
    qc_shim::launch(what, kernel, grid, block, shared_bytes, s, 0, args...);
#else
    QC_LAUNCH(kernel, grid, block, shared_bytes, s, args...);
#endif
    return qc_cuda_launched(what, err);
}

/* A kernel must ask for more than 48 KB of shared memory. That is cheap, and once per kernel and
 * device is enough. */
template <typename Kernel>
static inline qc_status qc_cuda_allow_shared(Kernel *kernel, size_t bytes, const char *what,
                                             qc_error *err)
{
    if (bytes <= 48u << 10)
        return QC_OK;
    return qc_cuda_check(cudaFuncSetAttribute(reinterpret_cast<const void *>(kernel),
                                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              (int)bytes),
                         what, err);
}

/* A launch that on sm_90 and newer may overlap the end of the kernel before it (ptx.cuh,
 * qc_grid_wait, which the kernel must call); elsewhere it is a launch like any other. Checked. */
template <typename Args>
static inline qc_status qc_cuda_launch_overlapping(void (*kernel)(Args), dim3 grid, dim3 block,
                                                   size_t shared_bytes, qc_cuda_stream s,
                                                   bool overlap, const char *what, qc_error *err,
                                                   const Args &args)
{
#ifdef QC_CUDA_SHIM
    qc_shim::launch(what, kernel, grid, block, shared_bytes, s, overlap, args);
#else
    if (overlap) {
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = grid;
        config.blockDim = block;
        config.dynamicSmemBytes = shared_bytes;
        config.stream = s;
        config.attrs = &attribute;
        config.numAttrs = 1;
        return qc_cuda_check(cudaLaunchKernelEx(&config, kernel, args), what, err);
    }
    QC_LAUNCH(kernel, grid, block, shared_bytes, s, args);
#endif
    return qc_cuda_launched(what, err);
}

/* Gives the most shared memory that a block of the current device can have. */
static inline qc_status qc_cuda_shared_most(size_t *out, const char *what, qc_error *err)
{
    int device = 0, bytes = 0;
    QC_TRY(qc_cuda_check(cudaGetDevice(&device), what, err));
    QC_TRY(qc_cuda_check(
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), what,
        err));
    *out = (size_t)bytes;
    return QC_OK;
}

/* Call it before launching a kernel of which `blocks` blocks are to be resident on a
 * multiprocessor: it does what qc_cuda_allow_shared does and asks for shared memory for as many as
 * there is room for (cuda_internal.h). */
template <typename Kernel>
static inline qc_status qc_cuda_keep_resident(Kernel *kernel, size_t bytes, unsigned blocks,
                                              const char *what, qc_error *err)
{
    QC_TRY(qc_cuda_allow_shared(kernel, bytes, what, err));
    return qc_cuda_carve_out(reinterpret_cast<const void *>(kernel), bytes, blocks, what, err);
}

#endif

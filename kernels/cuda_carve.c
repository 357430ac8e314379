/* Contracts in cuda_carve.h. */
#include "kernels/cuda_carve.h"

#include "kernels/cuda_check.h"

#include <stdatomic.h>

/* Blocks get shared memory in units of this. */
#define UNIT 256u

#define REMEMBERED_BITS 7

unsigned qc_cuda_carve_percent(uint64_t block_bytes, uint64_t reserved_bytes, unsigned blocks,
                               uint64_t all_bytes)
{
    uint64_t each = (block_bytes + reserved_bytes + UNIT - 1) / UNIT * UNIT;
    uint64_t fit = each ? all_bytes / each : 0;
    if (fit > blocks)
        fit = blocks;
    return fit < 2 ? 0 : (unsigned)((100 * fit * each + all_bytes - 1) / all_bytes);
}

static uint64_t mixed(uint64_t v, uint64_t with)
{
    v = (v ^ v >> 32 ^ with) * 0x9e3779b97f4a7c15u;
    return (v ^ v >> 32) * 0xbf58476d1ce4e5b9u;
}

qc_status qc_cuda_carve_out(const void *kernel, size_t block_bytes, unsigned blocks,
                            const char *what, qc_error *err)
{
    /* Each kernel has one place per device, which remembers what it was last asked for with. If two
     * kernels share a place, they are only asked for more often. */
    static _Atomic uint64_t remembered[1u << REMEMBERED_BITS];
    int device = 0, all = 0, reserved = 0;
    QC_TRY(qc_cuda_check(cudaGetDevice(&device), what, err));
    uint64_t key = mixed((uint64_t)(uintptr_t)kernel, (uint64_t)(unsigned)device);
    uint64_t mark = mixed(key, (uint64_t)block_bytes) | 1; /* never 0 */
    _Atomic uint64_t *place = &remembered[key >> (64 - REMEMBERED_BITS)];
    if (atomic_load_explicit(place, memory_order_relaxed) == mark)
        return QC_OK;
    QC_TRY(qc_cuda_check(
        cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device), what,
        err));
    QC_TRY(qc_cuda_check(
        cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device), what,
        err));
    unsigned percent =
        qc_cuda_carve_percent(block_bytes, (uint64_t)reserved, blocks, (uint64_t)all);
    if (percent)
        QC_TRY(qc_cuda_check(cudaFuncSetAttribute(kernel,
                                                  cudaFuncAttributePreferredSharedMemoryCarveout,
                                                  (int)percent),
                             what, err));
    atomic_store_explicit(place, mark, memory_order_relaxed);
    return QC_OK;
}

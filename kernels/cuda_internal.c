#include "kernels/cuda_internal.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

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
    QC_FAIL(err, status_of(code), "CUDA: %s failed: %s (%s)", what, cudaGetErrorString(code),
            cudaGetErrorName(code));
}

qc_status qc_cuda_launched(const char *what, qc_error *err)
{
    return qc_cuda_check(cudaGetLastError(), what, err);
}

/* ---- code of a build ---- */

static int ends_as(const char *end, size_t bytes, const char *word)
{
    return strlen(word) == bytes && memcmp(end, word, bytes) == 0;
}

static int word_runs(const char *word, size_t bytes, unsigned sm)
{
    char *end;
    if (bytes == 0 || *word < '0' || *word > '9')
        return 0;
    unsigned long number = strtoul(word, &end, 10);
    size_t left = bytes - (size_t)(end - word);
    /* Code with the suffix a is for this capability alone; with f it is for its generation from it
     * on. */
    int exactly = left > 0 && *end == 'a', family = left > 0 && *end == 'f';
    if (exactly || family) {
        end++;
        left--;
    }
    int real = left == 0 || ends_as(end, left, "-real");
    int ptx = left == 0 || ends_as(end, left, "-virtual");
    if (exactly)
        return (real || ptx) && sm == number;
    int same = sm >= number && sm / 10 == number / 10;
    return (real && same) || (ptx && (family ? same : sm >= number));
}

int qc_cuda_code_runs(const char *code, unsigned sm)
{
    while (*code) {
        size_t bytes = strcspn(code, " ");
        if (word_runs(code, bytes, sm))
            return 1;
        code += bytes;
        code += strspn(code, " ");
    }
    return 0;
}

/* ---- shared memory ---- */

/* A block gets its shared memory in units of this. */
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

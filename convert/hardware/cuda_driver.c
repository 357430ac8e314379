#include "convert/hardware/cuda_driver.h"

#include "base/alloc.h"
#include "base/text.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* The few things of cuda.h that are needed here. The driver's binary interface is stable. */
typedef int cu_result;
typedef int cu_device;
typedef void *cu_context;
typedef unsigned long long cu_pointer;
#define CU_OUT_OF_MEMORY 2

typedef struct {
    cu_result (*init)(unsigned flags);
    cu_result (*device_count)(int *count);
    cu_result (*device_get)(cu_device *device, int ordinal);
    cu_result (*device_name)(char *name, int len, cu_device device);
    cu_result (*context_retain)(cu_context *context, cu_device device);
    cu_result (*context_release)(cu_device device);
    cu_result (*context_set)(cu_context context);
    cu_result (*memory_info)(size_t *free_bytes, size_t *total_bytes);
    cu_result (*memory_take)(cu_pointer *p, size_t bytes);
    cu_result (*memory_free)(cu_pointer p);
    cu_result (*error_string)(cu_result error, const char **text);
} cu_functions;

struct qc_cuda_driver {
    void *library;
    cu_functions f;
    cu_device device;
    int retained;
    char name[128];
    cu_pointer *taken;
    size_t taken_count, taken_room;
};

static qc_status load(qc_cuda_driver *d, qc_error *err)
{
    static const char *const names[] = {
        "cuInit",          "cuDeviceGetCount",         "cuDeviceGet",
        "cuDeviceGetName", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2",
        "cuCtxSetCurrent", "cuMemGetInfo_v2",          "cuMemAlloc_v2",
        "cuMemFree_v2",    "cuGetErrorString",
    };
    const char *path = getenv("QCONV_LIBCUDA");
    if (!path || !*path)
        path = "libcuda.so.1";
    d->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!d->library)
        QC_FAIL(err, QC_ERR_DEVICE, "the NVIDIA driver was not found: %s cannot be opened", path);
    void *found[sizeof names / sizeof *names];
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        found[i] = dlsym(d->library, names[i]);
        if (!found[i])
            QC_FAIL(err, QC_ERR_DEVICE, "the NVIDIA driver is too old: %s has no %s", path,
                    names[i]);
    }
    _Static_assert(sizeof found == sizeof d->f, "one pointer per name, in order");
    memcpy(&d->f, found, sizeof found); /* C has no cast from void * to a function */
    return QC_OK;
}

static qc_status check(const qc_cuda_driver *d, cu_result r, const char *what, qc_error *err)
{
    const char *text = NULL;
    if (r == 0)
        return QC_OK;
    if (d->f.error_string(r, &text) != 0 || !text)
        text = "unknown error";
    QC_FAIL(err, r == CU_OUT_OF_MEMORY ? QC_ERR_NOMEM : QC_ERR_DEVICE, "%s failed: %s (%d)", what,
            text, r);
}

static qc_status start(qc_cuda_driver *d, int index, qc_error *err)
{
    int count = 0;
    cu_context context = NULL;
    QC_TRY(load(d, err));
    QC_TRY(check(d, d->f.init(0), "starting the CUDA driver", err));
    QC_TRY(check(d, d->f.device_count(&count), "counting GPUs", err));
    if (index < 0 || index >= count)
        QC_FAIL(err, QC_ERR_DEVICE, "there is no cuda:%d; the driver shows %d GPU%s", index, count,
                qc_plural((uint64_t)count));
    QC_TRY(check(d, d->f.device_get(&d->device, index), "opening the GPU", err));
    QC_TRY(
        check(d, d->f.device_name(d->name, (int)sizeof d->name, d->device), "naming the GPU", err));
    d->name[sizeof d->name - 1] = '\0';
    QC_TRY(check(d, d->f.context_retain(&context, d->device), "making a CUDA context", err));
    d->retained = 1;
    return check(d, d->f.context_set(context), "entering the CUDA context", err);
}

qc_status qc_cuda_driver_open(qc_cuda_driver **out, int index, qc_error *err)
{
    void *v = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&v, 1, sizeof(qc_cuda_driver), err));
    qc_cuda_driver *d = v;
    qc_status st = start(d, index, err);
    if (st != QC_OK) {
        qc_cuda_driver_close(d);
        return st;
    }
    *out = d;
    return QC_OK;
}

void qc_cuda_driver_close(qc_cuda_driver *d)
{
    if (!d)
        return;
    for (size_t i = d->taken_count; i > 0; i--)
        (void)d->f.memory_free(d->taken[i - 1]);
    if (d->retained)
        (void)d->f.context_release(d->device);
    if (d->library)
        (void)dlclose(d->library);
    qc_free(d->taken);
    qc_free(d);
}

const char *qc_cuda_driver_gpu(const qc_cuda_driver *d)
{
    return d->name;
}

qc_status qc_cuda_driver_memory(qc_cuda_driver *d, uint64_t *free_bytes, uint64_t *total_bytes,
                                qc_error *err)
{
    size_t f = 0, t = 0;
    QC_TRY(check(d, d->f.memory_info(&f, &t), "asking for the GPU's memory", err));
    *free_bytes = f;
    *total_bytes = t;
    return QC_OK;
}

qc_status qc_cuda_driver_take(qc_cuda_driver *d, uint64_t bytes, qc_error *err)
{
    cu_pointer p = 0;
    if (d->taken_count == d->taken_room) {
        void *v = d->taken;
        size_t room = d->taken_room ? d->taken_room * 2 : 256;
        QC_TRY(qc_realloc_array(&v, room, sizeof *d->taken, err));
        d->taken = v;
        d->taken_room = room;
    }
    QC_TRY(check(d, d->f.memory_take(&p, (size_t)bytes), "taking memory of the GPU", err));
    d->taken[d->taken_count++] = p;
    return QC_OK;
}

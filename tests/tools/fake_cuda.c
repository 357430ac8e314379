/* A CUDA driver for tests: one GPU whose size, context and allocation step come from FAKE_CUDA
 * ("total:context:step" in bytes), that counts what is taken. No GPUs if it is not set. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long pointer;

#define EXPORT __attribute__((visibility("default")))

static unsigned long long total, context, step, used;
static struct {
    pointer at;
    unsigned long long bytes;
} taken[100000];
static unsigned taken_count;

EXPORT int cuInit(unsigned flags);
EXPORT int cuDeviceGetCount(int *count);
EXPORT int cuDeviceGet(int *device, int ordinal);
EXPORT int cuDeviceGetName(char *name, int len, int device);
EXPORT int cuDevicePrimaryCtxRetain(void **out, int device);
EXPORT int cuDevicePrimaryCtxRelease_v2(int device);
EXPORT int cuCtxSetCurrent(void *c);
EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes);
EXPORT int cuMemAlloc_v2(pointer *p, size_t bytes);
EXPORT int cuMemFree_v2(pointer p);
EXPORT int cuGetErrorString(int error, const char **text);

int cuInit(unsigned flags)
{
    const char *text = getenv("FAKE_CUDA");
    char *end = NULL;
    if (text) {
        total = strtoull(text, &end, 10);
        context = *end == ':' ? strtoull(end + 1, &end, 10) : 0;
        step = *end == ':' ? strtoull(end + 1, &end, 10) : 0;
    }
    return flags == 0 && (!text || (step > 0 && *end == '\0')) ? 0 : 1;
}

int cuDeviceGetCount(int *count)
{
    *count = total ? 1 : 0;
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return 0;
}

int cuDeviceGetName(char *name, int len, int device)
{
    return device == 0 && snprintf(name, (size_t)len, "Fake GPU") > 0 ? 0 : 101;
}

int cuDevicePrimaryCtxRetain(void **out, int device)
{
    *out = &total;
    used += context;
    return device == 0 ? 0 : 101;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    if (used != context) {
        (void)fprintf(stderr, "fake CUDA: %llu bytes were not given back\n", used - context);
        abort();
    }
    return device == 0 ? 0 : 101;
}

int cuCtxSetCurrent(void *c)
{
    return c == &total ? 0 : 201;
}

int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    *free_bytes = (size_t)(total - used);
    *total_bytes = (size_t)total;
    return 0;
}

int cuMemAlloc_v2(pointer *p, size_t bytes)
{
    unsigned long long whole = (bytes + step - 1) / step * step;
    if (bytes == 0 || taken_count == sizeof taken / sizeof *taken)
        return 1;
    if (whole > total - used)
        return 2;
    *p = 0x700000000000ull + used;
    taken[taken_count].at = *p;
    taken[taken_count++].bytes = whole;
    used += whole;
    return 0;
}

int cuMemFree_v2(pointer p)
{
    for (unsigned i = taken_count; i > 0; i--) {
        if (taken[i - 1].at != p)
            continue;
        used -= taken[i - 1].bytes;
        taken[i - 1] = taken[--taken_count];
        return 0;
    }
    return 1;
}

int cuGetErrorString(int error, const char **text)
{
    *text = error == 2 ? "out of memory" : "some error";
    return 0;
}

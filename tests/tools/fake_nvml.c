/* A stand-in for libnvidia-ml.so.1 whose GPUs come from the environment, for QCONV_NVML.
 *
 *   FAKE_NVML_GPUS       GPUs with ';' between: NAME,UUID,SM,TOTAL,USED[,WIDTH,CLOCK]
 *                        (bytes, bits, MHz)
 *   FAKE_NVML_INIT       what nvmlInit_v2 returns
 *   FAKE_NVML_PEERS      pairs that reach each other: "0-1;2-3"
 *   FAKE_NVML_LOSE       GPU@N: that GPU is lost from its N-th look at memory on (0: at once)
 *
 * Built with FAKE_NVML_OLD it lacks what qconv calls optional. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT(type, name, parameters)                                                             \
    __attribute__((visibility("default"))) type name parameters;                                   \
    type name parameters

enum { OK = 0, INVALID = 2, NOT_FOUND = 6, LOST = 15, MOST_GPUS = 70 };

typedef struct {
    unsigned index;
} device;

typedef struct {
    unsigned long long total, free, used;
} memory_info;

static device devices[MOST_GPUS];
static unsigned long long looks[MOST_GPUS];

/* Start of part `at` of a list, or NULL. */
static const char *part(const char *list, char separator, unsigned at)
{
    const char *p = list && *list ? list : NULL;
    while (p && at-- > 0) {
        p = strchr(p, separator);
        if (p)
            p++;
    }
    return p;
}

static unsigned long long number(const char *text)
{
    return text ? strtoull(text, NULL, 10) : 0;
}

/* Field `at` of GPU `gpu`: a pointer into the environment, ended by ',', ';' or the end. */
static const char *field(unsigned gpu, unsigned at)
{
    const char *g = part(getenv("FAKE_NVML_GPUS"), ';', gpu);
    const char *end = g ? g + strcspn(g, ";") : NULL;
    const char *f = part(g, ',', at);
    return f && f <= end ? f : NULL;
}

static void copy(char *out, unsigned bytes, const char *from)
{
    snprintf(out, bytes, "%.*s", from ? (int)strcspn(from, ",;") : 0, from ? from : "");
}

static int is_lost(unsigned gpu)
{
    const char *text = getenv("FAKE_NVML_LOSE");
    const char *at = text ? strchr(text, '@') : NULL;
    return at && number(text) == gpu && looks[gpu] >= number(at + 1);
}

EXPORT(int, nvmlInit_v2, (void))
{
    return (int)number(getenv("FAKE_NVML_INIT"));
}

EXPORT(int, nvmlShutdown, (void))
{
    return OK;
}

EXPORT(const char *, nvmlErrorString, (int r))
{
    return r == LOST ? "GPU is lost" : r == 9 ? "Driver Not Loaded" : "some error";
}

EXPORT(int, nvmlDeviceGetCount_v2, (unsigned *count))
{
    *count = 0;
    while (part(getenv("FAKE_NVML_GPUS"), ';', *count))
        ++*count;
    return OK;
}

EXPORT(int, nvmlDeviceGetHandleByIndex_v2, (unsigned index, void **out))
{
    if (!part(getenv("FAKE_NVML_GPUS"), ';', index) || index >= MOST_GPUS)
        return NOT_FOUND;
    if (is_lost(index))
        return LOST;
    devices[index].index = index;
    *out = &devices[index];
    return OK;
}

EXPORT(int, nvmlDeviceGetName, (void *d, char *name, unsigned bytes))
{
    copy(name, bytes, field(((device *)d)->index, 0));
    return OK;
}

EXPORT(int, nvmlDeviceGetMemoryInfo, (void *d, memory_info *m))
{
    unsigned gpu = ((device *)d)->index;
    if (is_lost(gpu))
        return LOST;
    m->total = number(field(gpu, 3));
    m->used = number(field(gpu, 4));
    m->free = m->total - m->used;
    looks[gpu]++;
    return OK;
}

#ifndef FAKE_NVML_OLD
EXPORT(int, nvmlSystemGetDriverVersion, (char *version, unsigned bytes))
{
    copy(version, bytes, "999.1");
    return OK;
}

EXPORT(int, nvmlDeviceGetUUID, (void *d, char *uuid, unsigned bytes))
{
    copy(uuid, bytes, field(((device *)d)->index, 1));
    return OK;
}

EXPORT(int, nvmlDeviceGetCudaComputeCapability, (void *d, int *major, int *minor))
{
    unsigned sm = (unsigned)number(field(((device *)d)->index, 2));
    *major = (int)(sm / 10);
    *minor = (int)(sm % 10);
    return OK;
}

EXPORT(int, nvmlDeviceGetMemoryBusWidth, (void *d, unsigned *bits))
{
    *bits = (unsigned)number(field(((device *)d)->index, 5));
    return *bits ? OK : 3;
}

EXPORT(int, nvmlDeviceGetMaxClockInfo, (void *d, int which, unsigned *megahertz))
{
    *megahertz = (unsigned)number(field(((device *)d)->index, 6));
    return which == 2 ? OK : INVALID;
}

EXPORT(int, nvmlDeviceGetP2PStatus, (void *a, void *b, int which, int *status))
{
    unsigned x = ((device *)a)->index, y = ((device *)b)->index;
    const char *p;
    (void)which;
    *status = 1;
    for (unsigned i = 0; (p = part(getenv("FAKE_NVML_PEERS"), ';', i)); i++) {
        unsigned long long l = number(p), r = number(strchr(p, '-') ? strchr(p, '-') + 1 : p);
        if ((l == x && r == y) || (l == y && r == x))
            *status = 0;
    }
    return OK;
}
#endif

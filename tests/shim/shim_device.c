/* The devices of the shim: which there are, what they can do, the last error of each thread, and
 * the knobs of shim_control.h. */
#include "shim_internal.h"

#include <ctype.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DRIVER = 13000, OLD_DRIVER = 10020, MOST_FUNCTIONS = 4096, GRID_MOST = 0x7fffffff };
enum { DEFAULT_SHARED = 48 << 10 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static qc_shim_device devices[QC_SHIM_MAX_DEVICES];
static int device_count, no_driver, old_driver;
static qc_shim_order order = {QC_SHIM_SHUFFLE, 1};
static qc_shim_stream_kind streams_kind;
static uint64_t streams_random;
static unsigned grid_most = GRID_MOST;
static int any_memory;                          /* what is not the shim's counts as pinned */
static unsigned compiled_for;                   /* 0: for the device's own */
static unsigned failing_malloc, failing_launch; /* calls left; the last one fails */
static struct named_launch {
    const char *name; /* a part of it, or NULL for none */
    size_t length;
    unsigned left;
} refused, skipped, deadly;
static atomic_int dead;
/* The attributes that kernels were given on a device. */
static struct {
    const void *function;
    int device;
    size_t shared_bytes; /* the most that a block may have */
    int carveout;        /* in percent; -1 leaves the choice to the driver */
} attributes[MOST_FUNCTIONS];
static unsigned attributes_count;
static int last_carveout = -1;

static __thread cudaError_t last_error;
static __thread int current;

/* ---- configuration --------------------------------------------------------------------------- */

static void shared_sizes(qc_shim_device *d)
{
    /* From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", in
     * KB. */
    static const struct {
        unsigned sm, multiprocessor, block;
    } table[] = {{70, 96, 96},    {72, 96, 96},   {75, 64, 64},   {80, 164, 163},  {86, 100, 99},
                 {87, 164, 163},  {89, 100, 99},  {90, 228, 227}, {100, 228, 227}, {103, 228, 227},
                 {110, 228, 227}, {120, 100, 99}, {121, 100, 99}};
    for (size_t i = 0; i < sizeof(table) / sizeof(*table); i++)
        if (table[i].sm == d->sm) {
            d->shared_sm_bytes = (size_t)table[i].multiprocessor << 10;
            d->shared_optin_bytes = (size_t)table[i].block << 10;
            return;
        }
    qc_shim_fault("QC_SHIM_DEVICES: sm_%u is not known", d->sm);
}

/* Goes `skip` characters on and reads a number. Returns 0 if there is none. */
static int read_number(const char **at, size_t skip, uint64_t *out)
{
    if (!isdigit((unsigned char)(*at)[skip]))
        return 0;
    char *end;
    *out = strtoull(*at + skip, &end, 10);
    *at = end;
    return 1;
}

static void parse_devices(const char *text)
{
    old_driver = !strcmp(text, "olddriver");
    no_driver = old_driver || !strcmp(text, "nodriver");
    device_count = 0;
    if (no_driver || !strcmp(text, "none") || !*text)
        return;
    for (const char *at = text;;) {
        qc_shim_device d = {0};
        uint64_t sm = 0, multiprocessors = 0, size = 0;
        if (device_count == QC_SHIM_MAX_DEVICES || strncmp(at, "sm_", 3) ||
            !read_number(&at, 3, &sm) || *at != ':' || !read_number(&at, 1, &multiprocessors) ||
            *at != ':' || !read_number(&at, 1, &size))
            qc_shim_fault("QC_SHIM_DEVICES: not understood: %s", text);
        int shift = *at == 'G' ? 30 : *at == 'M' ? 20 : *at == 'K' ? 10 : 0;
        if (!shift || strncmp(at + 1, "iB", 2))
            qc_shim_fault("QC_SHIM_DEVICES: sizes are in KiB, MiB or GiB: %s", text);
        at += 3;
        d.sm = (unsigned)sm;
        d.multiprocessors = (unsigned)multiprocessors;
        d.memory_bytes = size << shift;
        shared_sizes(&d);
        devices[device_count++] = d;
        if (!*at)
            return;
        if (*at++ != ',')
            qc_shim_fault("QC_SHIM_DEVICES: not understood: %s", text);
    }
}

/* Whether text is "word" or "word:number". */
static int is_word(const char *text, const char *word, uint64_t *number)
{
    size_t n = strlen(word);
    if (strncmp(text, word, n))
        return 0;
    if (!text[n])
        return 1;
    char *end;
    if (text[n] != ':' || !isdigit((unsigned char)text[n + 1]))
        return 0;
    *number = strtoull(text + n + 1, &end, 10);
    return !*end;
}

static void parse_order(const char *text)
{
    uint64_t seed = 1;
    if (!strcmp(text, "forward"))
        order.kind = QC_SHIM_FORWARD;
    else if (!strcmp(text, "reverse"))
        order.kind = QC_SHIM_REVERSE;
    else if (is_word(text, "shuffle", &seed))
        order.kind = QC_SHIM_SHUFFLE;
    else
        qc_shim_fault("QC_SHIM_ORDER: forward, reverse or shuffle:SEED, not %s", text);
    order.seed = seed;
}

static void parse_streams(const char *text)
{
    uint64_t seed = 1;
    if (!strcmp(text, "lazy"))
        streams_kind = QC_SHIM_LAZY;
    else if (!strcmp(text, "eager"))
        streams_kind = QC_SHIM_EAGER;
    else if (is_word(text, "shuffle", &seed))
        streams_kind = QC_SHIM_MIXED;
    else
        qc_shim_fault("QC_SHIM_STREAMS: lazy, eager or shuffle:SEED, not %s", text);
    streams_random = seed;
}

static void parse_grid(const char *text)
{
    uint64_t n = 0;
    const char *at = text;
    if (!read_number(&at, 0, &n) || *at || n < 1 || n > GRID_MOST)
        qc_shim_fault("QC_SHIM_GRID: not understood: %s", text);
    grid_most = (unsigned)n;
}

static void parse_launch(struct named_launch *l, const char *variable)
{
    uint64_t n = 0;
    const char *text = getenv(variable), *at = text ? strchr(text, ':') : NULL;
    if (!text)
        return;
    *l = (struct named_launch){text, at ? (size_t)(at++ - text) : 0, 0};
    if (!at || !read_number(&at, 0, &n) || *at || n < 1 || n > GRID_MOST)
        qc_shim_fault("%s: NAME:N, not %s", variable, text);
    l->left = (unsigned)n;
}

static void configure(void)
{
    const char *text = getenv("QC_SHIM_DEVICES");
    parse_devices(text ? text : "sm_90:132:4GiB");
    if ((text = getenv("QC_SHIM_ORDER")))
        parse_order(text);
    if ((text = getenv("QC_SHIM_STREAMS")))
        parse_streams(text);
    if ((text = getenv("QC_SHIM_GRID")))
        parse_grid(text);
    parse_launch(&refused, "QC_SHIM_FAIL_LAUNCH");
    parse_launch(&skipped, "QC_SHIM_SKIP");
    parse_launch(&deadly, "QC_SHIM_DIE_AT");
    if ((text = getenv("QC_SHIM_FAIL_MALLOC")))
        failing_malloc = (unsigned)strtoul(text, NULL, 10);
    if ((text = getenv("QC_SHIM_CODE")))
        compiled_for = (unsigned)strtoul(text, NULL, 10);
    if ((text = getenv("QC_SHIM_MEMORY"))) {
        any_memory = strcmp(text, "any") == 0;
        if (!any_memory)
            qc_shim_fault("QC_SHIM_MEMORY: any, not %s", text);
    }
}

static void begin(void)
{
    pthread_once(&once, configure);
}

void qc_shim_set_devices(const char *text)
{
    begin();
    if (qc_shim_allocations(NULL) || qc_shim_streams_exist())
        qc_shim_fault("qc_shim_set_devices while memory or streams of the old ones exist");
    pthread_mutex_lock(&lock);
    parse_devices(text);
    /* Carve-outs stay, because the kernels do not ask again for what they asked for. */
    for (unsigned i = 0; i < attributes_count; i++)
        attributes[i].shared_bytes = DEFAULT_SHARED;
    pthread_mutex_unlock(&lock);
    current = 0;
    last_error = cudaSuccess;
}

void qc_shim_set_order(const char *text)
{
    begin();
    pthread_mutex_lock(&lock);
    parse_order(text);
    pthread_mutex_unlock(&lock);
}

void qc_shim_set_streams(const char *text)
{
    begin();
    pthread_mutex_lock(&lock);
    parse_streams(text);
    pthread_mutex_unlock(&lock);
}

static void set_count(unsigned *counter, unsigned n)
{
    begin();
    pthread_mutex_lock(&lock);
    *counter = n;
    pthread_mutex_unlock(&lock);
}

void qc_shim_set_grid(unsigned most)
{
    set_count(&grid_most, most && most < GRID_MOST ? most : GRID_MOST);
}

void qc_shim_set_code(unsigned sm)
{
    set_count(&compiled_for, sm);
}

int qc_shim_takes_any_memory(void)
{
    begin();
    return any_memory;
}

unsigned qc_shim_code_of(int device)
{
    begin();
    pthread_mutex_lock(&lock);
    unsigned sm = compiled_for ? compiled_for : devices[device].sm;
    pthread_mutex_unlock(&lock);
    return sm;
}

unsigned qc_shim_grid_most(void)
{
    begin();
    pthread_mutex_lock(&lock);
    unsigned most = grid_most;
    pthread_mutex_unlock(&lock);
    return most;
}

void qc_shim_fail_malloc(unsigned n)
{
    set_count(&failing_malloc, n);
}

void qc_shim_fail_launch(unsigned n)
{
    set_count(&failing_launch, n);
}

unsigned qc_shim_shared_begin = 1024;

void qc_shim_set_shared_begin(unsigned bytes)
{
    qc_shim_shared_begin = bytes;
}

static int fails_now(unsigned *counter)
{
    begin();
    pthread_mutex_lock(&lock);
    int now = *counter && !--*counter;
    pthread_mutex_unlock(&lock);
    return now;
}

int qc_shim_malloc_fails(void)
{
    return fails_now(&failing_malloc);
}

static int is_named(const struct named_launch *l, const char *name)
{
    for (; l->name && strlen(name) >= l->length; name++)
        if (!strncmp(name, l->name, l->length))
            return 1;
    return 0;
}

cudaError_t qc_shim_launch_error(const char *name)
{
    if (is_named(&deadly, name) && fails_now(&deadly.left))
        dead = 1;
    if (dead)
        return cudaErrorIllegalAddress;
    return fails_now(&failing_launch) || (is_named(&refused, name) && fails_now(&refused.left))
               ? cudaErrorLaunchOutOfResources
               : cudaSuccess;
}

int qc_shim_launch_skipped(const char *name)
{
    if (!is_named(&skipped, name))
        return 0;
    pthread_mutex_lock(&lock);
    int now = skipped.left <= 1;
    skipped.left -= !now;
    pthread_mutex_unlock(&lock);
    return now;
}

int qc_shim_is_dead(void)
{
    return dead;
}

qc_shim_order qc_shim_get_order(void)
{
    begin();
    pthread_mutex_lock(&lock);
    qc_shim_order o = order;
    pthread_mutex_unlock(&lock);
    return o;
}

qc_shim_stream_kind qc_shim_get_streams(uint64_t *random)
{
    begin();
    pthread_mutex_lock(&lock);
    qc_shim_stream_kind kind = streams_kind;
    *random = kind == QC_SHIM_MIXED ? qc_shim_random(&streams_random) : 0;
    pthread_mutex_unlock(&lock);
    return kind;
}

/* ---- errors ---------------------------------------------------------------------------------- */

cudaError_t qc_shim_error(cudaError_t code)
{
    if (code != cudaSuccess)
        last_error = code;
    return code;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t code = last_error;
    last_error = cudaSuccess;
    return code;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

#define ERRORS(X)                                                                                  \
    X(cudaSuccess, "no error")                                                                     \
    X(cudaErrorInvalidValue, "invalid argument")                                                   \
    X(cudaErrorMemoryAllocation, "out of memory")                                                  \
    X(cudaErrorInvalidConfiguration, "invalid configuration argument")                             \
    X(cudaErrorInvalidMemcpyDirection, "invalid copy direction for memcpy")                        \
    X(cudaErrorInsufficientDriver, "CUDA driver version is insufficient for CUDA runtime version") \
    X(cudaErrorNoDevice, "no CUDA-capable device is detected")                                     \
    X(cudaErrorInvalidDevice, "invalid device ordinal")                                            \
    X(cudaErrorInvalidResourceHandle, "invalid resource handle")                                   \
    X(cudaErrorNotReady, "device not ready")                                                       \
    X(cudaErrorLaunchOutOfResources, "too many resources requested for launch")                    \
    X(cudaErrorIllegalAddress, "an illegal memory access was encountered")                         \
    X(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing")       \
    X(cudaErrorIllegalState, "the operation cannot be performed in the present state")

const char *cudaGetErrorName(cudaError_t error)
{
#define NAME(name, words)                                                                          \
    if (error == name)                                                                             \
        return #name;
    ERRORS(NAME)
#undef NAME
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
#define WORDS(name, words)                                                                         \
    if (error == name)                                                                             \
        return words;
    ERRORS(WORDS)
#undef WORDS
    return "unrecognized error code";
}

/* ---- devices --------------------------------------------------------------------------------- */

const qc_shim_device *qc_shim_device_of(int device)
{
    begin();
    return &devices[device];
}

static cudaError_t any_device(void)
{
    begin();
    return no_driver ? cudaErrorInsufficientDriver : device_count ? cudaSuccess : cudaErrorNoDevice;
}

static cudaError_t is_device(int device)
{
    cudaError_t e = any_device();
    if (e)
        return e;
    return device >= 0 && device < device_count ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t qc_shim_current(int *device)
{
    cudaError_t e = any_device();
    if (e)
        return qc_shim_error(e);
    *device = current;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    begin();
    *version = old_driver ? OLD_DRIVER : no_driver ? 0 : DRIVER;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    begin();
    *count = device_count;
    return qc_shim_error(any_device());
}

cudaError_t cudaGetDevice(int *device)
{
    return qc_shim_current(device);
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t e = is_device(device);
    if (!e)
        current = device;
    return qc_shim_error(e);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *prop, int device)
{
    cudaError_t e = is_device(device);
    if (e)
        return qc_shim_error(e);
    const qc_shim_device *d = &devices[device];
    *prop = (struct cudaDeviceProp){
        .totalGlobalMem = d->memory_bytes,
        .sharedMemPerBlock = 48u << 10,
        .sharedMemPerBlockOptin = d->shared_optin_bytes,
        .sharedMemPerMultiprocessor = d->shared_sm_bytes,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {2147483647, 65535, 65535},
        .major = (int)(d->sm / 10),
        .minor = (int)(d->sm % 10),
        .multiProcessorCount = (int)d->multiprocessors,
        .maxThreadsPerMultiProcessor = d->sm == 75                                  ? 1024
                                       : (d->sm > 80 && d->sm < 90) || d->sm >= 110 ? 1536
                                                                                    : 2048,
        .maxBlocksPerMultiProcessor = d->sm == 75 || (d->sm > 80 && d->sm < 89) ? 16
                                      : d->sm == 89 || d->sm >= 110             ? 24
                                                                                : 32,
        .pciBusID = device + 1,
        .memoryBusWidth = 5120,
        .l2CacheSize = d->sm >= 80 ? 40 << 20 : 6 << 20,
        .asyncEngineCount = 2,
        .concurrentKernels = 1,
    };
    snprintf(prop->name, sizeof(prop->name), "CPU shim sm_%u", d->sm);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    struct cudaDeviceProp p;
    cudaError_t e = cudaGetDeviceProperties(&p, device);
    if (e)
        return e;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
        *value = p.maxThreadsPerBlock;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
        *value = (int)p.sharedMemPerBlock;
        break;
    case cudaDevAttrWarpSize:
        *value = p.warpSize;
        break;
    case cudaDevAttrClockRate:
        *value = 1000000;
        break;
    case cudaDevAttrMultiProcessorCount:
        *value = p.multiProcessorCount;
        break;
    case cudaDevAttrPciBusId:
        *value = p.pciBusID;
        break;
    case cudaDevAttrPciDeviceId:
        *value = p.pciDeviceID;
        break;
    case cudaDevAttrMemoryClockRate:
        *value = 1000000;
        break;
    case cudaDevAttrGlobalMemoryBusWidth:
        *value = p.memoryBusWidth;
        break;
    case cudaDevAttrL2CacheSize:
        *value = p.l2CacheSize;
        break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
        *value = p.maxThreadsPerMultiProcessor;
        break;
    case cudaDevAttrPciDomainId:
        *value = p.pciDomainID;
        break;
    case cudaDevAttrComputeCapabilityMajor:
        *value = p.major;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = p.minor;
        break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)p.sharedMemPerMultiprocessor;
        break;
    case cudaDevAttrMaxRegistersPerMultiprocessor:
        *value = p.regsPerMultiprocessor;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = (int)p.sharedMemPerBlockOptin;
        break;
    case cudaDevAttrReservedSharedMemoryPerBlock:
        *value = devices[device].sm >= 80 ? 1024 : 0;
        break;
    default:
        return qc_shim_error(cudaErrorInvalidValue);
    }
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int device)
{
    cudaError_t e = is_device(device);
    if (e)
        return qc_shim_error(e);
    if (bytes < 13)
        return qc_shim_error(cudaErrorInvalidValue);
    snprintf(text, (size_t)bytes, "0000:%02X:00.0", (unsigned)device + 1);
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    *total_bytes = devices[device].memory_bytes;
    *free_bytes = *total_bytes - qc_shim_memory_used(device);
    return cudaSuccess;
}

/* ---- functions ------------------------------------------------------------------------------- */

/* The place of a kernel's attributes, or the first free one. The caller holds the lock. */
static unsigned find_attributes(const void *function, int device)
{
    unsigned i = 0;
    while (i < attributes_count &&
           (attributes[i].function != function || attributes[i].device != device))
        i++;
    return i;
}

size_t qc_shim_shared_limit(const void *function, int device)
{
    pthread_mutex_lock(&lock);
    unsigned i = find_attributes(function, device);
    size_t bytes = i < attributes_count ? attributes[i].shared_bytes : DEFAULT_SHARED;
    pthread_mutex_unlock(&lock);
    return bytes;
}

void qc_shim_note_launch(const void *function, int device)
{
    pthread_mutex_lock(&lock);
    unsigned i = find_attributes(function, device);
    last_carveout = i < attributes_count ? attributes[i].carveout : -1;
    pthread_mutex_unlock(&lock);
}

int qc_shim_last_carveout(void)
{
    pthread_mutex_lock(&lock);
    int percent = last_carveout;
    pthread_mutex_unlock(&lock);
    return percent;
}

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    if (!function)
        return qc_shim_error(cudaErrorInvalidDeviceFunction);
    int carves = attribute == cudaFuncAttributePreferredSharedMemoryCarveout;
    if (carves ? value < -1 || value > 100
               : attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
                     (size_t)value > devices[device].shared_optin_bytes)
        return qc_shim_error(cudaErrorInvalidValue);
    pthread_mutex_lock(&lock);
    unsigned i = find_attributes(function, device);
    if (i == MOST_FUNCTIONS)
        qc_shim_fault("more than %d kernels with an attribute", MOST_FUNCTIONS);
    if (i == attributes_count) {
        attributes_count++;
        attributes[i].function = function;
        attributes[i].device = device;
        attributes[i].shared_bytes = DEFAULT_SHARED;
        attributes[i].carveout = -1;
    }
    if (carves)
        attributes[i].carveout = value;
    else
        attributes[i].shared_bytes = (size_t)value;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function)
{
    int device;
    cudaError_t e = qc_shim_current(&device);
    if (e)
        return e;
    if (!function)
        return qc_shim_error(cudaErrorInvalidDeviceFunction);
    *out = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .ptxVersion = (int)qc_shim_code_of(device),
        .binaryVersion = (int)devices[device].sm,
        .maxDynamicSharedSizeBytes = (int)qc_shim_shared_limit(function, device),
    };
    return cudaSuccess;
}

void qc_shim_check_argument(const char *kernel, unsigned index, const void *p)
{
    const void *base;
    size_t bytes;
    if (!p || any_device())
        return;
    int owner = qc_shim_memory_owner(p, &base, &bytes);
    if (owner == QC_SHIM_UNKNOWN)
        qc_shim_fault("argument %u of kernel %s is no memory of the device or pinned", index,
                      kernel);
    if (owner != QC_SHIM_HOST && owner != current)
        qc_shim_fault(
            "argument %u of kernel %s is memory of device %d; the kernel goes to device %d", index,
            kernel, owner, current);
}

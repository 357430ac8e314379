#include "convert/hardware/nvml_gpu.h"

#include "base/alloc.h"
#include "base/open_library.h"

/* ---- what is used of NVML's interface ---- */

typedef void *nvml_device;
typedef int nvml_return;

enum {
    NVML_OK = 0,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_CLOCK_MEMORY = 2,
    NVML_P2P_READ = 0,
    NVML_P2P_WRITE = 1,
    NVML_P2P_STATUS_OK = 0
};

typedef struct {
    unsigned long long total, free, used;
} nvml_memory;

/* X(member, name, parameters); the first ones are needed */
#define NVML_NEEDED 6
#define NVML_FUNCTIONS(X)                                                                          \
    X(init, "nvmlInit_v2", (void))                                                                 \
    X(shutdown, "nvmlShutdown", (void))                                                            \
    X(count, "nvmlDeviceGetCount_v2", (unsigned *))                                                \
    X(handle, "nvmlDeviceGetHandleByIndex_v2", (unsigned, nvml_device *))                          \
    X(name, "nvmlDeviceGetName", (nvml_device, char *, unsigned))                                  \
    X(memory, "nvmlDeviceGetMemoryInfo", (nvml_device, nvml_memory *))                             \
    X(uuid, "nvmlDeviceGetUUID", (nvml_device, char *, unsigned))                                  \
    X(capability, "nvmlDeviceGetCudaComputeCapability", (nvml_device, int *, int *))               \
    X(bus_width, "nvmlDeviceGetMemoryBusWidth", (nvml_device, unsigned *))                         \
    X(max_clock, "nvmlDeviceGetMaxClockInfo", (nvml_device, int, unsigned *))                      \
    X(p2p, "nvmlDeviceGetP2PStatus", (nvml_device, nvml_device, int, int *))                       \
    X(driver, "nvmlSystemGetDriverVersion", (char *, unsigned))

typedef struct {
#define NVML_MEMBER(member, name, parameters) nvml_return(*member) parameters;
    NVML_FUNCTIONS(NVML_MEMBER)
#undef NVML_MEMBER
    const char *(*error_text)(nvml_return);
} functions;

static const char *const function_names[] = {
#define NVML_NAME(member, name, parameters) name,
    NVML_FUNCTIONS(NVML_NAME)
#undef NVML_NAME
        "nvmlErrorString"};
_Static_assert(sizeof function_names == sizeof(functions), "one pointer per name, in order");

struct qc_nvml {
    void *library;
    functions f;
    int started; /* nvmlInit succeeded */
    unsigned gpu_count;
    char driver_version[QC_NVML_TEXT_BYTES];
};

static const char *text_of(const qc_nvml *n, nvml_return r)
{
    const char *text = n->f.error_text ? n->f.error_text(r) : NULL;
    return text && *text ? text : "no reason given";
}

static qc_status load(qc_nvml *n, qc_error *err)
{
    const qc_library nvml = {
        .variable = "QCONV_NVML",
        .files = (const char *const[]){"libnvidia-ml.so.1", NULL},
        .function_names = function_names,
        .function_count = sizeof function_names / sizeof *function_names,
        .needed_count = NVML_NEEDED,
        .missing = QC_ERR_DEVICE,
        .title = "the NVIDIA driver was not found",
        .no_file = {"", " cannot be opened"},
        .none = "libnvidia-ml.so.1 cannot be opened",
        .no_function = {"the NVIDIA driver is too old: ", " has no ", ""},
    };
    return qc_library_open(&n->library, &n->f, &nvml, err);
}

static qc_status start(qc_nvml *n, qc_error *err)
{
    nvml_return r = n->f.init();
    if (r != NVML_OK)
        QC_FAIL(err, QC_ERR_DEVICE, "the NVIDIA driver does not answer: %s", text_of(n, r));
    n->started = 1;
    r = n->f.count(&n->gpu_count);
    if (r != NVML_OK)
        QC_FAIL(err, QC_ERR_DEVICE, "the NVIDIA driver does not count its GPUs: %s", text_of(n, r));
    if (n->f.driver &&
        n->f.driver(n->driver_version, (unsigned)sizeof n->driver_version) != NVML_OK)
        n->driver_version[0] = '\0';
    return QC_OK;
}

qc_status qc_nvml_open(qc_nvml **out, qc_error *err)
{
    void *p = NULL;
    *out = NULL;
    QC_TRY(qc_calloc(&p, 1, sizeof(qc_nvml), err));
    qc_nvml *n = p;
    qc_status st = load(n, err);
    if (st == QC_OK)
        st = start(n, err);
    if (st != QC_OK) {
        qc_nvml_close(n);
        return st;
    }
    *out = n;
    return QC_OK;
}

void qc_nvml_close(qc_nvml *n)
{
    if (!n)
        return;
    if (n->started)
        (void)n->f.shutdown();
    qc_library_close(n->library);
    qc_free(n);
}

unsigned qc_nvml_count(const qc_nvml *n)
{
    return n->gpu_count;
}

const char *qc_nvml_driver(const qc_nvml *n)
{
    return n->driver_version;
}

/* ---- one GPU ---- */

/* We ask for a handle each time, because a GPU that was lost then says so. */
static qc_status handle_of(qc_nvml *n, unsigned gpu, nvml_device *out, qc_error *err)
{
    nvml_return r = n->f.handle(gpu, out);
    if (r != NVML_OK)
        QC_FAIL(err, QC_ERR_DEVICE, "GPU %u of the driver does not answer: %s", gpu, text_of(n, r));
    return QC_OK;
}

qc_status qc_nvml_read_facts(qc_nvml *n, unsigned gpu, qc_nvml_facts *out, qc_error *err)
{
    nvml_device d;
    int major = 0, minor = 0;
    unsigned bits = 0, megahertz = 0;
    *out = (qc_nvml_facts){.sm = 0};
    QC_TRY(handle_of(n, gpu, &d, err));
    nvml_return r = n->f.name(d, out->name, (unsigned)sizeof out->name);
    if (r != NVML_OK)
        QC_FAIL(err, QC_ERR_DEVICE, "GPU %u of the driver has no name: %s", gpu, text_of(n, r));
    if (!n->f.uuid || n->f.uuid(d, out->uuid, (unsigned)sizeof out->uuid) != NVML_OK)
        out->uuid[0] = '\0';
    if (n->f.capability && n->f.capability(d, &major, &minor) == NVML_OK && major > 0 && minor >= 0)
        out->sm = (unsigned)major * 10 + (unsigned)minor;
    /* There are two transfers in a clock cycle, as CUDA's deviceQuery counts. */
    if (n->f.bus_width && n->f.max_clock && n->f.bus_width(d, &bits) == NVML_OK &&
        n->f.max_clock(d, NVML_CLOCK_MEMORY, &megahertz) == NVML_OK)
        out->bandwidth = 2.0 * megahertz * 1e6 * (bits / 8.0);
    return QC_OK;
}

qc_status qc_nvml_read_memory(qc_nvml *n, unsigned gpu, qc_nvml_memory *out, qc_error *err)
{
    nvml_device d;
    nvml_memory m = {0, 0, 0};
    QC_TRY(handle_of(n, gpu, &d, err));
    nvml_return r = n->f.memory(d, &m);
    if (r != NVML_OK)
        QC_FAIL(err, QC_ERR_DEVICE, "GPU %u of the driver does not tell its memory: %s", gpu,
                text_of(n, r));
    out->total_bytes = m.total;
    out->used_bytes = m.used;
    out->free_bytes = m.free;
    return QC_OK;
}

int qc_nvml_peer(qc_nvml *n, unsigned a, unsigned b)
{
    nvml_device da, db;
    int reads = -1, writes = -1;
    if (!n->f.p2p || n->f.handle(a, &da) != NVML_OK || n->f.handle(b, &db) != NVML_OK ||
        n->f.p2p(da, db, NVML_P2P_READ, &reads) != NVML_OK ||
        n->f.p2p(da, db, NVML_P2P_WRITE, &writes) != NVML_OK)
        return -1;
    return reads == NVML_P2P_STATUS_OK && writes == NVML_P2P_STATUS_OK;
}

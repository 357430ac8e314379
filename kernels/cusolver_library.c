/* cuSOLVER by dlopen. A row-major upper triangle is a column-major lower one, so cuSOLVER is asked
 * for L; the rows of right-hand sides are its columns. */
#include "kernels/cuda_library.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <stdio.h>

/* The few values of cusolverDn.h and library_types.h that are needed; CUDA 11, 12 and 13 have the
 * same. */
enum { FILL_LOWER = 0, TYPE_64F = 1, DETERMINISTIC = 1, NO_MEMORY = 2 };
typedef struct cusolverDnContext *handle_t;
typedef struct cusolverDnParams *params_t;

#define INFO_BYTES 256u /* of device memory, for an int */

typedef struct {
    int (*create)(handle_t *h);
    int (*destroy)(handle_t h);
    int (*set_stream)(handle_t h, qc_cuda_stream s);
    int (*create_params)(params_t *p);
    int (*destroy_params)(params_t p);
    int (*factor_bytes)(handle_t h, params_t p, int uplo, int64_t n, int a_type, const void *a,
                        int64_t lda, int compute_type, size_t *device_bytes, size_t *host_bytes);
    int (*factor)(handle_t h, params_t p, int uplo, int64_t n, int a_type, void *a, int64_t lda,
                  int compute_type, void *device, size_t device_bytes, void *host,
                  size_t host_bytes, int *info);
    int (*solve)(handle_t h, params_t p, int uplo, int64_t n, int64_t count, int a_type,
                 const void *a, int64_t lda, int b_type, void *b, int64_t ldb, int *info);
    int (*get_version)(int *version);
    /* NULL before CUDA 12.2; asks for the same bits from run to run */
    int (*set_deterministic)(handle_t h, int mode);
} functions;

static const char *const function_names[] = {
    "cusolverDnCreate",        "cusolverDnDestroy",
    "cusolverDnSetStream",     "cusolverDnCreateParams",
    "cusolverDnDestroyParams", "cusolverDnXpotrf_bufferSize",
    "cusolverDnXpotrf",        "cusolverDnXpotrs",
    "cusolverGetVersion",      "cusolverDnSetDeterministicMode",
};

struct qc_cusolver {
    void *library;
    functions f;
    handle_t handle;
    params_t params;
    void *info; /* device, an int */
    char name[48];
};

/* Statuses of cuSOLVER: 1 not initialized, 2 no memory, 3 invalid value, 4 no such architecture, 6
 * failed, 7 internal error; there is no function that names them. */
static qc_status check(int code, const char *what, qc_error *err)
{
    return qc_cuda_library_check(code, NO_MEMORY, "cuSOLVER", what, err);
}

static qc_status load(qc_cusolver *c, int runtime_version, qc_error *err)
{
    /* The first is the runtime's own. */
    static const char *const files[] = {"libcusolver.so.12", "libcusolver.so.11",
                                        "libcusolver.so.12", NULL};
    const qc_library l = {
        .variable = "QCONV_LIBCUSOLVER",
        .files = files + (runtime_version < 13000),
        .places = qc_cuda_places,
        .function_names = function_names,
        .function_count = sizeof function_names / sizeof *function_names,
        .needed_count = sizeof function_names / sizeof *function_names - 1,
        .missing = QC_ERR_DEVICE,
        .title = "cuSOLVER cannot be loaded",
        .no_file = {"", " could not be opened"},
        .none = "neither libcusolver.so.12 nor .11 could be opened; install it, or name its file "
                "in QCONV_LIBCUSOLVER",
        .no_function = {"", " is too old: it has no ", ""},
    };
    _Static_assert(sizeof function_names == sizeof c->f, "one pointer per name, in order");
    return qc_library_open(&c->library, &c->f, &l, err);
}

qc_status qc_cusolver_open(qc_cusolver **out, int runtime_version, qc_error *err)
{
    qc_cusolver *c = NULL;
    qc_status st;
    int version = 0;
    *out = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof *c, err));
    QC_TRY_GOTO(st, failed, load(c, runtime_version, err));
    QC_TRY_GOTO(st, failed, check(c->f.create(&c->handle), "cusolverDnCreate", err));
    QC_TRY_GOTO(st, failed, check(c->f.create_params(&c->params), "cusolverDnCreateParams", err));
    if (c->f.set_deterministic)
        QC_TRY_GOTO(st, failed,
                    check(c->f.set_deterministic(c->handle, DETERMINISTIC),
                          "cusolverDnSetDeterministicMode", err));
    QC_TRY_GOTO(st, failed, check(c->f.get_version(&version), "cusolverGetVersion", err));
    QC_TRY_GOTO(st, failed, qc_cuda_malloc(&c->info, INFO_BYTES, err));
    (void)snprintf(c->name, sizeof c->name, "cuSOLVER %d.%d.%d", version / 1000, version / 100 % 10,
                   version % 100);
    *out = c;
    return QC_OK;
failed:
    qc_cusolver_close(c);
    return st;
}

void qc_cusolver_close(qc_cusolver *c)
{
    if (!c)
        return;
    qc_cuda_free(c->info);
    if (c->params)
        (void)c->f.destroy_params(c->params);
    if (c->handle)
        (void)c->f.destroy(c->handle);
    qc_library_close(c->library);
    qc_free(c);
}

const char *qc_cusolver_name(const qc_cusolver *c)
{
    return c->name;
}

qc_status qc_cusolver_factor(qc_cusolver *c, uint64_t n, double *a, int *exists, qc_cuda_stream s,
                             qc_error *err)
{
    size_t device_bytes = 0, host_bytes = 0;
    void *device = NULL, *host = NULL;
    int info = 0, started = 0;
    qc_status st;
    *exists = 0;
    QC_TRY(check(c->f.set_stream(c->handle, s), "cusolverDnSetStream", err));
    QC_TRY(check(c->f.factor_bytes(c->handle, c->params, FILL_LOWER, (int64_t)n, TYPE_64F, a,
                                   (int64_t)n, TYPE_64F, &device_bytes, &host_bytes),
                 "cusolverDnXpotrf_bufferSize", err));
    QC_TRY_GOTO(st, done, qc_cuda_malloc(&device, device_bytes ? device_bytes : 1, err));
    QC_TRY_GOTO(st, done, qc_calloc(&host, host_bytes ? host_bytes : 1, 1, err));
    started = 1;
    QC_TRY_GOTO(
        st, done,
        check(c->f.factor(c->handle, c->params, FILL_LOWER, (int64_t)n, TYPE_64F, a, (int64_t)n,
                          TYPE_64F, device, device_bytes, host, host_bytes, c->info),
              "cusolverDnXpotrf", err));
    QC_TRY_GOTO(st, done, qc_cuda_to_host(&info, c->info, sizeof info, s, err));
    QC_TRY_GOTO(st, done, qc_cuda_stream_synchronize(s, err));
    started = 0;
    if (info < 0)
        st = QC_ERROR(err, QC_ERR_INTERNAL, "cuSOLVER: cusolverDnXpotrf refused its argument %d",
                      -info);
    *exists = info == 0;
done:
    /* A call that failed may have left work behind that uses them; the first error is the one to
     * report. */
    if (started && qc_cuda_stream_synchronize(s, NULL) != QC_OK)
        *exists = 0;
    qc_free(host);
    qc_cuda_free(device);
    return st;
}

qc_status qc_cusolver_solve(qc_cusolver *c, uint64_t n, const double *factor, uint64_t count,
                            double *x, qc_cuda_stream s, qc_error *err)
{
    QC_TRY(check(c->f.set_stream(c->handle, s), "cusolverDnSetStream", err));
    /* info says only which argument is wrong, as the status does. */
    return check(c->f.solve(c->handle, c->params, FILL_LOWER, (int64_t)n, (int64_t)count, TYPE_64F,
                            factor, (int64_t)n, TYPE_64F, x, (int64_t)n, c->info),
                 "cusolverDnXpotrs", err);
}

/* Stands in for cuSOLVER in programs on the CPU shim, as fake_cublas.c does for cuBLAS. It has the
 * functions that kernels/cusolver_library.c looks for, for doubles and lower triangles only. Both
 * workspaces are overwritten when the work runs, so that one which was freed too early is found. */
#include "fake_library.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { DONE = 0, NOT_INITIALIZED = 1, NO_MEMORY = 2, INVALID = 3, FAILED = 6 };
enum { LOWER = 0, DOUBLE = 1 };

typedef struct {
    enqueue_function *enqueue;
    void *stream;
} solver;

typedef struct {
    int64_t n, count, lda, ldb;
    double *a, *b;
    void *device, *host;
    size_t device_bytes, host_bytes;
    int *info;
} task;

/* Writes the column-major L in place of the lower triangle. */
static void run_factor(void *arg)
{
    task t;
    memcpy(&t, arg, sizeof t);
    memset(t.device, 0xff, t.device_bytes);
    memset(t.host, 0xff, t.host_bytes);
    *t.info = 0;
    for (int64_t k = 0; k < t.n; k++) {
        double *column = t.a + k * t.lda;
        if (!(column[k] > 0.0)) {
            *t.info = (int)(k + 1);
            return;
        }
        column[k] = sqrt(column[k]);
        for (int64_t i = k + 1; i < t.n; i++)
            column[i] /= column[k];
        for (int64_t j = k + 1; j < t.n; j++)
            for (int64_t i = j; i < t.n; i++)
                t.a[j * t.lda + i] -= column[i] * column[j];
    }
}

static void run_solve(void *arg)
{
    task t;
    memcpy(&t, arg, sizeof t);
    *t.info = 0;
    for (int64_t r = 0; r < t.count; r++) {
        double *x = t.b + r * t.ldb;
        for (int64_t k = 0; k < t.n; k++) {
            const double *column = t.a + k * t.lda;
            x[k] /= column[k];
            for (int64_t i = k + 1; i < t.n; i++)
                x[i] -= column[i] * x[k];
        }
        for (int64_t k = t.n; k-- > 0;) {
            const double *column = t.a + k * t.lda;
            for (int64_t i = k + 1; i < t.n; i++)
                x[k] -= column[i] * x[i];
            x[k] /= column[k];
        }
    }
}

EXPORT int cusolverDnCreate(solver **out)
{
    enqueue_function *enqueue = fake_enqueue();
    *out = NULL;
    if (!enqueue)
        return NOT_INITIALIZED;
    *out = calloc(1, sizeof **out);
    if (!*out)
        return NO_MEMORY;
    (*out)->enqueue = enqueue;
    return DONE;
}

EXPORT int cusolverDnDestroy(solver *s)
{
    free(s);
    return DONE;
}

EXPORT int cusolverDnSetStream(solver *s, void *stream)
{
    s->stream = stream;
    return DONE;
}

EXPORT int cusolverDnCreateParams(void **out)
{
    *out = malloc(1);
    return *out ? DONE : NO_MEMORY;
}

EXPORT int cusolverDnDestroyParams(void *params)
{
    free(params);
    return DONE;
}

EXPORT int cusolverGetVersion(int *version)
{
    *version = 11601;
    return DONE;
}

EXPORT int cusolverDnXpotrf_bufferSize(solver *s, void *params, int uplo, int64_t n, int type,
                                       const void *a, int64_t lda, int compute_type, size_t *device,
                                       size_t *host)
{
    if (!s || !params || uplo != LOWER || n < 0 || lda < n || type != DOUBLE ||
        compute_type != DOUBLE)
        return INVALID;
    (void)a;
    *device = (size_t)n * 16 + 512;
    *host = (size_t)n * 8 + 64;
    return DONE;
}

EXPORT int cusolverDnXpotrf(solver *s, void *params, int uplo, int64_t n, int type, void *a,
                            int64_t lda, int compute_type, void *device, size_t device_bytes,
                            void *host, size_t host_bytes, int *info)
{
    size_t least_device, least_host;
    int code = cusolverDnXpotrf_bufferSize(s, params, uplo, n, type, a, lda, compute_type,
                                           &least_device, &least_host);
    if (code || !a || !info || device_bytes < least_device || host_bytes < least_host)
        return INVALID;
    task t = {.n = n,
              .lda = lda,
              .a = a,
              .device = device,
              .host = host,
              .device_bytes = device_bytes,
              .host_bytes = host_bytes,
              .info = info};
    return s->enqueue(s->stream, "cusolverDnXpotrf", run_factor, &t, sizeof t) ? FAILED : DONE;
}

EXPORT int cusolverDnXpotrs(solver *s, void *params, int uplo, int64_t n, int64_t count, int a_type,
                            const void *a, int64_t lda, int b_type, void *b, int64_t ldb, int *info)
{
    if (!s || !params || uplo != LOWER || n < 0 || count < 0 || lda < n || ldb < n ||
        a_type != DOUBLE || b_type != DOUBLE || !a || !b || !info)
        return INVALID;
    task t = {.n = n, .count = count, .lda = lda, .ldb = ldb, .b = b, .info = info};
    memcpy(&t.a, &a, sizeof a);
    return s->enqueue(s->stream, "cusolverDnXpotrs", run_solve, &t, sizeof t) ? FAILED : DONE;
}

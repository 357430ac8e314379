/* OpenBLAS by dlopen: see blas.h, and blas_internal.h for what is used of it. */
#include "quant/blas_internal.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* In the order of qc_blas_functions. */
static const char *const function_names[] = {
    "cblas_sgemm", "cblas_ssymm", "cblas_dgemm", "cblas_dtrsm", "dpotrf_",
};
_Static_assert(sizeof function_names / sizeof *function_names * sizeof(void *) ==
                   sizeof(qc_blas_functions),
               "one name per pointer, in order");

static qc_blas blas;
static qc_status opened;
static qc_error open_error;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void describe(void *library)
{
    void *found[2] = {dlsym(library, "openblas_get_config"),
                      dlsym(library, "openblas_get_corename")};
    char *(*text[2])(void);
    memcpy(text, found, sizeof found);
    (void)snprintf(blas.name, sizeof blas.name, "%s %s", text[0] ? text[0]() : "BLAS",
                   text[1] ? text[1]() : "");
}

static qc_status load(qc_error *err)
{
    const char *path = getenv("QCONV_OPENBLAS");
    const int named = path && *path;
    if (!named)
        path = "libopenblas.so.0";
    /* The library reads this while it loads; with a higher number it would start threads that never
     * get work. */
    (void)setenv("OPENBLAS_NUM_THREADS", "1", 1);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    const char *why = library ? NULL : dlerror();
    /* If the file is there, it is damaged, or there is no memory to map it. */
    if (why && !strstr(why, "No such file"))
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "OpenBLAS cannot be loaded: %s: %s", path, why);
    if (!library && named)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "OpenBLAS cannot be loaded: there is no %s, which QCONV_OPENBLAS names", path);
    if (!library)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "OpenBLAS cannot be loaded: there is no %s; install it (Debian and Ubuntu: package "
                "libopenblas0-pthread), or name its file in QCONV_OPENBLAS",
                path);
    void *found[sizeof function_names / sizeof *function_names];
    for (size_t i = 0; i < sizeof function_names / sizeof *function_names; i++) {
        found[i] = dlsym(library, function_names[i]);
        if (!found[i])
            QC_FAIL(err, QC_ERR_UNSUPPORTED,
                    "%s lacks %s; install a complete OpenBLAS (Debian and Ubuntu: package "
                    "libopenblas0-pthread)",
                    path, function_names[i]);
    }
    memcpy(&blas.f, found, sizeof found); /* C has no cast from void * to a function */
    void *threads = dlsym(library, "openblas_set_num_threads");
    if (!threads)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "%s is a BLAS, but not OpenBLAS; install it (Debian and Ubuntu: package "
                "libopenblas0-pthread)",
                path);
    void (*set_num_threads)(int count);
    memcpy(&set_num_threads, &threads, sizeof threads);
    set_num_threads(1);
    describe(library);
    return QC_OK;
}

static void open_once(void)
{
    opened = load(&open_error);
}

qc_status qc_blas_open(const qc_blas **out, qc_error *err)
{
    *out = NULL;
    (void)pthread_once(&once, open_once);
    if (opened != QC_OK) {
        if (err)
            *err = open_error;
        return opened;
    }
    *out = &blas;
    return QC_OK;
}

const char *qc_blas_name(const qc_blas *b)
{
    return b->name;
}

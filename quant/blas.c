/* OpenBLAS, opened at run time: see blas.h, and blas_internal.h for what is used of it. */
#include "quant/blas_internal.h"

#include "base/open_library.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

/* In the order of qc_blas_functions; the first ones are in every BLAS. */
static const char *const function_names[] = {
    "cblas_sgemm",
    "cblas_ssymm",
    "cblas_dgemm",
    "cblas_dtrsm",
    "dpotrf_",
    "openblas_set_num_threads",
    "openblas_get_config",
    "openblas_get_corename",
};
enum { NEEDED = 5 };
_Static_assert(sizeof function_names == sizeof(qc_blas_functions),
               "one name per pointer, in order");

#define INSTALL "(Debian and Ubuntu: package libopenblas0-pthread)"

static qc_blas blas;
static qc_status opened;
static qc_error open_error;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static qc_status load(qc_error *err)
{
    const qc_library openblas = {
        .variable = "QCONV_OPENBLAS",
        .files = (const char *const[]){"libopenblas.so.0", NULL},
        .function_names = function_names,
        .function_count = sizeof function_names / sizeof *function_names,
        .needed_count = NEEDED,
        .missing = QC_ERR_UNSUPPORTED,
        .title = "OpenBLAS cannot be loaded",
        .no_file = {"there is no ", ", which QCONV_OPENBLAS names"},
        .none = "there is no libopenblas.so.0; install it " INSTALL
                ", or name its file in QCONV_OPENBLAS",
        .no_function = {"", " lacks ", "; install a complete OpenBLAS " INSTALL},
    };
    const qc_blas_functions *f = &blas.f;
    void *library;
    /* The library reads this while it loads; with a higher number it would start threads that never
     * get work. */
    (void)setenv("OPENBLAS_NUM_THREADS", "1", 1);
    QC_TRY(qc_library_open(&library, &blas.f, &openblas, err));
    if (!f->set_num_threads) {
        const char *path = getenv(openblas.variable);
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s is a BLAS, but not OpenBLAS; install it " INSTALL,
                path && *path ? path : *openblas.files);
    }
    f->set_num_threads(1);
    (void)snprintf(blas.name, sizeof blas.name, "%s %s", f->config ? f->config() : "BLAS",
                   f->core_name ? f->core_name() : "");
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

/* cuBLAS by dlopen. */
#include "kernels/cuda_library.h"

#include "base/alloc.h"
#include "base/workers.h"

#include <stdio.h>

/* The few values of cublas_api.h and library_types.h that are needed; CUDA 11, 12 and 13 have the
 * same. */
enum {
    NO_MEMORY = 3,
    OP_N = 0,
    OP_T = 1,
    POINTER_HOST = 0,
    POINTER_DEVICE = 1,
    /* CUBLAS_DEFAULT_MATH with CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums stay
     * float also where the result is 16 bits wide. */
    MATH_FLOAT_SUMS = 16,
    TYPE_32F = 0,
    TYPE_64F = 1,
    TYPE_16F = 2,
    TYPE_16BF = 14,
    COMPUTE_32F = 68,
    COMPUTE_64F = 70,
    ALGO_DEFAULT = -1
};
typedef struct cublasContext *handle_t;

typedef struct {
    int (*create)(handle_t *h);
    int (*destroy)(handle_t h);
    int (*set_stream)(handle_t h, qc_cuda_stream s);
    int (*set_workspace)(handle_t h, void *workspace, size_t bytes);
    int (*set_pointer_mode)(handle_t h, int mode);
    int (*set_math_mode)(handle_t h, int mode);
    int (*gemm_ex)(handle_t h, int transa, int transb, int m, int n, int k, const void *alpha,
                   const void *a, int a_type, int lda, const void *b, int b_type, int ldb,
                   const void *beta, void *c, int c_type, int ldc, int compute_type, int algo);
    int (*get_version)(handle_t h, int *version);
} functions;

static const char *const function_names[] = {
    "cublasCreate_v2",         "cublasDestroy_v2",  "cublasSetStream_v2", "cublasSetWorkspace_v2",
    "cublasSetPointerMode_v2", "cublasSetMathMode", "cublasGemmEx",       "cublasGetVersion_v2",
};

struct qc_cublas {
    void *library;
    functions f;
    handle_t handle;
    pthread_mutex_t lock; /* held from begin to end; nothing else is locked meanwhile */
    int lock_made;
    char name[48];
};

/* Statuses of cuBLAS: 1 not initialized, 3 no memory, 7 invalid value, 8 no such architecture, 13
 * failed, 15 not supported; cublasGetStatusString came with 11.4. */
static qc_status check(int code, const char *what, qc_error *err)
{
    return qc_cuda_library_check(code, NO_MEMORY, "cuBLAS", what, err);
}

static qc_status load(qc_cublas *c, int runtime_version, qc_error *err)
{
    char own[32];
    (void)snprintf(own, sizeof own, "libcublas.so.%d", runtime_version / 1000);
    const qc_library l = {
        .variable = "QCONV_LIBCUBLAS",
        .files = (const char *const[]){own, "libcublas.so.13", "libcublas.so.12", "libcublas.so.11",
                                       NULL},
        .places = qc_cuda_places,
        .function_names = function_names,
        .function_count = sizeof function_names / sizeof *function_names,
        .needed_count = sizeof function_names / sizeof *function_names,
        .missing = QC_ERR_DEVICE,
        .title = "cuBLAS cannot be loaded",
        .no_file = {"", " could not be opened"},
        .none = "none of libcublas.so.13, .12 and .11 could be opened; install it, or name its "
                "file in QCONV_LIBCUBLAS",
        .no_function = {"", " is too old: it has no ", ""},
    };
    _Static_assert(sizeof function_names == sizeof c->f, "one pointer per name, in order");
    return qc_library_open(&c->library, &c->f, &l, err);
}

qc_status qc_cublas_open(qc_cublas **out, int runtime_version, qc_error *err)
{
    qc_cublas *c = NULL;
    qc_status st;
    *out = NULL;
    QC_TRY(qc_calloc(&c, 1, sizeof *c, err));
    QC_TRY_GOTO(st, failed, load(c, runtime_version, err));
    QC_TRY_GOTO(st, failed, qc_lock_init(&c->lock, NULL, err));
    c->lock_made = 1;
    QC_TRY_GOTO(st, failed, check(c->f.create(&c->handle), "cublasCreate", err));
    QC_TRY_GOTO(st, failed,
                check(c->f.set_math_mode(c->handle, MATH_FLOAT_SUMS), "cublasSetMathMode", err));
    int version = 0;
    QC_TRY_GOTO(st, failed, check(c->f.get_version(c->handle, &version), "cublasGetVersion", err));
    (void)snprintf(c->name, sizeof c->name, "cuBLAS %d.%d.%d", version / 10000, version / 100 % 100,
                   version % 100);
    *out = c;
    return QC_OK;
failed:
    qc_cublas_close(c);
    return st;
}

void qc_cublas_close(qc_cublas *c)
{
    if (!c)
        return;
    if (c->handle)
        (void)c->f.destroy(c->handle);
    if (c->lock_made)
        (void)pthread_mutex_destroy(&c->lock);
    qc_library_close(c->library);
    qc_free(c);
}

qc_status qc_cublas_begin(qc_cublas *c, void *workspace, size_t workspace_bytes, qc_cuda_stream s,
                          qc_error *err)
{
    qc_status st;
    (void)pthread_mutex_lock(&c->lock);
    /* The stream comes first, because setting it puts cuBLAS's own workspace back. */
    QC_TRY_GOTO(st, failed, check(c->f.set_stream(c->handle, s), "cublasSetStream", err));
    if (workspace)
        QC_TRY_GOTO(st, failed,
                    check(c->f.set_workspace(c->handle, workspace, workspace_bytes),
                          "cublasSetWorkspace", err));
    return QC_OK;
failed:
    (void)pthread_mutex_unlock(&c->lock);
    return st;
}

void qc_cublas_end(qc_cublas *c)
{
    (void)pthread_mutex_unlock(&c->lock);
}

static int type_of(qc_dtype t)
{
    return t == QC_DTYPE_F16    ? TYPE_16F
           : t == QC_DTYPE_BF16 ? TYPE_16BF
           : t == QC_DTYPE_F64  ? TYPE_64F
                                : TYPE_32F;
}

/* y^T = op(b)^T op(a)^T: a matrix that is row-major to the caller is its transpose to cuBLAS. */
qc_status qc_cublas_product(qc_cublas *c, const qc_cublas_product_args *a, qc_error *err)
{
    const int dual = a->dtype == QC_DTYPE_F64, type = type_of(a->dtype);
    const float single[] = {(float)a->alpha, (float)a->beta};
    const void *alpha = dual ? (const void *)&a->alpha : single;
    const void *beta = dual ? (const void *)&a->beta : single + 1;
    if (a->alpha_zero) {
        alpha = a->alpha_zero;
        beta = a->alpha_zero + 1;
    }
    QC_TRY(check(c->f.set_pointer_mode(c->handle, a->alpha_zero ? POINTER_DEVICE : POINTER_HOST),
                 "cublasSetPointerMode", err));
    return check(c->f.gemm_ex(c->handle, a->trans_b ? OP_T : OP_N, a->trans_a ? OP_T : OP_N,
                              (int)a->n, (int)a->m, (int)a->k, alpha, a->b, type, (int)a->ldb, a->a,
                              type, (int)a->lda, beta, a->y, type_of(a->y_dtype), (int)a->ldy,
                              dual ? COMPUTE_64F : COMPUTE_32F, ALGO_DEFAULT),
                 "cublasGemmEx", err);
}

const char *qc_cublas_name(const qc_cublas *c)
{
    return c->name;
}

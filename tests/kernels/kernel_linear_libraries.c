/* cuBLAS and cuSOLVER as they are called for second moments and the feedback's factor, against
 * plain loops in double. On the CPU shim: stand-ins for the libraries. */
#include "tests/fixtures/quant_device_fixture.h"

#include "kernels/cuda_library.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static qt_rng rng = {11};

static double element(const void *p, int dual, size_t i)
{
    return dual ? ((const double *)p)[i] : (double)((const float *)p)[i];
}

static void *random_elements(size_t n, int dual)
{
    void *p = qt_alloc(n, dual ? 8 : 4);
    for (size_t i = 0; i < n; i++) {
        const double x = (double)qt_randn(&rng);
        if (dual)
            ((double *)p)[i] = x;
        else
            ((float *)p)[i] = (float)x;
    }
    return p;
}

static void check_product(qc_cublas *c, int dual, int trans_a, int trans_b, double beta)
{
    enum { M = 300, N = 37, K = 19 };
    const size_t size = dual ? 8 : 4, lda = (trans_a ? M : K) + 3, ldb = (trans_b ? K : N) + 1,
                 ldy = N + 5, ca = lda * (trans_a ? K : M), cb = ldb * (trans_b ? N : K),
                 cy = ldy * M;
    void *a = random_elements(ca, dual), *b = random_elements(cb, dual),
         *y = random_elements(cy, dual);
    qd_buffer da = qd_new_from(a, ca * size, size), db = qd_new_from(b, cb * size, size),
              dy = qd_new_from(y, cy * size, size);
    QD_OK(qc_cublas_begin(c, NULL, 0, qd.stream, &qd.err));
    const qc_cublas_product_args args = {.a = da.p,
                                         .b = db.p,
                                         .y = dy.p,
                                         .dtype = dual ? QC_DTYPE_F64 : QC_DTYPE_F32,
                                         .y_dtype = dual ? QC_DTYPE_F64 : QC_DTYPE_F32,
                                         .trans_a = trans_a,
                                         .trans_b = trans_b,
                                         .m = M,
                                         .n = N,
                                         .k = K,
                                         .lda = lda,
                                         .ldb = ldb,
                                         .ldy = ldy,
                                         .alpha = -0.7,
                                         .beta = beta};
    QD_OK(qc_cublas_product(c, &args, &qd.err));
    qc_cublas_end(c);
    void *got = qd_take(&dy, "product");
    for (size_t i = 0; i < M; i++)
        for (size_t j = 0; j < ldy; j++) {
            double want = element(y, dual, i * ldy + j);
            if (j < N) {
                want *= beta;
                for (size_t k = 0; k < K; k++)
                    want += -0.7 * element(a, dual, trans_a ? k * lda + i : i * lda + k) *
                            element(b, dual, trans_b ? j * ldb + k : k * ldb + j);
            }
            const double is = element(got, dual, i * ldy + j);
            QT_CHECK(fabs(is - want) <= (j >= N ? 0.0
                                         : dual ? 1e-13
                                                : 2e-5) *
                                            30,
                     "dual %d trans %d %d: [%zu][%zu] is %.17g, not %.17g", dual, trans_a, trans_b,
                     i, j, is, want);
        }
    free(got);
    free(qd_take(&da, "a")), free(qd_take(&db, "b"));
    free(a), free(b), free(y);
}

TEST(test_products)
{
    qc_cublas *c = NULL;
    QD_OK(qc_cublas_open(&c, 12040, &qd.err));
    QT_CHECK(strncmp(qc_cublas_name(c), "cuBLAS 1", 8) == 0, "%s", qc_cublas_name(c));
    for (int i = 0; i < 8; i++)
        check_product(c, i & 1, i & 2 ? 1 : 0, i & 4 ? 1 : 0, i % 3 ? 1.0 : 0.0);
    qc_cublas_close(c);
}

TEST(test_factor_and_solve)
{
    enum { N = 53, COUNT = 7 };
    qc_cusolver *c = NULL;
    QD_OK(qc_cusolver_open(&c, 12040, &qd.err));
    QT_CHECK(strncmp(qc_cusolver_name(c), "cuSOLVER 1", 10) == 0, "%s", qc_cusolver_name(c));
    double *g = random_elements(N * N, 1), *a = qt_alloc(N * N, 8),
           *x = random_elements(COUNT * N, 1);
    double *upper = qt_alloc(N * N, 8);
    for (size_t i = 0; i < N; i++)
        for (size_t j = 0; j < N; j++) {
            a[i * N + j] = i == j ? 1.0 : 0.0;
            for (size_t k = 0; k < N; k++)
                a[i * N + j] += g[i * N + k] * g[j * N + k];
            upper[i * N + j] = j >= i ? a[i * N + j] : (double)NAN;
        }
    qd_buffer da = qd_new_from(upper, N * N * 8, 8), dx = qd_new_from(x, COUNT * N * 8, 8);
    int exists = 0;
    QD_OK(qc_cusolver_factor(c, N, da.p, &exists, qd.stream, &qd.err));
    QT_CHECK(exists, "no factor");
    QD_OK(qc_cusolver_solve(c, N, da.p, COUNT, dx.p, qd.stream, &qd.err));
    double *l = qd_take(&da, "factor"), *y = qd_take(&dx, "solutions");
    for (size_t i = 0; i < N; i++)
        for (size_t j = i; j < N; j++) { /* a = L L^T, L^T in rows */
            double sum = 0;
            for (size_t k = 0; k <= i; k++)
                sum += l[k * N + i] * l[k * N + j];
            QT_CHECK(fabs(sum - a[i * N + j]) <= 1e-10, "[%zu][%zu]: %g", i, j, sum);
        }
    for (size_t r = 0; r < COUNT; r++)
        for (size_t i = 0; i < N; i++) {
            double sum = 0;
            for (size_t j = 0; j < N; j++)
                sum += a[i * N + j] * y[r * N + j];
            QT_CHECK(fabs(sum - x[r * N + i]) <= 1e-9, "row %zu, %zu: %g", r, i, sum);
        }
    upper[(N - 1) * N + N - 1] = -1.0;
    da = qd_new_from(upper, N * N * 8, 8);
    QD_OK(qc_cusolver_factor(c, N, da.p, &exists, qd.stream, &qd.err));
    QT_CHECK(!exists, "a factor of what is not positive definite");
    free(qd_take(&da, "no factor"));
#ifdef QC_CUDA_SHIM /* the stand-in looks at its arguments */
    QT_CHECK(qc_cusolver_factor(c, N, NULL, &exists, qd.stream, &qd.err) == QC_ERR_INTERNAL,
             "no matrix");
    QT_CHECK(strstr(qd.err.msg, "cusolverDnXpotrf failed with status 3"), "%s", qd.err.msg);
#endif
    qc_cusolver_close(c);
    free(g), free(a), free(x), free(upper), free(l), free(y);
}

TEST(test_no_library)
{
    qc_cusolver *c = NULL;
    const char *was = getenv("QCONV_LIBCUSOLVER"), *other = getenv("QCONV_LIBCUBLAS");
    char *kept = was ? strdup(was) : NULL;
    QT_CHECK(setenv("QCONV_LIBCUSOLVER", "/nowhere/libcusolver.so", 1) == 0, "setenv");
    QT_CHECK(qc_cusolver_open(&c, 12040, &qd.err) == QC_ERR_DEVICE && !c, "opened nothing");
    QT_CHECK(strstr(qd.err.msg, "/nowhere/libcusolver.so could not"), "%s", qd.err.msg);
    if (other) {
        QT_CHECK(setenv("QCONV_LIBCUSOLVER", other, 1) == 0, "setenv");
        QT_CHECK(qc_cusolver_open(&c, 12040, &qd.err) == QC_ERR_DEVICE && !c, "opened cuBLAS");
        QT_CHECK(strstr(qd.err.msg, "has no cusolverDnCreate"), "%s", qd.err.msg);
    }
    if (kept)
        QT_CHECK(setenv("QCONV_LIBCUSOLVER", kept, 1) == 0, "setenv");
    else
        QT_CHECK(unsetenv("QCONV_LIBCUSOLVER") == 0, "unsetenv");
    free(kept);
}

#ifdef QC_CUDA_SHIM
/* A library that only a toolkit or the wheels of a Python environment have. */
TEST(test_places)
{
    static const struct {
        const char *variable, *folders[6];
    } cases[] = {
        {"CUDA_HOME", {"/lib64"}},
        {"CUDA_PATH", {"/lib64"}},
        {"VIRTUAL_ENV", {"/lib", "/python3.12", "/site-packages", "/nvidia", "/cusolver", "/lib"}},
        {"CONDA_PREFIX", {"/lib", "/python3.9", "/site-packages", "/nvidia", "/cu13", "/lib"}},
    };
    const char *const names[] = {"cusolverDnCreate"};
    const char *const files[] = {"libqconv_places.so.12", "libqconv_places.so.11", NULL};
    const qc_library wanted = {.variable = "QCONV_LIBNOTHING",
                               .files = files,
                               .places = qc_cuda_places,
                               .function_names = names,
                               .function_count = 1,
                               .needed_count = 1,
                               .missing = QC_ERR_DEVICE,
                               .title = "a library cannot be loaded",
                               .none = "no libqconv_places.so"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char root[] = "/tmp/qconv-places-XXXXXX", path[512], command[64];
        void *library = NULL, *function = NULL;
        const char *was = getenv(cases[i].variable);
        char *kept = was ? strdup(was) : NULL;
        QT_CHECK(mkdtemp(root) != NULL, "mkdtemp");
        (void)snprintf(path, sizeof path, "%s", root);
        for (size_t k = 0; k < 6 && cases[i].folders[k]; k++) {
            (void)strncat(path, cases[i].folders[k], sizeof path - strlen(path) - 1);
            QT_CHECK(mkdir(path, 0700) == 0, "%s", path);
        }
        QT_CHECK(setenv(cases[i].variable, root, 1) == 0, "setenv");
        QT_CHECK(qc_library_open(&library, &function, &wanted, &qd.err) == QC_ERR_DEVICE,
                 "%s: opened nothing", cases[i].variable);
        (void)strncat(path, "/libqconv_places.so.11", sizeof path - strlen(path) - 1);
        QT_CHECK(symlink(getenv("QCONV_LIBCUSOLVER"), path) == 0, "%s", path);
        QD_OK(qc_library_open(&library, &function, &wanted, &qd.err));
        QT_CHECK(function, "%s: no function", cases[i].variable);
        QT_CHECK(kept ? setenv(cases[i].variable, kept, 1) == 0 : unsetenv(cases[i].variable) == 0,
                 "the environment");
        free(kept);
        (void)snprintf(command, sizeof command, "rm -r '%s'", root);
        QT_CHECK(system(command) == 0, "%s", command);
    }
}
#endif

int main(void)
{
    qd_start();
    int failed = test_run_all(NULL);
    qd_end();
    return failed;
}

/* Stands in for cuBLAS in programs on the CPU shim: it has the functions that
 * kernels/cublas_library.c looks for, in a library that QCONV_LIBCUBLAS names. Products run on the
 * shim's streams, as late as kernels do. Each product overwrites the first 64 KB of the workspace,
 * because cuBLAS may overwrite all of it.
 *
 * Sums are float and in the order of k; cuBLAS has another order.
 *
 * The environment has two variables. Their columns are those of the result, which are the rows of
 * x for a caller that has its matrices row by row:
 *   FAKE_CUBLAS_FAIL   N: products of N columns are refused
 *   FAKE_CUBLAS_WRONG  N or N:RUN: the first element of a product of N columns is one too large;
 *                      with RUN, only from that run of one call on (a graph makes several runs) */
#include "fake_library.h"

#include <math.h>
#include <stdint.h>
#include <stdlib.h>

enum { DONE = 0, NOT_INITIALIZED = 1, NO_MEMORY = 3, INVALID = 7, FAILED = 13, UNSUPPORTED = 15 };
enum {
    OP_N = 0,
    OP_T = 1,
    FLOAT = 0,
    DOUBLE = 1,
    HALF = 2,
    BF16 = 14,
    COMPUTE_32F = 68,
    COMPUTE_64F = 70
};

struct cublasContext {
    enqueue_function *enqueue;
    void *stream, *workspace;
    size_t workspace_bytes;
    int pointers_on_device;
};
typedef struct cublasContext *handle;

typedef struct {
    int trans_a, trans_b, m, n, k, a_type, b_type, c_type;
    int64_t lda, ldb, ldc;
    const void *a, *b;
    void *c, *workspace;
    size_t workspace_bytes;
    double alpha, beta;
    const float *alpha_pointer, *beta_pointer; /* on the device; if NULL, the numbers count */
    unsigned long runs;                        /* runs that are over */
} product;

static float load(const void *p, int type, int64_t i)
{
    uint16_t h;
    uint32_t u;
    float f;
    if (type == FLOAT)
        return ((const float *)p)[i];
    h = ((const uint16_t *)p)[i];
    if (type == BF16) {
        u = (uint32_t)h << 16;
        memcpy(&f, &u, sizeof f);
        return f;
    }
    if ((h & 0x7c00) == 0x7c00) {
        f = h & 0x3ff ? NAN : INFINITY;
    } else {
        u = (uint32_t)(h & 0x7fff)
            << 13; /* the same digits, and an exponent that is 112 too small */
        memcpy(&f, &u, sizeof f);
        f *= 0x1p112f;
    }
    return h & 0x8000 ? -f : f;
}

static uint16_t half_of(float v)
{
    uint16_t sign = signbit(v) ? 0x8000 : 0;
    float a = fabsf(v);
    int exponent;
    if (a != a)
        return 0x7fff;
    if (a >= 65520.0f)
        return sign | 0x7c00;
    (void)frexpf(a > 0x1p-15f ? a : 0x1p-15f, &exponent);
    int unit = exponent - 11 < -24 ? -24 : exponent - 11;
    return (uint16_t)(sign | ((unit + 24) * 1024 + (int)nearbyintf(ldexpf(a, -unit))));
}

static void store(void *p, int type, int64_t i, float v)
{
    uint32_t u;
    memcpy(&u, &v, sizeof u);
    if (type == FLOAT)
        ((float *)p)[i] = v;
    else if (type == HALF)
        ((uint16_t *)p)[i] = half_of(v);
    else
        ((uint16_t *)p)[i] =
            (uint16_t)(v != v ? u >> 16 | 0x40 : (u + 0x7fff + (u >> 16 & 1)) >> 16);
}

enum { ROWS = 256 }; /* rows of a that are laid out by k and handled at a time */

/* Sums in the order of k, as below, but over elements side by side. */
#define PRODUCT(name, type)                                                                        \
    static void name(const product *g, type alpha, type beta)                                      \
    {                                                                                              \
        const type *a = g->a, *b = g->b;                                                           \
        type *panel = malloc(((size_t)g->k + 1) * ROWS * sizeof *panel), sum[ROWS];                \
        if (!panel)                                                                                \
            abort();                                                                               \
        for (int64_t first = 0; first < g->m; first += ROWS) {                                     \
            const int64_t count = g->m - first < ROWS ? g->m - first : ROWS;                       \
            for (int64_t k = 0; k < g->k; k++)                                                     \
                for (int64_t i = 0; i < count; i++)                                                \
                    panel[k * ROWS + i] =                                                          \
                        g->trans_a ? a[(first + i) * g->lda + k] : a[k * g->lda + first + i];      \
            for (int64_t j = 0; j < g->n; j++) {                                                   \
                type *c = (type *)g->c + j * g->ldc + first;                                       \
                memset(sum, 0, sizeof sum);                                                        \
                for (int64_t k = 0; k < g->k; k++) {                                               \
                    const type x = g->trans_b ? b[k * g->ldb + j] : b[j * g->ldb + k];             \
                    for (int64_t i = 0; i < count; i++)                                            \
                        sum[i] += panel[k * ROWS + i] * x;                                         \
                }                                                                                  \
                for (int64_t i = 0; i < count; i++)                                                \
                    c[i] = beta != 0 ? sum[i] * alpha + beta * c[i] : sum[i] * alpha;              \
            }                                                                                      \
        }                                                                                          \
        free(panel);                                                                               \
    }
PRODUCT(float_product, float)
PRODUCT(double_product, double)

/* Makes a matrix of floats of columns of one of another type, and sets *p and *ld to it. */
static float *widen(const void **p, int64_t *ld, int type, int64_t rows, int64_t columns)
{
    float *wide = malloc(((size_t)rows * (size_t)columns + 1) * sizeof *wide);
    if (!wide)
        abort();
    for (int64_t j = 0; j < columns; j++)
        for (int64_t i = 0; i < rows; i++)
            wide[j * rows + i] = load(*p, type, j * *ld + i);
    *p = wide;
    *ld = rows;
    return wide;
}

static void multiply(const product *p)
{
    product g = *p;
    float alpha = g.alpha_pointer ? *g.alpha_pointer : (float)g.alpha;
    float beta = g.beta_pointer ? *g.beta_pointer : (float)g.beta;
    if (g.workspace)
        memset(g.workspace, 0xff, g.workspace_bytes < 65536 ? g.workspace_bytes : 65536);
    if (g.a_type == DOUBLE) {
        double_product(&g, g.alpha, g.beta);
        return;
    }
    if (g.a_type == FLOAT && g.c_type == FLOAT) {
        float_product(&g, alpha, beta);
        return;
    }
    float *wide_a = widen(&g.a, &g.lda, g.a_type, g.trans_a ? g.k : g.m, g.trans_a ? g.m : g.k);
    float *wide_b = widen(&g.b, &g.ldb, g.b_type, g.trans_b ? g.n : g.k, g.trans_b ? g.k : g.n);
    const void *wide_c = g.c;
    float *c = widen(&wide_c, &g.ldc, g.c_type, g.m, g.n);
    g.c = c;
    float_product(&g, alpha, beta);
    for (int64_t j = 0; j < g.n; j++)
        for (int64_t i = 0; i < g.m; i++)
            store(p->c, p->c_type, j * p->ldc + i, c[j * g.ldc + i]);
    free(wide_a);
    free(wide_b);
    free(c);
}

static void run_product(void *arg)
{
    product *g = arg;
    char *end;
    const char *text = getenv("FAKE_CUBLAS_WRONG");
    multiply(g);
    g->runs++;
    if (!text || strtol(text, &end, 10) != g->n || g->m == 0 || g->c_type == DOUBLE)
        return;
    if (*end != ':' || g->runs >= strtoul(end + 1, NULL, 10))
        store(g->c, g->c_type, 0, load(g->c, g->c_type, 0) + 1);
}

EXPORT int cublasCreate_v2(handle *out)
{
    enqueue_function *enqueue = fake_enqueue();
    *out = NULL;
    if (!enqueue)
        return NOT_INITIALIZED;
    handle h = calloc(1, sizeof *h);
    if (!h)
        return NO_MEMORY;
    h->enqueue = enqueue;
    *out = h;
    return DONE;
}

EXPORT int cublasDestroy_v2(handle h)
{
    free(h);
    return DONE;
}

EXPORT int cublasGetVersion_v2(handle h, int *version)
{
    (void)h;
    *version = 120405;
    return DONE;
}

EXPORT int cublasSetStream_v2(handle h, void *stream)
{
    h->stream = stream;
    h->workspace = NULL;
    h->workspace_bytes = 0;
    return DONE;
}

EXPORT int cublasSetWorkspace_v2(handle h, void *workspace, size_t bytes)
{
    if ((uintptr_t)workspace % 256)
        return INVALID;
    h->workspace = workspace;
    h->workspace_bytes = bytes;
    return DONE;
}

EXPORT int cublasSetPointerMode_v2(handle h, int mode)
{
    h->pointers_on_device = mode;
    return DONE;
}

EXPORT int cublasSetMathMode(handle h, int mode)
{
    (void)h, (void)mode;
    return DONE;
}

EXPORT int cublasGemmEx(handle h, int trans_a, int trans_b, int m, int n, int k, const void *alpha,
                        const void *a, int a_type, int lda, const void *b, int b_type, int ldb,
                        const void *beta, void *c, int c_type, int ldc, int compute_type, int algo)
{
    const char *failing = getenv("FAKE_CUBLAS_FAIL");
    (void)algo;
    if (failing && strtol(failing, NULL, 10) == n)
        return FAILED;
    if (m < 0 || n < 0 || k < 0 || trans_a < OP_N || trans_a > OP_T || trans_b < OP_N ||
        trans_b > OP_T || lda < 1 || ldb < 1 || ldc < 1 || lda < (trans_a ? k : m) ||
        ldb < (trans_b ? n : k) || ldc < m)
        return INVALID;
    const int dual = compute_type == COMPUTE_64F;
    if ((compute_type != COMPUTE_32F && !dual) || (a_type == DOUBLE) != dual ||
        (c_type == DOUBLE) != dual || (dual && h->pointers_on_device) || a_type != b_type ||
        (a_type == HALF && c_type == BF16) || (a_type == BF16 && c_type == HALF))
        return UNSUPPORTED;
    product g = {.trans_a = trans_a,
                 .trans_b = trans_b,
                 .m = m,
                 .n = n,
                 .k = k,
                 .a_type = a_type,
                 .b_type = b_type,
                 .c_type = c_type,
                 .lda = lda,
                 .ldb = ldb,
                 .ldc = ldc,
                 .a = a,
                 .b = b,
                 .c = c,
                 .workspace = h->workspace,
                 .workspace_bytes = h->workspace_bytes};
    if (h->pointers_on_device) {
        g.alpha_pointer = alpha;
        g.beta_pointer = beta;
    } else {
        g.alpha = dual ? *(const double *)alpha : (double)*(const float *)alpha;
        g.beta = dual ? *(const double *)beta : (double)*(const float *)beta;
    }
    return h->enqueue(h->stream, "cublasGemmEx", run_product, &g, sizeof g) ? FAILED : DONE;
}

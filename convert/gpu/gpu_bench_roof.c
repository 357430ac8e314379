/* What no kernel on this device can beat: the rates of copies and of reading, the largest rate of
 * cuBLAS, the time of a launch, and the rate of copies from and to the host. */
#include "convert/gpu/gpu_bench_internal.h"
#include "kernels/cuda_memory_rate.h"
#include "kernels/cuda_quantize.h"

#define COPY_BYTES  ((uint64_t)1 << 30)
#define LEAST_BYTES ((uint64_t)1 << 16)
#define GEMM_SIZE   8192u
#define POOL        ((uint64_t)1048583) /* a prime */

typedef struct {
    const qc_cuda_device *device;
    unsigned char *from, *to;
    size_t bytes;
    qc_status (*copy)(void *to, const void *from, size_t bytes, qc_cuda_stream s, qc_error *err);
} copying;

static qc_status launch_copy(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const copying *c = ctx;
    (void)copy;
    return c->copy(c->to, c->from, c->bytes, s, err);
}

static qc_status launch_kernel_copy(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const copying *c = ctx;
    (void)copy;
    return qc_cuda_rate_copy(c->device, c->to, c->from, c->bytes, s, err);
}

/* The sums go to `to`. */
static qc_status launch_read(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const copying *c = ctx;
    (void)copy;
    return qc_cuda_rate_read(c->device, c->from, c->bytes, (uint32_t *)(void *)c->to, s, err);
}

typedef qc_status (*copy_launch)(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err);

static qc_status time_copy(qc_bench_gpu *b, copy_launch launch, copying *c, uint64_t moved,
                           qc_bench_spread *gbps, qc_error *err)
{
    qc_bench_spread us;
    QC_TRY(
        qc_bench_alone(b, (qc_bench_contender){.launch = launch, .ctx = c, .least = 4}, &us, err));
    *gbps = qc_bench_spread_rate(us, (double)moved / 1e3);
    return QC_OK;
}

/* Returns a power of two that is at most 1 GiB and at most an eighth of the free memory. */
static uint64_t copy_bytes(uint64_t free_bytes)
{
    uint64_t bytes = COPY_BYTES;
    while (bytes > LEAST_BYTES && bytes > free_bytes / 8)
        bytes /= 2;
    return bytes;
}

static qc_status on_device(qc_bench_gpu *b, const qc_bench_pool *pool, copy_launch launch,
                           size_t written, qc_bench_spread *gbps, qc_error *err)
{
    const size_t bytes = (size_t)b->r->roof.copy_bytes;
    void *from = NULL, *to = NULL;
    qc_status st = qc_cuda_malloc(&from, bytes, err);
    if (st == QC_OK)
        st = qc_cuda_malloc(&to, written, err);
    if (st == QC_OK)
        st = qc_bench_pool_fill(b, pool, from, bytes / 2, 0, err);
    copying c = {&b->device, from, to, bytes, qc_cuda_copy};
    if (st == QC_OK)
        st = time_copy(b, launch, &c, bytes + written, gbps, err);
    qc_cuda_free(from);
    qc_cuda_free(to);
    return st;
}

static qc_status device_copy(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err)
{
    qc_bench_roof *roof = &b->r->roof;
    return on_device(b, pool, launch_copy, (size_t)roof->copy_bytes, &roof->copy_gbps, err);
}

static qc_status kernel_copy(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err)
{
    qc_bench_roof *roof = &b->r->roof;
    return on_device(b, pool, launch_kernel_copy, (size_t)roof->copy_bytes, &roof->kernel_copy_gbps,
                     err);
}

static qc_status kernel_read(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err)
{
    const size_t sums = sizeof(uint32_t) * QC_CUDA_READ_SUMS * b->device.multiprocessors;
    return on_device(b, pool, launch_read, sums, &b->r->roof.read_gbps, err);
}

static qc_status host_copies(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err)
{
    qc_bench_roof *roof = &b->r->roof;
    void *host = NULL, *device = NULL;
    size_t bytes = (size_t)roof->host_bytes;
    qc_status st = qc_cuda_host_malloc(&host, bytes, err);
    if (st == QC_OK)
        st = qc_cuda_malloc(&device, bytes, err);
    if (st == QC_OK)
        st = qc_bench_pool_fill(b, pool, device, bytes / 2, 0, err);
    copying down = {NULL, device, host, bytes, qc_cuda_to_host};
    copying up = {NULL, host, device, bytes, qc_cuda_to_device};
    if (st == QC_OK)
        st = time_copy(b, launch_copy, &down, bytes, &roof->to_host_gbps, err);
    if (st == QC_OK)
        st = time_copy(b, launch_copy, &up, bytes, &roof->to_device_gbps, err);
    qc_cuda_free(device);
    qc_cuda_host_free(host);
    return st;
}

/* ---- cuBLAS ---- */

typedef struct {
    const qc_matmul *handle;
    const void *weights;
    uint64_t size;
    qc_matmul_io io;
    void *workspace;
} product;

static qc_status launch_product(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const product *p = ctx;
    (void)copy;
    return qc_matmul_dense(p->handle, p->weights, p->size, p->size, &p->io, p->workspace,
                           QC_MATMUL_DENSE_WORKSPACE, s, err);
}

static qc_status large_product(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err)
{
    void *memory[3] = {NULL, NULL, NULL};
    qc_bench_roof *roof = &b->r->roof;
    qc_bench_spread us;
    uint64_t free_bytes, total, size = GEMM_SIZE;
    if (b->r->device.no_gemm)
        return QC_OK;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    while (size > 64 && 6 * size * size > free_bytes / 32)
        size /= 2;
    qc_status st = QC_OK;
    for (unsigned i = 0; st == QC_OK && i < 3; i++) {
        st = qc_cuda_malloc(&memory[i], (size_t)(2 * size * size), err);
        if (st == QC_OK)
            st = qc_bench_pool_fill(b, pool, memory[i], size * size, i * size, err);
    }
    product p = {
        b->handle,
        memory[0],
        size,
        {.m = size, .x = memory[1], .x_dtype = pool->dtype, .y = memory[2], .y_dtype = pool->dtype},
        b->gemm_workspace};
    if (st == QC_OK)
        st = qc_bench_alone(
            b, (qc_bench_contender){.launch = launch_product, .ctx = &p, .least = 20}, &us, err);
    if (st == QC_OK) {
        roof->gemm_size = size;
        roof->gemm_tflops = qc_bench_spread_rate(us, qc_bench_flops(size, size, size) / 1e6);
    }
    for (unsigned i = 0; i < 3; i++)
        qc_cuda_free(memory[i]);
    return st;
}

/* ---- launches ---- */

typedef struct {
    uint8_t *codes;
    float *scale, *map, *out;
} nothing;

/* Launches a kernel that has one element, so as good as nothing to do. */
static qc_status launch_nothing(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const nothing *n = ctx;
    (void)copy;
    return qc_cuda_nested_dequantize(n->codes, n->scale, n->map, 1, QC_NESTED_BLOCK, 0, n->out, s,
                                     err);
}

static qc_status launch_gap(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err)
{
    (void)pool;
    unsigned char *p = NULL;
    QC_TRY(qc_cuda_malloc(&p, 1024, err));
    nothing n = {p, (float *)(void *)(p + 256), b->map, (float *)(void *)(p + 512)};
    qc_status st = qc_cuda_fill(p, 1, 1024, b->stream, err);
    if (st == QC_OK)
        st = qc_bench_alone(b,
                            (qc_bench_contender){.launch = launch_nothing, .ctx = &n, .least = 200},
                            &b->r->roof.launch_us, err);
    qc_cuda_free(p);
    return st;
}

/* Measures one after the other, so that each result is saved at once and a failure does not touch
 * the others. */
static qc_status measure_all(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err)
{
    static const struct {
        const char *name;
        qc_status (*measure)(qc_bench_gpu *b, const qc_bench_pool *pool, qc_error *err);
    } roofs[] = {{"the rate of a copy on the device", device_copy},
                 {"the rate of a copy by a kernel", kernel_copy},
                 {"the rate of reading by a kernel", kernel_read},
                 {"the rate of copies from and to the host", host_copies},
                 {"the least time of a launch", launch_gap},
                 {"the rate of cuBLAS on a large product", large_product}};
    for (size_t i = 0; i < sizeof roofs / sizeof *roofs; i++) {
        qc_error why = {0};
        if (roofs[i].measure(b, pool, &why) == QC_OK) {
            qc_bench_save(b);
            continue;
        }
        qc_error_prefix(&why, "%s could not be measured", roofs[i].name);
        QC_TRY(qc_bench_failed(
            b, (qc_bench_failure){.shape = QC_BENCH_NO_SHAPE, .scheme = QC_BENCH_SCHEME_COUNT},
            &why, err));
    }
    return QC_OK;
}

qc_status qc_bench_roofs(qc_bench_gpu *b, qc_error *err)
{
    uint64_t free_bytes, total;
    qc_bench_pool pool = {0};
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    b->r->roof.copy_bytes = copy_bytes(free_bytes);
    b->r->roof.host_bytes = b->r->roof.copy_bytes / 4;
    uint64_t unique = b->r->roof.copy_bytes / 16;
    qc_status st = qc_bench_pool_make(b, &pool, unique < POOL ? unique : POOL, 1,
                                      b->q->bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16, err);
    if (st == QC_OK)
        st = measure_all(b, &pool, err);
    qc_bench_pool_free(&pool);
    return st;
}

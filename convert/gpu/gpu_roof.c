/* What no kernel on this device can beat: the rates of copies and of reading, and the largest rate
 * of cuBLAS. */
#include "convert/gpu/gpu_timing.h"
#include "kernels/cuda_memory_rate.h"

#define COPY_MOST_BYTES  ((uint64_t)1 << 30)
#define COPY_LEAST_BYTES ((uint64_t)1 << 16)
#define GEMM_SIZE        8192u
#define POOL             ((uint64_t)1048583) /* a prime */

typedef struct {
    qc_timer *t;
    qc_gpu_noise pool;
    uint32_t rounds;
    double seconds;
    qc_gpu_roof *roof;
} measuring;

/* ---- copies and reading ---- */

typedef struct {
    const qc_cuda_device *device;
    void *from, *to;
    size_t bytes;
} copying;

static qc_status launch_copy(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const copying *c = ctx;
    (void)copy;
    return qc_cuda_copy(c->to, c->from, c->bytes, s, err);
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
    return qc_cuda_rate_read(c->device, c->from, c->bytes, c->to, s, err);
}

static qc_status time_copy(measuring *m, qc_timed_launch launch, size_t written, qc_spread *gbps,
                           qc_error *err)
{
    const size_t bytes = (size_t)m->roof->copy_bytes;
    copying c = {.device = &m->t->device, .bytes = bytes};
    const qc_timed timed = {.launch = launch, .ctx = &c, .least = 4};
    qc_spread us;
    qc_status st = qc_cuda_malloc(&c.from, bytes, err);
    if (st == QC_OK)
        st = qc_cuda_malloc(&c.to, written, err);
    if (st == QC_OK)
        st = qc_gpu_noise_fill(&m->pool, c.from, bytes / 2, 0, m->t->stream, err);
    if (st == QC_OK)
        st = qc_timed_alone(m->t, timed, m->rounds, m->seconds, &us, err);
    if (st == QC_OK)
        *gbps = qc_spread_rate(us, (double)(bytes + written) / 1e3);
    qc_cuda_free(c.from);
    qc_cuda_free(c.to);
    return st;
}

/* ---- cuBLAS ---- */

typedef struct {
    const qc_timer *t;
    const void *weights;
    uint64_t size;
    qc_matmul_io io;
} product;

static qc_status launch_product(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const product *p = ctx;
    (void)copy;
    return qc_matmul_dense(p->t->handle, p->weights, p->size, p->size, &p->io, p->t->gemm_workspace,
                           QC_MATMUL_DENSE_WORKSPACE, s, err);
}

static qc_status large_product(measuring *m, qc_error *err)
{
    void *memory[3] = {NULL, NULL, NULL};
    const qc_dtype dtype = m->pool.dtype;
    qc_spread us;
    uint64_t free_bytes, total, size = GEMM_SIZE;
    if (qc_matmul_no_gemm(m->t->handle) || (dtype == QC_DTYPE_BF16 && m->t->device.sm < 80))
        return QC_OK;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    while (size > 64 && 6 * size * size > free_bytes / 32)
        size /= 2;
    qc_status st = QC_OK;
    for (unsigned i = 0; st == QC_OK && i < 3; i++) {
        st = qc_cuda_malloc(&memory[i], (size_t)(2 * size * size), err);
        if (st == QC_OK)
            st = qc_gpu_noise_fill(&m->pool, memory[i], size * size, i * size, m->t->stream, err);
    }
    product p = {m->t,
                 memory[0],
                 size,
                 {.m = size, .x = memory[1], .x_dtype = dtype, .y = memory[2], .y_dtype = dtype}};
    const qc_timed timed = {.launch = launch_product, .ctx = &p, .least = 20};
    if (st == QC_OK)
        st = qc_timed_alone(m->t, timed, m->rounds, m->seconds, &us, err);
    if (st == QC_OK) {
        m->roof->gemm_size = size;
        m->roof->gemm_tflops = qc_spread_rate(us, qc_product_flops(size, size, size) / 1e6);
    }
    for (unsigned i = 0; i < 3; i++)
        qc_cuda_free(memory[i]);
    return st;
}

/* ---- all of it ---- */

static qc_status measure_all(measuring *m, qc_error *err)
{
    const size_t bytes = (size_t)m->roof->copy_bytes;
    const size_t sums = sizeof(uint32_t) * QC_CUDA_READ_SUMS * m->t->device.multiprocessors;
    const struct {
        const char *name;
        qc_timed_launch copy; /* NULL: a product */
        size_t written;
        qc_spread *gbps;
    } parts[] = {
        {"the rate of a copy on the device", launch_copy, bytes, &m->roof->copy_gbps},
        {"the rate of a copy by a kernel", launch_kernel_copy, bytes, &m->roof->kernel_copy_gbps},
        {"the rate of reading by a kernel", launch_read, sums, &m->roof->read_gbps},
        {"the rate of cuBLAS on a large product", NULL, 0, NULL},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        qc_status st = parts[i].copy
                           ? time_copy(m, parts[i].copy, parts[i].written, parts[i].gbps, err)
                           : large_product(m, err);
        if (st != QC_OK && st != QC_ERR_INTERRUPTED)
            qc_error_prefix(err, "%s could not be measured", parts[i].name);
        QC_TRY(st);
    }
    return QC_OK;
}

qc_status qc_gpu_roof_measure(qc_timer *t, qc_dtype dtype, uint32_t rounds, double seconds,
                              qc_gpu_roof *roof, qc_error *err)
{
    uint64_t free_bytes, total;
    measuring m = {.t = t, .rounds = rounds, .seconds = seconds, .roof = roof};
    *roof = (qc_gpu_roof){0};
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    roof->copy_bytes = COPY_MOST_BYTES; /* a power of two */
    while (roof->copy_bytes > COPY_LEAST_BYTES && roof->copy_bytes > free_bytes / 8)
        roof->copy_bytes /= 2;
    const uint64_t unique = roof->copy_bytes / 16;
    qc_status st =
        qc_gpu_noise_make(&m.pool, unique < POOL ? unique : POOL, 1, dtype, 0, t->stream, err);
    if (st == QC_OK)
        st = measure_all(&m, err);
    qc_gpu_noise_free(&m.pool);
    return st;
}

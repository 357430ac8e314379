/* For the tests of the quantizing kernels: a device and a stream, buffers with poison around them,
 * and sources that are hard to get right. */
#ifndef QC_TESTS_QUANT_DEVICE_FIXTURE_H
#define QC_TESTS_QUANT_DEVICE_FIXTURE_H

#include "quant_testing.h"

#include "kernels/cuda_device.h"

#include <string.h>

#define QD_POISON 0xa5
#define QD_GUARD  64u /* bytes before and behind what a kernel may write */

typedef struct {
    qc_cuda_device device;
    qc_cuda_stream stream;
    qc_error err;
} qd_state;

static qd_state qd;

#define QD_OK(call) QT_CHECK((call) == QC_OK, "%s: %s", #call, qd.err.msg)

/* The first device, or exit with 77 where there is none. */
static inline void qd_start(void)
{
    char why[256];
    int count = 0;
    qc_cuda_device_count(&count, why, sizeof why);
    if (count == 0) {
        fprintf(stderr, "skipped: %s\n", why);
        exit(77);
    }
    if (qc_cuda_device_open(&qd.device, 0, &qd.err) != QC_OK ||
        qc_cuda_use(&qd.device, &qd.err) != QC_OK ||
        qc_cuda_stream_create(&qd.stream, &qd.err) != QC_OK) {
        fprintf(stderr, "%s\n", qd.err.msg);
        exit(1);
    }
}

static inline void qd_end(void)
{
    qc_cuda_stream_destroy(qd.stream);
}

/* Device memory whose usable part begins `offset` bytes behind a multiple of 256, with a guard on
 * either side; all of it is poison. */
typedef struct {
    unsigned char *base;
    void *p; /* on the device */
    size_t bytes, offset;
} qd_buffer;

static inline qd_buffer qd_new(size_t bytes, size_t offset)
{
    qd_buffer b = {NULL, NULL, bytes, offset};
    void *v = NULL;
    size_t all = 256 + offset + bytes + QD_GUARD;
    QD_OK(qc_cuda_malloc(&v, all, &qd.err));
    b.base = v;
    b.p = b.base + 256 + offset;
    QD_OK(qc_cuda_fill(v, QD_POISON, all, qd.stream, &qd.err));
    return b;
}

static inline qd_buffer qd_new_from(const void *host, size_t bytes, size_t offset)
{
    qd_buffer b = qd_new(bytes, offset);
    QD_OK(qc_cuda_to_device(b.p, host, bytes, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    return b;
}

/* What is in it, to be freed, after a look at the guards; frees the buffer. */
static inline void *qd_take(qd_buffer *b, const char *what)
{
    size_t all = 256 + b->offset + b->bytes + QD_GUARD;
    unsigned char *host = qt_alloc(all, 1), *out = qt_alloc(b->bytes, 1);
    QD_OK(qc_cuda_to_host(host, b->base, all, qd.stream, &qd.err));
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    for (size_t i = 0; i < all; i++)
        if (i < 256 + b->offset || i >= 256 + b->offset + b->bytes)
            QT_CHECK(host[i] == QD_POISON, "%s: byte %td outside was written", what,
                     (ptrdiff_t)i - (ptrdiff_t)(256 + b->offset));
    memcpy(out, host + 256 + b->offset, b->bytes);
    free(host);
    qc_cuda_free(b->base);
    return out;
}

static inline void qd_drop(qd_buffer *b)
{
    QD_OK(qc_cuda_stream_synchronize(qd.stream, &qd.err));
    qc_cuda_free(b->base);
}

static inline void qd_same(const void *got, const void *want, size_t bytes, const char *what)
{
    const unsigned char *g = got, *w = want;
    for (size_t i = 0; i < bytes; i++)
        QT_CHECK(g[i] == w[i], "%s: byte %zu of %zu is %02x, not %02x", what, i, bytes, g[i], w[i]);
}

/* ---- sources ----------------------------------------------------------------------------------
 */

typedef enum {
    QD_NORMAL,     /* weights, one in 500 an outlier */
    QD_THRESHOLDS, /* absmax 1, else NF4 thresholds and int8 ties, and their neighbours */
    QD_TINY,       /* subnormals and what is near them */
    QD_HUGE,       /* up to the largest number of the type */
    QD_ZEROS,      /* blocks of 0 and -0, a few others */
    QD_SPREAD,     /* any exponent from one block of 32 to the next */
    QD_PATTERNS    /* 16-bit: every finite pattern in turn; float: any finite one */
} qd_kind;
#define QD_KINDS 7

static inline double qd_limit(qc_dtype dtype)
{
    return dtype == QC_DTYPE_F16 ? 65504.0 : dtype == QC_DTYPE_BF16 ? 0x1.fep127 : 0x1.fffffep127;
}

static inline double qd_value(qt_rng *rng, qd_kind kind, qc_dtype dtype, uint64_t i)
{
    switch (kind) {
    case QD_NORMAL:
        return (double)qt_randn(rng) * (qt_below(rng, 500) == 0 ? 0.8 : 0.02);
    case QD_THRESHOLDS:
        if (i % 29 == 3)
            return i % 2 ? 1.0 : -1.0;
        if (i % 3 == 0)
            return ((double)qt_below(rng, 254) - 126.5) / 127.0;
        return (double)qt_step(qc_nf4_threshold[qt_below(rng, 15)], (int)qt_below(rng, 5) - 2);
    case QD_TINY:
        return (double)qt_randn(rng) * ldexp(1.0, -90 - (int)(i / 64 % 60));
    case QD_HUGE:
        return (2 * qt_uniform(rng) - 1) * qd_limit(dtype) * (i % 3 ? 1.0 : 0.001);
    case QD_ZEROS:
        return i / 64 % 3 == 0 && i % 7 == 0 ? (double)qt_randn(rng) : i % 2 ? -0.0 : 0.0;
    case QD_SPREAD:
        return (double)qt_randn(rng) *
               ldexp(1.0, (int)(i / 32 * 37 % 250) - (dtype == QC_DTYPE_F16 ? 250 : 126)) * 0.1;
    case QD_PATTERNS:
    default:
        return (double)qt_any_float(rng);
    }
}

/* n elements, all finite in the type. */
static inline void *qd_source(qt_rng *rng, qd_kind kind, qc_dtype dtype, uint64_t n)
{
    void *src = qt_alloc(n, qt_size(dtype));
    uint16_t infinity = dtype == QC_DTYPE_F16 ? QC_F16_INF : QC_BF16_INF;
    uint32_t pattern = (uint32_t)qt_next(rng);
    for (uint64_t i = 0; i < n; i++) {
        if (kind == QD_PATTERNS && dtype != QC_DTYPE_F32) {
            uint16_t h;
            do
                h = (uint16_t)pattern++;
            while ((h & 0x7fffu) >= infinity);
            memcpy((uint16_t *)src + i, &h, sizeof h);
            continue;
        }
        double x = qd_value(rng, kind, dtype, i), limit = qd_limit(dtype);
        qt_put(src, dtype, i, x > limit ? limit : x < -limit ? -limit : x);
    }
    return src;
}

#endif

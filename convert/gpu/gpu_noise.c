/* Random numbers in device memory. */
#include "base/alloc.h"
#include "base/random.h"
#include "convert/gpu/gpu_timing.h"
#include "quant/quant_half.h"

qc_status qc_gpu_noise_make(qc_gpu_noise *p, uint64_t unique, double deviation, qc_dtype dtype,
                            uint64_t seed, qc_cuda_stream s, qc_error *err)
{
    uint64_t state = seed;
    float scale = (float)deviation;
    *p = (qc_gpu_noise){.unique = unique, .dtype = dtype};
    QC_TRY(qc_calloc(&p->host, (size_t)unique, sizeof *p->host, err));
    for (uint64_t i = 0; i < unique; i++) {
        /* The sum of four uniform numbers. It has a bell shape with standard deviation 1 (the
         * variance of four is 1/3), without the tails of a normal distribution, and it is fast
         * enough to make millions. */
        const uint64_t r = qc_random_next(&state);
        const int sum = (int)(r & 0xffff) + (int)(r >> 16 & 0xffff) + (int)(r >> 32 & 0xffff) +
                        (int)(r >> 48) - 2 * 0xffff;
        const float bell = (float)sum * (float)(1.7320508075688772 / 65536), v = bell * scale;
        p->host[i] = dtype == QC_DTYPE_F16 ? qc_f16_from_f32(v) : qc_bf16_from_f32(v);
    }
    QC_TRY(qc_cuda_malloc(&p->device, (size_t)unique * sizeof *p->host, err));
    QC_TRY(qc_cuda_to_device(p->device, p->host, (size_t)unique * sizeof *p->host, s, err));
    return qc_cuda_stream_synchronize(s, err);
}

qc_status qc_gpu_noise_fill(const qc_gpu_noise *p, void *dst, uint64_t n, uint64_t first,
                            qc_cuda_stream s, qc_error *err)
{
    const uint16_t *from = p->device;
    uint16_t *to = dst;
    uint64_t at = first % p->unique;
    while (n) {
        uint64_t part = p->unique - at < n ? p->unique - at : n;
        QC_TRY(qc_cuda_copy(to, from + at, (size_t)part * sizeof *to, s, err));
        to += part;
        n -= part;
        at = 0;
    }
    return QC_OK;
}

void qc_gpu_noise_free(qc_gpu_noise *p)
{
    qc_free(p->host);
    qc_cuda_free(p->device);
    *p = (qc_gpu_noise){0};
}

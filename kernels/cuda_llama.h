/* A layer of a Llama-like decoder on a GPU, except for its products (kernels/matmul.h).
 *
 * Hidden states and everything between two products are float. A product takes and gives float16,
 * so each row is first shifted by a power of two:
 *
 *     value = half * 2^exponent      exponent [rows]: the row's largest |half| is in [0.5, 1)
 *
 * A dense weight is shifted in the same way, by one power of two for all of it. Then nothing
 * overflows, whatever outliers a row has: |x W^T| <= K for |x|, |W| < 1. The loss is float16's
 * rounding: 2^-11 of an element and 2^-25 of the row's largest, per product and side; bfloat16
 * models lose more when they are run as they are meant to be. Quantized weights are not shifted:
 * their products overflow if |W| K is beyond 65504.
 *
 * All pointers are device memory; half arrays are 4-byte aligned; K, head_dim and so on may be any
 * number. Sums are in float, in an order that depends on shapes only: results are bitwise the same
 * from run to run, and those of a window do not depend on which other windows are with it. NaN and
 * infinity go through to the result and are not looked for. Work is put on the stream and not
 * waited for; nothing is allocated. Thread-safe: yes. rows == 0 is a no-op. Errors: QC_ERR_USAGE
 * for a size that is not supported, QC_ERR_INTERNAL from CUDA. */
#ifndef QC_KERNELS_CUDA_LLAMA_H
#define QC_KERNELS_CUDA_LLAMA_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"

QC_C_BEGIN

/* Rows that go into a product or come out of one. */
typedef struct {
    uint64_t rows, cols;
    uint16_t *half; /* [rows, cols] */
    int *exponent;  /* [rows] */
} qc_cuda_halves;

/* The result of a product: value = half * 2^(exponent of its row of x + that of the weight) +
 * bias. */
typedef struct {
    const uint16_t *half; /* [rows, cols] */
    const int *exponent;  /* [rows], of x */
    const int *weight;    /* one number; NULL: 0 */
    const float *bias;    /* [cols], NULL: 0 */
} qc_cuda_product;

/* Turns x [rows, cols] floats into halves. With gain [cols] the RMS norm comes first, x / sqrt(mean
 * x^2 + eps) * gain; with NULL the values stay as they are. */
QC_NODISCARD qc_status qc_cuda_llama_halves(const float *x, const float *gain, float eps,
                                            const qc_cuda_halves *out, qc_cuda_stream s,
                                            qc_error *err);

/* Turns silu(gate) * up into halves. */
QC_NODISCARD qc_status qc_cuda_llama_swiglu(const qc_cuda_product *gate, const qc_cuda_product *up,
                                            const qc_cuda_halves *out, qc_cuda_stream s,
                                            qc_error *err);

/* Sets out [rows, cols] to the product, or adds the product to it. */
QC_NODISCARD qc_status qc_cuda_llama_floats(const qc_cuda_product *p, uint64_t rows, uint64_t cols,
                                            int add, float *out, qc_cuda_stream s, qc_error *err);

/* The heads of q, k or v; cols = heads * head_dim, where head_dim is even and at most
 * QC_CUDA_HEAD_MOST. First the RMS norm of each head (norm: [head_dim], NULL: none), then rotary
 * positions (cosine, sine: [positions, head_dim / 2], NULL: none; position [rows]): with h =
 * head_dim / 2 and i < h
 *
 *     out[i] = v[i] cos[i] - v[i + h] sin[i]      out[i + h] = v[i + h] cos[i] + v[i] sin[i] */
#define QC_CUDA_HEAD_MOST 256u
typedef struct {
    uint64_t rows;
    uint32_t heads, head_dim;
    const float *norm;
    float eps;
    const float *cosine, *sine;
    const uint32_t *position;
} qc_cuda_heads;
QC_NODISCARD qc_status qc_cuda_llama_heads(const qc_cuda_product *p, const qc_cuda_heads *h,
                                           float *out, qc_cuda_stream s, qc_error *err);

/* Causal attention within windows: row r of a window sees its rows r' <= r, but only the last
 * `window` of them (0: all). Query head h uses head h / (heads / kv_heads) of k and v.
 * tiles: windows cut into at most QC_CUDA_QUERY_TILE rows each, at multiples of that from the
 * window's first row. A softmax in two passes would read the keys twice; this one keeps a running
 * maximum (Milakov and Gimelshein 2018), 32 keys at a time. */
#define QC_CUDA_QUERY_TILE 16u
typedef struct {
    uint32_t first, count; /* rows */
    uint32_t window_first; /* the window's first row */
} qc_cuda_query_tile;
typedef struct {
    const float *q;     /* [rows, heads, head_dim] */
    const float *k, *v; /* [rows, kv_heads, head_dim] */
    float *out;         /* [rows, heads, head_dim] */
    const qc_cuda_query_tile *tiles;
    uint32_t tile_count;
    uint32_t heads, kv_heads, head_dim;
    uint32_t window;
    float scale; /* of q k^T */
} qc_cuda_attention;
QC_NODISCARD qc_status qc_cuda_llama_attention(const qc_cuda_attention *a, qc_cuda_stream s,
                                               qc_error *err);

/* Turns a dense weight into halves with one exponent. src has n elements of F32, F16 or BF16;
 * largest has room for 4 bytes. */
QC_NODISCARD qc_status qc_cuda_llama_weight(const void *src, qc_dtype dtype, uint64_t n,
                                            uint16_t *half, int *exponent, uint32_t *largest,
                                            qc_cuda_stream s, qc_error *err);

/* Computes y [m, n] = x [m, k] W [n, k]^T, all float16, for machines without cuBLAS. Sums are
 * floats in k order and are rounded once. It is simple: tiles of 32 x 32 in shared memory, no
 * tensor cores. */
QC_NODISCARD qc_status qc_cuda_llama_dense(const uint16_t *x, const uint16_t *w, uint64_t m,
                                           uint64_t n, uint64_t k, uint16_t *y, qc_cuda_stream s,
                                           qc_error *err);

QC_C_END
#endif

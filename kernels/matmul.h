/* y = x W^T (+ bias and more) with W quantized: the dequant-matmul of qconv, as a C library.
 *
 *   x     [M, K]  F16 or BF16, row stride ldx elements      K = w->cols
 *   W     [N, K]  qc_weights in device memory               N = w->rows, or those of a slice
 *   bias  [N]     dtype of y, or NULL
 *   y     [M, N]  F16 or BF16 (any of the two, whatever x), row stride ldy elements
 * An epilogue can follow, act(gate) * (x W^T + bias) + residual (qc_matmul_io).
 *
 * M, N and K may be any number >= 0 (K == 0 gives the bias, or zeros); K need not be a multiple of
 * the block or of 8; pointers may have any alignment of their type. Accumulation is in float. The
 * order of sums depends only on the shape, the device, the path and the size of the workspace:
 * results are bitwise the same from run to run. NaN and infinity in x come out as IEEE has it;
 * weights must be finite.
 *
 * qc_matmul_plan_make, a pure host function, chooses a path by shape and device (docs/matmul.md):
 *
 *   GEMV         small M: weights streamed, values and products in float
 *   MMA_884      tensor cores of sm_70 and sm_75
 *   MMA_16816    tensor cores of sm_80 and newer
 *   WGMMA        those of sm_90 by the instructions that only it has; aligned rows of codes, K a
 *                multiple of 64, blocks of 64 or more
 *   DEQUANT_GEMM large M: rows dequantized to a reused workspace, then cuBLAS; integers of
 *                compressed-tensors with any M, as no other path reads them: QC_ERR_UNSUPPORTED
 *                without cuBLAS
 *
 * A pointer that is NULL where it must not be is QC_ERR_USAGE; functions without a status then
 * return NULL, 0 or, of bytes, UINT64_MAX.
 *
 * BF16 x goes through the float16 kernels after an exact shift of each row by a power of two (exact
 * for |x| >= 2^-31 of the row's largest). So sm_70, which has no bfloat16, can take it too.
 *
 * qc_matmul_run allocates nothing, does not synchronize, and puts nothing on the default stream.
 * The caller must keep handle, workspace and weights until the stream is done. DEQUANT_GEMM also
 * uses a stream of the handle, for which the caller's stream waits.
 * Threads: several threads may use a handle at once as long as each call has a workspace and a
 * stream of its own; a lock serializes calls through DEQUANT_GEMM (cuBLAS's handle and the side
 * stream). The calling thread's current device (qc_cuda_use) must be the handle's; if it is
 * another, every function that would launch returns QC_ERR_USAGE and does nothing. */
#ifndef QC_KERNELS_MATMUL_H
#define QC_KERNELS_MATMUL_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"
#include "quant/quant_weights.h"
#include "quant/weight_slice.h"

QC_C_BEGIN

typedef struct qc_matmul qc_matmul;

typedef enum {
    QC_MATMUL_AUTO, /* to ask for a plan: choose */
    QC_MATMUL_GEMV,
    QC_MATMUL_MMA_884,
    QC_MATMUL_MMA_16816,
    QC_MATMUL_DEQUANT_GEMM,
    QC_MATMUL_FILL, /* nothing to multiply: M, N or K is 0 */
    QC_MATMUL_WGMMA,
    QC_MATMUL_PATH_COUNT
} qc_matmul_path;
QC_API const char *qc_matmul_path_name(qc_matmul_path path); /* "gemv", "mma-884", ... */

/* A handle for one device. cuBLAS is opened at run time: QCONV_LIBCUBLAS names the library,
 * otherwise libcublas.so.13, .12, .11 are tried; without it DEQUANT_GEMM is not chosen, and
 * qc_matmul_no_gemm says why. create and destroy leave the calling thread's current device as it
 * was. (If another device than the handle's was current and nothing had used it, CUDA 12 and newer
 * start it on the way back.) Call destroy after the streams that had its products are done and the
 * graphs that have them are destroyed; it accepts NULL. */
QC_API QC_NODISCARD qc_status qc_matmul_create(qc_matmul **out, int device_index, qc_error *err);
QC_API void qc_matmul_destroy(qc_matmul *h);
QC_API const qc_cuda_device *qc_matmul_device(const qc_matmul *h);
/* NULL if cuBLAS was found, otherwise a sentence that says why not. */
QC_API const char *qc_matmul_no_gemm(const qc_matmul *h);

/* Reports faults. The result is QC_ERR_USAGE, once, after a kernel of this handle found offsets of
 * experts that are wrong, and QC_ERR_INTERNAL after one that could not work for another reason;
 * such a kernel did not write its y. The functions that run products ask this before they launch,
 * so the next product of any thread reports a fault; after a wait for a stream this function
 * reports it at once. It looks at a word of host memory, and any thread may call it at any time. */
QC_API QC_NODISCARD qc_status qc_matmul_check(const qc_matmul *h, qc_error *err);

/* A weight that is made ready once. Where its rows of codes do not all begin on 16-byte addresses
 * (K % 32 != 0, or the codes' address), they are laid out anew so that they do; integers of
 * compressed-tensors are left as they are. The largest scale is found, and with it the power of two
 * that keeps tiny and huge weights within float16 in the tensor-core paths.
 *
 *   memory  device, qc_matmul_prepared_bytes, 256-byte aligned; written on s, then only read
 *
 * *out borrows memory and w's arrays (the codes no longer once s is done, if row_bytes is not 0).
 * QC_ERR_USAGE names what is wrong with w (block size, a missing array). */
typedef struct {
    qc_weights w;         /* w.codes: the repacked ones, where repacked */
    const int *exponent;  /* device: 2^*exponent scales weights into float16; behind it, as floats,
                            2^-*exponent, 0 and 1. 0 where the largest |scale| is within
                            [2^-8, 2^15): such weights are float16 as dequantizing has them */
    uint64_t row_bytes;   /* of codes, where repacked; 0: as in the file */
    qc_weights_part part; /* what of w is multiplied: all, as qc_matmul_prepare leaves it */
    int complete;         /* QC_MATMUL_WEIGHTS_COMPLETE, or 0 as preparing leaves it */
} qc_matmul_weights;
/* The caller sets this after synchronizing with whatever wrote w's arrays and the prepared memory:
 * no work that is still to run in the stream writes them, now or later. Kernels that overlap the
 * launch before theirs then load weights before that launch has ended. */
#define QC_MATMUL_WEIGHTS_COMPLETE 1
/* Depends on the codes' address; NULL stands for one that is aligned. UINT64_MAX where it
 * overflows. */
QC_API uint64_t qc_matmul_prepared_bytes(const qc_weights *w);
QC_API QC_NODISCARD qc_status qc_matmul_prepare(const qc_matmul *h, const qc_weights *w,
                                                void *memory, qc_matmul_weights *out,
                                                qc_cuda_stream s, qc_error *err);

/* Describes a part of a prepared weight, or of a slice of one, as one of its own: any rows, and
 * columns from a multiple of 32 of the whole weight to another, or to its last. Nothing is copied:
 * *out borrows what whole does, and kernels count scales in the whole weight. So its values are
 * those of the whole bit for bit. All paths multiply it; those that need K to be a multiple of 64
 * (QC_MATMUL_WGMMA and the kernels that are best with few rows) also want the columns to begin at
 * one, in a whole weight whose columns divide by 64.
 * QC_ERR_USAGE where the part is not within the weight; QC_ERR_SHAPE where a cut is not possible:
 * the message says where one is. This is a pure host function. */
QC_API QC_NODISCARD qc_status qc_matmul_slice(const qc_matmul_weights *whole,
                                              const qc_weights_part *part, qc_matmul_weights *out,
                                              qc_error *err);

/* What a gate is put through, g / (1 + e^-t): with t = g, which is SiLU, or with
 * t = sqrt(8 / pi) (g + 0.044715 g^3), which is GELU in its form with tanh. */
typedef enum { QC_MATMUL_NO_GATE, QC_MATMUL_SILU, QC_MATMUL_GELU_TANH } qc_matmul_gate;

/* gate and residual make an epilogue in float, in which each line rounds to float, each operation
 * of the gate's function for itself:
 *
 *     v = the sum, in float     v = v + bias     v = act(gate) * v     v = v + residual
 *
 * and only then y is v, rounded once. What is NULL has no line. e^-t is CUDA's expf. Both have the
 * dtype of y, and each may be y itself with the same stride; else they must not overlap it. */
typedef struct {
    uint64_t m;
    const void *x;
    qc_dtype x_dtype; /* F16 or BF16 */
    uint64_t ldx;     /* elements, >= K; 0: K */
    void *y;
    qc_dtype y_dtype; /* F16 or BF16 */
    uint64_t ldy;     /* elements, >= N; 0: N */
    const void *bias; /* [N] of y_dtype, or NULL */
    qc_matmul_gate act;
    const void *gate;     /* [M, N], or NULL, and act is QC_MATMUL_NO_GATE */
    uint64_t ldg;         /* elements, >= N; 0: N */
    const void *residual; /* [M, N], or NULL */
    uint64_t ldr;         /* elements, >= N; 0: N */
} qc_matmul_io;

/* Returns the workspace for up to max_m rows of x with this weight, whatever dtypes, strides and
 * bias: the most that any smaller m needs as well.
 * path: QC_MATMUL_AUTO, or the one that will be forced. limit_bytes: 0, or the most it may be. With
 * a limit, DEQUANT_GEMM works in smaller chunks of rows (AUTO takes the tensor cores where not even
 * 64 rows fit), and K is split less. Without a limit, DEQUANT_GEMM may take a float16 copy of the
 * whole weight: 470 MB for 28672 x 8192 (kernels/matmul_chunks.h). UINT64_MAX means that there is
 * no way to do it within the limit, or not on this device; qc_matmul_run says which. */
QC_API uint64_t qc_matmul_workspace_bytes(const qc_matmul *h, const qc_matmul_weights *w,
                                          uint64_t max_m, qc_matmul_path path,
                                          uint64_t limit_bytes);

/* workspace: device memory, whose bytes before do not count, 256-byte aligned; NULL if
 * workspace_bytes is 0. workspace_bytes: as answered above for at least this m, or any number,
 * which is then the limit to plan for. Equal results need equal path and workspace_bytes, because
 * these decide how K is split. QC_ERR_USAGE names the argument that is wrong (dtype, stride,
 * workspace too small, a path this device does not have). */
QC_API QC_NODISCARD qc_status qc_matmul_run(const qc_matmul *h, const qc_matmul_weights *w,
                                            const qc_matmul_io *io, qc_matmul_path path,
                                            void *workspace, uint64_t workspace_bytes,
                                            qc_cuda_stream s, qc_error *err);

/* The products of several weights with the same x (q, k and v; gate and up). They take one launch
 * if the weights are alike: of one kind, with blocks of one size, the same code_map, all with plain
 * or all with double-quantized scales, all or none repacked, slices of weights with equally many
 * columns. Otherwise, and on paths that launch more than one kernel anyway, they
 * run one after the other. io[i] goes with w[i]: m, x, dtypes and
 * ldx are the same in all (QC_ERR_USAGE names what differs), while all else is its own.
 * count: 1 to QC_MATMUL_GROUP_MOST. K is the same in all. Sums may have another order than those of
 * single calls, because there is one plan for all. */
#define QC_MATMUL_GROUP_MOST 8u
QC_API uint64_t qc_matmul_group_workspace_bytes(const qc_matmul *h,
                                                const qc_matmul_weights *const *w, uint32_t count,
                                                uint64_t max_m, qc_matmul_path path,
                                                uint64_t limit_bytes);
QC_API QC_NODISCARD qc_status qc_matmul_run_group(const qc_matmul *h,
                                                  const qc_matmul_weights *const *w,
                                                  const qc_matmul_io *io, uint32_t count,
                                                  qc_matmul_path path, void *workspace,
                                                  uint64_t workspace_bytes, qc_cuda_stream s,
                                                  qc_error *err);

/* ---- planned once, run many times ---- */

/* A product, or several with one x, with everything decided that depends on shapes. The storage is
 * the caller's: qc_abi_size("qc_matmul_planned") bytes, some 2 KB, aligned to 8 (its members are in
 * kernels/matmul_plan.h). It holds no pointers, so it may be copied, kept, and used by several
 * threads at once. */
typedef struct qc_matmul_planned qc_matmul_planned;

/* Plans what qc_matmul_run (count 1) or qc_matmul_run_group would do with a workspace of
 * limit_bytes (0: any; out->workspace_bytes then says what it takes). Of io it reads m, dtypes,
 * strides, which of them have a bias, a gate or a residual (any pointer that is not NULL), and the
 * alignment of x.
 * Pointers are not followed, and x may be NULL for one on a 16-byte address. */
QC_API QC_NODISCARD qc_status qc_matmul_plan_product(const qc_matmul *h,
                                                     const qc_matmul_weights *const *w,
                                                     const qc_matmul_io *io, uint32_t count,
                                                     qc_matmul_path path, uint64_t limit_bytes,
                                                     qc_matmul_planned *out, qc_error *err);

/* Of a plan: the path of weight i, QC_MATMUL_AUTO where there is no such weight, and the least
 * workspace. */
QC_API qc_matmul_path qc_matmul_planned_path(const qc_matmul_planned *planned, uint32_t i);
QC_API uint64_t qc_matmul_planned_workspace(const qc_matmul_planned *planned);

/* Runs a plan as qc_matmul_run does, but without planning, with the planned weights or others of
 * the same shape (the next layer's). QC_ERR_USAGE names what the plan does not hold for: another m,
 * dtype, kind, part or block, an x less aligned, a bias, gate or residual that was not planned, a
 * workspace that is too small. A plan belongs to its handle's device. */
QC_API QC_NODISCARD qc_status qc_matmul_run_planned(const qc_matmul *h,
                                                    const qc_matmul_planned *planned,
                                                    const qc_matmul_weights *const *w,
                                                    const qc_matmul_io *io, void *workspace,
                                                    uint64_t workspace_bytes, qc_cuda_stream s,
                                                    qc_error *err);

/* y = x W^T in cuBLAS with W [N, K] F16 or BF16 in device memory and equal dtypes of x, W and y;
 * the quantized matmul is compared with it. QC_ERR_UNSUPPORTED without cuBLAS; BF16 needs sm_80.
 * workspace: cuBLAS's, in device memory, 256-byte aligned, best of QC_MATMUL_DENSE_WORKSPACE bytes.
 * NULL is one of cuBLAS's own, which in a captured stream becomes an allocation and a release
 * around each product. */
#define QC_MATMUL_DENSE_WORKSPACE ((uint64_t)32 << 20)
QC_NODISCARD qc_status qc_matmul_dense(const qc_matmul *h, const void *weights, uint64_t n,
                                       uint64_t k, const qc_matmul_io *io, void *workspace,
                                       uint64_t workspace_bytes, qc_cuda_stream s, qc_error *err);

/* A product of exact weights, W [N, K]. */
typedef struct {
    const qc_weights *w; /* quantized; or NULL, and W is */
    const void *dense;   /* F32, F16 or BF16 */
    qc_dtype dense_dtype;
    uint64_t n, k, m;
    const void *x; /* [M, K] */
    qc_dtype x_dtype;
    double *y; /* [M, N] */
} qc_matmul_exact;
/* A slow reference on the GPU: sums in double and in k order. x is F16 or BF16. */
QC_NODISCARD qc_status qc_matmul_reference(const qc_matmul *h, const qc_matmul_exact *e,
                                           qc_cuda_stream s, qc_error *err);

QC_C_END
#endif

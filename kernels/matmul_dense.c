/* Everything that goes through cuBLAS: a weight that is dequantized in chunks and multiplied, and
 * the plain product to compare with. The slow exact product is here as well.
 *
 * There are two streams and two buffers. While cuBLAS multiplies chunk i on the caller's stream,
 * chunk i + 1 is dequantized on the side stream, in the buffer that chunk i - 1 had:
 *
 *     caller's   dense 0 | F product 0 | wait | F product 1 | wait | product 2
 *     side                 \ dense 1 R /       \ dense 2 R /
 *
 * F, the event `forked`, comes before product i, so chunk i - 1 is multiplied by then and its
 * buffer free; R, `ready`, is what the caller's stream waits for. Whether or not there was an
 * error, the caller's stream waits for everything that the side stream has to do. So waiting for
 * the caller's stream is enough, and a capture of it may end. */
#include "base/checked.h"
#include "kernels/cuda_quantize.h"
#include "kernels/matmul_handle.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

static qc_status make_dense(const qc_matmul_call *c, uint64_t first, uint64_t rows, void *dense,
                            qc_cuda_stream s, qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    const int *exponent = c->weights.exponent;
    if (c->weights.row_bytes)
        return qc_matmul_dense_rows_launch(&c->weights, first, rows, dense, p->dense_dtype,
                                           p->k_padded, exponent, s, err);
    qc_weights_part part = c->weights.part;
    part.row += first;
    part.rows = rows;
    return qc_cuda_dequantize_part(&c->weights.w, &part, dense, p->dense_dtype, p->k_padded,
                                   exponent, NULL, s, err);
}

/* Multiplies with the dense rows of W from `first` on, which give their columns of y. */
static qc_status multiply(qc_cublas *gemm, const qc_matmul_call *c, uint64_t first, uint64_t rows,
                          const void *dense, qc_cuda_stream s, qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    const int *exponent = c->weights.exponent;
    qc_matmul_call part = *c;
    part.n = rows;
    part.out = qc_matmul_output_at(&c->out, 0, first);
    const qc_cublas_product_args g = {
        .a = c->x,
        .b = dense,
        .y = p->gemm_to_float ? (void *)c->partials : part.out.y,
        .dtype = p->dense_dtype,
        .y_dtype = p->gemm_to_float ? QC_DTYPE_F32 : p->dense_dtype,
        .trans_b = 1,
        .m = c->m,
        .n = rows,
        .k = c->k,
        .lda = c->ldx,
        .ldb = p->k_padded,
        .ldy = p->gemm_to_float ? rows : c->out.ldy,
        .alpha = 1.0,
        .alpha_zero = !p->gemm_to_float && exponent ? (const float *)(exponent + 1) : NULL,
    };
    QC_TRY(qc_cublas_product(gemm, &g, err));
    return p->gemm_to_float ? qc_matmul_reduce_launch(&part, s, err) : QC_OK;
}

/* Gives the side stream for s, or NULL where the next chunk has to be dequantized on s itself,
 * because there is one chunk or one buffer, or because another capture has the side stream. (Only
 * one capture at a time can have that of a handle. Results are the same.) */
static qc_status side_for(const qc_matmul *h, const qc_matmul_call *c, qc_cuda_stream s,
                          const qc_matmul_side **out, qc_error *err)
{
    unsigned long long own = 0, taken = 0;
    *out = NULL;
    if (c->n <= c->plan.chunk_rows || !c->plan.dense_stride)
        return QC_OK;
    QC_TRY(qc_cuda_capture_of(&own, s, err));
    const qc_matmul_side *side = &h->side[own != 0];
    if (own)
        QC_TRY(qc_cuda_capture_of(&taken, side->stream, err));
    if (!taken || taken == own)
        *out = side;
    return QC_OK;
}

/* Multiplies the chunk from row `first` on, and dequantizes the next one, where there is one. */
static qc_status chunk(const qc_matmul *h, const qc_matmul_call *c, uint64_t first,
                       unsigned char *const dense[2], const qc_matmul_side *side, qc_cuda_stream s,
                       qc_error *err)
{
    const uint64_t most = c->plan.chunk_rows, next = first + most;
    const uint64_t rows = c->n - first < most ? c->n - first : most;
    const int here = (int)(first / most % 2), more = next < c->n;
    const uint64_t next_rows = !more ? 0 : c->n - next < most ? c->n - next : most;
    if (!more || !side) {
        QC_TRY(multiply(h->gemm, c, first, rows, dense[here], s, err));
        return more ? make_dense(c, next, next_rows, dense[!here], s, err) : QC_OK;
    }
    QC_TRY(qc_cuda_event_record(side->forked, s, err));
    QC_TRY(qc_cuda_stream_wait(side->stream, side->forked, err));
    /* cuBLAS goes first: its tiles get the multiprocessors, and the other kernel what they
     * leave. */
    qc_status st = multiply(h->gemm, c, first, rows, dense[here], s, err);
    if (st == QC_OK)
        st = make_dense(c, next, next_rows, dense[!here], side->stream, err);
    if (st == QC_OK)
        st = qc_cuda_event_record(side->ready, side->stream, err);
    if (st == QC_OK)
        st = qc_cuda_stream_wait(s, side->ready, err);
    if (st == QC_OK)
        return QC_OK;
    /* After an error, s waits for the work that the side stream was given. If not even that can be
     * asked for, the calling thread waits. The caller has the first error. */
    qc_status late = qc_cuda_event_record(side->ready, side->stream, NULL);
    if (late == QC_OK)
        late = qc_cuda_stream_wait(s, side->ready, NULL);
    if (late != QC_OK)
        late = qc_cuda_stream_synchronize(side->stream, NULL);
    (void)late;
    return st;
}

qc_status qc_matmul_dequant_gemm(const qc_matmul *h, const qc_matmul_call *c,
                                 unsigned char *workspace, uint64_t workspace_bytes,
                                 qc_cuda_stream s, qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    unsigned char *const first_dense = workspace + p->dense_offset;
    unsigned char *const dense[2] = {first_dense, first_dense + p->dense_stride};
    const qc_matmul_side *side = NULL;
    qc_status st = QC_OK;
    QC_TRY(qc_cublas_begin(h->gemm, workspace + p->gemm_offset, workspace_bytes - p->gemm_offset, s,
                           err));
    QC_TRY_GOTO(st, done, side_for(h, c, s, &side, err));
    QC_TRY_GOTO(st, done,
                make_dense(c, 0, c->n < p->chunk_rows ? c->n : p->chunk_rows, dense[0], s, err));
    for (uint64_t first = 0; first < c->n; first += p->chunk_rows)
        QC_TRY_GOTO(st, done, chunk(h, c, first, dense, side, s, err));
done:
    qc_cublas_end(h->gemm);
    return st;
}

/* ---- to compare with ------------------------------------------------------------------------- */

qc_status qc_matmul_dense(const qc_matmul *h, const void *weights, uint64_t n, uint64_t k,
                          const qc_matmul_io *io, void *workspace, uint64_t workspace_bytes,
                          qc_cuda_stream s, qc_error *err)
{
    if (!h->gemm)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s", h->no_gemm.msg);
    QC_TRY(qc_matmul_here(h, err));
    QC_TRY(qc_matmul_check_io(io, n, k, 1, err));
    if (io->x_dtype != io->y_dtype)
        QC_FAIL(err, QC_ERR_USAGE, "x is %s and y %s; expected one dtype",
                qc_dtype_name(io->x_dtype), qc_dtype_name(io->y_dtype));
    if (io->x_dtype == QC_DTYPE_BF16 && h->device.sm < 80)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "BF16 needs sm_80, but this device is sm_%u",
                h->device.sm);
    if (io->bias || io->gate || io->residual)
        QC_FAIL(err, QC_ERR_USAGE,
                "a dense product takes no bias, gate or residual; add it to y afterwards");
    if ((uintptr_t)workspace % 256)
        QC_FAIL(err, QC_ERR_USAGE, "the workspace is not 256-byte aligned");
    if (io->m == 0 || n == 0)
        return QC_OK;
    const qc_cublas_product_args g = {
        .a = io->x,
        .b = weights,
        .y = io->y,
        .dtype = io->x_dtype,
        .y_dtype = io->y_dtype,
        .trans_b = 1,
        .m = io->m,
        .n = n,
        .k = k,
        .lda = io->ldx ? io->ldx : k,
        .ldb = k,
        .ldy = io->ldy ? io->ldy : n,
        .alpha = 1.0,
    };
    if (k == 0) {
        qc_matmul_call c;
        memset(&c, 0, sizeof c);
        c.m = io->m;
        c.n = n;
        c.out = (qc_matmul_output){.y = io->y, .ldy = g.ldy, .dtype = io->y_dtype};
        return qc_matmul_reduce_launch(&c, s, err);
    }
    if (!weights)
        QC_FAIL(err, QC_ERR_USAGE, "the weights are NULL");
    if (g.m > INT_MAX || n > INT_MAX || k > INT_MAX || g.lda > INT_MAX || g.ldy > INT_MAX)
        QC_FAIL(err, QC_ERR_USAGE,
                "a dense product of %" PRIu64 " x %" PRIu64 " x %" PRIu64
                " is too large for cuBLAS",
                g.m, n, k);
    QC_TRY(qc_cublas_begin(h->gemm, workspace, workspace ? workspace_bytes : 0, s, err));
    qc_status st = qc_cublas_product(h->gemm, &g, err);
    qc_cublas_end(h->gemm);
    return st;
}

qc_status qc_matmul_reference(const qc_matmul *h, const qc_matmul_exact *e, qc_cuda_stream s,
                              qc_error *err)
{
    const qc_matmul_io io = {
        .m = e->m, .x = e->x, .x_dtype = e->x_dtype, .y = e->y, .y_dtype = QC_DTYPE_F16};
    QC_TRY(qc_matmul_here(h, err));
    if (e->w) {
        QC_TRY(qc_matmul_check_weights(e->w, err));
        if (e->w->rows != e->n || e->w->form.cols != e->k)
            QC_FAIL(err, QC_ERR_USAGE,
                    "the weight is %" PRIu64 " x %" PRIu64 ", but a product with %" PRIu64
                    " x %" PRIu64 " was asked for",
                    e->w->rows, e->w->form.cols, e->n, e->k);
    } else if (e->dense_dtype != QC_DTYPE_F32 && e->dense_dtype != QC_DTYPE_F16 &&
               e->dense_dtype != QC_DTYPE_BF16) {
        QC_FAIL(err, QC_ERR_USAGE, "dense weights are %s; expected F32, F16 or BF16",
                qc_dtype_name(e->dense_dtype));
    } else if (!e->dense && e->n && e->k) {
        QC_FAIL(err, QC_ERR_USAGE, "the weights are NULL");
    }
    QC_TRY(qc_matmul_check_io(&io, e->n, e->k, 1, err));
    return e->m == 0 || e->n == 0 ? QC_OK : qc_matmul_reference_launch(e, s, err);
}

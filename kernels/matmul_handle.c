/* The matmul's handle: what is made once for a device, its checks, and the faults that kernels
 * report. */
#include "kernels/matmul_handle.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>

/* ---- making and ending ----------------------------------------------------------------------- */

/* Makes h's device current and stores in *before which one was; back() returns to it, and does
 * nothing if it was h's own. */
static qc_status go_to(const qc_matmul *h, qc_cuda_device *before, qc_error *err)
{
    QC_TRY(qc_cuda_current(&before->index, err));
    return before->index == h->device.index ? QC_OK : qc_cuda_use(&h->device, err);
}

static qc_status go_back(const qc_matmul *h, const qc_cuda_device *before, qc_error *err)
{
    return before->index == h->device.index ? QC_OK : qc_cuda_use(before, err);
}

/* Call it with h's device current. */
static qc_status make_parts(qc_matmul *h, qc_error *err)
{
    QC_TRY(qc_cuda_host_malloc(&h->fault, sizeof *h->fault, err));
    *h->fault = 0;
    /* Without cuBLAS every shape still has a path. */
    if (qc_cublas_open(&h->gemm, h->device.runtime_version, &h->no_gemm) != QC_OK) {
        h->gemm = NULL;
        return QC_OK;
    }
    for (unsigned i = 0; i < 2; i++) {
        QC_TRY(qc_cuda_stream_create(&h->side[i].stream, err));
        QC_TRY(qc_cuda_event_create(&h->side[i].forked, 0, err));
        QC_TRY(qc_cuda_event_create(&h->side[i].ready, 0, err));
    }
    return QC_OK;
}

qc_status qc_matmul_create(qc_matmul **out, int device_index, qc_error *err)
{
    qc_matmul *h = NULL;
    qc_cuda_device before = {0};
    qc_status st;
    if (!out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_create: out is NULL");
    *out = NULL;
    QC_TRY(qc_calloc(&h, 1, sizeof *h, err));
    QC_TRY_GOTO(st, failed, qc_cuda_device_open(&h->device, device_index, err));
    QC_TRY_GOTO(st, failed, go_to(h, &before, err));
    st = make_parts(h, err);
    if (st != QC_OK) {
        (void)go_back(h, &before, NULL);
        goto failed;
    }
    QC_TRY_GOTO(st, failed, go_back(h, &before, err));
    *out = h;
    return QC_OK;
failed:
    qc_matmul_destroy(h);
    return st;
}

void qc_matmul_destroy(qc_matmul *h)
{
    qc_cuda_device before = {0};
    if (!h)
        return;
    /* cuBLAS must end with the device current for which it was made. Without any device there is no
     * cuBLAS. */
    int went = h->fault && go_to(h, &before, NULL) == QC_OK;
    qc_cublas_close(h->gemm);
    for (unsigned i = 0; i < 2; i++) {
        qc_cuda_event_destroy(h->side[i].ready);
        qc_cuda_event_destroy(h->side[i].forked);
        qc_cuda_stream_destroy(h->side[i].stream);
    }
    qc_cuda_host_free(h->fault);
    if (went)
        (void)go_back(h, &before, NULL);
    qc_free(h);
}

const qc_cuda_device *qc_matmul_device(const qc_matmul *h)
{
    return h ? &h->device : NULL;
}

const char *qc_matmul_no_gemm(const qc_matmul *h)
{
    return !h || h->gemm ? NULL : h->no_gemm.msg;
}

/* ---- checks ---------------------------------------------------------------------------------- */

qc_status qc_matmul_check(const qc_matmul *h, qc_error *err)
{
    if (!h)
        QC_FAIL(err, QC_ERR_USAGE, "the matmul's handle is NULL");
    /* The word is read before it is exchanged: nobody writes its line then, and all but one call in
     * a handle's life end there. */
    _Atomic uint32_t *word = (_Atomic uint32_t *)h->fault;
    uint32_t fault = atomic_load_explicit(word, memory_order_relaxed);
    if (fault)
        fault = atomic_exchange_explicit(word, 0, memory_order_acq_rel);
    if (!fault)
        return QC_OK;
    if (fault == QC_MATMUL_FAULT_EXPERTS)
        QC_FAIL(err, QC_ERR_USAGE,
                "an earlier product of experts on cuda:%d found offsets that decrease or go beyond "
                "max_rows, or a row of x that there is not; it did not write these rows of y",
                h->device.index);
    QC_FAIL(
        err, QC_ERR_INTERNAL,
        "an earlier product on cuda:%d could not do its work (fault %u of its kernel); its y was "
        "not written",
        h->device.index, (unsigned)fault);
}

qc_status qc_matmul_here(const qc_matmul *h, qc_error *err)
{
    int current = -1;
    if (!h)
        QC_FAIL(err, QC_ERR_USAGE, "the matmul's handle is NULL");
    QC_TRY(qc_cuda_current(&current, err));
    if (current != h->device.index)
        QC_FAIL(err, QC_ERR_USAGE,
                "the matmul's handle is for cuda:%d, but the calling thread's device is cuda:%d; "
                "choose the handle's with qc_cuda_use",
                h->device.index, current);
    return QC_OK;
}

uint64_t qc_matmul_repacked_row_bytes(const qc_form *form)
{
    return qc_sat_mul(qc_ceil_div_u64(form->cols, 32), qc_form_code_bytes(form, 32));
}

static int is_power_of_two(uint32_t v)
{
    return v && !(v & (v - 1));
}

qc_status qc_matmul_check_weights(const qc_weights *w, qc_error *err)
{
    uint64_t elems = 0;
    if (!w)
        QC_FAIL(err, QC_ERR_USAGE, "a product: the weight is NULL");
    if (!w->form.ops)
        QC_FAIL(err, QC_ERR_USAGE, "the form of the weights is not known");
    const int by_rows = qc_form_by_rows(&w->form);
    if (w->form.ops->step_last && !by_rows)
        QC_FAIL(err, QC_ERR_USAGE, "the weights are %s in blocks of %u; expected scales by rows",
                w->form.ops->name, w->form.block_elems);
    if (qc_mul_u64(w->rows, w->form.cols, &elems) || elems > UINT64_MAX / 4)
        QC_FAIL(err, QC_ERR_USAGE, "a weight of %" PRIu64 " x %" PRIu64 " overflows 64 bits",
                w->rows, w->form.cols);
    if (!by_rows && (!is_power_of_two(w->form.block_elems) || w->form.block_elems < 32 ||
                     w->form.block_elems > 4096))
        QC_FAIL(err, QC_ERR_USAGE, "block size: expected a power of two from 32 to 4096, found %u",
                w->form.block_elems);
    if (elems == 0)
        return QC_OK;
    if (!w->codes)
        QC_FAIL(err, QC_ERR_USAGE, "the weights have no codes");
    if (w->absmax)
        return QC_OK;
    if (by_rows || w->form.ops->integer)
        QC_FAIL(err, QC_ERR_USAGE, "the weights in %s have no scales", w->form.ops->name);
    if (!w->absmax_codes || !w->nested_absmax || !w->nested_map)
        QC_FAIL(err, QC_ERR_USAGE,
                "the weights have neither plain scales nor all arrays of double-quantized ones");
    if (!is_power_of_two(w->nested_block))
        QC_FAIL(err, QC_ERR_USAGE, "nested block size: expected a power of two, found %u",
                w->nested_block);
    return QC_OK;
}

qc_status qc_matmul_check_io(const qc_matmul_io *io, uint64_t n, uint64_t k, int pointers,
                             qc_error *err)
{
    if (io->x_dtype != QC_DTYPE_F16 && io->x_dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "x is %s; expected F16 or BF16", qc_dtype_name(io->x_dtype));
    if (io->y_dtype != QC_DTYPE_F16 && io->y_dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "y is %s; expected F16 or BF16", qc_dtype_name(io->y_dtype));
    if (io->ldx && io->ldx < k)
        QC_FAIL(err, QC_ERR_USAGE,
                "ldx: the rows of x are %" PRIu64 " elements apart, but have %" PRIu64, io->ldx, k);
    if (io->ldy && io->ldy < n)
        QC_FAIL(err, QC_ERR_USAGE,
                "ldy: the rows of y are %" PRIu64 " elements apart, but have %" PRIu64, io->ldy, n);
    if ((io->gate && io->ldg && io->ldg < n) || (io->residual && io->ldr && io->ldr < n))
        QC_FAIL(err, QC_ERR_USAGE, "%s: its rows are %" PRIu64 " elements apart, but have %" PRIu64,
                io->gate && io->ldg && io->ldg < n ? "ldg" : "ldr",
                io->gate && io->ldg && io->ldg < n ? io->ldg : io->ldr, n);
    if ((unsigned)io->act > QC_MATMUL_GELU_TANH || !io->gate != (io->act == QC_MATMUL_NO_GATE))
        QC_FAIL(err, QC_ERR_USAGE,
                "the gate is %s, but act is %d; a gate has one and no gate has none",
                io->gate ? "given" : "NULL", (int)io->act);
    if (io->m == 0 || n == 0)
        return QC_OK;
    uint64_t bytes = 0;
    if (qc_mul_u64(io->m, io->ldx ? io->ldx : k, &bytes) || bytes > UINT64_MAX / 8 ||
        qc_mul_u64(io->m, io->ldy ? io->ldy : n, &bytes) || bytes > UINT64_MAX / 8)
        QC_FAIL(err, QC_ERR_USAGE, "m: the bytes of %" PRIu64 " rows overflow 64 bits", io->m);
    if (!pointers)
        return QC_OK;
    if (!io->y)
        QC_FAIL(err, QC_ERR_USAGE, "y is NULL");
    if (k && !io->x)
        QC_FAIL(err, QC_ERR_USAGE, "x is NULL");
    if (((uintptr_t)io->x | (uintptr_t)io->y | (uintptr_t)io->bias | (uintptr_t)io->gate |
         (uintptr_t)io->residual) %
        2)
        QC_FAIL(err, QC_ERR_USAGE,
                "x, y, bias, gate or residual is at an odd address; each must be 2-byte aligned");
    return QC_OK;
}

/* Weights are packed and unpacked: the calls, which check what the kernels do not. */
#include "base/checked.h"
#include "kernels/matmul_handle.h"
#include "kernels/matmul_packed.h"

#include <inttypes.h>

uint64_t qc_matmul_packed_bytes(const qc_matmul *h, const qc_weights *w)
{
    if (!h || !w || !w->form.ops)
        return UINT64_MAX;
    if (h->device.sm < 80 || !qc_packed_takes(w))
        return 0;
    return qc_sat_add(qc_packed_code_bytes(w), qc_packed_scale_bytes(w));
}

static int is_whole(const qc_matmul_weights *m)
{
    return m->part.rows == m->w.rows && m->part.cols == m->w.form.cols;
}

qc_status qc_matmul_pack(const qc_matmul *h, const qc_matmul_weights *w, void *memory,
                         qc_matmul_weights *out, qc_cuda_stream s, qc_error *err)
{
    QC_TRY(qc_matmul_here(h, err));
    if (!w || !out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_pack: %s is NULL", w ? "out" : "the weight");
    QC_TRY(qc_matmul_check_weights(&w->w, err));
    if (w->packed || !is_whole(w))
        QC_FAIL(err, QC_ERR_USAGE,
                "qc_matmul_pack: the weight is %s; expected a prepared one, whole",
                w->packed ? "packed already" : "a slice");
    if (h->device.sm < 80)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "packed weights are for kernels of sm_80 and newer, but this device is sm_%u",
                h->device.sm);
    if (!qc_packed_takes(&w->w))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "a weight of %" PRIu64 " x %" PRIu64 " in %s, blocks of %u, cannot be packed; "
                "expected NF4 or int8 with columns that %u divides, and blocks of %u or more or a "
                "scale per row",
                w->w.rows, w->w.form.cols, w->w.form.ops->name, w->w.form.block_elems,
                QC_PACKED_COLS, QC_PACKED_COLS);
    if (!memory || (uintptr_t)memory % 256)
        QC_FAIL(err, QC_ERR_USAGE, "the memory for a packed weight is not 256-byte aligned");
    QC_TRY(qc_matmul_pack_launch(&w->w, memory, s, err));
    qc_matmul_weights packed = *w;
    packed.packed = 1;
    packed.row_bytes = 0;
    packed.complete = 0;
    packed.w.codes = memory;
    if (qc_packed_has_scales(&w->w))
        packed.w.absmax_codes = (const uint8_t *)memory + qc_packed_code_bytes(&w->w);
    *out = packed;
    return QC_OK;
}

qc_status qc_matmul_unpack(const qc_matmul *h, const qc_matmul_weights *packed, void *codes,
                           uint8_t *absmax_codes, qc_cuda_stream s, qc_error *err)
{
    QC_TRY(qc_matmul_here(h, err));
    if (!packed || !packed->packed || !is_whole(packed))
        QC_FAIL(err, QC_ERR_USAGE, "qc_matmul_unpack: expected a packed weight, whole");
    if (!codes || (uintptr_t)codes % 16)
        QC_FAIL(err, QC_ERR_USAGE, "the codes of an unpacked weight are not 16-byte aligned");
    const int scales = qc_packed_has_scales(&packed->w);
    if (scales != (absmax_codes != NULL))
        QC_FAIL(err, QC_ERR_USAGE,
                "qc_matmul_unpack: the codes of the scales %s packed, but absmax_codes is %s",
                scales ? "are" : "are not", scales ? "NULL" : "given");
    return qc_matmul_unpack_launch(&packed->w, packed->w.codes, codes, absmax_codes, s, err);
}

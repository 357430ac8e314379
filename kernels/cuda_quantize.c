/* What is quantized by which kernels. */
#include "kernels/cuda_quantize.h"
#include "quant/quant_internal.h"

/* The kernels of the search also make what has no search: integers by absmax. */
static int is_found(const qc_cuda_quantize_job *a)
{
    return a->searched || a->form.ops->integer;
}

qc_cuda_sums qc_cuda_quantize_sums(const qc_cuda_quantize_job *a)
{
    return qc_form_by_rows(&a->form) ? QC_CUDA_SUMS_ROWS
           : is_found(a)             ? QC_CUDA_SUMS_FOUND
                                     : QC_CUDA_SUMS_BLOCKS;
}

qc_status qc_cuda_quantize(const qc_cuda_quantize_job *a, qc_cuda_stream s, qc_error *err)
{
    const int by_rows = qc_form_by_rows(&a->form), found = is_found(a);
    const uint32_t most = found && !a->searched ? 1024 : QC_BLOCK_MAX;
    if (a->dtype != QC_DTYPE_F32 && a->dtype != QC_DTYPE_F16 && a->dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "quantizing: the source is %s; expected F32, F16 or BF16",
                qc_dtype_name(a->dtype));
    if (!by_rows && (!qc_block_size_valid(a->form.block_elems) || a->form.block_elems > most))
        QC_FAIL(err, QC_ERR_USAGE,
                "quantizing: block size: expected a power of two from 32 to %u, found %u", most,
                a->form.block_elems);
    QC_TRY(qc_cuda_fill(a->bad, 0xff, sizeof *a->bad, s, err));
    if (a->n == 0)
        return QC_OK;
    if (by_rows)
        return found ? qc_cuda_search_rows(a, s, err) : qc_cuda_absmax_rows(a, s, err);
    return found ? qc_cuda_search_blocks(a, s, err) : qc_cuda_absmax_blocks(a, s, err);
}

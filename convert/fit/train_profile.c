/* --profile compares the estimate with a real GPU.
 *
 * It measures the CUDA context, by the memory counter before and after it is made (NVML sees the
 * GPU without one). It also takes every buffer of the setting for real: parameters tensor by
 * tensor, the rest in blocks of the size that a caching allocator takes. It does not measure how a
 * framework fragments its memory. */
#include "convert/fit/train_plan.h"
#include "convert/hardware/cuda_driver.h"
#include "convert/hardware/hardware.h"

#include <inttypes.h>

#define PIECE_BYTES ((uint64_t)64 << 20)

static qc_status take_pieces(qc_cuda_driver *d, uint64_t bytes, uint64_t *asked, qc_error *err)
{
    while (bytes > 0) {
        uint64_t n = bytes < PIECE_BYTES ? bytes : PIECE_BYTES;
        QC_TRY(qc_cuda_driver_take(d, n, err));
        *asked += n;
        bytes -= n;
    }
    return QC_OK;
}

/* Takes the parameters as they are laid out: first tensor by tensor, then what is left
 * (adapters). */
static qc_status take_parameters(qc_cuda_driver *d, const qc_plan *plan, uint64_t bytes,
                                 uint64_t *asked, qc_error *err)
{
    for (uint32_t i = 0; i < plan->tensor_count; i++) {
        uint64_t n = qc_plan_tensor_bytes(plan, i);
        if (n == 0 || n > bytes)
            continue;
        QC_TRY(qc_cuda_driver_take(d, n, err));
        *asked += n;
        bytes -= n;
    }
    return take_pieces(d, bytes, asked, err);
}

static qc_status take_all(qc_cuda_driver *d, const qc_plan *plan, const qc_train_setting *s,
                          uint64_t *asked, qc_error *err)
{
    const uint64_t terms[] = {s->bytes.gradients, s->bytes.optimizer, s->bytes.activations,
                              s->bytes.batch_data, s->bytes.workspace};
    QC_TRY(take_parameters(d, plan, s->bytes.parameters, asked, err));
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++)
        QC_TRY(take_pieces(d, terms[i], asked, err));
    return QC_OK;
}

qc_status qc_train_measure(qc_train_profile *out, qc_arena *arena, const qc_plan *plan,
                           const qc_train_setting *s, qc_error *err)
{
    qc_hardware hardware;
    qc_cuda_driver *d = NULL;
    uint64_t with_context = 0, with_all = 0, total = 0;
    *out = (qc_train_profile){0};
    QC_TRY(qc_hardware_read(&hardware, arena, err));
    if (hardware.gpu_count == 0)
        QC_FAIL(err, QC_ERR_DEVICE, "--profile needs a GPU: %s",
                hardware.no_gpu ? hardware.no_gpu : "none is visible");
    uint64_t before = hardware.gpus[0].free_bytes;
    QC_TRY(qc_cuda_driver_open(&d, 0, err));
    qc_status st = qc_arena_printf(arena, &out->gpu, err, "%s", qc_cuda_driver_gpu(d));
    if (st == QC_OK)
        st = qc_cuda_driver_memory(d, &with_context, &total, err);
    if (st == QC_OK)
        st = take_all(d, plan, s, &out->asked_bytes, err);
    if (st == QC_OK)
        st = qc_cuda_driver_memory(d, &with_all, &total, err);
    qc_cuda_driver_close(d);
    if (st == QC_ERR_NOMEM)
        qc_error_prefix(err, "--profile: after %" PRIu64 " bytes", out->asked_bytes);
    QC_TRY(st);
    out->context_bytes = before > with_context ? before - with_context : 0;
    out->allocated_bytes = with_context > with_all ? with_context - with_all : 0;
    return QC_OK;
}

/* Quantizing on a GPU, as the pipeline uses it: a ring of slots, each of which takes elements of a
 * weight and gives back their codes, scales and error sums. gpu_quantize.c implements it. */
#ifndef QC_CONVERT_DEVICE_QUANTIZER_H
#define QC_CONVERT_DEVICE_QUANTIZER_H

#include "base/dtype.h"
#include "kernels/cuda_device.h"
#include "quant/quant_form.h"
#include "quant/search_sums.h"

/* How a weight is quantized. */
typedef struct {
    qc_form form;   /* nested and offset apply to searched blocks only; a slot then holds whole
                       groups of blocks */
    qc_dtype dtype; /* F32, F16 or BF16 */
    /* Are the scales searched as quant/scale_search.h does, and is the search QC_SEARCH_REFIT?
     * Otherwise they are those of absmax. */
    int searched, refit;
} qc_gpu_form;

/* A ring of slots on one device, for one thread. While the host fills one slot, the others are
 * copied and quantized. Slots are used in turn. */
typedef struct qc_gpu_ring qc_gpu_ring;
#define QC_GPU_SLOTS 3u

/* The result of a slot. It lies in pinned memory of the ring until the slot is started again. */
typedef struct {
    const void *codes;   /* as the quantizers of quant_ops.h leave them */
    const float *absmax; /* the scales of blocks or rows */
    const float *errors; /* see kernels/cuda_quantize.h and quant/quant_collect.h */
    /* The lowest index of an element that has no code, or UINT64_MAX. Where there is such an
     * element, the rest of the result is unspecified. */
    uint64_t bad;
    /* For integers in blocks, and for blocks with searched scales: they have no `errors`. The last
     * two are for double quantized scales. */
    const qc_search_sum *found;
    const uint8_t *absmax_codes;
    const float *nested_absmax;
} qc_gpu_result;

typedef struct qc_gpu_quantizer {
    /* slot_bytes: of source. They are halved, down to min_bytes, while there is no room. Returns
     * QC_ERR_NOMEM when even those have none (on the device or, pinned, on the host) and
     * QC_ERR_DEVICE when there is no such device. This allocates all that the ring ever needs: 2 x
     * QC_GPU_SLOTS x slot_bytes on either side; only the first search adds a little more. */
    qc_status (*ring_create)(qc_gpu_ring **out, const qc_cuda_device *device, size_t slot_bytes,
                             size_t min_bytes, qc_error *err);
    void (*ring_destroy)(qc_gpu_ring *r); /* waits for what was started; accepts NULL */
    size_t (*ring_slot_bytes)(const qc_gpu_ring *r);
    /* How many elements of this form fit a slot together with their results: a multiple of `step`
     * (whole blocks, or rows), or 0 if not even one step fits. */
    uint64_t (*ring_elems)(const qc_gpu_ring *r, const qc_gpu_form *form, uint64_t step);
    /* Pinned memory to be filled with elements. The slot must not be at work. */
    void *(*ring_source)(qc_gpu_ring *r, unsigned slot);
    /* Starts to copy, quantize and copy back, and returns at once. n is at least 1 and at most
     * ring_elems. After any error the ring must be destroyed. QC_ERR_NOMEM means that the device
     * had no room to run it. */
    qc_status (*ring_start)(qc_gpu_ring *r, unsigned slot, const qc_gpu_form *form, uint64_t n,
                            qc_error *err);
    /* Waits for a started slot. Errors are those of ring_start. */
    qc_status (*ring_finish)(qc_gpu_ring *r, unsigned slot, qc_gpu_result *out, qc_error *err);
} qc_gpu_quantizer;

#endif

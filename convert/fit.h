/* Does it fit, how, and how much is left: the sizes of a plan put on the devices of a budget.
 *
 *   budget     = floor(total * margin)
 *   needed     = weights + KV cache + workspace + CUDA context (GPUs only)
 *   free       = budget - needed, short_by = needed - budget where that is positive
 *
 * Every formula is in docs/planning.md. GPUs are filled first: a cpu tier takes over only what they
 * cannot hold, in this order: embedding table, vision tower, head (tied: with the embeddings), then
 * whole layers from the last; disk takes what the cpu cannot.
 * All memory in the arena given. Thread-safe. */
#ifndef QC_CONVERT_FIT_H
#define QC_CONVERT_FIT_H

#include "convert/budget.h"
#include "convert/geometry.h"
#include "convert/plan.h"
#include "convert/segments.h"

typedef struct {
    const qc_device *device;
    uint64_t budget_bytes;
    uint64_t weight_bytes, kv_bytes, workspace_bytes, context_bytes;
    uint64_t free_bytes, short_by_bytes; /* one of them is 0 */
    uint32_t layers;                     /* decoder or encoder layers on it */
    uint32_t first_layer;                /* if layers > 0 */
    uint32_t segments;
} qc_fit_device;

typedef struct {
    const qc_budget *budget;
    const qc_segments *segments;
    const qc_geometry *geometry;
    qc_fit_device *devices;               /* one per device of the budget */
    uint32_t *device_of;                  /* per segment */
    uint64_t *segment_bytes, *segment_kv; /* per segment: weights, cache */
    uint64_t weight_bytes;                /* all tensors of the output, headers excluded */
    uint64_t kv_bytes_per_token;          /* one more token of one sequence, no window full */
    uint64_t kv_bytes;                    /* for context and batch */
    int fits;
    uint64_t short_by_bytes; /* the largest of the devices */
    uint32_t short_device;
    /* A token's weights that must come over the host link (cpu and disk tiers). */
    uint64_t transfer_bytes_per_token;
    double transfer_seconds; /* at the link rates of docs/planning.md; 0 if nothing is spilled */
} qc_fit;

/* Bytes of scratch a device needs while it computes `segments` of a model: the largest of its
 * segments, for a prompt of `context` tokens taken in steps of at most `step` tokens. */
#define QC_PREFILL_STEP 2048u /* tokens taken at once, when the prompt is longer */
uint64_t qc_workspace_bytes(const qc_geometry *g, const qc_fit_options *o, int has_layers,
                            int has_head, int has_vision, int dequantizes,
                            uint64_t largest_weight_elems);

/* segment_bytes: weights of each segment of the output; largest_weight: elements of its largest
 * quantized weight, which the slowest way to compute dequantizes whole (0: none). Only context,
 * batch and the like are taken from `o`. A model that does not fit is no error: see fits. */
QC_NODISCARD qc_status qc_fit_make(qc_fit *out, qc_arena *arena, const qc_segments *segments,
                                   const qc_geometry *geometry, const uint64_t *segment_bytes,
                                   const uint64_t *largest_weight, const qc_budget *budget,
                                   const qc_fit_options *o, qc_error *err);
/* Sums over the tensors of a plan (before or after its layout). Arrays of segments->count. */
QC_NODISCARD qc_status qc_fit_sum_segments(qc_arena *arena, const qc_plan *plan,
                                           const qc_segments *segments, uint64_t **segment_bytes,
                                           uint64_t **largest_weight, qc_error *err);

/* By bisection, everything else equal: the longest context at batch 1, and the largest batch at the
 * given context, that fit; 0 if none does. The context is capped at the model's. */
QC_NODISCARD qc_status qc_fit_max_context(uint64_t *out, const qc_fit *fit, const qc_fit_options *o,
                                          const uint64_t *largest_weight, qc_error *err);
QC_NODISCARD qc_status qc_fit_max_batch(uint64_t *out, const qc_fit *fit, const qc_fit_options *o,
                                        const uint64_t *largest_weight, qc_error *err);

#endif

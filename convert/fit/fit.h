/* Puts the sizes of a plan on the devices of a budget, and says whether it fits, where everything
 * goes and how much is left.
 *
 *   budget     = floor(total * margin)
 *   needed     = weights + KV cache + workspace + CUDA context (GPUs only)
 *   free       = budget - needed, short_by = needed - budget where that is positive
 *
 * docs/theory/sizes.md has the formulas. GPUs are filled first. A cpu tier takes over only what
 * they cannot hold, in this order: layers of multi-token prediction, the embedding table, the
 * vision tower, then whole layers from the last. The head (with the embeddings, if they are tied)
 * goes after the layers; in a dense model it goes before them unless it is larger than a layer.
 * Disk takes what the cpu cannot hold. Without GPUs the cpu computes, and disk is its tier.
 *
 * All memory comes from the given arena. Thread-safe. */
#ifndef QC_CONVERT_FIT_H
#define QC_CONVERT_FIT_H

#include "convert/fit/budget.h"
#include "convert/model/geometry.h"
#include "convert/model/segments.h"
#include "convert/plan/plan.h"

typedef struct {
    const qc_device *device;
    uint64_t budget_bytes; /* UINT64_MAX: no limit, and so is free_bytes */
    uint64_t weight_bytes, kv_bytes, workspace_bytes, context_bytes;
    uint64_t staging_bytes; /* part of workspace_bytes that spilled layers pass through */
    uint64_t free_bytes, short_by_bytes; /* one of them is 0 */
    uint32_t layers;                     /* decoder or encoder layers on it */
    uint32_t first_layer;                /* if layers > 0 */
    uint32_t segments;                   /* 0: nothing lies there, and nothing is needed */
} qc_fit_device;

typedef struct qc_fit {
    const qc_budget *budget;
    const qc_segments *segments;
    const qc_geometry *geometry;
    qc_fit_device *devices;               /* one per device of the budget */
    uint32_t *device_of;                  /* per segment */
    uint64_t *segment_bytes, *segment_kv; /* per segment: weights, cache */
    uint64_t *segment_workspace;          /* per segment: its workspace */
    uint64_t weight_bytes;                /* all tensors of the output, without headers */
    /* The cards of --tp; 0: layers are placed whole. With --tp every card holds a share of every
     * segment, and segment_bytes, segment_kv, kv_bytes and geometry are those of one card. */
    uint32_t ranks;
    uint64_t kv_bytes_per_token; /* for one more token of one sequence, while no window is full */
    uint64_t kv_bytes;           /* for context and batch */
    uint64_t context, batch;     /* as used */
    int fits;
    uint64_t short_by_bytes; /* the largest of the devices */
    uint32_t short_device;
    uint32_t
        spilled; /* segments that lie where nothing computes (the cpu tier beside GPUs, disk) */
    /* What a decoding step (one token of every sequence) must bring from those tiers: the weights,
     * and the cache beside them. All experts count until qc_fit_count_experts is called. */
    uint64_t transfer_bytes_per_token;
    double transfer_seconds; /* at least, at the link rates of docs/theory/sizes.md; 0: nothing */
} qc_fit;

#define QC_LINK_RATE 31.5e9 /* to a GPU that is not in the card table: PCIe 4.0 x16, bytes/s */
#define QC_DISK_RATE 3e9    /* bytes/s, a plain NVMe disk: docs/theory/sizes.md */

/* Returns how many tokens of one sequence o asks for on this model: its context, or, where that is
 * 0, 8192 or the model's limit if that is less. */
uint64_t qc_fit_context(const qc_geometry *g, const qc_fit_options *o);
/* Return the form in which latent attention is cached and computed: "latent", "absorbed" or
 * "expanded"; and the runtime that does so, with the version that was looked at. */
const char *qc_fit_mla_name(const qc_fit_options *o);
const char *qc_fit_mla_runtime(const qc_fit_options *o);
/* floor(total * margin); UINT64_MAX (no limit) stays. */
uint64_t qc_fit_budget_bytes(uint64_t total_bytes, double margin);
/* Returns the bytes of workspace that a segment of `kind` needs while it computes as many tokens of
 * the prompt at once as o->prefill says. largest_weight has the elements of the segment's largest
 * quantized weight, which bitsandbytes dequantizes whole for many tokens; our own kernels
 * dequantize no more of it (kernels/matmul_chunks.h). layer is an index of g->layers, for
 * QC_SEGMENT_LAYER. has_cross is qc_fit_has_cross. The result saturates at UINT64_MAX. */
uint64_t qc_workspace_bytes(const qc_geometry *g, const qc_fit_options *o, qc_segment_kind kind,
                            uint32_t layer, uint64_t largest_weight, int has_cross);
/* Does any layer look at an image's positions? This is asked once, as there may be many layers. */
int qc_fit_has_cross(const qc_geometry *g);

/* What is to be placed. The arrays have segments->count elements. */
typedef struct {
    const qc_segments *segments;
    const qc_geometry *geometry;
    const uint64_t *segment_bytes;  /* the weights of each in the output */
    const uint64_t *largest_weight; /* elements of its largest quantized weight; 0: none */
} qc_fit_load;
/* Makes the fit, which keeps pointers to load's segments and geometry and to o->vram. A model that
 * does not fit is no error: see fits. */
QC_NODISCARD qc_status qc_fit_make(qc_fit *out, qc_arena *arena, const qc_fit_load *load,
                                   const qc_fit_options *o, qc_error *err);
/* Sums these up over the tensors of a plan (before or after its layout). The arrays have
 * segments->count elements. */
QC_NODISCARD qc_status qc_fit_sum_segments(qc_arena *arena, const qc_plan *plan,
                                           const qc_segments *segments, uint64_t **segment_bytes,
                                           uint64_t **largest_weight, qc_error *err);
/* Works out the transfer again with only those experts of a spilled layer that a token passes. It
 * changes nothing but the transfer, and nothing at all for a dense model. */
QC_NODISCARD qc_status qc_fit_count_experts(qc_fit *fit, const qc_plan *plan, qc_error *err);

/* Find, by bisection and with everything else equal, the longest context at batch 1 and the largest
 * batch at the given context that fit. The result is 0 if none does, and QC_NO_LIMIT if nothing in
 * the model grows with it. The context is at most the model's. */
#define QC_NO_LIMIT UINT64_MAX
QC_NODISCARD qc_status qc_fit_max_context(uint64_t *out, const qc_fit *fit, const qc_fit_options *o,
                                          const uint64_t *largest_weight, qc_error *err);
QC_NODISCARD qc_status qc_fit_max_batch(uint64_t *out, const qc_fit *fit, const qc_fit_options *o,
                                        const uint64_t *largest_weight, qc_error *err);

#endif

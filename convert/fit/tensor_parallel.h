/* How vLLM splits a model over the cards of --tp, and what each card then holds.
 *
 *   columns      the outputs of q, k, v, gate and up projections, of every expert too
 *   rows         the inputs of o and down projections; their biases are whole on every card
 *   vocabulary   rows of the embeddings and of the head, padded to a multiple of 64
 *   KV heads     k and v; where there are fewer heads than cards, a card has a copy of one
 *   whole        norms, routers, and what makes the latents of DeepSeek's attention
 *
 * Scales are split as their weight is; a row's one scale beside a weight that is split by rows is
 * whole on every card. vLLM keeps floating-point tensors in 16 bit, whatever the file has. All
 * cards hold the same number of bytes.
 *
 * NF4 and int8 are split by qconv's plug-in of vLLM: convert/fit/plugin_share.h.
 *
 * docs/planning.md says which model types are known, and tests/interop/test_interop_vllm.py
 * compares the bytes with those of vLLM's workers. Pure functions of shapes; thread-safe. */
#ifndef QC_CONVERT_TENSOR_PARALLEL_H
#define QC_CONVERT_TENSOR_PARALLEL_H

#include "convert/fit/budget.h"
#include "convert/fit/fit.h"
#include "convert/fit/plugin_share.h"
#include "convert/model/geometry.h"
#include "convert/model/segments.h"
#include "convert/plan/plan.h"

/* A tensor of an output, as the split sees it. */
typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    const uint64_t *dims;
    int packed; /* the weight that it belongs to lies packed in 32-bit words (".weight_packed") */
} qc_split_tensor;

/* With --tp or --parallel tensor, fills in what was not given as vLLM does it: prompts are read in
 * steps, and DeepSeek's latent is attended to as it is. Call it once all options are read. */
void qc_tp_defaults(qc_fit_options *o);
/* Returns the number of cards that a model is split over; 0: layers are placed whole. */
uint32_t qc_tp_ranks(const qc_fit_options *o);
/* Finds the bytes that the tensor takes on each card. QC_ERR_UNSUPPORTED says why vLLM does not
 * split it so. */
QC_NODISCARD qc_status qc_split_bytes(uint64_t *out, const qc_split_tensor *t,
                                      const qc_tp_split *tp, qc_error *err);
/* Refuses what cannot be split: QC_ERR_USAGE for a budget that is not so many GPUs, and
 * QC_ERR_UNSUPPORTED for a model type whose split is not known or heads that do not divide. */
QC_NODISCARD qc_status qc_tp_check(const qc_fit_options *o, const qc_checkpoint *model,
                                   const qc_geometry *g, qc_error *err);
/* Makes the geometry of one card's share: its heads, cache and inner width. */
QC_NODISCARD qc_status qc_tp_geometry(qc_geometry *out, qc_arena *arena, const qc_geometry *g,
                                      uint32_t ranks, qc_error *err);
/* Finds the bytes on each card of what every tensor of the checkpoint becomes [tensor_count]; 0
 * where nothing is written or vLLM does not load it. QC_ERR_UNSUPPORTED names the first tensor that
 * vLLM does not split; with `partly` such a tensor has QC_TP_UNSPLIT bytes instead. */
#define QC_TP_UNSPLIT UINT64_MAX
QC_NODISCARD qc_status qc_tp_sum_tensors(uint64_t **tensor_bytes, qc_arena *arena,
                                         const qc_plan *plan, const qc_segments *segments,
                                         const qc_tp_split *split, int partly, qc_error *err);
/* Sums them up per segment, like qc_fit_sum_segments. */
QC_NODISCARD qc_status qc_tp_sum_segments(uint64_t **segment_bytes, qc_arena *arena,
                                          const qc_plan *plan, const qc_segments *segments,
                                          const qc_tp_split *split, qc_error *err);
/* Appends the options of `vllm serve` with which a model is served as it was planned for:
 * "--tensor-parallel-size 2 --max-model-len 8192 ...". o->context is filled in. */
void qc_tp_serve_options(qc_strbuf *text, const qc_fit_options *o, uint32_t ranks);

#endif

/* Cuts a model into segments, which are placed whole, in the order in which a token passes them.
 *
 *   embeddings | vision tower and projector | layer 0 ... layer n-1 | final norm | head
 *
 * A layer is never cut (its experts, both norms and all scales go with it). A segment that shares
 * tensors with an earlier one (a tied head) follows it to its device. Poolers and classifiers go
 * with the head. A tensor whose place is not known belongs to the segment whose module its name
 * has, or else to the first. docs/theory/config.md lists the words that tell where a name
 * belongs. */
#ifndef QC_CONVERT_SEGMENTS_H
#define QC_CONVERT_SEGMENTS_H

#include "convert/model/geometry.h"
#include "convert/model/recipe.h"

typedef enum {
    QC_SEGMENT_EMBEDDING,
    QC_SEGMENT_VISION,
    QC_SEGMENT_LAYER,
    QC_SEGMENT_EXTRA, /* multi-token prediction, and an encoder's layers beside a decoder's */
    QC_SEGMENT_NORM,
    QC_SEGMENT_HEAD
} qc_segment_kind;

#define QC_NO_SEGMENT UINT32_MAX

typedef struct {
    qc_segment_kind kind;
    /* LAYER: the layer's number, also an index into qc_geometry.layers if it is below layer_count.
     * EXTRA: its number (never below layer_count) or UINT32_MAX. Any other: UINT32_MAX. */
    uint32_t layer;
    const char *name;     /* "embeddings", "vision", "layer 12", "norm", "head" */
    const char **modules; /* prefixes of names that lie wholly in it: "model.layers.12" */
    uint32_t module_count;
    uint32_t follows; /* an earlier segment whose device it must share, or QC_NO_SEGMENT */
} qc_segment;

typedef struct {
    qc_segment *segments;
    uint32_t count;
    uint32_t *of_tensor; /* per tensor of the checkpoint */
    uint32_t tensor_count;
} qc_segments;

/* Every tensor gets a segment. The prefixes of all segments together cover every tensor that the
 * recipe writes, including scales beside a weight, exactly once, so that a device map made of them
 * has no hole. Modules that have no tensor but exist once the model is loaded (a tied head, rotary
 * tables) are named too; a segment that consists only of them has no bytes. QC_ERR_UNSUPPORTED for
 * a tensor whose name is also that of a module with other segments below it. All memory is in the
 * arena, and nothing is borrowed. Thread-safe. The time is linear in the names. */
QC_NODISCARD qc_status qc_segments_make(qc_segments *out, qc_arena *arena,
                                        const qc_checkpoint *model, const qc_recipe *recipe,
                                        const qc_geometry *geometry, qc_error *err);

#endif

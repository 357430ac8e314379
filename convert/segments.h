/* What is placed whole: a model cut into segments, in the order in which a token passes them.
 *
 *   embeddings | vision tower and projector | layer 0 ... layer n-1 | final norm | head
 *
 * A layer is never cut (its experts, both norms and all scales go with it). A segment that shares
 * tensors with an earlier one (a tied head) follows it to its device. Tensors of no known place
 * (position tables, pooler, lone parameters) belong to the segment whose module they name, else to
 * the first. */
#ifndef QC_CONVERT_SEGMENTS_H
#define QC_CONVERT_SEGMENTS_H

#include "convert/geometry.h"
#include "convert/recipe.h"

typedef enum {
    QC_SEGMENT_EMBEDDING,
    QC_SEGMENT_VISION,
    QC_SEGMENT_LAYER,
    QC_SEGMENT_EXTRA, /* multi-token prediction layers */
    QC_SEGMENT_NORM,
    QC_SEGMENT_HEAD
} qc_segment_kind;

#define QC_NO_SEGMENT UINT32_MAX

typedef struct {
    qc_segment_kind kind;
    uint32_t layer;       /* LAYER, EXTRA: its number, also an index into qc_geometry.layers where
                             below layer_count; else UINT32_MAX */
    const char *name;     /* "embeddings", "vision", "layer 12", "norm", "head" */
    const char **modules; /* prefixes of names that lie wholly in it: "model.layers.12" */
    uint32_t module_count;
    uint32_t follows; /* an earlier segment it must lie with, or QC_NO_SEGMENT */
} qc_segment;

typedef struct {
    qc_segment *segments;
    uint32_t count;
    uint32_t *of_tensor; /* per tensor of the checkpoint */
    uint32_t tensor_count;
} qc_segments;

/* Every tensor that the recipe writes gets a segment, and the prefixes of all segments together
 * cover every tensor exactly once (a device map made of them has no hole). */
QC_NODISCARD qc_status qc_segments_make(qc_segments *out, qc_arena *arena,
                                        const qc_checkpoint *model, const qc_recipe *recipe,
                                        const qc_geometry *geometry, qc_error *err);

#endif

/* What is placed whole: a model cut into segments, in the order in which a token passes them.
 *
 *   embeddings | vision tower and projector | layer 0 ... layer n-1 | final norm | head
 *
 * A layer is never cut (its experts, both norms and all scales go with it). A segment that shares
 * tensors with an earlier one (a tied head) follows it to its device. Poolers and classifiers go
 * with the head. Tensors of no known place belong to the segment whose module they name, else to
 * the first. docs/theory/config.md has the words that names are known by. */
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
    uint32_t layer;       /* LAYER: its number, also an index into qc_geometry.layers where below
                             layer_count; EXTRA: its number (never below layer_count) or UINT32_MAX;
                             else UINT32_MAX */
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

/* Every tensor gets a segment, and the prefixes of all segments together cover every tensor that
 * the recipe writes, scales beside a weight among them, exactly once (a device map made of them has
 * no hole). Modules that have no tensor but exist once the model is loaded (a tied head, rotary
 * tables) are named too; a segment of nothing else has no bytes. QC_ERR_UNSUPPORTED for a tensor
 * whose name is also that of a module with other segments below it. Memory in the arena, nothing
 * is borrowed. Thread-safe. Linear in the names. */
QC_NODISCARD qc_status qc_segments_make(qc_segments *out, qc_arena *arena,
                                        const qc_checkpoint *model, const qc_recipe *recipe,
                                        const qc_geometry *geometry, qc_error *err);

#endif

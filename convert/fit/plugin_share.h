/* What a card holds of a weight that qconv's plug-in of vLLM serves: NF4 and int8, which vLLM by
 * itself does not split. The plug-in cuts weights as qc_weights_read_of says, and so does this.
 * Experts are codes, too; where a share of their intermediate columns cannot be cut, all of a layer
 * are restored to 16 bits. Whether they are is told from each weight's own form and shape.
 * docs/serving.md says the same for people. Pure functions of shapes; thread-safe. */
#ifndef QC_CONVERT_PLUGIN_SHARE_H
#define QC_CONVERT_PLUGIN_SHARE_H

#include "convert/families/family.h"
#include "convert/model/geometry.h"
#include "convert/plan/plan.h"

/* What is split over how many cards. */
typedef struct {
    const qc_family *family;     /* NULL: no name is known */
    const qc_geometry *geometry; /* the whole model's */
    uint32_t ranks;
} qc_tp_split;

/* Is the weight of a job in a form that vLLM needs the plug-in for? */
int qc_plugin_serves(const qc_job *j);
/* Does any job of the plan need it? */
int qc_plugin_needed(const qc_plan *plan);
/* Finds the bytes of codes and scales on the card that has most. QC_ERR_UNSUPPORTED names the
 * weight and says why it cannot be cut. */
QC_NODISCARD qc_status qc_plugin_bytes(uint64_t *out, const qc_plan *plan, const qc_job *j,
                                       const qc_tp_split *split, qc_error *err);
/* Returns the bytes of the tables for codes and scales that no weight before has: there is one of
 * each on a card. *counted is 0 at first. */
uint64_t qc_plugin_tables(const qc_job *j, unsigned *counted);
/* Returns how many elements of a weight of this name and size are dequantized at once for many
 * tokens: all of them without ranks; of a card's share none for experts and for vLLM's own kernels,
 * which have compressed-tensors' format. The second is for a job that the plug-in serves. */
uint64_t qc_plugin_elems(const char *name, uint64_t elems, const qc_tp_split *split,
                         qc_format format);
uint64_t qc_plugin_job_elems(const qc_plan *plan, const qc_job *j, const qc_tp_split *split);

#endif

/* Holds a checkpoint against its own claims: are the tensors there that its config.json asks for,
 * and do the two agree on whether the head is tied?
 *
 * For a type that a family has with its shapes (convert/families/family_table.c), every tensor is
 * known. For the others, the numbers of the layers are looked at. A checkpoint of which a shard, a
 * layer or a head is missing converts without any other sign, and what comes of it is loaded with
 * random weights in their place. */
#ifndef QC_CONVERT_CLAIMS_H
#define QC_CONVERT_CLAIMS_H

#include "formats/checkpoint.h"

/* Sets model->lacks, if tensors are missing or have other shapes, to the sentence that says how
 * many and names some. Unless `incomplete`, this is QC_ERR_INPUT then, and the message says as well
 * what usually happened. Tensors that nothing asks for, and a head that differs from the embeddings
 * it is tied to, are a warning, which is added to those of the model. Without a config.json, or
 * with one that is not understood, nothing is asked for. */
QC_NODISCARD qc_status qc_claims_check(qc_checkpoint *model, int incomplete, qc_error *err);

#endif

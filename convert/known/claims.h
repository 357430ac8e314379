/* Holds a checkpoint against its own claims: are the tensors there that its config.json asks for?
 *
 * For a type that a family has with its shapes (convert/families/family_table.c), every tensor is
 * known. For the others, the numbers of the layers are looked at. A checkpoint of which a shard, a
 * layer or a head is missing converts without any other sign, and what comes of it is loaded with
 * random weights in their place. */
#ifndef QC_CONVERT_CLAIMS_H
#define QC_CONVERT_CLAIMS_H

#include "formats/checkpoint.h"

/* QC_ERR_INPUT if tensors are missing or have other shapes. The message says how many, names some,
 * and says what usually happened. Tensors that nothing asks for are a warning, which is added to
 * those of the model. Without a config.json, or with one that is not understood, nothing is asked
 * for. */
QC_NODISCARD qc_status qc_claims_check(qc_checkpoint *model, qc_error *err);

#endif

/* Finds the tensors beside a weight. */
#ifndef QC_CONVERT_SIBLING_H
#define QC_CONVERT_SIBLING_H

#include "formats/checkpoint.h"

/* The index of the tensor whose name is stem (stem_len bytes) + tail; UINT32_MAX if there is
 * none. */
uint32_t qc_sibling_of(const qc_checkpoint *model, const char *stem, size_t stem_len,
                       const char *tail);

#endif

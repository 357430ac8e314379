/* Finds the tensors beside a weight. */
#ifndef QC_CONVERT_SIBLING_H
#define QC_CONVERT_SIBLING_H

#include "formats/checkpoint.h"

#include <string.h>

#define QC_NAME_BYTES 4096u

/* Returns the index of the tensor whose name is stem (stem_len bytes) + tail; UINT32_MAX if there
 * is none. */
static inline uint32_t qc_sibling_of(const qc_checkpoint *model, const char *stem, size_t stem_len,
                                     const char *tail)
{
    char name[QC_NAME_BYTES];
    size_t tail_len = strlen(tail);
    if (stem_len + tail_len >= sizeof name)
        return UINT32_MAX;
    memcpy(name, stem, stem_len);
    memcpy(name + stem_len, tail, tail_len + 1);
    const qc_checkpoint_tensor *t = qc_checkpoint_find(model, name);
    return t ? (uint32_t)(t - model->tensors) : UINT32_MAX;
}

#endif

#include "convert/model/sibling.h"

#include <string.h>

#define NAME_BYTES 4096u

uint32_t qc_sibling_of(const qc_checkpoint *model, const char *stem, size_t stem_len,
                       const char *tail)
{
    char name[NAME_BYTES];
    size_t tail_len = strlen(tail);
    if (stem_len + tail_len >= sizeof name)
        return UINT32_MAX;
    memcpy(name, stem, stem_len);
    memcpy(name + stem_len, tail, tail_len + 1);
    const qc_checkpoint_tensor *t = qc_checkpoint_find(model, name);
    return t ? (uint32_t)(t - model->tensors) : UINT32_MAX;
}

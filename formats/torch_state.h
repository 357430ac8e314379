/* The state dict within a pickle: names and tensors, nothing else.
 * Source: torch.nn.Module.state_dict, and what trainers wrap around it. */
#ifndef QC_FORMATS_TORCH_STATE_H
#define QC_FORMATS_TORCH_STATE_H

#include "base/arena.h"
#include "formats/torch_pickle.h"

typedef struct {
    const char *name; /* UTF-8, NUL-terminated, no NUL inside */
    uint32_t tensor;  /* index into the pickle's tensors */
} qc_state_entry;

typedef struct {
    qc_state_entry *entries; /* sorted bytewise by name, each once */
    size_t count;
    size_t skipped;            /* entries that are not tensors */
    const char *first_skipped; /* the name of the first of them; NULL where it has none */
} qc_torch_state;

/* Finds the state dict. The root must be a dict of tensors, or hold one under 'state_dict',
 * 'model', 'module' or 'model_state_dict'. Every tensor of the pickle must be in it; otherwise this
 * is a training checkpoint with an optimizer, which is QC_ERR_UNSUPPORTED. Memory is the
 * arena's. */
QC_NODISCARD qc_status qc_torch_state_read(qc_torch_state *out, qc_arena *arena, const qc_pickle *p,
                                           qc_error *err);

#endif

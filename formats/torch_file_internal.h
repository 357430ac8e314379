/* What torch_file.c, torch_legacy.c and torch_storage.c share. Nobody else includes this. */
#ifndef QC_FORMATS_TORCH_FILE_INTERNAL_H
#define QC_FORMATS_TORCH_FILE_INTERNAL_H

#include "formats/torch_file.h"
#include "formats/torch_pickle.h"

/* Says where a storage's bytes are. */
typedef struct {
    uint64_t begin;
    uint64_t bytes;
} qc_torch_place;

/* Fills f->tensors from the state dict of p. places: one for each of p's storages. */
QC_NODISCARD qc_status qc_torch_file_fill(qc_torch_file *f, const qc_pickle *p,
                                          const qc_torch_place *places, qc_error *err);
/* Reads a file of the stream form, which is open. */
QC_NODISCARD qc_status qc_torch_legacy_read(qc_torch_file *f, qc_error *err);
/* Gives the bytes of a storage as its pickle describes it; QC_ERR_INPUT on overflow. */
QC_NODISCARD qc_status qc_torch_storage_bytes(const qc_pickle_storage *s, uint64_t *bytes,
                                              qc_error *err);

#endif

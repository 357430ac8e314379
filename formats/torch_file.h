/* One opened file of torch.save: the tensors of a state dict and where their bytes lie.
 * Source: torch/serialization.py (_save, _legacy_save); checked with files of torch 2.15.
 *
 *   zip     (torch 1.6 and later)  P/data.pkl, P/byteorder, P/data/KEY per storage, stored as is
 *   stream  (before, "legacy")     magic | protocol | system | state dict | keys, five pickles;
 *                                  then per key: u64 LE elements | their bytes
 *
 * The first bytes of a file tell which of the two it is. Tensors are views of storages; only those
 * that are contiguous in row-major order can be read in place, others are refused by name. Two
 * tensors may share bytes. No code of a file is ever run (formats/torch_pickle.h).
 * Thread-safe: many threads may read one file. */
#ifndef QC_FORMATS_TORCH_FILE_H
#define QC_FORMATS_TORCH_FILE_H

#include "base/dtype.h"
#include "formats/file_stamp.h"

typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
    uint64_t begin; /* in the file; the bytes are little-endian and row-major */
    uint64_t bytes;
} qc_torch_tensor;

typedef struct {
    qc_arena arena; /* owns names and tensors */
    qc_file file;
    uint64_t file_bytes;
    qc_file_stamp stamp; /* taken at the opening, before anything was read */
    int legacy;
    qc_torch_tensor *tensors; /* sorted bytewise by name, each once */
    size_t tensor_count;
    uint64_t tensor_bytes; /* of all tensors; bytes that two tensors share count twice */
    uint64_t head_offset;  /* where the pickles lie, which say names, shapes and places */
    uint64_t head_bytes;
    size_t skipped;            /* entries of the dict that are not tensors */
    const char *first_skipped; /* the name of the first of them; NULL where it has none */
} qc_torch_file;

/* Returns whether a file with these first bytes (8 at least) can be torch's. */
int qc_torch_file_is(const unsigned char *head, size_t len);
/* Reads the pickle and checks every tensor against the file's size. On error *out is empty. */
QC_NODISCARD qc_status qc_torch_file_open(qc_torch_file *out, const char *path, qc_error *err);
void qc_torch_file_close(qc_torch_file *f);
/* Reads the head_bytes bytes at head_offset. */
QC_NODISCARD qc_status qc_torch_file_read_head(const qc_torch_file *f, void *dst, qc_error *err);

#endif

/* The safetensors header: it is parsed with every rule checked and built as the reference writer
 * does.
 * Source: huggingface/safetensors README.md "Format" and safetensors/src/tensor.rs.
 *
 *   u64 LE N | N bytes JSON | data up to the end of the file
 *
 * The bytes may come from anywhere: parsing never reads outside them and accepts nothing that
 * breaks a rule (docs/format.md lists rule, case and message). */
#ifndef QC_FORMATS_SAFETENSORS_HEADER_H
#define QC_FORMATS_SAFETENSORS_HEADER_H

#include "base/arena.h"
#include "base/dtype.h"
#include "base/status.h"
#include "base/strbuf.h"

#define QC_ST_MAX_HEADER_BYTES 100000000u /* N at most, reading and writing */
#define QC_ST_ANY_BYTES        UINT64_MAX /* as many bytes of data as the header says */
#define QC_ST_NAME_MOST        4000u      /* bytes of a tensor's name, reading and writing */

typedef struct {
    const char *name; /* UTF-8, NUL-terminated, no NUL inside */
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
    uint64_t begin, end; /* byte range in the data buffer */
} qc_st_tensor;

typedef struct {
    const char *key;
    const char *value;
} qc_st_meta;

typedef struct {
    qc_arena arena;        /* owns all below */
    qc_st_tensor *tensors; /* sorted by (begin, end), then name */
    size_t tensor_count;
    qc_st_meta *meta; /* __metadata__, in file order */
    size_t meta_count;
    size_t
        unknown_fields;  /* members besides dtype, shape, data_offsets; accepted, worth a warning */
    uint64_t data_bytes; /* end of the last tensor */
} qc_st_header;

/* Reads N from the first 8 bytes and checks it against the limit and the file's size. QC_ERR_INPUT
 * when N is too large, QC_ERR_TRUNCATED when 8 + N > file_bytes or file_bytes < 8. The message says
 * so if the file is a git-lfs pointer, an HTML page, a zip or a pickle, which its first bytes tell
 * (head; head_len >= 8 where the file has them). */
QC_NODISCARD qc_status qc_st_header_length(const unsigned char *head, size_t head_len,
                                           uint64_t file_bytes, uint64_t *n, qc_error *err);
/* Parses the N bytes of JSON. data_bytes: how many bytes follow the header, or QC_ST_ANY_BYTES for
 * as many as it says. The tensors must cover them without hole, overlap or rest. Where data is
 * short, QC_ERR_TRUNCATED gives the number of missing bytes and the first tensor that is not there.
 * On error *out is empty. */
QC_NODISCARD qc_status qc_st_header_parse(qc_st_header *out, const char *json, size_t len,
                                          uint64_t data_bytes, qc_error *err);
void qc_st_header_deinit(qc_st_header *h);
/* Frees tensors and metadata; data_bytes and unknown_fields stay. */
void qc_st_header_forget(qc_st_header *h);
/* Compares tensors by their order in a file of the reference writer: dtype descending, then
 * name. */
int qc_st_tensor_order(const qc_st_tensor *a, const qc_st_tensor *b);
/* QC_ERR_INPUT for a name that is too long. */
QC_NODISCARD qc_status qc_st_check_name(const char *name, qc_error *err);
/* These count the bytes of a header instead of writing them: of one tensor, and of a header whose
 * tensors sum up to entry_bytes. qc_st_header_bytes fails as qc_st_header_end does. */
uint64_t qc_st_header_entry_bytes(const qc_st_tensor *t);
QC_NODISCARD qc_status qc_st_header_bytes(uint64_t *out, uint64_t entry_bytes, size_t count,
                                          const qc_st_meta *meta, size_t meta_count, qc_error *err);
/* These append 8 + N bytes to out: the length, the JSON ({"__metadata__":{"format":"pt"},...}
 * compact, like the reference writer's), and spaces up to a multiple of 8. First comes the
 * beginning, then each tensor in file order with begin and end set, then the end. start is out->len
 * before the first step. QC_ERR_INPUT when the header would exceed the limit; after a failure out
 * holds no valid header. */
QC_NODISCARD qc_status qc_st_header_begin(qc_strbuf *out, const qc_st_meta *meta, size_t meta_count,
                                          qc_error *err);
QC_NODISCARD qc_status qc_st_header_add(qc_strbuf *out, const qc_st_tensor *t, qc_error *err);
QC_NODISCARD qc_status qc_st_header_end(qc_strbuf *out, size_t start, qc_error *err);

#endif

/* A checkpoint as Hugging Face lays it out. It is one of
 *
 *   - a directory with model.safetensors.index.json and its shards, or with model.safetensors
 *   - one .safetensors file by itself
 *
 * Safetensors may be ".safetensors.zst", as in an output of qconv. diffusers calls the files
 * diffusion_pytorch_model.*. Where the user gives the path of an index, it stands for its directory
 * and says which of several variants ("fp16") is meant.
 *
 * The index says which files there are, never the names of the shards, and the files say which
 * tensors; where several loaders differ, that of transformers is followed, and a warning says so
 * (checkpoint_index.c). original/, metal/, consolidated.* and
 * pytorch_model*.bin beside safetensors are not read, and alone they are refused: the Python
 * package writes files of torch.save as safetensors. Opening finds everything that is wrong before
 * any work begins: missing or short shards, names that leave the directory, and side files that are
 * not what their names say.
 *
 * Ownership: everything below belongs to the qc_checkpoint. Thread-safe for reading. */
#ifndef QC_FORMATS_CHECKPOINT_H
#define QC_FORMATS_CHECKPOINT_H

#include "formats/digest.h"
#include "formats/json_strict.h"
#include "formats/safetensors_file.h"

typedef struct qc_tensor_change qc_tensor_change;

typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
    uint64_t bytes;
    uint64_t begin;                 /* in its file's data buffer */
    uint32_t file;                  /* index into files */
    const qc_tensor_change *change; /* NULL: what is read are the bytes of the file */
} qc_checkpoint_tensor;

typedef struct {
    const char *name; /* relative to the directory, as the index writes it (without .zst) */
    const char *path; /* as opened */
    qc_st_file st;
    size_t tensor_count;
    uint64_t tensor_bytes;
    uint64_t file_bytes; /* on disk */
    qc_file_stamp stamp; /* taken when the file was opened */
    int compressed;
} qc_checkpoint_file;

typedef struct qc_checkpoint qc_checkpoint;
typedef struct qc_checkpoint_changes qc_checkpoint_changes;

/* What changes the tensors of a checkpoint while they are read. Who makes it (convert/adapter) puts
 * this first in a struct of its own. */
struct qc_checkpoint_changes {
    void (*close)(qc_checkpoint_changes *c); /* called by qc_checkpoint_close */
};

/* How a tensor differs from its file: it is read as F32, or, where its file has codes, changed
 * after decoding. */
struct qc_tensor_change {
    qc_checkpoint_tensor stored; /* as the file has it */
    int decoded;                 /* the file has codes; reading gives those, and `apply` the rest */
    int scattered;               /* its bytes are no range of a file, and may lie in several */
    /* Does what qc_checkpoint_read does for t, whose dtype is F32. The range was checked. */
    qc_status (*read)(const qc_checkpoint *c, qc_st_cursor *cur, const qc_checkpoint_tensor *t,
                      uint64_t offset, void *dst, size_t len, qc_error *err);
    /* Changes the decoded elements [first, first + n). */
    qc_status (*apply)(const qc_checkpoint *c, qc_st_cursor *cur, const qc_checkpoint_tensor *t,
                       uint64_t first, uint64_t n, float *values, qc_error *err);
};

struct qc_checkpoint {
    qc_arena arena;
    const char *path; /* as given; for an index that was given, its directory */
    int is_dir;
    int lists_packed; /* by its manifest, the weights are the compressed files */
    const char *stem; /* how the files' names begin that its loader looks for: "model",
                         "diffusion_pytorch_model" */
    int is_adapter;   /* by the names of files or tensors, this is an adapter, to be added to a
                         model */
    qc_checkpoint_file *files;
    size_t file_count;
    qc_checkpoint_tensor *tensors; /* sorted bytewise by name */
    size_t tensor_count;
    uint64_t tensor_bytes; /* all tensors */
    const char **lost;     /* names that the index has and no file */
    size_t lost_count;
    qc_tree_file *side; /* sorted; every file of the directory but the weights, the index and
                              qconv.json; config.json is among them */
    size_t side_count;
    /* Those that loaders read and that are a pointer, a page, empty or cut off: "'tokenizer.json',
     * which is an HTML page"; NULL: there are none. */
    const char *side_odd;
    const char *side_link; /* the first side file that is a link out of the folder (path_link.h),
                              whose target must not be handed on; NULL if there is none */
    char *config_text;     /* config.json or NULL; NUL-terminated */
    size_t config_len;
    qc_json *config;  /* parsed config.json, an object; NULL when there is none */
    qc_st_meta *meta; /* __metadata__ of all files, duplicates with equal values merged */
    size_t meta_count;
    const char **warnings; /* sentences, e.g. that total_size is wrong or that fields are unknown */
    size_t warning_count;
    const char *lacks;      /* what it lacks of what config.json asks for, as convert/known/claims.h
                          found it; NULL: nothing, or nobody has looked */
    size_t adapter_warning; /* 1 + the index of the one of an adapter beside the model; 0: none */
    qc_checkpoint_changes *changes; /* NULL: none */
};

QC_NODISCARD qc_status qc_checkpoint_open(qc_checkpoint **out, const char *path, qc_error *err);
/* A checkpoint of shapes only: it has no files, and reading it is QC_ERR_UNSUPPORTED. Text and
 * tensors (name, dtype, ndim, dims; in any order) are copied. */
QC_NODISCARD qc_status qc_checkpoint_create_shapes(qc_checkpoint **out, const char *path,
                                                   const char *config_text, size_t config_len,
                                                   const qc_checkpoint_tensor *tensors,
                                                   size_t count, qc_error *err);
/* Takes the files of the adapter in `folder` from c->side, if it is c's own folder or below it. */
void qc_checkpoint_leave_out_adapter(qc_checkpoint *c, const char *folder);
void qc_checkpoint_close(qc_checkpoint *c); /* NULL is fine */
/* Refuses the folder of a diffusers pipeline, which has several models. */
QC_NODISCARD qc_status qc_checkpoint_check_single(const char *path, qc_error *err);
/* Fails with the sentence that names the command of the Python package for what torch.save wrote.
 * found: the names of the files in the folder at path; NULL where path is such a file. */
QC_NODISCARD qc_status qc_checkpoint_refuse_torch(const char *path, const char *found,
                                                  qc_error *err);
/* If the weights are an adapter's: QC_ERR_INPUT with a message that says what to do instead. */
QC_NODISCARD qc_status qc_checkpoint_check_model(const qc_checkpoint *c, qc_error *err);
/* Finds a tensor by its exact name; NULL if there is none. */
const qc_checkpoint_tensor *qc_checkpoint_find(const qc_checkpoint *c, const char *name);
/* Likewise its index; UINT32_MAX if there is none. */
static inline uint32_t qc_checkpoint_find_index(const qc_checkpoint *c, const char *name)
{
    const qc_checkpoint_tensor *t = qc_checkpoint_find(c, name);
    return t ? (uint32_t)(t - c->tensors) : UINT32_MAX;
}
/* Returns the index of the tensor whose name is stem (stem_len bytes) + tail; UINT32_MAX if there
 * is none. */
uint32_t qc_checkpoint_beside(const qc_checkpoint *c, const char *stem, size_t stem_len,
                              const char *tail);
/* Returns the dtype that the weights of t have in the model: that of the file, also where it is
 * read in another because it is changed. */
static inline qc_dtype qc_checkpoint_dtype(const qc_checkpoint_tensor *t)
{
    return t->change ? t->change->stored.dtype : t->dtype;
}
/* Likewise, its bytes in the file. */
static inline uint64_t qc_checkpoint_bytes(const qc_checkpoint_tensor *t)
{
    return t->change ? t->change->stored.bytes : t->bytes;
}
/* Reads len bytes of tensor t at offset within it. */
QC_NODISCARD qc_status qc_checkpoint_read(const qc_checkpoint *c, qc_st_cursor *cur,
                                          const qc_checkpoint_tensor *t, uint64_t offset, void *dst,
                                          size_t len, qc_error *err);
/* Digest of the bytes that fix the names, shapes and places of a file's tensors: the safetensors
 * header (8 + N bytes, uncompressed). */
QC_NODISCARD qc_status qc_checkpoint_head_digest(const qc_checkpoint *c, size_t file,
                                                 qc_digest *out, qc_error *err);
/* Checks that file `file` is still the one that was opened. If not, QC_ERR_CHANGED says what
 * changed. */
QC_NODISCARD qc_status qc_checkpoint_check_unchanged(const qc_checkpoint *c, size_t file,
                                                     qc_error *err);
/* Finds where the bytes [offset, offset + len) of t are stored; in a compressed file, the frames
 * that hold them. *file is NULL where there is nothing to read. */
void qc_checkpoint_stored_range(const qc_checkpoint *c, const qc_checkpoint_tensor *t,
                                uint64_t offset, uint64_t len, const qc_file **file,
                                uint64_t *begin, uint64_t *bytes);

#endif

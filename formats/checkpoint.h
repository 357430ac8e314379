/* A checkpoint as Hugging Face lays it out: a directory with model.safetensors.index.json and
 * shards, or model.safetensors, or one .safetensors file by itself; each may be a qconv output
 * with ".safetensors.zst" shards. Where there are no safetensors, pytorch_model.bin or
 * pytorch_model.bin.index.json and its shards; also one file of torch.save by itself. diffusers
 * calls all of these diffusion_pytorch_model.*. An index given by its path stands for its directory
 * and says which of several variants ("fp16") is meant.
 *
 * The index decides, never the names of the shards. original/, metal/, consolidated.* and
 * pytorch_model*.bin beside safetensors are not read. Everything wrong is found here, before any
 * work: missing or short shards, index and files that disagree, names that leave the directory, the
 * same tensor twice.
 *
 * Ownership: everything below belongs to the qc_checkpoint. Thread-safe for reading. */
#ifndef QC_FORMATS_CHECKPOINT_H
#define QC_FORMATS_CHECKPOINT_H

#include "formats/digest.h"
#include "formats/json_strict.h"
#include "formats/safetensors_file.h"
#include "formats/torch_file.h"

typedef struct {
    const char *name;
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
    uint64_t bytes;
    uint64_t begin; /* in its file's data buffer; TORCH: in the file, where two may share bytes */
    uint32_t file;  /* index into files */
} qc_ckpt_tensor;

typedef enum { QC_CKPT_SAFETENSORS, QC_CKPT_TORCH } qc_ckpt_kind;

typedef struct {
    const char *name; /* relative to the directory, as the index writes it (without .zst) */
    const char *path; /* as opened */
    qc_ckpt_kind kind;
    qc_st_file st;       /* SAFETENSORS */
    qc_torch_file torch; /* TORCH */
    /* Of either kind: */
    size_t tensor_count;
    uint64_t tensor_bytes;
    uint64_t file_bytes; /* on disk */
    qc_file_stamp stamp; /* of the opening */
    int compressed;
    const qc_saved_header *saved; /* opened from it: the file itself is deleted; else NULL */
} qc_ckpt_file;

typedef struct {
    qc_arena arena;
    const char *path; /* as given; the directory of an index that was given */
    int is_dir;
    const char *stem; /* of the names its loader looks for: "model", "diffusion_pytorch_model" */
    int is_adapter;   /* what would be added to a model, by the names of files or tensors */
    qc_ckpt_file *files;
    size_t file_count;
    qc_ckpt_tensor *tensors; /* sorted bytewise by name */
    size_t tensor_count;
    uint64_t tensor_bytes; /* all tensors */
    qc_tree_file *side;    /* every file of the directory that is not weights, not the index, not
                              qconv.json; sorted; config.json is among them */
    size_t side_count;
    const char *side_link; /* the first of them that is a link out of the folder (path_link.h): what
                              it leads to is not to be handed on; NULL: none */
    char *config_text;     /* config.json or NULL; NUL-terminated */
    size_t config_len;
    qc_json *config;  /* parsed, an object; NULL when there is none */
    qc_st_meta *meta; /* __metadata__ of all files, duplicates with equal values merged */
    size_t meta_count;
    const qc_saved_header *saved; /* as given to open */
    size_t saved_count;
    const char **warnings; /* sentences; e.g. total_size wrong, unknown fields */
    size_t warning_count;
} qc_checkpoint;

QC_NODISCARD qc_status qc_checkpoint_open(qc_checkpoint **out, const char *path, qc_error *err);
/* The same, with what is kept of weight files that are deleted (copied): where one of them is
 * missing, its saved header stands for it, and its tensors can be known but not read. */
QC_NODISCARD qc_status qc_checkpoint_open_saved(qc_checkpoint **out, const char *path,
                                                const qc_saved_header *saved, size_t count,
                                                qc_error *err);
/* Shapes without weights: no files, and reading is QC_ERR_UNSUPPORTED. Text and tensors (name,
 * dtype, ndim, dims; any order) are copied. (checkpoint_shapes.c) */
QC_NODISCARD qc_status qc_checkpoint_create_shapes(qc_checkpoint **out, const char *path,
                                                   const char *config_text, size_t config_len,
                                                   const qc_ckpt_tensor *tensors, size_t count,
                                                   qc_error *err);
void qc_checkpoint_close(qc_checkpoint *c); /* NULL is fine */
/* QC_ERR_INPUT, and what to do instead, where the weights are an adapter's. */
QC_NODISCARD qc_status qc_checkpoint_check_model(const qc_checkpoint *c, qc_error *err);
/* By exact name; NULL if there is none. */
const qc_ckpt_tensor *qc_checkpoint_find(const qc_checkpoint *c, const char *name);
/* len bytes of tensor t at offset within it. */
QC_NODISCARD qc_status qc_checkpoint_read(const qc_checkpoint *c, qc_st_cursor *cur,
                                          const qc_ckpt_tensor *t, uint64_t offset, void *dst,
                                          size_t len, qc_error *err);
/* Digest of what pins the names, shapes and places of a file's tensors: a safetensors header (8 + N
 * bytes, uncompressed), or torch's pickles. */
QC_NODISCARD qc_status qc_checkpoint_head_digest(const qc_checkpoint *c, size_t file,
                                                 qc_digest *out, qc_error *err);
/* The name of file `file` on the disk, relative to the folder of the checkpoint: its path less that
 * folder. */
const char *qc_checkpoint_file_name(const qc_checkpoint *c, size_t file);
/* Is file `file` still what was opened? QC_ERR_CHANGED with what changed, if not. A file that is
 * deleted and known by its saved header is QC_OK. */
QC_NODISCARD qc_status qc_checkpoint_check_unchanged(const qc_checkpoint *c, size_t file,
                                                     qc_error *err);
/* Where the bytes [offset, offset + len) of t are stored: the frames that hold them, in a
 * compressed file. *file is NULL where there is nothing to read: no such bytes, or a deleted file.
 */
void qc_checkpoint_stored_range(const qc_checkpoint *c, const qc_ckpt_tensor *t, uint64_t offset,
                                uint64_t len, const qc_file **file, uint64_t *begin,
                                uint64_t *bytes);
/* These bytes of t will be read soon. */
void qc_checkpoint_hint_read_soon(const qc_checkpoint *c, const qc_ckpt_tensor *t, uint64_t offset,
                                  uint64_t len);

#endif

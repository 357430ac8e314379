/* Checkpoints that do not exist: the names, dtypes and shapes of a model, with made-up values.
 *
 * A model is a well-known id or a configuration (convert/known/known_models.h), so its tensors are
 * those of the released checkpoint. They are cut into shards in the order of layers, as Hugging
 * Face does it. Each shard has a true safetensors header, and an index and a config.json lie beside
 * them.
 *
 * Any byte of any file depends on its place alone: value i of a tensor comes from splitmix64 at a
 * position that the tensor's name and i give. So files may be written in any order, by any number
 * of threads.
 *
 * The values: BF16, F16 and F32 are normal with deviation 0.02, in 65,536 quantile midpoints (sign
 * and 15 bits of a table). F8_E4M3 is the same times 5,000 (below its largest, 448). F32 scales of
 * FP8 ("*_scale_inv") lie in (2e-4, 6e-4). U8 exponents of MXFP4 ("*_scales") are 118 to 121, and
 * its other bytes are uniform. Everything else is zero. */
#ifndef QC_BENCH_SYNTHETIC_MODEL_H
#define QC_BENCH_SYNTHETIC_MODEL_H

#include "formats/checkpoint.h"

typedef struct {
    const char *name;
    uint64_t bytes;
    qc_strbuf head; /* of a shard: length and JSON; of others: the whole file */
    const qc_st_tensor *tensors;
    size_t tensor_count;
} qc_synth_file;

typedef struct {
    qc_arena arena;
    qc_synth_file *files; /* shards, then the index and config.json */
    size_t file_count, shard_count;
    uint64_t tensor_bytes;
    size_t tensor_count;
} qc_synth_model;

/* A shard is full when another tensor would take it past shard_bytes (a single tensor may). Returns
 * QC_ERR_INPUT for a model that is not known, or that has weights of its own. */
QC_NODISCARD qc_status qc_synth_open(qc_synth_model **out, const char *model, uint64_t shard_bytes,
                                     qc_error *err);
void qc_synth_close(qc_synth_model *m); /* NULL is fine */
/* Reads len bytes of a file at offset, all of them within it. Thread-safe. */
void qc_synth_read(const qc_synth_file *f, uint64_t offset, void *dst, size_t len);

#endif

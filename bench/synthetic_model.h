/* Checkpoints that do not exist: names, dtypes and shapes of a model, values made up.
 *
 * A model is a well-known id or a configuration (convert/known/known_models.h), so its tensors are
 * those of the released checkpoint. They are cut into shards in the order of layers as Hugging Face
 * does, each with a true safetensors header, with an index and a config.json beside them.
 *
 * Any byte of any file is a function of its place alone: value i of a tensor comes from splitmix64
 * at a position that the tensor's name and i give. So a checkpoint of any size can be read in any
 * order without lying anywhere (bench_model serve), and what is written (bench_model write) is the
 * same.
 *
 * Values: BF16, F16, F32 normal, deviation 0.02, in 65,536 quantile midpoints (sign and 15 bits of
 * a table); F8_E4M3 the same times 5,000 (below its largest, 448); F32 scales of FP8
 * ("*_scale_inv") in (2e-4, 6e-4); U8 exponents of MXFP4 ("*_scales") 118 to 121, other bytes
 * uniform; everything else zero. */
#ifndef QC_BENCH_SYNTHETIC_MODEL_H
#define QC_BENCH_SYNTHETIC_MODEL_H

#include "formats/checkpoint.h"

typedef struct {
    const char *name;
    uint64_t bytes;
    qc_strbuf head; /* of a shard: length and JSON; else the whole file */
    const qc_st_tensor *tensors;
    size_t tensor_count;
} qc_synth_file;

typedef struct {
    qc_arena arena;
    qc_synth_file *files; /* shards, then index and config.json */
    size_t file_count, shard_count;
    uint64_t tensor_bytes;
    size_t tensor_count;
} qc_synth_model;

/* shard_bytes: a shard is full when another tensor would pass this (one tensor may).
 * QC_ERR_INPUT for a model that is not known, or that has weights of its own. */
QC_NODISCARD qc_status qc_synth_open(qc_synth_model **out, const char *model, uint64_t shard_bytes,
                                     qc_error *err);
void qc_synth_close(qc_synth_model *m); /* NULL is fine */
/* len bytes of a file at offset, all of them within it. Thread-safe. */
void qc_synth_read(const qc_synth_file *f, uint64_t offset, void *dst, size_t len);

/* Serve the files, read only, in folder `mount` until it is unmounted or a signal comes. direct:
 * reads pass by the page cache. (model_mount.c; where libfuse 3 was found) */
QC_NODISCARD qc_status qc_synth_mount(const qc_synth_model *m, const char *mount, int direct,
                                      qc_error *err);

#endif

/* Where every output tensor lies: shard, offset and frames. This is pure arithmetic on shapes, done
 * before a weight is read, so file sizes are exact. */
#ifndef QC_FORMATS_SHARD_LAYOUT_H
#define QC_FORMATS_SHARD_LAYOUT_H

#include "base/arena.h"
#include "formats/safetensors_header.h"

/* One output tensor as its caller describes it. Tensors with equal `group` (a weight and its
 * scales) are consecutive and stay together in one shard. */
typedef struct {
    /* qc_layout_place sets begin and end. name is the tensor's name, unless suffix is given. */
    qc_st_tensor st;
    /* If suffix is given, the tensor's name is the first stem_bytes bytes of st.name and then
     * suffix, so that the names of role tensors beside a weight take no memory. */
    const char *suffix;
    uint32_t stem_bytes;
    uint32_t group;
    uint32_t device;      /* never falls from one tensor to the next, is one for all of a group;
                             without devices it is 0 */
    uint64_t piece_bytes; /* content bytes of one frame: a multiple of align_bytes, or 0; then
                             qc_layout_place sets it by qc_layout_piece_bytes */
    uint64_t align_bytes; /* frames are cut at multiples of this (a row, a block); >= 1 */
    uint32_t shard;       /* set by qc_layout_place */
} qc_out_tensor;

/* Describes tensor i, always in the same way; what *t points to stays valid. The caller zeroes *t
 * before. */
typedef void (*qc_out_tensor_fn)(const void *ctx, uint32_t i, qc_out_tensor *t);

typedef struct {
    qc_out_tensor_fn get;
    const void *ctx;
    uint32_t count;
} qc_out_tensors;

typedef struct {
    const char *name;      /* "STEM-00001-of-00004.safetensors" or "STEM.safetensors" */
    uint64_t header_bytes; /* 8 + N */
    uint64_t data_bytes;
    uint32_t *order; /* indices of its tensors, in file order */
    uint32_t first;  /* its tensors are first to first + count - 1, in the order given */
    uint32_t count;
    uint32_t device; /* the device of all its tensors */
} qc_shard;

/* Takes 12 bytes a tensor, in the arena given. The orders of all shards lie one behind the
 * other. */
typedef struct {
    qc_shard *shards;
    uint32_t count;
    uint64_t *begins; /* where each tensor begins in its shard's data */
} qc_layout;

/* Returns the content size of a tensor's frames. A tensor of up to 8 MiB is one frame. Larger ones
 * are cut into equal frames of 4 to 8 MiB (the last one shorter) at multiples of align_bytes. An
 * align_bytes above 8 MiB makes a frame by itself, up to QC_FRAME_MAX_BYTES; beyond that the
 * alignment is given up. */
uint64_t qc_layout_piece_bytes(uint64_t tensor_bytes, uint64_t align_bytes);
/* Lays out all tensors:
 *
 *   - shards are filled greedily in the order given, with whole groups; a group larger than the
 *     limit gets a shard of its own, and a shard ends where the device changes, full or not
 *   - each shard is sorted as the reference writer does, offsets are set, and the headers' bytes
 *     are counted
 *
 * QC_ERR_INTERNAL for devices out of order. stem: how the names of the shards begin.
 * max_shard_bytes counts tensor bytes, as Hugging Face does. */
QC_NODISCARD qc_status qc_layout_make(qc_layout *out, qc_arena *arena, qc_out_tensors tensors,
                                      const char *stem, uint64_t max_shard_bytes, qc_error *err);
/* Gives the name of the index that belongs to a shard of this name:
 * "STEM.safetensors.index.json". */
QC_NODISCARD qc_status qc_layout_index_name(const char **out, qc_arena *arena, const char *shard,
                                            qc_error *err);
/* Returns tensor i of those given to qc_layout_make, with its place. */
qc_out_tensor qc_layout_place(const qc_layout *layout, qc_out_tensors tensors, uint32_t i);
/* Writes its name to *out, from the beginning of the buffer. */
QC_NODISCARD qc_status qc_out_tensor_name(qc_strbuf *out, const qc_out_tensor *t, qc_error *err);
/* Fills order with the indices of all tensors, sorted by name as strcmp does. */
void qc_out_tensors_by_name(qc_out_tensors tensors, uint32_t *order);
/* Appends the header of a shard: header_bytes bytes. */
QC_NODISCARD qc_status qc_layout_header(qc_strbuf *out, const qc_layout *layout, uint32_t shard,
                                        qc_out_tensors tensors, qc_error *err);

#endif

/* Where every output tensor lies: shard, offset, frames. Pure arithmetic on shapes; done before a
 * weight is read, so file sizes are exact. */
#ifndef QC_FORMATS_SHARD_LAYOUT_H
#define QC_FORMATS_SHARD_LAYOUT_H

#include "base/arena.h"
#include "formats/safetensors_header.h"

/* One output tensor, as its caller describes it. Tensors with equal `group` are consecutive and
 * stay together in one shard (a weight and its scales). */
typedef struct {
    /* begin and end are set by qc_layout_place. name: of the tensor, unless suffix is given. */
    qc_st_tensor st;
    const char *suffix; /* else the name is the first stem_bytes bytes of st.name, then this: names
                           of what lies beside a weight take no memory */
    uint32_t stem_bytes;
    uint32_t group;
    uint32_t device; /* where it is to lie; never falls from one tensor to the next, and is one for
                        all of a group. Without devices 0 everywhere */
    uint64_t piece_bytes; /* content of one frame: 0, then qc_layout_place sets it by
                             qc_layout_piece_bytes; or given, a multiple of align_bytes */
    uint64_t align_bytes; /* frames are cut at multiples of this (a row, a block); >= 1 */
    uint32_t shard;       /* set by qc_layout_place */
} qc_out_tensor;

/* Describes tensor i: always the same, and what *t points to stays. *t is zero before. */
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
    uint32_t first;  /* of its tensors, in the order given: first to first + count - 1 */
    uint32_t count;
    uint32_t device; /* of all its tensors */
} qc_shard;

/* 12 bytes a tensor, in the arena given. The orders of all shards lie one behind the other. */
typedef struct {
    qc_shard *shards;
    uint32_t count;
    uint64_t *begins; /* of each tensor in its shard's data */
} qc_layout;

/* Frame content size for a tensor: the whole tensor up to 8 MiB; larger ones are cut into equal
 * pieces of 4 to 8 MiB (the last one shorter) at multiples of align_bytes; a single align_bytes
 * above 8 MiB is a piece by itself, up to QC_FRAME_MAX_BYTES, beyond that alignment is given up. */
uint64_t qc_layout_piece_bytes(uint64_t tensor_bytes, uint64_t align_bytes);
/* Fill shards greedily in the order given (whole groups; a group larger than the limit gets a shard
 * of its own; a shard ends where the device changes, full or not); sort each shard as the reference
 * writer does; set offsets; count the headers' bytes. QC_ERR_INTERNAL for devices out of order.
 * stem: what the names of the shards begin with. max_shard_bytes counts tensor bytes, as Hugging
 * Face does. */
QC_NODISCARD qc_status qc_layout_make(qc_layout *out, qc_arena *arena, qc_out_tensors tensors,
                                      const char *stem, uint64_t max_shard_bytes, qc_error *err);
/* The name of the index that belongs to a shard of this name: "STEM.safetensors.index.json". */
QC_NODISCARD qc_status qc_layout_index_name(const char **out, qc_arena *arena, const char *shard,
                                            qc_error *err);
/* Tensor i of those given to qc_layout_make, with its place. */
qc_out_tensor qc_layout_place(const qc_layout *layout, qc_out_tensors tensors, uint32_t i);
/* Its name to *out, from the beginning of it. */
QC_NODISCARD qc_status qc_out_tensor_name(qc_strbuf *out, const qc_out_tensor *t, qc_error *err);
/* Indices of all tensors to order, sorted by name as strcmp has it. */
void qc_out_tensors_by_name(qc_out_tensors tensors, uint32_t *order);
/* Append the header of a shard: header_bytes bytes. */
QC_NODISCARD qc_status qc_layout_header(qc_strbuf *out, const qc_layout *layout, uint32_t shard,
                                        qc_out_tensors tensors, qc_error *err);

#endif

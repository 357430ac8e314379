/* Where every output tensor lies: shard, offset, frames. Pure arithmetic on shapes; done before a
 * weight is read, so file sizes are exact. */
#ifndef QC_FORMATS_SHARD_LAYOUT_H
#define QC_FORMATS_SHARD_LAYOUT_H

#include "base/arena.h"
#include "formats/safetensors_header.h"

/* One output tensor. Tensors with equal `group` are consecutive in the input and stay together in
 * one shard (a weight and its scales). */
typedef struct {
    qc_st_tensor st; /* begin/end are set by the layout */
    uint32_t group;
    uint32_t device; /* where it is to lie; never falls from one tensor to the next, and is one for
                        all of a group. Without devices 0 everywhere */
    uint64_t piece_bytes; /* content of one frame: set by qc_layout_piece_bytes unless given;
                             a multiple of align_bytes */
    uint64_t align_bytes; /* frames are cut at multiples of this (a row, a block); >= 1 */
    uint32_t shard;       /* set by the layout */
    uint32_t user;        /* free for the caller */
} qc_out_tensor;

typedef struct {
    const char *name;      /* "model-00001-of-00004.safetensors" or "model.safetensors" */
    uint64_t header_bytes; /* 8 + N */
    uint64_t data_bytes;
    uint32_t *order; /* indices into the tensors, in file order */
    uint32_t count;
    uint32_t device; /* of all its tensors */
} qc_shard;

typedef struct {
    qc_shard *shards; /* in the arena given */
    uint32_t count;
} qc_layout;

/* Frame content size for a tensor: the whole tensor up to 8 MiB; larger ones are cut into equal
 * pieces of 4 to 8 MiB (the last one shorter) at multiples of align_bytes; a single align_bytes
 * above 8 MiB is a piece by itself, up to QC_FRAME_MAX_BYTES, beyond that alignment is given up. */
uint64_t qc_layout_piece_bytes(uint64_t tensor_bytes, uint64_t align_bytes);
/* Fill shards greedily in the order given (whole groups; a group larger than the limit gets a shard
 * of its own; a shard ends where the device changes, full or not); sort each shard as the reference
 * writer does; set offsets; count the headers' bytes. QC_ERR_INTERNAL for devices out of order.
 * max_shard_bytes counts tensor bytes, as Hugging Face does. */
QC_NODISCARD qc_status qc_layout_make(qc_layout *out, qc_arena *arena, qc_out_tensor *tensors,
                                      uint32_t count, uint64_t max_shard_bytes, qc_error *err);
/* Append the header of a shard: header_bytes bytes. */
QC_NODISCARD qc_status qc_layout_header(qc_strbuf *out, const qc_layout *layout, uint32_t shard,
                                        const qc_out_tensor *tensors, qc_error *err);

#endif

/* Compares the manifest of an output with the headers of its shards. Both say which tensors there
 * are, with dtype, shape and place. A manifest whose digest is right may still say something else
 * than the shards do, and then whatever is read by it has the wrong name.
 *
 * Every reader of an output comes through here. Whoever reads frames passes the bytes of each
 * header (formats/output_frames.c); what reads an output as a checkpoint passes the headers that it
 * has parsed (formats/checkpoint.c).
 * Thread-safe: yes (no shared state). Allocates scratch for one shard at a time. */
#ifndef QC_FORMATS_MANIFEST_HEADER_H
#define QC_FORMATS_MANIFEST_HEADER_H

#include "formats/manifest.h"
#include "formats/safetensors_header.h"

/* Gives what the headers say of their i-th tensor; i counts in bytewise order of names. */
typedef struct {
    qc_st_tensor tensor;
    const char *shard; /* as the manifest names it */
} qc_header_tensor;
typedef void (*qc_header_tensor_fn)(const void *ctx, size_t i, qc_header_tensor *out);

/* Checks that rows first <= i < end of m are the `count` tensors that `at` gives. QC_ERR_CHECK
 * names the first tensor by name that only one side has or that the sides describe differently; the
 * message begins with "header of FILE: ". Allocates a pointer a row. */
QC_NODISCARD qc_status qc_manifest_hold(const qc_manifest *m, size_t first, size_t end,
                                        qc_header_tensor_fn at, const void *ctx, size_t count,
                                        qc_error *err);

/* Does the same for shard m->shards[shard], whose rows are first <= i < end, and whose header is
 * given with the digest over its pieces. If the header is exactly what a writer makes of these rows
 * (docs/format.md, section 2.1), nothing is parsed. */
QC_NODISCARD qc_status qc_shard_header_check(const char *header, const qc_digest *digest,
                                             const qc_manifest *m, size_t shard, size_t first,
                                             size_t end, qc_error *err);

#endif

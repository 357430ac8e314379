/* Read a qconv output from end to end, checking every byte against its manifest.
 *
 * verify looks at everything and tells what is wrong; unpack does the same and hands on the
 * decompressed bytes. Frames are checked in parallel; a tensor's verdict is known when all its
 * frames were seen.
 *
 * Checked (the manifest itself was when it was loaded): every other file's size and digest; every
 * shard's size, its seek table and its header (structure, digest, agreement with the manifest);
 * every tensor's stored and decompressed bytes; that the index agrees with the manifest. */
#ifndef QC_CONVERT_OUTPUT_SCAN_H
#define QC_CONVERT_OUTPUT_SCAN_H

#include "base/arena.h"
#include "base/workers.h"
#include "formats/manifest.h"

/* A stretch of decompressed bytes of shard `shard`, already checked for itself; called from many
 * threads at once, in no order. */
typedef qc_status (*qc_scan_sink)(void *ctx, uint32_t shard, uint64_t offset, const void *bytes,
                                  size_t len, qc_error *err);

typedef struct {
    const char *what; /* "tensor 'x'", "config.json", ...; NULL: nothing wrong */
    const char *why;
} qc_scan_problem;

typedef struct {
    qc_arena *arena;       /* borrowed */
    qc_manifest manifest;  /* that of qc_scan_output */
    qc_scan_problem first; /* in the order: files, shards, then tensors in file order */
    uint64_t problem_count;
    uint64_t tensors_checked;
    uint64_t content_bytes, stored_bytes; /* of all shards */
} qc_scan_result;

typedef struct {
    unsigned threads;
    int shards_only;   /* neither other files nor the index: the manifest is of a part */
    qc_scan_sink sink; /* NULL: only check */
    void *sink_ctx;
    void (*progress)(void *ctx, uint64_t content_bytes);
    void *progress_ctx;
} qc_scan_options;

/* The scan of what m lists (qc_manifest_load, or a part of that); m is copied, what it points to is
 * not. Findings are in *result with QC_OK; a non-OK status is a failure of the scan itself (I/O,
 * memory, interrupt). */
QC_NODISCARD qc_status qc_scan_output(qc_scan_result *result, qc_arena *arena, const char *dir,
                                      const qc_manifest *m, const qc_scan_options *options,
                                      qc_error *err);

#endif

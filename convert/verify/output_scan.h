/* Reads a qconv output from end to end, and checks every byte against its manifest.
 *
 * verify looks at everything and tells what is wrong; unpack does the same and hands on the
 * decompressed bytes. A tensor's verdict is known when all its frames were seen.
 *
 * The manifest itself was checked when it was loaded. This checks the size and digest of every
 * other file; the size, seek table and header (structure, digest, agreement with the manifest) of
 * every shard; the stored and decompressed bytes of every tensor; and that the index agrees with
 * the manifest. */
#ifndef QC_CONVERT_OUTPUT_SCAN_H
#define QC_CONVERT_OUTPUT_SCAN_H

#include "base/arena.h"
#include "base/workers.h"
#include "convert/term/progress.h"
#include "formats/output_frames.h"

/* Gets the content of a frame, which was already checked by itself. Many threads call it at once,
 * in no order; worker is the number of the thread. */
typedef qc_status (*qc_scan_sink)(void *ctx, unsigned worker, const qc_output_frame *frame,
                                  const void *content, qc_error *err);

typedef struct {
    const char *what; /* "tensor 'x'", "config.json", ...; NULL: nothing is wrong */
    const char *why;
} qc_scan_problem;

typedef struct {
    qc_arena *arena;       /* borrowed */
    qc_manifest manifest;  /* the one given to qc_scan_output */
    qc_scan_problem first; /* the first of files, then shards, then tensors in file order */
    uint64_t problem_count;
    uint64_t tensors_checked;
    uint64_t content_bytes, stored_bytes; /* lengths of all shards */
} qc_scan_result;

typedef struct {
    unsigned threads;  /* 0: as many as qc_pipeline_default_threads(0) says */
    int shards_only;   /* check neither other files nor the index, for the manifest of a part */
    int where_there;   /* pass over shards whose file is missing */
    qc_scan_sink sink; /* NULL: only check */
    void *sink_ctx;
    qc_progress *progress; /* counts content bytes; may be NULL */
} qc_scan_options;

/* Scans what m lists (qc_manifest_load, or a part of that). m is copied, but not what it points to.
 * Findings are in *result, and the status is QC_OK; any other status is a failure of the scan
 * itself (I/O, memory, interrupt). */
QC_NODISCARD qc_status qc_scan_output(qc_scan_result *result, qc_arena *arena, const char *dir,
                                      const qc_manifest *m, const qc_scan_options *options,
                                      qc_error *err);

#endif

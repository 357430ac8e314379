/* A compressed output of qconv as the plain files that `qconv unpack` would write, byte for byte,
 * without writing them: what files there are, and any stretch of one.
 *
 * Adding an output checks the manifest, the seek table and header of every shard, and all of the
 * other files, by their digests. From then on each frame is checked as it is read, by its checksum,
 * and by its digest from the second time on. The digest of a tensor is over all of its frames, so
 * it is checked when the last of them is read for the first time; if it is wrong, none of its
 * frames is handed out any more. Other files are read in pieces, by digests taken when they were
 * added.
 *
 * Memory: 64 bytes a frame, the text of qconv.json, and what the frame cache takes. Every file
 * takes a descriptor. Thread-safe from qc_plain_files_start on. */
#ifndef QC_CONVERT_PLAIN_FILES_H
#define QC_CONVERT_PLAIN_FILES_H

#include "base/status.h"

typedef struct {
    const char *path; /* with '/' between folders */
    uint64_t bytes;
    int64_t modified_ns; /* since 1970, of the file that it is made of */
} qc_plain_file;

typedef struct qc_plain_files qc_plain_files;

/* Is told of the first failure of each frame: what is wrong with which tensor and shard. Any thread
 * may call it. */
typedef void (*qc_plain_fault)(void *ctx, const qc_error *fault);

QC_NODISCARD qc_status qc_plain_files_create(qc_plain_files **out, qc_plain_fault fault, void *ctx,
                                             qc_error *err);
void qc_plain_files_destroy(qc_plain_files *p); /* NULL is fine */
/* Adds the files of the output in dir; prefix is "" or a folder, like "unet/". QC_ERR_INPUT where
 * its shards are plain already, QC_ERR_CHECK where it is damaged. */
QC_NODISCARD qc_status qc_plain_files_add(qc_plain_files *p, const char *dir, const char *prefix,
                                          qc_error *err);
/* Starts the threads that read ahead. Decompressed frames take at most memory_bytes, or two frames
 * if that is more. At most `threads` (0: one per processor) frames are read at once, each of which
 * takes room for its compressed bytes. */
QC_NODISCARD qc_status qc_plain_files_start(qc_plain_files *p, uint64_t memory_bytes,
                                            unsigned threads, qc_error *err);

size_t qc_plain_files_count(const qc_plain_files *p);
/* The pointer is good until the next output is added. */
const qc_plain_file *qc_plain_files_at(const qc_plain_files *p, size_t i);
/* Reads bytes [offset, offset + len) of file i, which has all of them. Bytes that are damaged are
 * QC_ERR_CHECK. */
QC_NODISCARD qc_status qc_plain_files_read(qc_plain_files *p, size_t i, uint64_t offset, void *dst,
                                           size_t len, qc_error *err);

#endif

/* Read what lies on one device of an output of qconv: its tensors, in parallel, straight to where
 * the caller wants them. For loaders; C and C++.
 *
 *   open     the manifest is read and checked; no shard is touched
 *   list     devices and their tensors, with exact sizes, to make room for them
 *   load     the shards of one device are read by several threads; every frame is decompressed
 *            straight into the memory that place() named for its tensor
 *
 * Nothing of another device's shards is opened: they may lie on another machine. An output made
 * without --vram has one device, "all". Compressed and plain outputs are read alike.
 *
 * Memory: the manifest (0.4 KB a tensor, with names of 50 bytes), 44 bytes a frame and 32 a tensor
 * during a load, the header of one shard before it, and one compressed frame (at most 16 MiB, 8 as
 * qconv writes them) a thread. No tensor is ever held twice. Stored frames, most of an output in
 * NF4, are read straight to their place. What is checked on the way: the manifest's own digest;
 * that each shard's header says what the manifest says; the digest of the seek table, and every
 * tensor's: of its frames as they lie in the file, or in a plain output of its bytes. The checksum
 * that each frame carries is looked at where digests are not.
 *
 * An argument that is NULL where it may not be is QC_ERR_USAGE, from functions without a status
 * NULL or 0; err may always be NULL.
 *
 * Thread-safe: a reader does not change after qc_reader_open, so several loads may run at once.
 * Installed as <qconv/device_reader.h>, which includes nothing else of qconv's.
 * Source: docs/format.md; an example that is compiled and run: docs/reading.md, section 5. */
#ifndef QC_FORMATS_DEVICE_READER_H
#define QC_FORMATS_DEVICE_READER_H

#include "base/dtype.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    const char *name;
    const char *scheme; /* "nf4", ..., "state" for scales and the like; see docs/format.md */
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
    uint64_t bytes;    /* may be 0 */
    const char *shard; /* the file it is read from: "model-00002-of-00004.safetensors.zst" */
    size_t index;      /* among the tensors of its device */
} qc_reader_tensor;

typedef struct {
    const char *name; /* "cuda:0", "cpu", "disk"; "all" for an output without a placement */
    const qc_reader_tensor *tensors; /* in the order of shards and files; NULL: none */
    size_t tensor_count;
    uint64_t tensor_bytes; /* of all of them: what a device must hold */
    uint64_t stored_bytes; /* of its shards on disk */
    size_t shard_count;
    size_t
        max_piece_bytes; /* the largest piece that a load in pieces gives: 8 MiB as qconv writes */
} qc_reader_device;

typedef struct qc_reader qc_reader;

/* dir: an output of qconv (see qconv.json). Everything lists and describes belongs to the reader
 * and lives until it is closed. QC_ERR_INPUT where there is no manifest, QC_ERR_CHECK where it is
 * damaged. */
QC_API QC_NODISCARD qc_status qc_reader_open(qc_reader **out, const char *dir, qc_error *err);
QC_API void qc_reader_close(qc_reader *r); /* NULL is fine */

QC_API size_t qc_reader_device_count(const qc_reader *r); /* at least 1; in the order of the plan */
/* NULL where there is no such device. */
QC_API const qc_reader_device *qc_reader_device_at(const qc_reader *r, size_t device);
/* QC_ERR_DEVICE that names those there are. */
QC_API QC_NODISCARD qc_status qc_reader_find_device(const qc_reader *r, const char *name,
                                                    size_t *device, qc_error *err);

/* Where the t->bytes bytes of a tensor go: memory that threads of this process may write to (heap,
 * pinned, mapped), any alignment; NULL ends the load with QC_ERR_NOMEM (but for a tensor of no
 * bytes, where it is fine). Called once per tensor before its first byte is read, by one thread at
 * a time, about in the order of the list. It may wait until done() has freed room for one whole
 * tensor, if stopped() wakes it. */
typedef void *(*qc_reader_place)(void *ctx, const qc_reader_tensor *t);
/* The tensor is whole and its digest right. Called once per tensor, by several threads at once.
 * What it returns other than QC_OK ends the load. */
typedef qc_status (*qc_reader_done)(void *ctx, const qc_reader_tensor *t, void *dst, qc_error *err);
/* The load has failed and will return; called once. What was placed and not done stays the
 * caller's, written to in part. */
typedef void (*qc_reader_stopped)(void *ctx);

/* For memory that this processor does not write to, a GPU's: the caller gives each thread buffers
 * of his own (pinned, say, and two of them, so that one is copied while the other is filled), and
 * has tensors piece by piece, in any order. worker: 0 .. threads - 1, one thread each; a worker has
 * one piece at a time. What they return other than QC_OK ends the load. */
typedef struct {
    /* *piece: room for bytes <= max_piece_bytes until put. It may wait for what the same worker
     * has put before. */
    qc_status (*room)(void *ctx, unsigned worker, size_t bytes, void **piece, qc_error *err);
    /* piece holds bytes of t's content from offset on. Before the tensor's digest is known to be
     * right: it is when done is called, after the last put. */
    qc_status (*put)(void *ctx, unsigned worker, const qc_reader_tensor *t, uint64_t offset,
                     void *piece, size_t bytes, qc_error *err);
} qc_reader_pieces;

typedef struct {
    unsigned threads; /* 0: one per processor */
    int skip_digests; /* trust the disk; the checksums of frames, which a plain output has not, are
                         checked instead */
    qc_reader_place place;          /* one of these two */
    const qc_reader_pieces *pieces; /* must live until the load returns */
    qc_reader_done done;            /* or NULL; with pieces its dst is NULL */
    qc_reader_stopped stopped;      /* or NULL */
    void *ctx;
} qc_reader_options;

/* All tensors of a device. QC_ERR_CHECK names the tensor or the shard that is missing or damaged;
 * QC_ERR_INTERRUPTED after qc_interrupt (base/workers.h). */
QC_API QC_NODISCARD qc_status qc_reader_load(const qc_reader *r, size_t device,
                                             const qc_reader_options *options, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif

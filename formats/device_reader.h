/* Read what lies on one device of an output of qconv: its tensors, in parallel, straight to where
 * the caller wants them. For loaders; C and C++.
 *
 *   open     the manifest is read and checked; no shard is touched
 *   list     devices and their tensors, with exact sizes, to make room for them
 *   load     the shards of one device are read by several threads; every frame is decompressed
 *            straight into the memory that place() named for its tensor
 *
 * A load opens no shard of another device, so those may lie on another machine. An output made
 * without --vram has one device, "all". Compressed and plain outputs are read alike.
 *
 * Memory: the manifest takes 0.4 KB a tensor, with names of 50 bytes. A load takes 48 bytes a frame
 * and 24 a tensor, the header of one shard before that, and one compressed frame a thread (at most
 * 16 MiB, 8 as qconv writes them). No tensor is ever held twice. Stored frames, which are most of
 * an NF4 output, are read straight to their place.
 *
 * A load checks the manifest's own digest, that each shard's header says what the manifest says,
 * the digest of the seek table, and the digest of every tensor: over its frames as they lie in the
 * file, or in a plain output over its bytes. The checksum that each frame carries is checked only
 * where digests are skipped.
 *
 * An argument that is NULL where it must not be gives QC_ERR_USAGE; functions that return no status
 * then return NULL or 0. err may always be NULL.
 *
 * qc_reader_read brings single tensors, or some rows or columns of them.
 *
 * Thread-safe: a reader does not change after qc_reader_open, so several loads may run at once.
 * Installed as <qconv/device_reader.h>, which needs no other header of qconv's.
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
    size_t index;      /* its position among the tensors of its device */
} qc_reader_tensor;

typedef struct {
    const char *name; /* "cuda:0", "cpu", "disk"; "all" for an output without a placement */
    const qc_reader_tensor *tensors; /* in the order of shards and files; NULL if there are none */
    size_t tensor_count;
    uint64_t tensor_bytes; /* sum over its tensors: what a device must hold */
    uint64_t stored_bytes; /* length of its shards on disk */
    size_t shard_count;
    size_t max_piece_bytes; /* the largest piece of a load in pieces; 8 MiB in qconv's outputs */
} qc_reader_device;

typedef struct qc_reader qc_reader;

/* dir is an output of qconv (see qconv.json). Everything that the reader lists and describes
 * belongs to it and lives until it is closed. QC_ERR_INPUT where there is no manifest, QC_ERR_CHECK
 * where it is damaged. */
QC_API QC_NODISCARD qc_status qc_reader_open(qc_reader **out, const char *dir, qc_error *err);
QC_API void qc_reader_close(qc_reader *r); /* NULL is fine */

QC_API size_t qc_reader_device_count(const qc_reader *r); /* at least 1; in the order of the plan */
/* Returns NULL where there is no such device. */
QC_API const qc_reader_device *qc_reader_device_at(const qc_reader *r, size_t device);
/* QC_ERR_DEVICE where there is no such device; the message names those that there are. */
QC_API QC_NODISCARD qc_status qc_reader_find_device(const qc_reader *r, const char *name,
                                                    size_t *device, qc_error *err);

/* Returns where the t->bytes bytes of a tensor go: memory of any alignment that threads of this
 * process may write to (heap, pinned, mapped). NULL ends the load with QC_ERR_NOMEM, except for a
 * tensor of no bytes, where NULL is fine. It is called once per tensor before its first byte is
 * read, by one thread at a time, roughly in the order of the list. It may wait until done() has
 * freed room for one whole tensor, provided that stopped() wakes it. */
typedef void *(*qc_reader_place)(void *ctx, const qc_reader_tensor *t);
/* Called once per tensor, when all its bytes are there and its digest is right; several threads may
 * call it at once. A return other than QC_OK ends the load. */
typedef qc_status (*qc_reader_done)(void *ctx, const qc_reader_tensor *t, void *dst, qc_error *err);
/* Called once, when the load has failed and will return. Tensors that were placed and not done stay
 * the caller's; some of their bytes may have been written. */
typedef void (*qc_reader_stopped)(void *ctx);

/* For memory that this processor cannot write to, like a GPU's. The caller gives each thread
 * buffers of its own (pinned ones, say, and two of them, so that one is copied while the other is
 * filled) and gets the tensors piece by piece, in any order. worker is 0 .. threads - 1, one thread
 * each; a worker has one piece at a time. A return other than QC_OK ends the load. */
typedef struct {
    /* Sets *piece to room for `bytes` bytes (at most max_piece_bytes), which is used until put. It
     * may wait for what the same worker has put before. */
    qc_status (*room)(void *ctx, unsigned worker, size_t bytes, void **piece, qc_error *err);
    /* piece holds `bytes` bytes of t's content from offset on. The tensor's digest is not checked
     * yet: it is known to be right only when done is called, after the last put. */
    qc_status (*put)(void *ctx, unsigned worker, const qc_reader_tensor *t, uint64_t offset,
                     void *piece, size_t bytes, qc_error *err);
} qc_reader_pieces;

typedef struct {
    unsigned threads;      /* 1 to 1024; 0: one per processor */
    int skip_digests;      /* trust the disk: check the checksums of frames instead, which a plain
                              output does not have */
    qc_reader_place place; /* one of these two */
    const qc_reader_pieces *pieces; /* must live until the load returns */
    qc_reader_done done;            /* may be NULL; its dst is NULL in a load in pieces */
    qc_reader_stopped stopped;      /* or NULL */
    void *ctx;
} qc_reader_options;

/* Loads all tensors of a device. QC_ERR_CHECK names the tensor or the shard that is missing or
 * damaged; QC_ERR_INTERRUPTED after qc_interrupt (base/workers.h). */
QC_API QC_NODISCARD qc_status qc_reader_load(const qc_reader *r, size_t device,
                                             const qc_reader_options *options, qc_error *err);

/* Looks for a tensor on all devices. Sets *device to its device and *index to its position there;
 * either may be NULL. Returns NULL where no tensor has that name. The time is that of a binary
 * search. */
QC_API const qc_reader_tensor *qc_reader_find_tensor(const qc_reader *r, const char *name,
                                                     size_t *device, size_t *index);

/* Compares the bytes of a side file, such as config.json, with the manifest's digest of it.
 * QC_ERR_CHECK where they differ, or where it lists no such file. */
QC_API QC_NODISCARD qc_status qc_reader_check_file(const qc_reader *r, const char *path,
                                                   const void *bytes, size_t len, qc_error *err);

/* The open shards of one device, from which single tensors are read, whole or in part. It takes 32
 * bytes a frame and a file descriptor a shard. Several threads may read from it at once. Closing
 * the reader first is fine: its memory goes with the last shards. Opening checks the same as a load
 * does before its first tensor, with the same errors. */
typedef struct qc_reader_shards qc_reader_shards;
QC_API QC_NODISCARD qc_status qc_reader_shards_open(qc_reader_shards **out, const qc_reader *r,
                                                    size_t device, qc_error *err);
QC_API void qc_reader_shards_close(qc_reader_shards *s); /* NULL is fine */

/* A part of a tensor: of its content, as rows of row_bytes, the bytes [first_byte, first_byte +
 * bytes) of each of the rows [first_row, first_row + rows). So with bytes == row_bytes it is a run
 * of rows, and with rows == all of them a run of columns. The caller chooses row_bytes: NF4 codes
 * have the shape [n / 2, 1], and those of a weight [N, K] have rows of K / 2 bytes. */
typedef struct {
    uint64_t row_bytes; /* divides the tensor's bytes */
    uint64_t first_row, rows;
    uint64_t first_byte, bytes;
} qc_reader_slice;

/* Reads tensor number `index` of the device to dst, row after row without gaps: slice->rows *
 * slice->bytes bytes, or all t->bytes of it where slice is NULL. Only the frames that hold them are
 * read. A whole tensor has its digest checked. A slice of a compressed output has the checksum of
 * each of its frames checked, and one of a plain output nothing, because the digest is that of the
 * whole. It holds one compressed frame, and of a slice one frame more. QC_ERR_USAGE where the slice
 * is not within the tensor; QC_ERR_CHECK names the tensor and the shard that is damaged;
 * QC_ERR_INTERRUPTED after qc_interrupt. */
QC_API QC_NODISCARD qc_status qc_reader_read(const qc_reader_shards *s, size_t index,
                                             const qc_reader_slice *slice, void *dst,
                                             qc_error *err);

#ifdef __cplusplus
}
#endif
#endif

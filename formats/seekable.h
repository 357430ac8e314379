/* Zstandard seekable files: independent frames, then a seek table in a skippable frame.
 * Source: zstd contrib/seekable_format specification v0.1.0; RFC 8878 for frames.
 *
 * Frames written here carry their content size and a checksum. A frame that compression would make
 * less than 4% smaller is stored: a frame of raw blocks, whose size is known beforehand
 * (qc_raw_frame_bytes). */
#ifndef QC_FORMATS_SEEKABLE_H
#define QC_FORMATS_SEEKABLE_H

#include "base/status.h"
#include "base/strbuf.h"
#include "formats/digest.h"
#include "formats/file_io.h"

#define QC_FRAME_MAX_BYTES      (16u << 20)  /* content of one frame we write */
#define QC_FRAME_READ_MAX_BYTES (256u << 20) /* content of one frame we read */

typedef struct {
    uint64_t stored_offset;  /* in the file */
    uint64_t content_offset; /* in the decompressed file */
    uint32_t stored_bytes;
    uint32_t content_bytes;
} qc_frame;

typedef struct {
    qc_frame *frames; /* owned; count + 0 entries, offsets ascending */
    size_t count;
    uint64_t content_bytes; /* decompressed size of the file */
    uint64_t table_offset;  /* where the skippable frame begins */
    uint64_t table_bytes;
} qc_seek_table;

/* Read and check the table at the end of f: magic numbers, reserved bits, sums against the file's
 * size. QC_ERR_INPUT or QC_ERR_TRUNCATED otherwise. */
QC_NODISCARD qc_status qc_seek_table_read(qc_seek_table *out, const qc_file *f, qc_error *err);
void qc_seek_table_deinit(qc_seek_table *t);
/* Append the skippable frame for these frames to out. */
QC_NODISCARD qc_status qc_seek_table_build(qc_strbuf *out, const qc_frame *frames, size_t count,
                                           qc_error *err);
/* Index of the frame holding content byte `offset` (< content_bytes). */
size_t qc_seek_table_find(const qc_seek_table *t, uint64_t offset);

size_t qc_raw_frame_bytes(size_t content_bytes);
/* dst: qc_raw_frame_bytes(len) bytes. len <= QC_FRAME_MAX_BYTES; len 0 is a frame of no bytes. */
void qc_raw_frame_write(void *dst, const void *src, size_t len);
/* The raw frame of content_bytes (> 0) that qc_raw_frame_write made and that lies at offset of f,
 * straight to dst: nothing is copied twice. hash: is given the frame's bytes as they are in the
 * file, while they are in the cache; the checksum is then not looked at, as the digest covers more.
 * NULL: the checksum is checked, QC_ERR_INPUT where it is wrong. *as_written 0: the frame has
 * another form; dst and hash then hold what is of no use, and it is to be read as any other. */
QC_NODISCARD qc_status qc_raw_frame_read(int *as_written, const qc_file *f, uint64_t offset,
                                         void *dst, size_t content_bytes, qc_digest_state *hash,
                                         qc_error *err);

typedef struct qc_frame_coder qc_frame_coder; /* one per thread */
QC_NODISCARD qc_status qc_frame_coder_create(qc_frame_coder **out, qc_error *err);
void qc_frame_coder_destroy(qc_frame_coder *c);
/* What zstd takes to compress frames of len bytes at this level; 0 for level 0. An estimate: 100 MB
 * at level 19 for 8 MiB, 1 MB at level 1. */
size_t qc_frame_coder_bytes(int level, size_t len);
/* Room that qc_frame_encode may need for len bytes. */
size_t qc_frame_bound(size_t len);
/* level 1..19. Same bytes for same input, level and zstd version. */
QC_NODISCARD qc_status qc_frame_encode(qc_frame_coder *c, int level, const void *src, size_t len,
                                       void *dst, size_t cap, size_t *out_len, qc_error *err);
/* From now on frames are decoded without looking at their checksums, which costs 13% less: where a
 * digest of the stored bytes is checked, it says more. */
void qc_frame_coder_skip_checksums(qc_frame_coder *c);
/* Exactly one frame with exactly content_bytes of content and, where it has one, a right checksum;
 * else QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_frame_decode(qc_frame_coder *c, const void *src, size_t len, void *dst,
                                       size_t content_bytes, qc_error *err);

/* "1.5.4": of the library that compresses; its bytes may differ between versions. */
const char *qc_frame_library_version(void);

#endif

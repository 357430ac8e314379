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
    qc_frame *frames; /* owned; count entries, offsets ascending */
    size_t count;
    uint64_t content_bytes; /* decompressed size of the file */
    uint64_t table_offset;  /* where the skippable frame begins */
    uint64_t table_bytes;
} qc_seek_table;

/* Reads and checks the table at the end of f: magic numbers, reserved bits, and the sums against
 * the file's size. QC_ERR_INPUT or QC_ERR_TRUNCATED otherwise. */
QC_NODISCARD qc_status qc_seek_table_read(qc_seek_table *out, const qc_file *f, qc_error *err);
void qc_seek_table_deinit(qc_seek_table *t);
/* Appends the skippable frame with the table of these frames to out. */
QC_NODISCARD qc_status qc_seek_table_build(qc_strbuf *out, const qc_frame *frames, size_t count,
                                           qc_error *err);
/* Returns the index of the frame that holds content byte `offset` (< content_bytes). */
size_t qc_seek_table_find(const qc_seek_table *t, uint64_t offset);

size_t qc_raw_frame_bytes(size_t content_bytes);
/* dst has room for qc_raw_frame_bytes(len) bytes. len <= QC_FRAME_MAX_BYTES; len 0 makes a frame of
 * no bytes. */
void qc_raw_frame_write(void *dst, const void *src, size_t len);
/* Reads a raw frame of content_bytes (> 0), which qc_raw_frame_write made and which lies at offset
 * of f, straight to dst without a second copy. hash gets the bytes of the frame as they are in the
 * file, while they are in the cache; the checksum is then not checked, because the digest covers
 * more. With hash NULL the checksum is checked, and QC_ERR_INPUT says that it is wrong. *as_written
 * is 0 if the frame has another form: it must then be read like any other, and dst and hash hold
 * nothing useful. */
QC_NODISCARD qc_status qc_raw_frame_read(int *as_written, const qc_file *f, uint64_t offset,
                                         void *dst, size_t content_bytes, qc_digest_state *hash,
                                         qc_error *err);

typedef struct qc_frame_coder qc_frame_coder; /* one per thread */
QC_NODISCARD qc_status qc_frame_coder_create(qc_frame_coder **out, qc_error *err);
void qc_frame_coder_destroy(qc_frame_coder *c);
/* Estimates the memory that zstd takes to compress frames of len bytes at this level: 100 MB at
 * level 19 for 8 MiB, 1 MB at level 1, 0 at level 0. */
size_t qc_frame_coder_bytes(int level, size_t len);
/* Returns how much room qc_frame_encode may need for len bytes. */
size_t qc_frame_bound(size_t len);
/* level is 1 to 19. The same input, level and zstd version give the same bytes. */
QC_NODISCARD qc_status qc_frame_encode(qc_frame_coder *c, int level, const void *src, size_t len,
                                       void *dst, size_t cap, size_t *out_len, qc_error *err);
/* From now on frames are decoded without looking at their checksums, which costs 13% less. For
 * callers that check a digest of the stored bytes, which says more. */
void qc_frame_coder_skip_checksums(qc_frame_coder *c);
/* Decodes exactly one frame with exactly content_bytes of content and, where it has one, a right
 * checksum; anything else is QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_frame_decode(qc_frame_coder *c, const void *src, size_t len, void *dst,
                                       size_t content_bytes, qc_error *err);

/* Returns the version of the library that compresses, like "1.5.4". Its bytes may differ between
 * versions. */
const char *qc_frame_library_version(void);

#endif

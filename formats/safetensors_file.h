/* One opened safetensors file, plain or as a zstd seekable file (".safetensors.zst").
 * Opening reads the header (and seek table) only and checks every rule and size; nothing is mapped.
 * Which of the two a file is, its first four bytes say, not its name.
 * Of a file that is deleted its saved header may stand in (formats/saved_header.h): everything but
 * the data is there.
 * Thread-safe: reading one file from many threads, each with its own cursor. */
#ifndef QC_FORMATS_SAFETENSORS_FILE_H
#define QC_FORMATS_SAFETENSORS_FILE_H

#include "formats/direct_read.h"
#include "formats/file_stamp.h"
#include "formats/safetensors_header.h"
#include "formats/saved_header.h"
#include "formats/seekable.h"

typedef struct {
    qc_file file;
    qc_st_header header;
    uint64_t data_offset; /* 8 + N, in the decompressed file */
    uint64_t file_bytes;  /* on disk */
    qc_file_stamp stamp;  /* of the opening, before anything was read */
    int compressed;
    qc_seek_table seek; /* when compressed */
    int header_only;    /* of a saved header: reading data is QC_ERR_INPUT */
    uint64_t header_at; /* in `file`, then: its path is still that of the deleted one */
    uint64_t serial;    /* of this opening, unlike any other's: a cursor's frame belongs to it */
} qc_st_file;

/* Scratch of one reading thread: the last frame decoded, buffers. */
typedef struct qc_st_cursor qc_st_cursor;
QC_NODISCARD qc_status qc_st_cursor_create(qc_st_cursor **out, qc_error *err);
void qc_st_cursor_destroy(qc_st_cursor *c);
/* Reads with this cursor come from the range that d was begun on, where they lie in it. Borrowed.
 */
void qc_st_cursor_use_direct(qc_st_cursor *c, qc_direct_reader *d);
/* Stored bytes of any file, by the cursor's direct reader if they are in its range. c may be NULL.
 */
QC_NODISCARD qc_status qc_st_cursor_pread(const qc_st_cursor *c, const qc_file *f, void *dst,
                                          size_t len, uint64_t offset, qc_error *err);

QC_NODISCARD qc_status qc_st_file_open(qc_st_file *out, const char *path, qc_error *err);
/* As it was opened before it was deleted. path: where it was, for messages. */
QC_NODISCARD qc_status qc_st_file_open_saved(qc_st_file *out, const char *path,
                                             const qc_saved_header *saved, qc_error *err);
/* Of an open file: `saved` with its sizes and stamp; path, name and origin are the caller's. */
void qc_st_file_describe(const qc_st_file *f, qc_saved_header *saved);
/* An open file is about to be deleted, and its saved header is at saved_path: lets go of the file,
 * so that its space is free then, by putting the saved one under the same descriptor. Nobody may be
 * reading it; hints may be underway, as no member changes. *header_at is for
 * qc_st_file_set_header_only, to be called before anything but hints, once no other thread uses f.
 * On error f is as before. */
QC_NODISCARD qc_status qc_st_file_let_go(const qc_st_file *f, const char *saved_path,
                                         uint64_t *header_at, qc_error *err);
void qc_st_file_set_header_only(qc_st_file *f, uint64_t header_at);
void qc_st_file_close(qc_st_file *f);
/* len bytes of the data buffer at offset, which must lie within header.data_bytes (QC_ERR_INPUT
 * otherwise). Frames that lie wholly in the range are decoded straight into dst; the last one that
 * did not is kept in the cursor. */
QC_NODISCARD qc_status qc_st_file_read(const qc_st_file *f, qc_st_cursor *c, uint64_t offset,
                                       void *dst, size_t len, qc_error *err);

/* The data_offset bytes before the data: length and JSON, as they are in the (decompressed) file.
 */
QC_NODISCARD qc_status qc_st_file_read_header(const qc_st_file *f, qc_st_cursor *c, void *dst,
                                              qc_error *err);

#endif

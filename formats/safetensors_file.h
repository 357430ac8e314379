/* One opened safetensors file, plain or as a zstd seekable file (".safetensors.zst"). Opening reads
 * only the header (and seek table) and checks every rule and size; nothing is mapped. The first
 * four bytes of a file tell which of the two it is, not its name.
 * Thread-safe: many threads may read one file, each with a cursor of its own. */
#ifndef QC_FORMATS_SAFETENSORS_FILE_H
#define QC_FORMATS_SAFETENSORS_FILE_H

#include "formats/direct_read.h"
#include "formats/file_stamp.h"
#include "formats/safetensors_header.h"
#include "formats/seekable.h"

typedef struct {
    qc_file file;
    qc_st_header header;
    uint64_t data_offset; /* 8 + N, in the decompressed file */
    uint64_t file_bytes;  /* on disk */
    qc_file_stamp stamp;  /* taken at the opening, before anything was read */
    int compressed;
    qc_seek_table seek; /* when compressed */
    uint64_t serial;    /* number of this opening, unlike any other's; tells a cursor whose frame
                           it holds */
} qc_st_file;

/* The scratch of one reading thread: the last decoded frame, and buffers. */
typedef struct qc_st_cursor qc_st_cursor;
QC_NODISCARD qc_status qc_st_cursor_create(qc_st_cursor **out, qc_error *err);
void qc_st_cursor_destroy(qc_st_cursor *c);
/* Reads with this cursor go through d where they lie in the range that d was begun on. Borrowed. */
void qc_st_cursor_use_direct(qc_st_cursor *c, qc_direct_reader *d);
/* Finds what a reader of bytes that no file has as they are (tensor_pieces.h) keeps in the cursor
 * from one read to the next: `bytes` bytes, all zero where the last one kept something else, which
 * `release` tells apart. It is called before they are freed. */
QC_NODISCARD qc_status qc_st_cursor_keep(void **out, qc_st_cursor *c, size_t bytes,
                                         void (*release)(void *), qc_error *err);

QC_NODISCARD qc_status qc_st_file_open(qc_st_file *out, const char *path, qc_error *err);
/* Opens a file for its header alone: the data behind it may be cut off. */
QC_NODISCARD qc_status qc_st_file_open_cut(qc_st_file *out, const char *path, qc_error *err);
void qc_st_file_close(qc_st_file *f);
/* Reads len bytes of the data buffer at offset, which must lie within header.data_bytes
 * (QC_ERR_INPUT otherwise). Frames that lie wholly in the range are decoded straight into dst; the
 * last one that did not is kept in the cursor. */
QC_NODISCARD qc_status qc_st_file_read(const qc_st_file *f, qc_st_cursor *c, uint64_t offset,
                                       void *dst, size_t len, qc_error *err);

/* Reads the data_offset bytes before the data: length and JSON, as in the (decompressed) file. */
QC_NODISCARD qc_status qc_st_file_read_header(const qc_st_file *f, qc_st_cursor *c, void *dst,
                                              qc_error *err);

#endif

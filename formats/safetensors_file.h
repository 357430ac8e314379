/* One opened safetensors file, plain or as a zstd seekable file (".safetensors.zst"). Opening reads
 * only the header (and seek table) and checks every rule and size; nothing is mapped. The first
 * four bytes of a file tell which of the two it is, not its name. For a file that was deleted, its
 * saved header may stand in (formats/saved_header.h): then everything but the data is there.
 * Thread-safe: many threads may read one file, each with a cursor of its own. */
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
    qc_file_stamp stamp;  /* taken at the opening, before anything was read */
    int compressed;
    qc_seek_table seek; /* when compressed */
    int header_only;    /* opened from a saved header: reading data is QC_ERR_INPUT */
    uint64_t header_at; /* then: where the header lies in `file`, whose path is still that of the
                           deleted one */
    uint64_t serial;    /* number of this opening, unlike any other's; tells a cursor whose frame
                           it holds */
} qc_st_file;

/* The scratch of one reading thread: the last decoded frame, and buffers. */
typedef struct qc_st_cursor qc_st_cursor;
QC_NODISCARD qc_status qc_st_cursor_create(qc_st_cursor **out, qc_error *err);
void qc_st_cursor_destroy(qc_st_cursor *c);
/* Reads with this cursor go through d where they lie in the range that d was begun on. Borrowed. */
void qc_st_cursor_use_direct(qc_st_cursor *c, qc_direct_reader *d);
/* Reads stored bytes of any file, with the cursor's direct reader if they are in its range. c may
 * be NULL. */
QC_NODISCARD qc_status qc_st_cursor_pread(const qc_st_cursor *c, const qc_file *f, void *dst,
                                          size_t len, uint64_t offset, qc_error *err);

QC_NODISCARD qc_status qc_st_file_open(qc_st_file *out, const char *path, qc_error *err);
/* Opens a deleted file from its saved header. path is where the file was; messages name it. */
QC_NODISCARD qc_status qc_st_file_open_saved(qc_st_file *out, const char *path,
                                             const qc_saved_header *saved, qc_error *err);
/* Fills `saved` with sizes and stamp of an open file; path, name and origin are left to the
 * caller. */
void qc_st_file_describe(const qc_st_file *f, qc_saved_header *saved);
/* Call this before an open file is deleted, whose saved header is at saved_path. It puts the saved
 * header under the same descriptor, so that the file is closed and its deletion frees the space.
 * Nobody may be reading the file; hints may be under way, because no member changes. Pass
 * *header_at to qc_st_file_set_header_only once no other thread uses f, and before anything but
 * hints. On error f is as before. */
QC_NODISCARD qc_status qc_st_file_let_go(const qc_st_file *f, const char *saved_path,
                                         uint64_t *header_at, qc_error *err);
void qc_st_file_set_header_only(qc_st_file *f, uint64_t header_at);
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

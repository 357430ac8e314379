/* Reads a range of a file from beginning to end past the page cache, several requests ahead.
 *
 * It uses O_DIRECT with the kernel's asynchronous reads (io_submit): the device writes into the
 * reader's buffers while the reader's owner works on earlier bytes. For a source that is read once
 * this costs a third of the processor time that the page cache takes (docs/decisions/0015), and it
 * leaves the cache as it was. Where the system or the file system cannot do it, the reader says so
 * and the caller reads in the usual way, which only costs time. So errors are never reported here.
 *
 *   range   [ consumed | chunk being consumed | chunks on their way (QC_DIRECT_DEPTH) | to come ]
 *
 * Not thread-safe: it has one owner. */
#ifndef QC_FORMATS_DIRECT_READ_H
#define QC_FORMATS_DIRECT_READ_H

#include "formats/file_io.h"

#define QC_DIRECT_CHUNK_BYTES (1u << 20)
#define QC_DIRECT_DEPTH       4u

typedef struct qc_direct_reader qc_direct_reader;

QC_NODISCARD qc_status qc_direct_create(qc_direct_reader **out, qc_error *err);
void qc_direct_destroy(qc_direct_reader *d); /* NULL is fine */
/* Starts on [offset, offset + bytes) of f and gives up what was under way before. Returns 0 if it
 * cannot. */
int qc_direct_begin(qc_direct_reader *d, const qc_file *f, uint64_t offset, uint64_t bytes);
/* Ends the work on a range: no request is under way any more, and the file is not held open. */
void qc_direct_end(qc_direct_reader *d);
/* Copies the len bytes at offset of f to dst. Returns 0 if they are not the next bytes of the range
 * (bytes up to one chunk back may still be there) or could not be read; dst is undefined then. */
int qc_direct_read(qc_direct_reader *d, const qc_file *f, void *dst, size_t len, uint64_t offset);

#endif

/* Reading a range of a file from its beginning to its end past the page cache, some requests ahead.
 *
 * O_DIRECT with the kernel's asynchronous reads (io_submit): the device writes into buffers of the
 * reader while its owner works on what came before. Of a source that is read once this costs a
 * third of the processor time that the page cache takes (docs/decisions/0015), and leaves the
 * cache as it was. Where the system or the file system cannot, the reader says so, and nothing but
 * time is lost: whoever asks reads in the usual way then. So errors are never reported here.
 *
 *   range   [ consumed | chunk being consumed | chunks on their way (QC_DIRECT_DEPTH) | to come ]
 *
 * One owner. */
#ifndef QC_FORMATS_DIRECT_READ_H
#define QC_FORMATS_DIRECT_READ_H

#include "formats/file_io.h"

#define QC_DIRECT_CHUNK_BYTES (1u << 20)
#define QC_DIRECT_DEPTH       4u

typedef struct qc_direct_reader qc_direct_reader;

QC_NODISCARD qc_status qc_direct_create(qc_direct_reader **out, qc_error *err);
void qc_direct_destroy(qc_direct_reader *d); /* NULL is fine */
/* Start on [offset, offset + bytes) of f; what was under way before is given up. 0: cannot. */
int qc_direct_begin(qc_direct_reader *d, const qc_file *f, uint64_t offset, uint64_t bytes);
/* The range is done with: nothing is under way any more, and the file is not held open. */
void qc_direct_end(qc_direct_reader *d);
/* len bytes at offset of f to dst. 0 where they are not what comes next of the range (what lies up
 * to a chunk behind may be there still), or could not be read; dst is undefined then. */
int qc_direct_read(qc_direct_reader *d, const qc_file *f, void *dst, size_t len, uint64_t offset);

#endif

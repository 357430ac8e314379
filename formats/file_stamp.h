/* What a file was when it was opened, to find out later whether it is still the same.
 *
 * Size and modification time tell. A write within the same tick of the file system's clock (some
 * milliseconds) as the write before does not change the time. Whether the path leads to another
 * file by now is told by comparing device and inode of the path and of the open file at the time of
 * the check, never those of the opening, because some network and user-space file systems number
 * files anew. Thread-safe. */
#ifndef QC_FORMATS_FILE_STAMP_H
#define QC_FORMATS_FILE_STAMP_H

#include "formats/file_io.h"

typedef struct {
    uint64_t bytes;
    int64_t modified_ns; /* since 1970 */
} qc_file_stamp;

/* Of the open file. */
QC_NODISCARD qc_status qc_file_stamp_take(qc_file_stamp *out, const qc_file *f, qc_error *err);
/* QC_OK if the open file, and the file that f->path leads to, are what the stamp was taken of.
 * Otherwise QC_ERR_CHANGED, with the path and what the file was and is; QC_ERR_IO when it cannot be
 * told. */
QC_NODISCARD qc_status qc_file_stamp_check(const qc_file_stamp *s, const qc_file *f, qc_error *err);

#endif

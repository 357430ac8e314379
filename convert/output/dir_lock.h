/* Locks of the staging folder (convert/output/output_dir.h, convert/run/part_run.h). They are
 * flock's, which end with the process that holds them, however it ends. */
#ifndef QC_CONVERT_DIR_LOCK_H
#define QC_CONVERT_DIR_LOCK_H

#include "formats/file_io.h"

/* Locks an open file, shared or alone, without waiting; *busy says that somebody else holds it. A
 * file system that has no locks is QC_ERR_IO, because without a lock two runs would mix. */
QC_NODISCARD qc_status qc_dir_lock_try(const qc_file *f, int shared, int *busy, qc_error *err);
/* Is the open file the one that its name leads to? */
int qc_dir_lock_has_its_name(const qc_file *f);
/* Returns the process that holds the lock of a file alone. 0 where nobody does, or where the system
 * does not know it: on another machine, in another container, on some file systems. */
long qc_dir_lock_holder(const qc_file *f);
/* Waits 20 ms, or less when a signal comes. */
void qc_dir_lock_pause(void);

#endif

/* Locks of the staging folder (convert/output/output_dir.h, convert/run/part_turn.h): flock's,
 * which end with the process that holds them, however it ends. */
#ifndef QC_CONVERT_DIR_LOCK_H
#define QC_CONVERT_DIR_LOCK_H

#include "formats/file_io.h"

/* Lock an open file, shared or alone, without waiting; *busy: somebody else holds it. A file system
 * that has no locks is QC_ERR_IO: without one two runs would mix. */
QC_NODISCARD qc_status qc_dir_lock_try(const qc_file *f, int shared, int *busy, qc_error *err);
/* Is the open file the one that its name leads to? */
int qc_dir_lock_has_its_name(const qc_file *f);
/* The process that holds the lock of a file alone, or 0: nobody does, or the system does not know
 * it (of another machine, of another container, of some file systems). */
long qc_dir_lock_holder(const qc_file *f);
/* 20 ms, or less when a signal comes. */
void qc_dir_lock_pause(void);

#endif

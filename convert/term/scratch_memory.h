/* Memory for what is computed and thrown away: up to a limit it is the process's own, and beyond it
 * a mapped file without a name, which the system writes to the disk as it needs room. */
#ifndef QC_CONVERT_SCRATCH_MEMORY_H
#define QC_CONVERT_SCRATCH_MEMORY_H

#include "formats/file_io.h"

typedef struct {
    void *base; /* 64-byte aligned; contents are not set */
    size_t bytes;
    qc_file file;
    int is_file;
} qc_scratch_memory;

/* dir: where the file is made, if bytes are more than `most`. Its room on the disk is taken at
 * once, because a mapped page that finds none would end the process by a signal: QC_ERR_NOSPACE
 * says "DIR: the disk has no room for 12.3 GB of WHAT; make room, or ADVICE". Close it also after a
 * failure. */
QC_NODISCARD qc_status qc_scratch_memory_open(qc_scratch_memory *out, uint64_t bytes, uint64_t most,
                                              const char *dir, const char *what, const char *advice,
                                              qc_error *err);
void qc_scratch_memory_close(qc_scratch_memory *s); /* accepts zeros */

#endif

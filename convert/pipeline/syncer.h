/* The syncer brings staged shards and the journal to the disk while the workers go on.
 *
 * It has a thread of its own, so that no worker ever waits for the disk. About once a second it
 * brings every shard that was written to since the last time to the disk, and then the journal.
 * Complete shards are closed here.
 *
 * A large shard goes to the disk in steps, with a look at the interrupt flag between them, because
 * a slow disk must not hold up a Ctrl-C. Nothing is lost by stopping: what is in the page cache
 * outlives the process, and whoever goes on brings it to the disk. */
#ifndef QC_CONVERT_SYNCER_H
#define QC_CONVERT_SYNCER_H

#include "convert/pipeline/pipeline.h"

/* Starts the thread. If the thread fails, it sets p->halted, and qc_syncer_finish returns its
 * error. */
QC_NODISCARD qc_status qc_syncer_start(qc_syncer **out, qc_pipeline *p, qc_error *err);
/* The workers have ended with the status `ended`. If that is QC_OK, this brings everything to the
 * disk, or returns QC_ERR_INTERRUPTED. Otherwise it only stops the thread. It returns what went
 * wrong first: the syncer's own error rather than QC_ERR_INTERRUPTED of the workers, and any other
 * error of theirs rather than the syncer's. It frees s. */
QC_NODISCARD qc_status qc_syncer_finish(qc_syncer *s, qc_status ended, qc_error *err);

#endif

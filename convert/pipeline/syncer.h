/* Brings staged shards and the journal to the disk while the workers go on.
 *
 * A thread of its own, so that no worker ever waits for the disk: about once a second it takes the
 * journal's length, brings every shard that was written to since the last time to the disk, then
 * the journal. What lies in the journal before that length is then durable, and so are the frames
 * that it speaks of; who wants to know is told (qc_pipeline.durable). Shards that are complete are
 * closed here.
 *
 * A large shard goes in steps, with a look at the interrupt flag between them: a slow disk must not
 * hold up a Ctrl-C. Nothing is lost by stopping: what is in the page cache outlives the process,
 * and whoever goes on brings it to the disk. */
#ifndef QC_CONVERT_SYNCER_H
#define QC_CONVERT_SYNCER_H

#include "convert/pipeline/pipeline.h"

/* Starts the thread. A failure of it sets p->halted, and is returned by qc_syncer_finish. */
QC_NODISCARD qc_status qc_syncer_start(qc_syncer **out, qc_pipeline *p, qc_error *err);
/* Another round, from its beginning to its end, or until the thread has ended: by a worker. */
void qc_syncer_round(qc_syncer *s);
/* The workers have ended. ended OK: everything is brought to the disk, or
 * QC_ERR_INTERRUPTED. Otherwise the thread is only stopped. Returns what went wrong first: the
 * syncer's own error goes before QC_ERR_INTERRUPTED of workers, any other of theirs before it.
 * Frees s. */
QC_NODISCARD qc_status qc_syncer_finish(qc_syncer *s, qc_status ended, qc_error *err);

#endif

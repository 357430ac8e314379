/* One part of a conversion: how it enters the staging folder, which shards of the pipeline are its
 * own, and which part completes OUT. The parts share the folder, on one machine or many:
 *
 *   OUT/.qconv-partial/lock                 shared by all parts; a run without parts holds it alone
 *                     /lock-00002-of-00004  while part 2 runs (both: convert/output/output_dir.h)
 *                     /lock-turn            held to enter, and to look whether all are through
 *                     /journal-00002-of-00004   what part 2 has done (convert/run/resume.h)
 *
 * The locks are flock's: they end with the process that holds them, however it ends. On file
 * systems that several machines share they hold on all of these machines (docs/cluster.md says on
 * which file systems). They are taken in this order.
 *
 * No part waits for another's work. A part holds the turn while it looks at journals, and the part
 * that finds all of them done holds it while it completes OUT. A part that wants the turn meanwhile
 * waits for that, and completes OUT itself should the other process die. So the last part that is
 * through always notices: it looks after it has recorded that it is done, and nobody else looks at
 * the same time.
 *
 * The staging folder is cleared under the turn. A process that gets the turn and finds that its
 * files are gone (*gone) came too late: OUT was completed, or given up.
 *
 * Not thread-safe. */
#ifndef QC_CONVERT_PART_RUN_H
#define QC_CONVERT_PART_RUN_H

#include "convert/output/output_dir.h"
#include "convert/pipeline/pipeline.h"
#include "convert/run/part_rank.h"
#include "convert/run/resume.h"

/* Waits for the turn. After five seconds one warning says what it waits for: the file, and the
 * process that holds its lock, where the system knows it. d has been opened by qc_output_dir_open.
 * must_be is a file of the staging folder, or NULL; if it is missing, everything is gone. Where
 * *gone is not 0, the turn is not held, and d's lock may have lost its name. QC_ERR_INTERRUPTED may
 * come while it waits. qc_file_discard gives it back. */
QC_NODISCARD qc_status qc_part_turn_take(qc_file *turn, const qc_output_dir *d, const char *must_be,
                                         const qc_call *call, int *gone, qc_error *err);

/* Does what others left in the staging folder fit this conversion? A run without parts asks as 0 of
 * 1, and a part holds the turn. identity is this conversion's (qc_identity_make).
 *
 * Journals of another number of parts, and other parts' journals with another identity, are
 * QC_ERR_USAGE or QC_ERR_INPUT, naming the difference and --restart. With restart they are removed
 * instead, and so is the caller's own; but a part that runs now is QC_ERR_USAGE.
 * Journals of other parts with this identity stay in any case: each part begins anew for itself. */
QC_NODISCARD qc_status qc_parts_check_others(const qc_output_dir *d, qc_rank rank, int restart,
                                             const char *identity, size_t identity_bytes,
                                             qc_error *err);
/* Is there a journal of any part, of any number of parts, in the folder? */
QC_NODISCARD qc_status qc_parts_have_journal(int *yes, const qc_output_dir *d, qc_error *err);

/* What is known of the weights that OUT, which looks complete, was made of. */
typedef enum { QC_WEIGHTS_UNKNOWN, QC_WEIGHTS_SAME, QC_WEIGHTS_OTHER } qc_weights_known;

typedef struct {
    qc_rank rank;
    const qc_plan *plan;
    const qc_convert_options *options;
    qc_output_dir *d; /* set by qc_part_open */
    qc_file turn;
    qc_share share;
    unsigned *left; /* parts that are not done, in rising order; in the plan's arena */
    unsigned left_count;
    qc_weights_known weights;
    qc_digest weights_of; /* digest of OUT's manifest when its weights were looked at */
    int committing;       /* a process died while it completed OUT: */
    qc_digest manifest;
    unsigned committer; /* the part whose journal says so, else this one */
} qc_part_run;

#define QC_PART_RUN_NONE ((qc_part_run){.rank = {0, 1}, .turn = {-1, NULL}})

/* Deals out the plan's shards and says with -v how. It has to be called first. For a rank of 0 of 1
 * none of these does anything but open the folder. */
QC_NODISCARD qc_status qc_part_begin(qc_part_run *r, qc_rank rank, const qc_plan *plan,
                                     const qc_convert_options *options, qc_error *err);
/* Opens OUT in d, which r keeps; with several parts, the turn is held on return. *complete says
 * that OUT is already there and of this conversion; then nothing is held or left behind. A finished
 * output of another conversion is QC_ERR_USAGE without --force. With --restart, what this process
 * did before is removed. It refuses what qc_output_dir_open and qc_parts_check_others refuse. */
QC_NODISCARD qc_status qc_part_open(qc_part_run *r, qc_output_dir *d, int *complete, qc_error *err);
/* Lets other parts enter, now that the journal is open. The exception is r->committing, which says
 * that a process died while it completed OUT: that has to go on at once. From here on the other
 * parts' shards of p are foreign. */
void qc_part_opened(qc_part_run *r, qc_pipeline *p, const qc_resume *resume);
/* Is all of this part done, and are its shards there (or on their way to OUT), so that nothing has
 * to be checked? */
int qc_part_is_done(const qc_part_run *r, const qc_pipeline *p, const qc_resume *resume);
/* Takes the turn after DONE was recorded, and takes what the others' journals hold into p.
 * *complete says that another process completed OUT meanwhile. Otherwise r->left has the parts that
 * are still to come, and the turn is held until qc_part_leave or qc_part_close. If none is to come,
 * this part completes OUT, or goes on with completing it (r->committing). */
QC_NODISCARD qc_status qc_part_look_around(qc_part_run *r, qc_pipeline *p, qc_resume *resume,
                                           int *complete, qc_error *err);
/* Lets go of the turn, the part and the folder, and leaves what is there for whoever goes on. */
void qc_part_leave(qc_part_run *r);
/* Removes the staging folder, because OUT is complete, and gives the turn back. */
void qc_part_close(qc_part_run *r);
/* Gives up what this part made, and the staging folder with it unless others have work in there. p
 * may be a pipeline that was never made. */
void qc_part_abort(qc_part_run *r, const qc_pipeline *p);

#endif

/* How the parts of one conversion share its staging folder, on one machine or many.
 *
 *   OUT/.qconv-partial/lock                 shared by all parts; a run without parts holds it alone
 *                     /lock-00002-of-00004  while part 2 runs (both: convert/output/output_dir.h)
 *                     /lock-turn            held to enter, and to look whether all are through
 *                     /journal-00002-of-00004   what part 2 has done (convert/run/resume.h)
 *
 * The locks are those of flock: they end with the process that holds them, however it ends. On file
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
#ifndef QC_CONVERT_PART_TURN_H
#define QC_CONVERT_PART_TURN_H

#include "convert/output/output_dir.h"
#include "convert/run/parts.h"
#include "convert/term/call.h"

/* Waits for the turn. After five seconds one warning says what it waits for: the file, and the
 * process that holds its lock, where the system knows it. d has been opened by qc_output_dir_open.
 * must_be is a file of the staging folder, or NULL; if it is missing, everything is gone. Where
 * *gone is not 0, the turn is not held, and d's lock may have lost its name. QC_ERR_INTERRUPTED may
 * come while it waits. */
QC_NODISCARD qc_status qc_part_turn_take(qc_file *turn, const qc_output_dir *d, const char *must_be,
                                         const qc_call *call, int *gone, qc_error *err);
/* Gives the turn back. The file may be closed. */
void qc_part_turn_give(qc_file *turn);

/* Does what others left in the staging folder fit this conversion? A run without parts asks as 0 of
 * 1, and a part holds the turn. identity is that of this conversion (qc_identity_make).
 *
 * Journals of another number of parts, and other parts' journals with another identity, are
 * QC_ERR_USAGE or QC_ERR_INPUT, naming the difference and --restart. With restart they are removed
 * instead, and so is the caller's own; but a part that runs now is QC_ERR_USAGE.
 * Journals of other parts with this identity stay in any case: each part begins anew for itself. */
QC_NODISCARD qc_status qc_parts_check_others(const qc_output_dir *d, qc_rank rank, int restart,
                                             const char *identity, size_t identity_bytes,
                                             qc_error *err);
/* Removes the journals of all parts. QC_ERR_USAGE when a part other than rank's runs now. */
QC_NODISCARD qc_status qc_parts_remove_journals(const qc_output_dir *d, qc_rank rank,
                                                qc_error *err);
/* Is there a journal of any part, of any number of parts, in the folder? */
QC_NODISCARD qc_status qc_parts_have_journal(int *yes, const qc_output_dir *d, qc_error *err);

#endif

/* Parts of one conversion beside each other in its staging folder, on one machine or many.
 *
 *   OUT/.qconv-partial/lock                  shared by all parts; a whole run holds it alone
 *                     /turn.lock             who enters, and who looks whether all are through
 *                     /part-00002-of-00004.lock   while part 2 runs
 *                     /journal-00002-of-00004     what part 2 has done (convert/resume.h)
 *
 * Locks are flock's: they end with the process that holds them, however it ends, and on file
 * systems that machines share they count on all of them (docs/cluster.md says which do). Lock
 * order: lock, part, turn.
 *
 * No part waits for another's work. A turn is held to look at journals and, by the last part, to
 * complete OUT: whoever wants it meanwhile waits for that, and goes on with it should that process
 * die. `lock` and turn.lock are the last that is removed of a staging folder, in this order, under
 * the turn: who got the turn and finds that one of them lost its name came too late, and begins
 * again.
 *
 * Not thread-safe. */
#ifndef QC_CONVERT_PART_HOLD_H
#define QC_CONVERT_PART_HOLD_H

#include "convert/parts.h"
#include "formats/file_io.h"

typedef struct {
    qc_arena *arena; /* borrowed */
    const char *out; /* for messages; borrowed */
    const char *staging;
    const qc_file *lock; /* of the staging folder, held shared; borrowed */
    qc_rank rank;
    qc_file own, turn;
} qc_part_hold;

#define QC_PART_HOLD_NONE ((qc_part_hold){.own = {-1, NULL}, .turn = {-1, NULL}})

/* Become the part: its lock, then the turn, which is held on return. QC_ERR_USAGE when this part
 * runs already. *gone: the staging folder was removed meanwhile; begin again (nothing is held).
 * QC_ERR_INTERRUPTED while waiting. */
QC_NODISCARD qc_status qc_part_enter(qc_part_hold *h, qc_arena *arena, const char *out,
                                     const char *staging, const qc_file *lock, qc_rank rank,
                                     int *gone, qc_error *err);
/* The turn again, after it was given back. *gone: OUT was completed, or given up, by others. */
QC_NODISCARD qc_status qc_part_take_turn(qc_part_hold *h, int *gone, qc_error *err);
void qc_part_give_turn(qc_part_hold *h);
/* Gives everything back; fine when nothing is held. */
void qc_part_leave(qc_part_hold *h);

/* Does what others left in the staging folder go with this? rank: who asks; a whole run asks as 0
 * of 1 and holds the lock alone, a part holds the turn.
 *
 * Journals of another number of parts, or (for parts) of another identity, are QC_ERR_USAGE or
 * QC_ERR_INPUT, naming the difference and --restart. With restart they are removed instead, and so
 * is this part's own; but not those of a part that runs now: QC_ERR_USAGE. Journals of other parts
 * of the same identity stay in any case: each part begins anew for itself. */
QC_NODISCARD qc_status qc_parts_check_others(qc_arena *arena, const char *out, const char *staging,
                                             qc_rank rank, int restart, const char *identity,
                                             size_t identity_bytes, qc_error *err);
/* Is there a journal in the folder? Of any part of any number. */
QC_NODISCARD qc_status qc_parts_have_journal(int *yes, const char *staging, qc_error *err);

#endif

/* One part of a conversion: how it enters the staging folder, which shards of the pipeline are its
 * own, and which part completes OUT. Locks and turns are in convert/run/part_turn.h. */
#ifndef QC_CONVERT_PART_RUN_H
#define QC_CONVERT_PART_RUN_H

#include "convert/fit/fit.h"
#include "convert/pipeline/pipeline.h"
#include "convert/run/part_turn.h"
#include "convert/run/resume.h"

typedef struct {
    qc_rank rank;
    const qc_call *call;
    const qc_convert_options *options;
    qc_file turn;
    uint32_t *part_of; /* per shard; NULL: all are this process's; in the plan's arena */
    unsigned *left;    /* parts that are not done, in rising order; in the plan's arena */
    unsigned left_count;
    int committing; /* a process died while it completed OUT: */
    qc_digest manifest;
    unsigned committer; /* the part whose journal says so, else this one */
} qc_part_run;

#define QC_PART_RUN_NONE ((qc_part_run){.rank = {0, 1, QC_RANK_ALONE}, .turn = {-1, NULL}})

/* Deals out the plan's shards and says with -v how. It has to be called first. For a rank of 0 of 1
 * none of these does anything but open the folder. */
QC_NODISCARD qc_status qc_part_begin(qc_part_run *r, qc_rank rank, const qc_plan *plan,
                                     const qc_convert_options *options, qc_error *err);
/* Opens OUT; with several parts, the turn is held on return. *complete says that OUT is already
 * there and of this conversion; then nothing is held or left behind. A finished output of another
 * conversion is QC_ERR_USAGE without --force. With --restart, what this process did before is
 * removed. It refuses what qc_output_dir_open and qc_parts_check_others refuse. */
QC_NODISCARD qc_status qc_part_open(qc_part_run *r, qc_output_dir *d, const qc_plan *plan,
                                    const qc_fit *fit, int *complete, qc_error *err);
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
QC_NODISCARD qc_status qc_part_look_around(qc_part_run *r, qc_output_dir *d, qc_pipeline *p,
                                           qc_resume *resume, const qc_fit *fit, int *complete,
                                           qc_error *err);
/* Lets go of the turn, the part and the folder, and leaves what is there for whoever goes on. */
void qc_part_leave(qc_part_run *r, qc_output_dir *d);
/* Removes the staging folder, because OUT is complete, and gives the turn back. */
void qc_part_close(qc_part_run *r, qc_output_dir *d);
/* Gives up what this part made, and the staging folder with it unless others have work in there. p
 * may be a pipeline that was never made. */
void qc_part_abort(qc_part_run *r, qc_output_dir *d, const qc_pipeline *p);
/* Fills in what a report says while other parts are still to come: the worst weight and the bytes
 * of this part. */
void qc_part_fill_report(const qc_part_run *r, const qc_pipeline *p, qc_convert_report *report);

#endif

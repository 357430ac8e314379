/* A part of a conversion: how it comes in, what of the pipeline is its own, and who completes OUT.
 * Locks and turns: convert/run/part_turn.h. */
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
    uint32_t *part_of; /* per shard, or NULL: all are this process's; in the plan's arena */
    unsigned *left;    /* parts that are not done, rising; in the plan's arena */
    unsigned left_count;
    int committing; /* somebody died while he completed OUT: */
    qc_digest manifest;
    unsigned committer; /* the part whose journal says so; else this one */
} qc_part_run;

#define QC_PART_RUN_NONE ((qc_part_run){.rank = {0, 1, QC_RANK_ALONE}, .turn = {-1, NULL}})

/* Deals out the plan's shards and says with -v how. It has to be called first. For a rank of 0 of 1
 * none of these does anything but open the folder. */
QC_NODISCARD qc_status qc_part_begin(qc_part_run *r, qc_rank rank, const qc_plan *plan,
                                     const qc_convert_options *options, qc_error *err);
/* Opens OUT; with several parts, the turn is held on return. *complete says that OUT is there
 * already and of this conversion; nothing is then held or left behind. A finished output of another
 * conversion is QC_ERR_USAGE without --force. With --restart what this process did before is removed.
 * It refuses what qc_output_dir_open and qc_parts_check_others refuse. */
QC_NODISCARD qc_status qc_part_open(qc_part_run *r, qc_output_dir *d, const qc_plan *plan,
                                    const qc_fit *fit, int *complete, qc_error *err);
/* Lets others come in, now that the journal is open; unless r->committing says that somebody died
 * while he completed OUT, because that has to go on at once. The other parts' shards of p are foreign
 * from here on. */
void qc_part_opened(qc_part_run *r, qc_pipeline *p, const qc_resume *resume);
/* Is all of this part done, and are its shards there (or on their way to OUT), so that nothing needs
 * to be looked at? */
int qc_part_is_done(const qc_part_run *r, const qc_pipeline *p, const qc_resume *resume);
/* Takes the turn after DONE was recorded, and takes what the others' journals hold into p. *complete
 * says that somebody completed OUT meanwhile. Else r->left says who is still to come, and the turn is
 * held until qc_part_leave or qc_part_close; if nobody is to come, this part completes OUT, or goes
 * on with that (r->committing). */
QC_NODISCARD qc_status qc_part_look_around(qc_part_run *r, qc_output_dir *d, qc_pipeline *p,
                                           qc_resume *resume, const qc_fit *fit, int *complete,
                                           qc_error *err);
/* Lets go of the turn, the part and the folder, and leaves what is there for whoever goes on. */
void qc_part_leave(qc_part_run *r, qc_output_dir *d);
/* Removes the staging folder, because OUT is complete, and gives the turn back. */
void qc_part_close(qc_part_run *r, qc_output_dir *d);
/* Gives up what this part made, and the staging folder with it unless others have work in there. p
 * may be one that was never made. */
void qc_part_abort(qc_part_run *r, qc_output_dir *d, const qc_pipeline *p);
/* Fills in what a report says while parts are to come: the worst weight and the bytes of this one. */
void qc_part_fill_report(const qc_part_run *r, const qc_pipeline *p, qc_convert_report *report);

#endif

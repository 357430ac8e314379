/* What becomes of a conversion's staging folder when it ends, whichever way that is: one table of
 * why it ended and what there was (convert/run/ending.c; docs/architecture.md has its picture).
 * Pure. */
#ifndef QC_CONVERT_ENDING_H
#define QC_CONVERT_ENDING_H

#include "base/status.h"

/* Why it ended. */
typedef enum {
    QC_END_DONE,    /* this process did all that it had to do */
    QC_END_STOPPED, /* an interruption, a full disk, a lost device: the same command may succeed */
    QC_END_CHANGED, /* the source changed while it was read: as QC_END_STOPPED */
    QC_END_MISFIT,  /* what an earlier run left is not what this one makes: --restart helps */
    QC_END_REFUSED  /* the input or the command is bad: the same command fails again */
} qc_end;

/* What there was when it ended, as a set. */
enum {
    QC_ENDING_JOURNAL = 1,      /* a journal lay in the folder before this process opened it */
    QC_ENDING_OPENED = 2,       /* this process opened its journal */
    QC_ENDING_WORK = 4,         /* it holds finished work, of this run or an earlier one */
    QC_ENDING_WORKED = 8,       /* this process began to make frames */
    QC_ENDING_PART_MADE = 16,   /* it is one part of several and has made all of it */
    QC_ENDING_OTHERS_LEFT = 32, /* other processes' parts are still to come */
    QC_ENDING_FACTS = 63        /* all of them */
};

typedef enum {
    QC_STAGING_CLOSE, /* OUT is complete: the folder goes */
    QC_STAGING_LEAVE, /* it stays for whoever goes on */
    QC_STAGING_DROP   /* what this process made goes */
} qc_staging_fate;

typedef struct {
    qc_staging_fate fate;
    int tell; /* the message says how much is done, and that the same command continues */
} qc_ending;

/* misfit says that it is QC_END_MISFIT, which the status alone does not tell. */
qc_end qc_end_of(qc_status status, int misfit);
qc_ending qc_ending_of(qc_end end, unsigned facts);

#endif

/* What the files resume*.c share. Nobody else includes this. */
#ifndef QC_CONVERT_RESUME_INTERNAL_H
#define QC_CONVERT_RESUME_INTERNAL_H

#include "convert/pipeline/pipeline.h"
#include "convert/run/resume.h"

struct qc_resume {
    qc_pipeline *p;
    qc_output_dir *d;
    qc_arena arena;
    const char *path; /* the path of the journal */
    qc_journal *journal;
    qc_recorder recorder; /* given to the pipeline; writes to this journal */
    qc_strbuf identity;   /* identity of this run */
    uint64_t *times;      /* times of the source's files as recorded, in nanoseconds */
    uint64_t *times_now;  /* the same as they are now */
    int has_identity, has_times;
    int times_due;         /* times_now is to be recorded when all is made */
    int has_work;          /* a job was recorded before this run */
    atomic_int recorded;   /* this run recorded a job */
    uint32_t begun_before; /* jobs that an earlier run began */
    qc_resume_found found;
};

/* Is this unit kept from an earlier run of this part, and so in a staged shard of its own? */
int qc_resume_is_ours(const qc_pipeline *p, uint32_t unit);
/* Counts what the journal kept and what has to be made again, into r->found. */
void qc_resume_count(qc_resume *r);
/* Takes one record into ctx, which is a qc_resume, and its pipeline. It is a qc_journal_fn. */
QC_NODISCARD qc_status qc_resume_take_record(void *ctx, const qc_journal_record *record,
                                             qc_error *err);
/* Records that work on a weight begins. */
QC_NODISCARD qc_status qc_resume_add_begin(void *resume, uint32_t job, qc_error *err);
/* Records the times of the source's files as they are now. */
QC_NODISCARD qc_status qc_resume_add_times(qc_resume *r, qc_error *err);

#endif

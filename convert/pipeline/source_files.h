/* The weight files of a source while it is converted: who reads them, and whether they are still
 * what was opened.
 *
 * A job reads one or a few tensors of the source (its weight, and the scales of one that is stored
 * as codes), which may lie in several files. When it has read all of them, and before it is
 * recorded as done, those files are looked at: one that changed meanwhile (size, modification time,
 * another file under its name) ends the conversion, because what was read may be half old and half
 * new. So what is recorded was read from the files as they were opened, whatever happens to them
 * later. Before the output is committed all files are looked at again.
 *
 * Thread-safe: everything but init and deinit. */
#ifndef QC_CONVERT_SOURCE_FILES_H
#define QC_CONVERT_SOURCE_FILES_H

#include "convert/plan/plan.h"

#include <stdatomic.h>

#define QC_JOB_TENSORS_MAX 6u

typedef struct {
    const qc_plan *plan;
    atomic_uint_fast32_t *left; /* per file: jobs that read it and are not done */
} qc_source_files;

/* The tensors of the source whose bytes are read to make job j (indices, each once). */
size_t qc_job_tensors(const qc_job *j, uint32_t out[QC_JOB_TENSORS_MAX]);
/* The files they lie in (indices, each once). None for a weight without elements. */
size_t qc_job_files(const qc_plan *plan, uint32_t job, uint32_t out[QC_JOB_TENSORS_MAX]);

/* All jobs of the plan are to come. Owns heap; deinit is fine on what is zero. */
QC_NODISCARD qc_status qc_source_files_init(qc_source_files *s, const qc_plan *plan, qc_error *err);
void qc_source_files_deinit(qc_source_files *s);
/* The files of a job are what was opened, or QC_ERR_CHANGED: to be called between its last read and
 * its record. */
QC_NODISCARD qc_status qc_source_files_look(const qc_source_files *s, uint32_t job, qc_error *err);
/* A job is done, by this run or before: once per job, with elements or without. */
void qc_source_files_done(qc_source_files *s, uint32_t job);
/* Nothing reads the file any more. */
int qc_source_files_is_done(const qc_source_files *s, size_t file);
/* Every file is what was opened, or QC_ERR_CHANGED. */
QC_NODISCARD qc_status qc_source_files_check(const qc_plan *plan, qc_error *err);
/* The conversion failed with `failed`, and err says why: when a file changed meanwhile, that is why
 * (QC_ERR_CHANGED, err is replaced); else `failed`. What has nothing to do with the source's bytes
 * (an interruption, memory, room, a device) stays what it is. */
QC_NODISCARD qc_status qc_source_files_explain(const qc_plan *plan, qc_status failed,
                                               qc_error *err);

#endif

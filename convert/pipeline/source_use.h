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
 * Thread-safe. */
#ifndef QC_CONVERT_SOURCE_USE_H
#define QC_CONVERT_SOURCE_USE_H

#include "convert/plan/plan.h"

#define QC_JOB_TENSORS_MAX 6u

/* Lists the tensors of the source whose bytes are read to make job j (as indices, each once). */
size_t qc_job_tensors(const qc_job *j, uint32_t out[QC_JOB_TENSORS_MAX]);
/* Checks that the files of a job are what was opened, else QC_ERR_CHANGED. This is to be called
 * between the job's last read and its record. */
QC_NODISCARD qc_status qc_source_files_look(const qc_plan *plan, uint32_t job, qc_error *err);
/* Checks that every file is what was opened, else QC_ERR_CHANGED. */
QC_NODISCARD qc_status qc_source_files_check(const qc_plan *plan, qc_error *err);
/* The conversion failed with `failed`, and err says why. If a file of the source has changed
 * meanwhile, that is the true reason: this returns QC_ERR_CHANGED and replaces err. Otherwise it
 * returns `failed`. A failure that has nothing to do with the source's bytes (an interruption,
 * memory, room, a device) stays what it is. */
QC_NODISCARD qc_status qc_source_files_explain(const qc_plan *plan, qc_status failed,
                                               qc_error *err);

#endif

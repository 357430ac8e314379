/* --consume-source deletes weight files of the source while the conversion goes on, for disks that
 * have room for one copy only.
 *
 * Before the conversion begins, the header of every weight file is written to journal-headers/ in
 * the staging folder and synced (formats/saved_header.h). A file goes when every job that reads it
 * is recorded (convert/run/resume.h), and when both those records and what they speak of are on the
 * disk. Then this happens, in this order:
 *
 *   1. the file is looked at: it must be what was opened
 *   2. its saved header is renamed to "-gone", synced; the file is looked at again
 *   3. the saved header is read, and takes the file's place here (qc_st_file_let_go)
 *   4. the file is deleted, and its folder is synced
 *
 * So at every moment either the file is there, or all that it held is in OUT's staging folder; and
 * none of the steps needs room. From step 4 on that folder is part of the only copy, and nothing
 * may remove it but the commit.
 *
 * When a run goes on with such a conversion, a file that is missing is opened by its saved header,
 * if that says that the file is gone. What was written of it can be looked at, but not made again.
 *
 * Threads: the hook runs on the syncer's thread; the rest runs before and after the team. */
#ifndef QC_CONVERT_CONSUME_H
#define QC_CONVERT_CONSUME_H

#include "convert/pipeline/pipeline.h"
#include "convert/pipeline/source_use.h"
#include "convert/run/convert_options.h"

typedef struct qc_consume qc_consume;

/* Reads what OUT's staging folder keeps of files that are gone, for qc_checkpoint_open_saved.
 * *count is 0 where there is no such folder. Everything lives in the arena. */
QC_NODISCARD qc_status qc_consume_saved(qc_saved_header **out, size_t *count, qc_arena *arena,
                                        const char *out_dir, qc_error *err);
/* May the staging folder of out_dir be thrown away? When files whose headers it keeps are no longer
 * where they were, this is QC_ERR_USAGE with what would be lost. */
QC_NODISCARD qc_status qc_consume_check_restart(qc_arena *arena, const char *out_dir,
                                                qc_error *err);
/* Where the conversion in out_dir (may be NULL) has deleted files of its source that are not back,
 * this cuts QC_RESTART_ADVICE out of a message, and tells the user to keep what is there
 * instead. */
void qc_consume_mend_advice(qc_arena *arena, const char *out_dir, qc_error *err);
/* Can this source be consumed? Every weight file must be a regular safetensors file with one name,
 * reached without links below MODEL, in a folder that may be written to (QC_ERR_USAGE names the
 * file). The plan must follow from headers alone, or it could not be made again: so --to auto and
 * weights that bitsandbytes quantized are refused. The files are locked (flock) while they are
 * open, so another conversion that would consume them gets QC_ERR_USAGE. */
QC_NODISCARD qc_status qc_consume_check(const qc_plan *plan, const qc_convert_options *o,
                                        qc_error *err);
/* Sets *bytes to what the disk of OUT must have free for the work that is left of p (uncompressed),
 * when weight files that lie on that disk are deleted as jobs are done in order. It is the most by
 * which the bytes written are ahead of the bytes freed. */
QC_NODISCARD qc_status qc_consume_room(const qc_pipeline *p, uint64_t *bytes, qc_error *err);
/* Has any file of the checkpoint been deleted, by this run or before? */
int qc_consume_any(const qc_checkpoint *model);

/* Is OUT whole, and was it made of this MODEL, whose weight files were deleted meanwhile? Then the
 * command that made it has nothing left to do. */
QC_NODISCARD qc_status qc_consume_is_over(int *yes, const qc_call *call,
                                          const qc_convert_options *o, qc_error *err);

/* model is the checkpoint of p, and it changes, because its files are let go of. p has a journal,
 * which has been checked (qc_resume_check), and p has not run yet. */
QC_NODISCARD qc_status qc_consume_create(qc_consume **out, qc_pipeline *p, qc_checkpoint *model,
                                         qc_error *err);
/* Is called before the team starts. It brings what an earlier run left to the disk, and deletes the
 * files that are done with, so that there is room for the rest. */
QC_NODISCARD qc_status qc_consume_begin(qc_consume *c, qc_error *err);
/* The hook, which is a qc_durable_fn whose ctx is the qc_consume. */
QC_NODISCARD qc_status qc_consume_durable(void *ctx, uint64_t journal_bytes, qc_error *err);
/* Is called after a run that succeeded, when everything is recorded and on the disk, and deletes
 * what is left. After it the checkpoint may be used again, as far as its files are there. */
QC_NODISCARD qc_status qc_consume_finish(qc_consume *c, qc_error *err);
/* Counts the files that this run deleted, and their bytes. */
uint32_t qc_consume_count(const qc_consume *c, uint64_t *bytes);
/* NULL is fine. The checkpoint may be used again, as after qc_consume_finish. */
void qc_consume_destroy(qc_consume *c);

#endif

/* How a conversion that was interrupted is continued.
 *
 * OUT/.qconv-partial/ keeps, beside the staged shards, a journal (formats/journal.h) of what is
 * finished: journal-00001-of-00001, or -I-of-N for part I of N. The same command reads it, checks
 * everything that it says, and does the rest. The output has the same bytes as after a run without
 * interruption, because the bytes of a frame depend only on the source and the options, and its
 * place only on the frames before it.
 *
 * Records, in the order in which they come (integers little-endian):
 *   IDENTITY  text, lines "key=value": what the bytes of the output depend on. It comes first.
 *   TIMES     of the source's files, in the checkpoint's order: u64 modification time in
 *             nanoseconds, u64 bytes. The last such record counts.
 *   JOB       a finished weight with what is derived from it: see below. It is redone as a
 *             whole, or not at all.
 *   UNIT      one frame that was not finished with its job: a shard's header, or a derived tensor
 *             in its turn.
 *   SHARD     all frames of a shard are written, and its table: u32 shard, u64 file bytes, u64
 *             table bytes, digest of the table.
 *   BEGIN     u32 job: work on a weight begins. Without a JOB after it the weight is made again.
 *   DONE      all that this process (part) had to make is finished and synced. No payload.
 *   COMMIT    files begin to move to OUT: digest of the manifest, which is staged and synced.
 *
 * unit:  u32 index, u32 stored bytes, u64 place in the shard's file, 3 digests (content, stored,
 *        source): QC_UNIT_RECORD_BYTES. index: into the pipeline's units, which the plan gives.
 * JOB:   u32 job, u32 units, u32 parts, f64 relative MSE, f64 largest error, u64 its index, f64
 *        and f64 its errors in outputs (calibrated weights, else 0), the units (main ones, and
 *        derived ones with a place kept free), and per part that is still to be written in its
 *        turn: u32 qc_role_tensor, u32 bytes, the bytes.
 *
 * What is recorded is in the page cache at least, and so outlives the process. A thread of the
 * pipeline brings shards and journal to the disk all the time (convert/pipeline/syncer.h), so that
 * little is lost when the machine dies. Nothing that a journal says is believed: every recorded
 * frame is read back and its digest compared before anything else happens. A weight that misses a
 * byte is made again; where only derived frames are missing, they are written again from its JOB
 * record.
 *
 * The identity has the keys "format", "qconv", "zstd" (compressed), "parts", options ("--to", ...),
 * "calibration", "plan" (digest of shards, tensors, frames and jobs), "source.N" (name, bytes, head
 * digest of file N) and "source.config". Threads, devices, code path, names of folders and
 * modification times are not in it. A difference in "source.*" is QC_ERR_INPUT, in the others
 * QC_ERR_USAGE; both name the key, the value then and now, and --restart. Where files
 * of the source have another modification time but the same sizes and heads, the source digests of
 * all that is recorded are computed anew first, and a difference is QC_ERR_INPUT naming file and
 * tensor. */
#ifndef QC_CONVERT_RESUME_H
#define QC_CONVERT_RESUME_H

#include "base/strbuf.h"
#include "convert/output/output_dir.h"
#include "convert/plan/plan.h"
#include "formats/journal.h"

struct qc_pipeline;

#define QC_RESUME_FORMAT     2u /* the format of the records; part of the identity */
#define QC_UNIT_RECORD_BYTES 64u
#define QC_JOURNAL_NAME      "journal-%05u-of-%05u" /* part 1..N, and N; alone it is 1 of 1 */

/* The types of records. Their values are pinned: only append. */
typedef enum {
    QC_RECORD_IDENTITY = 1,
    QC_RECORD_TIMES = 2,
    QC_RECORD_JOB = 3,
    QC_RECORD_UNIT = 4,
    QC_RECORD_SHARD = 5,
    /* 6 is not used */
    QC_RECORD_DONE = 7,
    QC_RECORD_COMMIT = 8,
    QC_RECORD_BEGIN = 9
} qc_record_type;

typedef struct qc_resume qc_resume;

/* What a journal held, and what became of it. */
typedef struct {
    int continued;        /* there was a journal with finished work */
    uint32_t jobs_kept;   /* weights and other tensors of the source */
    uint32_t jobs_redone; /* an earlier run began them; they were unfinished or damaged */
    uint64_t bytes_kept;  /* bytes of the source */
    uint64_t stored_kept; /* in staged shards */
    int done;             /* DONE was recorded */
    int committing;       /* COMMIT was: at most files remain to be moved */
    qc_digest manifest;   /* the digest that COMMIT recorded */
} qc_resume_found;

/* Makes the path of the journal of part `part_index` in a staging folder. */
QC_NODISCARD qc_status qc_resume_path(qc_arena *arena, const char **out, const char *staging,
                                      unsigned part_index, unsigned part_count, qc_error *err);
/* Reads of a journal only whether it ends with a commit: found->committing and found->manifest. A
 * journal that is not there has none. */
QC_NODISCARD qc_status qc_resume_read_commit(qc_resume_found *found, const char *path,
                                             qc_error *err);

/* Makes the identity of a conversion, as text. */
QC_NODISCARD qc_status qc_identity_make(qc_strbuf *out, const qc_plan *plan, unsigned part_count,
                                        qc_error *err);
/* Compares two identities: QC_OK if the texts are equal, else the error that is described above.
 * out is the folder that it names. Pure. */
QC_NODISCARD qc_status qc_identity_compare(const char *then, size_t then_bytes, const char *now,
                                           size_t now_bytes, const char *out, qc_error *err);

/* Opens the journal of part `part_index` (0..part_count-1) in d's staging folder, and takes what it
 * holds into p. The folder is locked (qc_output_dir_open) and holds no journals of another number
 * of parts (qc_parts_check_others); p has been made (qc_pipeline_init) and does not run yet. Only
 * the identity is checked here: qc_resume_check reads everything back before the pipeline goes on.
 * p records through r, so r must outlive p's run. A new journal gets its identity and times at
 * once, synced. d's own files and p must outlive r. */
QC_NODISCARD qc_status qc_resume_open(qc_resume **out, struct qc_pipeline *p, qc_output_dir *d,
                                      unsigned part_index, unsigned part_count, qc_error *err);
/* Reads back every unit that is kept and not foreign, on all threads, and takes out of p whatever
 * is not as it was recorded (found.jobs_redone). Where a file of the source has another time than
 * when it was recorded, its bytes are compared with the recorded digests first (QC_ERR_INPUT). Call
 * it once between qc_resume_open and qc_pipeline_run. progress may be NULL; it gets the bytes that
 * were read. (resume_check.c) */
QC_NODISCARD qc_status qc_resume_check(qc_resume *r, void (*progress)(void *ctx, uint64_t bytes),
                                       void *progress_ctx, qc_error *err);
/* Is there nothing left to do but to commit, because DONE was recorded and no file of the source
 * has had another time since? */
int qc_resume_is_done(const qc_resume *r);
/* Takes what another part's journal holds into p, which only reads it: the units in it are then
 * done, not read back, and not this process's. Of *found only done, committing and manifest are
 * set, and all of it is 0 where the journal is missing. A journal with another identity gives
 * the error of qc_identity_compare. If same_times is set, a journal that is done, but whose source
 * files have another time now, is QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_resume_take_part(qc_resume *r, unsigned part_index, unsigned part_count,
                                           int same_times, qc_resume_found *found, qc_error *err);
const qc_resume_found *qc_resume_found_of(const qc_resume *r);
/* Records DONE, once; everything is synced before and after. */
QC_NODISCARD qc_status qc_resume_done(qc_resume *r, qc_error *err);
/* Records COMMIT with the digest of the manifest that is staged, and syncs it. */
QC_NODISCARD qc_status qc_resume_commit(qc_resume *r, const qc_digest *manifest, qc_error *err);
/* Is there anything in the journal that the same command could go on with? */
int qc_resume_has_work(const qc_resume *r);
/* Closes the journal; NULL is fine. */
void qc_resume_close(qc_resume *r);

#endif

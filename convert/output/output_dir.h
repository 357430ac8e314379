/* The output directory as a transaction.
 *
 * Everything is written below OUT/.qconv-partial/ and synced there. Only when all is done, the
 * files move to their final names, the manifest last. So an OUT with a manifest is whole, and an
 * interrupted run leaves no file under a final name. A run holds a lock on the staging folder: two
 * runs into one OUT do not mix.
 *
 * What a dead run left in the staging folder is removed by the next, unless that goes on with it
 * (qc_output_dir_open; convert/run/resume.h). A file of the source may have the name of one of
 * qconv's own files in there ("lock", "lock-*", "journal-*"). It lies in a folder of its own until
 * it moves.
 *
 * When OUT already holds a qconv output, its manifest moves to the staging folder first, then the
 * files that it lists and the new output does not have are removed, and nothing else is: see
 * convert/output/output_replace.h. OUT is opened once, and what lies beneath it is reached from
 * there (formats/beneath.h), never through a link. A run that dies while its files move leaves an
 * OUT without a manifest, and its own below staging: the next run moves the rest, if it is the same
 * conversion, or takes that OUT for a qconv output and replaces it. Not thread-safe, but files
 * below `staging` may be written by anybody. */
#ifndef QC_CONVERT_OUTPUT_DIR_H
#define QC_CONVERT_OUTPUT_DIR_H

#include "convert/output/output_replace.h"

/* The end of messages about a conversion that cannot go on. */
#define QC_RESTART_ADVICE "; --restart begins anew"

typedef struct {
    qc_arena *arena; /* borrowed */
    const char *path;
    qc_file root; /* path, opened; what lies beneath it is reached from here, never through links */
    int force;
    const char *staging; /* where files are written until commit */
    qc_file lock;
    qc_file part_lock; /* the lock of a part; closed where there are no parts */
    unsigned parts;    /* parts that share `lock`; 1: it is exclusive */
    int had_journal;   /* a conversion that may go on left a journal */
    int lost;          /* a file that was to be moved is gone: only beginning anew helps */
    int made_dir;      /* OUT did not exist before */
    int moving;        /* a commit has begun and is not through */
    qc_manifest dead;  /* manifest of a run that died while it moved its files to OUT; or empty */
    qc_digest dead_digest; /* digest of its bytes; unset where dead.shard_count is 0 */
    qc_owned owned;        /* files of OUT that are qconv's and may be replaced */
    qc_name_list names;    /* staged files, relative */
} qc_output_dir;

#define QC_OUTPUT_DIR_NONE                                                                         \
    ((qc_output_dir){.root = {-1, NULL}, .lock = {-1, NULL}, .part_lock = {-1, NULL}})

/* Checks (qc_output_check) and prepares. QC_ERR_USAGE also where OUT holds a conversion that could
 * go on. */
QC_NODISCARD qc_status qc_output_dir_begin(qc_output_dir *d, qc_arena *arena, const char *out,
                                           const char *source, int force, qc_error *err);
/* Does the same as begin for a conversion that may go on: what the staging folder holds stays. With
 * a part_count of 1 the lock is exclusive, as begin's is. With more there is a shared lock, and an
 * exclusive one of its own for part_index (0..part_count-1), so that parts of one conversion share
 * the folder. A second process of the same part, and a whole run beside parts, are refused by
 * name (QC_ERR_USAGE). The locks are flock's, so a crash releases them. */
QC_NODISCARD qc_status qc_output_dir_open(qc_output_dir *d, qc_arena *arena, const char *out,
                                          const char *source, int force, unsigned part_index,
                                          unsigned part_count, qc_error *err);
/* Reads d->dead again, because another part may have died since. A manifest that is there and
 * cannot be read is QC_ERR_IO or QC_ERR_NOMEM; one that is damaged counts as none. */
QC_NODISCARD qc_status qc_output_dir_look_again(qc_output_dir *d, qc_error *err);
/* Says that nobody goes on with a run that died while its files moved. Which of them are in OUT
 * stays known. */
QC_NODISCARD qc_status qc_output_dir_forget_dead(qc_output_dir *d, qc_error *err);
/* Removes everything staged, the journal too. The lock stays, and so does the manifest of a run
 * that died while its files moved, because it tells others that they are qconv's. */
void qc_output_dir_clear(qc_output_dir *d);
/* Gives the path to write the file `name` (relative) to, and makes its folders. commit moves it. */
QC_NODISCARD qc_status qc_output_dir_stage(qc_output_dir *d, const char *name, const char **path,
                                           qc_error *err);
/* Stages a small file at once and syncs it. */
QC_NODISCARD qc_status qc_output_dir_put(qc_output_dir *d, const char *name, const void *bytes,
                                         size_t len, qc_error *err);
/* Copies a file to `name`, syncs it, and gives its size and digest. */
QC_NODISCARD qc_status qc_output_dir_copy(qc_output_dir *d, const char *name, const char *from,
                                          uint64_t *bytes, qc_digest *digest, qc_error *err);
/* Moves everything staged to its place, the manifest last, which the caller has written to
 * `staging`, whole and synced. Nothing of the old output is touched before. */
QC_NODISCARD qc_status qc_output_dir_move(qc_output_dir *d, qc_error *err);
/* Moves what a run that died during such a move (d->dead) had not moved yet. After it,
 * qc_output_dir_abort removes the staging folder as after a commit. QC_ERR_IO where a file is in
 * neither place. */
QC_NODISCARD qc_status qc_output_dir_move_on(qc_output_dir *d, qc_error *err);
/* Gives the digest of OUT's manifest; *there is 0 where OUT has none. */
QC_NODISCARD qc_status qc_output_dir_manifest(const qc_output_dir *d, int *there, qc_digest *digest,
                                              qc_error *err);
/* Lets go of the lock and leaves what is staged for the next run of the same command. */
void qc_output_dir_leave(qc_output_dir *d);
/* Removes what was staged, and OUT if it was made here. It may be called after commit and when
 * nothing was begun. A part leaves all of it where other parts are at work. So does a run that
 * failed while files moved, because what is staged then tells the next run that the files in OUT
 * are qconv's. */
void qc_output_dir_abort(qc_output_dir *d);

#endif

/* Finds out before the work begins what is in the way of an output in OUT, and what happens to
 * files there. */
#ifndef QC_CONVERT_OUTPUT_READY_H
#define QC_CONVERT_OUTPUT_READY_H

#include "convert/output/output_dir.h"
#include "convert/run/part_run.h"

/* Refuses what cannot be written or must not be replaced (qc_output_check_names), and says which
 * files --force replaces. names is sorted here. */
QC_NODISCARD qc_status qc_output_ready(const qc_call *call, int force, const qc_file *root,
                                       const qc_owned *owned, const char **names, size_t count,
                                       int dry_run, qc_error *err);
/* Does the same for the names of a plan, in d, which is open. */
QC_NODISCARD qc_status qc_output_ready_for(const qc_output_dir *d, const qc_plan *plan, int force,
                                           qc_error *err);
/* Is for --dry-run with an OUT: it refuses what the conversion would refuse, and says what it would
 * replace and delete. It touches nothing. */
QC_NODISCARD qc_status qc_output_preview(const qc_plan *plan, const qc_part_run *part,
                                         qc_error *err);
/* Is for --dry-run: would the output fit on the disk? */
QC_NODISCARD qc_status qc_output_preview_room(const qc_plan *plan, const qc_part_run *part,
                                              qc_error *err);

/* Does what is to be written fit on the disk of OUT?
 *
 * Without compression every size is known, and what is missing is told before anything is written.
 * With compression a sample of the source is compressed: an output that would not even fit if it
 * came out half as large, relative to its plain size, as the sample does is refused; one that fits
 * only if it is compressed is a warning. What an interrupted run has on the disk already counts as
 * there. An old output in OUT frees nothing: it goes when the new one is whole. */
typedef struct {
    const qc_plan *plan;
    const char *out;
    const uint32_t *part_of; /* per shard; NULL: all of them are made here */
    unsigned part_index;
    const qc_file *root; /* OUT, which is open; NULL while it does not exist */
    uint64_t calibrated; /* bytes that calibrated weights take beside the output */
} qc_room;

/* QC_ERR_NOSPACE says what is needed, what is free and what is missing. */
QC_NODISCARD qc_status qc_room_check(const qc_room *r, qc_error *err);
/* Asks the same for a number of bytes that is known. where is the folder, which may not exist
 * yet. */
QC_NODISCARD qc_status qc_room_check_bytes(const char *where, const char *what, uint64_t need,
                                           qc_error *err);

#endif

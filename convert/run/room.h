/* Does what is to be written fit on the disk of OUT?
 *
 * Without compression every size is known, and what is missing is told before anything is written.
 * With compression a sample of the source is compressed: an output that would not even fit if it
 * came out half as large, relative to its plain size, as the sample does is refused; one that fits
 * only if it is compressed is a warning. What an interrupted run has on the disk already counts as
 * there. An old output in OUT frees nothing: it goes when the new one is whole. */
#ifndef QC_CONVERT_ROOM_H
#define QC_CONVERT_ROOM_H

#include "convert/fit/fit.h"
#include "convert/plan/plan.h"
#include "formats/file_io.h"

typedef struct {
    const qc_plan *plan;
    const uint32_t *part_of; /* per shard; NULL: all of them are made here */
    unsigned part_index;
    const qc_file *root;  /* OUT, which is open; NULL while it does not exist */
    uint64_t calibrated;  /* bytes that calibrated weights take beside the output */
    int consumes;         /* source files are deleted meanwhile; then the next member counts */
    uint64_t consumption; /* the most that is needed at once, uncompressed; 0: not known */
} qc_room;

/* QC_ERR_NOSPACE says what is needed, what is free and what is missing. */
QC_NODISCARD qc_status qc_room_check(const qc_room *r, qc_error *err);
/* Asks the same for a number of bytes that is known. where is the folder, which may not exist
 * yet. */
QC_NODISCARD qc_status qc_room_check_bytes(const char *where, const char *what, uint64_t need,
                                           qc_error *err);

#endif

/* A text that is written to a file as it grows: memory for a piece of it, whatever its length.
 * As qc_file_put, the file has its name only when all of it is there and synced. The digest and the
 * size of what was written come with it.
 * Not thread-safe: one owner. */
#ifndef QC_FORMATS_TEXT_FILE_H
#define QC_FORMATS_TEXT_FILE_H

#include "base/strbuf.h"
#include "formats/digest.h"
#include "formats/file_io.h"

typedef struct {
    qc_strbuf text; /* what comes next: append to it, then call qc_text_file_step */
    uint64_t bytes; /* of what was written away */
    qc_file file;
    char *path, *folder, *temporary; /* owned; temporary while there is such a file */
    qc_digest_state *hash;
} qc_text_file;

#define QC_TEXT_FILE_NONE ((qc_text_file){.file = {-1, NULL}})

/* On failure, too, qc_text_file_deinit is due. */
QC_NODISCARD qc_status qc_text_file_open(qc_text_file *t, const char *path, qc_error *err);
/* Writes `text` away if it has grown long. To be called often. */
QC_NODISCARD qc_status qc_text_file_step(qc_text_file *t, qc_error *err);
/* The same however short it is. */
QC_NODISCARD qc_status qc_text_file_flush(qc_text_file *t, qc_error *err);
/* Digest of all that was written away: without `text`. */
qc_digest qc_text_file_digest(const qc_text_file *t);
/* All of it to the file, synced; then its name, and the folder is synced. */
QC_NODISCARD qc_status qc_text_file_finish(qc_text_file *t, qc_error *err);
/* Without qc_text_file_finish nothing stays. Fine at any time. */
void qc_text_file_deinit(qc_text_file *t);

#endif

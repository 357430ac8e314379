/* A text that is written to a file as it grows, so that memory holds only a small part of it. As
 * with qc_file_put, the file gets its name only when all of it is there and synced. The text's
 * digest and size are counted on the way.
 * Not thread-safe: it has one owner. */
#ifndef QC_FORMATS_TEXT_FILE_H
#define QC_FORMATS_TEXT_FILE_H

#include "base/strbuf.h"
#include "formats/digest.h"
#include "formats/file_io.h"

typedef struct {
    qc_strbuf text; /* append the next text here, then call qc_text_file_step */
    uint64_t bytes; /* how many bytes were written so far */
    qc_file file;
    char *path, *temporary; /* owned; temporary is set while there is such a file */
    qc_digest_state *hash;
} qc_text_file;

#define QC_TEXT_FILE_NONE ((qc_text_file){.file = {-1, NULL}})

/* Call qc_text_file_deinit also after a failure. */
QC_NODISCARD qc_status qc_text_file_open(qc_text_file *t, const char *path, qc_error *err);
/* Writes `text` to the file if it has grown long. Call it often. */
QC_NODISCARD qc_status qc_text_file_step(qc_text_file *t, qc_error *err);
/* Writes `text` to the file however short it is. */
QC_NODISCARD qc_status qc_text_file_flush(qc_text_file *t, qc_error *err);
/* Returns the digest of all that was written so far, without `text`. */
qc_digest qc_text_file_digest(const qc_text_file *t);
/* Writes the rest and syncs the file, gives it its name, and syncs the folder. */
QC_NODISCARD qc_status qc_text_file_finish(qc_text_file *t, qc_error *err);
/* Writes a file whose text is all there: path.tmp, which is synced, then renamed to path. */
QC_NODISCARD qc_status qc_file_put(const char *path, const void *bytes, size_t len, qc_error *err);
/* Removes the file unless qc_text_file_finish has named it. You may call it at any time. */
void qc_text_file_deinit(qc_text_file *t);

#endif

/* Recognizes files that are not what their names say: pointers of git-lfs, pages of a web server,
 * other formats of weights. */
#ifndef QC_FORMATS_FOREIGN_FILE_H
#define QC_FORMATS_FOREIGN_FILE_H

#include "base/status.h"

/* This many bytes from the beginning of a file are enough. */
#define QC_FOREIGN_HEAD_BYTES 64u

typedef struct {
    const char *what; /* "a GGUF file" */
    const char *rest; /* what a message on weights says after it: ", not safetensors" */
    qc_status st;
} qc_foreign_kind;

/* Returns what begins with these bytes; NULL if that is not known. The first eight bytes of a
 * safetensors file may be any, so for one call it only once they have turned out wrong. */
const qc_foreign_kind *qc_foreign_kind_of(const unsigned char *head, size_t len);
/* The same for a file that is to be text: "empty", "a git-lfs pointer, ...", "an HTML page"; NULL
 * for every other text. */
const char *qc_foreign_text(const char *text, size_t len);
/* Adds to an error of parsing the text of the file at `path`: what the file is instead, or else
 * only the path. `before` goes in front of the path. */
void qc_foreign_say(qc_error *err, const char *before, const char *path, const char *text,
                    size_t len);

#endif

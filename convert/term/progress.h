/* Shows the progress of a long command: as a bar on a terminal, as a plain line now and then
 * elsewhere, and not at all with -q or --progress never.
 *
 *   qconv: converting  42% [#########------------]  5.90 of 14.0 GB  812 MB/s  0:10 left
 *
 * Workers add bytes. A separate thread draws about six times a second, so that a worker that is
 * stuck in a write does not freeze the clock. Lines of qc_console_* appear above the bar. Where
 * there is no terminal, a line is written when another tenth is done, but not within 2 s of the
 * last one, and at least every 30 s. So short jobs stay silent.
 *
 * With --progress json it is a line of JSON whenever more is done, and one at the end. */
#ifndef QC_CONVERT_PROGRESS_H
#define QC_CONVERT_PROGRESS_H

#include "convert/term/call.h"

typedef struct qc_progress qc_progress;

/* verb is a literal: "converting". If total_bytes is 0, the total is not known. */
QC_NODISCARD qc_status qc_progress_create(qc_progress **out, const qc_call *call, const char *verb,
                                          uint64_t total_bytes, qc_error *err);
/* Tells p that the amounts are not bytes: then only the share that is done and the time that is
 * left are shown. */
void qc_progress_hide_amounts(qc_progress *p);
/* Any thread may call it at any time; p may be NULL. */
void qc_progress_add(qc_progress *p, uint64_t bytes);
/* Seconds since p was created. */
double qc_progress_seconds(const qc_progress *p);
/* Takes the bar away and frees everything; p may be NULL. Call it before the last message. */
void qc_progress_destroy(qc_progress *p);

/* The text of one state, for up to `columns` columns (less where it does not fit). It is public for
 * tests. A rate of 0 is not known yet. */
#define QC_PROGRESS_TEXT_BYTES 512
typedef struct {
    const char *verb;
    uint64_t done_bytes, total_bytes;
    double rate; /* bytes per second of the last few seconds */
    int bar;     /* 0: a plain line */
    int no_amounts;
    unsigned columns;
} qc_progress_state;
void qc_progress_text(char out[QC_PROGRESS_TEXT_BYTES], const qc_progress_state *s);
/* The same as one JSON object: {"progress": "converting", "done": 5, "total": 14, "unit": "bytes"}.
 * The unit is "steps" (of no known size) where the amounts are not bytes, and the total is null
 * where it is not known. */
void qc_progress_json(char out[QC_PROGRESS_TEXT_BYTES], const qc_progress_state *s);

#endif

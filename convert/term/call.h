/* What every room may need to know of how the program was called: where to keep things, how much to
 * say, and how many threads work. */
#ifndef QC_CONVERT_CALL_H
#define QC_CONVERT_CALL_H

#include "base/arena.h"

typedef enum {
    QC_PROGRESS_AUTO,
    QC_PROGRESS_ALWAYS,
    QC_PROGRESS_NEVER,
    QC_PROGRESS_JSON
} qc_progress_mode;

typedef struct {
    qc_arena *arena;  /* owns the strings and arrays of all options; borrowed */
    unsigned threads; /* 0: qconv chooses */
    int json;
    int quiet;   /* -q */
    int verbose; /* number of -v options */
    qc_progress_mode progress;
} qc_call;

#endif

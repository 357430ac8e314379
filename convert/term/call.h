/* How the program was called: what every command has, whatever it does. */
#ifndef QC_CONVERT_CALL_H
#define QC_CONVERT_CALL_H

#include "base/arena.h"

typedef enum { QC_PROGRESS_AUTO, QC_PROGRESS_ALWAYS, QC_PROGRESS_NEVER } qc_progress_mode;

/* All strings are borrowed. */
typedef struct {
    qc_arena *arena;       /* owns the strings and arrays of all options; borrowed */
    const char *program;   /* argv[0] */
    const char *model;     /* first positional: MODEL, OUT (verify), OUT (unpack), PATH (inspect) */
    const char *out;       /* second positional; NULL where there is none */
    const char *against;   /* verify, validate, eval, report: MODEL, or NULL */
    const char *tokenizer; /* directory or tokenizer.json; NULL: the model's own */
    /* --device as given, well-formed; NULL: not given. qc_device_wish_read reads it. */
    const char *run_device;
    const char *tuning; /* --tuning FILE, or NULL */
    /* What this build can do on GPUs (convert/device/device_gpu.h), set by main.c; NULL: nothing.
     */
    const struct qc_gpu_work *gpu;
    unsigned threads; /* 0: chosen */
    int json;
    int quiet;   /* -q */
    int verbose; /* -v counts */
    qc_progress_mode progress;
} qc_call;

#endif

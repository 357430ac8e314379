/* How the program was called. Every command has this, whatever it does. */
#ifndef QC_CONVERT_CALL_H
#define QC_CONVERT_CALL_H

#include "base/arena.h"

typedef enum {
    QC_PROGRESS_AUTO,
    QC_PROGRESS_ALWAYS,
    QC_PROGRESS_NEVER,
    QC_PROGRESS_JSON
} qc_progress_mode;

/* --lora ADAPTER[:SCALE] */
typedef struct {
    const char *path;
    double scale; /* on top of the adapter's own */
} qc_lora;

/* All strings are borrowed. */
typedef struct {
    qc_arena *arena;     /* owns the strings and arrays of all options; borrowed */
    const char *program; /* argv[0] */
    /* first positional argument: MODEL, OUT (verify), OUT (unpack), PATH (inspect) */
    const char *model;
    const char *out;     /* second positional argument, or NULL */
    const char *against; /* verify, validate: MODEL, or NULL */
    qc_lora *loras;      /* what is merged into MODEL, in this order */
    uint32_t lora_count;
    /* --device as it was given, well-formed; NULL if it was not given. qc_device_wish_read reads
     * it. */
    const char *run_device;
    /* What this build can do on GPUs (convert/device/device_gpu.h). main.c sets it; NULL means
     * nothing. */
    const struct qc_gpu_work *gpu;
    unsigned threads; /* 0: qconv chooses */
    int json;
    int quiet;   /* -q */
    int verbose; /* number of -v options */
    qc_progress_mode progress;
} qc_call;

#endif

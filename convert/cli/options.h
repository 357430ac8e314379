/* The program's options. Parsing, --help, the man page and shell completions come from one table
 * (option_table.h). */
#ifndef QC_CONVERT_OPTIONS_H
#define QC_CONVERT_OPTIONS_H

#include "convert/adapter/adapters.h"
#include "convert/device/device_choice.h"
#include "convert/run/convert_options.h"
#include "convert/term/call.h"
#include "convert/validate/validate_gpu.h"

typedef enum {
    QC_CMD_CONVERT,
    QC_CMD_INSPECT,
    QC_CMD_VERIFY,
    QC_CMD_UNPACK,
    QC_CMD_PLAN,
    QC_CMD_HARDWARE,
    QC_CMD_VALIDATE,
    QC_CMD_HELP, /* --help was asked for, or "help [COMMAND]" */
    QC_CMD_VERSION
} qc_command;

typedef struct {
    uint64_t sample;         /* layers; 0 for all */
    const char *activations; /* FILE; NULL for random ones */
    double max_error;        /* 0 where not given */
    const char *baseline;
    const char *save_baseline;
    double tolerance; /* share of the baseline's error; default 0.001 */
} qc_validate_options;

/* All strings are borrowed. */
typedef struct {
    const char *program; /* argv[0] */
    qc_command command;
    qc_command help_topic;     /* for QC_CMD_HELP; QC_CMD_HELP itself means the overview */
    const char *model;         /* the first argument: MODEL, OUT (verify, unpack), PATH (inspect) */
    const char *out;           /* the second argument, or NULL */
    const char *against;       /* verify, validate: MODEL, or NULL */
    qc_loras loras;            /* merged into MODEL */
    const char *recipe_file;   /* --recipe FILE, whose rules come first among the rules; or NULL */
    const char *device_map;    /* plan --device-map FILE, or NULL */
    unsigned engines;          /* --for: bit e for qc_engine e; 0 where it was not given */
    const char *for_convert;   /* plan: those of its options that convert has, for a shell */
    const char *as;            /* hardware: --as, or NULL */
    const char *device;        /* unpack: only the shards of this device; NULL for all */
    qc_device_options devices; /* main.c sets what this build can do */
    qc_call call;
    qc_convert_options convert;
    qc_validate_options validate;
    qc_product_options products;
} qc_options;

/* Parses argv into *out. A mistake is QC_ERR_USAGE, with one line that names it and what was
 * expected.
 * The recipe file of --recipe (JSON: {"rules":[{"keep":"GLOB"},{"quantize":"GLOB"}]}) is read here;
 * a bad one is QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_options_parse(qc_options *out, qc_arena *arena, int argc, char **argv,
                                        qc_error *err);

#endif

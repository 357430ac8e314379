/* The program's options: one table generates parsing, --help, the man page and shell completion. */
#ifndef QC_CONVERT_OPTIONS_H
#define QC_CONVERT_OPTIONS_H

#include "base/arena.h"
#include "base/dtype.h"
#include "base/status.h"

typedef enum {
    QC_CMD_CONVERT,
    QC_CMD_INSPECT,
    QC_CMD_VERIFY,
    QC_CMD_UNPACK,
    QC_CMD_HELP, /* --help was asked for, or "help [COMMAND]" */
    QC_CMD_VERSION,
    QC_CMD_MAN,       /* hidden: print qconv.1 */
    QC_CMD_COMPLETION /* hidden: print the completion for a shell */
} qc_command;

typedef enum { QC_TO_NF4, QC_TO_INT8, QC_TO_FP16, QC_TO_BF16 } qc_to;
typedef enum { QC_REST_KEEP, QC_REST_BF16, QC_REST_FP16 } qc_rest;
typedef enum { QC_PROGRESS_AUTO, QC_PROGRESS_ALWAYS, QC_PROGRESS_NEVER } qc_progress_mode;

/* --keep GLOB or --quantize GLOB, in the order given (recipe file first); the last match wins. */
typedef struct {
    int quantize; /* 0: keep */
    const char *glob;
} qc_rule;

typedef struct {
    qc_arena *arena; /* owns strings and arrays below; borrowed */
    qc_command command;
    qc_command help_topic; /* for QC_CMD_HELP; QC_CMD_HELP itself: the overview */
    const char *shell;     /* for QC_CMD_COMPLETION */
    const char *model;     /* first positional: MODEL, OUT (verify), OUT (unpack), PATH (inspect) */
    const char *out;       /* second positional; NULL where there is none, and
                               perhaps with --dry-run */

    /* convert */
    qc_to to;
    uint32_t block_elems; /* 0: not given */
    int double_quant;     /* 1 unless --no-double-quant */
    qc_rest rest;
    qc_rule *rules;
    uint32_t rule_count;
    const char *compute_dtype; /* "bfloat16", "float16", "float32" or NULL: chosen */
    int compress;              /* 1: zstd (default), 0: none */
    int compress_level;        /* 1..19, default 1 */
    uint64_t max_shard_bytes;  /* default 5 GB */
    int dry_run;
    int force;

    /* everywhere */
    unsigned threads; /* 0: chosen */
    int json;
    int quiet;   /* -q */
    int verbose; /* -v counts */
    qc_progress_mode progress;
} qc_options;

/* Parse argv into *out. QC_ERR_USAGE with one line that names the culprit and what was expected.
 * The recipe file of --recipe (JSON: {"rules":[{"keep":"GLOB"},{"quantize":"GLOB"}]}) is read here;
 * a bad one is QC_ERR_INPUT. */
QC_NODISCARD qc_status qc_options_parse(qc_options *out, qc_arena *arena, int argc, char **argv,
                                        qc_error *err);

/* "5GB" (10^9), "512MiB" (2^20), "4096", "1.5GB"; case of the B and of the prefix does not matter,
 * a lone prefix ("5G") is decimal. QC_ERR_USAGE otherwise. */
QC_NODISCARD qc_status qc_parse_size(const char *text, const char *what, uint64_t *out,
                                     qc_error *err);

#endif

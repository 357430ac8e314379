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
    QC_CMD_PLAN,
    QC_CMD_HARDWARE,
    QC_CMD_VALIDATE,
    QC_CMD_BENCH,
    QC_CMD_EVAL,
    QC_CMD_REPORT,
    QC_CMD_HELP, /* --help was asked for, or "help [COMMAND]" */
    QC_CMD_VERSION,
    QC_CMD_MAN,       /* hidden: print qconv.1 */
    QC_CMD_COMPLETION /* hidden: print the completion for a shell */
} qc_command;

/* AUTO: a scheme per weight, chosen for a budget. KEEP: every tensor as it is (cut, compressed and
 * hashed anew). */
typedef enum { QC_TO_NF4, QC_TO_INT8, QC_TO_AUTO, QC_TO_FP16, QC_TO_BF16, QC_TO_KEEP } qc_to;
/* nf4, int8 and auto quantize; the others do not. */
int qc_to_quantizes(qc_to to);
typedef enum { QC_REST_KEEP, QC_REST_BF16, QC_REST_FP16 } qc_rest;
typedef enum { QC_PROGRESS_AUTO, QC_PROGRESS_ALWAYS, QC_PROGRESS_NEVER } qc_progress_mode;

/* How scales of what is not calibrated are found. ABSMAX: the largest value, as bitsandbytes does.
 * SEARCH: the one of least squared error. REFIT: that, and the scales of the scales anew for what
 * was found. */
typedef enum { QC_SCALE_ABSMAX, QC_SCALE_SEARCH, QC_SCALE_REFIT } qc_scale_method;

#define QC_PARTS_MAX 4096

/* --keep GLOB or --quantize GLOB, in the order given (recipe file first); the last match wins. */
typedef struct {
    int quantize; /* 0: keep */
    const char *glob;
} qc_rule;

/* Where a model is to lie and what is to run there: plan, and convert --vram. */
typedef struct {
    const char *vram; /* --vram as given, or NULL; see convert/budget.h */
    double margin;    /* usable share of each device, 0 < margin <= 1; default 0.9 */
    uint64_t context; /* tokens of one sequence; 0: 8192, or the model's limit if that is less */
    uint64_t batch;   /* sequences at once; default 1 */
    uint64_t images;  /* per sequence, for models with cross-attention; default 1 */
    unsigned kv_bits; /* per cached element: 8, 16 or 32; default 16 */
    int mla_expanded; /* --mla expanded: keys and values are cached per head */
    int mla_absorbed; /* --mla absorbed: attention computes with the latent that is cached. Neither:
                         the latent is cached, and a layer expands all of it to compute */
    uint64_t prefill; /* tokens of a prompt read at once; 0: the whole prompt */
    uint64_t cuda_context_bytes; /* per GPU; default 500 MB */
} qc_fit_options;

typedef enum { QC_TRAIN_FULL, QC_TRAIN_LORA, QC_TRAIN_QLORA } qc_train_method;
typedef enum {
    QC_OPTIMIZER_ADAMW,
    QC_OPTIMIZER_ADAM,
    QC_OPTIMIZER_ADAM8BIT,
    QC_OPTIMIZER_SGD
} qc_optimizer;
typedef enum { QC_PRECISION_BF16, QC_PRECISION_FP16, QC_PRECISION_FP32 } qc_precision;

/* plan --mode train. What was not given is chosen: each has a _given flag where a value of its own
 * cannot say so. */
typedef struct {
    int on;            /* --mode train */
    int context_given; /* --context; without it a shorter one may be taken */
    int method_given, optimizer_given, precision_given, zero_given, checkpointing_given;
    qc_train_method method;
    qc_optimizer optimizer;
    qc_precision precision;
    unsigned zero; /* ZeRO stage 0..3 */
    int checkpointing;
    uint64_t lora_rank;       /* default 16 */
    uint64_t effective_batch; /* sequences per optimizer step over all GPUs; default 32 */
    const char *apply;        /* configuration file to write, or NULL */
    int profile;              /* measure on a GPU instead of estimating */
} qc_train_options;

typedef struct {
    const char *as; /* --as, or NULL */
    int watch;
    const char *csv;  /* --csv FILE, or NULL */
    double interval;  /* seconds between samples; default 1 */
    uint64_t samples; /* then stop; 0: until interrupted */
} qc_hardware_options;

typedef struct {
    uint64_t sample;         /* layers; 0: all */
    const char *activations; /* FILE; NULL: random */
    double max_error;        /* 0: not given */
    const char *baseline;
    const char *save_baseline;
    double tolerance; /* share of the baseline's error; default 0.001 */
} qc_validate_options;

/* eval, and what report runs of it. */
typedef struct {
    const char *text;      /* FILE; NULL: not given (report) */
    const char *tokenizer; /* directory or tokenizer.json; NULL: the model's own */
    uint64_t context;      /* tokens of a window; 0: chosen */
    uint64_t max_tokens;   /* 0: all of the text */
    double max_kl;         /* 0: not given */
} qc_eval_options;

/* convert: codes and scales from data. On where text or hessians is given. */
typedef struct {
    const char *text;     /* FILE, or "default": the bundled text; NULL: not given */
    const char *hessians; /* file or folder of second moments; NULL: not given */
    uint64_t max_tokens;  /* 0: QC_CALIBRATE_TOKENS, or all of the text if that is less */
    uint64_t context;     /* tokens of a window; 0: chosen */
    double damping;       /* 0: chosen by the number of tokens */
} qc_calibrate_options;

#define QC_CALIBRATE_TOKENS 131072u

/* Is that on? (options_calibrate.c) */
int qc_calibrates(const qc_calibrate_options *o);

/* Earlier results that report takes up: files of --json. */
typedef struct {
    const char *eval;  /* of eval, or NULL */
    const char *bench; /* of bench, or NULL */
} qc_report_options;

typedef struct {
    const char *shapes;  /* --shapes as given; NULL: the default */
    const char *schemes; /* --scheme as given; NULL: the default */
    int bf16;            /* --dtype */
    const char *path;    /* as qc_matmul_path_name has it; NULL: chosen */
    uint64_t rounds;     /* default 30 */
    uint64_t seconds;    /* default 150 */
    int markdown;
    const char *output; /* file, or NULL */
    int tune;
    const char *save; /* file for the table of --tune, or NULL */
} qc_bench_options;

typedef struct {
    qc_arena *arena;     /* owns strings and arrays below; borrowed */
    const char *program; /* how qconv was called: argv[0] */
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
    qc_scale_method scale;
    qc_calibrate_options calibrate; /* its tokenizer: eval.tokenizer */
    qc_rest rest;
    qc_rule *rules;
    uint32_t rule_count;
    const char *recipe;        /* --recipe FILE, whose rules come first in `rules`; or NULL */
    const char *compute_dtype; /* "bfloat16", "float16", "float32" or NULL: chosen */
    int compress;              /* 1: zstd (default), 0: none */
    int compress_level;        /* 1..19, default 1 */
    uint64_t max_shard_bytes;  /* default 5 GB */
    int dry_run;
    int force;
    int restart;         /* begin anew although an interrupted conversion could be continued */
    int consume_source;  /* delete weight files of MODEL once they are written and synced */
    unsigned part_index; /* 0..part_count-1, of --part */
    unsigned part_count; /* 0: not given; at most QC_PARTS_MAX */
    int to_given;        /* plan: --to may be left out */
    const char *schemes; /* --to auto: candidates, "nf4,nf4-32,int8,16bit"; NULL: all */
    int explain;         /* --to auto: say why */
    int requantize;      /* MXFP4 experts to the scheme of --to instead of passing through */
    int drop_mtp;        /* leave out multi-token prediction layers */
    int of_pipeline; /* MODEL is a part of a diffusers pipeline: a finished OUT is left as it is,
                        or refused if another conversion made it */
    qc_fit_options fit;
    qc_train_options train;
    const char *html;       /* plan, validate: --html FILE, or NULL */
    const char *device_map; /* plan --device-map FILE, or NULL */

    /* unpack */
    const char *device; /* only the shards of this device; NULL: all */

    const char *against; /* verify, validate, eval, report: MODEL, or NULL */

    qc_hardware_options hardware;
    qc_validate_options validate;
    qc_bench_options bench;
    qc_eval_options eval;
    qc_report_options report;
    /* validate and bench: --m, in the order given; filled with the command's default */
    const uint64_t *m;
    unsigned m_count;
    uint64_t seed; /* default 1 */
    /* convert, validate, bench: --device as given, well-formed; NULL: not given. Read it with
     * qc_device_wish_read (convert/device_wish.h). */
    const char *run_device;
    const char *tuning; /* bench, validate, eval, report: --tuning FILE, or NULL */

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

/* "5GB" (10^9), "512MiB" (2^20), "4096", "1.5GB"; case does not matter, nor does one blank before
 * the unit; a lone prefix ("5G") is decimal, "5Gi" is "5GiB". QC_ERR_USAGE otherwise. */
QC_NODISCARD qc_status qc_parse_size(const char *text, const char *what, uint64_t *out,
                                     qc_error *err);

#endif

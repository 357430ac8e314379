/* The one table of commands and options. The parser, --help, the man page and the shell completions
 * read nothing else, so they cannot disagree.
 *
 * To add an option, add a value to qc_option_id and a row to option_table.c, which says what it
 * sets. To add a command, add a value to qc_command, a row to command_table.c, a row to main.c
 * (what runs it), and its bit to the options that apply to it. Then regenerate the committed
 * copies: docs/cli.md says how. */
#ifndef QC_CONVERT_OPTION_TABLE_H
#define QC_CONVERT_OPTION_TABLE_H

#include "convert/cli/options.h"

typedef enum {
    QC_OPT_TO,
    QC_OPT_BLOCK_SIZE,
    QC_OPT_NO_DOUBLE_QUANT,
    QC_OPT_SCALE,
    QC_OPT_CALIBRATE,
    QC_OPT_HESSIANS,
    QC_OPT_CALIBRATION_TOKENS,
    QC_OPT_CALIBRATION_CONTEXT,
    QC_OPT_DAMPING,
    QC_OPT_COMPUTE_DTYPE,
    QC_OPT_COMPRESS,
    QC_OPT_MAX_SHARD_SIZE,
    QC_OPT_REST,
    QC_OPT_KEEP,
    QC_OPT_QUANTIZE,
    QC_OPT_RECIPE,
    QC_OPT_REQUANTIZE,
    QC_OPT_DROP_MTP,
    QC_OPT_SCHEMES,
    QC_OPT_EXPLAIN,
    QC_OPT_VRAM,
    QC_OPT_MARGIN,
    QC_OPT_CONTEXT,
    QC_OPT_BATCH,
    QC_OPT_IMAGES,
    QC_OPT_KV_DTYPE,
    QC_OPT_MLA,
    QC_OPT_PREFILL,
    QC_OPT_CUDA_CONTEXT,
    QC_OPT_HTML,
    QC_OPT_DEVICE_MAP,
    QC_OPT_DEVICE,     /* of unpack: a device of the plan */
    QC_OPT_RUN_DEVICE, /* also --device: a device of this machine */
    QC_OPT_MODE,
    QC_OPT_METHOD,
    QC_OPT_OPTIMIZER,
    QC_OPT_PRECISION,
    QC_OPT_ZERO,
    QC_OPT_CHECKPOINTING,
    QC_OPT_LORA_RANK,
    QC_OPT_EFFECTIVE_BATCH,
    QC_OPT_APPLY,
    QC_OPT_PROFILE,
    QC_OPT_AS,
    QC_OPT_WATCH,
    QC_OPT_CSV,
    QC_OPT_INTERVAL,
    QC_OPT_SAMPLES,
    QC_OPT_AGAINST,
    QC_OPT_TEXT,
    QC_OPT_TOKENIZER,
    QC_OPT_EVAL_CONTEXT, /* also --context: tokens of a window of the text */
    QC_OPT_MAX_TOKENS,
    QC_OPT_MAX_KL,
    QC_OPT_EVAL_FILE,
    QC_OPT_BENCH_FILE,
    QC_OPT_SAMPLE,
    QC_OPT_SHAPES,
    QC_OPT_BENCH_SCHEME,
    QC_OPT_M,
    QC_OPT_ACTIVATIONS,
    QC_OPT_BENCH_DTYPE,
    QC_OPT_SEED,
    QC_OPT_PATH,
    QC_OPT_ROUNDS,
    QC_OPT_SECONDS,
    QC_OPT_TUNE,
    QC_OPT_SAVE,
    QC_OPT_TUNING,
    QC_OPT_MAX_ERROR,
    QC_OPT_BASELINE,
    QC_OPT_SAVE_BASELINE,
    QC_OPT_TOLERANCE,
    QC_OPT_REPORT_HTML,
    QC_OPT_MARKDOWN,
    QC_OPT_OUTPUT,
    QC_OPT_DRY_RUN,
    QC_OPT_FORCE,
    QC_OPT_RESTART,
    QC_OPT_CONSUME_SOURCE,
    QC_OPT_PART,
    QC_OPT_THREADS,
    QC_OPT_PROGRESS,
    QC_OPT_JSON,
    QC_OPT_QUIET,
    QC_OPT_VERBOSE,
    QC_OPT_HELP,
    QC_OPT_VERSION,
    QC_OPT_MAN,
    QC_OPT_COMPLETION,
    QC_OPT_COUNT
} qc_option_id;

typedef enum {
    QC_ARG_NONE,    /* a switch */
    QC_ARG_CHOICE,  /* one of `choices` */
    QC_ARG_NUMBER,  /* min..max */
    QC_ARG_DECIMAL, /* least..most */
    QC_ARG_SIZE,    /* as qc_parse_size */
    QC_ARG_FILE,
    QC_ARG_TEXT
} qc_arg_kind;

typedef enum {
    QC_GROUP_OUTPUT,
    QC_GROUP_TENSORS,
    QC_GROUP_FIT,
    QC_GROUP_TRAIN,
    QC_GROUP_MEASURE,
    QC_GROUP_RUN,
    QC_GROUP_OTHER
} qc_option_group;
#define QC_GROUP_COUNT 7
extern const char *const qc_option_group_titles[QC_GROUP_COUNT];

#define QC_MAX_CHOICES 6

typedef struct qc_option_row qc_option_row;

/* Reads `value` (NULL for a switch) and stores what it says in *o: in the member that the row
 * names, unless it knows the member itself. Refuses with QC_ERR_USAGE. (option_values.h) */
typedef qc_status (*qc_option_setter)(qc_options *o, const qc_option_row *row, const char *value,
                                      qc_error *err);

struct qc_option_row {
    qc_option_id id;   /* the index of the row */
    const char *name;  /* without the dashes; rows may share one if their commands differ, their
                          kind is the same, and they have no choices */
    char letter;       /* short form or 0 */
    unsigned commands; /* QC_CMD_BIT of each command it applies to */
    qc_option_group group;
    qc_arg_kind kind;
    const char *arg; /* placeholder: "N", "GLOB"; NULL for a switch and for a choice */
    const char *choices[QC_MAX_CHOICES];
    uint64_t min, max;  /* of a number; min is also that of a size */
    double least, most; /* of a decimal number; least is allowed only if it is above 0 */
    int power_of_two;
    qc_option_setter set;  /* NULL for --help, which choose_command handles */
    size_t at;             /* the member of qc_options that is set */
    size_t given;          /* an int of it that becomes 1 when the option is given, or 0 */
    const char *dflt;      /* applied through the parser before the command line; or NULL */
    const char *dflt_note; /* shown where dflt is NULL */
    struct {
        unsigned commands;
        const char *note;
    } dflt_of;             /* what those commands show instead of dflt_note */
    const char *only_with; /* "--vram": the option is refused without that */
    const char *not_with;  /* "--mode train, ...": the option is refused beside that, and why */
    int quantizes;         /* says how to quantize: refused where --to quantizes nothing */
    int repeats;           /* may be given more than once, and each time counts */
    const char *since;     /* version of qconv */
    int hidden;            /* left out of --help and completion; the man page has it */
    int alone;             /* needs no command and takes no other arguments: --version */
    const char *help;      /* one clause for --help and completion */
    const char *more;      /* sentences that follow in the man page; or NULL */
};

#define QC_CMD_BIT(command) (1u << (command))

extern const qc_option_row qc_option_table[QC_OPT_COUNT];

typedef enum { QC_PLACE_PATH, QC_PLACE_DIR, QC_PLACE_COMMAND } qc_place_kind;

typedef struct {
    const char *name; /* "MODEL" */
    qc_place_kind kind;
    int optional;
} qc_place;

#define QC_MAX_PLACES 2

typedef struct {
    qc_command command;
    const char *name;
    const char *synopsis; /* after "qconv " */
    const char *summary;  /* one clause, for lists */
    const char *text;     /* paragraphs, separated by an empty line */
    qc_place places[QC_MAX_PLACES];
    unsigned place_count;
    const char *examples; /* pairs of lines "command\nwhat it does\n"; or NULL */
} qc_command_row;

/* The commands a user can name, in the order of lists. */
extern const qc_command_row qc_command_table[];
extern const unsigned qc_command_count;

typedef struct {
    const char *name;
    const char *meaning;
    unsigned commands; /* those whose help has it; 0 for all */
} qc_text_row;

/* Exit codes and environment variables, for --help and the man page. */
extern const qc_text_row qc_exit_code_table[];
extern const unsigned qc_exit_code_count;
extern const qc_text_row qc_environment_table[];
extern const unsigned qc_environment_count;

/* Both return NULL if there is none. */
const qc_command_row *qc_command_row_of(qc_command command);
const qc_command_row *qc_command_row_named(const char *name);
/* Writes the name and what follows it: "--to {nf4,int8}", "--block-size N", "--force". */
#define QC_SPELLED_BYTES 96
void qc_option_spell(const qc_option_row *row, char out[QC_SPELLED_BYTES]);

#endif

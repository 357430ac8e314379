/* The one table of commands and options. The parser, --help, and `help --json`, of which building
 * makes the man page and the shell completions, read nothing else, so they cannot disagree.
 *
 * To add an option, add a row to option_table.c, which says what it sets. To add a command, add a
 * value to qc_command, a row to command_table.c, a row to main.c (what runs it), and its bit to the
 * options that apply to it. Then regenerate what is made of it: docs/cli.md says how. */
#ifndef QC_CONVERT_OPTION_TABLE_H
#define QC_CONVERT_OPTION_TABLE_H

#include "convert/cli/options.h"

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
    QC_GROUP_MEASURE,
    QC_GROUP_RUN,
    QC_GROUP_OTHER,
    QC_GROUP_COUNT
} qc_option_group;
extern const char *const qc_option_group_titles[QC_GROUP_COUNT];

typedef struct qc_option_row qc_option_row;

/* Reads `value` (NULL for a switch) and stores what it says in *o: in the member that the row
 * names, unless it knows the member itself. Refuses with QC_ERR_USAGE. (option_values.h) */
typedef qc_status (*qc_option_setter)(qc_options *o, const qc_option_row *row, const char *value,
                                      qc_error *err);

/* What other tools call an option. */
typedef struct {
    const char *names;    /* with blanks between them; NULL ends the list */
    const char *meant;    /* "--to nf4"; NULL means the option itself */
    unsigned of_commands; /* the names count for these commands only; 0 for all of the option's */
} qc_foreign_name;

/* Other words for a choice of an option. */
typedef struct {
    const char *names; /* with blanks between them; NULL ends the list */
    const char *choice;
} qc_choice_words;

/* What an option goes with. A condition names options as they are typed, "--vram" or
 * "--to int4|int8 or --part !1/1" ('!' means any other value), and holds when one of them was given
 * so. A name that the command does not have does not count. The list ends where needs, not_with and
 * implies are NULL. */
typedef struct {
    /* The rule counts only where all of these are so that are there. */
    const char *of;   /* the option has one of these values: "int4|int8" */
    unsigned above;   /* its number is above this one */
    const char *with; /* this condition holds, too */
    /* One of these: */
    const char *needs;    /* the option is refused unless this condition holds */
    const char *not_with; /* the option is refused where this condition holds */
    const char *implies;  /* "--format compressed-tensors": counts as given, unless it was typed */
    const char *why;      /* ends the message: ", which ..." or ": ..."; or NULL */
} qc_option_rule;

struct qc_option_row {
    const char *name;  /* without the dashes; rows may share one if their commands differ, their
                          kind is the same, and they have no choices */
    char letter;       /* short form or 0 */
    unsigned commands; /* QC_CMD_BIT of each command it applies to */
    qc_option_group group;
    qc_arg_kind kind;
    const char *arg;            /* placeholder: "N", "GLOB"; NULL for a switch and for a choice */
    const char *const *choices; /* up to a NULL; NULL where any value will do */
    const int *values;          /* stored instead of a choice's index, or instead of a switch's 1
                                   and, without the switch, 0 */
    uint64_t min, max;          /* bounds of a number; min is also that of a size */
    double least, most;         /* bounds of a decimal number; 0 itself is never allowed */
    int power_of_two;
    qc_option_setter set;  /* NULL for --help, which choose_command handles */
    size_t at;             /* the member of qc_options that is set */
    size_t given;          /* an int of it that becomes 1 when the option is given, or 0 */
    const char *dflt;      /* applied through the parser before the command line; or NULL */
    const char *dflt_note; /* shown where dflt is NULL */
    struct {
        unsigned commands;
        const char *note;
    } dflt_of;                   /* shown by those commands instead of dflt_note */
    unsigned required;           /* the commands that do not run without it */
    const char *missing;         /* says what is expected if it is required; NULL: its choices */
    const qc_option_rule *rules; /* say what it goes with; or NULL */
    int spares_out;              /* with it the second place of the command may be left out */
    int quantizes;               /* says how to quantize: refused where --to quantizes nothing */
    int repeats;                 /* may be given more than once, and each time counts */
    const char *since;           /* version of qconv */
    qc_command alone;            /* the command that --version is, without other arguments; or 0 */
    const qc_foreign_name *foreign; /* for "did you mean"; or NULL */
    const qc_choice_words *words;   /* other words for its choices, for the same; or NULL */
    const char *help;               /* one clause for --help and completion */
    const char *more;               /* sentences that follow in the man page; or NULL */
};

#define QC_CMD_BIT(command) (1u << (command))

/* The rows, in the order of lists. Behind the last one is one without a name. */
extern const qc_option_row qc_option_table[];

typedef enum { QC_PLACE_PATH, QC_PLACE_DIR, QC_PLACE_COMMAND } qc_place_kind;

typedef struct {
    const char *name; /* "MODEL" */
    qc_place_kind kind;
    int optional;
    const char *foreign; /* other tools' options for it, with blanks between; or NULL */
} qc_place;

#define QC_MAX_PLACES 2

typedef struct {
    qc_command command;
    const char *name;
    const char *foreign; /* other tools' names for it, with blanks between; or NULL */
    const char *summary; /* one clause, for lists */
    const char *text;    /* paragraphs, separated by an empty line */
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

/* Commands that qconv's Python package adds. The program lists them, and says how to have them. */
extern const qc_text_row qc_python_command_table[];
extern const unsigned qc_python_command_count;

/* Exit codes and environment variables, for --help and the man page. */
extern const qc_text_row qc_exit_code_table[];
extern const unsigned qc_exit_code_count;
extern const qc_text_row qc_environment_table[];
extern const unsigned qc_environment_count;

/* Both return NULL if there is none. */
const qc_command_row *qc_command_row_of(qc_command command);
const qc_command_row *qc_command_row_named(const char *name);
/* Writes how the command is typed, after "qconv ": "verify [OPTION]... OUT". rows is
 * qc_option_table. */
#define QC_USAGE_BYTES 160
void qc_command_usage(const qc_command_row *row, const qc_option_row *rows,
                      char out[QC_USAGE_BYTES]);
/* What the help of a command shows where the option has no default; or NULL. */
const char *qc_option_note(const qc_option_row *row, qc_command command);
/* Writes the name and what follows it: "--to {nf4,int8}", "--block-size N", "--force". */
#define QC_SPELLED_BYTES 96
void qc_option_spell(const qc_option_row *row, char out[QC_SPELLED_BYTES]);

#endif

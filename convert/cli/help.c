#include "convert/cli/help.h"

#include <stdio.h>
#include <string.h>

#define COLUMNS       80
#define TEXT_COLUMN   28
#define NAME_COLUMN   12
#define PYTHON_COLUMN 17
#define FIRST_COLUMN  2

/* Wraps the words of text. Continuation lines start at `indent`, and the cursor is at `at`. */
static void add_wrapped(qc_strbuf *out, const char *text, size_t indent, size_t at)
{
    int line_start = 1;
    while (*text) {
        size_t word = strcspn(text, " \n");
        if (!line_start && at + 1 + word > COLUMNS) {
            qc_strbuf_putf(out, "\n%*s", (int)indent, "");
            at = indent;
            line_start = 1;
        }
        qc_strbuf_putf(out, "%s%.*s", line_start ? "" : " ", (int)word, text);
        at += word + !line_start;
        line_start = 0;
        text += word;
        if (strncmp(text, "\n\n", 2) == 0) {
            qc_strbuf_putf(out, "\n\n%*s", (int)indent, "");
            at = indent;
            line_start = 1;
        }
        text += strspn(text, " \n");
    }
    qc_strbuf_puts(out, "\n");
}

/* Writes a name, then its text in a column, or on the next line if the name is too long. */
static void add_row(qc_strbuf *out, const char *name, size_t column, const char *text)
{
    qc_strbuf_putf(out, "%*s%s", FIRST_COLUMN, "", name);
    size_t at = FIRST_COLUMN + strlen(name);
    if (at + 2 > column) {
        qc_strbuf_puts(out, "\n");
        at = 0;
    }
    qc_strbuf_putf(out, "%*s", (int)(column - at), "");
    add_wrapped(out, text, column, column);
}

void qc_help_overview(qc_strbuf *out)
{
    char usage[QC_USAGE_BYTES];
    qc_strbuf_puts(out, "qconv quantizes and converts Hugging Face checkpoints.\n"
                        "\n"
                        "Usage:\n");
    for (unsigned i = 0; i < qc_command_count; i++) {
        qc_command_usage(&qc_command_table[i], qc_option_table, usage);
        qc_strbuf_puts(out, "  qconv ");
        add_wrapped(out, usage, 12, 8);
    }
    qc_strbuf_puts(out, "\nCommands:\n");
    for (unsigned i = 0; i < qc_command_count; i++)
        add_row(out, qc_command_table[i].name, NAME_COLUMN, qc_command_table[i].summary);
    qc_strbuf_puts(out,
                   "\nCommands of the Python package ('pip install .' in the source folder):\n");
    for (unsigned i = 0; i < qc_python_command_count; i++)
        add_row(out, qc_python_command_table[i].name, PYTHON_COLUMN,
                qc_python_command_table[i].meaning);
    qc_strbuf_puts(out, "\n");
    add_wrapped(out,
                "'qconv COMMAND --help' shows the options of a command, and 'qconv --version' the "
                "version. Results go to standard output, everything else to standard error.",
                0, 0);
}

static void add_option(qc_strbuf *out, const qc_option_row *row, qc_command command)
{
    char name[QC_SPELLED_BYTES + 8], spelled[QC_SPELLED_BYTES], text[512];
    char letter[5] = "    ";
    qc_option_spell(row, spelled);
    if (row->letter)
        (void)snprintf(letter, sizeof letter, "-%c, ", row->letter);
    (void)snprintf(name, sizeof name, "%s%s", letter, spelled);
    const char *note = qc_option_note(row, command);
    if (row->required & QC_CMD_BIT(command))
        (void)snprintf(text, sizeof text, "%s (required)", row->help);
    else if (row->dflt || note)
        (void)snprintf(text, sizeof text, "%s (default: %s)", row->help,
                       row->dflt ? row->dflt : note);
    else
        (void)snprintf(text, sizeof text, "%s", row->help);
    add_row(out, name, TEXT_COLUMN, text);
}

static void add_group(qc_strbuf *out, qc_command command, unsigned group)
{
    int titled = 0;
    for (const qc_option_row *row = qc_option_table; row->name; row++) {
        if (row->group != (qc_option_group)group || row->alone ||
            !(row->commands & QC_CMD_BIT(command)))
            continue;
        if (!titled)
            qc_strbuf_putf(out, "\n%s:\n", qc_option_group_titles[group]);
        titled = 1;
        add_option(out, row, command);
    }
}

static void add_examples(qc_strbuf *out, const char *examples)
{
    qc_strbuf_puts(out, "\nExamples:\n");
    while (*examples) {
        size_t command = strcspn(examples, "\n");
        const char *what = examples + command + 1;
        size_t len = strcspn(what, "\n");
        qc_strbuf_putf(out, "  %.*s\n      %.*s\n", (int)command, examples, (int)len, what);
        examples = what + len + 1;
    }
}

void qc_help_command(qc_strbuf *out, qc_command command)
{
    const qc_command_row *row = qc_command_row_of(command);
    if (!row || command == QC_CMD_HELP) {
        qc_help_overview(out);
        return;
    }
    char usage[QC_USAGE_BYTES];
    qc_command_usage(row, qc_option_table, usage);
    qc_strbuf_puts(out, "Usage: qconv ");
    add_wrapped(out, usage, 13, 13);
    qc_strbuf_puts(out, "\n");
    add_wrapped(out, row->text, 0, 0);
    for (unsigned g = 0; g < QC_GROUP_COUNT; g++)
        add_group(out, command, g);
    if (row->examples)
        add_examples(out, row->examples);
    qc_strbuf_puts(out, "\nExit codes:\n");
    for (unsigned i = 0; i < qc_exit_code_count; i++)
        if (!qc_exit_code_table[i].commands ||
            (qc_exit_code_table[i].commands & QC_CMD_BIT(command)))
            add_row(out, qc_exit_code_table[i].name, 7, qc_exit_code_table[i].meaning);
}

#include "convert/cli/help.h"

#include <stdio.h>
#include <string.h>

#define COLUMNS      80
#define TEXT_COLUMN  28
#define NAME_COLUMN  12
#define FIRST_COLUMN 2

/* Wraps the words of text. Continuation lines start at `indent`, and the cursor is at `at`. */
static qc_status add_wrapped(qc_strbuf *out, const char *text, size_t indent, size_t at,
                             qc_error *err)
{
    int line_start = 1;
    while (*text) {
        size_t word = strcspn(text, " \n");
        if (!line_start && at + 1 + word > COLUMNS) {
            QC_TRY(qc_strbuf_addf(out, err, "\n%*s", (int)indent, ""));
            at = indent;
            line_start = 1;
        }
        QC_TRY(qc_strbuf_addf(out, err, "%s%.*s", line_start ? "" : " ", (int)word, text));
        at += word + !line_start;
        line_start = 0;
        text += word;
        if (strncmp(text, "\n\n", 2) == 0) {
            QC_TRY(qc_strbuf_addf(out, err, "\n\n%*s", (int)indent, ""));
            at = indent;
            line_start = 1;
        }
        text += strspn(text, " \n");
    }
    return qc_strbuf_adds(out, "\n", err);
}

/* Writes a name, then its text in a column, or on the next line if the name is too long. */
static qc_status add_row(qc_strbuf *out, const char *name, size_t column, const char *text,
                         qc_error *err)
{
    QC_TRY(qc_strbuf_addf(out, err, "%*s%s", FIRST_COLUMN, "", name));
    size_t at = FIRST_COLUMN + strlen(name);
    if (at + 2 > column) {
        QC_TRY(qc_strbuf_adds(out, "\n", err));
        at = 0;
    }
    QC_TRY(qc_strbuf_addf(out, err, "%*s", (int)(column - at), ""));
    return add_wrapped(out, text, column, column, err);
}

qc_status qc_help_overview(qc_strbuf *out, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out,
                          "qconv quantizes and converts Hugging Face checkpoints.\n"
                          "\n"
                          "Usage:\n",
                          err));
    for (unsigned i = 0; i < qc_command_count; i++)
        QC_TRY(qc_strbuf_addf(out, err, "  qconv %s\n", qc_command_table[i].synopsis));
    QC_TRY(qc_strbuf_adds(out, "\nCommands:\n", err));
    for (unsigned i = 0; i < qc_command_count; i++)
        QC_TRY(
            add_row(out, qc_command_table[i].name, NAME_COLUMN, qc_command_table[i].summary, err));
    return qc_strbuf_adds(out,
                          "\n"
                          "Options of a command: 'qconv COMMAND --help'. Version: 'qconv "
                          "--version'.\n"
                          "Results go to standard output, everything else to standard error.\n",
                          err);
}

static qc_status add_option(qc_strbuf *out, const qc_option_row *row, qc_command command,
                            qc_error *err)
{
    char name[QC_SPELLED_BYTES + 8], spelled[QC_SPELLED_BYTES], text[512];
    char letter[5] = "    ";
    qc_option_spell(row, spelled);
    if (row->letter)
        (void)snprintf(letter, sizeof letter, "-%c, ", row->letter);
    (void)snprintf(name, sizeof name, "%s%s", letter, spelled);
    const char *note =
        row->dflt_of.commands & QC_CMD_BIT(command) ? row->dflt_of.note : row->dflt_note;
    const char *dflt = row->dflt ? row->dflt : note;
    if (row->dflt)
        (void)snprintf(text, sizeof text, "%s (default: %s)", row->help, dflt);
    else if (dflt)
        (void)snprintf(text, sizeof text, "%s (%s)", row->help, dflt);
    else
        (void)snprintf(text, sizeof text, "%s", row->help);
    return add_row(out, name, TEXT_COLUMN, text, err);
}

static qc_status add_group(qc_strbuf *out, qc_command command, unsigned group, qc_error *err)
{
    int titled = 0;
    for (unsigned i = 0; i < QC_OPT_COUNT; i++) {
        const qc_option_row *row = &qc_option_table[i];
        if (row->group != (qc_option_group)group || row->hidden || row->alone ||
            !(row->commands & QC_CMD_BIT(command)))
            continue;
        if (!titled)
            QC_TRY(qc_strbuf_addf(out, err, "\n%s:\n", qc_option_group_titles[group]));
        titled = 1;
        QC_TRY(add_option(out, row, command, err));
    }
    return QC_OK;
}

static qc_status add_examples(qc_strbuf *out, const char *examples, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out, "\nExamples:\n", err));
    while (*examples) {
        size_t command = strcspn(examples, "\n");
        const char *what = examples + command + 1;
        size_t len = strcspn(what, "\n");
        QC_TRY(qc_strbuf_addf(out, err, "  %.*s\n      %.*s\n", (int)command, examples, (int)len,
                              what));
        examples = what + len + 1;
    }
    return QC_OK;
}

qc_status qc_help_command(qc_strbuf *out, qc_command command, qc_error *err)
{
    const qc_command_row *row = qc_command_row_of(command);
    if (!row || command == QC_CMD_HELP)
        return qc_help_overview(out, err);
    QC_TRY(qc_strbuf_addf(out, err, "Usage: qconv %s\n\n", row->synopsis));
    QC_TRY(add_wrapped(out, row->text, 0, 0, err));
    for (unsigned g = 0; g < QC_GROUP_COUNT; g++)
        QC_TRY(add_group(out, command, g, err));
    if (row->examples)
        QC_TRY(add_examples(out, row->examples, err));
    QC_TRY(qc_strbuf_adds(out, "\nExit codes:\n", err));
    for (unsigned i = 0; i < qc_exit_code_count; i++)
        if (!qc_exit_code_table[i].commands ||
            (qc_exit_code_table[i].commands & QC_CMD_BIT(command)))
            QC_TRY(add_row(out, qc_exit_code_table[i].name, 7, qc_exit_code_table[i].meaning, err));
    return QC_OK;
}

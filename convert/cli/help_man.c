/* The manual page, in man(7) macros. Its date is left out: the text depends on the table only. */
#include "convert/cli/help.h"

#include <string.h>

/* Adds text in which '-', '\' and a leading '.' or '\'' mean themselves. With bold_dashes a "-"
 * becomes a minus that can be copied. Text may hold the blank line that separates paragraphs. */
static qc_status add_text(qc_strbuf *out, const char *text, qc_error *err)
{
    int line_start = 1;
    for (const char *c = text; *c; c++) {
        if (line_start && (*c == '.' || *c == '\''))
            QC_TRY(qc_strbuf_adds(out, "\\&", err));
        line_start = 0;
        if (strncmp(c, "\n\n", 2) == 0) {
            QC_TRY(qc_strbuf_adds(out, "\n.PP\n", err));
            c++;
            line_start = 1;
        } else if (*c == '-') {
            QC_TRY(qc_strbuf_adds(out, "\\-", err));
        } else if (*c == '\\') {
            QC_TRY(qc_strbuf_adds(out, "\\e", err));
        } else if (*c == '\'') {
            QC_TRY(qc_strbuf_adds(out, "\\(aq", err));
        } else {
            QC_TRY(qc_strbuf_add(out, c, 1, err));
        }
    }
    return QC_OK;
}

static qc_status add_line(qc_strbuf *out, const char *text, qc_error *err)
{
    QC_TRY(add_text(out, text, err));
    return qc_strbuf_adds(out, "\n", err);
}

/* ".TP", a bold tag, its text. */
static qc_status add_tagged(qc_strbuf *out, const char *tag, const char *text, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out, ".TP\n\\fB", err));
    QC_TRY(add_text(out, tag, err));
    QC_TRY(qc_strbuf_adds(out, "\\fR\n", err));
    return add_line(out, text, err);
}

static qc_status add_sentence(qc_strbuf *out, const char *clause, qc_error *err)
{
    char first[2] = {clause[0], '\0'};
    if (first[0] >= 'a' && first[0] <= 'z')
        first[0] = (char)(first[0] - 'a' + 'A');
    QC_TRY(add_text(out, first, err));
    QC_TRY(add_text(out, clause + 1, err));
    return qc_strbuf_adds(out, ".\n", err);
}

/* Adds "Commands: convert, unpack." unless the option is one of all commands. */
static qc_status add_scope(qc_strbuf *out, const qc_option_row *row, qc_error *err)
{
    unsigned all = 0, n = 0;
    for (unsigned i = 0; i < qc_command_count; i++)
        all |= QC_CMD_BIT(qc_command_table[i].command);
    if ((row->commands & all) == all)
        return QC_OK;
    for (unsigned i = 0; i < qc_command_count; i++) {
        if (!(row->commands & QC_CMD_BIT(qc_command_table[i].command)))
            continue;
        QC_TRY(qc_strbuf_addf(out, err, "%s\\fB%s\\fR", n++ ? ", " : "With ",
                              qc_command_table[i].name));
    }
    return qc_strbuf_adds(out, ".\n", err);
}

static qc_status add_option(qc_strbuf *out, const qc_option_row *row, qc_error *err)
{
    char spelled[QC_SPELLED_BYTES];
    qc_option_spell(row, spelled);
    QC_TRY(qc_strbuf_adds(out, ".TP\n\\fB", err));
    if (row->letter)
        QC_TRY(qc_strbuf_addf(out, err, "\\-%c\\fR, \\fB", row->letter));
    size_t name = strcspn(spelled, " ");
    char tail[QC_SPELLED_BYTES];
    memcpy(tail, spelled + name, strlen(spelled + name) + 1);
    spelled[name] = '\0';
    QC_TRY(add_text(out, spelled, err));
    QC_TRY(qc_strbuf_adds(out, "\\fR", err));
    if (tail[0]) {
        QC_TRY(qc_strbuf_adds(out, " \\fI", err));
        QC_TRY(add_text(out, tail + 1, err));
        QC_TRY(qc_strbuf_adds(out, "\\fR", err));
    }
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    QC_TRY(add_sentence(out, row->help, err));
    if (row->more)
        QC_TRY(add_line(out, row->more, err));
    const char *dflt = row->dflt ? row->dflt : row->dflt_note;
    if (dflt && strcmp(dflt, "required") == 0) {
        QC_TRY(add_line(out, "Required.", err));
    } else if (dflt) {
        QC_TRY(qc_strbuf_adds(out, "Default: ", err));
        QC_TRY(add_text(out, dflt, err));
        QC_TRY(qc_strbuf_adds(out, ".\n", err));
    }
    if (row->dflt_of.commands) {
        for (unsigned i = 0; i < qc_command_count; i++)
            if (row->dflt_of.commands & QC_CMD_BIT(qc_command_table[i].command))
                QC_TRY(qc_strbuf_addf(out, err, "With \\fB%s\\fR: ", qc_command_table[i].name));
        QC_TRY(add_text(out, row->dflt_of.note, err));
        QC_TRY(qc_strbuf_adds(out, ".\n", err));
    }
    QC_TRY(add_scope(out, row, err));
    return qc_strbuf_addf(out, err, "Since %s.\n", row->since);
}

static qc_status add_commands(qc_strbuf *out, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out, ".SH SYNOPSIS\n", err));
    for (unsigned i = 0; i < qc_command_count; i++) {
        QC_TRY(qc_strbuf_addf(out, err, "%s.B qconv\n", i ? ".br\n" : ""));
        QC_TRY(add_line(out, qc_command_table[i].synopsis, err));
    }
    QC_TRY(qc_strbuf_adds(out, ".SH DESCRIPTION\n", err));
    QC_TRY(add_line(out,
                    "qconv turns a Hugging Face checkpoint into one that is quantized (NF4 or "
                    "int8, in the form bitsandbytes and transformers load) or cast to 16 bits, "
                    "in constant memory, with a hash over every byte written.\n\n"
                    "Results go to standard output, everything else to standard error.",
                    err));
    QC_TRY(qc_strbuf_adds(out, ".SH COMMANDS\n", err));
    for (unsigned i = 0; i < qc_command_count; i++) {
        QC_TRY(qc_strbuf_addf(out, err, ".SS %s\n", qc_command_table[i].name));
        QC_TRY(add_line(out, qc_command_table[i].text, err));
    }
    return QC_OK;
}

static qc_status add_options(qc_strbuf *out, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out, ".SH OPTIONS\n", err));
    QC_TRY(add_line(out,
                    "A value follows its option after a space or after '='. Names cannot be "
                    "shortened. After '--' every argument is a path. Of an option given twice "
                    "the last one counts, except where it may be repeated. Sizes are written "
                    "like 5GB (10^9 bytes each), 512MiB (2^20 bytes each), 1.5GB or 4096.",
                    err));
    for (unsigned g = 0; g < QC_GROUP_COUNT; g++) {
        QC_TRY(qc_strbuf_addf(out, err, ".SS %s\n", qc_option_group_titles[g]));
        for (unsigned i = 0; i < QC_OPT_COUNT; i++)
            if (qc_option_table[i].group == (qc_option_group)g)
                QC_TRY(add_option(out, &qc_option_table[i], err));
    }
    return QC_OK;
}

static qc_status add_examples(qc_strbuf *out, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out, ".SH EXAMPLES\n", err));
    for (unsigned i = 0; i < qc_command_count; i++) {
        const char *e = qc_command_table[i].examples ? qc_command_table[i].examples : "";
        while (*e) {
            char line[256];
            for (int part = 0; part < 2; part++) {
                size_t len = strcspn(e, "\n");
                size_t kept = len < sizeof line - 1 ? len : sizeof line - 1;
                memcpy(line, e, kept);
                line[kept] = '\0';
                QC_TRY(qc_strbuf_adds(out, part ? "" : ".TP\n\\fB", err));
                QC_TRY(add_text(out, line, err));
                QC_TRY(qc_strbuf_adds(out, part ? "\n" : "\\fR\n", err));
                e += len + 1;
            }
        }
    }
    return QC_OK;
}

qc_status qc_help_man(qc_strbuf *out, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out,
                          ".\\\" Generated by 'qconv --man'. Do not edit.\n"
                          ".TH QCONV 1 \"\" \"qconv " QCONV_VERSION "\" \"User Commands\"\n"
                          ".SH NAME\n"
                          "qconv \\- quantize and convert Hugging Face checkpoints\n",
                          err));
    QC_TRY(add_commands(out, err));
    QC_TRY(add_options(out, err));
    QC_TRY(qc_strbuf_adds(out, ".SH EXIT STATUS\n", err));
    for (unsigned i = 0; i < qc_exit_code_count; i++)
        QC_TRY(add_tagged(out, qc_exit_code_table[i].name, qc_exit_code_table[i].meaning, err));
    QC_TRY(qc_strbuf_adds(out, ".SH ENVIRONMENT\n", err));
    for (unsigned i = 0; i < qc_environment_count; i++)
        QC_TRY(add_tagged(out, qc_environment_table[i].name, qc_environment_table[i].meaning, err));
    QC_TRY(add_examples(out, err));
    return qc_strbuf_adds(out, ".SH SEE ALSO\n.BR zstd (1)\n", err);
}

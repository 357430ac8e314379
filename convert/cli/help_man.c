/* The manual page, in man(7) macros. Its date is left out: the text depends on the table only. */
#include "convert/cli/help.h"

#include <string.h>

/* Adds text in which '-', '\' and a leading '.' or '\'' mean themselves. With bold_dashes a "-"
 * becomes a minus that can be copied. Text may hold the blank line that separates paragraphs. */
static void add_text(qc_strbuf *out, const char *text)
{
    int line_start = 1;
    for (const char *c = text; *c; c++) {
        if (line_start && (*c == '.' || *c == '\''))
            qc_strbuf_puts(out, "\\&");
        line_start = 0;
        if (strncmp(c, "\n\n", 2) == 0) {
            qc_strbuf_puts(out, "\n.PP\n");
            c++;
            line_start = 1;
        } else if (*c == '-') {
            qc_strbuf_puts(out, "\\-");
        } else if (*c == '\\') {
            qc_strbuf_puts(out, "\\e");
        } else if (*c == '\'') {
            qc_strbuf_puts(out, "\\(aq");
        } else {
            qc_strbuf_put(out, c, 1);
        }
    }
}

static void add_line(qc_strbuf *out, const char *text)
{
    add_text(out, text);
    qc_strbuf_puts(out, "\n");
}

/* ".TP", a bold tag, its text. */
static void add_tagged(qc_strbuf *out, const char *tag, const char *text)
{
    qc_strbuf_puts(out, ".TP\n\\fB");
    add_text(out, tag);
    qc_strbuf_puts(out, "\\fR\n");
    add_line(out, text);
}

static void add_sentence(qc_strbuf *out, const char *clause)
{
    char first[2] = {clause[0], '\0'};
    if (first[0] >= 'a' && first[0] <= 'z')
        first[0] = (char)(first[0] - 'a' + 'A');
    add_text(out, first);
    add_text(out, clause + 1);
    qc_strbuf_puts(out, ".\n");
}

/* Adds "With convert, unpack" and what follows it. Adds nothing where these are all commands, or
 * none. */
static void add_commands_of(qc_strbuf *out, const char *before, unsigned commands,
                            const char *after)
{
    unsigned all = 0, n = 0;
    for (unsigned i = 0; i < qc_command_count; i++)
        all |= QC_CMD_BIT(qc_command_table[i].command);
    if ((commands & all) == all || !(commands & all))
        return;
    for (unsigned i = 0; i < qc_command_count; i++)
        if (commands & QC_CMD_BIT(qc_command_table[i].command))
            qc_strbuf_putf(out, "%s\\fB%s\\fR", n++ ? ", " : before, qc_command_table[i].name);
    qc_strbuf_puts(out, after);
}

static void add_option(qc_strbuf *out, const qc_option_row *row)
{
    char spelled[QC_SPELLED_BYTES];
    qc_option_spell(row, spelled);
    qc_strbuf_puts(out, ".TP\n\\fB");
    if (row->letter)
        qc_strbuf_putf(out, "\\-%c\\fR, \\fB", row->letter);
    size_t name = strcspn(spelled, " ");
    char tail[QC_SPELLED_BYTES];
    memcpy(tail, spelled + name, strlen(spelled + name) + 1);
    spelled[name] = '\0';
    add_text(out, spelled);
    qc_strbuf_puts(out, "\\fR");
    if (tail[0]) {
        qc_strbuf_puts(out, " \\fI");
        add_text(out, tail + 1);
        qc_strbuf_puts(out, "\\fR");
    }
    qc_strbuf_puts(out, "\n");
    add_sentence(out, row->help);
    if (row->more)
        add_line(out, row->more);
    const char *dflt = row->dflt ? row->dflt : row->dflt_note;
    if (dflt) {
        qc_strbuf_puts(out, "Default: ");
        add_text(out, dflt);
        qc_strbuf_puts(out, ".\n");
    }
    if (row->dflt_of.commands) {
        add_commands_of(out, "Default with ", row->dflt_of.commands, ": ");
        add_text(out, row->dflt_of.note);
        qc_strbuf_puts(out, ".\n");
    }
    add_commands_of(out, "Required with ", row->required, ".\n");
    add_commands_of(out, "With ", row->commands, ".\n");
    qc_strbuf_putf(out, "Since %s.\n", row->since);
}

static void add_commands(qc_strbuf *out)
{
    char usage[QC_USAGE_BYTES];
    qc_strbuf_puts(out, ".SH SYNOPSIS\n");
    for (unsigned i = 0; i < qc_command_count; i++) {
        qc_strbuf_putf(out, "%s.B qconv\n", i ? ".br\n" : "");
        qc_command_usage(&qc_command_table[i], qc_option_table, usage);
        add_line(out, usage);
    }
    qc_strbuf_puts(out, ".SH DESCRIPTION\n");
    add_line(out, "qconv turns a Hugging Face checkpoint into one that is quantized (NF4, int8 or "
                  "int4, in the forms that transformers and vLLM load) or cast to 16 "
                  "bits, in constant memory, with a hash over every byte that it writes.\n\n"
                  "Results go to standard output, everything else to standard error.");
    qc_strbuf_puts(out, ".SH COMMANDS\n");
    for (unsigned i = 0; i < qc_command_count; i++) {
        qc_strbuf_putf(out, ".SS %s\n", qc_command_table[i].name);
        add_line(out, qc_command_table[i].text);
    }
}

static void add_options(qc_strbuf *out)
{
    qc_strbuf_puts(out, ".SH OPTIONS\n");
    add_line(out, "A value follows its option after a space or after '='. Names cannot be "
                  "shortened. After '--' every argument is a path. If an option is given "
                  "twice, the last one counts, unless it may be repeated. Sizes are written "
                  "like 5GB (10^9 bytes each), 512MiB (2^20 bytes each), 1.5GB or 4096.");
    for (unsigned g = 0; g < QC_GROUP_COUNT; g++) {
        qc_strbuf_putf(out, ".SS %s\n", qc_option_group_titles[g]);
        for (const qc_option_row *row = qc_option_table; row->name; row++)
            if (row->group == (qc_option_group)g)
                add_option(out, row);
    }
}

static void add_examples(qc_strbuf *out)
{
    qc_strbuf_puts(out, ".SH EXAMPLES\n");
    for (unsigned i = 0; i < qc_command_count; i++) {
        const char *e = qc_command_table[i].examples ? qc_command_table[i].examples : "";
        while (*e) {
            char line[256];
            for (int part = 0; part < 2; part++) {
                size_t len = strcspn(e, "\n");
                size_t kept = len < sizeof line - 1 ? len : sizeof line - 1;
                memcpy(line, e, kept);
                line[kept] = '\0';
                qc_strbuf_puts(out, part ? "" : ".TP\n\\fB");
                add_text(out, line);
                qc_strbuf_puts(out, part ? "\n" : "\\fR\n");
                e += len + 1;
            }
        }
    }
}

void qc_help_man(qc_strbuf *out)
{
    qc_strbuf_puts(out, ".\\\" Generated by 'qconv --man'. Do not edit.\n"
                        ".TH QCONV 1 \"\" \"qconv " QCONV_VERSION "\" \"User Commands\"\n"
                        ".SH NAME\n"
                        "qconv \\- quantize and convert Hugging Face checkpoints\n");
    add_commands(out);
    add_options(out);
    qc_strbuf_puts(out, ".SH EXIT STATUS\n");
    for (unsigned i = 0; i < qc_exit_code_count; i++)
        add_tagged(out, qc_exit_code_table[i].name, qc_exit_code_table[i].meaning);
    qc_strbuf_puts(out, ".SH ENVIRONMENT\n");
    for (unsigned i = 0; i < qc_environment_count; i++)
        add_tagged(out, qc_environment_table[i].name, qc_environment_table[i].meaning);
    add_examples(out);
    qc_strbuf_puts(out, ".SH SEE ALSO\n.BR zstd (1)\n");
}

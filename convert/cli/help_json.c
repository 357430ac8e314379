/* The table of commands and options as JSON, for programs that call qconv. */
#include "convert/cli/help.h"
#include "formats/json_writer.h"

#include <string.h>

static const char *const kinds[] = {
    [QC_ARG_NONE] = "switch",     [QC_ARG_CHOICE] = "choice", [QC_ARG_NUMBER] = "number",
    [QC_ARG_DECIMAL] = "decimal", [QC_ARG_SIZE] = "size",     [QC_ARG_FILE] = "file",
    [QC_ARG_TEXT] = "text",
};

static void write_option(qc_json_writer *w, const qc_option_row *row, qc_command command)
{
    size_t choices = 0;
    while (row->choices && row->choices[choices])
        choices++;
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "name", row->name);
    qc_json_member_string(w, "kind", kinds[row->kind]);
    qc_json_member_string(w, "argument", row->arg);
    qc_json_member_strings(w, "choices", row->choices, choices);
    qc_json_member_string(w, "default", row->dflt ? row->dflt : qc_option_note(row, command));
    qc_json_member_bool(w, "required", (row->required & QC_CMD_BIT(command)) != 0);
    qc_json_member_bool(w, "repeats", row->repeats);
    qc_json_member_string(w, "help", row->help);
    qc_json_member_string(w, "more", row->more);
    qc_json_write_end_object(w);
}

static void write_command(qc_json_writer *w, const qc_command_row *c)
{
    qc_json_write_begin_object(w);
    qc_json_member_string(w, "name", c->name);
    qc_json_member_string(w, "summary", c->summary);
    qc_json_member_begin_array(w, "places");
    for (unsigned i = 0; i < c->place_count; i++)
        qc_json_write_string(w, c->places[i].name);
    qc_json_write_end_array(w);
    qc_json_member_begin_array(w, "options");
    for (const qc_option_row *row = qc_option_table; row->name; row++)
        if ((row->commands & QC_CMD_BIT(c->command)) && !row->hidden)
            write_option(w, row, c->command);
    qc_json_write_end_array(w);
    qc_json_write_end_object(w);
}

qc_status qc_help_json(qc_strbuf *out, qc_command command, qc_error *err)
{
    qc_json_writer w;
    qc_json_write_begin_text(&w, out, err);
    qc_json_member_string(&w, "version", QCONV_VERSION);
    qc_json_member_begin_array(&w, "commands");
    for (unsigned i = 0; i < qc_command_count; i++)
        if (command == QC_CMD_HELP || command == qc_command_table[i].command)
            write_command(&w, &qc_command_table[i]);
    qc_json_write_end_array(&w);
    qc_json_member_begin_array(&w, "python_commands");
    for (unsigned i = 0; i < qc_python_command_count; i++) {
        qc_json_member_begin_row(&w);
        qc_json_member_string(&w, "name", qc_python_command_table[i].name);
        qc_json_member_string(&w, "summary", qc_python_command_table[i].meaning);
        qc_json_write_end_object(&w);
    }
    qc_json_write_end_array(&w);
    qc_json_member_begin_array(&w, "exit_codes");
    for (unsigned i = 0; i < qc_exit_code_count; i++) {
        qc_json_member_begin_row(&w);
        qc_json_member_string(&w, "code", qc_exit_code_table[i].name);
        qc_json_member_string(&w, "meaning", qc_exit_code_table[i].meaning);
        qc_json_write_end_object(&w);
    }
    qc_json_write_end_array(&w);
    return qc_json_write_end_text(&w);
}

/* The table of commands and options as JSON, for programs that call qconv, and for
 * cmake/make_pages.py, which makes the manual page and the completions of it. */
#include "convert/cli/help.h"
#include "convert/hardware/card_table.h"
#include "convert/known/known_models.h"
#include "formats/json_writer.h"

static const char *const kinds[] = {
    [QC_ARG_NONE] = "switch",     [QC_ARG_CHOICE] = "choice", [QC_ARG_NUMBER] = "number",
    [QC_ARG_DECIMAL] = "decimal", [QC_ARG_SIZE] = "size",     [QC_ARG_FILE] = "file",
    [QC_ARG_TEXT] = "text",
};

static const char *const place_kinds[] = {
    [QC_PLACE_PATH] = "path",
    [QC_PLACE_DIR] = "directory",
    [QC_PLACE_COMMAND] = "command",
};

/* What an option is, whatever the command. */
static void write_kind(qc_json_writer *w, const qc_option_row *row)
{
    size_t choices = 0;
    while (row->choices && row->choices[choices])
        choices++;
    qc_json_put_text(w, "name", row->name);
    qc_json_put_text(w, "kind", kinds[row->kind]);
    qc_json_put_text(w, "argument", row->arg);
    qc_json_put_texts(w, "choices", row->choices, choices);
}

static void write_text(qc_json_writer *w, const qc_option_row *row)
{
    qc_json_put_bool(w, "repeats", row->repeats);
    qc_json_put_text(w, "help", row->help);
    qc_json_put_text(w, "more", row->more);
}

static void write_names(qc_json_writer *w, const char *key, unsigned commands)
{
    qc_json_begin_list(w, key);
    for (unsigned i = 0; i < qc_command_count; i++)
        if (commands & QC_CMD_BIT(qc_command_table[i].command))
            qc_json_put_text(w, NULL, qc_command_table[i].name);
    qc_json_end(w);
}

/* A row of the option table. */
static void write_option(qc_json_writer *w, const qc_option_row *row)
{
    const char letter[2] = {row->letter, '\0'};
    qc_json_begin_object(w, NULL);
    write_kind(w, row);
    qc_json_put_text(w, "letter", row->letter ? letter : NULL);
    qc_json_put_text(w, "group", qc_option_group_titles[row->group]);
    write_names(w, "commands", row->commands);
    write_names(w, "required_with", row->required);
    qc_json_put_text(w, "default", row->dflt ? row->dflt : row->dflt_note);
    write_names(w, "default_differs_with", row->dflt_of.commands);
    qc_json_put_text(w, "default_there", row->dflt_of.note);
    qc_json_put_text(w, "since", row->since);
    write_text(w, row);
    qc_json_end(w);
}

static void write_command(qc_json_writer *w, const qc_command_row *c)
{
    char usage[QC_USAGE_BYTES];
    qc_command_usage(c, qc_option_table, usage);
    qc_json_begin_object(w, NULL);
    qc_json_put_text(w, "name", c->name);
    qc_json_put_text(w, "summary", c->summary);
    qc_json_put_text(w, "usage", usage);
    qc_json_put_text(w, "text", c->text);
    qc_json_begin_list(w, "places");
    for (unsigned i = 0; i < c->place_count; i++)
        qc_json_put_text(w, NULL, c->places[i].name);
    qc_json_end(w);
    qc_json_begin_list(w, "place_kinds");
    for (unsigned i = 0; i < c->place_count; i++)
        qc_json_put_text(w, NULL, place_kinds[c->places[i].kind]);
    qc_json_end(w);
    qc_json_begin_list(w, "options");
    for (const qc_option_row *row = qc_option_table; row->name; row++) {
        if (!(row->commands & QC_CMD_BIT(c->command)))
            continue;
        qc_json_begin_object(w, NULL);
        write_kind(w, row);
        qc_json_put_text(w, "default", row->dflt ? row->dflt : qc_option_note(row, c->command));
        qc_json_put_bool(w, "required", (row->required & QC_CMD_BIT(c->command)) != 0);
        write_text(w, row);
        qc_json_end(w);
    }
    qc_json_end(w);
    qc_json_put_text(w, "examples", c->examples);
    qc_json_end(w);
}

static void write_rows(qc_json_writer *w, const char *key, const char *name, const char *meaning,
                       const qc_text_row *rows, unsigned count)
{
    qc_json_begin_list(w, key);
    for (unsigned i = 0; i < count; i++) {
        qc_json_begin_row(w, NULL);
        qc_json_put_text(w, name, rows[i].name);
        qc_json_put_text(w, meaning, rows[i].meaning);
        qc_json_end(w);
    }
    qc_json_end(w);
}

/* The names that a shell completes: of models for plan, of cards for --vram and --as. */
static void write_models_and_cards(qc_json_writer *w)
{
    unsigned count = 0;
    const qc_known_model *models = qc_known_models(&count);
    qc_json_begin_list(w, "models");
    for (unsigned i = 0; i < count; i++)
        qc_json_put_text(w, NULL, models[i].id);
    qc_json_end(w);
    qc_json_begin_list(w, "cards");
    for (unsigned i = 0; i < qc_card_count; i++)
        qc_json_put_text(w, NULL, qc_card_table[i].name);
    qc_json_end(w);
}

qc_status qc_help_json(qc_strbuf *out, qc_command command, qc_error *err)
{
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "version", QCONV_VERSION);
    qc_json_begin_list(&w, "commands");
    for (unsigned i = 0; i < qc_command_count; i++)
        if (command == QC_CMD_HELP || command == qc_command_table[i].command)
            write_command(&w, &qc_command_table[i]);
    qc_json_end(&w);
    qc_json_put_texts(&w, "groups", qc_option_group_titles, QC_GROUP_COUNT);
    qc_json_begin_list(&w, "options");
    for (const qc_option_row *row = qc_option_table; row->name; row++)
        if (command == QC_CMD_HELP || (row->commands & QC_CMD_BIT(command)))
            write_option(&w, row);
    qc_json_end(&w);
    write_rows(&w, "python_commands", "name", "summary", qc_python_command_table,
               qc_python_command_count);
    write_rows(&w, "exit_codes", "code", "meaning", qc_exit_code_table, qc_exit_code_count);
    write_rows(&w, "environment", "name", "meaning", qc_environment_table, qc_environment_count);
    write_models_and_cards(&w);
    return qc_json_end_text(&w);
}

/* Parsing has three steps, so that messages can name the right command wherever it stands:
 *
 *   split    cuts argv into options with their values, and words; nothing is judged yet
 *   choose   finds the command: --help and --version first, else the first word if it is the name
 *            of one, else convert
 *   apply    brings each option in order to qc_options, then checks what goes with what
 *
 * Defaults come from the table and pass through the same apply step. */
#include "convert/cli/options.h"

#include "base/text.h"
#include "convert/cli/option_mistakes.h"
#include "convert/cli/option_table.h"
#include "convert/cli/option_values.h"
#include "convert/cli/rules_file.h"
#include "convert/fit/tensor_parallel.h"
#include "convert/plan/engines.h"
#include "formats/file_io.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum { ITEM_FINE, ITEM_UNKNOWN, ITEM_LACKS_VALUE, ITEM_TAKES_NONE } item_state;

typedef struct {
    item_state state;
    int implied;              /* not typed: another option implies it */
    const qc_option_row *row; /* NULL when unknown */
    const char *name;         /* as typed, for messages */
    int name_len;
    const char *value;
} item;

typedef struct {
    qc_arena *arena;
    item *items;
    size_t item_count;
    const char **words;
    size_t word_count;
    size_t words_before_dashes; /* words that stand before "--" */
} parse;

/* ---- split ---- */

static const qc_option_row *row_named(const char *name, size_t len)
{
    for (const qc_option_row *r = qc_option_table; r->name; r++)
        if (strlen(r->name) == len && strncmp(r->name, name, len) == 0)
            return r;
    return NULL;
}

/* Finds the row for the command among those that share a name. */
static const qc_option_row *row_for(const qc_option_row *row, qc_command command)
{
    for (const qc_option_row *r = qc_option_table; row && r->name; r++)
        if ((r->commands & QC_CMD_BIT(command)) && strcmp(r->name, row->name) == 0)
            return r;
    return row;
}

/* Takes one long option at argv[i], and returns how many further arguments it took. */
static int split_long(parse *p, int argc, char **argv, int i)
{
    const char *name = argv[i] + 2;
    const char *equals = strchr(name, '=');
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    item *it = &p->items[p->item_count++];
    it->row = row_named(name, len);
    it->name = argv[i];
    it->name_len = (int)(len + 2);
    if (!it->row) {
        it->state = ITEM_UNKNOWN;
    } else if (it->row->kind == QC_ARG_NONE) {
        it->state = equals ? ITEM_TAKES_NONE : ITEM_FINE;
    } else if (equals) {
        it->value = equals + 1;
    } else if (i + 1 < argc && !qc_begins_with(argv[i + 1], "--")) {
        it->value = argv[i + 1];
        return 1;
    } else {
        it->state = ITEM_LACKS_VALUE;
    }
    return 0;
}

/* Takes letters, which may stand together: -qv. None of them has a value. */
static void split_letters(parse *p, const char *arg)
{
    for (const char *c = arg + 1; *c; c++) {
        item *it = &p->items[p->item_count++];
        it->name = arg;
        it->name_len = (int)strlen(arg);
        for (it->row = qc_option_table; it->row->name && it->row->letter != *c;)
            it->row++;
        if (!it->row->name) {
            it->row = NULL;
            it->state = ITEM_UNKNOWN;
            return;
        }
    }
}

static qc_status split_arguments(parse *p, int argc, char **argv, qc_error *err)
{
    size_t room = 1;
    for (int i = 1; i < argc; i++)
        room += argv[i][0] == '-' && argv[i][1] != '-' ? strlen(argv[i]) : 1;
    QC_TRY(qc_arena_alloc(p->arena, &p->items, room * 2, sizeof *p->items, err));
    QC_TRY(qc_arena_alloc(p->arena, &p->words, (size_t)argc, sizeof *p->words, err));
    int dashes = 0;
    for (int i = 1; i < argc; i++) {
        if (dashes || argv[i][0] != '-' || argv[i][1] == '\0') {
            p->words[p->word_count++] = argv[i];
            p->words_before_dashes += !dashes;
        } else if (strcmp(argv[i], "--") == 0) {
            dashes = 1;
        } else if (argv[i][1] == '-') {
            i += split_long(p, argc, argv, i);
        } else {
            split_letters(p, argv[i]);
        }
    }
    return QC_OK;
}

/* Returns the last item of this option, or NULL where it was not given. */
static const item *given(const parse *p, const char *name, size_t len)
{
    const item *last = NULL;
    for (const item *it = p->items; it < p->items + p->item_count; it++)
        if (it->row && strlen(it->row->name) == len && strncmp(it->row->name, name, len) == 0)
            last = it;
    return last;
}

static int was_given(const parse *p, const char *name)
{
    return given(p, name, strlen(name)) != NULL;
}

/* ---- choose ---- */

static int exists(const char *path)
{
    qc_path_kind kind = QC_PATH_MISSING;
    return qc_path_stat(path, &kind, NULL, NULL) == QC_OK && kind != QC_PATH_MISSING;
}

/* The first option that the command requires and that was not given, or NULL. */
static const qc_option_row *missing_option(const parse *p, qc_command command)
{
    const qc_option_row *r = qc_option_table;
    while (r->name && (!(r->required & QC_CMD_BIT(command)) || was_given(p, r->name)))
        r++;
    return r->name ? r : NULL;
}

/* Refuses a command that is not, or no longer, one of this program, and says what does its job. */
static qc_status check_elsewhere(const char *word, qc_error *err)
{
    const char *instead = qc_gone_instead(word, strlen(word), QC_CMD_HELP);
    if (instead)
        QC_FAIL(err, QC_ERR_USAGE, "qconv has no '%s': %s", word, instead);
    if (qc_is_python_command(word))
        QC_FAIL(err, QC_ERR_USAGE,
                "'%s' is a command of qconv's Python package: 'pip install .' in the source folder "
                "brings it, 'python -m qconv %s --help' explains it",
                word, word);
    return QC_OK;
}

/* Is the first word a command of elsewhere, a misspelt one, or what another tool calls it? It is
 * not where the options and the words are those of convert, and it is no guess where something has
 * this name: a source folder has a "bench". */
static qc_status check_first_word(const parse *p, qc_options *o, qc_error *err)
{
    const char *word = p->words_before_dashes > 0 ? p->words[0] : NULL;
    if (!word || (!missing_option(p, QC_CMD_CONVERT) && p->word_count <= 2))
        return QC_OK;
    QC_TRY(check_elsewhere(word, err));
    const qc_command_row *meant = exists(word) ? NULL : qc_mistaken_command(word);
    if (!meant)
        return QC_OK;
    o->command = meant->command; /* the message names the --help of this one */
    QC_FAIL(err, QC_ERR_USAGE, "unknown command '%s'; did you mean %s?", word, meant->name);
}

static qc_status choose_command(parse *p, qc_options *o, qc_error *err)
{
    /* A web page or a word processor makes these of "--". */
    static const char *const dashes[] = {"\xe2\x80\x93", "\xe2\x80\x94", "\xe2\x88\x92"};
    o->command = QC_CMD_CONVERT;
    for (size_t w = 0; w < p->words_before_dashes; w++)
        for (size_t i = 0; i < sizeof dashes / sizeof *dashes; i++)
            if (strncmp(p->words[w], dashes[i], 3) == 0)
                QC_FAIL(err, QC_ERR_USAGE,
                        "'%s' begins with a dash that is not '-'; did you mean --%s?", p->words[w],
                        p->words[w] + 3);
    const qc_command_row *named =
        p->words_before_dashes > 0 ? qc_command_row_named(p->words[0]) : NULL;
    if (named) {
        o->command = named->command;
        p->words++;
        p->word_count--;
    } else {
        QC_TRY(check_first_word(p, o, err));
    }
    for (size_t i = 0; i < p->item_count; i++)
        p->items[i].row = row_for(p->items[i].row, o->command);
    if (was_given(p, "help")) {
        int bare = !named && p->word_count == 0 && p->item_count == 1;
        o->help_topic = bare ? QC_CMD_HELP : o->command;
        o->command = QC_CMD_HELP;
    }
    return QC_OK;
}

/* *tail becomes "; did you mean --to?", or "". */
static qc_status find_meant(const char **tail, qc_arena *arena, const item *it, qc_command command,
                            qc_error *err)
{
    size_t dashes = it->name[1] == '-' ? 2 : 1;
    const char *meant = NULL;
    const char *instead = qc_gone_instead(it->name, (size_t)it->name_len, command);
    if (instead)
        QC_FAIL(err, QC_ERR_USAGE, "qconv has no '%.*s': %s", it->name_len, it->name, instead);
    QC_TRY(qc_mistaken_option(&meant, arena, it->name + dashes, (size_t)it->name_len - dashes,
                              qc_option_table, command, err));
    *tail = "";
    return meant ? qc_arena_printf(arena, tail, err, "; did you mean %s?", meant) : QC_OK;
}

static qc_status check_item(const item *it, qc_arena *arena, qc_command command, qc_error *err)
{
    char choices[QC_SPELLED_BYTES];
    const char *tail = NULL;
    switch (it->state) {
    case ITEM_UNKNOWN:
        QC_TRY(find_meant(&tail, arena, it, command, err));
        QC_FAIL(err, QC_ERR_USAGE, "unknown option '%.*s'%s", it->name_len, it->name, tail);
    case ITEM_LACKS_VALUE:
        if (it->row->choices) {
            qc_option_list_choices(it->row, choices, sizeof choices);
            QC_FAIL(err, QC_ERR_USAGE, "--%s needs a value: %s", it->row->name, choices);
        }
        QC_FAIL(err, QC_ERR_USAGE, "--%s needs a value: --%s=%s", it->row->name, it->row->name,
                it->row->arg);
    case ITEM_TAKES_NONE:
        QC_FAIL(err, QC_ERR_USAGE, "--%s takes no value", it->row->name);
    case ITEM_FINE:
        break;
    }
    if (!(it->row->commands & QC_CMD_BIT(command))) {
        QC_TRY(find_meant(&tail, arena, it, command, err));
        QC_FAIL(err, QC_ERR_USAGE, "--%s is not an option of 'qconv %s'%s", it->row->name,
                qc_command_row_of(command)->name, tail);
    }
    return QC_OK;
}

/* ---- apply ---- */

static qc_status apply_option(qc_options *o, const qc_option_row *row, const char *value,
                              qc_error *err)
{
    static const int given = 1;
    if (row->set)
        QC_TRY(row->set(o, row, value, err));
    if (row->given)
        memcpy((char *)o + row->given, &given, sizeof given);
    return QC_OK;
}

/* The defaults of the command's rows, and of those that it does not have. */
static qc_status apply_defaults(qc_options *o, qc_error *err)
{
    for (const qc_option_row *r = qc_option_table; r->name; r++) {
        if (row_for(r, o->command) != r)
            continue;
        if (r->dflt)
            QC_TRY(apply_option(o, r, r->dflt, err));
        else if (r->kind == QC_ARG_NONE && r->values)
            memcpy((char *)o + r->at, &r->values[1], sizeof r->values[1]);
    }
    return QC_OK;
}

/* ---- what goes with what ---- */

/* One option of a condition: "--to int4|int8" of "--to int4|int8 or --vram". */
typedef struct {
    const qc_option_row *row; /* NULL where the command has no such option */
    const char *values;       /* or NULL for any */
    int values_len;
    const char *rest; /* behind it; or NULL */
} choice_of;

static choice_of first_of(const char *condition, qc_command command)
{
    choice_of c = {0};
    const char *name = condition + 2, *end = name + strcspn(name, " ");
    c.row = row_for(row_named(name, (size_t)(end - name)), command);
    if (c.row && !(c.row->commands & QC_CMD_BIT(command)))
        c.row = NULL;
    if (*end && !qc_begins_with(end, " or ")) {
        c.values = end + 1;
        c.values_len = (int)strcspn(c.values, " ");
        end = c.values + c.values_len;
    }
    c.rest = *end ? end + 4 : NULL;
    return c;
}

/* Is it one of "nf4|int8", or none of "!nf4|int8"? */
static int is_value(const char *value, const char *values, int len)
{
    char word[32];
    const int none = *values == '!';
    for (const char *s = values + none, *end = values + len; s < end;) {
        size_t n = strcspn(s, "| ");
        (void)snprintf(word, sizeof word, "%.*s", (int)n, s);
        if (qc_same_word(value, word))
            return !none;
        s += n + 1;
    }
    return none;
}

/* Does the condition hold? *which becomes the option that was given so, if it is not NULL. */
static int holds(const parse *p, const char *condition, qc_command command, choice_of *which)
{
    for (const char *s = condition; s;) {
        const choice_of c = first_of(s, command);
        const item *it = c.row ? given(p, c.row->name, strlen(c.row->name)) : NULL;
        if (which)
            *which = c;
        if (it ? !c.values || is_value(it->value, c.values, c.values_len)
               : c.row && !c.values && (c.row->dflt_of.commands & QC_CMD_BIT(command)))
            return 1; /* what the command takes for granted need not be given */
        s = c.rest;
    }
    return 0;
}

/* *text becomes the condition as people read it, "--to int4, int8 or auto", without options that
 * the command does not have; "" if there is none left. */
static qc_status spell(const char **text, qc_arena *arena, const char *condition,
                       qc_command command, qc_error *err)
{
    *text = "";
    for (const char *s = condition; s;) {
        const choice_of c = first_of(s, command);
        s = c.rest;
        if (!c.row)
            continue;
        QC_TRY(qc_arena_printf(arena, text, err, "%s%s--%s", *text, **text ? " or " : "",
                               c.row->name));
        const char *between = " ", *value = c.values;
        for (const char *end = value + c.values_len; value && value < end && *value != '!';) {
            int n = (int)strcspn(value, "| ");
            QC_TRY(qc_arena_printf(arena, text, err, "%s%s%.*s", *text, between, n, value));
            value += n + 1;
            between = memchr(value, '|', value < end ? (size_t)(end - value) : 0) ? ", " : " or ";
        }
    }
    return QC_OK;
}

/* Does a rule count for this item? */
static int counts(const parse *p, const item *it, const qc_option_rule *rule, qc_command command)
{
    return (!rule->of || is_value(it->value, rule->of, (int)strlen(rule->of))) &&
           (!rule->above || strtoull(it->value, NULL, 10) > rule->above) &&
           (!rule->with || holds(p, rule->with, command, NULL));
}

static qc_status check_rule(const parse *p, const item *it, const qc_option_rule *rule,
                            qc_command command, qc_error *err)
{
    choice_of which = {0};
    const char *with = "", *other = "";
    const int refused = rule->not_with && holds(p, rule->not_with, command, &which);
    if (rule->needs && !holds(p, rule->needs, command, NULL))
        QC_TRY(spell(&other, p->arena, rule->needs, command, err));
    if (!refused && !*other)
        return QC_OK;
    if (rule->with)
        QC_TRY(spell(&with, p->arena, rule->with, command, err));
    if (refused && which.values && *which.values != '!')
        QC_TRY(qc_arena_printf(p->arena, &other, err, "--%s %s", which.row->name,
                               given(p, which.row->name, strlen(which.row->name))->value));
    else if (refused)
        QC_TRY(qc_arena_printf(p->arena, &other, err, "--%s", which.row->name));
    const int shown = rule->of || rule->above;
    QC_FAIL(err, QC_ERR_USAGE, "--%s%s%s%s%s %s %s%s", it->row->name, shown ? " " : "",
            shown ? it->value : "", *with ? " with " : "", with,
            refused ? "does not go with" : "needs", other, rule->why ? rule->why : "");
}

/* Refuses options whose rows say that they do not go together, or only with another. */
static qc_status check_rules(const parse *p, const qc_options *o, qc_error *err)
{
    const qc_to to = o->convert.plan.recipe.to;
    for (const item *it = p->items; it < p->items + p->item_count; it++) {
        if (it->implied || given(p, it->row->name, strlen(it->row->name)) != it)
            continue; /* of an option that was given twice the last one counts */
        if (it->row->quantizes && !qc_to_quantizes(to))
            QC_FAIL(err, QC_ERR_USAGE, "--%s does not go with --to %s, which quantizes nothing",
                    it->row->name, qc_to_name(to));
        for (const qc_option_rule *r = it->row->rules; r && (r->needs || r->not_with || r->implies);
             r++)
            if (counts(p, it, r, o->command))
                QC_TRY(check_rule(p, it, r, o->command, err));
    }
    return QC_OK;
}

/* Adds the options that those on the command line imply. */
static qc_status add_implied(parse *p, qc_options *o, qc_error *err)
{
    const size_t typed = p->item_count;
    for (size_t i = 0; i < typed; i++) {
        const item *it = &p->items[i];
        const qc_option_rule *r = it->row->rules;
        if (given(p, it->row->name, strlen(it->row->name)) != it)
            continue;
        while (r && (r->needs || r->not_with) && !r->implies)
            r++;
        for (; r && r->implies; r++) {
            const choice_of c = first_of(r->implies, o->command);
            if (!c.row || was_given(p, c.row->name) || !counts(p, it, r, o->command))
                continue;
            p->items[p->item_count++] = (item){.row = c.row, .implied = 1, .value = c.values};
            QC_TRY(apply_option(o, c.row, c.values, err));
        }
    }
    return QC_OK;
}

/* The value may stand where it is none, as a word or behind another option: "--quantize nf4". */
static qc_status check_required(const parse *p, qc_command command, qc_error *err)
{
    char choices[QC_SPELLED_BYTES];
    const qc_option_row *r = missing_option(p, command);
    if (!r)
        return QC_OK;
    if (!r->choices)
        QC_FAIL(err, QC_ERR_USAGE, "--%s is missing; expected --%s with %s", r->name, r->name,
                r->missing);
    for (const item *it = p->items; it < p->items + p->item_count; it++)
        if (!it->row->choices && it->value && qc_option_choice(r, it->value) >= 0)
            QC_FAIL(err, QC_ERR_USAGE, "--%s is missing; did you mean --%s %s instead of --%s %s?",
                    r->name, r->name, it->value, it->row->name, it->value);
    for (size_t i = 0; i < p->word_count; i++)
        if (qc_option_choice(r, p->words[i]) >= 0 && !exists(p->words[i]))
            QC_FAIL(err, QC_ERR_USAGE, "--%s is missing; did you mean --%s %s?", r->name, r->name,
                    p->words[i]);
    qc_option_list_choices(r, choices, sizeof choices);
    QC_FAIL(err, QC_ERR_USAGE, "--%s is missing; expected --%s with %s", r->name, r->name, choices);
}

/* ---- words ---- */

static qc_status place_words(const parse *p, qc_options *o, qc_error *err)
{
    static const char *const files[] = {".safetensors", ".zst", ".bin", ".gguf",
                                        ".pt",          ".pth", ".json"};
    const qc_command_row *c = qc_command_row_of(o->command);
    char usage[QC_USAGE_BYTES];
    int out_spared = 0;
    for (size_t i = 0; i < p->item_count; i++)
        out_spared |= p->items[i].row->spares_out;
    qc_command_usage(c, qc_option_table, usage);
    for (unsigned i = 0; i < c->place_count; i++) {
        if (i < p->word_count && p->words[i][0] == '\0')
            QC_FAIL(err, QC_ERR_USAGE, "%s is empty; expected a path", c->places[i].name);
        int optional = c->places[i].optional || (out_spared && i > 0);
        if (i >= p->word_count && !optional)
            QC_FAIL(err, QC_ERR_USAGE, "%s is missing; usage: qconv %s", c->places[i].name, usage);
    }
    if (p->word_count > c->place_count)
        QC_FAIL(err, QC_ERR_USAGE, "one argument too many: '%s'; usage: qconv %s",
                p->words[c->place_count], usage);
    o->model = p->word_count > 0 ? p->words[0] : NULL;
    o->out = p->word_count > 1 ? p->words[1] : NULL;
    for (size_t i = 0; o->out && i < sizeof files / sizeof *files; i++)
        if (qc_ends_with(o->out, files[i]) && !exists(o->out))
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s: %s is a folder, and this is the name of a file; did you mean '%.*s'?",
                    o->out, c->places[1].name, (int)(strlen(o->out) - strlen(files[i])), o->out);
    return QC_OK;
}

static qc_status place_topic(qc_options *o, qc_error *err)
{
    o->help_topic = QC_CMD_HELP;
    if (!o->model)
        return QC_OK;
    const qc_command_row *topic = qc_command_row_named(o->model);
    if (!topic) {
        QC_TRY(check_elsewhere(o->model, err));
        topic = qc_mistaken_command(o->model);
        QC_FAIL(err, QC_ERR_USAGE, "unknown command '%s'%s%s%s", o->model,
                topic ? "; did you mean " : "", topic ? topic->name : "", topic ? "?" : "");
    }
    o->help_topic = topic->command;
    o->model = NULL;
    return QC_OK;
}

/* The rules of the recipe file come before those of the command line. */
static qc_status merge_rules(qc_options *o, qc_error *err)
{
    qc_recipe_options *r = &o->convert.plan.recipe;
    qc_rule *from_file = NULL, *all = NULL;
    uint32_t count = 0;
    if (!o->recipe_file)
        return QC_OK;
    QC_TRY(qc_rules_file_read(o->call.arena, o->recipe_file, &from_file, &count, err));
    for (uint32_t i = 0; i < count && !qc_to_quantizes(r->to); i++)
        if (from_file[i].quantize)
            QC_FAIL(err, QC_ERR_USAGE, "recipe '%s': rules[%u] quantizes, which --to %s does not",
                    o->recipe_file, i, qc_to_name(r->to));
    QC_TRY(qc_arena_alloc(o->call.arena, &all, (size_t)count + r->rule_count, sizeof *all, err));
    if (count)
        memcpy(all, from_file, count * sizeof *all);
    if (r->rule_count)
        memcpy(all + count, r->rules, r->rule_count * sizeof *all);
    r->rules = all;
    r->rule_count += count;
    return QC_OK;
}

/* Writes the options of `plan` as they were typed, for the command that makes the plan so. */
static qc_status tell_convert(const parse *p, qc_options *o, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, SIZE_MAX / 2);
    for (size_t i = 0; i < p->item_count; i++) {
        const item *it = &p->items[i];
        if (it->implied || !(it->row->commands & QC_CMD_BIT(QC_CMD_CONVERT)) ||
            it->row->group > QC_GROUP_FIT)
            continue;
        qc_strbuf_putf(&text, " --%s", it->row->name);
        if (it->value) {
            qc_strbuf_puts(&text, " ");
            qc_shell_word(&text, it->value);
        }
    }
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK)
        st = qc_arena_strndup(p->arena, &o->for_convert, text.data ? text.data : "", text.len, err);
    qc_strbuf_deinit(&text);
    return st;
}

qc_status qc_options_parse(qc_options *out, qc_arena *arena, int argc, char **argv, qc_error *err)
{
    parse p = {.arena = arena};
    memset(out, 0, sizeof *out);
    out->call.arena = arena;
    out->program = argc > 0 ? argv[0] : "qconv";
    out->command = QC_CMD_HELP;
    out->help_topic = QC_CMD_HELP;
    QC_TRY(split_arguments(&p, argc, argv, err));
    QC_TRY(choose_command(&p, out, err));
    QC_TRY(apply_defaults(out, err));
    if (was_given(&p, "help"))
        return QC_OK;
    for (size_t i = 0; i < p.item_count; i++) {
        const item *it = &p.items[i];
        if (!it->row || !it->row->alone)
            continue;
        out->command = QC_CMD_HELP;
        QC_TRY(check_item(it, p.arena, out->command, err));
        QC_TRY(apply_option(out, it->row, it->value, err));
        out->command = it->row->alone;
        return QC_OK;
    }
    for (size_t i = 0; i < p.item_count; i++)
        QC_TRY(check_item(&p.items[i], p.arena, out->command, err));
    for (size_t i = 0; i < p.item_count; i++)
        QC_TRY(apply_option(out, p.items[i].row, p.items[i].value, err));
    QC_TRY(add_implied(&p, out, err));
    QC_TRY(check_required(&p, out->command, err));
    QC_TRY(check_rules(&p, out, err));
    out->convert.plan.fit.plugin = (out->engines >> QC_ENGINE_PLUGIN & 1) != 0;
    qc_tp_defaults(&out->convert.plan.fit);
    QC_TRY(place_words(&p, out, err));
    if (out->command == QC_CMD_HELP)
        return place_topic(out, err);
    QC_TRY(tell_convert(&p, out, err));
    return merge_rules(out, err);
}

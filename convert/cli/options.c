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
#include "formats/file_io.h"

#include <stdio.h>
#include <string.h>

typedef enum { ITEM_FINE, ITEM_UNKNOWN, ITEM_LACKS_VALUE, ITEM_TAKES_NONE } item_state;

typedef struct {
    item_state state;
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

static const qc_option_row *row_lettered(char letter)
{
    for (const qc_option_row *r = qc_option_table; r->name; r++)
        if (r->letter == letter)
            return r;
    return NULL;
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
    } else if (i + 1 < argc && strncmp(argv[i + 1], "--", 2) != 0) {
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
        it->row = row_lettered(*c);
        it->name = arg;
        it->name_len = (int)strlen(arg);
        if (!it->row) {
            it->state = ITEM_UNKNOWN;
            return;
        }
    }
}

static qc_status split(parse *p, int argc, char **argv, qc_error *err)
{
    size_t room = 0;
    for (int i = 1; i < argc; i++)
        room += argv[i][0] == '-' && argv[i][1] != '-' ? strlen(argv[i]) : 1;
    QC_TRY(qc_arena_alloc(p->arena, &p->items, room, sizeof *p->items, err));
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

/* Refuses a dash that a web page or a word processor made of "--". */
static qc_status check_dashes(const parse *p, qc_error *err)
{
    static const char *const dashes[] = {"\xe2\x80\x93", "\xe2\x80\x94", "\xe2\x88\x92"};
    for (size_t w = 0; w < p->words_before_dashes; w++)
        for (size_t i = 0; i < sizeof dashes / sizeof *dashes; i++)
            if (strncmp(p->words[w], dashes[i], 3) == 0)
                QC_FAIL(err, QC_ERR_USAGE,
                        "'%s' begins with a dash that is not '-'; did you mean --%s?", p->words[w],
                        p->words[w] + 3);
    return QC_OK;
}

static int exists(const char *path)
{
    qc_path_kind kind = QC_PATH_MISSING;
    return qc_path_stat(path, &kind, NULL, NULL) == QC_OK && kind != QC_PATH_MISSING;
}

/* Is the first word a misspelt command, or what another tool calls it? It is not where --to says
 * that this is convert and its two words are there, and not where something has this name. */
static qc_status check_first_word(const parse *p, qc_options *o, qc_error *err)
{
    const char *word = p->words_before_dashes > 0 ? p->words[0] : NULL;
    const qc_command_row *meant = word ? qc_mistaken_command(word) : NULL;
    if (!meant || exists(word) || (was_given(p, "to") && p->word_count <= 2))
        return QC_OK;
    o->command = meant->command; /* the message names the --help of this one */
    QC_FAIL(err, QC_ERR_USAGE, "unknown command '%s'; did you mean %s?", word, meant->name);
}

static qc_status choose_command(parse *p, qc_options *o, qc_error *err)
{
    o->command = QC_CMD_CONVERT;
    QC_TRY(check_dashes(p, err));
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

static qc_status apply(qc_options *o, const qc_option_row *row, const char *value, qc_error *err)
{
    static const int given = 1;
    if (row->set)
        QC_TRY(row->set(o, row, value, err));
    if (row->given)
        memcpy((char *)o + row->given, &given, sizeof given);
    return QC_OK;
}

static qc_status apply_defaults(qc_options *o, qc_error *err)
{
    o->convert.plan.recipe.double_quant = 1;
    for (const qc_option_row *r = qc_option_table; r->name; r++)
        if (r->dflt)
            QC_TRY(apply(o, r, r->dflt, err));
    return QC_OK;
}

/* ---- what goes with what ---- */

/* Is what a row names there: "--vram", "--mode train" or "--as: a note for people"? An option that
 * the command takes for granted need not be given. *row becomes the row of that option, or NULL
 * where the command has none. */
static int is_there(const parse *p, qc_command command, const char *what, const qc_option_row **row)
{
    char value[16] = "";
    size_t len = strcspn(what + 2, " ,:");
    const char *end = what + 2 + len;
    if (*end == ' ')
        (void)snprintf(value, sizeof value, "%.*s", (int)strcspn(end + 1, ",:"), end + 1);
    *row = row_for(row_named(what + 2, len), command);
    if (!((*row)->commands & QC_CMD_BIT(command)))
        *row = NULL;
    const item *it = given(p, what + 2, len);
    if (!it)
        return *row && !*value && ((*row)->dflt_of.commands & QC_CMD_BIT(command));
    return !*value || qc_same_word(it->value, value);
}

static qc_status check_only_with(const parse *p, const qc_option_row *r, qc_command command,
                                 qc_error *err)
{
    char expected[64] = "";
    size_t used = 0;
    for (unsigned i = 0; i < QC_MOST_COMPANY && r->only_with[i]; i++) {
        const qc_option_row *other = NULL;
        if (is_there(p, command, r->only_with[i], &other))
            return QC_OK;
        if (other)
            used += (size_t)snprintf(expected + used, sizeof expected - used, "%s%s",
                                     used ? " or " : "", r->only_with[i]);
    }
    if (used)
        QC_FAIL(err, QC_ERR_USAGE, "--%s goes with %s only", r->name, expected);
    return QC_OK;
}

/* "-q" or "--json", as messages call it. */
static const char *called(const qc_option_row *r, char out[QC_SPELLED_BYTES])
{
    (void)snprintf(out, QC_SPELLED_BYTES, r->letter ? "-%.1s" : "--%s",
                   r->letter ? &r->letter : r->name);
    return out;
}

/* Refuses options whose rows say that they do not go together, or only with another. */
static qc_status check_company(const parse *p, qc_command command, qc_error *err)
{
    char a[QC_SPELLED_BYTES], b[QC_SPELLED_BYTES];
    for (const item *it = p->items; it < p->items + p->item_count; it++) {
        const qc_option_row *r = it->row, *other = NULL;
        QC_TRY(check_only_with(p, r, command, err));
        if (r->not_with && is_there(p, command, r->not_with, &other))
            QC_FAIL(err, QC_ERR_USAGE, "--%s does not go with %s", r->name, r->not_with);
        for (unsigned i = 0; i < QC_MOST_COMPANY && r->excludes[i]; i++)
            if (is_there(p, command, r->excludes[i], &other))
                QC_FAIL(err, QC_ERR_USAGE, "%s and %s exclude each other%s", called(r, a),
                        called(other, b), r->excludes[i] + strcspn(r->excludes[i], ":"));
    }
    return QC_OK;
}

static qc_status check_required(const parse *p, qc_command command, qc_error *err)
{
    char choices[QC_SPELLED_BYTES];
    for (const qc_option_row *r = qc_option_table; r->name; r++) {
        const char *note = qc_option_note(r, command);
        if (!(r->commands & QC_CMD_BIT(command)) || !note || strcmp(note, "required") != 0 ||
            was_given(p, r->name))
            continue;
        if (r->choices)
            qc_option_list_choices(r, choices, sizeof choices);
        QC_FAIL(err, QC_ERR_USAGE, "--%s is missing; expected --%s with %s", r->name, r->name,
                r->choices ? choices : r->missing);
    }
    return QC_OK;
}

static int is_target(const char *word)
{
    const qc_option_row *to = row_named("to", 2);
    for (unsigned i = 0; to->choices[i]; i++)
        if (qc_same_word(word, to->choices[i]))
            return 1;
    return 0;
}

/* Without --to: the target may stand where it is none, as a word or behind --quantize. */
static qc_status check_to(const parse *p, const qc_recipe_options *r, qc_error *err)
{
    for (uint32_t i = 0; i < r->rule_count; i++)
        if (is_target(r->rules[i].glob))
            QC_FAIL(err, QC_ERR_USAGE,
                    "--%s takes a glob that names tensors; did you mean --to %s?",
                    r->rules[i].quantize ? "quantize" : "keep", r->rules[i].glob);
    for (size_t i = 0; i < p->word_count; i++)
        if (is_target(p->words[i]) && !exists(p->words[i]))
            QC_FAIL(err, QC_ERR_USAGE, "--to is missing; did you mean --to %s?", p->words[i]);
    return QC_OK;
}

/* What --format goes with. */
static qc_status check_format(const parse *p, const qc_recipe_options *r, qc_error *err)
{
    const int compressed_tensors = r->format == QC_FORMAT_COMPRESSED_TENSORS;
    if (was_given(p, "activation-bits") && (!compressed_tensors || r->to == QC_TO_INT4))
        QC_FAIL(err, QC_ERR_USAGE,
                "--activation-bits goes with --to int8 or auto and --format compressed-tensors "
                "only");
    if (r->per_channel && !compressed_tensors)
        QC_FAIL(err, QC_ERR_USAGE,
                "--block-size channel goes with --format compressed-tensors only; --to int8 of "
                "bitsandbytes has a scale for each row without it");
    if (!compressed_tensors) {
        if (r->to == QC_TO_INT4)
            QC_FAIL(err, QC_ERR_USAGE,
                    "--to int4 needs --format compressed-tensors; bitsandbytes "
                    "has --to nf4 in 4 bits");
        return QC_OK;
    }
    if (r->to != QC_TO_INT4 && r->to != QC_TO_INT8 && r->to != QC_TO_AUTO)
        QC_FAIL(err, QC_ERR_USAGE,
                "--format compressed-tensors goes with --to int4, int8 and auto, not with --to %s",
                qc_to_name(r->to));
    if (!r->double_quant)
        QC_FAIL(err, QC_ERR_USAGE,
                "--no-double-quant does not go with --format "
                "compressed-tensors, whose scales are never quantized");
    if (r->block_elems && r->to == QC_TO_INT8 && !r->activations_16)
        QC_FAIL(err, QC_ERR_USAGE,
                "--block-size with --to int8 --format compressed-tensors needs --activation-bits "
                "16; 8-bit activations go with a scale for each row");
    if (r->block_elems > 128)
        QC_FAIL(err, QC_ERR_USAGE,
                "--block-size %u: compressed-tensors goes with groups of 32, 64 or 128, which "
                "its readers have kernels for",
                r->block_elems);
    return QC_OK;
}

/* For plan and convert: what the rows cannot say. */
static qc_status check_convert(const parse *p, const qc_options *o, qc_error *err)
{
    const qc_recipe_options *r = &o->convert.plan.recipe;
    for (const item *it = p->items; it < p->items + p->item_count; it++)
        if (it->row->quantizes && !qc_to_quantizes(r->to))
            QC_FAIL(err, QC_ERR_USAGE, "--%s does not go with --to %s, which quantizes nothing",
                    it->row->name, qc_to_name(r->to));
    QC_TRY(check_format(p, r, err));
    if (r->to == QC_TO_INT8 && !r->double_quant && !r->block_elems)
        QC_FAIL(err, QC_ERR_USAGE,
                "--no-double-quant with --to int8 needs --block-size; scales of rows are never "
                "quantized");
    if (o->command == QC_CMD_PLAN)
        return QC_OK;
    if (r->to == QC_TO_AUTO && !o->convert.plan.fit.vram)
        QC_FAIL(err, QC_ERR_USAGE, "--to auto needs --vram, which says what it has to fit");
    if (o->convert.part_count <= 1)
        return QC_OK;
    if (o->convert.consume_source)
        QC_FAIL(err, QC_ERR_USAGE,
                "--consume-source and --part exclude each other: no part knows what the others "
                "have read");
    if (qc_calibrates(&o->convert.plan.calibrate))
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s and --part exclude each other: a part has no inputs of later layers without "
                "those of the earlier",
                o->convert.plan.calibrate.text ? "calibrate" : "hessians");
    return QC_OK;
}

static qc_status check_together(const parse *p, const qc_options *o, qc_error *err)
{
    int fits = o->command == QC_CMD_CONVERT || o->command == QC_CMD_PLAN;
    if (o->command == QC_CMD_CONVERT && !was_given(p, "to"))
        QC_TRY(check_to(p, &o->convert.plan.recipe, err));
    QC_TRY(check_required(p, o->command, err));
    if (fits)
        QC_TRY(check_convert(p, o, err));
    return check_company(p, o->command, err);
}

/* How many rows of activations are measured where --m does not say it. */
static void set_rows(qc_options *o)
{
    static const uint64_t validate_m[] = {1, 4, 16, 64, 256, 1024};
    static const uint64_t bench_m[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
    int validates = o->command == QC_CMD_VALIDATE;
    if (o->products.m_count > 0)
        return;
    o->products.m = validates ? validate_m : bench_m;
    o->products.m_count =
        validates ? sizeof validate_m / sizeof *validate_m : sizeof bench_m / sizeof *bench_m;
}

/* ---- words ---- */

/* Refuses "out.safetensors", which was meant as a file: what is written is a folder. */
static qc_status check_folder_name(const char *path, const char *name, qc_error *err)
{
    static const char *const endings[] = {".safetensors", ".zst", ".bin", ".gguf",
                                          ".pt",          ".pth", ".json"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (qc_ends_with(path, endings[i]) && !exists(path))
            QC_FAIL(err, QC_ERR_USAGE,
                    "%s: %s is a folder, and this is the name of a file; did you mean '%.*s'?",
                    path, name, (int)(strlen(path) - strlen(endings[i])), path);
    return QC_OK;
}

static qc_status place_words(const parse *p, qc_options *o, qc_error *err)
{
    const qc_command_row *c = qc_command_row_of(o->command);
    for (unsigned i = 0; i < c->place_count; i++) {
        if (i < p->word_count && p->words[i][0] == '\0')
            QC_FAIL(err, QC_ERR_USAGE, "%s is empty; expected a path", c->places[i].name);
        int optional = c->places[i].optional || (o->convert.dry_run && i > 0);
        if (i >= p->word_count && !optional)
            QC_FAIL(err, QC_ERR_USAGE, "%s is missing; usage: qconv %s", c->places[i].name,
                    c->synopsis);
    }
    if (p->word_count > c->place_count)
        QC_FAIL(err, QC_ERR_USAGE, "one argument too many: '%s'; usage: qconv %s",
                p->words[c->place_count], c->synopsis);
    o->call.model = p->word_count > 0 ? p->words[0] : NULL;
    o->call.out = p->word_count > 1 ? p->words[1] : NULL;
    return o->call.out ? check_folder_name(o->call.out, c->places[1].name, err) : QC_OK;
}

static qc_status place_topic(qc_options *o, qc_error *err)
{
    o->help_topic = QC_CMD_HELP;
    if (!o->call.model)
        return QC_OK;
    const qc_command_row *topic = qc_command_row_named(o->call.model);
    if (!topic) {
        topic = qc_mistaken_command(o->call.model);
        QC_FAIL(err, QC_ERR_USAGE, "unknown command '%s'%s%s%s", o->call.model,
                topic ? "; did you mean " : "", topic ? topic->name : "", topic ? "?" : "");
    }
    o->help_topic = topic->command;
    o->call.model = NULL;
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

qc_status qc_options_parse(qc_options *out, qc_arena *arena, int argc, char **argv, qc_error *err)
{
    parse p = {.arena = arena};
    memset(out, 0, sizeof *out);
    out->call.arena = arena;
    out->call.program = argc > 0 ? argv[0] : "qconv";
    out->command = QC_CMD_HELP;
    out->help_topic = QC_CMD_HELP;
    QC_TRY(apply_defaults(out, err));
    QC_TRY(split(&p, argc, argv, err));
    QC_TRY(choose_command(&p, out, err));
    if (was_given(&p, "help"))
        return QC_OK;
    for (size_t i = 0; i < p.item_count; i++) {
        const item *it = &p.items[i];
        if (!it->row || !it->row->alone)
            continue;
        out->command = QC_CMD_HELP;
        QC_TRY(check_item(it, p.arena, out->command, err));
        QC_TRY(apply(out, it->row, it->value, err));
        out->command = it->row->alone;
        return QC_OK;
    }
    for (size_t i = 0; i < p.item_count; i++)
        QC_TRY(check_item(&p.items[i], p.arena, out->command, err));
    for (size_t i = 0; i < p.item_count; i++)
        QC_TRY(apply(out, p.items[i].row, p.items[i].value, err));
    if (out->convert.plan.recipe.to == QC_TO_INT4 && !was_given(&p, "format"))
        out->convert.plan.recipe.format = QC_FORMAT_COMPRESSED_TENSORS;
    /* What 8-bit activations cost is in no predicted error. */
    if (out->convert.plan.recipe.to == QC_TO_AUTO && !was_given(&p, "activation-bits"))
        out->convert.plan.recipe.activations_16 = 1;
    QC_TRY(check_together(&p, out, err));
    set_rows(out);
    qc_tp_defaults(&out->convert.plan.fit);
    QC_TRY(place_words(&p, out, err));
    if (out->command == QC_CMD_HELP)
        return place_topic(out, err);
    return merge_rules(out, err);
}

/* Parsing in three steps, so that messages can name the right command wherever it stands:
 *
 *   split    argv into options with their values, and words; nothing is judged yet
 *   choose   the command: --help and --version first, else the first word if it is a command's
 *            name, else convert
 *   apply    each option in order to qc_options, then check what goes with what
 *
 * Defaults come from the table and pass through the same apply step. */
#include "convert/options.h"

#include "base/edit_distance.h"
#include "base/text.h"
#include "convert/device_wish.h"
#include "convert/option_table.h"
#include "convert/option_values.h"
#include "convert/rules_file.h"

#include <inttypes.h>
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
    const char *recipe_path;
    qc_rule *rules; /* of the command line */
    uint32_t rule_count;
} parse;

/* ---- near misses ---- */

/* How far off a name is: 0 when typed is its beginning, UINT32_MAX when it is another word. */
static unsigned miss(const char *typed, size_t len, const char *name)
{
    if (len >= 2 && strncmp(typed, name, len) == 0)
        return 0;
    unsigned d = qc_edit_distance(typed, len, name, strlen(name));
    return d <= 2 && d * 3 <= len ? d : UINT32_MAX;
}

static const char *near_option(const char *typed, size_t len, qc_command command)
{
    const char *best = NULL;
    unsigned best_miss = UINT32_MAX;
    for (unsigned i = 0; i < QC_OPT_COUNT; i++) {
        const qc_option_row *r = &qc_option_table[i];
        unsigned m = miss(typed, len, r->name);
        if (!r->hidden && (r->commands & QC_CMD_BIT(command)) && m < best_miss) {
            best = r->name;
            best_miss = m;
        }
    }
    return best;
}

static const char *near_command(const char *typed)
{
    const char *best = NULL;
    unsigned best_miss = UINT32_MAX;
    for (unsigned i = 0; i < qc_command_count; i++) {
        unsigned m = miss(typed, strlen(typed), qc_command_table[i].name);
        if (m < best_miss) {
            best = qc_command_table[i].name;
            best_miss = m;
        }
    }
    return best;
}

/* ---- split ---- */

static const qc_option_row *row_named(const char *name, size_t len)
{
    for (unsigned i = 0; i < QC_OPT_COUNT; i++)
        if (strlen(qc_option_table[i].name) == len &&
            strncmp(qc_option_table[i].name, name, len) == 0)
            return &qc_option_table[i];
    return NULL;
}

/* Of the rows that share a name, the one for the command. */
static const qc_option_row *row_for(const qc_option_row *row, qc_command command)
{
    for (unsigned i = 0; row && i < QC_OPT_COUNT; i++)
        if ((qc_option_table[i].commands & QC_CMD_BIT(command)) &&
            strcmp(qc_option_table[i].name, row->name) == 0)
            return &qc_option_table[i];
    return row;
}

static const qc_option_row *row_lettered(char letter)
{
    for (unsigned i = 0; i < QC_OPT_COUNT; i++)
        if (qc_option_table[i].letter == letter)
            return &qc_option_table[i];
    return NULL;
}

/* One long option at argv[i]; returns how many further arguments it took. */
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

/* Letters that may stand together: -qv. None of them takes a value. */
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
    void *mem = NULL;
    QC_TRY(qc_arena_alloc(p->arena, &mem, room, sizeof *p->items, err));
    p->items = mem;
    QC_TRY(qc_arena_alloc(p->arena, &mem, (size_t)argc, sizeof *p->words, err));
    p->words = mem;
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

static int was_given(const parse *p, qc_option_id id)
{
    for (size_t i = 0; i < p->item_count; i++)
        if (p->items[i].row && p->items[i].row->id == id)
            return 1;
    return 0;
}

/* ---- choose ---- */

static void choose_command(parse *p, qc_options *o)
{
    const qc_command_row *named =
        p->words_before_dashes > 0 ? qc_command_row_named(p->words[0]) : NULL;
    if (named) {
        o->command = named->command;
        p->words++;
        p->word_count--;
    } else {
        o->command = QC_CMD_CONVERT;
    }
    for (size_t i = 0; i < p->item_count; i++)
        p->items[i].row = row_for(p->items[i].row, o->command);
    if (was_given(p, QC_OPT_HELP)) {
        int bare = !named && p->word_count == 0 && p->item_count == 1;
        o->help_topic = bare ? QC_CMD_HELP : o->command;
        o->command = QC_CMD_HELP;
    }
}

static qc_status check_item(const item *it, qc_command command, qc_error *err)
{
    char choices[QC_SPELLED_BYTES];
    switch (it->state) {
    case ITEM_UNKNOWN: {
        size_t dashes = it->name[1] == '-' ? 2 : 1;
        const char *near = near_option(it->name + dashes, (size_t)it->name_len - dashes, command);
        if (near)
            QC_FAIL(err, QC_ERR_USAGE, "unknown option '%.*s'; did you mean --%s?", it->name_len,
                    it->name, near);
        QC_FAIL(err, QC_ERR_USAGE, "unknown option '%.*s'", it->name_len, it->name);
    }
    case ITEM_LACKS_VALUE:
        if (it->row->choices[0]) {
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
    if (!(it->row->commands & QC_CMD_BIT(command)))
        QC_FAIL(err, QC_ERR_USAGE, "--%s is no option of 'qconv %s'", it->row->name,
                qc_command_row_of(command)->name);
    return QC_OK;
}

/* ---- apply ---- */

static qc_status parse_compress(qc_options *o, const qc_option_row *row, const char *text,
                                qc_error *err)
{
    uint64_t level = 1;
    if (strcmp(text, "none") == 0) {
        o->compress = 0;
        o->compress_level = 1;
        return QC_OK;
    }
    if (strncmp(text, "zstd:", 5) == 0)
        QC_TRY(qc_option_number(row, text, text + 5, 1, 19, &level, err));
    else if (strcmp(text, "zstd") != 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s: expected none, zstd or zstd:LEVEL with a level from 1 to 19, got '%s'",
                row->name, text);
    o->compress = 1;
    o->compress_level = (int)level;
    return QC_OK;
}

static qc_status add_rule(parse *p, const qc_option_row *row, int quantize, const char *glob,
                          qc_error *err)
{
    /* The manifest names it, after hours perhaps. */
    if (!qc_text_is_utf8(glob))
        QC_FAIL(err, QC_ERR_USAGE, "--%s: the glob '%s' is not UTF-8, as names of tensors are",
                row->name, glob);
    if (*glob == '\0')
        QC_FAIL(err, QC_ERR_USAGE, "--%s: the glob is empty; expected one such as '*.q_proj.*'",
                row->name);
    if (!p->rules) {
        void *mem = NULL;
        QC_TRY(qc_arena_alloc(p->arena, &mem, p->item_count, sizeof *p->rules, err));
        p->rules = mem;
    }
    p->rules[p->rule_count++] = (qc_rule){quantize, glob};
    return QC_OK;
}

static qc_status apply_train(qc_train_options *t, const qc_option_row *row, const char *value,
                             unsigned choice, uint64_t number, qc_error *err)
{
    if (row->id == QC_OPT_MODE) {
        t->on = choice == 1;
    } else if (row->id == QC_OPT_METHOD) {
        t->method = (qc_train_method)choice;
        t->method_given = 1;
    } else if (row->id == QC_OPT_OPTIMIZER) {
        t->optimizer = (qc_optimizer)choice;
        t->optimizer_given = 1;
    } else if (row->id == QC_OPT_PRECISION) {
        t->precision = (qc_precision)choice;
        t->precision_given = 1;
    } else if (row->id == QC_OPT_ZERO) {
        t->zero = (unsigned)number;
        t->zero_given = 1;
    } else if (row->id == QC_OPT_CHECKPOINTING) {
        t->checkpointing = choice == 0;
        t->checkpointing_given = 1;
    } else if (row->id == QC_OPT_LORA_RANK) {
        t->lora_rank = number;
    } else if (row->id == QC_OPT_EFFECTIVE_BATCH) {
        t->effective_batch = number;
    } else if (row->id == QC_OPT_PROFILE) {
        t->profile = 1;
    } else {
        return qc_option_path(row, value, &t->apply, err);
    }
    return QC_OK;
}

/* validate and bench. */
static qc_status apply_measure(const parse *p, qc_options *o, const qc_option_row *row,
                               const char *value, unsigned choice, uint64_t number, qc_error *err)
{
    qc_validate_options *v = &o->validate;
    qc_bench_options *b = &o->bench;
    uint64_t *m = NULL;
    if (row->id == QC_OPT_M) {
        QC_TRY(qc_option_number_list(row, value, p->arena, &m, &o->m_count, err));
        o->m = m;
    } else if (row->id == QC_OPT_SAMPLE) {
        v->sample = number;
    } else if (row->id == QC_OPT_SEED) {
        o->seed = number;
    } else if (row->id == QC_OPT_ROUNDS) {
        b->rounds = number;
    } else if (row->id == QC_OPT_SECONDS) {
        b->seconds = number;
    } else if (row->id == QC_OPT_BENCH_DTYPE) {
        b->bf16 = choice == 1;
    } else if (row->id == QC_OPT_PATH) {
        b->path = row->choices[choice];
    } else if (row->id == QC_OPT_MARKDOWN) {
        b->markdown = 1;
    } else if (row->id == QC_OPT_TUNE) {
        b->tune = 1;
    } else if (row->id == QC_OPT_MAX_ERROR) {
        return qc_option_decimal(row, value, 0, 10, &v->max_error, err);
    } else if (row->id == QC_OPT_TOLERANCE) {
        return qc_option_decimal(row, value, 0, 10, &v->tolerance, err);
    } else if (row->id == QC_OPT_SHAPES) {
        b->shapes = value;
    } else if (row->id == QC_OPT_BENCH_SCHEME) {
        b->schemes = value;
    } else {
        const char **path = row->id == QC_OPT_AGAINST         ? &o->against
                            : row->id == QC_OPT_ACTIVATIONS   ? &v->activations
                            : row->id == QC_OPT_BASELINE      ? &v->baseline
                            : row->id == QC_OPT_SAVE_BASELINE ? &v->save_baseline
                            : row->id == QC_OPT_REPORT_HTML   ? &o->html
                            : row->id == QC_OPT_SAVE          ? &b->save
                            : row->id == QC_OPT_TUNING        ? &o->tuning
                                                              : &b->output;
        return qc_option_path(row, value, path, err);
    }
    return QC_OK;
}

static qc_status apply(parse *p, qc_options *o, const qc_option_row *row, const char *value,
                       qc_error *err)
{
    unsigned choice = 0;
    uint64_t number = 0;
    if (row->kind == QC_ARG_CHOICE)
        QC_TRY(qc_option_choice(row, value, &choice, err));
    if (row->kind == QC_ARG_NUMBER)
        QC_TRY(qc_option_number(row, value, value, row->min, row->max, &number, err));
    switch (row->id) {
    case QC_OPT_TO:
        o->to = (qc_to)choice;
        o->to_given = 1;
        break;
    case QC_OPT_BLOCK_SIZE:
        if ((number & (number - 1)) != 0)
            QC_FAIL(err, QC_ERR_USAGE,
                    "--block-size: expected a power of two from 32 to 4096, got '%s'", value);
        o->block_elems = (uint32_t)number;
        break;
    case QC_OPT_NO_DOUBLE_QUANT:
        o->double_quant = 0;
        break;
    case QC_OPT_SCALE:
        o->scale = (qc_scale_method)choice;
        break;
    case QC_OPT_CALIBRATE:
    case QC_OPT_HESSIANS:
    case QC_OPT_CALIBRATION_TOKENS:
    case QC_OPT_CALIBRATION_CONTEXT:
    case QC_OPT_DAMPING:
        return qc_options_apply_calibrate(o, row, value, number, err);
    case QC_OPT_COMPUTE_DTYPE:
        o->compute_dtype = row->choices[choice];
        break;
    case QC_OPT_COMPRESS:
        return parse_compress(o, row, value, err);
    case QC_OPT_MAX_SHARD_SIZE:
        QC_TRY(qc_parse_size(value, "--max-shard-size", &o->max_shard_bytes, err));
        if (o->max_shard_bytes == 0)
            QC_FAIL(err, QC_ERR_USAGE, "--max-shard-size: expected at least 1 byte");
        break;
    case QC_OPT_REST:
        o->rest = (qc_rest)choice;
        break;
    case QC_OPT_KEEP:
        return add_rule(p, row, 0, value, err);
    case QC_OPT_QUANTIZE:
        return add_rule(p, row, 1, value, err);
    case QC_OPT_RECIPE:
        if (*value == '\0')
            QC_FAIL(err, QC_ERR_USAGE, "--recipe: the path is empty");
        p->recipe_path = value;
        break;
    case QC_OPT_REQUANTIZE:
        o->requantize = 1;
        break;
    case QC_OPT_DROP_MTP:
        o->drop_mtp = 1;
        break;
    case QC_OPT_SCHEMES:
        o->schemes = value;
        break;
    case QC_OPT_EXPLAIN:
        o->explain = 1;
        break;
    case QC_OPT_VRAM:
        o->fit.vram = value;
        break;
    case QC_OPT_MARGIN:
        return qc_option_decimal(row, value, 0, 1, &o->fit.margin, err);
    case QC_OPT_CONTEXT:
        o->fit.context = number;
        break;
    case QC_OPT_BATCH:
        o->fit.batch = number;
        break;
    case QC_OPT_IMAGES:
        o->fit.images = number;
        break;
    case QC_OPT_KV_DTYPE:
        o->fit.kv_bits = (const unsigned[]){16, 16, 8, 32}[choice];
        break;
    case QC_OPT_MLA:
        o->fit.mla_expanded = choice == 1;
        break;
    case QC_OPT_CUDA_CONTEXT:
        return qc_parse_size(value, "--cuda-context", &o->fit.cuda_context_bytes, err);
    case QC_OPT_HTML:
        return qc_option_path(row, value, &o->html, err);
    case QC_OPT_DEVICE_MAP:
        return qc_option_path(row, value, &o->device_map, err);
    case QC_OPT_DEVICE:
        o->device = value;
        break;
    case QC_OPT_RUN_DEVICE: {
        qc_device_wish wish;
        if (*value == '\0')
            QC_FAIL(err, QC_ERR_USAGE,
                    "--device: expected auto, cpu, cuda, cuda:0 or cuda:0,2, "
                    "found ''");
        o->run_device = value;
        return qc_device_wish_read(&wish, value, err);
    }
    case QC_OPT_TEXT:
    case QC_OPT_TOKENIZER:
    case QC_OPT_EVAL_CONTEXT:
    case QC_OPT_MAX_TOKENS:
    case QC_OPT_MAX_KL:
    case QC_OPT_EVAL_FILE:
    case QC_OPT_BENCH_FILE:
        return qc_options_apply_eval(o, row, value, number, err);
    case QC_OPT_AGAINST:
    case QC_OPT_SAMPLE:
    case QC_OPT_SHAPES:
    case QC_OPT_BENCH_SCHEME:
    case QC_OPT_M:
    case QC_OPT_ACTIVATIONS:
    case QC_OPT_BENCH_DTYPE:
    case QC_OPT_SEED:
    case QC_OPT_PATH:
    case QC_OPT_ROUNDS:
    case QC_OPT_SECONDS:
    case QC_OPT_TUNE:
    case QC_OPT_SAVE:
    case QC_OPT_TUNING:
    case QC_OPT_MAX_ERROR:
    case QC_OPT_BASELINE:
    case QC_OPT_SAVE_BASELINE:
    case QC_OPT_TOLERANCE:
    case QC_OPT_REPORT_HTML:
    case QC_OPT_MARKDOWN:
    case QC_OPT_OUTPUT:
        return apply_measure(p, o, row, value, choice, number, err);
    case QC_OPT_AS:
        o->hardware.as = value;
        break;
    case QC_OPT_WATCH:
        o->hardware.watch = 1;
        break;
    case QC_OPT_CSV:
        return qc_option_path(row, value, &o->hardware.csv, err);
    case QC_OPT_INTERVAL:
        return qc_option_decimal(row, value, 0.01, 3600, &o->hardware.interval, err);
    case QC_OPT_SAMPLES:
        o->hardware.samples = number;
        break;
    case QC_OPT_MODE:
    case QC_OPT_METHOD:
    case QC_OPT_OPTIMIZER:
    case QC_OPT_PRECISION:
    case QC_OPT_ZERO:
    case QC_OPT_CHECKPOINTING:
    case QC_OPT_LORA_RANK:
    case QC_OPT_EFFECTIVE_BATCH:
    case QC_OPT_APPLY:
    case QC_OPT_PROFILE:
        return apply_train(&o->train, row, value, choice, number, err);
    case QC_OPT_DRY_RUN:
        o->dry_run = 1;
        break;
    case QC_OPT_FORCE:
        o->force = 1;
        break;
    case QC_OPT_RESTART:
        o->restart = 1;
        break;
    case QC_OPT_CONSUME_SOURCE:
        o->consume_source = 1;
        break;
    case QC_OPT_PART:
        return qc_option_part(row, value, &o->part_index, &o->part_count, err);
    case QC_OPT_THREADS:
        o->threads = (unsigned)number;
        break;
    case QC_OPT_PROGRESS:
        o->progress = (qc_progress_mode)choice;
        break;
    case QC_OPT_JSON:
        o->json = 1;
        break;
    case QC_OPT_QUIET:
        o->quiet = 1;
        break;
    case QC_OPT_VERBOSE:
        o->verbose++;
        break;
    case QC_OPT_COMPLETION:
        o->shell = row->choices[choice];
        o->command = QC_CMD_COMPLETION;
        break;
    case QC_OPT_VERSION:
        o->command = QC_CMD_VERSION;
        break;
    case QC_OPT_MAN:
        o->command = QC_CMD_MAN;
        break;
    case QC_OPT_HELP:
    case QC_OPT_COUNT:
        break;
    }
    return QC_OK;
}

static qc_status apply_defaults(parse *p, qc_options *o, qc_error *err)
{
    o->double_quant = 1;
    for (unsigned i = 0; i < QC_OPT_COUNT; i++)
        if (qc_option_table[i].dflt)
            QC_TRY(apply(p, o, &qc_option_table[i], qc_option_table[i].dflt, err));
    return QC_OK;
}

/* ---- what goes with what ---- */

int qc_to_quantizes(qc_to to)
{
    return to == QC_TO_NF4 || to == QC_TO_INT8 || to == QC_TO_AUTO;
}

/* plan and convert. */
static qc_status check_fitting(const parse *p, const qc_options *o, qc_error *err)
{
    static const qc_option_id of_auto[] = {QC_OPT_SCHEMES, QC_OPT_EXPLAIN};
    static const qc_option_id of_vram[] = {QC_OPT_MARGIN,      QC_OPT_CONTEXT,  QC_OPT_BATCH,
                                           QC_OPT_IMAGES,      QC_OPT_KV_DTYPE, QC_OPT_MLA,
                                           QC_OPT_CUDA_CONTEXT};
    static const qc_option_id of_train[] = {
        QC_OPT_METHOD,        QC_OPT_OPTIMIZER, QC_OPT_PRECISION,       QC_OPT_ZERO,
        QC_OPT_CHECKPOINTING, QC_OPT_LORA_RANK, QC_OPT_EFFECTIVE_BATCH, QC_OPT_APPLY,
        QC_OPT_PROFILE};
    static const qc_option_id not_train[] = {QC_OPT_HTML,     QC_OPT_DEVICE_MAP, QC_OPT_BATCH,
                                             QC_OPT_KV_DTYPE, QC_OPT_MLA,        QC_OPT_IMAGES};
    for (size_t i = 0; o->to != QC_TO_AUTO && i < sizeof of_auto / sizeof *of_auto; i++)
        if (was_given(p, of_auto[i]))
            QC_FAIL(err, QC_ERR_USAGE, "--%s goes with --to auto only",
                    qc_option_table[of_auto[i]].name);
    if (o->to == QC_TO_AUTO && was_given(p, QC_OPT_BLOCK_SIZE))
        QC_FAIL(err, QC_ERR_USAGE,
                "--block-size does not go with --to auto, which chooses it; see --schemes");
    if (o->command == QC_CMD_PLAN) {
        for (size_t i = 0; !o->train.on && i < sizeof of_train / sizeof *of_train; i++)
            if (was_given(p, of_train[i]))
                QC_FAIL(err, QC_ERR_USAGE, "--%s goes with --mode train only",
                        qc_option_table[of_train[i]].name);
        for (size_t i = 0; o->train.on && i < sizeof not_train / sizeof *not_train; i++)
            if (was_given(p, not_train[i]))
                QC_FAIL(err, QC_ERR_USAGE, "--%s does not go with --mode train%s",
                        qc_option_table[not_train[i]].name,
                        not_train[i] == QC_OPT_BATCH
                            ? ", which finds the batch; see --effective-batch"
                            : "");
        return QC_OK;
    }
    if (o->to == QC_TO_AUTO && !o->fit.vram)
        QC_FAIL(err, QC_ERR_USAGE, "--to auto needs --vram, which says what it has to fit");
    for (size_t i = 0; !o->fit.vram && i < sizeof of_vram / sizeof *of_vram; i++)
        if (was_given(p, of_vram[i]))
            QC_FAIL(err, QC_ERR_USAGE, "--%s goes with --vram only",
                    qc_option_table[of_vram[i]].name);
    return QC_OK;
}

static qc_status check_hardware(const parse *p, const qc_options *o, qc_error *err)
{
    static const qc_option_id of_watch[] = {QC_OPT_CSV, QC_OPT_INTERVAL, QC_OPT_SAMPLES};
    for (size_t i = 0; !o->hardware.watch && i < sizeof of_watch / sizeof *of_watch; i++)
        if (was_given(p, of_watch[i]))
            QC_FAIL(err, QC_ERR_USAGE, "--%s goes with --watch only",
                    qc_option_table[of_watch[i]].name);
    if (o->hardware.watch && o->hardware.as)
        QC_FAIL(err, QC_ERR_USAGE,
                "--watch and --as exclude each other: what is not here cannot be "
                "watched");
    return QC_OK;
}

static qc_status check_measure(const parse *p, qc_options *o, qc_error *err)
{
    static const uint64_t validate_m[] = {1, 4, 16, 64, 256, 1024};
    static const uint64_t bench_m[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
    int validates = o->command == QC_CMD_VALIDATE;
    if (validates && !o->against)
        QC_FAIL(err, QC_ERR_USAGE,
                "--against is missing; expected --against with the checkpoint that OUT was made "
                "from");
    if (was_given(p, QC_OPT_TOLERANCE) && !o->validate.baseline)
        QC_FAIL(err, QC_ERR_USAGE, "--tolerance goes with --baseline only");
    if (o->json && o->bench.markdown)
        QC_FAIL(err, QC_ERR_USAGE, "--json and --markdown exclude each other");
    if (o->bench.save && !o->bench.tune)
        QC_FAIL(err, QC_ERR_USAGE, "--save goes with --tune only");
    if (o->bench.tune && (o->bench.path || o->bench.markdown || o->tuning))
        QC_FAIL(err, QC_ERR_USAGE, "--tune and --%s exclude each other",
                o->bench.path       ? "path"
                : o->bench.markdown ? "markdown"
                                    : "tuning");
    if (o->m_count == 0) {
        o->m = validates ? validate_m : bench_m;
        o->m_count =
            validates ? sizeof validate_m / sizeof *validate_m : sizeof bench_m / sizeof *bench_m;
    }
    return QC_OK;
}

static qc_status check_convert(const parse *p, const qc_options *o, qc_error *err)
{
    if (o->consume_source && o->part_count > 1)
        QC_FAIL(err, QC_ERR_USAGE,
                "--consume-source and --part exclude each other: no part knows what the others "
                "have read");
    static const qc_option_id quantizing[] = {QC_OPT_BLOCK_SIZE, QC_OPT_NO_DOUBLE_QUANT,
                                              QC_OPT_SCALE, QC_OPT_COMPUTE_DTYPE, QC_OPT_QUANTIZE};
    char choices[QC_SPELLED_BYTES];
    const qc_option_row *to = &qc_option_table[QC_OPT_TO];
    if (!o->to_given && o->command == QC_CMD_CONVERT) {
        const char *near = p->word_count > 0 ? near_command(p->words[0]) : NULL;
        if (near)
            QC_FAIL(err, QC_ERR_USAGE, "unknown command '%s'; did you mean %s?", p->words[0], near);
        qc_option_list_choices(to, choices, sizeof choices);
        QC_FAIL(err, QC_ERR_USAGE, "--to is missing; expected --to with %s", choices);
    }
    if (!qc_to_quantizes(o->to)) {
        for (size_t i = 0; i < sizeof quantizing / sizeof *quantizing; i++)
            if (was_given(p, quantizing[i]))
                QC_FAIL(err, QC_ERR_USAGE, "--%s does not go with --to %s, which quantizes nothing",
                        qc_option_table[quantizing[i]].name, to->choices[o->to]);
    }
    if (o->to == QC_TO_INT8 && !o->double_quant && !o->block_elems)
        QC_FAIL(err, QC_ERR_USAGE,
                "--no-double-quant with --to int8 needs --block-size; scales of rows are never "
                "quantized");
    if (o->command == QC_CMD_CONVERT)
        return qc_options_check_calibrate(o, err);
    return QC_OK;
}

static qc_status place_words(const parse *p, qc_options *o, qc_error *err)
{
    const qc_command_row *c = qc_command_row_of(o->command);
    for (unsigned i = 0; i < c->place_count; i++) {
        if (i < p->word_count && p->words[i][0] == '\0')
            QC_FAIL(err, QC_ERR_USAGE, "%s is empty; expected a path", c->places[i].name);
        int optional = c->places[i].optional || (o->dry_run && i > 0);
        if (i >= p->word_count && !optional)
            QC_FAIL(err, QC_ERR_USAGE, "%s is missing; usage: qconv %s", c->places[i].name,
                    c->synopsis);
    }
    if (p->word_count > c->place_count)
        QC_FAIL(err, QC_ERR_USAGE, "one argument too many: '%s'; usage: qconv %s",
                p->words[c->place_count], c->synopsis);
    o->model = p->word_count > 0 ? p->words[0] : NULL;
    o->out = p->word_count > 1 ? p->words[1] : NULL;
    return QC_OK;
}

static qc_status place_topic(qc_options *o, qc_error *err)
{
    o->help_topic = QC_CMD_HELP;
    if (!o->model)
        return QC_OK;
    const qc_command_row *topic = qc_command_row_named(o->model);
    if (!topic) {
        const char *near = near_command(o->model);
        QC_FAIL(err, QC_ERR_USAGE, "unknown command '%s'%s%s%s", o->model,
                near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    }
    o->help_topic = topic->command;
    o->model = NULL;
    return QC_OK;
}

static qc_status merge_rules(const parse *p, qc_options *o, qc_error *err)
{
    qc_rule *from_file = NULL;
    uint32_t file_count = 0;
    if (p->recipe_path)
        QC_TRY(qc_rules_file_read(p->arena, p->recipe_path, &from_file, &file_count, err));
    if (!qc_to_quantizes(o->to)) {
        for (uint32_t i = 0; i < file_count; i++)
            if (from_file[i].quantize)
                QC_FAIL(err, QC_ERR_USAGE,
                        "recipe '%s': rules[%u] quantizes, which --to %s does "
                        "not",
                        p->recipe_path, i, qc_option_table[QC_OPT_TO].choices[o->to]);
    }
    void *mem = NULL;
    QC_TRY(
        qc_arena_alloc(p->arena, &mem, (size_t)file_count + p->rule_count, sizeof *o->rules, err));
    o->rules = mem;
    o->rule_count = file_count + p->rule_count;
    if (file_count)
        memcpy(o->rules, from_file, file_count * sizeof *o->rules);
    if (p->rule_count)
        memcpy(o->rules + file_count, p->rules, p->rule_count * sizeof *o->rules);
    return QC_OK;
}

qc_status qc_options_parse(qc_options *out, qc_arena *arena, int argc, char **argv, qc_error *err)
{
    parse p = {.arena = arena};
    memset(out, 0, sizeof *out);
    out->arena = arena;
    out->command = QC_CMD_HELP;
    out->help_topic = QC_CMD_HELP;
    QC_TRY(apply_defaults(&p, out, err));
    QC_TRY(split(&p, argc, argv, err));
    choose_command(&p, out);
    if (was_given(&p, QC_OPT_HELP))
        return QC_OK;
    for (size_t i = 0; i < p.item_count; i++) {
        const item *it = &p.items[i];
        if (!it->row || !it->row->alone)
            continue;
        out->command = QC_CMD_HELP;
        QC_TRY(check_item(it, out->command, err));
        return apply(&p, out, it->row, it->value, err);
    }
    for (size_t i = 0; i < p.item_count; i++)
        QC_TRY(check_item(&p.items[i], out->command, err));
    for (size_t i = 0; i < p.item_count; i++)
        QC_TRY(apply(&p, out, p.items[i].row, p.items[i].value, err));
    if (out->quiet && out->verbose)
        QC_FAIL(err, QC_ERR_USAGE, "-q and -v exclude each other");
    if (out->command == QC_CMD_CONVERT || out->command == QC_CMD_PLAN) {
        QC_TRY(check_convert(&p, out, err));
        QC_TRY(check_fitting(&p, out, err));
    }
    if (out->command == QC_CMD_HARDWARE)
        QC_TRY(check_hardware(&p, out, err));
    if (out->command == QC_CMD_VALIDATE || out->command == QC_CMD_BENCH)
        QC_TRY(check_measure(&p, out, err));
    if (out->command == QC_CMD_EVAL || out->command == QC_CMD_REPORT)
        QC_TRY(qc_options_check_eval(out, err));
    QC_TRY(place_words(&p, out, err));
    if (out->command == QC_CMD_HELP)
        return place_topic(out, err);
    return merge_rules(&p, out, err);
}

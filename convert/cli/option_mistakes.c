#include "convert/cli/option_mistakes.h"

#include "base/edit_distance.h"
#include "base/text.h"

#include <string.h>
#include <strings.h>

/* Is `typed` nearer to this name than to all before? *best_miss is UINT32_MAX at first. */
static int is_nearer(const char *typed, size_t len, const char *name, unsigned *best_miss)
{
    unsigned d = 0; /* for the beginning of a name */
    if (len < 2 || strncmp(typed, name, len) != 0)
        d = qc_edit_distance(typed, len, name, strlen(name));
    if (d > 2 || d * 3 > len || d >= *best_miss)
        return 0; /* another word, or no nearer */
    *best_miss = d;
    return 1;
}

/* Is `typed` the name, where case does not matter and '_' is '-'? */
static int is_name(const char *typed, size_t len, const char *name)
{
    size_t i = 0;
    for (; i < len && name[i]; i++) {
        if ((typed[i] == '_' ? '-' : qc_lower(typed[i])) != name[i])
            return 0;
    }
    return i == len && name[i] == '\0';
}

/* Is `typed` one of the names in a list that has blanks between them, or is NULL? */
static int is_listed(const char *typed, size_t len, const char *names)
{
    char name[48];
    for (const char *s = names ? names : ""; *s; s += strspn(s, " ")) {
        size_t n = strcspn(s, " ");
        if (n < sizeof name) {
            memcpy(name, s, n);
            name[n] = '\0';
            if (is_name(typed, len, name))
                return 1;
        }
        s += n;
    }
    return 0;
}

/* ---- commands ---- */

const qc_command_row *qc_mistaken_command(const char *word)
{
    const qc_command_row *best = NULL;
    unsigned best_miss = UINT32_MAX;
    for (unsigned i = 0; i < qc_command_count; i++) {
        if (is_listed(word, strlen(word), qc_command_table[i].foreign))
            return &qc_command_table[i];
        if (is_nearer(word, strlen(word), qc_command_table[i].name, &best_miss))
            best = &qc_command_table[i];
    }
    return best;
}

/* ---- options ---- */

/* The name of another tool's option that stands for this one, or NULL. */
static const qc_foreign_name *foreign_name(const qc_option_row *row, const char *typed, size_t len,
                                           qc_command command)
{
    const qc_foreign_name *f = row->commands & QC_CMD_BIT(command) ? row->foreign : NULL;
    for (; f && f->names; f++)
        if ((!f->of_commands || (f->of_commands & QC_CMD_BIT(command))) &&
            is_listed(typed, len, f->names))
            return f;
    return NULL;
}

qc_status qc_mistaken_option(const char **text, qc_arena *arena, const char *typed, size_t len,
                             const qc_option_row *rows, qc_command command, qc_error *err)
{
    const qc_command_row *c = qc_command_row_of(command);
    char usage[QC_USAGE_BYTES];
    const qc_foreign_name *foreign = NULL;
    const qc_option_row *r = rows;
    while (r->name && !(foreign = foreign_name(r, typed, len, command)))
        r++;
    *text = foreign ? foreign->meant : NULL;
    if (*text)
        return QC_OK;
    for (unsigned i = 0; !foreign && c && i < c->place_count; i++)
        if (is_listed(typed, len, c->places[i].foreign)) {
            qc_command_usage(c, rows, usage);
            return qc_arena_printf(arena, text, err, "%s without an option: qconv %s",
                                   c->places[i].name, usage);
        }
    const qc_option_row *meant = foreign ? r : NULL;
    unsigned best_miss = UINT32_MAX;
    for (r = rows; !foreign && r->name; r++)
        if ((r->commands & QC_CMD_BIT(command)) && is_nearer(typed, len, r->name, &best_miss))
            meant = r;
    return meant ? qc_arena_printf(arena, text, err, "--%s", meant->name) : QC_OK;
}

/* ---- what is gone, and what others have ---- */

/* Commands, options with their dashes, and their values behind '='. commands: those that had the
 * option; 0 for all. */
static const struct {
    const char *words;
    unsigned commands;
    const char *instead;
} gone[] = {
    {"mount", 0,
     "qconv.load in Python reads an output as it is, 'qconv unpack OUT DIR' writes plain files, "
     "and with --compress none convert writes them at once"},
    {"bench", 0, "the programs in bench/ time kernels, and bench/gpu_run.sh runs them all"},
    {"serve", 0, "'vllm serve OUT' runs an output, and the end of a conversion says with what"},
    {"--to=fp8", 0, "which is read and not written; --to int8 takes as many bytes"},
    {"--to=gguf", 0, "which is neither read nor written; llama.cpp makes it of the original"},
    {"--for=sglang --for=unsloth", 0,
     "which qconv was never run with; docs/interop.md says what the others load"},
    {"--consume-source", 0,
     "a conversion leaves MODEL as it is, and its files may be deleted once OUT is verified"},
    {"--calibrate --calibration-tokens --calibration-context --image-states --tokenizer",
     QC_CMD_BIT(QC_CMD_CONVERT),
     "'python -m qconv calibrate MODEL OUT --to nf4 --text FILE' calibrates with a text"},
    {"--tuning", 0, "the limits that a GPU showed are built in (kernels/matmul_plan.c)"},
    {"--mode --train --method --optimizer --precision --zero --checkpointing --lora-rank "
     "--effective-batch --apply",
     QC_CMD_BIT(QC_CMD_PLAN),
     "'qconv plan-training MODEL' of the Python package plans fine-tuning, and with --apply DIR "
     "writes the files for accelerate and DeepSpeed"},
    {"--watch --csv --interval --samples", QC_CMD_BIT(QC_CMD_HARDWARE),
     "'nvidia-smi dmon' and 'nvidia-smi pmon' follow GPUs while something runs"},
    {"--man", 0,
     "'man qconv' shows the page where qconv is installed, and building writes pages/qconv.1"},
    {"--completion", 0,
     "installing brings the completions of bash, zsh and fish, and building writes them to pages/"},
};

const char *qc_gone_instead(const char *typed, size_t len, qc_command command)
{
    for (size_t i = 0; i < sizeof gone / sizeof *gone; i++)
        if (is_listed(typed, len, gone[i].words) &&
            (!gone[i].commands || (gone[i].commands & QC_CMD_BIT(command))))
            return gone[i].instead;
    return NULL;
}

int qc_is_python_command(const char *word)
{
    for (unsigned i = 0; i < qc_python_command_count; i++)
        if (strcmp(word, qc_python_command_table[i].name) == 0)
            return 1;
    return 0;
}

/* ---- values ---- */

/* Words that mean the same wherever a type is expected. */
static const char *canonical(const char *word)
{
    static const char *const same[][2] = {
        {"bfloat16", "bf16"}, {"float16", "fp16"}, {"half", "fp16"}, {"f16", "fp16"},
        {"float32", "fp32"},  {"f32", "fp32"},     {"float8", "fp8"}};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (strcasecmp(word, same[i][0]) == 0)
            return same[i][1];
    return word;
}

int qc_same_word(const char *a, const char *b)
{
    return strcasecmp(canonical(a), canonical(b)) == 0;
}

const char *qc_mistaken_choice(const qc_option_row *row, const char *typed)
{
    const char *best = NULL;
    unsigned best_miss = UINT32_MAX;
    for (const qc_choice_words *w = row->words; w && w->names; w++)
        if (is_listed(typed, strlen(typed), w->names))
            return w->choice;
    for (unsigned c = 0; row->choices && row->choices[c]; c++)
        if (is_nearer(typed, strlen(typed), row->choices[c], &best_miss))
            best = row->choices[c];
    return best;
}

uint64_t qc_mistaken_number(const char *typed)
{
    uint64_t v = 0;
    size_t digits = 0, group = 0;
    int grouped = 0;
    const char *s = typed;
    for (; digits <= 15; s++) {
        if (*s >= '0' && *s <= '9') {
            v = v * 10 + (uint64_t)(*s - '0');
            digits++;
            group++;
        } else if ((*s == ',' || *s == '_' || *s == '\'') && group > 0 && group <= 3 &&
                   (!grouped || group == 3)) {
            grouped = 1;
            group = 0;
        } else {
            break;
        }
    }
    if (digits == 0 || digits > 15 || (grouped && group != 3))
        return 0;
    if (*s == '\0')
        return grouped ? v : 0;
    if (s[1] != '\0' || grouped)
        return 0;
    /* The length of a context is often written so: "32k" is 32,768 tokens. */
    if ((*s == 'k' || *s == 'K') && v <= UINT64_MAX >> 20)
        return v << 10;
    return (*s == 'm' || *s == 'M') && v <= UINT64_MAX >> 30 ? v << 20 : 0;
}

double qc_mistaken_decimal(const char *typed, double most)
{
    double v = 0, unit = 1;
    size_t digits = 0;
    int point = 0;
    const char *s = typed;
    for (; digits <= 12; s++) {
        if (*s >= '0' && *s <= '9') {
            v = v * 10 + (*s - '0');
            unit *= point ? 10 : 1;
            digits++;
        } else if ((*s == '.' || *s == ',') && !point) {
            point = 1;
        } else {
            break;
        }
    }
    v /= unit;
    int percent = *s == '%' || (*s == '\0' && most <= 1 && v > 1 && v <= 100);
    s += *s == '%';
    v /= percent ? 100 : 1;
    return digits > 0 && *s == '\0' && v > 0 && v <= most ? v : 0;
}

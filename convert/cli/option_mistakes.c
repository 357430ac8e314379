#include "convert/cli/option_mistakes.h"

#include "base/edit_distance.h"

#include <string.h>
#include <strings.h>

/* How far `typed` is from a name: 0 when it is the beginning of it, UINT32_MAX when it is another
 * word. */
static unsigned miss(const char *typed, size_t len, const char *name)
{
    if (len >= 2 && strncmp(typed, name, len) == 0)
        return 0;
    unsigned d = qc_edit_distance(typed, len, name, strlen(name));
    return d <= 2 && d * 3 <= len ? d : UINT32_MAX;
}

/* Is `typed` the name, where case does not matter and '_' is '-'? */
static int is_name(const char *typed, size_t len, const char *name)
{
    size_t i = 0;
    for (; i < len && name[i]; i++) {
        char c = typed[i] == '_' ? '-' : typed[i];
        c = c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
        if (c != name[i])
            return 0;
    }
    return i == len && name[i] == '\0';
}

/* Is `typed` one of the names in a list that has blanks between them? */
static int is_listed(const char *typed, size_t len, const char *names)
{
    char name[48];
    for (const char *s = names; *s; s += strspn(s, " ")) {
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

static const struct {
    const char *names;
    qc_command command;
} command_names[] = {
    {"quantize quantise quant quantization compress cast dequantize dequantise run",
     QC_CMD_CONVERT},
    {"decompress extract unzip unzst uncompress export", QC_CMD_UNPACK},
    {"check checksum hash compare diff", QC_CMD_VERIFY},
    {"show info list ls cat dump stat stats view print describe", QC_CMD_INSPECT},
    {"fit fits estimate memory mem vram size dry-run place", QC_CMD_PLAN},
    {"gpu gpus device devices hw cards system nvidia-smi smi", QC_CMD_HARDWARE},
    {"benchmark perf speed tune", QC_CMD_BENCH},
    {"perplexity ppl evaluate evaluation kl kld", QC_CMD_EVAL},
    {"test accuracy", QC_CMD_VALIDATE},
    {"html page", QC_CMD_REPORT},
};

const qc_command_row *qc_mistaken_command(const char *word)
{
    const qc_command_row *best = NULL;
    unsigned best_miss = UINT32_MAX;
    for (size_t i = 0; i < sizeof command_names / sizeof *command_names; i++)
        if (is_listed(word, strlen(word), command_names[i].names))
            return qc_command_row_of(command_names[i].command);
    for (unsigned i = 0; i < qc_command_count; i++) {
        unsigned m = miss(word, strlen(word), qc_command_table[i].name);
        if (m < best_miss) {
            best = &qc_command_table[i];
            best_miss = m;
        }
    }
    return best;
}

/* ---- options ---- */

/* What other tools call the arguments that are no options here: the first, and the second. */
static const char place_names[2][160] = {
    "model in input i m src source from model-path model-dir model-id path checkpoint "
    "pretrained-model-name-or-path",
    "out output o output-dir out-dir outdir output-path outfile output-file output-folder dest "
    "dst destination target save save-to save-path to-dir",
};

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

static const qc_option_row *near_row(const char *typed, size_t len, const qc_option_row *rows,
                                     qc_command command)
{
    const qc_option_row *best = NULL;
    unsigned best_miss = UINT32_MAX;
    for (const qc_option_row *r = rows; r->name; r++) {
        unsigned m = miss(typed, len, r->name);
        if (!r->hidden && (r->commands & QC_CMD_BIT(command)) && m < best_miss) {
            best = r;
            best_miss = m;
        }
    }
    return best;
}

qc_status qc_mistaken_option(const char **text, qc_arena *arena, const char *typed, size_t len,
                             const qc_option_row *rows, qc_command command, qc_error *err)
{
    const qc_command_row *c = qc_command_row_of(command);
    const qc_foreign_name *foreign = NULL;
    const qc_option_row *r = rows;
    while (r->name && !(foreign = foreign_name(r, typed, len, command)))
        r++;
    *text = foreign ? foreign->meant : NULL;
    if (*text)
        return QC_OK;
    for (unsigned i = 0; !foreign && c && i < c->place_count; i++)
        if (is_listed(typed, len, place_names[i]))
            return qc_arena_printf(arena, text, err, "%s without an option: qconv %s",
                                   c->places[i].name, c->synopsis);
    const qc_option_row *meant = foreign ? r : near_row(typed, len, rows, command);
    return meant ? qc_arena_printf(arena, text, err, "--%s", meant->name) : QC_OK;
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
    static const struct {
        const char *names, *choice;
    } words[] = {
        {"int4 4bit 4-bit 4 fp4 q4 bnb bitsandbytes bnb4 nf4-double w4 w4a16 4bits", "nf4"},
        {"8bit 8-bit 8 q8 llm.int8 w8 bnb8 8bits i8 uint8", "int8"},
        {"16 16bit 16-bit f16 float half-precision", "bf16"},
        {"mixed best mix dynamic", "auto"},
        {"none same copy original asis as-is", "keep"},
        {"yes true 1", "on"},
        {"no false 0 off", "off"},
        {"no false 0 off quiet", "never"},
        {"yes true 1 on", "always"},
        {"inference serve run", "infer"},
        {"training finetune fine-tune", "train"},
        {"adam-8bit adamw8bit adamw-8bit paged-adamw-8bit adamw-bnb-8bit", "adam8bit"},
        {"max minmax", "absmax"},
        {"mse", "search"},
    };
    const char *best = NULL;
    unsigned best_miss = UINT32_MAX;
    for (unsigned c = 0; row->choices[c]; c++) {
        for (size_t i = 0; i < sizeof words / sizeof *words; i++)
            if (strcmp(words[i].choice, row->choices[c]) == 0 &&
                is_listed(typed, strlen(typed), words[i].names))
                return row->choices[c];
        unsigned m = miss(typed, strlen(typed), row->choices[c]);
        if (m < best_miss) {
            best = row->choices[c];
            best_miss = m;
        }
    }
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

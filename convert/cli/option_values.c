#include "convert/cli/option_values.h"

#include "base/text.h"
#include "convert/cli/option_mistakes.h"
#include "convert/device/device_wish.h"
#include "convert/fit/budget.h"
#include "convert/term/glob.h"
#include "convert/term/size_text.h"
#include "formats/file_io.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define QUOTED_MOST 200 /* bytes of a value in a message, so that what follows it is still seen */
/* A smaller size without a unit is a mistake: gigabytes or megabytes were meant. */
#define PLAIN_BYTES_LEAST 1000000u

void qc_option_list_choices(const qc_option_row *row, char *out, size_t out_bytes)
{
    out[0] = '\0';
    size_t used = 0;
    for (unsigned i = 0; row->choices[i]; i++) {
        const char *between = i == 0 ? "" : row->choices[i + 1] ? ", " : " or ";
        size_t need = strlen(between) + strlen(row->choices[i]);
        if (used + need >= out_bytes)
            break;
        memcpy(out + used, between, strlen(between));
        memcpy(out + used + strlen(between), row->choices[i], strlen(row->choices[i]) + 1);
        used += need;
    }
}

int qc_option_choice(const qc_option_row *row, const char *text)
{
    for (int i = 0; row->choices[i]; i++)
        if (qc_same_word(text, row->choices[i]))
            return i;
    return -1;
}

/* ---- reading ---- */

/* Reads a whole number in decimal digits; max is at most 10^18. digits is where in text it stands:
 * at the "3" of "zstd:3". */
static qc_status read_number(const qc_option_row *row, const char *text, const char *digits,
                             uint64_t min, uint64_t max, uint64_t *out, qc_error *err)
{
    uint64_t v = 0;
    const char *s = digits;
    for (; qc_is_digit(*s) && v <= max; s++)
        v = v * 10 + (uint64_t)(*s - '0');
    if (s == digits || *s != '\0' || v < min || v > max) {
        uint64_t meant = digits == text ? qc_mistaken_number(text) : 0;
        char hint[48] = "";
        if (meant >= min && meant <= max && meant > 0)
            (void)snprintf(hint, sizeof hint, "; did you mean %" PRIu64 "?", meant);
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected %s from %" PRIu64 " to %" PRIu64 ", got '%s'%s",
                row->name, digits == text ? "a whole number" : "zstd:LEVEL with a level", min, max,
                text, hint);
    }
    if (row->power_of_two && (v & (v - 1)) != 0) {
        uint64_t below = min;
        while (below * 2 < v)
            below *= 2;
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s: expected a power of two from %" PRIu64 " to %" PRIu64
                ", got '%s'; did you mean %" PRIu64 " or %" PRIu64 "?",
                row->name, min, max, text, below, below * 2);
    }
    *out = v;
    return QC_OK;
}

static qc_status read_choice(const qc_option_row *row, const char *text, unsigned *out,
                             qc_error *err)
{
    char choices[QC_SPELLED_BYTES], typed[64];
    const int found = qc_option_choice(row, text);
    *out = found >= 0 ? (unsigned)found : 0;
    if (found >= 0)
        return QC_OK;
    const char *meant = qc_mistaken_choice(row, text);
    qc_option_list_choices(row, choices, sizeof choices);
    (void)snprintf(typed, sizeof typed, "--%s=%s", row->name, text);
    const char *instead = qc_gone_instead(typed, strlen(typed), QC_CMD_HELP);
    if (instead)
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected %s, got '%s', %s", row->name, choices, text,
                instead);
    QC_FAIL(err, QC_ERR_USAGE, "--%s: expected %s, got '%.*s'%s%s%s", row->name, choices,
            QUOTED_MOST, text, meant ? "; did you mean " : "", meant ? meant : "",
            meant ? "?" : "");
}

/* ---- setters of any member ---- */

static void store(qc_options *o, const qc_option_row *row, const void *value, size_t bytes)
{
    memcpy((char *)o + row->at, value, bytes);
}

_Static_assert(sizeof(qc_to) == sizeof(int), "an enum is stored as an int");

qc_status qc_option_set_choice(qc_options *o, const qc_option_row *row, const char *value,
                               qc_error *err)
{
    unsigned choice = 0;
    if (row->choices)
        QC_TRY(read_choice(row, value, &choice, err));
    int stored = row->values ? row->values[choice] : row->choices ? (int)choice : 1;
    store(o, row, &stored, sizeof stored);
    return QC_OK;
}

qc_status qc_option_set_count(qc_options *o, const qc_option_row *row, const char *value,
                              qc_error *err)
{
    (void)value;
    (void)err;
    ++*(int *)(void *)((char *)o + row->at);
    return QC_OK;
}

qc_status qc_option_set_word(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    unsigned choice = 0;
    QC_TRY(read_choice(row, value, &choice, err));
    store(o, row, &row->choices[choice], sizeof row->choices[choice]);
    return QC_OK;
}

qc_status qc_option_set_u64(qc_options *o, const qc_option_row *row, const char *value,
                            qc_error *err)
{
    uint64_t number = 0;
    QC_TRY(read_number(row, value, value, row->min, row->max, &number, err));
    store(o, row, &number, sizeof number);
    return QC_OK;
}

qc_status qc_option_set_unsigned(qc_options *o, const qc_option_row *row, const char *value,
                                 qc_error *err)
{
    uint64_t number = 0;
    QC_TRY(read_number(row, value, value, row->min, row->max, &number, err));
    unsigned narrow = (unsigned)number;
    store(o, row, &narrow, sizeof narrow);
    return QC_OK;
}

qc_status qc_option_set_decimal(qc_options *o, const qc_option_row *row, const char *value,
                                qc_error *err)
{
    double v = 0, unit = 1;
    int digits = 0, point = 0;
    const char *s = value;
    for (; qc_is_digit(*s) || (*s == '.' && !point); s++) {
        if (*s == '.') {
            point = 1;
            continue;
        }
        digits++;
        v = v * 10 + (*s - '0');
        if (point)
            unit *= 10;
    }
    v /= unit;
    if (*s != '\0' || digits == 0 || digits > 15 || v < row->least || v > row->most || v <= 0) {
        double meant = qc_mistaken_decimal(value, row->most);
        char hint[48] = "";
        if (meant > 0 && meant >= row->least)
            (void)snprintf(hint, sizeof hint, "; did you mean %g?", meant);
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected a number %s %g and at most %g, got '%s'%s",
                row->name, row->least > 0 ? "of at least" : "above", row->least, row->most, value,
                hint);
    }
    store(o, row, &v, sizeof v);
    return QC_OK;
}

qc_status qc_option_set_size(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    uint64_t bytes = 0;
    const char *name = NULL;
    QC_TRY(qc_arena_printf(o->call.arena, &name, err, "--%s", row->name));
    QC_TRY(qc_parse_size(value, name, &bytes, err));
    if (bytes > 0 && bytes < PLAIN_BYTES_LEAST && value[strspn(value, "0123456789")] == '\0')
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: expected a unit, found none in '%s', which would be %" PRIu64
                " byte%s; did you mean %s%s?",
                name, value, bytes, qc_plural(bytes), value,
                bytes < 200 && qc_ends_with(row->dflt, "GB") ? "GB" : "MB");
    if (bytes < row->min)
        QC_FAIL(err, QC_ERR_USAGE, "%s: expected at least %" PRIu64 " byte%s", name, row->min,
                qc_plural(row->min));
    store(o, row, &bytes, sizeof bytes);
    return QC_OK;
}

qc_status qc_option_set_text(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    (void)err;
    store(o, row, &value, sizeof value);
    return QC_OK;
}

qc_status qc_option_set_path(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    if (*value == '\0')
        QC_FAIL(err, QC_ERR_USAGE, "--%s: the path is empty; expected the name of a file",
                row->name);
    return qc_option_set_text(o, row, value, err);
}

/* Reads names with commas between, and stores them in lower case, without the blanks at commas and
 * ends. */
static qc_status read_list(const char **out, qc_arena *arena, const char *text, qc_error *err)
{
    char *list = NULL;
    QC_TRY(qc_arena_alloc(arena, &list, strlen(text) + 1, 1, err));
    size_t n = 0;
    for (const char *s = text; *s; s++) {
        if (*s == ' ') {
            size_t blanks = strspn(s, " ");
            if (n == 0 || list[n - 1] == ',' || s[blanks] == ',' || s[blanks] == '\0') {
                s += blanks - 1;
                continue;
            }
        }
        list[n++] = qc_lower(*s);
    }
    list[n] = '\0';
    *out = list;
    return QC_OK;
}

qc_status qc_option_set_list(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    const char *list = NULL;
    QC_TRY(read_list(&list, o->call.arena, value, err));
    store(o, row, &list, sizeof list);
    return QC_OK;
}

/* ---- setters that know their members ---- */

/* A level stands alone, or after "zstd" and one of these. */
static const char *level_of(const char *text)
{
    const char *s = strncasecmp(text, "zstd", 4) == 0 ? text + 4 : text;
    s += *s == '=' || *s == '-' || *s == ',' || *s == ' ';
    return qc_is_digit(*s) && s[strspn(s, "0123456789")] == '\0' && strlen(s) <= 2 ? s : NULL;
}

qc_status qc_option_set_compress(qc_options *o, const qc_option_row *row, const char *value,
                                 qc_error *err)
{
    uint64_t level = 1;
    int none = strcasecmp(value, "none") == 0;
    if (strncasecmp(value, "zstd:", 5) == 0) {
        QC_TRY(read_number(row, value, value + 5, 1, 19, &level, err));
    } else if (strcasecmp(value, "zstd") != 0 && !none) {
        const char *meant = qc_mistaken_choice(row, value), *digits = meant ? "" : level_of(value);
        if (!meant)
            meant = digits ? "zstd:" : "";
        QC_FAIL(
            err, QC_ERR_USAGE,
            "--%s: expected none, zstd or zstd:LEVEL with a level from 1 to 19, got '%.*s'%s%s%s%s",
            row->name, QUOTED_MOST, value, *meant ? "; did you mean " : "", meant,
            digits ? digits : "", *meant ? "?" : "");
    }
    o->convert.plan.compress = !none;
    o->convert.plan.compress_level = (int)level;
    return QC_OK;
}

/* Sets --keep and --quantize. The array grows to twice its size when its count is a power of
 * two. */
qc_status qc_option_set_rule(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    qc_recipe_options *r = &o->convert.plan.recipe;
    uint32_t n = r->rule_count;
    /* The manifest names it, perhaps hours later. */
    if (!qc_text_is_utf8(value))
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s: expected a glob in UTF-8, as the names of tensors are, found '%s'",
                row->name, value);
    if (*value == '\0')
        QC_FAIL(err, QC_ERR_USAGE, "--%s: the glob is empty; expected one such as '*.q_proj.*'",
                row->name);
    if (strlen(value) > QC_GLOB_MAX_BYTES)
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected a glob of at most %u bytes, found %zu",
                row->name, QC_GLOB_MAX_BYTES, strlen(value));
    if ((n & (n - 1)) == 0) {
        qc_rule *grown = NULL;
        QC_TRY(qc_arena_alloc(o->call.arena, &grown, n ? (size_t)n * 2 : 1, sizeof *grown, err));
        if (n > 0)
            memcpy(grown, r->rules, n * sizeof *grown);
        r->rules = grown;
    }
    r->rules[r->rule_count++] = (qc_rule){row->quantizes, value};
    return QC_OK;
}

/* The array grows like that of the rules. A folder may have a colon in its name, so what exists as
 * it is written has no scale. */
qc_status qc_option_set_lora(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    qc_loras *loras = &o->loras;
    const uint32_t n = loras->count;
    qc_lora lora = {value, 1.0};
    qc_path_kind kind = QC_PATH_MISSING;
    const char *colon = strrchr(value, ':');
    /* The manifest names it. */
    if (!qc_text_is_utf8(value) || *value == '\0')
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected ADAPTER or ADAPTER:SCALE in UTF-8, got '%s'",
                row->name, value);
    if (colon && (qc_path_stat(value, &kind, NULL, NULL) != QC_OK || kind == QC_PATH_MISSING)) {
        char *end = NULL;
        lora.scale = strtod(colon + 1, &end);
        if (colon == value || strspn(colon + 1, "+-.0123456789eE") != strlen(colon + 1) ||
            end == colon + 1 || *end != '\0' || !isfinite(lora.scale))
            QC_FAIL(err, QC_ERR_USAGE,
                    "--%s: expected ADAPTER or ADAPTER:SCALE with a number as the scale, got '%s'",
                    row->name, value);
        QC_TRY(qc_arena_strndup(o->call.arena, &lora.path, value, (size_t)(colon - value), err));
    }
    if ((n & (n - 1)) == 0) {
        qc_lora *grown = NULL;
        QC_TRY(qc_arena_alloc(o->call.arena, &grown, n ? (size_t)n * 2 : 1, sizeof *grown, err));
        if (n > 0)
            memcpy(grown, loras->list, n * sizeof *grown);
        loras->list = grown;
    }
    loras->list[loras->count++] = lora;
    return QC_OK;
}

qc_status qc_option_set_vram(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    (void)row;
    return qc_budget_parse(&o->convert.plan.fit.vram, o->call.arena, value, err);
}

qc_status qc_option_set_mla(qc_options *o, const qc_option_row *row, const char *value,
                            qc_error *err)
{
    unsigned choice = 0;
    QC_TRY(read_choice(row, value, &choice, err));
    o->convert.plan.fit.mla_absorbed = choice == 1;
    o->convert.plan.fit.mla_expanded = choice == 2;
    return QC_OK;
}

qc_status qc_option_set_block_size(qc_options *o, const qc_option_row *row, const char *value,
                                   qc_error *err)
{
    qc_recipe_options *r = &o->convert.plan.recipe;
    uint64_t number = 0;
    r->per_channel = strcmp(value, "channel") == 0;
    if (!r->per_channel)
        QC_TRY(read_number(row, value, value, row->min, row->max, &number, err));
    r->block_elems = (uint32_t)number;
    return QC_OK;
}

qc_status qc_option_set_prefill(qc_options *o, const qc_option_row *row, const char *value,
                                qc_error *err)
{
    o->convert.plan.fit.prefill = 0;
    if (strcmp(value, "whole") == 0)
        return QC_OK;
    if (read_number(row, value, value, row->min, row->max, &o->convert.plan.fit.prefill, NULL) !=
        QC_OK)
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s: expected a number of tokens from %" PRIu64 " to %" PRIu64
                ", or whole, got '%s'",
                row->name, row->min, row->max, value);
    return QC_OK;
}

qc_status qc_option_set_run_device(qc_options *o, const qc_option_row *row, const char *value,
                                   qc_error *err)
{
    qc_device_wish wish;
    if (*value == '\0')
        QC_FAIL(err, QC_ERR_USAGE, "--%s: expected auto, cpu, cuda, cuda:0 or cuda:0,2, found ''",
                row->name);
    QC_TRY(read_list(&o->devices.wish, o->call.arena, value, err));
    return qc_device_wish_read(&wish, o->devices.wish, err);
}

/* --m: whole numbers with commas between, none twice. */
qc_status qc_option_set_m(qc_options *o, const qc_option_row *row, const char *value, qc_error *err)
{
    size_t room = 1;
    unsigned n = 0;
    for (const char *s = value; *s; s++)
        room += *s == ',';
    const char *text = NULL;
    uint64_t *list = NULL;
    QC_TRY(qc_arena_alloc(o->call.arena, &list, room, sizeof *list, err));
    QC_TRY(read_list(&text, o->call.arena, value, err));
    for (const char *entry = text;; entry++) {
        char digits[24];
        size_t len = strcspn(entry, ",");
        size_t kept = len < sizeof digits ? len : 0; /* what is too long is no number either */
        memcpy(digits, entry, kept);
        digits[kept] = '\0';
        QC_TRY(read_number(row, digits, digits, row->min, row->max, &list[n], err));
        for (unsigned i = 0; i < n; i++)
            if (list[i] == list[n])
                QC_FAIL(err, QC_ERR_USAGE, "--%s: %" PRIu64 " is there twice in '%s'", row->name,
                        list[n], value);
        n++;
        entry += len;
        if (*entry == '\0')
            break;
    }
    o->products.m = list;
    o->products.m_count = n;
    return QC_OK;
}

/* --part "3/8": index 2 of count 8. */
qc_status qc_option_set_part(qc_options *o, const qc_option_row *row, const char *value,
                             qc_error *err)
{
    char part[24] = "";
    uint64_t i = 0, n = 0;
    const char *slash = strchr(value, '/');
    size_t len = slash ? (size_t)(slash - value) : 0;
    if (len > 0 && len < sizeof part)
        memcpy(part, value, len);
    /* The message shows all of it, because either number of 3/2 may be the wrong one. */
    if (!*part || read_number(row, slash + 1, slash + 1, 1, QC_PARTS_MAX, &n, NULL) != QC_OK ||
        read_number(row, part, part, 1, n, &i, NULL) != QC_OK)
        QC_FAIL(err, QC_ERR_USAGE,
                "--%s: expected I/N, like 1/4, with I from 1 to N and N up to %u, got '%s'",
                row->name, QC_PARTS_MAX, value);
    o->convert.part_index = (unsigned)(i - 1);
    o->convert.part_count = (unsigned)n;
    return QC_OK;
}

#include "convert/fit/budget.h"

#include "base/strbuf.h"
#include "base/text.h"
#include "convert/hardware/hardware.h"
#include "convert/hardware/hardware_choice.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define TERM_FORMS                                                                                 \
    "a size (40GB, 40GiB), a card (A100-40GB), auto, cpu[:SIZE] or disk[:SIZE], with a count "     \
    "before a size or a card (2x40GB)"
#define KNOWN_CARDS "; the cards that are known: docs/hardware.md"
#define QUOTED_MOST 80 /* bytes of a term in a message */
/* A size has only these characters. Text with any other is a list, or a card that was misread. */
#define SIZE_LETTERS "0123456789.KMGTBkmgtbIi"

/* One term without the blanks around it. */
typedef struct {
    const char *s;
    size_t len;
} span;

typedef struct {
    qc_budget *budget; /* the GPUs so far; devices has room for QC_MAX_DEVICES and two tiers */
    qc_arena *arena;
    qc_hardware *machine; /* NULL until somebody asks */
    int has_auto, has_cpu, has_disk;
    qc_device cpu, disk;
} parser;

static int is_blank(char c)
{
    return c == ' ' || c == '\t';
}

static span trimmed(const char *s, const char *end)
{
    while (s < end && is_blank(*s))
        s++;
    while (s < end && is_blank(end[-1]))
        end--;
    return (span){s, (size_t)(end - s)};
}

static int quoted(span t)
{
    return (int)(t.len < QUOTED_MOST ? t.len : QUOTED_MOST);
}

static int is_word(span t, const char *word)
{
    if (t.len != strlen(word))
        return 0;
    for (size_t i = 0; i < t.len; i++)
        if (qc_lower(t.s[i]) != word[i])
            return 0;
    return 1;
}

/* Reads a size that cannot be mistaken for a count of devices or a card. term is what messages
 * quote. */
static qc_status read_size(parser *p, span size, span term, uint64_t *out, qc_error *err)
{
    const char *text = NULL;
    QC_TRY(qc_arena_strndup(p->arena, &text, size.s, size.len, err));
    if (size.len > 0 && qc_is_digit(size.s[size.len - 1]) &&
        strspn(text, "0123456789.") == size.len)
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected a unit, such as %.*sGB, found none",
                quoted(term), term.s, quoted(size), size.s);
    const char *what = NULL;
    QC_TRY(qc_arena_printf(p->arena, &what, err, "--vram: '%.*s'", quoted(term), term.s));
    /* A blank before the unit is fine. */
    size_t number = strspn(text, "0123456789.");
    size_t blank = number > 0 && text[number] == ' ';
    if (number + blank + strspn(text + number + blank, SIZE_LETTERS) != size.len ||
        (blank && qc_is_digit(text[number + 1])))
        QC_FAIL(err, QC_ERR_USAGE,
                "%s: expected a size such as 40GB or 40GiB, terms joined with '+', found '%.*s'",
                what, quoted(size), size.s);
    QC_TRY(qc_parse_size(text, what, out, err));
    if (*out == 0)
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected more than 0 bytes", quoted(term),
                term.s);
    return QC_OK;
}

static qc_status look_at_machine(parser *p, qc_error *err)
{
    if (p->machine)
        return QC_OK;
    QC_TRY(qc_arena_array(p->arena, &p->machine, 1, err));
    return qc_hardware_read(p->machine, p->arena, err);
}

static qc_status add_gpu(parser *p, const qc_card *card, uint64_t total_bytes, qc_error *err)
{
    qc_budget *b = p->budget;
    if (b->gpu_count == QC_MAX_DEVICES)
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected at most %u GPUs, found more",
                QUOTED_MOST, b->text, QC_MAX_DEVICES);
    qc_device *d = &b->devices[b->gpu_count];
    QC_TRY(qc_arena_printf(p->arena, &d->name, err, "cuda:%" PRIu32, b->gpu_count));
    d->tier = QC_TIER_GPU;
    d->card = card;
    d->total_bytes = total_bytes;
    b->gpu_count++;
    return QC_OK;
}

static qc_status add_machine_gpus(parser *p, qc_error *err)
{
    if (p->has_auto)
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected auto at most once", QUOTED_MOST,
                p->budget->text);
    p->has_auto = 1;
    QC_TRY(look_at_machine(p, err));
    for (uint32_t i = 0; i < p->machine->gpu_count; i++)
        QC_TRY(add_gpu(p, p->machine->gpus[i].card, p->machine->gpus[i].free_bytes, err));
    return QC_OK;
}

/* Adds "cpu" or "disk". What follows the word is `rest`: nothing or ":SIZE". */
static qc_status add_tier(parser *p, span term, span rest, int is_disk, qc_error *err)
{
    int *has = is_disk ? &p->has_disk : &p->has_cpu;
    qc_device *d = is_disk ? &p->disk : &p->cpu;
    const char *name = is_disk ? "disk" : "cpu";
    if (*has)
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected %s at most once", QUOTED_MOST,
                p->budget->text, name);
    *has = 1;
    *d = (qc_device){name, is_disk ? QC_TIER_DISK : QC_TIER_CPU, NULL, UINT64_MAX};
    if (rest.len > 0) {
        span size = trimmed(rest.s + 1, rest.s + rest.len);
        if (size.len == 0)
            QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected a size after ':', found none",
                    quoted(term), term.s);
        return read_size(p, size, term, &d->total_bytes, err);
    }
    if (!is_disk) {
        QC_TRY(look_at_machine(p, err));
        d->total_bytes = p->machine->memory_bytes;
    }
    return QC_OK;
}

/* Returns 1 if the term was one of the words and is handled; then *st has the result. */
static int try_word(parser *p, span t, qc_status *st, qc_error *err)
{
    const char *colon = memchr(t.s, ':', t.len);
    size_t stem_len = colon ? (size_t)(colon - t.s) : t.len;
    span stem = trimmed(t.s, t.s + stem_len), rest = {t.s + stem_len, t.len - stem_len};
    int is_cpu = is_word(stem, "cpu"), is_disk = is_word(stem, "disk");
    if (is_word(t, "auto"))
        *st = add_machine_gpus(p, err);
    else if (is_cpu || is_disk)
        *st = add_tier(p, t, rest, is_disk, err);
    else
        return 0;
    return 1;
}

/* Returns the bytes of the sign of multiplication at s, which is 'x', '*' or the sign itself in
 * UTF-8; 0 if there is none. */
static size_t times_sign(const char *s, const char *end)
{
    if (s < end && (qc_lower(*s) == 'x' || *s == '*'))
        return 1;
    return end - s >= 2 && (unsigned char)s[0] == 0xc3 && (unsigned char)s[1] == 0x97 ? 2 : 0;
}

/* Returns the number in the digits from s to end. One that is too large stays too large. */
static uint64_t count_of(const char *s, const char *end)
{
    uint64_t n = 0;
    for (; s < end; s++)
        if (n <= QC_MAX_DEVICES)
            n = n * 10 + (uint64_t)(*s - '0');
    return n;
}

/* Takes "2x" off the front of t; returns 0 if there is none. */
static int take_count(span *t, uint64_t *count)
{
    const char *end = t->s + t->len, *digits = t->s;
    while (digits < end && qc_is_digit(*digits))
        digits++;
    const char *sign = digits;
    while (sign < end && is_blank(*sign))
        sign++;
    size_t n = times_sign(sign, end);
    const span behind = trimmed(sign + n, end);
    if (digits == t->s || n == 0)
        return 0;
    /* In "3090x2" the count stands behind. */
    if (qc_card_find(t->s, (size_t)(digits - t->s)) && behind.len > 0 &&
        strspn(behind.s, "0123456789") >= behind.len)
        return 0;
    *count = count_of(t->s, digits);
    *t = trimmed(sign + n, end);
    return 1;
}

/* Takes "x2" off the end of a size with its unit, or of a card's name; returns 0 if there is none.
 * Some cards have an x before the number in their name, so what is left has to be a card. */
static int take_count_behind(span *t, uint64_t *count)
{
    const char *end = t->s + t->len, *digits = end;
    while (digits > t->s && qc_is_digit(digits[-1]))
        digits--;
    const char *sign = digits;
    while (sign > t->s && is_blank(sign[-1]))
        sign--;
    size_t n = sign > t->s ? times_sign(sign - 1, end) : 0;
    n = n == 0 && sign - t->s >= 2 ? times_sign(sign - 2, end) : n;
    if (digits == end || n == 0 || sign == t->s || qc_card_find(t->s, t->len))
        return 0;
    span rest = trimmed(t->s, sign - n);
    if (rest.len == 0 || (!qc_card_find(rest.s, rest.len) &&
                          (!qc_is_digit(rest.s[0]) || qc_is_digit(rest.s[rest.len - 1]))))
        return 0;
    *count = count_of(digits, end);
    *t = rest;
    return 1;
}

static qc_status add_cards(parser *p, span term, qc_error *err)
{
    span what = term;
    uint64_t count = 1, bytes = 0;
    int counted = take_count(&what, &count) || take_count_behind(&what, &count);
    /* In "7900xtx" it is the name that is unknown, not the count. */
    int may_be_count = what.len == 0 || qc_is_digit(what.s[0]) || qc_card_find(what.s, what.len);
    if (may_be_count && (count == 0 || count > QC_MAX_DEVICES))
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected a count from 1 to %u", quoted(term),
                term.s, QC_MAX_DEVICES);
    if (what.len == 0)
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected a size or a card after 'x'",
                quoted(term), term.s);
    const char *colon = memchr(what.s, ':', what.len);
    span stem = {what.s, colon ? (size_t)(colon - what.s) : what.len};
    if (counted && (is_word(stem, "auto") || is_word(stem, "cpu") || is_word(stem, "disk")))
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected no count before '%.*s'", quoted(term),
                term.s, quoted(stem), stem.s);
    const qc_card *card = qc_card_find(what.s, what.len);
    if (card) {
        bytes = card->memory_bytes;
    } else if (qc_is_digit(what.s[0])) {
        qc_status st = read_size(p, what, term, &bytes, err);
        /* For something like "4O90", name the card it resembles before saying what is wrong with
         * the size. */
        const char *near = st == QC_ERR_USAGE ? qc_card_near(what.s, what.len) : NULL;
        if (near)
            QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected " TERM_FORMS "; did you mean %s?",
                    quoted(term), term.s, near);
        QC_TRY(st);
    } else {
        const char *near = qc_card_near(what.s, what.len);
        QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected " TERM_FORMS "%s%s%s", quoted(term),
                term.s, near ? "; did you mean " : KNOWN_CARDS, near ? near : "", near ? "?" : "");
    }
    for (uint64_t i = 0; i < count; i++)
        QC_TRY(add_gpu(p, card, bytes, err));
    return QC_OK;
}

/* Copies a term without blanks, and a size in one spelling, "40GB" for "40g", so that two ways to
 * write a budget are one text. */
static void put_term(qc_strbuf *out, span t)
{
    const char *colon = memchr(t.s, ':', t.len);
    span size = colon ? (span){colon + 1, t.len - (size_t)(colon + 1 - t.s)} : t;
    uint64_t count = 0;
    (void)(!colon && take_count(&size, &count));
    char word[QUOTED_MOST + 1];
    size_t n = 0;
    for (size_t i = 0; i < size.len && n < QUOTED_MOST; i++)
        if (!is_blank(size.s[i]))
            word[n++] = size.s[i];
    word[n] = '\0';
    const size_t number = strspn(word, "0123456789."), unit = number + 1;
    const size_t tail = unit + (number < n && qc_lower(word[unit]) == 'i');
    const int is_size = number > 0 && number < n && strchr("kmgt", qc_lower(word[number])) &&
                        (word[tail] == '\0' || (qc_lower(word[tail]) == 'b' && tail + 1 == n)) &&
                        !qc_card_find(word, n);
    for (const char *s = t.s; s < size.s; s++)
        if (!is_blank(*s))
            qc_strbuf_put(out, s, 1);
    if (is_size)
        qc_strbuf_putf(out, "%.*s%c%sB", (int)number, word, word[number] & ~0x20,
                       tail > unit ? "i" : "");
    else
        qc_strbuf_puts(out, word);
}

/* Writes out->text anew from its terms. */
static qc_status settle_text(qc_budget *out, qc_arena *arena, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, SIZE_MAX / 2);
    for (const char *s = out->text;; s++) {
        const char *end = s + strcspn(s, "+,");
        put_term(&text, trimmed(s, end));
        if (*end == '\0')
            break;
        qc_strbuf_put(&text, end, 1);
        s = end;
    }
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK)
        st = qc_arena_strndup(arena, &out->text, text.data, text.len, err);
    qc_strbuf_deinit(&text);
    return st;
}

qc_status qc_budget_parse(qc_budget *out, qc_arena *arena, const char *text, qc_error *err)
{
    memset(out, 0, sizeof *out);
    parser p = {.budget = out, .arena = arena};
    QC_TRY(qc_arena_strndup(arena, &out->text, text, strlen(text), err));
    QC_TRY(qc_arena_array(arena, &out->devices, QC_MAX_DEVICES + 2, err));
    for (const char *s = out->text;; s++) {
        const char *end = s + strcspn(s, "+,");
        const span t = trimmed(s, end);
        qc_status st = QC_OK;
        if (t.len == 0)
            QC_FAIL(err, QC_ERR_USAGE, "--vram: '%.*s': expected " TERM_FORMS ", found nothing",
                    QUOTED_MOST, out->text);
        if (!try_word(&p, t, &st, err))
            st = add_cards(&p, t, err);
        QC_TRY(st);
        s = end;
        if (*s == '\0')
            break;
    }
    out->count = out->gpu_count;
    if (p.has_cpu)
        out->devices[out->count++] = p.cpu;
    if (out->count == 0 && p.has_auto)
        QC_FAIL(err, QC_ERR_DEVICE, "--vram: 'auto' found no GPU%s%s; name cards, or add cpu",
                p.machine->no_gpu ? ": " : "", p.machine->no_gpu ? p.machine->no_gpu : "");
    if (out->count == 0)
        QC_FAIL(err, QC_ERR_USAGE,
                "--vram: '%.*s': expected a GPU or cpu beside disk, on which nothing computes",
                QUOTED_MOST, text);
    if (p.has_disk)
        out->devices[out->count++] = p.disk;
    return settle_text(out, arena, err);
}

const char *qc_budget_card_without_int8(const qc_budget *b)
{
    for (uint32_t i = 0; i < b->gpu_count; i++) {
        const qc_card *card = b->devices[i].card;
        qc_gpu gpu = {.sm = card ? card->sm : 0};
        if (card && !strstr(qc_gpu_choose(&gpu).schemes, "int8"))
            return card->name;
    }
    return NULL;
}

void qc_budget_warn_vllm(const qc_budget *b, qc_format format, const qc_call *call)
{
    enum { VLLM_SM = 75 }; /* get_min_capability of vLLM 0.32's kernels; its wheels have no sm_70 */
    for (uint32_t i = 0; i < b->gpu_count && format != QC_FORMAT_AWQ; i++) {
        const qc_card *card = b->devices[i].card;
        if (!card || card->sm >= VLLM_SM)
            continue;
        qc_console_warn(call,
                        "vLLM does not start on a %s (compute capability %u.%u, expected 7.5 or "
                        "more): --to int4 --format awq makes what lmdeploy serves there, split "
                        "over cards, too",
                        card->name, card->sm / 10, card->sm % 10);
        return;
    }
}

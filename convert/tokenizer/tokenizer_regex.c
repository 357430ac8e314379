/* The regular expressions of tokenizer.json are written for Oniguruma, and here PCRE2 runs them.
 * The two agree on much and differ in corners: what \s and \w are, what ^, $ and . do, sets within
 * sets. So a pattern is read first. What means the same to both goes through, \s and \d are spelled
 * out, and anything else is refused by name. Both try alternatives in order and backtrack alike, so
 * a pattern that goes through matches alike, except for characters that a newer Unicode has
 * added. */
#define PCRE2_CODE_UNIT_WIDTH 8

#include "base/alloc.h"
#include "convert/tokenizer/tokenizer_internal.h"

#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

#define PATTERN_MAX ((size_t)1 << 16)
#define SET_MAX     ((size_t)4096) /* bytes from '[' to ']'; deepseek-coder has 1,300 */
/* The largest n or m that {n,m} may have, because a failure within the repetition counts as only
 * one step. */
#define COUNT_MAX   1000
#define SPACES      "\\x{9}-\\x{d}\\x{20}\\x{85}\\p{Z}"
#define MATCH_LIMIT 50000000u
#define HEAP_KIB    8192u /* for a match that finds no room on the machine code's stack */

struct qc_pattern {
    pcre2_general_context *memory;
    pcre2_code *code; /* NULL: a literal */
    size_t weight;    /* how many steps it counts to look at one byte */
    size_t literal_len;
    char literal[];
};

struct qc_matcher {
    pcre2_general_context *memory;
    pcre2_match_context *context;
    pcre2_match_data *data;
    qc_token_budget *budget;
    size_t place, weight; /* where the match under way was looking, and what a byte costs it */
};

static void *hook_malloc(size_t bytes, void *unused)
{
    (void)unused;
    return qc_hook_malloc(bytes);
}

static void hook_free(void *p, void *unused)
{
    (void)unused;
    qc_hook_free(p);
}

/* ---- reading -------------------------------------------------------------------------------- */

typedef struct {
    const char *text;
    size_t at;
    int in_class;
    size_t longest_set; /* in bytes */
    qc_strbuf *out;
    qc_error *err;
} reader;

#define REFUSE(r, ...) QC_FAIL((r)->err, QC_ERR_UNSUPPORTED, __VA_ARGS__)

static int next_is(const reader *r, const char *what)
{
    return strncmp(r->text + r->at, what, strlen(what)) == 0;
}

static qc_status put(reader *r, const char *s, size_t len)
{
    return qc_strbuf_add(r->out, s, len, r->err);
}

static qc_status puts_(reader *r, const char *s)
{
    return qc_strbuf_adds(r->out, s, r->err);
}

/* Properties that mean the same to both. "C" and "Cn" (what Unicode has not assigned) are not among
 * them. */
static int known_property(const char *name, size_t len)
{
    static const char *const names[] = {
        "L",  "Lu", "Ll",  "Lt",       "Lm",     "Lo",       "M",   "Mn", "Mc", "Me",
        "N",  "Nd", "Nl",  "No",       "P",      "Pc",       "Pd",  "Ps", "Pe", "Pi",
        "Pf", "Po", "S",   "Sm",       "Sc",     "Sk",       "So",  "Z",  "Zs", "Zl",
        "Zp", "Cc", "Han", "Hiragana", "Hangul", "Katakana", "Thai"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == len && memcmp(names[i], name, len) == 0)
            return 1;
    return 0;
}

/* Reads a property; the reader is at 'p' or 'P'. */
static qc_status property(reader *r)
{
    const char *begin = r->text + r->at, *name = begin + 2;
    const char *end = begin[1] == '{' ? strchr(begin, '}') : NULL;
    size_t shown = strnlen(begin, 24);
    if (!end || !known_property(name, (size_t)(end - name)))
        REFUSE(r, "the property \\%.*s of a regular expression is not supported", (int)shown,
               begin);
    QC_TRY(puts_(r, "\\"));
    QC_TRY(put(r, begin, (size_t)(end + 1 - begin)));
    r->at += (size_t)(end + 1 - begin);
    return QC_OK;
}

/* Reads what follows a backslash. *set says whether it stands for many characters. */
static qc_status escape(reader *r, int *set)
{
    static const char letters[] = "rntfv",
                      values[][8] = {"\\x{d}", "\\x{a}", "\\x{9}", "\\x{c}", "\\x{b}"};
    char c = r->text[r->at];
    const char *letter = c ? strchr(letters, c) : NULL;
    *set = 1;
    if (c == 'p' || c == 'P')
        return property(r);
    r->at++;
    if (c == 's')
        return puts_(r, r->in_class ? SPACES : "[" SPACES "]");
    if (c == 'S' && !r->in_class)
        return puts_(r, "[^" SPACES "]");
    if (c == 'd')
        return puts_(r, "\\p{Nd}");
    if (c == 'D')
        return puts_(r, "\\P{Nd}");
    *set = 0;
    if (letter)
        return puts_(r, values[letter - letters]);
    if (c && c > ' ' && c < 0x7f &&
        !((c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z'))) {
        const char text[] = {'\\', c};
        return put(r, text, 2);
    }
    REFUSE(r, "\\%.1s in a regular expression%s is not supported", c ? (const char[]){c, 0} : "",
           r->in_class ? "'s set" : "");
}

static size_t character_bytes(const char *s)
{
    unsigned char c = (unsigned char)*s;
    size_t n = c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
    return strnlen(s, n);
}

/* Reads a set from '[' to ']'. */
static qc_status set_of(reader *r)
{
    int many = 0; /* the last member was itself a set, so no range begins there */
    size_t begin = r->at;
    QC_TRY(puts_(r, "["));
    r->at++;
    if (r->text[r->at] == '^') {
        QC_TRY(puts_(r, "^"));
        r->at++;
    }
    r->in_class = 1;
    if (r->text[r->at] == ']')
        REFUSE(r, "an empty set in a regular expression is not supported");
    for (int first = 1; r->text[r->at] != ']'; first = 0) {
        char c = r->text[r->at];
        if (!c)
            QC_FAIL(r->err, QC_ERR_INPUT,
                    "a regular expression of the tokenizer has a set without an end");
        if (c == '[' || next_is(r, "&&"))
            REFUSE(r, "a set within a set of a regular expression is not supported");
        if (c == '-' && !first && r->text[r->at + 1] != ']') {
            char to = r->text[r->at + 1] == '\\' ? r->text[r->at + 2] : 'a';
            if (many || (to && strchr("sSdDpPwW", to)))
                REFUSE(r, "a range of sets in a regular expression is not supported");
        }
        if (c == '\\') {
            r->at++;
            QC_TRY(escape(r, &many));
            continue;
        }
        size_t n = character_bytes(r->text + r->at);
        QC_TRY(put(r, r->text + r->at, n));
        r->at += n;
        many = 0;
    }
    r->in_class = 0;
    r->at++;
    size_t length = r->at - begin;
    if (length > SET_MAX)
        REFUSE(r, "a set of %zu bytes in a regular expression is not supported, at most %zu",
               length, SET_MAX);
    r->longest_set = length > r->longest_set ? length : r->longest_set;
    return puts_(r, "]");
}

/* Reads "(?i:" up to its ")", within which the case of letters does not matter. Only ASCII letters
 * are accepted, and no pair of letters to which a single character folds: Oniguruma would let
 * U+00DF match "ss". */
static qc_status caseless(reader *r)
{
    static const char *const folds[] = {"ss", "ff", "fi", "fl", "st"};
    const char *begin = r->text + r->at;
    for (; r->text[r->at] != ')'; r->at++) {
        char c = r->text[r->at];
        if (!((c | 32) >= 'a' && (c | 32) <= 'z') && c != '\'' && c != '|')
            REFUSE(r, "'%.*s' in (?i:...) of a regular expression is not supported",
                   (int)character_bytes(r->text + r->at), r->text + r->at);
        for (size_t i = 0; i < sizeof folds / sizeof *folds; i++)
            if (((c | 32) == folds[i][0]) && ((r->text[r->at + 1] | 32) == folds[i][1]))
                REFUSE(r, "'%s' in (?i:...) of a regular expression is not supported", folds[i]);
    }
    r->at++;
    return put(r, begin, (size_t)(r->text + r->at - begin));
}

static qc_status group(reader *r)
{
    static const char *const heads[] = {"(?:", "(?=", "(?!", "(?>"};
    if (next_is(r, "(?i:")) {
        QC_TRY(puts_(r, "(?i:"));
        r->at += 4;
        return caseless(r);
    }
    if (r->text[r->at + 1] != '?') {
        r->at++;
        return puts_(r, "(");
    }
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        if (next_is(r, heads[i])) {
            r->at += 3;
            return puts_(r, heads[i]);
        }
    size_t shown = strnlen(r->text + r->at, 4);
    REFUSE(r, "the group %.*s of a regular expression is not supported", (int)shown,
           r->text + r->at);
}

/* The larger of the numbers in {n,m}. More text follows it. */
static unsigned long largest_count(const char *s)
{
    unsigned long n = strtoul(s + 1, NULL, 10);
    const char *comma = s + 1 + strspn(s + 1, "0123456789");
    unsigned long m = *comma == ',' ? strtoul(comma + 1, NULL, 10) : 0;
    return n > m ? n : m;
}

/* Reads {n}, {n,} or {n,m} by itself. With ? or + behind it, the two engines differ. */
static qc_status counted(reader *r)
{
    const char *begin = r->text + r->at, *s = begin + 1;
    size_t digits = strspn(s, "0123456789");
    s += digits;
    if (*s == ',')
        s += 1 + strspn(s + 1, "0123456789");
    if (digits == 0 || *s != '}' || s[1] == '?' || s[1] == '+' || largest_count(begin) > COUNT_MAX)
        REFUSE(r, "%.*s in a regular expression is not supported", (int)strnlen(begin, 8), begin);
    s++;
    r->at += (size_t)(s - begin);
    return put(r, begin, (size_t)(s - begin));
}

static qc_status translate(reader *r)
{
    int set = 0;
    while (r->text[r->at]) {
        char c = r->text[r->at];
        if (c == '\\') {
            r->at++;
            QC_TRY(escape(r, &set));
        } else if (c == '[') {
            QC_TRY(set_of(r));
        } else if (c == '(') {
            QC_TRY(group(r));
        } else if (c == '{') {
            QC_TRY(counted(r));
        } else if (c == '.' || c == '^' || c == '$') {
            REFUSE(r, "'%c' in a regular expression is not supported", c);
        } else {
            size_t n = character_bytes(r->text + r->at);
            QC_TRY(put(r, r->text + r->at, n));
            r->at += n;
        }
    }
    return QC_OK;
}

/* ---- compiling ------------------------------------------------------------------------------ */

static qc_status create(qc_pattern **out, size_t literal_len, qc_error *err)
{
    QC_TRY(qc_calloc(out, 1, sizeof(qc_pattern) + literal_len + 1, err));
    return QC_OK;
}

static qc_status compile(qc_pattern *p, const qc_strbuf *text, const char *regex, qc_error *err)
{
    int code = 0;
    PCRE2_SIZE at = 0;
    p->memory = pcre2_general_context_create(hook_malloc, hook_free, NULL);
    pcre2_compile_context *context = p->memory ? pcre2_compile_context_create(p->memory) : NULL;
    if (!context)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for a regular expression");
    /* Callouts make a match tell what it does; see on_step. */
    p->code = pcre2_compile((PCRE2_SPTR)(text->data ? text->data : ""), text->len,
                            PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C | PCRE2_AUTO_CALLOUT,
                            &code, &at, context);
    pcre2_compile_context_free(context);
    if (!p->code) {
        PCRE2_UCHAR why[120] = "";
        (void)pcre2_get_error_message(code, why, sizeof why);
        if (code == PCRE2_ERROR_HEAP_FAILED) /* 121 */
            QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for a regular expression");
        QC_FAIL(err, QC_ERR_INPUT,
                "the regular expression '%.200s' of the tokenizer cannot be read: %s", regex,
                (const char *)why);
    }
    /* If there is no room for machine code, or it is not allowed, the pattern is interpreted. */
    (void)pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE);
    return QC_OK;
}

qc_status qc_pattern_compile(qc_pattern **out, const char *regex, qc_error *err)
{
    qc_strbuf text;
    reader r = {.text = regex, .out = &text, .err = err};
    *out = NULL;
    qc_strbuf_init(&text, PATTERN_MAX);
    qc_status st = translate(&r);
    if (st == QC_ERR_NOMEM && text.len > PATTERN_MAX - PATTERN_MAX / 8)
        st = QC_ERROR(err, QC_ERR_UNSUPPORTED,
                      "a pattern of the tokenizer with %zu bytes is too long: written for "
                      "PCRE2 it would have more than %zu",
                      strlen(regex), PATTERN_MAX);
    if (st == QC_OK)
        st = create(out, 0, err);
    if (st == QC_OK)
        (*out)->weight = 1 + r.longest_set / 64;
    if (st == QC_OK)
        st = compile(*out, &text, regex, err);
    qc_strbuf_deinit(&text);
    if (st != QC_OK) {
        qc_pattern_free(*out);
        *out = NULL;
    }
    return st;
}

qc_status qc_pattern_literal(qc_pattern **out, const char *text, qc_error *err)
{
    size_t len = strlen(text);
    QC_TRY(create(out, len, err));
    (*out)->literal_len = len;
    (*out)->weight = 1 + len / 64;
    memcpy((*out)->literal, text, len);
    return QC_OK;
}

void qc_pattern_free(qc_pattern *p)
{
    if (!p)
        return;
    pcre2_code_free(p->code);
    pcre2_general_context_free(p->memory);
    qc_free(p);
}

/* ---- matching ------------------------------------------------------------------------------- */

/* PCRE2 calls this in front of each item of a pattern. What a repetition took lies between this
 * place and the last one, and so does what it gives back when it fails. So the sum of these
 * distances is the work, to within a small factor. */
static int on_step(pcre2_callout_block *block, void *v)
{
    qc_matcher *m = v;
    size_t at = block->current_position, way = at > m->place ? at - m->place : m->place - at;
    m->place = at;
    return qc_token_budget_spend(m->budget, (1 + way) * m->weight) ? 0 : PCRE2_ERROR_CALLOUT;
}

qc_status qc_matcher_create(qc_matcher **out, qc_token_budget *budget, qc_error *err)
{
    *out = NULL;
    qc_matcher *m = NULL;
    QC_TRY(qc_calloc(&m, 1, sizeof(qc_matcher), err));
    m->memory = pcre2_general_context_create(hook_malloc, hook_free, NULL);
    m->context = m->memory ? pcre2_match_context_create(m->memory) : NULL;
    m->data = m->memory ? pcre2_match_data_create(1, m->memory) : NULL;
    if (!m->context || !m->data) {
        qc_matcher_free(m);
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for regular expressions");
    }
    m->budget = budget;
    (void)pcre2_set_match_limit(m->context, MATCH_LIMIT);
    (void)pcre2_set_heap_limit(m->context, HEAP_KIB);
    (void)pcre2_set_callout(m->context, on_step, m);
    *out = m;
    return QC_OK;
}

void qc_matcher_free(qc_matcher *m)
{
    if (!m)
        return;
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->context);
    pcre2_general_context_free(m->memory);
    qc_free(m);
}

qc_token_budget *qc_matcher_budget(qc_matcher *m)
{
    return m->budget;
}

static qc_status find_literal(const qc_pattern *p, qc_token_budget *budget, qc_span s, size_t from,
                              int *found, size_t *begin, size_t *end, qc_error *err)
{
    *found = 0;
    while (p->literal_len > 0 && from < s.len && s.len - from >= p->literal_len) {
        const char *at = memchr(s.text + from, p->literal[0], s.len - from - p->literal_len + 1);
        if (!at)
            break;
        if (!qc_token_budget_spend(budget, p->weight))
            return qc_token_budget_check(budget, err);
        from = (size_t)(at - s.text);
        if (memcmp(at, p->literal, p->literal_len) == 0) {
            *found = 1;
            *begin = from;
            *end = from + p->literal_len;
            break;
        }
        from++;
    }
    return QC_OK;
}

qc_status qc_pattern_find(const qc_pattern *p, qc_matcher *m, qc_span s, size_t from, int *found,
                          size_t *begin, size_t *end, qc_error *err)
{
    if (!p->code)
        return find_literal(p, m->budget, s, from, found, begin, end, err);
    m->place = from;
    m->weight = p->weight;
    PCRE2_SPTR text = (PCRE2_SPTR)s.text;
    int rc = pcre2_match(p->code, text, s.len, from, PCRE2_NO_UTF_CHECK, m->data, m->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(p->code, text, s.len, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, m->data,
                         m->context);
    *found = rc >= 0;
    if (rc >= 0) {
        const PCRE2_SIZE *pair = pcre2_get_ovector_pointer(m->data);
        *begin = pair[0];
        *end = pair[1];
        if (*begin > *end) /* \K is refused, so no accepted pattern gets here */
            QC_FAIL(err, QC_ERR_INTERNAL, "a match ends before it begins");
        return QC_OK;
    }
    if (rc == PCRE2_ERROR_NOMATCH)
        return QC_OK;
    QC_TRY(qc_token_budget_check(m->budget, err));
    if (rc == PCRE2_ERROR_NOMEMORY)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for a regular expression");
    QC_FAIL(err, QC_ERR_INPUT,
            "a regular expression of the tokenizer backtracks too much on this text (PCRE2: %d)",
            rc);
}

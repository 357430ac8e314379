/* A scanner of our own makes one pass over the text, then cJSON builds the tree.
 *
 *   text --scan--> grammar, UTF-8, escapes, numbers, depth, duplicate keys   (errors with offset)
 *        --cJSON-> nodes            (can only fail for want of memory now)
 *        --mark--> valueint of a number := "written as plain digits"
 *
 * Duplicate keys: keys of open objects lie on a stack; when an object closes, its keys are sorted
 * and neighbours compared. That takes O(n log n), and O(n) where they are in order already. Keys
 * with escapes are unescaped first, so "a" and "\u0061" are the same key.
 *
 * What is refused beyond RFC 8259, and why:
 *
 *   numbers of more than 63 characters    cJSON cuts them there
 *   numbers beyond the range of a double  cJSON makes them infinite
 *   "\u0000"                              cJSON cuts strings there
 *   more values than 2^20 + bytes / 4     a node takes some 80 bytes: a hostile text of 100 MB
 *                                         ("0,0,0,...") must not take 4 GB
 *
 * cJSON never sees a text that the scanner refused. */
#include "formats/json_strict.h"

#include "base/alloc.h"
#include "base/arena.h"
#include "base/checked.h"

#include <cjson/cJSON.h>
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX        64u
#define NUMBER_MAX_BYTES 63
#define INTEGER_MAX      9007199254740991u /* 2^53 - 1 */
#define KEY_SHOWN_BYTES  160u              /* of a key in a message */
#define VALUES_FREE      1048576u
#define BYTES_PER_VALUE  4u

struct qc_json {
    cJSON *root;
};

typedef enum { NUMBER_OTHER, NUMBER_DIGITS, NUMBER_NAN, NUMBER_INF, NUMBER_MINUS_INF } number_form;

typedef struct {
    const char *p; /* unescaped; points into the text or the scanner's arena */
    size_t len;
    size_t offset; /* of the opening quote in the text */
} scan_key;

typedef struct {
    const char *text;
    const char *p;
    const char *end;
    unsigned flags;
    unsigned depth;
    uint64_t values_left;
    scan_key *keys; /* of all open objects, outermost first */
    size_t key_count;
    size_t key_cap;
    unsigned char *numbers; /* number_form of each, in document order */
    size_t number_count;
    size_t number_cap;
    char *patched;  /* copy of the text with 0 for NaN and the like; NULL while there is none */
    qc_arena arena; /* unescaped keys */
    qc_error *err;
} scanner;

typedef struct {
    const char *p; /* after the opening quote */
    size_t len;
    int escaped;
} scan_string;

static pthread_once_t hooks_once = PTHREAD_ONCE_INIT;

static void install_hooks(void)
{
    cJSON_Hooks hooks = {qc_hook_malloc, qc_hook_free};
    cJSON_InitHooks(&hooks);
}

/* "byte 12: <expected>, found 'x'" */
static qc_status fail_found(const scanner *s, const char *at, const char *expected)
{
    size_t offset = (size_t)(at - s->text);
    if (at >= s->end)
        QC_FAIL(s->err, QC_ERR_INPUT, "JSON byte %zu: %s, found the end of the text", offset,
                expected);
    unsigned char c = (unsigned char)*at;
    if (c > 0x20 && c < 0x7f)
        QC_FAIL(s->err, QC_ERR_INPUT, "JSON byte %zu: %s, found '%c'", offset, expected, c);
    QC_FAIL(s->err, QC_ERR_INPUT, "JSON byte %zu: %s, found byte 0x%02x", offset, expected, c);
}

static qc_status fail_at(const scanner *s, const char *at, const char *what)
{
    QC_FAIL(s->err, QC_ERR_INPUT, "JSON byte %zu: %s", (size_t)(at - s->text), what);
}

static void skip_space(scanner *s)
{
    while (s->p < s->end && (*s->p == ' ' || *s->p == '\n' || *s->p == '\r' || *s->p == '\t'))
        s->p++;
}

/* Scans one UTF-8 sequence of two to four bytes at s->p: no overlong form, no surrogate, nothing
 * beyond U+10FFFF (RFC 3629). */
static qc_status scan_utf8(scanner *s)
{
    const unsigned char *u = (const unsigned char *)s->p;
    size_t left = (size_t)(s->end - s->p);
    size_t more = 0;
    unsigned lo = 0x80;
    unsigned hi = 0xbf;
    if (u[0] >= 0xc2 && u[0] <= 0xdf) {
        more = 1;
    } else if (u[0] >= 0xe0 && u[0] <= 0xef) {
        more = 2;
        if (u[0] == 0xe0)
            lo = 0xa0;
        else if (u[0] == 0xed)
            hi = 0x9f;
    } else if (u[0] >= 0xf0 && u[0] <= 0xf4) {
        more = 3;
        if (u[0] == 0xf0)
            lo = 0x90;
        else if (u[0] == 0xf4)
            hi = 0x8f;
    }
    if (more == 0 || left <= more || u[1] < lo || u[1] > hi)
        return fail_at(s, s->p, "text is not valid UTF-8");
    for (size_t i = 2; i <= more; i++) {
        if (u[i] < 0x80 || u[i] > 0xbf)
            return fail_at(s, s->p, "text is not valid UTF-8");
    }
    s->p += more + 1;
    return QC_OK;
}

static int hex_digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

/* Value of the four hex digits at p, or UINT32_MAX. */
static uint32_t hex4(const char *p, const char *end)
{
    uint32_t v = 0;
    if (end - p < 4)
        return UINT32_MAX;
    for (int i = 0; i < 4; i++) {
        int d = hex_digit(p[i]);
        if (d < 0)
            return UINT32_MAX;
        v = v << 4 | (uint32_t)d;
    }
    return v;
}

/* s->p is at the backslash. */
static qc_status scan_escape(scanner *s)
{
    const char *at = s->p;
    if (s->end - at < 2)
        return fail_found(s, s->end, "the rest of an escape was expected");
    if (at[1] != 'u') {
        if (at[1] == '\0' || !strchr("\"\\/bfnrt", at[1]))
            return fail_found(s, at + 1, "an escape was expected");
        s->p += 2;
        return QC_OK;
    }
    uint32_t v = hex4(at + 2, s->end);
    if (v == UINT32_MAX)
        return fail_at(s, at, "\\u is not followed by four hexadecimal digits");
    if (v == 0)
        return fail_at(s, at, "\\u0000 is not accepted in a string");
    s->p += 6;
    if (v < 0xd800 || v > 0xdfff)
        return QC_OK;
    if (v <= 0xdbff && s->end - s->p >= 6 && s->p[0] == '\\' && s->p[1] == 'u') {
        uint32_t low = hex4(s->p + 2, s->end);
        if (low >= 0xdc00 && low <= 0xdfff) {
            s->p += 6;
            return QC_OK;
        }
    }
    return fail_at(s, at, "half of a surrogate pair without the other");
}

/* s->p is at the opening quote; afterwards it is behind the closing one. */
static qc_status scan_string_token(scanner *s, scan_string *out)
{
    const char *open = s->p++;
    out->p = s->p;
    out->escaped = 0;
    for (;;) {
        /* A run of plain ASCII, which is nearly all of most texts. */
        while (s->p < s->end && (unsigned char)*s->p >= 0x20 && (unsigned char)*s->p < 0x80 &&
               *s->p != '"' && *s->p != '\\')
            s->p++;
        if (s->p >= s->end)
            return fail_at(s, open, "a string begins here and does not end");
        if (*s->p == '"')
            break;
        if (*s->p == '\\') {
            out->escaped = 1;
            QC_TRY(scan_escape(s));
        } else if ((unsigned char)*s->p < 0x20) {
            return fail_found(s, s->p, "no control character may stand in a string");
        } else {
            QC_TRY(scan_utf8(s));
        }
    }
    out->len = (size_t)(s->p - out->p);
    s->p++;
    return QC_OK;
}

static size_t put_utf8(char *dst, uint32_t v)
{
    if (v < 0x80) {
        dst[0] = (char)v;
        return 1;
    }
    if (v < 0x800) {
        dst[0] = (char)(0xc0 | v >> 6);
        dst[1] = (char)(0x80 | (v & 0x3f));
        return 2;
    }
    if (v < 0x10000) {
        dst[0] = (char)(0xe0 | v >> 12);
        dst[1] = (char)(0x80 | (v >> 6 & 0x3f));
        dst[2] = (char)(0x80 | (v & 0x3f));
        return 3;
    }
    dst[0] = (char)(0xf0 | v >> 18);
    dst[1] = (char)(0x80 | (v >> 12 & 0x3f));
    dst[2] = (char)(0x80 | (v >> 6 & 0x3f));
    dst[3] = (char)(0x80 | (v & 0x3f));
    return 4;
}

/* Unescapes a string that the scanner has passed. dst needs at most len bytes. */
static size_t unescape(char *dst, const char *p, size_t len)
{
    static const char from[] = "bfnrt";
    static const char to[] = "\b\f\n\r\t";
    const char *end = p + len;
    size_t n = 0;
    while (p < end) {
        if (*p != '\\') {
            dst[n++] = *p++;
            continue;
        }
        if (p[1] != 'u') {
            const char *hit = strchr(from, p[1]);
            dst[n++] = hit ? to[hit - from] : p[1];
            p += 2;
            continue;
        }
        uint32_t v = hex4(p + 2, end);
        p += 6;
        if (v >= 0xd800 && v <= 0xdbff) {
            v = 0x10000 + ((v & 0x3ff) << 10) + (hex4(p + 2, end) & 0x3ff);
            p += 6;
        }
        n += put_utf8(dst + n, v);
    }
    return n;
}

static qc_status push_key(scanner *s, const scan_string *str)
{
    if (s->key_count == s->key_cap) {
        size_t cap = s->key_cap ? s->key_cap * 2 : 64;
        void *p = s->keys;
        QC_TRY(qc_realloc_array(&p, cap, sizeof *s->keys, s->err));
        s->keys = p;
        s->key_cap = cap;
    }
    scan_key *k = &s->keys[s->key_count];
    k->p = str->p;
    k->len = str->len;
    k->offset = (size_t)(str->p - 1 - s->text);
    if (str->escaped) {
        void *p = NULL;
        QC_TRY(qc_arena_alloc(&s->arena, &p, str->len, 1, s->err));
        k->len = unescape(p, str->p, str->len);
        k->p = p;
    }
    s->key_count++;
    return QC_OK;
}

static int compare_text(const scan_key *a, const scan_key *b)
{
    size_t n = qc_min_size(a->len, b->len);
    int c = memcmp(a->p, b->p, n);
    if (c != 0)
        return c;
    return (a->len > b->len) - (a->len < b->len);
}

static int compare_keys(const void *va, const void *vb)
{
    const scan_key *a = va;
    const scan_key *b = vb;
    int c = compare_text(a, b);
    return c != 0 ? c : (a->offset > b->offset) - (a->offset < b->offset);
}

/* Ends the object whose keys begin at `base` on the stack: looks for equal keys and drops them
 * all. */
static qc_status close_object(scanner *s, size_t base)
{
    size_t count = s->key_count - base;
    scan_key *k = s->keys + base;
    int ascending = 1;
    for (size_t i = 1; i < count && ascending; i++)
        ascending = compare_text(&k[i - 1], &k[i]) < 0;
    s->key_count = base;
    if (ascending)
        return QC_OK;
    qsort(k, count, sizeof *k, compare_keys);
    for (size_t i = 1; i < count; i++) {
        if (compare_text(&k[i - 1], &k[i]) == 0) {
            size_t shown = k[i].len < KEY_SHOWN_BYTES ? k[i].len : KEY_SHOWN_BYTES;
            QC_FAIL(s->err, QC_ERR_INPUT,
                    "JSON byte %zu: key '%.*s' appears a second time in one object (first at "
                    "byte %zu)",
                    k[i].offset, (int)shown, k[i].p, k[i - 1].offset);
        }
    }
    return QC_OK;
}

static qc_status push_number(scanner *s, number_form form)
{
    if (s->number_count == s->number_cap) {
        size_t cap = s->number_cap ? s->number_cap * 2 : 256;
        void *p = s->numbers;
        QC_TRY(qc_realloc_array(&p, cap, 1, s->err));
        s->numbers = p;
        s->number_cap = cap;
    }
    s->numbers[s->number_count++] = (unsigned char)form;
    return QC_OK;
}

static int is_digit(const scanner *s)
{
    return s->p < s->end && *s->p >= '0' && *s->p <= '9';
}

static void skip_digits(scanner *s)
{
    while (is_digit(s))
        s->p++;
}

static qc_status check_number(const scanner *s, const char *start, int integer)
{
    size_t len = (size_t)(s->p - start);
    if (len > NUMBER_MAX_BYTES)
        return fail_at(s, start, "a number of more than 63 characters");
    if (s->flags & QC_JSON_INTEGERS) {
        uint64_t v = 0;
        if (!integer)
            return fail_at(s, start,
                           "a number with a fraction or exponent where only integers "
                           "are accepted");
        for (const char *p = start + (*start == '-'); p < s->p && v <= INTEGER_MAX; p++)
            v = v * 10 + (uint64_t)(*p - '0');
        if (v > INTEGER_MAX)
            return fail_at(s, start, "an integer beyond 2^53 - 1");
    } else if (!integer) {
        char buf[NUMBER_MAX_BYTES + 1];
        memcpy(buf, start, len);
        buf[len] = '\0';
        if (!isfinite(strtod(buf, NULL)))
            return fail_at(s, start, "a number beyond the range of a double");
    }
    return QC_OK;
}

static qc_status scan_number(scanner *s)
{
    const char *start = s->p;
    int integer = 1;
    if (*s->p == '-')
        s->p++;
    if (!is_digit(s))
        return fail_found(s, s->p, "a digit was expected");
    if (*s->p == '0')
        s->p++;
    else
        skip_digits(s);
    if (s->p < s->end && *s->p == '.') {
        integer = 0;
        s->p++;
        if (!is_digit(s))
            return fail_found(s, s->p, "a digit was expected after the decimal point");
        skip_digits(s);
    }
    if (s->p < s->end && (*s->p == 'e' || *s->p == 'E')) {
        integer = 0;
        s->p++;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-'))
            s->p++;
        if (!is_digit(s))
            return fail_found(s, s->p, "a digit was expected in the exponent");
        skip_digits(s);
    }
    QC_TRY(check_number(s, start, integer));
    return push_number(s, integer && *start != '-' ? NUMBER_DIGITS : NUMBER_OTHER);
}

static int at_word(const scanner *s, const char *word)
{
    size_t n = strlen(word);
    return (size_t)(s->end - s->p) >= n && memcmp(s->p, word, n) == 0;
}

static qc_status scan_word(scanner *s, const char *word)
{
    if (!at_word(s, word))
        return fail_found(s, s->p, "a JSON value was expected");
    s->p += strlen(word);
    return QC_OK;
}

/* Scans NaN and the like; *found says whether one is here. cJSON does not know them, so it gets a
 * copy of the text with 0 and spaces in their place. */
static qc_status scan_constant(scanner *s, int *found)
{
    static const struct {
        const char *word;
        number_form form;
    } constants[] = {
        {"NaN", NUMBER_NAN}, {"Infinity", NUMBER_INF}, {"-Infinity", NUMBER_MINUS_INF}};
    *found = 0;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        if (!at_word(s, constants[i].word))
            continue;
        size_t n = strlen(constants[i].word);
        if (!s->patched) {
            void *p = NULL;
            QC_TRY(qc_malloc(&p, (size_t)(s->end - s->text), s->err));
            memcpy(p, s->text, (size_t)(s->end - s->text));
            s->patched = p;
        }
        char *at = s->patched + (s->p - s->text);
        memset(at, ' ', n);
        *at = '0';
        s->p += n;
        *found = 1;
        return push_number(s, constants[i].form);
    }
    return QC_OK;
}

static qc_status scan_value(scanner *s);

static qc_status enter(scanner *s)
{
    if (s->depth == DEPTH_MAX)
        return fail_at(s, s->p, "arrays and objects are nested more than 64 deep");
    s->depth++;
    s->p++;
    skip_space(s);
    return QC_OK;
}

static qc_status scan_object(scanner *s)
{
    size_t base = s->key_count;
    QC_TRY(enter(s));
    if (s->p < s->end && *s->p == '}') {
        s->p++;
        s->depth--;
        return QC_OK;
    }
    for (;;) {
        scan_string key = {0};
        if (s->p >= s->end || *s->p != '"')
            return fail_found(s, s->p, "a key in quotes was expected");
        QC_TRY(scan_string_token(s, &key));
        QC_TRY(push_key(s, &key));
        skip_space(s);
        if (s->p >= s->end || *s->p != ':')
            return fail_found(s, s->p, "':' was expected after a key");
        s->p++;
        QC_TRY(scan_value(s));
        if (s->p < s->end && *s->p == '}')
            break;
        if (s->p >= s->end || *s->p != ',')
            return fail_found(s, s->p, "',' or '}' was expected");
        s->p++;
        skip_space(s);
    }
    s->p++;
    s->depth--;
    return close_object(s, base);
}

static qc_status scan_array(scanner *s)
{
    QC_TRY(enter(s));
    if (s->p < s->end && *s->p == ']') {
        s->p++;
        s->depth--;
        return QC_OK;
    }
    for (;;) {
        QC_TRY(scan_value(s));
        if (s->p < s->end && *s->p == ']')
            break;
        if (s->p >= s->end || *s->p != ',')
            return fail_found(s, s->p, "',' or ']' was expected");
        s->p++;
    }
    s->p++;
    s->depth--;
    return QC_OK;
}

/* Scans one value with the white space around it. Recursion ends at DEPTH_MAX. */
static qc_status scan_value(scanner *s)
{
    scan_string ignored = {0};
    int found = 0;
    skip_space(s);
    if (s->p >= s->end)
        return fail_found(s, s->p, "a JSON value was expected");
    if (s->values_left-- == 0)
        return fail_at(s, s->p, "more values than a text of this length may hold");
    switch (*s->p) {
    case '{':
        QC_TRY(scan_object(s));
        break;
    case '[':
        QC_TRY(scan_array(s));
        break;
    case '"':
        QC_TRY(scan_string_token(s, &ignored));
        break;
    case 't':
        QC_TRY(scan_word(s, "true"));
        break;
    case 'f':
        QC_TRY(scan_word(s, "false"));
        break;
    case 'n':
        QC_TRY(scan_word(s, "null"));
        break;
    default:
        if (s->flags & QC_JSON_PYTHON)
            QC_TRY(scan_constant(s, &found));
        if (found)
            break;
        if (*s->p != '-' && !is_digit(s))
            return fail_found(s, s->p, "a JSON value was expected");
        QC_TRY(scan_number(s));
        break;
    }
    skip_space(s);
    return QC_OK;
}

static qc_status scan_document(scanner *s)
{
    if (s->end - s->p >= 3 && memcmp(s->p, "\xef\xbb\xbf", 3) == 0)
        return fail_at(s, s->p, "a byte order mark is not accepted");
    QC_TRY(scan_value(s));
    if (s->p != s->end)
        return fail_found(s, s->p, "the end of the text was expected");
    return QC_OK;
}

/* cJSON keeps only the double of a number. This puts into its deprecated valueint whether the
 * number was written as digits alone. Children come in document order, so the n-th number is the
 * scanner's n-th. */
static void mark_numbers(cJSON *n, const unsigned char *numbers, size_t *next)
{
    for (; n; n = n->next) {
        if ((n->type & 0xff) == cJSON_Number) {
            number_form form = (number_form)numbers[(*next)++];
            n->valueint = form == NUMBER_DIGITS;
            if (form == NUMBER_NAN)
                n->valuedouble = (double)NAN;
            else if (form == NUMBER_INF || form == NUMBER_MINUS_INF)
                n->valuedouble = form == NUMBER_INF ? HUGE_VAL : -HUGE_VAL;
        }
        mark_numbers(n->child, numbers, next);
    }
}

qc_status qc_json_parse(qc_json **out, const char *text, size_t len, unsigned flags, qc_error *err)
{
    scanner s = {.text = text, .p = text, .end = text + len, .flags = flags, .err = err};
    qc_status st = QC_OK;
    void *doc = NULL;
    *out = NULL;
    s.values_left = VALUES_FREE + (uint64_t)len / BYTES_PER_VALUE;
    qc_arena_init(&s.arena);
    (void)pthread_once(&hooks_once, install_hooks);

    QC_TRY_GOTO(st, done, scan_document(&s));
    QC_TRY_GOTO(st, done, qc_calloc(&doc, 1, sizeof **out, err));
    *out = doc;
    (*out)->root = cJSON_ParseWithLength(s.patched ? s.patched : text, len);
    if (!(*out)->root) {
        qc_json_destroy(*out);
        *out = NULL;
        st = qc_error_set(err, QC_ERR_NOMEM, __FILE__, __LINE__,
                          "out of memory: tree of a JSON text of %zu bytes", len);
        goto done;
    }
    size_t next = 0;
    mark_numbers((*out)->root, s.numbers, &next);
done:
    qc_free(s.keys);
    qc_free(s.numbers);
    qc_free(s.patched);
    qc_arena_deinit(&s.arena);
    return st;
}

void qc_json_destroy(qc_json *doc)
{
    if (!doc)
        return;
    cJSON_Delete(doc->root);
    qc_free(doc);
}

const qc_json_node *qc_json_root(const qc_json *doc)
{
    return doc->root;
}

qc_json_kind qc_json_kind_of(const qc_json_node *n)
{
    switch (n->type & 0xff) {
    case cJSON_False:
    case cJSON_True:
        return QC_JSON_BOOL;
    case cJSON_Number:
        return QC_JSON_NUMBER;
    case cJSON_String:
        return QC_JSON_STRING;
    case cJSON_Array:
        return QC_JSON_ARRAY;
    case cJSON_Object:
        return QC_JSON_OBJECT;
    default:
        return QC_JSON_NULL;
    }
}

const char *qc_json_kind_name(qc_json_kind k)
{
    static const char *const names[] = {"null", "boolean", "number", "string", "array", "object"};
    return names[k];
}

const qc_json_node *qc_json_first(const qc_json_node *n)
{
    return n->child;
}

const qc_json_node *qc_json_next(const qc_json_node *n)
{
    return n->next;
}

const char *qc_json_key(const qc_json_node *n)
{
    return n->string;
}

const qc_json_node *qc_json_get(const qc_json_node *n, const char *key)
{
    if (!n || qc_json_kind_of(n) != QC_JSON_OBJECT)
        return NULL;
    for (const qc_json_node *m = n->child; m; m = m->next) {
        if (strcmp(m->string, key) == 0)
            return m;
    }
    return NULL;
}

static qc_status expect_kind(const qc_json_node *n, qc_json_kind kind, const char *what,
                             qc_error *err)
{
    if (!n)
        QC_FAIL(err, QC_ERR_INPUT, "%s is missing, a %s was expected", what,
                qc_json_kind_name(kind));
    if (qc_json_kind_of(n) != kind)
        QC_FAIL(err, QC_ERR_INPUT, "%s is of kind %s, a %s was expected", what,
                qc_json_kind_name(qc_json_kind_of(n)), qc_json_kind_name(kind));
    return QC_OK;
}

qc_status qc_json_as_string(const qc_json_node *n, const char *what, const char **out,
                            qc_error *err)
{
    QC_TRY(expect_kind(n, QC_JSON_STRING, what, err));
    *out = n->valuestring;
    return QC_OK;
}

qc_status qc_json_as_u64(const qc_json_node *n, const char *what, uint64_t *out, qc_error *err)
{
    QC_TRY(expect_kind(n, QC_JSON_NUMBER, what, err));
    if (!n->valueint || n->valuedouble > (double)INTEGER_MAX)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s is %.17g, an integer of 0 to 2^53 - 1 written as digits was expected", what,
                n->valuedouble);
    *out = (uint64_t)n->valuedouble;
    return QC_OK;
}

qc_status qc_json_as_double(const qc_json_node *n, const char *what, double *out, qc_error *err)
{
    QC_TRY(expect_kind(n, QC_JSON_NUMBER, what, err));
    if (!isfinite(n->valuedouble))
        QC_FAIL(err, QC_ERR_INPUT, "%s is %g, a finite number was expected", what, n->valuedouble);
    *out = n->valuedouble;
    return QC_OK;
}

qc_status qc_json_as_bool(const qc_json_node *n, const char *what, int *out, qc_error *err)
{
    QC_TRY(expect_kind(n, QC_JSON_BOOL, what, err));
    *out = (n->type & 0xff) == cJSON_True;
    return QC_OK;
}

const char *qc_json_string_or(const qc_json_node *n, const char *dflt)
{
    return n && qc_json_kind_of(n) == QC_JSON_STRING ? n->valuestring : dflt;
}

int qc_json_bool_or(const qc_json_node *n, int dflt)
{
    return n && qc_json_kind_of(n) == QC_JSON_BOOL ? (n->type & 0xff) == cJSON_True : dflt;
}

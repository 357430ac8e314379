/* One pass over the text checks it and builds the tree: grammar, UTF-8, escapes, numbers, depth and
 * duplicate keys. Errors carry the offset.
 *
 * Duplicate keys: when an object closes, its keys are compared with their neighbours, and sorted
 * first if they are not in order. That takes O(n log n), and O(n) where they are. Keys are
 * unescaped before, so "a" and "\u0061" are the same key.
 *
 * What is refused beyond RFC 8259, and why:
 *
 *   numbers of more than 63 characters    no writer of numbers needs more
 *   numbers beyond the range of a double  they would be infinite
 *   "\u0000"                              it would end a text
 *   more values than 2^20 + bytes / 4     a node takes 40 bytes: a hostile text of 100 MB
 *                                         ("0,0,0,...") must not take 4 GB */
#include "formats/json_strict.h"

#include "base/alloc.h"
#include "base/arena.h"
#include "base/text.h"
#include "formats/file_io.h"
#include "formats/foreign_file.h"

#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH_MAX        64u
#define NUMBER_MAX_BYTES 63
#define INTEGER_MAX      9007199254740991u /* 2^53 - 1 */
#define KEY_SHOWN_BYTES  160u              /* of a key in a message */
#define VALUES_FREE      1048576u
#define BYTES_PER_VALUE  4u
#define NODES_AT_ONCE    64u

/* Small, because a text of 100 MB may hold 25 million of them. */
struct qc_json_node {
    qc_json_node *next;
    const char *key; /* NULL outside of objects */
    union {
        qc_json_node *child;
        const char *text;
        double number;
    } is;
    uint32_t key_at, at, end; /* in the text that was parsed */
    uint8_t kind;             /* qc_json_kind */
    uint8_t flag;             /* a boolean's value; whether a number was written as digits alone */
};

struct qc_json {
    qc_arena arena;
    qc_json_node *root;
};

typedef struct {
    const char *text;
    const char *p;
    const char *end;
    unsigned flags;
    unsigned depth;
    uint64_t values_left;
    qc_arena *arena;
    qc_json_node *spare; /* nodes that nobody has taken yet */
    size_t spare_count;
    qc_error *err;
} scanner;

typedef struct {
    const char *p; /* after the opening quote */
    size_t len;
    int escaped;
} scan_string;

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

/* Returns the value of the four hex digits at p, or UINT32_MAX where they are none. */
static uint32_t hex4(const char *p, const char *end)
{
    static const char digits[] = "0123456789abcdef0123456789ABCDEF";
    uint32_t v = 0;
    if (end - p < 4)
        return UINT32_MAX;
    for (int i = 0; i < 4; i++) {
        const char *hit = memchr(digits, p[i], sizeof digits - 1);
        if (!hit)
            return UINT32_MAX;
        v = v << 4 | (uint32_t)((hit - digits) & 15);
    }
    return v;
}

/* Reads the escape at *p, steps over it, and gives the character that it means. */
static qc_status read_escape(const scanner *s, const char **p, uint32_t *c)
{
    static const char letters[] = "\"\\/bfnrt", meant[] = "\"\\/\b\f\n\r\t";
    const char *at = *p;
    if (s->end - at < 2)
        return fail_found(s, s->end, "expected the rest of an escape");
    if (at[1] != 'u') {
        const char *hit = at[1] ? strchr(letters, at[1]) : NULL;
        if (!hit)
            return fail_found(s, at + 1, "expected an escape");
        *c = (unsigned char)meant[hit - letters];
        *p += 2;
        return QC_OK;
    }
    *c = hex4(at + 2, s->end);
    if (*c == UINT32_MAX)
        return fail_at(s, at, "\\u is not followed by four hexadecimal digits");
    if (*c == 0)
        return fail_at(s, at, "\\u0000 is not accepted in a string");
    *p += 6;
    if (*c < 0xd800 || *c > 0xdfff)
        return QC_OK;
    if (*c <= 0xdbff && s->end - *p >= 6 && (*p)[0] == '\\' && (*p)[1] == 'u') {
        uint32_t low = hex4(*p + 2, s->end);
        if (low >= 0xdc00 && low <= 0xdfff) {
            *c = 0x10000 + ((*c & 0x3ff) << 10) + (low & 0x3ff);
            *p += 6;
            return QC_OK;
        }
    }
    return fail_at(s, at, "one half of a surrogate pair stands without the other");
}

/* s->p is at the opening quote; afterwards it is behind the closing one. */
static qc_status scan_string_token(scanner *s, scan_string *out)
{
    const char *open = s->p++;
    out->p = s->p;
    out->escaped = 0;
    for (;;) {
        /* This skips plain ASCII, which is nearly all of most texts. */
        while (s->p < s->end && (unsigned char)*s->p >= 0x20 && (unsigned char)*s->p < 0x80 &&
               *s->p != '"' && *s->p != '\\')
            s->p++;
        if (s->p >= s->end)
            return fail_at(s, open, "a string begins here and does not end");
        if (*s->p == '"')
            break;
        if (*s->p == '\\') {
            uint32_t c = 0;
            out->escaped = 1;
            QC_TRY(read_escape(s, &s->p, &c));
        } else if ((unsigned char)*s->p < 0x20) {
            return fail_found(s, s->p, "no control character may stand in a string");
        } else {
            char bytes[5] = {0}; /* the longest character of UTF-8 and an end */
            uint32_t c = 0;
            size_t left = (size_t)(s->end - s->p);
            memcpy(bytes, s->p, left < sizeof bytes - 1 ? left : sizeof bytes - 1);
            size_t n = qc_text_char(bytes, &c);
            if (n == 0)
                return fail_at(s, s->p, "the text is not valid UTF-8");
            s->p += n;
        }
    }
    out->len = (size_t)(s->p - out->p);
    s->p++;
    return QC_OK;
}

static size_t put_utf8(char *dst, uint32_t c)
{
    static const unsigned char leads[] = {0, 0xc0, 0xe0, 0xf0};
    const unsigned more = c < 0x80 ? 0 : c < 0x800 ? 1 : c < 0x10000 ? 2 : 3; /* bytes to follow */
    dst[0] = (char)(leads[more] | c >> 6 * more);
    for (unsigned i = 1; i <= more; i++)
        dst[i] = (char)(0x80 | (c >> 6 * (more - i) & 0x3f));
    return more + 1;
}

/* Copies a string that the scanner has passed to the arena, unescaped. */
static qc_status keep_string(const scanner *s, const scan_string *from, const char **out)
{
    const char *p = from->p, *end = p + from->len;
    char *text = NULL;
    if (!from->escaped)
        return qc_arena_strndup(s->arena, out, p, from->len, s->err);
    QC_TRY(qc_arena_alloc(s->arena, &text, from->len + 1, 1, s->err));
    *out = text;
    while (p < end) {
        uint32_t c = 0;
        if (*p != '\\') {
            *text++ = *p++;
            continue;
        }
        QC_TRY(read_escape(s, &p, &c));
        text += put_utf8(text, c);
    }
    *text = '\0';
    return QC_OK;
}

static int compare_members(const void *va, const void *vb)
{
    const qc_json_node *a = *(const qc_json_node *const *)va;
    const qc_json_node *b = *(const qc_json_node *const *)vb;
    int c = strcmp(a->key, b->key);
    return c != 0 ? c : (a->key_at > b->key_at) - (a->key_at < b->key_at);
}

/* Looks for equal keys in an object of `count` members. */
static qc_status check_keys(const scanner *s, const qc_json_node *object, size_t count)
{
    const qc_json_node **list = NULL;
    const qc_json_node *n = object->is.child;
    while (n && n->next && strcmp(n->key, n->next->key) < 0)
        n = n->next;
    if (!n || !n->next)
        return QC_OK;
    QC_TRY(qc_malloc(&list, count * sizeof(qc_json_node *), s->err));
    size_t i = 0;
    for (n = object->is.child; n; n = n->next)
        list[i++] = n;
    qsort(list, count, sizeof(qc_json_node *), compare_members);
    for (i = 1; i < count && strcmp(list[i - 1]->key, list[i]->key) != 0;)
        i++;
    qc_status st = QC_OK;
    if (i < count)
        st = QC_ERROR(s->err, QC_ERR_INPUT,
                      "JSON byte %zu: key '%.*s' appears a second time in one object (first at "
                      "byte %zu)",
                      (size_t)list[i]->key_at, KEY_SHOWN_BYTES, list[i]->key,
                      (size_t)list[i - 1]->key_at);
    qc_free(list);
    return st;
}

static int is_digit(const scanner *s)
{
    return s->p < s->end && qc_is_digit(*s->p);
}

static void skip_digits(scanner *s)
{
    while (is_digit(s))
        s->p++;
}

static qc_status keep_number(const scanner *s, const char *start, int integer, qc_json_node *n)
{
    char text[NUMBER_MAX_BYTES + 1];
    size_t len = (size_t)(s->p - start);
    if (len > NUMBER_MAX_BYTES)
        return fail_at(s, start, "a number has more than 63 characters");
    memcpy(text, start, len);
    text[len] = '\0';
    char *point = memchr(text, '.', len);
    if (point)
        *point = *localeconv()->decimal_point; /* which strtod wants */
    n->is.number = strtod(text, NULL);
    n->flag = integer && *start != '-';
    if ((s->flags & QC_JSON_INTEGERS) && !integer)
        return fail_at(s, start,
                       "a number has a fraction or an exponent where only integers are accepted");
    if ((s->flags & QC_JSON_INTEGERS) && fabs(n->is.number) > (double)INTEGER_MAX)
        return fail_at(s, start, "an integer is beyond 2^53 - 1");
    if (!isfinite(n->is.number))
        return fail_at(s, start, "a number is beyond the range of a double");
    return QC_OK;
}

static qc_status scan_number(scanner *s, qc_json_node *n)
{
    const char *start = s->p;
    int integer = 1;
    if (*s->p == '-')
        s->p++;
    if (!is_digit(s))
        return fail_found(s, s->p, "expected a digit");
    if (*s->p == '0')
        s->p++;
    else
        skip_digits(s);
    if (s->p < s->end && *s->p == '.') {
        integer = 0;
        s->p++;
        if (!is_digit(s))
            return fail_found(s, s->p, "expected a digit after the decimal point");
        skip_digits(s);
    }
    if (s->p < s->end && (*s->p == 'e' || *s->p == 'E')) {
        integer = 0;
        s->p++;
        if (s->p < s->end && (*s->p == '+' || *s->p == '-'))
            s->p++;
        if (!is_digit(s))
            return fail_found(s, s->p, "expected a digit in the exponent");
        skip_digits(s);
    }
    return keep_number(s, start, integer, n);
}

/* Takes null, true, false and, for Python, the numbers that JSON does not have. */
static int take_constant(scanner *s, qc_json_node *n)
{
    static const struct {
        const char *word;
        double number;
        int python;
        uint8_t kind, flag;
    } constants[] = {
        {"true", 0, 0, QC_JSON_BOOL, 1},
        {"false", 0, 0, QC_JSON_BOOL, 0},
        {"null", 0, 0, QC_JSON_NULL, 0},
        {"NaN", (double)NAN, 1, QC_JSON_NUMBER, 0},
        {"Infinity", HUGE_VAL, 1, QC_JSON_NUMBER, 0},
        {"-Infinity", -HUGE_VAL, 1, QC_JSON_NUMBER, 0},
    };
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++) {
        const size_t len = strlen(constants[i].word);
        if ((constants[i].python && !(s->flags & QC_JSON_PYTHON)) ||
            (size_t)(s->end - s->p) < len || memcmp(s->p, constants[i].word, len) != 0)
            continue;
        s->p += len;
        n->kind = constants[i].kind;
        n->flag = constants[i].flag;
        n->is.number = constants[i].number;
        return 1;
    }
    return 0;
}

static qc_status scan_value(scanner *s, qc_json_node *n);

/* Scans the members of an object, or the elements of an array, and what closes it. */
static qc_status scan_children(scanner *s, qc_json_node *n, int is_object)
{
    char close = is_object ? '}' : ']';
    qc_json_node **link = &n->is.child;
    size_t count = 0;
    if (s->depth == DEPTH_MAX)
        return fail_at(s, s->p, "arrays and objects are nested more than 64 deep");
    s->depth++;
    do {
        scan_string key = {0};
        qc_json_node *child = NULL;
        s->p++; /* the bracket or a comma */
        skip_space(s);
        if (count == 0 && s->p < s->end && *s->p == close)
            break;
        if (s->spare_count == 0) { /* by the dozen, because the arena aligns them to 16 bytes */
            QC_TRY(qc_arena_alloc(s->arena, &s->spare, NODES_AT_ONCE, sizeof *s->spare, s->err));
            s->spare_count = NODES_AT_ONCE;
        }
        child = s->spare++;
        s->spare_count--;
        if (is_object) {
            if (s->p >= s->end || *s->p != '"')
                return fail_found(s, s->p, "expected a key in quotes");
            child->key_at = (uint32_t)(s->p - s->text);
            QC_TRY(scan_string_token(s, &key));
            QC_TRY(keep_string(s, &key, &child->key));
            skip_space(s);
            if (s->p >= s->end || *s->p != ':')
                return fail_found(s, s->p, "expected ':' after a key");
            s->p++;
        }
        QC_TRY(scan_value(s, child));
        *link = child;
        link = &child->next;
        count++;
        if (s->p >= s->end || (*s->p != close && *s->p != ','))
            return fail_found(s, s->p, is_object ? "expected ',' or '}'" : "expected ',' or ']'");
    } while (*s->p == ',');
    s->p++;
    s->depth--;
    return is_object ? check_keys(s, n, count) : QC_OK;
}

/* Scans one value with the white space around it. Recursion ends at DEPTH_MAX. */
static qc_status scan_value(scanner *s, qc_json_node *n)
{
    scan_string text = {0};
    skip_space(s);
    if (s->p >= s->end)
        return fail_found(s, s->p, "expected a JSON value");
    if (s->values_left-- == 0)
        return fail_at(s, s->p, "there are more values than a text of this length may hold");
    n->at = (uint32_t)(s->p - s->text);
    if (*s->p == '{' || *s->p == '[') {
        n->kind = *s->p == '{' ? QC_JSON_OBJECT : QC_JSON_ARRAY;
        QC_TRY(scan_children(s, n, *s->p == '{'));
    } else if (*s->p == '"') {
        n->kind = QC_JSON_STRING;
        QC_TRY(scan_string_token(s, &text));
        QC_TRY(keep_string(s, &text, &n->is.text));
    } else if (!take_constant(s, n)) {
        n->kind = QC_JSON_NUMBER;
        if (*s->p != '-' && !is_digit(s))
            return fail_found(s, s->p, "expected a JSON value");
        QC_TRY(scan_number(s, n));
    }
    n->end = (uint32_t)(s->p - s->text);
    skip_space(s);
    return QC_OK;
}

qc_status qc_json_parse(qc_json **out, const char *text, size_t len, unsigned flags, qc_error *err)
{
    *out = NULL;
    qc_json *doc = NULL;
    if (len > UINT32_MAX)
        QC_FAIL(err, QC_ERR_INPUT, "the JSON text has %zu bytes; at most %u are read", len,
                UINT32_MAX);
    QC_TRY(qc_calloc(&doc, 1, sizeof *doc, err));
    qc_arena_init(&doc->arena);
    scanner s = {.text = text,
                 .p = text,
                 .end = text + len,
                 .flags = flags,
                 .values_left = VALUES_FREE + (uint64_t)len / BYTES_PER_VALUE,
                 .arena = &doc->arena,
                 .err = err};
    qc_status st = qc_arena_alloc(&doc->arena, &doc->root, 1, sizeof *doc->root, err);
    if (st == QC_OK && len >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0)
        st = fail_at(&s, text, "a byte order mark is not accepted");
    if (st == QC_OK)
        st = scan_value(&s, doc->root);
    if (st == QC_OK && s.p != s.end)
        st = fail_found(&s, s.p, "expected the end of the text");
    if (st == QC_OK)
        *out = doc;
    else
        qc_json_destroy(doc);
    return st;
}

qc_status qc_json_read_file(qc_json **out, const char *path, const char *before, size_t max_bytes,
                            qc_error *err)
{
    qc_strbuf text;
    *out = NULL;
    qc_strbuf_init(&text, max_bytes);
    qc_status st = qc_file_slurp(path, &text, err);
    if (st == QC_OK) {
        st = qc_json_parse(out, text.data ? text.data : "", text.len, 0, err);
        if (st != QC_OK)
            qc_foreign_say(err, before, path, text.data, text.len);
    }
    qc_strbuf_deinit(&text);
    return st;
}

void qc_json_destroy(qc_json *doc)
{
    if (!doc)
        return;
    qc_arena_deinit(&doc->arena);
    qc_free(doc);
}

const qc_json_node *qc_json_root(const qc_json *doc)
{
    return doc->root;
}

qc_json_kind qc_json_kind_of(const qc_json_node *n)
{
    return (qc_json_kind)n->kind;
}

const char *qc_json_kind_name(qc_json_kind k)
{
    static const char *const names[] = {"null", "boolean", "number", "string", "array", "object"};
    return names[k];
}

const qc_json_node *qc_json_first(const qc_json_node *n)
{
    return n->kind == QC_JSON_ARRAY || n->kind == QC_JSON_OBJECT ? n->is.child : NULL;
}

const qc_json_node *qc_json_next(const qc_json_node *n)
{
    return n->next;
}

size_t qc_json_count(const qc_json_node *n)
{
    size_t count = 0;
    for (const qc_json_node *e = qc_json_first(n); e; e = e->next)
        count++;
    return count;
}

const char *qc_json_key(const qc_json_node *n)
{
    return n->key;
}

const qc_json_node *qc_json_get(const qc_json_node *n, const char *key)
{
    if (!n || qc_json_kind_of(n) != QC_JSON_OBJECT)
        return NULL;
    for (const qc_json_node *m = n->is.child; m; m = m->next) {
        if (strcmp(m->key, key) == 0)
            return m;
    }
    return NULL;
}

qc_json_range qc_json_place(const qc_json_node *n)
{
    return (qc_json_range){n->key_at, n->at, n->end};
}

qc_status qc_json_expect(const qc_json_node *n, qc_json_kind kind, const char *what, qc_error *err)
{
    const char *article = kind == QC_JSON_ARRAY || kind == QC_JSON_OBJECT ? "an" : "a";
    if (!n)
        QC_FAIL(err, QC_ERR_INPUT, "%s is missing; expected %s %s", what, article,
                qc_json_kind_name(kind));
    if (qc_json_kind_of(n) != kind)
        QC_FAIL(err, QC_ERR_INPUT, "%s is of kind %s; expected %s %s", what,
                qc_json_kind_name(qc_json_kind_of(n)), article, qc_json_kind_name(kind));
    return QC_OK;
}

qc_status qc_json_as_string(const qc_json_node *n, const char *what, const char **out,
                            qc_error *err)
{
    QC_TRY(qc_json_expect(n, QC_JSON_STRING, what, err));
    *out = n->is.text;
    return QC_OK;
}

qc_status qc_json_as_u64(const qc_json_node *n, const char *what, uint64_t *out, qc_error *err)
{
    QC_TRY(qc_json_expect(n, QC_JSON_NUMBER, what, err));
    if (!n->flag || n->is.number > (double)INTEGER_MAX)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s is %.17g; expected an integer of 0 to 2^53 - 1 written as digits", what,
                n->is.number);
    *out = (uint64_t)n->is.number;
    return QC_OK;
}

qc_status qc_json_as_double(const qc_json_node *n, const char *what, double *out, qc_error *err)
{
    QC_TRY(qc_json_expect(n, QC_JSON_NUMBER, what, err));
    if (!isfinite(n->is.number))
        QC_FAIL(err, QC_ERR_INPUT, "%s is %g; expected a finite number", what, n->is.number);
    *out = n->is.number;
    return QC_OK;
}

qc_status qc_json_as_bool(const qc_json_node *n, const char *what, int *out, qc_error *err)
{
    QC_TRY(qc_json_expect(n, QC_JSON_BOOL, what, err));
    *out = n->flag;
    return QC_OK;
}

const char *qc_json_string_or(const qc_json_node *n, const char *dflt)
{
    return n && qc_json_kind_of(n) == QC_JSON_STRING ? n->is.text : dflt;
}

int qc_json_bool_or(const qc_json_node *n, int dflt)
{
    return n && qc_json_kind_of(n) == QC_JSON_BOOL ? n->flag : dflt;
}

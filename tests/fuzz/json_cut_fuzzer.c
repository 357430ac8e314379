/* A byte that chooses pieces, then any text: cut into the same parts, or refused in the same words,
 * whether it comes whole, byte by byte or in random pieces; and what the strict reader says of
 * these parts it says of the whole. What both accept has the same members, elements and values. */
#include "formats/json_cut.h"

#include "base/random.h"
#include "formats/json_strict.h"
#include "fuzz_check.h"

#include <stdlib.h>
#include <string.h>

#define LIST "rows"

/* ---- Parts ---------------------------------------------------------------------------------- */

typedef struct {
    char letter; /* h, e or t */
    size_t len;
} mark;

/* The first cutting writes the parts down, each behind its mark, the others compare. */
typedef struct {
    qc_strbuf parts;
    int is_written;
    size_t at;
    uint64_t elements;
} parts_log;

static qc_status take(parts_log *log, char letter, const char *text, size_t len, qc_error *err)
{
    mark m;
    memset(&m, 0, sizeof m);
    m.letter = letter;
    m.len = len;
    log->elements += letter == 'e';
    if (!log->is_written) {
        QC_TRY(qc_strbuf_add(&log->parts, &m, sizeof m, err));
        return qc_strbuf_add(&log->parts, text, len, err);
    }
    FUZZ_CHECK(log->parts.len - log->at >= sizeof m);
    FUZZ_CHECK(memcmp(log->parts.data + log->at, &m, sizeof m) == 0);
    log->at += sizeof m;
    FUZZ_CHECK(len == 0 || memcmp(log->parts.data + log->at, text, len) == 0);
    log->at += len;
    return QC_OK;
}

static qc_status take_head(void *ctx, const char *text, size_t len, qc_error *err)
{
    return take(ctx, 'h', text, len, err);
}

static qc_status take_element(void *ctx, const char *text, size_t len, qc_error *err)
{
    return take(ctx, 'e', text, len, err);
}

static qc_status take_tail(void *ctx, const char *text, size_t len, qc_error *err)
{
    return take(ctx, 't', text, len, err);
}

/* The next part, or 0. */
static int next_part(const parts_log *log, size_t *at, mark *m, const char **text)
{
    if (*at == log->parts.len)
        return 0;
    memcpy(m, log->parts.data + *at, sizeof *m);
    *text = log->parts.data + *at + sizeof *m;
    *at += sizeof *m + m->len;
    return 1;
}

/* ---- Cutting -------------------------------------------------------------------------------- */

typedef enum { WHOLE, BYTES, PIECES } cutting;

/* In a block of its own, so that a byte too many is seen. */
static qc_status feed_piece(qc_json_cut *c, const char *bytes, size_t len, qc_error *err)
{
    char *copy = malloc(len ? len : 1);
    FUZZ_CHECK(copy != NULL);
    if (len)
        memcpy(copy, bytes, len);
    qc_status st = qc_json_cut_feed(c, copy, len, err);
    free(copy);
    return st;
}

static qc_status cut(parts_log *log, const char *text, size_t len, cutting how, uint64_t seed,
                     qc_error *err)
{
    qc_json_cut c;
    qc_status st = QC_OK;
    log->at = 0;
    log->elements = 0;
    qc_json_cut_init(&c, &(qc_json_parts){LIST, take_head, take_element, take_tail, log});
    for (size_t at = 0; st == QC_OK && at < len;) {
        size_t left = len - at, n = how == WHOLE ? left : 1;
        if (how == PIECES) {
            /* Short ones and long ones, and now and then none at all. */
            uint64_t most = UINT64_C(1) << qc_random_next(&seed) % 10;
            n = (size_t)(qc_random_next(&seed) % (most + 1));
            n = n < left ? n : left;
        }
        st = feed_piece(&c, text + at, n, err);
        at += n;
        FUZZ_CHECK(c.text.cap <= 2 * at + 256);
        FUZZ_CHECK(c.word.cap <= 256);
    }
    if (st == QC_OK)
        st = qc_json_cut_finish(&c, err);
    FUZZ_CHECK(c.elements == log->elements);
    qc_json_cut_deinit(&c);
    return st;
}

/* ---- The whole ------------------------------------------------------------------------------ */

static int is_container(const qc_json_node *n)
{
    return qc_json_kind_of(n) == QC_JSON_ARRAY || qc_json_kind_of(n) == QC_JSON_OBJECT;
}

static void same_value(const qc_json_node *a, const qc_json_node *b)
{
    double x = 0.0, y = 0.0;
    const char *s = NULL, *t = NULL;
    qc_json_kind kind = qc_json_kind_of(a);
    FUZZ_CHECK(kind == qc_json_kind_of(b));
    if (kind == QC_JSON_BOOL)
        FUZZ_CHECK(qc_json_bool_or(a, 0) == qc_json_bool_or(b, 0));
    if (kind == QC_JSON_NUMBER) {
        FUZZ_CHECK(qc_json_as_double(a, "x", &x, NULL) == QC_OK);
        FUZZ_CHECK(qc_json_as_double(b, "x", &y, NULL) == QC_OK);
        FUZZ_CHECK(memcmp(&x, &y, sizeof x) == 0);
    }
    if (kind == QC_JSON_STRING) {
        FUZZ_CHECK(qc_json_as_string(a, "x", &s, NULL) == QC_OK);
        FUZZ_CHECK(qc_json_as_string(b, "x", &t, NULL) == QC_OK);
        FUZZ_CHECK(strcmp(s, t) == 0);
    }
    if (!is_container(a))
        return;
    a = qc_json_first(a);
    b = qc_json_first(b);
    for (; a && b; a = qc_json_next(a), b = qc_json_next(b)) {
        if (kind == QC_JSON_OBJECT)
            FUZZ_CHECK(strcmp(qc_json_key(a), qc_json_key(b)) == 0);
        same_value(a, b);
    }
    FUZZ_CHECK(!a && !b);
}

static const qc_json_node *first_of(const qc_json_node *n)
{
    return n ? qc_json_first(n) : NULL;
}

/* Member by member: the head's, of which the list is the last and empty; its elements; the tail's.
 * A text without the list is its head. */
static void same_whole(const parts_log *log, const qc_json_node *root)
{
    mark m;
    const char *text = NULL;
    const qc_json_node *member = NULL, *list = NULL, *element = NULL;
    int is_object = 0;
    for (size_t at = 0; next_part(log, &at, &m, &text);) {
        qc_json *doc = NULL;
        FUZZ_CHECK(qc_json_parse(&doc, text, m.len, 0, NULL) == QC_OK);
        const qc_json_node *part = qc_json_root(doc), *n = qc_json_first(part);
        if (m.letter == 'h' && at == log->parts.len) {
            /* A list that was passed over has its name in escapes. */
            list = qc_json_get(root, LIST);
            FUZZ_CHECK(!list || !is_container(list) || memchr(text, '\\', m.len));
            same_value(part, root);
        } else if (m.letter == 'h') {
            FUZZ_CHECK(qc_json_kind_of(part) == QC_JSON_OBJECT && n);
            for (member = first_of(root); qc_json_next(n);
                 n = qc_json_next(n), member = qc_json_next(member)) {
                FUZZ_CHECK(member && strcmp(qc_json_key(n), qc_json_key(member)) == 0);
                same_value(n, member);
            }
            list = member;
            FUZZ_CHECK(list && strcmp(qc_json_key(list), LIST) == 0 &&
                       strcmp(qc_json_key(n), LIST) == 0);
            FUZZ_CHECK(qc_json_kind_of(n) == qc_json_kind_of(list) && !qc_json_first(n));
            is_object = qc_json_kind_of(list) == QC_JSON_OBJECT;
            element = qc_json_first(list);
            member = qc_json_next(list);
        } else if (m.letter == 'e') {
            FUZZ_CHECK(element != NULL);
            if (is_object) {
                FUZZ_CHECK(qc_json_kind_of(part) == QC_JSON_OBJECT && n && !qc_json_next(n));
                FUZZ_CHECK(strcmp(qc_json_key(n), qc_json_key(element)) == 0);
            }
            same_value(is_object ? n : part, element);
            element = qc_json_next(element);
        } else {
            FUZZ_CHECK(!element && qc_json_kind_of(part) == QC_JSON_OBJECT);
            for (; n; n = qc_json_next(n), member = qc_json_next(member)) {
                FUZZ_CHECK(member && strcmp(qc_json_key(n), qc_json_key(member)) == 0);
                same_value(n, member);
            }
            FUZZ_CHECK(!member);
        }
        qc_json_destroy(doc);
    }
}

/* Keys of the top level, or of the list: one of them twice, in different parts? */
static int has_key_twice(const parts_log *log, int of_list)
{
    mark m;
    const char *text = NULL;
    int twice = 0;
    qc_strbuf keys; /* with their NULs */
    qc_strbuf_init(&keys, SIZE_MAX / 2);
    for (size_t at = 0; next_part(log, &at, &m, &text);) {
        qc_json *doc = NULL;
        if ((m.letter == 'e') != of_list)
            continue;
        FUZZ_CHECK(qc_json_parse(&doc, text, m.len, 0, NULL) == QC_OK);
        const qc_json_node *n = qc_json_root(doc);
        n = qc_json_kind_of(n) == QC_JSON_OBJECT ? qc_json_first(n) : NULL;
        for (; n && !twice; n = qc_json_next(n)) {
            const char *key = qc_json_key(n);
            for (size_t k = 0; k < keys.len && !twice; k += strlen(keys.data + k) + 1)
                twice = strcmp(keys.data + k, key) == 0;
            FUZZ_CHECK(qc_strbuf_add(&keys, key, strlen(key) + 1, NULL) == QC_OK);
        }
        qc_json_destroy(doc);
    }
    qc_strbuf_deinit(&keys);
    return twice;
}

/* Does the strict reader take each part? */
static int are_parts_strict(const parts_log *log)
{
    mark m;
    const char *text = NULL;
    for (size_t at = 0; next_part(log, &at, &m, &text);) {
        qc_json *doc = NULL;
        if (qc_json_parse(&doc, text, m.len, 0, NULL) != QC_OK)
            return 0;
        qc_json_destroy(doc);
    }
    return 1;
}

const fuzz_limits fuzz_may_allocate = {1u << 20, 512};

int fuzz_one(const uint8_t *data, size_t size)
{
    const char *text = size ? (const char *)data + 1 : "";
    size_t len = size ? size - 1 : 0;
    uint64_t seed = size ? data[0] : 0;
    parts_log log = {.is_written = 0};
    qc_json *doc = NULL;
    qc_error first = {0}, err = {0};
    qc_strbuf_init(&log.parts, SIZE_MAX / 2);
    qc_status st = cut(&log, text, len, WHOLE, 0, &first);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_INPUT && first.msg[0]));
    log.is_written = 1;
    for (cutting how = BYTES; how <= PIECES; how++) {
        qc_error other = {0};
        FUZZ_CHECK(cut(&log, text, len, how, seed, &other) == st);
        FUZZ_CHECK(log.at == log.parts.len && strcmp(first.msg, other.msg) == 0);
    }
    int is_accepted = st == QC_OK && are_parts_strict(&log);
    if (qc_json_parse(&doc, text, len, 0, &err) == QC_OK) {
        FUZZ_CHECK(is_accepted);
        same_whole(&log, qc_json_root(doc));
    } else if (is_accepted) {
        FUZZ_CHECK(strstr(err.msg, "nested more than 64 deep") ||
                   (strstr(err.msg, "appears a second time") &&
                    (has_key_twice(&log, 0) || has_key_twice(&log, 1))));
    }
    qc_json_destroy(doc);
    qc_strbuf_deinit(&log.parts);
    return 0;
}

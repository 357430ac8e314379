#include "formats/json_rows.h"

#include <inttypes.h>
#include <string.h>

#define EXACT_MAX 9007199254740991u /* 2^53 - 1: JSON readers keep this exactly */

static int is_there(const qc_json_row *r, unsigned when)
{
    return r->when == 0 || (r->when & when) != 0;
}

/* ---- Writing -------------------------------------------------------------------------------- */

void qc_json_put_exact(qc_json_writer *w, const char *key, uint64_t v)
{
    if (v > EXACT_MAX && w->st == QC_OK)
        w->st =
            QC_ERROR(w->err, QC_ERR_RANGE, "%" PRIu64 " is more than JSON numbers hold exactly", v);
    qc_json_put_u64(w, key, v);
}

static void put_value(qc_json_writer *w, const qc_json_row *r, const void *from)
{
    char hex[QC_DIGEST_HEX_BYTES];
    const char *const *text = from;
    const uint64_t *number = from;
    switch (r->kind) {
    case QC_ROW_TEXT:
    case QC_ROW_MAYBE:
    case QC_ROW_WORD:
        qc_json_put_text(w, r->name, *text);
        break;
    case QC_ROW_PATH:
        qc_json_put_path(w, r->name, *text);
        break;
    case QC_ROW_U64:
        qc_json_put_exact(w, r->name, *number);
        break;
    case QC_ROW_SIZE:
        qc_json_put_u64(w, r->name, *(const size_t *)from);
        break;
    case QC_ROW_U32:
        qc_json_put_u64(w, r->name, *(const uint32_t *)from);
        break;
    case QC_ROW_BOOL:
        qc_json_put_bool(w, r->name, *(const int *)from);
        break;
    case QC_ROW_DOUBLE:
        qc_json_put_double(w, r->name, *(const double *)from);
        break;
    case QC_ROW_DIGEST:
        qc_digest_hex(from, hex);
        qc_json_put_text(w, r->name, hex);
        break;
    case QC_ROW_DTYPE:
        qc_json_put_text(w, r->name, qc_dtype_name(*(const qc_dtype *)from));
        break;
    }
}

void qc_json_put_rows(qc_json_writer *w, const qc_json_row *rows, unsigned when, const void *from)
{
    for (const qc_json_row *r = rows; r->name; r++)
        if (is_there(r, when))
            put_value(w, r, (const unsigned char *)from + r->offset);
}

void qc_json_put_object(qc_json_writer *w, const char *key, const qc_json_row *rows, unsigned when,
                        const void *from)
{
    qc_json_begin_object(w, key);
    qc_json_put_rows(w, rows, when, from);
    qc_json_end(w);
}

void qc_json_put_row(qc_json_writer *w, const char *key, const qc_json_row *rows, unsigned when,
                     const void *from)
{
    qc_json_begin_row(w, key);
    qc_json_put_rows(w, rows, when, from);
    qc_json_end(w);
}

void qc_json_put_list(qc_json_writer *w, const char *key, const qc_json_row *rows, unsigned when,
                      const void *from, size_t count, size_t bytes_each)
{
    qc_json_begin_list(w, key);
    for (size_t i = 0; i < count; i++)
        qc_json_put_row(w, NULL, rows, when, (const unsigned char *)from + i * bytes_each);
    qc_json_end(w);
}

/* ---- Reading -------------------------------------------------------------------------------- */

qc_status qc_json_enter(qc_json_walk *w, qc_arena *arena, const qc_json_node *n, qc_json_kind kind,
                        const char *what, qc_error *err)
{
    if (qc_json_kind_of(n) != kind)
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected an %s, found a %s", what, qc_json_kind_name(kind),
                qc_json_kind_name(qc_json_kind_of(n)));
    *w = (qc_json_walk){.in = n, .next = qc_json_first(n), .arena = arena};
    return QC_OK;
}

int qc_json_is_next(const qc_json_walk *w, const char *key)
{
    return w->next && strcmp(qc_json_key(w->next), key) == 0;
}

qc_status qc_json_take(qc_json_walk *w, const char *key, const qc_json_node **out, qc_error *err)
{
    if (!w->next)
        QC_FAIL(err, QC_ERR_INPUT, "member '%s' is missing", key);
    if (!qc_json_is_next(w, key))
        QC_FAIL(err, QC_ERR_INPUT, "expected member '%s', found '%s'", key, qc_json_key(w->next));
    *out = w->next;
    w->next = qc_json_next(w->next);
    return QC_OK;
}

qc_status qc_json_take_in(qc_json_walk *w, const char *key, qc_json_kind kind, qc_json_walk *inner,
                          qc_error *err)
{
    const qc_json_node *n = NULL;
    QC_TRY(qc_json_take(w, key, &n, err));
    return qc_json_enter(inner, w->arena, n, kind, key, err);
}

qc_status qc_json_leave(const qc_json_walk *w, qc_error *err)
{
    if (w->next)
        QC_FAIL(err, QC_ERR_INPUT, "member '%s' is not known here", qc_json_key(w->next));
    return QC_OK;
}

static qc_status take_value(const qc_json_row *r, qc_arena *arena, const qc_json_node *n, void *to,
                            qc_error *err)
{
    const char *s = NULL;
    uint64_t v = 0;
    if (r->kind == QC_ROW_MAYBE && qc_json_kind_of(n) == QC_JSON_NULL) {
        *(const char **)to = NULL;
        return QC_OK;
    }
    switch ((int)r->kind) {
    case QC_ROW_U64:
        return qc_json_as_u64(n, r->name, to, err);
    case QC_ROW_U32:
        QC_TRY(qc_json_as_u64(n, r->name, &v, err));
        if (v > UINT32_MAX)
            QC_FAIL(err, QC_ERR_INPUT, "%s: there is no number %" PRIu64, r->name, v);
        *(uint32_t *)to = (uint32_t)v;
        return QC_OK;
    case QC_ROW_BOOL:
        return qc_json_as_bool(n, r->name, to, err);
    case QC_ROW_DOUBLE:
        return qc_json_as_double(n, r->name, to, err);
    }
    QC_TRY(qc_json_as_string(n, r->name, &s, err));
    switch ((int)r->kind) {
    case QC_ROW_DIGEST:
        if (qc_digest_from_hex(to, s) != 0)
            QC_FAIL(err, QC_ERR_INPUT, "%s: expected 32 lower-case hex digits, found '%s'", r->name,
                    s);
        return QC_OK;
    case QC_ROW_DTYPE:
        if (qc_dtype_from_name(s, strlen(s), to) != 0)
            QC_FAIL(err, QC_ERR_INPUT, "%s: '%s' is not known", r->name, s);
        return QC_OK;
    case QC_ROW_WORD:
        for (const char *const *word = r->words; *word; word++) {
            if (strcmp(*word, s) == 0) {
                *(const char **)to = *word;
                return QC_OK;
            }
        }
        QC_FAIL(err, QC_ERR_INPUT, "%s '%s' is not known", r->name, s);
    default:
        return qc_arena_strdup(arena, to, s, err);
    }
}

qc_status qc_json_take_rows(qc_json_walk *w, const qc_json_row *rows, unsigned when, void *to,
                            qc_error *err)
{
    for (const qc_json_row *r = rows; r->name; r++) {
        const qc_json_node *n = NULL;
        if (!is_there(r, when))
            continue;
        QC_TRY(qc_json_take(w, r->name, &n, err));
        QC_TRY(take_value(r, w->arena, n, (unsigned char *)to + r->offset, err));
    }
    return QC_OK;
}

qc_status qc_json_take_list(qc_json_walk *w, const char *key, const qc_json_row *rows,
                            unsigned when, void *out, size_t *count, size_t bytes_each,
                            qc_error *err)
{
    qc_json_walk list = {0}, row;
    unsigned char *at = NULL;
    QC_TRY(qc_json_take_in(w, key, QC_JSON_ARRAY, &list, err));
    *count = qc_json_count(list.in);
    QC_TRY(qc_arena_alloc(w->arena, &at, *count, bytes_each, err));
    memcpy(out, &at, sizeof at);
    for (size_t i = 0; i < *count; i++, at += bytes_each, list.next = qc_json_next(list.next)) {
        qc_status st = qc_json_enter(&row, w->arena, list.next, QC_JSON_OBJECT, "row", err);
        if (st == QC_OK)
            st = qc_json_take_rows(&row, rows, when, at, err);
        if (st == QC_OK)
            st = qc_json_leave(&row, err);
        if (st != QC_OK)
            qc_error_prefix(err, "%s[%zu]", key, i);
        QC_TRY(st);
    }
    return QC_OK;
}

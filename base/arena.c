#include "base/arena.h"

#include "base/alloc.h"
#include "base/checked.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define ARENA_ALIGN       16u
#define FIRST_ELEMENTS    64u /* of an array that grows; a power of two */
#define ARENA_BLOCK_BYTES 65536u

struct qc_arena_block {
    qc_arena_block *next;
    size_t bytes; /* keeps the payload 16-byte aligned */
    _Alignas(16) unsigned char payload[];
};

void qc_arena_init(qc_arena *a)
{
    memset(a, 0, sizeof *a);
}

void qc_arena_deinit(qc_arena *a)
{
    if (!a)
        return;
    qc_arena_block *b = a->head;
    while (b) {
        qc_arena_block *next = b->next;
        qc_free(b);
        b = next;
    }
    qc_arena_init(a);
}

/* What is large gets a block of its own behind the head, so that the rest of the head stays in
 * use. */
static qc_status add_block(qc_arena *a, size_t payload, qc_arena_block **out, qc_error *err)
{
    size_t total = 0;
    void *p = NULL;
    if (qc_add_size(payload, sizeof(qc_arena_block), &total))
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu bytes", payload);
    QC_TRY(qc_malloc_aligned(&p, ARENA_ALIGN, total, err));
    *out = p;
    (*out)->bytes = payload;
    if (a->head && payload > ARENA_BLOCK_BYTES) {
        (*out)->next = a->head->next;
        a->head->next = *out;
        return QC_OK;
    }
    (*out)->next = a->head;
    a->head = *out;
    a->head_bytes = payload;
    a->used_bytes = payload > ARENA_BLOCK_BYTES ? payload : 0;
    return QC_OK;
}

static qc_status take(qc_arena *a, void **out, size_t bytes, size_t align, qc_error *err)
{
    size_t at = (a->used_bytes + align - 1) & ~(align - 1); /* a block is far from SIZE_MAX */
    if (bytes > ARENA_BLOCK_BYTES) {
        qc_arena_block *b = NULL;
        QC_TRY(add_block(a, bytes, &b, err));
        *out = b->payload;
    } else {
        qc_arena_block *b = a->head;
        if (!b || at > a->head_bytes || a->head_bytes - at < bytes) {
            QC_TRY(add_block(a, ARENA_BLOCK_BYTES, &b, err));
            at = 0;
        }
        *out = b->payload + at;
        a->used_bytes = at + bytes;
    }
    memset(*out, 0, bytes);
    return QC_OK;
}

qc_status(qc_arena_alloc)(qc_arena *a, void *out, size_t count, size_t bytes_each, qc_error *err)
{
    size_t bytes = 0;
    void *p = NULL;
    memcpy(out, &p, sizeof p);
    if (qc_mul_size(count, bytes_each, &bytes) || qc_add_size(bytes, ARENA_ALIGN - 1, &bytes))
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu x %zu bytes", count,
                bytes_each);
    QC_TRY(take(a, &p, bytes & ~(size_t)(ARENA_ALIGN - 1), ARENA_ALIGN, err));
    memcpy(out, &p, sizeof p);
    return QC_OK;
}

qc_status(qc_arena_more)(qc_arena *a, void *array, size_t count, size_t bytes_each, qc_error *err)
{
    void *old = NULL, *p = NULL;
    if (count % FIRST_ELEMENTS != 0 || (count & (count - 1)) != 0)
        return QC_OK;
    memcpy(&old, array, sizeof old);
    QC_TRY((qc_arena_alloc)(a, &p, count ? 2 * count : FIRST_ELEMENTS, bytes_each, err));
    if (count)
        memcpy(p, old, count * bytes_each);
    memcpy(array, &p, sizeof p);
    return QC_OK;
}

qc_status qc_arena_strndup(qc_arena *a, const char **out, const char *s, size_t len, qc_error *err)
{
    void *p = NULL;
    size_t bytes = 0;
    *out = NULL;
    if (qc_add_size(len, 1, &bytes))
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu bytes", len);
    QC_TRY(take(a, &p, bytes, 1, err)); /* texts need no alignment: most of them are names */
    memcpy(p, s, len);
    *out = p;
    return QC_OK;
}

qc_status qc_arena_strdup(qc_arena *a, const char **out, const char *s, qc_error *err)
{
    return qc_arena_strndup(a, out, s, strlen(s), err);
}

qc_status qc_arena_printf(qc_arena *a, const char **out, qc_error *err, const char *fmt, ...)
{
    va_list ap;
    *out = NULL;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n < 0)
        QC_FAIL(err, QC_ERR_INTERNAL, "a text could not be formatted");
    void *p = NULL;
    QC_TRY(qc_arena_alloc(a, &p, (size_t)n + 1, 1, err));
    va_start(ap, fmt);
    (void)vsnprintf(p, (size_t)n + 1, fmt, ap);
    va_end(ap);
    *out = p;
    return QC_OK;
}

#include "base/alloc.h"

#include "base/checked.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#define BUFFER_ALIGN 64u

static atomic_uint_fast64_t alloc_tried;
static atomic_uint_fast64_t alloc_fail_from;
static atomic_int alloc_fail_persistent;

void qc_alloc_fail_at(uint64_t n, int persistent)
{
    atomic_store(&alloc_tried, 0);
    atomic_store(&alloc_fail_persistent, persistent);
    atomic_store(&alloc_fail_from, n);
}

uint64_t qc_alloc_count(void)
{
    return atomic_load(&alloc_tried);
}

static int must_fail(void)
{
    uint64_t mine = atomic_fetch_add(&alloc_tried, 1) + 1;
    uint64_t from = atomic_load(&alloc_fail_from);
    if (from == 0)
        return 0;
    return mine == from || (mine > from && atomic_load(&alloc_fail_persistent));
}

void *qc_hook_malloc(size_t bytes)
{
    return must_fail() ? NULL : malloc(bytes ? bytes : 1);
}

void qc_hook_free(void *p)
{
    free(p);
}

/* The pointer at out may be of any type, so it is copied as bytes. */
static void store(void *out, const void *p)
{
    memcpy(out, &p, sizeof p);
}

qc_status(qc_malloc)(void *out, size_t bytes, qc_error *err)
{
    void *p = qc_hook_malloc(bytes);
    store(out, p);
    if (!p)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu bytes", bytes);
    return QC_OK;
}

qc_status(qc_calloc)(void *out, size_t count, size_t bytes_each, qc_error *err)
{
    size_t bytes = 0;
    void *p = NULL;
    if (!qc_mul_size(count, bytes_each, &bytes) && !must_fail())
        p = calloc(1, bytes ? bytes : 1);
    store(out, p);
    if (!p)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu x %zu bytes", count,
                bytes_each);
    return QC_OK;
}

qc_status(qc_realloc_array)(void *inout, size_t count, size_t bytes_each, qc_error *err)
{
    size_t bytes = 0;
    void *old = NULL, *p = NULL;
    memcpy(&old, inout, sizeof old);
    if (!qc_mul_size(count, bytes_each, &bytes) && !must_fail())
        p = realloc(old, bytes ? bytes : 1);
    if (!p)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu x %zu bytes", count,
                bytes_each);
    store(inout, p);
    return QC_OK;
}

qc_status(qc_malloc_aligned)(void *out, size_t alignment, size_t bytes, qc_error *err)
{
    void *p = NULL;
    if (must_fail() || posix_memalign(&p, alignment, bytes ? bytes : 1) != 0)
        p = NULL;
    store(out, p);
    if (!p)
        QC_FAIL(err, QC_ERR_NOMEM, "there is not enough memory for %zu bytes", bytes);
    return QC_OK;
}

qc_status qc_buffer_room(qc_buffer *b, uint64_t count, uint64_t bytes_each, qc_error *err)
{
    size_t want = 0;
    uint64_t bytes = 0;
    if (qc_mul_u64(count, bytes_each, &bytes) || qc_u64_to_size(bytes, &want))
        QC_FAIL(err, QC_ERR_NOMEM, "a row of a tensor is too large for this machine's memory");
    if (b->data && want <= b->room)
        return QC_OK;
    qc_free(b->data);
    *b = (qc_buffer){0};
    QC_TRY((qc_malloc_aligned)(&b->data, BUFFER_ALIGN, want, err));
    b->room = want;
    return QC_OK;
}

qc_status qc_strdup(char **out, const char *s, qc_error *err)
{
    size_t bytes = strlen(s) + 1;
    void *p = NULL;
    *out = NULL;
    QC_TRY(qc_malloc(&p, bytes, err));
    memcpy(p, s, bytes);
    *out = p;
    return QC_OK;
}

void qc_free(void *p)
{
    free(p);
}

void qc_alloc_trim(void)
{
#ifdef __GLIBC__
    (void)malloc_trim(0);
#endif
}

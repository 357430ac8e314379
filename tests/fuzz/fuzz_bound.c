/* Counts what a fuzz target holds on the heap; see fuzz_check.h. Linked with --wrap of malloc and
 * the like, so it sees calls from what is linked statically: qconv, and through qconv's hooks
 * zstd. */
#define _GNU_SOURCE
#include "fuzz_check.h"

#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

/* The names are the linker's. */
void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes_each);
void *__real_realloc(void *p, size_t bytes);
int __real_posix_memalign(void **out, size_t alignment, size_t bytes);
void __real_free(void *p);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes_each);
void *__wrap_realloc(void *p, size_t bytes);
int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes);
void __wrap_free(void *p);

static atomic_llong held; /* may be below 0: what the C library took and a caller frees */
static atomic_llong most;
static size_t worst_bytes, worst_input;

static void add(long long bytes)
{
    long long now = atomic_fetch_add(&held, bytes) + bytes;
    long long seen = atomic_load(&most);
    while (now > seen && !atomic_compare_exchange_weak(&most, &seen, now))
        ;
}

static long long size_of(void *p)
{
    return p ? (long long)malloc_usable_size(p) : 0;
}

void *__wrap_malloc(size_t bytes)
{
    void *p = __real_malloc(bytes);
    add(size_of(p));
    return p;
}

void *__wrap_calloc(size_t count, size_t bytes_each)
{
    void *p = __real_calloc(count, bytes_each);
    add(size_of(p));
    return p;
}

void *__wrap_realloc(void *p, size_t bytes)
{
    long long before = size_of(p);
    void *q = __real_realloc(p, bytes);
    if (q)
        add(size_of(q) - before);
    return q;
}

int __wrap_posix_memalign(void **out, size_t alignment, size_t bytes)
{
    int rc = __real_posix_memalign(out, alignment, bytes);
    if (rc == 0)
        add(size_of(*out));
    return rc;
}

void __wrap_free(void *p)
{
    add(-size_of(p));
    __real_free(p);
}

void fuzz_bound_worst(size_t *bytes, size_t *input_bytes)
{
    *bytes = worst_bytes;
    *input_bytes = worst_input;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const fuzz_limits *may = &fuzz_may_allocate;
    long long before = atomic_load(&held);
    atomic_store(&most, before);
    (void)fuzz_one(data, size);
    long long peak = atomic_load(&most) - before;
    if (peak > 0 && (size_t)peak > worst_bytes) {
        worst_bytes = (size_t)peak;
        worst_input = size;
    }
    if (peak > 0 && (size_t)peak > may->fixed_bytes + may->per_byte * size) {
        (void)fprintf(stderr, "%lld bytes held for an input of %zu, at most %zu + %zu a byte\n",
                      peak, size, may->fixed_bytes, may->per_byte);
        __builtin_trap();
    }
    if (atomic_load(&held) > before) {
        (void)fprintf(stderr, "%lld bytes left over\n", atomic_load(&held) - before);
        __builtin_trap();
    }
    return 0;
}

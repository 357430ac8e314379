/* A grid, block by block: threads as fibres, barriers, warp collectives, shared memory, cp.async.
 * shim_internal.h says in which order threads run, and why. */
#include "shim_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef QC_SHIM_TSAN
#include <sanitizer/tsan_interface.h>
#define RELEASE(p) __tsan_release(p)
#define ACQUIRE(p) __tsan_acquire(p)
#else
#define RELEASE(p) ((void)(p))
#define ACQUIRE(p) ((void)(p))
#endif

enum { MAX_THREADS = 1024, WARP = 32, MAX_WARPS = MAX_THREADS / WARP };
/* More than any device has; before and after it memory that cannot be touched. */
enum { SHARED_ROOM = 256 << 10, SHARED_GUARD = 64 << 10, SHARED_ALIGN = 128, MARGIN = 128 };
enum { CANARY = 0xfd };

typedef enum { READY, AT_BARRIER, AT_COLLECTIVE, ENDED } thread_state;

typedef struct {
    void *shared;
    const void *global;
    unsigned bytes;
    uint64_t group;
} pending_copy;

typedef struct {
    qc_shim_thread seen; /* first: what the kernel sees */
    qc_shim_fibre *fibre;
    thread_state state;
    const char *file; /* AT_BARRIER */
    int line, kind, predicate, result;
    const char *collective; /* AT_COLLECTIVE */
    unsigned mask;
    void *arg;
    pending_copy *copies; /* kept from block to block */
    size_t copies_first, copies_count, copies_room;
    uint64_t groups; /* committed so far */
} thread;

typedef struct qc_shim_block {
    const qc_shim_grid *grid;
    unsigned threads, warps, ended;
    unsigned index[3];
    unsigned char *shared; /* SHARED_ALIGN-aligned; NULL: none */
    qc_shim_order order;
    uint64_t random;
    unsigned warp_order[MAX_WARPS];
    char begin, end, barrier, warp_barrier[MAX_WARPS]; /* names for the thread sanitizer */
    thread all[MAX_THREADS];
} block;

__thread qc_shim_thread *qc_shim_self;
static __thread block *running, *mine;
static __thread unsigned char *shared_room;
static uint64_t kernels_run;

/* ---- who and where --------------------------------------------------------------------------- */

void qc_shim_where(char *text, size_t bytes)
{
    text[0] = 0;
    if (!running || !bytes)
        return;
    const unsigned *b = running->index;
    int n =
        snprintf(text, bytes, "kernel %s, block (%u,%u,%u)", running->grid->name, b[0], b[1], b[2]);
    if (qc_shim_self && n > 0 && (size_t)n < bytes) {
        const qc_shim_index *t = &qc_shim_self->thread;
        snprintf(text + n, bytes - (size_t)n, ", thread (%u,%u,%u)", t->x, t->y, t->z);
    }
}

void qc_shim_fault(const char *format, ...)
{
    char text[600], where[300];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof(text), format, args);
    va_end(args);
    qc_shim_where(where, sizeof(where));
    fprintf(stderr, "qconv shim: %s%s%s\n", text, *where ? ": " : "", where);
    fflush(stderr);
    abort();
}

int qc_shim_explain_block(const void *p, char *text, size_t bytes)
{
    const unsigned char *at = p;
    if (!running)
        return 0;
    size_t size = running->grid->shared_bytes;
    if (shared_room && at >= shared_room - SHARED_GUARD &&
        at < shared_room + SHARED_ROOM + SHARED_GUARD) {
        if (at >= shared_room + SHARED_ROOM)
            snprintf(text, bytes, "%zu bytes into the block's shared memory of %zu",
                     (size_t)(at - (shared_room + SHARED_ROOM -
                                    SHARED_ALIGN * ((size + SHARED_ALIGN - 1) / SHARED_ALIGN))),
                     size);
        else
            snprintf(text, bytes, "before the block's shared memory of %zu bytes", size);
        return 1;
    }
    for (unsigned i = 0; i < running->threads; i++)
        if (qc_shim_fibre_overflows(running->all[i].fibre, p)) {
            snprintf(text, bytes, "the stack of thread %u overflows", i);
            return 1;
        }
    return 0;
}

uint64_t qc_shim_kernels_run(void)
{
    return __atomic_load_n(&kernels_run, __ATOMIC_RELAXED);
}

static thread *self(void)
{
    if (!qc_shim_self)
        qc_shim_fault("device code called outside of a kernel");
    return (thread *)qc_shim_self;
}

/* To the scheduler, until somebody sets the state to READY. */
static void wait_here(thread *t)
{
    qc_shim_fibre_leave(t->fibre, 0);
}

/* ---- barriers and collectives ---------------------------------------------------------------- */

int qc_shim_syncthreads(const char *file, int line, int kind, int predicate)
{
    thread *t = self();
    t->state = AT_BARRIER;
    t->file = file;
    t->line = line;
    t->kind = kind;
    t->predicate = predicate;
    RELEASE(&running->barrier);
    wait_here(t);
    ACQUIRE(&running->barrier);
    return t->result;
}

static void name_thread(const thread *t, char *text, size_t bytes)
{
    const qc_shim_index *i = &t->seen.thread;
    switch (t->state) {
    case READY:
        snprintf(text, bytes, "thread (%u,%u,%u) runs", i->x, i->y, i->z);
        break;
    case AT_BARRIER:
        snprintf(text, bytes, "thread (%u,%u,%u) waits at __syncthreads in line %d", i->x, i->y,
                 i->z, t->line);
        break;
    case AT_COLLECTIVE:
        snprintf(text, bytes, "thread (%u,%u,%u) waits at %s with mask 0x%08x", i->x, i->y, i->z,
                 t->collective, t->mask);
        break;
    case ENDED:
        snprintf(text, bytes, "thread (%u,%u,%u) has ended", i->x, i->y, i->z);
        break;
    }
}

static void divergence(const char *what, const thread *a, const thread *b)
{
    char x[160], y[160];
    name_thread(a, x, sizeof(x));
    name_thread(b, y, sizeof(y));
    qc_shim_self = NULL;
    qc_shim_fault("%s: %s, %s", what, x, y);
}

void qc_shim_collect(const char *kind, unsigned mask, void *arg,
                     void (*compute)(void *const *args, unsigned mask))
{
    thread *t = self();
    thread *warp = t - t->seen.lane;
    unsigned lanes = running->threads - (unsigned)(warp - running->all);
    if (!(mask >> t->seen.lane & 1))
        qc_shim_fault("%s with mask 0x%08x, which leaves out the lane itself", kind, mask);
    if (lanes < WARP && mask >> lanes)
        qc_shim_fault("%s with mask 0x%08x in a warp of %u lanes", kind, mask, lanes);
    char *name = &running->warp_barrier[(warp - running->all) / WARP];
    int orders = !strcmp(kind, "__syncwarp");
    t->state = AT_COLLECTIVE;
    t->collective = kind;
    t->mask = mask;
    t->arg = arg;
    if (orders)
        RELEASE(name);
    void *args[WARP] = {NULL};
    int complete = 1;
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (!(mask >> lane & 1))
            continue;
        thread *other = &warp[lane];
        if (other->state == ENDED)
            divergence("a lane of the mask is missing", t, other);
        if (other->state == AT_COLLECTIVE && other->mask == mask && strcmp(other->collective, kind))
            divergence("lanes of one mask at different places", t, other);
        complete &= other->state == AT_COLLECTIVE && other->mask == mask;
        args[lane] = other->arg;
    }
    if (complete) {
        compute(args, mask);
        for (unsigned lane = 0; lane < WARP; lane++)
            if (mask >> lane & 1)
                warp[lane].state = READY;
    }
    wait_here(t);
    if (orders)
        ACQUIRE(name);
}

/* ---- shared memory --------------------------------------------------------------------------- */

static size_t shared_rounded(size_t bytes)
{
    return (bytes + SHARED_ALIGN - 1) / SHARED_ALIGN * SHARED_ALIGN;
}

static void make_shared(block *b)
{
    size_t bytes = b->grid->shared_bytes;
    if (!shared_room) {
        unsigned char *p = mmap(NULL, SHARED_ROOM + 2 * SHARED_GUARD, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p + SHARED_GUARD, SHARED_ROOM, PROT_READ | PROT_WRITE))
            qc_shim_fault("no memory for shared memory");
        shared_room = p + SHARED_GUARD;
    }
    if (bytes > SHARED_ROOM - MARGIN)
        qc_shim_fault("%zu bytes of shared memory", bytes);
    b->shared = shared_room + SHARED_ROOM - shared_rounded(bytes);
    memset(b->shared - MARGIN, CANARY, MARGIN);
    memset(b->shared, 0xff, bytes);
    memset(b->shared + bytes, CANARY, shared_rounded(bytes) - bytes);
}

static void check_shared(block *b)
{
    size_t bytes = b->grid->shared_bytes, end = shared_rounded(bytes);
    for (size_t i = bytes; i < end; i++)
        if (b->shared[i] != CANARY)
            qc_shim_fault("byte %zu of %zu bytes of shared memory was written", i, bytes);
    for (size_t i = 1; i <= MARGIN; i++)
        if (*(b->shared - i) != CANARY)
            qc_shim_fault("the byte %zu before shared memory was written", i);
}

void *qc_shim_shared(size_t bytes, size_t alignment)
{
    self();
    if (bytes > running->grid->shared_bytes)
        qc_shim_fault("the kernel uses %zu bytes of shared memory, launched with %zu", bytes,
                      running->grid->shared_bytes);
    if (alignment > SHARED_ALIGN)
        qc_shim_fault("shared memory aligned to %zu bytes; %d are given", alignment, SHARED_ALIGN);
    return running->shared;
}

void qc_shim_check_shared(const char *what, const void *p, size_t bytes)
{
    self();
    size_t size = running->grid->shared_bytes;
    uintptr_t at = (uintptr_t)p, base = (uintptr_t)running->shared;
    if (at < base || at - base > size || size - (at - base) < bytes)
        qc_shim_fault("%s: %p is outside of the %zu bytes of shared memory at %p", what, p, size,
                      (void *)running->shared);
    if (at % bytes)
        qc_shim_fault("%s: offset %zu of shared memory is not aligned to %zu bytes", what,
                      (size_t)(at - base), bytes);
}

void qc_shim_need_sm(const char *what, unsigned sm)
{
    self();
    if (running->grid->sm < sm)
        qc_shim_fault("%s needs sm_%u; this device is sm_%u", what, sm, running->grid->sm);
}

/* ---- cp.async -------------------------------------------------------------------------------- */

/* A copy may land at any time until it is waited for, and one that nobody waits for until the block
 * ends. So what somebody wrote to its place meanwhile may or may not be overwritten; the poison put
 * there tells. */
static void check_untouched(const pending_copy *c)
{
    static const uint64_t poison[2] = {UINT64_MAX, UINT64_MAX};
    if (memcmp(c->shared, poison, sizeof(poison)))
        qc_shim_fault(
            "offset %zu of shared memory was written while a cp.async to it was under way",
            (size_t)((const unsigned char *)c->shared - running->shared));
}

void qc_shim_cp_async(void *shared, const void *global, unsigned bytes)
{
    thread *t = self();
    qc_shim_need_sm("cp.async", 80);
    qc_shim_check_shared("cp.async", shared, 16);
    if (bytes != 0 && bytes != 16)
        qc_shim_fault("cp.async of %u bytes", bytes);
    if (bytes && (uintptr_t)global % 16)
        qc_shim_fault("cp.async from %p, which is not aligned to 16 bytes", global);
    if (t->copies_count == t->copies_room) {
        t->copies_room = t->copies_room ? 2 * t->copies_room : 64;
        t->copies = realloc(t->copies, t->copies_room * sizeof(*t->copies));
        if (!t->copies)
            qc_shim_fault("no memory for a copy");
    }
    memset(shared, 0xff, 16);
    t->copies[t->copies_count++] = (pending_copy){shared, global, bytes, t->groups};
}

void qc_shim_cp_commit(void)
{
    qc_shim_need_sm("cp.async.commit_group", 80);
    self()->groups++;
}

void qc_shim_cp_wait(unsigned pending)
{
    thread *t = self();
    qc_shim_need_sm("cp.async.wait_group", 80);
    while (t->copies_first < t->copies_count) {
        const pending_copy *c = &t->copies[t->copies_first];
        if (c->group + pending >= t->groups) /* among the newest, or not committed */
            return;
        check_untouched(c);
        if (c->bytes)
            memcpy(c->shared, c->global, 16);
        else
            memset(c->shared, 0, 16);
        t->copies_first++;
    }
    t->copies_first = t->copies_count = 0;
}

/* ---- running --------------------------------------------------------------------------------- */

static void thread_main(void)
{
    thread *t = (thread *)qc_shim_self;
    qc_shim_fibre_entered(t->fibre);
    ACQUIRE(&running->begin);
    running->grid->call(running->grid->closure);
    RELEASE(&running->end);
    t->state = ENDED;
    running->ended++;
    thread *warp = t - t->seen.lane;
    for (unsigned lane = 0; lane < WARP && warp + lane < running->all + running->threads; lane++)
        if (warp[lane].state == AT_COLLECTIVE && warp[lane].mask >> t->seen.lane & 1)
            divergence("a lane of the mask is missing", &warp[lane], t);
    qc_shim_fibre_leave(t->fibre, 1);
}

static void order_warps(block *b)
{
    unsigned n = b->warps;
    for (unsigned i = 0; i < n; i++)
        b->warp_order[i] = b->order.kind == QC_SHIM_REVERSE ? n - 1 - i : i;
    if (b->order.kind != QC_SHIM_SHUFFLE)
        return;
    for (unsigned i = n; i > 1; i--) {
        unsigned j = (unsigned)(qc_shim_random(&b->random) % i), x = b->warp_order[i - 1];
        b->warp_order[i - 1] = b->warp_order[j];
        b->warp_order[j] = x;
    }
}

/* Each lane that can run, until it waits; again until none can. */
static void run_warp(block *b, unsigned warp)
{
    unsigned first = warp * WARP, n = b->threads - first < WARP ? b->threads - first : WARP;
    for (int ran = 1; ran;) {
        ran = 0;
        /* lane = start + i * step over 32 lanes, of which a short warp has not all */
        unsigned start = 0, step = 1;
        if (b->order.kind == QC_SHIM_REVERSE)
            start = step = WARP - 1;
        else if (b->order.kind == QC_SHIM_SHUFFLE) {
            uint64_t r = qc_shim_random(&b->random);
            start = (unsigned)r % WARP;
            step = (unsigned)(r >> 32) | 1;
        }
        for (unsigned i = 0; i < WARP; i++) {
            unsigned lane = (start + i * step) % WARP;
            if (lane >= n || b->all[first + lane].state != READY)
                continue;
            qc_shim_self = &b->all[first + lane].seen;
            qc_shim_fibre_enter(b->all[first + lane].fibre);
            qc_shim_self = NULL;
            ran = 1;
        }
    }
}

/* Nobody can run: all that live are at one barrier, or they wait for each other. */
static void release_barrier(block *b)
{
    const thread *one = NULL;
    int yes = 0, all = 1;
    for (unsigned i = 0; i < b->threads; i++) {
        const thread *t = &b->all[i];
        if (t->state == ENDED)
            continue;
        one = one ? one : t;
        if (t->state == AT_COLLECTIVE) {
            /* name a thread that is elsewhere, if there is one */
            const thread *other = t;
            for (unsigned j = 0; j < b->threads; j++)
                if (b->all[j].state != AT_COLLECTIVE || b->all[j].mask != t->mask)
                    other = &b->all[j];
            divergence("threads wait for each other for ever", t, other);
        }
        if (t->kind != one->kind || t->line != one->line || strcmp(t->file, one->file))
            divergence("threads of a block at different barriers", one, t);
        yes += t->predicate;
        all &= t->predicate;
    }
    for (unsigned i = 0; i < b->threads; i++)
        if (b->all[i].state == AT_BARRIER) {
            thread *t = &b->all[i];
            t->result = t->kind == QC_SHIM_COUNT ? yes : t->kind == QC_SHIM_AND ? all : yes != 0;
            t->state = READY;
        }
}

/* What was never waited for lands now; nobody reads it any more. */
static void end_copies(block *b)
{
    for (unsigned i = 0; i < b->threads; i++) {
        thread *t = &b->all[i];
        qc_shim_self = &t->seen;
        while (t->copies_first < t->copies_count)
            check_untouched(&t->copies[t->copies_first++]);
    }
    qc_shim_self = NULL;
}

static void run_block(block *b)
{
    const qc_shim_grid *g = b->grid;
    make_shared(b);
    b->ended = 0;
    for (unsigned i = 0; i < b->threads; i++) {
        thread *t = &b->all[i];
        t->seen.thread = (qc_shim_index){i % g->block[0], i / g->block[0] % g->block[1],
                                         i / g->block[0] / g->block[1]};
        t->seen.block = (qc_shim_index){b->index[0], b->index[1], b->index[2]};
        t->seen.block_dim = (qc_shim_index){g->block[0], g->block[1], g->block[2]};
        t->seen.grid_dim = (qc_shim_index){g->grid[0], g->grid[1], g->grid[2]};
        t->seen.lane = i % WARP;
        t->seen.in = b;
        t->state = READY;
        t->copies_first = t->copies_count = 0;
        t->groups = 0;
        t->fibre = qc_shim_fibre_get(i);
        qc_shim_fibre_start(t->fibre, thread_main);
    }
    RELEASE(&b->begin);
    for (;;) {
        order_warps(b);
        for (unsigned i = 0; i < b->warps; i++)
            run_warp(b, b->warp_order[i]);
        if (b->ended == b->threads)
            break;
        release_barrier(b);
    }
    ACQUIRE(&b->end);
    end_copies(b);
    check_shared(b);
}

void qc_shim_thread_ends(void)
{
    if (shared_room)
        munmap(shared_room - SHARED_GUARD, SHARED_ROOM + 2 * SHARED_GUARD);
    for (unsigned i = 0; mine && i < MAX_THREADS; i++)
        free(mine->all[i].copies);
    free(mine);
    shared_room = NULL;
    mine = NULL;
}

static uint64_t greatest_common_divisor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t r = a % b;
        a = b;
        b = r;
    }
    return a;
}

void qc_shim_run_grid(const qc_shim_grid *g)
{
    if (!mine && !(mine = calloc(1, sizeof(*mine))))
        qc_shim_fault("no memory for a block");
    block *b = mine;
    b->grid = g;
    b->threads = g->block[0] * g->block[1] * g->block[2];
    b->warps = (b->threads + WARP - 1) / WARP;
    b->order = qc_shim_get_order();
    b->random = b->order.seed;
    uint64_t blocks = (uint64_t)g->grid[0] * g->grid[1] * g->grid[2];
    uint64_t start = 0, step = 1;
    if (b->order.kind == QC_SHIM_REVERSE)
        start = step = blocks - 1;
    else if (b->order.kind == QC_SHIM_SHUFFLE) {
        start = qc_shim_random(&b->random) % blocks;
        do
            step = qc_shim_random(&b->random) % blocks;
        while (blocks > 1 && greatest_common_divisor(step, blocks) != 1);
    }
    running = b;
    for (uint64_t i = 0, at = start; i < blocks; i++) {
        b->index[0] = (unsigned)(at % g->grid[0]);
        b->index[1] = (unsigned)(at / g->grid[0] % g->grid[1]);
        b->index[2] = (unsigned)(at / g->grid[0] / g->grid[1]);
        run_block(b);
        at = (at + step) % blocks;
    }
    running = NULL;
    __atomic_fetch_add(&kernels_run, 1, __ATOMIC_RELAXED);
}

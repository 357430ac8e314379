/* Runs a grid block by block: threads as fibres, barriers, warp collectives, shared memory.
 * shim_internal.h says in which order threads run, and why. */
#include "shim_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_THREADS = 1024, WARP = 32, MAX_WARPS = MAX_THREADS / WARP };
/* This is more than any device has. Before and after it lies memory that cannot be touched. */
enum { SHARED_ROOM = 256 << 10, SHARED_GUARD = 64 << 10, SHARED_ALIGN = 128, MARGIN = 128 };
enum { CANARY = 0xfd };
/* How many blocks, and how many of one kernel, may have begun early and wait for the kernel in
 * front. */
enum { EARLY_MOST = 4, EARLY_OF_ONE = 2 };
/* How many blocks of the running kernel may have begun and not ended. */
enum { RUNNING_MOST = 3, BLOCKS_MOST = EARLY_MOST + RUNNING_MOST };

typedef enum {
    READY,
    AT_BARRIER,
    AT_COLLECTIVE,
    AT_EVENT,
    AT_GRID_WAIT,
    AT_PAUSE,
    ENDED
} thread_state;

typedef struct {
    qc_shim_thread seen; /* comes first: what the kernel sees */
    qc_shim_fibre *fibre;
    thread_state state;
    int waited;       /* whether it has called qc_grid_wait */
    const char *file; /* for AT_BARRIER */
    int line, kind, predicate, result;
    const char *collective; /* for AT_COLLECTIVE */
    unsigned mask;
    void *arg;
    const void *event;     /* for AT_EVENT */
    qc_shim_copies copies; /* its room is kept from block to block */
} thread;

typedef struct qc_shim_block {
    const qc_shim_grid *grid;
    int early; /* the kernel in front of this one has not run yet */
    int may_pause, paused;
    int woken; /* a thread was, perhaps of a warp that had its turn */
    qc_shim_async *async;
    int released;        /* a thread has called qc_grid_release */
    uint64_t at;         /* which block of the grid */
    unsigned slot;       /* in blocks_of */
    unsigned char *room; /* SHARED_ROOM bytes between guards */
    unsigned threads, warps, ended;
    unsigned index[3];
    unsigned char *shared; /* SHARED_ALIGN-aligned, or NULL for none */
    qc_shim_order order;
    uint64_t random;
    unsigned warp_order[MAX_WARPS];
    unsigned warp_waiting[MAX_WARPS];                  /* how many lanes are at a collective */
    unsigned warp_gone[MAX_WARPS];                     /* which lanes have ended */
    char begin, end, barrier, warp_barrier[MAX_WARPS]; /* names for the thread sanitizer */
    thread all[MAX_THREADS];
} block;

_Static_assert(QC_SHIM_FIBRES == BLOCKS_MOST * MAX_THREADS, "a fibre for every thread");

__thread qc_shim_thread *qc_shim_self;
static __thread block *running;
static __thread block *blocks_of[BLOCKS_MOST]; /* the last EARLY_MOST are for early blocks */
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
    const unsigned char *room = running->room;
    if (room && at >= room - SHARED_GUARD && at < room + SHARED_ROOM + SHARED_GUARD) {
        if (at >= room + SHARED_ROOM)
            snprintf(text, bytes, "%zu bytes into the block's shared memory of %zu",
                     (size_t)(at - (room + SHARED_ROOM -
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

/* Goes to the scheduler, until somebody sets the state to READY. */
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
    QC_SHIM_RELEASE(&running->barrier);
    wait_here(t);
    QC_SHIM_ACQUIRE(&running->barrier);
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
    case AT_EVENT: {
        char event[120];
        qc_shim_async_name(t->seen.in->async, t->event, event, sizeof(event));
        snprintf(text, bytes, "thread (%u,%u,%u) waits for %s", i->x, i->y, i->z, event);
        break;
    }
    case AT_GRID_WAIT:
        snprintf(text, bytes, "thread (%u,%u,%u) waits at qc_grid_wait", i->x, i->y, i->z);
        break;
    case AT_PAUSE:
        snprintf(text, bytes, "thread (%u,%u,%u) lets another block run", i->x, i->y, i->z);
        break;
    case ENDED:
        snprintf(text, bytes, "thread (%u,%u,%u) has ended", i->x, i->y, i->z);
        break;
    }
}

static void divergence(const char *what, const thread *a, const thread *b)
{
    char x[200], y[200];
    name_thread(a, x, sizeof(x));
    name_thread(b, y, sizeof(y));
    qc_shim_self = NULL;
    qc_shim_fault("%s: %s, %s", what, x, y);
}

static unsigned lanes_of(unsigned mask)
{
    return mask == ~0u ? WARP : (unsigned)__builtin_popcount(mask);
}

/* Looks at the lanes of t's mask and, where all have come, computes for them. Returns how many they
 * are, or 0. */
static unsigned complete_collective(thread *t, thread *warp,
                                    void (*compute)(void *const *args, unsigned mask))
{
    void *args[WARP] = {NULL};
    int complete = 1;
    for (unsigned lane = 0; lane < WARP; lane++) {
        if (!(t->mask >> lane & 1))
            continue;
        thread *other = &warp[lane];
        int here = other->state == AT_COLLECTIVE && other->mask == t->mask;
        if (other->state == ENDED)
            divergence("a lane of the mask is missing", t, other);
        if (here && other->collective != t->collective && strcmp(other->collective, t->collective))
            divergence("lanes of one mask at different places", t, other);
        complete &= here;
        args[lane] = other->arg;
    }
    if (!complete)
        return 0;
    compute(args, t->mask);
    for (unsigned lane = 0; lane < WARP; lane++)
        if (t->mask >> lane & 1)
            warp[lane].state = READY;
    return lanes_of(t->mask);
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
    const unsigned number = (unsigned)(warp - running->all) / WARP;
    char *name = &running->warp_barrier[number];
    int orders = !strcmp(kind, "__syncwarp");
    t->state = AT_COLLECTIVE;
    t->collective = kind;
    t->mask = mask;
    t->arg = arg;
    if (orders)
        QC_SHIM_RELEASE(name);
    unsigned *waiting = &running->warp_waiting[number];
    ++*waiting;
    /* The last lane to come looks at all of them. Where a lane is missing, the first one does. */
    if (*waiting >= lanes_of(mask) || running->warp_gone[number] & mask)
        *waiting -= complete_collective(t, warp, compute);
    wait_here(t);
    if (orders)
        QC_SHIM_ACQUIRE(name);
}

/* ---- what runs on its own -------------------------------------------------------------------- */

qc_shim_here qc_shim_get_here(void)
{
    unsigned thread_number = (unsigned)(self() - running->all);
    return (qc_shim_here){running->grid,   running->threads, thread_number,
                          running->shared, &running->async,  &((thread *)qc_shim_self)->copies};
}

void qc_shim_wait_for(const void *event)
{
    thread *t = self();
    t->state = AT_EVENT;
    t->event = event;
    wait_here(t);
}

void qc_shim_wake(const void *event)
{
    for (unsigned i = 0; i < running->threads; i++)
        if (running->all[i].state == AT_EVENT && running->all[i].event == event) {
            running->all[i].state = READY;
            running->woken = 1;
        }
}

void qc_shim_shared_wait(const uint32_t *word, uint32_t value)
{
    qc_shim_check_shared("a wait for a word", word, sizeof(*word));
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value)
        qc_shim_wait_for(word);
}

void qc_shim_shared_set(uint32_t *word, uint32_t value)
{
    qc_shim_check_shared("a word that is waited for", word, sizeof(*word));
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    qc_shim_wake(word);
}

/* ---- the kernel in front --------------------------------------------------------------------- */

void qc_shim_grid_wait(void)
{
    thread *t = self();
    if (running->grid->code < 90) /* the wait was compiled out */
        return;
    t->waited = 1;
    if (!running->early)
        return;
    t->state = AT_GRID_WAIT;
    wait_here(t);
    QC_SHIM_ACQUIRE(&running->begin);
}

void qc_shim_grid_release(void)
{
    self();
    running->released = 1;
}

void qc_shim_pause(void)
{
    thread *t = self();
    if (!running->may_pause)
        return;
    t->state = AT_PAUSE;
    running->paused = 1;
    wait_here(t);
}

/* ---- shared memory --------------------------------------------------------------------------- */

static size_t shared_rounded(size_t bytes)
{
    return (bytes + SHARED_ALIGN - 1) / SHARED_ALIGN * SHARED_ALIGN;
}

static void make_shared(block *b)
{
    size_t bytes = b->grid->shared_bytes;
    if (!b->room) {
        unsigned char *p = mmap(NULL, SHARED_ROOM + 2 * SHARED_GUARD, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED || mprotect(p + SHARED_GUARD, SHARED_ROOM, PROT_READ | PROT_WRITE))
            qc_shim_fault("no memory for shared memory");
        b->room = p + SHARED_GUARD;
    }
    if (bytes > SHARED_ROOM - MARGIN)
        qc_shim_fault("%zu bytes of shared memory", bytes);
    b->shared = b->room + SHARED_ROOM - shared_rounded(bytes);
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

/* ---- running --------------------------------------------------------------------------------- */

static void thread_main(void)
{
    thread *t = (thread *)qc_shim_self;
    qc_shim_fibre_entered(t->fibre);
    QC_SHIM_ACQUIRE(&running->begin);
    running->grid->call(running->grid->closure);
    QC_SHIM_RELEASE(&running->end);
    if (running->grid->overlaps && !t->waited)
        qc_shim_fault(running->grid->code < 90
                          ? "a kernel whose code has no qc_grid_wait was launched to overlap"
                          : "a thread ends without qc_grid_wait in a kernel that may overlap the "
                            "one before it");
    qc_shim_async_thread_ends(running->async, (unsigned)(t - running->all));
    t->state = ENDED;
    running->ended++;
    thread *warp = t - t->seen.lane;
    const unsigned number = (unsigned)(warp - running->all) / WARP;
    running->warp_gone[number] |= 1u << t->seen.lane;
    const unsigned lanes = running->warp_waiting[number] ? running->threads - number * WARP : 0;
    for (unsigned lane = 0; lane < WARP && lane < lanes; lane++)
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

/* Runs each lane that can run until it waits, and starts again until none can. */
static void run_warp(block *b, unsigned warp)
{
    unsigned first = warp * WARP, n = b->threads - first < WARP ? b->threads - first : WARP;
    for (int ran = 1; ran;) {
        ran = 0;
        /* lane = start + i * step, over 32 lanes; a short warp does not have all of them */
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
            if (b->paused)
                return;
        }
    }
}

/* Nobody can run: either all that live are at one barrier, or they wait for each other. */
static void release_barrier(block *b)
{
    const thread *one = NULL;
    int yes = 0, all = 1;
    for (unsigned i = 0; i < b->threads; i++) {
        const thread *t = &b->all[i];
        if (t->state == ENDED)
            continue;
        one = one ? one : t;
        if (t->state != AT_BARRIER) {
            /* name a thread that is elsewhere, if there is one */
            const thread *other = t;
            for (unsigned j = 0; j < b->threads; j++)
                if (b->all[j].state != t->state ||
                    (t->state == AT_EVENT ? b->all[j].event != t->event
                                          : b->all[j].mask != t->mask))
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

/* Copies that were never waited for land now. Nobody reads them any more. */
static void end_copies(block *b)
{
    for (unsigned i = 0; i < b->threads; i++) {
        thread *t = &b->all[i];
        qc_shim_self = &t->seen;
        qc_shim_copies_end(&t->copies, b->shared);
    }
    qc_shim_self = NULL;
}

/* Prepares block `at` of the grid. None of its threads has run yet. */
static void start_block(block *b, const qc_shim_grid *g, uint64_t at, int early)
{
    b->grid = g;
    b->early = early;
    b->may_pause = b->paused = b->released = b->woken = 0;
    b->at = at;
    b->index[0] = (unsigned)(at % g->grid[0]);
    b->index[1] = (unsigned)(at / g->grid[0] % g->grid[1]);
    b->index[2] = (unsigned)(at / g->grid[0] / g->grid[1]);
    b->threads = g->block[0] * g->block[1] * g->block[2];
    b->warps = (b->threads + WARP - 1) / WARP;
    make_shared(b);
    b->ended = 0;
    memset(b->warp_waiting, 0, sizeof(b->warp_waiting));
    memset(b->warp_gone, 0, sizeof(b->warp_gone));
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
        t->waited = 0;
        t->copies = (qc_shim_copies){.list = t->copies.list, .room = t->copies.room};
        t->fibre = qc_shim_fibre_get(b->slot * MAX_THREADS + i);
        qc_shim_fibre_start(t->fibre, thread_main);
    }
    QC_SHIM_RELEASE(&b->begin);
}

static int any_in(const block *b, thread_state state)
{
    for (unsigned i = 0; i < b->threads; i++)
        if (b->all[i].state == state)
            return 1;
    return 0;
}

/* Runs the block until all its threads have ended, or until it cannot go on without the kernel in
 * front (early), or until it lets another block run (paused). */
static void run_block(block *b)
{
    running = b;
    while (b->ended < b->threads) {
        order_warps(b);
        for (unsigned i = 0; i < b->warps && !b->paused; i++)
            run_warp(b, b->warp_order[i]);
        if (b->paused || (b->early && any_in(b, AT_GRID_WAIT))) {
            running = NULL;
            return;
        }
        if (!b->woken && b->ended < b->threads &&
            !qc_shim_async_land(b->async, b->order.kind, &b->random))
            release_barrier(b);
        b->woken = 0;
    }
    QC_SHIM_ACQUIRE(&b->end);
    end_copies(b);
    qc_shim_async_end(b->async);
    b->async = NULL;
    check_shared(b);
    running = NULL;
    b->grid = NULL;
}

/* Goes on with a block that waited for the kernel in front, or that was paused. */
static void go_on(block *b)
{
    thread_state state = b->early ? AT_GRID_WAIT : AT_PAUSE;
    b->early = b->paused = 0;
    if (state == AT_GRID_WAIT)
        QC_SHIM_RELEASE(&b->begin);
    for (unsigned i = 0; i < b->threads; i++)
        if (b->all[i].state == state)
            b->all[i].state = READY;
    run_block(b);
}

void qc_shim_thread_ends(void)
{
    for (unsigned i = 0; i < sizeof(blocks_of) / sizeof(*blocks_of); i++) {
        block *b = blocks_of[i];
        if (!b)
            continue;
        if (b->room)
            munmap(b->room - SHARED_GUARD, SHARED_ROOM + 2 * SHARED_GUARD);
        for (unsigned t = 0; t < MAX_THREADS; t++)
            free(b->all[t].copies.list);
        free(b);
        blocks_of[i] = NULL;
    }
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

/* The order in which the blocks of a grid run, and those that have begun. */
typedef struct {
    const qc_shim_grid *grid;
    qc_shim_order order;
    uint64_t random, blocks, start, step;
    block *early[EARLY_OF_ONE];
} walk;

static void walk_begin(walk *w, const qc_shim_grid *g)
{
    w->grid = g;
    w->order = qc_shim_get_order();
    w->random = w->order.seed;
    w->blocks = (uint64_t)g->grid[0] * g->grid[1] * g->grid[2];
    w->start = 0;
    w->step = 1;
    if (w->order.kind == QC_SHIM_REVERSE)
        w->start = w->step = w->blocks - 1;
    else if (w->order.kind == QC_SHIM_SHUFFLE) {
        w->start = qc_shim_random(&w->random) % w->blocks;
        do
            w->step = qc_shim_random(&w->random) % w->blocks;
        while (w->blocks > 1 && greatest_common_divisor(w->step, w->blocks) != 1);
    }
}

static block *block_in(unsigned slot, const walk *w)
{
    block *b = blocks_of[slot];
    if (!b && !(b = blocks_of[slot] = calloc(1, sizeof(*b))))
        qc_shim_fault("no memory for a block");
    b->slot = slot;
    b->order = w->order;
    return b;
}

/* Starts the first blocks of a grid and runs them as far as qc_grid_wait. Returns 0 if there is no
 * room for any. *released tells whether all of them have let the next kernel start. */
static int start_early(walk *w, const qc_shim_grid *g, int *released)
{
    unsigned begun = 0;
    walk_begin(w, g);
    *released = 1;
    qc_shim_memory_hold(g->device, 1);
    for (unsigned slot = RUNNING_MOST;
         slot < BLOCKS_MOST && begun < EARLY_OF_ONE && begun < w->blocks; slot++) {
        block *b = block_in(slot, w);
        if (b->grid)
            continue;
        b->random = w->random + slot;
        start_block(b, g, (w->start + begun * w->step) % w->blocks, 1);
        run_block(b);
        *released &= b->released;
        w->early[begun++] = b;
    }
    qc_shim_memory_hold(g->device, 0);
    return begun > 0;
}

/* Finds a slot for the next block of the running kernel. If need be, a paused block runs to its end
 * to make room. */
static block *free_block(const walk *w)
{
    for (unsigned slot = 0; slot < RUNNING_MOST; slot++) {
        block *b = block_in(slot, w);
        if (!b->grid)
            return b;
    }
    block *b = blocks_of[0];
    b->may_pause = 0;
    go_on(b);
    return b;
}

/* Blocks run one after the other. A block that pauses goes on when there is no room for another, or
 * when all others have ended. */
static void run_grid(walk *w)
{
    for (uint64_t i = 0, at = w->start; i < w->blocks; i++) {
        block *b = NULL;
        for (unsigned j = 0; j < EARLY_OF_ONE; j++)
            if (w->early[j] && w->early[j]->at == at)
                b = w->early[j];
        if (b) {
            go_on(b);
        } else {
            b = free_block(w);
            b->order = w->order;
            b->random = w->random;
            start_block(b, w->grid, at, 0);
            b->may_pause = w->blocks > 1;
            run_block(b);
            w->random = b->random;
        }
        at = (at + w->step) % w->blocks;
    }
    for (unsigned slot = 0; slot < RUNNING_MOST; slot++)
        while (blocks_of[slot] && blocks_of[slot]->grid) {
            blocks_of[slot]->may_pause = 0;
            go_on(blocks_of[slot]);
        }
    __atomic_fetch_add(&kernels_run, 1, __ATOMIC_RELAXED);
}

/* Before a kernel runs, what follows it begins: the next kernel always, and the one after that if
 * the next one's blocks let it start before they wait. On a GPU a kernel that releases late may
 * have done something before the next one begins, but only qc_grid_wait promises that this can be
 * seen. */
void qc_shim_run_grids(const qc_shim_grid *const *g, size_t count)
{
    walk *w = calloc(count, sizeof(*w));
    int released = 0;
    size_t begun = 1; /* grids that have begun, or need not any more */
    if (!w)
        qc_shim_fault("no memory for a launch");
    for (size_t i = 0; i < count; i++) {
        if (begun <= i)
            begun = i + 1;
        if (!w[i].grid)
            walk_begin(&w[i], g[i]);
        while (begun < count && (begun == i + 1 || released) &&
               start_early(&w[begun], g[begun], &released))
            begun++;
        run_grid(&w[i]);
    }
    free(w);
}

/* What runs on its own: cp.async, and what kernels/ptx_hopper.cuh has for sm_90a: bulk loads, the
 * barriers that count their bytes, and products of a warpgroup.
 *
 * Each thing happens at the latest point that its rules allow, and whatever could have mattered
 * before that is compared with what was there when it started:
 *
 *  - cp.async poisons its destination when it starts, and copies when its thread waits, or when a
 *    barrier is waited for at which the thread arrives with its copies.
 *  - A bulk load poisons its destination when it starts, and lands when nobody in the block can run
 *    and somebody waits for its barrier. Its source and the poison must not have changed by then.
 *  - A product poisons D when it starts. It is calculated when the first warp of the warpgroup has
 *    waited for it; each warp gets its D at its own wait. B must be then as it was when the first
 *    warp started the product, and A and the poison of D must not have changed.
 *  - B has to be in shared memory what bulk loads brought there. What threads write would need a
 *    fence.proxy.async, which ptx_hopper.cuh does not have.
 *  - All four warps have to do the same in the same order, but they need not be at the same place:
 *    only a wait lasts until all of them have committed what is waited for. */
#include "shim_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* AHEAD is how many steps, and how many products, a warp may be ahead of another. */
enum { WARP = 32, WARPS = 4, GROUPS = 1024 / WARP / WARPS, BARRIERS = 64, AHEAD = 4096 };
enum { MATRIX = 128, POISON = 0xff };
#define IN_MEMORY UINT64_C(0x7265697272616271) /* what an initialized barrier holds */

typedef struct {
    uint64_t *at;
    unsigned count, missing; /* arrivals of each phase, and those that this one still lacks */
    uint64_t phase;
    int64_t bytes; /* announced, but not there */
    unsigned owner;
    int ready, waited;
} barrier;

typedef struct {
    unsigned char *to;
    const unsigned char *from;
    unsigned char *seen; /* the source when the load started */
    uint32_t bytes;
    barrier *barrier;
} load;

/* An arrival that comes once the thread's first `until` cp.async have landed. */
typedef struct {
    barrier *barrier;
    qc_shim_copies *copies;
    uint64_t until;
} arrival;

/* A D of a warp that products are adding to. */
typedef struct sum {
    struct sum *next;
    float *d[WARP];
    unsigned n, pending; /* products that the warp has not waited for */
    float value[];       /* [WARP][n / 2] */
} sum;

typedef struct {
    qc_shim_product is; /* a and d of no meaning */
    uint64_t group;
    int done;
    unsigned retired; /* how many warps have waited for it */
    sum *sum[WARPS];
    const uint32_t *a_at[WARPS][WARP];
    uint32_t a[WARPS][WARP][4];
    uint16_t b[]; /* its matrices one behind the other, as the first warp found them */
} product;

typedef enum { FENCE, COMMIT, WAIT, PRODUCT, REGISTERS } step_kind;

typedef struct {
    step_kind kind;
    const char *what;
    unsigned count; /* WAIT: how many groups may be pending; REGISTERS */
    qc_shim_product product;
} step;

typedef struct {
    uint64_t steps, issued, committed, retired;
    int fenced; /* since the last commit */
    sum *sums;
} warp;

typedef struct {
    uint64_t steps; /* of the warp that is furthest */
    step log[AHEAD];
    product *products[AHEAD];
    warp warps[WARPS];
} warpgroup;

struct qc_shim_async {
    unsigned char *shared;
    size_t shared_bytes;
    unsigned char *loaded; /* shared memory as it would be if only bulk loads had written to it */
    barrier barriers[BARRIERS];
    unsigned barriers_count;
    load *loads;
    size_t loads_count, loads_room;
    arrival *arrivals; /* still to come */
    size_t arrivals_count, arrivals_room;
    warpgroup *groups[GROUPS];
};

/* What happens between the two is nothing that a thread does, to the thread sanitizer. */
#ifdef QC_SHIM_TSAN
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
#define UNSEEN_BEGIN() AnnotateIgnoreReadsBegin(__FILE__, __LINE__)
#define UNSEEN_END()   AnnotateIgnoreReadsEnd(__FILE__, __LINE__)
#else
#define UNSEEN_BEGIN() ((void)0)
#define UNSEEN_END()   ((void)0)
#endif

static void *room(size_t bytes)
{
    void *p = calloc(1, bytes ? bytes : 1);
    if (!p)
        qc_shim_fault("no memory for what runs on its own");
    return p;
}

static qc_shim_async *begin(const char *what, qc_shim_here *h)
{
    *h = qc_shim_get_here();
    if (h->grid->sm != 90 || h->grid->code != 90)
        qc_shim_fault("%s is only in code for sm_90a; this device is sm_%u, with code for sm_%u",
                      what, h->grid->sm, h->grid->code);
    if (*h->async)
        return *h->async;
    UNSEEN_BEGIN();
    qc_shim_async *x = *h->async = room(sizeof(*x));
    x->shared = h->shared;
    x->shared_bytes = h->grid->shared_bytes;
    x->loaded = room(x->shared_bytes);
    memset(x->loaded, POISON, x->shared_bytes);
    UNSEEN_END();
    return x;
}

/* Makes room for one more in a list. */
static void *grown(void *list, size_t count, size_t *list_room, size_t each)
{
    if (count < *list_room)
        return list;
    *list_room = *list_room ? 2 * *list_room : 64;
    list = realloc(list, *list_room * each);
    if (!list)
        qc_shim_fault("no memory for what runs on its own");
    return list;
}

static size_t offset_of(const qc_shim_async *x, const void *p)
{
    return (size_t)((const unsigned char *)p - x->shared);
}

static int poisoned(const void *p, size_t bytes)
{
    const unsigned char *at = p;
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != POISON)
            return 0;
    return 1;
}

/* ---- cp.async -------------------------------------------------------------------------------- */

/* A copy may land at any time until somebody waits for it, or until the block ends if nobody does.
 * So what somebody wrote to its place meanwhile may or may not be overwritten. The poison that was
 * put there tells. */
static void check_untouched(const qc_shim_copy *c, const unsigned char *shared_memory)
{
    if (!poisoned(c->shared, c->size))
        qc_shim_fault(
            "offset %zu of shared memory was written while a cp.async to it was under way",
            (size_t)((const unsigned char *)c->shared - shared_memory));
}

/* The sizes are constants, so these are stores of the shim, which orders its threads itself, and no
 * calls that a thread sanitizer sees without their order. */
static void fill(void *at, int byte, unsigned size)
{
    if (size == 16)
        memset(at, byte, 16);
    else
        memset(at, byte, 4);
}

void qc_shim_cp_async(void *shared, const void *global, unsigned size, unsigned bytes)
{
    qc_shim_copies *c = qc_shim_get_here().copies;
    qc_shim_need_sm("cp.async", 80);
    qc_shim_check_shared("cp.async", shared, size);
    if (bytes != 0 && bytes != size)
        qc_shim_fault("cp.async of %u bytes", bytes);
    if (bytes && (uintptr_t)global % size)
        qc_shim_fault("cp.async from %p, which is not aligned to %u bytes", global, size);
    c->list = grown(c->list, c->count, &c->room, sizeof(*c->list));
    fill(shared, POISON, size);
    c->list[c->count++] = (qc_shim_copy){shared, global, size, bytes, c->groups};
}

void qc_shim_cp_commit(void)
{
    qc_shim_need_sm("cp.async.commit_group", 80);
    qc_shim_get_here().copies->groups++;
}

static void land_copy(qc_shim_copies *c, const unsigned char *shared_memory)
{
    const qc_shim_copy *first = &c->list[c->first];
    check_untouched(first, shared_memory);
    if (!first->bytes)
        fill(first->shared, 0, first->size);
    else if (first->size == 16)
        memcpy(first->shared, first->global, 16);
    else
        memcpy(first->shared, first->global, 4);
    c->landed++;
    if (++c->first == c->count)
        c->first = c->count = 0;
}

void qc_shim_cp_wait(unsigned pending)
{
    qc_shim_here h = qc_shim_get_here();
    qc_shim_copies *c = h.copies;
    qc_shim_need_sm("cp.async.wait_group", 80);
    /* Those that stay are among the newest, or not committed. */
    while (c->first < c->count && c->list[c->first].group + pending < c->groups)
        land_copy(c, h.shared);
}

void qc_shim_copies_end(qc_shim_copies *c, const unsigned char *shared_memory)
{
    while (c->first < c->count)
        check_untouched(&c->list[c->first++], shared_memory);
}

/* ---- barriers that count bytes --------------------------------------------------------------- */

static barrier *find(const char *what, qc_shim_async *x, const uint64_t *p)
{
    qc_shim_check_shared(what, p, sizeof(*p));
    for (unsigned i = 0; i < x->barriers_count; i++) {
        if (x->barriers[i].at != p)
            continue;
        if (*p != IN_MEMORY)
            qc_shim_fault("%s: the mbarrier at offset %zu was overwritten", what, offset_of(x, p));
        return &x->barriers[i];
    }
    qc_shim_fault("%s: the mbarrier at offset %zu was not initialized", what, offset_of(x, p));
}

void qc_shim_mbarrier_init(uint64_t *p, uint32_t count)
{
    qc_shim_here h;
    qc_shim_async *x = begin("mbarrier.init", &h);
    qc_shim_check_shared("mbarrier.init", p, sizeof(*p));
    if (!count || count >= 1u << 20)
        qc_shim_fault("mbarrier.init with a count of %u", count);
    for (unsigned i = 0; i < x->barriers_count; i++)
        if (x->barriers[i].at == p)
            qc_shim_fault("the mbarrier at offset %zu is initialized again", offset_of(x, p));
    if (x->barriers_count == BARRIERS)
        qc_shim_fault("more than %d mbarriers in a block", BARRIERS);
    x->barriers[x->barriers_count++] =
        (barrier){.at = p, .count = count, .missing = count, .owner = h.thread};
    *p = IN_MEMORY;
}

void qc_shim_mbarrier_ready(void)
{
    qc_shim_here h;
    qc_shim_async *x = begin("fence.mbarrier_init", &h);
    for (unsigned i = 0; i < x->barriers_count; i++)
        x->barriers[i].ready |= x->barriers[i].owner == h.thread;
}

static void end_phase(barrier *b)
{
    if (b->missing || b->bytes)
        return;
    b->phase++;
    b->missing = b->count;
    b->waited = 0;
    qc_shim_wake(b);
}

static void arrive(const qc_shim_async *x, barrier *b)
{
    if (!b->missing)
        qc_shim_fault("mbarrier.arrive: more arrivals at the mbarrier at offset %zu than the %u of "
                      "a phase",
                      offset_of(x, b->at), b->count);
    b->missing--;
}

void qc_shim_mbarrier_arrive(uint64_t *p, uint32_t bytes)
{
    qc_shim_here h;
    qc_shim_async *x = begin("mbarrier.arrive", &h);
    barrier *b = find("mbarrier.arrive", x, p);
    arrive(x, b);
    if (bytes >= 1u << 20)
        qc_shim_fault("mbarrier.arrive.expect_tx of %u bytes", bytes);
    QC_SHIM_RELEASE(b);
    b->bytes += bytes;
    end_phase(b);
}

void qc_shim_mbarrier_arrive_copied(uint64_t *p)
{
    qc_shim_here h;
    qc_shim_async *x = begin("cp.async.mbarrier.arrive", &h);
    barrier *b = find("cp.async.mbarrier.arrive", x, p);
    UNSEEN_BEGIN();
    x->arrivals = grown(x->arrivals, x->arrivals_count, &x->arrivals_room, sizeof(*x->arrivals));
    x->arrivals[x->arrivals_count++] =
        (arrival){b, h.copies, h.copies->landed + (h.copies->count - h.copies->first)};
    UNSEEN_END();
}

void qc_shim_mbarrier_wait(uint64_t *p, uint32_t parity)
{
    qc_shim_here h;
    qc_shim_async *x = begin("mbarrier.try_wait", &h);
    barrier *b = find("mbarrier.try_wait", x, p);
    if (parity > 1)
        qc_shim_fault("mbarrier.try_wait with a parity of %u", parity);
    while ((b->phase & 1) == parity) {
        b->waited = 1;
        qc_shim_wait_for(b);
    }
    QC_SHIM_ACQUIRE(b);
}

/* ---- bulk loads ------------------------------------------------------------------------------ */

void qc_shim_bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *p)
{
    qc_shim_here h;
    qc_shim_async *x = begin("a bulk load", &h);
    barrier *b = find("a bulk load", x, p);
    const void *base;
    size_t all;
    if (!b->ready)
        qc_shim_fault("a bulk load with the mbarrier at offset %zu, which is initialized but not "
                      "ready (qc_mbarrier_ready)",
                      offset_of(x, p));
    if (!bytes || bytes % 16)
        qc_shim_fault("a bulk load of %u bytes, which is no multiple of 16", bytes);
    qc_shim_check_shared("a bulk load", shared, 16);
    qc_shim_check_shared("a bulk load", (unsigned char *)shared + bytes - 16, 16);
    if ((uintptr_t)global % 16)
        qc_shim_fault("a bulk load from %p, which is not aligned to 16 bytes", global);
    if (qc_shim_memory_owner(global, &base, &all) != h.grid->device ||
        (size_t)((const char *)global - (const char *)base) + bytes > all)
        qc_shim_fault("a bulk load of %u bytes from %p, which is not within memory of the device",
                      bytes, global);
    UNSEEN_BEGIN();
    x->loads = grown(x->loads, x->loads_count, &x->loads_room, sizeof(*x->loads));
    load l = {shared, global, room(bytes), bytes, b};
    memcpy(l.seen, global, bytes);
    memset(shared, POISON, bytes);
    memset(x->loaded + offset_of(x, shared), POISON, bytes);
    x->loads[x->loads_count++] = l;
    UNSEEN_END();
}

static void land(qc_shim_async *x, const load *l)
{
    size_t at = offset_of(x, l->to);
    if (!poisoned(l->to, l->bytes) || !poisoned(x->loaded + at, l->bytes))
        qc_shim_fault("offset %zu of shared memory, or what follows it, was written while a bulk "
                      "load of %u bytes to it was under way",
                      at, l->bytes);
    if (memcmp(l->seen, l->from, l->bytes))
        qc_shim_fault("the source of a bulk load to offset %zu of shared memory was written while "
                      "it was under way",
                      at);
    memcpy(l->to, l->seen, l->bytes);
    memcpy(x->loaded + at, l->seen, l->bytes);
    l->barrier->bytes -= l->bytes;
    free(l->seen);
}

/* Whether something of this barrier can land: it is waited for, and lacks nothing else. */
static int can_land(const qc_shim_async *x, const barrier *b)
{
    size_t loads = 0, arrivals = 0;
    for (size_t i = 0; i < x->loads_count; i++)
        loads += x->loads[i].barrier == b;
    for (size_t i = 0; i < x->arrivals_count; i++)
        arrivals += x->arrivals[i].barrier == b;
    return b->waited && b->missing <= arrivals && loads + arrivals > 0;
}

static void land_all(qc_shim_async *x, barrier *b)
{
    size_t left = 0;
    for (size_t i = 0; i < x->arrivals_count; i++) {
        const arrival *a = &x->arrivals[i];
        if (a->barrier != b) {
            x->arrivals[left++] = *a;
            continue;
        }
        while (a->copies->landed < a->until)
            land_copy(a->copies, x->shared);
        arrive(x, b);
    }
    x->arrivals_count = left;
    left = 0;
    for (size_t i = 0; i < x->loads_count; i++)
        if (x->loads[i].barrier == b)
            land(x, &x->loads[i]);
        else
            x->loads[left++] = x->loads[i];
    x->loads_count = left;
}

int qc_shim_async_land(qc_shim_async *x, qc_shim_order_kind order, uint64_t *random)
{
    unsigned which[BARRIERS], n = 0;
    if (!x)
        return 0;
    for (unsigned i = 0; i < x->barriers_count; i++)
        if (can_land(x, &x->barriers[i]))
            which[n++] = i;
    if (!n)
        return 0;
    unsigned chosen = order == QC_SHIM_FORWARD   ? 0
                      : order == QC_SHIM_REVERSE ? n - 1
                                                 : (unsigned)(qc_shim_random(random) % n);
    barrier *b = &x->barriers[which[chosen]];
    UNSEEN_BEGIN();
    land_all(x, b);
    UNSEEN_END();
    if (b->bytes < 0)
        qc_shim_fault("bulk loads brought %" PRId64 " bytes more than were announced to the "
                      "mbarrier at offset %zu",
                      -b->bytes, offset_of(x, b->at));
    end_phase(b);
    return 1;
}

/* ---- products of a warpgroup ----------------------------------------------------------------- */

/* Copies the matrices of B that a descriptor means, as products see them. */
static void read_b(const qc_shim_async *x, const qc_shim_product *p, uint16_t *out)
{
    const uint64_t field = 0x3fff;
    if (p->b & ~(field | field << 16 | field << 32))
        qc_shim_fault("wgmma.mma_async: B's descriptor 0x%016" PRIx64 " has bits that "
                      "ptx_hopper.cuh does not set",
                      p->b);
    int64_t first = (int64_t)((p->b & field) << 4) - (int64_t)qc_shim_shared_begin;
    int64_t next_k = (int64_t)((p->b >> 16 & field) << 4);
    int64_t next_n = (int64_t)((p->b >> 32 & field) << 4);
    for (unsigned j = 0; j < p->n / 8; j++)
        for (unsigned h = 0; h < 2; h++) {
            int64_t at = first + h * next_k + j * next_n;
            if (at < 0 || at + MATRIX > (int64_t)x->shared_bytes)
                qc_shim_fault("wgmma.mma_async: matrix (%u, %u) of B is at offset %" PRId64
                              ", outside of the %zu bytes of shared memory",
                              h, j, at, x->shared_bytes);
            if (memcmp(x->shared + at, x->loaded + at, MATRIX))
                qc_shim_fault("threads wrote to B, to the 128 bytes at offset %" PRId64
                              ", and only bulk loads may",
                              at);
            memcpy(out + (2 * j + h) * (MATRIX / 2), x->loaded + at, MATRIX);
        }
}

/* Finds the sum of a warp that d is, or makes one and poisons d. */
static sum *sum_of(warp *w, void *const *args, unsigned n)
{
    const float *first = ((const step *)args[0])->product.d;
    size_t bytes = n / 2 * sizeof(float);
    for (sum *s = w->sums; s; s = s->next) {
        int same = s->n == n;
        for (unsigned lane = 0; lane < WARP; lane++)
            same &= s->d[lane] == ((const step *)args[lane])->product.d;
        if (same)
            return s;
        if (first < s->d[0] + s->n / 2 && s->d[0] < first + n / 2)
            qc_shim_fault("wgmma.mma_async: a part of D belongs to the D of another product that "
                          "was not waited for");
    }
    sum *s = room(sizeof(*s) + WARP * bytes);
    s->n = n;
    for (unsigned lane = 0; lane < WARP; lane++) {
        s->d[lane] = ((const step *)args[lane])->product.d;
        memcpy(s->value + lane * (n / 2), s->d[lane], bytes);
        memset(s->d[lane], POISON, bytes);
    }
    s->next = w->sums;
    return w->sums = s;
}

static void issue(const qc_shim_async *x, warpgroup *g, unsigned me, void *const *args)
{
    warp *w = &g->warps[me];
    const qc_shim_product *is = &((const step *)args[0])->product;
    product **p = &g->products[w->issued % AHEAD];
    if (!w->fenced)
        qc_shim_fault("wgmma.mma_async without a wgmma.fence since the last commit");
    if (!*p) {
        *p = room(sizeof(**p) + is->n / 8 * 2 * MATRIX);
        (*p)->is = *is;
        (*p)->group = w->committed;
        read_b(x, is, (*p)->b);
    }
    for (unsigned lane = 0; lane < WARP; lane++) {
        (*p)->a_at[me][lane] = ((const step *)args[lane])->product.a;
        memcpy((*p)->a[me][lane], (*p)->a_at[me][lane], 16);
    }
    (*p)->sum[me] = sum_of(w, args, is->n);
    (*p)->sum[me]->pending++;
    w->issued++;
}

/* Calculates a product that all four warps have started. */
static void calculate(const qc_shim_async *x, product *p)
{
    size_t bytes = p->is.n / 8 * 2 * MATRIX;
    uint16_t *b = room(bytes);
    read_b(x, &p->is, b);
    if (memcmp(b, p->b, bytes))
        qc_shim_fault("B was written while a product that reads it was under way");
    free(b);
    for (unsigned i = 0; i < WARPS; i++) {
        float *d = p->sum[i]->value;
        if (!p->is.add)
            memset(d, 0, WARP * (p->is.n / 2) * sizeof(*d));
        p->is.multiply(p->is.n, (const uint32_t(*)[4])p->a[i], p->b, d);
    }
    p->done = 1;
}

/* Gives a warp the sums that no product adds to any more. */
static void deliver(warp *w)
{
    for (sum **at = &w->sums; *at;) {
        sum *s = *at;
        if (s->pending) {
            at = &s->next;
            continue;
        }
        for (unsigned lane = 0; lane < WARP; lane++) {
            if (!poisoned(s->d[lane], s->n / 2 * sizeof(float)))
                qc_shim_fault("lane %u wrote to D before the product was waited for", lane);
            memcpy(s->d[lane], s->value + lane * (s->n / 2), s->n / 2 * sizeof(float));
        }
        *at = s->next;
        free(s);
    }
}

static uint64_t waited_for(const warp *w, unsigned pending)
{
    return w->committed > pending ? w->committed - pending : 0;
}

static void retire(const qc_shim_async *x, warpgroup *g, unsigned me, unsigned pending)
{
    warp *w = &g->warps[me];
    while (w->retired < w->issued) {
        product **at = &g->products[w->retired % AHEAD], *p = *at;
        if (p->group >= waited_for(w, pending))
            break;
        if (!p->done)
            calculate(x, p);
        for (unsigned lane = 0; lane < WARP; lane++)
            if (memcmp(p->a_at[me][lane], p->a[me][lane], 16))
                qc_shim_fault("lane %u wrote to A before the product was waited for", lane);
        p->sum[me]->pending--;
        w->retired++;
        if (++p->retired == WARPS) {
            *at = NULL;
            free(p);
        }
    }
    deliver(w);
}

static int alike(const step *a, const step *b)
{
    return a->kind == b->kind && a->count == b->count && !strcmp(a->what, b->what) &&
           a->product.n == b->product.n && a->product.b == b->product.b &&
           !a->product.add == !b->product.add;
}

static void describe(const step *s, char *text, size_t bytes)
{
    if (s->kind == PRODUCT)
        snprintf(text, bytes, "%s with n = %u, B 0x%" PRIx64 ", %s", s->what, s->product.n,
                 s->product.b, s->product.add ? "added" : "not added");
    else if (s->kind == WAIT || s->kind == REGISTERS)
        snprintf(text, bytes, "%s %u", s->what, s->count);
    else
        snprintf(text, bytes, "%s", s->what);
}

static void different(const char *who, const step *a, const step *b)
{
    char x[120], y[120];
    describe(a, x, sizeof(x));
    describe(b, y, sizeof(y));
    qc_shim_fault("%s do not do the same: %s, %s", who, x, y);
}

/* Sees to it that a warp's step is the one that the other warps did. */
static void follow(warpgroup *g, unsigned me, const step *s)
{
    warp *w = &g->warps[me];
    step *logged = &g->log[w->steps % AHEAD];
    if (w->steps == g->steps) {
        for (unsigned i = 0; i < WARPS; i++)
            if (g->steps - g->warps[i].steps >= AHEAD)
                qc_shim_fault("a warp is %d steps ahead of another in its warpgroup", AHEAD);
        *logged = *s;
        g->steps++;
    } else if (!alike(logged, s)) {
        different("the warps of a warpgroup", logged, s);
    }
    w->steps++;
}

static warpgroup *group_here(const char *what, qc_shim_async **x, unsigned *me)
{
    qc_shim_here h;
    *x = begin(what, &h);
    unsigned n = h.thread / (WARP * WARPS);
    if (h.threads < (n + 1) * WARP * WARPS)
        qc_shim_fault("%s in a warp that belongs to no warpgroup: the block has %u threads", what,
                      h.threads);
    *me = h.thread / WARP % WARPS;
    UNSEEN_BEGIN();
    if (!(*x)->groups[n])
        (*x)->groups[n] = room(sizeof(warpgroup));
    UNSEEN_END();
    return (*x)->groups[n];
}

/* All lanes have come to a step. */
static void take(void *const *args, unsigned mask)
{
    const step *s = args[0];
    qc_shim_async *x;
    unsigned me;
    warpgroup *g = group_here(s->what, &x, &me);
    warp *w = &g->warps[me];
    (void)mask;
    for (unsigned lane = 1; lane < WARP; lane++)
        if (!alike(s, args[lane]))
            different("the lanes of a warp", s, args[lane]);
    UNSEEN_BEGIN();
    follow(g, me, s);
    if (s->kind == FENCE)
        w->fenced = 1;
    else if (s->kind == PRODUCT)
        issue(x, g, me, args);
    else if (s->kind == COMMIT) {
        w->committed++;
        w->fenced = 0;
        qc_shim_wake(g);
    }
    UNSEEN_END();
}

/* All lanes have come, and the other warps have done what they wait for. */
static void take_wait(void *const *args, unsigned mask)
{
    const step *s = args[0];
    qc_shim_async *x;
    unsigned me;
    warpgroup *g = group_here(s->what, &x, &me);
    (void)mask;
    UNSEEN_BEGIN();
    retire(x, g, me, s->count);
    UNSEEN_END();
}

static void do_step(step *s)
{
    qc_shim_async *x;
    unsigned me;
    warpgroup *g = group_here(s->what, &x, &me);
    qc_shim_collect(s->what, 0xffffffffu, s, take);
    if (s->kind != WAIT)
        return;
    for (unsigned i = 0; i < WARPS; i++)
        while (g->warps[i].committed < waited_for(&g->warps[me], s->count))
            qc_shim_wait_for(g);
    qc_shim_collect(s->what, 0xffffffffu, s, take_wait);
}

void qc_shim_wgmma_fence(void)
{
    do_step(&(step){FENCE, .what = "wgmma.fence"});
}

void qc_shim_wgmma_commit(void)
{
    do_step(&(step){COMMIT, .what = "wgmma.commit_group"});
}

void qc_shim_wgmma_wait(unsigned pending)
{
    do_step(&(step){WAIT, "wgmma.wait_group", pending, .product.n = 0});
}

void qc_shim_wgmma(const qc_shim_product *p)
{
    do_step(&(step){PRODUCT, .what = "wgmma.mma_async", .product = *p});
}

/* How many there are is not known here: only that all four warps ask for the same. */
void qc_shim_registers(const char *what, unsigned count)
{
    do_step(&(step){REGISTERS, what, count, .product.n = 0});
}

/* ---- for shim_block.c ------------------------------------------------------------------------ */

void qc_shim_async_name(const qc_shim_async *x, const void *event, char *text, size_t bytes)
{
    if (!x) { /* nothing runs on its own here */
        snprintf(text, bytes, "a word of shared memory");
        return;
    }
    for (unsigned i = 0; i < x->barriers_count; i++) {
        const barrier *b = &x->barriers[i];
        if (b != event)
            continue;
        snprintf(text, bytes,
                 "phase %" PRIu64 " of the mbarrier at offset %zu, which lacks %u arrivals and "
                 "%" PRId64 " bytes",
                 b->phase, offset_of(x, b->at), b->missing, b->bytes);
        return;
    }
    snprintf(text, bytes, "other warps at wgmma.wait_group");
}

void qc_shim_async_thread_ends(const qc_shim_async *x, unsigned thread)
{
    const warpgroup *g = x ? x->groups[thread / (WARP * WARPS)] : NULL;
    const warp *w = g ? &g->warps[thread / WARP % WARPS] : NULL;
    if (w && w->retired < w->issued)
        qc_shim_fault("a thread ends, and its warp has not waited for a product");
}

void qc_shim_async_end(qc_shim_async *x)
{
    if (!x)
        return;
    if (x->loads_count)
        qc_shim_fault("the block ends, and nobody has waited for a bulk load to offset %zu of "
                      "shared memory",
                      offset_of(x, x->loads[0].to));
    UNSEEN_BEGIN();
    for (unsigned i = 0; i < GROUPS; i++)
        free(x->groups[i]);
    free(x->loads);
    free(x->arrivals);
    free(x->loaded);
    free(x);
    UNSEEN_END();
}

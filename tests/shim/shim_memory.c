/* Device and pinned memory of the shim. Every allocation lies by itself between pages that cannot
 * be touched, and ends at one, up to its alignment. What lies between its ends and those pages is
 * checked when it is freed.
 *
 *   | guard | margin | p ... p + bytes | slack < 256 | guard |
 *
 * Device memory cannot be touched at all except while kernels or copies of its device run. Then the
 * first access to an allocation opens it (on_signal), because a program may have hundreds of them
 * and a kernel uses only a few. Freed memory stays reserved for a while, so that a late access is
 * recognized. */
#include "shim_internal.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* The thread sanitizer takes each fibre for a thread. It would report that they share the stack on
 * which signals are handled, so with it all allocations are opened at once. */
#ifdef __SANITIZE_THREAD__
enum { OPENED_AT_ONCE = 1 };
#else
enum { OPENED_AT_ONCE = 0 };
#endif
enum { ALIGNMENT = 256, GUARD = 64 << 10, MOST = 1 << 14, QUARANTINE = 256 };

typedef struct {
    unsigned char *p, *pages; /* pages lie between the guards; NULL: not in use */
    size_t bytes, pages_bytes;
    int device;
    int freed;
    int allows;      /* PROT_NONE, PROT_READ, or PROT_READ | PROT_WRITE */
    unsigned number; /* the n-th allocation of the process */
} allocation;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static allocation table[MOST]; /* entries up to `used` may be in use */
static unsigned used, made, freed_ring[QUARANTINE], freed_next;
static uint64_t device_bytes[QC_SHIM_MAX_DEVICES];
static int open_count[QC_SHIM_MAX_DEVICES];
static int held[QC_SHIM_MAX_DEVICES];              /* whether it can only be read */
static __thread int held_here = QC_SHIM_UNKNOWN;   /* the device that this thread holds */
static __thread int opened_here = QC_SHIM_UNKNOWN; /* the device whose work this thread runs */
static __thread unsigned reached;                  /* a bit for each device; a copy may have two */

/* No byte of it is a byte of poison or zero, and no two of them read as a finite 16-bit float. */
static unsigned char canary(size_t i)
{
    return i % 4 == 0 ? 0xfd : i % 4 == 2 ? 0xfe : 0xff;
}

/* What the memory of a device, or pinned memory, allows now. */
static int allowed(int device)
{
    if (device < 0)
        return PROT_READ | PROT_WRITE;
    return !open_count[device] ? PROT_NONE : held[device] ? PROT_READ : PROT_READ | PROT_WRITE;
}

static void protect(allocation *a, int how)
{
    if (a->allows == how)
        return;
    if (mprotect(a->pages, a->pages_bytes, how))
        qc_shim_fault("mprotect of an allocation");
    a->allows = how;
}

/* ---- faults ---------------------------------------------------------------------------------- */

static const char *place_of(const allocation *a, char *text, size_t bytes)
{
    if (a->device == QC_SHIM_HOST)
        snprintf(text, bytes, "pinned allocation %u of %zu bytes", a->number, a->bytes);
    else
        snprintf(text, bytes, "allocation %u of %zu bytes on device %d", a->number, a->bytes,
                 a->device);
    return text;
}

static int explain_memory(const void *address, char *text, size_t bytes)
{
    const unsigned char *at = address;
    for (unsigned i = 0; i < used; i++) {
        const allocation *a = &table[i];
        char place[120];
        if (!a->pages || at < a->pages - GUARD || at >= a->pages + a->pages_bytes + GUARD)
            continue;
        place_of(a, place, sizeof(place));
        if (a->freed)
            snprintf(text, bytes, "touches %s after it was freed", place);
        else if (at < a->p)
            snprintf(text, bytes, "%zu bytes before %s", (size_t)(a->p - at), place);
        else if (at >= a->p + a->bytes)
            snprintf(text, bytes, "%zu bytes past the end of %s", (size_t)(at - (a->p + a->bytes)),
                     place);
        else if (opened_here >= 0 && a->device == held_here)
            snprintf(text, bytes, "writes to %s before qc_grid_wait", place);
        else if (opened_here >= 0)
            snprintf(text, bytes, "touches %s from device %d", place, opened_here);
        else
            snprintf(text, bytes, "host code touches byte %zu of %s", (size_t)(at - a->p), place);
        return 1;
    }
    return 0;
}

/* Handles the first access to an allocation: opens it, if it may be touched, so that the access is
 * made again. Returns 0 if it may not be touched. */
static int open_at(const void *address)
{
    const unsigned char *at = address;
    int opened = 0;
    if (!reached)
        return 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < used; i++) {
        allocation *a = &table[i];
        if (!a->pages || a->freed || a->device < 0 || !(reached >> a->device & 1u) ||
            at < a->pages || at >= a->pages + a->pages_bytes)
            continue;
        /* Another thread may have opened it meanwhile. What can only be read stays so, because then
         * the access was a write. */
        opened = a->allows != allowed(a->device) || a->allows & PROT_WRITE;
        protect(a, allowed(a->device));
        break;
    }
    pthread_mutex_unlock(&lock);
    return opened;
}

static void on_signal(int number, siginfo_t *info, void *context)
{
    (void)context;
    char text[300] = "", where[10];
    qc_shim_where(where, sizeof(where));
    int in_kernel = *where != 0;
    const void *at = info->si_addr;
    if (number == SIGSEGV && open_at(at))
        return;
    if (number == SIGSEGV || number == SIGBUS) {
        if (!explain_memory(at, text, sizeof(text)) &&
            !qc_shim_explain_block(at, text, sizeof(text)) && in_kernel) {
            if (info->si_code == SI_KERNEL)
                snprintf(text, sizeof(text), "a misaligned or impossible address");
            else
                snprintf(text, sizeof(text), "address %p, where the device has no memory", at);
        }
    } else if (in_kernel) {
        snprintf(text, sizeof(text), "%s",
                 number == SIGILL ? "a misaligned access, an index out of its array's bounds, or a "
                                    "shift by more than there are bits"
                                  : "an integer division by zero");
    }
    if (*text)
        qc_shim_fault("%s", text);
    /* The signal belongs to somebody else. */
    signal(number, SIG_DFL);
    raise(number);
}

static void watch_signals(void)
{
    static const int numbers[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
    static __thread int has_stack;
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
        /* Test frameworks take these signals over, test by test. */
        struct sigaction old, new = {0};
        sigaction(numbers[i], NULL, &old);
        if (old.sa_flags & SA_SIGINFO && old.sa_sigaction == on_signal)
            continue;
        new.sa_sigaction = on_signal;
        new.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        sigaction(numbers[i], &new, NULL);
    }
    if (!has_stack) {
        /* A fibre whose stack overflows has no stack left for the handler. This one is kept until
         * the process ends, because nothing says when a thread has run its last kernel. */
        enum { BYTES = 64 << 10 };
        stack_t now;
        if (!sigaltstack(NULL, &now) && now.ss_flags & SS_DISABLE) {
            void *p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (p != MAP_FAILED) {
                stack_t mine = {.ss_sp = p, .ss_size = BYTES};
                sigaltstack(&mine, NULL);
            }
        }
        has_stack = 1;
    }
}

/* ---- allocations ----------------------------------------------------------------------------- */

void *qc_shim_memory_new(size_t bytes, int device)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (bytes > SIZE_MAX / 4)
        return NULL;
    size_t room = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    size_t pages_bytes = (room + page - 1) / page * page;
    void *p = NULL;
    watch_signals();
    pthread_mutex_lock(&lock);
    if (device >= 0) {
        uint64_t limit = qc_shim_device_of(device)->memory_bytes;
        if (device_bytes[device] > limit || room > limit - device_bytes[device])
            goto done;
    }
    unsigned i = 0;
    while (i < used && table[i].pages)
        i++;
    if (i == MOST)
        qc_shim_fault("more than %d allocations", MOST);
    unsigned char *map = mmap(NULL, pages_bytes + 2 * GUARD, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED)
        goto done;
    allocation *a = &table[i];
    *a = (allocation){.pages = map + GUARD,
                      .bytes = bytes,
                      .pages_bytes = pages_bytes,
                      .device = device,
                      .number = ++made};
    a->p = a->pages + pages_bytes - room;
    a->allows = PROT_READ | PROT_WRITE;
    if (i == used)
        used++;
    if (mprotect(a->pages, pages_bytes, PROT_READ | PROT_WRITE)) {
        munmap(map, pages_bytes + 2 * GUARD);
        a->pages = NULL;
        goto done;
    }
    for (unsigned char *x = a->pages; x < a->p; x++)
        *x = canary((size_t)(x - a->pages));
    memset(a->p, 0xff, bytes);
    for (size_t x = bytes; x < room; x++)
        a->p[x] = canary(x - bytes);
    if (device >= 0)
        device_bytes[device] += room;
    if (device >= 0)
        protect(a, OPENED_AT_ONCE ? allowed(device) : PROT_NONE);
    p = a->p;
done:
    pthread_mutex_unlock(&lock);
    return p;
}

static void check_surroundings(const allocation *a)
{
    char place[120];
    place_of(a, place, sizeof(place));
    for (const unsigned char *x = a->pages; x < a->p; x++)
        if (*x != canary((size_t)(x - a->pages)))
            qc_shim_fault("the byte %zu before %s was written", (size_t)(a->p - x), place);
    for (const unsigned char *x = a->p + a->bytes; x < a->pages + a->pages_bytes; x++)
        if (*x != canary((size_t)(x - (a->p + a->bytes))))
            qc_shim_fault("the byte %zu past the end of %s was written",
                          (size_t)(x - (a->p + a->bytes)), place);
}

int qc_shim_memory_free(void *p, int host)
{
    int found = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < used && !found; i++) {
        allocation *a = &table[i];
        if (!a->pages || a->p != p || a->freed || (a->device == QC_SHIM_HOST) != host)
            continue;
        found = 1;
        protect(a, PROT_READ | PROT_WRITE);
        check_surroundings(a);
        /* New pages in the place of the old ones give the memory back. */
        if (mmap(a->pages, a->pages_bytes, PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
            qc_shim_fault("an allocation cannot be given back");
        a->freed = 1;
        if (a->device >= 0)
            device_bytes[a->device] -= (a->bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        unsigned *slot = &freed_ring[freed_next++ % QUARANTINE];
        if (freed_next > QUARANTINE) {
            allocation *old = &table[*slot];
            munmap(old->pages - GUARD, old->pages_bytes + 2 * GUARD);
            old->pages = NULL;
        }
        *slot = i;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

int qc_shim_memory_owner(const void *p, const void **base, size_t *bytes)
{
    int owner = QC_SHIM_UNKNOWN;
    const unsigned char *at = p;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < used; i++) {
        const allocation *a = &table[i];
        /* One byte past the end belongs to it too, so that an empty range there is nobody
         * else's. */
        if (!a->pages || a->freed || at < a->p || at > a->p + a->bytes)
            continue;
        owner = a->device;
        if (base)
            *base = a->p;
        if (bytes)
            *bytes = a->bytes;
        break;
    }
    pthread_mutex_unlock(&lock);
    if (owner != QC_SHIM_UNKNOWN || !p || !qc_shim_takes_any_memory())
        return owner;
    if (base)
        *base = p;
    if (bytes)
        *bytes = SIZE_MAX - (uintptr_t)p;
    return QC_SHIM_HOST;
}

/* Call this when what the device allows has changed. Allocations that allow more than that are
 * closed now; the first access opens the others. The caller holds the lock. */
static void allow_device(int device)
{
    int now = allowed(device);
    for (unsigned i = 0; i < used; i++) {
        allocation *a = &table[i];
        if (a->pages && !a->freed && a->device == device && (OPENED_AT_ONCE || a->allows & ~now))
            protect(a, now);
    }
}

static void change(int device, int by)
{
    pthread_mutex_lock(&lock);
    open_count[device] += by;
    held[device] = 0;
    allow_device(device);
    pthread_mutex_unlock(&lock);
}

void qc_shim_memory_hold(int device, int on)
{
    pthread_mutex_lock(&lock);
    held_here = on ? device : QC_SHIM_UNKNOWN;
    if (on ? open_count[device] == 1 : held[device]) {
        held[device] = on;
        allow_device(device);
    }
    pthread_mutex_unlock(&lock);
}

void qc_shim_memory_open(int device)
{
    watch_signals();
    change(device, 1);
    opened_here = device;
    reached |= 1u << device;
}

void qc_shim_memory_close(int device)
{
    opened_here = QC_SHIM_UNKNOWN;
    reached &= ~(1u << device);
    change(device, -1);
}

uint64_t qc_shim_memory_used(int device)
{
    pthread_mutex_lock(&lock);
    uint64_t bytes = device_bytes[device];
    pthread_mutex_unlock(&lock);
    return bytes;
}

size_t qc_shim_allocations(uint64_t *bytes)
{
    size_t count = 0;
    uint64_t sum = 0;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < used; i++)
        if (table[i].pages && !table[i].freed) {
            count++;
            sum += table[i].bytes;
        }
    pthread_mutex_unlock(&lock);
    if (bytes)
        *bytes = sum;
    return count;
}

/* Fibres are the threads of a CUDA block: stacks that one host thread switches between.
 *
 * On x86-64 a switch saves the registers that the ABI makes the callee keep, and changes the stack
 * pointer; elsewhere ucontext does it. Stacks are mapped once per host thread, with a guard page
 * below, and are used again for every block that follows. The sanitizers are told of each switch.
 * To the thread sanitizer every fibre is a thread, and only what the barriers say orders it with
 * another (shim_block.c), so it finds races inside of a block. This file and shim_block.c are built
 * without it, because they share data between fibres as they please. */
#include "shim_internal.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__) && !defined(QC_SHIM_UCONTEXT)
#define QC_SHIM_ASM 1
#else
#include <ucontext.h>
#endif

#ifdef QC_SHIM_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef QC_SHIM_TSAN
#include <sanitizer/tsan_interface.h>
#endif

enum { SLOTS = QC_SHIM_FIBRES };
/* Stacks are this large because sanitized frames are larger. Only what is used is ever in
 * memory. */
#define STACK_BYTES ((size_t)256 << 10)
#define GUARD_BYTES ((size_t)64 << 10)
/* Stacks are a large power of two apart, so that without this the frames of all lanes of a warp
 * would share the few places of the caches that go with such addresses. */
enum { COLOURS = 64, COLOUR_BYTES = 192 };

struct qc_shim_fibre {
    unsigned char *stack; /* STACK_BYTES, above GUARD_BYTES that cannot be touched */
    unsigned char *top;   /* where it begins; it grows downwards */
#ifdef QC_SHIM_ASM
    void *sp;
#else
    ucontext_t context;
    void (*entry)(void);
#endif
    void *fake_stack;
    void *tsan;
};

typedef struct {
    qc_shim_fibre *fibres[SLOTS];
    /* these are the scheduler's, while a fibre runs */
#ifdef QC_SHIM_ASM
    void *sp;
#else
    ucontext_t context;
#endif
    void *fake_stack, *tsan;
    const void *stack;
    size_t stack_bytes;
} pool;

static pthread_key_t pool_key;
static pthread_once_t pool_once = PTHREAD_ONCE_INIT;
static __thread pool *my_pool;

static void free_pool(void *p)
{
    pool *x = p;
    for (unsigned i = 0; i < SLOTS; i++) {
        if (!x->fibres[i])
            continue;
#ifdef QC_SHIM_TSAN
        __tsan_destroy_fiber(x->fibres[i]->tsan);
#endif
        munmap(x->fibres[i]->stack - GUARD_BYTES, STACK_BYTES + GUARD_BYTES);
        free(x->fibres[i]);
    }
    free(x);
    my_pool = NULL;
    qc_shim_thread_ends();
}

static void make_key(void)
{
    if (pthread_key_create(&pool_key, free_pool))
        qc_shim_fault("no key for the stacks");
}

static void free_at_exit(void)
{
    if (my_pool)
        free_pool(my_pool);
}

qc_shim_fibre *qc_shim_fibre_get(unsigned slot)
{
    if (!my_pool) {
        pthread_once(&pool_once, make_key);
        my_pool = calloc(1, sizeof(*my_pool));
        if (!my_pool || pthread_setspecific(pool_key, my_pool))
            qc_shim_fault("no memory for fibres");
        /* The keys of the main thread are not destroyed. */
        if (getpid() == (pid_t)gettid())
            atexit(free_at_exit);
    }
    if (!my_pool->fibres[slot]) {
        qc_shim_fibre *f = calloc(1, sizeof(*f));
        void *p = mmap(NULL, STACK_BYTES + GUARD_BYTES, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
        if (!f || p == MAP_FAILED ||
            mprotect((unsigned char *)p + GUARD_BYTES, STACK_BYTES, PROT_READ | PROT_WRITE))
            qc_shim_fault("no memory for the stack of a fibre");
        f->stack = (unsigned char *)p + GUARD_BYTES;
        f->top = f->stack + STACK_BYTES - slot % COLOURS * COLOUR_BYTES;
#ifdef QC_SHIM_TSAN
        f->tsan = __tsan_create_fiber(0);
#endif
        my_pool->fibres[slot] = f;
    }
    return my_pool->fibres[slot];
}

int qc_shim_fibre_overflows(const qc_shim_fibre *f, const void *p)
{
    return (const unsigned char *)p < f->stack &&
           (const unsigned char *)p >= f->stack - GUARD_BYTES;
}

/* The frames at the top of the stack did not return the last time. */
static void forget_frames(qc_shim_fibre *f)
{
    f->fake_stack = NULL;
#ifdef QC_SHIM_ASAN
    enum { TOP = 8192 };
    __asan_unpoison_memory_region(f->top - TOP, TOP);
#endif
}

#ifdef QC_SHIM_ASM
/* Saves on the stack what a callee has to keep, stores the stack pointer in *from, and goes on with
 * `to`, a stack pointer that was stored in the same way. */
void qc_shim_switch(void **from, void *to);
__asm__(".text\n"
        ".globl qc_shim_switch\n"
        ".hidden qc_shim_switch\n"
        ".type qc_shim_switch, @function\n"
        "qc_shim_switch:\n"
        "    pushq %rbp\n"
        "    pushq %rbx\n"
        "    pushq %r12\n"
        "    pushq %r13\n"
        "    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n"
        "    popq %r14\n"
        "    popq %r13\n"
        "    popq %r12\n"
        "    popq %rbx\n"
        "    popq %rbp\n"
        "    ret\n"
        ".size qc_shim_switch, . - qc_shim_switch\n");

void qc_shim_fibre_start(qc_shim_fibre *f, void (*entry)(void))
{
    forget_frames(f);
    /* The stack looks as if entry had been called: it has a return address, which is never used,
     * and was aligned to 16 before the call. Then comes what the switch pops. */
    void **sp = (void **)(void *)f->top;
    *--sp = NULL;
    memcpy(--sp, &entry, sizeof(entry));
    for (int i = 0; i < 6; i++)
        *--sp = NULL;
    f->sp = sp;
}
#else
void qc_shim_fibre_start(qc_shim_fibre *f, void (*entry)(void))
{
    forget_frames(f);
    if (getcontext(&f->context))
        qc_shim_fault("getcontext");
    f->context.uc_stack.ss_sp = f->stack;
    f->context.uc_stack.ss_size = (size_t)(f->top - f->stack);
    f->context.uc_link = NULL;
    makecontext(&f->context, entry, 0);
}
#endif

void qc_shim_fibre_enter(qc_shim_fibre *f)
{
    pool *p = my_pool;
#ifdef QC_SHIM_ASAN
    __sanitizer_start_switch_fiber(&p->fake_stack, f->stack, STACK_BYTES);
#endif
#ifdef QC_SHIM_TSAN
    p->tsan = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(f->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef QC_SHIM_ASM
    qc_shim_switch(&p->sp, f->sp);
#else
    swapcontext(&p->context, &f->context);
#endif
#ifdef QC_SHIM_ASAN
    __sanitizer_finish_switch_fiber(p->fake_stack, NULL, NULL);
#endif
}

void qc_shim_fibre_leave(qc_shim_fibre *f, int last)
{
    pool *p = my_pool;
    (void)last;
#ifdef QC_SHIM_ASAN
    __sanitizer_start_switch_fiber(last ? NULL : &f->fake_stack, p->stack, p->stack_bytes);
#endif
#ifdef QC_SHIM_TSAN
    __tsan_switch_to_fiber(p->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef QC_SHIM_ASM
    qc_shim_switch(&f->sp, p->sp);
#else
    swapcontext(&f->context, &p->context);
#endif
    qc_shim_fibre_entered(f);
}

void qc_shim_fibre_entered(qc_shim_fibre *f)
{
    (void)f;
#ifdef QC_SHIM_ASAN
    __sanitizer_finish_switch_fiber(f->fake_stack, &my_pool->stack, &my_pool->stack_bytes);
#endif
}

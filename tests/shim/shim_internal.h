/* The CPU shim: an ordinary C++ compiler runs CUDA kernels, so that they can be tested without a
 * GPU.
 *
 * kernels/ *.cu are compiled as C++17 with QC_CUDA_SHIM. include/shim_launch.h gives the words of
 * the CUDA language a meaning, and include/shim_ptx.h the wrappers of kernels/ptx.cuh. The files
 * here are a CUDA runtime without a GPU:
 *
 *   - shim_fibre.c   stacks, and the switch from one to another
 *   - shim_block.c   a grid, block by block: one fibre per thread, barriers, collectives
 *   - shim_async.c   what runs on its own: cp.async; for sm_90a bulk loads, products of a warpgroup
 *   - shim_memory.c  device and pinned memory between guard pages; who touched what it must not
 *   - shim_device.c  devices, their properties, errors, configuration
 *   - shim_stream.c  streams, events
 *   - shim_copy.c    memory, copies, launches
 *   - shim_graph.c   graphs
 *
 * The shim is an adversary: where CUDA leaves something open, it does what hurts most.
 *  - Threads. A warp runs alone until all its threads wait at a barrier of the block; then the next
 *    warp runs. Within a warp a lane runs alone until it waits. So a warp is as far ahead of
 *    another as the barriers allow, and a missing barrier shows as poison or as data of the wrong
 *    round, in one order or another: forward, reverse, or shuffled anew after every barrier.
 *  - Shared memory is all ones (NaN) when a block starts, and it ends at a guard page.
 *  - cp.async poisons its destination when it starts and copies when somebody waits for it. These
 *    are the two ends of what hardware may do. What was written there in between is an error, also
 *    where nobody waits until the block ends. ldmatrix reads the row that a lane names when that
 *    lane arrives.
 *  - What sm_90a runs on its own happens as late as it may, and what it reads and writes must stay
 *    as it was meanwhile (shim_async.c).
 *  - Device memory is all ones when it is allocated, ends at a guard page, and can be touched only
 *    by kernels and copies of its own device. Host code that reaches into it gets a signal, as it
 *    would with a GPU.
 *  - A block that publishes something (qc_add_acq_rel) stops right there and lets others of its
 *    grid run, so that what it has not written by then is missing there.
 *  - Streams do nothing until somebody waits.
 *  - A kernel that is launched to overlap (programmatic dependent launch) begins before the kernel
 *    in front of it in the stream or graph does: some of its blocks run up to qc_grid_wait, see
 *    memory as it was, and must not write to it. They go on when the other kernel has ended. A
 *    thread that ends without having waited is an error.
 *
 * An error of a kernel (divergent barriers, a lane that is missing from a collective, memory out of
 * bounds, misaligned addresses) ends the process by abort(), after one line on stderr that names
 * kernel, block and thread. On a GPU it would be a hang or garbage; here nothing after it would
 * mean anything.
 *
 * The shim cannot show: how hardware adds up inside a matrix product (shim_ptx.h); memory order
 * within a warp after a collective that is not a barrier (a shuffle here also orders memory, unless
 * the thread sanitizer is in, see shim_block.c); blocks at the same time (they run one after
 * another except for the stops above, so a kernel may not wait for another block); registers; and
 * speed.
 *
 * Every function may be called from any thread. A kernel runs in the thread that waits for it, and
 * several can run at once in different threads. The state of a running kernel is thread-local. */
#ifndef QC_SHIM_INTERNAL_H
#define QC_SHIM_INTERNAL_H

#include "shim_control.h"
#include "shim_thread.h"

#include <cuda_runtime_api.h>
#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__)
#define QC_SHIM_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define QC_SHIM_ASAN 1
#endif
#endif
/* QC_SHIM_TSAN comes from CMake: some of the files are built without the thread sanitizer. */
#ifdef QC_SHIM_TSAN
#include <sanitizer/tsan_interface.h>
#define QC_SHIM_RELEASE(p) __tsan_release(p)
#define QC_SHIM_ACQUIRE(p) __tsan_acquire(p)
#else
#define QC_SHIM_RELEASE(p) ((void)(p))
#define QC_SHIM_ACQUIRE(p) ((void)(p))
#endif

/* ---- fibres ---------------------------------------------------------------------------------- */

typedef struct qc_shim_fibre qc_shim_fibre;
/* Returns a fibre with a stack, which is pooled per host thread; never NULL. `slot` is below
 * QC_SHIM_FIBRES. */
enum { QC_SHIM_FIBRES = 7 * 1024 };
qc_shim_fibre *qc_shim_fibre_get(unsigned slot);
/* The next switch to f calls entry() on f's stack from its top; entry must not return. */
void qc_shim_fibre_start(qc_shim_fibre *f, void (*entry)(void));
/* Switches from the scheduler to f, and back to the scheduler. With `last`, f will never be
 * switched to again without a new start. */
void qc_shim_fibre_enter(qc_shim_fibre *f);
void qc_shim_fibre_leave(qc_shim_fibre *f, int last);
/* This is the first thing that entry calls. */
void qc_shim_fibre_entered(qc_shim_fibre *f);
/* Whether p lies in the guard page below f's stack. */
int qc_shim_fibre_overflows(const qc_shim_fibre *f, const void *p);

/* ---- a grid ---------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    int device;
    unsigned sm, code;
    int overlaps; /* launched to overlap the kernel before it in the stream */
    unsigned grid[3], block[3];
    size_t shared_bytes;
    void (*call)(const void *closure); /* the kernel with its arguments, for one thread */
    const void *closure;
} qc_shim_grid;
/* Kernels that follow one another in a stream; all but the first overlap the one before them. */
void qc_shim_run_grids(const qc_shim_grid *const *g, size_t count);
/* Gives back what the calling thread kept for its next block. */
void qc_shim_thread_ends(void);

/* The cp.async of a thread. */
typedef struct {
    void *shared;
    const void *global;
    unsigned size, bytes; /* written, and read: as many or 0 */
    uint64_t group;
} qc_shim_copy;
typedef struct {
    qc_shim_copy *list; /* those from `first` to `count` are under way */
    size_t first, count, room;
    uint64_t groups, landed; /* how many were committed, and have landed */
} qc_shim_copies;

/* Where the running thread is; ends the process outside of kernels. */
typedef struct qc_shim_async qc_shim_async;
typedef struct {
    const qc_shim_grid *grid;
    unsigned threads, thread; /* of the block, and which of them this is */
    unsigned char *shared;
    qc_shim_async **async; /* of the block; NULL in it until it is needed */
    qc_shim_copies *copies;
} qc_shim_here;
qc_shim_here qc_shim_get_here(void);
/* The thread waits until somebody in its block calls wake with the same pointer, which
 * qc_shim_async_name has words for. */
void qc_shim_wait_for(const void *event);
void qc_shim_wake(const void *event);

/* "kernel nf4_quantize, block (3,0,0), thread (17,0,0)", or "" where none is running. */
void qc_shim_where(char *text, size_t bytes);
/* Explains where a fault address lies in the running block. Returns 0 if it lies nowhere there. */
int qc_shim_explain_block(const void *p, char *text, size_t bytes);

/* ---- memory ---------------------------------------------------------------------------------- */

enum { QC_SHIM_HOST = -1, QC_SHIM_UNKNOWN = -2 }; /* besides device numbers */

/* Returns NULL if there is no room. `device` is QC_SHIM_HOST for pinned memory. */
void *qc_shim_memory_new(size_t bytes, int device);
/* Returns 0 if p is not what memory_new gave for such a place. Ends the process if p's surroundings
 * were written to. */
int qc_shim_memory_free(void *p, int host);
/* Who owns p. *base and *bytes (which may be NULL) get those of the allocation. */
int qc_shim_memory_owner(const void *p, const void **base, size_t *bytes);
/* While kernels or copies of a device run, its memory can be touched. Calls nest. */
void qc_shim_memory_open(int device); /* also sees to it that faults are explained */
void qc_shim_memory_close(int device);
/* While `on` is 1, memory of a device that is open can only be read, unless other threads use it
 * too. */
void qc_shim_memory_hold(int device, int on);
uint64_t qc_shim_memory_used(int device);

/* ---- devices --------------------------------------------------------------------------------- */

typedef struct {
    unsigned sm, multiprocessors;
    uint64_t memory_bytes;
    size_t shared_optin_bytes, shared_sm_bytes;
} qc_shim_device;
enum { QC_SHIM_MAX_DEVICES = 16 };

const qc_shim_device *qc_shim_device_of(int device);
/* The capability for which the device's kernels seem to be compiled: QC_SHIM_CODE. */
unsigned qc_shim_code_of(int device);
/* Whether memory of other allocators counts as pinned (QC_SHIM_MEMORY=any). */
int qc_shim_takes_any_memory(void);
/* Remembers an error as CUDA does, and returns it. */
cudaError_t qc_shim_error(cudaError_t code);
/* cudaSuccess, or why this process has no current device. */
cudaError_t qc_shim_current(int *device);
int qc_shim_malloc_fails(void);
/* The error with which a launch is refused for a test's sake. */
cudaError_t qc_shim_launch_error(const char *name);
/* Whether a launch that was not refused does nothing (QC_SHIM_SKIP). */
int qc_shim_launch_skipped(const char *name);
/* Whether the device has died (QC_SHIM_DIE_AT). */
int qc_shim_is_dead(void);
/* The most dynamic shared memory that a kernel may have on a device. */
size_t qc_shim_shared_limit(const void *function, int device);
/* Notes a launch of the kernel, for qc_shim_last_carveout. */
void qc_shim_note_launch(const void *function, int device);

typedef enum { QC_SHIM_FORWARD, QC_SHIM_REVERSE, QC_SHIM_SHUFFLE } qc_shim_order_kind;
typedef struct {
    qc_shim_order_kind kind;
    uint64_t seed;
} qc_shim_order;
qc_shim_order qc_shim_get_order(void);
/* ---- what runs on its own -------------------------------------------------------------------- */

/* Copies that were never waited for land now. Nobody reads them any more. */
void qc_shim_copies_end(qc_shim_copies *c, const unsigned char *shared_memory);
/* Nobody in the block can run: what a thread waits for at a barrier lands. Returns 0 if there is
 * nothing (x may be NULL). */
int qc_shim_async_land(qc_shim_async *x, qc_shim_order_kind order, uint64_t *random);
void qc_shim_async_name(const qc_shim_async *x, const void *event, char *text, size_t bytes);
/* End the process if something was not waited for. */
void qc_shim_async_thread_ends(const qc_shim_async *x, unsigned thread);
void qc_shim_async_end(qc_shim_async *x);

typedef enum { QC_SHIM_LAZY, QC_SHIM_EAGER, QC_SHIM_MIXED } qc_shim_stream_kind;
/* With MIXED, *random gets the next number of the sequence. */
qc_shim_stream_kind qc_shim_get_streams(uint64_t *random);
int qc_shim_streams_exist(void);

/* Runs everything that was given to a device so far, or to all devices with QC_SHIM_HOST. */
void qc_shim_drain_device(int device);

static inline uint64_t qc_shim_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

#endif

/* What a kernel on the CPU shim sees of the thread it is, and the calls its language is made of. C
 * and C++. */
#ifndef QC_SHIM_THREAD_H
#define QC_SHIM_THREAD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    unsigned x, y, z;
} qc_shim_index;

struct qc_shim_block;

/* The public part of a thread; shim_block.c knows the rest. */
typedef struct qc_shim_thread {
    qc_shim_index thread, block, block_dim, grid_dim;
    unsigned lane;
    struct qc_shim_block *in;
} qc_shim_thread;

/* The thread that runs; NULL outside of kernels. */
extern __thread qc_shim_thread *qc_shim_self;

/* Ends the process: "qconv shim: <text>: kernel ..., block ..., thread ...". */
void qc_shim_fault(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

enum { QC_SHIM_COUNT, QC_SHIM_AND, QC_SHIM_OR };
/* All live threads of the block have to come to the same line. Returns how many said yes (COUNT),
 * or whether all or any did. */
int qc_shim_syncthreads(const char *file, int line, int kind, int predicate);

/* A warp collective: the lanes of mask meet; the last one to arrive calls compute(args, mask), args
 * indexed by lane; then all go on. kind says in words what it is ("__shfl_sync"); all lanes have to
 * be at the same kind with the same mask. Each lane's arg lives until it is back. */
void qc_shim_collect(const char *kind, unsigned mask, void *arg,
                     void (*compute)(void *const *args, unsigned mask));

/* The block's dynamic shared memory, as launched; at least bytes of it. */
void *qc_shim_shared(size_t bytes, size_t alignment);
/* Where that lies in the addresses of shared memory (qc_shim_set_shared_begin). */
extern unsigned qc_shim_shared_begin;
/* Ends the process unless p is aligned and [p, p + bytes) lies in the block's shared memory. */
void qc_shim_check_shared(const char *what, const void *p, size_t bytes);
/* As qc_shared_wait and qc_shared_set of kernels/ptx.cuh. */
void qc_shim_shared_wait(const uint32_t *word, uint32_t value);
void qc_shim_shared_set(uint32_t *word, uint32_t value);
/* Ends the process unless the running device is at least this. */
void qc_shim_need_sm(const char *what, unsigned sm);

/* As qc_grid_wait and qc_grid_release of kernels/ptx.cuh. */
void qc_shim_grid_wait(void);
/* Stops the thread's block, so that others of the grid run first. */
void qc_shim_pause(void);
void qc_shim_grid_release(void);

/* Writes `size` bytes, read from global memory, or zeros where `bytes` is 0. */
void qc_shim_cp_async(void *shared, const void *global, unsigned size, unsigned bytes);
void qc_shim_cp_commit(void);
void qc_shim_cp_wait(unsigned pending);

/* As the wrappers of kernels/ptx_hopper.cuh. */
void qc_shim_mbarrier_init(uint64_t *barrier, uint32_t count);
void qc_shim_mbarrier_ready(void);
/* Announces bytes first, which may be 0. */
void qc_shim_mbarrier_arrive(uint64_t *barrier, uint32_t bytes);
/* Once this thread's cp.async so far are there. */
void qc_shim_mbarrier_arrive_copied(uint64_t *barrier);
void qc_shim_mbarrier_wait(uint64_t *barrier, uint32_t parity);
void qc_shim_bulk_load(void *shared, const void *global, uint32_t bytes, uint64_t *barrier);

/* What a thread gives to a product. a and d stay where they are until the thread has waited. */
typedef struct {
    unsigned n;
    int add;
    uint64_t b; /* descriptor */
    const uint32_t *a;
    float *d;
    /* d += a b for a warp: the registers of its lanes one behind the other, and B's matrices, those
     * with the same columns side by side. */
    void (*multiply)(unsigned n, const uint32_t (*a)[4], const uint16_t *b, float *d);
} qc_shim_product;
void qc_shim_wgmma_fence(void);
void qc_shim_wgmma(const qc_shim_product *p);
void qc_shim_wgmma_commit(void);
void qc_shim_wgmma_wait(unsigned pending);
void qc_shim_registers(const char *what, unsigned count);

/* Most blocks in x, and in y, that kernels which go on in steps of the grid are started with. */
unsigned qc_shim_grid_most(void);
/* Gives a launch to a stream. closure is copied. overlaps: it may begin before the kernel in front
 * of it has ended. Errors: cudaGetLastError. */
void qc_shim_launch(const char *name, const void *function, const unsigned grid[3],
                    const unsigned block[3], size_t shared_bytes, void *stream, int overlaps,
                    void (*call)(const void *closure), const void *closure, size_t closure_bytes);
/* Ends the process if p can be no kernel's argument: neither of the current device nor pinned. */
void qc_shim_check_argument(const char *kernel, unsigned index, const void *p);

#ifdef __cplusplus
}
#endif
#endif

/* What tests ask of the CPU shim beside the CUDA runtime. Not there in a build with real CUDA.
 *
 * The environment, read when the shim is first used:
 *   QC_SHIM_DEVICES      "sm_90:132:8GiB,sm_70:80:512MiB": capability, multiprocessors, memory;
 *                        "none": no device; "nodriver": no driver; "olddriver": one of CUDA 10.2.
 *                        Default: one sm_90:132:4GiB
 *   QC_SHIM_CODE         80: on every device the kernels are as if the driver had compiled them
 *                        from compute_80's PTX, so newer instructions are left out of them.
 *                        Default: as the device
 *   QC_SHIM_ORDER        "forward", "reverse" or "shuffle:SEED": in which order the threads of a
 *                        block run between barriers, and the blocks of a grid. Default: shuffle:1
 *   QC_SHIM_STREAMS      "lazy": work runs when somebody waits for it; "eager": at once;
 *                        "shuffle:SEED": some of it, of any stream, whenever the runtime is called.
 *                        Default: lazy
 *   QC_SHIM_GRID         N: kernels that go on in steps of the grid are started with N blocks in x
 *                        and in y at most, so that they do. Default: what CUDA allows
 *   QC_SHIM_FAIL_LAUNCH  NAME:N: the N-th launch of kernels whose name has NAME in it is refused
 *                        with cudaErrorLaunchOutOfResources, once
 *   QC_SHIM_SKIP         NAME:N: this launch, too, and all later ones of such kernels do nothing,
 *                        wherever they are replayed
 *   QC_SHIM_DIE_AT       NAME:N: with this launch the device dies: from then on launches, and
 *                        whatever is asked of a stream, are answered with cudaErrorIllegalAddress
 *   QC_SHIM_FAIL_MALLOC  N: the N-th cudaMalloc or cudaHostAlloc fails, once */
#ifndef QC_SHIM_CONTROL_H
#define QC_SHIM_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* As the variables; a text that is not understood ends the process. Devices: only while nothing is
 * allocated and no stream exists. */
void qc_shim_set_devices(const char *text);
void qc_shim_set_order(const char *text);
/* 0: the default. */
void qc_shim_set_code(unsigned sm);
void qc_shim_set_streams(const char *text);
/* 0: the default. */
void qc_shim_set_grid(unsigned most);
/* A block's own shared memory begins at this address, behind what the driver keeps; default 1024.
 * Only while no kernel runs. */
void qc_shim_set_shared_begin(unsigned bytes);
/* The n-th allocation from now fails, once; 0: none. */
void qc_shim_fail_malloc(unsigned n);
/* The n-th launch from now is refused with cudaErrorLaunchOutOfResources, once; 0: none. */
void qc_shim_fail_launch(unsigned n);
/* Percent of a multiprocessor's shared memory that the kernel launched last prefers; -1: the
 * driver's choice. */
int qc_shim_last_carveout(void);
/* A block's own shared memory begins at this address, behind what the driver keeps; default 1024.
 * Only while no kernel runs. */
void qc_shim_set_shared_begin(unsigned bytes);
/* Blocks of memory, device and pinned, that are allocated now, and their bytes. */
size_t qc_shim_allocations(uint64_t *bytes);
/* Kernels run so far, in all threads. */
uint64_t qc_shim_kernels_run(void);

/* For libraries that stand in for cuBLAS: run call(copy of arg) on a stream as a kernel would, with
 * the device's memory in reach. Default visibility, found with dlsym. Returns a cudaError_t. */
__attribute__((visibility("default"))) int qc_shim_enqueue(void *stream, const char *name,
                                                           void (*call)(void *), const void *arg,
                                                           size_t arg_bytes);

#ifdef __cplusplus
}
#endif
#endif

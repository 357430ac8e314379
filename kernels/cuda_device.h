/* The GPUs of this process: devices, memory, streams, events, copies and graphs, as thin C calls
 * over the CUDA runtime that return a qc_status. Nothing here includes CUDA, so every layer may use
 * it.
 *
 * A program linked with these starts on a machine without driver or GPU: qc_cuda_device_count()
 * then gives 0 and the reason.
 *
 * Errors: QC_ERR_NOMEM when the device (or, for pinned memory, the host) has no room; QC_ERR_DEVICE
 * when there is no such device or driver; QC_ERR_INTERNAL for everything else, with what was tried
 * and CUDA's name and words for it. After an illegal access CUDA answers every call with that
 * error: it "sticks" until the process ends.
 *
 * Threads: every function may be called from any thread. Memory, streams and events belong to the
 * device that was current (qc_cuda_use) in the thread that made them, and work is started with that
 * device current. Nothing here uses the default stream. */
#ifndef QC_KERNELS_CUDA_DEVICE_H
#define QC_KERNELS_CUDA_DEVICE_H

#include "base/status.h"

/* These stand around the declarations of the headers in kernels/, which C++ includes, too. */
#ifdef __cplusplus
#define QC_C_BEGIN extern "C" {
#define QC_C_END   }
#else
#define QC_C_BEGIN
#define QC_C_END
#endif

QC_C_BEGIN

/* What CUDA's headers call cudaStream_t, cudaEvent_t and cudaGraphExec_t. */
typedef struct CUstream_st *qc_cuda_stream;
typedef struct CUevent_st *qc_cuda_event;
typedef struct CUgraphExec_st *qc_cuda_graph;

typedef struct {
    int index;      /* as CUDA counts, after CUDA_VISIBLE_DEVICES */
    char name[128]; /* "NVIDIA H200" */
    char pci[16];   /* "0000:0a:00.0" */
    unsigned sm;    /* compute capability times ten: 70, 80, 86, 90 */
    uint32_t code;  /* the virtual architecture, in the same form, that this device's kernels
                       were compiled for; it decides what they do behind #if QC_ARCH. 80 if the
                       driver made them from compute_80's PTX, whatever the device */
    unsigned multiprocessors;
    uint64_t memory_bytes;
    uint64_t l2_bytes;
    uint32_t shared_block_bytes;          /* most shared memory that a thread block can opt in to */
    uint32_t shared_multiprocessor_bytes; /* of all blocks on a multiprocessor */
    uint32_t warps_multiprocessor;        /* that can be resident */
    int driver_version, runtime_version;  /* 13000 for 13.0 */
} qc_cuda_device;

/* Returns what the kernels were built with and for: "CUDA 13.0: sm_75 sm_80 ...". */
QC_API const char *qc_cuda_build(void);
/* Sets *count to the number of devices. 0 is not an error: why (unless NULL) then holds a sentence,
 * e.g. "the NVIDIA driver was not found". Never fails. */
QC_API void qc_cuda_device_count(int *count, char *why, size_t why_bytes);
/* Returns QC_OK where there is a GPU and a driver that is new enough for this build. QC_ERR_DEVICE
 * says in a sentence what is missing: GPU, driver, or its version, and the one that it takes. */
QC_API QC_NODISCARD qc_status qc_cuda_usable(qc_error *err);
/* Gives the facts of device `index`; asked once, cheap to keep. QC_ERR_DEVICE if there is no such
 * device, or if this build has no code for its compute capability. The calling thread's device
 * stays current. */
QC_API QC_NODISCARD qc_status qc_cuda_device_open(qc_cuda_device *out, int index, qc_error *err);
/* Makes this the calling thread's device. */
QC_API QC_NODISCARD qc_status qc_cuda_use(const qc_cuda_device *device, qc_error *err);
/* Gives the calling thread's device, as CUDA counts; the first one if the thread never chose
 * any. */
QC_API QC_NODISCARD qc_status qc_cuda_current(int *index, qc_error *err);
/* Gives the memory of the current device. */
QC_API QC_NODISCARD qc_status qc_cuda_memory(uint64_t *free_bytes, uint64_t *total_bytes,
                                             qc_error *err);

/* Gives device memory, aligned to 256 bytes; bytes == 0 gives NULL. free accepts NULL. out is the
 * address of a pointer of any type, which becomes NULL on failure. */
QC_API QC_NODISCARD qc_status qc_cuda_malloc(void *out, size_t bytes, qc_error *err);
QC_API void qc_cuda_free(void *p);
/* Gives pinned host memory: copies to and from it need no intermediate copy. */
QC_API QC_NODISCARD qc_status qc_cuda_host_malloc(void *out, size_t bytes, qc_error *err);
QC_API void qc_cuda_host_free(void *p);
#define qc_cuda_malloc(out, bytes, err)      qc_cuda_malloc(QC_POINTER_AT(out), bytes, err)
#define qc_cuda_host_malloc(out, bytes, err) qc_cuda_host_malloc(QC_POINTER_AT(out), bytes, err)

QC_API QC_NODISCARD qc_status qc_cuda_stream_create(qc_cuda_stream *out, qc_error *err);
QC_API void qc_cuda_stream_destroy(qc_cuda_stream s);
QC_API QC_NODISCARD qc_status qc_cuda_stream_synchronize(qc_cuda_stream s, qc_error *err);
/* timing is 1 for qc_cuda_event_elapsed; 0 costs less. */
QC_API QC_NODISCARD qc_status qc_cuda_event_create(qc_cuda_event *out, int timing, qc_error *err);
QC_API void qc_cuda_event_destroy(qc_cuda_event e);
QC_API QC_NODISCARD qc_status qc_cuda_event_record(qc_cuda_event e, qc_cuda_stream s,
                                                   qc_error *err);
QC_API QC_NODISCARD qc_status qc_cuda_event_synchronize(qc_cuda_event e, qc_error *err);
/* Makes everything that is put on s from now on wait for e. */
QC_API QC_NODISCARD qc_status qc_cuda_stream_wait(qc_cuda_stream s, qc_cuda_event e, qc_error *err);
QC_API QC_NODISCARD qc_status qc_cuda_event_elapsed(double *milliseconds, qc_cuda_event begin,
                                                    qc_cuda_event end, qc_error *err);

/* These copy asynchronously on s. Host memory should be pinned, otherwise the call may wait. bytes
 * == 0 is a no-op. */
QC_API QC_NODISCARD qc_status qc_cuda_to_device(void *device, const void *host, size_t bytes,
                                                qc_cuda_stream s, qc_error *err);
QC_API QC_NODISCARD qc_status qc_cuda_to_host(void *host, const void *device, size_t bytes,
                                              qc_cuda_stream s, qc_error *err);
QC_API QC_NODISCARD qc_status qc_cuda_copy(void *to, const void *from, size_t bytes,
                                           qc_cuda_stream s, qc_error *err); /* within the device */
QC_API QC_NODISCARD qc_status qc_cuda_fill(void *device, int byte, size_t bytes, qc_cuda_stream s,
                                           qc_error *err);

/* What is given to s between begin and end becomes a graph instead of running. */
QC_API QC_NODISCARD qc_status qc_cuda_capture_begin(qc_cuda_stream s, qc_error *err);
QC_API QC_NODISCARD qc_status qc_cuda_capture_end(qc_cuda_graph *out, qc_cuda_stream s,
                                                  qc_error *err);
/* Gives the number of the capture that s is in, or 0 if it is in none. */
QC_API QC_NODISCARD qc_status qc_cuda_capture_of(unsigned long long *id, qc_cuda_stream s,
                                                 qc_error *err);
QC_API QC_NODISCARD qc_status qc_cuda_graph_launch(qc_cuda_graph g, qc_cuda_stream s,
                                                   qc_error *err);
QC_API void qc_cuda_graph_destroy(qc_cuda_graph g);

QC_C_END
#endif

/* Copies from the threads of a loader to one GPU, through pinned memory.
 *
 *   worker 0   slot A  fill | copy ------> | fill      A worker fills a slot while its other one is
 *              slot B         fill  | copy ------> |   copied, in a stream of its own.
 *   worker 1   ...
 *
 * From pageable memory the driver would copy twice, and each call would wait for it. Two slots are
 * enough: a copy takes less time than decompressing, hashing or reading the next data.
 *
 * Memory: 2 * workers * slot_bytes, pinned, made once. On the device it takes only streams and
 * events.
 *
 * Threads: one thread calls create, finish and destroy; only the worker with an index calls room
 * and send for that index. */
#ifndef QC_KERNELS_CUDA_UPLOAD_H
#define QC_KERNELS_CUDA_UPLOAD_H

#include "kernels/cuda_device.h"

QC_C_BEGIN

typedef struct qc_cuda_upload qc_cuda_upload;

/* workers and slot_bytes are > 0. It is QC_ERR_NOMEM where the host cannot pin so much memory. */
QC_NODISCARD qc_status qc_cuda_upload_create(qc_cuda_upload **out, const qc_cuda_device *device,
                                             unsigned workers, size_t slot_bytes, qc_error *err);
/* Waits for copies that are under way. Accepts NULL. */
void qc_cuda_upload_destroy(qc_cuda_upload *u);
/* Gives slot_bytes at *pinned to fill, until send. Waits for the copy before the last one of this
 * worker. */
QC_NODISCARD qc_status qc_cuda_upload_room(qc_cuda_upload *u, unsigned worker, void **pinned,
                                           qc_error *err);
/* Starts the copy of the first `bytes` bytes of what room gave to `device`, which is memory of this
 * GPU that stays until finish. */
QC_NODISCARD qc_status qc_cuda_upload_send(qc_cuda_upload *u, unsigned worker, void *device,
                                           size_t bytes, qc_error *err);
/* Waits for every copy; QC_OK means that all of them are complete. */
QC_NODISCARD qc_status qc_cuda_upload_finish(qc_cuda_upload *u, qc_error *err);

QC_C_END
#endif

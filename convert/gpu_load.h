/* Load one device of an output (formats/device_reader.h) into a GPU's memory.
 *
 *   shard --read, hash, decompress--> pinned slot --copy--> where the caller wants the tensor
 *            each thread, frame by frame       two slots a thread: copies overlap with the rest
 *
 * Memory on the host: two frames (16 MiB as qconv writes them), pinned, a thread, and what the
 * reader takes. On the device: what the caller gives; nothing of it is touched but by the copies,
 * which run in streams of their own. Installed with libqconv where that was built with the kernels.
 * C and C++. */
#ifndef QC_CONVERT_GPU_LOAD_H
#define QC_CONVERT_GPU_LOAD_H

#include "formats/device_reader.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    unsigned threads; /* 0: one per processor, at most 16: more do not fill a bus faster */
    int skip_digests; /* as of qc_reader_options */
    /* t->bytes of memory on the GPU; any alignment. Called once per tensor, in the order of the
     * list, by the calling thread with the GPU current, before anything is read. NULL ends the load
     * with QC_ERR_NOMEM, but for a tensor of no bytes. */
    void *(*place)(void *ctx, const qc_reader_tensor *t);
    void *ctx;
} qc_gpu_load_options;

/* r or options NULL: QC_ERR_USAGE. All tensors of a device of r to GPU number `gpu` of this
 * process. On QC_OK every byte is there and its digest was right. Otherwise what was placed is the
 * caller's, written to in part: QC_ERR_DEVICE for no such GPU, QC_ERR_NOMEM also where the host
 * cannot pin enough, else as qc_reader_load. Waits until all copies are done. Thread-safe: several
 * loads may run at once. */
QC_API QC_NODISCARD qc_status qc_gpu_load(const qc_reader *r, size_t device, int gpu,
                                          const qc_gpu_load_options *options, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif

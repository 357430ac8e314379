/* Loads one device of an output (formats/device_reader.h) into a GPU's memory.
 *
 *   shard --read, hash, decompress--> pinned slot --copy--> where the caller wants the tensor
 *            each thread, frame by frame       two slots a thread: copies overlap with the rest
 *
 * The host needs two pinned frames for each thread (16 MiB as qconv writes them) and what the
 * reader takes. On the device only the memory that the caller gives is written to, by copies that
 * run in streams of their own. This header is installed with libqconv where that was built with the
 * kernels. It is for C and C++. */
#ifndef QC_CONVERT_GPU_LOAD_H
#define QC_CONVERT_GPU_LOAD_H

#include "formats/device_reader.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    unsigned threads; /* 1 to 1024; 0: one per processor, but at most 16, as more do not fill a bus
                         faster */
    int skip_digests; /* as in qc_reader_options */
    /* Returns t->bytes of memory on the GPU, with any alignment. It is called once per tensor, in
     * the order of the list, by the calling thread with the GPU current, before anything is read.
     * NULL ends the load with QC_ERR_NOMEM, except for a tensor without bytes. */
    void *(*place)(void *ctx, const qc_reader_tensor *t);
    void *ctx;
} qc_gpu_load_options;

/* Loads all tensors of a device of r to GPU number `gpu` of this process. On QC_OK every byte is
 * there and its digest was right. Otherwise the memory that was placed still belongs to the caller,
 * and some of it has been written to. Errors: QC_ERR_USAGE where r or options is NULL,
 * QC_ERR_DEVICE where there is no such GPU, QC_ERR_NOMEM also where the host cannot pin enough
 * memory, and those of qc_reader_load. It waits until all copies are done. Thread-safe: several
 * loads may run at once. */
QC_API QC_NODISCARD qc_status qc_gpu_load(const qc_reader *r, size_t device, int gpu,
                                          const qc_gpu_load_options *options, qc_error *err);

#ifdef __cplusplus
}
#endif
#endif

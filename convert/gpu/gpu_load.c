#include "convert/gpu/gpu_load.h"

#include "base/alloc.h"
#include "base/cpu.h"
#include "base/workers.h"
#include "kernels/cuda_upload.h"

#include <inttypes.h>

#define THREADS_USUAL 16u

typedef struct {
    qc_cuda_upload *upload;
    void **places; /* per tensor of the device */
} gpu_load;

static qc_status load_room(void *ctx, unsigned worker, size_t bytes, void **piece, qc_error *err)
{
    gpu_load *l = ctx;
    (void)bytes; /* slots are as large as the largest piece */
    return qc_cuda_upload_room(l->upload, worker, piece, err);
}

static qc_status load_put(void *ctx, unsigned worker, const qc_reader_tensor *t, uint64_t offset,
                          void *piece, size_t bytes, qc_error *err)
{
    gpu_load *l = ctx;
    (void)piece; /* it is what load_room gave this worker */
    return qc_cuda_upload_send(l->upload, worker, (unsigned char *)l->places[t->index] + offset,
                               bytes, err);
}

static qc_status run_load(gpu_load *l, const qc_reader *r, size_t device, int gpu,
                          const qc_gpu_load_options *options, qc_error *err)
{
    static const qc_reader_pieces pieces = {load_room, load_put};
    const qc_reader_device *d = qc_reader_device_at(r, device);
    unsigned threads = options->threads, processors = qc_cpu_count();
    qc_cuda_device cuda;
    QC_TRY(qc_cuda_device_open(&cuda, gpu, err));
    QC_TRY(qc_cuda_use(&cuda, err));
    QC_TRY(qc_calloc(&l->places, d->tensor_count, sizeof *l->places, err));
    for (size_t i = 0; i < d->tensor_count; i++) {
        const qc_reader_tensor *t = &d->tensors[i];
        l->places[i] = options->place(options->ctx, t);
        if (!l->places[i] && t->bytes > 0)
            QC_FAIL(err, QC_ERR_NOMEM,
                    "tensor '%s' in %s: the caller gave no memory for its %" PRIu64 " bytes",
                    t->name, t->shard, t->bytes);
    }
    if (d->max_piece_bytes == 0)
        return QC_OK;
    if (threads == 0)
        threads = processors < THREADS_USUAL ? processors : THREADS_USUAL;
    QC_TRY(qc_threads_wanted(&threads, err));
    QC_TRY(qc_cuda_upload_create(&l->upload, &cuda, threads, d->max_piece_bytes, err));
    qc_reader_options o = {
        .threads = threads, .skip_digests = options->skip_digests, .pieces = &pieces, .ctx = l};
    QC_TRY(qc_reader_load(r, device, &o, err));
    return qc_cuda_upload_finish(l->upload, err);
}

qc_status qc_gpu_load(const qc_reader *r, size_t device, int gpu,
                      const qc_gpu_load_options *options, qc_error *err)
{
    gpu_load l = {NULL, NULL};
    if (!r || !options)
        QC_FAIL(err, QC_ERR_USAGE, "qc_gpu_load: %s NULL", r ? "the options are" : "the reader is");
    if (device >= qc_reader_device_count(r))
        QC_FAIL(err, QC_ERR_DEVICE, "there is no device number %zu; it has %zu", device,
                qc_reader_device_count(r));
    if (!options->place)
        QC_FAIL(err, QC_ERR_USAGE, "place is missing from the options of a load");
    qc_status st = run_load(&l, r, device, gpu, options, err);
    qc_cuda_upload_destroy(l.upload);
    qc_free(l.places);
    return st;
}

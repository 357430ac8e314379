/* Layers and head on the first GPU of the tools, through the functions of llama_decoder.h. */
#ifndef QC_CONVERT_LLAMA_DEVICE_H
#define QC_CONVERT_LLAMA_DEVICE_H

#include "convert/llama/llama_decoder.h"
#include "convert/llama/llama_layer.h"

typedef struct {
    const qc_devices *devices;
    const qc_llama_shape *shape;
    qc_gpu_decoder *decoder; /* NULL until there is a batch */
    uint64_t longest;        /* the longest window that it takes */
    int has_head;
} qc_llama_device;

static inline int qc_llama_on_device(const qc_llama_device *d)
{
    return d->devices && d->devices->gpu_count > 0;
}

void qc_llama_device_close(qc_llama_device *d);
/* Makes it ready for windows of this length. */
QC_NODISCARD qc_status qc_llama_device_ready(qc_llama_device *d, uint64_t longest, qc_error *err);
/* hidden: the states of all windows. QC_ERR_NONFINITE as qc_llama_cpu_layer. */
QC_NODISCARD qc_status qc_llama_device_layer(qc_llama_device *d, const qc_llama_weights *w,
                                             uint64_t layer, const qc_llama_batch *batch,
                                             float *hidden, qc_error *err);
/* Takes the head to the device the first time. out [n, vocabulary]. */
QC_NODISCARD qc_status qc_llama_device_logits(qc_llama_device *d, const qc_llama_matrix *head,
                                              const float *hidden, uint64_t n, float *out,
                                              qc_error *err);

/* ---- in the form of llama_decoder.h ---- */

/* tables: free them when out is no longer used. */
QC_NODISCARD qc_status qc_llama_device_form(qc_gpu_decoder_form *out, void **tables,
                                            const qc_llama_shape *shape, uint64_t longest,
                                            qc_error *err);
/* Both borrow what m and w point at. window: of sliding attention; 0: none. */
qc_gpu_matrix qc_llama_device_matrix(const qc_llama_matrix *m);
qc_gpu_decoder_layer qc_llama_device_weights(const qc_llama_weights *w, uint64_t window);

#endif

/* Computes layers and head on the first GPU of the tools, through the functions of
 * llama_decoder.h. */
#ifndef QC_CONVERT_LLAMA_DEVICE_H
#define QC_CONVERT_LLAMA_DEVICE_H

#include "convert/llama/llama_decoder.h"
#include "convert/llama/llama_layer.h"

typedef struct {
    const qc_devices *devices;
    const qc_llama_shape *shape;
    qc_gpu_decoder *decoder; /* NULL until the first batch */
    uint64_t longest;        /* the longest window that the decoder takes */
    int has_head;
} qc_llama_device;

static inline int qc_llama_on_device(const qc_llama_device *d)
{
    return d->devices && d->devices->gpu_count > 0;
}

void qc_llama_device_close(qc_llama_device *d);
/* Makes the decoder ready for windows of this length. */
QC_NODISCARD qc_status qc_llama_device_ready(qc_llama_device *d, uint64_t longest, qc_error *err);
/* hidden has the states of all windows. QC_ERR_NONFINITE is as for qc_llama_cpu_layer. */
QC_NODISCARD qc_status qc_llama_device_layer(qc_llama_device *d, const qc_llama_weights *w,
                                             uint64_t layer, const qc_llama_batch *batch,
                                             float *hidden, qc_error *err);
/* Computes out [n, vocabulary]. The first call takes the head to the device. */
QC_NODISCARD qc_status qc_llama_device_logits(qc_llama_device *d, const qc_llama_matrix *head,
                                              const float *hidden, uint64_t n, float *out,
                                              qc_error *err);

/* ---- in the form of llama_decoder.h ---- */

/* Free tables when out is no longer used. */
QC_NODISCARD qc_status qc_llama_device_form(qc_gpu_decoder_form *out, void **tables,
                                            const qc_llama_shape *shape, uint64_t longest,
                                            qc_error *err);
/* Both functions borrow what m and w point at. window is that of sliding attention; 0: there is
 * none. */
qc_gpu_matrix qc_llama_device_matrix(const qc_llama_matrix *m);
qc_gpu_decoder_layer qc_llama_device_weights(const qc_llama_weights *w, uint64_t window);

#endif

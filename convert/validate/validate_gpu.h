/* The part of validate that needs a GPU: times beside fp16, and the errors of the GPU's kernels for
 * each batch size. Without a GPU it is left out, and one sentence says so. */
#ifndef QC_CONVERT_VALIDATE_GPU_H
#define QC_CONVERT_VALIDATE_GPU_H

#include "convert/device/device_choice.h"
#include "convert/validate/validate_compare.h"
#include "convert/validate/validate_layer.h"

/* What is multiplied. */
typedef struct {
    const uint64_t *m; /* --m, in the order given; the command fills in its default */
    unsigned m_count;
    uint64_t seed; /* default 1 */
} qc_product_options;

typedef struct {
    int on;
    const char *name;                  /* "cpu", or "cuda:0 (NVIDIA H200)" */
    const char *left_out;              /* a sentence; NULL: nothing is left out */
    const qc_gpu_validator *validator; /* the functions of comparer */
    qc_cuda_device device;
    const char *device_name; /* "cuda:0" */
    qc_gpu_comparer *comparer;
    const uint64_t *m;
    unsigned m_count;
} qc_validate_gpu;

/* --device and QCONV_DEVICE decide which GPU is used; of several, it is the first. QC_ERR_DEVICE if
 * the user asks for a GPU that does not exist. */
QC_NODISCARD qc_status qc_validate_gpu_open(qc_validate_gpu *g, qc_device_options from,
                                            const qc_product_options *o, qc_arena *arena,
                                            qc_error *err);
void qc_validate_gpu_close(qc_validate_gpu *g); /* accepts a struct of zeros */

/* Turns BF16 into F16 if the GPU's cuBLAS has no bfloat16 to compare with. */
qc_dtype qc_validate_gpu_x_dtype(const qc_validate_gpu *g, qc_dtype dtype);

/* Fills in the output and kernel errors, times, device and note of a layer whose weight errors the
 * CPU has measured. It does nothing without a GPU. If a layer does not fit the GPU or float16, the
 * CPU measures it after all, and its note says so. `in` is made anew as needed. */
QC_NODISCARD qc_status qc_validate_gpu_measure(qc_validate_gpu *g, qc_validate_layer *l,
                                               const qc_validate_tools *tools,
                                               const qc_stored_arrays *w, qc_validate_input *in,
                                               qc_arena *arena, qc_error *err);

#endif

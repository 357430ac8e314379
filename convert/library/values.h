/* The values of a checkpoint's tensors, whatever it stores them as: for programs that compute with
 * a model and want it as it is in memory, before or after it was quantized.
 *
 * Any checkpoint that qconv converts is opened: plain ones, outputs of qconv (compressed or not),
 * and those that bitsandbytes, GPTQ, AWQ, compressed-tensors or others left in NF4, FP4, int8, FP8,
 * MXFP4 or integers. The list has the tensors that an unquantized checkpoint of the model would
 * have: a quantized weight is listed under its own name, with its real shape and the float dtype
 * that it had, and its scales and states are not listed. The values are those that
 * `qconv convert --to bf16` and the like write, bit for bit.
 *
 * Thread-safe: what is opened does not change, so any number of threads may list and read. */
#ifndef QC_CONVERT_LIBRARY_VALUES_H
#define QC_CONVERT_LIBRARY_VALUES_H

#include "base/dtype.h"
#include "base/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the experts of a layer are listed: as the checkpoint has them (stacks in FP8 are taken apart
 * all the same, as their scales are), each matrix as a tensor of its own under its released name,
 * or as stacks for all experts, as transformers 5 holds them. Layouts that are not known stay as
 * they are, except that QC_VALUES_STACKED refuses them. */
typedef enum { QC_VALUES_AS_FOUND, QC_VALUES_SEPARATE, QC_VALUES_STACKED } qc_values_experts;

/* Start from zeros. */
typedef struct {
    qc_values_experts experts;
    uint32_t adapter_count;
    /* LoRA adapters, merged into the weights in this order while they are read, by their folders or
     * files; and what each is multiplied with (NULL: 1). */
    const char *const *adapters;
    const double *adapter_scales;
} qc_values_options;

typedef struct {
    const char *name;
    const char *stored_as; /* "nf4", "fp8", "gptq", ...; NULL where the file has the values */
    qc_dtype dtype;
    unsigned ndim;
    uint64_t dims[QC_MAX_DIMS];
} qc_values_tensor;

typedef struct qc_values qc_values;

/* path: a folder, a .safetensors file or an index. options: NULL stands for zeros. QC_ERR_INPUT and
 * QC_ERR_UNSUPPORTED as in a conversion: where files are missing or damaged, or where a weight is
 * packed in a form that qconv does not read. */
QC_API QC_NODISCARD qc_status qc_values_open(qc_values **out, const char *path,
                                             const qc_values_options *options, qc_error *err);
QC_API void qc_values_close(qc_values *v); /* NULL is fine */

QC_API size_t qc_values_count(const qc_values *v);
/* Returns tensor number `index`, in bytewise order of names; NULL where there is none. It lives as
 * long as v is open. */
QC_API const qc_values_tensor *qc_values_at(const qc_values *v, size_t index);
/* Returns the tensor of this name, and in *index its number, which may be NULL; NULL where there is
 * none. */
QC_API const qc_values_tensor *qc_values_find(const qc_values *v, const char *name, size_t *index);

/* Reads [first, first + count) of the first dimension of tensor number `index` to dst, without
 * gaps; a scalar has first 0 and count 1. dtype: F32, F16 or BF16, rounded once, to nearest even;
 * or the tensor's own, which is the only one for tensors that hold no floats. dst needs no
 * alignment.
 * Beside dst, every thread that reads at the same time takes buffers, which are kept until v is
 * closed: for a step of 2^18 elements or a row, a stripe of a million codes in integers, and three
 * frames of a compressed file. QC_ERR_USAGE where there is no such tensor,
 * range or dtype, QC_ERR_RANGE where a value is too large for the dtype, QC_ERR_NONFINITE where a
 * weight in FP8, MXFP4 or integers is not finite, QC_ERR_INTERRUPTED. */
QC_API QC_NODISCARD qc_status qc_values_read(qc_values *v, size_t index, uint64_t first,
                                             uint64_t count, void *dst, qc_dtype dtype,
                                             qc_error *err);

#ifdef __cplusplus
}
#endif
#endif

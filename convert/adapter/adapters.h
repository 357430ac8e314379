/* Adapters that are merged into a checkpoint while it is read (--lora). Once they are attached,
 * their tensors are read as F32, W + scale * B * A and so on, computed in double and rounded once;
 * whoever reads the checkpoint sees the merged model and nothing else. The values do not depend on
 * threads, instruction set or the ranges that are read. docs/adapters.md has the formulas. */
#ifndef QC_CONVERT_ADAPTERS_H
#define QC_CONVERT_ADAPTERS_H

#include "formats/adapter.h"
#include "formats/manifest.h"

/* --lora ADAPTER[:SCALE] */
typedef struct {
    const char *path;
    double scale; /* on top of the adapter's own */
} qc_lora;

/* The adapters that are merged into a model, in this order. */
typedef struct {
    qc_lora *list;
    uint32_t count;
} qc_loras;

typedef struct {
    qc_adapter *adapter;
    double scale;                   /* as --lora gives it */
    size_t weights, biases, wholes; /* tensors of the model that it changes and replaces */
} qc_attached_adapter;

/* Opens the adapters and changes the tensors of c. Call it after opening c and
 * splitting its experts, before anything looks at tensors. Every tensor of an adapter must have its
 * place in c: QC_ERR_INPUT, QC_ERR_SHAPE or QC_ERR_UNSUPPORTED otherwise. On error c can only be
 * closed. */
QC_NODISCARD qc_status qc_adapters_attach(qc_checkpoint *c, qc_loras loras, qc_error *err);
/* Checks that the adapters of c are those that the output at `out` was made with. */
QC_NODISCARD qc_status qc_adapters_check(const qc_checkpoint *c, const qc_manifest *m,
                                         const char *out, qc_error *err);
/* Returns the adapters that are attached, in their order. */
const qc_attached_adapter *qc_adapters_of(const qc_checkpoint *c, size_t *count);

#endif

/* --importance FILE: how much the error of each weight counts, as 'python -m qconv importance'
 * finds it: the traces of the second moments of its inputs (H) and of the gradients at its outputs
 * (G). An error of mean square e that knows no direction moves the model's answer by tr G * tr H *
 * e / 2 nats for each token.
 *
 *   {"format": 1, "model": TEXT, "text": TEXT, "tokens": N,
 *    "weights": {"model.layers.0.mlp.up_proj.weight": [TRACE_H, TRACE_G], ...}} */
#ifndef QC_CONVERT_AUTO_TRACES_H
#define QC_CONVERT_AUTO_TRACES_H

#include "base/arena.h"
#include "formats/checkpoint.h"

/* Reads the file. products [tensor_count] is tr H * tr G of each tensor, and NaN where the file
 * does not have it; names are those of the checkpoint, or of a weight whose codes end in "_blocks".
 * QC_ERR_INPUT says what is not as above, or that a name is of another model. */
QC_NODISCARD qc_status qc_auto_read_traces(double **products, qc_arena *arena,
                                           const qc_checkpoint *model, const char *path,
                                           qc_error *err);

#endif

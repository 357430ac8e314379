/* Checkpoints without weights: a model that is only a config.json, or the id of a well-known one.
 *
 * The tensors (names, dtypes, shapes) are worked out from the configuration, as the released
 * checkpoint of that family has them, so everything that needs shapes only (plan, --dry-run) works
 * and reading a weight is refused.
 * Checked against the tensor lists of the ten models in tests/data/models and published counts.
 * docs/models.md lists families and models. */
#ifndef QC_CONVERT_KNOWN_MODELS_H
#define QC_CONVERT_KNOWN_MODELS_H

#include "formats/checkpoint.h"

typedef struct {
    const char *id;     /* "meta-llama/Llama-3.3-70B-Instruct" */
    const char *config; /* JSON, the fields that matter */
} qc_known_model;

extern const qc_known_model qc_known_models[];
extern const unsigned qc_known_model_count;

/* By id, with or without the organisation; case does not matter. NULL if there is none. */
const qc_known_model *qc_known_model_find(const char *id);
/* For "did you mean": ids of the same family, the nearest size first; of these the ones that are
 * written most alike. Returns how many. */
#define QC_KNOWN_NEAR_MAX 3u
unsigned qc_known_model_near(const char *id, const char *near[QC_KNOWN_NEAR_MAX]);

/* Open MODEL for planning: a checkpoint as qc_checkpoint_open opens it; a directory that holds a
 * config.json but no weights, or a config.json by its path; the id of a well-known model, where
 * there is no such path.
 * *has_weights: 0 where the tensors were worked out; reading one is QC_ERR_UNSUPPORTED then. The
 * result is closed with qc_checkpoint_close; its path is MODEL, or the id in full. QC_ERR_INPUT for
 * neither a path nor a known id, saying what is near. QC_ERR_UNSUPPORTED for a configuration of a
 * model type whose tensors cannot be worked out, naming those that can. */
QC_NODISCARD qc_status qc_model_open(qc_checkpoint **out, const char *model, int *has_weights,
                                     qc_error *err);

#endif

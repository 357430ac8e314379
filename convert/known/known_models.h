/* Checkpoints without weights: a model that is only a config.json, or the id of a well-known one.
 *
 * The tensors (names, dtypes, shapes) are worked out from the configuration, as the released
 * checkpoints of that family have them. So everything that needs shapes only (plan, --dry-run)
 * works, and reading a weight is refused. They are checked against the tensor lists of the ten
 * models in tests/data/models and against published counts. docs/models.md lists families and
 * models. */
#ifndef QC_CONVERT_KNOWN_MODELS_H
#define QC_CONVERT_KNOWN_MODELS_H

#include "formats/checkpoint.h"

typedef struct {
    const char *id;     /* "meta-llama/Llama-3.3-70B-Instruct" */
    const char *config; /* JSON with the fields that matter */
} qc_known_model;

/* Returns all of them, which are in convert/families/known_models.txt: a line each. NULL, and a
 * count of 0, if the text that the program carries cannot be read. Thread-safe. */
const qc_known_model *qc_known_models(unsigned *count);
/* Finds a model by its id, with or without the organisation; case does not matter. NULL if there is
 * none. */
const qc_known_model *qc_known_model_find(const char *id);
/* Finds "org/name", possibly behind the hub's address ("https://huggingface.co/", "hf://"). NULL if
 * it is no id. */
const char *qc_hub_id_of(const char *text);
/* Finds the model that text means: its id or address; the id of a copy that another organisation
 * has under the same name; or the beginning of one name only, where '-', '_' and ' ' do not count
 * ("Llama-3.3-70B"). NULL if there is none. */
const qc_known_model *qc_known_model_meant(const char *text);
/* Finds ids for "did you mean": those that begin so, then those of the same family, the nearest
 * size first, and among these the ones whose spelling is nearest. Returns how many there are. */
#define QC_KNOWN_NEAR_MAX 3u
unsigned qc_known_model_near(const char *id, const char *near[QC_KNOWN_NEAR_MAX]);

/* Opens MODEL for planning. MODEL is a checkpoint as qc_checkpoint_open opens it; or a directory
 * that holds a config.json but no weights, or the path of a config.json; or, if there is no such
 * path, what qc_known_model_meant takes.
 *
 * *has_weights is 0 if the tensors were worked out; reading one is then QC_ERR_UNSUPPORTED. Close
 * the result with qc_checkpoint_close. Its path is MODEL, or the full id. QC_ERR_INPUT if MODEL is
 * neither a path nor a known id; the message names ids that are near. QC_ERR_UNSUPPORTED for a
 * model type whose tensors cannot be worked out; the message names those that can. */
QC_NODISCARD qc_status qc_model_open(qc_checkpoint **out, const char *model, int *has_weights,
                                     qc_error *err);

#endif

/* What people give as a model and is no folder of one: a model's folder in the Hugging Face hub's
 * cache, the cache itself, a model's id. */
#ifndef QC_CONVERT_MODEL_PATH_H
#define QC_CONVERT_MODEL_PATH_H

#include "base/arena.h"
#include "base/status.h"

/* *path: what somebody gave. Where it is a model's folder in the hub's cache (models--x--y) with
 * one snapshot, it becomes that snapshot's path, in the arena. QC_ERR_INPUT for several snapshots,
 * or none, and for the cache itself; and for something that does not exist and looks like a model's
 * id, with where it lies in the cache, or how to get it. All else is left to whoever opens it. */
QC_NODISCARD qc_status qc_model_path_settle(const char **path, qc_arena *arena, qc_error *err);

/* MODEL and OUT were given the other way around: there is no model at `model`, and one, which no
 * qconv made, lies at `out`. NULL as out is fine. */
int qc_model_path_swapped(const char *model, const char *out);

#endif

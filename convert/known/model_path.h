/* Handles what people give as a model although it is not a model's folder: the folder of a model in
 * the Hugging Face hub's cache, the cache itself, or a model's id. */
#ifndef QC_CONVERT_MODEL_PATH_H
#define QC_CONVERT_MODEL_PATH_H

#include "base/arena.h"
#include "base/status.h"

/* *path is what somebody gave. If it is a model's folder in the hub's cache (models--x--y) with one
 * snapshot, *path becomes the path of that snapshot, in the arena. QC_ERR_INPUT if there are
 * several snapshots or none, and for the cache itself. QC_ERR_INPUT also for something that does
 * not exist and looks like a model's id; the message says where the cache has it, or how to get it.
 * Anything else is left to whoever opens it. */
QC_NODISCARD qc_status qc_model_path_settle(const char **path, qc_arena *arena, qc_error *err);

/* Were MODEL and OUT given the other way around? This is so if there is no model at `model`, and
 * there is one at `out` that qconv did not make. out may be NULL. */
int qc_model_path_swapped(const char *model, const char *out);

#endif

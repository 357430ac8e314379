/* Writes accelerate's device_map, which says which module goes where.
 *
 *   {"model.embed_tokens": 0, "model.layers.0": 0, ..., "model.layers.40": "cpu", "lm_head": 1}
 *
 * Keys are the module prefixes of the segments in natural order; values are the number of a GPU in
 * the order of the budget (as torch counts them), "cpu" or "disk". The prefixes of all
 * segments cover every tensor exactly once, and so does the map. Where transformers renamed the
 * modules of a kind of model (text and images, 4.52), the new names stand beside those of the
 * checkpoint.
 * Thread-safe. */
#ifndef QC_CONVERT_DEVICE_MAP_H
#define QC_CONVERT_DEVICE_MAP_H

#include "convert/fit/fit.h"
#include "formats/json_writer.h"

/* Writes the map as the member `key` of a JSON document. */
QC_NODISCARD qc_status qc_device_map_put(qc_json_writer *w, const char *key, qc_arena *arena,
                                         const qc_fit *fit, qc_error *err);
/* Writes the map as a document of its own that ends with a new line. */
QC_NODISCARD qc_status qc_device_map_text(qc_strbuf *out, qc_arena *arena, const qc_fit *fit,
                                          qc_error *err);

#endif

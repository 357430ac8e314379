/* The answer of `qconv inspect --json`; docs/cli.md has its members. */
#ifndef QC_CONVERT_INSPECT_JSON_H
#define QC_CONVERT_INSPECT_JSON_H

#include "base/strbuf.h"
#include "convert/report/inspect_facts.h"
#include "formats/json_writer.h"

/* Writes one JSON object and a new line. */
QC_NODISCARD qc_status qc_inspect_json(const qc_facts *f, qc_strbuf *out, qc_error *err);

/* The next three write members that `qconv report --json` has too. */
/* Writes "calibrate", which says what weights were calibrated with, as qconv.json has it; nothing
 * for NULL. */
void qc_calibration_json(qc_json_writer *w, const qc_manifest_calibration *c);
/* Writes the source's files as the manifest has them. */
void qc_sources_json(qc_json_writer *w, const char *key, const qc_manifest *m);
/* Writes the errors of a calibrated weight in the outputs of its layer; nothing for NULL. */
void qc_outputs_json(qc_json_writer *w, const char *key, const qc_manifest_outputs *o);

#endif

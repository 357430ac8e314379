/* The members of a manifest that the answers of commands repeat as they are. */
#ifndef QC_FORMATS_MANIFEST_ROWS_H
#define QC_FORMATS_MANIFEST_ROWS_H

#include "formats/json_rows.h"
#include "formats/manifest.h"

extern const qc_json_row qc_manifest_device_rows[], qc_manifest_source_rows[];
extern const qc_json_row qc_manifest_output_rows[], qc_manifest_adapter_rows[];
/* Writes "calibrate", if weights were calibrated. */
void qc_manifest_put_calibration(qc_json_writer *w, const qc_manifest_calibration *c);
/* Writes "adapters", if some were merged. */
void qc_manifest_put_adapters(qc_json_writer *w, const qc_manifest *m);

#endif

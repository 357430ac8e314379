/* What the manifest's reader and writer share. */
#ifndef QC_FORMATS_MANIFEST_INTERNAL_H
#define QC_FORMATS_MANIFEST_INTERNAL_H

#include "formats/manifest_rows.h"

#define QC_MANIFEST_FORMAT   "qconv"
#define QC_MANIFEST_METHOD   "zstd"
#define QC_MANIFEST_SEAL_KEY "manifest_xxh3_128"

#define QC_MANIFEST_DEVICES_MAX 1024u

/* How the last of the rules begins where scales were searched. */
#define QC_MANIFEST_SCALE_RULE "scale "

/* Checks what must hold in every manifest, whoever made it: QC_ERR_INPUT names the first thing that
 * is wrong. Allocates scratch. */
QC_NODISCARD qc_status qc_manifest_check(const qc_manifest *m, qc_error *err);

/* The members of a manifest's objects, for reader and writer, and when some of them are there. */
#define QC_WHEN_STORED   1u /* the output is compressed */
#define QC_WHEN_PLACED   2u /* there is a placement */
#define QC_WHEN_HESSIANS 4u /* weights were calibrated with moments made elsewhere */
#define QC_WHEN_TEXT     8u /* or with a text */
extern const qc_json_row qc_manifest_option_rows[], qc_manifest_calibration_rows[];
extern const qc_json_row qc_manifest_placement_rows[], qc_manifest_shard_rows[];
extern const qc_json_row qc_manifest_file_rows[];
/* The rows of a tensor: what stands before its shape and behind it, then what only some have. */
extern const qc_json_row qc_manifest_tensor_rows[], qc_manifest_place_rows[];
extern const qc_json_row qc_manifest_error_rows[], qc_manifest_tensor_source_rows[];
/* Returns QC_WHEN_STORED and QC_WHEN_PLACED as they hold for m. */
unsigned qc_manifest_when(const qc_manifest *m);

/* Returns the scheme of that name as a constant text; NULL if there is none. */
const char *qc_manifest_scheme(const char *name);

#endif

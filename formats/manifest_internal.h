/* What the manifest's reader and writer share. */
#ifndef QC_FORMATS_MANIFEST_INTERNAL_H
#define QC_FORMATS_MANIFEST_INTERNAL_H

#include "formats/manifest.h"

#define QC_MANIFEST_FORMAT   "qconv"
#define QC_MANIFEST_METHOD   "zstd"
#define QC_MANIFEST_SEAL_KEY "manifest_xxh3_128"

#define QC_MANIFEST_DEVICES_MAX 1024u

/* How the last of the rules begins where scales were searched. */
#define QC_MANIFEST_SCALE_RULE "scale "

/* Checks what must hold in every manifest, whoever made it: QC_ERR_INPUT names the first thing that
 * is wrong. Allocates scratch. */
QC_NODISCARD qc_status qc_manifest_check(const qc_manifest *m, qc_error *err);

/* Returns the scheme of that name as a constant text; NULL if there is none. */
const char *qc_manifest_scheme(const char *name);

#endif

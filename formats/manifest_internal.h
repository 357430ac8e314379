/* Shared by the manifest's reader and writer. */
#ifndef QC_FORMATS_MANIFEST_INTERNAL_H
#define QC_FORMATS_MANIFEST_INTERNAL_H

#include "formats/manifest.h"

#define QC_MANIFEST_FORMAT   "qconv"
#define QC_MANIFEST_METHOD   "zstd"
#define QC_MANIFEST_SEAL_KEY "manifest_xxh3_128"

#define QC_MANIFEST_DEVICES_MAX 1024u

/* What the last of the rules begins with where scales were searched. */
#define QC_MANIFEST_SCALE_RULE "scale "

/* What must hold in every manifest, whoever made it: QC_ERR_INPUT names the first thing that does
 * not. Allocates scratch. */
QC_NODISCARD qc_status qc_manifest_check(const qc_manifest *m, qc_error *err);

/* The scheme of that name, in memory of its own; NULL: there is none. */
const char *qc_manifest_scheme(const char *name);

#endif

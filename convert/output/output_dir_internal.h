/* What the files output_*.c share. Nobody else includes this. */
#ifndef QC_CONVERT_OUTPUT_DIR_INTERNAL_H
#define QC_CONVERT_OUTPUT_DIR_INTERNAL_H

#include "convert/output/output_dir.h"

#define QC_LOCK_NAME       "lock"
#define QC_STAGED_MANIFEST QC_STAGING_NAME "/" QC_MANIFEST_NAME
/* The manifest of an output that is being replaced: it tells which files of OUT are qconv's while
 * OUT itself has no manifest. */
#define QC_REPLACED_NAME     ".replaced.json"
#define QC_REPLACED_MANIFEST QC_STAGING_NAME "/" QC_REPLACED_NAME
#define QC_MANIFEST_MAX      ((size_t)1 << 30)

/* Does what qc_output_dir_check does; *exists says whether OUT is there. */
QC_NODISCARD qc_status qc_output_check(qc_arena *arena, const char *out, const char *source,
                                       int force, int *exists, qc_error *err);
/* Reads a manifest beneath root and the digest of its text; the result is empty (shard_count 0)
 * where it is missing or damaged. One that is there and cannot be read now is an error, because
 * whoever took it for none would make again what has moved to OUT. digest may be NULL. */
QC_NODISCARD qc_status qc_output_read_manifest(qc_arena *arena, const qc_file *root,
                                               const char *name, qc_manifest *m, qc_digest *digest,
                                               qc_error *err);
/* Says where the file `name` waits for the commit, relative to OUT. */
QC_NODISCARD qc_status qc_output_staged_name(const qc_output_dir *d, const char *name,
                                             const char **staged, qc_error *err);
QC_NODISCARD qc_status qc_output_add_name(qc_output_dir *d, const char *name, qc_error *err);

#endif

/* Files that an option asks for beside the result: --html, --device-map, --apply.
 *
 * They are written beside their name and renamed over it, which would put a plain file in the place
 * of a device or a pipe (/dev/stdout, /dev/full), so only plain files are taken. */
#ifndef QC_CONVERT_TARGET_FILE_H
#define QC_CONVERT_TARGET_FILE_H

#include "formats/checkpoint.h"

/* option: "--html". path NULL: not asked for. With the option's name, QC_ERR_USAGE for a folder, a
 * device or a pipe, QC_ERR_IO for a file in a folder that does not exist and for one that may not
 * be written. */
QC_NODISCARD qc_status qc_target_file_check(const char *option, const char *path, qc_error *err);

/* QC_ERR_USAGE when path would replace what is read: a file of weights of c, or what says how to
 * read them (config, index, tokenizer, manifest). By identity, so that links are seen through. */
QC_NODISCARD qc_status qc_target_file_spares(const char *option, const char *path,
                                             const qc_checkpoint *c, qc_error *err);
/* QC_ERR_USAGE when both name one file, there already or not yet. Either may be NULL. */
QC_NODISCARD qc_status qc_target_file_differs(const char *option, const char *path,
                                              const char *other_option, const char *other,
                                              qc_error *err);

#endif

/* Files that an option asks for besides the result: --device-map, --apply.
 *
 * They are written under a temporary name in the same folder and then renamed. That would put a
 * plain file in the place of a device or a pipe (/dev/stdout, /dev/full), so only plain files are
 * accepted. */
#ifndef QC_CONVERT_TARGET_FILE_H
#define QC_CONVERT_TARGET_FILE_H

#include "formats/checkpoint.h"

/* Checks the file of an option ("--device-map"). path NULL means that it was not given. Errors
 * carry the option's name: QC_ERR_USAGE for a folder, a device or a pipe, QC_ERR_IO for a file in a
 * folder that does not exist and for one that may not be written. */
QC_NODISCARD qc_status qc_target_file_check(const char *option, const char *path, qc_error *err);

/* QC_ERR_USAGE when path would replace something that is read: a weight file of c, or a file that
 * says how to read them (config, index, tokenizer, manifest). Files are compared by identity, so
 * links do not hide it. */
QC_NODISCARD qc_status qc_target_file_spares(const char *option, const char *path,
                                             const qc_checkpoint *c, qc_error *err);
/* QC_ERR_USAGE when both paths name the same file, whether it exists yet or not. Either may be
 * NULL. */
QC_NODISCARD qc_status qc_target_file_differs(const char *option, const char *path,
                                              const char *other_option, const char *other,
                                              qc_error *err);

#endif

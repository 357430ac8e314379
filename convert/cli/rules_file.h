/* The file of --recipe: {"rules": [{"keep": "GLOB"}, {"quantize": "GLOB"}, ...]}. */
#ifndef QC_CONVERT_RULES_FILE_H
#define QC_CONVERT_RULES_FILE_H

#include "convert/cli/options.h"

/* Reads the rules, in the file's order, into the arena. Anything but the form above is
 * QC_ERR_INPUT: a member of another name, an empty glob, more than 10000 rules. Otherwise the
 * status is that of reading the file. The message names the file and the rule. */
QC_NODISCARD qc_status qc_rules_file_read(qc_arena *arena, const char *path, qc_rule **rules,
                                          uint32_t *count, qc_error *err);

#endif

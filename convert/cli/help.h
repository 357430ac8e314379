/* Text generated from the option table: --help, the manual page, shell completions.
 * Each appends to out; the only errors are those of qc_strbuf. */
#ifndef QC_CONVERT_HELP_H
#define QC_CONVERT_HELP_H

#include "base/strbuf.h"
#include "convert/cli/option_table.h"

/* What `qconv` and `qconv --help` print: commands, and where to read on. */
QC_NODISCARD qc_status qc_help_overview(qc_strbuf *out, qc_error *err);
/* `qconv COMMAND --help`, 80 columns. QC_CMD_HELP gives the overview. */
QC_NODISCARD qc_status qc_help_command(qc_strbuf *out, qc_command command, qc_error *err);
/* qconv.1, in man(7) macros. */
QC_NODISCARD qc_status qc_help_man(qc_strbuf *out, qc_error *err);
/* shell: "bash", "zsh" or "fish". */
QC_NODISCARD qc_status qc_help_completion(qc_strbuf *out, const char *shell, qc_error *err);

#endif

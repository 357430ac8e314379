/* Text generated from the option table: --help, the manual page, shell completions.
 * Each appends to out; qc_strbuf_status says whether that failed. */
#ifndef QC_CONVERT_HELP_H
#define QC_CONVERT_HELP_H

#include "base/strbuf.h"
#include "convert/cli/option_table.h"

/* What `qconv` and `qconv --help` print: commands, and where to read on. */
void qc_help_overview(qc_strbuf *out);
/* `qconv COMMAND --help`, 80 columns. QC_CMD_HELP gives the overview. */
void qc_help_command(qc_strbuf *out, qc_command command);
/* `qconv help [COMMAND] --json`: a command with its options, or all of them (QC_CMD_HELP), and the
 * exit codes. */
QC_NODISCARD qc_status qc_help_json(qc_strbuf *out, qc_command command, qc_error *err);
/* qconv.1, in man(7) macros. */
void qc_help_man(qc_strbuf *out);
/* shell: "bash", "zsh" or "fish". */
void qc_help_completion(qc_strbuf *out, const char *shell);

#endif

/* Text generated from the option table: --help, and JSON for programs.
 * Each appends to out; qc_strbuf_status says whether that failed. */
#ifndef QC_CONVERT_HELP_H
#define QC_CONVERT_HELP_H

#include "base/strbuf.h"
#include "convert/cli/option_table.h"

/* What `qconv` and `qconv --help` print: commands, and where to read on. */
void qc_help_overview(qc_strbuf *out);
/* `qconv COMMAND --help`, 80 columns. QC_CMD_HELP gives the overview. */
void qc_help_command(qc_strbuf *out, qc_command command);
/* `qconv help [COMMAND] --json`: a command with its options, or all of them (QC_CMD_HELP), the exit
 * codes and the environment: all that the manual page and the shell completions say. */
QC_NODISCARD qc_status qc_help_json(qc_strbuf *out, qc_command command, qc_error *err);

#endif

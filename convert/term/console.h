/* Where the program speaks: results on standard output, notes on standard error.
 *
 * Standard error is one per process, and so are the lock and the progress line kept here: any
 * thread may write a line at any time, it lands above the progress line and never inside it. */
#ifndef QC_CONVERT_CONSOLE_H
#define QC_CONVERT_CONSOLE_H

#include "base/strbuf.h"
#include "convert/term/call.h"

/* All of text to standard output, now. A reader that went away (a closed pipe) has had enough and
 * is no error; anything else is QC_ERR_IO. */
QC_NODISCARD qc_status qc_console_result(const qc_strbuf *text, qc_error *err);
/* "qconv: warning: ..." on standard error, one line, control characters made harmless; nothing
 * with -q. */
void qc_console_warn(const qc_call *call, const char *fmt, ...) QC_PRINTF(2, 3);
/* "qconv: ..." on standard error if -v was given at least `level` times. */
void qc_console_detail(const qc_call *call, int level, const char *fmt, ...) QC_PRINTF(3, 4);
/* Of lines that say the same of one thing after another, so many are shown; with -v all. */
#define QC_CONSOLE_LINES 10u
/* "and 92 more (all with -v)", where `count` is more than that. */
QC_NODISCARD qc_status qc_console_add_more(qc_strbuf *out, size_t count, qc_error *err);
/* The last words: "qconv: message; hint". hint may be NULL. where: append the place in the source.
 */
void qc_console_error(const qc_error *err, const char *hint, int where);
/* A line of progress that ends in a new line. */
void qc_console_line(const char *text);
/* Show text as the last line of the terminal, without a new line, in place of what this showed
 * before; "" takes it away. Plain text without control characters. */
void qc_console_bar(const char *text);
/* A terminal that understands cursor movement (TERM is neither unset nor "dumb"). */
int qc_console_terminal(int fd);
/* May fd be written to in colour: such a terminal, and NO_COLOR is unset or empty. */
int qc_console_colour(int fd);
/* qc_text_printable (base/text.h). */
void qc_console_printable(char *s);

#endif

/* Where the program speaks: results go to standard output, notes to standard error.
 *
 * A process has one standard error, so the lock and the progress line are kept here, once. Any
 * thread may write a line at any time; it appears above the progress line and never inside it. */
#ifndef QC_CONVERT_CONSOLE_H
#define QC_CONVERT_CONSOLE_H

#include "base/strbuf.h"
#include "convert/term/call.h"

/* Writes all of text to standard output at once. If the reader has gone away (a closed pipe), it
 * has had enough, and that is no error. Any other failure is QC_ERR_IO. */
QC_NODISCARD qc_status qc_console_result(const qc_strbuf *text, qc_error *err);
/* Ends a command's text: frees it, and before that, where `made` is QC_OK and the text is whole,
 * writes it to standard output, or to the file at `path` unless that is NULL. Returns the first
 * failure. */
QC_NODISCARD qc_status qc_console_deliver(qc_status made, qc_strbuf *text, const char *path,
                                          qc_error *err);
/* Writes "qconv: warning: ..." on standard error as one line, with control characters made
 * harmless. With -q it writes nothing. */
void qc_console_warn(const qc_call *call, const char *fmt, ...) QC_PRINTF(2, 3);
/* Writes "qconv: ..." on standard error if -v was given at least `level` times. */
void qc_console_detail(const qc_call *call, int level, const char *fmt, ...) QC_PRINTF(3, 4);
/* Where many lines say the same of one thing after another, this many are shown; with -v all
 * are. */
#define QC_CONSOLE_LINES 10u
/* Appends "and 92 more (all with -v)" if `count` is more than that. */
QC_NODISCARD qc_status qc_console_add_more(qc_strbuf *out, size_t count, qc_error *err);
/* Writes the last message: "qconv: message; hint". hint may be NULL. If where is set, the place in
 * the source is appended. */
void qc_console_error(const qc_error *err, const char *hint, int where);
/* Writes a line of progress that ends in a newline. */
void qc_console_line(const char *text);
/* Writes a line for a program to read: as it is, without "qconv: " before it. */
void qc_console_record(const char *text);
/* Shows text as the last line of the terminal, without a newline, in place of what this showed
 * before. "" takes it away. The text is plain, without control characters. */
void qc_console_bar(const char *text);
/* Is fd a terminal that understands cursor movement (TERM is neither unset nor "dumb")? */
int qc_console_terminal(int fd);
#endif

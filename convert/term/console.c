#include "convert/term/console.h"

#include "base/text.h"
#include "formats/file_io.h"
#include "formats/text_file.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LINE_BYTES 1200

qc_status qc_console_result(const qc_strbuf *text, qc_error *err)
{
    size_t done = 0;
    while (done < text->len) {
        ssize_t n = write(STDOUT_FILENO, text->data + done, text->len - done);
        if (n >= 0)
            done += (size_t)n;
        else if (errno == EPIPE)
            return QC_OK;
        else if (errno != EINTR)
            QC_FAIL(err, QC_ERR_IO, "standard output: %s", strerror(errno));
    }
    return QC_OK;
}

qc_status qc_console_deliver(qc_status made, qc_strbuf *text, const char *path, qc_error *err)
{
    qc_status st = made == QC_OK ? qc_strbuf_status(text, err) : made;
    if (st == QC_OK)
        st = path ? qc_file_put(path, text->data, text->len, err) : qc_console_result(text, err);
    qc_strbuf_deinit(text);
    return st;
}

qc_status qc_console_add_more(qc_strbuf *out, size_t count, qc_error *err)
{
    if (count <= QC_CONSOLE_LINES)
        return QC_OK;
    return qc_strbuf_addf(out, err, "and %zu more (all with -v)\n", count - QC_CONSOLE_LINES);
}

/* Protects standard error and bar_is_up. It is a leaf lock. */
static pthread_mutex_t stderr_lock = PTHREAD_MUTEX_INITIALIZER;
static int bar_is_up;

static const char erase_line[] = "\r\033[K";

/* If standard error does not work, there is nowhere to report that. */
static void say(const char *line, size_t len)
{
    while (len > 0) {
        ssize_t n = write(STDERR_FILENO, line, len);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return;
        line += n;
        len -= (size_t)n;
    }
}

int qc_console_terminal(int fd)
{
    const char *term = getenv("TERM");
    return isatty(fd) && term && *term && strcmp(term, "dumb") != 0;
}

/* May colour be written to fd? It must be such a terminal, and NO_COLOR must be unset or empty. */
static int may_colour(int fd)
{
    const char *no = getenv("NO_COLOR");
    return !(no && *no) && qc_console_terminal(fd);
}

/* Writes "qconv: <text>\n" in one write, so that lines of different threads do not mix. */
static void say_line(const char *colour, char *text)
{
    char line[LINE_BYTES + 64];
    qc_text_printable(text);
    int coloured = may_colour(STDERR_FILENO);
    pthread_mutex_lock(&stderr_lock);
    int n = snprintf(line, sizeof line, "%s%sqconv:%s %s\n", bar_is_up ? erase_line : "",
                     coloured ? colour : "", coloured ? "\033[0m" : "", text);
    bar_is_up = 0;
    if (n > 0)
        say(line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
    pthread_mutex_unlock(&stderr_lock);
}

void qc_console_line(const char *text)
{
    char copy[LINE_BYTES];
    (void)snprintf(copy, sizeof copy, "%s", text);
    say_line("", copy);
}

void qc_console_record(const char *text)
{
    char line[LINE_BYTES];
    pthread_mutex_lock(&stderr_lock);
    int n = snprintf(line, sizeof line, "%s\n", text);
    if (n > 0 && (size_t)n < sizeof line)
        say(line, (size_t)n);
    pthread_mutex_unlock(&stderr_lock);
}

void qc_console_bar(const char *text)
{
    char line[LINE_BYTES];
    pthread_mutex_lock(&stderr_lock);
    if (*text || bar_is_up) {
        int n = snprintf(line, sizeof line, "%s%s", *text ? "\r" : erase_line, text);
        /* If the old text was longer, its end is erased after writing, so nothing flickers. */
        if (*text && n > 0 && (size_t)n + 4 < sizeof line)
            n += snprintf(line + n, sizeof line - (size_t)n, "\033[K");
        bar_is_up = *text != '\0';
        if (n > 0)
            say(line, (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
    }
    pthread_mutex_unlock(&stderr_lock);
}

void qc_console_warn(const qc_call *call, const char *fmt, ...)
{
    char text[LINE_BYTES] = "warning: ";
    if (call->quiet)
        return;
    size_t used = strlen(text);
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(text + used, sizeof text - used, fmt, ap);
    va_end(ap);
    say_line("\033[1;33m", text);
}

void qc_console_detail(const qc_call *call, int level, const char *fmt, ...)
{
    char text[LINE_BYTES];
    if (call->quiet || call->verbose < level)
        return;
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    say_line("\033[1m", text);
}

void qc_console_error(const qc_error *err, const char *hint, int where)
{
    char text[LINE_BYTES];
    const char *message = err->msg[0] ? err->msg : qc_status_meaning(err->code);
    int n = snprintf(text, sizeof text, "%s%s%s", message, hint ? "; " : "", hint ? hint : "");
    if (where && err->file && n > 0 && (size_t)n < sizeof text) {
        (void)snprintf(text + n, sizeof text - (size_t)n, " [%s:%d]", qc_last_name(err->file),
                       err->line);
    }
    say_line("\033[1;31m", text);
}

#include "convert/term/progress.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/clock.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS        (160 * 1000 * 1000)
#define LINE_MIN_S     2.0
#define LINE_MAX_S     30.0
#define SAMPLES        32 /* about five seconds of ticks */
#define BAR_MIN_CELLS  8
#define BAR_MAX_CELLS  40
#define PREFIX_COLUMNS 7 /* "qconv: " */

typedef enum { SHOW_NOTHING, SHOW_LINES, SHOW_BAR, SHOW_JSON } show_kind;

struct qc_progress {
    const char *verb;
    _Atomic uint64_t total_bytes, done_bytes;
    _Atomic int no_amounts;
    show_kind show;
    double start_s;

    /* used by the drawing thread only */
    struct {
        double at_s;
        uint64_t bytes;
    } samples[SAMPLES];
    unsigned sample_count;
    double last_line_s;
    unsigned last_tenth;
    char last_json[QC_PROGRESS_TEXT_BYTES];

    pthread_t thread;
    pthread_mutex_t lock; /* protects stop; it is a leaf lock */
    pthread_cond_t stopped;
    int stop;
};

static double now_s(void)
{
    return (double)qc_clock_ns() * 1e-9;
}

/* ---- text ---- */

static unsigned percent_of(uint64_t done, uint64_t total)
{
    return total == 0 ? 0 : (unsigned)((double)done / (double)total * 100.0);
}

/* "0:10", "1:02:03" */
static void time_left(char *out, size_t out_bytes, double seconds)
{
    if (!(seconds < 360000.0))
        seconds = 359999.0;
    unsigned s = (unsigned)(seconds + 0.5);
    if (s < 3600)
        (void)snprintf(out, out_bytes, "%u:%02u", s / 60, s % 60);
    else
        (void)snprintf(out, out_bytes, "%u:%02u:%02u", s / 3600, s / 60 % 60, s % 60);
}

/* "  5.90 of 14.0 GB  812 MB/s  0:10 left" */
static void tail_text(char *out, size_t out_bytes, const qc_progress_state *s)
{
    char done[QC_SIZE_TEXT_BYTES], total[QC_SIZE_TEXT_BYTES], rate[QC_SIZE_TEXT_BYTES];
    char left[QC_SIZE_TEXT_BYTES];
    size_t used = 0;
    int n = 0;
    out[0] = '\0';
    if (!s->no_amounts) {
        n = snprintf(out, out_bytes, "  %s%s%s", qc_text_bytes(done, s->done_bytes),
                     s->total_bytes ? " of " : "",
                     s->total_bytes ? qc_text_bytes(total, s->total_bytes) : "");
        used += n > 0 ? (size_t)n : 0;
    }
    if (s->rate <= 0.0)
        return;
    if (!s->no_amounts) {
        n = snprintf(out + used, out_bytes - used, "  %s",
                     qc_text_rate(rate, (uint64_t)(s->rate + 0.5), 1.0));
        used += n > 0 ? (size_t)n : 0;
    }
    if (s->total_bytes > s->done_bytes) {
        time_left(left, sizeof left, (double)(s->total_bytes - s->done_bytes) / s->rate);
        (void)snprintf(out + used, out_bytes - used, "  %s left", left);
    }
}

void qc_progress_text(char out[QC_PROGRESS_TEXT_BYTES], const qc_progress_state *state)
{
    qc_progress_state s = *state;
    char head[64], tail[160], cells[BAR_MAX_CELLS + 1] = "";
    if (s.total_bytes && s.done_bytes > s.total_bytes)
        s.done_bytes = s.total_bytes;
    if (s.total_bytes)
        (void)snprintf(head, sizeof head, "%s %3u%%", s.verb,
                       percent_of(s.done_bytes, s.total_bytes));
    else
        (void)snprintf(head, sizeof head, "%s", s.verb);
    tail_text(tail, sizeof tail, &s);
    /* The last column stays free, because some terminals wrap when it is written. */
    size_t room = s.columns > 0 ? s.columns - 1 : 0;
    size_t taken = PREFIX_COLUMNS + strlen(head) + strlen(tail) + 3;
    size_t width = room > taken ? room - taken : 0;
    if (width > BAR_MAX_CELLS)
        width = BAR_MAX_CELLS;
    if (s.bar && s.total_bytes && width >= BAR_MIN_CELLS) {
        size_t full = (size_t)((double)width * ((double)s.done_bytes / (double)s.total_bytes));
        memset(cells, '-', width);
        memset(cells, '#', full);
        cells[width] = '\0';
        (void)snprintf(out, QC_PROGRESS_TEXT_BYTES, "%s [%s]%s", head, cells, tail);
    } else {
        (void)snprintf(out, QC_PROGRESS_TEXT_BYTES, "%s%s", head, tail);
    }
    if (s.bar) {
        size_t keep = room > PREFIX_COLUMNS ? room - PREFIX_COLUMNS : 0;
        if (strlen(out) > keep)
            out[keep] = '\0';
    }
}

void qc_progress_json(char out[QC_PROGRESS_TEXT_BYTES], const qc_progress_state *s)
{
    const uint64_t done =
        s->total_bytes && s->done_bytes > s->total_bytes ? s->total_bytes : s->done_bytes;
    const char *unit = s->no_amounts ? "steps" : "bytes";
    char total[24] = "null";
    if (s->total_bytes)
        (void)snprintf(total, sizeof total, "%" PRIu64, s->total_bytes);
    (void)snprintf(out, QC_PROGRESS_TEXT_BYTES,
                   "{\"progress\": \"%s\", \"done\": %" PRIu64 ", \"total\": %s, \"unit\": \"%s\"}",
                   s->verb, done, total, unit);
}

/* ---- drawing ---- */

/* The rate over the samples that are kept; 0 until half a second has passed. */
static double recent_rate(qc_progress *p, double t, uint64_t done)
{
    unsigned kept = p->sample_count < SAMPLES ? p->sample_count : SAMPLES;
    unsigned oldest = p->sample_count < SAMPLES ? 0 : p->sample_count % SAMPLES;
    double rate = 0.0;
    if (kept > 0) {
        double seconds = t - p->samples[oldest].at_s;
        if (seconds >= 0.5)
            rate = (double)(done - p->samples[oldest].bytes) / seconds;
    }
    p->samples[p->sample_count % SAMPLES].at_s = t;
    p->samples[p->sample_count % SAMPLES].bytes = done;
    p->sample_count++;
    return rate;
}

static void draw(qc_progress *p)
{
    char text[QC_PROGRESS_TEXT_BYTES], line[QC_PROGRESS_TEXT_BYTES + PREFIX_COLUMNS];
    double t = now_s();
    uint64_t done = atomic_load(&p->done_bytes);
    qc_progress_state s = {.verb = qc_interrupted() ? "stopping" : p->verb,
                           .done_bytes = done,
                           .total_bytes = p->total_bytes,
                           .no_amounts = p->no_amounts,
                           .rate = recent_rate(p, t, done)};
    if (p->show == SHOW_BAR) {
        struct winsize size;
        const int known = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
        s.bar = 1;
        s.columns = known ? size.ws_col : 80;
        qc_progress_text(text, &s);
        (void)snprintf(line, sizeof line, "qconv: %s", text);
        qc_console_bar(line);
        return;
    }
    if (p->show == SHOW_JSON) {
        qc_progress_json(text, &s);
        /* Before anything is done the unit may still change. */
        if (done && strcmp(text, p->last_json) != 0)
            qc_console_record(text);
        memcpy(p->last_json, text, sizeof text);
        return;
    }
    unsigned tenth = percent_of(done, p->total_bytes) / 10;
    double since = t - p->last_line_s;
    if ((tenth > p->last_tenth && since >= LINE_MIN_S) || since >= LINE_MAX_S) {
        /* We take the rate over the whole time, because samples of a few seconds jump about. */
        s.rate = (double)done / (t - p->start_s);
        qc_progress_text(text, &s);
        qc_console_line(text);
        p->last_line_s = t;
        p->last_tenth = tenth;
    }
}

static void *draw_until_stopped(void *arg)
{
    qc_progress *p = arg;
    struct timespec until;
    pthread_mutex_lock(&p->lock);
    while (!p->stop) {
        pthread_mutex_unlock(&p->lock);
        draw(p);
        pthread_mutex_lock(&p->lock);
        (void)clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += TICK_NS;
        if (until.tv_nsec >= 1000 * 1000 * 1000) {
            until.tv_nsec -= 1000 * 1000 * 1000;
            until.tv_sec++;
        }
        while (!p->stop && pthread_cond_timedwait(&p->stopped, &p->lock, &until) == 0)
            ;
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

/* ---- life ---- */

static show_kind choose_show(const qc_call *call)
{
    if (call->quiet || call->progress == QC_PROGRESS_NEVER)
        return SHOW_NOTHING;
    if (call->progress == QC_PROGRESS_ALWAYS)
        return SHOW_BAR;
    if (call->progress == QC_PROGRESS_JSON)
        return SHOW_JSON;
    return qc_console_terminal(STDERR_FILENO) ? SHOW_BAR : SHOW_LINES;
}

static qc_status start_thread(qc_progress *p, qc_error *err)
{
    QC_TRY(qc_lock_init(&p->lock, &p->stopped, err));
    qc_status st =
        qc_thread_start(&p->thread, draw_until_stopped, p, "the thread that shows progress", err);
    if (st != QC_OK)
        qc_lock_deinit(&p->lock, &p->stopped);
    return st;
}

qc_status qc_progress_create(qc_progress **out, const qc_call *call, const char *verb,
                             uint64_t total_bytes, qc_error *err)
{
    qc_progress *p = NULL;
    QC_TRY(qc_calloc(&p, 1, sizeof *p, err));
    p->verb = verb;
    p->total_bytes = total_bytes;
    p->start_s = now_s();
    p->last_line_s = p->start_s;
    p->show = choose_show(call);
    /* We draw once before the thread starts, so that something is seen even if the work is
     * short. */
    if (p->show == SHOW_BAR)
        draw(p);
    qc_status st = p->show == SHOW_NOTHING ? QC_OK : start_thread(p, err);
    if (st != QC_OK) {
        qc_console_bar("");
        qc_free(p);
        return st;
    }
    *out = p;
    return QC_OK;
}

void qc_progress_hide_amounts(qc_progress *p)
{
    atomic_store(&p->no_amounts, 1);
}

void qc_progress_add(qc_progress *p, uint64_t bytes)
{
    if (p)
        atomic_fetch_add_explicit(&p->done_bytes, bytes, memory_order_relaxed);
}

double qc_progress_seconds(const qc_progress *p)
{
    return now_s() - p->start_s;
}

void qc_progress_destroy(qc_progress *p)
{
    if (!p)
        return;
    if (p->show != SHOW_NOTHING) {
        pthread_mutex_lock(&p->lock);
        p->stop = 1;
        pthread_cond_signal(&p->stopped);
        pthread_mutex_unlock(&p->lock);
        (void)pthread_join(p->thread, NULL);
        if (p->show == SHOW_JSON)
            draw(p);
        qc_console_bar("");
        qc_lock_deinit(&p->lock, &p->stopped);
    }
    qc_free(p);
}

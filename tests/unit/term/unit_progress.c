/* Text of the bar, and what reaches standard error in each mode (a pipe in its place). */
#include "convert/term/console.h"
#include "convert/term/progress.h"
#include "tests/fixtures/test.h"

#include <pthread.h>
#include <time.h>
#include <unistd.h>

static void text_is(const qc_progress_state *s, const char *want)
{
    char out[QC_PROGRESS_TEXT_BYTES];
    qc_progress_text(out, s);
    assert_string_equal(out, want);
}

TEST(texts)
{
    qc_progress_state s = {.verb = "converting",
                           .done_bytes = 5900000000u,
                           .total_bytes = 14000000000u,
                           .rate = 812e6,
                           .bar = 1,
                           .columns = 80};
    text_is(&s, "converting  42% [#####--------]  5.90 GB of 14.0 GB  812 MB/s  0:10 left");
    s.columns = 200;
    text_is(&s, "converting  42% [################------------------------]"
                "  5.90 GB of 14.0 GB  812 MB/s  0:10 left");
    s.columns = 70;
    text_is(&s, "converting  42%  5.90 GB of 14.0 GB  812 MB/s  0:10 left");
    s.columns = 30;
    text_is(&s, "converting  42%  5.90 ");
    s.columns = 0;
    text_is(&s, "");
    s.bar = 0;
    text_is(&s, "converting  42%  5.90 GB of 14.0 GB  812 MB/s  0:10 left");
    s.rate = 1e6;
    text_is(&s, "converting  42%  5.90 GB of 14.0 GB  1.00 MB/s  2:15:00 left");
    s.rate = 0.0;
    text_is(&s, "converting  42%  5.90 GB of 14.0 GB");
    s.rate = 1e-9;
    text_is(&s, "converting  42%  5.90 GB of 14.0 GB  0 B/s  99:59:59 left");
    s.rate = 1e6;
    s.done_bytes = 15000000000u;
    text_is(&s, "converting 100%  14.0 GB of 14.0 GB  1.00 MB/s");
    s.total_bytes = 0;
    text_is(&s, "converting  15.0 GB  1.00 MB/s");
    s.bar = 1;
    s.columns = 80;
    s.done_bytes = 0;
    text_is(&s, "converting  0 B  1.00 MB/s");
}

static void json_is(const qc_progress_state *s, const char *want)
{
    char out[QC_PROGRESS_TEXT_BYTES];
    qc_progress_json(out, s);
    assert_string_equal(out, want);
}

TEST(json)
{
    qc_progress_state s = {.verb = "converting", .done_bytes = 5, .total_bytes = 14};
    json_is(&s, "{\"progress\": \"converting\", \"done\": 5, \"total\": 14, \"unit\": \"bytes\"}");
    s.done_bytes = UINT64_MAX;
    json_is(&s, "{\"progress\": \"converting\", \"done\": 14, \"total\": 14, \"unit\": \"bytes\"}");
    s.total_bytes = 0;
    json_is(&s, "{\"progress\": \"converting\", \"done\": 18446744073709551615, \"total\": null, "
                "\"unit\": \"bytes\"}");
    s.done_bytes = 7;
    s.no_amounts = 1;
    json_is(&s, "{\"progress\": \"converting\", \"done\": 7, \"total\": null, "
                "\"unit\": \"steps\"}");
}

/* ---- what is written ---- */

static int saved_stderr, pipe_read;

static void capture(void)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    saved_stderr = dup(STDERR_FILENO);
    assert_true(dup2(ends[1], STDERR_FILENO) >= 0);
    close(ends[1]);
    pipe_read = ends[0];
}

static size_t captured(char *out, size_t room)
{
    size_t used = 0;
    ssize_t n;
    assert_true(dup2(saved_stderr, STDERR_FILENO) >= 0);
    close(saved_stderr);
    while (used + 1 < room && (n = read(pipe_read, out + used, room - 1 - used)) > 0)
        used += (size_t)n;
    close(pipe_read);
    out[used] = '\0';
    return used;
}

static void wait_ms(long ms)
{
    struct timespec t = {ms / 1000, ms % 1000 * 1000000};
    (void)nanosleep(&t, NULL);
}

static void run_progress(const qc_call *o, const char *warning, char *out, size_t room)
{
    qc_progress *p = NULL;
    capture();
    assert_int_equal(qc_progress_create(&p, o, "testing", 1000, NULL), QC_OK);
    qc_progress_add(p, 500);
    wait_ms(400);
    if (warning)
        qc_console_warn(o, "%s", warning);
    wait_ms(300);
    assert_true(qc_progress_seconds(p) > 0.6);
    qc_progress_destroy(p);
    (void)captured(out, room);
}

TEST(bar_comes_and_goes)
{
    char out[16384];
    qc_call o = {.progress = QC_PROGRESS_ALWAYS};
    run_progress(&o, "careful\n\033[2J", out, sizeof out);
    assert_non_null(strstr(out, "qconv: testing  50% [##########"));
    /* The warning has a line of its own. */
    assert_non_null(strstr(out, "\r\033[Kqconv: warning: careful??[2J\n\rqconv: testing"));
    assert_string_equal(out + strlen(out) - 4, "\r\033[K");
}

TEST(nothing_when_quiet_never_or_short)
{
    char out[4096];
    qc_call quiet = {.quiet = 1, .progress = QC_PROGRESS_ALWAYS};
    run_progress(&quiet, "unheard", out, sizeof out);
    assert_string_equal(out, "");
    qc_call never = {.progress = QC_PROGRESS_NEVER};
    run_progress(&never, NULL, out, sizeof out);
    assert_string_equal(out, "");
    qc_call off_terminal = {.progress = QC_PROGRESS_AUTO};
    run_progress(&off_terminal, NULL, out, sizeof out);
    assert_string_equal(out, "");
}

/* A line when more is done and one at the end; nothing as long as nothing is done. */
TEST(json_lines)
{
    char out[4096];
    qc_call o = {.progress = QC_PROGRESS_JSON};
    qc_progress *p = NULL;
    capture();
    assert_int_equal(qc_progress_create(&p, &o, "testing", 1000, NULL), QC_OK);
    wait_ms(400);
    qc_progress_add(p, 500);
    wait_ms(600);
    qc_console_warn(&o, "careful");
    qc_progress_add(p, 500);
    qc_progress_destroy(p);
    assert_int_equal(qc_progress_create(&p, &o, "nothing", 1000, NULL), QC_OK);
    qc_progress_destroy(p);
    (void)captured(out, sizeof out);
    assert_string_equal(
        out, "{\"progress\": \"testing\", \"done\": 500, \"total\": 1000, \"unit\": \"bytes\"}\n"
             "qconv: warning: careful\n"
             "{\"progress\": \"testing\", \"done\": 1000, \"total\": 1000, \"unit\": \"bytes\"}\n");
}

TEST(plain_lines)
{
    char out[4096];
    qc_call o = {.progress = QC_PROGRESS_AUTO};
    qc_progress *p = NULL;
    capture();
    assert_int_equal(qc_progress_create(&p, &o, "testing", 1000, NULL), QC_OK);
    qc_progress_add(p, 90);
    wait_ms(2300);
    qc_progress_add(p, 20);
    wait_ms(400);
    qc_progress_add(p, 500);
    wait_ms(400);
    qc_progress_destroy(p);
    (void)captured(out, sizeof out);
    /* 9%: no tenth; 11%: a line; 61%: too soon after it. */
    assert_memory_equal(out, "qconv: testing  11%  110 B of 1.00 KB", 37);
    assert_string_equal(strchr(out, '\n'), "\n");
}

#define ADDERS 8
#define ADDS   10000

static void *add_many(void *arg)
{
    for (int i = 0; i < ADDS; i++)
        qc_progress_add(arg, 1);
    return NULL;
}

TEST(threads_add)
{
    char out[65536];
    pthread_t threads[ADDERS];
    qc_call o = {.progress = QC_PROGRESS_ALWAYS};
    qc_progress *p = NULL;
    capture();
    assert_int_equal(qc_progress_create(&p, &o, "testing", ADDERS * ADDS, NULL), QC_OK);
    for (int i = 0; i < ADDERS; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, add_many, p), 0);
    for (int i = 0; i < ADDERS; i++)
        pthread_join(threads[i], NULL);
    wait_ms(400);
    qc_progress_destroy(p);
    (void)captured(out, sizeof out);
    assert_non_null(strstr(out, "testing 100%"));
    qc_progress_add(NULL, 1);
    qc_progress_destroy(NULL);
}

int main(void)
{
    (void)unsetenv("NO_COLOR");
    return test_run_all(NULL);
}

#define _DEFAULT_SOURCE /* struct winsize, TIOCGWINSZ */
#include "convert/hardware/memory_watch.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "base/text.h"
#include "base/workers.h"
#include "convert/hardware/nvml_gpu.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/file_io.h"
#include "formats/json_writer.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MAX_TEXT_BYTES    (1u << 24)
#define MAX_GPU_PROCESSES 256u
#define MAX_PROCESSES     65536u
#define NAME_BYTES        64
#define STAMP_BYTES       48

typedef struct {
    const qc_gpu *gpu;
    int lost;
    qc_nvml_memory now;
    uint64_t first_used, peak_used;
    double peak_seconds;
} watched_gpu;

typedef struct {
    uint32_t gpu; /* index in gpus */
    unsigned pid;
    char name[NAME_BYTES]; /* "" if not known */
    int running;           /* is it in the latest sample? */
    int bytes_known;       /* were they known in any sample? */
    uint64_t bytes, peak;
} watched_process;

typedef struct {
    const qc_call *call;
    const qc_hardware_options *options;
    qc_nvml *nvml;
    watched_gpu *gpus;
    uint32_t gpu_count, lost_count;
    watched_process *processes; /* owned; in the order in which they appeared */
    size_t process_count, process_room;
    int processes_unlisted; /* the user has been told already */
    uint64_t start_ns, samples;
    double seconds; /* time of the latest sample since the start */
    char stamp[STAMP_BYTES];
    int terminal, reader_gone;
    unsigned drawn_lines;
    qc_file csv;
    uint64_t csv_bytes;
    char lost_why[256];
} watch;

/* ---- sampling ---- */

/* Reads the name that the system has for the process; it is "" in a container that does not see
 * it. */
static void read_name(char name[NAME_BYTES], unsigned pid)
{
    char path[64];
    name[0] = '\0';
    (void)snprintf(path, sizeof path, "/proc/%u/comm", pid);
    FILE *f = fopen(path, "r");
    if (!f)
        return;
    if (!fgets(name, NAME_BYTES, f))
        name[0] = '\0';
    (void)fclose(f);
    name[strcspn(name, "\n")] = '\0';
    qc_console_printable(name);
}

static qc_status find_process(watch *w, uint32_t gpu, unsigned pid, watched_process **out,
                              qc_error *err)
{
    for (size_t i = 0; i < w->process_count; i++) {
        *out = &w->processes[i];
        if ((*out)->gpu == gpu && (*out)->pid == pid)
            return QC_OK;
    }
    *out = NULL;
    if (w->process_count == MAX_PROCESSES)
        return QC_OK;
    if (w->process_count == w->process_room) {
        size_t room = w->process_room ? w->process_room * 2 : 64;
        void *p = w->processes;
        QC_TRY(qc_realloc_array(&p, room, sizeof *w->processes, err));
        w->processes = p;
        w->process_room = room;
    }
    *out = &w->processes[w->process_count++];
    **out = (watched_process){.gpu = gpu, .pid = pid};
    read_name((*out)->name, pid);
    return QC_OK;
}

static qc_status sample_processes(watch *w, uint32_t gpu, qc_error *err)
{
    qc_nvml_process list[MAX_GPU_PROCESSES];
    unsigned count = 0;
    qc_error why = {0};
    qc_status st = qc_nvml_processes(w->nvml, w->gpus[gpu].gpu->driver_index, list,
                                     MAX_GPU_PROCESSES, &count, &why);
    if (st == QC_ERR_UNSUPPORTED && !w->processes_unlisted)
        qc_console_warn(w->call, "processes cannot be followed: %s", why.msg);
    w->processes_unlisted |= st == QC_ERR_UNSUPPORTED;
    if (st == QC_ERR_NOMEM) {
        if (err)
            *err = why;
        return st;
    }
    for (unsigned i = 0; i < count; i++) {
        watched_process *p = NULL;
        QC_TRY(find_process(w, gpu, list[i].pid, &p, err));
        if (!p)
            continue;
        p->running = 1;
        p->bytes = list[i].bytes;
        p->bytes_known |= list[i].bytes_known;
        p->peak = p->bytes > p->peak ? p->bytes : p->peak;
    }
    return QC_OK;
}

static void set_stamp(watch *w)
{
    struct timespec now;
    struct tm utc;
    w->seconds = (double)(qc_clock_ns() - w->start_ns) / 1e9;
    clock_gettime(CLOCK_REALTIME, &now);
    if (!gmtime_r(&now.tv_sec, &utc))
        memset(&utc, 0, sizeof utc);
    size_t n = strftime(w->stamp, sizeof w->stamp, "%Y-%m-%dT%H:%M:%S", &utc);
    (void)snprintf(w->stamp + n, sizeof w->stamp - n, ".%03uZ",
                   (unsigned)(now.tv_nsec / 1000000) % 1000u);
}

static qc_status take_sample(watch *w, qc_error *err)
{
    set_stamp(w);
    for (size_t i = 0; i < w->process_count; i++) {
        w->processes[i].running = 0;
        w->processes[i].bytes = 0;
    }
    for (uint32_t i = 0; i < w->gpu_count; i++) {
        watched_gpu *g = &w->gpus[i];
        qc_error why = {0};
        if (g->lost)
            continue;
        if (qc_nvml_read_memory(w->nvml, g->gpu->driver_index, &g->now, &why) != QC_OK) {
            g->lost = 1;
            w->lost_count++;
            (void)snprintf(w->lost_why, sizeof w->lost_why, "%.*s", (int)sizeof w->lost_why - 1,
                           why.msg);
            qc_console_warn(w->call, "cuda:%u is lost after %.1f s: %s", g->gpu->index, w->seconds,
                            why.msg);
            continue;
        }
        if (w->samples == 0)
            g->first_used = g->now.used_bytes;
        if (g->now.used_bytes > g->peak_used || w->samples == 0) {
            g->peak_used = g->now.used_bytes;
            g->peak_seconds = w->seconds;
        }
        QC_TRY(sample_processes(w, i, err));
    }
    w->samples++;
    return QC_OK;
}

/* ---- CSV ---- */

/* Quotes the text where RFC 4180 wants it. Control characters have been removed before. */
static void put_csv_text(qc_strbuf *out, const char *text)
{
    if (!strpbrk(text, ",\"")) {
        qc_strbuf_puts(out, text);
        return;
    }
    qc_strbuf_puts(out, "\"");
    for (; *text; text++)
        qc_strbuf_putf(out, *text == '"' ? "%c\"" : "%c", *text);
    qc_strbuf_puts(out, "\"");
}

static void put_csv_sample(const watch *w, qc_strbuf *out)
{
    for (uint32_t i = 0; i < w->gpu_count; i++) {
        const watched_gpu *g = &w->gpus[i];
        qc_strbuf_putf(out, "%s,%.3f,%s,%u,,,", w->stamp, w->seconds, g->lost ? "lost" : "gpu",
                       g->gpu->index);
        if (!g->lost)
            qc_strbuf_putf(out, "%" PRIu64 ",%" PRIu64, g->now.used_bytes, g->now.free_bytes);
        else
            qc_strbuf_puts(out, ",");
        qc_strbuf_putf(out, ",%" PRIu64 ",%" PRIu64 "\n", g->gpu->total_bytes, g->peak_used);
    }
    for (size_t i = 0; i < w->process_count; i++) {
        const watched_process *p = &w->processes[i];
        if (!p->running)
            continue;
        qc_strbuf_putf(out, "%s,%.3f,process,%u,%u,", w->stamp, w->seconds,
                       w->gpus[p->gpu].gpu->index, p->pid);
        put_csv_text(out, p->name);
        if (p->bytes_known)
            qc_strbuf_putf(out, ",%" PRIu64 ",,,%" PRIu64 "\n", p->bytes, p->peak);
        else
            qc_strbuf_puts(out, ",,,,\n");
    }
}

/* Writes the samples to the file at once, so that whoever reads it sees whole samples. */
static qc_status write_csv(watch *w, qc_error *err)
{
    qc_strbuf text;
    if (!w->options->csv)
        return QC_OK;
    qc_strbuf_init(&text, MAX_TEXT_BYTES);
    if (w->csv_bytes == 0)
        qc_strbuf_puts(&text, "time,seconds,kind,gpu,pid,process,used_bytes,free_bytes,total_bytes,"
                              "peak_bytes\n");
    put_csv_sample(w, &text);
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK)
        st = qc_file_pwrite(&w->csv, text.data, text.len, w->csv_bytes, err);
    if (st == QC_OK)
        w->csv_bytes += text.len;
    qc_strbuf_deinit(&text);
    return st;
}

/* ---- showing ---- */

/* Does what qc_console_result does, but also notes whether the reader has gone. There is then
 * nobody to go on for. */
static qc_status put_out(watch *w, const qc_strbuf *text, qc_error *err)
{
    for (size_t done = 0; done < text->len;) {
        ssize_t n = write(STDOUT_FILENO, text->data + done, text->len - done);
        if (n >= 0) {
            done += (size_t)n;
        } else if (errno == EPIPE) {
            w->reader_gone = 1;
            return QC_OK;
        } else if (errno != EINTR) {
            QC_FAIL(err, QC_ERR_IO, "standard output: %s", strerror(errno));
        }
    }
    return QC_OK;
}

static void put_lines(const watch *w, qc_strbuf *out)
{
    char used[QC_SIZE_TEXT_BYTES], left[QC_SIZE_TEXT_BYTES], peak[QC_SIZE_TEXT_BYTES];
    for (uint32_t i = 0; i < w->gpu_count; i++) {
        const watched_gpu *g = &w->gpus[i];
        (void)qc_text_bytes(used, g->now.used_bytes);
        (void)qc_text_bytes(left, g->now.free_bytes);
        (void)qc_text_bytes(peak, g->peak_used);
        qc_strbuf_putf(out, "%.2f s  cuda:%u  ", w->seconds, g->gpu->index);
        if (g->lost)
            qc_strbuf_putf(out, "lost, peak %s\n", peak);
        else
            qc_strbuf_putf(out, "used %s, free %s, peak %s\n", used, left, peak);
    }
    for (size_t i = 0; i < w->process_count; i++) {
        const watched_process *p = &w->processes[i];
        if (!p->running)
            continue;
        qc_strbuf_putf(out, "%.2f s  cuda:%u  pid %u %s", w->seconds, w->gpus[p->gpu].gpu->index,
                       p->pid, p->name[0] ? p->name : "?");
        if (p->bytes_known)
            qc_strbuf_putf(out, "  used %s, peak %s\n", qc_text_bytes(used, p->bytes),
                           qc_text_bytes(peak, p->peak));
        else
            qc_strbuf_puts(out, "  memory not known\n");
    }
}

static void put_gpu_table(const watch *w, qc_arena *arena, int final, qc_strbuf *out)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_table_begin(&t, arena, "GPU|name|>memory|>used|>free|>peak|>at|");
    for (uint32_t i = 0; i < w->gpu_count; i++) {
        const watched_gpu *g = &w->gpus[i];
        int now = !final && !g->lost;
        qc_table_putf(&t, "cuda:%u", g->gpu->index);
        qc_table_put(&t, g->gpu->name);
        qc_table_bytes(&t, g->gpu->total_bytes);
        qc_table_put(&t, now ? qc_text_bytes(size, g->now.used_bytes) : "");
        qc_table_put(&t, now ? qc_text_bytes(size, g->now.free_bytes) : "");
        qc_table_bytes(&t, g->peak_used);
        qc_table_put(&t, final ? qc_text_seconds(size, g->peak_seconds) : "");
        qc_table_put(&t, g->lost ? "lost" : "");
    }
    qc_table_print(&t, 0, out);
}

static void put_process_table(const watch *w, qc_arena *arena, int final, qc_strbuf *out)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_table_begin(&t, arena, "GPU|>pid|process|>used|>peak");
    for (size_t i = 0; i < w->process_count; i++) {
        const watched_process *p = &w->processes[i];
        if (!final && !p->running)
            continue;
        qc_table_putf(&t, "cuda:%u", w->gpus[p->gpu].gpu->index);
        qc_table_number(&t, p->pid);
        qc_table_put(&t, p->name[0] ? p->name : NULL);
        if (final)
            qc_table_put(&t, "");
        else
            qc_table_put(&t, p->bytes_known ? qc_text_bytes(size, p->bytes) : NULL);
        qc_table_put(&t, p->bytes_known ? qc_text_bytes(size, p->peak) : NULL);
    }
    qc_table_print(&t, 0, out);
}

/* Draws the text on a terminal over what was drawn before. Lines are cut to its width and height,
 * so that none wraps or scrolls and we know how far to go back up. */
static void overdraw(watch *w, const qc_strbuf *text, qc_strbuf *out)
{
    struct winsize size = {.ws_row = 0};
    unsigned lines = 0;
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row < 2 || size.ws_col < 2)
        size = (struct winsize){.ws_row = 24, .ws_col = 80};
    qc_strbuf_puts(out, "\r");
    if (w->drawn_lines)
        qc_strbuf_putf(out, "\033[%uA", w->drawn_lines);
    for (const char *line = text->data; line && *line && lines + 1u < size.ws_row; lines++) {
        size_t len = strcspn(line, "\n"), shown = len;
        if (shown > size.ws_col)
            shown = size.ws_col;
        while (shown < len && shown > 0 && ((unsigned char)line[shown] & 0xc0) == 0x80)
            shown--; /* do not cut a character in the middle */
        qc_strbuf_put(out, line, shown);
        qc_strbuf_puts(out, "\033[K\n");
        line += len;
        line += *line == '\n';
    }
    w->drawn_lines = lines;
    qc_strbuf_puts(out, "\033[J");
}

static void put_tables(const watch *w, int final, qc_arena *arena, qc_strbuf *out)
{
    put_gpu_table(w, arena, final, out);
    put_process_table(w, arena, final, out);
}

static qc_status draw(watch *w, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, MAX_TEXT_BYTES);
    qc_strbuf_putf(&text, "%s  %.1f s, %" PRIu64 " samples\n", w->stamp, w->seconds, w->samples);
    put_tables(w, 0, arena, &text);
    qc_status st = qc_strbuf_status(&text, err);
    if (st == QC_OK)
        overdraw(w, &text, out);
    qc_strbuf_deinit(&text);
    return st;
}

static qc_status put_sample(watch *w, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    if (w->terminal)
        return draw(w, arena, out, err);
    put_lines(w, out);
    return QC_OK;
}

/* Writes what `put` says about a sample, or about all of them. */
static qc_status show(watch *w,
                      qc_status (*put)(watch *w, qc_arena *arena, qc_strbuf *out, qc_error *err),
                      qc_error *err)
{
    qc_strbuf out;
    qc_arena arena;
    if (w->reader_gone)
        return QC_OK;
    qc_strbuf_init(&out, MAX_TEXT_BYTES);
    qc_arena_init(&arena);
    qc_status st = put(w, &arena, &out, err);
    if (st == QC_OK)
        st = qc_strbuf_status(&out, err);
    if (st == QC_OK)
        st = put_out(w, &out, err);
    qc_arena_deinit(&arena);
    qc_strbuf_deinit(&out);
    return st;
}

/* ---- the end ---- */

static void put_json(const watch *w, qc_json_writer *j)
{
    qc_json_write_begin_object(j);
    qc_json_member_string(j, "command", "watch");
    qc_json_member_u64(j, "samples", w->samples);
    qc_json_member_double(j, "seconds", w->seconds);
    qc_json_member_bool(j, "interrupted", qc_interrupted());
    qc_json_member_begin_array(j, "gpus");
    for (uint32_t i = 0; i < w->gpu_count; i++) {
        const watched_gpu *g = &w->gpus[i];
        qc_json_member_begin_row(j);
        qc_json_member_u64(j, "index", g->gpu->index);
        qc_json_member_string(j, "name", g->gpu->name);
        qc_json_member_u64(j, "total_bytes", g->gpu->total_bytes);
        qc_json_member_u64(j, "first_used_bytes", g->first_used);
        qc_json_member_u64(j, "peak_used_bytes", g->peak_used);
        qc_json_member_double(j, "peak_seconds", g->peak_seconds);
        qc_json_member_bool(j, "lost", g->lost);
        qc_json_write_end_object(j);
    }
    qc_json_write_end_array(j);
    qc_json_member_begin_array(j, "processes");
    for (size_t i = 0; i < w->process_count; i++) {
        const watched_process *p = &w->processes[i];
        qc_json_member_begin_row(j);
        qc_json_member_u64(j, "gpu", w->gpus[p->gpu].gpu->index);
        qc_json_member_u64(j, "pid", p->pid);
        qc_json_member_string(j, "name", p->name[0] ? p->name : NULL);
        qc_json_member_u64_if(j, "peak_bytes", p->bytes_known, p->peak);
        qc_json_write_end_object(j);
    }
    qc_json_write_end_array(j);
    qc_json_write_end_object(j);
}

static qc_status put_peaks(watch *w, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    if (w->call->json) {
        qc_json_writer j;
        qc_json_write_init(&j, out, err);
        put_json(w, &j);
        QC_TRY(qc_json_write_finish(&j));
        qc_strbuf_puts(out, "\n");
        return QC_OK;
    }
    qc_strbuf_putf(out, "%speaks of %" PRIu64 " sample%s in %.1f s\n", w->terminal ? "\n" : "",
                   w->samples, qc_plural(w->samples), w->seconds);
    put_tables(w, 1, arena, out);
    return QC_OK;
}

/* Sleeps until then, or until an interrupt. Its signal may come just before the sleep, so we sleep
 * in short intervals. */
static void sleep_until(uint64_t then_ns)
{
    const uint64_t step_ns = 50u * 1000 * 1000;
    for (;;) {
        uint64_t now = qc_clock_ns();
        if (qc_interrupted() || now >= then_ns)
            return;
        uint64_t ns = then_ns - now < step_ns ? then_ns - now : step_ns;
        struct timespec t = {.tv_sec = 0, .tv_nsec = (long)ns};
        (void)nanosleep(&t, NULL);
    }
}

static qc_status follow(watch *w, qc_error *err)
{
    uint64_t interval_ns = (uint64_t)(w->options->interval * 1e9);
    uint64_t next_ns = w->start_ns = qc_clock_ns();
    for (;;) {
        QC_TRY(take_sample(w, err));
        QC_TRY(write_csv(w, err));
        if (!w->call->quiet && !w->call->json)
            QC_TRY(show(w, put_sample, err));
        if (w->samples == w->options->samples || w->lost_count == w->gpu_count || w->reader_gone)
            return QC_OK;
        next_ns += interval_ns;
        if (next_ns < qc_clock_ns())
            /* taking a sample took longer than the interval; do not try to catch up */
            next_ns = qc_clock_ns();
        sleep_until(next_ns);
        if (qc_interrupted())
            return QC_OK;
    }
}

qc_status qc_memory_watch(const qc_hardware *h, const qc_call *call, const qc_hardware_options *o,
                          qc_error *err)
{
    watch w = {.call = call, .options = o, .gpu_count = h->gpu_count, .csv = QC_FILE_CLOSED};
    if (h->gpu_count == 0)
        QC_FAIL(err, QC_ERR_DEVICE, "--watch: there is no GPU to watch: %s", h->no_gpu);
    QC_TRY(qc_arena_alloc(call->arena, &w.gpus, h->gpu_count, sizeof *w.gpus, err));
    for (uint32_t i = 0; i < h->gpu_count; i++)
        w.gpus[i].gpu = &h->gpus[i];
    w.terminal = qc_console_terminal(STDOUT_FILENO);
    if (o->csv)
        QC_TRY(qc_file_create(&w.csv, o->csv, err));
    qc_status st = qc_nvml_open(&w.nvml, err);
    if (st == QC_OK)
        st = follow(&w, err);
    if (st == QC_OK && (call->json || !call->quiet))
        st = show(&w, put_peaks, err);
    qc_nvml_close(w.nvml);
    qc_free(w.processes);
    if (st != QC_OK) {
        qc_file_discard(&w.csv);
        return st;
    }
    if (o->csv)
        QC_TRY(qc_file_close(&w.csv, err));
    if (w.lost_count == w.gpu_count)
        QC_FAIL(err, QC_ERR_DEVICE, "--watch: there is no GPU left to watch: %s", w.lost_why);
    QC_TRY(qc_check_interrupted(err));
    return QC_OK;
}

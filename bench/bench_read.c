/* How fast a team reads files, by the way it asks for them; no work is done on what is read.
 *
 *   bench_read [--threads N] [--way WAY] [--window MIB] FILE...
 *
 * Items of 16 MiB are dealt out in order, as frames are in a conversion, and read in steps of 512
 * KiB:
 *   plain     the kernel reads ahead as it guesses
 *   ahead     formats/read_ahead.h as convert uses it: hints for a window, pages given back
 *   keep      the same, pages stay
 *   dontcache RWF_DONTCACHE (Linux 6.14)
 *   stream    as convert does where nothing is cached: formats/direct_read.h, past the cache, some
 *             requests ahead
 *   direct    O_DIRECT, past the page cache, no reading ahead
 *   direct16  the same, an item at a time
 * Prints one JSON object: bytes, seconds, and processor seconds of user and system. */
#define _GNU_SOURCE /* O_DIRECT, preadv2 */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/workers.h"
#include "formats/direct_read.h"
#include "formats/read_ahead.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#define ITEM_BYTES (16u << 20)
#define STEP_BYTES (512u << 10)
#define ALIGNMENT  4096u
#define DONTCACHE  0x80 /* RWF_DONTCACHE, which older headers lack */

typedef struct {
    qc_file *files;
    uint64_t *bytes;
    uint32_t *first; /* item of each file */
    uint32_t file_count, items;
    size_t step;
    int flags;
    int ahead, stream;
    qc_read_ahead reads;
    atomic_uint_fast32_t next;
} reading;

static qc_read_range range_of(void *ctx, uint32_t item)
{
    const reading *r = ctx;
    uint32_t f = 0;
    while (f + 1 < r->file_count && r->first[f + 1] <= item)
        f++;
    uint64_t offset = (uint64_t)(item - r->first[f]) * ITEM_BYTES;
    uint64_t left = r->bytes[f] - offset;
    return (qc_read_range){&r->files[f], offset, left < ITEM_BYTES ? left : ITEM_BYTES, f};
}

static qc_status stream_item(const reading *r, uint32_t item, qc_direct_reader *d,
                             unsigned char *buf, qc_error *err)
{
    qc_read_range a;
    if (!qc_read_ahead_is_direct(&r->reads, item, &a) ||
        !qc_direct_begin(d, a.file, a.offset, a.bytes))
        QC_FAIL(err, QC_ERR_IO, "item %u cannot be read past the cache, or was in it", item);
    for (uint64_t done = 0; done < a.bytes; done += r->step) {
        size_t n = a.bytes - done < r->step ? (size_t)(a.bytes - done) : r->step;
        if (!qc_direct_read(d, a.file, buf, n, a.offset + done))
            QC_FAIL(err, QC_ERR_IO, "%s: could not be read", a.file->path);
    }
    qc_direct_end(d);
    return QC_OK;
}

static qc_status read_item(const reading *r, uint32_t item, unsigned char *buf, qc_error *err)
{
    qc_read_range a = range_of((void *)(uintptr_t)r, item);
    for (uint64_t done = 0; done < a.bytes;) {
        /* Direct reads go on to the next boundary, past the end of the file. */
        struct iovec to = {buf, r->step};
        ssize_t n = preadv2(a.file->fd, &to, 1, (off_t)(a.offset + done), r->flags);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            QC_FAIL(err, QC_ERR_IO, "%s: %s", a.file->path, n ? strerror(errno) : "ends");
        done += (uint64_t)n;
    }
    return QC_OK;
}

static qc_status read_some(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    reading *r = ctx;
    void *buf = NULL;
    qc_direct_reader *d = NULL;
    qc_status st = qc_malloc_aligned(&buf, ALIGNMENT, r->step, err);
    (void)index;
    if (st == QC_OK)
        st = qc_direct_create(&d, err);
    for (uint32_t i; st == QC_OK && !qc_team_stopped(team) &&
                     (i = (uint32_t)atomic_fetch_add(&r->next, 1)) < r->items;) {
        if (r->ahead)
            qc_read_ahead_take(&r->reads, i);
        st = r->stream ? stream_item(r, i, d, buf, err) : read_item(r, i, buf, err);
        if (r->ahead)
            qc_read_ahead_done(&r->reads, i);
    }
    qc_direct_destroy(d);
    qc_free(buf);
    return st;
}

static qc_status open_all(reading *r, char **paths, uint32_t count, int direct, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_calloc(&v, count, sizeof *r->files, err));
    r->files = v;
    QC_TRY(qc_calloc(&v, count, sizeof *r->bytes, err));
    r->bytes = v;
    QC_TRY(qc_calloc(&v, count, sizeof *r->first, err));
    r->first = v;
    for (uint32_t i = 0; i < count; i++) {
        QC_TRY(qc_file_open_read(&r->files[i], paths[i], err));
        r->file_count++;
        QC_TRY(qc_file_size(&r->files[i], &r->bytes[i], err));
        r->first[i] = r->items;
        r->items += (uint32_t)((r->bytes[i] + ITEM_BYTES - 1) / ITEM_BYTES);
        if (direct && fcntl(r->files[i].fd, F_SETFL, O_DIRECT) != 0)
            QC_FAIL(err, QC_ERR_IO, "%s: O_DIRECT: %s", paths[i], strerror(errno));
    }
    return QC_OK;
}

static double seconds_of(struct timeval t)
{
    return (double)t.tv_sec + (double)t.tv_usec / 1e6;
}

static qc_status measure(reading *r, unsigned threads, const char *way, uint64_t window,
                         qc_error *err)
{
    struct rusage before, after;
    uint64_t bytes = 0;
    atomic_init(&r->next, 0);
    if (r->ahead)
        QC_TRY(qc_read_ahead_init(&r->reads, r->items, range_of, r, window,
                                  strcmp(way, "keep") != 0, r->stream, err));
    (void)getrusage(RUSAGE_SELF, &before);
    uint64_t begin = qc_clock_ns();
    QC_TRY(qc_team_run(threads, read_some, r, err));
    double seconds = (double)(qc_clock_ns() - begin) / 1e9;
    (void)getrusage(RUSAGE_SELF, &after);
    for (uint32_t i = 0; i < r->file_count; i++)
        bytes += r->bytes[i];
    printf("{\"way\": \"%s\", \"threads\": %u, \"window\": %" PRIu64 ", \"bytes\": %" PRIu64
           ", \"seconds\": %.4f, \"user_s\": %.4f, \"system_s\": %.4f}\n",
           way, threads, r->ahead ? window : 0, bytes, seconds,
           seconds_of(after.ru_utime) - seconds_of(before.ru_utime),
           seconds_of(after.ru_stime) - seconds_of(before.ru_stime));
    return QC_OK;
}

int main(int argc, char **argv)
{
    const char *way = "ahead";
    unsigned long threads = 2, window = 64;
    int i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        if (strcmp(argv[i], "--threads") == 0)
            threads = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--window") == 0)
            window = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--way") == 0)
            way = argv[i + 1];
        else
            threads = 0;
    }
    int direct = strncmp(way, "direct", 6) == 0;
    int stream = strcmp(way, "stream") == 0;
    int ahead = stream || strcmp(way, "ahead") == 0 || strcmp(way, "keep") == 0;
    int dontcache = strcmp(way, "dontcache") == 0;
    if (i >= argc || threads < 1 || threads > 64 || window < 1 || window > 4096 ||
        !(direct || ahead || dontcache || strcmp(way, "plain") == 0)) {
        fprintf(stderr,
                "usage: bench_read [--threads N] [--way plain|ahead|keep|stream|dontcache|direct|"
                "direct16] [--window MIB] FILE...\n");
        return 2;
    }
    reading r = {.ahead = ahead, .stream = stream, .flags = dontcache ? DONTCACHE : 0};
    qc_error err = {0};
    r.step = strcmp(way, "direct16") == 0 ? ITEM_BYTES : STEP_BYTES;
    qc_status st = open_all(&r, argv + i, (uint32_t)(argc - i), direct, &err);
    if (st == QC_OK)
        st = measure(&r, (unsigned)threads, way, (uint64_t)window << 20, &err);
    if (st != QC_OK)
        fprintf(stderr, "bench_read: %s\n", err.msg);
    qc_read_ahead_deinit(&r.reads);
    for (uint32_t k = 0; k < r.file_count; k++)
        qc_file_discard(&r.files[k]);
    qc_free(r.files);
    qc_free(r.bytes);
    qc_free(r.first);
    return qc_status_exit_code(st);
}

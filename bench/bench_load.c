/* Loading a device's tensors into memory, and what it is set against: reading files as they are.
 *
 *   bench_load [--threads N] [--rounds N] [--device NAME] [--skip-digests] [--cold] OUT
 *   bench_load [--threads N] [--rounds N] [--cold] --files FILE...
 *
 * One JSON object on stdout: bytes that were loaded, bytes that lie on the disk, and per round
 * seconds and processor seconds, the system's among them. The memory they go to is touched before.
 * --cold: the files are dropped from the page cache before each round. */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/workers.h"
#include "formats/device_reader.h"
#include "formats/file_io.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define ROUNDS_MAX  100u
#define THREADS_MAX 256u
#define PIECE_BYTES (8u << 20)
#define FILES_MAX   1024u

typedef struct {
    unsigned char *memory;
    size_t *offsets;
    qc_file files[FILES_MAX];
    uint64_t ends[FILES_MAX]; /* sums of sizes */
    size_t file_count;
    atomic_uint_fast64_t next;
} load_state;

static double cpu_seconds(double *system)
{
    struct rusage u;
    (void)getrusage(RUSAGE_SELF, &u);
    *system = (double)u.ru_stime.tv_sec + (double)u.ru_stime.tv_usec * 1e-6;
    return *system + (double)u.ru_utime.tv_sec + (double)u.ru_utime.tv_usec * 1e-6;
}

static void drop_from_cache(const char *path)
{
    int fd = open(path, O_RDONLY);
    if (fd < 0)
        return;
    (void)posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    (void)close(fd);
}

static void *place(void *ctx, const qc_reader_tensor *t)
{
    const load_state *s = ctx;
    return s->memory + s->offsets[t->index];
}

static qc_status files_worker(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    load_state *s = ctx;
    (void)index;
    while (!qc_team_stopped(team)) {
        uint64_t at = atomic_fetch_add(&s->next, PIECE_BYTES), end = at + PIECE_BYTES;
        if (at >= s->ends[s->file_count - 1])
            break;
        for (size_t i = 0; i < s->file_count && at < end; i++) {
            uint64_t begin = i ? s->ends[i - 1] : 0;
            if (at >= s->ends[i])
                continue;
            uint64_t n = (end < s->ends[i] ? end : s->ends[i]) - at;
            QC_TRY(qc_file_pread(&s->files[i], s->memory + at, n, at - begin, err));
            at += n;
        }
    }
    return QC_OK;
}

static qc_status take_memory(load_state *s, uint64_t bytes, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_malloc_aligned(&v, 2u << 20, bytes + 1, err));
    s->memory = v;
    memset(s->memory, 1, bytes + 1);
    return QC_OK;
}

static qc_status open_files(load_state *s, char **paths, size_t count, qc_error *err)
{
    uint64_t bytes = 0;
    if (count == 0 || count > FILES_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "expected 1 to %u files", FILES_MAX);
    for (size_t i = 0; i < count; i++) {
        uint64_t n = 0;
        QC_TRY(qc_file_open_read(&s->files[i], paths[i], err));
        QC_TRY(qc_file_size(&s->files[i], &n, err));
        s->ends[i] = bytes += n;
        s->file_count++;
    }
    return take_memory(s, bytes, err);
}

static qc_status lay_out(load_state *s, const qc_reader_device *d, qc_error *err)
{
    void *v = NULL;
    size_t bytes = 0;
    QC_TRY(qc_calloc(&v, d->tensor_count, sizeof *s->offsets, err));
    s->offsets = v;
    for (size_t i = 0; i < d->tensor_count; i++) {
        s->offsets[i] = bytes;
        bytes += d->tensors[i].bytes;
    }
    return take_memory(s, bytes, err);
}

typedef struct {
    unsigned threads, rounds;
    const char *device;
    int skip_digests, cold, files;
    char **paths;
    size_t path_count;
} wishes;

static qc_status rounds(const wishes *w, load_state *s, const qc_reader *r, size_t device,
                        qc_error *err)
{
    const qc_reader_device *d = r ? qc_reader_device_at(r, device) : NULL;
    qc_reader_options o = {
        .threads = w->threads, .skip_digests = w->skip_digests, .place = place, .ctx = s};
    uint64_t bytes = r ? d->tensor_bytes : s->ends[s->file_count - 1];
    printf("{\"bytes\": %" PRIu64 ", \"stored_bytes\": %" PRIu64 ", \"threads\": %u, \"rounds\": [",
           bytes, r ? d->stored_bytes : bytes, w->threads);
    for (unsigned i = 0; i < w->rounds; i++) {
        for (size_t k = 0; w->cold && !r && k < w->path_count; k++)
            drop_from_cache(w->paths[k]);
        for (size_t k = 0; w->cold && r && k < d->tensor_count; k++) {
            char path[4096];
            if (k > 0 && d->tensors[k].shard == d->tensors[k - 1].shard)
                continue;
            (void)snprintf(path, sizeof path, "%s/%s", w->paths[0], d->tensors[k].shard);
            drop_from_cache(path);
        }
        double system = 0, system_end = 0, cpu = cpu_seconds(&system);
        uint64_t begin = qc_clock_ns();
        atomic_store(&s->next, 0);
        if (r)
            QC_TRY(qc_reader_load(r, device, &o, err));
        else
            QC_TRY(qc_team_run(w->threads, files_worker, s, err));
        double wall = (double)(qc_clock_ns() - begin) * 1e-9;
        cpu = cpu_seconds(&system_end) - cpu;
        printf("%s\n  {\"seconds\": %.6f, \"cpu\": %.6f, \"system\": %.6f}", i ? "," : "", wall,
               cpu, system_end - system);
    }
    printf("]}\n");
    return QC_OK;
}

static qc_status run(const wishes *w, load_state *s, qc_error *err)
{
    qc_reader *r = NULL;
    size_t device = 0;
    if (w->files) {
        QC_TRY(open_files(s, w->paths, w->path_count, err));
        return rounds(w, s, NULL, 0, err);
    }
    QC_TRY(qc_reader_open(&r, w->paths[0], err));
    qc_status st = w->device ? qc_reader_find_device(r, w->device, &device, err) : QC_OK;
    if (st == QC_OK)
        st = lay_out(s, qc_reader_device_at(r, device), err);
    if (st == QC_OK)
        st = rounds(w, s, r, device, err);
    qc_reader_close(r);
    return st;
}

int main(int argc, char **argv)
{
    static load_state s;
    qc_error err = {0};
    wishes w = {.threads = 1, .rounds = 5};
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        if (strcmp(argv[i], "--skip-digests") == 0)
            w.skip_digests = 1;
        else if (strcmp(argv[i], "--cold") == 0)
            w.cold = 1;
        else if (strcmp(argv[i], "--files") == 0)
            w.files = 1;
        else if (strcmp(argv[i], "--device") == 0 && i + 1 < argc)
            w.device = argv[++i];
        else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            w.threads = (unsigned)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--rounds") == 0 && i + 1 < argc)
            w.rounds = (unsigned)strtoul(argv[++i], NULL, 10);
        else
            break;
    }
    w.paths = argv + i;
    w.path_count = (size_t)(argc - i);
    if (w.path_count == 0 || (w.path_count > 1 && !w.files) || argv[i][0] == '-' ||
        w.threads == 0 || w.threads > THREADS_MAX || w.rounds == 0 || w.rounds > ROUNDS_MAX) {
        fprintf(stderr,
                "usage: %s [--threads N] [--rounds N] [--device NAME] [--skip-digests] "
                "[--cold] OUT | --files FILE...\n",
                argv[0]);
        return 2;
    }
    qc_status st = run(&w, &s, &err);
    if (st != QC_OK)
        fprintf(stderr, "bench_load: %s\n", err.msg);
    for (size_t k = 0; k < s.file_count; k++)
        qc_file_discard(&s.files[k]);
    qc_free(s.offsets);
    qc_free(s.memory);
    return qc_status_exit_code(st);
}

/* A checkpoint with the names and shapes of a model and made-up weights (synthetic_model.h).
 *
 *   bench_model list  MODEL               files and their sizes
 *   bench_model write MODEL DIR           write it
 *   bench_model speed MODEL               how fast one thread makes it
 *
 *   --shard-bytes N   of the files at most (5e9)
 *   --threads N       that write (1)
 *
 * MODEL is an id that `qconv plan` knows, or a config.json. Values depend on the tensor's name and
 * the place in it only. */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/workers.h"
#include "bench/synthetic_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES (4u << 20)
#define SPEED_BYTES (4ull << 30)

typedef struct {
    const qc_synth_model *model;
    const char *dir;
    atomic_size_t next;
} writing;

static qc_status write_file(const qc_synth_file *f, const char *dir, unsigned char *buf,
                            qc_error *err)
{
    qc_arena a;
    const char *path = NULL;
    qc_file out = QC_FILE_CLOSED;
    qc_arena_init(&a);
    qc_status st = qc_path_join(&a, &path, dir, f->name, err);
    if (st == QC_OK)
        st = qc_file_create(&out, path, err);
    for (uint64_t at = 0; st == QC_OK && at < f->bytes; at += CHUNK_BYTES) {
        size_t n = f->bytes - at < CHUNK_BYTES ? (size_t)(f->bytes - at) : CHUNK_BYTES;
        qc_synth_read(f, at, buf, n);
        st = qc_file_pwrite(&out, buf, n, at, err);
    }
    if (st == QC_OK)
        st = qc_file_close(&out, err);
    qc_file_discard(&out);
    qc_arena_deinit(&a);
    return st;
}

static qc_status write_some(qc_team *team, unsigned index, void *ctx, qc_error *err)
{
    writing *w = ctx;
    void *buf = NULL;
    (void)index;
    QC_TRY(qc_malloc(&buf, CHUNK_BYTES, err));
    qc_status st = QC_OK;
    for (size_t i; st == QC_OK && !qc_team_stopped(team) &&
                   (i = atomic_fetch_add(&w->next, 1)) < w->model->file_count;)
        st = write_file(&w->model->files[i], w->dir, buf, err);
    qc_free(buf);
    return st;
}

static qc_status write_all(const qc_synth_model *m, const char *dir, unsigned threads,
                           qc_error *err)
{
    writing w = {.model = m, .dir = dir};
    atomic_init(&w.next, 0);
    QC_TRY(qc_dir_make(dir, err));
    return qc_team_run(threads, write_some, &w, err);
}

static void list(const qc_synth_model *m)
{
    for (size_t i = 0; i < m->file_count; i++)
        printf("%s\t%" PRIu64 "\n", m->files[i].name, m->files[i].bytes);
}

static qc_status speed(const qc_synth_model *m, qc_error *err)
{
    void *buf = NULL;
    uint64_t made = 0;
    QC_TRY(qc_malloc(&buf, CHUNK_BYTES, err));
    uint64_t begin = qc_clock_ns();
    for (size_t i = 0; i < m->shard_count && made < SPEED_BYTES; i++) {
        const qc_synth_file *f = &m->files[i];
        for (uint64_t at = 0; at < f->bytes && made < SPEED_BYTES; at += CHUNK_BYTES) {
            size_t n = f->bytes - at < CHUNK_BYTES ? (size_t)(f->bytes - at) : CHUNK_BYTES;
            qc_synth_read(f, at, buf, n);
            made += n;
        }
    }
    double seconds = (double)(qc_clock_ns() - begin) / 1e9;
    printf("%.2f GB/s\n", (double)made / 1e9 / seconds);
    qc_free(buf);
    return QC_OK;
}

int main(int argc, char **argv)
{
    const char *words[3] = {NULL, NULL, NULL};
    size_t count = 0;
    double shard_bytes = 5e9;
    unsigned long threads = 1;
    int wrong = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--shard-bytes") == 0 && i + 1 < argc)
            shard_bytes = strtod(argv[++i], NULL);
        else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            threads = strtoul(argv[++i], NULL, 10);
        else if (argv[i][0] == '-' || count == 3)
            wrong = 1;
        else
            words[count++] = argv[i];
    }
    const char *what = count ? words[0] : "";
    int writes = strcmp(what, "write") == 0;
    wrong |= !writes && strcmp(what, "list") != 0 && strcmp(what, "speed") != 0;
    if (wrong || count != (writes ? 3 : 2) || !(shard_bytes >= 1) || shard_bytes > 1e15 ||
        threads < 1 || threads > 64) {
        fprintf(stderr, "usage: bench_model {list|speed} MODEL\n"
                        "       bench_model write [--shard-bytes N] [--threads N] MODEL DIR\n");
        return 2;
    }
    qc_synth_model *m = NULL;
    qc_error err = {0};
    qc_status st = qc_synth_open(&m, words[1], (uint64_t)shard_bytes, &err);
    if (st == QC_OK && strcmp(what, "list") == 0)
        list(m);
    else if (st == QC_OK && strcmp(what, "speed") == 0)
        st = speed(m, &err);
    else if (st == QC_OK)
        st = write_all(m, words[2], (unsigned)threads, &err);
    qc_synth_close(m);
    if (st != QC_OK)
        fprintf(stderr, "bench_model: %s\n", err.msg);
    return qc_status_exit_code(st);
}

/* Measures the best that a GPU can do, without any kernel of qconv: bench/ceilings.h has the
 * kernels, docs/bench.md explains the figures.
 *
 *   bench_ceilings [--gpu N] [--rounds N] [--seconds S] [--small] [--output FILE]
 *
 * It writes one JSON object, to stdout or to FILE. --small takes little memory and few steps, for
 * the CPU shim, whose times mean nothing. Rounds go over all points of a group, every other one
 * backwards, so that a clock that drifts favours none; at most --rounds (15), fewer where --seconds
 * (50) do not allow it, at least 3. */
#include "base/alloc.h"
#include "base/clock.h"
#include "bench/ceilings.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS_MAX   100u
#define ROUNDS_LEAST 3u
#define POINTS_MAX   256u
#define NODES        20u  /* of a graph */
#define GRAPHS       10u  /* in a row, for one sample */
#define LAUNCHES     200u /* in a stream, for one sample */
#define MEMSET_BYTES 4096u

typedef struct point point;
typedef struct bench bench;

struct point {
    const char *name;
    qc_status (*sample)(bench *b, point *p, double *value, qc_error *err);
    unsigned blocks; /* of a multiprocessor */
    /* memory */
    qc_ceiling_memory memory;
    uint64_t bytes; /* that count in one pass */
    /* computing */
    const qc_ceiling_kernel *kernel;
    unsigned steps;
    double mhz; /* in the last sample */
    /* launches */
    unsigned grid, threads;
    int early, memset, gap;
    qc_cuda_graph graph;
    /* results */
    double samples[ROUNDS_MAX], clocks[ROUNDS_MAX];
    unsigned count;
    char why[512]; /* not measured */
};

struct bench {
    qc_cuda_device device;
    qc_cuda_stream stream;
    qc_cuda_event begin, end;
    int small;
    unsigned rounds;
    double seconds;
    uint64_t started;
    uint64_t bytes; /* of each of in and copy */
    unsigned char *in, *copy;
    uint32_t *out; /* sums, results */
    qc_ceiling_span *spans, *host_spans;
    uint64_t *ns, *host_ns; /* 2 per node */
    unsigned blocks_most;
    point *points;
    unsigned count;
};

static double elapsed_seconds(const bench *b)
{
    return (double)(qc_clock_ns() - b->started) * 1e-9;
}

static qc_status begin_timing(bench *b, qc_error *err)
{
    return qc_cuda_event_record(b->begin, b->stream, err);
}

static qc_status end_timing(bench *b, double *ms, qc_error *err)
{
    QC_TRY(qc_cuda_event_record(b->end, b->stream, err));
    QC_TRY(qc_cuda_event_synchronize(b->end, err));
    return qc_cuda_event_elapsed(ms, b->begin, b->end, err);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static qc_status sample_memory(bench *b, point *p, double *gbps, qc_error *err)
{
    double ms = 0;
    QC_TRY(begin_timing(b, err));
    QC_TRY(qc_ceiling_memory_run(&p->memory, b->stream, err));
    QC_TRY(end_timing(b, &ms, err));
    *gbps = ms > 0 ? (double)p->bytes * p->memory.passes / ms * 1e-6 : 0;
    return QC_OK;
}

/* Chooses as many passes as make a launch last that long. */
static qc_status choose_passes(bench *b, point *p, qc_error *err)
{
    double gbps = 0, want_ms = b->small ? 0 : 1;
    p->memory.passes = 1;
    QC_TRY(sample_memory(b, p, &gbps, err));
    QC_TRY(sample_memory(b, p, &gbps, err));
    double passes = gbps > 0 ? want_ms * gbps * 1e6 / (double)p->bytes : 0;
    p->memory.passes = passes < 1 ? 1 : passes > 1000 ? 1000 : (unsigned)passes + 1;
    return QC_OK;
}

static qc_status add_memory(bench *b, qc_ceiling_access access, unsigned unroll, unsigned blocks,
                            uint64_t bytes, qc_error *err)
{
    unsigned fits = 0;
    if (b->device.sm < qc_ceiling_access_sm(access))
        return QC_OK;
    QC_TRY(qc_ceiling_memory_fits(&fits, access, unroll, err));
    if (blocks > fits)
        return QC_OK;
    point *p = &b->points[b->count];
    *p = (point){.name = qc_ceiling_access_name(access), .sample = sample_memory, .blocks = blocks};
    p->memory = (qc_ceiling_memory){.access = access,
                                    .unroll = unroll,
                                    .blocks = blocks * b->device.multiprocessors,
                                    .in = b->in,
                                    .bytes = bytes,
                                    .copy = b->copy,
                                    .sums = b->out};
    p->bytes = qc_ceiling_memory_bytes(&p->memory);
    if (p->bytes == 0)
        return QC_OK;
    if (access == QC_CEILING_COPY)
        p->bytes *= 2;
    QC_TRY(choose_passes(b, p, err));
    b->count++;
    return QC_OK;
}

static qc_status add_all_memory(bench *b, qc_ceiling_access first, qc_ceiling_access last,
                                uint64_t bytes, qc_error *err)
{
    for (unsigned a = first; a <= last; a++)
        for (unsigned unroll = 1; unroll <= 8; unroll *= 2)
            for (unsigned blocks = 1; blocks <= 8; blocks *= 2)
                QC_TRY(add_memory(b, (qc_ceiling_access)a, unroll, blocks, bytes, err));
    return QC_OK;
}

/* ---- computing ------------------------------------------------------------------------------- */

static int by_place(const void *a, const void *b)
{
    const qc_ceiling_span *x = a, *y = b;
    return x->multiprocessor < y->multiprocessor ? -1 : x->multiprocessor > y->multiprocessor;
}

/* Work per clock of a multiprocessor: of all together, each from when its first block began until
 * its last one ended. */
static qc_status sample_compute(bench *b, point *p, double *rate, qc_error *err)
{
    unsigned blocks = p->blocks * b->device.multiprocessors;
    qc_ceiling_run run = {.blocks = blocks, .steps = p->steps, .out = b->out, .spans = b->spans};
    QC_TRY(p->kernel->run(&run, b->stream, err));
    QC_TRY(qc_cuda_to_host(b->host_spans, b->spans, blocks * sizeof *b->spans, b->stream, err));
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    qsort(b->host_spans, blocks, sizeof *b->host_spans, by_place);
    double clocks = 0, ns = 0;
    for (unsigned i = 0, j; i < blocks; i = j) {
        qc_ceiling_span all = b->host_spans[i];
        for (j = i + 1; j < blocks && b->host_spans[j].multiprocessor == all.multiprocessor; j++) {
            const qc_ceiling_span *s = &b->host_spans[j];
            all.clock_begin = s->clock_begin < all.clock_begin ? s->clock_begin : all.clock_begin;
            all.clock_end = s->clock_end > all.clock_end ? s->clock_end : all.clock_end;
            all.ns_begin = s->ns_begin < all.ns_begin ? s->ns_begin : all.ns_begin;
            all.ns_end = s->ns_end > all.ns_end ? s->ns_end : all.ns_end;
        }
        clocks += (double)(all.clock_end - all.clock_begin);
        ns += (double)(all.ns_end - all.ns_begin);
    }
    *rate = clocks > 0 ? blocks * p->kernel->work * QC_CEILING_THREADS * p->steps / clocks : 0;
    p->mhz = ns > 0 ? clocks / ns * 1e3 : 0;
    return QC_OK;
}

/* So many that a launch lasts about a million clocks: globaltimer moves in microseconds. */
static qc_status choose_steps(bench *b, point *p, qc_error *err)
{
    double rate = 0, want = b->small ? 0 : 1e6;
    p->steps = 16 * QC_CEILING_STEPS;
    if (b->small)
        p->steps = QC_CEILING_STEPS;
    QC_TRY(sample_compute(b, p, &rate, err));
    double each = p->blocks * p->kernel->work * QC_CEILING_THREADS; /* of a step */
    double steps = want * rate / each;
    if (steps > 1e6)
        steps = 1e6;
    if (steps > p->steps)
        p->steps = (unsigned)steps / QC_CEILING_STEPS * QC_CEILING_STEPS;
    return QC_OK;
}

static qc_status add_compute(bench *b, const qc_ceiling_kernel *kernels, unsigned count,
                             qc_error *err)
{
    for (unsigned i = 0; i < count; i++) {
        unsigned fits = 0, last = 0;
        if (b->device.sm >= kernels[i].sm && b->device.sm <= kernels[i].sm_most)
            QC_TRY(kernels[i].fits(&fits, err));
        for (unsigned blocks = 1; fits && last != fits; blocks = fits) {
            point *p = &b->points[b->count];
            *p = (point){.name = kernels[i].name,
                         .sample = sample_compute,
                         .blocks = blocks,
                         .kernel = &kernels[i]};
            QC_TRY(choose_steps(b, p, err));
            b->count++;
            last = blocks;
        }
    }
    return QC_OK;
}

/* ---- launches -------------------------------------------------------------------------------- */

static qc_status give_nodes(bench *b, const point *p, unsigned count, qc_error *err)
{
    for (unsigned i = 0; i < count; i++) {
        if (p->memset)
            QC_TRY(qc_cuda_fill(b->copy, 0, MEMSET_BYTES, b->stream, err));
        QC_TRY(qc_ceiling_nothing(p->grid, p->threads, p->gap ? b->ns + 2 * i : NULL, p->early,
                                  b->stream, err));
    }
    return QC_OK;
}

static qc_status make_graph(bench *b, point *p, qc_error *err)
{
    QC_TRY(qc_cuda_capture_begin(b->stream, err));
    qc_status given = give_nodes(b, p, NODES, err);
    qc_cuda_graph graph = NULL;
    qc_error unused = {0};
    qc_status st = qc_cuda_capture_end(&graph, b->stream, given == QC_OK ? err : &unused);
    p->graph = graph;
    QC_TRY(given);
    QC_TRY(st);
    /* The first launch also uploads it. */
    QC_TRY(qc_cuda_graph_launch(graph, b->stream, err));
    return qc_cuda_stream_synchronize(b->stream, err);
}

static qc_status sample_stream(bench *b, point *p, double *us, qc_error *err)
{
    double ms = 0;
    QC_TRY(begin_timing(b, err));
    QC_TRY(give_nodes(b, p, LAUNCHES, err));
    QC_TRY(end_timing(b, &ms, err));
    *us = ms * 1e3 / LAUNCHES;
    return QC_OK;
}

static qc_status sample_graph(bench *b, point *p, double *us, qc_error *err)
{
    double ms = 0;
    if (!p->graph)
        QC_TRY(make_graph(b, p, err));
    QC_TRY(begin_timing(b, err));
    for (unsigned i = 0; i < GRAPHS; i++)
        QC_TRY(qc_cuda_graph_launch(p->graph, b->stream, err));
    QC_TRY(end_timing(b, &ms, err));
    *us = ms * 1e3 / (GRAPHS * NODES);
    return QC_OK;
}

/* The time from the end of a node to the beginning of the next one, by the GPU's clock. It is the
 * mean over a graph, because that clock moves in steps. */
static qc_status sample_gap(bench *b, point *p, double *us, qc_error *err)
{
    double sum = 0;
    if (!p->graph)
        QC_TRY(make_graph(b, p, err));
    QC_TRY(qc_cuda_graph_launch(p->graph, b->stream, err));
    QC_TRY(qc_cuda_to_host(b->host_ns, b->ns, 2 * NODES * sizeof *b->ns, b->stream, err));
    QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    for (unsigned i = 0; i + 1 < NODES; i++)
        sum += (double)b->host_ns[2 * i + 2] - (double)b->host_ns[2 * i + 1];
    *us = sum * 1e-3 / (NODES - 1);
    return QC_OK;
}

static void add_launch(bench *b, const char *name, point p)
{
    p.name = name;
    b->points[b->count++] = p;
}

static void add_launches(bench *b)
{
    int early = b->device.sm >= 90;
    for (unsigned full = 0; full < 2; full++) {
        point p = {.grid = full ? b->device.multiprocessors : 1, .threads = full ? 256 : 32};
        p.sample = sample_stream;
        add_launch(b, "stream", p);
        p.early = 1;
        if (early)
            add_launch(b, "stream, early", p);
        p.sample = sample_graph;
        if (early)
            add_launch(b, "graph, early", p);
        p.early = 0;
        add_launch(b, "graph", p);
        p.memset = 1;
        add_launch(b, "graph, memset before each", p);
        p.memset = 0;
        if (full)
            continue; /* the first thread is not the last to end */
        p.gap = 1;
        p.sample = sample_gap;
        add_launch(b, "gap in a graph", p);
        p.early = 1;
        if (early)
            add_launch(b, "gap in a graph, early", p);
    }
}

/* ---- rounds ---------------------------------------------------------------------------------- */

/* Measures all points of a group, until `until` seconds of all are over. may_fail: a point that
 * cannot be measured says why, and the others go on. */
static qc_status measure(bench *b, unsigned first, double until, int may_fail, qc_error *err)
{
    unsigned count = b->count - first;
    for (unsigned round = 0; round < b->rounds; round++) {
        if (round >= ROUNDS_LEAST && elapsed_seconds(b) > until)
            break;
        for (unsigned step = 0; step < count; step++) {
            point *p = &b->points[first + (round % 2 ? count - 1 - step : step)];
            double value = 0;
            if (p->why[0])
                continue;
            qc_status st = p->sample(b, p, &value, err);
            if (st != QC_OK && may_fail && p->early) {
                memcpy(p->why, err->msg, sizeof p->why - 1);
                p->count = 0;
                continue;
            }
            QC_TRY(st);
            p->clocks[p->count] = p->mhz;
            p->samples[p->count++] = value;
        }
    }
    return QC_OK;
}

static qc_status fill(bench *b, qc_error *err)
{
    /* Several times: the clocks rise meanwhile. */
    uint64_t begin = qc_clock_ns();
    do {
        QC_TRY(qc_ceiling_fill((uint32_t *)(void *)b->in, b->bytes, b->stream, err));
        QC_TRY(qc_ceiling_fill((uint32_t *)(void *)b->copy, b->bytes, b->stream, err));
        QC_TRY(qc_cuda_stream_synchronize(b->stream, err));
    } while (!b->small && qc_clock_ns() - begin < 300000000u);
    return QC_OK;
}

/* Four times the L2 cache and a gibibyte; less where there is less memory. */
static qc_status choose_bytes(bench *b, qc_error *err)
{
    uint64_t free_bytes = 0, total = 0, least = b->small ? UINT64_C(4) << 20 : UINT64_C(1) << 30;
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    b->bytes = b->small || least > 4 * b->device.l2_bytes ? least : 4 * b->device.l2_bytes;
    if (b->bytes > free_bytes / 3)
        b->bytes = free_bytes / 3;
    b->bytes = b->bytes / 4096 * 4096;
    return QC_OK;
}

static qc_status take(void *out, size_t bytes, qc_error *err)
{
    void *p = NULL;
    QC_TRY(qc_cuda_malloc(&p, bytes, err));
    memcpy(out, &p, sizeof p);
    return QC_OK;
}

static qc_status take_host(void *out, size_t bytes, qc_error *err)
{
    void *p = NULL;
    QC_TRY(qc_cuda_host_malloc(&p, bytes, err));
    memcpy(out, &p, sizeof p);
    return QC_OK;
}

static qc_status prepare(bench *b, qc_error *err)
{
    void *points = NULL;
    QC_TRY(qc_calloc(&points, POINTS_MAX, sizeof *b->points, err));
    b->points = points;
    QC_TRY(qc_cuda_use(&b->device, err));
    QC_TRY(qc_cuda_stream_create(&b->stream, err));
    QC_TRY(qc_cuda_event_create(&b->begin, 1, err));
    QC_TRY(qc_cuda_event_create(&b->end, 1, err));
    QC_TRY(choose_bytes(b, err));
    QC_TRY(take(&b->in, b->bytes, err));
    QC_TRY(take(&b->copy, b->bytes, err));
    b->blocks_most = b->device.multiprocessors * 16;
    QC_TRY(take(&b->out, (size_t)b->blocks_most * QC_CEILING_THREADS * 16, err));
    QC_TRY(take(&b->spans, b->blocks_most * sizeof *b->spans, err));
    QC_TRY(take_host(&b->host_spans, b->blocks_most * sizeof *b->spans, err));
    QC_TRY(take(&b->ns, 2 * NODES * sizeof *b->ns, err));
    QC_TRY(take_host(&b->host_ns, 2 * NODES * sizeof *b->ns, err));
    return fill(b, err);
}

/* Groups of points, in their order. */
enum { MEMORY, L2, RATES, DECODE, LAUNCH, BULK, GROUPS };

/* first: index of each group's first point; and the end, of what has not begun too. */
static qc_status run_group(bench *b, unsigned g, unsigned first[GROUPS + 1], qc_error *err)
{
    /* Shares of the time; all of it is seldom needed. */
    static const double until[GROUPS] = {0.5, 0.6, 0.7, 0.8, 0.9, 1.0};
    unsigned count = 0;
    if (g == MEMORY)
        QC_TRY(add_all_memory(b, QC_CEILING_COPY, QC_CEILING_FRAGMENT_8_L2, b->bytes, err));
    if (g == L2) {
        uint64_t half = b->device.l2_bytes / 2;
        QC_TRY(add_all_memory(b, QC_CEILING_READ, QC_CEILING_READ,
                              half < b->bytes ? half : b->bytes, err));
    }
    if (g == RATES) {
        const qc_ceiling_kernel *k = qc_ceiling_rates(&count);
        QC_TRY(add_compute(b, k, count, err));
    }
    if (g == DECODE) {
        const qc_ceiling_kernel *k = qc_ceiling_decodes(&count);
        QC_TRY(add_compute(b, k, count, err));
    }
    if (g == LAUNCH)
        add_launches(b);
    if (g == BULK)
        QC_TRY(add_all_memory(b, QC_CEILING_BULK, QC_CEILING_BULK, b->bytes, err));
    qc_status st = measure(b, first[g], until[g] * b->seconds, g == LAUNCH, err);
    for (unsigned i = g + 1; i <= GROUPS; i++)
        first[i] = b->count;
    return st;
}

static void release(bench *b)
{
    for (unsigned i = 0; i < b->count; i++)
        qc_cuda_graph_destroy(b->points[i].graph);
    qc_cuda_host_free(b->host_ns);
    qc_cuda_free(b->ns);
    qc_cuda_host_free(b->host_spans);
    qc_cuda_free(b->spans);
    qc_cuda_free(b->out);
    qc_cuda_free(b->copy);
    qc_cuda_free(b->in);
    qc_cuda_event_destroy(b->end);
    qc_cuda_event_destroy(b->begin);
    qc_cuda_stream_destroy(b->stream);
    qc_free(b->points);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* samples sorted, count > 0 */
static double rank(const double *samples, unsigned count, double q)
{
    double at = q * (count - 1);
    unsigned i = (unsigned)at;
    return i + 1 < count ? samples[i] + (at - i) * (samples[i + 1] - samples[i]) : samples[i];
}

static void put_spread(FILE *f, const char *key, double *samples, unsigned count)
{
    if (!count) {
        fprintf(f, ", \"%s\": null", key);
        return;
    }
    qsort(samples, count, sizeof *samples, by_value);
    fprintf(f, ", \"%s\": {\"median\": %.6g, \"p25\": %.6g, \"p75\": %.6g, \"samples\": %u}", key,
            rank(samples, count, 0.5), rank(samples, count, 0.25), rank(samples, count, 0.75),
            count);
}

static void put_memory(FILE *f, point *p)
{
    unsigned lane = qc_ceiling_access_bytes(p->memory.access);
    unsigned warps = p->blocks * (QC_CEILING_MEMORY_THREADS / 32);
    fprintf(f,
            "\"access\": \"%s\", \"loads_ahead\": %u, \"warps\": %u, \"bytes_under_way\": %u, "
            "\"bytes\": %" PRIu64 ", \"passes\": %u",
            p->name, p->memory.unroll, warps, warps * 32 * lane * p->memory.unroll, p->bytes,
            p->memory.passes);
    put_spread(f, "gbps", p->samples, p->count);
}

static void put_compute(FILE *f, point *p)
{
    fprintf(
        f, "\"name\": \"%s\", \"unit\": \"%s\", \"warps\": %u, \"steps\": %u, \"shared_bytes\": %u",
        p->name, p->kernel->unit, p->blocks * (QC_CEILING_THREADS / 32), p->steps,
        p->kernel->shared_bytes);
    put_spread(f, "per_clock", p->samples, p->count);
    put_spread(f, "mhz", p->clocks, p->count);
}

static void put_launch(FILE *f, point *p)
{
    fprintf(f, "\"name\": \"%s\", \"blocks\": %u, \"threads\": %u", p->name, p->grid, p->threads);
    put_spread(f, "us", p->samples, p->count);
    if (p->why[0]) {
        fprintf(f, ", \"why\": \"");
        for (const char *c = p->why; *c; c++)
            fputc(*c == '"' || *c == '\\' || (unsigned char)*c < ' ' ? '\'' : *c, f);
        fputc('"', f);
    }
}

static void put_group(FILE *f, const bench *b, const char *key, const unsigned range[2],
                      void (*put)(FILE *f, point *p))
{
    fprintf(f, ",\n \"%s\": [", key);
    for (unsigned i = range[0]; i < range[1]; i++) {
        fprintf(f, "%s\n  {", i > range[0] ? "," : "");
        put(f, &b->points[i]);
        fputc('}', f);
    }
    fprintf(f, "]");
}

static void put_all(FILE *f, const bench *b, const unsigned first[GROUPS + 1])
{
    const qc_cuda_device *d = &b->device;
    fprintf(f,
            "{\"command\": \"ceilings\",\n \"device\": {\"name\": \"%s\", \"pci\": \"%s\", "
            "\"sm\": %u, \"multiprocessors\": %u, \"memory_bytes\": %" PRIu64
            ", \"l2_bytes\": %" PRIu64 ", \"shared_multiprocessor_bytes\": %" PRIu32
            ", \"shared_block_bytes\": %" PRIu32 ", \"warps_multiprocessor\": %" PRIu32
            ", \"driver_version\": %d, \"runtime_version\": %d, \"kernels\": \"%s\"}",
            d->name, d->pci, d->sm, d->multiprocessors, d->memory_bytes, d->l2_bytes,
            d->shared_multiprocessor_bytes, d->shared_block_bytes, d->warps_multiprocessor,
            d->driver_version, d->runtime_version, qc_cuda_build());
    put_group(f, b, "memory", first + MEMORY, put_memory);
    put_group(f, b, "l2", first + L2, put_memory);
    put_group(f, b, "rates", first + RATES, put_compute);
    put_group(f, b, "decode", first + DECODE, put_compute);
    put_group(f, b, "launch", first + LAUNCH, put_launch);
    put_group(f, b, "bulk", first + BULK, put_memory);
    fprintf(f, ",\n \"seconds\": %.3f}\n", elapsed_seconds(b));
}

/* A file is replaced by renaming, so that it is whole even if the program is killed. */
static qc_status put_file(const char *path, const bench *b, const unsigned *first, qc_error *err)
{
    char part[4096];
    int length = snprintf(part, sizeof part, "%s.part", path ? path : "");
    FILE *f = !path ? stdout : length < (int)sizeof part ? fopen(part, "w") : NULL;
    if (f) {
        put_all(f, b, first);
        int bad = fflush(f) != 0 || ferror(f);
        if (path && fclose(f) != 0)
            bad = 1;
        if (!bad && (!path || rename(part, path) == 0))
            return QC_OK;
    }
    return qc_error_set(err, QC_ERR_IO, __FILE__, __LINE__, "%s: cannot be written",
                        path ? path : "stdout");
}

/* A file is written after each group, because kernels of the last one, which wait for a copy, could
 * wait for ever. */
static qc_status run(bench *b, const char *path, qc_error *err)
{
    unsigned first[GROUPS + 1] = {0};
    QC_TRY(prepare(b, err));
    for (unsigned g = 0; g < GROUPS; g++) {
        QC_TRY(run_group(b, g, first, err));
        if (path)
            QC_TRY(put_file(path, b, first, err));
    }
    return path ? QC_OK : put_file(path, b, first, err);
}

/* ---- program --------------------------------------------------------------------------------- */

static int usage(const char *program)
{
    fprintf(stderr,
            "usage: %s [--gpu N] [--rounds N] [--seconds S] [--small] [--output FILE]\n"
            "rounds: %u to %u\n",
            program, ROUNDS_LEAST, ROUNDS_MAX);
    return 2;
}

int main(int argc, char **argv)
{
    qc_error err = {0};
    bench b = {.rounds = 15, .seconds = 50, .started = qc_clock_ns()};
    const char *output = NULL;
    int gpu = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0) {
            b.small = 1;
            continue;
        }
        if (i + 1 == argc)
            return usage(argv[0]);
        const char *value = argv[i + 1];
        if (strcmp(argv[i], "--gpu") == 0)
            gpu = (int)strtol(value, NULL, 10);
        else if (strcmp(argv[i], "--rounds") == 0)
            b.rounds = (unsigned)strtoul(value, NULL, 10);
        else if (strcmp(argv[i], "--seconds") == 0)
            b.seconds = strtod(value, NULL);
        else if (strcmp(argv[i], "--output") == 0)
            output = value;
        else
            return usage(argv[0]);
        i++;
    }
    if (b.rounds < ROUNDS_LEAST || b.rounds > ROUNDS_MAX)
        return usage(argv[0]);
    qc_status st = qc_cuda_device_open(&b.device, gpu, &err);
    if (st == QC_OK)
        st = run(&b, output, &err);
    release(&b);
    if (st != QC_OK)
        fprintf(stderr, "bench_ceilings: %s\n", err.msg);
    return qc_status_exit_code(st);
}

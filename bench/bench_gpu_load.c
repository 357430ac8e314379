/* Times loading a device of an output to a GPU (convert/gpu/gpu_load.h), beside loading it to host
 * memory and beside the bus: copies of as many bytes from pinned memory that nobody fills.
 *
 *   bench_gpu_load [--gpu N] [--threads N] [--rounds N] [--device NAME] OUT
 *
 * It prints one JSON object. What is on the GPU at the end is compared with what the host loaded;
 * the exit code is 4 where it differs. The page cache is warm except in the first round. */
#include "base/alloc.h"
#include "base/clock.h"
#include "convert/gpu/gpu_load.h"
#include "kernels/cuda_upload.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS_MAX 100u
#define SLOT_BYTES ((size_t)8 << 20)

typedef struct {
    unsigned char *host, *gpu, *back;
    size_t *offsets;
    uint64_t bytes;
} room;

typedef struct {
    unsigned threads, rounds;
    int gpu;
    const char *device, *out;
} wishes;

static void *place_on_host(void *ctx, const qc_reader_tensor *t)
{
    const room *r = ctx;
    return r->host + r->offsets[t->index];
}

static void *place_on_gpu(void *ctx, const qc_reader_tensor *t)
{
    const room *r = ctx;
    return r->gpu + r->offsets[t->index];
}

static qc_status take_room(room *r, const qc_reader_device *d, qc_error *err)
{
    void *v = NULL;
    QC_TRY(qc_calloc(&v, d->tensor_count, sizeof *r->offsets, err));
    r->offsets = v;
    for (size_t i = 0; i < d->tensor_count; i++) {
        r->offsets[i] = (size_t)r->bytes;
        r->bytes += (d->tensors[i].bytes + 255) / 256 * 256;
    }
    QC_TRY(qc_malloc_aligned(&v, 4096, (size_t)r->bytes + 1, err));
    r->host = v;
    memset(r->host, 0, (size_t)r->bytes);
    QC_TRY(qc_cuda_malloc(&v, (size_t)r->bytes + 1, err));
    r->gpu = v;
    QC_TRY(qc_cuda_host_malloc(&v, SLOT_BYTES, err));
    r->back = v;
    return QC_OK;
}

static qc_status copy_only(const room *r, const qc_cuda_device *cuda, qc_error *err)
{
    qc_cuda_upload *u = NULL;
    void *pinned = NULL;
    qc_status st = qc_cuda_upload_create(&u, cuda, 1, SLOT_BYTES, err);
    for (uint64_t at = 0; st == QC_OK && at < r->bytes; at += SLOT_BYTES) {
        uint64_t n = r->bytes - at < SLOT_BYTES ? r->bytes - at : SLOT_BYTES;
        st = qc_cuda_upload_room(u, 0, &pinned, err);
        if (st == QC_OK)
            st = qc_cuda_upload_send(u, 0, r->gpu + at, (size_t)n, err);
    }
    if (st == QC_OK)
        st = qc_cuda_upload_finish(u, err);
    qc_cuda_upload_destroy(u);
    return st;
}

static qc_status compare(const room *r, const qc_reader_device *d, qc_error *err)
{
    qc_cuda_stream s = NULL;
    QC_TRY(qc_cuda_stream_create(&s, err));
    qc_status st = QC_OK;
    for (size_t i = 0; st == QC_OK && i < d->tensor_count; i++) {
        for (uint64_t at = 0; st == QC_OK && at < d->tensors[i].bytes; at += SLOT_BYTES) {
            uint64_t left = d->tensors[i].bytes - at;
            size_t n = left < SLOT_BYTES ? (size_t)left : SLOT_BYTES, from = r->offsets[i] + at;
            st = qc_cuda_to_host(r->back, r->gpu + from, n, s, err);
            if (st == QC_OK)
                st = qc_cuda_stream_synchronize(s, err);
            if (st == QC_OK && memcmp(r->back, r->host + from, n) != 0)
                st = qc_error_set(err, QC_ERR_CHECK, __FILE__, __LINE__,
                                  "tensor '%s' is another on the GPU", d->tensors[i].name);
        }
    }
    qc_cuda_stream_destroy(s);
    return st;
}

static qc_status measure(const wishes *w, const qc_reader *reader, size_t device, room *r,
                         qc_error *err)
{
    static const char *const names[] = {"gpu", "host", "copy"};
    const qc_reader_device *d = qc_reader_device_at(reader, device);
    qc_cuda_device cuda;
    qc_gpu_load_options to_gpu = {.threads = w->threads, .place = place_on_gpu, .ctx = r};
    qc_reader_options to_host = {.threads = w->threads, .place = place_on_host, .ctx = r};
    double seconds[3][ROUNDS_MAX];
    QC_TRY(qc_cuda_device_open(&cuda, w->gpu, err));
    QC_TRY(qc_cuda_use(&cuda, err));
    QC_TRY(take_room(r, d, err));
    for (unsigned i = 0; i < w->rounds; i++) {
        for (unsigned kind = 0; kind < 3; kind++) {
            uint64_t begin = qc_clock_ns();
            if (kind == 0)
                QC_TRY(qc_gpu_load(reader, device, w->gpu, &to_gpu, err));
            else if (kind == 1)
                QC_TRY(qc_reader_load(reader, device, &to_host, err));
            else if (i + 1 < w->rounds) /* the last round leaves what was loaded */
                QC_TRY(copy_only(r, &cuda, err));
            seconds[kind][i] = (double)(qc_clock_ns() - begin) * 1e-9;
        }
    }
    QC_TRY(compare(r, d, err));
    printf("{\"gpu_name\": \"%s\", \"bytes\": %" PRIu64 ", \"stored_bytes\": %" PRIu64
           ", \"threads\": %u",
           cuda.name, d->tensor_bytes, d->stored_bytes, w->threads);
    for (unsigned kind = 0; kind < 3; kind++) {
        printf(",\n  \"%s\": [", names[kind]);
        for (unsigned i = 0; i + (kind == 2) < w->rounds; i++)
            printf("%s%.6f", i ? ", " : "", seconds[kind][i]);
        printf("]");
    }
    printf("}\n");
    return QC_OK;
}

static qc_status run(const wishes *w, qc_error *err)
{
    qc_reader *reader = NULL;
    room r = {0};
    size_t device = 0;
    QC_TRY(qc_reader_open(&reader, w->out, err));
    qc_status st = w->device ? qc_reader_find_device(reader, w->device, &device, err) : QC_OK;
    if (st == QC_OK)
        st = measure(w, reader, device, &r, err);
    qc_cuda_host_free(r.back);
    qc_cuda_free(r.gpu);
    qc_free(r.host);
    qc_free(r.offsets);
    qc_reader_close(reader);
    return st;
}

int main(int argc, char **argv)
{
    qc_error err = {0};
    wishes w = {.rounds = 5};
    int i = 1;
    for (; i + 1 < argc && argv[i][0] == '-'; i += 2) {
        if (strcmp(argv[i], "--device") == 0)
            w.device = argv[i + 1];
        else if (strcmp(argv[i], "--gpu") == 0)
            w.gpu = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--threads") == 0)
            w.threads = (unsigned)strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--rounds") == 0)
            w.rounds = (unsigned)strtoul(argv[i + 1], NULL, 10);
        else
            break;
    }
    if (i + 1 != argc || argv[i][0] == '-' || w.rounds < 2 || w.rounds > ROUNDS_MAX) {
        fprintf(stderr, "usage: %s [--gpu N] [--threads N] [--rounds N] [--device NAME] OUT\n",
                argv[0]);
        return 2;
    }
    w.out = argv[i];
    qc_status st = run(&w, &err);
    if (st != QC_OK)
        fprintf(stderr, "bench_gpu_load: %s\n", err.msg);
    return qc_status_exit_code(st);
}

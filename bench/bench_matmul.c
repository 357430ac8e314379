/* Times products with quantized weights on a GPU beside cuBLAS in 16 bits, and the quantizers
 * beside a copy; checks every result first. docs/bench.md describes the method and the JSON.
 *
 *   bench_matmul [--shapes 8192x8192,8192+1024+1024x8192] [--m 1,16] [--scheme nf4,int8]
 *                [--path auto,gemv,...] [--bf16] [--rounds N] [--seconds S] [--gpu N]
 *                [--output FILE]
 *
 * It prints one JSON object, or writes it to FILE, which is replaced whole whenever something was
 * measured; what is measured goes to standard error as well. With several paths each is a row: that
 * is how to find what is fastest for a shape, for a limit in kernels/matmul_plan.c.
 *
 * Exit code: 0 all was right, 1 it ended early, 2 wrong words, 4 something was wrong or could not
 * run, 5 there is no GPU. */
#include "bench/matmul_bench.h"

#include "base/alloc.h"
#include "base/clock.h"
#include "convert/term/console.h"
#include "formats/json_writer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIDE_MOST ((uint64_t)1 << 24)
/* The large layers of a 70B model, and the one whose kernels find it hardest to fill a GPU. */
#define SHAPES "28672x8192,8192x28672,8192x8192,1024x8192"

/* ---- what is asked for ---- */

/* Reads a whole number from 1 to most at *p, and moves *p behind it. */
static int read_number(const char **p, uint64_t most, uint64_t *out)
{
    char *end;
    if (**p < '1' || **p > '9')
        return 0;
    *out = strtoull(*p, &end, 10);
    *p = end;
    return *out <= most;
}

/* Reads NxK, or N1+N2+...xK for weights that share x. */
static int read_shape(const char **p, mb_shape *s)
{
    const char *first = *p;
    uint32_t count = 0;
    do {
        *p += count > 0;
        if (count == QC_MATMUL_GROUP_MOST || !read_number(p, SIDE_MOST, &s->parts[count]))
            return 0;
        s->n += s->parts[count++];
    } while (**p == '+');
    s->part_count = count > 1 ? count : 0;
    if (s->n > SIDE_MOST || *(*p)++ != 'x' || !read_number(p, SIDE_MOST, &s->k))
        return 0;
    (void)snprintf(s->layer, sizeof s->layer, "%.*s", (int)(*p - first), first);
    return *p - first < (long)sizeof s->layer;
}

static int read_shapes(mb_bench *b, const char *p)
{
    b->shape_count = 0;
    for (;; p++) {
        mb_shape s = {.n = 0};
        if (b->shape_count == MB_LIST || !read_shape(&p, &s))
            return 0;
        b->shapes[b->shape_count++] = s;
        if (*p != ',')
            return *p == '\0';
    }
}

/* Rising, so that the copies of weights are checked with few rows. */
static int read_m(mb_bench *b, const char *p)
{
    b->m_count = 0;
    for (;; p++) {
        if (b->m_count == MB_LIST || !read_number(&p, 1u << 20, &b->m[b->m_count]) ||
            (b->m_count && b->m[b->m_count] <= b->m[b->m_count - 1]))
            return 0;
        b->m_count++;
        if (*p != ',')
            return *p == '\0';
    }
}

static const char *scheme_name(unsigned i)
{
    return i < MB_SCHEMES ? mb_schemes[i].name : NULL;
}

static const char *path_name(unsigned i)
{
    return i < QC_MATMUL_PATH_COUNT ? qc_matmul_path_name((qc_matmul_path)i) : NULL;
}

/* Reads names, none of them twice. Returns how many, or 0. */
static uint32_t read_names(const char *p, const char *(*name)(unsigned i), unsigned *out)
{
    uint32_t count = 0;
    for (;; p++) {
        const size_t len = strcspn(p, ",");
        unsigned i = 0;
        while (name(i) && (strlen(name(i)) != len || strncmp(name(i), p, len) != 0))
            i++;
        for (uint32_t j = 0; j < count; j++)
            if (out[j] == i)
                return 0;
        if (!name(i))
            return 0;
        out[count++] = i;
        p += len;
        if (!*p)
            return count;
    }
}

static int read_schemes(mb_bench *b, const char *text)
{
    unsigned found[MB_SCHEMES];
    b->scheme_count = read_names(text, scheme_name, found);
    for (uint32_t i = 0; i < b->scheme_count; i++)
        b->schemes[i] = &mb_schemes[found[i]];
    return b->scheme_count > 0;
}

static int read_paths(mb_bench *b, const char *text)
{
    unsigned found[QC_MATMUL_PATH_COUNT];
    b->path_text = text;
    b->path_count = read_names(text, path_name, found);
    for (uint32_t i = 0; i < b->path_count; i++)
        b->paths[i] = (qc_matmul_path)found[i];
    return b->path_count > 0;
}

static int read_option(mb_bench *b, const char *name, const char *value)
{
    uint64_t number = 0;
    const char *p = value;
    if (strcmp(name, "--shapes") == 0)
        return read_shapes(b, value);
    if (strcmp(name, "--m") == 0)
        return read_m(b, value);
    if (strcmp(name, "--scheme") == 0)
        return read_schemes(b, value);
    if (strcmp(name, "--path") == 0)
        return read_paths(b, value);
    if (strcmp(name, "--output") == 0) {
        b->output = value;
        return 1;
    }
    if (strcmp(name, "--gpu") == 0 && strcmp(value, "0") == 0)
        return 1;
    if (!read_number(&p, 1000000, &number) || *p)
        return 0;
    if (strcmp(name, "--rounds") == 0)
        b->rounds = (uint32_t)number;
    else if (strcmp(name, "--seconds") == 0)
        b->seconds = (double)number;
    else if (strcmp(name, "--gpu") == 0)
        b->device = (int)number;
    else
        return 0;
    return 1;
}

static int read_words(mb_bench *b, int argc, char **argv)
{
    int right = read_shapes(b, SHAPES) &&
                read_m(b, "1,2,4,8,16,32,64,128,256,512,1024,2048,4096") &&
                read_schemes(b, "nf4,int8") && read_paths(b, "auto");
    b->path_text = NULL;
    b->rounds = 30;
    b->seconds = 150;
    b->dtype = QC_DTYPE_F16;
    for (int i = 1; right && i < argc; i++) {
        if (strcmp(argv[i], "--bf16") == 0)
            b->dtype = QC_DTYPE_BF16;
        else if (i + 1 == argc || !read_option(b, argv[i], argv[i + 1]))
            right = 0;
        else
            i++;
    }
    if (!right)
        (void)fputs("bench_matmul: wrong words; expected [--shapes LIST] [--m LIST, rising] "
                    "[--scheme LIST] [--path LIST] [--bf16] [--rounds N] [--seconds S] "
                    "[--gpu N] [--output FILE]\n",
                    stderr);
    return right;
}

/* ---- JSON ---- */

static void put_spread(qc_json_writer *w, const char *key, qc_spread s)
{
    if (!qc_json_begin_row_if(w, key, s.samples > 0))
        return;
    qc_json_put_double(w, "median", s.median);
    qc_json_put_double(w, "p10", s.p10);
    qc_json_put_double(w, "p90", s.p90);
    qc_json_put_u64(w, "samples", s.samples);
    qc_json_end(w);
}

static void put_rotation(qc_json_writer *w, const char *key, const mb_rotation *t)
{
    if (!qc_json_begin_row_if(w, key, t->copies > 0))
        return;
    qc_json_put_u64(w, "copies", t->copies);
    qc_json_put_u64(w, "bytes", t->bytes);
    qc_json_put_u64(w, "launches", t->launches);
    qc_json_end(w);
}

static void put_device(qc_json_writer *w, const mb_bench *b)
{
    const qc_cuda_device *d = &b->t.device;
    qc_json_begin_object(w, "device");
    qc_json_put_text(w, "name", d->name);
    qc_json_put_u64(w, "sm", d->sm);
    qc_json_put_u64(w, "multiprocessors", d->multiprocessors);
    qc_json_put_u64(w, "memory_bytes", d->memory_bytes);
    qc_json_put_u64(w, "l2_bytes", d->l2_bytes);
    qc_json_put_u64(w, "driver_version", (uint64_t)d->driver_version);
    qc_json_put_u64(w, "runtime_version", (uint64_t)d->runtime_version);
    qc_json_put_text(w, "kernels", qc_cuda_build());
    qc_json_put_text(w, "no_gemm", b->no_gemm);
    qc_json_end(w);
}

static void put_roof(qc_json_writer *w, const qc_gpu_roof *r)
{
    qc_json_begin_object(w, "roof");
    qc_json_put_u64(w, "copy_bytes", r->copy_bytes);
    put_spread(w, "copy_gbps", r->copy_gbps);
    put_spread(w, "kernel_copy_gbps", r->kernel_copy_gbps);
    put_spread(w, "read_gbps", r->read_gbps);
    qc_json_put_double(w, "memory_gbps", qc_roof_memory_gbps(r));
    qc_json_put_u64(w, "gemm_size", r->gemm_size);
    put_spread(w, "gemm_tflops", r->gemm_tflops);
    qc_json_end(w);
}

static void put_quantizer(qc_json_writer *w, const mb_quantizer *k, const qc_gpu_roof *roof)
{
    const double copy = qc_roof_copy_gbps(roof), memory = qc_roof_memory_gbps(roof);
    qc_json_begin_object(w, NULL);
    qc_json_put_text(w, "name", k->name);
    qc_json_put_u64(w, "rows", k->rows);
    qc_json_put_u64(w, "cols", k->cols);
    qc_json_put_u64(w, "bytes", k->bytes);
    put_spread(w, "gbps", k->gbps);
    qc_json_put_double(w, "of_copy", copy > 0 ? k->gbps.median / copy : 0);
    qc_json_put_double(w, "of_roof", memory > 0 ? k->gbps.median / memory : 0);
    qc_json_end(w);
}

/* A shape, as readers of results of several programs know it. */
static void put_shape(qc_json_writer *w, const mb_shape *s)
{
    qc_json_put_text(w, "model", s ? "given" : NULL);
    qc_json_put_text(w, "layer", s ? s->layer : NULL);
    qc_json_put_u64_if(w, "n", s != NULL, s ? s->n : 0);
    qc_json_put_u64_if(w, "k", s != NULL, s ? s->k : 0);
}

static void put_product(qc_json_writer *w, const mb_product *p)
{
    qc_json_put_text(w, "path", p->path);
    qc_json_put_double(w, "error", p->error);
    put_spread(w, "us", p->us);
    put_spread(w, "ratio", p->ratio);
    put_rotation(w, "rotation", &p->turn);
}

static void put_row(qc_json_writer *w, const mb_bench *b, const mb_row *row)
{
    const mb_shape *s = row->shape;
    const uint64_t bytes =
        qc_product_bytes(mb_weight_bytes(row->scheme, s->n, s->k), row->m, s->n, s->k);
    const double flops = qc_product_flops(row->m, s->n, s->k), us = row->ours.us.median;
    const double floor_us = qc_roof_floor_us(&b->roof, bytes, flops);
    qc_json_begin_object(w, NULL);
    put_shape(w, s);
    if (s->part_count)
        qc_json_put_u64s(w, "parts", s->parts, s->part_count);
    qc_json_put_u64(w, "count", 0);
    qc_json_put_u64(w, "m", row->m);
    qc_json_put_text(w, "scheme", row->scheme->name);
    qc_json_put_bool(w, "repacked", row->repacked);
    put_product(w, &row->ours);
    put_spread(w, "dense_us", row->dense);
    put_rotation(w, "dense_rotation", &row->dense_turn);
    qc_json_put_u64(w, "bytes", bytes);
    qc_json_put_double(w, "gbps", us > 0 ? (double)bytes / us / 1e3 : 0);
    qc_json_put_double(w, "tflops", us > 0 ? flops / us / 1e6 : 0);
    qc_json_put_double(w, "floor_us", floor_us);
    qc_json_put_double(w, "of_roof", us > 0 ? floor_us / us : 0);
    qc_json_end(w);
}

static void put_failure(qc_json_writer *w, const mb_failure *f)
{
    qc_json_begin_object(w, NULL);
    put_shape(w, f->shape);
    qc_json_put_u64_if(w, "m", f->shape != NULL, f->m);
    qc_json_put_text(w, "scheme", f->scheme ? f->scheme->name : NULL);
    qc_json_put_text(w, "path", f->path);
    qc_json_put_text(w, "what", f->what);
    qc_json_end(w);
}

static qc_status put_all(const mb_bench *b, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "command", "bench");
    qc_json_put_text(&w, "program", "qconv " QCONV_VERSION);
    qc_json_put_text(&w, "dtype", b->dtype == QC_DTYPE_BF16 ? "bf16" : "fp16");
    qc_json_put_text(&w, "forced_path", b->path_text);
    put_device(&w, b);
    put_roof(&w, &b->roof);
    qc_json_begin_list(&w, "kernels");
    for (uint32_t i = 0; i < b->quantizer_count; i++)
        put_quantizer(&w, &b->quantizers[i], &b->roof);
    qc_json_end(&w);
    qc_json_begin_list(&w, "rows");
    for (uint32_t i = 0; i < b->row_count; i++)
        put_row(&w, b, &b->rows[i]);
    qc_json_end(&w);
    qc_json_begin_list(&w, "layers"); /* of models; bench_kernels_bitsandbytes.py has some */
    qc_json_end(&w);
    qc_json_put_u64(&w, "left_out", b->left_out);
    qc_json_begin_list(&w, "failed");
    for (uint32_t i = 0; i < b->failed_count; i++)
        put_failure(&w, &b->failed[i]);
    qc_json_end(&w);
    qc_json_put_bool(&w, "complete", b->complete);
    qc_json_put_double(&w, "seconds", b->seconds - mb_seconds_left(b));
    return qc_json_end_text(&w);
}

/* ---- on the way ---- */

double mb_seconds_left(const mb_bench *b)
{
    return b->seconds - (double)(qc_clock_ns() - b->started_ns) / 1e9;
}

static qc_status deliver(const mb_bench *b, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, 1u << 26);
    return qc_console_deliver(put_all(b, &out, err), &out, b->output, err);
}

qc_status mb_save(mb_bench *b, qc_error *err)
{
    return b->output ? deliver(b, err) : QC_OK;
}

/* After some errors of a kernel the device is unusable; a copy to it and back shows whether it
 * still answers. */
static qc_status try_device(mb_bench *b, qc_error *err)
{
    uint64_t *sent = b->pinned, *got = sent + 1;
    *sent = qc_clock_ns();
    *got = ~*sent;
    QC_TRY(qc_cuda_to_device(b->bad, sent, sizeof *sent, b->t.stream, err));
    QC_TRY(qc_cuda_to_host(got, b->bad, sizeof *got, b->t.stream, err));
    QC_TRY(qc_cuda_stream_synchronize(b->t.stream, err));
    if (*got != *sent)
        QC_FAIL(err, QC_ERR_INTERNAL, "a number came back from the device as another one");
    return QC_OK;
}

qc_status mb_failed(mb_bench *b, mb_failure f, const qc_error *why, qc_error *err)
{
    qc_error dead = {0};
    QC_TRY(qc_realloc_array(&b->failed, b->failed_count + 1, sizeof f, err));
    (void)snprintf(f.what, sizeof f.what, "%s", why->msg);
    b->failed[b->failed_count++] = f;
    if (f.shape)
        (void)fprintf(stderr, "%s M=%llu: ", f.shape->layer, (unsigned long long)f.m);
    (void)fprintf(stderr, "%s\n", f.what);
    QC_TRY(mb_save(b, err));
    if (try_device(b, &dead) != QC_OK)
        QC_FAIL(err, QC_ERR_INTERNAL, "%s does not answer any more (%.120s), so the run ends here",
                b->t.device.name, dead.msg);
    return QC_OK;
}

/* ---- all of it ---- */

static qc_status open_device(mb_bench *b, qc_error *err)
{
    qc_isa isa;
    char why[256] = "";
    int count = 0;
    qc_cuda_device_count(&count, why, sizeof why);
    if (b->device >= count)
        QC_FAIL(err, QC_ERR_DEVICE, "there is no GPU %d%s%s", b->device, count ? "" : ": ", why);
    QC_TRY(qc_isa_select(&isa, err));
    b->ops = qc_quant_ops_for(isa);
    QC_TRY(qc_timer_open(&b->t, b->device, err));
    b->no_gemm = qc_matmul_no_gemm(b->t.handle);
    if (!b->no_gemm && b->dtype == QC_DTYPE_BF16 && b->t.device.sm < 80)
        b->no_gemm = "cuBLAS multiplies bfloat16 from compute capability 8.0 on";
    QC_TRY(qc_cuda_host_malloc(&b->pinned, MB_PINNED, err));
    QC_TRY(qc_cuda_malloc(&b->bad, sizeof *b->bad, err));
    QC_TRY(qc_cuda_malloc(&b->map, sizeof qc_dynamic_map, err));
    memcpy(b->pinned, qc_dynamic_map, sizeof qc_dynamic_map);
    QC_TRY(qc_cuda_to_device(b->map, b->pinned, sizeof qc_dynamic_map, b->t.stream, err));
    QC_TRY(qc_cuda_stream_synchronize(b->t.stream, err));
    const uint32_t points = b->shape_count * b->m_count * b->scheme_count * b->path_count;
    return qc_calloc(&b->rows, points, sizeof *b->rows, err);
}

static qc_status run(mb_bench *b, qc_error *err)
{
    QC_TRY(open_device(b, err));
    QC_TRY(qc_gpu_roof_measure(&b->t, b->dtype, b->rounds, b->seconds / 50, &b->roof, err));
    QC_TRY(mb_save(b, err));
    QC_TRY(mb_quantizers_measure(b, err));
    QC_TRY(mb_products_measure(b, err));
    b->complete = 1;
    QC_TRY(deliver(b, err));
    if (b->failed_count)
        QC_FAIL(err, QC_ERR_CHECK, "%u of the results were wrong or missing, as said above",
                b->failed_count);
    return QC_OK;
}

int main(int argc, char **argv)
{
    static mb_bench b;
    qc_error err = {0};
    if (!read_words(&b, argc, argv))
        return 2;
    b.started_ns = qc_clock_ns();
    qc_status st = run(&b, &err);
    if (st != QC_OK)
        qc_console_error(&err, NULL, 0);
    qc_cuda_free(b.map);
    qc_cuda_free(b.bad);
    qc_cuda_host_free(b.pinned);
    qc_timer_close(&b.t);
    qc_free(b.rows);
    qc_free(b.failed);
    return st == QC_OK ? 0 : st == QC_ERR_CHECK ? 4 : st == QC_ERR_DEVICE ? 5 : 1;
}

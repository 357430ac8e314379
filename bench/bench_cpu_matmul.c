/* Rates of the products on the CPU (quant/cpu_matmul.h) beside the roof.
 *
 *   bench_cpu_matmul [--json FILE] [--threads N] [--runs N] [--rows N] [--cols N]
 *
 * A weight of N rows (default 28672) and columns (8192) in each form is multiplied with 1, 4 and 8
 * rows of x in bf16. Each form and number of rows runs once a round, in turn, so that the machine's
 * noise falls on all alike. The floor of a product is to read codes and scales once; the roof is as
 * many threads that read the same codes with 32-byte loads and software prefetch, and ratios are
 * taken within a round. Rates are of codes and scales; medians over all rounds. */
#include "base/alloc.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/read_rate.h"
#include "bench/samples.h"
#include "quant/cpu_matmul.h"
#include "quant/quant_form.h"

#include <stdio.h>

static const struct {
    const char *name;
    qc_form_kind kind;
    uint32_t block;
    int nested;
} forms[] = {{"nf4, block 64, nested", QC_FORM_NF4, 64, 1},
             {"int4, block 128", QC_FORM_W4A16, 128, 0},
             {"int4, block 32", QC_FORM_W4A16, 32, 0},
             {"int8 by rows", QC_FORM_INT8_ROWS, 0, 0}};
static const unsigned x_rows[] = {1, 4, 8};
enum { FORMS = sizeof forms / sizeof *forms, COUNTS = sizeof x_rows / sizeof *x_rows };

typedef struct {
    double gbps[BENCH_MAX_RUNS], ratio[BENCH_MAX_RUNS];
} row;

typedef struct {
    qc_weights w[FORMS];
    uint64_t bytes[FORMS]; /* of codes and scales */
    unsigned char *codes;
    uint64_t codes_bytes;
    uint16_t *x, *y;
} data;

static uint64_t seed = 1;

/* All forms read the same random bytes; the values of products do not matter here. */
static qc_status make_data(data *d, uint64_t rows, uint64_t cols, qc_error *err)
{
    const uint64_t scales = rows * cols / 32;
    float *absmax = NULL, *nested = NULL;
    void *v = NULL;
    d->codes_bytes = rows * cols;
    QC_TRY(qc_malloc_aligned(&v, 4096, d->codes_bytes, err));
    d->codes = v;
    for (uint64_t i = 0; i + 8 <= d->codes_bytes; i += 8) {
        const uint64_t word = qc_random_next(&seed);
        memcpy(d->codes + i, &word, sizeof word);
    }
    QC_TRY(qc_calloc(&absmax, scales, sizeof *absmax, err));
    QC_TRY(qc_calloc(&nested, scales / 256 + 1, sizeof *nested, err));
    for (uint64_t i = 0; i < scales; i++)
        absmax[i] = 0.01f + 0.02f * (float)(qc_random_next(&seed) >> 40) * 0x1p-24f;
    for (uint64_t i = 0; i < scales / 256 + 1; i++)
        nested[i] = 0.02f;
    for (unsigned f = 0; f < FORMS; f++) {
        const qc_form_ops *ops = qc_form_ops_of(forms[f].kind);
        const uint64_t count = forms[f].block ? rows * cols / forms[f].block : rows;
        d->w[f] = (qc_weights){.form = {.ops = ops,
                                        .block_elems = forms[f].block,
                                        .cols = cols,
                                        .nested = forms[f].nested},
                               .rows = rows,
                               .codes = d->codes,
                               .absmax = forms[f].nested ? NULL : absmax,
                               .absmax_codes = d->codes,
                               .nested_absmax = nested,
                               .nested_map = qc_dynamic_map,
                               .nested_block = 256};
        d->bytes[f] = qc_form_code_bytes(&d->w[f].form, rows * cols) +
                      count * (forms[f].nested ? 1 : sizeof(float));
    }
    QC_TRY(qc_calloc(&d->x, 8 * cols, sizeof *d->x, err));
    QC_TRY(qc_calloc(&d->y, 8 * rows, sizeof *d->y, err));
    bench_fill_bf16(d->x, 8 * cols, &seed);
    return QC_OK;
}

static qc_status measure(qc_cpu_matmul *h, const data *d, int runs, row rows[FORMS][COUNTS],
                         double *roofs, qc_error *err)
{
    for (int i = -1; i < runs; i++) { /* the first round only warms up */
        double seconds = 0.0;
        QC_TRY(qc_read_memory(d->codes, d->codes_bytes, qc_cpu_matmul_threads(h), &seconds, err));
        const double roof = (double)d->codes_bytes / seconds * 1e-9;
        if (i >= 0)
            roofs[i] = roof;
        for (unsigned f = 0; f < FORMS; f++)
            for (unsigned c = 0; c < COUNTS; c++) {
                const qc_weights *w = &d->w[f];
                const qc_matmul_cpu_io io = {d->x, QC_DTYPE_BF16, x_rows[c], w->form.cols,
                                             d->y, QC_DTYPE_BF16, w->rows,   NULL};
                const uint64_t start = qc_clock_ns();
                QC_TRY(qc_cpu_matmul_run(h, w, &io, err));
                const double gbps = (double)d->bytes[f] / (double)(qc_clock_ns() - start);
                if (i < 0)
                    continue;
                rows[f][c].gbps[i] = gbps;
                rows[f][c].ratio[i] = gbps / roof;
            }
    }
    return QC_OK;
}

static void write_rows(qc_json_writer *w, row rows[FORMS][COUNTS], int runs)
{
    qc_json_begin_list(w, "rows");
    for (unsigned f = 0; f < FORMS; f++)
        for (unsigned c = 0; c < COUNTS; c++) {
            qc_json_begin_row(w, NULL);
            qc_json_put_text(w, "form", forms[f].name);
            qc_json_put_double(w, "x_rows", x_rows[c]);
            qc_json_put_double(w, "gbps", bench_quantile(rows[f][c].gbps, runs, 0.5));
            qc_json_put_double(w, "of_read_rate", bench_quantile(rows[f][c].ratio, runs, 0.5));
            qc_json_end(w);
        }
    qc_json_end(w);
}

static qc_status write_json(const char *path, const char *command, row rows[FORMS][COUNTS],
                            const double *roofs, int runs, qc_error *err)
{
    qc_strbuf out;
    qc_json_writer w;
    qc_strbuf_init(&out, 1u << 20);
    qc_json_write_init(&w, &out, err);
    qc_json_begin_object(&w, NULL);
    qc_json_put_text(&w, "bench", "cpu_matmul");
    qc_json_put_text(&w, "command", command);
    qc_json_put_double(&w, "read_gbps", bench_quantile(roofs, runs, 0.5));
    write_rows(&w, rows, runs);
    qc_json_end(&w);
    return bench_json_save(&w, &out, path, err);
}

int main(int argc, char **argv)
{
    static row rows[FORMS][COUNTS];
    static double roofs[BENCH_MAX_RUNS];
    const char *json = NULL;
    unsigned long threads = qc_cpu_count(), n = 28672, k = 8192;
    int runs = 11;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--json") == 0)
            json = argv[i + 1];
        else if (strcmp(argv[i], "--threads") == 0)
            threads = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--runs") == 0)
            runs = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--rows") == 0)
            n = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--cols") == 0)
            k = strtoul(argv[i + 1], NULL, 10);
    }
    if (runs < 1 || runs > BENCH_MAX_RUNS || threads < 1 || threads > 64 || n < 1 || k % 256 != 0) {
        fprintf(stderr, "usage: see the top of bench/bench_cpu_matmul.c\n");
        return 2;
    }
    data d = {0};
    qc_cpu_matmul *h = NULL;
    qc_error err = {0};
    qc_status st = make_data(&d, n, k, &err);
    if (st == QC_OK)
        st = qc_cpu_matmul_create(&h, (unsigned)threads, &err);
    if (st == QC_OK)
        st = measure(h, &d, runs, rows, roofs, &err);
    qc_cpu_matmul_destroy(h);
    printf("read %.1f GB/s, %lu threads\n", bench_quantile(roofs, runs, 0.5), threads);
    for (unsigned f = 0; f < FORMS; f++)
        for (unsigned c = 0; c < COUNTS; c++)
            printf("%-24s %u rows  %6.1f GB/s  %.2f of the read rate\n", forms[f].name, x_rows[c],
                   bench_quantile(rows[f][c].gbps, runs, 0.5),
                   bench_quantile(rows[f][c].ratio, runs, 0.5));
    char command[256];
    (void)snprintf(
        command, sizeof command,
        "build/bench_cpu_matmul --threads %lu --runs %d --rows %lu --cols %lu --json FILE", threads,
        runs, n, k);
    if (st == QC_OK && json)
        st = write_json(json, command, rows, roofs, runs, &err);
    if (st != QC_OK)
        fprintf(stderr, "bench_cpu_matmul: %s\n", err.msg);
    return st == QC_OK ? 0 : 1;
}

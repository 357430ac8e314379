/* Measures what calibrating a layer costs, step by step, beside the floor of its matrix products.
 *
 *   bench_feedback [--json FILE] [--n N] [--rows N] [--tokens N] [--runs N] [--no-cross]
 *                  [--outputs N]
 *
 * It makes moments of N tokens (default 1024) of n inputs (4096), their factor and the target's
 * matrix, and one weight of [rows (1024), n] in NF4, block 64, double quantized, once with outputs
 * that count alike and once with their second moments in blocks of N (--outputs, default 1024; 0:
 * not). The floor is what
 * qc_moments_flops and its like count, at the speed of one large product of the same kind (float,
 * 2048^3; double for the factor, 1536^3) in the same round. Times are processor time of one thread,
 * so that waiting for a core is not counted; they are medians over runs, with ratios taken within a
 * run. */
#include "base/alloc.h"
#include "bench/samples.h"
#include "quant/blas_internal.h"
#include "quant/error_feedback.h"
#include "quant/second_moments.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FLOAT_SIZE  2048u
#define DOUBLE_SIZE 1536u

enum { MOMENTS, OPEN, WEIGHT, TWO_SIDED, STEPS };
static const char *const step_names[STEPS] = {"moments", "factor and target", "weight",
                                              "weight, two-sided"};

typedef struct {
    const qc_blas *blas;
    uint64_t n, rows, tokens, outputs;
    int cross, runs;
    float *x, *z, *w, *work, *g;
    double *h, *c, *wide;
    double seconds[STEPS][BENCH_MAX_RUNS], of_floor[STEPS][BENCH_MAX_RUNS];
    double gflops[2][BENCH_MAX_RUNS]; /* float, double */
    double all[BENCH_MAX_RUNS];       /* of all steps with the one-sided weight, of the floor */
    double more[BENCH_MAX_RUNS];      /* of the two-sided weight, of the other */
    qc_feedback_result result, two_sided;
} bench;

static void *need(uint64_t bytes)
{
    void *p;
    if (qc_malloc_aligned(&p, 4096, bytes + 64, NULL) != QC_OK) {
        fprintf(stderr, "bench_feedback: out of memory\n");
        exit(1);
    }
    memset(p, 0, bytes + 64);
    return p;
}

static double cpu_seconds(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void measure_products(bench *b, int run)
{
    const int f = (int)FLOAT_SIZE, d = (int)DOUBLE_SIZE;
    const double start = cpu_seconds();
    b->blas->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, f, f, f, 1.0f, b->work, f,
                     b->work + FLOAT_SIZE * FLOAT_SIZE, f, 0.0f,
                     b->work + 2 * FLOAT_SIZE * FLOAT_SIZE, f);
    const double middle = cpu_seconds();
    b->blas->f.dgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, d, d, d, 1.0, b->wide, d,
                     b->wide + DOUBLE_SIZE * DOUBLE_SIZE, d, 0.0,
                     b->wide + 2 * DOUBLE_SIZE * DOUBLE_SIZE, d);
    const double end = cpu_seconds();
    b->gflops[0][run] = 2.0 * pow(FLOAT_SIZE, 3) / (middle - start) * 1e-9;
    b->gflops[1][run] = 2.0 * pow(DOUBLE_SIZE, 3) / (end - middle) * 1e-9;
}

static qc_status once(bench *b, int run, qc_error *err)
{
    const qc_feedback_options options = {0.1, QC_FEEDBACK_SWEEPS};
    const qc_form form = {.ops = &qc_form_nf4, .block_elems = 64, .nested = 1};
    const uint64_t elems = b->rows * b->n, blocks = (elems + 63) / 64;
    qc_feedback_out out = {.codes = need(elems),
                           .absmax = need(blocks * 4),
                           .absmax_codes = need(blocks),
                           .nested_absmax = need(blocks / 64 + 4)};
    qc_feedback *f = NULL;
    double at[STEPS + 1], floors[STEPS], took = 0.0, floor = 0.0;
    memset(b->h, 0, b->n * b->n * sizeof *b->h);
    memset(b->c, 0, b->n * b->n * sizeof *b->c);
    measure_products(b, run);
    at[MOMENTS] = cpu_seconds();
    QC_TRY(qc_moments_add(b->blas, 1, b->h, b->cross ? b->c : NULL, b->n, b->x, b->n, b->z, b->n,
                          b->tokens, err));
    at[OPEN] = cpu_seconds();
    QC_TRY(
        qc_feedback_open(&f, b->blas, 1, b->n, b->h, b->cross ? b->c : NULL, &options, NULL, err));
    at[WEIGHT] = cpu_seconds();
    QC_TRY(qc_feedback_weight(f, &form, b->w, b->rows, NULL, &out, &b->result, err));
    at[TWO_SIDED] = cpu_seconds();
    const qc_feedback_outputs g = {.g = b->g, .block = b->outputs};
    if (b->outputs > 0)
        QC_TRY(qc_feedback_weight(f, &form, b->w, b->rows, &g, &out, &b->two_sided, err));
    at[STEPS] = cpu_seconds();
    qc_feedback_close(f);
    floors[MOMENTS] = qc_moments_flops(b->tokens, b->n, b->cross) / b->gflops[0][run];
    floors[OPEN] = qc_feedback_open_flops(b->n, b->cross) / b->gflops[1][run];
    floors[WEIGHT] =
        qc_feedback_weight_flops(b->rows, b->n, b->cross, &options, 0) / b->gflops[0][run];
    floors[TWO_SIDED] =
        qc_feedback_weight_flops(b->rows, b->n, b->cross, &options, b->outputs) / b->gflops[0][run];
    for (unsigned i = 0; i < STEPS; i++) {
        b->seconds[i][run] = at[i + 1] - at[i];
        b->of_floor[i][run] = b->seconds[i][run] / (floors[i] * 1e-9);
        took += i == TWO_SIDED ? 0.0 : b->seconds[i][run];
        floor += i == TWO_SIDED ? 0.0 : floors[i] * 1e-9;
    }
    b->more[run] = b->seconds[TWO_SIDED][run] / b->seconds[WEIGHT][run];
    b->all[run] = took / floor;
    qc_free(out.codes);
    qc_free(out.absmax);
    qc_free(out.absmax_codes);
    qc_free(out.nested_absmax);
    return QC_OK;
}

/* Neighbours have like gradients, and sizes differ. */
static void make_outputs(bench *b, uint64_t *seed)
{
    const uint64_t block = b->outputs, count = block ? (b->rows + block - 1) / block : 0;
    float *size = need(block * 4);
    b->g = need(count * block * block * 4);
    for (uint64_t i = 0; i < block; i++)
        size[i] = (float)exp(bench_normal(seed, 0.7));
    for (uint64_t k = 0; k < count; k++)
        for (uint64_t i = 0; i < block; i++)
            for (uint64_t j = 0; j < block; j++)
                b->g[(k * block + i) * block + j] =
                    size[i] * size[j] * (float)pow(0.8, fabs((double)i - (double)j));
    qc_free(size);
}

static void make_inputs(bench *b)
{
    const uint64_t products = 3 * (uint64_t)FLOAT_SIZE * FLOAT_SIZE;
    uint64_t seed = 1;
    b->x = need(b->tokens * b->n * 4);
    b->z = need(b->tokens * b->n * 4);
    b->w = need(b->rows * b->n * 4);
    b->h = need(b->n * b->n * 8);
    b->c = need(b->n * b->n * 8);
    b->work = need(products * 4);
    b->wide = need(3 * (uint64_t)DOUBLE_SIZE * DOUBLE_SIZE * 8);
    for (uint64_t t = 0; t < b->tokens; t++) { /* neighbours are alike */
        float last = 0.0f;
        for (uint64_t k = 0; k < b->n; k++) {
            last = 0.8f * last + (float)bench_normal(&seed, 0.6);
            b->x[t * b->n + k] = last;
            b->z[t * b->n + k] = last + (float)bench_normal(&seed, 0.05);
        }
    }
    for (uint64_t i = 0; i < b->rows * b->n; i++)
        b->w[i] = (float)bench_normal(&seed, 0.02);
    for (uint64_t i = 0; i < products; i++)
        b->work[i] = (float)(qc_random_next(&seed) >> 40) * 0x1p-24f;
    for (uint64_t i = 0; i < 3 * (uint64_t)DOUBLE_SIZE * DOUBLE_SIZE; i++)
        b->wide[i] = (double)b->work[i % products];
    make_outputs(b, &seed);
}

static void print_table(const bench *b)
{
    printf("%s\nfloat product %.1f GFLOP/s, double %.1f\n", qc_blas_name(b->blas),
           bench_quantile(b->gflops[0], b->runs, 0.5), bench_quantile(b->gflops[1], b->runs, 0.5));
    printf("%-20s %10s %10s\n", "step", "seconds", "of floor");
    for (unsigned i = 0; i < STEPS; i++)
        printf("%-20s %10.3f %10.2f\n", step_names[i], bench_quantile(b->seconds[i], b->runs, 0.5),
               bench_quantile(b->of_floor[i], b->runs, 0.5));
    printf("%-20s %10s %10.2f\n", "all", "", bench_quantile(b->all, b->runs, 0.5));
    if (b->outputs > 0)
        printf("two-sided, blocks of %llu outputs: %.2f times the time of the weight\n",
               (unsigned long long)b->outputs, bench_quantile(b->more, b->runs, 0.5));
    printf("error of outputs %.3f of that of searched scales\n",
           b->result.calibrated / b->result.rounded);
}

static void put(qc_json_writer *w, const char *key, double value)
{
    qc_json_write_key(w, key);
    qc_json_write_double(w, value);
}

static qc_status write_json(const bench *b, const char *path, qc_error *err)
{
    qc_strbuf out;
    qc_json_writer w;
    qc_strbuf_init(&out, 1u << 20);
    qc_json_write_init(&w, &out, err);
    qc_json_write_begin_object(&w);
    qc_json_write_key(&w, "blas");
    qc_json_write_string(&w, qc_blas_name(b->blas));
    put(&w, "n", (double)b->n);
    put(&w, "rows", (double)b->rows);
    put(&w, "tokens", (double)b->tokens);
    put(&w, "outputs", (double)b->outputs);
    put(&w, "two_sided_of_weight", bench_quantile(b->more, b->runs, 0.5));
    put(&w, "float_gflops", bench_quantile(b->gflops[0], b->runs, 0.5));
    put(&w, "double_gflops", bench_quantile(b->gflops[1], b->runs, 0.5));
    qc_json_write_key(&w, "steps");
    qc_json_write_begin_array(&w);
    for (unsigned i = 0; i < STEPS; i++) {
        qc_json_write_begin_object(&w);
        qc_json_write_key(&w, "name");
        qc_json_write_string(&w, step_names[i]);
        put(&w, "seconds", bench_quantile(b->seconds[i], b->runs, 0.5));
        put(&w, "of_floor", bench_quantile(b->of_floor[i], b->runs, 0.5));
        qc_json_write_end_object(&w);
    }
    qc_json_write_end_array(&w);
    put(&w, "of_floor", bench_quantile(b->all, b->runs, 0.5));
    qc_json_write_end_object(&w);
    return bench_json_save(&w, &out, path, err);
}

int main(int argc, char **argv)
{
    static bench b = {
        .n = 4096, .rows = 1024, .tokens = 1024, .outputs = 1024, .cross = 1, .runs = 3};
    const char *json = NULL;
    qc_error err;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        const long number = strtol(value, NULL, 10);
        if (strcmp(argv[i], "--no-cross") == 0) {
            b.cross = 0;
            continue;
        }
        i++;
        if (strcmp(argv[i - 1], "--json") == 0 && *value)
            json = value;
        else if (strcmp(argv[i - 1], "--n") == 0 && number >= 64 && number <= 65536)
            b.n = (uint64_t)number;
        else if (strcmp(argv[i - 1], "--rows") == 0 && number >= 1 && number <= 65536)
            b.rows = (uint64_t)number;
        else if (strcmp(argv[i - 1], "--tokens") == 0 && number >= 1 && number <= 1048576)
            b.tokens = (uint64_t)number;
        else if (strcmp(argv[i - 1], "--outputs") == 0 && number >= 0 && number <= 65536)
            b.outputs = (uint64_t)number;
        else if (strcmp(argv[i - 1], "--runs") == 0 && number >= 1 && number <= BENCH_MAX_RUNS)
            b.runs = (int)number;
        else {
            fprintf(stderr, "usage: bench_feedback [--json FILE] [--n 64..65536] [--rows N] "
                            "[--tokens N] [--runs N] [--no-cross] [--outputs N]\n");
            return 2;
        }
    }
    if (qc_blas_open(&b.blas, &err) != QC_OK) {
        fprintf(stderr, "bench_feedback: %s\n", err.msg);
        return 1;
    }
    make_inputs(&b);
    for (int run = 0; run < b.runs; run++)
        if (once(&b, run, &err) != QC_OK) {
            fprintf(stderr, "bench_feedback: %s\n", err.msg);
            return 1;
        }
    print_table(&b);
    if (json && write_json(&b, json, &err) != QC_OK) {
        fprintf(stderr, "bench_feedback: %s\n", err.msg);
        return 1;
    }
    return 0;
}

/* Searched scales: what they leave of the error, and what they cost.
 *
 *   bench_scale_search [--json FILE] [--only error|time] [--mib N] [--runs N] [--isa LIST]
 *                      [--model NAME=FILE]...
 *
 * Error. Squared error of the decoded weights as a share of what bitsandbytes' choice leaves (the
 * largest value, double quantization about the mean) in the same form, on 2^21 normal weights and
 * on the weights of safetensors files (two dimensions, embeddings and head left out). "best" tries
 * all 256 scales of the search's own nested absmax for every block; "best > 0" does so with
 * positive scales about their mean, as far as anybody can get without signs.
 *
 * Time. N MiB (default 64) of normal bf16 values, processor time of one thread; everything runs
 * once per round, in turn, and ratios to absmax in the same form and to reading the memory are
 * taken within a round: the machine's noise falls on all alike. Medians are reported. */
#include "base/alloc.h"
#include "bench/samples.h"
#include "formats/safetensors_file.h"
#include "quant/scale_search.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_ROWS   96
#define MAX_MODELS 8
#define NORMALS    ((uint64_t)1 << 21)
#define STEP_ELEMS ((uint64_t)1 << 18)
#define ROW_COLS   2048u
#define FORM_COUNT 10u

static const struct {
    const char *name;
    const qc_form_ops *ops;
    int nested;
    uint32_t block; /* 0: rows */
} forms[FORM_COUNT] = {
    {"nf4 block 64 dq", &qc_form_nf4, 1, 64},    {"nf4 block 32 dq", &qc_form_nf4, 1, 32},
    {"nf4 block 64", &qc_form_nf4, 0, 64},       {"int8 block 64 dq", &qc_form_int8_blocks, 1, 64},
    {"int8 rows", &qc_form_int8_rows, 0, 0},     {"w4a16 group 128", &qc_form_w4a16, 0, 128},
    {"w4a16 group 64", &qc_form_w4a16, 0, 64},   {"w4a16 group 32", &qc_form_w4a16, 0, 32},
    {"w8a16 group 128", &qc_form_w8a16, 0, 128}, {"w8a8 rows", &qc_form_w8a8, 0, 0},
};

static uint64_t seed = 1;

static void *need(uint64_t bytes)
{
    void *p;
    if (qc_malloc_aligned(&p, 4096, bytes + 64, NULL) != QC_OK) {
        fprintf(stderr, "bench_scale_search: out of memory\n");
        exit(1);
    }
    memset(p, 0, bytes + 64);
    return p;
}

/* Processor time: waiting for a core is not counted. */
static uint64_t cpu_ns(void)
{
    struct timespec t;
    (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double median(const double *v, int n)
{
    return bench_quantile(v, n, 0.5);
}

/* ---- error ----------------------------------------------------------------------------------- */

typedef struct {
    char name[64];
    uint64_t weights;
    double xx;
    double absmax, once, refit, best, best_positive; /* sums of squared errors */
} error_row;

static error_row errors[(MAX_MODELS + 1) * FORM_COUNT];
static unsigned error_count;

typedef struct {
    const float *x;
    uint64_t rows, cols, n, blocks;
    unsigned form;
    uint8_t *codes, *absmax_codes;
    float *absmax, *nested, *back;
    void *scratch;
    const qc_quant_ops *quant;
    const qc_search_ops *search;
} tensor;

static qc_form form_of(unsigned i)
{
    return (qc_form){.ops = forms[i].ops,
                     .block_elems = forms[i].block,
                     .cols = ROW_COLS,
                     .nested = forms[i].nested,
                     .scale_dtype = QC_DTYPE_BF16};
}

static qc_form form_of_tensor(const tensor *t)
{
    qc_form form = form_of(t->form);
    form.cols = t->cols;
    return form;
}

static double decoded_error(const tensor *t)
{
    const qc_form form = form_of_tensor(t);
    uint64_t overflow;
    double sum = 0;
    form.ops->dequantize(t->quant, &form, t->codes, t->absmax, t->n, t->back, QC_DTYPE_F32,
                         &overflow);
    for (uint64_t i = 0; i < t->n; i++)
        sum += ((double)t->x[i] - (double)t->back[i]) * ((double)t->x[i] - (double)t->back[i]);
    return sum;
}

static double absmax_error(const tensor *t)
{
    const qc_form form = form_of_tensor(t);
    const qc_form_out out = {.codes = t->codes, .absmax = t->absmax};
    qc_piece_sums sums;
    form.ops->quantize(t->quant, &form, t->x, QC_DTYPE_F32, t->n, &out, &sums);
    if (form.nested) {
        float offset = qc_nested_offset(t->absmax, t->blocks);
        t->quant->nested_quantize(t->absmax, t->blocks, offset, t->absmax_codes, t->nested);
        t->quant->nested_dequantize(t->absmax_codes, t->nested, qc_dynamic_map, t->blocks,
                                    QC_NESTED_BLOCK, offset, t->absmax);
    }
    return decoded_error(t);
}

static double searched_error(const tensor *t, qc_search_effort effort)
{
    qc_piece_sums sums;
    qc_form form = form_of_tensor(t);
    qc_search_out out = {t->codes, t->absmax, t->absmax_codes, t->nested};
    if (form.nested && !form.ops->signed_scales) { /* small tensors: the sample is all of it */
        form.nested = 0;
        t->search->blocks(&form, effort, t->x, QC_DTYPE_F32, t->n, &out, t->scratch, &sums);
        form.offset = qc_nested_offset(t->absmax, t->blocks);
        form.nested = 1;
    }
    t->search->blocks(&form, effort, t->x, QC_DTYPE_F32, t->n, &out, t->scratch, &sums);
    return decoded_error(t);
}

static double block_error(const qc_form_ops *form, const float *x, uint64_t n, float s)
{
    float sum = 0, inv = 1.0f / s;
    for (uint64_t i = 0; i < n; i++) {
        float y = x[i] * inv, r;
        if (form->integer) {
            const float low = (float)form->lowest, high = (float)form->highest, q = rintf(y);
            r = y - (q > high ? high : q < low ? low : q);
        } else if (form == &qc_form_nf4) {
            unsigned code = 0;
            for (unsigned k = 0; k < 15; k++)
                code += y > qc_nf4_threshold[k];
            r = y - qc_nf4_code[code];
        } else {
            float q = rintf(y * 127.0f);
            r = y - (q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q) / 127.0f;
        }
        sum += r * r;
    }
    return (double)sum * (double)s * (double)s;
}

/* Tries all 256 codes of each block under t->nested and offset. */
static double exhaustive_error(const tensor *t, float offset, int positive)
{
    double sum = 0;
    for (uint64_t b = 0; b < t->blocks; b++) {
        const uint64_t first = b * forms[t->form].block, left = t->n - first;
        const uint64_t n = left < forms[t->form].block ? left : forms[t->form].block;
        double best = INFINITY;
        for (unsigned code = 0; code < 256; code++) {
            float s = qc_dynamic_map[code] * t->nested[b / QC_NESTED_BLOCK] + offset;
            if (s > 0 || (s < 0 && !positive)) {
                double error = block_error(forms[t->form].ops, t->x + first, n, s);
                best = error < best ? error : best;
            }
        }
        sum += best;
    }
    return sum;
}

/* Positive scales only: targets on a grid, their mean, and the groups' nested absmax. */
static double exhaustive_positive(const tensor *t)
{
    for (uint64_t b = 0; b < t->blocks; b++) {
        const uint64_t first = b * forms[t->form].block, left = t->n - first;
        const uint64_t n = left < forms[t->form].block ? left : forms[t->form].block;
        float largest = 0;
        double least = INFINITY;
        for (uint64_t i = first; i < first + n; i++)
            largest = fabsf(t->x[i]) > largest ? fabsf(t->x[i]) : largest;
        t->absmax[b] = 0;
        for (unsigned k = 0; k < 90 && largest > 0; k++) {
            float s = largest * (0.6f + 0.01f * (float)k);
            double error = block_error(&qc_form_nf4, t->x + first, n, s);
            if (error < least) {
                least = error;
                t->absmax[b] = s;
            }
        }
    }
    float offset = qc_nested_offset(t->absmax, t->blocks);
    t->quant->nested_quantize(t->absmax, t->blocks, offset, t->absmax_codes, t->nested);
    return exhaustive_error(t, offset, 1);
}

/* Tries 301 scales of either sign for each group of integers. */
static double exhaustive_integers(const tensor *t)
{
    const qc_form form = form_of_tensor(t);
    const uint64_t group = form.block_elems ? form.block_elems : t->cols;
    double sum = 0;
    for (uint64_t first = 0; first < t->n; first += group) {
        double best = INFINITY;
        float largest = 0;
        for (uint64_t i = first; i < first + group; i++)
            largest = fabsf(t->x[i]) > largest ? fabsf(t->x[i]) : largest;
        for (int k = form.ops->signed_scales ? -150 : 1; k <= 150 && largest > 0; k++) {
            const float f = (float)k * 0.008f, s = largest * f / qc_form_reach(form.ops);
            const double error =
                k ? block_error(form.ops, t->x + first, group, qc_form_round_scale(&form, s))
                  : (double)INFINITY;
            best = error < best ? error : best;
        }
        sum += largest > 0 ? best : 0;
    }
    return sum;
}

static void add_tensor(error_row *row, unsigned form, const float *x, uint64_t rows, uint64_t cols)
{
    tensor t = {.x = x, .rows = rows, .cols = cols, .n = rows * cols, .form = form};
    t.blocks = forms[form].block ? (t.n + forms[form].block - 1) / forms[form].block : rows;
    t.codes = need(t.n);
    t.absmax_codes = need(t.blocks);
    t.absmax = need(t.blocks * 4);
    t.nested = need(t.blocks * 4);
    t.back = need(t.n * 4);
    t.scratch = need(qc_search_scratch_bytes());
    for (int isa = 0; isa < QC_ISA_COUNT; isa++)
        if (qc_isa_available((qc_isa)isa)) {
            t.quant = qc_quant_ops_for((qc_isa)isa);
            t.search = qc_search_ops_for((qc_isa)isa);
        }
    for (uint64_t i = 0; i < t.n; i++)
        row->xx += (double)x[i] * (double)x[i];
    row->weights += t.n;
    row->absmax += absmax_error(&t);
    row->refit += searched_error(&t, QC_SEARCH_REFIT);
    row->once += searched_error(&t, QC_SEARCH_ONCE);
    if (forms[form].nested) {
        float offset = 0;
        if (!forms[form]
                 .ops->signed_scales) { /* that of the search: a scale less its code's part */
            offset = t.absmax[0] - qc_dynamic_map[t.absmax_codes[0]] * t.nested[0];
        }
        row->best += exhaustive_error(&t, offset, 0);
        if (forms[form].ops == &qc_form_nf4)
            row->best_positive += exhaustive_positive(&t);
    }
    if (forms[form].ops->integer)
        row->best += exhaustive_integers(&t);
    qc_free(t.codes);
    qc_free(t.absmax_codes);
    qc_free(t.absmax);
    qc_free(t.nested);
    qc_free(t.back);
    qc_free(t.scratch);
}

static int wanted(const qc_st_tensor *t)
{
    return t->ndim == 2 &&
           (t->dtype == QC_DTYPE_F32 || t->dtype == QC_DTYPE_BF16 || t->dtype == QC_DTYPE_F16) &&
           !strstr(t->name, "embed") && !strstr(t->name, "lm_head");
}

static qc_status measure_file(const char *name, const char *path, qc_error *err)
{
    qc_st_file f;
    qc_st_cursor *cursor;
    QC_TRY(qc_st_file_open(&f, path, err));
    qc_status st = qc_st_cursor_create(&cursor, err);
    error_row *row = &errors[error_count];
    for (unsigned k = 0; k < FORM_COUNT; k++)
        (void)snprintf(row[k].name, sizeof row[k].name, "%s, %s", name, forms[k].name);
    for (size_t i = 0; st == QC_OK && i < f.header.tensor_count; i++) {
        const qc_st_tensor *t = &f.header.tensors[i];
        if (!wanted(t))
            continue;
        const uint64_t n = t->dims[0] * t->dims[1];
        void *raw = need(t->end - t->begin);
        float *x = need(n * 4);
        uint64_t overflow;
        st = qc_st_file_read(&f, cursor, t->begin, raw, t->end - t->begin, err);
        if (st == QC_OK) {
            qc_quant_ops_for(QC_ISA_SCALAR)->cast(raw, t->dtype, n, x, QC_DTYPE_F32, &overflow);
            for (unsigned k = 0; k < FORM_COUNT; k++)
                add_tensor(&row[k], k, x, t->dims[0], t->dims[1]);
        }
        qc_free(raw);
        qc_free(x);
    }
    error_count += FORM_COUNT;
    qc_st_cursor_destroy(cursor);
    qc_st_file_close(&f);
    return st;
}

static void measure_normal(void)
{
    float *x = need(NORMALS * 4);
    for (uint64_t i = 0; i < NORMALS; i++)
        x[i] = (float)bench_normal(&seed, 0.02);
    for (unsigned k = 0; k < FORM_COUNT; k++) {
        error_row *row = &errors[error_count++];
        (void)snprintf(row->name, sizeof row->name, "normal, %s", forms[k].name);
        add_tensor(row, k, x, NORMALS / ROW_COLS, ROW_COLS);
    }
    qc_free(x);
}

/* ---- time ------------------------------------------------------------------------------------ */

typedef enum { ABSMAX, SEARCH, REFIT } method;

typedef struct {
    char name[64];
    qc_isa isa;
    unsigned form;
    method how;
    int base; /* row of absmax */
    double ns[BENCH_MAX_RUNS], of_absmax[BENCH_MAX_RUNS], of_read[BENCH_MAX_RUNS];
} time_row;

static time_row times[MAX_ROWS];
static int time_count;

typedef struct {
    uint16_t *x;
    uint64_t n;
    uint8_t *codes, *absmax_codes;
    float *absmax, *nested;
    qc_block_error *block_errors;
    void *scratch;
} buffers;

static volatile uint64_t sink;

static uint64_t read_all(const buffers *b)
{
    uint64_t sum[8] = {0};
    const uint64_t *p = (const uint64_t *)(const void *)b->x;
    for (uint64_t i = 0; i + 8 <= b->n / 4; i += 8)
        for (unsigned k = 0; k < 8; k++)
            sum[k] ^= p[i + k];
    for (unsigned k = 1; k < 8; k++)
        sum[0] ^= sum[k];
    return sum[0];
}

static void run(const time_row *r, const buffers *b, uint64_t n)
{
    const qc_quant_ops *q = qc_quant_ops_for(r->isa);
    const qc_search_ops *s = qc_search_ops_for(r->isa);
    const uint32_t block = forms[r->form].block;
    const qc_search_effort effort = r->how == REFIT ? QC_SEARCH_REFIT : QC_SEARCH_ONCE;
    qc_form form = form_of(r->form);
    const qc_form_out quantized = {b->codes, b->absmax, b->block_errors};
    if (form.nested && form.ops != &qc_form_nf4)
        form.offset = 0.0478515625f; /* mean of absmax, about */
    qc_search_out out = {b->codes, b->absmax, b->absmax_codes, b->nested};
    qc_piece_sums sums;
    for (uint64_t at = 0; at < n; at += STEP_ELEMS) {
        const uint16_t *x = b->x + at;
        if (r->how != ABSMAX)
            s->blocks(&form, effort, x, QC_DTYPE_BF16, STEP_ELEMS, &out, b->scratch, &sums);
        else
            form.ops->quantize(q, &form, x, QC_DTYPE_BF16, STEP_ELEMS, &quantized, &sums);
        if (r->how == ABSMAX && form.nested)
            q->nested_quantize(b->absmax, STEP_ELEMS / block, 0.0478515625f, b->absmax_codes,
                               b->nested);
    }
}

static void measure_times(uint64_t mib, int runs, const char *isas)
{
    static const char *const how[3] = {"absmax", "search", "refit"};
    buffers b = {.n = mib << 19};
    b.x = need(b.n * 2);
    b.codes = need(STEP_ELEMS);
    b.absmax_codes = need(STEP_ELEMS / 32);
    b.absmax = need(STEP_ELEMS / 8);
    b.nested = need(STEP_ELEMS / 32);
    b.block_errors = need(STEP_ELEMS / 32 * sizeof *b.block_errors);
    b.scratch = need(qc_search_scratch_bytes());
    bench_fill_bf16(b.x, b.n, &seed);
    for (int isa = QC_ISA_COUNT - 1; isa >= 0; isa--) {
        if (!strstr(isas, qc_isa_name((qc_isa)isa)) || !qc_isa_available((qc_isa)isa) ||
            qc_search_ops_for((qc_isa)isa)->isa != (qc_isa)isa)
            continue;
        for (unsigned form = 0; form < FORM_COUNT; form++) {
            const int base = time_count;
            for (unsigned m = ABSMAX; m <= (forms[form].nested ? REFIT : SEARCH); m++) {
                time_row *r = &times[time_count++];
                (void)snprintf(r->name, sizeof r->name, "%s, %s", forms[form].name, how[m]);
                r->isa = (qc_isa)isa;
                r->form = form;
                r->how = (method)m;
                r->base = base;
            }
        }
    }
    for (int n = -1; n < runs; n++) { /* round -1 warms up */
        uint64_t begin = cpu_ns();
        sink = read_all(&b);
        const double read_ns = (double)(cpu_ns() - begin) / (double)b.n;
        for (int i = 0; i < time_count; i++) {
            time_row *r = &times[i];
            uint64_t elems = r->how == REFIT || r->isa == QC_ISA_SCALAR ? b.n / 32 : b.n;
            elems = elems < STEP_ELEMS ? STEP_ELEMS : elems;
            begin = cpu_ns();
            run(r, &b, elems);
            if (n < 0)
                continue;
            r->ns[n] = (double)(cpu_ns() - begin) / (double)elems;
            r->of_absmax[n] = r->ns[n] / times[r->base].ns[n];
            r->of_read[n] = r->ns[n] / read_ns;
        }
    }
    qc_free(b.x);
    qc_free(b.codes);
    qc_free(b.absmax_codes);
    qc_free(b.absmax);
    qc_free(b.nested);
    qc_free(b.block_errors);
    qc_free(b.scratch);
}

/* ---- reports --------------------------------------------------------------------------------- */

static void json_number(qc_json_writer *w, const char *key, double value)
{
    qc_json_write_key(w, key);
    qc_json_write_double(w, value);
}

static qc_status write_json(const char *path, const char *command, int runs, qc_error *err)
{
    qc_strbuf out;
    qc_json_writer w;
    qc_strbuf_init(&out, 1u << 20);
    qc_json_write_init(&w, &out, err);
    qc_json_write_begin_object(&w);
    qc_json_write_key(&w, "bench");
    qc_json_write_string(&w, "scale_search");
    qc_json_write_key(&w, "command");
    qc_json_write_string(&w, command);
    qc_json_write_key(&w, "errors");
    qc_json_write_begin_array(&w);
    for (unsigned i = 0; i < error_count; i++) {
        const error_row *r = &errors[i];
        qc_json_write_compact_next(&w);
        qc_json_write_begin_object(&w);
        qc_json_write_key(&w, "name");
        qc_json_write_string(&w, r->name);
        json_number(&w, "weights", (double)r->weights);
        json_number(&w, "absmax_rel_mse", r->absmax / r->xx);
        json_number(&w, "search", r->once / r->absmax);
        json_number(&w, "refit", r->refit / r->absmax);
        json_number(&w, "best", r->best / r->absmax);
        json_number(&w, "best_positive", r->best_positive / r->absmax);
        qc_json_write_end_object(&w);
    }
    qc_json_write_end_array(&w);
    qc_json_write_key(&w, "times");
    qc_json_write_begin_array(&w);
    for (int i = 0; i < time_count; i++) {
        const time_row *r = &times[i];
        qc_json_write_compact_next(&w);
        qc_json_write_begin_object(&w);
        qc_json_write_key(&w, "name");
        qc_json_write_string(&w, r->name);
        qc_json_write_key(&w, "isa");
        qc_json_write_string(&w, qc_isa_name(r->isa));
        json_number(&w, "ns_per_weight", median(r->ns, runs));
        json_number(&w, "of_absmax", median(r->of_absmax, runs));
        json_number(&w, "of_read", median(r->of_read, runs));
        qc_json_write_end_object(&w);
    }
    qc_json_write_end_array(&w);
    qc_json_write_end_object(&w);
    return bench_json_save(&w, &out, path, err);
}

static void print_all(int runs)
{
    printf("%-36s %10s %9s %8s %8s %8s %8s\n", "squared error", "weights", "absmax", "search",
           "refit", "best", "best > 0");
    for (unsigned i = 0; i < error_count; i++) {
        const error_row *r = &errors[i];
        printf("%-36s %10.0f %9.3e", r->name, (double)r->weights, r->absmax / r->xx);
        const double shares[4] = {r->once, r->refit, r->best, r->best_positive};
        for (unsigned k = 0; k < 4; k++) {
            if (shares[k] > 0)
                printf(" %+7.2f%%", 100 * (shares[k] / r->absmax - 1));
            else
                printf(" %8s", "-");
        }
        printf("\n");
    }
    printf("%-36s %-7s %10s %9s %8s\n", "time", "", "ns/weight", "x absmax", "x read");
    for (int i = 0; i < time_count; i++)
        printf("%-36s %-7s %10.3f %9.2f %8.2f\n", times[i].name, qc_isa_name(times[i].isa),
               median(times[i].ns, runs), median(times[i].of_absmax, runs),
               median(times[i].of_read, runs));
}

int main(int argc, char **argv)
{
    uint64_t mib = 64;
    int runs = 31;
    const char *json = NULL, *isas = "scalar,avx2,avx512", *only = "", *models[MAX_MODELS];
    unsigned model_count = 0;
    char command[256];
    qc_error err = {0};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--json") == 0)
            json = argv[i + 1];
        else if (strcmp(argv[i], "--mib") == 0)
            mib = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--runs") == 0)
            runs = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--only") == 0)
            only = argv[i + 1];
        else if (strcmp(argv[i], "--isa") == 0)
            isas = argv[i + 1];
        else if (strcmp(argv[i], "--model") == 0 && strchr(argv[i + 1], '=') &&
                 model_count < MAX_MODELS)
            models[model_count++] = argv[i + 1];
        else
            argc = 0;
    }
    if (argc % 2 == 0 || mib < 16 || mib > 4096 || runs < 1 || runs > BENCH_MAX_RUNS) {
        fprintf(stderr,
                "usage: bench_scale_search [--json FILE] [--only error|time] [--mib 16..4096] "
                "[--runs 1..%d] [--isa scalar,avx2,avx512] [--model NAME=FILE]...\n",
                BENCH_MAX_RUNS);
        return 2;
    }
    (void)snprintf(command, sizeof command,
                   "build/bench_scale_search --mib %u --runs %d --isa %s (%u models)",
                   (unsigned)mib, runs, isas, model_count);
    const int with_errors = strcmp(only, "time") != 0, with_times = strcmp(only, "error") != 0;
    if (with_errors)
        measure_normal();
    for (unsigned i = 0; i < model_count && with_errors; i++) {
        char name[24] = {0};
        const char *path = strchr(models[i], '=') + 1;
        (void)snprintf(name, sizeof name, "%.*s", (int)(path - models[i] - 1), models[i]);
        if (measure_file(name, path, &err) != QC_OK) {
            fprintf(stderr, "bench_scale_search: %s\n", err.msg);
            return 1;
        }
    }
    if (with_times)
        measure_times(mib, runs, isas);
    print_all(runs);
    if (json && write_json(json, command, runs, &err) != QC_OK) {
        fprintf(stderr, "bench_scale_search: %s\n", err.msg);
        return 1;
    }
    return 0;
}

/* Rates of the quantizers, one thread, beside the roof.
 *
 *   bench_quant [--json FILE] [--mib N] [--runs N] [--isa LIST]
 *
 * Source: N MiB (default 1024) of normal bf16 values. Every operation and code path runs once per
 * round, in turn, so that the machine's noise falls on all alike; rates are of source bytes;
 * ratios to the roof are taken within a round, medians over all rounds. The roof is one thread
 * that reads the same memory in order with the widest loads there are, with software prefetch or
 * without, whichever was faster in that round.
 *
 * "hot" rows work on one 512 KiB step that stays in the L2 cache, as the conversion does.
 * The scalar path is slow: it gets a 32nd of the memory. */
#include "base/alloc.h"
#include "base/clock.h"
#include "bench/samples.h"
#include "quant/quant_form.h"
#include "quant/scale_search.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STEP_BYTES ((size_t)512 << 10)
#define COLS       4096u
#define MAX_ROWS   96

typedef struct {
    const unsigned char *bf16;
    const float *absmax; /* positive, for the nested quantizer */
    size_t bytes;
    unsigned char *codes;
    float *scales, *nested;
    qc_block_error *errors;
    unsigned char *wide; /* dequantized or cast output: twice the source's bytes */
} buffers;

/* Work through `bytes` of source; hot: always the first step of it. */
typedef void (*run_fn)(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot);

static volatile uint64_t sink;

typedef uint64_t vec512 __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint64_t vec256 __attribute__((vector_size(32), aligned(1), may_alias));

/* One reader per width, with and without software prefetch; `ahead` bytes, 0 for none. */
#if defined(__x86_64__)
#define TARGET(isa) __attribute__((target(isa)))
#else
#define TARGET(isa)
#endif
#define READER(name, isa, vec)                                                                     \
    TARGET(isa) static uint64_t name(const unsigned char *p, size_t bytes, size_t ahead)           \
    {                                                                                              \
        vec sum[8] = {{0}};                                                                        \
        for (size_t i = 0; i < bytes; i += 8 * sizeof(vec)) {                                      \
            if (ahead) {                                                                           \
                for (size_t k = 0; k < 8 * sizeof(vec); k += 64)                                   \
                    __builtin_prefetch(p + i + k + ahead);                                         \
            }                                                                                      \
            for (size_t k = 0; k < 8; k++)                                                         \
                sum[k] ^= *(const vec *)(const void *)(p + i + k * sizeof(vec));                   \
        }                                                                                          \
        for (size_t k = 1; k < 8; k++)                                                             \
            sum[0] ^= sum[k];                                                                      \
        return sum[0][0] ^ sum[0][3];                                                              \
    }

READER(read_avx512, "avx512f", vec512)
READER(read_avx2, "avx2", vec256)
READER(read_baseline, "sse2", vec256)

static void read_with(const buffers *b, size_t bytes, size_t ahead)
{
    if (qc_isa_available(QC_ISA_AVX512))
        sink = read_avx512(b->bf16, bytes, ahead);
    else if (qc_isa_available(QC_ISA_AVX2))
        sink = read_avx2(b->bf16, bytes, ahead);
    else
        sink = read_baseline(b->bf16, bytes, ahead);
}

static void read_plain(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    (void)ops;
    (void)hot;
    read_with(b, bytes, 0);
}

static void read_ahead(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    (void)ops;
    (void)hot;
    read_with(b, bytes, 4096);
}

static void copy_roof(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    (void)ops;
    for (size_t at = 0; at < bytes; at += STEP_BYTES)
        memcpy(b->wide + (hot ? 0 : at), b->bf16 + (hot ? 0 : at), STEP_BYTES);
    sink = b->wide[bytes / 2];
}

static void nf4(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot,
                qc_block_error *errors)
{
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at, block = from / 128;
        qc_piece_sums sums = {0};
        ops->nf4_quantize(b->bf16 + from, QC_DTYPE_BF16, STEP_BYTES / 2, 64, b->codes + from / 4,
                          b->scales + block, errors ? errors + block : NULL, &sums);
    }
}

static void nf4_errors(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    nf4(ops, b, bytes, hot, b->errors);
}

static void nf4_plain(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    nf4(ops, b, bytes, hot, NULL);
}

static void int8_rows(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at;
        qc_piece_sums sums = {0};
        ops->int8_rows_quantize(b->bf16 + from, QC_DTYPE_BF16, STEP_BYTES / 2 / COLS, COLS,
                                (int8_t *)b->codes + from / 2, b->scales + from / 2 / COLS, &sums);
    }
}

static void int8_blocks(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at;
        qc_piece_sums sums = {0};
        ops->int8_blocks_quantize(b->bf16 + from, QC_DTYPE_BF16, STEP_BYTES / 2, 64,
                                  (int8_t *)b->codes + from / 2, b->scales + from / 128,
                                  b->errors + from / 128, &sums);
    }
}

static void ints(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot,
                 const qc_int_codes *how, size_t group)
{
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at;
        qc_piece_sums sums = {0};
        ops->int_quantize(how, b->bf16 + from, QC_DTYPE_BF16, STEP_BYTES / 2, group,
                          b->codes + from / 2 * how->bits / 8, b->scales + from / 2 / group, &sums);
    }
}

static const qc_int_codes w4 = {4, 8, QC_DTYPE_BF16, 0}, w8 = {8, 0, QC_DTYPE_BF16, 0};
static const qc_int_codes w5 = {5, 16, QC_DTYPE_BF16, 0}, w6 = {6, 32, QC_DTYPE_BF16, 0};

static void int4_128(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    ints(ops, b, bytes, hot, &w4, 128);
}

static void int4_64(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    ints(ops, b, bytes, hot, &w4, 64);
}

static void int5_128(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    ints(ops, b, bytes, hot, &w5, 128);
}

static void int6_128(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    ints(ops, b, bytes, hot, &w6, 128);
}

/* Searches scales as --scale search does, without double quantization. */
static void search(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot,
                   const qc_form_ops *of, uint32_t block)
{
    static _Alignas(64) unsigned char scratch[1 << 18];
    const qc_form form = {
        .ops = of, .block_elems = block, .cols = COLS, .scale_dtype = QC_DTYPE_BF16};
    if (qc_search_scratch_bytes() > sizeof scratch)
        return;
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at;
        const qc_search_out out = {.codes = b->codes + qc_form_code_bytes(&form, from / 2),
                                   .absmax = b->scales + from / 2 / block};
        qc_piece_sums sums = {0};
        qc_search_ops_for(ops->isa)->blocks(&form, QC_SEARCH_ONCE, b->bf16 + from, QC_DTYPE_BF16,
                                            STEP_BYTES / 2, &out, scratch, &sums);
    }
}

static void search_nf4(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    search(ops, b, bytes, hot, &qc_form_nf4, 64);
}

static void search_int4(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    search(ops, b, bytes, hot, &qc_form_w4a16, 128);
}

static void search_int5(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    search(ops, b, bytes, hot, &qc_form_w5a16, 128);
}

static void search_int6(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    search(ops, b, bytes, hot, &qc_form_w6a16, 128);
}

static void int8_channel(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    ints(ops, b, bytes, hot, &w8, COLS);
}

static void nested(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at;
        ops->nested_quantize(b->absmax + from / 4, STEP_BYTES / 4, 0.04f, b->codes + from / 4,
                             b->nested + from / 1024);
    }
}

static void nf4_back(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    uint64_t overflow = UINT64_MAX;
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at; /* of the bf16 that comes out */
        ops->nf4_dequantize(b->codes + from / 4, b->absmax + from / 128, qc_nf4_code,
                            STEP_BYTES / 2, 64, b->wide + from, QC_DTYPE_BF16, &overflow);
    }
    sink = overflow;
}

static void ints_back(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot,
                      const qc_int_codes *how)
{
    uint64_t overflow = UINT64_MAX;
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at; /* of the bf16 that comes out */
        ops->int_dequantize(how, b->codes + from / 16 * how->bits, b->absmax + from / 128,
                            STEP_BYTES / 2, 64, b->wide + from, QC_DTYPE_BF16, &overflow);
    }
    sink = overflow;
}

static void int4_back(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    ints_back(ops, b, bytes, hot, &w4);
}

static void int5_back(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    ints_back(ops, b, bytes, hot, &w5);
}

static void cast(const qc_quant_ops *ops, const buffers *b, size_t bytes, int hot)
{
    uint64_t overflow = UINT64_MAX;
    for (size_t at = 0; at < bytes; at += STEP_BYTES) {
        size_t from = hot ? 0 : at;
        ops->cast(b->bf16 + from, QC_DTYPE_BF16, STEP_BYTES / 2, b->wide + from, QC_DTYPE_F16,
                  &overflow);
    }
    sink = overflow;
}

static const struct {
    const char *name, *dtype;
    run_fn run;
    int per_isa;
    int hot_too;
} operations[] = {
    {"read", "bf16", read_plain, 0, 0},
    {"read, prefetched", "bf16", read_ahead, 0, 0},
    {"memcpy", "bf16", copy_roof, 0, 0},
    {"nf4 with error terms", "bf16", nf4_errors, 1, 1},
    {"nf4 alone", "bf16", nf4_plain, 1, 1},
    {"int8 by row", "bf16", int8_rows, 1, 0},
    {"int8 by block", "bf16", int8_blocks, 1, 0},
    {"int4 group 128", "bf16", int4_128, 1, 0},
    {"int4 group 64", "bf16", int4_64, 1, 1},
    {"int5 group 128", "bf16", int5_128, 1, 0},
    {"int6 group 128", "bf16", int6_128, 1, 0},
    {"search nf4", "bf16", search_nf4, 1, 0},
    {"search int4 group 128", "bf16", search_int4, 1, 0},
    {"search int5 group 128", "bf16", search_int5, 1, 0},
    {"search int6 group 128", "bf16", search_int6, 1, 0},
    {"int8 channel", "bf16", int8_channel, 1, 0},
    {"second quantization", "f32", nested, 1, 0},
    {"nf4 back to bf16 (bytes out)", "bf16", nf4_back, 1, 0},
    {"int4 back to bf16 (bytes out)", "bf16", int4_back, 1, 0},
    {"int5 back to bf16 (bytes out)", "bf16", int5_back, 1, 0},
    {"cast to f16", "bf16", cast, 1, 0},
};

typedef struct {
    char name[64];
    const char *isa, *dtype;
    const qc_quant_ops *ops;
    run_fn run;
    int hot;
    size_t bytes;
    double gbps[BENCH_MAX_RUNS], ratio[BENCH_MAX_RUNS];
} row;

static row rows[MAX_ROWS];
static int row_count;

static void add_row(int op, const qc_quant_ops *ops, const char *isa, int hot, size_t bytes)
{
    if (row_count == MAX_ROWS)
        return;
    row *r = &rows[row_count++];
    (void)snprintf(r->name, sizeof r->name, "%s%s", operations[op].name, hot ? ", hot" : "");
    r->isa = isa;
    r->dtype = operations[op].dtype;
    r->ops = ops;
    r->run = operations[op].run;
    r->hot = hot;
    r->bytes = bytes;
}

static uint64_t seed = 1;

static int fill(buffers *b, size_t bytes)
{
    void *v[7] = {0};
    size_t want[7] = {bytes, bytes, bytes, bytes / 16, bytes / 16, bytes / 8, 2 * bytes};
    for (int i = 0; i < 7; i++) {
        if (qc_malloc_aligned(&v[i], 4096, want[i], NULL) != QC_OK)
            return 1;
        memset(v[i], 0, want[i]);
    }
    float *a = v[1];
    bench_fill_bf16(v[0], bytes / 2, &seed);
    for (size_t i = 0; i < bytes / 4; i++)
        a[i] = 0.03f + 0.02f * (float)(qc_random_next(&seed) >> 40) * 0x1p-24f;
    *b = (buffers){v[0], v[1], bytes, v[2], v[3], v[4], v[5], v[6]};
    return 0;
}

static qc_status write_json(const char *path, int runs, size_t mib, qc_error *err)
{
    qc_strbuf out;
    qc_json_writer w;
    char cpu[256] = "?", line[512];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f)) {
        if (strncmp(line, "model name", 10) == 0 && strchr(line, ':')) {
            line[strcspn(line, "\n")] = '\0';
            (void)snprintf(cpu, sizeof cpu, "%.255s", strchr(line, ':') + 2);
            break;
        }
    }
    if (f)
        (void)fclose(f);
    qc_strbuf_init(&out, 1u << 20);
    qc_json_write_init(&w, &out, err);
    qc_json_begin_object(&w, NULL);
    qc_json_put_text(&w, "bench", "quant");
    qc_json_put_text(&w, "cpu", cpu);
    qc_json_put_text(&w, "compiler", __VERSION__);
    (void)snprintf(line, sizeof line, "build/bench_quant --mib %zu --runs %d --json FILE", mib,
                   runs);
    qc_json_put_text(&w, "command", line);
    qc_json_begin_list(&w, "rows");
    for (int i = 0; i < row_count; i++) {
        const row *r = &rows[i];
        qc_json_begin_row(&w, NULL);
        qc_json_put_text(&w, "name", r->name);
        qc_json_put_text(&w, "isa", r->isa);
        qc_json_put_text(&w, "dtype", r->dtype);
        qc_json_begin_object(&w, "gbps");
        qc_json_put_double(&w, "median", bench_quantile(r->gbps, runs, 0.5));
        qc_json_put_double(&w, "p10", bench_quantile(r->gbps, runs, 0.1));
        qc_json_put_double(&w, "p90", bench_quantile(r->gbps, runs, 0.9));
        qc_json_end(&w);
        qc_json_put_double(&w, "roof_ratio", bench_quantile(r->ratio, runs, 0.5));
        qc_json_end(&w);
    }
    qc_json_end(&w);
    qc_json_end(&w);
    return bench_json_save(&w, &out, path, err);
}

int main(int argc, char **argv)
{
    size_t mib = 1024;
    int runs = 31;
    const char *json = NULL, *isas = "scalar,avx2";
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--json") == 0)
            json = argv[i + 1];
        else if (strcmp(argv[i], "--mib") == 0)
            mib = strtoul(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--runs") == 0)
            runs = (int)strtol(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--isa") == 0)
            isas = argv[i + 1];
    }
    if (argc % 2 == 0 || mib < 32 || mib > 65536 || runs < 1 || runs > BENCH_MAX_RUNS) {
        fprintf(stderr,
                "usage: bench_quant [--json FILE] [--mib 32..65536] [--runs 1..%d] "
                "[--isa scalar,avx2]\n",
                BENCH_MAX_RUNS);
        return 2;
    }
    buffers b;
    if (fill(&b, mib << 20)) {
        fprintf(stderr, "bench_quant: out of memory\n");
        return 1;
    }
    for (int op = 0; op < (int)(sizeof operations / sizeof *operations); op++) {
        if (!operations[op].per_isa)
            add_row(op, qc_quant_ops_for(QC_ISA_SCALAR), "", 0, b.bytes);
        for (int i = QC_ISA_COUNT - 1; i >= 0 && operations[op].per_isa; i--) {
            const char *name = qc_isa_name((qc_isa)i);
            if (!strstr(isas, name) || !qc_isa_available((qc_isa)i) ||
                qc_quant_ops_for((qc_isa)i)->isa != (qc_isa)i)
                continue;
            size_t bytes = i == QC_ISA_SCALAR ? b.bytes / 32 : b.bytes;
            for (int hot = 0; hot <= operations[op].hot_too; hot++)
                add_row(op, qc_quant_ops_for((qc_isa)i), name, hot, bytes);
        }
    }
    for (int n = -1; n < runs; n++) { /* round -1 warms up */
        for (int i = 0; i < row_count; i++) {
            row *r = &rows[i];
            uint64_t begin = qc_clock_ns();
            r->run(r->ops, &b, r->bytes, r->hot);
            double seconds = (double)(qc_clock_ns() - begin) * 1e-9;
            if (n < 0)
                continue;
            r->gbps[n] = (double)r->bytes / seconds * 1e-9;
        }
        if (n < 0)
            continue;
        double roof = rows[0].gbps[n] > rows[1].gbps[n] ? rows[0].gbps[n] : rows[1].gbps[n];
        for (int i = 0; i < row_count; i++)
            rows[i].ratio[n] = rows[i].gbps[n] / roof;
    }
    printf("%-36s %-7s %-5s %8s %8s %8s %8s\n", "", "", "", "GB/s", "p10", "p90", "of roof");
    for (int i = 0; i < row_count; i++)
        printf("%-36s %-7s %-5s %8.2f %8.2f %8.2f %7.0f%%\n", rows[i].name, rows[i].isa,
               rows[i].dtype, bench_quantile(rows[i].gbps, runs, 0.5),
               bench_quantile(rows[i].gbps, runs, 0.1), bench_quantile(rows[i].gbps, runs, 0.9),
               100 * bench_quantile(rows[i].ratio, runs, 0.5));
    if (json) {
        qc_error err = {0};
        if (write_json(json, runs, mib, &err) != QC_OK) {
            fprintf(stderr, "bench_quant: %s\n", err.msg);
            return 1;
        }
    }
    return 0;
}

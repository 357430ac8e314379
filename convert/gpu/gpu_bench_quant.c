/* The quantizing and dequantizing kernels: how many bytes a second they read and write, compared
 * with a copy. Each result is first compared with the CPU's, bit for bit. */
#include "base/alloc.h"
#include "convert/gpu/gpu_bench_internal.h"
#include "kernels/cuda_quantize.h"

#include <stdio.h>
#include <string.h>

#define COLS    8192u
#define POOL    ((uint64_t)16777259) /* a prime */
#define CHECKED ((uint64_t)1 << 20)  /* elements that are compared */

typedef struct step step;

/* One weight in every form on the device. */
typedef struct {
    qc_bench_gpu *b;
    qc_bench_pool pool;
    uint64_t rows, n, blocks, runs;
    uint64_t checked; /* elements that are compared: whole rows */
    void *source;     /* [n] BF16; also what is dequantized to */
    unsigned char *codes;
    float *absmax, *errors;
    uint8_t *scale_codes;
    float *nested;
    float offset;
    qc_dtype out;     /* the dtype of dequantizing */
    const step *step; /* the one that is being measured */
} work;

struct step {
    const char *name;
    uint64_t (*bytes)(const work *w);
    qc_bench_launch launch;
    /* Called after one launch. */
    qc_status (*check)(work *w, int *same, qc_error *err);
    qc_dtype out;
    int back; /* 1: it reads codes and writes the source */
};

/* ---- launches ---- */

static qc_cuda_blocks blocks_of(const work *w, int errors)
{
    return (qc_cuda_blocks){.src = w->source,
                            .dtype = QC_DTYPE_BF16,
                            .n = w->n,
                            .block_elems = QC_BENCH_BLOCK,
                            .codes = w->codes,
                            .absmax = w->absmax,
                            .errors = errors ? w->errors : NULL,
                            .bad = w->b->bad};
}

static qc_status nf4(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    qc_cuda_blocks a = blocks_of(ctx, 0);
    (void)copy;
    return qc_cuda_nf4_quantize(&a, s, err);
}

static qc_status nf4_errors(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    qc_cuda_blocks a = blocks_of(ctx, 1);
    (void)copy;
    return qc_cuda_nf4_quantize(&a, s, err);
}

static qc_status int8_blocks_errors(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    qc_cuda_blocks a = blocks_of(ctx, 1);
    (void)copy;
    return qc_cuda_int8_blocks_quantize(&a, s, err);
}

static qc_status int8_rows(void *ctx, int errors, qc_cuda_stream s, qc_error *err)
{
    const work *w = ctx;
    qc_cuda_rows a = {.src = w->source,
                      .dtype = QC_DTYPE_BF16,
                      .rows = w->rows,
                      .cols = COLS,
                      .codes = (int8_t *)w->codes,
                      .scb = w->absmax,
                      .errors = errors ? w->errors : NULL,
                      .bad = w->b->bad};
    return qc_cuda_int8_rows_quantize(&a, s, err);
}

static qc_status int8_rows_alone(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    (void)copy;
    return int8_rows(ctx, 0, s, err);
}

static qc_status int8_rows_errors(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    (void)copy;
    return int8_rows(ctx, 1, s, err);
}

static qc_status dequantize(const work *w, qc_weights_kind kind, qc_cuda_stream s, qc_error *err)
{
    qc_weights q = {.kind = kind, .rows = w->rows, .cols = COLS, .codes = w->codes};
    if (kind == QC_WEIGHTS_INT8_ROWS) {
        q.absmax = w->absmax;
    } else {
        q.block_elems = QC_BENCH_BLOCK;
        q.absmax_codes = w->scale_codes;
        q.nested_absmax = w->nested;
        q.nested_map = w->b->map;
        q.nested_block = QC_NESTED_BLOCK;
        q.nested_offset = w->offset;
    }
    return qc_cuda_dequantize(&q, 0, w->rows, w->source, w->out, COLS, NULL, NULL, s, err);
}

static qc_status nf4_back(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    (void)copy;
    return dequantize(ctx, QC_WEIGHTS_NF4, s, err);
}

static qc_status int8_rows_back(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    (void)copy;
    return dequantize(ctx, QC_WEIGHTS_INT8_ROWS, s, err);
}

/* ---- bytes that move ---- */

static uint64_t nf4_bytes(const work *w)
{
    return 2 * w->n + w->n / 2 + 4 * w->blocks;
}

static uint64_t nf4_errors_bytes(const work *w)
{
    return nf4_bytes(w) + 16 * w->blocks;
}

static uint64_t int8_blocks_errors_bytes(const work *w)
{
    return 2 * w->n + w->n + 4 * w->blocks + 16 * w->blocks;
}

static uint64_t int8_rows_bytes(const work *w)
{
    return 2 * w->n + w->n + 4 * w->rows;
}

static uint64_t int8_rows_errors_bytes(const work *w)
{
    return int8_rows_bytes(w) + 16 * w->runs;
}

static uint64_t nf4_back_bytes(const work *w)
{
    return 2 * w->n + w->n / 2 + w->blocks + 4 * ((w->blocks + 255) / 256);
}

/* ---- checks ---- */

/* Sets *same to 0 if the first `bytes` on the device are not those on the host. */
static qc_status compare(work *w, const void *device, const void *host, uint64_t bytes, int *same,
                         qc_error *err)
{
    void *mine;
    QC_TRY(qc_calloc(&mine, 1, (size_t)bytes, err));
    qc_status st = qc_bench_download(w->b, mine, device, bytes, err);
    if (st == QC_OK && memcmp(mine, host, (size_t)bytes) != 0)
        *same = 0;
    qc_free(mine);
    return st;
}

/* Codes and scales that the CPU makes. */
typedef struct {
    void *codes;
    float *absmax;
} truth;

static qc_status truth_make(truth *t, const work *w, qc_error *err)
{
    void *memory;
    *t = (truth){0};
    QC_TRY(qc_calloc(&t->codes, 1, (size_t)w->checked, err));
    QC_TRY(qc_calloc(&memory, (size_t)(w->checked / QC_BENCH_BLOCK), sizeof(float), err));
    t->absmax = memory;
    return QC_OK;
}

static qc_status check_blocks(work *w, int is_nf4, int *same, qc_error *err)
{
    truth t;
    qc_piece_sums sums;
    qc_status st = truth_make(&t, w, err);
    if (st == QC_OK) {
        if (is_nf4)
            w->b->ops->nf4_quantize(w->pool.host, QC_DTYPE_BF16, w->checked, QC_BENCH_BLOCK,
                                    t.codes, t.absmax, NULL, &sums);
        else
            w->b->ops->int8_blocks_quantize(w->pool.host, QC_DTYPE_BF16, w->checked, QC_BENCH_BLOCK,
                                            t.codes, t.absmax, NULL, &sums);
        st = compare(w, w->codes, t.codes, is_nf4 ? w->checked / 2 : w->checked, same, err);
    }
    if (st == QC_OK)
        st = compare(w, w->absmax, t.absmax, 4 * (w->checked / QC_BENCH_BLOCK), same, err);
    qc_free(t.codes);
    qc_free(t.absmax);
    return st;
}

static qc_status check_nf4(work *w, int *same, qc_error *err)
{
    return check_blocks(w, 1, same, err);
}

static qc_status check_int8_blocks(work *w, int *same, qc_error *err)
{
    return check_blocks(w, 0, same, err);
}

static qc_status check_int8_rows(work *w, int *same, qc_error *err)
{
    truth t;
    qc_piece_sums sums;
    uint64_t rows = w->checked / COLS;
    qc_status st = truth_make(&t, w, err);
    if (st == QC_OK) {
        w->b->ops->int8_rows_quantize(w->pool.host, QC_DTYPE_BF16, rows, COLS, t.codes, t.absmax,
                                      &sums);
        st = compare(w, w->codes, t.codes, w->checked, same, err);
    }
    if (st == QC_OK)
        st = compare(w, w->absmax, t.absmax, 4 * rows, same, err);
    qc_free(t.codes);
    qc_free(t.absmax);
    return st;
}

/* Compares with what the CPU dequantizes from the codes and scales on the device. */
static qc_status check_back(work *w, qc_weights_kind kind, int *same, qc_error *err)
{
    truth t;
    void *out = NULL, *scale_codes = NULL, *nested = NULL;
    uint64_t blocks = w->checked / QC_BENCH_BLOCK, groups = (blocks + 255) / 256, overflow;
    int is_nf4 = kind == QC_WEIGHTS_NF4;
    qc_status st = truth_make(&t, w, err);
    if (st == QC_OK)
        st = qc_calloc(&out, 2, (size_t)w->checked, err);
    if (st == QC_OK)
        st = qc_calloc(&scale_codes, 1, (size_t)blocks, err);
    if (st == QC_OK)
        st = qc_calloc(&nested, (size_t)groups, sizeof(float), err);
    if (st == QC_OK)
        st = qc_bench_download(w->b, t.codes, w->codes, is_nf4 ? w->checked / 2 : w->checked, err);
    if (st == QC_OK && is_nf4) {
        st = qc_bench_download(w->b, scale_codes, w->scale_codes, blocks, err);
        if (st == QC_OK)
            st = qc_bench_download(w->b, nested, w->nested, 4 * groups, err);
        if (st == QC_OK) {
            w->b->ops->nested_dequantize(scale_codes, nested, qc_dynamic_map, blocks,
                                         QC_NESTED_BLOCK, w->offset, t.absmax);
            w->b->ops->nf4_dequantize(t.codes, t.absmax, qc_nf4_code, w->checked, QC_BENCH_BLOCK,
                                      out, w->out, &overflow);
        }
    } else if (st == QC_OK) {
        st = qc_bench_download(w->b, t.absmax, w->absmax, 4 * (w->checked / COLS), err);
        if (st == QC_OK)
            w->b->ops->int8_rows_dequantize(t.codes, t.absmax, w->checked / COLS, COLS, out, w->out,
                                            &overflow);
    }
    if (st == QC_OK)
        st = compare(w, w->source, out, 2 * w->checked, same, err);
    qc_free(t.codes);
    qc_free(t.absmax);
    qc_free(out);
    qc_free(scale_codes);
    qc_free(nested);
    return st;
}

static qc_status check_nf4_back(work *w, int *same, qc_error *err)
{
    return check_back(w, QC_WEIGHTS_NF4, same, err);
}

static qc_status check_int8_rows_back(work *w, int *same, qc_error *err)
{
    return check_back(w, QC_WEIGHTS_INT8_ROWS, same, err);
}

/* ---- all of them ---- */

/* Each step leaves what the next one needs. The quantizers read the source; the dequantizers read
 * the codes that the last quantizer of their kind left, and overwrite the source. */
static const step quantizing[] = {
    {"int8 blocks from bf16, with error terms", int8_blocks_errors_bytes, int8_blocks_errors,
     check_int8_blocks, QC_DTYPE_BF16, 0},
    {"nf4 from bf16", nf4_bytes, nf4, check_nf4, QC_DTYPE_BF16, 0},
    {"nf4 from bf16, with error terms", nf4_errors_bytes, nf4_errors, check_nf4, QC_DTYPE_BF16, 0},
};
static const step nf4_to[] = {
    {"nf4 to fp16", nf4_back_bytes, nf4_back, check_nf4_back, QC_DTYPE_F16, 1},
    {"nf4 to bf16", nf4_back_bytes, nf4_back, check_nf4_back, QC_DTYPE_BF16, 1},
};
static const step rows_from[] = {
    {"int8 rows from bf16", int8_rows_bytes, int8_rows_alone, check_int8_rows, QC_DTYPE_BF16, 0},
    {"int8 rows from bf16, with error terms", int8_rows_errors_bytes, int8_rows_errors,
     check_int8_rows, QC_DTYPE_BF16, 0},
};
static const step rows_to[] = {
    {"int8 rows to fp16", int8_rows_bytes, int8_rows_back, check_int8_rows_back, QC_DTYPE_F16, 1},
};

/* Overwrites the result, so that what an earlier kernel left is not taken for this one's. */
static qc_status spoil(void *ctx, qc_error *err)
{
    const work *w = ctx;
    if (w->step->back)
        return qc_cuda_fill(w->source, 0xa5, (size_t)(2 * w->n), w->b->stream, err);
    QC_TRY(qc_cuda_fill(w->codes, 0xa5, (size_t)w->n, w->b->stream, err));
    return qc_cuda_fill(w->absmax, 0xa5, (size_t)(4 * w->blocks), w->b->stream, err);
}

static qc_status look(void *ctx, qc_error *err)
{
    work *w = ctx;
    int same = 1;
    QC_TRY(w->step->check(w, &same, err));
    if (!same)
        QC_FAIL(err, QC_ERR_CHECK, "it does not give the CPU's bytes on %s, so it has no times",
                w->b->device.name);
    return QC_OK;
}

static qc_status run_one(work *w, const step *s, qc_error *err)
{
    qc_bench_spread us;
    w->step = s;
    w->out = s->out;
    QC_TRY(spoil(w, err));
    QC_TRY(s->launch(w, 0, w->b->stream, err));
    QC_TRY(look(w, err));
    QC_TRY(
        qc_bench_alone(w->b,
                       (qc_bench_contender){
                           .launch = s->launch, .ctx = w, .least = 4, .spoil = spoil, .look = look},
                       &us, err));
    qc_bench_kernel *k = &w->b->r->kernels[w->b->r->kernel_count++];
    (void)snprintf(k->name, sizeof k->name, "%s", s->name);
    k->rows = w->rows;
    k->cols = COLS;
    k->bytes = s->bytes(w);
    k->gbps = qc_bench_spread_rate(us, (double)k->bytes / 1e3);
    return QC_OK;
}

static qc_status run(work *w, const step *s, uint32_t count, qc_error *err)
{
    for (uint32_t i = 0; i < count; i++) {
        qc_error why = {0};
        if (run_one(w, &s[i], &why) == QC_OK) {
            qc_bench_save(w->b);
            continue;
        }
        qc_error_prefix(&why, "the kernel '%s'", s[i].name);
        QC_TRY(qc_bench_failed(
            w->b, (qc_bench_failure){.shape = QC_BENCH_NO_SHAPE, .scheme = QC_BENCH_SCHEME_COUNT},
            &why, err));
    }
    return QC_OK;
}

static qc_status fill_source(work *w, qc_error *err)
{
    return qc_bench_pool_fill(w->b, &w->pool, w->source, w->n, 0, err);
}

/* Double quantizes the scales that nf4_quantize left. */
static qc_status nest(work *w, qc_error *err)
{
    void *host;
    QC_TRY(qc_calloc(&host, (size_t)w->blocks, sizeof(float), err));
    qc_status st = qc_bench_download(w->b, host, w->absmax, 4 * w->blocks, err);
    if (st == QC_OK) {
        w->offset = qc_nested_offset(host, w->blocks);
        st = qc_cuda_nested_quantize(w->absmax, w->blocks, w->offset, w->scale_codes, w->nested,
                                     w->b->stream, err);
    }
    qc_free(host);
    return st;
}

static qc_status run_all(work *w, qc_error *err)
{
#define RUN(steps) QC_TRY(run(w, steps, sizeof steps / sizeof *steps, err))
    QC_TRY(fill_source(w, err));
    RUN(quantizing);
    QC_TRY(nest(w, err));
    RUN(nf4_to);
    QC_TRY(fill_source(w, err));
    RUN(rows_from);
    RUN(rows_to);
#undef RUN
    return QC_OK;
}

static qc_status allocate(work *w, qc_error *err)
{
    void *p;
    QC_TRY(qc_cuda_malloc(&w->source, (size_t)(2 * w->n), err));
    QC_TRY(qc_cuda_malloc(&p, (size_t)w->n, err));
    w->codes = p;
    QC_TRY(qc_cuda_malloc(&p, (size_t)(4 * w->blocks), err));
    w->absmax = p;
    QC_TRY(qc_cuda_malloc(&p, (size_t)(16 * (w->blocks > w->runs ? w->blocks : w->runs)), err));
    w->errors = p;
    QC_TRY(qc_cuda_malloc(&p, (size_t)w->blocks, err));
    w->scale_codes = p;
    QC_TRY(qc_cuda_malloc(&p, (size_t)(4 * ((w->blocks + 255) / 256)), err));
    w->nested = p;
    return QC_OK;
}

qc_status qc_bench_kernels(qc_bench_gpu *b, qc_error *err)
{
    work w = {.b = b};
    w.rows = b->r->roof.copy_bytes / 2 / (2 * COLS);
    if (w.rows == 0)
        w.rows = 1;
    w.n = w.rows * COLS;
    w.blocks = w.n / QC_BENCH_BLOCK;
    w.runs = w.rows * (COLS / QC_CUDA_ROW_RUN);
    w.checked = w.n < CHECKED ? w.n : CHECKED;
    qc_status st =
        qc_bench_pool_make(b, &w.pool, w.n < POOL ? w.n : POOL, 0.02, QC_DTYPE_BF16, err);
    if (st == QC_OK)
        st = allocate(&w, err);
    if (st == QC_OK)
        st = run_all(&w, err);
    void *parts[] = {w.source, w.codes, w.absmax, w.errors, w.scale_codes, w.nested};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        qc_cuda_free(parts[i]);
    qc_bench_pool_free(&w.pool);
    return st;
}

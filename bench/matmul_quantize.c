/* The quantizing and dequantizing kernels: how many bytes a second they read and write, compared
 * with a copy. Each result is first compared with the CPU's, bit for bit. */
#include "bench/matmul_bench.h"

#include "base/alloc.h"
#include "kernels/cuda_quantize.h"

#include <string.h>

#define COLS    8192u
#define POOL    ((uint64_t)16777259) /* a prime */
#define CHECKED ((uint64_t)1 << 20)  /* elements that are compared */

typedef struct step step;

/* One weight in every form on the device. */
typedef struct {
    mb_bench *b;
    qc_gpu_noise pool;
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
    const qc_form_ops *ops;
    int errors; /* it leaves error terms */
    qc_dtype out;
    int back; /* 1: it reads codes and writes the source */
};

static uint64_t groups_of(uint64_t blocks)
{
    return (blocks + QC_NESTED_BLOCK - 1) / QC_NESTED_BLOCK;
}

static qc_form form_of(const work *w)
{
    int rows = w->step->ops == &qc_form_int8_rows;
    return (qc_form){.ops = w->step->ops, .cols = COLS, .block_elems = rows ? 0 : MB_BLOCK};
}

/* ---- launches ---- */

static qc_status dequantize(const work *w, qc_cuda_stream s, qc_error *err)
{
    qc_weights q = {.form = form_of(w), .rows = w->rows, .codes = w->codes};
    if (qc_form_by_rows(&q.form)) {
        q.absmax = w->absmax;
    } else {
        q.absmax_codes = w->scale_codes;
        q.nested_absmax = w->nested;
        q.nested_map = w->b->map;
        q.nested_block = QC_NESTED_BLOCK;
        q.form.offset = w->offset;
    }
    return qc_cuda_dequantize(&q, 0, w->rows, w->source, w->out, COLS, NULL, NULL, s, err);
}

static qc_status launch(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const work *w = ctx;
    const qc_cuda_quantize_job a = {.src = w->source,
                                    .dtype = QC_DTYPE_BF16,
                                    .n = w->n,
                                    .form = form_of(w),
                                    .codes = w->codes,
                                    .absmax = w->absmax,
                                    .sums = w->step->errors ? w->errors : NULL,
                                    .bad = w->b->bad};
    (void)copy;
    return w->step->back ? dequantize(w, s, err) : qc_cuda_quantize(&a, s, err);
}

/* Returns the bytes that a launch reads and writes. */
static uint64_t bytes_of(const work *w)
{
    const qc_form form = form_of(w);
    int rows = qc_form_by_rows(&form);
    uint64_t scales = 4 * qc_form_scales(&form, w->n);
    if (w->step->back && !rows)
        scales = w->blocks + 4 * groups_of(w->blocks);
    uint64_t errors = w->step->errors ? 16 * (rows ? w->runs : w->blocks) : 0;
    return 2 * w->n + qc_form_code_bytes(&form, w->n) + scales + errors;
}

/* ---- checks ---- */

/* Sets *same to 0 if the first `bytes` on the device are not those on the host. */
static qc_status compare(work *w, const void *device, const void *host, uint64_t bytes, int *same,
                         qc_error *err)
{
    void *mine;
    QC_TRY(qc_calloc(&mine, 1, (size_t)bytes, err));
    qc_status st = mb_download(w->b, mine, device, bytes, err);
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
    *t = (truth){0};
    QC_TRY(qc_calloc(&t->codes, 1, (size_t)w->checked, err));
    QC_TRY(qc_calloc(&t->absmax, (size_t)(w->checked / MB_BLOCK), sizeof(float), err));
    return QC_OK;
}

/* Compares with what the CPU makes of the source. */
static qc_status check_quantized(work *w, truth *t, int *same, qc_error *err)
{
    const qc_form form = form_of(w);
    const qc_form_out out = {.codes = t->codes, .absmax = t->absmax};
    qc_piece_sums sums;
    form.ops->quantize(w->b->ops, &form, w->pool.host, QC_DTYPE_BF16, w->checked, &out, &sums);
    QC_TRY(compare(w, w->codes, t->codes, qc_form_code_bytes(&form, w->checked), same, err));
    return compare(w, w->absmax, t->absmax, 4 * qc_form_scales(&form, w->checked), same, err);
}

/* Brings the scales of the device to t->absmax. */
static qc_status fetch_scales(work *w, truth *t, const qc_form *form, qc_error *err)
{
    uint64_t blocks = w->checked / MB_BLOCK, groups = groups_of(blocks);
    uint8_t *codes = NULL;
    float *nested = NULL;
    if (qc_form_by_rows(form))
        return mb_download(w->b, t->absmax, w->absmax, 4 * (w->checked / COLS), err);
    qc_status st = qc_malloc(&codes, (size_t)blocks, err);
    if (st == QC_OK)
        st = qc_calloc(&nested, (size_t)groups, sizeof *nested, err);
    if (st == QC_OK)
        st = mb_download(w->b, codes, w->scale_codes, blocks, err);
    if (st == QC_OK)
        st = mb_download(w->b, nested, w->nested, 4 * groups, err);
    if (st == QC_OK)
        w->b->ops->nested_dequantize(codes, nested, qc_dynamic_map, blocks, QC_NESTED_BLOCK,
                                     w->offset, t->absmax);
    qc_free(codes);
    qc_free(nested);
    return st;
}

/* Compares with what the CPU dequantizes from the codes and scales on the device. */
static qc_status check_back(work *w, truth *t, int *same, qc_error *err)
{
    const qc_form form = form_of(w);
    uint64_t overflow;
    void *out = NULL;
    QC_TRY(mb_download(w->b, t->codes, w->codes, qc_form_code_bytes(&form, w->checked), err));
    QC_TRY(fetch_scales(w, t, &form, err));
    QC_TRY(qc_calloc(&out, 2, (size_t)w->checked, err));
    form.ops->dequantize(w->b->ops, &form, t->codes, t->absmax, w->checked, out, w->out, &overflow);
    qc_status st = compare(w, w->source, out, 2 * w->checked, same, err);
    qc_free(out);
    return st;
}

/* ---- all of them ---- */

/* Each step leaves what the next one needs. The quantizers read the source; the dequantizers read
 * the codes that the last quantizer of their kind left, and overwrite the source. */
static const step quantizing[] = {
    {"int8 blocks from bf16, with error terms", &qc_form_int8_blocks, 1, QC_DTYPE_BF16, 0},
    {"nf4 from bf16", &qc_form_nf4, 0, QC_DTYPE_BF16, 0},
    {"nf4 from bf16, with error terms", &qc_form_nf4, 1, QC_DTYPE_BF16, 0},
};
static const step nf4_to[] = {
    {"nf4 to fp16", &qc_form_nf4, 0, QC_DTYPE_F16, 1},
    {"nf4 to bf16", &qc_form_nf4, 0, QC_DTYPE_BF16, 1},
};
static const step rows_from[] = {
    {"int8 rows from bf16", &qc_form_int8_rows, 0, QC_DTYPE_BF16, 0},
    {"int8 rows from bf16, with error terms", &qc_form_int8_rows, 1, QC_DTYPE_BF16, 0},
};
static const step rows_to[] = {
    {"int8 rows to fp16", &qc_form_int8_rows, 0, QC_DTYPE_F16, 1},
};

/* Overwrites the result, so that what an earlier kernel left is not taken for this one's. */
static qc_status spoil(void *ctx, qc_error *err)
{
    const work *w = ctx;
    if (w->step->back)
        return qc_cuda_fill(w->source, 0xa5, (size_t)(2 * w->n), w->b->t.stream, err);
    QC_TRY(qc_cuda_fill(w->codes, 0xa5, (size_t)w->n, w->b->t.stream, err));
    return qc_cuda_fill(w->absmax, 0xa5, (size_t)(4 * w->blocks), w->b->t.stream, err);
}

static qc_status look(void *ctx, qc_error *err)
{
    work *w = ctx;
    truth t;
    int same = 1;
    qc_status st = truth_make(&t, w, err);
    if (st == QC_OK)
        st = w->step->back ? check_back(w, &t, &same, err) : check_quantized(w, &t, &same, err);
    qc_free(t.codes);
    qc_free(t.absmax);
    QC_TRY(st);
    if (!same)
        QC_FAIL(err, QC_ERR_CHECK, "its bytes on %s are not those of the CPU, so it has no times",
                w->b->t.device.name);
    return QC_OK;
}

static qc_status run_one(work *w, const step *s, qc_error *err)
{
    qc_spread us;
    w->step = s;
    w->out = s->out;
    QC_TRY(spoil(w, err));
    QC_TRY(launch(w, 0, w->b->t.stream, err));
    QC_TRY(look(w, err));
    const qc_timed timed = {.launch = launch, .ctx = w, .least = 4, .spoil = spoil, .look = look};
    QC_TRY(qc_timed_alone(&w->b->t, timed, w->b->rounds, w->b->seconds / 50, &us, err));
    w->b->quantizers[w->b->quantizer_count++] = (mb_quantizer){
        s->name, w->rows, COLS, bytes_of(w), qc_spread_rate(us, (double)bytes_of(w) / 1e3)};
    return QC_OK;
}

static qc_status run(work *w, const step *s, uint32_t count, qc_error *err)
{
    for (uint32_t i = 0; i < count; i++) {
        qc_error why = {0};
        if (run_one(w, &s[i], &why) != QC_OK) {
            qc_error_prefix(&why, "the kernel '%s'", s[i].name);
            QC_TRY(mb_failed(w->b, (mb_failure){0}, &why, err));
        }
        QC_TRY(mb_save(w->b, err));
    }
    return QC_OK;
}

static qc_status run_all(work *w, qc_error *err)
{
#define RUN(steps) QC_TRY(run(w, steps, sizeof steps / sizeof *steps, err))
    QC_TRY(qc_gpu_noise_fill(&w->pool, w->source, w->n, 0, w->b->t.stream, err));
    RUN(quantizing);
    /* of the scales that nf4_quantize left */
    QC_TRY(mb_nest(w->b, w->absmax, w->blocks, w->scale_codes, w->nested, &w->offset, err));
    RUN(nf4_to);
    QC_TRY(qc_gpu_noise_fill(&w->pool, w->source, w->n, 0, w->b->t.stream, err));
    RUN(rows_from);
    RUN(rows_to);
#undef RUN
    return QC_OK;
}

static qc_status allocate(work *w, qc_error *err)
{
    QC_TRY(qc_cuda_malloc(&w->source, (size_t)(2 * w->n), err));
    QC_TRY(qc_cuda_malloc(&w->codes, (size_t)w->n, err));
    QC_TRY(qc_cuda_malloc(&w->absmax, (size_t)(4 * w->blocks), err));
    QC_TRY(qc_cuda_malloc(&w->errors, (size_t)(16 * (w->blocks > w->runs ? w->blocks : w->runs)),
                          err));
    QC_TRY(qc_cuda_malloc(&w->scale_codes, (size_t)w->blocks, err));
    QC_TRY(qc_cuda_malloc(&w->nested, (size_t)(4 * groups_of(w->blocks)), err));
    return QC_OK;
}

qc_status mb_quantizers_measure(mb_bench *b, qc_error *err)
{
    work w = {.b = b};
    w.rows = b->roof.copy_bytes / 2 / (2 * COLS);
    if (w.rows == 0)
        w.rows = 1;
    w.n = w.rows * COLS;
    w.blocks = w.n / MB_BLOCK;
    w.runs = w.rows * (COLS / QC_CUDA_ROW_RUN);
    w.checked = w.n < CHECKED ? w.n : CHECKED;
    qc_status st = qc_gpu_noise_make(&w.pool, w.n < POOL ? w.n : POOL, 0.02, QC_DTYPE_BF16, 1,
                                     b->t.stream, err);
    if (st == QC_OK)
        st = allocate(&w, err);
    if (st == QC_OK)
        st = run_all(&w, err);
    void *parts[] = {w.source, w.codes, w.absmax, w.errors, w.scale_codes, w.nested};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        qc_cuda_free(parts[i]);
    qc_gpu_noise_free(&w.pool);
    return st;
}

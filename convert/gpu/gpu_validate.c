/* Compares one layer with its original on a GPU; the interface is validate_compare.h. It finds what
 * the quantized matmul gives, what cuBLAS gives with the original weights and what sums in double
 * give, and how long the first two take.
 *
 * A layer needs device memory for the original in 16 bit, for the quantized weight and what is made
 * ready of it, for x, Y and Z, for sums in double of a few rows, and for the workspace. When times
 * are taken, both weights are there as often as memory allows, so that the L2 cache never helps. */
#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "convert/gpu/gpu_table.h"
#include "convert/gpu/gpu_timing.h"
#include "quant/quant_half.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define EDGE_ROWS     32u /* as many first rows and as many last rows of the results are looked at */
#define ROUNDS        5u  /* of the two contenders, at most */
#define POINT_SECONDS 1.0                 /* for the rounds of one batch size */
#define ROOF_SECONDS  0.2                 /* at most, for each part of what the device can do */
#define LEAST         10u                 /* launches in a graph */
#define USABLE        0.9                 /* share of the free memory */
#define GEMM_LEAST    ((uint64_t)4 << 20) /* what a plan gives cuBLAS at least */
#define ALIGNMENT     256u
#define STAGE_BYTES   ((uint64_t)32 << 20)
#define MAX_BUFFERS   16u

struct qc_gpu_comparer {
    qc_timer gpu;
    qc_gpu_roof roof;
};

typedef struct {
    qc_gpu_comparer *c;
    const qc_gpu_comparison *in;
    uint64_t n, k, most; /* most: the largest m */
    void *buffers[MAX_BUFFERS];
    unsigned buffer_count;

    unsigned char *dense; /* dense_copies of the weight */
    uint64_t dense_bytes; /* one copy's, aligned */
    uint32_t dense_copies;
    uint64_t raw_bytes, prepared_bytes; /* one quantized weight's, aligned */
    uint64_t workspace_limit;
    uint32_t copies;
    qc_matmul_weights *weights; /* host, [copies] */
    qc_weights stored;          /* the first copy, not repacked, in device memory */
    void *x, *y, *z, *workspace;
    double *sums; /* [EDGE_ROWS, N] */
    uint64_t workspace_bytes;
    void *stage; /* pinned: rows on their way to the device */
    uint64_t stage_rows;
    uint16_t *host_y, *host_z; /* [EDGE_ROWS, N] */
    double *host_sums;
} comparison;

/* ---- the device ----------------------------------------------------------------------------- */

static qc_status comparer_create(qc_gpu_comparer **out, const qc_cuda_device *device, qc_error *err)
{
    QC_TRY(qc_calloc(out, 1, sizeof **out, err));
    QC_TRY(qc_timer_open(&(*out)->gpu, device->index, err));
    return qc_gpu_roof_measure(&(*out)->gpu, QC_DTYPE_F16, ROUNDS, ROOF_SECONDS, &(*out)->roof,
                               err);
}

static void comparer_destroy(qc_gpu_comparer *c)
{
    if (!c)
        return;
    /* Work that still runs uses memory that is about to be freed. Its errors were told before. */
    if (c->gpu.stream && qc_cuda_stream_synchronize(c->gpu.stream, NULL) != QC_OK)
        c->roof = (qc_gpu_roof){0};
    qc_timer_close(&c->gpu);
    qc_free(c);
}

static const char *comparer_no_gemm(const qc_gpu_comparer *c)
{
    return qc_matmul_no_gemm(c->gpu.handle);
}

/* ---- memory --------------------------------------------------------------------------------- */

static qc_status take_buffer(comparison *w, void *pointer, uint64_t bytes, qc_error *err)
{
    size_t size = 0;
    void **v = &w->buffers[w->buffer_count++];
    if (qc_u64_to_size(bytes, &size))
        QC_FAIL(err, QC_ERR_NOMEM, "the layer is too large for any GPU's memory");
    QC_TRY(qc_cuda_malloc(v, size, err));
    memcpy(pointer, v, sizeof *v);
    return QC_OK;
}

/* Decides from the free memory how many copies of both weights there are. QC_ERR_NOMEM if there is
 * no room for even one. */
static qc_status plan_memory(comparison *w, int timed, qc_error *err)
{
    const qc_gpu_comparison *in = w->in;
    uint64_t free_bytes = 0, total = 0, weights = 0, quantized = 0;
    uint64_t l2 = w->c->gpu.device.l2_bytes;
    w->dense_bytes = qc_align_u64(qc_sat_mul(qc_sat_mul(w->n, w->k), sizeof(uint16_t)), ALIGNMENT);
    w->raw_bytes = qc_align_u64(in->codes_bytes, ALIGNMENT) +
                   qc_align_u64(in->scales_bytes, ALIGNMENT) +
                   qc_align_u64(in->nested_bytes, ALIGNMENT);
    qc_weights on_device = *in->w;
    on_device.codes = NULL; /* aligned, as those of the host need not be */
    w->prepared_bytes = qc_align_u64(qc_matmul_prepared_bytes(&on_device), ALIGNMENT);
    quantized = qc_sat_add(w->raw_bytes, w->prepared_bytes);
    weights = qc_sat_add(w->dense_bytes, quantized);
    uint64_t rows = qc_sat_mul(w->most, 2 * sizeof(uint16_t));
    uint64_t rest = qc_sat_mul(qc_sat_mul(in->rows, w->k), sizeof(uint16_t));
    rest = qc_sat_add(rest, qc_sat_mul(rows, w->n));
    rest = qc_sat_add(rest, qc_sat_mul(w->n, EDGE_ROWS * sizeof(double)));
    /* For the largest m the workspace holds dequantized rows. A part of them is enough. Integers
     * are always dequantized, and cuBLAS has room of its own in there, less where memory is
     * short. */
    QC_TRY(qc_cuda_memory(&free_bytes, &total, err));
    uint64_t room = (uint64_t)((double)free_bytes * USABLE), gemm = 0;
    rest = qc_sat_add(rest, w->dense_bytes);
    if (in->w->form.ops->integer)
        gemm = qc_sat_add(qc_sat_add(weights, rest), QC_MATMUL_DENSE_WORKSPACE) <= room
                   ? QC_MATMUL_DENSE_WORKSPACE
                   : GEMM_LEAST;
    rest = qc_sat_add(rest, gemm);
    w->workspace_limit = w->dense_bytes + gemm;
    if (qc_sat_add(weights, rest) > room)
        QC_FAIL(err, QC_ERR_NOMEM,
                "it needs %" PRIu64 " MB of GPU memory, but only %" PRIu64 " MB are free",
                qc_sat_add(weights, rest) / 1000000, room / 1000000);
    uint64_t spare = (room - weights - rest) / 2;
    w->copies = w->dense_copies = 1;
    if (timed) {
        w->dense_copies =
            qc_timing_copies(w->dense_bytes, w->dense_bytes, l2, w->dense_bytes + spare);
        w->copies = qc_timing_copies(w->raw_bytes, quantized, l2, quantized + spare);
    }
    return QC_OK;
}

static qc_status make_room(comparison *w, qc_error *err)
{
    uint64_t row = w->k * sizeof(uint16_t), y = w->most * w->n * sizeof(uint16_t);
    size_t edge = (size_t)(EDGE_ROWS * w->n);
    QC_TRY(take_buffer(w, &w->dense, qc_sat_mul(w->dense_bytes, w->dense_copies), err));
    QC_TRY(take_buffer(w, &w->x, qc_sat_mul(w->in->rows, row), err));
    QC_TRY(take_buffer(w, &w->y, y, err));
    QC_TRY(take_buffer(w, &w->z, y, err));
    QC_TRY(take_buffer(w, &w->sums, edge * sizeof(double), err));
    w->stage_rows = row < STAGE_BYTES ? STAGE_BYTES / row : 1;
    w->stage_rows = w->stage_rows < w->n ? w->stage_rows : w->n;
    QC_TRY(qc_cuda_host_malloc(&w->stage, (size_t)(w->stage_rows * row), err));
    QC_TRY(qc_calloc(&w->weights, w->copies, sizeof *w->weights, err));
    QC_TRY(qc_malloc(&w->host_y, edge * sizeof(uint16_t), err));
    QC_TRY(qc_malloc(&w->host_z, edge * sizeof(uint16_t), err));
    QC_TRY(qc_malloc(&w->host_sums, edge * sizeof(double), err));
    return QC_OK;
}

/* ---- weights -------------------------------------------------------------------------------- */

static qc_status upload_dense(comparison *w, qc_error *err)
{
    qc_cuda_stream s = w->c->gpu.stream;
    uint64_t row = w->k * sizeof(uint16_t);
    for (uint64_t first = 0; first < w->n; first += w->stage_rows) {
        uint64_t count = w->n - first < w->stage_rows ? w->n - first : w->stage_rows;
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(w->in->read(w->in->ctx, first, count, w->stage, err));
        QC_TRY(qc_cuda_to_device(w->dense + first * row, w->stage, (size_t)(count * row), s, err));
        QC_TRY(qc_cuda_stream_synchronize(s, err));
    }
    for (uint32_t i = 1; i < w->dense_copies; i++)
        QC_TRY(
            qc_cuda_copy(w->dense + i * w->dense_bytes, w->dense, (size_t)w->dense_bytes, s, err));
    return QC_OK;
}

static qc_status upload(comparison *w, unsigned char **at, const void *host, uint64_t bytes,
                        qc_error *err)
{
    QC_TRY(qc_cuda_to_device(*at, host, (size_t)bytes, w->c->gpu.stream, err));
    *at += qc_align_u64(bytes, ALIGNMENT);
    return QC_OK;
}

/* Uploads the arrays once. Each copy is these bytes once more, and is then made ready. */
static qc_status upload_quantized(comparison *w, qc_error *err)
{
    const qc_weights *q = w->in->w;
    qc_cuda_stream s = w->c->gpu.stream;
    uint64_t each = w->raw_bytes + w->prepared_bytes;
    unsigned char *memory = NULL, *maps = NULL;
    QC_TRY(take_buffer(w, &memory, qc_sat_mul(each, w->copies), err));
    QC_TRY(take_buffer(w, &maps, 2 * qc_align_u64(256 * sizeof(float), ALIGNMENT), err));
    if (q->form.code_map)
        QC_TRY(qc_cuda_to_device(maps, q->form.code_map, 16 * sizeof(float), s, err));
    if (q->nested_map)
        QC_TRY(qc_cuda_to_device(maps + qc_align_u64(256 * sizeof(float), ALIGNMENT), q->nested_map,
                                 256 * sizeof(float), s, err));
    for (uint32_t i = 0; i < w->copies; i++) {
        unsigned char *base = memory + i * each, *at = base;
        qc_weights d = *q;
        d.codes = at;
        if (i == 0) {
            QC_TRY(upload(w, &at, q->codes, w->in->codes_bytes, err));
            QC_TRY(upload(w, &at, q->absmax ? (const void *)q->absmax : q->absmax_codes,
                          w->in->scales_bytes, err));
            if (q->nested_absmax)
                QC_TRY(upload(w, &at, q->nested_absmax, w->in->nested_bytes, err));
        } else {
            QC_TRY(qc_cuda_copy(base, memory, (size_t)w->raw_bytes, s, err));
        }
        unsigned char *scales = base + qc_align_u64(w->in->codes_bytes, ALIGNMENT);
        d.absmax = q->absmax ? (const float *)(void *)scales : NULL;
        d.absmax_codes = q->absmax ? NULL : scales;
        if (q->nested_absmax)
            d.nested_absmax =
                (const float *)(void *)(scales + qc_align_u64(w->in->scales_bytes, ALIGNMENT));
        if (q->nested_map)
            d.nested_map =
                (const float *)(void *)(maps + qc_align_u64(256 * sizeof(float), ALIGNMENT));
        if (q->form.code_map)
            d.form.code_map = (const float *)(void *)maps;
        if (i == 0)
            w->stored = d;
        QC_TRY(
            qc_matmul_prepare(w->c->gpu.handle, &d, base + w->raw_bytes, &w->weights[i], s, err));
    }
    /* After this the caller may free its arrays. */
    QC_TRY(qc_cuda_stream_synchronize(s, err));
    for (uint32_t i = 0; i < w->copies; i++)
        w->weights[i].complete = QC_MATMUL_WEIGHTS_COMPLETE; /* nothing writes to them any more */
    return QC_OK;
}

static int has_gemm(const comparison *w)
{
    return !qc_matmul_no_gemm(w->c->gpu.handle);
}

/* ---- the two contenders --------------------------------------------------------------------- */

typedef struct {
    comparison *w;
    const qc_gpu_compared *q;
} launching;

/* Row `row` of x, of those that the question names. */
static const uint16_t *x_at(const comparison *w, const qc_gpu_compared *q, uint64_t row)
{
    return (const uint16_t *)w->x + (q->first + row) * w->k;
}

static qc_matmul_io io_of(const launching *l, void *y)
{
    return (qc_matmul_io){.m = l->q->m,
                          .x = x_at(l->w, l->q, 0),
                          .x_dtype = l->w->in->dtype,
                          .y = y,
                          .y_dtype = l->w->in->dtype};
}

static qc_status launch_quantized(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const launching *l = ctx;
    comparison *w = l->w;
    qc_matmul_io io = io_of(l, w->y);
    return qc_matmul_run(w->c->gpu.handle, &w->weights[copy], &io, QC_MATMUL_AUTO, w->workspace,
                         w->workspace_bytes, s, err);
}

static qc_status launch_dense(void *ctx, uint32_t copy, qc_cuda_stream s, qc_error *err)
{
    const launching *l = ctx;
    comparison *w = l->w;
    qc_matmul_io io = io_of(l, w->z);
    return qc_matmul_dense(w->c->gpu.handle, w->dense + copy * w->dense_bytes, w->n, w->k, &io,
                           w->c->gpu.gemm_workspace, QC_MATMUL_DENSE_WORKSPACE, s, err);
}

/* ---- errors --------------------------------------------------------------------------------- */

static double larger(double e, double most)
{
    return e > most || isnan(e) ? e : most;
}

/* Sums in double of rows of x, on the device: with the stored weights or with the original ones. */
static qc_status sum_exactly(comparison *w, const qc_weights *stored, const uint16_t *x,
                             uint64_t rows, qc_error *err)
{
    const qc_timer *g = &w->c->gpu;
    const qc_matmul_exact exact = {.w = stored,
                                   .dense = w->dense,
                                   .dense_dtype = w->in->dtype,
                                   .n = w->n,
                                   .k = w->k,
                                   .m = rows,
                                   .x = x,
                                   .x_dtype = w->in->dtype,
                                   .y = w->sums};
    QC_TRY(qc_matmul_reference(g->handle, &exact, g->stream, err));
    return qc_cuda_to_host(w->host_sums, w->sums, (size_t)(rows * w->n) * sizeof(double), g->stream,
                           err);
}

static qc_status look_at(comparison *w, uint64_t first, uint64_t rows, qc_gpu_compared *out,
                         qc_error *err)
{
    const qc_timer *g = &w->c->gpu;
    const qc_dtype dtype = w->in->dtype;
    size_t outputs = (size_t)(rows * w->n);
    uint64_t at = first * w->n;
    if (rows == 0)
        return QC_OK;
    if (has_gemm(w)) {
        QC_TRY(qc_cuda_to_host(w->host_z, (const uint16_t *)w->z + at, outputs * sizeof(uint16_t),
                               g->stream, err));
    } else { /* sums in double of the original weights, rounded */
        QC_TRY(sum_exactly(w, NULL, x_at(w, out, first), rows, err));
        QC_TRY(qc_cuda_stream_synchronize(g->stream, err));
        for (size_t i = 0; i < outputs; i++)
            w->host_z[i] = dtype == QC_DTYPE_BF16 ? qc_bf16_from_f64(w->host_sums[i])
                                                  : qc_f16_from_f64(w->host_sums[i]);
    }
    QC_TRY(sum_exactly(w, &w->stored, x_at(w, out, first), rows, err));
    QC_TRY(qc_cuda_to_host(w->host_y, (const uint16_t *)w->y + at, outputs * sizeof(uint16_t),
                           g->stream, err));
    QC_TRY(qc_cuda_stream_synchronize(g->stream, err));
    for (size_t i = 0; i < outputs; i++) {
        double y = qc_f64_of_half(dtype, w->host_y[i]);
        double z = qc_f64_of_half(dtype, w->host_z[i]);
        double output = y - z, kernel = y - w->host_sums[i];
        out->output.ee += output * output;
        out->output.xx += z * z;
        out->output.max = larger(fabs(output), out->output.max);
        out->kernel.ee += kernel * kernel;
        out->kernel.xx += w->host_sums[i] * w->host_sums[i];
        out->kernel.max = larger(fabs(kernel), out->kernel.max);
    }
    out->outputs += outputs;
    return QC_OK;
}

/* ---- times ---------------------------------------------------------------------------------- */

static qc_status find_times(comparison *w, qc_gpu_compared *out, qc_error *err)
{
    qc_timer *g = &w->c->gpu;
    launching l = {w, out};
    uint32_t contenders = has_gemm(w) ? 2 : 1;
    qc_timed c[2] = {
        {.launch = launch_quantized, .ctx = &l, .copies = w->copies, .least = LEAST},
        {.launch = launch_dense, .ctx = &l, .copies = w->dense_copies, .least = LEAST}};
    qc_timed *const both[] = {&c[0], &c[1]};
    qc_status st = QC_OK;
    for (uint32_t i = 0; st == QC_OK && i < contenders; i++)
        st = qc_timed_ready(g, &c[i], err);
    uint32_t rounds = ROUNDS;
    if (st == QC_OK) {
        rounds = qc_timing_rounds(ROUNDS, qc_timed_round_seconds(both, contenders), POINT_SECONDS);
        st = qc_timed_rounds(g, both, contenders, rounds, err);
    }
    for (uint32_t i = 0; st == QC_OK && i < contenders; i++)
        if (c[i].out.code != QC_OK) {
            st = c[i].out.code;
            if (err)
                *err = c[i].out;
        }
    if (st == QC_OK) {
        out->seconds = qc_spread_of(c[0].us, 2 * rounds).median * 1e-6;
        if (contenders == 2)
            out->fp16_seconds = qc_spread_of(c[1].us, 2 * rounds).median * 1e-6;
        const qc_gpu_comparison *in = w->in;
        uint64_t bytes = qc_product_bytes(in->codes_bytes + in->scales_bytes + in->nested_bytes,
                                          out->m, w->n, w->k);
        out->floor_seconds =
            qc_roof_floor_us(&w->c->roof, bytes, qc_product_flops(out->m, w->n, w->k)) * 1e-6;
    }
    for (uint32_t i = 0; i < contenders; i++)
        qc_timed_done(&c[i]);
    return st;
}

/* ---- all of it ------------------------------------------------------------------------------ */

static qc_status compare_and_time(comparison *w, qc_gpu_compared *out, unsigned count,
                                  qc_error *err)
{
    int timed = 0;
    for (unsigned i = 0; i < count; i++)
        timed |= out[i].timed;
    QC_TRY(qc_cuda_use(&w->c->gpu.device, err));
    QC_TRY(plan_memory(w, timed, err));
    QC_TRY(make_room(w, err));
    QC_TRY(upload_dense(w, err));
    QC_TRY(upload_quantized(w, err));
    if (w->in->w->form.ops->integer && !has_gemm(w))
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s is multiplied by cuBLAS once it is dequantized (%s)",
                w->in->w->form.ops->name, qc_matmul_no_gemm(w->c->gpu.handle));
    w->workspace_bytes = qc_matmul_workspace_bytes(w->c->gpu.handle, &w->weights[0], w->most,
                                                   QC_MATMUL_AUTO, w->workspace_limit);
    if (w->workspace_bytes == UINT64_MAX)
        QC_FAIL(err, QC_ERR_NOMEM, "its workspace does not fit the GPU");
    QC_TRY(take_buffer(w, &w->workspace, w->workspace_bytes, err));
    QC_TRY(qc_cuda_to_device(w->x, w->in->x, (size_t)(w->in->rows * w->k) * sizeof(uint16_t),
                             w->c->gpu.stream, err));
    for (unsigned i = 0; i < count; i++) {
        out[i] = (qc_gpu_compared){.m = out[i].m, .first = out[i].first, .timed = out[i].timed};
        launching l = {w, &out[i]};
        const qc_matmul_io io = io_of(&l, w->y);
        const qc_matmul_weights *weights = &w->weights[0];
        qc_matmul_planned plan;
        QC_TRY(qc_matmul_plan_product(w->c->gpu.handle, &weights, &io, 1, QC_MATMUL_AUTO,
                                      w->workspace_bytes, &plan, err));
        out[i].path = qc_matmul_path_name(qc_matmul_planned_path(&plan, 0));
        const uint64_t head = qc_min_u64(out[i].m, EDGE_ROWS);
        const uint64_t tail = qc_min_u64(out[i].m - head, EDGE_ROWS);
        QC_TRY(launch_quantized(&l, 0, w->c->gpu.stream, err));
        if (has_gemm(w))
            QC_TRY(launch_dense(&l, 0, w->c->gpu.stream, err));
        QC_TRY(look_at(w, 0, head, &out[i], err));
        QC_TRY(look_at(w, out[i].m - tail, tail, &out[i], err));
        if (out[i].timed)
            QC_TRY(find_times(w, &out[i], err));
    }
    return QC_OK;
}

static qc_status compare_products(qc_gpu_comparer *c, const qc_gpu_comparison *in,
                                  qc_gpu_compared *out, unsigned count, qc_error *err)
{
    comparison w = {.c = c, .in = in, .n = in->w->rows, .k = in->w->form.cols};
    for (unsigned i = 0; i < count; i++)
        w.most = out[i].m > w.most ? out[i].m : w.most;
    qc_status st = compare_and_time(&w, out, count, err);
    qc_error late = {0};
    qc_status ended = qc_cuda_stream_synchronize(c->gpu.stream, &late);
    if (st == QC_OK && ended != QC_OK) {
        st = late.code;
        if (err)
            *err = late;
    }
    for (unsigned i = 0; i < w.buffer_count; i++)
        qc_cuda_free(w.buffers[i]);
    qc_cuda_host_free(w.stage);
    qc_free(w.weights);
    qc_free(w.host_y);
    qc_free(w.host_z);
    qc_free(w.host_sums);
    return st;
}

const qc_gpu_validator qc_gpu_validator_table = {
    .create = comparer_create,
    .destroy = comparer_destroy,
    .no_gemm = comparer_no_gemm,
    .compare = compare_products,
};

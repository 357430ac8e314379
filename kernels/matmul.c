/* The matmul's host side: arguments, the workspace cut as the plan says, launches in order. What is
 * chosen when: matmul_plan.c. */
#include "kernels/matmul.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "kernels/cublas_library.h"
#include "kernels/cuda_quantize.h"
#include "kernels/matmul_kernels.h"
#include "kernels/matmul_tuning.h"

#include <inttypes.h>
#include <limits.h>
#include <string.h>

#define PREPARED_BYTES 256u /* exponent and constants; repacked codes behind */

struct qc_matmul {
    qc_cuda_device device;
    qc_cublas *gemm; /* NULL: no_gemm says why */
    qc_error no_gemm;
    qc_matmul_tuned *tuned; /* [tuned_count] */
    size_t tuned_count;
};

const char *qc_matmul_path_name(qc_matmul_path path)
{
    static const char *const names[QC_MATMUL_PATH_COUNT] = {"auto",      "gemv",         "mma-884",
                                                            "mma-16816", "dequant-gemm", "fill"};
    return path < QC_MATMUL_PATH_COUNT ? names[path] : "unknown";
}

qc_status qc_matmul_create(qc_matmul **out, int device_index, qc_error *err)
{
    qc_matmul *h = NULL;
    qc_status st;
    *out = NULL;
    QC_TRY(qc_calloc((void **)&h, 1, sizeof *h, err));
    QC_TRY_GOTO(st, failed, qc_cuda_device_open(&h->device, device_index, err));
    QC_TRY_GOTO(st, failed, qc_cuda_use(&h->device, err));
    /* Without cuBLAS every shape still has a path. */
    if (qc_cublas_open(&h->gemm, h->device.runtime_version, &h->no_gemm) != QC_OK)
        h->gemm = NULL;
    *out = h;
    return QC_OK;
failed:
    qc_matmul_destroy(h);
    return st;
}

void qc_matmul_destroy(qc_matmul *h)
{
    if (!h)
        return;
    qc_cublas_close(h->gemm);
    qc_free(h->tuned);
    qc_free(h);
}

const qc_cuda_device *qc_matmul_device(const qc_matmul *h)
{
    return &h->device;
}

const char *qc_matmul_no_gemm(const qc_matmul *h)
{
    return h->gemm ? NULL : h->no_gemm.msg;
}

qc_status qc_matmul_set_tuning(qc_matmul *h, const qc_matmul_tuned *rows, size_t count,
                               qc_error *err)
{
    void *copy = NULL;
    QC_TRY(qc_matmul_tuned_check(rows, count, err));
    if (count) {
        QC_TRY(qc_calloc(&copy, count, sizeof *rows, err));
        memcpy(copy, rows, count * sizeof *rows);
    }
    qc_free(h->tuned);
    h->tuned = copy;
    h->tuned_count = count;
    return QC_OK;
}

const qc_matmul_tuned *qc_matmul_tuning(const qc_matmul *h, size_t *count)
{
    *count = h->tuned_count;
    return h->tuned;
}

/* ---- weights --------------------------------------------------------------------------------- */

static int is_power_of_two(uint32_t v)
{
    return v && !(v & (v - 1));
}

static qc_status check_weights(const qc_weights *w, qc_error *err)
{
    uint64_t elems = 0;
    if (w->kind != QC_WEIGHTS_NF4 && w->kind != QC_WEIGHTS_INT8_ROWS &&
        w->kind != QC_WEIGHTS_INT8_BLOCKS)
        QC_FAIL(err, QC_ERR_USAGE, "weights are of kind %d, which is not known", (int)w->kind);
    if (qc_mul_u64(w->rows, w->cols, &elems) || elems > UINT64_MAX / 4)
        QC_FAIL(err, QC_ERR_USAGE, "a weight of %" PRIu64 " x %" PRIu64 " overflows 64 bits",
                w->rows, w->cols);
    if (w->kind != QC_WEIGHTS_INT8_ROWS &&
        (!is_power_of_two(w->block_elems) || w->block_elems < 32 || w->block_elems > 4096))
        QC_FAIL(err, QC_ERR_USAGE,
                "block of %u elements, a power of two from 32 to 4096 was expected",
                w->block_elems);
    if (elems == 0)
        return QC_OK;
    if (!w->codes)
        QC_FAIL(err, QC_ERR_USAGE, "weights have no codes");
    if (w->absmax)
        return QC_OK;
    if (w->kind == QC_WEIGHTS_INT8_ROWS)
        QC_FAIL(err, QC_ERR_USAGE, "row-wise int8 weights have no scales");
    if (!w->absmax_codes || !w->nested_absmax || !w->nested_map)
        QC_FAIL(err, QC_ERR_USAGE, "weights have neither scales nor all of double-quantized ones");
    if (!is_power_of_two(w->nested_block))
        QC_FAIL(err, QC_ERR_USAGE, "blocks of %u scales, a power of two was expected",
                w->nested_block);
    return QC_OK;
}

static unsigned alignment_of(uint64_t value)
{
    unsigned alignment = 16;
    while (alignment > 1 && value % alignment)
        alignment /= 2;
    return alignment;
}

/* Of an address and of every row behind it. */
static unsigned row_alignment(const void *p, uint64_t row_bytes)
{
    return alignment_of((uintptr_t)p | row_bytes);
}

int qc_matmul_repack_helps(const qc_weights *w)
{
    return w->rows && w->cols && (w->cols % 32 != 0 || (uintptr_t)w->codes % 16 != 0);
}

static uint64_t repacked_row_bytes(const qc_weights *w)
{
    uint64_t runs = qc_ceil_div_u64(w->cols, 32);
    return qc_sat_mul(runs, w->kind == QC_WEIGHTS_NF4 ? 16 : 32);
}

uint64_t qc_matmul_prepared_bytes(const qc_weights *w, int repack)
{
    return qc_sat_add(PREPARED_BYTES, repack ? qc_sat_mul(w->rows, repacked_row_bytes(w)) : 0);
}

qc_status qc_matmul_prepare(const qc_matmul *h, const qc_weights *w, int repack, void *memory,
                            qc_matmul_weights *out, qc_cuda_stream s, qc_error *err)
{
    (void)h;
    QC_TRY(check_weights(w, err));
    if (!memory || (uintptr_t)memory % 256)
        QC_FAIL(err, QC_ERR_USAGE, "memory for a prepared weight is not 256-byte aligned");
    if (repack && !qc_matmul_repack_helps(w))
        QC_FAIL(err, QC_ERR_USAGE,
                "repacking a weight of %" PRIu64 " x %" PRIu64 " whose rows are aligned is "
                "pointless",
                w->rows, w->cols);
    memset(out, 0, sizeof *out);
    out->w = *w;
    out->exponent = memory;
    out->alignment = alignment_of((uintptr_t)w->codes);
    QC_TRY(qc_matmul_exponent_launch(w, memory, s, err));
    if (repack) {
        unsigned char *codes = (unsigned char *)memory + PREPARED_BYTES;
        out->row_bytes = repacked_row_bytes(w);
        out->w.codes = codes;
        out->alignment = 16;
        QC_TRY(qc_matmul_repack_launch(w, out->row_bytes, codes, s, err));
    }
    return QC_OK;
}

/* ---- run ------------------------------------------------------------------------------------- */

static qc_matmul_shape shape_of(const qc_matmul *h, const qc_matmul_weights *w)
{
    qc_matmul_shape s;
    memset(&s, 0, sizeof s);
    s.kind = w->w.kind;
    s.n = w->w.rows;
    s.k = w->w.cols;
    s.block_elems = w->w.block_elems;
    s.x_dtype = s.y_dtype = QC_DTYPE_F16;
    s.ldx = s.k;
    s.x_alignment = 2;
    s.codes_alignment = w->alignment;
    s.repacked = w->row_bytes != 0;
    s.have_gemm = h->gemm && s.k <= INT_MAX - 32;
    s.tuned = h->tuned;
    s.tuned_count = h->tuned_count;
    return s;
}

uint64_t qc_matmul_workspace_bytes(const qc_matmul *h, const qc_matmul_weights *w, uint64_t max_m,
                                   qc_matmul_path path, uint64_t limit_bytes)
{
    qc_matmul_shape s = shape_of(h, w);
    s.have_gemm = s.have_gemm && max_m <= INT_MAX;
    return qc_matmul_plan_workspace(&h->device, &s, max_m, path, limit_bytes);
}

static qc_status check_io(const qc_matmul_io *io, uint64_t n, uint64_t k, qc_error *err)
{
    if (io->x_dtype != QC_DTYPE_F16 && io->x_dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "x is %s, F16 or BF16 was expected", qc_dtype_name(io->x_dtype));
    if (io->y_dtype != QC_DTYPE_F16 && io->y_dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "y is %s, F16 or BF16 was expected", qc_dtype_name(io->y_dtype));
    if (io->ldx && io->ldx < k)
        QC_FAIL(err, QC_ERR_USAGE, "rows of x are %" PRIu64 " apart, but have %" PRIu64 " elements",
                io->ldx, k);
    if (io->ldy && io->ldy < n)
        QC_FAIL(err, QC_ERR_USAGE, "rows of y are %" PRIu64 " apart, but have %" PRIu64 " elements",
                io->ldy, n);
    if (io->m == 0 || n == 0)
        return QC_OK;
    uint64_t bytes = 0;
    if (qc_mul_u64(io->m, io->ldx ? io->ldx : k, &bytes) || bytes > UINT64_MAX / 8 ||
        qc_mul_u64(io->m, io->ldy ? io->ldy : n, &bytes) || bytes > UINT64_MAX / 8)
        QC_FAIL(err, QC_ERR_USAGE, "%" PRIu64 " rows overflow 64 bits", io->m);
    if (!io->y)
        QC_FAIL(err, QC_ERR_USAGE, "y is NULL");
    if (k && !io->x)
        QC_FAIL(err, QC_ERR_USAGE, "x is NULL");
    if ((uintptr_t)io->x % 2 || (uintptr_t)io->y % 2 || (uintptr_t)io->bias % 2)
        QC_FAIL(err, QC_ERR_USAGE, "x, y or bias is at an odd address");
    return QC_OK;
}

/* Chunk after chunk of W's rows becomes dense, and its columns of y are multiplied. */
static qc_status dequant_gemm(const qc_matmul *h, const qc_matmul_call *c, const int *exponent,
                              unsigned char *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                              qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    void *dense = workspace + p->dense_offset;
    qc_status st = QC_OK;
    QC_TRY(qc_cublas_begin(h->gemm, workspace + p->gemm_offset, workspace_bytes - p->gemm_offset, s,
                           err));
    for (uint64_t first = 0; first < c->n; first += p->chunk_rows) {
        qc_matmul_call part = *c;
        part.n = c->n - first < p->chunk_rows ? c->n - first : p->chunk_rows;
        part.y = (uint16_t *)c->y + first;
        part.bias = c->bias ? (const uint16_t *)c->bias + first : NULL;
        if (c->weights.row_bytes)
            QC_TRY_GOTO(st, done,
                        qc_matmul_dense_rows_launch(&c->weights, first, part.n, dense,
                                                    p->dense_dtype, p->k_padded, exponent, s, err));
        else
            QC_TRY_GOTO(st, done,
                        qc_cuda_dequantize(&c->weights.w, first, part.n, dense, p->dense_dtype,
                                           p->k_padded, exponent, NULL, s, err));
        qc_cublas_gemm_args g = {
            .w = dense,
            .x = c->x,
            .y = p->gemm_to_float ? (void *)c->partials : part.y,
            .in_dtype = p->dense_dtype,
            .out_dtype = p->gemm_to_float ? QC_DTYPE_F32 : p->dense_dtype,
            .m = c->m,
            .n = part.n,
            .k = c->k,
            .ldw = p->k_padded,
            .ldx = c->ldx,
            .ldy = p->gemm_to_float ? part.n : c->ldy,
            .alpha_zero = !p->gemm_to_float && exponent ? (const float *)(exponent + 1) : NULL,
        };
        QC_TRY_GOTO(st, done, qc_cublas_gemm(h->gemm, &g, err));
        if (p->gemm_to_float)
            QC_TRY_GOTO(st, done, qc_matmul_reduce_launch(&part, s, err));
    }
done:
    qc_cublas_end(h->gemm);
    return st;
}

/* c[0 .. count): of one plan. */
static qc_status launch(const qc_matmul *h, qc_matmul_call *c, uint32_t count,
                        unsigned char *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                        qc_error *err)
{
    const qc_matmul_plan *p = &c->plan;
    if (p->copies_x) {
        uint16_t *x = (uint16_t *)(void *)(workspace + p->x_offset);
        int *x_exponent = (int *)(void *)(workspace + p->x_exponent_offset);
        QC_TRY(qc_matmul_input_launch(c, x, x_exponent, s, err));
        for (uint32_t i = count; i-- > 0;) {
            c[i].x_exponent = c->x_dtype == QC_DTYPE_BF16 ? x_exponent : NULL;
            c[i].x = x;
            c[i].x_dtype = QC_DTYPE_F16;
            c[i].ldx = p->k_padded;
        }
    }
    float *partials = (float *)(void *)(workspace + p->partial_offset);
    for (uint32_t i = 0; i < count; i++) {
        c[i].counters = (uint32_t *)(void *)workspace;
        c[i].partials = partials;
        if (p->splits > 1)
            partials += c[i].m * c[i].n * p->splits;
        /* Float, or bfloat16, which has float's range. */
        if (p->path == QC_MATMUL_GEMV ||
            (p->path == QC_MATMUL_DEQUANT_GEMM && p->dense_dtype == QC_DTYPE_BF16))
            c[i].weights.exponent = NULL;
    }
    switch (p->path) {
    case QC_MATMUL_GEMV:
        QC_TRY(qc_gemv_launch(c, count, s, err));
        break;
    case QC_MATMUL_MMA_884:
        QC_TRY(qc_mma884_launch(c, count, s, err));
        break;
    case QC_MATMUL_MMA_16816:
        QC_TRY(qc_mma16816_launch(c, count, s, err));
        break;
    case QC_MATMUL_DEQUANT_GEMM:
        for (uint32_t i = 0; i < count; i++)
            QC_TRY(
                dequant_gemm(h, c + i, c[i].weights.exponent, workspace, workspace_bytes, s, err));
        return QC_OK;
    case QC_MATMUL_FILL:
        for (uint32_t i = 0; i < count; i++)
            QC_TRY(qc_matmul_reduce_launch(c + i, s, err));
        return QC_OK;
    case QC_MATMUL_AUTO:
    case QC_MATMUL_PATH_COUNT:
        QC_FAIL(err, QC_ERR_INTERNAL, "the matmul's plan names no path");
    }
    for (uint32_t i = 0; i < count && p->splits > 1; i++)
        QC_TRY(qc_matmul_reduce_launch(c + i, s, err));
    return QC_OK;
}

static qc_status check_call(const qc_matmul_weights *w, const qc_matmul_io *io, qc_error *err)
{
    QC_TRY(check_weights(&w->w, err));
    if (!w->exponent)
        QC_FAIL(err, QC_ERR_USAGE, "the weight was not prepared");
    return check_io(io, w->w.rows, w->w.cols, err);
}

static qc_matmul_call call_of(const qc_matmul_weights *w, const qc_matmul_io *io)
{
    qc_matmul_call c;
    memset(&c, 0, sizeof c);
    c.weights = *w;
    c.m = io->m;
    c.n = w->w.rows;
    c.k = w->w.cols;
    c.x = io->x;
    c.x_dtype = io->x_dtype;
    c.ldx = io->ldx ? io->ldx : c.k;
    c.y = io->y;
    c.y_dtype = io->y_dtype;
    c.ldy = io->ldy ? io->ldy : c.n;
    c.bias = io->bias;
    return c;
}

/* Alike calls: one plan, one launch. */
static qc_status run_calls(const qc_matmul *h, qc_matmul_call *c, uint32_t count,
                           qc_matmul_shape shape, qc_matmul_path path, void *workspace,
                           uint64_t workspace_bytes, qc_cuda_stream s, qc_error *err)
{
    uint64_t ldy = 0;
    shape.m = c->m;
    shape.x_dtype = c->x_dtype;
    shape.y_dtype = c->y_dtype;
    shape.ldx = c->ldx;
    shape.x_alignment = row_alignment(c->x, c->ldx * 2);
    for (uint32_t i = 0; i < count; i++) {
        shape.has_bias = shape.has_bias || c[i].bias != NULL;
        ldy = c[i].ldy > ldy ? c[i].ldy : ldy;
    }
    shape.have_gemm = shape.have_gemm && c->m <= INT_MAX && c->ldx <= INT_MAX && ldy <= INT_MAX;
    QC_TRY(qc_matmul_plan_make(&h->device, &shape, path,
                               workspace_bytes ? workspace_bytes : QC_MATMUL_NO_WORKSPACE, &c->plan,
                               err));
    if (c->m == 0 || shape.n == 0)
        return QC_OK;
    for (uint32_t i = 1; i < count; i++)
        c[i].plan = c->plan;
    return launch(h, c, count, workspace, workspace_bytes, s, err);
}

static qc_status check_workspace(const void *workspace, uint64_t bytes, qc_error *err)
{
    if ((uintptr_t)workspace % 256)
        QC_FAIL(err, QC_ERR_USAGE, "the workspace is not 256-byte aligned");
    if (!workspace && bytes)
        QC_FAIL(err, QC_ERR_USAGE, "the workspace of %" PRIu64 " bytes is NULL", bytes);
    return QC_OK;
}

qc_status qc_matmul_workspace_init(void *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                                   qc_error *err)
{
    QC_TRY(check_workspace(workspace, workspace_bytes, err));
    if (workspace_bytes < QC_MATMUL_HEADER_BYTES) /* no plan has anything in it */
        return qc_cuda_fill(workspace, 0, workspace_bytes, s, err);
    QC_TRY(qc_cuda_fill(workspace, (int)(QC_MATMUL_READY & 0xffu), 4, s, err));
    return qc_cuda_fill((unsigned char *)workspace + 4, 0, QC_MATMUL_HEADER_BYTES - 4, s, err);
}

qc_status qc_matmul_run(const qc_matmul *h, const qc_matmul_weights *w, const qc_matmul_io *io,
                        qc_matmul_path path, void *workspace, uint64_t workspace_bytes,
                        qc_cuda_stream s, qc_error *err)
{
    QC_TRY(check_call(w, io, err));
    QC_TRY(check_workspace(workspace, workspace_bytes, err));
    qc_matmul_call c = call_of(w, io);
    return run_calls(h, &c, 1, shape_of(h, w), path, workspace, workspace_bytes, s, err);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static int alike(const qc_matmul_weights *a, const qc_matmul_weights *b)
{
    const qc_weights *v = &a->w, *w = &b->w;
    return v->kind == w->kind && v->cols == w->cols && v->block_elems == w->block_elems &&
           v->code_map == w->code_map && !v->absmax == !w->absmax &&
           (v->absmax || v->nested_block == w->nested_block) && !a->row_bytes == !b->row_bytes;
}

/* Of the weights from *from on, those that are alike, as one shape; *from: behind them. */
static qc_matmul_shape shape_of_alike(const qc_matmul *h, const qc_matmul_weights *const *w,
                                      uint32_t count, uint32_t *from)
{
    uint32_t first = *from;
    qc_matmul_shape s = shape_of(h, w[first]);
    s.n = 0;
    for (; *from < count && alike(w[first], w[*from]); ++*from) {
        if (w[*from]->w.rows == 0)
            continue;
        s.part_n[s.parts++] = w[*from]->w.rows;
        s.n = qc_sat_add(s.n, w[*from]->w.rows);
        if (w[*from]->alignment < s.codes_alignment)
            s.codes_alignment = w[*from]->alignment;
    }
    return s;
}

uint64_t qc_matmul_group_workspace_bytes(const qc_matmul *h, const qc_matmul_weights *const *w,
                                         uint32_t count, uint64_t max_m, qc_matmul_path path,
                                         uint64_t limit_bytes)
{
    uint64_t most = 0;
    for (uint32_t i = 0; i < count && count <= QC_MATMUL_GROUP_MOST;) {
        qc_matmul_shape s = shape_of_alike(h, w, count, &i);
        s.have_gemm = s.have_gemm && max_m <= INT_MAX;
        uint64_t bytes = qc_matmul_plan_workspace(&h->device, &s, max_m, path, limit_bytes);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static qc_status check_group(const qc_matmul_weights *const *w, const qc_matmul_io *io,
                             uint32_t count, qc_error *err)
{
    if (count < 1 || count > QC_MATMUL_GROUP_MOST)
        QC_FAIL(err, QC_ERR_USAGE, "a group of %u weights, 1 to %u were expected", count,
                QC_MATMUL_GROUP_MOST);
    for (uint32_t i = 0; i < count; i++) {
        const char *differs = NULL;
        QC_TRY(check_call(w[i], io + i, err));
        if (w[i]->w.cols != w[0]->w.cols)
            differs = "another K";
        else if (io[i].m != io->m)
            differs = "another m";
        else if (io[i].x != io->x)
            differs = "another x";
        else if (io[i].x_dtype != io->x_dtype || io[i].y_dtype != io->y_dtype)
            differs = "another dtype";
        else if ((io[i].ldx ? io[i].ldx : w[0]->w.cols) != (io->ldx ? io->ldx : w[0]->w.cols))
            differs = "another ldx";
        if (differs)
            QC_FAIL(err, QC_ERR_USAGE, "weight %u of the group has %s than the first", i, differs);
    }
    return QC_OK;
}

qc_status qc_matmul_run_group(const qc_matmul *h, const qc_matmul_weights *const *w,
                              const qc_matmul_io *io, uint32_t count, qc_matmul_path path,
                              void *workspace, uint64_t workspace_bytes, qc_cuda_stream s,
                              qc_error *err)
{
    QC_TRY(check_group(w, io, count, err));
    QC_TRY(check_workspace(workspace, workspace_bytes, err));
    for (uint32_t i = 0; i < count;) {
        qc_matmul_call c[QC_MATMUL_GROUP_MOST];
        uint32_t first = i, calls = 0;
        qc_matmul_shape shape = shape_of_alike(h, w, count, &i);
        for (uint32_t j = first; j < i; j++)
            if (w[j]->w.rows)
                c[calls++] = call_of(w[j], io + j);
        if (calls)
            QC_TRY(run_calls(h, c, calls, shape, path, workspace, workspace_bytes, s, err));
    }
    return QC_OK;
}

/* ---- to compare with ------------------------------------------------------------------------- */

qc_status qc_matmul_dense(const qc_matmul *h, const void *weights, uint64_t n, uint64_t k,
                          const qc_matmul_io *io, void *workspace, uint64_t workspace_bytes,
                          qc_cuda_stream s, qc_error *err)
{
    if (!h->gemm)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s", h->no_gemm.msg);
    QC_TRY(check_io(io, n, k, err));
    if (io->x_dtype != io->y_dtype)
        QC_FAIL(err, QC_ERR_USAGE, "x is %s and y %s, one dtype was expected",
                qc_dtype_name(io->x_dtype), qc_dtype_name(io->y_dtype));
    if (io->x_dtype == QC_DTYPE_BF16 && h->device.sm < 80)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "BF16 needs sm_80, this device is sm_%u", h->device.sm);
    if (io->bias)
        QC_FAIL(err, QC_ERR_USAGE, "a dense product with a bias was asked for");
    if ((uintptr_t)workspace % 256)
        QC_FAIL(err, QC_ERR_USAGE, "the workspace is not 256-byte aligned");
    if (io->m == 0 || n == 0)
        return QC_OK;
    qc_cublas_gemm_args g = {
        .w = weights,
        .x = io->x,
        .y = io->y,
        .in_dtype = io->x_dtype,
        .out_dtype = io->y_dtype,
        .m = io->m,
        .n = n,
        .k = k,
        .ldw = k,
        .ldx = io->ldx ? io->ldx : k,
        .ldy = io->ldy ? io->ldy : n,
    };
    if (k == 0) {
        qc_matmul_call c;
        memset(&c, 0, sizeof c);
        c.m = io->m;
        c.n = n;
        c.y = io->y;
        c.y_dtype = io->y_dtype;
        c.ldy = g.ldy;
        return qc_matmul_reduce_launch(&c, s, err);
    }
    if (!weights)
        QC_FAIL(err, QC_ERR_USAGE, "weights are NULL");
    if (g.m > INT_MAX || n > INT_MAX || k > INT_MAX || g.ldx > INT_MAX || g.ldy > INT_MAX)
        QC_FAIL(err, QC_ERR_USAGE,
                "a dense product of %" PRIu64 " x %" PRIu64 " x %" PRIu64
                " is too large for cuBLAS",
                g.m, n, k);
    QC_TRY(qc_cublas_begin(h->gemm, workspace, workspace ? workspace_bytes : 0, s, err));
    qc_status st = qc_cublas_gemm(h->gemm, &g, err);
    qc_cublas_end(h->gemm);
    return st;
}

qc_status qc_matmul_reference(const qc_matmul *h, const qc_weights *w, const void *dense,
                              qc_dtype dense_dtype, uint64_t n, uint64_t k, const void *x,
                              qc_dtype x_dtype, uint64_t m, double *y, qc_cuda_stream s,
                              qc_error *err)
{
    (void)h;
    const qc_matmul_io io = {.m = m, .x = x, .x_dtype = x_dtype, .y = y, .y_dtype = QC_DTYPE_F16};
    if (w) {
        QC_TRY(check_weights(w, err));
        if (w->rows != n || w->cols != k)
            QC_FAIL(err, QC_ERR_USAGE,
                    "weights are %" PRIu64 " x %" PRIu64 ", %" PRIu64 " x %" PRIu64
                    " was asked for",
                    w->rows, w->cols, n, k);
    } else if (dense_dtype != QC_DTYPE_F32 && dense_dtype != QC_DTYPE_F16 &&
               dense_dtype != QC_DTYPE_BF16) {
        QC_FAIL(err, QC_ERR_USAGE, "dense weights are %s, F32, F16 or BF16 was expected",
                qc_dtype_name(dense_dtype));
    } else if (!dense && n && k) {
        QC_FAIL(err, QC_ERR_USAGE, "weights are NULL");
    }
    QC_TRY(check_io(&io, n, k, err));
    if (m == 0 || n == 0)
        return QC_OK;
    return qc_matmul_reference_launch(w, dense, dense_dtype, n, k, x, x_dtype, m, y, s, err);
}

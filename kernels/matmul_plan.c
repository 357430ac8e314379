/* Chooses the kernel, tiles and workspace for a shape on a device; see matmul_plan.h.
 *
 * The workspace in this order, each array on a multiple of 256 bytes:
 *
 *     x as float16 [m][k_padded] | exponents of its rows [m] | float partial sums |
 *     dense rows of W, one chunk or two | cuBLAS */
#include "kernels/matmul_plan.h"

#include "base/checked.h"
#include "kernels/matmul_chunks.h"
#include "kernels/matmul_kernels.h"

#include <inttypes.h>
#include <string.h>

#define RUN_ELEMS       32u
#define GEMV_ROWS       8u
#define WGMMA_TILE      256u  /* rows of W in a tile, up to 64 rows of x */
#define WGMMA_MOST      512u  /* rows of x */
#define WGMMA_N         4096u /* rows of W */
#define K_MULTIPLE      128u
#define WORKSPACE_ALIGN 256u
#define LARGE_SHARED    (128u << 10) /* more than GPUs for graphics have, of a block */

/* What cuBLAS's documentation of cublasSetWorkspace recommends: 32 MiB for Hopper, 4 MiB else. */
#define GEMM_BYTES_HOPPER (32u << 20)
#define GEMM_BYTES        (4u << 20)

const char *qc_matmul_path_name(qc_matmul_path path)
{
    static const char *const names[QC_MATMUL_PATH_COUNT] = {
        "auto", "gemv", "mma-884", "mma-16816", "dequant-gemm", "fill", "wgmma"};
    return path < QC_MATMUL_PATH_COUNT ? names[path] : "unknown";
}

static int is_aligned(const qc_matmul_shape *s)
{
    return !s->repacked && s->k % RUN_ELEMS == 0;
}

/* The same as fused_rows where matmul_tiles.cu has the shape: calculated from clocks, which
 * docs/kernels.md has beside those of dequantizing and cuBLAS, not measured. It splits K, so narrow
 * weights fill the device as well.
 *   80 .. 89    with large shared memory (sm_80, sm_87). cuBLAS takes as long for 192 rows as for
 *               256, so NF4 wins at 192 and loses at 256; int8, which has more bytes to dequantize,
 *               wins there too
 *   86, 88      a third less memory bandwidth for their tensor cores than sm_80: 128
 *   89          twice the clocks of sm_86 for the same bandwidth: 256
 *   90 .. 99    wgmma, which cuBLAS has, is up to twice as fast as mma.sync: 128
 *   100 .. 109  memory brings float16 weights for 64 rows in half the time that mma.sync takes: 64
 *   110 .. 119  a quarter of sm_100's bandwidth per multiprocessor: 128
 *   120 ..      GDDR7 has nearly twice the bandwidth of sm_89: 128 */
static uint64_t tiles_rows(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    if (d->sm < 90 && d->shared_block_bytes >= LARGE_SHARED)
        return s->kind == QC_FORM_NF4 ? 192 : 256;
    return d->sm == 89 ? 256 : d->sm >= 100 && d->sm < 110 ? 64 : 128;
}

/* Up to this many rows of x, a fused kernel is thought to be no slower than dequantizing and
 * cuBLAS.
 *
 * Where matmul_tiles.cu has the shape: tiles_rows.
 *
 * For other shapes the general kernel runs. Its rows are those up to which a fused kernel was
 * published to be no slower, theirs, not measured with these kernels: for sm_75 and newer
 * bitsandbytes 0.50 (backends/cuda/ops.py, gemm_4bit; its 32 for B200 stand for 100 .. 119), for
 * sm_70 1Cat-vLLM on a V100. "Half" and so on: how many of the device's multiprocessors get a tile
 * of 64 columns. */
static uint64_t fused_rows(const qc_cuda_device *d, const qc_matmul_shape *s)
{
    uint64_t tiles = qc_ceil_div_u64(s->n, 64);
    uint64_t sms = d->multiprocessors ? d->multiprocessors : 1;
    int half = tiles >= qc_ceil_div_u64(sms, 2);
    int one = tiles >= sms, two = tiles >= 2 * sms, three = tiles >= 3 * sms;
    int large_shared = d->shared_block_bytes >= LARGE_SHARED;
    if (d->sm < 75)
        return 256;
    if (d->sm < 80)
        return three ? 128 : 64;
    qc_matmul_plan p = {.aligned = is_aligned(s)};
    if (qc_tiles_takes(d, s, &p))
        return tiles_rows(d, s);
    if (d->sm < 90 && large_shared)
        return three ? 128 : one ? (s->k < s->n ? 64 : 32) : half && s->k < s->n ? 128 : 16;
    if (d->sm < 89)
        return one ? 128 : half ? 64 : 16;
    if (d->sm >= 90 && d->sm < 100)
        return three ? 64 : two ? 48 : one ? 32 : 16;
    if (d->sm >= 100 && d->sm < 120)
        return 32;
    return three ? 256 : one ? 128 : half ? 64 : 16;
}

uint64_t qc_matmul_gemm_rows(const qc_cuda_device *device, const qc_matmul_shape *shape)
{
    return fused_rows(device, shape) + 1;
}

static qc_matmul_path tensor_path(const qc_cuda_device *d)
{
    return d->sm >= 80 ? QC_MATMUL_MMA_16816 : d->sm >= 70 ? QC_MATMUL_MMA_884 : QC_MATMUL_GEMV;
}

/* Integers are read by dequantizing alone. */
static int is_only_dequantized(const qc_matmul_shape *s)
{
    return qc_form_ops_of(s->kind)->integer;
}

/* Where matmul_wgmma.cu was faster than the other kernels on an H200, of the shapes of
 * bench/results/gpu-h200-bench.json: from 33 to 512 rows of x with 8,192 rows of W and more, but
 * not with 1,024; and with fewer rows of x where one wave of tiles nearly fills the device, NF4 at
 * any number of rows and int8 from 17 on. Between 1,024 and 8,192 rows of W nothing was tried. */
static int wgmma_suits(const qc_cuda_device *d, const qc_matmul_shape *s, const qc_matmul_plan *p)
{
    if (s->m > WGMMA_MOST || s->n < WGMMA_N || !qc_wgmma_takes(d, s, p))
        return 0;
    uint64_t tiles = qc_matmul_tiles(s, WGMMA_TILE), sms = d->multiprocessors;
    if (s->m > 32)
        return 1;
    return 4 * tiles >= 3 * sms && tiles <= sms && (s->kind == QC_FORM_NF4 || s->m > 16);
}

static qc_matmul_path choose(const qc_cuda_device *d, const qc_matmul_shape *s, int image_fits)
{
    qc_matmul_plan p = {.aligned = is_aligned(s)};
    if (is_only_dequantized(s))
        return QC_MATMUL_DEQUANT_GEMM;
    /* Before wgmma, which took 55.9 us for one row of NF4 and 28672 x 8192 on an H200: the ring is
     * predicted to take 32 to 35, not measured (docs/kernels.md). */
    if (qc_ring_takes(d, s, &p))
        return QC_MATMUL_MMA_16816;
    if (image_fits && wgmma_suits(d, s, &p))
        return QC_MATMUL_WGMMA;
    /* From here on a V100's tensor cores should overtake the GEMV, by the counts of
     * docs/kernels.md. */
    if (d->sm >= 70 && d->sm < 75 && s->m <= GEMV_ROWS && p.aligned && s->x_dtype == QC_DTYPE_F16 &&
        s->x_alignment >= 16 && s->m >= (s->kind == QC_FORM_NF4 ? 3u : 4u))
        return QC_MATMUL_MMA_884;
    if (s->m <= GEMV_ROWS)
        return QC_MATMUL_GEMV;
    if (s->have_gemm && s->m >= qc_matmul_gemm_rows(d, s))
        return QC_MATMUL_DEQUANT_GEMM;
    return tensor_path(d);
}

static qc_status check_path(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_path path,
                            qc_error *err)
{
    if (is_only_dequantized(s) && path != QC_MATMUL_DEQUANT_GEMM &&
        (path != QC_MATMUL_AUTO || !s->have_gemm))
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "only path dequant-gemm reads %s%s",
                qc_form_ops_of(s->kind)->name,
                s->have_gemm ? "" : ", and it needs cuBLAS, which was not found");
    switch (path) {
    case QC_MATMUL_AUTO:
    case QC_MATMUL_GEMV:
        return QC_OK;
    case QC_MATMUL_MMA_884:
        if (d->sm < 70)
            QC_FAIL(err, QC_ERR_USAGE, "path mma-884 needs sm_70, but this device is sm_%u", d->sm);
        return QC_OK;
    case QC_MATMUL_MMA_16816:
        if (d->sm < 80)
            QC_FAIL(err, QC_ERR_USAGE, "path mma-16816 needs sm_80, but this device is sm_%u",
                    d->sm);
        return QC_OK;
    case QC_MATMUL_WGMMA: {
        qc_matmul_plan p = {.aligned = is_aligned(s)};
        if (qc_wgmma_takes(d, s, &p) || !s->m || !s->n || !s->k)
            return QC_OK;
        QC_FAIL(err, QC_ERR_USAGE,
                "path wgmma needs sm_90, kernels built for it, aligned rows of codes, columns that "
                "64 divides, and blocks of 64 or more; this device is sm_%u, and the weight has "
                "%" PRIu64 " columns",
                d->sm, s->k);
    }
    case QC_MATMUL_DEQUANT_GEMM:
        if (!s->have_gemm)
            QC_FAIL(err, QC_ERR_USAGE, "path dequant-gemm needs cuBLAS, which was not found");
        return QC_OK;
    case QC_MATMUL_FILL:
    case QC_MATMUL_PATH_COUNT:
        break;
    }
    QC_FAIL(err, QC_ERR_USAGE, "path %d cannot be asked for", (int)path);
}

/* Returns the rows of the weight. Where several weights share x, they are those of the largest,
 * because cuBLAS takes one at a time. */
static uint64_t gemm_n(const qc_matmul_shape *s)
{
    uint64_t most = s->parts ? 0 : s->n;
    for (uint32_t i = 0; i < s->parts; i++)
        most = s->part_n[i] > most ? s->part_n[i] : most;
    return most;
}

/* Sets the offsets and the total; UINT64_MAX where a size overflows. */
static void lay_out(const qc_matmul_shape *s, uint64_t gemm_bytes, qc_matmul_plan *p)
{
    uint64_t at = 0, partials = 0, dense = 0;
    uint64_t rows = s->m; /* of the copy of x */
    if (p->image_rows)
        rows = qc_sat_mul(qc_ceil_div_u64(rows, p->image_rows), p->image_rows);
    p->x_offset = at;
    if (p->copies_x)
        at = qc_align_u64(qc_sat_add(at, qc_sat_mul(qc_sat_mul(rows, p->k_padded), 2)),
                          WORKSPACE_ALIGN);
    p->x_exponent_offset = at;
    if (p->copies_x)
        at = qc_align_u64(qc_sat_add(at, qc_sat_mul(s->m, 4)), WORKSPACE_ALIGN);
    p->partial_offset = at;
    if (p->path == QC_MATMUL_DEQUANT_GEMM) {
        if (p->gemm_to_float)
            partials = qc_sat_mul(qc_sat_mul(s->m, p->chunk_rows), 4);
        dense = qc_sat_mul(qc_sat_mul(p->chunk_rows, p->k_padded), 2);
        if (p->dense_stride) { /* the last chunk may be a short one */
            uint64_t second = gemm_n(s) - p->chunk_rows;
            p->dense_stride = qc_align_u64(dense, WORKSPACE_ALIGN);
            dense = qc_sat_mul(
                qc_sat_mul(second < p->chunk_rows ? second : p->chunk_rows, p->k_padded), 2);
            dense = qc_sat_add(p->dense_stride, dense);
        }
    } else if (p->splits > 1) {
        partials = qc_sat_mul(qc_sat_mul(qc_sat_mul(s->m, s->n), 4), p->splits);
    }
    at = qc_align_u64(qc_sat_add(at, partials), WORKSPACE_ALIGN);
    p->dense_offset = at;
    at = qc_align_u64(qc_sat_add(at, dense), WORKSPACE_ALIGN);
    p->gemm_offset = at;
    p->workspace_bytes = qc_sat_add(at, gemm_bytes);
}

static int fits(const qc_matmul_plan *p, uint64_t limit_bytes)
{
    return p->workspace_bytes != UINT64_MAX && (!limit_bytes || p->workspace_bytes <= limit_bytes);
}

/* Plans the tensor-core kernels and the GEMV: K is split less until the partial sums fit. */
static void plan_fused(const qc_cuda_device *d, const qc_matmul_shape *s, uint64_t limit_bytes,
                       qc_matmul_plan *p)
{
    p->copies_x = p->path != QC_MATMUL_GEMV &&
                  (s->x_dtype == QC_DTYPE_BF16 || s->k % RUN_ELEMS != 0 || s->x_alignment < 16);
    p->overlaps = qc_matmul_overlaps(d);
    uint32_t variant = p->variant, wanted = p->blocks;
    if (p->path == QC_MATMUL_MMA_16816 && (variant == QC_MATMUL_ANY || variant == QC_MATMUL_RING) &&
        qc_ring_takes(d, s, p)) {
        const qc_matmul_plan before = *p;
        qc_ring_configure(d, s, p);
        lay_out(s, 0, p);
        if (fits(p, limit_bytes))
            return;
        *p = before;
    }
    if (p->path == QC_MATMUL_GEMV)
        qc_gemv_configure(d, s, p);
    else if (p->path == QC_MATMUL_MMA_884)
        qc_mma884_configure(d, s, p);
    else if (p->path == QC_MATMUL_WGMMA)
        qc_wgmma_configure(d, s, p);
    else
        qc_mma16816_configure(d, s, p);
    /* The blocks of a kernel that cannot have this shape say nothing about splits. */
    uint32_t splits = wanted && variant != QC_MATMUL_RING ? wanted : p->splits;
    if (s->m > QC_MATMUL_SPLIT_ROWS)
        splits = 1;
    for (;;) {
        if (splits != p->splits) {
            uint64_t split_k = qc_ceil_div_u64(qc_ceil_div_u64(s->k, splits), K_MULTIPLE);
            p->split_k = split_k * K_MULTIPLE;
            p->splits = (uint32_t)qc_ceil_div_u64(s->k, p->split_k);
            p->worker_k = 0;
        }
        lay_out(s, 0, p);
        if (p->splits == 1 || fits(p, limit_bytes))
            return;
        splits = p->splits / 2;
    }
}

/* Lays out a chunk of `rows` rows. */
static void lay_out_chunks(const qc_matmul_shape *s, qc_chunks chunks, uint64_t gemm_bytes,
                           qc_matmul_plan *p)
{
    p->chunk_rows = chunks.rows;
    p->dense_stride = chunks.paired ? 1 : 0; /* lay_out knows how far */
    lay_out(s, gemm_bytes, p);
}

/* Chooses as many dense rows at a time as suit cuBLAS, or fewer within the limit. */
static void plan_gemm(const qc_cuda_device *d, const qc_matmul_shape *s, uint64_t limit_bytes,
                      qc_matmul_plan *p)
{
    /* Weights in bfloat16 are as exact as a y in bfloat16 deserves; a y in float16 wants more. */
    int bf16 = s->x_dtype == QC_DTYPE_BF16 && s->y_dtype == QC_DTYPE_BF16 && d->sm >= 80;
    p->dense_dtype = bf16 ? QC_DTYPE_BF16 : QC_DTYPE_F16;
    p->copies_x = s->x_dtype == QC_DTYPE_BF16 && !bf16;
    p->gemm_to_float = p->copies_x || s->y_dtype != p->dense_dtype || s->has_epilogue;
    p->splits = 1;
    p->split_k = p->k_padded;
    const uint64_t n = gemm_n(s);
    qc_chunk_room room = {.bytes = UINT64_MAX,
                          .dense_row = qc_sat_mul(p->k_padded, 2),
                          .sums_row = p->gemm_to_float ? qc_sat_mul(s->m, 4) : 0};
    uint64_t gemm_bytes = d->sm >= 90 ? GEMM_BYTES_HOPPER : GEMM_BYTES;
    lay_out_chunks(s, qc_chunks_choose(d->multiprocessors, n, s->m, room), gemm_bytes, p);
    if (fits(p, limit_bytes) || !limit_bytes)
        return;
    gemm_bytes = GEMM_BYTES;
    lay_out_chunks(s, qc_chunks_choose(d->multiprocessors, n, s->m, room), gemm_bytes, p);
    if (fits(p, limit_bytes))
        return;
    /* The room that the limit leaves for chunks; each of up to three arrays may end before a
     * multiple of WORKSPACE_ALIGN. */
    lay_out_chunks(s, (qc_chunks){.rows = 0}, gemm_bytes, p);
    uint64_t taken = qc_sat_add(p->workspace_bytes, 3 * (WORKSPACE_ALIGN - 1));
    room.bytes = limit_bytes > taken ? limit_bytes - taken : 0;
    lay_out_chunks(s, qc_chunks_choose(d->multiprocessors, n, s->m, room), gemm_bytes, p);
}

static void plan_choice(const qc_cuda_device *d, const qc_matmul_shape *s,
                        const qc_matmul_choice *choice, uint64_t limit_bytes, qc_matmul_plan *p)
{
    memset(p, 0, sizeof *p);
    p->path = choice->path;
    p->variant = choice->variant;
    p->blocks = choice->blocks;
    p->aligned = is_aligned(s);
    p->k_padded = qc_ceil_div_u64(s->k, RUN_ELEMS) * RUN_ELEMS;
    if (p->path == QC_MATMUL_DEQUANT_GEMM)
        plan_gemm(d, s, limit_bytes, p);
    else
        plan_fused(d, s, limit_bytes, p);
}

static void plan_path(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_path path,
                      uint64_t limit_bytes, qc_matmul_plan *p)
{
    plan_choice(d, s, &(qc_matmul_choice){path, 0, 0}, limit_bytes, p);
}

qc_status qc_matmul_plan_make(const qc_cuda_device *device, const qc_matmul_shape *shape,
                              qc_matmul_path path, uint64_t limit_bytes, qc_matmul_plan *out,
                              qc_error *err)
{
    QC_TRY(check_path(device, shape, path, err));
    if (shape->m == 0 || shape->n == 0 || shape->k == 0) {
        memset(out, 0, sizeof *out);
        out->path = QC_MATMUL_FILL;
        return QC_OK;
    }
    if (shape->k > UINT64_MAX / 4 || shape->n > UINT64_MAX / 4)
        QC_FAIL(err, QC_ERR_USAGE, "a weight of %" PRIu64 " x %" PRIu64 " overflows 64 bits",
                shape->n, shape->k);
    if (path == QC_MATMUL_AUTO && shape->choice.path != QC_MATMUL_AUTO &&
        check_path(device, shape, shape->choice.path, NULL) == QC_OK) {
        plan_choice(device, shape, &shape->choice, limit_bytes, out);
        if (fits(out, limit_bytes))
            return QC_OK;
    }
    qc_matmul_path chosen = path == QC_MATMUL_AUTO ? choose(device, shape, 1) : path;
    plan_path(device, shape, chosen, limit_bytes, out);
    if (!fits(out, limit_bytes) && path == QC_MATMUL_AUTO && chosen == QC_MATMUL_WGMMA) {
        chosen = choose(device, shape, 0);
        plan_path(device, shape, chosen, limit_bytes, out);
    }
    if (!fits(out, limit_bytes) && path == QC_MATMUL_AUTO && shape->m <= GEMV_ROWS &&
        chosen == QC_MATMUL_MMA_16816)
        plan_path(device, shape, QC_MATMUL_GEMV, limit_bytes, out);
    if (!fits(out, limit_bytes) && path == QC_MATMUL_AUTO && chosen == QC_MATMUL_DEQUANT_GEMM &&
        !is_only_dequantized(shape))
        plan_path(device, shape, tensor_path(device), limit_bytes, out);
    if (fits(out, limit_bytes))
        return QC_OK;
    if (out->workspace_bytes == UINT64_MAX)
        QC_FAIL(err, QC_ERR_USAGE, "the workspace would overflow 64 bits");
    QC_FAIL(err, QC_ERR_USAGE,
            "path %s needs a workspace of at least %" PRIu64 " bytes here, but %" PRIu64
            " are allowed",
            qc_matmul_path_name(out->path), out->workspace_bytes,
            limit_bytes == QC_MATMUL_NO_WORKSPACE ? 0 : limit_bytes);
}

uint64_t qc_matmul_plan_workspace(const qc_cuda_device *device, const qc_matmul_shape *shape,
                                  uint64_t max_m, qc_matmul_path path, uint64_t limit_bytes)
{
    /* Every m on which the number of splits may depend is tried. Above, what changes with m is
     * what grows with it, and the chunks of DEQUANT_GEMM: they depend on how many tiles of 128 rows
     * m has, so the last m of each such number is tried, up to where the weight is one chunk again
     * and stays one. What the call will bring is taken as it needs most. */
    const uint64_t step = 128, sms = device->multiprocessors ? device->multiprocessors : 1;
    uint64_t most = 0, tried = max_m < QC_MATMUL_SPLIT_ROWS ? max_m : QC_MATMUL_SPLIT_ROWS;
    uint64_t last = (2 * QC_CHUNK_WAVES * sms + 2) * step;
    last = max_m < last ? max_m : last;
    uint64_t steps = last > tried ? (last - tried) / step : 0;
    qc_matmul_shape s = *shape;
    s.x_dtype = QC_DTYPE_BF16; /* to be copied, with exponents */
    s.y_dtype = QC_DTYPE_F16;
    s.x_alignment = 2;
    s.ldx = s.k;
    s.has_epilogue = 1;
    for (uint64_t i = 1; i <= tried + steps + 1; i++) {
        qc_matmul_plan p;
        s.m = i <= tried ? i : i <= tried + steps ? tried + (i - tried) * step : max_m;
        if (qc_matmul_plan_make(device, &s, path, limit_bytes, &p, NULL) != QC_OK)
            return UINT64_MAX;
        if (p.workspace_bytes > most)
            most = p.workspace_bytes;
    }
    return most;
}

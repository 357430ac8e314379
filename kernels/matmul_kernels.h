/* For kernels/ only: what qc_matmul_run passes to the launchers, of which each path has one.
 * Launchers check only whether their launch worked: the plan is right. */
#ifndef QC_KERNELS_MATMUL_KERNELS_H
#define QC_KERNELS_MATMUL_KERNELS_H

#include "kernels/matmul_plan.h"
#include "quant/quant_form.h"

QC_C_BEGIN

/* What a kernel that cannot do its work writes to a call's fault word; it leaves y, or its partial
 * sums, as they were. */
#define QC_MATMUL_FAULT_SHARED  1u /* shared memory begins so late that the table has no room */
#define QC_MATMUL_FAULT_EXPERTS 2u /* offsets of experts, or their rows of x, are wrong */

/* Where finished sums go, and what is done to them before (qc_matmul_io). */
typedef struct {
    void *y;
    uint64_t ldy;
    const void *bias, *gate, *residual;
    uint64_t ldg, ldr;
    qc_dtype dtype; /* of all of them */
    qc_matmul_gate act;
} qc_matmul_output;

static inline const void *qc_matmul_16_at(const void *p, uint64_t index)
{
    return p ? (const uint16_t *)p + index : NULL;
}

/* The same from element [row, column] of y on. */
static inline qc_matmul_output qc_matmul_output_at(const qc_matmul_output *of, uint64_t row,
                                                   uint64_t column)
{
    qc_matmul_output o = *of;
    o.y = (uint16_t *)o.y + row * o.ldy + column;
    o.bias = qc_matmul_16_at(o.bias, column);
    o.gate = qc_matmul_16_at(o.gate, row * o.ldg + column);
    o.residual = qc_matmul_16_at(o.residual, row * o.ldr + column);
    return o;
}

typedef struct {
    qc_matmul_plan plan;
    qc_matmul_weights weights;
    uint64_t m, n, k;
    /* GEMV: x as the caller has it. MMA paths: float16 with 16-byte aligned rows, readable (zero)
     * up to plan.k_padded. x_exponent[m]: row m was multiplied by 2^x_exponent[m]; NULL: by 1. */
    const void *x;
    qc_dtype x_dtype;
    uint64_t ldx;
    const int *x_exponent;
    qc_matmul_output out;
    float *partials; /* [splits][m][n] where plan.splits > 1: raw sums, without exponents and
                           bias; qc_matmul_run reduces them after the launch */
    uint32_t *fault; /* NULL, or a word of pinned host memory that the handle owns: a kernel that
                           cannot do its work writes a QC_MATMUL_FAULT_ there, leaves y and the
                           workspace alone, and ends. NULL: the same without the word */
} qc_matmul_call;

/* Returns whether launches on this device may overlap. The kernels that run there must have the
 * wait, which only code compiled for compute_90 or newer has, and CUDA must be 12.3 at least, from
 * which on such launches can be captured into graphs. */
static inline int qc_matmul_overlaps(const qc_cuda_device *d)
{
    return d->code >= 90 && d->driver_version >= 12030 && d->runtime_version >= 12030;
}

/* c[0 .. count) are products that share x, m, k, the dtypes, the kind of weights and the plan,
 * which was made for all of them; each has its own weights, n, y, ldy, bias and partials. count: 1
 * to QC_MATMUL_GROUP_MOST. */
QC_NODISCARD qc_status qc_gemv_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                      qc_error *err);
QC_NODISCARD qc_status qc_mma884_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                        qc_error *err);
QC_NODISCARD qc_status qc_mma16816_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                          qc_error *err);
/* Does this for path MMA_16816, where qc_ring_takes says so. */
QC_NODISCARD qc_status qc_ring_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                      qc_error *err);
/* Does the same where qc_tiles_takes says so. */
QC_NODISCARD qc_status qc_tiles_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                       qc_error *err);
#ifdef QC_HAVE_WGMMA
/* x is the image (qc_matmul_image_launch). */
QC_NODISCARD qc_status qc_wgmma_launch(const qc_matmul_call *c, uint32_t count, qc_cuda_stream s,
                                       qc_error *err);
#endif
/* Turns partials into y: they are summed over plan.splits in order, scaled by 2^-(weights.exponent
 * + x_exponent) (NULL: 0), and finished (qc_finish). With splits 0 there are no partials, and the
 * sums are zero. */
QC_NODISCARD qc_status qc_matmul_reduce_launch(const qc_matmul_call *c, qc_cuda_stream s,
                                               qc_error *err);

/* Writes x of call c to out as float16 rows of c->plan.k_padded elements, zero beyond K. BF16: each
 * row is multiplied by the power of two that brings its largest finite element to [2^14, 2^15),
 * whose exponent goes to exponents[m]. F16: as it is, exponents not touched. */
QC_NODISCARD qc_status qc_matmul_input_launch(const qc_matmul_call *c, uint16_t *out,
                                              int *exponents, qc_cuda_stream s, qc_error *err);

/* The same for matmul_wgmma.cu: out is the image of what shared memory gets, [tile of
 * plan.image_rows rows][64 of k][8 columns][row of the tile][8 elements], zero where there is no
 * row. Column 2 j + h of 64 k has the elements 16 t + 4 j + 2 h + e as its 2 t + e. */
QC_NODISCARD qc_status qc_matmul_image_launch(const qc_matmul_call *c, uint16_t *out,
                                              int *exponents, qc_cuda_stream s, qc_error *err);

/* Writes to prepared (256 bytes) the exponent, then 2^-exponent, 0 and 1 as floats
 * (qc_matmul_weights). */
QC_NODISCARD qc_status qc_matmul_exponent_launch(const qc_weights *w, int *prepared,
                                                 qc_cuda_stream s, qc_error *err);
/* Copies rows of codes to rows of row_bytes, a multiple of 16, with zeros behind the last code. */
QC_NODISCARD qc_status qc_matmul_repack_launch(const qc_weights *w, uint64_t row_bytes, void *out,
                                               qc_cuda_stream s, qc_error *err);

/* Makes dense rows of a repacked weight, equal to those that qc_cuda_dequantize makes of the file's
 * codes: dst [rows][ld] F16 or BF16, ld a multiple of 32 and at least K rounded up to that; zero
 * beyond K. rows: at least 1. exponent: NULL or as there. */
QC_NODISCARD qc_status qc_matmul_dense_rows_launch(const qc_matmul_weights *w, uint64_t first_row,
                                                   uint64_t rows, void *dst, qc_dtype dst_dtype,
                                                   uint64_t ld, const int *exponent,
                                                   qc_cuda_stream s, qc_error *err);

/* Does what qc_matmul_reference does with arguments that were checked. */
QC_NODISCARD qc_status qc_matmul_reference_launch(const qc_matmul_exact *e, qc_cuda_stream s,
                                                  qc_error *err);

/* Returns whether blocks of 64 columns of W are such blocks of the whole weight, too, and can be
 * numbered there with 32 bits. */
static inline int qc_matmul_by_64(const qc_matmul_shape *s)
{
    const uint64_t ld = s->ldw ? s->ldw : s->k;
    return s->k && s->k % 64 == 0 && ld % 64 == 0 && !s->inside_64 &&
           s->n <= UINT32_MAX / (ld / 64) && s->n * (ld / 64) + s->first_most / 64 <= UINT32_MAX;
}

/* Returns how many tiles of n_tile rows of W there are: those of one weight do not reach into the
 * next. */
static inline uint64_t qc_matmul_tiles(const qc_matmul_shape *s, uint32_t n_tile)
{
    uint64_t tiles = 0;
    if (s->parts == 0)
        return s->n / n_tile + (s->n % n_tile != 0);
    for (uint32_t i = 0; i < s->parts; i++)
        tiles += s->part_n[i] / n_tile + (s->part_n[i] % n_tile != 0);
    return tiles;
}

/* Tiles and shared memory of the tensor-core kernels for a plan. These are pure host functions
 * beside their kernels; qc_matmul_plan_make calls them after path, run and the shape are decided.
 * They set m_tile, n_tile, threads, splits, split_k and shared_bytes. */
void qc_gemv_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);
void qc_mma884_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);
void qc_mma16816_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);
/* Returns whether matmul_tiles.cu has a kernel for it; of the plan, only run is looked at. */
int qc_tiles_takes(const qc_cuda_device *d, const qc_matmul_shape *s, const qc_matmul_plan *p);
void qc_tiles_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);

/* Shares the tiles of a plan out to blocks of threads, in steps of 128 k that cost so many clocks:
 * sets splits, split_k and worker_k. For matmul_tiles.cu and matmul_wgmma.cu. */
void qc_tiles_share_out(const qc_cuda_device *d, const qc_matmul_shape *s, double clocks,
                        qc_matmul_plan *p);

/* Returns whether matmul_wgmma.cu has a kernel for it, and completes its plan. Without
 * QC_HAVE_WGMMA it was not built, and there is none. */
#ifdef QC_HAVE_WGMMA
int qc_wgmma_takes(const qc_cuda_device *d, const qc_matmul_shape *s, const qc_matmul_plan *p);
void qc_wgmma_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);
#else
#define qc_wgmma_takes(device, shape, plan)     ((void)(device), (void)(shape), (void)(plan), 0)
#define qc_wgmma_configure(device, shape, plan) ((void)(device), (void)(shape), (void)(plan))
#define qc_wgmma_launch(calls, count, stream, err)                                                 \
    ((void)(calls), (void)(count), (void)(stream),                                                 \
     QC_ERROR(err, QC_ERR_INTERNAL, "matmul_wgmma.cu was not built"))
#endif

/* Returns whether matmul_ring.cu has a kernel for it, and completes its plan; aligned is set in p.
 * blocks: 0, or how many to use at most. */
int qc_ring_takes(const qc_cuda_device *d, const qc_matmul_shape *s, const qc_matmul_plan *p);
void qc_ring_configure(const qc_cuda_device *d, const qc_matmul_shape *s, qc_matmul_plan *p);

QC_C_END
#endif

/* What all tables of qc_matmul_ops share: see matmul_internal.h. */
#include "quant/matmul_internal.h"

#include "base/checked.h"
#include "quant/quant_half.h"
#include "quant/quant_internal.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define PANEL_BYTES (1024u << 10)
#define LINE_BYTES  64u

const qc_matmul_ops *qc_matmul_ops_for(qc_isa isa)
{
    return QC_TABLE_FOR(isa, qc_matmul_ops);
}

/* ---- float tables --------------------------------------------------------------------------- */

static uint64_t padded(uint64_t k)
{
    return (k + 15) / 16 * 16;
}

/* Returns how many rows are decoded together: as many as fill half of a second-level cache of 2
 * MiB, or go by from a third-level one. */
static uint64_t panel_rows(uint64_t k)
{
    uint64_t rows = PANEL_BYTES / sizeof(float) / (padded(k) ? padded(k) : 1);
    rows = rows / QC_MATMUL_ROWS * QC_MATMUL_ROWS;
    return rows < QC_MATMUL_ROWS ? QC_MATMUL_ROWS : rows > QC_MATMUL_PANEL ? QC_MATMUL_PANEL : rows;
}

#define PACKED_FLOATS ((uint64_t)QC_MATMUL_GROUP * QC_MATMUL_STEP)
#define LANES_FLOATS  ((uint64_t)QC_MATMUL_PANEL * QC_MATMUL_GROUP * QC_LANES)

uint64_t qc_matmul_cpu_scratch_bytes(uint64_t m, uint64_t k)
{
    (void)m;
    /* padded(k) * panel_rows(k) would not do, because it falls where fewer whole rows fill the
     * cache less. */
    const uint64_t most = qc_sat_mul(padded(k), QC_MATMUL_PANEL);
    const uint64_t least = qc_sat_mul(padded(k), QC_MATMUL_ROWS);
    const uint64_t full = least > PANEL_BYTES / sizeof(float) ? least : PANEL_BYTES / sizeof(float);
    const uint64_t floats = qc_sat_add(most < full ? most : full, PACKED_FLOATS + LANES_FLOATS);
    return qc_sat_mul(floats, sizeof(float));
}

static const unsigned char *element(const void *base, qc_dtype dtype, uint64_t i)
{
    return (const unsigned char *)base + i * (qc_dtype_bits(dtype) / 8);
}

/* Stores a sum as F16 or BF16. */
static void store(void *y, qc_dtype dtype, uint64_t i, float sum)
{
    uint16_t h = dtype == QC_DTYPE_F16 ? qc_f16_from_f32(sum) : qc_bf16_from_f32(sum);
    memcpy((unsigned char *)y + i * sizeof h, &h, sizeof h);
}

/* A panel in scratch: its weights, a step of a group of x as floats, and lanes between steps. */
typedef struct {
    const qc_matmul_ops *ops;
    uint64_t k, stride;
    float *values, *x, *lanes;
    float sums[QC_MATMUL_PANEL * QC_MATMUL_GROUP];
} panel;

/* Packs rows [at, at + m) of x, columns [from, from + n). */
static void pack(const panel *p, const qc_matmul_cpu_io *io, uint64_t at, unsigned m, uint64_t from,
                 uint64_t n)
{
    uint64_t overflow = 0;
    for (unsigned i = 0; i < m; i++)
        p->ops->quant->cast(element(io->x, io->x_dtype, (at + i) * io->ldx + from), io->x_dtype, n,
                            p->x + i * QC_MATMUL_STEP, QC_DTYPE_F32, &overflow);
}

/* Prefetches what pack will take next while tiles are at work: row i of the step at `from`. */
static void fetch_ahead(const panel *p, const qc_matmul_cpu_io *io, uint64_t row, uint64_t from)
{
    uint64_t left = p->k - from, each = qc_dtype_bits(io->x_dtype) / 8;
    uint64_t bytes = (left < QC_MATMUL_STEP ? left : QC_MATMUL_STEP) * each;
    const unsigned char *at = element(io->x, io->x_dtype, row * io->ldx + from);
    for (uint64_t b = 0; b < bytes; b += LINE_BYTES)
        __builtin_prefetch(at + b, 0, 2);
}

static void store_sums(panel *p, const qc_matmul_cpu_io *io, uint64_t at, unsigned m,
                       uint64_t first, uint64_t rows)
{
    const float quiet = qc_f32_of_bits(0x7fc00000u);
    for (unsigned i = 0; i < m; i++) {
        float *sums = p->sums + i * QC_MATMUL_PANEL;
        uint64_t to = (at + i) * io->ldy + first;
        for (uint64_t r = 0; io->bias && r < rows; r++)
            sums[r] += io->bias[first + r];
        for (uint64_t r = 0; r < rows; r++)
            sums[r] = isnan(sums[r]) ? quiet : sums[r];
        if (io->y_dtype == QC_DTYPE_F32)
            memcpy((unsigned char *)io->y + to * sizeof *sums, sums, (size_t)rows * sizeof *sums);
        else
            for (uint64_t r = 0; r < rows; r++)
                store(io->y, io->y_dtype, to + r, sums[r]);
    }
}

/* Computes outputs [first, first + rows), whose weights are in the panel. */
static void multiply(panel *p, uint64_t first, uint64_t rows, const qc_matmul_cpu_io *io)
{
    const unsigned group = p->ops->group;
    for (uint64_t at = 0; at < io->m; at += group) {
        unsigned m = io->m - at < group ? (unsigned)(io->m - at) : group;
        uint64_t from = 0;
        do {
            uint64_t n = p->k - from < QC_MATMUL_STEP ? p->k - from : QC_MATMUL_STEP;
            uint64_t ahead = from + n < p->k ? at : at + group;
            uint64_t end = io->m - ahead < group ? io->m : ahead + group;
            uint64_t each = qc_ceil_div_u64((uint64_t)group * QC_MATMUL_ROWS, rows);
            end = ahead < io->m ? end : ahead;
            pack(p, io, at, m, from, n);
            for (uint64_t r = 0; r < rows; r += QC_MATMUL_ROWS) {
                uint64_t left = rows - r;
                const qc_matmul_tile t = {.w = p->values + r * p->stride + from,
                                          .stride = p->stride,
                                          .rows = left < QC_MATMUL_ROWS ? (unsigned)left
                                                                        : QC_MATMUL_ROWS,
                                          .x = p->x,
                                          .m = m,
                                          .k = (unsigned)n,
                                          .lanes = p->lanes + r * QC_MATMUL_GROUP * QC_LANES,
                                          .is_first = from == 0,
                                          .is_last = from + n == p->k,
                                          .sums = p->sums + r};
                for (uint64_t a = 0; a < each && ahead < end; a++, ahead++)
                    fetch_ahead(p, io, ahead, from + n < p->k ? from + n : 0);
                p->ops->tile(&t);
            }
            from += n;
        } while (from < p->k);
        store_sums(p, io, at, m, first, rows);
    }
}

/* Multiplies by rows [first, first + count) of w, or of `dense` [rows, k] where w is NULL. */
static void multiply_rows(const qc_matmul_ops *ops, const qc_weights *w, const void *dense,
                          qc_dtype dtype, uint64_t k, uint64_t first, uint64_t count,
                          const qc_matmul_cpu_io *io, void *scratch)
{
    panel p; /* its sums are not set */
    uint64_t step = panel_rows(k), overflow = 0;
    p.ops = ops;
    p.k = k;
    p.stride = padded(k);
    p.x = scratch;
    p.lanes = p.x + PACKED_FLOATS;
    p.values = p.lanes + LANES_FLOATS;
    for (uint64_t at = 0; at < count; at += step) {
        uint64_t rows = qc_min_u64(count - at, step);
        for (uint64_t r = 0; r < rows; r++)
            if (w)
                qc_weights_row(ops->quant, w, first + at + r, p.values + r * p.stride);
            else
                ops->quant->cast(element(dense, dtype, (first + at + r) * k), dtype, k,
                                 p.values + r * p.stride, QC_DTYPE_F32, &overflow);
        multiply(&p, first + at, rows, io);
    }
}

void qc_matmul_cpu_quantized(const qc_matmul_ops *ops, const qc_weights *w, uint64_t first,
                             uint64_t count, const qc_matmul_cpu_io *io, void *scratch)
{
    multiply_rows(ops, w, NULL, QC_DTYPE_F32, w->form.cols, first, count, io, scratch);
}

void qc_matmul_cpu_dense(const qc_matmul_ops *ops, const void *w, qc_dtype w_dtype, uint64_t k,
                         uint64_t first, uint64_t count, const qc_matmul_cpu_io *io, void *scratch)
{
    multiply_rows(ops, NULL, w, w_dtype, k, first, count, io, scratch);
}

/* ---- in double ------------------------------------------------------------------------------ */

static float widened(const void *base, qc_dtype dtype, uint64_t i)
{
    const unsigned char *at = element(base, dtype, i);
    float f = 0.0f;
    uint16_t h = 0;
    if (dtype == QC_DTYPE_F32) {
        memcpy(&f, at, sizeof f);
        return f;
    }
    memcpy(&h, at, sizeof h);
    return dtype == QC_DTYPE_F16 ? qc_f32_from_f16(h) : qc_f32_from_bf16(h);
}

void qc_matmul_double_pack(const void *x, qc_dtype x_dtype, uint64_t m, uint64_t ldx, uint64_t k,
                           double *packed)
{
    for (uint64_t first = 0; first < m; first += QC_MATMUL_PACK_ROWS)
        for (uint64_t i = 0; i < k; i++)
            for (uint64_t l = 0; l < QC_MATMUL_PACK_ROWS; l++)
                *packed++ =
                    first + l < m ? (double)widened(x, x_dtype, (first + l) * ldx + i) : 0.0;
}

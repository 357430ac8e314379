/* A weight on the device: what quant/error_feedback_rows.c does, all rows of a piece at a time.
 *
 * There are three [rows, n] matrices of floats: T, E, and a spare one that holds W (with C, where T
 * is not W), then E by places, then units of codes. Beside them are the codes, a byte each, and
 * [rows, 1024] floats: 13 n + 4,400 bytes a row, 0.9 GB for 8,192 x 8,192.
 *
 * Products go by supers of 512 columns: E H (or E U) of a super is one product with what lies
 * outside, and within it panels of 64 pass on their changes to the rest. So for rows = n = 8192 a
 * sweep reads E 16 times instead of 128 (4.3 GB instead of 34) and reads and writes the super's
 * remainder on the way (3.8 GB); feedback reads E 8 times instead of 64 (2.1 GB instead of 17) and
 * the same remainder. Arithmetic grows by 256 / n (3 %).
 *
 * Calculated, not measured: rows = n = 8192 on an H100 (SXM: 67 TFLOP/s of floats, of which cuBLAS
 * is taken to reach 50; 3.3 TB/s), milliseconds:
 *
 *     target (2 n a weight)   22      traces (3 x n)   33
 *     feedback (n)            11      a sweep (2 n)    22
 *     panels: 128 x (walk 5 us, load and store 10 MB 3 us, units, v and refit 15 us): 1 and 3
 *     upload of 16-bit weights at 20 GB/s: 7
 *
 * So a weight with C and four sweeps takes 0.18 s, of which products are 0.15. */
#include "kernels/cuda_feedback_job.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/workers.h"
#include "quant/quant_internal.h"

#include <inttypes.h>
#include <string.h>

#define SUPER QC_CUDA_SUPER
#define PANEL QC_CUDA_PANEL

typedef qc_cuda_feedback_parts parts;
typedef qc_cuda_feedback_job job;
typedef qc_cuda_factor factor;
typedef qc_cuda_stretch stretch;

/* ---- memory ---- */

static uint64_t block_elems(const qc_form *form, uint64_t n)
{
    return qc_form_by_rows(form) ? n : form->block_elems;
}

/* Returns the least number whose product with n is a multiple of the power of two. */
static uint64_t least_factor(uint64_t power_of_two, uint64_t n)
{
    const uint64_t shared = n & (~n + 1); /* the power of two in n */
    return shared >= power_of_two ? 1 : power_of_two / shared;
}

/* Returns a number of rows whose multiples begin a block, a group, a byte of codes, and a block of
 * G unless that has all rows. */
static uint64_t unit_rows(const qc_form *form, uint64_t rows, uint64_t n, uint64_t block)
{
    const uint64_t elems = qc_form_by_rows(form) ? form->ops->bits == 4 ? 2 : 1
                           : form->nested        ? (uint64_t)form->block_elems * QC_NESTED_BLOCK
                                                 : form->block_elems;
    const uint64_t least = least_factor(elems, n);
    if (block == 0)
        return least;
    return block >= rows ? rows : qc_sat_mul(least_factor(least, block), block);
}

/* Cuts off the next `bytes`; *at grows by them. */
static void *cut(unsigned char *base, uint64_t *at, uint64_t bytes)
{
    void *p = base ? base + *at : NULL;
    *at = qc_sat_add(*at, qc_sat_mul(qc_ceil_div_u64(bytes, 256), 256));
    return p;
}

/* Lays out the arrays of a piece of so many rows at base, or only counts their bytes where base is
 * NULL. */
static uint64_t lay_out(parts *d, unsigned char *base, uint64_t rows, uint64_t n,
                        const qc_form *form, uint64_t block)
{
    const uint64_t elems = qc_sat_mul(rows, n), floats = qc_sat_mul(elems, 4);
    const uint64_t blocks = qc_ceil_div_u64(elems, block_elems(form, n));
    uint64_t at = 0;
    d->target = cut(base, &at, floats);
    d->e = cut(base, &at, floats);
    d->spare = cut(base, &at, floats);
    d->codes = cut(base, &at, elems);
    d->g = cut(base, &at, qc_sat_mul(rows, SUPER * 4));
    d->v = cut(base, &at, qc_sat_mul(rows, SUPER * 4));
    d->less = cut(base, &at, qc_sat_mul(rows, PANEL * 4));
    d->square = cut(base, &at, SUPER * SUPER * 4);
    d->absmax = cut(base, &at, qc_sat_mul(blocks, 4));
    d->from_absmax = cut(base, &at, qc_sat_mul(blocks, 4));
    d->absmax_codes = cut(base, &at, blocks);
    d->nested_absmax = cut(base, &at, qc_sat_mul(qc_ceil_div_u64(blocks, QC_NESTED_BLOCK), 4));
    d->map = cut(base, &at, 256 * 4);
    d->traces = cut(base, &at, qc_sat_mul(rows, block ? 6 * 8 : 3 * 8));
    d->sums = cut(base, &at, qc_sat_mul(rows, 2 * 8));
    d->changed = cut(base, &at, 8);
    d->bad = cut(base, &at, 8);
    if (block > 0) {
        const uint64_t unit = qc_min_u64(block, rows), units = qc_ceil_div_u64(rows, unit);
        const uint64_t flags = qc_ceil_div_u64(unit, QC_CUDA_OUTPUTS_CHUNK);
        d->outputs = cut(base, &at, qc_sat_mul(qc_sat_mul(qc_sat_mul(units, unit), block), 4));
        d->moved = cut(base, &at, qc_sat_mul(units, flags * 4));
        d->unit_counts = cut(base, &at, qc_sat_mul(units, 2 * 8));
    }
    return at;
}

uint64_t qc_cuda_feedback_weight_bytes(uint64_t rows, uint64_t n, const qc_form *form,
                                       uint64_t block)
{
    parts d;
    return rows == 0 || n == 0 ? 0 : lay_out(&d, NULL, rows, n, form, block);
}

uint64_t qc_cuda_feedback_weight_least_bytes(uint64_t rows, uint64_t n, const qc_form *form,
                                             uint64_t block)
{
    const uint64_t unit = n == 0 ? 0 : unit_rows(form, rows, n, block);
    return qc_cuda_feedback_weight_bytes(unit < rows ? unit : rows, n, form, block);
}

/* Returns the rows of a piece of at most `limit` bytes, or the fewest there can be. */
static uint64_t piece_rows(const job *j, uint64_t limit)
{
    const uint64_t block = j->g ? j->g->block : 0;
    const uint64_t unit = unit_rows(j->form, j->rows, j->n, block);
    const uint64_t units = qc_ceil_div_u64(j->rows, unit);
    uint64_t low = 1, high = units; /* low fits, or is the fewest */
    while (low < high) {
        const uint64_t middle = low + (high - low + 1) / 2;
        const uint64_t rows = qc_min_u64(qc_sat_mul(middle, unit), j->rows);
        if (qc_cuda_feedback_weight_bytes(rows, j->n, j->form, block) <= limit)
            low = middle;
        else
            high = middle - 1;
    }
    return qc_min_u64(qc_sat_mul(low, unit), j->rows);
}

/* ---- traces ---- */

/* Adds the diagonal of x H x^T to traces[which], and that of G x H x^T to traces[3 + which]. */
static qc_status trace(const job *j, const float *x, unsigned which, qc_error *err)
{
    const uint64_t n = j->n;
    for (uint64_t col = 0; col < n; col += SUPER) {
        const stretch s = {col, n - col < SUPER ? n - col : SUPER};
        const qc_cuda_strip g = {j->d.g, SUPER}, own = {x + col, n};
        QC_TRY(qc_cuda_piece_times_h(j, x, 0, col + s.cols, s, 2.0, j->d.g, err));
        QC_TRY(qc_cuda_rows_dot(&g, &own, j->count, s.cols, j->d.traces + which * j->most,
                                j->f->tools.stream, err));
        if (!j->g)
            continue;
        const qc_cuda_strip both = {j->d.v, SUPER};
        QC_TRY(qc_cuda_outputs_multiply(j, own, s.cols, j->d.v, SUPER, 0, err));
        QC_TRY(qc_cuda_rows_dot(&g, &both, j->count, s.cols, j->d.traces + (3 + which) * j->most,
                                j->f->tools.stream, err));
    }
    return QC_OK;
}

static qc_status clear_traces(const job *j, qc_error *err)
{
    return qc_cuda_fill(j->d.traces, 0, j->most * j->kinds * 8, j->f->tools.stream, err);
}

/* ---- feedback ---- */

static qc_status feed(const job *j, qc_error *err)
{
    const uint64_t n = j->n, panel = j->wide < PANEL ? j->wide : PANEL;
    const float *hu = j->f->hu;
    for (uint64_t col = 0; col < n; col += SUPER) {
        const uint64_t cols = n - col < SUPER ? n - col : SUPER;
        QC_TRY(qc_cuda_piece_multiply(j, (qc_cuda_strip){j->d.spare, n},
                                      (factor){{hu + col * n, n}, 1, col, cols}, j->d.g, SUPER, 1.0,
                                      0.0, err));
        for (uint64_t at = 0; at < cols; at += panel) {
            const uint64_t width = cols - at < panel ? cols - at : panel, behind = at + width;
            const qc_cuda_rows_panel a = {.col = col + at,
                                          .cols = width,
                                          .g = col + at > 0 ? j->d.g + at : NULL,
                                          .ldg = SUPER,
                                          .by_place = j->d.spare};
            QC_TRY(qc_check_interrupted(err));
            QC_TRY(qc_cuda_rows_feed(&j->r, &a, j->f->tools.stream, err));
            /* in the first super nothing was there yet */
            QC_TRY(qc_cuda_piece_multiply(
                j, (qc_cuda_strip){j->d.spare + col + at, n},
                (factor){{hu + (col + behind) * n + col + at, n}, 1, width, cols - behind},
                j->d.g + behind, SUPER, 1.0, col + at > 0, err));
        }
    }
    return QC_OK;
}

/* ---- sweeps ---- */

/* Sets the codes of columns [col, col + cols) by panels. d.g + (col - super) has E H of them,
 * d.square the square of H from super on, rows `ld` apart. */
static qc_status sweep_panels(const job *j, uint64_t super, uint64_t ld, uint64_t col,
                              uint64_t cols, qc_error *err)
{
    for (uint64_t at = col; at < col + cols; at += PANEL) {
        const uint64_t left = col + cols - at, width = left < PANEL ? left : PANEL;
        const uint64_t here = at - super, behind = here + width;
        const qc_cuda_rows_panel a = {
            .col = at, .cols = width, .g = j->d.g + here, .ldg = SUPER, .less = j->d.less};
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_cuda_rows_sweep(&j->r, &a, j->f->tools.stream, err));
        QC_TRY(qc_cuda_piece_pass_on(
            j, (factor){{j->d.square + here * ld + behind, ld}, 0, width, left - width}, behind,
            err));
    }
    return QC_OK;
}

/* Sweeps columns of blocks that are no wider than a panel: E H is made once for all of them, then
 * scale and codes of one block after the other, and their changes are passed on. */
static qc_status sweep_narrow(const job *j, uint64_t super, uint64_t cols, qc_error *err)
{
    const parts *d = &j->d;
    qc_cuda_stream s = j->f->tools.stream;
    QC_TRY(qc_cuda_piece_times_h(j, d->e, 0, j->n, (stretch){super, cols}, 1.0, d->g, err));
    for (uint64_t at = 0; at < cols; at += j->wide) {
        const uint64_t width = cols - at < j->wide ? cols - at : j->wide, behind = at + width;
        const qc_cuda_rows_panel a = {.col = super + at,
                                      .cols = width,
                                      .g = d->g + at,
                                      .ldg = SUPER,
                                      .less = d->less,
                                      .before = j->aligned};
        QC_TRY(qc_check_interrupted(err));
        if (j->aligned) {
            const qc_cuda_rows_refit_args refit = {.col = super + at,
                                                   .cols = width,
                                                   .at = super + at,
                                                   .width = width,
                                                   .first = 1,
                                                   .last = 1,
                                                   .units = d->spare,
                                                   .v = d->v,
                                                   .g = d->g + at,
                                                   .ldu = width,
                                                   .ldv = width,
                                                   .ldg = SUPER,
                                                   .sums = d->sums,
                                                   .before = d->less};
            QC_TRY(qc_cuda_rows_units(&j->r, super + at, width, d->spare, width, s, err));
            QC_TRY(qc_cuda_piece_multiply(
                j, (qc_cuda_strip){d->spare, width},
                (factor){{d->square + at * cols + at, cols}, 0, width, width}, d->v, width, 1.0,
                0.0, err));
            QC_TRY(qc_cuda_rows_refit(&j->r, &refit, s, err));
        }
        QC_TRY(qc_cuda_rows_sweep(&j->r, &a, s, err));
        QC_TRY(qc_cuda_piece_pass_on(
            j, (factor){{d->square + at * cols + behind, cols}, 0, width, cols - behind}, behind,
            err));
    }
    return QC_OK;
}

/* Sweeps a block wider than a panel, or the stretch of one that lies in a row: sets its scale over
 * its whole width, then its codes. */
static qc_status sweep_wide(const job *j, uint64_t col, uint64_t cols, qc_error *err)
{
    const parts *d = &j->d;
    const uint64_t n = j->n, end = col + cols;
    qc_cuda_stream s = j->f->tools.stream;
    QC_TRY(qc_cuda_rows_units(&j->r, col, cols, d->spare + col, n, s, err));
    for (uint64_t at = col; at < end; at += SUPER) {
        const uint64_t width = end - at < SUPER ? end - at : SUPER;
        const qc_cuda_rows_refit_args refit = {.col = col,
                                               .cols = cols,
                                               .at = at,
                                               .width = width,
                                               .first = at == col,
                                               .last = at + width == end,
                                               .units = d->spare + at,
                                               .v = d->v,
                                               .g = d->g,
                                               .ldu = n,
                                               .ldv = SUPER,
                                               .ldg = SUPER,
                                               .sums = d->sums};
        QC_TRY(qc_check_interrupted(err));
        QC_TRY(qc_cuda_piece_times_h(j, d->e, 0, n, (stretch){at, width}, 1.0, d->g, err));
        QC_TRY(qc_cuda_piece_times_h(j, d->spare, col, end, (stretch){at, width}, 1.0, d->v, err));
        QC_TRY(qc_cuda_rows_refit(&j->r, &refit, s, err));
    }
    if (cols <= SUPER) /* g was kept true */
        return sweep_panels(j, col, cols, col, cols, err);
    for (uint64_t at = col; at < end; at += SUPER) {
        const uint64_t width = end - at < SUPER ? end - at : SUPER;
        QC_TRY(qc_cuda_piece_times_h(j, d->e, 0, n, (stretch){at, width}, 1.0, d->g, err));
        QC_TRY(sweep_panels(j, at, width, at, width, err));
    }
    return QC_OK;
}

/* Sweeps the piece once. *changed is 0 where nothing was changed. */
static qc_status sweep(const job *j, unsigned long long *changed, qc_error *err)
{
    const uint64_t n = j->n, each = j->wide > PANEL ? j->wide : SUPER;
    qc_cuda_stream s = j->f->tools.stream;
    QC_TRY(qc_cuda_fill(j->d.changed, 0, 8, s, err));
    for (uint64_t col = 0; col < n; col += each) {
        const uint64_t cols = n - col < each ? n - col : each;
        if (j->wide > PANEL)
            QC_TRY(sweep_wide(j, col, cols, err));
        else
            QC_TRY(sweep_narrow(j, col, cols, err));
    }
    QC_TRY(qc_cuda_to_host(changed, j->d.changed, 8, s, err));
    return qc_cuda_stream_synchronize(s, err);
}

/* ---- pieces ---- */

static void choose(job *j, uint64_t first)
{
    const uint64_t each = block_elems(j->form, j->n);
    j->first = first;
    j->count = j->rows - first < j->most ? j->rows - first : j->most;
    j->block = first * j->n / each;
    j->blocks = qc_ceil_div_u64(j->count * j->n, each);
    j->r = (qc_cuda_rows){.form = qc_cuda_form_of(j->form),
                          .rows = j->count,
                          .n = j->n,
                          .shift = j->shift,
                          .hu = j->f->hu,
                          .order = j->f->order,
                          .inverse = j->f->inverse,
                          .target = j->d.target,
                          .e = j->d.e,
                          .codes = j->d.codes,
                          .absmax = j->d.absmax,
                          .from_absmax = j->d.from_absmax,
                          .absmax_codes = j->form->nested ? j->d.absmax_codes : NULL,
                          .nested_absmax = j->d.nested_absmax,
                          .map = j->d.map,
                          .changed = j->d.changed};
}

static float *plain_weight(const job *j)
{
    return j->f->m ? j->d.spare : j->d.target;
}

/* Loads W and T of the piece. */
static qc_status load(const job *j, qc_error *err)
{
    const uint64_t n = j->n, elems = j->count * n, size = qc_dtype_bits(j->dtype) / 8;
    float *w = plain_weight(j);
    void *raw = j->dtype == QC_DTYPE_F32 ? (void *)w : (void *)j->d.e;
    qc_cuda_stream s = j->f->tools.stream;
    uint64_t bad = 0;
    QC_TRY(qc_check_interrupted(err));
    QC_TRY(qc_cuda_fill(j->d.bad, 0xff, 8, s, err));
    QC_TRY(qc_cuda_to_device(raw, j->w + j->first * n * size, elems * size, s, err));
    QC_TRY(qc_cuda_rows_cast(raw, j->dtype, elems, w, j->d.bad, s, err));
    QC_TRY(qc_cuda_to_host(&bad, j->d.bad, 8, s, err));
    QC_TRY(qc_cuda_stream_synchronize(s, err));
    if (bad != UINT64_MAX)
        QC_FAIL(err, QC_ERR_NONFINITE,
                "the weight in row %" PRIu64 ", column %" PRIu64 " is not finite",
                j->first + bad / n, bad % n);
    if (j->g)
        QC_TRY(qc_cuda_outputs_take(j, err));
    if (j->f->m)
        QC_TRY(qc_cuda_piece_multiply(j, (qc_cuda_strip){w, n}, (factor){{j->f->m, n}, 1, n, n},
                                      j->d.target, n, 1.0, 0.0, err));
    return QC_OK;
}

static qc_cuda_feedback_scales scales_of(const job *j, const float *x, const float *weights)
{
    return (qc_cuda_feedback_scales){.form = j->form,
                                     .x = x,
                                     .weights = weights,
                                     .rows = j->count,
                                     .absmax = j->d.absmax,
                                     .codes = j->d.absmax_codes,
                                     .nested_absmax = j->d.nested_absmax,
                                     .map = j->d.map,
                                     .offset = j->out->nested_offset};
}

/* Finds the scales before double quantization, and copies them to the host as well. */
static qc_status find(const job *j, const float *x, const float *weights, qc_error *err)
{
    qc_cuda_stream s = j->f->tools.stream;
    const qc_cuda_feedback_scales a = scales_of(j, x, weights);
    QC_TRY(qc_cuda_feedback_find(j->f, &a, err));
    QC_TRY(qc_cuda_to_host(j->out->absmax + j->block, j->d.absmax, j->blocks * 4, s, err));
    return qc_cuda_stream_synchronize(s, err);
}

/* Turns the scales that were found, on the host, into those that a reader has, on the device. */
static qc_status settle(job *j, const float *x, const float *weights, qc_error *err)
{
    qc_feedback_out *o = j->out;
    qc_cuda_stream s = j->f->tools.stream;
    QC_TRY(qc_cuda_to_device(j->d.absmax, o->absmax + j->block, j->blocks * 4, s, err));
    if (!j->form->nested)
        return qc_cuda_rows_invert(&j->r, j->blocks, s, err);
    const uint64_t group = j->block / QC_NESTED_BLOCK;
    j->r.offset = o->nested_offset;
    qc_quant_ops_scalar.nested_quantize(o->absmax + j->block, j->blocks, o->nested_offset,
                                        o->absmax_codes + j->block, o->nested_absmax + group);
    QC_TRY(qc_cuda_to_device(j->d.absmax_codes, o->absmax_codes + j->block, j->blocks, s, err));
    QC_TRY(qc_cuda_to_device(j->d.nested_absmax, o->nested_absmax + group,
                             qc_ceil_div_u64(j->blocks, QC_NESTED_BLOCK) * 4, s, err));
    const qc_cuda_feedback_scales a = scales_of(j, x, weights);
    QC_TRY(qc_cuda_feedback_nest(j->f, &a, err));
    return qc_cuda_rows_invert(&j->r, j->blocks, s, err);
}

/* Adds up row by row, in order. */
static qc_status add_traces(job *j, unsigned from, unsigned to, qc_error *err)
{
    qc_cuda_stream s = j->f->tools.stream;
    QC_TRY(qc_cuda_to_host(j->host_traces, j->d.traces, j->most * j->kinds * 8, s, err));
    QC_TRY(qc_cuda_stream_synchronize(s, err));
    for (unsigned k = from; k < to; k++)
        for (uint64_t r = 0; r < j->count; r++) {
            j->sums[k] += j->host_traces[k * j->most + r];
            if (j->g)
                j->sums[3 + k] +=
                    j->host_traces[(3 + k) * j->most + r] * qc_cuda_outputs_inverse(j, r);
        }
    return QC_OK;
}

/* Sets the codes nearest to W, their error with T, and the scales of T. */
static qc_status rounded(job *j, qc_error *err)
{
    const float *w = plain_weight(j);
    QC_TRY(settle(j, w, NULL, err));
    QC_TRY(qc_cuda_rows_round(&j->r, w, j->f->tools.stream, err));
    QC_TRY(clear_traces(j, err));
    QC_TRY(trace(j, j->d.e, 0, err));
    QC_TRY(trace(j, j->d.target, 1, err));
    QC_TRY(add_traces(j, 0, 2, err));
    return find(j, j->d.target, j->f->d, err);
}

static qc_status calibrated(job *j, qc_error *err)
{
    qc_feedback_out *o = j->out;
    qc_cuda_stream s = j->f->tools.stream;
    const uint64_t elems = j->count * j->n;
    uint8_t *packed = (uint8_t *)j->d.spare;
    unsigned long long changed = 1;
    QC_TRY(settle(j, j->d.target, j->f->d, err));
    QC_TRY(feed(j, err));
    if (j->g)
        QC_TRY(qc_cuda_outputs_sweeps(j, err));
    for (unsigned i = 0; !j->g && i < j->f->options.sweeps && changed; i++)
        QC_TRY(sweep(j, &changed, err));
    QC_TRY(clear_traces(j, err));
    QC_TRY(trace(j, j->d.e, 2, err));
    QC_TRY(qc_cuda_rows_pack(j->form, j->d.codes, elems, packed, s, err));
    QC_TRY(qc_cuda_to_host((uint8_t *)o->codes + qc_form_code_bytes(j->form, j->first * j->n),
                           packed, qc_form_code_bytes(j->form, elems), s, err));
    QC_TRY(qc_cuda_to_host(o->absmax + j->block, j->d.absmax, j->blocks * 4, s, err));
    if (j->form->nested)
        QC_TRY(qc_cuda_to_host(o->absmax_codes + j->block, j->d.absmax_codes, j->blocks, s, err));
    return add_traces(j, 2, 3, err);
}

/* Works on the pieces in three turns: scales, codes nearest to W, calibrated codes. Double
 * quantized scales without signs have one offset for the whole weight, so if there are several
 * pieces, the scales of all are found first, and a piece is brought to the device three times. All
 * others have their turns one after another. */
static qc_status run(job *j, qc_error *err)
{
    const int offset = j->form->nested && !j->form->ops->signed_scales;
    const unsigned together = offset && j->most < j->rows ? 1 : 3;
    const uint64_t blocks = qc_ceil_div_u64(j->rows * j->n, block_elems(j->form, j->n));
    for (unsigned from = 0; from < 3; from += together)
        for (uint64_t first = 0; first < j->rows; first += j->most) {
            choose(j, first);
            QC_TRY(load(j, err));
            for (unsigned turn = from; turn < from + together; turn++) {
                if (offset && turn > 0 && first == 0)
                    j->out->nested_offset = qc_nested_offset(j->out->absmax, blocks);
                QC_TRY(turn == 0   ? find(j, plain_weight(j), NULL, err)
                       : turn == 1 ? rounded(j, err)
                                   : calibrated(j, err));
            }
        }
    return QC_OK;
}

/* Does everything that needs the lock of cuBLAS. */
static qc_status locked(job *j, qc_error *err)
{
    qc_cuda_stream s = j->f->tools.stream;
    QC_TRY(qc_cublas_begin(j->f->tools.blas, NULL, 0, s, err));
    qc_status st = qc_cuda_to_device(j->d.map, qc_dynamic_map, 256 * 4, s, err);
    if (st == QC_OK)
        st = run(j, err);
    /* work under way uses the caller's memory, and memory that is freed next */
    const qc_status waited = qc_cuda_stream_synchronize(s, st == QC_OK ? err : NULL);
    if (st == QC_OK)
        st = waited;
    qc_cublas_end(j->f->tools.blas);
    return st;
}

qc_status qc_cuda_feedback_weight_within(const qc_cuda_feedback *f, const qc_form *form,
                                         const void *w, qc_dtype dtype, uint64_t rows,
                                         const qc_feedback_outputs *g, uint64_t limit,
                                         qc_feedback_out *out, qc_feedback_result *result,
                                         qc_error *err)
{
    const int by_rows = qc_form_by_rows(form);
    const uint64_t n = f->n, block = g ? g->block : 0;
    job j = {.f = f,
             .form = form,
             .w = w,
             .dtype = dtype,
             .n = n,
             .rows = rows,
             .out = out,
             .kinds = g ? 6 : 3,
             .g = g};
    uint64_t elems;
    qc_status st;
    *result = (qc_feedback_result){0};
    out->nested_offset = 0.0f;
    if (rows == 0)
        return QC_OK;
    if (qc_mul_u64(rows, n, &elems) || elems > SIZE_MAX / 8 || n > INT32_MAX)
        QC_FAIL(err, QC_ERR_SHAPE,
                "a weight of %" PRIu64 " x %" PRIu64 " is too large to be calibrated", rows, n);
    if (!by_rows && !qc_block_size_valid(form->block_elems))
        QC_FAIL(err, QC_ERR_USAGE,
                "block size: expected a power of two from 32 to 4096, found %" PRIu32,
                form->block_elems);
    if (dtype != QC_DTYPE_F32 && dtype != QC_DTYPE_F16 && dtype != QC_DTYPE_BF16)
        QC_FAIL(err, QC_ERR_USAGE, "the weight is %s; expected F32, F16 or BF16",
                qc_dtype_name(dtype));
    while (!by_rows && (UINT64_C(1) << j.shift) < form->block_elems)
        j.shift++;
    j.aligned = by_rows || n % form->block_elems == 0;
    j.wide = g || !(j.aligned || by_rows) ? PANEL : by_rows ? n : form->block_elems;
    if (g)
        QC_TRY(qc_feedback_check_outputs(g, err));
    j.unit = qc_min_u64(block, rows);
    j.most = piece_rows(&j, limit);
    const uint64_t bytes = qc_cuda_feedback_weight_bytes(j.most, n, form, block);
    if (bytes > SIZE_MAX || j.most > INT32_MAX)
        QC_FAIL(err, QC_ERR_SHAPE,
                "a weight of %" PRIu64 " x %" PRIu64 " is too large to be calibrated", rows, n);
    QC_TRY_GOTO(st, done,
                qc_calloc((void **)&j.host_traces, j.most, j.kinds * sizeof(double), err));
    QC_TRY_GOTO(st, done, g ? qc_cuda_outputs_open(&j, err) : QC_OK);
    QC_TRY_GOTO(st, done, qc_cuda_malloc(&j.memory, (size_t)bytes, err));
    (void)lay_out(&j.d, j.memory, j.most, n, form, block);
    QC_TRY_GOTO(st, done, locked(&j, err));
    if (j.sums[1] > 0.0) {
        result->rounded = j.sums[0] / j.sums[1];
        result->calibrated = j.sums[2] / j.sums[1];
    }
    if (j.sums[4] > 0.0) {
        result->rounded_two_sided = j.sums[3] / j.sums[4];
        result->calibrated_two_sided = j.sums[5] / j.sums[4];
    }
done:
    qc_cuda_free(j.memory);
    qc_free(j.host_traces);
    qc_free(j.units);
    qc_free(j.unit_counts);
    return st;
}

qc_status qc_cuda_feedback_weight(const qc_cuda_feedback *f, const qc_form *form, const void *w,
                                  qc_dtype dtype, uint64_t rows, const qc_feedback_outputs *g,
                                  qc_feedback_out *out, qc_feedback_result *result, qc_error *err)
{
    uint64_t left, total;
    QC_TRY(qc_cuda_memory(&left, &total, err));
    /* cuBLAS may want a workspace, and memory is handed out in pages of 2 MB */
    const uint64_t kept = left / 16 + (UINT64_C(64) << 20);
    const uint64_t room = left > kept ? left - kept : 0, share = total / 4;
    return qc_cuda_feedback_weight_within(f, form, w, dtype, rows, g, share < room ? share : room,
                                          out, result, err);
}

#include "quant/weight_slice.h"

#include "base/checked.h"
#include "quant/quant_form.h"

#include <inttypes.h>
#include <string.h>

#define ALIGNMENT   64u
#define BLOCK_LEAST 32u

/* The largest power of two, at most `most` (one itself), that divides n; `most` for 0. */
static uint64_t power_in(uint64_t n, uint64_t most)
{
    while (n % most != 0)
        most /= 2;
    return most;
}

/* A slice as runs of elements of the flattened weight. Units are blocks of the slice. */
typedef struct {
    const qc_weights *w;
    uint64_t first, length, runs; /* run r is `length` elements of w from first + r * cols on */
    uint64_t first_row;
    qc_weights out; /* with the pointers of w */
    int codes_copied, scales_copied, nested_copied;
    uint64_t codes_bytes, scales, nested;               /* sizes of the slice's arrays */
    uint64_t scales_offset, nested_offset, total_bytes; /* in the memory */
} cut;

/* ---- what a cut gives ----------------------------------------------------------------------- */

/* How many elements a cut never divides: whole words of codes, or the smallest block. */
static uint64_t least_of(const qc_form *f)
{
    const unsigned bits = f->ops->bits;
    return !qc_form_by_rows(f) ? BLOCK_LEAST
           : f->ops->words     ? 32 / power_in(bits, 8)
           : bits == 4         ? 2
                               : 1;
}

static uint64_t columns_unit(const qc_form *f)
{
    return f->ops->words || f->cols % least_of(f) == 0 ? least_of(f) : f->cols;
}

/* After how many rows a row begins with a multiple of `elems`, a power of two. */
static uint64_t rows_unit(const qc_form *f, uint64_t elems)
{
    return f->ops->words ? 1 : elems / power_in(f->cols, elems);
}

static qc_status check_part(const qc_weights *w, const qc_weights_part *p, qc_error *err)
{
    if (!w || !p || !w->form.ops)
        QC_FAIL(err, QC_ERR_USAGE, "a slice: %s is NULL",
                !w   ? "the weight"
                : !p ? "the part"
                     : "the weight's form.ops");
    const uint64_t cols = w->form.cols;
    uint64_t blocks = 0;
    QC_TRY(qc_weights_check_sizes(w, !w->absmax, &blocks, err));
    if (p->row > w->rows || p->rows > w->rows - p->row || p->col > cols || p->cols > cols - p->col)
        QC_FAIL(err, QC_ERR_USAGE,
                "rows %" PRIu64 " to %" PRIu64 " and columns %" PRIu64 " to %" PRIu64
                " are not within a weight of %" PRIu64 " rows and %" PRIu64 " columns",
                p->row, qc_sat_add(p->row, p->rows), p->col, qc_sat_add(p->col, p->cols), w->rows,
                cols);
    if (p->rows == 0 || p->cols == 0)
        return QC_OK;
    const uint64_t least = least_of(&w->form), end = p->col + p->cols;
    const uint64_t across = columns_unit(&w->form), down = rows_unit(&w->form, least);
    if (p->col % across != 0 || (end < cols && end % across != 0))
        QC_FAIL(err, QC_ERR_SHAPE,
                "columns %" PRIu64 " to %" PRIu64 " of a weight in %s cut through %" PRIu64
                " weights that stay together; it can be cut at multiples of %" PRIu64 " columns%s",
                p->col, end, w->form.ops->name, least, across,
                across == cols ? ", so only whole rows can be taken" : "");
    if (p->row % down != 0)
        QC_FAIL(err, QC_ERR_SHAPE,
                "row %" PRIu64 " of a weight in %s, of %" PRIu64 " columns, begins within %" PRIu64
                " weights that stay together; it can be cut at multiples of %" PRIu64 " rows",
                p->row, w->form.ops->name, cols, least, down);
    return QC_OK;
}

/* Divides what is shared by the scales of a slice: blocks of one scale into units, and the groups
 * of nested scales. */
static void divide_scales(cut *c)
{
    const qc_weights *w = c->w;
    const uint64_t old = w->form.block_elems;
    /* Every run begins at a multiple of the unit, and all but the last end at one. */
    uint64_t unit = power_in(c->first, old);
    if (c->runs > 1)
        unit = power_in(w->form.cols, unit);
    if (c->runs > 1 || w->form.ops->integer) /* whose last block must be whole */
        unit = power_in(c->length, unit);
    c->out.form.block_elems = (uint32_t)unit;
    c->scales = qc_ceil_div_u64(c->length, unit) * c->runs;
    c->scales_copied = c->runs > 1 || unit < old;
    if (w->absmax)
        return;
    /* This is 1 where units are smaller than blocks: a cut is an odd number of units then. */
    uint64_t together = power_in(c->first / unit, w->nested_block);
    if (c->runs > 1)
        together = power_in(w->form.cols / unit, power_in(c->length / unit, together));
    if (together < 2 && w->nested_block > 1) { /* a scale for each scale */
        c->scales_copied = 1;
        c->out.form.nested = 0;
        c->out.form.offset = 0.0f;
        c->out.nested_block = 0;
        return;
    }
    c->out.nested_block = (uint32_t)together;
    c->nested = qc_ceil_div_u64(c->scales, together);
    c->nested_copied = c->scales_copied || together != w->nested_block;
}

static qc_status plan(cut *c, const qc_weights *w, const qc_weights_part *p, qc_error *err)
{
    QC_TRY(check_part(w, p, err));
    const int whole = p->cols == w->form.cols || p->rows < 2;
    *c = (cut){.w = w,
               .first_row = p->row,
               .first = p->row * w->form.cols + p->col,
               .runs = whole ? 1 : p->rows,
               .length = whole ? p->rows * p->cols : p->cols,
               .out = *w};
    c->out.rows = p->rows;
    c->out.form.cols = p->cols;
    if (c->length == 0)
        return QC_OK;
    c->codes_copied = c->runs > 1;
    if (!qc_form_by_rows(&w->form))
        divide_scales(c);
    c->codes_bytes = qc_form_code_bytes(&c->out.form, c->length) * c->runs;
    c->scales_offset = c->codes_copied ? qc_align_u64(c->codes_bytes, ALIGNMENT) : 0;
    const uint64_t each = c->nested > 0 ? 1 : sizeof(float);
    c->nested_offset =
        c->scales_offset + (c->scales_copied ? qc_align_u64(c->scales * each, ALIGNMENT) : 0);
    c->total_bytes = c->nested_offset + (c->nested_copied ? c->nested * sizeof(float) : 0);
    return QC_OK;
}

/* ---- writing it ----------------------------------------------------------------------------- */

static const unsigned char *codes_at(const qc_weights *w, uint64_t i)
{
    return (const unsigned char *)w->codes + qc_form_code_bytes(&w->form, i);
}

/* The block of w that unit i of the slice lies in. */
static uint64_t block_of(const cut *c, uint64_t i)
{
    const uint64_t unit = c->out.form.block_elems, in_run = qc_ceil_div_u64(c->length, unit);
    const uint64_t run = i / in_run, at = c->first + run * c->w->form.cols + i % in_run * unit;
    return at / c->w->form.block_elems;
}

static void write_scales(const cut *c, unsigned char *memory, qc_weights *out)
{
    const qc_weights *w = c->w;
    const uint64_t block = block_of(c, 0);
    void *scales = c->scales_copied ? memory + c->scales_offset : NULL;
    float *nested = c->nested_copied ? (float *)(void *)(memory + c->nested_offset) : NULL;
    for (uint64_t i = 0; scales && i < c->scales; i++) {
        const uint64_t b = block_of(c, i);
        if (c->nested > 0)
            ((uint8_t *)scales)[i] = w->absmax_codes[b];
        else
            ((float *)scales)[i] = qc_weights_scale(w, b);
    }
    for (uint64_t i = 0; nested && i < c->nested; i++)
        nested[i] = w->nested_absmax[block_of(c, i * c->out.nested_block) / w->nested_block];
    if (c->nested == 0)
        out->absmax = scales ? scales : w->absmax + block;
    out->absmax_codes = c->nested == 0 ? NULL : scales ? scales : w->absmax_codes + block;
    out->nested_absmax = c->nested == 0 ? NULL
                         : nested       ? nested
                                        : w->nested_absmax + block / w->nested_block;
    out->nested_map = c->nested == 0 ? NULL : w->nested_map;
}

static void write_slice(const cut *c, unsigned char *memory, qc_weights *out)
{
    const qc_weights *w = c->w;
    *out = c->out;
    if (qc_form_by_rows(&w->form) && w->absmax)
        out->absmax = w->absmax + c->first_row;
    if (c->length == 0)
        return;
    out->codes = c->codes_copied ? memory : codes_at(w, c->first);
    const size_t bytes = (size_t)qc_form_code_bytes(&c->out.form, c->length);
    for (uint64_t run = 0; c->codes_copied && run < c->runs; run++)
        memcpy(memory + run * bytes, codes_at(w, c->first + run * w->form.cols), bytes);
    if (!qc_form_by_rows(&w->form))
        write_scales(c, memory, out);
}

/* ---- for callers ---------------------------------------------------------------------------- */

qc_status qc_weights_cuts_of(const qc_weights *w, qc_weights_cuts *out, qc_error *err)
{
    if (!w || !out || !w->form.ops)
        QC_FAIL(err, QC_ERR_USAGE, "qc_weights_cuts_of: %s is NULL",
                !w     ? "the weight"
                : !out ? "out"
                       : "the weight's form.ops");
    uint64_t blocks = 0;
    QC_TRY(qc_weights_check_sizes(w, !w->absmax, &blocks, err));
    const uint64_t group = w->absmax ? 1 : qc_max_u64(w->nested_block, 1);
    const uint64_t least = least_of(&w->form);
    *out = (qc_weights_cuts){
        .rows = rows_unit(&w->form, least),
        .cols = columns_unit(&w->form),
        .rows_in_place = rows_unit(&w->form, qc_max_u64(w->form.block_elems * group, least))};
    return QC_OK;
}

qc_status qc_weights_read_of(const qc_weights *w, const qc_weights_part *part, qc_weights_read *out,
                             qc_error *err)
{
    static const float has_floats;
    uint64_t blocks = 0;
    qc_weights shape;
    cut c;
    if (!w || !part || !out || !w->form.ops)
        QC_FAIL(err, QC_ERR_USAGE, "qc_weights_read_of: %s is NULL",
                !w      ? "the weight"
                : !part ? "the part"
                : !out  ? "out"
                        : "the weight's form.ops");
    shape = *w;
    shape.absmax = w->form.nested ? NULL : &has_floats;
    QC_TRY(qc_weights_check_sizes(&shape, !shape.absmax, &blocks, err));
    *out = (qc_weights_read){.read = *part};
    if (part->cols == w->form.cols && part->row < w->rows && part->rows <= w->rows - part->row) {
        const uint64_t elems = qc_max_u64(w->form.block_elems, least_of(&w->form));
        out->skip = part->row % rows_unit(&w->form, elems);
        out->read.row -= out->skip;
        out->read.rows += out->skip;
    }
    QC_TRY(plan(&c, &shape, &out->read, err));
    out->block_elems = c.out.form.block_elems;
    out->code_bytes = c.codes_bytes;
    out->scales = qc_form_by_rows(&w->form) ? out->read.rows : c.scales;
    out->nested_scales = c.nested;
    out->nested_block = c.nested > 0 ? c.out.nested_block : 0;
    return QC_OK;
}

qc_status qc_weights_slice_bytes(const qc_weights *w, const qc_weights_part *part, uint64_t *bytes,
                                 qc_error *err)
{
    cut c;
    if (!bytes)
        QC_FAIL(err, QC_ERR_USAGE, "qc_weights_slice_bytes: bytes is NULL");
    *bytes = 0;
    QC_TRY(plan(&c, w, part, err));
    *bytes = c.total_bytes;
    return QC_OK;
}

qc_status qc_weights_slice(const qc_weights *w, const qc_weights_part *part, void *memory,
                           qc_weights *out, qc_error *err)
{
    cut c;
    if (!out)
        QC_FAIL(err, QC_ERR_USAGE, "qc_weights_slice: out is NULL");
    QC_TRY(plan(&c, w, part, err));
    if (c.total_bytes > 0 && !memory)
        QC_FAIL(err, QC_ERR_USAGE,
                "qc_weights_slice: memory is NULL, and the slice needs %" PRIu64 " bytes",
                c.total_bytes);
    write_slice(&c, memory, out);
    return QC_OK;
}

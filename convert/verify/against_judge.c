/* Makes clauses of the sums: which tensors of OUT are not what MODEL gives, and why. */
#include "convert/verify/against_internal.h"

#include "base/checked.h"
#include "base/workers.h"
#include "convert/model/awq_layout.h"
#include "convert/term/glob.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* For at most this many faulty tensors, the tensor that fits instead is looked for. */
#define FITS_TRIED 8u
/* No form of rounding leaves such an error: these are other values altogether. */
#define OTHER_VALUES 0.5

#define SAMPLE_ELEMS    16384u
#define CANDIDATES_MOST 4096u
/* A tensor fits below this distance. Codes of 4 bits leave 0.1, and weights of another tensor
 * 1.4. */
#define FITS_BELOW 0.3

static double root_ratio(double ee, double xx)
{
    return ee == 0.0 ? 0.0 : sqrt(ee / xx);
}

static uint64_t columns(const qc_against_row *r)
{
    return r->ndim ? r->dims[r->ndim - 1] : 1;
}

/* Finds the row and column of element i, as the tensor lies in MODEL. */
static void place(const qc_against_row *r, uint64_t i, uint64_t *row, uint64_t *col)
{
    uint64_t cols = columns(r) ? columns(r) : 1;
    *row = i / cols;
    *col = i % cols;
    if (r->transpose && r->ndim == 2) {
        uint64_t swap = *row;
        *row = *col;
        *col = swap;
    }
}

/* Returns what error searched scales may leave where absmax leaves next to nothing, for example
 * where all weights are alike, or are only -1, 0 and 1 times a scale. A search goes in steps, and
 * misses by up to 0.02 of the largest value. The limit is what rounding leaves of weights that are
 * spread evenly up to the largest, which is more. */
static double searched_may_leave(const qc_check *f, const qc_check_sums *s)
{
    double step = f->form.ops->bits == 4 ? 2.0 / 15.0 : 1.0 / 127.0;
    return root_ratio(s->sum_largest * (step * step / 12.0), s->sum_xx);
}

/* Does the manifest say that scales were searched? A search makes most scales differ from the
 * largest value, unless the weights are such that this is (nearly) the best one; then a few that
 * differ prove nothing. */
static int says_searched(const qc_against *a)
{
    return a->o->manifest && (a->o->manifest->scale || a->o->manifest->calibration);
}

static qc_status add_up(qc_against_tensor *t, qc_against *a, qc_error *err)
{
    qc_against_row *r = &t->row;
    qc_check_sums total;
    const qc_check_sums *s = &total;
    qc_check_sums_init(&total);
    for (uint32_t i = 0; i < t->piece_count; i++)
        qc_check_add(&total, &t->sums[i], qc_form_code_elems(&t->check.form, i * t->piece_bytes));
    uint64_t row = 0, col = 0;
    if (qc_schemes[t->stored->stored_as].format == QC_FORMAT_AWQ) {
        uint64_t *const places[] = {&total.max_index, &total.bad_source, &total.bad_value,
                                    &total.first_misplaced, &total.first_searched};
        for (size_t i = 0; i < sizeof places / sizeof *places; i++)
            if (*places[i] != UINT64_MAX)
                *places[i] =
                    qc_awq_element(t->rows, t->cols, t->check.form.block_elems, *places[i]);
    }
    r->measured = 1;
    r->error = root_ratio(s->sum_ee, s->sum_xx);
    r->expected = root_ratio(s->sum_expected, s->sum_xx);
    /* Where only zeros or rounding are left, the ratio of the errors means nothing. */
    r->ratio = r->error <= 0x1p-20 && r->expected <= 0x1p-20 ? 1.0 : r->error / r->expected;
    r->max_error = s->max_err;
    if (s->max_index != UINT64_MAX)
        place(r, s->max_index, &r->max_row, &r->max_col);
    r->clipped = s->clipped;
    r->misplaced = s->misplaced;
    r->scales = s->scales;
    r->searched = s->searched;
    if (s->bad_source != UINT64_MAX) {
        place(r, s->bad_source, &row, &col);
        return qc_arena_printf(a->arena, &r->fault, err,
                               "the weight in MODEL at row %" PRIu64 ", column %" PRIu64
                               " is not finite or has no code, and yet it was quantized",
                               row, col);
    }
    if (s->bad_value != UINT64_MAX) {
        place(r, s->bad_value, &row, &col);
        return qc_arena_printf(a->arena, &r->fault, err,
                               "its value at row %" PRIu64 ", column %" PRIu64 " is not finite",
                               row, col);
    }
    r->calibrated = t->listed && t->listed->outputs != NULL;
    if (r->calibrated) { /* its codes say nothing, but its error is known */
        const double said = sqrt(t->listed->rel_mse);
        if (fabs(r->error - said) <= QC_AGAINST_CALIBRATED_SLACK * said)
            return QC_OK;
        return qc_arena_printf(a->arena, &r->fault, err,
                               "its error is %.6g where the manifest says %.6g", r->error, said);
    }
    if (s->misplaced > 0) {
        place(r, s->first_misplaced, &row, &col);
        if (r->error > OTHER_VALUES)
            return qc_arena_printf(
                a->arena, &r->fault, err,
                "it holds other values: its error is %.3g where %.3g is expected", r->error,
                r->expected);
        return qc_arena_printf(
            a->arena, &r->fault, err,
            "%" PRIu64 " of its %" PRIu64
            " codes are not those of the weights in MODEL, the first at row %" PRIu64
            ", column %" PRIu64 "; its error is %.6g where %.6g is expected",
            s->misplaced, r->elems, row, col, r->error, r->expected);
    }
    if (s->searched > 0 && s->searched <= s->scales / QC_AGAINST_FEW_OF && !says_searched(a)) {
        place(r, s->first_searched, &row, &col);
        return qc_arena_printf(
            a->arena, &r->fault, err,
            "%" PRIu64 " of its %" PRIu64
            " scales are not the largest value of their weights in MODEL, while all others are; "
            "the first is the scale of the weights from row %" PRIu64 ", column %" PRIu64,
            s->searched, s->scales, row, col);
    }
    double few = s->scales > 0 ? 1.0 / (double)s->scales : 0.0;
    if (!(r->ratio <= QC_AGAINST_RATIO + few) &&
        !(r->error <= (QC_AGAINST_RATIO + few) * searched_may_leave(&t->check, s)))
        return qc_arena_printf(a->arena, &r->fault, err, "its error is %.6g where %.6g is expected",
                               r->error, r->expected);
    return QC_OK;
}

static qc_status find_difference(qc_against_tensor *t, qc_against *a, qc_error *err)
{
    t->first_differs = UINT64_MAX;
    for (uint32_t i = 0; i < t->piece_count && t->first_differs == UINT64_MAX; i++)
        t->first_differs = t->differs[i];
    if (t->first_differs == UINT64_MAX)
        return QC_OK;
    uint64_t bits = qc_dtype_bits(t->row.dtype);
    uint64_t i = bits >= 8 ? t->first_differs / (bits / 8) : t->first_differs;
    uint64_t cols = columns(&t->row) ? columns(&t->row) : 1;
    return qc_arena_printf(a->arena, &t->row.fault, err,
                           "it is not %s; the first difference is at element %" PRIu64
                           " (row %" PRIu64 ", column %" PRIu64 ")",
                           t->row.kind == QC_AGAINST_CAST ? "that of MODEL, cast" : "that of MODEL",
                           i, i / cols, i % cols);
}

/* Checks the digest of the source's bytes that the manifest remembers. */
static qc_status check_source(qc_against_tensor *t, qc_against *a, qc_against_result *r,
                              qc_error *err)
{
    if (!t->sources)
        return QC_OK;
    r->digests++;
    qc_digest root = qc_digest_root(t->sources, t->piece_count);
    if (qc_digest_equal(&root, &t->listed->source))
        return QC_OK;
    const char *said = t->row.fault;
    if (!said)
        return qc_arena_printf(a->arena, &t->row.fault, err,
                               "the bytes of '%s' are not those that it was made from: MODEL has "
                               "changed since, or it is another model",
                               t->row.source);
    return qc_arena_printf(a->arena, &t->row.fault, err,
                           "%s; the bytes of '%s' are not those that it was made from either: "
                           "MODEL has changed since, or it is another model",
                           said, t->row.source);
}

/* ---- another tensor that fits ---------------------------------------------------------------- */

/* Returns |x - y| / |x|; infinite where nothing can be said. */
static double distance(const float *x, const float *y, uint64_t n)
{
    double ee = 0.0, xx = 0.0;
    for (uint64_t i = 0; i < n; i++) {
        double e = (double)x[i] - (double)y[i];
        ee += e * e;
        xx += (double)x[i] * (double)x[i];
    }
    return xx > 0.0 && isfinite(ee) && isfinite(xx) ? sqrt(ee / xx) : (double)INFINITY;
}

/* Returns t as if it were made from tensor i of MODEL; where it cannot be, with no elements. */
static qc_against_tensor candidate(const qc_against *a, const qc_against_tensor *t, uint32_t i,
                                   int transpose)
{
    const qc_checkpoint_tensor *from = &a->model->tensors[i];
    qc_against_tensor c = {.row = t->row,
                           .out_tensor = t->out_tensor,
                           .model_tensor = i,
                           .coded = a->coded.weights[i],
                           .packed = a->in_model.weights[i]};
    c.row.source_dtype = from->dtype;
    c.row.transpose = transpose;
    const uint64_t *dims = c.coded ? c.coded->dims : c.packed ? c.packed->dims : from->dims;
    const unsigned ndim = c.coded ? c.coded->ndim : c.packed ? c.packed->ndim : from->ndim;
    if ((!c.coded && !c.packed && !qc_dtype_is_quantizable(from->dtype)) ||
        (transpose && ndim != 2) || !qc_against_same_shape(&c.row, dims, ndim))
        c.row.elems = 0;
    return c;
}

/* Finds the best of all candidates. */
static qc_status search(qc_against *a, qc_against_scratch *s, const qc_against_tensor *t,
                        uint64_t n, const float *ours, float *theirs, const char **out,
                        qc_error *err)
{
    uint32_t tried = 0;
    double best = FITS_BELOW;
    for (uint32_t i = 0; i < (uint32_t)a->model->tensor_count && tried < CANDIDATES_MOST; i++) {
        for (int transpose = 0; transpose < 2; transpose++) {
            const qc_against_tensor c = candidate(a, t, i, transpose);
            const void *source = NULL;
            uint64_t overflow = 0;
            if (c.row.elems == 0 || (i == t->model_tensor && transpose == t->row.transpose) ||
                (transpose && i != t->model_tensor && !t->row.transpose))
                continue;
            QC_TRY(qc_check_interrupted(err));
            tried++;
            qc_status st = qc_against_read(s, &c, 0, n, 0, &source, err);
            if (st == QC_ERR_NONFINITE)
                continue;
            QC_TRY(st);
            a->ops->cast(source, qc_against_read_dtype(&c), n, theirs, QC_DTYPE_F32, &overflow);
            double d = distance(theirs, ours, n);
            if (d >= best)
                continue;
            best = d;
            QC_TRY(qc_arena_printf(a->arena, out, err, "%s%s", a->model->tensors[i].name,
                                   transpose != t->row.transpose ? " transposed" : ""));
        }
    }
    return QC_OK;
}

/* Finds which other tensor of MODEL the bytes of t are made of, or NULL. The first elements are
 * compared with those of at most CANDIDATES_MOST tensors that have as many elements as t. */
static qc_status fits_instead(qc_against *a, const qc_against_tensor *t, const char **out,
                              qc_error *err)
{
    const int quantized = t->row.kind == QC_AGAINST_QUANTIZED;
    const uint64_t n = qc_min_u64(t->row.elems, SAMPLE_ELEMS);
    const float *values = NULL;
    qc_against_scratch *s = NULL;
    uint64_t overflow = 0;
    *out = NULL;
    if (n == 0 || (!quantized && !qc_dtype_is_quantizable(t->row.dtype)) ||
        (quantized && t->check.form.cols == 0 && t->check.form.block_elems == 0))
        return QC_OK;
    QC_TRY(qc_against_scratch_of(a, 0, &s, err));
    QC_TRY(qc_buffer_room(&s->slack, 2 * n, sizeof(float), err));
    float *ours = s->slack.data;
    if (quantized) {
        const qc_weight_source w = {.tensor = t->out_tensor, .stored = t->stored};
        QC_TRY(qc_weight_floats(&s->output, &w, 0, n, &values, err));
        memcpy(ours, values, (size_t)n * sizeof *ours);
    } else {
        QC_TRY(qc_buffer_room(&s->raw, n, 8, err));
        QC_TRY(qc_checkpoint_read(a->output, s->output.codes, &a->output->tensors[t->out_tensor], 0,
                                  s->raw.data, (size_t)(n * (qc_dtype_bits(t->row.dtype) / 8)),
                                  err));
        a->ops->cast(s->raw.data, t->row.dtype, n, ours, QC_DTYPE_F32, &overflow);
    }
    return search(a, s, t, n, ours, ours + n, out, err);
}

static qc_status find_fits(qc_against *a, qc_error *err)
{
    unsigned tried = 0;
    for (size_t i = 0; i < a->output->tensor_count && tried < FITS_TRIED; i++) {
        qc_against_tensor *t = &a->tensors[a->by_name[i]];
        int other = t->row.kind == QC_AGAINST_QUANTIZED
                        ? t->sums && t->row.misplaced > 0 && t->row.error > OTHER_VALUES
                        : t->differs && t->first_differs != UINT64_MAX;
        if (!other)
            continue;
        tried++;
        QC_TRY(fits_instead(a, t, &t->row.fits, err));
        if (t->row.fits) {
            const char *said = t->row.fault;
            QC_TRY(qc_arena_printf(a->arena, &t->row.fault, err, "%s; '%s' of MODEL fits instead",
                                   said, t->row.fits));
        }
    }
    return QC_OK;
}

/* ---- rows ------------------------------------------------------------------------------------ */

static qc_status first_fault(qc_against_result *r, qc_arena *arena, const char *name,
                             const char *why, qc_error *err)
{
    if (r->faults++ > 0)
        return QC_OK;
    r->first.why = why;
    return qc_arena_printf(arena, &r->first.what, err, "tensor '%s'", name);
}

qc_status qc_against_judge(qc_against *a, qc_against_result *r, qc_error *err)
{
    size_t n = a->output->tensor_count;
    for (size_t i = 0; i < n; i++) {
        qc_against_tensor *t = &a->tensors[i];
        if (t->row.kind == QC_AGAINST_STATE || (!t->sums && !t->differs))
            continue;
        QC_TRY(t->sums ? add_up(t, a, err) : find_difference(t, a, err));
        QC_TRY(check_source(t, a, r, err));
    }
    QC_TRY(find_fits(a, err));
    QC_TRY(qc_arena_array(a->arena, &r->rows, n + 1, err));
    r->missing = a->missing;
    r->missing_count = a->missing_count;
    r->faults = r->scan.problem_count;
    r->first = r->scan.first;
    for (size_t i = 0; i < r->missing_count; i++) {
        if (!r->missing[i].why)
            QC_TRY(first_fault(r, a->arena, r->missing[i].name, "MODEL has it, but OUT does not",
                               err));
    }
    for (size_t i = 0; i < n; i++) {
        const qc_against_tensor *t = &a->tensors[a->by_name[i]];
        r->output_bytes += t->out_bytes;
        if (t->row.kind == QC_AGAINST_STATE)
            continue;
        r->rows[r->count++] = t->row;
        r->model_bytes += t->row.source_bytes;
        r->equal += t->row.kind == QC_AGAINST_EQUAL;
        r->cast += t->row.kind == QC_AGAINST_CAST;
        r->quantized += t->row.kind == QC_AGAINST_QUANTIZED;
        if (t->row.fault)
            QC_TRY(first_fault(r, a->arena, t->row.name, t->row.fault, err));
    }
    return QC_OK;
}

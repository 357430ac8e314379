/* Step 4 where outputs do not count alike: the least tr(G E H E^T). Rows of a block of G (a unit)
 * depend on one another. A sweep takes columns by spans. First, E H of the span is made
 * for all rows at once. Then each unit goes through the panels of the span, and in a panel through
 * groups of rows, of which each has G E H as a product with what E H has become by then. Within a
 * group, 16 rows are done at a time, in columns one after another, and in a column row after row.
 */
#include "quant/error_feedback_rows.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "quant/error_feedback_factors.h"
#include "quant/piecework.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* The more columns a span has, the fewer pieces there are to wait for, and the more is spent on
 * keeping E H right behind a panel. */
#define SPAN            512u
#define DEFAULT_DAMPING 0.2

typedef qc_feedback_job job;
typedef qc_feedback_chunk chunk;
typedef qc_feedback_unit unit;

static uint64_t block_of(const job *j)
{
    return qc_min_u64(j->g->block, j->rows);
}

static uint64_t unit_count(const job *j)
{
    return qc_ceil_div_u64(j->rows, block_of(j));
}

static uint64_t groups_of_unit(const job *j)
{
    return qc_ceil_div_u64(block_of(j), QC_FEEDBACK_ROWS);
}

static uint64_t first_of(const job *j, uint64_t number)
{
    return number * block_of(j);
}

static uint64_t end_of(const job *j, uint64_t number)
{
    return qc_min_u64(first_of(j, number) + block_of(j), j->rows);
}

/* G of rows [first, ...) of a unit. */
static const float *moments_of(const job *j, uint64_t number, uint64_t first)
{
    const uint64_t block = j->g->block;
    return j->g->g + (number * block + first - first_of(j, number)) * block;
}

/* ---- G ---- */

qc_status qc_feedback_look_at_outputs(const qc_feedback_outputs *g, uint64_t rows, uint64_t number,
                                      qc_feedback_unit *out, qc_error *err)
{
    const uint64_t first = number * qc_min_u64(g->block, rows);
    const uint64_t count = qc_min_u64(g->block, rows - first);
    const double share = g->damping > 0.0 ? g->damping : DEFAULT_DAMPING;
    double sum = 0.0;
    for (uint64_t i = 0; i < count; i++) {
        const float *row = g->g + (number * g->block + i) * g->block;
        double odd = 0.0;
        for (uint64_t k = 0; k < count; k++)
            odd += 0.0 * (double)row[k];
        if (isnan(odd))
            QC_FAIL(err, QC_ERR_NONFINITE,
                    "the second moments of output %" PRIu64 " are not finite", first + i);
        if (row[i] < 0.0f)
            QC_FAIL(err, QC_ERR_INPUT,
                    "the second moment of output %" PRIu64
                    " is below zero (%g), which no sum of squares can be",
                    first + i, (double)row[i]);
        sum += (double)row[i];
    }
    const double mean = sum / (double)count;
    const double scale = mean > 0.0 ? qc_feedback_scale(mean) : 0.0;
    const int usable = mean > 0.0 && isfinite((float)scale);
    *out = (unit){.scale = usable ? (float)scale : 0.0f,
                  .damping = usable ? (float)(share * mean * scale) : 1.0f,
                  .inverse = usable ? 1.0 / scale : 0.0};
    return QC_OK;
}

qc_status qc_feedback_check_outputs(const qc_feedback_outputs *g, qc_error *err)
{
    if (g->block == 0 || g->block > QC_BLAS_MOST)
        QC_FAIL(err, QC_ERR_SHAPE,
                "second moments in blocks of %" PRIu64 " outputs: expected 1 to %u outputs",
                g->block, QC_BLAS_MOST);
    if (!(g->damping >= 0.0) || !isfinite(g->damping))
        QC_FAIL(err, QC_ERR_USAGE,
                "damping of outputs: expected a finite number of 0 or more, found %g", g->damping);
    return QC_OK;
}

static qc_status look(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const job *j = ctx;
    (void)thread;
    return qc_feedback_look_at_outputs(j->g, j->rows, piece, &j->units[piece], err);
}

/* to [c->rows, cols] = G times what from has in the unit's rows, from its first on. */
static void times_g(const chunk *c, uint64_t number, const float *from, uint64_t ld, uint64_t cols,
                    float *to)
{
    const job *j = c->j;
    const unit *u = &j->units[number];
    const uint64_t first = first_of(j, number), count = end_of(j, number) - first;
    const float *own = from + (c->first - first) * ld;
    j->f->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, (int)c->rows, (int)cols,
                     (int)count, u->scale, moments_of(j, number, c->first), (int)j->g->block, from,
                     (int)ld, 0.0f, to, (int)cols);
    for (uint64_t r = 0; r < c->rows; r++)
        for (uint64_t k = 0; k < cols; k++)
            to[r * cols + k] += u->damping * own[r * ld + k];
}

/* ---- pieces ---- */

/* Returns the chunk of a group of rows; 0 rows where the unit has no such group. */
static chunk group_of(const job *j, unsigned thread, uint64_t number, uint64_t group)
{
    const uint64_t end = end_of(j, number);
    return qc_feedback_chunk_of(
        j, thread, qc_min_u64(first_of(j, number) + group * QC_FEEDBACK_ROWS, end), end);
}

/* Adds up tr(E H E^T) and tr(G E H E^T) of a group. */
static qc_status trace_piece(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const job *j = ctx;
    const uint64_t n = j->f->n, number = piece / groups_of_unit(j);
    const chunk c = group_of(j, thread, number, piece % groups_of_unit(j));
    const float *unit_e = j->e + first_of(j, number) * n;
    double one = 0.0, two = 0.0;
    (void)err;
    for (uint64_t col = 0; col < n && c.rows > 0; col += QC_TILE_COLS) {
        const uint64_t cols = qc_min_u64(n - col, QC_TILE_COLS);
        qc_feedback_times_h(&c, col, cols, 2.0f, 0, c.g, cols);
        times_g(&c, number, unit_e + col, n, cols, c.v);
        for (uint64_t r = 0; r < c.rows; r++)
            for (uint64_t k = 0; k < cols; k++) {
                one += (double)c.g[r * cols + k] * (double)c.e[r * n + col + k];
                two += (double)c.g[r * cols + k] * (double)c.v[r * cols + k];
            }
    }
    j->sums[piece * 2] = one;
    j->sums[piece * 2 + 1] = two * j->units[number].inverse;
    return QC_OK;
}

static qc_status trace(job *j, double *sums, qc_error *err)
{
    const uint64_t pieces = unit_count(j) * groups_of_unit(j);
    QC_TRY(qc_piecework(j->f->threads, pieces, trace_piece, j, err));
    sums[0] = sums[1] = 0.0;
    for (uint64_t i = 0; i < pieces * 2; i++)
        sums[i % 2] += j->sums[i];
    return QC_OK;
}

/* ---- sweeps ---- */

static qc_status product_piece(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const job *j = ctx;
    const uint64_t number = piece / groups_of_unit(j);
    const chunk c = group_of(j, thread, number, piece % groups_of_unit(j));
    (void)err;
    if (c.rows > 0 && j->units[number].changed > 0)
        qc_feedback_times_h(&c, j->col, j->span, 1.0f, 1, j->product + c.first * j->span, j->span);
    return QC_OK;
}

/* Loads G of sixteen rows from `row` of the chunk, and the inverse of its diagonal. */
static void load_moments(const chunk *c, uint64_t number, uint64_t row, qc_tile_outputs *o)
{
    const job *j = c->j;
    const unit *u = &j->units[number];
    const uint64_t at = c->first + row - first_of(j, number);
    memset(o, 0, sizeof *o);
    o->rows = (uint32_t)qc_min_u64(c->rows - row, QC_LANES);
    for (uint32_t i = 0; i < o->rows; i++) {
        const float *from = moments_of(j, number, c->first + row + i) + at;
        for (uint32_t k = 0; k < o->rows; k++)
            o->g[i][k] = from[k] * u->scale + (i == k ? u->damping : 0.0f);
        o->inverse[i] = o->g[i][i] > QC_FEEDBACK_LEAST_MOMENT ? 1.0f / o->g[i][i] : 0.0f;
    }
}

/* Brings G E H of the group's rows behind these sixteen up to date; E has changed by `moved`. */
static void pass_on(const chunk *c, uint64_t number, uint64_t row, uint64_t cols,
                    const float *moved)
{
    const job *j = c->j;
    const qc_blas_functions *b = &j->f->b->f;
    const uint64_t behind = row + QC_LANES, at = c->first + row - first_of(j, number);
    float moved_h[QC_LANES * QC_TILE_COLS];
    if (behind >= c->rows)
        return;
    b->sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, QC_LANES, (int)cols, (int)cols, 1.0f,
             moved, (int)cols, c->inside, QC_TILE_COLS, 0.0f, moved_h, (int)cols);
    b->sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, (int)(c->rows - behind), (int)cols,
             QC_LANES, j->units[number].scale, moments_of(j, number, c->first + behind) + at,
             (int)j->g->block, moved_h, (int)cols, 1.0f, c->g + behind * cols, (int)cols);
}

/* Sets the codes of a group of rows in a panel, and brings E H of the rest of the span up to date.
 */
static uint64_t sweep_group(const chunk *c, uint64_t number, uint64_t col, uint64_t cols)
{
    const job *j = c->j;
    const qc_feedback *f = j->f;
    const uint64_t n = f->n, ld = j->span, rest = j->col + j->span - col - cols;
    float *product = j->product + c->first * ld + (col - j->col);
    uint64_t changed = 0;
    times_g(c, number, j->product + first_of(j, number) * ld + (col - j->col), ld, cols, c->g);
    memset(c->v, 0, c->rows * cols * sizeof *c->v);
    for (uint64_t row = 0; row < c->rows; row += QC_LANES) {
        qc_tile_outputs outputs;
        float *moved = c->v + row * cols;
        load_moments(c, number, row, &outputs);
        qc_feedback_load_tile(c, row, col, cols, NULL);
        qc_feedback_load_codes(c, row, col, cols);
        const uint32_t here = f->lanes->sweep_outputs(c->tile, (uint32_t)cols, c->inside,
                                                      f->inverse + col, &outputs, j->form->ops);
        if (here == 0)
            continue;
        changed += here;
        for (uint64_t r = 0; r < outputs.rows; r++)
            for (uint64_t k = 0; k < cols; k++)
                moved[r * cols + k] = c->tile->error[k][r] - c->e[(row + r) * n + col + k];
        qc_feedback_store_tile(c, row, col, cols, NULL);
        pass_on(c, number, row, cols, moved);
    }
    if (changed == 0)
        return 0;
    f->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, (int)c->rows, (int)cols, (int)cols,
                  1.0f, c->v, (int)cols, c->inside, QC_TILE_COLS, 1.0f, product, (int)ld);
    if (rest > 0)
        f->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, (int)c->rows, (int)rest,
                      (int)cols, 1.0f, c->v, (int)cols, f->hu + col * n + col + cols, (int)n, 1.0f,
                      product + cols, (int)ld);
    return changed;
}

static qc_status sweep_piece(void *ctx, unsigned thread, uint64_t number, qc_error *err)
{
    const job *j = ctx;
    const uint64_t n = j->f->n, end = j->col + j->span;
    unit *u = &j->units[number];
    (void)err;
    if (u->changed == 0)
        return QC_OK;
    for (uint64_t col = j->col; col < end; col += QC_TILE_COLS) {
        const uint64_t cols = qc_min_u64(end - col, QC_TILE_COLS);
        for (uint64_t group = 0; group < groups_of_unit(j); group++) {
            const chunk c = group_of(j, thread, number, group);
            for (uint64_t i = 0; i < cols && group == 0; i++)
                for (uint64_t k = i; k < cols; k++)
                    c.inside[i * QC_TILE_COLS + k] = c.inside[k * QC_TILE_COLS + i] =
                        j->f->hu[(col + i) * n + col + k];
            u->now += c.rows > 0 ? sweep_group(&c, number, col, cols) : 0;
        }
    }
    return QC_OK;
}

/* Sets *changed to the number of codes. */
static qc_status sweep(job *j, uint64_t *changed, qc_error *err)
{
    const uint64_t n = j->f->n, units = unit_count(j), groups = units * groups_of_unit(j);
    for (j->col = 0; j->col < n; j->col += SPAN) {
        j->span = qc_min_u64(n - j->col, SPAN);
        QC_TRY(qc_piecework(j->f->threads, groups, product_piece, j, err));
        QC_TRY(qc_piecework(j->f->threads, units, sweep_piece, j, err));
    }
    *changed = 0;
    for (uint64_t i = 0; i < units; i++) {
        *changed += j->units[i].now;
        j->units[i].changed = j->units[i].now;
        j->units[i].now = 0;
    }
    return QC_OK;
}

qc_status qc_feedback_run_outputs(job *j, qc_feedback_result *result, qc_error *err)
{
    const qc_feedback *f = j->f;
    uint64_t changed = 1;
    double rounded[2], target[2], made[2];
    QC_TRY(qc_piecework(f->threads, unit_count(j), look, j, err));
    QC_TRY(qc_feedback_on_chunks(j, qc_feedback_take_target, err));
    QC_TRY(trace(j, target, err));
    QC_TRY(qc_feedback_scales(f, j->form, j->w, NULL, j->rows, j->out, err));
    QC_TRY(qc_feedback_on_chunks(j, qc_feedback_round, err));
    QC_TRY(trace(j, rounded, err));
    QC_TRY(qc_feedback_scales(f, j->form, j->target, f->d, j->rows, j->out, err));
    QC_TRY(qc_feedback_on_chunks(j, qc_feedback_feed, err));
    for (uint64_t i = 0; i < unit_count(j); i++)
        j->units[i].changed = 1;
    for (unsigned i = 0; i < f->options.sweeps && changed > 0; i++)
        QC_TRY(sweep(j, &changed, err));
    QC_TRY(trace(j, made, err));
    QC_TRY(qc_feedback_on_chunks(j, qc_feedback_store_codes, err));
    if (target[0] > 0.0) {
        result->rounded = rounded[0] / target[0];
        result->calibrated = made[0] / target[0];
    }
    if (target[1] > 0.0) {
        result->rounded_two_sided = rounded[1] / target[1];
        result->calibrated_two_sided = made[1] / target[1];
        result->target_two_sided = target[1] / f->scale;
    }
    return QC_OK;
}

/* ---- memory and time ---- */

qc_status qc_feedback_open_outputs(job *j, qc_error *err)
{
    const uint64_t n = j->f->n, elems = j->rows * n;
    QC_TRY(qc_feedback_check_outputs(j->g, err));
    QC_TRY(qc_malloc_aligned((void **)&j->e, 64, elems * sizeof *j->e, err));
    QC_TRY(qc_malloc_aligned((void **)&j->codes, 64, elems, err));
    QC_TRY(qc_malloc_aligned((void **)&j->product, 64,
                             j->rows * qc_min_u64(n, SPAN) * sizeof *j->product, err));
    QC_TRY(qc_calloc((void **)&j->units, unit_count(j), sizeof *j->units, err));
    return qc_calloc((void **)&j->sums, unit_count(j) * groups_of_unit(j), 2 * sizeof *j->sums,
                     err);
}

void qc_feedback_close_outputs(job *j)
{
    if (!j->g)
        return;
    qc_free(j->e);
    qc_free(j->codes);
    qc_free(j->product);
    qc_free(j->units);
}

uint64_t qc_feedback_outputs_bytes(uint64_t rows, uint64_t n, uint64_t block)
{
    const uint64_t each = qc_sat_add(qc_sat_mul(n, 5), qc_min_u64(n, SPAN) * sizeof(float));
    if (block == 0 || rows == 0)
        return 0;
    const uint64_t units = qc_ceil_div_u64(rows, qc_min_u64(block, rows));
    const uint64_t groups = qc_ceil_div_u64(qc_min_u64(block, rows), QC_FEEDBACK_ROWS);
    const uint64_t most = qc_sat_add(sizeof(unit), qc_sat_mul(groups, 2 * sizeof(double)));
    return qc_sat_add(qc_sat_mul(rows, each), qc_sat_mul(units, most));
}

double qc_feedback_outputs_flops(uint64_t rows, uint64_t n, unsigned sweeps, uint64_t block)
{
    /* 2 b for a sweep and for each of three traces; a sweep brings half of a span up to date */
    const double b = (double)qc_min_u64(block, rows), span = (double)qc_min_u64(n, SPAN);
    return block == 0 ? 0.0 : 2.0 * b * (sweeps + 3.0) + span * sweeps;
}

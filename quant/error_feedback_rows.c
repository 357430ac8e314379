/* Steps 1, 3 and 4 for the rows of a weight. A thread takes QC_FEEDBACK_ROWS of them (a chunk) from
 * the first column to the last, and then again for every sweep. What lies outside a panel of
 * columns is a product with the chunk's errors E = T - Q; what lies inside is done for 16 rows side
 * by side. Rows do not depend on one another. */
#include "quant/error_feedback_rows.h"

#include "base/checked.h"
#include "quant/piecework.h"

#include <math.h>
#include <string.h>

#define TRACE_COLS 256u

typedef qc_feedback_job job;
typedef qc_feedback_chunk chunk;

static uint64_t wide_bytes(uint64_t wide)
{
    return qc_align_u64(qc_sat_mul(wide, QC_FEEDBACK_ROWS * sizeof(float)), 64);
}

uint64_t qc_feedback_chunk_bytes(uint64_t n, uint64_t wide, int whole)
{
    uint64_t bytes = qc_sat_mul(3, wide_bytes(wide));
    bytes = qc_sat_add(bytes, qc_align_u64(qc_sat_mul(n, sizeof(float)), 64));
    if (!whole) {
        bytes = qc_sat_add(bytes, wide_bytes(n));
        bytes = qc_sat_add(bytes, qc_align_u64(qc_sat_mul(n, QC_FEEDBACK_ROWS), 64));
    }
    return qc_sat_add(bytes, qc_align_u64(sizeof(qc_tile), 64) + QC_TILE_COLS * QC_TILE_COLS * 4);
}

chunk qc_feedback_chunk_of(const job *j, unsigned thread, uint64_t first, uint64_t end)
{
    const uint64_t n = j->f->n, each = wide_bytes(j->wide);
    unsigned char *at = j->scratch + thread * j->scratch_each;
    chunk c = {.j = j, .first = first, .rows = qc_min_u64(end - first, QC_FEEDBACK_ROWS)};
    c.tile = (qc_tile *)(void *)at;
    at += qc_align_u64(sizeof(qc_tile), 64);
    c.inside = (float *)(void *)at;
    at += QC_TILE_COLS * QC_TILE_COLS * 4;
    c.row = (float *)(void *)at;
    at += qc_align_u64(n * sizeof(float), 64);
    c.g = (float *)(void *)at;
    c.units = (float *)(void *)(at + each);
    c.v = (float *)(void *)(at + 2 * each);
    c.e = j->g ? j->e + first * n : (float *)(void *)(at + 3 * each);
    c.codes = j->g ? j->codes + first * n : at + 3 * each + wide_bytes(n);
    return c;
}

typedef struct {
    const job *j;
    void (*step)(const chunk *c);
} chunks_work;

static qc_status chunk_piece(void *ctx, unsigned thread, uint64_t piece, qc_error *err)
{
    const chunks_work *w = ctx;
    const chunk c = qc_feedback_chunk_of(w->j, thread, piece * QC_FEEDBACK_ROWS, w->j->rows);
    (void)err;
    w->step(&c);
    return QC_OK;
}

qc_status qc_feedback_on_chunks(const job *j, void (*step)(const chunk *c), qc_error *err)
{
    chunks_work w = {j, step};
    return qc_piecework(j->f->threads, qc_ceil_div_u64(j->rows, QC_FEEDBACK_ROWS), chunk_piece, &w,
                        err);
}

/* ---- products ---- */

void qc_feedback_times_h(const chunk *c, uint64_t col, uint64_t cols, float left, int right,
                         float *to, uint64_t ld_to)
{
    const qc_feedback *f = c->j->f;
    const qc_blas_functions *b = &f->b->f;
    const uint64_t n = f->n, behind = col + cols;
    const int rows = (int)c->rows, width = (int)cols, ld = (int)n, ld_g = (int)ld_to;
    b->ssymm(QC_BLAS_ROWS, QC_BLAS_RIGHT, QC_BLAS_UPPER, rows, width, 1.0f, f->hu + col * n + col,
             ld, c->e + col, ld, 0.0f, to, ld_g);
    if (col > 0)
        b->sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_PLAIN, rows, width, (int)col, left, c->e, ld,
                 f->hu + col, ld, 1.0f, to, ld_g);
    if (right && behind < n)
        b->sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, rows, width, (int)(n - behind), 1.0f,
                 c->e + behind, ld, f->hu + col * n + behind, ld, 1.0f, to, ld_g);
}

/* Returns the trace of E H E^T; c->g has room for QC_TILE_COLS columns at least. */
static double trace(const chunk *c)
{
    const uint64_t n = c->j->f->n;
    const uint64_t most = qc_min_u64(c->j->wide, TRACE_COLS);
    double sum = 0.0;
    for (uint64_t col = 0; col < n; col += most) {
        const uint64_t cols = qc_min_u64(n - col, most);
        qc_feedback_times_h(c, col, cols, 2.0f, 0, c->g, cols);
        for (uint64_t r = 0; r < c->rows; r++)
            for (uint64_t k = 0; k < cols; k++)
                sum += (double)c->g[r * cols + k] * (double)c->e[r * n + col + k];
    }
    return sum;
}

/* ---- tiles ---- */

static uint64_t scale_index(const job *j, uint64_t row, uint64_t col)
{
    return qc_form_by_rows(j->form) ? row : (row * j->f->n + col) >> j->shift;
}

/* Returns the code of element i of the chunk. */
static int code_of(const chunk *c, uint64_t i)
{
    return qc_form_code_of_byte(c->j->form->ops, c->codes[i]);
}

void qc_feedback_load_tile(const chunk *c, uint64_t row, uint64_t col, uint64_t cols,
                           const uint64_t *order)
{
    const job *j = c->j;
    qc_tile *t = c->tile;
    for (unsigned l = 0; l < QC_LANES; l++) {
        const uint64_t r = row + l;
        uint64_t last = UINT64_MAX;
        float scale = 0.0f, inverse = 0.0f;
        if (r >= c->rows) {
            for (uint64_t k = 0; k < cols; k++)
                t->in[k][l] = t->target[k][l] = t->scale[k][l] = t->inverse[k][l] = 0.0f;
            continue;
        }
        for (uint64_t k = 0; k < cols; k++) {
            const uint64_t column = order ? order[col + k] : col + k;
            const uint64_t index = scale_index(j, c->first + r, column);
            if (index != last) {
                last = index;
                scale = j->out->absmax[index];
                inverse = qc_feedback_inverse(j->form->ops, scale);
            }
            t->in[k][l] = c->g[r * cols + k];
            t->target[k][l] = j->target[(c->first + r) * j->f->n + column];
            t->scale[k][l] = scale;
            t->inverse[k][l] = inverse;
        }
    }
}

void qc_feedback_load_codes(const chunk *c, uint64_t row, uint64_t col, uint64_t cols)
{
    const qc_form_ops *form = c->j->form->ops;
    qc_tile *t = c->tile;
    for (unsigned l = 0; l < QC_LANES; l++)
        for (uint64_t k = 0; k < cols; k++) {
            const int code = row + l < c->rows ? code_of(c, (row + l) * c->j->f->n + col + k) : 0;
            t->code[k][l] = code;
            t->value[k][l] = qc_form_value(form, code, t->scale[k][l]);
        }
}

void qc_feedback_store_tile(const chunk *c, uint64_t row, uint64_t col, uint64_t cols,
                            const uint64_t *order)
{
    const uint64_t n = c->j->f->n;
    const qc_tile *t = c->tile;
    for (unsigned l = 0; l < QC_LANES && row + l < c->rows; l++)
        for (uint64_t k = 0; k < cols; k++) {
            c->e[(row + l) * n + col + k] = t->error[k][l];
            c->codes[(row + l) * n + (order ? order[col + k] : col + k)] = (uint8_t)t->code[k][l];
        }
}

/* ---- rounding, feedback, sweeps ---- */

static uint64_t panel_width(const job *j)
{
    return qc_min_u64(j->wide, QC_TILE_COLS);
}

void qc_feedback_round(const chunk *c)
{
    const job *j = c->j;
    const uint64_t n = j->f->n, panel = panel_width(j);
    memset(c->inside, 0, QC_TILE_COLS * QC_TILE_COLS * sizeof *c->inside);
    for (uint64_t col = 0; col < n; col += panel) {
        const uint64_t cols = qc_min_u64(n - col, panel);
        for (uint64_t r = 0; r < c->rows; r++)
            memcpy(c->g + r * cols, j->w + (c->first + r) * n + col, cols * sizeof *c->g);
        for (uint64_t row = 0; row < c->rows; row += QC_LANES) {
            qc_feedback_load_tile(c, row, col, cols, NULL);
            j->f->lanes->feed(c->tile, (uint32_t)cols, c->inside, j->form->ops);
            qc_feedback_store_tile(c, row, col, cols, NULL);
        }
    }
}

void qc_feedback_feed(const chunk *c)
{
    const job *j = c->j;
    const qc_feedback *f = j->f;
    const uint64_t n = f->n, panel = panel_width(j);
    for (uint64_t col = 0; col < n; col += panel) {
        const uint64_t cols = qc_min_u64(n - col, panel);
        for (uint64_t r = 0; r < c->rows; r++)
            for (uint64_t k = 0; k < cols; k++)
                c->g[r * cols + k] = j->target[(c->first + r) * n + f->order[col + k]];
        if (col > 0)
            f->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, (int)c->rows, (int)cols,
                          (int)col, 1.0f, c->e, (int)n, f->hu + col * n, (int)n, 1.0f, c->g,
                          (int)cols);
        for (uint64_t k = 0; k < cols; k++)
            for (uint64_t i = 0; i < k; i++)
                c->inside[i * QC_TILE_COLS + k] = f->hu[(col + k) * n + col + i];
        for (uint64_t row = 0; row < c->rows; row += QC_LANES) {
            qc_feedback_load_tile(c, row, col, cols, f->order);
            f->lanes->feed(c->tile, (uint32_t)cols, c->inside, j->form->ops);
            qc_feedback_store_tile(c, row, col, cols, f->order);
        }
    }
    for (uint64_t r = 0; r < c->rows; r++) {
        memcpy(c->row, c->e + r * n, n * sizeof *c->row);
        for (uint64_t k = 0; k < n; k++)
            c->e[r * n + f->order[k]] = c->row[k];
    }
}

/* Returns the scale nearest to `wish` that its form can hold; 0 where there is none. */
static float possible_scale(const job *j, uint64_t index, float wish, uint8_t *code)
{
    float scale = qc_form_round_scale(j->form, wish);
    if (j->form->nested) {
        const float group = j->out->nested_absmax[(j->out->lead + index) / QC_NESTED_BLOCK];
        const float offset = j->out->nested_offset, place = (wish - offset) / group;
        unsigned low = 0, high = 255; /* finds the first entry of the map not below place */
        if (!(group > 0.0f) || !isfinite(place))
            return 0.0f;
        while (low < high) {
            const unsigned middle = (low + high) / 2;
            if (qc_dynamic_map[middle] < place)
                low = middle + 1;
            else
                high = middle;
        }
        if (low > 0 && place - qc_dynamic_map[low - 1] <= qc_dynamic_map[low] - place)
            low--;
        *code = (uint8_t)low;
        scale = qc_dynamic_map[low] * group;
        scale = scale + offset;
    }
    if (!isfinite(scale) || (!j->form->ops->signed_scales && scale < 0.0f))
        return 0.0f;
    return qc_feedback_inverse(j->form->ops, scale) == 0.0f ? 0.0f : scale;
}

/* Sets the scale of a block in closed form; c->g has E H of its columns and is kept up to date. */
static uint64_t refit_block(const chunk *c, uint64_t col, uint64_t cols)
{
    const job *j = c->j;
    const qc_feedback *f = j->f;
    const qc_form_ops *form = j->form->ops;
    const uint64_t n = f->n;
    uint64_t changed = 0;
    for (uint64_t r = 0; r < c->rows; r++)
        for (uint64_t k = 0; k < cols; k++)
            c->units[r * cols + k] = qc_form_unit(form, code_of(c, r * n + col + k));
    f->b->f.ssymm(QC_BLAS_ROWS, QC_BLAS_RIGHT, QC_BLAS_UPPER, (int)c->rows, (int)cols, 1.0f,
                  f->hu + col * n + col, (int)n, c->units, (int)cols, 0.0f, c->v, (int)cols);
    for (uint64_t r = 0; r < c->rows; r++) {
        const uint64_t index = scale_index(j, c->first + r, col);
        const float *units = c->units + r * cols, *v = c->v + r * cols;
        float *g = c->g + r * cols, *e = c->e + r * n + col;
        const float scale = j->out->absmax[index];
        double ug = 0.0, uu = 0.0;
        uint8_t code = 0;
        for (uint64_t k = 0; k < cols; k++) {
            ug += (double)units[k] * (double)g[k];
            uu += (double)units[k] * (double)v[k];
        }
        if (!(uu > 0.0))
            continue;
        const float better = possible_scale(j, index, (float)((double)scale + ug / uu), &code);
        const double more = (double)better - (double)scale;
        if (better == 0.0f || !(more * (more * uu - 2.0 * ug) < 0.0))
            continue;
        changed++;
        j->out->absmax[index] = better;
        if (j->form->nested)
            j->out->absmax_codes[index] = code;
        for (uint64_t k = 0; k < cols; k++) {
            const int code_k = code_of(c, r * n + col + k);
            e[k] = j->target[(c->first + r) * n + col + k] - qc_form_value(form, code_k, better);
            g[k] -= (float)more * v[k];
        }
    }
    return changed;
}

/* Sets the codes of a panel; c->g has E H of its columns. */
static uint64_t sweep_panel(const chunk *c, uint64_t col, uint64_t cols)
{
    const job *j = c->j;
    const qc_feedback *f = j->f;
    const uint64_t n = f->n;
    uint64_t changed = 0;
    for (uint64_t i = 0; i < cols; i++)
        for (uint64_t k = i; k < cols; k++)
            c->inside[i * QC_TILE_COLS + k] = f->hu[(col + i) * n + col + k];
    for (uint64_t row = 0; row < c->rows; row += QC_LANES) {
        qc_feedback_load_tile(c, row, col, cols, NULL);
        qc_feedback_load_codes(c, row, col, cols);
        changed +=
            f->lanes->sweep(c->tile, (uint32_t)cols, c->inside, f->inverse + col, j->form->ops);
        qc_feedback_store_tile(c, row, col, cols, NULL);
    }
    return changed;
}

static uint64_t sweep_chunk(const chunk *c)
{
    const job *j = c->j;
    const uint64_t n = j->f->n, panel = panel_width(j);
    uint64_t changed = 0;
    for (uint64_t col = 0; col < n; col += j->wide) {
        const uint64_t cols = qc_min_u64(n - col, j->wide);
        qc_feedback_times_h(c, col, cols, 1.0f, 1, c->g, cols);
        if (j->aligned)
            changed += refit_block(c, col, cols);
        for (uint64_t at = col; at < col + cols; at += panel) {
            const uint64_t width = col + cols - at < panel ? col + cols - at : panel;
            if (cols > panel)
                qc_feedback_times_h(c, at, width, 1.0f, 1, c->g, width);
            changed += sweep_panel(c, at, width);
        }
    }
    return changed;
}

void qc_feedback_store_codes(const chunk *c)
{
    const qc_form *form = c->j->form;
    const uint64_t n = c->j->f->n, count = c->rows * n;
    uint8_t *to = (uint8_t *)c->j->out->codes + qc_form_code_bytes(form, c->first * n);
    if (form->ops->words) {
        for (uint64_t row = 0; row < c->rows; row++)
            qc_form_put_row(form, c->codes + row * n, to + row * qc_form_row_bytes(form));
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        qc_form_put_code(form->ops, to, i, c->codes[i]);
    if (form->ops->bits == 4 && count % 2)
        qc_form_put_code(form->ops, to, count, form->ops->zero);
}

/* ---- steps of a chunk ---- */

static void aim(const chunk *c)
{
    const job *j = c->j;
    const uint64_t n = j->f->n;
    j->f->b->f.sgemm(QC_BLAS_ROWS, QC_BLAS_PLAIN, QC_BLAS_TRANS, (int)c->rows, (int)n, (int)n, 1.0f,
                     j->w + c->first * n, (int)n, j->f->m, (int)n, 0.0f, j->made + c->first * n,
                     (int)n);
}

void qc_feedback_take_target(const chunk *c)
{
    const uint64_t n = c->j->f->n;
    memcpy(c->e, c->j->target + c->first * n, c->rows * n * sizeof *c->e);
}

static double *sums_of(const chunk *c)
{
    return c->j->sums + c->first / QC_FEEDBACK_ROWS * 3;
}

static void rounded(const chunk *c)
{
    qc_feedback_round(c);
    sums_of(c)[0] = trace(c);
    qc_feedback_take_target(c);
    sums_of(c)[1] = trace(c);
}

static void calibrated(const chunk *c)
{
    qc_feedback_feed(c);
    for (unsigned i = 0; i < c->j->f->options.sweeps; i++)
        if (sweep_chunk(c) == 0)
            break;
    sums_of(c)[2] = trace(c);
    qc_feedback_store_codes(c);
}

qc_status qc_feedback_run_rows(job *j, qc_feedback_result *result, qc_error *err)
{
    const qc_feedback *f = j->f;
    const uint64_t chunks = qc_ceil_div_u64(j->rows, QC_FEEDBACK_ROWS);
    double sums[3] = {0.0, 0.0, 0.0};
    QC_TRY(qc_feedback_scales(f, j->form, j->w, NULL, j->rows, j->out, err));
    QC_TRY(qc_feedback_on_chunks(j, rounded, err));
    QC_TRY(qc_feedback_scales(f, j->form, j->target, f->d, j->rows, j->out, err));
    QC_TRY(qc_feedback_on_chunks(j, calibrated, err));
    for (uint64_t i = 0; i < chunks; i++)
        for (unsigned k = 0; k < 3; k++)
            sums[k] += j->sums[i * 3 + k];
    result->rounded = sums[1] > 0.0 ? sums[0] / sums[1] : 0.0;
    result->calibrated = sums[1] > 0.0 ? sums[2] / sums[1] : 0.0;
    return QC_OK;
}

qc_status qc_feedback_aim(job *j, float *target, qc_error *err)
{
    j->made = target;
    j->target = target ? target : j->w;
    return target ? qc_feedback_on_chunks(j, aim, err) : QC_OK;
}

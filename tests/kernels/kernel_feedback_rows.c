/* The kernels of kernels/cuda_feedback_rows.cu: a panel's feedback and sweep against
 * quant/error_feedback_lanes.h, bit for bit; the rest against plain loops. */
#include "tests/fixtures/quant_device_fixture.h"

#include "kernels/cuda_feedback_internal.h"
#include "quant/error_feedback_internal.h"

#ifdef QC_CUDA_SHIM
#include <shim_control.h>
#endif

#include <math.h>

static qt_rng rng = {11};

static float *random_floats(uint64_t n, float spread)
{
    float *v = qt_alloc(n, sizeof *v);
    for (uint64_t i = 0; i < n; i++)
        v[i] = spread * qt_randn(&rng);
    return v;
}

/* A piece on both sides; host arrays are the first state. */
typedef struct {
    qc_form form;
    uint64_t rows, n, scales;
    float *hu, *inverse, *target, *e, *absmax, *g;
    uint32_t *order;
    int8_t *codes;
    qd_buffer d_hu, d_inverse, d_target, d_e, d_absmax, d_g, d_order, d_codes, d_changed, d_less,
        d_from;
    qc_cuda_rows p;
} piece;

static qd_buffer device_of(const void *host, uint64_t bytes)
{
    return qd_new_from(host, bytes, 0);
}

/* What turns a code, as the device keeps it, into the form's. */
static int stored(const qc_form_ops *form)
{
    return qc_form_is_table(form) ? 0 : form->zero;
}

/* shift 0: a scale for each row */
static piece make_piece(const qc_form_ops *ops, uint64_t rows, uint64_t n, uint32_t shift)
{
    static const unsigned long long none = 0;
    const uint64_t elems = rows * n;
    piece t = {.form = {.ops = ops,
                        .block_elems = shift ? 1u << shift : 0,
                        .cols = n,
                        .scale_dtype = QC_DTYPE_BF16},
               .rows = rows,
               .n = n};
    t.scales = qc_form_scales(&t.form, elems);
    t.hu = random_floats(n * n, 0.2f);
    t.inverse = qt_alloc(n, 4);
    t.order = qt_alloc(n, 4);
    for (uint64_t k = 0; k < n; k++) {
        t.inverse[k] = k % 9 == 4 ? 0.0f : 1.0f + (float)qt_uniform(&rng);
        t.order[k] = (uint32_t)k;
    }
    for (uint64_t k = n; k-- > 1;) {
        const uint64_t other = qt_below(&rng, k + 1);
        const uint32_t keep = t.order[k];
        t.order[k] = t.order[other];
        t.order[other] = keep;
    }
    t.target = random_floats(elems, 0.02f);
    t.e = random_floats(elems, 0.002f);
    t.g = random_floats(rows * 100, 0.002f);
    t.absmax = qt_alloc(t.scales, 4);
    for (uint64_t i = 0; i < t.scales; i++) {
        t.absmax[i] = (0.02f + 0.03f * (float)qt_uniform(&rng)) / qc_form_reach(ops);
        if (ops->signed_scales && i % 3 == 0)
            t.absmax[i] = -t.absmax[i];
        if (i % 11 == 5)
            t.absmax[i] = i % 2 ? 0.0f : 0x1p-130f;
    }
    t.codes = qt_alloc(elems, 1);
    for (uint64_t i = 0; i < elems; i++)
        t.codes[i] =
            (int8_t)(qc_form_is_table(ops)
                         ? (int)qt_below(&rng, 16)
                         : ops->lowest +
                               (int)qt_below(&rng, (uint64_t)(ops->highest - ops->lowest + 1)));
    t.d_hu = device_of(t.hu, n * n * 4);
    t.d_inverse = device_of(t.inverse, n * 4);
    t.d_target = device_of(t.target, elems * 4);
    t.d_e = device_of(t.e, elems * 4);
    t.d_absmax = device_of(t.absmax, t.scales * 4);
    t.d_g = device_of(t.g, rows * 400);
    t.d_order = device_of(t.order, n * 4);
    t.d_codes = device_of(t.codes, elems);
    t.d_changed = device_of(&none, 8);
    t.d_less = qd_new(rows * QC_CUDA_PANEL * 4, 0);
    t.d_from = qd_new(t.scales * 4, 0);
    t.p = (qc_cuda_rows){.form = qc_cuda_form_of(&t.form),
                         .rows = rows,
                         .n = n,
                         .shift = shift,
                         .hu = t.d_hu.p,
                         .order = t.d_order.p,
                         .inverse = t.d_inverse.p,
                         .target = t.d_target.p,
                         .e = t.d_e.p,
                         .codes = t.d_codes.p,
                         .absmax = t.d_absmax.p,
                         .from_absmax = t.d_from.p,
                         .changed = t.d_changed.p};
    QD_OK(qc_cuda_rows_invert(&t.p, t.scales, qd.stream, &qd.err));
    return t;
}

static void free_piece(piece *t)
{
    qd_buffer *buffers[] = {&t->d_hu,      &t->d_inverse, &t->d_target, &t->d_e,
                            &t->d_absmax,  &t->d_g,       &t->d_order,  &t->d_codes,
                            &t->d_changed, &t->d_less,    &t->d_from};
    for (unsigned i = 0; i < sizeof buffers / sizeof *buffers; i++)
        qd_drop(buffers[i]);
    free(t->hu);
    free(t->inverse);
    free(t->target);
    free(t->e);
    free(t->g);
    free(t->absmax);
    free(t->order);
    free(t->codes);
}

static float scale_at(const piece *t, uint64_t row, uint64_t col)
{
    return t->absmax[qc_form_by_rows(&t->form) ? row : (row * t->n + col) >> t->p.shift];
}

/* What quant's table makes of sixteen rows, into the host's arrays. */
static uint32_t by_lanes(piece *t, uint64_t row, uint64_t col, uint32_t cols, int sweeping,
                         float *by_place)
{
    static qc_tile tile;
    const qc_form_ops *form = t->form.ops;
    static float inside[QC_TILE_COLS * QC_TILE_COLS];
    uint32_t changed = 0;
    memset(&tile, 0, sizeof tile);
    for (uint32_t i = 0; i < cols; i++)
        for (uint32_t k = i + 1; k < cols; k++)
            inside[i * QC_TILE_COLS + k] =
                sweeping ? t->hu[(col + i) * t->n + col + k] : t->hu[(col + k) * t->n + col + i];
    for (unsigned l = 0; l < QC_LANES && row + l < t->rows; l++)
        for (uint32_t k = 0; k < cols; k++) {
            const uint64_t r = row + l, column = sweeping ? col + k : t->order[col + k];
            const float scale = scale_at(t, r, column), target = t->target[r * t->n + column];
            tile.in[k][l] = sweeping ? t->g[r * 100 + k] : target + t->g[r * 100 + k];
            tile.target[k][l] = target;
            tile.scale[k][l] = scale;
            tile.inverse[k][l] = qc_feedback_inverse(form, scale);
            tile.code[k][l] = t->codes[r * t->n + column] + stored(form);
            tile.value[k][l] = qc_form_value(form, tile.code[k][l], scale);
        }
    if (sweeping) {
        for (unsigned l = 0; l < QC_LANES; l++) /* rows that are not there change nothing */
            for (uint32_t k = 0; k < cols && row + l >= t->rows; k++)
                tile.code[k][l] = form->zero;
        changed = qc_feedback_lanes_scalar.sweep(&tile, cols, inside, t->inverse + col, form);
    } else {
        qc_feedback_lanes_scalar.feed(&tile, cols, inside, form);
    }
    for (unsigned l = 0; l < QC_LANES && row + l < t->rows; l++)
        for (uint32_t k = 0; k < cols; k++) {
            const uint64_t r = row + l, at = r * t->n + (sweeping ? col + k : t->order[col + k]);
            by_place[r * QC_TILE_COLS + k] =
                sweeping ? tile.error[k][l] - t->e[at] : tile.error[k][l];
            t->e[at] = tile.error[k][l];
            t->codes[at] = (int8_t)(tile.code[k][l] - stored(form));
        }
    return changed;
}

TEST(panels_are_those_of_quant)
{
    static const struct {
        const qc_form_ops *form;
        uint64_t rows, n, col;
        uint32_t cols, shift;
    } cases[] = {
        {&qc_form_nf4, 70, 192, 64, 64, 6},        {&qc_form_nf4, 33, 101, 64, 37, 6},
        {&qc_form_nf4, 1, 64, 32, 32, 5},          {&qc_form_int8_rows, 40, 77, 13, 64, 0},
        {&qc_form_int8_blocks, 64, 128, 0, 64, 7}, {&qc_form_int8_blocks, 5, 65, 64, 1, 6},
        {&qc_form_w4a16, 45, 128, 64, 64, 7},      {&qc_form_w4a16, 9, 70, 6, 64, 0},
        {&qc_form_w8a16, 20, 96, 32, 32, 5},       {&qc_form_w8a8, 33, 75, 11, 64, 0},
    };
    for (unsigned c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int sweeping = 0; sweeping < 2; sweeping++) {
            const uint64_t rows = cases[c].rows, n = cases[c].n;
            piece t = make_piece(cases[c].form, rows, n, cases[c].shift);
            float *want = qt_alloc(rows * QC_TILE_COLS, 4);
            uint64_t changed = 0;
            qd_buffer place = qd_new(rows * n * 4, 0);
            qc_cuda_rows_panel a = {
                .col = cases[c].col, .cols = cases[c].cols, .g = t.d_g.p, .ldg = 100};
            if (sweeping) {
                a.less = t.d_less.p;
                QD_OK(qc_cuda_rows_sweep(&t.p, &a, qd.stream, &qd.err));
            } else {
                a.by_place = place.p;
                QD_OK(qc_cuda_rows_feed(&t.p, &a, qd.stream, &qd.err));
            }
            for (uint64_t row = 0; row < rows; row += QC_LANES)
                changed += by_lanes(&t, row, a.col, cases[c].cols, sweeping, want);
            float *e = qd_take(&t.d_e, "e"), *less = qd_take(&t.d_less, "less");
            float *by_place = qd_take(&place, "by place");
            int8_t *codes = qd_take(&t.d_codes, "codes");
            unsigned long long *count = qd_take(&t.d_changed, "changed");
            qd_same(e, t.e, rows * n * 4, "e");
            qd_same(codes, t.codes, rows * n, "codes");
            for (uint64_t r = 0; r < rows; r++)
                qd_same(sweeping ? less + r * QC_CUDA_PANEL : by_place + r * n + a.col,
                        want + r * QC_TILE_COLS, a.cols * 4, "errors");
            QT_CHECK(*count == changed, "case %u: %llu changed, not %" PRIu64, c, *count, changed);
            free(e);
            free(less);
            free(by_place);
            free(codes);
            free(count);
            free(want);
            /* taken already */
            t.d_e = t.d_less = t.d_codes = t.d_changed = (qd_buffer){0};
            free_piece(&t);
        }
}

/* What quant's table makes of the rows of a block of G, of which there are at most sixteen. */
static uint32_t by_coupled_lanes(piece *t, const qc_cuda_rows_outputs *a, const float *outputs,
                                 const float *d, uint64_t first, float *less)
{
    static qc_tile tile;
    static qc_tile_outputs o;
    static float inside[QC_TILE_COLS * QC_TILE_COLS];
    const qc_form_ops *form = t->form.ops;
    const uint64_t n = t->n, left = t->rows - first, rows = left < a->block ? left : a->block;
    memset(&tile, 0, sizeof tile);
    memset(&o, 0, sizeof o);
    o.rows = (uint32_t)rows;
    for (uint64_t i = 0; i < a->cols; i++)
        for (uint64_t k = 0; k < a->cols; k++)
            inside[i * QC_TILE_COLS + k] =
                t->hu[(a->col + (i < k ? i : k)) * n + a->col + (i < k ? k : i)];
    for (uint64_t l = 0; l < rows; l++) {
        memcpy(o.g[l], outputs + l * a->ld, rows * sizeof *outputs);
        o.inverse[l] = o.g[l][l] > 0x1p-40f ? 1.0f / o.g[l][l] : 0.0f;
        for (uint64_t k = 0; k < a->cols; k++) {
            const uint64_t at = (first + l) * n + a->col + k;
            const float scale = scale_at(t, first + l, a->col + k);
            tile.in[k][l] = d[(first + l) * QC_CUDA_PANEL + k];
            tile.target[k][l] = t->target[at];
            tile.scale[k][l] = scale;
            tile.inverse[k][l] = qc_feedback_inverse(form, scale);
            tile.code[k][l] = t->codes[at] + stored(form);
            tile.value[k][l] = qc_form_value(form, tile.code[k][l], scale);
        }
    }
    const uint32_t changed = qc_feedback_lanes_scalar.sweep_outputs(
        &tile, (uint32_t)a->cols, inside, t->inverse + a->col, &o, form);
    for (uint64_t l = 0; l < rows; l++)
        for (uint64_t k = 0; k < a->cols; k++) {
            const uint64_t at = (first + l) * n + a->col + k;
            less[(first + l) * QC_CUDA_PANEL + k] = tile.error[k][l] - t->e[at];
            t->e[at] = tile.error[k][l];
            t->codes[at] = (int8_t)(tile.code[k][l] - stored(form));
        }
    return changed;
}

/* Blocks of G with one tile of rows each need no sums, and are those of quant bit for bit. Of one
 * in which nothing changed before, nothing is read or changed. */
TEST(coupled_panels_are_those_of_quant)
{
    static const struct {
        const qc_form_ops *form;
        uint64_t rows, n, col, block, ld;
        uint32_t cols, shift;
    } cases[] = {
        {&qc_form_nf4, 70, 192, 64, 16, 16, 64, 6},
        {&qc_form_nf4, 33, 101, 64, 13, 13, 37, 6},
        {&qc_form_int8_rows, 9, 77, 13, 9, 30, 64, 0},
        {&qc_form_int8_blocks, 5, 65, 64, 1, 1, 1, 6},
        {&qc_form_w4a16, 45, 128, 64, 15, 15, 64, 7},
        {&qc_form_w8a16, 20, 96, 32, 16, 16, 32, 5},
    };
    for (unsigned c = 0; c < sizeof cases / sizeof *cases; c++) {
        const uint64_t rows = cases[c].rows, n = cases[c].n, block = cases[c].block;
        const uint64_t units = (rows + block - 1) / block, each = block * cases[c].ld;
        const uint64_t panels = rows * QC_CUDA_PANEL;
        piece t = make_piece(cases[c].form, rows, n, cases[c].shift);
        float *g = random_floats(units * each, 0.3f), *d = random_floats(panels, 0.002f);
        float *want = qt_alloc(panels, 4);
        unsigned long long *before = qt_alloc(units, 8), *now = qt_alloc(units, 8);
        for (uint64_t u = 0; u < units; u++)
            before[u] = u % 4 != 2;
        for (uint64_t i = 0; i < units * each; i++) /* one output in seven has no gradient */
            if (i % each / cases[c].ld == i % cases[c].ld)
                g[i] = i % 7 == 3 ? 0.0f : 1.0f + (float)qt_uniform(&rng);
        qd_buffer d_g = device_of(g, units * each * 4), d_d = device_of(d, panels * 4);
        qd_buffer d_before = device_of(before, units * 8), d_now = device_of(now, units * 8);
        qd_buffer d_moved = qd_new(units * 4, 0);
        const qc_cuda_rows_outputs a = {.col = cases[c].col,
                                        .cols = cases[c].cols,
                                        .block = block,
                                        .g = d_g.p,
                                        .ld = cases[c].ld,
                                        .d = d_d.p,
                                        .less = t.d_less.p,
                                        .moved = d_moved.p,
                                        .before = d_before.p,
                                        .now = d_now.p};
        QD_OK(qc_cuda_rows_sweep_outputs(&t.p, &a, qd.stream, &qd.err));
        for (uint64_t u = 0; u < units; u++)
            if (before[u])
                now[u] = by_coupled_lanes(&t, &a, g + u * each, d, u * block, want);
        float *e = qd_take(&t.d_e, "e"), *less = qd_take(&t.d_less, "less");
        int8_t *codes = qd_take(&t.d_codes, "codes");
        unsigned long long *count = qd_take(&d_now, "now");
        qd_same(e, t.e, rows * n * 4, "e");
        qd_same(codes, t.codes, rows * n, "codes");
        for (uint64_t r = 0; r < rows; r++)
            qd_same(less + r * QC_CUDA_PANEL, want + r * QC_CUDA_PANEL, a.cols * 4, "less");
        qd_same(count, now, units * 8, "counts");
        free(e);
        free(less);
        free(codes);
        free(count);
        free(g);
        free(d);
        free(want);
        free(before);
        free(now);
        qd_drop(&d_g);
        qd_drop(&d_d);
        qd_drop(&d_before);
        qd_drop(&d_moved);
        t.d_e = t.d_less = t.d_codes = (qd_buffer){0}; /* taken already */
        free_piece(&t);
    }
}

enum { COUPLED = 150, PANELED = 50, BETWEEN = 64 }; /* rows, columns, and columns of the piece */

/* d [COUPLED, QC_CUDA_PANEL] = G e H */
static void coupled_gradients(const piece *t, const float *g, double *d)
{
    static double eh[COUPLED * PANELED];
    memset(eh, 0, sizeof eh);
    for (unsigned r = 0; r < COUPLED; r++)
        for (unsigned j = 0; j < PANELED; j++)
            for (unsigned k = 0; k < PANELED; k++)
                eh[r * PANELED + k] += (double)t->e[r * BETWEEN + j] *
                                       (double)t->hu[(j < k ? j : k) * BETWEEN + (j < k ? k : j)];
    for (unsigned r = 0; r < COUPLED; r++)
        for (unsigned i = 0; i < COUPLED; i++)
            for (unsigned k = 0; k < PANELED; k++)
                d[r * QC_CUDA_PANEL + k] += (double)g[r * COUPLED + i] * eh[i * PANELED + k];
}

/* Chooses codes one after another in double, in the kernel's order, with all changes known. */
static uint64_t choose_coupled(piece *t, const float *g, double *d)
{
    const qc_form_ops *form = t->form.ops;
    uint64_t changed = 0;
    for (unsigned i = 0; i < COUPLED * PANELED; i++) {
        const unsigned tile = i / (16 * PANELED) * 16,
                       rows = tile + 16 > COUPLED ? COUPLED - tile : 16;
        const unsigned r = tile + i % (16 * PANELED) % rows, k = i % (16 * PANELED) / rows;
        const unsigned at = r * BETWEEN + k;
        const float scale = t->absmax[at >> 6];
        const double old = (double)t->target[at] - (double)t->e[at];
        const double place = old + d[r * QC_CUDA_PANEL + k] / (double)g[r * COUPLED + r] /
                                       (double)t->hu[k * BETWEEN + k];
        const double y = place * (double)qc_feedback_inverse(form, scale);
        const int code = (int)fmin(fmax(rint(y), (double)form->lowest), (double)form->highest);
        const float error = t->target[at] - qc_form_value(form, code + stored(form), scale);
        const double less = (double)error - (double)t->e[at];
        if (code == t->codes[at])
            continue;
        changed++;
        t->codes[at] = (int8_t)code;
        t->e[at] = error;
        for (unsigned j = 0; j < COUPLED; j++)
            for (unsigned c = 0; c < PANELED; c++)
                d[j * QC_CUDA_PANEL + c] +=
                    (double)g[j * COUPLED + r] * less *
                    (double)t->hu[(c < k ? c : k) * BETWEEN + (c < k ? k : c)];
    }
    return changed;
}

/* A block of G with several tiles of rows: what tiles change is known to those below, within a
 * chunk and in later ones. Few codes lie so near the middle of two that rounding decides. */
TEST(coupled_tiles_are_those_of_double)
{
    static const unsigned long long one = 1, none = 0;
    piece t = make_piece(&qc_form_w8a16, COUPLED, BETWEEN, 6);
    float *g = random_floats(COUPLED * COUPLED, 0.05f), *d = qt_alloc(COUPLED * QC_CUDA_PANEL, 4);
    double *want = qt_alloc(COUPLED * QC_CUDA_PANEL, 8);
    for (unsigned i = 0; i < COUPLED; i++)
        for (unsigned k = 0; k <= i; k++)
            g[i * COUPLED + k] = g[k * COUPLED + i] = i == k ? 1.0f : g[i * COUPLED + k];
    for (unsigned i = 0; i < BETWEEN; i++) {
        t.inverse[i] = t.hu[i * BETWEEN + i] = 1.0f;
        for (unsigned k = 0; k < i; k++)
            t.hu[k * BETWEEN + i] *= 0.5f;
    }
    for (unsigned i = 0; i < COUPLED * BETWEEN; i++) {
        t.absmax[i >> 6] = 3e-4f;
        t.e[i] = t.target[i] -
                 qc_form_value(t.form.ops, t.codes[i] + stored(t.form.ops), t.absmax[i >> 6]);
    }
    coupled_gradients(&t, g, want);
    for (unsigned i = 0; i < COUPLED * QC_CUDA_PANEL; i++)
        d[i] = (float)want[i];
    QD_OK(qc_cuda_to_device(t.d_hu.p, t.hu, BETWEEN * BETWEEN * 4, qd.stream, &qd.err));
    QD_OK(qc_cuda_to_device(t.d_inverse.p, t.inverse, BETWEEN * 4, qd.stream, &qd.err));
    QD_OK(qc_cuda_to_device(t.d_absmax.p, t.absmax, t.scales * 4, qd.stream, &qd.err));
    QD_OK(qc_cuda_to_device(t.d_e.p, t.e, COUPLED * BETWEEN * 4, qd.stream, &qd.err));
    QD_OK(qc_cuda_rows_invert(&t.p, t.scales, qd.stream, &qd.err));
    qd_buffer d_g = device_of(g, COUPLED * COUPLED * 4), d_before = device_of(&one, 8);
    qd_buffer d_d = device_of(d, COUPLED * QC_CUDA_PANEL * 4), d_now = device_of(&none, 8);
    qd_buffer d_moved = qd_new((COUPLED + 63) / 64 * 4, 0);
    const qc_cuda_rows_outputs a = {.cols = PANELED,
                                    .block = COUPLED,
                                    .g = d_g.p,
                                    .ld = COUPLED,
                                    .d = d_d.p,
                                    .less = t.d_less.p,
                                    .moved = d_moved.p,
                                    .before = d_before.p,
                                    .now = d_now.p};
    QD_OK(qc_cuda_rows_sweep_outputs(&t.p, &a, qd.stream, &qd.err));
    const uint64_t changed = choose_coupled(&t, g, want);
    int8_t *codes = qd_take(&t.d_codes, "codes");
    uint64_t other = 0;
    for (unsigned i = 0; i < COUPLED * BETWEEN; i++)
        other += codes[i] != t.codes[i];
    QT_CHECK(changed > COUPLED * PANELED / 2 && other <= COUPLED * PANELED / 200,
             "of %" PRIu64 " codes that change, %" PRIu64 " differ", changed, other);
    t.d_codes = (qd_buffer){0}; /* taken already */
    qd_buffer *buffers[] = {&d_g, &d_before, &d_d, &d_now, &d_moved};
    for (unsigned i = 0; i < sizeof buffers / sizeof *buffers; i++)
        qd_drop(buffers[i]);
    free(codes);
    free(g);
    free(d);
    free(want);
    free_piece(&t);
}

TEST(refit_is_the_best)
{
    for (unsigned c = 0; c < 5; c++) {
        static const qc_form_ops *const forms[] = {&qc_form_nf4, &qc_form_nf4, &qc_form_int8_rows,
                                                   &qc_form_w4a16, &qc_form_w8a16};
        const qc_form_ops *form = forms[c];
        const uint64_t rows = 37, n = 64;
        piece t = make_piece(form, rows, n, c == 2 ? 0 : 6);
        float *units = qt_alloc(rows * n, 4), *v = qt_alloc(rows * n, 4);
        double *sums = qt_alloc(rows * 2, 8);
        uint64_t moved = 0;
        for (uint64_t i = 0; i < rows * n; i++) {
            units[i] = qc_form_unit(form, t.codes[i] + stored(form));
            v[i] = units[i] * 3.0f;
        }
        qd_buffer d_units = qd_new(rows * n * 4, 0), d_v = device_of(v, rows * n * 4);
        qd_buffer d_sums = device_of(sums, rows * 16);
        QD_OK(qc_cuda_rows_units(&t.p, 0, n, d_units.p, n, qd.stream, &qd.err));
        qc_cuda_rows_refit_args a = {.cols = n,
                                     .width = c == 1 ? 40 : n,
                                     .first = 1,
                                     .last = c != 1,
                                     .units = d_units.p,
                                     .v = d_v.p,
                                     .g = t.d_g.p,
                                     .ldu = n,
                                     .ldv = n,
                                     .ldg = 100,
                                     .sums = d_sums.p,
                                     .before = c == 0 ? t.d_less.p : NULL};
        QD_OK(qc_cuda_rows_refit(&t.p, &a, qd.stream, &qd.err));
        if (c == 1) { /* in two parts */
            a.at = 40;
            a.width = 24;
            a.first = 0;
            a.last = 1;
            a.units = (float *)d_units.p + 40;
            a.v = (float *)d_v.p + 40;
            a.g = (float *)t.d_g.p + 40;
            QD_OK(qc_cuda_rows_refit(&t.p, &a, qd.stream, &qd.err));
        }
        float *got_units = qd_take(&d_units, "units"), *absmax = qd_take(&t.d_absmax, "absmax");
        float *e = qd_take(&t.d_e, "e"), *g = qd_take(&t.d_g, "g");
        float *before = qd_take(&t.d_less, "before");
        unsigned long long *count = qd_take(&t.d_changed, "changed");
        float *from = qd_take(&t.d_from, "from_absmax");
        for (uint64_t i = 0; i < t.scales; i++) {
            const float want = qc_feedback_inverse(form, absmax[i]);
            qd_same(&from[i], &want, 4, "from_absmax");
        }
        free(from);
        qd_same(got_units, units, rows * n * 4, "units");
        for (uint64_t r = 0; r < rows; r++) {
            const float old = scale_at(&t, r, 0), now = absmax[r];
            double ug = 0.0, uu = 0.0;
            for (uint64_t k = 0; k < n; k++) {
                ug += (double)units[r * n + k] * (double)t.g[r * 100 + k];
                uu += (double)units[r * n + k] * (double)v[r * n + k];
            }
            const double want = (double)old + ug / uu;
            const int possible = form->signed_scales || want > 0.0;
            if (form->integer) { /* the scale's dtype may hold nothing that is better */
                const float held = qc_form_round_scale(&t.form, (float)want);
                QT_CHECK(now == held || now == old, "row %" PRIu64 ": %g, not %g", r, (double)now,
                         (double)held);
            }
            QT_CHECK(form->integer ||
                         fabs((double)now - (possible ? want : (double)old)) <= 1e-6 * fabs(want),
                     "row %" PRIu64 ": %g, not %g", r, (double)now, want);
            moved += now != old;
            if (c == 0)
                qd_same(before + r * QC_CUDA_PANEL, t.e + r * n, n * 4, "before");
            for (uint64_t k = 0; k < n && now != old; k++) {
                const float error = t.target[r * n + k] -
                                    qc_form_value(form, t.codes[r * n + k] + stored(form), now);
                const float less = (float)((double)now - (double)old) * v[r * n + k];
                const float true_g = t.g[r * 100 + k] - (c == 1 ? 0.0f : less);
                qd_same(&e[r * n + k], &error, 4, "e");
                qd_same(&g[r * 100 + k], &true_g, 4, "g");
            }
        }
        QT_CHECK(*count == moved && moved > rows / 2, "%llu moved, not %" PRIu64, *count, moved);
        t.d_absmax = t.d_from = t.d_e = t.d_g = t.d_less = t.d_changed = (qd_buffer){0};
        qd_drop(&d_v);
        qd_drop(&d_sums);
        free(got_units);
        free(absmax);
        free(e);
        free(g);
        free(before);
        free(count);
        free(units);
        free(v);
        free(sums);
        free_piece(&t);
    }
}

/* An odd number of codes, in every form, as qc_form_put_code stores them. Behind rows of words are
 * zeros. */
TEST(codes_are_packed)
{
    static const qc_form_ops *const forms[] = {
        &qc_form_nf4,   &qc_form_int8_rows, &qc_form_w2a16, &qc_form_w3a16, &qc_form_w4a16,
        &qc_form_w5a16, &qc_form_w6a16,     &qc_form_w7a16, &qc_form_w8a16, &qc_form_w8a8};
    for (unsigned f = 0; f < 2 * sizeof forms / sizeof *forms; f++) {
        const qc_form_ops *ops = forms[f / 2];
        const uint64_t rows = 9, cols = f % 2 ? 32 : 31, elems = rows * cols;
        piece t = make_piece(ops, rows, cols, 0);
        const uint64_t bytes = qc_form_code_bytes(&t.form, elems);
        uint8_t *want = qt_alloc(bytes, 1);
        memset(want, 0, bytes);
        for (uint64_t i = 0; i < elems; i++)
            if (qc_form_has_gaps(&t.form))
                qc_form_put_code(ops, want + i / cols * qc_form_row_bytes(&t.form), i % cols,
                                 t.codes[i] + stored(ops));
            else
                qc_form_put_code(ops, want, i, t.codes[i] + stored(ops));
        if (ops->bits == 4 && elems % 2)
            qc_form_put_code(ops, want, elems, ops->zero);
        qd_buffer packed = qd_new(bytes, 0);
        QD_OK(qc_cuda_rows_pack(&t.form, t.d_codes.p, elems, packed.p, qd.stream, &qd.err));
        uint8_t *got = qd_take(&packed, "packed");
        qd_same(got, want, bytes, ops->name);
        free(got);
        free(want);
        free_piece(&t);
    }
}

TEST(plain_things)
{
    const uint64_t rows = 13, n = 75;
    piece t = make_piece(&qc_form_nf4, rows, n, 6);
    double *sums = qt_alloc(rows, 8);
    uint8_t *none = qt_alloc(8, 1);
    for (uint64_t r = 0; r < rows; r++)
        sums[r] = 1.0;
    memset(none, 0xff, 8);
    qd_buffer d_sums = device_of(sums, rows * 8), d_square = qd_new(20 * 20 * 4, 0);
    qd_buffer d_bad = device_of(none, 8);
    qd_buffer d_cast = qd_new(rows * n * 4, 0);
    const qc_cuda_strip target = {t.d_target.p, n}, error = {t.d_e.p, n};
    QD_OK(qc_cuda_rows_dot(&target, &error, rows, 70, d_sums.p, qd.stream, &qd.err));
    QD_OK(qc_cuda_rows_square(t.d_hu.p, n, 31, 20, d_square.p, qd.stream, &qd.err));
    QD_OK(qc_cuda_rows_cast(t.d_codes.p, QC_DTYPE_BF16, rows * n / 2, d_cast.p, d_bad.p, qd.stream,
                            &qd.err));
    double *got = qd_take(&d_sums, "sums");
    float *square = qd_take(&d_square, "square"), *floats = qd_take(&d_cast, "cast");
    uint64_t *bad = qd_take(&d_bad, "bad");
    for (uint64_t r = 0; r < rows; r++) {
        double want = 1.0;
        for (uint64_t k = 0; k < 70; k++)
            want += (double)t.target[r * n + k] * (double)t.e[r * n + k];
        QT_CHECK(fabs(got[r] - want) < 1e-12, "sum %g, not %g", got[r], want);
    }
    for (uint64_t i = 0; i < 20; i++)
        for (uint64_t k = 0; k < 20; k++)
            qd_same(&square[i * 20 + k], &t.hu[(31 + (i < k ? i : k)) * n + 31 + (i < k ? k : i)],
                    4, "square");
    for (uint64_t i = 0; i < rows * n / 2; i++) {
        uint16_t half;
        memcpy(&half, t.codes + 2 * i, 2);
        const float want = qc_f32_from_bf16(half);
        qd_same(&floats[i], &want, 4, "cast");
    }
    assert_true(*bad == UINT64_MAX);
    free(got);
    free(square);
    free(floats);
    free(bad);
    free(sums);
    free(none);
    free_piece(&t);
}

#ifdef QC_CUDA_SHIM
/* A grid of one block or two goes round: what it shares is written again. */
TEST(grids_go_round)
{
    for (unsigned grid = 1; grid < 3; grid++) {
        qc_shim_set_grid(grid);
        panels_are_those_of_quant(state);
        coupled_panels_are_those_of_quant(state);
        refit_is_the_best(state);
        codes_are_packed(state);
        plain_things(state);
    }
    qc_shim_set_grid(0);
}
#endif

int main(void)
{
    qd_start();
    const int failed = test_run_all(NULL);
    qd_end();
    return failed != 0;
}

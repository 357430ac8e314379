/* Shows errors by form with the distribution of SQNR, by kind, over the layers, and the worst
 * weights. */
#include "convert/report/report_page.h"

#include "base/text.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#define HEIGHT     132.0
#define LEFT       56.0
#define RIGHT      8.0
#define TOP        8.0
#define BOTTOM     22.0
#define MAX_PLOTS  24u
#define MAX_TITLED 1500u /* dots with a text of their own; the table has the numbers anyway */
#define MAX_TABLE  6000u /* cells of the table over layers */
#define MAX_KINDS  200u
#define WORST      20u
#define MAX_BINS   12u

/* ---- distribution of SQNR -------------------------------------------------------------------- */

static double bin_width(double range)
{
    static const double widths[] = {0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0};
    size_t n = sizeof widths / sizeof *widths;
    for (size_t i = 0; i < n; i++)
        if (range / widths[i] <= (double)(MAX_BINS - 2))
            return widths[i];
    return ceil(range / (double)(MAX_BINS - 2));
}

static void add_distribution(const qc_report *r, uint32_t form)
{
    const qc_report_form *f = &r->forms[form];
    uint64_t bins[MAX_BINS] = {0}, highest = 1,
             exact = 0; /* exact: no bin has room for infinite dB */
    double low = INFINITY, high = -INFINITY;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *t = &r->weights[i];
        if (t->form != form || !t->has_error)
            continue;
        double sqnr = qc_report_sqnr(t->rel_mse);
        exact += isfinite(sqnr) ? 0u : 1u;
        low = isfinite(sqnr) && sqnr < low ? sqnr : low;
        high = isfinite(sqnr) && sqnr > high ? sqnr : high;
    }
    if (!(low <= high)) {
        if (f->with_error)
            QC_PAGE(r, "<p>%s: no error at all.</p>\n", f->name);
        return;
    }
    double width = bin_width(high - low), first = floor(low / width + 1e-9) * width;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *t = &r->weights[i];
        double at = floor((qc_report_sqnr(t->rel_mse) - first) / width + 1e-9);
        if (t->form == form && t->has_error && isfinite(at))
            bins[at < 0 ? 0 : at >= MAX_BINS ? MAX_BINS - 1 : (unsigned)at]++;
    }
    unsigned used = 0;
    for (unsigned i = 0; i < MAX_BINS; i++) {
        highest = bins[i] > highest ? bins[i] : highest;
        used = bins[i] ? i + 1 : used;
    }
    double each = (QC_DRAW_WIDTH - 20.0) / (double)(used < 4 ? 4 : used);
    QC_PAGE(r, "<figure><figcaption><b>%s</b>: how many weights have which SQNR</figcaption>\n",
            f->name);
    qc_page_svg(r, 128.0, "histogram of SQNR; counts stand on the bars");
    for (unsigned i = 0; i < used; i++) {
        double height = 80.0 * (double)bins[i] / (double)highest, x = 10.0 + each * (double)i;
        QC_PAGE(r,
                "<rect class=\"edge m%u\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\"/>"
                "<text class=\"ink\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">%" PRIu64
                "</text>",
                form % 8u, x, 96.0 - height, each - 2.0, height, x + each / 2 - 1.0, 92.0 - height,
                bins[i]);
    }
    QC_PAGE(r, "<line class=\"span\" x1=\"10\" x2=\"%.0f\" y1=\"96\" y2=\"96\"/>",
            QC_DRAW_WIDTH - 10.0);
    for (unsigned i = 0; i <= used; i += used > 6 ? 2 : 1)
        QC_PAGE(r, "<text x=\"%.1f\" y=\"110\" text-anchor=\"%s\">%.4g</text>",
                9.0 + each * (double)i,
                i == 0      ? "start"
                : i == used ? "end"
                            : "middle",
                first + width * (double)i);
    QC_PAGE(r, "<text x=\"%.0f\" y=\"125\" text-anchor=\"end\">dB, higher is better</text></svg>\n",
            QC_DRAW_WIDTH - 10.0);
    if (exact)
        QC_PAGE(r, "<p>%" PRIu64 " more %s no error at all.</p>\n", exact,
                exact == 1 ? "has" : "have");
    QC_PAGE(r, "</figure>\n");
}

/* ---- forms and kinds ------------------------------------------------------------------------- */

/* Writes a cell, which stays empty where the number is not known. */
static void add_number(const qc_report *r, double v, int known)
{
    QC_PAGE(r, known && isfinite(v) ? "<td>%.3g</td>" : "<td></td>", v);
}

static void add_sqnr(const qc_report *r, double rel_mse, int known)
{
    double sqnr = qc_report_sqnr(rel_mse);
    QC_PAGE(r, known && isfinite(sqnr) ? "<td>%.2f</td>" : "<td></td>", sqnr);
}

static void add_forms(const qc_report *r)
{
    qc_page_table(r, "form|mean|SQNR of mean, dB|median|least|largest|weights|bits per weight");
    for (uint32_t i = 0; i < r->form_count; i++) {
        const qc_report_form *f = &r->forms[i];
        int known = f->with_error > 0;
        QC_PAGE(r, "<tr><td>%s %s</td>", qc_report_mark_text(i), f->name);
        add_number(r, f->mean, known);
        add_sqnr(r, f->mean, known);
        add_number(r, f->median, known);
        add_number(r, f->least, known);
        add_number(r, f->most, known);
        QC_PAGE(r, "<td>%" PRIu64 "</td><td>%.3f</td></tr>\n", f->weights,
                f->elems ? qc_facts_bits(f->bytes, f->elems) : 0.0);
    }
    qc_html_table_end(r->page);
    QC_PAGE(r, "<div class=\"grid\">\n");
    for (uint32_t i = 0; i < r->form_count && i < 12; i++)
        add_distribution(r, i);
    QC_PAGE(r, "</div>\n");
}

static void add_kinds(const qc_report *r)
{
    QC_PAGE(r, "<h3>By kind of layer</h3>\n");
    qc_page_table(r, "kind|mean|SQNR, dB|largest|.name in|.text form|weights|bits per weight");
    for (uint32_t i = 0; i < r->kind_count && i < MAX_KINDS; i++) {
        const qc_report_kind *k = &r->kinds[i];
        int known = k->with_error > 0;
        QC_PAGE(r, "<tr><td>%s</td>", qc_page_safe(r, k->name));
        add_number(r, k->mean, known);
        add_sqnr(r, k->mean, known);
        add_number(r, k->most, known);
        const char *in = known && k->weights > 1 ? r->weights[k->most_of].name : "";
        QC_PAGE(r,
                "<td class=\"name\">%s</td><td class=\"text\">%s %s</td><td>%" PRIu64
                "</td><td>%.3f</td></tr>\n",
                qc_page_safe(r, in), qc_report_mark_text(k->form), r->forms[k->form].name,
                k->weights, k->elems ? qc_facts_bits(k->bytes, k->elems) : 0.0);
    }
    qc_html_table_end(r->page);
    if (r->kind_count > MAX_KINDS)
        QC_PAGE(r, "<p>%u more kind%s %s in <code>--json</code>.</p>\n", r->kind_count - MAX_KINDS,
                qc_plural(r->kind_count - MAX_KINDS), qc_are(r->kind_count - MAX_KINDS));
}

/* ---- over the layers ------------------------------------------------------------------------- */

static const qc_report_cell *cell_of(const qc_report *r, uint32_t series, uint32_t layer)
{
    return &r->cells[(size_t)series * r->layer_count + layer];
}

static double x_of(const qc_report *r, uint32_t layer)
{
    return LEFT + (QC_DRAW_WIDTH - LEFT - RIGHT) * ((double)layer + 0.5) / (double)r->layer_count;
}

static double y_of(const qc_report_axis *a, double v)
{
    return HEIGHT - BOTTOM - qc_report_axis_share(a, v) * (HEIGHT - TOP - BOTTOM);
}

static void add_dot(const qc_report *r, const qc_report_axis *a, uint32_t layer,
                    const qc_report_cell *c, int titled)
{
    char title[160];
    double x = x_of(r, layer);
    if (c->count > 1 && c->most > c->least)
        QC_PAGE(r, "<line class=\"span\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" y2=\"%.1f\"/>", x, x,
                y_of(a, c->least), y_of(a, c->most));
    if (c->count > 1)
        (void)snprintf(title, sizeof title, "layer %u: %.3g, %u weights of %.3g to %.3g",
                       r->layers[layer], c->mean, c->count, c->least, c->most);
    else
        (void)snprintf(title, sizeof title, "layer %u: %.4g, %.2f dB", r->layers[layer], c->mean,
                       c->mean > 0 ? qc_report_sqnr(c->mean) : 0.0);
    qc_page_mark(r, c->form, x, y_of(a, c->mean), titled ? title : NULL);
}

static void add_axes(const qc_report *r, const qc_report_axis *a)
{
    double ticks[8];
    unsigned n = qc_report_axis_ticks(a, ticks, 8);
    for (unsigned i = 0; i < n; i++) {
        double y = y_of(a, ticks[i]);
        QC_PAGE(r,
                "<line class=\"line\" x1=\"%.0f\" x2=\"%.0f\" y1=\"%.1f\" y2=\"%.1f\"/><text "
                "x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%.3g</text>",
                LEFT, QC_DRAW_WIDTH - RIGHT, y, y, LEFT - 4.0, y + 4.0, ticks[i]);
    }
    double last = -1e9;
    for (uint32_t l = 0; l < r->layer_count; l++) {
        double x = x_of(r, l);
        if (x - last < 34.0)
            continue;
        QC_PAGE(r, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%u</text>", x, HEIGHT - 6.0,
                r->layers[l]);
        last = x;
    }
    QC_PAGE(r, "<text x=\"0\" y=\"%.0f\">layer</text>\n", HEIGHT - 6.0);
}

static void add_plot(const qc_report *r, const qc_report_axis *a, uint32_t series, int titled)
{
    QC_PAGE(r, "<figure><figcaption>%s</figcaption>\n", qc_page_safe(r, r->series[series]));
    qc_page_svg(r, HEIGHT, "relative error over the layers; the numbers are in the table");
    add_axes(r, a);
    for (uint32_t l = 0; l < r->layer_count; l++)
        if (cell_of(r, series, l)->count)
            add_dot(r, a, l, cell_of(r, series, l), titled);
    QC_PAGE(r, "</svg></figure>\n");
}

/* Finds the range of all cells and returns their number. */
static size_t count_cells(const qc_report *r, double *least, double *most)
{
    size_t cells = 0;
    *least = INFINITY;
    *most = 0.0;
    for (size_t i = 0; r->cells && i < (size_t)r->series_count * r->layer_count; i++) {
        const qc_report_cell *c = &r->cells[i];
        if (!c->count)
            continue;
        *least = c->least < *least ? c->least : *least;
        *most = c->most > *most ? c->most : *most;
        cells++;
    }
    return cells;
}

static int has_cells(const qc_report *r, uint32_t series)
{
    for (uint32_t l = 0; l < r->layer_count; l++)
        if (cell_of(r, series, l)->count)
            return 1;
    return 0;
}

static void add_layer_row(const qc_report *r, const qc_report_axis *a, uint32_t layer)
{
    QC_PAGE(r, "<tr><td>%u</td>", r->layers[layer]);
    for (uint32_t s = 0; s < r->series_count; s++) {
        const qc_report_cell *c = cell_of(r, s, layer);
        if (c->count) {
            int heat = (int)(qc_report_axis_share(a, c->mean) * 9.0 + 0.5);
            const char *mark = r->form_count > 1 ? qc_report_mark_text(c->form) : "";
            mark = c->mixed ? "*" : mark;
            QC_PAGE(r, "<td class=\"h%d\">%.3g%s%s</td>", heat, c->mean, *mark ? " " : "", mark);
        } else if (has_cells(r, s)) {
            QC_PAGE(r, "<td></td>");
        }
    }
    QC_PAGE(r, "</tr>\n");
}

static void add_layer_table(const qc_report *r, const qc_report_axis *a)
{
    QC_PAGE(r, "<details><summary>The numbers, layer by layer</summary>\n"
               "<table>\n<tr><th>layer</th>");
    for (uint32_t s = 0; s < r->series_count; s++)
        if (has_cells(r, s))
            QC_PAGE(r, "<th>%s</th>", qc_page_safe(r, r->series[s]));
    QC_PAGE(r, "</tr>\n");
    for (uint32_t l = 0; l < r->layer_count; l++)
        add_layer_row(r, a, l);
    qc_html_table_end(r->page);
    QC_PAGE(r, "<p class=\"soft\">Darker is a larger error. Where a layer has several "
               "weights of a kind, as with experts, it is their mean; * where their forms "
               "differ.</p>\n</details>\n");
}

static void add_layers(const qc_report *r)
{
    double least = 0.0, most = 0.0;
    size_t cells = count_cells(r, &least, &most);
    qc_page_section(r, "layers", "Error over the layers");
    if (cells == 0) {
        QC_PAGE(r, r->layer_count && !r->cells
                       ? "<p>There are too many kinds and layers to draw.</p>\n"
                       : "<p>No weight has both an error and a layer number in its name.</p>\n");
        return;
    }
    qc_report_axis a = qc_report_axis_of(least, most);
    QC_PAGE(r,
            "<p>Relative error (MSE) of each layer, one drawing per kind of weight, all with the "
            "same%s axis. A line through a mark goes from the least to the largest where a layer "
            "has several such weights.</p>\n",
            a.log ? " logarithmic" : "");
    if (r->form_count > 1) {
        QC_PAGE(r, "<p>");
        for (uint32_t i = 0; i < r->form_count; i++)
            QC_PAGE(r, "%s %s%s", qc_report_mark_text(i), r->forms[i].name,
                    i + 1 < r->form_count ? "; " : ".");
        QC_PAGE(r, "</p>\n");
    }
    QC_PAGE(r, "<div class=\"grid\">\n");
    uint64_t shown = 0;
    for (uint32_t s = 0; s < r->series_count; s++)
        if (has_cells(r, s) && shown++ < MAX_PLOTS)
            add_plot(r, &a, s, cells <= MAX_TITLED);
    QC_PAGE(r, "</div>\n");
    if (shown * r->layer_count <= MAX_TABLE)
        add_layer_table(r, &a);
    else
        QC_PAGE(r, "<p>The %zu numbers are in <code>--json</code>.</p>\n", cells);
}

/* ---- the worst ------------------------------------------------------------------------------- */

static void add_worst(const qc_report *r)
{
    char shape[QC_SHAPE_TEXT_BYTES], place[QC_REPORT_PLACE_BYTES];
    uint32_t shown = r->worst_count < WORST ? r->worst_count : WORST;
    qc_page_section(r, "worst", "Worst weights");
    if (shown == 0) {
        QC_PAGE(r, "<p>Not known: no weight has an error.</p>\n");
        return;
    }
    QC_PAGE(r,
            "<p>The %u of %u with the largest relative error, and the largest difference of a "
            "single value, in the unit of the weights, with its place.</p>\n",
            shown, r->worst_count);
    qc_page_table(r, r->against
                         ? ".name weight|relative MSE|SQNR, dB|times the form's median|times what "
                           "absmax scales leave|clipped values|largest difference|"
                           "at [row, column]|.text form|shape"
                         : ".name weight|relative MSE|SQNR, dB|times the form's median|"
                           "largest difference|at [row, column]|.text form|shape");
    for (uint32_t i = 0; i < shown; i++) {
        const qc_report_weight *t = &r->weights[r->worst[i]];
        const qc_stored_weight *s = t->stored;
        QC_PAGE(r, "<tr><td class=\"name\">%s</td>", qc_page_safe(r, t->name));
        add_number(r, t->rel_mse, 1);
        add_sqnr(r, t->rel_mse, 1);
        if (t->over_median > 0)
            QC_PAGE(r, "<td>%.2f%s</td>", t->over_median, t->over_median >= 2 ? " (!)" : "");
        else
            QC_PAGE(r, "<td></td>");
        if (r->against)
            QC_PAGE(r, "<td>%.3f</td><td>%" PRIu64 "</td>",
                    t->expected > 0 ? t->rel_mse / t->expected : 1.0, t->clipped);
        add_number(r, t->max_err, 1);
        QC_PAGE(r, "<td>%s</td><td class=\"text\">%s %s</td><td>%s</td></tr>\n",
                qc_report_place(place, s->dims, s->ndim, t->max_index),
                qc_report_mark_text(t->form), r->forms[t->form].name,
                qc_text_shape(shape, s->dims, s->ndim));
    }
    qc_html_table_end(r->page);
}

void qc_page_errors(const qc_report *r)
{
    qc_page_section(r, "error", "Error of the weights");
    QC_PAGE(r, "<p>Relative MSE of a weight matrix: the sum of squared differences to the source, "
               "over the sum of squares of the source. 0.01 is an error of 10%% in size, 20 dB of "
               "signal to quantization noise (SQNR). Means count each matrix by its size. ");
    QC_PAGE(r, r->errors == QC_ERRORS_SOURCE ? "These were measured now, against "
               : r->errors == QC_ERRORS_MANIFEST
                   ? "These are from the manifest, as convert measured them."
                   : "There are none: OUT has no manifest. <code>--against MODEL</code> measures "
                     "them.");
    if (r->errors == QC_ERRORS_SOURCE)
        QC_PAGE(r, "<b>%s</b>.", qc_page_safe(r, r->call->against));
    QC_PAGE(r, "</p>\n");
    if (r->errors != QC_ERRORS_NONE && r->worst_count < r->weight_count)
        QC_PAGE(r, "<p><b>Note:</b> the error of %u of %u weights is not known: %s.</p>\n",
                r->weight_count - r->worst_count, r->weight_count, qc_page_safe(r, r->no_errors));
    add_forms(r);
    add_kinds(r);
    add_layers(r);
    add_worst(r);
}

/* Shows what calibrating gained: by kind with a drawing of each, and layer by layer. */
#include "convert/report/report_page.h"

#include <inttypes.h>
#include <string.h>

#define BAR_HEIGHT 18.0
#define BAR_LEFT   8.0
#define MAX_BARS   40u
#define MAX_ROWS   2000u

/* The errors of some weights, each times its elements. */
typedef struct {
    double rounded, calibrated, elems;
    uint32_t weights;
} gain;

static void add_up(gain *g, const qc_report_weight *t)
{
    if (!t->outputs)
        return;
    g->rounded += t->outputs->rounded * (double)t->elems;
    g->calibrated += t->outputs->calibrated * (double)t->elems;
    g->elems += (double)t->elems;
    g->weights++;
}

static double mean(double sum, const gain *g)
{
    return g->elems > 0 ? sum / g->elems : 0.0;
}

/* Returns the share of the error that is left; 1 means no gain. */
static double left_over(const gain *g)
{
    return g->rounded > 0 ? g->calibrated / g->rounded : 1.0;
}

static gain of_series(const qc_report *r, const char *name)
{
    gain g = {0};
    for (uint32_t i = 0; i < r->weight_count; i++)
        if (strcmp(r->kinds[r->weights[i].kind].name, name) == 0)
            add_up(&g, &r->weights[i]);
    return g;
}

static void add_cells(qc_report_writer *w, const gain *g)
{
    QC_PAGE(w, "<td>%.3g</td><td>%.3g</td><td>%.2f</td>", mean(g->rounded, g),
            mean(g->calibrated, g), left_over(g));
}

static void add_kinds(qc_report_writer *w)
{
    const qc_report *r = w->r;
    QC_PAGE(w, "<table>\n<tr><th>kind</th><th>rounded</th><th>calibrated</th><th>left over</th><th>"
               "weights</th></tr>\n");
    for (uint32_t s = 0; s < r->series_count; s++) {
        gain g = of_series(r, r->series[s]);
        if (g.weights == 0)
            continue;
        qc_page_put(w, "<tr><td>", r->series[s], "</td>");
        add_cells(w, &g);
        QC_PAGE(w, "<td>%" PRIu32 "</td></tr>\n", g.weights);
    }
    qc_page_table_end(w);
}

/* Draws what is left of each kind's error, as a bar in a frame that stands for all of it. */
static void add_bars(qc_report_writer *w)
{
    const qc_report *r = w->r;
    uint32_t bars = 0;
    for (uint32_t s = 0; s < r->series_count; s++)
        bars += of_series(r, r->series[s]).weights > 0;
    bars = bars < MAX_BARS ? bars : MAX_BARS;
    QC_PAGE(w, "<figure><figcaption>What is left of the error in outputs, by kind; the frame is "
               "all of it</figcaption>\n");
    qc_page_svg(w, 2.0 * BAR_HEIGHT * (double)bars + 4.0,
                "share of the error in outputs that is left; the numbers are in the table");
    double y = 0.0, width = QC_DRAW_WIDTH - 2.0 * BAR_LEFT;
    for (uint32_t s = 0, shown = 0; s < r->series_count && shown < bars; s++) {
        gain g = of_series(r, r->series[s]);
        if (g.weights == 0)
            continue;
        double share = left_over(&g);
        QC_PAGE(w, "<text x=\"%.0f\" y=\"%.1f\">", BAR_LEFT, y + 13.0);
        qc_page_text(w, r->series[s]);
        QC_PAGE(w,
                ": %.0f%%</text><rect class=\"edge m0\" x=\"%.0f\" y=\"%.1f\" width=\"%.1f\" "
                "height=\"%.0f\"/><line class=\"span\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" "
                "y2=\"%.1f\"/>\n",
                share * 100.0, BAR_LEFT, y + BAR_HEIGHT, width * (share < 1.0 ? share : 1.0),
                BAR_HEIGHT - 4.0, BAR_LEFT + width, BAR_LEFT + width, y + BAR_HEIGHT,
                y + 2.0 * BAR_HEIGHT - 4.0);
        y += 2.0 * BAR_HEIGHT;
        shown++;
    }
    QC_PAGE(w, "</svg></figure>\n");
}

static void add_weights(qc_report_writer *w, uint32_t count)
{
    const qc_report *r = w->r;
    if (count > MAX_ROWS) {
        QC_PAGE(w, "<p>The %" PRIu32 " weights are in <code>--json</code>.</p>\n", count);
        return;
    }
    QC_PAGE(w, "<details><summary>The numbers, weight by weight</summary>\n<table>\n<tr><th "
               "class=\"name\">weight</th><th>rounded</th><th>calibrated</th><th>left over</th>"
               "</tr>\n");
    for (uint32_t i = 0; i < r->weight_count; i++) {
        gain g = {0};
        add_up(&g, &r->weights[i]);
        if (g.weights == 0)
            continue;
        qc_page_put(w, "<tr><td class=\"name\">", r->weights[i].name, "</td>");
        add_cells(w, &g);
        QC_PAGE(w, "</tr>\n");
    }
    qc_page_table_end(w);
    QC_PAGE(w, "</details>\n");
}

void qc_page_outputs(qc_report_writer *w)
{
    const qc_report *r = w->r;
    const qc_manifest *m = r->facts.manifest;
    gain all = {0};
    if (!m || !m->calibration)
        return;
    const qc_manifest_calibration *c = m->calibration;
    for (uint32_t i = 0; i < r->weight_count; i++)
        add_up(&all, &r->weights[i]);
    qc_page_section(w, "outputs", "Gain of calibrating");
    qc_page_put(w, "<p>Calibrated with <b>", c->hessians ? c->hessians : c->text, "</b>");
    if (!c->hessians)
        QC_PAGE(w, ", %" PRIu64 " tokens in windows of %" PRIu64, c->tokens, c->context);
    QC_PAGE(w,
            ": %" PRIu32 " of %" PRIu32
            " quantized weights. The error is that in a layer's outputs "
            "on these inputs, squared, over the outputs' squares: <i>rounded</i> is what searched "
            "scales and codes rounded to nearest leave, <i>calibrated</i> what is in the files, "
            "<i>left over</i> their quotient. Means count each matrix by its size.</p>\n",
            all.weights, r->weight_count);
    if (all.weights == 0)
        return;
    QC_PAGE(w, "<p>All together: %.3g rounded, %.3g calibrated, %.2f left over.</p>\n",
            mean(all.rounded, &all), mean(all.calibrated, &all), left_over(&all));
    add_bars(w);
    add_kinds(w);
    add_weights(w, all.weights);
}

/* Draws histograms of codes, beside what normal weights would give. */
#include "convert/report/report_codes.h"
#include "convert/report/report_page.h"

#include "quant/quant_ops.h"

#include <inttypes.h>
#include <string.h>

#define HEIGHT    150.0
#define BASE      118.0 /* where bars stand */
#define MAX_KINDS 100u

static unsigned bar_count(const qc_report_form *f)
{
    return qc_report_is_4_bit(f) ? 16u : QC_REPORT_BINS;
}

static double share_of(const qc_report_form *f, const qc_report_codes *c, unsigned bar)
{
    double total = c->total ? (double)c->total : 1.0, shares[256];
    if (qc_report_is_4_bit(f))
        return (double)c->counts[bar] / total;
    for (unsigned i = 0; i < 256; i++)
        shares[i] = (double)c->counts[i] / total;
    return qc_report_bin(shares, bar);
}

static double expected_of(const qc_report_form *f, unsigned bar)
{
    return qc_report_is_4_bit(f) ? f->expected[bar] : qc_report_bin(f->expected, bar);
}

static void add_label(qc_report_writer *w, const qc_report_form *f, unsigned bar)
{
    if (qc_report_is_4_bit(f))
        QC_PAGE(w, "%u", bar);
    else
        QC_PAGE(w, "%d", qc_report_bin_first(bar) + 7);
}

static void add_chart(qc_report_writer *w, uint32_t form)
{
    const qc_report_form *f = &w->r->forms[form];
    unsigned bars = bar_count(f);
    double most = 1e-9, each = (QC_DRAW_WIDTH - 8.0) / (double)bars;
    for (unsigned i = 0; i < bars; i++) {
        double v = share_of(f, &f->codes, i);
        most = v > most ? v : most;
        v = f->has_expected ? expected_of(f, i) : 0.0;
        most = v > most ? v : most;
    }
    qc_page_svg(w, HEIGHT, "share of each code; the numbers are in the table");
    for (unsigned i = 0; i < bars; i++) {
        double v = share_of(f, &f->codes, i), height = v / most * (BASE - 16.0);
        double x = 4.0 + each * (double)i;
        QC_PAGE(w,
                "<rect class=\"edge m%u\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\">"
                "<title>",
                form % 8u, x + 1.0, BASE - height, each - 2.0, height);
        add_label(w, f, i);
        QC_PAGE(w, ": %.2f%%</title></rect>", 100.0 * v);
        if (i % 2 == 0 || qc_report_is_4_bit(f)) {
            QC_PAGE(w, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">", x + each / 2,
                    BASE + 14.0);
            add_label(w, f, i);
            QC_PAGE(w, "</text>");
        }
    }
    if (f->has_expected) {
        QC_PAGE(w, "<path class=\"want\" d=\"M4 %.1f", BASE);
        for (unsigned i = 0; i < bars; i++)
            QC_PAGE(w, "V%.1fH%.1f", BASE - expected_of(f, i) / most * (BASE - 16.0),
                    4.0 + each * (double)(i + 1));
        QC_PAGE(w, "V%.1f\"/>", BASE);
    }
    QC_PAGE(w,
            "<line class=\"span\" x1=\"4\" x2=\"%.0f\" y1=\"%.0f\" y2=\"%.0f\"/><text x=\"4\" "
            "y=\"11\">highest: %.1f%%</text><text x=\"%.0f\" y=\"%.0f\" "
            "text-anchor=\"end\">%s</text></svg>\n",
            QC_DRAW_WIDTH - 4.0, BASE, BASE, 100.0 * most, QC_DRAW_WIDTH - 4.0, HEIGHT - 3.0,
            qc_report_is_4_bit(f) ? "code" : "middle of 15 codes");
}

static void add_share_row(qc_report_writer *w, const qc_report_form *f, const qc_report_codes *c,
                          const double *expected, double most)
{
    for (unsigned i = 0; i < bar_count(f); i++) {
        double v = c                       ? share_of(f, c, i)
                   : qc_report_is_4_bit(f) ? expected[i]
                                           : qc_report_bin(expected, i);
        int heat = (int)(v / most * 9.0 + 0.5);
        QC_PAGE(w, "<td class=\"h%d\">%.2f</td>", heat > 9 ? 9 : heat, 100.0 * v);
    }
    QC_PAGE(w, "</tr>\n");
}

/* Writes a table of a form's codes: shares in percent, with a column for each code. */
static void add_table(qc_report_writer *w, uint32_t form)
{
    const qc_report *r = w->r;
    const qc_report_form *f = &r->forms[form];
    double most = 1e-9;
    uint32_t shown = 0;
    for (unsigned i = 0; i < bar_count(f); i++)
        most = share_of(f, &f->codes, i) > most ? share_of(f, &f->codes, i) : most;
    QC_PAGE(w, "<details><summary>The shares in percent, by kind of layer</summary>\n"
               "<table>\n<tr><th>code</th>");
    for (unsigned i = 0; i < bar_count(f); i++) {
        QC_PAGE(w, "<th>");
        if (qc_report_is_4_bit(f))
            QC_PAGE(w, "%u", i);
        else
            QC_PAGE(w, "%d to %d", i == 0 ? -128 : qc_report_bin_first(i),
                    qc_report_bin_first(i) + 14);
        QC_PAGE(w, "</th>");
    }
    QC_PAGE(w, "</tr>\n");
    if (strcmp(f->scheme, "nf4") == 0) {
        QC_PAGE(w, "<tr><td>its value</td>");
        for (unsigned i = 0; i < 16; i++)
            QC_PAGE(w, "<td>%.3f</td>", (double)qc_nf4_code[i]);
        QC_PAGE(w, "</tr>\n");
    }
    QC_PAGE(w, "<tr><td><b>all weights</b></td>");
    add_share_row(w, f, &f->codes, NULL, most);
    if (f->has_expected) {
        QC_PAGE(w, "<tr><td>normal weights</td>");
        add_share_row(w, f, NULL, f->expected, most);
    }
    for (uint32_t k = 0; k < r->kind_count && shown < MAX_KINDS; k++) {
        if (r->kinds[k].form != form)
            continue;
        qc_page_put(w, "<tr><td>", r->kinds[k].name, "</td>");
        add_share_row(w, f, &r->kinds[k].codes, NULL, most);
        shown++;
    }
    qc_page_table_end(w);
    QC_PAGE(w, "</details>\n");
}

void qc_page_codes(qc_report_writer *w)
{
    const qc_report *r = w->r;
    qc_page_section(w, "codes", "Codes");
    QC_PAGE(w, "<p>How often each code occurs among the quantized weights (bars), and how often it "
               "would if weights were normal and scales the largest value of their block or row "
               "(dashed line); searched scales differ from those. The entropy says how many of a "
               "code's bits carry anything.</p>\n<div class=\"grid\">\n");
    for (uint32_t i = 0; i < r->form_count; i++) {
        const qc_report_form *f = &r->forms[i];
        QC_PAGE(w, "<figure><figcaption><b>%s</b>: entropy %.3f of %d bits", f->name,
                qc_report_entropy(&f->codes), qc_report_is_4_bit(f) ? 4 : 8);
        if (f->has_expected)
            QC_PAGE(w, "; %.2f%% of the codes lie elsewhere than with normal weights",
                    100.0 * qc_report_distance(&f->codes, f->expected));
        QC_PAGE(w, "</figcaption>\n");
        add_chart(w, i);
        QC_PAGE(w, "</figure>\n");
    }
    QC_PAGE(w, "</div>\n");
    for (uint32_t i = 0; i < r->form_count; i++) {
        if (r->form_count > 1)
            QC_PAGE(w, "<h3>%s</h3>\n", r->forms[i].name);
        add_table(w, i);
    }
}

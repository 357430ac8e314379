/* Draws histograms of codes, beside what normal weights would give. */
#include "convert/report/report_codes.h"
#include "convert/report/report_page.h"

#include "quant/quant_ops.h"

#include <inttypes.h>
#include <string.h>

#define HEIGHT    150.0
#define BASE      118.0 /* where bars stand */
#define MAX_KINDS 100u

/* The shares of what is drawn: of each code of 4 bits, or of the bins of int8. */
typedef struct {
    unsigned count;
    double v[QC_REPORT_BINS];
} bars;

static bars bars_of(const qc_report_form *f, const double shares[256])
{
    int four_bit = qc_report_is_4_bit(f);
    bars b = {.count = four_bit ? 16u : QC_REPORT_BINS};
    for (unsigned i = 0; i < b.count; i++)
        b.v[i] = four_bit ? shares[i] : qc_report_bin(shares, i);
    return b;
}

static bars bars_of_codes(const qc_report_form *f, const qc_report_codes *c)
{
    double total = c->total ? (double)c->total : 1.0, shares[256];
    for (unsigned i = 0; i < 256; i++)
        shares[i] = (double)c->counts[i] / total;
    return bars_of(f, shares);
}

static double highest(const bars *b)
{
    double most = 1e-9;
    for (unsigned i = 0; i < b->count; i++)
        most = b->v[i] > most ? b->v[i] : most;
    return most;
}

static void add_chart(const qc_report *r, uint32_t form)
{
    const qc_report_form *f = &r->forms[form];
    int four_bit = qc_report_is_4_bit(f);
    bars found = bars_of_codes(f, &f->codes), expected = bars_of(f, f->expected);
    double most = highest(&found), each = (QC_DRAW_WIDTH - 8.0) / (double)found.count;
    if (f->has_expected && highest(&expected) > most)
        most = highest(&expected);
    qc_page_svg(r, HEIGHT, "share of each code; the numbers are in the table");
    for (unsigned i = 0; i < found.count; i++) {
        int label = four_bit ? qc_report_code(f, i) : qc_report_bin_first(i) + 7;
        double height = found.v[i] / most * (BASE - 16.0), x = 4.0 + each * (double)i;
        QC_PAGE(r,
                "<rect class=\"edge m%u\" x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\">"
                "<title>%d: %.2f%%</title></rect>",
                form % QC_HTML_SERIES, x + 1.0, BASE - height, each - 2.0, height, label,
                100.0 * found.v[i]);
        if (i % 2 == 0 || four_bit)
            QC_PAGE(r, "<text x=\"%.1f\" y=\"%.0f\" text-anchor=\"middle\">%d</text>", x + each / 2,
                    BASE + 14.0, label);
    }
    if (f->has_expected) {
        QC_PAGE(r, "<path class=\"want\" d=\"M4 %.1f", BASE);
        for (unsigned i = 0; i < expected.count; i++)
            QC_PAGE(r, "V%.1fH%.1f", BASE - expected.v[i] / most * (BASE - 16.0),
                    4.0 + each * (double)(i + 1));
        QC_PAGE(r, "V%.1f\"/>", BASE);
    }
    QC_PAGE(r,
            "<line class=\"span\" x1=\"4\" x2=\"%.0f\" y1=\"%.0f\" y2=\"%.0f\"/><text x=\"4\" "
            "y=\"11\">highest: %.1f%%</text><text x=\"%.0f\" y=\"%.0f\" "
            "text-anchor=\"end\">%s</text></svg>\n",
            QC_DRAW_WIDTH - 4.0, BASE, BASE, 100.0 * most, QC_DRAW_WIDTH - 4.0, HEIGHT - 3.0,
            four_bit ? "code" : "middle of 15 codes");
}

static void add_share_row(const qc_report *r, const char *title, const bars *b, double most)
{
    QC_PAGE(r, "<tr><td>%s</td>", title);
    for (unsigned i = 0; i < b->count; i++) {
        int heat = (int)(b->v[i] / most * 9.0 + 0.5);
        QC_PAGE(r, "<td class=\"h%d\">%.2f</td>", heat > 9 ? 9 : heat, 100.0 * b->v[i]);
    }
    QC_PAGE(r, "</tr>\n");
}

/* Writes a table of a form's codes: shares in percent, with a column for each code. */
static void add_table(const qc_report *r, uint32_t form)
{
    const qc_report_form *f = &r->forms[form];
    bars all = bars_of_codes(f, &f->codes), expected = bars_of(f, f->expected);
    double most = highest(&all);
    uint32_t shown = 0;
    QC_PAGE(r, "<details><summary>The shares in percent, by kind of layer</summary>\n"
               "<table>\n<tr><th>code</th>");
    for (unsigned i = 0; i < all.count; i++)
        if (qc_report_is_4_bit(f))
            QC_PAGE(r, "<th>%d</th>", qc_report_code(f, i));
        else
            QC_PAGE(r, "<th>%d to %d</th>", i == 0 ? -128 : qc_report_bin_first(i),
                    qc_report_bin_first(i) + 14);
    QC_PAGE(r, "</tr>\n");
    if (strcmp(f->scheme, "nf4") == 0) {
        QC_PAGE(r, "<tr><td>its value</td>");
        for (unsigned i = 0; i < 16; i++)
            QC_PAGE(r, "<td>%.3f</td>", (double)qc_nf4_code[i]);
        QC_PAGE(r, "</tr>\n");
    }
    add_share_row(r, "<b>all weights</b>", &all, most);
    if (f->has_expected)
        add_share_row(r, "normal weights", &expected, most);
    for (uint32_t k = 0; k < r->kind_count && shown < MAX_KINDS; k++) {
        if (r->kinds[k].form != form)
            continue;
        bars kind = bars_of_codes(f, &r->kinds[k].codes);
        add_share_row(r, qc_page_safe(r, r->kinds[k].name), &kind, most);
        shown++;
    }
    qc_html_table_end(r->page);
    QC_PAGE(r, "</details>\n");
}

void qc_page_codes(const qc_report *r)
{
    qc_page_section(r, "codes", "Codes");
    QC_PAGE(r, "<p>How often each code occurs among the quantized weights (bars), and how often it "
               "would if weights were normal and scales the largest value of their block or row "
               "(dashed line); searched scales differ from those. The entropy says how many of a "
               "code's bits carry anything.</p>\n<div class=\"grid\">\n");
    for (uint32_t i = 0; i < r->form_count; i++) {
        const qc_report_form *f = &r->forms[i];
        QC_PAGE(r, "<figure><figcaption><b>%s</b>: entropy %.3f of %d bits", f->name,
                qc_report_entropy(&f->codes), qc_report_is_4_bit(f) ? 4 : 8);
        if (f->has_expected)
            QC_PAGE(r, "; %.2f%% of the codes differ from those of normal weights",
                    100.0 * qc_report_distance(&f->codes, f->expected));
        QC_PAGE(r, "</figcaption>\n");
        add_chart(r, i);
        QC_PAGE(r, "</figure>\n");
    }
    QC_PAGE(r, "</div>\n");
    for (uint32_t i = 0; i < r->form_count; i++) {
        if (r->form_count > 1)
            QC_PAGE(r, "<h3>%s</h3>\n", r->forms[i].name);
        add_table(r, i);
    }
}

#include "convert/report/report_draw.h"

#include "convert/term/html_text.h"

#include <math.h>

void qc_page_text(qc_report_writer *w, const char *text)
{
    qc_html_escape(w->out, text);
}

void qc_page_put(qc_report_writer *w, const char *before, const char *text, const char *after)
{
    qc_html_put(w->out, before, text, after);
}

void qc_page_table_end(qc_report_writer *w)
{
    qc_html_table_end(w->out);
}

void qc_page_section(qc_report_writer *w, const char *id, const char *title)
{
    QC_PAGE(w, "<h2 id=\"%s\">%s</h2>\n", id, title);
}

void qc_page_svg(qc_report_writer *w, double height, const char *label)
{
    QC_PAGE(w,
            "<svg class=\"draw\" viewBox=\"0 0 %.0f %.0f\" xmlns=\"http://www.w3.org/2000/svg\" "
            "role=\"img\" aria-label=\"%s\">\n",
            QC_DRAW_WIDTH, height, label);
}

/* ---- axes and marks -------------------------------------------------------------------------- */

qc_report_axis qc_report_axis_of(double least, double most)
{
    qc_report_axis a = {.log = least > 0 && most >= least * 4};
    if (a.log) {
        a.low = least / 1.25;
        a.high = most * 1.25;
        return a;
    }
    double room = (most - least) * 0.12 + most * 0.01;
    a.low = least > room ? least - room : 0.0;
    a.high = most > 0 ? most + room : 1.0;
    return a;
}

double qc_report_axis_share(const qc_report_axis *a, double v)
{
    double share = a->log && v > 0 ? log(v / a->low) / log(a->high / a->low)
                   : a->log        ? 0.0
                                   : (v - a->low) / (a->high - a->low);
    return share < 0 ? 0.0 : share > 1 ? 1.0 : share;
}

/* Sets ticks at 1, 2 and 5 times powers of ten; in a large range only at powers of ten. */
static unsigned log_ticks(const qc_report_axis *a, double *ticks, unsigned room)
{
    static const double steps[] = {1.0, 2.0, 5.0};
    double decades = log10(a->high / a->low);
    unsigned n = 0;
    for (int e = (int)floor(log10(a->low)); e <= (int)ceil(log10(a->high)); e++)
        for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
            double v = steps[i] * pow(10.0, e);
            if ((i == 0 || decades < 1.3) && v >= a->low && v <= a->high && n < room)
                ticks[n++] = v;
        }
    return n;
}

unsigned qc_report_axis_ticks(const qc_report_axis *a, double *ticks, unsigned room)
{
    if (a->log)
        return log_ticks(a, ticks, room);
    double range = a->high - a->low, step = pow(10.0, floor(log10(range / 2.0)));
    unsigned n = 0;
    if (range / step > 10.0)
        step *= 5.0;
    else if (range / step > 4.0)
        step *= 2.0;
    for (double i = ceil(a->low / step); step * i <= a->high && n < room; i += 1.0)
        ticks[n++] = step * i;
    return n;
}

enum { MARKS = 6 };
static const char *const mark_texts[MARKS] = {"&#9679;", "&#9632;", "&#9650;",
                                              "&#9670;", "&#9675;", "&#9633;"};

const char *qc_report_mark_text(uint32_t form)
{
    return mark_texts[form % MARKS];
}

void qc_page_mark(qc_report_writer *w, uint32_t form, double x, double y, const char *title)
{
    const char *open = form % MARKS < 4 ? "" : " style=\"fill:var(--paper)\"";
    switch (form % MARKS) {
    case 1:
    case 5:
        QC_PAGE(w, "<rect class=\"edge m%u\"%s x=\"%.1f\" y=\"%.1f\" width=\"5.4\" height=\"5.4\">",
                form % QC_HTML_SERIES, open, x - 2.7, y - 2.7);
        break;
    case 2:
        QC_PAGE(w, "<path class=\"edge m%u\" d=\"M%.1f %.1fl3.4 6h-6.8z\">", form % QC_HTML_SERIES,
                x, y - 3.6);
        break;
    case 3:
        QC_PAGE(w, "<path class=\"edge m%u\" d=\"M%.1f %.1fl3.6 3.6l-3.6 3.6l-3.6 -3.6z\">",
                form % QC_HTML_SERIES, x, y - 3.6);
        break;
    default:
        QC_PAGE(w, "<circle class=\"edge m%u\"%s cx=\"%.1f\" cy=\"%.1f\" r=\"2.8\">",
                form % QC_HTML_SERIES, open, x, y);
    }
    if (title)
        QC_PAGE(w, "<title>%s</title>", title);
    QC_PAGE(w, "</%s>",
            form % MARKS == 0 || form % MARKS == 4   ? "circle"
            : form % MARKS == 2 || form % MARKS == 3 ? "path"
                                                     : "rect");
}

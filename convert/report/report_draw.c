#include "convert/report/report_page.h"

#include <math.h>
#include <string.h>

const char *qc_page_safe(const qc_report *r, const char *text)
{
    const char *copy = "";
    qc_strbuf safe;
    qc_strbuf_init(&safe, r->page->max);
    qc_html_escape(&safe, text);
    if (safe.failed != QC_OK ||
        qc_arena_strndup(r->call->arena, &copy, safe.len ? safe.data : "", safe.len, NULL) != QC_OK)
        r->page->failed = r->page->failed != QC_OK ? r->page->failed : QC_ERR_NOMEM;
    qc_strbuf_deinit(&safe);
    return copy;
}

void qc_page_table(const qc_report *r, const char *columns)
{
    QC_PAGE(r, "<table>\n<tr>");
    for (const char *c = columns; *c; c += *c == '|') {
        size_t name = *c == '.' ? strcspn(c, " ") : 0, len = strcspn(c, "|");
        const char *title = name ? c + name + 1 : c;
        if (name)
            QC_PAGE(r, "<th class=\"%.*s\">", (int)name - 1, c + 1);
        else
            QC_PAGE(r, "<th>");
        QC_PAGE(r, "%.*s</th>", (int)(len - (size_t)(title - c)), title);
        c += len;
    }
    QC_PAGE(r, "</tr>\n");
}

void qc_page_section(const qc_report *r, const char *id, const char *title)
{
    QC_PAGE(r, "<h2 id=\"%s\">%s</h2>\n", id, title);
}

void qc_page_svg(const qc_report *r, double height, const char *label)
{
    QC_PAGE(r,
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

/* Sets ticks at 1, 2 and 5 times powers of ten, or, in a large range, at powers of ten only. */
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

void qc_page_mark(const qc_report *r, uint32_t form, double x, double y, const char *title)
{
    static const char *const shapes[MARKS] = {"circle", "rect", "path", "path", "circle", "rect"};
    const char *shape = shapes[form % MARKS];
    const char *open = form % MARKS < 4 ? "" : " style=\"fill:var(--paper)\"";
    QC_PAGE(r, "<%s class=\"edge m%u\"%s ", shape, form % QC_HTML_SERIES, open);
    if (*shape == 'c')
        QC_PAGE(r, "cx=\"%.1f\" cy=\"%.1f\" r=\"2.8\">", x, y);
    else if (*shape == 'r')
        QC_PAGE(r, "x=\"%.1f\" y=\"%.1f\" width=\"5.4\" height=\"5.4\">", x - 2.7, y - 2.7);
    else
        QC_PAGE(r, "d=\"M%.1f %.1f%s\">", x, y - 3.6,
                form % MARKS == 2 ? "l3.4 6h-6.8z" : "l3.6 3.6l-3.6 3.6l-3.6 -3.6z");
    if (title)
        QC_PAGE(r, "<title>%s</title>", title);
    QC_PAGE(r, "</%s>", shape);
}

/* What the sections of a report's page are written and drawn with: one writer goes through them
 * all, and its first failure stays. Drawings are 360 units wide, so that their text can be read on
 * a phone at its own size. */
#ifndef QC_CONVERT_REPORT_DRAW_H
#define QC_CONVERT_REPORT_DRAW_H

#include "convert/report/report_facts.h"

typedef struct {
    const qc_report *r;
    qc_strbuf *out; /* keeps the first failure; later calls do nothing */
} qc_report_writer;

/* printf into the page, as it is. */
#define QC_PAGE(w, ...) qc_strbuf_putf((w)->out, __VA_ARGS__)

/* `text` escaped, alone or between two pieces of HTML; how a table ends: see html_text.h. */
void qc_page_text(qc_report_writer *w, const char *text);
void qc_page_put(qc_report_writer *w, const char *before, const char *text, const char *after);
void qc_page_table_end(qc_report_writer *w);
/* <h2> that the list of contents leads to. */
void qc_page_section(qc_report_writer *w, const char *id, const char *title);
/* "<svg ...>" for a drawing of 360 x height; label: what it shows, for those who do not see it. */
void qc_page_svg(qc_report_writer *w, double height, const char *label);

#define QC_DRAW_WIDTH 360.0

/* A value axis: from low to high, logarithmic where values lie far apart. */
typedef struct {
    double low, high;
    int log;
} qc_report_axis;
/* Around values from least to most, both > 0 (else the axis is straight and begins at 0). */
qc_report_axis qc_report_axis_of(double least, double most);
double qc_report_axis_share(const qc_report_axis *a, double v); /* 0 at low, 1 at high */
/* Up to `room` round values on the axis; returns how many. */
unsigned qc_report_axis_ticks(const qc_report_axis *a, double *ticks, unsigned room);

/* "circle", "square", ...: a form's mark, drawn at x, y and as a character. */
void qc_page_mark(qc_report_writer *w, uint32_t form, double x, double y, const char *title);
const char *qc_report_mark_text(uint32_t form);

#endif

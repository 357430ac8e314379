/* The sections of a report's page are written and drawn with these. One writer goes through them
 * all, and its first failure stays. Drawings are 360 units wide, so that their text can be read on
 * a phone at its own size. */
#ifndef QC_CONVERT_REPORT_DRAW_H
#define QC_CONVERT_REPORT_DRAW_H

#include "convert/report/report_facts.h"

typedef struct {
    const qc_report *r;
    qc_strbuf *out; /* keeps the first failure; later calls do nothing */
} qc_report_writer;

/* Prints into the page, without escaping. */
#define QC_PAGE(w, ...) qc_strbuf_putf((w)->out, __VA_ARGS__)

/* Write `text` escaped, alone or between two strings of HTML; and the end of a table
 * (html_text.h). */
void qc_page_text(qc_report_writer *w, const char *text);
void qc_page_put(qc_report_writer *w, const char *before, const char *text, const char *after);
void qc_page_table_end(qc_report_writer *w);
/* Writes the <h2> that the list of contents leads to. */
void qc_page_section(qc_report_writer *w, const char *id, const char *title);
/* Writes "<svg ...>" for a drawing of 360 x height. label says what it shows, for those who do not
 * see it. */
void qc_page_svg(qc_report_writer *w, double height, const char *label);

#define QC_DRAW_WIDTH 360.0

/* A value axis from low to high. It is logarithmic where values lie far apart. */
typedef struct {
    double low, high;
    int log;
} qc_report_axis;
/* Makes an axis around values from least to most. It can be logarithmic only if both are > 0. */
qc_report_axis qc_report_axis_of(double least, double most);
double qc_report_axis_share(const qc_report_axis *a, double v); /* 0 at low, 1 at high */
/* Sets up to `room` round values on the axis, and returns how many. */
unsigned qc_report_axis_ticks(const qc_report_axis *a, double *ticks, unsigned room);

/* Draw the mark of a form ("circle", "square", ...) at x, y; and return it as a character. */
void qc_page_mark(qc_report_writer *w, uint32_t form, double x, double y, const char *title);
const char *qc_report_mark_text(uint32_t form);

#endif

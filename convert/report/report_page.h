/* The page of `qconv report`: its sections, and what they are written and drawn with.
 *
 * A page has no script and takes nothing from outside. Colour never says anything alone: schemes
 * have shapes, heat has numbers, and bars have labels. Every number that is drawn is also text in a
 * table. Drawings are 360 units wide, so that their text can be read on a phone at its own size. */
#ifndef QC_CONVERT_REPORT_PAGE_H
#define QC_CONVERT_REPORT_PAGE_H

#include "convert/report/report_facts.h"
#include "convert/term/html_text.h"

/* The sections, in the order in which report_page.c calls them. */
void qc_page_errors(const qc_report *r);  /* forms, kinds, layers, worst (report_page_error.c) */
void qc_page_codes(const qc_report *r);   /* report_page_codes.c */
void qc_page_results(const qc_report *r); /* eval and bench (report_page_results.c) */

/* Prints into the page, without escaping. */
#define QC_PAGE(r, ...) qc_strbuf_putf((r)->page, __VA_ARGS__)

/* Returns `text` escaped, in the arena of the report. */
const char *qc_page_safe(const qc_report *r, const char *text);
/* Begins a table. The titles of its columns stand between '|'; one that begins with ".c " gives its
 * column the class c. qc_html_table_end ends it. */
void qc_page_table(const qc_report *r, const char *columns);
/* Writes the <h2> that the list of contents leads to. */
void qc_page_section(const qc_report *r, const char *id, const char *title);
/* Writes "<svg ...>" for a drawing of 360 x height. label says what it shows, for those who do not
 * see it. */
void qc_page_svg(const qc_report *r, double height, const char *label);

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
void qc_page_mark(const qc_report *r, uint32_t form, double x, double y, const char *title);
const char *qc_report_mark_text(uint32_t form);

#endif

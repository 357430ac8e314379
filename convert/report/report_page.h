/* The sections of the page of `qconv report`, in the order in which report_page.c calls them.
 *
 * A page has no script and takes nothing from outside. Colour never says anything alone: schemes
 * have shapes, heat has numbers, and bars have labels. Every number that is drawn is also text in a
 * table. */
#ifndef QC_CONVERT_REPORT_PAGE_H
#define QC_CONVERT_REPORT_PAGE_H

#include "convert/report/report_draw.h"

void qc_page_errors(qc_report_writer *w);  /* forms, kinds, layers, worst (report_page_error.c) */
void qc_page_outputs(qc_report_writer *w); /* gain of calibrating, if any (report_page_outputs.c) */
void qc_page_codes(qc_report_writer *w);   /* report_page_codes.c */
void qc_page_results(qc_report_writer *w); /* eval and bench (report_page_results.c) */

#endif

/* What qconv's HTML pages have in common: a head with one style for light and dark, escaped text,
 * an end. A page is one file without scripts or anything from outside, and well-formed XML, so a
 * plain XML parser can check and read it. */
#ifndef QC_CONVERT_HTML_TEXT_H
#define QC_CONVERT_HTML_TEXT_H

#include "base/strbuf.h"

/* title: plain text. style: CSS after the common one, "" for none; it may use --ink, --paper,
 * --faint (lines), --soft (secondary text), --good, --bad and --c0 to --c7 (series, Okabe and Ito's
 * palette, told apart by colour-blind readers too). */
QC_NODISCARD qc_status qc_html_begin(qc_strbuf *out, const char *title, const char *style,
                                     qc_error *err);
/* Text for between tags or for an attribute in double quotes; what is no character of XML becomes
 * '?'. */
QC_NODISCARD qc_status qc_html_escape(qc_strbuf *out, const char *text, qc_error *err);
QC_NODISCARD qc_status qc_html_end(qc_strbuf *out, qc_error *err);

#define QC_HTML_SERIES 8u

#endif

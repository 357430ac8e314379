/* What qconv's HTML pages have in common: a head with one style for light and dark, escaped text,
 * and an end. A page is one file without scripts or anything from outside. It is well-formed XML,
 * so a plain XML parser can check and read it.
 * Nothing here returns a failure: the page's buffer keeps it, and whoever writes the page asks for
 * it at the end (qc_strbuf_status). */
#ifndef QC_CONVERT_HTML_TEXT_H
#define QC_CONVERT_HTML_TEXT_H

#include "base/strbuf.h"

/* Begins a page. title is plain text. style is CSS that follows the common one, or ""; it may use
 * --ink, --paper, --faint (lines), --soft (secondary text), --good, --bad, and --c0 to --c7
 * (series, in Okabe and Ito's palette, which colour-blind readers can tell apart too). */
void qc_html_begin(qc_strbuf *out, const char *title, const char *style);
/* Appends text for between tags, or for an attribute in double quotes. What is not a character of
 * XML becomes '?'. */
void qc_html_escape(qc_strbuf *out, const char *text);
/* Appends `text`, escaped, between two pieces of HTML. */
void qc_html_put(qc_strbuf *out, const char *before, const char *text, const char *after);
/* Ends the last "<table>" in out, whose rows are <tr> with <th> or <td>, with "</table>". A column
 * that has nothing below its title is left out. On a phone, each row of a table of up to 14 columns
 * becomes a list that names the columns. A wider table scrolls, as does any that is too wide for
 * the page. */
void qc_html_table_end(qc_strbuf *out);

/* One section of a bar: so many bytes of something. */
typedef struct {
    /* Escaped; "weights 3.2 GB" is the tooltip, and what readers who cannot see the bar get. */
    const char *name;
    uint64_t bytes;
    unsigned colour; /* --c0 to --c7 */
} qc_html_part;
/* Appends a bar. `most` is as wide as the page where the bar stands. The sections follow one
 * another, and an outline goes up to `limit` (0: none), in --bad if the sections go beyond it.
 * Positions are percentages, so nothing in it is scaled. */
void qc_html_bar(qc_strbuf *out, const qc_html_part *parts, unsigned count, double limit,
                 double most);
/* Appends the name of a colour, to stand below bars. name is escaped. */
void qc_html_key(qc_strbuf *out, const char *name, unsigned colour);

void qc_html_end(qc_strbuf *out);

#define QC_HTML_SERIES 8u

#endif

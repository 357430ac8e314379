/* What qconv's HTML pages have in common: a head with one style for light and dark, escaped text,
 * an end. A page is one file without scripts or anything from outside, and well-formed XML, so a
 * plain XML parser can check and read it. Nothing here returns a failure: the page's buffer keeps
 * it, and whoever writes the page asks for it at the end (qc_strbuf_status). */
#ifndef QC_CONVERT_HTML_TEXT_H
#define QC_CONVERT_HTML_TEXT_H

#include "base/strbuf.h"

/* title: plain text. style: CSS after the common one, "" for none; it may use --ink, --paper,
 * --faint (lines), --soft (secondary text), --good, --bad and --c0 to --c7 (series, Okabe and Ito's
 * palette, told apart by colour-blind readers too). */
void qc_html_begin(qc_strbuf *out, const char *title, const char *style);
/* Text for between tags or for an attribute in double quotes; what is no character of XML becomes
 * '?'. */
void qc_html_escape(qc_strbuf *out, const char *text);
/* `text` escaped, between two pieces of HTML. */
void qc_html_put(qc_strbuf *out, const char *before, const char *text, const char *after);
/* "</table>" for the last "<table>" in out, whose rows are <tr> with <th> or <td>. A column without
 * anything below its title is left out. On a phone each row of a table of up to 14 columns becomes
 * a list that names the columns; a wider one scrolls, as any does where it is too wide. */
void qc_html_table_end(qc_strbuf *out);

/* A part of a bar: so many bytes of something. */
typedef struct {
    const char
        *name; /* escaped; "weights 3.2 GB" is the tooltip, and read to those who do not see */
    uint64_t bytes;
    unsigned colour; /* --c0 to --c7 */
} qc_html_part;
/* A bar as wide as the page where it stands for `most`: the parts one after another, and an outline
 * up to `limit` (0: none), in --bad where the parts go beyond it. Positions are percentages, so
 * nothing in it is scaled. */
void qc_html_bar(qc_strbuf *out, const qc_html_part *parts, unsigned count, double limit,
                 double most);
/* A colour's name for below bars. name: escaped. */
void qc_html_key(qc_strbuf *out, const char *name, unsigned colour);

void qc_html_end(qc_strbuf *out);

#define QC_HTML_SERIES 8u

#endif

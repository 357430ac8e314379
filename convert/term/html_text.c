#include "convert/term/html_text.h"

#include "base/text.h"
#include "convert/term/size_text.h"

#include <string.h>

#define MAX_COLUMNS 256u /* of a table that is looked through */
#define LIST_MOST   14u  /* columns of a table whose rows become lists on a phone */

static const char common_style[] =
    ":root{--ink:#1c2430;--paper:#fff;--faint:#d8dde5;--soft:#5b6675;--good:#1a7f37;--bad:#b3261e;"
    "--shade:rgba(20,30,50,.28);"
    "--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#56b4e9;--c5:#e69f00;--c6:#6b4fa0;"
    "--c7:#7a7f87}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e3e7ee;--paper:#14181f;--faint:#39414d;"
    "--soft:#9aa5b4;--good:#4cc26b;--bad:#ff8a80;--shade:rgba(190,205,230,.3);--c0:#4aa8e8;--c1:#"
    "ff8c3a;--c2:#2fc79a;"
    "--c3:#e39cc6;--c4:#8fd0f5;--c5:#f2b83d;--c6:#b094e8;--c7:#a8afb9}}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;"
    "color:var(--ink);background:var(--paper)}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}"
    /* A table wider than the page scrolls, and a shadow lies over an edge that hides something. The
     * first two layers scroll with the cells and cover the shadows at the ends. */
    "table{border-collapse:collapse;display:block;overflow-x:auto;background:"
    "linear-gradient(90deg,var(--paper) 30%,transparent) 0 0/2em 100% no-repeat local,"
    "linear-gradient(-90deg,var(--paper) 30%,transparent) 100% 0/2em 100% no-repeat local,"
    "linear-gradient(90deg,var(--shade),transparent) 0 0/.8em 100% no-repeat scroll,"
    "linear-gradient(-90deg,var(--shade),transparent) 100% 0/.8em 100% no-repeat scroll}"
    "th,td{padding:.25em .8em;text-align:right;border-bottom:1px solid var(--faint)}"
    "th{vertical-align:bottom}th:first-child,td:first-child,.left{text-align:left}"
    ".yes{color:var(--good)}.no{color:var(--bad)}.soft{color:var(--soft)}"
    "svg{max-width:100%;height:auto}svg text{font:13px system-ui,sans-serif;fill:var(--ink)}"
    "h1,p,li{overflow-wrap:anywhere}"
    ".bar{margin:.2em 0 .7em}.bar svg,.strip svg{display:block;width:100%}"
    ".c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}"
    ".c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}"
    ".bar rect[class]{fill:var(--c)}"
    ".key{display:inline-block;margin:0 1.1em .3em 0}.key i{display:inline-block;width:.8em;"
    "height:.8em;background:var(--c);margin-right:.35em}"
    /* On a phone, a row of a table that is not too wide is a list of its cells, each with its
     * column's name. */
    "@media (max-width:40em){table.list,table.list tbody{display:block}"
    "table.list{background:none}table.list tr:first-child{display:none}"
    "table.list tr{display:block;border:1px solid var(--faint);border-radius:6px;margin:.5em 0;"
    "padding:.3em .6em}table.list td{display:flex;justify-content:space-between;gap:1em;border:0;"
    "padding:.1em 0;white-space:normal;min-width:0;text-align:right;overflow-wrap:anywhere}"
    "table.list td::before{content:attr(data-t);color:var(--soft);text-align:left;"
    "overflow-wrap:normal;flex:none;max-width:50%}"
    "table.list td:first-child{font-weight:600;justify-content:flex-start;text-align:left}"
    "table.list td:first-child::before{content:none}table.list td:empty{display:none}}";

void qc_html_begin(qc_strbuf *out, const char *title, const char *style)
{
    qc_strbuf_puts(out, "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"/>"
                        "<meta name=\"viewport\" content=\"width=device-width, "
                        "initial-scale=1\"/>"
                        "<meta name=\"color-scheme\" content=\"light dark\"/><title>");
    qc_html_escape(out, title);
    qc_strbuf_puts(out, "</title><style>");
    qc_strbuf_puts(out, common_style);
    qc_strbuf_puts(out, style);
    qc_strbuf_puts(out, "</style></head>\n<body>\n");
}

void qc_html_end(qc_strbuf *out)
{
    qc_strbuf_putf(out, "<p>Made by qconv %s.</p>\n</body>\n</html>\n", QCONV_VERSION);
}

/* The bytes of the UTF-8 character at s if XML allows it and a page may show it, else 0. */
static size_t character_bytes(const char *s)
{
    uint32_t c = 0;
    size_t n = qc_text_char(s, &c);
    int shown = c == '\t' || c == '\n' || !qc_text_is_control(c);
    return shown && c != 0xfffe && c != 0xffff ? n : 0;
}

void qc_html_escape(qc_strbuf *out, const char *text)
{
    const char *s = text;
    while (*s) {
        size_t n = character_bytes(s);
        if (n == 0)
            qc_strbuf_puts(out, "?");
        else if (*s == '&')
            qc_strbuf_puts(out, "&amp;");
        else if (*s == '<')
            qc_strbuf_puts(out, "&lt;");
        else if (*s == '>')
            qc_strbuf_puts(out, "&gt;");
        else if (*s == '"')
            qc_strbuf_puts(out, "&quot;");
        else
            qc_strbuf_put(out, s, n);
        s += n ? n : 1;
    }
}

void qc_html_put(qc_strbuf *out, const char *before, const char *text, const char *after)
{
    qc_strbuf_puts(out, before);
    qc_html_escape(out, text);
    qc_strbuf_puts(out, after);
}

/* ---- tables ---------------------------------------------------------------------------------- */

/* The tags of a table as the pages write them: <tr>, then <th ...>text</th> or <td ...>text</td>,
 * then </tr>. There is no table in a cell. */
typedef struct {
    const char *open, *text, *end; /* "<td", what the cell holds, "</td>" */
    unsigned column;
    int head, row_begins;
} cell;

/* Finds the next cell after `from`. Returns 0 if there is none. */
static int next_cell(const char *from, cell *c)
{
    const char *s = from;
    c->row_begins = 0;
    for (s = strstr(s, "<t"); s; s = strstr(s + 2, "<t")) {
        if (s[2] == 'r') {
            c->row_begins = 1;
            continue;
        }
        if ((s[2] != 'd' && s[2] != 'h') || (s[3] != '>' && s[3] != ' '))
            continue;
        c->open = s;
        c->head = s[2] == 'h';
        c->text = strchr(s, '>') + 1;
        c->end = strstr(c->text, c->head ? "</th>" : "</td>");
        return c->end != NULL;
    }
    return 0;
}

typedef struct {
    const char *title[MAX_COLUMNS]; /* titles in the first row */
    size_t title_len[MAX_COLUMNS];
    int used[MAX_COLUMNS];
    unsigned count, shown;
} columns;

/* Returns 0 if there are too many columns to look at. */
static int find_columns(const char *table, columns *t)
{
    cell c = {.end = table};
    unsigned at = 0;
    memset(t, 0, sizeof *t);
    while (next_cell(c.end, &c)) {
        at = c.row_begins ? 0 : at + 1;
        if (at >= MAX_COLUMNS)
            return 0;
        if (c.head) {
            t->title[at] = c.text;
            t->title_len[at] = (size_t)(c.end - c.text);
            t->count = at + 1;
        } else if (c.end > c.text) {
            t->used[at] = 1;
        }
    }
    for (unsigned i = 0; i < t->count; i++)
        t->shown += t->used[i] != 0;
    return t->shown > 0;
}

static void write_table(qc_strbuf *out, const char *table, const columns *t)
{
    cell c = {.end = table};
    unsigned at = 0;
    int rows = 0;
    qc_strbuf_puts(out, t->shown <= LIST_MOST ? "<table class=\"list\">\n" : "<table>\n");
    while (next_cell(c.end, &c)) {
        at = c.row_begins ? 0 : at + 1;
        if (c.row_begins)
            qc_strbuf_puts(out, rows++ ? "</tr>\n<tr>" : "<tr>");
        if (at >= t->count || !t->used[at])
            continue;
        qc_strbuf_put(out, c.open, 3);
        if (!c.head && t->shown <= LIST_MOST && at > 0) {
            qc_strbuf_puts(out, " data-t=\"");
            qc_strbuf_put(out, t->title[at], t->title_len[at]);
            qc_strbuf_puts(out, "\"");
        }
        qc_strbuf_put(out, c.open + 3, (size_t)(c.end - c.open) - 3);
        qc_strbuf_puts(out, c.head ? "</th>" : "</td>");
    }
    qc_strbuf_puts(out, "</tr>\n</table>\n");
}

void qc_html_table_end(qc_strbuf *out)
{
    static const char begin[] = "<table>";
    columns t;
    qc_strbuf table;
    size_t at = out->len;
    if (out->failed != QC_OK)
        return;
    while (at > 0 && strncmp(out->data + at, begin, sizeof begin - 1) != 0)
        at--;
    if (at == 0) {
        out->failed = QC_ERR_INTERNAL; /* the page ends a table that it did not begin */
        return;
    }
    /* The table is written anew from a copy; a copy that fails is a failure of the page. */
    qc_strbuf_init(&table, out->max);
    qc_strbuf_puts(&table, out->data + at);
    if (table.failed != QC_OK) {
        out->failed = table.failed;
        out->wanted = table.wanted;
    } else if (find_columns(table.data, &t)) {
        out->len = at;
        write_table(out, table.data, &t);
    } else {
        qc_strbuf_puts(out, "</table>\n");
    }
    qc_strbuf_deinit(&table);
}

/* ---- bars ------------------------------------------------------------------------------------ */

void qc_html_bar(qc_strbuf *out, const qc_html_part *parts, unsigned count, double limit,
                 double most)
{
    char size[QC_SIZE_TEXT_BYTES];
    double x = 0.0, scale = most > 0 ? 99.6 / most : 0.0;
    qc_strbuf_puts(out, "<svg width=\"100%\" height=\"26\" "
                        "xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"");
    for (unsigned i = 0; i < count; i++)
        qc_strbuf_putf(out, "%s%s %s", i ? ", " : "", parts[i].name,
                       qc_text_bytes(size, parts[i].bytes));
    qc_strbuf_puts(out, "\">");
    for (unsigned i = 0; i < count; i++) {
        double width = (double)parts[i].bytes * scale;
        if (parts[i].bytes > 0)
            qc_strbuf_putf(out,
                           "<rect class=\"c%u\" x=\"%.3f%%\" y=\"1\" width=\"%.3f%%\" "
                           "height=\"24\"><title>%s %s</title></rect>",
                           parts[i].colour, x, width, parts[i].name,
                           qc_text_bytes(size, parts[i].bytes));
        x += width;
    }
    /* The sections that go beyond the outline are too much. */
    if (limit > 0)
        qc_strbuf_putf(out,
                       "<rect x=\"0.1%%\" y=\"1\" width=\"%.3f%%\" height=\"24\" "
                       "fill=\"none\" style=\"stroke:%s\" stroke-width=\"2\"/>",
                       limit * scale, x > limit * scale * 1.000001 ? "var(--bad)" : "currentColor");
    qc_strbuf_puts(out, "</svg>");
}

void qc_html_key(qc_strbuf *out, const char *name, unsigned colour)
{
    qc_strbuf_putf(out, "<span class=\"key c%u\"><i></i>%s</span>\n", colour, name);
}

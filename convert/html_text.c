#include "convert/html_text.h"

#include "base/text.h"

#include <string.h>

static const char common_style[] =
    ":root{--ink:#1c2430;--paper:#fff;--faint:#d8dde5;--soft:#5b6675;--good:#1a7f37;--bad:#b3261e;"
    "--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#56b4e9;--c5:#e69f00;--c6:#6b4fa0;"
    "--c7:#7a7f87}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e3e7ee;--paper:#14181f;--faint:#39414d;"
    "--soft:#9aa5b4;--good:#4cc26b;--bad:#ff8a80;--c0:#4aa8e8;--c1:#ff8c3a;--c2:#2fc79a;"
    "--c3:#e39cc6;--c4:#8fd0f5;--c5:#f2b83d;--c6:#b094e8;--c7:#a8afb9}}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:62em;padding:0 1em;"
    "color:var(--ink);background:var(--paper)}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}"
    "table{border-collapse:collapse}th,td{padding:.25em .8em;text-align:right;"
    "border-bottom:1px solid var(--faint)}th:first-child,td:first-child{text-align:left}"
    ".yes{color:var(--good)}.no{color:var(--bad)}svg{max-width:100%;height:auto}"
    "svg text{font:13px system-ui,sans-serif;fill:var(--ink)}"
    "h1,p,li{overflow-wrap:anywhere}"
    "@media (max-width:40em){table{display:block;overflow-x:auto}}";

qc_status qc_html_begin(qc_strbuf *out, const char *title, const char *style, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out,
                          "<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"/>"
                          "<meta name=\"viewport\" content=\"width=device-width, "
                          "initial-scale=1\"/>"
                          "<meta name=\"color-scheme\" content=\"light dark\"/><title>",
                          err));
    QC_TRY(qc_html_escape(out, title, err));
    QC_TRY(qc_strbuf_adds(out, "</title><style>", err));
    QC_TRY(qc_strbuf_adds(out, common_style, err));
    QC_TRY(qc_strbuf_adds(out, style, err));
    return qc_strbuf_adds(out, "</style></head>\n<body>\n", err);
}

qc_status qc_html_end(qc_strbuf *out, qc_error *err)
{
    return qc_strbuf_addf(out, err, "<p>Made by qconv %s.</p>\n</body>\n</html>\n", QCONV_VERSION);
}

/* Bytes of the UTF-8 character at s that XML allows and a page may show, 0 if there is none. */
static size_t character_bytes(const char *s)
{
    uint32_t c = 0;
    size_t n = qc_text_char(s, &c);
    int shown = c == '\t' || c == '\n' || !qc_text_is_control(c);
    return shown && c != 0xfffe && c != 0xffff ? n : 0;
}

qc_status qc_html_escape(qc_strbuf *out, const char *text, qc_error *err)
{
    const char *s = text;
    while (*s) {
        size_t n = character_bytes(s);
        if (n == 0)
            QC_TRY(qc_strbuf_adds(out, "?", err));
        else if (*s == '&')
            QC_TRY(qc_strbuf_adds(out, "&amp;", err));
        else if (*s == '<')
            QC_TRY(qc_strbuf_adds(out, "&lt;", err));
        else if (*s == '>')
            QC_TRY(qc_strbuf_adds(out, "&gt;", err));
        else if (*s == '"')
            QC_TRY(qc_strbuf_adds(out, "&quot;", err));
        else
            QC_TRY(qc_strbuf_add(out, s, n, err));
        s += n ? n : 1;
    }
    return QC_OK;
}

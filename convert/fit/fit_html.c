/* qconv plan --html: one page, drawn with inline SVG whose widths are percentages. */
#include "convert/fit/fit_report.h"
#include "convert/term/html_text.h"
#include "convert/term/size_text.h"

#include <inttypes.h>

/* A colour means a part of a device's memory and nothing else. */
static const struct {
    const char *name;
    unsigned colour;
} parts[] = {{"weights", 0}, {"KV cache", 5}, {"workspace", 2}, {"CUDA context", 3}};
enum { PARTS = sizeof parts / sizeof *parts };

static const char page_style[] =
    ".strip text{font-size:12px}.strip rect{stroke:var(--paper);stroke-width:.6;fill:var(--faint)}"
    ".strip .other rect{fill:var(--soft)}";

static const char *size_or_none(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes)
{
    return bytes == QC_NO_LIMIT ? "no limit" : qc_text_bytes(out, bytes);
}

static const char *found_text(char out[QC_SIZE_TEXT_BYTES], uint64_t found)
{
    return found == 0 ? "none fits" : found == QC_NO_LIMIT ? "no limit" : qc_text_count(out, found);
}

/* Adds the longest context for the way of reading prompts that was asked for, and for the other. */
static void add_longest(const qc_fit_report *r, qc_strbuf *out)
{
    char count[QC_SIZE_TEXT_BYTES];
    const qc_fit_prefill *ways[] = {r->use->prefill ? &r->steps : &r->whole,
                                    r->use->prefill ? &r->whole : &r->steps};
    for (int i = 0; i < 2; i++) {
        if (i == 1 && ways[1]->max_context == ways[0]->max_context)
            break;
        qc_strbuf_putf(out, "%s%s%s, ", i == 0 ? " Longest context at batch 1: <b>" : "; ",
                       found_text(count, ways[i]->max_context), i == 0 ? "</b>" : "");
        qc_fit_prefill_text(ways[i], out);
    }
    qc_strbuf_puts(out, ".");
}

static void add_title(const qc_fit_report *r, qc_strbuf *out)
{
    const qc_fit *fit = r->fit;
    qc_html_put(out, "<h1>", r->model, " as ");
    qc_strbuf_putf(out, "%s on ", r->to);
    qc_html_escape(out, fit->budget->text);
    qc_strbuf_putf(out, ": <span class=\"%s\">%s</span></h1>\n", fit->fits ? "yes" : "no",
                   fit->fits ? "fits" : "does not fit");
    if (fit->geometry->cache_unknown)
        qc_strbuf_puts(out, "<p class=\"no\">The size of its KV cache is not known.</p>\n");
}

/* Adds what `text` holds, escaped, as a paragraph, or nothing if it is empty. Frees the buffer. */
static qc_status add_paragraph(const char *begin, qc_strbuf *text, qc_strbuf *out, qc_error *err)
{
    qc_status st = qc_strbuf_status(text, err);
    if (text->len > 0)
        qc_html_put(out, begin, text->data, "</p>\n");
    qc_strbuf_deinit(text);
    return st;
}

static void add_summary(const qc_fit_report *r, qc_strbuf *out)
{
    char size[QC_SIZE_TEXT_BYTES], count[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    qc_strbuf_putf(out, "<p>%s parameters, ", qc_text_count(count, r->parameters));
    qc_strbuf_putf(out, "%s of weights, ", qc_text_bytes(size, fit->weight_bytes));
    qc_strbuf_putf(out, "%s of files before compression.", qc_text_bytes(size, r->file_bytes));
    if (r->generates && !fit->geometry->cache_unknown) {
        qc_strbuf_putf(out, " KV cache of %s", qc_text_bytes(size, fit->kv_bytes));
        qc_strbuf_putf(out, " for a context of %s tokens and batch %" PRIu64 ".",
                       qc_text_count(count, r->use->context), r->use->batch);
        if (qc_fit_has_mla(fit->geometry)) {
            qc_strbuf_puts(out, " ");
            qc_fit_mla_text(r->use, out);
            qc_strbuf_puts(out, ".");
        }
        add_longest(r, out);
        qc_strbuf_putf(out, " Largest batch at this context: %s.", found_text(count, r->max_batch));
    }
    qc_strbuf_puts(out, "</p>\n");
}

static double needed_of(const qc_fit_device *d)
{
    return (double)d->weight_bytes + (double)d->kv_bytes + (double)d->workspace_bytes +
           (double)d->context_bytes;
}

static void add_bar(const qc_fit_report *r, uint32_t device, double most, qc_strbuf *out)
{
    char used[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    const qc_fit_device *d = &r->fit->devices[device];
    const uint64_t bytes[PARTS] = {d->weight_bytes, d->kv_bytes, d->workspace_bytes,
                                   d->context_bytes};
    qc_html_part shown[PARTS];
    for (int i = 0; i < PARTS; i++)
        shown[i] = (qc_html_part){parts[i].name, bytes[i], parts[i].colour};
    qc_strbuf_putf(out, "<div class=\"bar\"><b>%s</b>: %s%s%s%s\n", d->device->name,
                   qc_text_bytes(used, (uint64_t)needed_of(d)),
                   d->budget_bytes == QC_NO_LIMIT ? ", " : " of ",
                   size_or_none(size, d->budget_bytes),
                   d->short_by_bytes ? " <span class=\"no\">(too much)</span>" : "");
    qc_html_bar(out, shown, PARTS, d->budget_bytes == QC_NO_LIMIT ? 0.0 : (double)d->budget_bytes,
                most);
    qc_strbuf_puts(out, "</div>\n");
}

static void add_picture(const qc_fit_report *r, qc_strbuf *out)
{
    const qc_fit *fit = r->fit;
    double most = 1.0;
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        const qc_fit_device *d = &fit->devices[i];
        double sum = needed_of(d), budget = (double)d->budget_bytes;
        double end = d->budget_bytes == QC_NO_LIMIT || sum > budget ? sum : budget;
        most = end > most ? end : most;
    }
    qc_strbuf_puts(out, "<h2>Memory</h2>\n");
    for (uint32_t i = 0; i < fit->budget->count; i++)
        add_bar(r, i, most, out);
    qc_strbuf_puts(out, "<p>");
    for (int i = 0; i < PARTS; i++)
        qc_html_key(out, parts[i].name, parts[i].colour);
    qc_strbuf_puts(out, "</p>\n");
}

static double segment_size(const qc_fit *fit, uint32_t i)
{
    return (double)fit->segment_bytes[i] + (double)fit->segment_kv[i];
}

/* Draws the boxes of the segments [first, end), which lie on one device, and its name below. */
static void add_run(const qc_fit *fit, uint32_t first, uint32_t end, double x, double total,
                    qc_strbuf *out)
{
    char size[QC_SIZE_TEXT_BYTES], cache[QC_SIZE_TEXT_BYTES];
    const char *device = fit->budget->devices[fit->device_of[first]].name;
    double from = x;
    for (uint32_t i = first; i < end; i++) {
        double width = segment_size(fit, i) / total * 100.0;
        qc_strbuf_putf(out,
                       "<rect x=\"%.3f%%\" y=\"2\" width=\"%.3f%%\" height=\"28\">"
                       "<title>",
                       x, width);
        qc_html_escape(out, fit->segments->segments[i].name);
        qc_strbuf_putf(out, ": %s of weights, %s of cache on %s</title></rect>\n",
                       qc_text_bytes(size, fit->segment_bytes[i]),
                       qc_text_bytes(cache, fit->segment_kv[i]), device);
        x += width;
    }
    if (x - from > 12.0) /* room for a name on a phone */
        qc_strbuf_putf(out, "<text x=\"%.3f%%\" y=\"46\" text-anchor=\"middle\">%s</text>\n",
                       (from + x) / 2.0, device);
}

/* Draws every segment as a box whose width is its share of the bytes. Segments in a row on one
 * device have the same shade, and those on the next device another. The runs follow in words. */
static void add_placement(const qc_fit_report *r, qc_strbuf *out)
{
    const qc_fit *fit = r->fit;
    const qc_segments *s = fit->segments;
    double total = 0.0, x = 0.0;
    uint32_t end = 0;
    for (uint32_t i = 0; i < s->count; i++)
        total += segment_size(fit, i);
    if (total <= 0.0 || fit->ranks > 0)
        return;
    qc_strbuf_puts(out, "<h2>Placement, in the order a token passes</h2>\n<div class=\"strip\">"
                        "<svg height=\"52\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" "
                        "aria-label=\"which parts of the model lie where; also in words below\">"
                        "\n");
    for (uint32_t i = 0, runs = 0; i < s->count; i = end, runs++) {
        for (end = i + 1; end < s->count && fit->device_of[end] == fit->device_of[i];)
            end++;
        qc_strbuf_puts(out, runs % 2 ? "<g class=\"other\">\n" : "<g>\n");
        add_run(fit, i, end, x, total, out);
        qc_strbuf_puts(out, "</g>\n");
        for (uint32_t n = i; n < end; n++)
            x += segment_size(fit, n) / total * 100.0;
    }
    qc_strbuf_puts(out, "</svg></div>\n<p>");
    for (uint32_t i = 0; i < s->count; i = end) {
        for (end = i + 1; end < s->count && fit->device_of[end] == fit->device_of[i];)
            end++;
        qc_strbuf_putf(out, "%s<b>%s</b>: ", i ? "; " : "",
                       fit->budget->devices[fit->device_of[i]].name);
        qc_html_escape(out, s->segments[i].name);
        if (end > i + 1) {
            qc_strbuf_puts(out, end > i + 2 ? " to " : " and ");
            qc_html_escape(out, s->segments[end - 1].name);
        }
    }
    qc_strbuf_puts(out, ".</p>\n");
}

/* With --tp there is no placement to draw: every card has a share of everything. */
static qc_status add_split(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    qc_strbuf text, command;
    qc_strbuf_init(&text, 1u << 12);
    qc_strbuf_init(&command, 1u << 12);
    qc_fit_split_text(r, &text);
    if (text.len > 0)
        qc_strbuf_puts(&text, ".");
    if (r->fit->fits)
        qc_fit_serve_text(r, &command);
    qc_status st = add_paragraph("<h2>Split</h2>\n<p>In this plan ", &text, out, err);
    if (st == QC_OK && command.len > 0)
        qc_html_put(out, "<p><code>", command.data, "</code></p>\n");
    if (st == QC_OK)
        st = qc_strbuf_status(&command, err);
    qc_strbuf_deinit(&command);
    return st;
}

static void add_tables(const qc_fit_report *r, qc_strbuf *out)
{
    const qc_table devices = qc_fit_devices(r);
    qc_strbuf_puts(out, "<h2>Devices</h2>\n");
    qc_table_html(&devices, out);
    qc_strbuf_puts(out, "<h2>Schemes</h2>\n<table>\n<tr><th>scheme</th>"
                        "<th>tensors</th><th>parameters</th><th>bytes</th></tr>\n");
    for (uint32_t i = 0; i < r->scheme_count; i++) {
        const qc_fit_scheme *s = &r->schemes[i];
        char count[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
        qc_strbuf_putf(out, "<tr><td>%s</td><td>%" PRIu64 "</td><td>%s</td><td>%s</td></tr>\n",
                       s->name, s->tensors, qc_text_count(count, s->weights),
                       qc_text_bytes(size, s->bytes));
    }
    qc_html_table_end(out);
}

static void add_choices(const qc_fit_report *r, qc_strbuf *out)
{
    const qc_table others = qc_fit_other_choices(r);
    if (r->chosen)
        qc_strbuf_putf(out, "<h2>Error</h2>\n<p>Predicted: %.3g. %s %s</p>\n", r->chosen->predicted,
                       QC_ERROR_UNIT, QC_ERROR_SEEN);
    if (r->choice_count > 0)
        qc_strbuf_puts(out,
                       "<h2>What else these devices could hold</h2>\n<p>" QC_AUTO_TRADES ":</p>\n");
    qc_table_html(&others, out);
}

static void add_suggestions(const qc_fit_report *r, qc_strbuf *out)
{
    if (r->suggestion_count == 0)
        return;
    qc_strbuf_puts(out, "<h2>What would fit</h2>\n<ul>\n");
    for (uint32_t i = 0; i < r->suggestion_count; i++)
        qc_html_put(out, "<li>", r->suggestions[i].sentence, "</li>\n");
    qc_strbuf_puts(out, "</ul>\n");
}

qc_status qc_fit_report_html(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    qc_strbuf text;
    qc_html_begin(out, "qconv plan", page_style);
    add_title(r, out);
    qc_strbuf_init(&text, 1u << 16);
    qc_fit_verdict(r, &text);
    QC_TRY(add_paragraph("<p class=\"no\">", &text, out, err));
    add_summary(r, out);
    add_picture(r, out);
    qc_strbuf_init(&text, 1u << 20);
    qc_fit_budget_notes(r, "", ". ", &text);
    QC_TRY(add_paragraph("<p class=\"soft\">Budgets: ", &text, out, err));
    add_placement(r, out);
    QC_TRY(add_split(r, out, err));
    add_tables(r, out);
    add_choices(r, out);
    add_suggestions(r, out);
    qc_html_end(out);
    return qc_strbuf_status(out, err);
}

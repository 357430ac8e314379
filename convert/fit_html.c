/* qconv plan --html: one page, drawn with inline SVG. */
#include "convert/fit_report.h"
#include "convert/html_text.h"
#include "convert/size_text.h"

#include <inttypes.h>

#define BAR_WIDTH  640.0
#define BAR_HEIGHT 26
#define STRIP_STEP 900.0

/* Okabe and Ito's palette, told apart by colour-blind readers too. */
static const struct {
    const char *name, *colour;
} parts[] = {{"weights", "#0072b2"},
             {"KV cache", "#e69f00"},
             {"workspace", "#009e73"},
             {"CUDA context", "#cc79a7"}};
enum { PARTS = sizeof parts / sizeof *parts };
static const char *const device_colours[] = {"#0072b2", "#e69f00", "#009e73",
                                             "#cc79a7", "#56b4e9", "#d55e00"};
enum { DEVICE_COLOURS = sizeof device_colours / sizeof *device_colours };

static const char *size_or_none(char out[QC_SIZE_TEXT_BYTES], uint64_t bytes)
{
    return bytes == QC_NO_LIMIT ? "no limit" : qc_text_bytes(out, bytes);
}

static const char *found_text(char out[QC_SIZE_TEXT_BYTES], uint64_t found)
{
    return found == 0 ? "none fits" : found == QC_NO_LIMIT ? "no limit" : qc_text_count(out, found);
}

static qc_status add_summary(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], count[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    QC_TRY(qc_strbuf_adds(out, "<h1>", err));
    QC_TRY(qc_html_escape(out, r->model, err));
    QC_TRY(qc_strbuf_addf(out, err, " as %s on ", r->to));
    QC_TRY(qc_html_escape(out, fit->budget->text, err));
    QC_TRY(qc_strbuf_addf(out, err, ": <span class=\"%s\">%s</span></h1>\n",
                          fit->fits ? "yes" : "no", fit->fits ? "fits" : "does not fit"));
    if (fit->geometry->cache_unknown)
        QC_TRY(qc_strbuf_adds(out, "<p class=\"no\">The size of its KV cache is not known.</p>\n",
                              err));
    if (!fit->fits) {
        QC_TRY(qc_strbuf_adds(out, "<p class=\"no\">", err));
        qc_strbuf verdict;
        qc_strbuf_init(&verdict, 1u << 16);
        qc_status st = qc_fit_verdict(r, &verdict, err);
        if (st == QC_OK)
            st = qc_html_escape(out, verdict.data, err);
        qc_strbuf_deinit(&verdict);
        QC_TRY(st);
        QC_TRY(qc_strbuf_adds(out, "</p>\n", err));
    }
    QC_TRY(qc_strbuf_addf(out, err, "<p>%s parameters, ", qc_text_count(count, r->parameters)));
    QC_TRY(qc_strbuf_addf(out, err, "%s of weights, ", qc_text_bytes(size, fit->weight_bytes)));
    QC_TRY(qc_strbuf_addf(out, err, "%s of files before compression.",
                          qc_text_bytes(size, r->file_bytes)));
    if (r->generates && !fit->geometry->cache_unknown) {
        QC_TRY(qc_strbuf_addf(out, err, " KV cache of %s", qc_text_bytes(size, fit->kv_bytes)));
        QC_TRY(qc_strbuf_addf(out, err, " for a context of %s tokens and batch %" PRIu64 ".",
                              qc_text_count(count, r->use->context), r->use->batch));
        QC_TRY(qc_strbuf_addf(out, err, " Longest context at batch 1: %s;",
                              found_text(count, r->max_context)));
        QC_TRY(qc_strbuf_addf(out, err, " largest batch at this context: %s.",
                              found_text(count, r->max_batch)));
    }
    return qc_strbuf_adds(out, "</p>\n", err);
}

static qc_status add_bar(const qc_fit_report *r, uint32_t device, double scale, unsigned y,
                         qc_strbuf *out, qc_error *err)
{
    char used[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
    const qc_fit_device *d = &r->fit->devices[device];
    const uint64_t bytes[PARTS] = {d->weight_bytes, d->kv_bytes, d->workspace_bytes,
                                   d->context_bytes};
    double x = 110.0, sum = 0.0;
    QC_TRY(qc_strbuf_addf(out, err, "<text x=\"0\" y=\"%u\">%s</text>", y + 18, d->device->name));
    for (int i = 0; i < PARTS; i++) {
        double width = (double)bytes[i] * scale;
        QC_TRY(qc_strbuf_addf(out, err,
                              "<rect x=\"%.2f\" y=\"%u\" width=\"%.2f\" height=\"%d\" "
                              "fill=\"%s\"><title>%s %s</title></rect>",
                              x, y, width, BAR_HEIGHT, parts[i].colour, parts[i].name,
                              qc_text_bytes(size, bytes[i])));
        x += width;
        sum += (double)bytes[i];
    }
    /* The outline is the budget; what stands over it is what the device lacks. */
    double budget = d->budget_bytes == QC_NO_LIMIT ? sum : (double)d->budget_bytes;
    QC_TRY(qc_strbuf_addf(out, err,
                          "<rect x=\"110\" y=\"%u\" width=\"%.2f\" height=\"%d\" fill=\"none\" "
                          "style=\"stroke:%s\" stroke-width=\"2\"/>",
                          y, budget * scale, BAR_HEIGHT,
                          d->short_by_bytes ? "var(--bad)" : "currentColor"));
    double end = sum > budget ? sum : budget;
    return qc_strbuf_addf(out, err, "<text x=\"%.2f\" y=\"%u\">%s of %s</text>\n",
                          118.0 + end * scale, y + 18, qc_text_bytes(used, (uint64_t)sum),
                          size_or_none(size, d->budget_bytes));
}

static qc_status add_picture(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    const qc_fit *fit = r->fit;
    double largest = 1.0;
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        const qc_fit_device *d = &fit->devices[i];
        double sum = (double)d->weight_bytes + (double)d->kv_bytes + (double)d->workspace_bytes +
                     (double)d->context_bytes;
        double end = d->budget_bytes == QC_NO_LIMIT || sum > (double)d->budget_bytes
                         ? sum
                         : (double)d->budget_bytes;
        largest = end > largest ? end : largest;
    }
    unsigned height = fit->budget->count * 38 + 40;
    QC_TRY(qc_strbuf_addf(out, err,
                          "<h2>Memory</h2>\n<svg viewBox=\"0 0 900 %u\" width=\"900\" "
                          "xmlns=\"http://www.w3.org/2000/svg\" role=\"img\">\n",
                          height));
    for (uint32_t i = 0; i < fit->budget->count; i++)
        QC_TRY(add_bar(r, i, BAR_WIDTH / largest, i * 38 + 4, out, err));
    for (int i = 0; i < PARTS; i++)
        QC_TRY(qc_strbuf_addf(out, err,
                              "<rect x=\"%d\" y=\"%u\" width=\"14\" height=\"14\" fill=\"%s\"/>"
                              "<text x=\"%d\" y=\"%u\">%s</text>",
                              110 + i * 140, height - 24, parts[i].colour, 130 + i * 140,
                              height - 12, parts[i].name));
    return qc_strbuf_adds(out, "\n</svg>\n", err);
}

/* Every segment as a box whose width is its share of the bytes. */
static qc_status add_placement(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], cache[QC_SIZE_TEXT_BYTES];
    const qc_fit *fit = r->fit;
    const qc_segments *s = fit->segments;
    double total = 0.0, x = 0.0;
    for (uint32_t i = 0; i < s->count; i++)
        total += (double)fit->segment_bytes[i] + (double)fit->segment_kv[i];
    if (total <= 0.0)
        return QC_OK;
    QC_TRY(qc_strbuf_adds(out,
                          "<h2>Placement, in the order a token passes</h2>\n<svg viewBox=\"0 0 900 "
                          "64\" width=\"900\" xmlns=\"http://www.w3.org/2000/svg\" "
                          "role=\"img\">\n",
                          err));
    for (uint32_t i = 0; i < s->count; i++) {
        double bytes = (double)fit->segment_bytes[i] + (double)fit->segment_kv[i];
        double width = bytes / total * STRIP_STEP;
        uint32_t device = fit->device_of[i];
        QC_TRY(qc_strbuf_addf(out, err,
                              "<rect x=\"%.2f\" y=\"4\" width=\"%.2f\" height=\"30\" fill=\"%s\" "
                              "style=\"stroke:var(--paper)\" stroke-width=\"0.5\"><title>",
                              x, width, device_colours[device % DEVICE_COLOURS]));
        QC_TRY(qc_html_escape(out, s->segments[i].name, err));
        QC_TRY(qc_strbuf_addf(out, err, ": %s of weights, %s of cache on %s</title></rect>\n",
                              qc_text_bytes(size, fit->segment_bytes[i]),
                              qc_text_bytes(cache, fit->segment_kv[i]),
                              fit->budget->devices[device].name));
        x += width;
    }
    for (uint32_t i = 0; i < fit->budget->count && i < 7; i++)
        QC_TRY(qc_strbuf_addf(out, err,
                              "<rect x=\"%u\" y=\"44\" width=\"14\" height=\"14\" fill=\"%s\"/>"
                              "<text x=\"%u\" y=\"56\">%s</text>",
                              i * 120, device_colours[i % DEVICE_COLOURS], 20 + i * 120,
                              fit->budget->devices[i].name));
    return qc_strbuf_adds(out, "\n</svg>\n", err);
}

static qc_status add_table(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    const qc_fit *fit = r->fit;
    QC_TRY(qc_strbuf_adds(out,
                          "<h2>Devices</h2>\n<table>\n<tr><th>device</th><th>card</th>"
                          "<th>budget</th><th>weights</th><th>KV cache</th><th>workspace</th>"
                          "<th>CUDA context</th><th>free</th><th>short by</th><th>layers</th>"
                          "</tr>\n",
                          err));
    for (uint32_t i = 0; i < fit->budget->count; i++) {
        const qc_fit_device *d = &fit->devices[i];
        const uint64_t cells[] = {
            d->budget_bytes,  d->weight_bytes,
            d->kv_bytes,      d->workspace_bytes,
            d->context_bytes, d->budget_bytes == QC_NO_LIMIT ? QC_NO_LIMIT : d->free_bytes,
            d->short_by_bytes};
        QC_TRY(qc_strbuf_addf(out, err, "<tr><td>%s</td><td>%s</td>", d->device->name,
                              d->device->card ? d->device->card->name : ""));
        for (size_t c = 0; c < sizeof cells / sizeof *cells; c++) {
            char size[QC_SIZE_TEXT_BYTES];
            QC_TRY(qc_strbuf_addf(
                out, err, "<td>%s</td>",
                c == 2 && fit->geometry->cache_unknown ? "?" : size_or_none(size, cells[c])));
        }
        if (d->layers)
            QC_TRY(qc_strbuf_addf(out, err, "<td>%" PRIu32 "-%" PRIu32 "</td></tr>\n",
                                  d->first_layer, d->first_layer + d->layers - 1));
        else
            QC_TRY(qc_strbuf_adds(out, "<td></td></tr>\n", err));
    }
    QC_TRY(qc_strbuf_adds(out,
                          "</table>\n<h2>Schemes</h2>\n<table>\n<tr><th>scheme</th>"
                          "<th>tensors</th><th>parameters</th><th>bytes</th></tr>\n",
                          err));
    for (uint32_t i = 0; i < r->scheme_count; i++) {
        const qc_fit_scheme *s = &r->schemes[i];
        char count[QC_SIZE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES];
        QC_TRY(qc_strbuf_addf(
            out, err, "<tr><td>%s</td><td>%" PRIu64 "</td><td>%s</td><td>%s</td></tr>\n", s->name,
            s->tensors, qc_text_count(count, s->weights), qc_text_bytes(size, s->bytes)));
    }
    return qc_strbuf_adds(out, "</table>\n", err);
}

static qc_status add_suggestions(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    if (r->suggestion_count == 0)
        return QC_OK;
    QC_TRY(qc_strbuf_adds(out, "<h2>What would fit</h2>\n<ul>\n", err));
    for (uint32_t i = 0; i < r->suggestion_count; i++) {
        QC_TRY(qc_strbuf_adds(out, "<li>", err));
        QC_TRY(qc_html_escape(out, r->suggestions[i].sentence, err));
        QC_TRY(qc_strbuf_adds(out, "</li>\n", err));
    }
    return qc_strbuf_adds(out, "</ul>\n", err);
}

qc_status qc_fit_report_html(const qc_fit_report *r, qc_strbuf *out, qc_error *err)
{
    QC_TRY(qc_html_begin(out, "qconv plan", "", err));
    QC_TRY(add_summary(r, out, err));
    QC_TRY(add_picture(r, out, err));
    QC_TRY(add_placement(r, out, err));
    QC_TRY(add_table(r, out, err));
    QC_TRY(add_suggestions(r, out, err));
    return qc_html_end(out, err);
}

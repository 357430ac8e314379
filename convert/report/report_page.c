#include "convert/report/report_page.h"

#include "convert/term/html_text.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <string.h>

static const char page_style[] =
    "body{max-width:72em}h2{margin:2.2em 0 .3em;border-top:1px solid var(--faint);padding-top:.8em}"
    "h3{font-size:1em;margin:1em 0 0}p{margin:.4em 0}"
    "table{font-size:14px;margin:.5em 0}"
    "th,td{padding:.2em .6em;white-space:nowrap;vertical-align:top}"
    "th{font-weight:600;white-space:normal;vertical-align:bottom}"
    ".name,.text{white-space:normal;overflow-wrap:anywhere;text-align:left}.name{min-width:12em}"
    ".text{min-width:9em}"
    "nav a{display:inline-block;margin-right:1em}a{color:var(--c0)}"
    ".cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,10.5em),1fr));"
    "gap:.6em;margin:1em 0}.cards div{border:1px solid var(--faint);border-radius:6px;"
    "padding:.5em .8em}.cards b{display:block;font-size:1.35em;line-height:1.3}"
    ".grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,300px),1fr));"
    "gap:.4em 1.2em}figure{margin:0;break-inside:avoid}figcaption{font-size:.93em}"
    "svg.draw{display:block;width:100%;max-width:460px}"
    "svg.draw text{font-size:12px;fill:var(--soft)}svg.draw text.ink{fill:var(--ink)}"
    ".line{stroke:var(--faint)}.edge{stroke:var(--ink);stroke-width:.6}"
    ".want{fill:none;stroke:var(--ink);stroke-width:1.6;stroke-dasharray:4 3}"
    ".b0{fill:var(--c0)}.b1{fill:url(#hatch)}.b2{fill:var(--paper)}"
    ".m0{fill:var(--c0)}.m1{fill:var(--c1)}.m2{fill:var(--c2)}.m3{fill:var(--c3)}"
    ".m4{fill:var(--c4)}.m5{fill:var(--c5)}.m6{fill:var(--c6)}.m7{fill:var(--c7)}"
    ".span{stroke:var(--soft);stroke-width:1.2}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere;border:1px solid var(--faint);"
    "border-radius:6px;padding:.5em .8em;font-size:.87em;margin:.4em 0}code{font-size:.87em}"
    "details{margin:.5em 0}summary{cursor:pointer}"
    ".h1{background:rgba(0,114,178,.05)}.h2{background:rgba(0,114,178,.1)}"
    ".h3{background:rgba(0,114,178,.15)}.h4{background:rgba(0,114,178,.2)}"
    ".h5{background:rgba(0,114,178,.26)}.h6{background:rgba(0,114,178,.32)}"
    ".h7{background:rgba(0,114,178,.39)}.h8{background:rgba(0,114,178,.46)}"
    ".h9{background:rgba(0,114,178,.54)}"
    "td[class],svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}"
    "@media print{:root{--ink:#000;--paper:#fff;--faint:#bbb;--soft:#333}"
    "body{max-width:none;margin:0;font-size:11px}nav{display:none}"
    "table{font-size:9px;display:table}th,td{padding:.15em .4em}.name,.text{min-width:0}"
    "h2{break-after:avoid}tr,figure,.cards div{break-inside:avoid}"
    "details::details-content{content-visibility:visible;display:block;block-size:auto}}";

/* ---- head ------------------------------------------------------------------------------------ */

static double all_mean(const qc_report *r)
{
    double sum = 0.0, elems = 0.0;
    for (uint32_t i = 0; i < r->weight_count; i++) {
        if (!r->weights[i].has_error)
            continue;
        sum += r->weights[i].rel_mse * (double)r->weights[i].elems;
        elems += (double)r->weights[i].elems;
    }
    return elems > 0 ? sum / elems : 0.0;
}

/* Returns the bytes that the size of the output is compared with. */
static uint64_t before_bytes(const qc_report *r)
{
    return r->source_bytes ? r->source_bytes : r->plain_bytes;
}

static void add_cards(qc_report_writer *w)
{
    const qc_report *r = w->r;
    const qc_facts *f = &r->facts;
    char size[QC_SIZE_TEXT_BYTES];
    double before = (double)before_bytes(r);
    QC_PAGE(w, "<div class=\"cards\">\n");
    QC_PAGE(w, "<div><b>%s</b>on disk", qc_text_bytes(size, f->file_bytes));
    if (before > 0)
        QC_PAGE(w, ", %.1f%% of %s%s", 100.0 * (double)f->file_bytes / before,
                qc_text_bytes(size, before_bytes(r)), r->source_bytes ? "" : " unquantized");
    QC_PAGE(w, "</div>\n<div><b>%s</b>of tensors in memory</div>\n",
            qc_text_bytes(size, f->model->tensor_bytes));
    if (f->weights)
        QC_PAGE(w, "<div><b>%.3f</b>bits per weight, all weights</div>\n",
                qc_facts_bits(f->model->tensor_bytes, f->weights));
    if (r->worst_count)
        QC_PAGE(w,
                "<div><b>%.3g</b>relative error of weights (MSE), mean</div>\n<div><b>%.2f "
                "dB</b>signal to quantization noise</div>\n",
                all_mean(r), qc_report_sqnr(all_mean(r)));
    if (r->has_eval) {
        QC_PAGE(w, "<div><b>%.4g</b>perplexity", r->eval.perplexity);
        if (r->eval.compared)
            QC_PAGE(w,
                    ", source %.4g</div>\n<div><b>%.3g nats</b>KL divergence to the source, mean",
                    r->eval.base_perplexity, r->eval.kl_mean);
        QC_PAGE(w, "</div>\n");
    } else {
        QC_PAGE(w, "<div><b>not measured</b>perplexity and KL divergence</div>\n");
    }
    QC_PAGE(w, "</div>\n");
}

static void add_notes(qc_report_writer *w)
{
    const qc_report *r = w->r;
    const qc_facts *f = &r->facts;
    const char *notes[] = {f->manifest_trouble, f->recipe_trouble};
    for (size_t i = 0; i < sizeof notes / sizeof *notes; i++) {
        if (!notes[i])
            continue;
        qc_page_put(w, "<p class=\"no\"><b>Note:</b> ", notes[i], "</p>\n");
    }
    for (size_t i = 0; i < f->model->warning_count; i++)
        qc_page_put(w, "<p><b>Note:</b> ", f->model->warnings[i], "</p>\n");
    if (!f->manifest && !f->manifest_trouble)
        QC_PAGE(w, "<p><b>Note:</b> there is no manifest (qconv.json), so this page knows neither "
                   "the source nor the options. Sizes and codes are read from the files; errors "
                   "come from <code>--against</code> only.</p>\n");
}

#define MAX_FAULTS 12u

/* Says what the comparison with the source found: that OUT is this model, or what is wrong. */
static void add_compared(qc_report_writer *w)
{
    const qc_report *r = w->r;
    const qc_against_result *a = r->against;
    unsigned shown = 0;
    if (!a)
        return;
    if (a->faults == 0) {
        qc_page_put(w, "<p class=\"yes\"><b>Compared with ", r->call->against, "");
        QC_PAGE(w,
                "</b>: nothing is missing, %" PRIu64 " tensors are equal bit for bit, %" PRIu64
                " as cast, %" PRIu64
                " quantized with no more error than their form leaves%s.</p>\n",
                a->equal, a->cast, a->quantized, a->has_manifest ? "; all hashes are right" : "");
        return;
    }
    qc_page_put(w, "<p class=\"no\"><b>This is not ", r->call->against, "");
    QC_PAGE(w, ", converted: %" PRIu64 " fault%s.</b> ", a->faults, a->faults == 1 ? "" : "s");
    qc_page_put(w, "", a->first_what, ": ");
    qc_page_put(w, "", a->first_why, ".</p>\n<ul>\n");
    for (size_t i = 0; i < a->count && shown < MAX_FAULTS; i++) {
        if (!a->rows[i].fault)
            continue;
        qc_page_put(w, "<li>", a->rows[i].name, ": ");
        qc_page_put(w, "", a->rows[i].fault, "</li>\n");
        shown++;
    }
    QC_PAGE(w, "</ul>\n<p>All of them: <code>qconv verify OUT --against MODEL</code>.</p>\n");
}

static void add_head(qc_report_writer *w)
{
    const qc_report *r = w->r;
    const qc_facts *f = &r->facts;
    qc_page_put(w, "<h1>", f->model->path, "</h1>\n<p>");
    if (f->model_type)
        qc_page_put(w, "A model of type <b>", f->model_type, "</b>, ");
    char count[QC_SIZE_TEXT_BYTES];
    QC_PAGE(w, "%s weights; ", qc_text_count(count, f->weights));
    QC_PAGE(w, "%u weight matrices are quantized: ", r->weight_count);
    for (uint32_t i = 0; i < r->form_count; i++)
        QC_PAGE(w, "%s<b>%s</b> (%" PRIu64 ")", i ? "; " : "", r->forms[i].name,
                r->forms[i].weights);
    QC_PAGE(w, ".");
    if (r->scale) {
        qc_page_put(w, " Scales: <b>", r->scale, "");
        QC_PAGE(w, "</b>%s.",
                strcmp(r->scale, "absmax") == 0 ? ", the largest value of a block"
                                                : ", those of least squared error");
    }
    if (f->manifest) {
        qc_page_put(w, " Made by qconv ", f->manifest->qconv_version, ", <code>--to ");
        qc_page_put(w, "", f->manifest->to, "</code>.");
    }
    QC_PAGE(w, "</p>\n");
    add_notes(w);
    add_compared(w);
    QC_PAGE(w,
            "<nav><a href=\"#size\">Size</a><a href=\"#memory\">Memory</a><a "
            "href=\"#error\">Error</a><a href=\"#layers\">Layers</a><a href=\"#worst\">Worst</a>"
            "%s<a href=\"#codes\">Codes</a><a href=\"#left\">Not quantized</a><a "
            "href=\"#perplexity\">Perplexity</a><a href=\"#speed\">Speed</a><a "
            "href=\"#made\">How made</a></nav>\n",
            f->manifest && f->manifest->calibration ? "<a href=\"#outputs\">Outputs</a>" : "");
    add_cards(w);
}

/* ---- size and memory ------------------------------------------------------------------------- */

typedef struct {
    const char *label;
    uint64_t codes, scales, rest; /* bytes */
} size_bar;

static void add_size_bar(qc_report_writer *w, const size_bar *b, double most, double y)
{
    static const char *const parts[] = {"codes", "scales", "not quantized"};
    const uint64_t bytes[] = {b->codes, b->scales, b->rest};
    char size[QC_SIZE_TEXT_BYTES];
    double x = 1.0, scale = most > 0 ? (QC_DRAW_WIDTH - 2.0) / most : 0.0;
    QC_PAGE(w, "<text class=\"ink\" x=\"0\" y=\"%.0f\">%s: %s</text>", y, b->label,
            qc_text_bytes(size, b->codes + b->scales + b->rest));
    for (size_t i = 0; i < 3; i++) {
        double width = (double)bytes[i] * scale;
        if (bytes[i] == 0)
            continue;
        QC_PAGE(w,
                "<rect class=\"edge b%zu\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"16\">"
                "<title>%s: %s</title></rect>",
                i, x, y + 5.0, width, parts[i], qc_text_bytes(size, bytes[i]));
        x += width;
    }
    QC_PAGE(w, "\n");
}

static void add_size_table(qc_report_writer *w)
{
    const qc_facts *f = &w->r->facts;
    char size[QC_SIZE_TEXT_BYTES], count[QC_SIZE_TEXT_BYTES];
    QC_PAGE(w, "<table>\n<tr><th>stored as</th><th>tensors</th><th>weights</th><th>bytes</th>"
               "<th>bits per weight</th></tr>\n");
    for (unsigned i = 0; i < f->scheme_count; i++) {
        const qc_facts_sum *s = &f->by_scheme[i];
        QC_PAGE(w, "<tr><td>%s</td><td>%" PRIu64 "</td><td>%s</td><td>%s</td>",
                strcmp(s->name, "plain") == 0 ? "not quantized" : s->name, s->tensors,
                qc_text_count(count, s->weights), qc_text_bytes(size, s->bytes));
        if (s->weights)
            QC_PAGE(w, "<td>%.3f</td></tr>\n", qc_facts_bits(s->bytes, s->weights));
        else
            QC_PAGE(w, "<td></td></tr>\n");
    }
    qc_page_table_end(w);
}

static void add_size(qc_report_writer *w)
{
    const qc_report *r = w->r;
    const qc_facts *f = &r->facts;
    uint64_t rest = f->model->tensor_bytes - r->quantized_bytes;
    const size_bar bars[] = {
        {"before, in the dtypes it had", 0, 0, r->plain_bytes},
        {"now, in memory", r->quantized_bytes - r->scale_bytes, r->scale_bytes, rest}};
    char size[QC_SIZE_TEXT_BYTES];
    double most =
        (double)(r->plain_bytes > f->model->tensor_bytes ? r->plain_bytes : f->model->tensor_bytes);
    qc_page_section(w, "size", "Size");
    qc_page_svg(w, 106.0, "sizes before and now; the numbers are in the text");
    QC_PAGE(w, "<defs><pattern id=\"hatch\" width=\"5\" height=\"5\" "
               "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><rect width=\"5\" "
               "height=\"5\" style=\"fill:var(--paper)\"/><rect width=\"2\" height=\"5\" "
               "style=\"fill:var(--ink)\"/></pattern></defs>\n");
    for (size_t i = 0; i < 2; i++)
        add_size_bar(w, &bars[i], most, 12.0 + 40.0 * (double)i);
    QC_PAGE(w,
            "<rect class=\"edge b0\" x=\"1\" y=\"90\" width=\"12\" height=\"12\"/><text x=\"18\" "
            "y=\"100\">codes</text><rect class=\"edge b1\" x=\"72\" y=\"90\" width=\"12\" "
            "height=\"12\"/><text x=\"89\" y=\"100\">scales and tables</text><rect class=\"edge "
            "b2\" x=\"200\" y=\"90\" width=\"12\" height=\"12\"/><text x=\"217\" y=\"100\">not "
            "quantized</text></svg>\n");
    if (r->source_bytes)
        QC_PAGE(w, "<p>The files of the source have %s; ", qc_text_bytes(size, r->source_bytes));
    else
        QC_PAGE(w, "<p>The size of the source's files is not known. ");
    QC_PAGE(w, "%shese have %s on disk%s.", r->source_bytes ? "t" : "T",
            qc_text_bytes(size, f->file_bytes),
            f->manifest && f->manifest->compressed ? ", compressed with Zstandard" : "");
    if (r->source_bytes && f->file_bytes <= r->source_bytes)
        QC_PAGE(w, " Saved: <b>%s (%.1f%%)</b>.",
                qc_text_bytes(size, r->source_bytes - f->file_bytes),
                100.0 - 100.0 * (double)f->file_bytes / (double)r->source_bytes);
    QC_PAGE(w, "</p>\n");
    add_size_table(w);
}

static void add_memory(qc_report_writer *w)
{
    const qc_manifest *m = w->r->facts.manifest;
    char size[QC_SIZE_TEXT_BYTES];
    qc_page_section(w, "memory", "Memory per device");
    if (!m || !m->placement.device_count) {
        QC_PAGE(
            w,
            "<p>All tensors together: <b>%s</b>. They were not placed on devices; <code>qconv "
            "--vram</code> does that, and <code>qconv plan</code> adds the KV cache and what else "
            "a device holds.</p>\n",
            qc_text_bytes(size, w->r->facts.model->tensor_bytes));
        return;
    }
    const qc_manifest_placement *p = &m->placement;
    uint64_t most = 1;
    for (size_t i = 0; i < p->device_count; i++)
        most = p->devices[i].tensor_bytes > most ? p->devices[i].tensor_bytes : most;
    qc_page_put(w, "<p>Placed for <code>--vram ", p->vram, "");
    QC_PAGE(w,
            "</code>, of which %.3g%% may be used, for a context of %" PRIu64
            " tokens and a batch of %" PRIu64 ". What is shown are the weights; <code>qconv plan"
            "</code> adds the KV cache and what else a device holds.</p>\n",
            p->margin * 100.0, p->context, p->batch);
    double height = 36.0 * (double)p->device_count;
    qc_page_svg(w, height, "weights per device; the numbers are in the table");
    for (size_t i = 0; i < p->device_count; i++) {
        const qc_manifest_device *d = &p->devices[i];
        double y = 36.0 * (double)i;
        QC_PAGE(w, "<text class=\"ink\" x=\"0\" y=\"%.0f\">", y + 12.0);
        qc_page_text(w, d->name);
        QC_PAGE(w,
                ": %s</text><rect class=\"edge b0\" x=\"1\" y=\"%.0f\" width=\"%.2f\" "
                "height=\"14\"/>\n",
                qc_text_bytes(size, d->tensor_bytes), y + 16.0,
                (QC_DRAW_WIDTH - 2.0) * (double)d->tensor_bytes / (double)most);
    }
    QC_PAGE(w, "</svg>\n<table>\n<tr><th>device</th><th>weights</th><th>share</th><th>files, "
               "decompressed</th></tr>\n");
    for (size_t i = 0; i < p->device_count; i++) {
        const qc_manifest_device *d = &p->devices[i];
        uint64_t all = w->r->facts.model->tensor_bytes;
        qc_page_put(w, "<tr><td>", d->name, "");
        QC_PAGE(w, "</td><td>%s</td><td>%.1f%%</td>", qc_text_bytes(size, d->tensor_bytes),
                all ? 100.0 * (double)d->tensor_bytes / (double)all : 0.0);
        QC_PAGE(w, "<td>%s</td></tr>\n", qc_text_bytes(size, d->shard_bytes));
    }
    qc_page_table_end(w);
}

/* ---- what was left, and how it was made ------------------------------------------------------ */

static void add_left(qc_report_writer *w)
{
    const qc_report *r = w->r;
    char size[QC_SIZE_TEXT_BYTES], count[QC_SIZE_TEXT_BYTES];
    qc_page_section(w, "left", "Not quantized, and why");
    if (r->left_count == 0) {
        QC_PAGE(w, "<p>Nothing: every tensor is a quantized weight or belongs to one.</p>\n");
        return;
    }
    QC_PAGE(w,
            "<table>\n<tr><th>what</th><th class=\"text\">why</th><th>tensors</th><th>weights</th>"
            "<th>bytes</th><th class=\"name\">such as</th></tr>\n");
    for (uint32_t i = 0; i < r->left_count; i++) {
        const qc_report_left *l = &r->left[i];
        QC_PAGE(w, "<tr><td>%s</td><td class=\"text\">", l->role);
        qc_page_text(w, l->why);
        QC_PAGE(w, "</td><td>%" PRIu64 "</td><td>%s</td><td>%s</td><td class=\"name\">", l->tensors,
                qc_text_count(count, l->elems), qc_text_bytes(size, l->bytes));
        qc_page_put(w, "", l->example, "</td></tr>\n");
    }
    qc_page_table_end(w);
}

static void add_sources(qc_report_writer *w, const qc_manifest *m)
{
    char size[QC_SIZE_TEXT_BYTES], hex[QC_DIGEST_HEX_BYTES];
    QC_PAGE(w, "<h3>Source files</h3>\n<table>\n<tr><th class=\"name\">file</th><th>bytes</th><th "
               "class=\"text\">XXH3-128 of its header</th></tr>\n");
    for (size_t i = 0; i < m->source_count; i++) {
        qc_digest_hex(&m->sources[i].header, hex);
        qc_page_put(w, "<tr><td class=\"name\">", m->sources[i].name, "");
        QC_PAGE(w, "</td><td>%s</td><td class=\"text\"><code>%s</code></td></tr>\n",
                qc_text_bytes(size, m->sources[i].bytes), hex);
    }
    qc_page_table_end(w);
    QC_PAGE(w, "<p>The manifest, qconv.json, has the hash of every source tensor and of "
               "every byte written.</p>\n");
}

static void add_made(qc_report_writer *w)
{
    const qc_report *r = w->r;
    const qc_manifest *m = r->facts.manifest;
    qc_page_section(w, "made", "How it was made, and how to check it");
    if (m) {
        qc_page_put(w, "<p>By qconv ", m->qconv_version, "");
        if (m->zstd_version)
            qc_page_put(w, ", zstd ", m->zstd_version, "");
        qc_page_put(w, ". As far as the manifest has the options:</p>\n<pre>", r->command,
                    "</pre>\n");
        add_sources(w, m);
    } else {
        QC_PAGE(w, "<p>Not known: there is no manifest.</p>\n");
    }
    QC_PAGE(w, "<h3>Commands</h3>\n<pre>");
    if (m)
        QC_PAGE(w, "qconv verify OUT\n");
    QC_PAGE(w,
            "qconv verify OUT --against MODEL\nqconv eval OUT --against MODEL --text FILE --json "
            "&gt; eval.json\nqconv bench --json &gt; bench.json\nqconv report OUT --against MODEL "
            "--eval eval.json --bench bench.json --html report.html</pre>\n");
    if (!r->against)
        QC_PAGE(w, "<p class=\"soft\">Without <code>--against</code> this page does not check the "
                   "hashes of OUT; <code>qconv verify OUT</code> does.</p>\n");
}

qc_status qc_report_page_html(const qc_report *r, qc_strbuf *out, qc_error *err)
{
    qc_report_writer w = {.r = r, .out = out};
    const char *title = NULL;
    QC_TRY(qc_arena_printf(r->call->arena, &title, err, "qconv report: %s", r->facts.model->path));
    qc_html_begin(out, title, page_style);
    add_head(&w);
    add_size(&w);
    add_memory(&w);
    qc_page_errors(&w);
    qc_page_outputs(&w);
    qc_page_codes(&w);
    add_left(&w);
    qc_page_results(&w);
    add_made(&w);
    qc_html_end(out);
    return qc_strbuf_status(out, err);
}

#include "convert/report/report_page.h"

#include "base/text.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <string.h>

#define BAR_HEIGHT 18.0
#define BAR_LEFT   8.0
#define MAX_BARS   40u
#define MAX_ROWS   2000u
#define MAX_FAULTS 12u

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

static void add_cards(const qc_report *r)
{
    const qc_facts *f = &r->facts;
    char size[QC_SIZE_TEXT_BYTES];
    double before = (double)before_bytes(r);
    QC_PAGE(r, "<div class=\"cards\">\n");
    QC_PAGE(r, "<div><b>%s</b>on disk", qc_text_bytes(size, f->file_bytes));
    if (before > 0)
        QC_PAGE(r, ", %.1f%% of %s%s", 100.0 * (double)f->file_bytes / before,
                qc_text_bytes(size, before_bytes(r)), r->source_bytes ? "" : " unquantized");
    QC_PAGE(r, "</div>\n<div><b>%s</b>of tensors in memory</div>\n",
            qc_text_bytes(size, f->model->tensor_bytes));
    if (f->weights)
        QC_PAGE(r, "<div><b>%.3f</b>bits per weight, all weights</div>\n",
                qc_facts_bits(f->model->tensor_bytes, f->weights));
    if (r->worst_count)
        QC_PAGE(r,
                "<div><b>%.3g</b>relative error of weights (MSE), mean</div>\n<div><b>%.2f "
                "dB</b>signal to quantization noise</div>\n",
                all_mean(r), qc_report_sqnr(all_mean(r)));
    if (r->has_eval) {
        QC_PAGE(r, "<div><b>%.4g</b>perplexity", r->eval.perplexity);
        if (r->eval.compared)
            QC_PAGE(r,
                    ", source %.4g</div>\n<div><b>%.3g nats</b>KL divergence to the source, mean",
                    r->eval.base_perplexity, r->eval.kl_mean);
        QC_PAGE(r, "</div>\n");
    } else {
        QC_PAGE(r, "<div><b>not measured</b>perplexity and KL divergence</div>\n");
    }
    QC_PAGE(r, "</div>\n");
}

static void add_notes(const qc_report *r)
{
    const qc_facts *f = &r->facts;
    const char *notes[] = {f->manifest_trouble, f->recipe_trouble};
    for (size_t i = 0; i < sizeof notes / sizeof *notes; i++)
        if (notes[i])
            QC_PAGE(r, "<p class=\"no\"><b>Note:</b> %s</p>\n", qc_page_safe(r, notes[i]));
    for (size_t i = 0; i < f->model->warning_count; i++)
        QC_PAGE(r, "<p><b>Note:</b> %s</p>\n", qc_page_safe(r, f->model->warnings[i]));
    if (!f->manifest && !f->manifest_trouble)
        QC_PAGE(r, "<p><b>Note:</b> there is no manifest (qconv.json), so this page knows neither "
                   "the source nor the options. Sizes and codes are read from the files; errors "
                   "come from <code>--against</code> only.</p>\n");
}

/* Says what the comparison with the source found: that OUT is this model, or what is wrong. */
static void add_compared(const qc_report *r)
{
    const qc_against_result *a = r->against;
    unsigned shown = 0;
    if (!a)
        return;
    const char *source = qc_page_safe(r, r->call->against);
    if (a->faults == 0) {
        QC_PAGE(r,
                "<p class=\"yes\"><b>Compared with %s</b>: nothing is missing. Tensors equal bit "
                "for bit: %" PRIu64 "; equal after a cast: %" PRIu64
                "; quantized with no more error than their form leaves: %" PRIu64 "%s.</p>\n",
                source, a->equal, a->cast, a->quantized,
                a->has_manifest ? "; all hashes are right" : "");
        return;
    }
    QC_PAGE(r,
            "<p class=\"no\"><b>This is not %s, converted: %" PRIu64 " fault%s.</b> %s: %s.</p>\n"
            "<ul>\n",
            source, a->faults, qc_plural(a->faults), qc_page_safe(r, a->first_what),
            qc_page_safe(r, a->first_why));
    for (size_t i = 0; i < a->count && shown < MAX_FAULTS; i++) {
        const qc_against_row *row = &a->rows[i];
        if (!row->fault)
            continue;
        QC_PAGE(r, "<li>%s: %s</li>\n", qc_page_safe(r, row->name), qc_page_safe(r, row->fault));
        shown++;
    }
    QC_PAGE(r, "</ul>\n<p>All of them: <code>qconv verify OUT --against MODEL</code>.</p>\n");
}

static void add_head(const qc_report *r)
{
    const qc_facts *f = &r->facts;
    char count[QC_SIZE_TEXT_BYTES];
    QC_PAGE(r, "<h1>%s</h1>\n<p>", qc_page_safe(r, f->model->path));
    if (f->model_type)
        QC_PAGE(r, "A model of type <b>%s</b>, ", qc_page_safe(r, f->model_type));
    QC_PAGE(r, "%s weights; %u weight matrices are quantized: ", qc_text_count(count, f->weights),
            r->weight_count);
    for (uint32_t i = 0; i < r->form_count; i++)
        QC_PAGE(r, "%s<b>%s</b> (%" PRIu64 ")", i ? "; " : "", r->forms[i].name,
                r->forms[i].weights);
    QC_PAGE(r, ".");
    if (r->scale)
        QC_PAGE(r, " Scales: <b>%s</b>%s.", qc_page_safe(r, r->scale),
                strcmp(r->scale, "absmax") == 0 ? ", the largest value of a block"
                                                : ", those of least squared error");
    if (f->manifest)
        QC_PAGE(r, " Made by qconv %s, <code>--to %s</code>.",
                qc_page_safe(r, f->manifest->qconv_version), qc_page_safe(r, f->manifest->to));
    QC_PAGE(r, "</p>\n");
    add_notes(r);
    add_compared(r);
    QC_PAGE(r,
            "<nav><a href=\"#size\">Size</a><a href=\"#memory\">Memory</a><a "
            "href=\"#error\">Error</a><a href=\"#layers\">Layers</a><a href=\"#worst\">Worst</a>"
            "%s<a href=\"#codes\">Codes</a><a href=\"#left\">Not quantized</a><a "
            "href=\"#perplexity\">Perplexity</a><a href=\"#speed\">Speed</a><a "
            "href=\"#made\">How made</a></nav>\n",
            f->manifest && f->manifest->calibration ? "<a href=\"#outputs\">Outputs</a>" : "");
    add_cards(r);
}

/* ---- size and memory ------------------------------------------------------------------------- */

typedef struct {
    const char *label;
    uint64_t codes, scales, rest; /* bytes */
} size_bar;

static void add_size_bar(const qc_report *r, const size_bar *b, double most, double y)
{
    static const char *const parts[] = {"codes", "scales", "not quantized"};
    const uint64_t bytes[] = {b->codes, b->scales, b->rest};
    char size[QC_SIZE_TEXT_BYTES];
    double x = 1.0, scale = most > 0 ? (QC_DRAW_WIDTH - 2.0) / most : 0.0;
    QC_PAGE(r, "<text class=\"ink\" x=\"0\" y=\"%.0f\">%s: %s</text>", y, b->label,
            qc_text_bytes(size, b->codes + b->scales + b->rest));
    for (size_t i = 0; i < 3; i++) {
        double width = (double)bytes[i] * scale;
        if (bytes[i] == 0)
            continue;
        QC_PAGE(r,
                "<rect class=\"edge b%zu\" x=\"%.2f\" y=\"%.0f\" width=\"%.2f\" height=\"16\">"
                "<title>%s: %s</title></rect>",
                i, x, y + 5.0, width, parts[i], qc_text_bytes(size, bytes[i]));
        x += width;
    }
    QC_PAGE(r, "\n");
}

static void add_size_table(const qc_report *r)
{
    const qc_facts *f = &r->facts;
    char size[QC_SIZE_TEXT_BYTES], count[QC_SIZE_TEXT_BYTES];
    qc_page_table(r, "stored as|tensors|weights|bytes|bits per weight");
    for (unsigned i = 0; i < f->scheme_count; i++) {
        const qc_facts_sum *s = &f->by_scheme[i];
        QC_PAGE(r, "<tr><td>%s</td><td>%" PRIu64 "</td><td>%s</td><td>%s</td>",
                strcmp(s->name, "plain") == 0 ? "not quantized" : s->name, s->tensors,
                qc_text_count(count, s->weights), qc_text_bytes(size, s->bytes));
        if (s->weights)
            QC_PAGE(r, "<td>%.3f</td></tr>\n", qc_facts_bits(s->bytes, s->weights));
        else
            QC_PAGE(r, "<td></td></tr>\n");
    }
    qc_html_table_end(r->page);
}

static void add_size(const qc_report *r)
{
    const qc_facts *f = &r->facts;
    uint64_t rest = f->model->tensor_bytes - r->quantized_bytes;
    const size_bar bars[] = {
        {"before, in the dtypes it had", 0, 0, r->plain_bytes},
        {"now, in memory", r->quantized_bytes - r->scale_bytes, r->scale_bytes, rest}};
    char size[QC_SIZE_TEXT_BYTES];
    double most =
        (double)(r->plain_bytes > f->model->tensor_bytes ? r->plain_bytes : f->model->tensor_bytes);
    qc_page_section(r, "size", "Size");
    qc_page_svg(r, 106.0, "sizes before and now; the numbers are in the text");
    QC_PAGE(r, "<defs><pattern id=\"hatch\" width=\"5\" height=\"5\" "
               "patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\"><rect width=\"5\" "
               "height=\"5\" style=\"fill:var(--paper)\"/><rect width=\"2\" height=\"5\" "
               "style=\"fill:var(--ink)\"/></pattern></defs>\n");
    for (size_t i = 0; i < 2; i++)
        add_size_bar(r, &bars[i], most, 12.0 + 40.0 * (double)i);
    QC_PAGE(r,
            "<rect class=\"edge b0\" x=\"1\" y=\"90\" width=\"12\" height=\"12\"/><text x=\"18\" "
            "y=\"100\">codes</text><rect class=\"edge b1\" x=\"72\" y=\"90\" width=\"12\" "
            "height=\"12\"/><text x=\"89\" y=\"100\">scales and tables</text><rect class=\"edge "
            "b2\" x=\"200\" y=\"90\" width=\"12\" height=\"12\"/><text x=\"217\" y=\"100\">not "
            "quantized</text></svg>\n");
    if (r->source_bytes)
        QC_PAGE(r, "<p>The files of the source have %s; ", qc_text_bytes(size, r->source_bytes));
    else
        QC_PAGE(r, "<p>The size of the source's files is not known. ");
    QC_PAGE(r, "%shese have %s on disk%s.", r->source_bytes ? "t" : "T",
            qc_text_bytes(size, f->file_bytes),
            f->manifest && f->manifest->compressed ? ", compressed with Zstandard" : "");
    if (r->source_bytes && f->file_bytes <= r->source_bytes)
        QC_PAGE(r, " Saved: <b>%s (%.1f%%)</b>.",
                qc_text_bytes(size, r->source_bytes - f->file_bytes),
                100.0 - 100.0 * (double)f->file_bytes / (double)r->source_bytes);
    QC_PAGE(r, "</p>\n");
    add_size_table(r);
}

static void add_memory(const qc_report *r)
{
    const qc_manifest *m = r->facts.manifest;
    char size[QC_SIZE_TEXT_BYTES], shards[QC_SIZE_TEXT_BYTES];
    qc_page_section(r, "memory", "Memory per device");
    if (!m || !m->placement.device_count) {
        QC_PAGE(
            r,
            "<p>All tensors together: <b>%s</b>. They were not placed on devices; <code>qconv "
            "--vram</code> does that, and <code>qconv plan</code> adds the KV cache and what else "
            "a device holds.</p>\n",
            qc_text_bytes(size, r->facts.model->tensor_bytes));
        return;
    }
    const qc_manifest_placement *p = &m->placement;
    uint64_t most = 1;
    for (size_t i = 0; i < p->device_count; i++)
        most = p->devices[i].tensor_bytes > most ? p->devices[i].tensor_bytes : most;
    QC_PAGE(r,
            "<p>Placed for <code>--vram %s</code>, of which %.3g%% may be used, for a context of "
            "%" PRIu64 " tokens and a batch of %" PRIu64 ". What is shown are the weights; <code>"
            "qconv plan</code> adds the KV cache and what else a device holds.</p>\n",
            qc_page_safe(r, p->vram), p->margin * 100.0, p->context, p->batch);
    double height = 36.0 * (double)p->device_count;
    qc_page_svg(r, height, "weights per device; the numbers are in the table");
    for (size_t i = 0; i < p->device_count; i++) {
        const qc_manifest_device *d = &p->devices[i];
        double y = 36.0 * (double)i;
        QC_PAGE(r,
                "<text class=\"ink\" x=\"0\" y=\"%.0f\">%s: %s</text><rect class=\"edge b0\" "
                "x=\"1\" y=\"%.0f\" width=\"%.2f\" height=\"14\"/>\n",
                y + 12.0, qc_page_safe(r, d->name), qc_text_bytes(size, d->tensor_bytes), y + 16.0,
                (QC_DRAW_WIDTH - 2.0) * (double)d->tensor_bytes / (double)most);
    }
    QC_PAGE(r, "</svg>\n");
    qc_page_table(r, "device|weights|share|files, decompressed");
    for (size_t i = 0; i < p->device_count; i++) {
        const qc_manifest_device *d = &p->devices[i];
        uint64_t all = r->facts.model->tensor_bytes;
        QC_PAGE(r, "<tr><td>%s</td><td>%s</td><td>%.1f%%</td><td>%s</td></tr>\n",
                qc_page_safe(r, d->name), qc_text_bytes(size, d->tensor_bytes),
                all ? 100.0 * (double)d->tensor_bytes / (double)all : 0.0,
                qc_text_bytes(shards, d->shard_bytes));
    }
    qc_html_table_end(r->page);
}

/* ---- gain of calibrating: by kind with a drawing of each, and layer by layer ----------------- */

/* The errors of some weights, each times its elements. */
typedef struct {
    double rounded, calibrated, elems;
    uint32_t weights;
} gain;

static void add_gain_of(gain *g, const qc_report_weight *t)
{
    if (!t->outputs)
        return;
    g->rounded += t->outputs->rounded * (double)t->elems;
    g->calibrated += t->outputs->calibrated * (double)t->elems;
    g->elems += (double)t->elems;
    g->weights++;
}

static double mean_of(double sum, const gain *g)
{
    return g->elems > 0 ? sum / g->elems : 0.0;
}

/* Returns the share of the error that is left; 1 means no gain. */
static double left_over(const gain *g)
{
    return g->rounded > 0 ? g->calibrated / g->rounded : 1.0;
}

static gain of_series(const qc_report *r, const char *name)
{
    gain g = {0};
    for (uint32_t i = 0; i < r->weight_count; i++)
        if (strcmp(r->kinds[r->weights[i].kind].name, name) == 0)
            add_gain_of(&g, &r->weights[i]);
    return g;
}

static void add_gain(const qc_report *r, const gain *g)
{
    QC_PAGE(r, "<td>%.3g</td><td>%.3g</td><td>%.2f</td>", mean_of(g->rounded, g),
            mean_of(g->calibrated, g), left_over(g));
}

static void add_gain_kinds(const qc_report *r)
{
    qc_page_table(r, "kind|rounded|calibrated|left over|weights");
    for (uint32_t s = 0; s < r->series_count; s++) {
        gain g = of_series(r, r->series[s]);
        if (g.weights == 0)
            continue;
        QC_PAGE(r, "<tr><td>%s</td>", qc_page_safe(r, r->series[s]));
        add_gain(r, &g);
        QC_PAGE(r, "<td>%" PRIu32 "</td></tr>\n", g.weights);
    }
    qc_html_table_end(r->page);
}

/* Draws what is left of each kind's error, as a bar in a frame that stands for all of it. */
static void add_gain_bars(const qc_report *r)
{
    uint32_t bars = 0;
    for (uint32_t s = 0; s < r->series_count; s++)
        bars += of_series(r, r->series[s]).weights > 0;
    bars = bars < MAX_BARS ? bars : MAX_BARS;
    QC_PAGE(r, "<figure><figcaption>What is left of the error in outputs, by kind; the frame is "
               "all of it</figcaption>\n");
    qc_page_svg(r, 2.0 * BAR_HEIGHT * (double)bars + 4.0,
                "share of the error in outputs that is left; the numbers are in the table");
    double y = 0.0, width = QC_DRAW_WIDTH - 2.0 * BAR_LEFT;
    for (uint32_t s = 0, shown = 0; s < r->series_count && shown < bars; s++) {
        gain g = of_series(r, r->series[s]);
        if (g.weights == 0)
            continue;
        double share = left_over(&g);
        QC_PAGE(r,
                "<text x=\"%.0f\" y=\"%.1f\">%s: %.0f%%</text><rect class=\"edge m0\" x=\"%.0f\" "
                "y=\"%.1f\" width=\"%.1f\" "
                "height=\"%.0f\"/><line class=\"span\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%.1f\" "
                "y2=\"%.1f\"/>\n",
                BAR_LEFT, y + 13.0, qc_page_safe(r, r->series[s]), share * 100.0, BAR_LEFT,
                y + BAR_HEIGHT, width * (share < 1.0 ? share : 1.0), BAR_HEIGHT - 4.0,
                BAR_LEFT + width, BAR_LEFT + width, y + BAR_HEIGHT, y + 2.0 * BAR_HEIGHT - 4.0);
        y += 2.0 * BAR_HEIGHT;
        shown++;
    }
    QC_PAGE(r, "</svg></figure>\n");
}

static void add_gain_weights(const qc_report *r, uint32_t count)
{
    if (count > MAX_ROWS) {
        QC_PAGE(r, "<p>The %" PRIu32 " weights are in <code>--json</code>.</p>\n", count);
        return;
    }
    QC_PAGE(r, "<details><summary>The numbers, weight by weight</summary>\n");
    qc_page_table(r, ".name weight|rounded|calibrated|left over");
    for (uint32_t i = 0; i < r->weight_count; i++) {
        gain g = {0};
        add_gain_of(&g, &r->weights[i]);
        if (g.weights == 0)
            continue;
        QC_PAGE(r, "<tr><td class=\"name\">%s</td>", qc_page_safe(r, r->weights[i].name));
        add_gain(r, &g);
        QC_PAGE(r, "</tr>\n");
    }
    qc_html_table_end(r->page);
    QC_PAGE(r, "</details>\n");
}

static void add_outputs(const qc_report *r)
{
    const qc_manifest *m = r->facts.manifest;
    gain all = {0};
    if (!m || !m->calibration)
        return;
    const qc_manifest_calibration *c = m->calibration;
    for (uint32_t i = 0; i < r->weight_count; i++)
        add_gain_of(&all, &r->weights[i]);
    qc_page_section(r, "outputs", "Gain of calibrating");
    QC_PAGE(r, "<p>Calibrated with <b>%s</b>",
            qc_page_safe(r, c->hessians ? c->hessians : c->text));
    if (!c->hessians)
        QC_PAGE(r, ", %" PRIu64 " tokens in windows of %" PRIu64, c->tokens, c->context);
    QC_PAGE(r,
            ": %" PRIu32 " of %" PRIu32
            " quantized weights. The error is that in a layer's outputs "
            "on these inputs, squared, over the outputs' squares: <i>rounded</i> is what searched "
            "scales and codes rounded to nearest leave, <i>calibrated</i> what is in the files, "
            "<i>left over</i> their quotient. Means count each matrix by its size.</p>\n",
            all.weights, r->weight_count);
    if (all.weights == 0)
        return;
    QC_PAGE(r, "<p>All together: %.3g rounded, %.3g calibrated, %.2f left over.</p>\n",
            mean_of(all.rounded, &all), mean_of(all.calibrated, &all), left_over(&all));
    add_gain_bars(r);
    add_gain_kinds(r);
    add_gain_weights(r, all.weights);
}

/* ---- what was left, and how it was made ------------------------------------------------------ */

static void add_left(const qc_report *r)
{
    char size[QC_SIZE_TEXT_BYTES], count[QC_SIZE_TEXT_BYTES];
    qc_page_section(r, "left", "Not quantized, and why");
    if (r->left_count == 0) {
        QC_PAGE(r,
                "<p>Nothing was left: every tensor is a quantized weight or belongs to one.</p>\n");
        return;
    }
    qc_page_table(r, "what|.text why|tensors|weights|bytes|.name such as");
    for (uint32_t i = 0; i < r->left_count; i++) {
        const qc_report_left *l = &r->left[i];
        QC_PAGE(r,
                "<tr><td>%s</td><td class=\"text\">%s</td><td>%" PRIu64
                "</td><td>%s</td><td>%s</td><td class=\"name\">%s</td></tr>\n",
                l->role, qc_page_safe(r, l->why), l->tensors, qc_text_count(count, l->elems),
                qc_text_bytes(size, l->bytes), qc_page_safe(r, l->example));
    }
    qc_html_table_end(r->page);
}

static void add_sources(const qc_report *r, const qc_manifest *m)
{
    char size[QC_SIZE_TEXT_BYTES], hex[QC_DIGEST_HEX_BYTES];
    QC_PAGE(r, "<h3>Source files</h3>\n");
    qc_page_table(r, ".name file|bytes|.text XXH3-128 of its header");
    for (size_t i = 0; i < m->source_count; i++) {
        qc_digest_hex(&m->sources[i].header, hex);
        QC_PAGE(r,
                "<tr><td class=\"name\">%s</td><td>%s</td><td class=\"text\"><code>%s</code></td>"
                "</tr>\n",
                qc_page_safe(r, m->sources[i].name), qc_text_bytes(size, m->sources[i].bytes), hex);
    }
    qc_html_table_end(r->page);
    QC_PAGE(r, "<p>The manifest, qconv.json, has the hash of every source tensor and of "
               "every byte written.</p>\n");
}

static void add_made(const qc_report *r)
{
    const qc_manifest *m = r->facts.manifest;
    qc_page_section(r, "made", "How it was made, and how to check it");
    if (m) {
        QC_PAGE(r,
                "<p>Made by qconv %s%s%s with this command, as far as the manifest has the "
                "options:</p>\n<pre>%s</pre>\n",
                qc_page_safe(r, m->qconv_version), m->zstd_version ? ", zstd " : "",
                m->zstd_version ? qc_page_safe(r, m->zstd_version) : "",
                qc_page_safe(r, r->command));
        add_sources(r, m);
    } else {
        QC_PAGE(r, "<p>Not known: there is no manifest.</p>\n");
    }
    QC_PAGE(r, "<h3>Commands</h3>\n<pre>");
    if (m)
        QC_PAGE(r, "qconv verify OUT\n");
    QC_PAGE(r,
            "qconv verify OUT --against MODEL\nqconv eval OUT --against MODEL --text FILE --json "
            "&gt; eval.json\nqconv bench --json &gt; bench.json\nqconv report OUT --against MODEL "
            "--eval eval.json --bench bench.json --html report.html</pre>\n");
    if (!r->against)
        QC_PAGE(r, "<p class=\"soft\">Without <code>--against</code> this page does not check the "
                   "hashes of OUT; <code>qconv verify OUT</code> does.</p>\n");
}

qc_status qc_report_page_html(const qc_report *facts, qc_strbuf *out, qc_error *err)
{
    qc_report paged = *facts;
    const qc_report *r = &paged;
    const char *title = NULL;
    paged.page = out;
    QC_TRY(qc_arena_printf(r->call->arena, &title, err, "qconv report: %s", r->facts.model->path));
    qc_html_begin(out, title, page_style);
    add_head(r);
    add_size(r);
    add_memory(r);
    qc_page_errors(r);
    add_outputs(r);
    qc_page_codes(r);
    add_left(r);
    qc_page_results(r);
    add_made(r);
    qc_html_end(out);
    return qc_strbuf_status(out, err);
}

/* The sections of the page about what eval and bench found. */
#include "convert/report/report_page.h"

#include "base/text.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* ---- perplexity and KL divergence ------------------------------------------------------------ */

/* "0.0644 +- 0.0021"; the error is left out where it is not known. */
static void add_value(const qc_report *r, const char *label, double v, double error,
                      const char *unit, const char *meaning)
{
    QC_PAGE(r, isfinite(v) ? "<tr><td>%s</td><td>%.5g" : "<tr><td>%s</td><td>not known", label, v);
    if (isfinite(v) && error > 0 && isfinite(error))
        QC_PAGE(r, " &#177; %.2g", error);
    QC_PAGE(r, "%s</td><td class=\"text\">%s</td></tr>\n", unit, meaning);
}

static void add_compared(const qc_report *r, const qc_eval_result *e)
{
    add_value(r, "perplexity of the source", e->base_perplexity, e->base_perplexity_error, "",
              "the same text, the model before quantizing");
    add_value(r, "difference", e->difference, e->difference_error, "",
              "more is worse; the standard error is that of paired tokens");
    add_value(r, "ratio", exp(e->log_ratio), e->log_ratio_error * exp(e->log_ratio), "",
              "perplexity over that of the source");
    add_value(r, "KL divergence, mean", e->kl_mean, e->kl_error, " nats",
              "how far the predictions are from those of the source; 0 means that they are equal");
    add_value(r, "KL divergence, median", e->kl_median, 0.0, " nats", "of the tokens");
    add_value(r, "KL divergence, 99%", e->kl_99, 0.0, " nats",
              "one token of a hundred is further off");
    add_value(r, "KL divergence, largest", e->kl_max, 0.0, " nats", "of all tokens");
    add_value(r, "same first choice", 100.0 * e->top1, 100.0 * e->top1_error, "%",
              "tokens for which both would say the same");
    add_value(r, "difference in probability", 100.0 * e->probability_rms, 0.0, "%",
              "of the right token, root mean square, in percentage points");
}

static void add_eval(const qc_report *r)
{
    const qc_eval_result *e = &r->eval;
    char a[QC_SIZE_TEXT_BYTES], b[QC_SIZE_TEXT_BYTES], c[QC_SIZE_TEXT_BYTES], d[QC_SIZE_TEXT_BYTES];
    qc_page_section(r, "perplexity", "Perplexity and KL divergence");
    if (!r->has_eval) {
        QC_PAGE(r,
                "<p><b>Not measured.</b> For a language model of the Llama family <code>qconv "
                "report OUT --against MODEL --text FILE</code> measures it, or <code>--eval "
                "eval.json</code> takes up what <code>qconv eval OUT --against MODEL --text FILE "
                "--json &gt; eval.json</code> found before.</p>\n");
        return;
    }
    QC_PAGE(r,
            "<p>Over %s: %s tokens read with the tokenizer <b>%s</b>, in %s windows of at most %s; "
            "%s predicted, on %s.",
            qc_page_safe(r, e->text ? e->text : "a text"), qc_text_count(a, e->tokens),
            qc_page_safe(r, e->tokenizer ? e->tokenizer : "?"), qc_text_count(b, e->windows),
            qc_text_count(c, e->context), qc_text_count(d, e->predicted),
            qc_page_safe(r, e->device ? e->device : "?"));
    if (r->eval_from)
        QC_PAGE(r,
                " This was measured before: it is from the file %s about %s%s%s, and whether that "
                "was this very output is not checked.",
                qc_page_safe(r, r->eval_from), qc_page_safe(r, e->path ? e->path : "?"),
                e->compared ? " against " : "",
                e->compared ? qc_page_safe(r, e->against ? e->against : "?") : "");
    QC_PAGE(r, " The number after &#177; is one standard error.</p>\n");
    qc_page_table(r, "measure|value|.text what it is");
    add_value(r, "perplexity", e->perplexity, e->perplexity_error, "",
              "of the quantized model; lower is better");
    if (e->compared)
        add_compared(r, e);
    qc_html_table_end(r->page);
    if (!e->compared)
        QC_PAGE(r, "<p>There is nothing to compare with; with <code>--against MODEL</code> the "
                   "source is read as well.</p>\n");
}

/* ---- speed of kernels ------------------------------------------------------------------------ */

#define MAX_M      24u
#define MAX_SHAPES 60u

/* Rows that have model, layer, scheme and shape in common are one line of the table. */
static int same_line(const qc_report_speed *a, const qc_report_speed *b)
{
    return a->n == b->n && a->k == b->k && strcmp(a->scheme, b->scheme) == 0 &&
           strcmp(a->model, b->model) == 0 && strcmp(a->layer, b->layer) == 0;
}

static unsigned list_m(const qc_report_bench *b, uint64_t m[MAX_M])
{
    unsigned n = 0;
    for (uint32_t i = 0; i < b->row_count; i++) {
        unsigned at = 0;
        while (at < n && m[at] < b->rows[i].m)
            at++;
        if (at < n && m[at] == b->rows[i].m)
            continue;
        if (n == MAX_M)
            continue;
        memmove(m + at + 1, m + at, (n - at) * sizeof *m);
        m[at] = b->rows[i].m;
        n++;
    }
    return n;
}

static void add_speed_line(const qc_report *r, const qc_report_bench *b, uint32_t first,
                           const uint64_t *m, unsigned m_count)
{
    const qc_report_speed *line = &b->rows[first];
    QC_PAGE(
        r, "<tr><td class=\"name\">%s, %s%s</td><td>%s</td><td>%" PRIu64 " &#215; %" PRIu64 "</td>",
        qc_page_safe(r, line->model), qc_page_safe(r, line->layer),
        line->here ? " <b>(in OUT)</b>" : "", qc_page_safe(r, line->scheme), line->n, line->k);
    for (unsigned i = 0; i < m_count; i++) {
        const qc_report_speed *found = NULL;
        for (uint32_t k = first; k < b->row_count && !found; k++)
            if (b->rows[k].m == m[i] && same_line(&b->rows[k], line))
                found = &b->rows[k];
        if (!found || !(found->us > 0))
            QC_PAGE(r, "<td></td>");
        else if (found->ratio > 0)
            QC_PAGE(r, "<td>%.2f&#215;<br/><span class=\"soft\">%.3g &#181;s</span></td>",
                    found->ratio, found->us);
        else
            QC_PAGE(r, "<td>%.3g &#181;s</td>", found->us);
    }
    QC_PAGE(r, "</tr>\n");
}

static void add_speed_table(const qc_report *r, const qc_report_bench *b)
{
    uint64_t m[MAX_M];
    unsigned m_count = list_m(b, m), lines = 0, left_out = 0;
    QC_PAGE(r, "<table>\n<tr><th class=\"name\">layer</th><th>scheme</th><th>N "
               "&#215; K</th>");
    for (unsigned i = 0; i < m_count; i++)
        QC_PAGE(r, "<th>M = %" PRIu64 "</th>", m[i]);
    QC_PAGE(r, "</tr>\n");
    for (int here = 1; here >= 0; here--)
        for (uint32_t i = 0; i < b->row_count; i++) {
            int first = b->rows[i].here == here;
            for (uint32_t k = 0; first && k < i; k++)
                first = !same_line(&b->rows[k], &b->rows[i]);
            if (first && lines == MAX_SHAPES)
                left_out++;
            else if (first) {
                add_speed_line(r, b, i, m, m_count);
                lines++;
            }
        }
    qc_html_table_end(r->page);
    if (left_out)
        QC_PAGE(r, "<p>%u more line%s %s in <code>--json</code>.</p>\n", left_out,
                qc_plural(left_out), qc_are(left_out));
}

static void add_speed(const qc_report *r)
{
    const qc_report_bench *b = r->bench;
    qc_page_section(r, "speed", "Speed of the kernels");
    if (!b) {
        QC_PAGE(
            r, "<p><b>Not measured.</b> Run <code>qconv bench --json &gt; bench.json</code> on a "
               "machine with a GPU, and give the file with <code>--bench bench.json</code>.</p>\n");
        return;
    }
    if (!b->complete)
        QC_PAGE(r, "<p><b>The run ended before all was measured</b>, so points are missing.</p>\n");
    if (b->failed)
        QC_PAGE(r,
                "<p><b>%" PRIu64 " of its results were wrong or could not be had</b>; they have no "
                "times here.</p>\n",
                b->failed);
    QC_PAGE(r, "<p>On <b>%s</b>, measured by %s with %s activations", qc_page_safe(r, b->device),
            qc_page_safe(r, b->program), qc_page_safe(r, b->dtype));
    if (b->copy_gbps > 0)
        QC_PAGE(r, "; memory copies run at %.4g GB/s", b->copy_gbps);
    if (b->gemm_tflops > 0)
        QC_PAGE(r, ", dense products at %.4g TFLOP/s", b->gemm_tflops);
    QC_PAGE(r,
            ". A cell has the speed-up over cuBLAS with 16-bit weights and the time of one "
            "multiplication with M rows of activations. %s</p>\n",
            b->here
                ? "Shapes of this output come first."
                : "None of the shapes measured is one of this output's weights: <code>qconv bench "
                  "--shapes</code> takes others.");
    add_speed_table(r, b);
}

void qc_page_results(const qc_report *r)
{
    add_eval(r);
    add_speed(r);
}

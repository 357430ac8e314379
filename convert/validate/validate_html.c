/* qconv validate --html: what passed and what did not, plots over the layers, and all numbers.
 *
 * A plot shows the layers from left to right in natural order. Values that belong together (the
 * same projection in every block, or the same batch size) are a series, which has a colour of its
 * own and is joined by a line. If a plot has errors of several schemes, which differ by a factor of
 * ten, their axis is logarithmic. */
#include "convert/term/html_text.h"
#include "convert/term/size_text.h"
#include "convert/validate/validate_report.h"

#include <ctype.h>
#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* A plot consists of two drawings side by side: the numbers of the axis, which is LEFT wide, and
 * the layers, which is as wide as the page and uses percentages. So nothing is scaled, and text is
 * as large on a phone as elsewhere. */
#define HEIGHT 250.0
#define LEFT   62.0
#define TOP    12.0
#define BOTTOM 34.0
#define KINDS  24u /* series of a plot; all others share the last */
/* The least distance between two numbers below a plot, in percent: on a phone, and on a screen. */
#define APART_NARROW 14.0
#define APART_WIDE   4.5

static const char page_style[] =
    "body{max-width:70em}"
    "table{font-size:13px;margin-top:.6em}td,th{padding:.2em .6em}td{white-space:nowrap}"
    "h2{margin-bottom:0}.soft{margin:0}"
    ".plot{display:flex}.plot svg{display:block;flex:none;height:250px}"
    ".plot svg.area{flex:1 1 0;min-width:0;overflow:visible}"
    ".plot text{font-size:12px;fill:var(--soft)}"
    "@media (max-width:40em){text.more{display:none}}"
    ".grid{stroke:var(--faint);stroke-width:1}.limit{stroke:var(--bad);stroke-dasharray:5 4;"
    "stroke-width:1.5}"
    ".s0{--s:var(--c0)}.s1{--s:var(--c1)}.s2{--s:var(--c2)}.s3{--s:var(--c3)}.s4{--s:var(--c4)}"
    ".s5{--s:var(--c5)}.s6{--s:var(--c6)}.s7{--s:var(--c7)}"
    "line.join{stroke:var(--s);stroke-width:1.3;opacity:.55}circle{fill:var(--s)}"
    "circle.bad{stroke:var(--bad);stroke-width:2.5}"
    ".key i{border-radius:50%;background:var(--s)}";

typedef struct {
    const qc_validate_report *r;
    const qc_validate_layer **layers; /* those that were measured */
    size_t count;
    const char *names[KINDS];
    unsigned kind_count;
    unsigned *kind_of; /* for each layer an index into names */
    qc_strbuf *out;
} page;

/* ---- series --------------------------------------------------------------------------------- */

/* For "model.layers.12.self_attn.q_proj.weight" it is "self_attn.q_proj": what follows the last
 * number. */
static qc_status kind_name(qc_arena *arena, const char *name, const char **out, qc_error *err)
{
    const char *begin = name;
    size_t len = strlen(name), tail = sizeof ".weight" - 1;
    for (const char *s = name; *s; s++) {
        const char *digits = s;
        if (s != name && s[-1] != '.')
            continue;
        while (isdigit((unsigned char)*digits))
            digits++;
        if (digits > s && *digits == '.')
            begin = digits + 1;
    }
    len -= (size_t)(begin - name);
    if (len > tail && strcmp(begin + len - tail, ".weight") == 0)
        len -= tail;
    return qc_arena_strndup(arena, out, begin, len, err);
}

static qc_status gather(page *p, qc_arena *arena, qc_error *err)
{
    const qc_validate_report *r = p->r;
    void *v = NULL;
    QC_TRY(qc_arena_alloc(arena, &v, r->layer_count + 1, sizeof *p->layers, err));
    p->layers = v;
    QC_TRY(qc_arena_alloc(arena, &v, r->layer_count + 1, sizeof *p->kind_of, err));
    p->kind_of = v;
    for (size_t i = 0; i < r->layer_count; i++) {
        const char *kind = NULL;
        unsigned k = 0;
        if (r->layers[i].why_not)
            continue;
        QC_TRY(kind_name(arena, r->layers[i].pair->name, &kind, err));
        while (k < p->kind_count && strcmp(p->names[k], kind) != 0)
            k++;
        if (k == KINDS) {
            k = KINDS - 1;
            p->names[k] = "others";
        } else if (k == p->kind_count) {
            p->names[p->kind_count++] = kind;
        }
        p->kind_of[p->count] = k;
        p->layers[p->count++] = &r->layers[i];
    }
    return QC_OK;
}

/* ---- one plot ------------------------------------------------------------------------------- */

typedef double (*value_fn)(const qc_validate_layer *l, unsigned series); /* NaN: there is none */

typedef struct {
    const char *title, *note; /* note says what the axis shows */
    value_fn value;
    int by_m;    /* the series are batch sizes, not kinds of layers */
    int percent; /* the axis is in percent */
    int log;
    double limit; /* drawn as a dashed line; 0: none */
    double low, high;
    int lines; /* ticks are drawn as lines across the plot, not as numbers */
} plot;

static unsigned series_count(const page *p, const plot *g)
{
    return g->by_m ? p->r->m_count : p->kind_count;
}

static double value_of(const page *p, const plot *g, size_t i, unsigned series)
{
    if (!g->by_m && p->kind_of[i] != series)
        return (double)NAN;
    return g->value(p->layers[i], series);
}

/* Finds the range of the axis. Returns 0 if there is nothing to draw. */
static int find_range(const page *p, plot *g)
{
    double low = DBL_MAX, high = 0.0;
    for (unsigned s = 0; s < series_count(p, g); s++) {
        for (size_t i = 0; i < p->count; i++) {
            double v = value_of(p, g, i, s);
            if (!isfinite(v) || (g->log && v <= 0.0))
                continue;
            low = v < low ? v : low;
            high = v > high ? v : high;
        }
    }
    if (low > high)
        return 0;
    if (g->limit > 0.0) {
        low = g->limit < low ? g->limit : low;
        high = g->limit > high ? g->limit : high;
    }
    if (g->log && high < low * 4.0) {
        /* There is only one scheme, so the axis is linear. It has some room around the values, in
         * case there is only one. */
        double room = (high - low) * 0.12 + high * 0.01;
        g->log = 0;
        g->low = low > room ? low - room : 0.0;
        g->high = high + room;
    } else if (g->log) {
        g->low = low / 1.15;
        g->high = high * 1.15;
    } else {
        g->low = 0.0;
        g->high = high > 0.0 ? high * 1.08 : 1.0;
    }
    return 1;
}

/* In percent of the width of the layers' drawing. */
static double x_of(const page *p, size_t i)
{
    return 100.0 * ((double)i + 0.5) / (double)p->count;
}

static double y_of(const plot *g, double v)
{
    double share =
        g->log ? log(v / g->low) / log(g->high / g->low) : (v - g->low) / (g->high - g->low);
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
}

/* Draws a number of the axis, or its line in the layers' drawing. */
static qc_status add_tick(page *p, const plot *g, double v, qc_error *err)
{
    double y = y_of(g, v);
    if (g->lines)
        return qc_strbuf_addf(p->out, err,
                              "<line class=\"grid\" x1=\"0\" x2=\"100%%\" y1=\"%.1f\" "
                              "y2=\"%.1f\"/>\n",
                              y, y);
    return qc_strbuf_addf(p->out, err,
                          "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%.3g%s</text>\n",
                          LEFT - 6.0, y + 4.0, g->percent ? v * 100.0 : v, g->percent ? "%" : "");
}

/* Adds 1, 2 and 5 times powers of ten; in a large range only the powers of ten. */
static qc_status add_log_ticks(page *p, const plot *g, qc_error *err)
{
    static const double steps[] = {1.0, 2.0, 5.0};
    double decades = log10(g->high / g->low);
    for (int e = (int)floor(log10(g->low)); e <= (int)ceil(log10(g->high)); e++) {
        for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
            double v = steps[i] * pow(10.0, e);
            int shown = i == 0 || decades < 2.5;
            if (shown && v >= g->low && v <= g->high)
                QC_TRY(add_tick(p, g, v, err));
        }
    }
    return QC_OK;
}

static qc_status add_linear_ticks(page *p, const plot *g, qc_error *err)
{
    double range = g->high - g->low, step = pow(10.0, floor(log10(range / 3.0)));
    if (range / step > 15.0)
        step *= 5.0;
    else if (range / step > 6.0)
        step *= 2.0;
    for (double i = ceil(g->low / step); step * i <= g->high; i += 1.0)
        QC_TRY(add_tick(p, g, step * i, err));
    return QC_OK;
}

/* Adds the first number that changes in the layers' names, which counts the model's blocks. */
static qc_status add_blocks(page *p, qc_error *err)
{
    double last_x = -1e9, last_wide = -1e9;
    unsigned long last = ULONG_MAX;
    for (size_t i = 0; i < p->count; i++) {
        const char *s = p->layers[i]->pair->name;
        unsigned long block = 0;
        double x = x_of(p, i);
        while (*s && !(isdigit((unsigned char)*s) && s != p->layers[i]->pair->name && s[-1] == '.'))
            s++;
        if (!*s)
            continue;
        for (unsigned n = 0; n < 9 && isdigit((unsigned char)*s); n++)
            block = block * 10 + (unsigned long)(*s++ - '0');
        if (block == last || x - last_wide < APART_WIDE)
            continue;
        int narrow = x - last_x >= APART_NARROW;
        last = block;
        last_wide = x;
        last_x = narrow ? x : last_x;
        QC_TRY(qc_strbuf_addf(p->out, err,
                              "<text%s x=\"%.2f%%\" y=\"%.0f\" text-anchor=\"middle\">%lu</text>",
                              narrow ? "" : " class=\"more\"", x, HEIGHT - BOTTOM + 22.0, block));
    }
    return qc_strbuf_adds(p->out, "\n", err);
}

static qc_status add_series(page *p, const plot *g, unsigned s, qc_error *err)
{
    unsigned colour = s % QC_HTML_SERIES;
    double last_x = -1.0, last_y = 0.0;
    QC_TRY(qc_strbuf_addf(p->out, err, "<g class=\"s%u\">", colour));
    for (size_t i = 0; i < p->count; i++) {
        double v = value_of(p, g, i, s);
        if (!isfinite(v) || (g->log && v <= 0.0))
            continue;
        if (last_x >= 0.0)
            QC_TRY(qc_strbuf_addf(p->out, err,
                                  "<line class=\"join\" x1=\"%.2f%%\" x2=\"%.2f%%\" y1=\"%.1f\" "
                                  "y2=\"%.1f\"/>",
                                  last_x, x_of(p, i), last_y, y_of(g, v)));
        last_x = x_of(p, i);
        last_y = y_of(g, v);
    }
    double radius = p->count > 300 ? 2.0 : 3.0;
    for (size_t i = 0; i < p->count; i++) {
        double v = value_of(p, g, i, s);
        if (!isfinite(v) || (g->log && v <= 0.0))
            continue;
        QC_TRY(qc_strbuf_addf(p->out, err, "<circle cx=\"%.2f%%\" cy=\"%.1f\" r=\"%.1f\"%s><title>",
                              x_of(p, i), y_of(g, v), radius,
                              p->layers[i]->failure ? " class=\"bad\"" : ""));
        qc_html_escape(p->out, p->layers[i]->pair->name);
        if (g->by_m)
            QC_TRY(qc_strbuf_addf(p->out, err, ", M = %" PRIu64, p->r->m[s]));
        QC_TRY(qc_strbuf_addf(p->out, err, ": %.4g%s</title></circle>\n",
                              g->percent ? v * 100.0 : v, g->percent ? "%" : ""));
    }
    return qc_strbuf_adds(p->out, "</g>\n", err);
}

static qc_status add_ticks(page *p, const plot *g, qc_error *err)
{
    return g->log ? add_log_ticks(p, g, err) : add_linear_ticks(p, g, err);
}

static qc_status add_plot(page *p, plot g, qc_error *err)
{
    if (p->count == 0 || !find_range(p, &g))
        return QC_OK;
    QC_TRY(qc_strbuf_addf(p->out, err,
                          "<h2>%s</h2>\n<p class=\"soft\">%s</p>\n<div class=\"plot\"><svg "
                          "width=\"%.0f\" height=\"%.0f\" xmlns=\"http://www.w3.org/2000/svg\" "
                          "aria-hidden=\"true\">\n",
                          g.title, g.note, LEFT, HEIGHT));
    QC_TRY(add_ticks(p, &g, err));
    QC_TRY(qc_strbuf_addf(p->out, err,
                          "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">block</text></svg>\n"
                          "<svg class=\"area\" height=\"%.0f\" "
                          "xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"%s of "
                          "every layer; the numbers are in the table\">\n",
                          LEFT - 6.0, HEIGHT - BOTTOM + 22.0, HEIGHT, g.title));
    g.lines = 1;
    QC_TRY(add_ticks(p, &g, err));
    QC_TRY(add_blocks(p, err));
    if (g.limit > 0.0)
        QC_TRY(qc_strbuf_addf(p->out, err,
                              "<line class=\"limit\" x1=\"0\" x2=\"100%%\" y1=\"%.1f\" "
                              "y2=\"%.1f\"/>\n",
                              y_of(&g, g.limit), y_of(&g, g.limit)));
    for (unsigned s = 0; s < series_count(p, &g); s++)
        QC_TRY(add_series(p, &g, s, err));
    QC_TRY(qc_strbuf_adds(p->out, "</svg></div>\n<p>", err));
    for (unsigned s = 0; s < series_count(p, &g); s++) {
        QC_TRY(qc_strbuf_addf(p->out, err, "<span class=\"key s%u\"><i></i>", s % QC_HTML_SERIES));
        if (g.by_m)
            QC_TRY(qc_strbuf_addf(p->out, err, "M = %" PRIu64, p->r->m[s]));
        else
            qc_html_escape(p->out, p->names[s]);
        QC_TRY(qc_strbuf_adds(p->out, "</span>\n", err));
    }
    return qc_strbuf_adds(p->out, "</p>\n", err);
}

static double output_error(const qc_validate_layer *l, unsigned series)
{
    (void)series;
    return l->output_error;
}

static double weight_error(const qc_validate_layer *l, unsigned series)
{
    (void)series;
    return l->weight_error;
}

static double kernel_error(const qc_validate_layer *l, unsigned series)
{
    (void)series;
    return l->kernel_error;
}

static double speedup(const qc_validate_layer *l, unsigned series)
{
    if (series >= l->time_count || l->times[series].fp16_seconds <= 0.0)
        return (double)NAN;
    return l->times[series].fp16_seconds / l->times[series].seconds;
}

static double roof(const qc_validate_layer *l, unsigned series)
{
    return series < l->time_count && l->times[series].roof > 0.0 ? l->times[series].roof
                                                                 : (double)NAN;
}

/* ---- words and numbers ---------------------------------------------------------------------- */

static qc_status add_summary(page *p, qc_error *err)
{
    const qc_validate_report *r = p->r;
    const qc_validate_layer *worst = qc_validate_worst(r);
    char seconds[QC_SIZE_TEXT_BYTES];
    QC_TRY(qc_strbuf_adds(p->out, "<h1>", err));
    qc_html_escape(p->out, r->out);
    QC_TRY(qc_strbuf_adds(p->out, " against ", err));
    qc_html_escape(p->out, r->model);
    if (r->failure_count)
        QC_TRY(qc_strbuf_addf(p->out, err, ": <span class=\"no\">%zu not good enough</span></h1>\n",
                              r->failure_count));
    else if (r->baseline || r->max_error > 0.0)
        QC_TRY(qc_strbuf_adds(p->out, ": <span class=\"yes\">passed</span></h1>\n", err));
    else
        QC_TRY(qc_strbuf_adds(p->out, "</h1>\n", err));
    QC_TRY(qc_strbuf_addf(p->out, err, "<p>%zu of %zu quantized layers measured on ", r->measured,
                          r->quantized));
    qc_html_escape(p->out, r->device);
    QC_TRY(qc_strbuf_addf(p->out, err, " in %s; %" PRIu64 " rows of ",
                          qc_text_seconds(seconds, r->seconds), r->rows));
    if (r->activations) {
        QC_TRY(qc_strbuf_adds(p->out, "activations captured in ", err));
        qc_html_escape(p->out, r->activations);
        QC_TRY(qc_strbuf_adds(p->out, ".", err));
    } else {
        QC_TRY(
            qc_strbuf_addf(p->out, err, "random normal activations, seed %" PRIu64 ".", r->seed));
    }
    if (worst) {
        QC_TRY(qc_strbuf_adds(p->out, " Largest output error: ", err));
        qc_html_escape(p->out, worst->pair->name);
        QC_TRY(qc_strbuf_addf(p->out, err, ", %.4g%%.", worst->output_error * 100.0));
    }
    QC_TRY(qc_strbuf_adds(p->out, "</p>\n", err));
    if (r->left_out) {
        QC_TRY(qc_strbuf_adds(p->out, "<p>", err));
        qc_html_escape(p->out, r->left_out);
        QC_TRY(qc_strbuf_adds(p->out, "</p>\n", err));
    }
    return QC_OK;
}

static qc_status add_item(page *p, const char *name, const char *why, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(p->out, "<li>", err));
    qc_html_escape(p->out, name);
    QC_TRY(qc_strbuf_adds(p->out, ": ", err));
    qc_html_escape(p->out, why);
    return qc_strbuf_adds(p->out, "</li>\n", err);
}

static qc_status add_lists(page *p, qc_error *err)
{
    const qc_validate_report *r = p->r;
    size_t others = 0;
    if (r->failure_count) {
        QC_TRY(qc_strbuf_adds(p->out, "<h2 class=\"no\">Not good enough</h2>\n<ul>\n", err));
        for (size_t i = 0; i < r->failure_count; i++)
            QC_TRY(add_item(p, r->failures[i].name, r->failures[i].why, err));
        QC_TRY(qc_strbuf_adds(p->out, "</ul>\n", err));
    }
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        const char *why = l->why_not ? l->why_not : l->note;
        if (!why)
            continue;
        if (others++ == 0)
            QC_TRY(qc_strbuf_adds(p->out, "<h2>Not as the others</h2>\n<ul>\n", err));
        QC_TRY(add_item(p, l->pair->name, why, err));
    }
    return others ? qc_strbuf_adds(p->out, "</ul>\n", err) : QC_OK;
}

/* Writes a cell. It is empty if the value was not measured or is not a number. */
static qc_status add_cell(page *p, double v, const char *unit, qc_error *err)
{
    if (!isfinite(v))
        return qc_strbuf_adds(p->out, "<td></td>", err);
    return qc_strbuf_addf(p->out, err, "<td>%.3g%s</td>", v, unit);
}

static qc_status add_row(page *p, const qc_validate_layer *l, qc_error *err)
{
    char shape[QC_SHAPE_TEXT_BYTES];
    const qc_validate_pair *pair = l->pair;
    QC_TRY(qc_strbuf_addf(p->out, err, "<tr><td%s>", l->failure ? " class=\"no\"" : ""));
    qc_html_escape(p->out, pair->name);
    QC_TRY(qc_strbuf_addf(p->out, err, "</td><td>%s</td><td>%s</td>", qc_validate_scheme(pair),
                          qc_text_shape(shape, pair->stored->dims, pair->stored->ndim)));
    QC_TRY(add_cell(p, l->weight_error * 100.0, "%", err));
    QC_TRY(add_cell(p, qc_validate_sqnr(l->weight_error), "", err));
    QC_TRY(add_cell(p, l->weight_max, "", err));
    QC_TRY(
        qc_strbuf_addf(p->out, err, "<td>%" PRIu64 ", %" PRIu64 "</td>", l->max_row, l->max_col));
    QC_TRY(add_cell(p, l->output_error * 100.0, "%", err));
    QC_TRY(add_cell(p, l->kernel_error * 100.0, "%", err));
    for (unsigned m = 0; m < p->r->m_count; m++)
        QC_TRY(add_cell(p, speedup(l, m), "", err));
    return qc_strbuf_adds(p->out, "</tr>\n", err);
}

static qc_status add_table(page *p, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(
        p->out,
        "<h2>Layers</h2>\n<table>\n<tr><th>layer</th>"
        "<th>scheme</th><th>shape</th><th>weight error</th><th>SQNR, dB</th>"
        "<th>largest</th><th>at row, column</th><th>output error</th><th>kernel error</th>",
        err));
    for (unsigned m = 0; m < p->r->m_count; m++)
        QC_TRY(qc_strbuf_addf(p->out, err, "<th>fp16 / ours, M = %" PRIu64 "</th>", p->r->m[m]));
    QC_TRY(qc_strbuf_adds(p->out, "</tr>\n", err));
    for (size_t i = 0; i < p->count; i++)
        QC_TRY(add_row(p, p->layers[i], err));
    qc_html_table_end(p->out);
    return QC_OK;
}

qc_status qc_validate_html(const qc_validate_report *r, qc_arena *arena, qc_strbuf *out,
                           qc_error *err)
{
    page p = {.r = r, .out = out};
    QC_TRY(gather(&p, arena, err));
    qc_html_begin(out, "qconv validate", page_style);
    QC_TRY(add_summary(&p, err));
    QC_TRY(add_lists(&p, err));
    QC_TRY(add_plot(&p,
                    (plot){.title = "Output error",
                           .note = "What the layer multiplies to, against the 16-bit weights: "
                                   "relative, over all outputs.",
                           .value = output_error,
                           .percent = 1,
                           .log = 1,
                           .limit = r->max_error},
                    err));
    QC_TRY(add_plot(&p,
                    (plot){.title = "Weight error",
                           .note = "Relative, over all weights (Frobenius norms).",
                           .value = weight_error,
                           .percent = 1,
                           .log = 1},
                    err));
    QC_TRY(add_plot(&p,
                    (plot){.title = "Error of the kernel itself",
                           .note = "Its result against sums in double of the same quantized "
                                   "weights.",
                           .value = kernel_error,
                           .percent = 1,
                           .log = 1},
                    err));
    QC_TRY(add_plot(&p,
                    (plot){.title = "Speed-up over fp16",
                           .note = "Time of cuBLAS with the 16-bit weights over time with the "
                                   "quantized ones, by rows of activations at once.",
                           .value = speedup,
                           .by_m = 1,
                           .limit = 1.0},
                    err));
    QC_TRY(add_plot(&p,
                    (plot){.title = "Share of the roof",
                           .note = "The least time that this GPU's memory and tensor cores, as "
                                   "measured, would need, over the time taken.",
                           .value = roof,
                           .by_m = 1,
                           .percent = 1},
                    err));
    QC_TRY(add_table(&p, err));
    qc_html_end(out);
    return qc_strbuf_status(out, err);
}

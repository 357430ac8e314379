/* qconv validate --html: what passed and what did not, plots over the layers, and all numbers.
 *
 * A plot shows the layers from left to right in natural order. Values that belong together (the
 * same projection in every block, or the same batch size) are a series, which has a colour of its
 * own and is joined by a line. If a plot has errors of several schemes, which differ by a factor of
 * ten, their axis is logarithmic. */
#include "convert/model/recipe_stored.h"
#include "convert/term/html_text.h"
#include "convert/term/size_text.h"
#include "convert/validate/validate_report.h"

#include <ctype.h>
#include <float.h>
#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
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
#define TICKS        1024u /* most numbers of an axis */

#define PUT(p, ...) qc_strbuf_putf((p)->out, __VA_ARGS__)

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
    QC_TRY(qc_arena_alloc(arena, &p->layers, r->layer_count + 1, sizeof *p->layers, err));
    QC_TRY(qc_arena_alloc(arena, &p->kind_of, r->layer_count + 1, sizeof *p->kind_of, err));
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

typedef struct {
    const char *title, *note; /* note says what the axis shows */
    size_t error;             /* where in a layer the value is; with by_m not used */
    int by_m;                 /* the series are batch sizes, not kinds of layers: speed-ups, or */
    int roof;                 /* shares of the roof */
    int percent;              /* the axis is in percent */
    int log;
    double limit; /* drawn as a dashed line; 0: none */
    double low, high;
} plot;

static unsigned series_count(const page *p, const plot *g)
{
    return g->by_m ? p->r->m_count : p->kind_count;
}

static double speedup(const qc_validate_layer *l, unsigned m)
{
    return m < l->time_count ? qc_validate_speedup(&l->times[m]) : (double)NAN;
}

static double milliseconds(const qc_validate_layer *l, unsigned m)
{
    return m < l->time_count ? l->times[m].seconds * 1e3 : (double)NAN;
}

/* NaN: there is none. */
static double value_of(const page *p, const plot *g, size_t i, unsigned series)
{
    const qc_validate_layer *l = p->layers[i];
    if (g->roof)
        return series < l->time_count && l->times[series].roof > 0.0 ? l->times[series].roof
                                                                     : (double)NAN;
    if (g->by_m)
        return speedup(l, series);
    return p->kind_of[i] == series ? *(const double *)(const void *)((const char *)l + g->error)
                                   : (double)NAN;
}

static int is_drawn(const plot *g, double v)
{
    return isfinite(v) && (!g->log || v > 0.0);
}

/* Finds the range of the axis. Returns 0 if there is nothing to draw. */
static int find_range(const page *p, plot *g)
{
    double low = DBL_MAX, high = 0.0;
    for (unsigned s = 0; s < series_count(p, g); s++) {
        for (size_t i = 0; i < p->count; i++) {
            double v = value_of(p, g, i, s);
            if (!is_drawn(g, v))
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

/* Finds the values that the axis shows a number at: 1, 2 and 5 times powers of ten, in a large
 * range only the powers of ten, or whole steps of a linear axis. Returns how many there are. */
static unsigned find_ticks(const plot *g, double ticks[TICKS])
{
    static const double steps[] = {1.0, 2.0, 5.0};
    unsigned n = 0;
    if (g->log) {
        const unsigned used = log10(g->high / g->low) < 2.5 ? 3 : 1;
        for (int e = (int)floor(log10(g->low)); e <= (int)ceil(log10(g->high)); e++)
            for (unsigned i = 0; i < used && n < TICKS; i++) {
                ticks[n] = steps[i] * pow(10.0, e);
                n += ticks[n] >= g->low && ticks[n] <= g->high;
            }
        return n;
    }
    double range = g->high - g->low, step = pow(10.0, floor(log10(range / 3.0)));
    step *= range / step > 15.0 ? 5.0 : range / step > 6.0 ? 2.0 : 1.0;
    for (double i = ceil(g->low / step); step * i <= g->high && n < TICKS; i += 1.0)
        ticks[n++] = step * i;
    return n;
}

/* Adds the first number that changes in the layers' names, which counts the model's blocks. */
static void add_blocks(page *p)
{
    double last_x = -1e9, last_wide = -1e9;
    unsigned long last = ULONG_MAX;
    for (size_t i = 0; i < p->count; i++) {
        const char *name = p->layers[i]->pair->name, *s = name;
        unsigned long block = 0;
        double x = x_of(p, i);
        while (*s && !(isdigit((unsigned char)*s) && s != name && s[-1] == '.'))
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
        PUT(p, "<text%s x=\"%.2f%%\" y=\"%.0f\" text-anchor=\"middle\">%lu</text>",
            narrow ? "" : " class=\"more\"", x, HEIGHT - BOTTOM + 22.0, block);
    }
    PUT(p, "\n");
}

static void add_series(page *p, const plot *g, unsigned s)
{
    double last_x = -1.0, last_y = 0.0, radius = p->count > 300 ? 2.0 : 3.0;
    PUT(p, "<g class=\"s%u\">", s % QC_HTML_SERIES);
    for (size_t i = 0; i < p->count; i++) {
        double v = value_of(p, g, i, s);
        if (!is_drawn(g, v))
            continue;
        if (last_x >= 0.0)
            PUT(p, "<line class=\"join\" x1=\"%.2f%%\" x2=\"%.2f%%\" y1=\"%.1f\" y2=\"%.1f\"/>",
                last_x, x_of(p, i), last_y, y_of(g, v));
        last_x = x_of(p, i);
        last_y = y_of(g, v);
    }
    for (size_t i = 0; i < p->count; i++) {
        double v = value_of(p, g, i, s);
        if (!is_drawn(g, v))
            continue;
        PUT(p, "<circle cx=\"%.2f%%\" cy=\"%.1f\" r=\"%.1f\"%s><title>", x_of(p, i), y_of(g, v),
            radius, p->layers[i]->failure ? " class=\"bad\"" : "");
        qc_html_escape(p->out, p->layers[i]->pair->name);
        if (g->by_m)
            PUT(p, ", M = %" PRIu64, p->r->m[s]);
        PUT(p, ": %.4g%s</title></circle>\n", g->percent ? v * 100.0 : v, g->percent ? "%" : "");
    }
    PUT(p, "</g>\n");
}

static void add_line(page *p, const char *class, double y)
{
    PUT(p, "<line class=\"%s\" x1=\"0\" x2=\"100%%\" y1=\"%.1f\" y2=\"%.1f\"/>\n", class, y, y);
}

static void add_plot(page *p, plot g)
{
    double ticks[TICKS];
    if (p->count == 0 || !find_range(p, &g))
        return;
    const unsigned tick_count = find_ticks(&g, ticks), series = series_count(p, &g);
    PUT(p,
        "<h2>%s</h2>\n<p class=\"soft\">%s</p>\n<div class=\"plot\"><svg width=\"%.0f\" "
        "height=\"%.0f\" xmlns=\"http://www.w3.org/2000/svg\" aria-hidden=\"true\">\n",
        g.title, g.note, LEFT, HEIGHT);
    for (unsigned i = 0; i < tick_count; i++)
        PUT(p, "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">%.3g%s</text>\n", LEFT - 6.0,
            y_of(&g, ticks[i]) + 4.0, g.percent ? ticks[i] * 100.0 : ticks[i],
            g.percent ? "%" : "");
    PUT(p,
        "<text x=\"%.0f\" y=\"%.0f\" text-anchor=\"end\">block</text></svg>\n<svg class=\"area\" "
        "height=\"%.0f\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"%s of "
        "every layer; the numbers are in the table\">\n",
        LEFT - 6.0, HEIGHT - BOTTOM + 22.0, HEIGHT, g.title);
    for (unsigned i = 0; i < tick_count; i++)
        add_line(p, "grid", y_of(&g, ticks[i]));
    add_blocks(p);
    if (g.limit > 0.0)
        add_line(p, "limit", y_of(&g, g.limit));
    for (unsigned s = 0; s < series; s++)
        add_series(p, &g, s);
    PUT(p, "</svg></div>\n<p>");
    for (unsigned s = 0; s < series; s++) {
        PUT(p, "<span class=\"key s%u\"><i></i>", s % QC_HTML_SERIES);
        if (g.by_m)
            PUT(p, "M = %" PRIu64, p->r->m[s]);
        else
            qc_html_escape(p->out, p->names[s]);
        PUT(p, "</span>\n");
    }
    PUT(p, "</p>\n");
}

/* ---- words and numbers ---------------------------------------------------------------------- */

static void add_summary(page *p)
{
    const qc_validate_report *r = p->r;
    const qc_validate_layer *worst = qc_validate_worst(r);
    char seconds[QC_SIZE_TEXT_BYTES];
    qc_html_put(p->out, "<h1>", r->out, " against ");
    qc_html_escape(p->out, r->model);
    if (r->failure_count)
        PUT(p, ": <span class=\"no\">%zu not good enough</span>", r->failure_count);
    else if (r->baseline || r->max_error > 0.0)
        PUT(p, ": <span class=\"yes\">passed</span>");
    PUT(p, "</h1>\n<p>%zu of %zu quantized layers were measured on ", r->measured, r->quantized);
    qc_html_escape(p->out, r->device);
    PUT(p, " in %s; %" PRIu64 " rows of ", qc_text_seconds(seconds, r->seconds), r->rows);
    if (r->activations)
        qc_html_put(p->out, "activations captured in ", r->activations, ".");
    else
        PUT(p, "random normal activations, seed %" PRIu64 ".", r->seed);
    if (worst) {
        qc_html_put(p->out, " Largest output error: ", worst->pair->name, "");
        PUT(p, ", %.4g%%.", worst->output_error * 100.0);
    }
    PUT(p, "</p>\n");
    if (r->left_out)
        qc_html_put(p->out, "<p>", r->left_out, "</p>\n");
}

static void add_item(page *p, const char *name, const char *why)
{
    qc_html_put(p->out, "<li>", name, ": ");
    qc_html_put(p->out, "", why, "</li>\n");
}

static void add_lists(page *p)
{
    const qc_validate_report *r = p->r;
    size_t others = 0;
    for (size_t i = 0; i < r->failure_count; i++) {
        if (i == 0)
            PUT(p, "<h2 class=\"no\">Not good enough</h2>\n<ul>\n");
        add_item(p, r->failures[i].name, r->failures[i].why);
    }
    if (r->failure_count)
        PUT(p, "</ul>\n");
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        const char *why = l->why_not ? l->why_not : l->note;
        if (!why)
            continue;
        if (others++ == 0)
            PUT(p, "<h2>Measured another way, or not compared</h2>\n<ul>\n");
        add_item(p, l->pair->name, why);
    }
    if (others)
        PUT(p, "</ul>\n");
}

/* Writes a cell. It is empty if the value was not measured or is not a number. */
static void add_cell(page *p, double v, const char *unit)
{
    if (isfinite(v))
        PUT(p, "<td>%.3g%s</td>", v, unit);
    else
        PUT(p, "<td></td>");
}

static void add_row(page *p, const qc_validate_layer *l)
{
    char shape[QC_SHAPE_TEXT_BYTES], scheme[QC_SCHEME_TEXT_BYTES];
    const qc_validate_pair *pair = l->pair;
    PUT(p, "<tr><td%s>", l->failure ? " class=\"no\"" : "");
    qc_html_escape(p->out, pair->name);
    PUT(p, "</td><td>%s</td><td>%s</td>",
        qc_scheme_text(scheme, pair->stored->name, qc_stored_block(pair->stored)),
        qc_text_shape(shape, pair->stored->dims, pair->stored->ndim));
    add_cell(p, l->weight_error * 100.0, "%");
    add_cell(p, qc_validate_sqnr(l->weight_error), "");
    add_cell(p, l->weight_max, "");
    PUT(p, "<td>%" PRIu64 ", %" PRIu64 "</td>", l->max_row, l->max_col);
    add_cell(p, l->output_error * 100.0, "%");
    add_cell(p, l->kernel_error * 100.0, "%");
    for (unsigned m = 0; m < p->r->m_count; m++)
        add_cell(p, p->r->timed_on_cpu ? milliseconds(l, m) : speedup(l, m), "");
    PUT(p, "</tr>\n");
}

static void add_table(page *p)
{
    PUT(p, "<h2>Layers</h2>\n<table>\n<tr><th>layer</th><th>scheme</th><th>shape</th>"
           "<th>weight error</th><th>SQNR, dB</th><th>largest</th><th>at row, column</th>"
           "<th>output error</th><th>kernel error</th>");
    for (unsigned m = 0; m < p->r->m_count; m++)
        PUT(p, "<th>%s, M = %" PRIu64 "</th>", p->r->timed_on_cpu ? "ms" : "fp16 / ours",
            p->r->m[m]);
    PUT(p, "</tr>\n");
    for (size_t i = 0; i < p->count; i++)
        add_row(p, p->layers[i]);
    qc_html_table_end(p->out);
}

qc_status qc_validate_html(const qc_validate_report *r, qc_arena *arena, qc_strbuf *out,
                           qc_error *err)
{
    const plot plots[] = {
        {.title = "Output error",
         .note = "How far the outputs of a layer are from those of the 16-bit weights: relative, "
                 "over all outputs.",
         .error = offsetof(qc_validate_layer, output_error),
         .percent = 1,
         .log = 1,
         .limit = r->max_error},
        {.title = "Weight error",
         .note = "How far the weights are from those of the model: relative, over all weights "
                 "(Frobenius norms).",
         .error = offsetof(qc_validate_layer, weight_error),
         .percent = 1,
         .log = 1},
        {.title = "Error of the kernel itself",
         .note =
             "How far the kernel's result is from sums in double of the same quantized weights.",
         .error = offsetof(qc_validate_layer, kernel_error),
         .percent = 1,
         .log = 1},
        {.title = "Speed-up over fp16",
         .note = "The time of cuBLAS with the 16-bit weights over the time with the quantized "
                 "ones, by the rows of activations that are multiplied at once.",
         .by_m = 1,
         .limit = 1.0},
        {.title = "Share of the roof",
         .note = r->timed_on_cpu
                     ? "The time of reading codes and scales at the rate at which this CPU's "
                       "threads read memory, over the time that was taken, by the rows of "
                       "activations that are multiplied at once."
                     : "The least time that this GPU's memory and tensor cores, as measured, would "
                       "need, over the time that was taken.",
         .by_m = 1,
         .roof = 1,
         .percent = 1},
    };
    page p = {.r = r, .out = out};
    QC_TRY(gather(&p, arena, err));
    qc_html_begin(out, "qconv validate", page_style);
    add_summary(&p);
    add_lists(&p);
    for (size_t i = 0; i < sizeof plots / sizeof *plots; i++)
        add_plot(&p, plots[i]);
    add_table(&p);
    qc_html_end(out);
    return qc_strbuf_status(out, err);
}

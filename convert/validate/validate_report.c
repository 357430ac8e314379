#include "convert/validate/validate_report.h"

#include "base/text.h"
#include "convert/model/recipe_stored.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/json_rows.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define TIMES_SHOWN (QC_TABLE_MAX_COLUMNS - 1) /* columns of a table, without the name's */

/* Returns the measured layer with the largest output error (NaN counts as the largest), or NULL if
 * none was measured. */
static const qc_validate_layer *worst_layer(const qc_validate_report *r)
{
    const qc_validate_layer *worst = NULL;
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (!l->why_not &&
            (!worst || (!isnan(worst->output_error) && !(l->output_error <= worst->output_error))))
            worst = l;
    }
    return worst;
}

/* ---- text ----------------------------------------------------------------------------------- */

/* Writes a share as a percentage with three digits: "9.12%", "0.0213%". */
static void put_percent(qc_table *t, double share)
{
    double p = share * 100.0;
    if (!isfinite(p))
        qc_table_put(t, "not finite");
    else if (p > 0.0 && p < 0.001)
        qc_table_putf(t, "%.2e%%", p);
    else
        qc_table_putf(t, "%.*f%%", p >= 10 ? 1 : p >= 1 ? 2 : p >= 0.1 ? 3 : 4, p);
}

static void put_errors(const qc_validate_report *r, qc_arena *arena, qc_strbuf *out)
{
    qc_table t;
    qc_table_begin(&t, arena,
                   "layer|scheme|>shape|>weight error|>SQNR|>largest|>output error|>kernel error");
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        const qc_validate_pair *p = l->pair;
        char shape[QC_SHAPE_TEXT_BYTES], scheme[QC_SCHEME_TEXT_BYTES];
        if (l->why_not)
            continue;
        qc_table_put(&t, p->name);
        qc_table_put(&t, qc_scheme_text(scheme, p->stored->name, qc_stored_block(p->stored)));
        qc_table_put(&t, qc_text_shape(shape, p->stored->dims, p->stored->ndim));
        put_percent(&t, l->weight_error);
        if (isfinite(l->weight_error) && l->weight_error != 0.0)
            qc_table_putf(&t, "%.2f dB", qc_validate_sqnr(l->weight_error));
        else
            qc_table_put(&t, l->weight_error == 0.0 ? "exact" : "not finite");
        qc_table_putf(&t, isfinite(l->weight_max) ? "%.3g" : "not finite", l->weight_max);
        put_percent(&t, l->output_error);
        put_percent(&t, l->kernel_error);
    }
    qc_table_print(&t, 0, out);
}

static void put_m_columns(const qc_validate_report *r, unsigned shown, qc_table *t)
{
    for (unsigned i = 0; i < shown; i++) {
        char title[32];
        (void)snprintf(title, sizeof title, ">M=%" PRIu64, r->m[i]);
        qc_table_columns(t, title);
    }
}

/* Adds up one batch size over the layers. floor: the least time, NaN where it is unknown. */
static double cpu_seconds(const qc_validate_report *r, unsigned k, double *floor)
{
    double seconds = 0.0;
    *floor = 0.0;
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (k >= l->time_count)
            continue;
        seconds += l->times[k].seconds;
        *floor += l->times[k].seconds * l->times[k].roof;
    }
    return seconds;
}

static void put_cpu_times(const qc_validate_report *r, unsigned shown, qc_arena *arena,
                          qc_strbuf *out)
{
    qc_table t;
    char rate[QC_SIZE_TEXT_BYTES];
    double floor = 0.0;
    qc_strbuf_putf(out,
                   "\nproducts of these layers, one after the other on %u CPU thread%s, by the "
                   "rows of activations that are multiplied at once\n",
                   r->threads, qc_plural(r->threads));
    qc_table_begin(&t, arena, "");
    put_m_columns(r, shown, &t);
    qc_table_put(&t, "milliseconds");
    for (unsigned k = 0; k < shown; k++)
        qc_table_putf(&t, "%.3g", cpu_seconds(r, k, &floor) * 1e3);
    if (isfinite(r->read_rate)) {
        qc_table_putf(&t, "of the rate of reading, %s",
                      qc_text_rate(rate, (uint64_t)r->read_rate, 1.0));
        for (unsigned k = 0; k < shown; k++) {
            const double seconds = cpu_seconds(r, k, &floor);
            qc_table_putf(&t, "%.0f%%", 100.0 * floor / seconds);
        }
    }
    qc_table_print(&t, 0, out);
}

static void put_speedups(const qc_validate_report *r, unsigned shown, qc_arena *arena,
                         qc_strbuf *out)
{
    qc_table t;
    qc_strbuf_puts(
        out, "\nspeed-up over fp16, by the rows of activations that are multiplied at once\n");
    qc_table_begin(&t, arena, "layer");
    put_m_columns(r, shown, &t);
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (l->why_not)
            continue;
        qc_table_put(&t, l->pair->name);
        for (unsigned k = 0; k < shown; k++) {
            if (k < l->time_count && l->times[k].seconds > 0.0 && l->times[k].fp16_seconds > 0.0)
                qc_table_putf(&t, "%.2fx", qc_validate_speedup(&l->times[k]));
            else
                qc_table_put(&t, NULL);
        }
    }
    qc_table_print(&t, 0, out);
}

qc_status qc_validate_text(const qc_validate_report *r, qc_arena *arena, qc_strbuf *out,
                           qc_error *err)
{
    const qc_validate_layer *worst = worst_layer(r);
    char text[128];
    const unsigned shown = r->m_count < TIMES_SHOWN ? r->m_count : TIMES_SHOWN;
    put_errors(r, arena, out);
    if (shown > 0 && r->timed_on_cpu)
        put_cpu_times(r, shown, arena, out);
    else if (shown > 0)
        put_speedups(r, shown, arena, out);
    if (shown < r->m_count)
        qc_strbuf_putf(out, "(and %u more sizes in --json)\n", r->m_count - shown);
    qc_strbuf_putf(out, "\n%zu of %zu quantized layers were measured on %s in %s", r->measured,
                   r->quantized, r->device, qc_text_seconds(text, r->seconds));
    if (r->sample && r->measured < r->comparable)
        qc_strbuf_puts(out, ", evenly spread");
    qc_strbuf_putf(out, "; %" PRIu64 " rows of ", r->rows);
    if (r->activations)
        qc_strbuf_puts(out, "captured activations\n");
    else
        qc_strbuf_putf(out, "random normal activations, seed %" PRIu64 "\n", r->seed);
    if (worst) {
        (void)snprintf(text, sizeof text, isfinite(worst->output_error) ? "%.4g%%" : "not finite",
                       worst->output_error * 100.0);
        qc_strbuf_show(out, "largest output error: %s: %s\n", worst->pair->name, text);
    }
    if (r->baseline) {
        (void)snprintf(text, sizeof text, "%zu of %zu measured layers are in it", r->in_baseline,
                       r->measured);
        qc_strbuf_show(out, "baseline %s: %s\n", r->baseline, text);
    }
    if (r->left_out)
        qc_strbuf_putf(out, "%s\n", r->left_out);
    for (size_t i = 0; i < r->layer_count; i++)
        if (r->layers[i].note)
            qc_strbuf_show(out, "%s: %s\n", r->layers[i].pair->name, r->layers[i].note);
    for (size_t i = 0; i < r->layer_count; i++)
        if (r->layers[i].why_not)
            qc_strbuf_show(out, "not compared: %s: %s\n", r->layers[i].pair->name,
                           r->layers[i].why_not);
    for (size_t i = 0; i < r->failure_count; i++)
        qc_strbuf_show(out, "FAILED %s: %s\n", r->failures[i].name, r->failures[i].why);
    return qc_strbuf_status(out, err);
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static const qc_json_row failure_rows[] = {
    QC_JSON_ROW(qc_validate_failure, name, TEXT, 0),
    QC_JSON_ROW(qc_validate_failure, why, TEXT, 0),
    {NULL},
};

static void put_layer(qc_json_writer *w, const qc_validate_layer *l)
{
    const qc_validate_pair *p = l->pair;
    qc_json_begin_object(w, NULL);
    qc_json_put_text(w, "name", p->name);
    qc_json_put_text(w, "source", p->source);
    qc_json_put_text(w, "scheme", p->stored->name);
    qc_json_put_u64s(w, "shape", p->stored->dims, p->stored->ndim);
    qc_json_put_u64_if(w, "block_size", qc_stored_block(p->stored) > 0, qc_stored_block(p->stored));
    qc_json_put_double(w, "bits_per_weight",
                       (double)p->bytes * 8.0 / ((double)p->rows * (double)p->cols));
    qc_json_put_text(w, "dtype", qc_dtype_name(l->x_dtype));
    qc_json_put_text(w, "device", l->device);
    qc_json_put_text(w, "note", l->note);
    qc_json_put_number(w, "weight_error", l->weight_error);
    qc_json_put_number(w, "sqnr_db", qc_validate_sqnr(l->weight_error));
    qc_json_put_number(w, "largest_error", l->weight_max);
    qc_json_put_u64s(w, "largest_at", (const uint64_t[2]){l->max_row, l->max_col}, 2);
    qc_json_put_number(w, "output_error", l->output_error);
    qc_json_put_number(w, "largest_output_error", l->output_max);
    qc_json_put_number(w, "kernel_error", l->kernel_error);
    qc_json_put_number(w, "largest_kernel_error", l->kernel_max);
    qc_json_put_text(w, "failure", l->failure);
    qc_json_begin_list(w, "times");
    for (unsigned i = 0; i < l->time_count; i++) {
        const qc_validate_time *t = &l->times[i];
        qc_json_begin_row(w, NULL);
        qc_json_put_u64(w, "m", t->m);
        qc_json_put_text(w, "kernel", t->path);
        qc_json_put_number(w, "seconds", t->seconds);
        qc_json_put_number(w, "fp16_seconds",
                           t->fp16_seconds > 0.0 ? t->fp16_seconds : (double)NAN);
        qc_json_put_number(w, "speedup", qc_validate_speedup(t));
        qc_json_put_number(w, "roof", t->roof);
        qc_json_put_number(w, "output_error", t->output_error);
        qc_json_put_number(w, "kernel_error", t->kernel_error);
        qc_json_end(w);
    }
    qc_json_end(w);
    qc_json_end(w);
}

qc_status qc_validate_json(const qc_validate_report *r, qc_strbuf *out, qc_error *err)
{
    const qc_validate_layer *worst = worst_layer(r);
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "command", "validate");
    qc_json_put_path(&w, "path", r->out);
    qc_json_put_path(&w, "against", r->model);
    qc_json_put_bool(&w, "ok", r->failure_count == 0);
    qc_json_put_u64(&w, "quantized_layers", r->quantized);
    qc_json_put_u64(&w, "measured_layers", r->measured);
    qc_json_put_u64_if(&w, "sample", r->sample > 0, r->sample);
    qc_json_put_text(&w, "activations", r->activations ? r->activations : "normal");
    qc_json_put_u64(&w, "rows", r->rows);
    qc_json_put_u64(&w, "seed", r->seed);
    qc_json_put_text(&w, "device", r->device);
    qc_json_put_text(&w, "left_out", r->left_out);
    qc_json_put_u64(&w, "threads", r->threads);
    qc_json_put_text(&w, "isa", r->isa);
    qc_json_put_number(&w, "read_bytes_per_second", r->read_rate);
    qc_json_put_number(&w, "max_error", r->max_error > 0.0 ? r->max_error : (double)NAN);
    qc_json_put_text(&w, "baseline", r->baseline);
    qc_json_put_u64_if(&w, "baseline_layers", r->baseline != NULL, r->in_baseline);
    qc_json_put_number(&w, "tolerance", r->baseline ? r->tolerance : (double)NAN);
    if (qc_json_begin_object_if(&w, "worst", worst != NULL)) {
        qc_json_put_text(&w, "name", worst->pair->name);
        qc_json_put_number(&w, "output_error", worst->output_error);
        qc_json_end(&w);
    }
    qc_json_put_list(&w, "failed", failure_rows, 0, r->failures, r->failure_count,
                     sizeof *r->failures);
    qc_json_begin_list(&w, "not_compared");
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (l->why_not)
            qc_json_put_row(&w, NULL, failure_rows, 0,
                            &(qc_validate_failure){l->pair->name, l->why_not});
    }
    qc_json_end(&w);
    qc_json_begin_list(&w, "layers");
    for (size_t i = 0; i < r->layer_count; i++)
        if (!r->layers[i].why_not)
            put_layer(&w, &r->layers[i]);
    qc_json_end(&w);
    qc_json_put_double(&w, "seconds", r->seconds);
    return qc_json_end_text(&w);
}

#include "convert/validate/validate_report.h"

#include "convert/term/console.h"
#include "convert/term/json_members.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define TIMES_SHOWN (QC_TABLE_MAX_COLUMNS - 1) /* columns of a table, without the name's */

const qc_validate_layer *qc_validate_worst(const qc_validate_report *r)
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
static qc_status percent_cell(qc_table *t, double share, qc_error *err)
{
    double p = share * 100.0;
    if (!isfinite(p))
        return qc_table_cell(t, "not finite", err);
    if (p > 0.0 && p < 0.001)
        return qc_table_cellf(t, err, "%.2e%%", p);
    return qc_table_cellf(t, err, "%.*f%%", p >= 10 ? 1 : p >= 1 ? 2 : p >= 0.1 ? 3 : 4, p);
}

static qc_status sqnr_cell(qc_table *t, double weight_error, qc_error *err)
{
    if (!isfinite(weight_error))
        return qc_table_cell(t, "not finite", err);
    if (weight_error == 0.0)
        return qc_table_cell(t, "exact", err);
    return qc_table_cellf(t, err, "%.2f dB", qc_validate_sqnr(weight_error));
}

static qc_status add_errors(const qc_validate_report *r, qc_arena *arena, qc_strbuf *out,
                            qc_error *err)
{
    static const char *const titles[] = {"layer", "scheme",  "shape",        "weight error",
                                         "SQNR",  "largest", "output error", "kernel error"};
    qc_table t;
    qc_table_init(&t, arena);
    for (size_t i = 0; i < sizeof titles / sizeof *titles; i++)
        qc_table_column(&t, titles[i], i < 2 ? QC_ALIGN_LEFT : QC_ALIGN_RIGHT);
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        const qc_validate_pair *p = l->pair;
        char shape[QC_SHAPE_TEXT_BYTES];
        if (l->why_not)
            continue;
        QC_TRY(qc_table_cell(&t, p->name, err));
        QC_TRY(qc_table_cell(&t, qc_validate_scheme(p), err));
        QC_TRY(qc_table_cell(&t, qc_text_shape(shape, p->stored->dims, p->stored->ndim), err));
        QC_TRY(percent_cell(&t, l->weight_error, err));
        QC_TRY(sqnr_cell(&t, l->weight_error, err));
        if (isfinite(l->weight_max))
            QC_TRY(qc_table_cellf(&t, err, "%.3g", l->weight_max));
        else
            QC_TRY(qc_table_cell(&t, "not finite", err));
        QC_TRY(percent_cell(&t, l->output_error, err));
        QC_TRY(percent_cell(&t, l->kernel_error, err));
    }
    return qc_table_render(&t, 0, out, err);
}

static qc_status add_times(const qc_validate_report *r, qc_arena *arena, qc_strbuf *out,
                           qc_error *err)
{
    qc_table t;
    unsigned shown = r->m_count < TIMES_SHOWN ? r->m_count : TIMES_SHOWN;
    if (shown == 0)
        return QC_OK;
    QC_TRY(qc_strbuf_adds(out, "\nspeed-up over fp16, by rows of activations at once\n", err));
    qc_table_init(&t, arena);
    qc_table_column(&t, "layer", QC_ALIGN_LEFT);
    for (unsigned i = 0; i < shown; i++) {
        const char *title = NULL;
        QC_TRY(qc_arena_printf(arena, &title, err, "M=%" PRIu64, r->m[i]));
        qc_table_column(&t, title, QC_ALIGN_RIGHT);
    }
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (l->why_not)
            continue;
        QC_TRY(qc_table_cell(&t, l->pair->name, err));
        for (unsigned k = 0; k < shown; k++) {
            if (k < l->time_count && l->times[k].seconds > 0.0 && l->times[k].fp16_seconds > 0.0)
                QC_TRY(qc_table_cellf(&t, err, "%.2fx",
                                      l->times[k].fp16_seconds / l->times[k].seconds));
            else
                QC_TRY(qc_table_cell(&t, NULL, err));
        }
    }
    QC_TRY(qc_table_render(&t, 0, out, err));
    if (shown < r->m_count)
        QC_TRY(qc_strbuf_addf(out, err, "(and %u more sizes in --json)\n", r->m_count - shown));
    return QC_OK;
}

static qc_status add_line(qc_strbuf *out, const char *name, const char *text, qc_error *err)
{
    size_t before = out->len;
    QC_TRY(qc_strbuf_addf(out, err, "%s: %s", name, text));
    qc_console_printable(out->data + before);
    return qc_strbuf_adds(out, "\n", err);
}

static qc_status add_summary(const qc_validate_report *r, qc_strbuf *out, qc_error *err)
{
    const qc_validate_layer *worst = qc_validate_worst(r);
    char seconds[QC_SIZE_TEXT_BYTES];
    QC_TRY(qc_strbuf_addf(out, err, "\n%zu of %zu quantized layers measured on %s in %s",
                          r->measured, r->quantized, r->device,
                          qc_text_seconds(seconds, r->seconds)));
    if (r->sample && r->measured < r->comparable)
        QC_TRY(qc_strbuf_adds(out, ", evenly spread", err));
    if (r->activations)
        QC_TRY(qc_strbuf_addf(out, err, "; %" PRIu64 " rows of captured activations\n", r->rows));
    else
        QC_TRY(qc_strbuf_addf(out, err,
                              "; %" PRIu64 " rows of random normal activations, seed %" PRIu64 "\n",
                              r->rows, r->seed));
    if (worst) {
        char text[128] = "not finite";
        if (isfinite(worst->output_error))
            (void)snprintf(text, sizeof text, "%.4g%%", worst->output_error * 100.0);
        QC_TRY(qc_strbuf_adds(out, "largest output error: ", err));
        QC_TRY(add_line(out, worst->pair->name, text, err));
    }
    if (r->baseline) {
        char text[96];
        (void)snprintf(text, sizeof text, "%zu of %zu measured layers are in it", r->in_baseline,
                       r->measured);
        QC_TRY(qc_strbuf_adds(out, "baseline ", err));
        QC_TRY(add_line(out, r->baseline, text, err));
    }
    if (r->left_out)
        QC_TRY(qc_strbuf_addf(out, err, "%s\n", r->left_out));
    return QC_OK;
}

qc_status qc_validate_text(const qc_validate_report *r, qc_arena *arena, qc_strbuf *out,
                           qc_error *err)
{
    QC_TRY(add_errors(r, arena, out, err));
    QC_TRY(add_times(r, arena, out, err));
    QC_TRY(add_summary(r, out, err));
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (l->note)
            QC_TRY(add_line(out, l->pair->name, l->note, err));
    }
    for (size_t i = 0; i < r->layer_count; i++) {
        const qc_validate_layer *l = &r->layers[i];
        if (l->why_not) {
            QC_TRY(qc_strbuf_adds(out, "not compared: ", err));
            QC_TRY(add_line(out, l->pair->name, l->why_not, err));
        }
    }
    for (size_t i = 0; i < r->failure_count; i++) {
        QC_TRY(qc_strbuf_adds(out, "FAILED ", err));
        QC_TRY(add_line(out, r->failures[i].name, r->failures[i].why, err));
    }
    return QC_OK;
}

/* ---- JSON ----------------------------------------------------------------------------------- */

static void put_named(qc_json_writer *w, const char *name, const char *why)
{
    qc_jw_compact_next(w);
    qc_jw_begin_object(w);
    qc_jm_string(w, "name", name);
    qc_jm_string(w, "why", why);
    qc_jw_end_object(w);
}

static void put_time(qc_json_writer *w, const qc_validate_time *t)
{
    qc_jw_compact_next(w);
    qc_jw_begin_object(w);
    qc_jm_u64(w, "m", t->m);
    qc_jm_string(w, "kernel", t->path);
    qc_jm_number(w, "seconds", t->seconds);
    qc_jm_number(w, "fp16_seconds", t->fp16_seconds > 0.0 ? t->fp16_seconds : (double)NAN);
    qc_jm_number(w, "speedup", t->fp16_seconds > 0.0 ? t->fp16_seconds / t->seconds : (double)NAN);
    qc_jm_number(w, "roof", t->roof);
    qc_jm_number(w, "output_error", t->output_error);
    qc_jm_number(w, "kernel_error", t->kernel_error);
    qc_jw_end_object(w);
}

static void put_layer(qc_json_writer *w, const qc_validate_layer *l)
{
    const qc_validate_pair *p = l->pair;
    qc_jw_begin_object(w);
    qc_jm_string(w, "name", p->name);
    qc_jm_string(w, "source", p->source);
    qc_jm_string(w, "scheme", qc_validate_scheme(p));
    qc_jm_u64s(w, "shape", p->stored->dims, p->stored->ndim);
    qc_jm_u64_if(w, "block_size", p->stored->stored_as != QC_SCHEME_INT8_ROWS,
                 p->stored->block_elems);
    qc_jm_double(w, "bits_per_weight",
                 (double)p->bytes * 8.0 / ((double)p->rows * (double)p->cols));
    qc_jm_string(w, "dtype", qc_dtype_name(l->x_dtype));
    qc_jm_string(w, "device", l->device);
    qc_jm_string(w, "note", l->note);
    qc_jm_number(w, "weight_error", l->weight_error);
    qc_jm_number(w, "sqnr_db", qc_validate_sqnr(l->weight_error));
    qc_jm_number(w, "largest_error", l->weight_max);
    qc_jm_u64s(w, "largest_at", (const uint64_t[2]){l->max_row, l->max_col}, 2);
    qc_jm_number(w, "output_error", l->output_error);
    qc_jm_number(w, "largest_output_error", l->output_max);
    qc_jm_number(w, "kernel_error", l->kernel_error);
    qc_jm_number(w, "largest_kernel_error", l->kernel_max);
    qc_jm_string(w, "failure", l->failure);
    qc_jw_key(w, "times");
    qc_jw_begin_array(w);
    for (unsigned i = 0; i < l->time_count; i++)
        put_time(w, &l->times[i]);
    qc_jw_end_array(w);
    qc_jw_end_object(w);
}

static void put_lists(qc_json_writer *w, const qc_validate_report *r)
{
    qc_jw_key(w, "failed");
    qc_jw_begin_array(w);
    for (size_t i = 0; i < r->failure_count; i++)
        put_named(w, r->failures[i].name, r->failures[i].why);
    qc_jw_end_array(w);
    qc_jw_key(w, "not_compared");
    qc_jw_begin_array(w);
    for (size_t i = 0; i < r->layer_count; i++)
        if (r->layers[i].why_not)
            put_named(w, r->layers[i].pair->name, r->layers[i].why_not);
    qc_jw_end_array(w);
    qc_jw_key(w, "layers");
    qc_jw_begin_array(w);
    for (size_t i = 0; i < r->layer_count; i++)
        if (!r->layers[i].why_not)
            put_layer(w, &r->layers[i]);
    qc_jw_end_array(w);
}

qc_status qc_validate_json(const qc_validate_report *r, qc_strbuf *out, qc_error *err)
{
    const qc_validate_layer *worst = qc_validate_worst(r);
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "validate");
    qc_jm_path(&w, "path", r->out);
    qc_jm_path(&w, "against", r->model);
    qc_jm_bool(&w, "ok", r->failure_count == 0);
    qc_jm_u64(&w, "quantized_layers", r->quantized);
    qc_jm_u64(&w, "measured_layers", r->measured);
    qc_jm_u64_if(&w, "sample", r->sample > 0, r->sample);
    qc_jm_string(&w, "activations", r->activations ? r->activations : "normal");
    qc_jm_u64(&w, "rows", r->rows);
    qc_jm_u64(&w, "seed", r->seed);
    qc_jm_string(&w, "device", r->device);
    qc_jm_string(&w, "left_out", r->left_out);
    qc_jm_u64(&w, "threads", r->threads);
    qc_jm_string(&w, "isa", r->isa);
    qc_jm_number(&w, "max_error", r->max_error > 0.0 ? r->max_error : (double)NAN);
    qc_jm_string(&w, "baseline", r->baseline);
    qc_jm_u64_if(&w, "baseline_layers", r->baseline != NULL, r->in_baseline);
    qc_jm_number(&w, "tolerance", r->baseline ? r->tolerance : (double)NAN);
    qc_jw_key(&w, "worst");
    if (worst) {
        qc_jw_begin_object(&w);
        qc_jm_string(&w, "name", worst->pair->name);
        qc_jm_number(&w, "output_error", worst->output_error);
        qc_jw_end_object(&w);
    } else {
        qc_jw_null(&w);
    }
    put_lists(&w, r);
    qc_jm_double(&w, "seconds", r->seconds);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

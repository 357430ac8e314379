#include "convert/verify/against_report.h"

#include "base/text.h"
#include "convert/term/json_members.h"

#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define WORST_ROWS 10u
#define TEXT_MAX   ((size_t)1 << 30)
/* The table per kind has at most this many rows, one for each scheme and each cast. */
#define KINDS_MOST 32u

static double decibels(double error)
{
    return -20.0 * log10(error);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void put_row(qc_json_writer *w, const qc_against_row *r)
{
    qc_jw_begin_object(w);
    qc_jm_string(w, "name", r->name);
    qc_jm_string(w, "source", r->source);
    qc_jm_string(w, "kind", qc_against_kind_name(r->kind));
    qc_jm_string(w, "scheme", r->scheme);
    qc_jm_string(w, "dtype", qc_dtype_name(r->dtype));
    qc_jm_string(w, "source_dtype", r->source ? qc_dtype_name(r->source_dtype) : NULL);
    qc_jm_u64s(w, "shape", r->dims, r->ndim);
    qc_jm_u64_if(w, "block_size", r->block_elems > 0, r->block_elems);
    qc_jm_u64(w, "bytes", r->bytes);
    qc_jm_u64(w, "source_bytes", r->source_bytes);
    if (r->kind == QC_AGAINST_QUANTIZED && r->measured) {
        qc_jm_number(w, "error", r->error);
        qc_jm_number(w, "expected", r->expected);
        qc_jm_number(w, "ratio", r->ratio);
        qc_jm_number(w, "sqnr_db", decibels(r->error));
        qc_jm_number(w, "largest_error", r->max_error);
        qc_jm_u64s(w, "largest_at", (const uint64_t[2]){r->max_row, r->max_col}, 2);
        qc_jm_u64(w, "clipped", r->clipped);
        qc_jm_u64(w, "misplaced", r->misplaced);
        qc_jm_u64(w, "scales", r->scales);
        qc_jm_u64(w, "searched", r->searched);
        qc_jm_bool(w, "calibrated", r->calibrated);
    }
    qc_jm_string(w, "fault", r->fault);
    qc_jm_string(w, "fits", r->fits);
    qc_jw_end_object(w);
}

static qc_status write_json(qc_strbuf *out, const qc_call *call, const qc_against_result *r,
                            double seconds, qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "verified");
    qc_jm_path(&w, "path", call->model);
    qc_jm_path(&w, "against", call->against);
    qc_jm_bool(&w, "ok", r->faults == 0);
    qc_jm_u64(&w, "problems", r->faults);
    if (qc_jm_begin_object_if(&w, "first_problem", r->faults > 0)) {
        qc_jm_string(&w, "what", r->first_what);
        qc_jm_string(&w, "why", r->first_why);
        qc_jw_end_object(&w);
    }
    qc_jm_bool(&w, "manifest", r->has_manifest);
    qc_jm_u64(&w, "tensors", r->count);
    qc_jm_u64(&w, "equal", r->equal);
    qc_jm_u64(&w, "cast", r->cast);
    qc_jm_u64(&w, "quantized", r->quantized);
    qc_jm_u64(&w, "source_digests", r->digests);
    qc_jm_u64(&w, "output_bytes", r->output_bytes);
    qc_jm_u64(&w, "model_bytes", r->model_bytes);
    qc_jm_begin_array(&w, "missing");
    for (size_t i = 0; i < r->missing_count; i++) {
        qc_jm_begin_row(&w);
        qc_jm_string(&w, "name", r->missing[i].name);
        qc_jm_string(&w, "explained", r->missing[i].why);
        qc_jw_end_object(&w);
    }
    qc_jw_end_array(&w);
    qc_jm_begin_array(&w, "rows");
    for (size_t i = 0; i < r->count; i++)
        put_row(&w, &r->rows[i]);
    qc_jw_end_array(&w);
    qc_jm_number(&w, "seconds", seconds);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void add_columns(qc_table *t, qc_arena *arena)
{
    qc_table_init(t, arena);
    qc_table_column(t, "tensor", QC_ALIGN_LEFT);
    qc_table_column(t, "is", QC_ALIGN_LEFT);
    qc_table_column(t, "error", QC_ALIGN_RIGHT);
    qc_table_column(t, "expected", QC_ALIGN_RIGHT);
    qc_table_column(t, "ratio", QC_ALIGN_RIGHT);
    qc_table_column(t, "SQNR dB", QC_ALIGN_RIGHT);
    qc_table_column(t, "largest", QC_ALIGN_RIGHT);
    qc_table_column(t, "at", QC_ALIGN_RIGHT);
    qc_table_column(t, "clipped", QC_ALIGN_RIGHT);
    qc_table_column(t, "fault", QC_ALIGN_LEFT);
}

static const char *scheme_text(char out[64], const qc_against_row *r)
{
    if (r->block_elems)
        (void)snprintf(out, 64, "%s %" PRIu64, r->scheme, r->block_elems);
    else if (r->kind == QC_AGAINST_CAST)
        (void)snprintf(out, 64, "%s to %s", r->scheme, qc_dtype_name(r->dtype));
    else
        (void)snprintf(out, 64, "%s", r->kind == QC_AGAINST_EQUAL ? "equal" : r->scheme);
    return out;
}

static qc_status add_row(qc_table *t, const qc_against_row *r, qc_error *err)
{
    char scheme[64];
    QC_TRY(qc_table_cell(t, r->name, err));
    QC_TRY(qc_table_cell(t, scheme_text(scheme, r), err));
    if (r->kind != QC_AGAINST_QUANTIZED || !r->measured) {
        for (int i = 0; i < 7; i++)
            QC_TRY(qc_table_cell(t, "", err));
    } else {
        QC_TRY(qc_table_cellf(t, err, "%.5f", r->error));
        QC_TRY(qc_table_cellf(t, err, "%.5f", r->expected));
        QC_TRY(qc_table_cellf(t, err, "%.4g", r->ratio));
        QC_TRY(qc_table_cellf(t, err, "%.2f", decibels(r->error)));
        QC_TRY(qc_table_cellf(t, err, "%.3g", r->max_error));
        QC_TRY(qc_table_cellf(t, err, "%" PRIu64 ", %" PRIu64, r->max_row, r->max_col));
        QC_TRY(qc_table_cellf(t, err, "%.4f%%",
                              r->elems ? 100.0 * (double)r->clipped / (double)r->elems : 0.0));
    }
    return qc_table_cell(t, r->fault ? r->fault : "", err);
}

typedef struct {
    char scheme[64];
    uint64_t tensors, elems, measured, clipped, faults;
    double least, most, worst_ratio;
    int quantized;
} kind_sums;

static qc_status write_kinds(qc_strbuf *out, qc_arena *arena, const qc_against_result *r,
                             qc_error *err)
{
    kind_sums kinds[KINDS_MOST];
    unsigned count = 0;
    qc_table t;
    for (size_t i = 0; i < r->count; i++) {
        const qc_against_row *row = &r->rows[i];
        char scheme[64];
        unsigned k = 0;
        scheme_text(scheme, row);
        while (k < count && strcmp(kinds[k].scheme, scheme) != 0)
            k++;
        if (k == KINDS_MOST)
            continue;
        if (k == count) {
            memset(&kinds[k], 0, sizeof kinds[k]);
            memcpy(kinds[k].scheme, scheme, sizeof scheme);
            kinds[k].quantized = row->kind == QC_AGAINST_QUANTIZED;
            kinds[k].least = INFINITY;
            count++;
        }
        kinds[k].tensors++;
        kinds[k].elems += row->elems;
        kinds[k].clipped += row->clipped;
        kinds[k].faults += row->fault != NULL;
        kinds[k].measured += row->measured ? row->elems : 0;
        if (row->measured && row->error < kinds[k].least)
            kinds[k].least = row->error;
        if (row->error > kinds[k].most)
            kinds[k].most = row->error;
        if (row->ratio > kinds[k].worst_ratio)
            kinds[k].worst_ratio = row->ratio;
    }
    qc_table_init(&t, arena);
    qc_table_column(&t, "is", QC_ALIGN_LEFT);
    qc_table_column(&t, "tensors", QC_ALIGN_RIGHT);
    qc_table_column(&t, "weights", QC_ALIGN_RIGHT);
    qc_table_column(&t, "error", QC_ALIGN_RIGHT);
    qc_table_column(&t, "ratio up to", QC_ALIGN_RIGHT);
    qc_table_column(&t, "clipped", QC_ALIGN_RIGHT);
    qc_table_column(&t, "faults", QC_ALIGN_RIGHT);
    for (unsigned k = 0; k < count; k++) {
        char weights[QC_SIZE_TEXT_BYTES];
        QC_TRY(qc_table_cell(&t, kinds[k].scheme, err));
        QC_TRY(qc_table_cellf(&t, err, "%" PRIu64, kinds[k].tensors));
        QC_TRY(qc_table_cell(&t, qc_text_count(weights, kinds[k].elems), err));
        if (kinds[k].quantized && kinds[k].measured > 0) {
            QC_TRY(qc_table_cellf(&t, err, "%.5f to %.5f", kinds[k].least, kinds[k].most));
            QC_TRY(qc_table_cellf(&t, err, "%.4g", kinds[k].worst_ratio));
            QC_TRY(qc_table_cellf(&t, err, "%.4f%%",
                                  100.0 * (double)kinds[k].clipped / (double)kinds[k].measured));
        } else {
            for (int i = 0; i < 3; i++)
                QC_TRY(qc_table_cell(&t, "", err));
        }
        QC_TRY(qc_table_cellf(&t, err, "%" PRIu64, kinds[k].faults));
    }
    return qc_table_render(&t, 2, out, err);
}

static qc_status write_rows(qc_strbuf *out, qc_arena *arena, const qc_call *call,
                            const qc_against_result *r, qc_error *err)
{
    qc_table t;
    add_columns(&t, arena);
    if (call->verbose > 0) {
        for (size_t i = 0; i < r->count; i++)
            QC_TRY(add_row(&t, &r->rows[i], err));
        return qc_table_render(&t, 2, out, err);
    }
    const qc_against_row **rows = NULL;
    size_t n = WORST_ROWS, faulty = 0;
    for (size_t i = 0; i < r->count; i++)
        faulty += r->rows[i].fault != NULL;
    QC_TRY(qc_against_worst(&rows, &n, arena, r, err));
    for (size_t i = 0; i < n; i++)
        QC_TRY(add_row(&t, rows[i], err));
    /* Tensors with faults come first, whether they are quantized or not. */
    if (faulty > 0 && n <= faulty)
        qc_strbuf_putf(out, "%zu of %zu tensor%s with faults:\n", n, faulty,
                       faulty == 1 ? "" : "s");
    else if (faulty > 0)
        qc_strbuf_putf(out, "%zu tensor%s with faults, then those farthest from MODEL:\n", faulty,
                       faulty == 1 ? "" : "s");
    else if (n > 0)
        qc_strbuf_putf(out, "The %zu that are farthest from MODEL, of %" PRIu64 " quantized:\n", n,
                       r->quantized);
    return qc_table_render(&t, 2, out, err);
}

static qc_status write_missing(qc_strbuf *out, const qc_call *call, const qc_against_result *r,
                               qc_error *err)
{
    size_t explained = 0, unexplained = 0;
    for (size_t i = 0; i < r->missing_count; i++) {
        const qc_against_missing *m = &r->missing[i];
        explained += m->why != NULL;
        unexplained += m->why == NULL;
        if (call->verbose > 0 || (!m->why && unexplained <= QC_CONSOLE_LINES))
            qc_strbuf_putf(out, "not in OUT: %s%s%s\n", m->name, m->why ? ": " : "",
                           m->why ? m->why : "");
    }
    if (call->verbose == 0)
        QC_TRY(qc_console_add_more(out, unexplained, err));
    if (explained > 0 && call->verbose == 0)
        return qc_strbuf_addf(out, err, "not in OUT, as it should be: %zu tensor%s of MODEL\n",
                              explained, explained == 1 ? "" : "s");
    return QC_OK;
}

static qc_status write_text(qc_strbuf *out, const qc_call *call, const qc_against_result *r,
                            double seconds, qc_error *err)
{
    char bytes[QC_SIZE_TEXT_BYTES], rate[QC_SIZE_TEXT_BYTES];
    uint64_t read = r->output_bytes + r->model_bytes;
    QC_TRY(write_kinds(out, call->arena, r, err));
    QC_TRY(write_rows(out, call->arena, call, r, err));
    QC_TRY(write_missing(out, call, r, err));
    if (r->faults)
        return qc_strbuf_addf(out, err, "%s: NOT %s: %" PRIu64 " fault%s\n", call->model,
                              call->against, r->faults, r->faults == 1 ? "" : "s");
    return qc_strbuf_addf(out, err,
                          "%s: is %s: %zu tensor%s, %" PRIu64 " quantized, %" PRIu64
                          " cast, %" PRIu64 " equal; %s of both in %.2f s, %s\n",
                          call->model, call->against, r->count, qc_plural(r->count), r->quantized,
                          r->cast, r->equal, qc_text_bytes(bytes, read), seconds,
                          qc_text_rate(rate, read, seconds));
}

qc_status qc_against_report(const qc_call *call, const qc_against_result *r, double seconds,
                            qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, TEXT_MAX);
    qc_status st = QC_OK;
    if (call->json)
        st = write_json(&out, call, r, seconds, err);
    else if (!call->quiet)
        st = write_text(&out, call, r, seconds, err);
    if (st == QC_OK && !call->json && out.len > 0) {
        /* Names come from files. Whatever is in them, each stays on its line. */
        for (char *line = out.data, *end; *line; line = end + 1) {
            end = strchr(line, '\n');
            if (!end)
                break;
            *end = '\0';
            qc_console_printable(line);
            *end = '\n';
        }
    }
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    return st;
}

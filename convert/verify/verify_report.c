#include "convert/verify/verify_report.h"

#include "base/text.h"
#include "convert/term/console.h"
#include "convert/term/glob.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/json_rows.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORST_ROWS 10u
#define TEXT_MAX   ((size_t)1 << 30)
/* The table per kind has at most this many rows, one for each scheme and each cast. */
#define KINDS_MOST 32u

/* Puts the members that all answers have first: the path they are about, under `key` the other one,
 * which may be NULL, and whether anything is wrong. */
static void put_head(qc_json_writer *w, const char *verb, const char *path, const char *key,
                     const char *other, uint64_t problems, const qc_scan_problem *first)
{
    qc_json_put_text(w, "command", verb);
    qc_json_put_path(w, "path", path);
    if (other)
        qc_json_put_path(w, key, other);
    qc_json_put_bool(w, "ok", problems == 0);
    qc_json_put_u64(w, "problems", problems);
    if (qc_json_begin_object_if(w, "first_problem", problems > 0)) {
        qc_json_put_text(w, "what", first->what);
        qc_json_put_text(w, "why", first->why);
        qc_json_end(w);
    }
}

static qc_status end_json(qc_json_writer *w, double seconds)
{
    qc_json_put_number(w, "seconds", seconds);
    return qc_json_end_text(w);
}

/* ---- verify, unpack -------------------------------------------------------------------------- */

qc_status qc_scan_report(const qc_call *call, const qc_scan_subject *of, const qc_scan_result *r,
                         double seconds, qc_error *err)
{
    const char *to = of->unpacked_to;
    char bytes[QC_SIZE_TEXT_BYTES], rate[QC_SIZE_TEXT_BYTES];
    const qc_manifest *m = &r->manifest;
    qc_strbuf out;
    qc_json_writer w;
    qc_strbuf_init(&out, TEXT_MAX);
    qc_status st = QC_OK;
    if (call->json) {
        qc_json_begin_text(&w, &out, err);
        put_head(&w, of->verb, of->path, "out", to, r->problem_count, &r->first);
        qc_json_put_u64(&w, "tensors", r->tensors_checked);
        qc_json_put_u64(&w, "shards", m->shard_count);
        qc_json_put_u64(&w, "files", m->file_count);
        qc_json_put_u64(&w, "content_bytes", r->content_bytes);
        qc_json_put_u64(&w, "stored_bytes", r->stored_bytes);
        st = end_json(&w, seconds);
    } else if (r->problem_count && !call->quiet) {
        qc_strbuf_show(&out, "%s: DAMAGED: %" PRIu64 " problem%s; copy or convert it again\n",
                       of->path, r->problem_count, qc_plural(r->problem_count));
    } else if (!call->quiet) {
        qc_strbuf_show(
            &out,
            "%s: %s: %" PRIu64 " tensors in %zu shard%s, %zu other file%s; %s in %.2f s, %s%s%s\n",
            of->path, of->verb, r->tensors_checked, m->shard_count, qc_plural(m->shard_count),
            m->file_count, qc_plural(m->file_count), qc_text_bytes(bytes, r->content_bytes),
            seconds, qc_text_rate(rate, r->content_bytes, seconds), to ? "; now in " : "",
            to ? to : "");
    }
    return qc_console_deliver(st, &out, NULL, err);
}

/* ---- --against: JSON ------------------------------------------------------------------------- */

static double decibels(double error)
{
    return -20.0 * log10(error);
}

static void put_row(qc_json_writer *w, const qc_against_row *r)
{
    static const char *const kinds[] = {"equal", "cast", "quantized", "state"};
    qc_json_begin_object(w, NULL);
    qc_json_put_text(w, "name", r->name);
    qc_json_put_text(w, "source", r->source);
    qc_json_put_text(w, "kind", kinds[r->kind]);
    qc_json_put_text(w, "scheme", r->scheme);
    qc_json_put_text(w, "dtype", qc_dtype_name(r->dtype));
    qc_json_put_text(w, "source_dtype", r->source ? qc_dtype_name(r->source_dtype) : NULL);
    qc_json_put_u64s(w, "shape", r->dims, r->ndim);
    qc_json_put_u64_if(w, "block_size", r->block_elems > 0, r->block_elems);
    qc_json_put_u64(w, "bytes", r->bytes);
    qc_json_put_u64(w, "source_bytes", r->source_bytes);
    if (r->kind == QC_AGAINST_QUANTIZED && r->measured) {
        qc_json_put_number(w, "error", r->error);
        qc_json_put_number(w, "expected", r->expected);
        qc_json_put_number(w, "ratio", r->ratio);
        qc_json_put_number(w, "sqnr_db", decibels(r->error));
        qc_json_put_number(w, "largest_error", r->max_error);
        qc_json_put_u64s(w, "largest_at", (const uint64_t[2]){r->max_row, r->max_col}, 2);
        qc_json_put_u64(w, "clipped", r->clipped);
        qc_json_put_u64(w, "misplaced", r->misplaced);
        qc_json_put_u64(w, "scales", r->scales);
        qc_json_put_u64(w, "searched", r->searched);
        qc_json_put_bool(w, "calibrated", r->calibrated);
    }
    qc_json_put_text(w, "fault", r->fault);
    qc_json_put_text(w, "fits", r->fits);
    qc_json_end(w);
}

static const qc_json_row missing_rows[] = {
    QC_JSON_ROW(qc_against_missing, name, TEXT, 0),
    QC_JSON_ROW_AS("explained", qc_against_missing, why, TEXT, 0),
    {NULL},
};

/* ---- --against: text ------------------------------------------------------------------------- */

static const char *scheme_text(char out[QC_SCHEME_TEXT_BYTES], const qc_against_row *r)
{
    if (r->block_elems)
        return qc_scheme_text(out, r->scheme, r->block_elems);
    if (r->kind == QC_AGAINST_CAST)
        (void)snprintf(out, QC_SCHEME_TEXT_BYTES, "%s to %s", r->scheme, qc_dtype_name(r->dtype));
    else
        (void)snprintf(out, QC_SCHEME_TEXT_BYTES, "%s",
                       r->kind == QC_AGAINST_EQUAL ? "equal" : r->scheme);
    return out;
}

static void add_row(qc_table *t, const qc_against_row *r)
{
    char scheme[QC_SCHEME_TEXT_BYTES];
    qc_table_put(t, r->name);
    qc_table_put(t, scheme_text(scheme, r));
    if (r->kind != QC_AGAINST_QUANTIZED || !r->measured) {
        qc_table_empty(t, 7);
    } else {
        qc_table_putf(t, "%.5f", r->error);
        qc_table_putf(t, "%.5f", r->expected);
        qc_table_putf(t, "%.4g", r->ratio);
        qc_table_putf(t, "%.2f", decibels(r->error));
        qc_table_putf(t, "%.3g", r->max_error);
        qc_table_putf(t, "%" PRIu64 ", %" PRIu64, r->max_row, r->max_col);
        qc_table_putf(t, "%.4f%%", r->elems ? 100.0 * (double)r->clipped / (double)r->elems : 0.0);
    }
    qc_table_put(t, r->fault ? r->fault : "");
}

typedef struct {
    char scheme[QC_SCHEME_TEXT_BYTES];
    uint64_t tensors, elems, measured, clipped, faults;
    double least, most, worst_ratio;
    int quantized;
} kind_sums;

/* Adds up the rows of each kind. */
static void write_kinds(qc_strbuf *out, qc_arena *arena, const qc_against_result *r)
{
    kind_sums kinds[KINDS_MOST];
    unsigned count = 0;
    qc_table t;
    for (size_t i = 0; i < r->count; i++) {
        const qc_against_row *row = &r->rows[i];
        char scheme[QC_SCHEME_TEXT_BYTES];
        unsigned at = 0;
        scheme_text(scheme, row);
        while (at < count && strcmp(kinds[at].scheme, scheme) != 0)
            at++;
        if (at == KINDS_MOST)
            continue;
        kind_sums *k = &kinds[at];
        if (at == count) {
            *k = (kind_sums){.quantized = row->kind == QC_AGAINST_QUANTIZED, .least = INFINITY};
            memcpy(k->scheme, scheme, sizeof scheme);
            count++;
        }
        k->tensors++;
        k->elems += row->elems;
        k->clipped += row->clipped;
        k->faults += row->fault != NULL;
        k->measured += row->measured ? row->elems : 0;
        if (row->measured)
            k->least = fmin(k->least, row->error);
        k->most = fmax(k->most, row->error);
        k->worst_ratio = fmax(k->worst_ratio, row->ratio);
    }
    qc_table_begin(&t, arena, "is|>tensors|>weights|>error|>ratio up to|>clipped|>faults");
    for (const kind_sums *k = kinds; k < kinds + count; k++) {
        qc_table_put(&t, k->scheme);
        qc_table_number(&t, k->tensors);
        qc_table_count(&t, k->elems);
        if (k->quantized && k->measured > 0) {
            qc_table_putf(&t, "%.5f to %.5f", k->least, k->most);
            qc_table_putf(&t, "%.4g", k->worst_ratio);
            qc_table_putf(&t, "%.4f%%", 100.0 * (double)k->clipped / (double)k->measured);
        } else {
            qc_table_empty(&t, 3);
        }
        qc_table_number(&t, k->faults);
    }
    qc_table_print(&t, 2, out);
}

/* Puts rows with faults first, then those with the largest error over the expected one; of equal
 * ones, those with the larger error. */
static int compare_worst(const void *pa, const void *pb)
{
    const qc_against_row *a = *(const qc_against_row *const *)pa;
    const qc_against_row *b = *(const qc_against_row *const *)pb;
    if ((a->fault != NULL) != (b->fault != NULL))
        return a->fault ? -1 : 1;
    /* With searched scales the ratios of two tensors differ a little, so they are compared in steps
     * that a reader can see. */
    double x = round(a->ratio * 1000.0), y = round(b->ratio * 1000.0);
    if (x != y)
        return x > y ? -1 : 1;
    if (a->error != b->error)
        return a->error > b->error ? -1 : 1;
    return qc_natural_compare(a->name, b->name);
}

static qc_status write_rows(qc_strbuf *out, const qc_call *call, const qc_against_result *r,
                            qc_error *err)
{
    const qc_against_row **rows = NULL;
    size_t n = 0, faulty = 0;
    qc_table t;
    qc_table_begin(&t, call->arena,
                   "tensor|is|>error|>expected|>ratio|>SQNR dB|>largest|>at|>clipped|fault");
    if (call->verbose > 0) {
        for (size_t i = 0; i < r->count; i++)
            add_row(&t, &r->rows[i]);
        qc_table_print(&t, 2, out);
        return QC_OK;
    }
    QC_TRY(qc_arena_array(call->arena, &rows, r->count + 1, err));
    for (size_t i = 0; i < r->count; i++) {
        faulty += r->rows[i].fault != NULL;
        if (r->rows[i].kind == QC_AGAINST_QUANTIZED || r->rows[i].fault)
            rows[n++] = &r->rows[i];
    }
    qsort(rows, n, sizeof *rows, compare_worst);
    n = n < WORST_ROWS ? n : WORST_ROWS;
    for (size_t i = 0; i < n; i++)
        add_row(&t, rows[i]);
    /* Tensors with faults come first, whether they are quantized or not. */
    if (faulty > 0 && n <= faulty)
        qc_strbuf_putf(out, "%zu of %zu tensor%s with faults:\n", n, faulty, qc_plural(faulty));
    else if (faulty > 0)
        qc_strbuf_putf(out, "%zu tensor%s with faults, then those farthest from MODEL:\n", faulty,
                       qc_plural(faulty));
    else if (n > 0)
        qc_strbuf_putf(out, "The %zu that are farthest from MODEL, of %" PRIu64 " quantized:\n", n,
                       r->quantized);
    qc_table_print(&t, 2, out);
    return QC_OK;
}

static qc_status write_text(qc_strbuf *out, const qc_call *call, const qc_against_options *o,
                            const qc_against_result *r, double seconds, qc_error *err)
{
    char bytes[QC_SIZE_TEXT_BYTES], rate[QC_SIZE_TEXT_BYTES];
    uint64_t read = r->output_bytes + r->model_bytes;
    size_t explained = 0, unexplained = 0;
    write_kinds(out, call->arena, r);
    QC_TRY(write_rows(out, call, r, err));
    for (size_t i = 0; i < r->missing_count; i++) {
        const qc_against_missing *m = &r->missing[i];
        explained += m->why != NULL;
        unexplained += m->why == NULL;
        if (call->verbose > 0 || (!m->why && unexplained <= QC_CONSOLE_LINES))
            qc_strbuf_show(out, "not in OUT: %s%s%s\n", m->name, m->why ? ": " : "",
                           m->why ? m->why : "");
    }
    if (call->verbose == 0)
        QC_TRY(qc_console_add_more(out, unexplained, err));
    if (explained > 0 && call->verbose == 0)
        qc_strbuf_putf(out, "not in OUT, as it should be: %zu tensor%s of MODEL\n", explained,
                       qc_plural(explained));
    if (r->faults)
        qc_strbuf_show(out, "%s: NOT %s: %" PRIu64 " fault%s\n", o->out, o->model, r->faults,
                       qc_plural(r->faults));
    else
        qc_strbuf_show(out,
                       "%s: is %s: %zu tensor%s, %" PRIu64 " quantized, %" PRIu64 " cast, %" PRIu64
                       " equal; %s of both in %.2f s, %s\n",
                       o->out, o->model, r->count, qc_plural(r->count), r->quantized, r->cast,
                       r->equal, qc_text_bytes(bytes, read), seconds,
                       qc_text_rate(rate, read, seconds));
    return qc_strbuf_status(out, err);
}

qc_status qc_against_report(const qc_call *call, const qc_against_options *o,
                            const qc_against_result *r, double seconds, qc_error *err)
{
    qc_strbuf out;
    qc_json_writer w;
    qc_strbuf_init(&out, TEXT_MAX);
    qc_status st = QC_OK;
    if (call->json) {
        qc_json_begin_text(&w, &out, err);
        put_head(&w, "verified", o->out, "against", o->model, r->faults, &r->first);
        qc_json_put_bool(&w, "manifest", r->has_manifest);
        qc_json_put_u64(&w, "tensors", r->count);
        qc_json_put_u64(&w, "equal", r->equal);
        qc_json_put_u64(&w, "cast", r->cast);
        qc_json_put_u64(&w, "quantized", r->quantized);
        qc_json_put_u64(&w, "source_digests", r->digests);
        qc_json_put_u64(&w, "output_bytes", r->output_bytes);
        qc_json_put_u64(&w, "model_bytes", r->model_bytes);
        qc_json_put_list(&w, "missing", missing_rows, 0, r->missing, r->missing_count,
                         sizeof *r->missing);
        qc_json_begin_list(&w, "rows");
        for (size_t i = 0; i < r->count; i++)
            put_row(&w, &r->rows[i]);
        qc_json_end(&w);
        st = end_json(&w, seconds);
    } else if (!call->quiet) {
        st = write_text(&out, call, o, r, seconds, err);
    }
    return qc_console_deliver(st, &out, NULL, err);
}

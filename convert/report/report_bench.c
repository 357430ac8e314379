/* Reads the file of --bench, which is what `qconv bench --json` writes (docs/bench.md). */
#include "convert/report/report_facts.h"
#include "formats/file_io.h"
#include "formats/json_strict.h"

#include <string.h>

#define FILE_MAX_BYTES ((size_t)64 << 20)
#define MAX_ROWS       10000u

/* Copies a member that is a text, because the document is freed. */
static qc_status text_of(const qc_json_node *object, const char *key, qc_arena *arena,
                         const char **out, qc_error *err)
{
    const char *text = NULL;
    QC_TRY(qc_json_as_string(qc_json_get(object, key), key, &text, err));
    return qc_arena_strndup(arena, out, text, strlen(text), err);
}

static qc_status number_of(const qc_json_node *object, const char *key, double *out, qc_error *err)
{
    QC_TRY(qc_json_as_double(qc_json_get(object, key), key, out, err));
    if (!(*out >= 0))
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected 0 or more, found %g", key, *out);
    return QC_OK;
}

/* Reads the median of a spread; null, which means "not measured", gives 0. */
static qc_status median_of(const qc_json_node *object, const char *key, double *out, qc_error *err)
{
    const qc_json_node *spread = qc_json_get(object, key);
    *out = 0.0;
    if (spread && qc_json_kind_of(spread) == QC_JSON_NULL)
        return QC_OK;
    if (!spread || qc_json_kind_of(spread) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected an object or null", key);
    qc_status st = number_of(spread, "median", out, err);
    if (st != QC_OK)
        qc_error_prefix(err, "%s", key);
    return st;
}

/* Turns a name that bench has for a scheme into the one that weights have. */
static const char *stored_scheme(const char *scheme)
{
    return strncmp(scheme, "nf4", 3) == 0       ? "nf4"
           : strcmp(scheme, "int8-blocks") == 0 ? "int8-block"
                                                : "int8";
}

static int is_here(const qc_report *r, const qc_report_speed *row)
{
    const char *scheme = stored_scheme(row->scheme);
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *w = &r->weights[i];
        const qc_stored_weight *s = w->stored;
        if (s->ndim == 2 && s->dims[0] == row->n && s->dims[1] == row->k &&
            strcmp(r->forms[w->form].scheme, scheme) == 0)
            return 1;
    }
    return 0;
}

static qc_status read_row(const qc_report *r, const qc_json_node *n, qc_report_speed *row,
                          qc_error *err)
{
    qc_arena *arena = r->call->arena;
    QC_TRY(text_of(n, "model", arena, &row->model, err));
    QC_TRY(text_of(n, "layer", arena, &row->layer, err));
    QC_TRY(text_of(n, "scheme", arena, &row->scheme, err));
    QC_TRY(text_of(n, "path", arena, &row->path, err));
    QC_TRY(qc_json_as_u64(qc_json_get(n, "n"), "n", &row->n, err));
    QC_TRY(qc_json_as_u64(qc_json_get(n, "k"), "k", &row->k, err));
    QC_TRY(qc_json_as_u64(qc_json_get(n, "m"), "m", &row->m, err));
    QC_TRY(median_of(n, "us", &row->us, err));
    QC_TRY(median_of(n, "dense_us", &row->dense_us, err));
    QC_TRY(median_of(n, "ratio", &row->ratio, err));
    QC_TRY(number_of(n, "gbps", &row->gbps, err));
    QC_TRY(number_of(n, "of_roof", &row->of_roof, err));
    row->here = is_here(r, row);
    return QC_OK;
}

static qc_status read_rows(qc_report *r, qc_report_bench *b, const qc_json_node *rows,
                           qc_error *err)
{
    uint32_t count = 0;
    if (!rows || qc_json_kind_of(rows) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "rows: expected an array");
    for (const qc_json_node *n = qc_json_first(rows); n; n = qc_json_next(n))
        if (++count > MAX_ROWS)
            QC_FAIL(err, QC_ERR_INPUT, "rows: expected at most %u, found more", MAX_ROWS);
    QC_TRY(qc_arena_array(r->call->arena, &b->rows, (size_t)count + 1, err));
    for (const qc_json_node *n = qc_json_first(rows); n; n = qc_json_next(n)) {
        qc_status st = read_row(r, n, &b->rows[b->row_count], err);
        if (st != QC_OK) {
            qc_error_prefix(err, "row %u", b->row_count);
            return st;
        }
        b->here += b->rows[b->row_count++].here != 0;
    }
    return QC_OK;
}

/* Files of older versions have neither member, because those wrote their file only at the end of a
 * run. */
static qc_status read_end(qc_report_bench *b, const qc_json_node *root, qc_error *err)
{
    const qc_json_node *complete = qc_json_get(root, "complete");
    const qc_json_node *failed = qc_json_get(root, "failed");
    b->complete = 1;
    if (complete)
        QC_TRY(qc_json_as_bool(complete, "complete", &b->complete, err));
    if (failed && qc_json_kind_of(failed) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "failed: expected an array");
    for (const qc_json_node *n = failed ? qc_json_first(failed) : NULL; n; n = qc_json_next(n))
        b->failed++;
    return QC_OK;
}

static qc_status read_document(qc_report *r, const qc_json_node *root, qc_error *err)
{
    const char *command = qc_json_string_or(qc_json_get(root, "command"), "");
    if (strcmp(command, "bench") != 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "expected what 'qconv bench --json' writes, but \"command\" is not \"bench\"");
    qc_report_bench *b = NULL;
    QC_TRY(qc_arena_array(r->call->arena, &b, 1, err));
    const qc_json_node *roof = qc_json_get(root, "roof");
    QC_TRY(text_of(qc_json_get(root, "device"), "name", r->call->arena, &b->device, err));
    QC_TRY(text_of(root, "program", r->call->arena, &b->program, err));
    QC_TRY(text_of(root, "dtype", r->call->arena, &b->dtype, err));
    QC_TRY(median_of(roof, "copy_gbps", &b->copy_gbps, err));
    QC_TRY(median_of(roof, "gemm_tflops", &b->gemm_tflops, err));
    QC_TRY(read_rows(r, b, qc_json_get(root, "rows"), err));
    QC_TRY(read_end(b, root, err));
    r->bench = b;
    return QC_OK;
}

qc_status qc_report_bench_read(qc_report *r, const char *path, qc_error *err)
{
    qc_json *doc = NULL;
    QC_TRY(qc_json_read_file(&doc, path, "--bench: ", FILE_MAX_BYTES, err));
    qc_status st = read_document(r, qc_json_root(doc), err);
    if (st != QC_OK)
        qc_error_prefix(err, "--bench: %s", path);
    qc_json_destroy(doc);
    return st;
}

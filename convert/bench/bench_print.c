#include "convert/device/bench.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"

#include <stdio.h>
#include <string.h>

#define CELL_BYTES 64

/* Writes three or four digits: "1.23", "45.6", "789". */
static const char *digits(char out[CELL_BYTES], double v)
{
    (void)snprintf(out, CELL_BYTES, v < 10 ? "%.2f" : v < 100 ? "%.1f" : "%.0f", v);
    return out;
}

/* "45.1 to 46.0" */
static const char *range(char out[CELL_BYTES], qc_bench_spread s)
{
    char low[CELL_BYTES], high[CELL_BYTES];
    (void)snprintf(out, CELL_BYTES, "%.20s to %.20s", digits(low, s.p10), digits(high, s.p90));
    return out;
}

/* ---- what is on top: the roofs ---- */

typedef struct {
    char name[CELL_BYTES];
    qc_bench_spread value;
    const char *unit;
} roof_row;

#define ROOF_ROWS 5u

static void roof_rows(roof_row rows[ROOF_ROWS], const qc_bench_roof *r)
{
    char size[QC_SIZE_TEXT_BYTES];
    (void)snprintf(rows[0].name, CELL_BYTES, "device copy of %s, read + written",
                   qc_text_bytes(size, r->copy_bytes));
    (void)snprintf(rows[1].name, CELL_BYTES, "cuBLAS, %llu x %llu x %llu",
                   (unsigned long long)r->gemm_size, (unsigned long long)r->gemm_size,
                   (unsigned long long)r->gemm_size);
    (void)snprintf(rows[2].name, CELL_BYTES, "a kernel that does nothing, in a graph");
    (void)snprintf(rows[3].name, CELL_BYTES, "host to device, pinned");
    (void)snprintf(rows[4].name, CELL_BYTES, "device to host, pinned");
    rows[0].value = r->copy_gbps;
    rows[1].value = r->gemm_tflops;
    rows[2].value = r->launch_us;
    rows[3].value = r->to_device_gbps;
    rows[4].value = r->to_host_gbps;
    rows[0].unit = rows[3].unit = rows[4].unit = "GB/s";
    rows[1].unit = "TFLOP/s";
    rows[2].unit = "us";
}

static double of_copy(const qc_bench_result *r, const qc_bench_kernel *k)
{
    return r->roof.copy_gbps.median > 0 ? 100 * k->gbps.median / r->roof.copy_gbps.median : 0;
}

/* ---- text ---- */

qc_status qc_bench_row_line(const qc_bench_request *q, const qc_bench_result *r,
                            const qc_bench_row *row, qc_strbuf *out, qc_error *err)
{
    const qc_bench_shape *s = &q->shapes[row->shape];
    char us[CELL_BYTES];
    QC_TRY(qc_strbuf_addf(out, err, "%s %s M=%llu %s %s: %s us, %.0f%% of the roof", s->model,
                          s->layer, (unsigned long long)row->m, qc_bench_scheme_name(row->scheme),
                          row->path, digits(us, row->us.median),
                          100 * qc_bench_of_roof(q, r, row)));
    if (row->ratio.samples)
        QC_TRY(qc_strbuf_addf(out, err, ", %.2fx %s", row->ratio.median, qc_bench_dtype_name(q)));
    return QC_OK;
}

qc_status qc_bench_failure_line(const qc_bench_request *q, const qc_bench_failure *f,
                                qc_strbuf *out, qc_error *err)
{
    if (f->shape != QC_BENCH_NO_SHAPE) {
        const qc_bench_shape *s = &q->shapes[f->shape];
        QC_TRY(
            qc_strbuf_addf(out, err, "%s %s M=%llu", s->model, s->layer, (unsigned long long)f->m));
        if (f->scheme != QC_BENCH_SCHEME_COUNT)
            QC_TRY(qc_strbuf_addf(out, err, " %s", qc_bench_scheme_name(f->scheme)));
        QC_TRY(f->path ? qc_strbuf_addf(out, err, " (%s): ", f->path)
                       : qc_strbuf_adds(out, ": ", err));
    }
    return qc_strbuf_adds(out, f->what, err);
}

static qc_status list_failed(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                             qc_error *err)
{
    if (r->failed_count)
        QC_TRY(qc_strbuf_adds(out, "\nWrong, or could not run:\n\n", err));
    for (uint32_t i = 0; i < r->failed_count; i++) {
        QC_TRY(qc_strbuf_adds(out, "- ", err));
        QC_TRY(qc_bench_failure_line(q, &r->failed[i], out, err));
        QC_TRY(qc_strbuf_adds(out, "\n", err));
    }
    return QC_OK;
}

static qc_status text_top(const qc_bench_result *r, qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    const qc_bench_device *d = &r->device;
    char memory[QC_SIZE_TEXT_BYTES], l2[QC_SIZE_TEXT_BYTES], cell[CELL_BYTES];
    QC_TRY(qc_strbuf_addf(out, err, "%s, sm_%u, %u multiprocessors, %s, L2 %s\n", d->name, d->sm,
                          d->multiprocessors, qc_text_bytes(memory, d->memory_bytes),
                          qc_text_bytes(l2, d->l2_bytes)));
    if (d->no_gemm)
        QC_TRY(qc_strbuf_addf(out, err, "No comparison with cuBLAS: %s.\n", d->no_gemm));
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    qc_table t;
    roof_row rows[ROOF_ROWS];
    roof_rows(rows, &r->roof);
    qc_table_init(&t, arena);
    qc_table_column(&t, "roof", QC_ALIGN_LEFT);
    qc_table_column(&t, "median", QC_ALIGN_RIGHT);
    qc_table_column(&t, "", QC_ALIGN_LEFT);
    qc_table_column(&t, "p10 to p90", QC_ALIGN_RIGHT);
    for (uint32_t i = 0; i < ROOF_ROWS; i++) {
        if (!rows[i].value.samples)
            continue;
        QC_TRY(qc_table_cell(&t, rows[i].name, err));
        QC_TRY(qc_table_cell(&t, digits(cell, rows[i].value.median), err));
        QC_TRY(qc_table_cell(&t, rows[i].unit, err));
        QC_TRY(qc_table_cell(&t, range(cell, rows[i].value), err));
    }
    QC_TRY(qc_table_render(&t, 0, out, err));
    qc_table_init(&t, arena);
    qc_table_column(&t, "kernel", QC_ALIGN_LEFT);
    qc_table_column(&t, "GB/s", QC_ALIGN_RIGHT);
    qc_table_column(&t, "p10 to p90", QC_ALIGN_RIGHT);
    qc_table_column(&t, "of the copy", QC_ALIGN_RIGHT);
    for (uint32_t i = 0; i < r->kernel_count; i++) {
        QC_TRY(qc_table_cell(&t, r->kernels[i].name, err));
        QC_TRY(qc_table_cell(&t, digits(cell, r->kernels[i].gbps.median), err));
        QC_TRY(qc_table_cell(&t, range(cell, r->kernels[i].gbps), err));
        QC_TRY(qc_table_cellf(&t, err, "%.0f%%", of_copy(r, &r->kernels[i])));
    }
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    return qc_table_render(&t, 0, out, err);
}

static qc_status text_row(qc_table *t, const qc_bench_request *q, const qc_bench_result *r,
                          const qc_bench_row *row, qc_error *err)
{
    const qc_bench_shape *s = &q->shapes[row->shape];
    uint64_t bytes =
        qc_bench_bytes(qc_bench_weight_bytes(row->scheme, s->n, s->k), row->m, s->n, s->k);
    double us = row->us.median;
    char cell[CELL_BYTES];
    QC_TRY(qc_table_cell(t, s->layer, err));
    QC_TRY(qc_table_cellf(t, err, "%llu", (unsigned long long)row->m));
    QC_TRY(qc_table_cell(t, qc_bench_scheme_name(row->scheme), err));
    QC_TRY(qc_table_cell(t, row->path, err));
    QC_TRY(qc_table_cell(t, digits(cell, us), err));
    QC_TRY(qc_table_cell(t, range(cell, row->us), err));
    QC_TRY(qc_table_cell(t, us > 0 ? digits(cell, (double)bytes / us / 1e3) : NULL, err));
    QC_TRY(qc_table_cell(
        t, us > 0 ? digits(cell, qc_bench_flops(row->m, s->n, s->k) / us / 1e6) : NULL, err));
    QC_TRY(qc_table_cellf(t, err, "%.0f%%", 100 * qc_bench_of_roof(q, r, row)));
    QC_TRY(qc_table_cell(t, row->dense.samples ? digits(cell, row->dense.median) : NULL, err));
    return row->ratio.samples ? qc_table_cellf(t, err, "%.2fx", row->ratio.median)
                              : qc_table_cell(t, NULL, err);
}

static qc_status text_layers(qc_table *t, const qc_bench_request *q, const qc_bench_result *r,
                             uint32_t first, qc_error *err)
{
    qc_bench_layer l;
    char cell[CELL_BYTES];
    for (uint32_t m = 0; m < q->m_count; m++)
        for (uint32_t i = 0; i < q->scheme_count; i++) {
            if (!qc_bench_layer_of(q, r, first, q->schemes[i], q->m[m], &l))
                continue;
            QC_TRY(qc_table_cell(t, "one decoder layer", err));
            QC_TRY(qc_table_cellf(t, err, "%llu", (unsigned long long)l.m));
            QC_TRY(qc_table_cell(t, qc_bench_scheme_name(l.scheme), err));
            QC_TRY(qc_table_cell(t, "", err));
            QC_TRY(qc_table_cell(t, digits(cell, l.us), err));
            for (unsigned empty = 0; empty < 4; empty++)
                QC_TRY(qc_table_cell(t, "", err));
            if (l.dense_us > 0) {
                QC_TRY(qc_table_cell(t, digits(cell, l.dense_us), err));
                QC_TRY(qc_table_cellf(t, err, "%.2fx", l.us > 0 ? l.dense_us / l.us : 0));
            } else {
                QC_TRY(qc_table_cell(t, NULL, err));
                QC_TRY(qc_table_cell(t, NULL, err));
            }
        }
    return QC_OK;
}

static qc_status text_model(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                            qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    static const char *const titles[] = {"weight",     "M",    "scheme",  "kernel", "us",
                                         "p10 to p90", "GB/s", "TFLOP/s", "roof"};
    char dense[2][CELL_BYTES];
    const char *model = q->shapes[first].model;
    qc_table t;
    qc_table_init(&t, arena);
    for (uint32_t i = 0; i < sizeof titles / sizeof *titles; i++)
        qc_table_column(&t, titles[i], i == 0 || i == 2 || i == 3 ? QC_ALIGN_LEFT : QC_ALIGN_RIGHT);
    (void)snprintf(dense[0], CELL_BYTES, "%s us", qc_bench_dtype_name(q));
    (void)snprintf(dense[1], CELL_BYTES, "x %s", qc_bench_dtype_name(q));
    qc_table_column(&t, dense[0], QC_ALIGN_RIGHT);
    qc_table_column(&t, dense[1], QC_ALIGN_RIGHT);
    for (uint32_t i = 0; i < r->row_count; i++)
        if (strcmp(q->shapes[r->rows[i].shape].model, model) == 0)
            QC_TRY(text_row(&t, q, r, &r->rows[i], err));
    QC_TRY(text_layers(&t, q, r, first, err));
    if (!t.cell_count)
        return QC_OK;
    QC_TRY(qc_strbuf_addf(out, err, "\n%s\n", model));
    return qc_table_render(&t, 2, out, err);
}

#define SHORT_ROTATIONS                                                                            \
    "In %u the weights together are not more than four times the L2 cache: memory was too small, " \
    "or the weights are; the cache may have helped.\n"

/* The number of rows whose weights the cache may have helped with. */
static uint32_t short_rotations(const qc_bench_result *r)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < r->row_count; i++)
        count += r->rows[i].turn.bytes <= 4 * r->device.l2_bytes;
    for (uint32_t i = 0; i < r->tuned_count; i++)
        count += r->tuned[i].turn.bytes <= 4 * r->device.l2_bytes;
    return count;
}

/* ---- tuning ---- */

qc_status qc_bench_tuned_line(const qc_bench_request *q, const qc_bench_tuned *t, qc_strbuf *out,
                              qc_error *err)
{
    const qc_bench_shape *s = &q->shapes[t->shape];
    char plan[QC_BENCH_PLAN_BYTES], us[CELL_BYTES];
    QC_TRY(qc_strbuf_addf(out, err, "%s %s M=%llu %s: %s, %s us", s->model, s->layer,
                          (unsigned long long)t->m, qc_bench_scheme_name(t->scheme),
                          qc_bench_plan_text(plan, &t->plan), digits(us, t->plan_us.median)));
    if (!t->better)
        return qc_strbuf_addf(out, err, ", the best of %u", t->candidates);
    return qc_strbuf_addf(out, err, "; better: %s, %s us, %.2fx",
                          qc_bench_plan_text(plan, &t->other), digits(us, t->us.median),
                          t->ratio.median);
}

static qc_status tune_row(qc_table *t, const qc_bench_request *q, const qc_bench_tuned *b,
                          qc_error *err)
{
    char plan[QC_BENCH_PLAN_BYTES], cell[CELL_BYTES];
    QC_TRY(qc_table_cell(t, q->shapes[b->shape].layer, err));
    QC_TRY(qc_table_cellf(t, err, "%llu", (unsigned long long)b->m));
    QC_TRY(qc_table_cell(t, qc_bench_scheme_name(b->scheme), err));
    QC_TRY(qc_table_cellf(t, err, "%u", b->candidates));
    QC_TRY(qc_table_cell(t, qc_bench_plan_text(plan, &b->plan), err));
    QC_TRY(qc_table_cell(t, digits(cell, b->plan_us.median), err));
    QC_TRY(qc_table_cell(t, b->better ? qc_bench_plan_text(plan, &b->other) : "the same", err));
    QC_TRY(qc_table_cell(t, b->better ? digits(cell, b->us.median) : "", err));
    QC_TRY(b->better ? qc_table_cellf(t, err, "%.2fx", b->ratio.median)
                     : qc_table_cell(t, "", err));
    return qc_table_cell(t, b->better ? range(cell, b->ratio) : "", err);
}

static qc_status tune_model(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                            qc_arena *arena, qc_strbuf *out, qc_error *err)
{
    static const char *const titles[] = {"weight", "M",    "scheme", "of",   "planned",
                                         "us",     "best", "us",     "gain", "p10 to p90"};
    static const int is_text[] = {1, 0, 1, 0, 1, 0, 1, 0, 0, 0};
    qc_table t;
    qc_table_init(&t, arena);
    for (uint32_t i = 0; i < sizeof titles / sizeof *titles; i++)
        qc_table_column(&t, titles[i], is_text[i] ? QC_ALIGN_LEFT : QC_ALIGN_RIGHT);
    for (uint32_t i = 0; i < r->tuned_count; i++)
        if (strcmp(q->shapes[r->tuned[i].shape].model, q->shapes[first].model) == 0)
            QC_TRY(tune_row(&t, q, &r->tuned[i], err));
    if (!t.cell_count)
        return QC_OK;
    QC_TRY(qc_strbuf_addf(out, err, "\n%s\n", q->shapes[first].model));
    return qc_table_render(&t, 2, out, err);
}

static qc_status tune_top(const qc_bench_result *r, qc_strbuf *out, qc_error *err)
{
    const qc_bench_device *d = &r->device;
    QC_TRY(qc_strbuf_addf(out, err, "%s, sm_%u, %u multiprocessors\n", d->name, d->sm,
                          d->multiprocessors));
    return d->no_gemm ? qc_strbuf_addf(out, err, "Without dequant-gemm: %s.\n", d->no_gemm) : QC_OK;
}

/* ---- all of it ---- */

qc_status qc_bench_text(const qc_bench_request *q, const qc_bench_result *r, qc_arena *arena,
                        qc_strbuf *out, qc_error *err)
{
    char time[QC_SIZE_TEXT_BYTES];
    uint32_t better = 0;
    QC_TRY(q->tune ? tune_top(r, out, err) : text_top(r, arena, out, err));
    for (uint32_t i = 0; i < q->shape_count; i++)
        if (qc_bench_first_of_model(q, i))
            QC_TRY(q->tune ? tune_model(q, r, i, arena, out, err)
                           : text_model(q, r, i, arena, out, err));
    for (uint32_t i = 0; i < r->tuned_count; i++)
        better += r->tuned[i].better != 0;
    if (q->tune)
        QC_TRY(qc_strbuf_addf(out, err, "\nA better choice than the plan's for %u of %u.", better,
                              r->tuned_count));
    QC_TRY(qc_strbuf_addf(out, err, "\n%u measured in %s", r->row_count + r->tuned_count,
                          qc_text_seconds(time, r->seconds)));
    if (r->left_out)
        QC_TRY(qc_strbuf_addf(out, err, ", %u left out: no time or no memory", r->left_out));
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    if (q->tuned_by)
        QC_TRY(qc_strbuf_addf(out, err, "Kernels as %s says.\n", q->tuned_by));
    if (short_rotations(r))
        QC_TRY(qc_strbuf_addf(out, err, SHORT_ROTATIONS, short_rotations(r)));
    return list_failed(q, r, out, err);
}

/* ---- Markdown ---- */

static qc_status markdown_top(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                              qc_error *err)
{
    const qc_bench_device *d = &r->device;
    char a[CELL_BYTES], b[CELL_BYTES];
    roof_row rows[ROOF_ROWS];
    roof_rows(rows, &r->roof);
    QC_TRY(qc_strbuf_addf(out, err,
                          "### %s\n\nsm_%u, %u multiprocessors; kernels of %s; x and y in %s.\n\n"
                          "| roof | median |  | p10 to p90 |\n|--|--|--|--|\n",
                          d->name, d->sm, d->multiprocessors, d->build, qc_bench_dtype_name(q)));
    for (uint32_t i = 0; i < ROOF_ROWS; i++)
        if (rows[i].value.samples)
            QC_TRY(qc_strbuf_addf(out, err, "| %s | %s | %s | %s |\n", rows[i].name,
                                  digits(a, rows[i].value.median), rows[i].unit,
                                  range(b, rows[i].value)));
    QC_TRY(qc_strbuf_adds(out, "\n| kernel | GB/s | p10 to p90 | of the copy |\n|--|--|--|--|\n",
                          err));
    for (uint32_t i = 0; i < r->kernel_count; i++)
        QC_TRY(qc_strbuf_addf(out, err, "| %s | %s | %s | %.0f%% |\n", r->kernels[i].name,
                              digits(a, r->kernels[i].gbps.median), range(b, r->kernels[i].gbps),
                              of_copy(r, &r->kernels[i])));
    return QC_OK;
}

/* "3.52x, 78%" */
static qc_status markdown_cell(const qc_bench_request *q, const qc_bench_result *r,
                               const qc_bench_row *row, qc_strbuf *out, qc_error *err)
{
    if (!row)
        return qc_strbuf_adds(out, " - |", err);
    if (row->ratio.samples)
        QC_TRY(qc_strbuf_addf(out, err, " %.2fx,", row->ratio.median));
    return qc_strbuf_addf(out, err, " %.0f%% |", 100 * qc_bench_of_roof(q, r, row));
}

static qc_status markdown_table(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                                qc_bench_scheme scheme, qc_strbuf *out, qc_error *err)
{
    const char *model = q->shapes[first].model;
    int whole = q->shapes[first].count > 0;
    qc_bench_layer l;
    char cell[CELL_BYTES];
    QC_TRY(qc_strbuf_addf(out, err, "\n#### %s, %s\n\n| M |", model, qc_bench_scheme_name(scheme)));
    for (uint32_t i = first; i < q->shape_count; i++)
        if (strcmp(q->shapes[i].model, model) == 0)
            QC_TRY(qc_strbuf_addf(out, err, " %s, %llu x %llu |", q->shapes[i].layer,
                                  (unsigned long long)q->shapes[i].n,
                                  (unsigned long long)q->shapes[i].k));
    QC_TRY(qc_strbuf_addf(out, err, "%s\n|--|", whole ? " all of a layer |" : ""));
    for (uint32_t i = first; i < q->shape_count; i++)
        if (strcmp(q->shapes[i].model, model) == 0)
            QC_TRY(qc_strbuf_adds(out, "--|", err));
    QC_TRY(qc_strbuf_adds(out, whole ? "--|\n" : "\n", err));
    for (uint32_t m = 0; m < q->m_count; m++) {
        QC_TRY(qc_strbuf_addf(out, err, "| %llu |", (unsigned long long)q->m[m]));
        for (uint32_t i = first; i < q->shape_count; i++)
            if (strcmp(q->shapes[i].model, model) == 0)
                QC_TRY(markdown_cell(q, r, qc_bench_find(r, i, scheme, q->m[m]), out, err));
        if (!whole)
            QC_TRY(qc_strbuf_adds(out, "\n", err));
        else if (!qc_bench_layer_of(q, r, first, scheme, q->m[m], &l))
            QC_TRY(qc_strbuf_adds(out, " - |\n", err));
        else if (l.dense_us > 0 && l.us > 0)
            QC_TRY(qc_strbuf_addf(out, err, " %.2fx, %s us |\n", l.dense_us / l.us,
                                  digits(cell, l.us)));
        else
            QC_TRY(qc_strbuf_addf(out, err, " %s us |\n", digits(cell, l.us)));
    }
    return QC_OK;
}

/* Writes what a table of cells does not tell, because a page outlives the terminal in which it was
 * made. */
static qc_status markdown_notes(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                                qc_error *err)
{
    if (r->device.no_gemm)
        QC_TRY(qc_strbuf_addf(out, err, "\nNo comparison with cuBLAS: %s.\n", r->device.no_gemm));
    if (q->tuned_by)
        QC_TRY(qc_strbuf_adds(out, "\nKernels were chosen by a table of `qconv bench --tune`.\n",
                              err));
    if (r->left_out)
        QC_TRY(qc_strbuf_addf(out, err, "\n%u left out: no time or no memory.\n", r->left_out));
    if (short_rotations(r))
        QC_TRY(qc_strbuf_addf(out, err, "\n" SHORT_ROTATIONS, short_rotations(r)));
    return list_failed(q, r, out, err);
}

qc_status qc_bench_markdown(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                            qc_error *err)
{
    QC_TRY(markdown_top(q, r, out, err));
    for (uint32_t s = 0; s < q->shape_count; s++)
        for (uint32_t i = 0; qc_bench_first_of_model(q, s) && i < q->scheme_count; i++)
            QC_TRY(markdown_table(q, r, s, q->schemes[i], out, err));
    return markdown_notes(q, r, out, err);
}

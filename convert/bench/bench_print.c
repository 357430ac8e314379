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

/* ---- text ---- */

qc_status qc_bench_row_line(const qc_bench_request *q, const qc_bench_result *r,
                            const qc_bench_row *row, qc_strbuf *out, qc_error *err)
{
    const qc_bench_shape *s = &q->shapes[row->shape];
    char us[CELL_BYTES];
    qc_strbuf_putf(out, "%s %s M=%llu %s %s: %s us, %.0f%% of the roof", s->model, s->layer,
                   (unsigned long long)row->m, qc_bench_scheme_name(row->scheme), row->path,
                   digits(us, row->us.median), 100 * qc_bench_of_roof(q, r, row));
    if (row->ratio.samples)
        qc_strbuf_putf(out, ", %.2fx %s", row->ratio.median, qc_bench_dtype_name(q));
    if (row->packed.us.samples)
        qc_strbuf_putf(out, "; packed %s: %s us, %.2fx the file's layout", row->packed.path,
                       digits(us, row->packed.us.median), row->packed.ratio.median);
    return qc_strbuf_status(out, err);
}

static void put_failure(const qc_bench_request *q, const qc_bench_failure *f, qc_strbuf *out)
{
    if (f->shape != QC_BENCH_NO_SHAPE) {
        const qc_bench_shape *s = &q->shapes[f->shape];
        qc_strbuf_putf(out, "%s %s M=%llu", s->model, s->layer, (unsigned long long)f->m);
        if (f->scheme != QC_BENCH_SCHEME_COUNT)
            qc_strbuf_putf(out, " %s", qc_bench_scheme_name(f->scheme));
        if (f->path)
            qc_strbuf_putf(out, " (%s)", f->path);
        qc_strbuf_puts(out, ": ");
    }
    qc_strbuf_puts(out, f->what);
}

qc_status qc_bench_failure_line(const qc_bench_request *q, const qc_bench_failure *f,
                                qc_strbuf *out, qc_error *err)
{
    put_failure(q, f, out);
    return qc_strbuf_status(out, err);
}

static qc_status list_failed(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                             qc_error *err)
{
    if (r->failed_count)
        qc_strbuf_puts(out, "\nWrong, or could not run:\n\n");
    for (uint32_t i = 0; i < r->failed_count; i++) {
        qc_strbuf_puts(out, "- ");
        put_failure(q, &r->failed[i], out);
        qc_strbuf_puts(out, "\n");
    }
    return qc_strbuf_status(out, err);
}

/* The two tables on top, for a terminal and for Markdown: the roofs, or what the kernels that are
 * bound by memory reach. */
static void roof_table(qc_table *t, const qc_bench_result *r, qc_arena *arena)
{
    const unsigned long long n = r->roof.gemm_size;
    char size[QC_SIZE_TEXT_BYTES], cell[CELL_BYTES], gemm[CELL_BYTES];
    char copy[CELL_BYTES], read[CELL_BYTES];
    (void)qc_text_bytes(size, r->roof.copy_bytes);
    (void)snprintf(copy, sizeof copy, "device copy of %s, read + written", size);
    (void)snprintf(read, sizeof read, "reading %s by a kernel of qconv", size);
    (void)snprintf(gemm, sizeof gemm, "cuBLAS, %llu x %llu x %llu", n, n, n);
    const struct {
        const char *name, *unit;
        qc_bench_spread value;
    } rows[] = {
        {copy, "GB/s", r->roof.copy_gbps},
        {"the same by a kernel of qconv", "GB/s", r->roof.kernel_copy_gbps},
        {read, "GB/s", r->roof.read_gbps},
        {gemm, "TFLOP/s", r->roof.gemm_tflops},
        {"a kernel that does nothing, in a graph", "us", r->roof.launch_us},
        {"host to device, pinned", "GB/s", r->roof.to_device_gbps},
        {"device to host, pinned", "GB/s", r->roof.to_host_gbps},
    };
    qc_table_begin(t, arena, "roof|>median||>p10 to p90");
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (!rows[i].value.samples)
            continue;
        qc_table_put(t, rows[i].name);
        qc_table_put(t, digits(cell, rows[i].value.median));
        qc_table_put(t, rows[i].unit);
        qc_table_put(t, range(cell, rows[i].value));
    }
}

static void kernel_table(qc_table *t, const qc_bench_result *r, qc_arena *arena)
{
    const double copy = qc_bench_copy_gbps(&r->roof), roof = qc_bench_memory_gbps(&r->roof);
    char cell[CELL_BYTES];
    qc_table_begin(t, arena, "kernel|>GB/s|>p10 to p90|>of the copy|>of the roof");
    for (uint32_t i = 0; i < r->kernel_count; i++) {
        const qc_bench_spread gbps = r->kernels[i].gbps;
        qc_table_put(t, r->kernels[i].name);
        qc_table_put(t, digits(cell, gbps.median));
        qc_table_put(t, range(cell, gbps));
        qc_table_putf(t, "%.0f%%", copy > 0 ? 100 * gbps.median / copy : 0);
        qc_table_putf(t, "%.0f%%", roof > 0 ? 100 * gbps.median / roof : 0);
    }
}

static void text_top(const qc_bench_result *r, qc_arena *arena, qc_strbuf *out)
{
    const qc_bench_device *d = &r->device;
    char memory[QC_SIZE_TEXT_BYTES], l2[QC_SIZE_TEXT_BYTES];
    qc_table t;
    qc_strbuf_putf(out, "%s, sm_%u, %u multiprocessors, %s, L2 %s\n", d->name, d->sm,
                   d->multiprocessors, qc_text_bytes(memory, d->memory_bytes),
                   qc_text_bytes(l2, d->l2_bytes));
    if (d->no_gemm)
        qc_strbuf_putf(out, "No comparison with cuBLAS: %s.\n", d->no_gemm);
    qc_strbuf_puts(out, "\n");
    roof_table(&t, r, arena);
    qc_table_print(&t, 0, out);
    qc_strbuf_puts(out, "\n");
    kernel_table(&t, r, arena);
    qc_table_print(&t, 0, out);
}

/* "3.52x"; "-" if it was not measured. */
static void put_times(qc_table *t, int measured, double v)
{
    if (measured)
        qc_table_putf(t, "%.2fx", v);
    else
        qc_table_put(t, NULL);
}

static void text_row(qc_table *t, const qc_bench_request *q, const qc_bench_result *r,
                     const qc_bench_row *row)
{
    const qc_bench_shape *s = &q->shapes[row->shape];
    uint64_t bytes =
        qc_bench_bytes(qc_bench_weight_bytes(row->scheme, s->n, s->k), row->m, s->n, s->k);
    double us = row->us.median;
    char cell[CELL_BYTES];
    qc_table_put(t, s->layer);
    qc_table_number(t, row->m);
    qc_table_put(t, qc_bench_scheme_name(row->scheme));
    qc_table_put(t, row->path);
    qc_table_put(t, digits(cell, us));
    qc_table_put(t, range(cell, row->us));
    qc_table_put(t, us > 0 ? digits(cell, (double)bytes / us / 1e3) : NULL);
    qc_table_put(t, us > 0 ? digits(cell, qc_bench_flops(row->m, s->n, s->k) / us / 1e6) : NULL);
    qc_table_putf(t, "%.0f%%", 100 * qc_bench_of_roof(q, r, row));
    qc_table_put(t, row->dense.samples ? digits(cell, row->dense.median) : NULL);
    put_times(t, row->ratio.samples > 0, row->ratio.median);
}

static void text_layers(qc_table *t, const qc_bench_request *q, const qc_bench_result *r,
                        uint32_t first)
{
    qc_bench_layer l;
    char cell[CELL_BYTES];
    for (uint32_t m = 0; m < q->m_count; m++)
        for (uint32_t i = 0; i < q->scheme_count; i++) {
            if (!qc_bench_layer_of(q, r, first, q->schemes[i], q->m[m], &l))
                continue;
            qc_table_put(t, "one decoder layer");
            qc_table_number(t, l.m);
            qc_table_put(t, qc_bench_scheme_name(l.scheme));
            qc_table_put(t, "");
            qc_table_put(t, digits(cell, l.us));
            for (unsigned empty = 0; empty < 4; empty++)
                qc_table_put(t, "");
            qc_table_put(t, l.dense_us > 0 ? digits(cell, l.dense_us) : NULL);
            put_times(t, l.dense_us > 0, l.us > 0 ? l.dense_us / l.us : 0);
        }
}

static void text_model(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                       qc_arena *arena, qc_strbuf *out)
{
    char columns[128];
    const char *model = q->shapes[first].model, *dense = qc_bench_dtype_name(q);
    qc_table t;
    (void)snprintf(columns, sizeof columns,
                   "weight|>M|scheme|kernel|>us|>p10 to p90|>GB/s|>TFLOP/s|>roof|>%s us|>x %s",
                   dense, dense);
    qc_table_begin(&t, arena, columns);
    for (uint32_t i = 0; i < r->row_count; i++)
        if (strcmp(q->shapes[r->rows[i].shape].model, model) == 0)
            text_row(&t, q, r, &r->rows[i]);
    text_layers(&t, q, r, first);
    if (t.cell_count)
        qc_strbuf_putf(out, "\n%s\n", model);
    qc_table_print(&t, 2, out);
}

/* ---- packed weights, for a terminal and for Markdown ---- */

static void packed_table(qc_table *t, const qc_bench_request *q, const qc_bench_result *r,
                         const char *model, qc_arena *arena)
{
    char cell[CELL_BYTES];
    qc_table_begin(t, arena,
                   "weight|>M|scheme|file's layout|>us|packed|>us|>file / packed|>p10 to p90");
    for (uint32_t i = 0; i < r->row_count; i++) {
        const qc_bench_row *row = &r->rows[i];
        const qc_bench_shape *s = &q->shapes[row->shape];
        if (strcmp(s->model, model) != 0 || !row->packed.us.samples)
            continue;
        qc_table_put(t, s->layer);
        qc_table_number(t, row->m);
        qc_table_put(t, qc_bench_scheme_name(row->scheme));
        qc_table_put(t, row->path);
        qc_table_put(t, digits(cell, row->us.median));
        qc_table_put(t, row->packed.path);
        qc_table_put(t, digits(cell, row->packed.us.median));
        qc_table_putf(t, "%.2fx", row->packed.ratio.median);
        qc_table_put(t, range(cell, row->packed.ratio));
    }
}

static void packing_table(qc_table *t, const qc_bench_request *q, const qc_bench_result *r,
                          const char *model, qc_arena *arena)
{
    char cell[CELL_BYTES], bytes[QC_SIZE_TEXT_BYTES];
    qc_table_begin(t, arena, "weight|scheme|>in the file|>packed|>us to pack|>p10 to p90");
    for (uint32_t i = 0; i < r->packing_count; i++) {
        const qc_bench_packing *p = &r->packings[i];
        const qc_bench_shape *s = &q->shapes[p->shape];
        if (strcmp(s->model, model) != 0)
            continue;
        qc_table_put(t, s->layer);
        qc_table_put(t, qc_bench_scheme_name(p->scheme));
        qc_table_put(t, qc_text_bytes(bytes, p->file_bytes));
        qc_table_put(t, qc_text_bytes(bytes, p->packed_bytes));
        qc_table_put(t, digits(cell, p->us.median));
        qc_table_put(t, range(cell, p->us));
    }
}

static void put_markdown(const qc_table *t, qc_strbuf *out)
{
    const unsigned columns = t->column_count;
    for (unsigned c = 0; c < columns; c++)
        qc_strbuf_putf(out, "| %s ", t->titles[c]);
    qc_strbuf_puts(out, "|\n");
    for (unsigned c = 0; c < columns; c++)
        qc_strbuf_puts(out, "|--");
    qc_strbuf_puts(out, "|\n");
    for (size_t i = 0; i < t->cell_count; i++)
        qc_strbuf_putf(out, "| %s %s", t->cells[i], (i + 1) % columns ? "" : "|\n");
}

static void put_packed(const qc_bench_request *q, const qc_bench_result *r, const char *model,
                       int markdown, qc_arena *arena, qc_strbuf *out)
{
    static const char *const names[] = {"packed weights", "packing"};
    for (unsigned i = 0; i < 2; i++) {
        qc_table t;
        (i ? packing_table : packed_table)(&t, q, r, model, arena);
        if (!t.cell_count)
            continue;
        qc_strbuf_putf(out, markdown ? "\n#### %s, %s\n\n" : "\n%s, %s\n", model, names[i]);
        if (markdown)
            put_markdown(&t, out);
        else
            qc_table_print(&t, 2, out);
    }
}

#define SHORT_ROTATIONS                                                                            \
    "In %u the weights together are not more than four times the L2 cache: memory was too small, " \
    "or the weights are; the cache may have helped.\n"

/* The number of rows whose weights the cache may have helped with. */
static uint32_t short_rotations(const qc_bench_result *r)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < r->row_count; i++)
        count += r->rows[i].turn.bytes <= 4 * r->device.l2_bytes ||
                 (r->rows[i].packed.us.samples &&
                  r->rows[i].packed.turn.bytes <= 4 * r->device.l2_bytes);
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
    qc_strbuf_putf(out, "%s %s M=%llu %s: %s, %s us", s->model, s->layer, (unsigned long long)t->m,
                   qc_bench_scheme_name(t->scheme), qc_bench_plan_text(plan, &t->plan),
                   digits(us, t->plan_us.median));
    if (!t->better)
        return qc_strbuf_addf(out, err, ", the best of %u", t->candidates);
    return qc_strbuf_addf(out, err, "; better: %s, %s us, %.2fx",
                          qc_bench_plan_text(plan, &t->other), digits(us, t->us.median),
                          t->ratio.median);
}

static void tune_row(qc_table *t, const qc_bench_request *q, const qc_bench_tuned *b)
{
    char plan[QC_BENCH_PLAN_BYTES], cell[CELL_BYTES];
    qc_table_put(t, q->shapes[b->shape].layer);
    qc_table_number(t, b->m);
    qc_table_put(t, qc_bench_scheme_name(b->scheme));
    qc_table_number(t, b->candidates);
    qc_table_put(t, qc_bench_plan_text(plan, &b->plan));
    qc_table_put(t, digits(cell, b->plan_us.median));
    qc_table_put(t, b->better ? qc_bench_plan_text(plan, &b->other) : "the same");
    if (b->better) {
        qc_table_put(t, digits(cell, b->us.median));
        put_times(t, 1, b->ratio.median);
        qc_table_put(t, range(cell, b->ratio));
    }
    qc_table_end_row(t);
}

static void tune_model(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                       qc_arena *arena, qc_strbuf *out)
{
    const char *model = q->shapes[first].model;
    qc_table t;
    qc_table_begin(&t, arena, "weight|>M|scheme|>of|planned|>us|best|>us|>gain|>p10 to p90");
    for (uint32_t i = 0; i < r->tuned_count; i++)
        if (strcmp(q->shapes[r->tuned[i].shape].model, model) == 0)
            tune_row(&t, q, &r->tuned[i]);
    if (t.cell_count)
        qc_strbuf_putf(out, "\n%s\n", model);
    qc_table_print(&t, 2, out);
}

static void tune_top(const qc_bench_device *d, qc_strbuf *out)
{
    qc_strbuf_putf(out, "%s, sm_%u, %u multiprocessors\n", d->name, d->sm, d->multiprocessors);
    if (d->no_gemm)
        qc_strbuf_putf(out, "Without dequant-gemm: %s.\n", d->no_gemm);
}

qc_status qc_bench_text(const qc_bench_request *q, const qc_bench_result *r, qc_arena *arena,
                        qc_strbuf *out, qc_error *err)
{
    char time[QC_SIZE_TEXT_BYTES];
    uint32_t better = 0;
    if (q->tune)
        tune_top(&r->device, out);
    else
        text_top(r, arena, out);
    for (uint32_t i = 0; i < q->shape_count; i++)
        if (qc_bench_first_of_model(q, i)) {
            (q->tune ? tune_model : text_model)(q, r, i, arena, out);
            put_packed(q, r, q->shapes[i].model, 0, arena, out);
        }
    for (uint32_t i = 0; i < r->tuned_count; i++)
        better += r->tuned[i].better != 0;
    if (q->tune)
        qc_strbuf_putf(out, "\nA better choice than the plan's for %u of %u.", better,
                       r->tuned_count);
    qc_strbuf_putf(out, "\n%u measured in %s", r->row_count + r->tuned_count,
                   qc_text_seconds(time, r->seconds));
    if (r->left_out)
        qc_strbuf_putf(out, ", %u left out: no time or no memory", r->left_out);
    qc_strbuf_puts(out, "\n");
    if (q->tuned_by)
        qc_strbuf_putf(out, "Kernels as %s says.\n", q->tuned_by);
    if (short_rotations(r))
        qc_strbuf_putf(out, SHORT_ROTATIONS, short_rotations(r));
    return list_failed(q, r, out, err);
}

/* ---- Markdown ---- */

static void markdown_top(const qc_bench_request *q, const qc_bench_result *r, qc_arena *arena,
                         qc_strbuf *out)
{
    const qc_bench_device *d = &r->device;
    qc_table t;
    qc_strbuf_putf(out, "### %s\n\nsm_%u, %u multiprocessors; kernels of %s; x and y in %s.\n\n",
                   d->name, d->sm, d->multiprocessors, d->build, qc_bench_dtype_name(q));
    roof_table(&t, r, arena);
    put_markdown(&t, out);
    qc_strbuf_puts(out, "\n");
    kernel_table(&t, r, arena);
    put_markdown(&t, out);
}

/* "3.52x, 78%" */
static void markdown_cell(const qc_bench_request *q, const qc_bench_result *r,
                          const qc_bench_row *row, qc_strbuf *out)
{
    if (row && row->ratio.samples)
        qc_strbuf_putf(out, " %.2fx,", row->ratio.median);
    if (row)
        qc_strbuf_putf(out, " %.0f%% |", 100 * qc_bench_of_roof(q, r, row));
    else
        qc_strbuf_puts(out, " - |");
}

static void markdown_table(const qc_bench_request *q, const qc_bench_result *r, uint32_t first,
                           qc_bench_scheme scheme, qc_strbuf *out)
{
    const char *model = q->shapes[first].model;
    int whole = q->shapes[first].count > 0;
    qc_bench_layer l;
    char cell[CELL_BYTES];
    qc_strbuf_putf(out, "\n#### %s, %s\n\n| M |", model, qc_bench_scheme_name(scheme));
    for (uint32_t i = first; i < q->shape_count; i++)
        if (strcmp(q->shapes[i].model, model) == 0)
            qc_strbuf_putf(out, " %s, %llu x %llu |", q->shapes[i].layer,
                           (unsigned long long)q->shapes[i].n, (unsigned long long)q->shapes[i].k);
    qc_strbuf_putf(out, "%s\n|--|", whole ? " all of a layer |" : "");
    for (uint32_t i = first; i < q->shape_count; i++)
        if (strcmp(q->shapes[i].model, model) == 0)
            qc_strbuf_puts(out, "--|");
    qc_strbuf_puts(out, whole ? "--|\n" : "\n");
    for (uint32_t m = 0; m < q->m_count; m++) {
        qc_strbuf_putf(out, "| %llu |", (unsigned long long)q->m[m]);
        for (uint32_t i = first; i < q->shape_count; i++)
            if (strcmp(q->shapes[i].model, model) == 0)
                markdown_cell(q, r, qc_bench_find(r, i, scheme, q->m[m]), out);
        if (!whole)
            qc_strbuf_puts(out, "\n");
        else if (!qc_bench_layer_of(q, r, first, scheme, q->m[m], &l))
            qc_strbuf_puts(out, " - |\n");
        else if (l.dense_us > 0 && l.us > 0)
            qc_strbuf_putf(out, " %.2fx, %s us |\n", l.dense_us / l.us, digits(cell, l.us));
        else
            qc_strbuf_putf(out, " %s us |\n", digits(cell, l.us));
    }
}

/* Writes what a table of cells does not tell, because a page outlives the terminal in which it was
 * made. */
static qc_status markdown_notes(const qc_bench_request *q, const qc_bench_result *r, qc_strbuf *out,
                                qc_error *err)
{
    if (r->device.no_gemm)
        qc_strbuf_putf(out, "\nNo comparison with cuBLAS: %s.\n", r->device.no_gemm);
    if (q->tuned_by)
        qc_strbuf_puts(out, "\nKernels were chosen by a table of `qconv bench --tune`.\n");
    if (r->left_out)
        qc_strbuf_putf(out, "\n%u left out: no time or no memory.\n", r->left_out);
    if (short_rotations(r))
        qc_strbuf_putf(out, "\n" SHORT_ROTATIONS, short_rotations(r));
    return list_failed(q, r, out, err);
}

qc_status qc_bench_markdown(const qc_bench_request *q, const qc_bench_result *r, qc_arena *arena,
                            qc_strbuf *out, qc_error *err)
{
    markdown_top(q, r, arena, out);
    for (uint32_t s = 0; s < q->shape_count; s++) {
        if (!qc_bench_first_of_model(q, s))
            continue;
        for (uint32_t i = 0; i < q->scheme_count; i++)
            markdown_table(q, r, s, q->schemes[i], out);
        put_packed(q, r, q->shapes[s].model, 1, arena, out);
    }
    return markdown_notes(q, r, out, err);
}

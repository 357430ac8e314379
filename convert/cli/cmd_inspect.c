#include "convert/cli/commands.h"

#include "base/text.h"
#include "convert/report/inspect_facts.h"
#include "convert/report/inspect_json.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_TEXT_BYTES (1u << 30)

/* "nf4 b64 dq" */
static void scheme_text(char *out, size_t out_bytes, const qc_tensor_facts *tf)
{
    const qc_stored_weight *s = tf->stored;
    if (!tf->scheme)
        out[0] = '\0';
    else if (!s || s->stored_as == QC_SCHEME_INT8_ROWS)
        (void)snprintf(out, out_bytes, "%s", tf->scheme);
    else
        (void)snprintf(out, out_bytes, "%s b%" PRIu64 "%s", tf->scheme, s->block_elems,
                       s->nested_block_elems ? " dq" : "");
}

static qc_status add_head(const qc_facts *f, qc_strbuf *out, qc_error *err)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s", f->model->path);
    qc_console_printable(path);
    const char *kind = f->manifest || f->manifest_trouble ? "qconv output"
                       : f->model->is_dir                 ? "checkpoint"
                                                          : "one file";
    QC_TRY(qc_strbuf_addf(out, err, "%s: %s", path, kind));
    if (f->model_type) {
        char type[128];
        (void)snprintf(type, sizeof type, "%s", f->model_type);
        qc_console_printable(type);
        QC_TRY(qc_strbuf_addf(out, err, ", model type %s%s", type,
                              f->known_type ? "" : " (not known to qconv)"));
    }
    return qc_strbuf_adds(out, "\n", err);
}

static qc_status add_manifest(const qc_manifest *m, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], text[256];
    uint64_t bytes = 0;
    for (size_t i = 0; i < m->source_count; i++)
        bytes += m->sources[i].bytes;
    QC_TRY(qc_strbuf_addf(out, err, "  made by   qconv %s, --to %s", m->qconv_version, m->to));
    if (m->block_elems)
        QC_TRY(qc_strbuf_addf(out, err, ", block size %" PRIu64 ", %sdouble quantization",
                              m->block_elems, m->double_quant ? "" : "no "));
    if (m->scale)
        QC_TRY(qc_strbuf_addf(out, err, ", scale %s", m->scale));
    if (m->compressed)
        QC_TRY(qc_strbuf_addf(out, err, ", zstd level %d", m->level));
    QC_TRY(qc_strbuf_addf(out, err, "\n  from      %zu file%s, %s\n", m->source_count,
                          m->source_count == 1 ? "" : "s", qc_text_bytes(size, bytes)));
    if (m->calibration) {
        const qc_manifest_calibration *c = m->calibration;
        (void)snprintf(text, sizeof text, "%s", c->hessians ? c->hessians : c->text);
        qc_console_printable(text);
        QC_TRY(qc_strbuf_addf(out, err, "  calibrated with %s", text));
        if (!c->hessians)
            QC_TRY(qc_strbuf_addf(out, err, ", %" PRIu64 " tokens in windows of %" PRIu64,
                                  c->tokens, c->context));
        if (c->damping > 0)
            QC_TRY(qc_strbuf_addf(out, err, ", damping %g", c->damping));
        QC_TRY(qc_strbuf_adds(out, "\n", err));
    }
    for (size_t i = 0; i < m->rule_count; i++) {
        (void)snprintf(text, sizeof text, "%s", m->rules[i]);
        qc_console_printable(text);
        QC_TRY(qc_strbuf_addf(out, err, "  rule      %s\n", text));
    }
    return QC_OK;
}

static qc_status add_files(const qc_facts *f, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES];
    qc_table table;
    qc_table_init(&table, f->arena);
    qc_table_column(&table, "file", QC_ALIGN_LEFT);
    qc_table_column(&table, "tensors", QC_ALIGN_RIGHT);
    qc_table_column(&table, "tensor bytes", QC_ALIGN_RIGHT);
    qc_table_column(&table, "on disk", QC_ALIGN_RIGHT);
    for (size_t i = 0; i < f->model->file_count; i++) {
        const qc_ckpt_file *file = &f->model->files[i];
        QC_TRY(qc_table_cellf(&table, err, "%s%s", file->name, file->compressed ? ".zst" : ""));
        QC_TRY(qc_table_cellf(&table, err, "%zu", file->tensor_count));
        QC_TRY(qc_table_cell(&table, qc_text_bytes(size, file->tensor_bytes), err));
        QC_TRY(qc_table_cell(&table, qc_text_bytes(size, file->file_bytes), err));
    }
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    return qc_table_render(&table, 0, out, err);
}

static qc_status add_tensor(qc_table *table, const qc_ckpt_tensor *t, const qc_tensor_facts *tf,
                            int logical, qc_error *err)
{
    char shape[QC_SHAPE_TEXT_BYTES], size[QC_SIZE_TEXT_BYTES], scheme[64];
    (void)qc_text_shape(shape, logical ? tf->dims : t->dims, logical ? tf->ndim : t->ndim);
    scheme_text(scheme, sizeof scheme, tf);
    QC_TRY(qc_table_cell(table, t->name, err));
    QC_TRY(qc_table_cell(table, qc_dtype_name(t->dtype), err));
    QC_TRY(qc_table_cell(table, shape, err));
    QC_TRY(qc_table_cell(table, qc_text_bytes(size, logical ? tf->bytes : t->bytes), err));
    QC_TRY(qc_table_cell(table, tf->role ? tf->role : "", err));
    QC_TRY(qc_table_cell(table, scheme, err));
    if (tf->written && tf->written->has_error) {
        QC_TRY(qc_table_cellf(table, err, "%.3e", tf->written->rel_mse));
        return qc_table_cellf(table, err, "%.3e", tf->written->max_err);
    }
    QC_TRY(qc_table_cell(table, "", err));
    return qc_table_cell(table, "", err);
}

/* A quantized weight is one line, in its logical shape and with the bytes of its scales; with -v
 * every stored tensor has a line of its own. */
static qc_status add_tensors(const qc_facts *f, int verbose, qc_strbuf *out, qc_error *err)
{
    qc_table table;
    uint64_t hidden = 0;
    qc_table_init(&table, f->arena);
    qc_table_column(&table, "tensor", QC_ALIGN_LEFT);
    qc_table_column(&table, "dtype", QC_ALIGN_LEFT);
    qc_table_column(&table, "shape", QC_ALIGN_LEFT);
    qc_table_column(&table, "bytes", QC_ALIGN_RIGHT);
    qc_table_column(&table, "role", QC_ALIGN_LEFT);
    qc_table_column(&table, "scheme", QC_ALIGN_LEFT);
    qc_table_column(&table, "rel MSE", QC_ALIGN_RIGHT);
    qc_table_column(&table, "max error", QC_ALIGN_RIGHT);
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        uint32_t t = f->order[i];
        if (!verbose && f->tensors[t].owner != QC_NO_OWNER)
            hidden++;
        else
            QC_TRY(add_tensor(&table, &f->model->tensors[t], &f->tensors[t], !verbose, err));
    }
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    QC_TRY(qc_table_render(&table, 0, out, err));
    if (hidden)
        QC_TRY(qc_strbuf_addf(out, err,
                              "%" PRIu64 " state tensor%s counted with the weights they belong to; "
                              "-v lists them\n",
                              hidden, hidden == 1 ? " is" : "s are"));
    return QC_OK;
}

/* with_bits is 0 for the table by dtype, because the parts of a weight fall into several rows of
 * that. */
static qc_status add_sums(const qc_facts *f, const char *title, const qc_facts_sum *sums,
                          unsigned count, int with_bits, qc_strbuf *out, qc_error *err)
{
    char size[QC_SIZE_TEXT_BYTES], weights[QC_SIZE_TEXT_BYTES];
    qc_table table;
    qc_table_init(&table, f->arena);
    qc_table_column(&table, title, QC_ALIGN_LEFT);
    qc_table_column(&table, "tensors", QC_ALIGN_RIGHT);
    qc_table_column(&table, "weights", QC_ALIGN_RIGHT);
    qc_table_column(&table, "bytes", QC_ALIGN_RIGHT);
    qc_table_column(&table, "bits/weight", QC_ALIGN_RIGHT);
    for (unsigned i = 0; i < count; i++) {
        if (!sums[i].tensors)
            continue;
        QC_TRY(qc_table_cell(&table, sums[i].name, err));
        QC_TRY(qc_table_cellf(&table, err, "%" PRIu64, sums[i].tensors));
        QC_TRY(qc_table_cell(&table, qc_text_count(weights, sums[i].weights), err));
        QC_TRY(qc_table_cell(&table, qc_text_bytes(size, sums[i].bytes), err));
        if (with_bits && sums[i].weights)
            QC_TRY(
                qc_table_cellf(&table, err, "%.3f", qc_facts_bits(sums[i].bytes, sums[i].weights)));
        else
            QC_TRY(qc_table_cell(&table, "", err));
    }
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    return qc_table_render(&table, 0, out, err);
}

static qc_status add_totals(const qc_facts *f, qc_strbuf *out, qc_error *err)
{
    char weights[QC_SIZE_TEXT_BYTES], bytes[QC_SIZE_TEXT_BYTES], disk[QC_SIZE_TEXT_BYTES];
    QC_TRY(add_sums(f, "dtype", f->by_dtype, QC_DTYPE_COUNT, 0, out, err));
    QC_TRY(add_sums(f, "scheme", f->by_scheme, f->scheme_count, 1, out, err));
    QC_TRY(qc_strbuf_addf(out, err, "\ntotal: %s weight%s in %zu tensor%s, %s, %s on disk",
                          qc_text_count(weights, f->weights), qc_plural(f->weights),
                          f->model->tensor_count, qc_plural(f->model->tensor_count),
                          qc_text_bytes(bytes, f->model->tensor_bytes),
                          qc_text_bytes(disk, f->file_bytes)));
    if (f->weights)
        QC_TRY(qc_strbuf_addf(out, err, ", %.3f bits per weight",
                              qc_facts_bits(f->model->tensor_bytes, f->weights)));
    QC_TRY(qc_strbuf_adds(out, "\n", err));
    if (f->uncounted)
        QC_TRY(qc_strbuf_addf(out, err, "%" PRIu64 " integer tensor%s not counted as weights\n",
                              f->uncounted, f->uncounted == 1 ? " is" : "s are"));
    return QC_OK;
}

static qc_status inspect_text(const qc_facts *f, const qc_options *o, qc_strbuf *out, qc_error *err)
{
    QC_TRY(add_head(f, out, err));
    if (f->manifest)
        QC_TRY(add_manifest(f->manifest, out, err));
    QC_TRY(add_files(f, out, err));
    QC_TRY(add_tensors(f, o->call.verbose > 0, out, err));
    return add_totals(f, out, err);
}

qc_status qc_cmd_inspect(const qc_options *o, qc_error *err)
{
    qc_facts facts;
    qc_strbuf out;
    QC_TRY(qc_facts_gather(&facts, &o->call, err));
    qc_strbuf_init(&out, MAX_TEXT_BYTES);
    for (size_t i = 0; i < facts.model->warning_count; i++)
        qc_console_warn(&o->call, "%s", facts.model->warnings[i]);
    if (facts.recipe_trouble)
        qc_console_warn(&o->call, "no roles: %s", facts.recipe_trouble);
    if (facts.manifest_trouble)
        qc_console_warn(&o->call, "%s", facts.manifest_trouble);
    qc_status st =
        o->call.json ? qc_inspect_json(&facts, &out, err) : inspect_text(&facts, o, &out, err);
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    qc_checkpoint_close(facts.model);
    return st;
}

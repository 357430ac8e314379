#include "convert/cli/commands.h"

#include "base/text.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "convert/verify/inspect_facts.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define MAX_TEXT_BYTES (1u << 30)

/* "nf4 b64 dq", "w4a16 b128 zero points act-order", "gptq b128 4 bit" */
static const char *scheme_text(char out[128], const qc_tensor_facts *tf)
{
    const qc_coded_weight *n = tf->is_packed ? tf->coded : NULL;
    const int named = n && (n->coding == QC_CODING_GPTQ || n->coding == QC_CODING_AWQ);
    char bits[16] = "", scheme[QC_SCHEME_TEXT_BYTES];
    if (named) /* by its tool, so the name tells no bits, and zero points are always there */
        (void)snprintf(bits, sizeof bits, " %u bit", n->bits);
    qc_scheme_text(scheme, tf->scheme ? tf->scheme : "", tf->block_elems);
    (void)snprintf(out, 128, "%s%s%s%s%s%s%s", scheme, bits,
                   tf->stored && tf->stored->nested_block_elems ? " dq" : "",
                   n && !named && n->zeros != QC_NO_TENSOR ? " zero points" : "",
                   n && n->group_index != QC_NO_TENSOR ? " act-order" : "",
                   n && n->tile_rows > 1 ? " one scale" : "",
                   n && n->said.static_activations ? " static activations" : "");
    return out;
}

static void put_head(const qc_facts *f, qc_strbuf *out)
{
    const char *kind = f->manifest || f->manifest_trouble ? "qconv output"
                       : f->model->is_dir                 ? "checkpoint"
                                                          : "one file";
    qc_strbuf_show(out, "%s: %s", f->model->path, kind);
    if (f->model_type)
        qc_strbuf_show(out, ", model type %s%s", f->model_type,
                       f->known_type ? "" : " (not known to qconv)");
    qc_strbuf_puts(out, "\n");
}

static void put_manifest(const qc_facts *f, qc_strbuf *out)
{
    const qc_manifest *m = f->manifest;
    const qc_manifest_calibration *c = m->calibration;
    char size[QC_SIZE_TEXT_BYTES];
    uint64_t bytes = 0;
    int integers = 0;
    for (size_t i = 0; i < f->model->tensor_count; i++)
        integers |= f->tensors[i].is_packed;
    for (size_t i = 0; i < m->source_count; i++)
        bytes += m->sources[i].bytes;
    qc_strbuf_putf(out, "  made by   qconv %s, --to %s", m->qconv_version, m->to);
    if (m->block_elems)
        qc_strbuf_putf(out, ", block size %" PRIu64 "%s", m->block_elems,
                       integers          ? ""
                       : m->double_quant ? ", double quantization"
                                         : ", no double quantization");
    if (m->scale)
        qc_strbuf_putf(out, ", scale %s", m->scale);
    if (m->compressed)
        qc_strbuf_putf(out, ", zstd level %d", m->level);
    qc_strbuf_putf(out, "\n  from      %zu file%s, %s\n", m->source_count,
                   qc_plural(m->source_count), qc_text_bytes(size, bytes));
    for (size_t i = 0; i < m->adapter_count; i++) {
        qc_strbuf_show(out, "  adapter   %s, %s", m->adapters[i].name,
                       qc_text_bytes(size, m->adapters[i].bytes));
        if (m->adapters[i].scale != 1.0)
            qc_strbuf_putf(out, ", times %g", m->adapters[i].scale);
        qc_strbuf_puts(out, "\n");
    }
    if (c) {
        qc_strbuf_show(out, "  calibrated with %s", c->hessians ? c->hessians : c->text);
        if (!c->hessians)
            qc_strbuf_putf(out, ", %" PRIu64 " tokens in windows of %" PRIu64, c->tokens,
                           c->context);
        if (c->damping > 0)
            qc_strbuf_putf(out, ", damping %g", c->damping);
        qc_strbuf_putf(out, ", %s-sided\n", c->sided);
    }
    for (size_t i = 0; i < m->rule_count; i++)
        qc_strbuf_show(out, "  rule      %s\n", m->rules[i]);
}

static void put_files(const qc_facts *f, qc_strbuf *out)
{
    qc_table table;
    qc_table_begin(&table, f->arena, "file|>tensors|>tensor bytes|>on disk");
    for (size_t i = 0; i < f->model->file_count; i++) {
        const qc_checkpoint_file *file = &f->model->files[i];
        qc_table_putf(&table, "%s%s", file->name, file->compressed ? ".zst" : "");
        qc_table_number(&table, file->tensor_count);
        qc_table_bytes(&table, file->tensor_bytes);
        qc_table_bytes(&table, file->file_bytes);
    }
    qc_strbuf_puts(out, "\n");
    qc_table_print(&table, 0, out);
}

/* A quantized weight is one line, in its logical shape and with the bytes of its scales; with -v
 * every stored tensor has a line of its own. */
static void put_tensors(const qc_facts *f, int verbose, qc_strbuf *out)
{
    char shape[QC_SHAPE_TEXT_BYTES], scheme[128];
    qc_table table;
    uint64_t hidden = 0;
    qc_table_begin(&table, f->arena, "tensor|dtype|shape|>bytes|role|scheme|>rel MSE|>max error");
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &f->model->tensors[f->order[i]];
        const qc_tensor_facts *tf = &f->tensors[f->order[i]];
        if (!verbose && tf->owner != QC_NO_TENSOR) {
            hidden++;
            continue;
        }
        qc_table_put(&table, t->name);
        qc_table_put(&table, qc_dtype_name(t->dtype));
        qc_table_put(&table, verbose ? qc_text_shape(shape, t->dims, t->ndim)
                                     : qc_text_shape(shape, tf->dims, tf->ndim));
        qc_table_bytes(&table, verbose ? t->bytes : tf->bytes);
        qc_table_put(&table, tf->role ? tf->role : "");
        qc_table_put(&table, scheme_text(scheme, tf));
        if (tf->written && tf->written->has_error) {
            qc_table_putf(&table, "%.3e", tf->written->rel_mse);
            qc_table_putf(&table, "%.3e", tf->written->max_err);
        }
        qc_table_end_row(&table);
    }
    qc_strbuf_puts(out, "\n");
    qc_table_print(&table, 0, out);
    if (hidden)
        qc_strbuf_putf(
            out,
            "%" PRIu64
            " state tensor%s %s counted with the weights they belong to; -v lists them\n",
            hidden, qc_plural(hidden), qc_are(hidden));
}

/* with_bits is 0 for the table by dtype, because the role tensors of a weight fall into several
 * rows of that. */
static void put_sums(const qc_facts *f, const char *title, const qc_facts_sum *sums, unsigned count,
                     int with_bits, qc_strbuf *out)
{
    qc_table table;
    qc_table_begin(&table, f->arena, title);
    qc_table_columns(&table, ">tensors|>weights|>bytes|>bits/weight");
    for (unsigned i = 0; i < count; i++) {
        if (!sums[i].tensors)
            continue;
        qc_table_put(&table, sums[i].name);
        qc_table_number(&table, sums[i].tensors);
        qc_table_count(&table, sums[i].weights);
        qc_table_bytes(&table, sums[i].bytes);
        if (with_bits && sums[i].weights)
            qc_table_putf(&table, "%.3f", qc_facts_bits(sums[i].bytes, sums[i].weights));
        qc_table_end_row(&table);
    }
    qc_strbuf_puts(out, "\n");
    qc_table_print(&table, 0, out);
}

static void put_totals(const qc_facts *f, qc_strbuf *out)
{
    char weights[QC_SIZE_TEXT_BYTES], bytes[QC_SIZE_TEXT_BYTES], disk[QC_SIZE_TEXT_BYTES];
    put_sums(f, "dtype", f->by_dtype, QC_DTYPE_COUNT, 0, out);
    put_sums(f, "scheme", f->by_scheme, f->scheme_count, 1, out);
    qc_strbuf_putf(out, "\ntotal: %s weight%s in %zu tensor%s, %s, %s on disk",
                   qc_text_count(weights, f->weights), qc_plural(f->weights),
                   f->model->tensor_count, qc_plural(f->model->tensor_count),
                   qc_text_bytes(bytes, f->model->tensor_bytes),
                   qc_text_bytes(disk, f->file_bytes));
    if (f->weights)
        qc_strbuf_putf(out, ", %.3f bits per weight",
                       qc_facts_bits(f->model->tensor_bytes, f->weights));
    qc_strbuf_puts(out, "\n");
    if (f->uncounted)
        qc_strbuf_putf(out, "%" PRIu64 " integer tensor%s %s not counted as weights\n",
                       f->uncounted, qc_plural(f->uncounted), qc_are(f->uncounted));
}

static void put_engines(const qc_facts *f, qc_strbuf *out)
{
    qc_strbuf_puts(out, f->asked ? "\n" : "");
    for (unsigned e = 0; e < QC_ENGINES; e++) {
        unsigned refusals = 0;
        for (unsigned i = 0; i < f->refused.count; i++) {
            if (f->refused.list[i].engine != e)
                continue;
            qc_strbuf_putf(out, "--for %s: %s.\n", qc_engine_rows[e].name,
                           f->refused.list[i].sentence);
            refusals++;
        }
        if (f->asked & 1u << e && refusals == 0)
            qc_strbuf_putf(out, "--for %s: %s loads it.\n", qc_engine_rows[e].name,
                           qc_engine_rows[e].versions);
    }
}

static qc_status inspect(const qc_options *o, qc_facts *facts, qc_strbuf *out, qc_error *err)
{
    if (facts->recipe_trouble && o->engines)
        QC_FAIL(err, QC_ERR_INPUT, "--for: %s", facts->recipe_trouble);
    if (o->engines)
        QC_TRY(qc_facts_ask_engines(facts, o->engines, err));
    for (size_t i = 0; i < facts->model->warning_count; i++)
        qc_console_warn(&o->call, "%s", facts->model->warnings[i]);
    if (facts->recipe_trouble)
        qc_console_warn(&o->call, "the roles of the tensors are not known: %s",
                        facts->recipe_trouble);
    if (facts->manifest_trouble)
        qc_console_warn(&o->call, "%s", facts->manifest_trouble);
    if (o->call.json)
        return qc_inspect_json(facts, out, err);
    put_head(facts, out);
    if (facts->manifest)
        put_manifest(facts, out);
    put_files(facts, out);
    put_tensors(facts, o->call.verbose > 0, out);
    put_totals(facts, out);
    put_engines(facts, out);
    return QC_OK;
}

qc_status qc_cmd_inspect(const qc_options *o, qc_error *err)
{
    qc_facts facts;
    qc_strbuf out;
    QC_TRY(qc_facts_gather(&facts, o->call.arena, o->model, err));
    qc_strbuf_init(&out, MAX_TEXT_BYTES);
    qc_status st = inspect(o, &facts, &out, err);
    st = qc_console_deliver(st, &out, NULL, err);
    qc_checkpoint_close(facts.model);
    QC_TRY(st);
    if (facts.refused.count > 0)
        QC_FAIL(err, QC_ERR_CHECK, "--for %s: %s",
                qc_engine_rows[facts.refused.list[0].engine].name, facts.refused.list[0].sentence);
    return QC_OK;
}

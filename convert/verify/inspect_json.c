/* Writes what `qconv inspect --json` answers; docs/cli.md has its members. */
#include "convert/verify/inspect_facts.h"

#include "formats/manifest_rows.h"

#include <math.h>
#include <string.h>

static void put_manifest(qc_json_writer *w, const qc_manifest *m)
{
    if (!qc_json_begin_object_if(w, "manifest", m != NULL))
        return;
    const char *scale = m->scale; /* NULL where nothing was quantized */
    for (size_t i = 0; i < m->tensor_count && !scale; i++)
        scale = m->tensors[i].has_error ? "absmax" : NULL;
    qc_json_put_text(w, "qconv_version", m->qconv_version);
    qc_json_put_text(w, "to", m->to);
    qc_json_put_u64(w, "block_size", m->block_elems);
    qc_json_put_bool(w, "double_quant", m->double_quant);
    qc_json_put_text(w, "scale", scale);
    qc_manifest_put_calibration(w, m->calibration);
    qc_manifest_put_adapters(w, m);
    qc_json_put_text(w, "rest", m->rest);
    qc_json_put_text(w, "compute_dtype", m->compute_dtype);
    qc_json_put_text(w, "compress", m->compressed ? "zstd" : "none");
    if (m->compressed)
        qc_json_put_u64(w, "level", (uint64_t)m->level);
    qc_json_put_u64(w, "max_shard_bytes", m->max_shard_bytes);
    qc_json_put_texts(w, "rules", m->rules, m->rule_count);
    qc_json_put_list(w, "source", qc_manifest_source_rows, 0, m->sources, m->source_count,
                     sizeof *m->sources);
    qc_json_end(w);
}

static const qc_json_row file_rows[] = {
    QC_JSON_ROW(qc_checkpoint_file, name, TEXT, 0),
    QC_JSON_ROW_AS("tensors", qc_checkpoint_file, tensor_count, SIZE, 0),
    QC_JSON_ROW(qc_checkpoint_file, tensor_bytes, U64, 0),
    QC_JSON_ROW(qc_checkpoint_file, file_bytes, U64, 0),
    QC_JSON_ROW(qc_checkpoint_file, compressed, BOOL, 0),
    {NULL},
};

static const qc_json_row side_rows[] = {
    QC_JSON_ROW_AS("name", qc_tree_file, path, TEXT, 0),
    QC_JSON_ROW(qc_tree_file, bytes, U64, 0),
    {NULL},
};

static const qc_json_row sum_rows[] = {
    QC_JSON_ROW(qc_facts_sum, tensors, U64, 0),
    QC_JSON_ROW(qc_facts_sum, weights, U64, 0),
    QC_JSON_ROW(qc_facts_sum, bytes, U64, 0),
    {NULL},
};

static void put_quantized(qc_json_writer *w, const qc_tensor_facts *tf)
{
    qc_json_put_u64s(w, "logical_shape", tf->dims, tf->ndim);
    qc_json_put_u64(w, "bytes_with_state", tf->bytes);
    if (tf->is_packed) {
        const qc_coded_weight *n = tf->coded;
        qc_json_put_text(w, "logical_dtype", qc_dtype_name(n->dtype));
        qc_json_put_text(w, "format", qc_coding_name(n->coding));
        qc_json_put_u64(w, "bits", qc_coded_bits(n));
        qc_json_put_u64_if(w, "block_size", tf->block_elems > 0, tf->block_elems);
        qc_json_put_bool(w, "zero_points", n->zeros != QC_NO_TENSOR);
        qc_json_put_bool(w, "act_order", n->group_index != QC_NO_TENSOR);
        qc_json_put_bool(w, "static_activations", n->said.static_activations);
    } else if (tf->stored) {
        qc_json_put_text(w, "logical_dtype", qc_dtype_name(tf->stored->dtype));
        if (tf->block_elems == 0)
            return;
        qc_json_put_u64(w, "block_size", tf->block_elems);
        qc_json_put_bool(w, "double_quant", tf->stored->nested_block_elems != 0);
    }
}

static void put_tensors(qc_json_writer *w, const qc_facts *f)
{
    qc_json_begin_list(w, "tensors");
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &f->model->tensors[f->order[i]];
        const qc_tensor_facts *tf = &f->tensors[f->order[i]];
        qc_json_begin_row(w, NULL);
        qc_json_put_text(w, "name", t->name);
        qc_json_put_text(w, "dtype", qc_dtype_name(t->dtype));
        qc_json_put_u64s(w, "shape", t->dims, t->ndim);
        qc_json_put_u64(w, "bytes", t->bytes);
        qc_json_put_path(w, "file", f->model->files[t->file].name);
        qc_json_put_text(w, "role", tf->role);
        qc_json_put_text(w, "scheme", tf->scheme);
        if (tf->scheme)
            put_quantized(w, tf);
        if (tf->is_state && tf->owner != QC_NO_TENSOR)
            qc_json_put_text(w, "state_of", f->model->tensors[tf->owner].name);
        if (tf->written && tf->written->has_error) {
            qc_json_put_double(w, "rel_mse", tf->written->rel_mse);
            qc_json_put_double(w, "max_err", tf->written->max_err);
        }
        if (tf->written && tf->written->outputs)
            qc_json_put_object(w, "calibrated", qc_manifest_output_rows, 0, tf->written->outputs);
        qc_json_end(w);
    }
    qc_json_end(w);
}

static void put_totals(qc_json_writer *w, const qc_facts *f)
{
    qc_json_begin_object(w, "totals");
    qc_json_put_u64(w, "tensors", f->model->tensor_count);
    qc_json_put_u64(w, "state_tensors", f->state_count);
    qc_json_put_u64(w, "integer_tensors", f->uncounted);
    qc_json_put_u64(w, "weights", f->weights);
    qc_json_put_u64(w, "tensor_bytes", f->model->tensor_bytes);
    qc_json_put_u64(w, "file_bytes", f->file_bytes);
    qc_json_put_number(w, "bits_per_weight",
                       f->weights ? qc_facts_bits(f->model->tensor_bytes, f->weights)
                                  : (double)NAN);
    qc_json_begin_object(w, "by_dtype");
    for (unsigned i = 0; i < QC_DTYPE_COUNT; i++)
        if (f->by_dtype[i].tensors)
            qc_json_put_row(w, f->by_dtype[i].name, sum_rows, 0, &f->by_dtype[i]);
    qc_json_end(w);
    qc_json_begin_object(w, "by_scheme");
    for (unsigned i = 0; i < f->scheme_count; i++)
        qc_json_put_row(w, f->by_scheme[i].name, sum_rows, 0, &f->by_scheme[i]);
    qc_json_end(w);
    qc_json_end(w);
}

/* Writes what the engines of --for said of the checkpoint. */
static void put_engines(qc_json_writer *w, const qc_facts *f)
{
    qc_json_begin_list(w, "engines");
    for (unsigned e = 0; e < QC_ENGINES; e++) {
        unsigned refusals = 0;
        if (!(f->asked & 1u << e))
            continue;
        for (unsigned i = 0; i < f->refused.count; i++)
            refusals += f->refused.list[i].engine == e;
        qc_json_begin_object(w, NULL);
        qc_json_put_text(w, "name", qc_engine_rows[e].name);
        qc_json_put_text(w, "versions", qc_engine_rows[e].versions);
        qc_json_put_bool(w, "was_run", 1); /* as all engines of the table were */
        qc_json_put_bool(w, "loads", refusals == 0);
        qc_json_begin_list(w, "refusals");
        for (unsigned i = 0; i < f->refused.count; i++)
            if (f->refused.list[i].engine == e)
                qc_json_put_text(w, NULL, f->refused.list[i].sentence);
        qc_json_end(w);
        qc_json_end(w);
    }
    qc_json_end(w);
}

qc_status qc_inspect_json(const qc_facts *f, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "command", "inspect");
    qc_json_put_path(&w, "path", f->model->path);
    qc_json_put_bool(&w, "is_directory", f->model->is_dir);
    qc_json_put_text(&w, "model_type", f->model_type);
    qc_json_put_bool(&w, "known_type", f->known_type);
    put_manifest(&w, f->manifest);
    qc_json_put_list(&w, "files", file_rows, 0, f->model->files, f->model->file_count,
                     sizeof *f->model->files);
    qc_json_put_list(&w, "side_files", side_rows, 0, f->model->side, f->model->side_count,
                     sizeof *f->model->side);
    put_tensors(&w, f);
    put_totals(&w, f);
    if (f->asked)
        put_engines(&w, f);
    qc_json_begin_list(&w, "warnings");
    for (size_t i = 0; i < f->model->warning_count; i++)
        qc_json_put_text(&w, NULL, f->model->warnings[i]);
    if (f->recipe_trouble)
        qc_json_put_text(&w, NULL, f->recipe_trouble);
    if (f->manifest_trouble)
        qc_json_put_text(&w, NULL, f->manifest_trouble);
    qc_json_end(&w);
    return qc_json_end_text(&w);
}

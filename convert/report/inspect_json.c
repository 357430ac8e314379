#include "convert/report/inspect_json.h"

#include "convert/term/json_members.h"

void qc_calibration_json(qc_json_writer *w, const qc_manifest_calibration *c)
{
    char hex[QC_DIGEST_HEX_BYTES];
    if (!c)
        return;
    qc_jm_begin_object(w, "calibrate");
    if (c->hessians) {
        qc_jm_string(w, "hessians", c->hessians);
    } else {
        qc_digest_hex(&c->digest, hex);
        qc_jm_string(w, "text", c->text);
        qc_jm_string(w, "xxh3_128", hex);
        qc_jm_string(w, "tokenizer", c->tokenizer);
        qc_jm_u64(w, "tokens", c->tokens);
        qc_jm_u64(w, "windows", c->windows);
        qc_jm_u64(w, "context", c->context);
    }
    qc_jm_double(w, "damping", c->damping);
    qc_jw_end_object(w);
}

void qc_sources_json(qc_json_writer *w, const char *key, const qc_manifest *m)
{
    qc_jm_begin_array(w, key);
    for (size_t i = 0; i < m->source_count; i++) {
        char hex[QC_DIGEST_HEX_BYTES];
        qc_digest_hex(&m->sources[i].header, hex);
        qc_jm_begin_row(w);
        qc_jm_string(w, "name", m->sources[i].name);
        qc_jm_u64(w, "bytes", m->sources[i].bytes);
        qc_jm_string(w, "header_xxh3_128", hex);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

void qc_outputs_json(qc_json_writer *w, const char *key, const qc_manifest_outputs *o)
{
    if (!o)
        return;
    qc_jm_begin_object(w, key);
    qc_jm_double(w, "rounded", o->rounded);
    qc_jm_double(w, "calibrated", o->calibrated);
    qc_jw_end_object(w);
}

/* Says how scales were found; NULL where nothing was quantized. */
static const char *scale_of(const qc_manifest *m)
{
    if (m->scale)
        return m->scale;
    for (size_t i = 0; i < m->tensor_count; i++) {
        if (m->tensors[i].has_error)
            return "absmax";
    }
    return NULL;
}

static void put_manifest(qc_json_writer *w, const qc_manifest *m)
{
    if (!qc_jm_begin_object_if(w, "manifest", m != NULL))
        return;
    qc_jm_string(w, "qconv_version", m->qconv_version);
    qc_jm_string(w, "to", m->to);
    qc_jm_u64(w, "block_size", m->block_elems);
    qc_jm_bool(w, "double_quant", m->double_quant);
    qc_jm_string(w, "scale", scale_of(m));
    qc_calibration_json(w, m->calibration);
    qc_jm_string(w, "rest", m->rest);
    qc_jm_string(w, "compute_dtype", m->compute_dtype);
    qc_jm_string(w, "compress", m->compressed ? "zstd" : "none");
    if (m->compressed)
        qc_jm_u64(w, "level", (uint64_t)m->level);
    qc_jm_u64(w, "max_shard_bytes", m->max_shard_bytes);
    qc_jm_begin_array(w, "rules");
    for (size_t i = 0; i < m->rule_count; i++)
        qc_jw_string(w, m->rules[i]);
    qc_jw_end_array(w);
    qc_sources_json(w, "source", m);
    qc_jw_end_object(w);
}

static void put_files(qc_json_writer *w, const qc_facts *f)
{
    qc_jm_begin_array(w, "files");
    for (size_t i = 0; i < f->model->file_count; i++) {
        const qc_ckpt_file *file = &f->model->files[i];
        qc_jm_begin_row(w);
        qc_jm_string(w, "name", file->name);
        qc_jm_u64(w, "tensors", file->tensor_count);
        qc_jm_u64(w, "tensor_bytes", file->tensor_bytes);
        qc_jm_u64(w, "file_bytes", file->file_bytes);
        qc_jm_bool(w, "compressed", file->compressed);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
    qc_jm_begin_array(w, "side_files");
    for (size_t i = 0; i < f->model->side_count; i++) {
        qc_jm_begin_row(w);
        qc_jm_string(w, "name", f->model->side[i].path);
        qc_jm_u64(w, "bytes", f->model->side[i].bytes);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

static void put_quantized(qc_json_writer *w, const qc_tensor_facts *tf)
{
    qc_jm_u64s(w, "logical_shape", tf->dims, tf->ndim);
    qc_jm_u64(w, "bytes_with_state", tf->bytes);
    if (!tf->stored)
        return;
    qc_jm_string(w, "logical_dtype", qc_dtype_name(tf->stored->dtype));
    if (tf->stored->stored_as == QC_SCHEME_INT8_ROWS)
        return;
    qc_jm_u64(w, "block_size", tf->stored->block_elems);
    qc_jm_bool(w, "double_quant", tf->stored->nested_block_elems != 0);
}

static void put_tensors(qc_json_writer *w, const qc_facts *f)
{
    qc_jm_begin_array(w, "tensors");
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_ckpt_tensor *t = &f->model->tensors[f->order[i]];
        const qc_tensor_facts *tf = &f->tensors[f->order[i]];
        qc_jm_begin_row(w);
        qc_jm_string(w, "name", t->name);
        qc_jm_string(w, "dtype", qc_dtype_name(t->dtype));
        qc_jm_u64s(w, "shape", t->dims, t->ndim);
        qc_jm_u64(w, "bytes", t->bytes);
        qc_jm_path(w, "file", f->model->files[t->file].name);
        qc_jm_string(w, "role", tf->role);
        qc_jm_string(w, "scheme", tf->scheme);
        if (tf->scheme)
            put_quantized(w, tf);
        if (tf->is_state && tf->owner != QC_NO_OWNER)
            qc_jm_string(w, "state_of", f->model->tensors[tf->owner].name);
        if (tf->written && tf->written->has_error) {
            qc_jm_double(w, "rel_mse", tf->written->rel_mse);
            qc_jm_double(w, "max_err", tf->written->max_err);
        }
        if (tf->written)
            qc_outputs_json(w, "calibrated", tf->written->outputs);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

static void put_sum(qc_json_writer *w, const qc_facts_sum *s)
{
    qc_jw_key(w, s->name);
    qc_jm_begin_row(w);
    qc_jm_u64(w, "tensors", s->tensors);
    qc_jm_u64(w, "weights", s->weights);
    qc_jm_u64(w, "bytes", s->bytes);
    qc_jw_end_object(w);
}

static void put_totals(qc_json_writer *w, const qc_facts *f)
{
    qc_jm_begin_object(w, "totals");
    qc_jm_u64(w, "tensors", f->model->tensor_count);
    qc_jm_u64(w, "state_tensors", f->state_count);
    qc_jm_u64(w, "integer_tensors", f->uncounted);
    qc_jm_u64(w, "weights", f->weights);
    qc_jm_u64(w, "tensor_bytes", f->model->tensor_bytes);
    qc_jm_u64(w, "file_bytes", f->file_bytes);
    qc_jm_number(w, "bits_per_weight",
                 f->weights ? qc_facts_bits(f->model->tensor_bytes, f->weights) : (double)NAN);
    qc_jm_begin_object(w, "by_dtype");
    for (unsigned i = 0; i < QC_DTYPE_COUNT; i++)
        if (f->by_dtype[i].tensors)
            put_sum(w, &f->by_dtype[i]);
    qc_jw_end_object(w);
    qc_jm_begin_object(w, "by_scheme");
    for (unsigned i = 0; i < f->scheme_count; i++)
        put_sum(w, &f->by_scheme[i]);
    qc_jw_end_object(w);
    qc_jw_end_object(w);
}

qc_status qc_inspect_json(const qc_facts *f, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "inspect");
    qc_jm_path(&w, "path", f->model->path);
    qc_jm_bool(&w, "is_directory", f->model->is_dir);
    qc_jm_string(&w, "model_type", f->model_type);
    qc_jm_bool(&w, "known_type", f->known_type);
    put_manifest(&w, f->manifest);
    put_files(&w, f);
    put_tensors(&w, f);
    put_totals(&w, f);
    qc_jm_begin_array(&w, "warnings");
    for (size_t i = 0; i < f->model->warning_count; i++)
        qc_jw_string(&w, f->model->warnings[i]);
    if (f->recipe_trouble)
        qc_jw_string(&w, f->recipe_trouble);
    if (f->manifest_trouble)
        qc_jw_string(&w, f->manifest_trouble);
    qc_jw_end_array(&w);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

/* Writes what `qconv inspect --json` and `qconv report --json` answer; docs/cli.md and
 * docs/report.md have their members. */
#include "convert/model/recipe_coded.h"
#include "convert/report/report_codes.h"
#include "formats/manifest_rows.h"

#include <math.h>
#include <string.h>

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
    if (!qc_json_member_begin_object_if(w, "manifest", m != NULL))
        return;
    qc_json_member_string(w, "qconv_version", m->qconv_version);
    qc_json_member_string(w, "to", m->to);
    qc_json_member_u64(w, "block_size", m->block_elems);
    qc_json_member_bool(w, "double_quant", m->double_quant);
    qc_json_member_string(w, "scale", scale_of(m));
    qc_manifest_put_calibration(w, m->calibration);
    qc_manifest_put_adapters(w, m);
    qc_json_member_string(w, "rest", m->rest);
    qc_json_member_string(w, "compute_dtype", m->compute_dtype);
    qc_json_member_string(w, "compress", m->compressed ? "zstd" : "none");
    if (m->compressed)
        qc_json_member_u64(w, "level", (uint64_t)m->level);
    qc_json_member_u64(w, "max_shard_bytes", m->max_shard_bytes);
    qc_json_member_strings(w, "rules", m->rules, m->rule_count);
    qc_json_write_list(w, "source", qc_manifest_source_rows, 0, m->sources, m->source_count,
                       sizeof *m->sources);
    qc_json_write_end_object(w);
}

static const qc_json_row side_rows[] = {
    QC_JSON_ROW_AS("name", qc_tree_file, path, TEXT, 0),
    QC_JSON_ROW(qc_tree_file, bytes, U64, 0),
    {NULL},
};

static void put_files(qc_json_writer *w, const qc_facts *f)
{
    qc_json_member_begin_array(w, "files");
    for (size_t i = 0; i < f->model->file_count; i++) {
        const qc_checkpoint_file *file = &f->model->files[i];
        qc_json_member_begin_row(w);
        qc_json_member_string(w, "name", file->name);
        qc_json_member_u64(w, "tensors", file->tensor_count);
        qc_json_member_u64(w, "tensor_bytes", file->tensor_bytes);
        qc_json_member_u64(w, "file_bytes", file->file_bytes);
        qc_json_member_bool(w, "compressed", file->compressed);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
    qc_json_write_list(w, "side_files", side_rows, 0, f->model->side, f->model->side_count,
                       sizeof *f->model->side);
}

static void put_quantized(qc_json_writer *w, const qc_tensor_facts *tf)
{
    qc_json_member_u64s(w, "logical_shape", tf->dims, tf->ndim);
    qc_json_member_u64(w, "bytes_with_state", tf->bytes);
    if (tf->is_integer) {
        const qc_coded_weight *n = tf->coded;
        qc_json_member_string(w, "logical_dtype", qc_dtype_name(n->dtype));
        qc_json_member_string(w, "format", qc_coding_name(n->coding));
        qc_json_member_u64(w, "bits", qc_coded_bits(n));
        qc_json_member_u64_if(w, "block_size", tf->block_elems > 0, tf->block_elems);
        qc_json_member_bool(w, "zero_points", n->zeros != QC_NO_OWNER);
        qc_json_member_bool(w, "act_order", n->group_index != QC_NO_OWNER);
        qc_json_member_bool(w, "static_activations", n->said.static_activations);
    } else if (tf->stored) {
        qc_json_member_string(w, "logical_dtype", qc_dtype_name(tf->stored->dtype));
        if (tf->block_elems == 0)
            return;
        qc_json_member_u64(w, "block_size", tf->block_elems);
        qc_json_member_bool(w, "double_quant", tf->stored->nested_block_elems != 0);
    }
}

static void put_tensors(qc_json_writer *w, const qc_facts *f)
{
    qc_json_member_begin_array(w, "tensors");
    for (size_t i = 0; i < f->model->tensor_count; i++) {
        const qc_checkpoint_tensor *t = &f->model->tensors[f->order[i]];
        const qc_tensor_facts *tf = &f->tensors[f->order[i]];
        qc_json_member_begin_row(w);
        qc_json_member_string(w, "name", t->name);
        qc_json_member_string(w, "dtype", qc_dtype_name(t->dtype));
        qc_json_member_u64s(w, "shape", t->dims, t->ndim);
        qc_json_member_u64(w, "bytes", t->bytes);
        qc_json_member_path(w, "file", f->model->files[t->file].name);
        qc_json_member_string(w, "role", tf->role);
        qc_json_member_string(w, "scheme", tf->scheme);
        if (tf->scheme)
            put_quantized(w, tf);
        if (tf->is_state && tf->owner != QC_NO_OWNER)
            qc_json_member_string(w, "state_of", f->model->tensors[tf->owner].name);
        if (tf->written && tf->written->has_error) {
            qc_json_member_double(w, "rel_mse", tf->written->rel_mse);
            qc_json_member_double(w, "max_err", tf->written->max_err);
        }
        if (tf->written && tf->written->outputs)
            qc_json_write_object(w, "calibrated", qc_manifest_output_rows, 0, tf->written->outputs);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
}

static void put_sum(qc_json_writer *w, const qc_facts_sum *s)
{
    qc_json_write_key(w, s->name);
    qc_json_member_begin_row(w);
    qc_json_member_u64(w, "tensors", s->tensors);
    qc_json_member_u64(w, "weights", s->weights);
    qc_json_member_u64(w, "bytes", s->bytes);
    qc_json_write_end_object(w);
}

static void put_totals(qc_json_writer *w, const qc_facts *f)
{
    qc_json_member_begin_object(w, "totals");
    qc_json_member_u64(w, "tensors", f->model->tensor_count);
    qc_json_member_u64(w, "state_tensors", f->state_count);
    qc_json_member_u64(w, "integer_tensors", f->uncounted);
    qc_json_member_u64(w, "weights", f->weights);
    qc_json_member_u64(w, "tensor_bytes", f->model->tensor_bytes);
    qc_json_member_u64(w, "file_bytes", f->file_bytes);
    qc_json_member_number(w, "bits_per_weight",
                          f->weights ? qc_facts_bits(f->model->tensor_bytes, f->weights)
                                     : (double)NAN);
    qc_json_member_begin_object(w, "by_dtype");
    for (unsigned i = 0; i < QC_DTYPE_COUNT; i++)
        if (f->by_dtype[i].tensors)
            put_sum(w, &f->by_dtype[i]);
    qc_json_write_end_object(w);
    qc_json_member_begin_object(w, "by_scheme");
    for (unsigned i = 0; i < f->scheme_count; i++)
        put_sum(w, &f->by_scheme[i]);
    qc_json_write_end_object(w);
    qc_json_write_end_object(w);
}

/* Writes what the engines of --for said of the checkpoint. */
static void put_engines(qc_json_writer *w, const qc_facts *f)
{
    qc_json_member_begin_array(w, "engines");
    for (unsigned e = 0; e < QC_ENGINES; e++) {
        unsigned refusals = 0;
        if (!(f->engines & 1u << e))
            continue;
        for (unsigned i = 0; i < f->refused.count; i++)
            refusals += f->refused.list[i].engine == e;
        qc_json_write_begin_object(w);
        qc_json_member_string(w, "name", qc_engine_rows[e].name);
        qc_json_member_string(w, "versions", qc_engine_rows[e].versions);
        qc_json_member_bool(w, "was_run", 1); /* as all engines of the table were */
        qc_json_member_bool(w, "loads", refusals == 0);
        qc_json_member_begin_array(w, "refusals");
        for (unsigned i = 0; i < f->refused.count; i++)
            if (f->refused.list[i].engine == e)
                qc_json_write_string(w, f->refused.list[i].sentence);
        qc_json_write_end_array(w);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
}

qc_status qc_inspect_json(const qc_facts *f, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_json_write_begin_text(&w, out, err);
    qc_json_member_string(&w, "command", "inspect");
    qc_json_member_path(&w, "path", f->model->path);
    qc_json_member_bool(&w, "is_directory", f->model->is_dir);
    qc_json_member_string(&w, "model_type", f->model_type);
    qc_json_member_bool(&w, "known_type", f->known_type);
    put_manifest(&w, f->manifest);
    put_files(&w, f);
    put_tensors(&w, f);
    put_totals(&w, f);
    if (f->engines)
        put_engines(&w, f);
    qc_json_member_begin_array(&w, "warnings");
    for (size_t i = 0; i < f->model->warning_count; i++)
        qc_json_write_string(&w, f->model->warnings[i]);
    if (f->recipe_trouble)
        qc_json_write_string(&w, f->recipe_trouble);
    if (f->manifest_trouble)
        qc_json_write_string(&w, f->manifest_trouble);
    qc_json_write_end_array(&w);
    return qc_json_write_end_text(&w);
}

/* ---- report ---------------------------------------------------------------------------------- */

/* Writes null where the number is not known. */
static void put_number(qc_json_writer *w, const char *key, double v, int is_known)
{
    qc_json_member_number(w, key, is_known ? v : (double)NAN);
}

static void put_sizes(qc_json_writer *w, const qc_report *r)
{
    const qc_facts *f = &r->facts;
    qc_json_member_begin_object(w, "sizes");
    qc_json_member_u64_if(w, "source_file_bytes", r->source_bytes > 0, r->source_bytes);
    qc_json_member_u64(w, "unquantized_bytes", r->plain_bytes);
    qc_json_member_u64(w, "tensor_bytes", f->model->tensor_bytes);
    qc_json_member_u64(w, "file_bytes", f->file_bytes);
    qc_json_member_u64(w, "elements", f->weights);
    qc_json_member_u64(w, "quantized_elements", r->quantized_elems);
    qc_json_member_u64(w, "quantized_bytes", r->quantized_bytes);
    qc_json_member_u64(w, "scale_bytes", r->scale_bytes);
    put_number(w, "bits_per_weight",
               f->weights ? qc_facts_bits(f->model->tensor_bytes, f->weights) : 0, f->weights > 0);
    put_number(w, "quantized_bits_per_weight",
               r->quantized_elems ? qc_facts_bits(r->quantized_bytes, r->quantized_elems) : 0,
               r->quantized_elems > 0);
    qc_json_write_end_object(w);
}

static void put_devices(qc_json_writer *w, const qc_manifest *m)
{
    const qc_manifest_placement none = {0}, *p = m ? &m->placement : &none;
    qc_json_write_list(w, "devices", qc_manifest_device_rows, 0, p->devices, p->device_count,
                       sizeof *p->devices);
}

/* Writes the shares of the 16 codes of 4 bits, or of the codes of 8 bits from -128 to 127. */
static void put_shares(qc_json_writer *w, const char *key, const qc_report_codes *c,
                       const double *expected, int four_bit)
{
    qc_json_write_key(w, key);
    if (!c && !expected) {
        qc_json_write_null(w);
        return;
    }
    qc_json_write_compact_next(w);
    qc_json_write_begin_array(w);
    for (int i = four_bit ? 0 : -128; i < (four_bit ? 16 : 128); i++)
        if (c)
            qc_json_write_u64(w, c->counts[i & 255]);
        else
            qc_json_write_double(w, expected[i & 255]);
    qc_json_write_end_array(w);
}

/* Writes what the comparison with the source found. */
static void put_compared(qc_json_writer *w, const qc_against_result *a)
{
    if (!qc_json_member_begin_object_if(w, "compared", a != NULL))
        return;
    qc_json_member_u64(w, "equal", a->equal);
    qc_json_member_u64(w, "cast", a->cast);
    qc_json_member_u64(w, "quantized", a->quantized);
    qc_json_member_bool(w, "hashes_checked", a->has_manifest);
    qc_json_member_u64(w, "faults", a->faults);
    qc_json_member_string(w, "first_what", a->first_what);
    qc_json_member_string(w, "first_why", a->first_why);
    qc_json_write_end_object(w);
}

static void put_forms(qc_json_writer *w, const qc_report *r)
{
    qc_json_member_begin_array(w, "forms");
    for (uint32_t i = 0; i < r->form_count; i++) {
        const qc_report_form *f = &r->forms[i];
        int known = f->with_error > 0, four_bit = qc_report_is_4_bit(f);
        qc_json_write_begin_object(w);
        qc_json_member_string(w, "form", f->name);
        qc_json_member_string(w, "scheme", f->scheme);
        qc_json_member_u64(w, "weights", f->weights);
        qc_json_member_u64(w, "elements", f->elems);
        qc_json_member_u64(w, "bytes", f->bytes);
        put_number(w, "mean", f->mean, known);
        put_number(w, "median", f->median, known);
        put_number(w, "least", f->least, known);
        put_number(w, "most", f->most, known);
        put_shares(w, "codes", &f->codes, NULL, four_bit);
        put_shares(w, "expected", NULL, f->has_expected ? f->expected : NULL, four_bit);
        qc_json_member_double(w, "entropy", qc_report_entropy(&f->codes));
        put_number(w, "distance", qc_report_distance(&f->codes, f->expected), f->has_expected);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
}

static void put_kinds(qc_json_writer *w, const qc_report *r)
{
    qc_json_member_begin_array(w, "kinds");
    for (uint32_t i = 0; i < r->kind_count; i++) {
        const qc_report_kind *k = &r->kinds[i];
        const qc_report_form *f = &r->forms[k->form];
        qc_json_write_begin_object(w);
        qc_json_member_string(w, "kind", k->name);
        qc_json_member_string(w, "form", f->name);
        qc_json_member_u64(w, "weights", k->weights);
        qc_json_member_u64(w, "elements", k->elems);
        qc_json_member_u64(w, "bytes", k->bytes);
        put_number(w, "mean", k->mean, k->with_error > 0);
        put_number(w, "most", k->most, k->with_error > 0);
        qc_json_member_string(w, "most_of", k->with_error ? r->weights[k->most_of].name : NULL);
        put_number(w, "max_err", k->max_err, k->with_error > 0);
        qc_json_member_string(w, "max_of", k->with_error ? r->weights[k->max_of].name : NULL);
        put_shares(w, "codes", &k->codes, NULL, qc_report_is_4_bit(f));
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
}

static void put_weights(qc_json_writer *w, const qc_report *r)
{
    qc_json_member_begin_array(w, "weights");
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *t = &r->weights[i];
        uint64_t at[QC_MAX_DIMS];
        qc_report_indices(at, t->stored->dims, t->stored->ndim, t->max_index);
        qc_json_member_begin_row(w);
        qc_json_member_string(w, "name", t->name);
        qc_json_member_string(w, "kind", r->kinds[t->kind].name);
        qc_json_member_string(w, "form", r->forms[t->form].name);
        int has_layer = t->layer != QC_REPORT_NO_LAYER;
        qc_json_member_u64_if(w, "layer", has_layer, has_layer ? r->layers[t->layer] : 0);
        qc_json_member_u64s(w, "shape", t->stored->dims, t->stored->ndim);
        qc_json_member_u64(w, "bytes", t->bytes);
        put_number(w, "rel_mse", t->rel_mse, t->has_error);
        put_number(w, "sqnr", qc_report_sqnr(t->rel_mse), t->has_error);
        put_number(w, "max_err", t->max_err, t->has_error);
        if (t->has_error)
            qc_json_member_u64s(w, "max_at", at, t->stored->ndim);
        else
            qc_json_member_string(w, "max_at", NULL);
        if (t->outputs)
            qc_json_write_object(w, "outputs", qc_manifest_output_rows, 0, t->outputs);
        put_number(w, "over_median", t->over_median, t->has_error);
        put_number(w, "expected_mse", t->expected, t->has_expected);
        qc_json_member_u64_if(w, "clipped", t->has_expected, t->clipped);
        qc_json_member_string(w, "fault", t->fault);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
}

static const qc_json_row left_rows[] = {
    QC_JSON_ROW(qc_report_left, role, TEXT, 0),
    QC_JSON_ROW(qc_report_left, why, TEXT, 0),
    QC_JSON_ROW(qc_report_left, example, TEXT, 0),
    QC_JSON_ROW(qc_report_left, tensors, U64, 0),
    QC_JSON_ROW_AS("elements", qc_report_left, elems, U64, 0),
    QC_JSON_ROW(qc_report_left, bytes, U64, 0),
    {NULL},
};

/* Writes the same object as `qconv eval --json`. */
static qc_status put_eval(qc_json_writer *w, const qc_report *r, qc_error *err)
{
    qc_strbuf text;
    qc_json_write_key(w, "eval");
    if (!r->has_eval) {
        qc_json_write_null(w);
        return QC_OK;
    }
    qc_strbuf_init(&text, 1u << 20);
    qc_status st = qc_eval_json(&r->eval, &text, err);
    if (st == QC_OK) {
        while (text.len > 0 && text.data[text.len - 1] == '\n')
            text.data[--text.len] = '\0';
        qc_json_write_raw(w, text.data);
    }
    qc_strbuf_deinit(&text);
    return st;
}

static void put_bench(qc_json_writer *w, const qc_report_bench *b)
{
    if (!qc_json_member_begin_object_if(w, "bench", b != NULL))
        return;
    qc_json_member_string(w, "device", b->device);
    qc_json_member_string(w, "program", b->program);
    qc_json_member_string(w, "dtype", b->dtype);
    put_number(w, "copy_gbps", b->copy_gbps, b->copy_gbps > 0);
    put_number(w, "gemm_tflops", b->gemm_tflops, b->gemm_tflops > 0);
    qc_json_member_bool(w, "complete", b->complete);
    qc_json_member_u64(w, "failed", b->failed);
    qc_json_member_begin_array(w, "rows");
    for (uint32_t i = 0; i < b->row_count; i++) {
        const qc_report_speed *s = &b->rows[i];
        qc_json_member_begin_row(w);
        qc_json_member_string(w, "model", s->model);
        qc_json_member_string(w, "layer", s->layer);
        qc_json_member_string(w, "scheme", s->scheme);
        qc_json_member_string(w, "path", s->path);
        qc_json_member_u64(w, "n", s->n);
        qc_json_member_u64(w, "k", s->k);
        qc_json_member_u64(w, "m", s->m);
        put_number(w, "us", s->us, s->us > 0);
        put_number(w, "dense_us", s->dense_us, s->dense_us > 0);
        put_number(w, "ratio", s->ratio, s->ratio > 0);
        put_number(w, "gbps", s->gbps, s->gbps > 0);
        put_number(w, "of_roof", s->of_roof, s->of_roof > 0);
        qc_json_member_bool(w, "here", s->here);
        qc_json_write_end_object(w);
    }
    qc_json_write_end_array(w);
    qc_json_write_end_object(w);
}

static void put_made(qc_json_writer *w, const qc_report *r)
{
    const qc_manifest *m = r->facts.manifest;
    if (!qc_json_member_begin_object_if(w, "made", m != NULL))
        return;
    qc_json_member_string(w, "qconv_version", m->qconv_version);
    qc_json_member_string(w, "to", m->to);
    qc_json_member_string(w, "scale", r->scale);
    qc_manifest_put_calibration(w, m->calibration);
    qc_manifest_put_adapters(w, m);
    qc_json_member_string(w, "command_line", r->command);
    qc_json_write_list(w, "sources", qc_manifest_source_rows, 0, m->sources, m->source_count,
                       sizeof *m->sources);
    qc_json_write_end_object(w);
}

qc_status qc_report_facts_json(const qc_report *r, qc_strbuf *out, qc_error *err)
{
    static const char *const errors[] = {"none", "manifest", "source"};
    qc_json_writer w;
    qc_json_write_begin_text(&w, out, err);
    qc_json_member_string(&w, "command", "report");
    qc_json_member_string(&w, "program", "qconv " QCONV_VERSION);
    qc_json_member_path(&w, "path", r->facts.model->path);
    qc_json_member_path(&w, "against", r->call->against);
    qc_json_member_string(&w, "model_type", r->facts.model_type);
    put_sizes(&w, r);
    put_devices(&w, r->facts.manifest);
    qc_json_member_string(&w, "errors_from", errors[r->errors]);
    qc_json_member_string(&w, "errors_missing", r->no_errors);
    put_compared(&w, r->against);
    put_forms(&w, r);
    put_kinds(&w, r);
    put_weights(&w, r);
    qc_json_write_list(&w, "not_quantized", left_rows, 0, r->left, r->left_count, sizeof *r->left);
    QC_TRY(put_eval(&w, r, err));
    put_bench(&w, r->bench);
    put_made(&w, r);
    qc_json_member_double(&w, "seconds", r->seconds);
    return qc_json_write_end_text(&w);
}

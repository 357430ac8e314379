/* Writes what `qconv report --json` answers; docs/report.md has its members. */
#include "convert/report/inspect_json.h"
#include "convert/report/report_codes.h"
#include "convert/term/json_members.h"

#include <math.h>
#include <string.h>

/* Writes null where the number is not known. */
static void put_number(qc_json_writer *w, const char *key, double v, int is_known)
{
    qc_jm_number(w, key, is_known ? v : (double)NAN);
}

static void put_sizes(qc_json_writer *w, const qc_report *r)
{
    const qc_facts *f = &r->facts;
    qc_jm_begin_object(w, "sizes");
    qc_jm_u64_if(w, "source_file_bytes", r->source_bytes > 0, r->source_bytes);
    qc_jm_u64(w, "unquantized_bytes", r->plain_bytes);
    qc_jm_u64(w, "tensor_bytes", f->model->tensor_bytes);
    qc_jm_u64(w, "file_bytes", f->file_bytes);
    qc_jm_u64(w, "elements", f->weights);
    qc_jm_u64(w, "quantized_elements", r->quantized_elems);
    qc_jm_u64(w, "quantized_bytes", r->quantized_bytes);
    qc_jm_u64(w, "scale_bytes", r->scale_bytes);
    put_number(w, "bits_per_weight",
               f->weights ? qc_facts_bits(f->model->tensor_bytes, f->weights) : 0, f->weights > 0);
    put_number(w, "quantized_bits_per_weight",
               r->quantized_elems ? qc_facts_bits(r->quantized_bytes, r->quantized_elems) : 0,
               r->quantized_elems > 0);
    qc_jw_end_object(w);
}

static void put_devices(qc_json_writer *w, const qc_manifest *m)
{
    qc_jm_begin_array(w, "devices");
    for (size_t i = 0; m && i < m->placement.device_count; i++) {
        const qc_manifest_device *d = &m->placement.devices[i];
        qc_jm_begin_row(w);
        qc_jm_string(w, "name", d->name);
        qc_jm_u64(w, "tensor_bytes", d->tensor_bytes);
        qc_jm_u64(w, "shard_bytes", d->shard_bytes);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

/* Writes the shares of the 16 codes, or of the codes of int8 from -128 to 127. */
static void put_shares(qc_json_writer *w, const char *key, const qc_report_codes *c,
                       const double *expected, int four_bit)
{
    qc_jw_key(w, key);
    if (!c && !expected) {
        qc_jw_null(w);
        return;
    }
    qc_jw_compact_next(w);
    qc_jw_begin_array(w);
    for (int i = four_bit ? 0 : -128; i < (four_bit ? 16 : 128); i++)
        if (c)
            qc_jw_u64(w, c->counts[i & 255]);
        else
            qc_jw_double(w, expected[i & 255]);
    qc_jw_end_array(w);
}

/* Writes what the comparison with the source found. */
static void put_compared(qc_json_writer *w, const qc_against_result *a)
{
    if (!qc_jm_begin_object_if(w, "compared", a != NULL))
        return;
    qc_jm_u64(w, "equal", a->equal);
    qc_jm_u64(w, "cast", a->cast);
    qc_jm_u64(w, "quantized", a->quantized);
    qc_jm_bool(w, "hashes_checked", a->has_manifest);
    qc_jm_u64(w, "faults", a->faults);
    qc_jm_string(w, "first_what", a->first_what);
    qc_jm_string(w, "first_why", a->first_why);
    qc_jw_end_object(w);
}

static void put_forms(qc_json_writer *w, const qc_report *r)
{
    qc_jm_begin_array(w, "forms");
    for (uint32_t i = 0; i < r->form_count; i++) {
        const qc_report_form *f = &r->forms[i];
        int known = f->with_error > 0, four_bit = qc_report_is_4_bit(f);
        qc_jw_begin_object(w);
        qc_jm_string(w, "form", f->name);
        qc_jm_string(w, "scheme", f->scheme);
        qc_jm_u64(w, "weights", f->weights);
        qc_jm_u64(w, "elements", f->elems);
        qc_jm_u64(w, "bytes", f->bytes);
        put_number(w, "mean", f->mean, known);
        put_number(w, "median", f->median, known);
        put_number(w, "least", f->least, known);
        put_number(w, "most", f->most, known);
        put_shares(w, "codes", &f->codes, NULL, four_bit);
        put_shares(w, "expected", NULL, f->has_expected ? f->expected : NULL, four_bit);
        qc_jm_double(w, "entropy", qc_report_entropy(&f->codes));
        put_number(w, "distance", qc_report_distance(&f->codes, f->expected), f->has_expected);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

static void put_kinds(qc_json_writer *w, const qc_report *r)
{
    qc_jm_begin_array(w, "kinds");
    for (uint32_t i = 0; i < r->kind_count; i++) {
        const qc_report_kind *k = &r->kinds[i];
        const qc_report_form *f = &r->forms[k->form];
        qc_jw_begin_object(w);
        qc_jm_string(w, "kind", k->name);
        qc_jm_string(w, "form", f->name);
        qc_jm_u64(w, "weights", k->weights);
        qc_jm_u64(w, "elements", k->elems);
        qc_jm_u64(w, "bytes", k->bytes);
        put_number(w, "mean", k->mean, k->with_error > 0);
        put_number(w, "most", k->most, k->with_error > 0);
        qc_jm_string(w, "most_of", k->with_error ? r->weights[k->most_of].name : NULL);
        put_number(w, "max_err", k->max_err, k->with_error > 0);
        qc_jm_string(w, "max_of", k->with_error ? r->weights[k->max_of].name : NULL);
        put_shares(w, "codes", &k->codes, NULL, qc_report_is_4_bit(f));
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

static void put_weights(qc_json_writer *w, const qc_report *r)
{
    qc_jm_begin_array(w, "weights");
    for (uint32_t i = 0; i < r->weight_count; i++) {
        const qc_report_weight *t = &r->weights[i];
        uint64_t at[QC_MAX_DIMS], rest = t->max_index;
        for (unsigned d = t->stored->ndim; d-- > 0;) {
            uint64_t n = t->stored->dims[d] ? t->stored->dims[d] : 1;
            at[d] = rest % n;
            rest /= n;
        }
        qc_jm_begin_row(w);
        qc_jm_string(w, "name", t->name);
        qc_jm_string(w, "kind", r->kinds[t->kind].name);
        qc_jm_string(w, "form", r->forms[t->form].name);
        int has_layer = t->layer != QC_REPORT_NO_LAYER;
        qc_jm_u64_if(w, "layer", has_layer, has_layer ? r->layers[t->layer] : 0);
        qc_jm_u64s(w, "shape", t->stored->dims, t->stored->ndim);
        qc_jm_u64(w, "bytes", t->bytes);
        put_number(w, "rel_mse", t->rel_mse, t->has_error);
        put_number(w, "sqnr", qc_report_sqnr(t->rel_mse), t->has_error);
        put_number(w, "max_err", t->max_err, t->has_error);
        if (t->has_error)
            qc_jm_u64s(w, "max_at", at, t->stored->ndim);
        else
            qc_jm_string(w, "max_at", NULL);
        qc_outputs_json(w, "outputs", t->outputs);
        put_number(w, "over_median", t->over_median, t->has_error);
        put_number(w, "expected_mse", t->expected, t->has_expected);
        qc_jm_u64_if(w, "clipped", t->has_expected, t->clipped);
        qc_jm_string(w, "fault", t->fault);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

static void put_left(qc_json_writer *w, const qc_report *r)
{
    qc_jm_begin_array(w, "not_quantized");
    for (uint32_t i = 0; i < r->left_count; i++) {
        const qc_report_left *l = &r->left[i];
        qc_jm_begin_row(w);
        qc_jm_string(w, "role", l->role);
        qc_jm_string(w, "why", l->why);
        qc_jm_string(w, "example", l->example);
        qc_jm_u64(w, "tensors", l->tensors);
        qc_jm_u64(w, "elements", l->elems);
        qc_jm_u64(w, "bytes", l->bytes);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
}

/* Writes the same object as `qconv eval --json`. */
static qc_status put_eval(qc_json_writer *w, const qc_report *r, qc_error *err)
{
    qc_strbuf text;
    qc_jw_key(w, "eval");
    if (!r->has_eval) {
        qc_jw_null(w);
        return QC_OK;
    }
    qc_strbuf_init(&text, 1u << 20);
    qc_status st = qc_eval_json(&r->eval, &text, err);
    if (st == QC_OK) {
        while (text.len > 0 && text.data[text.len - 1] == '\n')
            text.data[--text.len] = '\0';
        qc_jw_raw(w, text.data);
    }
    qc_strbuf_deinit(&text);
    return st;
}

static void put_bench(qc_json_writer *w, const qc_report_bench *b)
{
    if (!qc_jm_begin_object_if(w, "bench", b != NULL))
        return;
    qc_jm_string(w, "device", b->device);
    qc_jm_string(w, "program", b->program);
    qc_jm_string(w, "dtype", b->dtype);
    put_number(w, "copy_gbps", b->copy_gbps, b->copy_gbps > 0);
    put_number(w, "gemm_tflops", b->gemm_tflops, b->gemm_tflops > 0);
    qc_jm_bool(w, "complete", b->complete);
    qc_jm_u64(w, "failed", b->failed);
    qc_jm_begin_array(w, "rows");
    for (uint32_t i = 0; i < b->row_count; i++) {
        const qc_report_speed *s = &b->rows[i];
        qc_jm_begin_row(w);
        qc_jm_string(w, "model", s->model);
        qc_jm_string(w, "layer", s->layer);
        qc_jm_string(w, "scheme", s->scheme);
        qc_jm_string(w, "path", s->path);
        qc_jm_u64(w, "n", s->n);
        qc_jm_u64(w, "k", s->k);
        qc_jm_u64(w, "m", s->m);
        put_number(w, "us", s->us, s->us > 0);
        put_number(w, "dense_us", s->dense_us, s->dense_us > 0);
        put_number(w, "ratio", s->ratio, s->ratio > 0);
        put_number(w, "gbps", s->gbps, s->gbps > 0);
        put_number(w, "of_roof", s->of_roof, s->of_roof > 0);
        qc_jm_bool(w, "here", s->here);
        qc_jw_end_object(w);
    }
    qc_jw_end_array(w);
    qc_jw_end_object(w);
}

static void put_made(qc_json_writer *w, const qc_report *r)
{
    const qc_manifest *m = r->facts.manifest;
    if (!qc_jm_begin_object_if(w, "made", m != NULL))
        return;
    qc_jm_string(w, "qconv_version", m->qconv_version);
    qc_jm_string(w, "to", m->to);
    qc_jm_string(w, "scale", r->scale);
    qc_calibration_json(w, m->calibration);
    qc_jm_string(w, "command_line", r->command);
    qc_sources_json(w, "sources", m);
    qc_jw_end_object(w);
}

qc_status qc_report_facts_json(const qc_report *r, qc_strbuf *out, qc_error *err)
{
    static const char *const errors[] = {"none", "manifest", "source"};
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "report");
    qc_jm_string(&w, "program", "qconv " QCONV_VERSION);
    qc_jm_path(&w, "path", r->facts.model->path);
    qc_jm_path(&w, "against", r->call->against);
    qc_jm_string(&w, "model_type", r->facts.model_type);
    put_sizes(&w, r);
    put_devices(&w, r->facts.manifest);
    qc_jm_string(&w, "errors_from", errors[r->errors]);
    qc_jm_string(&w, "errors_missing", r->no_errors);
    put_compared(&w, r->against);
    put_forms(&w, r);
    put_kinds(&w, r);
    put_weights(&w, r);
    put_left(&w, r);
    QC_TRY(put_eval(&w, r, err));
    put_bench(&w, r->bench);
    put_made(&w, r);
    qc_jm_double(&w, "seconds", r->seconds);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

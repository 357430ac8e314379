#include "convert/run/summary.h"

#include "base/checked.h"
#include "base/text.h"
#include "convert/fit/auto_choice.h"
#include "convert/plan/loaders.h"
#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "convert/term/table.h"
#include "formats/manifest_rows.h"

#include <inttypes.h>
#include <string.h>

static double bits_per(uint64_t bytes, uint64_t elems)
{
    return elems ? (double)bytes * 8.0 / (double)elems : 0.0;
}

/* Sums up the schemes that quantize. */
static qc_report_scheme quantized(const qc_convert_report *r)
{
    qc_report_scheme sum = {0};
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++) {
        if (qc_scheme_is_quantized((qc_scheme)s)) {
            sum.bytes_out += r->schemes[s].bytes_out;
            sum.elems += r->schemes[s].elems;
        }
    }
    return sum;
}

double qc_report_quantized_bits(const qc_convert_report *r)
{
    return bits_per(quantized(r).bytes_out, quantized(r).elems);
}

double qc_report_overall_bits(const qc_convert_report *r)
{
    uint64_t elems = 0;
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++)
        if (s != QC_SCHEME_ABSORBED)
            elems += r->schemes[s].elems;
    return bits_per(r->bytes_out_content, elems);
}

/* ---- text ---- */

/* Returns the share of the quantized weights that GPUs quantized; 0 if there are none. */
static double gpu_share(const qc_convert_report *r)
{
    const uint64_t elems = quantized(r).elems;
    return elems ? (double)r->gpu_weights / (double)elems : 0.0;
}

/* Is this the one of several parts that completed OUT? */
static int was_last(const qc_convert_report *r)
{
    return r->part_count > 1 && r->parts_left_count == 0 && !r->complete_before &&
           !r->complete_meanwhile;
}

static int is_complete(const qc_convert_report *r)
{
    return r->out && r->parts_left_count == 0 && !r->dry_run;
}

/* Says what is made, how large it is, and of what kinds. */
static void add_head(const qc_convert_report *r, qc_strbuf *out)
{
    char in[QC_SIZE_TEXT_BYTES], content[QC_SIZE_TEXT_BYTES], stored[QC_SIZE_TEXT_BYTES];
    const double part =
        r->bytes_in ? (double)r->bytes_out_content / (double)r->bytes_in * 100.0 : 0.0;
    const int searched = r->scale && strcmp(r->scale, "absmax") != 0;
    if (r->part_count > 1)
        qc_strbuf_putf(out, "part %u of %u %s: ", r->part_index + 1, r->part_count,
                       was_last(r) ? "was the last" : "is done");
    qc_strbuf_show(out, "%s%s%s%s as %s%s%s%s\n", r->dry_run ? "dry run: " : "converted ", r->model,
                   r->out ? " -> " : "", r->out ? r->out : "", r->to, searched ? ", scale " : "",
                   searched ? r->scale : "",
                   r->compressed && !r->dry_run ? ", compressed (.safetensors.zst)" : "");
    qc_strbuf_putf(out, "  size      %s -> %s (%.1f%%)", qc_text_bytes(in, r->bytes_in),
                   qc_text_bytes(content, r->bytes_out_content), part);
    if (r->compressed && !r->dry_run)
        qc_strbuf_putf(out, ", %s on disk", qc_text_bytes(stored, r->bytes_out_stored));
    qc_strbuf_putf(out, " in %" PRIu32 " shard%s\n", r->shards, qc_plural(r->shards));
    if (qc_report_quantized_bits(r) > 0.0)
        qc_strbuf_putf(out, "  bits      %.3f per quantized weight, %.3f over all\n",
                       qc_report_quantized_bits(r), qc_report_overall_bits(r));
    unsigned shown = 0;
    qc_strbuf_puts(out, "  tensors  ");
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++)
        if (r->schemes[s].tensors > 0 && s != QC_SCHEME_ABSORBED)
            qc_strbuf_putf(out, "%s %" PRIu64 " %s", shown++ ? "," : "", r->schemes[s].tensors,
                           qc_scheme_name((qc_scheme)s));
    qc_strbuf_puts(out, shown ? "" : " none");
    if (r->choice && r->loaders && qc_loaders_unquantized(r->loaders))
        qc_strbuf_puts(out, "; all of it fits, so nothing is quantized");
    qc_strbuf_puts(out, "\n");
    static const char *const by[] = {"the roles of weights alone, without data; see --importance",
                                     "second moments", "--importance"};
    if (r->choice)
        qc_strbuf_putf(out, "  chosen by %s\n", by[r->choice->weighed]);
}

/* A part that completed OUT knows the sizes of all and the time of its own. The rates leave out
 * what this run found done. */
static void add_time(const qc_convert_report *r, qc_strbuf *out)
{
    char time[QC_SIZE_TEXT_BYTES], rate_in[QC_SIZE_TEXT_BYTES], rate_out[QC_SIZE_TEXT_BYTES];
    qc_strbuf_putf(out, "  time      %s", qc_text_seconds(time, r->seconds));
    if (was_last(r))
        qc_strbuf_putf(out, " for part %u", r->part_index + 1);
    else
        qc_strbuf_putf(
            out, ", %s in, %s out",
            qc_text_rate(rate_in, qc_sat_sub(r->bytes_in, r->found.bytes_kept), r->seconds),
            qc_text_rate(rate_out, qc_sat_sub(r->bytes_out_stored, r->found.stored_kept),
                         r->seconds));
    qc_strbuf_putf(out, ", %u thread%s%s%s\n", r->threads, qc_plural(r->threads),
                   r->isa ? ", " : "", r->isa ? r->isa : "");
}

static void add_parts_left(const qc_convert_report *r, qc_strbuf *out)
{
    if (r->complete_meanwhile)
        qc_strbuf_puts(out, "  complete  by another part meanwhile\n");
    if (r->complete_meanwhile || r->parts_left_count == 0)
        return;
    qc_strbuf_puts(out, r->parts_left_count == 1 ? "  to come   part" : "  to come   parts");
    for (unsigned i = 0; i < r->parts_left_count; i++) {
        unsigned first = i;
        while (i + 1 < r->parts_left_count && r->parts_left[i + 1] == r->parts_left[i] + 1)
            i++;
        qc_strbuf_putf(out, "%s %u", first ? "," : "", r->parts_left[first] + 1);
        if (i > first)
            qc_strbuf_putf(out, "%s %u", i > first + 1 ? " to" : ",", r->parts_left[i] + 1);
    }
    qc_strbuf_puts(out, "; the last to finish completes OUT\n");
}

/* Says what a conversion did and a dry run does not do. */
static void add_work(const qc_convert_report *r, qc_strbuf *out)
{
    const qc_calibrate_report *c = &r->calibration;
    if (r->worst_name)
        qc_strbuf_show(out, "  worst     %s: relative MSE %.3e, largest error %.3e\n",
                       r->worst_name, r->worst_rel_mse, r->worst_max_err);
    for (size_t i = 0; i < r->adapter_count; i++) {
        const qc_attached_adapter *a = &r->adapters[i];
        qc_strbuf_show(out, "  merged    %s", a->adapter->path);
        if (a->scale != 1.0)
            qc_strbuf_putf(out, ", times %g,", a->scale);
        qc_strbuf_putf(out, " into %zu weight%s", a->weights, qc_plural(a->weights));
        if (a->biases)
            qc_strbuf_putf(out, " and %zu bias%s", a->biases, a->biases == 1 ? "" : "es");
        if (a->wholes)
            qc_strbuf_putf(out, "; %zu tensor%s replaced", a->wholes, qc_plural(a->wholes));
        qc_strbuf_puts(out, "\n");
    }
    if (c->text || c->hessians) {
        qc_strbuf_show(out, "  calibrated %" PRIu32 " weight%s with %s", c->weights,
                       qc_plural(c->weights), c->text ? c->text : c->hessians);
        if (c->text)
            qc_strbuf_putf(out, " (%" PRIu64 " tokens", c->tokens);
        if (c->mix > 0)
            qc_strbuf_putf(out, ", %.0f%% of the bundled text", 100 * c->mix);
        if (c->text)
            qc_strbuf_puts(out, ")");
        if (c->weights)
            qc_strbuf_putf(out, ": mean error in outputs %.3e -> %.3e", r->outputs.rounded,
                           r->outputs.calibrated);
        if (c->left)
            qc_strbuf_putf(out, "; %" PRIu32 " by search", c->left);
        qc_strbuf_puts(out, "\n");
        if (c->judged.tokens > 0)
            qc_strbuf_putf(out,
                           "  judged    on %" PRIu64 " other tokens: error in answers %.3e by "
                           "search, %.3e calibrated\n",
                           c->judged.tokens, c->judged.search, c->judged.calibrated);
    }
    if (r->gpu_weights > 0) { /* else the CPU did all of them */
        qc_strbuf_show(out, "  device    %s", r->device);
        if (gpu_share(r) < 1.0)
            qc_strbuf_putf(out, " for %.1f%% of the quantized weights, the CPU for the rest",
                           gpu_share(r) * 100.0);
        qc_strbuf_puts(out, "\n");
    }
    if (r->found.continued)
        qc_strbuf_putf(out, "  continued %" PRIu32 " tensor%s kept, %" PRIu32 " made again\n",
                       r->found.jobs_kept, qc_plural(r->found.jobs_kept), r->found.jobs_redone);
    add_time(r, out);
    add_parts_left(r, out);
}

qc_status qc_report_text(const qc_convert_report *r, qc_strbuf *out, qc_error *err)
{
    if (r->complete_before) {
        if (r->part_count > 1)
            qc_strbuf_putf(out, "part %u of %u: ", r->part_index + 1, r->part_count);
        qc_strbuf_show(out, "%s is complete already; --%s makes it anew\n", r->out,
                       r->part_count > 1 ? "restart" : "force");
    } else if (r->part_count > 1 && r->shards == 0 && !was_last(r)) {
        qc_strbuf_putf(out,
                       "part %u of %u had nothing to do: OUT has fewer shards than there are "
                       "parts (--max-shard-size makes more)\n",
                       r->part_index + 1, r->part_count);
        add_parts_left(r, out);
    } else {
        add_head(r, out);
        if (!r->dry_run)
            add_work(r, out);
        else if (r->loaders)
            qc_next_steps_names(r->loaders, out);
        if (is_complete(r) && r->loaders)
            QC_TRY(qc_next_steps_text(r->loaders, r->program, r->out, out, err));
    }
    return qc_strbuf_status(out, err);
}

/* ---- JSON ---- */

static const qc_json_row scheme_rows[] = {
    QC_JSON_ROW(qc_report_scheme, tensors, U64, 0),
    QC_JSON_ROW_AS("weights", qc_report_scheme, elems, U64, 0),
    QC_JSON_ROW(qc_report_scheme, bytes_in, U64, 0),
    QC_JSON_ROW(qc_report_scheme, bytes_out, U64, 0),
    {NULL},
};

static const qc_json_row calibration_rows[] = {
    QC_JSON_ROW(qc_calibrate_report, text, PATH, 0),
    QC_JSON_ROW(qc_calibrate_report, hessians, PATH, 0),
    QC_JSON_ROW(qc_calibrate_report, tokens, U64, 0),
    QC_JSON_ROW(qc_calibrate_report, damping, DOUBLE, 0),
    {NULL},
};

static void put_calibration(qc_json_writer *w, const qc_convert_report *r)
{
    const qc_calibrate_report *c = &r->calibration;
    if (!c->text && !c->hessians)
        return;
    qc_json_begin_object(w, "calibration");
    qc_json_put_rows(w, calibration_rows, 0, c);
    qc_json_put_text(w, "sided", c->sided == 2 ? "two" : "one");
    qc_json_put_u64(w, "weights", c->weights);
    qc_json_put_u64(w, "left", c->left);
    qc_json_put_double(w, "mix", c->mix);
    if (!r->dry_run) {
        qc_json_put_u64(w, "judged_tokens", c->judged.tokens);
        qc_json_put_double(w, "judged_search", c->judged.search);
        qc_json_put_double(w, "judged_calibrated", c->judged.calibrated);
        qc_json_put_rows(w, qc_manifest_output_rows, 0, &r->outputs);
        qc_json_put_double(w, "seconds", c->seconds);
    }
    qc_json_end(w);
}

static void put_part(qc_json_writer *w, const qc_convert_report *r)
{
    qc_json_begin_object(w, "part");
    qc_json_put_u64(w, "index", r->part_index + 1);
    qc_json_put_u64(w, "of", r->part_count);
    qc_json_begin_line(w, "to_come");
    for (unsigned i = 0; i < r->parts_left_count; i++)
        qc_json_put_u64(w, NULL, r->parts_left[i] + 1);
    qc_json_end(w);
    qc_json_put_text(w, "completed",
                     r->complete_before      ? "before"
                     : r->complete_meanwhile ? "meanwhile"
                     : was_last(r)           ? "here"
                                             : NULL);
    qc_json_end(w);
}

static qc_status end_json(qc_json_writer *w, const qc_convert_report *r, qc_error *err)
{
    if (r->choice)
        qc_auto_json(r->choice, r->explain, w);
    if (r->loaders)
        QC_TRY(qc_next_steps_json(r->loaders, r->program, is_complete(r) ? r->out : NULL, w, err));
    return qc_json_end_text(w);
}

qc_status qc_report_json(const qc_convert_report *r, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "command", "convert");
    qc_json_put_path(&w, "model", r->model);
    qc_json_put_path(&w, "out", r->out);
    qc_json_put_text(&w, "to", r->to);
    qc_json_put_text(&w, "scale", r->scale);
    qc_json_put_bool(&w, "complete_before", r->complete_before);
    if (r->part_count > 1)
        put_part(&w, r);
    qc_json_put_u64(&w, "bytes_in", r->bytes_in);
    qc_json_put_u64(&w, "bytes_out", r->bytes_out_content);
    qc_json_put_u64(&w, "bytes_stored", r->bytes_out_stored);
    qc_json_put_u64(&w, "shards", r->shards);
    qc_json_put_u64(&w, "side_files", r->side_files);
    qc_json_put_double(&w, "bits_per_quantized_weight", qc_report_quantized_bits(r));
    qc_json_put_double(&w, "bits_per_weight", qc_report_overall_bits(r));
    qc_json_begin_object(&w, "schemes");
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++)
        if (r->schemes[s].tensors > 0 && s != QC_SCHEME_ABSORBED)
            qc_json_put_row(&w, qc_scheme_name((qc_scheme)s), scheme_rows, 0, &r->schemes[s]);
    qc_json_end(&w);
    if (r->adapter_count > 0) {
        qc_json_begin_list(&w, "adapters");
        for (size_t i = 0; i < r->adapter_count; i++) {
            const qc_attached_adapter *a = &r->adapters[i];
            qc_json_begin_row(&w, NULL);
            qc_json_put_path(&w, "path", a->adapter->path);
            qc_json_put_double(&w, "scale", a->scale);
            qc_json_put_u64(&w, "weights", a->weights);
            qc_json_put_u64(&w, "biases", a->biases);
            qc_json_put_u64(&w, "replaced", a->wholes);
            qc_json_end(&w);
        }
        qc_json_end(&w);
    }
    put_calibration(&w, r);
    if (qc_json_begin_object_if(&w, "worst", r->worst_name != NULL)) {
        qc_json_put_text(&w, "name", r->worst_name);
        qc_json_put_double(&w, "rel_mse", r->worst_rel_mse);
        qc_json_put_double(&w, "max_err", r->worst_max_err);
        qc_json_end(&w);
    }
    qc_json_begin_object(&w, "values");
    qc_json_put_u64(&w, "not_finite", r->values.not_finite);
    qc_json_put_u64(&w, "vanished", r->values.vanished);
    qc_json_put_u64(&w, "half_zero", r->values.half_zero);
    qc_json_end(&w);
    if (qc_json_begin_object_if(&w, "continued", r->found.continued)) {
        qc_json_put_u64(&w, "tensors_kept", r->found.jobs_kept);
        qc_json_put_u64(&w, "tensors_redone", r->found.jobs_redone);
        qc_json_end(&w);
    }
    qc_json_put_double(&w, "seconds", r->seconds);
    qc_json_put_u64(&w, "threads", r->threads);
    qc_json_put_text(&w, "isa", r->isa);
    qc_json_put_text(&w, "device", r->device);
    qc_json_put_double(&w, "gpu_share", gpu_share(r));
    return end_json(&w, r, err);
}

/* ---- the plan, for --dry-run ---- */

static qc_status print_table(qc_strbuf *out, const qc_plan *p, const qc_convert_report *totals,
                             qc_error *err)
{
    qc_table t;
    qc_table_begin(&t, p->arena, "tensor|dtype|shape|becomes|>bytes before|>after");
    qc_table_columns(&t, p->device_names ? "device|why" : "why");
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        const qc_checkpoint_tensor *src = &p->model->tensors[j->source];
        char shape[QC_SHAPE_TEXT_BYTES];
        qc_table_put(&t, src->name);
        qc_table_put(&t, qc_dtype_name(qc_checkpoint_dtype(src)));
        qc_table_put(&t, qc_text_shape(shape, src->dims, src->ndim));
        qc_table_putf(&t, "%s%s", qc_scheme_name(j->scheme),
                      j->entry->transpose ? ", transposed" : "");
        qc_table_number(&t, qc_checkpoint_bytes(src));
        qc_table_number(&t, qc_plan_job_bytes(p, j));
        if (p->device_names)
            qc_table_put(&t, p->device_names[j->device]);
        qc_table_put(&t, j->entry->why);
    }
    qc_table_print(&t, 0, out);
    return qc_report_text(totals, out, err);
}

static qc_status print_json(qc_strbuf *out, const qc_plan *p, const qc_convert_report *totals,
                            qc_error *err)
{
    qc_json_writer w;
    qc_json_begin_text(&w, out, err);
    qc_json_put_text(&w, "command", "dry-run");
    qc_json_put_text(&w, "model_type", p->recipe->model_type);
    qc_json_put_bool(&w, "known_type", p->recipe->known_type);
    qc_json_put_u64(&w, "source_bytes", p->source_bytes);
    qc_json_put_u64(&w, "tensor_bytes", p->tensor_bytes);
    qc_json_put_u64(&w, "file_bytes", p->content_bytes);
    qc_json_put_u64(&w, "weights_quantized", p->weights_quantized);
    qc_json_put_u64(&w, "quantized_bytes", p->quantized_bytes);
    qc_json_begin_list(&w, "shards");
    for (uint32_t i = 0; i < p->layout.count; i++) {
        const qc_shard *s = &p->layout.shards[i];
        qc_json_begin_row(&w, NULL);
        qc_json_put_text(&w, "name", s->name);
        qc_json_put_u64(&w, "bytes", s->header_bytes + s->data_bytes);
        if (p->device_names)
            qc_json_put_text(&w, "device", p->device_names[s->device]);
        qc_json_end(&w);
    }
    qc_json_end(&w);
    qc_json_put_texts(&w, "skip_modules", p->recipe->skip_modules, p->recipe->skip_count);
    qc_json_begin_list(&w, "tensors");
    for (uint32_t i = 0; i < p->job_count; i++) {
        const qc_job *j = &p->jobs[i];
        const qc_checkpoint_tensor *src = &p->model->tensors[j->source];
        qc_json_begin_row(&w, NULL);
        qc_json_put_text(&w, "name", src->name);
        qc_json_put_text(&w, "dtype", qc_dtype_name(qc_checkpoint_dtype(src)));
        qc_json_put_u64s(&w, "shape", src->dims, src->ndim);
        qc_json_put_text(&w, "scheme", qc_scheme_name(j->scheme));
        qc_json_put_text(&w, "role", qc_role_name(j->entry->role));
        qc_json_put_bool(&w, "transposed", j->entry->transpose);
        qc_json_put_text(&w, "why", j->entry->why);
        qc_json_put_u64(&w, "bytes_before", qc_checkpoint_bytes(src));
        qc_json_put_u64(&w, "bytes_after", qc_plan_job_bytes(p, j));
        qc_json_put_u64(&w, "shard", qc_plan_tensor(p, j->first_output).shard);
        if (p->device_names)
            qc_json_put_text(&w, "device", p->device_names[j->device]);
        qc_json_end(&w);
    }
    qc_json_end(&w);
    put_calibration(&w, totals);
    return end_json(&w, totals, err);
}

qc_status qc_plan_print(const qc_plan *plan, const qc_convert_report *totals, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, SIZE_MAX / 2);
    qc_status st = plan->call->json ? print_json(&out, plan, totals, err)
                                    : print_table(&out, plan, totals, err);
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    return st;
}

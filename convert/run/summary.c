#include "convert/run/summary.h"

#include "base/checked.h"
#include "convert/fit/auto_choice.h"
#include "convert/plan/loaders.h"
#include "convert/term/console.h"
#include "convert/term/json_members.h"
#include "convert/term/size_text.h"

#include <inttypes.h>
#include <string.h>

static int is_quantized(qc_scheme s)
{
    return s == QC_SCHEME_NF4 || s == QC_SCHEME_INT8_ROWS || s == QC_SCHEME_INT8_BLOCKS;
}

static double bits_per(uint64_t bytes, uint64_t elems)
{
    return elems ? (double)bytes * 8.0 / (double)elems : 0.0;
}

double qc_report_quantized_bits(const qc_convert_report *r)
{
    uint64_t bytes = 0, elems = 0;
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++) {
        if (is_quantized((qc_scheme)s)) {
            bytes += r->schemes[s].bytes_out;
            elems += r->schemes[s].elems;
        }
    }
    return bits_per(bytes, elems);
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

/* Names come from files and command lines, so they may hold anything. */
static void add_printable(qc_strbuf *out, const char *s)
{
    size_t before = out->len;
    qc_strbuf_puts(out, s);
    if (out->failed == QC_OK)
        qc_console_printable(out->data + before);
}

static void add_sizes(const qc_convert_report *r, qc_strbuf *out)
{
    char in[QC_SIZE_TEXT_BYTES], content[QC_SIZE_TEXT_BYTES], stored[QC_SIZE_TEXT_BYTES];
    double part = r->bytes_in ? (double)r->bytes_out_content / (double)r->bytes_in * 100.0 : 0.0;
    qc_strbuf_putf(out, "  size      %s -> %s (%.1f%%)", qc_text_bytes(in, r->bytes_in),
                   qc_text_bytes(content, r->bytes_out_content), part);
    if (r->compressed && !r->dry_run)
        qc_strbuf_putf(out, ", %s on disk", qc_text_bytes(stored, r->bytes_out_stored));
    qc_strbuf_putf(out, " in %" PRIu32 " shard%s\n", r->shards, r->shards == 1 ? "" : "s");
    if (qc_report_quantized_bits(r) > 0.0)
        qc_strbuf_putf(out, "  bits      %.3f per quantized weight, %.3f over all\n",
                       qc_report_quantized_bits(r), qc_report_overall_bits(r));
}

static void add_schemes(const qc_convert_report *r, qc_strbuf *out)
{
    unsigned shown = 0;
    qc_strbuf_puts(out, "  tensors  ");
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++) {
        const qc_report_scheme *scheme = &r->schemes[s];
        if (scheme->tensors == 0 || s == QC_SCHEME_ABSORBED)
            continue;
        qc_strbuf_putf(out, "%s %" PRIu64 " %s", shown++ ? "," : "", scheme->tensors,
                       qc_scheme_name((qc_scheme)s));
    }
    qc_strbuf_puts(out, shown ? "\n" : " none\n");
}

/* Returns the share of the quantized weights that GPUs quantized; 0 if there are none. */
static double gpu_share(const qc_convert_report *r)
{
    uint64_t elems = 0;
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++)
        if (is_quantized((qc_scheme)s))
            elems += r->schemes[s].elems;
    return elems ? (double)r->gpu_weights / (double)elems : 0.0;
}

/* Says where weights were quantized, unless the CPU did all of them. */
static void add_device(const qc_convert_report *r, qc_strbuf *out)
{
    if (r->gpu_weights == 0)
        return;
    qc_strbuf_puts(out, "  device    ");
    add_printable(out, r->device);
    if (gpu_share(r) < 1.0)
        qc_strbuf_putf(out, " for %.1f%% of the quantized weights, the CPU for the rest",
                       gpu_share(r) * 100.0);
    qc_strbuf_puts(out, "\n");
}

/* Is this the one of several parts that completed OUT? */
static int was_last(const qc_convert_report *r)
{
    return r->part_count > 1 && r->parts_left_count == 0 && !r->complete_before &&
           !r->complete_meanwhile;
}

/* Is this a part without a shard that did not complete OUT either? */
static int got_nothing(const qc_convert_report *r)
{
    return r->part_count > 1 && r->shards == 0 && !was_last(r);
}

static int is_complete(const qc_convert_report *r)
{
    return r->out && r->parts_left_count == 0;
}

/* A part that completed OUT knows the sizes of all and the time of its own. The rates are those of
 * this run, which did not do again what it found done. */
static void add_time(const qc_convert_report *r, qc_strbuf *out)
{
    char time[QC_SIZE_TEXT_BYTES], rate_in[QC_SIZE_TEXT_BYTES], rate_out[QC_SIZE_TEXT_BYTES];
    qc_strbuf_putf(out, "  time      %s", qc_text_seconds(time, r->seconds));
    if (was_last(r))
        qc_strbuf_putf(out, " for part %u", r->part_index + 1);
    else
        qc_strbuf_putf(
            out, ", %s in, %s out",
            qc_text_rate(rate_in, qc_sat_sub(r->bytes_in, r->bytes_in_kept), r->seconds),
            qc_text_rate(rate_out, qc_sat_sub(r->bytes_out_stored, r->bytes_out_kept), r->seconds));
    qc_strbuf_putf(out, ", %u thread%s%s%s\n", r->threads, r->threads == 1 ? "" : "s",
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

static void add_complete_before(const qc_convert_report *r, qc_strbuf *out)
{
    if (r->part_count > 1)
        qc_strbuf_putf(out, "part %u of %u: ", r->part_index + 1, r->part_count);
    add_printable(out, r->out);
    qc_strbuf_putf(out, " is complete already; --%s makes it anew\n",
                   r->part_count > 1 ? "restart" : "force");
}

static void add_calibration(const qc_convert_report *r, qc_strbuf *out)
{
    const char *with = r->calibration_text ? r->calibration_text : r->calibration_hessians;
    if (!with)
        return;
    qc_strbuf_putf(out, "  calibrated %" PRIu64 " weight%s with ", r->calibrated,
                   r->calibrated == 1 ? "" : "s");
    add_printable(out, with);
    if (r->calibration_text)
        qc_strbuf_putf(out, " (%" PRIu64 " tokens)", r->calibration_tokens);
    if (r->calibrated)
        qc_strbuf_putf(out, ": mean error in outputs %.3e -> %.3e", r->outputs_rounded,
                       r->outputs_calibrated);
    if (r->not_calibrated)
        qc_strbuf_putf(out, "; %" PRIu64 " by search", r->not_calibrated);
    qc_strbuf_puts(out, "\n");
}

static void add_heading(const qc_convert_report *r, qc_strbuf *out)
{
    if (r->part_count > 1)
        qc_strbuf_putf(out, "part %u of %u %s: ", r->part_index + 1, r->part_count,
                       was_last(r) ? "was the last" : "is done");
    qc_strbuf_puts(out, r->dry_run ? "dry run: " : "converted ");
    add_printable(out, r->model);
    if (r->out) {
        qc_strbuf_puts(out, " -> ");
        add_printable(out, r->out);
    }
    qc_strbuf_putf(out, " as %s", r->to);
    if (r->scale && strcmp(r->scale, "absmax") != 0)
        qc_strbuf_putf(out, ", scale %s", r->scale);
    qc_strbuf_puts(out, "\n");
}

/* Says what a conversion did and a dry run does not do. */
static void add_work(const qc_convert_report *r, qc_strbuf *out)
{
    char deleted[QC_SIZE_TEXT_BYTES];
    if (r->worst_name) {
        qc_strbuf_puts(out, "  worst     ");
        add_printable(out, r->worst_name);
        qc_strbuf_putf(out, ": relative MSE %.3e, largest error %.3e\n", r->worst_rel_mse,
                       r->worst_max_err);
    }
    add_calibration(r, out);
    add_device(r, out);
    if (r->continued)
        qc_strbuf_putf(out, "  continued %" PRIu64 " tensor%s kept, %" PRIu64 " made again\n",
                       r->tensors_kept, r->tensors_kept == 1 ? "" : "s", r->tensors_redone);
    if (r->files_consumed)
        qc_strbuf_putf(out, "  deleted   %" PRIu64 " weight file%s of the source, %s\n",
                       r->files_consumed, r->files_consumed == 1 ? "" : "s",
                       qc_text_bytes(deleted, r->bytes_consumed));
    add_time(r, out);
    add_parts_left(r, out);
}

qc_status qc_report_text(const qc_convert_report *r, qc_strbuf *out, qc_error *err)
{
    if (r->complete_before) {
        add_complete_before(r, out);
    } else if (got_nothing(r)) {
        qc_strbuf_putf(out,
                       "part %u of %u had nothing to do: OUT has fewer shards than there are "
                       "parts (--max-shard-size makes more)\n",
                       r->part_index + 1, r->part_count);
        add_parts_left(r, out);
    } else {
        add_heading(r, out);
        add_sizes(r, out);
        add_schemes(r, out);
        if (!r->dry_run)
            add_work(r, out);
        else if (r->loaders)
            qc_strbuf_putf(out, "  loads in  %s\n", qc_loaders_names(r->loaders));
        if (!r->dry_run && is_complete(r) && r->loaders)
            QC_TRY(qc_next_steps_text(r->loaders, r->program, r->out, out, err));
    }
    return qc_strbuf_status(out, err);
}

/* ---- JSON ---- */

static void put_schemes(qc_json_writer *w, const qc_convert_report *r)
{
    qc_jm_begin_object(w, "schemes");
    for (unsigned s = 0; s < QC_REPORT_SCHEMES; s++) {
        const qc_report_scheme *scheme = &r->schemes[s];
        if (scheme->tensors == 0 || s == QC_SCHEME_ABSORBED)
            continue;
        qc_jw_key(w, qc_scheme_name((qc_scheme)s));
        qc_jm_begin_row(w);
        qc_jm_u64(w, "tensors", scheme->tensors);
        qc_jm_u64(w, "weights", scheme->elems);
        qc_jm_u64(w, "bytes_in", scheme->bytes_in);
        qc_jm_u64(w, "bytes_out", scheme->bytes_out);
        qc_jw_end_object(w);
    }
    qc_jw_end_object(w);
}

static void put_part(qc_json_writer *w, const qc_convert_report *r)
{
    if (r->part_count <= 1)
        return;
    qc_jm_begin_object(w, "part");
    qc_jm_u64(w, "index", r->part_index + 1);
    qc_jm_u64(w, "of", r->part_count);
    qc_jw_key(w, "to_come");
    qc_jw_compact_next(w);
    qc_jw_begin_array(w);
    for (unsigned i = 0; i < r->parts_left_count; i++)
        qc_jw_u64(w, r->parts_left[i] + 1);
    qc_jw_end_array(w);
    qc_jm_string(w, "completed",
                 r->complete_before      ? "before"
                 : r->complete_meanwhile ? "meanwhile"
                 : was_last(r)           ? "here"
                                         : NULL);
    qc_jw_end_object(w);
}

void qc_report_calibration_json(const qc_convert_report *r, qc_json_writer *w)
{
    if (!r->calibration_text && !r->calibration_hessians)
        return;
    qc_jm_begin_object(w, "calibration");
    qc_jm_path(w, "text", r->calibration_text);
    qc_jm_path(w, "hessians", r->calibration_hessians);
    qc_jm_u64(w, "tokens", r->calibration_tokens);
    qc_jm_double(w, "damping", r->calibration_damping);
    qc_jm_u64(w, "weights", r->calibrated);
    qc_jm_u64(w, "left", r->not_calibrated);
    if (!r->dry_run) {
        qc_jm_double(w, "rounded", r->outputs_rounded);
        qc_jm_double(w, "calibrated", r->outputs_calibrated);
        qc_jm_double(w, "seconds", r->calibration_seconds);
    }
    qc_jw_end_object(w);
}

qc_status qc_report_json(const qc_convert_report *r, qc_strbuf *out, qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", "convert");
    qc_jm_path(&w, "model", r->model);
    qc_jm_path(&w, "out", r->out);
    qc_jm_string(&w, "to", r->to);
    qc_jm_string(&w, "scale", r->scale);
    qc_jm_bool(&w, "complete_before", r->complete_before);
    put_part(&w, r);
    qc_jm_u64(&w, "bytes_in", r->bytes_in);
    qc_jm_u64(&w, "bytes_out", r->bytes_out_content);
    qc_jm_u64(&w, "bytes_stored", r->bytes_out_stored);
    qc_jm_u64(&w, "shards", r->shards);
    qc_jm_u64(&w, "side_files", r->side_files);
    qc_jm_double(&w, "bits_per_quantized_weight", qc_report_quantized_bits(r));
    qc_jm_double(&w, "bits_per_weight", qc_report_overall_bits(r));
    put_schemes(&w, r);
    qc_report_calibration_json(r, &w);
    if (qc_jm_begin_object_if(&w, "worst", r->worst_name != NULL)) {
        qc_jm_string(&w, "name", r->worst_name);
        qc_jm_double(&w, "rel_mse", r->worst_rel_mse);
        qc_jm_double(&w, "max_err", r->worst_max_err);
        qc_jw_end_object(&w);
    }
    if (qc_jm_begin_object_if(&w, "continued", r->continued)) {
        qc_jm_u64(&w, "tensors_kept", r->tensors_kept);
        qc_jm_u64(&w, "tensors_redone", r->tensors_redone);
        qc_jw_end_object(&w);
    }
    qc_jm_u64(&w, "files_consumed", r->files_consumed);
    qc_jm_u64(&w, "bytes_consumed", r->bytes_consumed);
    qc_jm_double(&w, "seconds", r->seconds);
    qc_jm_u64(&w, "threads", r->threads);
    qc_jm_string(&w, "isa", r->isa);
    qc_jm_string(&w, "device", r->device);
    qc_jm_double(&w, "gpu_share", gpu_share(r));
    if (r->choice) {
        qc_jw_key(&w, "auto");
        qc_auto_json(r->choice, r->explain, &w);
    }
    if (r->loaders)
        QC_TRY(qc_next_steps_json(r->loaders, r->program, is_complete(r) ? r->out : NULL, &w, err));
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

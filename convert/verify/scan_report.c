#include "convert/verify/scan_report.h"

#include "convert/term/console.h"
#include "convert/term/json_members.h"
#include "convert/term/size_text.h"

#include <inttypes.h>

static qc_status write_json(qc_strbuf *out, const qc_call *call, const qc_scan_result *r,
                            const char *verb, double seconds, qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jm_string(&w, "command", verb);
    qc_jm_path(&w, "path", call->model);
    if (call->out)
        qc_jm_path(&w, "out", call->out);
    qc_jm_bool(&w, "ok", r->problem_count == 0);
    qc_jm_u64(&w, "problems", r->problem_count);
    if (qc_jm_begin_object_if(&w, "first_problem", r->problem_count > 0)) {
        qc_jm_string(&w, "what", r->first.what);
        qc_jm_string(&w, "why", r->first.why);
        qc_jw_end_object(&w);
    }
    qc_jm_u64(&w, "tensors", r->tensors_checked);
    qc_jm_u64(&w, "shards", r->manifest.shard_count);
    qc_jm_u64(&w, "files", r->manifest.file_count);
    qc_jm_u64(&w, "content_bytes", r->content_bytes);
    qc_jm_u64(&w, "stored_bytes", r->stored_bytes);
    qc_jm_double(&w, "seconds", seconds);
    qc_jw_end_object(&w);
    QC_TRY(qc_jw_finish(&w));
    return qc_strbuf_adds(out, "\n", err);
}

static qc_status write_text(qc_strbuf *out, const qc_call *call, const qc_scan_result *r,
                            const char *verb, double seconds, qc_error *err)
{
    char bytes[QC_SIZE_TEXT_BYTES], rate[QC_SIZE_TEXT_BYTES];
    qc_text_bytes(bytes, r->content_bytes);
    qc_text_rate(rate, r->content_bytes, seconds);
    if (r->problem_count)
        return qc_strbuf_addf(out, err, "%s: DAMAGED: %" PRIu64 " problem%s\n", call->model,
                              r->problem_count, r->problem_count == 1 ? "" : "s");
    return qc_strbuf_addf(out, err,
                          "%s: %s: %" PRIu64 " tensors in %zu shard%s, %zu other file%s; %s in "
                          "%.2f s, %s%s%s\n",
                          call->model, verb, r->tensors_checked, r->manifest.shard_count,
                          r->manifest.shard_count == 1 ? "" : "s", r->manifest.file_count,
                          r->manifest.file_count == 1 ? "" : "s", bytes, seconds, rate,
                          call->out ? "; now in " : "", call->out ? call->out : "");
}

qc_status qc_scan_report(const qc_call *call, const qc_scan_result *r, const char *verb,
                         double seconds, qc_error *err)
{
    qc_strbuf out;
    qc_strbuf_init(&out, (size_t)1 << 20);
    qc_status st = QC_OK;
    if (call->json)
        st = write_json(&out, call, r, verb, seconds, err);
    else if (!call->quiet)
        st = write_text(&out, call, r, verb, seconds, err);
    if (st == QC_OK && !call->json && out.len > 0) {
        /* Names come from the manifest. Whatever is in them, this stays one line. */
        out.data[out.len - 1] = '\0';
        qc_console_printable(out.data);
        out.data[out.len - 1] = '\n';
    }
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    return st;
}

#include "convert/verify/scan_report.h"

#include "convert/term/console.h"
#include "convert/term/size_text.h"
#include "formats/json_writer.h"

#include <inttypes.h>

static qc_status write_json(qc_strbuf *out, const qc_call *call, const qc_scan_result *r,
                            const char *verb, double seconds, qc_error *err)
{
    qc_json_writer w;
    qc_jw_init(&w, out, err);
    qc_jw_begin_object(&w);
    qc_jw_key(&w, "command");
    qc_jw_string(&w, verb);
    qc_jw_key(&w, "path");
    qc_jw_path(&w, call->model);
    if (call->out) {
        qc_jw_key(&w, "out");
        qc_jw_path(&w, call->out);
    }
    qc_jw_key(&w, "ok");
    qc_jw_bool(&w, r->problem_count == 0);
    qc_jw_key(&w, "problems");
    qc_jw_u64(&w, r->problem_count);
    qc_jw_key(&w, "first_problem");
    if (r->problem_count) {
        qc_jw_begin_object(&w);
        qc_jw_key(&w, "what");
        qc_jw_string(&w, r->first.what);
        qc_jw_key(&w, "why");
        qc_jw_string(&w, r->first.why);
        qc_jw_end_object(&w);
    } else {
        qc_jw_null(&w);
    }
    qc_jw_key(&w, "tensors");
    qc_jw_u64(&w, r->tensors_checked);
    qc_jw_key(&w, "shards");
    qc_jw_u64(&w, r->manifest.shard_count);
    qc_jw_key(&w, "files");
    qc_jw_u64(&w, r->manifest.file_count);
    qc_jw_key(&w, "content_bytes");
    qc_jw_u64(&w, r->content_bytes);
    qc_jw_key(&w, "stored_bytes");
    qc_jw_u64(&w, r->stored_bytes);
    qc_jw_key(&w, "seconds");
    qc_jw_double(&w, seconds);
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
        /* Names come from the manifest: one line, whatever is in them. */
        out.data[out.len - 1] = '\0';
        qc_console_printable(out.data);
        out.data[out.len - 1] = '\n';
    }
    if (st == QC_OK)
        st = qc_console_result(&out, err);
    qc_strbuf_deinit(&out);
    return st;
}

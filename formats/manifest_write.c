#include "formats/manifest_internal.h"

#include <stdio.h>
#include <string.h>

void qc_manifest_put_calibration(qc_json_writer *w, const qc_manifest_calibration *c)
{
    if (c)
        qc_json_put_object(w, "calibrate", qc_manifest_calibration_rows,
                           c->hessians ? QC_WHEN_HESSIANS : QC_WHEN_TEXT, c);
}

void qc_manifest_put_adapters(qc_json_writer *w, const qc_manifest *m)
{
    if (m->adapter_count > 0)
        qc_json_put_list(w, "adapters", qc_manifest_adapter_rows, 0, m->adapters, m->adapter_count,
                         sizeof *m->adapters);
}

static void put_head(qc_json_writer *w, const qc_manifest *m)
{
    const qc_manifest_placement *p = &m->placement;
    qc_json_put_text(w, "format", QC_MANIFEST_FORMAT);
    qc_json_put_u64(w, "version",
                    m->adapter_count > 0  ? QC_MANIFEST_VERSION_MERGED
                    : m->calibration      ? QC_MANIFEST_VERSION_CALIBRATED
                    : p->device_count > 0 ? QC_MANIFEST_VERSION_PLACED
                                          : QC_MANIFEST_VERSION);
    qc_json_put_text(w, "qconv_version", m->qconv_version);
    if (qc_json_begin_object_if(w, "compression", m->compressed)) {
        qc_json_put_text(w, "method", QC_MANIFEST_METHOD);
        qc_json_put_u64(w, "level", (uint64_t)m->level);
        qc_json_put_text(w, "zstd_version", m->zstd_version);
        qc_json_end(w);
    }
    qc_json_begin_object(w, "options");
    qc_json_put_rows(w, qc_manifest_option_rows, 0, m);
    qc_json_begin_list(w, "rules");
    for (size_t i = 0; i < m->rule_count; i++)
        qc_json_put_text(w, NULL, m->rules[i]);
    if (m->scale) {
        char rule[64];
        (void)snprintf(rule, sizeof rule, QC_MANIFEST_SCALE_RULE "%s", m->scale);
        qc_json_put_text(w, NULL, rule);
    }
    qc_json_end(w);
    qc_manifest_put_calibration(w, m->calibration);
    qc_json_end(w);
    if (p->device_count > 0) {
        qc_json_begin_object(w, "placement");
        qc_json_put_rows(w, qc_manifest_placement_rows, 0, p);
        qc_json_put_list(w, "devices", qc_manifest_device_rows, 0, p->devices, p->device_count,
                         sizeof *p->devices);
        qc_json_end(w);
    }
    qc_manifest_put_adapters(w, m);
    qc_json_put_list(w, "sources", qc_manifest_source_rows, 0, m->sources, m->source_count,
                     sizeof *m->sources);
    qc_json_put_list(w, "shards", qc_manifest_shard_rows, qc_manifest_when(m), m->shards,
                     m->shard_count, sizeof *m->shards);
}

static void put_tensor(qc_json_writer *w, const qc_manifest *m, const qc_manifest_tensor *t)
{
    qc_json_begin_row(w, NULL);
    qc_json_put_rows(w, qc_manifest_tensor_rows, 0, t);
    qc_json_begin_list(w, "shape");
    for (unsigned i = 0; i < t->ndim; i++)
        qc_json_put_exact(w, NULL, t->dims[i]);
    qc_json_end(w);
    qc_json_put_rows(w, qc_manifest_place_rows, qc_manifest_when(m), t);
    if (t->has_error)
        qc_json_put_rows(w, qc_manifest_error_rows, 0, t);
    if (t->outputs)
        qc_json_put_object(w, "calibrated", qc_manifest_output_rows, 0, t->outputs);
    if (t->source_name) {
        qc_json_begin_object(w, "source");
        qc_json_put_text(w, "name", t->source_name);
        qc_json_put_rows(w, qc_manifest_tensor_source_rows, 0, t);
        qc_json_end(w);
    }
    qc_json_end(w);
}

/* Writes all but the last digest, which covers what stands before its first digit. file may be
 * NULL; otherwise out is its text. */
static qc_status put_all(const qc_manifest *m, qc_strbuf *out, qc_text_file *file, qc_error *err)
{
    static const char closing[] = "\n}"; /* the end of the object, which is taken back to add the
                                            digest */
    qc_json_writer w;
    QC_TRY(qc_manifest_check(m, err));
    qc_json_begin_text(&w, out, err);
    put_head(&w, m);
    qc_json_begin_list(&w, "tensors");
    for (size_t i = 0; i < m->tensor_count && w.st == QC_OK; i++) {
        qc_manifest_tensor room;
        const qc_manifest_tensor *t = NULL;
        w.st = qc_manifest_row(m, i, &room, &t, err);
        if (w.st == QC_OK)
            put_tensor(&w, m, t);
        if (w.st == QC_OK && file)
            w.st = qc_text_file_step(file, err);
    }
    qc_json_end(&w);
    qc_json_put_list(&w, "files", qc_manifest_file_rows, 0, m->files, m->file_count,
                     sizeof *m->files);
    qc_json_end(&w);
    qc_status st = qc_json_write_finish(&w);
    if (st == QC_ERR_RANGE)
        qc_error_prefix(err, "manifest");
    QC_TRY(st);
    w.out->len -= sizeof closing - 1;
    return qc_strbuf_adds(out, ",\n  \"" QC_MANIFEST_SEAL_KEY "\": \"", err);
}

static qc_status put_seal(qc_strbuf *out, const qc_digest *d, qc_error *err)
{
    char hex[QC_DIGEST_HEX_BYTES];
    qc_digest_hex(d, hex);
    return qc_strbuf_addf(out, err, "%s\"\n}\n", hex);
}

qc_status qc_manifest_write(const qc_manifest *m, qc_strbuf *out, qc_error *err)
{
    size_t start = out->len;
    qc_status st = put_all(m, out, NULL, err);
    if (st == QC_OK) {
        qc_digest d = qc_digest_bytes(out->data + start, out->len - start);
        st = put_seal(out, &d, err);
    }
    if (st != QC_OK && out->data) {
        out->len = start;
        out->data[start] = '\0';
    }
    return st;
}

qc_status qc_manifest_write_file(const qc_manifest *m, qc_text_file *out, qc_error *err)
{
    QC_TRY(put_all(m, &out->text, out, err));
    QC_TRY(qc_text_file_flush(out, err));
    qc_digest d = qc_text_file_digest(out);
    return put_seal(&out->text, &d, err);
}

void qc_manifest_make_plain(qc_manifest *m)
{
    m->compressed = 0;
    m->level = 0;
    m->zstd_version = NULL;
    for (size_t i = 0; i < m->shard_count; i++) {
        m->shards[i].file_bytes = 0;
        m->shards[i].header_stored_bytes = 0;
        m->shards[i].table_bytes = 0;
        memset(&m->shards[i].header_stored, 0, sizeof m->shards[i].header_stored);
        memset(&m->shards[i].table, 0, sizeof m->shards[i].table);
    }
    for (size_t i = 0; i < m->tensor_count; i++) {
        m->tensors[i].stored_offset = 0;
        m->tensors[i].stored_bytes = 0;
        memset(&m->tensors[i].stored, 0, sizeof m->tensors[i].stored);
    }
}

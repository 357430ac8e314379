#include "formats/manifest_internal.h"

#include "formats/json_writer.h"

#include <stdio.h>
#include <string.h>

#define EXACT_MAX 9007199254740991u /* 2^53 - 1: JSON readers keep this exactly */

/* A writer that also refuses integers that a reader might round. */
typedef struct {
    qc_json_writer jw;
    qc_text_file *file; /* jw writes to its text; may be NULL */
    uint64_t too_large;
} writer;

static void put_u64(writer *w, const char *key, uint64_t v)
{
    if (v > EXACT_MAX)
        w->too_large = v;
    qc_jw_key(&w->jw, key);
    qc_jw_u64(&w->jw, v);
}

static void put_string(writer *w, const char *key, const char *s)
{
    qc_jw_key(&w->jw, key);
    qc_jw_string(&w->jw, s);
}

static void put_double(writer *w, const char *key, double v)
{
    qc_jw_key(&w->jw, key);
    qc_jw_double(&w->jw, v);
}

static void put_bool(writer *w, const char *key, int v)
{
    qc_jw_key(&w->jw, key);
    qc_jw_bool(&w->jw, v);
}

static void put_digest(writer *w, const char *key, const qc_digest *d)
{
    char hex[QC_DIGEST_HEX_BYTES];
    qc_digest_hex(d, hex);
    put_string(w, key, hex);
}

static void put_calibration(writer *w, const qc_manifest_calibration *c)
{
    if (!c)
        return;
    qc_jw_key(&w->jw, "calibrate");
    qc_jw_begin_object(&w->jw);
    if (c->hessians) {
        put_string(w, "hessians", c->hessians);
    } else {
        put_string(w, "text", c->text);
        put_digest(w, "xxh3_128", &c->digest);
        put_string(w, "tokenizer", c->tokenizer);
        put_u64(w, "tokens", c->tokens);
        put_u64(w, "windows", c->windows);
        put_u64(w, "context", c->context);
    }
    put_double(w, "damping", c->damping);
    qc_jw_end_object(&w->jw);
}

static void put_head(writer *w, const qc_manifest *m)
{
    put_string(w, "format", QC_MANIFEST_FORMAT);
    put_u64(w, "version",
            m->calibration                  ? QC_MANIFEST_VERSION_CALIBRATED
            : m->placement.device_count > 0 ? QC_MANIFEST_VERSION_PLACED
                                            : QC_MANIFEST_VERSION);
    put_string(w, "qconv_version", m->qconv_version);
    qc_jw_key(&w->jw, "compression");
    if (m->compressed) {
        qc_jw_begin_object(&w->jw);
        put_string(w, "method", QC_MANIFEST_METHOD);
        put_u64(w, "level", (uint64_t)m->level);
        put_string(w, "zstd_version", m->zstd_version);
        qc_jw_end_object(&w->jw);
    } else {
        qc_jw_null(&w->jw);
    }
    qc_jw_key(&w->jw, "options");
    qc_jw_begin_object(&w->jw);
    put_string(w, "to", m->to);
    put_u64(w, "block_elems", m->block_elems);
    put_bool(w, "double_quant", m->double_quant);
    put_string(w, "rest", m->rest);
    put_string(w, "compute_dtype", m->compute_dtype);
    put_u64(w, "max_shard_bytes", m->max_shard_bytes);
    qc_jw_key(&w->jw, "rules");
    qc_jw_begin_array(&w->jw);
    for (size_t i = 0; i < m->rule_count; i++)
        qc_jw_string(&w->jw, m->rules[i]);
    if (m->scale) {
        char rule[64];
        (void)snprintf(rule, sizeof rule, QC_MANIFEST_SCALE_RULE "%s", m->scale);
        qc_jw_string(&w->jw, rule);
    }
    qc_jw_end_array(&w->jw);
    put_calibration(w, m->calibration);
    qc_jw_end_object(&w->jw);
}

static void begin_row(writer *w)
{
    qc_jw_compact_next(&w->jw);
    qc_jw_begin_object(&w->jw);
}

static void put_placement(writer *w, const qc_manifest_placement *p)
{
    if (p->device_count == 0)
        return;
    qc_jw_key(&w->jw, "placement");
    qc_jw_begin_object(&w->jw);
    put_string(w, "vram", p->vram);
    put_double(w, "margin", p->margin);
    put_u64(w, "context", p->context);
    put_u64(w, "batch", p->batch);
    put_u64(w, "images", p->images);
    put_u64(w, "kv_bits", p->kv_bits);
    put_bool(w, "mla_expanded", p->mla_expanded);
    qc_jw_key(&w->jw, "devices");
    qc_jw_begin_array(&w->jw);
    for (size_t i = 0; i < p->device_count; i++) {
        begin_row(w);
        put_string(w, "name", p->devices[i].name);
        put_u64(w, "tensor_bytes", p->devices[i].tensor_bytes);
        put_u64(w, "shard_bytes", p->devices[i].shard_bytes);
        qc_jw_end_object(&w->jw);
    }
    qc_jw_end_array(&w->jw);
    qc_jw_end_object(&w->jw);
}

static void put_source(writer *w, const qc_manifest_source *s)
{
    put_string(w, "name", s->name);
    put_u64(w, "bytes", s->bytes);
    put_digest(w, "header_xxh3_128", &s->header);
}

static void put_shard(writer *w, const qc_manifest *m, const qc_manifest_shard *s)
{
    put_string(w, "name", s->name);
    put_u64(w, "content_bytes", s->content_bytes);
    put_u64(w, "header_bytes", s->header_bytes);
    put_digest(w, "header_xxh3_128", &s->header);
    if (m->placement.device_count > 0)
        put_u64(w, "device", s->device);
    if (!m->compressed)
        return;
    put_u64(w, "file_bytes", s->file_bytes);
    put_u64(w, "header_stored_bytes", s->header_stored_bytes);
    put_digest(w, "header_stored_xxh3_128", &s->header_stored);
    put_u64(w, "table_bytes", s->table_bytes);
    put_digest(w, "table_xxh3_128", &s->table);
}

static void put_tensor(writer *w, const qc_manifest *m, const qc_manifest_tensor *t)
{
    put_string(w, "name", t->name);
    put_string(w, "scheme", t->scheme);
    put_string(w, "dtype", qc_dtype_name(t->dtype));
    qc_jw_key(&w->jw, "shape");
    qc_jw_begin_array(&w->jw);
    for (unsigned i = 0; i < t->ndim; i++) {
        if (t->dims[i] > EXACT_MAX)
            w->too_large = t->dims[i];
        qc_jw_u64(&w->jw, t->dims[i]);
    }
    qc_jw_end_array(&w->jw);
    put_u64(w, "shard", t->shard);
    put_u64(w, "begin", t->begin);
    put_u64(w, "end", t->end);
    put_u64(w, "piece_bytes", t->piece_bytes);
    put_digest(w, "xxh3_128", &t->content);
    if (m->compressed) {
        put_u64(w, "stored_offset", t->stored_offset);
        put_u64(w, "stored_bytes", t->stored_bytes);
        put_digest(w, "stored_xxh3_128", &t->stored);
    }
    if (t->has_error) {
        put_double(w, "rel_mse", t->rel_mse);
        put_double(w, "max_err", t->max_err);
        put_u64(w, "max_err_index", t->max_err_index);
    }
    if (t->outputs) {
        qc_jw_key(&w->jw, "calibrated");
        qc_jw_begin_object(&w->jw);
        put_double(w, "rounded", t->outputs->rounded);
        put_double(w, "calibrated", t->outputs->calibrated);
        qc_jw_end_object(&w->jw);
    }
    if (!t->source_name)
        return;
    qc_jw_key(&w->jw, "source");
    qc_jw_begin_object(&w->jw);
    put_string(w, "name", t->source_name);
    put_string(w, "dtype", qc_dtype_name(t->source_dtype));
    put_u64(w, "piece_bytes", t->source_piece_bytes);
    put_digest(w, "xxh3_128", &t->source);
    qc_jw_end_object(&w->jw);
}

static void put_file(writer *w, const qc_manifest_file *f)
{
    put_string(w, "path", f->path);
    put_u64(w, "bytes", f->bytes);
    put_digest(w, "xxh3_128", &f->digest);
}

static void put_tensor_row(writer *w, const qc_manifest *m, size_t i)
{
    qc_manifest_tensor room;
    const qc_manifest_tensor *t = NULL;
    w->jw.st = qc_manifest_row(m, i, &room, &t, w->jw.err);
    if (w->jw.st != QC_OK)
        return;
    begin_row(w);
    put_tensor(w, m, t);
    qc_jw_end_object(&w->jw);
    if (w->jw.st == QC_OK && w->file)
        w->jw.st = qc_text_file_step(w->file, w->jw.err);
}

static void put_lists(writer *w, const qc_manifest *m)
{
    qc_jw_key(&w->jw, "sources");
    qc_jw_begin_array(&w->jw);
    for (size_t i = 0; i < m->source_count; i++) {
        begin_row(w);
        put_source(w, &m->sources[i]);
        qc_jw_end_object(&w->jw);
    }
    qc_jw_end_array(&w->jw);
    qc_jw_key(&w->jw, "shards");
    qc_jw_begin_array(&w->jw);
    for (size_t i = 0; i < m->shard_count; i++) {
        begin_row(w);
        put_shard(w, m, &m->shards[i]);
        qc_jw_end_object(&w->jw);
    }
    qc_jw_end_array(&w->jw);
    qc_jw_key(&w->jw, "tensors");
    qc_jw_begin_array(&w->jw);
    for (size_t i = 0; i < m->tensor_count && w->jw.st == QC_OK; i++)
        put_tensor_row(w, m, i);
    qc_jw_end_array(&w->jw);
    qc_jw_key(&w->jw, "files");
    qc_jw_begin_array(&w->jw);
    for (size_t i = 0; i < m->file_count; i++) {
        begin_row(w);
        put_file(w, &m->files[i]);
        qc_jw_end_object(&w->jw);
    }
    qc_jw_end_array(&w->jw);
}

/* Writes all but the last digest, which covers what stands before its first digit. */
static qc_status put_all(writer *w, const qc_manifest *m, qc_strbuf *out, qc_error *err)
{
    static const char closing[] = "\n}"; /* the end of the object, which is taken back to add the
                                            digest */
    QC_TRY(qc_manifest_check(m, err));
    qc_jw_init(&w->jw, out, err);
    qc_jw_begin_object(&w->jw);
    put_head(w, m);
    put_placement(w, &m->placement);
    put_lists(w, m);
    qc_jw_end_object(&w->jw);
    QC_TRY(qc_jw_finish(&w->jw));
    if (w->too_large)
        QC_FAIL(err, QC_ERR_RANGE, "manifest: %llu is more than JSON numbers hold exactly",
                (unsigned long long)w->too_large);
    out->len -= sizeof closing - 1;
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
    writer w = {.too_large = 0};
    qc_status st = put_all(&w, m, out, err);
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
    writer w = {.file = out};
    QC_TRY(put_all(&w, m, &out->text, err));
    QC_TRY(qc_text_file_flush(out, err));
    qc_digest d = qc_text_file_digest(out);
    return put_seal(&out->text, &d, err);
}

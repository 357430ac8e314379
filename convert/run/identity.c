/* Writes down what the bytes of an output depend on, as lines of text that two runs compare. */
#include "convert/run/resume.h"

#include "convert/adapter/adapters.h"
#include "convert/calibrate/calibrate.h"
#include "convert/fit/fit.h"
#include "convert/run/make_manifest.h"
#include "formats/seekable.h"

#include <inttypes.h>
#include <string.h>

#define SOURCE_PREFIX "source."

/* ---- making it ---- */

/* A value may come from a command line or be a file's name. It is escaped, so that a line stays one
 * line. */
static void add_escaped(qc_strbuf *out, const char *s)
{
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (c < 0x20 || c == 0x7f || c == '%')
            qc_strbuf_putf(out, "%%%02x", c);
        else
            qc_strbuf_put(out, s, 1);
    }
}

static void add_text(qc_strbuf *out, const char *key, const char *value)
{
    qc_strbuf_putf(out, "%s=", key);
    add_escaped(out, value ? value : "not given");
    qc_strbuf_puts(out, "\n");
}

static void add_given(qc_strbuf *out, const char *key, int given)
{
    add_text(out, key, given ? "given" : NULL);
}

static void add_number(qc_strbuf *out, const char *key, uint64_t value)
{
    qc_strbuf_putf(out, "%s=%" PRIu64 "\n", key, value);
}

static void add_double(qc_strbuf *out, const char *key, double value)
{
    qc_strbuf_putf(out, "%s=%.17g\n", key, value);
}

static void add_options(qc_strbuf *out, const qc_plan_options *o)
{
    static const char *const scales[] = {QC_SCALE_NAMES};
    const qc_recipe_options *r = &o->recipe;
    add_text(out, "--to", qc_to_name(r->to));
    if (r->format != QC_FORMAT_BITSANDBYTES)
        add_text(out, "--format", qc_format_name(r->format));
    if (r->format == QC_FORMAT_COMPRESSED_TENSORS)
        add_number(out, "--activation-bits", r->activations_16 ? 16 : 8);
    if (r->per_channel)
        add_text(out, "--block-size", "channel");
    else
        add_number(out, "--block-size", r->block_elems);
    add_given(out, "--no-double-quant", !r->double_quant);
    add_text(out, "--scale", scales[r->scale]);
    add_text(out, "--rest", qc_rest_name(r->rest));
    add_text(out, "--compute-dtype", r->compute_dtype);
    if (o->compress)
        qc_strbuf_putf(out, "--compress=zstd:%d\n", o->compress_level);
    else
        add_text(out, "--compress", "none");
    add_number(out, "--max-shard-size", o->max_shard_bytes);
    add_given(out, "--requantize", r->requantize);
    add_given(out, "--drop-mtp", r->drop_mtp);
    add_given(out, "--split-fused", r->split_fused);
    if (r->experts != QC_EXPERTS_AS_FOUND)
        add_text(out, "--experts", r->experts == QC_EXPERTS_STACKED ? "stacked" : "separate");
    add_text(out, "--schemes", r->schemes);
    if (r->bits > 0)
        add_double(out, "--bits", r->bits);
    for (uint32_t i = 0; i < r->rule_count; i++)
        add_text(out, r->rules[i].quantize ? "--quantize" : "--keep", r->rules[i].glob);
    const qc_fit_options *f = &o->fit;
    add_text(out, "--vram", f->vram.text);
    if (!f->vram.text)
        return;
    add_double(out, "--margin", f->margin);
    add_number(out, "--context", f->context);
    add_number(out, "--batch", f->batch);
    add_number(out, "--images", f->images);
    add_number(out, "--kv-dtype", f->kv_bits);
    add_text(out, "--mla", qc_fit_mla_name(f));
    add_number(out, "--prefill", f->prefill);
    add_number(out, "--cuda-context", f->cuda_context_bytes);
    if (f->parallel == QC_PARALLEL_TENSOR)
        add_number(out, "--tp", f->tensor_parallel);
}

static void hash_u64(qc_digest_state *h, uint64_t v)
{
    unsigned char b[8];
    for (unsigned i = 0; i < sizeof b; i++)
        b[i] = (unsigned char)(v >> 8 * i);
    qc_digest_update(h, b, sizeof b);
}

static void hash_text(qc_digest_state *h, const char *s)
{
    hash_u64(h, strlen(s));
    qc_digest_update(h, s, strlen(s));
}

static qc_status add_plan(qc_strbuf *out, const qc_plan *plan, qc_error *err)
{
    char hex[QC_DIGEST_HEX_BYTES];
    qc_digest_state *h = NULL;
    qc_status st = QC_OK;
    qc_strbuf name;
    qc_strbuf_init(&name, SIZE_MAX / 2);
    QC_TRY(qc_digest_create(&h, err));
    qc_digest_reset(h);
    for (uint32_t s = 0; st == QC_OK && s < plan->layout.count; s++) {
        const qc_shard *sh = &plan->layout.shards[s];
        hash_text(h, sh->name);
        hash_u64(h, sh->header_bytes);
        hash_u64(h, sh->data_bytes);
        hash_u64(h, sh->device);
        hash_u64(h, sh->count);
        for (uint32_t k = 0; st == QC_OK && k < sh->count; k++) {
            const qc_output *o = &plan->outputs[sh->order[k]];
            const qc_job *j = &plan->jobs[o->job];
            qc_manifest_tensor t;
            st = qc_manifest_plan_row(&t, &name, plan, sh->order[k], err);
            if (st != QC_OK)
                break;
            hash_text(h, t.name);
            hash_u64(h, t.dtype);
            hash_u64(h, t.ndim);
            for (unsigned i = 0; i < t.ndim; i++)
                hash_u64(h, t.dims[i]);
            hash_u64(h, t.begin);
            hash_u64(h, t.end);
            hash_u64(h, t.piece_bytes);
            hash_u64(h, o->job);
            hash_u64(h, o->role);
            hash_text(h, plan->model->tensors[j->source].name);
            hash_u64(h, j->scheme);
            hash_u64(h, j->form.block_elems);
            hash_u64(h, (uint64_t)j->form.nested);
            hash_u64(h, j->scale);
            hash_u64(h, (uint64_t)j->entry->transpose);
        }
    }
    qc_digest digest = qc_digest_finish(h);
    qc_digest_destroy(h);
    qc_strbuf_deinit(&name);
    qc_digest_hex(&digest, hex);
    add_text(out, "plan", hex);
    return st;
}

qc_status qc_identity_make(qc_strbuf *out, const qc_plan *plan, unsigned part_count, qc_error *err)
{
    const qc_calibrate_options *o = &plan->options->calibrate;
    const qc_checkpoint *m = plan->model;
    char hex[QC_DIGEST_HEX_BYTES], weights[QC_DIGEST_HEX_BYTES];
    const char *calibration = NULL;
    size_t count = 0;
    add_number(out, "format", QC_RESUME_FORMAT);
    add_text(out, "qconv", QCONV_VERSION);
    add_number(out, "parts", part_count);
    add_options(out, plan->options);
    add_given(out, "--hessians", o->hessians != NULL);
    if (qc_calibrates(o)) {
        add_double(out, "--damping", o->damping);
        add_number(out, "--sided", o->sided);
        QC_TRY(qc_calibrate_identity(&calibration, plan, err));
        add_text(out, "calibration", calibration); /* which moments, and on what computed */
    }
    if (plan->options->compress)
        add_text(out, "zstd", qc_frame_library_version());
    /* Adapters have no names here: the same one may lie elsewhere when the conversion goes on. */
    const qc_attached_adapter *a = qc_adapters_of(m, &count);
    qc_strbuf_puts(out, count ? "--lora=" : "--lora=not given");
    for (size_t i = 0; i < count; i++) {
        qc_digest_hex(&a[i].adapter->config_digest, hex);
        qc_digest_hex(&a[i].adapter->weights_digest, weights);
        qc_strbuf_putf(out, "%sweights %s, config %s, times %.17g", i ? "; " : "", weights, hex,
                       a[i].scale);
    }
    qc_strbuf_puts(out, "\n");
    qc_digest digest = qc_digest_bytes(m->config_text, m->config_len);
    qc_digest_hex(&digest, hex);
    add_text(out, SOURCE_PREFIX "config", m->config ? hex : "none");
    for (size_t i = 0; i < m->file_count; i++) {
        const qc_checkpoint_file *f = &m->files[i];
        QC_TRY(qc_checkpoint_head_digest(m, i, &digest, err));
        qc_digest_hex(&digest, hex);
        qc_strbuf_putf(out, SOURCE_PREFIX "%zu=", i + 1);
        add_escaped(out, f->name);
        qc_strbuf_putf(out, ", %" PRIu64 " bytes, header %s\n", f->file_bytes, hex);
    }
    QC_TRY(add_plan(out, plan, err));
    return qc_strbuf_status(out, err);
}

/* ---- comparing two ---- */

typedef struct {
    const char *key, *value;
    size_t key_len, value_len;
} identity_line;

/* Returns the line at *at, and moves *at behind it. At the end the key is empty. */
static identity_line next_line(const char *text, size_t len, size_t *at)
{
    identity_line l = {"", "nothing", 0, 7};
    if (*at >= len)
        return l;
    const char *begin = text + *at;
    const char *end = memchr(begin, '\n', len - *at);
    end = end ? end : text + len;
    const char *equals = memchr(begin, '=', (size_t)(end - begin));
    equals = equals ? equals : end;
    l.key = begin;
    l.key_len = (size_t)(equals - begin);
    l.value = equals < end ? equals + 1 : end;
    l.value_len = (size_t)(end - l.value);
    *at = (size_t)(end - text) + 1;
    return l;
}

static int is_same(const char *a, size_t a_len, const char *b, size_t b_len)
{
    return a_len == b_len && memcmp(a, b, a_len) == 0;
}

static int shown(size_t len)
{
    return len < 120 ? (int)len : 120;
}

qc_status qc_identity_compare(const char *then, size_t then_bytes, const char *now,
                              size_t now_bytes, const char *out, qc_error *err)
{
    size_t a = 0, b = 0, prefix = sizeof SOURCE_PREFIX - 1;
    while (a < then_bytes || b < now_bytes) {
        const identity_line x = next_line(then, then_bytes, &a), y = next_line(now, now_bytes, &b);
        const int same_key = is_same(x.key, x.key_len, y.key, y.key_len);
        if (same_key && is_same(x.value, x.value_len, y.value, y.value_len))
            continue;
        const identity_line *named = y.key_len ? &y : &x;
        const int is_source =
            named->key_len > prefix && memcmp(named->key, SOURCE_PREFIX, prefix) == 0;
        const qc_status code = is_source ? QC_ERR_INPUT : QC_ERR_USAGE;
        if (same_key)
            QC_FAIL(err, code,
                    "%s holds an interrupted conversion that this one cannot continue: %.*s was "
                    "'%.*s' then and is '%.*s' now" QC_RESTART_ADVICE,
                    out, shown(named->key_len), named->key, shown(x.value_len), x.value,
                    shown(y.value_len), y.value);
        QC_FAIL(err, code,
                "%s holds an interrupted conversion that this one cannot continue: it had %.*s "
                "'%.*s' where this one has %.*s '%.*s'" QC_RESTART_ADVICE,
                out, shown(x.key_len), x.key, shown(x.value_len), x.value, shown(y.key_len), y.key,
                shown(y.value_len), y.value);
    }
    return QC_OK;
}

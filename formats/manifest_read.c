/* Reads a manifest: first its digest, then its members one after the other. The rows of tensors
 * come one by one, so that neither the whole text nor its tree is ever in memory.
 *
 * Members come in the order in which they are written, and unknown ones are refused. So one walk
 * over the tree reads everything, and a manifest has only one spelling. */
#include "formats/manifest_internal.h"

#include "base/alloc.h"
#include "formats/file_io.h"
#include "formats/json_cut.h"
#include "formats/json_strict.h"

#include <string.h>

#define TEXT_MAX    ((size_t)1 << 30)
#define SEAL_TAIL   "\"\n}\n"
#define SEAL_BEFORE "\"" QC_MANIFEST_SEAL_KEY "\": \""
#define HEX_BYTES   (QC_DIGEST_HEX_BYTES - 1)
#define CHUNK_BYTES ((size_t)256 << 10)

/* A position among the members of an object or the elements of an array. */
typedef struct {
    const qc_json_node *next;
    qc_arena *arena;
} walk;

/* Where the text is. */
typedef struct {
    const char *text;
    const qc_file *file; /* where text is NULL */
    uint64_t len;
} source;

static qc_status read_at(const source *s, uint64_t at, char *dst, size_t len, qc_error *err)
{
    if (!s->text)
        return qc_file_pread(s->file, dst, len, at, err);
    memcpy(dst, s->text + at, len);
    return QC_OK;
}

static qc_status find_seal(const source *s, uint64_t *covered, qc_digest *want, qc_error *err)
{
    enum { TAIL = sizeof SEAL_TAIL - 1, KEY = sizeof SEAL_BEFORE - 1 };
    char end[KEY + HEX_BYTES + TAIL] = {0}, hex[QC_DIGEST_HEX_BYTES] = {0};
    if (s->len >= sizeof end)
        QC_TRY(read_at(s, s->len - sizeof end, end, sizeof end, err));
    if (s->len < sizeof end || memcmp(end + sizeof end - TAIL, SEAL_TAIL, TAIL) != 0)
        QC_FAIL(err, QC_ERR_CHECK, "does not end as it was written: cut short or changed");
    memcpy(hex, end + KEY, HEX_BYTES);
    if (memcmp(end, SEAL_BEFORE, KEY) != 0 || qc_digest_from_hex(want, hex) != 0)
        QC_FAIL(err, QC_ERR_CHECK, "has no digest at its end: cut short or changed");
    *covered = s->len - TAIL - HEX_BYTES;
    return QC_OK;
}

/* Feeds the text to `cut` bit by bit. *digest is that of the first `covered` bytes. */
static qc_status read_through(const source *s, qc_json_cut *cut, uint64_t covered,
                              qc_digest *digest, qc_error *err)
{
    qc_digest_state *hash = NULL;
    void *v = NULL;
    qc_status st = qc_malloc(&v, CHUNK_BYTES, err);
    char *chunk = v;
    if (st == QC_OK)
        st = qc_digest_create(&hash, err);
    if (st == QC_OK)
        qc_digest_reset(hash);
    for (uint64_t at = 0; st == QC_OK && at < s->len;) {
        size_t n = s->len - at < CHUNK_BYTES ? (size_t)(s->len - at) : CHUNK_BYTES;
        QC_TRY_GOTO(st, done, read_at(s, at, chunk, n, err));
        if (at < covered)
            qc_digest_update(hash, chunk, covered - at < n ? (size_t)(covered - at) : n);
        st = qc_json_cut_feed(cut, chunk, n, err);
        at += n;
    }
    if (st == QC_OK)
        *digest = qc_digest_finish(hash);
done:
    qc_digest_destroy(hash);
    qc_free(v);
    return st;
}

/* Checks the digest first; *rows: elements of the list of tensors. */
static qc_status check_seal(const source *s, uint64_t *covered, qc_digest *want, size_t *rows,
                            qc_error *err)
{
    qc_digest have;
    qc_json_cut cut;
    QC_TRY(find_seal(s, covered, want, err));
    qc_json_cut_init(&cut, &(qc_json_parts){.list = "tensors"});
    qc_status st = read_through(s, &cut, *covered, &have, err);
    *rows = (size_t)cut.elements;
    qc_json_cut_deinit(&cut);
    if (st == QC_OK && !qc_digest_equal(&have, want))
        st = qc_error_set(err, QC_ERR_CHECK, __FILE__, __LINE__,
                          "its digest does not fit: damaged or changed");
    return st;
}

/* ---- Members -------------------------------------------------------------------------------- */

static qc_status enter(walk *w, qc_arena *arena, const qc_json_node *n, qc_json_kind kind,
                       const char *what, qc_error *err)
{
    if (qc_json_kind_of(n) != kind)
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected an %s, found a %s", what, qc_json_kind_name(kind),
                qc_json_kind_name(qc_json_kind_of(n)));
    w->next = qc_json_first(n);
    w->arena = arena;
    return QC_OK;
}

static int is_next(const walk *w, const char *key)
{
    return w->next && strcmp(qc_json_key(w->next), key) == 0;
}

static qc_status take(walk *w, const char *key, const qc_json_node **out, qc_error *err)
{
    if (!w->next)
        QC_FAIL(err, QC_ERR_INPUT, "member '%s' is missing", key);
    if (!is_next(w, key))
        QC_FAIL(err, QC_ERR_INPUT, "expected member '%s', found '%s'", key, qc_json_key(w->next));
    *out = w->next;
    w->next = qc_json_next(w->next);
    return QC_OK;
}

static qc_status leave(const walk *w, qc_error *err)
{
    if (w->next)
        QC_FAIL(err, QC_ERR_INPUT, "member '%s' is not known here", qc_json_key(w->next));
    return QC_OK;
}

static qc_status take_u64(walk *w, const char *key, uint64_t *out, qc_error *err)
{
    const qc_json_node *n = NULL;
    QC_TRY(take(w, key, &n, err));
    return qc_json_as_u64(n, key, out, err);
}

static qc_status take_double(walk *w, const char *key, double *out, qc_error *err)
{
    const qc_json_node *n = NULL;
    QC_TRY(take(w, key, &n, err));
    return qc_json_as_double(n, key, out, err);
}

static qc_status take_string(walk *w, const char *key, const char **out, qc_error *err)
{
    const qc_json_node *n = NULL;
    const char *s = NULL;
    QC_TRY(take(w, key, &n, err));
    QC_TRY(qc_json_as_string(n, key, &s, err));
    return qc_arena_strndup(w->arena, out, s, strlen(s), err);
}

static qc_status take_digest(walk *w, const char *key, qc_digest *out, qc_error *err)
{
    const qc_json_node *n = NULL;
    const char *s = NULL;
    QC_TRY(take(w, key, &n, err));
    QC_TRY(qc_json_as_string(n, key, &s, err));
    if (qc_digest_from_hex(out, s) != 0)
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected 32 lower-case hex digits, found '%s'", key, s);
    return QC_OK;
}

static qc_status take_dtype(walk *w, const char *key, qc_dtype *out, qc_error *err)
{
    const qc_json_node *n = NULL;
    const char *s = NULL;
    QC_TRY(take(w, key, &n, err));
    QC_TRY(qc_json_as_string(n, key, &s, err));
    if (qc_dtype_from_name(s, strlen(s), out) != 0)
        QC_FAIL(err, QC_ERR_INPUT, "%s: '%s' is not known", key, s);
    return QC_OK;
}

/* ---- Parts ---------------------------------------------------------------------------------- */

static qc_status read_compression(qc_manifest *m, walk *top, qc_error *err)
{
    const qc_json_node *n = NULL;
    const char *method = NULL;
    uint64_t level = 0;
    walk w;
    QC_TRY(take(top, "compression", &n, err));
    if (qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    QC_TRY(enter(&w, top->arena, n, QC_JSON_OBJECT, "compression", err));
    QC_TRY(take_string(&w, "method", &method, err));
    if (strcmp(method, QC_MANIFEST_METHOD) != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "compression: method '%s' is not known", method);
    QC_TRY(take_u64(&w, "level", &level, err));
    QC_TRY(take_string(&w, "zstd_version", &m->zstd_version, err));
    m->compressed = 1;
    m->level = level < 100 ? (int)level : 100; /* out of range either way */
    return leave(&w, err);
}

static qc_status read_calibration(qc_manifest *m, walk *options, qc_error *err)
{
    const qc_json_node *n = NULL;
    void *v = NULL;
    walk w;
    QC_TRY(take(options, "calibrate", &n, err));
    QC_TRY(enter(&w, options->arena, n, QC_JSON_OBJECT, "calibrate", err));
    QC_TRY(qc_arena_alloc(options->arena, &v, 1, sizeof(qc_manifest_calibration), err));
    qc_manifest_calibration *c = v;
    memset(c, 0, sizeof *c);
    if (is_next(&w, "hessians")) {
        QC_TRY(take_string(&w, "hessians", &c->hessians, err));
    } else {
        QC_TRY(take_string(&w, "text", &c->text, err));
        QC_TRY(take_digest(&w, "xxh3_128", &c->digest, err));
        QC_TRY(take_string(&w, "tokenizer", &c->tokenizer, err));
        QC_TRY(take_u64(&w, "tokens", &c->tokens, err));
        QC_TRY(take_u64(&w, "windows", &c->windows, err));
        QC_TRY(take_u64(&w, "context", &c->context, err));
    }
    QC_TRY(take_double(&w, "damping", &c->damping, err));
    m->calibration = c;
    return leave(&w, err);
}

static qc_status read_options(qc_manifest *m, walk *top, uint64_t version, qc_error *err)
{
    const qc_json_node *n = NULL;
    void *v = NULL;
    walk w, rules;
    QC_TRY(take(top, "options", &n, err));
    QC_TRY(enter(&w, top->arena, n, QC_JSON_OBJECT, "options", err));
    QC_TRY(take_string(&w, "to", &m->to, err));
    QC_TRY(take_u64(&w, "block_elems", &m->block_elems, err));
    QC_TRY(take(&w, "double_quant", &n, err));
    QC_TRY(qc_json_as_bool(n, "double_quant", &m->double_quant, err));
    QC_TRY(take_string(&w, "rest", &m->rest, err));
    if (is_next(&w, "compute_dtype") && qc_json_kind_of(w.next) == QC_JSON_NULL)
        QC_TRY(take(&w, "compute_dtype", &n, err));
    else
        QC_TRY(take_string(&w, "compute_dtype", &m->compute_dtype, err));
    QC_TRY(take_u64(&w, "max_shard_bytes", &m->max_shard_bytes, err));
    QC_TRY(take(&w, "rules", &n, err));
    if (version == QC_MANIFEST_VERSION_CALIBRATED)
        QC_TRY(read_calibration(m, &w, err));
    QC_TRY(leave(&w, err));
    QC_TRY(enter(&rules, top->arena, n, QC_JSON_ARRAY, "rules", err));
    for (const qc_json_node *e = rules.next; e; e = qc_json_next(e))
        m->rule_count++;
    QC_TRY(qc_arena_alloc(top->arena, &v, m->rule_count, sizeof *m->rules, err));
    m->rules = v;
    for (size_t i = 0; i < m->rule_count; i++, rules.next = qc_json_next(rules.next)) {
        const char *s = NULL;
        QC_TRY(qc_json_as_string(rules.next, "rules", &s, err));
        QC_TRY(qc_arena_strndup(top->arena, &m->rules[i], s, strlen(s), err));
    }
    const size_t prefix = sizeof QC_MANIFEST_SCALE_RULE - 1;
    const char *last = m->rule_count > 0 ? m->rules[m->rule_count - 1] : "";
    if (strncmp(last, QC_MANIFEST_SCALE_RULE, prefix) == 0) {
        m->scale = last + prefix;
        m->rule_count--;
    }
    return QC_OK;
}

static qc_status read_source(void *row, const qc_manifest *m, walk *w, qc_error *err)
{
    qc_manifest_source *s = row;
    (void)m;
    QC_TRY(take_string(w, "name", &s->name, err));
    QC_TRY(take_u64(w, "bytes", &s->bytes, err));
    return take_digest(w, "header_xxh3_128", &s->header, err);
}

static qc_status read_shard(void *row, const qc_manifest *m, walk *w, qc_error *err)
{
    qc_manifest_shard *s = row;
    QC_TRY(take_string(w, "name", &s->name, err));
    QC_TRY(take_u64(w, "content_bytes", &s->content_bytes, err));
    QC_TRY(take_u64(w, "header_bytes", &s->header_bytes, err));
    QC_TRY(take_digest(w, "header_xxh3_128", &s->header, err));
    if (m->placement.device_count > 0) {
        uint64_t device = 0;
        QC_TRY(take_u64(w, "device", &device, err));
        if (device >= m->placement.device_count)
            QC_FAIL(err, QC_ERR_INPUT, "device: there is no number %llu",
                    (unsigned long long)device);
        s->device = (uint32_t)device;
    }
    if (!m->compressed)
        return QC_OK;
    QC_TRY(take_u64(w, "file_bytes", &s->file_bytes, err));
    QC_TRY(take_u64(w, "header_stored_bytes", &s->header_stored_bytes, err));
    QC_TRY(take_digest(w, "header_stored_xxh3_128", &s->header_stored, err));
    QC_TRY(take_u64(w, "table_bytes", &s->table_bytes, err));
    return take_digest(w, "table_xxh3_128", &s->table, err);
}

static qc_status read_shape(qc_manifest_tensor *t, walk *w, qc_error *err)
{
    const qc_json_node *n = NULL;
    walk dims = {0};
    QC_TRY(take(w, "shape", &n, err));
    QC_TRY(enter(&dims, w->arena, n, QC_JSON_ARRAY, "shape", err));
    for (; dims.next; dims.next = qc_json_next(dims.next)) {
        if (t->ndim == QC_MAX_DIMS)
            QC_FAIL(err, QC_ERR_INPUT, "shape: more than %u dimensions", (unsigned)QC_MAX_DIMS);
        QC_TRY(qc_json_as_u64(dims.next, "shape", &t->dims[t->ndim++], err));
    }
    return QC_OK;
}

static qc_status read_tensor_source(qc_manifest_tensor *t, walk *w, qc_error *err)
{
    const qc_json_node *n = NULL;
    walk s;
    QC_TRY(take(w, "source", &n, err));
    QC_TRY(enter(&s, w->arena, n, QC_JSON_OBJECT, "source", err));
    QC_TRY(take(&s, "name", &n, err));
    QC_TRY(qc_json_as_string(n, "name", &t->source_name, err));
    if (strcmp(t->source_name, t->name) == 0)
        t->source_name = t->name; /* as most are */
    else
        QC_TRY(qc_arena_strndup(w->arena, &t->source_name, t->source_name, strlen(t->source_name),
                                err));
    QC_TRY(take_dtype(&s, "dtype", &t->source_dtype, err));
    QC_TRY(take_u64(&s, "piece_bytes", &t->source_piece_bytes, err));
    QC_TRY(take_digest(&s, "xxh3_128", &t->source, err));
    return leave(&s, err);
}

static qc_status read_outputs(qc_manifest_tensor *t, walk *w, qc_error *err)
{
    const qc_json_node *n = NULL;
    void *v = NULL;
    walk o;
    QC_TRY(take(w, "calibrated", &n, err));
    QC_TRY(enter(&o, w->arena, n, QC_JSON_OBJECT, "calibrated", err));
    QC_TRY(qc_arena_alloc(w->arena, &v, 1, sizeof *t->outputs, err));
    qc_manifest_outputs *outputs = v;
    QC_TRY(take_double(&o, "rounded", &outputs->rounded, err));
    QC_TRY(take_double(&o, "calibrated", &outputs->calibrated, err));
    t->outputs = outputs;
    return leave(&o, err);
}

/* Takes one of the few schemes that there are; the name needs no memory. */
static qc_status take_scheme(walk *w, const char **out, qc_error *err)
{
    const qc_json_node *n = NULL;
    const char *s = NULL;
    QC_TRY(take(w, "scheme", &n, err));
    QC_TRY(qc_json_as_string(n, "scheme", &s, err));
    *out = qc_manifest_scheme(s);
    if (!*out)
        QC_FAIL(err, QC_ERR_INPUT, "scheme '%s' is not known", s);
    return QC_OK;
}

static qc_status read_tensor(void *row, const qc_manifest *m, walk *w, qc_error *err)
{
    qc_manifest_tensor *t = row;
    uint64_t shard = 0;
    QC_TRY(take_string(w, "name", &t->name, err));
    QC_TRY(take_scheme(w, &t->scheme, err));
    QC_TRY(take_dtype(w, "dtype", &t->dtype, err));
    QC_TRY(read_shape(t, w, err));
    QC_TRY(take_u64(w, "shard", &shard, err));
    if (shard >= m->shard_count)
        QC_FAIL(err, QC_ERR_INPUT, "shard: there is no number %llu", (unsigned long long)shard);
    t->shard = (uint32_t)shard;
    QC_TRY(take_u64(w, "begin", &t->begin, err));
    QC_TRY(take_u64(w, "end", &t->end, err));
    QC_TRY(take_u64(w, "piece_bytes", &t->piece_bytes, err));
    QC_TRY(take_digest(w, "xxh3_128", &t->content, err));
    if (m->compressed) {
        QC_TRY(take_u64(w, "stored_offset", &t->stored_offset, err));
        QC_TRY(take_u64(w, "stored_bytes", &t->stored_bytes, err));
        QC_TRY(take_digest(w, "stored_xxh3_128", &t->stored, err));
    }
    if (is_next(w, "rel_mse")) {
        t->has_error = 1;
        QC_TRY(take_double(w, "rel_mse", &t->rel_mse, err));
        QC_TRY(take_double(w, "max_err", &t->max_err, err));
        QC_TRY(take_u64(w, "max_err_index", &t->max_err_index, err));
    }
    if (m->calibration && is_next(w, "calibrated"))
        QC_TRY(read_outputs(t, w, err));
    return is_next(w, "source") ? read_tensor_source(t, w, err) : QC_OK;
}

static qc_status read_file(void *row, const qc_manifest *m, walk *w, qc_error *err)
{
    qc_manifest_file *f = row;
    (void)m;
    QC_TRY(take_string(w, "path", &f->path, err));
    QC_TRY(take_u64(w, "bytes", &f->bytes, err));
    return take_digest(w, "xxh3_128", &f->digest, err);
}

typedef qc_status (*read_row)(void *row, const qc_manifest *m, walk *w, qc_error *err);

static qc_status read_one(const qc_manifest *m, qc_arena *arena, const qc_json_node *n,
                          read_row read, void *row, qc_error *err)
{
    walk w;
    QC_TRY(enter(&w, arena, n, QC_JSON_OBJECT, "row", err));
    QC_TRY(read(row, m, &w, err));
    return leave(&w, err);
}

/* Reads the list `key`: rows of row_bytes in the arena. */
static qc_status read_list(const qc_manifest *m, walk *top, const char *key, size_t row_bytes,
                           read_row read, void **rows, size_t *count, qc_error *err)
{
    const qc_json_node *n = NULL;
    walk list = {0};
    QC_TRY(take(top, key, &n, err));
    QC_TRY(enter(&list, top->arena, n, QC_JSON_ARRAY, key, err));
    size_t rows_found = 0;
    for (const qc_json_node *e = list.next; e; e = qc_json_next(e))
        rows_found++;
    QC_TRY(qc_arena_alloc(top->arena, rows, rows_found, row_bytes, err));
    for (size_t i = 0; i < rows_found; i++, list.next = qc_json_next(list.next)) {
        qc_status st =
            read_one(m, top->arena, list.next, read, (unsigned char *)*rows + i * row_bytes, err);
        if (st != QC_OK)
            qc_error_prefix(err, "%s[%zu]", key, i);
        QC_TRY(st);
    }
    *count = rows_found;
    return QC_OK;
}

static qc_status read_device(void *row, const qc_manifest *m, walk *w, qc_error *err)
{
    qc_manifest_device *d = row;
    (void)m;
    QC_TRY(take_string(w, "name", &d->name, err));
    QC_TRY(take_u64(w, "tensor_bytes", &d->tensor_bytes, err));
    return take_u64(w, "shard_bytes", &d->shard_bytes, err);
}

static qc_status read_placement(qc_manifest *m, walk *top, qc_error *err)
{
    qc_manifest_placement *p = &m->placement;
    const qc_json_node *n = NULL;
    void *v = NULL;
    walk w;
    QC_TRY(take(top, "placement", &n, err));
    QC_TRY(enter(&w, top->arena, n, QC_JSON_OBJECT, "placement", err));
    QC_TRY(take_string(&w, "vram", &p->vram, err));
    QC_TRY(take_double(&w, "margin", &p->margin, err));
    QC_TRY(take_u64(&w, "context", &p->context, err));
    QC_TRY(take_u64(&w, "batch", &p->batch, err));
    QC_TRY(take_u64(&w, "images", &p->images, err));
    QC_TRY(take_u64(&w, "kv_bits", &p->kv_bits, err));
    QC_TRY(take(&w, "mla_expanded", &n, err));
    QC_TRY(qc_json_as_bool(n, "mla_expanded", &p->mla_expanded, err));
    QC_TRY(read_list(m, &w, "devices", sizeof *p->devices, read_device, &v, &p->device_count, err));
    p->devices = v;
    if (p->device_count == 0)
        QC_FAIL(err, QC_ERR_INPUT, "placement: devices is empty");
    return leave(&w, err);
}

static qc_status read_head(qc_manifest *m, qc_arena *arena, const qc_json_node *root, qc_error *err)
{
    const qc_json_node *n = NULL;
    const char *format = NULL;
    uint64_t version = 0;
    void *v = NULL;
    walk top;
    QC_TRY(enter(&top, arena, root, QC_JSON_OBJECT, "text", err));
    QC_TRY(take_string(&top, "format", &format, err));
    QC_TRY(take_u64(&top, "version", &version, err));
    if (strcmp(format, QC_MANIFEST_FORMAT) != 0 || version < QC_MANIFEST_VERSION ||
        version > QC_MANIFEST_VERSION_CALIBRATED)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "is of format '%s', version %llu; expected '%s', %u to %u",
                format, (unsigned long long)version, QC_MANIFEST_FORMAT, QC_MANIFEST_VERSION,
                QC_MANIFEST_VERSION_CALIBRATED);
    QC_TRY(take_string(&top, "qconv_version", &m->qconv_version, err));
    QC_TRY(read_compression(m, &top, err));
    QC_TRY(read_options(m, &top, version, err));
    if (version == QC_MANIFEST_VERSION_PLACED ||
        (version == QC_MANIFEST_VERSION_CALIBRATED && is_next(&top, "placement")))
        QC_TRY(read_placement(m, &top, err));
    QC_TRY(
        read_list(m, &top, "sources", sizeof *m->sources, read_source, &v, &m->source_count, err));
    m->sources = v;
    QC_TRY(read_list(m, &top, "shards", sizeof *m->shards, read_shard, &v, &m->shard_count, err));
    m->shards = v;
    /* Its rows come one by one. */
    QC_TRY(take(&top, "tensors", &n, err));
    if (qc_json_kind_of(n) != QC_JSON_ARRAY || qc_json_first(n))
        QC_FAIL(err, QC_ERR_INPUT, "tensors: expected a list");
    return leave(&top, err);
}

static qc_status read_tail(qc_manifest *m, qc_arena *arena, const qc_json_node *root, qc_error *err)
{
    const qc_json_node *n = NULL;
    void *v = NULL;
    walk top;
    QC_TRY(enter(&top, arena, root, QC_JSON_OBJECT, "text", err));
    QC_TRY(read_list(m, &top, "files", sizeof *m->files, read_file, &v, &m->file_count, err));
    m->files = v;
    QC_TRY(take(&top, QC_MANIFEST_SEAL_KEY, &n, err));
    return leave(&top, err);
}

/* Where the parts of the text go. */
typedef struct {
    qc_manifest *m;
    qc_arena *arena;
    size_t rows; /* room */
    int has_tail;
} reader;

static qc_status take_head(void *ctx, const char *text, size_t len, qc_error *err)
{
    reader *r = ctx;
    qc_json *doc = NULL;
    void *v = NULL;
    QC_TRY(qc_json_parse(&doc, text, len, 0, err));
    qc_status st = read_head(r->m, r->arena, qc_json_root(doc), err);
    qc_json_destroy(doc);
    QC_TRY(st);
    QC_TRY(qc_arena_alloc(r->arena, &v, r->rows, sizeof *r->m->tensors, err));
    r->m->tensors = v;
    return QC_OK;
}

static qc_status take_row(void *ctx, const char *text, size_t len, qc_error *err)
{
    reader *r = ctx;
    qc_manifest *m = r->m;
    qc_json *doc = NULL;
    size_t i = m->tensor_count;
    if (i == r->rows)
        QC_FAIL(err, QC_ERR_CHECK, "changes while it is read");
    qc_status st = qc_json_parse(&doc, text, len, 0, err);
    if (st == QC_OK)
        st = read_one(m, r->arena, qc_json_root(doc), read_tensor, &m->tensors[i], err);
    qc_json_destroy(doc);
    if (st != QC_OK)
        qc_error_prefix(err, "tensors[%zu]", i);
    m->tensor_count++;
    return st;
}

static qc_status take_tail(void *ctx, const char *text, size_t len, qc_error *err)
{
    reader *r = ctx;
    qc_json *doc = NULL;
    r->has_tail = 1;
    QC_TRY(qc_json_parse(&doc, text, len, 0, err));
    qc_status st = read_tail(r->m, r->arena, qc_json_root(doc), err);
    qc_json_destroy(doc);
    return st;
}

static qc_status read_parts(qc_manifest *m, qc_arena *arena, const source *s, qc_error *err)
{
    reader r = {.m = m, .arena = arena};
    qc_json_cut cut;
    uint64_t covered = 0;
    qc_digest want, have;
    QC_TRY(check_seal(s, &covered, &want, &r.rows, err));
    qc_json_cut_init(&cut, &(qc_json_parts){"tensors", take_head, take_row, take_tail, &r});
    qc_status st = read_through(s, &cut, covered, &have, err);
    if (st == QC_OK)
        st = qc_json_cut_finish(&cut, err);
    qc_json_cut_deinit(&cut);
    if (st == QC_OK && (!r.has_tail || m->tensor_count != r.rows || !qc_digest_equal(&want, &have)))
        st = qc_error_set(err, QC_ERR_CHECK, __FILE__, __LINE__, "changes while it is read");
    return st;
}

static qc_status parse(qc_manifest *out, qc_arena *arena, const source *s, qc_error *err)
{
    memset(out, 0, sizeof *out);
    qc_status st = read_parts(out, arena, s, err);
    if (st != QC_OK)
        qc_error_prefix(err, "manifest");
    else
        st = qc_manifest_check(out, err);
    if (st != QC_OK)
        memset(out, 0, sizeof *out);
    return st;
}

qc_status qc_manifest_parse(qc_manifest *out, qc_arena *arena, const char *text, size_t len,
                            qc_error *err)
{
    return parse(out, arena, &(source){.text = text, .len = len}, err);
}

static qc_status parse_file(qc_manifest *out, qc_arena *arena, const char *path, qc_error *err)
{
    qc_file file = QC_FILE_CLOSED;
    source s = {.file = &file};
    memset(out, 0, sizeof *out);
    QC_TRY(qc_file_open_read(&file, path, err));
    qc_status st = qc_file_size(&file, &s.len, err);
    if (st == QC_OK && s.len > TEXT_MAX)
        st = qc_error_set(err, QC_ERR_INPUT, __FILE__, __LINE__,
                          "%s: has %llu bytes, at most %zu are read", path,
                          (unsigned long long)s.len, TEXT_MAX);
    else if (st == QC_OK && (st = parse(out, arena, &s, err)) != QC_OK)
        qc_error_prefix(err, "%s", path);
    qc_file_discard(&file);
    return st;
}

qc_status qc_manifest_load(qc_manifest *out, qc_arena *arena, const char *dir, qc_error *err)
{
    const char *path = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    QC_TRY(qc_path_stat(dir, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected a folder that qconv wrote, found %s", dir,
                kind == QC_PATH_MISSING ? "nothing" : "a file");
    QC_TRY(qc_path_join(arena, &path, dir, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_FILE)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: there is no %s: not an output of qconv, or one that was not finished", dir,
                QC_MANIFEST_NAME);
    qc_status st = parse_file(out, arena, path, err);
    if (st == QC_ERR_INPUT || st == QC_ERR_TRUNCATED || st == QC_ERR_UNSUPPORTED) {
        st = QC_ERR_CHECK;
        if (err)
            err->code = st;
    }
    return st;
}

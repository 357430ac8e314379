/* Reads a manifest: first its digest, then its members one after the other. The rows of tensors
 * come one by one, so that neither the whole text nor its tree is ever in memory.
 *
 * Members come in the order in which they are written, and unknown ones are refused. So one walk
 * over the tree reads everything, and a manifest has only one spelling. */
#include "formats/manifest_internal.h"

#include "base/alloc.h"
#include "formats/file_io.h"
#include "formats/json_cut.h"
#include "formats/json_rows.h"

#include <string.h>

#define TEXT_MAX    ((size_t)1 << 30)
#define SEAL_TAIL   "\"\n}\n"
#define SEAL_BEFORE "\"" QC_MANIFEST_SEAL_KEY "\": \""
#define HEX_BYTES   (QC_DIGEST_HEX_BYTES - 1)
#define CHUNK_BYTES ((size_t)256 << 10)

/* Holds what is read only to be looked at. */
typedef struct {
    const char *format;
    uint64_t version;
} head;

static const qc_json_row head_rows[] = {
    QC_JSON_ROW(head, format, TEXT, 0),
    QC_JSON_ROW(head, version, U64, 0),
    {NULL},
};

static const qc_json_row version_rows[] = {
    QC_JSON_ROW(qc_manifest, qconv_version, TEXT, 0),
    {NULL},
};

typedef struct {
    const char *method;
    uint64_t level;
    const char *zstd_version;
} compression;

static const qc_json_row compression_rows[] = {
    QC_JSON_ROW(compression, method, TEXT, 0),
    QC_JSON_ROW(compression, level, U64, 0),
    QC_JSON_ROW(compression, zstd_version, TEXT, 0),
    {NULL},
};

/* Says where the text is. */
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

/* Finds the digest at the end and checks it; *rows: elements of the list of tensors. */
static qc_status check_seal(const source *s, uint64_t *covered, qc_digest *want, size_t *rows,
                            qc_error *err)
{
    enum { TAIL = sizeof SEAL_TAIL - 1, KEY = sizeof SEAL_BEFORE - 1 };
    char end[KEY + HEX_BYTES + TAIL] = {0}, hex[QC_DIGEST_HEX_BYTES] = {0};
    qc_digest have;
    qc_json_cut cut;
    if (s->len >= sizeof end)
        QC_TRY(read_at(s, s->len - sizeof end, end, sizeof end, err));
    if (s->len < sizeof end || memcmp(end + sizeof end - TAIL, SEAL_TAIL, TAIL) != 0)
        QC_FAIL(err, QC_ERR_CHECK,
                "it does not end as it was written, so it was cut short or changed");
    memcpy(hex, end + KEY, HEX_BYTES);
    if (memcmp(end, SEAL_BEFORE, KEY) != 0 || qc_digest_from_hex(want, hex) != 0)
        QC_FAIL(err, QC_ERR_CHECK, "it has no digest at its end, so it was cut short or changed");
    *covered = s->len - TAIL - HEX_BYTES;
    qc_json_cut_init(&cut, &(qc_json_parts){.list = "tensors"});
    qc_status st = read_through(s, &cut, *covered, &have, err);
    *rows = (size_t)cut.elements;
    qc_json_cut_deinit(&cut);
    if (st == QC_OK && !qc_digest_equal(&have, want))
        st =
            QC_ERROR(err, QC_ERR_CHECK, "its digest does not fit, so it is damaged or was changed");
    return st;
}

/* ---- Parts ---------------------------------------------------------------------------------- */

static qc_status read_compression(qc_manifest *m, qc_json_walk *top, qc_error *err)
{
    const qc_json_node *n = top->next;
    compression c = {0};
    qc_json_walk w;
    if (qc_json_is_next(top, "compression") && qc_json_kind_of(n) == QC_JSON_NULL)
        return qc_json_take(top, "compression", &n, err);
    QC_TRY(qc_json_take_in(top, "compression", QC_JSON_OBJECT, &w, err));
    QC_TRY(qc_json_take_rows(&w, compression_rows, 0, &c, err));
    if (strcmp(c.method, QC_MANIFEST_METHOD) != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "compression: method '%s' is not known", c.method);
    m->compressed = 1;
    m->level = c.level < 100 ? (int)c.level : 100; /* out of range either way */
    m->zstd_version = c.zstd_version;
    return qc_json_leave(&w, err);
}

static qc_status read_options(qc_manifest *m, qc_json_walk *top, uint64_t version, qc_error *err)
{
    const size_t prefix = sizeof QC_MANIFEST_SCALE_RULE - 1;
    qc_json_walk w, rules, inner;
    QC_TRY(qc_json_take_in(top, "options", QC_JSON_OBJECT, &w, err));
    QC_TRY(qc_json_take_rows(&w, qc_manifest_option_rows, 0, m, err));
    QC_TRY(qc_json_take_in(&w, "rules", QC_JSON_ARRAY, &rules, err));
    m->rule_count = qc_json_count(rules.in);
    QC_TRY(qc_arena_alloc(w.arena, &m->rules, m->rule_count, sizeof *m->rules, err));
    for (size_t i = 0; i < m->rule_count; i++, rules.next = qc_json_next(rules.next)) {
        const char *s = NULL;
        QC_TRY(qc_json_as_string(rules.next, "rules", &s, err));
        QC_TRY(qc_arena_strdup(w.arena, &m->rules[i], s, err));
    }
    const char *last = m->rule_count > 0 ? m->rules[m->rule_count - 1] : "";
    if (strncmp(last, QC_MANIFEST_SCALE_RULE, prefix) == 0) {
        m->scale = last + prefix;
        m->rule_count--;
    }
    if (version == QC_MANIFEST_VERSION_CALIBRATED ||
        (version == QC_MANIFEST_VERSION_MERGED && qc_json_is_next(&w, "calibrate"))) {
        qc_manifest_calibration *c = NULL;
        QC_TRY(qc_json_take_in(&w, "calibrate", QC_JSON_OBJECT, &inner, err));
        QC_TRY(qc_arena_alloc(w.arena, &c, 1, sizeof *c, err));
        const unsigned when = qc_json_is_next(&inner, "hessians") ? QC_WHEN_HESSIANS : QC_WHEN_TEXT;
        QC_TRY(qc_json_take_rows(&inner, qc_manifest_calibration_rows, when, c, err));
        QC_TRY(qc_json_leave(&inner, err));
        m->calibration = c;
    }
    return qc_json_leave(&w, err);
}

static qc_status read_tensor(qc_manifest *m, qc_json_walk *w, qc_error *err)
{
    qc_manifest_tensor *t = &m->tensors[m->tensor_count];
    const qc_json_node *name = NULL;
    qc_json_walk dims, inner;
    QC_TRY(qc_json_take_rows(w, qc_manifest_tensor_rows, 0, t, err));
    QC_TRY(qc_json_take_in(w, "shape", QC_JSON_ARRAY, &dims, err));
    for (; dims.next; dims.next = qc_json_next(dims.next)) {
        if (t->ndim == QC_MAX_DIMS)
            QC_FAIL(err, QC_ERR_INPUT, "shape: expected at most %u dimensions, found more",
                    (unsigned)QC_MAX_DIMS);
        QC_TRY(qc_json_as_u64(dims.next, "shape", &t->dims[t->ndim++], err));
    }
    QC_TRY(qc_json_take_rows(w, qc_manifest_place_rows, qc_manifest_when(m), t, err));
    if (t->shard >= m->shard_count)
        QC_FAIL(err, QC_ERR_INPUT, "shard: there is no shard number %u", (unsigned)t->shard);
    t->has_error = qc_json_is_next(w, "rel_mse");
    if (t->has_error)
        QC_TRY(qc_json_take_rows(w, qc_manifest_error_rows, 0, t, err));
    if (m->calibration && qc_json_is_next(w, "calibrated")) {
        qc_manifest_outputs *outputs = NULL;
        QC_TRY(qc_json_take_in(w, "calibrated", QC_JSON_OBJECT, &inner, err));
        QC_TRY(qc_arena_alloc(w->arena, &outputs, 1, sizeof *outputs, err));
        QC_TRY(qc_json_take_rows(&inner, qc_manifest_output_rows, 0, outputs, err));
        QC_TRY(qc_json_leave(&inner, err));
        t->outputs = outputs;
    }
    if (qc_json_is_next(w, "source")) {
        QC_TRY(qc_json_take_in(w, "source", QC_JSON_OBJECT, &inner, err));
        QC_TRY(qc_json_take(&inner, "name", &name, err));
        QC_TRY(qc_json_as_string(name, "name", &t->source_name, err));
        if (strcmp(t->source_name, t->name) == 0)
            t->source_name = t->name; /* as most are */
        else
            QC_TRY(qc_arena_strdup(w->arena, &t->source_name, t->source_name, err));
        QC_TRY(qc_json_take_rows(&inner, qc_manifest_tensor_source_rows, 0, t, err));
        QC_TRY(qc_json_leave(&inner, err));
    }
    return qc_json_leave(w, err);
}

static qc_status read_head(qc_manifest *m, qc_json_walk *top, qc_error *err)
{
    const qc_json_node *n = NULL;
    head h = {0};
    qc_json_walk inner;
    QC_TRY(qc_json_take_rows(top, head_rows, 0, &h, err));
    if (strcmp(h.format, QC_MANIFEST_FORMAT) != 0 || h.version < QC_MANIFEST_VERSION ||
        h.version > QC_MANIFEST_VERSION_MERGED)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "its format is '%s', version %llu; expected '%s', %u to %u", h.format,
                (unsigned long long)h.version, QC_MANIFEST_FORMAT, QC_MANIFEST_VERSION,
                QC_MANIFEST_VERSION_MERGED);
    QC_TRY(qc_json_take_rows(top, version_rows, 0, m, err));
    QC_TRY(read_compression(m, top, err));
    QC_TRY(read_options(m, top, h.version, err));
    if (h.version == QC_MANIFEST_VERSION_PLACED ||
        (h.version >= QC_MANIFEST_VERSION_CALIBRATED && qc_json_is_next(top, "placement"))) {
        qc_manifest_placement *p = &m->placement;
        QC_TRY(qc_json_take_in(top, "placement", QC_JSON_OBJECT, &inner, err));
        QC_TRY(qc_json_take_rows(&inner, qc_manifest_placement_rows, 0, p, err));
        QC_TRY(qc_json_take_list(&inner, "devices", qc_manifest_device_rows, 0, &p->devices,
                                 &p->device_count, sizeof *p->devices, err));
        if (p->device_count == 0)
            QC_FAIL(err, QC_ERR_INPUT, "placement: devices is empty; expected at least one");
        QC_TRY(qc_json_leave(&inner, err));
    }
    if (h.version == QC_MANIFEST_VERSION_MERGED) {
        QC_TRY(qc_json_take_list(top, "adapters", qc_manifest_adapter_rows, 0, &m->adapters,
                                 &m->adapter_count, sizeof *m->adapters, err));
        if (m->adapter_count == 0)
            QC_FAIL(err, QC_ERR_INPUT, "adapters is empty; expected at least one");
    }
    QC_TRY(qc_json_take_list(top, "sources", qc_manifest_source_rows, 0, &m->sources,
                             &m->source_count, sizeof *m->sources, err));
    QC_TRY(qc_json_take_list(top, "shards", qc_manifest_shard_rows, qc_manifest_when(m), &m->shards,
                             &m->shard_count, sizeof *m->shards, err));
    for (size_t i = 0; i < m->shard_count && m->placement.device_count > 0; i++) {
        if (m->shards[i].device >= m->placement.device_count)
            QC_FAIL(err, QC_ERR_INPUT, "shards[%zu]: device: there is no device number %u", i,
                    (unsigned)m->shards[i].device);
    }
    /* The list is empty here, because its rows come one by one. */
    QC_TRY(qc_json_take(top, "tensors", &n, err));
    if (qc_json_kind_of(n) != QC_JSON_ARRAY || qc_json_first(n))
        QC_FAIL(err, QC_ERR_INPUT, "tensors: expected a list");
    return qc_json_leave(top, err);
}

static qc_status read_tail(qc_manifest *m, qc_json_walk *top, qc_error *err)
{
    const qc_json_node *n = NULL;
    QC_TRY(qc_json_take_list(top, "files", qc_manifest_file_rows, 0, &m->files, &m->file_count,
                             sizeof *m->files, err));
    QC_TRY(qc_json_take(top, QC_MANIFEST_SEAL_KEY, &n, err));
    return qc_json_leave(top, err);
}

/* Says where the parts of the text go. */
typedef struct {
    qc_manifest *m;
    qc_arena *arena;
    size_t rows; /* room */
    int has_tail;
} reader;

static qc_status take(const reader *r, const char *text, size_t len, const char *what,
                      qc_status (*read)(qc_manifest *m, qc_json_walk *w, qc_error *err),
                      qc_error *err)
{
    qc_json *doc = NULL;
    qc_json_walk w;
    QC_TRY(qc_json_parse(&doc, text, len, 0, err));
    qc_status st = qc_json_enter(&w, r->arena, qc_json_root(doc), QC_JSON_OBJECT, what, err);
    if (st == QC_OK)
        st = read(r->m, &w, err);
    qc_json_destroy(doc);
    return st;
}

static qc_status take_head(void *ctx, const char *text, size_t len, qc_error *err)
{
    const reader *r = ctx;
    QC_TRY(take(r, text, len, "text", read_head, err));
    return qc_arena_alloc(r->arena, &r->m->tensors, r->rows, sizeof *r->m->tensors, err);
}

static qc_status take_row(void *ctx, const char *text, size_t len, qc_error *err)
{
    const reader *r = ctx;
    if (r->m->tensor_count == r->rows)
        QC_FAIL(err, QC_ERR_CHECK, "it changes while it is read");
    qc_status st = take(r, text, len, "row", read_tensor, err);
    if (st != QC_OK)
        qc_error_prefix(err, "tensors[%zu]", r->m->tensor_count);
    r->m->tensor_count++;
    return st;
}

static qc_status take_tail(void *ctx, const char *text, size_t len, qc_error *err)
{
    reader *r = ctx;
    r->has_tail = 1;
    return take(r, text, len, "text", read_tail, err);
}

static qc_status parse(qc_manifest *out, qc_arena *arena, const source *s, qc_error *err)
{
    reader r = {.m = out, .arena = arena};
    qc_json_cut cut;
    uint64_t covered = 0;
    qc_digest want, have;
    memset(out, 0, sizeof *out);
    qc_status st = check_seal(s, &covered, &want, &r.rows, err);
    if (st == QC_OK) {
        qc_json_cut_init(&cut, &(qc_json_parts){"tensors", take_head, take_row, take_tail, &r});
        st = read_through(s, &cut, covered, &have, err);
        if (st == QC_OK)
            st = qc_json_cut_finish(&cut, err);
        qc_json_cut_deinit(&cut);
    }
    if (st == QC_OK &&
        (!r.has_tail || out->tensor_count != r.rows || !qc_digest_equal(&want, &have)))
        st = QC_ERROR(err, QC_ERR_CHECK, "it changes while it is read");
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
                "%s has no %s, so it is not an output of qconv, or one that is not finished", dir,
                QC_MANIFEST_NAME);
    qc_file file = QC_FILE_CLOSED;
    source s = {.file = &file};
    memset(out, 0, sizeof *out);
    qc_status st = qc_file_open_read(&file, path, err);
    if (st == QC_OK)
        st = qc_file_size(&file, &s.len, err);
    if (st == QC_OK && s.len > TEXT_MAX)
        st = QC_ERROR(err, QC_ERR_INPUT, "%s has %llu bytes; at most %zu are read", path,
                      (unsigned long long)s.len, TEXT_MAX);
    else if (st == QC_OK && (st = parse(out, arena, &s, err)) != QC_OK)
        qc_error_prefix(err, "%s", path);
    qc_file_discard(&file);
    if (st == QC_ERR_INPUT || st == QC_ERR_TRUNCATED || st == QC_ERR_UNSUPPORTED)
        st = qc_error_recode(err, QC_ERR_CHECK);
    return st;
}

qc_status qc_manifest_find(qc_manifest *out, int *found, qc_arena *arena, const char *path,
                           qc_error *err)
{
    const char *file = NULL;
    qc_path_kind kind = QC_PATH_MISSING;
    *found = 0;
    QC_TRY(qc_path_stat(path, &kind, NULL, err));
    if (kind != QC_PATH_DIR)
        return QC_OK;
    QC_TRY(qc_path_join(arena, &file, path, QC_MANIFEST_NAME, err));
    QC_TRY(qc_path_stat(file, &kind, NULL, err));
    *found = kind != QC_PATH_MISSING;
    return *found ? qc_manifest_load(out, arena, path, err) : QC_OK;
}

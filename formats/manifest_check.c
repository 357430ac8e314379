#include "formats/manifest_internal.h"

#include "base/alloc.h"
#include "base/checked.h"
#include "base/text.h"
#include "formats/safetensors_header.h"
#include "formats/seekable.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HEADER_LEAST_BYTES 10u /* the length and "{}" */
#define PATH_MAX_BYTES     4096u
#define PIECE_LEAST_BYTES  (1u << 20) /* the writer's pieces are 4 MiB or more */
#define TABLE_ENTRY_BYTES  8u         /* least size of an entry in a seek table */
#define SHARD_SUFFIX       ".safetensors"
#define STORED_SUFFIX      ".zst"

/* ---- Names ---------------------------------------------------------------------------------- */

static qc_status check_path(const char *path, const char *what, qc_error *err)
{
    if (!path || strlen(path) > PATH_MAX_BYTES || !qc_is_plain_path(path))
        QC_FAIL(err, QC_ERR_INPUT, "%s: '%s' is not a path inside the folder", what,
                path ? path : "");
    return QC_OK;
}

/* Sorts names. */
static qc_status check_unique(const char **names, size_t count, const char *what, qc_error *err)
{
    qsort(names, count, sizeof *names, qc_by_text);
    size_t twice = qc_find_twice(names, count, sizeof *names);
    if (twice)
        QC_FAIL(err, QC_ERR_INPUT, "%s: '%s' is listed twice", what, names[twice]);
    return QC_OK;
}

/* Everything that becomes a file of the directory must have a name of its own. */
static qc_status check_file_names(const qc_manifest *m, const char **names, qc_error *err)
{
    size_t n = 0;
    for (size_t i = 0; i < m->shard_count; i++) {
        const char *name = m->shards[i].name;
        QC_TRY(check_path(name, "shard", err));
        if (!qc_ends_with(name, SHARD_SUFFIX) || strcmp(name, SHARD_SUFFIX) == 0)
            QC_FAIL(err, QC_ERR_INPUT, "shard: expected a name that ends with %s, found '%s'",
                    SHARD_SUFFIX, name);
        names[n++] = name;
    }
    for (size_t i = 0; i < m->file_count; i++) {
        const char *path = m->files[i].path;
        QC_TRY(check_path(path, "file", err));
        if (strcmp(path, QC_MANIFEST_NAME) == 0)
            QC_FAIL(err, QC_ERR_INPUT, "file: %s cannot list itself", path);
        if (i > 0 && strcmp(m->files[i - 1].path, path) >= 0)
            QC_FAIL(err, QC_ERR_INPUT, "file: '%s' is not in the order of names", path);
        names[n++] = path;
    }
    QC_TRY(check_unique(names, n, "file", err));
    for (size_t i = 0; m->compressed && i < m->file_count; i++) {
        char shard[PATH_MAX_BYTES + 1], *name = shard;
        const char *path = m->files[i].path;
        if (!qc_ends_with(path, SHARD_SUFFIX STORED_SUFFIX))
            continue;
        memcpy(shard, path, strlen(path) + 1);
        shard[strlen(path) - strlen(STORED_SUFFIX)] = '\0';
        if (bsearch(&name, names, n, sizeof *names, qc_by_text))
            QC_FAIL(err, QC_ERR_INPUT, "file: '%s' is the name of a shard", path);
    }
    return QC_OK;
}

static qc_status check_names(const qc_manifest *m, qc_error *err)
{
    size_t files = m->shard_count + m->file_count, most = files;
    if (m->source_count > most)
        most = m->source_count;
    if (m->tensors && m->tensor_count > most)
        most = m->tensor_count;
    const char **names = NULL;
    QC_TRY(qc_calloc(&names, most, sizeof *names, err));
    qc_status st = check_file_names(m, names, err);
    for (size_t i = 0; st == QC_OK && i < m->source_count; i++) {
        names[i] = m->sources[i].name;
        st = check_path(names[i], "source", err);
    }
    if (st == QC_OK)
        st = check_unique(names, m->source_count, "source", err);
    for (size_t i = 0; st == QC_OK && m->tensors && i < m->tensor_count; i++) {
        names[i] = m->tensors[i].name;
        if (!names[i])
            st = QC_ERROR(err, QC_ERR_INPUT, "tensors[%zu] has no name", i);
    }
    if (st == QC_OK && m->tensors)
        st = check_unique(names, m->tensor_count, "tensor", err);
    qc_free(names);
    return st;
}

/* ---- Placement ------------------------------------------------------------------------------ */

/* *shard is the first one that lies on the device; it is moved behind the last. */
static qc_status check_device(const qc_manifest *m, size_t device, size_t *shard, qc_error *err)
{
    const qc_manifest_device *d = &m->placement.devices[device];
    uint64_t content = 0, headers = 0;
    if (!d->name || !*d->name)
        QC_FAIL(err, QC_ERR_INPUT, "placement: devices[%zu] has no name", device);
    for (size_t i = 0; i < device; i++) {
        if (strcmp(m->placement.devices[i].name, d->name) == 0)
            QC_FAIL(err, QC_ERR_INPUT, "placement: device '%s' is listed twice", d->name);
    }
    for (; *shard < m->shard_count && m->shards[*shard].device == device; (*shard)++) {
        const qc_manifest_shard *s = &m->shards[*shard];
        if (qc_add_u64(content, s->content_bytes, &content))
            QC_FAIL(err, QC_ERR_INPUT, "%s: the sizes overflow 64 bits", s->name);
        headers += s->header_bytes; /* part of content_bytes: no overflow */
    }
    if (d->shard_bytes != content || d->tensor_bytes != content - headers)
        QC_FAIL(err, QC_ERR_INPUT,
                "placement: device '%s' has %" PRIu64 " bytes, %" PRIu64
                " of them in tensors, but its shards have %" PRIu64 " and %" PRIu64,
                d->name, d->shard_bytes, d->tensor_bytes, content, content - headers);
    return QC_OK;
}

/* Call it after the shards were checked. */
static qc_status check_placement(const qc_manifest *m, qc_error *err)
{
    const qc_manifest_placement *p = &m->placement;
    size_t shard = 0;
    size_t devices = p->device_count > 0 ? p->device_count : 1;
    for (size_t i = 0; i < m->shard_count; i++) {
        const qc_manifest_shard *s = &m->shards[i];
        if (s->device >= devices || (i > 0 && s->device < m->shards[i - 1].device))
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: its device %" PRIu32 " is out of order or does not exist", s->name,
                    s->device);
    }
    if (p->device_count == 0)
        return QC_OK;
    if (p->device_count > QC_MANIFEST_DEVICES_MAX)
        QC_FAIL(err, QC_ERR_INPUT, "placement: expected at most %u devices, found %zu",
                QC_MANIFEST_DEVICES_MAX, p->device_count);
    if (!p->vram)
        QC_FAIL(err, QC_ERR_INPUT, "placement: vram is missing");
    if (!(p->margin > 0 && p->margin <= 1))
        QC_FAIL(err, QC_ERR_INPUT,
                "placement: margin: expected more than 0 and at most 1, found %g", p->margin);
    if (p->kv_bits == 0 || p->kv_bits > 64)
        QC_FAIL(err, QC_ERR_INPUT, "placement: kv_bits: expected 1 to 64, found %" PRIu64,
                p->kv_bits);
    for (size_t i = 0; i < p->device_count; i++)
        QC_TRY(check_device(m, i, &shard, err));
    return QC_OK;
}

/* ---- Tensors and shards --------------------------------------------------------------------- */

static qc_status check_pieces(uint64_t piece_bytes, uint64_t most, const char *what, qc_error *err)
{
    if (piece_bytes == 0 || piece_bytes > most)
        QC_FAIL(err, QC_ERR_INPUT, "%s: expected 1 to %" PRIu64 ", found %" PRIu64, what, most,
                piece_bytes);
    return QC_OK;
}

static qc_status check_tensor(const qc_manifest_tensor *t, qc_error *err)
{
    uint64_t bytes = 0;
    if (!t->scheme || !qc_manifest_scheme(t->scheme))
        QC_FAIL(err, QC_ERR_INPUT,
                "the scheme '%s' is not known; a newer qconv may have written it",
                t->scheme ? t->scheme : "");
    QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &bytes, err));
    if (t->end < t->begin || t->end - t->begin != bytes)
        QC_FAIL(err, QC_ERR_INPUT,
                "its shape takes %" PRIu64 " bytes, but its range is %" PRIu64 " to %" PRIu64,
                bytes, t->begin, t->end);
    if (bytes > 0) {
        QC_TRY(check_pieces(t->piece_bytes, QC_FRAME_MAX_BYTES, "piece_bytes", err));
        /* The least size of a piece keeps a reader's list of pieces to a small share of the file's
         * size. */
        if (t->piece_bytes < bytes && t->piece_bytes < PIECE_LEAST_BYTES)
            QC_FAIL(err, QC_ERR_INPUT,
                    "piece_bytes: expected all %" PRIu64 " bytes or at least %u, found %" PRIu64,
                    bytes, PIECE_LEAST_BYTES, t->piece_bytes);
        if (qc_ceil_div_u64(bytes, t->piece_bytes) > UINT32_MAX)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%" PRIu64 " bytes in pieces of %" PRIu64 " are more pieces than are supported",
                    bytes, t->piece_bytes);
        if (t->source_name)
            QC_TRY(check_pieces(t->source_piece_bytes, UINT64_MAX, "source piece_bytes", err));
    }
    if (t->has_error &&
        (!isfinite(t->rel_mse) || !isfinite(t->max_err) || t->rel_mse < 0 || t->max_err < 0))
        QC_FAIL(err, QC_ERR_INPUT,
                "its errors: expected finite numbers of 0 or more, found %g and %g", t->rel_mse,
                t->max_err);
    const qc_manifest_outputs *o = t->outputs;
    if (o && (!t->has_error || !isfinite(o->rounded) || !isfinite(o->calibrated) ||
              o->rounded < 0 || o->calibrated < 0))
        QC_FAIL(err, QC_ERR_INPUT,
                "its errors in outputs: expected finite numbers of 0 or more, found %g and %g",
                o->rounded, o->calibrated);
    return QC_OK;
}

/* Says how far a shard's contents reach so far, decompressed and stored. */
typedef struct {
    uint64_t content, stored;
} place;

static qc_status check_place(const qc_manifest_tensor *t, int compressed, place *at, qc_error *err)
{
    if (t->begin != at->content)
        QC_FAIL(err, QC_ERR_INPUT, "it begins at byte %" PRIu64 "; expected %" PRIu64, t->begin,
                at->content);
    at->content = t->end;
    if (!compressed)
        return QC_OK;
    if (t->end == t->begin) {
        if (t->stored_offset || t->stored_bytes)
            QC_FAIL(err, QC_ERR_INPUT, "it has no content, but a place in the file");
        return QC_OK;
    }
    if (t->stored_offset != at->stored)
        QC_FAIL(err, QC_ERR_INPUT, "stored_offset: expected %" PRIu64 ", found %" PRIu64,
                at->stored, t->stored_offset);
    if (t->stored_bytes == 0 || qc_add_u64(at->stored, t->stored_bytes, &at->stored))
        QC_FAIL(err, QC_ERR_INPUT, "stored_bytes: %" PRIu64 " is not possible", t->stored_bytes);
    return QC_OK;
}

static qc_status check_shard(const qc_manifest *m, uint32_t shard, size_t *next, qc_error *err)
{
    const qc_manifest_shard *s = &m->shards[shard];
    place at = {0, s->header_stored_bytes};
    uint64_t sum = 0, pieces = 0; /* at most 2^32 tensors with at most 2^32 each: no overflow */
    if (s->header_bytes < HEADER_LEAST_BYTES || s->header_bytes > 8 + QC_ST_MAX_HEADER_BYTES)
        QC_FAIL(err, QC_ERR_INPUT, "%s: header_bytes: %" PRIu64 " is not possible", s->name,
                s->header_bytes);
    for (; *next < m->tensor_count; (*next)++) {
        qc_manifest_tensor room;
        const qc_manifest_tensor *t = NULL;
        QC_TRY(qc_manifest_row(m, *next, &room, &t, err));
        if (t->shard != shard)
            break;
        qc_status st = check_tensor(t, err);
        if (st == QC_OK)
            st = check_place(t, m->compressed, &at, err);
        pieces += st == QC_OK && t->end > t->begin
                      ? qc_ceil_div_u64(t->end - t->begin, t->piece_bytes)
                      : 0;
        if (st != QC_OK)
            qc_error_prefix(err, "tensor '%s'", t->name);
        QC_TRY(st);
    }
    if (qc_add_u64(at.content, s->header_bytes, &sum) || sum != s->content_bytes)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: content_bytes is %" PRIu64 ", but its header and tensors have %" PRIu64,
                s->name, s->content_bytes, sum);
    if (!m->compressed)
        return QC_OK;
    if (s->header_stored_bytes == 0 || s->table_bytes == 0 ||
        qc_add_u64(at.stored, s->table_bytes, &sum) || sum != s->file_bytes)
        QC_FAIL(err, QC_ERR_INPUT, "%s: file_bytes is %" PRIu64 ", but its parts have %" PRIu64,
                s->name, s->file_bytes, sum);
    if (pieces > s->table_bytes / TABLE_ENTRY_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "%s: a seek table of %" PRIu64 " bytes cannot list %" PRIu64 " frames", s->name,
                s->table_bytes, pieces);
    return QC_OK;
}

/* A manifest has only one spelling: how scales were found is said once, at the end, and absmax is
 * not said. */
static qc_status check_rules(const qc_manifest *m, qc_error *err)
{
    const size_t prefix = sizeof QC_MANIFEST_SCALE_RULE - 1;
    for (size_t i = 0; i < m->rule_count; i++) {
        if (strncmp(m->rules[i], QC_MANIFEST_SCALE_RULE, prefix) == 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "manifest: rule '%s' is not the last, where how scales were found must stand",
                    m->rules[i]);
    }
    if (m->scale && strcmp(m->scale, "search") != 0 && strcmp(m->scale, "refit") != 0)
        QC_FAIL(err, QC_ERR_INPUT, "manifest: scale: expected search or refit, found '%s'",
                m->scale);
    return QC_OK;
}

static qc_status check_calibration(const qc_manifest_calibration *c, qc_error *err)
{
    if (!c)
        return QC_OK;
    if (c->hessians ? c->text != NULL : !c->text || !c->tokenizer)
        QC_FAIL(err, QC_ERR_INPUT,
                "manifest: calibrate: expected hessians, or a text and a tokenizer");
    if (!isfinite(c->damping) || c->damping < 0)
        QC_FAIL(err, QC_ERR_INPUT,
                "manifest: calibrate: damping: expected a finite number of 0 or more, found %g",
                c->damping);
    if (!c->sided)
        QC_FAIL(err, QC_ERR_INPUT, "manifest: calibrate: expected sided, one or two");
    return QC_OK;
}

qc_status qc_manifest_check(const qc_manifest *m, qc_error *err)
{
    size_t next = 0;
    qc_status st = QC_OK;
    if (!m->qconv_version || !m->to || !m->rest || (m->compressed && !m->zstd_version))
        QC_FAIL(err, QC_ERR_INPUT, "manifest: a text that every manifest has is missing");
    if (m->compressed && (m->level < 1 || m->level > 19))
        QC_FAIL(err, QC_ERR_INPUT, "manifest: level: expected 1 to 19, found %d", m->level);
    QC_TRY(check_rules(m, err));
    QC_TRY(check_calibration(m->calibration, err));
    for (size_t i = 0; i < m->adapter_count; i++) {
        if (!m->adapters[i].name || !*m->adapters[i].name)
            QC_FAIL(err, QC_ERR_INPUT, "manifest: adapters[%zu] has no name", i);
        if (!isfinite(m->adapters[i].scale))
            QC_FAIL(err, QC_ERR_INPUT, "manifest: adapters[%zu]: scale is not finite", i);
    }
    st = check_names(m, err);
    for (size_t i = 0; st == QC_OK && i < m->shard_count; i++)
        st = check_shard(m, (uint32_t)i, &next, err);
    if (st == QC_OK && next != m->tensor_count) {
        qc_manifest_tensor room;
        const qc_manifest_tensor *t = NULL;
        st = qc_manifest_row(m, next, &room, &t, err);
        if (st == QC_OK)
            st = QC_ERROR(err, QC_ERR_INPUT,
                          "tensor '%s': its shard %" PRIu32 " is out of order or does not exist",
                          t->name, t->shard);
    }
    if (st == QC_OK)
        st = check_placement(m, err);
    if (st != QC_OK)
        qc_error_prefix(err, "manifest");
    return st;
}

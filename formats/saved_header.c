#include "formats/saved_header.h"

#include "base/bytes.h"
#include "formats/digest.h"
#include "formats/safetensors_header.h"

#include <inttypes.h>
#include <string.h>

#define MAGIC       "QCHEAD1\n"
#define MAGIC_BYTES 8u
#define FIXED_BYTES 52u /* up to the texts */
#define DIGEST_AT   sizeof(qc_digest)
#define HEADER_MAX  (8u + (uint64_t)QC_ST_MAX_HEADER_BYTES)
#define FILE_MAX    (FIXED_BYTES + 2u * (size_t)QC_SAVED_TEXT_MAX + (size_t)HEADER_MAX + DIGEST_AT)
#define FILES_MAX   100000u

/* ---- writing ---- */

static void put_u64(qc_strbuf *b, uint64_t v)
{
    unsigned char bytes[8];
    qc_store_le64(bytes, v);
    qc_strbuf_put(b, bytes, sizeof bytes);
}

static void put_u32(qc_strbuf *b, uint32_t v)
{
    unsigned char bytes[4];
    qc_store_le32(bytes, v);
    qc_strbuf_put(b, bytes, sizeof bytes);
}

static qc_status build(qc_strbuf *b, const qc_saved_header *s, const void *header, qc_error *err)
{
    size_t name = strlen(s->name), origin = strlen(s->origin);
    if (name > QC_SAVED_TEXT_MAX || origin > QC_SAVED_TEXT_MAX)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "%s: the path has more than %u bytes", s->origin,
                QC_SAVED_TEXT_MAX);
    qc_strbuf_put(b, MAGIC, MAGIC_BYTES);
    put_u64(b, s->stamp.bytes);
    put_u64(b, (uint64_t)s->stamp.modified_ns);
    put_u64(b, s->content_bytes);
    put_u64(b, s->header_bytes);
    put_u32(b, s->compressed != 0);
    put_u32(b, (uint32_t)name);
    put_u32(b, (uint32_t)origin);
    qc_strbuf_put(b, s->name, name);
    qc_strbuf_put(b, s->origin, origin);
    qc_strbuf_put(b, header, (size_t)s->header_bytes);
    QC_TRY(qc_strbuf_status(b, err));
    qc_digest d = qc_digest_bytes(b->data, b->len);
    return qc_strbuf_add(b, d.b, sizeof d.b, err);
}

qc_status qc_saved_header_put(const qc_saved_header *s, const void *header, qc_error *err)
{
    qc_strbuf b;
    qc_strbuf_init(&b, FILE_MAX);
    qc_status st = build(&b, s, header, err);
    if (st == QC_OK)
        st = qc_file_put(s->path, b.data, b.len, err);
    qc_strbuf_deinit(&b);
    return st;
}

/* ---- reading ---- */

static qc_status take_text(const char **out, qc_arena *arena, const unsigned char *at, size_t len,
                           qc_error *err)
{
    if (len == 0 || memchr(at, '\0', len))
        QC_FAIL(err, QC_ERR_INPUT, "a saved header is damaged: a name in it is not one of a file");
    return qc_arena_strndup(arena, out, (const char *)at, len, err);
}

qc_status qc_saved_header_parse(qc_saved_header *out, qc_arena *arena, const unsigned char *bytes,
                                size_t len, qc_error *err)
{
    qc_digest told;
    memset(out, 0, sizeof *out);
    if (len < FIXED_BYTES + DIGEST_AT || memcmp(bytes, MAGIC, MAGIC_BYTES) != 0)
        QC_FAIL(err, QC_ERR_INPUT, "the file is not a saved header");
    qc_digest found = qc_digest_bytes(bytes, len - DIGEST_AT);
    memcpy(told.b, bytes + len - DIGEST_AT, sizeof told.b);
    if (!qc_digest_equal(&told, &found))
        QC_FAIL(err, QC_ERR_INPUT, "a saved header is damaged: its digest differs");
    uint32_t compressed = qc_load_le32(bytes + 40);
    uint32_t name = qc_load_le32(bytes + 44), origin = qc_load_le32(bytes + 48);
    out->stamp.bytes = qc_load_le64(bytes + 8);
    out->stamp.modified_ns = (int64_t)qc_load_le64(bytes + 16);
    out->content_bytes = qc_load_le64(bytes + 24);
    out->header_bytes = qc_load_le64(bytes + 32);
    size_t room = len - FIXED_BYTES - DIGEST_AT;
    if (compressed > 1 || name > QC_SAVED_TEXT_MAX || origin > QC_SAVED_TEXT_MAX || name > room ||
        origin > room - name || out->header_bytes != room - name - origin ||
        out->header_bytes < 8 || out->header_bytes > HEADER_MAX ||
        out->content_bytes < out->header_bytes)
        QC_FAIL(err, QC_ERR_INPUT, "a saved header is damaged: its sizes do not agree");
    out->compressed = (int)compressed;
    out->header_at = FIXED_BYTES + (uint64_t)name + origin;
    QC_TRY(take_text(&out->name, arena, bytes + FIXED_BYTES, name, err));
    return take_text(&out->origin, arena, bytes + FIXED_BYTES + name, origin, err);
}

static int is_one(const char *name, int *gone)
{
    size_t digits = strspn(name, "0123456789");
    *gone = strcmp(name + digits, QC_SAVED_GONE) == 0;
    return digits > 0 && (*gone || name[digits] == '\0');
}

static qc_status read_one(qc_saved_header *out, qc_arena *arena, const char *path, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, FILE_MAX);
    qc_status st = qc_file_slurp(path, &text, err);
    if (st == QC_OK) {
        st = qc_saved_header_parse(out, arena, (const unsigned char *)text.data, text.len, err);
        if (st == QC_ERR_INPUT)
            qc_error_prefix(err, "%s", path);
    }
    out->path = path;
    qc_strbuf_deinit(&text);
    return st;
}

qc_status qc_saved_headers_read(qc_saved_header **out, size_t *count, qc_arena *arena,
                                const char *folder, qc_error *err)
{
    qc_path_kind kind = QC_PATH_MISSING;
    qc_tree_file *files = NULL;
    size_t n = 0;
    *out = NULL;
    *count = 0;
    QC_TRY(qc_path_stat(folder, &kind, NULL, err));
    if (kind == QC_PATH_MISSING)
        return QC_OK;
    QC_TRY(qc_dir_tree(arena, folder, FILES_MAX, &files, &n, err));
    QC_TRY(qc_arena_alloc(arena, out, n, sizeof **out, err));
    for (size_t i = 0; i < n; i++) {
        const char *path = NULL;
        int gone = 0;
        if (!is_one(files[i].path, &gone))
            continue; /* half written: x.tmp */
        QC_TRY(qc_path_join(arena, &path, folder, files[i].path, err));
        QC_TRY(read_one(&(*out)[*count], arena, path, err));
        (*out)[*count].gone = gone;
        ++*count;
    }
    return QC_OK;
}

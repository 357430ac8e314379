/* Parsing: JSON tree -> one qc_st_tensor per member -> sort by (begin, end) -> walk.
 *
 *   begin of the first = 0, begin of each = end of the one before, end of the last = data_bytes
 *
 * That one walk finds overlap, hole, wrong start, short data and trailing data. What a tensor's
 * shape and dtype need is checked against end - begin before, with checked products only.
 *
 * Stricter than the reference reader: a name that appears twice is refused (the reference keeps the
 * last), numbers beyond 2^53 - 1 are refused as such, more than QC_MAX_DIMS dimensions are not
 * supported, any number with a fraction anywhere in the header is refused. As lenient as it:
 * white space before and after the JSON, unknown members of a tensor (counted), "__metadata__":
 * null, tensors in any order, data at any alignment. */
#include "formats/safetensors_header.h"

#include "base/bytes.h"
#include "base/checked.h"
#include "formats/foreign_file.h"
#include "formats/json_strict.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define METADATA_KEY     "__metadata__"
#define HEADER_ALIGN     8u
#define NAME_SHOWN_BYTES 160 /* of a tensor's name in a message */

qc_status qc_st_header_length(const unsigned char *head, size_t head_len, uint64_t file_bytes,
                              uint64_t *n, qc_error *err)
{
    uint64_t length = 0;
    *n = 0;
    if (file_bytes < 8 || head_len < 8)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "the file has %" PRIu64
                " bytes; a safetensors file begins with 8 bytes of header length",
                file_bytes);
    length = qc_load_le64(head);
    if (length == 0)
        QC_FAIL(
            err, QC_ERR_INPUT,
            "the header length is 0; expected at least the 2 bytes {} (is it a file of zeros?)");
    if (length <= QC_ST_MAX_HEADER_BYTES && length <= file_bytes - 8) {
        *n = length;
        return QC_OK;
    }
    const qc_foreign_kind *kind = qc_foreign_kind_of(head, head_len);
    if (kind)
        QC_FAIL(err, kind->st, "the file is %s%s", kind->what, kind->rest);
    if (length > QC_ST_MAX_HEADER_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "the header length is %" PRIu64
                " bytes; at most %u are allowed (is it a safetensors file?)",
                length, QC_ST_MAX_HEADER_BYTES);
    QC_FAIL(err, QC_ERR_TRUNCATED,
            "the header of %" PRIu64 " bytes is cut off: the file has %" PRIu64
            " bytes, so %" PRIu64 " are missing; download or copy it again",
            length, file_bytes, length - (file_bytes - 8));
}

/* ---- parsing ---- */

static qc_status parse_dims(qc_st_tensor *t, const qc_json_node *n, qc_error *err)
{
    QC_TRY(qc_json_expect(n, QC_JSON_ARRAY, "shape", err));
    for (const qc_json_node *d = qc_json_first(n); d; d = qc_json_next(d)) {
        if (t->ndim == QC_MAX_DIMS)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "the shape has more than %d dimensions", QC_MAX_DIMS);
        QC_TRY(qc_json_as_u64(d, "a dimension", &t->dims[t->ndim], err));
        t->ndim++;
    }
    return QC_OK;
}

static qc_status parse_offsets(qc_st_tensor *t, const qc_json_node *n, qc_error *err)
{
    uint64_t v[2] = {0, 0};
    unsigned count = 0;
    QC_TRY(qc_json_expect(n, QC_JSON_ARRAY, "data_offsets", err));
    for (const qc_json_node *d = qc_json_first(n); d; d = qc_json_next(d)) {
        if (count < 2)
            QC_TRY(qc_json_as_u64(d, "an offset of data_offsets", &v[count], err));
        count++;
    }
    if (count != 2)
        QC_FAIL(err, QC_ERR_INPUT, "data_offsets: expected 2 numbers, found %u", count);
    if (v[0] > v[1])
        QC_FAIL(err, QC_ERR_INPUT,
                "data_offsets: expected a begin that is not behind the end, found %" PRIu64
                " and %" PRIu64,
                v[0], v[1]);
    t->begin = v[0];
    t->end = v[1];
    return QC_OK;
}

/* Parses what does not depend on other tensors. Messages do not name the tensor yet. */
static qc_status parse_fields(qc_st_header *h, qc_st_tensor *t, const qc_json_node *n,
                              qc_error *err)
{
    const qc_json_node *dtype = NULL, *shape = NULL, *offsets = NULL;
    const char *dtype_name = NULL;
    uint64_t bytes = 0;
    if (qc_json_kind_of(n) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "its entry is of kind %s; expected an object",
                qc_json_kind_name(qc_json_kind_of(n)));
    for (const qc_json_node *m = qc_json_first(n); m; m = qc_json_next(m)) {
        const char *key = qc_json_key(m);
        if (strcmp(key, "dtype") == 0)
            dtype = m;
        else if (strcmp(key, "shape") == 0)
            shape = m;
        else if (strcmp(key, "data_offsets") == 0)
            offsets = m;
        else
            h->unknown_fields++;
    }
    QC_TRY(qc_json_as_string(dtype, "dtype", &dtype_name, err));
    if (qc_dtype_from_name(dtype_name, strlen(dtype_name), &t->dtype))
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "dtype '%.64s' is not known", dtype_name);
    QC_TRY(parse_dims(t, shape, err));
    QC_TRY(parse_offsets(t, offsets, err));
    QC_TRY(qc_shape_bytes(t->dims, t->ndim, t->dtype, &bytes, err));
    if (bytes != t->end - t->begin)
        QC_FAIL(err, QC_ERR_INPUT,
                "dtype %s and shape take %" PRIu64 " bytes, but data_offsets %" PRIu64 "..%" PRIu64
                " hold %" PRIu64,
                qc_dtype_name(t->dtype), bytes, t->begin, t->end, t->end - t->begin);
    return QC_OK;
}

static qc_status parse_metadata(qc_st_header *h, const qc_json_node *n, qc_error *err)
{
    if (qc_json_kind_of(n) == QC_JSON_NULL)
        return QC_OK;
    QC_TRY(qc_json_expect(n, QC_JSON_OBJECT, METADATA_KEY, err));
    QC_TRY(qc_arena_alloc(&h->arena, &h->meta, qc_json_count(n), sizeof *h->meta, err));
    for (const qc_json_node *m = qc_json_first(n); m; m = qc_json_next(m)) {
        const char *value = NULL;
        const char *key = qc_json_key(m);
        qc_st_meta *out = &h->meta[h->meta_count];
        if (qc_json_kind_of(m) != QC_JSON_STRING)
            QC_FAIL(err, QC_ERR_INPUT,
                    "%s: the value of " QC_NAME " is of kind %s; expected a string", METADATA_KEY,
                    key, qc_json_kind_name(qc_json_kind_of(m)));
        QC_TRY(qc_json_as_string(m, METADATA_KEY, &value, err));
        QC_TRY(qc_arena_strdup(&h->arena, &out->key, key, err));
        QC_TRY(qc_arena_strdup(&h->arena, &out->value, value, err));
        h->meta_count++;
    }
    return QC_OK;
}

qc_status qc_st_check_name(const char *name, qc_error *err)
{
    const size_t len = strlen(name);
    if (len > QC_ST_NAME_MOST)
        QC_FAIL(err, QC_ERR_INPUT,
                "tensor '%.*s...': its name has %zu bytes; at most %u are allowed",
                NAME_SHOWN_BYTES, name, len, QC_ST_NAME_MOST);
    return QC_OK;
}

static qc_status parse_members(qc_st_header *h, const qc_json_node *root, qc_error *err)
{
    QC_TRY(qc_json_expect(root, QC_JSON_OBJECT, "header", err));
    QC_TRY(qc_arena_alloc(&h->arena, &h->tensors, qc_json_count(root), sizeof *h->tensors, err));
    for (const qc_json_node *m = qc_json_first(root); m; m = qc_json_next(m)) {
        const char *name = qc_json_key(m);
        if (strcmp(name, METADATA_KEY) == 0) {
            QC_TRY(parse_metadata(h, m, err));
            continue;
        }
        QC_TRY(qc_st_check_name(name, err));
        qc_st_tensor *t = &h->tensors[h->tensor_count];
        qc_status st = parse_fields(h, t, m, err);
        if (st != QC_OK) {
            qc_error_prefix(err, "tensor " QC_NAME, name);
            return st;
        }
        QC_TRY(qc_arena_strdup(&h->arena, &t->name, name, err));
        h->tensor_count++;
    }
    return QC_OK;
}

static int compare_position(const void *va, const void *vb)
{
    const qc_st_tensor *a = va;
    const qc_st_tensor *b = vb;
    if (a->begin != b->begin)
        return a->begin < b->begin ? -1 : 1;
    if (a->end != b->end)
        return a->end < b->end ? -1 : 1;
    return strcmp(a->name, b->name);
}

/* Checks that the sorted tensors cover the data without hole, overlap or rest. */
static qc_status check_cover(qc_st_header *h, uint64_t data_bytes, qc_error *err)
{
    const qc_st_tensor *cut = NULL; /* the first one that is not whole */
    uint64_t end = 0;
    for (size_t i = 0; i < h->tensor_count; i++) {
        const qc_st_tensor *t = &h->tensors[i];
        if (t->begin != end && i == 0)
            QC_FAIL(err, QC_ERR_INPUT,
                    "tensor " QC_NAME " begins at byte %" PRIu64
                    " of the data, but the first one must begin at 0",
                    t->name, t->begin);
        if (t->begin != end)
            QC_FAIL(err, QC_ERR_INPUT,
                    "tensor " QC_NAME " begins at byte %" PRIu64 " of the data, but " QC_NAME
                    " before it "
                    "ends at %" PRIu64 ": %s",
                    t->name, t->begin, t[-1].name, end,
                    t->begin < end ? "they overlap" : "the bytes between them belong to none");
        end = t->end;
        if (!cut && end > data_bytes)
            cut = t;
    }
    if (cut)
        QC_FAIL(err, QC_ERR_TRUNCATED,
                "the data has %" PRIu64 " bytes, but the tensors need %" PRIu64 ": %" PRIu64
                " are missing, and " QC_NAME " is the first tensor that is not whole; download or "
                "copy it again",
                data_bytes, end, end - data_bytes, cut->name);
    if (end < data_bytes && data_bytes != QC_ST_ANY_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "the data has %" PRIu64 " bytes, but the tensors end at %" PRIu64
                ": the last %" PRIu64 " belong to none",
                data_bytes, end, data_bytes - end);
    h->data_bytes = end;
    return QC_OK;
}

qc_status qc_st_header_parse(qc_st_header *out, const char *json, size_t len, uint64_t data_bytes,
                             qc_error *err)
{
    qc_json *doc = NULL;
    qc_status st = QC_OK;
    int sorted = 1;
    memset(out, 0, sizeof *out);
    qc_arena_init(&out->arena);
    if (len > QC_ST_MAX_HEADER_BYTES)
        QC_FAIL(err, QC_ERR_INPUT, "the header has %zu bytes; at most %u are allowed", len,
                QC_ST_MAX_HEADER_BYTES);
    st = qc_json_parse(&doc, json, len, QC_JSON_INTEGERS, err);
    if (st != QC_OK) {
        qc_error_prefix(err, "header");
        return st;
    }
    QC_TRY_GOTO(st, done, parse_members(out, qc_json_root(doc), err));
    for (size_t i = 1; i < out->tensor_count && sorted; i++)
        sorted = compare_position(&out->tensors[i - 1], &out->tensors[i]) < 0;
    if (!sorted)
        qsort(out->tensors, out->tensor_count, sizeof *out->tensors, compare_position);
    st = check_cover(out, data_bytes, err);
done:
    qc_json_destroy(doc);
    if (st != QC_OK)
        qc_st_header_deinit(out);
    return st;
}

void qc_st_header_deinit(qc_st_header *h)
{
    if (!h)
        return;
    qc_arena_deinit(&h->arena);
    memset(h, 0, sizeof *h);
}

void qc_st_header_forget(qc_st_header *h)
{
    uint64_t data_bytes = h->data_bytes;
    size_t unknown_fields = h->unknown_fields;
    qc_st_header_deinit(h);
    h->data_bytes = data_bytes;
    h->unknown_fields = unknown_fields;
}

/* ---- building ---- */

int qc_st_tensor_order(const qc_st_tensor *a, const qc_st_tensor *b)
{
    if (a->dtype != b->dtype)
        return a->dtype > b->dtype ? -1 : 1;
    return strcmp(a->name, b->name);
}

static void build_metadata(qc_strbuf *out, const qc_st_meta *meta, size_t count)
{
    qc_strbuf_puts(out, "\"" METADATA_KEY "\":{");
    for (size_t i = 0; i < count; i++) {
        qc_strbuf_puts(out, i ? "," : "");
        qc_json_quote(out, meta[i].key, strlen(meta[i].key));
        qc_strbuf_puts(out, ":");
        qc_json_quote(out, meta[i].value, strlen(meta[i].value));
    }
    qc_strbuf_puts(out, "}");
}

static uint64_t digits(uint64_t v)
{
    uint64_t n = 1;
    for (; v >= 10; v /= 10)
        n++;
    return n;
}

uint64_t qc_st_header_entry_bytes(const qc_st_tensor *t)
{
    static const char frame[] = ":{\"dtype\":\"\",\"shape\":[],\"data_offsets\":[,]}";
    uint64_t n = qc_json_quoted_bytes(t->name, strlen(t->name)) + (sizeof frame - 1) +
                 strlen(qc_dtype_name(t->dtype)) + digits(t->begin) + digits(t->end);
    for (unsigned d = 0; d < t->ndim; d++)
        n += digits(t->dims[d]) + (d ? 1 : 0);
    return n;
}

static qc_status check_header_bytes(uint64_t n, qc_error *err)
{
    if (n > QC_ST_MAX_HEADER_BYTES)
        QC_FAIL(err, QC_ERR_INPUT,
                "the header would have %" PRIu64 " bytes; at most %u are allowed", n,
                QC_ST_MAX_HEADER_BYTES);
    return QC_OK;
}

qc_status qc_st_header_bytes(uint64_t *out, uint64_t entry_bytes, size_t count,
                             const qc_st_meta *meta, size_t meta_count, qc_error *err)
{
    qc_strbuf text;
    qc_strbuf_init(&text, QC_ST_MAX_HEADER_BYTES);
    if (meta_count)
        build_metadata(&text, meta, meta_count);
    qc_status st = qc_strbuf_status(&text, err);
    uint64_t commas = count > 0 ? count - 1 + (meta_count ? 1 : 0) : 0;
    uint64_t n = strlen("{}") + text.len + commas + entry_bytes;
    qc_strbuf_deinit(&text);
    n = (n + HEADER_ALIGN - 1) / HEADER_ALIGN * HEADER_ALIGN;
    if (st == QC_OK)
        st = check_header_bytes(n, err);
    *out = n + 8;
    return st;
}

qc_status qc_st_header_begin(qc_strbuf *out, const qc_st_meta *meta, size_t meta_count,
                             qc_error *err)
{
    static const unsigned char no_length[8] = {0};
    qc_strbuf_put(out, no_length, sizeof no_length);
    qc_strbuf_puts(out, "{");
    if (meta_count)
        build_metadata(out, meta, meta_count);
    return qc_strbuf_status(out, err);
}

qc_status qc_st_header_add(qc_strbuf *out, const qc_st_tensor *t, qc_error *err)
{
    if (out->data[out->len - 1] != '{')
        qc_strbuf_puts(out, ",");
    qc_json_quote(out, t->name, strlen(t->name));
    qc_strbuf_putf(out, ":{\"dtype\":\"%s\",\"shape\":[", qc_dtype_name(t->dtype));
    for (unsigned d = 0; d < t->ndim; d++)
        qc_strbuf_putf(out, "%s%" PRIu64, d ? "," : "", t->dims[d]);
    qc_strbuf_putf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->begin, t->end);
    return qc_strbuf_status(out, err);
}

qc_status qc_st_header_end(qc_strbuf *out, size_t start, qc_error *err)
{
    QC_TRY(qc_strbuf_adds(out, "}", err));
    while ((out->len - start) % HEADER_ALIGN != 0)
        QC_TRY(qc_strbuf_add(out, " ", 1, err));
    uint64_t n = out->len - start - 8;
    QC_TRY(check_header_bytes(n, err));
    qc_store_le64(out->data + start, n);
    return QC_OK;
}

#include "formats/bnb_state.h"

#include "base/arena.h"
#include "formats/json_strict.h"
#include "formats/json_writer.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define OFFSET_TEXT_BYTES   24u /* the longest repr: -2.2250738585072014e-308 */
#define PREFIX_BYTES        512u
#define STATE_MAX_BYTES     65536u
#define BLOCK_LEAST_ELEMS   32u
#define BLOCK_MOST_ELEMS    4096u
#define NESTED_DTYPE        "float32"
#define NESTED_OFFSET_FIELD "nested_offset"

/* Writes the JSON up to the offset (nested) or up to its closing brace. Returns its length. */
static size_t write_prefix(const qc_bnb_state *s, char out[PREFIX_BYTES])
{
    const char *dtype = qc_dtype_torch_name(s->source_dtype);
    size_t n = (size_t)snprintf(out, PREFIX_BYTES,
                                "{\"quant_type\": \"%s\", \"blocksize\": %" PRIu64
                                ", \"dtype\": \"%s\", \"shape\": [",
                                s->quant_type, s->block_elems, dtype ? dtype : "");
    for (unsigned i = 0; i < s->ndim && i < QC_MAX_DIMS; i++)
        n += (size_t)snprintf(out + n, PREFIX_BYTES - n, "%s%" PRIu64, i ? ", " : "", s->dims[i]);
    n += (size_t)snprintf(out + n, PREFIX_BYTES - n, "]");
    if (s->nested)
        n += (size_t)snprintf(out + n, PREFIX_BYTES - n,
                              ", \"nested_blocksize\": %" PRIu64 ", \"nested_dtype\": \"%s\", "
                              "\"%s\": ",
                              s->nested_block_elems, NESTED_DTYPE, NESTED_OFFSET_FIELD);
    return n;
}

size_t qc_bnb_state_bytes(const qc_bnb_state *s)
{
    char prefix[PREFIX_BYTES];
    return write_prefix(s, prefix) + (s->nested ? OFFSET_TEXT_BYTES : 0) + 1;
}

static int is_block_size(uint64_t n)
{
    return n >= BLOCK_LEAST_ELEMS && n <= BLOCK_MOST_ELEMS && (n & (n - 1)) == 0;
}

/* Checks the rules that hold for reader and writer alike. */
static qc_status check_state(const qc_bnb_state *s, qc_error *err)
{
    uint64_t elems = 0;
    if (strcmp(s->quant_type, "nf4") != 0 && strcmp(s->quant_type, "fp4") != 0 &&
        strcmp(s->quant_type, "int8") != 0)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "quant_state: quant_type: expected nf4, fp4 or int8, found '%s'", s->quant_type);
    if (!is_block_size(s->block_elems))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "quant_state: blocksize: expected a power of two from %u to %u, found %" PRIu64,
                BLOCK_LEAST_ELEMS, BLOCK_MOST_ELEMS, s->block_elems);
    if (!qc_dtype_is_quantizable(s->source_dtype))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "quant_state: dtype: expected a floating-point dtype, found %s",
                qc_dtype_name(s->source_dtype));
    if (s->ndim < 1 || s->ndim > QC_MAX_DIMS)
        QC_FAIL(err, QC_ERR_INPUT, "quant_state: shape: expected 1 to %u dimensions, found %u",
                (unsigned)QC_MAX_DIMS, s->ndim);
    qc_status st = qc_shape_elems(s->dims, s->ndim, &elems, err);
    if (st != QC_OK)
        qc_error_prefix(err, "quant_state: shape");
    QC_TRY(st);
    if (!s->nested)
        return QC_OK;
    if (!is_block_size(s->nested_block_elems))
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "quant_state: nested_blocksize: expected a power of two from %u to %u, found "
                "%" PRIu64,
                BLOCK_LEAST_ELEMS, BLOCK_MOST_ELEMS, s->nested_block_elems);
    if (!isfinite(s->nested_offset) || (double)(float)s->nested_offset != s->nested_offset)
        QC_FAIL(err, QC_ERR_RANGE,
                "quant_state: nested_offset: expected a number that fits a float, found %.17g",
                s->nested_offset);
    return QC_OK;
}

qc_status qc_bnb_state_write(const qc_bnb_state *s, char *dst, qc_error *err)
{
    char prefix[PREFIX_BYTES];
    char offset[QC_PY_REPR_BYTES];
    QC_TRY(check_state(s, err));
    size_t bytes = qc_bnb_state_bytes(s);
    size_t n = write_prefix(s, prefix);
    memcpy(dst, prefix, n);
    if (s->nested) {
        size_t len = qc_py_repr_double(s->nested_offset, offset);
        memcpy(dst + n, offset, len);
        n += len;
    }
    dst[n++] = '}';
    memset(dst + n, ' ', bytes - n);
    return QC_OK;
}

/* ---- Reading -------------------------------------------------------------------------------- */

enum {
    SEEN_QUANT_TYPE = 1,
    SEEN_BLOCKSIZE = 2,
    SEEN_DTYPE = 4,
    SEEN_SHAPE = 8,
    SEEN_NESTED_BLOCKSIZE = 16,
    SEEN_NESTED_DTYPE = 32,
    SEEN_NESTED_OFFSET = 64,
    SEEN_PLAIN = 15,
    SEEN_NESTED = 112
};

static const char *const member_names[] = {
    "quant_type",   "blocksize",        "dtype", "shape", "nested_blocksize",
    "nested_dtype", NESTED_OFFSET_FIELD};
#define MEMBER_COUNT (sizeof member_names / sizeof *member_names)

static qc_status read_dtype(qc_bnb_state *s, const qc_json_node *n, qc_error *err)
{
    const char *name = NULL;
    QC_TRY(qc_json_as_string(n, "dtype", &name, err));
    s->source_dtype = qc_dtype_from_torch_name(name);
    if (s->source_dtype == QC_DTYPE_COUNT)
        QC_FAIL(err, QC_ERR_UNSUPPORTED, "dtype: expected one that torch has, found '%s'", name);
    return QC_OK;
}

static qc_status read_shape(qc_bnb_state *s, const qc_json_node *n, qc_error *err)
{
    if (qc_json_kind_of(n) == QC_JSON_NULL)
        QC_FAIL(err, QC_ERR_UNSUPPORTED,
                "shape: is null, so the shape of the weight is not known; expected a list");
    if (qc_json_kind_of(n) != QC_JSON_ARRAY)
        QC_FAIL(err, QC_ERR_INPUT, "shape: expected a list, found a %s",
                qc_json_kind_name(qc_json_kind_of(n)));
    for (const qc_json_node *d = qc_json_first(n); d; d = qc_json_next(d)) {
        if (s->ndim == QC_MAX_DIMS)
            QC_FAIL(err, QC_ERR_INPUT, "shape: expected at most %u dimensions, found more",
                    (unsigned)QC_MAX_DIMS);
        QC_TRY(qc_json_as_u64(d, "shape", &s->dims[s->ndim++], err));
    }
    return QC_OK;
}

static qc_status read_member(qc_bnb_state *s, unsigned member, const qc_json_node *n, qc_error *err)
{
    const char *text = NULL;
    switch (1u << member) {
    case SEEN_QUANT_TYPE:
        QC_TRY(qc_json_as_string(n, "quant_type", &text, err));
        (void)snprintf(s->quant_type, sizeof s->quant_type, "%s", text);
        return QC_OK; /* a text that was cut is not a known one */
    case SEEN_BLOCKSIZE:
        return qc_json_as_u64(n, "blocksize", &s->block_elems, err);
    case SEEN_DTYPE:
        return read_dtype(s, n, err);
    case SEEN_SHAPE:
        return read_shape(s, n, err);
    case SEEN_NESTED_BLOCKSIZE:
        return qc_json_as_u64(n, "nested_blocksize", &s->nested_block_elems, err);
    case SEEN_NESTED_DTYPE:
        QC_TRY(qc_json_as_string(n, "nested_dtype", &text, err));
        if (strcmp(text, NESTED_DTYPE) != 0)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "nested_dtype: expected %s, found '%s'", NESTED_DTYPE,
                    text);
        return QC_OK;
    default: /* SEEN_NESTED_OFFSET: loaders convert it to a float */
        QC_TRY(qc_json_as_double(n, NESTED_OFFSET_FIELD, &s->nested_offset, err));
        s->nested_offset = (double)(float)s->nested_offset;
        return QC_OK;
    }
}

static qc_status read_members(qc_bnb_state *s, const qc_json_node *root, qc_error *err)
{
    unsigned seen = 0;
    if (qc_json_kind_of(root) != QC_JSON_OBJECT)
        QC_FAIL(err, QC_ERR_INPUT, "expected an object, found a %s",
                qc_json_kind_name(qc_json_kind_of(root)));
    for (const qc_json_node *n = qc_json_first(root); n; n = qc_json_next(n)) {
        unsigned i = 0;
        while (i < MEMBER_COUNT && strcmp(member_names[i], qc_json_key(n)) != 0)
            i++;
        if (i == MEMBER_COUNT)
            QC_FAIL(err, QC_ERR_UNSUPPORTED, "member '%s' is not known", qc_json_key(n));
        QC_TRY(read_member(s, i, n, err));
        seen |= 1u << i;
    }
    s->nested = (seen & SEEN_NESTED) != 0;
    unsigned want = s->nested ? SEEN_PLAIN | SEEN_NESTED : SEEN_PLAIN;
    for (unsigned i = 0; i < MEMBER_COUNT; i++) {
        if (want & ~seen & 1u << i)
            QC_FAIL(err, QC_ERR_INPUT, "member '%s' is missing", member_names[i]);
    }
    return QC_OK;
}

qc_status qc_bnb_state_parse(qc_bnb_state *out, const char *json, size_t len, qc_error *err)
{
    qc_json *doc = NULL;
    memset(out, 0, sizeof *out);
    if (len > STATE_MAX_BYTES)
        QC_FAIL(err, QC_ERR_INPUT, "quant_state: expected at most %u bytes, found %zu",
                STATE_MAX_BYTES, len);
    qc_status st = qc_json_parse(&doc, json, len, 0, err);
    if (st == QC_OK)
        st = read_members(out, qc_json_root(doc), err);
    if (st != QC_OK)
        qc_error_prefix(err, "quant_state");
    qc_json_destroy(doc);
    return st == QC_OK ? check_state(out, err) : st;
}

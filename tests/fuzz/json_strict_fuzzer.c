/* Any text: refused with a message, or a tree whose every node can be read; splicing an accepted
 * object gives an accepted object with the member in it; quoting any bytes that are UTF-8 without
 * NUL gives a string that reads back. */
#include "formats/json_strict.h"
#include "fuzz_check.h"

#include <math.h>
#include <string.h>

static void walk(const qc_json_node *n)
{
    for (; n; n = qc_json_next(n)) {
        uint64_t u = 0;
        double d = 0.0;
        const char *s = NULL;
        int b = 0;
        qc_json_kind kind = qc_json_kind_of(n);
        FUZZ_CHECK((qc_json_as_string(n, "x", &s, NULL) == QC_OK) == (kind == QC_JSON_STRING));
        FUZZ_CHECK((qc_json_as_bool(n, "x", &b, NULL) == QC_OK) == (kind == QC_JSON_BOOL));
        if (qc_json_as_double(n, "x", &d, NULL) == QC_OK)
            FUZZ_CHECK(kind == QC_JSON_NUMBER && isfinite(d));
        if (qc_json_as_u64(n, "x", &u, NULL) == QC_OK)
            FUZZ_CHECK(kind == QC_JSON_NUMBER && u < UINT64_C(1) << 53);
        if (kind == QC_JSON_OBJECT) {
            const qc_json_node *m = qc_json_first(n);
            /* Without duplicates, looking up the key of the first member gives that member. */
            if (m)
                FUZZ_CHECK(qc_json_get(n, qc_json_key(m)) == m);
        }
        if (kind == QC_JSON_OBJECT || kind == QC_JSON_ARRAY)
            walk(qc_json_first(n));
    }
}

static void splice(const char *text, size_t len, const char *key, const char *value)
{
    qc_strbuf out;
    qc_json *doc = NULL;
    qc_strbuf_init(&out, len + 1000);
    FUZZ_CHECK(qc_strbuf_add(&out, text, len, NULL) == QC_OK);
    FUZZ_CHECK(qc_json_splice(&out, NULL, key, value, NULL) == QC_OK);
    FUZZ_CHECK(qc_json_parse(&doc, out.data, out.len, 0, NULL) == QC_OK);
    const qc_json_node *n = qc_json_get(qc_json_root(doc), key);
    FUZZ_CHECK((n != NULL) == (value != NULL));
    if (n)
        FUZZ_CHECK(qc_json_bool_or(n, 0) == 1);
    qc_json_destroy(doc);
    qc_strbuf_deinit(&out);
}

static void quote(const char *bytes, size_t len)
{
    qc_strbuf out;
    qc_json *doc = NULL;
    const char *s = NULL;
    qc_strbuf_init(&out, 8 * len + 100);
    qc_json_quote(&out, bytes, len);
    FUZZ_CHECK(qc_strbuf_status(&out, NULL) == QC_OK);
    if (qc_json_parse(&doc, out.data, out.len, 0, NULL) == QC_OK) {
        FUZZ_CHECK(qc_json_as_string(qc_json_root(doc), "x", &s, NULL) == QC_OK);
        FUZZ_CHECK(strlen(s) == len && memcmp(s, bytes, len) == 0);
    }
    qc_json_destroy(doc);
    qc_strbuf_deinit(&out);
}

const fuzz_limits fuzz_may_allocate = {1u << 20, 256};

int fuzz_one(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    qc_json *doc = NULL;
    qc_json *integers = NULL;
    qc_json *python = NULL;
    qc_error err = {0};
    qc_status st = qc_json_parse(&doc, text, size, 0, &err);
    qc_status st_integers = qc_json_parse(&integers, text, size, QC_JSON_INTEGERS, NULL);
    FUZZ_CHECK(st == QC_OK || (st == QC_ERR_INPUT && err.msg[0] && !doc));
    qc_status st_python = qc_json_parse(&python, text, size, QC_JSON_PYTHON, NULL);
    FUZZ_CHECK(st_integers == QC_ERR_INPUT || st == QC_OK);
    FUZZ_CHECK(st_python == QC_OK || st == QC_ERR_INPUT);
    if (st_python == QC_OK)
        walk(qc_json_root(python));
    if (st == QC_OK) {
        walk(qc_json_root(doc));
        if (qc_json_kind_of(qc_json_root(doc)) == QC_JSON_OBJECT) {
            const qc_json_node *m = qc_json_first(qc_json_root(doc));
            splice(text, size, "quantization_config", "true");
            splice(text, size, "quantization_config", NULL);
            for (int i = 0; m && i < 3; i++, m = qc_json_next(m)) {
                splice(text, size, qc_json_key(m), "true");
                splice(text, size, qc_json_key(m), NULL);
            }
        }
    }
    quote(text, size);
    qc_json_destroy(doc);
    qc_json_destroy(integers);
    qc_json_destroy(python);
    return 0;
}
